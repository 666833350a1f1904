"""Fields without a fixed size: rows by id against a plain model, in every storage that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from expstore.episodes.table import Steps
from expstore.errors import SchemaError, SnapshotError
from expstore.schema.arrow_types import ragged_text, to_type, type_text
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages import base
from expstore.storages.arrow import ArrowStorage
from expstore.storages.base import Storage
from expstore.storages.memory import MemoryStorage
from expstore.storages.zarr import ZarrStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.case_selection import in_full, share

TYPES = {
    "text": type_text(pa.string()),
    "tokens": ragged_text("int32", (None,)),
    "points": ragged_text("float32", (None, 3)),
    "image": ragged_text("uint8", (None, None)),
    "blob": type_text(pa.binary()),
    "log": type_text(pa.list_(pa.struct([("who", pa.string()), ("n", pa.int64())]))),
    "score": type_text(pa.float64()),
}
SCHEMA = Schema(
    [
        Field(("x",), "float32", (3,)),
        *[Field((name,), ARROW, (), text) for name, text in TYPES.items()],
        Field(("next", "n"), "int64", ()),
    ]
)


def value_of(name: str, number: int) -> Any:
    """Return what a field of a row holds; it follows from the row's id and how often it was changed."""
    size = number * 7919 % 13
    if number % 5 == 3 and name in ("text", "log", "score"):
        return None
    return {
        "text": "é" * size + str(number),
        "tokens": list(range(number, number + size)),
        "points": [[float(number), float(i), 0.5] for i in range(size % 4)],
        "image": {"data": [number % 251] * (size * 2), "shape": [size, 2]},
        "blob": bytes([number % 256]) * size,
        "log": [{"who": "u" * i if i % 2 else None, "n": number} for i in range(size % 3)],
        "score": number / 3,
    }[name]


def columns_of(ids: np.ndarray, version: int = 0) -> list[Any]:
    numbers = ids * 1000 + version
    found: list[Any] = [np.ascontiguousarray((numbers[:, None] * np.array([1, 2, 4])).astype(np.float32))]
    for name, text in TYPES.items():
        found.append(pa.array([value_of(name, number) for number in numbers.tolist()], to_type(text)))
    return [*found, numbers.astype(np.int64)]


def put(storage: Storage, count: int) -> np.ndarray:
    with storage.lock:
        storage.check_writable()
        ids = np.arange(storage.last + 1, storage.last + 1 + count)
        RoundRobinWriter().write(storage, columns_of(ids), Steps(count), source=None, info="")
    return ids


def check(storage: Storage, ids: np.ndarray, version: int = 0) -> None:
    for found, expected in zip(storage.read(ids), columns_of(ids, version), strict=True):
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(found, expected)
        else:
            assert isinstance(found, pa.Array)
            found.validate(full=True)
            assert found.type.equals(expected.type)
            assert found.to_pylist() == expected.to_pylist()


def window_ids(storage: Storage) -> np.ndarray:
    return np.arange(storage.window.low + 1, storage.window.last + 1)


@pytest.fixture(params=["memory", "arrow", "narrow", "lz4", "zstd"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """A factory of storages of every kind."""
    made: list[Storage] = []

    def factory(capacity: int | None = None, **options: Any) -> Storage:
        storage: Storage
        if request.param == "memory":
            storage = MemoryStorage(capacity)
        else:
            compression = None if request.param == "arrow" else request.param
            storage = ArrowStorage(
                tmp_path / f"{len(made)}.exp", capacity, compression=compression, **options
            )
        storage.prepare(SCHEMA, find_keys(SCHEMA))
        made.append(storage)
        return storage

    yield factory
    for storage in made:
        storage.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("capacity", [None, 20])
@share(0.3, of=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=12), data=st.data())
def test_rows_come_back_as_they_were(
    make: Callable[..., Storage], capacity: int | None, counts: list[int], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "spare_slots", lambda capacity, row_bytes: 8)
        storage = make(capacity)
        for count in counts:
            put(storage, count)
            ids = window_ids(storage)
            assert ids.size == (storage.last if capacity is None else min(capacity, storage.last))
            check(storage, ids)
            drawn = np.array(data.draw(st.lists(st.sampled_from(ids.tolist()), max_size=10)), np.int64)
            check(storage, drawn)


test_rows_come_back_as_they_were_in_full = pytest.mark.torture(in_full(test_rows_come_back_as_they_were))


def test_columns_are_viewed_run_by_run(make: Callable[..., Storage], monkeypatch: Any) -> None:
    monkeypatch.setattr(base, "spare_slots", lambda capacity, row_bytes: 3)
    storage = make(10)
    for count in (7, 5, 2, 3):
        put(storage, count)
    ids = window_ids(storage)
    places = range(len(SCHEMA.fields))
    views = storage.views(places, int(ids[0]), ids.size)
    for place, expected in enumerate(columns_of(ids)):
        rows = [value for part in views[place] for value in part.tolist()]
        assert rows == expected.tolist()


def test_rows_in_ram_go_into_a_state_and_back() -> None:
    storage = MemoryStorage(10)
    storage.prepare(SCHEMA, find_keys(SCHEMA))
    put(storage, 4)
    put(storage, 5)
    state = storage.state_dict()
    other = MemoryStorage(10)
    other.load_state_dict(state)
    put(storage, 8)  # shares nothing with the state
    ids = np.arange(1, 10)
    check(other, ids)
    put(other, 3)
    check(other, window_ids(other))
    state["rows"]["text"] = state["rows"]["tokens"]
    with pytest.raises(SchemaError, match="'text'"):
        MemoryStorage(10).load_state_dict(state)
    state["rows"]["text"] = state["rows"]["tokens"][:-40].clone()
    with pytest.raises(SchemaError, match="'text'"):
        MemoryStorage(10).load_state_dict(state)


def test_a_storage_in_ram_forgets_rows_and_can_be_changed(make: Callable[..., Storage]) -> None:
    storage = MemoryStorage()
    storage.prepare(SCHEMA, find_keys(SCHEMA))
    ids = put(storage, 6)
    storage.change(ids[[1, 4]], range(len(SCHEMA.fields)), columns_of(ids[[1, 4]], 7))
    check(storage, ids[[1, 4]], 7)
    check(storage, ids[[0, 2, 3, 5]])
    storage.clear()
    check(storage, put(storage, 3))


def test_other_storages_refuse_such_fields_and_say_which_keeps_them(tmp_path: Path) -> None:
    storage = ZarrStorage(tmp_path / "a.exp", 10)
    with pytest.raises(SchemaError, match=r"'text' is string.*storage=\"arrow\""):
        storage.prepare(SCHEMA, find_keys(SCHEMA))
    assert storage.schema is None
    storage.close()


def test_rows_in_ram_have_no_versions(tmp_path: Path) -> None:
    storage = MemoryStorage(10)
    storage.prepare(SCHEMA, find_keys(SCHEMA))
    put(storage, 4)
    with pytest.raises(SnapshotError, match="'text'"):
        storage.dumps(tmp_path / "versions")
    assert not (tmp_path / "versions").exists()
