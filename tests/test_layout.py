"""What is asked of the layout of a store: by `expstore.open`, and by what is done to packed fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from tensordict import TensorDict

import expstore
from expstore import SchemaError, StateError, TensorDictMaxValueWriter
from expstore.storages.layout import ColumnLayout, ask_layout


def rows(count: int, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + count)
    frames = numbers[:, None, None].expand(count, 40, 40).to(torch.uint8)
    return TensorDict({"frame": frames, "action": numbers, "next": {"frame": frames + 1}}, [count])


def packed_fields(path: Path) -> set[str]:
    """Return what zarr-python says has a compressor."""
    group: Any = zarr.open_group(path / "columns", mode="r")
    arrays = ("frame", "action", "next/frame")
    return {name for name in arrays if "blosc" in json.dumps(group[name].metadata.to_dict()["codecs"])}


@pytest.mark.parametrize(
    ("asked", "packed"),
    [
        ({}, {"frame", "next/frame"}),
        ({"layout": "flat"}, set()),
        ({"layout": "auto"}, {"frame", "next/frame"}),
        ({"layout": "packed"}, {"frame", "next/frame", "action"}),
        ({"layout": "auto", "fields": {"frame": {"layout": "flat"}}}, {"next/frame"}),
        ({"fields": {"frame": {"layout": "flat"}}}, {"next/frame"}),
        (
            {"layout": "flat", "fields": {"next.frame": {"layout": "packed", "codec": "zstd", "rows": 4}}},
            {"next/frame"},
        ),
    ],
)
def test_fields_lie_as_was_asked(tmp_path: Path, asked: dict[str, Any], packed: set[str]) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=100, seed=0, **asked) as rb:
        rb.extend(rows(150))
        batch = rb.sample(64)
        assert (batch["frame"][:, 0, 0] == batch["action"].to(torch.uint8)).all()
    assert packed_fields(tmp_path / "run.exp") == packed
    with expstore.open(tmp_path / "run.exp", **asked) as rb:
        batch = rb[:]
        assert (batch["next", "frame"] == batch["frame"] + 1).all()
        assert (batch["frame"][:, 3, 3] == batch["action"].to(torch.uint8)).all()


def test_what_contradicts_the_store_is_refused(tmp_path: Path) -> None:
    path, fields = tmp_path / "run.exp", {"frame": {"rows": 8}}
    expstore.open(path, fields=fields).close()
    for agrees in ({}, {"layout": "auto"}, {"fields": fields}, {"layout": "auto", "fields": fields}):
        expstore.open(path, **agrees).close()
    for differs in ({"layout": "packed"}, {"layout": "flat"}, {"fields": {"frame": {"rows": 4}}}):
        with pytest.raises(StateError, match="layout"):
            expstore.open(path, **differs)


@pytest.mark.parametrize("make", ["ZarrStorage", "LazyMemmapStorage"])
def test_storages_are_flat_unless_asked(tmp_path: Path, make: str) -> None:
    """As TorchRL's programs expect, which write to rows in place; also when `open` goes on with them."""
    path = tmp_path / "run.exp"
    if make == "ZarrStorage":
        rb = expstore.TensorDictReplayBuffer(storage=expstore.ZarrStorage(path, 100), batch_size=4)
    else:
        storage = expstore.LazyMemmapStorage(100, scratch_dir=path)
        rb = expstore.TensorDictReplayBuffer(storage=storage, batch_size=4)
    rb.extend(rows(10))
    rb[3] = rows(1, 9)[0]
    assert packed_fields(path) == set()
    rb.close()
    with expstore.open(path) as rb:
        rb.extend(rows(10))
        rb[4] = rows(1, 8)[0]
        assert rb[4]["frame"].unique().tolist() == [8]
        assert rb[3]["frame"].unique().tolist() == [9]
    with pytest.raises(StateError, match="layout"):
        expstore.open(path, layout="auto")


def test_an_empty_store_keeps_the_layout_it_was_made_with(tmp_path: Path) -> None:
    expstore.ZarrStorage(tmp_path / "run.exp", 100).close()
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(rows(10))
    assert packed_fields(tmp_path / "run.exp") == set()


@pytest.mark.parametrize(
    ("asked", "packed"),
    [
        ({"layout": "auto"}, {"frame", "next/frame"}),
        ({"layout": "packed"}, {"frame", "next/frame", "action"}),
        ({"fields": {"frame": {"layout": "packed"}}}, {"frame"}),
    ],
)
def test_a_storage_takes_what_open_takes(tmp_path: Path, asked: dict[str, Any], packed: set[str]) -> None:
    for _ in range(2):
        storage = expstore.ZarrStorage(tmp_path / "run.exp", 100, **asked)
        with expstore.TensorDictReplayBuffer(storage=storage, batch_size=4) as rb:
            rb.extend(rows(10))
            assert (rb.sample()["frame"] >= 0).all()
    assert packed_fields(tmp_path / "run.exp") == packed
    with pytest.raises(SchemaError, match="no layout 'wide'"):
        expstore.ZarrStorage(tmp_path / "other.exp", layout="wide")  # type: ignore[arg-type]
    assert not (tmp_path / "other.exp").exists()


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"layout": "wide"}, "no layout 'wide'"),
        ({"fields": {"frame": {"layout": "packed", "codec": "lzma"}}}, "no codec 'lzma'.*numcodecs.lzma"),
        ({"fields": {"frame": {"layout": "auto", "chunk": 3}}}, "field 'frame': no option 'chunk'"),
        ({"fields": {"frame": {"rows": 3}}}, "power of two, got 3"),
        ({"fields": {"frame": {"rows": True}}}, "power of two, got True"),
        ({"fields": {"frame": {"layout": None}}}, "no layout None"),
    ],
)
def test_what_there_is_not_is_refused(tmp_path: Path, asked: dict[str, Any], match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        expstore.open(tmp_path / "run.exp", **asked)
    assert not (tmp_path / "run.exp").exists()


def test_nothing_asked_is_as_stored() -> None:
    assert ask_layout(None, None) is None
    assert ColumnLayout().to_json() == {}
    asked = ask_layout("auto", {"a": {"rows": 8}})
    assert asked is not None
    assert ColumnLayout(**json.loads(json.dumps(asked.to_json()))) == asked


def test_packed_rows_stay_as_they_are(tmp_path: Path) -> None:
    """Nothing is written by a change that is refused; fields that are flat can be changed."""
    with expstore.open(tmp_path / "run.exp", capacity=100, seed=0) as rb:
        rb.extend(rows(30))
        with pytest.raises(SchemaError, match=r"'(next\.)?frame' is packed.*layout='flat'"):
            rb[3] = rows(1, 9)[0]
        with pytest.raises(SchemaError, match="is packed"):
            rb.set_at_("frame", torch.zeros(1, 40, 40, dtype=torch.uint8), torch.tensor([3]))
        rb.set_at_("action", torch.tensor([77]), torch.tensor([3]))
        assert rb[3]["action"] == 77
        assert (rb[3]["frame"] == 3).all()
    with expstore.open(tmp_path / "run.exp") as rb:
        assert rb.recovered is None
        assert rb[3]["action"] == 77
        assert (rb[3]["frame"] == 3).all()


def test_the_best_rows_are_flat(tmp_path: Path) -> None:
    writer = TensorDictMaxValueWriter("action")
    with expstore.open(tmp_path / "run.exp", capacity=10, writer=writer) as rb:
        rb.extend(rows(30))
        assert rb[:]["action"].sort().values.tolist() == list(range(20, 30))
    assert packed_fields(tmp_path / "run.exp") == set()


def test_the_best_rows_are_not_packed(tmp_path: Path) -> None:
    writer = TensorDictMaxValueWriter("action")
    with (
        expstore.open(tmp_path / "run.exp", capacity=10, layout="packed", writer=writer) as rb,
        pytest.raises(StateError, match="made with packed fields"),
    ):
        rb.extend(rows(30))
    with expstore.open(tmp_path / "other.exp", capacity=10) as rb:
        rb.extend(rows(5))
        rb.set_writer(TensorDictMaxValueWriter("action"))
        with pytest.raises(StateError, match="in the order they came"):
            rb.extend(rows(30))
        assert len(rb) == 5
        rb.empty()
        with pytest.raises(SchemaError, match=r"'(next\.)?frame' is packed: rows cannot.*layout='flat'"):
            rb.extend(rows(30))
        assert len(rb) == 0
