"""Stores of every format from 1 on are opened, read, extended, verified; newer formats are refused.

The stores are in tests/fixtures/formats; the README there says how to add one when the format changes.
"""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers import ingest
from expstore.core.draws import Draws
from expstore.disk.files import Disk
from expstore.errors import MigrationError
from expstore.maintenance import verify
from expstore.storages.engine import opening
from expstore.storages.format import manifest
from expstore.storages.format.manifest import FORMAT, MANIFEST, UPGRADES, Manifest, format_of
from tests.fixtures.make_format import CAPACITY, FORMATS, ROWS, TAGGED, key_of, rows
from tests.support.stores import read_files

pytestmark = pytest.mark.index

LATE = {"late", ("next", "value")}


@pytest.fixture(params=sorted(path.name for path in FORMATS.iterdir()))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """The folder of a fixture, and its format."""
    with tarfile.open(FORMATS / request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path, int(request.param.removesuffix(".tar.xz"))


def check(batch: TensorDict, first: int, last: int, *, late: bool) -> None:
    """Hold rows, in the order of their ids, against what they were made of."""
    batch = batch[torch.argsort(batch["action"])]
    wanted = rows(first, last - first)
    for name in ("text", "tokens"):
        assert list(batch[name]) == list(wanted[name])
    for key in wanted.keys(include_nested=True, leaves_only=True):
        assert (batch[key] == wanted[key]).all(), key
    assert (set(batch.keys(True, True)) - set(wanted.keys(True, True))) == (LATE if late else set())
    if late:
        numbers = torch.arange(first, last)
        assert (batch["late"] == 2.5).all()
        assert (batch["next", "value"] == torch.where(numbers < TAGGED, 2 * (numbers + 1), -1)).all()


def test_there_is_one_of_every_format() -> None:
    paths = list(FORMATS.iterdir())
    assert {path.name for path in paths} == {f"{number}.tar.xz" for number in range(1, FORMAT + 1)}
    assert UPGRADES.keys() == set(range(1, FORMAT))
    assert all(path.stat().st_size < 60_000 for path in paths)


def test_the_newest_one_is_what_is_written_now(tmp_path: Path) -> None:
    """Else it is to be made anew: python -m tests.fixtures.make_format."""
    with tarfile.open(FORMATS / f"{FORMAT}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    said = json.loads((tmp_path / "run.exp" / MANIFEST).read_text())
    names = {"gaps" if f.name == "deleted" else f.name for f in dataclasses.fields(Manifest)}
    names -= {"window", "group_key", "group_size", "lineage"}  # only in stores that have these settings
    assert said.keys() == names | {"format", "crc32c"}
    before = _names(tmp_path / "run.exp")
    bases = _base(tmp_path / "run.exp")
    with expstore.open(tmp_path / "run.exp"):
        pass
    assert _base(tmp_path / "run.exp").keys() == bases.keys()
    assert _names(tmp_path / "run.exp") - {"LOCK", "STATE"} == before


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _base(folder: Path) -> Any:
    head = max((folder / "journal").iterdir()).read_bytes()
    return json.loads(head[32 : 32 + int.from_bytes(head[:4], "little")])


@pytest.mark.guarantee(
    "rows/formats",
    "A store of an older format is read, extended and verified; a store of a newer format is refused and "
    "remains unchanged.",
)
@pytest.mark.slow
@pytest.mark.some(1)
def test_it_continues(store: tuple[Path, int]) -> None:
    folder, _ = store
    for name in ("run.exp", "killed.exp"):
        with expstore.open(folder / name, batch_size=8) as rb:
            check(rb[:], ROWS - CAPACITY, ROWS, late=True)
            assert (rb.recovered is None) == (name == "run.exp")
            if name == "run.exp":
                drawn = Draws(5).generator(1).integers(ROWS - CAPACITY + 1, ROWS + 1, 8)
                assert np.array_equal(rb.sample()["id"].numpy(), drawn)
            answer = rb.sql("SELECT count(*), sum(length) FROM episodes").fetchall()
            assert answer == [(-(-ROWS // 25), ROWS)]
            more = rows(ROWS, 60)
            more["late"] = torch.full((60,), 2.5)
            more["next", "value"] = torch.full((60,), -1)
            rb.extend(more, source="arm")
            check(rb[:], ROWS + 60 - CAPACITY, ROWS + 60, late=True)
        assert verify(folder / name) == []
        assert format_of(Disk(), folder / name) == FORMAT


@pytest.mark.some(1)
def test_its_version_is_loaded(store: tuple[Path, int]) -> None:
    folder, _ = store
    with expstore.open(folder / "run.exp", batch_size=8) as rb:
        rb.loads(folder / "run.exp", "tagged")
        check(rb[:], TAGGED - CAPACITY, TAGGED, late=False)
        rb.columns.add("more", sql="action + 1")
        assert (rb["more"] == rb["action"] + 1).all()
    assert verify(folder / "run.exp") == []
    with expstore.open(folder / "run.exp", version="tagged") as rb:
        check(rb[:], TAGGED - CAPACITY, TAGGED, late=False)


def test_its_idempotency_keys_are_known(store: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a day of the time at which they were written, which is long ago for a fixture."""
    folder, _ = store
    written = int(Manifest.load(Disk(), folder / "run.exp").created * 1e6)
    for module in (ingest, opening):
        monkeypatch.setattr(module, "now_us", lambda: written + 60_000_000)
    for name in ("run.exp", "killed.exp"):
        with expstore.open(folder / name) as rb:
            for start in range(TAGGED, ROWS - 5, 25):
                again = rb.extend(rows(0, 25), return_ids=True, **key_of(start))
                assert again.tolist() == list(range(start + 1, start + 26))
            for number in range(ROWS - 5, ROWS):
                assert rb.extend(rows(0, 1), return_ids=True, **key_of(number)).tolist() == [number + 1]
            assert rb.write_count == ROWS


@pytest.mark.guarantee("rows/formats")
def test_a_newer_format_is_refused(store: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path = store[0] / "run.exp"
    kept = Manifest.load(Disk(), path)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", FORMAT + 1)
        kept.save(Disk(), path)
    before = read_files(path)
    for mode in ("a", "r"):
        with pytest.raises(MigrationError, match=f"has format {FORMAT + 1}"):
            expstore.open(path, mode=mode)
    assert read_files(path) == before


def test_a_step_leads_an_older_format_to_the_next(
    store: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a release that raises `FORMAT` will do, tried with one that keeps a note more."""
    path, number = store[0] / "run.exp", store[1]
    monkeypatch.setattr(manifest, "FORMAT", FORMAT + 1)
    with pytest.raises(MigrationError, match=f"has format {FORMAT}, which this library cannot read"):
        Manifest.load(Disk(), path)
    monkeypatch.setitem(UPGRADES, FORMAT, lambda data: data | {"meta": {"note": "read by a step"}})
    assert Manifest.load(Disk(), path).meta == {"note": "read by a step"}
    with expstore.open(path, mode="r") as rb:
        assert len(rb) == CAPACITY
    assert format_of(Disk(), path) == number  # whoever only reads writes nothing
    expstore.open(path).close()
    assert format_of(Disk(), path) == FORMAT + 1
    assert Manifest.load(Disk(), path).meta == {"note": "read by a step"}
