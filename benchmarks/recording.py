"""The cost of a step in an environment loop: a recorder, `add`, a wrapper, and buffers of stable-baselines3.

Run as `python benchmarks/recording.py`. All sides get the same steps in turns of some hundreds. Reported are
the CPU time of the whole process per step, including background work, and the time of a call.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

import expstore  # noqa: E402
from benchmarks.adapters import Missing, StableBaselines, need  # noqa: E402
from benchmarks.report import Report, Result, options  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402

#: Observation, next observation and action of each kind of rows: shape and dtype.
KINDS: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], str]] = {
    "cartpole": ((4,), "float32", (), "int64"),
    "locomotion": ((105,), "float32", (8,), "float32"),
    "pixels": ((84, 84), "uint8", (), "int64"),
}
#: An observation, an action, a reward, the next observation, terminated, truncated.
Step = tuple[Any, Any, float, Any, bool, bool]


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        capacity: Rows of each buffer.
        steps: Steps per turn.
        rounds: Number of turns per side.
    """

    capacity: int = 100_000
    steps: int = 500
    rounds: int = 12


FULL, QUICK, SMOKE = Effort(), Effort(rounds=4), Effort(capacity=200, steps=40, rounds=1)


def steps_of(kind: str, count: int) -> list[Step]:
    """Return steps in episodes of 200."""
    shape, dtype, action_shape, action_dtype = KINDS[kind]
    rng = np.random.default_rng(0)
    seen = rng.integers(0, 255, (65, *shape)).astype(dtype)
    actions = np.zeros((1, *action_shape), action_dtype)
    return [(seen[n % 64], actions[0], 1.0, seen[n % 64 + 1], n % 200 == 199, False) for n in range(count)]


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
    after = row.pop("next")
    made = {name: torch.as_tensor(value) for name, value in row.items()}
    return TensorDict(made | {"next": TensorDict({k: torch.as_tensor(v) for k, v in after.items()}, [])}, [])


#: Functions of a side: store a step, and close.
Side = tuple[Callable[[Step], object], Callable[[], object]]


def sides(folder: Path, kind: str, effort: Effort) -> dict[str, Side]:
    """Return the sides for steps of a kind; stable-baselines3 only if it is installed."""

    def store(name: str) -> Any:
        return expstore.open(folder / f"{kind}-{name}.exp", capacity=effort.capacity)

    made: dict[str, Side] = {}
    for steps in (1, 16):
        rb = store(f"record-{steps}")
        episode = rb.record("env-0", flush_steps=steps)

        def record(step: Step, take: Callable[..., None] = episode.step) -> None:
            take(*step)

        made[f"record-{steps}"] = record, lambda rb=rb, one=episode: (one.close(), rb.close())
    for name, convert in (("add-dict", row_of), ("add-tensordict", tensordict_of)):
        rb = store(name)
        made[name] = (lambda step, rb=rb, convert=convert: rb.add(convert(step), source="env-0")), rb.close
    try:
        row = tensordict_of(steps_of(kind, 1)[0])[None]
        theirs = StableBaselines(folder, min(effort.capacity, 20_000), row)
        made["sb3"] = (lambda step, rb=theirs.rb: _add(rb, step)), theirs.close
    except Missing:
        pass
    return made


def _add(rb: Any, step: Step) -> None:
    observation, action, reward, following, terminated, truncated = step
    done = np.array([terminated or truncated])
    rb.add(observation[None], following[None], np.asarray(action)[None], np.array([reward]), done, [{}])


def measure(folder: Path, effort: Effort) -> Iterator[Result]:
    for kind in KINDS:
        found = sides(folder, kind, effort)
        steps = steps_of(kind, effort.steps)
        cpu: dict[str, list[float]] = {name: [] for name in found}
        calls: dict[str, list[float]] = {name: [] for name in found}
        gc.collect()
        gc.disable()
        try:
            for cycle in range(effort.rounds + 1):
                for name, (take, _) in found.items():
                    times, began = _take(take, steps)
                    if cycle:  # the first turn warms up
                        calls[name] += times
                        cpu[name].append(began)
        finally:
            gc.enable()
            for _, close in found.values():
                close()
        yield from _results(kind, cpu, calls)
    yield measure_wrapper(folder, effort)
    try:
        need("stable_baselines3")
    except Missing:
        return
    yield from measure_add(folder, effort)
    yield from measure_learn(folder, effort)


def measure_wrapper(folder: Path, effort: Effort) -> Result:
    """Measure what `expstore.gym.Record` adds to each step of CartPole, with random actions."""
    plain = gymnasium.make("CartPole-v1")
    path, capacity = folder / "wrapper.exp", effort.capacity
    recorded = expstore.gym.Record(gymnasium.make("CartPole-v1"), path, capacity=capacity)
    cpu: dict[str, list[float]] = {"plain": [], "recorded": []}
    for cycle in range(effort.rounds + 1):
        for name, env in (("plain", plain), ("recorded", recorded)):
            spent = _drive(env, effort.steps)
            if cycle:
                cpu[name].append(spent)
    recorded.close()
    before, after = (float(np.median(found)) for found in cpu.values())
    return Result(
        "recording/gymnasium-record",
        (after - before) * 1e6,
        f"{(after - before) * 1e6:.1f} µs of CPU more",
        note=f"a step of the loop {before * 1e6:.1f} µs, recorded {after * 1e6:.1f} µs (medians of turns)",
        data={"cpu": after - before, **cpu},
    )


def measure_add(folder: Path, effort: Effort) -> Iterator[Result]:
    """Measure `add` of `expstore.sb3.ReplayBuffer` beside stable-baselines3's, given the same steps."""
    from stable_baselines3.common.buffers import ReplayBuffer

    rng, spaces = np.random.default_rng(0), gymnasium.spaces
    observation, actions = spaces.Box(-9, 9, (105,), np.float32), spaces.Box(-1, 1, (8,), np.float32)
    seen = rng.normal(size=(65, 1, 105)).astype(np.float32)
    action, reward = np.zeros((1, 8), np.float32), np.ones(1, np.float32)
    infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False}]
    steps = [
        (seen[n % 64], seen[(n + 1) % 64], action, reward, np.array([n % 200 == 199]), infos)
        for n in range(effort.steps)
    ]
    size = min(effort.capacity, 20_000)
    buffers: dict[str, Any] = {"sb3": ReplayBuffer(size, observation, actions, "cpu")}
    for count in (1, 16, 64):
        path = folder / f"sb3-add-{count}.exp"
        buffers[str(count)] = expstore.sb3.ReplayBuffer(
            size, observation, actions, "cpu", path=path, flush_steps=count
        )

    def add_all(buffer: Any) -> None:
        for step in steps:
            buffer.add(*step)

    yield from _beside_sb3("sb3-add", buffers, add_all, effort)


def measure_learn(folder: Path, effort: Effort) -> Iterator[Result]:
    """Measure a step of DQN's `learn` on CartPole with either buffer; every fourth step trains."""
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
            "MlpPolicy", gymnasium.make("CartPole-v1"), buffer_size=min(effort.capacity, 20_000), seed=0,
            learning_starts=effort.steps // 2, train_freq=4, batch_size=64, device="cpu", **options,
        )  # fmt: skip

    def learn(model: Any) -> None:
        model.learn(effort.steps, reset_num_timesteps=False)

    yield from _beside_sb3("sb3-learn", models, learn, effort)


def _beside_sb3(
    name: str, sides: dict[str, Any], run: Callable[[Any], None], effort: Effort
) -> Iterator[Result]:
    """Run sides in turns and compare their CPU time per step with that of the side `sb3`."""
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    thread: dict[str, list[float]] = {side: [] for side in sides}
    gc.collect()
    gc.disable()
    try:
        for cycle in range(effort.rounds + 1):
            for side, one in sides.items():
                began = time.process_time(), time.thread_time()
                run(one)
                spent = time.process_time() - began[0], time.thread_time() - began[1]
                if cycle:  # the first turn warms up
                    cpu[side].append(spent[0] / effort.steps)
                    thread[side].append(spent[1] / effort.steps)
    finally:
        gc.enable()
        for side, one in sides.items():
            if side != "sb3":
                getattr(one, "replay_buffer", one).close()
    theirs, theirs_thread = float(np.median(cpu.pop("sb3"))), float(np.median(thread["sb3"]))
    for side, cycles in cpu.items():
        ours, ours_thread = float(np.median(cycles)), float(np.median(thread[side]))
        yield Result(
            f"recording/{name}-{side}",
            ours / theirs,
            f"{ours * 1e6:.1f} µs of CPU",
            f"{theirs * 1e6:.1f} µs",
            f"{ours / theirs:.2f}x",
            note=f"flush_steps={side}; its thread {ours_thread * 1e6:.1f} and {theirs_thread * 1e6:.1f} µs",
            data={"cpu": ours, "theirs": theirs, "thread": ours_thread, "theirs_thread": theirs_thread},
        )


def _drive(env: gymnasium.Env[Any, Any], steps: int) -> float:
    """Step an environment; return the CPU seconds of the process per step."""
    env.reset(seed=0)
    env.action_space.seed(0)
    began = time.process_time()
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return (time.process_time() - began) / steps


def _take(take: Callable[[Step], object], steps: Sequence[Step]) -> tuple[list[float], float]:
    """Pass steps to a side; return the time of each call, and the CPU seconds of the process per step."""
    times, clock, began = [], time.perf_counter, time.process_time()
    for step in steps:
        start = clock()
        take(step)
        times.append(clock() - start)
    return times, (time.process_time() - began) / len(steps)


def _results(kind: str, cpu: dict[str, list[float]], calls: dict[str, list[float]]) -> Iterator[Result]:
    theirs = float(np.mean(cpu["sb3"])) if "sb3" in cpu else None
    for name in cpu:
        mean = float(np.mean(cpu[name]))
        p50, p99 = (float(np.percentile(calls[name], part)) for part in (50, 99))
        yield Result(
            f"recording/{kind}-{name}",
            mean * 1e6,
            f"{mean * 1e6:.1f} µs of CPU",
            "–" if theirs is None else f"{theirs * 1e6:.1f} µs of CPU",
            "–" if theirs is None else f"{mean / theirs:.2f}x",
            note=f"a call p50 {p50 * 1e6:.1f} µs, p99 {p99 * 1e6:.0f} µs",
            data={"cpu": mean, "p50": p50, "p99": p99, "turns": cpu[name]},
        )


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="a third of the turns", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    with scratch(wanted.folder, 4 * effort.capacity * 15_000) as folder:
        report = Report({}, out, other="stable-baselines3", file=wanted.json)
        for result in measure(folder, effort):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
