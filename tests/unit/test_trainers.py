"""Buffers as hooks of a training loop: next to TorchRL's own, inside its Trainer, and without it.

The environment's observations contain lane, episode and step, so that each row shows where it belongs.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

import expstore
from expstore import ReplayBufferTrainer
from tests.support.torchrl_names import module

theirs = module("torchrl.trainers")
their_data = module("torchrl.data")
Checkpoint = module("torchrl.checkpoint").Checkpoint
Collector = module("torchrl.collectors").Collector
GymEnv = module("torchrl.envs").GymEnv
EGreedyModule = module("torchrl.modules").EGreedyModule
QValueModule = module("torchrl.modules").QValueModule
DQNLoss = module("torchrl.objectives").DQNLoss
SoftUpdate = module("torchrl.objectives").SoftUpdate
DQNTrainer = module("torchrl.trainers.algorithms").DQNTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl"),
    pytest.mark.filterwarnings("ignore::FutureWarning:expstore.trainers"),  # hooks that TorchRL would rename
]


def batch_of(lanes: int, steps: int, first: int = 0, **more: torch.Tensor) -> TensorDict:
    """Return steps of episodes that do not end: lane and step of each. Batch size `[lanes, steps]`."""
    step = torch.arange(first, first + steps).expand(lanes, steps)
    observed = torch.stack([torch.arange(lanes)[:, None].expand(lanes, steps), step], -1)
    flags = {name: torch.zeros(lanes, steps, 1, dtype=torch.bool) for name in ("done", "truncated")}
    following = {
        "observation": observed + torch.tensor([0, 1]),
        "reward": torch.ones(lanes, steps, 1),
        **flags,
    }
    return TensorDict({"observation": observed, "next": following, **more}, [lanes, steps])


# -- beside TorchRL's own -----------------------------------------------------------------------------------


def both(**keywords: Any) -> tuple[Any, Any]:
    """Return a hook of ours and one of TorchRL's, each over a storage of whatever rows are."""
    ours = ReplayBufferTrainer(
        expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(100), batch_size=4), **keywords
    )
    other = theirs.ReplayBufferTrainer(
        their_data.TensorDictReplayBuffer(storage=their_data.LazyTensorStorage(100), batch_size=4), **keywords
    )
    return ours, other


def stored(hook: Any) -> TensorDict:
    rows: TensorDict = hook.replay_buffer[:]
    return rows.exclude("index")


def test_it_takes_torchrls_arguments() -> None:
    for name in ("__init__", "extend", "sample", "update_priority", "register"):
        ours, other = (
            inspect.signature(getattr(c, name)) for c in (ReplayBufferTrainer, theirs.ReplayBufferTrainer)
        )
        assert list(ours.parameters) == list(other.parameters)
        for parameter in other.parameters.values():
            if parameter.default is not parameter.empty:
                assert ours.parameters[parameter.name].default == parameter.default
    asked = {name for name in dir(theirs.ReplayBufferTrainer) if not name.startswith("_")}
    assert asked == {name for name in dir(ReplayBufferTrainer) if not name.startswith("_")}


def test_steps_that_are_marked_become_rows() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for hook in both(flatten_tensordicts=True):
        data = batch_of(2, 3)
        data["collector", "mask"] = mask
        rows = hook.extend(data)
        assert rows["observation"].tolist() == [[0, 0], [0, 1], [1, 0]]
        assert stored(hook)["observation"].tolist() == rows["observation"].tolist()


def test_all_steps_become_rows_and_lanes_end_as_truncated() -> None:
    ours, other = both(flatten_tensordicts=True)
    data = batch_of(2, 3)
    rows = ours.extend(data)
    assert rows["next", "truncated"].squeeze(-1).tolist() == [False, False, True] * 2
    assert not data["next", "truncated"].any(), "the batch belongs to the collector"
    assert torch.equal(rows["observation"], other.extend(batch_of(2, 3))["observation"])
    assert (stored(ours).exclude(("next", "truncated")) == stored(other).exclude(("next", "truncated"))).all()
    # TorchRL sets the last entry of the flag's own dim, and so every step's.
    assert stored(other)["next", "truncated"].all()
    assert torch.equal(stored(ours)["next", "truncated"], rows["next", "truncated"])


def test_flags_without_a_dim_of_their_own_are_as_torchrls() -> None:
    for hook in both(flatten_tensordicts=True):
        data = batch_of(2, 3)
        data["next", "truncated"] = data["next", "truncated"].squeeze(-1)
        assert hook.extend(data)["next", "truncated"].tolist() == [False, False, True] * 2


def test_batches_without_flags_are_flattened() -> None:
    for hook in both(flatten_tensordicts=True):
        data = batch_of(2, 3).exclude(("next", "truncated"))
        assert hook.extend(data).shape == (6,)
        assert len(hook.replay_buffer) == 6


def test_trajectories_are_filled_up() -> None:
    ours, other = both(max_dims=[-1, 5])
    for hook in (ours, other):
        for steps in (3, 5):
            rows = hook.extend(batch_of(2, steps))
            assert rows.shape == (2, 5)
    assert stored(ours).shape == (4, 5)
    assert (stored(ours) == stored(other)).all()
    assert not stored(ours)["next", "reward"][:2, 3:].any()


def test_trajectories_are_rows_without_max_dims() -> None:
    ours, other = both()
    for hook in (ours, other):
        hook.extend(batch_of(2, 3))
    assert (stored(ours) == stored(other)).all()


def test_samples_are_of_the_size_and_on_the_device_that_were_asked_for() -> None:
    for hook, size in ((both()[0], 4), (both(batch_size=3)[0], 3), (both(device="cpu")[0], 4)):
        hook.extend(batch_of(6, 2))
        assert hook.sample(None).shape == (size, 2)
    assert both(device="cpu")[0].device == torch.device("cpu")
    hook = both(device="meta")[0]
    hook.extend(batch_of(6, 2))
    assert hook.sample().device == torch.device("meta")


def test_an_iteration_ends_and_restarts() -> None:
    for home, make in ((expstore, ReplayBufferTrainer), (their_data, theirs.ReplayBufferTrainer)):
        rb = home.TensorDictReplayBuffer(
            storage=home.LazyTensorStorage(6), sampler=home.SamplerWithoutReplacement(), batch_size=2
        )
        hook = make(rb, iterate=True)
        hook.extend(batch_of(6, 2))
        for _ in range(2):
            seen = [hook.sample(None)["observation"][:, 0, 0] for _ in range(3)]
            assert sorted(torch.cat(seen).tolist()) == [0, 1, 2, 3, 4, 5]
            with pytest.raises(StopIteration):
                hook.sample(None)


# -- in a store of transitions ------------------------------------------------------------------------------


@pytest.mark.parametrize("flatten", [False, True])
def test_lanes_continue_with_the_next_batch(store_path: Path, flatten: bool) -> None:
    """Nothing but the lane says to which episode a row belongs."""
    with expstore.open(store_path, batch_size=4, seed=1) as rb:
        hook = ReplayBufferTrainer(rb, flatten_tensordicts=flatten)
        for first in (0, 5, 10):
            rows = hook.extend(batch_of(3, 5, first))
            assert rows.shape == ((15,) if flatten else (3, 5))
        assert rb.sql("SELECT length, status FROM episodes").fetchall() == [(15, "open")] * 3
        for episode in (1, 2, 3):
            observed = rb.trajectory(episode)["observation"]
            assert observed[:, 1].tolist() == list(range(15))
            assert observed[:, 0].unique().numel() == 1


def test_masked_steps_are_told_apart_by_their_trajectories(store_path: Path) -> None:
    """Split trajectories stand in other lanes each time."""
    with expstore.open(store_path, batch_size=4, seed=1) as rb:
        hook = ReplayBufferTrainer(rb, flatten_tensordicts=True)
        # One step of trajectory 8 is padding in the first batch.
        second = torch.stack([batch_of(2, 3, 2)[1], batch_of(2, 3, 3)[0]])
        for first, data, names in ((0, batch_of(2, 3, 0), [7, 8]), (3, second, [8, 7])):
            data["collector"] = TensorDict(
                {
                    "traj_ids": torch.tensor(names)[:, None].expand(2, 3),
                    "mask": torch.tensor([[True, True, True], [True, True, first > 0]]),
                },
                [2, 3],
            )
            hook.extend(data)
        lengths = rb.sql("SELECT trajectory_id, length FROM episodes ORDER BY 1").fetchall()
        assert lengths == [(7, 6), (8, 5)]


def test_priorities_reach_the_rows_that_were_sampled(store_path: Path) -> None:
    sampler = expstore.PrioritizedSampler(alpha=1.0, beta=1.0)
    with expstore.open(store_path, batch_size=4, seed=1, sampler=sampler) as rb:
        hook = ReplayBufferTrainer(rb, flatten_tensordicts=True)
        hook.extend(batch_of(2, 10))
        sample = hook.sample()
        hook.update_priority(sample.set("td_error", torch.full((4,), 7.0)))
        found = rb.sql("SELECT _id FROM transitions WHERE _priority > 6 ORDER BY 1").fetchall()
        assert [row for (row,) in found] == sorted(set(sample["id"].tolist()))
        again = hook.sample()
        hook.update_priority(again)  # without td_error: the priority of new rows, as in TorchRL
        ids = ", ".join(map(str, again["id"].tolist()))
        lowest = rb.sql(f"SELECT min(_priority), max(_priority) FROM transitions WHERE _id IN ({ids})")
        assert lowest.fetchone() == (7.0, 7.0)
        rb.set_sampler(expstore.RandomSampler())
        hook.update_priority(hook.sample())  # nobody draws by them


def test_members_of_an_ensemble_are_one_source_of_batches() -> None:
    buffers = [
        expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(50, seed=number), batch_size=4)
        for number in range(2)
    ]
    hook = ReplayBufferTrainer(
        expstore.ReplayBufferEnsemble(*buffers, batch_size=4, routing_key="robot"), flatten_tensordicts=True
    )
    hook.extend(batch_of(2, 5, robot=torch.arange(2)[:, None].expand(2, 5)))
    assert [len(rb) for rb in buffers] == [5, 5]
    assert hook.sample().shape == (2, 2)
    hook.update_priority(hook.sample())
    state = hook.state_dict()
    expected = hook.sample()["observation"]
    hook.load_state_dict(state)
    assert torch.equal(hook.sample()["observation"], expected)


# -- what is refused ----------------------------------------------------------------------------------------


def test_meaningless_arguments_are_refused_with_a_reason(store_path: Path) -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(10), batch_size=2)
    with pytest.raises(ValueError, match="memmap=True is not supported: stores on disk"):
        ReplayBufferTrainer(rb, memmap=True)
    with pytest.raises(ValueError, match="nothing to pad"):
        ReplayBufferTrainer(rb, flatten_tensordicts=True, max_dims=[5])
    with pytest.raises(ValueError, match="buffer's own batch_size, 2, not batch_size=3"):
        ReplayBufferTrainer(rb, batch_size=3, iterate=True)
    ReplayBufferTrainer(rb, batch_size=2, iterate=True)
    with (
        expstore.open(store_path) as transitions,
        pytest.raises(ValueError, match="zeros would be stored as steps"),
    ):
        ReplayBufferTrainer(transitions, max_dims=[-1, 5])


def test_priorities_need_a_buffer_that_says_which_rows_it_gave() -> None:
    sampler = expstore.PrioritizedSampler(10, 0.6, 0.4)
    plain = expstore.ReplayBuffer(storage=expstore.LazyTensorStorage(10), sampler=sampler)
    with pytest.raises(ValueError, match="Prioritized sampler not supported for replay buffer trainer"):
        ReplayBufferTrainer(plain)
    member = expstore.TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=expstore.LazyTensorStorage(10)
    )
    with pytest.raises(ValueError, match="this is a ReplayBufferEnsemble"):
        ReplayBufferTrainer(expstore.ReplayBufferEnsemble(member))
    ReplayBufferTrainer(member)


def test_batches_that_do_not_fit_are_refused() -> None:
    hook = both(max_dims=[-1, 2])[0]
    with pytest.raises(expstore.errors.SchemaError, match=r"\[2, 3\], and max_dims=\[-1, 2\] is smaller"):
        hook.extend(batch_of(2, 3))
    with pytest.raises(
        expstore.errors.SchemaError, match=r"max_dims=\[-1, 2\] has 2 sizes, the batch has 1 dims"
    ):
        hook.extend(batch_of(2, 3)[0])
    assert len(hook.replay_buffer) == 0


def test_buffers_of_others_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got a torchrl\..*; torchrl.trainers.ReplayBufferTrainer takes"):
        ReplayBufferTrainer(their_data.ReplayBuffer(storage=their_data.LazyTensorStorage(10)))  # type: ignore[arg-type]
    for buffer in (None, "x", expstore.ReplayBuffer):
        with pytest.raises(
            TypeError, match=r"must be a buffer of expstore, got .*; expstore.open\(\) returns"
        ):
            ReplayBufferTrainer(buffer)  # type: ignore[arg-type]
    for options in ({"batch_size": "x"}, {"max_dims": 3}, {"max_dims": ["x"]}):
        with pytest.raises(TypeError, match=next(iter(options))):
            both(**options)


def test_invalid_batches_are_refused() -> None:
    member = expstore.TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=expstore.LazyTensorStorage(10)
    )
    hook: Any = ReplayBufferTrainer(member)
    for batch in (None, [1]):
        with pytest.raises(TypeError, match="batch must be a TensorDict, got"):
            hook.extend(batch)
        with pytest.raises(TypeError, match="priorities are read from a sample, a TensorDict, got"):
            hook.update_priority(batch)
    with pytest.raises(TypeError, match="registered with a torchrl Trainer, not with None"):
        hook.register(None)


@pytest.mark.parametrize("state", [{"buffer": {}}, None, {"replay_buffer": None}])
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    with pytest.raises(expstore.errors.StateError, match="not a state of a ReplayBufferTrainer"):
        both()[0].load_state_dict(state)


# -- inside TorchRL's Trainer -------------------------------------------------------------------------------


class Run:
    """A DQN learns CartPole by TorchRL's Trainer out of a buffer.

    Args:
        rb: Which one.
        frames: How many steps are collected.
        keywords: Of the Trainer.
    """

    def __init__(self, rb: Any, frames: int, **keywords: Any) -> None:
        torch.manual_seed(0)
        environment = GymEnv("CartPole-v1", categorical_action_encoding=True)
        spec = environment.action_spec
        network = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["action_value"])
        policy = TensorDictSequential(network, QValueModule(spec=spec))
        explore = EGreedyModule(spec, annealing_num_steps=frames)
        loss = DQNLoss(policy, action_space=spec, delay_value=False)
        loss.make_value_estimator(gamma=0.99)
        self.collector = Collector(
            environment, TensorDictSequential(policy, explore), frames_per_batch=20, total_frames=frames
        )
        self.seen: list[TensorDict] = []
        self.hook = ReplayBufferTrainer(rb, flatten_tensordicts=True)
        self.trainer = theirs.Trainer(
            collector=self.collector,
            total_frames=frames,
            frame_skip=1,
            optim_steps_per_batch=2,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters()),
            progress_bar=False,
            seed=0,
            save_trainer_interval=10_000,
            **keywords,
        )
        self.hook.register(self.trainer)
        self.trainer.register_op("process_optim_batch", self.note)

    def note(self, batch: TensorDict) -> TensorDict:
        self.seen.append(batch)  # the loss adds what it has to say
        return batch


@pytest.fixture
def rb(store_path: Path) -> Iterator[expstore.TensorDictReplayBuffer]:
    sampler = expstore.PrioritizedSampler(alpha=0.6, beta=0.4)
    with expstore.open(store_path, batch_size=16, sampler=sampler, seed=3) as rb:
        yield rb


def test_a_trainer_learns_from_a_store(rb: expstore.TensorDictReplayBuffer) -> None:
    run = Run(rb, 100)
    before = run.trainer.loss_module.value_network_params.data.clone()
    run.trainer.train()
    assert run.trainer.collected_frames == rb.write_count == 100
    assert len(run.seen) == 10
    assert all(batch.shape == (16,) for batch in run.seen)
    assert not (before == run.trainer.loss_module.value_network_params.data).all()
    # Priorities were set to what the loss said of the rows.
    last = run.seen[-1]
    asked = dict(zip(last["id"].tolist(), last["td_error"].flatten().tolist(), strict=True))
    found = dict(rb.sql("SELECT _id, _priority FROM transitions").fetchall())
    assert asked == {row: found[row] for row in asked}


@pytest.mark.guarantee("draw/next")
@pytest.mark.parametrize("backend", ["torch", "unified"])
def test_a_loaded_trainer_continues_with_the_next_batches(
    backend: str, tmp_path: Path, store_path: Path
) -> None:
    file = tmp_path / "trainer"
    keywords: dict[str, Any] = {"checkpoint": Checkpoint()} if backend == "unified" else {}
    with expstore.open(store_path, batch_size=16, seed=3) as rb:
        run = Run(rb, 60, save_trainer_file=file, **keywords)
        run.trainer.train()  # saves itself at the end
        expected = [rb.sample()["observation"] for _ in range(3)]
    with expstore.open(store_path, batch_size=16) as rb:
        assert not torch.equal(rb.sample()["observation"], expected[0]), "three batches further"
        keywords = {"checkpoint": Checkpoint()} if backend == "unified" else {}
        again = Run(rb, 60, **keywords)
        again.trainer.load_from_file(file)
        assert again.trainer.collected_frames == 60
        assert all(torch.equal(again.hook.sample()["observation"], batch) for batch in expected)
        weights = [one.trainer.loss_module.value_network_params.data for one in (run, again)]
        assert (weights[0] == weights[1]).all()
        again.collector.shutdown()


@pytest.mark.filterwarnings("ignore:DQNTrainer is an experimental")
@pytest.mark.parametrize("beside", [False, True])
def test_torchrls_trainers_take_our_buffers(rb: expstore.TensorDictReplayBuffer, beside: bool) -> None:
    """With TorchRL's own hook; or while the collector writes by itself, in a thread."""
    torch.manual_seed(0)
    environment = GymEnv("CartPole-v1", categorical_action_encoding=True)
    spec = environment.action_spec
    network = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["action_value"])
    policy, explore = TensorDictSequential(network, QValueModule(spec=spec)), EGreedyModule(spec)
    loss = DQNLoss(policy, action_space=spec, delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    collector = Collector(
        environment,
        TensorDictSequential(policy, explore),
        frames_per_batch=20,
        total_frames=-1 if beside else 100,
        replay_buffer=rb if beside else None,
        auto_register_policy_transforms=False,
    )
    trainer = DQNTrainer(
        collector=collector,
        total_frames=1_000_000 if beside else 100,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        replay_buffer=rb,
        target_net_updater=SoftUpdate(loss, eps=0.99),
        greedy_module=explore,
        progress_bar=False,
        enable_logging=False,
        async_collection=beside,
    )

    def enough() -> None:
        if rb.write_count >= 100 and trainer._optim_count >= 10:
            trainer.request_stop()

    if beside:
        trainer.register_op("post_steps", enough)
    trainer.train()
    if beside:
        collector.async_shutdown()
    assert rb.write_count >= 100
    assert trainer._optim_count >= 10
    assert rb.sql("SELECT count(*) FROM transitions WHERE _priority <> 1").fetchall()[0][0] > 10
    assert rb.sql("SELECT sum(length) FROM episodes").fetchall() == [(rb.write_count,)]


def test_the_state_of_a_hook_is_that_of_its_buffer() -> None:
    ours, _ = both()
    ours.extend(batch_of(6, 2))
    state = ours.state_dict()
    expected = ours.sample()["observation"]
    ours.load_state_dict(state)
    assert torch.equal(ours.sample()["observation"], expected)
    fresh, _ = both()
    fresh.load_state_dict(state)
    assert torch.equal(fresh.sample()["observation"], expected)


@pytest.mark.parametrize("members", [1, 2])
def test_a_hook_that_is_loaded_ends_open_episodes(members: int, tmp_path: Path) -> None:
    """Collectors restart when a trainer is loaded: their rows never continue episodes of before."""
    with contextlib.ExitStack() as stack:
        buffers = [
            stack.enter_context(expstore.open(tmp_path / f"{number}.exp", batch_size=4))
            for number in range(members)
        ]
        one = buffers[0] if members == 1 else expstore.ReplayBufferEnsemble(*buffers, batch_size=4)
        hook = ReplayBufferTrainer(one, flatten_tensordicts=True)
        for first in (0, 5):  # the observations join: only the load tells that the episodes are over
            for rb in buffers:
                rb.extend(batch_of(2, 5, first))
            hook.load_state_dict(hook.state_dict())
        for rb in buffers:
            rb.extend(batch_of(2, 5, 10))
            found = rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
            assert found == [(5, "cut")] * 4 + [(5, "open")] * 2


# -- without TorchRL ----------------------------------------------------------------------------------------


def test_a_custom_loop_needs_no_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl", None)  # as if it were not installed
    rb = expstore.TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=expstore.MemoryStorage(100, seed=1), batch_size=8
    )
    hook = ReplayBufferTrainer(rb, flatten_tensordicts=True)
    for first in range(0, 20, 4):
        hook.extend(batch_of(2, 4, first))
        hook.update_priority(hook.sample().set("td_error", torch.rand(8)))
    hook.load_state_dict(hook.state_dict())
    assert len(rb) == 40
