"""Build a store from the state and the parts that `engine/increment.py` has captured.

The store has the same uuid, ids, episodes, priorities, counts, draws and consumers as the captured one at
that moment, and is closed. docs/format.md specifies states and parts.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.parsing import parsing
from expstore.core.values import Array, IntArray, cut_run
from expstore.disk.atomic_build import build_folder
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk
from expstore.disk.threads import Threads
from expstore.errors import CorruptionError, StateError
from expstore.storages.columns.checksums import blocks_of
from expstore.storages.columns.column import Column, Deleted, Run
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.flat import FlatColumn
from expstore.storages.columns.packed.column import PackedPiece
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.format.control_page import PAGE
from expstore.storages.format.journal import ALIGN, Journal, Kind
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import COLUMNS, JOURNAL, STATE
from expstore.storages.format.records import Redo
from expstore.storages.format.write_key_file import KEYS, pack_keys
from expstore.storages.snapshots.increment_parts import (
    FORMAT,
    Entry,
    Fetch,
    Section,
    unpack_ids,
    unpack_part,
    walk,
)
from expstore.storages.snapshots.restore import create_columns, finish_columns

#: Parts that are fetched at the same time.
FETCHES = 8
#: Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]


def parts_of(state: dict[str, Any], fetch: Fetch) -> set[str]:
    """Return the names of all parts that a state needs, pages included.

    Args:
        state: The state of an increment.
        fetch: Returns a part; only called for pages of the list of parts.

    Raises:
        CorruptionError: A page is damaged.
    """
    others = [name for which in ("values", "logs") for name, _ in state[which]["parts"]]
    return {one.name for one in walk(_entries(state), state["kept"], fetch)}.union(others)


def bytes_of(state: dict[str, Any]) -> int:
    """Return the bytes of all parts of a state; some of those in pages may be needless."""
    others = [(name, size) for which in ("values", "logs") for name, size in state[which]["parts"]]
    return sum(one.size for one in _entries(state)) + sum(dict(others).values())


def _entries(state: dict[str, Any]) -> list[Entry]:
    return [Entry(*one) for one in state["parts"]]


def build(
    folder: Path,
    state: dict[str, Any],
    fetch: Fetch,
    *,
    disk: Disk,
    progress: Progress | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Build the store of a state: completely, or not at all.

    Crashes: the folder has the complete store, or is as before. The caller prevents that two builds of it run
    at once. Memory: a few parts.

    Args:
        folder: The folder of the store; missing or empty.
        state: The state of an increment.
        fetch: Returns the bytes of a part; called by several threads.
        disk: The disk on which files are accessed.
        progress: Called with bytes done and bytes in all.
        files: More files, by their names.

    Raises:
        StateError: The state is of a later version of the library.
        CorruptionError: The state or a part is damaged.
        StorageError: The disk failed or is full.
    """
    if state.get("format") != FORMAT:
        raise StateError(
            f"the shipped state has format {state.get('format')}; this version reads format {FORMAT}",
            hint="install a newer expstore",
        )
    disk.make_dir(folder.parent)
    with build_folder(disk, folder) as scrap, parsing("the shipped state"):
        _Build(disk, scrap, state, fetch, progress or (lambda done, whole: None)).run(files)


class _Build:
    """Write the files of a store into an empty folder.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder.
        state: The state.
        fetch: Returns a part.
        progress: Called with bytes done and bytes in all.
    """

    def __init__(
        self, disk: Disk, folder: Path, state: dict[str, Any], fetch: Fetch, progress: Progress
    ) -> None:
        self._disk, self._folder, self._state, self._fetch = disk, folder, state, fetch
        self._progress, self._done = progress, 0
        self._manifest = Manifest.unpack(json.dumps(state["manifest"]).encode(), "the shipped state")
        self._low, self._last = state["low"], state["last"]
        self._written: list[Path] = []
        self._folders = {folder}
        self._blocks: set[int] = set()
        self._whole = bytes_of(state)

    def run(self, files: Mapping[str, bytes]) -> None:
        """Write and sync all files, and the given ones."""
        pool = Threads()
        if self._manifest.schema is not None:
            self._build_columns(pool)
        self._build_logs()
        self._put(MANIFEST, self._manifest.pack())
        self._put(STATE, bytes(PAGE))  # of no writer; a missing page would be reported as lost
        self._build_journal()
        for name, data in files.items():
            self._put(name, data)
        self._progress(self._whole, self._whole)
        sync_paths(self._disk, self._written, sorted(self._folders), pool)

    def _put(self, name: str, data: bytes) -> None:
        self._disk.put(self._folder / name, data)
        self._written.append(self._folder / name)

    def _read(self, names: Sequence[str] | Iterator[str]) -> Iterator[tuple[str, list[Section]]]:
        """Yield the sections of parts in order; the next ones are fetched meanwhile."""
        pending: deque[tuple[str, Future[bytes]]] = deque()
        ahead = iter(names)
        with ThreadPoolExecutor(FETCHES, "expstore-fetch") as pool:
            try:
                while True:
                    for name in ahead:
                        pending.append((name, pool.submit(self._fetch, name)))
                        if len(pending) == FETCHES:
                            break
                    if not pending:
                        return
                    name, future = pending.popleft()
                    data = future.result()
                    yield name, unpack_part(name, data)
                    self._done = min(self._done + len(data), self._whole)
                    self._progress(self._done, self._whole)
            finally:
                for _, future in pending:
                    future.cancel()

    # -- columns ---------------------------------------------------------------------------------

    def _build_columns(self, pool: Threads) -> None:
        manifest, disk, folder = self._manifest, self._disk, self._folder
        assert manifest.schema is not None, "the caller has looked"
        group = create_columns(disk, folder, manifest, manifest.schema, pool)
        counts = None
        try:
            group.ensure(min(self._last, manifest.slots or self._last))
            if self._state["counted"]:
                SampledColumn.make(disk, folder / COLUMNS, manifest.slots, ready=group.ready, pool=pool)
                counts = SampledColumn(disk, folder / COLUMNS, manifest.slots)
                self._written += [file.path for file in counts.column.files]
            columns = {"priority": group.row_fields[-1]}
            if counts is not None:
                columns["sampled"] = counts.column
            self._write_rows(group, columns)
            self._write_values(columns)
            # Older than what the captured store wrote next, so that no row counts as changed since.
            stamp = self._state["generation"], max(1, self._state["sequence"] - 1)
            ids = manifest.deleted
            deleted = Deleted(ids, ids, self._low, ids) if ids else None
            self._written += finish_columns(disk, folder, group, self._blocks, stamp, deleted)
            self._folders |= group.new_folders
        finally:
            group.close()
            if counts is not None:
                counts.close()

    def _write_rows(self, group: WritableColumns, columns: dict[str, FlatColumn]) -> None:
        upto: dict[str, int] = {}

        def names() -> Iterator[str]:
            for entry in walk(_entries(self._state), self._state["kept"], self._fetch):
                if not entry.level:
                    upto[entry.name] = entry.last
                    yield entry.name

        next_id = self._state["kept"] + 1
        for name, sections in self._read(names()):
            for section in sections:
                if section.kind == "changed":
                    self._change_rows(group, section, upto[name])
                else:
                    next_id = self._append_rows(group, columns, section, upto[name], next_id)
        if next_id != self._last + 1:
            raise CorruptionError(
                f"the shipped state lacks rows: it has ids up to {next_id - 1} of {self._last}"
            )

    def _append_rows(
        self,
        group: WritableColumns,
        columns: dict[str, FlatColumn],
        section: Section,
        upto: int,
        next_id: int,
    ) -> int:
        """Write the rows of a section that count; return the id after them."""
        first, last = map(int, section.about["span"])
        count, at, values = last - first + 1, 0, dict[str, Array]()
        for field, size in section.about["values"].items():
            values[field] = np.frombuffer(section.data, columns[field].entry.numpy_dtype, count, at)
            at += size
        fixed = dict[int, Array]()
        for place, column in group.flat.items() if section.kind == "rows" else ():
            if column is columns["priority"]:
                fixed[place] = values["priority"]
                continue
            rows: Array = np.frombuffer(
                section.data, column.entry.numpy_dtype, count * column.entry.row_items, at
            )
            fixed[place] = rows.reshape(count, *column.entry.shape)
            at += rows.nbytes
        packed = dict[int, list[PackedPiece]]()
        for place in sorted(group.packed):
            packed[place], piece_first = [], first
            for n, is_chunk, size in section.about["packed"][str(place)]:
                packed[place].append(PackedPiece(piece_first, n, is_chunk, section.data[at : at + size]))
                at, piece_first = at + size, piece_first + n
        rest = section.data[at:]
        variable = [segments.unpack(rest, stored=True) for segments in group.shared]
        # Rows that nothing needs any more are left out, and rows of which later parts have others.
        start, end = max(next_id, first), min(last, upto) + 1
        if next_id < first or start >= end:
            return next_id
        middle = min(max(start, self._low + 1), end)  # of rows before it only what other rows continue
        for low, high in ((start, middle), (middle, end)):
            if low == high:
                continue
            part = slice(low - first, high - first)
            pieces = cut_run(low, high - low, self._manifest.slots)
            arrays: list[Any] = [()] * len(group.columns)
            for place, rows in fixed.items():
                arrays[place] = rows[part]
            for place, pieces_of in packed.items():  # a piece is written with its last row
                arrays[place] = [one for one in pieces_of if low < one.first + one.rows <= high]
            lists = [rows.slice(part.start, high - low) for rows in chain.from_iterable(variable)]
            run = Run(low, high - low, pieces, arrays, lists, is_stored=True)
            if low > self._low:
                group.write_run(run)
                self._blocks |= blocks_of(pieces)
                if "sampled" in values and "sampled" in columns:
                    self._write(columns["sampled"], np.arange(low, high), values["sampled"][part])
            else:
                group.append_run(run)
        return end

    def _change_rows(self, group: WritableColumns, section: Section, upto: int) -> None:
        assert self._manifest.schema is not None, "there are rows"
        redo = Redo.unpack(section.data, self._manifest.schema)
        redo = redo.cut((redo.ids > self._low) & (redo.ids <= upto))
        for place, values in zip(redo.places, redo.columns, strict=True):
            self._write(group.columns[place], redo.ids, values)

    def _write_values(self, columns: dict[str, FlatColumn]) -> None:
        for _, sections in self._read([name for name, _ in self._state["values"]["parts"]]):
            for section in sections:
                column, rows = columns[section.about["field"]], section.about["rows"]
                ids = unpack_ids(section.data[: 8 * rows])
                values = np.frombuffer(section.data, column.entry.numpy_dtype, rows, 8 * rows)
                there = (ids > self._low) & (ids <= self._last)
                self._write(column, ids[there], values[there])

    def _write(self, column: Column, ids: IntArray, values: Array) -> None:
        if ids.size:
            column.write_rows(self._manifest.geometry.slot_of(ids), values)

    # -- other files -----------------------------------------------------------------------------

    def _build_logs(self) -> None:
        keys = bytearray()
        wanted: dict[str, list[int]] = self._state["files"]
        for _, sections in self._read([name for name, _ in self._state["logs"]["parts"]]):
            for section in sections:
                if section.kind == "keys":
                    keys += section.data
                elif section.about["path"] in wanted:
                    self._append_log(Path(section.about["path"]), section.about["offset"], section.data)
        for path, (length, crc) in wanted.items():
            data = b""
            if self._disk.exists(self._folder / path):
                data = self._disk.read_whole(self._folder / path)
            elif not length:
                self._append_log(Path(path), 0, b"")
            if len(data) != length or google_crc32c.value(data) != crc:
                raise CorruptionError(f"{path} of the shipped state has {len(data)} bytes, and not {length}")
            self._written.append(self._folder / path)
        if self._state["keys"]:
            self._put(KEYS, pack_keys(bytes(keys), self._state["keys"]))

    def _append_log(self, path: Path, offset: int, data: bytes) -> None:
        """Write bytes of a file, which ends with them."""
        if path.is_absolute() or ".." in path.parts:
            raise CorruptionError(f"the shipped state has a file {path} outside the store")
        place = self._folder / path
        self._disk.make_dir(place.parent)
        self._folders |= {self._folder / parent for parent in path.parents}
        with contextlib.closing(self._disk.open(place, create=True)) as file:
            file.truncate(offset)
            file.write(data, offset)

    def _build_journal(self) -> None:
        """Write a journal with the state and a close record."""
        folder = self._folder / JOURNAL
        self._disk.make_dir(folder)
        self._folders.add(folder)
        journal = Journal(
            self._disk,
            folder,
            uuid=self._manifest.uuid,
            generation=self._manifest.generation,
            sequence=self._state["sequence"],
            segment_bytes=ALIGN,
        )
        with contextlib.closing(journal):
            journal.start_segment(self._state["base"])
            journal.append(Kind.CLOSE, b"{}")
            self._written += [file.path for file in journal.sync_files()]
