"""Batches of several shards are distributed as those of one store with all rows."""

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
    priorities_of,
    rows_of,
    starts_of,
    weights_of,
)

BATCH, BATCHES, AHEAD = 256, 64, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of stores with rows and priorities."""
    folder = tmp_path_factory.mktemp("stores")
    for number in range(len(SIZES)):
        with expstore.open(folder / f"rest{number}.exp", seed=number) as rb:
            fill(rb, number)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with Serving(Settings(path=folder)) as server:
        yield server


def connect(server: Serving, names: list[str], **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    options = {"batch_size": BATCH, "seed": 5, "ahead": AHEAD} | options
    return expstore.connect([f"{server.url}/{name}" for name in names], **options)


def at_rest(server: Serving, **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    return connect(server, [f"rest{number}" for number in range(len(SIZES))], **options)


def draw_all(rb: expstore.cluster.ShardedReplayBuffer) -> TensorDict:
    with rb:
        return torch.cat(list(rb.stream(BATCHES)))


@pytest.mark.guarantee(
    "cluster/distribution",
    "Batches of several stores, and their weights, are distributed as those of one store with all rows, "
    "for every sampler and with `where=`.",
)
def test_rows_are_drawn_uniformly(server: Serving) -> None:
    drawn = draw_all(at_rest(server))
    assert_distributed(place_of(drawn["id"]), np.ones(sum(SIZES)))
    assert "priority_weight" not in drawn.keys()  # noqa: SIM118 - a TensorDict yields values


def test_rows_that_match_are_drawn_uniformly(server: Serving) -> None:
    drawn = draw_all(at_rest(server, where="even"))
    assert_distributed(place_of(drawn["id"]), even().astype(np.float64))


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.parametrize("where", [None, "even"])
def test_rows_are_drawn_by_priority(server: Serving, where: str | None) -> None:
    drawn = draw_all(
        at_rest(server, sampler={"kind": "prioritized", "alpha": ALPHA, "beta": BETA}, where=where)
    )
    masses = powers() * (1.0 if where is None else even())
    places = place_of(drawn["id"])
    assert_distributed(places, masses)
    np.testing.assert_allclose(drawn["priority_weight"].numpy(), weights_of(masses)[places], rtol=1e-6)


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.parametrize("by", ["start", "trajectory"])
def test_slices_are_drawn_as_from_one_store(server: Serving, by: str) -> None:
    drawn = draw_all(at_rest(server, sampler={"kind": "slices", "slice_len": 4, "by": by}))
    chances = starts_of(4)
    if by == "trajectory":
        chances /= np.repeat([steps - 3 for steps in LENGTHS], SIZES)
    assert_distributed(first_rows(drawn, 4), chances)


def test_slices_that_match_are_drawn_as_from_one_store(server: Serving) -> None:
    spec = {"kind": "slices", "num_slices": 64, "by": "start"}
    drawn = draw_all(at_rest(server, sampler=spec, where="even"))
    assert_distributed(first_rows(drawn, 4), starts_of(4) * even())


def test_short_slices_are_cut_at_their_ends(server: Serving) -> None:
    """Slices of 8 steps: episodes of the first and the last shard are shorter."""
    spec = {"kind": "slices", "slice_len": 8, "strict_length": False}
    with at_rest(server, sampler=spec) as rb:
        for drawn in rb.stream(BATCHES):
            places = place_of(drawn["id"])
            flags = drawn["next", "truncated"][:, 0].numpy()
            assert flags.sum() == BATCH // 8
            begins = np.concatenate([[0], np.flatnonzero(flags)[:-1] + 1])
            lengths = np.diff(np.append(begins, flags.size))
            assert (lengths == np.minimum(8, np.array(LENGTHS)[drawn["id"][begins, 0].numpy()])).all()
            assert (np.diff(places)[~flags[:-1]] == 1).all()


@pytest.mark.guarantee("cluster/distribution")
def test_slices_are_drawn_by_priority(server: Serving) -> None:
    spec = {"kind": "prioritized_slices", "slice_len": 4, "alpha": ALPHA, "beta": BETA}
    drawn = draw_all(at_rest(server, sampler=spec))
    masses = powers() * starts_of(4)
    places = first_rows(drawn, 4)
    assert_distributed(places, masses)
    weights = drawn["priority_weight"].reshape(-1, 4).numpy()
    np.testing.assert_allclose(weights, np.repeat(weights_of(masses)[places, None], 4, axis=1), rtol=1e-6)


@pytest.mark.guarantee("cluster/distribution")
def test_newer_rows_of_each_shard_are_drawn_more_often(server: Serving) -> None:
    drawn = draw_all(at_rest(server, sampler={"kind": "recency", "half_life": 40}))
    ages = np.concatenate([np.arange(count)[::-1] for count in SIZES])
    assert_distributed(place_of(drawn["id"]), 0.5 ** (ages / 40))
    matching = draw_all(at_rest(server, sampler={"kind": "recency", "half_life": 40}, where="even"))
    assert_distributed(place_of(matching["id"]), 0.5 ** (ages / 40) * even())


def test_a_sampler_without_masses_would_be_noticed(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if shards are drawn from equally, or weights are not corrected."""

    def ignore_masses(*arguments: Any) -> Any:
        *others, totals = arguments
        return draw_counts(*others, np.ones(totals.size))

    draw_counts = shares.draw_counts
    monkeypatch.setattr(many, "draw_counts", ignore_masses)
    monkeypatch.setattr(many, "find_factors", lambda *_: None)
    with pytest.raises(AssertionError):
        test_rows_are_drawn_uniformly(server)
    drawn = draw_all(at_rest(server, sampler={"kind": "prioritized", "alpha": ALPHA, "beta": BETA}))
    places = place_of(drawn["id"])
    with pytest.raises(AssertionError):
        assert_distributed(places, powers())
    assert not np.allclose(drawn["priority_weight"].numpy(), weights_of(powers())[places], rtol=1e-3)


@pytest.mark.guarantee("cluster/distribution")
@pytest.mark.slow
def test_batches_keep_their_distribution_while_others_write(folder: Path, server: Serving) -> None:
    """Masses are those of the last answers. Counts follow from the masses that a batch was drawn with."""
    names = []
    for number, count in enumerate((100, 100)):
        with expstore.open(folder / f"grows{number}.exp", seed=number) as rb:
            ids = rb.extend(rows_of(count, 10), return_ids=True)
            rb.update_priority(id=ids, priority=torch.from_numpy(priorities_of(number, count)))
        names.append(f"grows{number}")
    written, rng = [100, 100], np.random.default_rng(1)
    masses = [(priorities_of(n, 100).astype(np.float32).astype(np.float64) + EPS) ** ALPHA for n in range(2)]
    expected, counts = np.zeros((2, 1000)), np.zeros((2, 1000))
    changed = 0
    spec = {"kind": "prioritized", "alpha": ALPHA, "beta": BETA}
    writers = [expstore.connect(f"{server.url}/{name}") for name in names]
    with connect(server, names, sampler=spec, ahead=2) as rb:
        for step in range(120):
            drawn, info = rb.sample(return_info=True)
            draw = info["draw"]
            chances = []
            for shard in range(2):
                mass = draw.masses[shard]
                at_draw = masses[shard]
                assert mass.rows == at_draw.size
                np.testing.assert_allclose(at_draw.sum(), mass.total, rtol=1e-9)
                share = draw.assumed[shard] / sum(draw.assumed.values())
                changed += draw.assumed[shard] != mass.total
                chances.append(share * at_draw / mass.total)
                expected[shard, : mass.rows] += BATCH * chances[-1]
            ids = drawn["id"].numpy()
            np.add.at(counts, (ids[:, 0], ids[:, 1] - 1), 1)
            least = min(float(each.min()) for each in chances)
            mine = np.array([chances[shard][row - 1] for shard, row in ids])
            np.testing.assert_allclose(drawn["priority_weight"].numpy(), (mine / least) ** -BETA, rtol=1e-6)
            if step % 2:  # after both batches that were drawn together
                shard = int(rng.integers(2))
                more = int(rng.integers(1, 12))
                ids = writers[shard].extend(rows_of(more, 10, written[shard]))
                given = rng.random(more) * 3 + 0.01
                writers[shard].update_priority(id=ids, priority=given)
                written[shard] += more
                powered = (given.astype(np.float32).astype(np.float64) + EPS) ** ALPHA
                masses[shard] = np.append(masses[shard], powered)
    for writer in writers:
        writer.close()
    assert changed > 60
    some = expected >= 5
    found = ((counts - expected)[some] ** 2 / expected[some]).sum()
    assert found < limit_of(int(some.sum()) + 1)
