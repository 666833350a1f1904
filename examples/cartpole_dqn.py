"""Train a small DQN on CartPole from a store that survives the process. This is the first example to run.

Run it with `make run`, or `python examples/cartpole_dqn.py --help`; it takes less than a minute on two cores.
Stop it at any moment, even with kill -9, and run it again: it continues from the stored transitions.

`rb.record` stores every step of the environments, and stored steps survive the process. Weights are saved
after every flush. dqn.py uses a single environment, sac.py continuous actions.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDictBase
from torch import nn

import expstore

if TYPE_CHECKING:
    from expstore import TensorDictReplayBuffer as Buffer

CAPACITY = 50_000
WARM_UP = 1_000  # transitions before the first update
FLUSH_EVERY = 1_000  # transitions between two flushes; weights are saved after each
BATCH_SIZE = 128
TRANSITIONS_PER_UPDATE = 2
TARGET_EVERY = 200  # updates
LEARNING_RATE = 3e-4
GAMMA = 0.99
EPSILON_FROM, EPSILON_TO, EPSILON_STEPS = 1.0, 0.05, 12_000

CURVE = """
    WITH finished AS (
        SELECT "return" AS total, ntile(12) OVER (ORDER BY end_time, episode_id) AS part
        FROM episodes WHERE status IN ('terminated', 'truncated')
    )
    SELECT count(*), avg(total) FROM finished GROUP BY part ORDER BY part
"""
LATEST = """
    SELECT count(*), avg("return") FILTER (newest <= 20), avg("return") FILTER (oldest <= 20) FROM (
        SELECT "return", row_number() OVER (ORDER BY end_time, episode_id) AS oldest,
               row_number() OVER (ORDER BY end_time DESC, episode_id DESC) AS newest
        FROM episodes WHERE status IN ('terminated', 'truncated')
    )
"""


def make_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


class Agent:
    """A DQN with a target network, which can be converted to plain arrays and back."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.online, self.target = make_network(), make_network()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=LEARNING_RATE, fused=True)
        self.updates = 0

    @torch.no_grad()
    def act(self, observation: NDArray[np.float32], epsilon: float, rng: np.random.Generator) -> Any:
        """Return the best action of each lane, or with probability `epsilon` a random one."""
        best = self.online(torch.from_numpy(observation)).argmax(dim=1).numpy()
        explore = rng.random(len(best)) < epsilon
        return np.where(explore, rng.integers(0, 2, len(best)), best)

    def learn(self, batch: TensorDictBase) -> None:
        """Take one step towards the reward plus the discounted value of the next state."""
        with torch.no_grad():
            future = self.target(batch["next", "observation"]).amax(dim=1, keepdim=True)
            goal = batch["next", "reward"] + GAMMA * future * ~batch["next", "terminated"]
        value = self.online(batch["observation"]).gather(1, batch["action"].unsqueeze(1))
        loss = nn.functional.smooth_l1_loss(value, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % TARGET_EVERY == 0:
            self.target.load_state_dict(self.online.state_dict())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return weights, optimizer and counter by name."""
        found: dict[str, NDArray[Any]] = {"updates": np.array(self.updates)}
        for name, network in (("online", self.online), ("target", self.target)):
            found |= {f"{name}/{key}": value.numpy() for key, value in network.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"adam/{number}/{key}": value.numpy() for key, value in state.items()}
        return found

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Load arrays that `arrays` returned."""
        parts: dict[str, dict[str, torch.Tensor]] = {"online": {}, "target": {}}
        adam: dict[int, dict[str, torch.Tensor]] = {}
        for name, array in arrays.items():
            kind, _, key = name.partition("/")
            if kind in parts:
                parts[kind][key] = torch.from_numpy(array)
            elif kind == "adam":
                number, _, key = key.partition("/")
                adam.setdefault(int(number), {})[key] = torch.from_numpy(array)
        self.online.load_state_dict(parts["online"])
        self.target.load_state_dict(parts["target"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": adam})
        self.updates = int(arrays["updates"])


def save_weights(path: Path, agent: Agent, steps: int) -> None:
    """Replace the weights at `path` atomically: after a crash the file holds the old or the new weights."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, steps=np.array(steps), **agent.arrays())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_weights(path: Path, agent: Agent, steps: int) -> int:
    """Load the weights if they belong to a store of `steps` transitions; return their step, or 0."""
    if not path.exists():
        return 0
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    saved = int(arrays.pop("steps"))
    # Weights are saved after a flush, so weights that are ahead of the store belong to another store.
    if saved > steps:
        return 0
    agent.load(arrays)
    return saved


def train(rb: Buffer, agent: Agent, args: argparse.Namespace, weights: Path, kept: int) -> None:
    """Act, record, and learn from the stored rows; the weights on disk are those of step `kept`."""
    # After a restart the seeds differ from those of the last run, so that no episode is repeated.
    rng = np.random.default_rng([args.seed, rb.write_count])
    envs = gym.make_vec("CartPole-v1", num_envs=args.envs, vectorization_mode="sync")
    observation, _ = envs.reset(seed=args.seed + rb.write_count)
    episodes = rb.record("cartpole", lanes=args.envs, autoreset_mode=envs.metadata["autoreset_mode"])
    columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    with episodes, Progress(TextColumn("steps"), *columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=args.steps, completed=rb.write_count, news=news(rb))
        while rb.write_count < args.steps:
            before = rb.write_count
            share = min(before / EPSILON_STEPS, 1.0)
            action = agent.act(observation, EPSILON_FROM + share * (EPSILON_TO - EPSILON_FROM), rng)
            following, reward, terminated, truncated, _ = envs.step(action)
            episodes.step(observation, action, reward, following, terminated, truncated)
            observation = following
            if rb.write_count >= WARM_UP:  # a lane that was only reset has added no transition
                for _ in range(rb.write_count // TRANSITIONS_PER_UPDATE - before // TRANSITIONS_PER_UPDATE):
                    agent.learn(rb.sample())
            progress.update(bar, completed=min(rb.write_count, args.steps))
            if rb.write_count >= min(kept + FLUSH_EVERY, args.steps):
                keep(rb, agent, weights)
                kept = rb.write_count
                progress.update(bar, news=news(rb))


def keep(rb: Buffer, agent: Agent, weights: Path) -> None:
    """Sync the experience, then the weights, to disk, so that they survive a power cut."""
    rb.flush()
    save_weights(weights, agent, rb.write_count)


def news(rb: Buffer) -> str:
    count, latest, _ = rb.sql(LATEST).fetchall()[0]
    return f"{count} episodes, mean return {latest:.0f}" if count else "no episode yet"


def print_curve(rb: Buffer, console: Console) -> None:
    """Print how the return grew, computed in SQL over all episodes."""
    parts = rb.sql(CURVE).fetchall()
    if not parts:
        return
    console.print("\nmean return per episode, from the first to the last:")
    top, before = max(mean for _, mean in parts), 0
    for count, mean in parts:
        console.print(f"  {before + 1:>5}-{before + count:<5} {'█' * round(40 * mean / top)} {mean:.0f}")
        before += count
    _, last, first = rb.sql(LATEST).fetchall()[0]
    console.print(f"first 20 episodes {first:.1f}, last 20 episodes {last:.1f}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DQN on CartPole from a persistent store.")
    add = parser.add_argument
    add("--path", type=Path, default=Path("runs/cartpole.exp"), help="the store (%(default)s)")
    add("--steps", type=int, default=40_000, help="transitions in total (%(default)s)")
    add("--seed", type=int, default=0, help="random seed of networks, environments and draws (%(default)s)")
    add("--envs", type=int, default=8, help="number of parallel environments (%(default)s)")
    add("--fresh", action="store_true", help="start again; the old store is renamed")
    args = parser.parse_args(arguments)
    for name in ("steps", "envs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    """Open the store, continue from its content, and print the results."""
    weights = args.path.with_suffix(".weights.npz")
    args.path.parent.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        weights.unlink(missing_ok=True)
    agent = Agent(args.seed)
    settings = {"capacity": CAPACITY, "batch_size": BATCH_SIZE, "seed": args.seed}
    with expstore.open(args.path, mode="w" if args.fresh else "a", **settings) as rb:
        if rb.recovered:
            console.print(rb.recovered, soft_wrap=True)
        kept = load_weights(weights, agent, rb.write_count)
        if rb.write_count:
            console.print(f"resuming {args.path} at step {rb.write_count:,}, weights as of step {kept:,}")
        if rb.write_count >= args.steps:
            console.print(f"all {args.steps:,} steps are done; pass --steps for more, --fresh to start again")
        else:
            try:
                train(rb, agent, args, weights, kept)
            except KeyboardInterrupt:
                keep(rb, agent, weights)
                raise
        print_curve(rb, console)
    query = 'SELECT status, count(*), max("return") FROM episodes GROUP BY status'
    further = f"\nlook further:\n  expstore info {args.path}\n  expstore sql {args.path} '{query}'"
    console.print(further, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    args, console = parse(arguments), Console(highlight=False, markup=False)
    torch.set_num_threads(1)  # more threads make so small a network slower
    try:
        run(args, console)
    except KeyboardInterrupt:
        console.print("\nstopped; run it again to continue from here")
        return 130
    except expstore.ExpStoreError as exc:
        console.print(str(exc))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
