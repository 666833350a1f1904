"""Variable-length columns whose values follow from row ids, for tests of storages that support them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from expstore.episodes.segmentation import Steps
from expstore.schema.arrow_types import ragged_text, to_type, type_text
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages.base import Storage
from expstore.writers.writers import RoundRobinWriter

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
    """Return the value of a field; the number encodes the row and how often it was changed."""
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
        storage.writer()
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
