"""The page over the shards of a cluster: what is passed to them, what is refused, shards that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import expstore
from expstore.api import Settings
from expstore.api.shards_app import create_shards_app
from expstore.cluster.members import FixedMembers, MemberList, Members, ShardEntry
from expstore.errors import StorageError
from tests.support.arrow_bodies import ACCEPT_ARROW, batch_of
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import Serving

TOKEN = "writes-7a"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ROWS = {"a": 20, "b": 30}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of two stores that needs a token."""
    folder = tmp_path_factory.mktemp("shards")
    for name, count in ROWS.items():
        with expstore.open(folder / f"{name}.exp") as rb:
            rb.extend(batch_of(count), source=f"actor-{name}")
            rb.extend(batch_of(5, 100), source="other")
    # The process that runs conditions may start slowly on a busy machine.
    with Serving(Settings(path=folder, token=TOKEN.encode(), sql_seconds=30.0)) as server:
        yield server


class Unreadable:
    """A list of shards on a disk that fails."""

    named = False

    def read(self) -> MemberList:
        raise StorageError("the disk failed")


def members_of(shards: Serving) -> FixedMembers:
    return FixedMembers([f"{shards.url}/{name}" for name in ROWS])


def page_over(members: Members, folder: Path, token: str | None = TOKEN) -> FastAPI:
    return create_shards_app(members, Settings(path=folder, read_only=True), token)


@pytest.fixture(scope="module")
def client(shards: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the page's server, which knows the token."""
    with api_client(page_over(members_of(shards), tmp_path_factory.mktemp("page"))) as client:
        yield client


def test_the_stores_are_the_shards(client: httpx.Client) -> None:
    assert client.get("/v1/stores").json() == {
        "stores": ["shard-0", "shard-1"], "access": "read", "sql": True
    }  # fmt: skip
    told = [client.get(f"/v1/stores/shard-{number}/summary").json() for number in range(2)]
    assert [one["rows"] for one in told] == [count + 5 for count in ROWS.values()]
    assert client.get("/v1/stores/shard-1").json()["rows"] == 35


def test_questions_are_passed_as_they_are(client: httpx.Client, shards: Serving) -> None:
    """Bodies, parameters and compressed answers, byte by byte."""
    with httpx.Client(base_url=shards.url, headers=HEADERS, timeout=60) as direct:
        for path, params in (
            ("episodes", {"where": "source = 'actor-b' AND length > 1", "order": "-length", "limit": 2}),
            ("series", {"y": "length", "by": "source", "points": 5}),
            ("episodes/1", {"fields": "action,next.reward"}),
            ("relations", {}),
        ):
            ours = client.get(f"/v1/stores/shard-1/{path}", params=params)
            theirs = direct.get(f"/v1/stores/b/{path}", params=params)
            assert (ours.status_code, ours.json()) == (200, theirs.json())
            assert ours.headers.get("X-Next") == theirs.headers.get("X-Next")
        body = {"query": "SELECT count(*) AS n FROM transitions"}
        assert client.post("/v1/stores/shard-1/sql", json=body).json()["rows"] == [[35]]
        preview = client.post("/v1/stores/shard-0/sample/preview", json={"sampler": {"kind": "uniform"}})
        assert preview.status_code == 200
        ours = client.get("/v1/stores/shard-0/episodes", headers=ACCEPT_ARROW)
        assert ours.content == direct.get("/v1/stores/a/episodes", headers=ACCEPT_ARROW).content


def test_the_document_has_what_shards_take(client: httpx.Client, shards: Serving) -> None:
    ours = client.get("/openapi.json").json()["paths"]
    theirs = httpx.get(f"{shards.url}/openapi.json", headers=HEADERS, timeout=60).json()["paths"]
    preview = "/v1/stores/{name}/sample/preview"
    assert ours[preview] == theirs[preview]


def test_errors_of_a_shard_are_passed(client: httpx.Client) -> None:
    answer = client.get("/v1/stores/shard-0/episodes/999999")
    assert refusal_of(answer) == (404, "not_found")
    assert client.get("/v1/stores/shard-0/episodes", params={"limit": 0}).status_code == 422
    for name in (
        "shard-2",
        "shard-x",
        "run",
        "shard-00000000000",
        "..",
        "shard-0%2f..%2fb",
        "shard-0%2f%2fb",
    ):
        assert client.get(f"/v1/stores/{name}/summary").status_code == 404, name


def test_nothing_is_changed(client: httpx.Client, shards: Serving) -> None:
    for method, path in (
        ("POST", "/extend"), ("POST", "/sample"), ("PUT", "/samplers/mine"), ("PATCH", "/episodes/1"),
        ("DELETE", ""), ("POST", "/loads"), ("POST", "/../b/extend"), ("POST", "/sql/../extend"),
    ):  # fmt: skip
        answer = client.request(method, f"/v1/stores/shard-0{path}", json={})
        assert answer.status_code in (403, 404, 405), path
    with httpx.Client(base_url=shards.url, headers=HEADERS, timeout=60) as direct:
        assert direct.get("/v1/stores").json()["stores"] == ["a", "b"]
        assert direct.get("/v1/stores/a").json()["rows"] == 25


@pytest.mark.guarantee("access/sites")
def test_other_hosts_and_sites_are_refused(client: httpx.Client) -> None:
    """The rules of a server hold: the page's server is reachable for all programs of this machine."""
    assert client.get("/v1/stores", headers={"Host": "evil.example"}).status_code == 400
    foreign = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert client.post("/v1/stores/shard-0/sql", json={}, headers=foreign).status_code == 403
    for path in ("/v1/stores", "/v1/stores/shard-0/sql?q=SELECT+1", "/v1/stores/shard-0/summary"):
        assert refusal_of(client.get(path, headers=foreign)) == (403, "origin")
    headers = client.get("/v1/stores/shard-0/summary").headers
    assert headers.get_list("X-Content-Type-Options") == ["nosniff"]
    assert len(headers.get_list("Content-Security-Policy")) == 1


def test_probes_and_metrics(client: httpx.Client, tmp_path: Path) -> None:
    for path in ("/healthz", "/readyz"):
        assert (client.get(path).status_code, client.get(path).json()) == (200, {"status": "ok"})
    assert "expstore_requests" in client.get("/metrics").text
    with api_client(page_over(Unreadable(), tmp_path)) as client:
        assert client.get("/healthz").status_code == 200
        assert refusal_of(client.get("/readyz")) == (503, "not_ready")


def test_the_token_of_the_browser_is_passed_where_none_is_known(shards: Serving, tmp_path: Path) -> None:
    with api_client(page_over(members_of(shards), tmp_path, None)) as client:
        assert client.get("/v1/stores/shard-0/summary").status_code == 401
        assert client.get("/v1/stores/shard-0/summary", headers=HEADERS).json()["rows"] == 25


@pytest.mark.slow
def test_events_arrive_while_they_happen(shards: Serving, tmp_path: Path) -> None:
    app = page_over(members_of(shards), tmp_path)
    with (
        Serving(app.state.settings, app) as server,
        httpx.stream("GET", f"{server.url}/v1/stores/shard-0/events", timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert any(line.startswith("data:") for line in lines)
        with expstore.connect(f"{shards.url}/a", token=TOKEN) as rb:
            before = len(rb)
            rb.extend(batch_of(3, 200), source="late")
        assert any(f'"rows":{before + 3}' in line.replace(" ", "") for line in lines)


class Changing:
    """A list of shards that a test changes."""

    named = True

    def __init__(self, *members: ShardEntry) -> None:
        self.members = members

    def read(self) -> MemberList:
        return MemberList(1, self.members)


def test_shards_that_are_gone_and_new_ones(shards: Serving, tmp_path: Path) -> None:
    """A shard that does not answer is an error of its own requests; the list is read for each request."""
    alive = ShardEntry(3, f"{shards.url}/b", None, accepts=True)
    members = Changing(alive, ShardEntry(5, "http://127.0.0.1:9/gone", None, accepts=True))
    with api_client(page_over(members, tmp_path)) as client:
        answer = client.get("/v1/stores/shard-5/summary")
        assert refusal_of(answer) == (502, "shard_down")
        assert "http://127.0.0.1:9" in answer.json()["error"]["message"]
        assert client.get("/v1/stores/shard-3/summary").status_code == 200
        members.members = (alive, ShardEntry(6, f"{shards.url}/a", None, accepts=True))
        assert client.get("/v1/stores").json()["stores"] == ["shard-3", "shard-6"]
        assert client.get("/v1/stores/shard-5/summary").status_code == 404
        assert client.get("/v1/stores/shard-6/episodes").json()["rows"]
