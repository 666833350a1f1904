"""Learning curves of Stable-Baselines3's DQN and SAC with its own replay buffer and with `expstore.sb3`.

Run as `python benchmarks/sb3_learning.py`; all runs take about half an hour of one core. Figures are written
to `benchmarks/results/sb3_curves.json` after each run, runs that the file has are skipped, and the picture is
`docs/images/sb3_curves.png`. `--draw` only draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import DQN, SAC  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402

import expstore  # noqa: E402

BUFFERS = ("stable-baselines3", "expstore")
FIGURES = ROOT / "benchmarks" / "results" / "sb3_curves.json"
PICTURE = ROOT / "docs" / "images" / "sb3_curves.png"
#: Points of a curve.
POINTS = 40


@dataclass(frozen=True)
class Task:
    """What is learned.

    Args:
        env: Name of the environment.
        algorithm: Class of the algorithm.
        steps: Steps of the environment.
        window: A point of a curve is the mean return of so many episodes.
        options: Arguments of the algorithm.
    """

    env: str
    algorithm: type[Any]
    steps: int
    window: int
    options: dict[str, Any]


TASKS = {
    "DQN, CartPole-v1": Task(
        "CartPole-v1",
        DQN,
        40_000,
        20,
        {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.24,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [64, 64]},
        },
    ),
    "SAC, Pendulum-v1": Task(
        "Pendulum-v1",
        SAC,
        6_000,
        5,
        {
            "learning_rate": 1e-3,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 500,
            "policy_kwargs": {"net_arch": [64, 64]},
        },
    ),
}


def train(task: Task, buffer: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Train once; return the steps at which episodes ended, and their returns."""
    env = Monitor(gym.make(task.env))
    options = dict(task.options)
    if buffer == "expstore":
        path = folder / f"{task.env}-{seed}.exp"
        options |= {
            "replay_buffer_class": expstore.sb3.ReplayBuffer,
            "replay_buffer_kwargs": {"path": path, "seed": seed},
        }
    model = task.algorithm("MlpPolicy", env, seed=seed, device="cpu", **options)
    model.learn(steps)
    if buffer == "expstore":
        model.replay_buffer.close()
    return {
        "ends": np.cumsum(env.get_episode_lengths()).tolist(),
        "returns": [round(value, 2) for value in env.get_episode_rewards()],
    }


def train_all(seeds: int, steps: int | None, file: Path, out: Callable[[str], object]) -> dict[str, Any]:
    """Train what the file lacks; return all runs by task, buffer and seed."""
    runs: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for name, task in TASKS.items():
                for buffer in BUFFERS:
                    done = runs.setdefault(name, {}).setdefault(buffer, {})
                    if str(seed) in done:
                        continue
                    found = train(task, buffer, seed, Path(folder), steps or task.steps)
                    done[str(seed)] = found
                    file.write_text(json.dumps(runs, separators=(",", ":")))
                    last = np.mean(found["returns"][-task.window :])
                    out(f"{name}, {buffer}, seed {seed}: {last:.1f}")
    return runs


def curve_of(run: dict[str, Any], grid: Any, window: int) -> Any:
    """Return the mean return of the last `window` episodes that had ended at each step; NaN before any."""
    returns = np.asarray(run["returns"])
    counts = np.searchsorted(run["ends"], grid, side="right")
    means = [returns[max(0, n - window) : n].mean() if n else np.nan for n in counts]
    return np.array(means)


def last_returns(task: Task, run: dict[str, Any]) -> float:
    """Return the mean return of all episodes that ended in the last fifth of the steps."""
    ends = np.asarray(run["ends"])
    return float(np.asarray(run["returns"])[ends > 0.8 * ends[-1]].mean())


def table_of(runs: dict[str, Any]) -> list[str]:
    """Return a table in Markdown: returns at the end, by task, buffer and seed."""
    lines = ["| | buffer | by seed | mean |", "|---|---|---|---|"]
    for name, task in TASKS.items():
        for buffer in runs.get(name, {}):
            found = [last_returns(task, run) for _, run in sorted(runs[name][buffer].items())]
            texts = ", ".join(f"{value:.0f}" for value in found)
            lines.append(f"| {name} | {buffer} | {texts} | {np.mean(found):.0f} |")
    return lines


def draw(runs: dict[str, Any], path: Path) -> None:
    """Draw the curves of all runs, and their means."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in TASKS if name in runs]
    figure, axes = plt.subplots(1, len(names), figsize=(1 + 4 * len(names), 3.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        task = TASKS[name]
        steps = max(run["ends"][-1] for found in runs[name].values() for run in found.values())
        grid = np.linspace(steps / POINTS, steps, POINTS)
        for buffer, colour in zip(BUFFERS, ("#c77d0a", "#2a6f97"), strict=True):
            curves = [curve_of(run, grid, task.window) for run in runs[name][buffer].values()]
            for curve in curves:
                axis.plot(grid, curve, color=colour, linewidth=0.8, alpha=0.4)
            axis.plot(grid, np.mean(curves, axis=0), color=colour, linewidth=2.2, label=buffer)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("steps", fontsize=9)
        axis.set_ylabel(f"return, mean of {task.window} episodes", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Train, print the table, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each task and buffer")
    parser.add_argument("--steps", type=int, help="steps of each run, for a trial")
    parser.add_argument("--json", type=Path, default=FIGURES, help="file of the figures")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the picture")
    parser.add_argument("--draw", action="store_true", help="draw the figures of the file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = (
        json.loads(args.json.read_text()) if args.draw else train_all(args.seeds, args.steps, args.json, out)
    )
    for line in table_of(runs):
        out(line)
    draw(runs, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
