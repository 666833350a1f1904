"""The route that answers lines of a body while they arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from expstore.api import Settings, create_app
from expstore.wire.stream import frames_in
from tests.support.asgi import call
from tests.support.batches import numbered_rows
from tests.support.stores import build_store

ASKED = {"batch_size": 3, "sampler": {"kind": "prioritized"}, "seed": 5, "draw": 0}
LINE = json.dumps(ASKED).encode() + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_store(tmp_path / "run.exp", numbered_rows(10, key="x"))
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


def bodies_of(frames: Sequence[Any]) -> list[bytes]:
    return [bytes(frame.memory[frame.body :]) for frame in frames]


def test_each_line_gets_a_batch(folder: Path) -> None:
    for parts in ([LINE, LINE], [LINE + LINE], [LINE[:20], LINE[20:] + LINE[:5], LINE[5:]]):
        status, frames = send(folder, parts)
        assert status == 200
        assert [frame.rows for frame in frames] == [3, 3]
        first, second = bodies_of(frames)
        assert first == second  # the same draw of the seed


def test_a_line_may_ask_for_several_batches(folder: Path) -> None:
    several = json.dumps(ASKED | {"batches": 3}).encode() + b"\n"
    _, alone = send(folder, [json.dumps(ASKED | {"draw": n}).encode() + b"\n" for n in range(3)])
    _, frames = send(folder, [several, LINE])
    assert bodies_of(frames) == bodies_of([*alone, alone[0]])


def test_a_line_that_cannot_be_answered_ends_the_answer(folder: Path) -> None:
    for line in (
        b"{}}", b"", b'{"batch_size": 0}', b'{"sampler": "unknown"}', b'{"batch_size": 3, "wait": -1}',
        b'{"where": "no_field > 1"}', b'{"draw": 3}', b'{"batch_size": 2000000}',
    ):  # fmt: skip
        status, frames = send(folder, [LINE, line + b"\n", LINE])
        assert (status, [frame.rows for frame in frames]) == (200, [3]), line


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
