"""Order of operations of a change, with fakes: record, then columns; and the state after a failure."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from expstore.core.change_log import ChangeLog
from expstore.core.geometry import RingGeometry
from expstore.disk.files import Disk
from expstore.storages.engine.health import Health
from expstore.storages.engine.store import Store


class Replaced:
    """Rows that wait in memory: none."""

    waiting_bytes = 0

    def __init__(self, acts: list[Any]) -> None:
        self._acts = acts

    def __bool__(self) -> bool:
        return False

    def add(self, slots: Any, columns: Any, make_batch: Any) -> None:
        self._acts.append(f"keep, {make_batch().pin}")

    def fail(self, *_: Any) -> None:
        self._acts.append("hide the columns")


class Recording(Store):
    """A store that was not opened; it writes down what it does."""

    def __init__(self, slots: int | None) -> None:
        self.acts: list[Any] = []
        note = self.acts.append
        held: Any = SimpleNamespace(held=True, is_in_place=True)
        self.health, self.disk, self.path = Health(Path("run.exp"), held), Disk(), Path("run.exp")
        self.geometry, self.changes, self.fails = RingGeometry(slots), ChangeLog(), False
        parts: Any = self
        parts.locks = SimpleNamespace(episodes=contextlib.nullcontext())
        parts.snapshot_pin = SimpleNamespace(wait=lambda: None)
        parts.background = SimpleNamespace(
            note=lambda: note("background"), hurry=lambda: note("hurry"), running=False
        )
        parts.shared = SimpleNamespace(
            begin_change=lambda slots: note("begin change"), end_change=lambda: note("end change")
        )
        parts.checkpoints = SimpleNamespace(
            covered=5,
            release=lambda pin: note(f"release {pin}"),
            pin=lambda lsn, segment: f"pin {lsn}",
            append_record=lambda store, kind, body: note(kind.name) or 7,
            append_synced=lambda store, kind, body: (7, note(f"synced {kind.name}") or "pin 6"),
            durable=True,
            sync_record=lambda journal: note("sync the record"),
        )
        parts._state = SimpleNamespace(
            columns=None,
            last=5,
            journal=SimpleNamespace(sequence=6, sync_files=lambda: ["000001"]),
            memtable=SimpleNamespace(replaced=Replaced(self.acts)),
            priorities=SimpleNamespace(
                lock=contextlib.nullcontext(), values=np.ones(8, np.float32), note_changed=lambda slots: None
            ),
            overwrite=self._overwrite,
            note_touched=lambda files, slots: note("touched"),
        )

    def _overwrite(self, *_: Any) -> set[Any]:
        self.acts.append("columns")
        if self.fails:
            raise InterruptedError
        return set()

    def sync(self) -> None:
        self.acts.append("checkpoint")


def change(store: Recording, *, replaces: bool) -> None:
    columns = [np.ones(2, np.float32), np.arange(2)]
    store._change(np.array([1, 2]), [1, 0], columns, replaces=replaces)


@pytest.mark.parametrize("behind", [False, True])
def test_the_record_is_on_the_disk_before_the_columns_change(behind: bool) -> None:
    store = Recording(8)
    store.state.last += behind
    change(store, replaces=False)
    assert store.acts == [
        *(["checkpoint"] if behind else []),  # or a power cut could bring the change without its row
        *["synced REDO", "begin change", "columns", "end change", "touched", "release pin 6", "background"],
    ]
    assert store.changes.since(0) is not None
    assert store.health.is_sound


def test_a_change_that_fails_stays_pinned_and_hides_the_columns() -> None:
    store = Recording(None)
    store.fails = True
    with pytest.raises(InterruptedError):
        change(store, replaces=True)
    assert store.acts[-2:] == ["columns", "hide the columns"]
    assert "end change" not in store.acts
    assert not any(str(act).startswith("release") for act in store.acts)
    assert store.health.needs_recovery


def test_rows_that_replace_others_wait_behind_a_pin() -> None:
    store = Recording(8)
    change(store, replaces=True)
    assert store.acts == ["REDO", "sync the record", "keep, pin 6", "background"]
    assert store.changes.number == 2
    assert store.state.priorities.values[:2].tolist() == [1, 1]
