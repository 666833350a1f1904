"""Schedulers have the same values as TorchRL's, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from torchrl.data.replay_buffers import PrioritizedSampler as TheirSampler
from torchrl.data.replay_buffers import scheduler as theirs

from expstore import MemoryStorage, PrioritizedSampler, TensorDictReplayBuffer, schedulers

CASES: list[tuple[str, dict[str, Any]]] = [
    ("LinearScheduler", {"final_value": 1.0, "num_steps": 7}),
    ("StepScheduler", {"gamma": 0.1, "n_steps": 3, "mode": "additive", "max_value": 0.65}),
    ("StepScheduler", {"gamma": 0.5, "n_steps": 2, "min_value": 0.1}),
    ("LambdaScheduler", {"lambda_fn": lambda steps: 1 + steps / 10, "max_value": 0.7}),
]


class _Holder(TheirSampler):
    """TorchRL's sampler without its compiled trees, which a scheduler does not touch."""

    def __init__(self) -> None:
        self.beta = 0.4

    alpha: Any = None
    beta: Any = None


@pytest.mark.parametrize(("name", "keywords"), CASES)
def test_values_are_those_of_torchrl(name: str, keywords: dict[str, Any]) -> None:
    sampler, other = PrioritizedSampler(beta=0.4), _Holder()
    rb = TensorDictReplayBuffer(storage=MemoryStorage(10), sampler=sampler)
    ours = schedulers.SchedulerList(getattr(schedulers, name)(rb, "beta", **keywords))
    reference = getattr(theirs, name)(other, "beta", **keywords)
    for _ in range(12):
        ours.step()
        reference.step()
        assert sampler.beta == pytest.approx(float(other.beta))


def test_the_state_goes_to_another_scheduler() -> None:
    one, other = PrioritizedSampler(beta=0.4), PrioritizedSampler(beta=0.9)
    first = schedulers.StepScheduler(one, "beta", gamma=1.5, n_steps=2)
    second = schedulers.StepScheduler(other, "beta", gamma=1.5, n_steps=2)
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        first.step()
        second.step()
        assert one.beta == other.beta


def test_invalid_arguments_are_refused() -> None:
    sampler = PrioritizedSampler()
    with pytest.raises(TypeError, match="ReplayBuffer or a Sampler"):
        schedulers.LinearScheduler(3, "beta", 1.0, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no attribute 'gamma'"):
        schedulers.LinearScheduler(sampler, "gamma", 1.0, 10)
    with pytest.raises(ValueError, match="Invalid mode"):
        schedulers.StepScheduler(sampler, "beta", mode="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_steps"):
        schedulers.LinearScheduler(sampler, "beta", 1.0, 0)
