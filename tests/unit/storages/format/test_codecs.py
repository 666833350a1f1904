"""Codecs: round trips, detection of damage and wrong lengths, and size bounds."""

from __future__ import annotations

import json

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import CorruptionError
from expstore.kernels.blosc_decode import take_rows
from expstore.storages.format.codecs import CODECS

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_bytes_come_out_as_they_were(name: str, data: st.DataObject) -> None:
    codec, seed = CODECS[name], data.draw(st.integers(0, 99))
    size = data.draw(st.integers(1, 3000))
    values = np.random.default_rng(seed).integers(0, data.draw(st.sampled_from([1, 2, 256])), size)
    frame = codec.pack(values.astype(np.uint8))
    assert len(frame) <= codec.most_bytes(size)
    assert codec.unpack(frame, size).tolist() == values.tolist()
    assert frame == codec.pack(values.astype(np.uint8)), "a chunk that is packed again must be the same"
    for other in (size - 1, size + 1):
        with pytest.raises(CorruptionError, match=f"{other} bytes"):
            codec.unpack(frame, other)


@pytest.mark.parametrize("name", ["lz4", "lz4hc"])
@given(
    kinds=st.lists(st.sampled_from([None, 1, 2, 256]), min_size=2, max_size=6),
    length=st.sampled_from([1, 7, 200, 70_000]),
)
def test_parts_come_out_as_they_were(name: str, kinds: list[int | None], length: int) -> None:
    """Parts of zeros, of few values and of noise, which is longer packed."""
    codec, rng = CODECS[name], np.random.default_rng(len(kinds))
    parts = [None if kind is None else rng.integers(0, kind, length, np.uint8) for kind in kinds]
    frame = codec.pack_parts(parts, length)
    wanted = np.concatenate([np.zeros(length, np.uint8) if part is None else part for part in parts])
    assert len(frame) <= codec.most_bytes(wanted.size)
    np.testing.assert_array_equal(codec.unpack(frame, wanted.size), wanted)
    for part in range(len(kinds)):  # one by one, by the compiled loop
        found, scratch = np.zeros(length, np.uint8), np.empty(wanted.size, np.uint8)
        data = np.frombuffer(frame + google_crc32c.value(frame).to_bytes(4, "little"), np.uint8)
        where = [np.array([number]) for number in (data.ctypes.data, len(frame), 0, part, 0)]
        addresses = found.ctypes.data, scratch.ctypes.data
        assert take_rows(*where, length, wanted.size, *addresses) == -1
        np.testing.assert_array_equal(found, wanted[part * length :][:length])


def test_invalid_frames_are_refused() -> None:
    for codec in CODECS.values():
        for frame in (b"\x00" * 12, b""):
            with pytest.raises(CorruptionError):
                codec.unpack(frame, 100)


def test_a_store_of_another_effort_is_read() -> None:
    """What a later version packs with more or less effort is the same codec."""
    for name, codec in CODECS.items():
        stored = json.loads(json.dumps(codec.in_zarr))
        for option in ("clevel", "level"):
            if option in stored["configuration"]:
                stored["configuration"][option] = 1
        assert [other for other, one in CODECS.items() if one.reads(stored)] == [name]


def test_floats_are_packed_better_shuffled() -> None:
    steps = np.random.default_rng(0).normal(size=100_000).astype(np.float32) / 100
    data = np.cumsum(steps, dtype=np.float32).view(np.uint8)
    for name in ("lz4hc", "zstd"):
        assert len(CODECS[f"{name}-shuffle"].pack(data)) < len(CODECS[name].pack(data)) < 1.01 * data.size
