"""Convert gymnasium spaces to specs, and specs to gymnasium spaces with the same values.

Used by the collector, and by users for their own environments. gymnasium is imported only when a spec is
converted to a space.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from expstore import specs
from expstore.errors import MissingExtraError
from expstore.specs.base import TensorSpec

#: Kinds of spaces whose values have no fixed shape, with the reason.
WITHOUT_SPEC = {
    "Text": "its values are text of any length, not tensors",
    "Graph": "its values are graphs of any size, not tensors",
    "Sequence": "its values have any length; pad them to a fixed one in the environment",
    "OneOf": "its values are pairs of a number and a value, whose shape depends on the number",
}


def from_space(space: Any) -> Any:
    """Return the spec of a gymnasium space's values, as tensors of the same dtype and shape.

    Box becomes Bounded, Discrete Categorical, MultiDiscrete MultiCategorical, MultiBinary Binary, Dict
    Composite, and Tuple Composite with the keys "0", "1" and so on. A Discrete or MultiDiscrete that does
    not start at 0 becomes a Bounded of integers.

    Args:
        space: A space of one of these kinds, nested to any depth.

    Raises:
        ValueError: The values have no fixed shape: Text, Graph, Sequence, OneOf; or two keys of a Dict have
            the same text.
        TypeError: `space` is not a supported space.

    Example:
        >>> from expstore.specs import from_space
        >>> import gymnasium.spaces
        >>> from_space(gymnasium.spaces.Discrete(4)).n
        4
    """
    names = [kind.__name__ for kind in type(space).__mro__]
    if "Dict" in names:
        parts = {str(key): from_space(part) for key, part in space.spaces.items()}
        if len(parts) < len(space.spaces):
            raise ValueError(f"two keys of a Dict space have the same text: {list(space.spaces)}; rename one")
        return specs.Composite(parts)
    if "Tuple" in names:
        return specs.Composite({str(place): from_space(part) for place, part in enumerate(space.spaces)})
    for name, reason in WITHOUT_SPEC.items():
        if name in names:
            raise ValueError(f"there is no spec for a {name} space: {reason}")
    if "Box" in names:
        low, high = (torch.from_numpy(bound.copy()) for bound in (space.low, space.high))
        return specs.Bounded(low, high, shape=space.shape, dtype=_dtype(space))
    if "MultiBinary" in names:
        return specs.Binary(shape=space.shape, dtype=_dtype(space))
    if "MultiDiscrete" in names:
        return _from_multi_discrete(space)
    if "Discrete" in names:
        start, n = int(space.start), int(space.n)
        if start:
            return specs.Bounded(start, start + n - 1, shape=(), dtype=_dtype(space))
        return specs.Categorical(n, dtype=_dtype(space))
    raise TypeError(f"{type(space).__name__} is not a supported gymnasium space")


def _from_multi_discrete(space: Any) -> TensorSpec:
    start, nvec = np.asarray(space.start), np.asarray(space.nvec)
    if start.any():
        low, high = torch.from_numpy(start.copy()), torch.from_numpy(start + nvec - 1)
        return specs.Bounded(low, high, shape=space.shape, dtype=_dtype(space))
    counts = torch.from_numpy(nvec.astype(np.int64))
    return specs.MultiCategorical(counts, dtype=_dtype(space), remove_singleton=False)


def _dtype(space: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, space.dtype)).dtype


def to_space(spec: TensorSpec | None) -> Any:
    """Return the gymnasium space of a spec's values, as `spec.to_numpy` returns them.

    The reverse of `from_space`. In addition Unbounded becomes a Box, OneHot a Discrete, MultiOneHot a
    MultiDiscrete, and a single bounded integer a Discrete with a start.

    Args:
        spec: A spec of tensors. A Composite with the keys "0", "1" and so on becomes a Tuple.

    Raises:
        ValueError: gymnasium has no such space: for values that are not tensors, for masks, dims of any
            size, bfloat16, stacks, and None.
        TypeError: `spec` is not a spec.
        MissingExtraError: gymnasium is not installed.

    Example:
        >>> from expstore import Bounded
        >>> from expstore.specs import to_space
        >>> to_space(Bounded(2, 5, shape=(), dtype=torch.int64))
        Discrete(4, start=2)
    """
    return _to_space(spec, _gymnasium())


def _gymnasium() -> Any:
    try:
        return importlib.import_module("gymnasium.spaces")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            "spaces need gymnasium, which is not installed", hint="pip install 'expstore[gym]'"
        ) from exc


def _to_space(spec: Any, home: Any) -> Any:
    if isinstance(spec, (specs.StackedComposite, specs.Stacked, specs.Choice)):
        raise ValueError(f"gymnasium has no space for a {type(spec).__name__}: convert its parts instead")
    if isinstance(spec, specs.Composite):
        parts = {key: _to_space(part, home) for key, part in spec.entries()}
        if parts and list(parts) == [str(place) for place in range(len(parts))]:
            return home.Tuple(tuple(parts.values()))
        return home.Dict(parts)
    if spec is not None and not isinstance(spec, TensorSpec):
        raise TypeError(
            f"to_space takes a spec of expstore; got a {type(spec).__module__}.{type(spec).__name__} "
            "(convert specs of TorchRL with from_torchrl)"
        )
    if spec is None or spec.dtype is None:
        raise ValueError("gymnasium has no space for an unknown spec, or for values that are not tensors")
    if -1 in spec.shape:
        raise ValueError(f"gymnasium has no space with a dim of any size: the spec has shape {spec.shape}")
    if spec.dtype == torch.bfloat16:
        raise ValueError("NumPy has no bfloat16; convert the spec to float32")
    if getattr(spec, "mask", None) is not None:
        raise ValueError("gymnasium's spaces have no masks; pass the mask to `space.sample`")
    return _to_leaf(spec, home, tuple(spec.shape), torch.zeros(0, dtype=spec.dtype).numpy().dtype)


def _to_leaf(spec: Any, home: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    if isinstance(spec, specs.Binary):
        return home.MultiBinary(shape[0] if len(shape) == 1 else shape) if shape else home.Discrete(2)
    if isinstance(spec, specs.MultiOneHot):
        return home.MultiDiscrete(np.broadcast_to(np.array(spec.nvec), (*shape[:-1], len(spec.nvec))))
    if isinstance(spec, specs.OneHot):
        return home.MultiDiscrete(np.full(shape[:-1], spec.n)) if shape[1:] else home.Discrete(spec.n)
    if isinstance(spec, specs.MultiCategorical):
        return home.MultiDiscrete(spec.nvec.cpu().numpy(), dtype=dtype)
    if isinstance(spec, specs.Categorical):
        if shape:
            return home.MultiDiscrete(np.full(shape, spec.n), dtype=dtype)
        return home.Discrete(spec.n, dtype=dtype)
    return _numbers(spec, home, shape, dtype)


def _numbers(spec: Any, home: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    low, high = (bound.cpu().numpy() for bound in (spec.space.low, spec.space.high))
    bounded = isinstance(spec, specs.Bounded)
    if bounded and not shape and dtype.kind in "iu" and int(high) - int(low) < 2**62:
        return home.Discrete(int(high) - int(low) + 1, start=int(low), dtype=dtype)
    if not bounded and dtype.kind == "f":
        low, high = np.full(shape, -np.inf, dtype), np.full(shape, np.inf, dtype)
    return home.Box(low, high, shape, dtype.type)
