"""Fields of dtype "object": any Python object, in RAM; shown to SQL as text; never on disk."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.episodes.segmentation import Steps
from expstore.errors import SchemaError, SnapshotError
from expstore.samplers.random import RandomSampler
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.stores import prepare

SCHEMA = Schema([Field(("_data",), "object", ()), Field(("n",), "int64", ())])


class Thing:
    """JSON has no form for it, and it can be referred to weakly."""


def column(values: list[Any]) -> np.ndarray:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def make(capacity: int | None = None, schema: Schema = SCHEMA) -> MemoryStorage:
    storage = prepare(MemoryStorage(capacity, seed=0), schema)
    return storage


def put(storage: MemoryStorage, values: list[Any]) -> None:
    n = np.arange(storage.last, storage.last + len(values))
    columns = storage.require_schema().arrange([("_data",), ("n",)], ["object", "int64"], [column(values), n])
    RoundRobinWriter().write(storage, columns, Steps(len(values)), source=None, info="")


def test_objects_come_back_themselves(tmp_path: Path) -> None:
    storage = make(4)
    things = [Thing(), "text", None, [1, 2], np.arange(3), {"a": 1}]
    put(storage, things[:3])
    put(storage, things[3:])
    found = storage.read(np.arange(3, 7))[0]
    assert found.dtype == object
    assert [a is b for a, b in zip(found, things[2:], strict=True)] == [True] * 4
    storage.change(np.array([5]), [0], [column([things[0]])])
    assert storage.read(np.array([5]))[0][0] is things[0]


def test_objects_beyond_the_room_of_an_unbounded_storage() -> None:
    storage = make()
    for start in range(0, 10_000, 2500):
        put(storage, list(range(start, start + 2500)))
    assert storage.read(np.arange(1, 10_001))[0].tolist() == list(range(10_000))


def test_objects_of_rows_that_have_left_go() -> None:
    storage, things = make(8), [Thing() for _ in range(8)]
    known = weakref.WeakSet(things)
    put(storage, things)
    del things
    put(storage, [None] * 9)  # capacity and spare are 9
    gc.collect()
    assert len(known) == 0

    storage = make()
    put(storage, [(thing := Thing()), 1])
    known.add(thing)
    del thing
    ids = np.array([1])
    assert storage.intact(ids)
    storage.clear()
    gc.collect()
    assert len(known) == 0
    assert not storage.intact(ids)  # whoever has read it now draws again
    put(storage, [2])
    assert storage.read(np.array([3]))[0].tolist() == [2]


def test_sql_shows_text_and_json() -> None:
    circle: list[Any] = []
    lone = "\ud800"  # half of a pair: no UTF-8
    circle.append(circle)
    visible = [
        ("text", "text"), ("", ""), ({"a": [1, None]}, '{"a": [1, null]}'), ([True, 2.5], "[true, 2.5]"),
        (3, "3"), (None, None), (Thing(), None), (b"bytes", None), (math.nan, None), (circle, None),
        (lone, None),
    ]  # fmt: skip
    storage = make(20)
    put(storage, [value for value, _ in visible])
    rb = ReplayBuffer(storage=storage)
    assert rb.sql('SELECT _data FROM transitions ORDER BY "_id"').fetchall() == [
        (text,) for _, text in visible
    ]
    assert rb.sql("SELECT count(*) FROM transitions WHERE _data LIKE '{%'").fetchall() == [(1,)]
    assert rb.sql("SELECT _data ->> 'a' FROM transitions WHERE n = 2").fetchall() == [("[1,null]",)]
    kinds = dict(rb.sql("SELECT column_name, column_type FROM (DESCRIBE transitions)").fetchall())
    assert kinds["_data"] == "VARCHAR"


def test_queries_that_do_not_name_objects_do_not_convert_them_to_text() -> None:
    class Told(dict[str, int]):
        asked = 0

        def items(self) -> Any:
            Told.asked += 1
            return super().items()

    storage = make(4)
    put(storage, [Told(a=1)])
    rb = ReplayBuffer(storage=storage)
    assert rb.sql("SELECT sum(n) FROM transitions").fetchall() == [(0,)]
    assert Told.asked == 0
    assert rb.sql("SELECT _data FROM transitions").fetchall() == [('{"a": 1}',)]
    assert Told.asked > 0


def test_filters_speak_of_text() -> None:
    storage = make(20)
    put(storage, ["yes", "no", 5, "yes"])
    rb = ReplayBuffer(storage=storage, sampler=RandomSampler(where="_data = 'yes' AND n > 0"), batch_size=4)
    assert rb.sampler.sample(storage, 4, np.random.default_rng(0)).ids.tolist() == [4] * 4


def test_objects_say_nothing_of_episodes() -> None:
    schema = Schema([Field(("done",), "object", ()), Field(("next", "reward"), "object", ())])
    assert find_keys(schema) == find_keys(Schema([Field(("x",), "int64", ())]))
    with pytest.raises(SchemaError, match=r"'next\.reward'"):
        find_keys(schema, ends=[("next", "reward")])


def test_no_file_keeps_objects(tmp_path: Path) -> None:
    storage = make(4)
    put(storage, ["a"])
    with pytest.raises(SnapshotError, match=r"'_data' has objects"):
        ReplayBuffer(storage=storage).dumps(tmp_path / "versions")
    assert not (tmp_path / "versions").exists()
    with ReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp", 4)) as rb:
        with pytest.raises(SchemaError, match=r"'_data' has objects.*ListStorage"):
            rb.storage.prepare(SCHEMA, find_keys(SCHEMA))
        assert rb.schema is None
    with pytest.raises(SchemaError, match="has objects"):
        ZarrStorage(tmp_path / "other.exp", 4, settings=Settings(schema=SCHEMA))
    assert not (tmp_path / "other.exp").exists()
