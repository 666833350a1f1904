"""Batches over HTTP equal those in-process: single batches, streams, named samplers, conditions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from expstore.samplers import PrioritizedSampler, SliceSampler
from expstore.wire.codec import Codec, meaning_of, note_of
from expstore.wire.stream import frames_in
from tests.support.arrow_bodies import ACCEPT_ARROW, batch_of, post_rows, rows_of
from tests.support.servers import Serving

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    settings = Settings(path=tmp_path, wait_seconds=20)
    with Serving(settings) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.put(RUN, json={"capacity": 1000, "seed": 3}).raise_for_status()
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
        assert (refused.status_code, refused.json()["error"]["kind"]) == (422, "request"), kind
    assert client.get(f"{RUN}/samplers").json() == {"samplers": {}}
    client.put(f"{RUN}/samplers/uniform_", json=body).raise_for_status()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("spec", "sampler"),
    [
        (None, None),
        ({"kind": "prioritized", "alpha": 0.8, "beta": 0.5}, PrioritizedSampler(alpha=0.8, beta=0.5)),
        ({"kind": "slices", "slice_len": 4}, SliceSampler(slice_len=4)),
    ],
)
def test_a_seed_draws_the_same_everywhere(
    client: httpx.Client, tmp_path: Path, spec: Any, sampler: Any
) -> None:
    post_rows(client, 300).raise_for_status()
    ids = list(range(1, 301))
    priorities = [float(number % 7 + 1) for number in ids]
    updated = client.post(f"{RUN}/priorities", json={"ids": [*ids, 5000], "priorities": [*priorities, 1.0]})
    assert updated.json() == {"updated": 300}
    asked = {"batch_size": 32, "sampler": spec, "seed": 7}
    drawn = [sample(client, **asked, draw=number) for number in range(3)]
    # A stream of them is the same; so are those whose numbers the server counts.
    assert [batch["id"].tolist() for batch in streamed(client, **asked, draw=0, batches=3)] == [
        batch["id"].tolist() for batch in drawn
    ]
    assert [sample(client, **asked)["id"].tolist() for _ in range(2)] == [
        batch["id"].tolist() for batch in drawn[:2]
    ]
    client.post(f"{RUN}/flush")
    with expstore.open(tmp_path / "run.exp", mode="r", seed=7, sampler=sampler) as rb:
        for batch in drawn:
            mine = rb.sample(32)
            assert set(mine.keys(True, True)) == set(batch.keys(True, True))
            assert (mine == batch).all()


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
    refused = client.get(RUN, headers={"X-Store": "f" * 32})
    assert (refused.status_code, refused.json()["error"]["kind"]) == (409, "other_store")


def test_samplers_with_names_are_shared(client: httpx.Client) -> None:
    post_rows(client, 100).raise_for_status()
    spec = {"sampler": {"kind": "without_replacement"}, "seed": 1}
    for _ in range(2):  # the same one again changes nothing
        assert client.put(f"{RUN}/samplers/pass", json=spec).status_code == 201
    drawn: list[int] = []

    def draw() -> None:
        for _ in range(5):
            drawn.extend(sample(client, sampler="pass", batch_size=10)["id"].tolist())

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(1, 101))  # every row once, whoever asked
    other = client.put(f"{RUN}/samplers/pass", json=spec | {"seed": 2})
    assert (other.status_code, other.json()["error"]["kind"]) == (409, "exists")
    assert list(client.get(f"{RUN}/samplers").json()["samplers"]) == ["pass"]
    assert client.delete(f"{RUN}/samplers/pass").status_code == 200
    assert client.post(f"{RUN}/sample", json={"sampler": "pass"}).status_code == 404


def test_rows_are_consumed_by_all_clients_together(client: httpx.Client) -> None:
    post_rows(client, 40).raise_for_status()
    client.put(f"{RUN}/samplers/once", json={"sampler": {"kind": "consuming"}})
    drawn = [sample(client, sampler="once", batch_size=15)["id"].tolist() for _ in range(3)]
    assert [len(ids) for ids in drawn] == [15, 15, 10]
    empty = client.post(f"{RUN}/sample", json={"sampler": "once", "batch_size": 15})
    assert (empty.status_code, empty.json()["error"]["kind"]) == (409, "not_ready")
    assert empty.headers["Retry-After"] == "1"
    post_rows(client, 5, 40).raise_for_status()
    assert sorted(sample(client, sampler="once", batch_size=15)["id"].tolist()) == [41, 42, 43, 44, 45]


def test_a_waiting_client_gets_rows_when_they_come(client: httpx.Client) -> None:
    with httpx.Client(base_url=client.base_url, timeout=30) as other:
        found: list[int] = []
        waiting = threading.Thread(
            target=lambda: found.extend(sample(other, batch_size=8, wait=20)["id"].tolist())
        )
        waiting.start()
        post_rows(client, 20).raise_for_status()
        waiting.join(25)
    assert len(found) == 8
    refused = client.post(f"{RUN}/sample", json={"batch_size": 8, "where": "action > 1000"})
    assert (refused.status_code, refused.json()["error"]["kind"]) == (409, "not_ready")


def test_conditions(client: httpx.Client) -> None:
    post_rows(client, 300).raise_for_status()
    drawn = sample(client, batch_size=64, where='next.reward >= 100 AND "action" <> 150', seed=1, draw=0)
    assert (drawn["action"] >= 100).all()
    for bad in (
        "lpad('x', 2000000000, 'y') = 'x'",
        "action IN (SELECT 1)",
        "repeat ('x', 9) = 'x'",
        "\"repeat\"('x', 9) = 'x'",
        "action = 1; DROP TABLE x",
        "action::HUGEINT = 1",
        "action = $1",
        "",
        "action -- a comment",
        "action = [x for x in range(3)]",
        "(" * 60 + "true" + ")" * 60,
    ):
        refused = client.post(f"{RUN}/sample", json={"where": bad})
        assert refused.status_code == 422, (bad, refused.text)
    unknown = client.post(f"{RUN}/sample", json={"where": "speed > 1"})
    assert (unknown.status_code, unknown.json()["error"]["kind"]) == (422, "query")


def test_streams_are_whole_or_say_so(client: httpx.Client) -> None:
    post_rows(client, 300).raise_for_status()
    asked = {"batch_size": 256, "batches": 40, "seed": 1}
    assert len(streamed(client, **asked)) == 40
    packed = client.post(
        f"{RUN}/sample/stream",
        json=asked,
        headers={"Accept": "application/vnd.apache.arrow.stream;compression=zstd"},
    )
    with pa.ipc.open_stream(packed.content) as reader:
        assert sum(batch.num_rows for batch in reader) == 40 * 256
    refused = client.post(f"{RUN}/sample/stream", json=asked, headers={"Accept": "application/json"})
    assert refused.status_code == 406
    with client.stream("POST", f"{RUN}/sample/stream", json={"batch_size": 256}) as endless:
        size = 0
        for part in endless.iter_raw():
            size += len(part)
            if size > 3_000_000:
                break
    post_rows(client, 10, 300).raise_for_status()  # the server goes on


@pytest.mark.slow
def test_a_stream_sends_all_batches_that_it_has_drawn(client: httpx.Client) -> None:
    """Although the next one cannot be drawn: drawn rows are counted, and clients may wait for them."""
    post_rows(client, 100).raise_for_status()
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
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": "x"},
        {"draw": 3},
        {"sampler": {"kind": "other"}},
        {"sampler": {"kind": "slices"}},
        {"sampler": {"kind": "slices", "slice_len": 2, "num_slices": 2}},
        {"sampler": {"kind": "without_replacement"}},
        {"sampler": "no/name"},
        {"unknown": 1},
        {"seed": 1 << 63},
        {"batch_size": 10**9},
    ):
        refused = client.post(f"{RUN}/sample", json=asked)
        assert refused.status_code == 422, (asked, refused.text)
        assert set(refused.json()["error"]) == {"kind", "message", "hint"}


def test_json_answers(client: httpx.Client) -> None:
    post_rows(client, 300).raise_for_status()
    asked = {"batch_size": 4, "seed": 5, "draw": 2}
    told = client.post(f"{RUN}/sample", json=asked, headers={"Accept": "application/json"}).json()["rows"]
    np.testing.assert_array_equal(told["observation"], sample(client, **asked)["observation"].numpy())


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
