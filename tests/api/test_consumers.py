"""Consumers over HTTP: a draw has the same rows however often it is asked for, and ranks share a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

import expstore
from tests.support.arrow_bodies import ACCEPT_ARROW, batch_of, post_rows
from tests.support.asgi import api_client, refusal_of

RUN = "/v1/stores/run"
LEARNER = f"{RUN}/consumers/learner"
SAMPLERS: list[dict[str, Any]] = [
    {"kind": "uniform"},
    {"kind": "prioritized"},
    {"kind": "slices", "slice_len": 5},
    {"kind": "without_replacement"},
    {"kind": "slices_without_replacement", "slice_len": 5},
]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a server with a store of 100 rows."""
    with api_client(tmp_path) as client:
        client.put(RUN, json={"seed": 3}).raise_for_status()
        post_rows(client, 100).raise_for_status()
        yield client


def state(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def open_it(client: httpx.Client, **asked: Any) -> dict[str, Any]:
    return state(client.put(LEARNER, json={"batch_size": 10} | asked))


def draw(client: httpx.Client, number: int, **asked: Any) -> httpx.Response:
    return client.post(f"{LEARNER}/draws/{number}", json=asked)


def ids(client: httpx.Client, number: int, **asked: Any) -> list[int]:
    found: list[int] = state(draw(client, number, **asked))["rows"]["id"]
    return found


# -- draws -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "server/consumers", "Draws of a served consumer are those of a local one, and come again by their number."
)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda one: str(one["kind"]))
def test_draws_are_those_of_a_local_consumer(
    client: httpx.Client, tmp_path: Path, sampler: dict[str, Any]
) -> None:
    open_it(client, sampler=sampler, where="action > 20", seed=5)
    served = [ids(client, number) for number in range(5)]
    made: Any = {
        "uniform": expstore.RandomSampler,
        "prioritized": expstore.PrioritizedSampler,
        "slices": expstore.SliceSampler,
        "without_replacement": expstore.SamplerWithoutReplacement,
        "slices_without_replacement": expstore.SliceSamplerWithoutReplacement,
    }[sampler["kind"]]
    options = {name: value for name, value in sampler.items() if name != "kind"}
    if sampler["kind"] == "prioritized":
        options |= {"alpha": 0.6, "beta": 0.4}
    with expstore.open(tmp_path / "other.exp", seed=3) as rb:
        rb.extend(batch_of(100))
        own = rb.consumer("own", sampler=made(where="action > 20", **options), batch_size=10, seed=5)
        assert served == [own.sample()["id"].tolist() for _ in range(5)]
    post_rows(client, 50, 100).raise_for_status()
    assert [ids(client, number) for number in (4, 2, 0)] == [served[4], served[2], served[0]]


def test_the_same_number_gives_the_same_bytes(client: httpx.Client) -> None:
    open_it(client, sampler={"kind": "prioritized"})
    for headers in ({}, ACCEPT_ARROW):
        answers = [client.post(f"{LEARNER}/draws/3", json={}, headers=headers) for _ in range(3)]
        assert len({answer.content for answer in answers}) == 1
        assert answers[0].headers["X-Rows"] == "10"
    assert open_it(client, sampler={"kind": "prioritized"})["draws"] == 4


def test_threads_that_ask_for_the_same_draws_get_the_same_ones(client: httpx.Client) -> None:
    open_it(client)

    def all_of_them(_: int) -> list[list[int]]:
        return [ids(client, number) for number in range(20)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(all_of_them, range(4)))
    assert found.count(found[0]) == 4
    assert open_it(client)["draws"] == 20


def test_iteration_ends_with_the_last_batch_of_a_pass(client: httpx.Client) -> None:
    open_it(client, sampler={"kind": "without_replacement"}, batch_size=25)
    ends = [draw(client, number).json()["drawn_from"] for number in range(5)]
    assert ends == [{"draw": number, "ends": number == 3} for number in range(5)]
    assert draw(client, 3).json()["drawn_from"] == ends[3]


def test_a_consuming_sampler_counts_the_draws_of_its_consumer(client: httpx.Client) -> None:
    open_it(client, sampler={"kind": "consuming", "max_sample_count": 2}, batch_size=40)
    found: list[list[int]] = []
    while (answer := draw(client, len(found))).is_success:
        found.append(answer.json()["rows"]["id"])
    assert refusal_of(answer) == (409, "not_ready")
    assert sorted(chain(*found)) == sorted([*range(1, 101)] * 2)
    assert [ids(client, number) for number in range(len(found))] == found


def test_a_draw_waits_for_rows(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put(RUN, json={}).raise_for_status()
        open_it(client)
        assert refusal_of(draw(client, 0, wait=0.02)) == (409, "not_ready")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ids, client, 0, wait=60.0)
            post_rows(client, 10).raise_for_status()
            assert set(waiting.result(60)) <= {*range(1, 11)}


# -- ranks -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee("consumers/ranks")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda one: str(one["kind"]))
def test_parts_make_up_the_batch(client: httpx.Client, sampler: dict[str, Any]) -> None:
    alone = f"{RUN}/consumers/alone"
    state(client.put(alone, json={"batch_size": 10, "sampler": sampler, "seed": 4}))
    open_it(client, sampler=sampler, seed=4, world=3)
    for number in range(4):
        parts = [ids(client, number, rank=rank, world=3) for rank in (2, 0, 1)]
        whole = state(client.post(f"{alone}/draws/{number}", json={}))["rows"]["id"]
        assert list(chain(parts[1], parts[2], parts[0])) == whole


def test_a_part_may_be_empty(client: httpx.Client) -> None:
    open_it(client, batch_size=1, world=2)
    assert [len(ids(client, 0, rank=rank, world=2)) for rank in (0, 1)] == [1, 0]


def test_a_draw_is_committed_when_all_ranks_have(client: httpx.Client) -> None:
    open_it(client, world=2)
    for rank in (0, 1):
        ids(client, 3, rank=rank, world=2)
    found = []
    for rank, draws in ((0, 3), (1, 2), (1, 4), (0, 4)):
        body = {"rank": rank, "world": 2, "draws": draws}
        found.append(state(client.post(f"{LEARNER}/commit", json=body))["committed"])
    assert found == [0, 2, 3, 4]
    ids(client, 6, world=2)  # rank 1 commits what it has not drawn here
    state(client.post(f"{LEARNER}/commit", json={"rank": 1, "world": 2, "draws": 7}))


@pytest.mark.guarantee("consumers/fence")
def test_clients_of_a_former_number_of_ranks_are_refused(client: httpx.Client) -> None:
    old = open_it(client, world=2)
    ids(client, 0, rank=1, world=2)
    assert open_it(client, world=3)["generation"] == old["generation"] + 1
    ids(client, 1, rank=2, world=3)
    for act, body in (("draws/1", {}), ("commit", {"draws": 1}), ("close", {})):
        answer = client.post(f"{LEARNER}/{act}", json=body | {"rank": 1, "world": 2})
        assert refusal_of(answer) == (409, "state"), act
        assert "has 3 ranks now" in answer.json()["error"]["message"]
    # The same number of ranks as before, but others: what a client knows of its generation tells.
    again = open_it(client, world=2)
    known = {"rank": 1, "world": 2, "generation": old["generation"]}
    for act, body in (("draws/1", {}), ("commit", {"draws": 1}), ("close", {})):
        assert refusal_of(client.post(f"{LEARNER}/{act}", json=body | known)) == (409, "state"), act
    assert refusal_of(client.put(LEARNER, json={"world": 2, "generation": old["generation"]}))[0] == 409
    assert open_it(client, world=2) == again
    assert len(ids(client, 1, rank=1, world=2, generation=again["generation"])) == 5


def test_only_rank_0_changes_what_is_open(client: httpx.Client) -> None:
    assert refusal_of(client.put(LEARNER, json={"rank": 1, "world": 2})) == (409, "not_ready")
    assert client.get(f"{RUN}/consumers").json() == {"consumers": []}
    first = open_it(client, world=2)
    assert open_it(client, rank=1, world=2, batch_size=99, sampler={"kind": "recency"}) == first
    assert len(ids(client, 0, rank=1, world=2)) == 5
    assert refusal_of(client.put(LEARNER, json={"rank": 1, "world": 3})) == (409, "not_ready")
    assert refusal_of(draw(client, 0, rank=2, world=2)) == (409, "state")
    assert open_it(client, world=2)["generation"] == first["generation"]


# -- opening ---------------------------------------------------------------------------------------------


def test_another_sampler_or_size_opens_it_again(client: httpx.Client) -> None:
    first = open_it(client)
    before = ids(client, 0)
    assert open_it(client) == first | {"draws": 1}
    assert open_it(client, batch_size=4, sampler={"kind": "recency", "newest": 5})["id"] == first["id"]
    assert ids(client, 0) == before
    assert len(ids(client, 1)) == 4
    assert set(ids(client, 1)) <= {*range(96, 101)}


def test_a_wrong_opening_changes_nothing(client: httpx.Client) -> None:
    open_it(client, seed=7)
    ids(client, 0)
    for asked in (
        {"seed": 8}, {"where": "no_such > 1"}, {"where": "sqrt(action) > 1"}, {"sampler": {"kind": "other"}},
        {"sampler": {"kind": "slices"}}, {"batch_size": 0}, {"batch_size": 10**7}, {"keep": "some"},
        {"missing": "some"}, {"keep": -1}, {"world": 0}, {"id": "another"}, {"unknown": 1},
    ):  # fmt: skip
        refused = client.put(LEARNER, json={"batch_size": 10} | asked)
        assert refused.status_code == 422, (asked, refused.text)
    assert len(ids(client, 1)) == 10
    assert client.put(f"{RUN}/consumers/.hidden", json={}).status_code == 422
    assert refusal_of(client.put(f"{RUN}/consumers/new", json={"id": "5f"}))[0] == 422
    assert [one["name"] for one in client.get(f"{RUN}/consumers").json()["consumers"]] == ["learner"]


def test_rows_of_a_batch_are_limited(tmp_path: Path) -> None:
    with api_client(tmp_path, max_rows=20, max_answer=4000) as client:
        client.put(RUN, json={}).raise_for_status()
        for first in range(0, 100, 20):
            post_rows(client, 20, first).raise_for_status()
        assert refusal_of(client.put(LEARNER, json={"batch_size": 21})) == (422, "request")
        open_it(client, batch_size=20)
        assert refusal_of(draw(client, 0)) == (413, "too_large")
        assert open_it(client, batch_size=20)["draws"] == 0  # it does not count
        open_it(client, batch_size=2)
        assert len(ids(client, 0)) == 2


def test_a_store_with_a_rate_limiter_has_none(tmp_path: Path) -> None:
    with api_client(tmp_path, min_size=2) as client:
        client.put(RUN, json={}).raise_for_status()
        refused = client.put(LEARNER, json={})
        assert refusal_of(refused) == (409, "state")
        assert "rate limiter" in refused.json()["error"]["message"]


def test_after_a_restart_it_is_opened_again(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put(RUN, json={}).raise_for_status()
        post_rows(client, 100).raise_for_status()
        before = open_it(client)
        found = [ids(client, number) for number in range(6)]
        state(client.post(f"{LEARNER}/commit", json={"draws": 2}))
    with api_client(tmp_path) as client:
        for act in ("draws/1", "commit", "close"):
            refused = client.post(f"{LEARNER}/{act}", json={"draws": 2} if act == "commit" else {})
            assert refusal_of(refused) == (409, "not_open"), act
            assert "PUT it" in refused.json()["error"]["hint"]
        (known,) = client.get(f"{RUN}/consumers").json()["consumers"]
        assert (known["is_open"], known["draws"], known["sampler"]) == (False, 6, None)
        position = {"consumer": "learner", "id": before["id"], "draw": 2}
        wanted = before | {"draws": 6, "committed": 2, "position": position}
        assert open_it(client, id=before["id"]) == wanted
        assert [ids(client, number) for number in range(6)] == found


# -- the log ---------------------------------------------------------------------------------------------


def test_places_of_the_log(client: httpx.Client) -> None:
    open_it(client)
    ids(client, 5)
    assert client.post(f"{LEARNER}/commit", json={"draws": 2}).json()["committed"] == 2
    for at, wanted in (("committed", 2), ("end", 6), (0, 0), (4, 4), (6, 6)):
        assert open_it(client, at=at)["position"]["draw"] == wanted
    assert refusal_of(client.put(LEARNER, json={"batch_size": 10, "at": 7})) == (409, "state")
    for draws in (1, 7):
        assert refusal_of(client.post(f"{LEARNER}/commit", json={"draws": draws})) == (409, "state")
    for act in ("draws/2", "commit", "close"):
        body = {"id": "another"} | ({"draws": 3} if act == "commit" else {})
        assert refusal_of(client.post(f"{LEARNER}/{act}", json=body)) == (422, "argument"), act
    assert refusal_of(draw(client, 20_000)) == (422, "argument")
    assert open_it(client)["draws"] == 6


def test_consumers_are_listed_and_dropped(client: httpx.Client) -> None:
    first = open_it(client, sampler={"kind": "without_replacement"}, world=2)
    ids(client, 1, world=2)
    (known,) = client.get(f"{RUN}/consumers").json()["consumers"]
    assert known.pop("log_bytes") > 0
    assert known == {
        "name": "learner", "draws": 2, "committed": 0, "first": 0, "is_open": True, "leased": 10, "world": 2,
        "damage": None,
        "sampler": {"kind": "without_replacement", "split": "train", "shuffle": True, "drop_last": False},
    }  # fmt: skip
    assert client.delete(LEARNER).status_code == 204
    assert client.get(f"{RUN}/consumers").json() == {"consumers": []}
    for answer in (
        client.delete(LEARNER),
        draw(client, 0),
        client.post(f"{LEARNER}/commit", json={"draws": 0}),
    ):
        assert refusal_of(answer) == (404, "not_found")
    assert open_it(client)["id"] != first["id"]
    refused = draw(client, 0, id=first["id"])
    assert refusal_of(refused) == (422, "argument")


def test_the_server_and_programs_of_its_machine_exclude_each_other(
    client: httpx.Client, tmp_path: Path
) -> None:
    open_it(client)
    found = ids(client, 0)
    with expstore.open(tmp_path / "run.exp", mode="r", batch_size=10) as rb:
        with pytest.raises(expstore.errors.LockedError):
            rb.consumer("learner")
        assert client.post(f"{LEARNER}/close", json={}).status_code == 204
        with rb.consumer("learner") as own:
            assert own.sample()["id"].tolist() == found
            assert refusal_of(client.put(LEARNER, json={"batch_size": 10})) == (423, "locked")
            assert refusal_of(client.delete(LEARNER)) == (423, "locked")
            assert refusal_of(draw(client, 0)) == (409, "not_open")
        open_it(client)
        assert ids(client, 0) == found


def test_a_store_with_an_open_consumer_is_deleted(client: httpx.Client) -> None:
    open_it(client)
    ids(client, 0)
    client.delete(f"{RUN}?confirm=run").raise_for_status()


def test_rights(tmp_path: Path) -> None:
    """Whoever draws for a consumer writes to the store's folder, so the read token only lists."""
    headers = [{"Authorization": f"Bearer {token}"} for token in ("writes", "reads")]
    with api_client(tmp_path, token=b"writes", read_token=b"reads") as client:
        client.headers.update(headers[0])
        client.put(RUN, json={}).raise_for_status()
        post_rows(client, 10).raise_for_status()
        open_it(client)
        client.headers.update(headers[1])
        assert len(client.get(f"{RUN}/consumers").json()["consumers"]) == 1
        acts = [("PUT", ""), ("DELETE", ""), *(("POST", f"/{act}") for act in ("draws/0", "commit", "close"))]
        for method, act in acts:
            answer = client.request(method, LEARNER + act, content=json.dumps({}))
            assert refusal_of(answer) == (403, "forbidden"), act
    with api_client(tmp_path, read_only=True) as client:
        assert len(client.get(f"{RUN}/consumers").json()["consumers"]) == 1
        assert client.put(LEARNER, json={}).status_code == 404
