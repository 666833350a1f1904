"""The route that reads a conversation: each message once, however rows repeat it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import expstore
from expstore.api.page import messages
from expstore.specs import Continued
from tests.support.asgi import api_client

_ROUTE = "/v1/stores/run/episodes/1/messages"


def _write(folder: Path, rows: list[list[str]], kind: Any) -> None:
    with expstore.open(folder / "run.exp", layout="arrow", schema={"messages": kind, "a": "int64"}) as rb:
        for number, row in enumerate(rows):
            rb.extend({"messages": [row], "a": [number]}, source="e")


def _read(client: httpx.Client, **params: Any) -> tuple[dict[int, list[str]], list[dict[str, Any]]]:
    """Return the whole list of each row, and the rows of all answers; asks until there is no next one."""
    whole, rows, start = dict[int, list[str]](), list[dict[str, Any]](), 0
    while start is not None:
        known = {"known": start - 1} if start else {}
        answer = client.get(_ROUTE, params={"start": start, **known, **params})
        assert answer.status_code == 200, answer.text
        for row in answer.json()["rows"]:
            begin = [] if row["like"] is None else whole[row["like"]][: row["shared"]]
            whole[row["step"]] = begin + row["messages"]
            rows.append(row)
        start = answer.json()["next"]
    return whole, rows


@pytest.mark.parametrize("kind", [Continued(str), pa.list_(pa.string())])
@pytest.mark.parametrize("count", [1, 3, 256])
def test_lists_are_sent_once_and_can_be_put_together(
    tmp_path: Path, kind: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that continue any earlier row, begin anew, repeat, or are empty."""
    chance = random.Random(count)
    rows: list[list[str]] = [[]]
    for number in range(30):
        begin = chance.choice(rows[-3:])
        kept = begin[: chance.choice([0, len(begin) // 2, len(begin), len(begin)])]
        rows.append([*kept, *(f"{number} ✓ {place}" for place in range(chance.randrange(3)))])
    _write(tmp_path, rows, kind)
    monkeypatch.setattr(messages, "_CHARACTERS", 100)
    with api_client(tmp_path) as client:
        whole, answered = _read(client, count=count)
        assert whole == dict(enumerate(rows))
        if count == 256:
            sent = [text for row in answered for text in row["messages"]]
            assert len(sent) < len(set(sent)) * 2, (
                "only what is older than the row before an answer comes again"
            )
        for params in ({"field": "a"}, {"field": "x"}):
            refused = client.get(_ROUTE, params=params)
            assert refused.status_code == 422
            assert "messages" in refused.json()["error"]["hint"]
        assert client.get("/v1/stores/run/episodes/9/messages").status_code == 404
