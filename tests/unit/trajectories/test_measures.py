"""Measures of episodes: each by what it must not depend on, and by a fault that it must see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expstore.trajectories.measures import (
    COMPONENTS,
    Spans,
    equals_previous,
    find_breaks,
    find_copies,
    find_not_finite,
    find_pauses,
    fingerprint,
    measure_signal,
)

LENGTHS = np.array([1, 40, 2, 25, 60])
SPANS = Spans(np.cumsum(LENGTHS) - LENGTHS, int(LENGTHS.sum()))


def alone(number: int) -> tuple[slice, Spans]:
    """The rows of one episode, and its span among these."""
    start, count = int(SPANS.starts[number]), int(LENGTHS[number])
    return slice(start, start + count), Spans(np.array([0]), count)


@pytest.fixture(params=[(), (3,), (2, 2), (COMPONENTS + 4,)])
def signal(request: pytest.FixtureRequest) -> Any:
    """Smooth values, a few of which stand still."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(SPANS.rows, *request.param)).astype(np.float32)
    rows[30:34] = rows[30]
    return rows


def test_an_episode_is_measured_as_it_is_alone(signal: Any) -> None:
    together, prints = measure_signal(signal, SPANS), fingerprint([signal], SPANS)
    for number in range(len(LENGTHS)):
        rows, span = alone(number)
        for name, found in measure_signal(signal[rows], span).items():
            np.testing.assert_allclose(found[0], together[name][number], rtol=1e-12, atol=1e-12)
        assert fingerprint([signal[rows]], span) == prints[number : number + 1]


def test_measures_follow_scale_and_offset(signal: Any) -> None:
    once = measure_signal(signal.astype(np.float64), SPANS)
    other = measure_signal(signal.astype(np.float64) * -4.0, SPANS)
    factors = {"level": 4.0 if signal[0].size > COMPONENTS else -4.0, "still": 1.0}
    for name, found in other.items():
        np.testing.assert_allclose(found, once[name] * factors.get(name, 4.0), rtol=1e-9)
    if signal[0].size <= COMPONENTS:
        moved = measure_signal(signal.astype(np.float64) + 7.0, SPANS)
        for name, found in moved.items():
            np.testing.assert_allclose(found, once[name] + (7.0 if name == "level" else 0.0), atol=1e-9)


def test_the_spread_of_one_value_is_zero() -> None:
    found = measure_signal(np.full(SPANS.rows, 0.1), SPANS)  # its sums are rounded
    assert not found["spread"].any()
    assert (found["level"] == 0.1).all()


def test_a_stop_a_jump_and_a_value_that_is_not_finite() -> None:
    rows = np.arange(12.0).reshape(12, 1)
    rows[6:, 0] = 5.0  # the second of two episodes stands still
    spans = Spans(np.array([0, 6]), 12)
    found = measure_signal(rows, spans)
    assert found["still"][:, 0].tolist() == [0.0, 1.0]
    assert found["change"][:, 0].tolist() == found["jump"][:, 0].tolist() == [1.0, 0.0]
    rows[3] = 103.0
    assert measure_signal(rows, spans)["jump"][:, 0].tolist() == [101.0, 0.0]
    rows[3] = np.nan
    found = measure_signal(rows, spans)
    assert found["level"][0] == pytest.approx(12 / 5)  # the others: 0, 1, 2, 4, 5
    assert found["jump"][0] == 1.0
    assert find_not_finite([rows, np.arange(12)], spans).tolist() == [n == 3 for n in range(12)]


@pytest.mark.parametrize("shape", [(), (3,), (5, 5, 3), (8, 8)])
@pytest.mark.parametrize("dtype", ["u1", "f4", "?"])
def test_equal_rows(shape: tuple[int, ...], dtype: str) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (60, *shape)).astype(dtype)
    rows[10:20] = rows[10]
    expected = [False] + [rows[n].tobytes() == rows[n - 1].tobytes() for n in range(1, 60)]
    assert equals_previous(rows).tolist() == expected


def test_breaks_and_pauses_are_inside_episodes() -> None:
    spans = Spans(np.array([0, 4]), 8)
    now = np.array([0, 1, 2, 3, 0, 1, np.nan, 3.0])
    after = np.array([1, 2, 3, 4, 1, np.nan, 9, 4.0])
    assert np.flatnonzero(find_breaks([(now, after)], spans)).tolist() == [7]
    times = np.array([0, 10, 30, 40, 900, 910, 920, 990]) * 1_000_000
    assert find_pauses(times, spans).tolist() == [20.0, 70.0]


def test_copies_are_found_with_noise_and_at_another_scale() -> None:
    rng = np.random.default_rng(5)
    lengths = np.full(40, 50)
    spans = Spans(np.cumsum(lengths) - lengths, 2000)
    rows = rng.normal(size=(2000, 3))
    rows[1500:1550] = rows[100:150]  # 30 is 2, 33 is 30 with a little noise, 35 is 2 at another scale
    rows[1650:1700] = rows[1500:1550] * (1 + 1e-5 * rng.normal(size=(50, 3)))
    rows[1750:1800] = rows[100:150] * 8
    partner, alike = find_copies(fingerprint([rows], spans))
    found = {n: int(partner[n]) for n in np.flatnonzero(alike > 0.7)}
    assert found == {30: 2, 33: 2, 35: 2}
    assert alike[30] == alike[35] == 1.0
    assert find_copies(["", "", ""])[0].tolist() == [-1, -1, -1]
