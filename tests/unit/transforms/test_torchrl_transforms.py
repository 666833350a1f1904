"""TorchRL's transforms in buffers of expstore behave as in TorchRL's buffers.

The tables below have every transform that TorchRL's documents show with a replay buffer, and more. A
transform that cannot be used in a buffer raises the same error in both.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import expstore
from tests.support.torchrl_pair import OURS, THEIRS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
    from torchrl import data as theirs
    from torchrl.data.vla import UniformActionTokenizer
    from torchrl.envs import transforms as T
    from torchrl.envs.transforms import rb_transforms
    from torchrl.envs.transforms._keys import FlattenTensorDict
    from torchrl.modules import GRUModule

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
]

REWARD = ("next", "reward")
LENGTH = 6


def rows(count: int, first: int = 0) -> TensorDict:
    """Return steps of episodes of `LENGTH`, which follow one another. Batch size `[count]`."""
    number = torch.arange(first, first + count)
    random = torch.Generator().manual_seed(first)
    done = ((number + 1) % LENGTH == 0)[:, None]
    visible = torch.stack([number, number % LENGTH, -number], -1).float()
    pixels = (torch.arange(count * 4 * 4 * 3).reshape(count, 4, 4, 3) % 251).to(torch.uint8)
    return TensorDict(
        {
            "observation": visible,
            "double": visible.double(),
            "pixels": pixels,
            "action": torch.nn.functional.one_hot(torch.randint(3, (count,), generator=random), 3),
            "motion": torch.randn(count, 2, generator=random),
            "grid": torch.randn(count, 6, generator=random),
            "success": done.clone(),
            "policy_version": number // 5,
            "collector": {"traj_ids": number // LENGTH},
            "step_count": (number % LENGTH)[:, None],
            "is_init": (number % LENGTH == 0)[:, None].float(),
            "hidden": torch.zeros(count, 1, 4),
            "next": {
                "observation": visible + torch.tensor([1.0, 1.0, -1.0]),
                "reward": torch.randn(count, 1, generator=random),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
            "done": torch.zeros_like(done),
        },
        [count],
    )


def trajectories(count: int, first: int = 0) -> TensorDict:
    """Return whole episodes, each a row. Batch size `[count, LENGTH]`."""
    return rows(count * LENGTH, first * LENGTH).reshape(count, LENGTH)


def pixels(*more: Any) -> Any:
    return T.Compose(T.ToTensorImage(in_keys=["pixels"]), *more)


def gru() -> GRUModule:
    torch.manual_seed(0)
    keys = {"in_keys": ["observation", "hidden"], "out_keys": ["intermediate", ("next", "hidden")]}
    return GRUModule(input_size=3, hidden_size=4, default_recurrent_mode=True, **keys)


def linear() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["embedded"])


Made = Callable[[], Any]

#: On rows that are steps.
STEPS: dict[str, Made] = {
    "ActionScaling": lambda: T.ActionScaling(loc=1.0, scale=2.0, in_keys=["motion"], in_keys_inv=["motion"]),
    "ActionTokenizerTransform": lambda: T.ActionTokenizerTransform(
        UniformActionTokenizer(256, low=-4.0, high=4.0), in_key="motion"
    ),
    "BinarizeReward": lambda: T.BinarizeReward(in_keys=[REWARD]),
    "CatFrames": lambda: T.CatFrames(
        N=3, dim=-1, in_keys=["observation", ("next", "observation")], padding="same"
    ),
    "CatTensors": lambda: T.CatTensors(in_keys=["observation", "motion"], out_key="both", del_keys=False),
    "ClipTransform": lambda: T.ClipTransform(
        in_keys=["observation"], in_keys_inv=["motion"], low=-1.0, high=1.0
    ),
    "Compose": lambda: T.Compose(
        T.ExcludeTransform("pixels"), T.Compose(T.RewardScaling(1.0, 2.0, in_keys=[REWARD]))
    ),
    "DTypeCastTransform": lambda: T.DTypeCastTransform(
        torch.float32, torch.float16, in_keys=["observation"], in_keys_inv=[]
    ),
    "DeviceCastTransform": lambda: T.DeviceCastTransform("cpu"),
    "DiscreteActionProjection": lambda: T.DiscreteActionProjection(num_actions_effective=2, max_actions=3),
    "DoubleToFloat": lambda: T.DoubleToFloat(in_keys=["double"], in_keys_inv=["double"]),
    "ExcludeTransform": lambda: T.ExcludeTransform("pixels", "index", ("next", "done")),
    "ExcludeTransform-inverse": lambda: T.ExcludeTransform("pixels", inverse=True),
    "FiniteTensorDictCheck": T.FiniteTensorDictCheck,
    "FlattenAction": lambda: T.FlattenAction(in_keys_inv=["grid"], action_shape=(2, 3)),
    "FlattenObservation": lambda: T.FlattenObservation(-3, -1, in_keys=["pixels"]),
    "FlattenTensorDict": FlattenTensorDict,
    "GrayScale": lambda: pixels(T.GrayScale(in_keys=["pixels"])),
    "LineariseRewards": lambda: T.LineariseRewards(in_keys=[REWARD], weights=[1.0]),
    "ModuleTransform": lambda: T.ModuleTransform(module=linear(), no_grad=True),
    "MultiStepTransform": lambda: T.MultiStepTransform(n_steps=3, gamma=0.9),
    "NextObservationDelta": lambda: T.NextObservationDelta(in_keys=["observation"]),
    "NextStateReconstructor": lambda: T.NextStateReconstructor(fill_value=0.0),
    "ObservationNorm": lambda: T.ObservationNorm(
        loc=1.0, scale=2.0, in_keys=["observation"], in_keys_inv=["motion"], standard_normal=True
    ),
    "PermuteTransform": lambda: T.PermuteTransform((-1, -3, -2), in_keys=["pixels"]),
    "RenameTransform": lambda: T.RenameTransform(
        ["observation"], ["shown"], in_keys_inv=["grid"], out_keys_inv=["grid"]
    ),
    "RewardClipping": lambda: T.RewardClipping(-0.1, 0.1, in_keys=[REWARD]),
    "RewardScaling": lambda: T.RewardScaling(1.0, 2.0, in_keys=[REWARD]),
    "SelectTransform": lambda: T.SelectTransform("observation", REWARD),
    "SignTransform": lambda: T.SignTransform(in_keys=[REWARD], in_keys_inv=[]),
    "SqueezeTransform": lambda: T.SqueezeTransform(dim=-1, in_keys=["step_count"], in_keys_inv=[]),
    "Stack": lambda: T.Stack(
        in_keys=["done", "success"], out_key="flags", in_key_inv="flags", out_keys_inv=["done", "success"]
    ),
    "SuccessReward": lambda: T.SuccessReward(reward_key="bonus"),
    "ToTensorImage": pixels,
    "UnaryTransform": lambda: T.UnaryTransform(
        in_keys=["observation"], out_keys=["twice"], in_keys_inv=[], fn=lambda x: x * 2
    ),
    "UnsqueezeTransform": lambda: T.UnsqueezeTransform(dim=-1, in_keys=["observation"], in_keys_inv=[]),
    "VecNorm": lambda: T.VecNorm(in_keys=["observation"]),
}

#: On rows that are trajectories.
TRAJECTORIES: dict[str, Made] = {
    "ActionChunkTransform": lambda: T.ActionChunkTransform(chunk_size=3, action_key="motion"),
    "BurnInTransform": lambda: T.BurnInTransform(modules=[gru()], burn_in=2),
    "CatFrames": lambda: T.CatFrames(N=2, dim=-1, in_keys=["observation"], padding="constant"),
    "RandomCropTensorDict": lambda: T.RandomCropTensorDict(3),
    "Reward2GoTransform": lambda: T.Reward2GoTransform(gamma=0.9, out_keys=["reward_to_go"]),
}

#: What no buffer can have: they act while an environment steps.
IN_ENVIRONMENTS: dict[str, Made] = {
    "ActionDiscretizer": lambda: T.ActionDiscretizer(num_intervals=3, action_key="motion"),
    "ActionMask": T.ActionMask,
    "InitTracker": T.InitTracker,
    "RandomTruncationTransform": lambda: T.RandomTruncationTransform(min_horizon=2, max_horizon=4, prob=0.5),
    "StepCounter": T.StepCounter,
    "TargetReturn": lambda: T.TargetReturn(10.0),
    "TensorDictPrimer": lambda: T.TensorDictPrimer(
        {"extra": theirs.Unbounded((2,))}, default_value=0.5, expand_specs=True
    ),
    "TimeMaxPool": lambda: T.TimeMaxPool(in_keys=["observation"], T=2),
}

#: What does more here, and has a test of its own.
BETTER = {"PolicyAgeFilter": "samples may be shortened"}

#: What needs something that is not installed.
ABSENT = {"DecodeVideoTransform": "torchcodec"}


def told(lib: Any, made: Made, batches: list[TensorDict], **keywords: Any) -> list[Any]:
    """Return what a buffer of a library tells, step by step; where something is raised, that."""
    rb = lib.TensorDictReplayBuffer(
        storage=lib.LazyTensorStorage(40), transform=made(), batch_size=6, **keywords
    )
    found: list[Any] = []
    try:
        for batch in batches:
            torch.manual_seed(len(found))
            found.append(torch.as_tensor(rb.extend(batch.clone())))
        for index in (slice(None), torch.tensor([3, 1, 4])):
            torch.manual_seed(7)
            found.append(leaves(rb[index]))
        sample = rb.sample()
        found.append({"keys": {*map(str, leaves(sample))}, "shape": tuple(sample.shape)})
    except Exception as exc:
        found.append(f"{type(exc).__name__}: {exc}"[:60])
    return found


def leaves(batch: Any) -> dict[Any, Any]:
    return {key: batch.get(key) for key in batch.keys(True, True) if key != "id"}


def check(ours: Any, other: Any, where: str = "") -> None:
    if isinstance(other, dict):
        assert set(ours) - {"index"} == set(other) - {"index"}, where
        for key in set(other) - {"index"}:
            check(ours[key], other[key], f"{where} {key}")
    elif isinstance(other, torch.Tensor):
        torch.testing.assert_close(ours, other, rtol=0, atol=0, equal_nan=True)
    else:
        assert ours == other, where


def same(made: Made, batches: list[TensorDict], **keywords: Any) -> list[Any]:
    results = [told(lib, made, batches, **keywords) for lib in (OURS, THEIRS)]
    assert len(results[0]) == len(results[1]), results
    for number, (ours, other) in enumerate(zip(*results, strict=True)):
        check(ours, other, f"step {number}")
    return results[0]


@pytest.mark.some(9)
@pytest.mark.parametrize("name", STEPS)
def test_on_steps(name: str) -> None:
    found = same(STEPS[name], [rows(12, first) for first in (0, 12, 24)])
    assert isinstance(found[-1], dict), f"{name} did not come to its end: {found[-1]}"


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_on_trajectories(name: str) -> None:
    found = same(TRAJECTORIES[name], [trajectories(4, first) for first in (0, 4)])
    assert isinstance(found[-1], dict), f"{name} did not come to its end: {found[-1]}"


@pytest.mark.some(4)
@pytest.mark.parametrize("name", IN_ENVIRONMENTS)
def test_transforms_that_need_an_environment_fail_in_both(name: str) -> None:
    ours, other = (told(lib, IN_ENVIRONMENTS[name], [rows(12)]) for lib in (OURS, THEIRS))
    assert len(ours) == len(other)
    assert isinstance(ours[-1], str)
    assert isinstance(other[-1], str)


@pytest.mark.parametrize("name", ["ExcludeTransform", "RenameTransform", "RewardScaling", "UnaryTransform"])
def test_inverted(name: str) -> None:
    """They act on what is written."""
    results: list[Any] = []
    for lib in (OURS, THEIRS):
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(40), batch_size=6)
        rb.append_transform(STEPS[name](), invert=True)
        with contextlib.suppress(Exception):
            rb.extend(rows(12))
        results.append(leaves(rb.storage.get(slice(None))) if len(rb) else {})
    check(*results)


def test_samples_may_be_flattened(store_path: Path) -> None:
    """TorchRL's own buffer, which adds indices at the end, cannot tell those of steps then."""
    storage = expstore.LazyTensorStorage(40)
    rb = expstore.TensorDictReplayBuffer(
        storage=storage, transform=FlattenTensorDict(inverse=False), batch_size=3
    )
    rb.extend(trajectories(4))
    sample = rb.sample()
    assert sample.shape == (3 * LENGTH,)
    assert torch.equal(sample["index"], sample["collector", "traj_ids"])


def test_a_filter_by_age_takes_rows_out_of_what_is_written_and_sampled(store_path: Path) -> None:
    """TorchRL's own buffer, which adds indices at the end, cannot shorten samples that bear them."""
    version = 2
    filtering = rb_transforms.PolicyAgeFilter(lambda: version, max_policy_lag=1)
    with expstore.open(store_path, batch_size=50, seed=1) as rb:
        rb.append_transform(filtering)
        rb.extend(rows(15))  # versions 0, 1, 2
        assert len(rb) == 10
        version = 3
        sample = rb.sample()
        assert set(sample["policy_version"].tolist()) == {2}
        assert 0 < len(sample) < 50
        assert torch.equal(sample["index"] + 5, sample["observation"][:, 0].long())


def test_sampling_info_stays_after_fields_were_selected(store_path: Path) -> None:
    """As in TorchRL, what is said of rows stays, so that priorities can be given back."""
    sampler = expstore.PrioritizedSampler(alpha=1.0, beta=1.0)
    selecting = T.SelectTransform("observation", REWARD, keep_rewards=False, keep_dones=False)
    with expstore.open(store_path, batch_size=8, seed=1, sampler=sampler) as rb:
        rb.append_transform(selecting)
        rb.extend(rows(30))
        sample = rb.sample()
        assert {"index", "id", "priority_weight", "observation"} <= set(sample.keys())
        assert "pixels" not in set(sample.keys())
        assert rb.update_tensordict_priority(sample.set("td_error", torch.full((8,), 5.0))) == 8


def named_in_documents() -> set[str]:
    """Return the transforms whose documents speak of replay buffers."""
    found = set()
    for home in (T, rb_transforms):
        for name, thing in inspect.getmembers(home, inspect.isclass):
            documents = " ".join(
                filter(None, [thing.__doc__, *(getattr(m, "__doc__", None) for m in vars(thing).values())])
            )
            own = thing.__module__.startswith("torchrl.envs.transforms")
            if (
                own
                and not name.startswith("_")
                and re.search(r"ReplayBuffer|replay.buffer|\brb\b", documents)
            ):
                found.add(name)
    return found


def test_the_tables_have_all_that_the_documents_name() -> None:
    tables = {*STEPS, *TRAJECTORIES, *IN_ENVIRONMENTS, *BETTER, *ABSENT}
    missing = named_in_documents() - {name.partition("-")[0] for name in tables} - {"Transform"}
    assert missing == set()
