"""Measures of episodes: numbers that say how an episode moved, computed from the columns of its steps.

Used by buffers to write facts about episodes. A measure depends on the steps of its episode and on nothing
else, so it never changes; `expstore.trajectories.odd` compares measures. All functions take the steps of
several whole episodes, one after the other, and work on all of them at once. They do not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray

Floats = NDArray[np.float64]

#: A field with at most this many values per row is measured value by value.
COMPONENTS = 16
#: A field with at most this many is measured by the length of its rows, as vectors; of a larger one, such as
#: an image, only equal rows are counted.
VECTOR = 1024
#: Number of hashes of a fingerprint, of 16 bits each, and of steps that are hashed together.
HASHES, SHINGLE, _BAND = 16, 4, 4
#: Values are rounded to this many bits of the largest one before they are hashed.
_BITS = 5
_MULTIPLIERS = np.random.Generator(np.random.PCG64(20_000)).integers(
    1, 1 << 63, HASHES, np.uint64
) | np.uint64(1)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Spans:
    """Where episodes begin among rows that contain their steps, one episode after the other.

    Args:
        starts: The first row of each episode, ascending from 0. Shape `(episodes,)`.
        rows: Number of rows.
    """

    starts: IntArray
    rows: int

    @property
    def counts(self) -> IntArray:
        """Number of steps of each episode. Shape `(episodes,)`."""
        return np.diff(self.starts, append=self.rows)

    def sums(self, values: Array) -> Floats:
        """Return the sum over each episode. Shapes `(rows, ...)`, `(episodes, ...)`."""
        return np.add.reduceat(values, self.starts, axis=0, dtype=np.float64)

    def spread_out(self, values: Array) -> Array:
        """Return for each row the value of its episode. Shapes `(episodes, ...)`, `(rows, ...)`."""
        return np.repeat(values, self.counts, axis=0)

    def shares(self, marks: NDArray[np.bool_]) -> Floats:
        """Return the share of marked steps of each episode. Shapes `(rows,)`, `(episodes,)`."""
        return self.sums(marks) / self.counts


def measure_signal(rows: Array, spans: Spans) -> dict[str, Floats]:
    """Measure a field of numbers: `level`, `spread`, `still`, `change` and `jump` of each of its values.

    `level` is the mean and `spread` the standard deviation over the steps; `still` the share of steps whose
    value equals the one before; `change` the mean and `jump` the largest absolute difference of two
    consecutive steps. Values that are not finite are left out. Of a field with more than `COMPONENTS` values,
    level and spread are those of the length of the rows, and differences are lengths of differences.

    Args:
        rows: Values of the steps. Shape `(rows, ...)`.
        spans: The episodes.

    Returns:
        Arrays by measure. Shape `(episodes, values)`; `(episodes, 1)` for a wide field.
    """
    values = rows.reshape(len(rows), -1).astype(np.float64)
    fine = np.isfinite(values)
    values[~fine] = 0.0
    steps = np.zeros_like(values)
    np.subtract(values[1:], values[:-1], out=steps[1:])
    pairs = fine.copy()
    pairs[1:] &= fine[:-1]
    pairs[spans.starts] = False
    steps[~pairs] = 0.0
    if values.shape[1] > COMPONENTS:
        values, steps = (np.linalg.norm(each, axis=1, keepdims=True) for each in (values, steps))
        fine, pairs = (np.all(each, axis=1, keepdims=True) for each in (fine, pairs))
    np.abs(steps, out=steps)
    count = np.maximum(1, spans.sums(fine))
    first = values[spans.starts]
    values -= spans.spread_out(first)  # so that the spread of one value in all steps is 0, not rounding
    values[~fine] = 0.0
    mean = spans.sums(values) / count
    values -= spans.spread_out(mean)
    values[~fine] = 0.0
    moves = np.maximum(1, spans.sums(pairs))
    return {
        "level": first + mean,
        "spread": np.sqrt(spans.sums(values * values) / count),
        "still": spans.sums(pairs & (steps == 0.0)) / moves,
        "change": spans.sums(steps) / moves,
        "jump": np.maximum.reduceat(steps, spans.starts, axis=0),
    }


def equals_previous(rows: Array) -> NDArray[np.bool_]:
    """Return whether each row equals the one before, to the bit; False for the first. Shape `(rows,)`."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    same = np.zeros(len(flat), np.bool_)
    if flat.shape[1]:
        width = flat.shape[1] * flat.itemsize
        size = next(size for size in (8, 4, 2, 1) if width % size == 0)
        words = flat.view(np.uint8).reshape(len(flat), width).view(f"u{size}")
        some = (
            np.flatnonzero(words[1:, 0] == words[:-1, 0]) + 1
        )  # most rows differ in their first bytes, or not
        same[some] = (words[some] == words[some - 1]).all(1)
    return same


def find_not_finite(columns: Iterable[Array], spans: Spans) -> NDArray[np.bool_]:
    """Return which rows have a value that is NaN or infinite. Shapes `(rows, ...)`, `(rows,)`."""
    marks = np.zeros(spans.rows, np.bool_)
    for column in columns:
        if column.dtype.kind == "f":
            marks |= ~np.isfinite(column.reshape(spans.rows, -1)).all(1)
    return marks


def find_breaks(pairs: Iterable[tuple[Array, Array]], spans: Spans) -> NDArray[np.bool_]:
    """Return which steps, but the first of an episode, do not begin with the next observation before.

    Args:
        pairs: Observations and next observations. Shapes `(rows, ...)`.
        spans: The episodes.
    """
    marks = np.zeros(spans.rows, np.bool_)
    for now, after in pairs:
        here, before = now[1:].reshape(spans.rows - 1, -1), after[:-1].reshape(spans.rows - 1, -1)
        marks[1:] |= ((here != before) & ((here == here) | (before == before))).any(1)
    marks[spans.starts] = False
    return marks


def find_pauses(times: IntArray, spans: Spans) -> Floats:
    """Return the longest time between two steps of each episode in seconds; `times` are microseconds."""
    steps = np.diff(times, prepend=times[:1])
    steps[spans.starts] = 0
    pauses: Floats = np.maximum.reduceat(steps, spans.starts) / 1e6
    return pauses


def fingerprint(columns: Sequence[Array], spans: Spans) -> list[str]:
    """Return a MinHash of each episode: `likeness` of two of them estimates the share of equal steps.

    Values are rounded to a grid relative to the largest one of their episode, so a copy with a little noise
    has nearly the same fingerprint. `SHINGLE` consecutive steps are hashed together.

    Args:
        columns: Fields of numbers. Shapes `(rows, ...)`.
        spans: The episodes.

    Returns:
        4 hexadecimal digits for each of `HASHES` hashes, per episode; nothing without a field of at most
        `COMPONENTS` values.
    """
    hashed = np.zeros(spans.rows, np.uint64)
    columns = [column for column in columns if column[0].size <= COMPONENTS]
    if not columns:
        return []
    for column in columns:
        values = np.nan_to_num(column.reshape(len(column), -1).astype(np.float64))
        largest = np.maximum.reduceat(np.abs(values), spans.starts, axis=0)
        _, exponent = np.frexp(largest)
        grid = np.ldexp(1.0, np.clip(_BITS - exponent, -1000, 1000))
        for part in np.rint(values * spans.spread_out(grid)).astype(np.int64).T:
            hashed = _mix(hashed ^ part.view(np.uint64))
    shingles, last = hashed.copy(), spans.spread_out(spans.starts + spans.counts - 1)
    at = np.arange(spans.rows)
    for ahead in range(1, SHINGLE):
        shingles = _mix(shingles ^ hashed[np.minimum(at + ahead, last)] * np.uint64(2 * ahead + 1))
    found = np.empty((len(spans.starts), HASHES), np.uint64)
    for number, multiplier in enumerate(_MULTIPLIERS):
        found[:, number] = np.minimum.reduceat(_mix(shingles * multiplier), spans.starts)
    return [one.tobytes().hex() for one in found.astype("<u2")]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(32))) * _MIX
    return values ^ (values >> np.uint64(29))


def find_copies(prints: Sequence[str]) -> tuple[IntArray, Floats]:
    """Find for each episode the earlier one that it is most like.

    Episodes are compared if four consecutive hashes are equal, each with the first one that has them.

    Args:
        prints: What `fingerprint` returned, in the order of the episodes; "" for none.

    Returns:
        Number of the earlier episode, or -1, and the share of equal hashes. Shapes `(episodes,)`.
    """
    known = np.array([one != "" for one in prints], np.bool_)
    hashes = np.zeros((len(prints), HASHES), "<u2")
    if known.any():
        hashes[known] = np.frombuffer(bytes.fromhex("".join(prints)), "<u2").reshape(-1, HASHES)
    partner, share = np.full(len(prints), -1), np.zeros(len(prints))
    for band in np.split(hashes, HASHES // _BAND, axis=1):
        names = np.ascontiguousarray(band).view("V8")[:, 0]
        _, first, number = np.unique(names, return_index=True, return_inverse=True)
        other = first[number]
        alike = np.where((other < np.arange(len(other))) & known, (hashes == hashes[other]).mean(1), 0.0)
        better = alike > share
        partner[better], share[better] = other[better], alike[better]
    return partner, share
