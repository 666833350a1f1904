"""`expstore.gym`: the wrappers store every step that returned, in whole episodes, and change nothing else."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.wrappers import Autoreset, RecordEpisodeStatistics, TimeLimit

import expstore
from expstore.errors import LockedError, NotReadyError, SchemaError, StateError, StorageError
from expstore.rate_limiters import SampleToInsertRatio
from expstore.storages.format.journal import Journal
from tests.support.recorded_envs import (
    LENGTHS,
    PIXELS,
    Counting,
    Row,
    action_of,
    drive,
    episodes_of,
    make_counting,
    model_of_lane,
    place_of,
    stored_episodes,
    stored_rows,
)

Record, RecordVector = expstore.gym.Record, expstore.gym.RecordVector
MODES = tuple(AutoresetMode)


def run(env: Any, calls: int, *, is_nested: bool = False, **reset: Any) -> None:
    """Step an environment; reset it at first and after each end."""
    ended = True
    for call in range(calls):
        if ended:
            env.reset(**reset)
        _, _, terminated, truncated, _ = env.step(action_of(call, 0, is_nested=is_nested))
        ended = terminated or truncated


@pytest.mark.parametrize("flush_steps", [1, 4])
@pytest.mark.parametrize("is_nested", [False, True])
def test_every_step_is_a_row(store_path: Path, is_nested: bool, flush_steps: int) -> None:
    """The arrays of the environment are reused, and rows have the values of their own step."""
    env = Record(
        Counting(3, is_nested=is_nested, reuses=True), store_path, source="env-0", flush_steps=flush_steps
    )
    run(env, 17, is_nested=is_nested)
    assert len(env.rb) == (17 if flush_steps == 1 else 14)  # a reset publishes, too
    env.step(action_of(17, 0, is_nested=is_nested))
    env.flush()
    wanted = model_of_lane(3, 18, AutoresetMode.DISABLED)
    assert stored_rows(env.rb)[3] == wanted
    assert stored_episodes(env.rb)[0] == episodes_of(wanted) == [
        (7, "terminated"), (7, "truncated"), (4, "open"),
    ]  # fmt: skip
    env.close()
    env.close()
    with expstore.open(store_path) as rb:
        assert stored_rows(rb)[3] == wanted
        assert stored_episodes(rb)[0][-1] == (4, "cut")


class Random(gymnasium.Env[Any, Any]):
    """It returns samples of its space."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action
        self.seen: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.seen.append(self.observation_space.sample())
        return self.seen[-1], {}

    def step(self, action: Any) -> Any:
        self.seen.append(self.observation_space.sample())
        return self.seen[-1], 1, False, False, {}


SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "scalar": spaces.Box(-5, 5, (), np.float64),
    "discrete": spaces.Discrete(5),
    "discrete-start": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Dict({"c": spaces.Box(0, 1, (2,))})}),
    "tuple": spaces.Tuple((spaces.MultiBinary(4), spaces.Dict({"x": spaces.Box(0, 1, (2,))}))),
    "text": spaces.Text(8, min_length=0),
    "dict-text": spaces.Dict({"says": spaces.Text(5), "seen": spaces.Box(0, 1, (2,), np.float32)}),
}


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the arrays and texts of a value with their paths."""
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, tuple):
        parts = [(str(place), part) for place, part in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for name, part in parts for leaf in leaves(part, (*path, name))]


def assert_stored(rows: Any, path: tuple[str, ...], values: list[Any]) -> None:
    """Check that a field has these values of a space."""
    for parts in zip(*(leaves(value, path) for value in values), strict=True):
        (key,) = {key for key, _ in parts}
        found, wanted = rows[key], [part for _, part in parts]
        if isinstance(wanted[0], str):
            assert list(found) == wanted
        else:
            array = np.stack(wanted)
            assert found.numpy().dtype == array.dtype
            np.testing.assert_array_equal(found.numpy(), array)


@pytest.mark.parametrize("action", ["discrete", "box", "dict", "tuple", "text"])
@pytest.mark.parametrize("observation", SPACES)
def test_spaces(store_path: Path, observation: str, action: str) -> None:
    inner = Random(SPACES[observation], SPACES[action])
    env = Record(inner, store_path)
    env.reset(seed=4)
    env.action_space.seed(5)
    actions = [env.action_space.sample() for _ in range(6)]
    for one in actions:
        env.step(one)
    rows = env.rb[:]
    assert_stored(rows, ("observation",), inner.seen[:-1])
    assert_stored(rows, ("next", "observation"), inner.seen[1:])
    assert_stored(rows, ("action",), actions)
    assert rows["next", "reward"].dtype == torch.float32
    assert rows["next", "reward"].shape == (6, 1)
    env.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("observation", ["discrete", "dict", "tuple", "text", "dict-text"])
def test_spaces_of_vector_environments(store_path: Path, observation: str, mode: AutoresetMode) -> None:
    inner = [Random(SPACES[observation], SPACES["discrete"]) for _ in range(2)]
    makers = [lambda env=env: TimeLimit(env, 3) for env in inner]
    envs = RecordVector(gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode), store_path)
    envs.reset(seed=1)
    for _ in range(3):
        envs.step(np.zeros(2, np.int64))
    rows, lanes = envs.rb[:], [inner[0].seen, inner[1].seen]
    values = [lanes[at % 2][at // 2 + (at // 6) * 0] for at in range(6)]
    assert_stored(rows, ("observation",), values)
    assert_stored(rows, ("next", "observation"), [lanes[at % 2][at // 2 + 1] for at in range(6)])
    envs.close()


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (spaces.Sequence(spaces.Discrete(3)), "have any length"),
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), "graphs of any size"),
        (spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1))), "shape depends on the number"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(3))}), "'observation.a'.*have any length"),
    ],
)
def test_spaces_without_a_shape_are_refused(store_path: Path, space: Any, reason: str) -> None:
    for made in (
        lambda: Record(Random(space, SPACES["discrete"]), store_path),
        lambda: RecordVector(
            gymnasium.vector.SyncVectorEnv([lambda: Random(space, SPACES["discrete"])]), store_path
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            made()
    assert not store_path.exists()


def test_texts_need_a_store_for_them(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        env = Record(Random(SPACES["text"], SPACES["discrete"]), rb)
        env.reset(seed=1)
        with pytest.raises(SchemaError, match='layout="arrow"'):
            env.step(1)
        assert len(rb) == 0
    with pytest.raises(StateError, match="arrow"):
        Record(Random(SPACES["text"], SPACES["discrete"]), store_path)


@pytest.mark.parametrize("flush_steps", [1, 3])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_store_whole_episodes(
    store_path: Path, mode: AutoresetMode, is_nested: bool, flush_steps: int
) -> None:
    envs = RecordVector(make_counting(mode, is_nested=is_nested), store_path, flush_steps=flush_steps)
    for _ in itertools.islice(drive(envs, is_nested=is_nested), 31):
        pass
    envs.flush()
    rows, episodes = stored_rows(envs.rb), stored_episodes(envs.rb)
    for lane in range(len(LENGTHS)):
        wanted = model_of_lane(lane, 31, mode)
        assert rows[lane] == wanted
        assert episodes[lane] == episodes_of(wanted)
    envs.close()


def test_all_modes_give_the_same_episodes(tmp_path: Path) -> None:
    found = []
    for mode in MODES:
        with expstore.open(tmp_path / f"{mode.value}.exp") as rb:
            envs = RecordVector(make_counting(mode), rb, source="envs")
            for _ in itertools.islice(drive(envs), 40):
                pass
            envs.close()
            found.append([[row._replace(action=0) for row in rows] for rows in stored_rows(rb).values()])
    shortest = [min(map(len, rows)) for rows in zip(*found, strict=True)]
    first, second, third = ([r[:n] for r, n in zip(rows, shortest, strict=True)] for rows in found)
    assert first == second == third


@pytest.mark.parametrize("mode", MODES)
def test_processes_as_lanes(store_path: Path, mode: AutoresetMode) -> None:
    makers = [lambda lane=lane: Counting(lane) for lane in range(len(LENGTHS))]
    inner = AsyncVectorEnv(makers, autoreset_mode=mode, copy=False, context="fork")
    envs = RecordVector(inner, store_path, info=("place",))
    for _ in itertools.islice(drive(envs), 12):
        pass
    rows = stored_rows(envs.rb)
    assert rows == {lane: model_of_lane(lane, 12, mode) for lane in range(len(LENGTHS))}
    assert (envs.rb[:]["info", "place"] == envs.rb[:]["next", "observation"][:, 0].long()).all()
    envs.close()


def test_a_reset_amid_an_episode_cuts_it(store_path: Path) -> None:
    env = Record(Counting(3), store_path)
    for length in (2, 3):
        env.reset(seed=length)
        for _ in range(length):
            env.step(0)
    assert stored_episodes(env.rb)[0] == [(2, "cut"), (3, "open")]
    env.reset()
    assert stored_episodes(env.rb)[0] == [(2, "cut"), (3, "cut")]
    env.reset(seed=9)  # an episode without steps leaves nothing, and its seed with it
    env.reset()
    env.step(0)
    info = env.rb.sql("SELECT info->>'seed' FROM episodes ORDER BY episode_id").fetchall()
    assert info == [("2",), ("3",), (None,)]
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_of_some_lanes_cuts_only_theirs(store_path: Path, mode: AutoresetMode) -> None:
    envs = RecordVector(make_counting(mode), store_path)
    envs.reset(seed=[5, None, 7, 8])
    ended = np.zeros(4, np.bool_)
    for call in range(5):
        if mode is AutoresetMode.DISABLED and ended.any():
            envs.reset(options={"reset_mask": ended})
        if call == 2:
            options = {"reset_mask": np.array([False, False, True, True])}
            envs.reset(seed=20, options=options)
        _, _, terminated, truncated, _ = envs.step(np.full(4, call))
        ended = terminated | truncated
    found = envs.rb.sql(
        "SELECT length, status, info->>'seed' FROM episodes WHERE source = ? ORDER BY episode_id",
        params=["env//3"],
    ).fetchall()
    assert found == [(2, "cut", "8"), (3, "open", "23")]
    assert stored_episodes(envs.rb)[2][:2] == [(2, "cut"), (3, "truncated")]
    for lane in (0, 1):
        assert stored_rows(envs.rb)[lane] == model_of_lane(lane, 5, mode)
    assert [row.place for row in stored_rows(envs.rb)[3]] == [
        place_of(3, 1, 0), place_of(3, 1, 1), *(place_of(3, 2, at) for at in range(3)),
    ]  # fmt: skip
    seeds = envs.rb.sql("SELECT DISTINCT info->>'seed' FROM episodes WHERE info IS NOT NULL").fetchall()
    assert {seed for (seed,) in seeds} == {"5", "7", "8", "22", "23"}
    envs.reset()
    assert "open" not in {status for one in stored_episodes(envs.rb).values() for _, status in one}
    envs.close()


def test_a_wrong_mask_is_refused_by_gymnasium(store_path: Path) -> None:
    envs = RecordVector(make_counting(AutoresetMode.DISABLED), store_path)
    envs.reset()
    with pytest.raises((TypeError, ValueError), match="reset_mask"):
        envs.reset(options={"reset_mask": np.ones(3, np.bool_)})
    with pytest.raises(ResetNeeded):
        envs.step(np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="num_envs=4"):
        envs.reset(seed=[1, 2])
    envs.close()


def test_infos_become_fields(store_path: Path) -> None:
    env = Record(Counting(3), store_path, info=("place", "pair"))
    run(env, 9)
    rows = env.rb[:]
    assert rows["info", "place"].dtype == torch.int64
    assert (rows["info", "place"] == rows["next", "observation"][:, 0].long()).all()
    assert (rows["info", "pair"][:, 0] == rows["next", "observation"][:, 0].long() % 100).all()
    assert rows["info", "pair"].dtype == torch.int32
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_infos_of_lanes_are_those_of_the_step(store_path: Path, mode: AutoresetMode) -> None:
    """At an end in SAME_STEP the infos of the vector describe the next episode."""
    envs = RecordVector(make_counting(mode), store_path, info=("place", "pair"))
    for _ in itertools.islice(drive(envs), 20):
        pass
    rows = envs.rb[:]
    after = rows["next", "observation"][:, 0].long()
    assert (rows["info", "place"] == after).all()
    assert (rows["info", "pair"][:, 0] == after % 100).all()
    assert (rows["info", "pair"][:, 1] == after // 100_000).all()
    envs.close()


def test_infos_of_a_lane_that_only_resets_are_not_asked_for(store_path: Path) -> None:
    class Quiet(Counting):
        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0], {}

    makers = [lambda lane=lane: Quiet(lane) for lane in (0, 1)]
    envs = RecordVector(gymnasium.vector.SyncVectorEnv(makers), store_path, info=("place",))
    for _ in itertools.islice(drive(envs), 9):
        pass
    assert (envs.rb[:]["info", "place"] == envs.rb[:]["next", "observation"][:, 0].long()).all()
    envs.close()


class Forgetful(Counting):
    """Its second step has no info, its third one a dict."""

    def _inform(self) -> dict[str, Any]:
        return (
            [{"note": 0.5}, {"note": 0.5}, {}, {"note": {"a": 1}}][self.at] if self.at < 4 else {"note": 1.5}
        )


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_step_that_cannot_be_stored_cuts_the_episode(store_path: Path, lanes: int) -> None:
    """The step was made: `last_step` has it, and the rows of an episode stay consecutive."""
    env: Any
    if lanes:
        makers = [lambda: Forgetful(3)] * lanes
        env = RecordVector(gymnasium.vector.SyncVectorEnv(makers), store_path, info=("note",))
    else:
        env = Record(Forgetful(3), store_path, info=("note",))
    env.reset()
    raised = []
    for call in range(6):
        try:
            env.step(action_of(call, lanes, is_nested=False))
        except SchemaError as exc:
            raised.append(str(exc))
            assert np.all(env.last_step[1] == call + 1)
    assert "no info 'note' for" in raised[0]
    assert "it returned nothing" in raised[0]
    assert "'note' is a dict" in raised[1]
    assert len(raised) == 2
    assert sorted(
        row[1:] for row in env.rb.sql("SELECT source, length, status FROM episodes").fetchall()
    ) == ([(1, "cut")] * max(1, lanes) + [(3, "open")] * max(1, lanes))
    assert sorted(env.rb[:]["next", "reward"][:, 0].tolist()) == sorted([1.0, 4.0, 5.0, 6.0] * max(1, lanes))
    env.close()


def test_frames_are_those_of_the_observations(tmp_path: Path) -> None:
    env = Record(Counting(3, render_mode="rgb_array"), tmp_path / "a.exp", render=True)
    run(env, 9)
    rows = env.rb[:]
    assert rows["frame"].shape == (9, *PIXELS, 3)
    assert rows["frame"].dtype == torch.uint8
    assert (rows["frame"][:, 0, 0, 0] == rows["observation"][:, 0].long() % 100).all()
    env.close()
    for mode in MODES:
        inner = make_counting(mode, render_mode="rgb_array")
        envs = RecordVector(inner, tmp_path / f"{mode.value}.exp", render=True)
        for _ in itertools.islice(drive(envs), 9):
            pass
        rows = envs.rb[:]
        assert (rows["frame"][:, 0, 0, 0] == rows["observation"][:, 0].long() % 100).all()
        envs.close()


def test_frames_need_a_mode(store_path: Path) -> None:
    with pytest.raises(ValueError, match="render_mode=None"):
        Record(Counting(3), store_path, render=True)
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        RecordVector(make_counting(MODES[0]), store_path, render=True)
    assert not store_path.exists()

    class Blank(Counting):
        def render(self) -> Any:
            return None

    env = Record(Blank(3, render_mode="rgb_array"), store_path, render=True)
    env.reset()
    with pytest.raises(SchemaError, match="rendered object"):
        env.step(0)
    assert env.unwrapped.at == 0  # the step was not made
    env.close()


def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the next writes to journals fail."""
    left = [0]

    def fail(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise StorageError("no space left")
            return original(*given, **options)

        return call

    monkeypatch.setattr(Journal, "append", fail(Journal.append))
    monkeypatch.setattr(Journal, "append_framed", fail(Journal.append_framed))
    return lambda count: left.__setitem__(0, count)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("flush_steps", [1, 3])
def test_a_failing_store_keeps_the_step(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode | None, flush_steps: int
) -> None:
    """The step that failed is written by the next call; a call that fails first does not make a step."""
    fail = failing(monkeypatch)
    env: Any
    if mode is None:
        env = Record(Counting(3), store_path, flush_steps=flush_steps)
        calls = iter(lambda: env.step(action_of(env.unwrapped.at, 0, is_nested=False)), None)
        env.reset()
    else:
        env = RecordVector(make_counting(mode), store_path, flush_steps=flush_steps)
        env.reset()
        numbers = itertools.count()
        calls = iter(lambda: env.step(np.full(4, next(numbers))), None)
    next(calls)
    made, notes = 1, []
    inner = env.unwrapped if mode is None else env.unwrapped.envs[3]
    for round_ in range(1 if mode is AutoresetMode.DISABLED else 4):
        if mode is AutoresetMode.DISABLED:
            env.reset()
        fail(2)
        for _ in range(flush_steps + 3):
            before, former = inner.at, env.last_step
            try:
                next(calls)
                made += 1
            except StorageError as exc:
                notes.append(getattr(exc, "__notes__", []))
                is_made = env.last_step is not former
                made += is_made
                assert (inner.at != before) == is_made == bool(notes[-1]), round_
            if mode is AutoresetMode.DISABLED:
                env.unwrapped._autoreset_envs[:] = False  # lanes that have ended go on
        fail(0)
        with contextlib.suppress(StorageError):
            env.flush()
        env.flush()
    assert [note for note, _ in itertools.groupby(note for note in notes if note)] == [
        ["The environment has made the step (`last_step`), and the next call writes it."]
    ]
    places = [row.place for row in stored_rows(env.rb)[3]]
    assert len(places) == len(set(places))
    if mode is None:
        assert len(places) == made
    env.close()


def test_a_step_that_a_rate_limiter_refused_is_written_by_the_next_call(tmp_path: Path) -> None:
    limiter = SampleToInsertRatio(1.0, 4, 8, timeout=0)
    rb = expstore.open(tmp_path / "a.exp", batch_size=4, batches={"rate_limiter": limiter})
    env = Record(Counting(3), rb)
    refused: list[NotReadyError] = []
    for at in range(21):
        if at % 7 == 0:
            env.reset()
        try:
            env.step(action_of(at, 0, is_nested=False))
        except NotReadyError as exc:
            refused.append(exc)
            rb.sample()
    env.flush()
    assert refused
    assert all("the next call writes it" in exc.__notes__[0] for exc in refused)
    assert [row.place for row in stored_rows(rb)[3]] == [
        place_of(3, episode, at) for episode in (1, 2, 3) for at in range(7)
    ]
    env.close()
    rb.close()


def test_a_store_that_is_closed(tmp_path: Path) -> None:
    rb = expstore.open(tmp_path / "a.exp")
    env = Record(Counting(3), rb)
    env.reset()
    env.step(0)
    rb.close()
    with pytest.raises(StateError, match="closed"):
        env.step(1)
    with pytest.raises(StateError, match="closed"):
        env.step(1)
    assert env.unwrapped.at == 2  # the second call made no step
    with pytest.raises(StateError, match="closed"):
        env.close()  # it has a step that it cannot write
    rb = expstore.open(tmp_path / "b.exp")
    env = Record(Counting(3), rb)
    env.reset()
    rb.close()
    with pytest.raises(StateError) as caught:
        env.step(0)
    assert "not stored" in caught.value.__notes__[0]
    env.close()
    with pytest.raises(StateError, match="is closed"):
        env.step(0)
    with pytest.raises(StateError, match="is closed"):
        env.reset()


def test_an_open_buffer_stays_open(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        for source in ("a", "b"):
            env = Record(Counting(3), rb, source=source)
            assert env.rb is rb
            run(env, 3)
            env.close()
        assert rb.sql("SELECT source, length, status FROM episodes").fetchall() == [
            ("a", 3, "cut"),
            ("b", 3, "cut"),
        ]
        with pytest.raises(TypeError, match="capacity: options are for a store"):
            Record(Counting(3), rb, capacity=4)
        with pytest.raises(LockedError):
            Record(Counting(3), tmp_path / "a.exp")
    for store in (None, 3, [1]):
        with pytest.raises(TypeError, match="pass a path, or an open buffer"):
            Record(Counting(3), store)
    with pytest.raises(TypeError, match=r"info=\('place',\)"):
        Record(Counting(3), tmp_path / "b.exp", info="place")
    with pytest.raises(ValueError, match="flush_steps"):
        Record(Counting(3), tmp_path / "c.exp", flush_steps=0)
    Record(Counting(3), tmp_path / "c.exp").close()  # nothing holds its lock
    with pytest.raises(TypeError, match="VectorEnv"):
        RecordVector(Counting(3), tmp_path / "b.exp")
    with pytest.raises(ValueError, match="declares"):
        RecordVector(make_counting(AutoresetMode.DISABLED), tmp_path / "b.exp", autoreset_mode="SameStep")
    rb = expstore.ReplayBuffer(storage=expstore.MemoryStorage(100))
    env = Record(Counting(3), rb)
    run(env, 8)
    assert len(rb) == 8


@pytest.mark.parametrize("flush_steps", [1, 4])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        (
            spaces.Box(-1, 1, (3,)),
            spaces.Discrete(2),
            r"observation is float32\[2\] in the store and float32\[3\] in the environment",
        ),
        (
            spaces.Box(-1, 1, (2,)),
            spaces.Box(-1, 1, ()),
            r"action is int64\[\] with 2 values in the store and float32",
        ),
        (
            spaces.Box(-1, 1, (2,)),
            spaces.Discrete(3),
            "with 2 values in the store and .* with 3 values in the environment",
        ),
        (spaces.Dict(a=spaces.Discrete(2)), spaces.Discrete(2), "observation.a is nothing in the store and"),
        (spaces.Text(9), spaces.Discrete(2), r"float32\[2\] in the store and text\[\] in the environment"),
    ],
)
def test_the_store_of_another_environment_is_refused(
    store_path: Path, observation: Any, action: Any, words: str, is_open: bool, flush_steps: int
) -> None:
    env = Record(
        Random(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)),
        store_path,
        flush_steps=flush_steps,
        layout="arrow",
    )
    env.reset()
    for _ in range(5):
        env.step(0)
    env.close()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(expstore.open(store_path)) if is_open else store_path
        with pytest.raises(StateError, match=words) as raised:
            Record(Random(observation, action), store)
        assert f"the rows of {store_path} do not fit" in str(raised.value)
        assert "choose another store for each environment" in str(raised.value)
        Record(Random(spaces.Box(-9, 9, (2,)), spaces.Discrete(2)), store).close()  # bounds may change


@pytest.mark.parametrize("is_vector", [False, True])
def test_an_unknown_option_is_refused_with_the_options_of_the_wrapper(
    store_path: Path, is_vector: bool
) -> None:
    def wrap(**options: Any) -> Any:
        if is_vector:
            return RecordVector(gymnasium.make_vec("CartPole-v1", num_envs=2), store_path, **options)
        return Record(gymnasium.make("CartPole-v1"), store_path, **options)

    with pytest.raises(expstore.ArgumentError, match=r"Record(Vector)?\(\) got .*; use flush_steps=3"):
        wrap(flush_step=3)
    with pytest.raises(expstore.ArgumentError, match="it has source, split, flush_steps, info, render, "):
        wrap(xyz=3)
    with pytest.raises(expstore.ArgumentError, match="use layout={'compression': 'zstd'}"):
        wrap(compression="zstd")
    assert not store_path.exists()


def test_options_are_those_of_open(store_path: Path) -> None:
    env = Record(Counting(3), str(store_path), capacity=5, seed=3, batch_size=2)
    run(env, 9)
    assert len(env.rb) == 5
    assert env.rb.sample().shape == (2,)
    env.close()


def test_specs_come_with_the_first_rows(store_path: Path) -> None:
    env = Record(Counting(3, is_nested=True), store_path)
    assert env.rb.specs is None
    run(env, 1, is_nested=True)
    assert env.rb.specs is not None
    keys = set(env.rb.specs.keys(True, True))
    assert keys >= {("action", "move"), ("observation", "parts", "1"), ("next", "observation", "position")}
    assert env.rb.specs["action", "move"].n == 1000
    assert ("next", "terminated") in keys
    env.close()


def test_actions_that_do_not_fit_make_no_step(store_path: Path) -> None:
    env = Record(Counting(3), store_path)
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset()
    for action in (np.zeros(2), 0.5, "left", None):
        with pytest.raises(SchemaError, match="'action'"):
            env.step(action)
    assert env.unwrapped.at == 0
    env.step(np.array(4))
    env.step(torch.tensor(5))
    assert env.rb[:]["action"].tolist() == [4, 5]
    assert stored_episodes(env.rb)[0] == [(2, "open")]
    env.close()


class Breaking(Counting):
    """It raises an error in its second step, once, and returns another shape in its fourth."""

    def step(self, action: Any) -> Any:
        if self.at == 1 and not getattr(self, "broken", False):
            self.broken = True
            raise RuntimeError("a motor is stuck")
        observation, *more = super().step(action)
        return np.zeros(3, np.float32) if self.at == 4 else observation, *more


def test_an_environment_that_fails(store_path: Path) -> None:
    env = Record(Breaking(3), store_path)
    env.reset()
    env.step(0)
    with pytest.raises(RuntimeError, match="stuck"):
        env.step(1)
    env.step(2)
    env.step(3)
    with pytest.raises(SchemaError, match=r"'observation' as float32 \(3,\)"):
        env.step(4)
    with pytest.raises(ResetNeeded):  # the observation is not known
        env.step(5)
    env.reset()
    env.step(6)
    assert env.rb[:]["action"].tolist() == [0, 2, 3, 6]
    assert stored_episodes(env.rb)[0] == [(1, "cut"), (2, "cut"), (1, "open")]
    env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_passes_gymnasiums_checks(store_path: Path) -> None:
    env = Record(gymnasium.make("CartPole-v1"), store_path)
    check_env(env, skip_render_check=True, skip_close_check=True)
    env.close()
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert isinstance(again, Record)
    assert again.rb.storage.path == store_path
    again.close()


def test_it_can_be_named_in_make(store_path: Path) -> None:
    spec = copy.deepcopy(gymnasium.spec("CartPole-v1"))
    spec.additional_wrappers = (Record.wrapper_spec(store=str(store_path), source="a"),)
    env = gymnasium.make(spec)
    env.reset(seed=1)
    env.step(1)
    env.close()
    with expstore.open(store_path) as rb:
        assert rb.sql("SELECT source, length, info->>'seed' FROM episodes").fetchall() == [("a", 1, "1")]


def test_the_spec_of_a_wrapped_buffer_names_its_path(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        spec = Record(gymnasium.make("CartPole-v1"), rb).spec
        assert spec.additional_wrappers[-1].kwargs["store"] == str(store_path)


def test_above_and_below_other_wrappers(tmp_path: Path) -> None:
    """Wrappers below decide what is stored; a wrapper that resets by itself leaves no row."""
    wanted = model_of_lane(3, 20, AutoresetMode.NEXT_STEP)
    for name, wrap in {
        "below": lambda path: Record(Autoreset(Counting(3)), path),
        "above": lambda path: Autoreset(Record(Counting(3), path)),
        "both": lambda path: TimeLimit(Record(RecordEpisodeStatistics(Autoreset(Counting(3))), path), 1000),
    }.items():
        env = wrap(tmp_path / f"{name}.exp")
        env.reset()
        for call in range(20):
            env.step(call)
        assert stored_rows(env.get_wrapper_attr("rb"))[3] == wanted, name
        env.close()
    env = Record(TimeLimit(Counting(3), 3), tmp_path / "limit.exp")
    run(env, 6)
    assert stored_episodes(env.rb)[0] == [(3, "truncated")] * 2
    env.close()
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        RecordVector(make_counting(AutoresetMode.SAME_STEP), tmp_path / "vector.exp")
    )
    for _ in itertools.islice(drive(envs), 6):
        pass
    envs.close()
    with expstore.open(tmp_path / "vector.exp") as rb:
        assert stored_rows(rb)[1] == model_of_lane(1, 6, AutoresetMode.SAME_STEP)


def test_what_the_environment_returns_is_passed_on(store_path: Path) -> None:
    env, plain = Record(Counting(3, reuses=True), store_path), Counting(3)
    assert str(env.reset(seed=1)) == str(plain.reset(seed=1))
    for _ in range(3):
        assert str(env.step(0)) == str(plain.step(0))
    assert env.last_step is not None
    assert env.last_step[0] is env.unwrapped._position
    env.close()


def test_a_resumed_source_continues(store_path: Path) -> None:
    """The next process writes to the same source; the interrupted episode of the first stays cut."""
    for _ in range(2):
        env = Record(Counting(3), store_path, source="robot")
        run(env, 4)
        env.close()
    with expstore.open(store_path) as rb:
        assert stored_episodes(rb)[0] == [(4, "cut")] * 2
        row = Row(place_of(3, 1, 0), 0, 1.0, place_of(3, 1, 1), False, False)
        assert stored_rows(rb)[3][0] == stored_rows(rb)[3][4] == row
