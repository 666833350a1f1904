"""Random sequences of operations on a storage, compared with the model after every step.

Part of the suite. It needs Hypothesis, which is imported when a state machine is created.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from expstore.testing.buffer_and_model import Life
from expstore.testing.declaration import Declared
from expstore.testing.model import Cell

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

_STEPS = 14


class LifeSuite(Declared):
    """Test a storage with random sequences of operations."""

    def test_any_life(self, tmp_path: Path) -> None:
        """Extends, patches, priorities, draws, `empty`, reopening and kills in any order."""
        import pytest

        hypothesis = pytest.importorskip("hypothesis", reason="the state machine needs Hypothesis")
        from hypothesis.stateful import run_state_machine_as_test

        default = hypothesis.settings.default
        lives = max(2, default.max_examples // 20) if self.lives is None else self.lives
        settings = hypothesis.settings(
            default,
            max_examples=lives,
            stateful_step_count=_STEPS,
            suppress_health_check=list(hypothesis.HealthCheck),
            deadline=None,
        )
        run_state_machine_as_test(machine_of(self, tmp_path), settings=settings)


class _Acts:
    """Operations on a storage and its model; the storage's abilities decide which of them become rules."""

    suite: Declared
    folder: Path
    life: Life

    def begin(self, capacity: int | None) -> None:
        self.life = self.suite.life(self.folder, capacity)
        self.numbers = 1  # trajectory ids; 0 is used by `lap`, and never ends

    def extend(self, cells: list[Cell], source: str | None) -> None:
        self.life.extend(self._name_cells(cells), source)

    def add(self, source: str | None) -> None:
        (cell,) = self._name_cells([Cell()])
        self.life.add(cell, source)

    def lap(self, short: int, beyond: int) -> None:
        self.life.lap(short)
        self.life.extend(1 + short + beyond)

    def prioritise(self, places: set[int], value: float) -> None:
        if self.life.storage.schema is not None:
            self.life.set_priorities({id: value + n for n, id in enumerate(self._ids(places))})

    def patch(self, places: set[int]) -> None:
        if self.life.model.rows:
            self.life.patch(self._ids(places))

    def empty(self) -> None:
        self.life.empty()

    def reopen(self) -> None:
        self.life.reopen()

    def kill(self, batches: list[list[Cell]], source: str | None) -> None:
        self.life.write_and_be_killed([self._name_cells(cells) for cells in batches], source)

    def look(self) -> None:
        self.life.look()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            try:
                self.life.look(episodes=True)
            finally:
                self.life.storage.close()

    def _name_cells(self, cells: list[Cell]) -> list[Cell]:
        """Return cells with trajectory ids that are not reused after the trajectory has ended."""
        found: list[Cell] = []
        ended: set[int] = set()
        for cell in cells:
            if cell.trajectory in ended:
                self.numbers, ended = self.numbers + 3, set()
            found.append(Cell(self.numbers + cell.trajectory, cell.mark))
            if cell.mark:
                ended.add(cell.trajectory)
        self.numbers += 3 if ended else 0
        return found

    def _ids(self, places: set[int]) -> list[int]:
        """Return ids near the oldest readable row; some of them are deleted."""
        first = next(iter(self.life.model.rows), self.life.model.last) - 3
        return [first + place for place in sorted(places)]


def machine_of(suite: Declared, folder: Path) -> type[RuleBasedStateMachine]:
    """Return a state machine that tests the storages of a suite.

    Args:
        suite: Creates the storages and declares what they can do.
        folder: A folder for their files.

    Example:
        >>> from pathlib import Path
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from expstore import MemoryStorage
        >>> from expstore.testing.state_machine import machine_of
        >>> from expstore.testing.suite import StorageSuite
        >>> class TestMine(StorageSuite):
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MemoryStorage(capacity, ndim=ndim, seed=seed)
        >>> few = settings(max_examples=3, deadline=None)
        >>> run_state_machine_as_test(machine_of(TestMine(), Path(".")), settings=few)
    """
    from hypothesis import stateful
    from hypothesis import strategies as st

    marks = st.sampled_from(["", "", "", "t", "T"])
    cells = st.lists(st.builds(Cell, st.integers(0, 2), marks), min_size=1, max_size=30)
    places, values = st.sets(st.integers(0, 24), min_size=1, max_size=6), st.floats(0, 8, width=32)
    source, rule = st.sampled_from([None, "a", "b"]), stateful.rule
    rules: dict[str, Any] = {
        "suite": suite,
        "folder": folder,
        "begin": stateful.initialize(capacity=st.sampled_from([None, 1, 7, 20, 20]))(_Acts.begin),
        "extend": rule(cells=cells, source=source)(_Acts.extend),
        "add": rule(source=source)(_Acts.add),
        "lap": rule(short=st.integers(0, 9), beyond=st.integers(0, 15))(_Acts.lap),
        "prioritise": rule(places=places, value=values)(_Acts.prioritise),
        "empty": rule()(_Acts.empty),
        "look": stateful.invariant()(_Acts.look),
    }
    if suite.patches:
        rules["patch"] = rule(places=places)(_Acts.patch)
    if suite.persistent:
        batches = st.lists(cells, min_size=1, max_size=3)
        rules["reopen"] = rule()(_Acts.reopen)
        rules["kill"] = rule(batches=batches, source=source)(_Acts.kill)
    return type("Machine", (_Acts, stateful.RuleBasedStateMachine), rules)
