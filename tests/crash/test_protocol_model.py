"""The crash protocol under simulated power cuts: correct, and with each of its rules broken.

Run by pytest; it drives protocol_model.py. It never touches expstore or the disk: kill and fault tests of the
code are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from tests.crash.protocol_model import Outcome, run
from tests.crash.protocol_recovery import Rules

SEEDS = 3_000  # a seed has 1.6 power cuts
MANY_SEEDS = 13_000
SWITCHES = [f.name for f in fields(Rules) if f.name not in ("capacity", "spare")]


def first_problem(rules: Rules, seeds: int = 6_000) -> Outcome:
    """Return the outcome of the first seed that breaks a promise under these rules."""
    for seed in range(seeds):
        outcome = run(seed, rules=rules)
        if outcome.problem:
            return outcome
    pytest.fail(f"{rules} broke no promise in {seeds} seeds")


@pytest.mark.guarantee("power/tests")
@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MANY_SEEDS, marks=pytest.mark.torture)])
def test_no_cut_breaks_a_promise_and_the_cuts_do_cost_something(
    seeds: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    outcomes = [run(seed) for seed in range(long_seed, long_seed + seeds)]

    broken = [(seed, o.problem, *o.story) for seed, o in enumerate(outcomes, long_seed) if o.problem]
    assert not broken, "\n  ".join(map(str, broken[0]))
    power_cuts = sum(o.power_cuts for o in outcomes)
    assert power_cuts > 1.5 * seeds
    kills = sum(o.kills for o in outcomes)
    assert kills > seeds // 2
    count_cases(power_cuts + kills)
    # Otherwise the disk of the model drops nothing, and detects nothing.
    assert sum(o.lossy_cuts for o in outcomes) > power_cuts / 6


@pytest.mark.guarantee("power/tests")
@pytest.mark.some(12)
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_broken_rule_is_found(switch: str) -> None:
    first_problem(Rules(**{switch: True}))


def test_reuse_before_the_mark_is_found_where_the_ring_is_smaller_than_its_spare() -> None:
    """There a row is never readable any more when its slot is written; that is not enough."""
    outcome = first_problem(Rules(capacity=3, spare=8, reuse_before_mark=True))
    assert "torn" in str(outcome.problem) or "lost" in str(outcome.problem)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(("capacity", "spare"), [(3, 1), (3, 8), (9, 1), (16, 2)])
def test_the_rules_are_kept_at_the_edges_of_the_geometry(capacity: int, spare: int) -> None:
    for seed in range(1_000):
        outcome = run(seed, rules=Rules(capacity=capacity, spare=spare))
        assert outcome.problem is None, "\n  ".join((str(seed), *outcome.story))


def test_a_seed_says_everything() -> None:
    assert run(7) == run(7)
    assert run(7) != run(8)
