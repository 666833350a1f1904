"""Record which rows every sampler draws, as lines of text that can be compared.

For each of three seeds `draw` fills a store, draws batches, adds rows until the ring has wrapped, draws
again, changes priorities, closes the store, reopens it and draws the rest. `golden.py` records the lines in
`tests/golden/draws/`, and `tests/unit/samplers/test_draw_sequences.py` compares.

A line is a batch: the seed, when it was drawn, the crc32c of its ids, and the first ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import google_crc32c
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from tests.support.batches import transitions

SEEDS = (0, 1, 2**40 + 7)
CAPACITY = 60
BATCH = 8
#: Number of batches that are drawn at each of the three times.
BATCHES = 4

Make = Callable[[], Any]

#: Functions that create the sampler of each sequence.
SAMPLERS: dict[str, Make] = {
    "random": expstore.RandomSampler,
    "random_where": lambda: expstore.RandomSampler(where="action % 3 = 0"),
    "random_weight": lambda: expstore.RandomSampler(weight="action % 5"),
    "without_replacement": expstore.SamplerWithoutReplacement,
    "without_replacement_drop_last": lambda: expstore.SamplerWithoutReplacement(drop_last=True),
    "without_replacement_in_order": lambda: expstore.SamplerWithoutReplacement(shuffle=False),
    "without_replacement_where": lambda: expstore.SamplerWithoutReplacement(where="action % 3 = 0"),
    "prioritized": lambda: expstore.PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5),
    "prioritized_where": lambda: expstore.PrioritizedSampler(CAPACITY, 0.7, 0.5, where="action % 3 = 0"),
    "recency_half_life": lambda: expstore.RecencySampler(half_life=10.0),
    "recency_newest": lambda: expstore.RecencySampler(newest=20),
    "consuming": lambda: expstore.ConsumingSampler(2),
    "consuming_where": lambda: expstore.ConsumingSampler(3, where="action % 2 = 0"),
    "staleness": expstore.StalenessAwareSampler,
    "staleness_at_most": lambda: expstore.StalenessAwareSampler(max_staleness=3),
    "slices": lambda: expstore.SliceSampler(num_slices=2),
    "slices_by_start": lambda: expstore.SliceSampler(slice_len=4, by="start"),
    "slices_where": lambda: expstore.SliceSampler(num_slices=2, where="episode.length > 5"),
    "slices_short": lambda: expstore.SliceSampler(slice_len=8, strict_length=False),
    "slices_padded": lambda: expstore.SliceSampler(slice_len=8, strict_length=False, pad_output=True),
    "slices_span": lambda: expstore.SliceSampler(num_slices=2, span=True),
    "slices_without_replacement": lambda: expstore.SliceSamplerWithoutReplacement(num_slices=2),
    "prioritized_slices": lambda: expstore.PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, num_slices=2),
    "streaming_slices": lambda: expstore.StreamingSliceSampler(slice_len=4),
    "prompt_groups": lambda: expstore.PromptGroupSampler(num_groups=2, group_key="query"),
}


def sampler_rows(count: int, start: int) -> TensorDict:
    """Return rows of episodes of 9 steps, two episodes per query, and a policy version every 10 rows."""
    data = transitions(count, start=start, episode_length=9)
    number = torch.arange(start, start + count)
    data["query"], data["policy_version"] = number // 18, number // 10
    return data


class _Notes:
    """Lines of one sequence."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.title = ""

    def batches(self, rb: Any, count: int = BATCHES) -> torch.Tensor:
        """Draw batches, record them, and return the ids of the last one."""
        for _ in range(count):
            batch = rb.sample()
            ids = batch["id"].reshape(-1)
            if "buffer_ids" in batch.keys(include_nested=True):
                ids = torch.stack([batch["buffer_ids"].reshape(-1), ids])
            raw = ids.to(torch.int64).contiguous().numpy()
            first = " ".join(map(str, raw.reshape(-1)[:6]))
            self.lines.append(f"{self.title}: {google_crc32c.value(raw.tobytes()):08x}  {first} ...")
        return ids


def draw(make: Make, folder: Path, *, prefetch: int = 0, reopen: bool = True) -> list[str]:
    """Return the lines of a sampler.

    Args:
        make: Function that creates the sampler.
        folder: An empty folder for stores.
        prefetch: Prefetching of the buffer that draws after reopening.
        reopen: Whether the store is closed and reopened before the last batches.
    """
    notes = _Notes()
    with short_rings():
        for seed in SEEDS:
            path = folder / f"{seed}.exp"
            rb = _open(path, make, capacity=CAPACITY, seed=seed)
            _note_cycle(notes, seed, rb)
            if reopen:
                rb.close()
                rb = _open(path, make, batches={"prefetch": prefetch})
            notes.title = f"seed {seed}, at last"
            notes.batches(rb)
            rb.close()
    return notes.lines


def draw_ensemble(folder: Path, **options: Any) -> list[str]:
    """Return the lines of an ensemble of two stores.

    Args:
        folder: An empty folder for stores.
        options: Options of the ensemble.
    """
    notes = _Notes()
    with short_rings():
        for seed in SEEDS:
            parts = [
                _open(folder / f"{seed}-{number}.exp", make, capacity=CAPACITY, seed=seed + number)
                for number, make in enumerate((expstore.RandomSampler, expstore.SamplerWithoutReplacement))
            ]
            rb = expstore.ReplayBufferEnsemble(*parts, batch_size=BATCH, **options)
            parts[0].extend(sampler_rows(40, 0))
            parts[1].extend(sampler_rows(20, 0))
            notes.title = f"seed {seed}, 40 and 20 rows"
            notes.batches(rb)
            parts[1].extend(sampler_rows(40, 20))
            notes.title = f"seed {seed}, 40 and 60 rows"
            notes.batches(rb)
            for part in parts:
                part.close()
    return notes.lines


#: Functions that return the lines of each sequence, given an empty folder.
SEQUENCES: dict[str, Callable[[Path], list[str]]] = {
    **{name: partial(draw, make) for name, make in SAMPLERS.items()},
    "ensemble": draw_ensemble,
    "ensemble_p": partial(draw_ensemble, p=[1, 3], num_buffer_sampled=4),
    "ensemble_sampleable": partial(draw_ensemble, p="sampleable", num_buffer_sampled=8),
    "ensemble_from_all": partial(draw_ensemble, sample_from_all=True),
}


@contextmanager
def short_rings() -> Iterator[None]:
    """Give rings few spare slots, and stores no index, while the context is active."""
    with patch.object(tuning, "SPARE_SLOTS", 16), patch.object(tuning, "INDEX_ON_CLOSE", False):
        yield


def _note_cycle(notes: _Notes, seed: int, rb: Any) -> None:
    """Draw from 40 rows, then from the ring after 40 more rows, then set some priorities.

    Samplers without priorities ignore them.
    """
    _add(rb, 0)
    notes.title = f"seed {seed}, 40 rows"
    notes.batches(rb)
    _add(rb, 40)
    notes.title = f"seed {seed}, 80 rows"
    known = torch.unique(notes.batches(rb))
    known = known[known > 0]
    rb.update_priority(id=known, priority=1.0 + known % 7)


def _add(rb: Any, start: int) -> None:
    rb.extend(sampler_rows(40, start))
    if rb.sampler.filter is not None:  # it evaluates new rows in the background some time after a draw
        rb.sampler.filter.refresh(rb.storage)


def _open(path: Path, make: Make, **options: Any) -> Any:
    return expstore.open(
        path, batch_size=BATCH, sampler=make(), durability=expstore.Durability(on_sigterm="ignore"), **options
    )
