"""The cost of a step in an environment loop: recorders, `add`, a wrapper, buffers of stable-baselines3.

Run as `python -m benchmarks.recording`. All sides get the same steps, some hundreds at a time, alternating.
A result is the CPU time of the whole process per step, including background work.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

import expstore
from benchmarks.report import Result, Setup, run_program

#: Observation and action of each kind of rows: shape and dtype.
KINDS: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], str]] = {
    "cartpole": ((4,), "float32", (), "int64"),
    "locomotion": ((105,), "float32", (8,), "float32"),
    "pixels": ((84, 84), "uint8", (), "int64"),
}
#: An observation, an action, a reward, the next observation, terminated, truncated.
Step = tuple[Any, Any, float, Any, bool, bool]


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark: rows of each buffer, steps at a time, and how often each side gets them."""

    capacity: int = 20_000
    steps: int = 500
    rounds: int = 12


FULL, SMOKE = Effort(), Effort(capacity=200, steps=40, rounds=1)


def measure(setup: Setup) -> Iterator[Result]:
    effort = SMOKE if setup.smoke else FULL
    has_sb3 = importlib.util.find_spec("stable_baselines3") is not None
    if not has_sb3:
        setup.skip("stable-baselines3", "pip install --group bench")
    for kind in KINDS:
        yield from measure_kind(setup.folder, kind, effort, has_sb3=has_sb3)
    yield from measure_wrapper(setup.folder, effort)
    if has_sb3:
        yield from measure_add(setup.folder, effort)
        yield from measure_learn(setup.folder, effort)


def measure_sides(
    name: str, sides: Mapping[str, Callable[[], object]], baseline: str, effort: Effort
) -> Iterator[Result]:
    """Run the sides, each of which makes `effort.steps` steps; compare their CPU time with the baseline's."""
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    gc.collect()
    gc.disable()
    try:
        for cycle in range(effort.rounds + 1):
            for side, run in sides.items():
                started = time.process_time()
                run()
                if cycle:  # the first cycle warms up
                    cpu[side].append((time.process_time() - started) / effort.steps)
    finally:
        gc.enable()
    medians = {side: float(np.median(times)) for side, times in cpu.items()}
    theirs = medians.pop(baseline, None)
    for side, ours in medians.items():
        yield Result(
            f"recording/{name}-{side}",
            ours * 1e6,
            f"{ours * 1e6:.1f} µs of CPU",
            "–" if theirs is None else f"{theirs * 1e6:.1f} µs of CPU",
            "–" if theirs is None else f"{ours / theirs:.2f}x",
            data={"cpu": ours, "baseline": theirs, "rounds": cpu[side]},
        )


# -- rows of several kinds ----------------------------------------------------------------------------


def make_steps(kind: str, count: int) -> list[Step]:
    """Return steps in episodes of 200."""
    shape, dtype, action_shape, action_dtype = KINDS[kind]
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (65, *shape)).astype(dtype)
    action = np.zeros((1, *action_shape), action_dtype)[0]
    return [(frames[n % 64], action, 1.0, frames[n % 64 + 1], n % 200 == 199, False) for n in range(count)]


def row_of(step: Step) -> dict[str, Any]:
    """Return a step as a nested dict of arrays and numbers."""
    observation, action, reward, following, terminated, truncated = step
    return {
        "observation": observation,
        "action": action,
        "next": {
            "observation": following,
            "reward": np.array([reward], np.float32),
            "done": np.array([terminated or truncated]),
            "terminated": np.array([terminated]),
            "truncated": np.array([truncated]),
        },
    }


def tensordict_of(step: Step) -> TensorDict:
    """Return a step as a TensorDict, as a loop would build it."""
    row = row_of(step)
    after = TensorDict({name: torch.as_tensor(value) for name, value in row.pop("next").items()}, [])
    return TensorDict({name: torch.as_tensor(value) for name, value in row.items()} | {"next": after}, [])


def measure_kind(folder: Path, kind: str, effort: Effort, *, has_sb3: bool) -> Iterator[Result]:
    """Compare ways to store a step with stable-baselines3's `add`."""
    steps = make_steps(kind, effort.steps)
    stores: dict[str, Callable[[Step], object]] = {}
    with ExitStack() as stack:

        def open_store(name: str) -> Any:
            path = folder / f"{kind}-{name}.exp"
            return stack.enter_context(expstore.open(path, capacity=effort.capacity))

        for count in (1, 16):
            episode = open_store(f"record-{count}").record("env-0", flush_steps=count)
            stack.callback(episode.close)
            stores[f"record-{count}"] = lambda step, record=episode.step: record(*step)  # type: ignore[misc]
        for name, convert in (("add-dict", row_of), ("add-tensordict", tensordict_of)):
            add = functools.partial(open_store(name).add, source="env-0")
            stores[name] = lambda step, add=add, convert=convert: add(convert(step))  # type: ignore[misc]
        if has_sb3:
            stores["sb3"] = functools.partial(_add_to_sb3, _open_sb3(kind, effort.capacity))

        def store_all(store: Callable[[Step], object]) -> None:
            for step in steps:
                store(step)

        sides = {name: functools.partial(store_all, store) for name, store in stores.items()}
        yield from measure_sides(kind, sides, "sb3", effort)


def _open_sb3(kind: str, capacity: int) -> Any:
    from stable_baselines3.common.buffers import ReplayBuffer

    shape, dtype, action_shape, action_dtype = KINDS[kind]
    low, high = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
    observations = gymnasium.spaces.Box(low, high, shape, np.dtype(dtype).type)
    actions: Any = gymnasium.spaces.Discrete(18)
    if action_shape:
        actions = gymnasium.spaces.Box(-1, 1, action_shape, np.dtype(action_dtype).type)
    return ReplayBuffer(capacity, observations, actions, device="cpu")


def _add_to_sb3(rb: Any, step: Step) -> None:
    observation, action, reward, following, terminated, truncated = step
    done = np.array([terminated or truncated])
    rb.add(observation[None], following[None], np.asarray(action)[None], np.array([reward]), done, [{}])


# -- a wrapper, and stable-baselines3's algorithms ----------------------------------------------------


def measure_wrapper(folder: Path, effort: Effort) -> Iterator[Result]:
    """Compare steps of CartPole with and without `expstore.gym.Record` around it, at random actions."""

    def drive(env: gymnasium.Env[Any, Any]) -> None:
        env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(effort.steps):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()

    recorder = expstore.gym.Record(
        gymnasium.make("CartPole-v1"), folder / "wrapper.exp", capacity=effort.capacity
    )
    envs = {"plain": gymnasium.make("CartPole-v1"), "record": recorder}
    sides = {name: functools.partial(drive, env) for name, env in envs.items()}
    yield from measure_sides("gymnasium", sides, "plain", effort)
    recorder.close()


def measure_add(folder: Path, effort: Effort) -> Iterator[Result]:
    """Compare `add` of `expstore.sb3.ReplayBuffer` with that of stable-baselines3's buffer."""
    from stable_baselines3.common.buffers import ReplayBuffer

    rng, spaces = np.random.default_rng(0), gymnasium.spaces
    observation, actions = spaces.Box(-9, 9, (105,), np.float32), spaces.Box(-1, 1, (8,), np.float32)
    frames = rng.normal(size=(65, 1, 105)).astype(np.float32)
    action, reward = np.zeros((1, 8), np.float32), np.ones(1, np.float32)
    infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False}]
    steps = [
        (frames[n % 64], frames[(n + 1) % 64], action, reward, np.array([n % 200 == 199]), infos)
        for n in range(effort.steps)
    ]
    buffers: dict[str, Any] = {"sb3": ReplayBuffer(effort.capacity, observation, actions, "cpu")}
    for count in (1, 16, 64):
        path = folder / f"sb3-add-{count}.exp"
        buffers[str(count)] = expstore.sb3.ReplayBuffer(
            effort.capacity, observation, actions, "cpu", path=path, flush_steps=count
        )

    def add_all(buffer: Any) -> None:
        for step in steps:
            buffer.add(*step)

    sides = {name: functools.partial(add_all, buffer) for name, buffer in buffers.items()}
    yield from measure_sides("sb3-add", sides, "sb3", effort)
    for buffer in [*buffers.values()][1:]:
        buffer.close()


def measure_learn(folder: Path, effort: Effort) -> Iterator[Result]:
    """Compare a step of DQN's `learn` on CartPole with either buffer; every fourth step trains."""
    from stable_baselines3 import DQN

    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for count in (0, 1, 4, 16):
        options: dict[str, Any] = {}
        if count:
            path = folder / f"sb3-learn-{count}.exp"
            options["replay_buffer_class"] = expstore.sb3.ReplayBuffer
            options["replay_buffer_kwargs"] = {"path": path, "flush_steps": count}
        models[str(count or "sb3")] = DQN(
            "MlpPolicy", gymnasium.make("CartPole-v1"), buffer_size=effort.capacity, seed=0,
            learning_starts=effort.steps // 2, train_freq=4, batch_size=64, device="cpu", **options,
        )  # fmt: skip
    sides = {
        name: functools.partial(model.learn, effort.steps, reset_num_timesteps=False)
        for name, model in models.items()
    }
    yield from measure_sides("sb3-learn", sides, "sb3", effort)
    for model in [*models.values()][1:]:
        model.replay_buffer.close()


if __name__ == "__main__":
    sys.exit(run_program(measure, {}, gigabytes=2))
