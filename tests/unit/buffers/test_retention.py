"""Retention in unbounded stores: which rows are deleted, what is kept, and the space that is freed."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore import Retain
from expstore.cli.app import run
from expstore.cold.download import restore
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, QueryError, StateError
from expstore.maintenance import verify
from expstore.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    RandomSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages import ZarrStorage
from expstore.storages.columns.arrow import writer
from expstore.storages.format.manifest import Manifest
from tests.support.forks import in_child

Rows = 600  # of an episode


def episode(number: int, rows: int = Rows, *, ends: bool = True, wide: int = 64) -> TensorDict:
    """Rows that all hold the number of their episode, and their step."""
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[-1] = ends
    frames = torch.full((rows, wide), number % 251, dtype=torch.uint8)
    frames[:, 0] = torch.arange(rows) % 251
    return TensorDict(
        {
            "frame": frames,
            "number": torch.full((rows,), number),
            "step": torch.arange(rows),
            "next": {"reward": torch.full((rows, 1), float(number)), "done": done, "terminated": done},
        },
        [rows],
    )


def filled(path: Path, episodes: int, **more: Any) -> expstore.TensorDictReplayBuffer:
    rb = expstore.open(path, seed=1, batch_size=64, **more)
    for number in range(1, episodes + 1):
        rb.extend(episode(number))
    return rb


def numbers(rb: Any) -> list[int]:
    return [n for (n,) in rb.sql("SELECT DISTINCT number FROM transitions ORDER BY number").fetchall()]


def check_whole(rb: Any, kept: set[int], written: int, rows: int = Rows) -> None:
    """Hold a store, however it is asked, against the episodes that it must have, whole."""
    assert numbers(rb) == sorted(kept)
    assert len(rb) == rows * len(kept)
    live = dict(rb.sql("SELECT episode_id, live_rows FROM episodes").fetchall())
    assert live == {number: rows * (number in kept) for number in range(1, written + 1)}
    found = rb.sql("SELECT episode_id, first_id, length FROM fragments ORDER BY first_id").fetchall()
    assert found == [(number, 1 + rows * (number - 1), rows) for number in sorted(kept)]
    if kept:
        ids = rb.sql("SELECT _id FROM transitions ORDER BY _id").fetchall()
        values = rb[:]
        assert [id for (id,) in ids] == [
            id for n in sorted(kept) for id in range(1 + rows * (n - 1), 1 + rows * n)
        ]
        assert values["number"].unique().tolist() == sorted(kept)
        assert torch.equal(values["frame"][:, 0].long(), values["step"] % 251)
        assert torch.equal(values["frame"][:, 1].long(), values["number"] % 251)
        batch = rb.sample(256)
        assert set(batch["number"].tolist()) <= kept
        assert torch.equal(batch["frame"][:, 1].long(), batch["number"] % 251)


LAYOUTS = {
    "flat": {"layout": "flat"},
    "packed": {"layout": {"columns": "flat", "fields": {"frame": "packed"}}},
}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_episodes_leave_and_all_else_stays(store_path: Path, layout: str) -> None:
    rb = filled(store_path, 40, **LAYOUTS[layout])
    rb.flush()
    before = rb.storage.retention.columns_bytes()
    with expstore.open(store_path, mode="r", batch_size=64) as reader:
        rb.retention.set({"where": "number % 4 = 0"})
        assert rb.retention.apply(dry_run=True)[:2] == (30, 30 * Rows)
        gone = rb.retention.apply()
        kept = set(range(4, 41, 4))
        assert gone[:2] == (30, 30 * Rows)
        assert rb.storage.retention.columns_bytes() < before + (1 << 20)
        if layout == "flat":
            assert gone.bytes > before // 2
        for one in (rb, reader):
            check_whole(one, kept, 40)
        assert rb.retention.apply() == (0, 0, 0)
        rb.extend(episode(44))
        for one in (rb, reader):
            assert numbers(one) == sorted(kept | {44})
    rb.retention.set({"where": "number = 44"})
    rb.retention.apply()
    assert rb.storage.window == type(rb.storage.window)(40 * Rows, 41 * Rows)
    assert rb.write_count == 41 * Rows
    rb.close()
    assert verify(store_path) == []
    with expstore.open(store_path, batch_size=64) as rb:
        assert numbers(rb) == [44]
        assert rb.retention.policy == Retain(where="number = 44")
        assert rb.sql('SELECT count(*), max("return") FROM episodes').fetchall() == [(41, 44.0 * Rows)]


@pytest.mark.slow
def test_space_of_packed_rows_is_given_back(store_path: Path) -> None:
    """Shards without a row go; in others the chunks that are read stay, for zarr-python, too."""
    fields = {"frame": {"layout": "packed", "rows": 64}}
    rb = expstore.open(store_path, seed=1, batch_size=8, layout=expstore.Layout(fields=fields))
    chance = torch.Generator().manual_seed(0)
    for number in range(1, 31):
        rows = episode(number, 1000, wide=512)
        rows["frame"][:, 2:] = torch.randint(0, 256, (1000, 510), generator=chance, dtype=torch.uint8)
        rb.extend(rows)
    rb.flush()
    folder, before = store_path / "columns/frame", rb.storage.disk.measure_space(store_path / "columns/frame")
    shards = {path.name for path in folder.glob("c.*")}
    rb.retention.set({"where": "number > 20 OR number % 5 = 0"})
    rb.retention.apply()
    rb.flush()
    assert rb.storage.disk.measure_space(folder) < 0.6 * before
    check_whole(rb, {5, 10, 15, 20, *range(21, 31)}, 30, 1000)
    zarr = pytest.importorskip("zarr")
    stored = zarr.open_group(store_path / "columns", mode="r")["frame"][:12_000, 1]
    of = np.repeat(np.arange(1, 13), 1000)
    assert (stored[of % 5 == 0] == of[of % 5 == 0]).all()
    assert (stored[64:3900] == 0).all()
    rb.retention.set({"where": "number > 20"})
    rb.retention.apply()
    rb.flush()
    assert {path.name for path in folder.glob("c.*")} < shards
    check_whole(rb, set(range(21, 31)), 30, 1000)
    rb.close()
    assert verify(store_path) == []
    with expstore.open(store_path, batch_size=8) as rb:
        check_whole(rb, set(range(21, 31)), 30, 1000)


@pytest.mark.guarantee("keep/policy")
@pytest.mark.slow
def test_a_version_keeps_what_leaves_the_store(store_path: Path, tmp_path: Path) -> None:
    rb = filled(store_path, 20, **LAYOUTS["packed"])
    rb.dumps(tmp_path / "versions")
    rb.retention.set({"where": "number % 10 = 0"})
    rb.retention.apply()
    second = rb.dumps(tmp_path / "versions")
    check_whole(rb, {10, 20}, 20)
    rb.loads(tmp_path / "versions", 1)
    assert numbers(rb) == list(range(1, 21))
    rb.close()
    assert verify(second.path) == []
    with expstore.open(tmp_path / "versions", version=1) as old:
        check_whole(old, set(range(1, 21)), 20)
    with expstore.open(tmp_path / "versions", version=2) as new:
        check_whole(new, {10, 20}, 20)


def told(number: int, rows: int = Rows) -> TensorDict:
    """An episode with a text in each row, of a length of its own."""
    data, noise = episode(number, rows), np.random.default_rng(number)
    texts = [f"{number} " * (step % 7 + 1) + noise.bytes(50).hex() for step in range(rows)]
    data["text"] = NonTensorStack(*texts)
    return data


def segments(path: Path) -> dict[int, int]:
    """Return the files of rows without a fixed size: first id in the name, and space."""
    return {int(file.stem): 512 * file.stat().st_blocks for file in sorted(path.glob("segments/*.arrows"))}


TEXTS = "SELECT number, count(*) FROM transitions WHERE text LIKE number || ' %' GROUP BY 1 ORDER BY 1"


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes make a segment."""
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 2)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.usefixtures("no_syncs", "pairs")
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_of_any_length_leave_too(store_path: Path, compression: Any) -> None:
    """Segments go wherever they lie; one of which half is left is made anew in its place."""
    rb = expstore.open(
        store_path, layout=expstore.Layout(kind="arrow", compression=compression), seed=1, batch_size=16
    )
    for number in range(1, 10):
        rb.extend(told(number))
    rb.flush()
    before = segments(store_path)
    whole = compression is None  # else an extend has several batches
    assert not whole or list(before) == [1 + Rows * n for n in (0, 2, 4, 6, 8)]
    with expstore.open(store_path, mode="r", batch_size=16) as reader:
        assert len(reader.sql(TEXTS).fetchall()) == 9
        rb.retention.set({"where": "number IN (2, 5, 6, 9)"})
        gone = rb.retention.apply()
        after = segments(store_path)
        assert not whole or list(after) == [1, 1 + Rows * 4, 1 + Rows * 8]
        assert sum(after.values()) < 0.6 * sum(before.values())
        assert gone.bytes > 0.4 * sum(before.values())
        wanted = [(number, Rows) for number in (2, 5, 6, 9)]
        for one in (rb, reader):
            assert one.sql(TEXTS).fetchall() == wanted
            assert set(one.sample(64)["number"].tolist()) <= {2, 5, 6, 9}
            assert [text.split()[0] for text in one[::Rows]["text"]] == ["2", "5", "6", "9"]
        rb.extend(told(10))
        assert reader.sql(TEXTS).fetchall() == [*wanted, (10, Rows)]
    rb.close()
    assert verify(store_path) == []
    with expstore.open(store_path, batch_size=16) as rb:
        assert rb.sql(TEXTS).fetchall() == [*wanted, (10, Rows)]
        rb.retention.set({"where": "number = 10"})
        rb.retention.apply()
        assert set(rb.sample(64)["number"].tolist()) == {10}
    assert verify(store_path) == []


@pytest.mark.usefixtures("no_syncs", "pairs")
@pytest.mark.parametrize("follows", [False, True])
def test_rows_are_taken_while_their_segment_goes(
    store_path: Path, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who draws them before they leave reads None in their place, and draws again; what stays is missed."""
    with expstore.open(store_path, layout="arrow", seed=1, batch_size=16) as rb:
        for number in range(1, 8):
            rb.extend(told(number))
        rb.flush()
        with expstore.open(store_path, mode="r") if follows else contextlib.nullcontext(rb) as reader:
            assert len(reader.sql(TEXTS).fetchall()) == 7
            columns = reader.storage._source.columns if follows else reader.storage.state.columns
            (apart,), ids = columns.shared, np.array([1, 2, 3, 4, 5]) * Rows + 1

            def missing() -> list[bool]:
                if follows:  # as one that has looked for another reason
                    apart._show_committed(apart._scan_all(), apart.top)
                found: list[bool] = apart.gather_ids(ids, [0])[0].is_null().to_pylist()
                return found

            rb.storage.retention.delete(np.array([3, 4]))
            assert missing() == [False, True, True, False, False]
            views = apart.views(0, Rows + 1, 4 * Rows)
            assert [(len(view), view.null_count) for view in views] == [
                (Rows, 0), (2 * Rows, 2 * Rows), (Rows, 0)
            ]  # fmt: skip
            assert not reader.storage.intact(ids)
            # Space is given back late: no gap is told of any more, and a segment is older than what is
            # missed.
            monkeypatch.setattr(writer.SegmentWriter, "give_up", lambda self: None)
            rb.storage.retention.delete(np.array([1, 2]))
            assert not rb.storage.window.deleted
            assert list(segments(store_path)) == [1, 1 + 4 * Rows, 1 + 6 * Rows]
            assert missing() == [False, True, True, False, False]
            if follows:
                (store_path / "segments" / f"{1 + 4 * Rows:019d}.arrows").unlink()
                with pytest.raises(CorruptionError, match="row 2401 is missing"):
                    missing()
                with pytest.raises(CorruptionError, match="row 2401 is missing"):
                    apart.views(0, Rows + 1, 4 * Rows)


@pytest.mark.usefixtures("no_syncs", "pairs")
def test_a_damaged_batch_keeps_its_sum(store_path: Path) -> None:
    """A segment with one is not made anew: what is written has a checksum that fits."""
    with expstore.open(store_path, layout="arrow", seed=1) as rb:
        for number in range(1, 6):
            rb.extend(told(number))
    path = store_path / "segments" / f"{1 + 2 * Rows:019d}.arrows"
    data = path.read_bytes()
    at = data.rindex(b"4 4 4 ")
    path.write_bytes(data[:at] + b"7" + data[at + 1 :])
    with expstore.open(store_path) as rb:
        rb.storage.retention.delete(np.array([1, 3]))
    assert list(segments(store_path)) == [1, 1 + 2 * Rows, 1 + 4 * Rows]
    assert path.stat().st_size == len(data)
    (found,) = verify(store_path)
    assert found.path == f"segments/{path.name}"
    assert found.ids == ((1 + 3 * Rows, 4 * Rows),)


def test_by_age(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = filled(store_path, 6)
    ((ends,),) = rb.sql("SELECT epoch_us(end_time) FROM episodes WHERE episode_id = 4").fetchall()
    rb.retention.set({"age": "1h"})
    monkeypatch.setattr(time, "time", lambda: ends / 1e6 + 3600)
    rb.retention.apply()
    assert numbers(rb) == [4, 5, 6]
    rb.retention.set(None)
    assert rb.retention.policy is None
    with pytest.raises(StateError, match="no policy"):
        rb.retention.apply()
    rb.close()


def test_conditions_know_the_episode(store_path: Path) -> None:
    rb = filled(store_path, 6)
    rb.episodes.annotate(2, keep=True)
    rb.retention.set({"where": 'episode.info.keep::BOOLEAN OR episode."return" > 3000'})
    rb.retention.apply()
    assert numbers(rb) == [2, 6]
    with pytest.raises(expstore.errors.QueryError):
        rb.retention.set({"where": "nonsense > 1"})
    assert rb.retention.policy == Retain(where='episode.info.keep::BOOLEAN OR episode."return" > 3000')
    rb.close()


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "where": lambda: RandomSampler(where="step >= 0"),
    "prioritized": PrioritizedSampler,
    "recency": lambda: RecencySampler(half_life=5000),
    "each once": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=8),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_never_draw_what_has_left(store_path: Path, name: str) -> None:
    rb = filled(store_path, 12, sampler=SAMPLERS[name]())
    rb.sample(64)
    rb.retention.set({"where": "number % 3 = 0"})
    rb.retention.apply()
    seen: set[int] = set()
    for _ in range(40):
        batch = rb.sample(64)
        seen |= set(batch["number"].tolist())
        assert torch.equal(batch["frame"][:, 1].long(), batch["number"] % 251)
    assert seen == ({3, 6, 9, 12} if name != "recency" else seen & {3, 6, 9, 12})
    rb.close()


def test_priorities_and_ids_stay(store_path: Path) -> None:
    rb = filled(store_path, 4, sampler=PrioritizedSampler(alpha=1.0, eps=0.0))
    ids = torch.arange(1, 4 * Rows + 1)
    rb.update_priority(ids - 1, ids.float())
    rb.retention.set({"where": "number IN (2, 4)"})
    rb.retention.apply()
    rb.close()
    with expstore.open(store_path, sampler=PrioritizedSampler(alpha=1.0, eps=0.0)) as rb:
        assert rb.sql("SELECT count(*) FROM transitions WHERE _priority <> _id").fetchall() == [(0,)]
        assert rb.extend(episode(5), return_ids=True)[0] == 4 * Rows + 1


def test_it_is_applied_in_the_background(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "RETENTION_SECONDS", 0.01)
    rb = expstore.open(store_path, retain={"where": "number > 2"})
    for number in (1, 2, 3):
        rb.extend(episode(number))
    give_up = time.monotonic() + 30
    while len(rb) > Rows and time.monotonic() < give_up:
        time.sleep(0.01)
    assert numbers(rb) == [3]
    thread = rb._store.runner._thread
    rb.close()
    assert not thread.is_alive()


def test_background_errors_are_reported_once(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rb = expstore.open(store_path, retain={"where": "missing > 2"})
    rb.extend(episode(1))
    with caplog.at_level(logging.WARNING, "expstore"):
        rb._store.runner.go_round()
        rb._store.runner.go_round()
    assert [record.message for record in caplog.records if "missing" in record.message] != []
    assert len([record for record in caplog.records if "could not be applied" in record.message]) == 1
    rb.close()


def test_a_policy_is_kept_and_replaced(store_path: Path) -> None:
    expstore.open(store_path, retain=Retain(age="7d", bytes="10 GB")).close()
    with expstore.open(store_path) as rb:
        assert rb.retention.policy == Retain(bytes=10**10, age=604_800)
    with expstore.open(store_path, retain={"bytes": "1MiB"}) as rb:
        assert rb.retention.policy == Retain(bytes=1 << 20)
    assert Manifest.load(Disk(), store_path).retain == {"bytes": 1 << 20}
    with expstore.open(store_path, retain=Retain()) as rb:
        assert rb.retention.policy is None
    assert Manifest.load(Disk(), store_path).retain == {}
    storage = ZarrStorage(store_path.with_name("b.exp"), retain={"age": 5})
    assert storage.manifest.retain == {"age": 5.0}
    storage.close()


def test_a_store_keeps_its_policy_when_it_restores_a_version(store_path: Path, tmp_path: Path) -> None:
    place = tmp_path / "backup"
    with filled(store_path, 2) as rb:
        rb.dumps(place)  # without a policy
        rb.retention.set({"age": 9})
        rb.loads(place)
        assert rb.retention.policy == Retain(age=9)
        rb.dumps(place)
    with expstore.open(tmp_path / "ring.exp", capacity=2 * Rows, batch_size=4) as rb:
        rb.loads(place)
        assert rb.retention.policy is None
    assert expstore.resize(tmp_path / "ring.exp", capacity=Rows).rows == Rows
    restore(place, tmp_path / "restored.exp")
    with expstore.open(tmp_path / "restored.exp") as rb:  # a new store with the settings of the version
        assert rb.retention.policy == Retain(age=9)
        assert len(rb) == 2 * Rows


def test_invalid_policies_are_refused(store_path: Path) -> None:
    for policy, said in (
        ({"bytes": "10 parsecs"}, "bytes must be a number of at least 1"),
        ({"bytes": 0}, "bytes must be a number of at least 1"),
        ({"age": -1}, "age must be a number of seconds"),
        ({"age": float("nan")}, "age must be a number of seconds"),
        ({"where": " "}, "where must be an SQL expression"),
        ({"size": 3}, "a dict with bytes, age or where"),
        ("10GB", "a dict with bytes, age or where"),
    ):
        with pytest.raises(ValueError, match=said):
            expstore.open(store_path, retain=policy)  # type: ignore[arg-type]
    assert not store_path.exists()


def test_rings_refuse_a_policy(store_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity and retain exclude each other"):
        expstore.open(store_path, capacity=10, retain={"age": 1})
    with expstore.open(store_path, capacity=10) as rb:
        with pytest.raises(StateError, match="keeps its newest 10 rows"):
            rb.retention.set({"age": 1})
        with pytest.raises(StateError, match="evicted by age, not deleted"):
            rb.storage.retention.delete(np.array([1]))
    with pytest.raises(StateError, match="keeps its newest 10 rows"):
        expstore.open(store_path, retain={"age": 1})
    with pytest.raises(ValueError, match="mode='r'"):
        expstore.open(store_path, mode="r", retain={"age": 1})
    with expstore.open(store_path, mode="r") as rb, pytest.raises(StateError, match="only the writer"):
        rb.retention.set({"age": 1})


# -- many ------------------------------------------------------------------------------------------


def test_the_command(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(store_path, 10, layout="flat").close()
    assert run(["retain", str(store_path)]) == 2
    assert "--where" in capsys.readouterr().err
    assert run(["retain", str(store_path), "--where", "number > 4", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["episodes"], told["rows"], told["rows_left"]) == (4, 4 * Rows, 6 * Rows)
    assert run(["retain", str(store_path), "--where", "number > 4"]) == 0
    assert "4 episodes with 2,400 rows were deleted" in capsys.readouterr().out
    assert run(["retain", str(store_path), "--bytes", "x"]) == 2
    with expstore.open(store_path) as rb:
        check_whole(rb, set(range(5, 11)), 10)
        assert rb.retention.policy is None


@pytest.mark.usefixtures("no_syncs")
def test_sql_over_many_deleted_runs_views_each_column_once(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run is looked at by itself, but in a wide column that a query names; others are not looked at."""
    viewed: list[tuple[int, int]] = []
    views = ZarrStorage.views

    def counted(storage: ZarrStorage, places: Any, first_id: int, count: int) -> Any:
        viewed.extend((place, count) for place in places)
        return views(storage, places, first_id, count)

    with expstore.open(store_path, seed=1, layout="flat", sampler=ConsumingSampler(4)) as rb:
        rows = episode(1, 8000, wide=300)
        rows["next", "done"] = rows["next", "terminated"] = (torch.arange(8000) % 8 == 7)[:, None]
        rows["number"] = torch.arange(8000) // 8 + 1
        rb.extend(rows)
        drawn = rb.sample(64)["number"].numpy()
        rb.storage.retention.delete(np.arange(2, 1000, 2))
        live = np.setdiff1d(np.arange(1, 1001), np.arange(2, 1000, 2))
        ids = (live[:, None] * 8 - 7 + np.arange(8)).ravel()
        assert len(rb.storage.window.deleted) == 499
        monkeypatch.setattr(ZarrStorage, "views", counted)
        asked = {
            "SELECT count(*) FROM transitions": [(ids.size,)],
            "SELECT sum(number) FROM transitions": [(8 * live.sum(),)],
            "SELECT sum(id) FROM priorities": [(ids.sum(),)],
            "SELECT _id, step, _index FROM transitions ORDER BY _id": [(i, i - 1, i - 1) for i in ids],
            "SELECT DISTINCT number FROM transitions WHERE next.done ORDER BY 1": [(n,) for n in live],
            "SELECT sum(frame[1]) FROM transitions": [(((ids - 1) % 251).sum(),)],
            "SELECT sum(_sampled) FROM transitions": [(np.isin(drawn, live).sum(),)],
            "SELECT x.step FROM transitions x WHERE _id = 33": [(32,)],
        }
        with expstore.open(store_path, mode="r") as reader:
            for one in (rb, reader):
                for sql, wanted in asked.items():
                    if one is reader and "_sampled" in sql:
                        continue  # which only a writer shows
                    assert one.sql(sql).fetchall() == wanted, sql
            assert rb.sql("SELECT * FROM transitions").arrow().num_rows == len(ids)
        assert {count for _, count in viewed} == {8000}
        viewed.clear()
        rb.sql("SELECT sum(step) FROM transitions").fetchall()
        assert len(viewed) == len({place for place, _ in viewed}) == 1 + len(ROW_FIELDS)


# -- laws ------------------------------------------------------------------------------------------


class Kept:
    """A store, and the episodes that its policies have kept: how many rows each has, by number."""

    def __init__(self, path: Path, layout: str) -> None:
        self.path, self.layout = path, layout
        self.rows: dict[int, int] = {}
        self.written = 0

    def open(self) -> Any:
        return expstore.open(self.path, seed=1, batch_size=8, **KEPT[self.layout])

    def act(self, rb: Any, what: str, one: int, other: int) -> Any:
        """Do something; without a store take note of what it does. Returns the store."""
        if what == "extend":
            self.written += 1
            self.rows[self.written] = one
            if rb is not None:
                rb.extend((told if self.layout == "texts" else episode)(self.written, one))
        elif what == "keep":
            self.rows = {n: rows for n, rows in self.rows.items() if n % one != other}
            if rb is not None:
                rb.retention.set({"where": f"number % {one} <> {other}"})
                rb.retention.apply()
        elif what == "bytes":
            if rb is not None:
                rb.retention.set({"bytes": int(one * rb.storage.retention.bytes_per_row()) + 1})
                rb.retention.apply()
            for oldest in sorted(self.rows):
                if sum(self.rows.values()) <= one:
                    break
                del self.rows[oldest]
        elif rb is not None:
            rb.retention.set(None)
            rb.close()
            rb = self.open()
            self.check(rb)
        return rb

    def check(self, rb: Any) -> None:
        """Hold all rows against what must be there."""
        if not self.written:  # nor are there fields
            assert len(rb) == 0
            return
        found = rb.sql("SELECT number, count(*) FROM transitions GROUP BY number ORDER BY number")
        assert found.fetchall() == sorted(self.rows.items())
        if self.rows:
            values = rb[:]
            assert torch.equal(values["frame"][:, 1].long(), values["number"] % 251)
            if self.layout == "texts":
                owners = [int(text.split(maxsplit=1)[0]) for text in values["text"]]
                assert owners == values["number"].tolist()


KEPT = LAYOUTS | {"texts": {"layout": "arrow"}}
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 900), st.just(0)),
        st.tuples(st.just("keep"), st.integers(2, 4), st.integers(0, 3)),
        st.tuples(st.just("bytes"), st.integers(200, 4000), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    min_size=3,
    max_size=6,
)


@pytest.mark.guarantee(
    "keep/policy",
    "Retention deletes whole episodes only, and none that the policy keeps, also after a kill or a power "
    "cut; versions keep what is deleted.",
)
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_syncs")
@settings(max_examples=max(10, settings().max_examples // 4))
@given(acts=ACTS, layout=st.sampled_from(sorted(KEPT)))
def test_never_a_row_that_the_policy_keeps(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int, int]], layout: str
) -> None:
    kept = Kept(tmp_path_factory.mktemp("keep") / "a.exp", layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 2)
        rb = kept.open()
        try:
            for act in [("extend", Rows, 0), *acts]:
                rb = kept.act(rb, *act)
                assert len(rb) == sum(kept.rows.values())
            kept.check(rb)
        finally:
            rb.close()
        assert verify(kept.path) == []


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("layout", KEPT)
def test_never_a_row_that_the_policy_keeps_through_kills(
    tmp_path: Path, layout: str, long_seed: int, count_cases: Callable[..., None], monkeypatch: Any
) -> None:
    """Each life is killed when its last act has returned, the background at whatever it is about."""
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 2)
    chance = random.Random(long_seed)
    for number in range(20):
        count_cases()
        kept = Kept(tmp_path / f"{number}.exp", layout)
        for _ in range(6):
            acts = [("extend", chance.randint(1, 900), 0)]
            for what in chance.choices(["extend", "keep", "bytes", "reopen"], k=chance.randint(0, 4)):
                one = chance.randint(2, 4) if what == "keep" else chance.randint(200, 4000)
                acts.append((what, min(one, 900) if what == "extend" else one, chance.randint(0, 3)))
            twin = copy.deepcopy(kept)

            def live(twin: Kept = twin, acts: Any = acts) -> None:
                rb = twin.open()
                twin.check(rb)
                for act in acts:
                    rb = twin.act(rb, *act)

            in_child(live)
            for act in acts:
                kept.act(None, *act)
        with kept.open() as rb:
            kept.check(rb)
        assert verify(kept.path) == []


# ---------------------------------------------------------------------------------------------------
# Episodes that are deleted by a condition.


def test_episodes_are_deleted_by_a_condition(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        for number in (1, 2, 3, 4):
            rb.extend(episode(number))
        rb.extend(episode(5, ends=False))
        rb.episodes.annotate(1, note="kept")
        said = rb.episodes.delete("episode_id <> $n", params={"n": 2}, dry_run=True)
        assert (said.episodes, said.rows) == (3, 3 * Rows)
        assert len(rb) == 5 * Rows
        gone = rb.episodes.delete("episode_id <> $n", params={"n": 2})
        assert (gone.episodes, gone.rows) == (3, 3 * Rows)
        assert gone.bytes > 0
        assert numbers(rb) == [2, 5]  # the open episode keeps its rows
        facts = rb.episodes("live_rows = 0", order_by="episode_id").fetchall()
        assert [row[0] for row in facts] == [1, 3, 4]
        assert rb.episodes.delete("episode_id <> 2").episodes == 0  # their rows have left already
        with pytest.raises(
            QueryError, match="episodes has no column no_such_column; episodes has episode_id"
        ):
            rb.episodes.delete("no_such_column > 2")
    with expstore.open(store_path) as rb:
        assert numbers(rb) == [2, 5]
    assert verify(store_path) == []


def test_stores_that_delete_no_episodes_say_so(store_path: Path) -> None:
    with expstore.open(store_path, capacity=10 * Rows) as rb:
        rb.extend(episode(1))
        for dry_run in (True, False):
            with pytest.raises(StateError, match="a store with a capacity deletes no episodes"):
                rb.episodes.delete("true", dry_run=dry_run)
        with (
            expstore.open(store_path, mode="r") as follower,
            pytest.raises(StateError, match="only the writer"),
        ):
            follower.episodes.delete("true")
    memory = expstore.ReplayBuffer(storage=expstore.MemoryStorage(10))
    memory.extend(episode(1, 5))
    with pytest.raises(StateError, match="only the writer of a store on disk deletes episodes"):
        memory.episodes.delete("true")
