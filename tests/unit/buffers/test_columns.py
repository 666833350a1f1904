"""`add_column` and `drop_column`: values of existing and later rows, and what remains unchanged."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ListStorage,
    MemoryStorage,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, QueryError, SchemaError, StateError
from expstore.maintenance import verify
from expstore.specs import Binary, Composite, Unbounded
from expstore.storages import ZarrStorage
from expstore.storages.columns.checksums import SUMMED, Checksums, state_of
from expstore.storages.engine import alter
from expstore.storages.format import swap
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import CHECKSUMS
from expstore.writers.writers import TensorDictMaxValueWriter
from tests.support.batches import numbered_rows
from tests.support.tuned import few_rows_in_memory, set_spare_slots

rows = partial(
    numbered_rows,
    key="action",
    observation=lambda number: number[:, None].expand(-1, 4).float().clone(),
    next=lambda number: {"reward": number[:, None] / 4, "terminated": (number % 10 == 9)[:, None]},
)


def in_folder(path: Path, capacity: int | None) -> TensorDictReplayBuffer:
    return expstore.open(path, capacity=capacity, batch_size=16, seed=3)


KINDS = ("ring", "endless", "synced", "memory", "memory endless", "grid")


@pytest.fixture(params=KINDS)
def rb(request: pytest.FixtureRequest, store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store that holds rows 300 to 399 or, without bound, 0 to 399; of one with lanes 300 to 399, too."""
    kind = request.param
    set_spare_slots(monkeypatch, 40)
    if kind.startswith("memory"):
        made = TensorDictReplayBuffer(
            storage=MemoryStorage(None if "endless" in kind else 100), batch_size=16
        )
    elif kind == "grid":
        made = TensorDictReplayBuffer(storage=ZarrStorage(store_path, 100, ndim=2), batch_size=16)
    else:
        durability = "sync" if kind == "synced" else "process"
        capacity = None if kind == "endless" else 100
        made = expstore.open(store_path, capacity=capacity, batch_size=16, durability=durability)
    made.kind = kind
    for start in range(0, 400, 20):
        extend(made, rows(20, start))
    yield made
    made.close()


def extend(rb: TensorDictReplayBuffer, batch: TensorDict) -> None:
    rb.extend(batch.reshape(-1, 4) if getattr(rb, "kind", "") == "grid" else batch)


def whole(rb: TensorDictReplayBuffer) -> TensorDict:
    """All rows, oldest first."""
    batch = rb[:]
    batch = batch.reshape(-1)
    return batch[torch.argsort(batch["action"])]


@pytest.mark.some(4)
def test_one_value_for_all_rows(rb: TensorDictReplayBuffer) -> None:
    before = whole(rb)
    rb.columns.add("late", fill=2.5)
    after = whole(rb)
    assert (after["late"] == 2.5).all()
    assert after["late"].dtype == torch.float32
    assert (after.exclude("late") == before).all()
    extend(rb, rows(20, 400))
    extend(rb, rows(20, 420, late=torch.arange(20.0)))
    assert whole(rb)["late"][-40:].tolist() == [2.5] * 20 + list(range(20))
    assert rb.sample()["late"].shape == (16,)
    rb.columns.drop("late")
    assert (whole(rb)[:-40].exclude("late") == before[before["action"] >= int(whole(rb)["action"][0])]).all()
    assert "late" not in rb.sample().keys()  # noqa: SIM118 - no dict


@pytest.mark.some(4)
def test_a_function_of_rows(rb: TensorDictReplayBuffer) -> None:
    told: list[tuple[int, int]] = []
    rb.columns.add(
        ("next", "value"),
        function=lambda batch: batch["observation"][:, :2] + batch["id"][:, None],
        progress=lambda done, total: told.append((done, total)),
    )
    found = whole(rb)
    if rb.kind != "grid":  # there ids go along the lanes first
        assert (found["next", "value"] == 2 * found["observation"][:, :2] + 1).all()
    assert told[-1] == (len(rb.storage), len(rb.storage))
    with pytest.raises(SchemaError, match=r"lacks 'next.value'.*added later, without a default"):
        extend(rb, rows(20, 400))
    assert len(whole(rb)) == len(found)
    batch = rows(20, 400)
    batch["next", "value"] = torch.zeros(20, 2)
    extend(rb, batch)
    assert (whole(rb)["next", "value"][-20:] == 0).all()


@pytest.mark.some(2)
def test_an_expression(rb: TensorDictReplayBuffer) -> None:
    rb.columns.add("late", sql="observation[1] * 2 + episode.length", dtype=torch.float32, default=-1.0)
    rb.columns.add("flag", sql="next.terminated AND _step > 3", default=False)
    rb.columns.add("list", sql="[action, _id]", default=torch.tensor([7, 8]))
    extend(rb, rows(20, 400))
    found = whole(rb)
    old, new = found[:-20], found[-20:]
    if rb.kind != "grid":
        assert (old["late"] == 2 * old["observation"][:, 0] + 10).all()
        assert old["flag"].tolist() == old["next", "terminated"].reshape(-1).tolist()
    assert (old["list"][:, 0] == old["action"]).all()
    assert (rb.kind == "grid") == bool((old["list"][:, 1] != old["action"] + 1).any())
    assert (new["late"] == -1).all()
    assert (new["list"] == torch.tensor([7, 8])).all()
    answer = rb.sql("SELECT count(*), sum(late) FROM transitions").fetchall()
    assert answer == [(len(found), float(found["late"].double().sum()))]


@pytest.mark.some(4)
def test_rows_that_come_and_change_meanwhile(rb: TensorDictReplayBuffer) -> None:
    """What comes while values are computed gets them, and what is changed then has those of its new rows."""
    acts: list[Callable[[], Any]] = [
        lambda: extend(rb, rows(20, 400)),
        lambda: rb.set_at_("action", torch.tensor(-5), (2, 0) if rb.kind == "grid" else 50),
    ]

    def compute(batch: TensorDict) -> torch.Tensor:
        while acts:
            thread = threading.Thread(target=acts.pop(0))
            thread.start()
            thread.join()
        return batch["action"] * 3

    rb.columns.add("late", function=compute, dtype="int64", shape=())
    found = whole(rb)
    assert not acts
    assert (found["action"] == -5).sum() == 1
    assert (found["late"] == 3 * found["action"]).all()
    assert int(found["action"].max()) == 419


def test_after_another_opening(store_path: Path) -> None:
    with in_folder(store_path, 100) as rb:
        rb.extend(rows(130))
        rb.columns.add(
            "late",
            fill=torch.tensor([1, 2], dtype=torch.int16),
            default=torch.tensor([3, 4], dtype=torch.int16),
        )
        rb.columns.add(("deep", "er", "late"), function=lambda batch: batch["action"].bool())
        rb.columns.drop("action")
        rb.extend(
            rows(10, 130)
            .exclude("action")
            .update({"deep": {"er": {"late": torch.ones(10, dtype=torch.bool)}}})
        )
        wanted = rb[:]
        columns = {p.relative_to(store_path).as_posix() for p in (store_path / "columns").rglob("zarr.json")}
        assert "columns/deep/er/zarr.json" in columns
        assert "columns/action/zarr.json" not in columns
    assert verify(store_path) == []
    with in_folder(store_path, 100) as rb:
        assert rb.recovered is None
        assert (rb[:] == wanted).all()
        assert (rb["late"] == torch.tensor([3, 4])).all(1).sum() == 10
        assert rb["late"][0].dtype == torch.int16
        rb.columns.drop(("deep", "er", "late"))
        assert not (store_path / "columns" / "deep").exists()
        rb.columns.add("deep", fill=0)
    assert verify(store_path) == []
    assert Manifest.load(Disk(), store_path).column_set == 5


@pytest.mark.guarantee("kill/fields")
def test_other_columns_are_not_touched(store_path: Path) -> None:
    """Their files keep name, inode, bytes and times."""

    def files() -> dict[str, tuple[int, int, int, bytes]]:
        found = {}
        for path in sorted((store_path / "columns").rglob("*")):
            if path.is_file() and "late" not in path.parts:
                status = path.stat()
                found[str(path)] = status.st_ino, status.st_mtime_ns, status.st_size, path.read_bytes()
        return found

    with in_folder(store_path, 5000) as rb:
        rb.extend(rows(6000))
        rb.flush()
        before = files()
        rb.columns.add("late", fill=1.0)
        assert files() == before
        rb.columns.drop("late")
        assert files() == before


@pytest.mark.guarantee("kill/fields")
def test_sums_of_other_columns_stay(store_path: Path) -> None:
    """A flipped bit is found afterwards: sums were not taken anew."""
    with in_folder(store_path, None) as rb:
        rb.extend(rows(9000))
        rb.flush()
        (shard,) = (store_path / "columns" / "action").rglob("c/*")
        with shard.open("r+b") as file:
            file.seek(8 * 4321)
            file.write(b"\x55")
        rb.columns.add("late", fill=1.0)
        rb.columns.add("later", fill=1.0)
        rb.columns.drop("late")
    found = verify(store_path)
    assert [finding.kind for finding in found] == ["checksum"] or found, found
    assert any("action" in finding.message for finding in found)
    assert not any("later" in finding.message for finding in found)


def test_the_best_rows(store_path: Path) -> None:
    writer = TensorDictMaxValueWriter("observation", "max")
    with expstore.open(store_path, capacity=50, batch_size=8, writer=writer) as rb:
        rb.extend(rows(60))
        rb.columns.add("late", function=lambda batch: batch["action"], default=-1)
        rb.extend(rows(20, 60))
        found = rb[:]
        assert sorted(found["action"].tolist()) == list(range(30, 80))
        assert (found["late"] == torch.where(found["action"] < 60, found["action"], -1)).all()
        with pytest.raises(StateError, match="rows are ranked by 'observation'"):
            rb.columns.drop("observation")
    assert verify(store_path) == []


def test_changed_in_place(store_path: Path) -> None:
    with in_folder(store_path, 100) as rb:
        rb.extend(rows(120))
        rb.columns.add("late", fill=1)
        rb.set_at_("late", torch.tensor([5, 6]), [0, 1])
        assert rb["late"][:3].tolist() == [5, 6, 1]
        rb[0] = rows(1, 900)[0]
        assert (int(rb[0]["late"]), int(rb[0]["action"])) == (5, 900)  # what it lacks stays
        rb[1] = rows(1, 901, late=torch.tensor([9]))[0]
        assert (int(rb[1]["late"]), int(rb[1]["action"])) == (9, 901)
        with pytest.raises(SchemaError, match="lacks 'action'"):
            rb[2] = rows(1, 902).exclude("action")[0]


def test_batches_that_were_taken_before(store_path: Path) -> None:
    """A batch that another thread had looked at before the fields changed is arranged anew."""
    with in_folder(store_path, 100) as rb:
        rb.extend(rows(20))
        rb.extend(rows(20, 20))
        ingest = rb._ingest
        early, late = (ingest._to_batch(rb.storage, rows(20, at), single=False) for at in (40, 60))
        assert early is not None
        assert early.arranged is not None
        rb.columns.add("late", fill=4)
        ingest._write(rb.storage, early, ingest.options())
        assert rb["late"][40:60].tolist() == [4] * 20
        rb.columns.drop("action")
        assert late is not None
        with pytest.raises(SchemaError, match="unknown 'action'"):
            ingest._write(rb.storage, late, ingest.options())
        assert len(rb) == 60


@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True])
def test_places_that_move_under_a_reader(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """Whoever has found out where fields are, or has read them, before one goes, does so again."""
    kept: Any = MemoryStorage(100) if memory else ZarrStorage(store_path, 100)
    with TensorDictReplayBuffer(storage=kept, batch_size=16) as rb:
        rb.extend(rows(60))
        acts: list[Callable[[], None]] = []

        def before(name: str) -> None:
            """Let a field come or go before the next call of a method, once."""
            method = getattr(kept, name)

            def call(*given: Any) -> Any:
                if acts:
                    acts.pop()()
                return method(*given)

            monkeypatch.setattr(kept, name, call)

        def whole_rows(batch: TensorDict) -> bool:
            return bool((batch["late"] == 3 * batch["action"]).all())

        looks: list[Callable[[], bool]] = [
            lambda: rb["late"].tolist() == list(range(0, 180, 3)),
            lambda: whole_rows(rb[:]),
            lambda: whole_rows(rb.sample()),
            lambda: rb.sql("SELECT sum(late), max(_id) FROM transitions").fetchall() == [(5310, 60)],
        ]
        for name in ("read", "intact", "views"):
            before(name)
            for look in looks:
                rb.columns.add("front", fill=1)
                rb.columns.add("late", function=lambda batch: 3 * batch["action"])
                for act in (
                    lambda: rb.columns.drop("front"),  # and what lies behind it has another place
                    lambda: rb.columns.add("front", fill=1),  # likewise ids, episodes, steps
                ):
                    acts.append(act)
                    assert look()
                    while acts:
                        acts.pop()()
                rb.columns.drop("late")
                rb.columns.drop("front")


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rb", ["ring", "memory"], indirect=True)
def test_invalid_columns_are_not_added(rb: TensorDictReplayBuffer) -> None:
    before, schema = whole(rb), rb.schema
    late: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (SchemaError, "there is a field 'action' already", {"name": "action", "fill": 1}),
        (SchemaError, "both a field and a group", {"name": ("action", "x"), "fill": 1}),
        (SchemaError, "one name on some disks", {"name": "Action", "fill": 1}),
        (SchemaError, "cannot be a path", {"name": "a/b", "fill": 1}),
        (SchemaError, "has no values", {"name": "x", "fill": torch.zeros(0)}),
        (SchemaError, "must have a fixed size", {"name": "x", "fill": None, "dtype": "object"}),
        (SchemaError, "a field cannot have dtype", {"name": "x", "fill": 1, "dtype": "int128"}),
        (SchemaError, "which may lose values|dtype mismatch", {"name": "x", "fill": 1.5, "dtype": "int8"}),
        (SchemaError, "does not fit", {"name": "x", "fill": torch.ones(3), "shape": (2,)}),
        (
            SchemaError,
            "would mark trajectories, ends or rewards",
            {"name": ("next", "truncated"), "fill": False},
        ),
        (SchemaError, "values of shape", {"name": "x", "function": lambda batch: torch.zeros(3)}),
        (SchemaError, "returned a list", {"name": "x", "function": lambda batch: [1]}),
        (SchemaError, "expected", {"name": "x", "function": lambda b: b["observation"], "shape": 2}),
        (QueryError, "not an SQL expression", {"name": "x", "sql": "1 +"}),
        (QueryError, "the fields are", {"name": "x", "sql": "nothing + 1"}),
        (QueryError, "is NULL for the row", {"name": "x", "sql": "CASE WHEN action > 350 THEN 1 END"}),
        (QueryError, "which a field cannot have", {"name": "x", "sql": "'text'"}),
        (
            QueryError,
            "values that int8 cannot represent",
            {"name": "x", "sql": "action * 1000", "dtype": "int8"},
        ),
        (SchemaError, "cannot hold 1e\\+300", {"name": "x", "fill": 1e300}),
        (SchemaError, "cannot hold 1e\\+300", {"name": "x", "fill": 0.0, "default": 1e300}),
        (
            QueryError,
            "values that float32 cannot represent: 1e\\+300",
            {"name": "x", "sql": "1e300", "dtype": "float32"},
        ),
        (
            QueryError,
            "values that float64 cannot represent: 9007199254740993",
            {"name": "x", "sql": "9007199254740993", "dtype": "float64"},
        ),
        (TypeError, "one of fill=, function= and sql=", {"name": "x"}),
        (TypeError, "one of fill=, function= and sql=", {"name": "x", "fill": 1, "sql": "1"}),
    ]
    for kind, text, asked in late:
        asked = dict(asked)
        with pytest.raises(kind, match=text):
            rb.columns.add(asked.pop("name"), **asked)
    assert rb.schema is schema
    assert (whole(rb) == before).all()
    extend(rb, rows(20, 400))


def test_a_function_that_fails_leaves_nothing(store_path: Path) -> None:
    with in_folder(store_path, 100) as rb:
        rb.extend(rows(90))
        files = sorted(p.name for p in store_path.iterdir())
        calls = []

        def fail(batch: TensorDict) -> torch.Tensor:
            calls.append(1)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rb.columns.add("late", function=fail, dtype="int64", shape=())
        assert calls
        assert sorted(p.name for p in store_path.iterdir()) == files
        rb.columns.add("late", fill=1)

        def nested(batch: TensorDict) -> torch.Tensor:
            rb.columns.add("inside", fill=1)
            return batch["action"]

        with pytest.raises(StateError, match="already adding or dropping a field"):
            rb.columns.add("other", function=nested, dtype="int64", shape=())


def test_required_fields_cannot_be_dropped(store_path: Path) -> None:
    sampler = RandomSampler(where="observation[1] >= 0")
    with expstore.open(store_path, capacity=100, batch_size=4, sampler=sampler) as rb:
        rb.extend(rows(50))
        for name, text in (
            ("nothing", "no field 'nothing'"),
            (("next", "terminated"), "for episodes: it cannot be dropped"),
            (("next", "reward"), "for episodes: it cannot be dropped"),
            ("observation", "the sampler's filter"),
        ):
            with pytest.raises(SchemaError, match=text):
                rb.columns.drop(name)
        rb.set_sampler(SliceSampler(slice_len=2, traj_key="action"))
        with pytest.raises(SchemaError, match="'action' cannot be dropped: the sampler"):
            rb.columns.drop("action")
        rb.set_sampler(RandomSampler())
        rb.columns.drop("action")
        rb.columns.drop("observation")
        assert verify_open(rb) == 2


def verify_open(rb: TensorDictReplayBuffer) -> int:
    assert rb.schema is not None
    return len(rb.schema.fields)


def test_stores_that_have_no_field_to_spare() -> None:
    objects = ReplayBuffer(storage=ListStorage(10))
    objects.extend(["a", "b"])
    with pytest.raises(StateError, match="ListStorage stores rows as objects"):
        objects.columns.add("x", fill=1)
    tensors = ReplayBuffer(storage=MemoryStorage(10))
    tensors.extend(torch.zeros(4, 2))
    with pytest.raises(SchemaError, match="rows of this store are not TensorDicts"):
        tensors.columns.add("x", fill=1)
    rb = TensorDictReplayBuffer(storage=MemoryStorage(10))
    with pytest.raises(StateError, match="no fields yet"):
        rb.columns.add("x", fill=1)
    rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError, match="only field"):
        rb.columns.drop("a")


def test_a_name_that_is_taken_on_the_disk(store_path: Path) -> None:
    with in_folder(store_path, 100) as rb:
        rb.extend(rows(50))
        (store_path / "columns" / "mine").mkdir()
        with pytest.raises(StateError, match="mine is in the way"):
            rb.columns.add("mine", fill=1)
        assert (store_path / "columns" / "mine").is_dir()
        rb.columns.add("other", fill=1)
        rb.extend(rows(10, 50))


def test_specs(store_path: Path) -> None:
    specs = Composite(action=Unbounded((), dtype=torch.int64))
    with expstore.open(store_path, capacity=100, schema=specs, batch_size=4) as rb:
        rb.extend(rows(50))
        for fill in (1, 0.5, True):
            rb.columns.add("any", fill=fill)
            assert rb.specs is not None
            assert rb.specs["any"] == Unbounded((), dtype=rb[:]["any"].dtype)
            rb.columns.drop("any")
        with pytest.raises(SchemaError, match="the specs say"):
            rb.columns.add("late", fill=1.0, shape=(), spec=Unbounded((2,)))
        rb.columns.add("late", fill=True, spec=Binary(shape=(), dtype=torch.bool))
        rb.columns.add(("more", "late"), sql="action", spec=Unbounded((1,)))
        assert rb["more", "late"].shape == (50, 1)
        assert rb.specs is not None
        assert set(rb.specs.keys(True, True)) == {"action", "late", ("more", "late")}
        rb.columns.drop("late")
        rb.columns.drop(("more", "late"))
        assert set(rb.specs.keys(True, True)) == {"action"}
    with expstore.open(store_path, mode="r") as rb:
        assert rb.specs is not None
        assert set(rb.specs.keys(True, True)) == {"action"}


# -- versions ------------------------------------------------------------------------------------------------


def shards(version: Path) -> dict[str, int]:
    """Return the inode of every shard of a version, by its name in the columns."""
    columns = version / "columns"
    return {p.relative_to(columns).as_posix(): p.stat().st_ino for p in columns.rglob("c.*") if p.is_file()}


def test_damaged_entries_stay_damaged(store_path: Path) -> None:
    with in_folder(store_path, None) as rb:
        rb.extend(rows(9000))
    with (store_path / CHECKSUMS).open("r+b") as file:
        file.seek(4096 + 20)
        file.write(b"\xff\xff")
    kept = ZarrStorage(store_path)
    assert kept.state.columns is not None
    sums = kept.state.checksums
    assert isinstance(sums, Checksums)
    places = list(range(len(kept.state.columns.columns) - 1))
    same = sums.rearrange(places)
    assert same[:4096] == (store_path / CHECKSUMS).read_bytes()[:4096]
    states = [state_of(sums.entry(block)) for block in range(3)]
    assert states.count(SUMMED) >= 2
    kept.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", ["flat", "auto"])
def test_versions_share_what_stays(store_path: Path, tmp_path: Path, layout: Any) -> None:
    place = tmp_path / "versions"
    with expstore.open(store_path, capacity=20_000, batch_size=8, layout=layout) as rb:
        wide = torch.arange(9000 * 300).reshape(9000, 300).float()
        rb.extend(rows(9000, wide=wide))
        first = rb.dumps(place)
        rb.columns.add("late", fill=1.0)
        rb.columns.add("later", function=lambda batch: batch["action"])
        second = rb.dumps(place)
        rb.columns.drop("action")
        third = rb.dumps(place)
        rb.set_at_("late", torch.tensor(5.0), [8500])
        fourth = rb.dumps(place)
        wanted = rb[:]
    one, two, three, four = (shards(version.path) for version in (first, second, third, fourth))
    assert {name: two[name] for name in one} == one
    assert {name for name in two if name not in one} == {"late/c.0", "late/c.1", "later/c.0", "later/c.1"}
    assert {name: two[name] for name in three} == three
    assert {name.split("/")[0] for name in two.keys() - three.keys()} == {"action"}
    changed = {name for name in four if four[name] != three[name]}
    assert "late/c.1" in changed
    assert not any(name.endswith(("c.0", "c.0.0")) for name in changed)  # row 8500 lies in the second shards
    for version in (first, second, third, fourth):
        assert verify(version.path) == []
    with expstore.open(place, version=4) as rb:
        assert (rb[:] == wanted).all()
    with expstore.open(place, version=1) as rb:
        assert rb.schema is not None
        assert [field.key[-1] for field in rb.schema.fields][-1] == "wide"


# -- followers -----------------------------------------------------------------------------------------------


def test_versions_of_other_fields_are_loaded_only_by_their_own_store(
    store_path: Path, tmp_path: Path
) -> None:
    with in_folder(store_path, 200) as rb:
        rb.extend(rows(150))
        rb.dumps(tmp_path / "versions")
        rb.columns.add("late", fill=7)
        rb.columns.drop("action")
        rb.loads(tmp_path / "versions")
        assert rb[:]["action"].tolist() == list(range(150))
    with in_folder(tmp_path / "other", 200) as rb:
        rb.extend(rows(20, late=torch.ones(20)))
        with pytest.raises(SchemaError, match="has other fields"):
            rb.loads(tmp_path / "versions")


def test_followers_see_other_fields(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows_in_memory(monkeypatch)
    with (
        in_folder(store_path, 200) as rb,
        expstore.open(store_path, mode="r", batch_size=8, seed=4) as seen,
        expstore.open(
            store_path, mode="r", batch_size=8, sampler=RandomSampler(where="observation[1] > 3")
        ) as picky,
    ):
        rb.extend(rows(100))
        assert len(seen.sample().keys()) == len(picky.sample().keys())
        rb.columns.add("late", function=lambda batch: batch["action"] * 2)
        for reader in (seen, picky):
            batch = reader.sample()
            assert (batch["late"] == 2 * batch["action"]).all()
            reader.refresh()
            assert reader.schema == rb.schema
            assert reader.sql("SELECT sum(late) FROM transitions").fetchall() == [(9900,)]
        assert (seen["late"] == 2 * seen["action"]).all()
        rb.columns.drop("action")
        rb.extend(rows(20, 100, late=torch.arange(20)).exclude("action"))
        for reader in (seen, picky):
            reader.refresh()
            batch = reader.sample()
            assert "action" not in batch.keys()  # noqa: SIM118 - no dict
            assert batch["late"].shape == (8,)
            assert len(reader) == 120
        assert seen.episodes().fetchall() == rb.episodes().fetchall()
        for act in (lambda: seen.columns.add("x", fill=1), lambda: seen.columns.drop("late")):
            with pytest.raises(StateError, match="open for reading only"):
                act()
        rb.columns.drop("observation")
        with pytest.raises(QueryError, match="the fields are"):
            picky.refresh()
        assert seen.sample()["late"].shape == (8,)
    with expstore.open(store_path, mode="r", batch_size=8) as seen:  # nobody writes
        assert (seen["late"][:100] == 2 * torch.arange(100)).all()


# -- a kill in the middle ------------------------------------------------------------------------------------


def kill_before(moment: str) -> None:
    """End this process where the change begins, where it is committed, or where the rest of it begins."""
    move = swap._move

    def move_others(disk: Disk, names: list[tuple[Path, Path]]) -> None:
        if any(new.name == MANIFEST for _, new in names):
            os._exit(0)
        move(disk, names)

    if moment == "begin":
        swap.Swap.commit = lambda *given: os._exit(0)  # type: ignore[method-assign]
    elif moment == "commit":
        swap._move = move_others  # type: ignore[assignment]
    else:
        alter.finish_swap = lambda *given: os._exit(0)


@pytest.mark.some(2)
@pytest.mark.parametrize("act", ["add", "drop"])
@pytest.mark.parametrize("moment", ["begin", "commit", "finish"])
def test_killed_before_a_part_of_the_act(store_path: Path, act: str, moment: str) -> None:
    """What is left is checked and read as it stands; the next opening ends the act or takes it back."""
    with in_folder(store_path, 5000) as rb:
        rb.extend(rows(4500))
        rb.columns.add("early", fill=1)
    pid = os.fork()
    if not pid:
        kill_before(moment)
        rb = in_folder(store_path, 5000)
        rb.extend(rows(20, 4500))
        if act == "add":
            rb.columns.add("late", fill=2.5)
        else:
            rb.columns.drop("early")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    done = moment == "finish"
    fields = {"add": {"early", "late"} if done else {"early"}, "drop": set() if done else {"early"}}[act]
    assert (store_path / "swap").exists() == (moment != "begin")
    assert verify(store_path) == []
    for mode in ("r", "a", "r"):
        with expstore.open(store_path, mode=mode, batch_size=8) as rb:  # type: ignore[arg-type]
            assert rb.schema is not None
            assert {field.key[0] for field in rb.schema.fields} - {"observation", "action", "next"} == fields
            assert len(rb) == 4520
            assert rb["action"].tolist() == list(range(4520))
            assert all((rb[name] == {"early": 1, "late": 2.5}[name]).all() for name in fields)
    assert verify(store_path) == []
    left = {path.name for path in (store_path / "columns").iterdir()} - {"_row", "zarr.json"}
    assert left == fields | {"observation", "action", "next"}
    assert not [path.name for path in store_path.iterdir() if path.name.startswith("swap")]


def test_a_damaged_list_is_damage(store_path: Path) -> None:
    with in_folder(store_path, 100) as rb:
        rb.extend(rows(20))
    (store_path / "swap").mkdir()
    (store_path / "swap" / "list").write_bytes(b'{"swap": {"added": []}, "crc32c": 1}')
    with pytest.raises(CorruptionError, match="list is damaged"):
        in_folder(store_path, 100)
