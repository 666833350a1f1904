"""Merged stores keep rows, times, priorities and annotations, and their sources stay separate."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore import TensorDictMaxValueWriter, TensorDictReplayBuffer
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.episodes.log import LogEntry
from expstore.errors import CorruptionError, LockedError, NotFoundError, SchemaError, StateError
from expstore.maintenance import repair, verify
from expstore.storages.factory import ZarrStorage
from tests.support.case_selection import in_full, share
from tests.support.damaged_stores import flip
from tests.support.framed_rows import framed_rows
from tests.support.refusals import check_refusals
from tests.support.stores import read_columns

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs")]

SHARED = {"frame": {"layout": "packed", "rows": 4}, "next.frame": {"layout": "packed", "rows": 4}}


def batch(count: int, start: int = 0) -> TensorDict:
    return framed_rows(count, start, shape=(3,), traj_ids=lambda number: number // 7)


def make(path: Path, first: int, count: int, **more: Any) -> Path:
    """A store of rows from two sources, one of which a user has named."""
    with expstore.open(path, seed=3, episodes=expstore.EpisodeKeys(traj="traj_ids"), **more) as rb:
        for start in range(first, first + count, 10):
            source = "arm" if start // 10 % 2 else None
            rb.extend(batch(min(10, first + count - start), start), source=source, episode_info={"at": start})
        if count:
            rb.update_priority(id=[rb.storage.last], priority=[first + 2.0])
    return path


def episodes_of(rb: Any) -> list[tuple[Any, ...]]:
    """What SQL says of all episodes; open ones have no end yet, and are cut by a merge."""
    query = (
        "SELECT source, trajectory_id, start_time, "
        "CASE WHEN status IN ('open', 'cut') THEN NULL ELSE end_time END, "
        "length, return, live_rows, info, replace(status, 'open', 'cut') FROM episodes ORDER BY episode_id"
    )
    return rb.sql(query).fetchall()


@pytest.mark.guarantee("keep/resize")
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("fields", [None, SHARED])
def test_all_rows_of_all_stores_are_there(tmp_path: Path, fields: Any) -> None:
    paths = [
        make(tmp_path / "a.exp", 0, 45),
        make(tmp_path / "b.exp", 1000, 90, capacity=33, layout={"fields": SHARED}),
        make(tmp_path / "c" / "a.exp", 2000, 8) if (tmp_path / "c").mkdir() is None else Path(),
    ]
    told: list[tuple[int, int]] = []
    made = expstore.merge(
        paths, out=tmp_path / "all.exp", fields=fields, progress=lambda *both: told.append(both)
    )
    assert (made.rows, made.given_up) == (45 + 33 + 8, 0)
    assert [(run.name, run.rows) for run in made.runs] == [("a", 45), ("b", 33), ("a-2", 8)]
    assert told[-1][0] == told[-1][1]
    assert verify(tmp_path / "all.exp") == []
    assert sorted(os.listdir(tmp_path)) == ["a.exp", "all.exp", "b.exp", "c"]
    parts, episodes = [], []
    for path, run in zip(paths, made.runs, strict=True):
        with expstore.open(path, mode="r") as rb:
            parts.append(read_columns(rb.storage))
            episodes += [(f"{run.name}/{source}", *more) for source, *more in episodes_of(rb)]
    with expstore.open(tmp_path / "all.exp") as rb:
        found = read_columns(rb.storage)
        for name in set(found) - {"id", "episode"}:
            wanted = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(found[name], wanted, name)
        assert found["id"].tolist() == list(range(1, 87))
        assert episodes_of(rb) == episodes
        at = 0
        for part in parts:  # one number per episode of each, in their order
            there = found["episode"][at : at + part["id"].size]
            pairs = set(zip(part["episode"].tolist(), there.tolist(), strict=True))
            assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
            at += part["id"].size
        assert not set(found["episode"][:45]) & set(found["episode"][45:])
        assert rb.meta["merged"][1]["rows"] == 33
        # It goes on as any store: a named source by its new name.
        rb.extend(batch(20, 5000), source="a/arm")
        assert len(rb) == 106
        numbers = rb.sql("SELECT DISTINCT source FROM episodes ORDER BY 1").fetchall()
        assert [name for (name,) in numbers] == sorted({row[0] for row in episodes} | {"a/arm"})
    assert verify(tmp_path / "all.exp") == []


@pytest.mark.slow
@share(0.4, of=6, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    capacity=st.one_of(st.none(), st.integers(1, 60)),
)
@example(sizes=[30, 20], capacity=17)
def test_the_last_rows_stay(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], capacity: int | None
) -> None:
    folder, numbers = tmp_path_factory.mktemp("runs"), []
    paths = []
    for place, size in enumerate(sizes):
        paths.append(make(folder / f"{place}.exp", 1000 * place, size + 1))
        numbers += range(1000 * place, 1000 * place + size + 1)
    made = expstore.merge(paths, out=folder / "all.exp", capacity=capacity)
    kept = numbers if capacity is None else numbers[-capacity:]
    assert (made.rows, made.given_up) == (len(kept), len(numbers) - len(kept))
    with expstore.open(folder / "all.exp", mode="r") as rb:
        assert read_columns(rb.storage)["number"].tolist() == kept
        assert rb.storage.capacity == capacity
    assert verify(folder / "all.exp") == []


test_the_last_rows_stay_in_full = pytest.mark.torture(in_full(test_the_last_rows_stay))


def test_versions_and_folders_of_versions(tmp_path: Path) -> None:
    with expstore.open(make(tmp_path / "a.exp", 0, 20)) as rb:
        rb.dumps(tmp_path / "backup")
        rb.extend(batch(5, 20))
        rb.dumps(tmp_path / "backup")
        made = expstore.merge([tmp_path / "backup/v0001", tmp_path / "backup"], out=tmp_path / "both.exp")
    assert [(run.name, run.rows) for run in made.runs] == [("v0001", 20), ("v0002", 25)]


def test_rows_of_several_dims(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        with TensorDictReplayBuffer(storage=ZarrStorage(tmp_path / name, 12, ndim=2), batch_size=2) as rb:
            rb.extend(batch(15, first).reshape(3, 5))
    made = expstore.merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "c", capacity=17)
    assert (made.rows, made.given_up) == (18, 6)  # whole steps of three
    with expstore.open(tmp_path / "c", mode="r") as rb:
        assert (rb.storage.geometry.dims, rb.storage.capacity) == ((3,), 18)


def test_rows_without_a_fixed_size(tmp_path: Path) -> None:
    said = [["a", None, "bcd"], ["", "efgh"]]
    for name, texts in zip("ab", said, strict=True):
        with expstore.open(tmp_path / name, layout="arrow", schema={"text": str}) as rb:
            rb.extend(TensorDict({"text": texts}, [len(texts)]))
    expstore.merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "c")
    assert verify(tmp_path / "c") == []
    with expstore.open(tmp_path / "c", mode="r") as rb:
        found = rb.sql("SELECT text FROM transitions ORDER BY _id").fetchall()
        assert found == [("a",), (None,), ("bcd",), ("",), ("efgh",)]


def test_the_best_rows_of_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        kept = ZarrStorage(tmp_path / name, 5)
        with TensorDictReplayBuffer(
            storage=kept, writer=TensorDictMaxValueWriter("score"), batch_size=2
        ) as rb:
            rb.extend(TensorDict({"score": torch.arange(20.0)}, [20]))
    assert expstore.merge([tmp_path / "a", tmp_path / "b"], out=tmp_path / "c").rows == 10
    with expstore.open(tmp_path / "c") as rb:
        assert sorted(rb[:]["score"].tolist()) == sorted([15.0, 16, 17, 18, 19] * 2)
        rb.extend(TensorDict({"score": torch.arange(2.0)}, [2]))  # it keeps the newest, as others do
        assert len(rb) == 12


# -- what cannot be ----------------------------------------------------------------------------------


@pytest.mark.guarantee("keep/resize-whole")
@pytest.mark.slow
def test_stores_that_do_not_fit_together(tmp_path: Path) -> None:
    a = make(tmp_path / "a.exp", 0, 5)
    rows = {
        "dtype": batch(3).update({"number": torch.arange(3, dtype=torch.int32)}),
        "more": batch(3).update({"extra": torch.arange(3)}),
        "fewer": batch(3).exclude("number"),
    }
    said = {
        "dtype": r"dtype.exp does not match .*a.exp: field number is .*int32.* here, .*int64.* there",
        "more": r"more.exp does not match .*a.exp: field extra is .*int64.* here, missing there",
        "fewer": r"fewer.exp does not match .*a.exp: field number is missing here, .*int64.* there",
        "key": r"key.exp does not match .*a.exp: reward_key is .*'number'.* here, .*'reward'.* there",
    }
    with expstore.open(
        tmp_path / "key.exp", episodes=expstore.EpisodeKeys(traj="traj_ids", reward="number")
    ) as rb:
        rb.extend(batch(3))
    for name, data in rows.items():
        with expstore.open(tmp_path / f"{name}.exp") as rb:
            rb.extend(data)
    for name, text in said.items():
        with pytest.raises(SchemaError, match=text):
            expstore.merge([a, tmp_path / f"{name}.exp"], out=tmp_path / "out.exp")
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out")]


def test_missing_sources_and_existing_targets_are_refused(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a.exp", 0, 5), make(tmp_path / "b.exp", 10, 5)
    expstore.open(tmp_path / "empty.exp").close()
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out.exp"
    twice = tmp_path / "../" / tmp_path.name / "a.exp"

    def merge(*sources: Path, to: Path = out, **options: Any) -> Callable[[], object]:
        return lambda: expstore.merge(sources, out=to, **options)

    check_refusals(
        [
            (merge(), ValueError, "name at least one"),
            (merge(a, twice), ValueError, "is given twice"),
            (merge(a, b, capacity=0), ValueError, "at least 1, got 0"),
            (merge(a, tmp_path / "no.exp"), NotFoundError, "is not a store"),
            (merge(a, b, to=tmp_path / "no" / "out.exp"), NotFoundError, "there is no folder"),
            (merge(a, b, to=b), StateError, "exists already"),
            (merge(a, b, to=b / "out.exp"), StateError, "would lie inside the store"),
            (merge(a, tmp_path / "empty.exp"), StateError, "no rows and no fields yet"),
        ],
        absent=out,
    )
    assert sorted(tmp_path.rglob("*")) == before
    with expstore.open(b) as rb:
        rb.extend(batch(1, 50))
        with pytest.raises(LockedError, match=f"b.exp is being written to by process {os.getpid()}"):
            expstore.merge([a, b], out=out)
    (tmp_path / "out.exp.tmp").mkdir()
    lock = WriterLock(Disk(), tmp_path / "out.exp.tmp/LOCK")
    with pytest.raises(LockedError, match="another process or thread makes .*out.exp at the moment"):
        expstore.merge([a, b], out=out)
    lock.release()
    assert expstore.merge([a, b], out=out).rows == 11
    assert not (tmp_path / "out.exp.tmp").exists()


def test_episodes_of_a_lost_source_get_no_source_of_another_store(tmp_path: Path) -> None:
    query = "SELECT source, live_rows FROM episodes ORDER BY episode_id"
    paths = [tmp_path / "a.exp", tmp_path / "b.exp"]
    for path in paths:
        with expstore.open(path) as rb:
            for number in range(10):
                rb.extend(batch(7, 7 * number), source="arm")
                rb.episodes.end(source="arm")
    log = paths[1] / "episodes.log"
    flip(log, log.stat().st_size // 2, 1)
    assert repair(paths[1], drop_damaged=True).left == []
    data = log.read_bytes()
    size = int.from_bytes(data[:4], "little")  # a repair fills other gaps with entries of source 0
    log.write_bytes(LogEntry(episode=0, source=0).pack(size) + data[size:])
    with expstore.open(paths[1]) as rb:
        lost = rb.sql(query).fetchall()
    assert (None, 7) in lost
    expstore.merge(paths, out=tmp_path / "both.exp")
    with expstore.open(tmp_path / "both.exp") as rb:
        found = rb.sql(query).fetchall()
    assert found == [("a/arm", 7)] * 10 + [(name and f"b/{name}", rows) for name, rows in lost]


@pytest.mark.guarantee("damage/copies")
def test_wrong_bytes_are_not_copied(tmp_path: Path) -> None:
    first, second = (make(tmp_path / name, 0, 30, layout="flat") for name in ("a.exp", "b.exp"))
    flip(second / "columns/_row/time/c/0", 20 * 8, 1)
    with pytest.raises(CorruptionError, match="b.exp/columns/_row/time/c/0 is damaged in the rows with ids"):
        expstore.merge([first, second], out=tmp_path / "both.exp")
    assert not (tmp_path / "both.exp").exists()


def test_a_writer_that_comes_meanwhile_is_noticed(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a.exp", 0, 5), make(tmp_path / "b.exp", 10, 5)
    held = []

    def write(done: int, total: int) -> None:
        if not held:
            held.append(expstore.open(a))
            held[0].extend(batch(3, 70))

    with pytest.raises(LockedError, match="a.exp is being written to"):
        expstore.merge([a, b], out=tmp_path / "out.exp", progress=write)
    held[0].close()
    assert sorted(os.listdir(tmp_path)) == ["a.exp", "b.exp"]
