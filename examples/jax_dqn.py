"""Train DQN on CartPole-v1 in JAX: pure functions, and a replay buffer that survives the process.

Run `python examples/jax_dqn.py`; 20,000 steps take about a minute. Needs gymnasium and JAX (`pip install
'jax[cpu]'`). Stop it with Ctrl-C or `kill -9` at any time, and start it again with the same command to
continue.

The training state is a tree of arrays, and `update` maps a state and a batch to the next state. A batch of
`rb.sample(as_numpy=True)` is passed to the compiled function as it is: JAX reads aligned arrays in place and
copies others.

What survives:
- Transitions: every step that `episode.step` returned from is in the store (`--path`), also after `kill -9`.
  A power cut loses at most the last second.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import expstore


def argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Args:
    path: str = argument("runs/jax_dqn.exp", "folder of the store; the checkpoint is next to it")
    steps: int = argument(20_000, "environment steps in total")
    seed: int = argument(0, "random seed; fixed when the store is created")
    buffer_size: int = argument(50_000, "transitions that the store keeps; fixed when it is created")
    batch_size: int = argument(128, "transitions in a batch")
    learning_rate: float = argument(5e-4, "learning rate of Adam")
    gamma: float = argument(0.99, "discount factor")
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
        description="Train DQN on CartPole-v1 in JAX from a persistent replay buffer.",
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


Params = list[dict[str, jax.Array]]


class TrainState(NamedTuple):
    """Everything that training changes; a tree of arrays."""

    params: Params
    target: Params  # a slow copy of the parameters, which keeps the targets steady
    mean: Params  # Adam's means of gradients
    square: Params  # and of their squares
    updates: jax.Array  # number of gradient steps


def init_layer(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Return weights and biases as `torch.nn.Linear` has them, which are uniform up to 1 / sqrt(inputs)."""
    bound = inputs**-0.5
    values = jax.random.uniform(key, (inputs + 1, outputs), minval=-bound, maxval=bound)
    return {"weight": values[:-1], "bias": values[-1]}


def init_state(seed: int) -> TrainState:
    sizes = (4, 128, 128, 2)
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    params = [
        init_layer(key, inputs, outputs) for key, inputs, outputs in zip(keys, sizes, sizes[1:], strict=False)
    ]
    zeros = jax.tree.map(jnp.zeros_like, params)
    return TrainState(params, params, zeros, zeros, jnp.zeros((), jnp.int32))


def q_values(params: Params, observation: jax.Array) -> jax.Array:
    """Return the value of each action. Shape `(..., actions)`."""
    hidden = observation
    for layer in params[:-1]:
        hidden = jax.nn.relu(hidden @ layer["weight"] + layer["bias"])
    return hidden @ params[-1]["weight"] + params[-1]["bias"]


@jax.jit
def best_action(params: Params, observation: np.ndarray) -> jax.Array:
    return q_values(params, observation).argmax()


def td_loss(params: Params, target: Params, batch: dict[str, Any], gamma: float) -> jax.Array:
    after = batch["next"]
    best = q_values(target, after["observation"]).max(axis=1, keepdims=True)
    # Only `terminated` ends the return: a truncated episode would have continued.
    wanted = after["reward"] + gamma * best * ~after["terminated"]
    values = q_values(params, batch["observation"])
    error = jnp.take_along_axis(values, batch["action"][:, None], axis=1) - wanted
    return jnp.where(abs(error) < 1, error**2 / 2, abs(error) - 0.5).mean()  # Huber's loss


def make_update(args: Args) -> Callable[[TrainState, dict[str, Any]], tuple[TrainState, jax.Array]]:
    """Return a compiled function that makes one gradient step of Adam."""

    @jax.jit
    def update(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
        loss, gradient = jax.value_and_grad(td_loss)(state.params, state.target, batch, args.gamma)
        updates = state.updates + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, state.square, gradient)
        rate, scale = args.learning_rate / (1 - 0.9**updates), 1 / (1 - 0.999**updates)
        params = jax.tree.map(
            lambda p, m, s: p - rate * m / (jnp.sqrt(scale * s) + 1e-8), state.params, mean, square
        )
        target = jax.tree.map(lambda slow, fast: slow + args.tau * (fast - slow), state.target, params)
        return TrainState(params, target, mean, square, updates), loss

    return update


def save_checkpoint(path: Path, step: int, state: TrainState) -> None:
    """Replace the checkpoint: after a crash the file is either the old one or the new one, complete."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, np.int64(step), *jax.tree.leaves(state))
        file.flush()
        os.fsync(file.fileno())  # without it a power cut could leave an empty file under the final name
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def load_checkpoint(path: Path, rows: int, state: TrainState) -> tuple[int, TrainState]:
    """Return step and state of the checkpoint; 0 and the given state if there is no checkpoint yet.

    Args:
        path: The checkpoint's file.
        rows: How many rows the store has had.
        state: A state whose leaves have the shapes of the stored ones.
    """
    if not path.exists():
        return 0, state
    with np.load(path) as file:
        first, *leaves = (file[name] for name in file.files)
    step = int(first)
    # The rows of a step are written before its checkpoint, so a store is never behind its own checkpoint.
    if step > rows:
        raise SystemExit(
            f"error: {path} is of step {step:,}, but the store has had only {rows:,} rows: the file "
            "belongs to another store. Delete it to start with new networks."
        )
    return step, jax.tree.unflatten(jax.tree.structure(state), map(jnp.asarray, leaves))


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
    checkpoint_path = Path(args.path).with_suffix(".checkpoint.npz")
    start, state = load_checkpoint(checkpoint_path, rb.write_count, init_state(args.seed))
    update = make_update(args)
    if rb.write_count:
        print(f"continuing at step {start:,}; the store has {len(rb):,} rows", flush=True)
    if start >= args.steps:
        print(f"all {args.steps:,} steps are done; pass a larger --steps to continue", flush=True)
        return 0

    # The seed depends on the number of stored rows: a continued run must not repeat stored episodes.
    rng = np.random.default_rng([args.seed, rb.write_count])
    run_seed = int(rng.integers(2**31))
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=run_seed)
    loss = jnp.array(jnp.nan)
    with rb.record("env-0") as episode:
        for step in range(start + 1, args.steps + 1):
            epsilon = max(args.end_epsilon, 1 - (1 - args.end_epsilon) * step / args.exploration_steps)
            if rng.random() < epsilon:
                action = int(rng.integers(2))
            else:
                action = int(best_action(state.params, observation))

            next_observation, reward, terminated, truncated, _ = env.step(action)
            episode.step(observation, action, reward, next_observation, terminated, truncated)
            observation = next_observation
            if terminated or truncated:
                observation, _ = env.reset()  # the recorder starts a new episode by itself

            if len(rb) >= args.learning_starts and step % args.train_every == 0:
                state, loss = update(state, rb.sample(as_numpy=True))

            if step % args.log_every == 0:
                print(
                    f"step {step:,}  mean return {mean_return(rb)}  loss {loss.item():.4f}  "
                    f"epsilon {epsilon:.2f}",
                    flush=True,
                )
            if step % args.checkpoint_every == 0 or step == args.steps or stop.is_set:
                rb.flush()  # rows first: after a power cut the store must not be behind the checkpoint
                save_checkpoint(checkpoint_path, step, state)
            if stop.is_set:
                print(f"stopped at step {step:,}; run the same command to continue", flush=True)
                return 130
    print(f"done: {args.steps:,} steps, mean return of the last 20 episodes {mean_return(rb)}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
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
