"""Which episodes are odd, and why: measures of made-up episodes, of which some differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from expstore.trajectories.odd import (
    SCALES,
    THRESHOLD,
    Episodes,
    Measure,
    Measures,
    Oddness,
    describe,
    locate,
    rank,
    read_measures,
    tabulate,
)

COUNT = 240


def make_episodes(seed: int = 0, sources: int = 4, **values: Any) -> Episodes:
    """Usual episodes; of measures in `values` these values, of one field."""
    rng = np.random.default_rng(seed)
    usual = {
        "level": rng.normal(0.2, 0.1, COUNT), "spread": rng.uniform(0.3, 0.5, COUNT),
        "still": rng.uniform(0, 0.1, COUNT), "change": rng.uniform(0.1, 0.2, COUNT),
        "jump": rng.uniform(0.5, 0.7, COUNT),
    }  # fmt: skip
    whole = {"positive": np.zeros(COUNT), "not_finite": np.zeros(COUNT), "breaks": np.zeros(COUNT)}
    whole["pause"] = rng.uniform(0.01, 0.02, COUNT)
    own = {
        name: column for name, column in values.items() if name in SCALES and name not in ("length", "return")
    }
    parts = usual | {name: column for name, column in own.items() if name in usual}
    whole |= {name: column for name, column in own.items() if name not in usual}
    facts = [
        {name: column[n] for name, column in whole.items()}
        | {name: {"x": [0.5, column[n]]} for name, column in parts.items()}
        for n in range(COUNT)
    ]
    return Episodes(
        measures=[one for one in read_measures(facts) if one is not None],
        length=np.asarray(values.get("length", rng.integers(40, 90, COUNT))),
        returns=values.get("returns", rng.normal(-10, 2, COUNT)),
        ended=values.get("ended", np.ones(COUNT, bool)),
        source=[f"arm-{n % sources}" for n in range(COUNT)],
        version=[n // 24 for n in range(COUNT)],
    )


def scores(found: list[Oddness]) -> Any:
    return np.array([one.score for one in found])


def test_usual_episodes_are_not_odd() -> None:
    for seed in range(5):
        assert scores(rank(make_episodes(seed))).max() < THRESHOLD
    assert rank(replace(make_episodes(), measures=(), length=np.array([], np.int64))) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("still", 0.9), ("change", 0.9), ("jump", 4.0), ("positive", 0.9), ("not_finite", 0.02),
        ("pause", 60.0), ("breaks", 1.0), ("level", 3.0), ("length", 4000), ("returns", -60.0),
    ],
)  # fmt: skip
def test_one_strong_reason_is_enough(name: str, value: float) -> None:
    base = make_episodes()
    number = {"length": base.length, "returns": base.returns}
    column = number.get(name)
    if column is None:
        places, table = tabulate(base.measures)
        field = ("x", 1) if Measure(name, "x", 1) in places else ("", 0)
        column = table[:, places.index(Measure(name, *field))]
    column = column.copy()
    column[100] = value
    found = rank(make_episodes(**{name: column}))
    assert np.flatnonzero(scores(found) >= THRESHOLD).tolist() == [100]
    measure = "return" if name == "returns" else name
    assert (found[100].measure.name, found[100].by) == (measure, "episode")
    assert found[100].value == pytest.approx(value, rel=1e-6)
    assert abs(found[100].usual - np.median(column)) <= np.abs(column - np.median(column))[:100].max()


def test_small_values_are_odd_only_where_they_mean_something() -> None:
    length = np.full(COUNT, 60) + np.arange(COUNT) % 7
    length[50] = 2
    assert rank(make_episodes(length=length))[50].measure.name == "length"
    still = np.full(COUNT, 0.9)
    still[50] = 0.0
    assert scores(rank(make_episodes(still=still)))[50] < THRESHOLD


def test_the_unit_of_a_measure_does_not_matter() -> None:
    rng = np.random.default_rng(7)
    column = rng.uniform(1, 2, COUNT)
    column[9] = 30.0
    for name in ("level", "jump", "change", "spread"):
        one, other = (scores(rank(make_episodes(**{name: column * unit}))) for unit in (1.0, 1000.0))
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_a_value_of_0_is_0_on_a_scale_of_ratios() -> None:
    column = np.random.default_rng(7).uniform(0.3, 0.5, COUNT)
    column[[9, 99]] = 0.0
    found = rank(make_episodes(spread=column))
    assert [(found[n].measure.name, found[n].value) for n in (9, 99)] == [("spread", 0.0)] * 2
    text = describe(found[9], 20, "terminated", None, "x[1]")
    assert text.startswith("x[1] has one value in all steps; its standard deviation is usually 0.")


def test_episodes_that_were_stopped_early() -> None:
    length, ended = np.full(COUNT, 60), np.ones(COUNT, bool)
    length[[20, 30]], ended[[30, 40]] = 8, False
    found = rank(make_episodes(length=length, ended=ended))
    assert np.flatnonzero(scores(found) >= THRESHOLD).tolist() == [20, 30]  # 40 was stopped at its usual end
    length = np.random.default_rng(0).integers(20, 120, COUNT)
    length[30] = 8
    found = rank(make_episodes(length=length, ended=ended))
    assert np.flatnonzero(scores(found) >= THRESHOLD).tolist() == [30]
    assert found[30].measure.name == "short"
    common = np.arange(COUNT) % 3 > 0  # a third is truncated at any time: nothing is odd
    assert scores(rank(make_episodes(ended=common))).max() < THRESHOLD


def test_what_a_third_of_the_episodes_do_counts_little() -> None:
    common = np.arange(COUNT) % 3 == 0
    found = rank(make_episodes(length=np.where(common, 20, 60 + np.arange(COUNT) % 7), ended=~common))
    assert max(one.score for one in found if one.measure.name in ("short", "length")) <= 3


def test_jumps_of_a_value_that_mostly_stands_still_are_usual() -> None:
    jump = np.where(np.arange(COUNT) % 30 == 0, 1.0, 0.0)
    assert scores(rank(make_episodes(jump=jump))).max() > THRESHOLD
    assert scores(rank(make_episodes(jump=jump, still=np.full(COUNT, 0.8)))).max() < THRESHOLD


def test_copies_refer_to_the_first() -> None:
    episodes = make_episodes()
    prints = [np.random.default_rng(n).bytes(32).hex() for n in range(COUNT)]
    prints[150] = prints[200] = prints[17]
    pairs = zip(episodes.measures, prints, strict=True)
    found = rank(replace(episodes, measures=[Measures(m.layout, m.values, p, m.length) for m, p in pairs]))
    assert np.flatnonzero(scores(found) >= THRESHOLD).tolist() == [150, 200]
    assert {(found[n].measure.name, found[n].copied) for n in (150, 200)} == {("copy", 17)}


def test_a_source_whose_episodes_are_all_a_little_odd() -> None:
    rng = np.random.default_rng(2)
    changed = (np.arange(COUNT) % 4 == 2) & (np.arange(COUNT) >= 140)
    length = np.where(changed, rng.integers(20, 35, COUNT), rng.integers(50, 80, COUNT))
    found = rank(make_episodes(length=length))
    odd = scores(found) >= THRESHOLD
    assert odd[changed].mean() > 0.9
    assert odd[~changed].mean() < 0.02
    assert {(found[n].by, found[n].measure.name) for n in np.flatnonzero(odd & changed)} == {
        ("source", "length")
    }


def test_a_version_that_is_worse() -> None:
    returns = np.random.default_rng(4).normal(-10, 2, COUNT)
    returns[96:120] -= 5.0  # of version 4
    found = rank(make_episodes(returns=returns))
    odd = np.flatnonzero(scores(found) >= THRESHOLD)
    assert odd.tolist() == list(range(96, 120))
    assert {found[n].by for n in odd} == {"version"}


def test_sources_that_always_differ_are_not_odd() -> None:
    number = np.arange(COUNT)
    level = np.random.default_rng(1).normal(0, 0.1, COUNT) + number % 4
    assert scores(rank(make_episodes(level=level))).max() < THRESHOLD


def test_an_episode_must_differ_from_its_own_source() -> None:
    number = np.arange(COUNT)
    jump = np.random.default_rng(1).uniform(0.5, 0.7, COUNT) * np.where(number % 8 == 3, 3.0, 1.0)
    assert scores(rank(make_episodes(sources=8, jump=jump))).max() < THRESHOLD


def test_measures_that_some_episodes_lack() -> None:
    episodes = make_episodes()
    measures = list(episodes.measures)
    for number in range(50, COUNT, 3):
        (own,) = read_measures([{"mine": None if number % 2 else 1e6 if number == 80 else number % 5}])
        assert own is not None
        layout, values = measures[number].layout + own.layout, np.append(measures[number].values, own.values)
        measures[number] = Measures(layout, values, "", 0)
    found = rank(replace(episodes, measures=measures, returns=np.full(COUNT, np.nan)))
    assert np.flatnonzero(scores(found) >= THRESHOLD).tolist() == [80]
    assert found[80].measure == Measure("mine")


def test_where_it_shows() -> None:
    rows = np.arange(40.0).reshape(20, 2)
    rows[12:, 1] = 7.0
    rows[5:, 0] += 50

    def at(name: str, component: int = 0) -> Any:
        odd = Oddness(9.0, Measure(name, "x", component), "episode", 1.0, 0.0, -1)
        return locate(rows, odd)

    assert at("still", 1) == (12, 19)
    assert at("jump") == (5, 5)
    assert at("pause") == (5, 5)
    assert at("level") is None
    marks = np.arange(20) == 3
    assert locate(marks, Oddness(9.0, Measure("breaks"), "episode", 1.0, 0.0, -1)) == (3, 3)


def test_words() -> None:
    def say(name: str, where: tuple[int, int] | None = None) -> str:
        odd = Oddness(9.0, Measure(name, "action", 1), "episode", 0.5, 0.03, -1)
        return describe(odd, 20, "truncated", where, "action[1]")

    assert (
        say("still", (12, 19))
        == "action[1] does not change in 50% of the steps, from step 12 on; usually in 3%"
    )
    assert "from step 3 to step 9;" in say("still", (3, 9))
    assert say("jump", (4, 4)) == "action[1] jumps by 0.5 at step 4; usually by 0.03 at most"
    assert say("short") == "truncated after 20 steps; usually 40 steps"
    assert say("mine") == "mine 0.5; usually 0.03"
    for name in set(SCALES) - {"copy"}:
        assert say(name)[0].islower() or say(name)[0].isdigit()
