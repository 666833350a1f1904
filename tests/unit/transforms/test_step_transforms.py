"""n-step transitions, returns, frames and next states, compared with plain Python and torchrl.

Rows contain their episode and step, so stores with any history can be checked row by row; contiguous rows are
also passed to torchrl's own transforms.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs import transforms as theirs

import expstore
from expstore import (
    MemoryStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from expstore.errors import NotFoundError, SchemaError
from expstore.trajectories import traj
from expstore.transforms import (
    CatFrames,
    MultiStepTransform,
    NextStateReconstructor,
    Reward2GoTransform,
    StepTransform,
    StepView,
)
from tests.support.batches import memory_buffer
from tests.support.case_selection import in_full, share
from tests.support.slice_model import Row
from tests.support.slice_stores import Scenario, World, scenarios, use_short_rings

GAMMA = 0.9
#: An example opens stores many times.
some = share(0.12)
patient = pytest.mark.timeout(600)

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "slices": lambda: SliceSampler(slice_len=2, strict_length=False),
    "prioritized": PrioritizedSampler,
}


pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_short_rings(monkeypatch)


# -- beside plain Python ----------------------------------------------------------------------------------


@dataclass
class Facts:
    """What rows hold, by the serial that the model has given them.

    An observation is (serial, -serial), the next one half a step further; a reward follows from the serial.
    """

    done: dict[int, bool] = field(default_factory=dict)

    def dress(self, rows: TensorDict) -> TensorDict:
        """Give rows rewards and observations."""
        serial = rows["truth", "serial"]
        self.done |= zip(serial.reshape(-1).tolist(), rows["next", "done"].reshape(-1).tolist(), strict=True)
        frame = torch.stack([serial, -serial], -1).float()
        rows["frame"] = frame
        rows["next", "frame"] = frame + 0.5
        rows["next", "reward"] = (((serial * 37) % 19 - 9).float() / 4).unsqueeze(-1)
        return rows

    @staticmethod
    def reward(row: Row) -> float:
        return ((row.serial * 37) % 19 - 9) / 4

    def n_step(self, run: list[Row], at: int, n_steps: int | None) -> tuple[float, int]:
        """Return the sum of rewards from a row on, and over how many steps it is."""
        total, steps = 0.0, 0
        for row in run[at:][:n_steps]:
            total += GAMMA**steps * self.reward(row)
            steps += 1
            if self.done[row.serial]:
                break
        return total, steps


def frame_of(row: Row) -> list[float]:
    return [float(row.serial), float(-row.serial)]


def check(batch: Any, world: World, facts: Facts, n_steps: int, frames: int, padding: str) -> None:
    """Compare a batch with what plain Python makes of the live rows."""
    where = {row.serial: (run, at) for run in world.model.runs() for at, row in enumerate(run)}
    batch = batch.reshape(max(1, batch.numel()))
    for one in batch.unbind(0):
        run, at = where[int(one["truth", "serial"])]
        total, steps = facts.n_step(run, at, n_steps)
        assert int(one["steps_to_next_obs"]) == steps
        assert math.isclose(float(one["next", "reward"]), total, rel_tol=1e-5, abs_tol=1e-5)
        assert float(one["next", "original_reward"]) == facts.reward(run[at])
        assert math.isclose(float(one["gamma"]), GAMMA**steps, rel_tol=1e-6)
        assert bool(one["nonterminal"]) == (steps > 1)
        assert bool(one["next", "done"].any()) >= facts.done[run[at].serial]
        total, _ = facts.n_step(run, at, None)
        assert math.isclose(float(one["to_go"]), total, rel_tol=1e-5, abs_tol=1e-5)
        last = at + steps - 1
        after = frame_of(run[last + 1]) if last + 1 < len(run) else [math.nan] * 2
        np.testing.assert_array_equal(one["next", "state"].numpy(), np.float32(after))
        own = stack_of(run, range(at - frames + 1, at + 1), padding)
        assert one["stack"].tolist() == [x for frame in own for x in frame]
        own = stack_of(run, range(last - frames + 2, last + 1), padding)
        own.append([x + 0.5 for x in frame_of(run[last])])
        assert one["next", "stack"].tolist() == [x for frame in own for x in frame]
        assert one["padded"].tolist() == [step < 0 for step in range(at - frames + 1, at + 1)]


def stack_of(run: list[Row], steps: range, padding: str) -> list[list[float]]:
    return [
        [-1.0] * 2 if step < 0 and padding == "constant" else frame_of(run[max(step, 0)]) for step in steps
    ]


def chain(n_steps: int, frames: int, padding: str) -> list[Any]:
    return [
        Reward2GoTransform(GAMMA, out_keys=["to_go"]),
        MultiStepTransform(n_steps, GAMMA),
        CatFrames(
            frames,
            -1,
            ["frame", ("next", "frame")],
            ["stack", ("next", "stack")],
            padding=padding,  # type: ignore[arg-type]
            padding_value=-1,
            mask_key="padded",
        ),
        NextStateReconstructor(["frame"]),
        lambda batch: batch.set(("next", "state"), batch["next", "frame"]),
    ]


@pytest.mark.slow
@patient
@some
@given(
    scenario=scenarios(),
    n_steps=st.integers(1, 5),
    frames=st.integers(1, 4),
    padding=st.sampled_from(["same", "constant"]),
    sampler=st.sampled_from(sorted(SAMPLERS)),
)
def test_all_is_as_plain_python_has_it(
    scenario: Scenario, n_steps: int, frames: int, padding: str, sampler: str
) -> None:
    facts = Facts()
    parts = chain(n_steps, frames, padding)
    with scenario.begin(SAMPLERS[sampler], dress=facts.dress, transforms=parts) as world:
        for act, what in scenario.plan:
            world.do(act, what)
            if world.model.rows:
                check(world.rb.sample(16), world, facts, n_steps, frames, padding)
        if world.model.rows:
            check(world.rb[:], world, facts, n_steps, frames, padding)


test_all_is_as_plain_python_has_it_in_full = pytest.mark.torture(in_full(test_all_is_as_plain_python_has_it))


# -- beside torchrl ---------------------------------------------------------------------------------------


@st.composite
def rollouts(draw: st.DrawFn) -> TensorDict:
    """Return steps of whole episodes in one piece, some cut short."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    count = sum(lengths)
    last = torch.zeros(count, 1, dtype=torch.bool)
    last[np.cumsum(lengths) - 1] = True
    cut = torch.zeros(count, 1, dtype=torch.bool)
    for end in (np.cumsum(lengths) - 1).tolist():
        cut[end] = draw(st.booleans())
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    frames = torch.rand(count, 2, 3, generator=numbers)
    after = torch.rand(count, 2, 3, generator=numbers)
    after[:-1] = torch.where(last[:-1, :, None], after[:-1], frames[1:])
    following = {
        "pixels": after,
        "reward": torch.rand(count, 1, generator=numbers) - 0.5,
        "terminated": last & ~cut,
        "truncated": last & cut,
        "done": last,
    }
    data = {"pixels": frames, "collector": {"traj_ids": episode}, "next": following}
    return TensorDict(data, [count], names=["time"])


def held(rows: TensorDict, *transforms: Any) -> Any:
    """Return rows as a buffer with these transforms gives them."""
    rb = ReplayBuffer(storage=MemoryStorage(100))
    for transform in transforms:
        rb.append_transform(transform)
    for piece in rows.clone().split(3):
        rb.extend(piece)
    return rb[:]


def same(ours: Any, theirs: Any, *keys: Any) -> None:
    for key in keys:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6, equal_nan=True)


@given(rows=rollouts(), n_steps=st.integers(1, 4), whole=st.booleans())
def test_n_steps_are_torchrls(rows: TensorDict, n_steps: int, whole: bool) -> None:
    done_keys = ["done", "truncated", "terminated"] if whole else ["done"]
    # theirs holds the last rows back until more come: steps behind the end, which it leaves out.
    beyond = rows[-1:].expand(n_steps).clone()
    other = theirs.MultiStepTransform(n_steps, GAMMA, done_keys=done_keys)
    expected = other.inv(torch.cat([rows, beyond]))
    ours = held(rows, MultiStepTransform(n_steps, GAMMA, done_keys=done_keys))
    assert set(ours.keys(True, True)) == set(expected.keys(True, True))
    assert all(ours[key].dtype == expected[key].dtype for key in expected.keys(True, True))
    same(ours, expected, *expected.keys(True, True))


@given(rows=rollouts(), gamma=st.sampled_from([1.0, 0.9, 0.5]))
def test_returns_are_torchrls(rows: TensorDict, gamma: float) -> None:
    expected = theirs.Reward2GoTransform(gamma, out_keys=["to_go"]).inv(rows.clone().unsqueeze(0))[0]
    ours = held(rows, Reward2GoTransform(gamma, out_keys=["to_go"]))
    same(ours, expected, "to_go", ("next", "reward"))
    ours = held(rows, Reward2GoTransform(torch.tensor(gamma)))
    torch.testing.assert_close(ours["next", "reward"], expected["to_go"], rtol=1e-5, atol=1e-6)


@given(
    rows=rollouts(),
    frames=st.integers(1, 4),
    dim=st.sampled_from([-1, -2]),
    padding=st.sampled_from(["same", "constant"]),
    future=st.booleans(),
)
def test_frames_are_torchrls(rows: TensorDict, frames: int, dim: int, padding: Any, future: bool) -> None:
    # torchrl's stacks of next frames need the first dim of a row, and fail for a single one.
    keys: list[Any] = ["pixels"]
    if dim == -2 and frames > 1 and not future:
        keys.append(("next", "pixels"))
    options = {
        "N": frames, "dim": dim, "in_keys": keys, "padding": padding, "padding_value": 7, "future": future,
        "mask_key": "padded",
    }  # fmt: skip
    expected = theirs.CatFrames(**options)(rows.clone())
    ours = held(rows, CatFrames(**options))
    same(ours, expected, *keys, "padded")


@given(rows=rollouts(), fill=st.sampled_from([math.nan, -3.0]))
def test_next_states_are_torchrls(rows: TensorDict, fill: float) -> None:
    rows = rows.exclude(("next", "pixels"))
    expected = theirs.NextStateReconstructor(["pixels"], fill_value=fill)(rows.clone())
    same(held(rows, NextStateReconstructor(["pixels"], fill_value=fill)), expected, ("next", "pixels"))


# -- what they mean ---------------------------------------------------------------------------------------


def counted(rows: int, *, ends: int = 0, **more: torch.Tensor) -> TensorDict:
    """Rows with x = 0, 1, ...; every `ends`-th is the last of its episode."""
    x = torch.arange(rows).float().unsqueeze(-1)
    done = ((torch.arange(rows) + 1) % ends == 0 if ends else torch.zeros(rows, dtype=torch.bool))[:, None]
    following = {"x": x + 1, "reward": torch.ones(rows, 1), "done": done, "terminated": done.clone()}
    return TensorDict({"x": x, "next": following, **more}, [rows])


def buffer(transform: Any, rows: TensorDict | None = None, **options: Any) -> TensorDictReplayBuffer:
    return memory_buffer(seed=1, transform=transform, rows=rows, **options)


def test_stored_rows_stay_unchanged_and_n_steps_can_change() -> None:
    multi = MultiStepTransform(n_steps=3, gamma=0.5)
    rb = buffer(multi, counted(6, ends=5))
    assert rb[:]["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.75, 1.5, 1.0, 1.0]
    assert rb[:]["next", "x"].flatten().tolist() == [3, 4, 5, 5, 5, 6]
    multi.n_steps = 2
    assert rb[:]["next", "x"].flatten().tolist() == [2, 3, 4, 5, 5, 6]
    (stored,) = rb.storage.read(np.arange(1, 7), [rb.storage.require_schema().place_of(("next", "reward"))])
    assert stored.flatten().tolist() == [1] * 6
    for wrong in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="must be a strictly positive integer"):
            multi.n_steps = wrong  # type: ignore[assignment]
    assert multi.n_steps == 2


def test_batches_prefetched_with_another_number_are_redrawn() -> None:
    multi = MultiStepTransform(n_steps=2, gamma=0.5)
    rb = buffer(multi, counted(6), prefetch=3, batch_size=32)

    def sample() -> Any:
        batch = rb.sample()
        for _, ahead in rb._sampling._prefetcher._queue:
            ahead.result()  # the next ones are made
        return batch

    assert sample()["steps_to_next_obs"].max() == 2
    multi.n_steps = 4
    assert sample()["steps_to_next_obs"].max() == 4
    multi.gamma = 1.0
    assert rb.sample()["gamma"].eq(1).all()


def test_a_truncation_ends_a_sum_but_not_the_episode() -> None:
    rows = counted(6)
    rows["next", "truncated"] = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    rows["collector", "traj_ids"] = torch.full((6,), 4)
    rb = buffer(None, rows)
    rb.append_transform(MultiStepTransform(3, 1.0)).append_transform(CatFrames(3, -1, ["x"], ["stack"]))
    batch = rb[:]
    assert batch["steps_to_next_obs"].tolist() == [3, 2, 1, 3, 2, 1]
    assert batch["stack"][3].tolist() == [1, 2, 3]


def test_flags_of_the_last_step_where_they_are_not_left_alone() -> None:
    assert not buffer(MultiStepTransform(3, 0.5), counted(3, ends=3))[0]["next", "terminated"].item()
    moved = buffer(MultiStepTransform(3, 0.5, done_keys=[]), counted(3, ends=3))[0]
    assert moved["next", "terminated"].item()
    assert moved["next", "done"].item()


def test_rewards_of_all_kinds() -> None:
    rows = counted(4)
    rows["next", "many"] = torch.arange(8.0).reshape(4, 2)
    rows["next", "whole"] = torch.arange(4)
    rows["next", "short"] = torch.ones(4, 1, dtype=torch.bfloat16)
    rows["next", "reward"][2] = math.inf
    keys = ["many", "whole", "short", "reward"]
    batch = buffer(MultiStepTransform(2, 0.5, reward_keys=keys), rows)[:]
    assert batch["next", "many"].tolist() == [[1, 2.5], [4, 5.5], [7, 8.5], [6, 7]]
    assert batch["next", "whole"].tolist() == [0.5, 2.0, 3.5, 3.0]
    assert batch["next", "whole"].dtype == torch.float32
    assert batch["next", "short"].dtype == torch.bfloat16
    assert batch["next", "short"].flatten().tolist() == [1.5, 1.5, 1.5, 1]
    assert batch["next", "reward"].flatten().tolist() == [1.5, math.inf, math.inf, 1]
    back = buffer(Reward2GoTransform(0.5, [("next", "many"), ("next", "whole")], ["a", "b"]), rows)[:]
    assert back["a"][2:].tolist() == [[7, 8.5], [6, 7]]
    assert back["b"].tolist() == [1.375, 2.75, 3.5, 3.0]


def test_sums_of_integers_have_the_default_dtype() -> None:
    rows = counted(3)
    rows["next", "reward"] = torch.arange(3)[:, None]
    found = buffer([Reward2GoTransform(gamma=0.5)], rows)[:]["next", "reward"]
    assert found.dtype is torch.get_default_dtype()
    assert found[:, 0].tolist() == [1.0, 2.0, 2.0]
    # The last of the stacked rewards is the sum of the transform before, which is no integer.
    frames = buffer([MultiStepTransform(2, 0.5), CatFrames(2, -1, [("next", "reward")])], rows)[:]
    assert frames["next", "reward"].tolist() == [[0.0, 0.5], [1.0, 2.0], [1.0, 2.0]]


def test_a_mask_makes_rows_terminal() -> None:
    rows = counted(4, mask=torch.tensor([True, False, True, True]))
    assert buffer(MultiStepTransform(2, 0.5), rows)[:]["nonterminal"].tolist() == [True, False, True, False]


def test_empty_batches_are_accepted() -> None:
    rb = buffer(None, counted(4, mask=torch.ones(4, dtype=torch.uint8)))
    for part in (MultiStepTransform(2, 0.5), Reward2GoTransform(), CatFrames(2, -1, ["x"])):
        rb.append_transform(part)
    rb.append_transform(NextStateReconstructor(["x"]))
    assert rb[:0].batch_size == (0,)
    assert rb[:0]["x"].shape == (0, 2)
    assert rb[:]["nonterminal"].tolist() == [True, True, True, False]


def test_a_sum_ends_where_another_field_says_so() -> None:
    rows = counted(6)
    rows["next", "goal"] = torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.uint8)
    assert buffer(MultiStepTransform(4, 1.0, done_key="goal"), rows)[:]["steps_to_next_obs"].tolist() == [
        2, 1, 4, 3, 2, 1,
    ]  # fmt: skip
    to_go = buffer(Reward2GoTransform(done_key="goal"), rows)[:]
    assert to_go["next", "reward"].flatten().tolist() == [2, 1, 4, 3, 2, 1]


def test_returns_grow_while_an_episode_continues() -> None:
    rb = buffer(Reward2GoTransform(), counted(3))
    assert rb[:]["next", "reward"].flatten().tolist() == [3, 2, 1]
    rb.extend(counted(5, ends=5)[3:])
    assert rb[:]["next", "reward"].flatten().tolist() == [5, 4, 3, 2, 1]


def test_fields_that_are_not_stored_are_sampled() -> None:
    rows = counted(6, ends=3).exclude(("next", "x"))
    rb = buffer(NextStateReconstructor(["x"], fill_value=-1), rows, batch_size=32)
    batch = rb.sample()
    expected = {0: 1, 1: 2, 2: -1, 3: 4, 4: 5, 5: -1}
    pairs = zip(batch["x"].flatten().tolist(), batch["next", "x"].flatten().tolist(), strict=True)
    assert all(expected[x] == after for x, after in pairs)
    rb.append_transform(CatFrames(2, -1, [("next", "x")], ["pair"]))
    assert rb[:]["pair"].tolist() == [[0, 1], [1, 2], [2, -1], [3, 4], [4, 5], [5, -1]]
    (found,) = rb.query(traj["next", "x"].max() > 4)
    assert found.data["next", "x"].flatten().tolist() == [4, 5, -1]
    with pytest.raises(NotFoundError, match=r"no field 'next.x'"):
        buffer(CatFrames(2, -1, [("next", "x")]), rows)[:]


def test_the_next_state_follows_the_last_step_that_is_summed_up() -> None:
    rb = buffer(MultiStepTransform(2, 1.0), counted(6, ends=4))
    rb.append_transform(NextStateReconstructor(["x"]))
    expected = torch.tensor([2, 3, math.nan, math.nan, math.nan, math.nan])
    torch.testing.assert_close(rb[:]["next", "x"].flatten(), expected, equal_nan=True)


def test_whole_numbers_have_no_nan() -> None:
    rows = counted(4, n=torch.arange(4))
    with pytest.raises(TypeError, match="pass an explicit integer `fill_value`"):
        buffer(NextStateReconstructor(["n"]), rows)[:]
    assert buffer(NextStateReconstructor(["n"], fill_value=9), rows)[:]["next", "n"].tolist() == [1, 2, 3, 9]


def test_frames_of_pixels_and_of_half_precision() -> None:
    pixels = torch.arange(5, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 1, 2, 2).clone()
    rows = counted(5, pixels=pixels, half=torch.arange(5).to(torch.bfloat16)[:, None])
    batch = buffer(CatFrames(3, -3), rows)[:]
    assert batch["pixels"].shape == (5, 3, 2, 2)
    assert batch["pixels"].dtype == torch.uint8
    assert batch["pixels"][3, :, 0, 0].tolist() == [1, 2, 3]
    assert buffer(CatFrames(2, -1, ["half"]), rows)[:]["half"][4].tolist() == [3, 4]


class Doubled(StepTransform):
    """Give a row another frame than is stored."""

    def look(self, view: StepView) -> None:
        return None

    def apply(self, batch: Any, seen: Any) -> Any:
        return batch.set("x", batch["x"] * 2)


def test_the_last_frame_is_what_the_transforms_before_have_made_of_it() -> None:
    rb = buffer(Doubled(), counted(4))
    rb.append_transform(CatFrames(3, -1, ["x"], ["stack"]))
    assert rb[:]["stack"].tolist() == [[0, 0, 0], [0, 0, 2], [0, 1, 4], [1, 2, 6]]
    rb = buffer(Doubled(), counted(4))
    rb.append_transform(CatFrames(2, -1, ["x"], ["stack"], future=True))
    assert rb[:]["stack"].tolist() == [[0, 1], [2, 2], [4, 3], [6, 3]]


def test_frames_that_have_left_are_not_there() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(4), transform=CatFrames(3, -1, ["x"], mask_key="padded")
    )
    rb.extend(counted(10))
    rows = {int(row["x"][-1]): (row["x"].tolist(), row["padded"].tolist()) for row in rb[:].unbind(0)}
    assert rows == {
        6: ([6, 6, 6], [True, True, False]),
        7: ([6, 6, 7], [True, False, False]),
        8: ([6, 7, 8], [False] * 3),
        9: ([7, 8, 9], [False] * 3),
    }


#: A call, the class of its error, and words of the message.
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: CatFrames(2, -1, as_inverse=True), ValueError, "every frame would be stored N times"),
    (lambda: CatFrames(2, -1, reset_key="_reset"), ValueError, "no environment is reset"),
    (lambda: CatFrames(2, -1, done_key="over"), ValueError, "follow the episodes of the store"),
    (lambda: CatFrames(2, 1), ValueError, "dim must be < 0"),
    (lambda: CatFrames(2, -1, padding="zeros"), ValueError, "padding must be"),  # type: ignore[arg-type]
    (lambda: CatFrames(0, -1), ValueError, "N must be a positive whole number"),
    (lambda: CatFrames(2, -1, ["a", "b"], ["a"]), ValueError, "must have the same length, got 2 and 1"),
    (lambda: CatFrames(2, None), TypeError, "dim must be a dim of a row, .*got None"),  # type: ignore[arg-type]
    (lambda: CatFrames(2, -1, 3), TypeError, "in_keys are the keys of"),  # type: ignore[arg-type]
    (lambda: CatFrames(2, -1, ["a"], [3]), TypeError, "each of out_keys"),  # type: ignore[list-item]
    (lambda: CatFrames(2, -1, padding_value=None), TypeError, "padding_value must"),  # type: ignore[arg-type]
    (lambda: Reward2GoTransform(None), ValueError, "is not a discount"),
    (lambda: Reward2GoTransform(math.nan), ValueError, "out-of-bounds gamma"),
    (lambda: Reward2GoTransform(torch.tensor(1.5)), ValueError, "out-of-bounds gamma"),
    (lambda: Reward2GoTransform(done_key=3), TypeError, "done_key is the key of a"),  # type: ignore[arg-type]
    (
        lambda: NextStateReconstructor(traj_key="run"),
        ValueError,
        r"traj_key='run' is not supported.*episodes=",
    ),
    (lambda: NextStateReconstructor(step_count_key="n"), ValueError, "step_count_key='n' is not supported"),
    (lambda: NextStateReconstructor(strict=False), ValueError, "strict=False is not supported"),
    (lambda: NextStateReconstructor(fill_value="x"), TypeError, "must be a number"),  # type: ignore[arg-type]
    (lambda: MultiStepTransform(2, math.nan), ValueError, "out-of-bounds gamma.*nan; give one from 0 to 1"),
    (lambda: MultiStepTransform(2, -0.1), ValueError, "out-of-bounds gamma"),
    (lambda: MultiStepTransform(2, 1.1), ValueError, "out-of-bounds gamma"),
    (lambda: MultiStepTransform(2, "x"), TypeError, "gamma is a discount, .*'x'"),  # type: ignore[arg-type]
    (lambda: MultiStepTransform(2, 1.0, reward_keys=[]), ValueError, "nothing to sum up"),
    (lambda: MultiStepTransform(2, 1.0, mask_key=3), TypeError, "mask_key is the"),  # type: ignore[arg-type]
]


def test_meaningless_arguments_are_refused() -> None:
    for make, kind, words in REFUSED:
        with pytest.raises(kind, match=words):
            make()


def test_a_number_that_a_field_cannot_store_is_refused() -> None:
    n = torch.arange(3)
    rows = counted(3, n=n[:, None], pixels=n[:, None].to(torch.uint8), half=n[:, None].half())
    for value, key in (
        (-1, "pixels"), (256, "pixels"), (0.5, "pixels"), (0.5, "n"), (1e6, "half"), (1j, "x"),
    ):  # fmt: skip
        for transform in (
            CatFrames(2, -1, [key], padding="constant", padding_value=value),  # type: ignore[arg-type]
            NextStateReconstructor([key], fill_value=value),  # type: ignore[arg-type]
        ):
            with pytest.raises(
                ValueError, match=f"_value=.* cannot be a value of '{key}', which has dtype torch"
            ):
                buffer(transform, rows)[:]
    for value, key in ((255, "pixels"), (7.0, "n"), (math.inf, "half"), (torch.tensor(2.0), "x")):
        made = CatFrames(2, -1, [key], padding="constant", padding_value=value)  # type: ignore[arg-type]
        assert buffer(made, rows)[:][key][0].tolist() == [value, 0]


def test_a_second_sum_is_refused_where_it_is_added() -> None:
    rb = buffer(MultiStepTransform(2, 1.0), counted(3))
    for add in (rb.append_transform, lambda again: rb.insert_transform(0, again)):
        with pytest.raises(
            ValueError, match=r"two would.*n_steps=.*n_steps=.*one is enough; set its n_steps"
        ):
            add(MultiStepTransform(3, 1.0))
    assert rb[:]["steps_to_next_obs"].tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match="one is enough"):
        buffer([MultiStepTransform(2, 1.0), MultiStepTransform(3, 1.0)])


def test_a_name_alone_is_one_key() -> None:
    for key in ("obs", ("a", "b")):
        assert CatFrames(2, -1, key).in_keys == theirs.CatFrames(2, -1, key).in_keys == [key]
        assert CatFrames(2, -1, ["x"], key).out_keys == [key]
        assert Reward2GoTransform(in_keys=key).out_keys == theirs.Reward2GoTransform(in_keys=key).out_keys_inv
    assert CatFrames(2, -1, (("a", "b"), "c")).in_keys == [("a", "b"), "c"]
    assert MultiStepTransform(2, 1.0, reward_keys="gain").reward_keys == ["gain"]
    assert NextStateReconstructor("obs").keys == ("obs",)
    assert buffer(CatFrames(2, -1, "x"), counted(3))[:]["x"].tolist() == [[0, 0], [0, 1], [1, 2]]


def test_fields_that_do_not_fit_are_named() -> None:
    rows = counted(4, words=torch.zeros(4))
    rows["next", "team"] = torch.zeros(4, 2, dtype=torch.bool)
    for transform, message in (
        (MultiStepTransform(2, 1.0, reward_keys=["gain"]), "no field 'next.gain'"),
        (MultiStepTransform(2, 1.0, done_key="over"), "no field 'next.over'"),
        (MultiStepTransform(2, 1.0, done_key="team"), "'next.team' must be one flag per row"),
        (Reward2GoTransform(1.0, ["gain"]), "no field 'gain'"),
        (MultiStepTransform(2, 1.0, done_keys=["nope"]), "no field 'next.nope'"),
        (MultiStepTransform(2, 1.0, done_key="reward"), "'next.reward' must be one flag.*dtype float32"),
        (CatFrames(2, -1), "no field 'pixels'"),
        (NextStateReconstructor(), "no field 'observation'"),
    ):
        with pytest.raises(SchemaError, match=message):
            buffer(transform, rows)[:]
    with pytest.raises(NotFoundError, match="no mask 'nope'.*leave mask_key out"):
        buffer(MultiStepTransform(2, 1.0, mask_key="nope"), rows)[:]
    with pytest.raises(ValueError, match="dim=-1 is out of range for 'words'"):
        buffer(CatFrames(2, -1, ["words"]), rows)[:]


# -- others write meanwhile -------------------------------------------------------------------------------


WORKERS, STEPS = 3, 5


def numbered(cycle: int) -> TensorDict:
    """Return the rows of one turn: workers take turns, and rows say which step of their worker they are."""
    first = cycle // WORKERS * STEPS
    step = torch.arange(first, first + STEPS).float().unsqueeze(-1)
    return TensorDict({"x": step, "next": {"reward": step * 2, "x": step + 1}}, [STEPS])


def write(rb: Any, cycle: int) -> None:
    rb.extend(numbered(cycle), source=f"worker{cycle % WORKERS}")


def looking(rb: Any) -> Any:
    for transform in (MultiStepTransform(3, 1.0), CatFrames(3, -1, ["x", ("next", "x")])):
        rb.append_transform(transform)
    return rb


def check_numbered(batch: Any) -> float:
    """Compare rows with what they say of themselves; return the newest step."""
    step, count = batch["x"][:, -1], batch["steps_to_next_obs"]
    total = sum((step + k) * 2 * (k < count) for k in range(3))
    torch.testing.assert_close(batch["next", "reward"][:, 0], total)
    torch.testing.assert_close(batch["next", "x"][:, -1], step + count)
    one, two = batch["x"].diff(dim=-1).unbind(-1)  # frames follow one another, or the first repeats
    assert ((one == 0) | (one == 1) & (two == 1)).all()
    assert ((two == 0) | (two == 1)).all()
    return float(step.max())


@pytest.mark.guarantee("draw/whole")
def test_a_follower_reads_while_a_writer_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path, capacity=60, seed=2) as rb:
        for cycle in range(12):
            write(rb, cycle)
    if (child := os.fork()) == 0:
        try:
            rb = expstore.open(path)
            for cycle in range(12, 100_000):
                write(rb, cycle)
        finally:
            os._exit(1)
    try:
        with looking(expstore.open(path, mode="r", batch_size=16)) as reader:
            while check_numbered(reader.sample()) < 400:
                pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.guarantee("draw/whole")
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_that_sample_while_one_overwrites(prefetch: int) -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(60, seed=3), batch_size=16, prefetch=prefetch)
    looking(rb)
    for cycle in range(12):
        write(rb, cycle)
    done = threading.Event()

    def overwrite() -> None:
        try:
            for cycle in range(12, 1500):
                write(rb, cycle)
        finally:
            done.set()

    def sample(number: int) -> int:
        count = 0
        while not done.is_set():
            check_numbered(rb.sample() if number else rb[::3])
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        writer = pool.submit(overwrite)
        readers = [pool.submit(sample, number) for number in range(3)]
        writer.result()
        assert min(reader.result() for reader in readers) > 0
