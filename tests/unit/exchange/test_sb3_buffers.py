"""Replay buffers of Stable-Baselines3 become stores: their rows, oldest first, and the ends of episodes."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common import buffers
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv

import expstore
from expstore import exchange
from expstore.cli.app import run
from expstore.errors import NotFoundError, SchemaError, StateError, StorageError
from expstore.exchange import base, import_sb3

pytestmark = pytest.mark.usefixtures("no_syncs")

VECTOR = spaces.Box(-1, 1, (2,), np.float32)
IMAGE = spaces.Box(0, 255, (1, 3, 3), np.uint8)
DICT = spaces.Dict({"image": IMAGE, "state": VECTOR})
DISCRETE, ACTION = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64)
#: Episodes have ten steps; each step of episode e is rewarded with e + 1 in the first lane.
STEPS = 10


class OwnBuffer(buffers.ReplayBuffer):
    """A buffer as users write them: its class is found in no package of stable-baselines3."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.weights = np.ones(self.buffer_size)


def look(space: spaces.Space[Any], lanes: int, number: int, step: int) -> Any:
    """Return observations of all lanes that are different in every step."""
    if isinstance(space, spaces.Dict):
        return {name: look(part, lanes, number, step) for name, part in space.spaces.items()}
    value = (number * 11 + step) % 250
    shape = (lanes, *(space.shape or (1,)))
    return np.full(shape, value, space.dtype) + np.arange(lanes, dtype=space.dtype).reshape(
        -1, *[1] * (len(shape) - 1)
    )


def fill(buffer: Any, count: int = 30, *, missing: int | None = None) -> Any:
    """Add steps: episodes 0 and 1 terminate, episode 2 is truncated, and so on.

    Args:
        buffer: The buffer.
        count: Number of steps.
        missing: Number of a step that is left out, as if the environment had been reset before the next one.
    """
    space, lanes = buffer.observation_space, buffer.n_envs
    for place in range(count):
        number, step = divmod(place, STEPS)
        done = step == STEPS - 1
        infos = [{"TimeLimit.truncated": done and number % 3 == 2} for _ in range(lanes)]
        reward = np.arange(lanes, dtype=np.float32) * 100 + number + 1
        if place != missing:
            buffer.add(
                look(space, lanes, number, step), look(space, lanes, number, step + 1),
                np.full((lanes, buffer.action_dim), step % 3), reward, np.full(lanes, done), infos,
            )  # fmt: skip
    return buffer


def save(path: Path, buffer: Any) -> Path:
    path.write_bytes(pickle.dumps(buffer, pickle.HIGHEST_PROTOCOL))
    return path


def episodes_of(path: Path) -> list[tuple[Any, ...]]:
    with expstore.open(path, mode="r") as rb:
        found = rb.sql(
            'SELECT source, length, "return", status FROM episodes WHERE live_rows > 0 '
            "ORDER BY source, episode_id"
        )
        return [tuple(row) for row in found.fetchall()]


def whole(source: str = "env", more: int = 0) -> list[tuple[Any, ...]]:
    ends = ("terminated", "terminated", "truncated")
    return [(source, 10, float(10 * (more + number + 1)), end) for number, end in enumerate(ends)]


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("kind", "observation", "action"),
    [
        (buffers.ReplayBuffer, VECTOR, DISCRETE),
        (buffers.ReplayBuffer, VECTOR, ACTION),
        (buffers.ReplayBuffer, IMAGE, spaces.MultiDiscrete([3, 4])),
        (buffers.ReplayBuffer, spaces.Discrete(300), DISCRETE),
        (buffers.ReplayBuffer, spaces.MultiBinary(4), DISCRETE),
        (buffers.DictReplayBuffer, DICT, ACTION),
        (buffers.NStepReplayBuffer, VECTOR, DISCRETE),
        (OwnBuffer, VECTOR, DISCRETE),
    ],
)
@pytest.mark.parametrize("size", [50, 30])
def test_rows_and_episodes_are_those_of_the_buffer(
    tmp_path: Path, kind: Any, observation: Any, action: Any, size: int
) -> None:
    buffer = fill(kind(size, observation, action, "cpu"))
    done = import_sb3(save(tmp_path / "buffer.pkl", buffer), tmp_path / "new.exp")
    assert (done.rows, done.episodes) == (30, 3)
    assert episodes_of(tmp_path / "new.exp") == whole()
    with expstore.open(tmp_path / "new.exp", mode="r") as rb:
        assert rb.stats()["capacity"] == size
        rows = rb[:]
        for key, theirs in (
            ("observation", buffer.observations),
            (("next", "observation"), buffer.next_observations),
            ("action", buffer.actions),
        ):
            parts = theirs.items() if isinstance(theirs, dict) else [((), theirs)]
            for name, array in parts:
                ours = rows[(key, name) if isinstance(key, str) and name else (*key, name) if name else key]
                np.testing.assert_array_equal(ours.numpy(), array[:30, 0].astype(ours.numpy().dtype))
        assert str(rows["action"].numpy().dtype) == str(action.dtype)
    assert done.notes == (
        ("attributes of the buffer that are left out: weights",) if kind is OwnBuffer else ()
    )


def test_a_full_buffer_begins_with_its_oldest_row(tmp_path: Path) -> None:
    for size, episodes in ((24, [("env", 4, 4.0, "terminated"), *whole()[1:]]), (10, whole()[2:])):
        source = save(tmp_path / f"{size}.pkl", fill(buffers.ReplayBuffer(size, VECTOR, DISCRETE, "cpu")))
        done = import_sb3(source, tmp_path / f"{size}.exp")
        assert (done.rows, done.kept) == (size, size)
        assert episodes_of(tmp_path / f"{size}.exp") == episodes


@pytest.mark.parametrize("size", [100, 48])
def test_each_environment_is_a_source(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.tuning, "EXCHANGE_ROWS", 7)  # pieces end within episodes
    buffer = fill(buffers.ReplayBuffer(size, VECTOR, DISCRETE, "cpu", n_envs=2))
    done = import_sb3(save(tmp_path / "buffer.pkl", buffer), tmp_path / "new.exp")
    assert done.rows == min(size, 60)
    expected = whole() + whole("env//1", 100)
    if size == 48:
        expected[0], expected[3] = ("env", 4, 4.0, "terminated"), ("env//1", 4, 404.0, "terminated")
    assert episodes_of(tmp_path / "new.exp") == expected


def test_the_last_episode_and_an_interrupted_one_are_cut(tmp_path: Path) -> None:
    source = save(tmp_path / "open.pkl", fill(buffers.ReplayBuffer(50, VECTOR, DISCRETE, "cpu"), 25))
    import_sb3(source, tmp_path / "open.exp")
    assert episodes_of(tmp_path / "open.exp") == [*whole()[:2], ("env", 5, 15.0, "cut")]
    source = save(
        tmp_path / "missing.pkl", fill(buffers.ReplayBuffer(50, VECTOR, DISCRETE, "cpu"), 20, missing=13)
    )
    import_sb3(source, tmp_path / "missing.exp")
    assert episodes_of(tmp_path / "missing.exp") == [
        whole()[0], ("env", 3, 6.0, "cut"), ("env", 6, 12.0, "terminated")
    ]  # fmt: skip


@pytest.mark.parametrize("size", [50, 24])
def test_next_observations_of_a_buffer_that_shares_them(tmp_path: Path, size: int) -> None:
    buffer = fill(
        buffers.ReplayBuffer(
            size, VECTOR, DISCRETE, "cpu", optimize_memory_usage=True, handle_timeout_termination=False
        )
    )
    done = import_sb3(save(tmp_path / "buffer.pkl", buffer), tmp_path / "new.exp")
    assert [note.split(" and ")[0].split(":")[0] for note in done.notes] == [
        "the buffer was made with optimize_memory_usage=True",
        "the buffer was made with handle_timeout_termination=False",
    ]
    ended = [("env", 10, 20.0, "terminated"), ("env", 10, 30.0, "terminated")]
    # The newest next observation is stored in the place of the oldest observation, whose row is left out.
    first = ("env", 10, 10.0, "terminated") if size == 50 else ("env", 3, 3.0, "terminated")
    assert episodes_of(tmp_path / "new.exp") == [first, *ended]
    with expstore.open(tmp_path / "new.exp", mode="r") as rb:
        rows = rb[:]
        seen = rows["observation"][:, 0].numpy()
        after = rows["next", "observation"][:, 0].numpy()
    is_end = np.isin(seen, [9, 20])
    np.testing.assert_array_equal(after, np.where(is_end, 0, seen + 1))  # 31 after 30: the newest step


def test_time_limits_that_were_not_recorded_are_mentioned(tmp_path: Path) -> None:
    buffer = buffers.ReplayBuffer(50, VECTOR, DISCRETE, "cpu", handle_timeout_termination=False)
    notes: list[str] = []
    import_sb3(save(tmp_path / "a.pkl", fill(buffer)), tmp_path / "a.exp", tell=notes.extend)
    assert notes == [
        "the buffer was made with handle_timeout_termination=False: all ends of episodes count as "
        "terminated, also those by a time limit"
    ]
    assert [row[3] for row in episodes_of(tmp_path / "a.exp")] == ["terminated"] * 3
    del buffer.timeouts, buffer.handle_timeout_termination  # as before stable-baselines3 1.1
    done = import_sb3(save(tmp_path / "b.pkl", buffer), tmp_path / "b.exp")
    assert list(done.notes) == notes


@pytest.mark.parametrize("copies", [False, True])
def test_a_buffer_with_goals_and_infos(tmp_path: Path, copies: bool) -> None:
    env = DummyVecEnv([lambda: BitFlippingEnv(4)])
    buffer = HerReplayBuffer(24, env.observation_space, env.action_space, env, "cpu", copy_info_dict=copies)  # type: ignore[arg-type]
    seen = env.reset()
    for _ in range(30):
        actions = np.array([env.action_space.sample()])
        after, rewards, done, infos = env.step(actions)
        last = {k: v[None] for k, v in infos[0]["terminal_observation"].items()} if done[0] else after
        buffer.add(
            seen, last, actions, rewards, done, [{"TimeLimit.truncated": infos[0]["TimeLimit.truncated"]}]
        )  # type: ignore[arg-type]
        seen = after
    made = import_sb3(save(tmp_path / "buffer.pkl", buffer), tmp_path / "new.exp")
    assert made.rows == 24
    assert made.notes == (("attributes of the buffer that are left out: infos",) if copies else ())
    order = np.r_[buffer.pos : 24, 0 : buffer.pos]
    with expstore.open(tmp_path / "new.exp", mode="r") as rb:
        for name in ("observation", "achieved_goal", "desired_goal"):
            ours = rb[:]["next", "observation", name].numpy()
            np.testing.assert_array_equal(ours, buffer.next_observations[name][order, 0])


def test_the_command_line_recognizes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "any.name", fill(buffers.ReplayBuffer(50, VECTOR, DISCRETE, "cpu")))
    assert run(["import", str(source), str(tmp_path / "new.exp")]) == 0
    assert "30 rows" in capsys.readouterr().out
    assert episodes_of(tmp_path / "new.exp") == whole()
    assert (
        run(["import", str(source), str(tmp_path / "small.exp"), "--format", "sb3", "--capacity", "10"]) == 0
    )
    assert episodes_of(tmp_path / "small.exp") == whole()[2:]
    assert run(["import", str(source), str(tmp_path / "c.exp"), "--map", "a=b"]) == 2
    assert "does not apply to sb3" in capsys.readouterr().err


def test_no_library_is_loaded_for_a_pickle(tmp_path: Path) -> None:
    source = save(tmp_path / "buffer.pkl", fill(buffers.DictReplayBuffer(50, DICT, DISCRETE, "cpu")))
    code = (
        "import sys; from expstore.exchange import sb3_buffers\n"
        "from expstore.exchange.numpy_unpickler import load_object\n"
        f"load_object(open({str(source)!r}, 'rb'), sb3_buffers._PACKAGES)\n"
        "assert not {'torch', 'gymnasium', 'stable_baselines3'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pair = function, arguments

    def __reduce__(self) -> Any:
        return self.pair


def hostile(**attributes: Any) -> Any:
    buffer = fill(buffers.ReplayBuffer(50, VECTOR, DISCRETE, "cpu"))
    vars(buffer).update(attributes)
    return buffer


#: Makes a pickle that would create a file if it ran, and says why it is refused.
HOSTILE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda mark: Calls(os.system, f"touch {mark}"), "calls posix.system"),
    (lambda mark: hostile(device=Calls(os.system, f"touch {mark}")), "calls posix.system"),
    (lambda mark: hostile(observations=Calls(eval, f"open({str(mark)!r}, 'w')")), "calls builtins.eval"),
    (lambda mark: hostile(pos=Calls(Path, mark)), "position of type PickledObject"),
    (lambda mark: hostile(rewards=Calls(np.savetxt, str(mark), [1.0])), "rewards of type PickledObject"),
    (lambda mark: [1, 2], "a pickle of a list"),
    (lambda mark: spaces.Discrete(3), "Discrete, is not a replay buffer .* it has no observations"),
    (lambda mark: buffers.RolloutBuffer(5, VECTOR, DISCRETE), "no dones"),
    (lambda mark: buffers.ReplayBuffer(5, VECTOR, DISCRETE), "has no rows"),
    (lambda mark: hostile(pos=51), "position 51"),
    (lambda mark: hostile(pos=-1), "position -1"),
    (lambda mark: hostile(pos="1"), "position of type str"),
    (lambda mark: hostile(rewards=np.zeros((50, 1, 1), np.float32)), r"rewards of shape \[50, 1, 1\]"),
    (lambda mark: hostile(rewards=np.zeros((0, 1), np.float32)), "rewards of shape"),
    (lambda mark: hostile(dones=np.zeros(50)), r"dones of shape \[50\]; expected \[50, 1\]"),
    (lambda mark: hostile(actions=np.zeros((10**9, 0))), "actions of shape"),
    (lambda mark: hostile(observations=np.zeros((49, 1, 2))), "observations of shape"),
    (lambda mark: hostile(next_observations=np.zeros((50, 1, 3), np.float32)), "differ in shape"),
    (lambda mark: hostile(next_observations={}), "differ in shape"),
    (lambda mark: hostile(observations={}, next_observations={}), "no observations"),
    (lambda mark: hostile(observations=np.zeros((50, 1, 2), "U3")), "type <U3"),
]


@pytest.mark.guarantee("exchange/safe")
def test_other_pickles_are_refused_and_run_nothing(tmp_path: Path) -> None:
    for value, text in HOSTILE:
        source = save(tmp_path / "buffer.pkl", value(tmp_path / "mark"))
        with pytest.raises(SchemaError, match=text) as caught:
            import_sb3(source, tmp_path / "new.exp")
        assert str(source) in str(caught.value) or "holds values" in str(caught.value)
        assert sorted(os.listdir(tmp_path)) == ["buffer.pkl"]


def test_damaged_pickles_and_missing_files(tmp_path: Path) -> None:
    good = save(tmp_path / "good.pkl", fill(buffers.ReplayBuffer(50, VECTOR, DISCRETE, "cpu"))).read_bytes()
    for data in (good[:-20], good[: len(good) // 2], b"\x80\x05" + b"\xff" * 40):
        (tmp_path / "bad.pkl").write_bytes(data)
        with pytest.raises(StorageError, match=re.escape(f"{tmp_path / 'bad.pkl'}: cannot read a pickle")):
            import_sb3(tmp_path / "bad.pkl", tmp_path / "new.exp")
    with pytest.raises(NotFoundError):
        import_sb3(tmp_path / "none.pkl", tmp_path / "new.exp")
    (tmp_path / "new.exp").mkdir()
    with pytest.raises(StateError):  # before the file is read
        import_sb3(tmp_path / "bad.pkl", tmp_path / "new.exp")


def test_pickles_of_old_spaces_are_read(tmp_path: Path) -> None:
    space = spaces.Dict({"state": VECTOR})
    buffer = fill(buffers.DictReplayBuffer(50, space, DISCRETE, "cpu"))
    vars(buffer.observation_space)["spaces"] = OrderedDict(buffer.observation_space.spaces)
    import_sb3(save(tmp_path / "buffer.pkl", buffer), tmp_path / "new.exp")
    assert episodes_of(tmp_path / "new.exp") == whole()


@pytest.mark.guarantee("exchange/safe")
def test_arrays_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    buffer = hostile(rewards=np.zeros((50, 1), np.float32))
    one = np.zeros((50, 1, 1000), np.float32)
    buffer.observations = buffer.next_observations = {str(number): one for number in range(10_000)}
    source = save(tmp_path / "buffer.pkl", buffer)
    assert source.stat().st_size < 500_000  # and 4 GB in a store
    with pytest.raises(SchemaError, match=r"has 4\d{9} bytes of arrays in a file of \d{6} bytes"):
        import_sb3(source, tmp_path / "new.exp")


def test_lengths_in_a_pickle_reserve_no_memory(tmp_path: Path) -> None:
    huge = (1 << 44).to_bytes(8, "little")
    for code in (b"\x96", b"\x8e", b"\x8d"):  # bytearray, bytes, text
        (tmp_path / "huge.pkl").write_bytes(b"\x80\x05" + code + huge + b"x.")
        with pytest.raises(StorageError, match="cannot read a pickle"):
            import_sb3(tmp_path / "huge.pkl", tmp_path / "new.exp")


def test_the_name_is_public() -> None:
    assert exchange.import_sb3 is import_sb3
