"""Frequencies of slices match the distributions of their samplers, in every kind of store.

Each check is a chi-square test over slices that detects a slice that is off by 5 % (`chances`). The possible
slices and their probabilities come from the reference (`slice_model`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from expstore import (
    MemoryStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from expstore.core.draws import Draws
from expstore.core.id_set import IdSet
from expstore.errors import NotReadyError
from tests.support.chi_square import ERROR, Floats, chi_square, draws_needed, limit_of, one_off
from tests.support.flat_storages import flatten_dims
from tests.support.slice_model import Batch, Cell, Drawn, Fields, Model, Row, Slice

#: Rows per batch, about.
BATCH = 1 << 16
#: Episodes of so many steps; their rows lie between one another where there are several lanes.
EPISODES = (5, 1, 3, 2, 4)


# -- the shapes of a store --------------------------------------------------------------------------------


class Kept:
    """A store in memory, and its model."""

    def __init__(self, sampler: Any, capacity: int | None) -> None:
        self.model = Model(capacity, Fields(trajectories=False))
        storage = MemoryStorage(capacity, seed=1)
        flatten_dims(storage)
        self.rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, with_ids=True)

    def put(self, lengths: tuple[int, ...], lanes: int = 1, *, ends: bool = True) -> None:
        """Write episodes of so many steps, one after the other in each lane; the last may stay open."""
        marks = "".join("." * (n - 1) + "t" for n in lengths)
        marks = marks if ends else marks[:-1] + "."
        cells = tuple(Cell(mark) for mark in marks * lanes)
        batch = Batch(cells, lanes, time_first=lanes > 1)
        self.rb.extend(self.model.extend(batch))

    def draw(self) -> None:
        """Draw something, so that the sampler has to follow from there."""
        with suppress(NotReadyError):
            self.rb.sample(12)


def filling(sampler: Any) -> Kept:
    kept = Kept(sampler, 50)
    kept.put(EPISODES)
    return kept


def growing(sampler: Any) -> Kept:
    """Rows come one after the other, with a draw between them; the last episode is open."""
    kept = Kept(sampler, None)
    kept.put((4, 2))
    for _ in range(5):
        kept.draw()
        kept.put((1,), ends=False)
    return kept


def wrapped(sampler: Any) -> Kept:
    """The ring has gone round, spare slots and all; the oldest episode has lost its first steps."""
    kept = Kept(sampler, 16)
    for lengths in ((9,), EPISODES, (7, 3), (4110,), EPISODES[:4]):
        kept.put(lengths)
        kept.draw()
    return kept


def lanes(sampler: Any) -> Kept:
    """Three lanes, row by row; the oldest episodes have lost some steps."""
    kept = Kept(sampler, 17)
    kept.put((2, 3), 3)
    kept.draw()
    kept.put((1, 4), 3, ends=False)
    return kept


def emptied(sampler: Any) -> Kept:
    """What comes after `empty` goes on with an episode that had begun before."""
    kept = Kept(sampler, 40)
    kept.put((12, 3), ends=False)
    kept.draw()
    kept.rb.empty()
    kept.model.empty()
    kept.put(EPISODES)
    return kept


def with_deleted_rows(sampler: Any) -> Kept:
    """As a repair leaves it: two runs of rows in the middle are gone, and so an episode is in two."""
    kept = Kept(sampler, 60)
    kept.put((9, 4, 3))
    for first, count in ((11, 2), (4, 1)):  # from the back: places are those of what is left
        ids = kept.rb.storage.window.ids()[first : first + count]
        removed = int(ids[0]), int(ids[-1])
        storage: Any = kept.rb.storage
        storage._state.stored = replace(
            storage.window, deleted=storage.window.deleted.join(IdSet.of([removed]))
        )
        storage.episodes.give_up(IdSet.of([removed]))
        storage.epochs.deleted += 1
        kept.model.give_up(first, count)
    return kept


SHAPES = {shape.__name__: shape for shape in (filling, growing, wrapped, lanes, emptied, with_deleted_rows)}
RULES: dict[str, dict[str, Any]] = {
    "one-step": {"length": 1},
    "two-steps": {"length": 2},
    "three-steps": {"length": 3},
    "short-too": {"length": 4, "strict": False},
    "left": {"length": 3, "span": (2, 0)},
    "right": {"length": 3, "span": (0, 1)},
    "both-short-too": {"length": 3, "strict": False, "span": (2, 2)},
    "where": {"length": 2, "where": "truth.step % 2 = 0"},
    "where-left": {"length": 3, "span": (2, 0), "where": "truth.step % 2 = 0"},
    "weight-short-too": {"length": 3, "strict": False, "where": "truth.step > 0", "weight": "truth.step"},
}
#: The chances of rows by the conditions and weights of `RULES`.
MASSES: dict[str, Callable[[Row], float]] = {
    "where": lambda row: row.step % 2 == 0,
    "where-left": lambda row: row.step % 2 == 0,
    "weight-short-too": lambda row: row.step,
}


# -- with replacement -------------------------------------------------------------------------------------


def drawn(kept: Kept, size: int, length: int, there: list[Slice]) -> np.ndarray:
    """Return how often each slice comes among `size` at least; none may come that there is not."""
    places = {key: place for place, key in enumerate(there)}
    counts = np.zeros(len(there), np.int64)
    live = [row.serial for row in kept.model.rows]
    while counts.sum() < size:
        batch = kept.rb.sample(BATCH // length * length)
        for key, count in Drawn.read(batch, live).counts().items():
            assert key in places, f"{key} is not among {there}"
            counts[places[key]] += count
    return counts


def options_of(rule: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a sampler."""
    others = {"slice_len": rule["length"], "strict_length": rule.get("strict", True)}
    return others | {key: rule[key] for key in ("span", "where", "weight") if key in rule}


def facts_of(rule: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model."""
    return {key: rule[key] for key in ("length", "strict", "span") if key in rule}


@pytest.mark.some(4)
@pytest.mark.parametrize("by", ["trajectory", "start"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_frequencies(name: str, shape: str, by: str) -> None:
    rule = RULES[name]
    kept = SHAPES[shape](SliceSampler(by=by, **options_of(rule)))
    kept.rb.refresh()
    chances = kept.model.chances(by=by, **facts_of(rule), mass=MASSES.get(name, lambda row: 1.0))
    there, expected = list(chances), np.array(list(chances.values()))
    assert len(there) >= 3
    counts = drawn(kept, draws_needed(expected, one_off(expected)), rule["length"], there)
    assert chi_square(counts, expected) < limit_of(len(there))


class Leaning(SliceSampler):
    """A sampler that is wrong by 5 % in one slice, the first."""

    def sample(self, storage: Any, batch_size: int, generator: np.random.Generator) -> Any:
        found = super().sample(storage, batch_size, generator)
        ids = found.ids.reshape(-1, 2)
        chance = np.mean(ids[:, 0] == ids[:, 0].min())
        ids[generator.random(len(ids)) < ERROR * chance / (1 - chance)] = ids[ids[:, 0].argmin()]
        return replace(found, ids=ids.reshape(-1))


def test_an_error_of_five_percent_in_one_slice_is_seen() -> None:
    kept = filling(Leaning(slice_len=2, by="start"))
    chances = kept.model.chances(2)
    expected = np.array(list(chances.values()))
    counts = drawn(kept, draws_needed(expected, one_off(expected)), 2, list(chances))
    assert chi_square(counts, expected) > limit_of(len(chances))


# -- by priority ------------------------------------------------------------------------------------------

PRIORITIES = np.random.default_rng(9).uniform(0.3, 2.0, 64).astype(np.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"alpha": 0.7, "beta": 0.5, "eps": 1e-8, "length": 2},
    "steep": {"alpha": 1.3, "beta": 1.0, "eps": 0.4, "length": 3},
    "flat": {"alpha": 0.0, "beta": 0.4, "eps": 1e-8, "length": 2},
    "short-too": {"alpha": 0.6, "beta": 0.9, "eps": 1e-8, "length": 4, "strict": False},
    "right": {"alpha": 0.6, "beta": 0.9, "eps": 1e-8, "length": 3, "span": (0, 2)},
    "where": {"alpha": 0.6, "beta": 1.0, "eps": 1e-8, "length": 2, "where": "truth.step % 2 = 0"},
}


def set_priorities(kept: Kept) -> dict[tuple[int, int], float]:
    """Set them, some before a draw and some after it; return them: (episode, step) -> priority."""
    ids, rows = kept.rb.storage.window.ids(), kept.model.rows
    values = PRIORITIES[: ids.size]
    kept.rb.update_priority(id=ids[:9], priority=values[:9] * 3)
    kept.draw()
    kept.rb.update_priority(id=ids[7:], priority=values[7:])
    kept.rb.update_priority(id=ids[:7], priority=values[:7])
    return {(row.episode, row.step): float(value) for row, value in zip(rows, values, strict=True)}


def by_first_row(
    model: Model, length: int, *, strict: bool = True, span: tuple[int, int] = (0, 0), where: str = ""
) -> list[Slice]:
    """Return the slices by priority: a whole one less the span must follow, or the run begins there."""
    return [
        (row.episode, row.step, min(length, len(run) - place))
        for run in model.runs()
        for place, row in enumerate(run)
        if len(run) - place >= length - span[1] or (place == 0 and not strict)
        if not where or row.step % 2 == 0
    ]


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_and_weights_by_priority(name: str, shape: str) -> None:
    """A place where a slice can begin has the chance that the priority of its row gives it."""
    setting = SETTINGS[name]
    length, alpha, beta, eps = (setting[key] for key in ("length", "alpha", "beta", "eps"))
    sampler = PrioritizedSliceSampler(None, alpha, beta, eps, **options_of(setting))
    kept = SHAPES[shape](sampler)
    priorities = set_priorities(kept)
    kept.rb.refresh()
    there = by_first_row(kept.model, **facts_of(setting), where=setting.get("where", ""))
    masses = np.array([(priorities[episode, step] + eps) ** alpha for episode, step, _ in there])
    chances: Floats = masses / masses.sum()
    counts = drawn(kept, draws_needed(chances, one_off(chances)), length, there)
    assert chi_square(counts, chances) < limit_of(len(there))
    live = [row.serial for row in kept.model.rows]
    for _ in range(20):  # in few slices the smallest weight of all is often missing
        batch = kept.rb.sample(3 * length)
        found = Drawn.read(batch, live)
        pairs = zip(found.episodes.tolist(), found.steps.tolist(), strict=True)
        shares = np.array([(priorities[pair] + eps) ** alpha for pair in pairs]) / masses.min()
        expected = np.repeat(shares**-beta, found.lengths)
        np.testing.assert_allclose(batch["priority_weight"].numpy(), expected, rtol=1e-5)


# -- without replacement ----------------------------------------------------------------------------------


def even_chances(count: int) -> Floats:
    """Return the chances of the first and of the second half of so many things that are alike."""
    return np.array([count // 2, count - count // 2]) / count


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("shape", ["lanes", "with_deleted_rows"])
@pytest.mark.parametrize(("length", "strict"), [(2, True), (3, False)])
def test_every_trajectory_once_per_pass(shape: str, length: int, strict: bool) -> None:
    """In any order, and any of its slices.

    Which half of the runs comes first and last is the law, and in which half of a run its slice begins.
    """
    sampler = SliceSamplerWithoutReplacement(slice_len=length, strict_length=strict)
    kept = SHAPES[shape](sampler)
    storage, model = kept.rb.storage, kept.model
    runs = [run for run in model.runs() if len(run) >= length or not strict]
    wholes = np.array([min(length, len(run)) for run in runs])
    ids = storage.window.ids()
    id_of = dict(zip(model.rows, ids.tolist(), strict=True))
    run_of, step_of = np.zeros((2, ids.max() + 1), np.int64) - 1
    for number, run in enumerate(runs):
        for step, row in enumerate(run):
            run_of[id_of[row]], step_of[id_of[row]] = number, step
    places = np.array([len(run) for run in runs]) - wholes + 1
    sides = [even_chances(len(runs)), *map(even_chances, places.tolist())]
    while not sampler.ran_out:  # to the end of a pass that may have begun
        kept.rb.sample(length)
    draws, passes = Draws(1), max(draws_needed(side, one_off(side)) for side in sides if side.all())
    size = length * len(runs)
    chosen = np.stack(
        [sampler.sample(storage, size, draws.generator(number)).ids for number in range(passes)]
    )
    found, steps = run_of[chosen], step_of[chosen]
    begins = np.diff(found, axis=1, prepend=-1) != 0
    assert (begins.sum(1) == len(runs)).all()
    order, first = found[begins].reshape(passes, -1), steps[begins].reshape(passes, -1)
    at = np.nonzero(begins)[1].reshape(passes, -1)
    lengths = np.diff(at, axis=1, append=chosen.shape[1])
    assert (np.sort(order, axis=1) == np.arange(len(runs))).all(), "not every run once"
    assert (lengths == wholes[order]).all()
    since = np.repeat((first - at).ravel(), lengths.ravel()).reshape(chosen.shape)
    assert (steps == since + np.arange(chosen.shape[1])).all()
    half = len(runs) // 2
    later = [order[:, 0] >= half, order[:, -1] >= half]  # who comes first and last, and where in each run
    later += [first[order == run] >= places[run] // 2 for run in range(len(runs))]
    counts = [np.bincount(one, minlength=2) for one in later]
    for side, found in zip([sides[0], *sides], counts, strict=True):
        if side.all():
            assert chi_square(found, side) < limit_of(2)
