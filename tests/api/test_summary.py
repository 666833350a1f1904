"""The summary of a store: from a writing and a reading server, of empty, Zarr and Arrow stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api.page.histograms import ages_of, choose_ids, priorities_of, times_sampled
from expstore.api.page.summary import Summarizer
from tests.support.arrow_bodies import ARROW, batch_of, body_of, post_rows
from tests.support.asgi import api_client
from tests.support.waits import ManualClock

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with api_client(tmp_path) as client:
        yield client


def read_summary(client: httpx.Client) -> Any:
    answer = client.get(f"{RUN}/summary")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_writer_summarizes_everything(client: httpx.Client) -> None:
    client.put(RUN, json={"capacity": 100, "meta": {"actions": ["left", "<right>"]}}).raise_for_status()
    post_rows(client, 25, source="left").raise_for_status()
    post_rows(client, 10, 100, source="right").raise_for_status()
    client.post(f"{RUN}/priorities", json={"ids": [1, 2], "priorities": [3.0, 4.0]}).raise_for_status()
    client.post(f"{RUN}/dumps", json={"tag": "first"}).raise_for_status()
    client.post(f"{RUN}/sample", json={"batch_size": 7}).raise_for_status()
    told = read_summary(client)
    assert (told["name"], told["storage"], told["rows"], told["capacity"]) == ("run", "zarr", 35, 100)
    assert (told["written"], told["generation"], told["read_only"]) == (35, 1, False)
    assert len(told["uuid"]) == 32
    assert min(told["bytes"], told["free_bytes"]) > 0
    assert told["episodes"] == {"count": 4, "open": 1, "terminated": 3, "truncated": 0, "cut": 0}
    assert told["durability"] == "process"
    assert told["unsynced_rows"] is not None
    assert sum(told["ages"]["counts"]) == 35
    assert len(told["ages"]["edges"]) == 65
    assert sum(told["priorities"]["counts"]) == 35
    assert (told["priorities"]["edges"][0], told["priorities"]["edges"][-1]) == (1.0, 4.0)
    assert (told["times_sampled"], told["limiter"]) == (None, None)
    assert [(one["tag"], one["rows"]) for one in told["versions"]] == [("first", 35)]
    (session,) = told["sessions"]
    assert (session["sources"], session["ended"]) == (2, None)
    assert min(told["rates"]["rows_in"], told["rates"]["rows_out"]) > 0
    fields = {field["name"]: field for field in told["fields"]}
    assert fields["action"]["actions"] == ["left", "<right>"]
    assert fields["observation"]["kind"] == "vector"
    assert (fields["next.reward"]["kind"], fields["next.reward"]["shape"]) == ("scalar", [1])
    assert fields["next.reward"]["layout"] == "flat"
    assert fields["next.reward"]["actions"] is None
    assert all(field["bytes"] > 0 for field in told["fields"])


def test_sessions_have_their_provenance(client: httpx.Client) -> None:
    """The first episode of a source has it; texts and very long objects are left out."""
    seeds = {"environment": "CartPole-v1", "seed": 3}
    for number, (origin, expected) in enumerate(
        ((seeds, seeds), ("<b>", None), ({"text": "x" * 5000}, None))
    ):
        run = f"/v1/stores/run{number}"
        client.put(run, json={}).raise_for_status()
        for first, source in ((0, "left"), (100, "right")):
            rows = {"content": body_of(batch_of(10, first)), "headers": ARROW, "params": {"source": source}}
            client.post(f"{run}/extend", **rows).raise_for_status()  # type: ignore[arg-type]
        client.patch(f"{run}/episodes/2", json={"info": {"origin": origin}}).raise_for_status()
        (session,) = client.get(f"{run}/summary").json()["sessions"]
        assert session["provenance"] == expected, origin


def test_an_empty_store_has_a_summary(client: httpx.Client) -> None:
    client.put(RUN, json={}).raise_for_status()
    told = read_summary(client)
    assert (told["rows"], told["fields"], told["sessions"], told["versions"]) == (0, [], [], [])
    assert (told["ages"], told["priorities"], told["times_sampled"]) == (None, None, None)
    assert told["episodes"]["count"] == 0


@pytest.mark.parametrize("layout", ["zarr", "arrow"])
def test_a_reader_follows_a_writer(tmp_path: Path, layout: str) -> None:
    """What only the writer knows is null."""
    with expstore.open(tmp_path / "run.exp", layout=layout) as rb:
        rb.extend(batch_of(20), source="left")
        rb.flush()  # readers see small batches 0.1 s later otherwise
        with api_client(tmp_path, read_only=True) as client:
            told = read_summary(client)
            assert (told["rows"], told["storage"], told["read_only"]) == (20, layout, True)
            assert (told["durability"], told["unsynced_rows"], told["limiter"]) == (None, None, None)
            assert told["episodes"]["terminated"] == 2
            assert sum(told["ages"]["counts"]) == 20
            assert told["priorities"] is None


def test_kinds_of_fields(client: httpx.Client) -> None:
    fields = {
        "pixels": ["uint8", [84, 84, 3]], "chw": ["uint8", [3, 16, 16]], "stack": ["uint8", [4, 16, 16]],
        "grey": ["uint8", [16, 16]], "camera": ["float32", [16, 16, 3]], "matrix": ["float32", [16, 16]],
        "note": "string", "prompt": ["int64", [None]], "token_ids": ["int32", [8]], "x": "float32",
    }  # fmt: skip
    client.put(RUN, json={"storage": "arrow", "fields": fields}).raise_for_status()
    told = {one["name"]: (one["kind"], one["image_layout"]) for one in read_summary(client)["fields"]}
    assert told == {
        "pixels": ("image", "HWC"), "chw": ("image", "CHW"), "stack": ("image", "stacked"),
        "grey": ("image", "HW"), "camera": ("image", "HWC"), "matrix": ("other", None),
        "note": ("text", None), "prompt": ("tokens", None), "token_ids": ("tokens", None),
        "x": ("scalar", None),
    }  # fmt: skip


def test_hostile_texts_stay_texts(client: httpx.Client) -> None:
    text = "</script><b>\"'\u202e" + "x" * 5000
    client.put(RUN, json={"meta": {"note": text, "actions": [text]}}).raise_for_status()
    post_rows(client, 5)
    answer = client.get(f"{RUN}/summary")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.json()["meta"]["note"] == text


def test_times_sampled_are_counted_where_a_sampler_counts(client: httpx.Client) -> None:
    client.put(RUN, json={}).raise_for_status()
    post_rows(client, 10)
    body = {"sampler": {"kind": "consuming", "max_sample_count": 3}}
    client.put(f"{RUN}/samplers/mine", json=body).raise_for_status()
    client.post(f"{RUN}/sample", json={"batch_size": 4, "sampler": "mine"}).raise_for_status()
    told = read_summary(client)["times_sampled"]
    assert told["counts"][:2] == [6, 4]
    assert told["edges"][:3] == [0, 1, 2]


def test_a_summary_is_kept_for_a_second_and_rates_for_ten(tmp_path: Path) -> None:
    clock, drawn = ManualClock(), [0]
    with expstore.open(tmp_path / "run.exp") as rb:
        keeper = Summarizer("run", tmp_path / "run.exp", rb, lambda: drawn[0], clock)
        first = keeper.summarize()
        assert (first.rates.rows_in, first.rates.seconds) == (None, 0.0)
        rb.extend(batch_of(20))
        clock.now += 0.5
        assert keeper.summarize() is first
        drawn[0] = 8
        clock.now += 3.5
        second = keeper.summarize()
        assert (second.rows, second.rates.rows_in, second.rates.rows_out) == (20, 5.0, 2.0)
        clock.now += 20.0
        third = keeper.summarize()
        assert (third.rates.rows_in, third.rates.seconds) == (0.0, 20.0)


def test_priorities_of_several_decades_have_wider_bins(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(batch_of(200))
        values = torch.logspace(-6, 3, 200)
        values[0] = 0
        rb.update_priority(id=torch.arange(1, 201), priority=values)
        ids = choose_ids(rb.storage)
        found = priorities_of(rb.storage, ids)
        assert found is not None
        steps = np.diff(np.log(found.edges))
        assert np.allclose(steps, steps[0])
        assert sum(found.counts) == 200
        assert min(found.counts) > 0


def test_many_rows_are_sampled_evenly(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=150_000) as rb:
        for first in range(0, 200_000, 50_000):
            rb.extend(TensorDict({"x": torch.arange(first, first + 50_000)}, [50_000]))
        ids = choose_ids(rb.storage)
        assert (ids.size, ids[0], ids[-1]) == (65_536, 50_001, 200_000)
        assert set(np.diff(ids).tolist()) == {2, 3}
        ages = ages_of(rb.storage, ids)
        assert ages is not None
        assert sum(ages.counts) == 65_536
        assert priorities_of(rb.storage, ids) is times_sampled(rb.storage, ids) is None
