"""Batches and buffers that tests in any folder share.

Every value follows from the number of its row, so a test can check what it reads without keeping what it
wrote. Numbers count from `start`; the id of a row in a new store is its number plus one.

- `numbered_rows`: one field with the number of each row, and fields of your own.
- `transitions`: `observation`, `action` and `next`, as the fixture `make_batch` returns them.
- `episode_rows`: numbered rows; every `length`-th row ends an episode.
- `observed_episode`: an episode whose observations are the numbers of its rows.
- `steps`: numbered steps of one episode; the last step may end it.
- `trajectory_rows`: steps of one named trajectory; `x` is `trajectory * 1000 + step`.
- `whole_trajectories`: complete trajectories of given lengths, one after another.
- `noise_frames`, `counted_frames`: uint8 frames that do not compress, and frames that do.
- `memory_buffer`: a buffer in RAM; `trajectory_buffer`: a buffer in RAM that holds trajectories.
- `same`: whether two batches have the same fields, dtypes and bits.
- `buffer_factory`, `closing_factory`: several buffers, closed after the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage, TensorDictReplayBuffer
from tests.support.flat_storages import flatten_dims
from tests.support.tensor_bits import bits


def same(one: Any, other: Any) -> bool:
    """Return whether two TensorDicts have the same batch size, fields, dtypes, shapes and bits."""
    keys = set(one.keys(True, True))
    return (
        one.batch_size == other.batch_size
        and keys == set(other.keys(True, True))
        and all(
            (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            else a == b
            for a, b in ((one.get(key), other.get(key)) for key in keys)
        )
    )


def numbered_rows(count: int, start: int = 0, *, key: str = "number", **fields: Any) -> TensorDict:
    """Return rows `start` to `start + count - 1`. Batch size `[count]`.

    Args:
        count: Number of rows.
        start: Number of the first row.
        key: Name of the int64 field that holds the row numbers.
        fields: Further fields. A function is called with the row numbers and returns the values.
    """
    number = torch.arange(start, start + count)
    values = {name: value(number) if callable(value) else value for name, value in fields.items()}
    return TensorDict({key: number, **values}, [count])


def transitions(count: int, *, start: int = 0, episode_length: int = 0) -> TensorDict:
    """Return rows `start` to `start + count - 1` with the fields of a control task. Batch size `[count]`.

    `observation` f32[4], `action` i64 [], and under `next`: `observation` of the row after, `reward` f32[1]
    (the number / 4), `terminated` and `truncated` bool[1].

    Args:
        count: Number of rows.
        start: Number of the first row.
        episode_length: Every `episode_length`-th row terminates; 0: no row does.
    """
    number = torch.arange(start, start + count)

    def observation(of: torch.Tensor) -> torch.Tensor:
        return of[:, None].float() + torch.arange(4) / 8

    after = {
        "observation": observation(number + 1),
        "reward": number[:, None].float() / 4,
        **_flags(_every(number, episode_length)),
    }
    return TensorDict({"observation": observation(number), "action": number % 3, "next": after}, [count])


def observed_episode(count: int, start: int = 0) -> TensorDict:
    """Return an episode whose observations, f32[1], are the numbers of its rows. Batch size `[count]`."""
    seen = torch.arange(start, start + count)[:, None].float()
    done = (torch.arange(count) == count - 1)[:, None]
    return TensorDict({"observation": seen, "next": {"done": done, "terminated": done}}, [count])


def episode_rows(
    count: int,
    start: int = 0,
    *,
    length: int = 10,
    key: str = "number",
    reward: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
    **fields: Any,
) -> TensorDict:
    """Return numbered rows of episodes that follow one another. Batch size `[count]`.

    Under `next`: `reward` f32[1], `terminated` and `truncated` bool[1].

    Args:
        count: Number of rows.
        start: Number of the first row.
        length: Every `length`-th row terminates; 0: no row does.
        key: Name of the int64 field that holds the row numbers.
        reward: Called with the row numbers, returns the rewards; by default the numbers.
        fields: Further fields. A function is called with the row numbers and returns the values.
    """
    number = torch.arange(start, start + count)
    after = {"reward": reward(number)[:, None], **_flags(_every(number, length))}
    return numbered_rows(count, start, key=key, **fields, next=after)


def steps(
    count: int, start: int = 0, *, end: str | None = None, key: str = "number", **fields: Any
) -> TensorDict:
    """Return numbered steps of one episode, each with reward 1. Batch size `[count]`.

    Under `next`: `reward` f32[1], `terminated` and `truncated` bool[1].

    Args:
        count: Number of steps.
        start: Number of the first step.
        end: How the last step ends the episode: "terminated" or "truncated"; None leaves it open.
        key: Name of the int64 field that holds the numbers.
        fields: Further fields. A function is called with the numbers and returns the values.
    """
    last = torch.arange(count) == count - 1
    none = torch.zeros_like(last)
    flags = {name: (last if name == end else none)[:, None] for name in ("terminated", "truncated")}
    return numbered_rows(count, start, key=key, **fields, next={"reward": torch.ones(count, 1), **flags})


def trajectory_rows(trajectory: int, count: int, start: int = 0, **fields: Any) -> TensorDict:
    """Return steps of one trajectory: `x` is `trajectory * 1000 + step`, `episode` the trajectory.

    Batch size `[count]`.

    Args:
        trajectory: Number of the trajectory.
        count: Number of steps.
        start: The first step.
        fields: Further fields. A function is called with `x` and returns the values.
    """
    name = torch.full((count,), trajectory)
    return numbered_rows(count, trajectory * 1000 + start, key="x", **fields, episode=name)


def whole_trajectories(
    *lengths: int,
    first: int = 0,
    traj_key: str | tuple[str, ...] | None = ("collector", "traj_ids"),
    ends: bool = True,
    **fields: Any,
) -> TensorDict:
    """Return complete trajectories of these lengths, one after another. Batch size `[sum(lengths)]`.

    Under `next`: `reward` f32[1] is the number of the trajectory + 1, `done` is True at its last step.

    Args:
        lengths: Number of steps of each trajectory.
        first: Number of the first trajectory.
        traj_key: The field that holds the number of the trajectory; None leaves it out.
        ends: Whether there is a field `done`.
        fields: Further fields. A function is called with the numbers of the rows, from 0 on.
    """
    name = first + torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    data = TensorDict({"next": {"reward": name[:, None].float() + 1}}, [len(name)])
    if ends:
        data["next", "done"] = torch.zeros(len(name), 1, dtype=torch.bool)
        data["next", "done"][torch.tensor(lengths).cumsum(0) - 1] = True
    if traj_key is not None:
        data[traj_key] = name
    for key, values in fields.items():
        data[key] = values(torch.arange(len(name))) if callable(values) else values
    return data


def noise_frames(numbers: Any, *shape: int) -> torch.Tensor:
    """Return a frame of random bytes for each number, always the same one. uint8 `[len(numbers), *shape]`."""
    frames = [np.random.default_rng(int(number)).integers(0, 256, shape, np.uint8) for number in numbers]
    return torch.from_numpy(np.array(frames, np.uint8).reshape(-1, *shape))


def counted_frames(numbers: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return frames that count up from the number of their row. uint8 `[len(numbers), *shape]`."""
    within = torch.arange(math.prod(shape)).reshape(shape)
    return (numbers.reshape(-1, *(1 for _ in shape)) + within).to(torch.uint8)


def memory_buffer(
    capacity: int | None = 100, *, seed: int = 0, rows: TensorDict | None = None, **options: Any
) -> TensorDictReplayBuffer:
    """Return a buffer in RAM that holds `rows`; options are those of `TensorDictReplayBuffer`."""
    rb = TensorDictReplayBuffer(storage=MemoryStorage(capacity, seed=seed), **options)
    if rows is not None:
        rb.extend(rows)
    return rb


def trajectory_buffer(
    *lengths: int, sampler: Any, kind: type[TensorDictReplayBuffer] = TensorDictReplayBuffer, **options: Any
) -> Any:
    """Return a buffer in RAM with trajectories 1, 2, ... of these lengths; see `trajectory_rows`."""
    rb = kind(storage=MemoryStorage(1000), sampler=sampler, **options)
    for trajectory, length in enumerate(lengths, start=1):
        rb.extend(trajectory_rows(trajectory, length))
    return rb


@contextmanager
def closing_factory(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield `make`; at the end close everything that it returned."""
    made: list[Any] = []

    def make_one(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@contextmanager
def buffer_factory(kind: str, folder: Path) -> Iterator[Callable[..., TensorDictReplayBuffer]]:
    """Yield a factory of buffers that return ids and store lanes row by row; close them at the end.

    The factory takes `capacity` and options of `TensorDictReplayBuffer`.

    Args:
        kind: "memory", or "zarr" for stores on disk.
        folder: Folder for stores on disk.
    """
    count = 0

    def make(capacity: int | None = None, **options: Any) -> TensorDictReplayBuffer:
        nonlocal count
        if kind == "zarr":
            count += 1
            batches = {name: options.pop(name) for name in ("device", "prefetch") if name in options}
            return expstore.open(
                folder / f"{count}.exp", capacity=capacity, seed=3, batches=batches, **options
            )
        storage = MemoryStorage(capacity, seed=3)
        flatten_dims(storage)
        return TensorDictReplayBuffer(storage=storage, with_ids=True, **options)

    with closing_factory(make) as factory:
        yield factory


def _every(number: torch.Tensor, length: int) -> torch.Tensor:
    """Return for each row whether it is the last one of an episode of this length."""
    return (number + 1) % length == 0 if length else torch.zeros_like(number, dtype=torch.bool)


def _flags(terminated: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"terminated": terminated[:, None], "truncated": torch.zeros_like(terminated)[:, None]}
