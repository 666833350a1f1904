"""Step transforms outside of a buffer: TorchRL's transforms of the same names take their place."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage as TheirStorage
from torchrl.data import TensorDictReplayBuffer as TheirBuffer
from torchrl.envs import Compose as TheirCompose
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs import transforms as theirs
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

import expstore
from expstore import CatFrames, MultiStepTransform, NextStateReconstructor, Reward2GoTransform
from expstore.errors import MissingMemberError, NotFoundError
from expstore.transforms import Compose, StepTransform


def trajectory(steps: int = 6, *rows: int) -> TensorDict:
    done = torch.zeros(*rows, steps, 1, dtype=torch.bool)
    done[..., -1, :] = True
    next_fields = {"reward": torch.rand(*rows, steps, 1), "done": done, "terminated": done}
    fields = {"observation": torch.rand(*rows, steps, 3), "done": torch.zeros_like(done), "next": next_fields}
    names = [None] * len(rows) + ["time"]
    return TensorDict(
        fields | {"collector": {"traj_ids": torch.zeros(*rows, steps)}}, [*rows, steps], names=names
    )


MAKERS: dict[str, Callable[[Any], Any]] = {
    "CatFrames": lambda lib: lib.CatFrames(
        3, dim=-1, in_keys=["observation"], out_keys=["stack"], mask_key="mask"
    ),
    "CatFrames, padded": lambda lib: lib.CatFrames(
        2, dim=-1, in_keys=["observation"], padding="constant", padding_value=7
    ),
    "Reward2Go": lambda lib: lib.Reward2GoTransform(0.9, out_keys=["to_go"]),
    "NextState": lambda lib: lib.NextStateReconstructor(["observation"], fill_value=0),
    "MultiStep": lambda lib: lib.MultiStepTransform(3, 0.9),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_batches_without_a_store_are_transformed_as_by_torchrl(kind: str) -> None:
    ours, other, batch = MAKERS[kind](expstore), MAKERS[kind](theirs), trajectory()
    for act in (lambda one, rows: one(rows), lambda one, rows: one.inv(rows)):
        found, wanted = act(ours, batch.clone()), act(other, batch.clone())
        assert (found is None) == (wanted is None)
        assert found is None or (found == wanted).all()
    if kind != "MultiStep":  # it keeps earlier batches
        assert (Compose(ours)(batch.clone()) == other(batch.clone())).all()
        assert (nn.Sequential(ours, nn.Identity())(batch.clone()) == other(batch.clone())).all()


def in_a_chain(env: Any, transform: Any) -> TransformedEnv:
    return TransformedEnv(env, TheirCompose(theirs.StepCounter(), transform))


def appended(env: Any, transform: Any) -> TransformedEnv:
    return TransformedEnv(env).append_transform(transform)


def inserted(env: Any, transform: Any) -> TransformedEnv:
    return TransformedEnv(env, theirs.StepCounter()).insert_transform(0, transform)


@pytest.mark.parametrize("place", [TransformedEnv, in_a_chain, appended, inserted])
def test_torchrls_environments_take_them(place: Callable[[Any, Any], TransformedEnv]) -> None:
    found = []
    for lib in (expstore, theirs):
        torch.manual_seed(0)
        frames = lib.CatFrames(3, dim=-1, in_keys=["observation"])
        env = place(ContinuousActionVecMockEnv(seed=0), frames)
        check_env_specs(env)
        assert env.transform.parent is not None
        assert frames.parent is not None
        torch.manual_seed(0)
        env.set_seed(0)
        found.append(env.rollout(5))
    assert (found[0] == found[1]).all()
    assert found[0]["observation"].shape[-1] == 21


def test_torchrls_buffers_take_them() -> None:
    rb = TheirBuffer(storage=TheirStorage(10), transform=Reward2GoTransform(0.9, out_keys=["to_go"]))
    rb.extend(trajectory())
    assert "to_go" in rb.sample(2).keys()  # noqa: SIM118  (a TensorDict)


@pytest.mark.parametrize("kind", MAKERS)
def test_they_stay_ours_in_a_buffer_and_in_copies(kind: str) -> None:
    made = MAKERS[kind](expstore)
    assert isinstance(made, (theirs.Transform, nn.Module))
    assert isinstance(made, StepTransform)
    made.to_torchrl()
    for one in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(one) is type(made)
        assert repr(one) == repr(made)
        rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20), transform=one)
        rb.extend(trajectory())
        assert rb.state_dict()["_transforms"] == {}
        assert rb.sample(4).shape == (4,)
    assert not hasattr(made, "no_such_member")


def test_settings_reach_torchrls_transform() -> None:
    made = MultiStepTransform(3, 0.9)
    assert made.to_torchrl() is made.to_torchrl()
    made.n_steps = 5
    assert made.to_torchrl().n_steps == 5


def test_without_torchrl_they_name_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchrl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrl", None)
    frames: Any = CatFrames(2, dim=-1)
    assert not hasattr(frames, "parent")
    assert type(frames) is frames.__class__
    with pytest.raises(expstore.StateError, match="append_transform.*pip install torchrl"):
        frames({})
    with pytest.raises(MissingMemberError, match="__length__"):
        frames.__length__  # noqa: B018


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_rewards_to_go_of_rows_that_are_trajectories(gamma: float) -> None:
    """Ends within a row end sums, and so does the row's last step."""
    batch = trajectory(10, 8)
    batch["next", "done"][3, 4] = True
    batch["next", "done"][5] = False
    wanted = torch.zeros(8, 10, 1)
    for row in range(8):
        total = torch.zeros(1)
        for step in reversed(range(10)):
            kept = 0.0 if batch["next", "done"][row, step] else gamma
            total = batch["next", "reward"][row, step] + kept * total
            wanted[row, step] = total
    rb = expstore.TensorDictReplayBuffer(
        storage=expstore.LazyTensorStorage(20),
        transform=Reward2GoTransform(
            gamma, in_keys=[("next", "reward")], out_keys=["to_go"], done_key=("next", "done")
        ),
        batch_size=4,
    )
    rb.extend(batch)
    torch.testing.assert_close(rb[:]["to_go"], wanted)
    found = rb.sample()
    torch.testing.assert_close(
        found["to_go"], wanted[found["index"][:, 0] if found["index"].ndim > 1 else found["index"]]
    )
    rb = expstore.TensorDictReplayBuffer(
        storage=expstore.LazyTensorStorage(20), transform=Reward2GoTransform(done_key="over"), batch_size=4
    )
    rb.extend(batch)
    with pytest.raises(NotFoundError, match=r"no field 'next\.over'"):
        rb.sample()
    rb.append_transform(NextStateReconstructor(["observation"]))
    with pytest.raises(expstore.SchemaError, match="one step per row"):
        rb.sample()
