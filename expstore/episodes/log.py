"""episodes.log: an entry for each end, resumption and annotation of an episode, and one for each source.

Used by storages; the index is rebuilt from it. Append-only, with a checksum per entry; the last entry of an
episode is valid. It does not know about rows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.parsing import parsing
from expstore.core.values import Array, IntArray
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError

# length, crc32c, kind, status, flags, source | episode, trajectory, start, end | return, rows, last id,
# sequence | generation, bytes of text; 8 bytes zero.
_ENTRY = struct.Struct("<IIBBHiqqqqdqqqiI8x")
#: The fixed part of an entry.
HEAD = np.dtype("<u4, <u4, u1, u1, <u2, <i4, <i8, <i8, <i8, <i8, <f8, <i8, <i8, <i8, <i4, <u4, V8")
HEAD.names = (
    "size", "crc", "kind", "status", "flags", "source", "episode", "trajectory", "start", "end", "ret",
    "length", "last_id", "sequence", "generation", "text_size", "zeros",
)  # fmt: skip
EPISODE, _SOURCE = 1, 2
_HAS_TRAJECTORY = 1
_NAMED = 2
NO_RETURN = 4


@dataclass(slots=True)
class LogEntry:
    """One entry: an episode's state at one moment, or the name of a source (`episode` is 0 then).

    Args:
        episode: Episode id.
        source: Source number.
        trajectory: The collector's trajectory id, or None.
        start: First row's time, microseconds since 1970; of a source, when its session started.
        end: Last row's time; of a source, when its session ended, 0 while it is live.
        ret: Sum of rewards; None: no row had one.
        length: Number of rows that the episode has had.
        last_id: Id of its last row.
        status: 0 open, 1 terminated, 2 truncated, 3 cut.
        sequence: LSN of the journal record to which the entry belongs.
        generation: The writer's generation.
        text: Info as JSON, or a source's name.
        named: Whether a user chose the source's name.
        session: Id of the source's session.
    """

    episode: int
    source: int
    trajectory: int | None = None
    start: int = 0
    end: int = 0
    ret: float | None = None
    length: int = 0
    last_id: int = 0
    status: int = 0
    sequence: int = 0
    generation: int = 0
    text: str = ""
    named: bool = False
    session: str = ""

    def pack(self, size: int = 0) -> bytes:
        """Return the entry's bytes for the file; at least `size` bytes, a multiple of 8."""
        text = self.text.encode()
        if not self.episode and self.source:
            text = json.dumps([self.text, self.session]).encode()
        text = _pad(text, size - _ENTRY.size)
        flags = (_HAS_TRAJECTORY if self.trajectory is not None else 0) | (_NAMED if self.named else 0)
        flags |= NO_RETURN if self.ret is None else 0
        head = _ENTRY.pack(
            _ENTRY.size + len(text),
            0,
            EPISODE if self.episode else _SOURCE,
            self.status,
            flags,
            self.source,
            self.episode,
            self.trajectory or 0,
            self.start,
            self.end,
            0.0 if self.ret is None else self.ret,
            self.length,
            self.last_id,
            self.sequence,
            self.generation,
            len(text),
        )
        crc = google_crc32c.value(head[8:] + text)
        return b"".join((head[:4], crc.to_bytes(4, "little"), head[8:], text))


#: Attributes of an episode that are stored, in this order.
_KEPT = ("episode", "source", "trajectory", "start", "end", "ret", "length", "last_id", "status", "text")


@dataclass(slots=True, weakref_slot=True)
class Episode:
    """The running state of an episode; `fragment` is the number of its newest fragment.

    `ret` is None until a row has a reward.
    """

    episode: int
    source: int
    trajectory: int | None
    start: int
    end: int = 0
    ret: float | None = None
    length: int = 0
    last_id: int = 0
    status: int = 0
    text: str = ""
    fragment: int = -1

    def to_dict(self) -> dict[str, Any]:
        """Return the values for a base record."""
        return {name: getattr(self, name) for name in _KEPT}

    @classmethod
    def of(cls, entry: LogEntry) -> Episode:
        """Return the state that a log entry describes."""
        return cls(**{name: getattr(entry, name) for name in _KEPT})

    def entry(self, sequence: int, generation: int) -> LogEntry:
        """Return the log entry of the current state."""
        return LogEntry(  # thousands may end in one batch: positional arguments take a third of the time
            self.episode, self.source, self.trajectory, self.start, self.end, self.ret, self.length,
            self.last_id, self.status, sequence, generation, self.text,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class EndedEpisodes:
    """Episodes that began and ended in one batch, as columns: a batch may have thousands.

    Args:
        heads: Their entries, without sizes and checksums. Shape `(n,)`, dtype `HEAD`.
        texts: The info of each, as JSON text.
        first: Id of the first one; the ids are consecutive.
    """

    heads: Array
    texts: Sequence[str]
    first: int

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[LogEntry]:
        return map(_build_entry, _ENTRY.iter_unpack(self.heads.tobytes()), self.texts)

    def entry(self, episode: int) -> LogEntry | None:
        """Return the entry of an episode, given its id; None if it is not among them."""
        at = episode - self.first
        if not 0 <= at < len(self):
            return None
        return _build_entry(_ENTRY.unpack(self.heads[at].tobytes()), self.texts[at])

    def pack(self) -> bytes:
        """Return the bytes of all entries for the file."""
        texts = [_pad(text.encode()) for text in self.texts]
        heads, parts, step = self.heads.copy(), list[bytes](), _ENTRY.size
        heads["text_size"] = list(map(len, texts))
        heads["size"] = heads["text_size"] + step
        data = heads.tobytes()
        for at, text in zip(range(0, len(data), step), texts, strict=True):
            rest = data[at + 8 : at + step] + text
            parts += (data[at : at + 4], google_crc32c.value(rest).to_bytes(4, "little"), rest)
        return b"".join(parts)


#: What is appended to the log at once.
LogItem = LogEntry | EndedEpisodes


def flatten(items: Iterable[LogItem]) -> Iterator[LogEntry]:
    """Yield each entry of what is appended to the log."""
    return chain.from_iterable([one] if isinstance(one, LogEntry) else one for one in items)


def _pad(text: bytes, size: int = 0) -> bytes:
    """Return a text with zeros after it: at least `size` bytes, a multiple of 8."""
    return text.ljust(max(size, -(-len(text) // 8) * 8), b"\0")


@dataclass(frozen=True, slots=True)
class NewFacts:
    """New facts about episodes, which are written by one record: all of them or none.

    Args:
        entries: The episodes with their new facts, otherwise in their current state.
    """

    entries: tuple[LogEntry, ...]

    def pack(self) -> bytes:
        """Return the body of a journal record."""
        return b"".join(entry.pack() for entry in self.entries)

    @classmethod
    def unpack(cls, body: bytes) -> NewFacts:
        """Parse the result of `pack`.

        Raises:
            CorruptionError: An entry is damaged.
        """
        entries, at = [], 0
        while at < len(body):
            found = _unpack(body, at)
            if found is None:
                raise CorruptionError("an entry of an episode is damaged")
            entries.append(found[0])
            at = found[1]
        return cls(tuple(entries))


def _unpack(data: bytes, at: int) -> tuple[LogEntry, int] | None:
    if at + _ENTRY.size > len(data):
        return None
    head = _ENTRY.unpack_from(data, at)
    size, crc, *_, text_size = head
    source, episode = head[5:7]
    stop = at + size
    if size != _ENTRY.size + text_size or stop > len(data):
        return None
    if google_crc32c.value(data[at + 8 : stop]) != crc:
        return None
    session = ""
    with parsing("an entry of the log of episodes"):
        text = data[at + _ENTRY.size : stop].decode().rstrip("\0") if text_size else ""
        if not episode and source:
            text, session = map(str, json.loads(text))
    return _build_entry(head, text, session), stop


def _build_entry(head: tuple[Any, ...], text: str, session: str = "") -> LogEntry:
    (
        _, _, _, status, flags, source, episode, trajectory, start, end, ret, length, last_id, sequence,
        generation, _,
    ) = head  # fmt: skip
    return LogEntry(  # by position, which is faster
        episode, source, trajectory if flags & _HAS_TRAJECTORY else None, start, end,
        None if flags & NO_RETURN else ret, length, last_id, status, sequence, generation, text,
        bool(flags & _NAMED), session,
    )  # fmt: skip


def salvage(data: bytes) -> tuple[list[LogEntry], list[tuple[int, int]]]:
    """Return the intact entries, and the damaged pieces between them as (first byte, end)."""
    entries: list[LogEntry] = []
    pieces: list[tuple[int, int]] = []
    at = good = 0
    while at < len(data):
        found = _unpack(data, at)
        if found is None:
            at += 8
            continue
        if at > good:
            pieces.append((good, at))
        entries.append(found[0])
        at = good = found[1]
    if good < len(data):
        pieces.append((good, len(data)))
    return entries, pieces


def fill_up(data: bytes, pieces: list[tuple[int, int]], entries: list[LogEntry]) -> tuple[bytes, int]:
    """Write entries into the damaged pieces of a log, which keeps its length.

    Args:
        data: The log.
        pieces: The pieces, as `salvage` returns them.
        entries: At least one entry. If there is room for more, the last one is repeated, which changes
            nothing. An entry that does not fit into a piece is written into the next one; a filler entry, of
            the source 0 that does not exist, takes its place.

    Returns:
        The log, and the number of entries that were written.
    """
    parts, done, used = [], 0, 0
    filler = LogEntry(episode=0, source=0)
    for start, stop in pieces:
        parts.append(data[done:start])
        while start < stop:
            entry = entries[min(used, len(entries) - 1)]
            size = len(entry.pack())
            fits = size <= stop - start
            if not fits:
                entry, size = filler, _ENTRY.size
            if stop - start < 2 * _ENTRY.size or stop - start - size < _ENTRY.size:
                size = stop - start  # the last entry of a piece is padded to its end
            parts.append(entry.pack(size))
            start, used = start + size, used + fits
        done = stop
    return b"".join([*parts, data[done:]]), min(used, len(entries))


def read_log(disk: Disk, path: Path, length: int) -> Iterator[LogEntry]:
    """Yield the entries in the first `length` bytes of the file, in order, without changing it.

    Raises:
        CorruptionError: The file is shorter, or an entry does not match its checksum.
    """
    yield from unpack_entries(read_bytes(disk, path, length), str(path))


def read_bytes(disk: Disk, path: Path, length: int) -> bytes:
    """Return the first `length` bytes of the file, without checking its entries.

    Raises:
        CorruptionError: The file is shorter.
    """
    if not length:
        return b""
    file = disk.open(path, write=False)
    try:
        return _bytes_of(file, length)
    finally:
        file.close()


def _bytes_of(file: File, length: int) -> bytes:
    data = file.read(0, length)
    if len(data) < length:
        raise CorruptionError(f"{file.path} has {len(data)} bytes, the journal says {length}")
    return data


def unpack_entries(data: bytes, name: str) -> Iterator[LogEntry]:
    """Yield the entries in the bytes of a log.

    Args:
        data: The bytes of all entries.
        name: Name of the log for error messages.

    Raises:
        CorruptionError: An entry does not match its checksum.
    """
    at = 0
    while at < len(data):
        found = _unpack(data, at)
        if found is None:
            raise CorruptionError(f"{name} is damaged at byte {at}")
        entry, at = found
        yield entry


class LogColumns:
    """The entries in the bytes of a log as columns, parsed in a fifth of the time that objects take.

    Args:
        data: The bytes of all entries, as `LogEntry.pack` returns them.
        name: Name of the log for error messages.

    Raises:
        CorruptionError: An entry does not match its checksum.

    Example:
        >>> from expstore.episodes.log import LogColumns, LogEntry
        >>> ended = LogEntry(episode=7, source=1, ret=2.5, length=10, status=1)
        >>> LogColumns(ended.pack(), "episodes.log").heads["ret"]
        array([2.5])
    """

    __slots__ = ("_data", "_offsets", "heads")

    def __init__(self, data: bytes, name: str) -> None:
        offsets, heads, at = [], [], 0
        read_sizes, least = struct.Struct("<II").unpack_from, _ENTRY.size
        checksum = google_crc32c.value
        while at + least <= len(data):
            size, crc = read_sizes(data, at)
            if size < least or checksum(data[at + 8 : at + size]) != crc:
                break
            offsets.append(at)
            heads.append(data[at : at + least])
            at += size
        self._data = data
        self._offsets = np.array(offsets, np.int64)
        #: One element per entry, with the fields of `HEAD`. Shape `(n,)`.
        self.heads: Array = np.frombuffer(b"".join(heads), HEAD)
        wrong = np.flatnonzero(self.heads["size"] != np.int64(least) + self.heads["text_size"])
        if len(wrong) or at != len(data):
            raise CorruptionError(f"{name} is damaged at byte {offsets[wrong[0]] if len(wrong) else at}")

    def latest(self) -> IntArray:
        """Return the position of the last entry of each episode, in the order of their first entries."""
        episodes = self.heads["episode"]
        at = np.flatnonzero(episodes)
        first = np.unique(episodes[at], return_index=True)[1]
        last = len(at) - 1 - np.unique(episodes[at[::-1]], return_index=True)[1]
        found: IntArray = at[last[np.argsort(first)]]
        return found

    def sources(self) -> Iterator[LogEntry]:
        """Yield the entries of sources, in order."""
        for at in self._offsets[self.heads["episode"] == 0].tolist():
            found = _unpack(self._data, at)
            assert found is not None, "the constructor has checked every entry"
            yield found[0]

    def texts(self, chosen: IntArray) -> list[str]:
        """Return the info of the entries at some positions as JSON texts; "": an entry has none."""
        first = self._offsets[chosen] + _ENTRY.size
        stop = first + self.heads["text_size"][chosen]
        data = self._data
        return [data[a:b].decode().rstrip("\0") for a, b in zip(first.tolist(), stop.tolist(), strict=True)]

    def has_trajectory(self) -> Array:
        """Return for each entry whether it has a trajectory id. Shape `(n,)`, bool."""
        found: Array = (self.heads["flags"] & _HAS_TRAJECTORY) != 0
        return found

    def has_return(self) -> Array:
        """Return for each entry whether it has a return. Shape `(n,)`, bool."""
        found: Array = (self.heads["flags"] & NO_RETURN) == 0
        return found


class EpisodeLog(Checkpointed):
    """The log of one store: append entries and read them.

    One writer. Entries are kept in memory until a sync; until then the commit records contain the same.

    Args:
        disk: Access to files.
        path: The file; it is created if it is missing.
        length: Length of the valid entries in bytes; bytes after them are dropped.
    """

    def __init__(self, disk: Disk, path: Path, *, length: int) -> None:
        if length and not disk.exists(path):
            raise CorruptionError(f"{path} is missing, the journal says that it has {length} bytes")
        self.file: File = disk.open(path, create=True)
        size = self.file.size()
        if size < length:
            self.file.close()
            raise CorruptionError(f"{path} has {size} bytes, the journal says {length}")
        #: Bytes after the valid entries are dropped when the first new entries are written, because an
        #: opening may still fail, and a buffer that had the store open before may then continue to use the
        #: file.
        self._surplus = size > length
        self.length = length
        self.dirty = False
        self._waiting: list[LogItem] = []

    def append(self, entries: Iterable[LogItem]) -> None:
        """Queue entries for `flush`. This must not fail, because their rows are published already."""
        self._waiting += entries

    def flush(self) -> None:
        """Write the queued entries."""
        waiting = len(self._waiting)
        if waiting or self._surplus:
            data = b"".join([entry.pack() for entry in self._waiting])
            if data:
                self.file.write(data, self.length)
            if self._surplus:
                self.file.truncate(self.length + len(data))
            self.length += len(data)
            self.dirty, self._surplus = True, False
            del self._waiting[:waiting]

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the file if it has bytes that no checkpoint covers."""
        dirty, self.dirty = self.dirty, False
        return Dirty({self.file} if dirty else set())

    def abort(self, dirty: Dirty) -> None:
        """Mark the file as dirty again, because it was not synced."""
        self.dirty = self.dirty or bool(dirty.files)

    def read(self) -> Iterator[LogEntry]:
        """Return all entries in order.

        Raises:
            CorruptionError: An entry does not match its checksum.
        """
        yield from unpack_entries(self.capture()(), str(self.file.path))

    def capture(self) -> Callable[[], bytes]:
        """Return a function that reads the bytes of the present entries, without checking them.

        It can be called once, even if the log was closed meanwhile.
        """
        self.flush()
        file, length = self.file.disk.open(self.file.path, write=False), self.length

        def read() -> bytes:
            try:
                return _bytes_of(file, length)
            finally:
                file.close()

        return read

    def close(self) -> None:
        """Close the file."""
        self.file.close()
