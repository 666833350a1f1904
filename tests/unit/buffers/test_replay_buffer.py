"""Replay buffers from the user's view: TensorDicts in and out, on both storages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.core.values import Selection
from expstore.disk import files
from expstore.errors import (
    NotFoundError,
    NotReadyError,
    PriorityError,
    SchemaError,
    StateError,
    StorageError,
)
from expstore.samplers import RandomSampler, Sampler
from expstore.storages.factory import ZarrStorage
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.batches import buffer_factory

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Make = Callable[..., TensorDictReplayBuffer]


@pytest.fixture(params=["memory", "zarr"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A factory of buffers of transitions over both kinds of storage."""
    with buffer_factory(request.param, tmp_path) as factory:
        yield factory


def rows(ids: Any, **more: torch.Tensor) -> TensorDict:
    """Rows that follow from their ids."""
    n = torch.as_tensor(ids, dtype=torch.int64)
    return TensorDict(
        {
            "observation": n[..., None] * torch.tensor([1.0, 0.5, -1.0]),
            "action": n % 5,
            "next": {"reward": n[..., None].double(), "terminated": (n % 10 == 0)[..., None]},
            **more,
        },
        n.shape,
    )


def plain(data: TensorDict) -> TensorDict:
    """Without what a sample says of itself."""
    return data.exclude("index", "id")


def same(found: TensorDict, expected: TensorDict) -> None:
    assert found.batch_size == expected.batch_size
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert found[key].dtype is expected[key].dtype
        assert torch.equal(found[key], expected[key]), key


# ---------------------------------------------------------------------------------------------------
# In and out.


def test_extend_add_sample_len(make: Make) -> None:
    rb = make(100, batch_size=16)
    assert len(rb) == 0
    assert rb.extend(rows(range(1, 61))).tolist() == list(range(60))
    assert rb.add(rows(61)) == 60
    assert rb.extend(rows([62, 63]), return_ids=True).tolist() == [62, 63]
    assert (len(rb), rb.write_count) == (63, 63)
    batch = rb.sample()
    assert batch.batch_size == torch.Size([16])
    assert batch["id"].dtype is batch["index"].dtype is torch.int64
    assert torch.equal(batch["index"], batch["id"] - 1)
    same(plain(batch), rows(batch["id"]))
    assert rb.sample(5).batch_size == torch.Size([5])
    for batch in itertools.islice(rb, 3):
        same(plain(batch), rows(batch["id"]))


def test_samples_own_their_memory(make: Make) -> None:
    rb = make(30, batch_size=30)
    wide = torch.arange(30)[:, None].expand(30, 1000).float()
    data = rows(range(1, 31), wide=wide)
    rb.extend(data)
    before = rb[:]
    for batch in (rb.sample(), rb[:], rb[3], rb["next"]):
        for value in batch.values(True, True):
            value.fill_(77 if value.dtype is not torch.bool else True)
    for field in (rb["wide"], rb["next", "reward"]):
        field.fill_(77)
    data["observation"].fill_(55)
    same(rb[:], before)
    batch = rb.sample()
    kept = batch.clone()
    for start in range(31, 200, 10):
        rb.extend(rows(range(start, start + 10), wide=torch.zeros(10, 1000)))
    same(batch, kept)


def test_own_keys_of_samples_are_not_taken_in_again(make: Make) -> None:
    rb, other = make(100, batch_size=8), make(100)
    rb.extend(rows(range(1, 50)))
    batch = rb.sample()
    batch["priority_weight"] = torch.ones(8)
    other.extend(batch)
    other.add(batch[0])
    other[3] = batch[4]
    same(other[:7], plain(batch)[[0, 1, 2, 4, 4, 5, 6]].exclude("priority_weight"))


def test_a_device_is_where_batches_go(make: Make) -> None:
    rb = make(10, batch_size=4, device="meta")
    rb.extend(rows(range(1, 5)))
    for found in (rb.sample()["observation"], rb[0]["observation"], rb["observation"]):
        assert found.device.type == "meta"


# ---------------------------------------------------------------------------------------------------
# By index.


@pytest.fixture
def turned(make: Make) -> TensorDictReplayBuffer:
    """A ring of 10 that holds ids 14 to 23: index 0 is id 21."""
    rb = make(10)
    rb.extend(rows(range(1, 11)))
    rb.extend(rows(range(11, 24)))
    return rb


BY_INDEX = [21, 22, 23, 14, 15, 16, 17, 18, 19, 20]


def by_index(index: Any) -> np.ndarray:
    """What NumPy finds."""
    plain_index = index.numpy() if isinstance(index, torch.Tensor) else index
    return np.array(BY_INDEX)[slice(0) if isinstance(index, list) and not index else plain_index]


INDICES: list[Any] = [
    *(0, 9, -1, -10, np.int64(3), torch.tensor(3)),
    *(slice(None), slice(2, 8, 3), slice(None, None, -1), slice(5, 2)),
    *([1, 1, -1], [], np.array([0, 3, 9, 4]), np.array([4], np.uint8), torch.tensor([5, 0])),
    *(torch.arange(10) % 3 == 1, np.arange(10) > 7, [True, False] * 5),
]


def test_rows_are_found_by_index(turned: TensorDictReplayBuffer) -> None:
    for index in INDICES:
        same(turned[index], rows(torch.tensor(by_index(index).tolist(), dtype=torch.int64)))


def test_a_missing_index_is_refused(turned: TensorDictReplayBuffer) -> None:
    for index in (10, -11, [0, 10], torch.tensor([-11]), 2**40):
        with pytest.raises(NotFoundError, match=r"no row with index -?\d+: the store holds 10 rows"):
            turned[index]
        with pytest.raises(NotFoundError):
            turned[index] = rows([0] * len(index)) if np.ndim(index) else rows(0)
    with pytest.raises(TypeError):
        turned[[0.5]]
    with pytest.raises(NotFoundError, match=r"the mask has shape \(3,\), the store 10 rows"):
        turned[[True, False, True]]
    assert turned["action"].tolist() == [i % 5 for i in BY_INDEX]


def test_fields_are_found_by_key(turned: TensorDictReplayBuffer) -> None:
    expected = rows(BY_INDEX)
    assert torch.equal(turned["observation"], expected["observation"])
    assert torch.equal(turned["next", "reward"], expected["next", "reward"])
    same(turned["next"], expected["next"])
    for key in ("nothing", ("next", "nothing"), ("observation", "x")):
        with pytest.raises(NotFoundError, match="no field .*the store has Schema"):
            turned[key]


def test_rows_can_be_replaced(turned: TensorDictReplayBuffer) -> None:
    expected = list(BY_INDEX)

    def put(index: Any, ids: Any) -> None:
        turned[index] = rows(ids)
        places = np.arange(10)[index.numpy() if isinstance(index, torch.Tensor) else index]
        for place, id in zip(np.atleast_1d(places), np.atleast_1d(ids), strict=True):
            expected[place] = int(id)
        same(turned[:], rows(expected))

    put(3, 100)
    put(-1, 101)
    put(slice(2, 5), [102, 103, 104])
    put([9, 0, 4], [105, 106, 107])
    put(torch.arange(10) % 4 == 0, [108, 109, 110])
    put([5, 5, 5, 2], [111, 112, 113, 114])  # the last one counts
    put([], [])
    turned[torch.tensor([1])] = rows([115])
    assert turned[1]["action"] == 0
    assert len(turned) == 10
    assert turned.write_count == 23


def test_replacing_what_does_not_fit_changes_nothing(turned: TensorDictReplayBuffer) -> None:
    before = turned[:]
    with pytest.raises(SchemaError, match="cannot replace 2 rows by 3"):
        turned[:2] = rows([1, 2, 3])
    with pytest.raises(SchemaError, match="lacks 'observation'"):
        turned[:2] = rows([1, 2]).exclude("observation")
    with pytest.raises(SchemaError, match=r"'action': expected int64\[\], got int64\[1\]"):
        turned[:2] = rows([1, 2]).set("action", torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(SchemaError):
        turned[0] = rows([1])
    same(turned[:], before)


def test_rows_that_are_refused_do_not_fix_the_fields(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", episodes=expstore.EpisodeKeys(traj="run")) as rb:
        with pytest.raises(SchemaError, match="trajectory id in 'run' is 0.5"):
            rb.extend(rows([0, 1, 2], run=torch.arange(3) + 0.5))
        assert rb.storage.schema is None
        rb.extend(rows([0, 1, 2], run=torch.arange(3)))
        assert rb.storage.require_schema()["run",].dtype == "int64"


# ---------------------------------------------------------------------------------------------------
# Priorities.


def priorities(rb: TensorDictReplayBuffer) -> dict[int, float]:
    return dict(rb.sql("SELECT id, priority FROM priorities").fetchall())


def test_priorities_by_index_and_by_id(turned: TensorDictReplayBuffer) -> None:
    assert turned.update_priority([0, 9], torch.tensor([2.0, 3.0])) == 2
    assert turned.update_priority(3, 4.0) == 1
    assert turned.update_priority(id=torch.tensor([15, 3, 99, 16]), priority=[5.0, 6.0, 7.0, 8.0]) == 2
    assert turned.update_priority(id=[17, 18], priority=0.0) == 2
    assert turned.update_priority(id=[1, 2], priority=[1.0, 1.0]) == 0
    assert turned.update_priority(id=[], priority=[]) == 0
    expected = dict.fromkeys(range(14, 24), 1.0) | {21: 2, 20: 3, 14: 4, 15: 5, 16: 8, 17: 0, 18: 0}
    assert priorities(turned) == expected


def test_wrong_priorities_change_nothing(turned: TensorDictReplayBuffer) -> None:
    for bad in (-1e-30, float("nan"), float("inf"), 1e300):
        for given in ({"index": [0, 1]}, {"id": [14, 15]}, {"id": [1, 2]}):
            with pytest.raises(PriorityError):
                turned.update_priority(**given, priority=[9.0, bad])
    with pytest.raises(NotFoundError, match="no row with index 10"):
        turned.update_priority([0, 10], [1.0, 2.0])
    with pytest.raises(SchemaError, match="got 2 priorities for 3 rows"):
        turned.update_priority([0, 1, 2], [1.0, 2.0])
    for options in ({}, {"index": [0]}, {"index": [0], "id": [1], "priority": 1.0}, {"priority": 1.0}):
        with pytest.raises(TypeError, match="takes a priority and either index or id"):
            turned.update_priority(**options)
    turned.extend(rows([24]))  # gets the largest priority so far
    assert set(priorities(turned).values()) == {1.0}


def test_a_sample_brings_its_priorities(turned: TensorDictReplayBuffer) -> None:
    batch = turned.sample(6)
    assert turned.update_tensordict_priority(batch) == 0  # nothing draws by priority
    batch["td_error"] = batch["id"][:, None].float()
    assert turned.update_tensordict_priority(batch) == 6
    drawn = set(batch["id"].tolist())
    assert priorities(turned) == {id: float(id) if id in drawn else 1.0 for id in range(14, 24)}
    turned.extend(rows(range(24, 34)))  # all of them have left
    assert turned.update_tensordict_priority(batch) == 0


# ---------------------------------------------------------------------------------------------------
# Episodes, through SQL.


def episodes(rb: TensorDictReplayBuffer) -> list[tuple[Any, ...]]:
    names = 'episode_id, source, trajectory_id, length, "return", status, live_rows'
    return rb.sql(f"SELECT {names} FROM episodes ORDER BY 1").fetchall()


def steps_by_row(rb: TensorDictReplayBuffer) -> list[tuple[int, int]]:
    return rb.sql("SELECT _episode, _step FROM transitions ORDER BY _id").fetchall()


def flags(ends: str, shape: tuple[int, ...], names: list[str] | None = None, **more: Any) -> TensorDict:
    """One letter per row: t terminated, T truncated, anything else goes on."""
    letters = np.array(list(ends)).reshape(shape)
    return TensorDict(
        {
            "next": {
                "reward": torch.ones(shape),
                "terminated": torch.from_numpy(letters == "t"),
                "truncated": torch.from_numpy(letters == "T"),
            },
            **more,
        },
        shape,
        names=names,
    )


def test_dropped_rows(make: Make) -> None:
    rb = make(100)
    mask = torch.tensor([[True, True, False, False], [True, False, True, True]])
    ids = torch.tensor([[7, 7, 7, 7], [8, 8, -1, 8]])
    data = flags(
        "........", (2, 4), collector={"traj_ids": ids, "mask": mask}, number=torch.arange(8).reshape(2, 4)
    )
    assert rb.extend(data).tolist() == [0, 1, -1, -1, 2, -1, -1, 3]
    assert rb["number"].tolist() == [0, 1, 4, 7]
    assert steps_by_row(rb) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    mask[:] = False
    assert rb.extend(data, return_ids=True).tolist() == [-1] * 8
    assert rb.add(data[0, 0]) == -1
    assert rb.extend(data[:, :0]).shape == (0,)
    assert len(rb) == 4


# ---------------------------------------------------------------------------------------------------
# Draws.


def test_a_draw_meets_rows_that_were_overwritten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn again, and after some tries with the writer waiting."""
    rb = make(20, batch_size=8)
    rb.extend(rows(range(1, 21)))
    real, asked = rb.storage.intact, []

    def spoiled(ids: np.ndarray) -> bool:
        asked.append(ids.tolist())
        return len(asked) > 3 and real(ids)

    monkeypatch.setattr(rb.storage, "intact", spoiled)
    batch = rb.sample()
    assert len(asked) == 4
    assert len({tuple(ids) for ids in asked}) == 4
    assert batch["id"].tolist() == asked[-1]
    assert rb.stats()["redraws"] == 3


class Rigged(Sampler):
    """Draw what a test says, with weights."""

    ids = np.array([1])

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def sample(self, storage: Any, batch_size: int, generator: np.random.Generator) -> Selection:
        return Selection(self.ids)

    def on_write(self, written: Any) -> None:
        self.written.append(written.tolist())


def test_a_sampler_is_notified_of_writes(make: Make) -> None:
    sampler = Rigged()
    rb = make(20, batch_size=1, sampler=sampler)
    rb.extend(rows([1, 2, 3]))
    rb.add(rows(4))
    with pytest.raises(SchemaError):
        rb.extend(rows([5]).exclude("action"))
    assert sampler.written == [[1, 2, 3], [4]]
    Rigged.ids = np.array([4, 4, 2])
    same(plain(rb.sample()), rows([4, 4, 2]))


# ---------------------------------------------------------------------------------------------------
# Bad input: said clearly, nothing changed.


def test_refused_calls_change_nothing(make: Make) -> None:
    rb = make(20, batch_size=4)
    rb.extend(rows(range(1, 8)))
    before, table = rb[:], rb.storage.episodes.to_base()
    for data, message in [
        (rows([8]).exclude("action"), "the batch lacks 'action'; the store has Schema"),
        (rows([8], extra=torch.zeros(1)), "has unknown 'extra'"),
        (rows([8]).exclude(("next", "reward")), "lacks 'next.reward'"),
        (
            rows([8]).set("observation", torch.zeros(1, 4)),
            r"'observation': expected float32\[3\], got float32\[4\]",
        ),
        (
            rows([8]).set("action", torch.zeros(1)),
            r"'action': expected int64\[\], got float32, which may lose",
        ),
        (rows(8), r"without batch dims; use add\(\)"),
        ({"observation": torch.zeros(1, 3)}, "lacks 'action', 'next.reward'"),
        (("text",), "only accepts TensorDictBase subclasses, dicts of arrays and Arrow tables, got tuple"),
        (
            rows([8]).set("action", TensorDict({"a": torch.zeros(1)}, [1])),
            "lacks 'action' and has unknown 'action.a'",
        ),
    ]:
        with pytest.raises(SchemaError, match=message):
            rb.extend(data)
    with pytest.raises(SchemaError, match=r"add\(\) takes one transition"):
        rb.add(rows([8]))
    same(rb[:], before)
    assert rb.storage.episodes.to_base() == table
    assert rb.write_count == 7
    rb.extend(rows([8]).set("action", torch.zeros(1, dtype=torch.int16)))  # widens without loss
    assert rb["action"][-1] == 0


def test_names_may_have_blanks(store_path: Path) -> None:
    data = TensorDict({"some data": torch.arange(6).reshape(3, 2), ("a b", "c d"): torch.arange(3)}, [3])
    with expstore.open(store_path) as rb:
        rb.extend(data)
        assert rb.sql('SELECT "some data", "a b"."c d" FROM transitions').fetchall()[2] == ([4, 5], 2)
    with expstore.open(store_path, sampler=expstore.RandomSampler(where='"a b"."c d" > 1')) as rb:
        assert rb[:]["some data"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert rb.sample(2)["a b", "c d"].tolist() == [2, 2]


def test_names_that_cannot_be_stored(make: Make) -> None:
    wrong: list[tuple[str, Any, str]] = [
        *(("action", key, "cannot be a path") for key in ("a/b", "..", ("next", ""), " x", "x ")),
        *(("action", key, "reserved name") for key in ("_row", "__x")),
        ("action", "ACTION", "'action' and 'ACTION' have one name on some disks; rename"),
        ("ACTION", ("action", "x"), "'action' is both a field and a group|unknown"),
    ]
    rb = make(20)
    for first, key, message in wrong:
        data = TensorDict({first: torch.zeros(2)}, [2])
        data[key] = torch.zeros(2)
        with pytest.raises(SchemaError, match=message):
            rb.extend(data)
        assert rb.schema is None
    assert rb.extend(rows([1, 2])).tolist() == [0, 1]


def test_nothing_to_sample(make: Make) -> None:
    rb = make(20)
    with pytest.raises(StateError, match="batch_size not specified"):
        rb.sample()
    with pytest.raises(NotReadyError, match="Cannot sample from an empty storage; extend"):
        rb.sample(3)
    assert rb.stats()["draws"] == 0
    with pytest.raises(TypeError, match="batch_size must be an integer, got '4'"):
        ReplayBuffer(batch_size="4")  # type: ignore[arg-type]
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {size}"):
            rb.sample(size)
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {size}"):
            ReplayBuffer(batch_size=size)
    with pytest.raises(NotFoundError, match="no row with index 0: the store holds 0 rows"):
        rb[0]
    with pytest.raises(StateError, match="no rows yet|no fields yet"):
        rb[:]


def test_a_closed_buffer(make: Make) -> None:
    """What `expstore.testing.StorageSuite` does not call."""
    rb = make(20, batch_size=2)
    rb.extend(rows(range(1, 6)))
    with rb as same_one:
        assert same_one is rb
    for act in (
        rb.sample,
        lambda: rb["next"],
        lambda: next(iter(rb)),
        lambda: rb.sql("SELECT 1"),
        lambda: rb.append_transform(lambda batch: batch),
        lambda: rb.insert_transform(0, lambda batch: batch),
    ):
        with pytest.raises(StateError, match=r"the store is closed; open it again with expstore.open\(\)"):
            act()


def test_the_uuid_of_a_store_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path, batch_size=2) as rb:
        uuid = rb.stats()["uuid"]
        rb.extend(rows(range(1, 31)))
        rb.dumps(tmp_path / "versions")
        rb.loads(tmp_path / "versions")
        assert rb.stats()["uuid"] == uuid
    for mode, where in (("a", path), ("r", path), ("r", tmp_path / "versions")):
        with expstore.open(where, mode=mode) as rb:
            assert rb.stats()["uuid"] == uuid
    with expstore.open(tmp_path / "other.exp") as rb:
        assert rb.stats()["uuid"] not in (uuid, None)
    assert ReplayBuffer().stats()["uuid"] is None


def test_a_transform_may_keep_everything_back(make: Make) -> None:
    rb = make(20)
    rb.append_transform(lambda batch: None, invert=True)
    assert rb.extend(rows([1, 2])).tolist() == []
    assert len(rb) == 0


def test_stats_and_repr(make: Make) -> None:
    import json

    rb = make(20, batch_size=2)
    rb.extend(rows(range(1, 31)))
    rb.sample()
    stats = rb.stats()
    assert json.loads(json.dumps(stats)) == stats
    expected = {
        "size": 20,
        "capacity": 20,
        "write_count": 30,
        "write_keys": 0,
        "last_id": 30,
        "draws": 1,
        "extends": 1,
        "batch_size": 2,
    }
    assert stats.items() >= expected.items()
    assert repr(rb) == f"TensorDictReplayBuffer({stats['storage']}, 20 rows, capacity 20, RandomSampler())"
    assert "unbounded" in repr(make())
    assert rb.schema is not None
    assert rb.batch_size == 2
    assert repr(RoundRobinWriter()) == "RoundRobinWriter()"


# ---------------------------------------------------------------------------------------------------
# As with TorchRL's constructors.


def test_a_buffer_built_from_parts(tmp_path: Path) -> None:
    rb = ReplayBuffer(batch_size=4)
    assert isinstance(rb.storage, MemoryStorage)
    assert rb.storage.capacity == 1000
    whole = TensorDict({"a": torch.arange(24.0).reshape(4, 6)}, [4, 6])
    assert rb.extend(whole).tolist() == [0, 1, 2, 3]  # a row is a trajectory of 6
    assert rb.add(whole[0]) == 4
    assert rb[2]["a"].tolist() == whole["a"][2].tolist()
    assert set(rb.sample().keys()) == {"a"}
    other = TensorDictReplayBuffer(
        storage=ZarrStorage(tmp_path / "run.exp", 10),
        sampler=RandomSampler(),
        writer=RoundRobinWriter(),
        batch_size=4,
    )
    other.extend(whole)
    assert set(other.sample().keys()) == {"a", "index"}
    batch = other.sample()
    assert batch.batch_size == batch["index"].shape == (4, 6)
    batch["td_error"] = torch.ones(4, 6)
    assert other.update_tensordict_priority(batch) == 4
    other.close()
    again = expstore.open(tmp_path / "run.exp")  # keeps its rule
    assert again.extend(whole).tolist() == [4, 5, 6, 7]
    assert again[7]["a"].shape == (6,)
    again.close()


def test_keys_by_another_name(tmp_path: Path) -> None:
    keys = expstore.EpisodeKeys(traj="lane", done=["stop"], reward=("gain",))
    data = TensorDict(
        {"lane": torch.tensor([4, 4, 5, 4]), "stop": torch.tensor([0, 1, 0, 0]), "gain": torch.arange(4.0)},
        [4],
    )
    with expstore.open(tmp_path / "run.exp", episodes=keys) as rb:
        rb.extend(data)
        expected = [(1, 4, 2, 1.0, "terminated"), (2, 5, 1, 2.0, "open"), (3, 4, 1, 3.0, "open")]
        query = 'SELECT episode_id, trajectory_id, length, "return", status FROM episodes ORDER BY 1'
        assert rb.sql(query).fetchall() == expected
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(data, source="x")
        assert rb.sql(query).fetchall()[3:] == [(n + 3, *rest) for n, *rest in expected]
    with expstore.open(tmp_path / "other.exp", episodes=keys) as rb:
        with pytest.raises(SchemaError, match="'lane' is not a field with one value per row"):
            rb.extend(data.exclude("lane"))
        assert rb.schema is None


# ---------------------------------------------------------------------------------------------------
# Threads, and interruptions.


def test_readers_while_an_unbounded_store_grows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    rb = make(None, batch_size=64)
    rb.extend(rows(range(1, 10)))
    stop = threading.Event()
    problems: list[BaseException] = []
    reads = [0]

    def read() -> None:
        try:
            while not stop.is_set():
                batch = rb.sample()
                same(plain(batch), rows(batch["id"]))
                reads[0] += 1
        except BaseException as exc:
            problems.append(exc)
            stop.set()

    reader = threading.Thread(target=read)
    reader.start()
    while not stop.is_set() and (len(rb) < 40_000 or reads[0] < 20):
        rb.extend(rows(range(len(rb) + 1, len(rb) + 2001)))
    stop.set()
    reader.join()
    assert not problems
    index = torch.arange(0, len(rb), 97)
    same(rb[index], rows(index + 1))


@pytest.mark.guarantee(
    "process/turns",
    "Writers write in the order in which they asked, and an fsync that hangs delays only its own store.",
)
def test_two_writers_wait_for_one_another(make: Make) -> None:
    rb = make(5000)
    problems: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for _ in range(60):
                rb.extend(flags("....t", (5,)), source=name)
        except BaseException as exc:
            problems.append(exc)

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not problems
    assert len(rb) == 900
    found = rb.sql(
        "SELECT source, count(*), min(length), max(length) FROM episodes GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert found == [(name, 60, 5, 5) for name in "abc"]
    steps = steps_by_row(rb)
    assert len(set(steps)) == 900


@pytest.mark.guarantee(
    "kill/interrupt",
    "After Ctrl-C or an exception inside a call, the buffer works correctly.",
)
def test_extend_works_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from expstore.episodes.table import EpisodeTable

    with expstore.open(tmp_path / "run.exp", capacity=100, batch_size=8) as rb:
        rb.extend(flags("...", (3,)), source="arm")
        rb.sql("SELECT 1")
        batches = [rb.sample()["id"].tolist() for _ in range(2)]

        def interrupt(*args: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(EpisodeTable, "commit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rb.extend(flags("..", (2,)), source="arm")
        assert rb.extend(flags(".t", (2,)), source="arm", return_ids=True).tolist() == [6, 7]
        assert steps_by_row(rb) == [(1, step) for step in range(7)]
        assert episodes(rb) == [(1, "arm", None, 7, 7.0, "terminated", 7)]
        assert rb.sample()["id"].tolist() not in batches
        assert rb.stats()["draws"] == 3
    with expstore.open(tmp_path / "run.exp") as rb:
        assert rb.recovered is None
        assert episodes(rb) == [(1, "arm", None, 7, 7.0, "terminated", 7)]
        monkeypatch.setattr(EpisodeTable, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(flags("..", (2,)), source="arm")
        monkeypatch.undo()
    with expstore.open(tmp_path / "run.exp") as rb:  # closed soundly right after the interruption
        assert rb.recovered is None
        assert len(rb) == 9


@pytest.mark.guarantee("disk/fsync")
def test_a_failed_sync_leaves_a_buffer_that_can_be_read_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = expstore.open(tmp_path / "run.exp", capacity=100, batch_size=8)
    rb.extend(rows(range(1, 50)))

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync_data", fail)
        with pytest.raises(StorageError, match="cannot sync .*Input/output error"):
            rb.flush()
    with pytest.raises(
        StateError, match=r"can no longer be written: cannot sync.*close it and open it again"
    ):
        rb.extend(rows([50]))
    same(plain(batch := rb.sample()), rows(batch["id"]))
    assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(49,)]
    rb.close()
    with expstore.open(tmp_path / "run.exp") as rb:
        assert rb.recovered
        same(rb[:], rows(range(1, 50)))
