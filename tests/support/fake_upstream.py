"""A fake server of a language model: a program of raw sockets, so that it can also break the rules.

The content of a request's last message says how it answers: `die`, `hang`, `half`, `429`, `500`, `odd`, or
any other text, which is echoed. `python -m tests.support.fake_upstream PORT` runs it alone.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any, Self

#: What a choice has, too, that answers the word `odd`.
_ODD: dict[str, Any] = {}
#: Number of chunks of a streamed answer.
CHUNKS = 6


class FakeUpstream:
    """Answer requests within a `with` block.

    Args:
        port: The port; 0: a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._lock, self._left, self._reached = threading.Lock(), 0, threading.Event()
        #: Head and body of each request.
        self.requests: list[tuple[str, bytes]] = []
        self.has_ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept` of the other thread
        self._listener.close()

    def stop_after(self, count: int) -> threading.Event:
        """Return what is set when `count` more events of streams were sent; the last stream then stops."""
        with self._lock:
            self._left, self._reached = count, threading.Event()
            return self._reached

    def _count_event(self, connection: socket.socket) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._reached.set()
            connection.recv(1)  # until the other side is gone

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as file:
                while (head := _read_head(file)) is not None:
                    body = file.read(_length_of(head))
                    self.requests.append((head, body))
                    if not self._answer(connection, head, body):
                        return
        except (OSError, ValueError):  # the body is no JSON
            return

    def _answer(self, connection: socket.socket, head: str, body: bytes) -> bool:
        """Answer a request; return whether the connection stays open."""
        path = head.split()[1].partition("?")[0]
        if not path.endswith(("/chat/completions", "/responses")):
            found = {"object": "list", "data": [], "path": head.split()[1], "bytes": len(body)}
            connection.sendall(_whole(200, json.dumps(found).encode(), "X-Other: 1"))
            return True
        asked = json.loads(body)
        is_chat = path.endswith("/chat/completions")
        last = (asked["messages"][-1] if is_chat else {"content": asked["input"]})["content"]
        word = last if isinstance(last, str) else "parts"
        if word == "die":
            return False
        if word == "hang":
            self.has_ended.wait(60)
            return False
        if word in ("429", "500"):
            error = json.dumps({"error": {"message": word, "type": "fake"}}).encode()
            connection.sendall(_whole(int(word), error, "Retry-After: 0", "X-Request-Id: req-1"))
            return True
        if asked.get("stream"):
            events = list(chat_events(word, asked) if is_chat else response_events(word))
            return self._stream(connection, events, word)
        answer = chat_answer(word, asked) if is_chat else response_answer(word)
        data = json.dumps(answer, indent=1).encode()
        if word == "half":
            connection.sendall(_whole(200, data)[:-20])
            return False
        connection.sendall(_whole(200, data, "X-Request-Id: req-1", "Set-Cookie: a=1", "Set-Cookie: b=2"))
        return True

    def _stream(self, connection: socket.socket, events: list[bytes], word: str) -> bool:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\nX-Request-Id: req-2\r\n\r\n"
        )
        if word == "half":  # dies amid an event, of which the client sees the begin
            events = [*events[:2], events[2][:9]]
        for event in events:
            connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))
            self._count_event(connection)
        if word == "half":
            return False
        connection.sendall(b"0\r\n\r\n")
        return True


def chat_answer(word: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat completion: the word again, or the call of a tool."""
    message: dict[str, Any] = {"role": "assistant", "content": f"{word}!", "refusal": None, "annotations": []}
    reason = "stop"
    if word == "tool":
        function = {"name": "add", "arguments": '{"a":2,"b":2}'}
        message |= {"content": None, "tool_calls": [{"id": "t1", "type": "function", "function": function}]}
        reason = "tool_calls"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    if word == "odd":
        choice |= _ODD
    answer = {
        "id": "c1", "object": "chat.completion", "created": 1, "model": "fake", "choices": [choice],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}, "unknown_field": [1],
    }  # fmt: skip
    if asked.get("logprobs"):
        tokens = [{"token": one, "logprob": -0.5, "bytes": None, "top_logprobs": []} for one in (word, "!")]
        choice["logprobs"] = {"content": tokens, "refusal": None}
    if asked.get("return_token_ids"):
        answer["prompt_token_ids"] = [1, 2, 3]
        choice["token_ids"] = [4, 5]
    return answer


def chat_events(word: str, asked: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed chat completion."""
    whole = chat_answer(word, asked)
    message = whole["choices"][0]["message"]
    base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if message["content"] else None}]
    if message["content"]:
        text = message["content"]
        size = -(-len(text) // CHUNKS)
        deltas += [{"content": text[start : start + size]} for start in range(0, len(text), size)]
    else:
        call = message["tool_calls"][0]
        function = call["function"]
        deltas.append({"tool_calls": [{**call, "index": 0, "function": {**function, "arguments": ""}}]})
        arguments = function["arguments"]
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
            for part in (arguments[:4], arguments[4:])
        ]
    chunks = [{**base, "choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = whole["choices"][0]["finish_reason"]  # type: ignore[index]
    chunks.append({**base, "choices": [], "usage": whole["usage"]})
    return [b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks] + [b"data: [DONE]\n\n"]


def response_answer(word: str) -> dict[str, Any]:
    """Return the answer to a request of the responses API."""
    part = {"type": "output_text", "text": f"{word}!", "annotations": []}
    item = {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": "r1", "object": "response", "created_at": 1, "status": "completed", "model": "fake",
        "output": [item], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "usage": {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
    }  # fmt: skip


def response_events(word: str) -> list[bytes]:
    """Return the events of a streamed response."""
    whole = response_answer(word)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    said: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    said += [
        {"type": "response.output_text.delta", "item_id": "m1", "output_index": 0, "delta": one}
        for one in (word, "!")
    ]
    said += [
        {"type": "response.output_item.done", "output_index": 0, "item": whole["output"][0]},
        {"type": "response.completed", "response": whole},
    ]
    return [
        f"event: {one['type']}\ndata: {json.dumps({**one, 'sequence_number': at})}\n\n".encode()
        for at, one in enumerate(said)
    ]


def _whole(status: int, body: bytes, *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} X",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _read_head(file: Any) -> str | None:
    lines = []
    while (line := file.readline()) not in (b"\r\n", b""):
        lines.append(line.decode("latin-1"))
    return "".join(lines) if lines else None


def _length_of(head: str) -> int:
    for line in head.lower().splitlines():
        if line.startswith("content-length:"):
            return int(line.partition(":")[2])
    return 0


if __name__ == "__main__":
    with FakeUpstream(int(sys.argv[1])) as upstream:
        print(upstream.url, flush=True)
        threading.Event().wait()
