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
from expstore.storages.engine.replace import Updates
from expstore.storages.format.journal import Kind


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


class Engine:
    """What `Updates` needs of an engine; it writes down what it is asked."""

    def __init__(self, slots: int | None) -> None:
        self.acts: list[Any] = []
        self.is_behind, self.fails = False, False
        self.health, self.disk, self.path = Health(Path("run.exp")), Disk(), Path("run.exp")
        self.geometry = RingGeometry(slots)
        self.locks = SimpleNamespace(episodes=contextlib.nullcontext())
        note = self.acts.append
        self.background = SimpleNamespace(note=lambda: note("background"), hurry=lambda: note("hurry"))
        self.shared = SimpleNamespace(
            begin_change=lambda slots: note("begin change"), end_change=lambda: note("end change")
        )
        self.checkpointer = SimpleNamespace(
            release=lambda pin: note(f"release {pin}"), pin=lambda lsn, segment: f"pin {lsn}"
        )
        self.rows = SimpleNamespace(
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

    def checkpoint(self, *_: Any) -> None:
        self.acts.append("checkpoint")
        self.is_behind = False

    def append_synced(self, kind: Kind, body: bytes) -> tuple[int, str]:
        self.acts.append(f"synced {kind.name}")
        return 7, "pin 6"

    def append_record(self, kind: Kind, body: bytes) -> int:
        self.acts.append(kind.name)
        return 7

    def sync_if_durable(self) -> None:
        self.acts.append("sync if durable")


def change(engine: Engine, *, replaces: bool) -> ChangeLog:
    changed = ChangeLog()
    updates = Updates(engine, changed)  # type: ignore[arg-type]
    columns = [np.ones(2, np.float32), np.arange(2)]
    updates.change(np.array([1, 2]), [1, 0], columns, replaces=replaces)
    return changed


@pytest.mark.parametrize("behind", [False, True])
def test_the_record_is_on_the_disk_before_the_columns_change(behind: bool) -> None:
    engine = Engine(8)
    engine.is_behind = behind
    changed = change(engine, replaces=False)
    assert engine.acts == [
        *(["checkpoint"] if behind else []),  # or a power cut could bring the change without its row
        *["synced REDO", "begin change", "columns", "end change", "touched", "release pin 6", "background"],
    ]
    assert changed.since(0) is not None
    assert engine.health.is_sound


def test_a_change_that_fails_stays_pinned_and_hides_the_columns() -> None:
    engine = Engine(None)
    engine.fails = True
    with pytest.raises(InterruptedError):
        change(engine, replaces=True)
    assert engine.acts[-2:] == ["columns", "hide the columns"]
    assert "end change" not in engine.acts
    assert not any(str(act).startswith("release") for act in engine.acts)
    assert engine.health.needs_recovery


def test_rows_that_replace_others_wait_behind_a_pin() -> None:
    engine = Engine(8)
    changed = change(engine, replaces=True)
    assert engine.acts == ["REDO", "sync if durable", "keep, pin 6", "background"]
    assert changed.number == 2
    assert engine.rows.priorities.values[:2].tolist() == [1, 1]
