"""Order of operations when content is replaced, with fakes: old rows are kept until the end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expstore.errors import StorageError
from expstore.storages.engine import store_snapshots
from expstore.storages.engine.store_snapshots import StoreSnapshots


class Content:
    """A content from elsewhere."""

    manifest = None

    def __str__(self) -> str:
        return "rows"


class World:
    """A store and what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, waiting: bool = False) -> None:
        self.acts: list[str] = []
        note = self.acts.append
        state = SimpleNamespace(
            columns=SimpleNamespace(ready=40),
            checksums=None,
            memtable=SimpleNamespace(replaced=True),
            write_keys=SimpleNamespace(waiting=waiting),
            journal=SimpleNamespace(sequence=7),
        )
        self.counters = SimpleNamespace(recovered=3)
        self.store: Any = SimpleNamespace(
            path=Path("run.exp"), disk=None, write_values=lambda: note("write values"),
            checkpoints=None, state=state, capacity=10, lock=contextlib.nullcontext(),
            writer=lambda: note("check the writer"), sync=lambda: note("sync"), counters=self.counters,
            snapshot_pin=SimpleNamespace(wait=lambda: note("wait for snapshots")),
            priorities=SimpleNamespace(note_set=lambda: note("note priorities")),
        )  # fmt: skip
        self.fails = False
        monkeypatch.setattr(store_snapshots, "build_load", self.build)
        monkeypatch.setattr(
            store_snapshots, "CONTENT", SimpleNamespace(commit=lambda disk, path: note("commit"))
        )
        monkeypatch.setattr(
            store_snapshots, "Arrival", SimpleNamespace(of=lambda content, store: f"arrival of {content}")
        )
        monkeypatch.setattr(
            store_snapshots, "read_resized", lambda store, capacity, sums, progress: f"to {capacity}"
        )
        self.snapshots = StoreSnapshots(self.store, check=lambda: None, reopen=self.reopen)

    def build(self, store: Any, path: Path, arrival: Any, *, sequence: int, ready: int) -> None:
        if self.fails:
            raise StorageError("the disk is full")
        self.acts.append(f"build {arrival} after {sequence} with {ready}")

    def reopen(self, change: Any) -> None:
        self.acts.append("stop readers")
        change()
        self.counters.recovered = 0  # as an opening counts
        self.acts.append("open")


PREPARED = ["check the writer", "wait for snapshots", "sync", "write values"]
REPLACED = ["stop readers", "commit", "open", "note priorities"]


def test_a_content_is_built_before_the_former_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.snapshots.adopt(Content())  # type: ignore[arg-type]
    assert world.acts == [*PREPARED, "build arrival of rows after 7 with 40", *REPLACED]
    assert world.counters.recovered == 3  # a restore is no recovery


@pytest.mark.parametrize(("capacity", "waiting"), [(5, False), (None, True)])
def test_a_change_of_capacity(monkeypatch: pytest.MonkeyPatch, capacity: int | None, waiting: bool) -> None:
    world = World(monkeypatch, waiting=waiting)
    world.snapshots.resize(capacity)
    sync = ["sync"] if waiting else []  # keys that only the journal has
    assert world.acts == [*PREPARED, *sync, f"build to {capacity} after 7 with 0", *REPLACED]


def test_a_content_that_cannot_be_built_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.fails = True
    with pytest.raises(StorageError):
        world.snapshots.resize(5)
    assert world.acts == PREPARED
