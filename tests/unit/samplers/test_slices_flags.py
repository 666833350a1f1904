"""Flags and info of a batch of slices equal those of TorchRL's samplers for the same slices.

Both sample the same rows of one lane until every slice has been drawn; then the slices are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
    from torchrl import data as theirs

#: Steps of the trajectories; the last one is still open.
LENGTHS = (5, 4, 3, 1, 2)
LENGTH, SLICES, BATCHES = 3, 80, 2

Facts = dict[Any, Any]


def rows(*without: tuple[str, ...]) -> TensorDict:
    """Trajectories that end in different ways, without some fields."""
    count = sum(LENGTHS)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    flags = {name: torch.zeros(count, 1, dtype=torch.bool) for name in ("terminated", "truncated", "init")}
    flags["terminated"][last[[0, 2]]] = True
    flags["truncated"][last[[1, 3]]] = True
    flags["init"][torch.cat([torch.tensor([0]), last[:-1] + 1])] = True
    found = TensorDict(
        {
            "number": torch.arange(count),
            "episode": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
            "is_init": flags["init"],
            "flag": torch.arange(count)[:, None] % 4 == 2,
            "next": {
                "reward": torch.arange(count)[:, None] / 8,
                "terminated": flags["terminated"],
                "truncated": flags["truncated"],
                "done": flags["terminated"] | flags["truncated"],
            },
        },
        [count],
    )
    return found.exclude(*without)


FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "all": (),
    "no-truncated": (("next", "truncated"),),
    "no-done": (("next", "done"),),
    "done-only": (("next", "terminated"), ("next", "truncated")),
    "no-init": (("is_init",),),
    "no-flags": (("next", "terminated"), ("next", "truncated"), ("next", "done"), ("is_init",)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short-too": {"strict_length": False},
    "padded": {"strict_length": False, "pad_output": True},
    "left": {"span": (1, False)},
    "no-init": {"init_key": None},
    "other-init": {"init_key": "flag"},
    "no-truncated": {"truncated_key": None},
    "no-marks": {"truncated_key": None, "init_key": None},
    "other-truncated": {"truncated_key": ("next", "cut")},
    "at-the-root": {"truncated_key": "truncated"},
}


def ours(kind: str, **options: Any) -> Any:
    make = expstore.ReplayBuffer if kind == "plain" else expstore.TensorDictReplayBuffer
    sampler = expstore.SliceSampler(slice_len=LENGTH, traj_key="episode", **options)
    return make(storage=MemoryStorage(50, seed=3), sampler=sampler, batch_size=LENGTH * SLICES)


def torchrls(kind: str, **options: Any) -> Any:
    make = theirs.ReplayBuffer if kind == "plain" else theirs.TensorDictReplayBuffer
    sampler = theirs.SliceSampler(slice_len=LENGTH, traj_key="episode", **options)
    torch.manual_seed(3)
    return make(storage=theirs.LazyTensorStorage(50), sampler=sampler, batch_size=LENGTH * SLICES)


def facts(batch: TensorDict, info: dict[Any, Any]) -> Facts:
    """Return all fields of a batch, and what the info says beside them, under keys as tuples."""
    found: Facts = {}
    for key, values in batch.items(True, True):
        found["batch", *((key,) if isinstance(key, str) else key)] = values
    for key, values in info.items():
        if key not in ("index", "id"):
            found["info", *((key,) if isinstance(key, str) else key)] = values
    found.pop(("batch", "index"), None)  # of the shape (n, 1) there
    return found


def cut(found: Facts, lengths: list[int]) -> dict[tuple[int, ...], Facts]:
    """Return slices, by the numbers of their rows."""
    slices = {}
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        part = {key: values[rows].tolist() for key, values in found.items()}
        slices[tuple(part["batch", "number"])] = part
        start += length
    return slices


def collected(rb: Any, fields: TensorDict) -> tuple[dict[tuple[int, ...], Facts], Facts]:
    """Draw; return all slices that came, and dtype and shape of everything."""
    rb.extend(fields)
    slices: dict[tuple[int, ...], Facts] = {}
    kinds: Facts = {}
    for _ in range(BATCHES):
        found = facts(*rb.sample(return_info=True))
        size = len(found["batch", "number"])
        ends = next((v for k, v in found.items() if k[0] == "info" and k[-1] in ("truncated", "cut")), None)
        if size == LENGTH * SLICES:  # all are whole, or filled up
            lengths = [LENGTH] * SLICES
        else:
            assert ends is not None
            places = ends.reshape(-1).nonzero().reshape(-1)
            lengths = torch.diff(places, prepend=torch.tensor([-1])).tolist()
        slices |= cut(found, lengths)
        kinds = {key: (values.dtype, values.shape[1:]) for key, values in found.items()}
    return slices, kinds


@pytest.mark.some(10)
@pytest.mark.parametrize("kind", ["plain", "tensordict"])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_slices_look_as_torchrls(option: str, fields: str, kind: str) -> None:
    data = rows(*FIELDS[fields])
    mine, our_kinds = collected(ours(kind, **OPTIONS[option]), data)
    other, their_kinds = collected(torchrls(kind, **OPTIONS[option]), data)
    assert our_kinds == their_kinds
    assert mine.keys() == other.keys(), "other slices"
    for numbers, found in other.items():
        assert mine[numbers] == found, numbers


def complaint(act: Callable[[], Any]) -> tuple[list[type], str]:
    with pytest.raises(Exception) as caught:
        act()
    return [kind for kind in (TypeError, ValueError, RuntimeError) if caught.errisinstance(kind)], str(
        caught.value
    )


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 6),
        ({"num_slices": 2, "slice_len": 3}, 6),
        ({"slice_len": 2, "end_key": "a", "end_keys": ["b"]}, 6),
        ({"slice_len": 2, "pad_output": True}, 6),
        ({"slice_len": 4}, 6),
        ({"num_slices": 4}, 6),
        ({"slice_len": 6}, 6),
        ({"slice_len": 3, "span": 3}, 6),
        ({"slice_len": 3, "span": (False, 4)}, 6),
    ],
    ids=str,
)
def test_complaints_are_torchrls(options: dict[str, Any], size: int) -> None:
    """Of the same kind, and in the same words up to the figures at their end."""

    def act(make: Any, storage: Any, buffer: Any) -> None:
        rb = buffer(storage=storage, sampler=make(**options))
        rb.extend(rows())
        rb.sample(size)

    kinds, words = complaint(
        lambda: act(theirs.SliceSampler, theirs.LazyTensorStorage(50), theirs.ReplayBuffer)
    )
    our_kinds, our_words = complaint(
        lambda: act(expstore.SliceSampler, MemoryStorage(50), expstore.ReplayBuffer)
    )
    assert kinds[0] in our_kinds
    assert our_words.startswith(words.rstrip(")."))
