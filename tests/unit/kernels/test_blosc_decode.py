"""The compiled loop decodes packed chunks exactly, on each of its code paths.

Blocks of LZ4 are decompressed in place and only as far as needed, everything else as a whole; many frames by
several threads.
"""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.kernels import native
from expstore.kernels.blosc_decode import take_rows
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.codecs import CODECS

WIDTH = 10_000  # blosc makes no shorter blocks of LZ4 than 64 KiB


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    number: int = request.param
    monkeypatch.setattr(native, "THREADS", number)
    monkeypatch.setattr(tuning, "DECOMPRESS_THREAD_BYTES", 1)
    return number


def make_rows(kind: str, count: int) -> Array:
    """Return rows that are packed well, badly (then blosc keeps them as they are), or not long enough."""
    rng = np.random.default_rng(1)
    if kind == "noise":
        return rng.integers(0, 256, (count, WIDTH), np.uint8)
    rows = np.zeros((count, WIDTH), np.uint8)
    rows[np.arange(count)[:, None], rng.integers(0, WIDTH, (count, 40))] = 7
    return rows


class Frames:
    """Packed chunks, and where they are."""

    def __init__(self, rows: Array, packing: Packing) -> None:
        self.rows, self.each = rows, packing.rows
        groups = [rows[start : start + packing.rows] for start in range(0, len(rows), packing.rows)]
        self.chunks = [np.frombuffer(packing.pack(group), np.uint8).copy() for group in groups]

    def repack(self, pack: Callable[[Array], bytes]) -> None:
        """Make other frames of the rows."""
        for name in range(len(self.chunks)):
            frame = pack(self.rows[name * self.each : (name + 1) * self.each].reshape(-1))
            crc: int = google_crc32c.value(frame)
            self.chunks[name] = np.frombuffer(frame + crc.to_bytes(4, "little"), np.uint8)

    def take(self, wanted: IntArray) -> tuple[int, Array]:
        order = np.argsort(wanted // self.each, kind="stable")
        names, which = np.unique(wanted[order] // self.each, return_inverse=True)
        out = np.zeros((wanted.size, WIDTH), np.uint8)
        scratch = np.empty(self.each * WIDTH, np.uint8)
        bad = take_rows(
            np.array([self.chunks[name].ctypes.data for name in names]),
            np.array([self.chunks[name].size - 4 for name in names]),
            which.astype(np.int64),
            wanted[order] % self.each,
            order,
            WIDTH,
            self.each * WIDTH,
            int(out.ctypes.data),
            int(scratch.ctypes.data),
        )
        return bad, out


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", ["frames", "noise"])
@pytest.mark.parametrize("codec", sorted(name for name, codec in CODECS.items() if codec.is_blosc))
@pytest.mark.parametrize("each", [1, 16, 256])  # of one block, the last one of several
def test_rows_are_those_that_were_packed(threads: int, codec: str, kind: str, each: int) -> None:
    frames = Frames(make_rows(kind, 1024), Packing(codec, each, 1024))
    rng = np.random.default_rng(2)
    for wanted in (np.arange(1024), rng.integers(0, 1024, 500), rng.permutation(1024)[:9], np.array([1023])):
        bad, rows = frames.take(wanted)
        assert bad == -1
        assert (rows == frames.rows[wanted]).all()


@pytest.mark.some(4)
@pytest.mark.parametrize("block", [7 * WIDTH + 5, 8 * WIDTH, 9 * WIDTH, 15 * WIDTH, 16 * WIDTH])
def test_rows_of_blocks_of_any_length(threads: int, block: int) -> None:
    """Rows may lie across blocks, of which some are kept as they are."""
    rows = make_rows("frames", 256)
    rows[100:130] = make_rows("noise", 30)
    frames = Frames(rows, Packing("lz4hc", 16, 256))
    frames.repack(lambda part: CODECS["lz4hc"].pack(part, block=block))
    rng = np.random.default_rng(3)
    for wanted in (np.arange(256), rng.integers(0, 256, 40), np.array([127]), np.array([255, 112])):
        bad, found = frames.take(wanted)
        assert bad == -1
        assert (found == rows[wanted]).all()


@pytest.mark.some(4)
@pytest.mark.parametrize("at", [8, 16, 20, 24])  # length of a block, begin of the first two, length of one
@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**32 - 1])
def test_a_frame_that_lies_is_damaged(at: int, value: int) -> None:
    """Its checksum fits; nothing outside of it is read or written."""
    frames = Frames(make_rows("frames", 64), Packing("lz4hc", 16, 64))

    def lie(part: Array) -> bytes:
        frame = bytearray(CODECS["lz4hc"].pack(part, block=8 * WIDTH))
        frame[at : at + 4] = value.to_bytes(4, "little")
        return bytes(frame)

    assert frames.take(np.array([15]))[0] == -1
    frames.repack(lie)
    bad, rows = frames.take(np.array([15, 3]))
    assert bad == 0 or (at == 16 and value == 0) or not (rows == frames.rows[[15, 3]]).all()


def test_the_first_damaged_frame_is_named(threads: int) -> None:
    frames = Frames(make_rows("frames", 1024), Packing("lz4hc", 16, 1024))
    for number in (60, 7, 31):
        frames.chunks[number][20] ^= 1
    bad, _ = frames.take(np.arange(1024))
    assert bad == 7
    frames.chunks[7][20] ^= 1
    assert frames.take(np.arange(7 * 16, 8 * 16))[0] == -1
    assert frames.take(np.arange(1024))[0] == 31


def test_a_frame_of_another_length_is_damaged(threads: int) -> None:
    packing = Packing("lz4hc", 16, 1024)
    frames = Frames(make_rows("frames", 64), packing)
    frames.chunks[2] = np.frombuffer(packing.pack(make_rows("frames", 15)), np.uint8)
    assert frames.take(np.arange(64))[0] == 2
