"""Arrow's compressed buffers: those of pyarrow are decompressed, and damage is reported."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.disk.files import address_of
from expstore.kernels import arrow_decode


def packed(data: bytes, codec: str | None) -> np.ndarray:
    """Return a buffer as a compressed batch has it; None: as it is."""
    if codec is None:
        return np.frombuffer((-1).to_bytes(8, "little", signed=True) + data, np.uint8)
    body = pa.Codec(codec).compress(data, asbytes=True)
    return np.frombuffer(len(data).to_bytes(8, "little") + body, np.uint8)


def unpack(buffers: list[np.ndarray]) -> list[bytes] | int:
    """Unpack buffers; return the number of one that is damaged, if one is said to be."""
    sources = np.array([address_of(buffer) for buffer in buffers], np.int64)
    sizes = np.array([buffer.size for buffer in buffers], np.int64)
    lengths = np.empty_like(sizes)
    arrow_decode.find_lengths(sources, sizes, lengths)
    if (lengths < 0).any():
        return int(np.flatnonzero(lengths < 0)[0])
    # Around each a byte that nobody may write to.
    rooms = [np.full(length + 2, 0xA5, np.uint8) for length in lengths.tolist()]
    goals = np.array([address_of(room) + 1 for room in rooms], np.int64)
    bad = arrow_decode.unpack_buffers(sources, sizes, goals, lengths)
    for room in rooms:
        assert room[0] == room[-1] == 0xA5
    return bad if bad >= 0 else [room[1:-1].tobytes() for room in rooms]


def some_bytes(size: int, words: int, seed: int) -> bytes:
    """Return bytes that are packed well if there are few words."""
    return np.random.default_rng(seed).integers(0, words, size, np.uint8).tobytes()


kinds = st.tuples(
    st.sampled_from([0, 1, 2, 7, 100, 5000, 65_535, 65_537, 300_000]),
    st.sampled_from([1, 3, 40, 256]),
    st.sampled_from(["lz4", "zstd", None]),
)


@given(st.lists(kinds, max_size=30))
def test_buffers_packed_by_arrow_are_unpacked(asked: list[tuple[int, int, str | None]]) -> None:
    data = [some_bytes(size, words, number) for number, (size, words, _) in enumerate(asked)]
    assert unpack([packed(one, codec) for one, (_, _, codec) in zip(data, asked, strict=True)]) == data


@pytest.mark.some(4)
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("size", [40, 5000, 200_000])
def test_damage_is_reported_and_nothing_else_is_written(codec: str, size: int) -> None:
    whole, data = packed(some_bytes(1000, 9, 0), codec), packed(some_bytes(size, 40, 1), codec)
    rng = np.random.default_rng(2)
    for cut in (9, 12, data.size // 2, data.size - 1):
        assert unpack([whole, data[:cut].copy()]) == 1
    longer = data.copy()
    longer[:8] = np.frombuffer((size + 1).to_bytes(8, "little"), np.uint8)
    assert unpack([longer, whole]) == 0
    shorter = data.copy()
    shorter[:8] = np.frombuffer((size - 1).to_bytes(8, "little"), np.uint8)
    assert unpack([whole, shorter, whole]) == 1
    for _ in range(300):  # what comes out may be anything: checksums say whether it is right
        flipped = data.copy()
        flipped[rng.integers(8, data.size)] ^= np.uint8(1 << rng.integers(8))
        unpack([flipped])
    for head in (b"\0" * 8, b"\xfe" + b"\xff" * 7, b"\4" + b"\0" * 7):
        damaged: Any = np.concatenate([np.frombuffer(head, np.uint8), np.zeros(9, np.uint8)])
        assert unpack([damaged]) == 0
    assert unpack([np.zeros(3, np.uint8)]) == 0


def test_messages_bear_their_checksums() -> None:
    messages = [np.random.default_rng(n).integers(0, 256, 50 + n * 777, np.uint8) for n in range(5)]
    places, crcs = np.array([0, 9, 42, 700, 3000]), []
    for message, at in zip(messages, places.tolist(), strict=True):
        bare = message.copy()
        bare[at : at + 8] = ord("0")
        crcs.append(google_crc32c.value(bare.tobytes()))
    sources = np.array([address_of(message) for message in messages])
    sizes = np.array([message.size for message in messages])
    assert arrow_decode.find_damaged(sources, sizes, places, np.array(crcs)) == -1
    messages[3][699] ^= 1
    assert arrow_decode.find_damaged(sources, sizes, places, np.array(crcs)) == 3
    messages[3][699] ^= 1
    messages[3][700:708] = 0  # its own place
    assert arrow_decode.find_damaged(sources, sizes, places, np.array(crcs)) == -1
    messages[3][708] ^= 128
    assert arrow_decode.find_damaged(sources, sizes, places, np.array(crcs)) == 3
