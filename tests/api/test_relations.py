"""The description of what SQL sees: every column can be queried, and docs/sql.md says the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import expstore
from tests.support.arrow_bodies import batch_of
from tests.support.asgi import api_client
from tests.support.paths import ROOT

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


def ask(client: httpx.Client) -> dict[str, Any]:
    answer = client.get(f"{RUN}/relations")
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["relations"]}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "read_only"), [("zarr", False), ("arrow", True)])
def test_every_column_can_be_queried(tmp_path: Path, layout: str, read_only: bool) -> None:
    data = batch_of(20)
    for name in ("odd name", "_id", "select"):
        data[name] = data["action"].clone()
    if layout == "arrow":
        data["text"] = ["a"] * 20
    with expstore.open(tmp_path / "run.exp", layout=layout) as rb:
        rb.extend(data)
    with api_client(tmp_path, read_only=read_only, sql_seconds=30) as client:
        told = ask(client)
        assert list(told) == [
            "transitions", "recent", "episodes", "fragments", "sources", "priorities", "commits", "draws",
            "annotations", "groups", "selections", "lineage", "meta",
        ]  # fmt: skip
        for name, relation in told.items():
            columns = [column["sql"] for column in relation["columns"]]
            query = f"SELECT {', '.join(columns)} FROM {name} LIMIT 1"
            answer = client.post(f"{RUN}/sql", json={"query": query})
            assert answer.status_code == 200, answer.text
        columns = {column["name"]: column for column in told["transitions"]["columns"]}
        assert (columns["next.reward"]["sql"], columns["next.reward"]["type"]) == ("next.reward", "FLOAT")
        assert columns["odd name"]["sql"] == '"odd name"'
        assert columns["select"]["sql"] == '"select"'
        assert columns["_id_"]["type"] == "BIGINT"
        assert columns["observation"]["type"] == "FLOAT[2]"
        assert ("text" in columns) is (layout == "arrow")
        assert "_sampled" not in columns


def test_an_empty_store_and_a_server_without_sql(tmp_path: Path) -> None:
    for sql, status in ((True, 200), (False, 403)):
        with api_client(tmp_path, sql=sql) as client:
            client.put(RUN, json={})
            answer = client.get(f"{RUN}/relations")
            assert answer.status_code == status
            if sql:
                columns = answer.json()["relations"][0]["columns"]
                assert [column["name"] for column in columns][:2] == ["_id", "_index"]


def test_the_docs_say_the_same(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "sql.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |^## |\Z)", text, re.M | re.S))
    with expstore.open(tmp_path / "run.exp", capacity=20) as rb:
        rb.extend(batch_of(5))
    with api_client(tmp_path) as client:
        body = {"sampler": {"kind": "consuming"}}
        client.put(f"{RUN}/samplers/mine", json=body).raise_for_status()
        client.post(f"{RUN}/sample", json={"sampler": "mine", "batch_size": 2}).raise_for_status()
        told = ask(client)
    assert set(told) == set(sections)
    for name, relation in told.items():
        table = re.findall(r"^\| `(\w+)` \| ([\w\[\]]+) \| (.*?) \|$", sections[name], re.M)
        found = [(one["name"], one["type"], one["description"]) for one in relation["columns"]]
        assert [one for one in found if one[2]] == table
