"""Stable-Baselines3's buffers over a store, compared with its own classes given the same steps."""

from __future__ import annotations

import gc
import itertools
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

from stable_baselines3 import DQN, SAC, HerReplayBuffer
from stable_baselines3.common import buffers
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import expstore
from expstore import sb3
from expstore.cli.app import run as cli
from expstore.rate_limiters import SampleToInsertRatio

spaces = gym.spaces
IMAGE = spaces.Box(0, 255, (4, 8, 8), np.uint8)
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "image": IMAGE,
    "discrete": spaces.Discrete(7),
    "binary": spaces.MultiBinary(5),
    "dict": spaces.Dict({"image": IMAGE, "speed": spaces.Box(-1, 1, (2,), np.float32)}),
    "dict-discrete": spaces.Dict({"cell": spaces.Discrete(5), "speed": VECTOR}),
}
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), VECTOR))
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "multi": spaces.MultiDiscrete([3, 4]),
}


def stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: np.stack([value[key] for value in values]) for key in values[0]}
    return np.stack(values)


def steps_of(
    observation: spaces.Space[Any], action: spaces.Space[Any], n_envs: int, count: int
) -> Iterator[tuple[Any, ...]]:
    """Yield what algorithms give to `add`; episodes of lane k have 3 + k steps, every other one timed out."""
    observation.seed(1)
    action.seed(2)
    seen = stack([observation.sample() for _ in range(n_envs)])
    for number in range(count):
        after = stack([observation.sample() for _ in range(n_envs)])
        done = np.array([number % (3 + lane) == 2 + lane for lane in range(n_envs)])
        infos = [
            {"TimeLimit.truncated": bool(end and number // (3 + lane) % 2)} for lane, end in enumerate(done)
        ]
        actions = np.stack([action.sample() for _ in range(n_envs)])
        yield seen, after, actions, np.full(n_envs, float(number), np.float32), done, infos
        seen = after


def pair(
    path: Path, observation: spaces.Space[Any], action: spaces.Space[Any], *, size: int = 40, **options: Any
) -> tuple[Any, Any]:
    """Return a buffer over a store, and stable-baselines3's."""
    is_dict = isinstance(observation, spaces.Dict)
    ours = sb3.DictReplayBuffer if is_dict else sb3.ReplayBuffer
    theirs = buffers.DictReplayBuffer if is_dict else buffers.ReplayBuffer
    return (
        ours(size, observation, action, "cpu", path=path, seed=1, **options),
        theirs(size, observation, action, "cpu", **{k: v for k, v in options.items() if k != "mode"}),
    )


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    for name, mine, other in zip(theirs._fields, ours, theirs, strict=True):
        if isinstance(other, dict):
            assert mine.keys() == other.keys()
            for key in other:
                torch.testing.assert_close(mine[key], other[key], rtol=0, atol=0, msg=f"{name}.{key}")
        elif other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    ("observation", "action"),
    [(name, "discrete") for name in OBSERVATIONS] + [("vector", "float64"), ("vector", "multi")],
)
def test_rows_are_those_of_stable_baselines3(
    store_path: Path, observation: str, action: str, n_envs: int
) -> None:
    ours, theirs = pair(store_path, OBSERVATIONS[observation], ACTIONS[action], n_envs=n_envs)
    for step in steps_of(OBSERVATIONS[observation], ACTIONS[action], n_envs, 11):
        ours.add(*step)
        theirs.add(*step)
        assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full)
    numbers = np.array([0, 3, 7, 10, 10, 2])
    np.random.seed(4)
    wanted = theirs._get_samples(numbers)
    np.random.seed(4)
    assert_same(ours._get_samples(numbers), wanted)
    sampled, other = ours.sample(16), theirs.sample(16)
    for mine, same in zip(sampled[:5], other[:5], strict=True):
        for key in same if isinstance(same, dict) else [None]:
            a, b = (mine, same) if key is None else (mine[key], same[key])
            assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    ours.close()


@pytest.mark.parametrize(("kind", "n_envs"), [("vector", 1), ("vector", 2), ("dict", 1)])
def test_a_full_buffer_replaces_the_oldest_steps(store_path: Path, kind: str, n_envs: int) -> None:
    ours, theirs = pair(store_path, OBSERVATIONS[kind], ACTIONS["discrete"], size=10, n_envs=n_envs)
    for step in steps_of(OBSERVATIONS[kind], ACTIONS["discrete"], n_envs, 13):
        ours.add(*step)
        theirs.add(*step)
        assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full)
    assert set(ours.sample(200).rewards.flatten().tolist()) == set(theirs.rewards.flatten().tolist())
    ours.reset()
    theirs.reset()
    assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full) == (0, 0, False)
    with pytest.raises(expstore.errors.NotReadyError, match="no rows"):
        ours.sample(1)
    for step in steps_of(OBSERVATIONS[kind], ACTIONS["discrete"], n_envs, 3):
        ours.add(*step)
        theirs.add(*step)
        assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full)
    assert set(ours.sample(100).rewards.flatten().tolist()) == {0.0, 1.0, 2.0}
    ours.close()


def test_a_size_that_the_environments_do_not_divide_is_rounded_down(store_path: Path) -> None:
    ours, theirs = pair(store_path, VECTOR, ACTIONS["discrete"], size=10, n_envs=3)
    assert ours.buffer_size == theirs.buffer_size == 3
    assert ours.rb.storage.capacity == 9
    ours.close()


@pytest.mark.parametrize("kind", ["vector", "dict"])
def test_extend_adds_step_by_step(store_path: Path, kind: str) -> None:
    ours, theirs = pair(store_path, OBSERVATIONS[kind], ACTIONS["discrete"])
    steps = [*steps_of(OBSERVATIONS[kind], ACTIONS["discrete"], 1, 5)]
    ours.extend(*zip(*steps, strict=True))
    theirs.extend(*zip(*steps, strict=True))
    assert_same(ours._get_samples(np.arange(5)), theirs._get_samples(np.arange(5)))
    ours.close()


@pytest.mark.parametrize("handled", [True, False])
def test_an_end_by_a_time_limit_is_no_end_where_that_is_handled(store_path: Path, handled: bool) -> None:
    ours, theirs = pair(store_path, VECTOR, ACTIONS["discrete"], handle_timeout_termination=handled)
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 12):
        ours.add(*step)
        theirs.add(*step)
    assert_same(ours._get_samples(np.arange(12)), theirs._get_samples(np.arange(12)))
    ends = ours.rb.sql("SELECT status, count(*) FROM episodes GROUP BY 1 ORDER BY 1").fetchall()
    assert ends == [("terminated", 2), ("truncated", 2)]  # in the store they are what they were
    ours.close()


@pytest.mark.parametrize("kind", ["vector", "dict"])
def test_observations_and_rewards_are_normalized_when_sampled(store_path: Path, kind: str) -> None:
    class Env(gym.Env[Any, Any]):
        observation_space, action_space = OBSERVATIONS[kind], ACTIONS["discrete"]

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 3.0, False, False, {}

    keys = ["speed"] if kind == "dict" else None
    env = VecNormalize(DummyVecEnv([Env]), norm_obs_keys=keys)
    env.reset()
    for _ in range(20):
        env.step(np.array([0]))
    ours, theirs = pair(store_path, OBSERVATIONS[kind], ACTIONS["discrete"])
    for step in steps_of(OBSERVATIONS[kind], ACTIONS["discrete"], 1, 6):
        ours.add(*step)
        theirs.add(*step)
    assert_same(ours._get_samples(np.arange(6), env), theirs._get_samples(np.arange(6), env))
    assert ours.sample(4, env).rewards.dtype == torch.float32
    ours.close()


@pytest.mark.parametrize("kind", ["vector", "dict", "goals"])
def test_every_public_name_of_stable_baselines3_is_there_or_explained(store_path: Path, kind: str) -> None:
    if kind == "goals":
        ours, theirs, _ = her_pair(store_path)
    else:
        ours, theirs = pair(store_path, OBSERVATIONS[kind], ACTIONS["discrete"])
    names = [name for name in dir(theirs) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(ours, name)]
    for name in missing:
        with pytest.raises(AttributeError, match=r"; (buffer\.rb.* has them|infos are not stored)$"):
            getattr(ours, name)
    for name in set(names) - {*missing, "env"}:
        found, wanted = getattr(ours, name), getattr(theirs, name)
        assert callable(found) if callable(wanted) else found == wanted, name
    ours.close()


def test_to_torch_and_swap_and_flatten_are_those_of_stable_baselines3(store_path: Path) -> None:
    ours, theirs = pair(store_path, VECTOR, ACTIONS["discrete"])
    values = np.arange(12.0).reshape(2, 3, 2)
    torch.testing.assert_close(ours.to_torch(values), theirs.to_torch(values))
    np.testing.assert_array_equal(ours.swap_and_flatten(values), theirs.swap_and_flatten(values))
    ours.close()


# -- episodes ------------------------------------------------------------------------------------------


def lengths(rb: Any) -> list[tuple[str, int]]:
    return rb.sql("SELECT status, length FROM episodes ORDER BY episode_id").fetchall()


@pytest.mark.parametrize("kind", ["vector", "dict"])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_an_observation_that_does_not_follow_begins_an_episode(
    store_path: Path, kind: str, n_envs: int
) -> None:
    """As when `learn` is called again: it resets the environments without a word to the buffer."""
    ours, _ = pair(store_path, OBSERVATIONS[kind], ACTIONS["discrete"], n_envs=n_envs)
    for _ in range(2):
        for step in [*steps_of(OBSERVATIONS[kind], ACTIONS["discrete"], n_envs, 2)]:
            ours.add(*step)
    assert lengths(ours.rb) == [("cut", 2)] * n_envs + [("open", 2)] * n_envs
    ours.close()


def test_nan_observations_follow_one_another(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    nan, action = np.full((1, 3), np.nan, np.float32), np.zeros((1, 1), np.int64)
    for _ in range(3):
        ours.add(nan, nan, action, np.zeros(1), np.zeros(1, bool), [{}])
    assert lengths(ours.rb) == [("open", 3)]
    ours.close()


def test_steps_that_are_held_back_are_sampled_and_counted(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    ours.close()
    ours = sb3.ReplayBuffer(40, VECTOR, ACTIONS["discrete"], "cpu", path=store_path, flush_steps=16)
    steps = [*steps_of(VECTOR, ACTIONS["discrete"], 1, 9)]
    for number, step in enumerate(steps):
        ours.add(*step)
        assert len(ours._store.buffer) == 0
        if number == 7:
            break
    assert ours.size() == 8
    ours.add(*steps[8])
    assert set(ours.sample(300).rewards.flatten().tolist()) == {float(n) for n in range(9)}
    ours.close()


# -- saving --------------------------------------------------------------------------------------------


def test_pickling_keeps_the_store_and_not_its_rows(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 7):
        ours.add(*step)
    saved = pickle.dumps(ours)
    assert len(saved) < 3000
    ours.close()
    for use_buffer in (ours.size, lambda: ours.add(*next(steps_of(VECTOR, ACTIONS["discrete"], 1, 1)))):
        with pytest.raises(expstore.errors.StateError, match="is closed; make or load another buffer"):
            use_buffer()
    copy = pickle.loads(saved)
    assert (copy.size(), copy.pos, copy.buffer_size) == (7, 7, 40)
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 3):
        copy.add(*step)
    assert copy.size() == 10
    copy.close()


def test_a_copy_waits_until_the_other_buffer_is_closed(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 7):
        ours.add(*step)
    copy = pickle.loads(pickle.dumps(ours))
    with pytest.raises(expstore.errors.LockedError, match=r"use that buffer, or close\(\) it first"):
        copy.size()
    assert ours.size() == 7
    ours.close()
    assert copy.size() == 7
    copy.close()


def test_a_buffer_that_was_dropped_is_closed(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    ours.itself = ours  # a cycle, as those that `learn` leaves
    copy = pickle.loads(pickle.dumps(ours))
    del ours
    assert copy.size() == 0
    copy.close()


def test_a_buffer_that_was_forgotten_warns_if_nothing_replaces_it(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    with pytest.warns(ResourceWarning, match="was forgotten without close"):
        del ours


def test_a_saved_buffer_refuses_another_store(store_path: Path) -> None:
    ours = sb3.ReplayBuffer(40, VECTOR, ACTIONS["discrete"], "cpu", path=store_path)
    saved = pickle.dumps(ours)
    ours.close()
    expstore.open(store_path, mode="w", capacity=40).close()
    with pytest.raises(
        expstore.errors.StateError, match=r"was saved over store .* if the store was moved, make a"
    ):
        pickle.loads(saved)
    expstore.open(store_path, capacity=40).close()  # it was not left open


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_loading_the_buffer_of_a_store_that_is_gone_keeps_the_buffer_of_the_model(
    tmp_path: Path, change: str
) -> None:
    model = model_of(tmp_path / "gone.exp")
    model.learn(40)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.replay_buffer.close()
    shutil.rmtree(tmp_path / "gone.exp")
    if change == "replaced":
        expstore.open(tmp_path / "gone.exp", capacity=500).close()
    model = model_of(tmp_path / "fresh.exp")
    model.learn(40)
    # stable-baselines3 does not close a path that it opened if unpickling fails.
    with (
        open(tmp_path / "buffer.pkl", "rb") as file,
        pytest.raises(expstore.ExpStoreError, match="if the store was moved") as raised,
    ):
        model.load_replay_buffer(file)
    wanted = expstore.errors.NotFoundError if change == "deleted" else expstore.errors.StateError
    assert isinstance(raised.value, wanted)
    assert (tmp_path / "gone.exp").exists() == (change == "replaced")
    model.learn(20, reset_num_timesteps=False)
    assert model.replay_buffer.size() == 60
    model.replay_buffer.close()


def test_a_model_over_the_new_path_continues_a_store_that_was_moved(tmp_path: Path) -> None:
    model = model_of(tmp_path / "old.exp")
    model.learn(40)
    model.replay_buffer.close()
    (tmp_path / "old.exp").rename(tmp_path / "new.exp")
    model = model_of(tmp_path / "new.exp")
    assert model.replay_buffer.size() == 40
    model.replay_buffer.close()


def test_a_saved_buffer_does_not_replace_its_store(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"], mode="w")
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 3):
        ours.add(*step)
    saved = pickle.dumps(ours)
    ours.close()
    copy = pickle.loads(saved)
    assert copy.size() == 3
    copy.close()


def test_a_model_that_only_predicts_is_loaded_without_the_store(store_path: Path, tmp_path: Path) -> None:
    model = model_of(store_path)
    model.learn(40)
    model.save(tmp_path / "model.zip")
    words = (
        r"close\(\) it first; a model that only predicts .* replay_buffer_class=None, replay_buffer_kwargs={}"
    )
    with pytest.raises(expstore.errors.LockedError, match=words):
        DQN.load(tmp_path / "model.zip")
    loaded = DQN.load(tmp_path / "model.zip", replay_buffer_class=None, replay_buffer_kwargs={})
    seen = np.zeros(4, np.float32)
    assert loaded.predict(seen, deterministic=True)[0] == model.predict(seen, deterministic=True)[0]
    model.replay_buffer.close()


def model_of(path: Path, **options: Any) -> DQN:
    return DQN(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        buffer_size=500,
        learning_starts=20,
        train_freq=4,
        seed=0,
        policy_kwargs={"net_arch": [8]},
        replay_buffer_class=sb3.ReplayBuffer,
        replay_buffer_kwargs={"path": str(path), **options},
    )


def test_a_model_saves_and_loads_its_replay_buffer(store_path: Path, tmp_path: Path) -> None:
    model = model_of(store_path, flush_steps=16)
    model.learn(100)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert model.replay_buffer is not None
    assert model.replay_buffer.size() == 100
    model.learn(52, reset_num_timesteps=False)
    assert model.replay_buffer.size() == 152
    assert "cut" in {status for status, _ in lengths(model.replay_buffer.rb)}
    model.replay_buffer.close()


@pytest.mark.parametrize(
    ("observation", "action", "n_envs"),
    [("vector", "float64", 3), ("discrete", "multi", 1), ("dict-discrete", "discrete", 2)],
)
@pytest.mark.parametrize("saved", [False, True])
def test_a_converted_buffer_has_the_same_samples(
    store_path: Path, tmp_path: Path, observation: str, action: str, n_envs: int, saved: bool
) -> None:
    is_dict = observation.startswith("dict")
    kind = buffers.DictReplayBuffer if is_dict else buffers.ReplayBuffer
    given = OBSERVATIONS[observation], ACTIONS[action], "cpu", n_envs
    theirs: Any = kind(40, *given)
    for step in steps_of(OBSERVATIONS[observation], ACTIONS[action], n_envs, 11):
        theirs.add(*step)
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(theirs))
    done = sb3.convert(tmp_path / "buffer.pkl" if saved else theirs, store_path)
    assert done.rows == 11 * n_envs
    ours = (sb3.DictReplayBuffer if is_dict else sb3.ReplayBuffer)(40, *given, path=store_path)
    assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full)
    numbers = np.array([0, 3, 7, 10, 10, 2])
    np.random.seed(4)
    wanted = theirs._get_samples(numbers)
    np.random.seed(4)
    assert_same(ours._get_samples(numbers), wanted)
    ours.close()


def test_a_model_continues_in_the_store_of_a_converted_buffer(store_path: Path, tmp_path: Path) -> None:
    model = DQN(
        "MlpPolicy", gym.make("CartPole-v1"), buffer_size=80, learning_starts=10, device="cpu", seed=0
    )
    model.learn(100)
    model.save(tmp_path / "model.zip")
    assert model.replay_buffer is not None
    sb3.convert(model.replay_buffer, store_path)
    loaded = DQN.load(
        tmp_path / "model.zip",
        env=gym.make("CartPole-v1"),
        replay_buffer_class=sb3.ReplayBuffer,
        replay_buffer_kwargs={"path": store_path},
    )
    rb = loaded.replay_buffer.rb
    oldest = np.roll(model.replay_buffer.rewards[:, 0], -model.replay_buffer.pos)
    np.testing.assert_array_equal(rb[:]["next", "reward"][:, 0].numpy(), oldest)
    loaded.learn(32, reset_num_timesteps=False)
    assert loaded.replay_buffer.full
    assert rb.write_count == 112
    assert rb.specs["action"].n == 2
    loaded.replay_buffer.close()


def test_what_cannot_be_converted(store_path: Path, tmp_path: Path) -> None:
    model = model_of(store_path)
    with pytest.raises(expstore.ArgumentError, match=re.escape(f"in the store {store_path} already")):
        sb3.convert(model.replay_buffer, tmp_path / "new.exp")
    with pytest.raises(expstore.ArgumentError, match=r"got a DQN; pass model\.replay_buffer"):
        sb3.convert(model, tmp_path / "new.exp")  # type: ignore[arg-type]
    model.save_replay_buffer(tmp_path / "ours.pkl")
    with pytest.raises(expstore.errors.SchemaError, match="has the path of its store, not its rows"):
        sb3.convert(tmp_path / "ours.pkl", tmp_path / "new.exp")
    model.replay_buffer.close()
    plain = buffers.ReplayBuffer(40, VECTOR, ACTIONS["discrete"], "cpu", handle_timeout_termination=False)
    with pytest.raises(expstore.errors.SchemaError, match="the ReplayBuffer has no rows"):
        sb3.convert(plain, tmp_path / "new.exp")
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 4):
        plain.add(*step)
    assert not (tmp_path / "new.exp").exists()
    with pytest.warns(UserWarning, match="handle_timeout_termination=False"):
        sb3.convert(plain, tmp_path / "new.exp")


def test_a_buffer_that_a_file_replaces_warns(store_path: Path, tmp_path: Path) -> None:
    theirs = buffers.ReplayBuffer(40, gym.make("CartPole-v1").observation_space, ACTIONS["discrete"], "cpu")
    (tmp_path / "theirs.pkl").write_bytes(pickle.dumps(theirs))
    model = model_of(store_path)
    what = re.escape(
        f"the model's buffer of {store_path} was replaced by a ReplayBuffer of stable-baselines3"
    )
    with pytest.warns(UserWarning, match=what), pytest.warns(ResourceWarning, match="without close"):
        model.load_replay_buffer(tmp_path / "theirs.pkl")
    model = model_of(store_path)
    model.learn(8)  # leaves references to the buffer in cycles
    model.load_replay_buffer(tmp_path / "theirs.pkl")
    with pytest.warns(UserWarning, match=what), pytest.warns(ResourceWarning, match="without close"):
        gc.collect()


def test_a_buffer_that_its_own_file_replaces_does_not_warn(
    store_path: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = model_of(store_path)
    model.save_replay_buffer(tmp_path / "ours.pkl")
    model.load_replay_buffer(tmp_path / "ours.pkl")
    model.learn(4)
    model.replay_buffer.close()  # type: ignore[union-attr]
    model.replay_buffer = None
    del model
    gc.collect()
    assert not [str(found.message) for found in recwarn if "replaced" in str(found.message)]


def test_a_loaded_buffer_that_a_file_replaces_warns(store_path: Path, tmp_path: Path) -> None:
    theirs = buffers.ReplayBuffer(40, gym.make("CartPole-v1").observation_space, ACTIONS["discrete"], "cpu")
    (tmp_path / "theirs.pkl").write_bytes(pickle.dumps(theirs))
    model = model_of(store_path)
    model.save_replay_buffer(tmp_path / "ours.pkl")
    model.load_replay_buffer(tmp_path / "ours.pkl")
    with pytest.warns(UserWarning, match="are not stored"):
        model.load_replay_buffer(tmp_path / "theirs.pkl")


def test_a_loaded_model_continues_in_the_store(store_path: Path, tmp_path: Path) -> None:
    model = model_of(store_path)
    model.learn(100)
    model.save(tmp_path / "model.zip")
    model.replay_buffer.close()
    loaded = DQN.load(tmp_path / "model.zip", env=gym.make("CartPole-v1"))
    assert loaded.replay_buffer.size() == 100
    loaded.learn(32, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() == 132
    loaded.replay_buffer.close()


def test_a_model_that_was_loaded_in_another_folder_warns_of_its_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_of(Path("here.exp"))
    model.learn(40)
    model.save("model.zip")
    model.replay_buffer.close()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.warns(UserWarning, match=r"made 40 steps, and its store .*other/here.exp has no rows; if"):
        loaded = DQN.load("../model.zip")
    loaded.replay_buffer.close()
    found = DQN.load("../model.zip", replay_buffer_kwargs={"path": tmp_path / "here.exp"})
    assert found.replay_buffer.size() == 40
    # A buffer of its own warns of nothing, wherever it is made.
    sb3.ReplayBuffer(9, VECTOR, ACTIONS["discrete"], "cpu", path="new.exp").close()
    found.replay_buffer.close()


def test_sac_learns_with_several_environments(store_path: Path) -> None:
    env = DummyVecEnv([lambda: gym.make("Pendulum-v1")] * 3)
    options = {"path": store_path, "flush_steps": 4}
    model = SAC(
        "MlpPolicy", env, buffer_size=300, learning_starts=30, policy_kwargs={"net_arch": [8]}, seed=0,
        replay_buffer_class=sb3.ReplayBuffer, replay_buffer_kwargs=options,
    )  # fmt: skip
    model.learn(90)
    rb = model.replay_buffer.rb
    assert lengths(rb) == [("open", 30)] * 3
    assert len(set(rb.sql("SELECT source FROM episodes").fetchall())) == 3
    model.replay_buffer.close()


# -- samples of several steps ------------------------------------------------------------------------


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("handled", [True, False])
@pytest.mark.parametrize(("n_envs", "count"), [(1, 13), (2, 13), (1, 29), (2, 29)])
def test_samples_of_several_steps_are_those_of_stable_baselines3(
    store_path: Path, n_envs: int, count: int, handled: bool, normalized: bool
) -> None:
    """Also of a full buffer, which the oldest steps have left."""
    given = {"n_envs": n_envs, "handle_timeout_termination": handled, "n_steps": 4, "gamma": 0.9}
    size = 20 * n_envs
    ours = sb3.ReplayBuffer(size, VECTOR, ACTIONS["discrete"], "cpu", path=store_path, **given)
    theirs = buffers.NStepReplayBuffer(size, VECTOR, ACTIONS["discrete"], "cpu", **given)
    for step in steps_of(VECTOR, ACTIONS["discrete"], n_envs, count):
        ours.add(*step)
        theirs.add(*step)
    env = None
    if normalized:
        env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_obs=False)
        env.ret_rms.var = np.array(4.0)  # rewards above 20 are clipped
    for number in range(min(count, 20)):
        for seed in range(2):
            np.random.seed(seed)
            wanted = theirs._get_samples(np.array([number]), env)
            np.random.seed(seed)
            assert_same(ours._get_samples(np.array([number]), env), wanted)
    samples = ours.sample(64, env)
    possible = 0.9 ** np.arange(1, 5, dtype=np.float32)
    assert set(samples.discounts.flatten().tolist()) <= set(possible.tolist())
    ours.close()


def test_dqn_trains_on_several_steps(store_path: Path, tmp_path: Path) -> None:
    model = model_of(store_path, n_steps=3, gamma=0.99)
    model.learn(40)
    assert model.replay_buffer.sample(8).discounts.shape == (8, 1)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert model.replay_buffer.sample(8).discounts.shape == (8, 1)
    model.replay_buffer.close()


def test_observations_that_are_dicts_and_priorities_have_several_steps(tmp_path: Path) -> None:
    for cls, kind in ((sb3.DictReplayBuffer, "dict"), (sb3.PrioritizedReplayBuffer, "vector")):
        space = OBSERVATIONS[kind]
        ours = cls(40, space, ACTIONS["discrete"], "cpu", path=tmp_path / kind, n_steps=2, gamma=0.5)
        for step in steps_of(space, ACTIONS["discrete"], 1, 3):  # an episode, with rewards 0, 1, 2
            ours.add(*step)
        batch = ours.sample(64)
        found = {*zip(batch.rewards.flatten().tolist(), batch.discounts.flatten().tolist(), strict=True)}
        assert found == {(0.5, 0.25), (2.0, 0.25), (2.0, 0.5)}
        ours.close()


# -- hindsight goals -----------------------------------------------------------------------------------


def her_env(n_envs: int = 1) -> DummyVecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=True, max_steps=4)] * n_envs)


def her_buffer(path: Path, **options: Any) -> tuple[Any, Any]:
    env = her_env(options.get("n_envs", 1))
    made = sb3.HerReplayBuffer(
        200, env.observation_space, env.action_space, env, "cpu", path=path, seed=3, **options
    )
    return made, env


def her_pair(path: Path, **options: Any) -> tuple[Any, Any, Any]:
    """Return a buffer over a store, stable-baselines3's, and their environment."""
    ours, env = her_buffer(path, **options)
    return ours, HerReplayBuffer(200, env.observation_space, env.action_space, env, "cpu", **options), env


def fill(buffer: Any, env: Any, steps: int, *, whole: bool = False) -> None:
    """Add steps with random actions; `whole`: and more until the last episode has ended."""
    rng = np.random.default_rng(0)
    env.seed(0)
    seen, done = env.reset(), np.zeros(env.num_envs, np.bool_)
    for number in itertools.count():
        if number >= steps and (done.all() or not whole):
            break
        action = rng.uniform(-1, 1, (env.num_envs, 4)).astype(np.float32)
        after, reward, done, infos = env.step(action)
        final = {key: value.copy() for key, value in after.items()}
        for lane in np.flatnonzero(done):
            for key, value in infos[lane]["terminal_observation"].items():
                final[key][lane] = value
        buffer.add(seen, final, action, reward, done, infos)
        seen = after


def row_set(samples: Any, count: int) -> set[bytes]:
    """Return the first rows of a batch, each as bytes: all fields but the weights of stable-baselines3."""
    parts = [*samples.observations.values(), samples.actions, *samples.next_observations.values()]
    arrays = [part.numpy() for part in (*parts, samples.dones, samples.rewards)]
    return {b"|".join(array[number].tobytes() for array in arrays) for number in range(count)}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_rows_with_new_goals_are_those_of_stable_baselines3(
    store_path: Path, strategy: str, normalized: bool
) -> None:
    """All rows and goals that can be drawn are drawn: both sides draw thousands of times, from 24 steps."""
    ours, theirs, env = her_pair(store_path, goal_selection_strategy=strategy, n_sampled_goal=3)
    fill(ours, env, 24, whole=True)
    fill(theirs, env, 24, whole=True)
    scale = VecNormalize(env, norm_obs=False) if normalized else None
    if scale is not None:
        scale.ret_rms.var = np.array(4.0)
    np.random.seed(0)
    mine, other = ours.sample(8000, scale), theirs.sample(8000, scale)
    # Rows with new goals come first here, and last there.
    new, old = 6000, 2000
    parts = [tuple(mine), tuple(other)]
    backwards = type(other)(*(reverse(part) for part in parts[1]))
    assert row_set(mine, new) == row_set(backwards, new)
    assert row_set(type(mine)(*(reverse(part) for part in parts[0])), old) == row_set(other, old)
    ours.close()


def reverse(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: value.flip(0) for key, value in part.items()}
    return None if part is None else part.flip(0)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_stored_rows_of_goal_environments_are_those_of_stable_baselines3(
    store_path: Path, n_envs: int
) -> None:
    ours, theirs, env = her_pair(store_path, n_envs=n_envs)
    fill(ours, env, 13)
    fill(theirs, env, 13)
    assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full)
    numbers = np.array([0, 3, 7, 12, 12, 2])
    np.random.seed(4)
    wanted = theirs._get_samples(numbers)
    np.random.seed(4)
    assert_same(ours._get_samples(numbers), wanted)
    for name in ("her_ratio", "n_sampled_goal", "goal_selection_strategy", "copy_info_dict"):
        assert getattr(ours, name) == getattr(theirs, name)
    ours.reset()
    theirs.reset()
    assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full) == (0, 0, False)
    ours.close()


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_new_goals_were_achieved_in_the_same_episode(store_path: Path, strategy: str) -> None:
    ours, env = her_buffer(store_path, goal_selection_strategy=strategy, n_sampled_goal=3)
    fill(ours, env, 40)
    rows = ours.rb[:]
    located = ours.rb.sql("SELECT _id, _episode, _step FROM transitions ORDER BY _id").fetchall()
    where = {id: (episode, step) for id, episode, step in located}
    number_of = {id: number for number, (id, _, _) in enumerate(located)}
    reached = rows["next", "observation", "achieved_goal"].tolist()
    achieved = {where[id]: reached[number] for id, number in number_of.items()}
    drawn = ours._draw(64)
    for number, id in enumerate(drawn["id"].tolist()):
        episode, step = where[id]
        goal = drawn["observation"]["desired_goal"][number].tolist()
        assert drawn["next"]["observation"]["desired_goal"][number].tolist() == goal
        if number >= 48:  # int(her_ratio * 64)
            assert goal == rows["observation", "desired_goal"][number_of[id]].tolist()
            continue
        others = {key: value for key, value in achieved.items() if key[0] == episode}
        last = max(key[1] for key in others)
        possible = {"future": range(step, last + 1), "final": [last], "episode": range(last + 1)}[strategy]
        assert goal in [others[episode, other] for other in possible]
        reward = env.env_method(
            "compute_reward", drawn["next"]["observation"]["achieved_goal"][number][None],
            np.array([goal]), [{}], indices=[0],
        )[0]  # fmt: skip
        assert drawn["next"]["reward"][number] == reward
    ours.close()


def test_options_of_the_store_count_for_batches_with_new_goals(store_path: Path) -> None:
    ours, env = her_buffer(
        store_path,
        sampler=expstore.RecencySampler(newest=5),
        batches={"rate_limiter": SampleToInsertRatio(1.0, 8, 1000, timeout=0)},
    )
    fill(ours, env, 6)
    with pytest.raises(expstore.errors.NotReadyError, match="6 of min_size_to_sample = 8"):
        ours.sample(4)
    fill(ours, env, 34)
    numbers = ours.rb.sql("SELECT _id FROM transitions ORDER BY _id").fetchall()
    assert {*ours._draw(64)["id"].tolist()} == {id for (id,) in numbers[-5:]}
    ours.close()


def test_the_environment_is_set_anew_after_unpickling(store_path: Path) -> None:
    ours, env = her_buffer(store_path)
    fill(ours, env, 8)
    with pytest.raises(ValueError, match="already initialized"):
        ours.set_env(env)
    saved = pickle.dumps(ours)
    ours.close()
    copy = pickle.loads(saved)
    assert copy.env is None
    with pytest.raises(expstore.errors.StateError, match="set_env"):
        copy.sample(8)
    copy.set_env(env)
    assert copy.sample(8).rewards.shape == (8, 1)
    copy.close()


def test_the_last_trajectory_can_be_cut(store_path: Path) -> None:
    ours, theirs, env = her_pair(store_path)
    for buffer in (ours, theirs):
        fill(buffer, env, 8)
        seen = env.reset()
        buffer.add(seen, seen, np.zeros((1, 4), np.float32), np.zeros(1), np.zeros(1, bool), [{}])
    before = [status for status, _ in lengths(ours.rb)]
    assert before[-1] == "open"
    ours.truncate_last_trajectory()
    with pytest.warns(UserWarning, match="will be truncated"):
        theirs.truncate_last_trajectory()
    assert [status for status, _ in lengths(ours.rb)] == [*before[:-1], "cut"]
    assert_same(ours._get_samples(np.arange(9)), theirs._get_samples(np.arange(9)))
    ours.close()


def test_sac_learns_with_hindsight_goals(store_path: Path, tmp_path: Path) -> None:
    def model() -> SAC:
        return SAC(
            "MultiInputPolicy", BitFlippingEnv(n_bits=3, continuous=True, max_steps=3), buffer_size=300,
            learning_starts=20, policy_kwargs={"net_arch": [8]}, seed=0,
            replay_buffer_class=sb3.HerReplayBuffer, replay_buffer_kwargs={"path": store_path},
        )  # fmt: skip

    first = model()
    first.learn(60)
    first.save_replay_buffer(tmp_path / "buffer.pkl")
    first.load_replay_buffer(tmp_path / "buffer.pkl", truncate_last_traj=True)
    first.learn(30, reset_num_timesteps=False)
    assert first.replay_buffer.size() == 90
    first.replay_buffer.close()


# -- priorities ----------------------------------------------------------------------------------------


def test_rows_are_sampled_by_priority(store_path: Path) -> None:
    ours = sb3.PrioritizedReplayBuffer(40, VECTOR, ACTIONS["discrete"], "cpu", path=store_path, seed=1)
    for step in steps_of(VECTOR, ACTIONS["discrete"], 1, 8):
        ours.add(*step)
    batch = ours.sample(8)
    assert batch.weights.shape == (8, 1)
    assert (batch.weights == 1).all()
    ids = torch.arange(1, 9)
    assert ours.update_priorities(ids, torch.eye(8)[3] * 1e6) == 8
    batch = ours.sample(64)
    assert set(batch.ids.tolist()) == {4}
    assert set(batch.rewards.flatten().tolist()) == {3.0}
    with pytest.raises(expstore.errors.PriorityError):
        ours.update_priorities(ids, -np.ones(8))
    ours.close()


def test_dqn_trains_on_prioritized_samples(store_path: Path) -> None:
    model = DQN(
        "MlpPolicy", gym.make("CartPole-v1"), buffer_size=100, learning_starts=10, batch_size=4,
        policy_kwargs={"net_arch": [8]}, replay_buffer_class=sb3.PrioritizedReplayBuffer,
        replay_buffer_kwargs={"path": store_path},
    )  # fmt: skip
    model.learn(20)
    batch = model.replay_buffer.sample(4)
    assert batch._fields[:6] == ReplayBufferSamples._fields
    assert batch.discounts is None
    model.replay_buffer.close()


# -- errors --------------------------------------------------------------------------------------------


def with_path(make: Callable[..., Any], *given: Any, **options: Any) -> Callable[[Path], Any]:
    return lambda path: make(*given, path=path, **options)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            with_path(sb3.ReplayBuffer, 9, VECTOR, ACTIONS["discrete"], optimize_memory_usage=True),
            ValueError,
            "optimize_memory_usage=True keeps",
        ),
        (
            with_path(sb3.ReplayBuffer, 9, VECTOR, ACTIONS["discrete"], flush_steps=0),
            ValueError,
            "flush_steps must be an integer of at least 1",
        ),
        (
            with_path(sb3.DictReplayBuffer, 9, VECTOR, ACTIONS["discrete"]),
            TypeError,
            "is for Dict observation spaces",
        ),
        (
            with_path(sb3.HerReplayBuffer, 9, GOALS, VECTOR, None, copy_info_dict=True),
            ValueError,
            "infos are not stored",
        ),
        (
            with_path(
                sb3.HerReplayBuffer, 9, GOALS, VECTOR, None, goal_selection_strategy="next"
            ),
            ValueError,
            "is 'next'; it is one of 'future'",
        ),
        (
            with_path(sb3.ReplayBuffer, 9, VECTOR, ACTIONS["discrete"], sampler="prioritised"),
            expstore.ArgumentError,
            "prioritized",
        ),
        (
            with_path(sb3.ReplayBuffer, 9, OBSERVATIONS["dict"], ACTIONS["discrete"]),
            TypeError,
            "use expstore.sb3.DictReplayBuffer",
        ),
        (
            with_path(sb3.HerReplayBuffer, 9, OBSERVATIONS["dict"], VECTOR, None),
            ValueError,
            "has no observation, achieved_goal, desired_goal",
        ),
        (
            with_path(sb3.ReplayBuffer, 9, VECTOR, ACTIONS["discrete"], capacity=9),
            expstore.ArgumentError,
            "use buffer_size=9",
        ),
        (
            with_path(sb3.ReplayBuffer, 9, VECTOR, ACTIONS["discrete"], flush_step=3),
            expstore.ArgumentError,
            "ReplayBuffer() got an unexpected keyword argument 'flush_step'; use flush_steps=3",
        ),
        (
            with_path(sb3.PrioritizedReplayBuffer, 9, VECTOR, ACTIONS["discrete"], xyz=3),
            expstore.ArgumentError,
            "it has path, flush_steps, source, n_steps, gamma, handle_timeout_termination, alpha, beta, cap",
        ),
        (
            with_path(sb3.HerReplayBuffer, 9, GOALS, VECTOR, None, n_steps=3),
            ValueError,
            "no n-step samples, got n_steps=3; leave it out",
        ),
        (
            with_path(sb3.HerReplayBuffer, 9, GOALS, VECTOR, None, n_sampled_goals=3),
            expstore.ArgumentError,
            "use n_sampled_goal=3",
        ),
        (
            lambda path: sb3.ReplayBuffer(9, VECTOR, ACTIONS["discrete"], pth=str(path)),
            expstore.ArgumentError,
            "ReplayBuffer() got an unexpected keyword argument 'pth'; use path=",
        ),
        (
            with_path(sb3.ReplayBuffer, 9, VECTOR, ACTIONS["discrete"], seed="one"),
            expstore.ArgumentError,
            "seed must be an integer, got 'one'",
        ),
        (
            lambda _: sb3.ReplayBuffer(9, VECTOR, ACTIONS["discrete"]),
            expstore.ArgumentError,
            'pass replay_buffer_kwargs={"path": "my.exp"}',
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_make_no_store(
    store_path: Path, make: Callable[[Path], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make(store_path)
    assert not store_path.exists()


def test_arrays_that_a_store_does_not_have_are_named(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    with pytest.raises(AttributeError, match=re.escape('; buffer.rb[:]["next", "reward"] has them')):
        ours.rewards  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'spam'"):
        ours.spam  # noqa: B018
    ours.close()


def test_another_capacity_is_refused(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    ours.close()
    words = (
        "has capacity 40, .* asks for 50 rows; pass buffer_size=40, or run `expstore resize .* --capacity 50`"
    )
    with pytest.raises(expstore.errors.StateError, match=words):
        sb3.ReplayBuffer(50, VECTOR, ACTIONS["discrete"], "cpu", path=store_path)
    assert cli(["resize", str(store_path), "--capacity", "50"]) == 0
    sb3.ReplayBuffer(50, VECTOR, ACTIONS["discrete"], "cpu", path=store_path).close()


def test_other_rows_are_named_before_another_capacity(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    ours.add(*next(steps_of(VECTOR, ACTIONS["discrete"], 1, 1)))
    ours.close()
    with pytest.raises(
        expstore.errors.StateError, match=r"do not fit the environment: observation is float32"
    ):
        sb3.ReplayBuffer(50, IMAGE, ACTIONS["discrete"], "cpu", path=store_path)


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        ("image", "discrete", "observation is float32[3] in the store and uint8[4,8,8] in the environment"),
        (
            "dict",
            "discrete",
            "observation.image is nothing in the store and uint8[4,8,8] in the environment, observation.",
        ),
        (
            "vector",
            "float64",
            "action is int64[1] with 3 values in the store and float64[2] in the environment",
        ),
        ("vector", "box", "action is int64[1] with 3 values in the store and float32[1] in the environment"),
        (
            "vector",
            "other",
            "action is int64[1] with 3 values in the store and int64[1] with 4 values in the environment",
        ),
        (
            "vector",
            "multi",
            "action is int64[1] with 3 values in the store and int64[2] with 3 and 4 values in the",
        ),
    ],
)
def test_the_store_of_another_environment_is_refused(
    store_path: Path, observation: str, action: str, words: str
) -> None:
    actions = ACTIONS | {"box": spaces.Box(-1, 1, (1,), np.float32), "other": spaces.Discrete(4)}
    ours, _ = pair(store_path, VECTOR, actions["discrete"])
    for step in steps_of(VECTOR, actions["discrete"], 1, 3):
        ours.add(*step)
    ours.close()
    with pytest.raises(expstore.errors.StateError, match=re.escape(words)) as raised:
        pair(store_path, OBSERVATIONS[observation], actions[action])
    assert f"the rows of {store_path} do not fit the environment" in str(raised.value)
    assert "choose another store for each environment" in str(raised.value)
    wider = spaces.Box(-9, 9, (3,), np.float64)
    pair(store_path, wider, actions["discrete"])[0].close()  # bounds and precision may change


def test_a_buffer_that_cannot_be_closed_in_order_is_closed(store_path: Path) -> None:
    """Once `close` has raised, nothing is left that would be reported when the program ends."""
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"])
    ours.add(*next(steps_of(VECTOR, ACTIONS["discrete"], 1, 1)))
    storage = ours.rb.storage
    storage.health.failure = expstore.errors.StorageError("cannot sync")
    with pytest.raises(expstore.errors.StateError, match="can no longer be written: cannot sync"):
        ours.close()
    assert not storage.lock_file.held
    with pytest.raises(expstore.errors.StateError, match="make or load another buffer"):
        ours.size()
    ours.close()


def test_a_store_without_a_capacity_is_refused(store_path: Path) -> None:
    expstore.open(store_path, seed=1).close()
    with pytest.raises(
        expstore.errors.StateError, match="has no capacity, .*; run `expstore resize .* --capacity 40`"
    ):
        pair(store_path, VECTOR, ACTIONS["discrete"])
    assert cli(["resize", str(store_path), "--capacity", "40"]) == 0
    pair(store_path, VECTOR, ACTIONS["discrete"])[0].close()


def test_the_capacity_of_a_store_need_not_be_a_multiple_of_the_environments(store_path: Path) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"], size=10)
    ours.close()
    ours, theirs = pair(store_path, VECTOR, ACTIONS["discrete"], size=10, n_envs=3)
    for step in steps_of(VECTOR, ACTIONS["discrete"], 3, 5):
        ours.add(*step)
        theirs.add(*step)
        assert (ours.size(), ours.full) == (theirs.size(), theirs.full)
    assert ours.rb.storage.capacity == 10
    assert set(ours.sample(200).rewards.flatten().tolist()) <= {1.0, 2.0, 3.0, 4.0}
    ours.close()


def test_a_buffer_of_other_environments_is_refused_at_the_first_step(
    store_path: Path, tmp_path: Path
) -> None:
    ours, _ = pair(store_path, VECTOR, ACTIONS["discrete"], n_envs=4)
    saved = pickle.dumps(ours)
    ours.close()
    copy = pickle.loads(saved)
    words = "was made for 4 environments, and add.. got steps of 2; make a model of these environments over"
    with pytest.raises(expstore.errors.StateError, match=words):
        copy.add(*next(steps_of(VECTOR, ACTIONS["discrete"], 2, 1)))
    assert copy.size() == 0
    copy.close()
    pair(store_path, VECTOR, ACTIONS["discrete"], n_envs=2)[0].close()


def test_infos_of_a_vector_environment_are_one_dict(tmp_path: Path) -> None:
    """As CleanRL passes them; an environment whose time limit ends an episode is truncated."""
    ours, _ = pair(tmp_path / "a.exp", VECTOR, ACTIONS["discrete"], n_envs=2)
    seen, actions, rewards = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.int64), np.zeros(2, np.float32)
    ended = np.array([True, True])
    ours.add(seen, seen, actions, rewards, ~ended, {})
    ours.add(seen, seen, actions, rewards, ended, {"TimeLimit.truncated": np.array([False, True])})
    assert ours.rb.sql("SELECT source, status FROM episodes ORDER BY source").fetchall() == [
        ("env", "terminated"),
        ("env//1", "truncated"),
    ]
    ours.close()


# -- evaluations -------------------------------------------------------------------------------------


def evaluate(path: Path, algorithm: Any, env: Any, evaluated: Any, **options: Any) -> Any:
    """Let a model learn twice with evaluations after every 20 steps; return it and the callback."""
    model = algorithm(
        "MlpPolicy", env, buffer_size=2000, learning_starts=10, seed=0, device="cpu",
        replay_buffer_class=sb3.ReplayBuffer, replay_buffer_kwargs={"path": path, **options},
        policy_kwargs={"net_arch": [8]},
    )  # fmt: skip
    callback = sb3.EvalCallback(
        evaluated, n_eval_episodes=3, eval_freq=20, log_path=str(path.parent / "log"), verbose=0, warn=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.learn(40, callback=callback)
        model.learn(20, callback=callback, reset_num_timesteps=False)
    return model, callback


@pytest.mark.parametrize("n_envs", [1, 2])
def test_evaluations_are_stored_apart(store_path: Path, n_envs: int) -> None:
    env, evaluated = (
        DummyVecEnv([lambda: gym.make("CartPole-v1", max_episode_steps=12)] * n) for n in (1, n_envs)
    )
    model, callback = evaluate(store_path, DQN, env, evaluated)
    rb = model.replay_buffer.rb
    found = rb.sql(
        'SELECT "return", length FROM episodes WHERE split = $split AND status <> $cut ORDER BY episode_id',
        {"split": "eval", "cut": "cut"},
    ).fetchall()
    results = zip(callback.evaluations_results, callback.evaluations_length, strict=True)
    told = [one for returns, lengths in results for one in zip(returns, lengths, strict=True)]
    assert len(told) == 9
    if n_envs == 1:
        assert found == told
    else:  # the other lane ends episodes that are not evaluated any more
        assert set(told) <= set(found)
    assert rb.sql("SELECT sum(length)::INT FROM episodes WHERE split = 'train'").fetchall() == [(60,)]
    drawn = {int(one) for _ in range(30) for one in rb.sample(64)["id"].tolist()}
    query = (
        "SELECT _id FROM transitions WHERE _episode IN (SELECT episode_id FROM episodes WHERE split = 'eval')"
    )
    apart = {one for (one,) in rb.sql(query).fetchall()}
    assert len(apart) >= sum(length for _, length in told)
    assert len(drawn) == 60
    assert not drawn & apart
    assert rb.sql(
        "SELECT count(*) FROM transitions a JOIN transitions b ON b._episode = a._episode AND "
        "b._step = a._step + 1 WHERE b.observation <> a.next.observation"
    ).fetchall() == [(0,)]
    assert rb.sql(  # an episode ends with its own observation, not with the first one of the next episode
        "SELECT count(*) FROM transitions a JOIN transitions b "
        "ON b._step = 0 AND b.observation = a.next.observation"
    ).fetchall() == [(0,)]
    model.replay_buffer.close()


def test_evaluations_are_stored_in_the_units_of_the_model(store_path: Path) -> None:
    """Actions scaled to [-1, 1], and observations before they are normalized."""
    taken: list[float] = []

    def make(note: Callable[[Any], Any]) -> VecNormalize:
        env = gym.make("Pendulum-v1", max_episode_steps=10)
        return VecNormalize(DummyVecEnv([lambda: gym.wrappers.TransformAction(env, note, env.action_space)]))

    env = make(lambda action: action)
    evaluated = make(lambda action: taken.append(float(action[0])) or action)
    model, callback = evaluate(store_path, SAC, env, evaluated, flush_steps=4)
    rb = model.replay_buffer.rb
    rows = rb.sql(
        "SELECT t.action, t.observation FROM transitions t JOIN episodes e ON e.episode_id = t._episode "
        "WHERE e.split = 'eval' ORDER BY t._id"
    ).fetchall()
    assert len(rows) == 90
    np.testing.assert_allclose([np.ravel(action)[0] for action, _ in rows], np.array(taken) / 2, atol=1e-6)
    assert all(abs(np.hypot(*observation[:2]) - 1.0) < 1e-5 for _, observation in rows)  # cosine and sine
    assert not isinstance(callback.eval_env.venv, sb3._RecordedEnv)
    model.replay_buffer.close()


def test_evaluations_of_other_models_are_refused(store_path: Path) -> None:
    env = gym.make("CartPole-v1")
    callback = sb3.EvalCallback(gym.make("CartPole-v1"), eval_freq=5, verbose=0, warn=False)
    with pytest.raises(expstore.errors.StateError, match="has no replay buffer of expstore.sb3"):
        DQN("MlpPolicy", env, buffer_size=100).learn(10, callback=callback)
    model = DQN(
        "MlpPolicy", env, buffer_size=100, replay_buffer_class=sb3.ReplayBuffer,
        replay_buffer_kwargs={"path": store_path},
    )  # fmt: skip
    callback = sb3.EvalCallback(gym.make("MountainCar-v0"), eval_freq=5, verbose=0, warn=False)
    with pytest.raises(expstore.errors.StateError, match="eval_env has observations"):
        model.learn(10, callback=callback)
    model.replay_buffer.close()
    with pytest.raises(expstore.errors.ArgumentError, match="split"):
        sb3.EvalCallback(env, split="a/b")
