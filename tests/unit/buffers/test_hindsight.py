"""Hindsight goals: which rows goals are taken from, with which probability, and when."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as theirs
from tensordict import TensorDict, TensorDictBase

import expstore
from expstore import (
    HERReplayBuffer,
    HindsightStrategy,
    MemoryStorage,
    PrioritizedSampler,
    ZarrStorage,
)
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.transforms import StepTransform, StepView
from tests.support.chi_square import Floats, chi_square, draws_needed, limit_of, one_off
from tests.support.forks import in_child
from tests.support.tuned import few_rows_in_memory
from tests.support.waits import wait_until

STRATEGIES = ("future", "final", "episode", "random")
UNREACHED = -1.0


def steps(episode: int, count: int, *, first: int = 0, ends: bool = True, names: bool = False) -> TensorDict:
    """Steps of an episode that reach 1000 * episode + step and want something else."""
    reached = (1000.0 * episode + torch.arange(first, first + count))[:, None]
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = ends
    wanted = torch.full_like(reached, UNREACHED)
    data = TensorDict(
        {
            "achieved_goal": reached,
            "desired_goal": wanted,
            "next": {
                "achieved_goal": reached + 1,
                "desired_goal": wanted.clone(),
                "reward": torch.zeros(count, 1),
                "done": done,
            },
        },
        [count],
    )
    if names:
        data["collector", "traj_ids"] = torch.full((count,), episode)
    return data


def reward(rows: TensorDictBase) -> torch.Tensor:
    """How far the goal is, plus a number that no stored reward has."""
    return 0.5 + rows["desired_goal"] - rows["achieved_goal"]


def buffer(storage: Any = None, **keywords: Any) -> HERReplayBuffer:
    kept = MemoryStorage(100, seed=5) if storage is None else storage
    return HERReplayBuffer(
        **{"reward_fn": reward, "batch_size": 10, "her_ratio": 1.0} | keywords, storage=kept
    )


def check(sample: TensorDictBase, strategy: str, last: dict[int, int], first: dict[int, int]) -> None:
    """Goals are those that the strategy may give; rewards and next goals go with them."""
    own, goal = sample["achieved_goal"][:, 0].long(), sample["desired_goal"][:, 0].long()
    assert torch.equal(sample["next", "desired_goal"], sample["desired_goal"])
    assert torch.equal(sample["next", "reward"], reward(sample))
    assert torch.equal(sample["next", "achieved_goal"], sample["achieved_goal"] + 1)
    for row, taken in zip(own.tolist(), goal.tolist(), strict=True):
        episode, step = divmod(row, 1000)
        assert strategy == "random" or taken // 1000 == episode
        low = {"future": step, "final": last[episode]}.get(strategy, first.get(taken // 1000, 0))
        assert low <= taken % 1000 <= last[taken // 1000]


# -- which rows give goals ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_come_out_of_episodes(strategy: Any) -> None:
    rb = buffer(strategy=strategy)
    lengths = {0: 7, 1: 1, 2: 12}
    for episode, count in lengths.items():
        rb.extend(steps(episode, count))
    last = {episode: count - 1 for episode, count in lengths.items()}
    for _ in range(20):
        check(rb.sample(), strategy, last, {})


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_goals_come_through_interleaved_workers_a_wrapped_ring_and_a_restart(
    tmp_path: Path, strategy: Any, kind: str
) -> None:
    """Three workers write two steps in turn; the ring has left the beginnings of some episodes."""

    def opened() -> HERReplayBuffer:
        storage = MemoryStorage(40, seed=5) if kind == "memory" else ZarrStorage(tmp_path / "run.exp", 40)
        return buffer(storage, strategy=strategy)

    rb, rows = opened(), []
    for cycle in range(0, 20, 2):
        for worker in range(3):
            episode = 10 * worker + cycle // 8
            data = steps(episode, 2, first=cycle % 8, ends=cycle % 8 == 6, names=True)
            rb.extend(data, source=f"worker {worker}")
            rows += data["achieved_goal"][:, 0].long().tolist()
    if kind == "disk":
        rb.close()
        rb = opened()
    kept = [divmod(row, 1000) for row in rows[-40:]]
    last = {episode: max(s for e, s in kept if e == episode) for episode, _ in kept}
    first = {episode: min(s for e, s in kept if e == episode) for episode, _ in kept}
    assert any(first.values())
    seen = set()
    for _ in range(30):
        sample = rb.sample()
        check(sample, strategy, last, first)
        seen |= set(sample["desired_goal"][:, 0].long().tolist())
    assert strategy == "final" or len(seen) > 30
    rb.close()


def test_another_field_may_end_episodes() -> None:
    data = steps(0, 12, ends=False)
    data["lost"] = torch.arange(12) % 4 == 3
    rb = buffer(strategy="final", end_key="lost")
    rb.extend(data)
    sample = rb.sample()
    assert torch.equal(sample["desired_goal"], sample["achieved_goal"] // 4 * 4 + 3)
    rb = buffer(strategy="final")
    rb.extend(data)
    assert (rb.sample()["desired_goal"] == 11).all()


def test_terminated_next_to_another_field_ends_episodes() -> None:
    data = steps(0, 6, ends=False)
    data["flags"] = {"over": torch.arange(6) == 3, "terminated": torch.arange(6) == 1}
    rb = buffer(strategy="final", end_key=("flags", "over"))
    rb.extend(data)
    sample = rb.sample()
    wanted = {0: 1, 1: 1, 2: 3, 3: 3, 4: 5, 5: 5}
    assert [wanted[int(x)] for x in sample["achieved_goal"]] == sample["desired_goal"][:, 0].tolist()


# -- chances ------------------------------------------------------------------------------------------

LENGTHS = (3, 1)


def chances_of(strategy: str) -> tuple[list[tuple[int, int]], Floats]:
    """Return all pairs of a row and the row that gives its goal, and the chance of each."""
    ends = np.repeat(np.cumsum(LENGTHS), LENGTHS)
    begins = ends - np.repeat(LENGTHS, LENGTHS)
    total = len(ends)
    pairs, chances = [], []
    for row in range(total):
        given_by = {
            "future": range(row, ends[row]),
            "final": range(ends[row] - 1, ends[row]),
            "episode": range(begins[row], ends[row]),
            "random": range(total),
        }[strategy]
        pairs += [(row, giver) for giver in given_by]
        chances += [1 / total / len(given_by)] * len(given_by)
    return pairs, np.array(chances)


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("library", [expstore, theirs], ids=["ours", "torchrl"])
def test_goals_have_the_chances_that_they_should(strategy: str, library: Any) -> None:
    pairs, chances = chances_of(strategy)
    rb = library.HERReplayBuffer(
        reward_fn=lambda rows: rows["next", "reward"],
        storage=library.LazyTensorStorage(len(pairs) + 100),
        strategy=strategy,
        her_ratio=1.0,
    )
    torch.manual_seed(11)
    rb.set_rng(torch.Generator().manual_seed(12))
    data = torch.cat([steps(number, length) for number, length in enumerate(LENGTHS)])
    data["achieved_goal"] = torch.arange(sum(LENGTHS))[:, None].float()
    rb.extend(data)
    draws = draws_needed(chances, one_off(chances))
    sample = rb.sample(draws)
    found = zip(sample["index"].tolist(), sample["desired_goal"][:, 0].long().tolist(), strict=True)
    places = {pair: number for number, pair in enumerate(pairs)}
    counts = np.bincount([places[pair] for pair in found], minlength=len(pairs))
    assert chi_square(counts, chances) < limit_of(len(pairs))


# -- which rows get goals, and what is made of them ---------------------------------------------------


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.25, 2), (0.8, 8), (1.0, 10)])
def test_the_first_part_of_a_batch_gets_goals(ratio: float, count: int) -> None:
    rb = buffer(her_ratio=ratio)
    rb.extend(steps(1, 20))
    sample = rb.sample()
    changed = sample["desired_goal"][:, 0] != UNREACHED
    assert changed.tolist() == [True] * count + [False] * (10 - count)
    assert (sample["next", "reward"][count:] == 0).all()
    assert (sample["next", "desired_goal"][count:] == UNREACHED).all()


def test_rewards_are_of_the_rows_that_torchrl_shows() -> None:
    seen: dict[Any, Any] = {}

    def made(library: Any) -> Any:
        def look(rows: TensorDictBase) -> torch.Tensor:
            seen[library] = rows.clone()
            return torch.ones(rows.shape[0], 1)

        rb = library.HERReplayBuffer(look, storage=library.LazyTensorStorage(10), strategy="final")
        rb.extend(steps(2, 10))
        return rb.sample(10)

    samples = {library: made(library) for library in (expstore, theirs)}
    ours, other = seen[expstore], seen[theirs]
    assert ours.batch_size == other.batch_size == (8,)
    assert set(ours.keys(True, True)) == set(other.keys(True, True))
    for rows in (ours, other):
        assert (rows["desired_goal"] == 2009).all()
        assert (rows["next", "desired_goal"] == 2009).all()
        assert (rows["next", "reward"] == 0).all()
    for sample in samples.values():
        assert sample["next", "reward"][:, 0].tolist() == [1.0] * 8 + [0.0] * 2


def test_goals_may_be_nested_and_of_bfloat16() -> None:
    data = steps(0, 8)
    data["task"] = {
        "goal": data.pop("desired_goal").bfloat16(),
        "reached": data.pop("achieved_goal").bfloat16(),
    }
    data["next", "task", "goal"] = data["task", "goal"].clone()
    rb = buffer(
        goal_key=("task", "goal"),
        achieved_goal_key=("task", "reached"),
        strategy="final",
        reward_fn=lambda rows: rows["task", "goal"],
    )
    rb.extend(data)
    sample = rb.sample()
    assert sample["task", "goal"].dtype == torch.bfloat16
    assert (sample["task", "goal"] == 7).all()
    assert (sample["next", "task", "goal"] == 7).all()
    assert (sample["next", "reward"] == 7).all()


def test_transforms_that_look_at_other_steps_see_what_is_stored() -> None:
    class Ahead(StepTransform):
        def look(self, view: StepView) -> None:
            view.next_ids = view.at(view.ids, [2])[0][:, 0]
            view.moved = frozenset({view.storage.require_schema().place_of(("next", "achieved_goal"))})

        def apply(self, batch: Any, seen: None) -> Any:
            return batch

    seen = []

    def look(rows: TensorDictBase) -> torch.Tensor:
        seen.append(rows["next", "achieved_goal"].clone())
        return rows["desired_goal"]

    rb = buffer(strategy="final", transform=Ahead(), reward_fn=look)
    rb.extend(steps(0, 8))
    sample = rb.sample()
    assert torch.equal(seen[0], (sample["achieved_goal"] + 3).clamp(max=8))
    assert (sample["next", "reward"] == 7).all()


def test_priorities_go_to_the_rows_that_were_drawn() -> None:
    rb = buffer(sampler=PrioritizedSampler(100, 1.0, 1.0), strategy="final")
    rb.extend(steps(0, 20))
    sample = rb.sample()
    sample["td_error"] = torch.arange(1.0, 11.0)
    rb.update_tensordict_priority(sample)
    wanted = dict(zip(sample["index"].tolist(), sample["td_error"].tolist(), strict=True))
    found = dict(rb.sql("SELECT _index, _priority FROM transitions").fetchall())
    assert {index: found[index] for index in wanted} == pytest.approx(wanted)
    assert found[19] == pytest.approx(wanted.get(19, 1.0))


# -- draws --------------------------------------------------------------------------------------------


def goals(rb: HERReplayBuffer, count: int) -> list[list[float]]:
    return [rb.sample()["desired_goal"][:, 0].tolist() for _ in range(count)]


@pytest.mark.some(2)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_continue_after_a_restart(tmp_path: Path, strategy: Any, prefetch: int) -> None:
    def opened() -> HERReplayBuffer:
        return buffer(ZarrStorage(tmp_path / "run.exp", 50), strategy=strategy, prefetch=prefetch)

    rb = opened()
    for episode in range(4):
        rb.extend(steps(episode, 10))
    state = rb.state_dict()
    wanted = goals(rb, 6)
    assert strategy == "final" or len({str(batch) for batch in wanted}) == 6
    rb.load_state_dict(state)
    assert goals(rb, 3) == wanted[:3]
    rb.close()
    rb = opened()
    assert goals(rb, 3) == wanted[3:]
    rb.close()


@pytest.mark.guarantee("draw/next")
@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_continue_after_a_kill(tmp_path: Path, strategy: Any) -> None:
    def begin(storage: Any) -> HERReplayBuffer:
        rb = buffer(storage, strategy=strategy)
        for episode in range(7):  # the ring has wrapped
            rb.extend(steps(episode, 10))
            rb.sample()
        return rb

    in_child(lambda: begin(ZarrStorage(tmp_path / "run.exp", 50)))
    rb = buffer(ZarrStorage(tmp_path / "run.exp", 50), strategy=strategy)
    assert goals(rb, 10) == goals(begin(MemoryStorage(50, seed=rb.storage.seed)), 10)
    rb.close()


def test_a_follower_draws_goals_while_the_writer_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rows_in_memory(monkeypatch)
    rb = buffer(ZarrStorage(tmp_path / "run.exp", 60), strategy="episode")
    for episode in range(6):
        rb.extend(steps(episode, 10))
    follower = pickle.loads(pickle.dumps(rb))
    for episode in range(6, 40):
        rb.extend(steps(episode, 10))
        sample = follower.sample()
        follower.refresh()
        assert torch.equal(sample["desired_goal"] // 1000, sample["achieved_goal"] // 1000)
        assert (sample["desired_goal"] >= 0).all()
    assert sample["achieved_goal"].min() >= 33_000
    follower.close()
    rb.close()


def test_settings_count_from_the_next_batch_on() -> None:
    rb = buffer(strategy="final")
    rb.extend(steps(0, 10))
    rb.her_ratio = 0.1
    assert (rb.sample()["desired_goal"] != UNREACHED).sum() == 1
    rb.her_ratio, rb.strategy = 1.0, HindsightStrategy.EPISODE
    assert len(set(rb.sample(100)["desired_goal"][:, 0].tolist())) == 10
    with pytest.raises(ValueError, match=r"her_ratio must be in \[0, 1\], got -1"):
        rb.her_ratio = -1.0
    assert rb.her_ratio == 1.0
    rb.reward_fn = lambda rows: torch.full((len(rows), 1), 7.0)
    assert (rb.sample()["next", "reward"] == 7.0).all()
    rb.goal_key = "aim"
    assert rb.goal_key == "aim"
    with pytest.raises(NotFoundError, match="goal_key='aim'"):
        rb.sample()


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("her_ratio", 0.0), ("strategy", "final"), ("reward_fn", lambda rows: torch.ones(len(rows)))],
)
def test_new_settings_apply_to_the_next_batch_although_batches_are_prefetched(name: str, value: Any) -> None:
    with buffer(prefetch=3, her_ratio=1.0) as rb:
        rb.extend(steps(1, 20))
        rb.sample()
        prefetcher = rb._sampling._require_prefetcher()
        wait_until(lambda: all(future.done() for _, future in prefetcher._queue))
        setattr(rb, name, value)
        for _ in range(4):
            found = rb.sample()
            if name == "her_ratio":
                assert (found["desired_goal"] == UNREACHED).all()
            elif name == "strategy":
                assert (found["desired_goal"] == 1019).all()
            else:
                assert (found["next", "reward"] == 1).all()


def raised(act: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception, match=".") as found:
        act()
    return found.value


def test_settings_out_of_bounds_are_refused_as_by_torchrl() -> None:
    for keywords in ({"her_ratio": 1.5}, {"strategy": "past"}):
        ours, other = (
            raised(lambda lib=lib, more=keywords: lib.HERReplayBuffer(reward, **more))  # type: ignore[misc]
            for lib in (expstore, theirs)
        )
        assert isinstance(ours, type(other))
        assert str(ours) == str(other)
    with pytest.raises(TypeError, match="reward_fn"):
        HERReplayBuffer(3)  # type: ignore[arg-type]


def test_fields_that_are_not_there_are_named_as_by_torchrl() -> None:
    def sampled(library: Any, without: Any, **keywords: Any) -> Any:
        rb = library.HERReplayBuffer(reward, storage=library.LazyTensorStorage(10), **keywords)
        rb.extend(steps(0, 5).exclude(*without))
        return rb.sample(5)

    for without, more in (
        ([], {"goal_key": "aim", "achieved_goal_key": "got"}),
        ([("next", "done")], {}),
        ([], {"end_key": ("next", "over")}),
    ):
        ours, other = (
            raised(lambda lib=lib, a=without, b=more: sampled(lib, a, **b))  # type: ignore[misc]
            for lib in (expstore, theirs)
        )
        assert isinstance(ours, NotFoundError)
        assert isinstance(other, KeyError)
        assert str(ours).split(". ")[0] == str(other.args[0]).split(". ")[0]
    ours = raised(lambda: sampled(expstore, [("next", "reward")]))
    assert "reward_key=('next', 'reward')" in str(ours)


def test_goals_and_rewards_of_another_kind_are_refused() -> None:
    for name, values in (("achieved_goal", torch.zeros(5, 2)), ("desired_goal", torch.zeros(5, 1).long())):
        rb = buffer()
        rb.extend(steps(0, 5).set(name, values))
        with pytest.raises(
            SchemaError, match=r"'desired_goal' is .*'achieved_goal', is .*with the dtype and shape of goals"
        ):
            rb.sample()
    rb = buffer(reward_fn=lambda rows: torch.zeros(3))
    rb.extend(steps(0, 5))
    with pytest.raises(SchemaError, match=r"shape \[3\] for 10 rows.*\[10, 1\]"):
        rb.sample()


def test_invalid_settings_are_refused() -> None:
    for key in ("goal_key", "achieved_goal_key", "reward_key", "end_key"):
        for value in (None, 3, ("next", 3), ()):
            with pytest.raises(TypeError, match=f"^{key} is the key of a field"):
                buffer(**{key: value})
    for wrong in (None, "x"):
        with pytest.raises(TypeError, match=f"her_ratio must be the fraction.*{wrong!r}"):
            buffer(her_ratio=wrong)
        rb = buffer(reward_fn=lambda rows, wrong=wrong: wrong)
        rb.extend(steps(0, 5))
        with pytest.raises(TypeError, match=r"reward_fn returned .* return their rewards, .*shape \(10,\)"):
            rb.sample()


def test_a_state_of_other_settings_is_refused() -> None:
    rb = buffer(strategy="final")
    rb.extend(steps(0, 5))
    with pytest.raises(StateError, match=r"'strategy': 'final'.*same settings"):
        buffer(strategy="future").load_state_dict(rb.state_dict())
    assert "strategy='final'" in repr(rb)
    assert "her_ratio=1.0" in repr(rb)
