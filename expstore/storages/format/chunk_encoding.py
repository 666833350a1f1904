"""How the rows of a wide field are packed: codec, rows per chunk, rows per shard.

Used by packed columns and by the code that writes their Zarr metadata. It uses no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.schema import Field
from expstore.storages.format.codecs import CODECS, DEFAULT_CODEC, Codec

#: Target size of a chunk, unpacked.
CHUNK_BYTES = 256 * 1024
#: Blocks per frame. To read a row, the blocks before its own need not be unpacked. Two blocks save a fifth of
#: the time, and take a quarter more space; more blocks save nothing, because the first row takes most of a
#: block's time.
BLOCKS = 2
#: A frame whose compression ratio is at least this is unpacked quickly enough: it has one block.
_SHORT = 64
CHUNK_ROWS = 64
#: Upper bounds for the rows and bytes of a chunk: reading one row unpacks a whole chunk.
MOST_ROWS, MOST_BYTES = 4096, 16 << 20
SHARD_BYTES = 1 << 30
#: A ring with more shards than this gets longer shards instead.
MANY_SHARDS = 1024
#: The longest first axis of a row that may be a stack of images.
MOST_PARTS = 16
#: A row's bytes are searched for among the rows before it: among as many as make this many bytes, within the
#: bounds of `tuning.PACKED_LOOKBACK_ROWS`, and for very wide rows at most eight times as many bytes.
REACH_BYTES = 4 << 20


@dataclass(frozen=True)
class Packing:
    """How a field is packed.

    A packed chunk is the codec's frame and its crc32c, as Zarr's codecs `bytes`, `blosc` (or another) and
    `crc32c` produce it. It is never longer than `most_bytes`.

    Args:
        codec: One of `CODECS`.
        rows: Rows per chunk.
        shard: Rows per shard, a multiple of `rows`.
        shares: Whether rows may be stored in the column of the next observations. Then a table precedes each
            frame: the crc32c (u32) of the rest of the table, and for each part of a row (u16) how many parts
            before its own position the same bytes are; 0: the part is in the frame, which has zeros for the
            other parts. If no part is in the frame, there is no frame.
        parts: How many parts a row has: the length of its first axis for stacks of images, otherwise 1. In
            a frame, the first parts of all rows come first, then the second parts.
        within: Whether parts are stored in this column itself, not in that of the next observations.

    Example:
        >>> from expstore.storages.format.chunk_encoding import Packing
        >>> packing = Packing("lz4hc", rows=16, shard=4096)
        >>> rows = np.zeros((16, 84, 84), np.uint8)
        >>> packing.unpack(packing.pack(rows), rows.nbytes).tobytes() == rows.tobytes()
        True
    """

    codec: str
    rows: int
    shard: int
    shares: bool = False
    parts: int = 1
    within: bool = False

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise SchemaError(f"no codec {self.codec!r}", hint="there are " + ", ".join(CODECS))
        if self.rows < 1 or self.shard % self.rows:
            raise SchemaError(f"a shard of {self.shard} rows cannot have chunks of {self.rows}")

    @property
    def chunks(self) -> int:
        """Number of chunks in a shard."""
        return self.shard // self.rows

    @property
    def means(self) -> Codec:
        """The codec."""
        return CODECS[self.codec]

    def block_bytes(self, chunk_bytes: int, former: int) -> int:
        """Return the length of a frame's blocks, bytes; 0: the codec chooses.

        Args:
            chunk_bytes: Length of the unpacked chunk, bytes.
            former: Length of the previous frame, bytes; 0 for the first frame.
        """
        blocks = 1 if 0 < former * _SHORT <= chunk_bytes else BLOCKS
        return -(-self.rows // blocks) * (chunk_bytes // self.rows) if self.means.has_blocks else 0

    @property
    def table_bytes(self) -> int:
        """Length of the table before each frame, bytes."""
        return 4 + 2 * self.chunk_parts if self.shares else 0

    @property
    def chunk_parts(self) -> int:
        """Number of parts in a chunk."""
        return self.rows * self.parts

    def places_in_frame(self, parts: IntArray) -> IntArray:
        """Return the positions in the frame of parts, numbered row by row. Shape `(n,)`."""
        return parts if self.parts == 1 else parts % self.parts * self.rows + parts // self.parts

    def pack(self, rows: Array, distances: IntArray | None = None, *, former: int = 0) -> bytes:
        """Return the packed chunk of `rows` rows, with its table in front if it has one.

        Args:
            rows: C-contiguous. Shape `(rows, *row shape)`.
            distances: For each part, how many parts before it the same bytes are; 0: nowhere. None: all are
                0. Shape `(rows, parts)`.
            former: Length of the previous frame, bytes; 0 for the first frame.
        """
        if not self.shares:
            return self._pack_frame(rows, former)
        table = np.zeros((self.rows, self.parts), "<u2")
        if distances is not None:
            table[:] = distances
        crc: int = google_crc32c.value(table.tobytes())
        data = crc.to_bytes(4, "little") + table.tobytes()
        own = table.T == 0
        held = own.sum(1).tolist()
        if not any(held):
            return data
        if self.parts > 1:
            return data + self._pack_parts(rows, own, held)
        if held[0] < self.rows:
            rows = rows.copy()
            rows[~own[0]] = 0
        return data + self._pack_frame(rows, former)

    def unpack_table(self, data: bytes) -> IntArray:
        """Return the distances of a chunk's parts, row by row. Shape `(rows * parts,)`.

        Raises:
            CorruptionError: The table is damaged.
        """
        table = data[4 : self.table_bytes]
        if len(data) < self.table_bytes or google_crc32c.value(table) != int.from_bytes(data[:4], "little"):
            raise CorruptionError("the table of a packed chunk is damaged: its checksum does not match")
        return np.frombuffer(table, "<u2").astype(np.int64)

    def _pack_parts(self, rows: Array, own: Array, held: list[int]) -> bytes:
        """Return the frame of the parts that are stored here, and its crc32c.

        Args:
            rows: As in `pack`.
            own: Whether each part is stored here. Shape `(parts, rows)`, bool.
            held: How many of the first, second, ... parts are stored here.
        """
        stored: list[Array | None] = [None] * self.parts
        images = rows.reshape(self.rows, -1).view(np.uint8).reshape(self.rows, self.parts, -1)
        for number, count in enumerate(held):
            if count:
                part = images[:, number].copy()
                if count < self.rows:
                    part[~own[number]] = 0
                stored[number] = part.reshape(-1)
        # lz4hc takes ten times as long, and saves less than the references do.
        means = CODECS["lz4"] if 2 * sum(held) <= own.size else self.means
        return _add_crc(means.pack_parts(stored, rows.nbytes // self.parts))

    def _pack_frame(self, rows: Array, former: int) -> bytes:
        block = self.block_bytes(rows.nbytes, former)
        return _add_crc(self.means.pack(rows.reshape(-1).view(np.uint8), block=block))

    def unpack(self, chunk: bytes | memoryview, size: int) -> Array:
        """Return the bytes of a packed chunk. Shape `(size,)`, uint8.

        Raises:
            CorruptionError: The chunk is damaged.
        """
        data = bytes(chunk)
        frame = data[:-4]
        if len(data) < 5 or google_crc32c.value(frame) != int.from_bytes(data[-4:], "little"):
            raise CorruptionError("a packed chunk is damaged: its checksum does not match")
        return self.means.unpack(frame, size)

    def most_bytes(self, size: int) -> int:
        """Return the maximum length of the packed chunk of `size` bytes."""
        return self.table_bytes + self.means.most_bytes(size) + 4

    @classmethod
    def of(cls, codecs: Any, **sizes: Any) -> Packing:
        """Return the packing for the codecs in zarr.json, with the other arguments of `Packing`.

        Raises:
            ValueError: No packing has these codecs.
        """
        for name in CODECS:
            found = cls(name, **sizes)
            if found.means.reads(codecs[-2]):
                return found
        raise ValueError(f"no packing has the codecs {codecs}")

    @property
    def zarr_codecs(self) -> list[dict[str, Any]]:
        """The codecs of a chunk after `bytes`, as in zarr.json."""
        return [self.means.in_zarr, {"name": "crc32c"}]


def _add_crc(frame: bytes) -> bytes:
    crc: int = google_crc32c.value(frame)
    return frame + crc.to_bytes(4, "little")


def packing_for(
    entry: Field,
    slots: int | None,
    *,
    codec: str = DEFAULT_CODEC,
    rows: int | None = None,
    shares: bool = False,
    parts: int = 1,
    within: bool = False,
) -> Packing:
    """Return the packing of a field.

    Args:
        entry: The field.
        slots: Number of slots of a ring; None: the store is unbounded.
        codec: One of `CODECS`.
        rows: Rows per chunk; None: as many as make about 256 KiB.
        shares: As in `Packing`.
        parts: As in `Packing`.
        within: As in `Packing`.
    """
    if rows is None:
        rows = 1
        while rows < CHUNK_ROWS and 2 * rows * entry.row_bytes <= CHUNK_BYTES:
            rows *= 2
    shard = tuning.UNBOUNDED_PACKED_SHARD_ROWS if slots is None else tuning.PACKED_SHARD_ROWS
    while slots is not None and slots > shard * MANY_SHARDS:
        shard *= 2
    while shard > rows and shard * entry.row_bytes > SHARD_BYTES:
        shard //= 2
    if slots is not None:
        shard = min(shard, -(-slots // rows) * rows)
    return Packing(codec, rows, -(-shard // rows) * rows, shares, parts, within)


def count_parts(entry: Field) -> int:
    """Return how many images a row may be a stack of, by its shape: `(parts, height, width, ...)`; else 1."""
    stacked = len(entry.shape) >= 3 and 1 < entry.shape[0] <= MOST_PARTS
    return entry.shape[0] if stacked else 1


def reach_for(entry: Field) -> int:
    """Return the number of preceding rows that are searched for a row's bytes."""
    least, most = tuning.PACKED_LOOKBACK_ROWS
    widest = max(1, 8 * REACH_BYTES // entry.row_bytes)
    return min(widest, max(least, min(most, REACH_BYTES // entry.row_bytes)))
