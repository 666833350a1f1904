"""Segments of a snapshot: hard links to the store's finished segments, and copies of the unfinished ones.

Used by snapshots. Copies are read from the store's memory maps, so that no thread has to wait. No file of the
store is changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expstore.disk.files import Disk
from expstore.storages.columns.arrow.ipc import END, Header, crc_of, read_header
from expstore.storages.columns.arrow.segments import Segments
from expstore.storages.columns.capture import Capture, Target
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.paths import SEGMENTS


@dataclass(frozen=True, slots=True)
class _Held:
    """A segment as it is at one moment.

    Args:
        path: The segment's file.
        keeps: The object that keeps the file mapped.
        address: Address of the map.
        end: Offset of the end of the last batch, bytes.
        newest: Header of the last batch.
        at: Offset of the last batch, bytes.
        settled: Whether the file is sealed and synced.
    """

    path: Path
    keeps: Any
    address: int
    end: int
    newest: Header
    at: int
    settled: bool


class SegmentCapture(Capture):
    """Segments as they are at one moment.

    Args:
        segments: The store's segments.
        places: Positions of their fields among all columns.
        low: Rows up to this id need not be kept.
    """

    def __init__(self, segments: Segments, places: Sequence[int], low: int) -> None:
        self.places = places
        self.packings: dict[int, Packing] = {}
        self._segments = segments
        with segments.changing:
            self._held = [
                _Held(
                    path=one.path,
                    keeps=one.addresses,
                    address=one.address,
                    end=one.end,
                    newest=one.headers[-1],
                    at=one.offsets[-1],
                    settled=one.sealed and one.file is None,
                )
                for one in segments.segments
                if one.headers and (one.last > low or segments.parents)  # newer rows may continue older ones
            ]

    def rows(self, place: int, first_id: int, count: int) -> list[Any]:
        """Return a run of rows of a field, a pyarrow Array per batch."""
        return self._segments.views(self.places.index(place), first_id, count)

    def begin(self, target: Target) -> list[tuple[Path, int]]:
        """Link the segments that are finished, and copy the others from where the store has them mapped."""
        disk, folder, written = target.disk, target.folder / SEGMENTS, []
        target.make_folder(folder)
        for segment in self._held:
            path = folder / segment.path.name
            if segment.settled and _share(disk, segment, path):
                continue
            file = disk.open(path, create=True)
            try:
                file.write(ctypes.string_at(segment.address, segment.end), 0)
                file.write(END, segment.end)
            finally:
                file.close()
            written.append((path, segment.end + len(END)))
        return written

    def complete(self) -> list[tuple[Path, int]]:
        """Return no file: `begin` has brought in all segments."""
        return []


def _share(disk: Disk, segment: _Held, path: Path) -> bool:
    """Hard-link a segment if the file still has the known batches: it may just have been merged."""
    if not disk.exists(segment.path) or not disk.link(segment.path, path):
        return False
    file = disk.open(path, write=False)
    try:
        if file.size() == segment.end + len(END):
            message = file.read(segment.at, segment.newest.size)
            header = read_header(message)
            known = segment.newest
            if (
                header is not None
                and (header.first, header.rows, header.crc) == (known.first, known.rows, known.crc)
                and crc_of(message, header) == header.crc
            ):
                return True
    finally:
        file.close()
    disk.unlink(path)
    return False
