"""Episodes and steps of all rows match a reference that works row by row."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expstore.core import tuning
from expstore.episodes import table as table_module
from expstore.episodes.fragments import Fragments, clip, count_live
from expstore.episodes.log import EndedEpisodes, LogEntry, NewFacts, flatten
from expstore.episodes.segmentation import CUT, NEW, OPEN, TERMINATED, TRUNCATED, Steps
from expstore.episodes.sessions import End, NewSource, SessionKey
from expstore.episodes.table import EpisodeTable, pack_segments, unpack_segments
from expstore.kernels import file_loops

# ---------------------------------------------------------------------------------------------------
# The reference: plain Python, one row after the other.


@dataclass
class Told:
    """One episode as the reference tells it."""

    source: str
    trajectory: int | None
    start: int
    end: int = 0
    length: int = 0
    ret: float = 0.0
    last_id: int = 0
    status: int = OPEN


@dataclass
class Reference:
    """Number rows by reading the rules aloud."""

    episodes: list[Told] = field(default_factory=list)
    open: dict[tuple[tuple[str | None, str], int | None], int] = field(default_factory=dict)
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> (episode id, step)
    last: int = 0

    def extend(self, batch: Batch, handle: int, low: int) -> None:
        own = str(handle) if batch.session is None else batch.session
        names = [lane_name(batch.source, lane, own) for lane in range(batch.lane_count)]
        first = self.last + 1
        for lane, name in enumerate(names):
            for at in np.flatnonzero(batch.lanes == lane).tolist():
                self._row(batch, at, name, first + at, low)
        self.last += batch.count

    def _row(self, batch: Batch, at: int, source: str, id: int, low: int) -> None:
        trajectory = None if batch.trajectories is None else int(batch.trajectories[at])
        key = (batch.session, source), trajectory
        number = self.open.get(key)
        if number is not None:
            known = self.episodes[number - 1]
            if known.status == TRUNCATED and known.last_id <= low:
                number = None  # nothing of it is left to go on from
            elif batch.starts[at]:
                if known.status == OPEN:
                    known.status = CUT
                number = None
        if number is None:
            self.episodes.append(Told(source, trajectory, start=batch.time))
            number = self.open[key] = len(self.episodes)
        episode = self.episodes[number - 1]
        self.rows[id] = number, episode.length
        episode.length += 1
        episode.ret += float(batch.rewards[at])
        episode.last_id, episode.end = id, batch.time
        terminated, truncated = bool(batch.terminated[at]), bool(batch.truncated[at])
        episode.status = TERMINATED if terminated else TRUNCATED if truncated else OPEN
        if terminated or (truncated and trajectory is None):
            del self.open[key]

    def reopen(self) -> None:
        """End the local session."""
        for key, number in list(self.open.items()):
            if key[0][0] is None:
                del self.open[key]
                if self.episodes[number - 1].status == OPEN:
                    self.episodes[number - 1].status = CUT

    def live_rows(self, low: int) -> dict[int, int]:
        live = dict.fromkeys(range(1, len(self.episodes) + 1), 0)
        for id, (episode, _) in self.rows.items():
            live[episode] += id > low
        return live


def known_sessions(table: EpisodeTable) -> list[dict[str, Any]]:
    """Return what is known of sessions but the episodes to resume: those without rows are forgotten."""
    return [{k: v for k, v in session.items() if k != "cut"} for session in table.to_base()["sessions"]]


def lane_name(source: str | None, lane: int, handle: str) -> str:
    base = f"@{handle}" if source is None else source
    return f"{base}//{lane}" if lane else base


# ---------------------------------------------------------------------------------------------------
# Batches out of what Hypothesis draws.


@dataclass
class Batch:
    """Rows in the order in which they stand in the batch."""

    source: str | None
    session: str | None
    lanes: np.ndarray
    lane_count: int
    trajectories: np.ndarray | None
    terminated: np.ndarray
    truncated: np.ndarray
    starts: np.ndarray
    rewards: np.ndarray
    time: int

    @property
    def count(self) -> int:
        return len(self.lanes)

    def steps(self, *, flags: bool) -> Steps:
        return Steps(
            count=self.count,
            lanes=self.lanes if self.lane_count > 1 else None,
            lane_count=self.lane_count,
            trajectories=self.trajectories,
            terminated=self.terminated if flags or self.terminated.any() else None,
            truncated=self.truncated if flags or self.truncated.any() else None,
            starts=self.starts if flags or self.starts.any() else None,
            rewards=self.rewards,
            session=None if self.session is None else SessionKey(self.session, remote=True),
        )


cells = st.tuples(
    st.sampled_from("......xxtTsd"),  # nothing, dropped, terminated, truncated, start, both
    st.integers(0, 2),
)
shapes = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 6)),
    st.sampled_from([(1, 1), (1, 12), (3, 4), (4, 1)]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, ...]:
    lanes, times = draw(shapes)
    return (
        draw(st.sampled_from([None, None, "a", "b"])),
        draw(st.sampled_from([None, None, "client-1", "client-2"])),
        draw(st.sampled_from(["BT", "TB"])),
        lanes,
        times,
        draw(st.lists(cells, min_size=lanes * times, max_size=lanes * times)),
        draw(st.sampled_from(["", "", "", "evict", "reopen", "kill"])),
    )


def make(spec: tuple[Any, ...], *, with_trajectories: bool, time: int) -> Batch | None:
    source, session, layout, lane_count, times, drawn, _ = spec
    shape = (lane_count, times) if layout == "BT" else (times, lane_count)
    lanes = np.broadcast_to(np.arange(lane_count)[:, None], (lane_count, times))
    lanes = (lanes if layout == "BT" else lanes.T).reshape(-1)
    marks = np.array([mark for mark, _ in drawn])
    kept = marks != "x"
    if not kept.any():
        return None
    assert shape[0] * shape[1] == len(drawn)
    trajectories = np.array([number for _, number in drawn], np.int64)
    return Batch(
        source=source,
        session=session,
        lanes=lanes[kept],
        lane_count=lane_count,
        trajectories=trajectories[kept] if with_trajectories else None,
        terminated=np.isin(marks, ["t", "d"])[kept],
        truncated=np.isin(marks, ["T", "d"])[kept],
        starts=(marks == "s")[kept],
        rewards=(np.arange(len(drawn)) % 7 - 2).astype(np.float32)[kept],
        time=time,
    )


class World:
    """A table and all that a storage and an index know of it."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.table = EpisodeTable(generation=1, session="local-1")
        self.table.kernels = file_loops
        self.reference = Reference()
        self.handle = 1
        self.log: list[LogEntry] = []
        self.columns: dict[int, tuple[int, int]] = {}
        self.content = 0  # what has happened to rows and episodes
        self.base: tuple[int, str, int] = (0, json.dumps(self.table.to_base()), 0)
        self.records: list[tuple[bytes, list[NewSource], int, int]] = []
        self.index: dict[int, LogEntry] = {}
        self.index_content = 0
        self.index_live: dict[int, int] = {}
        self.index_sources: dict[int, str] = {}

    @property
    def low(self) -> int:
        return 0 if self.capacity is None else max(0, self.reference.last - self.capacity)

    def extend(self, batch: Batch, *, flags: bool) -> None:
        table, first = self.table, self.reference.last + 1
        before = json.dumps(table.to_base())
        assignment = table.assign(batch.steps(flags=flags), source=batch.source, low=self.low)
        again = table.assign(batch.steps(flags=flags), source=batch.source, low=self.low)
        assert json.dumps(table.to_base()) == before, "assign changed something"
        assert list(again.segments) == list(assignment.segments)
        self.reference.extend(batch, self.handle, self.low)
        body = pack_segments(assignment.segments)
        assert unpack_segments(body) == list(assignment.segments)
        assert len(body) == 56 * len(assignment.segments)
        for at in range(batch.count):
            row = int(assignment.episodes[at]), int(assignment.steps[at])
            assert row == self.reference.rows[first + at], f"row {at} of {batch}"
            self.columns[first + at] = row
        self.records.append((body, assignment.sources, first, batch.time))
        self.content += 1
        entries = table.commit(
            assignment.segments, assignment.sources, first_id=first, time=batch.time, sequence=batch.time
        )
        self.log += flatten(entries)

    def index_catches_up(self) -> None:
        if self.index_content == self.content:
            return
        self.index_content = self.content
        changes = self.table.take_changes()
        touched = changes.find_touched(self.low)
        self.index_sources |= {entry.source: entry.text for entry in changes.sources}
        self.index |= {entry.episode: entry for entry in changes.episodes}
        live = count_live(changes.fragments.of(touched), touched, self.low)
        self.index_live |= dict(zip(touched.tolist(), live.tolist(), strict=True))
        # as the index does with those of which nobody speaks any more
        self.index_live |= {n: 0 for n, entry in self.index.items() if entry.last_id <= self.low}
        self.table.evict(self.low)

    def reopen(self, *, killed: bool) -> None:
        """Make the table anew out of a base, rows and records; a kill leaves an old base."""
        old = self.table
        if not killed:
            self.keep_base()
            self.index_catches_up()
        last, base, floor = self.base
        self.table = EpisodeTable(generation=self.handle, session=f"local-{self.handle + 1}")
        self.table.kernels = file_loops
        self.table.load_base(json.loads(base))
        ids = range(self.low + 1, last + 1)
        rows = np.array([self.columns[id] for id in ids], np.int64).reshape(-1, 2)
        if len(rows):
            self.table.load_rows(np.arange(self.low + 1, self.low + 1 + len(rows)), rows[:, 0], rows[:, 1])
        for body, sources, first, time in self.records:
            self.table.commit(unpack_segments(body), sources, first_id=first, time=time, sequence=time)
        assert self.table.next_episode == old.next_episode
        assert self.table.next_source == old.next_source
        assert known_sessions(self.table) == known_sessions(old)
        cut = self.table.end_local(1, 0)
        self.log += cut
        self.content += bool(cut)
        self.handle += 1
        self.table.generation = self.handle
        self.reference.reopen()
        if self.index_content < floor:  # too old to be caught up
            self.index = self.rebuilt()
            self.index_live = self.reference.live_rows(self.low)
            self.index_sources = {entry.source: entry.text for entry in self.log if not entry.episode}
            self.table.take_changes()
            self.index_content = self.content
        self.keep_base()

    def keep_base(self) -> None:
        self.base = (self.reference.last, json.dumps(self.table.to_base()), self.content)
        self.records.clear()

    def rebuilt(self) -> dict[int, LogEntry]:
        latest = {entry.episode: entry for entry in self.log if entry.episode}
        still_open = {entry.episode: entry for entry in self.table.open_entries()}
        return {n: e for n, e in latest.items() if e.status != OPEN} | still_open

    def check(self) -> None:
        self.check_fragments()
        told = self.reference.episodes
        live = self.reference.live_rows(self.low)
        numbers = np.arange(1, len(told) + 2)
        found = count_live(self.table.fragments.rows, numbers, self.low).tolist()
        assert found == [*live.values(), 0]

        rebuilt = self.rebuilt()
        assert sorted(rebuilt) == list(range(1, len(told) + 1)), "log and open episodes are not all"
        for number, entry in rebuilt.items():
            assert facts(entry) == facts_told(told[number - 1]), f"episode {number}"

    def check_fragments(self) -> None:
        covered: dict[int, tuple[int, int]] = {}
        for episode, step, length, first, stride in clip(self.table.fragments.rows, self.low).T.tolist():
            for k in range(length):
                assert first + k * stride not in covered
                covered[first + k * stride] = (episode, step + k)
        window = {i: row for i, row in self.reference.rows.items() if i > self.low}
        assert covered == window

    def check_index(self) -> None:
        self.index_catches_up()
        told = self.reference.episodes
        assert {n: facts(entry) for n, entry in self.index.items()} == {
            n: facts_told(episode) for n, episode in enumerate(told, 1)
        }
        assert self.index_live == self.reference.live_rows(self.low)
        named = {entry.source: entry.text for entry in self.log if not entry.episode}
        assert self.index_sources == named
        assert {named[entry.source] for entry in self.index.values()} == {e.source for e in told}
        for number, entry in self.index.items():
            assert named[entry.source] == told[number - 1].source


def facts(entry: LogEntry) -> tuple[Any, ...]:
    return entry.trajectory, entry.start, entry.end, entry.length, entry.ret, entry.last_id, entry.status


def facts_told(told: Told) -> tuple[Any, ...]:
    return told.trajectory, told.start, told.end, told.length, told.ret, told.last_id, told.status


@pytest.mark.slow
@settings(max_examples=400)
@given(
    plan=st.lists(batches(), min_size=1, max_size=12),
    capacity=st.sampled_from([None, None, 4, 17]),
    with_trajectories=st.booleans(),
    flags=st.booleans(),
)
def test_numbers_fragments_log_and_index_follow_the_reference(
    plan: list[tuple[Any, ...]], capacity: int | None, with_trajectories: bool, flags: bool
) -> None:
    world = World(capacity)
    for time, spec in enumerate(plan, 1):
        batch = make(spec, with_trajectories=with_trajectories, time=time)
        if batch is not None:
            world.extend(batch, flags=flags)
        if spec[-1] == "evict":
            world.index_catches_up()
        elif spec[-1]:
            world.reopen(killed=spec[-1] == "kill")
        world.check()
    world.check_index()


# ---------------------------------------------------------------------------------------------------
# Cases by hand, where the reference could be wrong in the same way.


def run(table: EpisodeTable, first_id: int = 1, source: str | None = None, low: int = 0, **steps: Any) -> Any:
    made = Steps(**{name: np.array(v) if isinstance(v, list) else v for name, v in steps.items()})
    assignment = table.assign(made, source=source, low=low)
    entries = table.commit(
        assignment.segments, assignment.sources, first_id=first_id, time=first_id, sequence=first_id
    )
    return list(zip(assignment.episodes.tolist(), assignment.steps.tolist(), strict=True)), entries


@pytest.mark.parametrize("seed", range(4))
def test_columns_of_many_episodes_are_what_single_segments_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, columns, single = np.random.default_rng(seed), EpisodeTable(), EpisodeTable()
    columns.kernels = single.kernels = file_loops
    first, logs = 1, ([], [])
    for time in range(1, 20):
        n, ends = int(rng.integers(1, 60)), rng.random()
        steps = Steps(
            n,
            terminated=rng.random(n) < ends,
            truncated=rng.random(n) < 0.1,
            starts=rng.random(n) < 0.3 if rng.random() < 0.3 else None,
            rewards=rng.random(n).astype(np.float32) if rng.random() < 0.7 else None,
        )
        facts: dict[str, Any] = {} if rng.random() < 0.5 else {"note": time}
        if rng.random() < 0.3:
            facts["_split"] = "eval"
        kind, mark = rng.random(), int(rng.integers(1, 9))
        made = []
        for table, most, log in zip((columns, single), (2, 1 << 30), logs, strict=True):
            monkeypatch.setattr(table_module, "_MANY_RUNS", most)
            assigned = table.assign(steps, source=None, first_id=first, time=time, low=first - 40)
            segments = assigned.segments
            new = sum(segment.flags & NEW for segment in segments)
            groups = {"_group": [{"key": k % 5} if k % 4 else None for k in range(new)]} if kind < 0.5 else {}
            entries = table.commit(
                segments,
                assigned.sources,
                first_id=first,
                time=time,
                sequence=time,
                info=json.dumps(facts | groups) if facts or groups else "",
            )
            log += entries
            known = table.find(max(1, table.next_episode - mark))
            if known is not None:
                log += table.apply(NewFacts((replace(known.entry(time, 0), text='{"late": 1}'),)), time)
            table.evict(first - 40)
            parts = [pack_segments(segments), assigned.numbers.tolist(), table.next_episode]
            parts += [table.splits, table.split_names, table.touched.since(0)]
            if time % 3 == 0:
                changes = table.take_changes()
                parts += [sorted(map(entry_facts, changes.episodes)), changes.fragments.columns().tolist()]
                parts += [changes.find_touched(first - 40).tolist(), table.fragments.take_touched() is None]
            made.append(repr(parts))
        first += n
        assert made[0] == made[1]
    packed = [b"".join(entry.pack() for entry in log) for log in logs]
    assert packed[0] == packed[1]
    assert any(isinstance(entry, EndedEpisodes) for entry in logs[0])


def entry_facts(entry: LogEntry) -> tuple[Any, ...]:
    return tuple(
        getattr(entry, one.name) for one in fields(entry) if one.name not in ("trajectory", "sequence")
    )


def test_a_trajectory_id_after_an_end() -> None:
    """After terminated: a new episode. After truncated: it goes on, unless a start says otherwise."""
    table = EpisodeTable()
    rows, _ = run(
        table,
        count=8,
        trajectories=[7] * 8,
        terminated=[False, True, *[False] * 6],
        truncated=[False, False, False, True, False, True, False, False],
        starts=[*[False] * 6, True, False],
    )
    assert rows == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1)]


def test_time_first_makes_one_fragment_per_lane_over_many_batches() -> None:
    table = EpisodeTable()
    lanes = np.tile(np.arange(4), 5)
    for batch in range(3):
        run(table, 1 + 20 * batch, count=20, lanes=lanes, lane_count=4)
    expected = [[1, 2, 3, 4], [0] * 4, [15] * 4, [1, 2, 3, 4], [4] * 4]
    np.testing.assert_array_equal(table.fragments.rows, expected)


def test_single_rows_of_one_episode_make_one_fragment() -> None:
    table = EpisodeTable()
    for id in range(1, 600):
        run(table, id, count=1)
    np.testing.assert_array_equal(table.fragments.rows[:, 0], [1, 0, 599, 1, 1])
    assert table.fragments.rows.shape == (5, 1)


def test_a_truncated_episode_continues_only_while_rows_are_left() -> None:
    for low, expected in ((1, (1, 2)), (2, (2, 0))):
        for evicted in (False, True):  # what the index has asked must make no difference
            table = EpisodeTable()
            run(table, 1, count=2, trajectories=[5, 5], truncated=[False, True])
            if evicted:
                table.evict(low)
            assert run(table, 9, low=low, count=1, trajectories=[5])[0] == [expected]


def test_an_opening_ends_the_local_session_and_begins_another() -> None:
    table = EpisodeTable(generation=1, session="first")
    run(table, 1, "left", count=2)
    run(table, 3, None, count=2)
    again = EpisodeTable(generation=1, session="second")
    again.load_base(json.loads(json.dumps(table.to_base())))
    entries = again.end_local(8, 9)
    again.generation = 2
    assert [(e.episode, e.status, e.sequence) for e in entries if e.episode] == [(1, CUT, 9), (2, CUT, 9)]
    ended = [(e.source, e.session, e.end) for e in entries if not e.episode]
    assert ended == [(1, "first", 8), (2, "first", 8)]
    rows, made = run(again, 5, "left", count=1)
    assert rows == [(3, 0)]
    assert [(e.source, e.text, e.session) for e in made if not e.episode] == [(3, "left", "second")]
    rows, made = run(again, 6, None, count=1)
    assert rows == [(4, 0)]
    assert [(e.text, e.named, e.generation) for e in made if not e.episode] == [("@2", False, 2)]


def test_few_ended_sessions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ENDED_SESSIONS", 3)
    table = EpisodeTable()
    for number in range(6):
        client = SessionKey(f"client-{number}", remote=True)
        run(table, 1 + number, "left", count=1, session=client)
        table.apply(End(number + 1, sessions=(client,)), number)
    kept = [session["key"][0] for session in table.to_base()["sessions"]]
    assert kept == ["client-3", "client-4", "client-5"]


def test_going_on_after_truncation_is_noted() -> None:
    table = EpisodeTable()
    run(table, 1, count=2, trajectories=[5, 5], truncated=[False, True])
    _, entries = run(table, 3, count=1, trajectories=[5])
    assert [(e.episode, e.status, e.length) for e in entries] == [(1, OPEN, 3)]
    assert run(table, 4, count=1, trajectories=[5])[1] == []


def test_rows_found_again_are_in_order_and_tell_what_lost_its_first_rows() -> None:
    table = EpisodeTable()
    episodes, steps = np.array([2, 1, 2, 1, 2, 3]), np.array([0, 7, 1, 8, 2, 0])
    table.load_rows(np.arange(11, 11 + episodes.size), episodes, steps)
    found = [[2, 0, 3, 11, 2], [1, 7, 2, 12, 2], [3, 0, 1, 16, 1]]
    assert table.fragments.rows.T.tolist() == found
    assert table.take_changes().find_touched(10).tolist() == [1]
    changes = table.take_changes()
    assert changes.find_touched(10).tolist() == []
    assert changes.find_touched(11).tolist() == [2]


# ---------------------------------------------------------------------------------------------------
# Fragments.


def test_fragments_keep_their_numbers_while_others_leave() -> None:
    fragments = Fragments()
    numbers = [fragments.add(-1, (episode, 0, 1, episode, 1)) for episode in range(1, 1001)]
    assert fragments.evict(900).tolist() == list(range(1, 901))
    numbers += [fragments.add(-1, (episode, 0, 1, episode, 1)) for episode in range(1001, 2001)]
    for episode in (901, 1500, 2000):  # lengthened in place
        assert (
            fragments.add(numbers[episode - 1], (episode, 1, 2, episode + 5000, 5000)) == numbers[episode - 1]
        )
    assert fragments.rows[:, [0, 599, 1099]].T.tolist() == [[e, 0, 3, e, 5000] for e in (901, 1500, 2000)]
    assert fragments.rows.shape == (5, 1100)
    # One that is gone cannot be lengthened, nor one that goes on with another stride.
    assert fragments.add(numbers[0], (1, 1, 1, 9000, 1)) == 2000
    assert fragments.add(numbers[1999], (2000, 3, 2, 20_000, 5000)) == 2001
    assert fragments.rows.shape == (5, 1102)


def test_a_long_fragment_in_front_does_not_keep_the_dead() -> None:
    fragments = Fragments()
    number = fragments.add(-1, (1, 0, 1, 1, 1))
    for k in range(1, 10_000):
        number = fragments.add(number, (1, k, 1, 1 + 2 * k, 1))
        fragments.add(-1, (1 + k, 0, 1, 2 + 2 * k, 1))
        if k % 100 == 0:
            fragments.evict(2 * k - 50)
    assert fragments.rows.shape[1] < 600  # three blocks
    size = fragments.rows.shape[1]
    assert fragments.add(5000, (2, 0, 1, 30_000, 1)) == fragments.add(-1, (3, 0, 1, 30_001, 1)) - 1
    assert fragments.rows.shape[1] == size + 2, "a number from before was taken for a new one"
    kept = clip(fragments.rows, 19_900)
    np.testing.assert_array_equal(kept[2, kept[0] == 1].sum(), 50)


def test_captured_fragments_do_not_change(rng: np.random.Generator) -> None:
    fragments, numbers = Fragments(), [-1] * 40
    lengths = [0] * 40
    captures, expected = [], []
    for last in range(1, 4001):
        lane = int(rng.integers(40))
        numbers[lane] = fragments.add(numbers[lane], (lane, lengths[lane], 1, last, 1))
        lengths[lane] += 1
        if last % 150 == 0:
            captures.append(fragments.capture())
            expected.append(fragments.rows)
        if last % 400 == 0:
            fragments.evict(last - 700)
    fragments.fill(np.zeros((5, 3), np.int64))
    for captured, rows in zip(captures, expected, strict=True):
        np.testing.assert_array_equal(captured.columns(), rows)
        np.testing.assert_array_equal(captured.of(np.array([3])), rows[:, rows[0] == 3])


def test_clip_drops_older_slots() -> None:
    fragments = np.array([[1, 0, 5, 1, 1], [2, 3, 4, 2, 10], [3, 0, 1, 7, 1]], np.int64).T
    np.testing.assert_array_equal(clip(fragments, 0), fragments)
    np.testing.assert_array_equal(clip(fragments, 3).T, [[1, 3, 2, 4, 1], [2, 4, 3, 12, 10], [3, 0, 1, 7, 1]])
    np.testing.assert_array_equal(clip(fragments, 12).T, [[2, 5, 2, 22, 10]])
    assert clip(fragments, 100).shape == (5, 0)


def test_fragments_of_rows_that_have_left_go_by_themselves(rng: np.random.Generator) -> None:
    table, capacity = EpisodeTable(), 50
    most = 0
    for id in range(1, 6001):
        run(table, id, source=f"w{rng.integers(3)}", low=max(0, id - capacity), count=1)
        most = max(most, table.fragments.rows.shape[1])
    assert most < 600
    assert clip(table.fragments.rows, 6000 - capacity)[2].sum() == capacity
