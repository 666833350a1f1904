"""Permissions of tokens on every route, and what is logged and counted about requests."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import expstore
from expstore import errors
from expstore.api import Settings, create_app
from expstore.api.auth import is_loopback
from expstore.api.errors import KINDS, STATUS, status_of
from expstore.api.gateway import find_route
from expstore.api.openapi import Need
from expstore.api.rate_limits import Rates
from tests.support.asgi import api_client, ask, call, refusal_of, routes_of

TOKEN, READ_TOKEN = b"writes-7a", b"reads-3c"
HEADERS = {"Authorization": f"Bearer {TOKEN.decode()}"}
#: Ends a stream of events after the first.
ONCE = {"count": 1}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client without a token of a server that has two."""
    with api_client(tmp_path_factory.mktemp("runs"), token=TOKEN, read_token=READ_TOKEN) as client:
        fields = {"fields": {"x": "int64"}}
        assert client.put("/v1/stores/run", json=fields, headers=HEADERS).status_code == 201
        assert client.post("/v1/stores/run/add", json={"x": [1]}, headers=HEADERS).status_code == 200
        yield client


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server without a token, which has a name."""
    with api_client(tmp_path_factory.mktemp("runs"), hosts=("trainer.example",)) as client:
        yield client


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = create_app(Settings(path=tmp_path_factory.mktemp("runs"))).openapi()
    return found


# -- tokens --------------------------------------------------------------------------------------------


@pytest.mark.guarantee("access/tokens")
def test_no_route_answers_without_its_token(guarded: httpx.Client, document: dict[str, Any]) -> None:
    bodies = set()
    routes = [*routes_of(document), ("GET", "/openapi.json", {}), ("POST", "/nowhere", {})]
    assert len(routes) > 12
    for method, path, _ in routes:
        if path in ("/healthz", "/readyz"):
            continue
        for borne in (
            [], ["Bearer wrong"], ["Bearer"], [f"Basic {TOKEN.decode()}"], [TOKEN.decode()],
            [b"Bearer \xc3\xa4\xff"], ["Bearer " + "x" * 5000], [f"Bearer {TOKEN.decode()}x"],
            [HEADERS["Authorization"]] * 2,
        ):  # fmt: skip
            headers = [("Authorization", one) for one in borne]
            answer = guarded.request(method, path, headers=headers, content=b"not looked at")
            assert answer.status_code == 401, (method, path, borne)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            bodies.add(answer.content)
    (body,) = bodies
    assert b"not looked at" not in body
    assert b"a valid token is needed" in body
    assert b"expstore.connect(url, token=TOKEN)" in body


@pytest.mark.guarantee("access/read-token", "The read token changes nothing.")
def test_the_read_token_only_reads(guarded: httpx.Client, document: dict[str, Any]) -> None:
    headers = {"Authorization": f"bearer {READ_TOKEN.decode()}"}
    writing = 0
    for method, path, act in routes_of(document):
        answer = guarded.request(method, path, json={"batches": 1}, params=ONCE, headers=headers)
        reads = method == "GET" or (method == "POST" and act["tags"][0] not in ("writing", "versions"))
        assert (answer.status_code == 403) is not reads, (method, path, answer.text)
        if not reads:
            writing += 1
            assert refusal_of(answer) == (403, "forbidden")
    assert writing >= 9
    assert guarded.post("/v1/nowhere", headers=headers).status_code == 403


def test_every_route_says_who_may_ask(document: dict[str, Any]) -> None:
    """A route without a tag that is known needs the token that writes."""
    known = {"asking", "open", "reading", "sampling", "versions", "writing"}
    for _, path, act in routes_of(document):
        assert set(act["tags"]) <= known, path
        assert act["tags"], path
    new = APIRouter()
    for path, method, tags in (
        ("/new/{it}", "GET", []), ("/new/{it}", "POST", ["other"]), ("/hidden", "GET", ["open"]),
    ):  # fmt: skip
        new.add_api_route(
            path, lambda: None, methods=[method], tags=tags, include_in_schema=path != "/hidden"
        )
    for method, path, route, need in (
        ("GET", "/new/1", "/new/{it}", Need.WRITE),
        ("POST", "/new/1", "/new/{it}", Need.WRITE),
        ("HEAD", "/new/1", "/new/{it}", Need.READ),
        ("POST", "/new/1/2", "(none)", Need.WRITE),
        ("GET", "/hidden", "(none)", Need.READ),
    ):
        found = find_route(new.routes, {"type": "http", "method": method, "path": path})
        assert (found.path, found.need) == (route, need)


@pytest.mark.parametrize("read_only", [False, True])
def test_the_routes_are_those_of_the_document(tmp_path: Path, read_only: bool) -> None:
    """The gateway finds every route of the OpenAPI document, and needs the token that the document names."""
    app = create_app(Settings(path=tmp_path, read_only=read_only))
    needs = {0: Need.NOTHING, 1: Need.WRITE, 2: Need.READ}
    for path, acts in app.openapi()["paths"].items():
        for method, act in acts.items():
            told = path.replace("{", "").replace("}", "")
            found = find_route(app.routes, {"type": "http", "method": method.upper(), "path": told})
            content = set(act.get("requestBody", {}).get("content", {}))
            assert found.path == path
            assert found.need == needs[len(act["security"])]
            assert found.is_parsed == (content == {"application/json"})


@pytest.mark.guarantee(
    "access/tokens",
    "Without a token a server answers this machine only; with one, only `/healthz`, `/readyz` and the "
    "page's files are answered without it.",
)
def test_without_a_token_others_are_not_answered(tmp_path: Path) -> None:
    """Whatever serves the application: an address that others reach needs a token."""
    for server, status in (("127.0.0.1", 200), ("::1", 200), ("10.1.2.3", 403), ("2001:db8::1", 403)):
        host = f"[{server}]" if ":" in server else server
        assert status_from(create_app(Settings(path=tmp_path)), server, host) == status
    assert status_from(create_app(Settings(path=tmp_path, token=b"t")), "10.1.2.3", "10.1.2.3") == 200
    assert all(map(is_loopback, ("127.8.0.1", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "fe80::1%eth0", "10.0.0.1")))


def status_from(app: Any, server: str, host: str) -> int:
    """Ask an application for /healthz as a server would that listens on an address."""
    sent = asyncio.run(call(app, path="/healthz", server=server, headers=[(b"host", host.encode())]))
    return int(sent[0]["status"])


def test_settings_whose_tokens_protect_nothing_are_refused(tmp_path: Path) -> None:
    text: Any = "a"
    for bad in ({"token": b""}, {"token": b"a", "read_token": b"a"}, {"read_token": b"a"}, {"token": text}):
        with pytest.raises(errors.StateError) as caught:
            Settings(path=tmp_path, **bad)
        assert caught.value.kind == "token"
    settings = Settings(path=tmp_path, read_token=b"a", read_only=True)
    assert "b'a'" not in repr(settings)


# -- hosts and pages -----------------------------------------------------------------------------------


@pytest.mark.guarantee("access/sites")
def test_only_its_own_names_are_answered(opened: httpx.Client) -> None:
    good = ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8420", "[::1]:80", "Trainer.example:8420")
    bad = (
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::2]", "10.0.0.1", "@", ":",
        "127.0.0.1:8420@evil", "127.0.0.1:evil", "127.0.0.1:", "127.0.0.1:1:2", "127.0.0.1:123456",
        "evil@127.0.0.1", "localhost/evil:80", "localhost evil", "[::1]evil", "[::1",
    )  # fmt: skip
    for host in good + bad:
        for path in ("/healthz", "/v1/stores", "/nowhere"):
            answer = opened.get(path, headers={"Host": host})
            assert (answer.status_code == 400) is (host in bad), (host, path)
            if host in bad:
                assert refusal_of(answer) == (400, "host")


@pytest.mark.guarantee("access/sites", "Pages of other web sites can change nothing and see nothing.")
def test_pages_of_other_sites_change_nothing_and_see_nothing(opened: httpx.Client) -> None:
    here = "127.0.0.1:8420"
    allowed: list[dict[str, str]] = [
        {},
        {"Origin": f"http://{here}"},
        {"Sec-Fetch-Site": "same-origin", "Origin": f"http://{here}"},
        {"Sec-Fetch-Site": "none"},
    ]
    foreign = [{"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")]
    foreign += [
        {"Origin": origin}
        for origin in (
            "http://evil.example", "null", "", "http://[broken", "http://127.0.0.1:1",
            f"http://evil.example@{here}.evil.example",
        )
    ]  # fmt: skip
    for number, headers in enumerate(allowed + foreign):
        is_allowed = number < len(allowed)
        made = opened.put(f"/v1/stores/page{number}", json={}, headers=headers)
        assert made.status_code == (201 if is_allowed else 403), headers
        assert (f"page{number}" in opened.get("/v1/stores").json()["stores"]) is is_allowed
        for path in ("/v1/stores", "/v1/stores/none/episodes?where=true", "/docs", "/metrics", "/nowhere"):
            seen = opened.get(path, headers=headers)
            assert (seen.status_code != 403) is is_allowed, (path, headers)
            assert seen.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        for path in ("/ui/", "/healthz"):  # they hold no data, and may be linked to
            assert opened.get(path, headers=headers).status_code == 200


def test_form_data_and_plain_text_are_refused(opened: httpx.Client) -> None:
    """What a page may send without asking first is not what routes take; and no page is ever allowed."""
    opened.put("/v1/stores/plain", json={"fields": {"x": "int64"}})
    body = b'{"x": [1], "ids": [1], "priorities": [1]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        for path in ("extend", "add", "priorities", "rows"):
            answer = opened.post(f"/v1/stores/plain/{path}", content=body, headers={"Content-Type": kind})
            assert answer.status_code == (415 if path in ("extend", "add") else 422), (kind, path)
    assert opened.get("/v1/stores/plain").json()["rows"] == 0
    asked = opened.options(
        "/v1/stores/plain/extend",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert asked.status_code == 403
    assert not [name for name in asked.headers if name.startswith("access-control")]


# -- rates ---------------------------------------------------------------------------------------------


def test_a_client_that_asks_too_often_waits(tmp_path: Path) -> None:
    with api_client(tmp_path, token=TOKEN, read_token=READ_TOKEN, rate=5.0) as client:
        answers = [client.get("/v1/stores", headers=HEADERS) for _ in range(40)]
        assert [answer.status_code for answer in answers[:5]] == [200] * 5
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) > 20
        assert refusal_of(refused[-1]) == (429, "too_many")
        assert int(refused[-1].headers["Retry-After"]) >= 1
        # Who guesses tokens shares nothing with those who have one.
        wrong = {"Authorization": "Bearer guess"}
        assert [client.get("/v1/stores", headers=wrong).status_code for _ in range(40)].count(429) > 20
        reader = {"Authorization": f"Bearer {READ_TOKEN.decode()}"}
        assert client.get("/v1/stores", headers=reader).status_code == 200


def test_buckets_fill_steadily() -> None:
    rates = Rates(2.0)
    assert [rates.wait("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.5, 0.5]
    assert rates.wait("b", 0.0) == 0.0
    assert rates.wait("a", 0.5) == 0.0
    assert rates.wait("a", 0.75) == pytest.approx(0.25)
    assert [rates.wait("a", 100.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    slow = Rates(0.1)
    assert (slow.wait("a", 0.0), slow.wait("a", 0.0)) == (0.0, pytest.approx(10.0))
    for number in range(20_000):
        rates.wait(number, 100.0)
    assert len(rates._clients) == 10_000


# -- what requests leave behind ------------------------------------------------------------------------


def test_requests_have_ids(guarded: httpx.Client) -> None:
    def id_of(sent: str | bytes) -> str:
        return guarded.get("/healthz", headers={"X-Request-ID": sent}).headers["X-Request-ID"]

    assert id_of("mine-1.2") == "mine-1.2"
    made = {id_of(bad) for bad in ("", "a b", "x" * 200, 'quote"', b"\xe9")}
    assert len(made) == 5
    assert all(len(name) < 40 for name in made)


def test_the_access_log_contains_no_secrets(guarded: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "expstore.access"):
        headers = HEADERS | {"X-Request-ID": "seen"}
        guarded.post("/v1/stores/run/add?source=hidden", json={"x": [424242]}, headers=headers)
        guarded.get("/v1/stores/a%0Ab%22", headers={"Authorization": "Bearer guessed"})
    lines = [record.getMessage() for record in caplog.records if record.name == "expstore.access"]
    first, second = map(json.loads, lines)
    assert first["id"] == "seen"
    assert (first["method"], first["route"]) == ("POST", "/v1/stores/{name}/add")
    assert (first["status"], first["may"], first["client"]) == (200, "write", "127.0.0.1")
    assert (first["rows_in"], first["bytes_in"]) == (1, len(b'{"x":[424242]}'))
    assert (second["status"], second["may"], second["path"]) == (401, "nothing", '/v1/stores/a\nb"')
    assert all("\n" not in line for line in lines)
    for secret in (TOKEN.decode(), "guessed", "424242", "hidden"):
        assert secret not in "".join(lines)


def test_figures_are_counted(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put("/v1/stores/run", json={"fields": {"x": "int64"}})
        for first in (0, 10):
            client.post("/v1/stores/run/extend", json={"x": list(range(first, first + 10))})
        client.post("/v1/stores/run/rows", json={"ids": [1, 2, 3]})
        client.post("/v1/stores/run/sample/stream", json={"batch_size": 7, "batches": 3})
        client.get("/v1/stores/other")
        client.request("BREW", "/v1/coffee")
        answer, summary = client.get("/metrics"), client.get("/v1/stores/run/summary").json()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(answer.text)
        for one in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    extend, total = {"route": "/v1/stores/{name}/extend"}, "expstore_requests_total"
    assert value(total, **extend, method="POST", status="200") == 2
    assert value(total, route="/v1/stores/{name}", method="GET", status="404") == 1
    assert value(total, route="(none)", method="other", status="404") == 1
    assert value("expstore_request_seconds_bucket", **extend, le="+Inf") == 2
    assert value("expstore_request_seconds_sum", **extend) > 0
    assert value("expstore_rows_in_total", **extend) == 20
    assert sum(one for (name, _), one in found.items() if name == "expstore_rows_in_total") == 20
    assert value("expstore_rows_out_total", route="/v1/stores/{name}/rows") == 3
    assert value("expstore_rows_out_total", route="/v1/stores/{name}/sample/stream") == 21
    assert value("expstore_bytes_in_total", **extend) > 40
    assert value("expstore_requests_in_flight") == 1  # this one
    assert value("expstore_stores_open") == 1
    assert value("expstore_store_rows", store="run") == 20
    assert {name for name, _ in found} == {
        *(f"expstore_request_seconds_{part}" for part in ("bucket", "count", "sum")),
        *(f"expstore_{what}_total" for what in ("bytes_in", "bytes_out", "requests", "rows_in", "rows_out")),
        "expstore_calls_lost_total",
        "expstore_requests_in_flight", "expstore_stores_open", "expstore_disk_free_bytes",
        "expstore_disk_size_bytes", "process_threads", "process_open_fds", "process_max_fds",
        "process_resident_memory_bytes", "process_virtual_memory_bytes", "process_cpu_seconds_total",
        "process_start_time_seconds",
        *(f"expstore_store_{what}" for what in ("rows", "bytes", "last_write_timestamp_seconds")),
    }  # fmt: skip
    assert abs(value("expstore_store_last_write_timestamp_seconds", store="run") - time.time()) < 600
    assert value("expstore_store_bytes", store="run") == summary["bytes"] > 0
    assert 0 < value("expstore_disk_free_bytes") < value("expstore_disk_size_bytes")
    assert value("process_threads") >= threading.active_count()
    assert value("process_open_fds") > 3
    assert value("process_resident_memory_bytes") > 1 << 24


def test_figures_of_stores_that_cannot_be_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(path=tmp_path))

    def fail() -> int:
        raise errors.StorageError("the disk failed")

    async def check(client: httpx.AsyncClient) -> tuple[str, str]:
        for name in "ab":
            await client.put(f"/v1/stores/{name}", json={"fields": {"x": "int64"}})
        empty = (await client.get("/metrics")).text
        monkeypatch.setattr(app.state.stores.open_now()[0].summarizer, "measure_bytes", fail)
        return empty, (await client.get("/metrics")).text

    empty, failed = ask(app, check)
    assert 'expstore_store_bytes{store="a"}' in empty
    assert "expstore_store_last_write_timestamp_seconds{" not in empty  # there are no rows
    assert 'expstore_store_bytes{store="a"}' not in failed
    assert 'expstore_store_bytes{store="b"}' in failed
    assert "expstore_disk_free_bytes" in failed
    app.state.stores.close()


@pytest.mark.guarantee("access/tokens")
def test_readiness_needs_no_token_and_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Probes of orchestrators have no token."""
    folder, store = tmp_path / "runs", tmp_path / "secret.exp"
    folder.mkdir()
    with expstore.open(store, schema={"x": "int64"}) as rb:
        apps = [create_app(Settings(path=path, token=TOKEN)) for path in (folder, store)]

        async def check(client: httpx.AsyncClient) -> tuple[int, Any]:
            answer = await client.get("/readyz")
            assert "secret" not in answer.text
            assert str(tmp_path) not in answer.text
            return answer.status_code, answer.json()

        ready, locked = (ask(app, check) for app in apps)
        assert ready == (200, {"status": "ok"})
        assert (locked[0], locked[1]["error"]["kind"]) == (503, "not_ready")
        assert "secret.exp" in caplog.text
        rb.close()
    assert ask(apps[1], check) == (200, {"status": "ok"})
    folder.rmdir()
    assert ask(apps[0], check)[0] == 503
    apps[1].state.stores.close()
    assert ask(apps[1], check)[0] == 503  # it is shutting down


def test_figures_come_in_the_format_that_is_preferred(tmp_path: Path) -> None:
    plain = "text/plain; version=0.0.4; charset=utf-8"
    wanted = {
        "*/*": plain,
        "application/openmetrics-text; version=1.0.0; q=0.5, text/plain; version=0.0.4; q=0.2":
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
        "application/openmetrics-text; version=one": plain,
        "text/plain; version=1.x": plain,
        "image/png": plain,
    }  # fmt: skip
    with api_client(tmp_path) as client:
        for accept, media_type in wanted.items():
            answer = client.get("/metrics", headers={"Accept": accept})
            assert (answer.status_code, answer.headers["Content-Type"]) == (200, media_type)
            is_open = media_type.startswith("application/openmetrics-text")
            parse = openmetrics.text_string_to_metric_families if is_open else text_string_to_metric_families
            names = {one.name for family in parse(answer.text) for one in family.samples}
            assert "expstore_requests_in_flight" in names
            assert not [name for name in names if name.endswith("_created")]


def test_servers_of_one_process_count_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with api_client(tmp_path / "one") as one, api_client(tmp_path / "two") as two:
        one.put("/v1/stores/run", json={"fields": {"x": "int64"}})
        assert 'expstore_store_rows{store="run"} 0' in one.get("/metrics").text
        figures = two.get("/metrics").text
    assert "expstore_stores_open 0" in figures
    assert "/v1/stores" not in figures


# -- errors --------------------------------------------------------------------------------------------


def test_every_error_has_a_status() -> None:
    tree = [getattr(errors, name) for name in errors.__all__]
    assert len(tree) > 10
    for kind in tree:
        status = status_of(kind("text"))
        assert status == STATUS.get(kind, status)
        assert 400 <= status < 600
        for word, expected in KINDS.items():
            assert status_of(kind("text", kind=word)) == expected
    assert set(STATUS) <= set(tree)
    refused = {errors.SchemaError: 422, errors.NoRowError: 404, errors.LockedError: 423,
               errors.CorruptionError: 500, errors.StackError: 422, errors.StateError: 409}  # fmt: skip
    assert {kind: status_of(kind("text")) for kind in refused} == refused


@pytest.mark.guarantee("access/folder")
def test_internal_errors_reveal_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(Settings(path=tmp_path))

    @app.get("/broken", tags=["reading"])
    def broken() -> None:
        raise RuntimeError(f"secret of {tmp_path}")

    @app.get("/disk", tags=["reading"])
    def disk() -> None:
        raise errors.StorageError(f"cannot read {tmp_path}/x")

    with api_client(app) as client:
        for path, kind in (("/broken", "internal"), ("/disk", "storage")):
            answer = client.get(path, headers={"X-Request-ID": "failed"})
            assert refusal_of(answer) == (500, kind)
            assert str(tmp_path) not in answer.text
            assert answer.headers["X-Request-ID"] == "failed"
        (tmp_path / "full.exp").mkdir()
        (tmp_path / "full.exp" / "x").touch()
        refused = client.put("/v1/stores/full", json={}).json()["error"]
        assert refused["message"] == "full.exp is not empty and not a store: it holds x"
        for method, path, status in (
            ("GET", "/nowhere", 404), ("GET", "/v1/stores/none", 404), ("DELETE", "/healthz", 405)
        ):  # fmt: skip
            answer = client.request(method, path)
            assert refusal_of(answer)[0] == status
            assert str(tmp_path) not in answer.text
    logged = [record for record in caplog.records if "request failed" in record.getMessage()]
    assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in logged)
    assert any(str(tmp_path) in record.getMessage() for record in logged)
