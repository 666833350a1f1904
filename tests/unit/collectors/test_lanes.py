"""Collector: every autoreset mode stores the same episodes, whole, in time order and only once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from tensordict import TensorDict

import expstore
from expstore.collectors.lanes import LaneCollector
from expstore.errors import NotReadyError, SchemaError, StateError
from tests.support.recorded_envs import LENGTHS, Counting

MODES = tuple(AutoresetMode)
COMBINATIONS = list(itertools.product((SyncVectorEnv, AsyncVectorEnv), MODES))


def make_envs(
    kind: type[VectorEnv[Any, Any, Any]] = SyncVectorEnv,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    lengths: tuple[int, ...] = LENGTHS,
    nested: bool = False,
) -> Any:
    makers = [
        lambda length=length, lane=lane: Counting(lane, length=length, is_nested=nested)
        for lane, length in enumerate(lengths)
    ]
    # Forked, whatever is the default: to spawn a worker takes seconds.
    forked = {"context": "fork"} if kind is AsyncVectorEnv else {}
    return kind(makers, autoreset_mode=mode, **forked)  # type: ignore[call-arg]


class FakeBuffer:
    """Keeps what it is given; drops rows with trajectory id -1, as the buffer does.

    Args:
        failure: Is raised once, by the `extend` after `at` batches were stored.
        at: Number of batches.
        stores: Whether that `extend` stores its rows first.
        others: Number of rows that others write meanwhile.
    """

    def __init__(
        self, failure: BaseException | None = None, *, at: int = 0, stores: bool = False, others: int = 0
    ) -> None:
        self.batches: list[TensorDict] = []
        self.sources: list[str | None] = []
        self.ended: list[str | None] = []
        self.failure, self.at, self.stores, self.others = failure, at, stores, others
        self.rows_of_others = 0

    @property
    def write_count(self) -> int:
        own = sum(int((batch["collector", "traj_ids"] >= 0).sum()) for batch in self.batches)
        return own + self.rows_of_others

    def extend(self, data: TensorDict, *, source: str | None = None) -> None:
        failure = self.failure if len(self.batches) == self.at else None
        if failure is None or self.stores:
            self.batches.append(data.clone())
            self.sources.append(source)
        if failure is not None:
            self.failure = None
            self.rows_of_others += self.others
            raise failure

    def lanes(self) -> list[TensorDict]:
        """Return each lane's transitions in time order."""
        joined: Any = torch.cat(self.batches, dim=1)
        return [lane[lane["collector", "traj_ids"] >= 0] for lane in joined.unbind(0)]

    @property
    def episodes(self) -> FakeBuffer:
        return self

    def end_stream(self, source: str | None) -> None:
        self.ended.append(source)

    def lane_episodes(self) -> list[list[TensorDict]]:
        """Return each lane's episodes, told apart by trajectory id alone."""
        return [list(split(lane)) for lane in self.lanes()]


def split(lane: TensorDict) -> Iterator[TensorDict]:
    ids = lane["collector", "traj_ids"]
    cuts = torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1
    bounds = [0, *cuts.tolist(), len(ids)]
    for low, high in itertools.pairwise(bounds):
        yield lane[low:high]


def constant_policy(observation: Any) -> Any:
    return np.arange(len(observation)) + 7


def by_observation(observation: Any) -> Any:
    """Act on what is seen, so that a wrong observation shows in the actions too."""
    return np.abs(observation[:, 0]).astype(np.int64) % 1000


def nested_policy(observation: Any) -> Any:
    force = torch.from_numpy(observation["position"][:, :1]).repeat(1, 3) / 1e4
    return {"move": by_observation(observation["position"]), "force": force}


def leaves(batch: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(batch.exclude(("collector", "traj_ids")).items(True, True))


def collected(envs: Any, policy: Any, steps: int = 150, **options: Any) -> FakeBuffer:
    rb = FakeBuffer()
    with LaneCollector(envs, policy, rb, steps_per_lane=5, **options) as collector:
        collector.collect(steps)
    envs.close()
    return rb


def assert_linked(lane: TensorDict, observation_keys: list[Any]) -> None:
    """Within an episode each next observation is the following row's observation."""
    for episode in split(lane):
        assert not episode["next", "done"][:-1].any()
        for key in observation_keys:
            following = ("next", *((key,) if isinstance(key, str) else key))
            torch.testing.assert_close(episode[following][:-1], episode[key][1:], rtol=0, atol=0)


def assert_same_episodes(one: FakeBuffer, other: FakeBuffer, at_least: int = 4) -> None:
    for mine, theirs in zip(one.lane_episodes(), other.lane_episodes(), strict=True):
        whole = [
            list(itertools.takewhile(lambda e: bool(e["next", "done"][-1]), side)) for side in (mine, theirs)
        ]
        assert min(map(len, whole)) >= at_least
        for left, right in zip(*whole, strict=False):
            assert leaves(left).keys() == leaves(right).keys()
            for key, column in leaves(left).items():
                torch.testing.assert_close(column, leaves(right)[key], rtol=0, atol=0, msg=str(key))


@pytest.mark.some(3)
@pytest.mark.parametrize(("kind", "mode"), COMBINATIONS)
@pytest.mark.parametrize("nested", [False, True])
def test_every_autoreset_mode_stores_the_same_episodes(kind: Any, mode: AutoresetMode, nested: bool) -> None:
    policy = nested_policy if nested else by_observation
    reference = collected(make_envs(mode=AutoresetMode.DISABLED, nested=nested), policy)
    rb = collected(make_envs(kind, mode, nested=nested), policy)
    assert_same_episodes(reference, rb)
    keys: list[Any] = [
        ("observation", "position"),
        ("observation", "parts", "0"),
        ("observation", "parts", "1"),
    ]
    for number, lane in enumerate(rb.lanes()):
        assert_linked(lane, keys if nested else ["observation"])
        for episode in list(split(lane))[:-1]:
            assert len(episode) == LENGTHS[number]


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", MODES)
def test_random_actions_do_not_depend_on_the_autoreset_mode(mode: AutoresetMode) -> None:
    for nested in (False, True):
        reference = collected(make_envs(mode=AutoresetMode.SAME_STEP, nested=nested), None, seed=3)
        assert_same_episodes(reference, collected(make_envs(mode=mode, nested=nested), None, seed=3))


def test_random_actions_follow_the_seed_and_differ_between_lanes() -> None:
    lanes = collected(make_envs(), None, seed=3).lanes()
    other = collected(make_envs(), None, seed=4).lanes()
    assert not torch.equal(lanes[3]["action"][:20], other[3]["action"][:20])
    assert not torch.equal(lanes[3]["action"][:20], lanes[2]["action"][:20])


def test_the_seed_makes_the_environment_repeat_itself() -> None:
    runs = []
    for _ in range(2):
        envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        runs.append(collected(envs, None, seed=11))
    assert_same_episodes(runs[0], runs[1], at_least=1)


def test_a_block_has_torchrls_keys_shapes_and_dtypes() -> None:
    rb = collected(make_envs(), constant_policy, steps=20)
    batch = rb.batches[0]
    assert batch.batch_size == (4, 5)
    assert batch.names == [None, "time"]
    found = {key: (value.dtype, tuple(value.shape[2:])) for key, value in batch.items(True, True)}
    flag = (torch.bool, (1,))
    assert found == {
        "observation": (torch.float32, (2,)),
        "action": (torch.int64, ()),
        ("next", "observation"): (torch.float32, (2,)),
        ("next", "reward"): (torch.float32, (1,)),
        **{key: flag for name in ("done", "terminated", "truncated") for key in (name, ("next", name))},
        ("collector", "traj_ids"): (torch.int64, ()),
    }
    assert not any(batch[name].any() for name in ("done", "terminated", "truncated"))
    ended = batch["next", "terminated"] | batch["next", "truncated"]
    torch.testing.assert_close(batch["next", "done"], ended)


def test_a_reset_is_not_a_transition() -> None:
    rb = collected(make_envs(lengths=(1, 4)), constant_policy, steps=40)
    first, second = rb.lanes()
    assert first["next", "done"].all()
    assert len(second) > len(first)
    dropped = [
        bool(batch["collector", "traj_ids"][0, i] == -1)
        for batch in rb.batches
        for i in range(batch.shape[1])
    ]
    assert dropped == [i % 2 == 1 for i in range(len(dropped))]


def test_trajectory_ids_come_once_in_a_store() -> None:
    rb = FakeBuffer()
    for _ in range(3):
        with LaneCollector(make_envs(), constant_policy, rb, steps_per_lane=4) as collector:
            collector.collect(50)
    pieces = [episode for lane in rb.lane_episodes() for episode in lane]
    ids = [int(episode["collector", "traj_ids"][0]) for episode in pieces]
    assert len(set(ids)) == len(ids)
    assert max(ids) < rb.write_count


def test_collect_counts_what_is_stored() -> None:
    rb = FakeBuffer()
    collector = LaneCollector(make_envs(), constant_policy, rb, steps_per_lane=5)
    counts = [collector.collect(steps) for steps in (1, 33, 0, 7)]
    assert sum(counts) == rb.write_count
    assert counts[2] == 0
    for asked, stored in zip((1, 33, 7), (counts[0], counts[1], counts[3]), strict=True):
        assert asked <= stored < asked + 4


def test_iteration_yields_one_block_at_a_time() -> None:
    rb = FakeBuffer()
    collector = LaneCollector(make_envs(), constant_policy, rb, steps_per_lane=6)
    counts = list(itertools.islice(collector, 5))
    assert len(rb.batches) == 5
    assert {batch.batch_size for batch in rb.batches} == {(4, 6)}
    assert sum(counts) == rb.write_count
    for lane in rb.lanes():
        assert_linked(lane, ["observation"])


def test_blocks_do_not_share_memory() -> None:
    class Keeping(FakeBuffer):
        def extend(self, data: TensorDict, *, source: str | None = None) -> None:
            self.batches.append(data)

    rb = Keeping()
    list(itertools.islice(LaneCollector(make_envs(), constant_policy, rb, steps_per_lane=3), 4))
    for lane in rb.lanes():
        assert_linked(lane, ["observation"])


def test_the_source_goes_to_extend() -> None:
    rb = collected(make_envs(), constant_policy, steps=20, source="worker-3")
    assert set(rb.sources) == {"worker-3"}
    assert set(collected(make_envs(), constant_policy, steps=20).sources) == {None}


def test_a_single_environment_is_one_lane() -> None:
    rb = FakeBuffer()
    env = Counting(2, length=3)
    with LaneCollector(env, constant_policy, rb, steps_per_lane=4) as collector:
        assert collector.collect(10) == 10
    (lane,) = rb.lanes()
    assert [len(episode) for episode in split(lane)] == [3, 3, 3, 1]
    assert_linked(lane, ["observation"])


def test_a_policy_may_work_on_its_observations_in_place() -> None:
    def careless(observation: Any) -> Any:
        action = by_observation(observation)
        observation /= 1000
        return action

    for mode in MODES:
        assert_same_episodes(
            collected(make_envs(mode=mode), by_observation), collected(make_envs(mode=mode), careless)
        )


def test_an_environment_may_reuse_its_arrays() -> None:
    def reusing(mode: AutoresetMode) -> Any:
        return SyncVectorEnv(
            [lambda i=i, n=n: Counting(i, length=n) for i, n in enumerate(LENGTHS)],
            autoreset_mode=mode,
            copy=False,
        )

    for mode in MODES:
        assert_same_episodes(
            collected(make_envs(mode=mode), by_observation), collected(reusing(mode), by_observation)
        )


class BatchedFinal(VectorWrapper[Any, Any, Any, Any, Any]):
    """Hands over final observations as one batch, as vector environments outside gymnasium do."""

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(actions)
        if "final_obs" in info:
            final = np.full_like(observation, 123)
            for lane in np.flatnonzero(terminated | truncated):
                final[lane] = info["final_obs"][lane]
            info = {"final_obs": final}
        return observation, reward, terminated, truncated, info


def test_final_observations_may_come_as_a_batch() -> None:
    envs = BatchedFinal(make_envs(mode=AutoresetMode.SAME_STEP))
    assert_same_episodes(collected(make_envs(), by_observation), collected(envs, by_observation))


class PartialReset(VectorWrapper[Any, Any, Any, Any, Any]):
    """Gives nothing sensible for the lanes that a reset leaves alone."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        mask = np.ones(self.num_envs, bool) if options is None else options["reset_mask"].copy()
        observation, info = super().reset(seed=seed, options=options)
        observation[~mask] = -999
        return observation, info


def test_a_reset_of_some_lanes_leaves_the_others_alone() -> None:
    envs = PartialReset(make_envs(mode=AutoresetMode.DISABLED))
    assert_same_episodes(collected(make_envs(), by_observation), collected(envs, by_observation))


class Interrupting:
    """A policy that raises at its n-th call, once."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, observation: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return by_observation(observation)


@pytest.mark.some(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [1, 3, 5, 6, 13])
def test_ctrl_c_in_the_policy_loses_no_step(mode: AutoresetMode, at: int) -> None:
    rb = FakeBuffer()
    envs = make_envs(mode=mode, lengths=(9, 20))
    with (
        pytest.raises(KeyboardInterrupt),
        LaneCollector(envs, Interrupting(at, KeyboardInterrupt()), rb, steps_per_lane=5) as collector,
    ):
        collector.collect(1000)
    resets = 1 if mode is AutoresetMode.NEXT_STEP and at > 10 else 0
    assert rb.write_count == 2 * (at - 1) - resets
    if rb.batches:
        for lane in rb.lanes():
            assert_linked(lane, ["observation"])


@pytest.mark.parametrize("mode", MODES)
def test_collecting_continues_after_an_interruption(mode: AutoresetMode) -> None:
    rb = FakeBuffer()
    collector = LaneCollector(
        make_envs(mode=mode), Interrupting(8, KeyboardInterrupt()), rb, steps_per_lane=5
    )
    with pytest.raises(KeyboardInterrupt):
        collector.collect(100)
    collector.collect(150)
    assert_same_episodes(collected(make_envs(mode=mode), by_observation), rb)


class Failing(VectorWrapper[Any, Any, Any, Any, Any]):
    """Raises after the n-th step was taken, before its outcome is known."""

    calls = 0

    def step(self, actions: Any) -> Any:
        outcome = super().step(actions)
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt
        return outcome


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_got_lost_ends_the_episodes_it_was_in(mode: AutoresetMode) -> None:
    rb = FakeBuffer()
    with LaneCollector(Failing(make_envs(mode=mode, lengths=(9, 20))), constant_policy, rb) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.collect(60)
        collector.collect(60)
    for lane in rb.lanes():
        assert_linked(lane, ["observation"])
        first, second = itertools.islice(split(lane), 2)
        assert len(first) == 3
        assert not first["next", "done"].any()
        assert int(second["observation"][0, 0]) % 100 == 0


def test_rows_stored_when_ctrl_c_came_are_not_stored_again() -> None:
    rb = FakeBuffer(KeyboardInterrupt(), stores=True)
    with (
        pytest.raises(KeyboardInterrupt),
        LaneCollector(make_envs(), constant_policy, rb, steps_per_lane=5) as collector,
    ):
        collector.collect(200)
    assert len(rb.batches) == 1


@pytest.mark.parametrize(("failure", "others"), [(OSError("disk full"), 0), (NotReadyError("limited"), 20)])
def test_rows_that_were_refused_stay_pending(failure: Exception, others: int) -> None:
    rb = FakeBuffer(failure, others=others)
    collector = LaneCollector(make_envs(), by_observation, rb, steps_per_lane=5)
    with pytest.raises(type(failure)):
        collector.collect(100)
    assert not rb.batches
    collector.collect(150)
    assert_same_episodes(collected(make_envs(), by_observation), rb)


def test_ctrl_c_while_others_write_leaves_out_no_step() -> None:
    rb = FakeBuffer(KeyboardInterrupt(), at=2, others=1)
    with LaneCollector(make_envs(lengths=(9, 20)), by_observation, rb, steps_per_lane=5) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.collect(60)
        assert len(rb.batches) == 2
        collector.collect(60)
    for lane in rb.lanes():
        assert_linked(lane, ["observation"])


def test_the_first_error_is_raised() -> None:
    policy = Interrupting(3, RuntimeError("policy broke"))
    with (
        pytest.raises(RuntimeError, match="policy broke") as caught,
        LaneCollector(make_envs(lengths=(9, 9)), policy, FakeBuffer(OSError("disk full"))) as collector,
    ):
        collector.collect(100)
    assert caught.value.__notes__ == ["4 pending transitions could not be stored either: disk full"]
    with (
        pytest.raises(OSError, match="disk full"),
        LaneCollector(make_envs(), constant_policy, FakeBuffer(OSError("disk full"))) as collector,
    ):
        collector.collect(1)


def test_a_closed_collector_says_so() -> None:
    rb = FakeBuffer()
    collector = LaneCollector(make_envs(), constant_policy, rb)
    collector.close()
    collector.close()
    assert rb.batches == []
    with pytest.raises(StateError, match="this collector is closed; create a new one"):
        collector.collect(1)
    with pytest.raises(StateError):
        next(iter(collector))


BAD_ACTIONS: dict[str, tuple[Any, str]] = {
    "none": (None, "object"),
    "too few": (np.zeros(3, np.int64), r"int64 \(3,\), its space says int64 \(4,\)"),
    "a column": (torch.zeros(4, 1, dtype=torch.int64), r"int64 \(4, 1\), its space says int64 \(4,\)"),
    "fractions": (np.zeros(4), r"float64 \(4,\), its space says int64"),
    "ragged": ([[1], [2, 3], [4], [5]], "no array for 'action'"),
    "negative": (np.array([0, 1, -1, 2]), r"'action' = -1, its space is Discrete\(1000\)"),
    "too large": (np.array([0, 1, 1000, 2]), "'action' = 1000"),
    "values and more": ((np.zeros(4, np.int64), np.zeros(4)), "'action'"),
}


@pytest.mark.parametrize("case", BAD_ACTIONS)
def test_a_bad_action_is_refused_and_nothing_is_stored(case: str) -> None:
    action, message = BAD_ACTIONS[case]
    rb = FakeBuffer()
    with (
        pytest.raises(SchemaError, match=message),
        LaneCollector(make_envs(), lambda observation: action, rb) as collector,
    ):
        collector.collect(10)
    assert rb.batches == []


def test_a_bad_nested_action_is_named() -> None:
    good = {"move": np.zeros(4, np.int64), "force": np.zeros((4, 3))}
    cases: list[tuple[Any, str]] = [
        ({"move": good["move"]}, "no array for 'action.force'"),
        (good["move"], "no array for 'action"),
        ({**good, "force": np.full((4, 3), np.nan)}, "'action.force' = nan"),
        ({**good, "force": np.zeros((4, 2))}, r"'action.force' as float64 \(4, 2\)"),
    ]
    for action, message in cases:
        collector = LaneCollector(
            make_envs(nested=True), lambda observation, action=action: action, FakeBuffer()
        )
        with pytest.raises(SchemaError, match=message):
            collector.collect(1)


def test_a_step_before_a_bad_action_is_kept() -> None:
    rb = FakeBuffer()
    actions = iter([np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2)])
    envs = make_envs(lengths=(9, 9))
    with (
        pytest.raises(SchemaError),
        LaneCollector(envs, lambda observation: next(actions), rb, steps_per_lane=8) as collector,
    ):
        collector.collect(100)
    assert rb.write_count == 4


def test_the_autoreset_mode_must_be_known() -> None:
    silent = make_envs(mode=AutoresetMode.SAME_STEP)
    silent.metadata = {}
    with pytest.raises(ValueError, match="pass autoreset_mode=, one of 'NextStep', 'SameStep', 'Disabled'"):
        LaneCollector(silent, constant_policy, FakeBuffer())
    rb = FakeBuffer()
    with LaneCollector(silent, by_observation, rb, autoreset_mode="SameStep", steps_per_lane=5) as collector:
        collector.collect(150)
    assert_same_episodes(collected(make_envs(), by_observation), rb)
    with pytest.raises(ValueError, match="one of 'NextStep'"):
        LaneCollector(silent, constant_policy, FakeBuffer(), autoreset_mode="sometimes")
    with pytest.raises(ValueError, match="leave the argument out"):
        LaneCollector(make_envs(), constant_policy, FakeBuffer(), autoreset_mode="Disabled")


def test_a_false_promise_of_final_observations_is_an_error() -> None:
    silent = make_envs(mode=AutoresetMode.NEXT_STEP)
    silent.metadata = {}
    collector = LaneCollector(silent, constant_policy, FakeBuffer(), autoreset_mode="SameStep")
    with pytest.raises(SchemaError, match="final_obs"):
        collector.collect(100)


def test_wrong_arguments_are_refused() -> None:
    rb = FakeBuffer()
    with pytest.raises(TypeError, match="env is a str"):
        LaneCollector("CartPole-v1", None, rb)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="policy is 3"):
        LaneCollector(make_envs(), 3, rb)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps_per_lane is 0"):
        LaneCollector(make_envs(), None, rb, steps_per_lane=0)


def test_a_space_without_a_fixed_shape_is_refused() -> None:
    env = Counting()
    env.observation_space = spaces.Dict({"said": spaces.Text(10)})
    with pytest.raises(ValueError, match=r"space of 'observation\.said' is Text"):
        LaneCollector(env, None, FakeBuffer())


def test_a_nested_space_goes_into_a_store_and_comes_back(tmp_path: Path) -> None:
    envs = make_envs(nested=True)
    with (
        expstore.open(tmp_path / "run.exp", seed=0, batch_size=64) as rb,
        LaneCollector(envs, nested_policy, rb, steps_per_lane=5) as collector,
    ):
        collector.collect(100)
        batch = rb.sample()
        query = """
            SELECT count(*) FROM transitions
            WHERE next.observation.parts."0" = observation.parts."0" + 1
              AND action.move = observation.position[1]::BIGINT % 1000
        """
        assert rb.sql(query).fetchall() == [(len(rb),)]
    assert batch["observation", "parts", "0"].dtype is torch.int16
    place = batch["observation", "position"][:, 0]
    assert torch.equal(batch["observation", "parts", "1"][:, 0], batch["observation", "parts", "0"] % 2)
    torch.testing.assert_close(batch["next", "observation", "position"][:, 0], place + 1)


def test_each_lane_lies_in_one_run_per_block(tmp_path: Path) -> None:
    with (
        expstore.open(tmp_path / "run.exp", seed=0) as rb,
        LaneCollector(make_envs(lengths=(50, 60)), constant_policy, rb, steps_per_lane=10) as collector,
    ):
        collector.collect(80)
        count = rb.sql("SELECT count(*), min(stride), max(stride) FROM fragments").fetchall()
    assert count == [(8, 1, 1)]


def test_a_second_run_adds_episodes_of_its_own(tmp_path: Path) -> None:
    for run in range(2):
        with (
            expstore.open(tmp_path / "run.exp") as rb,
            LaneCollector(make_envs(lengths=(4, 5)), constant_policy, rb, source="worker") as collector,
        ):
            collector.collect(30 if run else 31)
    with expstore.open(tmp_path / "run.exp") as rb:
        longest = rb.sql("SELECT max(length) FROM episodes").fetchall()[0][0]
        rows = rb.sql("SELECT sum(length) FROM episodes").fetchall()[0][0]
        assert longest == 5
        assert rows == len(rb)
