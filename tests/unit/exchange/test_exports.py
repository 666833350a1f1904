"""What all exports share, tested by two of them: whole or not at all, complete rows, names, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import expstore
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, SchemaError, StateError, StorageError
from expstore.exchange import export_npz, export_parquet, npz, rows
from expstore.exchange.foreign_rows import SCALARS, their_path
from tests.support.commands import Cli
from tests.support.typed_rows import typed_buffer, typed_rows

pytestmark = pytest.mark.usefixtures("no_syncs")


def held(rb: expstore.TensorDictReplayBuffer) -> dict[str, np.ndarray]:
    """Return what is to be exported, by the name of the array; the rows of an episode are in one run."""
    table = rb.sql("SELECT _id, _episode FROM transitions ORDER BY _id").df()
    whole = rb[rb.storage.geometry.index_of(table["_id"].to_numpy())]
    found = {"_episode": table["_episode"].to_numpy()}
    for key in rb.schema.keys:
        values = whole[key]
        array = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
        found["/".join(their_path(key))] = array.reshape(-1) if key in SCALARS else array
    return found


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a file."""
    with np.load(path) as found:
        return {name: array for name, array in found.items() if name != "expstore"}


def check_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(values).tobytes(), name


@pytest.mark.guarantee(
    "exchange/exports",
    "An export has complete rows only, identical to the bit, and is written completely or not at all.",
)
@pytest.mark.some(2)
@pytest.mark.parametrize("layout", ["flat", "auto"])
@pytest.mark.parametrize("piece", [1 << 20, 64 * 4000])
@pytest.mark.parametrize(("capacity", "count"), [(None, 230), (200, 500), (200, 0)])
def test_other_programs_read_what_the_store_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int, count: int, piece: int, layout: str
) -> None:
    """In one piece that is not full, and in several."""
    monkeypatch.setattr(tuning, "EXCHANGE_BYTES", piece)
    with typed_buffer(tmp_path / "run.exp", count or 50, capacity=capacity, layout=layout) as rb:
        if not count:
            rb.empty()
        expected = held(rb)
        done = export_npz(rb.storage, tmp_path / "out.npz")
    found = arrays_of(tmp_path / "out.npz")
    check_same(found, expected)
    assert (done.rows, done.left_out) == (len(found["number"]), 0)
    assert done.rows == min(count, capacity or count)
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "run.exp"]


def test_rows_are_read_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_BYTES", 64 * 3600)
    asked = []

    def counted(storage: Any, ids: Any, places: Any) -> Any:
        asked.append(ids.size)
        return read(storage, ids, places)

    read = rows.read_present
    monkeypatch.setattr(rows, "read_present", counted)
    told = []
    with typed_buffer(tmp_path / "run.exp", 230) as rb:
        done = export_npz(rb.storage, tmp_path / "out.npz", progress=lambda *how_far: told.append(how_far))
    assert max(asked) <= 64
    assert sum(asked) == done.rows == 230
    assert [bytes_done for bytes_done, _ in told] == sorted({bytes_done for bytes_done, _ in told})
    assert told[-1][0] == told[-1][1]


def test_only_some_fields(tmp_path: Path) -> None:
    with typed_buffer(tmp_path / "run.exp", 60) as rb:
        expected = held(rb)
        done = export_npz(rb.storage, tmp_path / "out.npz", fields=["next.frame", "number"])
        with pytest.raises(SchemaError, match=r"no field 'next.frames'.*next\.frame"):
            export_npz(rb.storage, tmp_path / "other.npz", fields=["number", "next.frames"])
    found = arrays_of(tmp_path / "out.npz")
    assert found.keys() == {"_episode", "next/frame", "number", "terminals", "timeouts"}
    check_same(
        {name: found[name] for name in ("_episode", "next/frame", "number")},
        {name: expected[name] for name in ("_episode", "next/frame", "number")},
    )
    assert done.fields == ("number", "next.frame")
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "run.exp"]


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.npz").mkdir()
    (tmp_path / "file.npz").write_text("mine")
    with typed_buffer(tmp_path / "run.exp", 60) as rb:
        for name in ("out.npz", "file.npz", "run.exp"):
            with pytest.raises(StateError, match=f"{name} exists already"):
                export_npz(rb.storage, tmp_path / name)
    assert list((tmp_path / "out.npz").iterdir()) == []
    assert (tmp_path / "file.npz").read_text() == "mine"
    with pytest.raises(StateError), expstore.open(tmp_path / "new.exp") as rb:
        export_npz(rb.storage, tmp_path / "new.npz")
    assert sorted(os.listdir(tmp_path)) == ["file.npz", "new.exp", "out.npz", "run.exp"]


class FullDisk(Disk):
    """Have no space for arrays."""

    def gate(self, act: str, path: Path) -> None:
        if act == "write" and path.suffix == ".part":
            raise OSError(28, "No space left on device")


@pytest.mark.guarantee("exchange/exports")
@pytest.mark.slow
def test_nothing_is_left_of_one_that_ended_early(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with typed_buffer(tmp_path / "run.exp", 60) as rb:
        with pytest.raises(KeyboardInterrupt):
            export_npz(rb.storage, tmp_path / "out.npz", progress=stop)
        assert os.listdir(tmp_path) == ["run.exp"]
        with pytest.raises(StorageError, match="No space"):
            export_npz(rb.storage, tmp_path / "out.npz", disk=FullDisk())
        assert os.listdir(tmp_path) == ["run.exp"]
        scrap = tmp_path / "out.npz.tmp"  # of one that was killed
        (scrap / "frame/c").mkdir(parents=True)
        (scrap / "number").write_text("half")
        lock = WriterLock(Disk(), scrap / "LOCK")
        with pytest.raises(LockedError, match=r"another process or thread exports to .*out\.npz"):
            export_npz(rb.storage, tmp_path / "out.npz")
        assert (scrap / "number").read_text() == "half"
        lock.release()
        expected = held(rb)
        export_npz(rb.storage, tmp_path / "out.npz")
    check_same(arrays_of(tmp_path / "out.npz"), expected)
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "run.exp"]


@pytest.mark.guarantee("exchange/exports")
def test_rows_that_are_overwritten_meanwhile_are_left_out_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer turns the ring while another process exports; what is there are whole rows."""
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 64)
    written = []
    with (
        typed_buffer(tmp_path / "run.exp", 500, capacity=200) as writer,
        expstore.open(tmp_path / "run.exp", mode="r") as reader,
    ):

        def go_on(done: int, total: int) -> None:
            if len(written) < 2:
                first = 500 + 80 * len(written)
                writer.extend(typed_rows(80, first))
                written.append(first)

        done = export_parquet(reader.storage, tmp_path / "out", progress=go_on)
    found = pl.read_parquet(tmp_path / "out/rows")
    # 64 are read before each extend, then those up to the 80th, and the 160th, are gone.
    assert (done.rows, done.left_out) == (200 - 48, 48)
    number = found["number"].to_numpy()
    assert (np.diff(number) > 0).all()
    assert number[-1] == 499
    expected = typed_rows(500)[torch.from_numpy(number.copy())]
    assert (found["frame"].to_numpy() == expected["frame"].flatten(1).numpy()).all()
    next_frame = found["next"].struct.field("frame").to_numpy()
    assert (next_frame == expected["next", "frame"].flatten(1).numpy()).all()
    assert (found["_id"].to_numpy() == number + 1).all()


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store in use, of a version, of the newest one."""
    store, versions = tmp_path / "run.exp", tmp_path / "versions"
    with typed_buffer(store, 60) as rb:
        rb.dumps(versions)
        rb.extend(typed_rows(30, 60))
        rb.snapshots.tag("best")
        rb.extend(typed_rows(30, 90))
        code, out, err = cli("export", store, tmp_path / "all.npz", "--npz")
        assert (code, err.count("\n")) == (0, 1)
        assert "facts about episodes" in err
        assert "all.npz holds 120 rows" in out
        check_same(arrays_of(tmp_path / "all.npz"), held(rb))
    asked = ("--npz", "--fields", "number, next.frame", "--json")
    code, out, _ = cli("export", store, tmp_path / "best.npz", "--version", "best", *asked)
    facts = json.loads(out)
    assert (code, facts["rows"], facts["left_out"]) == (0, 90, 0)
    assert facts["fields"] == ["number", "next.frame"]
    assert facts["disk_bytes"] == Disk().measure_space(tmp_path / "best.npz")
    assert len(arrays_of(tmp_path / "best.npz")["number"]) == 90
    assert cli("export", versions, tmp_path / "old.npz", "--npz")[0] == 0
    assert len(arrays_of(tmp_path / "old.npz")["number"]) == 60
    code, _, err = cli("export", store, tmp_path / "old.npz", "--npz")
    assert (code, "exists already" in err) == (2, True)
    code, _, err = cli("export", store, tmp_path / "x.npz")
    assert (code, "choose one format: --arrow, " in err, "OUT" in err) == (2, True, False)
    monkeypatch.setattr(npz, "write_flat", interrupt)
    assert cli("export", store, tmp_path / "x.npz", "--npz")[0] == 130
    assert not [name for name in os.listdir(tmp_path) if name.startswith("x")]


def test_a_target_in_a_store_or_nowhere_is_refused(tmp_path: Path, cli: Cli) -> None:
    store = tmp_path / "run.exp"
    typed_buffer(store, 60).close()
    (tmp_path / "link").symlink_to(store / "columns")
    before = sorted(store.rglob("*"))
    for target in (store / "x.npz", store / "columns/x.npz", tmp_path / "link/x.npz"):
        code, _, err = cli("export", store, target, "--npz")
        assert (code, f"would lie inside the store {store}" in err) == (2, True)
    assert sorted(store.rglob("*")) == before
    code, _, err = cli("export", store, tmp_path / "no/such/x.npz", "--npz")
    assert (code, f"there is no folder {tmp_path / 'no/such'}" in err) == (2, True)
    assert sorted(os.listdir(tmp_path)) == ["link", "run.exp"]


STOPPED = """
import os, signal, sys
from expstore.cli import app
from expstore.core import tuning
from expstore.exchange import npz
from expstore.disk.files import Disk

def interrupted(call):
    def wrapped(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return call(*args)
    return wrapped

npz._Writer.add = interrupted(npz._Writer.add)
Disk.remove_tree = interrupted(Disk.remove_tree)
tuning.EXCHANGE_BYTES = 64 * 4000
app.main()
"""


@pytest.mark.slow
def test_a_second_interrupt_does_not_disturb_the_cleaning_up(tmp_path: Path) -> None:
    typed_buffer(tmp_path / "run.exp", 300).close()
    arguments = ["export", str(tmp_path / "run.exp"), str(tmp_path / "out.npz"), "--npz"]
    done = subprocess.run([sys.executable, "-c", STOPPED, *arguments], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.startswith("note: the export will not contain row ids")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["run.exp"]


def interrupt(*_: object) -> int:
    raise KeyboardInterrupt


ALONE = """
import sys
from expstore.cli.app import run
assert run(["export", sys.argv[1], sys.argv[2], "--npz"]) == 0
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_packed_store_needs_no_torch(tmp_path: Path) -> None:
    typed_buffer(tmp_path / "run.exp", 60).close()
    command = [sys.executable, "-c", ALONE, str(tmp_path / "run.exp"), str(tmp_path / "out.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
