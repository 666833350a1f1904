"""The route that answers lines of a body while they arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import expstore
from expstore.api import Settings, create_app
from expstore.wire.stream import frames_in
from tests.support.asgi import call

ASKED = {"batch_size": 3, "sampler": {"kind": "prioritized"}, "seed": 5, "draw": 0}
LINE = json.dumps(ASKED).encode() + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with expstore.open(tmp_path / "run.exp", schema={"x": "int64"}) as rb:
        rb.extend(TensorDict({"x": [*range(10)]}, [10]))
    return tmp_path


def send(folder: Path, parts: Sequence[bytes], name: str = "run") -> tuple[int, list[Any]]:
    """Send parts of a body; return the status and the record batches of the answer."""
    app = create_app(Settings(path=folder))
    incoming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    incoming.append({"type": "http.request", "body": b"", "more_body": False})

    async def run() -> list[Any]:
        async with app.router.lifespan_context(app):
            return await call(app, method="POST", path=f"/v1/stores/{name}/draws", incoming=incoming)

    start, *sent = asyncio.run(run())
    body = bytearray(b"".join(message["body"] for message in sent))
    is_rows = start["status"] == 200 and len(body) > 8
    return start["status"], frames_in(body) if is_rows else []


def test_each_line_gets_a_batch(folder: Path) -> None:
    for parts in ([LINE, LINE], [LINE + LINE], [LINE[:20], LINE[20:] + LINE[:5], LINE[5:]]):
        status, frames = send(folder, parts)
        assert status == 200
        assert [frame.rows for frame in frames] == [3, 3]
        first, second = (bytes(frame.memory[frame.body :]) for frame in frames)
        assert first == second  # the same draw of the seed


def test_a_line_may_ask_for_several_batches(folder: Path) -> None:
    several = json.dumps(ASKED | {"batches": 3}).encode() + b"\n"
    _, alone = send(folder, [json.dumps(ASKED | {"draw": n}).encode() + b"\n" for n in range(3)])
    _, frames = send(folder, [several, LINE])
    bodies = [bytes(frame.memory[frame.body :]) for frame in frames]
    assert bodies == [bytes(frame.memory[frame.body :]) for frame in (*alone, alone[0])]


@pytest.mark.parametrize(
    "line",
    [b"{}}\n", b"\n", b'{"batch_size": 0}\n', b'{"sampler": "unknown"}\n', b'{"batch_size": 3, "wait": -1}\n',
     b'{"where": "no_field > 1"}\n', b'{"draw": 3}\n', b'{"batch_size": 2000000}\n'],
)  # fmt: skip
def test_a_line_that_cannot_be_answered_ends_the_answer(folder: Path, line: bytes) -> None:
    status, frames = send(folder, [LINE, line, LINE])
    assert status == 200
    assert [frame.rows for frame in frames] == [3]


def test_lines_and_bodies_without_an_end(folder: Path) -> None:
    assert send(folder, []) == (200, [])
    assert [frame.rows for frame in send(folder, [LINE, b"x" * 70_000, LINE])[1]] == [3]
    _, frames = send(folder, [LINE, LINE[:-1]])
    assert [frame.rows for frame in frames] == [3]
    assert send(folder, [LINE], name="other")[0] == 404


def test_a_client_that_has_gone_gets_no_more_batches(folder: Path) -> None:
    """Otherwise one line could keep the server busy for ever."""
    app = create_app(Settings(path=folder))
    line = json.dumps(ASKED | {"batches": 1 << 40}).encode() + b"\n"
    drawn: list[int] = []

    async def run() -> None:
        incoming = [{"type": "http.request", "body": line, "more_body": True}]
        async with app.router.lifespan_context(app):
            await call(app, method="POST", path="/v1/stores/run/draws", incoming=incoming)
            drawn.append(app.state.stores.get("run").member.rows_drawn)

    asyncio.run(run())
    assert 0 <= drawn[0] < 100_000
