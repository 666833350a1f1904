"""Import TensorDict's memory-map folders and the dumps of TorchRL's buffers: find their episodes.

`expstore.data.memory_maps` reads the files. TorchRL keeps its data sets below `~/.cache/torchrl` in the same
format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from expstore.core.values import Array, Key
from expstore.data.memory_maps import MemoryMapFolder, is_tensordict_folder
from expstore.datasets.episode import End, Part, Reader, Rows
from expstore.datasets.kind import Kind
from expstore.datasets.samples import make_walks
from expstore.datasets.source_paths import check_folder, parses_source
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError
from expstore.exchange.foreign_rows import rows_differ

_PIECE_BYTES = 16 << 20
_TRAJECTORY: Key = ("collector", "traj_ids")
#: Fields whose next values show whether the next row continues an episode.
_OBSERVATIONS = ("observation", "pixels")


class TensorDictReader(Reader):
    """Read the rows of a TensorDict's memory-map folder, or of a dump of a TorchRL buffer.

    Rows are stored unchanged, except for `index`; if a batch has several dims, the first one counts the rows.
    Rows of a ring are read oldest first, and slots that were never written are left out. An episode ends
    where `("next", "done")`, `terminated` or `truncated` is True; it is cut where the next `observation` or
    `pixels` of a row differs from that of the following row. With trajectory ids,
    `("collector", "traj_ids")`, these determine the episodes instead.

    Texts and other objects that are equal for all rows are stored in `rb.meta["tensordict"]` if the folder
    has them as JSON; those kept as pickles, `other.pickle`, are left out and named there.

    Args:
        source: The folder.

    Raises:
        NotFoundError: The folder does not exist.
        SchemaError: The folder has another format, or tensors that no field can hold.
        StorageError: A file is shorter than its shape says.

    Example:
        >>> from expstore.datasets import TensorDictReader, import_dataset, make_sample
        >>> source = make_sample("tensordict", "pen/torchrl")
        >>> done = import_dataset(TensorDictReader(source), "data.exp")
    """

    format: ClassVar[str] = "tensordict"

    @parses_source
    def __init__(self, source: str | Path) -> None:
        self._path = local_path(source)
        check_folder(self._path)
        if not is_tensordict_folder(self._path):
            raise SchemaError(
                f"{self._path} is neither a memory-map folder of a TensorDict nor a dump of a TorchRL buffer"
            )
        self._folder = MemoryMapFolder(self._path)

    def parts(self) -> list[Part]:
        """Return the folder."""
        return [Part(name=self._path.name, files=sorted(self._folder.files))]

    def facts(self) -> Mapping[str, Any]:
        """Return the values that are not tensors, and the names of those that are left out."""
        return {"tensordict": {"values": self._folder.constants, "left_out": self._folder.left_out}}

    def count_rows(self, part: Part) -> int:
        """Return the number of rows."""
        return len(self._folder.order)

    def episodes(self, part: Part) -> Iterator[Rows]:
        """Yield the rows, cut at the ends of episodes."""
        size = max(1, _PIECE_BYTES // max(1, self._folder.row_bytes))
        count = len(self._folder.order)
        for start in range(0, count, size):
            # One row more, to see whether it continues the last one.
            columns = self._folder.read(start, start + size + 1)
            here = min(size, count - start)
            first = 0
            for last, end in self._ends(columns, here):
                if last >= first:
                    yield self._rows(columns, slice(first, last + 1), end)
                    first = last + 1
            if first < here:
                yield self._rows(columns, slice(first, here), "open")

    def _rows(self, columns: Mapping[Key, Array], rows: slice, end: End) -> Rows:
        return Rows(columns_by_key={key: values[rows] for key, values in columns.items()}, end=end)

    def _ends(self, columns: Mapping[Key, Array], count: int) -> list[tuple[int, End]]:
        """Return the positions of episode ends among the first rows, and how each episode ends."""
        if _TRAJECTORY in columns:
            return []
        has_next = any(key[0] == "next" for key in columns)
        keys: dict[str, Key] = {
            name: ("next", name) if has_next else (name,) for name in ("terminated", "truncated", "done")
        }
        flags = {name: _find_flagged(columns[key], count) for name, key in keys.items() if key in columns}
        ended = np.zeros(count, bool)
        for flag in flags.values():
            ended |= flag
        seams = np.zeros(count, bool)
        for key in columns:
            after = columns.get(("next", *key)) if key[0] in _OBSERVATIONS else None
            if after is not None and after.shape == columns[key].shape:
                rows = min(count, len(after) - 1)
                seams[:rows] |= rows_differ(after[:rows], columns[key][1 : rows + 1])
        found: list[tuple[int, End]] = []
        for row in np.flatnonzero(ended | seams).tolist():
            if not ended[row]:
                found.append((row, "cut"))
            elif "truncated" in flags and flags["truncated"][row]:
                found.append((row, "truncated"))
            else:
                found.append((row, "terminated"))
        return found


def _find_flagged(values: Array, count: int) -> Array:
    """Return a mask of the first rows in which a flag is set."""
    return np.asarray(values[:count].reshape(count, -1).any(axis=1))


def _make_sample(path: Path) -> None:
    import torch  # here, so that the formats are listed without it
    from tensordict import TensorDict

    parts = []
    for walk in make_walks():
        columns = {
            ("observation",): walk.states[:-1],
            ("action",): walk.actions,
            ("next", "observation"): walk.states[1:],
            ("next", "reward"): walk.rewards[:, None],
            ("next", "done"): (walk.terminated | walk.truncated)[:, None],
            ("next", "terminated"): walk.terminated[:, None],
            ("next", "truncated"): walk.truncated[:, None],
        }
        parts.append({key: torch.from_numpy(column) for key, column in columns.items()})
    rows = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    TensorDict(rows, [sum(walk.steps for walk in make_walks())]).memmap(path)


KIND = Kind(
    reader=TensorDictReader,
    files="the folder",
    make_sample=_make_sample,
    endings="by `done`, `terminated` and `truncated`; cut where the next row does not continue the episode; "
    "with trajectory ids by these alone",
    recognize=lambda source: is_tensordict_folder(source.path),
)
