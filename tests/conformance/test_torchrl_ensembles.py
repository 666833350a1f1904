"""Ensembles, writers and queries behave like TorchRL's: the same programs report the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as theirs
from tensordict import TensorDict
from torchrl.envs import RenameTransform

from tests.support.batches import whole_trajectories
from tests.support.torchrl_pair import OURS, Teller, numbers, same

pytestmark = pytest.mark.filterwarnings("ignore:.*end-of-episode:UserWarning")


def members(lib: Any, count: int = 3, **more: Any) -> list[Any]:
    """Buffers whose rows say whose they are: x is member * 1000 + number."""
    made = [lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(20), **more) for _ in range(count)]
    for number, rb in enumerate(made):
        rb.extend(numbers(1000 * number, 12))
    return made


@pytest.mark.parametrize("drawn", [None, 4, 6])
@pytest.mark.parametrize("p", [None, [0.0, 0.9, 0.1]])
def test_samples_have_parts(tmp_path: Path, p: list[float] | None, drawn: int | None) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBufferEnsemble(*members(lib), p=p, num_buffer_sampled=drawn, batch_size=24)
        for batch in (rb.sample(), rb.sample(48), next(iter(rb))):
            tell(batch.shape, sorted(batch.keys(True, True), key=str))
            ids = batch["index", "buffer_ids"]
            tell(
                ids.shape[:2],
                str(ids.dtype),
                bool((ids.reshape(batch["x"].shape) == batch["x"] // 1000).all()),
            )
            tell(p is None or 0 not in ids.unique().tolist())
            index = batch["index", "index"].reshape(batch["x"].shape)
            tell(bool((index == batch["x"] % 1000).all()))

    same(program, tmp_path)


def test_samples_of_all_members(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBufferEnsemble(*members(lib), sample_from_all=True, batch_size=12)
        batch = rb.sample()
        tell(batch.shape, batch["x"] // 1000)
        tell.fails(lambda: rb.sample(10))

    same(program, tmp_path)


def test_ensembles_that_cannot_be(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        some = members(lib)
        tell.fails(lambda: lib.ReplayBufferEnsemble(*some, p=[0.5, 0.3, 0.2], sample_from_all=True))
        tell.fails(
            lambda: lib.ReplayBufferEnsemble(*some, routing_key="x", routing_dim=0), "mutually exclusive"
        )
        tell.fails(lambda: lib.ReplayBufferEnsemble(*some).extend(numbers(0, 3)), "writes are disabled")

    same(program, tmp_path)


def test_members_are_taken_by_index(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        some = members(lib, 2)
        rb = lib.ReplayBufferEnsemble(*some, batch_size=6)
        tell(rb[0] is some[0], rb[-1] is some[1], rb[:] is rb, len(rb))
        for which in (slice(None), slice(0, 2), [0, 1], torch.tensor([0, 1]), np.array([0, 1])):
            tell(rb[which].sample(6).shape, rb[which, :3]["x"], rb[which, 2:4]["deep", "y"].shape)
        tell(rb[[1]].sample(6)["x"].min() >= 1000)
        for part, kind in ((rb.storage, "Storage"), (rb.sampler, "Sampler"), (rb.writer, "Writer")):
            tell(type(part[:]).__name__ == f"{kind}Ensemble", isinstance(part[1], getattr(lib, kind)))

    same(program, tmp_path)


def test_transforms_of_members_and_of_all(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        some = members(lib, 2)
        for rb in some:
            rb.append_transform(lambda data: data.clone().set("z", data["x"] * 2))
        joint = lib.ReplayBufferEnsemble(*some, transform=RenameTransform(["z"], ["w"]), batch_size=8)
        batch = joint.sample()
        tell(batch["w"].shape, bool((batch["w"] == batch["x"] * 2).all()), "z" in batch)

    same(program, tmp_path)


def test_rows_go_to_the_members_that_they_name(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        some = [lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(4)) for _ in range(2)]
        rb = lib.ReplayBufferEnsemble(*some, routing_key="lane", batch_size=4)
        data = TensorDict({"v": torch.arange(6), "lane": torch.tensor([0, 1, 0, 1, 1, 1])}, [6])
        told = rb.extend(data)
        tell(told["buffer_ids"], told["index"], some[0][:]["v"], some[1][:]["v"], len(rb))
        rb.extend(data[1:3])
        tell(some[0][:]["v"], some[1][:]["v"], rb.sample().shape)
        dims = [lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(4)) for _ in range(2)]
        told = lib.ReplayBufferEnsemble(*dims, routing_dim=1).extend(
            TensorDict({"v": torch.tensor([[0, 10], [1, 11]])}, [2, 2])
        )
        tell(told["buffer_ids"], dims[0][:]["v"], dims[1][:]["v"])

    same(program, tmp_path)


# -- writers ---------------------------------------------------------------------------------------


def test_generations_count_overwritings(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        writer = lib.RoundRobinWriter(track_generations=True)
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(4), writer=writer, batch_size=3)
        index = rb.extend(torch.arange(3))
        tell(writer.tracks_generations, writer.generations_of(torch.arange(4)))
        rb.extend(torch.arange(6))
        tell(writer.generations_of(index), writer.generations_of(torch.arange(4)))
        _, info = rb.sample(return_info=True)
        tell((info["index_generation"] == writer.generations_of(info["index"])).all())
        tell(lib.RoundRobinWriter().tracks_generations)

    same(program, tmp_path)


def test_patches_reach_the_rows_they_are_for(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(4), writer=lib.TensorDictRoundRobinWriter(track_generations=True)
        )
        index = rb.extend(TensorDict({"v": torch.zeros(4), "n": torch.full((4,), 5)}, [4]))
        generation = rb.writer.generations_of(index)
        rb.extend(TensorDict({"v": torch.full((1,), 9.0), "n": torch.full((1,), 5)}, [1]))

        def patch(**more: Any) -> Any:
            return rb.update_if_present(
                index=index, generation=generation, patch={"v": torch.arange(1.0, 5.0)}, **more
            )

        done = patch()
        tell(done.updated, done.updated_count, done.stale_count, rb[:]["v"])
        done = patch(version_key="n", version=torch.tensor([9, 4, 5, 6]), require_newer=True)
        tell(done.updated, done.version_rejected, done.version_rejected_count, rb[:]["n"])
        tell.fails(
            lambda: rb.update_if_present(index=index, generation=generation, patch={"q": torch.ones(4)})
        )
        tell.fails(
            lambda: rb.update_if_present(index=index, generation=generation, patch={"v": torch.ones(3)})
        )
        plain = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(4))
        plain.extend(TensorDict({"v": torch.zeros(4)}, [4]))
        if lib.name == "torchrl":  # here every row has an id, and generations follow from it
            tell.fails(
                lambda: plain.update_if_present(
                    index=index, generation=generation, patch={"v": torch.ones(4)}
                )
            )
        else:
            tell.fails(lambda: plain.update_if_present(index=index, patch={"v": torch.ones(4)}))
        tell(rb[:]["v"])

    same(program, tmp_path)


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "mean", "median"])
def test_the_best_rows_are_kept(tmp_path: Path, reduction: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        generator = torch.Generator().manual_seed(3)
        rb = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(5),
            sampler=lib.SamplerWithoutReplacement(),
            writer=lib.TensorDictMaxValueWriter(rank_key="key", reduction=reduction),
            batch_size=5,
        )
        for first, count in ((0, 3), (3, 9), (12, 1), (13, 20)):
            data = numbers(first, count)
            data["key"] = torch.rand(count, 3, generator=generator)
            rb.extend(data)
            tell(len(rb), rb[:]["x"].sort().values)
        for number in range(4):
            row = numbers(100 + number, 1)[0]
            row["key"] = torch.rand(3, generator=generator) * 2
            tell(rb.add(row) in (None, -1), rb[:]["x"].sort().values)  # -1 here, as of extend
        tell(rb.sample()["x"].sort().values)

    same(program, tmp_path)


def test_the_best_rows_of_what_has_no_keys(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), writer=lib.TensorDictMaxValueWriter())
        tell.fails(lambda: rb.extend(torch.arange(3)), "expects data to be a tensor collection")

    same(program, tmp_path)


def test_data_sets_are_not_written(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), writer=lib.ImmutableDatasetWriter())
        tell.fails(lambda: rb.extend(torch.arange(3)), "This dataset doesn't allow writing.")
        tell.fails(lambda: rb.add(torch.tensor(1)), "This dataset doesn't allow writing.")
        tell(len(rb))

    same(program, tmp_path)


# -- queries ---------------------------------------------------------------------------------------


trajectories = partial(whole_trajectories, observation=lambda number: number[:, None].float())


def test_trajectories_are_asked_for(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(20), batch_size=4)
        tell(rb.query())
        rb.extend(trajectories(5, 3, 7))
        traj = lib.traj
        for predicate in (
            None,
            traj.reward.sum() > 6.0,
            (traj.length >= 5) & (traj.reward.mean() > 2.0),
            (traj.length < 5) | (traj.reward.max() > 2.5),
            ~(traj.length >= 5),
            (traj.reward >= 1.0).all(),
            (traj.reward > 2.5).any(),
            traj.observation.first() == 5,
            traj.reward.last() > 2.5,
            (traj["collector", "traj_ids"] == 1).all(),
            traj.total_reward > 6.0,
            lambda one: one.length == 3,
        ):
            found = rb.query(predicate)
            tell([one.length for one in found], [one.observation for one in found])
        one = rb.query()[2]
        tell(one.reward, one.done.shape, len(one), one.total_reward, one[1:3].observation)
        tell.fails(lambda: one.pixels)
        tell.fails(lambda: rb.query(traj.reward > 2.5))

    same(program, tmp_path)


def test_trajectories_of_a_ring_that_came_round(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        rb.extend(trajectories(5, 3))
        more = trajectories(4)
        more["collector", "traj_ids"] += 2
        rb.extend(more)
        tell([one.length for one in rb.query()])
        tell([one.reward for one in rb.query(lib.traj["collector", "traj_ids"].first() == 2)])

    same(program, tmp_path)


def test_trajectories_of_data(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        data = trajectories(5, 3, 7)
        tell([one.length for one in lib.iter_trajectories(data)])
        tell([one.length for one in lib.filter_trajectories(data, lib.traj.length > 4)])
        tell([one.length for one in lib.iter_trajectories(data.exclude("collector"))])
        tell.fails(lambda: list(lib.iter_trajectories(data.select("observation"))), "Cannot split data into")
        tell.fails(lambda: list(lib.iter_trajectories(torch.zeros(3))), "TensorDictBase")
        tell.fails(lambda: list(lib.iter_trajectories(data, trajectory_key="no")), "trajectory_key")
        predicate = (lib.traj.reward.sum() > 1.0) & (lib.traj.length >= 5)
        tell(sorted(predicate.required_keys()), sorted((lib.traj.total_reward > 1.0).required_keys()))

    same(program, tmp_path)


def slices(lib: Any, sampler: Any) -> Any:
    """Return a buffer with four trajectories of ten steps, the last of five."""
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(100), sampler=sampler, batch_size=12)
    x = torch.arange(35)
    ends = ((x % 10 == 9) | (x == 34))[:, None]
    following = {"x": x + 1, "reward": torch.ones(35, 1), "done": ends, "terminated": ends}
    rb.extend(TensorDict({"x": x, "collector": {"traj_ids": x // 10}, "next": following}, [35]))
    return rb


@pytest.mark.parametrize("p", [None, [0.5, 0.5]])
def test_slices_keep_the_fields_beside_their_flags(tmp_path: Path, p: list[float] | None) -> None:
    def program(lib: Any, tell: Teller) -> None:
        parts = [slices(lib, lib.SliceSampler(slice_len=6)) for _ in range(2)]
        rb = lib.ReplayBufferEnsemble(*parts, p=p, sample_from_all=p is None, batch_size=24)
        batch = rb.sample()
        tell(sorted(batch.keys(True, True), key=str))
        tell(bool((batch["next", "x"] == batch["x"] + 1).all()), batch["next", "truncated"].shape)

    same(program, tmp_path)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: OURS.PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=4),
        lambda: OURS.SliceSampler(slice_len=6, strict_length=False, pad_output=True),
    ],
)
def test_an_ensemble_has_every_field_of_its_members(sampler: Callable[[], Any]) -> None:
    # TorchRL's ensemble fails with padded slices.
    parts = [slices(OURS, sampler()) for _ in range(2)]
    batch = OURS.ReplayBufferEnsemble(*parts, sample_from_all=True, batch_size=24).sample()
    lost = set(parts[0].sample().keys(True, True)) - set(batch.keys(True, True))
    assert lost <= {"index", "id"}


@pytest.mark.parametrize("options", [{}, {"sample_from_all": True}, {"p": "sampleable"}])
@pytest.mark.parametrize("sampler", [lambda: None, partial(OURS.SliceSampler, slice_len=4)])
def test_torchrls_ensemble_takes_our_buffers(sampler: Callable[[], Any], options: dict[str, Any]) -> None:
    def double(batch: TensorDict) -> TensorDict:
        return batch.set("double", batch["number"] * 2)

    rbs = []
    for storage in (OURS.LazyTensorStorage(60), OURS.LazyMemmapStorage(60)):
        rb = OURS.TensorDictReplayBuffer(storage=storage, sampler=sampler(), transform=double)
        done = (torch.arange(30) % 10 == 9)[:, None]
        rb.extend(TensorDict({"number": torch.arange(30), ("next", "done"): done}, [30]))
        rbs.append(rb)
    objects = OURS.ReplayBuffer(storage=OURS.ListStorage(60))
    objects.extend([torch.ones(2), torch.ones(2)])
    assert objects._collate_fn(objects.storage.get(range(2))).shape == (2, 2)
    ensemble = theirs.ReplayBufferEnsemble(*rbs, batch_size=16, **options)
    batch = ensemble.sample()
    assert batch.shape == (2, 8)
    assert torch.equal(batch["double"], batch["number"] * 2)
    if sampler() is not None:
        assert (batch["number"].unflatten(1, (2, 4)).diff(dim=-1) == 1).all()
    ensemble[0].extend(TensorDict({"number": torch.arange(3), ("next", "done"): done[:3]}, [3]))
    assert ensemble.stats()["size"] == sum(map(len, rbs))
