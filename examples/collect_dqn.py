"""Train DQN on CartPole-v1 while other processes collect: `expstore.Collector`, and a rate limiter.

Run `python examples/collect_dqn.py`. Needs gymnasium. Stop it with Ctrl-C or `kill -9` at any time, and start
it again with the same command to continue. `dqn.py` is the same agent in one process; the table in
docs/collecting.md compares the two.

- Each of `--workers` processes steps `--lanes` environments, with one call of the network for all of them.
- This process only trains. `rb.sample` waits for the workers, and the workers wait for it, so that there is
  one gradient step for `--train-every` environment steps, whoever is slower.
- The network and epsilon are one module. `update_policy` passes its weights to the workers every
  `--push-every` steps; each row has the `policy_version` that chose its action.

What survives:
- Transitions: every block of `--block` steps of each environment that a worker has stored, also after
  `kill -9`. A power cut loses at most the last second.
- Networks, optimizer and step number: as of the last checkpoint, a file next to the store that is replaced
  atomically every `--checkpoint-every` steps and on Ctrl-C.

After `kill -9` training continues at the step of the checkpoint. The limiter still counts the batches that
were drawn after the checkpoint, so new transitions are collected for the steps that are repeated, and the
store can have more rows than `--steps`. The environments start new episodes; interrupted ones have the status
`cut`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import expstore


def argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    path: str = argument("runs/collect_dqn.exp", "folder of the store; the checkpoint is next to it")
    workers: int = argument(4, "processes that collect")
    lanes: int = argument(4, "environments of each process")
    block: int = argument(4, "steps of each environment that a worker stores at once")
    steps: int = argument(20_000, "environment steps in total")
    seed: int = argument(0, "random seed; fixed when the store is created")
    buffer_size: int = argument(50_000, "transitions that the store keeps; fixed when it is created")
    batch_size: int = argument(128, "transitions in a batch")
    learning_rate: float = argument(5e-4, "learning rate of Adam")
    gamma: float = argument(0.99, "discount factor")
    tau: float = argument(0.01, "share of the Q network in each update of the target network")
    train_every: int = argument(1, "environment steps for each gradient step")
    learning_starts: int = argument(1_000, "transitions in the store before the first gradient step")
    # An absolute number, not a fraction of --steps: a run that is extended keeps its schedule.
    exploration_steps: int = argument(5_000, "steps in which epsilon falls from 1 to --end-epsilon")
    end_epsilon: float = argument(0.02, "probability of a random action after --exploration-steps")
    push_every: int = argument(100, "steps between two updates of the workers' policy")
    checkpoint_every: int = argument(1_000, "steps between two checkpoints")
    log_every: int = argument(1_000, "steps between two lines of progress")


def parse_args(arguments: Sequence[str] | None) -> Args:
    """Make an option of every field of `Args`."""
    parser = argparse.ArgumentParser(
        description="Train DQN from a persistent replay buffer that several processes fill.",
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


class QNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation)


class EpsilonGreedy(nn.Module):
    """The policy of the workers: epsilon is a buffer, so it is passed on with the weights."""

    def __init__(self, q_network: QNetwork) -> None:
        super().__init__()
        self.q_network = q_network
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        best = self.q_network(observation).argmax(dim=1)
        # The collector seeds torch differently in each worker.
        explores = torch.rand(best.shape) < self.epsilon
        return torch.where(explores, torch.randint(2, best.shape), best)


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
    # Rows are written before the checkpoint that counts them, so a store is never behind its own checkpoint.
    if state["rows"] > rows:
        raise SystemExit(
            f"error: {path} is of row {state['rows']:,}, but the store has had only {rows:,} rows: the file "
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


def make_limiter(args: Args) -> expstore.SampleToInsertRatio:
    """Return what makes the workers and the training wait for one another.

    Either side may be ahead by one block of each worker.
    """
    samples_per_row = args.batch_size / args.train_every
    rows_ahead = args.workers * args.lanes * args.block
    return expstore.SampleToInsertRatio(
        samples_per_row,
        args.learning_starts,
        error_buffer=samples_per_row * rows_ahead + args.batch_size,
        timeout=60,  # seconds: then a worker has failed, or an environment is stuck
    )


def train(args: Args, rb: expstore.TensorDictReplayBuffer) -> int:
    """Run the workers and train; return the exit code."""
    stop = StopRequest()
    torch.manual_seed(args.seed)
    q_network, target_network = QNetwork(), QNetwork()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    policy = EpsilonGreedy(q_network)

    checkpoint_path = Path(args.path).with_suffix(".checkpoint.pt")
    state = load_checkpoint(checkpoint_path, rb.write_count)
    step = args.learning_starts
    if state is not None:
        step = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if rb.write_count:
        print(f"continuing at step {step:,}; the store has {len(rb):,} rows", flush=True)
    if step >= args.steps:
        print(f"all {args.steps:,} steps are done; pass a larger --steps to continue", flush=True)
        return 0

    def save(step: int) -> None:
        rows = rb.write_count
        rb.flush()  # rows first: after a power cut the store must not be behind the checkpoint
        states = {name: part.state_dict() for name, part in parts.items()}
        save_checkpoint(checkpoint_path, {"step": step, "rows": rows} | states)

    # The seed depends on the number of stored rows: a continued run must not repeat stored episodes.
    run_seed = int(np.random.default_rng([args.seed, rb.write_count]).integers(2**31))
    with expstore.Collector(
        "CartPole-v1", policy, rb, workers=args.workers, lanes=args.lanes, steps_per_lane=args.block,
        seed=run_seed, hyperparameters=asdict(args),
    ) as collector:  # fmt: skip
        pushed = -args.push_every
        while step < args.steps:
            if step - pushed >= args.push_every:
                epsilon = max(args.end_epsilon, 1 - (1 - args.end_epsilon) * step / args.exploration_steps)
                policy.epsilon.fill_(epsilon)
                collector.update_policy()
                if pushed < 0:
                    collector.start()  # with the weights and the epsilon of the checkpoint
                pushed = step

            before, step = step, step + args.train_every
            batch = rb.sample(as_numpy=True)
            after = {name: torch.from_numpy(value) for name, value in batch["next"].items()}
            with torch.no_grad():
                best = target_network(after["observation"]).amax(dim=1, keepdim=True)
                # Only `terminated` ends the return: a truncated episode would have continued.
                target = after["reward"] + args.gamma * best * ~after["terminated"]
            chosen = torch.from_numpy(batch["action"])[:, None]
            value = q_network(torch.from_numpy(batch["observation"])).gather(1, chosen)
            loss = nn.functional.smooth_l1_loss(value, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():  # a slow copy of the Q network keeps the targets steady
                for slow, fast in zip(target_network.parameters(), q_network.parameters(), strict=True):
                    slow.lerp_(fast, args.tau)

            if step // args.log_every > before // args.log_every:
                print(
                    f"step {step:,}  mean return {mean_return(rb)}  loss {loss.item():.4f}  "
                    f"epsilon {epsilon:.2f}",
                    flush=True,
                )
            is_due = step // args.checkpoint_every > before // args.checkpoint_every
            if is_due or step >= args.steps or stop.is_set:
                save(step)
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
            args.path, capacity=args.buffer_size, batch_size=args.batch_size, seed=args.seed,
            batches={"rate_limiter": make_limiter(args)},
        ) as rb:  # fmt: skip
            if rb.recovered:
                print(rb.recovered, flush=True)
            return train(args, rb)
    except KeyboardInterrupt:
        print("stopped; run the same command to continue from the last checkpoint", flush=True)
        return 130
    except expstore.ExpStoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":  # workers import this file
    sys.exit(main())
