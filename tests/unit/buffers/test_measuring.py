"""Measuring the episodes of a store, and its odd episodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.buffers import measuring
from expstore.errors import ArgumentError, StateError
from expstore.storages.memory import MemoryStorage
from tests.support.odd_episodes import GROUPS, SINGLE, make_episodes

pytestmark = pytest.mark.index


def fill(rb: Any, kind: str = "", seed: int = 0, count: int = 60, start: int = 0) -> list[int]:
    """Write episodes from number `start` on, in a store that has those before; return the ids of the odd."""
    odd = []
    for number, ((rows, source, facts), is_odd) in enumerate(make_episodes(kind, seed, count)):
        if number >= start:
            rb.extend(rows, source=source, episode_info=facts)
        if is_odd:
            odd.append(number + 1)
    return odd


def measures_of(rb: Any) -> dict[int, Any]:
    """The measures among the facts, by episode."""
    found = rb.sql("SELECT episode_id, info->'measures' FROM episodes ORDER BY 1").fetchall()
    return {episode: None if text is None else json.loads(text) for episode, text in found}


def in_memory() -> Any:
    """An empty store that writes nothing to disk."""
    return expstore.ReplayBuffer(storage=MemoryStorage(100_000), batch_size=4)


@pytest.fixture(params=["zarr", "memory"])
def rb(request: pytest.FixtureRequest, store_path: Path) -> Iterator[Any]:
    """An empty store."""
    if request.param == "memory":
        made = in_memory()
    else:
        made = expstore.open(store_path)
    with made:
        yield made


def test_measures_are_facts(rb: Any) -> None:
    fill(rb, count=12)
    done = rb.episodes.measure()
    assert (done.episodes, done.rows, done.skipped) == (12, len(rb), ())
    (action,) = (
        rb.sql("SELECT action FROM transitions WHERE _episode = 3 ORDER BY _step")
        .arrow()
        .to_pydict()
        .values()
    )
    found = measures_of(rb)[3]
    assert found["length"] == len(action)
    assert found["level"]["action"] == pytest.approx(np.mean(action, axis=0), rel=1e-3)
    assert found["jump"]["action"] == pytest.approx(np.abs(np.diff(action, axis=0)).max(0), rel=1e-3)
    assert set(found["still"]) == {"joints", "action", "camera", "next.reward"}
    assert (found["breaks"], found["not_finite"], found["positive"]) == (0.0, 0.0, 0.0)
    lively = rb.episodes("(info->>'$.measures.jump.action[1]')::DOUBLE > 0.1")
    assert len(lively) == 12


def test_measuring_again_measures_what_is_new_and_gives_the_same(rb: Any, store_path: Path) -> None:
    fill(rb, count=5)
    assert rb.episodes.measure().episodes == 5
    fill(rb, count=12, start=5)
    assert rb.episodes.measure().episodes == 7
    assert rb.episodes.measure().episodes == 0
    with expstore.open(store_path.with_name("other.exp")) as other:
        fill(other, count=12)
        other.episodes.measure()
        expected = measures_of(other)
    for facts in (*expected.values(), *(found := measures_of(rb)).values()):
        facts.pop("pause")  # the times of the rows differ
    assert found == expected


def test_pieces_do_not_matter(rb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(rb, "camera", count=40)
    rb.episodes.measure()
    expected = measures_of(rb)
    rb.episodes.annotate_each({episode: {"measures": None} for episode in expected})
    monkeypatch.setattr(measuring, "_ROWS", 100)
    monkeypatch.setattr(measuring, "_BYTES", 7 * 1600)
    assert rb.episodes.measure().episodes == 40
    assert measures_of(rb) == expected


def test_an_interrupted_run_is_continued(rb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(rb, count=12)
    monkeypatch.setattr(measuring, "_ROWS", 100)
    calls: list[int] = []

    def fail_later(columns: Any) -> float:
        calls.append(len(columns["action"]))
        if len(calls) == 8:
            raise RuntimeError("stopped")
        return 1.0

    with pytest.raises(RuntimeError, match="stopped"):
        rb.episodes.measure({"mine": fail_later})
    before = {episode for episode, facts in measures_of(rb).items() if facts}
    assert 0 < len(before) < 8
    assert rb.episodes.measure({"mine": fail_later}).episodes == 12 - len(before)
    assert all(facts["mine"] == 1.0 for facts in measures_of(rb).values())


def test_open_episodes_are_not_measured_and_longer_ones_again(rb: Any) -> None:
    rows = {"x": np.arange(4.0), "next": {"terminated": np.zeros(4, bool)}}
    rb.extend(rows, source="a")
    assert rb.episodes.measure().episodes == 0
    rb.episodes.annotate(1, measures={"length": 3, "mine": 7.0})  # as if it had been shorter
    rb.episodes.end("a")
    assert rb.episodes.measure() == (1, 4, ())
    assert measures_of(rb)[1]["length"] == 4
    assert rb.episodes.annotate(1, measures="mine") == {"measures": "mine"}
    assert rb.episodes.measure().episodes == 1


def test_own_measures() -> None:
    rb = in_memory()
    fill(rb, count=80)
    rb.episodes.measure()

    def effort(columns: Any) -> float:
        assert set(columns) >= {"joints", "next.joints", "camera", "next.terminated"}
        return float("nan") if len(columns["action"]) % 2 else np.abs(columns["action"]).mean() * 50

    assert rb.episodes.measure({"effort": effort}).episodes == 80
    assert rb.episodes.measure({"effort": effort}).episodes == 0
    found = measures_of(rb)
    assert all((facts["effort"] is None) == bool(facts["length"] % 2) for facts in found.values())
    rb.episodes.annotate(7, measures=found[7] | {"effort": 1e5})
    (top,) = rb.episodes.odd(1).arrow().to_pylist()
    assert (top["episode_id"], top["measure"], top["field"], top["step"]) == (7, "effort", None, None)
    for wrong in ({"still": effort}, {"mine": 3}, {7: effort}):
        with pytest.raises(ArgumentError, match="is not a measure"):
            rb.episodes.measure(wrong)


def test_writers_are_not_blocked(rb: Any) -> None:
    fill(rb, count=3)
    written = []

    def write(columns: Any) -> float:
        thread = threading.Thread(target=lambda: written.append(fill(rb, count=1)))
        thread.start()
        thread.join(20)
        return float(len(written))

    assert rb.episodes.measure({"mine": write}).episodes == 3
    assert len(written) == 3
    assert rb.episodes.measure({"mine": len}).episodes == 3


def test_fields_that_are_no_numbers_are_named(store_path: Path) -> None:
    rb = expstore.open(store_path, layout="arrow")
    for number in range(10):
        rows = {
            "text": [f"step {step}" for step in range(number, number + 9)],
            "x": np.random.default_rng(number).normal(size=(9, 3)).astype(np.float16),
            "next": {"done": np.arange(9) == 8},
        }
        rb.extend(rows)
    assert rb.episodes.measure() == (10, 90, ("text",))
    assert set(measures_of(rb)[1]) == {
        "length",
        "pause",
        "not_finite",
        "level",
        "spread",
        "still",
        "change",
        "jump",
        "copy",
    }
    assert rb.episodes.odd().fetchall() == []
    rb.close()


def test_nothing_to_measure(store_path: Path) -> None:
    with expstore.open(store_path, layout="arrow") as rb:
        assert rb.episodes.measure() == (0, 0, ())
        assert rb.episodes.odd().fetchall() == []
        rb.extend({"text": ["a", "b"], "next": {"done": [False, True]}})
        assert rb.episodes.measure() == (1, 2, ("text",))
    with pytest.raises(StateError, match="closed"):
        rb.episodes.measure()
    with expstore.open(store_path, mode="r") as reader:
        with pytest.raises(StateError):
            reader.episodes.measure()
        assert len(reader.episodes.odd(threshold=0)) == 1


def test_rows_that_left_a_ring_are_not_measured(store_path: Path) -> None:
    with expstore.open(store_path, capacity=500) as rb:
        fill(rb, count=20)
        live = rb.sql("SELECT count(*) FROM episodes WHERE live_rows = length").fetchone()[0]
        assert 0 < rb.episodes.measure().episodes == live < 20
        assert len(rb.episodes.odd(None, threshold=0)) == live


def test_splits_are_compared_by_themselves(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        for number in range(80):
            rows = {"x": np.random.default_rng(number).normal(size=20) * (100 if number % 4 == 0 else 1)}
            rows |= {"next": {"done": np.arange(20) == 19}}
            rb.extend(rows, source="a", split="eval" if number % 4 == 0 else None)
        assert rb.episodes.odd().fetchall() == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("stuck", ("still", "action", 1)), ("camera", ("still", "camera", None)),
        ("copy", ("copy", None, None)), ("gap", ("breaks", None, None)), ("short", ("short", None, None)),
    ],
)  # fmt: skip
def test_the_reason(kind: str, expected: tuple[Any, ...]) -> None:
    with in_memory() as rb:
        odd = fill(rb, kind, count=120)
        found = rb.episodes.odd(None).arrow().to_pylist()
        assert {one["episode_id"] for one in found} == set(odd)
        for one in found:
            assert (one["measure"], one["field"], one["component"]) == expected
            assert one["by"] == "episode"
        rows = rb.sql(
            "SELECT action, _step FROM transitions WHERE _episode = ? ORDER BY _step",
            [found[0]["episode_id"]],
        ).arrow()
        if kind == "stuck":
            values = np.array(rows["action"].to_pylist())[:, 1]
            step = found[0]["step"]
            assert len(set(values[step:])) == 1
            assert step == 0 or values[step - 1] != values[step]
            assert "action[1] does not change in" in found[0]["reason"]
        if kind == "copy":
            assert found[0]["reason"] == f"copy of episode {found[0]['copy_of']}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SINGLE, *GROUPS])
def test_odd_episodes_are_found(kind: str) -> None:
    found, above = [], []
    for seed in range(3):
        with in_memory() as rb:
            odd = set(fill(rb, kind, seed, count=300))
            ranked = rb.episodes.odd(None, threshold=0).arrow()
        top = ranked["episode_id"].to_pylist()[:30]
        found.append(len(odd.intersection(top)) / min(len(odd), 30))
        scores = dict(zip(*(ranked[name].to_pylist() for name in ("episode_id", "score")), strict=True))
        above += [score >= 6 for episode, score in scores.items() if episode not in odd]
    assert min(found) >= 0.9
    assert np.mean(above) <= 0.01
