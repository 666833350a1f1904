"""Views of a composite spec's keys, specs and items, nested or not.

A view always shows the current entries of the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from expstore.core.values import to_key
from expstore.specs.base import TensorSpec
from expstore.specs.batch_dims import BatchDims

NestedKey = str | tuple[str, ...]
_Item = TypeVar("_Item")


class _View(Generic[_Item]):
    """Show a composite's entries, in the order in which they were set.

    Args:
        composite: The composite.
        include_nested: Whether to include entries of nested composites, before the composites themselves.
        leaves_only: Whether to leave out entries that are not leaves.
        is_leaf: Function that returns whether a class of specs is a leaf. By default all classes but
            composites are leaves.
        step_mdp_static_only: Whether to treat composites that `step_mdp` keeps unchanged as leaves.
    """

    def __init__(
        self,
        composite: BatchDims,
        include_nested: bool,
        leaves_only: bool,
        is_leaf: Callable[[type], bool] | None,
        step_mdp_static_only: bool,
    ) -> None:
        self._composite, self._nested, self._leaves = composite, include_nested, leaves_only
        self._is_leaf, self._static = is_leaf, step_mdp_static_only

    def _pairs(self) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        if not (self._static and self._composite.step_mdp_static):
            yield from self._walk(self._composite, ())

    def _walk(
        self, composite: BatchDims, path: tuple[str, ...]
    ) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        for name, spec in composite.entries():
            key = (*path, name)
            branches = isinstance(spec, BatchDims)
            if self._nested and isinstance(spec, BatchDims) and not (self._static and spec.step_mdp_static):
                yield from self._walk(spec, key)
            leaf = not branches if self._is_leaf is None else self._is_leaf(type(spec))
            if (
                leaf
                or not self._leaves
                or (self._static and isinstance(spec, BatchDims) and spec.step_mdp_static)
            ):
                yield (key if path else name), spec

    def __len__(self) -> int:
        return sum(1 for _ in self._pairs())


class KeysView(_View[NestedKey]):
    """Show a composite's keys: strings, and tuples for nested keys."""

    def __iter__(self) -> Iterator[NestedKey]:
        return (key for key, _ in self._pairs())

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, (str, tuple)):
            return False
        wanted = to_key(key)
        return any(to_key(found) == wanted for found in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={list(self)})"


class ValuesView(_View[TensorSpec | None]):
    """Show a composite's specs."""

    def __iter__(self) -> Iterator[TensorSpec | None]:
        return (spec for _, spec in self._pairs())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(values={list(self)})"


class ItemsView(_View[tuple[NestedKey, TensorSpec | None]]):
    """Show a composite's keys and specs."""

    def __iter__(self) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        return self._pairs()

    def __contains__(self, item: object) -> bool:
        return any(pair == item for pair in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(items={list(self)})"
