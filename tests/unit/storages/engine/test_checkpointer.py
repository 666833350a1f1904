"""Checkpoints of a store: their order on the disk, pins, and what they do not say twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.core.draw_state import DrawState
from expstore.episodes.segmentation import Steps
from expstore.schema.schema import Field, Schema
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.engine import store
from expstore.storages.factory import ZarrStorage
from expstore.storages.format.journal import Kind, read_journal
from expstore.storages.format.paths import JOURNAL
from expstore.storages.format.records import Mark
from expstore.writers.writers import RoundRobinWriter
from tests.support.gated_disk import GatedDisk
from tests.support.stores import NoKeeper, prepare

SCHEMA = Schema([Field(("n",), "int64", ())])


@pytest.fixture
def storage(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ZarrStorage]:
    """A store that makes checkpoints only where a test asks for one; it has had one."""
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    made = prepare(ZarrStorage(store_path, 5000, disk=GatedDisk()), SCHEMA)
    put(made)
    made.sync()
    yield made
    made.close()


def put(storage: ZarrStorage, count: int = 300) -> None:
    ids = np.arange(storage.last + 1, storage.last + 1 + count)
    with storage.lock:
        RoundRobinWriter().write(storage, [ids], Steps(count), source=None, info="")


def marks(storage: ZarrStorage) -> list[Mark]:
    """Return the checkpoint records of the journal."""
    records = read_journal(storage.disk, storage.path / JOURNAL)
    return [Mark.unpack(record.body) for record in records if record.kind is Kind.MARK]


def start_segment(storage: ZarrStorage) -> Any:
    """Start the next segment of the journal; return its file."""
    with storage.locks.episodes:
        storage.checkpoints.start_segment(storage)
    return storage.state.journal.sync_files()[-1]


def test_the_record_comes_after_all_that_it_says(storage: ZarrStorage) -> None:
    put(storage)
    acts: list[str] = []
    storage.disk.before = lambda act, path: acts.append(f"{act} {path.parent.name}")
    lsn = storage.state.journal.sequence
    storage.sync()
    record = acts.index("write journal")
    before, after = acts[:record], acts[record:]
    assert before[-1] == "sync journal"  # the records that it covers
    assert any(act.startswith("sync c") for act in before[:-1])
    assert after == ["write journal", "sync journal"]
    assert (marks(storage)[-1].sequence, storage.checkpoints.covered) == (lsn, 600)


def test_nothing_new_is_not_said_again(storage: ZarrStorage) -> None:
    before = len(marks(storage))
    storage.sync()
    assert len(marks(storage)) == before
    storage.draws.next()
    storage.sync()
    assert len(marks(storage)) == before + 1


def test_a_draw_number_that_was_set_is_recorded_even_if_equal(storage: ZarrStorage) -> None:
    draws: DrawState = storage.draws
    draws.set(draws.number, tuple(draws.progress))
    storage.sync()
    assert marks(storage)[-1].set_back
    put(storage)
    storage.sync()
    assert not marks(storage)[-1].set_back


def test_files_are_synced_after_an_interruption_while_they_were_collected(
    storage: ZarrStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage)
    begin = WritableColumns.begin

    def begin_interrupted(columns: WritableColumns, checkpoint: Any) -> Any:
        begin(columns, checkpoint)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WritableColumns, "begin", begin_interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.sync()
    assert storage.health.needs_recovery  # the journal has the rows: they are written, and synced, again
    before = len(marks(storage))
    storage.sync()
    assert len(marks(storage)) == before
    put(storage, 1)
    storage.sync()
    assert storage.checkpoints.covered == storage.last == 601


def test_no_checkpoint_passes_the_lowest_pin(storage: ZarrStorage) -> None:
    pins = []
    for _ in range(2):
        pins.append(storage.checkpoints.pin(storage.state.journal.sequence))
        put(storage)
    for pin in pins:
        storage.sync()
        assert marks(storage)[-1].sequence == pin.lsn
        storage.checkpoints.release(pin)
        storage.checkpoints.release(pin)  # it is gone
        put(storage)
    lsn = storage.state.journal.sequence
    storage.sync()
    assert marks(storage)[-1].sequence == lsn
    assert not storage.checkpoints.is_pinned


@pytest.mark.parametrize("pinned", ["not", "in the newest segment", "anywhere"])
def test_the_journal_is_truncated_only_up_to_what_is_pinned(storage: ZarrStorage, pinned: str) -> None:
    newest = start_segment(storage)
    if pinned != "not":
        storage.checkpoints.pin(1, newest if "newest" in pinned else None)
    put(storage)
    storage.sync()
    assert len(storage.state.journal.sync_files()) == (2 if pinned == "anywhere" else 1)


def test_a_checkpoint_for_space_does_not_truncate_the_journal(storage: ZarrStorage) -> None:
    start_segment(storage)
    put(storage)
    storage.checkpoints.run(storage, lambda: False)
    assert len(storage.state.journal.sync_files()) == 2
    before = len(marks(storage))
    put(storage)
    storage.checkpoints.run(storage, lambda: True)  # another thread has freed enough
    assert len(marks(storage)) == before
