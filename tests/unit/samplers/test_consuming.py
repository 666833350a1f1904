"""Rows that are returned a limited number of times: the limit, and counts that survive any stop."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as theirs

import expstore
from expstore import (
    ConsumingSampler,
    MemoryStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, NotReadyError, StateError, StorageError
from expstore.maintenance.repair import repair
from expstore.maintenance.verify import verify
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage
from tests.support.batches import memory_buffer, numbered_rows
from tests.support.forks import collect_from_child
from tests.support.tuned import set_spare_slots

SEED = 5
COLUMN = "columns/_row/sampled"


def opened(path: Path, count: int | None = 2, **keywords: Any) -> TensorDictReplayBuffer:
    if count is not None:
        keywords["sampler"] = ConsumingSampler(count)
    return expstore.open(path, batch_size=7, seed=SEED, **keywords)


def numbers(rb: Any, batches: int) -> list[list[int]]:
    return [rb.sample()["number"].tolist() for _ in range(batches)]


def counts(rb: Any) -> dict[int, int]:
    """How often each row that can be read was handed out, by its number."""
    pieces = rb.storage.geometry.runs(rb.storage.window.low + 1, rb.storage.window.size)
    held = np.concatenate(rb.storage.state.sampled.views(pieces)).tolist()
    return {int(ids) - 1: n for ids, n in zip(rb.storage.window.ids(), held, strict=True)}


# ---------------------------------------------------------------------------------------------------
# The law.


@pytest.mark.some(4)
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize(("count", "size"), [(10, 3), (10, 4), (12, 12), (5, 9), (1, 1)])
def test_lengths_counts_and_ends_are_those_of_torchrl(limit: int, count: int, size: int) -> None:
    """The same words hold of both, where the ring has room."""
    storage, sampler = theirs.LazyTensorStorage(24), theirs.ConsumingSampler(limit)
    own: Any = ReplayBuffer(storage=MemoryStorage(24), sampler=ConsumingSampler(limit), batch_size=size)
    other: Any = theirs.ReplayBuffer(storage=storage, sampler=sampler, batch_size=size)
    for rb in (own, other):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Cannot sample"):
                rb.sample()
        handed: Counter[int] = Counter()
        for first in (0, count):
            rb.extend(numbered_rows(count, first))
            left = count
            while left:
                assert len(rb) == left
                batch = rb.sample()["number"].tolist()
                assert len(batch) == len(set(batch)) == min(size, left)
                handed.update(batch)
                left = sum(handed[n] < limit for n in range(first + count))
                assert rb.sampler.ran_out == (left == 0)
            assert handed == dict.fromkeys(range(first + count), limit)
            with pytest.raises(RuntimeError, match="Cannot sample"):
                rb.sample()
    assert own[:]["number"].tolist() == list(range(2 * count)), "what was consumed can still be read"


@pytest.mark.slow
def test_every_row_that_is_left_has_the_same_chance() -> None:
    """20,000 batches of 5 of 20 rows: a bias of 5 % is four standard deviations."""
    rb = memory_buffer(40, seed=SEED, consume_after_n_samples=1 << 30, batch_size=5)
    rb.extend(numbered_rows(30))
    rb.storage.state.sampled.put([(20, 0, 10)], np.full(10, 1 << 30, np.uint32))
    found, pairs = np.zeros(30), np.zeros((30, 30))
    for _ in range(20_000):
        drawn = rb.sample()["number"].numpy()
        found[drawn] += 1
        pairs[drawn[0], drawn[1:]] += 1

    def fair(seen: np.ndarray) -> bool:
        return bool((np.abs(seen - 5000) < 4 * np.sqrt(20_000 * 0.25 * 0.75)).all())

    assert fair(found[:20])
    assert found[20:].sum() == 0, "these had been handed out often enough"
    assert not fair(found[:20] * np.where(np.arange(20) == 7, 1.05, 1.0)), "a bias of 5 % would be seen"
    others = pairs[:20, :20][~np.eye(20, dtype=bool)]
    assert np.abs(others - 20_000 * 4 / (20 * 19)).max() < 5 * np.sqrt(20_000 * 4 / (20 * 19))


@pytest.mark.guarantee("draw/count")
@pytest.mark.parametrize("kind", ["memory", "zarr", "sync"])
def test_a_row_that_takes_a_slot_begins_at_0(kind: str, tmp_path: Path) -> None:
    """Rows in the tail and rows of a long batch, ring by ring, and longer than the spare slots."""
    settings = {"durability": "sync"} if kind == "sync" else {}
    rb = (
        memory_buffer(50, seed=SEED, consume_after_n_samples=2, batch_size=7)
        if kind == "memory"
        else opened(tmp_path / "a.exp", capacity=50, **settings)
    )
    handed: Counter[int] = Counter()
    first = 0
    for count in (50, 3, 40, 5000, 2, 300, 1, 1, 48, 60) * 2:
        rb.extend(numbered_rows(count, first))
        first += count
        low = max(0, first - 50)
        wanted = {n: handed[n] for n in range(low, first)}
        assert counts(rb) == wanted
        assert len(rb) == sum(n < 2 for n in wanted.values())
        for batch in numbers(rb, 3):
            handed.update(batch)
        assert max(handed.values()) <= 2
    assert counts(rb) == {n: handed[n] for n in range(first - 50, first)}
    rb.empty()
    assert len(rb) == 0
    rb.close()


def test_an_unbounded_store_grows_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    with opened(tmp_path / "a.exp", count=1) as rb:
        for step in range(4):
            rb.extend(numbered_rows(3000, 3000 * step))
            rb.sample(1500)
        assert len(rb) == 6000
        expected = counts(rb)
    assert [p.name for p in sorted((tmp_path / "a.exp" / COLUMN / "c").iterdir())] == ["0", "1", "2"]
    with opened(tmp_path / "a.exp", count=1) as rb:
        assert counts(rb) == expected
        assert sorted(rb.sample(6000)["number"].tolist()) == [n for n in expected if not expected[n]]
        assert verify_later(rb) == []


def verify_later(rb: TensorDictReplayBuffer) -> list[Any]:
    path = rb.storage.path
    rb.close()
    return verify(path)


def test_one_that_is_attached_later_counts_from_there(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=60, seed=SEED, batch_size=7) as rb:
        rb.extend(numbered_rows(100))
        rb.sample()
        assert rb.storage.state.sampled is None
        assert "_sampled" not in rb.sql("SELECT * FROM transitions").df().columns
        assert not (tmp_path / "a.exp" / COLUMN).exists()
    with opened(tmp_path / "a.exp", count=1) as rb:
        assert len(rb) == 60
        numbers(rb, 5)
        assert len(rb) == 25
    with expstore.open(tmp_path / "a.exp") as rb:  # nobody counts, and yet new rows begin at 0
        assert len(rb) == 60
        rb.extend(numbered_rows(30, 100))
    with opened(tmp_path / "a.exp", count=1) as rb:
        assert len(rb) == sum(n == 0 for n in counts(rb).values()) > 30
        assert [n for n in range(100, 130) if counts(rb)[n]] == []
    with opened(tmp_path / "a.exp", count=3) as rb:
        assert len(rb) == 60


@pytest.mark.parametrize("capacity", [None, 100])
def test_counting_begins_while_the_newest_rows_are_in_memory(capacity: int | None, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path, capacity=capacity, seed=0) as rb:
        rb.extend(numbered_rows(5))  # few rows: the columns get them later
        rb.storage.settings.count_sampled()
        rb.flush()
    assert verify(path) == []
    with expstore.open(path, sampler=expstore.ConsumingSampler(1), batch_size=5) as rb:
        assert rb.sample()["number"].sort().values.tolist() == [0, 1, 2, 3, 4]


def test_sampling_continues_after_an_interruption(tmp_path: Path) -> None:
    """The journal is read again, and with it the column; a batch that was interrupted does not count."""
    whole = memory_buffer(100, seed=SEED, consume_after_n_samples=2, batch_size=7)
    with opened(tmp_path / "a.exp", capacity=100) as rb:
        for each in (rb, whole):
            each.extend(numbered_rows(90))
        assert numbers(rb, 3) == numbers(whole, 3)
        rb.storage.health.note_interruption()
        assert numbers(rb, 3) == numbers(whole, 3)
        keep = rb.storage.state.sampled._keep

        def interrupted(slots: np.ndarray, values: np.ndarray) -> None:
            keep(slots, values)
            raise KeyboardInterrupt

        rb.storage.state.sampled._keep = interrupted
        with pytest.raises(KeyboardInterrupt):
            rb.sample()
        rb.storage.state.sampled._keep = keep
        whole.storage.draws.next()
        assert counts(rb) == counts(whole)
        assert numbers(rb, 3) == numbers(whole, 3)
        rb.extend(numbered_rows(4100, 90))
        expected = [counts(rb), len(rb)]
        assert expected == [dict.fromkeys(range(4090, 4190), 0), 100]
    with opened(tmp_path / "a.exp") as rb:
        assert [counts(rb), len(rb)] == expected


def test_no_store_is_created_for_arguments_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Prefetching is not supported"):
        expstore.open(tmp_path / "a.exp", batches={"prefetch": 2}, batch_size=2, sampler=ConsumingSampler())
    assert not (tmp_path / "a.exp").exists()
    storage = MemoryStorage(10)
    with pytest.raises(ValueError, match="only supports the default RandomSampler"):
        TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, storage=storage, consume_after_n_samples=1)
    assert storage.state.sampled is None


def test_settings_come_along_in_copies_and_states() -> None:
    own = ConsumingSampler(np.int64(2))
    rb = ReplayBuffer(storage=MemoryStorage(10), sampler=own, consume_after_n_samples=2)
    assert rb.sampler is own
    assert repr(pickle.loads(pickle.dumps(own))) == "ConsumingSampler(max_sample_count=2)"
    other = ConsumingSampler()
    other.load_state_dict(own.state_dict())
    assert other.max_sample_count == 2


# ---------------------------------------------------------------------------------------------------
# Threads, forks, followers.


@pytest.mark.parametrize("kind", ["memory", "zarr"])
def test_threads_never_return_a_row_too_often(kind: str, tmp_path: Path) -> None:
    """Four draw while one writes and turns the ring; afterwards what is left is handed out, too."""
    rb = (
        memory_buffer(3000, seed=SEED, consume_after_n_samples=2, batch_size=64)
        if kind == "memory"
        else opened(tmp_path / "a.exp", capacity=3000)
    )
    rb.extend(numbered_rows(3000))
    done, faults = threading.Event(), []
    drawn: list[list[int]] = []

    def draw() -> None:
        while not done.is_set():
            try:
                drawn.append(rb.sample(64)["number"].tolist())
            except NotReadyError:
                done.wait(0.001)
            except BaseException as exc:
                faults.append(exc)
                return

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(100):
        rb.extend(numbered_rows(60, 3000 + 60 * step))
    done.set()
    for thread in threads:
        thread.join()
    drawn += [batch["number"].tolist() for batch in (rb if len(rb) else [])]
    assert not faults
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    handed = Counter(n for batch in drawn for n in batch)
    assert max(handed.values()) == 2
    assert [handed[n] for n in range(6000, 9000)] == [2] * 3000
    rb.close()


def test_a_draw_that_is_overtaken_keeps_what_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were overwritten while they were read are replaced; the others are not counted again."""
    set_spare_slots(monkeypatch, 8)
    rb = memory_buffer(100, seed=SEED, consume_after_n_samples=3, batch_size=60)
    rb.extend(numbered_rows(100))
    storage = rb.storage
    read, handed = storage.read, []

    def overtaken(ids: np.ndarray, *given: Any) -> Any:
        found = read(ids, *given)
        if not handed:
            handed.append(ids)
            for step in range(5):
                rb.extend(numbered_rows(8, 100 + 8 * step))
        return found

    storage.read = overtaken  # type: ignore[method-assign]
    batch = rb.sample()["number"].tolist()
    gone = storage.window.low
    kept = [int(i) - 1 for i in handed[0] if i > gone]
    assert 0 < len(kept) < 60
    assert kept == batch[: len(kept)]
    assert len(set(batch)) == 60
    assert counts(rb) == {n: int(n in batch) for n in range(gone, gone + 100)}
    assert sum(len(batch) for batch in rb) == 240


def test_copies_and_forks_cannot_consume(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", capacity=100) as rb:
        rb.extend(numbered_rows(50))
        numbers(rb, 10)
        copy = pickle.loads(pickle.dumps(rb))
        with pytest.raises(StateError):
            copy.sample()
        copy.close()

        def work(tell: Callable[[Any], None]) -> None:
            try:
                rb.sample()
            except StateError as exc:
                tell((len(rb), rb[7]["number"].item(), str(exc)))

        ((length, number, text),) = collect_from_child(work)
        assert (length, number) == (50, 7)
        assert "fork" in text
        with expstore.open(tmp_path / "a.exp", mode="r", batch_size=50) as reader:
            assert reader.sample().shape == (50,), "others may draw whatever they like"
        before = counts(rb)
        rb.close()
        with pytest.raises(StateError, match="closed"):
            rb.sample()
    with opened(tmp_path / "a.exp") as rb:
        assert counts(rb) == before


def test_sql_shows_it(tmp_path: Path) -> None:
    for rb in (
        memory_buffer(20, seed=SEED, consume_after_n_samples=2, batch_size=7),
        opened(tmp_path / "a.exp", capacity=20),
    ):
        rb.extend(numbered_rows(30))
        numbers(rb, 3)
        query = "SELECT number, _sampled FROM transitions ORDER BY 1"
        assert dict(rb.sql(query).fetchall()) == counts(rb)
        rb.close()


# ---------------------------------------------------------------------------------------------------
# Stops.


def live(rb: TensorDictReplayBuffer) -> None:
    """Turn a ring of 200, with rows in all states of being handed out."""
    for step in range(12):
        rb.extend(numbered_rows(40, 40 * step))
        numbers(rb, 3)


@pytest.mark.guarantee(
    "draw/count",
    "Batches count when they are returned: prefetched ones do not, none comes twice, and "
    "`ConsumingSampler` forgets none after a kill.",
)
@pytest.mark.slow
def test_killed_at_any_moment_nothing_that_was_returned_is_forgotten(tmp_path: Path) -> None:
    """Batches are told through a pipe; the kill may come in the middle of one that nobody gets."""
    for life, wait in enumerate((1, 9, 30, 31, 47)):
        path = tmp_path / f"{life}.exp"
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            rb = opened(path, capacity=3000)
            rb.extend(numbered_rows(3000))
            while len(rb):
                os.write(into, rb.sample(20)["number"].numpy().astype("<i8").tobytes())
            os._exit(0)
        os.close(into)
        with os.fdopen(out, "rb") as pipe:
            data = pipe.read(wait * 160)
            os.kill(pid, signal.SIGKILL)
            data += pipe.read()
        os.waitpid(pid, 0)
        got = np.frombuffer(data[: len(data) // 160 * 160], "<i8").reshape(-1, 20).tolist()
        whole = memory_buffer(3000, seed=SEED, consume_after_n_samples=2, batch_size=20)
        whole.extend(numbered_rows(3000))
        assert numbers(whole, len(got)) == got
        acked = counts(whole)
        with opened(path) as again:
            found = counts(again)
            more = {n: found[n] - acked[n] for n in acked if found[n] != acked[n]}
            if again.storage.draws.number > len(got):
                assert more.items() <= dict.fromkeys(numbers(whole, 1)[0], 1).items()
            else:
                assert not more
            whole.storage.state.sampled.put([(0, 0, 3000)], np.array(list(found.values()), np.uint32))
            whole.sampler.attach(whole.storage)
            for _ in range(50):
                assert again.sample(20)["number"].tolist() == whole.sample(20)["number"].tolist()


@pytest.mark.parametrize("count", [45, 65])
def test_rows_that_no_sync_has_seen_begin_at_0_after_a_power_cut(count: int, tmp_path: Path) -> None:
    """Whether their slots were brought to 0 is not known: what stands there may be of older rows.

    Of 65 rows the first 15 have left again: what their slots hold must be known when they are next taken.
    """
    path = tmp_path / "a.exp"

    def life(tell: Callable[[Any], None]) -> None:
        rb = opened(path, count=1, capacity=50)
        rb.storage.background.stop()
        rb.extend(numbered_rows(50))
        cycle = rb.storage.geometry.spare
        rb.extend(numbered_rows(cycle, 50))
        rb.sample(40)
        rb.flush()
        column = rb.storage.state.sampled.column.files[0]
        rb.extend(numbered_rows(count, 50 + cycle))
        assert rb.storage.geometry.slot_of(np.array([rb.storage.last])) == count - 1
        tell(sorted(n for n, counted in counts(rb).items() if counted))
        column.write(np.ones(count, np.uint32), 0)  # as if the zeros had not reached the disk

    (older,) = collect_from_child(life)
    assert bool(older) == (count < 50)
    (path / "STATE").write_bytes(bytes(4096))
    for _ in range(2):
        with opened(path, count=1) as rb:
            assert sorted(n for n, counted in counts(rb).items() if counted) == older
            assert all(n < rb.storage.last - count for n in older)
            sampled = rb.storage.state.sampled
            np.testing.assert_array_equal(sampled.column.read(0, sampled.values.size), sampled.values)
    assert verify(path) == []


@pytest.mark.parametrize("capacity", [200, None])
def test_versions_carry_the_counts(capacity: int | None, tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", capacity=capacity) as rb:
        live(rb)
        made = rb.dumps(tmp_path / "versions")
        kept = list(counts(rb).values())
        expected = numbers(rb, 30)
        assert rb.dumps(tmp_path / "versions").new_bytes < made.new_bytes
    assert verify(made.path) == []
    with opened(tmp_path / "b.exp", capacity=capacity) as copy, opened(tmp_path / "c.exp", None) as plain:
        plain.loads(made.path.parent, made.number)
        assert list(counts(plain).values()) == kept
        copy.extend(numbered_rows(11))
        numbers(copy, 2)
        copy.loads(made.path.parent, made.number)
        assert list(counts(copy).values()) == kept
        assert len(copy) == sum(n < 2 for n in kept)
        assert numbers(copy, 30) == expected
    with pytest.raises(StateError):
        opened(made.path.parent).sample()
    assert verify(tmp_path / "b.exp") == []


def test_a_version_without_counts_begins_at_0(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=100) as rb:
        rb.extend(numbered_rows(80))
        rb.dumps(tmp_path / "versions")
        for other in (
            memory_buffer(100, seed=SEED, consume_after_n_samples=1, batch_size=7),
            opened(tmp_path / "b.exp", count=1, capacity=100),
        ):
            other.extend(numbered_rows(50))
            numbers(other, 3)
            other.loads(tmp_path / "versions")
            assert len(other) == 80
            numbers(other, 2)
            assert len(other) == 66
            other.close()
    with expstore.open(tmp_path / "b.exp", sampler=ConsumingSampler(1), batch_size=7) as rb:
        assert len(rb) == 66
        # The first version with counts after one without: all else is shared.
        first = rb.dumps(tmp_path / "more")
        assert (first.path / COLUMN / "zarr.json").exists()
    with expstore.open(tmp_path / "a.exp", sampler=ConsumingSampler(1), batch_size=7) as rb:
        numbers(rb, 1)
        second = rb.dumps(tmp_path / "versions")
        assert (second.path / COLUMN / "zarr.json").exists()
        assert verify(second.path) == []


# ---------------------------------------------------------------------------------------------------
# Disks that fail, files that are damaged.


class FullDisk(Disk):
    """Fail what is done to the column from some moment on."""

    acts: tuple[str, ...] = ()
    after = 0

    def gate(self, act: str, path: Path) -> None:
        if act in self.acts and "sampled" in str(path):
            self.after -= 1
            if self.after < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def on(disk: Disk, path: Path, count: int, size: int) -> TensorDictReplayBuffer:
    storage = ZarrStorage(path, 100, disk=disk, settings=Settings(seed=SEED))
    return TensorDictReplayBuffer(storage=storage, consume_after_n_samples=count, batch_size=size)


@pytest.mark.parametrize("end", ["go on", "close", "kill"])
def test_on_a_full_disk_no_uncounted_row_is_returned(end: str, tmp_path: Path) -> None:
    """A batch of which half was counted on the disk is not handed out, and does not count."""
    path, disk = tmp_path / "a.exp", FullDisk()

    def life(tell: Callable[[Any], None]) -> None:
        rb = on(disk, path, 2, 10)
        rb.extend(numbered_rows(100))
        rb.sample()
        disk.acts, disk.after = ("write",), 5
        for step in range(3):
            before = counts(rb)
            with pytest.raises(StorageError) as caught:
                rb.sample()
            assert (caught.value.kind, caught.value.errno) == ("disk_full", errno.ENOSPC)
            assert counts(rb) == before
            rb.flush()
            rb.extend(numbered_rows(1, 100 + step))  # others have their space
        disk.acts = ()
        tell(counts(rb))
        if end == "go on":
            expected = Counter(counts(rb))
            expected.update(numbers(rb, 1)[0])
            assert Counter(counts(rb)) == expected
            rb.flush()
            tell(counts(rb))
        elif end == "close":
            rb.close()

    acked = collect_from_child(life)[-1]
    with opened(path) as rb:
        found = counts(rb)
        assert found.keys() == acked.keys()
        more = [found[n] - acked[n] for n in acked]
        assert set(more) <= {0, 1}
        assert sum(more) in (range(1, 6) if end == "kill" else (0,)), "half a batch that nobody got"


def test_the_compiled_loop_fails_like_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two shards cannot be written to: what the other was told is put right at the next flush."""
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    with opened(tmp_path / "a.exp", capacity=6000) as rb:
        rb.extend(numbered_rows(6000))
        rb.storage.disk._load_kernel()
        rb.sample(500)
        before = counts(rb)
        held = rb.storage.state.sampled.column.files[1]
        fd, held.fd = held.fd, os.open(held.path, os.O_RDONLY)
        stands = []
        for _ in range(3):
            with pytest.raises(StorageError, match="cannot write to"):
                rb.sample(500)
            stands.append(sum(rb.storage.state.sampled.column.read(0, 6000).tolist()))
            rb.flush()
        assert counts(rb) == before
        assert max(stands) > sum(before.values()), "some were counted on disk only"
        os.close(held.fd)
        held.fd = fd
        rb.flush()
        assert rb.storage.state.sampled.column.read(0, 6000).tolist() == list(before.values())
        rb.sample(500)
        after = counts(rb)
        assert sum(after.values()) == 1000
    with opened(tmp_path / "a.exp") as rb:
        assert counts(rb) == after


def test_a_slot_whose_count_a_failure_has_raised_begins_at_0(tmp_path: Path) -> None:
    path, disk = tmp_path / "a.exp", FullDisk()

    def life(tell: Callable[[Any], None]) -> None:
        rb = on(disk, path, 1, 90)
        storage = rb.storage
        rb.extend(numbered_rows(100))
        disk.acts, disk.after = ("write",), 89
        with pytest.raises(StorageError):
            rb.sample()
        disk.acts = ()
        storage.state.sampled.settle = lambda: None
        for first in range(100, 200 + storage.geometry.spare, 50):
            rb.extend(numbered_rows(50, first))
        assert sorted(counts(rb).values()) == [0] * 100

    collect_from_child(life)
    with opened(path, count=1) as rb:
        assert len(rb) == 100


def test_a_disk_that_is_full_when_counting_begins(tmp_path: Path) -> None:
    disk = FullDisk()
    expstore.open(tmp_path / "a.exp", capacity=100, seed=SEED).close()
    storage = ZarrStorage(tmp_path / "a.exp", disk=disk)
    disk.acts = ("write", "create", "mkdir")
    rb = TensorDictReplayBuffer(storage=storage, consume_after_n_samples=1, batch_size=10)
    for _ in range(2):
        with pytest.raises(StorageError):
            rb.extend(numbered_rows(10))
    disk.acts = ()
    rb.extend(numbered_rows(10))
    rb.sample()
    assert (len(rb), len(rb.storage)) == (0, 10)
    rb.close()
    storage = ZarrStorage(tmp_path / "b.exp", 100, disk=disk)
    plain = TensorDictReplayBuffer(storage=storage, batch_size=10)
    plain.extend(numbered_rows(10))
    disk.acts = ("create",)
    with pytest.raises(StorageError):
        TensorDictReplayBuffer(storage=storage, consume_after_n_samples=1, batch_size=10)
    plain.extend(numbered_rows(10, 10))
    disk.acts = ()
    rb = TensorDictReplayBuffer(storage=storage, consume_after_n_samples=1, batch_size=10)
    assert [len(batch) for batch in rb] == [10, 10]
    rb.close()


@pytest.mark.some(2)
@pytest.mark.parametrize("damage", ["gone", "cut", "zarr.json", "footer"])
def test_damage_of_the_column_is_found_and_repaired(damage: str, tmp_path: Path) -> None:
    """No row is lost by it; counts that are gone are 0 again."""
    path = tmp_path / "a.exp"
    with opened(path, capacity=5000) as rb:
        rb.extend(numbered_rows(3000))
        rb.sample(2000)
        before = counts(rb)
    shard, about = path / COLUMN / "c" / "0", path / COLUMN / "zarr.json"
    if damage == "gone":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, 4000)
    elif damage == "zarr.json":
        about.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(bytes(data))
    assert [finding.column for finding in verify(path)] == ["_row.sampled"]
    if damage != "footer":
        with pytest.raises(CorruptionError, match="sampled"):
            opened(path)
    done = repair(path, drop_damaged=damage in ("gone", "cut"))
    assert (done.lost, done.left) == ((), [])
    assert verify(path) == []
    kept = 1000 if damage == "cut" else 0 if damage == "gone" else 3000
    with opened(path) as rb:
        assert counts(rb) == {n: count * (n < kept) for n, count in before.items()}


def test_the_error_says_that_all_rows_were_drawn() -> None:
    for count, where, words in (
        (1, None, "ConsumingSampler returns each row once, and none is left"),
        (2, None, "ConsumingSampler returns each row 2 times, and none is left"),
        (1, "number < 2", "each row of its where= once, and none is left"),
    ):
        rb = memory_buffer(10, batch_size=4, sampler=ConsumingSampler(count, where=where))
        with pytest.raises(NotReadyError, match="empty storage"):
            rb.sample()
        rb.extend(numbered_rows(4))
        for _ in range(count):
            rb.sample()
        with pytest.raises(NotReadyError, match=words):
            rb.sample()
