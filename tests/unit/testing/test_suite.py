"""The public test suite fails for faulty storages, in the tests of their faults."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis.stateful import run_state_machine_as_test

from expstore import MemoryStorage, Storage, ZarrStorage
from expstore.core.geometry import RingGeometry
from expstore.core.values import Array, IntArray
from expstore.errors import SchemaError
from expstore.storages.batch import Rows
from expstore.storages.engine.open_settings import Settings
from expstore.testing import StorageSuite
from expstore.testing.assertions import raises, same
from expstore.testing.life import machine_of

pytestmark = pytest.mark.usefixtures("no_syncs")


class WrongRing(RingGeometry):
    """Runs of rows that turn the ring lack their first row in the new lap."""

    def runs(self, first_id: int, count: int) -> list[tuple[int, int, int]]:
        runs = super().runs(first_id, count)
        if len(runs) > 1:
            slot, offset, n = runs[1]
            runs[1] = (max(0, slot - 1), offset + 1, n - 1)
        return runs


class OffByOne(MemoryStorage):
    """Rows at the end of the slots are written one slot too early."""

    def __init__(self, capacity: int | None = None, **options: Any) -> None:
        super().__init__(capacity, **options)
        ring = WrongRing(self.geometry.capacity, self.geometry.ndim)
        self._describe(replace(self.description, geometry=ring))


class Short(MemoryStorage):
    """A full ring has a row less than its capacity."""

    def _append(self, rows: Rows) -> None:
        super()._append(rows)
        if self.window.size == self.capacity and self.capacity > 1:
            self._state.stored = replace(self.window, low=self.window.low + 1)


class Torn(ZarrStorage):
    """One field of the newest row is lost when a store is opened again."""

    def _open(self, *, first: bool) -> None:
        super()._open(first=first)
        self.torn = self.state.columns is not None

    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        found = super().take(slots, places)
        if getattr(self, "torn", False) and places is None:
            found[1] = found[1].copy()
            found[1][slots == slots.max()] = 0
        return found


class Forgetful(ZarrStorage):
    """Priorities are those of new rows when a store is opened again."""

    def _open(self, *, first: bool) -> None:
        super()._open(first=first)
        self.priorities.values[:] = 1.0


class Deaf(MemoryStorage):
    """Says that it changes rows, and does not."""

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        pass


class Silent(MemoryStorage):
    """Changes nothing, and should say so."""

    def change(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        pass


class Neighbourly(MemoryStorage):
    """A priority for a row that has left goes to the one in its place."""

    def set_priorities(self, ids: IntArray, values: Array) -> int:
        here = ids[self.window.holds(ids)]
        self.priorities.values[self.geometry.slot_of(np.abs(ids))] = values
        return int(here.size)


class Open(MemoryStorage):
    """Can be written when it is closed."""

    def writer(self) -> Open:
        return self


class Unlucky(MemoryStorage):
    """Draws by chance, not by its seed."""

    def __init__(self, capacity: int | None = None, *, seed: int = 0, ndim: int = 1) -> None:
        super().__init__(capacity, seed=id(self), ndim=ndim)


class InRam(StorageSuite):
    variable = variable_patches = True
    kind: type[MemoryStorage] = MemoryStorage

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> Storage:
        return self.kind(capacity, ndim=ndim, seed=seed)


class OnDisk(StorageSuite):
    persistent = follows = True
    kind: type[ZarrStorage] = ZarrStorage

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> Storage:
        return self.kind(path, capacity, layout="flat", ndim=ndim, settings=Settings(seed=seed))


def failures(suite: StorageSuite, path: Path, names: Sequence[str]) -> list[str]:
    """Return which of these tests of a suite fail."""
    found = []
    for name in names:
        try:
            getattr(suite, name)(path / name)
        except Exception:
            found.append(name)
    return found


#: A storage, what it declares beside its kind, and the tests that must find its fault.
WRONG: list[tuple[type[Storage], dict[str, Any], str]] = [
    (OffByOne, {}, "rings_and_unbounded_storages patches rows_of_any_length"),
    (Short, {}, "rings_and_unbounded_storages"),
    (Deaf, {}, "patches changes_of_any_length the_best_rows"),
    (Silent, {}, "patches what_does_not_fit_changes_nothing"),
    (Silent, {"patches": False}, "patches"),
    (Silent, {"variable_patches": False}, "changes_of_any_length"),
    (MemoryStorage, {"patches": False}, "patches"),
    (MemoryStorage, {"ranks": False}, "the_best_rows"),
    (MemoryStorage, {"variable": False}, "rows_of_any_length"),
    (MemoryStorage, {"versions": False}, "versions"),
    (MemoryStorage, {"copies": False}, "followers_and_copies"),
    (MemoryStorage, {"late_fields": False}, "fields_come_and_go"),
    (MemoryStorage, {"persistent": True}, "opened_again killed"),
    (Neighbourly, {}, "priorities_belong_to_rows"),
    (Open, {}, "before_the_first_rows_and_after_closing"),
    (Unlucky, {}, "batches_follow_from_the_seed"),
    (ZarrStorage, {"variable": True}, "rows_of_any_length"),
    (ZarrStorage, {"persistent": False}, "opened_again"),
    (Torn, {}, "opened_again killed"),
    (Forgetful, {}, "opened_again killed"),
]


@pytest.mark.slow
@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("kind", "declared", "tests"), WRONG, ids=["-".join([c.__name__, *d]) for c, d, _ in WRONG]
)
def test_a_wrong_storage_fails(
    kind: type[Storage], declared: dict[str, Any], tests: str, tmp_path: Path
) -> None:
    base: type[StorageSuite] = OnDisk if issubclass(kind, ZarrStorage) else InRam
    suite = type("Suite", (base,), {"kind": kind} | declared)()
    names = [f"test_{name}" for name in tests.split()]
    assert failures(suite, tmp_path, names) == names


@pytest.mark.parametrize("kind", [OffByOne, Short, Deaf, Neighbourly])
def test_lives_of_a_wrong_storage_come_to_a_bad_end(kind: type[MemoryStorage], tmp_path: Path) -> None:
    suite: Any = type("Suite", (InRam,), {"kind": kind})()
    settings = hypothesis.settings(
        phases=[hypothesis.Phase.generate], max_examples=40, stateful_step_count=14
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_of(suite, tmp_path), settings=settings)


MODULE = """
from expstore.testing import StorageSuite
from tests.unit.testing.test_suite import InRam, Deaf

class TestRight(InRam):
    pass

class TestWrong(InRam):
    kind = Deaf
"""


@pytest.mark.torture
def test_pytest_finds_the_tests_of_a_subclass_and_no_others(tmp_path: Path) -> None:
    class Told:
        def __init__(self) -> None:
            self.outcomes: dict[str, str] = {}

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call":
                self.outcomes[report.nodeid.split("::", 1)[1]] = report.outcome

    module = tmp_path / "test_mine.py"
    module.write_text(MODULE)
    told = Told()
    code = pytest.main(
        [str(module), "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-k", "patches or changes"],
        plugins=[told],
    )
    assert code == pytest.ExitCode.TESTS_FAILED
    assert told.outcomes == {
        f"{suite}::test_{name}": "failed" if (suite, name) == ("TestWrong", "patches") else "passed"
        for suite in ("TestRight", "TestWrong")
        for name in ("patches", "changes_of_any_length", "what_does_not_fit_changes_nothing")
    }


@pytest.mark.slow
def test_importing_the_suite_loads_no_test_library() -> None:
    code = (
        "import sys, expstore.testing; assert not {'pytest', 'hypothesis'} & sys.modules.keys(), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the suite's own assertions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (1, 2),
        (np.zeros(2, np.int64), np.zeros(2, np.int32)),
        (np.zeros(2), np.zeros((2, 1))),
        (np.array([0.0]), np.array([-0.0])),
        (torch.zeros(2), torch.tensor([0.0, 1e-9])),
        (torch.zeros(2, dtype=torch.bfloat16), -torch.zeros(2, dtype=torch.bfloat16)),
    ],
)
def test_same_reports_differences(found: Any, expected: Any) -> None:
    with pytest.raises(AssertionError, match="the rows"):
        same(found, expected, "the rows")
    same(expected, expected, "the rows")


def test_raises_reports_a_missing_error() -> None:
    with pytest.raises(AssertionError, match="an act: no SchemaError or KeyError"):
        with raises(SchemaError, KeyError, what="an act"):
            pass
    with pytest.raises(ZeroDivisionError):
        with raises(SchemaError, what="an act"):
            raise ZeroDivisionError
