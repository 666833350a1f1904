"""Specs of expstore as the specs of TorchRL's environments, in place of TorchRL's own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torchrl.data
from tensordict import NonTensorData, TensorDict
from torchrl.envs import (
    CatFrames,
    EnvBase,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import RandomPolicy

from expstore import specs
from tests.support.paths import ROOT
from tests.support.torchrl_names import module

pytestmark = pytest.mark.filterwarnings("ignore")


def same(spec: Any) -> Any:
    return spec


class Env(EnvBase):  # type: ignore[misc]
    """Return the same values at each step, as its specs say.

    Args:
        action: Spec of one action, without the batch size.
        size: Of an observation.
        task: A text that is part of observations; None: it is not.
        convert: What is done to each spec before it is set.
    """

    def __init__(
        self,
        action: Any = None,
        *,
        batch_size: tuple[int, ...] = (),
        device: str | None = None,
        size: int = 3,
        task: str | None = None,
        convert: Any = same,
    ) -> None:
        super().__init__(batch_size=torch.Size(batch_size), device=device)
        self.size, self.task = size, task
        observed = {"observation": self._batch(specs.Bounded(-1, 1, (size,)))}
        if task is not None:
            observed["task"] = specs.NonTensor(batch_size, example_data=task)
        deep = specs.Composite(x=self._batch(specs.Unbounded((2,))), shape=batch_size)
        self.observation_spec = convert(specs.Composite(**observed, deep=deep, shape=batch_size))
        self.action_spec = convert(self._batch(specs.OneHot(4) if action is None else action))
        self.reward_spec = convert(
            specs.Composite(reward=self._batch(specs.Unbounded((1,))), shape=batch_size)
        )
        flag = self._batch(specs.Binary(1, dtype=torch.bool))
        self.full_done_spec = convert(
            specs.Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch_size)
        )

    def _batch(self, spec: Any) -> Any:
        return spec.expand(*self.batch_size, *spec.shape)

    def _reset(self, tensordict: Any = None, **keywords: Any) -> TensorDict:
        return self._observe().exclude("reward")

    def _step(self, tensordict: Any) -> TensorDict:
        return self._observe()

    def _observe(self) -> TensorDict:
        batch = tuple(self.batch_size)
        end = torch.zeros(*batch, 1, dtype=torch.bool)
        values = {
            "observation": torch.zeros(*batch, self.size),
            "deep": {"x": torch.zeros(*batch, 2)},
            "reward": torch.ones(*batch, 1),
            **{name: end.clone() for name in ("done", "terminated", "truncated")},
        }
        if self.task is not None:
            values["task"] = NonTensorData(self.task, batch)
        return TensorDict(values, batch, device=self.device)

    def _set_seed(self, seed: int | None) -> None: ...


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)])
@pytest.mark.parametrize(
    "action",
    [
        specs.OneHot(4),
        specs.Categorical(4),
        specs.Bounded(-1, 1, (2,)),
        specs.MultiCategorical([2, 3]),
        specs.Composite(action=specs.OneHot(4), other=specs.Unbounded((2,))),
    ],
    ids=lambda action: type(action).__name__,
)
def test_an_environment_passes_torchrls_check(
    action: Any, batch_size: tuple[int, ...], device: str | None
) -> None:
    if device is not None:
        action = action.to(device)
    env = Env(action, batch_size=batch_size, device=device)
    check_env_specs(env)
    steps = env.rollout(4)
    assert steps.shape == (*batch_size, 4)
    assert steps["next", "reward"].sum() == steps.numel()
    assert env.full_action_spec.is_in(steps[..., 0].select(*env.action_keys))
    assert isinstance(env.observation_spec, specs.Composite)
    assert isinstance(env.observation_spec, torchrl.data.Composite)
    assert isinstance(env.observation_spec["observation"], torchrl.data.BoundedContinuous)


def test_a_spec_of_another_space_fails_the_check() -> None:
    env = Env()
    env.set_spec_lock_(False)
    env.observation_spec = specs.Composite(
        observation=specs.Bounded(1, 2, (3,)), deep=specs.Composite(x=specs.Unbounded((2,)))
    )
    with pytest.raises(AssertionError):
        check_env_specs(env)


def test_an_environment_locks_its_specs() -> None:
    env = Env()
    for change in (
        lambda: env.observation_spec.set("more", specs.Unbounded((1,))),
        lambda: env.observation_spec["deep"].set("more", specs.Unbounded((1,))),
        lambda: env.observation_spec.unlock_(),
        lambda: env.observation_spec["deep"].unlock_(),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    env.set_spec_lock_(False)
    env.observation_spec["deep"].set("more", specs.Unbounded((1,)))
    env.set_spec_lock_(True)
    assert env.observation_spec["deep"].is_locked
    copy = pickle.loads(pickle.dumps(env.output_spec))
    assert copy["full_observation_spec", "deep"].is_locked
    assert copy == env.output_spec


def test_torchrls_transforms_add_to_the_specs() -> None:
    env = TransformedEnv(Env(), StepCounter(3))
    env.append_transform(RewardSum())
    env.append_transform(InitTracker())
    check_env_specs(env)
    steps = env.rollout(10)
    assert steps["next", "step_count"].flatten().tolist() == [1, 2, 3]
    assert steps["next", "episode_reward"].flatten().tolist() == [1, 2, 3]
    assert steps["is_init"].flatten().tolist() == [True, False, False]


def test_transforms_that_change_specs_in_place_need_torchrls_own() -> None:
    def frames(convert: Any) -> TransformedEnv:
        return TransformedEnv(Env(convert=convert), CatFrames(2, -1, in_keys=["observation"]))

    with pytest.raises(TypeError, match="to_torchrl"):
        _ = frames(same).observation_spec
    env = frames(specs.to_torchrl)
    check_env_specs(env)
    assert env.observation_spec["observation"].shape == (6,)
    spec = specs.Unbounded((2,))
    with pytest.raises(TypeError, match="the dtype of a spec"):
        spec.dtype = torch.float64
    assert spec.dtype == torch.float32


def test_environments_are_run_as_one() -> None:
    env = SerialEnv(2, Env)
    check_env_specs(env)
    assert env.rollout(3).shape == (2, 3)
    env = SerialEnv(2, [lambda: Env(task="push"), lambda: Env(task="pull")])
    assert env.rollout(3)[1]["task"] == ["pull"] * 3
    assert isinstance(env.observation_spec["task"], specs.Stacked)


def test_a_collector_takes_steps() -> None:
    env = TransformedEnv(Env(), StepCounter(3))
    collector = module("torchrl.collectors").Collector(
        env, RandomPolicy(env.action_spec), frames_per_batch=6, total_frames=12
    )
    assert [batch.shape for batch in collector] == [(6,), (6,)]
    collector.shutdown()


def test_composites_convert_specs_of_torchrl() -> None:
    theirs = torchrl.data
    spec = specs.Composite(a=specs.Unbounded((1,)), deep=specs.Composite(x=specs.Unbounded((2,))))
    spec["b"] = theirs.OneHot(4)
    spec.set(("deep", "y"), theirs.Bounded(0, 1, (3,)))
    spec.update({"deep": theirs.Composite(z=theirs.Categorical(5))})
    assert type(spec["b"]) is specs.OneHot
    assert type(spec["deep", "y"]) is specs.BoundedContinuous
    assert sorted(spec["deep"].keys()) == ["x", "y", "z"]
    assert type(spec["deep", "z"]) is specs.Categorical
    for wrong in (3, torch.zeros(2), "OneHot"):
        with pytest.raises(TypeError, match="give a spec"):
            spec.set("c", wrong)  # type: ignore[arg-type]
    assert "c" not in spec


@pytest.mark.slow
def test_torchrl_may_be_imported_after_expstore_and_is_not_imported_by_it() -> None:
    """Unpickled specs are instances of TorchRL's classes, too, although no constructor runs."""
    program = f"""
import pickle, sys
from expstore import specs
assert specs.OneHot(3).n == 3
assert "torchrl" not in sys.modules
import torchrl.data
found = pickle.loads({pickle.dumps(specs.Composite(a=specs.Bounded(0, 1, (2,))))!r})
assert isinstance(found, torchrl.data.Composite), type(found)
assert isinstance(found["a"], torchrl.data.Bounded)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True, timeout=100)
