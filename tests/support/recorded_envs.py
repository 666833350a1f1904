"""Environments whose observations say where they were made, and a model of the rows that they give.

Used by the tests of the wrappers that record, and by their kills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

#: Lengths of the episodes of each lane.
LENGTHS = (1, 2, 3, 7)
PIXELS = (2, 3)


class Row(NamedTuple):
    """A step: places before and after it, its action, reward and flags."""

    place: int
    action: int
    reward: float
    after: int
    terminated: bool
    truncated: bool


class Counting(gym.Env[Any, Any]):
    """Its observations tell lane, episode and step; episodes end by turns terminated and truncated.

    Args:
        lane: Number of the lane.
        length: Length of its episodes; None for that of the lane in `LENGTHS`.
        is_nested: Whether observations and actions are dicts.
        reuses: Whether the arrays that it returns change in the next step.
        render_mode: As gymnasium's.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        lane: int = 0,
        *,
        length: int | None = None,
        is_nested: bool = False,
        reuses: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.lane, self.is_nested, self.render_mode = lane, is_nested, render_mode
        self.length = LENGTHS[lane] if length is None else length
        self._reuses = reuses
        self.episode = self.at = 0
        self._position = np.zeros(2, np.float32)
        position = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.observation_space: spaces.Space[Any] = position
        self.action_space: spaces.Space[Any] = spaces.Discrete(1000)
        if is_nested:
            parts = spaces.Tuple((spaces.Box(0, 100, (), np.int16), spaces.MultiBinary(3)))
            self.observation_space = spaces.Dict({"position": position, "parts": parts})
            self.action_space = spaces.Dict({"move": spaces.Discrete(1000), "force": spaces.Box(-1, 1, (3,))})

    @property
    def place(self) -> int:
        """Lane, episode and step as one number."""
        return place_of(self.lane, self.episode, self.at)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self._observe(), self._inform()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make a step; its reward is the number of the step."""
        self.at += 1
        ends = self.at >= self.length
        truncated = ends and self.episode % 2 == 0
        return self._observe(), float(self.at), ends and not truncated, truncated, self._inform()

    def render(self) -> Any:
        """Return a frame of the number of the step."""
        return np.full((*PIXELS, 3), self.at, np.uint8)

    def _observe(self) -> Any:
        if not self._reuses:
            self._position = np.zeros(2, np.float32)
        self._position[:] = self.place, -self.place
        if not self.is_nested:
            return self._position
        bits = np.array([self.at & 1, self.at >> 1 & 1, self.at >> 2 & 1], np.int8)
        return {"position": self._position, "parts": (np.int16(self.at), bits)}

    def _inform(self) -> dict[str, Any]:
        return {"place": self.place, "pair": np.array([self.at, self.lane], np.int32)}


def place_of(lane: int, episode: int, at: int) -> int:
    """Return what `Counting` observes; episodes count from 1, steps from 0."""
    return lane * 100_000 + episode * 100 + at


def make_counting(
    mode: AutoresetMode, *, is_nested: bool = False, **options: Any
) -> VectorEnv[Any, Any, Any]:
    """Return a vector environment of a lane for each of `LENGTHS`, which reuses its arrays."""

    def maker(lane: int) -> Any:
        return lambda: Counting(lane, is_nested=is_nested, **options)

    makers = [maker(lane) for lane in range(len(LENGTHS))]
    return SyncVectorEnv(makers, autoreset_mode=mode, copy=False)


def action_of(call: int, lanes: int, *, is_nested: bool) -> Any:
    """Return the actions of a call, which tell its number; without lanes (0) one action."""
    move = np.full(lanes, call % 1000) if lanes else np.int64(call % 1000)
    if not is_nested:
        return move
    force = np.full((lanes, 3) if lanes else 3, call % 7 / 7, np.float32)
    return {"move": move, "force": force}


def drive(envs: Any, *, is_nested: bool = False) -> Iterator[int]:
    """Step a vector environment without end; yield the number of each call after it."""
    envs.reset(seed=3)
    mode, ended, call = envs.metadata["autoreset_mode"], np.zeros(envs.num_envs, np.bool_), 0
    while True:
        if mode is AutoresetMode.DISABLED and ended.any():
            envs.reset(options={"reset_mask": ended})
        _, _, terminated, truncated, _ = envs.step(action_of(call, envs.num_envs, is_nested=is_nested))
        ended = terminated | truncated
        yield call
        call += 1


def model_of_lane(lane: int, calls: int, mode: AutoresetMode) -> list[Row]:
    """Return the rows that so many calls of `drive` give in a lane."""
    rows: list[Row] = []
    episode, at, has_ended = 1, 0, False
    for call in range(calls):
        if has_ended:
            episode, at, has_ended = episode + 1, 0, False
            if mode is AutoresetMode.NEXT_STEP:
                continue
        has_ended = at + 1 == LENGTHS[lane]
        is_truncated = has_ended and episode % 2 == 0
        before, after = (place_of(lane, episode, step) for step in (at, at + 1))
        rows.append(
            Row(before, call % 1000, float(at + 1), after, has_ended and not is_truncated, is_truncated)
        )
        at += 1
    return rows


def episodes_of(rows: list[Row]) -> list[tuple[int, str]]:
    """Return length and status of the episodes of one lane's rows; one that has not ended is open."""
    found: list[tuple[int, str]] = []
    length = 0
    for row in rows:
        length += 1
        if row.terminated or row.truncated:
            found.append((length, "terminated" if row.terminated else "truncated"))
            length = 0
    return [*found, (length, "open")] if length else found


def stored_rows(rb: Any) -> dict[int, list[Row]]:
    """Return the rows of a store by lane, in the order of their ids; check their other fields."""
    found: dict[int, list[Row]] = {lane: [] for lane in range(len(LENGTHS))}
    if not len(rb):
        return found
    rows = rb[:]
    after, action = rows["next"], rows["action"]
    now, then = rows["observation"], after["observation"]
    if ("observation", "position") in rows.keys(True):
        for part, place in ((now, now["position"]), (then, then["position"])):
            at = place[:, 0].long() % 100
            assert (part["parts", "0"] == at).all()
            bits = part["parts", "1"].long()
            assert (bits[:, 0] + 2 * bits[:, 1] + 4 * bits[:, 2] == at).all()
        now, then, action = now["position"], then["position"], action["move"]
        assert ((rows["action", "force"] * 7).round() == (action % 7)[:, None]).all()
    assert (now[:, 0] == -now[:, 1]).all()
    assert (then[:, 0] == -then[:, 1]).all()
    columns = [
        now[:, 0].long(), action, after["reward"][:, 0], then[:, 0].long(), after["terminated"][:, 0],
        after["truncated"][:, 0],
    ]  # fmt: skip
    for values in zip(*(column.tolist() for column in columns), strict=True):
        row = Row(*values)
        found[row.place // 100_000].append(row)
    return found


def stored_episodes(rb: Any) -> dict[int, list[tuple[int, str]]]:
    """Return length and status of the episodes of each lane, in their order."""
    found: dict[int, list[tuple[int, str]]] = {lane: [] for lane in range(len(LENGTHS))}
    query = "SELECT source, length, status FROM episodes ORDER BY episode_id"
    for source, length, status in rb.sql(query).fetchall():
        found[int(source.rpartition("//")[2]) if "//" in source else 0].append((length, status))
    return found
