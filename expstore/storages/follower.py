"""A store that somebody else writes to, or nobody: read, never changed.

The storage behind `expstore.open(mode="r")`. It works from expstore.json, the journal, the columns and
episodes.log; it takes no lock and writes nothing, so any number may follow one store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from expstore.episodelog import LogEntry, read_log
from expstore.errors import StateError
from expstore.files import Disk, ReadingDisk
from expstore.schema import Schema
from expstore.storages.base import ROW_FIELDS, Keys, Rows
from expstore.storages.folder import LOG, FolderStorage
from expstore.storages.recovery import describe_past
from expstore.storages.replay import Replay, replay
from expstore.storages.settings import Settings, look_up
from expstore.types import Array, IntArray, Window

__all__ = ["FollowerStorage"]


class FollowerStorage(FolderStorage):
    """Read a store without a part in it.

    Crashes: there is nothing to lose. Threads: any number read. Processes: any number follow a store.

    Args:
        path: The store's folder.
        capacity: As stored, or None.
        settings: As of `expstore.open`; `seed` is the reader's own.
        disk: Where files are touched; by default one that refuses to change any.

    Raises:
        NotFoundError: There is no store.
        StateError: A setting contradicts the store.
        CorruptionError: The journal or expstore.json is damaged. A damaged column is refused when it is
            touched, the others can be read.
    """

    kind = "zarr"

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings | None = None,
        disk: Disk | None = None,
    ) -> None:
        path, disk, settings = Path(path), disk or ReadingDisk(), settings or Settings(mode="r")
        super().__init__(path, look_up(disk, path, capacity, settings), disk)
        if settings.seed is not None:
            self.seed = settings.seed
        self._take_over(replay(self, same_boot=False))

    def _take_over(self, found: Replay) -> None:
        """Take over what the journal and the columns say."""
        self.columns, self._overlay, self.episodes = found.columns, found.overlay, found.table
        self.write_count, self._entries = found.write_count, found.entries
        schema = self.manifest.schema
        if schema is not None:
            self.schema, self.keys = schema, self.resolve_keys(schema)
            self.priorities = self._read_priorities()
        past = found.past
        self._log_length = past.log_length if past else 0
        if past is not None:
            self.retired, self.max_priority, self.horizon = past.retired, past.max_priority, past.last
            self.content, self.index_floor = past.content, past.index_floor
            self._window = Window(past.window_low(self.capacity), past.last)
            self.counters.recovered = describe_past(past, 0)

    def _read_priorities(self) -> Array:
        """Return the priorities by slot, without copying them where that can be helped."""
        assert self.columns is not None
        column, place = self.columns.columns[-1], self.priority_place
        if not column.damaged and not self._overlay:
            return column.view[: column.ready]
        size = max(column.ready, self._window.last if self.slots is None else self.slots)
        values = np.ones(size, np.float32)
        for number in range(-(-column.ready // column.rows)):
            if number not in column.damaged:
                start = number * column.rows
                values[start : start + column.rows] = column.view[start : start + column.rows]
        self._overlay.lay_onto(place, values)
        return values

    # -- reading ---------------------------------------------------------------------------------

    def _take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        if self.columns is None:
            raise StateError("the store has no rows yet", hint="wait until its writer has extended it")
        columns = self.columns.columns
        wanted = range(len(columns) - len(ROW_FIELDS)) if places is None else places
        if not self._overlay:
            return [columns[place].take(slots) for place in wanted]
        return [self._overlay.take(place, columns[place], slots) for place in wanted]

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying."""
        if self.columns is None:
            return [[] for _ in places]
        runs = self.pieces(first_id, count)
        columns = self.columns.columns
        found: list[list[Array]] = []
        for place in places:
            parts: list[Array] = []
            for slot, _, n in runs:
                parts += self._overlay.parts(place, columns[place], slot, n)
            found.append(parts)
        return found

    def log_entries(self) -> Iterator[LogEntry]:
        """Return everything that was noted about episodes that ended, in order."""
        yield from read_log(self.disk, self.path / LOG, self._log_length)
        yield from self._entries

    # -- what only a writer does -----------------------------------------------------------------

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing; it never is."""
        return False

    def check_writable(self) -> NoReturn:
        """Raise StateError: nobody writes here."""
        super().check_writable()
        raise StateError(
            f"{self.path} is open for reading only",
            hint="write with the buffer that has it open with mode='a'",
        )

    def _create(self, schema: Schema, keys: Keys) -> None:
        self.check_writable()

    def _put(self, rows: Rows, skipped: int) -> int:
        self.check_writable()

    def _publish(self, rows: Rows, skipped: int, checksum: int) -> None:
        self.check_writable()

    def _overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        self.check_writable()

    def sync(self) -> None:
        """Raise StateError: nothing is written here."""
        self.check_writable()

    # -- life ------------------------------------------------------------------------------------

    def more_stats(self) -> dict[str, Any]:
        """Return path and generation, and which files are damaged."""
        return {
            "path": str(self.path),
            "generation": self.manifest.generation,
            "damaged": self.columns.damaged if self.columns is not None else [],
            "recovered": self.counters.recovered,
        }

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._closed = True
