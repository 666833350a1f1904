"""Verify finds and names damage of any bit, and reports nothing for undamaged stores."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.cli.app import run
from expstore.errors import LockedError, NotFoundError
from expstore.maintenance import Finding, repair, verify
from tests.support.damaged_stores import (
    BLOCK,
    CAPACITY,
    ROWS,
    batch,
    fill,
    flip,
    in_child,
)

pytestmark = pytest.mark.usefixtures("no_syncs", "short_flat_shards")


# ---------------------------------------------------------------------------------------------------
# Sound stores.


@pytest.mark.some(2)
@pytest.mark.parametrize(("capacity", "rows"), [(CAPACITY, ROWS), (CAPACITY, 10), (None, 9000), (3, 5)])
def test_nothing_is_found_in_a_sound_store(store_path: Path, capacity: int | None, rows: int) -> None:
    fill(store_path, capacity=capacity, rows=rows)
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        rb.add(batch(1, 5)[0])
    assert verify(store_path) == []


def test_nothing_is_found_in_a_store_without_rows(store_path: Path) -> None:
    expstore.open(store_path).close()
    assert verify(store_path) == []
    with expstore.open(store_path, schema=None) as rb:
        rb.extend(batch(3, 0))
        rb.empty()
    assert verify(store_path) == []


def test_nothing_is_found_in_a_store_with_a_return_that_is_nan(store_path: Path) -> None:
    rewards, ends = np.array([1.0, np.nan, 2.0], np.float32), np.array([False, True, True])
    with expstore.open(store_path) as rb:
        rb.extend({"n": np.arange(3), "next": {"reward": rewards, "done": ends}})
        assert np.isnan(rb.sql('SELECT "return" FROM episodes').fetchall()[0][0])  # makes the index
    assert verify(store_path) == []


@pytest.mark.parametrize("flushed", [True, False])
def test_nothing_is_found_after_a_kill(store_path: Path, flushed: bool) -> None:
    """Rows that no sync has seen are judged by their records."""

    def work() -> list[str]:
        rb = expstore.open(store_path, capacity=CAPACITY)
        rb.extend(batch(4000, 0))
        rb.flush()
        rb.extend(batch(1000, 4000))
        rb[[5, 6]] = batch(2, 50)
        for number in range(5000, 5020):
            rb.add(batch(1, number)[0])
        if flushed:
            rb.flush()
        os._exit(0)

    in_child(work)
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert len(rb) == CAPACITY
    assert verify(store_path) == []


def test_nothing_is_changed(store: Path) -> None:
    def state() -> dict[str, tuple[int, int, bytes]]:
        return {
            str(p): (p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes())
            for p in sorted(store.rglob("*"))
            if p.is_file()
        }

    before = state()
    assert verify(store) == []
    (store / "columns/number/c/1").write_bytes(b"")
    before = state()
    assert verify(store) != []
    assert state() == before


def test_a_store_that_is_written_to_is_refused(store: Path) -> None:
    with expstore.open(store), pytest.raises(LockedError, match="has it open for writing"):
        verify(store)
    with pytest.raises(NotFoundError):
        verify(store.parent)


# ---------------------------------------------------------------------------------------------------
# Single bits.


def places(store: Path, rng: random.Random) -> Iterator[tuple[str, Path, int]]:
    """Yield kinds of files with a byte in them, by turns, for ever; the place in a file is any."""
    shards = [p for p in sorted(store.glob("columns/**/c/**/*")) if p.is_file() and "priority" not in str(p)]
    metadata = sorted(store.glob("columns/**/zarr.json"))
    while True:
        shard = rng.choice(shards)
        data = shard.stat().st_size - 20
        yield "payload", shard, rng.randrange(data)
        shard = rng.choice(shards)
        yield "index", shard, data_end(shard) + rng.randrange(20)
        path = rng.choice(metadata)
        yield "metadata", path, rng.randrange(path.stat().st_size)
        for name in ("expstore.json", "episodes.log"):
            yield name, store / name, rng.randrange((store / name).stat().st_size)
        (segment,) = (store / "journal").iterdir()
        used = len(segment.read_bytes().rstrip(b"\0"))
        # Half of them in what is written, the others where nothing was.
        size = used if rng.random() < 0.5 else segment.stat().st_size
        yield "journal", segment, rng.randrange(size)
        yield "checksums", store / "checksums", rng.randrange((store / "checksums").stat().st_size)


def data_end(shard: Path) -> int:
    """Where the chunk index of a shard of one block begins."""
    return shard.stat().st_size - 20


def missed(store: Path, flips: int, seed: int) -> list[str]:
    """Flip bits one at a time; return those that were not found, or not where they are."""
    faults = []
    rng = random.Random(seed)
    assert verify(store) == []
    for number, (kind, path, byte) in enumerate(places(store, rng)):
        if number == flips:
            break
        bit = rng.randrange(8)
        flip(path, byte, bit)
        try:
            found = verify(store)
        except Exception as exc:
            found = []
            faults.append(f"{exc!r}")
        flip(path, byte, bit)
        name = path.relative_to(store).as_posix()
        named = [f for f in found if f.path == name]
        if kind == "payload":
            width = data_end(path) // BLOCK
            number_of = int(name.split("/c/")[1].split("/")[0])
            slot = number_of * BLOCK + byte // width
            named = [
                f for f in named if f.slots and f.slots[0] <= slot <= f.slots[1] and f.shard == number_of
            ]
        if not named:
            faults.append(f"{kind}: bit {bit} of byte {byte} of {name}: {[f.message for f in found]}")
    assert verify(store) == []
    return faults


@pytest.mark.guarantee(
    "damage/verify",
    "`expstore verify` finds any single wrong bit in rows, metadata, journal and episodes, names its "
    "place, and reports no damage after a kill.",
)
@pytest.mark.slow
def test_every_single_bit_is_found(store: Path) -> None:
    """Payload, shard indexes, zarr.json, expstore.json, episodes.log, journal, checksums."""
    assert in_child(lambda: missed(store, 200, seed=1)) == []


@pytest.mark.torture
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(10))
def test_many_more_single_bits_are_found(
    store: Path, seed: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    count_cases(500)
    assert in_child(lambda: missed(store, 500, seed=100 + seed + long_seed)) == []


def test_priorities_have_no_checksum(store: Path) -> None:
    """They change all the time; whatever stands there is a priority."""
    shard = store / "columns/_row/priority/c/0"
    flip(shard, 100, 3)
    assert verify(store) == []
    flip(shard, shard.stat().st_size - 3, 3)
    assert [f.kind for f in verify(store)] == ["footer"]


def test_a_finding_names_the_rows(store: Path) -> None:
    """Slot 100 of the ring holds row 100 + 1 + 9096, of which the window is (7000, 12000]."""
    flip(store / "columns/next/reward/c/0/0", 4 * 100, 5)
    (finding,) = verify(store)
    assert (finding.kind, finding.column, finding.shard) == ("payload", "next.reward", 0)
    assert finding.slots == (0, 4095)
    # Slots 0 to 2903 hold ids 9097 to 12000; the next ones are spare.
    assert finding.ids == ((9097, 12_000),)
    assert finding.message == ("columns/next/reward/c/0/0 (ids 9097 to 12000) does not have its checksum")
    assert not finding.fatal


def kinds(store: Path) -> list[str]:
    return [finding.kind for finding in verify(store)]


def test_ids_episodes_and_steps_are_held_against_the_journal(store: Path) -> None:
    """Damage that came with a checksum of its own."""

    def resum(name: str, slot: int, value: int) -> list[Finding]:
        copy = Path(shutil.copytree(store, store.with_name(f"{name}.exp")))
        with (copy / f"columns/_row/{name}/c/0").open("r+b") as file:
            file.seek(8 * slot)
            file.write(value.to_bytes(8, "little"))
        (copy / "checksums").unlink()
        return [finding for finding in verify(copy) if finding.path != "checksums"]

    (finding,) = resum("id", 100, 5)
    assert (finding.kind, finding.column, finding.ids) == ("ids", "_row.id", ((9197, 9197),))
    first, second = resum("episode", 2903, 7)
    assert (first.kind, first.column, first.ids) == ("episodes", "_row.episode", ((12_000, 12_000),))
    assert (second.kind, second.path) == ("episodes", "episodes.log")
    (finding,) = resum("step", 10, 3)
    assert (finding.kind, finding.column, finding.ids) == ("episodes", "_row.step", ((9107, 9107),))


def test_a_torn_batch_is_found_before_it_is_dropped(store_path: Path) -> None:
    def work() -> list[str]:
        rb = expstore.open(store_path, capacity=CAPACITY)
        rb.extend(batch(1000, 0))
        rb.flush()
        rb.extend(batch(1000, 1000))
        os._exit(0)

    in_child(work)
    flip(store_path / "columns/wide/c/0/0", 40 * 1500, 0)
    (finding,) = verify(store_path)
    assert finding.kind == "torn"
    assert "1 batches after the last sync" in finding.message
    copy = Path(shutil.copytree(store_path, store_path.with_name("copy.exp")))
    assert [left.kind for left in repair(copy).left] == ["torn"]
    assert repair(copy, drop_damaged=True).left == verify(copy) == []
    with expstore.open(copy) as rb:
        assert (len(rb), rb.recovered) == (1000, None)
    with expstore.open(store_path) as rb:
        assert len(rb) == 1000
    assert kinds(store_path) == []


def test_an_index_that_differs_is_found(store: Path) -> None:
    import duckdb

    with duckdb.connect(str(store / "index.duckdb")) as con:
        con.execute("UPDATE episode_rows SET length = length + 1 WHERE episode_id = 3")
    (finding,) = verify(store)
    assert (finding.kind, finding.path) == ("index", "index.duckdb")
    assert "`expstore repair` rebuilds it" in finding.message
    (store / "index.duckdb").write_bytes(b"nothing like it" * 1000)
    assert kinds(store) == ["index"]
    (store / "index.duckdb").unlink()
    assert kinds(store) == []


# ---------------------------------------------------------------------------------------------------
# The command.


def test_the_command(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(store)]) == 0
    assert capsys.readouterr().out == f"{store}: nothing found\n"
    flip(store / "columns/number/c/1", 5, 5)
    flip(store / "columns/number/zarr.json", 50, 5)
    assert run(["verify", str(store)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("metadata: columns/number/zarr.json")
    assert lines[1].startswith("payload: columns/number/c/1")
    assert lines[2] == f"{store}: 2 findings"
    assert run(["verify", str(store), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["kind"] for finding in told["findings"]] == ["metadata", "payload"]
    assert told["findings"][1]["slots"] == [4096, 8191]
    (store / "expstore.json").write_bytes(b"nothing")
    assert run(["verify", str(store)]) == 4
    assert "expstore.json" in capsys.readouterr().out


def test_the_command_runs_next_to_a_writer(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with expstore.open(store):
        assert run(["verify", str(store)]) == 3
    assert "has it open for writing" in capsys.readouterr().err


def test_lanes_without_their_first_row_are_read(store_path: Path) -> None:
    """What columns tell may be cut into other fragments than what was told when the rows came."""
    with expstore.open(store_path, capacity=70, seed=1) as rb:
        rb.extend(batch(29, 0), source="a")
        rb.extend(batch(18, 100).reshape(9, 2).rename("time", None), source="lanes")
        rb.sql("SELECT 1")
        for first in range(200, 258, 8):
            rb.extend(batch(8, first), source="a")
            assert rb.sql("SELECT count(*) FROM transitions").fetchall()
    assert verify(store_path) == []


def test_rows_that_the_journal_alone_has_need_no_shard(store_path: Path) -> None:
    """A store that was killed before its first few rows were written to the columns is sound."""

    def live() -> list[str]:
        rb = expstore.open(store_path, seed=1)
        rb.storage.background.stop()
        rb.extend(batch(4, 0))
        return [] if not (store_path / "columns/number/c/0").exists() else ["they are there already"]

    assert in_child(live) == []
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert rb[:]["number"].tolist() == [0, 1, 2, 3]
