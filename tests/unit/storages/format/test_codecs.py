"""Codecs: round trips, detection of damage and wrong lengths, and size bounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.errors import CorruptionError, SchemaError
from expstore.maintenance import verify
from expstore.storages.format.codecs import CODECS

pytestmark = pytest.mark.usefixtures("no_syncs")


every_codec = pytest.mark.parametrize("name", CODECS)


@pytest.mark.some(2)
@every_codec
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


@every_codec
def test_invalid_frames_are_refused(name: str) -> None:
    with pytest.raises(CorruptionError):
        CODECS[name].unpack(b"\x00" * 12, 100)
    with pytest.raises(CorruptionError):
        CODECS[name].unpack(b"", 100)


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


@pytest.mark.parametrize("name", ["numcodecs.bz2", "numcodecs.lzma"])
def test_codecs_that_zarr_python_alone_reads_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"'frame': no codec '{name}'; there are lz4hc, lz4, .*gzip"):
        expstore.open(tmp_path / "run.exp", layout=expstore.Layout(fields={"frame": {"codec": name}}))
    assert not (tmp_path / "run.exp").exists()


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["zstd-shuffle", "gzip"])
def test_a_store_of_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written, read by another process's eyes, reopened, checked, damaged; and what info says of it."""
    path, number = tmp_path / "run.exp", torch.arange(100)
    frame = (number[:, None] / torch.arange(1, 401)).float()
    fields = {"frame": {"codec": name, "rows": 8}}
    with expstore.open(path, capacity=200, layout=expstore.Layout(fields=fields), seed=0) as rb:
        for first in range(0, 100, 25):
            some = slice(first, first + 25)
            rb.extend(TensorDict({"number": number[some], "frame": frame[some]}, [25]))
        with expstore.open(path, mode="r") as reader:
            seen = reader[:]
            assert torch.equal(seen["frame"], frame[seen["number"]])
    with expstore.open(path) as rb:
        rb.extend(TensorDict({"number": number[:9], "frame": frame[:9]}, [9]))
        seen = rb[:]
        assert torch.equal(seen["frame"], frame[seen["number"]])
    assert verify(path) == []
    assert run(["info", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["stores"][0]["fields"]
    (packed,) = [field for field in facts if field["layout"] == "packed"]
    assert (packed["name"], packed["codec"]) == ("frame", name)
    assert run(["info", str(path)]) == 0
    assert f"packed, {name}" in capsys.readouterr().out
    shard = next((path / "columns/frame").glob("open.*"))
    data = bytearray(shard.read_bytes())
    data[40] ^= 4
    shard.write_bytes(data)
    assert {finding.kind for finding in verify(path)} == {"payload"}
