"""The index: its content, what SQL sees, and recovery from a lost file."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from expstore.core.values import Window
from expstore.disk.files import Disk
from expstore.errors import (
    CorruptionError,
    ExpStoreError,
    LockedError,
    MigrationError,
    QueryError,
    StateError,
    StorageError,
)
from expstore.sql.delta import Delta, Position
from expstore.sql.index import CONFIG, Index
from expstore.sql.views import Column, Relations
from tests.support import warm_processes
from tests.support.batches import closing_factory, transitions

pytestmark = pytest.mark.index

UUID = "0c7d0f4e"
ROW_COLUMNS = ["_id", "_index", "_episode", "_step", "_time", "_priority"]
STATUS = {"open": 0, "terminated": 1, "truncated": 2, "cut": 3}


# ---------------------------------------------------------------------------------------------------
# Made from facts.


def episode(
    number: int,
    *,
    source: int = 0,
    trajectory: int | None = None,
    length: int = 10,
    total: float = 0.0,
    status: str = "terminated",
    info: str | None = None,
) -> dict[str, Any]:
    return {
        "episode_id": number,
        "source": source,
        "trajectory_id": trajectory or 0,
        "has_trajectory": trajectory is not None,
        "has_return": True,
        "start_time": number * 1_000_000,
        "end_time": -1 if status == "open" else number * 1_000_000 + length,
        "length": length,
        "return": total,
        "status": STATUS[status],
        "last_id": number * 100 + length,
        "info": info,
    }


def columns_of(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    kinds = {
        "has_trajectory": bool,
        "has_return": bool,
        "return": np.float64,
        "status": np.uint8,
        "source": np.int32,
        "info": object,
    }
    return {name: np.array([row[name] for row in rows], kinds.get(name, np.int64)) for name in episode(0)}


def delta(
    position: Position,
    episodes: list[dict[str, Any]] | None = None,
    *,
    fragments: list[tuple[int, int, int, int, int]] | None = None,
    live: dict[int, int] | None = None,
    sources: list[tuple[int, str, bool, int]] | None = None,
    low: int = 0,
    last: int = 1_000_000,
    complete: bool = False,
) -> Delta:
    table = np.array(fragments or [], np.int64).reshape(-1, 5).T
    live = live or {}
    return Delta(
        position=position,
        last_id=last,
        low_id=low,
        time=position[1] * 1_000_000,
        sources=sources or [],
        episodes=columns_of(episodes or []),
        fragments=dict(zip(("episode_id", "first_step", "length", "first_id", "stride"), table, strict=True)),
        live={
            "episode_id": np.array(list(live), np.int64),
            "live_rows": np.array(list(live.values()), np.int64),
        },
        complete=complete,
    )


def relations(
    ids: np.ndarray, *, cut: int = 0, window: Window | None = None, **fields: np.ndarray
) -> Relations:
    """Rows with these ids; fields are `name=array`, nested with two underscores; parts meet at `cut`."""
    rows: dict[tuple[str, ...], np.ndarray] = {
        ("_id",): ids,
        ("_index",): ids - 1,
        ("_episode",): ids // 10,
        ("_step",): ids % 10,
        ("_time",): ids * 1_000_000,
        ("_priority",): (ids / 2).astype(np.float32),
    }
    rows |= {tuple(name.split("__")): values for name, values in fields.items()}
    return Relations([column(key, values, cut=cut) for key, values in rows.items()], window)


def column(key: tuple[str, ...], values: np.ndarray, *, dtype: str = "", cut: int = 0) -> Column:
    parts = [values[:cut], values[cut:]] if cut else [values]
    return Column(key, dtype or str(values.dtype), values.shape[1:], parts)


NOTHING = Relations()


def rows(index: Index, sql: str, seen: Relations = NOTHING, params: Any = None) -> list[tuple[Any, ...]]:
    return index.query(sql, params, seen).fetchall()


def contents(index: Index) -> dict[str, list[tuple[Any, ...]]]:
    names = ("episodes", "fragments", "sources", "commits", "meta", "episode_rows", "fragment_rows")
    return {name: sorted(rows(index, f"FROM {name}"), key=repr) for name in names}


class Watched(Disk):
    """Notes every act on a file, and refuses the one with number `fail_at`."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.acts: list[tuple[str, str]] = []
        self.fail_at = fail_at

    def gate(self, act: str, path: Path) -> None:
        self.acts.append((act, path.name))
        if len(self.acts) - 1 == self.fail_at:
            raise StorageError(f"refused to {act} {path.name}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.duckdb"


@pytest.fixture
def open_index(path: Path) -> Iterator[Callable[..., Index]]:
    def make() -> Index:
        return Index.open(path, disk=Disk(), store_uuid=UUID)

    with closing_factory(make) as factory:
        yield factory


@pytest.fixture
def index(open_index: Callable[..., Index]) -> Index:
    """An empty index in a file."""
    return open_index()


@pytest.fixture(scope="module")
def asked() -> Iterator[Index]:
    """An index in memory that tests only query."""
    with contextlib.closing(Index.open(None, disk=Disk(), store_uuid=UUID)) as index:
        index.commit(FIRST)
        yield index


FIRST = delta(
    (1, 4),
    [
        episode(1, source=1, trajectory=7, total=2.5, info='{"seed": 3}'),
        episode(2, source=2, status="open", length=4),
    ],
    fragments=[(1, 0, 10, 1, 1), (2, 0, 4, 11, 1)],
    live={1: 10, 2: 4},
    sources=[(1, "arm", True, 1, "s1", 900, None), (2, "1.0", False, 1, "s1", 900, None)],
    last=14,
)


# ---------------------------------------------------------------------------------------------------
# Commits.


def test_a_missing_file_is_made_by_the_first_commit(path: Path, open_index: Callable[..., Index]) -> None:
    index = open_index()
    assert (index.position, index.notice) == ((0, 0), None)
    assert rows(index, "SELECT count(*) FROM episodes") == [(0,)]
    assert list(path.parent.iterdir()) == []
    index.commit(FIRST)
    assert [file.name for file in path.parent.iterdir()] == ["index.duckdb"]
    index.close()
    again = open_index()
    assert (again.position, again.notice) == ((1, 4), None)
    assert rows(again, "SELECT episode_id FROM episodes ORDER BY 1") == [(1,), (2,)]


def test_an_index_that_was_never_committed_to_leaves_no_file(
    path: Path, open_index: Callable[..., Index]
) -> None:
    index = open_index()
    index.write_meta({"env": "CartPole"})
    index.write_priorities(np.array([1]), np.array([1.0]))
    index.close()
    assert list(path.parent.iterdir()) == []


def test_episodes_say_what_they_were_given(index: Index) -> None:
    index.commit(FIRST)
    found = index.query("SELECT * FROM episodes ORDER BY episode_id", None, NOTHING)
    assert found.columns == [
        *("episode_id", "source", "length", "return", "status"),
        *("start_time", "end_time", "split", "selections", "trajectory_id", "live_rows", "info"),
    ]
    start = datetime(1970, 1, 1)
    first = start.replace(second=1), start.replace(second=1, microsecond=10)
    second = start.replace(second=2), None
    assert found.fetchall() == [
        (1, "arm", 10, 2.5, "terminated", *first, "train", [], 7, 10, '{"seed": 3}'),
        (2, "1.0", 4, 0.0, "open", *second, "train", [], None, 4, None),
    ]
    assert rows(index, "SELECT info.seed::INT + 1 FROM episodes WHERE source = 'arm'") == [(4,)]
    assert rows(index, "FROM commits") == [(1, 4, 0, 14, start.replace(second=4))]


def test_a_second_commit_of_the_same_changes_nothing(index: Index) -> None:
    index.commit(FIRST)
    before = contents(index)
    index.commit(FIRST)
    assert contents(index) == before
    more = delta((1, 5), [episode(2, source=2, length=9)], fragments=[(2, 0, 9, 11, 1)], live={2: 9}, last=19)
    index.commit(more)
    after = contents(index)
    index.commit(more)
    assert contents(index) == after != before


def test_existing_rows_are_replaced(index: Index) -> None:
    index.commit(FIRST)
    index.commit(
        delta(
            (1, 9),
            [episode(2, source=2, length=8, status="truncated")],
            fragments=[(2, 0, 6, 11, 1), (2, 6, 2, 20, 1)],
            live={1: 7, 2: 8},
            sources=[(2, "leg", True, 1, "s1", 900, 950), (3, "x", True, 2, "s2", 960, None)],
            low=3,
            last=21,
        )
    )
    assert index.position == (1, 9)
    assert rows(index, "SELECT episode_id, source, length, status, live_rows FROM episodes ORDER BY 1") == [
        (1, "arm", 10, "terminated", 7),
        (2, "leg", 8, "truncated", 8),
    ]
    assert rows(index, "FROM fragments ORDER BY first_id") == [
        (1, 3, 7, 4, 1),
        (2, 0, 6, 11, 1),
        (2, 6, 2, 20, 1),
    ]
    assert len(rows(index, "FROM sources")) == 3
    assert rows(index, "SELECT sequence FROM commits ORDER BY 1") == [(4,), (9,)]


def test_an_episode_that_is_only_annotated_keeps_its_live_rows(index: Index) -> None:
    index.commit(FIRST)
    index.commit(delta((1, 5), [episode(1, source=1, info="[1]"), episode(3)], last=14))
    assert rows(index, "SELECT episode_id, live_rows, info FROM episodes ORDER BY 1") == [
        (1, 10, "[1]"),
        (2, 4, None),
        (3, 0, None),
    ]


def test_evicted_episodes_stay_and_dead_fragments_go(index: Index) -> None:
    index.commit(FIRST)
    index.commit(delta((1, 6), live={1: 0}, low=10, last=14))
    assert rows(index, "SELECT episode_id, live_rows FROM episodes ORDER BY 1") == [(1, 0), (2, 4)]
    assert rows(index, "SELECT first_id FROM fragment_rows") == [(11,)]


def test_a_delta_that_comes_late_changes_nothing(index: Index) -> None:
    index.commit(FIRST)
    index.commit(delta((2, 1), [episode(5)], last=20))
    index.commit(delta((1, 8), [episode(5, length=3)], last=20))
    assert index.position == (2, 1)
    assert rows(index, "SELECT length FROM episodes WHERE episode_id = 5") == [(10,)]


def test_a_complete_delta_replaces_everything(index: Index) -> None:
    index.commit(FIRST)
    index.write_meta({"env": "CartPole", "n": [1, 2]})
    index.commit(delta((1, 2), [episode(9, status="cut")], live={9: 1}, complete=True))
    assert index.position == (1, 2)
    assert rows(index, "SELECT episode_id, status, source FROM episodes") == [(9, "cut", None)]
    assert rows(index, "FROM fragments") == []
    assert rows(index, "SELECT generation, sequence FROM commits") == [(1, 2)]
    assert rows(index, "FROM meta ORDER BY key") == [("env", '"CartPole"'), ("n", "[1, 2]")]


def test_meta_survives_a_rebuild_after_reopening(open_index: Callable[..., Index]) -> None:
    index = open_index()
    index.write_meta({"a": 1})
    index.commit(FIRST)
    index.close()
    index = open_index()
    index.commit(dataclasses.replace(FIRST, complete=True))
    assert rows(index, "FROM meta") == [("a", "1")]


def test_meta_of_the_opening_replaces_that_of_the_file(path: Path) -> None:
    for capacity in (10, 20):
        meta = {"capacity": capacity}
        with contextlib.closing(Index.open(path, disk=Disk(), store_uuid=UUID, meta=meta)) as index:
            index.commit(FIRST)
            assert rows(index, "FROM meta") == [("capacity", str(capacity))]


def test_the_last_commit_writes_everything_and_lets_go_of_the_file(
    path: Path, open_index: Callable[..., Index]
) -> None:
    index = open_index()
    index.write_meta({"a": 1})
    index.commit(FIRST, last={"a": 2})
    assert index.complete
    with duckdb.connect(str(path), read_only=True) as con:  # refused while anybody here has it open
        assert con.execute("SELECT key, value FROM meta").fetchall() == [("a", "2")]
        assert con.execute("SELECT count(*) FROM episodes").fetchall() == [(2,)]
    index.close()
    index = open_index()
    assert (index.position, index.notice) == ((1, 4), None)
    index.commit(delta((1, 5), [episode(3)]), last={"a": 3})
    assert not index.complete  # what is there takes in what changed, and is open
    assert rows(index, "FROM meta") == [("a", "2")]


def test_invalid_json_is_refused_and_nothing_is_committed(index: Index) -> None:
    index.commit(FIRST)
    with pytest.raises(StorageError, match="JSON"):
        index.commit(delta((1, 5), [episode(3, info="{")]))
    assert index.position == (1, 4)
    assert rows(index, "SELECT count(*), max(sequence) FROM episodes, commits") == [(2, 4)]


def test_an_index_that_cannot_begin_says_so() -> None:
    index = Index.open(None, disk=Disk(), store_uuid="a", meta={"x": "\ud800"})
    with pytest.raises(QueryError, match="JSON"):
        rows(index, "SELECT 1")
    with pytest.raises(StorageError, match="JSON"):
        index.write_meta({"x": "\ud800"})
    index.close()


@pytest.mark.slow
@pytest.mark.some(1)
def test_the_index_follows_a_model(index: Index, rng: np.random.Generator) -> None:
    """A hundred deltas of a ring of 60 rows, each at times committed twice, against plain dicts."""
    model: dict[int, dict[str, Any]] = {}
    live: dict[int, int] = {}
    last, low, newest = 0, 0, 0
    for sequence in range(1, 101):
        changed: dict[int, dict[str, Any]] = {}
        fragments = []
        for _ in range(rng.integers(0, 4)):
            if not newest or model[newest]["status"]:
                newest += 1
                model[newest] = episode(newest, length=0, status="open")
            count = int(rng.integers(1, 12))
            status = "terminated" if rng.random() < 0.5 else "open"
            length = model[newest]["length"] + count
            changed[newest] = model[newest] = episode(newest, length=length, status=status)
            fragments.append((newest, length - count, count, last + 1, 1))
            live[newest] = live.get(newest, 0) + count
            last += count
        moved = dict.fromkeys(changed)
        while last - low > 60:
            low += 1
            owner = next(number for number in live if live[number])
            live[owner] -= 1
            moved[owner] = None
        made = delta(
            (1, sequence),
            list(changed.values()),
            fragments=fragments,
            live={number: live[number] for number in moved},
            low=low,
            last=last,
            complete=sequence == 50 and not changed,
        )
        if made.complete:
            continue
        for _ in range(rng.integers(1, 3)):
            index.commit(made)
    found = rows(index, "SELECT episode_id, length, status = 'open', live_rows FROM episodes ORDER BY 1")
    assert found == [
        (number, row["length"], row["status"] == 0, live[number]) for number, row in sorted(model.items())
    ]
    assert rows(index, "SELECT sum(length)::BIGINT FROM fragments") == [(60,)]
    assert rows(index, "SELECT min(first_id), max(first_id + (length - 1) * stride) FROM fragments") == [
        (low + 1, last)
    ]


# ---------------------------------------------------------------------------------------------------
# Queries over the columns.


def test_nested_keys_read_as_in_a_tensordict(asked: Index, rng: np.random.Generator) -> None:
    ids = np.arange(1, 101)
    reward = rng.normal(size=(100, 1)).astype(np.float32)
    seen = relations(
        ids,
        cut=60,
        action=ids % 3,
        next__reward=reward,
        next__done=ids[:, None] % 10 == 0,
        next__pixels=np.arange(100 * 6, dtype=np.uint8).reshape(100, 2, 3),
        next__agents__arm__force=reward.astype(np.float64)[:, 0],
        mask=np.stack([ids % 2 == 0, ids % 3 == 0], axis=1),
    )
    found = asked.query("SELECT * FROM transitions ORDER BY _id", None, seen)
    assert found.columns == [*ROW_COLUMNS, "action", "next", "mask"]
    fourth = found.fetchall()[3]
    assert fourth[:6] == (4, 3, 0, 4, datetime(1970, 1, 1, 0, 0, 4), 2.0)
    assert fourth[6] == 1
    assert fourth[7] == {
        "reward": reward[3, 0],
        "done": False,
        "pixels": [[18, 19, 20], [21, 22, 23]],
        "agents": {"arm": {"force": float(reward[3, 0])}},
    }
    assert fourth[8] == [True, False]
    (average, done, force) = rows(
        asked,
        "SELECT avg(next.reward), count(*) FILTER (next.done), avg(next.agents.arm.force) FROM transitions",
        seen,
    )[0]
    assert average == pytest.approx(reward.mean(dtype=np.float64))
    assert (done, force) == (10, pytest.approx(reward.mean(dtype=np.float64)))
    assert rows(asked, "SELECT next.pixels[2][3], mask[1] FROM transitions WHERE _id = 99", seen) == [
        (593 % 256, False)
    ]


def test_integers_keep_their_values(asked: Index) -> None:
    limits = {
        f"{kind}{bits}": np.iinfo(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)
    }
    fields = {name: np.array([one.min, 5, one.max], name) for name, one in limits.items()}
    found = rows(asked, f"SELECT {', '.join(fields)} FROM transitions", relations(np.arange(1, 4), **fields))
    assert found == [*zip(*(values.tolist() for values in fields.values()), strict=True)]


HALF = [
    "SELECT h, next.b FROM transitions WHERE _id BETWEEN 66000 AND 66002",
    "SELECT h, next.b FROM (FROM transitions) WHERE _id BETWEEN 66000 AND 66002",
    "SELECT COLUMNS('^h$'), t.next.b FROM transitions t WHERE _id BETWEEN 66000 AND 66002",
]


def test_half_precision_reads_as_float(asked: Index, rng: np.random.Generator) -> None:
    ids = np.arange(1, 140_001)
    half = rng.normal(size=len(ids)).astype(np.float16)
    wide = rng.normal(size=(len(ids), 3)).astype(np.float32)
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    visible = (bits.astype(np.uint32) << 16).view(np.float32)
    made = relations(ids, cut=70_000, h=half)
    fields = [*made.columns, column(("next", "b"), bits, dtype="bfloat16", cut=70_000)]
    seen = Relations(fields)
    expected = [(half[k], pytest.approx(visible[k].tolist())) for k in (65_999, 66_000, 66_001)]
    for sql in HALF:
        assert rows(asked, sql, seen) == expected, sql
    # Filters go where the values are converted; they must see the same values.
    assert rows(asked, "SELECT count(*) FROM transitions WHERE h > 0.5", seen) == [((half > 0.5).sum(),)]
    assert rows(asked, "SELECT count(*), max(_id) FROM transitions", seen) == [(140_000, 140_000)]
    assert rows(asked, "SELECT avg(next.b[2]) FROM transitions WHERE _id <= 100 AND h < 0", seen)[0][
        0
    ] == pytest.approx(visible[:100][half[:100] < 0, 1].mean(dtype=np.float64))


def test_a_two_dimensional_field_next_to_half_precision(index: Index) -> None:
    """Rows that pass a filter have their own values, also where they are read in several batches."""
    ids = np.arange(1, 140_001)
    frames = np.stack([ids, -ids, ids * 2, ids * 3], 1).reshape(-1, 2, 2)
    seen = relations(ids, h=(ids % 7).astype(np.float16), frame=frames)
    found = rows(
        index, "SELECT _id, frame FROM transitions WHERE h = 3 AND _id > 70000 AND _id < 70100", seen
    )
    assert found == [(i, frames[i - 1].tolist()) for i in range(70_001, 70_100) if i % 7 == 3]


def test_half_precision_keeps_infinities_and_nan(asked: Index) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 6e-8, -0.0, 65504], np.float16)
    found = [row[0] for row in rows(asked, "SELECT h FROM transitions", relations(np.arange(1, 7), h=values))]
    np.testing.assert_array_equal(np.array(found, np.float32), values.astype(np.float32))


def test_shapes_and_dtypes_that_duckdb_does_not_know(asked: Index) -> None:
    ids = np.arange(1, 4)
    seen = relations(
        ids,
        z=np.array([1 + 2j, 3, 4j], np.complex64),
        zs=np.full((3, 2), 1 - 1j, np.complex64),
        none=np.zeros((3, 0), np.float32),
        deep=np.zeros((3, 4, 0), np.float16),
        big=np.ones((3, 150_000), np.uint8),
    )
    assert rows(asked, "SELECT z, zs, none, deep, len(big::UTINYINT[]) FROM transitions LIMIT 1", seen) == [
        ([1.0, 2.0], [[1.0, -1.0], [1.0, -1.0]], [], [], 150_000)
    ]


def test_a_field_may_have_the_name_of_a_row_column(asked: Index) -> None:
    ids = np.arange(1, 4)
    base = relations(ids)
    fields = [column(("_id",), ids * 10), column(("_STEP",), ids * 100), column(("_id_",), ids * 1000)]
    seen = Relations([*base.columns, *fields])
    found = asked.query("SELECT * FROM transitions WHERE _id = 2", None, seen)
    assert found.columns == [*ROW_COLUMNS, "_id_", "_STEP_", "_id__"]
    assert found.fetchall()[0][6:] == (20, 200, 2000)


def test_a_store_without_rows_or_fields_can_be_asked(asked: Index) -> None:
    found = asked.query("SELECT * FROM transitions", None, NOTHING)
    assert (found.columns, found.fetchall()) == (ROW_COLUMNS, [])
    empty = relations(np.zeros(0, np.int64), next__reward=np.zeros((0, 1), np.float32))
    assert rows(asked, "SELECT count(*), avg(next.reward) FROM transitions", empty) == [(0, None)]
    no_parts = Relations([dataclasses.replace(part, parts=[]) for part in empty.columns])
    assert rows(asked, "SELECT sum(next.reward) FROM transitions", no_parts) == [(None,)]


def test_columns_are_not_copied_and_results_are(asked: Index) -> None:
    values = np.arange(5.0)
    seen = relations(np.arange(1, 6), x=values)
    values[:] = 7
    found = asked.query("SELECT x FROM transitions", None, seen)
    values[:] = 8
    assert found.fetchall() == [(7.0,)] * 5


def test_transitions_join_episodes(index: Index) -> None:
    index.commit(FIRST)
    seen = relations(np.arange(10, 30), x=np.ones(20))
    sql = """SELECT e.status, sum(t.x) FROM transitions t JOIN episodes e ON e.episode_id = t._episode
             GROUP BY ALL ORDER BY 1"""
    assert rows(index, sql, seen) == [("open", 10.0), ("terminated", 10.0)]


def test_priorities_are_the_column_while_there_is_one(index: Index) -> None:
    index.commit(FIRST)
    index.write_priorities(np.array([1, 2]), np.array([0.25, 0.5]))
    assert rows(index, "FROM priorities ORDER BY id") == [(1, 0.25), (2, 0.5)]
    assert rows(index, "FROM Priorities ORDER BY id", relations(np.arange(3, 5))) == [(3, 1.5), (4, 2.0)]
    index.write_priorities(np.array([9]), np.array([3.0]))
    assert rows(index, "FROM priorities") == [(9, 3.0)]


@pytest.mark.slow
@pytest.mark.some(1)
def test_fragments_are_cut_to_the_window(index: Index, rng: np.random.Generator) -> None:
    fragments, taken = [], 1
    for number in range(200):
        length, stride = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        fragments.append((number, int(rng.integers(0, 50)), length, taken, stride))
        taken += int(rng.integers(1, 4))
    for low, last in [(0, taken + 100), (60, 200), (61, 61), (150, 163), (0, 5), (9, 9)]:
        index.commit(delta((1, 1), fragments=fragments, low=low, last=last, complete=True))
        expected = set()
        for number, step, length, first, stride in fragments:
            kept = [k for k in range(length) if low < first + k * stride <= last]
            if kept:
                expected.add((number, step + kept[0], len(kept), first + kept[0] * stride, stride))
        assert set(rows(index, "FROM fragments")) == expected
        index.commit(delta((1, 1), fragments=fragments, low=0, last=taken + 100, complete=True))
        seen = relations(np.arange(1, 2), window=Window(low, last))
        assert set(rows(index, "SELECT * FROM fragments", seen)) == expected


def test_parameters(asked: Index) -> None:
    seen = relations(np.arange(1, 11))
    assert rows(asked, "SELECT count(*) FROM transitions WHERE _id > ?", seen, [7]) == [(3,)]
    assert rows(asked, "SELECT count(*) FROM transitions WHERE _id > $1 AND _id < $2", seen, (7, 9)) == [(1,)]
    assert rows(asked, "SELECT count(*) FROM transitions WHERE _id > $low", seen, {"low": np.int64(4)}) == [
        (6,)
    ]
    ids = np.array([2, 3])
    assert rows(asked, "SELECT count(*) FROM transitions WHERE _id IN (SELECT unnest(?))", seen, [ids]) == [
        (2,)
    ]
    with pytest.raises(QueryError, match="takes a list of length 1, one value for each"):
        rows(asked, "SELECT ?", seen)


# ---------------------------------------------------------------------------------------------------
# Only reading.

FORBIDDEN = [
    "",
    "-- nothing",
    "SELECT 1; SELECT 2",
    "SELECT 1; DELETE FROM episode_rows",
    "INSERT INTO episode_rows (episode_id) VALUES (77)",
    "WITH x AS (INSERT INTO episode_rows (episode_id) VALUES (77) RETURNING episode_id) SELECT * FROM x",
    "WITH x AS (DELETE FROM episode_rows RETURNING episode_id) SELECT * FROM x",
    "UPDATE episode_rows SET length = 0",
    "DELETE FROM episode_rows",
    "CREATE TABLE t (a INT)",
    "CREATE TEMP TABLE t (a INT)",
    "DROP TABLE episode_rows",
    "ATTACH ':memory:' AS other",
    "COPY episode_rows TO 'out.csv'",
    "SET threads = 1",
    "EXPLAIN ANALYZE DELETE FROM episode_rows",
    "INSTALL httpfs",
    "UPDATE EXTENSIONS",
    "BEGIN",
    "CHECKPOINT",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM local_frame",
]


def test_whatever_does_not_only_read_is_refused(index: Index, tmp_path: Path) -> None:
    local_frame = pd.DataFrame({"a": [1]})
    index.commit(FIRST)
    before = contents(index)
    for sql in FORBIDDEN:
        with pytest.raises(QueryError) as caught:
            rows(index, sql)
        assert caught.value.kind == "query", sql
        assert contents(index) == before, sql
    assert not list(tmp_path.glob("out*"))
    assert len(local_frame) == 1


#: Statement, the beginnings of the error's message and hint.
ERRORS = [
    ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"', ""),
    ("SELECT 'x'::INT", "Conversion Error: Could not convert string 'x' to INT32", ""),
    ("FROM transition", "there is no relation 'transition'", "did you mean transitions?"),
    ("FROM sailors", "there is no relation 'sailors'", "the relations are annotations, commits,"),
    (
        "SELECT nothing FROM episodes",
        "episodes has no column nothing",
        "episodes has episode_id, source, length, return, status, start_time, end_time, split, "
        "selections, trajectory_id, live_rows, info",
    ),
    (
        "SELECT e.lenght FROM episodes e, fragments",
        "episodes has no column lenght",
        "did you mean length? episodes has length, episode_id, source,",
    ),
    ("SELECT x FROM (SELECT 1 AS y)", 'Binder Error: Referenced column "x" not found', ""),
    ("SELECT fleur(1)", "Catalog Error: Scalar Function with name fleur does not exist", ""),
]


def test_errors_of_duckdb_name_missing_and_existing_columns(asked: Index) -> None:
    for sql, message, hint in ERRORS:
        with pytest.raises(QueryError) as caught:
            rows(asked, sql)
        assert caught.value.message.startswith(message)
        assert caught.value.hint.startswith(hint)
        assert bool(caught.value.hint) == bool(hint)
        assert "pg_" not in str(caught.value)
        assert isinstance(caught.value.__cause__, duckdb.Error)


def test_other_ways_to_read_are_fine(asked: Index) -> None:
    for sql in ("FROM episodes", "VALUES (1)", "SHOW TABLES", "DESCRIBE transitions", "TABLE meta"):
        rows(asked, sql)


# ---------------------------------------------------------------------------------------------------
# Results.


def test_a_result_in_every_shape(asked: Index, tmp_path: Path) -> None:
    seen = relations(np.arange(1, 4), x=np.array([[1.5, 2], [3, 4], [5, 6]]))
    found = asked.query("SELECT _id, x, _id * 2 AS _id FROM transitions ORDER BY 1", None, seen)
    expected = [(1, [1.5, 2.0], 2), (2, [3.0, 4.0], 4), (3, [5.0, 6.0], 6)]
    assert found.fetchall() == list(found) == expected
    assert (found.shape, len(found)) == ((3, 3), 3)
    assert [found.fetchone() for _ in range(4)] == [*expected, None]
    assert found.arrow().num_rows == 3
    named = asked.query("SELECT _id, x[1] AS first, sum(_id) AS n FROM transitions GROUP BY ALL", None, seen)
    assert named.columns == ["_id", "first", "n"]
    frame = named.df().sort_values("_id")
    assert frame["first"].tolist() == [1.5, 3.0, 5.0]
    assert frame["n"].dtype == np.int64
    named.to_parquet(tmp_path / "r.parquet")
    assert pq.read_table(tmp_path / "r.parquet").equals(named.arrow())
    with pytest.raises(StorageError, match="cannot write the result"):
        named.to_parquet(tmp_path / "no" / "r.parquet")


def test_sums_of_integers_are_integers_also_where_they_do_not_fit(index: Index) -> None:
    seen = relations(np.arange(1, 4), x=np.full(3, 2**62))
    (small, large) = rows(index, "SELECT sum(_id), sum(x) FROM transitions", seen)[0]
    assert (type(small), small) == (int, 6)
    assert int(large) == 3 * 2**62


def test_a_result_as_polars(index: Index) -> None:
    pytest.importorskip("polars")
    assert index.query("SELECT 1 AS a", None, NOTHING).pl().to_dicts() == [{"a": 1}]


def test_a_result_shows_itself_shortly(asked: Index) -> None:
    seen = relations(np.arange(1, 1001), pixels=np.zeros((1000, 84, 84), np.uint8))
    text = repr(asked.query("SELECT * FROM transitions ORDER BY _id", None, seen))
    lines = text.splitlines()
    assert len(lines) == 12
    assert lines[0].split()[:3] == ["_id", "_index", "_episode"]
    assert lines[10].split()[0] == "10"
    assert lines[11].startswith("... 1000 rows")
    assert max(map(len, lines)) < 140
    assert repr(asked.query("SELECT 'a\nb' AS t, NULL AS n", None, NOTHING)) == "t    n\na b  None"
    assert "more columns" in repr(
        asked.query("SELECT " + ", ".join(f"{k} AS column_{k}" for k in range(40)), None, seen)
    )


# ---------------------------------------------------------------------------------------------------
# Threads and processes.


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("rebuild_every", [0, 4])
def test_eight_threads_ask_while_one_commits(index: Index, rebuild_every: int) -> None:
    """Each commit adds five episodes of length 2: whatever is seen must fit one commit."""
    index.commit(delta((1, 0), complete=True))
    stop = threading.Event()
    failures: list[object] = []
    asked = [0] * 8

    def ask(number: int) -> None:
        size = 1000 + number
        seen = relations(np.arange(1, size + 1), x=np.full(size, number))
        sql = """SELECT (SELECT max(sequence) FROM commits), (SELECT count(*) FROM episodes),
                        (SELECT sum(length) FROM episodes), (SELECT count(*) FROM transitions),
                        (SELECT sum(x) FROM transitions), (SELECT sum(priority) FROM priorities)"""
        try:
            latest = 0
            while not stop.is_set() or asked[number] < 3:
                sequence, count, length, lines, total, priority = rows(index, sql, seen)[0]
                assert (count, length or 0) == (5 * sequence, 10 * sequence)
                assert (lines, total, priority) == (size, size * number, size * (size + 1) / 4)
                assert sequence >= latest
                latest = sequence
                asked[number] += 1
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    everything: list[dict[str, Any]] = []
    for sequence in range(1, 10):
        fresh = [episode(sequence * 5 + k, length=2) for k in range(5)]
        everything += fresh
        complete = bool(rebuild_every) and sequence % rebuild_every == 0
        index.commit(delta((1, sequence), everything if complete else fresh, complete=complete))
        # You read your own writes.
        assert rows(index, "SELECT count(*) FROM episodes") == [(5 * sequence,)]
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert min(asked) >= 3


@pytest.mark.slow
@pytest.mark.some(1)
def test_many_threads_commit(index: Index) -> None:
    index.commit(delta((1, 0), complete=True))

    def act(number: int) -> None:
        for step in range(5):
            index.commit(delta((1, 1), [episode(number * 10 + step)]))
            index.write_meta({f"{number}": step})

    threads = [threading.Thread(target=act, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rows(index, "SELECT count(*), count(DISTINCT episode_id) FROM episodes") == [(30, 30)]
    assert len(rows(index, "FROM meta")) == 1


def test_after_close_nothing_is_answered(index: Index) -> None:
    index.commit(FIRST)
    index.close()
    index.close()
    for act in (
        lambda: rows(index, "SELECT 1"),
        lambda: index.commit(FIRST),
        lambda: index.write_meta({}),
        lambda: index.write_priorities(np.array([1]), np.array([1.0])),
    ):
        with pytest.raises(StateError, match="closed"):
            act()


def _in_a_fork(index: Index, answers: Any) -> None:
    try:
        index.query("SELECT 1", None, NOTHING)
    except StateError as exc:
        answers.put(str(exc))
    index.close()


def test_a_fork_may_not_use_it_and_does_no_harm(path: Path, open_index: Callable[..., Index]) -> None:
    index = open_index()
    index.commit(FIRST)
    index.commit(delta((1, 5), [episode(3)]))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_a_fork, args=(index, answers))
    child.start()
    assert "fork" in answers.get()
    child.join(30)
    assert child.exitcode == 0
    assert path.with_name("index.duckdb.wal").exists()
    assert rows(index, "SELECT count(*) FROM episodes") == [(3,)]


KEEP_OPEN = """
import sys, duckdb
con = duckdb.connect(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
"""


def test_locked_by_another_process(path: Path) -> None:
    index = Index.open(path, disk=Disk(), store_uuid=UUID)
    index.commit(FIRST)
    index.close()
    with subprocess.Popen(
        [sys.executable, "-c", KEEP_OPEN, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "open\n"
        with pytest.raises(LockedError, match=rf"index\.duckdb is open in .*\(PID {shell.pid}\)"):
            Index.open(path, disk=Disk(), store_uuid=UUID)
        shell.communicate("\n")
    assert sorted(file.name for file in path.parent.iterdir()) == ["index.duckdb"]
    index = Index.open(path, disk=Disk(), store_uuid=UUID)
    assert (index.position, index.notice) == ((1, 4), None)
    index.close()


def test_the_file_is_locked_while_it_is_open(path: Path, open_index: Callable[..., Index]) -> None:
    index = open_index()
    index.commit(FIRST)
    index.commit(dataclasses.replace(FIRST, complete=True))
    code = f"import duckdb; duckdb.connect({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Could not set lock" in done.stderr


CHILD = """
import sys
from pathlib import Path
from tests.unit.sql.test_index import UUID, delta, episode
from expstore.disk.files import Disk
from expstore.sql.index import Index
index = Index.open(Path(sys.argv[1]), disk=Disk(), store_uuid=UUID)
for sequence in range(index.position[1] + 1, 10_000):
    index.commit(delta((1, sequence), [episode(sequence)], fragments=[(sequence, 0, 10, sequence * 10, 1)]))
    print(sequence, flush=True)
"""


@pytest.mark.slow
def test_a_killed_owner_leaves_a_usable_file(path: Path, rng: np.random.Generator) -> None:
    for _ in range(3):
        with warm_processes.Popen(
            [sys.executable, "-c", CHILD, str(path)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            for _ in range(rng.integers(1, 15)):
                said = int(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            said = max([said, *map(int, child.stdout.read().split("\n")[:-1])])
        index = Index.open(path, disk=Disk(), store_uuid=UUID)
        assert index.notice is None
        sequence = index.position[1]
        assert sequence >= said
        assert rows(index, "SELECT count(*), max(episode_id) FROM episodes") == [(sequence, sequence)]
        assert rows(index, "SELECT count(*) FROM fragments") == [(sequence,)]
        index.close()


# ---------------------------------------------------------------------------------------------------
# The file.


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a closed index file with 5,000 episodes."""
    path: Path = tmp_path_factory.mktemp("large") / "index.duckdb"
    with contextlib.closing(Index.open(path, disk=Disk(), store_uuid=UUID)) as index:
        index.commit(LARGE)
    return path.read_bytes()


@pytest.fixture
def made(path: Path, large: bytes) -> Path:
    """A closed index file with 5,000 episodes."""
    path.write_bytes(large)
    return path


LARGE = delta(
    (3, 9),
    [episode(number, source=1, total=number / 4, info=f'{{"n": {number}}}') for number in range(5000)],
    fragments=[(number, 0, 10, number * 10 + 1, 1) for number in range(5000)],
    live=dict.fromkeys(range(5000), 10),
    sources=[(1, "arm", True, 3, "s3", 900, None)],
    complete=True,
)
LARGE_ANSWER = [(5000, 50000, sum(range(5000)) / 4)]
LARGE_QUESTION = """SELECT count(*), (SELECT sum(length) FROM fragments), sum("return")
                    FROM episodes WHERE source = 'arm' AND info.n = episode_id"""


def test_duckdbs_own_client_reads_the_file(made: Path) -> None:
    index = Index.open(made, disk=Disk(), store_uuid=UUID)
    index.write_priorities(np.array([5]), np.array([0.5]))
    index.write_meta({"env": "CartPole"})
    index.close()
    assert [file.name for file in made.parent.iterdir()] == [made.name]
    with duckdb.connect(str(made), read_only=True) as con:
        assert con.execute(LARGE_QUESTION).fetchall() == LARGE_ANSWER
        assert con.execute("SELECT status, source FROM episodes LIMIT 1").fetchall() == [
            ("terminated", "arm")
        ]
        assert con.execute("FROM priorities").fetchall() == [(5, 0.5)]
        assert con.execute("SELECT value->>'$' FROM meta").fetchall() == [("CartPole",)]
        tables = con.execute("SELECT DISTINCT tags FROM duckdb_indexes()").fetchall()
        assert tables == []
    # Also under another name, from a copy.
    copy = made.with_name("copy.duckdb")
    copy.write_bytes(made.read_bytes())
    with duckdb.connect() as con:
        con.execute(f"ATTACH '{copy}' AS other (READ_ONLY)")
        assert con.execute("SELECT count(*) FROM other.episodes").fetchall() == [(5000,)]
        assert con.execute("SELECT count(*) FROM other.fragments").fetchall() == [(5000,)]


def test_the_file_has_the_form_that_duckdb_1_5_reads(made: Path) -> None:
    magic, version = struct.unpack("<4sQ", made.read_bytes()[8:20])
    assert (magic, version <= 68) == (b"DUCK", True)


def damaged_file(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "garbage":
        data = bytearray(b"not a database" * 1000)
    elif how == "empty":
        data = bytearray()
    elif how == "cut":
        del data[len(data) // 2 :]
    elif how == "header":
        data[100] ^= 1
    elif how == "blocks":
        for at in range(12288, len(data), 4096):
            data[at + 100] ^= 1
    elif how == "other database":
        path.unlink()
        with duckdb.connect(str(path)) as con:
            con.execute("CREATE TABLE mine (a INT)")
        return
    path.write_bytes(data)


def test_a_damaged_file_is_quarantined(made: Path, large: bytes) -> None:
    for number, how in enumerate(("garbage", "empty", "cut", "header", "blocks", "other database"), 1):
        made.write_bytes(large)
        damaged_file(made, how)
        bytes_before = made.read_bytes()
        with contextlib.closing(Index.open(made, disk=Disk(), store_uuid=UUID)) as index:
            assert index.position == (0, 0)
            assert index.notice is not None
            assert "\n" not in index.notice
            assert f"index.duckdb.damaged-{number}" in index.notice
            assert made.with_name(f"index.duckdb.damaged-{number}").read_bytes() == bytes_before
            index.commit(FIRST)
            assert rows(index, "SELECT count(*) FROM episodes") == [(2,)]


def test_an_index_of_another_store_is_quarantined(made: Path) -> None:
    index = Index.open(made, disk=Disk(), store_uuid="other")
    assert index.position == (0, 0)
    assert "belongs to store" in str(index.notice)
    index.close()


def test_a_damaged_log_is_quarantined_with_its_file(path: Path, open_index: Callable[..., Index]) -> None:
    """The files are those that a killed process leaves."""
    index = open_index()
    for number in range(1, 6):
        index.commit(delta((1, number), [episode(number)]))
    killed = path.with_name("killed") / path.name
    killed.parent.mkdir()
    log = killed.with_name("index.duckdb.wal")
    data = bytearray(path.with_name(log.name).read_bytes())
    data[len(data) // 2] ^= 255
    killed.write_bytes(path.read_bytes())
    log.write_bytes(data)
    with contextlib.closing(Index.open(killed, disk=Disk(), store_uuid=UUID)) as again:
        # What DuckDB takes for a torn end is dropped without a word: an older, whole state.
        if again.notice is None:
            assert rows(again, "SELECT count(*) FROM episodes") == [(again.position[1],)]
        else:
            assert killed.with_name("index.duckdb.damaged-1.wal").read_bytes() == data
            assert not log.exists()
        again.commit(FIRST)
        assert rows(again, "SELECT count(*) FROM episodes") == [(2,)]


@pytest.mark.guarantee("damage/index")
@pytest.mark.slow
def test_one_flipped_bit_anywhere_gives_right_answers_or_a_rebuild(
    made: Path, rng: np.random.Generator
) -> None:
    whole = made.read_bytes()
    outcomes = set()
    for _ in range(12):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        made.write_bytes(data)
        index = Index.open(made, disk=Disk(), store_uuid=UUID)
        try:
            if index.notice is None:
                assert rows(index, LARGE_QUESTION) == LARGE_ANSWER
                outcomes.add("right")
            else:
                outcomes.add("at opening")
        except CorruptionError:
            outcomes.add("at a query")
            assert index.position == (0, 0)
            # Until it is rebuilt it gives no answer and takes no part of one.
            with pytest.raises(CorruptionError):
                rows(index, "SELECT 1")
            with pytest.raises(CorruptionError):
                index.commit(delta((3, 10), [episode(6000)]))
        index.commit(LARGE)
        assert rows(index, LARGE_QUESTION) == LARGE_ANSWER
        index.close()
        for file in made.parent.glob("*damaged*"):
            file.unlink()
    assert len(outcomes) > 1


@pytest.mark.parametrize(
    ("failure", "caught"),
    [
        (duckdb.FatalException("FATAL Error: fsync failed!"), CorruptionError),
        (duckdb.FatalException("FATAL Error: No space left on device"), StorageError),
        (duckdb.Error("Corrupt database file: computed checksum 1 does not match"), CorruptionError),
    ],
)
def test_damage_found_while_running_leads_to_a_rebuild(
    open_index: Callable[..., Index],
    monkeypatch: pytest.MonkeyPatch,
    failure: duckdb.Error,
    caught: type[ExpStoreError],
) -> None:
    index = open_index()
    index.commit(LARGE)

    def fail(*args: object, **kwargs: object) -> None:
        raise type(failure)(*failure.args)  # a kept one would keep what its traceback names

    with monkeypatch.context() as patch:
        patch.setattr("expstore.sql.delta.apply", fail)
        with pytest.raises(caught):
            index.commit(delta((3, 10), [episode(6000)]))
    assert index.position == (0, 0)
    with pytest.raises(CorruptionError, match="rebuilt"):
        rows(index, "SELECT 1")
    index.commit(dataclasses.replace(LARGE, position=(3, 11)))
    assert rows(index, LARGE_QUESTION) == LARGE_ANSWER
    assert "damaged-1" in str(index.notice)
    assert index.position == (3, 11)


def test_a_full_disk_leaves_the_index_as_it_was(
    open_index: Callable[..., Index], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index()
    index.commit(LARGE)

    def fail(*args: object, **kwargs: object) -> None:
        raise duckdb.TransactionException("Failed to commit: Could not write file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("expstore.sql.delta._commit", fail)  # the last step of building a new file
        patch.setattr("expstore.sql.delta.replace_priorities", fail)
        for act in (
            lambda: index.commit(dataclasses.replace(LARGE, position=(3, 10))),
            lambda: index.write_priorities(np.array([1]), np.array([1.0])),
        ):
            with pytest.raises(StorageError) as caught:
                act()
            assert caught.value.kind == "disk_full"
    assert index.position == (3, 9)
    assert rows(index, LARGE_QUESTION) == LARGE_ANSWER
    assert not list(path.parent.glob("index.tmp*"))


def header_checksum(block: bytes) -> int:
    """DuckDB's checksum, to make a file whose header is whole but names a version to come."""
    words = np.frombuffer(block, "<u8")
    return int(np.bitwise_xor.reduce(words * np.uint64(0xBF58476D1CE4E5B9))) ^ 5381


def test_a_file_of_a_newer_duckdb_is_not_touched(made: Path) -> None:
    data = bytearray(made.read_bytes())
    data[12:20] = struct.pack("<Q", 2000)
    data[:8] = struct.pack("<Q", header_checksum(bytes(data[8:4096])))
    made.write_bytes(data)
    with pytest.raises(MigrationError, match="newer than DuckDB") as caught:
        Index.open(made, disk=Disk(), store_uuid=UUID)
    assert caught.value.kind == "newer"
    assert made.read_bytes() == data


def test_a_file_of_a_newer_expstore_is_not_touched(made: Path) -> None:
    with duckdb.connect(str(made)) as con:
        con.execute("INSERT INTO schema_migrations VALUES (5, 'later', 'c', make_timestamp(0))")
    with pytest.raises(MigrationError, match=r"0005_later.*0004_selections"):
        Index.open(made, disk=Disk(), store_uuid=UUID)
    assert [file.name for file in made.parent.iterdir()] == [made.name]


def test_trouble_outside_the_file_is_not_damage(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, kind in (
        ("Too many open files", "storage"),
        ("Permission denied", "storage"),
        ("No space left on device", "disk_full"),
    ):

        def refuse(*args: object, text: str = text, **kwargs: object) -> None:
            raise duckdb.IOException(f'IO Error: Cannot open file "x": {text}')

        with monkeypatch.context() as patch:
            patch.setattr(duckdb, "connect", refuse)
            with pytest.raises(StorageError) as caught:
                Index.open(made, disk=Disk(), store_uuid=UUID)
        assert caught.value.kind == kind
    with contextlib.closing(Index.open(made, disk=Disk(), store_uuid=UUID)) as index:
        assert index.position == (3, 9)


def test_a_new_file_is_synced_before_it_gets_its_name(path: Path) -> None:
    disk = Watched()
    index = Index.open(path, disk=disk, store_uuid=UUID)
    index.commit(FIRST)
    index.commit(delta((1, 5), [episode(3)]))
    assert disk.acts == [("sync", "index.tmp"), ("rename", "index.duckdb"), ("sync_dir", path.parent.name)]
    del disk.acts[:]
    # The old file's log goes before the new file stands beside it.
    index.commit(LARGE)
    acts = [act for act in disk.acts if act[0] != "unlink"]
    assert acts == [("sync", "index.tmp"), ("rename", "index.duckdb"), ("sync_dir", path.parent.name)]
    index.close()
    assert [file.name for file in path.parent.iterdir()] == ["index.duckdb"]


@pytest.mark.slow
def test_a_rebuild_that_fails_at_any_act_can_be_repeated(path: Path) -> None:
    fail_at = 0
    while True:
        disk = Watched()
        index = Index.open(path, disk=disk, store_uuid=UUID)
        index.commit(FIRST)
        index.commit(delta((1, 5), [episode(3)]))
        disk.fail_at = len(disk.acts) + fail_at
        try:
            index.commit(LARGE)
        except ExpStoreError:
            # Either the old index still answers, or none does: never a mixture.
            try:
                assert rows(index, "SELECT count(*) FROM episodes") == [(3,)]
                assert index.position == (1, 5)
            except CorruptionError:
                assert index.position == (0, 0)
            index.commit(LARGE)
            assert rows(index, LARGE_QUESTION) == LARGE_ANSWER
            index.close()
        else:
            index.close()
            break
        index = Index.open(path, disk=Disk(), store_uuid=UUID)
        assert index.position == LARGE.position
        index.close()
        for file in path.parent.iterdir():
            file.unlink()
        fail_at += 1
    assert fail_at >= 3


def test_files_of_an_interrupted_rebuild_are_ignored(path: Path) -> None:
    path.with_name("index.tmp").write_bytes(b"half")
    path.with_name("index.tmp.wal").write_bytes(b"half")
    path.with_name("index.duckdb.wal").write_bytes(b"of another file")
    index = Index.open(path, disk=Disk(), store_uuid=UUID)
    index.commit(LARGE)
    assert rows(index, LARGE_QUESTION) == LARGE_ANSWER
    index.close()
    assert [file.name for file in path.parent.iterdir()] == ["index.duckdb"]


INTERRUPTED = """
import atexit, os, signal, sys, threading, time
from expstore.disk.files import Disk
from expstore.sql.index import Index, Relations

index = Index.open(None, disk=Disk(), store_uuid="0" * 32)
index.query("SELECT 1", None, Relations())
asked = threading.Event()

class Pressing(Relations):
    def attach(self, cursor, sql):
        try:
            return super().attach(cursor, sql)
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # before DuckDB has begun what could be interrupted

def interrupt():
    asked.wait()
    begun = time.process_time()
    while time.process_time() < begun + 0.3:  # until DuckDB computes: Python has nothing to do
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

def late():
    late = Index.open(None, disk=Disk(), store_uuid="0" * 32)
    assert late.query("SELECT 2", None, Relations()).fetchall() == [(2,)]
    os._exit(77)

early = sys.argv[1] == "early"
if not early:
    threading.Thread(target=interrupt, daemon=True).start()
try:
    asked.set()
    query = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    index.query(query, None, Pressing() if early else Relations())
except KeyboardInterrupt:
    assert index.query("SELECT 1", None, Relations()).fetchall() == [(1,)]
    index.close()
    assert not [thread for thread in threading.enumerate() if "aside" in thread.name]
    atexit.register(late)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["early", "while DuckDB computes"])
def test_ctrl_c_in_a_query_is_ctrl_c(moment: str) -> None:
    """One signal is enough, nothing is left running, and the index answers on, even at exit."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, moment], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 77, done.stderr


class Mourned(Relations):
    """Relations that can be referred to weakly."""


def test_a_query_that_fails_leaves_nothing_for_the_collector() -> None:
    """What it was given may be maps of files."""
    index = Index.open(None, disk=Disk(), store_uuid=UUID)
    relations = Mourned()
    seen = weakref.ref(relations)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(QueryError, match="nowhere") as raised:
            index.query("SELECT * FROM nowhere", None, relations)
        del relations, raised
        assert seen() is None
    finally:
        gc.enable()
        index.close()


def test_pandas_is_not_loaded_for_a_commit_and_a_query() -> None:
    code = """
import sys
import expstore
from expstore.storages.memory import MemoryStorage
from expstore.sql.sync import Catalog
Catalog(MemoryStorage(5)).query("SELECT * FROM episodes", None)
assert "pandas" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_meta_is_there_from_the_first_query(tmp_path: Path) -> None:
    """In the opening that creates a store, in a reader at the same time, and when it is opened again."""
    import expstore

    def facts(rb: Any) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in rb.sql("SELECT key, value FROM meta").fetchall()}

    with expstore.open(tmp_path / "x.exp", capacity=10, seed=3, meta={"lr": 0.1}) as rb:
        expected = facts(rb)
        assert (expected["lr"], expected["capacity"], expected["seed"]) == (0.1, 10, 3)
        with expstore.open(tmp_path / "x.exp", mode="r") as reader:
            assert facts(reader) == expected
        rb.extend(transitions(20))
        assert facts(rb) == expected
    with expstore.open(tmp_path / "x.exp") as rb:
        assert facts(rb) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_database_starts_no_threads_that_a_store_does_not_need() -> None:
    """DuckDB 2 starts eight for remote files, per database: an open store and each `where=` have one."""
    before = set(os.listdir("/proc/self/task"))
    with duckdb.connect(":memory:", config={**CONFIG, "threads": "1"}) as con:
        con.execute("SELECT sum(x) FROM range(1000) AS t(x)").fetchall()
        assert set(os.listdir("/proc/self/task")) <= before
