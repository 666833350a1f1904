"""The compiled loop encodes chunks like numcodecs, byte for byte, with any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from numcodecs import Blosc

from expstore.kernels import native
from expstore.kernels.blosc_encode import pack_chunks
from expstore.storages.format.chunk_encoding import Packing

CASES = [("lz4hc", 5), ("lz4", 9), ("zstd", 3), ("zlib", 5)]


@pytest.mark.some(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("compressor", "level"), CASES)
def test_frames_are_those_of_numcodecs(
    monkeypatch: pytest.MonkeyPatch, threads: int, compressor: str, level: int
) -> None:
    monkeypatch.setattr(native, "THREADS", threads)
    rng = np.random.default_rng(1)
    for count, each, width in ((1, 1, 1), (5, 4, 7000), (7, 3, 200_000), (40, 16, 100)):
        plain = np.zeros((count, each, width), np.uint8)
        plain[:, :, rng.integers(0, width, 3)] = 9
        noise = rng.integers(0, 256, plain.shape, np.uint8)
        for rows in (plain, noise):
            for block in (0, -(-each // 2) * width):
                blosc = Blosc(compressor, level, Blosc.NOSHUFFLE, block)
                chunks = pack_chunks(rows.reshape(-1, width), count, compressor, level, block=block)
                assert [chunk[:-4] for chunk in chunks] == [blosc.encode(part.reshape(-1)) for part in rows]
            packing = Packing("lz4hc", each, each)
            assert all(  # a frame says by what it was packed
                (packing.unpack(chunk, part.nbytes) == part.reshape(-1)).all()
                for chunk, part in zip(chunks, rows, strict=True)
            )


def test_what_cannot_be_packed_is_empty() -> None:
    assert pack_chunks(np.zeros((4, 10), np.uint8), 2, "no such compressor", 5) == [b"", b""]
