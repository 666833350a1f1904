"""Stores in folders whose names are special to DuckDB, or are not valid text."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

import expstore
from expstore.maintenance.verify import verify
from expstore.storages.format.paths import INDEX, index_path
from tests.support.batches import numbered_rows

pytestmark = pytest.mark.usefixtures("no_syncs")

#: Names, and whether DuckDB can open a file in a folder of that name.
NAMES = {
    "a?access_mode=read_only": False,
    "a\\b": False,
    os.fsdecode(b"\xff\xfe"): False,
    ":memory:": True,
    "md:a": True,
    "a'b\"c": True,
    "a\nb%20#": True,
}


@pytest.mark.slow
@pytest.mark.index
@pytest.mark.parametrize(
    ("name", "absolute"), [*zip(NAMES, itertools.cycle([True, False]), strict=False)], ids=ascii
)
def test_a_store_works_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, absolute: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name if absolute else Path(name)
    count = "SELECT count(*), min(_id) FROM transitions"
    with expstore.open(path, capacity=4) as rb:
        rb.extend(numbered_rows(6))
        assert rb.sql(count).fetchall() == [(4, 3)]
        rb.dumps(name + "-versions")
    assert (path / INDEX).exists() == NAMES[name]
    assert (index_path(path) is not None) == NAMES[name]
    for opened in (lambda: expstore.open(path), lambda: expstore.open(path, mode="r")):
        with opened() as rb:
            assert rb.sql(count).fetchall() == [(4, 3)]
            assert rb.episodes().arrow().num_rows == 1
    with expstore.open(name + "-versions", mode="r") as rb:
        assert rb.sql(count).fetchall() == [(4, 3)]
    assert verify(path) == []
    expstore.resize(path, capacity=5)
    with expstore.open(path) as rb:
        rb.loads(name + "-versions")
        rb.extend(numbered_rows(1))
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(5,)]
    assert sorted(os.listdir(tmp_path)) == sorted([name, name + "-versions"])


def test_an_index_from_another_name_is_left_alone(tmp_path: Path) -> None:
    """A store that is renamed so that DuckDB cannot open its index any more has one in memory."""
    plain, odd = tmp_path / "plain", tmp_path / "od?d"
    with expstore.open(plain) as rb:
        rb.extend(numbered_rows(3))
    plain.rename(odd)
    with expstore.open(odd) as rb:
        rb.extend(numbered_rows(3))
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(6,)]
    assert verify(odd) == []
    odd.rename(plain)
    assert verify(plain) == []
    with expstore.open(plain) as rb:
        assert rb.sql("SELECT sum(live_rows) FROM episodes").fetchall() == [(6,)]
