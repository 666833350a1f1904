"""Conversations whose rows continue earlier rows, for tests of continued fields."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import expstore
from expstore.specs import Continued
from expstore.storages.read_view import ReadView

TYPES = {
    "tokens": pa.int32(),
    "logprobs": pa.float32(),
    "mask": pa.bool_(),
    "messages": pa.string(),
    "raw": pa.binary(),
}
SCHEMA = {
    "talk": "int64",
    "parent": "int64",
    "tokens": Continued("int32", parent="parent"),
    "logprobs": Continued("float32"),
    "mask": Continued("bool"),
    "messages": Continued(str, parent="parent"),
    "raw": Continued(bytes),
    "next": {"done": "bool"},
}
Row = dict[str, Any]


def open_talks(path: Path, compression: str | None = None, **more: Any) -> Any:
    """Open a store of conversations."""
    layout = expstore.Layout(kind="arrow", compression=compression)
    return expstore.open(path, layout=layout, schema=SCHEMA, episodes={"traj": "talk"}, **more)


class Talks:
    """Make rows that begin with whole earlier rows of their conversation, with parts of them, or anew.

    Args:
        seed: Seed of all choices.
        talks: How many conversations go on at a time.
    """

    def __init__(self, seed: int, talks: int = 6) -> None:
        self._chance = np.random.default_rng(seed)
        self._open: dict[int, list[Row]] = {}
        self._talks, self._number = talks, 0
        #: All rows so far; the id of a row is its position + 1.
        self.rows: list[Row] = []

    def batch(self, most: int = 8) -> pa.Table:
        """Return the next rows; another batch of them follows in the ids."""
        chance = self._chance
        first = len(self.rows)
        for _ in range(chance.integers(1, most + 1)):
            place = int(chance.integers(self._talks))
            talk = self._open.setdefault(place, [])
            if not talk:
                self._number += 1
            parent = int(chance.integers(len(self.rows) + 1)) if chance.random() < 0.3 else 0
            former = [*talk, *([self.rows[parent - 1]] if parent else [])]
            row = {name: self._value(name, [one[name] for one in former]) for name in TYPES}
            row |= {"talk": talk[0]["talk"] if talk else self._number, "parent": parent}
            row["done"] = bool(chance.random() < 0.05)
            talk.append(row)
            if row["done"]:
                del self._open[place]
            self.rows.append(row)
        return table_of(self.rows[first:])

    def _value(self, name: str, former: list[list[Any]]) -> list[Any]:
        chance, value = self._chance, []
        if former and chance.random() < 0.85:
            value = former[chance.integers(max(0, len(former) - 5), len(former))]
            if chance.random() < 0.3:
                value = value[: chance.integers(len(value) + 1)]
        return [*value, *(self._element(name) for _ in range(chance.integers(0, 40)))]

    def _element(self, name: str) -> Any:
        chance = self._chance
        if name == "messages":
            return "é" * int(chance.integers(9)) + str(chance.integers(99))
        if name == "raw":
            return chance.bytes(int(chance.integers(30)))
        if name == "mask":
            return bool(chance.integers(2))
        if name == "tokens":
            return int(chance.integers(50_000))
        return float(chance.choice(np.array([0.0, -0.0, math.nan, chance.normal()], np.float32)))


def table_of(rows: list[Row]) -> pa.Table:
    """Return rows as `extend` takes them."""
    columns = {name: pa.array([row[name] for row in rows], pa.list_(kind)) for name, kind in TYPES.items()}
    columns |= {name: pa.array([row[name] for row in rows], pa.int64()) for name in ("talk", "parent")}
    return pa.table(columns | {"next.done": [row["done"] for row in rows]})


def check_rows(storage: ReadView, rows: list[Row], ids: np.ndarray | None = None) -> int:
    """Compare stored rows with what was written, bit by bit; return how many there are.

    Args:
        storage: The storage.
        rows: What was written.
        ids: The number of each stored row in `rows`, from 1 on; None: its id.
    """
    stored = storage.stored.nth(np.arange(storage.stored.rows))
    numbers = stored if ids is None else ids
    assert stored.size == numbers.size
    schema = storage.require_schema()
    places = [schema.place((name,)) for name in TYPES]
    for at in range(0, stored.size, 200):
        found = storage.read(stored[at : at + 200], places)
        for (name, kind), column in zip(TYPES.items(), found, strict=True):
            wanted = pa.array([rows[n - 1][name] for n in numbers[at : at + 200].tolist()], pa.list_(kind))
            column.validate(full=True)
            assert same_bits(column, wanted), name
    return stored.size


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two columns of lists have the same values; floats are compared by their bits."""
    if one.type != other.type or one.value_lengths().to_pylist() != other.value_lengths().to_pylist():
        return False
    one, other = one.flatten(), other.flatten()
    if pa.types.is_floating(one.type):
        return bool(one.to_numpy().tobytes() == other.to_numpy().tobytes())
    return bool(one.equals(other))


def segment_bytes(path: Path) -> int:
    """Return the size of the segments of a store, bytes."""
    return sum(one.stat().st_size for one in (path / "segments").iterdir())
