"""Responses are limited in bytes; the size is computed before rows are read."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.storages.columns.arrow.segments import Segments
from tests.support.arrow_bodies import ACCEPT_ARROW, rows_of
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import serving

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"
JSON = {"Accept": "application/json"}
LIMIT = 100_000


def most_memory_of(process: int) -> int:
    """Return the largest memory that a process has had, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def largest_of(answer: httpx.Response) -> int:
    """Return the largest batch size that a refusal names."""
    assert refusal_of(answer) == (413, "too_large")
    found = re.search(r"largest batch_size that fits is (\d+)", answer.json()["error"]["message"])
    assert found, answer.text
    return int(found[1])


@pytest.mark.guarantee(
    "access/limits",
    "An answer has at most `max_answer` bytes; heads, bodies and answers have deadlines, and idle "
    "connections do not block other clients.",
)
@pytest.mark.slow
def test_a_million_rows_of_100_kilobytes_are_refused_at_once(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=100) as rb:
        rb.extend(TensorDict({"x": torch.zeros(100, 25_600)}, [100]))
    with serving(tmp_path) as (child, facts), expstore.connect(facts["listening"] + "/run") as rb:
        assert len(rb.sample(8)) == 8
        before = most_memory_of(child.pid)
        with httpx.Client(base_url=facts["listening"], headers=ACCEPT_ARROW, timeout=60) as client:
            for path in ("sample", "sample/stream"):
                began = time.monotonic()
                refused = client.post(f"{RUN}/{path}", json={"batch_size": 1_000_000})
                assert time.monotonic() - began < 1
                fitting = largest_of(refused)
                assert fitting == (256 << 20) // (102_400 + 16)
        with pytest.raises(expstore.ExpStoreError, match=f"largest batch_size that fits is {fitting}"):
            rb.sample(1_000_000)
        with pytest.raises(expstore.ExpStoreError, match="largest batch_size"):
            rb.by_id(np.arange(1_000_000) % 100 + 1)
        assert most_memory_of(child.pid) - before < 50 << 20
        assert len(rb.sample(8)) == 8


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with expstore.open(tmp_path / "run.exp", seed=1) as rb:
        rb.extend(TensorDict({"x": torch.zeros(500, 248)}, [500]))
    with api_client(tmp_path, max_answer=LIMIT, headers=ACCEPT_ARROW) as client:
        yield client


@pytest.mark.guarantee("access/limits")
def test_the_largest_batch_size_of_the_error_fits(client: httpx.Client) -> None:
    for asked in ({}, {"sampler": {"kind": "slices", "slice_len": 1}}, {"where": "x[1] = 0", "seed": 1}):
        for path in ("sample", "sample/stream"):
            body: dict[str, Any] = {**asked, **({"batches": 3} if "stream" in path else {})}
            fitting = largest_of(client.post(f"{RUN}/{path}", json=body | {"batch_size": 1000}))
            assert fitting == LIMIT // (4 * 248 + 16)
            assert client.post(f"{RUN}/{path}", json=body | {"batch_size": fitting}).status_code == 200
            refused = client.post(f"{RUN}/{path}", json=body | {"batch_size": fitting + 1})
            assert largest_of(refused) == fitting
    ids = list(range(1, 401))
    fitting = largest_of(client.post(f"{RUN}/rows", json={"ids": ids}))
    assert client.post(f"{RUN}/rows", json={"ids": ids[:fitting]}).status_code == 200
    assert largest_of(client.get(f"{RUN}/episodes/1")) == fitting


def test_json_is_counted_as_long_as_it_may_become(client: httpx.Client) -> None:
    refused = client.post(f"{RUN}/sample", json={"batch_size": 50}, headers=JSON)
    fitting = largest_of(refused)
    assert fitting == LIMIT // (24 * 250)
    answer = client.post(f"{RUN}/sample", json={"batch_size": fitting}, headers=JSON)
    assert answer.status_code == 200
    assert len(answer.content) <= LIMIT


def test_a_refused_draw_does_not_count(client: httpx.Client) -> None:
    spec = {"sampler": {"kind": "consuming"}}
    client.put(f"{RUN}/samplers/once", json=spec).raise_for_status()
    largest_of(client.post(f"{RUN}/sample", json={"sampler": "once", "batch_size": 500}))
    found: list[int] = []
    for _ in range(10):
        answer = client.post(f"{RUN}/sample", json={"sampler": "once", "batch_size": 50})
        found += rows_of(answer.content)["id"].tolist()
    assert sorted(found) == list(range(1, 501))


@pytest.mark.guarantee("access/limits")
def test_rows_without_a_fixed_size_are_counted_by_their_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [10, 30_000, 50, 45_000, 0, 70_000, 20]
    texts = NonTensorStack(*["x" * length for length in lengths])
    with expstore.open(tmp_path / "run.exp", layout="arrow") as rb:
        rb.extend(TensorDict({"text": texts, "n": torch.arange(7)}, [7]))

    def unread(*_: Any, **__: Any) -> Any:
        raise AssertionError("values were read")

    sizes = [16 + 8 + 4 + length for length in lengths]
    with api_client(tmp_path, max_answer=LIMIT, headers=ACCEPT_ARROW) as client:
        for ids in ([1, 2, 3, 4, 5, 6, 7], [6, 6], [2, 2, 2, 2], [7, 1, 6, 4]):
            ends = np.cumsum([sizes[number - 1] for number in ids])
            with monkeypatch.context() as patch:
                patch.setattr(Segments, "gather_ids", unread)
                refused = client.post(f"{RUN}/rows", json={"ids": ids})
            assert largest_of(refused) == int((ends <= LIMIT).sum())
        assert client.post(f"{RUN}/rows", json={"ids": [1, 2, 3, 4]}).status_code == 200
        assert client.post(f"{RUN}/rows", json={"ids": [1, 2, 3, 4]}, headers=JSON).status_code == 413
        assert largest_of(client.get(f"{RUN}/episodes/1")) == 5
        assert client.post(f"{RUN}/sample", json={"batch_size": 2000}).status_code == 413


def test_results_and_episodes_are_bounded(client: httpx.Client) -> None:
    asked = {"query": "SELECT x FROM transitions"}
    for headers in (ACCEPT_ARROW, JSON):
        cut = client.post(f"{RUN}/sql", json=asked, headers=headers)
        assert cut.headers["X-Truncated"] == "true"
        assert len(cut.content) < LIMIT + 10_000
    assert client.get(f"{RUN}/episodes", headers=JSON).status_code == 200
    note = {"info": {"note": "x" * 20_000}}
    client.patch(f"{RUN}/episodes/1", json=note, headers=JSON).raise_for_status()
    assert refusal_of(client.get(f"{RUN}/episodes", headers=JSON)) == (413, "too_large")
    assert client.get(f"{RUN}/episodes", headers=ACCEPT_ARROW).status_code == 200


@pytest.mark.guarantee("access/limits")
@pytest.mark.slow
def test_sql_cannot_make_an_answer_of_any_size(tmp_path: Path) -> None:
    """Values that are small in Arrow: booleans, members with long names, texts of an ENUM."""
    with expstore.open(tmp_path / "run.exp", capacity=100) as rb:
        rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    name = "k" * 4000
    with api_client(tmp_path, max_answer=1 << 20, sql_seconds=30.0) as client:
        for query in (
            "SELECT repeat([true], 100000) FROM range(10)",
            f"SELECT repeat([{{'{name}': true}}], 10000)",
            f"SELECT repeat(['{name}'::ENUM('{name}')], 10000)",
        ):
            assert refusal_of(client.post(f"{RUN}/sql", json={"query": query})) == (413, "too_large")
        fits = client.post(f"{RUN}/sql", json={"query": "SELECT repeat([true], 30000)"})
        assert fits.status_code == 200
        assert len(fits.content) < 1 << 20
