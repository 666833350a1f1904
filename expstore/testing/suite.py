"""The test suite for a storage. Users subclass it."""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import (
    LockedError,
    NoRowError,
    NotFoundError,
    NotReadyError,
    PriorityError,
    SchemaError,
    SnapshotError,
    StateError,
)
from expstore.maintenance import verify
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import DTYPES, OBJECT
from expstore.storages.follower import FollowerStorage
from expstore.storages.read_view import ReadView
from expstore.testing.assertions import expect, raises, same
from expstore.testing.life import Life, machine_of
from expstore.testing.model import Cell
from expstore.testing.model_rows import check_rows, make_batch, patch_of
from expstore.testing.variable_length import (
    RAGGED_SCHEMA,
    check_ragged_rows,
    put_ragged_rows,
    ragged_columns,
    ragged_value,
)
from expstore.writers.writers import TensorDictMaxValueWriter

_ROUNDS, _STEPS = 150, 14

#: Capacity, and numbers of rows that are written one extend after another.
_EXTENDS: list[tuple[int | None, tuple[int, ...]]] = [
    (1, (1, 2, 3, 1)),
    (7, (1, 2, 3, 1, 7, 1, 6, 5, 2)),
    (20, (1, 2, 3, 1, 20, 1, 19, 5, 2)),
    (None, (3, 1, 5000, 2, 9000)),
]
#: Rows that are written when a ring of 20 rows is so many rows short of the end of its slots.
_ENDS = [(short, counts) for short in (0, 1, 7) for counts in ((1, 1, 20), (19, 2), (30,))]
#: Two interleaved trajectories, then a third one.
_CELLS = [Cell(1), Cell(2), Cell(1), Cell(2, "t"), Cell(1), Cell(1, "T"), Cell(3), Cell(3)]


class StorageSuite(ABC):
    """Test what buffers rely on: rows, rings, episodes, draws, priorities, and what outlives a process.

    Subclass it in a test module, under a name that pytest collects. Implement `make` and declare what the
    storage can do. The storage must refuse everything else with an error of expstore; the suite tests that
    too. Tests need only pytest's `tmp_path`, so they can also be called by hand. The state machine test is
    skipped if Hypothesis is not installed.

    Processes: persistent storages are opened in forked children, which are killed. Threads: two read while
    one writes.

    Example:
        >>> from expstore.testing.suite import StorageSuite
        >>> class TestMine(StorageSuite):
        ...     persistent = True  # `make` with the same path finds the rows again
        ...     patches = False  # rb[i] = rows is refused
        ...
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MyStorage(path / "rows", capacity, ndim=ndim, seed=seed)
    """

    #: Whether rows survive the end of the process and a kill: `make` with the same path finds them.
    persistent = False
    #: Whether readers can follow while one process writes; otherwise a copy of a buffer has its own rows.
    follows = False
    #: Whether fixed-size fields of stored rows can be changed.
    patches = True
    #: Whether the storage can keep the best rows instead of the newest.
    ranks = True
    #: Whether fields may be of variable length, and whether such fields can be changed.
    variable = False
    variable_patches = False
    #: Whether fields can be added and dropped while the storage has rows.
    late_fields = True
    #: Whether a copy of a buffer, pickled or in another process, has the rows; otherwise copying is refused.
    copies = True
    #: Whether snapshots can be loaded. Every storage without object fields can be dumped.
    versions = True
    #: Number of runs of the state machine; None for a twentieth of the Hypothesis profile's `max_examples`.
    lives: int | None = None

    _lives_made = 0

    @abstractmethod
    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> ReadView:
        """Create a storage, or open the persistent one in the folder.

        Args:
            path: A folder for the storage; it may not exist yet.
            capacity: Maximum number of readable rows; None for an unbounded storage.
            ndim: Number of dims of a batch that index rows.
            seed: Seed of the draws.
        """

    def follow(self, storage: ReadView) -> ReadView:
        """Return a storage that reads what another one writes, as a reader in another process would."""
        if storage.path is None:
            raise NotImplementedError(f"override follow() to return a reader of a {type(storage).__name__}")
        return FollowerStorage(storage.path)

    def verify(self, storage: ReadView) -> Sequence[object]:
        """Return the problems that a check of a closed storage's files finds."""
        return [] if storage.path is None else verify(storage.path)

    def life(self, path: Path, capacity: int | None = 20, **options: Any) -> Life:
        """Return a buffer over a new storage, with its model.

        Args:
            path: Folder of the test.
            capacity: Maximum number of readable rows; None for an unbounded storage.
            options: Further arguments of `Life`.
        """
        self._lives_made += 1
        return Life(self, path / f"life{self._lives_made}", capacity, **options)

    # -- any operations --------------------------------------------------------------------------

    def test_any_life(self, tmp_path: Path) -> None:
        """Extends, patches, priorities, draws, `empty`, reopening and kills in any order."""
        import pytest

        hypothesis = pytest.importorskip("hypothesis", reason="the state machine needs Hypothesis")
        from hypothesis.stateful import run_state_machine_as_test

        default = hypothesis.settings.default
        settings = hypothesis.settings(
            default,
            max_examples=max(2, default.max_examples // 20) if self.lives is None else self.lives,
            stateful_step_count=_STEPS,
            suppress_health_check=list(hypothesis.HealthCheck),
            deadline=None,
        )
        run_state_machine_as_test(machine_of(self, tmp_path), settings=settings)

    # -- rows ------------------------------------------------------------------------------------

    def test_rings_and_unbounded_storages(self, tmp_path: Path) -> None:
        """Batches of any length are kept up to the capacity, across the end of the slots, and single rows."""
        for capacity, counts in _EXTENDS:
            with self.life(tmp_path, capacity) as life:
                life.compare()
                for count in counts:
                    life.extend(count)
                    life.compare()
                life.add()
                life.compare(episodes=True)
        with self.life(tmp_path) as life:
            life.add()
            for short, counts in _ENDS:
                life.lap(short)
                for count in counts:
                    life.compare()
                    life.extend(count)
                life.add()
                life.compare()
            spare, slots = life.storage.geometry.spare, life.storage.geometry.slots or 0
            for count in (spare - 1, spare, spare + 1, slots - 1, slots, slots + 1, 2 * slots + 3):
                life.extend(count)
                life.compare()
                life.extend(2)
                life.compare()

    def test_time_and_lanes(self, tmp_path: Path) -> None:
        """With two dims every cell is a row, lanes have their own episodes, and whole steps are evicted."""
        with self.life(tmp_path, 24, lanes=3) as life:
            for steps in (1, 2, 5, 3, 8, 9, 1):
                life.extend(steps)
                life.compare()
            life.lap(3)
            life.extend(3)
            life.compare(episodes=True)
            same(tuple(life.rb[:].shape), (3, 8), "the shape of all rows")
        with self.life(tmp_path, 24, lanes=2, trajectories=False) as life:
            for marks in ("..t.", "..", "T..t..", "." * 20):
                cells = [Cell(0, mark.strip(".")) for mark in marks]
                life.extend(cells, "w" if len(marks) == 6 else None)
                life.compare(episodes=True)

    def test_streams_and_trajectories(self, tmp_path: Path) -> None:
        """Sources continue across batches, and trajectories within sources; each ends independently."""
        with self.life(tmp_path) as life:
            for first in (0, 20):

                def name_cells(cells: Sequence[Cell], first: int = first) -> list[Cell]:
                    return [Cell(first + cell.trajectory, cell.mark) for cell in cells]

                life.extend(name_cells(_CELLS), "a")
                life.extend(name_cells([Cell(7), Cell(7), Cell(8, "t")]), "b")
                life.add(Cell(first + 9))
                life.extend(name_cells([Cell(3), Cell(4), Cell(3, "t")]), "a")
                life.extend(name_cells([Cell(7), Cell(9), Cell(7)]), "b")
                life.extend(name_cells([Cell(9)] * 4 + [Cell(9, "T")]))
                life.compare(episodes=True)
            row = life.model.live[-1]
            rows = [one for one in life.model.live if one.episode == row.episode]
            check_rows(life.rb.trajectory(row.episode), rows, "a trajectory")
            with raises(NotFoundError, what="a trajectory whose rows were overwritten"):
                life.rb.trajectory(1)

    def test_every_dtype(self, tmp_path: Path) -> None:
        """Values are kept bit by bit: infinities, several NaNs, negative zeros."""
        rng = np.random.default_rng(7)
        bits = {
            name: rng.integers(0, 2 if name == "bool" else 256, (41, 3, dtype.itemsize), np.uint8)
            for name, dtype in DTYPES.items()
            if name != OBJECT
        }
        storage = self.make(tmp_path / "bits", 20, ndim=1, seed=1)
        with ReplayBuffer(storage=storage, batch_size=4) as rb:
            for start, count in ((0, 1), (1, 7), (8, 13), (21, 20)):
                batch = TensorDict({}, [count])
                for name, column in bits.items():
                    batch[name] = _tensor(name, column[start : start + count])
                rb.extend(batch)
                ids = storage.window.ids()
                for name, column in bits.items():
                    (found,) = storage.read(ids, [storage.require_schema().place_of((name,))])
                    expected = np.ascontiguousarray(column[ids - 1]).view(DTYPES[name]).reshape(-1, 3)
                    same(found, expected, f"rows of {name}")
                    expect(rb[:][name].dtype == batch[name].dtype, f"{name} has another dtype after reading")

    def test_rows_are_never_torn(self, tmp_path: Path) -> None:
        """While the ring is overwritten, other threads sample whole rows."""
        with self.life(tmp_path) as life:
            life.extend(20)
            stop, problems, drawn = threading.Event(), list[BaseException](), [0, 0]

            def draw(number: int) -> None:
                try:
                    while not stop.is_set():
                        _check_whole(life.rb.sample(16))
                        drawn[number] += 1
                except BaseException as exc:
                    problems.append(exc)
                    stop.set()

            readers = [threading.Thread(target=draw, args=(number,)) for number in range(2)]
            for reader in readers:
                reader.start()
            rounds = 0
            while not stop.is_set() and (rounds < _ROUNDS or min(drawn) < 30):
                rounds += 1
                life.extend(1 + rounds * 37 % 900)
            stop.set()
            for reader in readers:
                reader.join()
            if problems:
                raise problems[0]
            life.compare()

    # -- draws and priorities --------------------------------------------------------------------

    def test_batches_follow_from_the_seed(self, tmp_path: Path) -> None:
        """Two storages with one seed sample the same batches, after reopening and after a kill, too."""
        for sampler in (None, lambda: PrioritizedSampler(None, 0.8, 0.5)):
            with (
                self.life(tmp_path, sampler=sampler) as one,
                self.life(tmp_path, sampler=sampler) as two,
                self.life(tmp_path, sampler=sampler, seed=6) as other,
            ):
                for life in (one, two, other):
                    expect(not life.rb.can_sample(), "can_sample() is true without rows")
                    with raises(NotReadyError, what="a sample without rows"):
                        life.rb.sample()
                    life.extend(28)
                    life.set_priorities({10: 4.0, 20: 0.5})
                expected = [_draw(two) for _ in range(4)]
                expect(_draw(other) != expected[0], "storages with different seeds sample the same batches")
                same(_draw(one), expected[0], "batches of two storages with the same seed")
                if self.persistent:
                    one.reopen()
                    same(_draw(one), expected[1], "the batch after opening again")
                    one.rb.flush()
                    one.kill(lambda life=one: _draw(life))  # type: ignore[misc]
                    same(_draw(one), expected[3], "the batch after a kill")

    def test_priorities_belong_to_rows(self, tmp_path: Path) -> None:
        """New rows get the largest priority so far; deleted rows get none, and invalid ones are refused."""
        for capacity in (20, None):
            with self.life(tmp_path, capacity) as life:
                life.extend(8)
                life.set_priorities({1: 2.5, 4: 0.25, 8: 0.0, 9: 7.0, 0: 7.0, -3: 7.0})
                life.extend(18)
                life.set_priorities({1: 9.0, 6: 9.0, 7: 3.0, 26: 0.5})
                life.compare()
                for bad in (-1.0, math.nan, math.inf, 1e39):
                    with raises(PriorityError, what=f"the priority {bad}"):
                        life.rb.update_priority(id=[10, 11, 12], priority=[5.0, bad, 6.0])
                life.extend(5000)  # an unbounded storage grows
                life.compare()

    # -- changes ---------------------------------------------------------------------------------

    def test_patches(self, tmp_path: Path) -> None:
        """Fields change in all rows that are named, and in no row that reuses their slots."""
        for capacity in (20, None):
            with self.life(tmp_path, capacity) as life:
                life.extend(12)
                life.extend(14)
                if not self.patches:
                    _cannot_change(life)
                    continue
                ids = life.ids.tolist()
                life.patch([ids[0], ids[7], 10**6, 0, -1, ids[-1]])
                life.compare()
                life.patch(ids[3:])
                life.lap(2)
                life.extend(7)
                life.patch([1, *life.ids.tolist()[::3]])
                life.compare()
                model, rb = life.model, life.rb
                chosen = model.by_index[1:6:2]
                rb[[model.index_of(row.id) for row in chosen]] = make_batch(
                    model.change(row.id for row in chosen)
                )
                (row,) = model.change([model.by_index[4].id])
                for name, values in patch_of([row]).items():
                    rb.set_at_(name, values[0], model.index_of(row.id))
                life.compare()

    def test_what_does_not_fit_changes_nothing(self, tmp_path: Path) -> None:
        """`extend`, `add` and patches refuse invalid rows whole, also after the ring has wrapped."""
        with self.life(tmp_path) as life:
            life.extend(3)
            for count in (30, 5):
                for what, spoil in _SPOILT.items():
                    for act in (life.rb.extend, lambda batch: life.rb.add(batch[0])):
                        with raises(SchemaError, what=f"a batch with {what}"):
                            act(spoil(make_batch(life.model.live[:3])))
                life.compare()
                life.extend(count)
            ids, rb = torch.from_numpy(life.ids[3:5]), life.rb
            for wrong in ({"value": torch.zeros(3)}, {"pixels": torch.zeros(2, 48)}, {"value": ["a", "b"]}):
                with raises(SchemaError, what=f"the patch {wrong}"):
                    rb.update_if_present(id=ids, patch=patch_of(life.model.live[4:6]) | wrong)
            with raises(NotFoundError, what="a patch of an unknown field"):
                rb.update_if_present(id=ids, patch={"no_such_field": torch.zeros(2)})
            with raises(NoRowError, what="a change of an unknown row"):
                rb.set_at_("value", 0.0, [3, 20])
            with raises(NotFoundError, SchemaError, what="a change of overwritten rows"):
                life.storage.writer().change(np.array([2, 9]), [0], [np.zeros(2, np.int64)])
            life.compare()

    def test_the_best_rows(self, tmp_path: Path) -> None:
        """In a full storage a better row replaces the worst one, in its slot."""
        with self.life(tmp_path, 8, writer=lambda: TensorDictMaxValueWriter("value")) as life:
            batch = life.batch(life.model.extend([Cell()] * 60))
            scores = torch.from_numpy(np.random.default_rng(3).permutation(60).astype(np.float64))
            batch["value"] = scores
            if not self.ranks:
                for part in (batch[:5], batch[:20]):
                    with raises(StateError, SchemaError, what="a writer that keeps the best rows"):
                        life.rb.extend(part)
                    same(len(life.rb), 0, "rows after a refused write")
                return
            seen = 0
            for count in (3, 5, 1, 30, 1, 20):
                life.rb.extend(batch[seen : seen + count])
                seen += count
                best = scores[:seen].topk(min(seen, 8)).values.tolist()
                found = life.rb[:]
                same(sorted(found["value"].tolist(), reverse=True), best, "the best rows")
                same(found["value"], scores[found["number"]], "whole rows")
            if self.persistent:
                life.reopen()
                found = life.rb[:]["value"]
                same(sorted(found.tolist(), reverse=True), best, "the best rows after reopening")

    def test_fields_come_and_go(self, tmp_path: Path) -> None:
        """An added field is in all rows, also later ones, and the other fields stay; or adding raises."""
        with self.life(tmp_path) as life:
            life.extend(25)
            rb = life.rb
            acts: list[Callable[[], Any]] = [
                lambda: rb.columns.add("score", sql="number * 2", dtype=torch.int64, default=-1),
                lambda: rb.columns.drop("observation"),
            ]
            if not self.late_fields:
                for act in acts:
                    with raises(StateError, SchemaError, what="adding or dropping a field"):
                        act()
                life.compare()
                return
            acts[0]()
            found = rb[:]
            same(found["score"], found["number"] * 2, "an added field")
            life.lap(1)
            life.extend(23)
            life.compare()
            same(set(rb[:]["score"].tolist()), {-1}, "the added field in later rows")
            rb.columns.drop("score")
            life.compare()
            if self.persistent:
                life.reopen()
                life.compare()
            expect(life.rb[:].get("score") is None, "a dropped field is still there")

    def test_before_the_first_rows_and_after_closing(self, tmp_path: Path) -> None:
        """A storage without rows has no fields and reads none; a closed one refuses everything."""
        with self.life(tmp_path) as life:
            rb, storage = life.rb, life.storage
            expect(storage.schema is None, "a new storage has fields")
            for ask in (storage.require_schema, lambda: storage.read(np.array([1])), lambda: rb[0]):
                with raises(StateError, NotFoundError, what="reading before the first rows"):
                    ask()
            storage.writer().clear()
            storage.writer().sync()
            same(storage.writer().set_priorities(np.array([1]), np.ones(1)), 0, "priorities that were set")
            life.extend(5)
            life.compare()
            batch = make_batch(life.model.live)
            rb.close()
            rb.close()
            acts: dict[str, Callable[[], Any]] = {
                "extend": lambda: rb.extend(batch),
                "add": lambda: rb.add(batch[0]),
                "empty": rb.empty,
                "[]=": lambda: rb.__setitem__(0, batch[0]),
                "[]": lambda: rb[0],
                "flush": rb.flush,
                "update_priority": lambda: rb.update_priority(id=[1], priority=1.0),
                "clear": lambda: storage.writer().clear(),
                "change": lambda: storage.writer().change(np.array([1]), [0], [np.zeros(1, np.int64)]),
                "dumps": lambda: rb.dumps(life.path / "versions"),
            }
            for name, act in acts.items():
                with raises(StateError, what=f"{name} on a closed storage"):
                    act()
            expect(storage.closed and not storage.can_write, "can_write is true in a closed storage")

    # -- other handles ---------------------------------------------------------------------------

    def test_opened_again(self, tmp_path: Path) -> None:
        """A reopened storage is unchanged in every phase of a ring; a storage in RAM starts empty."""
        if not self.persistent:
            with self.life(tmp_path) as life:
                life.extend(7)
                with life.begin() as other:
                    same((len(other), other.storage.last), (0, 0), "rows of another storage in RAM")
            return
        for capacity in (20, None):
            with self.life(tmp_path, capacity) as life:
                life.reopen()
                for count in (3, 5, 30):
                    life.extend(count, "a" if count < 30 else None)
                    life.set_priorities({life.model.last: 0.5 + count})
                    life.reopen()
                    life.compare()
                with raises(LockedError, what="a second writer"):
                    life.begin()
                life.lap(3)
                life.extend(9)
                life.reopen()
                life.compare(episodes=True)
                life.empty()
                life.reopen()
                life.compare()
                life.add()
                self._check_files(life)
                life.compare(episodes=True)

    def test_killed(self, tmp_path: Path) -> None:
        """Rows, patches and `empty` survive a kill in every phase of a ring; priorities after a flush."""
        if not self.persistent:
            return  # `test_opened_again` covers storages in RAM
        with self.life(tmp_path) as life:
            for plan in ([3], [1, 14, 1], [9, 30, 2]):
                life.write_and_be_killed(*([Cell()] * count for count in plan), source="a")
                life.compare()
            life.lap(5)
            life.write_and_be_killed([Cell(1), Cell(1, "t"), Cell(2)], [Cell(2)] * 6)
            life.compare(episodes=True)
            ids = life.ids.tolist()
            priorities = {id: 0.25 * id for id in ids[2:7]}

            def change() -> None:
                life.set_priorities(priorities)
                life.rb.flush()
                if self.patches:
                    life.patch(ids[4:15:3])

            life.kill(change)
            life.model.set_priorities(priorities)
            life.model.change(ids[4:15:3] if self.patches else [])
            life.model.reopen()
            life.compare()
            self._check_files(life)
            life.kill(lambda: life.rb.empty())
            life.model.empty()
            life.model.reopen()
            life.compare(episodes=True)

    def _check_files(self, life: Life) -> None:
        """Close a storage, check its files with `verify`, and open it again."""
        storage = life.storage
        life.rb.close()
        same(list(self.verify(storage)), [], "what verify finds")
        life.rb = life.begin()
        life.model.reopen()

    def test_followers_and_copies(self, tmp_path: Path) -> None:
        """Followers see only whole committed rows, also without a writer; other copies are independent."""
        with self.life(tmp_path) as life:
            life.extend(6)
            if not self.follows:
                self._check_copies(life)
                return
            storage = self.follow(life.storage)
            with TensorDictReplayBuffer(storage=storage, batch_size=6) as reader:
                for count in (9, 1, 40):
                    life.extend(count, "a")
                    life.set_priorities({life.model.last: float(count)})
                    if self.patches:
                        life.patch([life.model.last, life.model.last - 1])
                    _compare_reader(life, reader)
                life.lap(2)
                life.extend(12)
                _compare_reader(life, reader)
                life.empty()
                life.extend(4)
                _compare_reader(life, reader)
                batch = make_batch(life.model.live)
                for act in (lambda: reader.extend(batch), reader.empty, lambda: storage.writer().clear()):
                    with raises(StateError, what="a change by a follower"):
                        act()
                life.rb.close()
                life.model.reopen()
                reader.refresh()
                life.compare_rows(reader)
                life.rb = life.begin()

    def _check_copies(self, life: Life) -> None:
        if not self.copies:
            with raises(StateError, what="a copy of the buffer"):
                copy.deepcopy(life.rb)
            return
        with copy.deepcopy(life.rb) as other:
            rows = life.model.live
            life.extend(9)
            check_rows(other[:], rows, "a copy's rows after the original was extended")
            other.extend(make_batch(rows))
            other.empty()
            life.compare()

    def test_versions(self, tmp_path: Path) -> None:
        """A snapshot contains the storage as it was; `loads` replaces the content with it."""
        with self.life(tmp_path) as life, self.life(tmp_path) as other:
            folder = tmp_path / "versions"
            life.extend(5)
            if not self.versions:
                with raises(SnapshotError, StateError, NotFoundError, what="loads of a snapshot"):
                    life.rb.dumps(folder)
                    life.rb.loads(folder)
                life.compare()
                return
            for count in (3, 30, 4100):
                life.extend(count)
                life.set_priorities({life.model.last: 2.0 + count})
                if self.patches:
                    life.patch([life.model.last - 1])
                same(life.rb.dumps(folder).rows, len(life.model.rows), "rows of a snapshot")
                life.model.dumps()
            life.extend(11)
            for number in (2, 1, 3):
                life.rb.loads(folder, number)
                life.model = life.model.loads(number, life.storage.last)
                life.compare()
            with raises(SnapshotError, what="a snapshot that does not exist"):
                life.rb.loads(folder, 17)
            other.rb.loads(folder, 1)
            rows = life.model.versions[1].live
            check_rows(other.rb[:], rows, "loads into a new storage")

    # -- rows of any length ------------------------------------------------------------------------

    def test_rows_of_any_length(self, tmp_path: Path) -> None:
        """Rows are read as they were written, in a ring and unbounded, by followers and new handles."""
        if not self.variable:
            storage = self.make(tmp_path / "refused", 20, ndim=1, seed=2)
            with raises(SchemaError, what="a variable-length field"):
                storage.writer().prepare(RAGGED_SCHEMA, find_keys(RAGGED_SCHEMA))
            same(storage.schema, None, "the schema after a refused one")
            storage.close()
            return
        for capacity in (20, None):
            path = tmp_path / f"{capacity}"
            with self._ragged(path, capacity) as storage:
                for count in (1, 4, 20, 7, 30, 2, 1):
                    put_ragged_rows(storage, count)
                    check_ragged_rows(storage, storage.window.ids())
                slots = storage.geometry.slots
                put_ragged_rows(storage, (-storage.last % slots if slots else 5000) + 3)
                put_ragged_rows(storage, 9)
                ids = storage.window.ids()
                check_ragged_rows(storage, ids[-20:])
                check_ragged_rows(storage, ids[[-1, -3, -3, 0]])
                check_ragged_rows(storage, ids[:0])
                storage.writer().clear()
                put_ragged_rows(storage, 5)
                ids = storage.window.ids()
                check_ragged_rows(storage, ids)
                if self.follows:
                    storage.writer().sync()
                    reader = self.follow(storage)
                    check_ragged_rows(reader, ids)
                    reader.close()
            if self.persistent:
                same(list(self.verify(storage)), [], "what verify finds")
                with self._ragged(path, capacity) as storage:
                    check_ragged_rows(storage, ids)
                    put_ragged_rows(storage, 4)
                    check_ragged_rows(storage, storage.window.ids())

    def test_changes_of_any_length(self, tmp_path: Path) -> None:
        """SQL reads rows; replacing them by longer or shorter ones works, or raises an error."""
        if not self.variable:
            return  # `test_rows_of_any_length` checks that such rows are refused
        with self._ragged(tmp_path / "s", 20) as storage:
            ids = put_ragged_rows(storage, 25)[-20:]
            found = ReplayBuffer(storage=storage, batch_size=2).sql(
                "SELECT _id, text, len(tokens) FROM transitions ORDER BY _id"
            )
            expected = [
                (id, ragged_value("text", id * 1000), len(ragged_value("tokens", id * 1000)))
                for id in ids.tolist()
            ]
            same(found.fetchall(), expected, "variable-length rows in SQL")
            places, chosen = range(len(RAGGED_SCHEMA.fields)), ids[[2, 7, 19]]
            if not self.variable_patches:
                with raises(SchemaError, StateError, what="a change of variable-length rows"):
                    storage.writer().change(chosen, places, ragged_columns(chosen, 7))
                check_ragged_rows(storage, ids)
                return
            storage.writer().change(chosen, places, ragged_columns(chosen, 7))
            check_ragged_rows(storage, chosen, 7)
            check_ragged_rows(storage, np.setdiff1d(ids, chosen))

    @contextmanager
    def _ragged(self, path: Path, capacity: int | None) -> Iterator[ReadView]:
        """Open a storage of variable-length rows."""
        storage = self.make(path, capacity, ndim=1, seed=2)
        try:
            if storage.schema is None:
                storage.writer().prepare(RAGGED_SCHEMA, find_keys(RAGGED_SCHEMA))
            yield storage
        finally:
            storage.close()


def _draw(life: Life) -> list[int]:
    """Return the row numbers of a batch."""
    numbers: list[int] = life.rb.sample(16)["number"].tolist()
    return numbers


def _compare_reader(life: Life, reader: TensorDictReplayBuffer) -> None:
    """Compare a follower with the model; fail if it does not see the newest row."""
    life.rb.flush()
    reader.refresh()
    life.compare(reader, episodes=True)


def _check_whole(batch: TensorDict) -> None:
    """Check each row: all its fields follow from its number."""
    number = batch["number"]
    same(batch["value"], number.double() * 125, "value of a sampled row")
    same(batch["observation"][:, 1], number.float() + 1 / 8, "observation of a sampled row")
    pixels = (number[:, None] * 31_000 + torch.arange(batch["pixels"].shape[1])) % 251
    same(batch["pixels"], pixels.to(torch.uint8), "pixels of a sampled row")


def _tensor(name: str, column: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
    values = np.ascontiguousarray(column).view(DTYPES[name]).reshape(-1, 3)
    if name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _cannot_change(life: Life) -> None:
    """Check that every way of changing rows raises an error and changes nothing."""
    rb, ids = life.rb, torch.from_numpy(life.ids[:2])
    patch, rows = patch_of(life.model.live[5:7]), make_batch(life.model.live[5:7])
    places = [life.storage.require_schema().place_of(("value",))]
    acts: dict[str, Callable[[], Any]] = {
        "update_if_present": lambda: rb.update_if_present(id=ids, patch=patch),
        "set_at_": lambda: rb.set_at_("value", 7.0, [0, 1]),
        "[]=": lambda: rb.__setitem__([0, 1], rows),
        "change": lambda: life.storage.writer().change(life.ids[:2], places, [np.zeros(2)]),
    }
    for name, act in acts.items():
        with raises(SchemaError, StateError, what=f"{name} on a storage whose rows cannot be changed"):
            act()
    life.compare()


_SPOILT: dict[str, Callable[[Any], Any]] = {
    "a missing field": lambda batch: batch.exclude("value"),
    "an unknown field": lambda batch: batch.set("more", torch.zeros(len(batch))),
    "a field of another dtype": lambda batch: batch.set("pixels", batch["pixels"].long()),
    "a field of another shape": lambda batch: batch.set("pixels", batch["pixels"][:, :-1]),
    "objects instead of numbers": lambda batch: batch.set_non_tensor("value", "text"),
}
