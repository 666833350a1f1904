"""Ensembles: members and shapes of sampled rows, probabilities, and routing of written rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    MemoryStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from expstore.errors import NotReadyError, StateError
from expstore.samplers import SamplerEnsemble
from expstore.storages import StorageEnsemble
from expstore.writers import WriterEnsemble
from tests.support.batches import trajectory_rows
from tests.support.flat_storages import flatten_dims
from tests.support.forks import collect_from_child

#: Rows of a member: `x` is 1000 * member + number.
rows = partial(trajectory_rows, action=lambda x: torch.zeros(len(x), 2))


def member(
    number: int, n: int = 20, *, kind: Any = TensorDictReplayBuffer, capacity: int = 50, **more: Any
) -> Any:
    rb = kind(storage=MemoryStorage(capacity, seed=number), **more)
    if n:
        rb.extend(rows(number, n))
    return rb


def ensemble(count: int = 3, *, n: int = 20, **more: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*[member(number, n) for number in range(count)], **more)


def owners(batch: Any) -> np.ndarray[Any, Any]:
    """Return the member of each part, having checked that all its rows say so."""
    ids: np.ndarray[Any, Any] = batch["index", "buffer_ids"].numpy()
    assert (batch["x"].numpy() // 1000 == ids).all()
    assert (batch["x"].numpy() % 1000 == batch["index", "index"].numpy()).all()
    assert (ids == ids[:, :1]).all()
    return ids[:, 0]


def shares(rb: ReplayBufferEnsemble, size: int, draws: int) -> Any:
    """Return how often each member was drawn from."""
    counts = np.zeros(len(rb))
    for _ in range(draws):
        counts += np.bincount(owners(rb.sample(size)), minlength=len(rb))
    return counts / counts.sum()


# -- sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_batch_has_parts_and_says_whose_rows_they_are(kind: Any) -> None:
    rb = ReplayBufferEnsemble(*[member(number, kind=kind) for number in range(3)])
    batch, info = rb.sample(12, return_info=True)
    assert batch.shape == torch.Size([3, 4])
    owners(batch)
    assert info.shape == batch.shape
    assert torch.equal(info["index", "buffer_ids"], batch["index", "buffer_ids"])
    assert set(batch["index"].keys()) == {"index", "buffer_ids"}
    assert batch["action"].shape == torch.Size([3, 4, 2])


def test_arrays_may_be_the_default() -> None:
    rb = ensemble(as_numpy=True, batch_size=12)
    for found in (rb, rb[:2], pickle.loads(pickle.dumps(rb))):
        for batch in (found.sample(), next(iter(found)), found.next(), found.sample(6)):
            assert type(batch["x"]) is np.ndarray
        batch, info = found.sample(return_info=True)
        assert type(batch["action"]) is type(info["index"]["buffer_ids"]) is np.ndarray
        assert isinstance(found.sample(as_numpy=False), TensorDict)
    assert isinstance(rb[0].sample(4), TensorDict)
    assert isinstance(ensemble().sample(12), TensorDict)


def test_num_buffer_sampled_says_how_many_parts() -> None:
    rb = ensemble(num_buffer_sampled=8, batch_size=48)
    assert rb.sample().shape == torch.Size([8, 6])
    assert next(iter(rb)).shape == torch.Size([8, 6])
    assert rb.next().shape == torch.Size([8, 6])
    with pytest.raises(ValueError, match="must be divisible by num_buffer_sampled"):
        rb.sample(12)
    with pytest.raises(StateError, match="batch_size not specified"):
        ensemble().sample()


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (None, [1 / 3, 1 / 3, 1 / 3]),
        ([0.0, 3.0, 1.0], [0, 0.75, 0.25]),
        (torch.tensor([0.0, 0.75, 0.25]), [0, 0.75, 0.25]),
        ("sampleable", [0.125, 0.5, 0.375]),
    ],
)
def test_members_are_drawn_by_p(p: Any, wanted: list[float]) -> None:
    members = [member(number, rows) for number, rows in enumerate((5, 20, 15))]
    found = shares(ReplayBufferEnsemble(*members, p=p, num_buffer_sampled=60), 60, 60)
    assert found == pytest.approx(wanted, abs=0.03)
    assert (found[0] == 0) == (wanted[0] == 0)


def test_sampleable_weighs_slices_by_where_they_can_begin() -> None:
    members = []
    for number, length in enumerate((1, 4, 8)):
        data = rows(number, length)
        data["episode"] = torch.full((length,), number)
        sampler = SliceSampler(slice_len=2, traj_key="episode")
        members.append(TensorDictReplayBuffer(storage=MemoryStorage(16, seed=number), sampler=sampler))
        members[-1].extend(data)
    rb = ReplayBufferEnsemble(*members, p="sampleable", num_buffer_sampled=100)
    assert shares(rb, 200, 20) == pytest.approx([0, 0.3, 0.7], abs=0.03)
    assert [one.can_sample(2) for one in members] == [False, True, True]


def test_sampleable_needs_a_sampleable_member() -> None:
    rb = ensemble(n=0, p="sampleable")
    with pytest.raises(NotReadyError, match="None of the replay-buffer ensemble members can be sampled"):
        rb.sample(3)


def test_a_sampler_that_gives_less_is_asked_again() -> None:
    short = member(0, 5, sampler=SamplerWithoutReplacement())
    rb = ReplayBufferEnsemble(short, p=[1.0])
    batch = rb.sample(8)
    assert batch.shape == torch.Size([1, 8])
    assert sorted(batch["x"][0, :5].tolist()) == [0, 1, 2, 3, 4]


def test_members_with_other_fields_are_stacked_lazily() -> None:
    other = TensorDictReplayBuffer(storage=MemoryStorage(10, seed=1))
    other.extend(TensorDict({"x": 1000 + torch.arange(10), "extra": torch.zeros(10)}, [10]))
    batch = ReplayBufferEnsemble(member(0), other, sample_from_all=True).sample(4)
    assert batch["x"].shape == torch.Size([2, 2])
    assert "extra" in batch[1]
    assert "extra" not in batch[0]


# -- resuming -----------------------------------------------------------------------------------------


@pytest.mark.guarantee("draw/next")
def test_draws_continue_after_a_restart(tmp_path: Path) -> None:
    def opened(folder: str) -> ReplayBufferEnsemble:
        members = [
            expstore.open(tmp_path / folder / f"{number}.exp", capacity=50, seed=number)
            for number in range(3)
        ]
        return ReplayBufferEnsemble(*members, p=[0.2, 0.3, 0.5], batch_size=12, num_buffer_sampled=4)

    def filled(folder: str) -> ReplayBufferEnsemble:
        (tmp_path / folder).mkdir()
        rb = opened(folder)
        for number in range(3):
            rb[number].extend(rows(number, 20))
        return rb

    whole, cut = filled("whole"), filled("cut")
    expected = [whole.sample()["x"].tolist() for _ in range(6)]
    found = [cut.sample()["x"].tolist() for _ in range(3)]
    cut.close()
    cut = opened("cut")
    found += [cut.sample()["x"].tolist() for _ in range(3)]
    assert found == expected
    for rb in (whole, cut):
        rb.close()


def test_a_generator_decides_members_and_rows() -> None:
    def draw(seed: int) -> list[Any]:
        rb = ensemble(generator=torch.Generator().manual_seed(seed), batch_size=12)
        return [rb.sample()["x"].tolist() for _ in range(3)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_the_state_continues_in_another_buffer() -> None:
    rb, other = ensemble(batch_size=6), ensemble(batch_size=6)
    rb.sample()
    other.load_state_dict(rb.state_dict())
    assert other.sample()["x"].tolist() == rb.sample()["x"].tolist()
    with pytest.raises(StateError, match="not a state of an ensemble of 2 buffers"):
        ensemble(2).load_state_dict(rb.state_dict())


def test_dumps_and_loads_go_by_number(tmp_path: Path) -> None:
    rb = ensemble(batch_size=6)
    rb.dumps(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    other = ensemble(n=0, batch_size=6)
    other.loads(tmp_path)
    assert [len(other[number]) for number in range(3)] == [20, 20, 20]
    assert other.sample()["x"].tolist() == rb.sample()["x"].tolist()


def test_a_forked_child_draws_although_a_thread_of_the_parent_draws(tmp_path: Path) -> None:
    members = [expstore.open(tmp_path / f"{number}.exp") for number in range(2)]
    for number, one in enumerate(members):
        one.extend(rows(number, 20))
        one.flush()
    with ReplayBufferEnsemble(*members, batch_size=4) as rb:
        rb.sample()
        with rb._lock, ThreadPoolExecutor(1) as pool:  # as that thread may hold it
            told = pool.submit(collect_from_child, lambda tell: tell(rb.sample().numel())).result()
        assert told == [4]


def test_a_copy_draws_from_copies(tmp_path: Path) -> None:
    members = [expstore.open(tmp_path / f"{number}.exp", capacity=50, seed=number) for number in range(2)]
    rb = ReplayBufferEnsemble(*members, batch_size=4)
    for number in range(2):
        rb[number].extend(rows(number, 10))
    copied = pickle.loads(pickle.dumps(rb))
    owners(copied.sample())
    assert copied[0].storage.follows
    copied.close()
    rb.close()


# -- transforms and collation --------------------------------------------------------------------------


def plus(amount: int, key: str = "y") -> Callable[[TensorDict], TensorDict]:
    return lambda batch: batch.set(key, batch["x"] + amount)


def test_members_transform_first_then_the_ensemble() -> None:
    rb = ReplayBufferEnsemble(
        member(0, transform=plus(1)),
        member(1, transform=plus(2)),
        transform=lambda batch: batch.set("z", batch["y"] * 10),
        sample_from_all=True,
    )
    batch = rb.sample(4)
    assert torch.equal(batch["y"], batch["x"] + torch.tensor([[1], [2]]))
    assert torch.equal(batch["z"], batch["y"] * 10)
    rb.append_transform(plus(5, "w")).insert_transform(0, plus(7, "v"))
    batch = rb.sample(4)
    assert torch.equal(batch["w"], batch["x"] + 5)
    assert torch.equal(batch["v"], batch["x"] + 7)
    assert len(rb.transform) == 3


def test_a_transform_that_changes_the_shape_is_named() -> None:
    rb = ensemble(transform=lambda batch: batch.reshape(-1))
    with pytest.raises(RuntimeError, match="Failed to set the metadata"):
        rb.sample(6)


def test_collation_of_members_and_of_the_ensemble() -> None:
    rb = ensemble(
        2,
        sample_from_all=True,
        collate_fns=[
            lambda part: part.set("n", part["x"] * 0),
            lambda part: part.set("n", part["x"] * 0 + 1),
        ],
        collate_fn=lambda parts: torch.stack(parts).set("parts", torch.full((2, 3), len(parts))),
    )
    batch = rb.sample(6)
    assert batch["n"].tolist() == [[0] * 3, [1] * 3]
    assert batch["parts"].tolist() == [[2] * 3] * 2


# -- members ------------------------------------------------------------------------------------------


def test_some_members_are_an_ensemble() -> None:
    rb = ensemble(p=[0.5, 0.25, 0.25], batch_size=12)
    for some in (slice(0, 2), [0, 1], range(2), np.array([0, 1]), torch.tensor([0, 1]), [True, True, False]):
        part = rb[some]
        assert isinstance(part, ReplayBufferEnsemble)
        assert len(part) == 2
        assert part[0] is rb[0]
        assert part.sampler.p.tolist() == pytest.approx([2 / 3, 1 / 3])
        assert part.sample().shape == torch.Size([2, 6])
        assert part[:, :3]["x"].tolist() == [[0, 1, 2], [1000, 1001, 1002]]
        assert isinstance(rb.storage[some], StorageEnsemble)
        assert isinstance(rb.sampler[some], SamplerEnsemble)
        assert isinstance(rb.writer[some], WriterEnsemble)


def test_one_member_and_rows_of_it() -> None:
    rb = ensemble(transform=plus(1))
    assert rb[-1] is rb[2]
    assert rb[torch.tensor(1)] is rb[1]
    assert rb[:] is rb
    assert rb[...] is rb
    assert rb[1, 2:4]["x"].tolist() == [1002, 1003]
    assert rb[..., torch.tensor([0, 5])]["x"].tolist() == [[0, 5], [1000, 1005], [2000, 2005]]
    assert rb.storage[1] is rb[1].storage
    assert rb.storage[1, :2]["x"].tolist() == [1000, 1001]
    assert [part["x"].tolist() for part in rb.storage[:2, :2]] == [[0, 1], [1000, 1001]]
    assert isinstance(rb.sampler[0], RandomSampler)
    assert isinstance(rb.writer[0], RoundRobinWriter)
    assert rb.storage.max_size == 150


def test_invalid_members_are_refused() -> None:
    rb = ensemble()
    for part in (rb, rb.storage, rb.sampler, rb.writer):
        for index in (3, -4, "x", None, [0, 3]):
            with pytest.raises(IndexError):
                part[index]
        with pytest.raises(RuntimeError):
            part[torch.zeros(2, 2, dtype=torch.int64)]
        with pytest.raises(TypeError):
            part[torch.tensor([0.0, 1.0])]
    with pytest.raises(IndexError, match="Tuple of length greater than 1"):
        rb.writer[:, 0]


def test_an_ensemble_of_parts() -> None:
    members = [member(number) for number in range(2)]
    rb = ReplayBufferEnsemble(
        storages=StorageEnsemble(*[one.storage for one in members], transforms=[plus(1), plus(2)]),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True),
        writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
        batch_size=4,
    )
    batch = rb.sample()
    owners(batch)
    assert torch.equal(batch["y"], batch["x"] + torch.tensor([[1], [2]]))
    assert rb[0].storage is members[0].storage


def test_invalid_ensembles_are_refused() -> None:
    storages = StorageEnsemble(MemoryStorage(3))
    with pytest.raises(RuntimeError, match="not both"):
        ReplayBufferEnsemble(member(0), storages=storages)
    with pytest.raises(TypeError, match="give buffers, or all of"):
        ReplayBufferEnsemble(storages=storages)
    with pytest.raises(TypeError, match="must be ReplayBuffers, got a MemoryStorage"):
        ReplayBufferEnsemble(MemoryStorage(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same number of members"):
        ReplayBufferEnsemble(storages=storages, samplers=SamplerEnsemble(), writers=WriterEnsemble())
    with pytest.raises(TypeError, match="transforms must have the same length"):
        StorageEnsemble(MemoryStorage(3), transforms=[])
    with pytest.raises(RuntimeError, match="Cannot pass both `p` argument and `sample_from_all=True`"):
        ensemble(p=[1, 1, 1], sample_from_all=True)
    with pytest.raises(ValueError, match="does not support prefetch="):
        ensemble(prefetch=2)
    assert len(ensemble(prefetch=0, pin_memory=False, shared=False)) == 3
    with pytest.raises(ValueError, match="shared"):
        ensemble(shared=True)
    with pytest.raises(TypeError, match="unexpected"):
        ensemble(colour="red")


def test_invalid_probabilities_are_refused() -> None:
    rb = ensemble()
    for p in ([1, 1], [1, -1, 1], [0, 0, 0], [1, np.nan, 1], "often"):
        with pytest.raises(ValueError, match="one per member|only dynamic"):
            rb.sampler.p = p
    assert rb.sampler.p is None


def test_can_sample() -> None:
    rb = ReplayBufferEnsemble(member(0), member(1, 0))
    assert rb.can_sample(4)
    assert not rb.can_sample(3)
    rb.sampler.p = [0, 1]
    assert not rb.can_sample(4)
    assert not ReplayBufferEnsemble(member(0), member(1, 0), sample_from_all=True).can_sample(4)


# -- writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["env", ("collector", "env")])
def test_rows_go_where_the_key_says(key: Any) -> None:
    rb = ensemble(2, n=0, routing_key=key)
    data = TensorDict({"x": torch.tensor([0, 1000, 1, 1001]), key: torch.tensor([[0], [1], [0], [1]])}, [4])
    told = rb.extend(data)
    assert told["buffer_ids"].tolist() == [0, 1, 0, 1]
    assert told["index"].tolist() == [0, 0, 1, 1]
    assert rb[0][:]["x"].tolist() == [0, 1]
    assert rb[1][:]["x"].tolist() == [1000, 1001]
    one = rb.add(data[1])
    assert (int(one["buffer_ids"]), int(one["index"])) == (1, 2)
    assert rb.stats()["size"] == 5


@pytest.mark.parametrize("counts", [None, False])
def test_priorities_come_with_routed_rows(counts: bool | None) -> None:
    members = [
        member(number, 0, sampler=PrioritizedSampler(50, alpha=1.0, beta=1.0), priority_key="td_error")
        for number in range(2)
    ]
    rb = ReplayBufferEnsemble(*members, routing_key="env")
    data = TensorDict({"x": torch.arange(4), "env": torch.arange(4) // 2}, [4])
    data["td_error"] = torch.tensor([0.001, 1000.0, 1000.0, 0.001])
    rb.extend(data, update_priority=counts)
    drawn = rb[0].sample(100)["x"].float().mean()
    assert (drawn > 0.95) == (counts is None)


def test_rows_go_where_they_lie_along_the_dim() -> None:
    rb = ensemble(2, n=0, routing_dim=-1)
    told = rb.extend(TensorDict({"x": torch.tensor([[0, 1000], [1, 1001]])}, [2, 2]))
    assert told.batch_size == torch.Size([4])
    assert told["buffer_ids"].tolist() == [0, 1, 0, 1]
    assert rb[1][:]["x"].tolist() == [1000, 1001]
    with pytest.raises(StateError, match="Use extend"):
        rb.add(TensorDict({"x": torch.tensor(1)}, []))
    with pytest.raises(ValueError, match="has size 3, expected 2"):
        rb.extend(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))


def test_unroutable_batches_change_nothing() -> None:
    def batch(ids: Any) -> TensorDict:
        return TensorDict({"x": torch.arange(2), "env": torch.as_tensor(ids)}, [2])

    rb = ensemble(2, n=0, routing_key="env")
    for ids, error, text in (
        ([0, 2], ValueError, "must lie in"),
        ([0, -1], ValueError, "must lie in"),
        ([0.0, 1.0], TypeError, "must be integers"),
        ([False, True], TypeError, "must be integers"),
        ([[0, 1], [0, 1]], ValueError, "one member id per record"),
    ):
        with pytest.raises(error, match=text):
            rb.extend(batch(ids))
    with pytest.raises(ValueError, match="no routing_key"):
        rb.extend(rows(0, 2))
    with pytest.raises(TypeError, match="require a TensorDict"):
        rb.extend([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scalar TensorDict"):
        rb.add(batch([0, 1]))
    assert rb.stats()["size"] == 0
    with pytest.raises(RuntimeError, match="writes are disabled"):
        ensemble().extend(rows(0, 2))
    with pytest.raises(ValueError, match="mutually exclusive"):
        ensemble(routing_key="env", routing_dim=0)
    with pytest.raises(TypeError, match="must be an integer"):
        ensemble(routing_dim="env")


def test_the_ensembles_transform_acts_on_what_is_written() -> None:
    rb = ensemble(2, n=0, routing_key="env")
    rb.append_transform(lambda batch: batch.set("env", 1 - batch["env"]), invert=True)
    data = TensorDict({"x": torch.tensor([0, 1000]), "env": torch.tensor([1, 0])}, [2])
    assert rb.extend(data)["buffer_ids"].tolist() == [0, 1]
    rb.append_transform(lambda batch: None, invert=True)
    assert rb.extend(data).shape == torch.Size([0])
    assert rb.stats()["size"] == 2


def tracked(count: int = 2, capacity: int = 3) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(
        *[
            TensorDictReplayBuffer(
                storage=MemoryStorage(capacity, seed=number), writer=RoundRobinWriter(track_generations=True)
            )
            for number in range(count)
        ],
        routing_key="env",
    )


def test_patches_reach_only_the_rows_they_are_for() -> None:
    rb = tracked(4)
    env = torch.tensor([2, 0, 3, 1, 1, 3, 0, 2, 0, 1, 2, 3])
    told = rb.extend(TensorDict({"value": torch.zeros(12), "env": env}, [12]))
    assert told["index_generation"].tolist() == [0] * 12
    again = TensorDict({"value": torch.full((1,), -1.0), "env": env[2:3]}, [1])  # in the place of row 2
    newer = rb.extend(again)
    assert newer["index_generation"].tolist() == [1]
    rows = torch.tensor([5, 0, 3, 11, 7, 4, 9, 2])
    result = rb.update_if_present(
        index=told.select("buffer_ids", "index")[rows],
        generation=told["index_generation"][rows],
        patch={"value": (rows + 100).float()},
    )
    assert result.updated.tolist() == [True] * 7 + [False]
    assert (result.updated_count, result.stale_count) == (7, 1)
    result = rb.update_if_present(
        index=newer, generation=newer["index_generation"], patch={"value": torch.full((1,), -2.0)}
    )
    assert result.updated.all()
    expected = torch.zeros(12)
    expected[rows] = (rows + 100).float()
    expected[2] = -2
    for number in range(4):
        own = env == number
        assert rb[number][:]["value"][told["index"][own]].tolist() == expected[own].tolist()


def test_patches_of_old_versions_are_rejected() -> None:
    rb = tracked()
    told = rb.extend(
        TensorDict(
            {"value": torch.zeros(4), "version": torch.tensor([5, 1, 1, 5]), "env": torch.arange(4) % 2}, [4]
        )
    )
    options: dict[str, Any] = {
        "index": told,
        "generation": told["index_generation"],
        "version_key": "version",
    }
    result = rb.update_if_present(patch={"value": torch.ones(4)}, version=3, **options)
    assert result.updated.tolist() == [False, True, True, False]
    assert result.version_rejected is not None
    assert result.version_rejected.tolist() == [True, False, False, True]
    result = rb.update_if_present(
        patch={"value": torch.ones(4)}, version=torch.tensor([6, 2, 2, 6]), **options
    )
    assert result.updated.tolist() == [True, False, False, True]


def test_invalid_patches_are_refused() -> None:
    rb = tracked()
    told = rb.extend(TensorDict({"value": torch.zeros(2), "env": torch.arange(2)}, [2]))
    patch = {"value": torch.ones(2)}
    good: dict[str, Any] = {"index": told, "generation": told["index_generation"], "patch": patch}
    strange = told.clone()
    strange["buffer_ids"] = torch.tensor([0, 2])
    for wrong, error, text in (
        ({"index": torch.arange(2)}, TypeError, "a TensorDict with buffer_ids"),
        ({"index": strange}, ValueError, "must lie in"),
        ({"generation": torch.zeros(3, dtype=torch.int64)}, ValueError, "same number of records"),
        ({"patch": {"value": torch.ones(3)}}, ValueError, "must start with shape"),
        ({"version_key": "value"}, ValueError, "provided together"),
        ({"patch": {"other": torch.ones(2)}}, KeyError, "other"),
    ):
        with pytest.raises(error, match=text):
            rb.update_if_present(**(good | wrong))
    assert isinstance(
        rb.submit_update_if_present(**(good | {"patch": {}, "index": 3})).exception(), TypeError
    )
    assert (rb[0][:]["value"] == 0).all()
    plain = ensemble(1)
    batch = plain.sample(4)
    with pytest.raises(RuntimeError, match="not supported"):
        plain.update_if_present(
            index=batch["index"], generation=torch.zeros(1, 4, dtype=torch.int64), patch={"x": batch["x"]}
        )


FLAGS = ("done", "terminated", "truncated")


def stream(values: Any, *, over: str | None = None, **more: Any) -> TensorDict:
    """Rows of one stream, whose last one says that it is over, or nothing."""
    n = len(values)
    flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in FLAGS}
    if over is not None:
        flags["done"][-1] = flags[over][-1] = True
    return TensorDict({"x": torch.as_tensor(values), "next": flags, **more}, [n])


@pytest.mark.parametrize("disk", [False, True])
def test_streams_that_are_ended_are_cut_there(disk: bool, tmp_path: Path) -> None:
    def made(number: int) -> Any:
        sampler = SliceSampler(slice_len=3)
        if disk:
            return expstore.open(tmp_path / f"{number}.exp", capacity=50, seed=1, sampler=sampler)
        return TensorDictReplayBuffer(storage=MemoryStorage(50, seed=1), sampler=sampler)

    rb = ReplayBufferEnsemble(*[made(number) for number in range(3)])
    rb[0].extend(stream(range(5)))
    rb[1].extend(stream(range(4), over="terminated"))
    rb.end_streams()
    last = rb[0][4]["next"]
    assert [bool(last[name]) for name in FLAGS] == [True, False, True]
    assert [bool(rb[1][3]["next", name]) for name in FLAGS] == [True, True, False]
    assert not rb[0][:4]["next", "done"].any()
    assert rb.stats()["write_count"] == 9
    rb[0].extend(stream(range(100, 105)))
    for _ in range(20):
        values = rb[0].sample(9)["x"].reshape(-1, 3)
        assert (values.diff(dim=1) == 1).all()
    rb.close()
    if disk:
        with expstore.open(tmp_path / "0.exp", sampler=SliceSampler(slice_len=3)) as again:
            assert again.query()[0].length == 5
            assert len(again.episodes().fetchall()) == 2


def test_every_lane_is_ended_and_named_streams_continue() -> None:
    storage = MemoryStorage(50, seed=1)
    flatten_dims(storage)
    one = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2))
    rb = ReplayBufferEnsemble(one)
    one.extend(torch.stack([stream(range(3)), stream(range(10, 13))]))
    one.extend(stream(range(20, 23)), source="robot")
    rb.end_streams()
    ended = one[:]["x"][one[:]["next", "done"].squeeze(-1)]
    assert sorted(ended.tolist()) == [2, 12]
    one.extend(stream(range(23, 26)), source="robot")
    one.extend(stream(range(3, 6)))
    assert sorted(found.length for found in one.query()) == [3, 3, 3, 6]


def test_a_sampler_by_other_names_needs_one_per_member() -> None:
    def made(ids: Any, **options: Any) -> Any:
        sampler = SliceSampler(slice_len=2, traj_key="env", **options)
        one = TensorDictReplayBuffer(storage=MemoryStorage(8, seed=1), sampler=sampler)
        one.extend(stream(range(len(ids)), env=torch.as_tensor(ids)))
        return one

    done = ("next", "done")
    rb = ReplayBufferEnsemble(made([0, 0, 0], end_key=done), made([1, 1], end_key=done))
    rb.end_streams()
    assert rb[0][:][done].flatten().tolist() == [False, False, True]
    for wrong in (made([0, 1], end_key=done), made([0, 0])):
        with pytest.raises(RuntimeError, match="same trajectory id"):
            ReplayBufferEnsemble(rb[0], wrong).end_streams()
        assert not wrong[:][done].any()


def test_tails_that_say_that_they_are_over_are_not_truncated() -> None:
    flags = {name: torch.zeros(3, 1, dtype=torch.bool) for name in ("end", "terminal", "cut")}
    over = {name: flag.clone() for name, flag in flags.items()}
    over["end"][-1] = over["terminal"][-1] = True
    sampler = SliceSampler(slice_len=2, end_key=("flags", "end"))
    rb = ReplayBufferEnsemble(
        *[TensorDictReplayBuffer(storage=MemoryStorage(9, seed=1), sampler=sampler) for _ in range(2)]
    )
    for number, some in enumerate((flags, over)):  # the store itself knows none of these
        rb[number].extend(TensorDict({"x": torch.arange(3), "flags": some}, [3]))
    rb.end_streams(
        end_key=("flags", "end"), terminated_key=("flags", "terminal"), truncated_key=("flags", "cut")
    )
    ended = [[bool(rb[number][2]["flags", name]) for name in flags] for number in range(2)]
    assert ended == [[True, False, True], [True, True, False]]


def test_streams_end_by_flags_that_are_there() -> None:
    rb = ensemble(1)
    with pytest.raises(ValueError, match="must be distinct"):
        rb.end_streams(end_key="done", terminated_key="done")
    with pytest.raises(ValueError, match="no field 'next.done'"):
        rb.end_streams()
    with pytest.raises(TypeError, match="boolean end_key"):
        rb.end_streams(end_key="x")


def test_priorities_find_their_members() -> None:
    rb = ReplayBufferEnsemble(
        *[member(number, sampler=PrioritizedSampler(50, alpha=1.0, beta=1.0)) for number in range(2)],
        sample_from_all=True,
    )
    index = TensorDict({"buffer_ids": torch.tensor([0, 1]), "index": torch.tensor([3, 4])}, [2])
    assert rb.update_priority(index, torch.tensor([100000.0, 200000.0], dtype=torch.bfloat16)) == 2
    values = rb.sample(40)["index", "index"].numpy()
    assert (values[0] == 3).mean() > 0.9
    assert (values[1] == 4).mean() > 0.9
    batch = rb.sample(4)
    assert rb.update_priority(batch["index"], torch.ones(2, 2)) == 4
    with pytest.raises(TypeError, match="buffer_ids"):
        rb.update_priority(torch.tensor([1]), 1.0)  # type: ignore[arg-type]


def test_stats_are_of_all_members() -> None:
    rb = ReplayBufferEnsemble(member(0, 20), member(1, 60))
    assert rb.stats() == {
        "size": 70,
        "write_count": 80,
        "prefetch_queue_size": 0,
        "initialized": True,
        "capacity": 100,
        "utilization": 0.7,
        "num_buffers": 2,
    }
    rb.empty()
    assert rb.stats()["size"] == 0
    assert "RandomSampler" in repr(rb)
