"""Variable-length rows for the suite: text, bytes, lists, tensors of any shape, structs, None."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray
from expstore.episodes.segmentation import Steps
from expstore.schema.arrow_types import ragged_text, to_type, type_text
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages.read_view import ReadView
from expstore.testing.assertions import same
from expstore.writers.writers import RoundRobinWriter

_TYPES = {
    "text": type_text(pa.string()),
    "tokens": ragged_text("int32", (None,)),
    "points": ragged_text("float32", (None, 3)),
    "image": ragged_text("uint8", (None, None)),
    "blob": type_text(pa.binary()),
    "log": type_text(pa.list_(pa.struct([("who", pa.string()), ("n", pa.int64())]))),
}
RAGGED_SCHEMA = Schema([
    Field(("n",), "int64", ()),
    *[Field((name,), ARROW, (), text) for name, text in _TYPES.items()],
])  # fmt: skip


def ragged_value(name: str, number: int) -> Any:
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


def ragged_columns(ids: IntArray, version: int = 0) -> list[Any]:
    """Return the columns of rows, in the order of `RAGGED_SCHEMA`."""
    numbers = ids * 1000 + version
    found: list[Any] = [numbers.astype(np.int64)]
    for name, text in _TYPES.items():
        found.append(pa.array([ragged_value(name, number) for number in numbers.tolist()], to_type(text)))
    return found


def put_ragged_rows(storage: ReadView, count: int) -> IntArray:
    """Append rows; return their ids."""
    with storage.locks.extend, storage.lock:
        writer = storage.writer()
        ids = np.arange(storage.last + 1, storage.last + 1 + count)
        columns = storage.require_schema().arrange(
            [entry.key for entry in RAGGED_SCHEMA.fields],
            ["int64", *[f"{ARROW}:{text}" for text in _TYPES.values()]],
            ragged_columns(ids),
        )
        RoundRobinWriter().write(writer, columns, Steps(count), source=None, info="")
    return ids


def check_ragged_rows(storage: ReadView, ids: IntArray, version: int = 0) -> None:
    """Raise AssertionError unless rows are those that were written."""
    found: list[Array] = storage.read(ids)
    for entry, column, expected in zip(
        RAGGED_SCHEMA.fields, found, ragged_columns(ids, version), strict=True
    ):
        if isinstance(expected, np.ndarray):
            same(column, expected, "fixed-size fields in the same rows")
            continue
        if not isinstance(column, pa.Array):
            raise AssertionError(f"{entry.key} is a {type(column).__name__}, expected a pyarrow Array")
        column.validate(full=True)
        same(str(column.type), str(expected.type), f"the type of {entry.key}")
        same(column.to_pylist(), expected.to_pylist(), f"rows of {entry.key}")
