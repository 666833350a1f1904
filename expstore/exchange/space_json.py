"""Describe gymnasium spaces as the JSON that Minari stores, from specs or from dtypes and shapes.

Used by the Minari format. It needs no Minari, and gymnasium only for specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from expstore.core.values import Key
from expstore.schema.schema import Field
from expstore.storages.read_view import ReadView


def space_of(storage: ReadView, entry: Field) -> dict[str, Any]:
    """Return the space of a field: that of its spec, or else all values of its dtype."""
    space = _from_spec(storage, entry) if storage.settings.specs() else None
    return _of_dtype(entry) if space is None else space


def _from_spec(storage: ReadView, entry: Field) -> dict[str, Any] | None:
    from expstore.buffers.domain_checks import specs_of  # loads torch
    from expstore.specs.gymnasium_spaces import to_space

    specs = specs_of(storage)
    spec = None if specs is None else specs.get(entry.key, None)
    if spec is None:
        return None
    try:
        return _text(to_space(spec))
    except (ValueError, ModuleNotFoundError):  # gymnasium has no such space, or is not installed
        return None


def _text(space: Any) -> dict[str, Any] | None:
    """Return the JSON of a space, or None if Minari does not support the space."""
    kind = type(space).__name__
    if kind == "Box":
        facts = {"low": space.low.tolist(), "high": space.high.tolist()}
        return {"type": kind, "dtype": str(space.dtype), "shape": list(space.shape), **facts}
    if kind == "Discrete":
        return {"type": kind, "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if kind == "MultiDiscrete":
        facts = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": kind, "dtype": str(space.dtype), **facts}
    if kind == "MultiBinary":
        return {"type": kind, "n": space.n if isinstance(space.n, int) else list(space.n)}
    return None


def _of_dtype(entry: Field) -> dict[str, Any]:
    kind = np.dtype("<f4") if entry.dtype == "bfloat16" else entry.numpy_dtype
    if kind.kind == "b" and entry.shape:
        return {"type": "MultiBinary", "n": list(entry.shape)}
    low: float
    high: float
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
    elif kind.kind == "b":
        low, high = 0, 1
    else:
        low, high = -np.inf, np.inf
    kind = np.dtype("u1") if kind.kind == "b" else kind
    facts = {
        "low": np.full(entry.shape, low, kind).tolist(),
        "high": np.full(entry.shape, high, kind).tolist(),
    }
    return {"type": "Box", "dtype": str(kind), "shape": list(entry.shape), **facts}


def nest_spaces(leaves: Mapping[Key, dict[str, Any]]) -> dict[str, Any]:
    """Combine spaces by their keys into one Dict, or into a Tuple where the names are 0, 1, and so on."""
    if () in leaves:
        return leaves[()]
    names = list(dict.fromkeys(key[0] for key in leaves))
    parts = {
        name: nest_spaces({key[1:]: space for key, space in leaves.items() if key[0] == name})
        for name in names
    }
    if set(names) == {str(number) for number in range(len(names))}:
        return {"type": "Tuple", "subspaces": [parts[str(number)] for number in range(len(names))]}
    return {"type": "Dict", "subspaces": parts}
