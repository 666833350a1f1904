"""Batches over HTTP equal those in-process: single batches, streams, named samplers, conditions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from expstore.wire.codec import Codec, meaning_of, note_of
from expstore.wire.stream import frames_in
from tests.support.arrow_bodies import ACCEPT_ARROW, batch_of, post_rows, rows_of
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import Serving

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with api_client(tmp_path) as client:
        client.put(RUN, json={"capacity": 1000, "seed": 3}).raise_for_status()
        yield client


@contextmanager
def serve(path: Path, **settings: Any) -> Iterator[httpx.Client]:
    """Serve a store of 100 rows; yield a client over a connection, which reads a stream while it is sent."""
    with (
        Serving(Settings(path=path, **settings)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        client.put(RUN, json={}).raise_for_status()
        post_rows(client, 100).raise_for_status()
        yield client


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[httpx.Client]:
    with serve(tmp_path) as client:
        yield client


def sample(client: httpx.Client, **asked: Any) -> TensorDict:
    answer = client.post(f"{RUN}/sample", json=asked, headers=ACCEPT_ARROW)
    assert answer.status_code == 200, answer.text
    return rows_of(answer.content)


def streamed(client: httpx.Client, **asked: Any) -> list[TensorDict]:
    answer = client.post(f"{RUN}/sample/stream", json=asked, headers=ACCEPT_ARROW)
    assert answer.status_code == 200, answer.text
    with pa.ipc.open_stream(answer.content) as reader:
        codec = Codec(meaning_of(reader.schema).schema)
        return [codec.build(codec.decode(batch)) for batch in reader]


def test_batches_are_those_of_the_store(client: httpx.Client, tmp_path: Path) -> None:
    post_rows(client, 300).raise_for_status()
    drawn = [sample(client, batch_size=32)["id"].tolist() for _ in range(3)]
    with expstore.open(tmp_path / "other.exp", capacity=1000, seed=3) as rb:
        rb.extend(batch_of(300))
        assert drawn == [rb.sample(32)["id"].tolist() for _ in range(3)]


def test_a_sampler_is_named_for_its_defaults(client: httpx.Client) -> None:
    post_rows(client, 60).raise_for_status()
    ours = sample(client, batch_size=9, seed=1, draw=0, sampler="prioritized")
    theirs = sample(client, batch_size=9, seed=1, draw=0, sampler={"kind": "prioritized"})
    assert ours["id"].tolist() == theirs["id"].tolist()


def test_no_named_sampler_has_the_name_of_a_kind(client: httpx.Client) -> None:
    """Otherwise a client that means the kind would draw with another client's sampler."""
    post_rows(client, 60).raise_for_status()
    document = client.get("/openapi.json").json()["components"]["schemas"]["NamedSampler"]
    kinds = [*document["properties"]["sampler"]["discriminator"]["mapping"]]
    assert len(kinds) == 9
    body = {"sampler": {"kind": "without_replacement", "shuffle": False}}
    for kind in kinds:
        refused = client.put(f"{RUN}/samplers/{kind}", json=body)
        assert refusal_of(refused) == (422, "request"), kind
    assert client.get(f"{RUN}/samplers").json() == {"samplers": {}}
    client.put(f"{RUN}/samplers/uniform_", json=body).raise_for_status()


def test_draws_are_numbered(client: httpx.Client) -> None:
    """Requests with numbers, a stream, and requests whose numbers the server counts draw the same."""
    post_rows(client, 300).raise_for_status()
    body = {"ids": [*range(1, 301), 5000], "priorities": [float(n % 7 + 1) for n in range(301)]}
    assert client.post(f"{RUN}/priorities", json=body).json() == {"updated": 300}
    asked = {"batch_size": 32, "sampler": {"kind": "prioritized", "alpha": 0.8}, "seed": 7}
    wanted = [sample(client, **asked, draw=number)["id"].tolist() for number in range(3)]
    assert [batch["id"].tolist() for batch in streamed(client, **asked, draw=0, batches=3)] == wanted
    assert [sample(client, **asked)["id"].tolist() for _ in range(3)] == wanted


def test_batches_say_what_they_were_drawn_from(client: httpx.Client) -> None:
    """In the metadata of each message of a stream, in single answers, in JSON, and without drawing."""
    post_rows(client, 40).raise_for_status()
    values = [float(number % 7 + 1) for number in range(1, 41)]
    client.post(f"{RUN}/priorities", json={"ids": [*range(1, 41)], "priorities": values})
    total = sum((np.float64(value) + 1e-8) ** 0.6 for value in values)
    cases: list[tuple[dict[str, Any], float, float | None, int]] = [
        ({"sampler": None}, 40, None, 1),
        ({"sampler": {"kind": "uniform"}, "where": "action < 10"}, 10, None, 1),
        ({"sampler": "prioritized"}, total, 0.4, 1),
        ({"sampler": {"kind": "slices", "slice_len": 4}}, 4, None, 4),
        ({"sampler": {"kind": "slices", "slice_len": 4, "by": "start"}, "where": "action < 3"}, 3, None, 4),
        ({"sampler": {"kind": "recency", "half_life": 2}}, (1 - 0.5**20) / (1 - 0.5**0.5), None, 1),
    ]
    for asked, mass, beta, unit in cases:
        told = client.post(f"{RUN}/mass", json=asked | {"batch_size": 8}).raise_for_status().json()
        assert told["mass"] == pytest.approx(mass, rel=1e-12)
        assert (told["beta"], told["unit"], told["rows"], told["largest_priority"]) == (beta, unit, 40, 7.0)
        assert told["smallest"] == pytest.approx(1.0)
        body = asked | {"batch_size": 8, "seed": 1, "draw": 0, "batches": 2}
        single = client.post(f"{RUN}/sample", json={name: body[name] for name in body if name != "batches"})
        assert single.json()["drawn_from"] == told
        for accept in (ACCEPT_ARROW, {"Accept": f"{ACCEPT_ARROW['Accept']};compression=zstd"}):
            answer = client.post(f"{RUN}/sample/stream", json=body, headers=accept).raise_for_status()
            with pa.ipc.open_stream(answer.content) as reader:
                notes = [reader.read_next_batch_with_custom_metadata().custom_metadata for _ in range(2)]
            assert [json.loads(note[b"expstore.draw"]) for note in notes] == [told] * 2
            frames = frames_in(bytearray(answer.content))
            assert [note_of(frame) for frame in frames] == [told] * 2
    client.put(f"{RUN}/samplers/pass", json={"sampler": {"kind": "without_replacement"}})
    before = client.post(f"{RUN}/mass", json={"sampler": "pass"}).json()
    assert (before["mass"], before["rows"], before["left"]) == (40, 40, 0)  # no pass has begun
    drawn = client.post(f"{RUN}/sample", json={"sampler": "pass", "batch_size": 30}).json()["drawn_from"]
    assert (drawn["mass"], drawn["left"]) == (40, 0)
    rest = client.post(f"{RUN}/mass", json={"sampler": "pass"}).json()
    assert (rest["mass"], rest["rows"], rest["left"]) == (10, 40, 10)
    client.put(
        f"{RUN}/samplers/runs", json={"sampler": {"kind": "slices_without_replacement", "slice_len": 2}}
    )
    assert client.post(f"{RUN}/mass", json={"sampler": "runs"}).json()["mass"] is None


def test_another_store_is_refused(client: httpx.Client) -> None:
    uuid = client.get(RUN).json()["uuid"]
    assert client.get(RUN, headers={"X-Store": uuid}).status_code == 200
    assert refusal_of(client.get(RUN, headers={"X-Store": "f" * 32})) == (409, "other_store")


def test_a_waiting_client_gets_rows_when_they_come(client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sample, client, batch_size=8, wait=60)
        post_rows(client, 20).raise_for_status()
        assert len(waiting.result(60)["id"]) == 8
    refused = client.post(f"{RUN}/sample", json={"batch_size": 8, "where": "action > 1000"})
    assert refusal_of(refused) == (409, "not_ready")
    assert refused.headers["Retry-After"] == "1"


def test_conditions(client: httpx.Client) -> None:
    post_rows(client, 300).raise_for_status()
    drawn = sample(client, batch_size=64, where='next.reward >= 100 AND "action" <> 150', seed=1, draw=0)
    assert (drawn["action"] >= 100).all()
    for bad in ("lpad('x', 2000000000, 'y') = 'x'", "action = 1; DROP TABLE x", ""):
        assert client.post(f"{RUN}/sample", json={"where": bad}).status_code == 422, bad
    unknown = client.post(f"{RUN}/sample", json={"where": "speed > 1"})
    assert refusal_of(unknown) == (422, "query")


def test_streams_are_whole_or_say_so(client: httpx.Client) -> None:
    post_rows(client, 300).raise_for_status()
    asked = {"batch_size": 256, "batches": 40, "seed": 1}
    assert len(streamed(client, **asked)) == 40
    zstd = {"Accept": f"{ACCEPT_ARROW['Accept']};compression=zstd"}
    packed = client.post(f"{RUN}/sample/stream", json=asked, headers=zstd)
    with pa.ipc.open_stream(packed.content) as reader:
        assert sum(batch.num_rows for batch in reader) == 40 * 256
    refused = client.post(f"{RUN}/sample/stream", json=asked, headers={"Accept": "application/json"})
    assert refused.status_code == 406


def test_a_stream_may_be_left(connected: httpx.Client) -> None:
    with connected.stream("POST", f"{RUN}/sample/stream", json={"batch_size": 256}) as endless:
        size = 0
        for part in endless.iter_raw():
            size += len(part)
            if size > 3_000_000:
                break
    post_rows(connected, 10, 100).raise_for_status()  # the server still answers


def test_a_stream_sends_all_batches_that_it_has_drawn(tmp_path: Path) -> None:
    """Although the next one cannot be drawn: drawn rows are counted, and clients may wait for them."""
    with serve(tmp_path, wait_seconds=0.2) as client:
        client.put(f"{RUN}/samplers/once", json={"sampler": {"kind": "consuming"}}).raise_for_status()
        asked = {"sampler": "once", "batch_size": 10, "batches": 20}
        found: list[int] = []
        with client.stream("POST", f"{RUN}/sample/stream", json=asked) as answer:
            lines = answer.iter_lines()
            for _ in range(10):
                found += json.loads(next(lines))["rows"]["id"]
            with pytest.raises(httpx.RemoteProtocolError):  # there are no rows for ten of the batches
                next(lines)
    assert sorted(found) == [*range(1, 101)]


def test_bad_requests(client: httpx.Client) -> None:
    post_rows(client, 300).raise_for_status()
    for asked in (
        {"batch_size": 0}, {"batch_size": -1}, {"batch_size": "x"}, {"batch_size": 10**9}, {"draw": 3},
        {"sampler": {"kind": "other"}}, {"sampler": {"kind": "slices"}}, {"seed": 1 << 63}, {"unknown": 1},
        {"sampler": {"kind": "slices", "slice_len": 2, "num_slices": 2}}, {"sampler": "no/name"},
        {"sampler": {"kind": "without_replacement"}},
    ):  # fmt: skip
        assert refusal_of(client.post(f"{RUN}/sample", json=asked))[0] == 422, asked


def test_priorities_that_are_sent_again_undo_nothing(client: httpx.Client) -> None:
    post_rows(client, 10).raise_for_status()
    asked = {"ids": [1, 2, 99], "priorities": [2.0, 2.0, 2.0]}
    first = {"Idempotency-Key": "session-1"}
    for headers, priority in ((first, 2.0), ({}, 5.0), (first, 2.0)):
        body = asked | {"priorities": [priority] * 3}
        assert client.post(f"{RUN}/priorities", json=body, headers=headers).json() == {"updated": 2}
    assert client.get(RUN).json()["largest_priority"] == 5.0
    weighed = client.post(f"{RUN}/mass", json={"sampler": {"kind": "prioritized", "alpha": 1.0}}).json()
    assert weighed["mass"] == pytest.approx(2 * 5.0 + 8 * 1.0)
    refused = client.post(f"{RUN}/priorities", json=asked, headers={"Idempotency-Key": "x" * 200})
    assert refused.status_code == 400
