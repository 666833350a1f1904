"""Rows of a packed field: find their chunks, and copy rows out of them.

Base of the writer and the reader of a packed column. Rows of a field may be stored in the column of the next
observations, and are read from there. This module changes no file.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.buffer_pool import Recycled
from expstore.core.values import Array, IntArray, cut_run, key_name
from expstore.disk.files import Disk, File, address_of
from expstore.disk.mapped_files import AddressRange
from expstore.errors import CorruptionError, SchemaError, StorageError
from expstore.kernels.loader import compiling, load_in_background
from expstore.schema.schema import Field
from expstore.storages.columns.column import AppendedPart, Column, FieldSize
from expstore.storages.columns.flat import REWRITE_BYTES
from expstore.storages.columns.packed.open_chunk import PartialFile
from expstore.storages.columns.packed.parts import Frame, Locations
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.chunk_file import (
    ANY_LAP,
    HEADER_BYTES,
    Chunks,
    find_lap,
    index_bytes,
    no_chunks,
    read_index,
)
from expstore.storages.format.zarr_metadata import shard_name

PARTIAL = "partial"
#: Number of slots that are sampled to estimate how many rows are in chunks.
_SAMPLE = 65_536
#: For this many of the sampled slots, look up where their bytes are stored.
_SOME = 4096
#: Prefixes of the names of files with rows.
_FILES = ("c.", "open.", PARTIAL)
_NONE = np.empty(0, np.int64)
#: How often a part may be stored elsewhere again: only while a writer overwrites the rows.
_STEPS = 8
#: Number of chunks that a reader unpacks without the compiled loop before it loads the loop.
_WORTH_LOADING = 1024


@dataclass
class Source:
    """A shard, as it was found when the column was opened.

    Args:
        shard: Its number.
        lap: Its lap of the ring.
        addresses: Its memory map.
        chunks: The chunks in it.
        named: Whether the file has its final name.
    """

    shard: int
    lap: int
    addresses: AddressRange | Frame
    chunks: Chunks
    named: bool = False

    def cut(self, lap: int, chunk: int) -> bool:
        """Forget chunks from this one on in this lap, and all of later laps; return whether any remain."""
        if lap <= self.lap < ANY_LAP:
            first = 0 if self.lap > lap else max(0, chunk - self.shard * self.chunks.offsets.size)
            self.chunks = self.chunks._replace(offsets=self.chunks.offsets.copy())
            self.chunks.offsets[first:] = -1
        return bool((self.chunks.offsets >= 0).any())


@dataclass
class Filling:
    """A shard that is being filled, or that does not have its final name yet.

    Args:
        shard: Its number.
        lap: Its lap of the ring.
        file: Its file.
        addresses: Its memory map.
        chunks: The chunks in it.
    """

    shard: int
    lap: int
    file: File
    addresses: AddressRange
    chunks: Chunks

    def add(self, number: int, chunk: bytes, head: int = HEADER_BYTES) -> int:
        """Append a chunk (header and compressed frame); return the offset of its frame, bytes.

        A chunk that the file already has is written again in its place, after a failure: the file has no room
        for two.

        Args:
            number: Its number in the shard.
            chunk: Its bytes.
            head: Length of the bytes before its frame.
        """
        offsets, sizes, end = self.chunks
        there = offsets[number] >= 0 and offsets[number] + sizes[number] == end
        start = int(offsets[number]) if there else end + head
        self.file.write(chunk, start - head)
        offsets[number], sizes[number] = start, len(chunk) - head
        self.chunks = Chunks(offsets, sizes, start - head + len(chunk))
        return start


class PackedPiece(NamedTuple):
    """Consecutive rows of a packed column, as they are stored.

    Args:
        first: Id of the first row.
        rows: The number of rows.
        is_chunk: Whether `data` is a full chunk; otherwise it has the bytes of the rows.
        data: The bytes.
    """

    first: int
    rows: int
    is_chunk: bool
    data: bytes


class PackedRows(Column, AppendedPart):
    """Copy rows out of packed chunks.

    Threads: any number take rows while one thread adds rows.

    Args:
        disk: The disk on which files are accessed.
        folder: The Zarr array's folder.
        entry: The field.
        slots: Number of slots of a ring; None: the column is unbounded.
        packing: How the field is packed.
        write: Whether the files are opened for writing.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        entry: Field,
        slots: int | None,
        packing: Packing,
        *,
        write: bool = True,
    ) -> None:
        super().__init__(entry, folder, slots, entry.row_bytes)
        self.packing = packing
        self.rows = packing.shard
        self._recycled = Recycled()
        self.chunk_bytes = packing.rows * entry.row_bytes
        self._part_shape = entry.shape if packing.parts == 1 else entry.shape[1:]
        #: Length of the bytes before a chunk's frame.
        self.head = HEADER_BYTES + packing.table_bytes
        #: The column that stores some rows of this one; None: all rows are stored here.
        self.partner: PackedRows | None = None
        #: Shards that cannot be read, with the reason.
        self.damaged: dict[int, str] = {}
        #: For each chunk with torn raw rows: the rows as they were found, and flags of the torn ones.
        self._torn: list[tuple[Frame, Array]] = []
        #: Slots whose rows are lost although they should be readable. Only set when there is no writer.
        self._lost = np.empty(0, np.int64)
        self._disk = disk
        shards = 16 if slots is None else -(-slots // packing.shard)
        where = np.zeros(shards * packing.chunks, np.int64)
        self._locations = Locations(
            where, np.zeros_like(where), np.zeros_like(where), {}, 0, 0, self._new_rows()
        )
        self._partial = PartialFile(disk, folder / PARTIAL, packing.rows, entry.row_bytes, write=write)
        self._take_rows: Any = None
        self._take_distances: Any = None
        self._loader: Thread | None = None
        self._unpacked_slowly = 0

    def _set_locations(self, locations: Locations) -> None:
        """Publish a new state of chunks and rows to readers, by one assignment."""
        self._locations = locations

    def _note_lost(self, slots: IntArray) -> None:
        """Make reads of these slots fail: their rows are damaged. Shape `(n,)`."""
        self._lost = slots

    def _new_rows(self) -> Array:
        return np.zeros((self.packing.rows, *self.entry.shape), self.entry.numpy_dtype)

    def warm(self) -> None:
        """Load the compiled loop that takes rows, in the background."""
        # In a forked child, the parent's thread is not alive.
        is_loading = self._loader is not None and self._loader.is_alive()
        if self._take_rows is None and not is_loading:
            self._loader = load_in_background(self._load)

    def _load(self) -> None:
        with compiling:
            from expstore.kernels.blosc_decode import take_distances, take_rows
        self._take_distances = take_distances
        self._take_rows = take_rows if self.packing.means.is_blosc else None

    # -- finding chunks --------------------------------------------------------------------------

    def place_behind(self, last: int) -> tuple[int, int]:
        """Return the lap of the ring and the slot of the row after this one."""
        return (0, last) if self.slots is None else divmod(last, self.slots)

    def shard_path(self, number: int) -> Path:
        """Return the path of a finished shard."""
        return self.folder / shard_name(number, len(self.entry.shape), ".")

    def open_path(self, number: int, lap: int) -> Path:
        """Return the path of a shard while it is filled, in its lap of the ring."""
        return self.folder / f"open.{number}.{lap}"

    @property
    def _bound(self) -> int:
        """Maximum length of a shard file, bytes."""
        chunk = HEADER_BYTES + self.packing.most_bytes(self.chunk_bytes)
        return self.packing.chunks * chunk + index_bytes(self.packing.chunks, table=self.packing.table_bytes)

    def _map(self, file: File, size: int, *, may_shrink: bool = False) -> AddressRange:
        addresses = AddressRange(size)
        addresses.attach(file, at=0, size=size, may_shrink=may_shrink)
        return addresses

    def _grow(self, shard: int) -> None:
        """Make room for the chunk addresses of a shard."""
        locations, needed = self._locations, (shard + 1) * self.packing.chunks
        if locations.where.size < needed:
            where = np.zeros(max(needed, 2 * locations.where.size), np.int64)
            sizes, laps, known = np.zeros_like(where), np.zeros_like(where), locations.where.size
            where[:known], sizes[:known], laps[:known] = locations.where, locations.sizes, locations.laps
            self._locations = locations._replace(where=where, sizes=sizes, laps=laps)

    def _show(self, shard: int, lap: int, addresses: AddressRange | Frame, chunks: Chunks) -> None:
        """Make the chunks of a file readable instead of older ones."""
        self._grow(shard)
        locations = self._locations
        held = locations.maps.get(shard, ())
        self._locations = locations = locations._replace(maps=locations.maps | {shard: (*held, addresses)})
        there = np.flatnonzero(chunks.offsets >= 0)
        places = shard * self.packing.chunks + there
        locations.sizes[places] = chunks.sizes[there] - 4
        locations.laps[places] = lap
        locations.where[places] = addresses.address + chunks.offsets[there]

    def _leave_former(self, source: Source | Filling) -> None:
        """Forget the addresses of the previous lap's rows, which a complete shard has replaced."""
        locations, first = self._locations, source.shard * self.packing.chunks
        missing = first + np.flatnonzero(source.chunks.offsets < 0)
        locations.where[missing[missing < locations.where.size]] = 0
        self._locations = locations._replace(maps=locations.maps | {source.shard: (source.addresses,)})

    def _show_all(self, sources: Iterable[Source | Filling]) -> None:
        """Make only these chunks readable; of two in the same place, the one of the later lap."""
        size = self._locations.where.size
        self._locations = self._locations._replace(
            where=np.zeros(size, np.int64), sizes=np.zeros(size, np.int64), maps={}, held=0
        )
        # Raw rows come first: packed rows of the same lap replace them.
        for source in sorted(sources, key=lambda source: source.lap):
            self._show(source.shard, source.lap, source.addresses, source.chunks)

    def _show_up_to(self, lap: int, shard: int) -> None:
        """Make only chunks up to this shard readable. Called when a column is opened.

        Chunks of later laps were never committed, and would hide older rows in the same slots.
        """
        self._show_all(
            one for one in self._list_sources() if one.lap == ANY_LAP or (one.lap, one.shard) <= (lap, shard)
        )

    def paths(self) -> list[Path]:
        """Return the files with rows."""
        return [self.folder / name for name in self._disk.names(self.folder) if name.startswith(_FILES)]

    def shards(self) -> Iterator[tuple[str, int, int]]:
        """Yield (kind, number, lap) per shard: kind "c" with lap -1 if it has its final name, else "open"."""
        for name in self._disk.names(self.folder):
            kind, *numbers = name.split(".")
            if kind in ("c", "open"):
                yield kind, int(numbers[0]), int(numbers[1]) if kind == "open" else -1

    def _read_shard(self, shard: int) -> Source | None:
        """Read a shard that has its final name; return None if it is missing or damaged."""
        path = self.shard_path(shard)
        if not self._disk.exists(path):
            return None
        file = self._disk.open(path, write=False)
        try:
            table = self.packing.table_bytes
            chunks = read_index(file, self.packing.chunks, table=table)
            lap = find_lap(file, chunks, table=table)
            return Source(shard, lap, self._map(file, file.size()), chunks, named=True)
        except CorruptionError as exc:
            self.damaged[shard] = exc.message
            return None
        finally:
            file.close()

    def _areas(self) -> list[Source]:
        """Return the chunks that exist only as raw rows, packed in memory.

        Of a row that exists twice the newer copy is used. The newer copy may be torn, while the older one is
        covered by a checkpoint.
        """
        rows: dict[tuple[int, int], tuple[Array, Array]] = {}
        for area in self._partial.areas():
            fresh = np.zeros_like(area.rows), np.ones_like(area.whole)
            held, lost = rows.setdefault((area.lap, area.chunk), fresh)
            held[area.whole] = area.rows[area.whole]
            lost &= ~area.whole
        found = []
        self._torn = []
        for (lap, chunk), (data, lost) in rows.items():
            shard, number = divmod(chunk, self.packing.chunks)
            frame = Frame(self.packing.pack(data))
            if lost.any():
                self._torn.append((frame, lost))
            chunks = no_chunks(self.packing.chunks)
            table = self.packing.table_bytes
            chunks.offsets[number], chunks.sizes[number] = table, frame.data.size - table
            found.append(Source(shard, lap, frame, chunks))
        return found

    def as_now(self) -> PackedRows:
        """Return the rows as they are at this moment. Later writes do not change them.

        No row may be added during the call.
        """
        now = PackedRows.__new__(PackedRows)
        vars(now).update(vars(self))
        locations = self._locations
        now.damaged = dict(self.damaged)
        now._locations = locations._replace(
            where=locations.where.copy(), sizes=locations.sizes.copy(), rows=locations.rows.copy()
        )
        return now

    def pieces(self, first_id: int, count: int) -> Iterator[PackedPiece]:
        """Yield a run of rows as they are stored: full chunks as their bytes, and the rows around them."""
        each = self.packing.rows
        for slot, lap, n in self._pieces(first_id, count):
            at = slot
            while at < slot + n:
                some, first = min(each - at % each, slot + n - at), first_id
                chunk = self._copy_chunk(at // each, lap) if some == each else None
                data = self.part(at, some).tobytes() if chunk is None else chunk
                yield PackedPiece(first, some, chunk is not None, data)
                at, first_id = at + some, first_id + some

    def _copy_chunk(self, name: int, lap: int) -> bytes | None:
        """Return the bytes of a chunk, from its table to its checksum; None if it is not packed."""
        locations, table = self._locations, self.packing.table_bytes
        if name >= locations.where.size or locations.where[name] <= 0 or locations.laps[name] != lap:
            return None
        start, size = int(locations.where[name]) - table, table + int(locations.sizes[name]) + 4
        return ctypes.string_at(start, size)

    def find_packed_chunks(self) -> tuple[IntArray, IntArray, int]:
        """Return the packed chunks in the files, their laps of the ring, and the bytes that they take."""
        locations, table = self._locations, self.packing.table_bytes
        maps = [held for several in locations.maps.values() for held in several]
        raw = [frame.address + table for frame in maps if isinstance(frame, Frame)]
        names = np.flatnonzero((locations.where > 0) & ~np.isin(locations.where, raw))
        # A chunk's checksum is not part of its frame; the size -4 stands for a chunk that does not exist.
        used = (
            int((locations.sizes[names] + 4).sum())
            + names.size * self.head
            + index_bytes(names.size, table=table)
        )
        return names, locations.laps[names], used

    def measure_compression(self, ids: Callable[[IntArray], IntArray]) -> tuple[float | None, IntArray]:
        """Measure how rows are compressed, over the chunks in the files, whatever their lap.

        Args:
            ids: Returns the ids that slots hold, 0 where none was written.

        Returns:
            The compression ratio (raw bytes per stored byte), None if there are no chunks; and the slots of
            the rows in the chunks, or of a sample of them. A chunk can have gaps, where rows were skipped
            because they would never have been readable.
        """
        chunks, laps, used = self.find_packed_chunks()
        if not chunks.size:
            return None, np.empty(0, np.int64)
        each = self.packing.rows
        picked = np.arange(chunks.size * each)
        if picked.size > _SAMPLE:
            picked = np.unique(np.random.default_rng(0).integers(0, picked.size, _SAMPLE))
        slots = chunks[picked // each] * each + picked % each
        held = slots
        if self.slots is not None:
            known = ids(slots) - 1
            lap = laps[picked // each]
            there = (known >= 0) & (known % self.slots == slots)
            held = slots[there & ((known // self.slots == lap) | (lap == ANY_LAP))]
        raw = chunks.size * self.chunk_bytes * held.size / picked.size
        return (round(raw / used, 2) or None), held

    @property
    def locations(self) -> Locations:
        """Where rows can be found now."""
        return self._locations

    # -- reading ---------------------------------------------------------------------------------

    def gather(self, slots: IntArray) -> Array:
        """Copy rows out. `slots` has shape `(n,)`, the result `(n, *row shape)`.

        Raises:
            CorruptionError: A row is in a damaged chunk.
        """
        out = self._recycled.empty((slots.size, *self.entry.shape), self.entry.numpy_dtype)
        parts, view = self._parts_of(slots), out.reshape(-1, *self._part_shape)
        self._gather_rest(*self._gather_own(self._aim(parts), np.arange(parts.size), view), view)
        return out

    def gather_pair(self, slots: IntArray) -> tuple[Array, Array]:
        """Copy rows out of this column and of its partner; each chunk is unpacked once.

        Args:
            slots: Slots of the rows. Shape `(n,)`.

        Returns:
            Rows of this column and rows of the partner. Shapes `(n, *row shape)`.

        Raises:
            CorruptionError: A row is in a damaged chunk.
        """
        count = slots.size
        both = self._recycled.empty((2 * count, *self.entry.shape), self.entry.numpy_dtype)
        parts, view = self._parts_of(slots), both.reshape(-1, *self._part_shape)
        goals, places = self._gather_own(parts, np.arange(parts.size), view)
        partner = self._lender()
        aims = np.concatenate([partner._aim(parts), places])
        goals = np.append(np.arange(parts.size, 2 * parts.size), goals)
        partner._gather_rest(*partner._gather_own(aims, goals, view), view)
        return both[:count], both[count:]

    def _parts_of(self, slots: IntArray) -> IntArray:
        """Return the numbers of the parts of rows. Shape `(n * parts,)`."""
        parts = self.packing.parts
        return slots if parts == 1 else (slots[:, None] * parts + np.arange(parts)).reshape(-1)

    def _aim(self, parts: IntArray) -> IntArray:
        """Return where parts are stored that this column may store elsewhere in itself, so that each chunk is
        unpacked once. Shape `(n,)`.
        """
        return self._wrap(parts - self._distances(parts)) if self.packing.within else parts

    def _wrap(self, parts: IntArray) -> IntArray:
        return parts if self.slots is None else parts % (self.slots * self.packing.parts)

    def _gather_rest(self, goals: IntArray, places: IntArray, out: Array) -> None:
        """Copy the parts that `_gather_own` did not find in this column."""
        column = self
        for _ in range(_STEPS):
            if not places.size:
                return
            column = column._lender()
            goals, places = column._gather_own(places, goals, out)
        if places.size:
            raise CorruptionError(f"rows of {self.folder} refer to rows that are not stored")

    def _lender(self) -> PackedRows:
        """Return the column that stores some rows of this one."""
        if self.packing.within:
            return self
        if self.partner is None:
            raise CorruptionError(f"rows of {self.folder} are in a column that cannot be read")
        return self.partner

    def _gather_own(self, parts: IntArray, goals: IntArray, out: Array) -> tuple[IntArray, IntArray]:
        """Copy the parts that are stored here to their places in the result.

        Args:
            parts: Numbers of the parts, see `_parts_of`. Shape `(n,)`.
            goals: The position of each part in the result. Shape `(n,)`.
            out: The result. Shape `(m, *part shape)`.

        Returns:
            For the other parts: their goals, and their numbers in the column that stores them.
        """
        each = self.packing.parts
        if self._lost.size and np.isin(parts // each, self._lost).any():
            raise CorruptionError(f"rows of {self._partial.path} are damaged")
        locations = self._locations  # read before the chunks: a chunk that becomes full appears there first
        chunks, inside = np.divmod(parts, self.packing.chunk_parts)
        wanted = np.arange(parts.size)
        if locations.held:
            here = (chunks == locations.base // self.packing.rows) & (inside < locations.held * each)
            if here.any():
                out[goals[here]] = locations.rows.reshape(-1, *self._part_shape)[inside[here]]
                wanted = np.flatnonzero(~here)
        if not wanted.size:
            return _NONE, _NONE
        order = wanted[np.argsort(chunks[wanted], kind="stable")]
        distances = self._gather_packed(chunks[order], inside[order], goals[order], out)
        if distances is None:
            return _NONE, _NONE
        away = order[distances > 0]
        return goals[away], self._wrap(parts[away] - distances[distances > 0])

    def _gather_packed(
        self, chunks: IntArray, inside: IntArray, goals: IntArray, out: Array
    ) -> IntArray | None:
        """Copy parts of chunks, which are in ascending order, to their places in the result.

        Returns:
            For each part, how many parts before it the same bytes are stored, here or in the partner; 0: the
            part is stored here. None: all parts are stored here. Shape `(n,)`.
        """
        new = np.ones(chunks.size, bool)
        np.not_equal(chunks[1:], chunks[:-1], out=new[1:])
        names, which = chunks[new], np.cumsum(new) - 1
        former: Any = None
        while True:
            locations, where, sizes = self._find(names)
            there = where > 0
            rows = there[which]
            if not there.all():
                self._explain(names[~there], where[~there])
                out[goals[~rows]] = 0
            bad, distances = -1, None
            if self.packing.shares:
                bad, distances = self._read_tables(where, which, inside)
                rows &= distances == 0
            if bad < 0 and rows.all():
                bad = self._unpack(where, sizes, which, inside, goals, out)
            elif bad < 0 and rows.any():
                frames, own = np.unique(which[rows], return_inverse=True)
                bad = self._unpack(where[frames], sizes[frames], own, inside[rows], goals[rows], out)
                bad = bad if bad < 0 else int(frames[bad])
            if bad < 0:
                return distances
            if former is not None and (former == where).all():
                raise CorruptionError(f"chunk {names[bad]} of {self.folder} is damaged")
            former = where  # a new chunk may have replaced the bad one meanwhile: read that one
            del locations

    def _find(self, names: IntArray) -> tuple[Locations, IntArray, IntArray]:
        """Return the addresses of chunks, and an object that keeps them valid."""
        while True:
            locations = self._locations
            known = np.minimum(names, locations.where.size - 1)
            where, sizes = locations.where[known], locations.sizes[known]
            where[known != names] = 0
            if locations.maps is self._locations.maps and locations.where is self._locations.where:
                return locations, where, sizes

    def _explain(self, names: IntArray, where: IntArray) -> None:
        """Raise CorruptionError if chunks are missing or damaged; ignore chunks that were never written."""
        for name, address in zip(names.tolist(), where.tolist(), strict=True):
            found = self.damaged.get(name // self.packing.chunks)
            if found is not None:
                raise CorruptionError(f"rows of {self.folder} cannot be read: {found}")
            if address < 0:
                raise CorruptionError(f"chunk {name} of {self.folder} is missing")

    def _list_sources(self) -> list[Source | Filling]:
        """Return all files and raw chunks that were found when the column was opened."""
        raise NotImplementedError

    def _find_lost_slots(self, first: int, stop: int, lap: int) -> IntArray:
        """Return the slots of a run without a whole row of this lap, in ascending order.

        Only correct while a store is opened, before rows are added.
        """
        each, locations, chunks = self.packing.rows, self._locations, self.packing.chunks
        low, high = first // each, -(-stop // each)
        there = np.zeros(max(high, locations.where.size), bool)
        raw: dict[int, Array] = {}
        for source in self._list_sources():
            if source.lap not in (lap, ANY_LAP):
                continue
            places = source.shard * chunks + np.flatnonzero(source.chunks.offsets >= 0)
            if isinstance(source.addresses, Frame):
                gone = [lost for frame, lost in self._torn if frame is source.addresses]
                raw |= dict.fromkeys(places.tolist(), gone[0] if gone else np.zeros(each, bool))
            else:
                there[places] = True
        missing = low + np.flatnonzero(~there[low:high])
        parts = [
            name * each + np.flatnonzero(raw.get(name, np.ones(each, bool))) for name in missing.tolist()
        ]
        slots = np.concatenate([np.zeros(0, np.int64), *parts])
        held = (slots >= locations.base) & (slots < locations.base + locations.held)
        lost: IntArray = slots[(slots >= first) & (slots < stop) & ~held]
        return lost

    def require_rows(self, first_id: int, count: int) -> None:
        """Raise CorruptionError if rows of a readable run are missing, here or where they are stored."""
        self._require_own(first_id, count)
        if count and (self.packing.within or self.partner is not None):
            self._lender()._require_own(*self._older(first_id, count))

    def _require_own(self, first_id: int, count: int) -> None:
        for slot, lap, n in self._pieces(first_id, count):
            lost = self._find_lost_slots(slot, slot + n, lap)
            if lost.size:
                self._explain(lost[:1] // self.packing.rows, np.full(1, -1))

    def _pieces(self, first_id: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Split a run of rows at the ring's end: (first slot, lap, number of rows)."""
        for slot, offset, n in cut_run(first_id, count, self.slots):
            if n:
                yield slot, self.place_behind(first_id + offset - 1)[0], n

    def _older(self, first_id: int, count: int) -> tuple[int, int]:
        """Return the run of older rows that store the bytes of this run: first id, number of rows."""
        ids = np.arange(first_id, first_id + min(count, tuning.PACKED_LOOKBACK_ROWS[1]))
        parts = self._parts_of(ids)
        lent = (parts - self.distances(ids - 1 if self.slots is None else (ids - 1) % self.slots)) // (
            self.packing.parts
        )
        oldest = int(lent.min())
        return oldest, max(0, int(lent[lent < first_id].max(initial=oldest - 1)) + 1 - oldest)

    def distances(self, slots: IntArray) -> IntArray:
        """Return how many parts before each part of rows the same bytes are stored, here or in the partner.

        Args:
            slots: Slots. Shape `(n,)`.

        Returns:
            0: the part is stored here. Shape `(n * parts,)`.

        Raises:
            CorruptionError: A table is damaged.
        """
        return self._distances(self._parts_of(slots))

    def _distances(self, parts: IntArray) -> IntArray:
        """Do the work of `distances` for parts, by their numbers."""
        each = self.packing.chunk_parts
        if not self.packing.shares:
            return np.zeros(parts.size, np.int64)
        former: Any = None
        while True:
            names, inside = np.divmod(parts, each)
            locations, where, _ = self._find(names)
            where = np.maximum(where, 0)
            bad, found = self._read_tables(where, np.arange(parts.size), inside)
            if bad < 0:
                break
            if former is not None and (former == where).all():
                raise CorruptionError(f"chunk {names[bad]} of {self.folder} is damaged")
            former = where
        # Rows of the chunk that is not full are stored here. The table is of the previous lap of a ring.
        base, held = (number * self.packing.parts for number in (locations.base, locations.held))
        found[(parts >= base) & (parts < base + held)] = 0
        return found

    def lacks(self, first_id: int, count: int) -> bool:
        """Return whether rows of a run are missing or damaged. Called when a store is opened.

        A matching checksum alone is not enough: an older row in the same slots may be byte-identical.
        """
        return any(self._lacks(slot, n, lap) for slot, lap, n in self._pieces(first_id, count))

    def _lacks(self, slot: int, count: int, lap: int) -> bool:
        each, locations = self.packing.rows, self._locations
        low, high = slot // each, -(-(slot + count) // each)
        if high <= locations.where.size:
            laps, where = locations.laps[low:high], locations.where[low:high]
            torn = [frame.address + self.packing.table_bytes for frame, _ in self._torn]
            if (((laps == lap) | (laps == ANY_LAP)) & (where > 0) & ~np.isin(where, torn)).all():
                return False
        return bool(self._find_lost_slots(slot, slot + count, lap).size)

    def _read_tables(self, where: IntArray, which: IntArray, inside: IntArray) -> tuple[int, IntArray]:
        """Return the number of the first damaged table, -1 for none, and the distances in the tables."""
        out = np.zeros(which.size, np.int64)
        if self._take_distances is not None:
            bad = self._take_distances(where, which, inside, self.packing.chunk_parts, out)
            return int(bad), out
        size = self.packing.table_bytes
        for number, address in enumerate(where.tolist()):
            mine = which == number
            if address > 0:
                try:
                    out[mine] = self.packing.unpack_table(ctypes.string_at(address - size, size))[
                        inside[mine]
                    ]
                except CorruptionError:
                    return number, out
        return -1, out

    def _unpack(
        self, where: IntArray, sizes: IntArray, which: IntArray, inside: IntArray, goals: IntArray, out: Array
    ) -> int:
        scratch = np.empty(self.chunk_bytes, np.uint8)
        if self._take_rows is None:
            # Loading the loop takes about a second: a reader does so once it pays off, a writer at once.
            self._unpacked_slowly += len(where)
            if self._unpacked_slowly >= _WORTH_LOADING and self.packing.means.is_blosc:
                self.warm()
            return self._unpack_slowly(where, sizes, which, self.packing.places_in_frame(inside), goals, out)
        inside = self.packing.places_in_frame(inside)
        told = where, sizes, which, inside, goals, self.row_bytes // self.packing.parts, self.chunk_bytes
        return int(self._take_rows(*told, address_of(out), address_of(scratch)))

    def _unpack_slowly(
        self, where: IntArray, sizes: IntArray, which: IntArray, inside: IntArray, goals: IntArray, out: Array
    ) -> int:
        """Unpack by numcodecs, frame by frame: for other codecs, and until the compiled loop is loaded."""
        for number, (address, size) in enumerate(zip(where.tolist(), sizes.tolist(), strict=True)):
            mine = which == number
            if not mine.any():
                continue
            if size < 0:
                return number
            chunk = ctypes.string_at(address, size + 4)
            try:
                data = self.packing.unpack(chunk, self.chunk_bytes)
            except CorruptionError:
                return number
            out[goals[mine]] = data.view(self.entry.numpy_dtype).reshape(-1, *self._part_shape)[inside[mine]]
        return -1

    def part(self, slot: int, count: int) -> Array:
        """Copy a run of slots out."""
        return self.gather(np.arange(slot, slot + count))

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Raise SchemaError: packed rows are immutable."""
        raise SchemaError(
            f"field {key_name(self.entry.key)!r} is packed: its rows cannot be changed",
            hint="create the store with layout='flat' for the field",
        )

    # -- sums and space --------------------------------------------------------------------------

    def extend_checksum(self, crc: int, first_id: int, count: int) -> int | None:
        """Extend a crc32c by a run of rows."""
        step = max(1, REWRITE_BYTES // self.row_bytes)
        for slot, _, n in cut_run(first_id, count, self.slots):
            for start in range(slot, slot + n, step):
                rows = self.part(start, min(step, slot + n - start))
                crc = google_crc32c.extend(crc, rows.reshape(-1).view(np.uint8))
        return crc

    def sum_run(self, slot: int, count: int) -> int:
        """Return 0: chunks have checksums of their own."""
        return 0

    def least_shards(self, rows: int) -> int:
        """Return the least number of shards of `rows` rows, for zarr.json."""
        # A shard begins when its first chunk is full; until the shape has grown, it is an open one.
        named = (number + (kind != "open") for kind, number, _ in self.shards())
        return min(-(-rows // self.rows), max(named, default=0))

    def size(self, held: int, ids: Callable[[IntArray], IntArray]) -> FieldSize:
        """Return how the field is stored, by the chunks that were found; see `Column`."""
        used, packing = self._disk.measure_space(self.folder), self.packing
        ratio, shared = None, None
        with contextlib.suppress(StorageError):  # damaged, or a file that the writer is renaming
            ratio, slots = self.measure_compression(ids)
            if packing.shares and slots.size:
                sample = np.sort(slots[:: -(-slots.size // _SOME)])
                shared = float((self.distances(sample) > 0).mean())
        row_bytes = self.row_bytes / (ratio or 1)
        return FieldSize("packed", packing.codec, packing.rows, used, ratio, shared, row_bytes)

    @property
    def mean_bytes(self) -> int:
        """The size of a row in memory, bytes."""
        return self.row_bytes

    def measure_row_bytes(self, rows: int) -> float:
        """Return the average disk space of a row, bytes, if there are `rows` rows."""
        return self._disk.measure_space(self.folder) / max(1, rows)

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        self._partial.close()


def holds_chunks(disk: Disk, folder: Path) -> bool:
    """Return whether the folder of an array has files of a packed column."""
    return disk.exists(folder) and any(name.startswith(_FILES) for name in disk.names(folder))
