"""Full disks: real ones, on a small file system in memory, and by the limit that a user sets.

The real one is mounted in a child with its own namespaces (`unshare -rm`). Where that is not possible the
test fails, because nothing else shows that a full disk does not kill the process.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import StorageError
from expstore.storages.engine import store
from tests.support.stores import NoKeeper, open_zarr

pytestmark = pytest.mark.index

MakeBatch = Callable[..., TensorDict]

FILL = """
import errno, os, sys
import torch
from tensordict import TensorDict
import expstore
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage

folder, mode, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
ballast = os.path.join(folder, "ballast")
with open(ballast, "wb") as out:
    out.write(bytes(2_000_000))
with open(ballast + "2", "wb") as out:
    out.write(bytes(400_000))

def batch(first, n):
    ids = torch.arange(first, first + n)
    ends = ids % 50 == 49
    return TensorDict({"x": ids, "pad": ids[:, None].expand(n, 30).contiguous(), "flag": ids % 7 == 0,
                       "next": {"reward": ids.float(), "terminated": ends}}, [n])

def held(rb, count, sql=False):
    everything = rb[:]
    assert torch.equal(everything["x"], torch.arange(count)), (len(rb), count)
    assert torch.equal(everything["flag"], torch.arange(count) % 7 == 0)
    assert torch.equal(everything["pad"][:, 29], torch.arange(count))
    if sql:
        found = rb.sql("SELECT count(*), sum(x), count(flag) FROM transitions WHERE NOT flag OR flag")
        assert found.fetchall() == [(count, count * (count - 1) // 2, count)]

rb = expstore.open(os.path.join(folder, "run.exp"), batch_size=8, durability=mode)
count, errors = 0, []
while len(errors) < 6:
    try:
        rb.extend(batch(count, rows))
        count += rows
    except expstore.errors.StorageError as exc:
        errors.append(exc)
        assert exc.kind == "disk_full" and exc.errno == errno.ENOSPC, repr(exc)
        rb.sample()
    assert count < 100_000
try:
    rb.flush()
except expstore.errors.StorageError as exc:
    assert exc.kind == "disk_full", repr(exc)
held_rows = rb.storage.last
assert held_rows == count, (held_rows, count)
os.unlink(ballast)
rb.flush()
held(rb, count, sql=True)
rb.extend(batch(count, rows))
count += rows
assert rb.stats()["poisoned"] is None
held(rb, count)
rb.close()
os.unlink(ballast + "2")  # DuckDB has taken the rest
with expstore.open(os.path.join(folder, "run.exp")) as rb:
    assert rb.recovered is None
    held(rb, count)
# Once more to the brim, and the process ends there.
for name in os.listdir(os.path.join(folder, "run.exp")):
    if name.startswith("index"):  # it is derived, and takes a third of this disk
        os.unlink(os.path.join(folder, "run.exp", name))
rb = expstore.open(os.path.join(folder, "run.exp"), durability=mode)
try:
    while True:
        rb.extend(batch(count, rows))
        count += rows
except expstore.errors.StorageError as exc:
    assert exc.kind == "disk_full", repr(exc)
print("rows", count, flush=True)
os._exit(0)
"""

LOOK = """
import sys, torch, expstore
try:
    with expstore.open(sys.argv[1] + "/run.exp", mode="r") as rb:
        print("followed", rb.storage.last, bool((rb[:]["x"] == torch.arange(rb.storage.last)).all()))
except expstore.errors.StorageError as exc:
    print("refused", exc.kind)
"""


def in_small_disk(tmp_path: Path, *programs: list[str], size: str = "4m") -> subprocess.CompletedProcess[str]:
    """Run programs one after another, with a small file system at `tmp_path`/disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size={size} tmpfs {disk}; "$@" || exit $?'
    command = ["unshare", "-rm", "sh", "-ec", script, "sh", *programs[0]]
    if len(programs) > 1:
        (tmp_path / "second.sh").write_text("\n".join(" ".join(f"'{w}'" for w in p) for p in programs))
        command = ["unshare", "-rm", "sh", "-ec", script, "sh", "sh", "-e", str(tmp_path / "second.sh")]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


@pytest.mark.guarantee("disk/full")
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("mode", "rows"),
    [("process", 200), pytest.param("process", 1, marks=pytest.mark.torture), ("sync", 64)],
)
def test_a_disk_that_is_full_for_real(tmp_path: Path, mode: str, rows: int) -> None:
    """Typed errors; reading continues, nothing is lost, space restores writing; no SIGBUS."""
    (tmp_path / "fill.py").write_text(FILL)
    (tmp_path / "look.py").write_text(LOOK)
    disk = str(tmp_path / "disk")
    done = in_small_disk(
        tmp_path,
        [sys.executable, "-X", "faulthandler", str(tmp_path / "fill.py"), disk, mode, str(rows)],
        [sys.executable, "-X", "faulthandler", str(tmp_path / "look.py"), disk],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.split()
    assert words[0] == "rows"
    assert int(words[1]) > 2 * rows
    assert words[2:] == ["followed", words[1], "True"]


DRAW = """
import errno, os, sys
import torch
import expstore

folder = sys.argv[1]
ballast = os.path.join(folder, "ballast")
with open(ballast, "wb") as out:
    out.write(bytes(1_000_000))
with expstore.open(os.path.join(folder, "run.exp"), batch_size=256) as rb:
    rb.extend({"x": torch.arange(1000)})
    rb.flush()
    c, drawn, errors = rb.consumer("learner", keep="all"), [], 0
    while errors < 4:
        try:
            drawn.append(c.sample()["id"].tolist())
        except expstore.errors.StorageError as exc:
            assert exc.kind == "disk_full" and exc.errno == errno.ENOSPC, repr(exc)
            errors += 1
        assert len(drawn) < 10_000
    os.unlink(ballast)
    for _ in range(300):
        drawn.append(c.sample()["id"].tolist())
    assert [batch["id"].tolist() for batch in c.replay(0)] == drawn
print("drawn", len(drawn))
"""


@pytest.mark.guarantee("disk/full")
@pytest.mark.slow
def test_a_consumer_draws_until_the_disk_is_full(tmp_path: Path) -> None:
    """A typed error and no SIGBUS: the log is written through a map; the draw that failed comes later."""
    (tmp_path / "draw.py").write_text(DRAW)
    command = [sys.executable, "-X", "faulthandler", str(tmp_path / "draw.py"), str(tmp_path / "disk")]
    done = in_small_disk(tmp_path, command, size="6m")
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[1]) > 600


AGAIN = """
import os, sys
import torch
from tensordict import TensorDict
import expstore
from expstore.core import tuning

folder, mode = sys.argv[1:]
store = os.path.join(folder, "run.exp")

def batch(first, n):
    ids = torch.arange(first, first + n)
    return TensorDict({"x": ids, "pad": ids[:, None].expand(n, 30).contiguous()}, [n])

def fill(name):
    with open(os.path.join(folder, name), "wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            pass

tuning.PRIORITY_SECONDS = tuning.CHECKPOINT_SECONDS = 1000.0  # rows stay in the journal until it is full
rb = expstore.open(store, durability=mode)
rb.extend(batch(0, 3000))
rb.flush()
count = 3000
fill("ballast")  # what is free then was reserved for records
try:
    while True:
        rb.extend(batch(count, 5))
        count += 5
except expstore.errors.StorageError as exc:
    assert exc.kind == "disk_full", repr(exc)
fill("ballast2")
try:
    rb.storage.close()  # without an index, which takes and gives space itself
except expstore.errors.StorageError as exc:
    assert exc.kind == "disk_full", repr(exc)
fill("ballast3")
with expstore.open(store) as rb:
    assert rb.recovered is not None  # it was not closed
    assert torch.equal(rb[:]["x"], torch.arange(count)), (len(rb), count)
    print("opened", flush=True)
fill("ballast4")  # now nothing is reserved
try:
    expstore.open(store).close()
except expstore.errors.StorageError as exc:
    assert exc.kind == "disk_full", repr(exc)
    needed = int(exc.hint.removeprefix("opening the store takes about ").split()[0])
    assert needed < 200_000, exc
    size = os.path.getsize(os.path.join(folder, "ballast"))
    os.truncate(os.path.join(folder, "ballast"), size - needed // 4096 * 4096)
    with expstore.open(store) as rb:
        assert len(rb) == count
    print("told", flush=True)
os._exit(0)
"""


@pytest.mark.guarantee("disk/full")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["process", "sync"])
def test_a_close_that_failed_on_a_full_disk_releases_the_lock(tmp_path: Path, mode: str) -> None:
    """The next opening uses the space reserved for records; without any its error says what it needs."""
    (tmp_path / "again.py").write_text(AGAIN)
    disk = str(tmp_path / "disk")
    command = [sys.executable, "-X", "faulthandler", str(tmp_path / "again.py"), disk, mode]
    done = in_small_disk(tmp_path, command, size="16m")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == ["opened", "told"]


HOLED = """
import os, sys
from pathlib import Path
import torch
from tensordict import NonTensorStack, TensorDict
import expstore
from expstore.core import tuning
from expstore.maintenance import verify

folder = sys.argv[1]
store = os.path.join(folder, "run.exp")
with expstore.open(store, layout="arrow", schema={"x": "int64", "words": str}) as rb:
    for first in range(0, 40, 10):
        words = NonTensorStack(*["w" * 4000] * 10)
        rb.extend(TensorDict({"x": torch.arange(first, first + 10), "words": words}, [10]))
(segment,) = [os.path.join(store, "segments", name) for name in os.listdir(os.path.join(store, "segments"))]
size = os.path.getsize(segment)
with open(segment, "r+b") as file:  # as a write leaves it that a full disk has ended early
    data = file.read()
    middle = size // 8192 * 4096
    file.truncate(middle)
    file.truncate(size)
    end = -(-(middle + 4096) // 4096) * 4096
    file.seek(end)
    file.write(data[end:])
assert os.stat(segment).st_blocks * 512 < size
with open(os.path.join(folder, "ballast"), "wb", buffering=0) as out:
    try:
        while True:
            out.write(bytes(4096))
    except OSError:
        pass
found = verify(Path(store))
print([(f.kind, f.ids) for f in found if "segments" in f.path], flush=True)
os._exit(0)
"""


@pytest.mark.guarantee("damage/verify")
@pytest.mark.slow
def test_a_hole_in_a_segment_of_a_full_disk_is_a_finding(tmp_path: Path) -> None:
    """Reading it through a map would be SIGBUS: `verify` and an opening use pread."""
    (tmp_path / "holed.py").write_text(HOLED)
    done = in_small_disk(
        tmp_path,
        [sys.executable, "-X", "faulthandler", str(tmp_path / "holed.py"), str(tmp_path / "disk")],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "payload" in done.stdout


# -- the user's limit ------------------------------------------------------------------------------------


class Small(Disk):
    """A disk whose free space is set by a test."""

    left = 1_000_000
    looks = 0

    def free(self, path: Path) -> int:
        self.looks += 1
        return self.left


@pytest.fixture(autouse=True)
def _no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "Keeper", NoKeeper)


@pytest.mark.guarantee("disk/full")
def test_an_extend_that_would_leave_too_little_is_refused(store_path: Path, make_batch: MakeBatch) -> None:
    disk = Small()
    rb = open_zarr(store_path, None, disk=disk, seed=1, min_free_bytes=800_000)
    rb.extend(make_batch(100))
    disk.left = 810_000
    rb.flush()
    horizon = rb.storage.state.horizon
    with pytest.raises(StorageError) as caught:
        rb.extend(make_batch(1000))
    assert caught.value.kind == "disk_full"
    assert caught.value.errno == errno.ENOSPC
    for figure in ("1000 rows", "810000 are free", "800000", "min_free_bytes"):
        assert figure in str(caught.value)
    assert (len(rb), rb.storage.state.horizon) == (100, horizon)  # nothing was written
    rb.extend(make_batch(10))  # for these there is space
    disk.left = 2_000_000
    rb.extend(make_batch(1000))
    assert len(rb) == 1110
    rb.close()


def test_the_first_rows_are_refused_before_anything_is_made(store_path: Path, make_batch: MakeBatch) -> None:
    rb = open_zarr(store_path, 100, disk=Small(), seed=1, min_free_bytes=1_000_001)
    with pytest.raises(StorageError, match="min_free_bytes") as caught:
        rb.extend(make_batch(1))
    assert caught.value.kind == "disk_full"
    assert not (store_path / "columns").exists()
    rb.close()


def test_rows_that_take_the_places_of_others_need_no_space(store_path: Path, make_batch: MakeBatch) -> None:
    disk = Small()
    rb = open_zarr(store_path, 100, disk=disk, seed=1, min_free_bytes=500_000)
    for _ in range(3):
        rb.extend(make_batch(2000))  # 100 + 4096 slots, all of them written to
    disk.left = 0
    rb.flush()
    rb.extend(make_batch(2000))
    assert rb.storage.last == 8000
    rb.close()


def test_the_disk_is_looked_at_once_per_sync(store_path: Path, make_batch: MakeBatch) -> None:
    disk = Small()
    disk.left = 1 << 40
    rb = open_zarr(store_path, None, disk=disk, seed=1, min_free_bytes=1)
    rb.extend(make_batch(10))
    before = disk.looks
    for _ in range(20):
        rb.extend(make_batch(10))
    assert disk.looks == before
    rb.flush()
    assert disk.looks == before + 1
    rb.close()


def test_a_closed_store_takes_little_more_than_its_rows(store_path: Path, make_batch: MakeBatch) -> None:
    for first in (0, 10):
        with expstore.open(store_path, capacity=1000, seed=1) as rb:
            rb.extend(make_batch(10))
            assert len(rb) == first + 10
            assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(first + 10,)]
        files = [path.stat() for path in store_path.rglob("*") if path.is_file()]
        assert sum(found.st_blocks * 512 for found in files) < 1 << 20


def test_a_closed_store_keeps_no_long_journal(
    store_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CLOSED_JOURNAL_BYTES", 2000)
    for first in (0, 60):
        with expstore.open(store_path, capacity=1000, seed=1) as rb:
            assert rb.recovered is None
            assert len(rb) == first
            for _ in range(60):
                rb.extend(make_batch(1))
        kept = [path for path in (store_path / "journal").iterdir() if path.stat().st_blocks]
        assert sum(path.stat().st_blocks * 512 for path in kept) <= 4096
        assert len(kept) == 1
    with expstore.open(store_path, mode="r") as follower:
        assert len(follower) == 120


def test_a_closed_store_keeps_no_raw_rows_that_are_packed(store_path: Path) -> None:
    rows = torch.arange(100, dtype=torch.uint8)[:, None].expand(100, 10_000).contiguous()
    with expstore.open(store_path, capacity=1000, layout="packed", seed=1) as rb:
        for row in rows:
            rb.extend(TensorDict({"frame": row[None]}, [1]))
            if len(rb) % 7 == 0:
                rb.flush()
    partial = store_path / "columns" / "frame" / "partial"
    area = 4096 + 16 * 10_000
    assert partial.stat().st_blocks * 512 < 2 * area < partial.stat().st_size
    with expstore.open(store_path, seed=1) as rb:
        assert rb.recovered is None
        assert torch.equal(rb[:]["frame"], rows)


def test_without_a_limit_free_space_is_not_checked(store_path: Path, make_batch: MakeBatch) -> None:
    disk = Small()
    disk.left = 0
    rb = open_zarr(store_path, None, disk=disk, seed=1, min_free_bytes=0)
    rb.extend(make_batch(10))
    rb.flush()
    assert disk.looks == 0
    assert rb.stats()["free_bytes"] == 0
    rb.close()


def test_the_limit_is_checked(store_path: Path) -> None:
    with pytest.raises(ValueError, match="min_free_bytes must be at least 0, got -1"):
        expstore.open(store_path, durability=expstore.Durability(min_free_bytes=-1))


def test_stats_say_how_the_disk_is(store_path: Path, make_batch: MakeBatch) -> None:
    rb = open_zarr(store_path, 1000, disk=Disk(), seed=1, min_free_bytes=0)
    stats = rb.stats()
    assert (stats["last_sync_seconds"], stats["last_sync_age"], stats["poisoned"]) == (None, None, None)
    rb.extend(make_batch(50))
    assert rb.stats()["unsynced_rows"] == 50
    before = rb.stats()["fsyncs"]
    rb.flush()
    stats = rb.stats()
    assert stats["unsynced_rows"] == 0
    assert stats["syncs"] == 1
    assert stats["fsyncs"] > before
    assert 0 <= stats["last_sync_seconds"] < 60
    assert 0 <= stats["last_sync_age"] < 60
    assert stats["free_bytes"] > 0
    rb.close()
