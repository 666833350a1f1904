"""Conditions of clients: the allowed SQL, and the cost of refused conditions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api.errors import Refusal
from expstore.api.where_conditions import check_condition
from expstore.errors import QueryError
from expstore.sql import expressions
from tests.support.asgi import api_client, refusal_of
from tests.support.servers import serving

pytestmark = pytest.mark.index

ALLOWED = [
    "a.b > -1.5e3",
    "x IN (1, 2)",
    "source NOT IN ('left', 'right')",
    "NOT (x IS NULL) AND y BETWEEN 1 AND (2)",
    "x NOT BETWEEN -y AND 2 * y + 1 OR x IS NOT NULL",
    "observation[1] > 0 AND images[1][-2] <> 3",
    "_step % 10 = 0",
    "episode.return / episode.length >= 1 - x",
    "episode.start_time > TIMESTAMP '2026-01-31 12:00:00'",
    "episode.start_time < DATE '2026-01-31'",
    "x IS DISTINCT FROM NULL",
    "done = TRUE",
    "done -- a comment",
    " OR ".join(f"_id = {number}" for number in range(70)),
]
REFUSED = {
    "abs(x) = 1": "function abs()",
    "x LIKE 'a%'": "operator ~~",
    "x ** 2 = 1": "operator **",
    "x // 2 = 1": "operator //",
    "x || 'a' = 'a'": "operator ||",
    "x & 1 = 1": "operator &",
    "~x = 1": "operator ~",
    "x OPERATOR(pg_catalog.+) 1 = 2": "operator +",
    "x::VARCHAR = 'a'": "cast",
    "'a'::BLOB = x": "cast",
    "TRY_CAST('2026-01-31' AS INTERVAL) = x": "cast",
    "done IS TRUE": "cast",
    "x IN (SELECT 1)": "subquery",
    "x IN (1, y)": "IN with",
    "x = ANY(y)": "subquery",
    "x IN y": "function contains()",
    "x[1:2] = y": "slice",
    "x[y] = 1": "subscript",
    "x['a'] = 1": "subscript",
    "[1, 2][1] = 1": "subscript",
    "(x).y = 1": "STRUCT_EXTRACT",
    "CASE WHEN x THEN y END": "CASE",
    "x COLLATE NOCASE = 'a'": "COLLATE",
    "x = $1": "PARAMETER",
    "#1 = 1": "POSITIONAL_REFERENCE",
    "COLUMNS(*) = 1": "STAR",
    "sum(x) OVER () = 1": "WINDOW",
    "list_filter(x, lambda y: y > 1) = x": "function list_filter()",
    "(x -> x + 1) = 1": "lambda",
    "[y for y in x] = x": "function list_apply()",
    "x = INTERVAL 1 DAY": "function to_days()",
}
#: What may not take long, nor much memory, before it is refused.
BOMBS = {
    "lambda": "list_sum(list_transform(range(100000000), lambda y: y + 1)) > 0",
    "nested lambdas": "len(list_transform(range(9999), lambda a: list_transform(range(9999), "
    "lambda b: list_transform(range(9999), lambda c: a)))) > 0",
    "list comprehension": "len([[[c for c in range(9999)] for b in range(9999)] for a in range(999)]) > 0",
    "nested macros": "list_sum(" * 20 + "list_append(" * 20 + "range(9999)" + ", 1)" * 20 + ")" * 20 + " > 0",
    "text": "lpad('x', 2000000000, 'y') = 'x'",
    "added arrays": "observation" + " + observation" * 60 + " = observation",
    "brackets": "(" * 300 + "action = 1" + ")" * 300,
    "lists": "[" * 300 + "1" + "]" * 300 + " = action",
    "signs": "- " * 300 + "action = 1",
    "sums": "action" + "+1" * 300 + " = 1",
    "sums in brackets": "(1+" * 300 + "action" + ")" * 300 + " = 1",
    "negations": "NOT " * 240 + "action = 1",
    "more negations": "NOT " * 300 + "action = 1",
    "subscripts": "observation" + "[1]" * 300 + " = 1",
    "whole number": "action = " + "9" * 500,
    "length": "action = 1 OR " * 100_000 + "action = 2",
}  # fmt: skip


def test_conditions_that_may_be_said() -> None:
    assert [check_condition(text) for text in ALLOWED] == ALLOWED


@pytest.mark.guarantee(
    "access/where",
    "A client's `where` is a small part of SQL with no function but `selection`, and costs time and memory "
    "in proportion to the rows.",
)
def test_parts_that_conditions_may_not_have_are_named() -> None:
    for text, part in REFUSED.items():
        with pytest.raises(Refusal) as refused:
            check_condition(text)
        assert refused.value.status == 422
        assert part in refused.value.message


def test_conditions_are_one_expression() -> None:
    for text in ("", "x = 1; SELECT 1", "x AS y", "x = 1) FROM y --", "x = 'a\0'", "1, 2"):
        with pytest.raises(QueryError):
            check_condition(text)


def store_of_vectors(path: Path, rows: int = 2000) -> None:
    with expstore.open(path, capacity=rows) as rb:
        data = TensorDict({"observation": torch.ones(rows, 1764), "action": torch.arange(rows)}, [rows])
        data["next", "reward"] = torch.ones(rows, 1)
        rb.extend(data)


def memory_of(process: int) -> int:
    """Return the largest memory that a process has had, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def cpu_of(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.guarantee("access/where")
@pytest.mark.slow
def test_bombs_are_refused_at_once(tmp_path: Path) -> None:
    store_of_vectors(tmp_path / "run.exp")
    with serving(tmp_path) as (child, facts), httpx.Client(base_url=facts["listening"], timeout=60) as client:
        asked: dict[str, Any] = {"batch_size": 8, "where": "observation[1] + action * 2 >= 1"}
        assert client.post("/v1/stores/run/sample", json=asked).status_code == 200
        before = memory_of(child.pid)
        for name, text in BOMBS.items():
            began = cpu_of(child.pid)
            refused = client.post("/v1/stores/run/sample", json=asked | {"where": text})
            taken = cpu_of(child.pid) - began
            assert 400 <= refused.status_code < 500, (name, refused.text)
            assert taken < 1, (name, taken)
            sampler = {"sampler": {"kind": "uniform"}, "where": text}
            named = client.put("/v1/stores/run/samplers/x", json=sampler)
            assert 400 <= named.status_code < 500, (name, named.text)
        assert memory_of(child.pid) - before < 100 << 20
        assert client.post("/v1/stores/run/sample", json=asked).status_code == 200


@pytest.mark.guarantee("access/where")
def test_a_condition_that_takes_too_long_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first interrupt may come before DuckDB starts; the query may be over 50 ms later.
    monkeypatch.setattr(expressions, "_INTERRUPT_SECONDS", 0.001)
    store_of_vectors(tmp_path / "run.exp")
    text = " AND ".join(["observation >= observation"] * 30)
    with api_client(tmp_path, sql_seconds=0.001) as client:
        late = client.post("/v1/stores/run/sample", json={"where": text})
        assert refusal_of(late) == (504, "timeout")
        assert client.post("/v1/stores/run/sample", json={}).status_code == 200
