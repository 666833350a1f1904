"""The codecs that pack rows, by name: how bytes become a frame, and how zarr.json describes the codec.

Used by packed columns. It uses numcodecs, and touches no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.errors import CorruptionError

_BLOSC_HEADER = 16
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
        import numcodecs

        if self.is_blosc:
            return self._blosc(0)
        return numcodecs.get_codec({"id": self.name, **self.options})

    def _blosc(self, block: int) -> Any:
        import numcodecs

        shuffle = {"noshuffle": numcodecs.Blosc.NOSHUFFLE, "shuffle": numcodecs.Blosc.SHUFFLE}
        given = self.options
        return numcodecs.Blosc(given["cname"], given["clevel"], shuffle[given["shuffle"]], block)

    def pack(self, data: Array, *, block: int = 0) -> bytes:
        """Return the frame of some bytes.

        Args:
            data: Shape `(n,)`, uint8, C-contiguous.
            block: Length of the blocks that blosc packs separately, bytes; 0: blosc chooses.
        """
        if not self.is_blosc:
            return bytes(self._numcodec.encode(data))
        size = self.options["typesize"]  # blosc takes it from the dtype
        data = data.view(f"u{size}") if data.size % size == 0 else data
        return bytes((self._blosc(block) if block else self._numcodec).encode(data))

    def unpack(self, frame: bytes, size: int) -> Array:
        """Return the bytes of a frame whose checksum was verified. Shape `(size,)`, uint8.

        Raises:
            CorruptionError: The frame holds another number of bytes, or is not a frame of this codec.
        """
        if self.is_blosc:
            if len(frame) < _BLOSC_HEADER or int.from_bytes(frame[4:8], "little") != size:
                raise CorruptionError(f"a packed chunk does not hold {size} bytes")
            out = np.empty(size, np.uint8)
            self._numcodec.decode(frame, out)
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
