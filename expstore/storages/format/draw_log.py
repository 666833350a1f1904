"""The log of a consumer: every draw, written down before its batch is returned.

A consumer's folder is `consumers/<name>` in the store's folder; docs/format.md specifies its files. Consumers
append to the log and read it; an opening of the store cuts draws of rows that a power failure has taken.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from expstore.core.draw_state import NO_PROGRESS
from expstore.core.parsing import parsing
from expstore.core.values import Array, IntArray, Mark, Selection
from expstore.disk.files import Disk, File
from expstore.disk.writer_lock import WriterLock, is_locked
from expstore.errors import CorruptionError, LockedError, NotFoundError, StateError, StorageError
from expstore.storages.format.paths import LEASES, LOCK
from expstore.storages.format.ranks import read_committed
from expstore.storages.format.renumbering import Renumbering

#: Folder of the consumers' folders, in a store.
CONSUMERS = "consumers"
#: A segment that is longer gets no more records, bytes.
SEGMENT_BYTES = 8 << 20
#: How many bytes are read first to find new records.
_PIECE_BYTES = 4096

_FORMAT = 1
ABOUT = "consumer.json"
_NONE = np.empty(0, np.int64)
_DIGITS = 16
#: Length of the record, checksum of what follows, number, kind, whether iteration ends, `Use`, and whether
#: ids have 4 bytes instead of 8.
_HEADER = struct.Struct("<IIQB?B?4x")
#: What the checksum covers of it.
_NAMED = struct.Struct("<QB?B?4x")
_FRONT = struct.Struct("<II")
#: The newest change, the newest id that was gone and the newest id, progress, time, rows, runs (0: ids
#: follow), rows asked for, length of the description of the columns.
_DRAW = struct.Struct("<qqq4qqIIII")
#: A draw's record without the front: both of the above.
_HEAD = struct.Struct(_NAMED.format + _DRAW.format[1:])
#: dtypes of ids, by whether they have 4 bytes.
_IDS = (np.dtype("<i8"), np.dtype("<u4"))


class Kind(IntEnum):
    """What a record says."""

    #: The first of a segment, JSON: progress, commit, counts and newest lease before its first draw.
    BASE = 1
    #: A draw; its number is that of the record.
    DRAW = 2
    #: The draws before the record's number are covered by a checkpoint of the learner.
    COMMIT = 3


class Use:
    """What a draw does to its rows."""

    NONE = 0
    #: They are leased until the draw is committed.
    LEASED = 1
    #: They are counted: a sampler that draws by counts drew them.
    COUNTED = 2


class Draw(NamedTuple):
    """A recorded draw.

    Args:
        number: Its number, from 0.
        selection: The rows, and the values that the sampler gave them.
        changes: Number of the newest change of rows in place that the draw could see (`RowChanges`).
        low: The newest id that could not be read any more.
        last: The newest id that could be read.
        progress: The progress of the sampler after it.
        ends: Whether it completed a pass, or used up the rows, so that iteration ends.
        at: When it was recorded, microseconds since 1970.
    """

    number: int
    selection: Selection
    changes: int
    low: int
    last: int
    progress: tuple[int, ...]
    ends: bool
    at: int


@dataclass(frozen=True, slots=True)
class About:
    """The contents of consumer.json.

    Args:
        id: Distinguishes the consumer from others that had its name before.
        seed: First word of the key of its random numbers.
        store: uuid of the store.
        lease_rows: How many rows may be leased; None: a tenth of the rows that samplers see.
    """

    id: str
    seed: int
    store: str
    lease_rows: int | None = None

    def save(self, disk: Disk, folder: Path) -> None:
        """Write the file durably."""
        facts = {"format": _FORMAT, "id": self.id, "seed": self.seed, "store": self.store}
        facts["lease_rows"] = self.lease_rows
        disk.write_whole(folder / ABOUT, json.dumps(facts).encode())

    @classmethod
    def load(cls, disk: Disk, folder: Path) -> About | None:
        """Read the file; None: there is no such consumer, or its creation was interrupted.

        Raises:
            CorruptionError: The file is damaged.
            StateError: It was written by a later version of the library.
        """
        path = folder / ABOUT
        if not disk.exists(path):
            return None
        with parsing(path):
            facts = json.loads(disk.read_whole(path))
            found, leased = int(facts["format"]), facts.get("lease_rows")
            about = cls(
                str(facts["id"]),
                int(facts["seed"]),
                str(facts["store"]),
                None if leased is None else int(leased),
            )
        if found > _FORMAT:
            raise StateError(f"{path} has format {found}; this version reads up to {_FORMAT}")
        return about


@dataclass(slots=True)
class _Segment:
    """A file of the log, as far as it was scanned."""

    path: Path
    first: int
    offsets: list[int] = field(default_factory=list)  # of each draw
    progress: tuple[int, ...] = NO_PROGRESS  # of the sampler, after the last draw
    committed: int = 0
    counts: list[Any] | None = None  # of the base: how often each row was drawn before
    low: int = 0  # of the last draw; 0: the segment has none
    leased_before: int = -1  # of the base: number of the newest draw before that leases its rows
    leased: int = -1  # number of the newest draw that leases its rows
    length: int = 0  # 0: not scanned yet


class DrawLog:
    """The draws of a consumer, in numbered order.

    Invariant: a draw that `append` has recorded never changes. Draws are removed from the front by `drop`,
    and from the end by `cut_after`.

    Threads: one at a time; its consumer has a lock. Processes: one appends, which holds the lock of the
    folder. Crashes: after a kill the log has all draws that `append` returned from; after a power failure it
    has those before the last `sync`, and perhaps more of those that followed, without gaps.

    Args:
        disk: The disk on which files are accessed.
        folder: The consumer's folder.
        id: The consumer's id, which the checksums depend on.
        writes: Whether the caller holds the lock of the folder; otherwise nothing is changed.

    Raises:
        CorruptionError: A segment cannot be read.

    Example:
        >>> from expstore.core.values import Selection
        >>> from pathlib import Path
        >>> from expstore.disk.files import Disk
        >>> from expstore.storages.format.draw_log import DrawLog
        >>> Disk().make_dir(Path("learner"))
        >>> log = DrawLog(Disk(), Path("learner"), "a")
        >>> log.append(Selection(np.array([3, 1])), changes=0, low=0, last=3, progress=(0, 0, 0, 0))
        >>> log.read(0).selection.ids
        array([3, 1])
        >>> log.close()
    """

    def __init__(self, disk: Disk, folder: Path, id: str, *, writes: bool = True) -> None:
        self._disk, self._folder, self._writes = disk, folder, writes
        self._store = folder.parent.parent
        self._salt = google_crc32c.value(id.encode())
        names = sorted(name for name in disk.names(folder) if name.isdigit())
        self._segments = [_Segment(folder / name, int(name)) for name in names]
        self._file: File | None = None
        self._leases: File | None = None
        self._fresh = False  # whether the newest segment's name may not be on the disk yet
        #: Number of draws that were ever recorded, which is the number of the next one.
        self.count = 0
        while self._segments and not self._scan(self._segments[-1]):
            newest = self._segments.pop()  # its creation was interrupted
            if writes:
                disk.unlink(newest.path)
        self._count()

    # -- what it has -------------------------------------------------------------------------------

    def _count(self) -> None:
        newest = self._segments[-1] if self._segments else None
        self.count = 0 if newest is None else newest.first + len(newest.offsets)

    @property
    def first(self) -> int:
        """Number of the oldest draw that is still in the log; `count` for an empty log."""
        return self._segments[0].first if self._segments else 0

    @property
    def committed(self) -> int:
        """Number of draws that a safe checkpoint of the learner covers."""
        return min(self._segments[-1].committed, self.count) if self._segments else 0

    @property
    def progress(self) -> tuple[int, ...]:
        """Progress of the sampler after the last draw."""
        return self._segments[-1].progress if self._segments else NO_PROGRESS

    @property
    def size(self) -> int:
        """Length of the log, bytes."""
        newest = self._segments[-1].length if self._segments else 0
        return sum(self._disk.size(segment.path) for segment in self._segments[:-1]) + newest

    def read(self, number: int) -> Draw:
        """Return a recorded draw.

        Raises:
            NotFoundError: It was not recorded, or was dropped.
            CorruptionError: It is damaged.
        """
        if not self.first <= number < self.count:
            raise NotFoundError(f"draw {number} is not in {self._folder}, which has {self._range()}")
        segment = self._segments[bisect_right(self._segments, number, key=lambda one: one.first) - 1]
        if not segment.length:
            self._scan(segment)
        place = number - segment.first
        if place >= len(segment.offsets):
            raise CorruptionError(f"{segment.path} is damaged before draw {number}")
        file = self._disk.open(segment.path, write=False)
        try:
            at = segment.offsets[place]
            head = file.read(at, _HEADER.size)
            data = file.read(at, _HEADER.unpack(head)[0]) if len(head) == _HEADER.size else b""
        finally:
            file.close()
        if not self._is_sound(data, 0) or _HEADER.unpack_from(data)[2] != number:
            raise CorruptionError(f"{segment.path}: draw {number} is damaged")
        with parsing(segment.path):
            return _parse_draw(number, data)

    def __iter__(self) -> Iterator[Draw]:
        """Yield all draws in the log; each file is read once.

        Raises:
            CorruptionError: A draw is damaged.
        """
        ends = [*(segment.first for segment in self._segments[1:]), self.count]
        for segment, end in zip(self._segments, ends, strict=False):
            self._scan(segment)
            data = self._disk.read_whole(segment.path)
            known = segment.first + len(segment.offsets)
            if known < end:
                raise CorruptionError(f"{segment.path} is damaged before draw {known}")
            for number, at in zip(range(segment.first, end), segment.offsets, strict=False):
                with parsing(segment.path):
                    yield _parse_draw(number, data[at : at + _HEADER.unpack_from(data, at)[0]])

    def _range(self) -> str:
        return f"draws {self.first} to {self.count - 1}" if self.first < self.count else "no draw"

    def _is_sound(self, data: bytes, at: int) -> bool:
        """Return whether a whole record is there."""
        return _measure_record(data, at, self._salt) > 0

    def _scan(self, segment: _Segment) -> bool:
        """Find the new records of a segment, up to one that is torn; return whether it has a base."""
        piece, is_over = _PIECE_BYTES, False
        with contextlib.closing(self._disk.open(segment.path, write=False)) as file:
            while not is_over:  # in larger and larger pieces: many zeros may follow a few new records
                start, data = segment.length, file.read(segment.length, piece)
                if not self._take_records(segment, data):
                    return False
                following = data[segment.length - start :][: _HEADER.size]
                is_over = len(data) < piece or following == bytes(_HEADER.size)
                piece *= 4
        return segment.length > 0

    def _take_records(self, segment: _Segment, data: bytes) -> bool:
        """Take the whole records at the beginning of bytes after those that are known; False: not a base."""
        start, at = segment.length, 0
        while self._is_sound(data, at):
            size, _, number, kind, _, use, _ = _HEADER.unpack_from(data, at)
            if start + at == 0:
                if kind != Kind.BASE or number != segment.first:
                    return False
                with parsing(segment.path):
                    base = json.loads(data[_HEADER.size : size])
                    segment.progress, segment.committed = tuple(base["progress"]), int(base["committed"])
                    segment.counts = base.get("counts")
                    segment.leased = segment.leased_before = int(base.get("leased", -1))
            elif kind == Kind.COMMIT:
                segment.committed = number
            elif kind == Kind.DRAW and 0 <= (place := number - segment.first) <= len(segment.offsets):
                segment.offsets[place:] = [start + at]  # it replaces one whose append was interrupted
                _, segment.low, _, *progress = _DRAW.unpack_from(data, at + _HEADER.size)[:7]
                segment.progress = tuple(progress)
                if use & Use.LEASED:
                    segment.leased = number
            else:
                break
            at += size
        segment.length = start + at
        return True

    def follow(self) -> int:
        """Find what was appended since, also by another process; return `count`."""
        newest = self._segments[-1] if self._segments else None
        if newest is not None and self._disk.size(newest.path) > newest.length:
            self._scan(newest)
        if newest is None or newest.length >= SEGMENT_BYTES:
            last = -1 if newest is None else newest.first
            for name in sorted(name for name in self._disk.names(self._folder) if name.isdigit()):
                segment = _Segment(self._folder / name, int(name))
                if segment.first > last and self._scan(segment):
                    self._segments.append(segment)
        self._count()
        return self.count

    # -- counts and leases -------------------------------------------------------------------------

    def count_rows(self) -> tuple[int, Array]:
        """Return how often each row was drawn by draws that are counted.

        Returns:
            An id, and the counts of this row and those after it; other rows were not drawn, or can no longer
            be read. Shape `(n,)`, uint32.

        Raises:
            CorruptionError: The counts before the newest segment cannot be read.
        """
        if not self._segments:
            return 1, np.zeros(0, np.uint32)
        newest = self._segments[-1]
        first, known = self._read_base_counts(newest)
        before = np.flatnonzero(known)
        ids = np.concatenate([first + before, *(ids for _, ids in self._read_ids(newest, Use.COUNTED))])
        times = np.ones(ids.size, np.uint32)
        times[: before.size] = known[before]
        ids = Renumbering.load(self._disk, self._store).present(ids)
        low = max(newest.low, first - 1)
        here = ids > low
        counts = np.zeros(max(0, int(ids.max(initial=0)) - low), np.uint32)
        np.add.at(counts, ids[here] - (low + 1), times[here])
        return low + 1, counts

    def _read_base_counts(self, segment: _Segment) -> tuple[int, Array]:
        """Return the counts before a segment, as `count_rows`; the dtype is any unsigned one."""
        if segment.counts is None:
            return 1, np.zeros(0, np.uint32)
        with parsing(segment.path):
            first, dtype, packed = segment.counts
            return int(first), np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype)

    def read_leased(self, first: int) -> Iterator[tuple[int, IntArray]]:
        """Yield number and ids of the draws from number `first` on that lease their rows, newest first.

        Raises:
            StorageError: The disk failed.
        """
        for segment in reversed(self._segments if first < self.count else []):
            try:
                found = list(self._read_ids(segment, Use.LEASED, first))
            except StorageError:
                if self._writes or self._disk.exists(segment.path):
                    raise
                return  # its consumer has committed these draws and dropped them
            yield from reversed(found)
            if segment.leased_before < first:
                return

    def _read_ids(self, segment: _Segment, use: int, first: int = 0) -> Iterator[tuple[int, IntArray]]:
        """Yield number and ids of the draws of a segment that use their rows so, from number `first` on."""
        if not segment.length:
            self._scan(segment)
        data = self._disk.read_whole(segment.path)
        for number, at in enumerate(segment.offsets, segment.first):
            # The last one does not count if its append was interrupted.
            if first <= number < self.count and _HEADER.unpack_from(data, at)[5] & use:
                yield number, _parse_ids(data, at)

    # -- appending ---------------------------------------------------------------------------------

    def append(
        self,
        selection: Selection,
        *,
        changes: int,
        low: int,
        last: int,
        progress: Sequence[int],
        ends: bool = False,
        use: int = Use.NONE,
    ) -> None:
        """Record a draw with the number `count`; see `Draw` and `Use` for the arguments.

        Raises:
            StateError: The sampler returned something that is not one value per row.
            StorageError: The disk failed; nothing was recorded.
        """
        if selection.notes:
            raise StateError(
                f"the sampler returned {sorted(map(str, selection.notes))}, which are not one value per row",
                hint="a consumer can record rows and values for each of them",
            )
        file, segments = self._file, self._segments
        if file is None or not segments or segments[-1].length >= SEGMENT_BYTES:
            file = self._require_file()
        segment = segments[-1]
        ids, described, pieces, number = selection.ids, b"", 0, self.count
        rows, is_short = ids.size, last < 1 << 32
        if rows > 1 and ids.item(1) - ids.item(0) == 1 and (runs := _find_runs(ids)) is not None:
            ids, pieces = runs, len(runs)
        body: Any = ids.astype(_IDS[is_short])
        if selection.info or selection.marks:
            parts = [body, *selection.info.values(), *(mark.flags for mark in selection.marks)]
            body = b"".join([part.tobytes() for part in parts])
            described = json.dumps(_describe(selection)).encode()
        head = _HEAD.pack(
            number, Kind.DRAW, ends, use, is_short, changes, low, last, *progress, time.time_ns() // 1000,
            rows, pieces, selection.asked, len(described),
        )  # fmt: skip
        # Ctrl-C may end this anywhere. Until the draw counts, `follow` finds it, or the next one replaces it.
        rest, start = b"".join((head, described, body)), segment.length
        # As `_frame`, whose call would take half a microsecond.
        frame = _FRONT.pack(_FRONT.size + len(rest), google_crc32c.extend(self._salt, rest)) + rest
        file.write_mapped(frame, start)
        segment.offsets[number - segment.first :] = [start]
        segment.progress, segment.low = tuple(progress), low
        if use & Use.LEASED:
            segment.leased = number
        segment.length = start + len(frame)
        self.count = number + 1

    def commit(self, count: int) -> None:
        """Record that a safe checkpoint of the learner covers the first `count` draws.

        Raises:
            StorageError: The disk failed.
        """
        file, frame = self._require_file(), self._frame(_NAMED.pack(count, Kind.COMMIT, False, 0, False))
        segment = self._segments[-1]
        file.write_mapped(frame, segment.length)
        segment.length += len(frame)
        segment.committed = count

    def _frame(self, rest: bytes) -> bytes:
        """Return a whole record: the front, and the rest."""
        return _FRONT.pack(_FRONT.size + len(rest), google_crc32c.extend(self._salt, rest)) + rest

    def _frame_base(self, segment: _Segment) -> bytes:
        base = {"progress": list(segment.progress), "committed": segment.committed}
        if segment.leased_before >= 0:
            base["leased"] = segment.leased_before
        if segment.counts is not None:
            base["counts"] = segment.counts
        head = _NAMED.pack(segment.first, Kind.BASE, False, Use.NONE, False)
        return self._frame(head + json.dumps(base).encode())

    def _require_file(self) -> File:
        """Return the file of the newest segment, open for appending, or of a new one after a full one."""
        if not self._segments or self._segments[-1].length >= SEGMENT_BYTES:
            return self._start_segment()
        if self._file is None:
            newest = self._segments[-1]
            self._file = file = self._disk.open(newest.path)
            if file.size() > newest.length:
                file.truncate(newest.length)  # what is torn must not look like the end of a later record
        return self._file

    def _start_segment(self) -> File:
        if self._file is not None:
            self._shorten()
            self.sync()  # so that only the newest segment may be incomplete after a power failure
        segment = _Segment(self._folder / f"{self.count:0{_DIGITS}d}", self.count)
        segment.progress, segment.committed = self.progress, self.committed
        segment.leased = segment.leased_before = self._segments[-1].leased if self._segments else -1
        segment.counts = _pack_counts(*self.count_rows())
        frame = self._frame_base(segment)
        file = self._disk.open(segment.path, create=True)
        try:
            file.truncate(0)
            file.write(frame, 0)
        except BaseException:
            file.close()
            raise
        segment.length = len(frame)
        former, self._file, self._fresh = self._file, file, True
        self._segments.append(segment)
        if former is not None:
            former.close()
        return file

    def _shorten(self) -> None:
        """Remove the reserved zeros at the end of the newest segment."""
        newest = self._segments[-1] if self._segments else None
        if self._file is not None and newest is not None and self._file.size() > newest.length:
            self._file.truncate(newest.length)

    def sync(self) -> None:
        """Bring all recorded draws to the disk.

        Raises:
            StorageError: The disk failed.
        """
        if self._file is not None:
            self._file.sync()
        if self._fresh:
            self._disk.sync_dir(self._folder)
            self._fresh = False

    # -- removing ----------------------------------------------------------------------------------

    def drop(self, before: int) -> None:
        """Remove the segments in which all draws have numbers below `before`."""
        while len(self._segments) > 1 and self._segments[1].first <= before:
            self._disk.unlink(self._segments[0].path)
            del self._segments[0]

    def cut_after(self, last: int, change: int) -> bool:
        """Remove the first draw that saw a newer row or change, and all later draws; return whether any was.

        A power failure may take rows and changes and leave draws of them, and their numbers are used again.

        Args:
            last: The newest id.
            change: Number of the newest change, or of the record of the journal that came last.

        Raises:
            StorageError: The disk failed.
        """
        place = at = None
        for place_now in reversed(range(len(self._segments))):
            draws = self._read_seen(self._segments[place_now])
            bad = next((at for at, seen in enumerate(draws) if seen[0] > change or seen[1] > last), None)
            if bad is not None:
                place, at = place_now, bad
            elif draws:
                break
        if place is None or at is None:
            self._cut_counts(last)
            return False
        self._close_file()
        while len(self._segments) > place + 1 or (at == 0 < place and len(self._segments) > place):
            self._disk.unlink(self._segments.pop().path)
        newest = self._segments[-1]
        if len(self._segments) > place:
            with contextlib.closing(self._disk.open(newest.path)) as file:
                file.truncate(newest.offsets[at])
                file.sync()
        self._disk.sync_dir(self._folder)
        self._segments[-1] = newest = _Segment(newest.path, newest.first)
        self._scan(newest)
        self._count()
        self._cut_counts(last)
        return True

    def _cut_counts(self, last: int) -> None:
        """Set the counts of ids after `last` to 0 in a log without draws: the draws of them are not kept.

        All draws after a base with such counts saw these rows, too, so that they were cut.
        """
        if not self._segments or (newest := self._segments[-1]).counts is None:
            return
        first, counts = self._read_base_counts(newest)
        if first + counts.size - 1 > last:
            newest.counts = _pack_counts(first, counts[: max(0, last + 1 - first)])
            self._disk.write_whole(newest.path, self._frame_base(newest))
            self._segments[-1] = newest = _Segment(newest.path, newest.first)
            self._scan(newest)

    def _read_seen(self, segment: _Segment) -> list[tuple[int, int]]:
        """Return the newest change and the newest id that each draw of a segment saw."""
        if not segment.length:
            self._scan(segment)
        data = self._disk.read_whole(segment.path)
        facts = (_DRAW.unpack_from(data, at + _HEADER.size) for at in segment.offsets)
        return [(changes, last) for changes, _, last, *_ in facts]

    @property
    def oldest_change(self) -> int:
        """The smallest `changes` of all draws; a large number without draws."""
        return min((seen[0] for one in self._segments for seen in self._read_seen(one)), default=1 << 62)

    def leasing(self) -> contextlib.AbstractContextManager[None]:
        """Let no retention policy delete rows while a draw that leases its rows is recorded."""
        if self._leases is None:
            self._leases = self._disk.open(self._store / LEASES, create=True)
        return self._leases.keep_lock(shared=True)

    def close(self) -> None:
        """Sync, and close the files."""
        try:
            self._shorten()
            self.sync()
        finally:
            self._close_file()
            if self._leases is not None:
                self._leases.close()
                self._leases = None

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_logs(disk: Disk, store: Path, last: int, change: int) -> None:
    """Cut the draws that saw rows or changes after these from the logs of all consumers; see `cut_after`.

    An opening calls it for what it has recovered, before it uses the numbers of what was lost. A consumer
    that another process has open has cut its log itself, for the same rows and changes.
    """
    for folder, about in find_consumers(disk, store):
        with contextlib.suppress(LockedError):
            lock = WriterLock(disk, folder / LOCK)
            try:
                DrawLog(disk, folder, about.id).cut_after(last, change)
            finally:
                lock.release()


def _measure_record(data: bytes, at: int, salt: int) -> int:
    """Return the length of the record at an offset; 0 if no whole record is there."""
    if at + _HEADER.size > len(data):
        return 0
    size, crc, *_ = _HEADER.unpack_from(data, at)
    if size < _HEADER.size or at + size > len(data):
        return 0
    return size if google_crc32c.extend(salt, data[at + _FRONT.size : at + size]) == crc else 0


def measure_records(data: bytes, about: About) -> int:
    """Return the length of the whole records at the beginning of the bytes of a consumer's log."""
    salt, at = google_crc32c.value(about.id.encode()), 0
    while size := _measure_record(data, at, salt):
        at += size
    return at


def find_oldest_change(disk: Disk, store: Path) -> int:
    """Return the smallest `changes` of all draws in the logs of a store; a large number without draws.

    0 if a log is damaged, or a process has its consumer open and may be about to record a draw.
    """
    oldest = 1 << 62
    for folder, about in find_consumers(disk, store):
        if is_locked(disk, folder / LOCK):
            return 0
        try:
            oldest = min(oldest, DrawLog(disk, folder, about.id, writes=False).oldest_change)
        except CorruptionError:
            return 0
    return oldest


def find_consumers(disk: Disk, store: Path) -> Iterator[tuple[Path, About]]:
    """Yield the folder of each consumer of a store, and what consumer.json says, by name."""
    for folder in _find_folders(disk, store):
        if (about := About.load(disk, folder)) is not None:
            yield folder, about


def _find_folders(disk: Disk, store: Path) -> list[Path]:
    root = store / CONSUMERS
    return [root / name for name in sorted(disk.names(root))] if disk.is_dir(root) else []


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """What is known of a consumer.

    Args:
        name: Its name.
        draws: Number of draws that were recorded.
        committed: Number of draws that its last commit covers.
        first: Number of the oldest draw that is still in its log.
        log_bytes: Length of its log.
        is_open: Whether a process draws for it.
        leased: Number of rows that a retention policy keeps for it, because they are drawn and not committed.
        damage: What cannot be read of it; then the numbers are 0. None: nothing was found.
    """

    name: str
    draws: int
    committed: int
    first: int
    log_bytes: int
    is_open: bool
    leased: int
    damage: str | None = None


def describe_consumers(disk: Disk, store: Path, rows: int) -> list[ConsumerInfo]:
    """Return what is known of each consumer of a store, by name. `rows`: number of rows samplers see."""
    found = []
    for folder in _find_folders(disk, store):
        is_open = is_locked(disk, folder / LOCK)
        try:
            if (about := About.load(disk, folder)) is not None:
                leases = _find_leases_of(disk, store, folder, about, rows)
                log, committed = leases.log, read_committed(disk, folder, leases.log.committed)
                facts = log.count, committed, log.first, log.size
                found.append(ConsumerInfo(folder.name, *facts, is_open, leases.ids.size))
        except (CorruptionError, StateError) as exc:  # StateError: a later version has written it
            found.append(ConsumerInfo(folder.name, 0, 0, 0, 0, is_open, 0, str(exc)))
    return found


@dataclass(frozen=True, slots=True)
class Leases:
    """The rows that a consumer has drawn and not committed.

    Draws are leased as a whole, the newest first, until the next one would exceed the limit. A row that two
    draws have counts twice.

    Args:
        folder: The consumer's folder, which has its name.
        log: Its log.
        ids: The leased rows, ascending. Shape `(n,)`, int64.
        ended: Number and ids of the older draws, newest first; they are read when they are iterated.
    """

    folder: Path
    log: DrawLog
    ids: IntArray
    ended: Iterator[tuple[int, IntArray]]


@contextlib.contextmanager
def stop_leasing(disk: Disk, store: Path) -> Iterator[None]:
    """Let no draw that leases its rows be recorded for a while."""
    with contextlib.closing(disk.open(store / LEASES, create=True)) as file, file.keep_lock():
        yield


def find_leases(disk: Disk, store: Path, rows: int) -> Iterator[Leases]:
    """Yield the leases of each consumer of a store, by name.

    Args:
        disk: The disk on which files are accessed.
        store: The store's folder.
        rows: Number of rows that samplers see; a tenth of it is the limit of a consumer without one.

    Raises:
        CorruptionError: A consumer.json is damaged.
        StorageError: The disk failed.
    """
    for folder, about in find_consumers(disk, store):
        yield _find_leases_of(disk, store, folder, about, rows)


def _find_leases_of(disk: Disk, store: Path, folder: Path, about: About, rows: int) -> Leases:
    log = DrawLog(disk, folder, about.id, writes=False)
    names = Renumbering.load(disk, store)
    limit = rows // 10 if about.lease_rows is None else about.lease_rows
    ended, leased = _rename(log.read_leased(log.committed), names), [_NONE]
    for number, ids in ended:
        limit -= ids.size
        if limit < 0:
            ended = chain([(number, ids)], ended)
            break
        leased.append(ids)
    return Leases(folder, log, np.unique(np.concatenate(leased)), ended)


def _rename(draws: Iterator[tuple[int, IntArray]], names: Renumbering) -> Iterator[tuple[int, IntArray]]:
    for number, ids in draws:
        yield number, names.present(ids)


def read_draws(disk: Disk, store: Path) -> Iterator[tuple[str, Draw]]:
    """Yield all draws in the logs of a store's consumers, each with the name of its consumer."""
    for folder, about in find_consumers(disk, store):
        for draw in DrawLog(disk, folder, about.id, writes=False):
            yield folder.name, draw


def _find_runs(ids: IntArray) -> IntArray | None:
    """Return ids as runs (first id, rows), if that is shorter. Shapes `(n,)` in, `(runs, 2)` out."""
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    if 2 * begins.size >= ids.size:
        return None
    return np.stack([ids[begins], np.diff(begins, append=ids.size)], axis=1)


def _describe(selection: Selection) -> dict[str, Any]:
    """Return the keys, dtypes and shapes of a selection's columns, and its marks, as JSON values."""
    info = [[list(key), values.dtype.str, list(values.shape[1:])] for key, values in selection.info.items()]
    marks = [[list(one.key), list(one.flags.shape), one.joins, one.new, one.flat] for one in selection.marks]
    return {"info": info, "marks": marks}


def _parse_draw(number: int, data: bytes) -> Draw:
    at, (*_, ends, _, is_short) = _HEADER.size, _HEADER.unpack_from(data)
    changes, low, last, *progress, time_us, rows, runs, asked, described = _DRAW.unpack_from(data, at)
    at += _DRAW.size
    columns = json.loads(data[at : at + described]) if described else {"info": (), "marks": ()}
    at += described

    def take(dtype: Any, shape: Sequence[int]) -> Array:
        nonlocal at
        found = np.frombuffer(data, dtype, int(np.prod(shape)), at).reshape(shape).copy()
        at += found.nbytes
        return found

    ids = take(_IDS[is_short], (runs, 2) if runs else (rows,)).astype(np.int64)
    ids = _expand(ids) if runs else ids
    info = {tuple(key): take(dtype, (rows, *shape)) for key, dtype, shape in columns["info"]}
    marks = [(tuple(key), take(np.bool_, shape), *flags) for key, shape, *flags in columns["marks"]]
    selection = Selection(ids, info, marks=tuple(Mark(*one) for one in marks), asked=asked, newest=last)
    return Draw(number, selection, changes, low, last, tuple(progress), ends, time_us)


def _parse_ids(data: bytes, at: int) -> IntArray:
    """Return the ids of the draw whose record begins at an offset."""
    is_short = _HEADER.unpack_from(data, at)[-1]
    *_, rows, runs, _, described = _DRAW.unpack_from(data, at + _HEADER.size)
    at += _HEADER.size + _DRAW.size + described
    ids = np.frombuffer(data, _IDS[is_short], 2 * runs or rows, at).astype(np.int64)
    return _expand(ids.reshape(runs, 2)) if runs else ids


def _pack_counts(first: int, counts: Array) -> list[Any] | None:
    """Return the JSON value of counts: the first id, the dtype, and the compressed values; None for none."""
    if not counts.any():
        return None
    small = counts.astype(np.min_scalar_type(counts.max()).newbyteorder("<"))
    return [first, small.dtype.str, base64.b64encode(zlib.compress(small.tobytes(), 1)).decode()]


def _expand(runs: IntArray) -> IntArray:
    """Return the ids of runs (first id, rows). Shapes `(runs, 2)` in, `(n,)` out."""
    first, count = runs.T
    ends = np.cumsum(count)
    ids: IntArray = np.arange(ends[-1]) + np.repeat(first - (ends - count), count)
    return ids
