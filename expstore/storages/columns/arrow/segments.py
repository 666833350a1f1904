"""Variable-length rows: Arrow IPC streams of batches, found by id and read through memory maps.

Base class of the writer and the reader of segments. A segment is a file named by its first id. An opening
reads only the headers of its batches; values are read when rows are taken. This module changes no file.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from expstore.core import tuning
from expstore.core.values import Array, IntArray, key_name
from expstore.disk.files import Disk, File
from expstore.disk.mapped_files import AddressRange
from expstore.errors import CorruptionError, SchemaError
from expstore.kernels.loader import compiling, load_in_background
from expstore.schema.arrow_sizes import row_sizes
from expstore.schema.arrow_types import to_type
from expstore.schema.continued import parent_of
from expstore.schema.schema import Field
from expstore.storages.columns.arrow.gather import Gather, Node, Plan, unpack
from expstore.storages.columns.arrow.ipc import END, Header, crc_of, read_header
from expstore.storages.columns.arrow.pieces import (
    Pieces,
    join_lists,
    pack_pieces,
    split_elements,
    to_stored_type,
)
from expstore.storages.columns.column import AppendedPart, add_batches

SUFFIX = ".arrows"
#: Copies bytes of a segment: offset, length.
Read = Callable[[int, int], bytes]
#: Bytes read at a time when looking for a header.
_HEADER_BYTES = 2048
#: Bytes read at a time when looking for the next message after a damaged one.
_SEARCH_BYTES = 1 << 20
#: Offset of the first batch of a file in which nothing can be read.
_NOWHERE = 1 << 62
#: Length of the prefix of each batch in the journal.
_LENGTH_BYTES = 4


@dataclass(slots=True)
class Segment:
    """The batches of one segment file.

    Args:
        path: The file.
        addresses: Its memory map, or an array in memory with the same bytes.
        headers: Headers of its batches, in the order of their ids.
        offsets: Offset of each batch in the file, bytes.
        end: Offset of the end of the last batch, bytes.
        sealed: Whether the stream has its end mark.
        file: The file, opened for writing; None: it is only read.
    """

    path: Path
    addresses: AddressRange | Array
    headers: list[Header] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0
    sealed: bool = False
    file: File | None = None

    @property
    def first(self) -> int:
        """Id of the first row; 0 if there are no rows."""
        return self.headers[0].first if self.headers else 0

    @property
    def last(self) -> int:
        """Id of the last row; 0 if there are no rows."""
        return self.headers[-1].last if self.headers else 0

    @property
    def size(self) -> int:
        """Length of the file up to its last written batch, bytes."""
        return self.end + (len(END) if self.sealed else 0)

    @property
    def address(self) -> int:
        """Address of the segment in memory."""
        place = self.addresses
        return place.address if isinstance(place, AddressRange) else int(place.ctypes.data)

    def add(self, header: Header, at: int) -> None:
        """Record another batch at the end of the segment."""
        self.headers.append(header)
        self.offsets.append(at)
        self.end = at + header.size

    def is_sound(self, number: int, read: Read) -> bool:
        """Return whether a batch matches its checksum; `read` is what `Segments.reading` yields."""
        header = self.headers[number]
        data = read(self.offsets[number], header.size)
        found = read_header(data)
        return found is not None and crc_of(data, found) == found.crc == header.crc

    def read(self, start: int, size: int) -> bytes:
        """Copy bytes out of the map."""
        return ctypes.string_at(self.address + start, size)


class Locations(NamedTuple):
    """Where batches can be read now. Entries after `held` may be filled in; earlier ones never change.

    Args:
        held: Number of batches.
        firsts: Id of the first row of each batch. Shape `(m,)`, like the next seven; m is at least `held`.
        lasts: Id of the last row of each batch.
        at: Address of the batch's message.
        sizes: Length of the message, bytes.
        crcs: The crc32c of the message.
        crc_at: Offset of the crc32c in the message.
        compressed: Whether the batch's buffers are compressed.
        checked: Whether the checksum was verified.
        where: Address of each buffer, compressed or not; 0 for an empty one. Shape `(m, buffers)`.
        bytes: Length of each buffer. Shape `(m, buffers)`.
        lengths: Number of values of each node. Shape `(m, nodes)`.
        maps: Objects that keep the addresses valid.
    """

    held: int
    firsts: IntArray
    lasts: IntArray
    at: IntArray
    sizes: IntArray
    crcs: IntArray
    crc_at: IntArray
    compressed: Array
    checked: Array
    where: IntArray
    bytes: IntArray
    lengths: IntArray
    maps: tuple[Any, ...]


class _Woven(NamedTuple):
    """The stored elements that make up whole values.

    Args:
        pieces: The pieces of the rows.
        rows: Number of the row of each run of elements, ascending. Shape `(r,)`.
        lengths: Number of elements of each run. Shape `(r,)`.
        copy: Returns the elements of all runs.
    """

    pieces: Pieces
    rows: IntArray
    lengths: IntArray
    copy: Callable[[], pa.Array]


class Segments(AppendedPart):
    """Find and copy rows of the variable-length fields.

    Threads: any number take rows while one adds rows. Crashes: this class changes no file.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `segments/`.
        fields: The variable-length fields, in the order of the schema.
        slots: Number of slots of a ring; None: the store is unbounded.
        compression: How the store's settings compress rows.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        compression: str | None = None,
    ) -> None:
        self._disk, self.folder, self.slots, self.codec = disk, folder, slots, compression
        self.fields: Sequence[Field] = tuple(fields)
        #: The types of the fields' values, and of their rows in segments.
        self.kinds = tuple(to_type(entry.arrow) for entry in fields)
        #: The key of the field that names parents, () for none, by the number of each continued field.
        self.parents = {
            number: key for number, entry in enumerate(fields) if (key := parent_of(entry.arrow)) is not None
        }
        self.stored_kinds = tuple(
            to_stored_type(kind) if number in self.parents else kind for number, kind in enumerate(self.kinds)
        )
        #: Ids of rows whose values had their checksums, by the number of each continued field.
        self._sound = {number: np.zeros(tuning.CONTINUED_SOUND, np.int64) for number in self.parents}
        names = [key_name(entry.key) for entry in fields]
        self.schema = pa.schema(list(zip(names, self.stored_kinds, strict=True)))
        self._whole_schema = pa.schema(list(zip(names, self.kinds, strict=True)))
        #: The first bytes of every segment.
        self.head = self.schema.serialize().to_pybytes()
        self.plan = Plan(self.stored_kinds)
        self.segments: list[Segment] = []
        #: The newest id covered here. Rows up to it may be missing, for example ids that `empty` skipped.
        self.top = 0
        #: Held while segments are added or removed.
        self.changing = threading.RLock()
        self._loops: Any = None
        self._unpacking: Any = None
        self._locations = self._room(16)

    def _set_top(self, last: int) -> None:
        """Set the newest id."""
        self.top = last

    def warm(self) -> None:
        """Load the compiled loops in the background."""
        if self._loops is None:
            load_in_background(self._load)

    def _load(self) -> None:
        with compiling:
            from expstore.kernels import arrow_decode, gather_runs
        self._loops = gather_runs
        self._unpacking = arrow_decode

    # -- finding rows ----------------------------------------------------------------------------

    @abstractmethod
    def have_left(self, ids: IntArray) -> Array:
        """Return which rows were removed from the store, so that they may be missing here. Shapes `(n,)`."""

    def require_rows(self, first_id: int, count: int) -> None:
        """Raise CorruptionError if rows of a readable run are missing."""
        for missing, rows in self.find_missing(first_id, count) if count else ():
            raise CorruptionError(f"rows {missing} to {missing + rows - 1} are missing in {self.folder}")

    def paths(self) -> list[Path]:
        """Return the segment files, in the order of their ids."""
        names = [name for name in self._disk.names(self.folder) if name.endswith(SUFFIX)]
        return [self.folder / name for name in names]

    def path_of(self, first_id: int) -> Path:
        """Return the path of the segment that begins with a row."""
        return self.folder / f"{first_id:019d}{SUFFIX}"

    def scan(self, path: Path, file: File, *, size: int, segment: Segment | None = None) -> Segment:
        """Find the batches of a file that are not known yet.

        Args:
            path: The file's path.
            file: The open file.
            size: Length of the file to map, bytes.
            segment: The batches known so far; None: none are.
        """
        if segment is None:
            addresses = AddressRange(max(1, size))
            if size:
                # A writer may seal the segment meanwhile, and cut off the unused space after its rows.
                addresses.attach(file, at=0, size=size, may_shrink=True)
            segment = Segment(path, addresses, end=self._find_begin(file))
        at = segment.end
        while not segment.sealed and at < size:
            header = self._header(file, at, size)
            if header is None:
                segment.sealed = file.read(at, len(END)) == END and at + len(END) == file.size()
                at = size if segment.sealed else self._next_message(file, at, size)
                continue
            if segment.headers and header.first <= segment.last:
                break  # left over from an earlier opening
            segment.add(header, at)
            at = segment.end
        return segment

    def _next_message(self, file: File, at: int, size: int) -> int:
        """Return where the next message may begin after a damaged one; `size` if none is found.

        In a sealed segment all bytes up to the end mark are batches; in others zeros follow the last batch.
        """
        if file.size() > size or file.read(size - len(END), len(END)) != END:
            return size
        at += 8
        while at < size:
            data = file.read(at, _SEARCH_BYTES)
            words = np.frombuffer(data[: len(data) // 8 * 8], "<u4")[::2]
            for place in np.flatnonzero(words == 0xFFFFFFFF).tolist():
                if self._header(file, at + 8 * place, size) is not None:
                    return at + 8 * place
            at += _SEARCH_BYTES
        return size

    def _find_begin(self, file: File) -> int:
        """Return the offset of a file's first batch; one after its end if the schema before it is damaged."""
        size = len(self.head)
        head = file.read(0, size)
        if head == self.head:
            return size
        try:  # another version of Arrow may write the same schema in other bytes
            schema = pa.ipc.read_schema(pa.py_buffer(head))
        except (pa.ArrowException, OSError, ValueError):  # the errors that a damaged message can cause
            return _NOWHERE
        is_whole = 8 + int.from_bytes(head[4:8], "little") == size
        return size if is_whole and schema.equals(self.schema, check_metadata=True) else _NOWHERE

    def _header(self, file: File, at: int, size: int) -> Header | None:
        """Return the header of the batch at `at`; None if there is no whole batch that fits the fields."""
        plan = self.plan
        data = file.read(at, _HEADER_BYTES)
        wanted = 8 + int.from_bytes(data[4:8], "little")
        if len(data) == _HEADER_BYTES < wanted <= size - at:
            data = file.read(at, wanted)
        header = read_header(data)
        if header is None or at + header.size > size:
            return None
        body = header.size - header.body
        if header.compressed:
            fits = len(header.lengths) == plan.nodes and len(header.buffers) == plan.buffers
        else:
            fits = plan.fits(header.rows, header.lengths, header.buffers, body)
        return header if fits else None

    # -- the readable batches --------------------------------------------------------------------

    def _room(self, size: int) -> Locations:
        ints = [np.zeros(size, np.int64) for _ in range(6)]
        wide = [np.zeros((size, self.plan.buffers), np.int64) for _ in range(2)]
        flags = [np.zeros(size, bool) for _ in range(2)]
        lengths = np.zeros((size, self.plan.nodes), np.int64)
        return Locations._make([0, *ints, *flags, *wide, lengths, ()])

    def show_all(self, segments: Sequence[Segment], *, top: int | None = None) -> None:
        """Make the batches of these segments readable, and no others.

        Args:
            segments: The segments, in the order of their ids.
            top: The newest id covered; None: the id of the last row, or the present value if it is newer.
        """
        self.segments = list(segments)
        locations = self._room(max(16, 2 * sum(len(segment.headers) for segment in segments)))
        locations = locations._replace(maps=tuple(segment.addresses for segment in segments))
        for segment in segments:
            locations = self._put(locations, segment, segment.headers, segment.offsets)
        self._locations = locations
        # Other threads find the ids of a ring's slots by `top`, so it must never have a value in between.
        self.top = max(self.top, *(segment.last for segment in segments), 0) if top is None else top

    def replace(self, first: int, count: int, by: Sequence[Segment]) -> None:
        """Replace the batches of some segments by those of others. No row may be read meanwhile.

        Args:
            first: Number of the first segment to replace.
            count: How many segments to replace.
            by: The segments in their place.
        """
        locations, kept = self._locations, self.segments
        low = sum(len(segment.headers) for segment in kept[:first])
        high = low + sum(len(segment.headers) for segment in kept[first : first + count])
        middle = self._room(max(1, sum(len(segment.headers) for segment in by)))
        for segment in by:
            middle = self._put(middle, segment, segment.headers, segment.offsets)
        parts = [
            np.concatenate([old[:low], new[: middle.held], old[high : locations.held]])
            for old, new in zip(locations[1:-1], middle[1:-1], strict=True)
        ]
        self.segments = [*kept[:first], *by, *kept[first + count :]]
        maps = tuple(segment.addresses for segment in self.segments)
        self._locations = Locations._make([locations.held - (high - low) + middle.held, *parts, maps])

    def show(self, segment: Segment, headers: Sequence[Header], offsets: Sequence[int]) -> None:
        """Make more batches of the last segment readable."""
        locations = self._locations
        if locations.held + len(headers) > locations.firsts.size:
            longer = self._room(2 * (locations.held + len(headers)))
            for old, new in zip(locations[1:-1], longer[1:-1], strict=True):
                new[: locations.held] = old[: locations.held]
            locations = longer._replace(held=locations.held, maps=locations.maps)
        if not any(segment.addresses is known for known in locations.maps):
            locations = locations._replace(maps=(*locations.maps, segment.addresses))
        self._locations = self._put(locations, segment, headers, offsets)
        self.top = max(self.top, segment.last)

    def _put(
        self, locations: Locations, segment: Segment, headers: Sequence[Header], offsets: Sequence[int]
    ) -> Locations:
        held = locations.held
        for at, header, offset in zip(itertools.count(held), headers, offsets, strict=False):
            address = segment.address + offset
            locations.firsts[at], locations.lasts[at] = header.first, header.last
            locations.at[at], locations.sizes[at] = address, header.size
            locations.compressed[at], locations.checked[at] = header.compressed, False
            locations.crcs[at], locations.crc_at[at] = header.crc, header.crc_at
            starts, sizes = header.buffers[:, 0], header.buffers[:, 1]
            locations.where[at] = np.where(sizes > 0, address + header.body + starts, 0)
            locations.bytes[at] = sizes
            locations.lengths[at] = header.lengths
        return locations._replace(held=held + len(headers))

    # -- reading ---------------------------------------------------------------------------------

    def ids_of(self, slots: IntArray) -> IntArray:
        """Return the newest ids that belong to slots. Shapes `(n,)`."""
        if self.slots is None:
            return slots + 1
        newest: IntArray = self.top - (self.top - 1 - slots) % self.slots
        return newest

    def _find(self, locations: Locations, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return the batch of each row, -1 for none, and the row's number in the batch. Shapes `(n,)`."""
        batches = np.searchsorted(locations.firsts[: locations.held], ids, side="right") - 1
        missing = (batches < 0) | (ids > locations.lasts[batches])
        inside = ids - locations.firsts[batches]
        batches[missing] = -1
        return batches, inside

    def _locate(self, ids: IntArray) -> tuple[Locations, IntArray, IntArray]:
        """Return the readable batches, the batch of each row, -1 for none, and its number in the batch."""
        locations = self._locations
        return locations, *self._find(locations, ids)

    def gather_ids(self, ids: IntArray, numbers: Sequence[int]) -> list[pa.Array]:
        """Copy whole values out; rows that were removed, or are older than all stored rows, become None.

        Args:
            ids: Row ids. Shape `(n,)`.
            numbers: Numbers of the fields.

        Raises:
            CorruptionError: Rows are missing or damaged, or a row continues a missing or damaged row.
        """
        plain = [number for number in numbers if number not in self.parents]
        found = dict(zip(plain, self.gather_stored(ids, plain), strict=True)) if plain else {}
        return [found[number] if number in found else self._gather_whole(ids, number) for number in numbers]

    def gather_stored(
        self, ids: IntArray, numbers: Sequence[int], *, may_lack: bool = False
    ) -> list[pa.Array]:
        """Copy rows out as they are stored: of a row that continues others, its own elements and pieces.

        Args:
            ids: Row ids. Shape `(n,)`.
            numbers: Numbers of the fields.
            may_lack: Whether any row may be missing, and becomes None.

        Raises:
            CorruptionError: Rows are missing or damaged.
        """
        locations, batches, inside = self._locate(ids)
        missing = batches < 0
        if not missing.any():
            return self._gather(locations, batches, inside, numbers)
        if not may_lack:
            self._explain(locations, ids[missing])
        there = np.flatnonzero(~missing)
        found = self._gather(locations, batches[there], inside[there], numbers)
        places = np.full(ids.size, there.size)
        places[there] = np.arange(there.size)
        return [pa.concat_arrays([rows, pa.nulls(1, rows.type)]).take(pa.array(places)) for rows in found]

    def _explain(self, locations: Locations, ids: IntArray) -> None:
        """Raise CorruptionError if missing rows were not removed from the store."""
        oldest = int(locations.firsts[0]) if locations.held else 1 << 62
        young = ids[ids >= oldest]
        if young.size:
            young = young[~self.have_left(young)]
        if young.size:
            raise CorruptionError(f"row {young[0]} is missing in {self.folder}")

    def _gather(
        self, locations: Locations, batches: IntArray, inside: IntArray, numbers: Sequence[int]
    ) -> list[pa.Array]:
        if not batches.size:
            return [pa.nulls(0, self.stored_kinds[number]) for number in numbers]
        try:
            columns = [self.plan.columns[number] for number in numbers]
            opened = self._unpack_batches(locations, batches, columns)
            if opened is None:
                return self._gather_decoded(locations, batches, inside, numbers)
            gather, batches, room = opened
            ones = np.ones(batches.size, np.int64)
            found = [gather.join_runs(column, batches, inside, ones) for column in columns]
            del room  # its addresses were read until here
            return found
        except CorruptionError as exc:
            raise CorruptionError(f"rows of {self.folder} cannot be read: {exc.message}") from exc

    def _unpack_batches(
        self, locations: Locations, batches: IntArray, columns: Sequence[Node]
    ) -> tuple[Gather, IntArray, Array | None] | None:
        """Decompress columns of the batches of rows, if any batch is compressed.

        Returns:
            What copies rows, the numbers of their batches for it, and memory to keep meanwhile. None: the
            compiled loops are not loaded yet.
        """
        loops, packed = self._loops, bool(locations.compressed[batches].any())
        if loops is None or (packed and self._unpacking is None):
            return None
        if not packed:
            return Gather(loops, locations.where, locations.bytes, locations.lengths), batches, None
        names, batches = np.unique(batches, return_inverse=True)
        where, sizes, room = self._unpack(locations, names, columns)
        return Gather(loops, where, sizes, locations.lengths[names]), batches, room

    def _unpack(
        self, locations: Locations, names: IntArray, columns: Sequence[Node]
    ) -> tuple[IntArray, IntArray, Array]:
        """Decompress buffers of some columns; return all addresses and lengths, and the results' memory."""
        loops = self._unpacking
        packed = names[locations.compressed[names]]
        bad = loops.find_damaged(
            locations.at[packed], locations.sizes[packed], locations.crc_at[packed], locations.crcs[packed]
        )
        if bad >= 0:
            raise self._build_damage_error(locations, int(packed[bad]))
        compressed = locations.compressed[names]
        return unpack(loops, columns, locations.where[names], locations.bytes[names], compressed)

    def _gather_decoded(
        self, locations: Locations, batches: IntArray, inside: IntArray, numbers: Sequence[int]
    ) -> list[pa.Array]:
        """Take rows with pyarrow while the compiled loops are not loaded yet."""
        names, which = np.unique(batches, return_inverse=True)
        decoded = [self._decode(locations, int(name), numbers) for name in names]
        starts = np.cumsum([0, *(batch.num_rows for batch in decoded)])
        rows = pa.array(starts[which] + inside)
        return [
            pa.chunked_array([batch.column(place) for batch in decoded]).take(rows).combine_chunks()
            for place in range(len(numbers))
        ]

    # -- rows that continue other rows -----------------------------------------------------------

    def read_pieces(self, ids: IntArray, number: int) -> Pieces:
        """Return the pieces of rows of a continued field; rows that were removed have no value.

        Args:
            ids: Row ids. Shape `(n,)`.
            number: Number of the field.

        Raises:
            CorruptionError: Rows are missing or damaged.
        """
        locations, batches, inside = self._locate(ids)
        there = np.flatnonzero(batches >= 0)
        if there.size < ids.size:
            self._explain(locations, ids[batches < 0])
        packed = pa.nulls(0, pa.binary())
        if there.size:
            packed = self._gather_member(locations, batches[there], inside[there], number)
        pieces = Pieces.read(ids[there], packed)
        some, crcs = np.zeros(ids.size, bool), np.zeros(ids.size, np.int64)
        some[there], crcs[there] = pieces.some, pieces.crcs
        return pieces._replace(rows=there[pieces.rows], some=some, crcs=crcs)

    def _gather_member(
        self, locations: Locations, batches: IntArray, inside: IntArray, number: int
    ) -> pa.Array:
        """Return the packed pieces of rows."""
        node = self.plan.columns[number].inner[1]
        opened = self._unpack_batches(locations, batches, [node])
        if opened is None:
            return self._gather_decoded(locations, batches, inside, [number])[0].field("pieces")
        gather, which, room = opened
        found = gather.join_runs(node, which, inside, np.ones(which.size, np.int64))
        del room  # its addresses were read until here
        return found

    def find_broken(self, ids: IntArray, damaged: IntArray) -> IntArray:
        """Return which of some undamaged rows continue a row that is missing or damaged. Shapes `(n,)`."""
        broken = [np.zeros(0, np.int64)]
        for number in self.parents:
            pieces = self.read_pieces(ids, number)
            wrong = (self._locate(pieces.owners)[1] < 0) | np.isin(pieces.owners, damaged)
            broken.append(ids[pieces.rows[wrong]])
        return np.unique(np.concatenate(broken))

    def store_whole(self, first_id: int, number: int, column: pa.Array) -> pa.Array:
        """Return rows as they are stored, none of which continues another row.

        Args:
            first_id: Id of the first row.
            number: Number of the field.
            column: The whole values. Length n.
        """
        if number not in self.parents:
            return column
        values = zip(split_elements(column), column.is_valid().to_pylist(), strict=True)
        packed = [
            pack_pieces(first_id + at, [], value.checksums([len(value)])[0]) if some else b""
            for at, (value, some) in enumerate(values)
        ]
        members = [column, pa.array(packed, pa.binary())]
        return pa.StructArray.from_arrays(members, fields=list(self.stored_kinds[number]))

    def _find_elements(self, ids: IntArray, number: int) -> _Woven:
        """Find the elements of whole values of a continued field; rows that were removed have no value.

        Raises:
            CorruptionError: Rows are missing or damaged, or a row continues a missing row.
        """
        pieces = self.read_pieces(ids, number)
        rows, owners, wanted = pieces.weave(ids)
        locations, batches, inside = self._locate(owners)
        if (batches < 0).any():
            lost = np.unique(rows[batches < 0])
            if not self.have_left(ids[lost]).all():
                raise CorruptionError(
                    f"row {owners[batches < 0][0]} is missing in {self.folder}, and other rows continue it"
                )
            pieces.some[lost] = False  # removed meanwhile
            here = pieces.some[rows]
            rows, wanted, batches, inside = rows[here], wanted[here], batches[here], inside[here]
        if not rows.size:
            return _Woven(pieces, rows, wanted, lambda: pa.nulls(0, self.kinds[number].value_type))
        own = self.plan.columns[number].inner[0]
        opened = self._unpack_batches(locations, batches, [own])
        if opened is not None:
            gather, which, room = opened
            first, last = gather.bounds(own, which, inside, np.ones(which.size, np.int64))
            lengths = _cut_runs(wanted, last - first)

            def copy() -> pa.Array:
                assert room is None or room.size >= 0  # it keeps the memory whose addresses are read
                return gather.join_runs(own.inner[0], which, first, lengths)

            return _Woven(pieces, rows, lengths, copy)
        lists = self._gather_decoded(locations, batches, inside, [number])[0].field("own")
        ends = lists.offsets.to_numpy()
        lengths = _cut_runs(wanted, np.diff(ends))
        places = np.repeat(ends[:-1] + lengths - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
        return _Woven(pieces, rows, lengths, lambda: lists.values.take(pa.array(places)))

    def count_elements(self, ids: IntArray, number: int) -> tuple[Pieces, IntArray]:
        """Return the pieces of rows of a continued field, and the number of elements of their whole values.

        Args:
            ids: Row ids. Shape `(n,)`.
            number: Number of the field.

        Raises:
            CorruptionError: Rows are missing or damaged, or a row continues a missing row.
        """
        woven = self._find_elements(ids, number)
        return woven.pieces, np.bincount(woven.rows, woven.lengths, ids.size).astype(np.int64)

    def _gather_whole(self, ids: IntArray, number: int) -> pa.Array:
        """Return whole values of a continued field, each compared with its checksum when it is first read."""
        try:
            woven = self._find_elements(ids, number)
            some, crcs = woven.pieces.some, woven.pieces.crcs
            counts = np.bincount(woven.rows, woven.lengths, ids.size).astype(np.int64)
            if counts.sum() >= 1 << 31:
                raise SchemaError(
                    f"these rows have {counts.sum()} elements, and an Arrow array at most {(1 << 31) - 1}",
                    hint="read fewer rows at once",
                )
            found = join_lists(self.kinds[number], counts, woven.copy(), ~some)
            sound = self._sound[number]  # rows that were read before
            places = ids % sound.size
            new = np.flatnonzero(some & (sound[places] != ids))
            values = split_elements(found) if new.size else []
            for at in new.tolist():
                if values[at].checksums([len(values[at])]) != [crcs[at]]:
                    name = key_name(self.fields[number].key)
                    raise CorruptionError(f"the value {name!r} of row {ids[at]} does not have its checksum")
            sound[places[new]] = ids[new]
        except CorruptionError as exc:
            raise CorruptionError(f"rows of {self.folder} cannot be read: {exc.message}") from exc
        return found

    def _decode(self, locations: Locations, name: int, numbers: Sequence[int]) -> pa.RecordBatch:
        """Return some columns of a batch, which keep its memory alive."""
        address, size = int(locations.at[name]), int(locations.sizes[name])
        if not locations.checked[name]:  # pyarrow does not validate what it reads
            data = ctypes.string_at(address, size)
            header = read_header(data)
            if header is None or crc_of(data, header) != header.crc:
                raise self._build_damage_error(locations, name)
            locations.checked[name] = True
        buffer = pa.foreign_buffer(address, size, base=locations.maps)
        return pa.ipc.read_record_batch(buffer, self.schema).select(list(numbers))

    def _build_damage_error(self, locations: Locations, name: int) -> CorruptionError:
        first, last = locations.firsts[name], locations.lasts[name]
        return CorruptionError(f"the batch of rows {first} to {last} does not have its checksum")

    def sizes(self, ids: IntArray) -> IntArray:
        """Return the bytes of rows, all fields together; 0 for a row that is not here. Shapes `(n,)`.

        Only offsets are read, not values.

        Raises:
            CorruptionError: Offsets are damaged.
        """
        locations = self._locations
        batches, inside = self._find(locations, ids)
        found = np.zeros(ids.size, np.int64)
        there = np.flatnonzero(batches >= 0)
        if not there.size:
            return found
        for number in self.parents:
            item = self.kinds[number].value_type
            if pa.types.is_primitive(item):
                width = max(1, item.bit_width // 8)
                found[there] += self.count_elements(ids[there], number)[1] * width + 4
            else:
                found[there] += row_sizes(self._gather_whole(ids[there], number))
        names, which = np.unique(batches[there], return_inverse=True)
        inside, packed = inside[there], bool(locations.compressed[names].any())
        if self._loops is None or (packed and self._unpacking is None):
            found[there] += self._sizes_decoded(locations, names, which, inside)
            return found
        where, sizes, room = locations.where[names], locations.bytes[names], None
        columns = [column for number, column in enumerate(self.plan.columns) if number not in self.parents]
        try:
            if packed:
                compressed = locations.compressed[names]
                where, sizes, room = unpack(
                    self._unpacking, columns, where, sizes, compressed, offsets_only=True
                )
            gather = Gather(self._loops, where, sizes, locations.lengths[names])
            ones = np.ones(inside.size, np.int64)
            for column in columns:
                found[there] += gather.sizes(column, which, inside, ones)
            del room  # its addresses were read until here
        except CorruptionError as exc:
            raise CorruptionError(f"rows of {self.folder} cannot be read: {exc.message}") from exc
        return found

    def _sizes_decoded(
        self, locations: Locations, names: IntArray, which: IntArray, inside: IntArray
    ) -> IntArray:
        """Measure rows with pyarrow while the compiled loops are not loaded yet."""
        found = np.zeros(inside.size, np.int64)
        numbers = [number for number in range(len(self.fields)) if number not in self.parents]
        for at, name in enumerate(names.tolist()) if numbers else ():
            here = which == at
            batch = self._decode(locations, name, numbers)
            for column in batch.columns:
                found[here] += row_sizes(column)[inside[here]]
        return found

    def views(self, number: int, first_id: int, count: int) -> list[pa.Array]:
        """Return a run of rows, one array per batch, without copying values; continued fields are copied.

        Rows that were removed meanwhile are None.

        Args:
            number: Number of the field.
            first_id: Id of the first row.
            count: Number of rows.

        Raises:
            CorruptionError: Rows are missing or damaged.
        """
        if number in self.parents:
            ids = np.arange(first_id, first_id + count)
            parts = np.split(ids, range(tuning.CONTINUED_ROWS, count, tuning.CONTINUED_ROWS))
            return [self._gather_whole(part, number) for part in parts if part.size]
        locations = self._locations
        found, at = [], first_id
        for name in self._names(locations, first_id, count):
            if locations.firsts[name] > at:
                found.append(self._build_nulls(number, at, int(locations.firsts[name])))
                at = int(locations.firsts[name])
            batch = self._decode(locations, name, [number])
            start = at - int(locations.firsts[name])
            some = min(int(locations.lasts[name]) + 1, first_id + count) - at
            found.append(batch.column(0).slice(start, some))
            at += some
        if at < first_id + count:
            found.append(self._build_nulls(number, at, first_id + count))
        return found

    def _build_nulls(self, number: int, first: int, end: int) -> pa.Array:
        """Return nulls for rows that were removed; raise CorruptionError for other missing rows."""
        missing = np.arange(first, end)
        young = missing[~self.have_left(missing)]
        if young.size:
            raise CorruptionError(f"row {young[0]} is missing in {self.folder}")
        return pa.nulls(end - first, self.kinds[number])

    def _names(self, locations: Locations, first_id: int, count: int) -> Iterator[int]:
        """Yield the numbers of the batches with rows of a run."""
        low = int(np.searchsorted(locations.lasts[: locations.held], first_id))
        high = int(np.searchsorted(locations.firsts[: locations.held], first_id + count))
        return iter(range(low, high))

    def measure_row_bytes(self, rows: int) -> float:
        """Return the average disk space of a row, bytes; 0 if there are no rows."""
        held = sum(header.rows for segment in self.segments for header in segment.headers)
        size = sum(header.size for segment in self.segments for header in segment.headers)
        return size // held if held else 0

    @property
    def mean_bytes(self) -> int:
        """The average size of a row, bytes; 0 if there are no rows. Of continued fields: of new rows."""
        size = int(self.measure_row_bytes(0))
        newest = [header.last for segment in self.segments[-4:] for header in segment.headers[-16:]]
        if self.parents and newest:
            with contextlib.suppress(CorruptionError):  # reading the rows raises it
                size = max(size, int(self.sizes(np.array(newest)).mean()))
        return size

    def field_bytes(self) -> tuple[int, list[int]]:
        """Return the number of rows, and the disk space of each field's rows, bytes."""
        headers = [header for segment in self.segments for header in segment.headers]
        bounds = [column.buffer for column in self.plan.columns] + [self.plan.buffers]
        sizes = [
            sum(int(header.buffers[low:high, 1].sum()) for header in headers)
            for low, high in itertools.pairwise(bounds)
        ]
        used, total = (
            self._disk.measure_space(self.folder) if self._disk.exists(self.folder) else 0,
            max(1, sum(sizes)),
        )
        return sum(header.rows for header in headers), [used * size // total for size in sizes]

    def covers(self, first_id: int, count: int) -> bool:
        """Return whether all rows of a run are here, damaged or not."""
        return next(self.find_missing(first_id, count), None) is None

    def find_missing(self, first_id: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield runs of rows that are not here: (first id, rows)."""
        locations, at = self._locations, first_id
        for name in self._names(locations, first_id, count):
            if locations.firsts[name] > at:
                yield at, int(locations.firsts[name]) - at
            at = int(locations.lasts[name]) + 1
        if at < first_id + count:
            yield at, first_id + count - at

    @contextlib.contextmanager
    def reading(self, segment: Segment) -> Iterator[Read]:
        """Yield a function that copies bytes of a segment that may be damaged.

        It reads with pread: a write that failed on a full disk leaves a hole, and reading a hole through a
        map of a full tmpfs raises SIGBUS.
        """
        if not isinstance(segment.addresses, AddressRange):
            yield segment.read  # the segment is only in memory
            return
        file = self._disk.open(segment.path, write=False)
        try:
            yield lambda start, size: file.read(start, size)
        finally:
            file.close()

    def sound_batches(self, first_id: int, count: int) -> Iterator[Header | None]:
        """Yield the headers of the batches with rows of a run; None for one that fails its checksum."""
        end = first_id + count
        for place in range(_first_behind(self.segments, first_id), len(self.segments)):
            segment = self.segments[place]
            if segment.first >= end:
                return
            with self.reading(segment) as read:
                for number in range(_first_behind(segment.headers, first_id), len(segment.headers)):
                    if segment.headers[number].first >= end:
                        return
                    yield segment.headers[number] if segment.is_sound(number, read) else None

    def checksums(self, first_id: int, count: int) -> list[int] | None:
        """Return the checksums of the batches that make up a run of rows; None if the run is not whole."""
        at, found = first_id, []
        for header in self.sound_batches(first_id, count):
            if header is None or header.first != at:
                return None
            found.append(header.crc)
            at = header.last + 1
        return found if at == first_id + count else None

    def extend_checksum(self, crc: int, first_id: int, count: int) -> int | None:
        """Extend a crc32c by the batches of a run of rows; return None if the run is not complete."""
        batches = self.checksums(first_id, count) if count else []
        return None if batches is None else add_batches(crc, batches)

    def lacks(self, first_id: int, count: int) -> bool:
        """Return whether rows of a run are missing, or batches do not match their checksums."""
        return count > 0 and not (
            self.covers(first_id, count) and None not in self.sound_batches(first_id, count)
        )

    # -- rows in the journal ---------------------------------------------------------------------

    def pack(self, columns: Sequence[pa.Array]) -> bytes:
        """Return rows, with whole values, as bytes: an Arrow IPC message after its u32 length."""
        message = pa.record_batch(list(columns), schema=self._whole_schema).serialize().to_pybytes()
        return len(message).to_bytes(_LENGTH_BYTES, "little") + bytes(message)

    @property
    def kept_from(self) -> int:
        """The oldest row that is here, or that a row may continue."""
        return self.segments[0].first if self.segments else self.top + 1

    def pack_stored(self, first_id: int, count: int, *, may_lack: bool = False) -> bytes:
        """Return a run of rows as they are stored, in the form of `pack`; removed rows are None.

        `may_lack`: whether any row may be missing.

        Raises:
            CorruptionError: Rows are missing or damaged.
        """
        ids = np.arange(first_id, first_id + count)
        columns = self.gather_stored(ids, range(len(self.fields)), may_lack=may_lack)
        message = pa.record_batch(columns, schema=self.schema).serialize().to_pybytes()
        return len(message).to_bytes(_LENGTH_BYTES, "little") + bytes(message)

    def unpack(self, data: bytes, *, stored: bool = False) -> list[pa.Array]:
        """Return the rows of several results of `pack`, joined: an array per field.

        Args:
            data: The bytes.
            stored: Whether they are results of `pack_stored`.

        Raises:
            CorruptionError: The bytes are damaged.
        """
        schema, batches, at = self.schema if stored else self._whole_schema, [], 0
        try:
            while at < len(data):
                size = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
                at += _LENGTH_BYTES
                batch = pa.ipc.read_record_batch(pa.py_buffer(data[at : at + size]), schema)
                batch.validate()
                batches.append(batch)
                at += size
        except (pa.ArrowInvalid, OSError) as exc:
            raise CorruptionError(f"rows in the journal cannot be read: {exc}") from exc
        return [
            pa.concat_arrays([batch.column(number) for batch in batches])
            for number in range(len(self.schema))
        ]

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        for segment in self.segments:
            if segment.file is not None:
                segment.file.close()
                segment.file = None


def _cut_runs(wanted: IntArray, lengths: IntArray) -> IntArray:
    """Return how many elements to take of each list of `lengths` elements; `wanted` is -1 for all."""
    found: IntArray = np.where(wanted < 0, lengths, wanted)
    if (found > lengths).any():
        raise CorruptionError("a row has fewer elements than other rows take from it")
    return found


def _first_behind(parts: Sequence[Segment | Header], first_id: int) -> int:
    """Return the number of the first part whose last row is `first_id` or later."""
    return bisect.bisect_left(parts, first_id, key=lambda part: part.last)
