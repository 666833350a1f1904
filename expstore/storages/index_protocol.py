"""What a storage asks of the keeper of the index, which stands above it.

Used by `expstore.storages.base` alone. It does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from expstore.core.values import IntArray

__all__ = ["CatalogLike"]


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
