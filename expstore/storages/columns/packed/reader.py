"""A packed field that is opened for reading only, while a writer appends to it or after it has closed.

Used by followers and readers of snapshots. A reader finds what the writer has written so far, and changes
nothing.
"""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError, StorageError
from expstore.schema.schema import Field
from expstore.storages.columns.column import FollowedPart
from expstore.storages.columns.packed.column import Filling, PackedRows, Source
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.chunk_file import Chunks, scan_chunks

#: How often files are read again that a writer renames or continues to write meanwhile.
_LOOKS = 8
_NEVER = 1 << 62


class PackedReader(PackedRows, FollowedPart):
    """Read a packed field.

    Threads: one thread calls the `look` methods, any number read. Crashes: a reader changes nothing.

    Args:
        disk: The disk on which files are accessed.
        folder: The Zarr array's folder.
        entry: The field.
        slots: Number of slots of a ring; None: the column is unbounded.
        packing: How the field is packed.
    """

    def __init__(self, disk: Disk, folder: Path, entry: Field, slots: int | None, packing: Packing) -> None:
        super().__init__(disk, folder, entry, slots, packing, write=False)
        self._sources: list[Source] | None = None  # all that was found; None before the first look
        self._open: dict[tuple[int, int], tuple[File, Source]] = {}  # unnamed shards, by lap and number
        self._none = np.ones(packing.chunks, bool)
        self._looked = False  # whether missing chunks were noted
        self._at = (0, 0)  # lap and number of the shard up to which everything was found

    def look(self, slots: int, *, due: bool = True) -> None:
        """Find all rows that exist, on the first call only; `look_to` finds later ones."""
        if self._sources is None:
            self._find_all()

    def _find_all(self) -> None:
        self._let_go((_NEVER, 0))
        found: dict[str, list[Source]] = {"c": [], "open": []}
        for kind, shard, lap in self.shards():
            looked = self._read_open(shard, lap) if kind == "open" else None
            looked = looked or self._read_shard(shard)  # it may have been renamed in between
            if looked is not None:
                found[kind].append(looked)
        named, unnamed = found["c"], found["open"]
        again = {(source.shard, source.lap) for source in unnamed}
        named = [source for source in named if (source.shard, source.lap) not in again]
        self._sources = [*self._areas(), *named, *unnamed]
        self._partial.close()
        self._at = max(((source.lap, source.shard) for source in self._sources), default=(0, 0))
        self._show_all(self._sources)

    def _read_open(self, shard: int, lap: int) -> Source | None:
        """Read a shard without its final name; return None if it was renamed meanwhile or does not exist."""
        path = self.open_path(shard, lap)
        try:
            file = self._disk.open(path, write=False)
        except StorageError as exc:
            if exc.errno != errno.ENOENT:  # an existence check now could already see a newer file
                raise
            return None
        size = file.size()
        if not size:  # a power failure can leave an empty file
            file.close()
            return None
        chunks = scan_chunks(file, self.packing.chunks, lap, table=self.packing.table_bytes)
        # The writer may have filled the shard since, and cut off the unused space after the chunks.
        found = Source(shard, lap, self._map(file, size, may_shrink=True), chunks)
        self._open[lap, shard] = file, found
        file.rest()
        return found

    def _let_go(self, before: tuple[int, int]) -> None:
        """Close the files of shards before this one, which are not read again."""
        for place in [place for place in self._open if place < before]:
            self._open.pop(place)[0].close()

    def end_at(self, last: int) -> None:
        """Make only rows up to this id readable. Called when there is no writer any more."""
        (lap, slot), each = self.place_behind(last), self.packing.rows
        inside = slot % each
        lost = self._find_lost_slots(slot - inside, slot, lap)
        self._show_up_to(lap, slot // self.packing.shard)
        try:
            rows = self.part(slot - inside, inside)
        except CorruptionError:
            rows, lost = self._new_rows()[:inside], np.arange(slot - inside, slot)
        self._sources = [source for source in self._sources or () if source.cut(lap, slot // each)]
        self._show_all(self._sources)
        self._show_rest(slot - inside, rows)
        parts = [lost, self._find_lost_slots(0, slot - inside, lap)]
        if lap and self.slots is not None:
            parts.append(self._find_lost_slots(slot - inside + (each if inside else 0), self.slots, lap - 1))
        self._note_lost(np.concatenate(parts))

    def _list_sources(self) -> list[Source | Filling]:
        return [*(self._sources or ())]

    def _miss(self, shard: int, chunks: IntArray) -> None:
        """Mark missing chunks of a shard as damaged."""
        self._grow(shard)
        self._locations.where[shard * self.packing.chunks + chunks] = -1

    def _note_missing(self) -> None:
        """Mark all missing chunks as damaged, except in the shard that is being filled."""
        (lap, shard), each, chunks = self._at, self.packing.rows, self.packing.chunks
        lost = self._find_lost_slots(0, shard * self.packing.shard, lap)
        if lap and self.slots is not None and (shard + 1) * self.packing.shard < self.slots:
            later = self._find_lost_slots((shard + 1) * self.packing.shard, self.slots, lap - 1)
            lost = np.concatenate([lost, later])
        for name in np.unique(lost // each).tolist():
            self._miss(name // chunks, np.array([name % chunks]))

    def _show_rest(self, base: int, rows: Array) -> None:
        held = self._new_rows()
        held[: len(rows)] = rows
        self._set_locations(self._locations._replace(base=base, held=len(rows), rows=held))

    def look_to(self, last: int) -> None:
        """Find the rows up to this id, which the writer has written.

        Raises:
            StorageError: The rows are missing, because another writer has opened the store.
        """
        if not self._looked:
            self._looked = True
            self._note_missing()
        for _ in range(_LOOKS):
            if self._reach(*self.place_behind(last)):
                return
        raise StorageError(f"rows of {self.folder} were not found", hint="try again")

    def _reach(self, lap: int, slot: int) -> bool:
        each, goal = self.packing.rows, (lap, slot // self.packing.shard)
        shards = _NEVER if self.slots is None else -(-self.slots // self.packing.shard)
        at = self._at
        while at <= goal:
            source = self._look_at_shard(*at)
            if source is not None and at < goal:
                self._leave_former(source)
            if at < goal:
                self._miss(at[1], np.flatnonzero(self._none if source is None else source.chunks.offsets < 0))
            at = (at[0], at[1] + 1) if at[1] + 1 < shards else (at[0] + 1, 0)
        self._at = goal
        self._let_go(goal)
        chunk, inside = divmod(slot, each)
        held = self._open.get(goal)
        if held is not None:
            self._miss(goal[1], np.flatnonzero(held[1].chunks.offsets[: chunk % self.packing.chunks] < 0))
        there = held is not None and held[1].chunks.offsets[chunk % self.packing.chunks] >= 0
        if not inside or there:
            self._show_rest(0, self._new_rows()[:0])
            return True
        rows = self._partial.find(lap, chunk, inside)
        self._partial.close()
        if rows is None:
            return False
        values = rows.reshape(-1).view(self.entry.numpy_dtype).reshape(inside, *self.entry.shape)
        self._show_rest(slot - inside, values)
        return True

    def _look_at_shard(self, lap: int, shard: int) -> Source | None:
        """Make the chunks of this lap in a shard readable; return None if the shard has no such chunks."""
        if (lap, shard) in self._open:
            file, source = self._open[lap, shard]
            table = self.packing.table_bytes
            try:
                chunks = scan_chunks(file, self.packing.chunks, lap, source.chunks, table=table)
            except StorageError:  # renamed, or written again: it was opened by a path that it no longer has
                self._open.pop((lap, shard))[0].close()
            else:
                file.rest()
                self._show_more(source, chunks)
                return source
        # In this order: the file may be renamed in between.
        found = self._read_open(shard, lap) or self._read_shard(shard)
        if found is None or found.lap != lap:
            return None
        self._show(found.shard, found.lap, found.addresses, found.chunks)
        return found

    def _show_more(self, source: Source, chunks: Chunks) -> None:
        """Make the new chunks of a known file readable."""
        locations = self._locations
        first = source.shard * self.packing.chunks
        there = np.flatnonzero(chunks.offsets >= 0)
        locations.sizes[first + there] = chunks.sizes[there] - 4
        locations.laps[first + there] = source.lap
        locations.where[first + there] = source.addresses.address + chunks.offsets[there]
        source.chunks = chunks

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        self._let_go((_NEVER, 0))
        super().close()
