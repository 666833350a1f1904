"""The codecs that pack rows, by name: how bytes become a frame, and how zarr.json describes the codec.

Used by packed columns. It uses numcodecs, and touches no files.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.errors import CorruptionError

_BLOSC_HEADER = 16
#: Flags in a blosc frame's byte 2: its bytes are not compressed; its blocks are LZ4's, not shuffled or split.
_NOT_COMPRESSED, _LZ4_FORMAT = 2, 32
#: Options of the compression effort, which do not matter when unpacking.
_EFFORT = {"clevel", "level", "blocksize"}


@dataclass(frozen=True)
class Codec:
    """A codec that packs bytes into a frame, and unpacks them.

    Args:
        name: The codec's name in zarr.json.
        options: The codec's `configuration` in zarr.json.

    Example:
        >>> from expstore.storages.format.codecs import CODECS
        >>> codec = CODECS["lz4hc"]
        >>> codec.unpack(codec.pack(np.arange(4, dtype=np.uint8)), 4).tolist()
        [0, 1, 2, 3]
    """

    name: str
    options: Mapping[str, Any] = field(hash=False)

    @property
    def is_blosc(self) -> bool:
        """Whether frames are blosc's, which a compiled loop unpacks; numcodecs unpacks others one by one."""
        return self.name == "blosc"

    @property
    def unshuffled(self) -> tuple[str, int] | None:
        """Blosc's compressor and level, if a compiled loop can pack with them; otherwise None."""
        plain = self.is_blosc and self.options["shuffle"] == "noshuffle"
        return (self.options["cname"], self.options["clevel"]) if plain else None

    @property
    def has_blocks(self) -> bool:
        """Whether a row can be unpacked without the blocks before its own."""
        plain = self.unshuffled
        return plain is not None and plain[0] in ("lz4", "lz4hc")

    @cached_property
    def _numcodec(self) -> Any:
        """The codec of numcodecs; of blosc the module with its functions."""
        import numcodecs.blosc

        return numcodecs.blosc if self.is_blosc else numcodecs.get_codec({"id": self.name, **self.options})

    def pack(self, data: Array, *, block: int = 0) -> bytes:
        """Return the frame of some bytes.

        Args:
            data: Shape `(n,)`, uint8, C-contiguous.
            block: Length of the blocks that blosc packs separately, bytes; 0: blosc chooses.
        """
        if not self.is_blosc:
            return bytes(self._numcodec.encode(data))
        blosc, given, size = self._numcodec, self.options, self.options["typesize"]
        data = data.view(f"u{size}") if data.size % size == 0 else data  # blosc takes the size from the dtype
        shuffle = blosc.SHUFFLE if given["shuffle"] == "shuffle" else blosc.NOSHUFFLE
        frame: bytes = blosc.compress(data, given["cname"].encode(), given["clevel"], shuffle, block)
        return frame

    def pack_parts(self, parts: Sequence[Array | None], length: int) -> bytes:
        """Return the frame of parts, each of which is a block; parts of zeros share one block.

        Only for codecs with `has_blocks`.

        Args:
            parts: Arrays of shape `(length,)`, uint8, C-contiguous; None for zeros.
            length: Length of a part, bytes.
        """
        count = len(parts)
        places, blocks, end, zeros = [], [], _BLOSC_HEADER + 4 * count, 0
        for part in parts:
            places.append(zeros or end if part is None else end)
            if part is not None or not zeros:
                blocks.append(_pack_zeros(length) if part is None else self._pack_block(part))
                zeros = end if part is None else zeros
                end += len(blocks[-1])
        if end > self.most_bytes(count * length):
            whole = [np.zeros(length, np.uint8) if part is None else part for part in parts]
            return self.pack(np.concatenate(whole), block=length)
        head = struct.pack("<4B3I", 2, 1, _LZ4_FORMAT, 1, count * length, length, end)
        return b"".join([head, struct.pack(f"<{count}i", *places), *blocks])

    def _pack_block(self, part: Array) -> bytes:
        """Return a block of a blosc frame: its length, and its bytes."""
        frame = self.pack(part, block=part.size)
        if frame[2] & _NOT_COMPRESSED:
            return struct.pack("<i", part.size) + frame[_BLOSC_HEADER:]
        return frame[_BLOSC_HEADER + 4 :]

    def unpack(self, frame: bytes, size: int) -> Array:
        """Return the bytes of a frame whose checksum was verified. Shape `(size,)`, uint8.

        Raises:
            CorruptionError: The frame holds another number of bytes, or is not a frame of this codec.
        """
        if self.is_blosc:
            if len(frame) < _BLOSC_HEADER or int.from_bytes(frame[4:8], "little") != size:
                raise CorruptionError(f"a packed chunk does not hold {size} bytes")
            out = np.empty(size, np.uint8)
            self._numcodec.decompress(frame, out)
            return out
        try:
            found: Array = np.frombuffer(self._numcodec.decode(frame), np.uint8)
        except Exception as exc:  # gzip raises several types
            raise CorruptionError(f"a packed chunk cannot be unpacked: {exc}") from exc
        if found.size != size:
            raise CorruptionError(f"a packed chunk does not hold {size} bytes")
        return found

    def most_bytes(self, size: int) -> int:
        """Return the maximum length of the frame of `size` bytes, which incompressible bytes need."""
        return size + _BLOSC_HEADER if self.is_blosc else size + size // 64 + 1024

    def reads(self, named: Mapping[str, Any]) -> bool:
        """Return whether this codec unpacks frames of a codec in zarr.json, of any compression effort."""
        found = named.get("configuration", {})
        wanted = {name: value for name, value in self.options.items() if name not in _EFFORT}
        return bool(named["name"] == self.name and wanted.items() <= found.items())

    @property
    def in_zarr(self) -> dict[str, Any]:
        """The codec's entry in zarr.json."""
        return {"name": self.name, "configuration": dict(self.options)}


def _blosc(cname: str, level: int, shuffle: str = "noshuffle", typesize: int = 1) -> Codec:
    options = {"typesize": typesize, "cname": cname, "clevel": level, "shuffle": shuffle, "blocksize": 0}
    return Codec("blosc", options)


@lru_cache(maxsize=16)
def _pack_zeros(size: int) -> bytes:
    return CODECS["lz4"]._pack_block(np.zeros(size, np.uint8))


DEFAULT_CODEC = "lz4hc"
#: Every reader of Zarr v3 knows these codecs. Those that end in -shuffle split 4-byte numbers byte by byte,
#: as suits float32.
CODECS: dict[str, Codec] = {
    "lz4hc": _blosc("lz4hc", 5),
    "lz4": _blosc("lz4", 9),
    "zstd": _blosc("zstd", 4),  # from level 4 on a chunk is one block
    "zlib": _blosc("zlib", 5),
    "lz4hc-shuffle": _blosc("lz4hc", 5, "shuffle", 4),
    "zstd-shuffle": _blosc("zstd", 4, "shuffle", 4),
    "gzip": Codec("gzip", {"level": 5}),
}
