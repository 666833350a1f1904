"""Checkpoints of a store with recording parts: order, pins, failures, and repeated notifications."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expstore.core.counters import Counters
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry
from expstore.core.id_set import NO_IDS
from expstore.core.lock_order import LockOrder
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.errors import StateError, StorageError
from expstore.storages.engine.checkpointer import Checkpointer
from expstore.storages.engine.health import Health
from expstore.storages.format.journal import Kind
from expstore.storages.format.records import Mark
from expstore.storages.read_view import Locks

Acts = list[str]


class File:
    def __init__(self, name: str) -> None:
        self.name = name


class Disk:
    """Notes what is synced; fails when told."""

    def __init__(self, acts: Acts) -> None:
        self.acts, self.failure = acts, None

    def sync_all(self, files: Any, folders: Any, pool: Any) -> None:
        names = sorted(file.name for file in files)
        if self.failure is not None and "part" in names:
            raise self.failure
        self.acts.append(f"sync {' '.join(names)}")


class Journal:
    folder = Path("journal")

    def __init__(self, store: Store) -> None:
        self.sequence, self.segments, self.cuts = 1, [File("segment-1")], []
        self.append = store.record
        self.fits = lambda size: True

    @property
    def rotated(self) -> bool:
        return len(self.segments) > 1

    def sync_files(self) -> list[Any]:
        return list(self.segments)

    def cut(self, keep: Any) -> None:
        self.cuts.append(keep.name)
        self.segments = [keep]


class Part(Checkpointed):
    def __init__(self, acts: Acts) -> None:
        self.acts, self.dirty = acts, True

    def flush(self) -> None:
        self.acts.append("flush")

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        self.acts.append(f"begin {checkpoint.lsn}")
        dirty, self.dirty = self.dirty, False
        return Dirty({File("part")} if dirty else set())  # type: ignore[arg-type]

    def prepare(self, checkpoint: Checkpoint) -> None:
        self.acts.append("prepare")

    def synced(self) -> None:
        self.acts.append("synced")

    def completed(self, *, tidy: bool) -> None:
        self.acts.append("completed")

    def abort(self, dirty: Dirty) -> None:
        self.acts.append("abort")
        self.dirty = bool(dirty.files)


class Store:
    """What the checkpointer needs of a store."""

    closed = False

    def __init__(self) -> None:
        self.acts: Acts = []
        self.disk, self.journal, self.part = Disk(self.acts), Journal(self), Part(self.acts)
        self.locks, self.counters, self.geometry = Locks(), Counters(), RingGeometry(None)
        self.draws, self.index = DrawState(), SimpleNamespace(catalog=None)
        self.manifest = SimpleNamespace(generation=1, schema=SimpleNamespace(row_bytes=4))
        self.space = SimpleNamespace(measure=lambda *_: self.acts.append("measure"))
        self.snapshot_pin = SimpleNamespace(first=0)
        self.last = 0
        held = SimpleNamespace(held=True, is_in_place=True)
        self.health = Health(Path("run.exp"), held)  # type: ignore[arg-type]
        self.checkpoints = Checkpointer(
            LockOrder(),
            self.health,
            self.disk,
            durable=False,
            segment_bytes=1,  # type: ignore[arg-type]
        )

    @property
    def state(self) -> Any:
        return SimpleNamespace(
            last=self.last,
            retired=0,
            write_count=self.last,
            draws=self.draws,
            journal=self.journal,
            log=SimpleNamespace(length=0),
            memtable=SimpleNamespace(replaced=None),
            priorities=SimpleNamespace(largest=1.0),
            parts=lambda: [self.part],
            tombstones=lambda slots: (0, NO_IDS),
        )

    def append(self) -> None:
        self.journal.sequence += 1
        self.last += 1
        self.part.dirty = True

    def checkpoint(self, enough: Callable[[], bool] | None = None) -> None:
        self.checkpoints.run(self, enough)  # type: ignore[arg-type]

    @property
    def said(self) -> int:
        """The LSN that the newest checkpoint record covers."""
        return self._mark.sequence

    def write_values(self) -> None:
        self.acts.append("write values")

    def drain(self) -> None:
        self.acts.append("drain")

    def record(self, kind: Kind, *body: bytes) -> int:
        assert kind is Kind.MARK
        self._mark = Mark.unpack(b"".join(body))
        self.acts.append("record")
        self.journal.sequence += 1
        return self.journal.sequence


def test_the_record_comes_after_all_that_it_says() -> None:
    store = Store()
    store.append()
    store.checkpoint()
    assert store.acts == [
        "write values", "drain", "flush", "begin 2", "prepare", "sync part", "synced",
        "sync segment-1", "record", "sync segment-1", "completed", "measure",
    ]  # fmt: skip
    assert (store.said, store.checkpoints.covered) == (2, 1)


def test_what_a_part_had_given_away_is_found_again_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.append()
    begin = Part.begin

    def begin_interrupted(part: Part, checkpoint: Checkpoint) -> Dirty:
        begin(part, checkpoint)
        raise KeyboardInterrupt

    monkeypatch.setattr(Part, "begin", begin_interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.checkpoint()
    assert store.health.needs_recovery  # the journal has the rows: they are written, and synced, again
    monkeypatch.undo()
    store.acts.clear()
    store.checkpoint()
    assert "record" not in store.acts


def test_nothing_new_is_not_said_again() -> None:
    store = Store()
    store.append()
    store.checkpoint()
    store.acts.clear()
    store.checkpoint()
    assert "record" not in store.acts
    store.draws.next()
    store.checkpoint()
    assert "record" in store.acts


def test_a_draw_number_that_was_set_is_recorded_even_if_equal() -> None:
    store = Store()
    store.append()
    store.checkpoint()
    store.draws.set(0, (0, 0, 0, 0))
    store.checkpoint()
    assert store._mark.set_back
    store.append()
    store.checkpoint()
    assert not store._mark.set_back


def test_no_checkpoint_passes_the_lowest_pin() -> None:
    store = Store()
    store.append()
    low = store.checkpoints.pin(store.journal.sequence)
    store.append()
    high = store.checkpoints.pin(store.journal.sequence)
    store.append()
    store.checkpoint()
    assert store.said == low.lsn == 2
    store.checkpoints.release(low)
    store.append()
    store.checkpoint()
    assert store.said == high.lsn == 3
    store.checkpoints.release(high)
    store.checkpoints.release(high)  # it is gone
    store.append()
    store.checkpoint()
    assert store.said == store.journal.sequence - 1
    assert not store.checkpoints.is_pinned


@pytest.mark.parametrize("pinned", ["not", "in the newest segment", "anywhere"])
def test_the_journal_is_truncated_only_up_to_what_is_pinned(pinned: str) -> None:
    store = Store()
    store.append()
    store.journal.segments.append(File("segment-2"))
    if pinned != "not":
        newest: Any = store.journal.segments[-1]
        store.checkpoints.pin(1, newest if "newest" in pinned else None)
    store.checkpoint()
    assert store.journal.cuts == ([] if pinned == "anywhere" else ["segment-2"])


def test_a_checkpoint_for_space_does_not_cut_the_journal() -> None:
    store = Store()
    store.append()
    store.journal.segments.append(File("segment-2"))
    store.checkpoint(lambda: False)
    assert store.journal.cuts == []
    store.acts.clear()
    store.checkpoint(lambda: True)
    assert store.acts == []


def test_the_next_checkpoint_syncs_unsynced_files() -> None:
    store = Store()
    store.append()
    store.disk.failure = StorageError("the disk is full")
    with pytest.raises(StorageError):
        store.checkpoint()
    assert store.acts[-1] == "abort"
    assert store.checkpoints.covered == 0
    store.disk.failure = None
    store.checkpoint()
    assert "sync part" in store.acts
    assert store.checkpoints.covered == 1


def test_a_failed_fsync_is_never_tried_again() -> None:
    store = Store()
    store.append()
    store.disk.failure = StorageError("input/output error")
    store.disk.failure.lost = True
    with pytest.raises(StorageError):
        store.checkpoint()
    store.disk.failure = None
    with pytest.raises(StateError, match="can no longer be written"):
        store.checkpoint()
    assert "record" not in store.acts


def test_a_store_that_needs_recovery_has_no_checkpoint() -> None:
    store = Store()
    store.append()
    store.health.note_interruption()
    store.checkpoint()
    assert "record" not in store.acts
