"""Truncated and missing files: no crash, no silent zeros; the file is named, other rows can be read."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.errors import CorruptionError, ExpStoreError
from expstore.maintenance import verify
from expstore.storages.factory import ZarrStorage
from tests.support.damaged_stores import CAPACITY, ROWS, batch, in_child

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "short_flat_shards")]

#: What is made anew, with a line that says so where that is worth one.
DERIVED = ("index.duckdb", "STATE", "LOCK", "checksums")
FIELDS = ("number", "wide", "never", ("next", "reward"), ("next", "terminated"))


def wanted() -> dict[str | tuple[str, ...], torch.Tensor]:
    """What every field must read as, by index: the newest 5000 of 12,000 rows; two were changed."""
    rows = torch.arange(ROWS - CAPACITY, ROWS)
    rows = rows[torch.argsort(rows % CAPACITY)]
    data = batch(ROWS, 0)[rows]
    data[:2] = batch(2, 77)
    return {key: data[key] for key in FIELDS}


def damages(store: Path, rng: random.Random) -> Iterator[tuple[Path, int | None]]:
    """Yield a file and the length it is cut to, or None for one that is deleted; for ever."""
    while True:
        groups = [
            sorted(p for p in store.glob("columns/**/c/**/*") if p.is_file()),
            sorted(store.glob("columns/**/zarr.json")),
            [store / name for name in ("expstore.json", "episodes.log", *DERIVED)],
            sorted((store / "journal").iterdir()),
        ]
        for group in groups:
            path = rng.choice(group)
            size = path.stat().st_size
            yield path, None if rng.random() < 0.5 or not size else rng.randrange(size)


def trouble_with(broken: Path, name: str) -> Iterator[str]:
    """Open a damaged store both ways and yield what is not as it should be."""
    yield from trouble_of_reading(broken, name)
    try:
        with expstore.open(broken) as rb:
            if name not in DERIVED:
                yield "was opened for writing"
            for key, values in wanted().items():
                if not torch.equal(rb[key], values):
                    yield f"{key} reads wrong"
            rb.sql("SELECT count(*) FROM episodes")
            rb.extend(batch(10, 0))
    except CorruptionError as exc:
        if name in DERIVED:
            yield f"was refused: {exc}"
        if name not in str(exc) or "expstore verify" not in str(exc):
            yield f"was refused without its name or a hint: {exc}"


def trouble_of_reading(broken: Path, name: str) -> list[str]:
    faults = []
    shard = "/c/" in name
    column = name.removeprefix("columns/").split("/c/")[0].removesuffix("/zarr.json")
    try:
        rb = expstore.open(broken, mode="r")
    except ExpStoreError as exc:
        return (
            [] if name in str(exc) and name.startswith(("expstore.json", "journal")) else [f"mode r: {exc}"]
        )
    with rb:
        if name.startswith(("expstore.json", "journal")):
            faults.append("was opened with mode='r'")
        for key, values in wanted().items():
            path = key if isinstance(key, str) else "/".join(key)
            try:
                if not torch.equal(rb[key], values):
                    faults.append(f"mode r: {path} reads wrong")
                if path == column and name.endswith("zarr.json"):
                    faults.append(f"mode r: {path} was read without its zarr.json")
            except CorruptionError as exc:
                if path != column or name not in str(exc):
                    faults.append(f"mode r: reading {path}: {exc}")
        try:
            rows = rb.sample(64)
            if not torch.equal(rows["number"], wanted()["number"][rows["index"]]):
                faults.append("mode r: a sample reads wrong")
        except CorruptionError as exc:
            if name not in str(exc) or not (shard or name.endswith("zarr.json")):
                faults.append(f"mode r: sampling: {exc}")
    return faults


def faults_of(sound: Path, folder: Path, count: int, seed: int) -> list[str]:
    logging.getLogger("expstore").setLevel(logging.ERROR)
    found = []
    rng = random.Random(seed)
    for number, (path, size) in enumerate(damages(sound, rng)):
        if number == count:
            return found
        broken = Path(shutil.copytree(sound, folder / "broken.exp"))
        name = path.relative_to(sound).as_posix()
        file = broken / name
        if size is None:
            file.unlink()
        else:
            os.truncate(file, size)
        what = f"{name} {'deleted' if size is None else f'cut to {size}'}"
        if size is None and name.startswith("journal"):
            name = "journal"  # nobody knows how it was called
        found += [f"{what}: {fault}" for fault in trouble_with(broken, name)]
        shutil.rmtree(broken)
    return found


@pytest.mark.guarantee(
    "damage/errors",
    "A truncated or deleted file raises a `CorruptionError` with its name, and an opening that refuses a "
    "damaged store changes nothing.",
)
@pytest.mark.slow
def test_files_that_are_cut_or_gone(sound: Path, tmp_path: Path) -> None:
    """Opening for writing names the file; mode="r" reads what does not depend on it."""
    assert in_child(lambda: faults_of(sound, tmp_path, 40, seed=1)) == []


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_many_files_that_are_cut_or_gone(
    sound: Path, tmp_path: Path, seed: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    count_cases(200)
    assert in_child(lambda: faults_of(sound, tmp_path, 200, seed=10 + seed + long_seed)) == []


def test_a_lost_segment_is_not_taken_for_a_kill(store_path: Path) -> None:
    """Of two segments the newer one goes: what stands in the older one is a whole, older state."""

    def work() -> list[str]:
        rb = TensorDictReplayBuffer(storage=ZarrStorage(store_path, 3000, segment_bytes=4096))
        rb.storage.background.stop()
        for first in range(0, 2000, 20):
            rb.extend(batch(20, first))
            if len(list((store_path / "journal").iterdir())) == 2:
                os._exit(0)
        return ["there never were two"]

    assert in_child(work) == []
    newest = max((store_path / "journal").iterdir())
    shutil.copytree(store_path, store_path.with_name("copy.exp"))
    newest.unlink()
    with pytest.raises(CorruptionError, match="journal ends with record"):
        expstore.open(store_path)
    with expstore.open(store_path.with_name("copy.exp")) as rb:
        assert len(rb) > 20


def test_the_bytes_of_an_unfinished_change_are_checked(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "REPLACE_RECORD_BYTES", 100)

    def work() -> list[str]:
        rb = expstore.open(store_path)
        rb.extend(batch(50, 0))
        rb.flush()
        rb.storage.background.stop()
        rb[:] = batch(50, 100)
        os._exit(0)

    in_child(work)
    (shelved,) = (store_path / "redo").iterdir()
    data = shelved.read_bytes()
    for bad in (data[:-1], data[:50] + b"?" + data[51:], None):
        if bad is None:
            shelved.unlink()
        else:
            shelved.write_bytes(bad)
        with pytest.raises(CorruptionError, match=f"redo/{shelved.name}"):
            expstore.open(store_path)
        assert [f.path for f in verify(store_path)] == [f"redo/{shelved.name}"]
    shelved.write_bytes(data)
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert rb["number"].tolist() == list(range(100, 150))


@pytest.mark.guarantee("damage/rest")
@pytest.mark.some(2)
@pytest.mark.parametrize("lost", ["wide/c/2/0", "wide/zarr.json", "next/reward/c/1/0", "_row/step/c/0"])
def test_queries_need_only_the_columns_that_they_name(sound: Path, tmp_path: Path, lost: str) -> None:
    """Who follows a damaged store can ask for all that is whole; else the file is named.

    DuckDB reads what is nested under one key, here `next`, as a whole.
    """
    path = Path(shutil.copytree(sound, tmp_path / "run.exp"))
    file = path / "columns" / lost
    file.unlink()
    asked = {
        "wide": "max(list_sum(wide::FLOAT[]))",
        "next": "max(next.reward)",
        "_row": "max(_step)",
        "number": "sum(number)",
        "done": "count(*) FILTER (next.terminated)",
        "priority": "sum(_priority)",
    }
    with expstore.open(sound, mode="r") as rb:
        wanted = {name: rb.sql(f"SELECT {what} FROM transitions").fetchall() for name, what in asked.items()}
    with expstore.open(path, mode="r") as rb:
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(CAPACITY,)]
        for name, what in asked.items():
            if name == lost.split("/")[0] or (name, lost[:5]) == ("done", "next/"):
                with pytest.raises(CorruptionError, match=lost):
                    rb.sql(f"SELECT {what} FROM transitions")
            else:
                assert rb.sql(f"SELECT {what} FROM transitions").fetchall() == wanted[name]
        with pytest.raises(CorruptionError, match=lost):
            rb.sql("SELECT * FROM transitions")
        with pytest.raises(CorruptionError, match=lost):
            rb.sql(f"SELECT _id FROM transitions ORDER BY {asked[lost.split('/')[0]][4:-1]}")


def test_a_line_says_what_is_rebuilt(sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(shutil.copytree(sound, tmp_path / "run.exp"))
    with expstore.open(path) as rb:
        rb.sql("SELECT 1")
    assert caplog.messages == []
    for name in DERIVED:
        (path / name).write_bytes(b"?")
    with expstore.open(path) as rb:
        rb.sql("SELECT 1")
        assert rb["number"][0] == 77
    told = "\n".join(caplog.messages)
    assert [name for name in DERIVED if name in told] == ["index.duckdb", "STATE", "checksums"]
    assert len(caplog.messages) == 3
    assert verify(path) == []


@pytest.mark.guarantee("damage/errors")
def test_a_refused_opening_changes_nothing(sound: Path, tmp_path: Path) -> None:
    """But LOCK and STATE, which say who has tried."""

    def state() -> dict[Path, bytes]:
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name not in ("LOCK", "STATE"))
        return {p: p.read_bytes() for p in files}

    path = Path(shutil.copytree(sound, tmp_path / "run.exp"))
    (path / "episodes.log").unlink()
    before = state()
    with pytest.raises(CorruptionError, match="episodes.log is missing"):
        expstore.open(path)
    assert before == state()
    with expstore.open(path, mode="r") as rb:
        assert rb["number"][0] == 77
