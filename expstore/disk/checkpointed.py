"""The interface through which a checkpoint syncs the parts of a store that have files.

Used by the checkpointer of a store, and implemented by columns, checksums, sample counts, logs and keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from expstore.core.id_set import NO_IDS, IdSet
from expstore.disk.files import File

_Thing = TypeVar("_Thing")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The rows and records that a checkpoint is about to cover.

    Args:
        lsn: Sequence number of the last record that it covers.
        generation: The epoch of the writer.
        last: Id of the newest row.
        runs: Slots of the rows that no earlier checkpoint covers: (first slot, offset, rows).
        low: All rows up to this id have been evicted or deleted.
        deleted: Rows above `low` that have been deleted.
    """

    lsn: int
    generation: int
    last: int
    runs: Sequence[tuple[int, int, int]] = ()
    low: int = 0
    deleted: IdSet = NO_IDS


class Pin:
    """A record that checkpoints must not cover yet, because its change is not applied to the columns.

    Args:
        lsn: The number of the last record that a checkpoint may cover.
        segment: The segment of the journal with the pinned record, if the pin may be held for long; then the
            segments before it may be removed meanwhile.
    """

    __slots__ = ("lsn", "segment")

    def __init__(self, lsn: int, segment: File | None = None) -> None:
        self.lsn, self.segment = lsn, segment


@dataclass(frozen=True, slots=True)
class Dirty:
    """Files with bytes, and folders with names, that no checkpoint covers yet."""

    files: set[File] = field(default_factory=set)
    folders: set[Path] = field(default_factory=set)


class Checkpointed(ABC):
    """A part of a store that a checkpoint syncs.

    The checkpointer calls `flush`, `begin`, `prepare`, syncs the files and folders that `begin` returned, and
    calls `synced`; then it appends the checkpoint record, syncs the journal, and calls `completed`. If
    anything fails before `synced`, it calls `abort` instead, and the next checkpoint starts from the same
    state.

    Threads: one checkpoint runs at a time. `flush`, `begin` and `abort` are called with the lock of the
    episodes held, so that no record is appended meanwhile; the others are called without it.
    """

    def flush(self) -> None:
        """Write data that is only in memory to the files."""

    @abstractmethod
    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the files and folders that no checkpoint covers yet; each is returned only once."""

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Write data about the bytes to be synced, such as checksums, into files that `begin` returned."""

    def synced(self) -> None:
        """Do the work that requires the files and folders that `begin` returned to be synced."""

    def completed(self, *, tidy: bool) -> None:
        """Do the work that requires the checkpoint record to be synced.

        Args:
            tidy: Whether files may be removed or replaced, because no snapshot is being copied.
        """

    def abort(self, dirty: Dirty) -> None:
        """Mark the files and folders that `begin` returned as unsynced again."""


def take_all(things: set[_Thing]) -> set[_Thing]:
    """Remove and return all elements of a set to which another thread may be adding."""
    found: set[_Thing] = set()
    while things:
        found.add(things.pop())
    return found
