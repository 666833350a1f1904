"""Slices of stores that anything may have happened to, against a reference that goes row by row.

Rows carry the truth about themselves (`slice_model`), so every slice is judged by what stands in it; and
all slices that there are must come. The laws are for `test_slices_laws`.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_model import Batch, Cell, Drawn, Fields, Model, cover

import expstore
from expstore import (
    MemoryStorage,
    NotReadyError,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    files,
)
from expstore.draws import Draws
from expstore.files import Disk
from expstore.manifest import Manifest
from expstore.storages import base
from expstore.types import merge_runs

#: Slices per batch, and how many batches may be drawn until all slices have come: that one of a chance of
#: 1 in 10,000, which is less than any here has, stays away is less likely than 1e-17.
SLICES, MOST = 2048, 200
SPARE = 12
#: An example opens stores many times: half a second. The nightly run looks at a few hundred.
some = settings(max_examples=min(settings().max_examples, 300))
patient = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def small_and_without_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings go round after a few rows; nothing here is about what a power cut leaves."""
    monkeypatch.setattr(base, "spare_slots", lambda capacity, row_bytes: SPARE)
    monkeypatch.setattr(files, "_sync_data", os.fstat)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# -- what happens to a store ------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lanes, times = draw(
        st.one_of(
            st.tuples(st.integers(1, 3), st.integers(1, 6)),
            st.sampled_from([(1, 1), (1, 1), (1, 12), (4, 1), (2, 20)]),
        )
    )
    cells = st.builds(Cell, st.sampled_from("........ttTTsdx"), st.sampled_from([0, 0, 0, 1, 2]))
    return Batch(
        tuple(draw(st.lists(cells, min_size=lanes * times, max_size=lanes * times))),
        lanes,
        draw(st.sampled_from([None, None, "a", "a", "b"])),
        draw(st.booleans()),
    )


def single_rows(batch: Batch) -> list[Batch]:
    return [Batch((cell,), 1, batch.source) for cell in batch.cells]


anywhere = st.one_of(
    st.tuples(st.just("extend"), batches()),
    st.tuples(st.just("extend"), batches()),
    st.tuples(st.just("add"), batches()),
    st.tuples(st.just("empty"), st.none()),
    st.tuples(st.just("retire"), st.floats(0, 1)),
)
only_on_disk = st.one_of(
    st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("killed"), batches()),
    st.tuples(st.just("damage"), st.tuples(st.floats(0, 1), st.integers(1, 5))),
    st.tuples(st.just("load"), st.none()),
)


@dataclass
class World:
    """A store, and the model that goes with it.

    Args:
        model: Told of everything that happens.
        make: Makes the sampler.
        folder: Where stores on disk lie; None: in memory.
    """

    model: Model
    make: Callable[[], Any]
    folder: Path | None

    def __post_init__(self) -> None:
        self.versions = 0
        self.rb = self.open()

    def open(self) -> TensorDictReplayBuffer:
        if self.folder is not None:
            return expstore.open(self.path, capacity=self.model.capacity, seed=5, sampler=self.make())
        storage = MemoryStorage(self.model.capacity, seed=5)
        storage.flatten = True  # lanes, as in stores on disk
        return TensorDictReplayBuffer(storage=storage, sampler=self.make())

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / "run.exp"

    def do(self, act: str, given: Any) -> None:
        getattr(self, act)(*(() if given is None else (given,)))

    def extend(self, batch: Batch) -> None:
        self.rb.extend(self.model.extend(batch), source=batch.source)

    def add(self, batch: Batch) -> None:
        for single in single_rows(batch):
            self.rb.add(self.model.extend(single)[0], source=single.source)

    def empty(self) -> None:
        self.rb.empty()
        self.model.empty()

    def retire(self, part: float) -> None:
        if count := round(part * len(self.model.rows)):
            ids = self.rb.storage.window.ids()
            self.rb.storage.retire(int(ids[count - 1]))
            self.model.retire(count)

    def reopen(self) -> None:
        self.rb.close()
        self.rb = self.open()
        self.model.reopen()

    def killed(self, batch: Batch) -> None:
        """Another process goes on, writes and is killed."""
        self.rb.close()
        self.model.reopen()
        data = [(self.model.extend(part), part.source) for part in (batch, *single_rows(batch)[:3])]
        if (child := os.fork()) == 0:
            try:
                rb = self.open()
                for rows, source in data:
                    rb.extend(rows, source=source)
            except BaseException:
                os._exit(1)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the writer failed before it was killed"
        self.rb = self.open()
        self.model.reopen()

    def load(self) -> None:
        """All rows are replaced by the same ones, with other ids."""
        if self.rb.schema is not None:
            self.versions += 1
            version = self.path.with_name(f"version{self.versions}")
            self.rb.dumps(version)
            self.rb.loads(version)
            self.model.reopen()

    def damage(self, given: tuple[float, int]) -> None:
        """Rows in the middle are given up, as a repair does with rows of damaged blocks."""
        where, count = given
        ids = self.rb.storage.window.ids()[: len(self.model.rows)]
        if ids.size < 3:
            return
        first = min(round(where * ids.size), ids.size - 1)
        lost = ids[first : first + count].tolist()
        self.rb.close()
        manifest = Manifest.load(Disk(), self.path)
        gaps = merge_runs([*manifest.gaps, *((id, id) for id in lost)])
        manifest.replace(gaps=gaps).save(Disk(), self.path)
        self.model.give_up(first, len(lost))
        self.model.reopen()
        self.rb = self.open()


@dataclass
class Scenario:
    """A store, what happens to it, and how slices are drawn."""

    on_disk: bool
    plan: list[tuple[str, Any]]
    capacity: int | None
    fields: Fields
    length: int
    by: str

    @contextmanager
    def begin(self, make: Callable[[], Any]) -> Iterator[World]:
        with tempfile.TemporaryDirectory() as folder:
            world = World(Model(self.capacity, self.fields), make, Path(folder) if self.on_disk else None)
            yield world
            world.rb.close()


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    on_disk = draw(st.booleans())
    return Scenario(
        on_disk,
        draw(st.lists(anywhere | only_on_disk if on_disk else anywhere, min_size=4, max_size=14)),
        draw(st.sampled_from([None, 5, 13, 29, 29])),
        Fields(
            draw(st.booleans()),
            draw(st.sampled_from(["", "is_init", "step_count"])),
            draw(st.booleans()),
        ),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(["trajectory", "start"])),
    )


# -- every slice there is, and no other -------------------------------------------------------------------


def check_all(world: World, length: int, **law: Any) -> None:
    model = world.model
    there = set(model.chances(length, **law))
    assert len(world.rb) == len(model.rows)
    if there:
        live = [row.serial for row in model.rows]
        seen = cover(lambda: world.rb.sample(SLICES * length), live, there, most=MOST)
        assert seen == there, f"never drawn: {there - seen}"
    else:
        what = "Did not find a single trajectory" if model.rows else "Cannot sample from an empty storage"
        with pytest.raises(NotReadyError, match=what):
            world.rb.sample(length)


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


@pytest.mark.parametrize("name", LIVES)
def test_what_is_drawn_does_not_depend_on_how_rows_came(name: str, tmp_path: Path) -> None:
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
