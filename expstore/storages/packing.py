"""How rows of a wide field are packed: codec, rows per chunk, rows per shard.

Used by packed columns and by what makes their Zarr metadata. It knows numbers and codecs, and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np

from expstore.errors import CorruptionError, SchemaError
from expstore.schema import Field
from expstore.types import Array

__all__ = ["CODECS", "DEFAULT_CODEC", "Packing", "packing_for"]

#: Unpacking costs a pass over so many bytes, from memory that the processor keeps close. More would be two
#: blocks of blosc's, and save nothing.
CHUNK_BYTES = 256 * 1024
CHUNK_ROWS = 64
SHARD_ROWS = 4096
SHARD_BYTES = 1 << 30
#: Longer shards rather than more files than this in a ring.
MANY_SHARDS = 1024
#: In a store without capacity.
ENDLESS_SHARD_ROWS = 16384

DEFAULT_CODEC = "lz4hc"
#: Names of codecs: blosc's compressor and level. All are of Zarr v3's core.
CODECS: dict[str, tuple[str, int]] = {
    "lz4hc": ("lz4hc", 5),
    "lz4": ("lz4", 9),
    "zstd": ("zstd", 3),
    "zlib": ("zlib", 5),
}


@dataclass(frozen=True)
class Packing:
    """Say how a field is packed.

    A packed chunk is a blosc frame and the crc32c of it, as Zarr's codecs `bytes`, `blosc` and `crc32c` make
    one; it is never longer than `most_bytes`.

    Args:
        codec: One of `CODECS`.
        rows: Per chunk.
        shard: Rows per shard, a multiple of `rows`.

    Example:
        >>> packing = Packing("lz4hc", rows=16, shard=4096)
        >>> rows = np.zeros((16, 84, 84), np.uint8)
        >>> (packing.unpack(packing.pack(rows), rows.nbytes) == rows.tobytes()).all()
        True
    """

    codec: str
    rows: int
    shard: int

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise SchemaError(f"no codec {self.codec!r}", hint="there are " + ", ".join(CODECS))
        if self.rows < 1 or self.shard % self.rows:
            raise SchemaError(f"a shard of {self.shard} rows cannot have chunks of {self.rows}")

    @property
    def chunks(self) -> int:
        """How many chunks a shard has."""
        return self.shard // self.rows

    @cached_property
    def _blosc(self) -> Any:
        from numcodecs import Blosc

        compressor, level = CODECS[self.codec]
        return Blosc(compressor, level, Blosc.NOSHUFFLE, 0)

    def pack(self, rows: Array) -> bytes:
        """Return the packed chunk of `rows` rows. Shape `(rows, *row shape)`, C-contiguous."""
        frame: bytes = self._blosc.encode(rows.reshape(-1).view(np.uint8))
        crc: int = google_crc32c.value(frame)
        return frame + crc.to_bytes(4, "little")

    def unpack(self, chunk: bytes | memoryview, size: int) -> Array:
        """Return the bytes of a packed chunk. Shape `(size,)`, uint8.

        Raises:
            CorruptionError: It is damaged.
        """
        data = bytes(chunk)
        frame = data[:-4]
        out = np.empty(size, np.uint8)
        if len(frame) < 16 or google_crc32c.value(frame) != int.from_bytes(data[-4:], "little"):
            raise CorruptionError("a packed chunk is damaged: its checksum does not fit")
        if int.from_bytes(frame[4:8], "little") != size:
            raise CorruptionError(f"a packed chunk does not hold {size} bytes")
        self._blosc.decode(frame, out)
        return out

    @staticmethod
    def most_bytes(size: int) -> int:
        """Return how long the packed chunk of `size` bytes can become."""
        return size + 16 + 4

    @classmethod
    def of(cls, codecs: Any, *, rows: int, shard: int) -> Packing:
        """Return the packing whose codecs zarr.json names.

        Raises:
            ValueError: There is none.
        """
        for name in CODECS:
            found = cls(name, rows, shard)
            if found.zarr_codecs[0]["configuration"].items() <= codecs[1]["configuration"].items():
                return found
        raise ValueError(f"no packing has the codecs {codecs}")

    @property
    def zarr_codecs(self) -> list[dict[str, Any]]:
        """The codecs of a chunk behind `bytes`, as zarr.json names them."""
        compressor, level = CODECS[self.codec]
        options = {
            "typesize": 1,
            "cname": compressor,
            "clevel": level,
            "shuffle": "noshuffle",
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": options}, {"name": "crc32c"}]


def packing_for(
    entry: Field, slots: int | None, *, codec: str = DEFAULT_CODEC, rows: int | None = None
) -> Packing:
    """Return how a field is packed best.

    Args:
        entry: The field.
        slots: How many rows a ring has; None: the store grows.
        codec: One of `CODECS`.
        rows: Per chunk; None: as many as make about 256 KiB.
    """
    if rows is None:
        rows = 1
        while rows < CHUNK_ROWS and 2 * rows * entry.row_bytes <= CHUNK_BYTES:
            rows *= 2
    shard = ENDLESS_SHARD_ROWS if slots is None else SHARD_ROWS
    while slots is not None and slots > shard * MANY_SHARDS:
        shard *= 2
    while shard > rows and shard * entry.row_bytes > SHARD_BYTES:
        shard //= 2
    if slots is not None:
        shard = min(shard, -(-slots // rows) * rows)
    return Packing(codec, rows, -(-shard // rows) * rows)
