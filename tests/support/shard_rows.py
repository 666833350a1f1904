"""Rows of three stores, and how batches of all of them are distributed, for the tests of several stores."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import expstore
from tests.support.chi_square import below, chi_square, solve

#: Rows of each shard, and the length of their episodes.
SIZES, LENGTHS = (60, 180, 30), (6, 10, 5)
ALPHA, BETA, EPS = 0.6, 0.4, 1e-8

Floats = NDArray[np.float64]


def rows_of(count: int, length: int, first: int = 0) -> TensorDict:
    """Return whole episodes of `length` steps; `number` is the row's number, counted from `first`."""
    number = torch.arange(first, first + count)
    done = (torch.arange(count) % length == length - 1)[:, None]
    following = {"reward": number[:, None].float(), "done": done, "terminated": done}
    return TensorDict({"number": number, "even": number % 2 == 0, "next": following}, [count])


def priorities_of(shard: int, count: int) -> Floats:
    return np.random.default_rng(shard).random(count) * (shard + 1) + 0.05


def place_of(ids: torch.Tensor) -> NDArray[np.int64]:
    """Return the place of each row among the rows of all shards. Shape `(n,)`."""
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    found: NDArray[np.int64] = starts[ids[:, 0].numpy()] + ids[:, 1].numpy() - 1
    return found


def limit_of(classes: int) -> float:
    """Return the value that chi-square exceeds once in 1000 times."""
    return solve(lambda x: below(x, classes - 1), 0.999, 20.0 * classes + 100)


def assert_distributed(places: NDArray[np.int64], chances: Floats) -> None:
    """Fail if places were not drawn with these chances, of which some may be 0."""
    counts = np.bincount(places, minlength=chances.size)
    assert not counts[chances == 0].any()
    some = chances > 0
    assert chi_square(counts[some], chances[some] / chances.sum()) < limit_of(int(some.sum()))


def weights_of(masses: Floats) -> Floats:
    least = masses[masses > 0].min()
    weights: Floats = (np.where(masses > 0, masses, least) / least) ** -BETA
    return weights


def powers() -> Floats:
    """Return the weight of every row of the shards by its priority."""
    priorities = [priorities_of(number, count) for number, count in enumerate(SIZES)]
    return (np.concatenate(priorities).astype(np.float32).astype(np.float64) + EPS) ** ALPHA


def even() -> NDArray[np.bool_]:
    return np.concatenate([np.arange(count) % 2 == 0 for count in SIZES])


def first_rows(drawn: TensorDict, length: int) -> NDArray[np.int64]:
    """Return the places of the first rows of slices, which are checked to be slices."""
    starts = place_of(drawn["id"]).reshape(-1, length)
    assert (np.diff(starts, axis=1) == 1).all()
    assert (drawn["next", "truncated"].reshape(-1, length).numpy() == (np.arange(length) == length - 1)).all()
    return starts[:, 0]


def starts_of(length: int) -> Floats:
    """Return 1 for each row at which a slice can begin, and 0 for other rows."""
    found = [np.arange(count) % steps <= steps - length for count, steps in zip(SIZES, LENGTHS, strict=True)]
    return np.concatenate(found).astype(np.float64)


def fill(rb: expstore.ReplayBuffer, number: int) -> None:
    """Write the rows and priorities of a shard."""
    ids = rb.extend(rows_of(SIZES[number], LENGTHS[number]), return_ids=True)
    rb.update_priority(id=ids, priority=torch.from_numpy(priorities_of(number, SIZES[number])))
