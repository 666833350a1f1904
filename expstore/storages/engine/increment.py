"""Capture what has changed in a store since a former capture, as parts that are uploaded once.

A service of the store. Rows are captured by their ids, not by the files that have them: a part has the values
of a run of rows, of rows that were changed in place, of priorities and counts, or bytes that were appended to
a log. `expstore.storages.snapshots.rebuild` builds a store from them; docs/format.md specifies them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.touched import Touched
from expstore.core.values import Array, IntArray, Window
from expstore.disk.atomic_build import SCRAP
from expstore.episodes.fragments import clip
from expstore.storages.columns.checksums import BLOCK_ROWS
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.packed.capture import PackedCapture
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.format.annotation_log import FILE_SHIFT, file_path, find_files
from expstore.storages.format.draw_log import ABOUT, About, find_consumers, measure_records
from expstore.storages.format.paths import ANNOTATIONS, LOCK, LOG, RENUMBERED
from expstore.storages.format.records import Redo
from expstore.storages.format.row_changes import CHANGES
from expstore.storages.snapshots.increment_parts import (
    FORMAT,
    PART_BYTES,
    Entry,
    Section,
    cut,
    fold,
    pack_ids,
    pack_part,
)

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store

#: Parts up to so many bytes are made before `capture` returns, so that no row stays pinned.
READY_BYTES = 64 << 20
#: Priorities and logs are captured whole again when their changes are in so many parts, or when so many
#: values were captured for each row. The store is, when parts have so many changed or deleted rows for each
#: row.
MOST_PARTS, MOST_TIMES = 512, 4
#: Logs are also captured whole when that adds at most one in so many bytes to those of the rows.
_LOG_SHARE = 20
#: Settings of a store whose rows can be captured by their ids.
_FIXED = ("uuid", "storage", "capacity", "spare", "reach", "ndim", "dims", "layout", "column_set", "ranking")
_NONE = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Increment:
    """What has to be uploaded so that a state of a store can be built elsewhere.

    Threads: one iterates. Upload the parts, then the state: its list of parts is complete once `parts` ends.
    If `parts` is not read to its end, call `close`, which lets writers change rows again.

    Args:
        state: JSON that names all parts that the state needs, also those of former increments.
        parts: The name and the bytes of each new part.
        rows: How many rows it has that former increments lack, or that have changed.
        row_bytes: Their size in memory, bytes.
        through: The newest id that it covers.
        count_episodes: Returns how many episodes have rows in the state.
    """

    state: dict[str, Any]
    parts: Iterator[tuple[str, bytes]]
    rows: int
    row_bytes: int
    through: int
    count_episodes: Callable[[], int]
    close: Callable[[], None]


def capture(
    storage: Store,
    former: dict[str, Any] | None,
    *,
    name: Callable[[], str],
    part_bytes: int = PART_BYTES,
    renew: bool = False,
) -> Increment | None:
    """Capture the present state of a store.

    Writers wait for less than a millisecond, and longer only if they change rows in place while rows are
    copied. All that is captured is synced when this returns. A capture depends on `former` alone: a caller
    that could not upload an increment passes the same `former` again.

    Args:
        storage: The store.
        former: The state of a former capture of this store, or the state from which it was built; None, or
            a state of other fields: everything is captured.
        name: Returns the name of a new part.
        part_bytes: Largest part, bytes before compression; a single row may be longer.
        renew: Whether to return a state also if nothing has changed.

    Returns:
        None: nothing has changed since `former`.

    Raises:
        StateError: The store is closed, or open for reading only.
        StorageError: The disk failed or is full.
        CorruptionError: Rows cannot be read.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(storage.snapshot_pin.acquire())
        storage.drain()  # so that little is left to do under the lock
        with storage.lock:
            storage.writer()
            storage.drain()
            moment = _Moment(storage, former)
            storage.snapshot_pin.move(moment.window.low + 1)
        for log in moment.logs:
            held.callback(log.file.close)
        for log in moment.logs:
            log.begin(None if moment.renews_logs else moment.files.get(log.path))
        storage.sync()
        if moment.is_unchanged and not renew:
            return None
        parts = _Parts(storage, moment, name, part_bytes)
        rest = parts.make(held.pop_all())
    ready: list[tuple[str, bytes]] = []
    size = 0
    for part in rest:
        ready.append(part)
        size += len(part[1])
        if size > READY_BYTES:
            break
    return Increment(
        parts.state,
        chain(ready, rest),
        parts.rows,
        parts.row_bytes,
        moment.window.last,
        moment.count_episodes,
        rest.close,
    )


class _Log:
    """A file of which new bytes are captured: opened when the store is captured, read later.

    Args:
        storage: The store.
        path: Its path in the store.
        length: How many bytes belong to the captured moment; None: all.
        is_sure: Whether bytes were only appended since the former capture.
    """

    def __init__(
        self, storage: Store, path: Path, length: int | None = None, *, is_sure: bool = False
    ) -> None:
        self.file = storage.disk.open(storage.path / path, write=False)
        self.path, self._is_sure = path.as_posix(), is_sure
        self.length = self.file.size() if length is None else length
        #: Bytes that another process may change after the moment, and the offset of the first of them.
        self.held: tuple[bytes, int] | None = None
        #: How many bytes former parts have, and their crc32c; once all sections were made, of the whole file.
        self.start = self.crc = 0

    def read_now(self, known: int, about: About | None) -> None:
        """Read the bytes of a file that another process may write to.

        Args:
            known: How many bytes of it need not be read.
            about: The consumer whose log it is: zeros follow its records, or one that is being written.
        """
        data = self.file.read(known, self.length - known)
        if about is not None:
            data = data[: measure_records(data, about)]
        self.held, self.length = (data, known), known + len(data)

    def _read(self, at: int, size: int) -> bytes:
        if self.held is None or at < self.held[1]:
            return self.file.read(at, size)
        return self.held[0][at - self.held[1] :][:size]

    def begin(self, known: Sequence[int] | None) -> None:
        """Find what former parts have of the file: `known`, its length and checksum then; None: nothing."""
        fits = known is not None and known[0] <= self.length
        if known is not None and fits and (self._is_sure or self._sum(known[0]) == known[1]):
            self.start, self.crc = known

    def _sum(self, length: int) -> int:
        crc = 0
        for at in range(0, length, PART_BYTES):
            crc = google_crc32c.extend(crc, self._read(at, min(PART_BYTES, length - at)))
        return crc

    def sections(self, most: int) -> Iterator[Section]:
        """Yield the new bytes; `start` and `crc` move on."""
        while self.start < self.length:
            data = self._read(self.start, min(most, self.length - self.start))
            yield Section("log", {"path": self.path, "offset": self.start}, data)
            self.start, self.crc = self.start + len(data), google_crc32c.extend(self.crc, data)


def _open_logs(storage: Store, files: Mapping[str, Sequence[int]], *, is_tracked: bool) -> Iterator[_Log]:
    """Yield the files to which a store appends, and small files; the locks of the store are held.

    Args:
        storage: The store.
        files: Length and checksum of each file in the former state.
        is_tracked: Whether this opening has made the former state, so that logs were not cut since.
    """
    rows, disk, path = storage.state, storage.disk, storage.path
    yield _Log(storage, Path(LOG), rows.log.length, is_sure=is_tracked)
    newest, end = divmod(rows.annotated, 1 << FILE_SHIFT)
    for number in find_files(disk, path / ANNOTATIONS):
        if number <= newest:
            length, inside = end if number == newest else None, file_path(Path(ANNOTATIONS), number)
            yield _Log(storage, inside, length, is_sure=is_tracked)
    for name in (CHANGES, RENUMBERED):
        if disk.exists(path / name):
            yield _Log(storage, Path(name))
    for folder, about in find_consumers(disk, path):
        described = disk.read_whole(folder / ABOUT)
        known = files.get((folder / ABOUT).relative_to(path).as_posix())
        is_same = is_tracked and known == [len(described), google_crc32c.value(described)]
        for name in disk.names(folder):
            if name != LOCK and not name.endswith(SCRAP):
                inside = (folder / name).relative_to(path)
                log = _Log(storage, inside, is_sure=is_same and name.isdigit())
                before = files.get(log.path, (0, 0))[0] if is_same and name.isdigit() else 0
                log.read_now(min(before, log.length), about if name.isdigit() else None)
                yield log


class _Moment:
    """A store at one moment, as far as former parts do not have it.

    Args:
        storage: The store, whose lock is held.
        former: The former state; None: everything is captured.
    """

    def __init__(self, storage: Store, former: dict[str, Any] | None) -> None:
        rows, self.window = storage.state, storage.stored
        self.geometry, self.columns = storage.geometry, rows.columns
        self.manifest = json.loads(storage.manifest.pack())
        #: The former state; empty: everything is captured.
        self.former = former if former and self._suits(former) else {}
        #: Length and checksum of the files of logs in the former state.
        self.files: Mapping[str, Sequence[int]] = self.former.get("files", {})
        self.sequence = rows.journal.sequence
        self.token = ""
        self._tracked: dict[str, StoredPriorities | Sampled] = {"priority": rows.priorities}
        if rows.sampled is not None:
            self._tracked["sampled"] = rows.sampled
        self._rows = storage.changes
        #: Whether all changes since the former capture were tracked.
        self.is_tracked = self._begin_tracking()
        floor: int = self.former.get("last", 0)
        if not self.is_tracked and floor:
            floor = self._find_floor(storage.snapshots.block_sums(), floor)
        floor = min(floor, self.window.last)
        #: Rows after this id are captured: those that are stored, and older ones that these continue.
        self.kept = 0 if self.columns is None else self._find_kept(self.columns)
        #: The run of older rows that former parts lack: the first id, and the end.
        self.older = range(max(self.kept, floor) + 1, self.window.low + 1)
        #: Rows up to this id are in former parts; the first row that is not, and the number of these rows.
        self.floor = max(self.window.low, floor)
        self.first, self.count = self.floor + 1, self.window.last - self.floor
        #: Rows that former parts have, and their ids that were changed in place. Shape `(n,)`.
        self._old = Window(self.window.low, self.floor, self.window.deleted)
        self.redone = _NONE
        #: How many rows between others were deleted since the former capture: parts still have them.
        self.deleted = self._count_deleted()
        #: By row field: ids that former parts have, and their values. Shapes `(n,)`.
        self.values: dict[str, tuple[IntArray, Array]] = {}
        #: By row field: the values of the rows that former parts lack. Shape `(count,)`.
        self.newest: dict[str, Array] = {}
        with storage.locks.sampled, storage.locks.episodes, storage.priorities.lock:
            rows.log.flush()  # the base record has its length
            self._fragments = storage.episodes.fragments.capture()
            with storage.priorities.changing:  # priorities are set without the storage's lock
                base = rows.base_record(storage.manifest.generation, opening=True)
                self._take_values()
                self.moment = self._advance()
            self.base = json.loads(json.dumps(base))
            self.logs = list(_open_logs(storage, self.files, is_tracked=self.is_tracked))
            keys: int = self.former["keys"] if self.is_tracked else 0
            self.keys = rows.write_keys.entries_since(0 if self.renews_logs else keys)
        captures = [] if self.columns is None else self.columns.capture(self.window.low)
        #: The packed columns as they are now, by position.
        self.packed: dict[int, PackedRows] = {}
        for one in captures:
            if isinstance(one, PackedCapture):
                self.packed |= one.columns

    def count_episodes(self) -> int:
        """Return how many episodes have rows."""
        return int(np.unique(clip(self._fragments.columns(), self.window.low)[0]).size)

    def _count_deleted(self) -> int:
        former, window = self.former, self.window
        if not former:
            return 0
        before: int = former["last"] - former["low"] - former["rows"]
        return max(0, window.last - window.low - window.rows - before)

    def _find_kept(self, columns: WritableColumns) -> int:
        """Return the newest id to which no stored row refers, nor an older one."""
        low = self.window.low
        found = [segments.kept_from - 1 for segments in columns.shared if segments.parents]
        if columns.packed:
            found.append(
                low - (tuning.PACKED_LOOKBACK_ROWS[1] if columns.slots is None else self.geometry.reach)
            )
        return max(0, min([low, *found]))

    def _suits(self, former: dict[str, Any]) -> bool:
        """Return whether rows of a former state need not be captured again."""
        manifest, there = self.manifest, former["manifest"]
        return (
            former["format"] == FORMAT
            and all(there.get(name) == manifest.get(name) for name in _FIXED)
            and former["redone"] <= MOST_TIMES * (former["rows"] + BLOCK_ROWS)
        )

    def _begin_tracking(self) -> bool:
        """Track changes from now on; return whether all changes since the former capture were tracked."""
        token, objects = self.former.get("token"), (self._rows, *self._tracked.values())
        if token is not None and all(one.tracked and one.tracked.token == token for one in objects):
            self.token = token
            return True
        self.token = Touched().token
        for one in objects:
            one.tracked = Touched(self.token)
        return False

    def _find_floor(self, entries: Array | None, last: int) -> int:
        """Return up to which id rows have not changed since the former capture, by the blocks' stamps."""
        used = min(self.window.last, self.geometry.slots or self.window.last)
        changed = np.ones(-(-used // BLOCK_ROWS), bool)
        if entries is not None:
            known = entries[: changed.size]
            stamps = known["generation"].astype(np.int64), known["sequence"].astype(np.int64)
            than = self.former["generation"], self.former["sequence"]
            older = (stamps[0] < than[0]) | ((stamps[0] == than[0]) & (stamps[1] < than[1]))
            changed[: known.size] = ~older | (stamps[1] == 0)
        slots = np.flatnonzero(np.repeat(changed, BLOCK_ROWS)[:used])
        ids = self.geometry.ids_in(slots, self.window.last)
        ids = ids[(ids > self.window.low) & (ids <= last)]
        return int(ids.min()) - 1 if ids.size else last

    @property
    def renews_values(self) -> bool:
        """Whether priorities and counts of all rows are captured, so that former parts need not be read."""
        known = self.former.get("values")
        if known is None or not self.is_tracked:
            return True
        most = MOST_TIMES * (self.window.rows + BLOCK_ROWS)
        return len(known["parts"]) >= MOST_PARTS or known["size"] > most

    @property
    def renews_logs(self) -> bool:
        """Whether logs are captured whole, so that former parts need not be read."""
        known = self.former.get("logs")
        if known is None or len(known["parts"]) >= MOST_PARTS:
            return True
        size = sum(length for length, _ in self.former["files"].values())
        return len(known["parts"]) >= MOST_PARTS // 8 and size * _LOG_SHARE < known["rows"]

    def _take_values(self) -> None:
        """Copy the priorities and counts that former parts lack."""
        if self.columns is None:
            return
        touched = {name: self._find(one.tracked) for name, one in self._tracked.items()}
        if self.is_tracked:
            self.redone = np.sort(self._find(self._rows.tracked))
        pieces = self.geometry.runs(self.first, self.count)
        for name, one in self._tracked.items():
            ids = self._old.ids() if self.renews_values else touched[name]
            if name == "priority" and self.redone.size:  # rows that were replaced have new priorities
                ids = np.union1d(ids, self.redone)
            slots = self.geometry.slot_of(ids)
            self.values[name] = ids, one.values_at(slots)
            self.newest[name] = np.concatenate([part.copy() for part in one.views(pieces)])

    def _find(self, touched: Touched | None) -> IntArray:
        """Return the rows of former parts that were touched since the former capture. Shape `(n,)`."""
        if touched is None or not self.is_tracked:
            return _NONE
        ids = self.geometry.ids_in(touched.since(self.former["moment"]), self.window.last)
        return ids[self._old.holds(ids)]

    def _advance(self) -> int:
        """Begin a new moment for all objects that track changes; return it."""
        marks = [one.tracked for one in (self._rows, *self._tracked.values()) if one.tracked is not None]
        for mark in marks:
            if self.is_tracked:
                mark.forget(self.former["moment"])
            mark.advance()
        return marks[0].moment

    @property
    def is_unchanged(self) -> bool:
        """Whether the former state is this one, after `_Log.begin`."""
        return (
            self.is_tracked
            and self.former["base"] == self.base
            and self.former["manifest"] == self.manifest
            and self.former["files"] == {log.path: [log.length, log.crc] for log in self.logs}
            and not any(log.start < log.length for log in self.logs)
            and not any(ids.size for ids, _ in self.values.values())
        )


class _Parts:
    """Make the parts of a moment, and the new state.

    Args:
        storage: The store.
        moment: The moment. Its rows are pinned.
        name: Returns the name of a new part.
        most: Largest part, bytes before compression.
    """

    def __init__(self, storage: Store, moment: _Moment, name: Callable[[], str], most: int) -> None:
        self._storage, self._moment, self._name, self._most = storage, moment, name, most
        self._sections: list[Section] = []
        former, window, manifest = moment.former, moment.window, moment.manifest
        self._row_bytes = 1 if moment.columns is None else max(1, moment.columns.mean_bytes)
        self.rows = moment.count + moment.redone.size
        self.row_bytes = self.rows * self._row_bytes
        values = None if moment.renews_values else former["values"]
        logs = None if moment.renews_logs else former["logs"]
        size = sum(ids.size for ids, _ in moment.values.values())
        self.state: dict[str, Any] = {
            "format": FORMAT,
            "uuid": manifest["uuid"],
            "generation": manifest["generation"],
            "sequence": moment.sequence,
            "content": moment.base["content"],
            "low": window.low,
            "kept": moment.kept,
            "last": window.last,
            "rows": window.rows,
            "token": moment.token,
            "moment": moment.moment,
            "counted": "sampled" in moment.newest,
            "redone": former.get("redone", 0) + moment.redone.size + moment.deleted,
            "keys": moment.base["write_keys"],
            "manifest": manifest,
            "base": moment.base,
            "parts": cut([Entry(*one) for one in former.get("parts", ())], moment.kept, moment.floor),
            "values": {
                "parts": list(values["parts"]) if values else [],
                "size": size + (values["size"] if values else 0),
            },
            "logs": {
                "parts": list(logs["parts"]) if logs else [],
                "rows": self.row_bytes + (logs["rows"] if logs else 0),
            },
            "files": {},
        }

    def make(self, held: contextlib.ExitStack) -> Generator[tuple[str, bytes]]:
        """Yield the new parts, and complete the state; `held` releases the rows and the files."""
        with held:
            yield from self._make(self._row_sections(), self._note_rows)
            self._storage.snapshot_pin.move(0)
            for which, sections in (("values", self._value_sections()), ("logs", self._log_sections())):
                yield from self._make(sections, partial(self._note_part, which))
            pages: list[tuple[str, bytes]] = []

            def put(section: Section) -> str:
                pages.append((self._name(), pack_part([section])))
                return pages[-1][0]

            self.state["parts"] = fold(self.state["parts"], put)
            yield from pages

    def _make(
        self, sections: Iterator[Section], note: Callable[[str, int], None]
    ) -> Iterator[tuple[str, bytes]]:
        """Yield parts of sections, as many in each as fit; `note` gets each part's name and size."""
        size, end = 0, Section("", {}, b"")
        for section in chain(sections, [end]):
            if self._sections and (section is end or size + len(section.data) > self._most):
                name, data = self._name(), pack_part(self._sections)
                note(name, len(data))
                yield name, data
                self._sections, size = [], 0
            if section is not end:
                self._sections.append(section)
                size += len(section.data)

    def _note_part(self, which: str, name: str, size: int) -> None:
        self.state[which]["parts"].append((name, size))

    def _note_rows(self, name: str, size: int) -> None:
        spans = [section.about["span"] for section in self._sections]
        first, last = min(span[0] for span in spans), max(span[1] for span in spans)
        self.state["parts"].append(Entry(0, name, first, last, size))

    # -- rows ------------------------------------------------------------------------------------

    def _row_sections(self) -> Iterator[Section]:
        """Yield the rows that were changed in place, then those that former parts lack."""
        moment, columns, step = self._moment, self._moment.columns, max(1, self._most // self._row_bytes)
        if columns is None:
            return
        for at in range(0, moment.redone.size, step):
            ids = moment.redone[at : at + step]
            places = [*columns.flat][:-1]
            values = self._storage.take(moment.geometry.slot_of(ids), places)
            span = int(ids[0]), int(ids[-1])
            yield Section("changed", {"span": span}, Redo(ids, places, values).pack())
        for run in (moment.older, range(moment.first, moment.window.last + 1)):
            for first in run[::step]:
                self._storage.snapshot_pin.move(first)
                yield from self._rows(first, min(step, run.stop - first))

    def _rows(self, first: int, count: int) -> Iterator[Section]:
        """Yield a run of rows; of older ones only the fields that other rows may refer to."""
        moment, columns = self._moment, self._moment.columns
        assert columns is not None, "there are rows"
        is_older = first < moment.first
        flat = [*columns.flat][:-1]
        parts: list[bytes] = []
        if not is_older:
            parts = [np.concatenate(rows).tobytes() for rows in self._storage.views(flat, first, count)]
        packed: dict[str, list[tuple[int, bool, int]]] = {}
        for place, column in sorted(moment.packed.items()):
            pieces = [*column.pieces(first, count)]
            packed[str(place)] = [(piece.rows, piece.is_chunk, len(piece.data)) for piece in pieces]
            parts += [piece.data for piece in pieces]
        data = b"".join(
            [*parts, *(segments.pack_stored(first, count, may_lack=is_older) for segments in columns.shared)]
        )
        if len(data) > self._most and count > 1:  # rows of variable length may be longer than others
            half = count // 2
            yield from self._rows(first, half)
            yield from self._rows(first + half, count - half)
            return
        at = first - moment.first
        newest = {} if is_older else moment.newest
        values = {name: run[at : at + count].tobytes() for name, run in newest.items()}
        sizes = {name: len(run) for name, run in values.items()}
        about = {"span": (first, first + count - 1), "values": sizes, "packed": packed}
        yield Section("older" if is_older else "rows", about, b"".join([*values.values(), data]))

    # -- values and logs -------------------------------------------------------------------------

    def _value_sections(self) -> Iterator[Section]:
        """Yield priorities and counts of rows that former parts have."""
        step = self._most // 16
        for name, (ids, values) in self._moment.values.items():
            for at in range(0, ids.size, step):
                part = slice(at, at + step)
                about = {"field": name, "rows": ids[part].size}
                yield Section("values", about, pack_ids(ids[part]) + values[part].tobytes())

    def _log_sections(self) -> Iterator[Section]:
        """Yield what was appended to logs and written to small files, and idempotency keys."""
        for log in self._moment.logs:
            yield from log.sections(self._most)
            self.state["files"][log.path] = [log.length, log.crc]
        keys = self._moment.keys
        for at in range(0, len(keys), self._most):
            yield Section("keys", {}, keys[at : at + self._most])
