"""How a packed column gives space back: shards whose rows have all left go, others are written anew without.

Part of the packed columns that are written. A finished shard may be a version's as well (a hard link) and
never changes: a smaller one takes its name. It is told which rows have left and never asks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expstore.core.id_set import Gaps
from expstore.core.values import IntArray
from expstore.disk.files import File
from expstore.storages.columns.packed.column import PackedRows, Source
from expstore.storages.format.chunk_file import Chunks, no_chunks, pack_index, read_index

__all__ = ["AGAIN", "ThinningRows"]

#: A shard that is made once more; it has no other name before it is complete.
AGAIN = "again"
#: A shard is written anew when at least one of so many bytes in it is of no use.
_PART = 8


class ThinningRows(PackedRows):
    """Give back the space of rows that have left, in a store that grows.

    Threads: one writes, and it is this one; whoever reads goes on in the former file. Crashes: a shard is the
    former one or the new one.
    """

    _sources: list[Source]
    new_folders: set[Path]

    def thin(self, dead: Gaps, near: Gaps, lent: int) -> None:
        """Give back the space of chunks without a row that anybody reads.

        Args:
            dead: Ids of rows that have left.
            near: Those of them in whose shards something may be left to do.
            lent: So many rows behind a chunk may have their bytes in it.
        """
        shard = self.packing.shard
        numbers = Gaps.merged((near.first - 1) // shard, (near.last - 1) // shard)
        for first, last in numbers:
            for number in range(first, last + 1):
                if self._disk.exists(self.shard_path(number)):
                    self._thin_shard(number, self._unread(number, dead, lent))

    def _unread(self, number: int, dead: Gaps, lent: int) -> IntArray:
        """Say which chunks of a shard nobody reads. Shape `(chunks,)`, bool."""
        each = self.packing.rows
        before = number * self.packing.shard + each * np.arange(self.packing.chunks)
        unread: IntArray = dead.counts(before + each + lent) - dead.counts(before) == each + lent
        return unread

    def _thin_shard(self, number: int, unread: IntArray) -> None:
        path, first = self.shard_path(number), number * self.packing.chunks
        self.new_folders.add(self.folder)
        if unread.all():
            self._disk.unlink(path)
            self._shown.where[first : first + unread.size] = 0
            maps = {shard: held for shard, held in self._shown.maps.items() if shard != number}
            self._shown = self._shown._replace(maps=maps)
            self._sources = [source for source in self._sources if source.shard != number]
            return
        file = self._disk.open(path, write=False)
        try:
            chunks = read_index(file, self.packing.chunks, table=self.packing.table_bytes)
            there = chunks.offsets >= 0
            sizes = np.where(there, chunks.sizes + self.head, 0)
            if sizes[unread].sum() * _PART < sizes.sum():
                return
            self._write_anew(file, path, chunks, np.flatnonzero(there & ~unread))
        finally:
            file.close()
        self._read_anew(number)

    def _write_anew(self, former: File, path: Path, chunks: Chunks, kept: IntArray) -> None:
        """Put a shard with some of the chunks in the place of one."""
        temp, found, end = self.folder / AGAIN, no_chunks(self.packing.chunks), 0
        file = self._disk.open(temp, create=True)
        try:
            file.truncate(0)
            for number in kept.tolist():
                start, size = int(chunks.offsets[number]) - self.head, int(chunks.sizes[number]) + self.head
                file.write(former.read(start, size), end)
                found.offsets[number], found.sizes[number] = end + self.head, chunks.sizes[number]
                end += size
            file.write(pack_index(found, table=self.packing.table_bytes), end)
            file.sync()
        finally:
            file.close()
        self._disk.rename(temp, path)

    def _read_anew(self, number: int) -> None:
        """Let the rows of a shard be found in its new file."""
        found = self._read_shard(number)
        if found is None:
            return
        self._show(number, found.turn, found.addresses, found.chunks)
        self._leave_former(found)
        self._sources = [source for source in self._sources if not (source.named and source.shard == number)]
        self._sources.append(found)
