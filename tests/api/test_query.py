"""Queries over HTTP: episodes, SQL in a separate process, snapshots, and rate limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

import expstore
from expstore.api import Settings
from expstore.sql.sandbox import pool
from tests.support.arrow_bodies import ACCEPT_ARROW, ARROW, post_rows, rows_of
from tests.support.servers import Serving

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"
SETTINGS = Settings(path=Path(), sql_rows=100, wait_seconds=20)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    settings = replace(SETTINGS, path=tmp_path)
    with Serving(settings) as server, httpx.Client(base_url=server.url, timeout=60) as client:
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
    """As `--json` of the command line has them; a connection gets Arrow, and sends what it is given."""
    post_rows(client, 1)
    query = "SELECT 'nan'::DOUBLE AS x, [1.5, '-inf'::DOUBLE] AS y, {'a': 'inf'::FLOAT} AS z, NULL AS n"
    assert ask(client, query) == [[None, [1.5, None], {"a": None}, None]]
    with expstore.connect(f"{client.base_url}/run") as rb:
        ((x, y, z),) = rb.sql("SELECT isnan(?::DOUBLE), ?::DOUBLE, ?::DOUBLE", [np.nan, np.inf, -np.inf])
    assert (x, y, z) == (True, np.inf, -np.inf)


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
    assert (answer.status_code, answer.json()["error"]["kind"]) == (500, "sandbox")


def test_sql_reads_what_was_written_before_it_came(client: httpx.Client) -> None:
    post_rows(client, 30)
    assert ask(client, "SELECT count(*), max(action) FROM transitions") == [[30, 29]]
    post_rows(client, 1, 30)
    assert ask(client, "SELECT count(*), max(action) FROM transitions") == [[31, 30]]
    assert ask(client, "SELECT action FROM transitions WHERE action > ? ORDER BY 1", params=[28]) == [
        [29],
        [30],
    ]
    whole = client.post(
        f"{RUN}/sql",
        json={"query": "SELECT * FROM range(1000)"},
        headers={"Accept": ARROW["Content-Type"]},
    )
    assert whole.headers["X-Truncated"] == "true"
    assert pa.ipc.open_stream(whole.content).read_all().num_rows == 100
    assert len(ask(client, "SELECT * FROM range(1000)", limit=7)) == 7


@pytest.mark.slow
def test_sql_reads_the_priorities_that_were_set_before_it_came(client: httpx.Client) -> None:
    post_rows(client, 10)
    for round_ in range(1, 8):
        body = {"ids": [3, 4], "priorities": [round_, 2 * round_]}
        client.post(f"{RUN}/priorities", json=body).raise_for_status()
        found = ask(client, "SELECT _priority FROM transitions WHERE _id IN (3, 4) ORDER BY _id")
        assert found == [[round_], [2 * round_]]


def test_sql_that_is_refused(client: httpx.Client, tmp_path: Path) -> None:
    post_rows(client, 30)
    (tmp_path / "secret").write_text("canary")
    for query in (
        "DELETE FROM transitions",
        "SELECT 1; SELECT 2",
        "SELEC",
        f"FROM read_text('{tmp_path}/secret')",
    ):
        refused = client.post(f"{RUN}/sql", json={"query": query})
        assert refused.status_code == 422, refused.text
        assert "canary" not in refused.text
    slow = client.post(f"{RUN}/sql", json={"query": "SELECT count(*) FROM range(1000000000000)"})
    assert (slow.status_code, slow.json()["error"]["kind"]) == (504, "timeout")
    assert ask(client, "SELECT 1") == [[1]]


def get(client: httpx.Client, q: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return client.get(f"{RUN}/sql", params={"q": q, **more}, headers=headers)


@pytest.mark.slow
def test_a_url_asks_in_sql_as_a_body_does(client: httpx.Client, tmp_path: Path) -> None:
    post_rows(client, 30)
    query = "SELECT count(*) AS rows, max(action) AS 'largest & last' FROM transitions"
    answer = get(client, query)
    assert answer.json() == {"columns": ["rows", "largest & last"], "rows": [[30, 29]]}
    assert answer.headers["X-Truncated"] == "false"
    whole = get(client, "SELECT * FROM range(1000)", ACCEPT_ARROW)
    assert whole.headers["X-Truncated"] == "true"
    assert pa.ipc.open_stream(whole.content).read_all().num_rows == 100  # as the server's limit is
    assert len(get(client, "SELECT * FROM range(1000)", limit=7).json()["rows"]) == 7
    (tmp_path / "secret").write_text("canary")
    for query in (
        "DELETE FROM transitions", "SELECT 1; SELECT 2", "SELEC", f"FROM read_text('{tmp_path}/secret')", "",
        "SELECT '" + "x" * 16_384 + "'",
    ):  # fmt: skip
        refused = get(client, query)
        assert refused.status_code == 422, refused.text
        assert "canary" not in refused.text
    assert client.get(f"{RUN}/sql").status_code == get(client, "SELECT 1", limit=0).status_code == 422
    slow = get(client, "SELECT count(*) FROM range(1000000000000)")
    assert (slow.status_code, slow.json()["error"]["kind"]) == (504, "timeout")
    assert get(client, "SELECT count(*) FROM transitions").json()["rows"] == [[30]]


def test_pages_of_other_sites_ask_nothing_in_sql(client: httpx.Client) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        refused = get(client, "SELECT 1", headers)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "origin")
    assert get(client, "SELECT 1", {"Sec-Fetch-Site": "none"}).json()["rows"] == [[1]]  # typed into a browser


def test_servers_without_sql(tmp_path: Path) -> None:
    with (
        Serving(replace(SETTINGS, path=tmp_path, sql=False)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        client.put(RUN, json={})
        post_rows(client, 30)
        assert client.post(f"{RUN}/sql", json={"query": "SELECT 1"}).status_code == 403
        assert get(client, "SELECT 1").status_code == 403
        assert len(client.get(f"{RUN}/episodes").json()["rows"]) == 3


@pytest.mark.slow
def test_versions_are_made_and_gone_back_to(client: httpx.Client) -> None:
    post_rows(client, 30)
    made = client.post(f"{RUN}/dumps", json={"tag": "first"})
    assert (made.status_code, made.json()["rows"]) == (201, 30), made.text
    post_rows(client, 10, 30)
    assert client.post(f"{RUN}/dumps", json={}).json()["number"] == 2
    told = client.get(f"{RUN}/versions").json()["versions"]
    assert [(version["number"], version["tag"], version["rows"]) for version in told] == [
        (1, "first", 30),
        (2, None, 40),
    ]
    asked = {"seed": 1, "draw": 0, "batch_size": 8}
    before = rows_of(client.post(f"{RUN}/sample", json=asked, headers=ACCEPT_ARROW).content)
    assert client.post(f"{RUN}/loads", json={"version": "first"}).json()["rows"] == 30
    after = rows_of(client.post(f"{RUN}/sample", json=asked, headers=ACCEPT_ARROW).content)
    assert (before["action"] != after["action"]).any()
    assert (after["action"] < 30).all()
    assert ask(client, "SELECT count(*) FROM transitions") == [[30]]
    for bad, status in (({"version": "other"}, 409), ({"version": "../x"}, 409), ({"version": -1}, 409)):
        assert client.post(f"{RUN}/loads", json=bad).status_code == status
    assert client.post(f"{RUN}/dumps", json={"tag": "../x"}).status_code == 422
    assert client.post(f"{RUN}/dumps", json={"tag": "first"}).status_code == 409


def test_a_fast_client_waits(tmp_path: Path) -> None:
    settings = replace(SETTINGS, path=tmp_path, min_size=20, samples_per_insert=1.0, error_buffer=20.0)
    with (
        Serving(settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        httpx.Client(base_url=server.url, timeout=60) as other,
    ):
        client.put(RUN, json={})
        early = client.post(f"{RUN}/sample", json={"batch_size": 10})
        assert (early.status_code, early.json()["error"]["kind"]) == (429, "rate_limited")
        told = {"rows": 20, "inserted": 20, "sampled": 0, "samples_per_insert": 1.0}
        assert post_rows(client, 20).json()["limits"] == told
        assert client.get(RUN).json()["limits"] == told
        assert post_rows(client, 20, 20).status_code == 200
        refused = post_rows(client, 10, 40)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (429, "rate_limited")
        assert refused.headers["Retry-After"]
        answers: list[int] = []
        late = partial(post_rows, other, 10, 40, wait=20)
        waiting = threading.Thread(target=lambda: answers.append(late().status_code))
        waiting.start()
        for asked in ({}, {"seed": 1, "draw": 0}):  # draws by number count, too
            assert client.post(f"{RUN}/sample", json={"batch_size": 10} | asked).status_code == 200
        waiting.join(30)
        assert answers == [200]
        told = client.post(f"{RUN}/mass", json={}).json()["limits"]
        assert told == {"rows": 50, "inserted": 50, "sampled": 20, "samples_per_insert": 1.0}


def test_limits_that_could_stop_both_sides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="error_buffer"):
        replace(SETTINGS, path=tmp_path, samples_per_insert=4.0).limiter()
