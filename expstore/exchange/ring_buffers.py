"""Recognise files that hold a ring buffer: only some rows are filled, and the oldest is not the first.

Used by the HDF5 and NPZ formats. Sources of the forms:

- Spinning Up, `ReplayBuffer` (spinup/algos/pytorch/sac/sac.py): single values `ptr`, `size`, `max_size`;
- Stable-Baselines3, `ReplayBuffer`: `pos` and `full`, and arrays of shape `(rows, environments, ...)`;
- Tianshou, `ReplayBuffer.save_hdf5` (2.0): arrays in the group `_meta`, with the attributes `_size` and
  `_insertion_idx` (1.x: `_index`) of the file; a `VectorReplayBuffer` has one ring after the other, whose
  first rows, lengths and last written rows are `_offset`, `_lengths` and `last_index`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from expstore.core.values import Array
from expstore.errors import SchemaError
from expstore.exchange.foreign_rows import Column

#: Ranges of filled rows (first, one after the last) in the order of time, for each environment.
Lanes = list[list[tuple[int, int]]]
#: Names of the next row to write, and of the number of filled rows.
_POSITIONS = ("ptr", "pos", "_insertion_idx", "_index")
_SIZES = ("size", "_size")


def find_lanes(scalars: Mapping[str, float], rows: int) -> Lanes:
    """Return the filled rows of a ring buffer.

    Args:
        scalars: The single values in the file by name.
        rows: Number of rows of the arrays.

    Returns:
        [] if the file holds no ring buffer.

    Raises:
        SchemaError: The values do not fit the arrays.
    """
    position = next((int(scalars[name]) for name in _POSITIONS if name in scalars), None)
    size = next((int(scalars[name]) for name in _SIZES if name in scalars), None)
    if size is None and "full" in scalars and position is not None:
        size = rows if scalars["full"] else position
    if size is None or (position is None and size >= rows):
        return []
    return [_fit(0, rows, size if position is None else position, size)]


def tianshou_lanes(facts: Mapping[str, Any], rows: int) -> Lanes:
    """Return the filled rows of a buffer of Tianshou.

    Args:
        facts: The attributes and arrays of the file outside of `_meta`, by name.
        rows: Number of rows of the arrays.

    Raises:
        SchemaError: The values do not fit the arrays.
    """
    if "_offset" not in facts:
        return find_lanes(
            {name: float(facts[name]) for name in (*_POSITIONS, *_SIZES) if name in facts}, rows
        )
    offsets, sizes, newest = (
        [int(value) for value in facts[name]] for name in ("_offset", "_lengths", "last_index")
    )
    ends = [*offsets[1:], rows]
    return [
        _fit(offset, end, last + 1 - offset, size)
        for offset, end, size, last in zip(offsets, ends, sizes, newest, strict=True)
        if size
    ]


def describe_lanes(lanes: Lanes, scalars: Iterable[str]) -> list[str]:
    """Return notes: that a ring buffer is read from its oldest row, or which single values are left out."""
    if not lanes:
        return [f"{name!r} is one value for all rows, and left out" for name in scalars]
    rows = sum(stop - start for lane in lanes for start, stop in lane)
    found = [f"the file is a ring buffer: its {rows:,} filled rows are read, the oldest first"]
    rest = [name for name in scalars if name not in (*_POSITIONS, *_SIZES, "full", "max_size", "maxsize")]
    return [*found, *describe_lanes([], rest)]


def _fit(offset: int, end: int, position: int, size: int) -> list[tuple[int, int]]:
    """Return the filled rows of the ring in rows `offset` to `end` - 1, the oldest first."""
    room = end - offset
    if not (0 < size <= room and 0 <= position <= room and size in (room, position)):
        raise SchemaError(
            f"the file has a ring buffer of {room} rows with {size} filled, but its next row is {position}",
            hint="save the filled rows alone, the oldest first",
        )
    position %= room
    ranges = [(position, room), (0, position)] if size == room else [(0, size)]
    return [(offset + start, offset + stop) for start, stop in ranges if start < stop]


def has_environments(scalars: Mapping[str, float], columns: Sequence[Column]) -> bool:
    """Return whether arrays have the shape `(rows, environments, ...)`, as those of Stable-Baselines3 do."""
    shapes = [column.shape for column in columns]
    first = shapes[0][:1] if shapes else ()
    return {"pos", "full"} <= set(scalars) and first != () and all(shape[:1] == first for shape in shapes)


class SplitEnvironments:
    """Read the rows of environments one after the other, from arrays that have them side by side.

    Args:
        reader: Reads the arrays: a `FlatReader`.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        count = reader.columns[0].shape[0]
        self._rows = reader.lengths[0]
        self._whole = {column.path: column for column in reader.columns}
        self.columns = [Column(one.path, one.dtype, one.shape[1:]) for one in reader.columns]
        self.lengths = [length * count for length in reader.lengths]
        (lane,) = reader.lanes or [[(0, self._rows)]]
        self.lanes: Lanes = [
            [(start + number * self._rows, stop + number * self._rows) for start, stop in lane]
            for number in range(count)
        ]
        self.about, self.notes = reader.about, reader.notes

    def read(self, wanted: Sequence[Column], first: int, count: int) -> list[Array]:
        """Return rows of one environment. Shapes `(count, *row shape)`."""
        number, row = divmod(first, self._rows)
        found = self._reader.read([self._whole[column.path] for column in wanted], row, count)
        return [values[:, number] for values in found]
