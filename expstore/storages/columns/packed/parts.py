"""Objects that packed columns share: a chunk in memory, and the positions of rows.

Used by the writer and the reader of packed columns. This module uses no files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.disk.mapped_files import AddressRange


class Frame:
    """A packed chunk in memory.

    Args:
        data: The bytes of the chunk.
    """

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.address = int(self.data.ctypes.data)


class Locations(NamedTuple):
    """The positions of all rows. Replaced as a whole, except for chunks that replace others.

    Args:
        where: Address of each chunk's frame; 0 if there is no such chunk. Shape `(chunks,)`, int64.
        sizes: Length of its frame; negative if the chunk has no frame. Shape `(chunks,)`, int64.
        laps: Lap of the ring in which the chunk was written. Shape `(chunks,)`, int64.
        maps: Objects that keep the addresses valid, by shard: the newest last.
        base: First slot of the chunk that is not full.
        held: Number of rows in that chunk.
        rows: These rows. Shape `(chunk rows, *row shape)`.
    """

    where: IntArray
    sizes: IntArray
    laps: IntArray
    maps: dict[int, tuple[AddressRange | Frame, ...]]
    base: int
    held: int
    rows: Array
