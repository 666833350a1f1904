"""What a worker and the process that owns a store tell one another: calls, answers, errors.

Used by `expstore.buffers.writing_proxy` and `expstore.buffers.writing_server`. A message has 16 bytes; what
it announces is in the slot of shared memory.
"""

from __future__ import annotations

import builtins
import json
import struct
from typing import Any

import google_crc32c

from expstore import errors
from expstore.schema.schema import Schema

#: Number of the call, or 0: a descriptor of a new slot comes with the message; and its length in bytes.
CALL = struct.Struct("<QQ")
#: Number of the call, kind, whether the caller knows other fields than the store has, and how many numbers,
#: or bytes of text, are in the slot.
ANSWER = struct.Struct("<QHHI")
NUMBERS, TEXT, ERROR = range(3)

#: Characters of an error's message, at most: a slot has room for them.
_MESSAGE = 100_000
#: Errors of Python that a write raises for wrong arguments.
_OF_PYTHON = ("KeyError", "MemoryError", "NotImplementedError", "TypeError", "ValueError")


def to_text(told: dict[str, Any]) -> bytes:
    """Return what a call asks for, as the text in its slot."""
    return json.dumps(told).encode()


def schema_version(schema: Schema | None) -> int:
    """Return a number that tells the fields of a store from others; 0: it has none yet."""
    if schema is None:
        return 0
    return int(google_crc32c.value(json.dumps(schema.to_json()).encode())) or 1


def pack_error(error: Exception) -> bytes:
    """Return an error as the text of an answer."""
    if isinstance(error, errors.ExpStoreError):
        told: dict[str, Any] = {"message": error.message[:_MESSAGE], "kind": error.kind, "hint": error.hint}
        told |= {"errno": getattr(error, "errno", None), "lost": getattr(error, "lost", False)}
        name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in errors.__all__)
    else:
        name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _OF_PYTHON), "")
        told = {"message": (str(error) if name else f"{type(error).__name__}: {error}")[:_MESSAGE]}
    return json.dumps({"error": name, **told}).encode()


def error_of(text: bytes) -> Exception:
    """Return the error that `pack_error` has packed."""
    told = json.loads(text)
    name = told["error"]
    if name in _OF_PYTHON:
        of_python: Exception = getattr(builtins, name)(told["message"])
        return of_python
    kind = getattr(errors, name) if name in errors.__all__ else errors.StateError
    error: errors.ExpStoreError = kind(told["message"], kind=told.get("kind"), hint=told.get("hint", ""))
    if isinstance(error, errors.StorageError):
        error.errno, error.lost = told.get("errno"), bool(told.get("lost"))
    return error
