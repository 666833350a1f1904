"""`rb.episodes.changes`: what is read from a store, groups, and conditions that select their episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.buffers.changes import tabulate_episodes
from expstore.storages.memory import MemoryStorage
from expstore.trajectories.odd import Measure, read_measures
from tests.support.odd_episodes import make_episodes

pytestmark = pytest.mark.index
HOSTILE = 'it\'s -- "x" /* ; ~/'


def fill(
    rb: Any, kind: str, count: int = 240, rename: Any = lambda source: source, **facts: Any
) -> list[int]:
    """Write episodes of `make_episodes`; return the ids of the odd ones."""
    odd = []
    for number, ((rows, source, own), is_odd) in enumerate(make_episodes(kind, 0, count)):
        rb.extend(rows, source=rename(source), episode_info=own | facts)
        if is_odd:
            odd.append(number + 1)
    return odd


def in_memory() -> Any:
    return expstore.ReplayBuffer(storage=MemoryStorage(100_000), batch_size=4)


def changes(rb: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rb.episodes.changes().arrow().to_pylist()
    return found


def selected(rb: Any, where: str) -> set[int]:
    return set(rb.episodes(where).arrow()["episode_id"].to_pylist())


@pytest.mark.parametrize("kind", ["scale", "sign", "early", "worse"])
def test_the_group_is_found_and_its_condition_selects_its_episodes(kind: str) -> None:
    with in_memory() as rb:
        odd = set(fill(rb, kind, 300 if kind == "worse" else 240))
        first = changes(rb)[0]
        found = selected(rb, first["where"])
        assert len(found) == first["episodes"]
        assert len(found & odd) > 0.9 * max(len(found), len(odd))
        by = ("version", "11") if kind == "worse" else ("source", "arm-1")
        assert (first["by"], first["value"]) == by
        start, version, row = rb.sql(
            "SELECT start_time, (info->>'policy_version')::BIGINT, (SELECT min(_id) FROM transitions "
            "WHERE _episode = episode_id) FROM episodes WHERE episode_id = $id",
            {"id": first["episode_id"]},
        ).fetchall()[0]
        assert (first["since"], first["version"], first["row_id"]) == (start, version, row)
        assert rb.episodes("(info->'measures') IS NOT NULL").arrow().num_rows == 0  # nothing was stored
        rb.episodes.measure()
        assert changes(rb)[0] == first


def test_names_of_any_kind_are_conditions() -> None:
    with in_memory() as rb:
        odd = set(fill(rb, "early", rename=lambda source: source.replace("arm-1", HOSTILE)))
        (first, *_) = changes(rb)
        assert first["value"] == HOSTILE
        assert len(selected(rb, first["where"]) & odd) > 0.9 * len(odd)
    with in_memory() as rb:
        for number, ((rows, source, _), _) in enumerate(make_episodes("early", 0, 240)):
            rb.extend(
                rows, source="all", episode_info={HOSTILE: source, "count": number, "level": number % 2}
            )
        first = changes(rb)[0]
        assert (first["by"], first["name"], first["value"]) == ("fact", HOSTILE, "arm-1")
        assert len(selected(rb, first["where"]) & odd) > 0.9 * len(odd)


def test_a_store_without_changes_or_episodes(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        assert changes(rb) == []
        fill(rb, "")
        assert changes(rb) == []


def tabulated(known: list[dict[str, Any]]) -> Any:
    known = [one | {"info": dict(one["info"])} for one in known]
    return tabulate_episodes(known, read_measures(one["info"].pop("measures", None) for one in known))


def test_the_table_of_episodes() -> None:
    def one(number: int, **info: Any) -> dict[str, Any]:
        return {"source": None, "length": 3, "return": None, "status": ("cut", "truncated")[number % 2],
                "split": "train", "trajectory_id": None, "info": info}  # fmt: skip

    known = [
        one(n, good=n % 3 == 0, steps=n, text="x" * 300, many=str(n), _split="s", lr=[1]) for n in range(30)
    ]
    known[4]["info"] |= {"measures": {"still": {"x": [0.5, None]}}, "good": float("inf")}
    measures, values, groups = tabulated(known)
    hostile = [
        1,
        [2],
        "x",
        {"still": {"x": 3}},
        {"still": {"x": "y"}},
        {"copy": "zz"},
        {"still": {"x": [[]]}},
        {"a": 10**400},
    ]
    for number, one in enumerate(hostile):  # anybody may write facts of these names
        known[10 + number]["info"] |= {
            "measures": one,
            "good": number % 3 == 0,
            "policy_version": one,
            "big": 10**400,
        }
    assert [one for one in tabulated(known)[0] if one not in measures] == []
    table = dict(zip(measures, values.T, strict=True))
    assert set(table) == {
        Measure("length"), Measure("return"), Measure("status", "cut"), Measure("status", "truncated"),
        Measure("fact", "good"), Measure("copy"), Measure("still", "x", 0), Measure("still", "x", 1),
    }  # fmt: skip
    assert np.isnan(table[Measure("return")]).all()
    assert table[Measure("status", "cut")].sum() == 15
    assert np.flatnonzero(~np.isnan(table[Measure("still", "x")])).tolist() == [4]
    assert np.isnan(table[Measure("fact", "good")][4])
    assert {(group.by, group.name, group.value) for group in groups} == {
        ("fact", "good", "true"), ("fact", "good", "false"), ("fact", "good", "Infinity"),
    }  # fmt: skip
