"""Calls to a language model through `expstore capture`, compared with direct ones.

Run as `python -m benchmarks.capture`; exits 1 beyond a bar, which limits the time that the proxy adds. A fake
model's server, the proxy and the client are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.probes import ROOT
from benchmarks.report import Bar, Result, Setup, run_program

BARS = {
    "first byte": Bar(2.0, " ms"), "stream": Bar(3.0, " ms"), "whole": Bar(3.0, " ms"),
    "64 clients": Bar(20.0, " ms"),
}  # fmt: skip
#: Calls of one client to each side; clients, calls a second of all of them, and seconds of the open loop.
CALLS, CLIENTS, RATE, SECONDS = 300, 64, 50, 12.0
EVENTS = 20

_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
_WORDS = [
    {**_CHUNK, "choices": [{"index": 0, "delta": {"content": f"word {at} "}, "finish_reason": None}]}
    for at in range(EVENTS)
]
_STREAM = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in _WORDS] + [b"data: [DONE]\n\n"]
_MESSAGE = {"role": "assistant", "content": "word " * EVENTS}
_WHOLE = json.dumps({
    "id": "c", "object": "chat.completion", "created": 1, "model": "fake",
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
}).encode()  # fmt: skip
_END = b"0\r\n\r\n"


# -- a fake model's server ---------------------------------------------------------------------------


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests: events, each written by itself, or a whole answer."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(size)
            if b'"stream": true' in body[-40:]:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                for event in _STREAM:
                    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                    await asyncio.sleep(0)
                writer.write(_END)
            else:
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % len(_WHOLE) + _WHOLE)
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=1 << 23)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


@contextmanager
def _start(*command: str) -> Iterator[str]:
    """Run a program that prints its address in its first line."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            yield json.loads(line)["listening"] if line.startswith("{") else line.strip()
        finally:
            child.terminate()
            child.wait(60)


# -- clients -----------------------------------------------------------------------------------------


def _request(url: str, *, stream: bool, size: int = 2000) -> bytes:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * size}]
    body = json.dumps({"model": "fake", "messages": messages, "stream": stream}).encode()
    parts = urlsplit(url)
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _is_whole(answer: bytearray) -> bool:
    head, found, rest = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    if b"200 OK" not in head[:20]:
        raise RuntimeError(bytes(answer[:300]))
    size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return len(rest) >= int(size) if size else rest.endswith(_END)


class _Client:
    """One client with a connection that is kept open."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._socket = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, request: bytes) -> tuple[float, float]:
        """Return the seconds until the first byte of the body, and until the end."""
        answer, first = bytearray(), 0.0
        began = time.perf_counter()
        self._socket.sendall(request)
        while not _is_whole(answer):
            answer += self._socket.recv(1 << 16)
            if not first and answer.find(b"\r\n\r\n") not in (-1, len(answer) - 4):
                first = time.perf_counter() - began
        return first, time.perf_counter() - began


def _alternate(urls: list[str], calls: int, **request: Any) -> list[list[tuple[float, float]]]:
    """Make calls to each address in turn; return the times of each."""
    clients = [_Client(url) for url in urls]
    requests = [_request(url, **request) for url in urls]
    times: list[list[tuple[float, float]]] = [[] for _ in urls]
    for number in range(calls + 10):
        for at, client in enumerate(clients):
            found = client.call(requests[at])
            if number >= 10:
                times[at].append(found)
    return times


async def _offer(url: str, seconds: float) -> list[float]:
    """Make calls at a fixed rate from many clients; return the seconds of each from when it was due."""
    parts, request, times = urlsplit(url), _request(url, stream=True), list[float]()
    free = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(CLIENTS)]
    started = time.perf_counter() + 0.1

    async def call(due: float) -> None:
        reader, writer = free.pop(0) if free else await asyncio.open_connection(parts.hostname, parts.port)
        answer = bytearray()
        writer.write(request)
        while not _is_whole(answer):
            answer += await reader.read(1 << 16)
        times.append(time.perf_counter() - due)
        free.append((reader, writer))

    async with asyncio.TaskGroup() as tasks:
        for number in range(int(RATE * seconds)):
            due = started + number / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(call(due))
    for _, writer in free:
        writer.close()
    return times


# -- measurements ------------------------------------------------------------------------------------


def measure(setup: Setup) -> Iterator[Result]:
    calls, seconds = (5, 0.2) if setup.smoke else (CALLS, SECONDS)
    with _start("-m", "benchmarks.capture", "--upstream") as model:
        command = ["-m", "expstore", "capture", str(setup.folder / "calls.exp"), "--upstream", model]
        with _start(*command, "--port", "0", "--json") as proxy:
            sides = [model, f"{proxy}/episodes/one/v1"]
            direct, relayed = _alternate(sides, calls, stream=True)
            yield _added("first byte", [one[0] for one in direct], [one[0] for one in relayed])
            yield _added(
                "stream", [one[1] for one in direct], [one[1] for one in relayed], f"{EVENTS} events"
            )
            direct, relayed = _alternate(sides, calls, stream=False)
            yield _added("whole", [one[1] for one in direct], [one[1] for one in relayed])
            direct, relayed = _alternate(sides, max(5, calls // 10), stream=False, size=2_000_000)
            yield _added(
                "2 MB", [one[1] for one in direct], [one[1] for one in relayed], "body of the request"
            )
            open_loop = [asyncio.run(_offer(url, seconds)) for url in (model, f"{proxy}/v1")]
            note = f"{CLIENTS} clients, {RATE} streams a second in all; 95th percentiles"
            yield _added("64 clients", *open_loop, note, at=partial(_quantile, part=0.95))


def _quantile(times: list[float], part: float) -> float:
    return sorted(times)[int(part * (len(times) - 1))]


def _added(name: str, direct: list[float], relayed: list[float], note: str = "", at: Any = median) -> Result:
    """Return the row of a time; its value is what the proxy adds, in milliseconds."""
    ours, theirs = (f"{at(one) * 1e3:.2f} ms n={len(one)}" for one in (relayed, direct))
    added = (at(relayed) - at(direct)) * 1e3
    return Result(name, added, ours, theirs, f"+{added:.2f} ms", note)


if __name__ == "__main__":
    if sys.argv[1:] == ["--upstream"]:
        asyncio.run(_serve())
    else:
        sys.exit(run_program(measure, BARS, gigabytes=0.5))
