"""Pages of episodes: order, cursors, conditions, and totals, also while a writer adds episodes."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import QueryError
from expstore.sql.sandbox.pool import SqlWorker
from tests.support.arrow_bodies import ACCEPT_ARROW
from tests.support.asgi import api_client

pytestmark = pytest.mark.index

RUN = "/v1/stores/run/episodes"
COLUMNS = {
    "episode_id", "source", "length", "return", "status", "start_time", "end_time", "split",
    "selections",
    "trajectory_id", "live_rows", "info",
}  # fmt: skip
ORDERS = ("episode_id", "length", "return", "source", "status", "start_time", "info.score", "trajectory_id")


def add_episode(rb: TensorDictReplayBuffer, length: int, reward: float, **options: Any) -> None:
    done = torch.zeros(length, 1, dtype=torch.bool)
    done[-1] = True
    rewards = torch.full((length, 1), reward)
    rb.extend(
        TensorDict({"next": {"reward": rewards, "done": done, "terminated": done}}, [length]), **options
    )


def fill(rb: TensorDictReplayBuffer, first: int = 0, count: int = 30) -> None:
    """Add episodes with equal lengths, returns and facts among them, and episodes without facts."""
    for number in range(first, first + count):
        facts = {"score": number % 3, "kind": f"k{number % 2}"} if number % 4 else None
        reward = float("nan") if number % 7 == 3 else float(number % 3)
        add_episode(rb, 1 + number % 5, reward, source=f"s{number % 3}", episode_info=facts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    with expstore.open(found / "run.exp") as rb:
        fill(rb)
    return found


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with api_client(folder) as client:
        yield client


def ask(client: httpx.Client, **params: Any) -> tuple[list[int], httpx.Headers]:
    answer = client.get(RUN, params=params)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert set(told["columns"]) == COLUMNS
    place = told["columns"].index("episode_id")
    return [row[place] for row in told["rows"]], answer.headers


def walk(client: httpx.Client, header: str, page: str | None = None, **params: Any) -> list[list[int]]:
    """Return the pages from one on, in the order of their cursors."""
    pages = []
    while True:
        more = {} if page is None else {"page": page}
        ids, headers = ask(client, **params, **more)
        pages.append(ids)
        if header not in headers:
            return pages
        page = headers[header]


@pytest.mark.some(4)
@pytest.mark.parametrize("where", [None, "length > 1"])
@pytest.mark.parametrize("order", [*ORDERS, *(f"-{name}" for name in ORDERS)])
def test_pages_have_every_episode_once(client: httpx.Client, order: str, where: str | None) -> None:
    """Ties, NULL and NaN included, and the way back is the same."""
    params = {"order": order} | ({} if where is None else {"where": where})
    whole, headers = ask(client, **params)
    count = 30 if where is None else 24
    assert len(set(whole)) == count
    assert headers["X-Total"] == str(count)
    assert "X-Next" not in headers
    assert "X-Previous" not in headers
    pages = walk(client, "X-Next", limit=7, **params)
    assert [len(page) for page in pages] == [7] * (count // 7) + [count % 7]
    assert list(itertools.chain(*pages)) == whole
    for _ in pages[:-1]:
        _, headers = ask(client, limit=7, **params)
        params["page"] = headers["X-Next"]
    _, headers = ask(client, limit=7, **params)
    del params["page"]
    assert walk(client, "X-Previous", headers["X-Previous"], limit=7, **params) == pages[-2::-1]


def test_orders_are_right(client: httpx.Client) -> None:
    table = pa.ipc.open_stream(client.get(RUN, headers=ACCEPT_ARROW).content).read_all().to_pylist()
    facts = {row["episode_id"]: json.loads(row["info"] or "{}") for row in table}
    assert set(table[0]) == COLUMNS

    def score(number: int) -> tuple[bool, float, int]:
        return "score" not in facts[number], facts[number].get("score", 0), number

    assert ask(client, order="info.score")[0] == sorted(facts, key=score)
    down = ask(client, order="-info.score")[0]
    assert down == sorted(facts, key=lambda n: (score(n)[0], -score(n)[1], -n))
    assert ask(client, order="info.kind")[0] == sorted(facts)  # texts are no numbers
    lengths = {row["episode_id"]: row["length"] for row in table}
    assert ask(client, order="-length")[0] == sorted(lengths, key=lambda n: (-lengths[n], -n))


def test_pages_stay_right_while_episodes_are_added(tmp_path: Path) -> None:
    """By a writer of another process, which the read-only server follows."""
    with expstore.open(tmp_path / "run.exp") as rb:
        fill(rb)
        rb.flush()  # small batches become readable a moment later otherwise
        with api_client(tmp_path, read_only=True) as client:
            first, headers = ask(client, order="-episode_id", limit=10)
            assert first == list(range(30, 20, -1))
            fill(rb, 30, 5)
            rb.flush()
            second, headers = ask(client, order="-episode_id", limit=10, page=headers["X-Next"])
            assert second == list(range(20, 10, -1))
            assert headers["X-Total"] == "35"
            before = walk(client, "X-Previous", headers["X-Previous"], order="-episode_id", limit=10)
            assert before == [first, list(range(35, 30, -1))]


def test_conditions_over_facts(client: httpx.Client) -> None:
    found, headers = ask(client, where="info->>'kind' = 'k1' AND length > 1")
    assert len(found) == int(headers["X-Total"]) == 12
    assert ask(client, where="status = 'terminated' -- every one")[1]["X-Total"] == "30"
    assert ask(client, where="length > 100")[0] == []
    assert ask(client, where="length > 1", source="s1", after=10)[0] == [
        number for number in range(11, 31) if (number - 1) % 3 == 1 and (number - 1) % 5
    ]


def test_conditions_that_are_refused(client: httpx.Client) -> None:
    for where in (
        "nothing > 1", "length >", "1 = 1) UNION ALL (SELECT 1, 2", "1=1); DROP TABLE sources; --",
        "length > $low", "(SELECT count(*) FROM read_text('/etc/passwd')) > 0",
        "(" * 1500 + "1=1" + ")" * 1500, "1 = 1) AS e UNION ALL SELECT * FROM (SELECT 1 AS episode_id",
    ):  # fmt: skip
        answer = client.get(RUN, params={"where": where})
        assert answer.status_code == 422, answer.text
        assert "root:" not in answer.text
    assert len(ask(client)[0]) == 30


def test_cursors_that_are_refused(client: httpx.Client) -> None:
    cursor = ask(client, limit=5, order="length")[1]["X-Next"]

    def pack(*values: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()

    for page, order in (
        (cursor, "-length"), ("x", "length"), ("", "length"), ("\u202e", "length"), (pack(), "length"),
        (pack(False, "length", [1], 1), "length"), (pack(False, "length", 1, -1), "length"),
        (pack(False, "length", 1, "1"), "length"), (pack(False, "length", 1 << 70, 1), "length"),
    ):  # fmt: skip
        answer = client.get(RUN, params={"page": page, "order": order})
        assert answer.status_code == 422, (page, answer.text)
    for order in ("episode_id DESC", "length; DROP TABLE x", "--length", "info.", "nothing", "-", ""):
        assert client.get(RUN, params={"order": order}).status_code == 422
    hostile = """info.a'b"c/~<script>\u202e"""
    assert len(walk(client, "X-Next", limit=20, order=hostile)) == 2
    odd = client.get(RUN, params={"page": pack(False, "length", "five", 1), "order": "length"})
    assert odd.status_code == 422, odd.text


def test_answers_are_cut_to_the_limits_of_sql(folder: Path) -> None:
    with api_client(folder, sql_rows=10, read_only=True) as client:
        pages = walk(client, "X-Next", where="length > 1")
        assert [len(page) for page in pages] == [9, 9, 6]
        cursor = ask(client, where="length > 1", page=ask(client, where="length > 1")[1]["X-Next"])[1]
        assert walk(client, "X-Previous", cursor["X-Previous"], where="length > 1") == pages[:1]
        assert client.get(RUN).headers["X-Total"] == "30"


def test_servers_without_sql_refuse_conditions_only(folder: Path) -> None:
    with api_client(folder, sql=False, read_only=True) as client:
        assert client.get(RUN, params={"where": "length > 1"}).status_code == 403
        assert len(ask(client, order="-length")[0]) == 30


def test_a_total_that_takes_too_long_is_left_out(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = SqlWorker.query

    def refuse_counts(worker: SqlWorker, sql: str, *rest: Any, **more: Any) -> Any:
        if sql.startswith("SELECT count(*)"):
            raise QueryError("it took too long", kind="timeout")
        return query(worker, sql, *rest, **more)

    monkeypatch.setattr(SqlWorker, "query", refuse_counts)
    found, headers = ask(client, where="length > 1", limit=5)
    assert len(found) == 5
    assert "X-Total" not in headers
    assert "X-Next" in headers


def test_long_names_of_sources_do_not_lengthen_cursors(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        for letter in "cba":
            add_episode(rb, 2, 1.0, source=letter * 10_000)
    with api_client(tmp_path) as client:
        assert walk(client, "X-Next", limit=1, order="source") == [[3], [2], [1]]
        assert len(ask(client, limit=1, order="source")[1]["X-Next"]) < 100


@pytest.mark.slow
def test_an_empty_store_has_no_pages(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put("/v1/stores/run", json={}).raise_for_status()
        for params in ({}, {"where": "length > 1"}, {"order": "-info.x"}):
            ids, headers = ask(client, **params)
            assert (ids, headers["X-Total"]) == ([], "0")
