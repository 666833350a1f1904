"""Train DDPG on Pendulum-v1: one file, one environment, and a replay buffer that survives the process.

Run `python examples/ddpg.py`; 20,000 steps take about two minutes. Needs gymnasium. Stop it with Ctrl-C or
`kill -9` at any time, and start it again with the same command to continue.

What survives:
- Transitions: every step that `episode.step` returned from is in the store (`--path`), also after `kill -9`.
  A power cut loses at most the last second.
- Networks, optimizers and step number: as of the last checkpoint, a file next to the store that is replaced
  atomically every `--checkpoint-every` steps and on Ctrl-C.

After `kill -9` training continues at the step of the checkpoint. Transitions recorded after the checkpoint
stay in the store and are sampled like all others, so the store can have more rows than `--steps`. The
environment starts a new episode; the interrupted one has the status `cut`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import expstore


def argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    path: str = argument("runs/ddpg.exp", "folder of the store; the checkpoint is next to it")
    steps: int = argument(20_000, "environment steps in total")
    seed: int = argument(0, "random seed; fixed when the store is created")
    buffer_size: int = argument(100_000, "transitions that the store keeps; fixed when it is created")
    batch_size: int = argument(128, "transitions in a batch")
    learning_rate: float = argument(1e-3, "learning rate of both optimizers")
    gamma: float = argument(0.99, "discount factor")
    tau: float = argument(0.005, "share of the networks in each update of the target networks")
    exploration_noise: float = argument(
        0.1, "standard deviation of the noise, as a share of the action range"
    )
    policy_frequency: int = argument(2, "gradient steps of the Q network for each one of the actor")
    learning_starts: int = argument(1_000, "transitions in the store before the first gradient step")
    checkpoint_every: int = argument(1_000, "steps between two checkpoints")
    log_every: int = argument(1_000, "steps between two lines of progress")


def parse_args(arguments: Sequence[str] | None) -> Args:
    """Make an option of every field of `Args`."""
    parser = argparse.ArgumentParser(
        description="Train DDPG on Pendulum-v1 from a persistent replay buffer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for entry in fields(Args):
        option, kind = "--" + entry.name.replace("_", "-"), type(entry.default)
        parser.add_argument(option, type=kind, default=entry.default, help=entry.metadata["help"])
    args = Args(**vars(parser.parse_args(arguments)))
    for name, value in vars(args).items():
        option, least = "--" + name.replace("_", "-"), 0 if name == "seed" else 1
        if isinstance(value, int) and value < least:
            parser.error(f"argument {option}: must be at least {least}, got {value}")
        if isinstance(value, float) and not 0 <= value <= 1:
            parser.error(f"argument {option}: must be between 0 and 1, got {value}")
    if args.learning_starts > args.buffer_size:
        parser.error("argument --learning-starts: must be at most --buffer-size, or no step would learn")
    return args


def make_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)
    )


class QNetwork(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.layers = make_layers(observations + actions, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([observation, action], dim=-1))


class Actor(nn.Module):
    """The action of each observation, squashed by tanh to the range of the actions."""

    def __init__(self, observations: int, space: gym.spaces.Box) -> None:
        super().__init__()
        self.layers = make_layers(observations, space.shape[0])
        self.register_buffer("scale", torch.from_numpy((space.high - space.low) / 2))
        self.register_buffer("center", torch.from_numpy((space.high + space.low) / 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(observation)) * self.scale + self.center


class Agent:
    """Actor, Q network, their slow copies and their optimizers."""

    def __init__(self, args: Args, observations: int, space: gym.spaces.Box) -> None:
        actions = space.shape[0]
        self.gamma, self.tau = args.gamma, args.tau
        self.actor, self.actor_target = Actor(observations, space), Actor(observations, space)
        self.q, self.q_target = QNetwork(observations, actions), QNetwork(observations, actions)
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.q_target.load_state_dict(self.q.state_dict())
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.learning_rate)
        self.q_optimizer = torch.optim.Adam(self.q.parameters(), lr=args.learning_rate)
        self.parts = {
            "actor": self.actor,
            "actor_target": self.actor_target,
            "q": self.q,
            "q_target": self.q_target,
            "actor_optimizer": self.actor_optimizer,
            "q_optimizer": self.q_optimizer,
        }

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        return self.actor(torch.from_numpy(observation)).numpy()

    def learn_values(self, batch: dict[str, Any]) -> float:
        """Make one gradient step of the Q network; return its loss."""
        after = {name: torch.from_numpy(value) for name, value in batch["next"].items()}
        with torch.no_grad():
            best = self.q_target(after["observation"], self.actor_target(after["observation"]))
            # Only `terminated` ends the return: a truncated episode, as all of Pendulum are, would have
            # continued.
            target = after["reward"] + self.gamma * best * ~after["terminated"]
        value = self.q(torch.from_numpy(batch["observation"]), torch.from_numpy(batch["action"]))
        loss = nn.functional.mse_loss(value, target)
        self.q_optimizer.zero_grad()
        loss.backward()
        self.q_optimizer.step()
        return loss.item()

    def learn_actions(self, batch: dict[str, Any]) -> None:
        """Make one gradient step of the actor, and move the slow copies."""
        observation = torch.from_numpy(batch["observation"])
        loss = -self.q(observation, self.actor(observation)).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            for slow_part, fast_part in ((self.actor_target, self.actor), (self.q_target, self.q)):
                for slow, fast in zip(slow_part.parameters(), fast_part.parameters(), strict=True):
                    slow.lerp_(fast, self.tau)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint: after a crash the file is either the old one or the new one, complete."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # without it a power cut could leave an empty file under the final name
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def load_checkpoint(path: Path, rows: int) -> dict[str, Any] | None:
    """Return the checkpoint of a store that has had `rows` rows; None if there is no checkpoint yet."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    # The rows of a step are written before its checkpoint, so a store is never behind its own checkpoint.
    if state["step"] > rows:
        raise SystemExit(
            f"error: {path} is of step {state['step']:,}, but the store has had only {rows:,} rows: the file "
            "belongs to another store. Delete it to start with new networks."
        )
    return state


class StopRequest:
    """Remember a Ctrl-C, so that the loop can end after a complete step. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.is_set = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_: object) -> None:
        self.is_set = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def mean_return(rb: expstore.TensorDictReplayBuffer) -> str:
    """Return the mean return of the last 20 episodes in the store, which include those of earlier runs."""
    finished = rb.episodes(
        "status IN ('terminated', 'truncated')", order_by="end_time DESC, episode_id DESC", limit=20
    )
    returns = finished.arrow()["return"].to_pylist()
    return f"{np.mean(returns):.1f}" if returns else "-"


def train(args: Args, rb: expstore.TensorDictReplayBuffer) -> int:
    """Run the loop; return the exit code."""
    stop = StopRequest()
    env = gym.make("Pendulum-v1")
    space = env.action_space
    torch.manual_seed(args.seed)
    agent = Agent(args, env.observation_space.shape[0], space)

    checkpoint_path = Path(args.path).with_suffix(".checkpoint.pt")
    state = load_checkpoint(checkpoint_path, rb.write_count)
    start = 0
    if state is not None:
        start = state["step"]
        agent.load(state)
    if rb.write_count:
        print(f"continuing at step {start:,}; the store has {len(rb):,} rows", flush=True)
    if start >= args.steps:
        print(f"all {args.steps:,} steps are done; pass a larger --steps to continue", flush=True)
        return 0

    # The seed depends on the number of stored rows: a continued run must not repeat stored episodes.
    rng = np.random.default_rng([args.seed, rb.write_count])
    run_seed = int(rng.integers(2**31))
    space.seed(run_seed)
    observation, _ = env.reset(seed=run_seed)
    deviation = args.exploration_noise * (space.high - space.low) / 2
    loss = float("nan")
    with rb.record("env-0") as episode:
        for step in range(start + 1, args.steps + 1):
            is_learning = len(rb) >= args.learning_starts
            if is_learning:
                noisy = agent.act(observation) + rng.normal(0, deviation)
                action = np.clip(noisy, space.low, space.high).astype(np.float32)
            else:
                action = space.sample()

            next_observation, reward, terminated, truncated, _ = env.step(action)
            episode.step(observation, action, reward, next_observation, terminated, truncated)
            observation = next_observation
            if terminated or truncated:
                observation, _ = env.reset()  # the recorder starts a new episode by itself

            if is_learning:
                batch = rb.sample(as_numpy=True)
                loss = agent.learn_values(batch)
                if step % args.policy_frequency == 0:
                    agent.learn_actions(batch)

            if step % args.log_every == 0:
                print(f"step {step:,}  mean return {mean_return(rb)}  q loss {loss:.3f}", flush=True)
            if step % args.checkpoint_every == 0 or step == args.steps or stop.is_set:
                rb.flush()  # rows first: after a power cut the store must not be behind the checkpoint
                save_checkpoint(checkpoint_path, {"step": step} | agent.state())
            if stop.is_set:
                print(f"stopped at step {step:,}; run the same command to continue", flush=True)
                return 130
    print(f"done: {args.steps:,} steps, mean return of the last 20 episodes {mean_return(rb)}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    torch.set_num_threads(1)  # more threads make networks of this size slower
    Path(args.path).parent.mkdir(parents=True, exist_ok=True)
    try:
        with expstore.open(
            args.path, capacity=args.buffer_size, batch_size=args.batch_size, seed=args.seed
        ) as rb:
            if rb.recovered:
                print(rb.recovered, flush=True)
            return train(args, rb)
    except KeyboardInterrupt:
        print("stopped; run the same command to continue from the last checkpoint", flush=True)
        return 130
    except expstore.ExpStoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
