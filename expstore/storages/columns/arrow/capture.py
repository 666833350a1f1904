"""The segments of a version: second names of those that the store has finished, and copies of the others.

Used by snapshots. What is copied comes from where the store has it mapped, so that nobody has to wait. It
changes no file of the store.
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

__all__ = ["Held", "link_segments", "segments_now"]


@dataclass(frozen=True, slots=True)
class Held:
    """Hold a segment as it is at one moment.

    Args:
        path: Where it lies.
        keeps: What keeps it mapped.
        address: Where.
        end: Where its last batch ends.
        newest: That batch.
        at: Where it begins.
        settled: Whether the file is sealed, and on the disk.
    """

    path: Path
    keeps: Any
    address: int
    end: int
    newest: Header
    at: int
    settled: bool


def segments_now(segments: Segments, low: int) -> list[Held]:
    """Return the segments that hold rows newer than `low`; whoever writes goes on, and these stay."""
    with segments.changing:
        return [
            Held(
                path=one.path,
                keeps=one.addresses,
                address=one.address,
                end=one.end,
                newest=one.headers[-1],
                at=one.offsets[-1],
                settled=one.sealed and one.file is None,
            )
            for one in segments.segments
            if one.last > low
        ]


def link_segments(disk: Disk, held: Sequence[Held], folder: Path) -> list[tuple[Path, int]]:
    """Bring segments into the folder of a version; return the files that were written, and their lengths."""
    written = []
    for segment in held:
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


def _share(disk: Disk, segment: Held, path: Path) -> bool:
    """Give a segment a second name if it is what is known of it: it may have been merged just now."""
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
