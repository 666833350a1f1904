"""Queries over HTTP: episodes, SQL in a separate process, snapshots, and rate limits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from expstore.api import Settings
from expstore.sql.sandbox import pool
from tests.support.arrow_bodies import ACCEPT_ARROW, ARROW, post_rows
from tests.support.asgi import api_client, refusal_of

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with api_client(tmp_path, sql_rows=100) as client:
        client.put(RUN, json={"seed": 3}).raise_for_status()
        yield client


def ask(client: httpx.Client, query: str, **more: Any) -> Any:
    answer = client.post(f"{RUN}/sql", json={"query": query, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["rows"]


def test_episodes_are_listed(client: httpx.Client) -> None:
    post_rows(client, 25, source="left")
    post_rows(client, 20, 100, source="right")
    told = client.get(f"{RUN}/episodes").json()
    rows = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    assert [row["episode_id"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["length"] for row in rows] == [10, 10, 5, 10, 10]
    right = client.get(f"{RUN}/episodes", params={"source": "right", "after": 4}).json()["rows"]
    assert [row[0] for row in right] == [5]
    assert [row[0] for row in client.get(f"{RUN}/episodes", params={"status": "open"}).json()["rows"]] == [3]
    assert client.get(f"{RUN}/episodes", params={"source": "x' OR 'a'='a"}).json()["rows"] == []
    whole = client.get(f"{RUN}/episodes", headers={"Accept": ARROW["Content-Type"]})
    assert pa.ipc.open_stream(whole.content).read_all()["length"].to_pylist() == [10, 10, 5, 10, 10]
    assert client.get(f"{RUN}/episodes", params={"status": "odd"}).status_code == 422


def test_nan_and_infinities_are_null_in_answers_and_numbers_in_parameters(client: httpx.Client) -> None:
    """As `--json` of the command line has them."""
    post_rows(client, 1)
    query = "SELECT 'nan'::DOUBLE AS x, [1.5, '-inf'::DOUBLE] AS y, {'a': 'inf'::FLOAT} AS z, NULL AS n"
    assert ask(client, query) == [[None, [1.5, None], {"a": None}, None]]
    body = b'{"query": "SELECT isnan(?), ? > 0, ? < 0", "params": [NaN, Infinity, -Infinity]}'
    answer = client.post(f"{RUN}/sql", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["rows"] == [[True, True, True]], answer.text


def test_values_of_all_types_are_answered_as_json(client: httpx.Client) -> None:
    post_rows(client, 1)
    answer = client.post(f"{RUN}/sql", json={"query": "SELECT * FROM test_all_types()"})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    first = dict(zip(told["columns"], told["rows"][0], strict=True))
    second = dict(zip(told["columns"], told["rows"][1], strict=True))
    assert (first["timestamp"], second["date"]) == ("-290308-12-22 00:00:00.000000", "5881580-07-10")
    assert second["date_array"][:2] == ["1970-01-01", "5881580-07-11"]
    assert second["map"] == [["key1", "🦆🦆🦆🦆🦆🦆"], ["key2", "goose"]]
    assert set(told["rows"][2]) == {None}


def test_unanswerable_sql_is_a_server_error(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    post_rows(client, 1)
    monkeypatch.setattr(pool, "_BOOT", "raise SystemExit(3)")
    answer = client.post(f"{RUN}/sql", json={"query": "SELECT 1"})
    assert refusal_of(answer) == (500, "sandbox")
    assert answer.json()["error"]["message"].startswith("SQL cannot be run")


def test_sql_reads_what_was_written_before_it_came(client: httpx.Client) -> None:
    post_rows(client, 30)
    assert ask(client, "SELECT count(*), max(action) FROM transitions") == [[30, 29]]
    post_rows(client, 1, 30)
    assert ask(client, "SELECT count(*), max(action) FROM transitions") == [[31, 30]]
    query = "SELECT action FROM transitions WHERE action > ? ORDER BY 1"
    assert ask(client, query, params=[28]) == [[29], [30]]
    assert ask(client, "SELECT count(*) FROM transitions") == [[31]]


@pytest.mark.slow
def test_sql_reads_the_priorities_that_were_set_before_it_came(client: httpx.Client) -> None:
    post_rows(client, 10)
    for round_ in range(1, 8):
        body = {"ids": [3, 4], "priorities": [round_, 2 * round_]}
        client.post(f"{RUN}/priorities", json=body).raise_for_status()
        found = ask(client, "SELECT _priority FROM transitions WHERE _id IN (3, 4) ORDER BY _id")
        assert found == [[round_], [2 * round_]]


def get(client: httpx.Client, q: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return client.get(f"{RUN}/sql", params={"q": q, **more}, headers=headers)


def post(client: httpx.Client, q: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return client.post(f"{RUN}/sql", json={"query": q, **more}, headers=headers)


@pytest.mark.parametrize("send", [get, post])
def test_a_url_asks_in_sql_as_a_body_does(client: httpx.Client, tmp_path: Path, send: Any) -> None:
    post_rows(client, 30)
    answer = send(client, "SELECT count(*) AS rows, max(action) AS 'largest & last' FROM transitions")
    assert answer.json() == {"columns": ["rows", "largest & last"], "rows": [[30, 29]]}
    assert answer.headers["X-Truncated"] == "false"
    whole = send(client, "SELECT * FROM range(1000)", ACCEPT_ARROW)
    assert whole.headers["X-Truncated"] == "true"
    assert pa.ipc.open_stream(whole.content).read_all().num_rows == 100  # as the server's limit is
    assert len(send(client, "SELECT * FROM range(1000)", limit=7).json()["rows"]) == 7
    (tmp_path / "secret").write_text("canary")
    for query in (
        "DELETE FROM transitions", "SELECT 1; SELECT 2", "SELEC", f"FROM read_text('{tmp_path}/secret')", "",
    ):  # fmt: skip
        refused = send(client, query)
        assert refused.status_code == 422, refused.text
        assert "canary" not in refused.text
    assert send(client, "SELECT 1", limit=0).status_code == client.get(f"{RUN}/sql").status_code == 422
    assert get(client, "SELECT '" + "x" * 16_384 + "'").status_code == 422
    assert send(client, "SELECT count(*) FROM transitions").json()["rows"] == [[30]]


def test_a_query_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    with api_client(tmp_path, sql_seconds=0.2) as client:
        client.put(RUN, json={}).raise_for_status()
        for send in (get, post):
            slow = send(client, "SELECT count(*) FROM range(1000000000000)")
            assert refusal_of(slow) == (504, "timeout")


def test_pages_of_other_sites_ask_nothing_in_sql(client: httpx.Client) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        assert refusal_of(get(client, "SELECT 1", headers)) == (403, "origin")
    assert get(client, "SELECT 1", {"Sec-Fetch-Site": "none"}).json()["rows"] == [[1]]  # typed into a browser


def test_servers_without_sql(tmp_path: Path) -> None:
    with api_client(tmp_path, sql=False) as client:
        client.put(RUN, json={})
        post_rows(client, 30)
        assert post(client, "SELECT 1").status_code == get(client, "SELECT 1").status_code == 403
        assert len(client.get(f"{RUN}/episodes").json()["rows"]) == 3


def test_versions_are_made_and_gone_back_to(client: httpx.Client) -> None:
    post_rows(client, 30)
    made = client.post(f"{RUN}/dumps", json={"tag": "first"})
    assert (made.status_code, made.json()["rows"]) == (201, 30), made.text
    post_rows(client, 10, 30)
    assert client.post(f"{RUN}/dumps", json={}).json()["number"] == 2
    told = client.get(f"{RUN}/versions").json()["versions"]
    assert [(one["number"], one["tag"], one["rows"]) for one in told] == [(1, "first", 30), (2, None, 40)]
    assert client.post(f"{RUN}/loads", json={"version": "first"}).json()["rows"] == 30
    assert client.get(RUN).json()["rows"] == 30
    for bad in ("other", "../x", -1):
        assert client.post(f"{RUN}/loads", json={"version": bad}).status_code == 409
    assert client.post(f"{RUN}/dumps", json={"tag": "../x"}).status_code == 422
    assert client.post(f"{RUN}/dumps", json={"tag": "first"}).status_code == 409


def test_a_fast_client_waits(tmp_path: Path) -> None:
    limits = {"min_size": 20, "samples_per_insert": 1.0, "error_buffer": 20.0, "wait_seconds": 60}
    with api_client(tmp_path, **limits) as client, ThreadPoolExecutor(1) as pool:
        client.put(RUN, json={})
        early = client.post(f"{RUN}/sample", json={"batch_size": 10})
        assert refusal_of(early) == (429, "rate_limited")
        told = {"rows": 20, "inserted": 20, "sampled": 0, "samples_per_insert": 1.0}
        assert post_rows(client, 20).json()["limits"] == told
        assert client.get(RUN).json()["limits"] == told
        assert post_rows(client, 20, 20).status_code == 200
        refused = post_rows(client, 10, 40)
        assert refusal_of(refused) == (429, "rate_limited")
        assert refused.headers["Retry-After"]
        late = pool.submit(post_rows, client, 10, 40, wait=60)
        for asked in ({}, {"seed": 1, "draw": 0}):  # draws by number count, too
            assert client.post(f"{RUN}/sample", json={"batch_size": 10} | asked).status_code == 200
        assert late.result(60).status_code == 200
        told = client.post(f"{RUN}/mass", json={}).json()["limits"]
        assert told == {"rows": 50, "inserted": 50, "sampled": 20, "samples_per_insert": 1.0}


def test_limits_that_could_stop_both_sides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="error_buffer"):
        Settings(path=tmp_path, samples_per_insert=4.0).limiter()
