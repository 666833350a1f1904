"""Load what `dumps` of a TorchRL buffer wrote into a buffer without rows.

Used by `ReplayBuffer.loads`. `expstore.data.memory_maps` reads the files; nothing is unpickled.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from tensordict import TensorDict

from expstore.data.memory_maps import MemoryMapFolder, is_tensordict_folder
from expstore.disk.files import ReadingDisk
from expstore.disk.source_links import check_links
from expstore.errors import SnapshotError, StateError
from expstore.storages.base import Storage
from expstore.writers.writers import Writer

#: A file that every dump of a TorchRL buffer has.
_MARK = "buffer_metadata.json"
#: Bytes that are read and appended at a time.
_PIECE_BYTES = 16 << 20
#: Parts of a dump that are not loaded, and what each contains.
_OTHER_PARTS = {
    "sampler": "the sampler's state (priorities are 1)",
    "rng_state": "the state of the generator",
    "transform.t": "the state of the transforms",
}


def is_torchrl_dump(path: Path) -> bool:
    """Return whether `dumps` of a TorchRL buffer has written a folder."""
    disk = ReadingDisk()
    return disk.exists(path / _MARK)


def load_torchrl_dump(storage: Storage, writer: Writer, path: Path) -> None:
    """Append the rows of a dump to a storage without rows, the oldest row first.

    If it is interrupted, the rows that were appended so far remain.

    Args:
        storage: The storage, open for writing.
        writer: Appends the rows to it.
        path: The folder.

    Raises:
        StateError: The storage has rows.
        SnapshotError: The rows are not TensorDicts.
        SchemaError: The storage has other fields, or the rows have several dims.
        StorageError: A file is damaged.
    """
    if len(storage):
        raise StateError(
            f"torchrl wrote {path}, whose rows can be loaded only into a buffer without rows; this one has "
            f"{len(storage)}",
            hint="call rb.empty() first, or use another buffer",
        )
    check_links(path)
    if not is_tensordict_folder(path):
        raise SnapshotError(
            f"torchrl wrote {path}, but its rows are not TensorDicts",
            hint="load it into a buffer of torchrl, and pass its rows to extend()",
        )
    rows = MemoryMapFolder(path)
    step = max(1, _PIECE_BYTES // max(1, rows.row_bytes))
    count = len(rows.order)
    begin = 0 if storage.capacity is None else max(0, count - storage.capacity)
    for start in range(begin, count, step):
        columns = rows.read(start, min(start + step, count))
        tensors = {key: torch.from_numpy(column) for key, column in columns.items()}
        writer.extend(TensorDict(tensors, [len(next(iter(columns.values())))]))
    disk = ReadingDisk()
    lost = [
        what
        for name, what in _OTHER_PARTS.items()
        if disk.exists(path / name) and _has_files(disk, path / name)
    ]
    lost += [f"the field {name!r}" for name in (*rows.constants, *rows.left_out)]
    if lost:
        warnings.warn(
            f"{path} was written by torchrl: its {count - begin} rows were loaded, but not "
            + ", ".join(lost),
            UserWarning,
            stacklevel=3,
        )


def _has_files(disk: ReadingDisk, path: Path) -> bool:
    return not disk.is_dir(path) or bool(disk.names(path))
