"""`rb.record`: the rows, episodes and errors of a loop that records step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    MemoryStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from expstore.errors import ArgumentError, NotReadyError, SchemaError, StateError, StorageError
from expstore.rate_limiters import SampleToInsertRatio
from expstore.storages.format.journal import Journal
from tests.support.forks import in_child

OBSERVATION = np.arange(4, dtype=np.float32)


def steps(count: int, *, length: int = 5, start: int = 0) -> list[tuple[Any, ...]]:
    """Return what a loop gives: step k begins with observation k; every `length`-th one terminates."""
    return [
        (
            OBSERVATION + k,
            np.int64(k % 3),
            float(k),
            OBSERVATION + k + 1,
            k % length == length - 1,
            False,
        )
        for k in range(start, start + count)
    ]


def record(rb: Any, given: list[tuple[Any, ...]], source: str | None = "env-0", **settings: Any) -> None:
    with rb.record(source, **settings) as episode:
        for values in given:
            episode.step(*values)


def batch_of(given: list[tuple[Any, ...]]) -> TensorDict:
    """The same rows as a TensorDict."""
    observation, action, reward, following, terminated, truncated = (
        np.stack(part) for part in zip(*given, strict=True)
    )
    return TensorDict(
        {
            "observation": torch.from_numpy(observation),
            "action": torch.from_numpy(action),
            "next": {
                "observation": torch.from_numpy(following),
                "reward": torch.from_numpy(reward).float()[:, None],
                "terminated": torch.from_numpy(terminated)[:, None],
                "truncated": torch.from_numpy(truncated)[:, None],
                "done": torch.from_numpy(terminated | truncated)[:, None],
            },
        },
        [len(given)],
    )


def episodes(rb: Any) -> list[tuple[Any, ...]]:
    """Source, length, return and status of every episode, the oldest first."""
    found = rb.episodes()
    return [
        (row["source"].partition("/")[0], row["length"], row["return"], row["status"])
        for row in found.arrow().to_pylist()
    ]


KINDS: dict[str, Callable[[Path], Any]] = {
    "zarr": lambda path: expstore.open(path, seed=0),
    "ring": lambda path: expstore.open(path, capacity=40, seed=0),
    "packed": lambda path: expstore.open(path, layout="packed", seed=0),
    "sync": lambda path: expstore.open(path, durability="sync", seed=0),
    "memory": lambda path: TensorDictReplayBuffer(storage=MemoryStorage(1000), batch_size=4),
    "torchrl": lambda path: TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("flush_steps", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_episodes_are_those_of_extend(tmp_path: Path, kind: str, flush_steps: int) -> None:
    given = steps(33)
    with KINDS[kind](tmp_path / "a.exp") as rb, KINDS[kind](tmp_path / "b.exp") as other:
        record(rb, given, flush_steps=flush_steps)
        other.extend(batch_of(given), source="env-0")
        other.episodes.end("env-0")
        assert (rb[:] == other[:]).all()
        assert set(rb[:].keys(True)) == set(other[:].keys(True))
        assert episodes(rb) == episodes(other)
        assert episodes(rb)[-1][3] == "cut"


def test_rows_show_at_every_flush(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        episode = rb.record("env-0", flush_steps=4)
        lengths = []
        for values in steps(9):
            episode.step(*values)
            lengths.append(len(rb))
        assert lengths == [0, 0, 0, 4, 4, 4, 4, 8, 8]
        episode.flush()
        assert len(rb) == 9
        episode.flush()
        assert len(rb) == 9
        with expstore.open(tmp_path / "a.exp", mode="r") as follower:
            rb.storage.drain()
            assert len(follower) == 9
        episode.close()
        episode.close()
        with pytest.raises(StateError, match="recorder is closed"):
            episode.step(*steps(1)[0])


@pytest.mark.parametrize("lanes", [None, 2])
def test_steps_that_only_reset_are_left_out(tmp_path: Path, lanes: int | None) -> None:
    """The step after an end resets; a lane that is not valid does not end an episode."""

    def of_lanes(first: Any, second: Any) -> Any:
        return first if lanes is None else np.array([first, second])

    with expstore.open(tmp_path / "a.exp") as rb:
        with rb.record("env", lanes=lanes, flush_steps=3, autoreset_mode="NextStep") as episode:
            for k in range(12):
                observation = np.full((4,) if lanes is None else (2, 4), k, np.float32)
                valid = None if lanes is None else np.array([True, k != 2])
                ends = of_lanes(k % 4 == 2, k == 2)
                action, reward, truncated = of_lanes(k, k), of_lanes(1.0, 1.0), of_lanes(False, False)
                episode.step(observation, action, reward, observation + 1, ends, truncated, valid=valid)
        counts = [(source, length) for source, length, _, _ in _by_lane(rb)]
        first = [("env", 3), ("env", 3), ("env", 3)]
        assert [entry for entry in counts if entry[0] == "env"] == first
        assert [entry for entry in counts if entry[0] != "env"] == ([] if lanes is None else [("env//1", 11)])
        assert 3 not in rb[:]["action"][:4].tolist() or lanes is not None


def _by_lane(rb: Any) -> list[tuple[Any, ...]]:
    return [
        (row["source"], row["length"], row["return"], row["status"])
        for row in rb.episodes().arrow().to_pylist()
    ]


def record_and_fail(rb: Any, before: Callable[[], None]) -> None:
    """Record four steps, then raise a KeyError."""
    with rb.record("env-0", flush_steps=16) as episode:
        for values in steps(4):
            episode.step(*values)
        before()
        raise KeyError("amid")


def test_reset_close_and_exceptions_cut_an_episode(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        with rb.record("env-0", flush_steps=16) as episode:
            for values in steps(3):
                episode.step(*values)
            episode.reset()
            episode.reset()
            for values in steps(2):
                episode.step(*values)
        with pytest.raises(KeyError, match="amid"):
            record_and_fail(rb, lambda: None)
        record(rb, steps(5))
        statuses = [(length, status) for _, length, _, status in episodes(rb)]
        assert statuses == [(3, "cut"), (2, "cut"), (4, "cut"), (5, "terminated")]


def test_an_error_of_the_loop_is_not_hidden_by_one_of_the_store(tmp_path: Path) -> None:
    rb = expstore.open(tmp_path / "a.exp")
    with pytest.raises(KeyError, match="amid"):
        record_and_fail(rb, rb.close)


def test_a_truncated_step_ends_an_episode(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        with rb.record("env-0") as episode:
            for k, values in enumerate(steps(4, length=100)):
                episode.step(*values[:5], k == 1)
        assert [(length, status) for _, length, _, status in episodes(rb)] == [(2, "truncated"), (2, "cut")]
        assert rb[:]["next", "done"].flatten().tolist() == [False, True, False, False]


def test_a_former_open_episode_of_the_source_is_cut(tmp_path: Path) -> None:
    """Rows of `extend` and rows of a recorder share no episode."""
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(batch_of(steps(3)), source="env-0")
        rb.extend(batch_of(steps(2)), source="env-1")
        record(rb, steps(2, start=3, length=100))
        assert episodes(rb)[0] == ("env-0", 3, 3.0, "cut")
        assert episodes(rb)[1] == ("env-1", 2, 1.0, "open")
        assert episodes(rb)[2] == ("env-0", 2, 7.0, "cut")


def test_an_adopted_episode_continues(tmp_path: Path) -> None:
    """A restarted robot stands where it stood: its first step must continue the adopted episode."""
    path = tmp_path / "a.exp"
    with expstore.open(path) as rb:
        rb.extend(batch_of(steps(3)), source="robot")
    with expstore.open(path) as rb:
        rb.episodes.resume("robot")
        with rb.record("robot") as episode:
            with pytest.raises(SchemaError, match="continue"):
                episode.step(*steps(1, start=7)[0])
    with expstore.open(path) as rb:
        rb.episodes.resume("robot")
        record(rb, steps(2, start=3), "robot")
        assert [(length, status) for _, length, _, status in episodes(rb)] == [(5, "terminated")]


def test_observations_and_actions_may_be_dicts_and_there_may_be_more_fields(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        with rb.record("env-0", flush_steps=2) as episode:
            for k in range(5):
                observation = {"image": np.full((3, 3), k, np.uint8), "speed": {"x": 0.5 * k}}
                following = {"image": np.full((3, 3), k + 1, np.uint8), "speed": {"x": 0.5 * k + 0.5}}
                action = {"move": k, "force": np.full(2, k, np.float64)}
                more = {"log_prob": -1.0 * k, "next.value": np.float32(k)}
                episode.step(observation, action, 1, following, False, False, **more)
        rows = rb[:]
        assert rows["observation", "image"].shape == (5, 3, 3)
        assert rows["next", "observation", "speed", "x"].tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
        assert rows["action", "move"].tolist() == [0, 1, 2, 3, 4]
        assert rows["action", "force"].dtype is torch.float64
        assert rows["next", "value"].tolist() == [0, 1, 2, 3, 4]
        assert rows["log_prob"].dtype is torch.float32


def test_tensors_lists_and_numbers_of_other_dtypes_are_cast(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        record(rb, steps(1))
        with rb.record() as episode:
            episode.step(torch.arange(4.0), torch.tensor(2), torch.tensor([1.5]), [0, 1, 2, 3], False, False)
            episode.step(
                np.arange(4.0), np.int8(1), np.float64(2.5), np.arange(4), np.False_, np.array([True])
            )
            episode.step(OBSERVATION, 2, 3, OBSERVATION[::-1][::-1], np.array(False), torch.tensor(False))
        rows = rb[1:]
        assert rows["observation"].tolist() == [[0, 1, 2, 3]] * 3
        assert rows["next", "observation"].tolist() == [[0, 1, 2, 3]] * 3
        assert rows["next", "reward"].flatten().tolist() == [1.5, 2.5, 3.0]
        assert rows["action"].tolist() == [2, 1, 2]
        assert rows["next", "truncated"].flatten().tolist() == [False, True, False]


#: Place in a step, and a value that does not fit there.
WRONG: list[tuple[int, Any]] = [
    (0, np.zeros(5, np.float32)),
    (0, 1.0),
    (0, {"a": OBSERVATION}),
    (1, 1.5),
    (1, "left"),
    (1, 2**70),
    (2, None),
    (2, 1e300),
    (2, np.float64(1e300)),
    (2, np.zeros(2)),
    (3, np.zeros((1, 4), np.float32)),
    (4, 1),
]
FIELDS = ("observation", "action", "next.reward", "next.observation", "next.terminated")


def test_a_step_that_does_not_fit_is_not_recorded(tmp_path: Path) -> None:
    first, second = steps(2)
    with expstore.open(tmp_path / "a.exp") as rb:
        with rb.record("env-0", flush_steps=8) as episode:
            episode.step(*first)
            for place, value in WRONG:
                with pytest.raises(SchemaError, match=f"'{FIELDS[place]}'"):
                    episode.step(*second[:place], value, *second[place + 1 :])
            episode.step(*second)
        assert (rb[:] == batch_of([first, second])).all()


def test_other_fields_than_the_rows_have(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        record(rb, steps(1))
        with rb.record() as episode:
            with pytest.raises(SchemaError, match="no field 'log_prob'"):
                episode.step(*steps(1)[0], log_prob=0.0)
    with expstore.open(tmp_path / "b.exp") as rb:
        with rb.record() as episode:
            episode.step(*steps(1)[0], log_prob=0.0)
            with pytest.raises(SchemaError, match="lacks fields of this store: log_prob"):
                episode.step(*steps(1)[0])
            episode.step(*steps(1)[0], log_prob=1.0)
        assert rb[:]["log_prob"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("flush_steps", [1, 3])
@pytest.mark.parametrize("lanes", [None, 2])
def test_fields_of_variable_length(tmp_path: Path, lanes: int | None, flush_steps: int) -> None:
    """Texts are stored in a store with layout="arrow"; every step is copied."""
    reused = np.zeros((*([] if lanes is None else [lanes]), 3), np.float32)

    def of_lanes(value: Any) -> Any:
        return value if lanes is None else [value] * lanes

    with expstore.open(tmp_path / "a.exp", layout="arrow") as rb:
        with rb.record("env", lanes=lanes, flush_steps=flush_steps) as episode:
            for k in range(7):
                reused[...] = k
                observation = {"says": of_lanes("é" * k), "seen": reused}
                following = {"says": of_lanes("é" * (k + 1)), "seen": reused + 1}
                values = (of_lanes(k), of_lanes(0.5), following, of_lanes(k == 4), of_lanes(False))
                valid = None if lanes is None or k != 2 else np.array([True, False])
                episode.step(observation, *values, valid=valid, note=of_lanes(f"n{k}"))
        names = ("source", "length", "return", "status")
        found = [tuple(row[name] for name in names) for row in rb.episodes().arrow().to_pylist()]
        ours = [("env", 5, 2.5, "terminated"), ("env", 2, 1.0, "cut")]
        others = [("env//1", 4, 2.0, "terminated"), ("env//1", 2, 1.0, "cut")]
        assert sorted(found) == sorted(ours + ([] if lanes is None else others))
        rows = rb.sql(
            "SELECT observation.says, observation.seen[1], next.observation.says, note, action "
            "FROM transitions JOIN episodes ON _episode = episode_id WHERE source = 'env' ORDER BY _id"
        ).fetchall()
        assert rows == [("é" * k, k, "é" * (k + 1), f"n{k}", k) for k in range(7)]
        with rb.record("more", lanes=lanes) as episode:
            with pytest.raises(SchemaError, match="note"):
                episode.step({"says": of_lanes("a"), "seen": reused}, *values, note=of_lanes(7))
            with pytest.raises(SchemaError, match="lacks 'note'"):
                episode.step({"says": of_lanes("a"), "seen": reused}, *values)
        with rb.record("more", lanes=3) as episode, pytest.raises(SchemaError, match="3 lanes|has shape"):
            episode.step({"says": of_lanes("a"), "seen": reused}, *values, note=of_lanes("7"))
        assert len(rb) == (7 if lanes is None else 13)


@pytest.mark.parametrize("flush_steps", [1, 4])
def test_facts_are_stored_with_the_first_step(tmp_path: Path, flush_steps: int) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        episode = rb.record("env-0", flush_steps=flush_steps)
        episode.reset(info={"seed": 7, "site": "lab"})
        for at, values in enumerate(steps(8)):  # the first episode ends after five
            if at == 6:
                episode.reset(info={"seed": 8})
            episode.step(*values)
            if at == 0:
                assert rb.sql("SELECT length, info->>'seed' FROM episodes").fetchall() == [(1, "7")]
        with pytest.raises(SchemaError, match="cannot represent a object"):
            episode.reset(info={"seed": object()})
        episode.close()
        found = rb.sql("SELECT length, status, info FROM episodes ORDER BY episode_id").fetchall()
        first = '{"seed": 7, "site": "lab"}'
        assert found == [(5, "terminated", first), (1, "cut", None), (2, "cut", '{"seed": 8}')]
        assert rb[:]["action"].tolist() == [k % 3 for k in range(8)]


@pytest.mark.parametrize("source", ["envs", None])
def test_some_lanes_are_reset_with_facts(tmp_path: Path, source: str | None) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        with rb.record(source, lanes=3, flush_steps=4) as episode:
            episode.reset(info=[{"seed": 4}, None, {"seed": 6}])
            for k in range(6):
                if k == 3:
                    episode.reset([1, 2], info=[None, {"seed": 9}, None])
                observation = np.full((3, 4), k, np.float32)
                valid = [k > 0, True, True]
                ends = np.zeros(3, bool)
                episode.step(observation, np.arange(3), np.ones(3), observation + 1, ends, ends, valid=valid)
        found = rb.sql("SELECT source, length, status, info->>'seed' FROM episodes").fetchall()
        lanes = [(name.partition("//")[2] or "0", *more) for name, *more in found]
        assert sorted(lanes, key=str) == [
            ("0", 5, "cut", "4"),
            ("1", 3, "cut", "9"),
            ("1", 3, "cut", None),
            ("2", 3, "cut", "6"),
            ("2", 3, "cut", None),
        ]


def test_first_steps_with_facts_survive_a_failing_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that were stored before the failure are not stored again."""
    with expstore.open(tmp_path / "a.exp") as rb:
        append, failing = Journal.append, [2, 3]

        def fail(journal: Journal, *given: Any, **options: Any) -> Any:
            failing[0] -= 1
            if failing[0] < 0 < failing[1]:
                failing[1] -= 1
                raise StorageError("no space")
            return append(journal, *given, **options)

        episode = rb.record("envs", lanes=3)
        episode.reset(info=[{"seed": lane} for lane in range(3)])
        monkeypatch.setattr(Journal, "append", fail)
        ends = np.zeros(3, bool)
        for k in range(5):
            observation = np.full((3, 4), k, np.float32)
            with contextlib.suppress(StorageError):
                episode.step(observation, np.arange(3), np.ones(3), observation + 1, ends, ends)
        episode.close()
        found = rb.sql("SELECT length, info->>'seed' FROM episodes ORDER BY source").fetchall()
        assert [seed for _, seed in found] == ["0", "1", "2"]
        assert len({length for length, _ in found}) == 1
        assert failing[1] == 0


def test_root_flags_are_false(tmp_path: Path) -> None:
    """Rows of a collector have flags of the observation before the step, too."""
    rows = batch_of(steps(2))
    for name in ("done", "terminated", "truncated"):
        rows[name] = torch.zeros(2, 1, dtype=torch.bool)
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(rows)
        record(rb, steps(5))
        assert not rb[:]["done"].any()
        assert rb[-1]["next", "done"].item()


def test_settings_are_checked(tmp_path: Path) -> None:
    from gymnasium.vector import AutoresetMode

    with expstore.open(tmp_path / "a.exp") as rb, rb.record(lanes=2) as episode:
        for mode in AutoresetMode:
            rb.record(autoreset_mode=mode).close()
        for name, value in (("lanes", 0), ("flush_steps", 0), ("flush_steps", 1.5)):
            with pytest.raises(ValueError, match=f"{name} must be an integer"):
                rb.record(**{name: value})
        with pytest.raises(ValueError, match="'NextStep', 'SameStep'"):
            rb.record(autoreset_mode="next")
        with pytest.raises(SchemaError, match="2 lanes"):
            episode.step(*steps(1)[0])
        assert rb.schema is None
    with expstore.open(tmp_path / "b.exp") as rb, rb.record() as episode:
        with pytest.raises(SchemaError, match="several lanes"):
            episode.step(*steps(1)[0], valid=True)
    objects = ReplayBuffer(storage=expstore.ListStorage(10))
    with objects.record() as episode, pytest.raises(SchemaError, match="objects without fields"):
        episode.step(*steps(1)[0])


def test_steps_of_a_full_disk_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that failed is made again by the next step, before that one is recorded."""

    with expstore.open(tmp_path / "a.exp") as rb:
        given = steps(6)
        with rb.record("env-0", flush_steps=2) as episode:
            episode.step(*given[0])
            episode.step(*given[1])
            former = rb.storage.checkpoints.append_record

            def fail(*_: Any) -> int:
                raise StorageError("no space left", kind="disk_full")

            framed = Journal.append_framed
            rb.storage.checkpoints.append_record = fail
            monkeypatch.setattr(Journal, "append_framed", fail)
            episode.step(*given[2])
            with pytest.raises(StorageError, match="no space"):
                episode.step(*given[3])
            with pytest.raises(StorageError, match="no space"):
                episode.step(*given[4])
            assert len(rb) == 2
            rb.storage.checkpoints.append_record = former
            monkeypatch.setattr(Journal, "append_framed", framed)
            episode.step(*given[4])
            assert len(rb) == 4
            episode.step(*given[5])
        assert (rb[:] == batch_of(given)).all()


@pytest.mark.parametrize("flush_steps", [1, 4])
def test_steps_that_a_rate_limiter_refused_are_written_later(tmp_path: Path, flush_steps: int) -> None:
    """The steps of a refused flush are kept, and the next flush writes them: the episode has no gap."""
    limiter = SampleToInsertRatio(1.0, 4, 8, timeout=0)
    given = steps(24, length=24)
    refused = 0
    with expstore.open(tmp_path / "a.exp", batch_size=4, batches={"rate_limiter": limiter}) as rb:
        with rb.record("env-0", flush_steps=flush_steps) as episode:
            for values in given:
                try:
                    episode.step(*values)
                except NotReadyError:
                    refused += 1
                    assert episode.pending == flush_steps  # the last of them is this step
                    rb.sample()
                    rb.sample()
        assert refused
        assert (rb[:] == batch_of(given)).all()
        assert len(episodes(rb)) == 1


def test_steps_that_a_rate_limiter_never_permits_are_kept(tmp_path: Path) -> None:
    limiter = SampleToInsertRatio(1.0, 4, 4, timeout=0)
    with expstore.open(tmp_path / "a.exp", batch_size=4, batches={"rate_limiter": limiter}) as rb:
        record(rb, steps(4))
        episode = rb.record("env-1", flush_steps=20)
        for values in steps(19):
            episode.step(*values)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="larger error_buffer"):
                episode.flush()
            assert episode.pending == 19


def test_transforms_keep_the_steps_of_all_lanes() -> None:
    class First:
        def __call__(self, batch: TensorDict) -> TensorDict:
            return batch

        def inv(self, batch: TensorDict) -> TensorDict:
            return batch[:1]

    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), transform=First(), batch_size=2)
    observation = np.zeros((2, 4), np.float32)
    with (
        rb.record(lanes=2) as episode,
        pytest.raises(SchemaError, match="turned 2 steps of several lanes into 1 rows"),
    ):
        episode.step(observation, np.zeros(2), np.zeros(2), observation, np.zeros(2, bool), np.zeros(2, bool))
    assert len(rb) == 0


class Double:
    def __call__(self, batch: TensorDict) -> TensorDict:
        return batch

    def inv(self, batch: TensorDict) -> TensorDict:
        return batch.set("action", 2 * batch["action"])


def test_settings_changed_while_recording_apply_to_the_next_step(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", seed=0) as rb, rb.record("env-0") as episode:
        given = steps(9, length=100)
        for values in given[:3]:
            episode.step(*values, td_error=1e-9)
        former = rb.set_writer(ImmutableDatasetWriter())
        with pytest.raises(StateError, match="doesn't allow writing"):
            episode.step(*given[3], td_error=1e-9)
        rb.set_writer(former)
        rb.append_transform(Double())
        episode.step(*given[4], td_error=1e-9)
        assert rb[:]["action"].tolist() == [0, 1, 2, 0, 2]  # the refused step was kept
        rb.set_sampler(PrioritizedSampler(1000, alpha=1.0, beta=1.0))
        rb.update_priority(list(range(5)), torch.full((5,), 1e-9))
        episode.step(*given[5], td_error=5.0)
        episode.step(*given[6], td_error=1e-9)
        assert set(rb.sample(64)["index"].tolist()) == {5}


def test_priorities_that_come_with_the_rows_count() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=MemoryStorage(100), priority_key="error", batch_size=8
    )
    with rb.record() as episode:
        for k, values in enumerate(steps(4)):
            episode.step(*values, error=float(k == 2))
    assert set(rb.sample(32)["index"].tolist()) == {2}


@pytest.mark.guarantee(
    "kill/recorder",
    "A kill loses no step of `rb.record`, `expstore.gym.Record` or `RecordVector` that returned; with "
    "`flush_steps=n`, at most the last n - 1.",
)
@pytest.mark.parametrize("flush_steps", [1, 16])
def test_steps_that_returned_survive_a_kill(tmp_path: Path, flush_steps: int) -> None:
    def record_some() -> None:
        episode = expstore.open(tmp_path / "a.exp", capacity=1000).record("env-0", flush_steps=flush_steps)
        for values in steps(137, length=50):
            episode.step(*values)

    in_child(record_some)
    with expstore.open(tmp_path / "a.exp") as rb:
        count = 137 // flush_steps * flush_steps
        assert (rb[:] == batch_of(steps(count, length=50))).all()
        statuses = [(length, status) for _, length, _, status in episodes(rb)]
        assert statuses == [(50, "terminated")] * 2 + [(count - 100, "cut")]


NEXT = {"observation": ("float32", (4,)), "reward": "int64"} | dict.fromkeys(
    ("terminated", "truncated", "done"), "bool"
)


REWARDS: list[tuple[str, Any, bool]] = [
    ("int64", 1.7, False), ("int64", 2, True), ("float32", 1e300, False), ("float32", 0.1, True),
    ("bfloat16", 1.5, True), ("bfloat16", 3.38e38, True), ("bfloat16", 3.4e39, False),
    ("float32", np.ma.masked_array(1.0, True), False),
]  # fmt: skip


@pytest.mark.parametrize("layout", [None, "arrow"])
def test_rewards_are_not_changed(tmp_path: Path, layout: Any) -> None:
    more = {"text": "a"} if layout else {}
    for dtype, reward, fits in REWARDS:
        fields: dict[str, Any] = {"observation": ("float32", (4,)), "action": "int64"}
        fields |= {"next": NEXT | {"reward": dtype}} | dict.fromkeys(more, str)
        with expstore.open(tmp_path / "a.exp", mode="w", layout=layout, schema=fields) as rb:
            with rb.record() as episode:
                step = (OBSERVATION, 1, reward, OBSERVATION, False, False)
                if fits:
                    episode.step(*step, **more)
                else:
                    with pytest.raises(SchemaError, match="'next.reward' is .*, and a step has"):
                        episode.step(*step, **more)
            assert len(rb) == fits
            if fits:
                assert rb[0]["next", "reward"] == torch.tensor(reward).to(getattr(torch, dtype))


def test_flags_of_rows_of_variable_length(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", layout="arrow") as rb:
        with rb.record() as episode:
            episode.step(OBSERVATION, 1, 0.0, OBSERVATION, 0, 1, text="a")
            with pytest.raises(SchemaError, match="'next.terminated' is bool"):
                episode.step(OBSERVATION, 1, 0.0, OBSERVATION, 0.5, 0, text="a")
        assert rb[:]["next", "truncated"].flatten().tolist() == [True]
