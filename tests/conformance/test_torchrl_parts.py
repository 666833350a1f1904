"""Methods of samplers, writers and storages that TorchRL programs call without a buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import OfflineToOnlineReplayBuffer
from torchrl.data.map import QueryModule, TensorDictMap
from torchrl.envs import EnvBase, check_env_specs

import expstore
from expstore.specs import to_torchrl
from expstore.torchrl import ExpStorage
from tests.support.segment_trees import use_trees
from tests.support.torchrl_names import module
from tests.support.torchrl_pair import Teller, numbers, same

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _trees(monkeypatch: pytest.MonkeyPatch) -> None:
    use_trees(monkeypatch)


WRITERS = ("RoundRobinWriter", "TensorDictRoundRobinWriter")


def episodes(lengths: tuple[int, ...]) -> TensorDict:
    """Return rows of episodes: `x` counts them, `episode` names the episode."""
    rows = numbers(0, sum(lengths))
    rows["episode"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    done = torch.zeros(len(rows), 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    rows["next"] = TensorDict({"done": done}, [len(rows)])
    return rows


# -- writers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_writers_write_without_a_buffer(tmp_path: Path, name: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage, writer = lib.LazyTensorStorage(5), getattr(lib, name)()
        writer.register_storage(storage)
        tell(writer.extend(numbers(0, 3)), writer.add(numbers(3, 1)[0]), len(storage))
        tell(writer.extend(numbers(4, 3)), len(storage), storage[:]["x"], storage[1]["deep", "y"])
        if name == "RoundRobinWriter":
            tell.fails(lambda: writer.extend(numbers(0, 0)))

    same(program, tmp_path)


def test_writers_of_a_buffer_write_in_its_order(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(6), batch_size=4)
        rb.extend(numbers(0, 2))
        tell(rb.writer.extend(numbers(2, 3)), rb.writer.add(numbers(5, 1)[0]), rb.extend(numbers(6, 1)))
        tell(rb[:]["x"], rb.write_count, len(rb))

    same(program, tmp_path)


def test_writers_write_steps_of_several_lanes(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage, writer = lib.LazyTensorStorage(12, ndim=2), lib.RoundRobinWriter()
        writer.register_storage(storage)
        tell(writer.extend(numbers(0, 6).reshape(3, 2)), writer.add(numbers(6, 2)), len(storage))

    same(program, tmp_path)


def test_the_best_rows_stay(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        writer = lib.TensorDictMaxValueWriter(rank_key="x")
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(3), writer=writer, batch_size=1)
        tell(writer.extend(numbers(5, 3)))
        tell(writer.add(numbers(9, 1)[0]) >= 0, rb[:]["x"].sort().values)

    same(program, tmp_path)


def test_data_sets_are_not_written(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        writer = lib.ImmutableDatasetWriter()
        writer.register_storage(lib.LazyTensorStorage(3))
        tell(writer.WRITING_ERR)

    same(program, tmp_path)
    storage, writer = expstore.LazyTensorStorage(3), expstore.ImmutableDatasetWriter()
    writer.register_storage(storage)
    for write in (lambda: writer.add(numbers(0, 1)[0]), lambda: writer.extend(numbers(0, 1))):
        with pytest.raises(RuntimeError, match="doesn't allow writing"):
            write()
    assert len(storage) == 0


def test_a_writer_without_a_storage_says_so() -> None:
    with pytest.raises(expstore.errors.StateError, match="no storage"):
        expstore.RoundRobinWriter().extend(numbers(0, 1))


# -- samplers without a buffer ----------------------------------------------------------------------


def by_staleness(lib: Any) -> Any:
    """Return a sampler of a consumer whose policy is the newest that rows are from."""
    sampler = lib.StalenessAwareSampler(version_key="episode")
    sampler.consumer_version = 1
    return sampler


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "random": lambda lib: lib.RandomSampler(),
    "without replacement": lambda lib: lib.SamplerWithoutReplacement(),
    "prioritized": lambda lib: lib.PrioritizedSampler(10, alpha=0.7, beta=0.9),
    "slices": lambda lib: lib.SliceSampler(slice_len=2, traj_key="episode"),
    "slices, by number": lambda lib: lib.SliceSampler(num_slices=2, traj_key="episode"),
    "slices without replacement": lambda lib: lib.SliceSamplerWithoutReplacement(
        slice_len=2, traj_key="episode"
    ),
    "prioritized slices": lambda lib: lib.PrioritizedSliceSampler(
        10, alpha=0.7, beta=0.9, slice_len=2, traj_key="episode"
    ),
    "streaming slices": lambda lib: lib.StreamingSliceSampler(slice_len=2, traj_key="episode"),
    "consuming": lambda lib: lib.ConsumingSampler(2),
    "staleness": by_staleness,
    "prompt groups": lambda lib: lib.PromptGroupSampler(samples_per_group=2, group_key="episode"),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_draw_from_a_storage(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(10), sampler=SAMPLERS[kind](lib), batch_size=4
        )
        rb.extend(episodes((4, 6)))
        index, info = rb.sampler.sample(rb.storage, 4)
        index = index[0] if isinstance(index, tuple) else index
        tell(index.shape, index.dtype, rb.storage[index]["x"].shape)
        known = {key: value for key, value in info.items() if key not in ("index", "id")}
        tell(sorted(map(str, known)), {key: value.shape for key, value in known.items()})
        tell(bool(((index >= 0) & (index < 10)).all()))

    same(program, tmp_path)


def test_samplers_draw_from_several_lanes(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), batch_size=4)
        rb.extend(numbers(0, 6).reshape(3, 2))
        index, info = rb.sampler.sample(rb.storage, 4)
        tell(type(index), [part.shape for part in index], info)

    same(program, tmp_path)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_alone_continues_the_draws_of_the_buffer(kind: str) -> None:
    def make() -> Any:
        storage = expstore.LazyTensorStorage(10, seed=3)
        rb = expstore.TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[kind](expstore), batch_size=4)
        rb.extend(episodes((4, 6)))
        return rb

    one, two = make(), make()
    expected = [one.sample()["index"].tolist() for _ in range(2)]
    assert [two.sampler.sample(two.storage, 4)[0].tolist(), two.sample()["index"].tolist()] == expected


def test_a_generator_of_the_users_is_moved_by_a_sampler_alone() -> None:
    def make() -> Any:
        rb = expstore.ReplayBuffer(
            storage=expstore.LazyTensorStorage(10, seed=3),
            batch_size=4,
            generator=torch.Generator().manual_seed(5),
        )
        rb.extend(torch.arange(10))
        return rb

    one, two = make(), make()
    expected = [one.sample().tolist() for _ in range(3)]
    found = [two.sample().tolist(), two.sampler.sample(two.storage, 4)[0].tolist(), two.sample().tolist()]
    assert found == expected


def test_an_empty_storage_is_refused_by_a_sampler(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        tell.fails(
            lambda: lib.RandomSampler().sample(lib.LazyTensorStorage(3), 2),
            "Cannot sample from an empty storage",
        )

    same(program, tmp_path)


def test_a_sampler_never_attached_draws() -> None:
    storage = expstore.LazyTensorStorage(10, seed=1)
    storage.set(range(4), torch.arange(4))
    index, info = expstore.PrioritizedSampler().sample(storage, 3)
    assert index.shape == (3,)
    assert info["priority_weight"].tolist() == [1.0, 1.0, 1.0]


def test_samplers_are_chosen_by_name(tmp_path: Path) -> None:
    wanted = repr(expstore.PrioritizedSampler())
    for kind in (expstore.ReplayBuffer, expstore.TensorDictReplayBuffer):
        rb = kind(storage=expstore.LazyTensorStorage(10), sampler="prioritized", batch_size=64)
        rb.extend(numbers(0, 4))
        rb.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 0.0, 1e6]))
        assert repr(rb.sampler) == wanted
        assert (rb.sample()["x"] == 3).sum() > 60
    with expstore.open(tmp_path / "a.exp", capacity=10, sampler="prioritized") as rb:
        assert repr(rb.sampler) == wanted
    with pytest.raises(expstore.ArgumentError, match="prioritized"):
        expstore.ReplayBuffer(storage=expstore.LazyTensorStorage(10), sampler="priority")


# -- priorities -------------------------------------------------------------------------------------


def prioritized(lib: Any, **more: Any) -> Any:
    sampler = lib.PrioritizedSampler(10, alpha=1.0, beta=1.0, **more)
    rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), sampler=sampler, batch_size=64)
    rb.extend(numbers(0, 4))
    return rb


def weights(rb: Any) -> list[float]:
    """Return the weight of each row that was drawn, by the row."""
    batch = rb.sample(512)
    found = dict(zip(batch["index"].flatten().tolist(), batch["priority_weight"].tolist(), strict=True))
    return [round(found.get(number, -1.0), 4) for number in range(len(rb))]


def test_a_prioritized_sampler_takes_priorities(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = prioritized(lib)
        sampler = rb.sampler
        tell(float(sampler.default_priority), sampler.device == torch.device("cpu"), sampler.max_size)
        sampler.update_priority(torch.tensor([0, 1, -1]), torch.tensor([4.0, 2.0, 9.0]), storage=rb.storage)
        tell(weights(rb), float(sampler.default_priority))
        sampler.update_priority(torch.tensor([2, 3]), 8.0, storage=rb.storage)
        sampler.update_priority(0, torch.tensor(1.0), storage=rb.storage)
        tell(weights(rb), float(sampler.default_priority), sampler.dtype)
        sampler.add(2)
        sampler.extend(torch.tensor([1, 2]))
        tell(weights(rb))
        sampler.mark_update(torch.tensor([1]), storage=rb.storage)
        tell(weights(rb))
        tell.fails(lambda: sampler.update_priority(torch.tensor([1, 2]), torch.ones(3), storage=rb.storage))

    same(program, tmp_path)


def test_priorities_of_several_lanes(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        sampler = lib.PrioritizedSampler(12, alpha=1.0, beta=1.0)
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=512)
        rb.extend(numbers(0, 6).reshape(3, 2))
        sampler.update_priority(torch.tensor([[0, 1], [1, 2]]), torch.tensor([4.0, 2.0]), storage=rb.storage)
        batch, info = rb.sample(return_info=True)
        found = dict(zip(batch["x"].tolist(), info["priority_weight"].tolist(), strict=True))
        tell([round(found[row], 4) for row in range(6)])

    same(program, tmp_path)


def test_other_samplers_warn_of_priorities(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        sampler = lib.RandomSampler()
        tell(tell.warns(lambda: sampler.update_priority(torch.tensor([0]), 1.0)), sampler.default_priority)

    same(program, tmp_path)


@pytest.mark.parametrize("kind", ["prioritized", "without replacement", "random"])
def test_samplers_are_dumped(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        def make() -> Any:
            torch.manual_seed(0)  # here the order of a pass follows from the seed of the storage
            rb = lib.TensorDictReplayBuffer(
                storage=lib.LazyTensorStorage(10), sampler=SAMPLERS[kind](lib), batch_size=4
            )
            rb.extend(numbers(0, 10))
            return rb

        one, two = make(), make()
        seen = one.sample()["index"].flatten().tolist()
        if kind == "prioritized":
            one.sampler.alpha = one.sampler.beta = 0.25
        one.sampler.dumps(tell.folder / "sampler")
        two.sampler.loads(tell.folder / "sampler")
        if kind == "prioritized":
            tell(two.sampler.alpha, two.sampler.beta)
        rest = [two.sample()["index"].flatten().tolist() for _ in range(2)]
        tell([len(batch) for batch in rest])
        if kind == "without replacement":
            tell(sorted([*seen, *rest[0], *rest[1]]))

    same(program, tmp_path)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_samples_without_priorities(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = prioritized(lib)
        if kind == "uniform":
            rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
            rb.extend(numbers(0, 4))
            rb.update_tensordict_priority(rb.sample())
            return tell(rb.sample(2).shape)
        rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 4.0, 8.0]))
        some = rb[:2]
        some["index"] = torch.arange(2)
        rb.update_tensordict_priority(some)
        tell(weights(rb))
        rb.update_tensordict_priority(some[0])
        return tell(weights(rb))

    same(program, tmp_path)


# -- hooks and attributes ---------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["RandomSampler", "PrioritizedSampler"])
def test_hooks_of_samplers_of_users(tmp_path: Path, base: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        class Noting(getattr(lib, base)):  # type: ignore[misc]
            def __init__(self, *values: Any) -> None:
                super().__init__(*values)
                self.heard: list[Any] = []

            def add(self, index: Any) -> None:
                super().add(index)
                self.heard.append(("add", torch.as_tensor(index).tolist()))

            def extend(self, index: Any) -> None:
                super().extend(index)
                self.heard.append(("extend", torch.as_tensor(index).tolist()))

            def mark_update(self, index: Any, *, storage: Any = None) -> None:
                super().mark_update(index, storage=storage)
                self.heard.append(("mark_update", torch.as_tensor(index).reshape(-1).tolist()))

        sampler = Noting(*((10, 0.7, 0.9) if base == "PrioritizedSampler" else ()))
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(5), sampler=sampler, batch_size=3)
        rb.extend(numbers(0, 4))
        rb.add(numbers(4, 1)[0])
        rb.extend(numbers(5, 2))
        rb.mark_update(torch.tensor([1, 2]))
        tell(sampler.heard, rb.sample().shape)

    same(program, tmp_path)


def test_hooks_are_notified_of_recorder_steps(tmp_path: Path) -> None:
    class Noting(expstore.RandomSampler):
        heard: tuple[Any, ...] = ()

        def add(self, index: Any) -> None:
            self.heard = (*self.heard, index)

    with expstore.open(tmp_path / "a.exp", capacity=10, sampler=Noting()) as rb:
        with rb.record() as recorder:
            for _ in range(3):
                recorder.step([0.0, 0.0], 1, 0.5, [1.0, 1.0], False, False)
        rb.flush()
        assert rb.sampler.heard == (0, 1, 2)


@pytest.mark.parametrize(
    "name", ["SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler"]
)
def test_samplers_of_slices_show_their_settings(tmp_path: Path, name: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        def make(**keywords: Any) -> Any:
            first = (10, 0.7, 0.9) if name == "PrioritizedSliceSampler" else ()
            return getattr(lib, name)(*first, **keywords)

        for one in (
            make(num_slices=3),
            make(slice_len=4, traj_key="episode", strict_length=False),
            make(slice_len=4, traj_key=("collector", "traj_ids"), truncated_key=None, init_key="first"),
        ):
            tell(one.num_slices, one.slice_len, one.traj_key, one.strict_length)
            tell(one.truncated_key, one.init_key, one.span)
        if name == "SliceSampler":
            tell(make(slice_len=4, span=(False, 2)).span, make(slice_len=4, span=True).span)
            tell(make(slice_len=4, strict_length=False, pad_output=True).pad_output)

    same(program, tmp_path)


# -- storages and buffers ---------------------------------------------------------------------------


def test_tensordicts_is_a_keyword_of_extend(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(5), batch_size=3)
        tell(rb.extend(tensordicts=numbers(0, 4)), rb[:]["x"])

    same(program, tmp_path)
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(5))
    with pytest.raises(TypeError, match="give one"):
        rb.extend(numbers(0, 1), tensordicts=numbers(0, 1))
    assert len(rb) == 0


def test_storages_change_rows_without_moving_the_cursor(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage = lib.LazyTensorStorage(6)
        storage.set(range(3), numbers(0, 3))
        storage.set(1, numbers(10, 1)[0], set_cursor=False)
        storage.set([0, 2], numbers(20, 2), set_cursor=False)
        tell(storage[:]["x"], len(storage))

    same(program, tmp_path)
    storage = expstore.LazyTensorStorage(6)
    storage.set(range(3), numbers(0, 3))
    storage.set(torch.tensor([1, 3, 4]), numbers(30, 3))  # TorchRL counts a row there that nobody wrote
    assert storage[:]["x"].tolist() == [0, 30, 2, 31, 32]
    with pytest.raises(IndexError):
        storage.set([2, 6], numbers(0, 2))
    storage = expstore.LazyTensorStorage(6)
    storage.set(range(3), numbers(0, 3))
    with pytest.raises(IndexError):
        storage.set(3, numbers(3, 1)[0], set_cursor=False)
    assert len(storage) == 3


def test_writes_of_several_lanes_are_counted_by_steps(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(12, ndim=2), batch_size=4)
        rb.extend(numbers(0, 6).reshape(2, 3))
        tell(rb.write_count, rb.stats()["write_count"])
        rb.add(numbers(6, 2))
        tell(rb.write_count, rb.stats()["write_count"])

    same(program, tmp_path)


@pytest.mark.parametrize("name", ["LazyTensorStorage", "LazyMemmapStorage"])
def test_load_hooks_run_in_loads(tmp_path: Path, name: str) -> None:
    def make() -> Any:
        return expstore.ReplayBuffer(storage=getattr(expstore, name)(6), batch_size=4)

    one, two, other = make(), make(), make()
    one.extend(numbers(0, 4))
    one.dumps(tmp_path / "versions")
    two.register_load_hook(lambda rows: rows | {"x": rows["x"] + 100})
    two.loads(tmp_path / "versions")
    assert two[:]["x"].tolist() == [100, 101, 102, 103]
    assert two[:]["deep", "y"].flatten().tolist() == [0, 1, 2, 3]
    two.storage.loads(tmp_path / "versions")
    assert two[:]["x"].tolist() == [100, 101, 102, 103]
    other.register_load_hook(lambda rows: {"x": rows["x"]})
    other.extend(numbers(50, 2))
    with pytest.raises(expstore.errors.SchemaError):
        other.loads(tmp_path / "versions")
    assert other[:]["x"].tolist() == [50, 51]
    for rb in (one, two, other):
        rb.close()


def test_stacked_composites_are_as_long_as_their_first_dim(tmp_path: Path) -> None:
    from torchrl.data import tensor_specs

    for lib in (tensor_specs, expstore.specs):
        parts = [lib.Composite(a=lib.Unbounded((size,)), b=lib.Unbounded((1,))) for size in (2, 3, 2)]
        stacked = torch.stack(parts, 0)
        assert (len(stacked), len(stacked[0]), sorted(stacked.keys())) == (3, 2, ["a", "b"])


def test_specs_fit_an_environment_of_torchrls() -> None:
    specs = expstore.specs

    class Env(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = to_torchrl(specs.Composite(observation=specs.Bounded(-1, 1, (3,))))
            self.action_spec = to_torchrl(specs.Composite(action=specs.OneHot(4)))
            self.reward_spec = to_torchrl(specs.Composite(reward=specs.Unbounded((1,))))
            flag = specs.Binary(1, dtype=torch.bool)
            self.full_done_spec = to_torchrl(specs.Composite(done=flag, terminated=flag.clone()))

        def _reset(self, tensordict: Any = None, **keywords: Any) -> TensorDict:
            return self._observe().exclude("reward")

        def _step(self, tensordict: Any) -> TensorDict:
            return self._observe()

        def _observe(self) -> TensorDict:
            end = torch.zeros(1, dtype=torch.bool)
            values = {"observation": torch.zeros(3), "reward": torch.ones(1)}
            return TensorDict({**values, "done": end, "terminated": end.clone()}, [])

        def _set_seed(self, seed: int | None) -> None: ...

    check_env_specs(Env())


# -- what torchrl builds on buffers -------------------------------------------------------------------


@pytest.mark.parametrize("at", ["torchrl", "expstore"])
def test_a_map_of_torchrls_keeps_rows_here(at: str) -> None:
    from torchrl.data import LazyTensorStorage

    storage = (LazyTensorStorage if at == "torchrl" else expstore.LazyTensorStorage)(1000)
    query = QueryModule(in_keys=["key"], index_key="index")
    kept = TensorDictMap(query_module=query, storage=storage, out_keys=["out"], collate_fn=lambda rows: rows)

    def keys(*values: float) -> TensorDict:
        return TensorDict({"key": torch.tensor(values)[:, None]}, [len(values)])

    def rows(*values: float) -> TensorDict:
        return TensorDict({"out": torch.tensor(values)[:, None]}, [len(values)])

    kept[keys(-1, 1, 3)] = rows(10, 20, 30)
    assert kept[keys(3, -1)]["out"].flatten().tolist() == [30, 10]
    kept[keys(1, 7, 8)] = rows(21, 70, 80)
    assert kept[keys(-1, 1, 7, 8)]["out"].flatten().tolist() == [10, 21, 70, 80]
    kept[keys(9, 9)] = rows(1, 2)
    assert kept[keys(9)]["out"].flatten().tolist() == [2]
    assert kept.contains(keys(1, 8)).tolist() == [True, True]
    assert kept.max_size == 1000


@pytest.mark.parametrize("kind", ["torchrl", "expstore"])
def test_hooks_of_the_offline_to_online_trainer(kind: str) -> None:
    offline = expstore.ReplayBuffer(storage=expstore.LazyTensorStorage(20, seed=1), batch_size=4)
    offline.extend(episodes((10, 10)))
    if kind == "expstore":
        rb: Any = expstore.datasets.OfflineToOnlineReplayBuffer(offline, online_capacity=20, batch_size=8)
    else:  # OfflineToOnlineTrainer takes a buffer of this class only
        online = ExpStorage(expstore.LazyTensorStorage(20, seed=2))
        rb = OfflineToOnlineReplayBuffer(offline, online_storage=online, batch_size=8)
    trainers = module("torchrl.trainers.algorithms.offline_to_online")
    hook = trainers.OfflineToOnlineReplayBufferHook(rb)
    batch = episodes((6, 6)).reshape(2, 6)
    batch["loc"] = torch.zeros(2, 6)
    hook.extend(batch)
    assert len(rb.online_buffer) == 12
    assert "loc" not in rb.online_buffer[:]
    assert hook.sample(batch).shape == (8,)

    class Trainer:
        collected_frames = 5

    trainers.OfflineToOnlineAnnealHook(Trainer(), rb, 10)()
    assert rb.offline_fraction == 0.25
    state = hook.state_dict()
    rb.anneal(10, 10)
    hook.load_state_dict(state)
    assert rb.offline_fraction == 0.25
    assert len(rb.online_buffer) == 12
