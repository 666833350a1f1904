"""Rows as HDF5 and NPZ files with D4RL's names and back, and files of other programs."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore import exchange
from expstore.cli.app import run
from expstore.core import tuning
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.exchange import foreign_rows, import_hdf5, import_npz
from expstore.exchange.base import import_library
from expstore.schema import arrow_types
from expstore.schema.schema import Field, Schema
from expstore.storages.read_view import keys_for
from tests.support.buffer_bytes import held
from tests.support.exchange_formats import BY_STEPS, FLAT, control_rows
from tests.support.hdf5_damage import damage_header
from tests.unit.datasets.test_d4rl import arrays

h5py = pytest.importorskip("h5py", reason="the extra expstore[h5] is not installed")

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture(params=sorted(FLAT))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


EPISODES = (
    "SELECT length, \"return\", CASE WHEN status = 'open' THEN 'cut' ELSE status END FROM episodes "
    "WHERE live_rows > 0 ORDER BY episode_id"
)


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as found:
            return dict(found)
    arrays: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, it: arrays.update({name: it[()]}) if isinstance(it, h5py.Dataset) else None
        )
    return arrays


@pytest.mark.some(1)
@pytest.mark.parametrize("capacity", [None, 200])
def test_rows_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, capacity: int | None
) -> None:
    """Those of an episode behind one another, in several pieces, from two lanes that interleave."""
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 64)
    out, back = FLAT[form]
    path = tmp_path / f"out.{form}"
    with expstore.open(tmp_path / "run.exp", capacity=capacity, meta={"a": [1]}) as rb:
        for first in range(0, 280, 20):
            rb.extend(torch.stack([control_rows(first, 20), control_rows(first + 1000, 20)]))
        done = out(rb, path)
        assert done.rows == len(rb)
        stored = arrays_of(path)
        assert back(path, tmp_path / "back.exp").rows == done.rows
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert held(rb, BY_STEPS) == held(again, BY_STEPS)
            assert rb.schema == again.schema
            assert again.meta == {"a": [1]}
            assert again.storage.capacity == capacity
            if capacity is None:
                assert rb.sql(EPISODES).fetchall() == again.sql(EPISODES).fetchall()
    shapes = {name: array.shape[1:] for name, array in stored.items()}
    shapes.pop("expstore", None)
    assert shapes == {
        **{"actions": (), "rewards": (), "terminals": (), "timeouts": (), "_episode": (), "wave": ()},
        **{"observations/pixels": (6, 6), "observations/state": (3,), "next_observations/pixels": (6, 6)},
        "collector/traj_ids": (),
    }
    assert stored["terminals"].dtype == bool
    assert stored["observations/state"].dtype == np.float32
    assert (stored["next_observations/pixels"] == stored["observations/pixels"] + 1).all()
    assert sorted(os.listdir(tmp_path)) == ["back.exp", f"out.{form}", "run.exp"]
    assert run(["verify", str(tmp_path / "back.exp")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("keys", [None, expstore.EpisodeKeys(done=["dones"], reward="rewards")])
def test_names_that_mean_something_in_other_files_come_back(tmp_path: Path, form: str, keys: Any) -> None:
    out, back = FLAT[form]
    dones = torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    data = {name: torch.arange(6) for name in ("obs", "observation", "actions", "rewards", "metadata")}
    nested = {"sensor.v1": torch.ones(6, 2), "infos": {"a.b": torch.ones(6)}, "next": {"obs": torch.ones(6)}}
    with expstore.open(tmp_path / "run.exp", episodes=keys) as rb:
        rb.extend(TensorDict({**data, **nested, "dones": dones}, [6]))
        out(rb, tmp_path / f"out.{form}")
        notes: list[str] = []
        back(tmp_path / f"out.{form}", tmp_path / "back.exp", tell=notes.extend)
        assert notes == []
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert {key: again.schema[key] for key in again.schema.keys} == {
                key: rb.schema[key] for key in rb.schema.keys
            }
            for key in rb.schema.keys:
                assert torch.equal(again[:][key], rb[:][key])
            assert rb.sql(EPISODES).fetchall() == again.sql(EPISODES).fetchall()
    names = {"obs": "observation", "observations": "state", "actions": ""}
    back(tmp_path / f"out.{form}", tmp_path / "mapped.exp", names=names)
    with expstore.open(tmp_path / "mapped.exp", mode="r") as mapped:
        assert {("observation",), ("state",), ("next", "reward")} <= set(mapped.schema.keys)
        assert ("action",) not in mapped.schema


def test_ends_are_there_though_no_field_says_them(tmp_path: Path, form: str) -> None:
    out, back = FLAT[form]
    path = tmp_path / f"out.{form}"
    with expstore.open(tmp_path / "run.exp") as rb:
        for lane in range(3):
            data = control_rows(100 * lane, 10).select("action", ("collector", "traj_ids"))
            data["collector", "traj_ids"] = torch.full((10,), lane)
            rb.extend(data, source=f"robot {lane}")
        out(rb, path, fields=["action"])
        arrays = arrays_of(path)
        assert np.flatnonzero(arrays["timeouts"]).tolist() == [9, 19, 29]
        assert not arrays["terminals"].any()
        back(path, tmp_path / "back.exp")
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert again.schema.keys == (("action",),)
            assert again.sql("SELECT length, status FROM episodes").fetchall() == [(10, "cut")] * 3


# -- files of others ------------------------------------------------------------------------------------


def save(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array)
    return path


def d4rl(path: Path, **more: Any) -> Path:
    """Write D4RL's three episodes of 4, 5 and 3 steps, with other arrays in place of some, or without."""
    names = ("observations", "next_observations", "actions", "rewards", "terminals", "timeouts", "infos/qpos")
    values = {**{name: one for name, one in arrays().items() if name in names}, **more}
    return save(path, {name: one for name, one in values.items() if one is not None})


def test_a_d4rl_file_becomes_a_store(tmp_path: Path, form: str) -> None:
    path = d4rl(tmp_path / f"x.{form}", **{"metadata/algorithm": np.bytes_("SAC")} if form == "hdf5" else {})
    done = FLAT[form][1](path, tmp_path / "x.exp")
    assert (done.rows, done.kept, done.episodes) == (12, 12, 3)
    assert set(done.fields) == {
        *("observation", "action", "info.qpos"),
        *("next.observation", "next.reward", "next.terminated", "next.truncated"),
    }
    with expstore.open(tmp_path / "x.exp", mode="r") as rb:
        found = rb.sql('SELECT length, status, "return" FROM episodes ORDER BY episode_id').fetchall()
        assert found == [(4, "terminated", 6.0), (5, "truncated", 30.0), (3, "cut", 30.0)]
        assert rb.schema["next", "reward"].shape == rb.schema["next", "terminated"].shape == (1,)
        assert rb.trajectory(2)["next", "observation"][:, 0].tolist() == [201, 202, 203, 204, 205]


@pytest.mark.slow
@pytest.mark.some(1)
def test_seams_without_a_flag_end_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also where a piece begins; without next observations only flags do."""
    none = np.zeros(12, "f4")
    path = d4rl(tmp_path / f"x.{form}", terminals=none, timeouts=none)
    for size in (1, 4, 5, 100):
        monkeypatch.setattr(tuning, "EXCHANGE_ROWS", size)
        assert FLAT[form][1](path, tmp_path / f"{size}.exp").episodes == 3
        with expstore.open(tmp_path / f"{size}.exp", mode="r") as rb:
            found = rb.sql("SELECT _episode, _step FROM transitions ORDER BY _id").fetchall()
            assert found == [(n, s) for n, c in ((1, 4), (2, 5), (3, 3)) for s in range(c)]
    path = d4rl(tmp_path / f"y.{form}", next_observations=None, timeouts=None, terminals=np.eye(12)[5])
    assert FLAT[form][1](path, tmp_path / "y.exp").episodes == 2
    with expstore.open(tmp_path / "y.exp", mode="r") as rb:
        assert rb.sql("SELECT length, status FROM episodes").fetchall() == [(6, "terminated"), (6, "cut")]
        assert rb.schema["next", "terminated"].dtype == "bool"


def test_names_can_be_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    count = np.arange(6)
    arrays = {
        "o/eye": count,
        "a": count,
        "r": count * 1.0,
        "label": np.array(["x"] * 6, "S1"),
        "odd": count[:2],
    }
    path = str(save(tmp_path / f"x.{form}", arrays))
    store = str(tmp_path / "x.exp")
    names = ["--map", "o=observation", "--map", "r=next.reward", "--map", "label=", "--map", "odd="]
    assert run(["import", path, store, *names, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["fields"]) == {"observation.eye", "a", "next.reward"}
    with expstore.open(store, mode="r") as rb:
        assert (rb.schema["next", "reward"].dtype, rb.schema["next", "reward"].shape) == ("float64", (1,))
    for wrong, words in (
        (["label="], "'odd' has 2 rows"),
        (["odd="], "'label' holds values of type |S1, which a field cannot have"),
        (["label=", "odd=", "ghost=x"], "there is no 'ghost' to map"),
        (["label=", "odd=", "a=r"], "two of the file's names stand for 'r'"),
        (["label"], "not of the form THEIRS=OURS"),
        (["label=", "odd=", "a=b/c"], "cannot be a path"),
    ):
        options = [part for name in wrong for part in ("--map", name)]
        assert run(["import", path, str(tmp_path / "y.exp"), *options]) == 2
        assert words in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["x.exp", f"x.{form}"]
    assert run(["export", store, str(tmp_path / f"z.{form}"), f"--{form}"]) == 0
    assert "the order of rows of different episodes" in capsys.readouterr().err


def test_bad_files_are_refused_and_leave_nothing(tmp_path: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    count = np.arange(6)
    bad: list[tuple[Path, type[Exception], str]] = [
        (tmp_path / "in/none", NotFoundError, "there is no file"),
        (tmp_path / "in", NotFoundError, "is a folder; give the path of a file"),
        (
            save(tmp_path / f"in/lengths.{form}", {"a": count, "b": count[:3]}),
            SchemaError,
            "'b' has 3 rows, and 'a' has 6",
        ),
        (save(tmp_path / f"in/none.{form}", {}), SchemaError, "no array that can be a field"),
        (
            save(tmp_path / f"in/text.{form}", {"a": np.array(["x"] * 6, "S1")}),
            SchemaError,
            r"'a' holds values of type \|S1",
        ),
        (
            save(tmp_path / f"in/wide.{form}", {"rewards": np.ones((6, 2))}),
            SchemaError,
            r"'rewards' has \[2\] values per row",
        ),
        (save(tmp_path / f"in/big.{form}", {"a": np.ones(6, "c16")}), SchemaError, "of type complex128"),
    ]
    for name, data in (("text", b"hello"), ("zero", b""), ("half", bad[2][0].read_bytes()[:300])):
        (tmp_path / "in" / name).write_bytes(data)
        bad.append((tmp_path / "in" / name, StorageError, "cannot read"))
    for path, kind, words in bad:
        with pytest.raises(kind, match=words):
            FLAT[form][1](path, tmp_path / "back.exp")
    assert os.listdir(tmp_path) == ["in"]


def test_compressed_arrays_that_are_damaged(tmp_path: Path) -> None:
    """A damaged stream is noticed by zlib, before the checksum of the array."""
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(6))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        (member,) = file.infolist()
    at = member.header_offset + 30 + len(member.filename) + int.from_bytes(data[28:30], "little")
    data[at] |= 0b110  # the type of the first block, of which 3 means nothing
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(StorageError, match="cannot read .*invalid block type"):
        import_npz(tmp_path / "a.npz", tmp_path / "b.exp")
    assert os.listdir(tmp_path) == ["a.npz"]


class Bomb:
    """Do harm when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.empty(2, object)
    objects[:] = Bomb()
    np.savez(tmp_path / "x.npz", a=np.arange(2), bomb=objects)
    np.savez(tmp_path / "y.npz", a=np.arange(2), expstore=np.array(Bomb(), object))
    with pytest.raises(SchemaError, match="'bomb' holds values of type object"):
        import_npz(tmp_path / "x.npz", tmp_path / "x.exp")
    assert import_npz(tmp_path / "x.npz", tmp_path / "x.exp", names={"bomb": ""}).fields == ("a",)
    done = import_npz(tmp_path / "y.npz", tmp_path / "y.exp")
    assert done.notes == ("'expstore' is one value for all rows, and left out",)
    assert sorted(os.listdir(tmp_path)) == ["x.exp", "x.npz", "y.exp", "y.npz"]


def test_two_fields_of_one_name_are_refused(tmp_path: Path, form: str) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(TensorDict({"action": torch.zeros(3), "actions": torch.zeros(3)}, [3]))
        with pytest.raises(SchemaError, match="two fields would both be named 'actions'"):
            FLAT[form][0](rb, tmp_path / f"out.{form}")
    assert os.listdir(tmp_path) == ["run.exp"]


@pytest.mark.guarantee("exchange/exports")
@pytest.mark.parametrize("name", ["hdf5", "minari", "npz"])
def test_fields_without_a_fixed_size_are_refused_by_name(tmp_path: Path, name: str) -> None:
    storage = expstore.MemoryStorage(10)
    schema = Schema(
        [
            Field(("action",), "float32", ()),
            Field(("observation",), "float32", (2,)),
            Field(("next", "observation"), "float32", (2,)),
            Field(("next", "reward"), "float32", ()),
            Field(("prompt",), "arrow", (), arrow=arrow_types.type_text(pa.string())),
        ]
    )
    storage.prepare(schema, keys_for(storage, schema))
    with expstore.TensorDictReplayBuffer(storage=storage) as rb:
        after = {"observation": torch.ones(2, 2), "reward": torch.zeros(2)}
        rows = {"action": torch.zeros(2), "observation": torch.ones(2, 2), "next": after}
        rb.extend(TensorDict(rows | {"prompt": NonTensorStack("a", "bc")}, [2]))
        with pytest.raises(SchemaError, match="field 'prompt' is string: exports to"):
            getattr(exchange, f"export_{name}")(rb, tmp_path / "out")
        assert os.listdir(tmp_path) == []
        others = ["action", "observation", "next.observation", "next.reward"]
        assert getattr(exchange, f"export_{name}")(rb, tmp_path / "out", fields=others).rows == 2


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs h5py.*pip install 'expstore\[h5\]'"):
        import_library("h5py")


def test_names_lead_there_and_back() -> None:
    for key in [
        ("observation",),
        ("next", "observation", "a"),
        ("action", "0"),
        ("next", "reward"),
        ("x", "y"),
        ("next", "z"),
    ]:
        path = foreign_rows.their_path(key)
        assert foreign_rows.name_fields([path], {}) == {path: key}


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (["Trial0", "Trial1", "Trial2", "Trial3"], "Trial0, Trial1, Trial2, ...: 4"),
        (["episode_0"], "episode_0: 1"),
        (["data/demo_0", "data/demo_1"], "data/demo_0, data/demo_1: 2"),
        (["x1", "x2"], "x1, x2: 2"),
    ],
)
def test_a_group_per_episode_is_refused(tmp_path: Path, names: list[str], listed: str) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        for length, name in enumerate(names, 3):
            file[f"{name}/actions"] = np.zeros((length, 2), np.float32)
            file[f"{name}/rewards"] = np.zeros(length, np.float32)
    with pytest.raises(SchemaError, match=re.escape(f"a group per episode ({listed} of them)")) as caught:
        import_hdf5(path, tmp_path / "x.exp")
    assert caught.value.kind == "layout"
    assert [item.name for item in tmp_path.iterdir()] == ["x.hdf5"]


@pytest.mark.parametrize("name", ["rewards", "infos", "infos/qpos"])
def test_a_damaged_array_of_an_hdf5_file_is_not_skipped(tmp_path: Path, name: str) -> None:
    path = d4rl(tmp_path / "x.hdf5")
    damage_header(path, name)
    with pytest.raises(StorageError, match=f"cannot read '/{name}' in the HDF5 file"):
        import_hdf5(path, tmp_path / "x.exp")
    assert [item.name for item in tmp_path.iterdir()] == ["x.hdf5"]


def test_links_of_an_hdf5_file_to_nothing_are_left_out(tmp_path: Path) -> None:
    path = d4rl(tmp_path / "x.hdf5")
    with h5py.File(path, "a") as file:
        file["again"], file["gone"] = h5py.SoftLink("/rewards"), h5py.SoftLink("/nothing")
    done = import_hdf5(path, tmp_path / "x.exp")
    assert "again" in done.fields
    assert "gone" not in done.fields


def test_groups_of_agents_are_fields(tmp_path: Path) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        for agent in range(2):
            file[f"agent_{agent}/actions"] = np.full((5, 2), agent, np.float32)
        file["rewards"] = np.zeros(5, np.float32)
        file["terminals"] = np.zeros(5, bool)
    assert import_hdf5(path, tmp_path / "x.exp").rows == 5
