"""Options of a store's layout: in `expstore.open`, and their effect on packed fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from tensordict import TensorDict

import expstore
from expstore import TensorDictMaxValueWriter
from expstore.errors import SchemaError, StateError
from expstore.storages.format.layout import ColumnLayout, ask_layout


def rows(count: int, start: int = 0) -> TensorDict:
    numbers = torch.arange(start, start + count)
    frames = numbers[:, None, None].expand(count, 40, 40).to(torch.uint8)
    return TensorDict({"frame": frames, "action": numbers, "next": {"frame": frames + 1}}, [count])


def packed_fields(path: Path) -> set[str]:
    """Return what zarr-python says has a compressor."""
    group: Any = zarr.open_group(path / "columns", mode="r")
    arrays = ("frame", "action", "next/frame")
    return {name for name in arrays if "blosc" in json.dumps(group[name].metadata.to_dict()["codecs"])}


def asked_layout(asked: dict[str, Any]) -> expstore.Layout:
    """Return a layout from the arguments of a storage, whose `layout` is its `columns`."""
    return expstore.Layout(
        **{"columns" if name == "layout" else name: value for name, value in asked.items()}
    )


@pytest.mark.some(4)
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
    with expstore.open(tmp_path / "run.exp", capacity=100, seed=0, layout=asked_layout(asked)) as rb:
        rb.extend(rows(150))
        batch = rb.sample(64)
        assert (batch["frame"][:, 0, 0] == batch["action"].to(torch.uint8)).all()
    assert packed_fields(tmp_path / "run.exp") == packed
    with expstore.open(tmp_path / "run.exp", layout=asked_layout(asked)) as rb:
        batch = rb[:]
        assert (batch["next", "frame"] == batch["frame"] + 1).all()
        assert (batch["frame"][:, 3, 3] == batch["action"].to(torch.uint8)).all()


def test_layouts_that_contradict_the_store_are_refused(tmp_path: Path) -> None:
    path, fields = tmp_path / "run.exp", {"frame": {"rows": 8}}
    expstore.open(path, layout=expstore.Layout(fields=fields)).close()
    for agrees in ({}, {"layout": "auto"}, {"fields": fields}, {"layout": "auto", "fields": fields}):
        expstore.open(path, layout=asked_layout(agrees)).close()
    for differs in ({"layout": "packed"}, {"layout": "flat"}, {"fields": {"frame": {"rows": 4}}}):
        with pytest.raises(StateError, match="layout"):
            expstore.open(path, layout=asked_layout(differs))


@pytest.mark.parametrize("make", [expstore.ZarrStorage, expstore.LazyMemmapStorage])
def test_storages_are_flat_unless_asked(tmp_path: Path, make: Any) -> None:
    """As TorchRL's programs expect, which write to rows in place; also when `open` goes on with them."""
    path = tmp_path / "run.exp"
    storage = make(path, 100) if make is expstore.ZarrStorage else make(100, scratch_dir=path)
    with expstore.TensorDictReplayBuffer(storage=storage, batch_size=4) as rb:
        rb.extend(rows(10))
        rb[3] = rows(1, 9)[0]
        assert packed_fields(path) == set()
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


#: Layouts that no store can have, and words of the error.
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"layout": "wide"}, "columns='wide' is unknown"),
    ({"fields": {"frame": {"layout": "packed", "codec": "lzma"}}}, "no codec 'lzma'; there are lz4hc, "),
    ({"fields": {"frame": {"codec": "numcodecs.bz2"}}}, "'frame': no codec 'numcodecs.bz2'"),
    ({"fields": {"frame": {"layout": "auto", "chunk": 3}}}, "field 'frame': no option 'chunk'"),
    ({"fields": {"frame": {"rows": 3}}}, "power of two, got 3"),
    ({"fields": {"frame": {"rows": True}}}, "power of two, got True"),
    ({"fields": {"frame": {"layout": None}}}, "no layout None"),
    ({"fields": {"frame": {"rows": "4"}}}, "power of two, got '4'"),
    ({"fields": {"frame": {"rows": 2**40}}}, "got 1099511627776; use a whole number from 1 to 4096"),
    ({"fields": {"frame": {"codec": ["lz4"]}}}, r"no codec \['lz4'\]"),
    ({"fields": {"frame": {1: 2, "chunk": 3}}}, "no option 1"),
    ({"fields": {"frame": 7}}, "field 'frame': options must be a dict, got 7"),
    ({"fields": ["frame"]}, "fields= must be a dict"),
    ({"fields": {3: {"rows": 4}}}, "a key is a name or a tuple of names, got 3"),
    ({"fields": {("next", 3): {"rows": 4}}}, r"names, got \('next', 3\)"),
    ({"fields": {("a", "b"): {}, "a.b": {}}}, "field 'a.b' is in fields= twice"),
    ({"fields": {"frame": {"layout": "flat", "codec": "zstd"}}}, "codec='zstd' is an option of packed"),
    ({"fields": {"frame": {"layout": "flat", "rows": 4}}}, "rows=4 is an option of packed fields"),
    ({"fields": {"frame": {"layout": "flat", "share_next": True}}}, "'frame': share_next=True is an option"),
    ({"layout": "flat", "share_next": True}, '^share_next=True .* but all fields are flat; .*"packed"'),
    ({"layout": "flat", "fields": {"frame": {"layout": "flat"}}, "share_next": True}, "all fields are"),
    ({"share_next": "yes"}, "True or False"),
]


def test_unknown_layouts_are_refused(tmp_path: Path) -> None:
    for asked, words in UNKNOWN:
        with pytest.raises(SchemaError, match=words):
            expstore.open(tmp_path / "run.exp", layout=asked_layout(asked))
        assert not (tmp_path / "run.exp").exists()


#: Layouts that do not fit the first rows, and words of the error.
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"fields": {"pixel": {"layout": "flat"}}}, "'pixel', .* the fields are action, .*mode='w'"),
    ({"fields": {"_row.id": {"layout": "packed"}}}, "'_row.id', which is not a field"),
    ({"fields": {"action": {"codec": "zstd"}}}, "'action': codec='zstd' .* this field is flat"),
    ({"fields": {"action": {"rows": 8}}}, "'action': rows=8 .* this field is flat"),
    ({"layout": "flat", "fields": {"frame": {"codec": "zstd"}}}, "'frame': codec='zstd' .* is flat"),
    ({"fields": {"action": {"share_next": True}}}, "share_next=True .* is flat"),
    ({"fields": {"next.frame": {"share_next": True}}}, "no packed next field of the same dtype"),
    ({"fields": {"frame": {"share_next": True}, "next.frame": {"layout": "flat"}}}, "no packed next field"),
    ({"fields": {"frame": {"rows": 128}}}, "128 rows of 1600 bytes are too large; .* here 100"),
    ({"fields": {"wide": {"rows": 64}}}, "64 rows of 400000 bytes .* 16 MiB .* here 41"),
]


def test_layouts_that_do_not_fit_the_first_rows_are_refused(tmp_path: Path) -> None:
    """Before anything is made; with mode "w" the same folder takes what has one."""
    for number, (asked, words) in enumerate(UNFIT):
        path, first, is_wide = tmp_path / f"{number}.exp", rows(10), "wide" in asked["fields"]
        if is_wide:
            first["wide"] = torch.zeros(10, 100_000)
        with expstore.open(path, capacity=None if is_wide else 100, layout=asked_layout(asked)) as rb:
            for _ in range(2):
                with pytest.raises(SchemaError, match=words):
                    rb.extend(first)
            assert (len(rb), rb.storage.schema) == (0, None)
        assert not (path / "columns").exists()
    with expstore.open(path, mode="w", capacity=100) as rb:
        rb.extend(first)
        assert len(rb) == 10


def test_a_version_is_not_loaded_where_names_are_not_its_own(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=100) as rb:
        rb.extend(rows(10))
        rb.dumps(tmp_path / "kept")
    with expstore.open(
        tmp_path / "other.exp", capacity=100, layout=expstore.Layout(fields={"pixel": {"rows": 4}})
    ) as rb:
        with pytest.raises(SchemaError, match="'pixel', which is not a field"):
            rb.loads(tmp_path / "kept")
        assert len(rb) == 0
    assert not (tmp_path / "other.exp/columns").exists()


def test_layout_fields_accept_strings_and_tuples_as_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    layouts: list[Any] = [{("next", "frame"): {"layout": "flat"}}, {"next.frame": {"layout": "flat"}}]
    for fields in layouts:
        with expstore.open(path, capacity=100, layout=expstore.Layout(fields=fields)) as rb:
            rb.extend(rows(10))
    assert packed_fields(path) == {"frame"}


def test_a_contradiction_is_reported_by_the_argument_names(tmp_path: Path) -> None:
    flat, packed = tmp_path / "flat.exp", tmp_path / "packed.exp"
    expstore.open(flat, layout="flat").close()
    expstore.open(packed, layout=expstore.Layout(fields={"frame": {"rows": 8}})).close()
    with pytest.raises(StateError, match="made with layout='flat', opened with layout='packed'"):
        expstore.open(flat, layout="packed")
    stored = "made with layout='auto', fields={'frame': {'rows': 8}}, opened with layout='auto', fields={"
    with pytest.raises(StateError, match=stored):
        expstore.open(packed, layout=expstore.Layout(fields={"frame": {"rows": 4}}))


def test_share_next_is_of_packed_fields(tmp_path: Path) -> None:
    """Asked of all fields it is of those that are packed; where none can be it is refused."""
    expstore.open(tmp_path / "a.exp", layout="flat").close()
    with pytest.raises(SchemaError, match="share_next=True is an option of packed fields"):
        expstore.open(tmp_path / "a.exp", layout=expstore.Layout(share_next=True))
    packed = {"frame": {"layout": "packed"}, "next.frame": {"layout": "packed"}}
    for name, asked in {"b.exp": {}, "c.exp": {"layout": "flat", "fields": packed}}.items():
        with expstore.open(tmp_path / name, layout=asked_layout({**asked, "share_next": True})) as rb:
            rb.extend(rows(10))
        expstore.open(tmp_path / name).close()
        expstore.open(tmp_path / name, layout=expstore.Layout(share_next=True)).close()  # as without it
        with pytest.raises(StateError, match="opened with layout='.*', share_next=False"):
            expstore.open(tmp_path / name, layout=expstore.Layout(share_next=False))


def test_nothing_asked_is_as_stored() -> None:
    assert ask_layout(None, None) is None
    assert ColumnLayout().to_json() == {}
    asked = ask_layout("auto", {"a": {"rows": 8}})
    assert ColumnLayout(**json.loads(json.dumps(asked.to_json()))) == asked


@pytest.mark.guarantee("rows/refused")
def test_packed_rows_stay_as_they_are(tmp_path: Path) -> None:
    """Nothing is written by a change that is refused; fields that are flat can be changed."""
    with expstore.open(tmp_path / "run.exp", capacity=100, seed=0) as rb:
        rb.extend(rows(30))
        with pytest.raises(SchemaError, match=r"fields 'frame', 'next.frame' are packed.*layout='flat'"):
            rb[3] = rows(1, 9)[0]
        with pytest.raises(SchemaError, match="field 'frame' is packed"):
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


@pytest.mark.guarantee("rows/refused")
def test_the_best_rows_are_not_packed(tmp_path: Path) -> None:
    writer = TensorDictMaxValueWriter("action")
    with (
        expstore.open(tmp_path / "run.exp", capacity=10, layout="packed", writer=writer) as rb,
        pytest.raises(StateError, match="this store has packed fields"),
    ):
        rb.extend(rows(30))
    with expstore.open(tmp_path / "other.exp", capacity=10) as rb:
        rb.extend(rows(5))
        rb.set_writer(TensorDictMaxValueWriter("action"))
        with pytest.raises(StateError, match="keeps the newest rows"):
            rb.extend(rows(30))
        assert len(rb) == 5
        rb.empty()
        with pytest.raises(SchemaError, match=r"'next.frame' are packed: rows cannot.*layout='flat'"):
            rb.extend(rows(30))
        assert len(rb) == 0
