"""`annotate` of a served store, and of a worker, does what it does in the process that writes the store."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.api import Settings
from expstore.api.bodies import ARROW
from expstore.buffers.annotations import pack_annotations
from expstore.errors import ExpStoreError, RemoteError
from tests.support.asgi import api_client
from tests.support.servers import Serving

pytestmark = pytest.mark.index

SCHEMA = {"tokens": ("int32", (None,)), "done": bool}
JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(0)], layout=torch.jagged)
#: Ids, values and options.
CALLS: list[tuple[Any, Any, dict[str, Any]]] = [
    ([1, 3], {"advantage": [0.5, -1.0], "logprobs": [[0.1, 1.5, 2.5], [2.0, 3.0]]}, {"like": "tokens"}),
    (torch.tensor([2]), {"advantage": torch.tensor([2.0])}, {"by": "trainer-3"}),
    ([1, 1], {"half": np.ones(2, np.float16), "flag": [True, False], ("group", "n"): [3, 4]}, {"by": "x"}),
    ([2, 3], {"frame": np.arange(12, dtype=np.uint8).reshape(2, 2, 3), "wide": np.ones(2)}, {}),
    (
        [2, 3],
        {"wide": [0.1, 1e300], "ragged": JAGGED},
        {},
    ),
    ([1], {"logprobs": [np.zeros(3, np.float32)]}, {}),
    ([], {"nothing": []}, {}),
    ([1], {"logprobs": [[1.0]]}, {}),
    ([1, 9], {"advantage": [1.0, 2.0]}, {}),
    ([1], {"done": [True]}, {}),
    ([1, 2], {"advantage": [1.0]}, {}),
    ([1], {"advantage": np.ones(1)}, {}),
    ([1], {"advantage": np.ones((1, 2), np.float32)}, {}),
    ([1], {"text": ["a"]}, {}),
    ([1], {"missing": [None]}, {}),
    ([1], {"id": [1.0]}, {}),
    ([1], {"other": [[1.0]]}, {"like": "done"}),
    ([1], {}, {}),
    ([1], {"advantage": [1.0]}, {"by": 3}),
    (["a"], {"advantage": [1.0]}, {}),
]


def build(path: Path) -> Any:
    rb = expstore.open(path, batch_size=4, layout="arrow", schema=SCHEMA)
    rb.extend({"tokens": [[5, 6, 7], [8], [9, 10]], "done": [True] * 3})
    return rb


def annotate(rb: Any, call: tuple[Any, Any, dict[str, Any]]) -> str:
    try:
        rb.annotate(call[0], call[1], **call[2])
    except ExpStoreError as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def content(rb: Any) -> tuple[str, list[Any], list[Any]]:
    """Return the fields, all values, and the rows."""
    rows = rb.sql("SELECT id, field, value, author, number FROM annotations ORDER BY number, field, id")
    newest = rb.sql("SELECT * EXCLUDE (_time) FROM transitions ORDER BY _id")
    return repr(rb.schema), list(map(str, rows)), list(map(str, newest))


@pytest.fixture(params=["served", "worker"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return a buffer whose store another process, or the buffer it is a copy of, writes."""
    with ExitStack() as stack:
        if request.param == "served":
            build(tmp_path / "run.exp").close()
            server = stack.enter_context(Serving(Settings(path=tmp_path, sql_seconds=60.0)))
            found = stack.enter_context(expstore.connect(f"http://127.0.0.1:{server.port}/run"))
        else:
            owner = stack.enter_context(build(tmp_path / "run.exp")).share()
            found = stack.enter_context(pickle.loads(pickle.dumps(owner)))
        yield found


@pytest.mark.guarantee(
    "server/annotations",
    "`annotate` over a connection, and in a worker, has the result and the errors that it has in the process "
    "that writes the store.",
)
def test_calls_from_elsewhere_are_those_of_the_writer(away: Any, tmp_path: Path) -> None:
    with build(tmp_path / "local.exp") as rb:
        for call in CALLS:
            refused = annotate(rb, call)
            assert annotate(away, call) == refused, call
            if not refused or call is CALLS[-1]:  # what a refused call has changed is seen at the end
                assert content(away) == content(rb), call
        assert len(content(rb)[1]) == 20


def test_several_shards_are_annotated_one_by_one(tmp_path: Path) -> None:
    build(tmp_path / "run.exp").close()
    with Serving(Settings(path=tmp_path)) as server:
        url = f"http://127.0.0.1:{server.port}/run"
        with expstore.connect([url]) as rb, pytest.raises(RemoteError, match="connect"):
            rb.annotate([1], {"advantage": [1.0]})


def test_bodies(tmp_path: Path) -> None:
    build(tmp_path / "run.exp").close()
    packed = pack_annotations([1], {"advantage": [2.0]}, None, None)
    with api_client(tmp_path) as client:
        route = "/v1/stores/run/annotations"

        def count() -> int:
            asked = {"query": "SELECT count(*) AS n FROM annotations"}
            found: int = client.post("/v1/stores/run/sql", json=asked).json()["rows"][0][0]
            return found

        values = {"advantage": [0.5, 1], "more": [[1, 2, 3], [4, 5]]}
        good = {"ids": [1, 3], "values": values, "by": "a", "like": "tokens"}
        for _ in range(2):  # the second one has the key of the first
            client.post(route, json=good, headers={"Idempotency-Key": "k"}).raise_for_status()
        assert count() == 4
        asked = {"ids": [1], "priorities": [1.0]}  # a key of one route says nothing about another one
        answer = client.post("/v1/stores/run/priorities", json=asked, headers={"Idempotency-Key": "k"})
        assert answer.json() == {"updated": 1}
        client.post(route, content=packed, headers={"Content-Type": ARROW}).raise_for_status()
        assert count() == 5
        one = {"advantage": [1.0]}
        for body in (
            [1], {}, {"ids": [1]}, {"ids": [1], "values": []}, {"ids": [1], "values": one, "from": "x"},
            {"ids": ["a"], "values": one}, {"ids": [1.5], "values": one}, {"ids": None, "values": one},
            {"ids": [1], "values": {"advantage": 1}}, {"ids": [1], "values": {"advantage": [None]}},
            {"ids": [1], "values": {"advantage": [{}]}}, {"ids": [1], "values": {"more": [[1, [2], 3]]}},
            {"ids": [1], "values": {"": [1]}}, {"ids": [1], "values": {"_row": [1]}},
            {"ids": [1], "values": one, "by": 3}, {"ids": [1], "values": one, "like": 3},
            {"ids": [1], "values": {"big": [2**70]}},
        ):  # fmt: skip
            assert client.post(route, json=body).status_code == 422, body
        assert client.post(route, json={"ids": [9], "values": one}).status_code == 404
        assert client.post(route, content=packed[:-20], headers={"Content-Type": ARROW}).status_code == 422
        assert count() == 5
