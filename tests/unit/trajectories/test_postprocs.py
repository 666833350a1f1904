"""N-step rewards and spread rewards of rollouts, compared with plain loops and with TorchRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import DensifyReward as TheirDensify
from torchrl.data import MultiStep as TheirMultiStep

from expstore.errors import SchemaError
from expstore.trajectories import DensifyReward, MultiStep

flags = st.lists(st.booleans(), min_size=1, max_size=12)


def rollout(done: Any, *, seed: int = 0) -> TensorDict:
    """Steps with rewards of their own; time last."""
    drawn = torch.Generator().manual_seed(seed)
    ends = torch.as_tensor(done)
    shape = [*ends.shape]
    return TensorDict(
        {
            "x": torch.arange(ends.numel()).reshape(shape),
            "next": {
                "done": ends[..., None],
                "terminated": ends[..., None].clone(),
                "x": torch.arange(1, ends.numel() + 1).reshape(shape),
                "image": torch.rand(*shape, 2, 2, generator=drawn),
                "reward": torch.randn(*shape, 1, generator=drawn),
            },
        },
        shape,
    )


def close(made: Any, other: Any) -> None:
    assert made.batch_size == other.batch_size
    assert set(made.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        assert made[key].dtype == other[key].dtype, key
        torch.testing.assert_close(made[key], other[key])


# -- MultiStep ----------------------------------------------------------------------------------------


@given(flags, st.integers(1, 4), st.integers(1, 15), st.sampled_from([1.0, 0.9]))
def test_lanes_are_torchrls(done: list[bool], lanes: int, n_steps: int, gamma: float) -> None:
    data = rollout([done[lane:] + done[:lane] for lane in range(lanes)])
    before = data.clone()
    close(MultiStep(gamma, n_steps)(data), TheirMultiStep(gamma, n_steps)(data.clone()))
    close(data, before)


@pytest.mark.parametrize("agents", [(3,), (3, 1)])
def test_flags_of_agents_are_torchrls(agents: tuple[int, ...]) -> None:
    drawn = torch.Generator().manual_seed(1)
    shape = (2, 6, *agents)
    data = TensorDict(
        {
            "x": torch.rand(*shape, generator=drawn),
            "next": {
                "done": torch.rand(shape, generator=drawn) < 0.3,
                "x": torch.rand(*shape, 2, generator=drawn),
                "reward": torch.rand(shape, generator=drawn),
            },
        },
        [2, 6],
    )
    close(MultiStep(0.9, 3)(data), TheirMultiStep(0.9, 3)(data.clone()))


def test_masked_steps_are_skipped() -> None:
    data = rollout([[False] * 4, [False, True, False, False]])
    data["collector", "mask"] = torch.tensor([[True] * 3 + [False], [True, True, False, False]])
    made = MultiStep(1.0, 3)(data)
    assert made["steps_to_next_obs"][0, :3].tolist() == [3, 2, 1]
    assert made["next", "x"][0, :3].tolist() == [3, 3, 3]
    assert made["nonterminal"].tolist() == [[True, True, False, False], [True, False, False, False]]
    other = TheirMultiStep(1.0, 3)(data.clone())
    close(made[1, :2], other[1, :2])  # where the flag says so, too, TorchRL stops


def test_whole_rewards_become_real() -> None:
    data = rollout([False, False])
    data["next", "reward"] = torch.tensor([[1], [1]])
    assert MultiStep(0.5, 2)(data)["next", "reward"].tolist() == [[1.5], [1.0]]


def test_numbers_out_of_bounds_are_refused() -> None:
    for wrong in ({"n_steps": 0, "gamma": 0.9}, {"n_steps": 2, "gamma": 0.0}, {"n_steps": 2, "gamma": 1.1}):
        with pytest.raises(ValueError, match=r"non-negative integer|out-of-bounds gamma") as ours:
            MultiStep(**wrong)
        with pytest.raises(ValueError, match=".") as theirs:
            TheirMultiStep(**wrong)
        assert str(ours.value).startswith(str(theirs.value))


def test_invalid_numbers_are_refused() -> None:
    for gamma in (None, "x"):
        with pytest.raises(TypeError, match=f"gamma is a discount.*{gamma!r}"):
            MultiStep(gamma, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive, not 0"):
        MultiStep(0.9, 0)


def test_batches_that_do_not_fit_are_refused() -> None:
    data = rollout([False, True])
    with pytest.raises(SchemaError, match=r"no 'next\.reward'.*'next\.done'"):
        MultiStep(0.9, 2)(data.exclude(("next", "reward")))
    with pytest.raises(SchemaError, match=r"no 'next\.done'"):
        MultiStep(0.9, 2)(data.exclude(("next", "done")))
    agents = data.clone().set(("next", "done"), torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="shape must be compatible with the done's shape"):
        MultiStep(0.9, 2)(agents)


def test_state_dict_and_repr_are_those_of_a_module() -> None:
    ours, theirs = MultiStep(0.9, 3), TheirMultiStep(0.9, 3)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.gammas, theirs.gammas)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == "MultiStep(gamma=0.9, n_steps=3)"


# -- DensifyReward ------------------------------------------------------------------------------------


@given(flags, st.integers(1, 3), st.sampled_from([1.0, 0.9]))
def test_spread_rewards_are_torchrls(done: list[bool], lanes: int, discount: float) -> None:
    data = rollout([done[lane:] + done[:lane] for lane in range(lanes)])
    keywords: dict[str, Any] = {"reward_key_out": "spread", "discount": discount}
    made = DensifyReward(**keywords)(data.clone())
    close(made, TheirDensify(**keywords)(data.clone()))
    assert torch.equal(made["next", "reward"], data["next", "reward"])


def test_rewards_of_64_bits_are_spread_with_64_bits() -> None:
    reward = torch.ones(2000, 1, dtype=torch.float64)
    done = torch.zeros(2000, 1, dtype=torch.bool)
    made = DensifyReward(discount=0.999)(TensorDict({"next": {"reward": reward, "done": done}}, [2000]))
    assert made["next", "reward"][0].item() == pytest.approx((1 - 0.999**2000) / (1 - 0.999), rel=1e-12)


@pytest.mark.parametrize("beyond", [math.inf, -math.inf, math.nan])
def test_rewards_beyond_an_end_do_not_count(beyond: float) -> None:
    reward, done = torch.tensor([[1.0], [2.0], [beyond], [4.0]]), torch.tensor([[0], [1], [1], [0]]).bool()
    data = TensorDict({"next": {"reward": reward, "done": done}}, [4])
    first, second, _, last = DensifyReward()(data.clone())["next", "reward"][:, 0].tolist()
    assert (first, second, last) == (3.0, 2.0, 4.0)
    made = DensifyReward(discount=0.0)(data)["next", "reward"]
    assert torch.equal(made.nan_to_num(), reward.nan_to_num())


def test_another_dim_may_be_time() -> None:
    reward = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    data = TensorDict({"next": {"reward": reward, "done": torch.zeros(2, 2, dtype=torch.bool)}}, [2])
    assert DensifyReward()(data.clone())["next", "reward"].tolist() == [[2.0, 1.0], [2.0, 0.0]]
    assert DensifyReward(time_dim=-1)(data.clone())["next", "reward"].tolist() == [[1.0, 1.0], [2.0, 0.0]]
    with pytest.raises(RuntimeError, match=r"time_dim=5 .*shape \[2, 2\]"):
        DensifyReward(time_dim=5)(data)


def test_rewards_that_do_not_fit_are_refused() -> None:
    data = TensorDict({"next": {"reward": torch.zeros(3, 1), "done": torch.zeros(3, dtype=torch.bool)}}, [3])
    with pytest.raises(RuntimeError, match="expected to have the same shape"):
        DensifyReward()(data)
    with pytest.raises(SchemaError, match=r"no 'next\.gain'"):
        DensifyReward(reward_key="gain")(data)
