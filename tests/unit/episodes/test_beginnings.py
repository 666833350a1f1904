"""Where an episode begins: each case of the table in docs/episodes.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.errors import SchemaError
from expstore.storages.columns.packed.column import PackedRows


def steps(*seen: float, ahead: int = 1, **fields: Any) -> TensorDict:
    """Return rows with these observations; the next one of each is `ahead` larger.

    Args:
        seen: The observations.
        ahead: How many steps the next observation is ahead.
        fields: More fields, one value per row; names after `next_` belong to the next step.
    """
    count = len(seen)
    before = torch.tensor(seen, dtype=torch.float32)[:, None]
    after: dict[str, Any] = {"observation": before + ahead}
    for flag in ("terminated", "truncated"):
        after[flag] = torch.tensor(fields.pop(flag, [False] * count))[:, None]
    rows = TensorDict({"observation": before, "next": after}, [count])
    for name, values in fields.items():
        rows[("collector", name) if name == "traj_ids" else name] = torch.as_tensor(values)
    return rows


def lanes(*rows: TensorDict) -> TensorDict:
    return torch.stack(list(rows))


def episodes_of(rb: Any) -> list[int]:
    """Return the episode of each row, by age."""
    storage = rb.storage
    place = len(storage.require_schema().fields) + 1
    found: list[int] = np.asarray(storage.read(storage.window.ids(), [place])[0]).tolist()
    return found


#: Name -> what is written, one call each; the episode of each row.
CASES: dict[str, tuple[Sequence[TensorDict], list[int]]] = {
    "terminated": ([steps(0, 1, terminated=[False, True]), steps(2, 3)], [1, 1, 2, 2]),
    "truncated": ([steps(0, 1, truncated=[False, True]), steps(2, 3)], [1, 1, 2, 2]),
    "ends inside a call": ([steps(0, 1, 2, terminated=[True, False, True])], [1, 2, 2]),
    "no end": ([steps(0, 1), steps(2, 3), steps(4, 5)], [1] * 6),
    "other trajectory id": ([steps(0, 1, traj_ids=[4, 4]), steps(2, 3, traj_ids=[5, 5])], [1, 1, 2, 2]),
    "same trajectory id": ([steps(0, 1, traj_ids=[4, 4]), steps(2, 3, traj_ids=[4, 4])], [1] * 4),
    "truncated, with a trajectory id": (
        [steps(0, 1, traj_ids=[4, 4], truncated=[False, True]), steps(2, 3, traj_ids=[4, 4])],
        [1] * 4,
    ),
    "is_init": ([steps(0, 1, is_init=[True, False]), steps(2, 3, is_init=[True, False])], [1, 1, 2, 2]),
    "step_count": ([steps(0, 1, step_count=[0, 1]), steps(2, 3, step_count=[0, 1])], [1, 1, 2, 2]),
    "gap": ([steps(0, 1), steps(0, 1)], [1, 1, 2, 2]),
    "gap, under its trajectory id": (
        [steps(0, 1, traj_ids=[4, 4]), steps(0, 1, traj_ids=[4, 4])],
        [1, 1, 2, 2],
    ),
    "gap in one trajectory": (
        [steps(0, 1, 50, 51, traj_ids=[4, 4, 5, 5]), steps(2, 3, 70, 71, traj_ids=[4, 4, 5, 5])],
        [1, 1, 2, 2, 1, 1, 3, 3],
    ),
    "gap in one lane": (
        [lanes(steps(0, 1), steps(50, 51)), lanes(steps(2, 3), steps(70, 71))],
        [1, 1, 2, 2, 1, 1, 3, 3],
    ),
    "gap, then an end": ([steps(0, 1), steps(0, 1, 2, terminated=[False, True, False])], [1, 1, 2, 2, 3]),
    "rows that do not chain": ([steps(0, 1, 2, ahead=3), steps(3, 4, 5, ahead=3)], [1] * 6),
    "rows that do not chain at the end": ([steps(0, 1), steps(10, 11, 17)], [1] * 5),
    "inside a call": ([steps(0, 1, 0, 1)], [1] * 4),
    "a run of one row": ([steps(0, 1), steps(10)], [1] * 3),
    "a run of one row in a longer call": (
        [steps(0, 1), steps(10, 20, 21, terminated=[True, False, False])],
        [1, 1, 1, 2, 2],
    ),
}

STORES: dict[str, Callable[[Path], Any]] = {
    "flat": lambda path: expstore.open(path, layout="flat"),
    "packed": lambda path: expstore.open(path, layout="packed"),
    "ram": lambda path: expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(100)),
}


@pytest.mark.guarantee(
    "rows/episodes",
    "Where an episode begins follows from one rule "
    "([Episodes](docs/episodes.md#where-an-episode-begins)); a row that does not continue a resumed "
    "episode is refused.",
)
@pytest.mark.parametrize("store", STORES)
def test_an_episode_begins(store: str, store_path: Path) -> None:
    for number, (case, (calls, expected)) in enumerate(CASES.items()):
        if store == "ram" and calls[0].ndim > 1:
            continue  # each row along the first dim of a batch is one row of TorchRL's storages
        with STORES[store](store_path.with_name(f"{number}.exp")) as rb:
            for rows in calls:
                rb.extend(rows, source="robot")
            assert episodes_of(rb) == expected, case


@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_rows_of_add_are_not_compared(kind: Any, store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        for number in (0, 1, 2, 0, 1, 2):
            row = steps(number)[0]
            rb.add(row if kind is TensorDict else row.to_dict())
        rb.extend(steps(3, 4))
        rb.extend(steps(0, 1))
        assert episodes_of(rb) == [1] * 8 + [2] * 2


def test_steps_of_a_recorder_are_not_compared(store_path: Path) -> None:
    """Its `reset` says where an episode begins."""
    seen = np.zeros(2, np.float32)
    for flush_steps, count in ((1, 2), (2, 2), (3, 3)):  # the last step of three is flushed by itself
        with (
            expstore.open(store_path / str(count * flush_steps)) as rb,
            rb.record("robot", flush_steps=flush_steps) as record,
        ):
            for _ in range(2):
                for number in range(count):
                    record.step(seen + number, 0, 1.0, seen + number + 1, False, False)
            record.reset()
            record.step(seen, 0, 1.0, seen + 1, False, False)
            record.flush()
            assert episodes_of(rb) == [1] * 2 * count + [2]


def test_rows_without_next_observations_are_not_compared(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        for _ in range(2):
            rb.extend(steps(0, 1).exclude(("next", "observation")))
        assert episodes_of(rb) == [1] * 4


def test_an_episode_without_its_last_row_continues(store_path: Path) -> None:
    with expstore.open(store_path, capacity=4) as rb:
        rb.extend(steps(0, 1), source="left")
        rb.extend(steps(50, 51, 52, 53), source="right")
        rb.extend(steps(70, 71), source="left")
        rows = rb.sql("SELECT source, length, status FROM episodes ORDER BY episode_id").fetchall()
    assert rows == [("left", 4, "open"), ("right", 4, "open")]


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("drained", [True, False])
def test_observations_of_every_kind_are_compared(
    dtype: torch.dtype, size: int, drained: bool, store_path: Path
) -> None:
    """Values are compared as bytes: NaN equals NaN. Several fields are compared together."""

    def rows(*seen: int) -> TensorDict:
        found = steps(*[0.0] * len(seen), ahead=0)
        values = torch.tensor([*seen, seen[-1] + 1])[:, None].expand(-1, size)
        values = (values % 2 == 1) if dtype == torch.bool else values.to(dtype)
        if dtype.is_floating_point:
            values[values == 2] = torch.nan
        return found.set("state", values[:-1].clone()).set(("next", "state"), values[1:].clone())

    with expstore.open(store_path) as rb:
        for seen in ((0, 1), (2, 3), (5, 6)):
            rb.extend(rows(*seen))
            if drained:
                assert len(rb[:]) == len(rb)
        assert episodes_of(rb) == [1] * 4 + [2] * 2


def test_the_last_rows_of_all_lanes_are_read_at_once(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows in the memtable, which stay there, and of rows in the columns."""
    with expstore.open(store_path) as rb:
        storage: Any = rb.storage
        state, taken = storage.state, list[list[int]]()
        storage.background.stop()
        columns = state.memtable.replaced
        read = columns.read_rows

        def noting(columns: Any, slots: Any, places: Any) -> Any:
            taken.append(slots.tolist())
            return read(columns, slots, places)

        monkeypatch.setattr(columns, "read_rows", noting)
        for start in (0, 2, 90):
            rb.add(steps(500 + start)[0], source="other")
            rb.extend(lanes(steps(start, start + 1), steps(start + 50, start + 51)), source="robot")
        assert state.memtable.count == 15
        assert not taken
        rb.flush()
        assert not state.memtable.count
        rb.extend(lanes(steps(92, 93), steps(7, 8)), source="robot")
        assert taken == [[12, 14]]
        found = rb.sql("SELECT length, status FROM episodes WHERE source != 'other' ORDER BY episode_id")
        assert found.fetchall() == [(4, "cut"), (4, "cut"), (4, "open"), (2, "cut"), (2, "open")]


def test_the_last_frames_are_not_unpacked(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(start: int) -> TensorDict:
        seen = torch.arange(start, start + 17, dtype=torch.uint8)[:, None, None].expand(-1, 64, 64)
        rows = steps(*range(start, start + 16)).set("pixels", seen[:-1].clone())
        return rows.set(("next", "pixels"), seen[1:].clone())

    def refuse(*_: Any) -> Any:
        raise AssertionError("a chunk is unpacked")

    with expstore.open(store_path) as rb:
        with monkeypatch.context() as patched:
            patched.setattr(PackedRows, "_gather_packed", refuse)
            for start in (0, 16, 50, 66):
                rb.extend(frames(start))
        found = rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
        assert found == [(32, "cut"), (32, "open")]
        with monkeypatch.context() as patched:
            patched.setattr(PackedRows, "_gather_packed", refuse)
            with pytest.raises(AssertionError, match="unpacked"):
                rb.by_id([8])


@pytest.mark.parametrize("rows", [1, 3])
def test_long_calls_are_compared_with_the_columns(
    rows: int, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MEMTABLE_BATCH_ROWS", rows)
    with expstore.open(store_path, capacity=10) as rb:
        for start in (0, 3, 6, 9, 12, 100, 103):
            rb.extend(steps(start, start + 1, start + 2))
        assert episodes_of(rb) == [1] * 4 + [2] * 6


# -- resume ----------------------------------------------------------------------------------------------


def resumed(path: Path, *calls: TensorDict, **options: Any) -> Any:
    """Write rows of a source, open the store again, and resume the source's episodes."""
    with expstore.open(path, **options) as rb:
        for rows in calls:
            rb.extend(rows, source="robot")
    rb = expstore.open(path, **options)
    rb.episodes.resume("robot")
    return rb


WRITES: dict[str, Callable[[Any, float], Any]] = {
    "add": lambda rb, start: rb.add(steps(start)[0], source="robot"),
    "add, a dict": lambda rb, start: rb.add(steps(start)[0].to_dict(), source="robot"),
    "one row": lambda rb, start: rb.extend(steps(start), source="robot"),
    "a chain": lambda rb, start: rb.extend(steps(start, start + 1), source="robot"),
    "no chain": lambda rb, start: rb.extend(steps(start, start + 2), source="robot"),
}


@pytest.mark.guarantee("rows/episodes")
@pytest.mark.some(4)
@pytest.mark.parametrize("write", WRITES)
def test_the_first_row_must_continue_a_resumed_episode(write: str, store_path: Path) -> None:
    act = WRITES[write]
    with resumed(store_path, steps(0, 1)) as rb:
        rb.add(steps(90)[0], source="other")
        with pytest.raises(SchemaError, match="'robot' does not continue episode 1, which was adopted"):
            act(rb, 7)
        assert len(rb) == 3
        act(rb, 2)
        count = len(rb)
        rb.add(steps(50)[0], source="robot")  # only the first row is checked
        assert episodes_of(rb) == [1, 1, 2, *[1] * (count - 2)]
        assert not rb.storage.episodes.heirs


def test_each_resumed_episode_is_checked_when_its_row_arrives(store_path: Path) -> None:
    def pair(left: int, right: int) -> TensorDict:
        return lanes(steps(left), steps(right))

    with resumed(store_path, lanes(steps(0, 1), steps(50, 51))) as rb:
        rb.extend(steps(2), source="robot")
        with pytest.raises(SchemaError, match="'robot//1' does not continue episode 2"):
            rb.extend(pair(3, 70), source="robot")
        rb.extend(pair(3, 52), source="robot")
        rb.extend(pair(9, 70), source="robot")
        assert episodes_of(rb) == [1, 1, 2, 2, 1, 1, 2, 1, 2]


def test_resumed_episodes_are_checked_after_an_interrupted_write(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is read again then."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with resumed(store_path, steps(0, 1)) as rb:
        with monkeypatch.context() as patched:
            patched.setattr(rb.storage.shared, "reserve", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rb.extend(steps(2, 3), source="robot")
        with pytest.raises(SchemaError, match="does not continue episode 1"):
            rb.extend(steps(7, 8), source="robot")
        rb.extend(steps(2, 3), source="robot")
        assert episodes_of(rb) == [1] * 4


def test_a_resumed_episode_that_is_ended_is_not_checked(store_path: Path) -> None:
    with resumed(store_path, steps(0, 1)) as rb:
        rb.episodes.end("robot")
        rb.extend(steps(7, 8), source="robot")
        assert episodes_of(rb) == [1, 1, 2, 2]
        assert not rb.storage.episodes.heirs


def test_a_resumed_episode_that_lost_its_last_row_continues(store_path: Path) -> None:
    with resumed(store_path, steps(0, 1), capacity=4) as rb:
        rb.extend(steps(90, 91, 92, 93), source="other")
        rb.extend(steps(7, 8), source="robot")
        assert episodes_of(rb) == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"), [((), "its last row is gone"), ([("next", "observation")], "no observations")]
)
def test_an_episode_that_cannot_be_checked_is_not_resumed(
    fields: Any, message: str, store_path: Path
) -> None:
    with expstore.open(store_path, capacity=4) as rb:
        rb.extend(steps(0, 1).exclude(*fields), source="robot")
        rb.extend(steps(90, 91, 92, 93).exclude(*fields), source="other", session="alive")
        if fields:
            rb.extend(steps(2, 3).exclude(*fields), source="robot")
    with expstore.open(store_path, capacity=4) as rb:
        with pytest.raises(SchemaError, match=f"cannot check which row continues episode 1: .*{message}"):
            rb.episodes.resume("robot")
        assert rb.sql("SELECT status FROM episodes WHERE source = 'robot'").fetchall() == [("cut",)]
        assert rb.episodes.resume("robot", check=False).tolist() == [1]
