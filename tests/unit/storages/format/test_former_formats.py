"""Stores that former versions of the library have made: opened, read, extended, verified, for ever.

They lie in fixtures/formats; the README there says how one is added when the format moves.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.rng import Draws
from expstore.disk.files import Disk
from expstore.maintenance import verify
from expstore.maintenance.upgrade import upgrade
from expstore.storages.format.manifest import FORMAT, Manifest
from tests.fixtures.make_format import CAPACITY, ROWS, TAGGED, rows
from tests.support.paths import ROOT

pytestmark = pytest.mark.index

FIXTURES = ROOT / "tests" / "fixtures"

#: File -> format, whether fields came later, and how many rows it keeps.
STORES = {
    "1-first": (1, False, CAPACITY),
    "1-packed": (1, False, CAPACITY),
    "2-late": (2, True, CAPACITY),
    "3-arrow": (3, False, CAPACITY),
    "3-zstd": (3, False, CAPACITY),
    "4-retain": (4, False, ROWS + 60),
    "5-narrow": (5, False, CAPACITY),
    "6-keyed": (6, False, CAPACITY),
    "7-archive": (7, False, CAPACITY),
    "8-flags": (8, False, CAPACITY),
}
LATE = {"late", ("next", "value")}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int, bool, int]:
    """The folder of a fixture, its format, whether fields came later, and how many rows it keeps."""
    with tarfile.open(FIXTURES / "formats" / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path, *STORES[request.param]


def check(batch: TensorDict, first: int, last: int, *, late: bool) -> None:
    """Hold rows, in the order of their ids, against what they were made of."""
    wide = "pixels" in batch.keys()  # noqa: SIM118 - no dict
    batch = batch[torch.argsort(batch["action"])]
    has = {"texts": "text" in batch.keys(), "tokens": "tokens" in batch.keys()}  # noqa: SIM118
    has["flags"] = ("next", "done") in batch.keys(True, True)
    wanted = rows(first, last - first, wide=wide, **has)
    for name in {"text", "tokens"} & set(wanted.keys()):
        assert list(batch[name]) == list(wanted[name])
    for key in wanted.keys(include_nested=True, leaves_only=True):
        assert (batch[key] == wanted[key]).all(), key
    assert (set(batch.keys(True, True)) - set(wanted.keys(True, True))) == (LATE if late else set())
    if late:
        numbers = torch.arange(first, last)
        assert (batch["late"] == 2.5).all()
        assert (batch["next", "value"] == torch.where(numbers < TAGGED, 2 * (numbers + 1), -1)).all()


def test_there_is_one_of_every_format() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in (FIXTURES / "formats").iterdir()} == STORES.keys()
    assert {number for number, *_ in STORES.values()} == set(range(1, FORMAT + 1))
    sizes = [path.stat().st_size for path in (FIXTURES / "formats").iterdir()]
    assert sum(sizes) < 30_000 * len(sizes)


def test_it_is_read(store: tuple[Path, int, bool, int]) -> None:
    folder, number, late, kept = store
    for name in ("run.exp", "killed.exp"):
        assert Manifest.load(Disk(), folder / name).format == number
        with expstore.open(folder / name, mode="r") as rb:
            check(rb[:], max(0, ROWS - kept), ROWS, late=late)
    assert verify(folder / "run.exp") == []
    assert upgrade(folder / "run.exp", dry_run=True).format_found == number


@pytest.mark.some(1)
def test_it_goes_on(store: tuple[Path, int, bool, int]) -> None:
    folder, number, late, kept = store
    for name in ("run.exp", "killed.exp"):
        moved = folder / "killed-archive.exp" if number == 7 and name == "killed.exp" else None
        with expstore.open(folder / name, batch_size=8, archive=moved) as rb:
            check(rb[:], max(0, ROWS - kept), ROWS, late=late)
            assert (rb.recovered is None) == (name == "run.exp")
            if name == "run.exp":
                drawn = Draws(5).generator(1).integers(max(0, ROWS - kept) + 1, ROWS + 1, 8)
                assert np.array_equal(rb.sample()["id"].numpy(), drawn)
            answer = rb.sql("SELECT count(*), sum(length) FROM episodes").fetchall()
            assert answer == [(-(-ROWS // 25), ROWS)]
            had = rb.sample().keys(True, True)
            has = {"wide": "pixels" in had, "texts": "text" in had, "tokens": "tokens" in had}
            has["flags"] = ("next", "done") in had
            rb.extend(rows(ROWS, 60, **has), source="arm")
            check(rb[:], ROWS + 60 - kept, ROWS + 60, late=late)
            if number == 7:
                answer = rb.sql("SELECT _id, action FROM history ORDER BY 1").fetchall()
                assert answer == [(i + 1, i * 1_000_003) for i in range(ROWS + 60)]
        assert verify(folder / name) == []
        assert Manifest.load(Disk(), folder / name).format == number  # nothing that older ones would miss


@pytest.mark.some(1)
def test_its_version_is_loaded(store: tuple[Path, int, bool, int]) -> None:
    folder, number, _, kept = store
    with expstore.open(folder / "run.exp", batch_size=8) as rb:
        rb.loads(folder / "run.exp", "tagged")
        check(rb[:], max(0, TAGGED - kept), TAGGED, late=False)
        if number != 7:  # rows that have gone to an archive would lack it
            rb.add_column("more", sql="action + 1")
            assert (rb["more"] == rb["action"] + 1).all()
    assert verify(folder / "run.exp") == []
    assert Manifest.load(Disk(), folder / "run.exp").format == max(2, number)
    with expstore.open(folder / "run.exp", version="tagged") as rb:
        check(rb[:], max(0, TAGGED - kept), TAGGED, late=False)


def test_idempotency_keys_are_known(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "formats" / "6-keyed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for name in ("run.exp", "killed.exp"):
        with expstore.open(tmp_path / name) as rb:
            for start in range(TAGGED, ROWS - 5, 25):
                digest = bytes([start % 256] * 16)
                again = rb.extend(
                    rows(0, 25), return_ids=True, idempotency_key=f"write {start}", digest=digest
                )
                assert again.tolist() == list(range(start + 1, start + 26))
            for number in range(ROWS - 5, ROWS):
                assert rb.add(rows(0, 1)[0], idempotency_key=f"write {number}") == number % CAPACITY
            assert rb.write_count == ROWS
