"""Train C51 on CartPole-v1 with prioritized replay: one file, and a replay buffer that survives the process.

Run `python examples/c51.py`; 20,000 steps take about two minutes. Needs gymnasium. Stop it with Ctrl-C or
`kill -9` at any time, and start it again with the same command to continue.

C51 learns the distribution of returns (Bellemare et al. 2017). The priority of a row is its loss, the cross
entropy of the distributions, as in Rainbow (Hessel et al. 2018).

What survives:
- Transitions: every step that `episode.step` returned from is in the store (`--path`), also after `kill -9`.
  A power cut loses at most the last second.
- Priorities: they are in the store, too. `kill -9` loses at most those of the last 0.1 seconds.
- Networks, optimizer and step number: as of the last checkpoint, a file next to the store that is replaced
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
    path: str = argument("runs/c51.exp", "folder of the store; the checkpoint is next to it")
    steps: int = argument(20_000, "environment steps in total")
    seed: int = argument(0, "random seed; fixed when the store is created")
    buffer_size: int = argument(50_000, "transitions that the store keeps; fixed when it is created")
    batch_size: int = argument(128, "transitions in a batch")
    learning_rate: float = argument(5e-4, "learning rate of Adam")
    gamma: float = argument(0.99, "discount factor")
    alpha: float = argument(0.5, "exponent of the priorities; 0 samples uniformly")
    beta: float = argument(0.4, "exponent of the weights that correct the bias of the priorities")
    atoms: int = argument(51, "values that a return can have")
    largest_return: int = argument(100, "returns are from its negative to this value")
    tau: float = argument(0.01, "share of the Q network in each update of the target network")
    train_every: int = argument(1, "steps between two gradient steps")
    learning_starts: int = argument(1_000, "transitions in the store before the first gradient step")
    # An absolute number, not a fraction of --steps: a run that is extended keeps its schedule.
    exploration_steps: int = argument(5_000, "steps in which epsilon falls from 1 to --end-epsilon")
    end_epsilon: float = argument(0.02, "probability of a random action after --exploration-steps")
    checkpoint_every: int = argument(1_000, "steps between two checkpoints")
    log_every: int = argument(1_000, "steps between two lines of progress")


def parse_args(arguments: Sequence[str] | None) -> Args:
    """Make an option of every field of `Args`."""
    parser = argparse.ArgumentParser(
        description="Train C51 on CartPole-v1 from a persistent, prioritized replay buffer.",
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
    if args.atoms < 2:
        parser.error(f"argument --atoms: must be at least 2, got {args.atoms}")
    return args


class QNetwork(nn.Module):
    """For each action a distribution over returns: probabilities of `atoms` values."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.atoms = args.atoms
        largest = float(args.largest_return)
        self.register_buffer("support", torch.linspace(-largest, largest, args.atoms))
        self.layers = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2 * args.atoms)
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, shape `(n, actions, atoms)`."""
        return self.layers(observation).reshape(len(observation), 2, self.atoms).log_softmax(dim=2)

    def best_actions(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Return the actions with the largest mean return, shape `(n,)`."""
        return (log_probs.exp() * self.support).sum(dim=2).argmax(dim=1)


@torch.no_grad()
def project_returns(network: QNetwork, after: dict[str, torch.Tensor], gamma: float) -> torch.Tensor:
    """Return the distributions of reward + gamma * return, on the network's values. Shape `(n, atoms)`."""
    log_probs = network(after["observation"])
    probs = log_probs[torch.arange(len(log_probs)), network.best_actions(log_probs)].exp()
    support, last = network.support, network.atoms - 1
    # Only `terminated` ends the return: a truncated episode would have continued.
    returns = after["reward"] + gamma * support * ~after["terminated"]
    place = (returns.clamp(support[0], support[-1]) - support[0]) / (support[1] - support[0])
    # The probability of a return between two values is split between both.
    lower = place.floor().long().clamp(max=last - 1)
    share = place - lower
    target = torch.zeros_like(probs)
    target.scatter_add_(1, lower, probs * (1 - share))
    return target.scatter_add_(1, lower + 1, probs * share)


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
    torch.manual_seed(args.seed)
    q_network, target_network = QNetwork(args), QNetwork(args)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}

    checkpoint_path = Path(args.path).with_suffix(".checkpoint.pt")
    state = load_checkpoint(checkpoint_path, rb.write_count)
    start = 0
    if state is not None:
        start = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if rb.write_count:
        print(f"continuing at step {start:,}; the store has {len(rb):,} rows", flush=True)
    if start >= args.steps:
        print(f"all {args.steps:,} steps are done; pass a larger --steps to continue", flush=True)
        return 0

    def save(step: int) -> None:
        rb.flush()  # rows first: after a power cut the store must not be behind the checkpoint
        save_checkpoint(
            checkpoint_path, {"step": step} | {name: part.state_dict() for name, part in parts.items()}
        )

    # The seed depends on the number of stored rows: a continued run must not repeat stored episodes.
    rng = np.random.default_rng([args.seed, rb.write_count])
    run_seed = int(rng.integers(2**31))
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=run_seed)
    loss = torch.tensor(float("nan"))
    with rb.record("env-0") as episode:
        for step in range(start + 1, args.steps + 1):
            epsilon = max(args.end_epsilon, 1 - (1 - args.end_epsilon) * step / args.exploration_steps)
            if rng.random() < epsilon:
                action = int(rng.integers(2))
            else:
                with torch.no_grad():
                    log_probs = q_network(torch.from_numpy(observation)[None])
                    action = int(q_network.best_actions(log_probs))

            next_observation, reward, terminated, truncated, _ = env.step(action)
            episode.step(observation, action, reward, next_observation, terminated, truncated)
            observation = next_observation
            if terminated or truncated:
                observation, _ = env.reset()  # the recorder starts a new episode by itself

            if len(rb) >= args.learning_starts and step % args.train_every == 0:
                batch = rb.sample(as_numpy=True)
                after = {name: torch.from_numpy(value) for name, value in batch["next"].items()}
                target = project_returns(target_network, after, args.gamma)
                log_probs = q_network(torch.from_numpy(batch["observation"]))
                chosen = log_probs[torch.arange(len(log_probs)), torch.from_numpy(batch["action"])]
                losses = -(target * chosen).sum(dim=1)
                loss = (torch.from_numpy(batch["priority_weight"]) * losses).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rb.update_priority(id=batch["id"], priority=losses.detach())
                with torch.no_grad():  # a slow copy of the Q network keeps the targets steady
                    for slow, fast in zip(target_network.parameters(), q_network.parameters(), strict=True):
                        slow.lerp_(fast, args.tau)

            if step % args.log_every == 0:
                print(
                    f"step {step:,}  mean return {mean_return(rb)}  loss {loss.item():.4f}  "
                    f"epsilon {epsilon:.2f}",
                    flush=True,
                )
            if step % args.checkpoint_every == 0 or step == args.steps or stop.is_set:
                save(step)
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
            args.path,
            capacity=args.buffer_size,
            batch_size=args.batch_size,
            seed=args.seed,
            sampler=expstore.PrioritizedSampler(alpha=args.alpha, beta=args.beta),
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
