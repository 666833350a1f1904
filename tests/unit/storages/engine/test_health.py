"""Effects of failures: a store that must be reopened, or whose journal must be read again."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expstore.errors import StateError, StorageError
from expstore.storages.engine.health import Health

HELD: Any = SimpleNamespace(held=True, is_in_place=True)


def lost() -> StorageError:
    error = StorageError("fsync failed", kind="sync")
    error.lost = True
    return error


def test_a_block_that_raises_is_an_interruption() -> None:
    health = Health(Path("run.exp"), HELD)
    with pytest.raises(KeyboardInterrupt), health.noting, health.noting:
        raise KeyboardInterrupt
    assert health.needs_recovery
    assert not health.is_sound
    health.note_recovered()
    assert health.is_sound
    with health.noting:
        pass
    assert health.is_sound


def test_a_failed_fsync_refuses_everything_behind_it() -> None:
    health = Health(Path("run.exp"), HELD)
    with pytest.raises(StorageError), health.guard():
        raise lost()
    assert not health.needs_recovery
    for act in (health.check, lambda: health.guard().__enter__()):
        with pytest.raises(StateError, match="run.exp can no longer be written: fsync failed") as caught:
            act()
        assert caught.value.kind == "poisoned"


def test_a_folder_that_was_deleted_is_named() -> None:
    health = Health(Path("run.exp"), HELD)
    error = lost()
    error.errno = errno.ENOENT
    health.note_failure(error)
    with pytest.raises(StateError, match="fsync failed; the folder was deleted or moved"):
        health.check()


def test_other_failures_leave_all_as_it_was() -> None:
    health = Health(Path("run.exp"), HELD)
    with pytest.raises(StorageError), health.guard():
        raise StorageError("the disk is full", kind="disk_full")
    assert health.is_sound
