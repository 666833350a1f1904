"""Slices of stores with any history match a reference that works row by row.

Rows contain their episode and step (`slice_model`), so each slice can be checked from its rows; and every
possible slice must be drawn. Probabilities are tested in `test_slices_laws`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from expstore.core.draws import Draws
from expstore.errors import NotReadyError
from tests.support.case_selection import in_full, share
from tests.support.slice_model import Batch, Cell, Drawn, Fields, Model, cover
from tests.support.slice_stores import Scenario, World, scenarios, use_short_rings

#: Slices per batch, and how many batches may be drawn until all slices have come: that one of a chance of
#: 1 in 10,000, which is less than any here has, stays away is less likely than 1e-17.
SLICES, MOST = 2048, 200
#: An example opens stores many times: half a second.
some = share(0.12)
patient = pytest.mark.timeout(600)


pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_short_rings(monkeypatch)


# -- every slice there is, and no other -------------------------------------------------------------------


def check_all(world: World, length: int, **rule: Any) -> None:
    model = world.model
    there = set(model.chances(length, **rule))
    assert len(world.rb) == len(model.rows)
    if there:
        live = [row.serial for row in model.rows]
        seen = cover(lambda: world.rb.sample(SLICES * length), live, there, most=MOST)
        assert seen == there, f"never drawn: {there - seen}"
    else:
        what = "Did not find a single trajectory" if model.rows else "Cannot sample from an empty storage"
        with pytest.raises(NotReadyError, match=what):
            world.rb.sample(length)


@pytest.mark.guarantee(
    "draw/slices",
    "A slice has consecutive steps of one episode, every slice that exists can be drawn, and which one is"
    " drawn depends only on rows, seed and draw number.",
)
@pytest.mark.slow
@patient
@some
@given(scenario=scenarios(), strict=st.booleans(), span=st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 2)]))
def test_all_slices_come_and_no_others(scenario: Scenario, strict: bool, span: tuple[int, int]) -> None:
    length = scenario.length
    span = min(span[0], length - 1), min(span[1], length - 1)

    def make() -> Any:
        return SliceSampler(slice_len=length, by=scenario.by, strict_length=strict, span=span)

    with scenario.begin(make) as world:
        for number, (act, given) in enumerate(scenario.plan):
            world.do(act, given)
            if number % 3 != 1:  # and sometimes much happens between two draws
                check_all(world, length, by=scenario.by, strict=strict, span=span)
        check_all(world, length, by=scenario.by, strict=strict, span=span)


test_all_slices_come_and_no_others_in_full = pytest.mark.torture(in_full(test_all_slices_come_and_no_others))


@pytest.mark.slow
@patient
@some
@given(scenario=scenarios(), strict=st.booleans())
def test_every_trajectory_once_per_pass(scenario: Scenario, strict: bool) -> None:
    length = scenario.length

    def make() -> Any:
        return SliceSamplerWithoutReplacement(slice_len=length, strict_length=strict)

    with scenario.begin(make) as world:
        for act, given in scenario.plan:
            world.do(act, given)
            there = world.model.chances(length, strict=strict)
            if not there:
                with pytest.raises(NotReadyError):
                    world.rb.sample(length)
                continue
            live = [row.serial for row in world.model.rows]
            runs = {(row.episode, row.step): run[0] for run in world.model.runs() for row in run}
            pairs: list[tuple[int, int]] = []
            while not pairs or not world.rb.sampler.ran_out:
                counts = Drawn.read(world.rb.sample(3 * length), live).counts()
                assert counts.keys() <= there.keys()
                pairs += [(episode, step) for episode, step, _ in counts]
                assert len(pairs) <= len(runs), "the pass does not end"
            chosen = [runs[pair].serial for pair in pairs]
            assert sorted(chosen) == sorted({runs[episode, step].serial for episode, step, _ in there})


test_every_trajectory_once_per_pass_in_full = pytest.mark.torture(
    in_full(test_every_trajectory_once_per_pass)
)


@pytest.mark.slow
@patient
@some
@given(scenario=scenarios(), strict=st.booleans(), seed=st.integers(0, 9))
def test_all_slices_come_by_priority_and_no_others(scenario: Scenario, strict: bool, seed: int) -> None:
    length, rng = scenario.length, np.random.default_rng(seed)

    def make() -> Any:
        return PrioritizedSliceSampler(None, 0.8, 0.5, 0.2, slice_len=length, strict_length=strict)

    with scenario.begin(make) as world:
        for act, given in scenario.plan:
            world.do(act, given)
            if world.model.rows:
                ids = rng.permutation(world.rb.storage.window.ids())[:7]
                world.rb.update_priority(id=ids, priority=rng.uniform(0, 1, ids.size))
            check_all(world, length, strict=strict)


test_all_slices_come_by_priority_and_no_others_in_full = pytest.mark.torture(
    in_full(test_all_slices_come_by_priority_and_no_others)
)


# -- long lives -------------------------------------------------------------------------------------------


def anything(rng: np.random.Generator) -> Batch:
    lanes, times = int(rng.choice([1, 1, 3, 6])), int(rng.integers(1, 9))
    cells = (
        Cell(mark, int(trajectory))
        for mark, trajectory in zip(
            rng.choice([*".......tTsx"], lanes * times), rng.integers(0, 3, lanes * times), strict=True
        )
    )
    return Batch(tuple(cells), lanes, [None, "a", "b"][rng.integers(3)], bool(rng.integers(2)))


LIVES: dict[str, Callable[[], Any]] = {
    "trajectory": lambda: SliceSampler(slice_len=3),
    "start": lambda: SliceSampler(slice_len=2, by="start", strict_length=False),
    "prioritized": lambda: PrioritizedSliceSampler(slice_len=2, eps=0.2),
    "other-fields": lambda: SliceSampler(slice_len=2, traj_key=("truth", "episode")),
}


@pytest.mark.guarantee("draw/slices")
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("name", LIVES)
def test_draws_do_not_depend_on_how_rows_were_read(name: str, tmp_path: Path) -> None:
    """A reader who has just come draws the same slices as one who has seen it all, and as the writer."""
    rng, model, make = np.random.default_rng(4), Model(150, Fields(starts="is_init")), LIVES[name]
    length = 3 if name == "trajectory" else 2
    world = World(model, make, tmp_path)
    world.extend(anything(rng))

    def drawn(rb: Any) -> list[list[int]]:
        chosen = (rb.sampler.sample(rb.storage, 20 * length, Draws(3).generator(k)) for k in range(3))
        return [selection.ids.tolist() for selection in chosen]

    with expstore.open(world.path, mode="r", sampler=make()) as old:
        for number in range(1, 901):
            batch = anything(rng)
            if rng.random() < 0.1:
                world.add(batch)
            else:
                world.extend(batch)
            if name == "prioritized":
                ids = world.rb.storage.window.ids()[::5]
                world.rb.update_priority(id=ids, priority=rng.uniform(0, 1, ids.size))
            if number % 300 == 0:
                world.empty()
                world.extend(Batch(tuple(Cell() for _ in range(7))))
            if number % 10 == 0:
                world.rb.sample(length)
            if number % 90 == 0:
                check_all(world, length, strict=name != "start")
                world.rb.flush()
                with expstore.open(world.path, mode="r", sampler=make()) as new:
                    assert drawn(world.rb) == drawn(new)
                    assert drawn(old) == drawn(new)
    assert model.episodes > 1800, "too few for runs that have left to be forgotten"
    world.rb.close()
