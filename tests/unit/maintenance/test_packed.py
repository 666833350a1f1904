"""Damaged packed columns: reading raises, verify names the rows, repair gives them up."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cli.app import run
from expstore.core import tuning
from expstore.errors import CorruptionError, StorageError
from expstore.maintenance import repair, verify
from expstore.storages.columns.packed import writer
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.format.layout import ColumnLayout
from tests.support.batches import numbered_rows
from tests.support.damaged_stores import Broken, flip, in_child, lost_ids
from tests.support.framed_rows import half_noise_frames
from tests.support.stores import extend_all, open_zarr
from tests.support.tuned import few_rows_in_memory, set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")

#: 16 rows in a shard, 4 in a chunk; 110 slots are readable of 128: the ring has turned once.
CAPACITY, ROWS = 100, 150
LAYOUT = ColumnLayout(fields={"frame": {"layout": "packed", "rows": 4}})


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    monkeypatch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 16)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let stores have short shards and a short ring."""
    patch.setattr(tuning, "PACKED_SHARD_ROWS", 16)
    set_spare_slots(patch, 28)


def batch(count: int, start: int = 0) -> TensorDict:
    return numbered_rows(count, start, frame=half_noise_frames)


def buffer(path: Path, capacity: int | None = CAPACITY) -> TensorDictReplayBuffer:
    return open_zarr(path, capacity, layout=LAYOUT)


def right(data: TensorDict) -> bool:
    return torch.equal(data["frame"], half_noise_frames(data["number"]))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        with buffer(path) as rb:
            extend_all(rb, *(batch(10, first) for first in range(0, ROWS, 10)), flush_every=5)
    return path


@pytest.fixture
def broken(sound: Path) -> Broken:
    return Broken(sound, ["frame"], right, range(50, 150))


@pytest.mark.some(1)
@pytest.mark.parametrize("count", [15, pytest.param(40, marks=pytest.mark.torture)])
@pytest.mark.parametrize("loop", ["compiled", "numcodecs"])
def test_damage_anywhere_is_an_error_and_never_other_rows(
    broken: Broken, tmp_path: Path, loop: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_rows = (
        importlib.import_module("expstore.kernels.blosc_decode").take_rows if loop == "compiled" else None
    )
    monkeypatch.setattr(PackedRows, "warm", lambda column: setattr(column, "_take_rows", take_rows))
    init = PackedRows.__init__

    def make(column: PackedRows, *args: Any, **options: Any) -> None:
        init(column, *args, **options)
        column._take_rows = take_rows

    monkeypatch.setattr(PackedRows, "__init__", make)
    assert in_child(lambda: broken.faults(tmp_path, count, 1)) == []


def chunk_of(store: Path, row: int) -> tuple[Path, int]:
    """The named shard in which a row of the turned ring stands, and where its chunk's first byte does."""
    shard, inside = divmod(row % 128, 16)
    path = store / f"columns/frame/c.{shard}.0.0"
    index = np.frombuffer(path.read_bytes()[-4 - 16 * 4 : -4], "<u8").reshape(4, 2)
    return path, int(index[inside // 4, 0])


def test_verify_names_the_rows_of_a_damaged_chunk_and_repair_costs_these_alone(
    sound: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    assert verify(store) == []
    path, start = chunk_of(store, 90)
    flip(path, start + 30, 3)
    assert [(f.kind, f.path, f.column) for f in verify(store)] == [
        ("payload", f"columns/frame/{path.name}", "frame")
    ]
    assert lost_ids(store) == {88, 89, 90, 91}
    before = path.read_bytes()
    outcome = repair(store)
    assert outcome.left
    assert not outcome.lost
    assert path.read_bytes() == before
    with pytest.raises(CorruptionError, match="frame"), expstore.open(store, mode="r") as rb:
        rb[:]
    assert repair(store, drop_damaged=True).lost_rows == 4
    assert verify(store) == []
    with expstore.open(store) as rb:
        data = rb[:]
        assert set(data["number"].tolist()) == set(range(50, 150)) - {88, 89, 90, 91}
        assert right(data)
        rb.extend(batch(70, 150))
        data = rb[:]
        assert right(data)
    assert verify(store) == []


def test_a_missing_shard_costs_its_rows(sound: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    chunk_of(store, 90)[0].unlink()
    assert [finding.kind for finding in verify(store)] == ["missing"]
    assert lost_ids(store) == set(range(80, 96))
    with pytest.raises(CorruptionError, match="missing"):
        expstore.open(store)
    assert repair(store, drop_damaged=True).lost_rows == 16
    assert verify(store) == []
    with expstore.open(store) as rb:
        data = rb[:]
        assert len(data) == 84
        assert right(data)


@pytest.mark.some(2)
@pytest.mark.parametrize("where", ["index", "header", "zarr.json"])
def test_redundant_data_is_rebuilt_without_loss(sound: Path, tmp_path: Path, where: str) -> None:
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    path, start = chunk_of(store, 90)
    if where == "zarr.json":
        path = path.with_name(where)
        path.write_bytes(b"{}")
    else:
        flip(path, path.stat().st_size - 9 if where == "index" else start - 9, 0)
    assert len(verify(store)) == 1
    assert lost_ids(store) == set()
    outcome = repair(store)
    assert not outcome.left
    assert not outcome.lost
    assert verify(store) == []
    with expstore.open(store) as rb:
        data = rb[:]
        assert len(data) == 100
        assert right(data)


def test_rows_of_the_chunk_that_is_not_full_are_found_lost(sound: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    (store / "columns/frame/partial").unlink()
    assert lost_ids(store) == {148, 149}
    assert repair(store, drop_damaged=True).lost_rows == 2
    assert verify(store) == []
    with expstore.open(store) as rb:
        rb.extend(batch(1, 150))
        data = rb[:]
        assert set(data["number"].tolist()) == {*range(51, 148), 150}
        assert right(data)


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.torture)])
def test_a_repair_costs_the_rows_that_were_named_and_no_others(
    broken: Broken, tmp_path: Path, count: int
) -> None:
    assert in_child(lambda: broken.repairs(tmp_path, count, 3)) == []


@pytest.mark.parametrize("synced", [0, 1])
def test_a_kill_before_the_shape_has_grown_does_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: int
) -> None:
    """A shard has begun, and zarr.json does not cover it yet; the next opening mends that.

    A checkpoint may cover rows of that shard already: they are in the file of rows that are not packed.
    """
    path, cut = tmp_path / "run.exp", tmp_path / "cut.exp"
    few_rows_in_memory(monkeypatch)
    grow_shape = writer.grow_shape

    def leave(*told: Any) -> None:
        shutil.copytree(path, cut)
        grow_shape(*told)

    with buffer(path, None) as rb:
        rb.extend(batch(32 + synced))
        rb.flush()
        with monkeypatch.context() as patch:
            patch.setattr(writer, "grow_shape", leave)
            rb.extend(batch(15 - synced, 32 + synced))
    assert verify(cut) == []
    shape = cut / "columns/frame/zarr.json"
    assert json.loads(shape.read_bytes())["shape"][0] == 32
    with buffer(cut, None) as rb:
        assert json.loads(shape.read_bytes())["shape"][0] == 48
        assert right(rb[:])
    assert verify(cut) == []


@pytest.mark.slow
def test_a_shard_is_made_whole_though_nothing_of_it_is_left(sound: Path, tmp_path: Path) -> None:
    """Of the one that is written to the rows of the turn before may all have left."""
    for file in sorted(path.name for path in (sound / "columns/frame").glob("c.*")):
        copy = shutil.copytree(sound, tmp_path / f"{file}.exp")
        os.truncate(copy / "columns/frame" / file, 91)
        named = lost_ids(copy)
        repair(copy, drop_damaged=True)
        assert verify(copy) == []
        with buffer(copy) as rb:
            data = rb[:]
        assert set(data["number"].tolist()) == set(range(50, 150)) - named
        assert right(data)


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 112))
def test_a_thousand_damages(
    broken: Broken, tmp_path: Path, seed: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    count_cases(130)
    assert in_child(lambda: broken.faults(tmp_path, 100, seed + long_seed)) == []
    assert in_child(lambda: broken.repairs(tmp_path, 30, seed + long_seed)) == []


def test_info_says_how_fields_lie_and_what_room_they_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "still.exp"
    with buffer(store, None) as rb:
        assert rb.stats()["packed"] == {}
        rb.extend(TensorDict({"frame": torch.zeros(3, 8, 256, dtype=torch.uint8)}, [3]))
        assert rb.stats()["packed"] == {"frame": None}
        rb.extend(TensorDict({"frame": torch.zeros(4093, 8, 256, dtype=torch.uint8)}, [4093]))
        ratio = rb.stats()["packed"]["frame"]
        assert ratio > 20
    assert run(["info", str(store), "--json"]) == 0
    (field,) = json.loads(capsys.readouterr().out)["stores"][0]["fields"]
    folder = store / "columns/frame"
    used = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert (field["layout"], field["codec"], field["chunk_rows"]) == ("packed", "lz4hc", 4)
    assert used <= field["disk_bytes"] <= used + folder.stat().st_blocks * 512
    held = sum(path.stat().st_size for path in folder.glob("c.*"))
    assert field["compression"] == ratio == pytest.approx(4096 * 2048 / held, rel=0.2)
    assert field["million_rows_bytes"] == pytest.approx(held / 4096 * 1e6, rel=0.2)
    assert run(["info", str(store)]) == 0
    assert f"packed, lz4hc, 1/{field['compression']:.1f}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [20, 200])
def test_info_of_a_ring_counts_what_its_chunks_contain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], capacity: int
) -> None:
    """Files of two turns, and of extends that are longer than the ring: noise takes what it is."""
    store = tmp_path / "ring.exp"
    torch.manual_seed(0)
    with buffer(store, capacity) as rb:
        for _ in range(60):
            rb.extend(TensorDict({"frame": torch.randint(0, 256, (130, 8, 256), dtype=torch.uint8)}, [130]))
        ratio = rb.stats()["packed"]["frame"]
    assert ratio == pytest.approx(1, rel=0.02)
    assert run(["info", str(store), "--json"]) == 0
    (field,) = json.loads(capsys.readouterr().out)["stores"][0]["fields"]
    assert field["compression"] == pytest.approx(ratio, abs=0.01)
    assert field["million_rows_bytes"] == pytest.approx(2048e6, rel=0.02)
    assert run(["info", str(store)]) == 0
    assert "kB unpacked; a million take" in capsys.readouterr().out


def test_info_says_which_part_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one lane, each tenth of which begins an episode."""
    store = tmp_path / "run.exp"
    number = torch.arange(4096)
    before = (number + number // 10)[:, None, None].expand(4096, 40, 40)
    frames = TensorDict({"pixels": before, "next": {"pixels": before + 1}}, [4096]).to(torch.int16)
    with expstore.open(store, capacity=8192) as rb:
        rb.extend(frames)
    assert run(["info", str(store), "--json"]) == 0
    pixels, after = json.loads(capsys.readouterr().out)["stores"][0]["fields"]
    assert pixels["shared"] == pytest.approx(0.9, abs=0.02)
    assert after["shared"] is None
    assert run(["info", str(store)]) == 0
    assert f"{pixels['shared']:.0%} shared" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(PackedRows, "distances", vanish)  # as beside a writer that renames a shard
        assert run(["info", str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stores"][0]["fields"][0]["shared"] is None


def vanish(*_: object) -> None:
    raise StorageError("cannot open c.3.0.0: no such file")
