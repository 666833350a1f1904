"""Single rows by few acts: the same bytes as by `write`, and whole or absent wherever it is cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.core.idempotency import NO_KEY
from expstore.episodes.table import Segment
from expstore.maintenance.verify import verify
from expstore.storages.engine.row_appender import RowAppender
from expstore.storages.format.journal import Journal, Kind, read_journal
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

    def noting(self: RowAppender, reward: float, status: int) -> bool:
        found.append(former(self, reward, status))
        return found[-1]

    monkeypatch.setattr(RowAppender, "append", noting)
    return found


def test_a_record_is_what_publish_packs() -> None:
    record = RowRecord(6)
    record.fields[:] = b"fields"
    segment = Segment(7, 0, 3, 2, 0, 1, 1, 0.25, 1, 0)
    payload = record.fill(column_set=4, draw=9, time=10, priority=2.5, first_id=11, segment=segment)
    assert payload == b"fields" + np.array([11, 7, 3, 10]).tobytes()
    wanted = Publish(11, 1, 0, 9, 10, 0, 2.5, [segment], [], payload, column_set=4)
    body = bytes(record._body)
    assert Publish.unpack(body).checksum != 0
    wanted.checksum = Publish.unpack(body).checksum
    assert body == wanted.pack()
    assert len(NO_KEY) == 16


def test_most_rows_take_few_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        for number in range(20):
            step(episode, number, last=number % 5 == 4)
    assert found == 4 * [False, True, True, True, True]  # the first row of an episode begins it


def test_the_journal_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    for name in ("few", "all"):
        if name == "all":
            monkeypatch.setattr(RowAppender, "append", lambda *_: False)
        with opened(tmp_path / name) as rb:
            rb.storage.engine.background.stop()
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
    "before the slot is given up": (lambda rb: (rb.storage.engine.shared, "reserve"), False, 3),
    "after the slot is given up": (lambda rb: (rb.storage.engine.shared, "reserve"), True, 3),
    "before the priority": (lambda rb: (rb.storage.priorities, "start"), False, 3),
    "before the memtable has it": (lambda rb: (rb.storage.state.memtable, "add"), False, 3),
    "after the memtable has it": (lambda rb: (rb.storage.state.memtable, "add"), True, 3),
    "before the record": (lambda rb: (Journal, "append_framed"), False, 3),
    "after the record": (lambda rb: (Journal, "append_framed"), True, 4),
    "before its episode": (lambda rb: (rb.storage.episodes, "commit"), False, 4),
    "after its episode": (lambda rb: (rb.storage.episodes, "commit"), True, 4),
    "before the window": (lambda rb: (rb.storage.state, "commit"), False, 4),
    "after the window": (lambda rb: (rb.storage.state, "commit"), True, 4),
    "before others see it": (lambda rb: (rb.storage.engine.shared, "publish"), False, 4),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_row_is_whole_or_absent_wherever_it_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    find, done, rows = CUTS[cut]
    with opened(tmp_path / "a.exp") as rb:
        episode = rb.record("env-0")
        for number in range(3):
            step(episode, number)
        with monkeypatch.context() as patched:
            owner, name = find(rb)
            patched.setattr(owner, name, after(getattr(owner, name)) if done else interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(episode, 3)
        step(episode, 9)
        assert rb[:]["action"].tolist() == [*range(rows), 9]
        assert rb.episodes().arrow()["length"].to_pylist() == [rows + 1]
        episode.close()
    assert verify(tmp_path / "a.exp") == []
    with opened(tmp_path / "a.exp") as rb:
        assert rb[:]["action"].tolist() == [*range(rows), 9]


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


def test_priorities_and_slots_of_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SPARE_SLOTS", 40)
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        rb.storage.engine.background.stop()  # else it would be ahead of the spare slots
        for number in range(250):
            step(episode, number)
            if number == 120:
                rb.update_priority([5], 7.0)
        assert sorted(rb[:]["action"].tolist()) == list(range(150, 250))
        slots = rb.storage.geometry.slot_of(rb.storage.window.ids())
        assert set(rb.storage.priorities.values[slots]) == {7.0}
        assert rb.episodes().arrow()["length"].to_pylist() == [250]
        covered = rb.storage.engine.checkpointer.covered
        assert rb.storage.last - covered <= rb.storage.geometry.spare
    assert sum(found) > 100  # where half of the spare slots wait for a checkpoint, more has to be done
    assert verify(tmp_path / "a.exp") == []


@pytest.mark.parametrize(
    "settings",
    [
        {"durability": "sync"},
        {"archive": "archive.exp"},
        {"episodes": {"traj": "action"}},
        {"episodes": {"reward_reduce": "mean"}},
    ],
    ids=str,
)
def test_where_more_has_to_be_done_rows_take_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if "archive" in settings:
        settings = {"archive": tmp_path / settings["archive"]}
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp", **settings) as rb, rb.record("env-0") as episode:
        for number in range(4):
            step(episode, number)
    assert sum(found) == (3 if "reward_reduce" in str(settings) else 0)
    with opened(tmp_path / "a.exp") as rb:
        assert rb[:]["action"].tolist() == [0, 1, 2, 3]


def test_a_snapshot_that_is_being_copied_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = taken(monkeypatch)
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        for number in range(3):
            step(episode, number)
        monkeypatch.setattr(rb.storage.hold, "first", 1)
        step(episode, 3)
        assert found == [False, True, True, False]
        monkeypatch.setattr(rb.storage.hold, "first", 0)
        step(episode, 4)
        assert found[-1]


def test_rows_of_extend_in_between(tmp_path: Path) -> None:
    """Another row of the stream continues the episode, as by `extend` alone."""
    with opened(tmp_path / "a.exp") as rb, rb.record("env-0") as episode:
        for number in range(3):
            step(episode, number)
        row = TensorDict(
            {
                "observation": torch.arange(4.0) + 3,
                "action": torch.tensor(3),
                "next": {
                    "observation": torch.arange(4.0) + 4,
                    "reward": torch.zeros(1),
                    **{
                        flag: torch.zeros(1, dtype=torch.bool) for flag in ("done", "terminated", "truncated")
                    },
                },
            }
        )
        rb.add(row, source="env-0")
        for number in range(4, 7):
            step(episode, number)
        assert rb[:]["action"].tolist() == list(range(7))
        assert rb.episodes().arrow()["length"].to_pylist() == [7]
