"""Frames of real Atari games, and rows built from them, with one lane or several.

Used by `images.py`. A random policy plays a game; each frame is kept once, and rows are built
on demand. This module measures nothing. Playing needs the extra `bench`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tensordict import TensorDict

#: A game whose frames compress well, and one whose frames do not.
GAMES = ("Breakout", "MsPacman")
LANES = 8
SIZE = 84


@dataclass(frozen=True)
class Play:
    """The frames of a game, lane by lane, and within a lane episode by episode.

    Args:
        frames: Shape `(f, 84, 84)`, uint8.
        last: Whether a frame is the last of its episode, with no step after it. Shape `(f,)`, bool.
        action: Action taken at a frame. Shape `(f,)`, int64.
        reward: Reward of that action. Shape `(f,)`, float32.
        terminated: Whether that action ended the game. Shape `(f,)`, bool.
        lane: Lane of a frame. Shape `(f,)`, int64.
    """

    frames: NDArray[np.uint8]
    last: NDArray[np.bool_]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    lane: NDArray[np.int64]

    @cached_property
    def episode(self) -> NDArray[np.int64]:
        """Episode of each frame. Shape `(f,)`."""
        return np.cumsum(np.concatenate([[0], self.last[:-1]]))

    def steps(self, lanes: int) -> NDArray[np.int64]:
        """Return the frames at which steps begin: one step of each lane in turn. Shape `(n,)`.

        With one lane the lanes follow one another, as if a single lane had played them all.
        """
        at = np.flatnonzero(~self.last)
        if lanes == 1:
            return at
        each = [at[self.lane[at] == lane] for lane in range(lanes)]
        length = min(map(len, each))
        return np.stack([one[:length] for one in each], 1).reshape(-1)


class Rows:
    """Build transitions from a game's frames.

    Args:
        game: The recorded game.
        lanes: Number of environments whose steps alternate: 1 or 8.
        stack: Number of newest frames in an observation; 1: the frame without an axis for it. Before the
            first frame of an episode that frame is repeated.
    """

    def __init__(self, game: Play, *, lanes: int, stack: int = 1) -> None:
        self.game = game
        self._back = np.arange(1 - stack, 1)
        self._steps = game.steps(lanes)

    def __len__(self) -> int:
        return self._steps.size

    def _observations(self, at: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return what an agent sees at frames. Shape `(n, 84, 84)` or `(n, stack, 84, 84)`."""
        if self._back.size == 1:
            return self.game.frames[at]
        begun = np.searchsorted(self.game.episode, self.game.episode[at])
        return self.game.frames[np.maximum(at[:, None] + self._back, begun[:, None])]

    def batch(self, first: int, count: int) -> TensorDict:
        """Return rows; after the last row counting starts again at 0. Batch size `[count]`."""
        import torch
        from tensordict import TensorDict

        lap, place = np.divmod(np.arange(first, first + count), self._steps.size)
        at, game = self._steps[place], self.game
        over = game.last[at + 1]

        def column(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values[:, None])

        none = torch.zeros(count, 1, dtype=torch.bool)
        flags = {
            "done": over,
            "terminated": over & game.terminated[at],
            "truncated": over & ~game.terminated[at],
        }
        episodes = int(game.episode[-1]) + 1
        return TensorDict(
            {
                "observation": torch.from_numpy(self._observations(at)),
                "action": torch.from_numpy(game.action[at]),
                **{name: none.clone() for name in flags},
                "next": {
                    "observation": torch.from_numpy(self._observations(at + 1)),
                    "reward": column(game.reward[at]),
                    **{name: column(values) for name, values in flags.items()},
                },
                "collector": {"traj_ids": torch.from_numpy(game.episode[at] + lap * episodes)},
            },
            [count],
        )

    def batches(self, total: int, each: int) -> Iterator[TensorDict]:
        """Yield `total` rows, `each` at a time."""
        for first in range(0, total, each):
            yield self.batch(first, min(each, total - first))


def play(name: str, steps: int) -> Play:
    """Play a game with a random policy in 8 lanes of `steps` steps; each core plays a lane at a time.

    Args:
        name: Name of the game, as in `GAMES`.
        steps: Number of steps per lane; the last episode is cut off.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
    with ProcessPoolExecutor(mp_context=context) as pool:
        lanes = list(pool.map(play_lane, repeat(name), repeat(steps), range(LANES)))
    columns = (np.concatenate(parts) for parts in zip(*lanes, strict=True))
    return Play(*columns, np.repeat(np.arange(LANES), [len(lane[0]) for lane in lanes]))


def play_lane(name: str, steps: int, lane: int) -> tuple[NDArray[Any], ...]:
    """Play one lane; return its columns of `Play`, without `lane`."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(f"ALE/{name}-v5", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(game, screen_size=SIZE)
    env.action_space.seed(lane)
    columns = zip(*_play_rows(env, steps, lane), strict=True)
    env.close()
    types = (np.uint8, np.bool_, np.int64, np.float32, np.bool_)
    return tuple(np.array(values, dtype) for values, dtype in zip(columns, types, strict=True))


def make_game(steps: int) -> Play:
    """Return synthetic frames: a moving dot, two episodes per lane. No package is needed."""
    each = steps + 2
    number = np.arange(LANES * each)
    frames = np.zeros((number.size, SIZE, SIZE), np.uint8)
    frames[number, number % SIZE, number // each] = 200
    last = np.isin(number % each, (steps // 2, each - 1))
    return Play(
        frames=frames,
        last=last,
        action=number % 4,
        reward=np.ones(number.size, np.float32),
        terminated=np.roll(last, -1),
        lane=number // each,
    )


def _play_rows(env: Any, steps: int, seed: int) -> Iterator[tuple[Any, bool, int, float, bool]]:
    """Yield frames of one environment, with the actions taken at them."""
    frame, _ = env.reset(seed=seed)
    for number in range(steps):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        yield frame, False, int(action), float(reward), bool(terminated)
        frame = after
        if terminated or truncated or number == steps - 1:
            yield frame, True, 0, 0.0, False
            frame, _ = env.reset()


def load_game(name: str, steps: int, folder: Path) -> Play:
    """Load a game's frames from a folder, or play the game and save the frames there."""
    path = folder / f"{name}-{steps}.npz"
    if path.exists():
        with np.load(path) as columns:
            return Play(**columns)
    game = play(name, steps)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.npz")
    np.savez(temporary, **{key: getattr(game, key) for key in Play.__dataclass_fields__})
    temporary.replace(path)
    return game
