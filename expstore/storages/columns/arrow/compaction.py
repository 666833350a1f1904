"""Compaction: which segments are merged, and the bytes of the merged segment.

Short batches are merged into long ones, and removed rows are left out. Used by the writer of segments, for
rows that a checkpoint covers. This module uses no files.
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

#: Number of segments of about the same length that are merged into one.
TOGETHER = 8
_LEAST = 4096


def worth_merging(segments: Sequence[Segment], *, segment_bytes: int, batch_bytes: int) -> list[Segment]:
    """Return neighbouring segments that should be merged, or [].

    Each row is written again at most once for its batch, and once for each time its segment's length grows
    eightfold.

    Args:
        segments: Sealed segments, in the order of their ids.
        segment_bytes: Maximum length of a merged segment, bytes.
        batch_bytes: Maximum length of a merged batch, bytes.
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
    """Return whether merging would at least halve the number of batches."""
    groups = list(_groups([segment], batch_bytes))
    return 2 * len(groups) <= len(segment.headers)


def _groups(segments: Sequence[Segment], batch_bytes: int) -> list[list[tuple[Segment, Header, int]]]:
    """Return the groups of consecutive batches that fit into one batch together."""
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
    """Return the bytes of a segment with the rows of these segments, without the end mark."""
    parts = [np.frombuffer(store.head, np.uint8)]
    for group in _groups(segments, batch_bytes):
        segment, header, at = group[0]
        if len(group) == 1:
            parts.append(np.frombuffer(segment.read(at, header.size), np.uint8))
        else:
            first, last = group[0][1].first, group[-1][1].last
            rows = store.take(np.arange(first, last + 1), range(len(store.fields)))
            parts += store.encode(first, rows)
    return parts


def compact_segment(store: SegmentWriter, segment: Segment, low: int, deleted: IdSet) -> list[Array]:
    """Return the bytes of a segment without its removed rows, and without the end mark.

    Args:
        store: The segments.
        segment: One of them.
        low: All rows up to this id were removed.
        deleted: Rows above `low` that were removed.
    """
    parts = [np.frombuffer(store.head, np.uint8)]
    near = deleted.between(segment.first - 1, segment.last)
    for header, at in zip(segment.headers, segment.offsets, strict=True):
        firsts, lasts = near.others(max(low, header.first - 1), header.last)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if (first, last) == (header.first, header.last):
                parts.append(np.frombuffer(segment.read(at, header.size), np.uint8))
            else:
                rows = store.take(np.arange(first, last + 1), range(len(store.fields)))
                parts += store.encode(first, rows)
    return parts
