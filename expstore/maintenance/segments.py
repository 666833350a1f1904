"""The part of `verify` and `repair` that finds damaged and missing batches in Arrow segments.

It reads every batch of every segment once. A repair rewrites segments with None for lost rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from expstore.core.values import IntArray, Runs, merge_runs
from expstore.disk.files import Disk
from expstore.maintenance.findings import Finding, Inspection, runs_of
from expstore.storages.columns.arrow.ipc import read_header
from expstore.storages.columns.arrow.segments import Segment, Segments
from expstore.storages.columns.arrow.writer import SegmentWriter

_NO_IDS = np.zeros(0, np.int64)


def check_segments(inspection: Inspection) -> None:
    """Record damaged and missing variable-length rows, among the rows that a checkpoint covers."""
    for segments in () if inspection.group is None else inspection.group.shared:
        _check_segments(inspection, segments)


def _check_segments(inspection: Inspection, segments: Segments) -> None:
    lost: dict[Path, list[IntArray]] = {}
    for segment in segments.segments:
        with segments.reading(segment) as read:
            for number, header in enumerate(segment.headers):
                if not segment.is_sound(number, read):
                    lost.setdefault(segment.path, []).append(np.arange(header.first, header.last + 1))
    for first, count in inspection.find_settled_runs():
        for start, rows in segments.find_missing(first, count) if count else ():
            path = _path_of(segments, start)
            lost.setdefault(path, []).append(np.arange(start, start + rows))
    if segments.parents:
        damaged = np.unique(np.concatenate([_NO_IDS, *(ids for found in lost.values() for ids in found)]))
        readable = np.setdiff1d(_list_settled_ids(inspection), damaged)
        for segment in segments.segments:
            ids = readable[(readable >= segment.first) & (readable <= segment.last)]
            if (broken := segments.find_broken(ids, damaged)).size:
                lost.setdefault(segment.path, []).append(broken)
    for path in sorted(lost):
        ids = np.unique(np.concatenate(lost[path]))
        _note(inspection, path, ids)


def _path_of(segments: Segments, first_id: int) -> Path:
    """Return the segment in which a row should be."""
    own = segments.path_of(first_id)
    before = [path for path in segments.paths() if path.name <= own.name]
    ended = [one.path for one in segments.segments if one.sealed and one.last < first_id]
    return own if not before or before[-1] in ended else before[-1]


def _list_settled_ids(inspection: Inspection) -> IntArray:
    """Return the readable rows that a checkpoint covers."""
    runs = [np.arange(first, first + count) for first, count in inspection.find_settled_runs()]
    return np.concatenate([_NO_IDS, *runs])


def _note(inspection: Inspection, path: Path, ids: IntArray) -> None:
    runs = runs_of(ids[np.isin(ids, _list_settled_ids(inspection))])
    name, gone = inspection.relative(path), not inspection.disk.exists(path)
    where = f" (ids {', '.join(f'{a} to {b}' for a, b in runs)})" if runs else " (no readable row)"
    text = "is missing" if gone else "has damaged or missing batches"
    inspection.note(
        Finding(
            kind="missing" if gone else "payload",
            path=name,
            message=f"{name}{where} {text}",
            shard=0,
            ids=runs,
        )
    )


def mend_segments(disk: Disk, inspection: Inspection, lost: Runs) -> None:
    """Rewrite damaged segments with None for lost rows, which are no longer readable.

    Args:
        disk: Access to files.
        inspection: The state of the check.
        lost: The rows that are dropped, in all segments.
    """
    for segments in () if inspection.group is None else inspection.group.shared:
        _mend_segments(disk, segments, lost)


def _mend_segments(disk: Disk, segments: Segments, lost: Runs) -> None:
    folder, fields, slots = segments.folder, segments.fields, segments.slots
    writer = SegmentWriter(disk, folder, fields, slots, compression=segments.codec)
    disk.make_dir(segments.folder)
    starts = [segment.first for segment in segments.segments]
    for number, segment in enumerate(segments.segments):
        with segments.reading(segment) as read:
            sound = [place for place in range(len(segment.headers)) if segment.is_sound(place, read)]
        end = starts[number + 1] if number + 1 < len(starts) else 1 << 62
        mine = _clip(lost, segment.first, end - 1)
        if mine or len(sound) < len(segment.headers):
            parts = _parts(writer, segment, sound, mine)
            writer.rewrite(segment.path, parts)
    for first, last in _clip(lost, 1, (starts[0] if starts else 1 << 62) - 1):
        writer.rewrite(writer.path_of(first), _build_nulls(writer, first, last))


def _clip(runs: Runs, first: int, last: int) -> Runs:
    """Return the parts of some runs between two ids."""
    return merge_runs([(max(a, first), min(b, last)) for a, b in runs if a <= last and b >= first])


def _build_nulls(writer: SegmentWriter, first: int, last: int) -> list[tuple[int, bytes]]:
    """Return rows of None as messages, each with its first id."""
    columns = [pa.nulls(last + 1 - first, kind) for kind in writer.stored_kinds]
    messages = [message.tobytes() for message in writer.encode(first, columns)]
    return [(header.first, message) for message in messages if (header := read_header(message)) is not None]


def _parts(
    writer: SegmentWriter, segment: Segment, sound: Sequence[int], lost: Runs
) -> list[tuple[int, bytes]]:
    """Return the intact batches of a segment, and rows of None in place of the others."""
    parts = []
    for place in sound:
        header = segment.headers[place]
        parts.append((header.first, segment.read(segment.offsets[place], header.size)))
    whole = {(segment.headers[place].first, segment.headers[place].last) for place in sound}
    for first, last in lost:
        for start, stop in _subtract(first, last, whole):
            parts += _build_nulls(writer, start, stop)
    return parts


def _subtract(first: int, last: int, whole: set[tuple[int, int]]) -> Runs:
    """Return a run of ids without the ids that are present."""
    found, at = [], first
    for low, high in sorted(whole):
        if high < at or low > last:
            continue
        if low > at:
            found.append((at, low - 1))
        at = high + 1
    if at <= last:
        found.append((at, last))
    return tuple(found)
