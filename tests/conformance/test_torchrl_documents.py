"""The code blocks of TorchRL's documents about buffers run with only the imports replaced.

One test per block, retyped: stores are small, data sets are small files of the same formats, environments are
the installed ones, and names that TorchRL has removed are replaced by their successors.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import minari
import numpy as np
import pytest
import torch
import torchrl.data
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from tensordict import TensorDict

import expstore
from expstore import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomCropTensorDict,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReplayBufferTrainer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from expstore.datasets import AtariDQNExperienceReplay, MinariExperienceReplay
from expstore.trajectories import MultiStep, split_trajectories
from tests.support.atari_files import LoggedRing, play

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
    from torchrl import collectors
    from torchrl.envs import CatTensors, Compose, GymEnv, SerialEnv
    from torchrl.envs.utils import RandomPolicy
    from torchrl.trainers import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl"),
]

#: Names of the documents that TorchRL no longer has, or calls otherwise.
RENAMED = {
    "SyncDataCollector": collectors.Collector,
    "MultiSyncDataCollector": collectors.MultiSyncCollector,
    "ParallelEnv": SerialEnv,  # the same data, of one process
}
SyncDataCollector = RENAMED["SyncDataCollector"]
MultiSyncDataCollector = RENAMED["MultiSyncDataCollector"]
ParallelEnv = RENAMED["ParallelEnv"]

#: Stands for the first of Minari's public data sets.
MAZE = "test/antmaze-v0"

tqdm = SimpleNamespace(tqdm=iter)  # it only draws a bar


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


@pytest.fixture(scope="module", autouse=True)
def _data_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the data sets that the documents name where the classes look for them."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPSTORE_DATA", str(folder / "stores"))
        for number, name in enumerate(("Pong/5", "Asterix/5")):
            ring = LoggedRing(folder / name / "replay_logs", slots=400)
            play(ring, 700, number, shortest=70, longest=90)
            AtariDQNExperienceReplay(name, source=folder / name / "replay_logs").close()
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
        create_maze(np.random.default_rng(3))
        MinariExperienceReplay(MAZE, load_from_local_minari=True).close()
        yield


def create_maze(random: np.random.Generator) -> None:
    """Have Minari make a data set with the observations of AntMaze."""
    shapes = {"observation": 27, "achieved_goal": 2, "desired_goal": 2}
    episodes = [
        EpisodeBuffer(
            id=number,
            observations={name: random.normal(size=(51, size)) for name, size in shapes.items()},
            actions=random.normal(size=(50, 8)).astype("f4"),
            rewards=random.normal(size=50).tolist(),
            terminations=[False] * 50,
            truncations=[False] * 49 + [True],
            infos={"goal": random.normal(size=(51, 2))},
        )
        for number in range(4)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it was not told
        minari.create_dataset_from_buffers(
            MAZE,
            buffer=episodes,
            observation_space=spaces.Dict(
                {name: spaces.Box(-np.inf, np.inf, (size,)) for name, size in shapes.items()}
            ),
            action_space=spaces.Box(-np.inf, np.inf, (8,)),
        )


@pytest.mark.guarantee("torchrl/programs")
def test_a_data_set_is_gone_through() -> None:
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=128)
    for data in dataset:
        print(data)
        break
    assert data.shape == (128,)
    assert data["observation"].shape == data["next", "observation"].shape == (128, 84, 84)
    assert data["next", "reward"].dtype == torch.float32
    # The frame after the last step of an episode is not recorded, nor is that after the last row.
    inside = ~data["next", "done"][:, 0] & (data["index"] != len(dataset) - 1)
    frames = data["observation"][inside, 0, 0].int(), data["next", "observation"][inside, 0, 0].int()
    assert ((frames[1] - frames[0]) % 250 == 1).all()
    assert data["index"].dtype == torch.int64
    assert data["metadata"]["dataset_id"] == "Pong/5"
    with pytest.raises(RuntimeError, match="open for reading only"):
        dataset.extend(data)


def test_a_data_set_is_drawn_in_slices() -> None:
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=128, slice_len=64)
    for data in dataset:
        print(data)
        print(data.get("index"))  # indices are in 4 groups of consecutive values
        break
    index = data.get("index").reshape(2, 64)
    assert (index.diff(dim=1) == 1).all()
    assert data["next", "truncated"].shape == (128, 1)
    assert data["next", "done"].reshape(2, 64)[:, -1].all()


def test_data_sets_are_put_together() -> None:
    dataset_asterix = AtariDQNExperienceReplay("Asterix/5", batch_size=128, slice_len=64, num_procs=4)
    dataset_pong = AtariDQNExperienceReplay("Pong/5", batch_size=128, slice_len=64, num_procs=4)
    dataset = ReplayBufferEnsemble(dataset_pong, dataset_asterix, batch_size=128, sample_from_all=True)
    sample = dataset.sample()
    print("first sample, Asterix", sample[0])
    print("second sample, Pong", sample[1])
    print("Aggregate (metadata hidden)", sample)
    assert sample.shape == (2, 64)
    assert sample["index", "buffer_ids"].tolist() == [[0] * 64, [1] * 64]
    assert (sample["index", "index"].diff(dim=1) == 1).all()
    assert sample["observation"].shape == (2, 64, 84, 84)
    for number, name in enumerate(("Pong/5", "Asterix/5")):
        assert sample[number]["metadata"]["dataset_id"] == name


def test_a_transform_is_inverted() -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=4)
    data = TensorDict({"a": torch.zeros(10)}, [10])

    def t(data: Any) -> Any:
        data += 1
        return data

    rb.append_transform(t, invert=True)
    rb.extend(data)
    assert (data == 1).all()
    assert (rb[:]["a"] == 1).all()


def test_a_prioritized_buffer_is_saved_and_loaded() -> None:
    # Build and populate the replay buffer
    S = 10_000
    sampler = PrioritizedSampler(S, 1.1, 1.0)
    # sampler = RandomSampler()
    storage = LazyMemmapStorage(S)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)

    for _ in tqdm.tqdm(range(10)):
        td = TensorDict(
            {
                "obs": torch.randn(100, 3, 4),
                "next": {"obs": torch.randn(100, 3, 4)},
                "td_error": torch.rand(100),
            },
            [100],
        )
        rb.extend(td)
        sample = rb.sample(32)
        rb.update_tensordict_priority(sample)
    # save and load the buffer
    with tempfile.TemporaryDirectory() as tmpdir:
        rb.dumps(tmpdir)

        sampler = PrioritizedSampler(S, 1.1, 1.0)
        # sampler = RandomSampler()
        storage = LazyMemmapStorage(S)
        rb_load = TensorDictReplayBuffer(storage=storage, sampler=sampler)
        rb_load.loads(tmpdir)
        assert len(rb) == len(rb_load)
    assert (rb_load[:]["obs"] == rb[:]["obs"]).all()
    assert (rb_load.sample(32)["obs"] == rb.sample(32)["obs"]).all()


def test_a_data_set_is_made_into_another() -> None:
    data = MinariExperienceReplay(MAZE, batch_size=32)
    print(data)
    cat_tensors = CatTensors(
        in_keys=[
            ("observation", "observation"),
            ("observation", "achieved_goal"),
            ("observation", "desired_goal"),
        ],
        out_key="obs",
    )
    cat_next_tensors = CatTensors(
        in_keys=[
            ("next", "observation", "observation"),
            ("next", "observation", "achieved_goal"),
            ("next", "observation", "desired_goal"),
        ],
        out_key=("next", "obs"),
    )
    t = Compose(cat_tensors, cat_next_tensors)

    def func(td: Any) -> Any:
        td = td.select(
            "action",
            "episode",
            ("next", "done"),
            ("next", "observation"),
            ("next", "reward"),
            ("next", "terminated"),
            ("next", "truncated"),
            "observation",
        )
        td = t(td)
        return td

    with tempfile.TemporaryDirectory() as tmpdir:
        new_storage = data.preprocess(func, num_workers=4, pbar=True, mp_start_method="fork", dest=tmpdir)
        rb = ReplayBuffer(storage=new_storage)
        print(rb)
        rows, source = rb[:], data[:]
        assert rb.sample(5)["next", "obs"].shape == (5, 31)
        assert rb.sql("SELECT count(*) FROM episodes").fetchall() == [(4,)]
        rb.close()
    assert len(rows) == 200
    wanted = func(source)
    assert wanted["obs"].shape == wanted["next", "obs"].shape == (200, 31)
    for key in wanted.keys(True, True):
        torch.testing.assert_close(rows[key], wanted[key])
    data.close()


@pytest.fixture(name="policy")
def a_policy() -> RandomPolicy:
    return RandomPolicy(make_env().action_spec)


def closing(collector: Any, times: int) -> Iterator[Any]:
    """Yield some batches of a collector, whose documents go on for ever."""
    try:
        for number, data in enumerate(collector, 1):
            yield data
            if number == times:
                return
    finally:
        collector.shutdown()


def check_slices(memory: ReplayBuffer, slices: int, batch: int) -> None:
    """Each slice of a sample is of one trajectory, its steps in order."""
    sample = memory.sample(batch).reshape(slices, -1)
    names = sample["collector", "traj_ids"]
    assert (names == names[:, :1]).all()
    following = sample["next", "observation"][:, :-1]
    assert torch.equal(sample["observation"][:, 1:], following)


def test_single_transitions_out_of_a_collector() -> None:
    N = 200
    memory = ReplayBuffer(storage=LazyTensorStorage(N), transform=lambda data: data.reshape(-1))
    env = ParallelEnv(2, make_env)
    collector = SyncDataCollector(env, RandomPolicy(env.action_spec), frames_per_batch=20, total_frames=-1)
    for data in closing(collector, 3):
        memory.extend(data)
    assert len(memory) == 6  # rows are what the lanes did in a batch: 10 steps each
    assert memory.sample(4).shape == (40,)


def test_slices_of_one_environment(policy: RandomPolicy) -> None:
    # Single environment: no need for a multi-dimensional buffer
    N = 100
    memory = ReplayBuffer(
        storage=LazyTensorStorage(N),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids")),
    )
    collector = SyncDataCollector(make_env(), policy, frames_per_batch=N, total_frames=-1)
    for data in closing(collector, 2):
        memory.extend(data)
    assert len(memory) == N
    check_slices(memory, 4, 20)


def test_slices_of_batched_environments() -> None:
    # Batched environments: a multi-dim buffer is required
    N = 120
    memory = ReplayBuffer(
        storage=LazyTensorStorage(N, ndim=2),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids")),
    )
    env = ParallelEnv(4, make_env)
    collector = SyncDataCollector(env, RandomPolicy(env.action_spec), frames_per_batch=N, total_frames=-1)
    for data in closing(collector, 2):
        memory.extend(data)
    assert len(memory) == N
    check_slices(memory, 4, 20)


@pytest.mark.usefixtures("forking")
def test_slices_of_several_collectors(policy: RandomPolicy) -> None:
    # MultiSyncDataCollector + regular env: behaves like a ParallelEnv if cat_results="stack"
    N = 120
    memory = ReplayBuffer(
        storage=LazyTensorStorage(N, ndim=2),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids")),
    )
    collector = MultiSyncDataCollector(
        [make_env] * 2, policy, frames_per_batch=N, total_frames=-1, cat_results="stack"
    )
    for data in closing(collector, 1):
        memory.extend(data)
    assert len(memory) == N
    check_slices(memory, 4, 20)


@pytest.mark.usefixtures("forking")
def test_slices_of_several_collectors_of_batched_environments() -> None:
    # MultiSyncDataCollector + parallel env: the ndim must be adapted accordingly
    N = 120
    memory = ReplayBuffer(
        storage=LazyTensorStorage(N, ndim=3),
        sampler=SliceSampler(num_slices=4, trajectory_key=("collector", "traj_ids")),
    )
    policy = RandomPolicy(ParallelEnv(2, make_env).action_spec)
    collector = MultiSyncDataCollector(
        [ParallelEnv(2, make_env)] * 2, policy, frames_per_batch=N, total_frames=-1, cat_results="stack"
    )
    for data in closing(collector, 1):
        memory.extend(data)
    assert len(memory) == N
    check_slices(memory, 4, 20)


def test_the_tutorial_of_collectors(tmp_path: Path, policy: RandomPolicy) -> None:
    torch.manual_seed(0)
    env = make_env()
    env.set_seed(0)
    collector = SyncDataCollector(env, policy, frames_per_batch=200, total_frames=-1)
    for data in collector:
        print(data)
        break
    print(data["collector", "traj_ids"])

    buffer = ReplayBuffer(storage=LazyMemmapStorage(max_size=1000))
    indices = buffer.extend(data)
    assert len(buffer) == collector.frames_per_batch
    sample = buffer.sample(batch_size=30)
    print(sample)
    assert indices.tolist() == list(range(200))
    assert sample.shape == (30,)
    assert sample["observation"].shape == (30, 4)
    assert sample["action"].dtype == torch.int64
    assert sample["next", "reward"].shape == (30, 1)
    assert sample["collector", "traj_ids"].shape == (30,)
    collector.shutdown()


def test_pseudo_code_of_the_tutorial(policy: RandomPolicy) -> None:
    storage = ReplayBuffer(storage=LazyMemmapStorage(1000), batch_size=16)
    collector = SyncDataCollector(make_env(), policy, frames_per_batch=50, total_frames=100)
    seen = 0
    for data in collector:
        storage.extend(data)
        for _ in range(2):
            sample = storage.sample()
            seen += len(sample)
    assert seen == 64
    collector.shutdown()


# -- trajectories, n-step rewards, hooks and specs ----------------------------------------------------


def test_stored_trajectories_are_sampled_in_part() -> None:
    # "create a storage of size 1M when storing multidimensional data ... 1M trajectories"
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(20), transform=RandomCropTensorDict(sub_seq_len=16), batch_size=4
    )
    steps = torch.arange(50).expand(10, 50) + 100 * torch.arange(10)[:, None]
    rb.extend(TensorDict({"observation": steps}, [10, 50]))
    assert len(rb) == 10
    data = rb.sample()
    assert data.shape == (4, 16)
    assert (data["observation"].diff(dim=1) == 1).all()
    assert torch.equal(data["observation"] // 100, data["index"])


def test_collected_rows_are_split_into_trajectories(policy: RandomPolicy) -> None:
    collector = SyncDataCollector(make_env(), policy, frames_per_batch=200, total_frames=-1)
    for rollout_tensordict in closing(collector, 1):
        trajectories = split_trajectories(rollout_tensordict)
    names = rollout_tensordict["collector", "traj_ids"]
    lengths = names.unique_consecutive(return_counts=True)[1]
    mask = trajectories["collector", "mask"]
    assert torch.equal(mask.sum(1), lengths)
    assert torch.equal(trajectories["observation"][mask], rollout_tensordict["observation"])
    assert not trajectories["observation"][~mask].any()


def test_a_collector_sums_rewards_over_steps(policy: RandomPolicy) -> None:
    collector = SyncDataCollector(
        make_env(), policy, frames_per_batch=100, total_frames=-1, postproc=MultiStep(gamma=0.9, n_steps=3)
    )
    buffer = ReplayBuffer(storage=LazyMemmapStorage(1000))
    for data in closing(collector, 2):
        buffer.extend(data)
    rows = buffer[:]
    count = rows["steps_to_next_obs"]
    assert set(count.tolist()) == {1, 2, 3}
    assert (rows["next", "original_reward"] == 1).all()  # of this environment
    summed = (1 - 0.9**count) / (1 - 0.9)
    torch.testing.assert_close(rows["next", "reward"][:, 0], summed)
    within = [row for row in range(97) if count[row] == 3 and not rows["next", "done"][row + 2]]
    ahead = rows["observation"][[row + 3 for row in within]]
    assert within
    assert torch.equal(rows["next", "observation"][within], ahead)
    torch.testing.assert_close(rows["gamma"], 0.9**count)


@pytest.mark.filterwarnings("ignore:The 'post_loss' hook stage:FutureWarning")
def test_a_buffer_is_hooked_into_a_trainer(policy: RandomPolicy) -> None:
    N = 8
    replay_buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(200))
    seen = []

    class Loss(torch.nn.Module):
        """Say how far a guess is off, of each row."""

        def __init__(self) -> None:
            super().__init__()
            self.guess = torch.nn.Linear(4, 1)

        def forward(self, data: TensorDict) -> TensorDict:
            error = (self.guess(data["observation"]) - data["next", "reward"]).abs()
            seen.append(data.set("td_error", error.detach()[:, 0]))
            return TensorDict({"loss": error.mean()}, [])

    loss = Loss()
    trainer = Trainer(
        collector=SyncDataCollector(make_env(), policy, frames_per_batch=40, total_frames=80),
        total_frames=80,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        progress_bar=False,
    )
    rb_trainer = ReplayBufferTrainer(replay_buffer=replay_buffer, batch_size=N, flatten_tensordicts=True)
    trainer.register_op("batch_process", rb_trainer.extend)
    trainer.register_op("process_optim_batch", rb_trainer.sample)
    trainer.register_op("post_loss", rb_trainer.update_priority)
    trainer.train()
    assert len(replay_buffer) == 80
    assert [data.shape for data in seen] == [(N,)] * 4
    told = dict(zip(seen[-1]["index"].tolist(), seen[-1]["td_error"].tolist(), strict=True))
    found = dict(replay_buffer.sql("SELECT _index, _priority FROM transitions").fetchall())
    assert {index: found[index] for index in told} == pytest.approx(told)


def test_the_hook_registers_itself() -> None:
    registered: dict[str, Any] = {}
    trainer = SimpleNamespace(
        register_op=lambda place, hook, **kwargs: registered.setdefault(place, hook),
        register_module=lambda name, module: registered.setdefault(name, module),
    )
    rb_trainer = ReplayBufferTrainer(
        replay_buffer=TensorDictReplayBuffer(storage=LazyTensorStorage(10)), batch_size=2
    )
    rb_trainer.register(trainer)
    assert registered["replay_buffer"] is rb_trainer
    assert registered["process_optim_batch"] == rb_trainer.sample


#: The specs of the document, with the arguments that it names, and what TorchRL calls them now.
SPECS: dict[str, tuple[tuple[Any, ...], str]] = {
    "BinaryDiscreteTensorSpec": ((4,), "Binary"),
    "BoundedTensorSpec": ((-1.0, 1.0, (3,)), "Bounded"),
    "DiscreteTensorSpec": ((5,), "Categorical"),
    "MultiDiscreteTensorSpec": (([2, 3],), "MultiCategorical"),
    "MultiOneHotDiscreteTensorSpec": (([2, 3],), "MultiOneHot"),
    "OneHotDiscreteTensorSpec": ((5,), "OneHot"),
    "UnboundedContinuousTensorSpec": (((3,),), "UnboundedContinuous"),
    "UnboundedDiscreteTensorSpec": (((3,),), "UnboundedDiscrete"),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs_have_the_names_of_the_document(name: str) -> None:
    arguments, now = SPECS[name]
    spec, other = getattr(expstore.specs, name)(*arguments), getattr(torchrl.data, now)(*arguments)
    assert isinstance(spec, expstore.specs.TensorSpec)
    assert (spec.shape, spec.dtype, spec.domain) == (other.shape, other.dtype, other.domain)
    value = other.rand()
    assert spec.is_in(value)
    assert other.is_in(spec.rand())


def test_specs_are_composed_under_the_name_of_the_document() -> None:
    spec = expstore.specs.CompositeSpec(
        {"observation": expstore.specs.UnboundedContinuousTensorSpec((4,))},
        action=expstore.specs.OneHotDiscreteTensorSpec(2),
    )
    row = spec.rand()
    assert spec.is_in(row)
    assert set(row.keys()) == {"observation", "action"}
    assert (row["observation"].shape, row["action"].shape) == ((4,), (2,))
