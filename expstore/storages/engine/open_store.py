"""Everything that one opening of a store for writing has opened.

`expstore.storages.engine.opening` makes it; the storage swaps it as one. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from expstore.core.draw_state import DrawState
from expstore.core.id_set import NO_GAPS, Gaps
from expstore.episodes.log import EpisodeLog
from expstore.storages.columns.checksums import Checksums
from expstore.storages.columns.column_set import taken
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.memtable import Tail
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.engine.replaced_rows import ReplacedRows
from expstore.storages.format.journal import Journal
from expstore.storages.format.write_key_file import KeyFile
from expstore.storages.row_state import RowState
from expstore.storages.snapshots.capture import base_of

__all__ = ["OpenStore"]


class _Part(Protocol):
    def close(self) -> None:
        """Close its files."""


@dataclass(eq=False, kw_only=True)
class OpenStore(RowState):
    """The rows of a store that is open for writing, and the files that they are in.

    Invariant: all of it is of one opening. An opening that fails makes none, and the storage keeps the one
    that it has; no attribute is ever taken back by itself.

    Crashes: what is in memory alone is in the journal, too.

    Args:
        journal: Gets the commit records.
        log: Facts about episodes that have ended.
        columns: The rows; None: there are no fields yet.
        checksums: Of blocks of the columns; None with `columns`.
        memtable: Rows that the columns do not hold yet.
        replaced: Rows that took the places of others, which the columns do not hold yet.
    """

    journal: Journal
    log: EpisodeLog
    columns: WritableColumns | None
    checksums: Checksums | None
    memtable: Tail
    replaced: ReplacedRows
    priorities: StoredPriorities
    write_keys: KeyFile
    sampled: SampledColumn | None

    def replace_columns(self, columns: WritableColumns) -> None:
        """Have other columns; the former ones stay open where they are among these."""
        self.columns = columns

    def replace_checksums(self, checksums: Checksums) -> None:
        """Have the checksums of other columns; the caller closes the former."""
        self.checksums = checksums

    def tombstones(self, slots: int | None) -> tuple[int, Gaps]:
        """Return which rows have left for good: all up to an id, and some above it.

        Args:
            slots: How many a ring has; None: the store grows.
        """
        if slots is None:
            return self.window.low, self.window.gaps
        return max(self.retired, self.last - slots), NO_GAPS

    def base_record(self, draws: DrawState, generation: int, *, opening: bool) -> dict[str, Any]:
        """Return what a segment of the journal begins with: the state before its first record.

        Args:
            draws: Where the draws are.
            generation: The number of this opening.
            opening: Whether the segment is the first one of an opening.
        """
        own = {"opening": opening, "generation": generation, "log_length": self.log.length}
        # By the number of keys a lost file of keys is noticed.
        return base_of(self, draws) | own | {"write_keys": self.write_keys.number}

    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names in them, once."""
        folders = taken(self.columns.new_folders) if self.columns is not None else set()
        return folders if self.sampled is None else folders | taken(self.sampled.new_folders)

    def _parts(self) -> Iterator[_Part]:
        for part in (self.journal, self.log, self.write_keys, self.columns, self.checksums, self.sampled):
            if part is not None:
                yield part

    def close(self) -> None:
        """Close all files; rows that were mapped can still be read."""
        for part in self._parts():
            part.close()
