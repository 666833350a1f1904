"""What exports and imports share: whole or not at all, complete rows, names, bits, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore import exchange
from expstore.cli.app import run
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, SchemaError, StateError, StorageError
from expstore.exchange import export_npz, export_parquet, npz, rows
from expstore.exchange.foreign_rows import SCALARS, their_path
from expstore.exchange.formats import EXPORTS
from tests.support.buffer_bytes import held as held_bytes
from tests.support.case_selection import in_full, share
from tests.support.commands import Cli
from tests.support.exchange_formats import BY_STEPS, CONTROL_FIELDS, NEEDED, ROUND_TRIPS, control_rows
from tests.support.gated_disk import GatedDisk, refuse
from tests.support.typed_rows import typed_buffer, typed_rows

pytestmark = pytest.mark.usefixtures("no_syncs")


def stop(done: int, total: int) -> None:
    raise KeyboardInterrupt


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
    "An export has complete rows only, identical to the bit, and is written completely or not at all; "
    "LeRobot data sets apart.",
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


@pytest.mark.some(2)
@pytest.mark.parametrize("name", EXPORTS)
def test_no_export_holds_more_than_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked = []

    def counted(storage: Any, ids: Any, places: Any) -> Any:
        asked.append(ids.size)
        return read(storage, ids, places)

    read = rows.read_present
    monkeypatch.setattr(rows, "read_present", counted)
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 16)
    told: list[tuple[int, int]] = []
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(control_rows(0, 200, every=50))
        export = partial(getattr(exchange, f"export_{name}"), fields=CONTROL_FIELDS, **NEEDED.get(name, {}))
        done = export(rb, tmp_path / "out", progress=lambda *how_far: told.append(how_far))
    assert max(asked) <= 16
    assert sum(asked) == done.rows == 200
    assert told == sorted(told)
    assert len(told) > 10
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize("form", sorted(ROUND_TRIPS))
def test_fields_that_describe_episodes_may_be_left_out(tmp_path: Path, form: str) -> None:
    out, back = ROUND_TRIPS[form]
    keys = expstore.EpisodeKeys(traj="robot", done=[("next", "fell")], reward=("next", "score"))
    with expstore.open(tmp_path / "run.exp", episodes=keys) as rb:
        following = {"score": torch.ones(6, 1), "fell": torch.tensor([0, 0, 1, 0, 0, 1]).bool()[:, None]}
        rb.extend(TensorDict({"x": torch.arange(6), "robot": torch.zeros(6).long(), "next": following}, [6]))
        out(rb, tmp_path / "out", fields=["x", "next.score"])
    back(tmp_path / "out", tmp_path / "back.exp")
    with expstore.open(tmp_path / "back.exp", mode="r") as again:
        assert again.sql('SELECT length, "return" FROM episodes').fetchall() == [(3, 3.0), (3, 3.0)]
        assert set(again.schema.keys) == {("x",), ("next", "score")}


DTYPES = ["?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8"]


@st.composite
def tables(draw: st.DrawFn) -> TensorDict:
    """Fields of any names, dtypes and shapes, of any bits."""
    count = draw(st.integers(1, 30))
    names = st.text("abZ_.- 9", min_size=1, max_size=4).filter(
        lambda n: n.strip() == n and n.strip(".") and not n.startswith("_")
    )
    data = TensorDict({}, [count])
    for number, depth in enumerate(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))):
        key = ("f", *draw(st.lists(names, min_size=depth, max_size=depth)), f"x{number}")
        shape = draw(st.sampled_from([(), (1,), (3,), (2, 2), (1, 1), (1, 2, 1)]))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        raw = rng.integers(0, 256, (count, *shape, dtype.itemsize), dtype=np.uint8)
        values = (raw & 1 if dtype == np.bool_ else raw).view(dtype)
        data[key] = torch.from_numpy(values.reshape(count, *shape))
    return data


@pytest.mark.slow
@share(0.25, of=40)  # each makes two stores
@given(data=tables(), form=st.sampled_from(sorted(ROUND_TRIPS)))
def test_whatever_bits_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: TensorDict, form: str
) -> None:
    folder = tmp_path_factory.mktemp("bits")
    out, back = ROUND_TRIPS[form]
    try:
        rb = expstore.open(folder / "run.exp", seed=0)
        rb.extend(data)
    except SchemaError:  # names that no store takes
        return
    with rb:
        out(rb, folder / "out")
        back(folder / "out", folder / "back.exp")
        with expstore.open(folder / "back.exp", mode="r") as again:
            assert held_bytes(rb, BY_STEPS) == held_bytes(again, BY_STEPS)
            assert rb.schema == again.schema


test_whatever_bits_come_back_in_full = pytest.mark.torture(in_full(test_whatever_bits_come_back))


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


@pytest.mark.guarantee("exchange/exports")
@pytest.mark.parametrize("name", ["arrow", "npz", "parquet"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, name: str) -> None:
    part = {"arrow": "rows.arrow", "npz": ".part", "parquet": "00000.parquet"}[name]
    disk = GatedDisk(refuse("create", "write", where=part))
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(control_rows(0, 60))
        with pytest.raises(StorageError, match="today"):
            getattr(exchange, f"export_{name}")(rb, tmp_path / "out", disk=disk)
    assert os.listdir(tmp_path) == ["run.exp"]


@pytest.mark.guarantee("exchange/exports")
@pytest.mark.some(2)
@pytest.mark.parametrize("name", EXPORTS)
def test_nothing_is_left_of_an_export_that_ended_early(tmp_path: Path, name: str) -> None:
    """Before the first episode of a LeRobot data set, which is continued otherwise."""
    target, scrap = tmp_path / "out", tmp_path / "out.tmp"
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(control_rows(0, 63))
        arguments = {"fields": CONTROL_FIELDS, **NEEDED.get(name, {})}
        export = partial(getattr(exchange, f"export_{name}"), rb, target, **arguments)
        with pytest.raises(KeyboardInterrupt):
            export(progress=stop)
        assert os.listdir(tmp_path) == ["run.exp"]
        scrap.mkdir()
        (scrap / "number").write_text("half")  # of one that was killed
        lock = WriterLock(Disk(), scrap / "LOCK")
        with pytest.raises(LockedError, match="another process or thread exports to .*out"):
            export()
        assert (scrap / "number").read_text() == "half"
        lock.release()
        assert export().rows == 63
        with pytest.raises(StateError, match="out exists already"):
            export()
    assert sorted(os.listdir(tmp_path)) == ["out", "run.exp"]


@pytest.mark.parametrize("form", sorted(ROUND_TRIPS))
def test_nothing_is_left_of_an_import_that_ended_early(tmp_path: Path, form: str) -> None:
    out, back = ROUND_TRIPS[form]
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(control_rows(0, 60))
        out(rb, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        back(tmp_path / "out", tmp_path / "back.exp", progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["out", "run.exp"]
    for target in (tmp_path / "run.exp", tmp_path / "run.exp/x"):
        with pytest.raises(StateError):
            back(tmp_path / "out", target)
    (tmp_path / "back.exp.tmp/journal").mkdir(parents=True)
    lock = WriterLock(Disk(), tmp_path / "back.exp.tmp/LOCK")
    with pytest.raises(LockedError, match="another process or thread imports to"):
        back(tmp_path / "out", tmp_path / "back.exp")
    lock.release()
    assert back(tmp_path / "out", tmp_path / "back.exp").rows == 60
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]


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
from expstore.exchange import fill, npz, rows
from expstore.disk.files import Disk

number = int(sys.argv.pop())

def interrupted(call):
    def wrapped(*args, **named):
        os.kill(os.getpid(), number)
        return call(*args, **named)
    return wrapped

tuning.EXCHANGE_ROWS, tuning.EXCHANGE_BYTES = 64, 64 * 4000
if sys.argv[1] == "export":
    rows.Rows.read = interrupted(rows.Rows.read)
    Disk.remove_tree = interrupted(Disk.remove_tree)  # a second one, while it cleans up
else:
    fill.Filler.put = interrupted(fill.Filler.put)
app.main()
"""


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("form", sorted(ROUND_TRIPS))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_from_the_command_line(tmp_path: Path, form: str, number: int) -> None:
    typed_buffer(tmp_path / "run.exp", 300).close()
    store, out, again = (str(tmp_path / name) for name in ("run.exp", "out", "back.exp"))

    def end_early(*arguments: str) -> str:
        command = [sys.executable, "-c", STOPPED, *arguments, str(int(number))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == (130 if number == signal.SIGINT else -9)
        return done.stderr

    said = end_early("export", store, out, f"--{form}")
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == ["run.exp"] or number == signal.SIGKILL
    assert run(["export", store, out, f"--{form}"]) == 0
    end_early("import", out, again)
    assert not (tmp_path / "back.exp").exists()
    assert run(["import", out, again]) == 0
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]
    with expstore.open(store, mode="r") as first, expstore.open(again, mode="r") as second:
        assert held_bytes(first, BY_STEPS) == held_bytes(second, BY_STEPS)


def interrupt(*_: object) -> int:
    raise KeyboardInterrupt


ALONE = """
import sys
from expstore.cli.app import run
folder = sys.argv[1]
for source, form in (("run", "npz"), ("run", "parquet"), ("texts", "arrow")):
    assert run(["export", f"{folder}/{source}.exp", f"{folder}/{form}", f"--{form}"]) == 0
    assert run(["import", f"{folder}/{form}", f"{folder}/{form}.exp"]) == 0
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_exports_and_imports_need_no_torch(tmp_path: Path) -> None:
    typed_buffer(tmp_path / "run.exp", 60).close()
    with expstore.open(tmp_path / "texts.exp", layout="arrow") as rb:
        rb.extend({"prompt": ["a", "bc"], "number": np.arange(2)})
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
