"""expstore.json: it is read as written, and damage or a newer format is refused."""

from __future__ import annotations

import base64
import dataclasses
import json
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from expstore.core.id_set import IdSet
from expstore.core.values import Ranking
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, MigrationError, NotFoundError, StorageError
from expstore.schema.schema import Field, Schema
from expstore.storages.format import manifest
from expstore.storages.format.lineage import Lineage, Step
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
    group_key=("prompt",),
    group_size=8,
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
    window=500,
    lineage=Lineage((Step("collect", 3, 1, None, "c" * 32, "session", {"program": "größer.py"}),)),
)
BARE = Manifest(uuid="a" * 32, generation=0, storage="zarr", capacity=None, spare=0, seed=0, created=0.0)


@pytest.mark.parametrize("kept", [FULL, BARE])
def test_a_saved_manifest_is_loaded(tmp_path: Path, kept: Manifest) -> None:
    kept.save(Disk(), tmp_path)
    found = Manifest.load(Disk(), tmp_path)
    assert found == kept
    if kept.schema:
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


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"{tmp_path} is not a store: it has no expstore.json"):
        Manifest.load(Disk(), tmp_path)


def test_newer_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 9)
        FULL.save(Disk(), tmp_path)
    with pytest.raises(MigrationError, match="has format 9, but .* formats up to 1.*newer expstore"):
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


def test_invalid_manifests_are_refused(tmp_path: Path) -> None:
    facts = [b"{}", b'{"format": 1}', b'{"format": "x", "crc32c": ""}']
    for text in (b"", b"{", b"[]", b"3", *facts, b"\xff", b"[" * 100_000):
        (tmp_path / MANIFEST).write_bytes(text)
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


def _forge(folder: Path, **values: object) -> None:
    """Write a manifest with other values, whose checksum matches."""
    data = json.loads(FULL.pack())
    del data["crc32c"]
    data |= values
    data["crc32c"] = manifest._checksum(data)
    (folder / MANIFEST).write_text(json.dumps(data))


def _pack(distances: list[int]) -> str:
    return base64.b64encode(zlib.compress(np.array(distances, "<i8").tobytes())).decode()


FORGED: list[tuple[str, object]] = [
    *(
        (name, value)
        for name in manifest._CHECKS
        if name not in ("meta", "specs")
        for value in ([[1]], 1.5e308, {"a": None})
    ),
    *((name, 1 << 70) for name in ("generation", "capacity", "spare", "reach", "column_set", "ndim")),
    *((name, -1) for name in ("generation", "capacity", "spare", "reach", "column_set", "ndim")),
    ("uuid", "x"),
    ("storage", "other"),
    ("dims", [0]),
    ("dims", [1 << 40, 1 << 40]),
    ("meta", []),
    ("layout", {"fields": {"a": 5}}),
    ("layout", {"layout": "packed", "more": 1}),
    ("schema", {"fields": [{"key": "a", "dtype": "int8", "shape": [1 << 62, 8]}], "form": ""}),
    ("schema", {"fields": [{"key": "a", "dtype": "int8", "shape": []}], "form": "[]"}),
    ("schema", [{"key": "a", "dtype": "arrow", "shape": [], "arrow": '{"list":' * 2000}]),
    *(
        ("gaps", runs)
        for runs in (
            5, "AAAA", "?", [[1]], [[1, 2, 3]], [["a", "b"]], [[0, 4]], [[5, 3]], [[1, 5], [4, 8]],
            [[1, 1 << 62]],
            _pack([1]), _pack([0, 0]), _pack([2, -1]), _pack([1, 2, 0, 4]), _pack([1 << 60, 1 << 60]),
        )
    ),
]  # fmt: skip


@pytest.mark.guarantee("exchange/bounded")
def test_forged_values(tmp_path: Path) -> None:
    for name, value in FORGED:
        _forge(tmp_path, **{name: value})
        with pytest.raises(CorruptionError, match=MANIFEST):
            Manifest.load(Disk(), tmp_path)


def test_deleted_rows_are_not_a_bomb(tmp_path: Path) -> None:
    """Neither zeros nor runs that ascend make more than 4 million runs out of a short text."""
    for piece in (bytes(16), np.array([2, 0], "<i8").tobytes()):
        packer, text = zlib.compressobj(1), b""
        for _ in range(256):
            text += packer.compress(piece * (1 << 16))
        _forge(tmp_path, **{"gaps": base64.b64encode(text + packer.flush()).decode()})
        tracemalloc.start()
        with pytest.raises(CorruptionError, match="deleted rows"):
            Manifest.load(Disk(), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200 << 20


def test_a_manifest_with_too_many_runs_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MOST_RUNS", 100)
    runs = IdSet.of([(n, n) for n in range(1, 401, 4)])
    assert Manifest.unpack(FULL.replace(deleted=runs).pack(), "x").deleted == runs
    with pytest.raises(StorageError, match="101 separate runs"):
        FULL.replace(deleted=runs.join(IdSet.of([(900, 900)]))).pack()
