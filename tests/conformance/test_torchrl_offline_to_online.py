"""TorchRL's OfflineToOnlineTrainer trains on a buffer of expstore."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl.data
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import expstore
from tests.support.torchrl_names import module

pytestmark = pytest.mark.filterwarnings("ignore")

FRAMES = 40


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.layer(torch.cat([observation, action], -1))
        return value


def environment() -> GymEnv:
    env = GymEnv("Pendulum-v1")
    env.set_seed(1)
    return env


def make_trainer(rb: Any, **more: Any) -> Any:
    """Return a trainer whose collector takes 10 steps at a time."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(parts, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
        spec=environment().action_spec,
    )
    loss = SACLoss(actor, ValueOperator(Critic(), in_keys=["observation", "action"]))
    loss.make_value_estimator(gamma=0.9)
    collectors = module("torchrl.collectors")
    return module("torchrl.trainers.algorithms").OfflineToOnlineTrainer(
        collector=collectors.Collector(environment(), actor, frames_per_batch=10, total_frames=FRAMES),
        total_frames=FRAMES,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-3),
        target_net_updater=SoftUpdate(loss, eps=0.9),
        replay_buffer=rb,
        batch_size=8,
        progress_bar=False,
        enable_logging=False,
        **more,
    )


def make_buffer(folder: Path) -> Any:
    offline = expstore.open(folder / "offline.exp", capacity=100, seed=1)
    offline.extend(environment().rollout(30))
    return expstore.datasets.OfflineToOnlineReplayBuffer(
        offline, online_storage=expstore.LazyTensorStorage(100, seed=2), batch_size=8
    )


def test_the_trainer_trains_on_both_parts(tmp_path: Path) -> None:
    rb = make_buffer(tmp_path)
    trainer = make_trainer(expstore.trainers.to_torchrl(rb))
    before = [value.detach().clone() for value in trainer.loss_module.parameters()]
    trainer.train()
    assert trainer.collected_frames == FRAMES
    assert len(rb.online_buffer) == FRAMES
    assert len(rb.offline_buffer) == 30
    assert rb.offline_fraction == 0  # annealed over all frames
    assert "loc" not in rb.online_buffer[:]
    after = list(trainer.loss_module.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    rb.offline_buffer.close()


def test_the_trainer_refuses_the_buffer_itself(tmp_path: Path) -> None:
    rb = make_buffer(tmp_path)
    with pytest.raises(TypeError, match="requires an OfflineToOnlineReplayBuffer"):
        make_trainer(rb)
    rb.offline_buffer.close()


def test_a_trainer_is_saved_and_loaded(tmp_path: Path) -> None:
    rb = make_buffer(tmp_path)
    saving = {"save_trainer_file": tmp_path / "trainer.pt", "save_trainer_interval": 15}
    make_trainer(expstore.trainers.to_torchrl(rb), anneal_frames=2 * FRAMES, **saving).train()
    rows = rb.online_buffer[:]["observation"]
    other = make_buffer(tmp_path / "other")
    make_trainer(expstore.trainers.to_torchrl(other)).load_from_file(
        tmp_path / "trainer.pt", weights_only=False
    )
    assert other.offline_fraction == rb.offline_fraction == 0.25
    assert torch.equal(other.online_buffer[:]["observation"], rows)
    for one in (rb, other):
        one.offline_buffer.close()


def test_only_a_buffer_of_both_kinds_of_rows_is_converted() -> None:
    for wrong in (expstore.ReplayBuffer(), "d4rl:hopper", None):
        with pytest.raises(TypeError, match="to_torchrl takes an OfflineToOnlineReplayBuffer"):
            expstore.trainers.to_torchrl(wrong)


def test_both_objects_are_one_buffer() -> None:
    def make() -> Any:
        offline = expstore.ReplayBuffer(storage=expstore.LazyTensorStorage(10, seed=1))
        offline.extend(torch.arange(10))
        storage = expstore.LazyTensorStorage(10, seed=2)
        return expstore.datasets.OfflineToOnlineReplayBuffer(offline, online_storage=storage, batch_size=4)

    rb, expected = make(), make()
    theirs = expstore.trainers.to_torchrl(rb)
    assert isinstance(theirs, torchrl.data.OfflineToOnlineReplayBuffer)
    assert isinstance(theirs, expstore.datasets.OfflineToOnlineReplayBuffer)
    theirs.extend(torch.arange(20, 30))
    expected.extend(torch.arange(20, 30))
    drawn = [rb.sample().tolist(), theirs.sample().tolist(), rb.sample().tolist()]
    assert drawn == [expected.sample().tolist() for _ in range(3)]
    theirs.anneal(5, 10)
    assert rb.offline_fraction == theirs.offline_fraction == 0.25
    assert len(theirs) == len(rb) == 20
    copy = pickle.loads(pickle.dumps(theirs))
    assert isinstance(copy, torchrl.data.OfflineToOnlineReplayBuffer)
    assert (len(copy), copy.offline_fraction) == (20, 0.25)
