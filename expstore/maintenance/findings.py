"""The findings of a check, and the state that the parts of a check share.

Used by the checks of this package. It never changes a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from expstore.core.values import IntArray, Window, cut_run
from expstore.disk.files import Disk
from expstore.maintenance.packed import PackedFiles
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.flat import FlatColumn
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.format.manifest import Manifest
from expstore.storages.recovery.recover import Past

#: Called with the number of bytes checked so far, and the number of bytes to check.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem that a check found.

    Args:
        kind: A stable word: manifest, metadata, missing, length, footer, payload, unwritten, checksums,
            journal, torn, episodes.log, keys, ids, episodes, index, repair, version, state or links.
        path: The file, relative to the store.
        message: A description in one line.
        column: The name of the field.
        shard: Number of the shard.
        slots: First and last slot of the affected rows.
        ids: The readable rows among them: first and last id of each run.
        fatal: Whether the store cannot be read until this is repaired.
    """

    kind: str
    path: str
    message: str
    column: str | None = None
    shard: int | None = None
    slots: tuple[int, int] | None = None
    ids: tuple[tuple[int, int], ...] = ()
    fatal: bool = False


@dataclass(slots=True)
class Inspection:
    """The state of a check of one store.

    Args:
        disk: Access to files; it only reads.
        path: The store's folder.
        manifest: The store's manifest.
        group: The store's columns, opened for reading; None if it has no fields yet.
        sampled: The column that counts how often rows were sampled; None if the store has none.
        past: The content of the journal; None if there is no readable journal.
        stored: The stored rows.
        found: The findings so far.
        packed: The content of the files of packed columns, by the column's position.
        damaged: The blocks that do not have their checksums, by the column's position.
    """

    disk: Disk
    path: Path
    manifest: Manifest
    group: ReadColumns | None = None
    sampled: FlatColumn | None = None
    past: Past | None = None
    stored: Window = field(default_factory=lambda: Window(0, 0))
    found: list[Finding] = field(default_factory=list)
    packed: dict[int, PackedFiles] = field(default_factory=dict)
    damaged: dict[int, set[int]] = field(default_factory=dict)

    @property
    def slots(self) -> int | None:
        """Number of slots of a ring; None in an unbounded store."""
        return self.manifest.slots

    @property
    def arrays(self) -> list[FlatColumn | PackedRows]:
        """All columns that are Zarr arrays: the columns with checksums first, then the others."""
        arrays = [] if self.group is None else [*self.group.arrays]
        return arrays if self.sampled is None else [*arrays, self.sampled]

    @property
    def flat(self) -> list[FlatColumn]:
        """The arrays that are not packed."""
        flat = [] if self.group is None else [*self.group.flat.values()]
        return flat if self.sampled is None else [*flat, self.sampled]

    def find_settled_runs(self) -> list[tuple[int, int]]:
        """Return the readable rows that a checkpoint covers, as runs: (first id, number of rows)."""
        window, past = self.stored, self.past
        last = window.last if past is None else min(window.last, past.synced)
        return [
            (first, min(count, last + 1 - first)) for first, count in window.runs() if count and first <= last
        ]

    def relative(self, path: Path) -> str:
        """Return a path relative to the store, as in findings."""
        return path.relative_to(self.path).as_posix()

    def note(self, finding: Finding) -> None:
        """Record a finding."""
        self.found.append(finding)

    def pieces(self, first_id: int, count: int) -> list[tuple[int, int, int]]:
        """Split a run of ids at the end of the ring into (first slot, offset in the run, number of rows)."""
        return cut_run(first_id, count, self.slots)

    def ids_in(self, first_slot: int, count: int) -> IntArray:
        """Return the ids of the readable rows in a run of slots, ascending."""
        window, places = self.stored, np.arange(first_slot, first_slot + count, dtype=np.int64)
        if self.slots is None:
            ids = places + 1
        else:
            ids = window.last - (window.last - 1 - places[places < self.slots]) % self.slots
        found: IntArray = np.sort(ids[window.holds(ids)])
        return found


def runs_of(numbers: IntArray) -> tuple[tuple[int, int], ...]:
    """Return the first and the last number of each run in an ascending list. Shape `(n,)`."""
    if not numbers.size:
        return ()
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    firsts = numbers[np.concatenate([[0], cuts + 1])].tolist()
    lasts = numbers[np.concatenate([cuts, [numbers.size - 1]])].tolist()
    return tuple(zip(firsts, lasts, strict=True))
