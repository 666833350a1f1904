"""The fast path for single rows: the same bytes as `write`, and complete or absent after a crash."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.core.idempotency import NO_KEY
from expstore.episodes import fragments
from expstore.episodes.table import Segment
from expstore.errors import CorruptionError
from expstore.maintenance.verify import verify
from expstore.storages.engine.row_appender import RowAppender
from expstore.storages.format.journal import HEADER, Journal, Kind, read_journal
from expstore.storages.format.paths import JOURNAL
from expstore.storages.format.records import Publish, RowRecord

OBSERVATION = np.arange(4, dtype=np.float32)


def step(episode: Any, number: int, *, last: bool = False) -> None:
    episode.step(OBSERVATION + number, number, 0.5 * number, OBSERVATION + number + 1, last, False)


def opened(path: Path, **settings: Any) -> Any:
    return expstore.open(path, capacity=100, seed=0, **settings)


def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note which rows are appended by few acts."""
    found: list[bool] = []
    former = RowAppender.append

    def noting(self: RowAppender, *given: Any, **named: Any) -> int:
        first_id = former(self, *given, **named)
        found.append(first_id > 0)
        return first_id

    monkeypatch.setattr(RowAppender, "append", noting)
    return found


def test_a_record_of_several_rows_is_what_publish_packs() -> None:
    record = RowRecord(2, 3)
    segments = [Segment(7, 0, 3, 2, 0, 2, 1, 0.25, 1, 0), Segment(8, 0, 0, 2, 2, 1, 1, 0.5, 0, 1)]
    for chosen in (segments, [segments[0]._replace(rows=3)]):
        record.fields[:] = b"fields"
        payload = record.fill(column_set=4, draw=9, time=10, priority=2.5, first_id=11, segments=chosen)
        episodes, steps = ([7, 7, 8], [3, 4, 0]) if len(chosen) == 2 else ([7, 7, 7], [3, 4, 5])
        numbers = np.array([[11, 12, 13], episodes, steps, [10, 10, 10]])
        assert payload == b"fields" + numbers.tobytes()
        check_record(record, Publish(11, 3, 0, 9, 10, 0, 2.5, chosen, [], payload, column_set=4))


def test_the_payload_of_a_long_row_is_compressed() -> None:
    record, segments = RowRecord(30_000, compress=True), [Segment(7, 0, 3, 1, 0, 1, 1, 0.25, 1, 0)]
    sizes = []
    for row in (bytes(30_000), np.random.default_rng(0).bytes(30_000), b"a" * 30_000):
        record.fields[:] = row
        payload = record.fill(column_set=4, draw=9, time=10, priority=2.5, first_id=11, segments=segments)
        assert payload == row + np.array([11, 7, 3, 10]).tobytes()
        frame, size = record._written
        body = bytes(frame[HEADER.size : HEADER.size + size])
        assert not any(frame[HEADER.size + size :])
        wanted = Publish(
            11, 1, 0, 9, 10, google_crc32c.value(payload), 2.5, segments, [], payload, column_set=4
        )
        assert Publish.unpack(body) == wanted
        sizes.append(size)
        if size < 1000:
            for damaged in (body[:-1], body + b"x"):
                with pytest.raises(CorruptionError, match="decompressed"):
                    Publish.unpack(damaged)
    assert max(sizes[0], sizes[2]) < 1000 < sizes[1] == len(wanted.pack())


def check_record(record: RowRecord, wanted: Publish) -> None:
    frame, size = record._written
    body = bytes(frame[HEADER.size : HEADER.size + size])
    assert not any(frame[HEADER.size + size :])
    assert Publish.unpack(body).checksum != 0
    wanted.checksum = Publish.unpack(body).checksum
    assert body == wanted.pack()
    assert len(NO_KEY) == 16


def test_the_journal_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    for name in ("few", "all"):
        if name == "all":
            monkeypatch.setattr(RowAppender, "append", lambda *_: 0)
        with opened(tmp_path / name) as rb:
            rb.storage.background.stop()
            with rb.record("env-0") as episode:
                for number in range(20):
                    step(episode, number, last=number % 5 == 4)
            records = [
                Publish.unpack(record.body)
                for record in read_journal(rb.storage.disk, tmp_path / name / JOURNAL)
                if record.kind is Kind.PUBLISH
            ]
        assert len(records) == 20
        for record in records:
            table = np.frombuffer(record.payload, np.uint8)
            assert record.time == int.from_bytes(table[-8:].tobytes(), "little")
            record.payload, record.time, record.checksum = table[:-8].tobytes(), 0, 0
            record.sources = [source.name for source in record.sources]  # sessions are new each time
        bodies.append(records)
    assert bodies[0] == bodies[1]


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def after(act: Callable[..., Any]) -> Callable[..., Any]:
    """Do something, then be interrupted."""

    def acting(*given: Any, **named: Any) -> Any:
        act(*given, **named)
        raise KeyboardInterrupt

    return acting


#: What is interrupted, and how many rows there are then.
CUTS: dict[str, tuple[Callable[[Any], tuple[Any, str]], bool, int]] = {
    "before the slot is given up": (lambda rb: (rb.storage.shared, "reserve"), False, 3),
    "after the slot is given up": (lambda rb: (rb.storage.shared, "reserve"), True, 3),
    "before the priority": (lambda rb: (rb.storage.priorities, "start"), False, 3),
    "before the memtable has it": (lambda rb: (rb.storage.state.memtable, "add"), False, 3),
    "after the memtable has it": (lambda rb: (rb.storage.state.memtable, "add"), True, 3),
    "before the record": (lambda rb: (Journal, "append_framed"), False, 3),
    "after the record": (lambda rb: (Journal, "append_framed"), True, 4),
    "before its episode": (lambda rb: (rb.storage.episodes, "commit"), False, 4),
    "after its episode": (lambda rb: (rb.storage.episodes, "commit"), True, 4),
    "before the window": (lambda rb: (rb.storage.state, "commit"), False, 4),
    "after the window": (lambda rb: (rb.storage.state, "commit"), True, 4),
    "before others see it": (lambda rb: (rb.storage.shared, "publish"), False, 4),
}


@contextlib.contextmanager
def cut_off(rb: Any, cut: str) -> Iterator[None]:
    """Interrupt what is written in the context."""
    find, done, _ = CUTS[cut]
    owner, name = find(rb)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, after(getattr(owner, name)) if done else interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.guarantee("kill/whole")
@pytest.mark.some(4)
@pytest.mark.parametrize("flush_steps", [1, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_rows_are_whole_or_absent_wherever_they_are_cut_off(
    tmp_path: Path, cut: str, flush_steps: int
) -> None:
    """Also several rows, in which an episode ends and another one begins."""
    rows = [*range(3 + flush_steps if CUTS[cut][2] == 4 else 3), 6, 7, 8]
    with opened(tmp_path / "a.exp") as rb:
        episode = rb.record("env-0", flush_steps=flush_steps)
        for number in range(2 + flush_steps):
            step(episode, number)
        with cut_off(rb, cut):
            step(episode, 2 + flush_steps)
        for number in (6, 7, 8):
            step(episode, number, last=number == 7)
        assert rb[:]["action"].tolist() == rows
        assert rb.episodes().arrow()["length"].to_pylist() == [len(rows) - 1, 1]
        episode.close()
    assert verify(tmp_path / "a.exp") == []
    with opened(tmp_path / "a.exp") as rb:
        assert rb[:]["action"].tolist() == rows


def test_a_store_with_other_content_or_fields_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        episode = rb.record("env-0")
        for number in range(3):
            step(episode, number)
        rb.dumps(tmp_path / "versions")
        for number in range(3, 6):
            step(episode, number)
        rb.loads(tmp_path / "versions")
        for number in range(6, 9):
            step(episode, number)
        assert sorted(rb[:]["action"].tolist()) == [0, 1, 2, 6, 7, 8]
        rb.empty()
        for number in range(9, 12):
            step(episode, number)
        assert sorted(rb[:]["action"].tolist()) == [9, 10, 11]
        episode.close()
    assert verify(tmp_path / "a.exp") == []


def test_sources_have_other_numbers_once_other_content_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "other.exp") as rb:
        for source in "bbaa":
            rb.add(row_of(1), source=source)
        rb.dumps(tmp_path / "versions")
    with opened(tmp_path / "a.exp") as rb:
        for content in range(2):
            for number, source in enumerate("aabbccbbaa"):
                rb.add(row_of(10 * content + number), source=source)
            names = rb.sql(
                "SELECT source FROM transitions JOIN episodes ON episode_id = _episode ORDER BY _id"
            ).fetchall()
            assert "".join(name for (name,) in names)[-10:] == "aabbccbbaa"
            if not content:
                rb.loads(tmp_path / "versions")
    assert sum(found) > 12


def test_priorities_and_slots_of_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SPARE_SLOTS", 40)
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        rb.storage.background.stop()  # else it would be ahead of the spare slots
        for number in range(250):
            step(episode, number)
            if number == 120:
                rb.update_priority([5], 7.0)
        assert sorted(rb[:]["action"].tolist()) == list(range(150, 250))
        slots = rb.storage.geometry.slot_of(rb.storage.window.ids())
        assert set(rb.storage.priorities.values[slots]) == {7.0}
        assert rb.episodes().arrow()["length"].to_pylist() == [250]
        covered = rb.storage.checkpoints.covered
        assert rb.storage.last - covered <= rb.storage.geometry.spare
    assert sum(found) > 100  # where half of the spare slots wait for a checkpoint, more has to be done
    assert verify(tmp_path / "a.exp") == []


@pytest.mark.parametrize(
    "settings",
    [
        {"durability": "sync"},
        {"episodes": {"traj": "action"}},
        {"episodes": {"reward_reduce": "mean"}},
    ],
    ids=str,
)
def test_rows_that_need_more_work_take_the_slow_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp", **settings) as rb, rb.record("env-0") as episode:
        for number in range(4):
            step(episode, number)
    assert sum(found) == (3 if "episodes" in settings else 0)
    with opened(tmp_path / "a.exp") as rb:
        assert rb[:]["action"].tolist() == [0, 1, 2, 3]


def test_a_snapshot_that_is_being_copied_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        for number in range(3):
            step(episode, number)
        monkeypatch.setattr(rb.storage.snapshot_pin, "first", 1)
        step(episode, 3)
        assert found == [False, True, True, False]
        monkeypatch.setattr(rb.storage.snapshot_pin, "first", 0)
        step(episode, 4)
        assert found[-1]


def test_rows_of_extend_in_between(tmp_path: Path) -> None:
    """Another row of the stream continues the episode, as by `extend` alone."""
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        for number in range(3):
            step(episode, number)
        row = TensorDict(row_of(3))
        row["next"] = row["next"].apply(lambda value: value.reshape(-1))  # shapes as `step` stores them
        rb.add(row, source="env-0")
        for number in range(4, 7):
            step(episode, number)
        assert rb[:]["action"].tolist() == list(range(7))
        assert rb.episodes().arrow()["length"].to_pylist() == [7]


# -- add() ----------------------------------------------------------------------------------------------


def row_of(number: int, *, end: str = "") -> dict[str, Any]:
    """Return a row whose next observation is the observation of the row with the next number."""
    after = {"reward": np.float32(0.25 * number), "terminated": end == "terminated"}
    after |= {"truncated": end == "truncated", "done": bool(end)}
    after |= {"observation": OBSERVATION + number + 1}
    return {"observation": OBSERVATION + number, "action": number, "next": after}


def lives() -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield rows and their sources: ends, restarts, interleaved sources, episodes that do not move."""
    for number in range(12):
        yield "a", row_of(number)
    for number in range(40):
        yield "ab"[number % 2], row_of(number // 2 + 12 * (number % 2 == 0))
    for number in range(30):
        yield None, row_of(number, end={9: "terminated", 19: "truncated"}.get(number, ""))
    for start in (0, 100, 200, 0, 5):  # a collector that restarts without saying so
        for number in range(12):
            yield "c", row_of(start + number)
    for _ in range(5):
        yield "d", row_of(3)
    for number in range(12):  # rows that are no steps of one another
        yield "e", row_of(7 * number % 5)
    for number in range(20):  # steps that become such rows
        yield "f", row_of(number if number < 10 else 7 * number % 5)


def trajectories() -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield rows with trajectory ids: interleaved, stopped and continued, restarted, and no transitions."""
    for number in range(20):
        yield None, row_of(number // 2) | {"episode": number % 2}
    for number in range(12):  # stopped after each third row, under one id
        yield "a", row_of(number, end="truncated" if number % 3 == 2 else "") | {"episode": 5}
    for number in range(12):  # an episode each
        yield "b", row_of(number, end=("terminated", "truncated", "")[number % 3]) | {"episode": number}
    for start in (0, 100, 200):  # a collector that restarts without saying so
        for number in range(6):
            yield "c", row_of(start + number) | {"episode": 0}
    for number in range(12):
        yield "d", row_of(number) | {"episode": -1 if number % 4 == 3 else 2**40}
    for number in range(12):
        yield "e", row_of(7 * number % 5) | {"episode": number // 6}


def add_rows(path: Path, rows: Iterable[tuple[str | None, dict[str, Any]]]) -> tuple[Any, ...]:
    """Add rows; return the indices, the number of rows, the episodes, and a sample."""
    with opened(path) as rb:
        rb.storage.background.stop()
        indices = [rb.add(row, source=source) for source, row in rows]
        columns = ["episode_id", "trajectory_id", "length", "status", "return"]
        episodes = rb.episodes().arrow().select(columns).to_pylist()
        stored = rb.sample(50)
        return indices, rb.storage.last, episodes, stored.to_dict()["action"].tolist()


@pytest.mark.some(3)
@pytest.mark.parametrize("make", [dict, TensorDict])
@pytest.mark.parametrize("kind", ["nested", "flat", "trajectories"])
def test_rows_of_add_are_those_of_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, make: Any
) -> None:
    rows: list[tuple[str | None, Any]] = list(trajectories() if kind == "trajectories" else lives())
    if kind == "flat":
        rows = [(source, flat(row)) for source, row in rows]
    rows = [(source, make(row)) for source, row in rows]
    found = taken(monkeypatch)
    few = add_rows(tmp_path / "few", rows)
    assert sum(found) > (0.7 if kind == "trajectories" else 0.8) * len(rows)
    monkeypatch.setattr(RowAppender, "append", lambda *_, **__: 0)
    assert few == add_rows(tmp_path / "all", rows)
    assert verify(tmp_path / "few") == []


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a buffer that has no group for the next step."""
    after = dict(row["next"])
    return {
        "observation": row["observation"],
        "next_observation": after.pop("observation"),
        "action": 1,
    } | after


@pytest.mark.parametrize(
    "field", [{"is_init": True}, {"step_count": 1}, {"collector": {"mask": True}}], ids=str
)
def test_rows_that_say_where_they_start_or_are_masked_take_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: dict[str, Any]
) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb:
        for number in range(4):
            rb.add(TensorDict(row_of(number) | field))
        assert len(rb) == 4
    assert not any(found)


def test_a_row_that_needs_a_closer_look_takes_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb:
        for number in range(3):
            rb.add(row_of(number))
        assert found == [True, True]  # the first row of the store fixes the fields
        rb.add(row_of(3) | {"action": torch.tensor(3)})
        rb.add(row_of(4), idempotency_key="once")
        rb.add(row_of(4), idempotency_key="once")
        rb.add(row_of(5), episode_info={"level": 3})
        assert len(found) == 2
        with pytest.raises(expstore.errors.SchemaError, match="action"):
            rb.add(row_of(6) | {"action": 0.5})
        with pytest.raises(expstore.errors.SchemaError):
            rb.add(row_of(6) | {"more": 1})
        rb.add(row_of(6))
        assert found[2:] == [True]
        assert rb[:]["action"].tolist() == list(range(7))
        assert rb.episodes().arrow()["length"].to_pylist() == [7]
    with pytest.raises(expstore.errors.StateError, match="closed"):
        rb.add(row_of(7))


def test_fragments_of_rows_that_have_left_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of irregular turns are a fragment each."""
    monkeypatch.setattr(fragments, "_BLOCK", 16)
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb:
        written = {"a": 0, "b": 0, "c": 0}
        for source in np.random.default_rng(0).choice([*written], 2000).tolist():
            rb.add(row_of(written[source]), source=source)
            written[source] += 1
        assert rb.storage.episodes.fragments.rows.shape[1] < 250  # twice the 100 rows that can be read
    assert sum(found) > 1900


def test_threads_add_rows_of_sources_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb:

        def act(source: int) -> None:
            for number in range(1000 * source, 1000 * source + 20):
                rb.add(row_of(number), source=f"env-{source}")

        threads = [threading.Thread(target=act, args=(source,)) for source in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = rb[:]
        assert (rows["next", "observation"] == rows["observation"] + 1).all()
        assert (rows["observation"][:, 0] == rows["action"]).all()
        assert sorted(rows["action"].tolist()) == [1000 * s + n for s in range(4) for n in range(20)]
        assert rb.episodes().arrow()["length"].to_pylist() == [20] * 4
    assert sum(found) >= 70
