"""Batches of several stores are distributed as those of one store with all rows, wherever the rows live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from expstore.cluster import many, shares
from tests.support.mixed_stores import SHARED, MixedStores, open_mixed_stores, source_for
from tests.support.servers import Serving
from tests.support.shard_rows import (
    ALPHA,
    BETA,
    EPS,
    LENGTHS,
    SIZES,
    assert_distributed,
    even,
    fill,
    first_rows,
    limit_of,
    place_of,
    powers,
    rows_of,
    starts_of,
    weights_of,
)
from tests.support.waits import wait_until

BATCH, BATCHES, AHEAD = 256, 64, 8
PRIORITIZED = {"kind": "prioritized", "alpha": ALPHA, "beta": BETA}


@pytest.fixture(scope="module", params=["served", "mixed"])
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Three stores with rows and priorities: all served, or one of each kind of place."""
    folder = tmp_path_factory.mktemp("stores")
    if request.param == "mixed":
        with open_mixed_stores(folder, filled=True) as stores:
            yield stores.places
        return
    for number in range(len(SIZES)):
        with expstore.open(folder / f"rest{number}.exp", seed=number) as rb:
            fill(rb, number)
    with Serving(Settings(path=folder)) as server:
        yield [f"{server.url}/rest{number}" for number in range(len(SIZES))]


def draw_all(places: list[Any], **options: Any) -> TensorDict:
    with expstore.connect(places, batch_size=BATCH, seed=5, ahead=AHEAD, **options) as rb:
        return torch.cat(list(rb.stream(BATCHES)))


def matches(where: str | None) -> Any:
    return 1.0 if where is None else even().astype(np.float64)


@pytest.mark.guarantee(
    "cluster/distribution",
    "Batches of several stores, and their weights, are distributed as those of one store with all rows, "
    "for every sampler and with `where=`.",
)
@pytest.mark.some(2)
@pytest.mark.parametrize("where", [None, "even"])
def test_rows_are_drawn_uniformly(places: list[Any], where: str | None) -> None:
    drawn = draw_all(places, where=where)
    assert_distributed(place_of(drawn["id"]), np.ones(sum(SIZES)) * matches(where))
    assert "priority_weight" not in drawn.keys()  # noqa: SIM118 - a TensorDict yields values


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.some(2)
@pytest.mark.parametrize("where", [None, "even"])
def test_rows_are_drawn_by_priority(places: list[Any], where: str | None) -> None:
    drawn = draw_all(places, sampler=PRIORITIZED, where=where)
    masses, rows = powers() * matches(where), place_of(drawn["id"])
    assert_distributed(rows, masses)
    np.testing.assert_allclose(drawn["priority_weight"].numpy(), weights_of(masses)[rows], rtol=1e-6)


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.some(3)
@pytest.mark.parametrize(("by", "where"), [("start", None), ("trajectory", None), ("start", "even")])
def test_slices_are_drawn_as_from_one_store(places: list[Any], by: str, where: str | None) -> None:
    length = {"num_slices": 64} if where else {"slice_len": 4}
    drawn = draw_all(places, sampler={"kind": "slices", "by": by} | length, where=where)
    chances = starts_of(4) * matches(where)
    if by == "trajectory":
        chances /= np.repeat([steps - 3 for steps in LENGTHS], SIZES)
    assert_distributed(first_rows(drawn, 4), chances)


@pytest.mark.some(1)
def test_short_slices_are_cut_at_their_ends(places: list[Any]) -> None:
    """Slices of 8 steps: episodes of the first and the last store are shorter."""
    spec = {"kind": "slices", "slice_len": 8, "strict_length": False}
    with expstore.connect(places, batch_size=BATCH, seed=5, ahead=AHEAD, sampler=spec) as rb:
        for drawn in rb.stream(BATCHES):
            rows, flags = place_of(drawn["id"]), drawn["next", "truncated"][:, 0].numpy()
            assert flags.sum() == BATCH // 8
            begins = np.concatenate([[0], np.flatnonzero(flags)[:-1] + 1])
            lengths = np.diff(np.append(begins, flags.size))
            assert (lengths == np.minimum(8, np.array(LENGTHS)[drawn["id"][begins, 0].numpy()])).all()
            assert (np.diff(rows)[~flags[:-1]] == 1).all()


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.some(1)
def test_slices_are_drawn_by_priority(places: list[Any]) -> None:
    spec = {"kind": "prioritized_slices", "slice_len": 4, "alpha": ALPHA, "beta": BETA}
    drawn = draw_all(places, sampler=spec)
    masses, rows = powers() * starts_of(4), first_rows(drawn, 4)
    assert_distributed(rows, masses)
    weights = drawn["priority_weight"].reshape(-1, 4).numpy()
    np.testing.assert_allclose(weights, np.repeat(weights_of(masses)[rows, None], 4, axis=1), rtol=1e-6)


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.some(2)
@pytest.mark.parametrize("where", [None, "even"])
def test_newer_rows_of_each_shard_are_drawn_more_often(places: list[Any], where: str | None) -> None:
    drawn = draw_all(places, sampler={"kind": "recency", "half_life": 40}, where=where)
    ages = np.concatenate([np.arange(count)[::-1] for count in SIZES])
    assert_distributed(place_of(drawn["id"]), 0.5 ** (ages / 40) * matches(where))


@pytest.mark.some(1)
def test_a_sampler_without_masses_would_be_noticed(
    places: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above fail if stores are drawn from equally, or weights are not corrected."""

    def ignore_masses(*arguments: Any) -> Any:
        *others, totals = arguments
        return draw_counts(*others, np.ones(totals.size))

    draw_counts = shares.draw_counts
    monkeypatch.setattr(many, "draw_counts", ignore_masses)
    monkeypatch.setattr(many, "find_factors", lambda *_: None)
    with pytest.raises(AssertionError):
        test_rows_are_drawn_uniformly(places, None)
    drawn = draw_all(places, sampler=PRIORITIZED)
    rows = place_of(drawn["id"])
    with pytest.raises(AssertionError):
        assert_distributed(rows, powers())
    assert not np.allclose(drawn["priority_weight"].numpy(), weights_of(powers())[rows], rtol=1e-3)


def powers_of(priorities: dict[int, float]) -> Any:
    return (np.array(list(priorities.values())).astype(np.float32) + EPS) ** ALPHA


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.slow
def test_batches_keep_their_distribution_while_others_write(tmp_path: Path) -> None:
    """Each batch is compared with the masses that it was drawn with, of which some are not those of now."""
    #: The priorities of the rows of each store, by id.
    priorities: list[dict[int, float]] = [{}, {}, {}]
    rng = np.random.default_rng(1)

    def write(number: int, count: int) -> None:
        ids = writer.extend(rows_of(count, count), source=source_for(writer, number))
        values = rng.random(count) * 3 + 0.01
        assert writer.update_priority(id=ids, priority=values) == count
        priorities[number].update(zip(ids[:, 1].tolist(), values.tolist(), strict=True))

    def settle(stores: MixedStores) -> None:
        """Wait until the copy draws by what was written to it."""
        stores.wait_for_rows(len(priorities[SHARED]))
        total, member = powers_of(priorities[SHARED]).sum(), rb._shards.find(SHARED)._reach.member
        wait_until(lambda: np.isclose(member.weigh(rb._describe(BATCH), 1).mass.total, total, rtol=1e-6))

    with (
        open_mixed_stores(tmp_path, filled=False) as stores,
        stores.connect(batch_size=BATCH, sampler=PRIORITIZED, ahead=2) as rb,
        stores.connect() as writer,
    ):
        for number in range(3):
            write(number, 60)
        settle(stores)
        expected, counts, changed = np.zeros((3, 400)), np.zeros((3, 400)), 0
        for step in range(60):
            drawn, info = rb.sample(return_info=True)
            masses, assumed = info["draw"].masses, info["draw"].assumed
            chances = []
            for number in range(3):
                powered = powers_of(priorities[number])
                chances.append(assumed[number] / sum(assumed.values()) * powered / powered.sum())
                np.testing.assert_allclose(masses[number].total, powered.sum(), rtol=1e-5)
                expected[number, : powered.size] += BATCH * chances[-1]
                changed += assumed[number] != masses[number].total
            ids = drawn["id"].numpy()
            np.add.at(counts, (ids[:, 0], ids[:, 1] - 1), 1)
            mine = np.array([chances[number][row - 1] for number, row in ids])
            weights = (mine / min(float(each.min()) for each in chances)) ** -BETA
            np.testing.assert_allclose(drawn["priority_weight"].numpy(), weights, rtol=2e-6)
            if step % 2:  # after both batches that were drawn together
                write(int(rng.integers(3)), int(rng.integers(1, 12)))
                settle(stores)
    assert changed > 20
    some = expected >= 5
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < limit_of(int(some.sum()) + 1)
