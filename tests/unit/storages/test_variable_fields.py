"""Variable-length fields: rows by id compared with a plain model, in every storage that supports them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from expstore.errors import SchemaError
from expstore.schema.field_roles import find_keys
from expstore.storages.base import Storage
from expstore.storages.factory import ArrowStorage, ZarrStorage
from expstore.storages.memory import MemoryStorage
from tests.support.batches import closing_factory
from tests.support.case_selection import in_full, share
from tests.support.stores import prepare, window_ids
from tests.support.tuned import set_spare_slots
from tests.support.variable_fields import SCHEMA, check, put


@pytest.fixture(params=["memory", "arrow", "lz4", "zstd"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """A factory of storages of every kind."""
    names = itertools.count()

    def create(capacity: int | None = None, **options: Any) -> Storage:
        if request.param == "memory":
            return prepare(MemoryStorage(capacity), SCHEMA)
        compression = None if request.param == "arrow" else request.param
        path = tmp_path / f"{next(names)}.exp"
        return prepare(ArrowStorage(path, capacity, compression=compression, **options), SCHEMA)

    with closing_factory(create) as factory:
        yield factory


@pytest.mark.some(1)
@pytest.mark.parametrize("capacity", [None, 20])
@share(0.3, of=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=12), data=st.data())
def test_rows_come_back_as_they_were(
    make: Callable[..., Storage], capacity: int | None, counts: list[int], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_spare_slots(patch, 8)
        storage = make(capacity)
        for count in counts:
            put(storage, count)
            ids = window_ids(storage)
            assert ids.size == (storage.last if capacity is None else min(capacity, storage.last))
            check(storage, ids)
            drawn = np.array(data.draw(st.lists(st.sampled_from(ids.tolist()), max_size=10)), np.int64)
            check(storage, drawn)


test_rows_come_back_as_they_were_in_full = pytest.mark.torture(in_full(test_rows_come_back_as_they_were))


def test_rows_in_ram_go_into_a_state_and_back() -> None:
    storage = prepare(MemoryStorage(10), SCHEMA)
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


def test_other_storages_refuse_such_fields_and_say_which_keeps_them(tmp_path: Path) -> None:
    storage = ZarrStorage(tmp_path / "a.exp", 10)
    with pytest.raises(SchemaError, match=r"'text' is string.*layout=\"arrow\""):
        storage.prepare(SCHEMA, find_keys(SCHEMA))
    assert storage.schema is None
    storage.close()
