"""The link from a storage to its index, and what the storage needs of the index.

The index is in a package above the storages, which know it only as an object that they are given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from expstore.core.values import IntArray

__all__ = ["CatalogLike", "IndexLink"]


class CatalogLike(Protocol):
    """What a storage needs of its index."""

    def keep_up(self) -> None:
        """Index the changes that the index lacks; do nothing once the index is closed for good."""

    def busy(self) -> bool:
        """Return whether many changes wait to be indexed."""

    def facts(self, names: Sequence[str], episodes: IntArray | None) -> Any:
        """Return facts about episodes."""

    def close(self) -> None:
        """Update the index and close it."""


class IndexLink:
    """Hold a storage's index weakly, because the index holds the storage.

    A buffer without references is then freed at once, and its index with it.

    Args:
        path: The file of the index; None: in memory.
    """

    __slots__ = ("_catalog", "path")

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._catalog: Callable[[], CatalogLike | None] = _none

    def use(self, catalog: CatalogLike) -> None:
        """Send changes to this index, before the journal drops them."""
        self._catalog = weakref.ref(catalog)

    @property
    def catalog(self) -> CatalogLike | None:
        """The storage's index; None: it has no index."""
        return self._catalog()


def _none() -> None:
    return None
