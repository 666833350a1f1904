"""The journal: the records that commit, change and delete rows, in order.

Used by storages only. The journal frames, appends, syncs, rotates and reads records; it does not interpret
their bodies. docs/format.md has the byte table.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.parsing import check_number, parsing
from expstore.core.values import Array
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError, StorageError

ALIGN = 64
_PAGE = 4096
_ZEROS = bytes(1 << 16)
#: Least room for records in a segment, bytes: otherwise a checkpoint and a close record could need another
#: segment.
_LEAST_ROOM = 1024
#: Seconds between two lookups of whether the newest segment still has a name. A lookup takes a microsecond or
#: more, and deleting a store takes longer than this pause.
_LOOK_SECONDS = 0.001
#: Length of a segment if every record is synced: longer, because starting a segment costs three syncs.
SYNC_SEGMENT_BYTES = 64 << 20

# length of the body, crc32c, salt, sequence, kind; 7 bytes zero.
HEADER = struct.Struct("<IIQQB7x")
_CHECKSUM = struct.Struct("<I")


class Kind(IntEnum):
    """The kind of a record."""

    BASE = 1
    PUBLISH = 2
    REDO = 3
    DELETE = 4
    RETIRE = 5
    MOVE = 6
    MARK = 7
    SHARD = 8
    CLOSE = 9
    ANNOTATE = 10
    END = 11
    RESUME = 12


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the journal."""

    sequence: int
    kind: Kind
    body: bytes

    def json(self) -> Any:
        """Return the body of a record whose body is JSON."""
        with parsing(f"record {self.sequence} of the journal"):
            found = json.loads(self.body)
            if not isinstance(found, dict):
                raise TypeError("it is not an object")
        return found


def _frame(salt: int, sequence: int, kind: Kind, *body: bytes) -> bytes:
    """Return the bytes of a record; its body may consist of parts, which are copied once."""
    size = sum(map(len, body))
    head = HEADER.pack(size, 0, salt, sequence, kind)
    crc = google_crc32c.value(head[:4] + head[8:])
    for part in body:
        crc = google_crc32c.extend(crc, part)
    padding = bytes(-(HEADER.size + size) % ALIGN)
    return b"".join((head[:4], crc.to_bytes(4, "little"), head[8:], *body, padding))


def parse_record(data: bytes, at: int, salt: int | None) -> tuple[Record, int, int] | None:
    """Return the record at `at`, its salt and the offset of the next record; None if it is not valid."""
    if at + HEADER.size > len(data):
        return None
    length, crc, own_salt, sequence, kind = HEADER.unpack_from(data, at)
    end = at + HEADER.size + length
    if (salt is not None and own_salt != salt) or end > len(data) or kind not in Kind.__members__.values():
        return None
    body = data[at + HEADER.size : end]
    head = data[at : at + 4] + data[at + 8 : at + HEADER.size]
    if google_crc32c.extend(google_crc32c.value(head), body) != crc:
        return None
    return Record(sequence, Kind(kind), body), own_salt, at + -(-(end - at) // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class JournalSegment:
    """One file of the journal, up to its end.

    Args:
        path: The file.
        number: Its number, which is its name.
        records: Its records, without those after the end.
        covered: The highest LSN that a checkpoint record in it, before or after its end, covers.
        salt: The number that all its records have, and records of a former file in its place lack.
        end: Offset of the next record, bytes.
    """

    path: Path
    number: int
    records: list[Record]
    covered: int
    salt: int
    end: int


def read_segment(path: Path, data: bytes) -> JournalSegment | None:
    """Read one segment up to its end; return None if its base record is not whole.

    Raises:
        CorruptionError: The segment ends before a record that one of its checkpoint records covers.
    """
    first = parse_record(data, 0, None)
    if first is None or first[0].kind is not Kind.BASE:
        return None
    record, salt, at = first
    with parsing(path):
        expected = int(record.json()["bytes"])
    if len(data) < expected:
        raise CorruptionError(f"{path} has {len(data)} bytes, {expected} are expected")
    records = [record]
    while (found := parse_record(data, at, salt)) is not None and found[0].sequence == records[
        -1
    ].sequence + 1:
        records.append(found[0])
        at = found[2]
    marks = [r for r in records if r.kind is Kind.MARK] + _marks_beyond(data, at, salt)
    covered = max((int.from_bytes(mark.body[:8], "little") for mark in marks), default=0)
    if covered > records[-1].sequence:
        raise CorruptionError(
            f"{path} is damaged at byte {at}: the record after number {records[-1].sequence} cannot be read, "
            f"although records up to {covered} were synced",
        )
    return JournalSegment(path, int(path.name), records, covered, salt, at)


def _marks_beyond(data: bytes, at: int, salt: int) -> list[Record]:
    """Return the checkpoint records beyond the segment's end: a torn record may precede them."""
    words = np.frombuffer(data, "<u8", max(0, len(data) - at) // ALIGN * (ALIGN // 8), min(at, len(data)))
    if not words.any():
        return []  # the unused rest of a segment, usually most of its 4 MiB
    words = words.reshape(-1, ALIGN // 8)
    places = np.flatnonzero((words[:, 1] == salt) & ((words[:, 3] & 0xFF) == Kind.MARK))
    found = [parse_record(data, at + int(place) * ALIGN, salt) for place in places]
    return [entry[0] for entry in found if entry is not None]


def read_journal(disk: Disk, folder: Path) -> list[Record]:
    """Return the valid records, the first of which is a base record; see `read_segments`."""
    return [record for segment in read_segments(disk, folder) for record in segment.records]


def read_segments(disk: Disk, folder: Path) -> list[JournalSegment]:
    """Return the segments whose records are valid.

    They start at the newest segment that has a complete base record and was either begun by an opening
    (everything before it was synced by then) or has no predecessor any more. Segments follow each other
    without a gap in their LSNs. A segment whose base record is incomplete, or that starts after the end of
    its predecessor, was never synced; it and all later segments are dropped.

    Raises:
        CorruptionError: A record that a durable checkpoint covers is damaged, or the first base record is.
    """
    names = sorted((name for name in disk.names(folder) if name.isdigit()), key=int)
    paths = [folder / name for name in names]
    segments = [read_segment(path, disk.read_whole(path)) for path in paths]
    if not any(segments):
        return []  # no segment, or a first segment whose base record was never complete
    numbers = {int(path.name) for path in paths}
    start = 0
    for place, segment in enumerate(segments):
        if segment is not None and (
            segment.records[0].json().get("opening") or segment.number - 1 not in numbers
        ):
            start = place
    found: list[JournalSegment] = []
    for place in range(start, len(segments)):
        segment = segments[place]
        if segment is None:
            if not found:
                raise CorruptionError(f"{paths[place]} is damaged: its first record cannot be read")
            break
        if found and segment.records[0].sequence != found[-1].records[-1].sequence + 1:
            if segment.covered > found[-1].records[-1].sequence:
                raise CorruptionError(f"{paths[place - 1]} is damaged: it ends before {paths[place]} begins")
            break
        found.append(segment)
    return found


def no_records(disk: Disk, folder: Path) -> CorruptionError:
    """Return the error for a journal that must have records when `read_journal` has found none."""
    names = sorted((name for name in disk.names(folder) if name.isdigit()), key=int)
    if not names:
        return CorruptionError(f"{folder} has no segment, though rows were written")
    return CorruptionError(f"{folder / names[-1]} is damaged: its first record cannot be read")


def segment_faults(disk: Disk, folder: Path) -> list[tuple[Path, int, str]]:
    """Return bytes of the valid segments that are neither records nor zeros: (file, offset in bytes, text).

    A record that is cut off is reported, too; `read_journal` decides whether its loss matters.
    """
    faults: list[tuple[Path, int, str]] = []
    names = sorted((name for name in disk.names(folder) if name.isdigit()), key=int, reverse=True)
    for name in names:  # the newest first: an opening's base record makes earlier segments obsolete
        path = folder / name
        data = disk.read_whole(path)
        first = parse_record(data, 0, None)
        if first is None or first[0].kind is not Kind.BASE:
            faults.append((path, 0, "its first record cannot be read"))
            continue
        base, salt, _ = first
        try:
            length, is_opening = _read_base(base)
        except CorruptionError as exc:
            faults.append((path, 0, exc.message))
            continue
        found: tuple[Record, int, int] | None = first
        end, sequence = 0, base.sequence - 1
        while found is not None and found[0].sequence == sequence + 1:
            start, end, sequence = end, found[2], found[0].sequence
            padding = data[start + HEADER.size + len(found[0].body) : end]
            if padding.strip(b"\0"):
                faults.append((path, start, "there is something between this record and the next"))
            found = parse_record(data, end, salt)
        rest = np.frombuffer(data, np.uint8, offset=end)
        if rest.any():
            faults.append(
                (path, end + int((rest != 0).argmax()), "the last record is followed by other bytes")
            )
        if len(data) < length:
            faults.append((path, len(data), f"it is cut off, {length} bytes are expected"))
        if is_opening:
            break
    return faults


def _read_base(record: Record) -> tuple[int, bool]:
    """Return the length of a segment, bytes, and whether it begins an opening, from its first record.

    Raises:
        CorruptionError: The record is forged.
    """
    with parsing("the first record"):
        facts = record.json()
        return check_number("bytes", facts["bytes"]), bool(facts.get("opening"))


def cut_off(disk: Disk, folder: Path, path: Path, at: int) -> None:
    """Remove a segment's contents from a byte on, and all segments after it; sync the folder."""
    data = disk.read_whole(path)
    base = parse_record(data, 0, None)
    length = max(len(data), 0 if base is None else _read_base(base[0])[0])
    disk.write_whole(path, data[:at].ljust(length, b"\0"))
    for name in disk.names(folder):
        if name.isdigit() and int(name) > int(path.name):
            disk.unlink(folder / name)
    disk.sync_dir(folder)


def settle_journal(disk: Disk, folder: Path) -> None:
    """Sync the contents of the segments, before anything is done based on them.

    The bytes are written again: after a failed fsync, the page cache may report lost bytes as clean. Space
    that was reserved for more records is freed, because on a full disk an opening has no other.
    """
    for name in disk.names(folder):
        if name.isdigit():
            data = _strip_zeros(disk.read_whole(folder / name))
            file = disk.open(folder / name)
            try:
                file.write(data, 0)
                file.sync()
                file.release(-(-len(data) // _PAGE) * _PAGE, file.size() // _PAGE * _PAGE)
            finally:
                file.close()
    disk.sync_dir(folder)


def _strip_zeros(segment: bytes) -> bytes:
    """Return a segment without the zeros behind its records; `rstrip` alone takes 2 ms for each MB."""
    end = len(segment)
    while segment.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return segment[:end].rstrip(b"\0")


class Journal:
    """Append records to the newest segment.

    Not locked: the storage calls it under its own lock, except `sync_files`, whose result one thread at a
    time syncs. A record is committed as soon as `append` returns. It then survives the process, and survives
    a power failure once a durable checkpoint covers it.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder of the segments.
        uuid: The store's uuid, mixed into the salts.
        generation: The number of this opening, mixed into the salts.
        sequence: LSN of the last valid record.
        segment_bytes: Length of a segment, bytes; a larger record gets a longer one. None:
            `tuning.JOURNAL_SEGMENT_BYTES`.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        *,
        uuid: str,
        generation: int,
        sequence: int,
        segment_bytes: int | None = None,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._key = f"{uuid}/{generation}"
        self._segment_bytes = segment_bytes or tuning.JOURNAL_SEGMENT_BYTES
        self.sequence = sequence
        self._number = max((int(n) for n in disk.names(folder) if n.isdigit()), default=0)
        self._file: File | None = None
        self._older: list[File] = []
        self._linked_at = 0.0  # when the newest segment was found to have a name, monotonic seconds
        self._fresh = True  # older segments, or the newest one's name, may not be synced yet
        self._room = 0
        self._at = 0
        self._salt = 0

    def start_segment(self, base: dict[str, Any], *, room: int = 0) -> None:
        """Create a segment whose first record is `base`, and append there from now on.

        Args:
            base: The state after the last record.
            room: Bytes that the next record needs.
        """
        if self._older:
            # Only removed segments may be missing: sync this name before the next one can be durable.
            self._disk.sync_dir(self._folder)
        self._number += 1
        path = self._folder / f"{self._number:06d}"
        salt_text = f"{self._key}/{self._number}".encode()
        salt = int.from_bytes(hashlib.blake2b(salt_text, digest_size=8).digest(), "little")
        text = json.dumps(base)[:-1]  # may be long if many episodes are open, so build it once

        def frame_base(size: int) -> bytes:
            # The record contains the file's length, so that a truncated file is detected.
            return _frame(salt, self.sequence + 1, Kind.BASE, f'{text}, "bytes": {size}}}'.encode())

        longest = len(frame_base(1 << 50))
        file = self._disk.open(path, create=True)
        try:
            size = self._reserve(file, longest + room + 4 * ALIGN)
            frame = frame_base(size)
            file.write(frame, 0)
        except BaseException:
            self._number -= 1
            file.close()
            with contextlib.suppress(StorageError):  # a file that remains is overwritten or ignored
                self._disk.unlink(path)
            raise
        if self._file is not None:
            self._older.append(self._file)
        self._file, self._room, self._at, self._salt = file, size, len(frame), salt
        self._fresh = True
        self.sequence += 1

    def _reserve(self, file: File, need: int) -> int:
        """Allocate a segment's length, less than usual on a disk that is nearly full."""
        size = max(self._segment_bytes, need)
        for length in (size, max(size // 64, need)):
            try:
                file.allocate(length)
            except StorageError as exc:
                if exc.kind != "disk_full":
                    raise
                file.truncate(0)
            else:
                return length
        least = -(-(need + _LEAST_ROOM) // _PAGE) * _PAGE
        file.allocate(least)
        return least

    def fits(self, size: int) -> bool:
        """Return whether a record with a body of `size` bytes fits; two checkpoint records always do."""
        return self._at + HEADER.size + size + 4 * ALIGN <= self._room

    def append(self, kind: Kind, *body: bytes) -> int:
        """Append a record, whose body may consist of parts, and return its LSN.

        Raises:
            StorageError: The disk failed, or the segment was deleted; nothing was appended.
        """
        assert self._file is not None
        if (now := time.monotonic()) - self._linked_at > _LOOK_SECONDS:
            self._file.check_linked()
            self._linked_at = now
        frame = _frame(self._salt, self.sequence + 1, kind, *body)
        self._file.write(frame, self._at)
        self.sequence += 1
        self._at += len(frame)
        return self.sequence

    def append_framed(self, kind: Kind, frame: Array, size: int) -> int:
        """Append a record that is already laid out; return its LSN.

        Args:
            kind: The kind of the record.
            frame: Room for its header, its body, and zeros up to a multiple of `ALIGN`. Shape `(bytes,)`,
                uint8.
            size: Length of the body, bytes.
        """
        assert self._file is not None
        if (now := time.monotonic()) - self._linked_at > _LOOK_SECONDS:
            self._file.check_linked()
            self._linked_at = now
        sequence = self.sequence + 1
        data = frame.data
        HEADER.pack_into(data, 0, size, 0, self._salt, sequence, kind)
        crc = google_crc32c.value(frame[:4])  # of everything except the checksum itself
        _CHECKSUM.pack_into(data, 4, google_crc32c.extend(crc, frame[8 : HEADER.size + size]))
        # Bytes, because the address of an array takes longer to find than such a record to copy.
        self._file.write(data.tobytes(), self._at)
        self.sequence = sequence
        self._at += len(frame)
        return sequence

    @property
    def length(self) -> int:
        """Length of the newest segment's records, bytes."""
        return self._at

    @property
    def rotated(self) -> bool:
        """Whether there are older segments to remove."""
        return bool(self._older)

    def sync_files(self) -> list[File]:
        """Return the files with the records appended so far."""
        return [*self._older, *([self._file] if self._file else [])]

    def find_unsettled(self) -> tuple[list[File], list[Path]]:
        """Return the files and folders to sync so that the newest record is durable: usually one file."""
        files = self.sync_files()
        return (files, [self._folder]) if self._fresh else (files[-1:], [])

    def settle(self) -> None:
        """Record that all of `find_unsettled` was synced, with no record appended in between."""
        self._fresh = False

    @property
    def folder(self) -> Path:
        """The folder of the segments."""
        return self._folder

    def cut(self, keep: File | None = None) -> None:
        """Remove the segments before `keep`; by default all but the newest.

        The caller has synced the remaining segments, and the folder.
        """
        files = self.sync_files()
        first = len(files) - 1 if keep is None else files.index(keep)
        for file in files[:first]:
            file.close()
        self._older = files[first:-1]
        names = {file.path.name for file in files[first:]}
        for name in self._disk.names(self._folder):
            if name not in names:
                self._disk.unlink(self._folder / name)

    def end(self) -> None:
        """Free the disk space that was reserved for more records. No record may be appended afterwards."""
        if self._file is not None:
            self._file.release(self._at, self._room)

    def close(self) -> None:
        """Close the files."""
        for file in self.sync_files():
            file.close()
        self._older.clear()
        self._file = None
