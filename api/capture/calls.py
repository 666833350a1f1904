"""Bodies of chat completions and responses: from requests, answers and events to the fields of a row.

Used by the recorder and the proxy. These are pure functions of bytes: no store, no connection. No tokens are
computed, and no template is rendered: what an upstream does not send is empty.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

CHAT, RESPONSES = "chat/completions", "responses"
#: Paths below `/v1/` that are recorded.
RECORDED = frozenset({CHAT, RESPONSES})
#: The end of an event of a stream.
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
#: Types of the events that end a stream of responses.
_LAST_TYPES = frozenset({"response.completed", "response.failed", "response.incomplete"})
#: Keys whose texts are not joined when pieces of a message are.
_WHOLE = frozenset({"id", "type", "role", "name", "object", "model", "finish_reason"})
#: Keys of a message that come first.
_FIRST = {"role": 0, "content": 1}
#: A request's body that is no JSON is stored up to this many characters.
_MOST_TEXT = 100_000


def dump(value: Any) -> str:
    """Return JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def load_object(body: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None: the bytes are not one."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def decode(body: bytes, encoding: str) -> bytes:
    """Return a body without its encoding; one that cannot be decoded is returned as it is."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body)
    except zlib.error:
        return body


def message_text(message: Any) -> str:
    """Return a message as JSON in one form: an answer, and its copy in the next request, are equal.

    Clients copy answers through classes of their own, which order keys anew and add or drop empty ones. So
    in a message, in its parts and in their objects, keys whose value is null or an empty list are left out,
    and keys are sorted; `role` and `content` come first. What is nested more deeply, such as the arguments of
    a tool, is not changed.

    >>> from expstore.api.capture.calls import message_text
    >>> message_text({"refusal": None, "tool_calls": [], "content": "4", "role": "assistant"})
    '{"role":"assistant","content":"4"}'
    """
    return dump(_order(message, 3))


def _order(value: Any, levels: int) -> Any:
    """Return a value whose objects down to some level have sorted keys, and no empty ones."""
    if isinstance(value, list):
        return [_order(item, levels) for item in value] if levels else value
    if not isinstance(value, dict) or not levels:
        return value
    names = sorted(value, key=lambda name: (_FIRST.get(name, 2), name))
    return {name: _order(value[name], levels - 1) for name in names if value[name] not in (None, [])}


def parse_request(path: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a row that follow from a request.

    Args:
        path: `CHAT` or `RESPONSES`.
        body: The body.
    """
    asked = load_object(body)
    if asked is None:
        text = body[:_MOST_TEXT].decode(errors="replace")
        return {"model": None, "messages": [], "tools": [], "request": text}
    messages: Any = asked.pop("messages" if path == CHAT else "input", None)
    if path == RESPONSES:
        first = asked.pop("instructions", None)
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if first is not None and isinstance(messages, list | None):
            messages = [{"role": "system", "content": first}, *(messages or [])]
    tools = asked.pop("tools", None)
    return {
        "model": str(asked.get("model", "")),
        "messages": list(map(message_text, messages)) if isinstance(messages, list) else [],
        "tools": list(map(dump, tools)) if isinstance(tools, list) else [],
        "request": dump(asked),
    }


def parse_answer(path: str, answer: dict[str, Any] | None, *, is_whole: bool) -> dict[str, Any]:
    """Return the fields of a row that follow from an answer, and its messages under `messages`.

    Args:
        path: `CHAT` or `RESPONSES`.
        answer: The answer, or what the events of a stream add up to; None: there is no answer. It is changed.
        is_whole: Whether the whole answer arrived. Messages of a partial one are in `response` only.
    """
    found: dict[str, Any] = {"messages": []}
    if answer is None:
        return found
    usage = answer.get("usage")
    if isinstance(usage, dict):
        names = ("prompt_tokens", "completion_tokens") if path == CHAT else ("input_tokens", "output_tokens")
        found["input_tokens"], found["output_tokens"] = (_whole(usage.get(name)) for name in names)
    (_take_choice if path == CHAT else _take_output)(answer, found, is_whole=is_whole)
    found["response"] = dump(answer)
    return found


def _take_choice(answer: dict[str, Any], found: dict[str, Any], *, is_whole: bool) -> None:
    """Move the first choice of a completion into fields."""
    choices = answer.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return
    first = choices[0]
    found["finish_reason"] = _text(first.get("finish_reason"))
    if is_whole and isinstance(first.get("message"), dict):
        found["messages"] = [message_text(first.pop("message"))]
    for holder, name, field in (
        (first, "token_ids", "token_ids"),
        (answer, "prompt_token_ids", "prompt_token_ids"),  # vLLM
        (first, "prompt_token_ids", "prompt_token_ids"),  # SGLang
    ):
        if isinstance(ids := holder.get(name), list) and all(map(_is_token, ids)):
            found[field] = holder.pop(name)
    logprobs = first.get("logprobs")
    if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
        _take_logprobs(logprobs["content"], found)
        if "logprobs" in found and not any(one.get("top_logprobs") for one in logprobs["content"]):
            del first["logprobs"]


def _take_output(answer: dict[str, Any], found: dict[str, Any], *, is_whole: bool) -> None:
    """Move the output of a response into fields."""
    found["finish_reason"] = _text(answer.get("status"))
    output = answer.get("output")
    if not isinstance(output, list):
        return
    parts = [
        part
        for item in output
        if isinstance(item, dict) and isinstance(item.get("content"), list)
        for part in item["content"]
        if isinstance(part, dict) and isinstance(part.get("logprobs"), list)
    ]
    _take_logprobs([one for part in parts for one in part["logprobs"]], found)
    if is_whole:
        found["messages"] = list(map(message_text, answer.pop("output")))


def _take_logprobs(content: list[Any], found: dict[str, Any]) -> None:
    if content and all(isinstance(one, dict) and _is_number(one.get("logprob")) for one in content):
        found["logprobs"] = [float(one["logprob"]) for one in content]
        found["token_texts"] = [str(one.get("token", "")) for one in content]


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else 0


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


class EventStream:
    """Split a stream into events, add up what they say, and find the event that ends it.

    Args:
        path: `CHAT` or `RESPONSES`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = bytearray()  # an event that is not complete
        self._is_broken = False  # an event was no JSON object
        self._output: list[Any] = []  # items of a response that are complete
        self._partial = ""  # text of the item that is not
        #: What the events add up to; None: no event said anything.
        self.answer: dict[str, Any] | None = None
        #: Whether the event that ends the stream was found.
        self.has_ended = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take the next bytes; return complete events that may leave at once, and those to hold.

        The first held event is the one that ends the stream. An event that is not complete is in neither.
        """
        searched = max(0, len(self._rest) - 3)
        self._rest += data
        stop = begin = 0
        held: int | None = None
        for found in _EVENT_END.finditer(self._rest, searched):
            begin, stop = stop, found.end()
            if held is None and not self.has_ended:
                self._take_event(bytes(memoryview(self._rest)[begin:stop]))
                held = begin if self.has_ended else None
        events = bytes(memoryview(self._rest)[:stop])
        del self._rest[:stop]
        return (events, b"") if held is None else (events[:held], events[held:])

    @property
    def rest(self) -> bytes:
        """The bytes of an event that is not complete."""
        return bytes(self._rest)

    def _take_event(self, event: bytes) -> None:
        lines = event.splitlines()
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if data == b"[DONE]":
            self.has_ended = True
        elif data and (said := load_object(data)) is not None:
            if self._path == CHAT:
                self._add_chunk(said)
            else:
                self._add_event(said)

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of a completion."""
        answer = self.answer = self.answer or {}
        choices = chunk.pop("choices", None)
        answer.update({name: value for name, value in chunk.items() if value is not None})
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                choice["message"] = choice.pop("delta", None)
                _join_item(answer.setdefault("choices", []), choice)

    def _add_event(self, event: dict[str, Any]) -> None:
        """Add an event of a response."""
        kind = event.get("type")
        if isinstance(event.get("response"), dict):
            self.answer = event["response"]
        if kind in _LAST_TYPES:
            self.has_ended = True
            return
        answer = self.answer = self.answer or {}
        if kind == "error":
            answer["error"] = event
        elif kind == "response.output_item.done":
            self._output, self._partial = [*self._output, event.get("item")], ""
        elif kind == "response.output_text.delta":
            self._partial += str(event.get("delta", ""))
        content = [{"type": "output_text", "text": self._partial}]
        partial = [{"type": "message", "role": "assistant", "content": content}] if self._partial else []
        answer["output"] = self._output + partial


def _join(known: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add a piece of an object to the pieces before it: texts and lists are joined, numbers replaced."""
    for name, value in new.items():
        former = known.get(name)
        if value is None:
            known.setdefault(name, None)
        elif isinstance(former, dict) and isinstance(value, dict):
            _join(former, value)
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(one, dict) and "index" in one for one in value)
        ):
            items = known[name] = former if isinstance(former, list) else []
            for item in value:
                _join_item(items, item)
        elif isinstance(former, list) and isinstance(value, list):
            former += value
        elif isinstance(former, str) and isinstance(value, str) and name not in _WHOLE:
            known[name] = former + value
        elif former in (None, "") or name not in _WHOLE:
            known[name] = value


def _join_item(items: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add a piece of a numbered item to the item of its number."""
    index = item.get("index", 0)
    for known in items:
        if known.get("index", 0) == index:
            _join(known, item)
            return
    made: dict[str, Any] = {}
    items.append(made)
    _join(made, item)


def drop_indices(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what chunks added up to in the form of an answer: numbers of tool calls were for joining."""
    for choice in (answer or {}).get("choices") or []:
        message = choice.get("message")
        for call in (message.get("tool_calls") if isinstance(message, dict) else None) or []:
            call.pop("index", None)
    return answer


def ask_for_tokens(body: bytes) -> bytes:
    """Return the body of a chat completion that also asks for log-probabilities and token ids.

    What the client has set itself stays. A body that is no JSON object is returned as it is.
    """
    asked = load_object(body)
    if asked is None:
        return body
    return dump({"logprobs": True, "return_token_ids": True} | asked).encode()
