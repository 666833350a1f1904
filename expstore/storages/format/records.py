"""Bodies of the journal's records: publish, redo, mark and the others.

Used by stores on disk and by recovery. `expstore.storages.format.journal` frames the bodies; docs/format.md
has the byte table.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.idempotency import NO_KEY, WriteKey
from expstore.core.parsing import MOST_IDS
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk
from expstore.episodes.sessions import NewSource
from expstore.episodes.table import SEGMENT_BYTES, SEGMENT_FORMAT, Segment, pack_segments, unpack_segments
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.storages.format.codecs import CODECS
from expstore.storages.format.journal import ALIGN, HEADER, Journal, Kind
from expstore.storages.format.paths import REDO

# first id, draw, time | rows, rows not written, segments, bytes of the source list, crc32c of the payload,
# number of the column set | priority of its rows | idempotency key, digest of the body | bytes of info
_PUBLISH = struct.Struct("<QQqIIIIIIf16s16sI")
_PUBLISH_HEAD = struct.Struct("<QQqI")
#: The bytes before, and the first segment.
_FIRST = struct.Struct(_PUBLISH.format + SEGMENT_FORMAT.removeprefix("<"))
#: The id, episode, step and time of a row, which follow the fields.
_NUMBERS = struct.Struct("<4q")
#: Length of a record's bytes before its segments.
_HEAD_BYTES = HEADER.size + _PUBLISH.size
#: The name is followed by 12 digits and a crc32c; for rows that replace others also by their number and
#: priority.
_SHELVED, _SHELVED_BYTES = b"file", 20
_REPLACED = struct.Struct("<If")
_DROPPED, _COMPRESSED = 1 << 31, 1 << 30
#: The longest payload that is compressed, bytes.
LONGEST_COMPRESSED = 1 << 18
_MARK = struct.Struct("<QQQQQfI4Q")
_SET_BACK, _LIMITED, _ANNOTATED = 1, 2, 4
#: The largest number that STATE can hold.
_MOST = 2**63 - 1
_LIMITS = struct.Struct("<QQ")
_ADDRESS = struct.Struct("<Q")
_REDO = struct.Struct("<II")
_REPLACES = 1 << 31


@dataclass(slots=True)
class Publish:
    """A commit record, which makes rows readable.

    Args:
        first_id: Id of the batch's first row.
        count: Number of rows in the batch.
        skipped: How many of the first rows were never written (a batch longer than the ring).
        draw: Number of batches drawn so far.
        time: Microseconds since 1970.
        checksum: crc32c of the payload.
        priority: Priority of all rows of the batch.
        segments: Which rows belong to which episode.
        sources: New sources.
        payload: The rows' bytes, column by column, if they were not written to the columns first.
        info: Annotation of all its episodes, as JSON text.
        column_set: The column set that payload and checksum refer to: how often fields were added or dropped.
        key: The idempotency key under which the rows were written; None: no key.
    """

    first_id: int
    count: int
    skipped: int
    draw: int
    time: int
    checksum: int
    priority: float
    segments: Sequence[Segment]
    sources: Sequence[NewSource]
    payload: bytes = b""
    info: str = ""
    column_set: int = 0
    key: WriteKey | None = None

    @property
    def last_id(self) -> int:
        """Id of the last row."""
        return self.first_id + self.count - 1

    @property
    def written(self) -> tuple[int, int]:
        """The rows that were written: the id of the first row, and their number."""
        return self.first_id + self.skipped, self.count - self.skipped

    @staticmethod
    def last_of(body: bytes) -> int:
        """Return the id of the last row of a packed record."""
        first, _, _, count = _PUBLISH_HEAD.unpack_from(body)
        return int(first + count - 1)

    def pack(self) -> bytes:
        """Return the body."""
        return b"".join(self.parts())

    def parts(self) -> tuple[bytes, bytes]:
        """Return the body in two parts; the payload is separate because it may be long."""
        names = json.dumps(self.sources).encode() if self.sources else b""
        info = self.info.encode()
        count, segments, key, skipped = self.count, len(self.segments), self.key, self.skipped
        name, digest = (NO_KEY, NO_KEY) if key is None else (key.name, key.digest)
        if key is not None and key.dropped:
            skipped |= _DROPPED
        head = _PUBLISH.pack(
            self.first_id, self.draw, self.time,
            count, skipped, segments, len(names), self.checksum, self.column_set,
            self.priority, name, digest, len(info),
        )  # fmt: skip
        return b"".join((head, pack_segments(self.segments), names, info)), self.payload

    @classmethod
    def unpack(cls, body: bytes) -> Publish:
        """Parse the bytes that `pack` returned."""
        first, draw, time, count, skipped, segments, names, crc, column_set, priority, name, digest, info = (
            _PUBLISH.unpack_from(body)
        )
        middle = _PUBLISH.size + SEGMENT_BYTES * segments
        end = middle + names
        if (
            end + info > len(body)
            or not count
            or draw > _MOST
            or skipped & ~(_DROPPED | _COMPRESSED) > count
            or not 0 < first <= MOST_IDS
        ):
            raise CorruptionError(f"a commit record of {count} rows from id {first} is damaged")
        runs = unpack_segments(body[_PUBLISH.size : middle]) if segments else []
        if any(
            run.start < 0
            or run.rows < 1
            or run.stride < 1
            or run.start + (run.rows - 1) * run.stride >= count
            for run in runs
        ):
            raise CorruptionError(f"a commit record of {count} rows has episodes of other rows")
        return cls(
            first_id=first,
            count=count,
            skipped=skipped & ~(_DROPPED | _COMPRESSED),
            draw=draw,
            time=time,
            checksum=crc,
            priority=priority,
            segments=runs,
            sources=[NewSource(*one) for one in json.loads(body[middle:end])] if names else [],
            payload=_decompress(body[end + info :]) if skipped & _COMPRESSED else body[end + info :],
            info=body[end : end + info].decode(),
            column_set=column_set,
            key=None if name == NO_KEY else WriteKey(name, digest, bool(skipped & _DROPPED)),
        )


def _decompress(payload: bytes) -> bytes:
    """Return the bytes of a compressed payload, a blosc frame.

    Raises:
        CorruptionError: It is no such frame.
    """
    size, length = (int.from_bytes(payload[at : at + 4], "little") for at in (4, 12))
    if size > LONGEST_COMPRESSED or length != len(payload):
        raise CorruptionError(f"the {len(payload)} bytes of rows in a commit record cannot be decompressed")
    return CODECS["lz4"].unpack(payload, size).tobytes()


class RowRecord:
    """The commit record of a few rows of one stream: `Publish` with a layout that is prepared once.

    The caller writes the values of the rows to `fields`. Not locked.

    Args:
        row_bytes: Size of the fields of a row, bytes.
        rows: How many rows a record has.
        compress: Whether the payload is compressed. It has at most `LONGEST_COMPRESSED` bytes then.
    """

    __slots__ = (
        "_compress", "_data", "_frames", "_numbers", "_payload", "_rows", "_written", "fields", "largest_size"
    )  # fmt: skip

    def __init__(self, row_bytes: int, rows: int = 1, *, compress: bool = False) -> None:
        self._rows, self._compress = rows, compress
        self._written: tuple[Array, int]  # the memory of the record that was filled last, and its body's size
        size, start = rows * (row_bytes + _NUMBERS.size), _HEAD_BYTES + SEGMENT_BYTES * rows
        self._data = memoryview(bytearray(start + size + ALIGN))
        self._payload = self._data[start : start + size]
        #: The fields of the rows, field by field in the schema's order. Shape `(rows * row_bytes,)`.
        self.fields = self._payload[: rows * row_bytes]
        #: Ids, episodes, steps and times. Shape `(4, rows)`.
        self._numbers: IntArray = np.frombuffer(self._payload[rows * row_bytes :], np.int64).reshape(4, rows)
        # By number of segments, which precede the fields: the memory of the record, and the size of its body.
        self._frames: list[tuple[Array, int]] = [(np.frombuffer(self._data, np.uint8), 0)]
        for count in range(1, rows + 1):
            begin = start - _HEAD_BYTES - SEGMENT_BYTES * count
            body = start + size - begin - HEADER.size
            end = begin + -(-(HEADER.size + body) // ALIGN) * ALIGN
            self._frames.append((np.frombuffer(self._data[begin:end], np.uint8), body))
        #: Size of the body of the longest record, bytes.
        self.largest_size = self._frames[-1][1]

    def fill(
        self,
        *,
        column_set: int,
        draw: int,
        time: int,
        priority: float,
        first_id: int,
        segments: Sequence[Segment],
    ) -> bytes:
        """Complete the record of rows whose fields were written; return the payload.

        Args:
            column_set: How often fields were added or dropped.
            draw: Number of batches drawn so far.
            time: Microseconds since 1970.
            priority: Priority of all rows.
            first_id: The id of the first row.
            segments: Their episodes and steps; at most one for each row.
        """
        rows, first, payload = self._rows, segments[0], self._payload
        if rows == 1:
            _NUMBERS.pack_into(payload, len(self.fields), first_id, first.episode, first.step, time)
        else:
            ids, episodes, steps, times = self._numbers
            ids[:], times[:] = range(first_id, first_id + rows), time
            for one in segments:
                stop = one.start + one.rows
                episodes[one.start : stop] = one.episode
                steps[one.start : stop] = range(one.step, one.step + one.rows)
        data, flags = payload.tobytes(), 0
        frame, body = self._frames[len(segments)]
        if self._compress:
            small = CODECS["lz4"].pack(np.frombuffer(data, np.uint8))
            if len(small) + ALIGN <= len(data):
                flags, body = _COMPRESSED, body - len(data) + len(small)
                end = -(-(HEADER.size + body) // ALIGN) * ALIGN
                payload[: len(small) + ALIGN] = small + bytes(ALIGN)
                frame = frame[:end]
        self._written = frame, body
        _FIRST.pack_into(
            frame.data, HEADER.size,
            first_id, draw, time,
            rows, flags, len(segments), 0, google_crc32c.value(data), column_set,
            priority, NO_KEY, NO_KEY, 0,
            *first,
        )  # fmt: skip
        if len(segments) > 1:
            more = pack_segments(segments[1:])
            start = _HEAD_BYTES + SEGMENT_BYTES
            frame[start : start + len(more)] = np.frombuffer(more, np.uint8)
        return data

    def append_to(self, journal: Journal) -> int:
        """Append the record to a journal; return its sequence number."""
        return journal.append_framed(Kind.PUBLISH, *self._written)


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint record: everything up to another record is synced.

    Args:
        sequence: Sequence number of the last record that the checkpoint covers.
        last_id: The newest id in the records up to it.
        log_length: Number of bytes of episodes.log that are synced.
        draw: Number of batches returned.
        write_count: Number of rows that were ever written.
        max_priority: The largest priority so far.
        progress: The progress of a sampler: four numbers.
        set_back: Whether `draw` is valid even if earlier records have a larger one.
        limits: The counts of a rate limiter, in the form of `DrawState.limits`.
        annotated: The address up to which the records of annotations are synced; 0 without annotations.
    """

    sequence: int
    last_id: int
    log_length: int
    draw: int
    write_count: int
    max_priority: float
    progress: tuple[int, ...] = (0, 0, 0, 0)
    set_back: bool = False
    limits: tuple[int, int] = (0, 0)
    annotated: int = 0

    def pack(self) -> bytes:
        """Return the body."""
        numbers = self.sequence, self.last_id, self.log_length, self.draw, self.write_count
        limits = _LIMITS.pack(*self.limits) if self.limits[1] else b""
        address = _ADDRESS.pack(self.annotated) if self.annotated else b""
        flags = (_SET_BACK if self.set_back else 0) | (_LIMITED if limits else 0)
        flags |= _ANNOTATED if address else 0
        head = _MARK.pack(*numbers, self.max_priority, flags, *self.progress)
        return head + limits + address

    @classmethod
    def unpack(cls, body: bytes) -> Mark:
        """Parse the bytes that `pack` returned."""
        sequence, last_id, log_length, draw, write_count, largest, flags, *progress = _MARK.unpack_from(body)
        if max(sequence, last_id, log_length, draw, write_count, *progress) > _MOST:
            raise CorruptionError("a checkpoint record has numbers that no store has")
        limits = _LIMITS.unpack_from(body, _MARK.size) if flags & _LIMITED else (0, 0)
        at = _MARK.size + (_LIMITS.size if flags & _LIMITED else 0)
        return cls(
            sequence=sequence,
            last_id=last_id,
            log_length=log_length,
            draw=draw,
            write_count=write_count,
            max_priority=largest,
            progress=tuple(progress),
            set_back=bool(flags & _SET_BACK),
            limits=limits,
            annotated=_ADDRESS.unpack_from(body, at)[0] if flags & _ANNOTATED else 0,
        )


@dataclass(frozen=True, slots=True)
class Redo:
    """New values of rows that are about to be changed in place.

    Args:
        ids: Ids of the rows. Shape `(n,)`.
        places: Positions of the columns: the schema's fields, then `ROW_FIELDS`.
        columns: Their new values. Shapes `(n, *row shape)`.
        replaces: Whether these are new rows that replace the former ones: then priorities are the first
            column, and times the last.
    """

    ids: IntArray
    places: Sequence[int]
    columns: Sequence[Array]
    replaces: bool = False

    def pack(self) -> bytes:
        """Return the body."""
        head = _REDO.pack(self.ids.size, len(self.places) | (_REPLACES if self.replaces else 0))
        places = np.array(self.places, "<i8").tobytes()
        return b"".join((head, places, self.ids.tobytes(), *[column.tobytes() for column in self.columns]))

    @classmethod
    def unpack(cls, body: bytes, schema: Schema) -> Redo:
        """Parse the bytes that `pack` returned."""
        n, wide = _REDO.unpack_from(body)
        replaces, wide = bool(wide & _REPLACES), wide & ~_REPLACES
        fields = (*schema.fields, *ROW_FIELDS)
        at = _REDO.size
        places = np.frombuffer(body, "<i8", wide, at).tolist()
        at += 8 * wide
        ids = np.frombuffer(body, "<i8", n, at)
        at += 8 * n
        columns = []
        for place in places:
            entry = fields[place]
            values = np.frombuffer(body, entry.numpy_dtype, n * entry.row_items, at)
            columns.append(values.reshape(n, *entry.shape))
            at += n * entry.row_bytes
        return cls(ids, places, columns, replaces)

    @staticmethod
    def count_replaced(body: bytes) -> tuple[int, float]:
        """Return how many rows a packed update record replaces, and the priority of the new rows."""
        if body[:4] == _SHELVED:
            return _REPLACED.unpack_from(body, _SHELVED_BYTES) if len(body) > _SHELVED_BYTES else (0, 0.0)
        n, wide = _REDO.unpack_from(body)
        if not (wide & _REPLACES and n):
            return 0, 0.0
        (priority,) = struct.unpack_from("<f", body, _REDO.size + 8 * (wide & ~_REPLACES) + 8 * n)
        return n, priority

    def cut(self, keep: Array, columns: slice = slice(None)) -> Redo:
        """Return the part of the update that concerns some of the rows and some of the columns."""
        chosen = [values[keep] for values in self.columns[columns]]
        return Redo(self.ids[keep], self.places[columns], chosen, self.replaces)


def shelve_body(disk: Disk, folder: Path, number: int, body: bytes, *, settle: Callable[[], None]) -> bytes:
    """Return the journal's body of an update record: the record's body, or the name of a file with it.

    Earlier files are removed after `settle` has synced their changes, because no recovery needs them then.
    """
    if len(body) <= tuning.REPLACE_RECORD_BYTES:
        return body
    if not disk.exists(folder):
        disk.make_dir(folder)
        disk.sync_dir(folder.parent)
    former = disk.names(folder)
    if former:
        settle()
    for name in former:
        disk.unlink(folder / name)
    disk.write_whole(folder / f"{number:012d}", body)
    crc: int = google_crc32c.value(body)
    rows, priority = Redo.count_replaced(body)
    more = _REPLACED.pack(rows, priority) if rows else b""
    return _SHELVED + f"{number:012d}".encode() + crc.to_bytes(4, "little") + more


def load_redo(disk: Disk, store: Path, body: bytes, schema: Schema) -> Redo:
    """Read an update record, from its own file if it was too long for the journal.

    Args:
        disk: The disk on which files are accessed.
        store: The store's folder.
        body: The body of the record in the journal.
        schema: The fields of the rows.

    Raises:
        CorruptionError: The file is missing or damaged.
    """
    return Redo.unpack(fetch_body(disk, store / REDO, body), schema)


def fetch_body(disk: Disk, folder: Path, body: bytes) -> bytes:
    """Return the body of an update record that was passed to `shelve_body`."""
    if body[:4] != _SHELVED:
        return body
    path = folder / body[4:16].decode()
    if not disk.exists(path):
        raise CorruptionError(f"{path} is missing, which has a change that was not finished")
    shelved = disk.read_whole(path)
    if google_crc32c.value(shelved) != int.from_bytes(body[16:20], "little"):
        raise CorruptionError(f"{path} does not have its checksum")
    return shelved
