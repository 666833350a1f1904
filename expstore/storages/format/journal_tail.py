"""Read the journal of another process as it grows.

Used by followers. It remembers its position in the segments, so that each call reads only new records. It
does not interpret records and writes nothing.
"""

from __future__ import annotations

from pathlib import Path

from expstore.disk.files import Disk, File
from expstore.storages.format.journal import (
    HEADER,
    JournalSegment,
    Record,
    parse_record,
    read_segment,
    read_segments,
)

_READ_BYTES = 1 << 18


class JournalTail:
    """Follow the journal of another process, record by record.

    Not locked. If `poll` returns None, create a new object and start again.

    Args:
        disk: Access to files; nothing is written.
        folder: The folder of the segments.

    Raises:
        CorruptionError: The journal is damaged, or a record was being written while it was read.
        StorageError: A segment was removed while it was read.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk, self._folder = disk, folder
        segments = read_segments(disk, folder)
        #: The records that existed when this object was created.
        self.records = [record for segment in segments for record in segment.records]
        self._number = segments[-1].number if segments else 0
        self._salt, self._at = (segments[-1].salt, segments[-1].end) if segments else (0, 0)
        self._sequence = self.records[-1].sequence if segments else 0
        self._file = disk.open(segments[-1].path, write=False) if segments else None

    def poll(self) -> list[Record] | None:
        """Return the records that were appended since the last call; None if some were missed."""
        if self._file is None:
            return None
        new: list[Record] = []
        while True:
            size = len(new)
            self._read_on(self._file, new)
            if len(new) > size:
                continue
            later = [int(name) for name in self._disk.names(self._folder) if name.isdigit()]
            later = [number for number in later if number > self._number]
            if not later:
                return new
            if min(later) != self._number + 1:
                return None
            path = self._folder / f"{self._number + 1:06d}"
            segment = read_segment(path, self._disk.read_whole(path))
            if segment is None:
                return new  # the segment is still being created
            if not self._go_on(segment, new):
                return None

    def _read_on(self, file: File, new: list[Record]) -> None:
        data = file.read(self._at, _READ_BYTES)
        if len(data) >= HEADER.size:
            length, _, salt, _, _ = HEADER.unpack_from(data)
            if salt == self._salt and HEADER.size + length > len(data):
                data = file.read(self._at, HEADER.size + length)
        at = 0
        while (found := parse_record(data, at, self._salt)) and found[0].sequence == self._sequence + 1:
            new.append(found[0])
            self._sequence, at = found[0].sequence, found[2]
        self._at += at

    def _go_on(self, segment: JournalSegment, new: list[Record]) -> bool:
        """Continue in the next segment; return whether it continues the records that were read."""
        if segment.records[0].json().get("opening"):
            return False
        if segment.records[0].sequence > self._sequence + 1 and self._file is not None:
            self._read_on(self._file, new)  # appended while the folder was listed
        if segment.records[0].sequence != self._sequence + 1:
            return False
        self.close()
        self._file = self._disk.open(segment.path, write=False)
        self._number, self._salt, self._at = segment.number, segment.salt, segment.end
        self._sequence = segment.records[-1].sequence
        new += segment.records
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
