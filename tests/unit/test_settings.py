"""The arguments of `expstore.open`: short and full forms are equal, and invalid values are refused early."""

from __future__ import annotations

import os
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    Batches,
    Bounded,
    Categorical,
    Composite,
    Durability,
    EpisodeKeys,
    Layout,
    Unbounded,
)
from expstore.disk.files import ReadingDisk
from expstore.errors import SchemaError
from expstore.schema.field_parser import schema_of
from expstore.specs import NonTensor
from expstore.storages.engine.open_settings import Settings
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.manifest import Manifest
from tests.support.batches import memory_buffer, numbered_rows

#: Keywords that `open` had before settings were grouped.
FORMER = (
    *("storage", "compression", "fields", "share_next", "min_free_bytes", "on_sigterm"),
    *("traj_key", "done_keys", "reward_key", "reward_reduce", "done_reduce"),
    *("device", "prefetch", "pin_memory", "generator", "sample_unit", "rate_limiter", "transform"),
    *("consume_after_n_samples", "specs"),
)


def test_former_keywords_are_not_taken(store_path: Path) -> None:
    for name in FORMER:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            expstore.open(store_path, **{name: None})
    assert os.listdir(store_path.parent) == []


SHORT: list[tuple[Any, Any, Any]] = [
    (Layout, None, Layout()),
    (Layout, "zarr", Layout(kind="zarr")),
    (Layout, "arrow", Layout(kind="arrow")),
    (Layout, "auto", Layout(columns="auto")),
    (Layout, "packed", Layout(columns="packed")),
    (Layout, "flat", Layout(columns="flat")),
    (Layout, {"kind": "arrow", "compression": "lz4"}, Layout(kind="arrow", compression="lz4")),
    (
        Layout,
        Layout(fields={("next", "x"): "packed"}),
        Layout(fields={"next.x": {"layout": "packed"}}),
    ),
    (Durability, None, Durability()),
    (Durability, "process", Durability()),
    (Durability, "sync", Durability(sync=True)),
    (Durability, {"min_free_bytes": 5}, Durability(min_free_bytes=5)),
    (Durability, {"min_free_bytes": np.int64(5)}, Durability(min_free_bytes=5)),
    (EpisodeKeys, None, EpisodeKeys()),
    (EpisodeKeys, {"traj": "a", "done": ["b"]}, EpisodeKeys(traj="a", done=("b",))),
    (Batches, None, Batches()),
    (Batches, {"as_numpy": True, "prefetch": 2}, Batches(as_numpy=True, prefetch=2)),
]


def test_a_short_form_is_equal_to_the_full_one() -> None:
    for kind, short, full in SHORT:
        assert kind.of(short) == full
        assert kind.of(full) is full
        assert pickle.loads(pickle.dumps(full)) == full
        with pytest.raises(FrozenInstanceError):
            full.anything = None


#: An argument of `open`, a value that it does not take, and what the error says.
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    (
        "layout",
        "wide",
        SchemaError,
        "layout='wide' is unknown; use 'zarr', 'arrow', 'flat', 'packed', 'auto'",
    ),
    ("layout", 3, TypeError, "layout takes Layout(...) or a dict of its parts, got 3"),
    ("layout", {"storage": "arrow"}, TypeError, "layout has no part 'storage'; Layout has kind, columns"),
    ("layout", {"compression": "gzip"}, SchemaError, "compression='gzip' is unknown; use 'lz4'"),
    ("layout", {"kind": "zarr", "compression": "lz4"}, SchemaError, 'use kind="arrow"'),
    ("layout", {"compression": "lz4"}, SchemaError, 'create the store with layout="arrow"'),
    ("layout", {"fields": ["frame"]}, SchemaError, "fields= must be a dict"),
    ("layout", {"fields": {"frame": "wide"}}, SchemaError, "field 'frame': no layout 'wide'"),
    ("layout", {"fields": {"frame": {"codec": "rar"}}}, SchemaError, "field 'frame': no codec 'rar'"),
    ("layout", {"share_next": 1}, SchemaError, "share_next must be True or False, got 1"),
    (
        "layout",
        {"columns": "flat", "share_next": True},
        SchemaError,
        "share_next=True is an option of packed fields",
    ),
    ("durability", "never", ValueError, "durability='never' is unknown; use 'process', 'sync'"),
    ("durability", {"sync": "yes"}, TypeError, "sync must be True or False, got 'yes'"),
    ("durability", {"min_free_bytes": -1}, ValueError, "min_free_bytes must be at least 0, got -1"),
    ("durability", {"min_free_bytes": "1GB"}, TypeError, "min_free_bytes must be a whole number, got '1GB'"),
    ("durability", {"on_sigterm": "die"}, ValueError, "on_sigterm='die' is unknown; use 'flush' or 'ignore'"),
    ("episodes", "traj", TypeError, "episodes takes EpisodeKeys(...) or a dict of its parts"),
    ("episodes", {"traj_key": "a"}, TypeError, "episodes has no part 'traj_key'"),
    ("episodes", {"traj": 3}, TypeError, "traj is the key of a field"),
    ("episodes", {"done": "terminated"}, ValueError, "done must be a list of keys, got 'terminated'"),
    ("episodes", {"reward_reduce": "median"}, ValueError, "reward_reduce must be one of sum, mean, min, max"),
    ("batches", "cuda", TypeError, "batches takes Batches(...) or a dict of its parts, got 'cuda'"),
    ("batches", {"as_array": True}, TypeError, "batches has no part 'as_array'; Batches has as_numpy"),
    ("batches", {"as_numpy": 1}, TypeError, "as_numpy must be True or False, got 1"),
    ("batches", {"prefetch": -1}, ValueError, "prefetch must be at least 0, got -1"),
    ("batches", {"generator": 3}, TypeError, "generator must be a torch.Generator, got 3"),
    ("batches", {"device": "no-such-device"}, expstore.errors.StateError, "no-such-device"),
    (
        "batches",
        {"rate_limiter": 3},
        expstore.errors.StateError,
        "rate_limiter=3 is a int, not a RateLimiter",
    ),
    ("batches", {"sample_unit": 3}, Exception, "sample_unit"),
    ("batches", {"transform": 3}, Exception, "transform"),
    (
        "schema",
        3,
        TypeError,
        "schema is 3; use a Schema, a dict of types by key, or a Composite",
    ),
    ("schema", {"x": NonTensor(())}, SchemaError, "field 'x': NonTensor does not say how its values are"),
    ("schema", {3: "float32"}, TypeError, "each key of schema is the key of a field"),
    ("schema", {"x": Composite(a=None)}, SchemaError, "'x.a': None is no type of a field"),
]


def test_wrong_values_are_refused_before_a_folder_is_made(store_path: Path) -> None:
    for place, (name, value, error, message) in enumerate(WRONG):
        modes: list[Any] = ["a", "x", "w"]
        with pytest.raises(error) as caught:
            expstore.open(store_path, mode=modes[place % 3], **{name: value})
        assert message in str(caught.value), (name, value)
        assert os.listdir(store_path.parent) == [], (name, value)


def settings_of(monkeypatch: pytest.MonkeyPatch, path: Path, **options: Any) -> Settings:
    """Return what `expstore.open` asks a storage for."""
    asked: list[Settings] = []

    def note(path: Path, capacity: int | None, settings: Settings) -> Any:
        asked.append(settings)
        raise KeyError("enough")

    monkeypatch.setattr("expstore._open._open_storage", note)
    with pytest.raises(KeyError, match="enough"):
        expstore.open(path, **options)
    return asked[0]


def test_every_setting_reaches_the_storage(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(
        monkeypatch,
        store_path,
        layout=Layout(
            kind="arrow", columns="packed", compression="zstd", fields={"a": {"rows": 8}}, share_next=False
        ),
        durability=Durability(sync=True, min_free_bytes=7, on_sigterm="ignore"),
        episodes=EpisodeKeys(
            traj="t", done=["d"], reward=("next", "r"), reward_reduce="min", done_reduce="all"
        ),
    )
    assert (found.storage, found.compression) == ("arrow", "zstd")
    assert found.layout == ColumnLayout("packed", {"a": {"rows": 8}}, share_next=False)
    assert (found.durability, found.min_free_bytes, found.on_sigterm) == ("sync", 7, "ignore")
    assert (found.traj_key, found.done_keys, found.reward_key) == ("t", ("d",), ("next", "r"))
    assert (found.reward_reduce, found.done_reduce) == ("min", "all")


def test_nothing_given_is_as_stored(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(monkeypatch, store_path)
    assert (found.storage, found.compression, found.layout) == (None, None, None)
    assert (found.traj_key, found.done_keys, found.reward_key) == (None, None, None)
    assert (found.durability, found.min_free_bytes, found.on_sigterm) == ("process", 0, "flush")
    assert (found.schema, found.specs) == (None, "")


def test_a_store_of_kind_arrow_may_have_packed_columns(store_path: Path) -> None:
    with expstore.open(store_path, layout=Layout(kind="arrow", columns="packed")) as rb:
        rb.extend({"text": ["a", "bc"], "a": np.arange(2)})
        assert sorted(rb.stats()["packed"]) == ["a"]
    assert Manifest.load(ReadingDisk(), store_path).storage == "arrow"
    with expstore.open(store_path, layout="arrow") as rb:
        assert len(rb) == 2


# -- schema and specs ------------------------------------------------------------------------------


def test_specs_among_types_fix_fields_and_values(store_path: Path) -> None:
    types = {
        "text": str,
        "action": Categorical(3),
        "tokens": Unbounded(shape=(-1,), dtype=torch.int32),
        "next": {"reward": Bounded(0.0, 1.0, shape=(1,)), "done": ("bool", (1,))},
        ("next", "agent"): Composite(gain=Bounded(0.0, 2.0, shape=())),
    }
    with expstore.open(store_path, layout="arrow", schema=types) as rb:
        assert rb.schema == schema_of(
            {
                "text": str,
                "action": "int64",
                "tokens": ("int32", (None,)),
                "next": {"reward": ("float32", (1,)), "done": ("bool", (1,))},
                ("next", "agent", "gain"): "float32",
            }
        )
        assert rb.specs == Composite(
            {
                "action": Categorical(3),
                "tokens": Unbounded(shape=(-1,), dtype=torch.int32),
                ("next", "reward"): Bounded(0.0, 1.0, shape=(1,)),
                ("next", "agent", "gain"): Bounded(0.0, 2.0, shape=()),
            }
        )
    with expstore.open(store_path, schema=types) as rb:
        assert rb.specs is not None


def test_a_composite_says_values_and_leaves_the_fields_open(store_path: Path) -> None:
    with expstore.open(store_path, schema=Composite(a=Bounded(0, 10, shape=(), dtype=torch.int64))) as rb:
        assert rb.schema is None
        rb.extend(numbered_rows(3, key="a"))
        assert rb.specs is not None
        with pytest.raises(SchemaError, match="field 'a' is 11"):
            rb.extend(numbered_rows(1, 11, key="a"), validate="domain")


# -- as_numpy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_as_numpy_at_open_is_the_default_of_samples(store_path: Path, prefetch: int) -> None:
    batches = Batches(as_numpy=True, prefetch=prefetch)
    with expstore.open(store_path, batch_size=4, seed=1, batches=batches) as rb:
        rb.extend(numbered_rows(10, key="a"))
        drawn = [rb.sample() for _ in range(3)]
        drawn.append(next(iter(rb)))
        for batch in drawn:
            assert type(batch) is dict
            assert all(isinstance(values, np.ndarray) for values in batch.values())
        assert sorted(drawn[0]) == ["a", "id", "index"]
        assert sorted(rb.sample(include_info=False)) == ["a"]
        batch, info = rb.sample(return_info=True)
        assert isinstance(batch, dict)
        assert isinstance(info["id"], np.ndarray)
        for given in (rb.sample(as_numpy=False), rb.sample(3, as_numpy=False, include_info=False)):
            assert isinstance(given, TensorDict)
        assert isinstance(rb.sample(as_numpy=True), dict)
        copied = pickle.loads(pickle.dumps(rb))
        assert isinstance(copied.sample(), dict)
        copied.close()
        with expstore.open(store_path, mode="r", batch_size=4, batches={"as_numpy": True}) as seen:
            assert isinstance(seen.sample(), dict)
    with expstore.open(store_path, batch_size=4) as rb:
        assert isinstance(rb.sample(), TensorDict), "it is not kept in the store"


def test_as_numpy_draws_the_same_rows(tmp_path: Path) -> None:
    drawn = []
    for as_numpy in (False, True):
        path = tmp_path / str(as_numpy)
        with expstore.open(path, batch_size=8, seed=3, batches={"as_numpy": as_numpy}) as rb:
            rb.extend(numbered_rows(50, key="a"))
            drawn.append([rb.sample()["id"].tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]


def test_buffers_over_others_get_tensors() -> None:
    members = [memory_buffer(batch_size=4, as_numpy=True) for _ in range(2)]
    for rb in members:
        rb.extend(numbered_rows(10, key="a"))
    ensemble = expstore.ReplayBufferEnsemble(*members, batch_size=8)
    assert isinstance(ensemble.sample()["a"], torch.Tensor)
    assert isinstance(ensemble.sample(as_numpy=True)["a"], np.ndarray)
    both = expstore.datasets.OfflineToOnlineReplayBuffer(members[0], online_capacity=10, batch_size=4)
    assert isinstance(both.sample()["a"], torch.Tensor)
    with pytest.raises(TypeError, match="made with as_numpy=True"):
        expstore.ReplayBufferTrainer(members[0], batch_size=4).sample()
