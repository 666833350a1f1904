"""`state_dict` of storages in RAM: the whole content, as copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from expstore._open import open as open_store
from expstore.buffers.prioritized import TensorDictPrioritizedReplayBuffer
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.episodes.segmentation import Steps
from expstore.errors import ArgumentError, CorruptionError, SchemaError, StateError
from expstore.samplers import ConsumingSampler, SamplerWithoutReplacement
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema
from expstore.storages import LazyMemmapStorage, LazyTensorStorage, MemoryStorage, Storage, ZarrStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.batches import closing_factory, numbered_rows
from tests.support.stores import prepare

KINDS = [LazyTensorStorage, LazyMemmapStorage]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Storage]]:
    """A factory of storages that are closed at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing_factory(lambda kind, *given, **options: kind(*given, **options)) as factory:
        yield factory


def batch(rows: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + rows)
    after = {"reward": number[:, None].float(), "done": ((number + 1) % 4 == 0)[:, None]}
    return numbered_rows(
        rows, start, key="a", half=number.bfloat16(), word=number.to(torch.uint16), next=after
    )


def picture(storage: Storage) -> tuple[Any, ...]:
    """Everything about a storage's rows that can be seen, but for ids."""
    rb = ReplayBuffer(storage=storage)
    columns = "_index, _step, _priority, a, half, word, next.reward, next.done"
    rows = rb.sql(f"SELECT {columns} FROM transitions ORDER BY _id").fetchall()
    facts = "source, trajectory_id, length, return, status, live_rows"
    episodes = rb.sql(f"SELECT {facts} FROM episodes ORDER BY episode_id").fetchall()
    numbers = storage.write_count, storage.priorities.largest, storage.draws.number, storage.seed
    return rows, episodes, numbers, storage.keys


@pytest.mark.guarantee(
    "version/state",
    "The `state_dict` of a storage in RAM contains all of it and shares nothing; a damaged or foreign "
    "state changes nothing.",
)
@pytest.mark.some(2)
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("before", [0, 3])
def test_everything_continues_after_a_load(
    make: Callable[..., Storage], source: Any, target: Any, before: int
) -> None:
    def buffer(storage: Storage) -> TensorDictPrioritizedReplayBuffer:
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=5)

    first = buffer(make(source, 10, seed=4))
    first.extend(batch(14), source="env")  # its last episode has no end
    first.update_priority(torch.arange(10), torch.arange(10) + 1.0)
    for _ in range(3):
        first.sample()
    first.episodes.end()  # as a load does
    state = first.storage.state_dict()
    other = make(target, 10, seed=8)
    if before:
        ReplayBuffer(storage=other).extend(batch(before, 900))
    other.load_state_dict(state)
    assert picture(other) == picture(first.storage)
    assert other.last >= first.storage.last + before  # nobody's old id means another row
    assert other.last % 10 == first.storage.last % 10
    second = buffer(other)
    for _ in range(4):
        for key in ("a", "index", "priority_weight"):
            one, two = first.sample(), second.sample()
            assert torch.equal(one[key], two[key])
        assert torch.equal(*(rb.extend(batch(3, 50), source="env") for rb in (first, second)))
    assert picture(other) == picture(first.storage)
    np.testing.assert_array_equal(first[:]["a"], second[:]["a"])


@pytest.mark.guarantee("version/state")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [lambda: SamplerWithoutReplacement(), lambda: ConsumingSampler(3)])
def test_samplers_continue(make: Callable[..., Storage], kind: Any, sampler: Callable[[], Any]) -> None:
    first = ReplayBuffer(storage=make(kind, 12), sampler=sampler(), batch_size=5)
    first.extend(batch(12))
    first.sample()
    other = make(kind, 12)
    other.load_state_dict(first.storage.state_dict())
    second = ReplayBuffer(storage=other, sampler=sampler(), batch_size=5)
    for _ in range(4):
        assert first.sample()["a"].tolist() == second.sample()["a"].tolist()


@pytest.mark.guarantee("version/state")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_shared(make: Callable[..., Storage], kind: Any) -> None:
    first, second = make(kind, 10), make(kind, 10)
    ReplayBuffer(storage=first).extend(batch(8))
    expected = picture(first)
    state = first.state_dict()
    ReplayBuffer(storage=first)[0:8] = batch(8, 70)
    second.load_state_dict(state)
    for value in state["rows"].values():
        value.zero_()
    state["log"].zero_()
    assert picture(second) == expected


def test_objects_are_copied(make: Callable[..., Storage]) -> None:
    schema = Schema([Field(("_data",), "object", ())])
    things: list[Any] = ["text", {"list": [1]}, TensorDict({"t": torch.arange(3)}), torch.arange(2)]
    column = np.empty(4, object)
    column[:] = things
    first = prepare(make(MemoryStorage, 4), schema)
    RoundRobinWriter().write(first, [column], Steps(4), source=None, info="")
    state, second = first.state_dict(), make(MemoryStorage, 40)
    things[1]["list"].append(2)
    things[2]["t"].zero_()
    second.load_state_dict(state)
    state["rows"]["_data"][3].zero_()
    found = second.read(second.window.ids())[0]
    assert found[:2].tolist() == ["text", {"list": [1]}]
    assert (found[2]["t"].tolist(), found[3].tolist()) == ([0, 1, 2], [0, 1])
    assert second.geometry.spare == 5


def test_other_storages(make: Callable[..., Storage], tmp_path: Path) -> None:
    first = make(LazyTensorStorage, 10)
    ReplayBuffer(storage=first).extend(batch(10))
    state = first.state_dict()
    small = make(LazyMemmapStorage, 4)
    small.load_state_dict(state)
    assert (small.capacity, small.max_size) == (4, 4)
    assert ReplayBuffer(storage=small)[:]["a"].sort().values.tolist() == [6, 7, 8, 9]
    endless = make(MemoryStorage)
    endless.load_state_dict(state)
    assert len(endless) == 10

    other = make(LazyTensorStorage, 10)
    ReplayBuffer(storage=other).extend(TensorDict({"a": torch.ones(3, 2)}, [3]))
    with pytest.raises(SchemaError, match=r"the state has other fields.*a: int64\[\], expected float32\[2\]"):
        other.load_state_dict(state)
    assert ReplayBuffer(storage=other)[:]["a"].tolist() == [[1, 1]] * 3
    empty = make(LazyTensorStorage, 10)
    other.load_state_dict(empty.state_dict())
    assert len(other) == 0

    flat = make(MemoryStorage, 10, ndim=2)
    schema = Schema([Field(("n",), "int64", ())])
    flat.prepare(schema, find_keys(schema), (3,))
    RoundRobinWriter().write(flat, [np.arange(6)], Steps(6), source=None, info="")
    again = make(LazyMemmapStorage, 10, ndim=2)
    again.load_state_dict(flat.state_dict())
    assert (again.capacity, again.geometry.dims, again.shape) == (12, (3,), (2, 3))


def test_a_store_on_disk_keeps_its_rows(make: Callable[..., Storage], tmp_path: Path) -> None:
    kept = make(ZarrStorage, tmp_path / "run.exp", 10)
    rb = ReplayBuffer(storage=kept)
    rb.extend(batch(3))
    rb.flush()
    state = kept.state_dict()
    assert state == {"uuid": kept.description.uuid, "last": 3}
    kept.load_state_dict(state)
    assert len(kept) == 3
    first = make(LazyTensorStorage, 10)
    with pytest.raises(StateError, match="has no rows"):
        first.load_state_dict(state)
    with pytest.raises(StateError, match="loads no rows from a state dict"):
        kept.load_state_dict(first.state_dict())
    for register in (kept.register_save_hook, kept.register_load_hook):
        with pytest.raises(StateError, match="no rows that a hook could change"):
            register(lambda rows: rows)
    with open_store(tmp_path / "run.exp", mode="r") as follower:
        assert follower.storage.state_dict() == state


@pytest.mark.guarantee("version/state")
def test_invalid_states_are_refused(make: Callable[..., Storage]) -> None:
    storage = make(LazyTensorStorage, 10)
    ReplayBuffer(storage=storage).extend(batch(5))
    expected, state = picture(storage), storage.state_dict()

    def without(name: str) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != name}

    def rows(**changes: Any) -> dict[str, Any]:
        return state | {"rows": {k: v for k, v in (state["rows"] | changes).items() if v is not None}}

    base = json.loads(state["base"])
    del base["draw"]
    log = state["log"].clone()
    log[40] ^= 1
    values, forged = state["rows"], state["manifest"].replace("10", "11")
    for wrong, error, message in [
        (without("rows"), SchemaError, "'rows' is missing"),
        (without("manifest"), SchemaError, "'manifest' is missing"),
        (state | {"log": None}, SchemaError, "'log' is missing"),
        ([state], StateError, "no rows"),
        (rows(a=values["a"][:3]), SchemaError, "different lengths"),
        (rows(a=values["a"].float()), SchemaError, "'a' is torch.float32.*expected rows of int64"),
        (rows(half=values["half"].view(torch.uint16)), SchemaError, "'half' is torch.uint16"),
        (rows(a=None), SchemaError, "no tensor 'a'"),
        (rows(more=torch.zeros(5)), SchemaError, "do not match its description"),
        (state | {"manifest": forged}, CorruptionError, "the state's manifest"),
        (state | {"base": "{"}, CorruptionError, "the state's base"),
        (state | {"base": json.dumps(base)}, CorruptionError, "lacks draw"),
        (state | {"log": log}, CorruptionError, "the state's log"),
    ]:
        with pytest.raises(error, match=message):
            storage.load_state_dict(wrong)
    assert picture(storage) == expected
    storage.close()
    for call in (storage.state_dict, lambda: storage.load_state_dict(state)):
        with pytest.raises(StateError, match="closed"):
            call()


def test_hooks_change_what_is_kept(make: Callable[..., Storage]) -> None:
    class Packed:
        shift = None
        is_full = None

        def __call__(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return rows | {"a": rows["a"].to(torch.uint8)}

    hook, calls = Packed(), []
    first = make(LazyMemmapStorage, 10)
    first.register_save_hook(hook)
    first.register_save_hook(lambda rows: calls.append(sorted(rows)) or rows)
    ReplayBuffer(storage=first).extend(batch(7))
    state = first.state_dict()
    assert state["rows"]["a"].dtype == torch.uint8
    assert (hook.shift, hook.is_full, len(calls)) == (7, False, 1)
    assert calls[0][:2] == ["_row.episode", "_row.id"]
    ReplayBuffer(storage=first).extend(batch(5))
    first.state_dict()
    assert (hook.shift, hook.is_full) == (2, True)
    second = make(LazyTensorStorage, 10)
    with pytest.raises(SchemaError, match="'a' is torch.uint8"):
        second.load_state_dict(state)
    second.register_load_hook(lambda rows: rows | {"a": rows["a"].long()})
    second.load_state_dict(state)
    assert ReplayBuffer(storage=second)[:]["a"].tolist() == list(range(7))


@pytest.mark.parametrize("kind", KINDS)
def test_torchrls_fault_counter_beyond_2_to_31(make: Callable[..., Storage], kind: Any) -> None:
    """TorchRL counts writes in 32 bits: after 2^31 rows the counter is negative."""
    rb = ReplayBuffer(storage=make(kind, 10))
    rb.extend(batch(10))
    state = rb.storage.state_dict()
    base = json.loads(state["base"]) | {"write_count": 2**31 - 2, "last": 2**33, "draw": 2**32 - 1}
    manifest = state | {"base": json.dumps(base)}
    rb.storage.load_state_dict(manifest)
    rb.extend(batch(5))
    rb.sample(4)
    assert (rb.write_count, rb.storage.draws.number) == (2**31 + 3, 2**32)
    assert rb.storage.last > 2**33
    assert len(rb) == 10


def test_episodes_of_a_storage_that_a_second_buffer_is_given(make: Callable[..., Storage]) -> None:
    storage = make(LazyTensorStorage, 10)
    for rows in (4, 8):
        rb = ReplayBuffer(storage=storage)
        rb.extend(batch(4))
        assert rb.sql("SELECT sum(length), count(*) FROM episodes").fetchall() == [(rows, rows // 4)]
        del rb


@pytest.mark.parametrize("how", ["state", "version"])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_over_a_storage_are_notified_of_other_content(
    make: Callable[..., Storage], kind: Any, how: str, tmp_path: Path
) -> None:
    def rows(*names: str) -> TensorDict:
        known = {"x": torch.arange(4), "y": -torch.arange(4)}
        return TensorDict({name: known[name] for name in names}, [4])

    first, second = make(kind, 10, seed=1), make(kind, 10, seed=2)
    ReplayBuffer(storage=first).extend(rows("x", "y"))
    readers = [ReplayBuffer(storage=second, batch_size=3, prefetch=ahead) for ahead in (0, 2)]
    readers[0].extend(rows("y", "x"))  # the same fields in another order
    for rb in readers:
        rb.sample()
    if how == "state":
        second.load_state_dict(first.state_dict())
    else:
        first.dumps(tmp_path / "versions")
        second.loads(tmp_path / "versions")
    readers[1].extend(rows("y", "x"))
    for rb in readers:
        assert rb[:]["x"].tolist() == [0, 1, 2, 3] * 2
        batch = rb.sample()
        assert torch.equal(batch["x"], -batch["y"])
    other = ReplayBuffer(storage=make(kind, 10, seed=3), batch_size=3)
    former = readers[0].set_storage(make(kind, 10, seed=4))
    former.load_state_dict(first.state_dict())  # it is not this buffer's any more
    other.extend(rows("x", "y"))
    readers[0].extend(rows("y", "x"))
    assert readers[0][:]["x"].tolist() == [0, 1, 2, 3]


def test_torchrls_hooks_for_its_own_files_are_refused() -> None:
    utils = pytest.importorskip("torchrl.data.replay_buffers.utils")
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    registers = (rb.register_save_hook, rb.register_load_hook, rb.storage.register_save_hook)
    for name in ("TED2Flat", "TED2Nested", "Flat2TED", "Nested2TED", "H5Split", "H5Combine"):
        for register in registers:
            with pytest.raises(ArgumentError, match=f"{name} converts .* leave the hook out"):
                register(getattr(utils, name)())
    with pytest.raises(ArgumentError, match="a hook is a function of the rows, got None"):
        rb.register_save_hook(None)  # type: ignore[arg-type]
