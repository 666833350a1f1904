"""The STATE page: words that survive the process, used only if they belong to the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expstore.disk.files import Disk
from expstore.storages.format.control_page import PAGE, StatePage
from expstore.storages.format.writer_probe import Watch
from tests.support.forks import in_child

UUID, BOOT = b"u" * 16, b"b" * 16
WORDS = {"generation": 4, "sequence": 5, "horizon": 6, "last": 2**62, "draw": 8, "change": 0}


def page(path: Path) -> StatePage:
    return StatePage(Disk(), path / "STATE")


def test_a_new_page_fits_nothing(tmp_path: Path) -> None:
    state = page(tmp_path)
    assert (tmp_path / "STATE").stat().st_size == PAGE
    assert not state.fits(bytes(16), bytes(16), 0)
    assert not state.fits(UUID, BOOT, 100)
    state.close()


def test_counters_are_read_back(tmp_path: Path) -> None:
    state = page(tmp_path)
    state.claim(UUID, BOOT, **WORDS)
    assert {name: state.get(name) for name in WORDS} == WORDS
    state.set("draw", 99)
    state.close()
    again = page(tmp_path)
    assert {name: again.get(name) for name in WORDS} == WORDS | {"draw": 99}
    again.close()
    with pytest.raises(ValueError):
        again.get("draw")


def test_it_fits_one_store_one_boot_and_no_older_generation(tmp_path: Path) -> None:
    state = page(tmp_path)
    state.claim(UUID, BOOT, **WORDS)
    assert state.fits(UUID, BOOT, 4)
    assert state.fits(UUID, BOOT, 5)
    assert not state.fits(UUID, BOOT, 3)
    assert not state.fits(b"x" * 16, BOOT, 4)
    assert not state.fits(UUID, b"x" * 16, 4)
    state.close()


def test_a_claim_that_was_interrupted_fits_nothing(tmp_path: Path) -> None:
    state = page(tmp_path)
    state.claim(UUID, BOOT, **WORDS)
    with pytest.raises(KeyError):
        state.claim(UUID, BOOT, generation=4, nonsense=1)
    assert not state.fits(UUID, BOOT, 4)
    state.close()


def test_counters_survive_a_kill_and_the_inode_stays(tmp_path: Path) -> None:
    state = page(tmp_path)
    inode = (tmp_path / "STATE").stat().st_ino

    def child() -> None:
        own = page(tmp_path)
        own.claim(UUID, BOOT, **WORDS)
        own.set("draw", 1234)

    in_child(child)
    assert state.get("draw") == 1234  # seen through the mapping made before
    assert (tmp_path / "STATE").stat().st_ino == inode
    state.close()


def test_the_counters_do_not_overlap(tmp_path: Path) -> None:
    from expstore.storages.format.control_page import _WORDS

    state = page(tmp_path)
    state.claim(UUID, BOOT)
    for number, name in enumerate(_WORDS):
        state.set(name, 10 + number)
    assert [state.get(name) for name in _WORDS] == list(range(10, 10 + len(_WORDS)))
    assert state.fits(UUID, BOOT, 10)
    state.close()


def test_readers_see_no_change_with_the_slots_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may look between any two stores of the writer."""
    state = page(tmp_path)
    state.claim(UUID, BOOT, **WORDS)
    watch = Watch(Disk(), tmp_path)
    before = state.get("change")
    state.begin_change(10, 20)
    state.end_change()
    assert watch.find_changed(before).tolist() == list(range(10, 21))
    store, seen = StatePage.set, 0

    def look_after(self: StatePage, name: str, value: int) -> None:
        nonlocal seen
        store(self, name, value)
        assert watch.is_touched(np.array([15]), before), name
        found = watch.find_changed(before)
        assert found is None or {*range(10, 21)} <= {*found.tolist()}, name
        seen += 1

    monkeypatch.setattr(StatePage, "set", look_after)
    state.begin_change(500, 510)
    assert seen == 5
    monkeypatch.undo()
    state.end_change()
    assert not watch.is_touched(np.array([15]), before + 2)
    assert watch.is_touched(np.array([505]), before + 2)
    assert watch.find_changed(before + 2).tolist() == list(range(500, 511))
    watch.close()
    state.close()
