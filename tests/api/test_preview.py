"""Previews of samplers: what they say, and that they change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import expstore
from tests.support.arrow_bodies import ACCEPT_ARROW, batch_of, rows_of
from tests.support.asgi import api_client, refusal_of

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


def make_store(path: Path) -> None:
    with expstore.open(path, seed=3, capacity=100) as rb:
        rb.extend(batch_of(90), source="left")
        rb.extend(batch_of(30, 1000), source='</script>"\u05d0')
        rb.update_priority(id=torch.arange(21, 121), priority=torch.arange(1.0, 101.0))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    make_store(tmp_path / "run.exp")
    with api_client(tmp_path) as client:
        yield client


def ask(client: httpx.Client, **body: Any) -> Any:
    answer = client.post(f"{RUN}/sample/preview", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def draw(client: httpx.Client, **body: Any) -> list[int]:
    answer = client.post(f"{RUN}/sample", json={"batch_size": 16, **body}, headers=ACCEPT_ARROW)
    assert answer.status_code == 200, answer.text
    ids: list[int] = rows_of(answer.content)["id"].tolist()
    return ids


def test_uniform_draws(client: httpx.Client) -> None:
    told = ask(client, batches=200)
    assert (told["rows"], told["matching"], told["weights"]) == (51_200, None, None)
    assert sum(told["ages"]["counts"]) == 51_200
    assert sum(told["ages"]["stored"]) == 100
    drawn, stored = np.array(told["priorities"]["counts"]), np.array(told["priorities"]["stored"])
    assert np.abs(drawn / 512 - stored).max() < 0.5
    assert told["episodes"] == {"drawn": 10, "of": 10}
    assert [source["name"] for source in told["sources"]] == ["left", '</script>"\u05d0']
    for source, share in zip(told["sources"], (0.7, 0.3), strict=True):
        assert source["share_stored"] == share
        assert source["share_drawn"] == pytest.approx(share, abs=0.02)


def test_prioritized_draws(client: httpx.Client) -> None:
    told = ask(client, sampler={"kind": "prioritized", "alpha": 1.0, "beta": 1.0}, batches=100)
    shares = np.array(told["priorities"]["counts"]) / told["rows"]
    middles = (np.array(told["priorities"]["edges"][1:]) + told["priorities"]["edges"][:-1]) / 2
    stored = np.array(told["priorities"]["stored"])
    expected = stored * middles / (stored * middles).sum()
    assert np.abs(shares - expected).max() < 0.01
    assert told["weights"]["max"] == pytest.approx(1.0)
    assert told["weights"]["min"] == pytest.approx(0.01, rel=0.01)


def test_conditions_and_slices(client: httpx.Client) -> None:
    told = ask(client, where="action >= 1000", sampler={"kind": "slices", "slice_len": 4}, batches=2)
    assert told["matching"] == 30
    assert told["episodes"] == {"drawn": 3, "of": 10}
    assert told["sources"][0]["share_drawn"] == 1.0
    assert ask(client, sampler="recency", batch_size=1, batches=1)["rows"] == 1


def test_draws_are_those_of_the_seed(client: httpx.Client) -> None:
    """And the same again, as long as the rows are the same."""
    first, second = (ask(client, seed=9, batches=3, batch_size=16) for _ in range(2))
    del first["seconds"], second["seconds"], first["ages"], second["ages"]
    assert first == second
    ids = [number for k in range(3) for number in draw(client, seed=9, draw=k)]
    left = np.mean([number <= 90 for number in ids])
    shares = {source["name"]: source["share_drawn"] for source in first["sources"]}
    assert shares["left"] == pytest.approx(left)


@pytest.mark.slow
def test_a_preview_changes_nothing(tmp_path: Path) -> None:
    """Draws of the store, of a seed, and of a named sampler follow as without it; so do counts."""
    found = []
    limits = {"min_size": 1, "samples_per_insert": 4.0, "error_buffer": 200.0}
    for name in ("with", "without"):
        make_store(tmp_path / name / "run.exp")
        with api_client(tmp_path / name, **limits) as client:
            body = {"sampler": {"kind": "consuming", "max_sample_count": 2}}
            client.put(f"{RUN}/samplers/mine", json=body).raise_for_status()
            prioritized = {"sampler": {"kind": "prioritized"}, "seed": 5}
            draws = [draw(client), draw(client, **prioritized), draw(client, sampler="mine")]
            if name == "with":
                slices = {"kind": "slices", "slice_len": 2}
                for sampler in ("uniform", "recency", {"kind": "prioritized"}, slices):
                    ask(client, sampler=sampler, batch_size=1000, seed=5)
            draws += [draw(client), draw(client, **prioritized), draw(client, sampler="mine")]
            stats = client.get(f"{RUN}/stats").json()
            summary = client.get(f"{RUN}/summary").json()
            known = {key: stats[key] for key in ("draws", "redraws", "rate_limiter", "size", "write_count")}
            found.append((draws, known, summary["times_sampled"], client.get(f"{RUN}/samplers").json()))
    assert found[0] == found[1]


def test_previews_that_are_refused(client: httpx.Client, tmp_path: Path) -> None:
    body = {"sampler": {"kind": "without_replacement"}}
    client.put(f"{RUN}/samplers/mine", json=body).raise_for_status()
    for body in (
        {"sampler": "mine"}, {"sampler": "nobody"}, {"sampler": {"kind": "consuming"}}, {"where": "sleep(1)"},
        {"where": "nothing > 1"}, {"batch_size": 100_000, "batches": 3}, {"batches": 0}, {"more": 1},
    ):  # fmt: skip
        assert client.post(f"{RUN}/sample/preview", json=body).status_code == 422, body
    none = client.post(f"{RUN}/sample/preview", json={"where": "action < 0"})
    assert refusal_of(none) == (409, "not_ready")
    client.put("/v1/stores/empty", json={}).raise_for_status()
    assert client.post("/v1/stores/empty/sample/preview", json={}).status_code == 409


@pytest.mark.parametrize("layout", ["zarr", "arrow"])
def test_readers_preview(tmp_path: Path, layout: str) -> None:
    with expstore.open(tmp_path / "run.exp", layout=layout) as rb:
        rb.extend(batch_of(20))
        rb.flush()  # readers see small batches 0.1 s later otherwise
        with api_client(tmp_path, read_only=True) as client:
            told = ask(client)
            assert (told["rows"], told["priorities"]) == (5120, None)
            assert told["sources"] == [{"name": "@1", "share_drawn": 1.0, "share_stored": 1.0}]
