"""Pass the calls of agents on to the server of a language model, and record them on the way.

Used by the application. Bytes of requests and answers are not changed. The last bytes of an answer, or of a
stream the event that ends it, are sent when the call's row is in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from expstore.api.bodies import load_json, read_body
from expstore.api.capture import calls
from expstore.api.capture.recorder import ANSWERED, CUT, FAILED, LEFT, Asked, Call, Recorder
from expstore.api.capture.upstream import Answer, Header, Upstream, UpstreamError
from expstore.api.errors import Refusal
from expstore.api.gateway import RELAY
from expstore.api.settings import Capture
from expstore.api.stores import Stores
from expstore.episodes.facts import TRAIN, check_split, pack_info
from expstore.errors import ExpStoreError, StateError

_log = logging.getLogger("expstore.api")
_Result = TypeVar("_Result")
_NAME = re.compile(r"[A-Za-z0-9._:@=+-]{1,100}")
#: Prefix of headers and of parameters of the query that are for the proxy and not passed on.
_OWN = "x-expstore-"
#: Headers of one connection (RFC 9110, section 7.6.1), and those that the connection to the other side sets.
_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_NOT_SENT, _NOT_RETURNED = _CONNECTION | {b"host", b"expect"}, _CONNECTION | {b"date"}
#: Requests of more bytes are parsed while the upstream computes the answer.
_LARGE = 1 << 16
#: Largest integer of a policy's version.
_MOST = (1 << 63) - 1


class Proxy:
    """Pass on requests below `/v1/` and `/episodes/NAME/v1/`, and take rewards, ends and facts of episodes.

    Threads: the event loop's; rows are written by a thread of its own, in the order of the answers.

    Args:
        stores: The server's stores: one.
        settings: Where calls go, and how they are recorded.
        count_lost: Called for each call that cannot be recorded.

    Raises:
        StateError: The server serves a folder of stores.
    """

    def __init__(self, stores: Stores, settings: Capture, count_lost: Callable[[], None]) -> None:
        if not stores.single:
            raise StateError(
                "calls are recorded in one store, and a folder of stores is served",
                kind="capture",
                hint="pass the path of the store",
            )
        self._stores, self._settings, self._count_lost = stores, settings, count_lost
        self._upstream = Upstream(settings.upstream)
        self._base = urlsplit(settings.upstream).path.rstrip("/").encode()
        self._recorder: Recorder | None = None
        self._opening = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "expstore-capture")

    def add_to(self, routes: list[BaseRoute]) -> None:
        """Add the routes: those of calls first, because each request is compared with one after the other.

        Args:
            routes: The routes of the application; what follows `/v1/` and is not one of them is passed on.
        """
        endpoint = _Endpoint(self)
        paths = ["/episodes/{episode}/v1/{path:path}", *(f"/v1/{path}" for path in sorted(calls.RECORDED))]
        acts = {"reward": self._reward, "end": self._end, "facts": self._facts}
        routes[:0] = [
            *(Route(path, endpoint, name=RELAY) for path in paths),
            *(Route(f"/episodes/{{episode}}/{name}", act, methods=["POST"]) for name, act in acts.items()),
        ]
        routes.append(Route("/v1/{path:path}", endpoint, name=RELAY))

    def start(self) -> Recorder:
        """Open the store unless it is open, and append rows for calls that a kill has left unanswered.

        Raises:
            ExpStoreError: The store cannot be written, or has other fields than calls.
        """
        with self._opening:
            if self._recorder is None:
                self._recorder = Recorder(self._stores.get(self._stores.names()[0]), self._settings)
            return self._recorder

    async def _open(self) -> Recorder:
        return await asyncio.to_thread(self.start) if self._recorder is None else self._recorder

    async def close(self) -> None:
        """Close the connections to the upstream, and finish writing rows; before the store is closed."""
        await self._upstream.close()
        await asyncio.get_running_loop().run_in_executor(None, self._writer.shutdown)
        if self._recorder is not None:
            self._recorder.close()

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with the upstream's answer."""
        headers = Headers(scope=scope)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        asked = _parse_asked(headers, query, scope["path_params"].get("episode"))
        target, path = self._target(scope)
        sent = [
            one for one in _end_to_end(scope["headers"], _NOT_SENT) if not one[0].startswith(_OWN.encode())
        ]
        if scope["method"] == "POST" and path in calls.RECORDED:
            call = Call(path, bytes(await read_body(Request(scope, receive))), asked)
            await self._run(call, target, sent, scope, receive, send)
        else:
            await self._pass(target, sent, scope, receive, send)

    def _target(self, scope: Scope) -> tuple[bytes, str]:
        """Return path and query of a request at the upstream, and the path below `/v1/`: the client's part.

        Raises:
            Refusal: 400: the path leads elsewhere.
        """
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        tail = raw.removeprefix(scope.get("root_path", "").encode()).partition(b"/v1/")[2]
        text = tail.decode("latin-1")
        while (decoded := unquote(text)) != text:  # servers differ in what they decode, and how often
            text = decoded
        if any(part.partition(";")[0] in (".", "..") for part in re.split(r"[/\\]", text)):
            raise Refusal(400, "the path has a part '.' or '..'", kind="path", hint="send the path itself")
        parts = scope["query_string"].split(b"&")
        query = b"&".join(part for part in parts if not part.lower().startswith(_OWN.encode()))
        return self._base + b"/" + tail + (b"?" + query if query else b""), tail.decode("latin-1")

    async def _pass(
        self, target: bytes, sent: list[Header], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass on a request that is not recorded, and its answer, both as they arrive."""
        names = {name for name, _ in sent}
        body: AsyncIterator[bytes] | bytes = b""
        if b"content-length" in names or "transfer-encoding" in Headers(scope=scope):
            body = _body_of(receive)
            if b"content-length" not in names:
                sent = [*sent, (b"transfer-encoding", b"chunked")]
        async with self._ask(scope["method"], target, sent, body) as answer:
            scope["expstore.is_relayed"] = True
            await send(_start_of(answer))
            async for part in answer.parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, target: bytes, sent: list[Header], body: AsyncIterator[bytes] | bytes
    ) -> AsyncIterator[Answer]:
        """Send a request to the upstream, and close its answer at the end of the block.

        Raises:
            Refusal: 502: there is no answer.
        """
        try:
            answer = await self._upstream.ask(method, target, sent, body)
        except UpstreamError as exc:
            raise Refusal(502, f"the upstream gave no answer: {exc}", kind="upstream",
                          hint="--upstream of the proxy is its address") from exc  # fmt: skip
        try:
            yield answer
        finally:
            await answer.close()

    async def _run(
        self, call: Call, target: bytes, sent: list[Header], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a call that is recorded; stop when its client leaves."""
        recorder = await self._open()
        try:
            recorder.begin(call)
        except ExpStoreError as exc:
            recorder.forget(call)
            self._note_lost(call, exc)
        if len(call.body) > _LARGE:
            asyncio.get_running_loop().run_in_executor(self._writer, recorder.prepare, call)
        exchange = _Exchange(call, scope, send, lambda: self._record(recorder, call))
        work = asyncio.ensure_future(self._answer(exchange, target, sent))
        departure = asyncio.ensure_future(_wait_until_left(receive))
        try:
            await asyncio.wait({work, departure}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not exchange.is_recording:
                work.cancel()
                await asyncio.wait({work})
                if not exchange.is_recording:
                    call.outcome = LEFT
                    await exchange.record()
            if not work.cancelled():
                await work
        finally:
            # The server is shut down: the mark remains, and the next start appends the row.
            work.cancel()
            departure.cancel()

    async def _answer(self, exchange: _Exchange, target: bytes, sent: list[Header]) -> None:
        """Pass a call on, and its answer back. The answer must not be compressed."""
        call = exchange.call
        body = call.body
        if self._settings.ask_logprobs and call.path == calls.CHAT:
            body = calls.ask_for_tokens(body)
        sent = [one for one in sent if one[0] not in (b"accept-encoding", b"content-length")]
        sent += [(b"accept-encoding", b"identity"), (b"content-length", b"%d" % len(body))]
        try:
            async with self._ask("POST", target, sent, body) as answer:
                call.status = answer.status
                kind = answer.header(b"content-type").partition(";")[0].strip().lower()
                is_stream = kind == "text/event-stream" and not answer.header(b"content-encoding")
                await (exchange.stream if is_stream else exchange.whole)(answer)
        except Refusal as refusal:
            if exchange.is_recording:
                raise
            call.outcome, call.error = FAILED, refusal.message
            await exchange.record()
            raise

    async def _record(self, recorder: Recorder, call: Call) -> None:
        """Write the row of a call.

        Raises:
            Refusal: The row cannot be written, and calls that cannot be recorded fail.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, recorder.record, call)
        except ExpStoreError as exc:
            self._note_lost(call, exc)
        finally:
            recorder.forget(call)

    def _note_lost(self, call: Call, exc: ExpStoreError) -> None:
        self._count_lost()
        _log.error("call %s was not recorded: %s", call.id, exc)
        if self._settings.on_error == "fail":
            raise Refusal(507, f"the call cannot be recorded: {exc.message}", kind="not_recorded",
                          hint="repair the store, or use --on-error=pass") from exc  # fmt: skip

    async def _act(self, act: Callable[[Recorder], _Result]) -> _Result:
        """Run a function that writes to the store, after the rows before."""
        recorder = await self._open()
        return await asyncio.get_running_loop().run_in_executor(self._writer, act, recorder)

    async def _reward(self, request: Request) -> Response:
        episode, said = await _read(request, {"reward"})
        value = _number(said, "reward")
        return JSONResponse(await self._act(lambda recorder: recorder.reward(episode, value)))

    async def _end(self, request: Request) -> Response:
        episode, said = await _read(request, {"reward", "truncated"})
        value, truncated = _number({"reward": 0.0} | said, "reward"), said.get("truncated", False)
        if not isinstance(truncated, bool):
            raise Refusal(422, f"truncated is {truncated!r:.50}", hint="send true or false")
        act = lambda recorder: recorder.end(episode, value, truncated=truncated)  # noqa: E731
        return JSONResponse(await self._act(act))

    async def _facts(self, request: Request) -> Response:
        episode, said = await _read(request)
        return JSONResponse(await self._act(lambda recorder: recorder.facts(episode, said)))


class _Endpoint:
    """The proxy as an ASGI application, which a route calls for all methods."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.relay(scope, receive, send)


class _Exchange:
    """A call whose answer is passed back, except its last bytes, until the call is recorded.

    Args:
        call: The call.
        scope: Its request.
        send: Sends to the client.
        record: Writes the row of the call.
    """

    def __init__(self, call: Call, scope: Scope, send: Send, record: Callable[[], Any]) -> None:
        self.call, self._scope, self._send, self._record = call, scope, send, record
        #: Whether the row is being written, or was.
        self.is_recording = False

    async def record(self) -> None:
        self.is_recording = True
        await self._record()

    async def _start(self, answer: Answer) -> None:
        self._scope["expstore.is_relayed"] = True
        await self._send(_start_of(answer))

    async def _send_part(self, data: bytes, *, more: bool = True) -> None:
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, answer: Answer) -> None:
        """Pass back an answer that is not a stream of events: at once, when it is recorded."""
        call, body = self.call, bytearray()
        try:
            async for part in answer.parts():
                call.first_byte = call.first_byte or time.perf_counter() - call.began
                body += part
            call.outcome = ANSWERED
        except UpstreamError as exc:
            call.outcome, call.error = CUT, str(exc)
        text = bytes(body)
        encoding = answer.header(b"content-encoding")
        call.read_answer = lambda: calls.load_object(calls.decode(text, encoding))
        if answer.status >= 400 and call.error is None:
            call.error = calls.decode(text, encoding)[:2000].decode(errors="replace")
        await self.record()
        await self._start(answer)
        await self._send_part(text)
        if call.outcome == ANSWERED:
            await self._send_part(b"", more=False)
        # Otherwise the server closes the connection, so that the client sees an incomplete answer.

    async def stream(self, answer: Answer) -> None:
        """Pass back events as they arrive; the event that ends the stream, when the call is recorded."""
        call = self.call
        events = calls.EventStream(call.path)
        call.read_answer = lambda: calls.drop_indices(events.answer)
        await self._start(answer)
        is_whole = False
        try:
            async for part in answer.parts():
                call.first_byte = call.first_byte or time.perf_counter() - call.began
                ready, held = events.feed(part)
                await self._send_part(ready)
                if events.has_ended and not self.is_recording:
                    call.outcome = ANSWERED
                    await self.record()
                await self._send_part(held)
            is_whole = True
        except UpstreamError as exc:
            call.error = str(exc)
        if not self.is_recording:
            call.outcome = CUT
            await self.record()
        await self._send_part(events.rest)
        if is_whole:
            await self._send_part(b"", more=False)


def _start_of(answer: Answer) -> dict[str, Any]:
    """Return the message with the status and the headers of an answer."""
    headers = _end_to_end(answer.headers, _NOT_RETURNED)
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


def _end_to_end(headers: Iterable[Header], others: Set[bytes]) -> list[Header]:
    """Return headers without some others, and without those that `Connection` names."""
    listed = [value for name, value in headers if name == b"connection"]
    named = {part.strip().lower() for value in listed for part in value.split(b",")}
    return [one for one in headers if one[0] not in others and one[0] not in named]


async def _body_of(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _wait_until_left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _parse_asked(headers: Headers, query: dict[str, list[str]], episode: str | None) -> Asked:
    """Return what a client says about a call: by headers, or by parameters of the same names.

    Raises:
        Refusal: 400: a value is invalid.
    """

    def find(name: str) -> str | None:
        return headers.get(_OWN + name) or query.get(_OWN + name, [None])[-1]

    episode = episode or find("episode")
    if episode is not None and not _NAME.fullmatch(episode):
        raise Refusal(400, f"{episode[:120]!r} is not a name of an episode",
                      hint="use at most 100 letters, digits and . _ : @ = + -")  # fmt: skip
    version, facts, retry = (
        find("policy-version") or "0",
        find("facts"),
        headers.get("x-stainless-retry-count", "0"),
    )
    if not (version.isdecimal() and version.isascii() and len(version) < 20 and int(version) <= _MOST):
        raise Refusal(400, f"the policy version is {version[:40]!r}", hint="send a number of at least 0")
    try:
        known = json.loads(facts or "{}")
        split = check_split(find("split") or TRAIN)
        pack_info(known if isinstance(known, dict) else {}, split)
    except (ValueError, RecursionError, ExpStoreError) as exc:
        raise Refusal(
            400, f"facts or split: {exc}", hint="facts are a JSON object, a split is a name"
        ) from None
    if not isinstance(known, dict):
        raise Refusal(400, f"the facts are {facts[:40] if facts else ''!r}", hint="send a JSON object")
    attempts = int(retry) if retry.isascii() and retry.isdecimal() and len(retry) < 9 else 0
    return Asked(episode, find("group"), int(version), split, known, attempts)


async def _read(request: Request, names: set[str] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of an episode and the object in a body.

    Raises:
        Refusal: 400: the body is no JSON. 422: it is no object, or has other names.
    """
    said = load_json(await read_body(request))
    if not isinstance(said, dict):
        raise Refusal(422, "the body is no JSON object", hint='send one such as {"reward": 1.0}')
    for name in said if names is not None else ():
        if name not in (names or ()):
            raise Refusal(422, f"{name[:40]!r} is unknown", hint=f"send {', '.join(sorted(names or ()))}")
    return request.path_params["episode"], said


def _number(said: dict[str, Any], name: str) -> float:
    value = said.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 3e38:
        raise Refusal(422, f"{name} is {value!r:.50}", hint=f'send a number, such as {{"{name}": 1.0}}')
    return float(value)
