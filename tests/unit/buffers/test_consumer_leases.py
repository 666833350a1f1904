"""Consuming per consumer, and leases: each row is committed once; retention keeps what is not committed."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import ConsumingSampler, Retain
from expstore.core import tuning
from expstore.core.values import Selection
from expstore.disk.files import Disk, File
from expstore.errors import NotReadyError, RowsChangedError, StorageError
from expstore.storages.engine.delete import Deletion
from expstore.storages.format import draw_log
from expstore.storages.format.draw_log import NO_PROGRESS, DrawLog, Use
from tests.support.batches import observed_episode as rows
from tests.support.forks import in_child

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

SHORT = 600  # bytes of a segment: three draws of 8 rows


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 64 rows has 80 slots, so that new rows soon have the slots of older ones."""
    monkeypatch.setattr(tuning, "SPARE_SLOTS", 16)


def fill(path: Path, count: int = 100, **options: Any) -> Any:
    rb = expstore.open(path, batch_size=8, seed=1, **options)
    if count:
        rb.extend(rows(count))
    return rb


def ids_of(batch: Any) -> list[int]:
    return [int(id) for id in batch["id"].reshape(-1)]


def numbers_of(batch: Any) -> list[int]:
    found: list[int] = batch["observation"].reshape(-1).long().tolist()
    return found


def drain(consumer: Any, most: int = 1000) -> list[int]:
    """Draw until no row is left, or so many batches; return the ids of all batches."""
    found: list[int] = []
    for _ in range(most):
        try:
            found += ids_of(consumer.sample())
        except NotReadyError:
            break
    return found


# -- each row so often ------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/consumed",
    "A consumer with a `ConsumingSampler` commits each row `max_sample_count` times, whatever is killed.",
)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("segment", [SHORT, 8 << 20])
def test_each_row_comes_so_often_whatever_is_committed_and_sought(
    times: int, segment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commits, positions and restarts are random; the ids of every draw number never change."""
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", segment)
    chance, drawn = random.Random(times), dict[int, list[int]]()
    rb, reader, written = fill(tmp_path / "run.exp"), None, 100
    c = rb.consumer("learner", sampler=ConsumingSampler(times), keep="all")
    for _ in range(80 * times):
        act = chance.random()
        if act < 0.1:
            rb.extend(rows(10, written))
            written += 10
        elif act < 0.15:
            c.commit()
        elif act < 0.25:
            c.seek({**c.position, "draw": chance.randrange(c.committed, rb.consumers.list()[0].draws + 1)})
        elif act < 0.35:
            c.close()
            if reader is not None:
                reader.close()
            rb.flush()
            reader = None
            if chance.random() < 0.5:
                reader = expstore.open(tmp_path / "run.exp", mode="r", batch_size=8)
            c = (reader or rb).consumer("learner", sampler=ConsumingSampler(times), keep="all")
        number = c.position["draw"]
        try:
            ids = ids_of(c.sample())
        except NotReadyError:
            continue
        assert drawn.setdefault(number, ids) == ids
    c.seek("end")
    rest = drain(c)
    counts = Counter([*rest, *(id for ids in drawn.values() for id in ids)])
    assert counts == dict.fromkeys(range(1, written + 1), times)
    c.commit()
    assert c.committed == rb.consumers.list()[0].draws
    assert sorted(id for batch in c.replay(0) for id in ids_of(batch)) == sorted(counts.elements())
    c.close()
    rb.close()


@pytest.mark.parametrize("options", [{"capacity": 64}, {"window": 64}, {"capacity": 64, "layout": "flat"}])
def test_rows_that_are_new_in_a_place_come_again_so_often(options: dict[str, Any], tmp_path: Path) -> None:
    """The ring laps several times; rows that left it before they were drawn never come."""
    rb, found, written = fill(tmp_path / "run.exp", 0, **options), Counter[int](), 0
    c = rb.consumer("learner", sampler=ConsumingSampler(2), missing="skip")
    for round in range(40):
        count = (7, 30, 150)[round % 3]
        rb.extend(rows(count, written))
        written += count
        low = written - min(written, 64)
        ids = drain(c, 4)
        assert min(ids) > low
        found.update(ids)
        if round % 5 == 4:
            c.commit()
            c.close()
            c = rb.consumer("learner", sampler=ConsumingSampler(2), missing="skip")
    found.update(drain(c))
    assert max(found.values()) == 2
    assert all(found[id] == 2 for id in range(written - 63, written + 1))
    rb.close()


def test_rows_that_were_written_while_it_was_closed_come(tmp_path: Path) -> None:
    with fill(tmp_path / "run.exp", 64, capacity=64) as rb:
        written = 64
        for count in (10, 50, 64, 70, 100, 150, 200):
            with rb.consumer("learner", sampler="consuming", at="end") as c:
                drain(c)
            rb.extend(rows(count, written))
            written += count
            with rb.consumer("learner", sampler="consuming", at="end") as c:
                assert len(drain(c)) == min(count, 64)


def test_rows_that_leave_the_window_are_remembered(tmp_path: Path) -> None:
    """A later opening has a larger window."""
    with fill(tmp_path / "run.exp", window=64) as rb:
        c = rb.consumer("learner", sampler="consuming")
        assert len(drain(c)) == 64
        rb.extend(rows(50, 100))
        assert len(drain(c)) == 50
    with expstore.open(tmp_path / "run.exp", window=1000, batch_size=8) as rb:
        c = rb.consumer("learner", sampler="consuming", at="end")
        assert sorted(drain(c)) == list(range(1, 37))


def test_only_rows_of_the_condition_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", SHORT)
    with fill(tmp_path / "run.exp") as rb:
        c = rb.consumer("learner", sampler=ConsumingSampler(where="_id % 2 = 1"))
        assert sorted(drain(c)) == list(range(1, 101, 2))
        rb.extend(rows(50, 100))
        c.sampler.refresh(rb.storage)
        assert sorted(drain(c)) == list(range(101, 151, 2))
        c.close()
        every = rb.consumer("learner", sampler="consuming", at="end")
        assert sorted(drain(every)) == list(range(2, 151, 2))


def test_a_reader_consumes_and_the_store_counts_nothing(tmp_path: Path) -> None:
    with fill(tmp_path / "run.exp", capacity=64) as rb:
        rb.flush()
        with expstore.open(tmp_path / "run.exp", mode="r", batch_size=8) as reader:
            c, found = reader.consumer("learner", sampler="consuming", missing="skip"), list[int]()
            other = rb.consumer("other", sampler="consuming", missing="skip")
            for start in range(100, 400, 20):
                rb.extend(rows(20, start))
                found += drain(c, 2)
            rb.flush()  # the reader sees the last rows, too
            found += drain(c)
            assert len(set(found)) == len(found)
            assert set(range(357, 401)) <= set(found)
            assert sorted(drain(other)) == list(range(337, 401))
        assert rb.storage.state.sampled is None


def test_iteration_ends_with_the_last_row(tmp_path: Path) -> None:
    with fill(tmp_path / "run.exp", 20) as rb:
        c = rb.consumer("learner", sampler=ConsumingSampler(2))
        start = c.position
        sizes = [len(batch) for batch in c]
        assert (sum(sizes), sizes[:3]) == (40, [8, 8, 8])
        with pytest.raises(NotReadyError, match="returns each row 2 times, and none is left"):
            c.sample()
        c.seek(start)
        assert [len(batch) for batch in c] == sizes
        rb.extend(rows(3, 20))
        assert [len(batch) for batch in c] == [3, 3]


def test_draws_of_other_samplers_do_not_count(tmp_path: Path) -> None:
    with fill(tmp_path / "run.exp") as rb:
        for sampler in ("uniform", "without_replacement", "consuming", "uniform", "without_replacement"):
            with rb.consumer("learner", sampler=sampler, at="end", keep="all") as c:
                for _ in range(3):
                    c.sample()
        c = rb.consumer("learner", sampler="consuming", at="end", keep="all")
        assert len(drain(c)) == 100 - 24
        c.close()
        passed = [ids_of(batch) for batch in c_replay(rb)]
        assert len({id for ids in [*passed[3:6], *passed[12:15]] for id in ids}) == 48  # the pass went on


def c_replay(rb: Any) -> Iterator[Any]:
    with rb.consumer("learner", keep="all") as c:
        yield from c.replay(0)


def test_a_sampler_leaves_the_counts_with_its_consumer(tmp_path: Path) -> None:
    with fill(tmp_path / "run.exp", 20) as rb:
        sampler = ConsumingSampler()
        with rb.consumer("learner", sampler=sampler) as c:
            assert len(drain(c)) == 20
        rb.set_sampler(sampler)
        assert len(ids_of(rb.sample())) == 8
        assert len(rb) == 12


@pytest.mark.parametrize("kind", ["transform", "disk"])
def test_a_draw_that_failed_counts_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [False]

    def check(batch: Any) -> Any:
        if fails[0] and kind == "transform":
            raise ValueError("no")
        return batch

    write = File.write_mapped

    def refuse(file: File, data: Any, offset: int) -> None:
        if fails[0] and file.path.parent.name == "learner":
            raise StorageError("the disk is full", kind="disk_full")
        write(file, data, offset)

    if kind == "disk":
        monkeypatch.setattr(File, "write_mapped", refuse)
    with expstore.open(tmp_path / "run.exp", batch_size=8, seed=1, batches={"transform": check}) as rb:
        rb.extend(rows(30))
        c, found = rb.consumer("learner", sampler="consuming"), list[int]()
        for _ in range(4):
            fails[0] = True
            for _ in range(3):
                with pytest.raises((ValueError, StorageError)):
                    c.sample()
            fails[0] = False
            found += ids_of(c.sample())
        assert sorted(found) == list(range(1, 31))


def test_deleted_rows_do_not_come(tmp_path: Path) -> None:
    with fill(tmp_path / "run.exp", 40) as rb:
        rb.extend(rows(40, 40), source="other")
        c = rb.consumer("learner", sampler="consuming", missing="skip")
        first = ids_of(c.sample())
        rb.episodes.delete("episode_id = 1")
        assert sorted(drain(c)) == sorted({*range(41, 81)} - set(first))


# -- the counts in the log --------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [0, 500])
def test_counts_are_those_of_the_draws(low: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 3000)
    log, chance = DrawLog(Disk(), tmp_path, "a"), np.random.default_rng(low)
    expected: Counter[int] = Counter()
    for number in range(400):
        oldest = number * low // 400
        ids = np.unique(chance.integers(oldest + 1, 700 + number, 16))
        if number % 3 == 0:
            ids = np.arange(ids[0], ids[0] + 20)  # recorded as a run
        use = Use.COUNTED if number % 5 else Use.LEASED
        log.append(Selection(ids), changes=0, low=oldest, last=2000, progress=NO_PROGRESS, use=use)
        expected.update(ids.tolist() if number % 5 else [])
        if number % 50 == 0:
            log.commit(number)
            log.drop(number)
            log.close()
            log = DrawLog(Disk(), tmp_path, "a")
        first, counts = log.count_rows()
        assert first == oldest + 1
        found = {first + place: int(count) for place, count in enumerate(counts) if count}
        assert {id: n for id, n in found.items() if id > oldest} == {
            id: n for id, n in expected.items() if id > oldest
        }
    assert log.first > 300
    log.close()


def test_counts_of_lost_rows_are_cut_although_their_draws_are_not_kept(tmp_path: Path) -> None:
    log = DrawLog(Disk(), tmp_path, "a")
    log.append(
        Selection(np.arange(1, 101)),
        changes=0,
        low=0,
        last=100,
        progress=NO_PROGRESS,
        use=Use.COUNTED | Use.LEASED,
    )
    log._start_segment()
    log.commit(1)
    log.drop(1)
    log.append(
        Selection(np.arange(101, 111)), changes=0, low=0, last=110, progress=NO_PROGRESS, use=Use.COUNTED
    )
    log.close()
    log = DrawLog(Disk(), tmp_path, "a")
    assert log.count_rows()[1].tolist() == [1] * 110
    log.cut_after(90, 0)
    for _ in range(2):
        assert (log.first, log.count) == (1, 1)
        assert log.count_rows()[1].tolist() == [1] * 90
        log = DrawLog(Disk(), tmp_path, "a")
    assert not log.cut_after(50, 0)
    assert log.count_rows()[1].tolist() == [1] * 50
    log.append(Selection(np.array([60])), changes=0, low=0, last=90, progress=NO_PROGRESS, use=Use.COUNTED)
    assert DrawLog(Disk(), tmp_path, "a").count_rows()[1].tolist() == [1] * 50 + [0] * 9 + [1]
    log.close()


# -- leases -----------------------------------------------------------------------------------------------


def fill_episodes(path: Path, count: int = 10, start: int = 0, **options: Any) -> Any:
    """A store with episodes of 20 rows; the reward is the number of the episode, from 1."""
    rb = expstore.open(path, batch_size=10, seed=1, **options)
    append_episodes(rb, count, start)
    return rb


def append_episodes(rb: Any, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        rb.extend(rows(20, 20 * number))


def episodes_in(rb: Any) -> list[int]:
    return [n for (n,) in rb.sql("SELECT DISTINCT _episode FROM transitions ORDER BY 1").fetchall()]


def draw_first(rb: Any, name: str, count: int, **options: Any) -> Any:
    """A consumer that has drawn the oldest rows, 10 per batch."""
    sampler = expstore.SamplerWithoutReplacement(shuffle=False)
    c = rb.consumer(name, sampler=sampler, **options)
    for _ in range(count):
        c.sample()
    return c


@pytest.mark.guarantee(
    "consumers/leased",
    "Retention keeps rows that were consumed or drawn once per pass and not committed, up to `lease_rows`.",
)
@pytest.mark.parametrize("policy", [{"where": "false"}, {"bytes": 1}, {"age": "0s"}])
def test_retention_keeps_leased_episodes_until_the_commit(policy: dict[str, Any], tmp_path: Path) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        c = draw_first(rb, "learner", 5, lease_rows=100)
        assert rb.consumers.list()[0].leased == 50
        rb.retention.set(Retain(**policy))
        assert rb.retention.apply(dry_run=True)[:2] == (7, 140)
        assert rb.retention.apply()[:2] == (7, 140)
        assert episodes_in(rb) == [1, 2, 3]
        c.seek("committed")
        before = [ids_of(c.sample()) for _ in range(2)]
        assert before == [[*range(1, 11)], [*range(11, 21)]]
        c.commit()
        assert rb.consumers.list()[0].leased == 30
        assert rb.retention.apply().rows == 20
        assert episodes_in(rb) == [2, 3]
        c.seek("end")
        c.commit()
        assert rb.retention.apply().rows == 40
        assert episodes_in(rb) == []


class OldestRows(expstore.Sampler):
    """A sampler of the user."""

    leases = True

    def select(self, storage: Any, batch_size: int, generator: np.random.Generator) -> Selection:
        return Selection(storage.window.ids()[:batch_size])


@pytest.mark.parametrize(
    ("make", "leased"),
    [
        (expstore.RandomSampler, False),
        (expstore.PrioritizedSampler, False),
        (lambda: expstore.SliceSampler(slice_len=5), False),
        (expstore.SamplerWithoutReplacement, True),
        (ConsumingSampler, True),
        (OldestRows, True),
        (lambda: expstore.SliceSamplerWithoutReplacement(slice_len=5), True),
        (lambda: expstore.StreamingSliceSampler(slice_len=5), True),
    ],
)
def test_who_leases(make: Callable[[], Any], leased: bool, tmp_path: Path) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        c = rb.consumer("learner", sampler=make(), lease_rows=100)
        ids = ids_of(c.sample())
        assert rb.consumers.list()[0].leased == (len(set(ids)) if leased else 0)
        rb.retention.set(Retain(where="false"))
        rb.retention.apply()
        assert episodes_in(rb) == (sorted({(id + 19) // 20 for id in ids}) if leased else [])


def test_the_oldest_leases_end_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        c = draw_first(rb, "learner", 8, lease_rows=45)
        start, middle = c.position, {**c.position, "draw": 4}
        start["draw"] = 0
        assert rb.consumers.list()[0].leased == 40
        rb.retention.set(Retain(where="false"))
        with caplog.at_level(logging.WARNING, "expstore"):
            assert rb.retention.apply(dry_run=True).episodes == 8
            assert not caplog.records
            for _ in range(2):
                rb.retention.apply()
        assert episodes_in(rb) == [3, 4]
        (record,) = caplog.records
        assert "rows of draw 3 of consumer 'learner'" in record.getMessage()
        assert "larger lease_rows" in record.getMessage()

        for place in (start, "committed"):
            with pytest.raises(RowsChangedError, match="draw 0 had rows that were changed, deleted"):
                c.seek(place)
            assert c.position["draw"] == 8
        c.seek(middle)
        assert ids_of(c.sample()) == [*range(41, 51)]
        c.close()
        with pytest.raises(RowsChangedError, match="draw 0 had rows"):
            rb.consumer("learner", lease_rows=7)
        assert '"lease_rows": 45' in (tmp_path / "run.exp/consumers/learner/consumer.json").read_text()
        rb.consumer("learner", at="end").close()
        c = rb.consumer("learner", sampler="without_replacement", missing="skip")
        with pytest.raises(RowsChangedError, match="draw 0 had rows"):  # it has no other row
            c.sample()
        c.seek(middle)
        c.commit()
        append_episodes(rb, 3, 10)
        c.seek("end")
        for _ in range(6):
            c.sample()
        c.close()
        rb.consumer("learner", at="end", lease_rows=0)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "expstore"):
            rb.retention.apply()
        assert len(caplog.records) == 1  # it has committed since the first warning
        assert episodes_in(rb) == []


def test_the_limit_is_a_tenth_of_the_window_unless_it_is_given(tmp_path: Path) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        for given, leased in ((None, 20), (35, 30), (9, 0), (0, 0), (1000, 80), (None, 20)):
            with rb.consumer("learner", sampler="without_replacement", lease_rows=given) as c:
                for _ in range(8):
                    c.sample()
            assert rb.consumers.list()[0].leased == leased
    with expstore.open(tmp_path / "run.exp", batch_size=10, window=120) as rb:
        rb.consumer("learner").close()
        assert rb.consumers.list()[0].leased == 10


def test_explicit_deletions_and_rings_do_not_wait(tmp_path: Path) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        c = draw_first(rb, "learner", 5, lease_rows=1000)
        assert rb.episodes.delete("episode_id <= 2").rows == 40
        with pytest.raises(RowsChangedError):
            c.seek("committed")
    with fill(tmp_path / "ring.exp", capacity=100) as rb:
        c = draw_first(rb, "learner", 5, lease_rows=1000)
        for start in range(100, 1000, 50):
            rb.extend(rows(50, start))
        with pytest.raises(
            RowsChangedError, match="draw 0 had rows that were changed, deleted or overwritten"
        ):
            c.seek("committed")
        assert rb.storage.window.low == 900


def test_the_warning_comes_once_per_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb, caplog.at_level(logging.WARNING, "expstore"):
        rb.retention.set(Retain(where="_episode > 5"))
        c = draw_first(rb, "learner", 4, lease_rows=20)
        rb.retention.apply()
        assert (episodes_in(rb), len(caplog.records)) == ([2, *range(6, 11)], 1)
        for _ in range(4):  # of a new pass: episodes 2 and 6
            c.sample()
        rb.retention.apply()
        assert (episodes_in(rb), len(caplog.records)) == ([*range(6, 11)], 1)
        c.commit()
        for _ in range(4):  # episodes 6 and 7
            c.sample()
        rb.retention.set(Retain(where="false"))
        rb.retention.apply()
        assert (episodes_in(rb), len(caplog.records)) == ([7], 2)


@pytest.mark.parametrize("lease_rows", [None, 60])
def test_an_abandoned_consumer_does_not_stop_retention(lease_rows: int | None, tmp_path: Path) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        draw_first(rb, "abandoned", 20, lease_rows=lease_rows).close()
        rb.retention.set(Retain(where="_id > 1000"))
        most = 0
        for number in range(10, 70):
            append_episodes(rb, 1, number)
            rb.retention.apply()
            most = max(most, rb.storage.stored.rows)
            assert rb.storage.stored.rows <= (40 if lease_rows is None else 80) + 20 * max(0, number - 49)
    assert most <= 500


def test_leases_are_read_from_another_process(tmp_path: Path) -> None:
    with fill_episodes(tmp_path / "run.exp") as rb:
        rb.flush()

        def learn() -> None:
            reader = expstore.open(tmp_path / "run.exp", mode="r", batch_size=10)
            draw_first(reader, "learner", 3, lease_rows=100)

        in_child(learn)
        rb.retention.set(Retain(where="false"))
        rb.retention.apply()
        assert episodes_in(rb) == [1, 2]


def test_segments_that_are_dropped_meanwhile_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 1)
    with fill_episodes(tmp_path / "run.exp") as rb:
        c = draw_first(rb, "learner", 5)
        (leases,) = draw_log.find_leases(Disk(), tmp_path / "run.exp", 200)
        c.commit()
        assert [number for number, _ in leases.ended] == [2]  # it was read before


def test_draws_that_lease_are_found_without_reading_all_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that leases nothing and never commits may have a log of any length."""
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 400)
    log = DrawLog(Disk(), tmp_path, "a")
    for number in range(60):
        use = Use.LEASED if number in (20, 21, 23) else Use.NONE
        log.append(
            Selection(np.array([number + 1, 5])), changes=0, low=0, last=90, progress=NO_PROGRESS, use=use
        )
    read = list[Path]()

    class Reads(Disk):
        def read_whole(self, path: Path) -> bytes:
            read.append(path)
            return super().read_whole(path)

    for reopened in (False, True):
        if reopened:
            log.close()
        reader = DrawLog(Reads(), tmp_path, "a", writes=False)
        for first, expected in ((0, [23, 21, 20]), (21, [23, 21]), (22, [23]), (24, []), (60, [])):
            assert [(number, ids.tolist()) for number, ids in reader.read_leased(first)] == [
                (number, [number + 1, 5]) for number in expected
            ]
            assert [number for number, _ in log.read_leased(first)] == expected
        read.clear()
        list(reader.read_leased(24))
        assert len(read) == 1


@pytest.mark.parametrize("segment", [400, 1 << 20])
def test_consumed_rows_of_a_version_are_not_drawn_again(
    segment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", segment)
    with expstore.open(tmp_path / "run.exp", batch_size=5, seed=1) as rb:
        rb.extend(rows(40))
        learner = rb.consumer("learner", sampler="consuming")
        consumed = [number for _ in range(3) for number in numbers_of(learner.sample())]
        rb.snapshots.create(tmp_path / "versions")
        for _ in range(2):
            rb.snapshots.restore(tmp_path / "versions")
            consumed += numbers_of(learner.sample())
        learner.close()
        with rb.consumer("learner", sampler="consuming", at="end") as learner:
            consumed += [number for batch in learner for number in numbers_of(batch)]
        assert sorted(consumed) == list(range(40))


def test_rows_that_a_policy_deletes_before_the_draw_is_recorded_are_not_returned(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", batch_size=12, seed=1) as rb:
        for start in range(0, 40, 10):
            rb.extend(rows(10, start))
        with rb.consumer("learner", sampler="consuming") as learner:
            record, drawn = learner._sampler.hand_out, []

            def delete_first(storage: Any, selection: Selection) -> None:
                drawn.append(selection.ids)
                if len(drawn) == 1:
                    rb.retention.set(Retain(where="observation >= 20"))
                    rb.retention.apply()
                record(storage, selection)

            learner._sampler.hand_out = delete_first
            batch = learner.sample()
            assert (drawn[0] <= 20).any()
            assert min(numbers_of(batch)) >= 20
            learner.seek("committed")
            assert sorted(numbers_of(batch) + numbers_of(learner.draw(1))) == list(range(20, 40))


def test_no_draw_leases_rows_while_a_policy_deletes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        with closing(Disk().open(tmp_path / "run.exp" / "LEASES")) as file:
            alone = file.try_lock()
        with closing(Disk().open(tmp_path / "run.exp" / "LEASES")) as file:
            seen.append((alone, file.try_lock(shared=True)))

    append, delete = DrawLog.append, Deletion.delete
    monkeypatch.setattr(DrawLog, "append", lambda *args, **options: (look(), append(*args, **options)))
    monkeypatch.setattr(Deletion, "delete", lambda *args: (look(), delete(*args))[1])
    with fill(tmp_path / "run.exp", 0) as rb:
        for start in range(0, 40, 10):
            rb.extend(rows(10, start))
        with rb.consumer("learner", sampler="consuming") as learner:
            learner.sample()
        rb.retention.set(Retain(where="observation < 0"))
        assert rb.retention.apply().rows
    assert seen == [(False, True), (False, False)]
