"""Specs as JSON text, and back. Bounds, infinities and masks are kept exactly.

A store keeps this text for the specs of its fields. Reading a text never runs code: it can name only the
classes in this module.

A text is `{"version": 1, "spec": node}`. A node has the class's name under `kind`, and its arguments:
`shape`, `dtype`, `low`, `n`, `mask` and so on. Numbers are nested like the tensor, or one number if all are
equal; infinities are text. A Composite has nodes by name under `specs`, null for unspecified keys; a stack
has them under `parts`, a Choice under `choices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack

from expstore import specs
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.spec_text import pack_specs, unpack_specs
from expstore.specs.base import TensorSpec
from expstore.specs.spec_tree import Tree, build, take_apart

_DEFAULTS = [("step_mdp_static", False), ("remove_singleton", True)]


def to_text(spec: TensorSpec) -> str:
    """Return a spec as JSON text.

    A bound that is the same for all elements is one number. Not kept: whether a composite is locked, the
    device if it is the CPU or None, and a provisional number of choices.

    Args:
        spec: A spec of any kind.

    Raises:
        SchemaError: JSON cannot represent the spec: it has a `data_cls`, or examples other than text,
            numbers, lists and dicts.

    Example:
        >>> import math
        >>> from expstore import Bounded
        >>> from expstore.specs import from_text, to_text
        >>> text = to_text(Bounded(-math.inf, 1, shape=(2,)))
        >>> from_text(text).low
        tensor([-inf, -inf])
    """
    try:
        return pack_specs(_note(take_apart(spec)))
    except (TypeError, ValueError) as exc:
        raise SchemaError(f"JSON cannot represent this spec: {exc}") from exc


def _note(tree: Tree) -> dict[str, Any]:
    """Return a tree that consists of JSON values only."""
    if tree.get("data_cls") is not None:
        raise ValueError(f"its data_cls is {tree['data_cls'].__name__}, a class; leave it out")
    return {
        name: _WRITERS[name](value) if name in _WRITERS else value
        for name, value in tree.items()
        if value is not None
        and not (name == "device" and value.type == "cpu")
        and (name, value) not in _DEFAULTS
    }


def _note_tensor(value: Any) -> Any:
    """Return a tensor as numbers; a single number if all are equal, including the sign of zero."""
    tensor = torch.as_tensor(value)
    flat = tensor.detach().cpu().reshape(-1)
    if not flat.numel():
        return 0
    same = bool((flat == flat[0]).all())
    if same and flat.is_floating_point():
        same = bool((torch.signbit(flat) == torch.signbit(flat[0])).all())
    return _finite(flat[0].item() if same else tensor.tolist())


def _finite(value: Any) -> Any:
    """Return numbers with infinities as text."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(data: Any) -> Any:
    """Return data that is not a tensor if JSON can represent it; raise TypeError otherwise."""
    if isinstance(data, (NonTensorData, NonTensorStack)):
        data = data.tolist() if isinstance(data, NonTensorStack) else data.data
    if _is_plain(data):
        return data
    raise TypeError(f"JSON cannot represent {data!r}; use text, numbers, lists and dicts")


def _is_plain(data: Any) -> bool:
    if isinstance(data, list):
        return all(map(_is_plain, data))
    if isinstance(data, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in data.items())
    if isinstance(data, float):
        return math.isfinite(data)
    return data is None or isinstance(data, (bool, int, str))


def _strip_torch(value: torch.dtype | torch.device) -> str:
    return str(value).removeprefix("torch.")


#: Argument of a spec -> the function that returns its JSON value. Other arguments are JSON values.
_WRITERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("low", "high", "mask"), _note_tensor),
    "nvec": lambda value: torch.as_tensor(value).tolist(),
    "dtype": _strip_torch,
    "device": _strip_torch,
    "shape": list,
    "specs": lambda parts: {key: part and _note(part) for key, part in parts.items()},
    "parts": lambda parts: list(map(_note, parts)),
    "choices": lambda parts: [_note(p) if isinstance(p, dict) else {"data": _plain(p)} for p in parts],
    "example_data": lambda value: {"data": _plain(value)},
}


def from_text(text: str) -> Any:
    """Return the spec that a text describes.

    Args:
        text: Text that `to_text` returned.

    Raises:
        TypeError: The argument is not a str.
        MigrationError: A newer version of the library wrote the text.
        CorruptionError: The text does not describe a spec.
    """
    if not isinstance(text, str):
        raise TypeError(f"from_text takes the str that to_text returned; got a {type(text).__name__}")
    try:
        return read_stored(text)
    except CorruptionError as exc:
        raise CorruptionError(exc.message, hint="pass the text that to_text returned, unchanged") from exc


def read_stored(text: str) -> Any:
    """Return the spec that a store's text describes; raise CorruptionError for a damaged text."""
    node = unpack_specs(text)
    try:
        return build(_read(node), specs)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as exc:
        raise CorruptionError(f"the text of the specs cannot be read: {exc!r}") from exc


def _read(node: dict[str, Any]) -> Tree:
    """Return a node of a text as a tree."""
    tree = {name: _READERS[name](value) if name in _READERS else value for name, value in node.items()}
    # A single bound has no dims, and broadcasts to any shape.
    bounds = {name: torch.tensor(tree[name], dtype=tree["dtype"]) for name in ("low", "high") if name in tree}
    return tree | bounds


def _numbers(value: Any) -> Any:
    """Return numbers whose infinities are text as numbers."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value


#: Argument of a spec -> the function that returns it for the JSON value. Other arguments are JSON values.
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("low", "high"), _numbers),
    "nvec": torch.tensor,
    "mask": lambda value: torch.atleast_1d(torch.tensor(value)),  # type: ignore[no-untyped-call]
    "dtype": lambda value: getattr(torch, value),
    "specs": lambda parts: {key: part and _read(part) for key, part in parts.items()},
    "parts": lambda parts: list(map(_read, parts)),
    "choices": lambda parts: [NonTensorData(p["data"]) if "data" in p else _read(p) for p in parts],
    "example_data": lambda value: value["data"],
}
