"""Frames of real Atari games, and rows made of them: single frames or stacks, one lane or many.

Used by `images.py` and `peers.py`. A game is played by a random policy; each frame that it showed is kept
once, and rows are put together when they are asked for. It measures nothing. Playing needs the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["GAMES", "Play", "Rows", "keep", "made_up", "play", "prepared"]

GAMES = ("Breakout", "Pong", "Seaquest", "MsPacman")
LANES = 8
SIZE = 84
STACK = 4


@dataclass(frozen=True)
class Play:
    """Hold what a game showed, lane behind lane, and in a lane episode behind episode.

    Args:
        frames: Shape `(f, 84, 84)`, uint8.
        last: Frames from which no step leads on. Shape `(f,)`, bool.
        action: What was done when a frame was seen. Shape `(f,)`, int64.
        reward: What that brought. Shape `(f,)`, float32.
        terminated: Whether the game was over then. Shape `(f,)`, bool.
        lane: Which lane saw a frame. Shape `(f,)`, int64.
    """

    frames: NDArray[np.uint8]
    last: NDArray[np.bool_]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    lane: NDArray[np.int64]

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """The first frame of each frame's episode. Shape `(f,)`."""
        starts = np.flatnonzero(np.concatenate([[True], self.last[:-1]]))
        return starts[self.episode]

    @cached_property
    def episode(self) -> NDArray[np.int64]:
        """The episode of each frame. Shape `(f,)`."""
        return np.cumsum(np.concatenate([[0], self.last[:-1]]))

    def steps(self, lanes: int) -> NDArray[np.int64]:
        """Return the frames at which steps begin, in the order of rows: steps of lanes in turn. Shape `(n,)`.

        With one lane they come lane behind lane, as if one had played them all.
        """
        at = np.flatnonzero(~self.last)
        if lanes == 1:
            return at
        each = [at[self.lane[at] == lane] for lane in range(lanes)]
        length = min(map(len, each))
        return np.stack([one[:length] for one in each], 1).reshape(-1)


class Rows:
    """Make transitions of a game's frames.

    Args:
        game: What was played.
        stack: How many frames an observation has; 1: it is the frame.
        lanes: How many environments give rows in turn, a step each: 1 or 8.
    """

    def __init__(self, game: Play, *, stack: int, lanes: int) -> None:
        self.game, self.stack, self.lanes = game, stack, lanes
        self._steps = game.steps(lanes)

    def __len__(self) -> int:
        return self._steps.size

    def _images(self, frames: NDArray[np.int64]) -> NDArray[np.uint8]:
        seen = frames[:, None] - np.arange(self.stack - 1, -1, -1)
        known = np.maximum(seen, self.game.first[frames][:, None])
        images: NDArray[np.uint8] = self.game.frames[known[:, 0] if self.stack == 1 else known]
        return images

    def batch(self, first: int, count: int) -> TensorDict:
        """Return rows, counted anew from 0 after the last one. Batch size `[count]`."""
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
                "observation": torch.from_numpy(self._images(at)),
                "action": torch.from_numpy(game.action[at]),
                **{name: none.clone() for name in flags},
                "next": {
                    "observation": torch.from_numpy(self._images(at + 1)),
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


def play(name: str, steps: int, *, seed: int = 0) -> Play:
    """Play a game with a random policy in 8 lanes, `steps` steps each.

    Args:
        name: Of the game, as in `GAMES`.
        steps: Of each lane; its last episode is cut off there.
        seed: Of the games and of the policies.
    """
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    parts: dict[str, list[Any]] = {key: [] for key in Play.__dataclass_fields__}
    for lane in range(LANES):
        game = gymnasium.make(f"ALE/{name}-v5", frameskip=1)
        env = gymnasium.wrappers.AtariPreprocessing(game, screen_size=SIZE)
        env.action_space.seed(seed + lane)
        for row in _lane(env, steps, seed + lane):
            for key, value in zip(parts, (*row, lane), strict=True):
                parts[key].append(value)
        env.close()
    types = {"frames": np.uint8, "last": np.bool_, "reward": np.float32, "terminated": np.bool_}
    return Play(**{key: np.array(values, types.get(key, np.int64)) for key, values in parts.items()})


def made_up(steps: int) -> Play:
    """Return frames of no game: a dot that moves, two episodes a lane. It takes no package."""
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


def _lane(env: Any, steps: int, seed: int) -> Iterator[tuple[Any, bool, int, float, bool]]:
    """Yield frames of one environment, and what was done when they were seen."""
    frame, _ = env.reset(seed=seed)
    for number in range(steps):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        yield frame, False, int(action), float(reward), bool(terminated)
        frame = after
        if terminated or truncated or number == steps - 1:
            yield frame, True, 0, 0.0, False
            frame, _ = env.reset()


def prepared(name: str, steps: int, folder: Path | None) -> Play:
    """Return a game's frames out of a folder, or play it, and keep them there for the next time."""
    path = None if folder is None else folder / f"{name}-{steps}.npz"
    if path is not None and path.exists():
        with np.load(path) as found:
            return Play(**found)
    game = play(name, steps)
    if folder is not None:
        keep(game, name, steps, folder)
    return game


def keep(game: Play, name: str, steps: int, folder: Path) -> None:
    """Keep a game's frames in a folder, where `prepared` finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}-{steps}.part.npz"
    np.savez(temporary, **{key: getattr(game, key) for key in Play.__dataclass_fields__})
    temporary.replace(folder / f"{name}-{steps}.npz")
