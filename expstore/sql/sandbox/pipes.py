"""Messages between a process and its child: a JSON object and an optional body of bytes.

Used by `expstore.sql.sandbox.pool` and `expstore.sql.sandbox.child`. The receiver sets the largest size
that it accepts, and rejects longer messages.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_HEAD = struct.Struct("<II")
#: Bytes of the longest JSON part of a message; a longer one is a protocol error.
_WORDS = 1 << 20


class PipeError(Exception):
    """The other side has closed the pipe, or sent an invalid message."""


def send(pipe: socket.socket, words: dict[str, Any], body: Any = b"") -> None:
    """Send a message within the socket's timeout.

    Raises:
        PipeError: The other side has closed the pipe.
        TimeoutError: The other side did not read the message in time.
        ValueError: `words` cannot be written as JSON, or is too long.
    """
    text = json.dumps(words).encode()
    if len(text) > _WORDS:
        raise ValueError(f"a message of {len(text)} bytes is longer than {_WORDS}")
    size = len(memoryview(body).cast("B"))
    try:
        pipe.sendall(_HEAD.pack(len(text), size) + text)
        if size:
            pipe.sendall(body)
    except TimeoutError:
        raise
    except OSError as exc:
        raise PipeError(str(exc)) from exc


def receive(
    pipe: socket.socket, *, most: int, deadline: float | None = None
) -> tuple[dict[str, Any], bytearray]:
    """Return the next message.

    Args:
        pipe: The socket.
        most: The largest body, in bytes.
        deadline: When the message must have arrived, by `time.monotonic`; None: wait without a limit.

    Raises:
        PipeError: The other side has closed the pipe, or sent an invalid message.
        TimeoutError: The message has not arrived in time.
    """
    text, size = _HEAD.unpack(_read(pipe, _HEAD.size, deadline))
    if text > _WORDS or size > most:
        raise PipeError(f"a message of {text} and {size} bytes is too long")
    try:
        words = json.loads(_read(pipe, text, deadline))
    except ValueError as exc:
        raise PipeError(f"a message is not JSON: {exc}") from exc
    if not isinstance(words, dict):
        raise PipeError("a message is not a JSON object")
    return words, _read(pipe, size, deadline)


def _read(pipe: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        pipe.settimeout(left)
        try:
            came = pipe.recv_into(view[done:])
        except TimeoutError:
            raise
        except OSError as exc:
            raise PipeError(str(exc)) from exc
        if not came:
            raise PipeError("the other side has closed the pipe")
        done += came
    return data
