"""Train TorchRL's DQN on CartPole with TorchRL's Trainer, from a store that survives the process.

Needs torchrl and gymnasium; `python examples/torchrl_dqn.py` takes half a minute on two cores. Loss, target
network, exploration, collector and Trainer are TorchRL's; the replay buffer and its hook are expstore's. Stop
it at any moment, with Ctrl-C or kill -9, and run it again: it continues from the stored transitions.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import expstore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some modules of torchrl use deprecated names of others
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import EGreedyModule, QValueModule
    from torchrl.objectives import DQNLoss, SoftUpdate
    from torchrl.trainers import Trainer

CAPACITY = 50_000
STEPS_PER_BATCH = 50  # transitions between two rounds of updates
UPDATES_PER_BATCH = 16
WARM_UP = 500  # transitions before the first update
SAVE_EVERY = 1_000  # transitions between two flushes; weights are saved after each
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
GAMMA = 0.99
TARGET_EPS = 0.99
EPSILON_FROM, EPSILON_TO, EPSILON_STEPS = 1.0, 0.05, 3_000

LATEST = """
    SELECT count(*), avg("return") FILTER (newest <= 10) FROM (
        SELECT "return", row_number() OVER (ORDER BY end_time DESC, episode_id DESC) AS newest
        FROM episodes WHERE status IN ('terminated', 'truncated')
    )
"""


def make_trainer(rb: expstore.TensorDictReplayBuffer, args: argparse.Namespace) -> Trainer:
    """Build TorchRL's Trainer, with the buffer as its replay buffer."""
    # After a restart the seeds differ from those of the last run, so that no episode is repeated.
    seed = args.seed + rb.write_count
    torch.manual_seed(args.seed)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(seed)  # the collector starts before the trainer seeds it
    hidden = [nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
    network = TensorDictModule(nn.Sequential(*hidden), ["observation"], ["action_value"])
    policy = TensorDictSequential(network, QValueModule(spec=env.action_spec))
    explore = EGreedyModule(env.action_spec)
    collector = Collector(
        env,
        TensorDictSequential(policy, explore),
        frames_per_batch=STEPS_PER_BATCH,
        total_frames=-1,  # the trainer counts
        init_random_frames=max(WARM_UP - rb.write_count, 0),
        auto_register_policy_transforms=False,
    )
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    loss.make_value_estimator(gamma=GAMMA)
    target = SoftUpdate(loss, eps=TARGET_EPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # hooks that torchrl is going to rename
        trainer = Trainer(
            collector=collector,
            total_frames=args.steps,
            frame_skip=1,
            optim_steps_per_batch=UPDATES_PER_BATCH,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE),
            progress_bar=False,
            seed=seed,
        )
        expstore.ReplayBufferTrainer(rb, flatten_tensordicts=True).register(trainer)
    trainer.register_op("post_optim", target.step)

    def anneal() -> None:
        share = min(rb.write_count / EPSILON_STEPS, 1.0)
        explore.eps.fill_(EPSILON_FROM + share * (EPSILON_TO - EPSILON_FROM))

    trainer.register_op("setup", anneal)
    trainer.register_op("post_steps", anneal)
    return trainer


def save(path: Path, trainer: Trainer, rb: expstore.TensorDictReplayBuffer) -> None:
    """Sync the experience, then the weights, to disk; the weights record the number of the next batch."""
    rb.flush()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(trainer.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)  # after a crash the file holds the old or the new weights


def load(path: Path, trainer: Trainer, rb: expstore.TensorDictReplayBuffer) -> int:
    """Load the weights if they belong to the store; return their step, or 0."""
    saved = 0
    if path.exists():
        trainer.load_state_dict(torch.load(path, weights_only=True))
        saved = trainer.collected_frames
    trainer.collected_frames = rb.write_count  # the store may be ahead of the weights
    return saved


def run(args: argparse.Namespace) -> None:
    """Open the store, continue from its content, and train."""
    weights = args.path.with_suffix(".weights.pt")
    args.path.parent.mkdir(parents=True, exist_ok=True)
    sampler = expstore.PrioritizedSampler(alpha=0.6, beta=0.4)
    with expstore.open(
        args.path, capacity=CAPACITY, batch_size=BATCH_SIZE, sampler=sampler, seed=args.seed
    ) as rb:
        if rb.recovered:
            print(rb.recovered)
        if rb.write_count >= args.steps:
            print(f"all {args.steps:,} steps are done; pass --steps for more")
            return
        trainer = make_trainer(rb, args)
        kept = load(weights, trainer, rb)
        if rb.write_count:
            print(f"resuming {args.path} at step {rb.write_count:,}, weights as of step {kept:,}")

        def report() -> None:
            nonlocal kept
            if trainer.collected_frames >= min(kept + SAVE_EVERY, args.steps):
                save(weights, trainer, rb)
                kept = trainer.collected_frames
                count, mean = rb.sql(LATEST).fetchall()[0]
                print(f"step {kept:,}: {count} episodes, mean return of the last 10: {mean:.0f}", flush=True)

        trainer.register_op("post_steps", report)
        trainer.train()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train TorchRL's DQN on CartPole from a persistent store.")
    add = parser.add_argument
    add("--path", type=Path, default=Path("runs/torchrl.exp"), help="the store (%(default)s)")
    add("--steps", type=int, default=6_000, help="transitions in total (%(default)s)")
    add("--seed", type=int, default=0, help="random seed of networks, environment and draws (%(default)s)")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    return args


def main(arguments: Any = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)  # more threads make so small a network slower
    try:
        run(args)
    except KeyboardInterrupt:
        print("\nstopped; run it again to continue from here")
        return 130
    except expstore.ExpStoreError as exc:
        print(exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
