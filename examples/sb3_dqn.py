"""Train DQN of Stable-Baselines3 on CartPole-v1 with a replay buffer that survives the process.

Run `python examples/sb3_dqn.py`; 20,000 steps take about half a minute. Needs stable-baselines3. Stop it with
Ctrl-C or `kill -9` at any time, and start it again with the same command to continue.

What survives:
- Transitions: every step that was added to the buffer is in the store (`--path`), also after `kill -9`.
- Networks, optimizer and step number: as of the last checkpoint, a file next to the store that is replaced
  atomically every `--checkpoint-every` steps and on Ctrl-C.

Transitions recorded after the checkpoint stay in the store and are sampled like all others. The environment
starts a new episode; the interrupted one has the status `cut`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import set_random_seed

import expstore


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path("runs/sb3.exp"), help="folder of the store")
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps in total")
    parser.add_argument("--seed", type=int, default=0, help="random seed; fixed when the store is created")
    parser.add_argument("--checkpoint-every", type=int, default=1_000, help="steps between two checkpoints")
    parser.add_argument("--log-every", type=int, default=1_000, help="steps between two lines of progress")
    args = parser.parse_args(arguments)
    for name in ("steps", "checkpoint_every", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1")
    return args


class Progress(BaseCallback):
    """Print the mean return of finished episodes, and save the model now and then."""

    def __init__(self, checkpoint: Path, args: argparse.Namespace) -> None:
        super().__init__()
        self._checkpoint, self._args = checkpoint, args

    def _on_step(self) -> bool:
        if self.num_timesteps % self._args.checkpoint_every == 0:
            self.save()
        if self.num_timesteps % self._args.log_every == 0:
            print(f"step {self.num_timesteps:,}  {self.describe_returns()}", flush=True)
        return True

    def describe_returns(self) -> str:
        """Return a text about the last twenty episodes, which the store knows."""
        buffer = self.model.replay_buffer
        query = """
            SELECT avg("return"), count(*) FROM
            (SELECT "return" FROM episodes WHERE status = 'terminated' ORDER BY episode_id DESC LIMIT 20)
        """
        ((mean, count),) = buffer.rb.sql(query).fetchall()
        return f"mean return of the last {count} episodes {mean or 0:.1f}; {buffer.size():,} rows"

    def save(self) -> None:
        """Replace the checkpoint."""
        new = self._checkpoint.with_name("new." + self._checkpoint.name)
        self.model.save(new)
        os.replace(new, self._checkpoint)


def make_model(checkpoint: Path, args: argparse.Namespace) -> DQN:
    """Return the model of the checkpoint, or a new one; its store is opened, or made."""
    env = gym.make("CartPole-v1")
    if checkpoint.exists():
        model = DQN.load(checkpoint, env=env)
        print(
            f"continuing at step {model.num_timesteps:,}; the store has {model.replay_buffer.size():,} rows"
        )
        set_random_seed(args.seed + model.num_timesteps)
        return model
    return DQN(
        "MlpPolicy",
        env,
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1_000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=4,
        gradient_steps=2,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [64, 64]},
        seed=args.seed,
        replay_buffer_class=expstore.sb3.ReplayBuffer,
        replay_buffer_kwargs={"path": str(args.path), "seed": args.seed},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    checkpoint = args.path.with_name(args.path.stem + ".model.zip")
    model = make_model(checkpoint, args)
    progress = Progress(checkpoint, args)
    progress.init_callback(model)
    try:
        left = args.steps - model.num_timesteps
        if left > 0:
            # `learn` adds these steps to those of the model that was loaded.
            model.learn(left, callback=progress, reset_num_timesteps=False)
        progress.save()
        print(f"done: {model.num_timesteps:,} steps, {progress.describe_returns()}")
        return 0
    except KeyboardInterrupt:
        progress.save()
        print(f"stopped at step {model.num_timesteps:,}; run the same command to continue")
        return 130
    finally:
        model.replay_buffer.close()


if __name__ == "__main__":
    sys.exit(main())
