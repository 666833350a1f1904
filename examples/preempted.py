"""Train through preemptions: kill -9 at any moment, run again, and the loss curve is the one without kills.

Run it with `python examples/preempted.py`, stop it by kill -9, and run it again. The learner saves weights,
optimizer and the position of its consumer every 50 steps. After a kill it goes back to its checkpoint, and
the batches since then come again, although more rows were collected meanwhile.

With `--ship s3://bucket/run --checkpoint /shared/learner.pt` it also survives the loss of the machine: the
same command continues on another one. The store is shipped before each checkpoint, so that it has all that
the checkpoint has seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import expstore

BATCH_SIZE = 64
ROWS_AT_FIRST, ROWS_PER_STEP = 500, 4
CHECKPOINT_EVERY = 50  # steps
GAMMA = 0.95


def collect(rb: Any, count: int) -> None:
    """Append transitions of CartPole under random actions, all or none, until the store has had `count`."""
    first, steps = rb.write_count, []
    if first >= count:
        return  # collected before a kill
    environment, rng = gym.make("CartPole-v1"), np.random.default_rng(first)
    observation, _ = environment.reset(seed=first)
    for _ in range(first, count):
        after, reward, terminated, truncated, _ = environment.step(int(rng.integers(2)))
        done = terminated or truncated
        following = {"observation": after, "reward": float(reward), "terminated": terminated, "done": done}
        steps.append({"observation": observation, "next": following})
        observation = environment.reset()[0] if done else after
    environment.close()
    rb.episodes.end("random")
    rb.extend(steps, source="random")  # at once: a kill in the middle would change what follows


class Learner:
    """Learns the value of CartPole's states under random actions, by TD(0).

    Args:
        path: File of its checkpoints.
        rb: Has the rows.
        ships: Whether the store is shipped.
    """

    def __init__(self, path: Path, rb: expstore.ReplayBuffer, *, ships: bool) -> None:
        torch.manual_seed(0)
        self.rb, self.ships, consumer = rb, ships, rb.consumer("learner")
        self.path, self.consumer, self.step = path, consumer, 0
        self.network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        if path.exists():
            state = torch.load(path)
            self.step = state["step"]
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            consumer.seek(state["position"])

    def learn(self) -> float:
        """Take one step; return the loss."""
        batch = self.consumer.sample()
        with torch.no_grad():
            future = self.network(batch["next", "observation"])[:, 0] * ~batch["next", "terminated"].reshape(
                -1
            )
            goal = batch["next", "reward"].reshape(-1).float() + GAMMA * future
        loss = nn.functional.mse_loss(self.network(batch["observation"])[:, 0], goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Replace the checkpoint, then let the consumer forget the draws before it."""
        if self.ships:
            self.rb.flush(shipped=True)
        state = {
            "step": self.step,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": self.consumer.position,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)
        self.consumer.commit()


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/preempted"), help="store and checkpoint")
    parser.add_argument("--ship", metavar="URL", help="object storage to ship the store to")
    parser.add_argument("--checkpoint", type=Path, help="file of the checkpoints, in the folder by default")
    parser.add_argument("--steps", type=int, default=1000, help="number of steps")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = given.checkpoint or given.folder / "learner.pt"
    with expstore.open(given.folder / "run.exp", batch_size=BATCH_SIZE, seed=1, ship=given.ship) as rb:
        learner = Learner(checkpoint, rb, ships=given.ship is not None)
        if learner.step:
            print(f"continues from step {learner.step}", flush=True)
        while learner.step < given.steps:
            if not learner.consumer.replaying:
                collect(rb, ROWS_AT_FIRST + ROWS_PER_STEP * learner.step)
            print(f"{learner.step} {learner.learn():.9f}", flush=True)
            if learner.step % CHECKPOINT_EVERY == 0:
                learner.save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
