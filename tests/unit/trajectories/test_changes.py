"""Since when groups of episodes differ: made-up measures, of which those of one group change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expstore.trajectories.changes import Change, Group, Shift, describe, find_changes
from expstore.trajectories.odd import Measure

COUNT, MEASURES = 1000, 12


def make_table(seed: int, sources: int, curve: Any = None, count: int = COUNT) -> tuple[Any, Any, Any]:
    """Return measures, values and groups of episodes whose return follows a curve of 0 to 1."""
    rng = np.random.default_rng(seed)
    at = np.arange(count) / count
    returns = 200 * (np.ones(count) if curve is None else curve(at)) + rng.normal(0, 20, count)
    length = rng.integers(30, 90, count).astype(float)
    parts = [rng.normal(0, 1, (count, MEASURES)), rng.uniform(0.5, 1, (count, MEASURES))]
    measures = [Measure("return"), Measure("length")]
    measures += [Measure(name, "obs", n) for name in ("level", "spread") for n in range(MEASURES)]
    order = np.arange(count)
    groups = [Group("source", "", f"env-{n}", order[order % sources == n]) for n in range(sources)]
    groups += [Group("version", "", str(n), order[order // 50 == n]) for n in range(count // 50)]
    return measures, np.column_stack([returns, length, *parts]), groups


def find(table: tuple[Any, Any, Any]) -> list[Change]:
    measures, values, groups = table
    return find_changes(values, measures, groups, 10)


def rise(at: Any) -> Any:
    return at


def saturate(at: Any) -> Any:
    return np.minimum(1.0, 2 * at)


@pytest.mark.parametrize("curve", [None, rise, saturate])
def test_what_rises_steadily_or_stays_is_no_change(curve: Any) -> None:
    for seed in range(6):
        assert [one.kind for one in find(make_table(seed, 8, curve)) if one.kind != "improvement"] == []


@pytest.mark.parametrize("sources", [2, 10, 40])
def test_a_drop_of_one_group_of_many_is_found(sources: int) -> None:
    for curve in (None, rise):
        table = make_table(1, sources, curve)
        members = table[2][1].members
        begin = len(members) * 2 // 3
        table[1][members[begin:], 0] -= 150
        (first, *more) = find(table)
        assert (first.group.by, first.group.value, first.kind) == ("source", "env-1", "drop")
        assert abs(np.searchsorted(members, first.members[0]) - begin) <= 2
        assert first.members[-1] == members[-1]
        assert not first.is_over
        assert first.shifts[0].measure == Measure("return")
        assert more == []


def test_what_all_groups_do_is_a_change_of_all() -> None:
    table = make_table(2, 5)
    table[1][700:, 0] -= 150
    (first,) = find(table)
    assert (first.group.by, first.kind) == ("all", "drop")
    assert abs(int(first.members[0]) - 700) <= 2


def test_a_return_that_falls_slowly_is_a_drop() -> None:
    kinds = [one.kind for one in find(make_table(3, 4, lambda at: 1 - np.maximum(0, at - 0.4)))]
    assert "drop" in kinds


def test_a_sudden_rise_of_all_is_an_improvement_and_comes_last() -> None:
    table = make_table(4, 4)
    table[1][600:, 0] += 100
    table[1][table[2][0].members[200:], 5] += 3
    first, last = find(table)
    assert (first.group.value, first.kind) == ("env-0", "change")
    assert (last.group.by, last.kind) == ("all", "improvement")


def test_a_version_that_is_worse_than_those_around_it() -> None:
    table = make_table(5, 4, rise)
    table[1][500:550, 0] -= 100
    (first,) = find(table)
    assert (first.group.by, first.group.value, first.kind) == ("version", "10", "drop")
    assert first.members.tolist() == list(range(500, 550))


def test_a_group_that_recovers() -> None:
    table = make_table(6, 4)
    members = table[2][3].members
    table[1][members[120:180], 0] -= 120
    (first,) = find(table)
    assert first.is_over
    assert abs(len(first.members) - 60) <= 4


def test_a_change_explains_the_groups_that_contain_its_episodes() -> None:
    table = make_table(7, 4)
    table[1][table[2][2].members[150:], 0] -= 150
    order = np.arange(COUNT)
    site = [Group("fact", "site", str(n), order[(order % 4 >= 2) == n]) for n in (0, 1)]
    found = find((*table[:2], [*site, *table[2]]))
    assert [one.group.value for one in found] == ["env-2"]


def test_groups_that_always_differ_do_not_change() -> None:
    table = make_table(8, 4)
    table[1][:, 0] += 300 * (np.arange(COUNT) % 4)
    assert find(table) == []
    mixed = np.random.default_rng(0).integers(0, 4, COUNT)  # sources that write more at times
    mixed[600:][mixed[600:] == 3] = 0
    groups = [Group("source", "", f"env-{n}", np.flatnonzero(mixed == n)) for n in range(4)]
    table[1][:, 0] = np.random.default_rng(1).normal(0, 20, COUNT) + 300 * (mixed == 0)
    assert [one for one in find((*table[:2], groups)) if one.group.by != "all"] == []


def test_units_and_outliers_do_not_matter() -> None:
    measures, values, groups = make_table(9, 4)
    values[groups[1].members[160:], 0] -= 150
    (first,) = find((measures, values, groups))
    (other,) = find((measures, np.where(np.arange(values.shape[1]) == 0, values * 1e-3, values), groups))
    assert (other.members.tolist(), round(other.score, 6)) == (first.members.tolist(), round(first.score, 6))
    wild = values.copy()
    wild[np.random.default_rng(0).choice(COUNT, 30, replace=False), 0] = 1e5
    (again,) = find((measures, wild, groups))
    assert (again.group.value, again.shifts[0].measure) == ("env-1", Measure("return"))
    assert abs(len(again.members) - len(first.members)) <= 2


def test_measures_that_are_not_known() -> None:
    measures, values, groups = make_table(10, 4)
    values[:300, 2:] = np.nan
    values[groups[1].members[180:], 4] += 4
    (first,) = find((measures, values, groups))
    assert (first.group.value, first.shifts[0].measure) == ("env-1", Measure("level", "obs", 2))
    values[:, 0] = np.nan  # rows without rewards
    assert [one.group.value for one in find((measures, values, groups))] == ["env-1"]
    assert find_changes(values[:10], measures, [], 10) == []


def test_words() -> None:
    def shift(name: str, before: float, after: float, field: str = "", component: int = 0) -> Shift:
        return Shift(Measure(name, field, component), 9.0, before, after, before - 1, before + 1)

    def say(*shifts: Shift, by: Any = "source", name: str = "", value: str | None = "env-3") -> str:
        group = Group(by, name, value, np.arange(44))
        return describe(
            Change(group, np.arange(44), np.arange(3), False, 9.0, "drop", shifts, {("level", "obs"): 4})
        )

    found = say(
        shift("level", 0, 7, "obs", 2), shift("status", 0.2, 41 / 44, "terminated"), shift("return", 200, 35)
    )
    assert found == (
        "source env-3: return 200 -> 35, 41 of 44 episodes end by terminated (before 20%), "
        "mean of obs[2] outside its former range: 7, before -1 to 1"
    )
    assert (
        say(shift("level", 0, 0.5, "obs", 2), by="all", value=None) == "all episodes: mean of obs[2] 0 -> 0.5"
    )
    assert say(shift("still", 0, 1, "camera"), by="fact", name="site", value="lab").startswith(
        "site = lab: camera does not"
    )
    assert say(shift("copy", 0, 0.7), by="version", value="7").startswith(
        "policy version 7: 70% of the episodes are"
    )
    assert say(shift("mine", 1, 2), value=None) == "episodes without source: mine 1 -> 2"
    assert "terminated" not in say(shift("status", 0.9, 0.1, "terminated"), shift("length", 10, 20))


def test_the_newest_version_counts_if_its_return_falls() -> None:
    table = make_table(11, 4, rise)
    table[1][950:, 0] -= 60
    (first,) = find(table)
    assert (first.group.value, first.kind) == ("19", "drop")
    table[1][950:, 0] += 120
    assert [one.group.by for one in find(table) if one.kind != "improvement"] == []
