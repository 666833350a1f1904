"""Columns as they are at one moment, for snapshots.

Used by snapshots. Flat columns need none: their rows are views, which a pin keeps from being overwritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expstore.core.values import Window
from expstore.disk.files import Disk
from expstore.storages.format.chunk_encoding import Packing

__all__ = ["Capture", "Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """A snapshot that is being built.

    Args:
        disk: Where files are touched.
        folder: The folder of the snapshot.
        former: That of the snapshot before; None: there is none whose files may be shared.
        make_folder: Makes a folder in the snapshot.
        window: The rows.
        slots: How many a ring has; None: the store grows.
        reach: How many rows before the oldest one stay as they are, in a ring.
    """

    disk: Disk
    folder: Path
    former: Path | None
    make_folder: Callable[[Path], None]
    window: Window
    slots: int | None
    reach: int


class Capture(ABC):
    """Some columns as they are at one moment; whoever writes continues, and these rows stay.

    Crashes: what is written is synced by whoever builds the snapshot.
    """

    #: Which columns.
    places: Sequence[int]
    #: How they are packed, by place; nothing of those that are not.
    packings: Mapping[int, Packing]

    @abstractmethod
    def rows(self, place: int, first_id: int, count: int) -> list[Any]:
        """Return a run of rows of a column in pieces."""

    @abstractmethod
    def begin(self, target: Target) -> list[tuple[Path, int]]:
        """Bring in what the writer may take away; return the files written, and their lengths."""

    @abstractmethod
    def complete(self) -> list[tuple[Path, int]]:
        """Bring in the rest, which the writer leaves alone; return the files written, and their lengths."""
