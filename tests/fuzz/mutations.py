"""Mutations of files: bits, cuts, splices, forged integers, and forged values in JSON."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

#: Integers that parsers trip over.
NUMBERS = (
    -1, 0, 1, 2, 7, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
#: Stands for a deeply nested list in forged JSON.
DEEP = "deeply nested"
_FORMATS = ("<B", "<H", "<I", "<Q", ">I", ">Q")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a copy of a file's bytes with one to three mutations."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_ACTS)(data, rng)
    return data


def _place(data: bytes, rng: random.Random) -> int:
    """Return an offset; headers and footers are more likely than what lies between them."""
    near = rng.random()
    size = max(1, len(data))
    if near < 0.35:
        return rng.randrange(min(size, 512))
    return size - 1 - rng.randrange(min(size, 512)) if near < 0.6 else rng.randrange(size)


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\0"
    changed, at = bytearray(data), _place(data, rng)
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _splice(data: bytes, rng: random.Random) -> bytes:
    """Copy a piece of the file to another place of it."""
    size = rng.choice((1, 8, 64, 700))
    at, start = _place(data, rng), _place(data, rng)
    return data[:at] + data[start : start + size] + data[at + (size if rng.random() < 0.8 else 0) :]


def _noise(data: bytes, rng: random.Random) -> bytes:
    at, noise = (
        _place(data, rng),
        rng.choice((rng.randbytes(rng.choice((1, 8, 40))), bytes(64), b"\xff" * 16)),
    )
    return data[:at] + noise + data[at + len(noise) :]


def _forge(data: bytes, rng: random.Random) -> bytes:
    """Replace an integer."""
    form = rng.choice(_FORMATS)
    size = struct.calcsize(form)
    at = _place(data, rng)
    at -= at % size if rng.random() < 0.7 else 0
    number = rng.choice(NUMBERS) % (1 << 8 * size)
    return data[:at] + struct.pack(form, number) + data[at + size :]


#: Flips and forged integers are twice as likely.
_ACTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _flip, _cut, _splice, _noise, _forge, _forge,
)  # fmt: skip


def _values(rng: random.Random) -> Any:
    return rng.choice((
        *NUMBERS, 0.5, 1e308, "", "x", "../../canary", "\0", "9" * 5000, None, True, [], {}, [[1]], [0],
        {"a": {}}, DEEP,
    ))  # fmt: skip


def forge_json(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one value inside replaced, removed or doubled."""
    inside: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            inside.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    copy = json.loads(json.dumps(value))
    if isinstance(copy, dict | list):
        walk(copy)
    if not inside:
        return _values(rng)
    node, key = rng.choice(inside)
    act = rng.random()
    if act < 0.1:
        del node[key]
    elif act < 0.2 and isinstance(node, list):
        node.append(node[key])
    elif act < 0.4 and type(node[key]) is int:
        node[key] += rng.choice((-1, 1, 1000, 2**40))
    else:
        node[key] = _values(rng)
    return copy


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Return a JSON file with a forged value."""
    return (
        json.dumps(forge_json(json.loads(data), rng))
        .replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000)
        .encode()
    )
