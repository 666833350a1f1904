"""Rate limiters: Reverb's rules for rows, waiting, wake-ups, and the state after a restart."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.sample_units import Sequence
from expstore.core.draw_state import DrawState
from expstore.disk.files import Disk
from expstore.errors import NotReadyError, StateError
from expstore.rate_limiters import MinSize, RateLimiter, SampleToInsertRatio
from expstore.storages.format.journal import Kind, read_journal
from expstore.storages.format.records import Mark
from expstore.storages.memory import MemoryStorage
from tests.support import warm_processes
from tests.support.batches import memory_buffer, numbered_rows
from tests.support.waits import wait_until


class Counts:
    """A storage as limiters see it."""

    def __init__(self, *, size: int = 0, written: int = 0, capacity: int | None = None) -> None:
        self.size, self.write_count, self.capacity = size, written, capacity
        self.draws = DrawState()
        self.closed = False

    def __len__(self) -> int:
        return self.size


rows = partial(numbered_rows, key="x")


# -- the law -----------------------------------------------------------------------------------------


class Reverb:
    """What reverb/cc/rate_limiter.cc decides, item by item."""

    def __init__(self, spi: float, min_size: int, min_diff: float, max_diff: float) -> None:
        self.spi, self.min_size, self.min_diff, self.max_diff = spi, min_size, min_diff, max_diff
        self.inserts = self.samples = self.deletes = 0

    def can_sample(self) -> bool:
        if self.inserts - self.deletes < self.min_size:
            return False
        return self.inserts * self.spi - self.samples - 1 >= self.min_diff

    def can_insert(self) -> bool:
        if self.inserts + 1 - self.deletes <= self.min_size:
            return True
        return (1 + self.inserts) * self.spi - self.samples <= self.max_diff


@given(
    spi=st.sampled_from([0.25, 1.0, 3.0]),
    min_size=st.integers(1, 6),
    buffer=st.sampled_from([6.0, 8.5, (0.0, 20.0), (-10.0, 4.0)]),
    calls=st.lists(st.sampled_from(["insert", "sample", "delete"]), max_size=80),
)
def test_row_by_row_it_decides_as_reverb_does(
    spi: float, min_size: int, buffer: Any, calls: list[str]
) -> None:
    limiter = SampleToInsertRatio(spi, min_size, buffer, timeout=0)
    low, high = buffer if isinstance(buffer, tuple) else (spi * min_size - buffer, spi * min_size + buffer)
    model, counts = Reverb(spi, min_size, low, high), Counts()
    limiter.attach(counts)
    for call in calls:
        if call == "delete" and counts.size:
            counts.size -= 1
            model.deletes += 1
        assert limiter.can_sample() == model.can_sample()
        assert limiter.can_insert() == model.can_insert()
        if call == "insert" and model.can_insert():
            with limiter.wait_to_insert(1):
                counts.size, counts.write_count = counts.size + 1, counts.write_count + 1
            model.inserts += 1
        if call == "sample" and model.can_sample():
            with limiter.sampling(1) as count:
                count(1)
            model.samples += 1


def test_batches_count_as_so_many_rows() -> None:
    rb = memory_buffer(batch_size=4, rate_limiter=(limiter := SampleToInsertRatio(2.0, 10, 12, timeout=0)))
    rb.extend(rows(12))  # all inserts of stage 1 go on: the error is 24, of 8 to 32
    assert [limiter.can_sample(n) for n in (16, 17)] == [True, False]
    assert [limiter.can_insert(n) for n in (4, 5)] == [True, False]
    for _ in range(4):
        rb.sample()
    assert limiter.describe() | {"limiter": ""} == {
        "limiter": "", "inserted": 12, "sampled": 16, "error": 8.0,
    }  # fmt: skip
    with pytest.raises(
        NotReadyError, match="cannot sample 4 rows yet: with 12 rows inserted and 16 sam"
    ) as exc:
        rb.sample()
    assert exc.value.kind == "rate_limited"
    rb.extend(rows(12))
    with pytest.raises(
        NotReadyError, match="cannot insert 1 rows yet: .* the error is 32, and max_diff is 32"
    ):
        rb.add(rows(1)[0])
    assert rb.stats()["rate_limiter"]["inserted"] == len(rb) == 24


def test_rows_that_are_not_returned_do_not_count() -> None:
    rb = memory_buffer(
        batch_size=4,
        rate_limiter=(limiter := SampleToInsertRatio(1.0, 4, 10, timeout=0)),
        consume_after_n_samples=1,
    )
    rb.extend(rows(6))
    rb.sample(5)
    assert len(rb.sample(5)["x"]) == 1
    assert limiter.describe()["sampled"] == 6
    with pytest.raises(NotReadyError, match="none is left"):
        rb.sample(2)
    assert limiter.describe()["sampled"] == 6
    with pytest.raises(expstore.errors.SchemaError):
        rb.extend(TensorDict({"y": torch.zeros(3)}, [3]))
    assert limiter.can_insert(4)
    assert not limiter.can_insert(15)


def test_sequences_count_by_their_anchors() -> None:
    rb = memory_buffer(
        batch_size=4,
        rate_limiter=(limiter := SampleToInsertRatio(1.0, 4, 10, timeout=0)),
        sample_unit=Sequence(3),
    )
    rb.extend(rows(8))
    assert rb.sample()["x"].numel() == 12
    assert limiter.describe()["sampled"] == 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MinSize(0), "min_size_to_sample must be at least 1, got 0"),
        (lambda: MinSize(1, timeout=-1), "timeout must be at least 0 seconds"),
        (lambda: MinSize(1, timeout=math.nan), "timeout must be at least 0 seconds"),
        (lambda: SampleToInsertRatio(0.0, 1, 5), "samples_per_insert must be above 0"),
        (lambda: SampleToInsertRatio(4.0, 1, 3.9), "error_buffer spans 7.8"),
        (lambda: SampleToInsertRatio(1.0, 1, (5.0, 9.0)), "no row could ever be sampled"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(make: Callable[[], RateLimiter], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_limits_that_would_wait_forever_are_refused(store_path: Path) -> None:
    with pytest.raises(ValueError, match="min_size_to_sample is 101, the store never holds more than 100"):
        memory_buffer(batch_size=4, rate_limiter=MinSize(101))
    with pytest.raises(ValueError, match="never holds more than 100"):
        expstore.open(store_path, capacity=100, batches=expstore.Batches(rate_limiter=MinSize(101)))
    assert not store_path.exists()
    rb = memory_buffer(batch_size=4, rate_limiter=SampleToInsertRatio(2.0, 10, 12))
    with pytest.raises(ValueError, match="a sample of 25 rows moves the error by 25, more than the 24"):
        rb.sample(25)
    rb.extend(rows(12))
    with pytest.raises(ValueError, match="an insert of 13 rows moves the error by 26"):
        rb.extend(rows(13))
    rb.sample(10)
    with pytest.raises(ValueError, match="inserts of 10 rows and samples of 10 wait for one another"):
        rb.extend(rows(10))
    assert (len(rb), counts(rb)) == (12, (12, 10))


# -- who waits ---------------------------------------------------------------------------------------


def test_a_sample_waits_until_there_are_rows_enough() -> None:
    rb = memory_buffer(batch_size=4, rate_limiter=MinSize(10))
    with ThreadPoolExecutor(3) as pool:
        batches = [pool.submit(rb.sample) for _ in range(3)]
        for count in (4, 5):
            rb.extend(rows(count))
            assert not any(batch.done() for batch in batches)
        rb.add(rows(1)[0])
        assert [batch.result(timeout=30)["x"].numel() for batch in batches] == [4, 4, 4]


def test_timeouts_say_what_they_waited_for() -> None:
    rb = memory_buffer(batch_size=4, rate_limiter=MinSize(10, timeout=0.01))
    rb.extend(rows(3))
    with pytest.raises(
        NotReadyError, match=r"the store has 3 of min_size_to_sample = 10 rows \(waited 0.01 s\)"
    ):
        rb.sample()


def test_side_by_side_the_error_stays_within_its_bounds(store_path: Path) -> None:
    """Two writers and two readers without any other brake; whoever is ahead waits."""
    limiter = SampleToInsertRatio(3.0, 50, 120, timeout=60)
    errors: list[float] = []

    class Watching(MemoryStorage):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            self._adopt(replace(self.state, draws=DrawState(sink=self)))  # type: ignore[arg-type]

        def note_draw(self, number: int) -> None:
            pass

        def note_limits(self, sampled: int, settings: int) -> None:
            errors.append(self.write_count * 3.0 - sampled)

        def write(self, rows: Any) -> None:
            super().write(rows)
            errors.append(self.write_count * 3.0 - self.draws.limits[0])

    rb = ReplayBuffer(storage=Watching(200), batch_size=24, rate_limiter=limiter)
    rb.extend(rows(50))
    errors.clear()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda: [rb.extend(rows(8)) for _ in range(150)]) for _ in range(2)]
        jobs += [pool.submit(lambda: [rb.sample() for _ in range(150)]) for _ in range(2)]
        for job in jobs:
            job.result(timeout=120)
    assert (rb.write_count, limiter.describe()["sampled"]) == (2450, 7200)
    assert min(errors) >= 150 - 120
    assert max(errors) <= 150 + 120


def test_all_inserts_are_allowed_for_a_while() -> None:
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=2, error_buffer=4.0)
    rb = memory_buffer(100, batch_size=2, rate_limiter=limiter)
    rb.extend(rows(6))
    waiting = threading.Thread(target=rb.extend, args=(rows(5),))
    waiting.start()
    wait_until(lambda: limiter._changed._waiters)
    with limiter.allow_inserts(), limiter.allow_inserts():
        waiting.join()
        rb.extend(rows(1))
        with limiter.allow_inserts():
            pass
        assert limiter.can_insert(1)
    assert limiter.describe()["inserted"] == 12
    assert not limiter.can_insert(1)


def test_closing_wakes_waiting_threads(store_path: Path) -> None:
    rb = expstore.open(
        store_path, batch_size=4, batches=expstore.Batches(rate_limiter=SampleToInsertRatio(1.0, 8, 8))
    )
    begun = threading.Barrier(3)

    def wait_for(act: Callable[[], Any]) -> BaseException | None:
        begun.wait()
        try:
            act()
        except StateError as exc:
            return exc
        return None

    rb.extend(rows(16))
    rb.sample(1), rb.sample(1)
    with ThreadPoolExecutor(2) as pool:
        writer = pool.submit(wait_for, lambda: [rb.extend(rows(3)) for _ in range(2)])
        other = pool.submit(wait_for, lambda: [rb.extend(rows(3)) for _ in range(2)])
        begun.wait()
        rb.close()
        assert "the store is closed" in str(writer.result(timeout=30))
        assert "the store is closed" in str(other.result(timeout=30))
    with pytest.raises(StateError, match="the store is closed"):
        rb.sample()


def test_ctrl_c_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = memory_buffer(batch_size=4, rate_limiter=(limiter := MinSize(10)))
    wait = limiter._changed.wait

    def interrupt(seconds: float | None) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return wait(seconds)

    monkeypatch.setattr(limiter._changed, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rb.sample()


# -- what a restart goes on with -----------------------------------------------------------------------


def limited(path: Path, generator: torch.Generator | None = None) -> Any:
    limiter = SampleToInsertRatio(2.0, 10, 40, timeout=0)
    batches = expstore.Batches(rate_limiter=limiter, generator=generator)
    return expstore.open(path, capacity=50, batch_size=8, batches=batches)


def counts(rb: Any) -> tuple[int, int]:
    said = rb.stats()["rate_limiter"]
    return said["inserted"], said["sampled"]


def test_counts_survive_closing_and_versions(store_path: Path, tmp_path: Path) -> None:
    with limited(store_path) as rb:
        rb.extend(rows(20))
        rb.sample()
        rb.dumps(tmp_path / "versions")
        rb.sample()
        assert counts(rb) == (20, 16)
    with limited(store_path) as rb:
        assert counts(rb) == (20, 16)
        rb.sample()
        rb.loads(tmp_path / "versions")
        assert counts(rb) == (20, 8)
        rb.sample()
    with limited(store_path) as rb:
        assert counts(rb) == (20, 16)
    memory = memory_buffer(50, batch_size=4, rate_limiter=SampleToInsertRatio(2.0, 10, 40, timeout=0))
    memory.loads(tmp_path / "versions")
    assert counts(memory) == (20, 8)


KILLED = """
import os, signal, sys
import torch
from tensordict import TensorDict
import expstore
from expstore.rate_limiters import SampleToInsertRatio

limiter = SampleToInsertRatio(2.0, 10, 40, timeout=0)
prefetch = int(sys.argv[2])
batches = expstore.Batches(rate_limiter=limiter, prefetch=prefetch)
rb = expstore.open(sys.argv[1], capacity=50, batch_size=8, batches=batches)
rb.extend(TensorDict({"x": torch.arange(20)}, [20]))
rb.sample()
rb.flush()
rb.sample()
rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
rb.sample()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.guarantee("draw/rates", "A rate limiter continues with its counts of inserted and sampled rows.")
@pytest.mark.some(1)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_kill_keeps_the_count_of_exactly_the_drawn_rows(store_path: Path, prefetch: int) -> None:
    command = [sys.executable, "-c", KILLED, str(store_path), str(prefetch)]
    done = warm_processes.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with limited(store_path) as rb:
        assert counts(rb) == (23, 24)


@pytest.mark.guarantee("draw/rates")
def test_after_a_power_cut_the_counts_are_those_of_the_last_sync(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", KILLED, str(store_path), "0"]
    warm_processes.run(command, check=False, capture_output=True)
    monkeypatch.setattr(Disk, "boot_id", lambda disk: bytes(16))  # as if the machine had started anew
    with limited(store_path) as rb:
        assert counts(rb) == (23, 8)


def test_a_mark_says_what_was_counted_and_once_did_not(store_path: Path) -> None:
    with limited(store_path) as rb:
        rb.extend(rows(20))
        rb.sample()
        rb.flush()
        marks = [r for r in read_journal(Disk(), store_path / "journal") if r.kind is Kind.MARK]
        mark = Mark.unpack(marks[-1].body)
        assert mark.limits == rb.storage.draws.limits
        assert mark.limits[0] == 8
        assert mark.pack() == marks[-1].body
    plain = Mark(1, 2, 3, 4, 5, 1.0, (1, 2, 3, 4), True)
    assert Mark.unpack(plain.pack()) == plain
    assert len(plain.pack()) == 80  # as before there were limiters


def test_a_store_that_was_not_limited_begins_without_an_error(store_path: Path) -> None:
    """Also one that was limited by other settings, or written to without a limiter meanwhile."""
    with expstore.open(store_path, capacity=50, batch_size=8) as rb:
        rb.extend(rows(45))
        rb.sample()
    with limited(store_path) as rb:
        assert counts(rb) == (45, 70)  # as if each row after the first ten had been sampled twice
        rb.sample()
    with expstore.open(store_path, batch_size=8) as rb:
        rb.sample()
    with limited(store_path) as rb:
        assert counts(rb) == (45, 78)
    with expstore.open(store_path, batch_size=8) as rb:
        rb.extend(rows(5))
    with limited(store_path) as rb:
        assert counts(rb) == (50, 80)
    other = SampleToInsertRatio(4.0, 10, 40, timeout=0)
    with expstore.open(store_path, batches=expstore.Batches(rate_limiter=other)) as rb:
        assert counts(rb) == (50, 160)


# -- who is not limited --------------------------------------------------------------------------------


def test_followers_neither_wait_nor_count(store_path: Path) -> None:
    with limited(store_path) as rb:
        rb.extend(rows(9))
        rb.flush()
        with pytest.raises(NotReadyError):
            rb.sample()
        copy = pickle.loads(pickle.dumps(rb))
        assert copy.sample()["x"].numel() == 8
        assert copy.stats()["rate_limiter"] is None
        copy.close()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if rb.sample()["x"].numel() == 8 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert counts(rb) == (9, 0)
        with pytest.raises(ValueError, match="a follower cannot have a rate limiter"):
            expstore.open(store_path, mode="r", batches=expstore.Batches(rate_limiter=MinSize(1)))


def test_a_limiter_has_one_buffer_at_a_time_and_does_not_keep_it(store_path: Path) -> None:
    limiter = MinSize(1)
    rb = memory_buffer(batch_size=4, rate_limiter=limiter)
    with pytest.raises(StateError, match="already belongs to another store"):
        memory_buffer(batch_size=4, rate_limiter=limiter)
    rb.close()
    with expstore.open(store_path, batches=expstore.Batches(rate_limiter=limiter)) as rb:
        rb.extend(rows(2))
    rb = memory_buffer(batch_size=4, rate_limiter=limiter)
    kept = weakref.ref(rb.storage)
    del rb
    assert kept() is None
    with pytest.raises(StateError, match="closed"):
        limiter.can_sample()


def test_without_a_limiter_nothing_is_counted(store_path: Path) -> None:
    with expstore.open(store_path, batch_size=4) as rb:
        rb.extend(rows(9))
        rb.sample()
        assert rb.storage.draws.limits == (0, 0)
        assert rb.stats()["rate_limiter"] is None
        assert np.isfinite(rb.storage.priorities.largest)
