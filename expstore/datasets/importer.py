"""Import a data set: write the episodes of a `Reader` to a new store.

Used by the data set classes, by the command line, and by programs with their own readers. It does not depend
on a format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from expstore._open import open as open_store
from expstore._settings import Layout
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.values import Array, Key, key_name
from expstore.datasets.episode import Episode, Part, Reader, Rows
from expstore.datasets.source_paths import UNREADABLE, check_file
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.episodes.facts import GROUP, SPLIT, TRAIN, pack_stored_info
from expstore.errors import ExpStoreError, SchemaError, StateError, StorageError
from expstore.exchange.base import Imported, Progress, describe_source, hash_file, no_progress
from expstore.exchange.fill import STATUSES, summarize_import
from expstore.storages.format.lineage import IMPORT
from expstore.storages.format.manifest import MANIFEST, Manifest, check_target

#: Approximate size in bytes of a batch that is written.
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 16_384
#: Number of pieces of episodes that are read ahead.
_READ_AHEAD = 4


def import_dataset(
    reader: Reader,
    target: str | Path,
    *,
    progress: Progress = no_progress,
    checking: Progress = no_progress,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
) -> Imported:
    """Make a store from the episodes of a reader.

    The rows have TorchRL's layout (see `Episode.columns`). Every part of the source is written under its own
    source name, which consists of the part's name and the SHA-256 of its files. `rb.meta["import"]` records
    the files and options from which the store was made. If the target was already made from the same files
    and options, nothing is done. Files that still have their recorded name, size and modification time are
    not hashed again.

    Processes and crashes: the store is made in a hidden folder next to the target, `.NAME.import`, and
    renamed when it is complete. After a crash or an error the folder remains, and the next import of the same
    files continues there; an import of other files starts again. Two imports to one target exclude each
    other.

    Args:
        reader: Reads the source.
        target: Folder of the store.
        progress: Called with the rows done and the total rows, 0 if the total is unknown.
        checking: Called with the bytes done and the total bytes while files are hashed, before the first row.
        fields: Storage options of single fields, as in `Layout`.

    Raises:
        StateError: The target exists and was not made from these files.
        NotFoundError: A file of the source, or the target's parent folder, is missing.
        SchemaError: Episodes have different fields or shapes; the message names part and episode.
        StorageError: A file cannot be read, or the disk failed.
        LockedError: Another process is importing to the target.

    Example:
        >>> from expstore.datasets import D4RLReader, import_dataset, make_sample
        >>> source = make_sample("d4rl", "hopper_medium-v2.hdf5")
        >>> done = import_dataset(D4RLReader(source), "hopper.exp")
        >>> episodes, rows = done.episodes, done.rows
    """
    path = local_path(target)
    layout = Layout(fields=fields or {})
    disk = Disk()
    with _reading("the source"):
        parts = list(reader.parts())
    building = path.resolve().with_name(f".{path.name}.import")
    is_there = disk.exists(path / MANIFEST)
    if not is_there:
        check_target(disk, path)
    known = _read_recorded_files(disk, path if is_there else building)
    described = _describe_parts(parts, known, checking)
    with _reading("the source"):
        made_of = json.loads(
            json.dumps({"format": reader.format, "options": dict(reader.options()), "parts": described})
        )
    if is_there:
        return _describe_import(path, made_of, reader)
    hashes = [str(part["sha256"]) for part in described]
    with _reading("the source"):
        facts = json.loads(json.dumps(dict(reader.facts())))
    made_of = {"import": made_of, **facts}
    rb = _open_building(building, made_of, {**reader.settings(), "layout": layout})
    try:
        folder = os.path.commonpath([Path(file).absolute().parent for part in parts for file in part.files])
        found = describe_source(
            folder, {part.name: digest for part, digest in zip(parts, hashes, strict=True)}
        )
        rb.storage.writer().settings.record_lineage({**found, "format": reader.format}, IMPORT)
        total = _total(reader, parts)
        done = 0
        sources = [f"{part.name}@{digest[:16]}" for part, digest in zip(parts, hashes, strict=True)]
        stored = _count_rows(rb)
        for place, (part, source) in enumerate(zip(parts, sources, strict=True)):
            if any(stored.get(later) for later in sources[place + 1 :]):
                done += stored.get(source, 0)  # complete: parts are written in order
                continue
            done = _import_part(rb, reader, part, source, stored.get(source, 0), done, total, progress)
        if not len(rb):
            raise SchemaError("the source has no rows")
        result = _describe(rb, path, reader)
    finally:
        rb.close()
    _rename(disk, building, path)
    return result


# -- which files -----------------------------------------------------------------------------------------


def _read_recorded_files(disk: Disk, store: Path) -> dict[str, Mapping[str, Any]]:
    """Return the parts that a store, or an interrupted import, recorded, by name."""
    if not disk.exists(store / MANIFEST):
        return {}
    try:
        parts = Manifest.load(disk, store).meta["import"]["parts"]
        return {str(part["name"]): part for part in parts}
    except (ExpStoreError, KeyError, TypeError):  # a damaged store, or one that was not imported
        return {}


def _describe_parts(
    parts: Sequence[Part], known: Mapping[str, Mapping[str, Any]], checking: Progress
) -> list[dict[str, Any]]:
    """Return name, SHA-256, bytes and stamp of every part.

    Args:
        parts: The parts of the source.
        known: The recorded parts. A part with the same stamp is not hashed again.
        checking: Called with the bytes done and the total bytes.
    """
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        raise SchemaError("two parts of the source have the same name", hint="give every `Part` its own name")
    sizes = [[_size(Path(file)) for file in part.files] for part in parts]
    total, done = sum(map(sum, sizes)), 0
    described = []
    for part, own in zip(parts, sizes, strict=True):
        before, stamp = known.get(part.name, {}), _stamp(part)
        if before.get("stamp") == stamp:
            digest = str(before["sha256"])
            done += sum(own)
        else:
            digests = []
            for file, size in zip(part.files, own, strict=True):
                digests.append(_hash_file(Path(file), done, total, checking))
                done += size
            whole = "".join(digests).encode()
            digest = digests[0] if len(digests) == 1 else hashlib.sha256(whole).hexdigest()
        checking(done, total)
        described.append({"name": part.name, "sha256": digest, "bytes": sum(own), "stamp": stamp})
    return described


def _size(path: Path) -> int:
    check_file(path)
    return ReadingDisk().size(path)


def _stamp(part: Part) -> str:
    """Return a hash of the names, sizes and modification times of a part's files."""
    disk, files = ReadingDisk(), [Path(file) for file in part.files]
    facts = [[file.name, disk.size(file), disk.read_mtime(file)] for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _hash_file(path: Path, before: int, total: int, checking: Progress) -> str:
    """Return the SHA-256 of a file; `before` of `total` bytes have been hashed already."""

    def add(size: int) -> None:
        nonlocal before
        before += size
        checking(before, total)

    return hash_file(path, add)


def _remove_stamps(made_of: Any) -> Any:
    """Return the import record without stamps, so that copies of the files compare equal."""
    if not isinstance(made_of, Mapping) or "parts" not in made_of:
        return made_of
    parts = [{key: value for key, value in part.items() if key != "stamp"} for part in made_of["parts"]]
    return {**made_of, "parts": parts}


def _identity(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meta of a store without the stamps of its parts."""
    return {**meta, "import": _remove_stamps(meta.get("import"))}


def _describe_import(path: Path, made_of: Mapping[str, Any], reader: Reader) -> Imported:
    """Return the result of an earlier import of the same files.

    Raises:
        StateError: The store was made from other files.
    """
    with open_store(path, mode="r") as rb:
        if _remove_stamps(rb.meta.get("import")) != _remove_stamps(made_of):
            raise StateError(
                f"{path} exists and was not imported from these files",
                hint="choose another path, or remove it first",
            )
        return _describe(rb, path, reader)


# -- the store that is made ------------------------------------------------------------------------------


def _open_building(
    path: Path, made_of: Mapping[str, Any], settings: Mapping[str, Any]
) -> TensorDictReplayBuffer:
    """Open the store of an interrupted import of the same files, or make a new one."""
    disk = Disk()
    if disk.exists(path / MANIFEST):
        rb = open_store(path, mode="a")
        if _identity(rb.meta) == _identity(made_of):
            return rb
        rb.close()
    if disk.exists(path):
        disk.remove_tree(path)
    return open_store(path, mode="x", meta=dict(made_of), **settings)


def _count_rows(rb: TensorDictReplayBuffer) -> dict[str, int]:
    """Return the number of rows written by each source."""
    return dict(rb.sql("SELECT source, CAST(sum(length) AS BIGINT) FROM episodes GROUP BY source").fetchall())


def _describe(rb: TensorDictReplayBuffer, path: Path, reader: Reader) -> Imported:
    ((rows,),) = rb.sql("SELECT CAST(sum(length) AS BIGINT) FROM episodes").fetchall()
    return summarize_import(
        path,
        rows=rows,
        kept=len(rb),
        statuses=rb.sql(STATUSES).fetchall(),
        schema=rb.storage.require_schema(),
        keys=rb.storage.keys,
        notes=reader.notes(),
        names={},
    )


def _rename(disk: Disk, building: Path, path: Path) -> None:
    check_target(disk, path)
    disk.rename(building, path)
    disk.sync_dir(path.resolve().parent)


# -- rows ------------------------------------------------------------------------------------------------


def _total(reader: Reader, parts: Sequence[Part]) -> int:
    counts = []
    for part in parts:
        with _reading(_name(part)):
            counts.append(reader.count_rows(part))
    return 0 if None in counts else sum(count or 0 for count in counts)


def _import_part(
    rb: TensorDictReplayBuffer,
    reader: Reader,
    part: Part,
    source: str,
    stored: int,
    done: int,
    total: int,
    progress: Progress,
) -> int:
    """Write the rows of a part that the store lacks; return the total number of rows done."""
    batch = _Batch(rb, source)
    seen, is_open, split = 0, False, None
    facts: list[Mapping[str, Any]] = []
    for columns, episode in _read(reader, part):
        if not is_open:
            split = episode.split or episode.facts.get(SPLIT)
            facts.append({name: fact for name, fact in episode.facts.items() if name not in (GROUP, SPLIT)})
        count = len(episode)
        skip = min(count, max(0, stored - seen))
        if skip < count:
            if seen < stored or (seen == stored > 0 and is_open):
                # The last stored row belongs to this episode.
                rb.episodes.resume(source, check=False)
            batch.use_split(split)
            batch.add({key: values[skip:] for key, values in columns.items()}, count - skip)
            if episode.end == "cut":
                batch.write()
                rb.episodes.end(source)
        seen += count
        is_open = episode.end == "open"
        progress(done + seen, total)
    batch.write()
    if seen < stored:
        raise StateError(f"{part.name} has {seen} rows, but an earlier import wrote {stored} of it")
    if is_open:
        rb.episodes.end(source)
    _annotate(rb, source, facts)
    rb.flush()
    return done + seen


def _read(reader: Reader, part: Part) -> Iterator[tuple[dict[Key, Array], Episode | Rows]]:
    """Yield the pieces of episodes of a part, each with its rows.

    Errors name the part and the episode.
    """
    number = 0
    pieces = _read_ahead(reader.episodes(part))
    while True:
        place = f"{_name(part)}, episode {number}"
        with _reading(place):
            piece = next(pieces, None)
        if piece is None:
            return
        try:
            columns = piece.columns()
        except ExpStoreError as exc:
            raise exc.at(place) from exc
        yield columns, piece
        number += piece.end != "open"


def _name(part: Part) -> str:
    """Return the name of a part for errors: the file's path if the part is named after its only file."""
    files = [Path(file) for file in part.files]
    return str(files[0]) if len(files) == 1 and files[0].name == part.name else part.name


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Convert errors of a reader to errors of expstore that name what was read."""
    try:
        yield
    except ExpStoreError as exc:
        raise exc.at(what) from exc
    except UNREADABLE as exc:
        raise StorageError(f"cannot read {what}: {exc!r}") from exc


def _read_ahead(episodes: Iterator[Episode | Rows]) -> Iterator[Episode | Rows]:
    """Yield episodes that a thread reads ahead, so that decompression and writing use one core each."""
    pool = ThreadPoolExecutor(1, "expstore-reader")
    try:
        pending = deque(pool.submit(next, episodes, None) for _ in range(_READ_AHEAD))
        while (episode := pending.popleft().result()) is not None:
            pending.append(pool.submit(next, episodes, None))
            yield episode
    finally:
        pool.shutdown(cancel_futures=True)


def _annotate(rb: TensorDictReplayBuffer, source: str, facts: Sequence[Mapping[str, Any]]) -> None:
    """Annotate the episodes of a source, in the reader's order."""
    if not any(facts):
        return
    found = rb.sql(
        "SELECT episode_id FROM episodes WHERE source = ? ORDER BY episode_id", [source]
    ).fetchall()
    said = zip(found, facts, strict=True)
    rb.episodes.annotate_texts({episode: pack_stored_info(info) for (episode,), info in said if info})


class _Batch:
    """Collect rows and write them to a source in large batches."""

    def __init__(self, rb: TensorDictReplayBuffer, source: str) -> None:
        self._rb, self._source = rb, source
        self._split: str | None = None
        self._pieces: list[dict[Key, Array]] = []
        self._rows = self._bytes = 0

    def use_split(self, split: str | None) -> None:
        """Write the rows that are added from now on with this split."""
        split = None if split == TRAIN else split
        if split != self._split:
            self.write()
            self._split = split

    def add(self, columns: dict[Key, Array], count: int) -> None:
        """Add rows; write them if there are enough."""
        row_bytes = max(1, sum(values.nbytes for values in columns.values()) // count)
        most = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
        for start in range(0, count, most):
            piece = {key: values[start : start + most] for key, values in columns.items()}
            self._pieces.append(piece)
            self._rows += min(most, count - start)
            self._bytes += row_bytes * min(most, count - start)
            if self._rows >= most or self._bytes >= _BATCH_BYTES:
                self.write()

    def write(self) -> None:
        """Write the rows that were added."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        rows, self._rows, self._bytes = self._rows, 0, 0
        first = pieces[0]
        for piece in pieces[1:]:
            if piece.keys() != first.keys():
                differing = sorted(map(key_name, piece.keys() ^ first.keys()))
                raise SchemaError(f"some episodes have {', '.join(differing)}, and others do not")
        columns = {key: self._tensor(key, _join([piece[key] for piece in pieces], key)) for key in first}
        self._rb.extend(TensorDict(columns, [rows]), source=self._source, split=self._split)

    def _tensor(self, key: Key, values: Array) -> torch.Tensor:
        """Return values as a tensor. NumPy has no bfloat16: a reader returns its bits as uint16."""
        schema = self._rb.schema
        tensor = torch.from_numpy(values)
        is_bfloat16 = schema is not None and key in schema and schema[key].dtype == "bfloat16"
        return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def _join(pieces: Sequence[Array], key: Key) -> Array:
    try:
        found = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    except ValueError as exc:
        shapes = sorted({str(list(piece.shape[1:])) for piece in pieces})
        raise SchemaError(f"{key_name(key)!r} has rows of different shapes: {', '.join(shapes)}") from exc
    return found if found.flags.writeable else found.copy()
