"""The link from a storage to its SQL index, and the interface of the index.

The index is in a package above the storages, which know it only as an object that is passed to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from expstore.core.values import IntArray


class CatalogLike(Protocol):
    """The interface of a storage's SQL index."""

    def keep_up(self) -> None:
        """Update the index; do nothing after it was closed for good."""

    def busy(self) -> bool:
        """Return whether many changes wait to be indexed."""

    def facts(self, names: Sequence[str], episodes: IntArray | None) -> Any:
        """Return facts about episodes."""

    def close(self) -> None:
        """Update the index and close it."""


class IndexLink:
    """A weak reference from a storage to its index, because the index refers to the storage.

    Without it, a buffer and its index would only be freed by the garbage collector, not with the last
    reference.

    Args:
        path: The file of the index; None: in memory.
    """

    __slots__ = ("_catalog", "path")

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._catalog: Callable[[], CatalogLike | None] = _none

    def use(self, catalog: CatalogLike) -> None:
        """Use this index: it is updated before the journal drops records."""
        self._catalog = weakref.ref(catalog)

    @property
    def catalog(self) -> CatalogLike | None:
        """The storage's index; None: it has no index."""
        return self._catalog()


def _none() -> None:
    return None
