"""Read Open X-Embodiment's data sets from the Hugging Face Hub: tar archives of pickled episodes.

Source of the format: https://huggingface.co/datasets/jxu124/OpenX-Embodiment. The archives of a data set are
called `NAME/NAME_00000.tar` and so on. A member `KEY.data.pickle` is a dict whose `steps` are dicts of the
step's observation, action, reward and flags. An image is a dict of `bytes`, a PNG or JPEG file, and `path`.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, cast

import numpy as np

from expstore.core.values import Array, Key, key_name
from expstore.datasets.episode import End, Episode, Part, Reader
from expstore.datasets.episode_texts import text_fact
from expstore.datasets.frames import decode_image, decode_images
from expstore.datasets.source_paths import check_exists, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError, NotFoundError, SchemaError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.numpy_unpickler import load_arrays

LastStep = Literal["observation", "transition"]
Kind = Literal["numbers", "image", "text", "left out"]

_SUFFIX = ".data.pickle"
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_PIECE_BYTES = 16 << 20
#: Errors of reading a damaged or truncated archive.
_DAMAGED = (tarfile.TarError, EOFError, zlib.error)
#: A few bytes of a pickle can expand to a huge number of fields or values, by referring to one list
#: repeatedly.
_MOST_FIELDS = 1000
_MOST_VALUES = 1 << 26
#: Values of a step that are not stored under their own names.
_OWN: tuple[Key, ...] = (("reward",), ("is_first",), ("is_last",), ("is_terminal",))


class OpenXReader(Reader):
    """Read the episodes of a data set of Open X-Embodiment.

    - `observation`, `action`, `reward` of a step become `observation`, `action`, `next.reward`. Other numbers
      (`discount`, `language_embedding`) keep their names, `is_first` becomes `is_init`.
    - Images become uint8 `(channels, height, width)`. Python floats become float32, arrays keep their dtype.
    - Texts (`language_instruction`) become annotations of the episode; a text that changes is a list of
      `{"step", "text"}`.
    - `episode` is the number of the episode in the data set, `frame` the number of the step in its episode.
    - The last step determines how an episode ends: terminated if `is_terminal` is set, cut if `is_last` is
      not set, otherwise truncated. Both flags are used only in the last step.
    - `rb.meta["openx"]["left_out"]` names what cannot be stored (None, lists of texts). Episodes without
      steps have no rows.

    `numpy_unpickler` reads the pickles, without running code that they name.

    Args:
        source: An archive, or a folder of archives, or a folder of files `KEY.data.pickle`, read in the order
            of their names.
        last_step: Meaning of the last step of an episode. "transition", as in TorchRL: a row like the others;
            the observation after it is not recorded. "observation", as in RLDS: only its observation is used,
            as the one after the last action; episodes of one step have no rows.
        trust_pickle: Whether to use Python's own unpickler, which accepts classes other than NumPy's. Pickles
            can run any code: set it only if you trust the authors of the files.

    Raises:
        NotFoundError: The archive does not exist, or the folder has none.
        SchemaError: A file does not contain such a dict, or the fields of episodes differ.
        ModuleNotFoundError: There are images, and Pillow is not installed.

    Example:
        >>> from expstore.datasets import OpenXReader, import_dataset
        >>> done = import_dataset(OpenXReader("cmu_stretch"), "data.exp")
    """

    format: ClassVar[str] = "openx"

    @parses_source
    def __init__(
        self, source: str | Path, *, last_step: LastStep = "transition", trust_pickle: bool = False
    ) -> None:
        if last_step not in ("observation", "transition"):
            raise SchemaError(f"last_step={last_step!r} is not one of 'observation' and 'transition'")
        path, disk = local_path(source), ReadingDisk()
        check_exists(path)
        self._last_step, self._trust_pickle = last_step, trust_pickle
        files = [path / name for name in sorted(disk.names(path))] if disk.is_dir(path) else [path]
        archives = [one for one in files if one.name.endswith(_ARCHIVES)]
        pickles = [one for one in files if one.name.endswith(_SUFFIX)]
        if archives:
            self._parts = [Part(name=one.name, files=[one]) for one in archives]
        elif pickles:
            self._parts = [Part(name=path.name, files=pickles)]
        else:
            raise NotFoundError(f"there is no .tar archive and no *{_SUFFIX} file in {path}")
        #: Number of records by part, as far as it is known.
        self._records: dict[str, int] = {}
        self._known: dict[Key, Kind] | None = None

    def parts(self) -> list[Part]:
        """Return the archives; a folder without archives is one part."""
        return self._parts

    def options(self) -> Mapping[str, Any]:
        """Return the meaning of the last step."""
        return {"last_step": self._last_step}

    def facts(self) -> Mapping[str, Any]:
        """Return which fields of a step are texts, and which are left out."""
        kinds = self._kinds()
        return {
            "openx": {
                "texts": [".".join(key) for key, kind in kinds.items() if kind == "text"],
                "left_out": [".".join(key) for key, kind in kinds.items() if kind == "left out"],
            }
        }

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes, long ones in pieces of 16 MB."""
        number = self._first_number(part)
        for name, file in self._files(part):
            with _name_file(name):
                steps = self._read(file)
                if steps is not None:
                    yield from self._pieces(steps, number)
            number += 1

    # -- one episode -----------------------------------------------------------------------------------

    def _pieces(self, steps: _Steps, number: int) -> Iterator[Episode]:
        known = self._kinds()
        if steps.kinds != known:
            differing = sorted(key_name(key) for key, _ in steps.kinds.items() ^ known.items())
            raise SchemaError(f"the steps differ from those of the first episode in {', '.join(differing)}")
        has_last = self._last_step == "observation"
        count = len(steps) - has_last
        end, facts = steps.end(), steps.facts(max(1, count))
        size = max(1, _PIECE_BYTES // max(1, steps.row_bytes()))
        for start in range(0, count, size):
            stop = min(start + size, count)
            is_open = stop < count
            states = steps.read("observation", start, stop + (is_open or has_last))
            values = steps.read(None, start, stop)
            action = {key: rows for key, rows in values.items() if key[0] == "action"}
            fields: dict[str | Key, Array] = {
                key: rows for key, rows in values.items() if key[0] != "action" and key not in _OWN
            }
            if ("is_first",) in values:
                fields["is_init"] = values["is_first",].reshape(stop - start, 1) > 0.5
            fields["episode"] = np.full(stop - start, number)
            fields["frame"] = np.arange(start, stop)
            reward = values.get(("reward",))
            yield Episode(
                observation=_tree(states),
                action=_tree(action),
                reward=None if reward is None else reward.reshape(stop - start, -1),
                end="open" if is_open else end,
                fields=fields,
                facts=facts,
            )

    # -- files -----------------------------------------------------------------------------------------

    def _read(self, file: BinaryIO) -> _Steps | None:
        """Return the steps of an episode; None if it has none."""
        if self._trust_pickle:
            try:
                found = pickle.load(file)
            except Exception as exc:  # code that a pickle names may raise anything
                raise StorageError(f"cannot read a pickle: {exc!r}") from exc
        else:
            found = load_arrays(file)
        if not isinstance(found, dict) or not isinstance(found.get("steps"), list):
            raise SchemaError("the pickle has no list 'steps'")
        return _Steps(found["steps"]) if found["steps"] else None

    def _kinds(self) -> Mapping[Key, Kind]:
        """Return the fields of the first episode and how they are stored; all episodes must have these."""
        if self._known is None:
            for part in self._parts:
                for name, file in self._files(part):
                    with _name_file(name):
                        steps = self._read(file)
                    if steps is not None:
                        self._known = steps.kinds
                        return self._known
            raise SchemaError("the source has no episodes")
        return self._known

    def _first_number(self, part: Part) -> int:
        """Return the number of episodes in the parts before this one; archives are listed, not read."""
        number = 0
        for before in self._parts:
            if before.name == part.name:
                break
            if before.name not in self._records:
                with _archive(Path(before.files[0])) as archive:
                    self._records[before.name] = sum(map(_is_record, archive))
            number += self._records[before.name]
        return number

    def _files(self, part: Part) -> Iterator[tuple[str, BinaryIO]]:
        if Path(part.files[0]).name.endswith(_SUFFIX):
            for path in map(Path, part.files):
                with open_to_read(path) as raw, io.BufferedReader(cast(Any, raw)) as file:
                    yield path.name, file
            return
        with _archive(Path(part.files[0])) as archive:
            for member in archive:
                if _is_record(member):
                    yield member.name, cast(BinaryIO, archive.extractfile(member))


@contextmanager
def _archive(path: Path) -> Iterator[tarfile.TarFile]:
    with open_to_read(path) as raw:
        try:
            with tarfile.open(fileobj=cast(Any, raw), mode="r:*") as archive:
                yield archive
        except _DAMAGED as exc:
            raise StorageError(
                f"{path} is not a tar archive, or ends early: {exc}", hint="copy the file again"
            ) from exc


def _is_record(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.endswith(_SUFFIX)


@contextmanager
def _name_file(name: str) -> Iterator[None]:
    """Add the name of a file to errors, including those of the archive that contains it."""
    try:
        yield
    except ExpStoreError as exc:
        raise type(exc)(f"{name}: {exc}") from exc
    except _DAMAGED as exc:
        raise StorageError(f"cannot read {name}: {exc}", hint="copy the archive again") from exc


# -- the steps of an episode -----------------------------------------------------------------------------


class _Steps:
    """Hold the steps of an episode as columns; images are decoded when they are read.

    Args:
        steps: One dict per step; at least one.

    Raises:
        SchemaError: The steps do not have the same fields.
    """

    def __init__(self, steps: Sequence[Any]) -> None:
        #: The fields, and how they are stored.
        self.kinds: dict[Key, Kind] = {}
        self._columns: dict[Key, Any] = {}
        self._count = len(steps)
        rows = [dict(_leaves((), step, [0])) for step in steps]
        for place, row in enumerate(rows):
            if row.keys() != rows[0].keys():
                differing = ", ".join(sorted(key_name(key) for key in row.keys() ^ rows[0].keys()))
                raise SchemaError(f"step {place} has other fields than step 0: {differing}")
        for key in rows[0]:
            self.kinds[key], self._columns[key] = _column(key, [row[key] for row in rows])
        for name in ("observation", "action"):
            if not any(key[0] == name and kind in ("numbers", "image") for key, kind in self.kinds.items()):
                raise SchemaError(f"the steps have no {name}")

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._count

    def end(self) -> End:
        """Return how the episode ends."""
        if self._last("is_terminal"):
            return "terminated"
        return "cut" if self._last("is_last") is False else "truncated"

    def _last(self, name: str) -> bool | None:
        if self.kinds.get((name,)) != "numbers":
            return None
        return bool(np.any(self._columns[name,][-1]))

    def facts(self, count: int) -> dict[str, Any]:
        """Return the texts of the first steps."""
        return {
            ".".join(key): text_fact(self._columns[key][:count])
            for key, kind in self.kinds.items()
            if kind == "text"
        }

    def row_bytes(self) -> int:
        """Return the size of a step's values in bytes."""
        return sum(
            decode_image(self._columns[key][0]).nbytes if kind == "image" else self._columns[key][0].nbytes
            for key, kind in self.kinds.items()
            if kind in ("numbers", "image")
        )

    def read(self, group: str | None, start: int, stop: int) -> dict[Key, Array]:
        """Return values of some steps by key: those of a group, or those outside of `observation`."""
        found: dict[Key, Array] = {}
        for key, kind in self.kinds.items():
            if (key[0] == group) if group else (key[0] != "observation"):
                if kind == "numbers":
                    found[key] = self._columns[key][start:stop]
                elif kind == "image":
                    found[key] = decode_images(key_name(key), self._columns[key][start:stop])
        return found


def _leaves(key: Key, value: Any, seen: list[int]) -> Iterator[tuple[Key, Any]]:
    """Yield the values of a step by key; an image is represented by its bytes."""
    seen[0] += 1
    if seen[0] > _MOST_FIELDS:
        raise SchemaError(f"a step has more than {_MOST_FIELDS} fields")
    if not isinstance(value, Mapping):
        if not key:
            raise SchemaError(f"a step is a {type(value).__name__}; a dict is expected")
        yield key, value
    elif "bytes" in value and value.keys() <= {"bytes", "path"}:
        yield key, value["bytes"]
    else:
        for name, below in value.items():
            yield from _leaves((*key, str(name)), below, seen)


def _column(key: Key, values: Sequence[Any]) -> tuple[Kind, Any]:
    """Return how the values of a field are stored, and the values."""
    first = values[0]
    if isinstance(first, (str, bytes)):
        if not all(isinstance(value, type(first)) for value in values):
            raise SchemaError(f"{key_name(key)!r} is not {type(first).__name__} in all steps")
        if isinstance(first, bytes) and first.startswith((b"\x89PNG", b"\xff\xd8\xff")):
            return "image", values
        return "text", [
            value.decode(errors="replace") if isinstance(value, bytes) else value for value in values
        ]
    if None in (types := {None if value is None else type(value) for value in values}):
        if len(types) > 1:
            raise SchemaError(f"{key_name(key)!r} is None in some steps")
        return "left out", None
    for value in values:
        _check_size(key, value, len(values))
    is_typed = any(isinstance(value, (np.ndarray, np.generic)) for value in values)
    try:
        found = np.asarray(values)
    except ValueError as exc:
        raise SchemaError(f"{key_name(key)!r} has another shape in some steps") from exc
    if found.dtype.kind not in "biuf":
        return "left out", None
    if not is_typed and found.dtype.kind == "f":
        found = found.astype(np.float32)  # torch converts Python floats to float32
    return "numbers", found


def _check_size(key: Key, value: Any, steps: int) -> None:
    """Raise SchemaError if nested lists expand to more numbers than an episode can have."""
    size = steps
    while isinstance(value, (list, tuple)) and value:
        size *= len(value)
        if size > _MOST_VALUES:
            raise SchemaError(f"{key_name(key)!r} has more than {_MOST_VALUES} values")
        value = value[0]


def _tree(values: Mapping[Key, Array]) -> Any:
    """Return values as nested mappings below the first name of their keys, or the array of that name."""
    found: dict[str, Any] = {}
    for key, rows in values.items():
        if len(key) == 1:
            return rows
        below = found
        for part in key[1:-1]:
            below = below.setdefault(part, {})
        below[key[-1]] = rows
    return found
