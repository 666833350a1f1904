"""Train SAC on Pendulum-v1: one file, several environments, and a replay buffer that survives the process.

Run `python examples/sac.py`; 20,000 steps take about two minutes. Needs gymnasium. Stop it with Ctrl-C or
`kill -9` at any time, and start it again with the same command to continue.

What survives:
- Transitions: every step that `episodes.step` returned from is in the store (`--path`), also after `kill -9`.
  A power cut loses at most the last second.
- Networks, optimizers and step number: as of the last checkpoint, a file next to the store that is replaced
  atomically every `--checkpoint-every` steps and on Ctrl-C.

After `kill -9` training continues at the step of the checkpoint. Transitions recorded after the checkpoint
stay in the store and are sampled like all others, so the store can have more rows than `--steps`. The
environments start new episodes; the interrupted ones have the status `cut`.
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
from gymnasium.vector import AutoresetMode
from torch import nn

import expstore


def argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    path: str = argument("runs/sac.exp", "folder of the store; the checkpoint is next to it")
    steps: int = argument(20_000, "transitions in total, of all environments")
    num_envs: int = argument(4, "environments that step together")
    seed: int = argument(0, "random seed; fixed when the store is created")
    buffer_size: int = argument(100_000, "transitions that the store keeps; fixed when it is created")
    batch_size: int = argument(128, "transitions in a batch")
    policy_learning_rate: float = argument(1e-3, "learning rate of the policy and of the temperature")
    q_learning_rate: float = argument(1e-3, "learning rate of the Q networks")
    gamma: float = argument(0.99, "discount factor")
    tau: float = argument(0.005, "share of the Q networks in each update of the target networks")
    train_every: int = argument(2, "transitions between two gradient steps")
    learning_starts: int = argument(1_000, "transitions in the store before the first gradient step")
    checkpoint_every: int = argument(1_000, "transitions between two checkpoints")
    log_every: int = argument(1_000, "transitions between two lines of progress")


def parse_args(arguments: Sequence[str] | None) -> Args:
    """Make an option of every field of `Args`."""
    parser = argparse.ArgumentParser(
        description="Train SAC on Pendulum-v1 from a persistent replay buffer.",
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


LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


def make_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


class QNetworks(nn.Module):
    """Two Q networks; training uses the smaller estimate of both, which reduces overestimation."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.first = make_layers(observations + actions, 1)
        self.second = make_layers(observations + actions, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([observation, action], dim=1)
        return self.first(both), self.second(both)


class Policy(nn.Module):
    """A normal distribution, squashed by tanh to the range of the actions."""

    def __init__(self, observations: int, space: gym.spaces.Box) -> None:
        super().__init__()
        self.layers = make_layers(observations, 2 * space.shape[0])
        self.register_buffer("scale", torch.from_numpy((space.high - space.low) / 2))
        self.register_buffer("center", torch.from_numpy((space.high + space.low) / 2))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random actions, shape `(n, actions)`, and their log probabilities, shape `(n, 1)`."""
        mean, log_std = self.layers(observation).chunk(2, dim=1)
        # Without limits a standard deviation near zero makes the log probabilities explode.
        log_std = LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1) / 2
        normal = torch.distributions.Normal(mean, log_std.exp())
        raw = normal.rsample()
        squashed = torch.tanh(raw)
        # The density of a squashed value: divide by the derivative of the squashing.
        log_prob = normal.log_prob(raw) - torch.log(self.scale * (1 - squashed**2) + 1e-6)
        return squashed * self.scale + self.center, log_prob.sum(dim=1, keepdim=True)


class Agent:
    """Policy, Q networks, temperature and their optimizers."""

    def __init__(self, args: Args, observations: int, space: gym.spaces.Box) -> None:
        actions = space.shape[0]
        self.gamma, self.tau = args.gamma, args.tau
        self.policy = Policy(observations, space)
        self.q, self.q_target = QNetworks(observations, actions), QNetworks(observations, actions)
        self.q_target.load_state_dict(self.q.state_dict())
        # The temperature weighs entropy against reward. It is learned: the entropy is kept near a target.
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.target_entropy = -float(actions)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.policy_learning_rate)
        self.q_optimizer = torch.optim.Adam(self.q.parameters(), lr=args.q_learning_rate)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=args.policy_learning_rate)
        self.parts = {
            "policy": self.policy,
            "q": self.q,
            "q_target": self.q_target,
            "policy_optimizer": self.policy_optimizer,
            "q_optimizer": self.q_optimizer,
            "alpha_optimizer": self.alpha_optimizer,
        }

    def state(self) -> dict[str, Any]:
        return {"log_alpha": self.log_alpha.detach()} | {k: v.state_dict() for k, v in self.parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.log_alpha.data.copy_(state["log_alpha"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> np.ndarray:
        return self.policy(torch.from_numpy(observation))[0].numpy()

    def learn(self, batch: dict[str, Any]) -> tuple[float, float]:
        """Make one gradient step of every part; return the losses of the Q networks and of the policy."""
        observation, action = torch.from_numpy(batch["observation"]), torch.from_numpy(batch["action"])
        after = {name: torch.from_numpy(value) for name, value in batch["next"].items()}
        alpha = self.log_alpha.exp().detach()

        with torch.no_grad():
            next_action, log_prob = self.policy(after["observation"])
            best = torch.minimum(*self.q_target(after["observation"], next_action)) - alpha * log_prob
            # Only `terminated` ends the return: a truncated episode, as all of Pendulum are, would have
            # continued.
            target = after["reward"] + self.gamma * best * ~after["terminated"]
        q_loss = sum(nn.functional.mse_loss(value, target) for value in self.q(observation, action))
        self.q_optimizer.zero_grad()
        q_loss.backward()
        self.q_optimizer.step()

        new_action, log_prob = self.policy(observation)
        policy_loss = (alpha * log_prob - torch.minimum(*self.q(observation, new_action))).mean()
        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()

        alpha_loss = -(self.log_alpha.exp() * (log_prob.detach() + self.target_entropy)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        with torch.no_grad():
            for slow, fast in zip(self.q_target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, self.tau)
        return q_loss.item(), policy_loss.item()


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


def multiples(before: int, now: int, every: int) -> int:
    """Return how many multiples of `every` are in the steps after `before` up to `now`.

    With several environments the step number grows by more than one and can skip a multiple.
    """
    return now // every - before // every


def train(args: Args, rb: expstore.TensorDictReplayBuffer) -> int:
    """Run the loop; return the exit code."""
    stop = StopRequest()
    envs = gym.make_vec(
        "Pendulum-v1",
        num_envs=args.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
    )
    torch.manual_seed(args.seed)
    agent = Agent(args, envs.single_observation_space.shape[0], envs.single_action_space)

    checkpoint_path = Path(args.path).with_suffix(".checkpoint.pt")
    state = load_checkpoint(checkpoint_path, rb.write_count)
    step = 0
    if state is not None:
        step = state["step"]
        agent.load(state)
    if rb.write_count:
        print(f"continuing at step {step:,}; the store has {len(rb):,} rows", flush=True)
    if step >= args.steps:
        print(f"all {args.steps:,} steps are done; pass a larger --steps to continue", flush=True)
        return 0

    # The seed depends on the number of stored rows: a continued run must not repeat stored episodes.
    run_seed = int(np.random.default_rng([args.seed, rb.write_count]).integers(2**31))
    torch.manual_seed(run_seed)
    envs.action_space.seed(run_seed)
    observation, _ = envs.reset(seed=run_seed)
    ended = np.zeros(args.num_envs, bool)
    q_loss = policy_loss = float("nan")
    # Each lane is a stream of its own: its episodes do not mix with those of the other environments.
    with rb.record("pendulum", lanes=args.num_envs) as episodes:
        while step < args.steps:
            is_learning = len(rb) >= args.learning_starts
            action = agent.act(observation) if is_learning else envs.action_space.sample()
            next_observation, reward, terminated, truncated, _ = envs.step(action)
            # In NEXT_STEP mode the call after the end of an episode ignores the action and resets that
            # environment. It is not a transition, and `valid` keeps it out of the store.
            valid = ~ended
            episodes.step(observation, action, reward, next_observation, terminated, truncated, valid=valid)
            observation, ended = next_observation, terminated | truncated
            before, step = step, step + int(valid.sum())

            if is_learning:
                for _ in range(multiples(before, step, args.train_every)):
                    q_loss, policy_loss = agent.learn(rb.sample(as_numpy=True))

            if multiples(before, step, args.log_every):
                print(
                    f"step {step:,}  mean return {mean_return(rb)}  q loss {q_loss:.3f}  "
                    f"policy loss {policy_loss:.3f}  alpha {agent.log_alpha.exp().item():.3f}",
                    flush=True,
                )
            if multiples(before, step, args.checkpoint_every) or step >= args.steps or stop.is_set:
                rb.flush()  # rows first: after a power cut the store must not be behind the checkpoint
                save_checkpoint(checkpoint_path, {"step": step} | agent.state())
            if stop.is_set:
                print(f"stopped at step {step:,}; run the same command to continue", flush=True)
                return 130
    print(f"done: {step:,} steps, mean return of the last 20 episodes {mean_return(rb)}", flush=True)
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
