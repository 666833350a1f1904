"""Specs of a store's fields as JSON text, and what can be read from the text without torch.

Used by storages, which keep the text, by the command line, and by `expstore.specs`, which writes and parses
it. This module builds no specs and never reads values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from expstore.core.parsing import INVALID
from expstore.core.values import Key, key_name
from expstore.errors import CorruptionError, MigrationError, SchemaError
from expstore.schema.arrow_types import ragged_of
from expstore.schema.schema import OBJECT, Schema

#: Version of the text that `pack_specs` writes; `unpack_specs` refuses newer ones.
VERSION = 1

_FEW, _WORDS = 4, 60  # number of specs that `describe` names, and characters per spec
_LEFT_OUT = {"kind", "shape", "dtype", "device", "domain"}

#: Dtype (None for objects) and shape of one row's value; -1 is a dim of any size.
Leaf = tuple[str | None, tuple[int, ...]]


def pack_specs(node: dict[str, Any]) -> str:
    """Return the text of a spec.

    Args:
        node: The spec in the notation of `expstore.specs.json_text`: JSON values without NaN and infinities.
    """
    return json.dumps({"version": VERSION, "spec": node}, allow_nan=False, separators=(",", ":"))


def unpack_specs(text: str) -> dict[str, Any]:
    """Return the node that was passed to `pack_specs`.

    Raises:
        MigrationError: A newer version of the library wrote the text.
        CorruptionError: The text cannot be parsed.
    """
    try:
        data = json.loads(text)
        version = int(data["version"])
    except INVALID as exc:
        raise CorruptionError(f"the text of the specs cannot be read: {exc!r}") from exc
    if version > VERSION:
        raise MigrationError(
            f"the specs have version {version}, this library knows versions up to {VERSION}",
            hint="install a newer expstore",
        )
    node = data.get("spec")
    if not isinstance(node, dict):
        raise CorruptionError("the text of the specs cannot be read: it has no specs")
    return node


def same_specs(one: str, other: str) -> bool:
    """Return whether two texts describe equal specs; the order of keys does not matter."""
    return one == other or (bool(one and other) and bool(unpack_specs(one) == unpack_specs(other)))


def leaves_of(text: str) -> dict[Key, Leaf]:
    """Return dtype and shape of each field that specs describe; {} for "".

    Raises:
        CorruptionError: The text cannot be read.
    """
    if not text:
        return {}
    try:
        return dict(_walk(unpack_specs(text), ()))
    except INVALID as exc:
        raise CorruptionError(f"the text of the specs cannot be read: {exc!r}") from exc


def _walk(node: dict[str, Any] | None, path: Key) -> Iterator[tuple[Key, Leaf]]:
    if node is None:
        return
    if "parts" in node:
        yield from _stack_leaves([dict(_walk(part, path)) for part in node["parts"]], int(node["dim"]))
    elif "specs" in node:
        for name, part in node["specs"].items():
            yield from _walk(part, (*path, name))
    else:
        dtype = node.get("dtype")
        yield path, (None if dtype is None else str(dtype), tuple(map(int, node["shape"])))


def _stack_leaves(parts: Sequence[dict[Key, Leaf]], dim: int) -> Iterator[tuple[Key, Leaf]]:
    """Yield the leaves that all parts of a stack have; a size that differs between parts is -1."""
    for key, (dtype, shape) in parts[0].items():
        if all(key in part and len(part[key][1]) == len(shape) for part in parts):
            others = [part[key] for part in parts]
            sizes = [
                size if len({s[place] for _, s in others}) == 1 else -1 for place, size in enumerate(shape)
            ]
            sizes.insert(dim, len(parts))
            yield key, (dtype if len({d for d, _ in others}) == 1 else None, tuple(sizes))


def describe(node: dict[str, Any]) -> str:
    """Return a short description of a spec, or of the first of several.

    Args:
        node: A node that `unpack_specs` returned.
    """
    few = islice(_nodes(node, ()), _FEW + 1)
    listed = [f"{key_name(path)} {_words(node)}".strip() for path, node in few]
    return ", ".join(listed[:_FEW]) + (", ..." if len(listed) > _FEW else "")


def _nodes(node: dict[str, Any] | None, path: Key) -> Iterator[tuple[Key, dict[str, Any]]]:
    if node is not None and "specs" in node:
        for name, part in node["specs"].items():
            yield from _nodes(part, (*path, name))
    elif node is not None:
        yield path, node


def _words(node: dict[str, Any]) -> str:
    facts = {name: value for name, value in node.items() if name not in _LEFT_OUT}
    words = ", ".join(f"{name}={value}" for name, value in facts.items())
    return f"{node['kind']}({words if len(words) <= _WORDS else words[: _WORDS - 3] + '...'})"


def check_specs(text: str, schema: Schema) -> None:
    """Raise SchemaError if specs describe a field that rows do not have, or have another dtype or shape."""
    for key, (dtype, shape) in leaves_of(text).items():
        said = f"{dtype}{list(shape)}"
        if key not in schema:
            raise SchemaError(
                f"the specs have a field {key_name(key)!r} ({said}), the rows have none",
                hint=f"give rows this field, or specs without it; the rows have {schema!r}",
            )
        field = schema[key]
        loose = ragged_of(field.arrow) if field.variable else None
        if dtype is None:  # objects have no shape
            if field.dtype != OBJECT and (loose is not None or not field.variable):
                raise SchemaError(
                    f"field {key_name(key)!r}: the specs say objects, the rows have {field}",
                    hint="specs describe one row as it is stored",
                )
            continue
        own = (field.dtype, field.shape) if loose is None else (loose.dtype, loose.shape)
        fits = len(shape) == len(own[1]) and all(
            asked in (-1, size) for asked, size in zip(shape, own[1], strict=True)
        )
        if not fits or dtype != own[0]:
            raise SchemaError(
                f"field {key_name(key)!r}: the specs say {said}, the rows have {field}",
                hint="specs describe one row as it is stored",
            )
