"""expstore.json: it is read as written, and damage or a newer format is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from expstore.core.id_set import IdSet
from expstore.core.values import Ranking
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, MigrationError, NotFoundError
from expstore.schema.schema import Field, Schema
from expstore.storages.format import manifest
from expstore.storages.format.manifest import MANIFEST, Manifest

FULL = Manifest(
    uuid="0123456789abcdef" * 2,
    generation=5,
    storage="zarr",
    capacity=1000,
    spare=125,
    reach=64,
    seed=2**64 - 1,
    created=1.7e9 + 1 / 3,
    schema=Schema([Field(("next", "a"), "bfloat16", (3, 4)), Field(("b",), "bool", ())]),
    traj_key=("collector", "traj_ids"),
    done_keys=(("next", "terminated"), ("stop",)),
    reward_key=("r",),
    reward_reduce="mean",
    done_reduce="all",
    flatten=False,
    meta={"env": "Größe", "n": [1, 2.5, None]},
    deleted=IdSet.of([(3, 5), (9, 9)]),
    ndim=3,
    dims=(2, 5),
    ranking=Ranking(("next", "r"), "max"),
    specs='{"spec":{"kind":"Composite","specs":{"b":null}},"version":1}',
    layout={"layout": "packed", "fields": {"a": {"layout": "flat"}}},
    column_set=3,
    compression="zstd",
    retain={"bytes": 10},
    keyed=True,
    archive="../old.exp",
)
BARE = Manifest(uuid="a" * 32, generation=0, storage="zarr", capacity=None, spare=0, seed=0, created=0.0)


@pytest.mark.parametrize("kept", [FULL, BARE])
def test_what_is_saved_is_loaded(tmp_path: Path, kept: Manifest) -> None:
    kept.save(Disk(), tmp_path)
    found = Manifest.load(Disk(), tmp_path)
    assert found == kept
    if kept.schema:
        assert found.schema is not None
        assert found.schema.keys == kept.schema.keys
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_no_field_was_forgotten() -> None:
    assert all(
        getattr(FULL, f.name) != getattr(BARE, f.name)
        for f in dataclasses.fields(Manifest)
        if f.name != "storage"
    )


def test_slots_and_replace() -> None:
    assert FULL.slots == 1000 + 125 + 64
    assert BARE.slots is None
    assert FULL.replace(generation=6).generation == 6
    assert FULL.replace(generation=6).seed == FULL.seed


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"{tmp_path} is not a store: it has no expstore.json"):
        Manifest.load(Disk(), tmp_path)


def test_newer_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 9)
        FULL.save(Disk(), tmp_path)
    with pytest.raises(
        MigrationError, match="has format 9, but this library reads formats up to 1.*newer expstore"
    ):
        Manifest.load(Disk(), tmp_path)


def test_a_format_that_no_step_leads_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 0)
        FULL.save(Disk(), tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text())["format"] == 0
    with pytest.raises(MigrationError, match="has format 0, which this library cannot read.*export its rows"):
        Manifest.load(Disk(), tmp_path)


def test_one_that_lacks_a_key_is_damaged(tmp_path: Path) -> None:
    data = json.loads(FULL.pack())
    del data["crc32c"], data["gaps"]
    data["crc32c"] = manifest._checksum(data)
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(CorruptionError, match="is damaged: .*gaps"):
        Manifest.load(Disk(), tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"format": 1}', '{"format": "x", "crc32c": ""}', "\xff"]
)
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptionError, match=rf"{MANIFEST} is damaged"):
        Manifest.load(Disk(), tmp_path)


def test_any_changed_value_is_found(tmp_path: Path) -> None:
    FULL.save(Disk(), tmp_path)
    good = json.loads((tmp_path / MANIFEST).read_text())
    for name, value in {"capacity": 1001, "seed": 3, "schema": None, "uuid": "b" * 32, "meta": {}}.items():
        (tmp_path / MANIFEST).write_text(json.dumps(good | {name: value}))
        with pytest.raises(CorruptionError, match="checksum"):
            Manifest.load(Disk(), tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(good, indent=7, sort_keys=True))  # the same, said otherwise
    assert Manifest.load(Disk(), tmp_path) == FULL
