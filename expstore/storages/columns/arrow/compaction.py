"""Which segments are made one, and what it holds: long batches in the place of short ones, no row that left.

Used by what writes segments, for rows that a mark covers. It touches no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from expstore.core import tuning
from expstore.core.id_set import IdSet
from expstore.core.values import Array
from expstore.storages.columns.arrow.ipc import Header
from expstore.storages.columns.arrow.segments import Segment

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.writer import SegmentWriter

__all__ = ["compact_segment", "merge_segments", "worth_merging"]

#: So many segments of about the same length become one.
TOGETHER = 8
_LEAST = 4096


def worth_merging(segments: Sequence[Segment], *, segment_bytes: int, batch_bytes: int) -> list[Segment]:
    """Return segments that are to be one, neighbours; none: all are well as they are.

    Each row is written again at most once for its batch, and once for each eightfold of its segment's length.

    Args:
        segments: Sealed, in the order of their ids.
        segment_bytes: How long one may become.
        batch_bytes: How long a batch becomes.
    """
    for segment in reversed(segments):
        short = segment.size < len(segment.headers) * batch_bytes // 4
        if (
            len(segment.headers) > tuning.ARROW_COMPACTION_BATCHES
            and short
            and _shortens(segment, batch_bytes)
        ):
            return [segment]
    levels = [_level(segment.size) for segment in segments]
    for end in range(len(segments), TOGETHER - 1, -1):
        run = segments[end - TOGETHER : end]
        alike = len(set(levels[end - TOGETHER : end])) == 1
        if alike and sum(segment.size for segment in run) <= segment_bytes:
            return list(run)
    return []


def _level(size: int) -> int:
    level = 0
    while size >= _LEAST * TOGETHER ** (level + 1):
        level += 1
    return level


def _shortens(segment: Segment, batch_bytes: int) -> bool:
    """Return whether there would be at most half as many batches."""
    groups = list(_groups([segment], batch_bytes))
    return 2 * len(groups) <= len(segment.headers)


def _groups(segments: Sequence[Segment], batch_bytes: int) -> list[list[tuple[Segment, Header, int]]]:
    """Return batches that are to be one: they follow one another, and are short."""
    found: list[list[tuple[Segment, Header, int]]] = []
    size = 0
    for segment in segments:
        for header, at in zip(segment.headers, segment.offsets, strict=True):
            follows = found and found[-1][-1][1].last + 1 == header.first
            if follows and size + header.size <= batch_bytes:
                found[-1].append((segment, header, at))
                size += header.size
            else:
                found.append([(segment, header, at)])
                size = header.size
    return found


def merge_segments(store: SegmentWriter, segments: Sequence[Segment], batch_bytes: int) -> list[Array]:
    """Return the bytes of a segment that holds the rows of these; its end is left out."""
    widths = store.widths_of(segments)
    parts = [np.frombuffer(widths.head, np.uint8)]
    for group in _groups(segments, batch_bytes):
        segment, header, at = group[0]
        if len(group) == 1 and segment.widths == widths:
            parts.append(np.frombuffer(segment.read(at, header.size), np.uint8))
        else:
            first, last = group[0][1].first, group[-1][1].last
            rows = store.take(np.arange(first, last + 1), range(len(store.fields)))
            parts += store.encode(first, rows, widths)
    return parts


def compact_segment(store: SegmentWriter, segment: Segment, low: int, deleted: IdSet) -> list[Array]:
    """Return the bytes of a segment without the rows that have left; its end is left out.

    Args:
        store: Its segments.
        segment: One of them.
        low: Rows up to this id have left.
        deleted: So have these.
    """
    parts = [np.frombuffer(segment.widths.head, np.uint8)]
    near = deleted.between(segment.first - 1, segment.last)
    for header, at in zip(segment.headers, segment.offsets, strict=True):
        firsts, lasts = near.others(max(low, header.first - 1), header.last)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if (first, last) == (header.first, header.last):
                parts.append(np.frombuffer(segment.read(at, header.size), np.uint8))
            else:
                rows = store.take(np.arange(first, last + 1), range(len(store.fields)))
                parts += store.encode(first, rows, segment.widths)
    return parts
