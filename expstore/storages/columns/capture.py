"""Columns as they are at one moment, for snapshots.

Used by snapshots. Flat columns need no capture: their rows are views, and a pin keeps them from being
overwritten.
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


@dataclass(frozen=True, slots=True)
class Target:
    """A snapshot that is being built.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder of the snapshot.
        former: The folder of the previous snapshot; None: there is no snapshot whose files may be shared.
        make_folder: Creates a folder in the snapshot.
        stored: The rows of the snapshot.
        slots: Number of slots of a ring; None: the store is unbounded.
        reach: In a ring, how many rows before the oldest one are also unchanged.
    """

    disk: Disk
    folder: Path
    former: Path | None
    make_folder: Callable[[Path], None]
    stored: Window
    slots: int | None
    reach: int


class Capture(ABC):
    """Some columns as they are at one moment. The writer continues, and the captured rows do not change.

    Crashes: the snapshot's builder syncs the files that are written here.
    """

    #: Positions of the captured columns.
    places: Sequence[int]
    #: Packing of each packed column, by position.
    packings: Mapping[int, Packing]

    @abstractmethod
    def rows(self, place: int, first_id: int, count: int) -> list[Any]:
        """Return a run of rows of a column in pieces."""

    @abstractmethod
    def begin(self, target: Target) -> list[tuple[Path, int]]:
        """Copy or link what the writer may remove; return the files written, and their lengths in bytes."""

    @abstractmethod
    def complete(self) -> list[tuple[Path, int]]:
        """Copy or link the rest, which the writer never removes; return the written files and lengths."""
