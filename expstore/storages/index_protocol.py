"""Which index a storage has, and what it asks of who keeps it.

The index is in a package above the storages, which know it only as an object that they were given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from expstore.core.values import IntArray

__all__ = ["CatalogLike", "IndexLink"]


class CatalogLike(Protocol):
    """What a storage needs of the keeper of the index."""

    def keep_up(self) -> None:
        """Hand the index what it lacks, unless it was let go of for good."""

    def busy(self) -> bool:
        """Return whether many changes wait for the index."""

    def facts(self, names: Sequence[str], episodes: IntArray | None) -> Any:
        """Return facts about episodes."""

    def close(self) -> None:
        """Bring the index up to date and let go of it."""


class IndexLink:
    """Hold the keeper of a storage's index weakly: it holds the storage.

    A buffer that was forgotten is collected at once, then, and its index with it.

    Args:
        path: Where the index is kept; None: in memory.
    """

    __slots__ = ("_catalog", "path")

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._catalog: Callable[[], CatalogLike | None] = _none

    def use(self, catalog: CatalogLike) -> None:
        """Give changes to this keeper, before the journal forgets them."""
        self._catalog = weakref.ref(catalog)

    @property
    def catalog(self) -> CatalogLike | None:
        """Who keeps the index; None: the storage has no index."""
        return self._catalog()


def _none() -> None:
    return None
