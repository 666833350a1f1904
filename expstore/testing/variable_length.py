"""Variable-length rows: text, bytes, lists, tensors of any shape, structs, None; or an error.

Part of the suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.core.values import Array, IntArray
from expstore.episodes.segmentation import Steps
from expstore.errors import SchemaError, SnapshotError, StateError
from expstore.schema.arrow_types import ragged_text, to_type, type_text
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages.read_view import ReadView
from expstore.testing.assertions import raises, same
from expstore.testing.declaration import Declared
from expstore.writers.writers import RoundRobinWriter

_TYPES = {
    "text": type_text(pa.string()),
    "tokens": ragged_text("int32", (None,)),
    "points": ragged_text("float32", (None, 3)),
    "image": ragged_text("uint8", (None, None)),
    "blob": type_text(pa.binary()),
    "log": type_text(pa.list_(pa.struct([("who", pa.string()), ("n", pa.int64())]))),
}
_SCHEMA = Schema([
    Field(("n",), "int64", ()),
    *[Field((name,), ARROW, (), text) for name, text in _TYPES.items()],
])  # fmt: skip


class AnyLengthSuite(Declared):
    """Test variable-length rows of a storage."""

    def test_rows_of_any_length(self, tmp_path: Path) -> None:
        """Rows are read as they were written, in every phase of a ring and unbounded, by any ids."""
        if not self.variable:
            storage = self._bare(tmp_path / "refused")
            with raises(SchemaError, what="a variable-length field", says="'text'"):
                storage.writer().prepare(_SCHEMA, find_keys(_SCHEMA))
            same(storage.schema, None, "the schema after a refused one")
            storage.close()
            return
        for capacity in (20, None):
            with self._open(tmp_path / f"{capacity}", capacity) as storage:
                for count in (1, 4, 20, 7, 30, 2, 1):
                    _put(storage, count)
                    _check(storage, storage.window.ids())
                _put(
                    storage, (-storage.last % storage.geometry.slots if storage.geometry.slots else 5000) + 3
                )
                _put(storage, 9)
                ids = storage.window.ids()
                _check(storage, ids[-20:])
                _check(storage, ids[[-1, -3, -3, 0]])
                _check(storage, ids[:0])
                storage.writer().clear()
                _put(storage, 5)
                _check(storage, storage.window.ids())

    def test_changes_of_any_length(self, tmp_path: Path) -> None:
        """Replacing rows by longer or shorter ones works, or raises an error if unsupported."""
        if not self.variable:
            return  # `test_rows_of_any_length` checks that such rows are refused
        with self._open(tmp_path / "s", 20) as storage:
            ids = _put(storage, 25)[-20:]
            places, chosen = range(len(_SCHEMA.fields)), ids[[2, 7, 19]]
            if not self.variable_patches:
                with raises(SchemaError, StateError, what="a change of variable-length rows"):
                    storage.writer().change(chosen, places, _columns(chosen, 7))
                _check(storage, ids)
                return
            storage.writer().change(chosen, places, _columns(chosen, 7))
            _check(storage, chosen, 7)
            _check(storage, np.setdiff1d(ids, chosen))

    def test_sql_over_rows_of_any_length(self, tmp_path: Path) -> None:
        """SQL reads text, and lists have a length."""
        if not self.variable:
            return
        with self._open(tmp_path / "s", 20) as storage:
            ids = _put(storage, 23)[-20:]
            rb = ReplayBuffer(storage=storage, batch_size=2)
            found = rb.sql("SELECT _id, text, len(tokens) FROM transitions ORDER BY _id").fetchall()
            expected = [
                (id, _value("text", id * 1000), len(_value("tokens", id * 1000))) for id in ids.tolist()
            ]
            same(found, expected, "variable-length rows in SQL")

    def test_rows_of_any_length_outlive_handles(self, tmp_path: Path) -> None:
        """Rows survive reopening, and are in followers and snapshots, as far as the storage has these."""
        if not self.variable:
            return
        path = tmp_path / "s"
        with self._open(path, 20) as storage:
            for count in (3, 30, 1):
                _put(storage, count)
            ids = storage.window.ids()
            if self.follows:
                storage.writer().sync()
                reader = self.follow(storage)
                _check(reader, ids)
                reader.close()
            self._version(storage, tmp_path)
        if self.persistent:
            same(list(self.verify(storage)), [], "what verify finds")
            with self._open(path, 20) as storage:
                _check(storage, ids)
                _put(storage, 4)
                _check(storage, storage.window.ids())

    def _version(self, storage: ReadView, tmp_path: Path) -> None:
        """Make a snapshot and load it; if snapshots are refused, check that the rows are unchanged."""
        rb, ids = ReplayBuffer(storage=storage), storage.window.ids()
        try:
            rb.dumps(tmp_path / "versions")
        except SnapshotError as exc:
            same("has no fixed size" in str(exc) or "text" in str(exc), True, f"the reason in {exc}")
            _check(storage, ids)
            return
        with self._open(tmp_path / "other", 20) as other:
            ReplayBuffer(storage=other).loads(tmp_path / "versions")
            found = other.window.ids()
            expected = _columns(ids)
            for column, given in zip(other.read(found), expected, strict=True):
                same(column.tolist(), given.tolist(), "variable-length rows from a snapshot")

    def _bare(self, path: Path, capacity: int | None = 20) -> ReadView:
        return self.make(path, capacity, ndim=1, seed=2)

    @contextmanager
    def _open(self, path: Path, capacity: int | None) -> Iterator[ReadView]:
        storage = self._bare(path, capacity)
        try:
            if storage.schema is None:
                storage.writer().prepare(_SCHEMA, find_keys(_SCHEMA))
            yield storage
        finally:
            storage.close()


def _value(name: str, number: int) -> Any:
    """Return the value of a field; it follows from `number`, that is from the row's id and version."""
    size = number * 7919 % 13
    if number % 5 == 3 and name in ("text", "log"):
        return None
    return {
        "text": "é" * size + str(number),
        "tokens": list(range(number, number + size)),
        "points": [[float(number), float(i), 0.5] for i in range(size % 4)],
        "image": {"data": [number % 251] * (size * 2), "shape": [size, 2]},
        "blob": bytes([number % 256]) * size,
        "log": [{"who": "u" * i if i % 2 else None, "n": number} for i in range(size % 3)],
    }[name]


def _columns(ids: IntArray, version: int = 0) -> list[Any]:
    numbers = ids * 1000 + version
    found: list[Any] = [numbers.astype(np.int64)]
    for name, text in _TYPES.items():
        found.append(pa.array([_value(name, number) for number in numbers.tolist()], to_type(text)))
    return found


def _put(storage: ReadView, count: int) -> IntArray:
    with storage.locks.extend, storage.lock:
        writer = storage.writer()
        ids = np.arange(storage.last + 1, storage.last + 1 + count)
        columns = storage.require_schema().arrange(
            [entry.key for entry in _SCHEMA.fields],
            ["int64", *[f"{ARROW}:{text}" for text in _TYPES.values()]],
            _columns(ids),
        )
        RoundRobinWriter().write(writer, columns, Steps(count), source=None, info="")
    return ids


def _check(storage: ReadView, ids: IntArray, version: int = 0) -> None:
    found: list[Array] = storage.read(ids)
    for entry, column, expected in zip(_SCHEMA.fields, found, _columns(ids, version), strict=True):
        if isinstance(expected, np.ndarray):
            same(column, expected, "fixed-size fields in the same rows")
            continue
        if not isinstance(column, pa.Array):
            raise AssertionError(f"{entry.key} is a {type(column).__name__}, expected a pyarrow Array")
        column.validate(full=True)
        same(str(column.type), str(expected.type), f"the type of {entry.key}")
        same(column.to_pylist(), expected.to_pylist(), f"rows of {entry.key}")
