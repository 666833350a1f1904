"""Two processes try to write to one store while LOCK is removed and replaced: never both at once.

Each reports its acknowledged ids; an id that was acknowledged twice is two rows in one slot.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk import writer_lock
from expstore.errors import ExpStoreError, LockedError, StorageError

pytestmark = pytest.mark.usefixtures("no_syncs")

LIVES, EXTENDS, ROWS = 12, 4, 3


def without_the_folder(lock: writer_lock.WriterLock) -> None:
    """Break the rule: lock only LOCK, which anyone can remove."""
    lock._folder.close()


def write_lives(path: Path, tell: Callable[[list[int]], None]) -> None:
    """Open the store repeatedly, and report the acknowledged ids."""
    lives = 0
    while lives < LIVES:
        tell([])
        try:
            rb = expstore.open(path, capacity=10_000)
        except (LockedError, StorageError):  # LOCK may be removed while its text is read
            continue
        lives += 1
        for _ in range(EXTENDS):
            try:
                rb.extend(TensorDict({"x": torch.zeros(ROWS)}, [ROWS]))
            except ExpStoreError:
                break  # only if two write at once
            last = rb.storage.last
            tell([last - 2, last - 1, last])
        try:
            rb.storage.close()
        except ExpStoreError:
            continue


def replacements(path: Path) -> Iterator[None]:
    """Repeatedly remove LOCK, or replace it by another file or by an earlier one."""
    lock, former = path / "LOCK", path.with_name("former")
    for number in itertools.count():
        try:
            if number % 3 == 0:
                lock.unlink()
            elif number % 3 == 1:
                lock.replace(former)
                lock.write_bytes(b"")
            elif former.exists():
                former.replace(lock)
        except FileNotFoundError:
            pass
        yield


def acknowledged(path: Path, most_empty: float = math.inf) -> Counter[int]:
    """Let two processes write while LOCK is removed and replaced; return ids with their numbers.

    After `most_empty` reports without an id in a row neither writes any more: two that wrote at once wait for
    each other.
    """
    with expstore.open(path, capacity=10_000) as rb:
        rb.extend(TensorDict({"x": torch.zeros(1)}, [1]))
    read_end, write_end = os.pipe()
    children = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            torch.set_num_threads(1)
            try:
                write_lives(path, lambda ids: void(os.write(write_end, json.dumps(ids).encode() + b"\n")))
                os._exit(0)
            except BaseException as exc:
                os.write(write_end, json.dumps(repr(exc)).encode() + b"\n")
            os._exit(1)
        children.append(pid)
    os.close(write_end)
    counts: Counter[int] = Counter()
    steps, empty = replacements(path), 0
    try:
        with os.fdopen(read_end) as pipe:
            for line in pipe:  # LOCK is removed or replaced after each report
                told = json.loads(line)
                assert not isinstance(told, str), told
                counts.update(told)
                empty = 0 if told else empty + 1
                if max(counts.values(), default=1) > 1 or empty > most_empty:
                    break
                next(steps)
    finally:
        for pid in children:  # they have ended, unless the loop was left
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return counts


def void(_: object) -> None:
    """Return nothing."""


@pytest.mark.guarantee("process/one-writer")
def test_no_id_is_acknowledged_twice_while_lock_comes_and_goes(store_path: Path) -> None:
    counts = acknowledged(store_path)
    assert set(counts.values()) == {1}
    assert sorted(counts) == list(range(2, 2 + 2 * LIVES * EXTENDS * ROWS))
    with expstore.open(store_path, mode="r") as rb:
        assert rb.storage.last == max(counts)


@pytest.mark.guarantee("process/one-writer")
@pytest.mark.slow
def test_a_lock_that_the_folder_does_not_back_is_found(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = writer_lock.WriterLock.__init__

    def take_the_file(self: writer_lock.WriterLock, *given: object) -> None:
        take(self, *given)  # type: ignore[arg-type]
        without_the_folder(self)

    monkeypatch.setattr(writer_lock.WriterLock, "__init__", take_the_file)
    monkeypatch.setattr(writer_lock.WriterLock, "is_in_place", True)  # the folder's descriptor is closed
    stores = (store_path.with_name(f"{number}.exp") for number in range(10))
    assert any(max(acknowledged(path, 500).values(), default=1) > 1 for path in stores)
