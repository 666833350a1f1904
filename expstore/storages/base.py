"""What every storage does: number, publish, read, change and forget rows.

Buffers talk to this class; a backend supplies the primitives at its end. The order of the acts here is
the crash rule (payload first, then the record that publishes it) and stands nowhere else.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from expstore.core.change_log import Changed
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry, check_ndim, round_up
from expstore.core.idempotency import WriteKeys
from expstore.core.lock_order import LockOrder
from expstore.core.spare_slots import spare_slots
from expstore.core.values import Array, IntArray, Key, Ranking, Window, key_name
from expstore.disk.fair_lock import FairLock
from expstore.disk.files import Disk
from expstore.episodes.log import LogEntry
from expstore.episodes.sessions import End, Resume
from expstore.episodes.table import EpisodeTable
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.schema.arrow_sizes import row_sizes
from expstore.schema.field_roles import REWARD, Keys, find_keys
from expstore.schema.row_fields import ROW_BYTES, ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.schema.spec_text import check_specs
from expstore.storages.batch import Payload, Rows, now_us
from expstore.storages.columns.priorities import Priorities, check_priorities
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.index_protocol import CatalogLike
from expstore.storages.row_state import RowState
from expstore.storages.run_index import Runs
from expstore.storages.snapshot_pin import Hold
from expstore.storages.stats import Counters

if TYPE_CHECKING:
    import torch

    from expstore.storages.columns.arrow.capture import Held
    from expstore.storages.columns.packed.column import PackedRows
    from expstore.storages.new_field import Coming

__all__ = ["REWARD", "Hook", "Keys", "Rows", "Storage", "find_keys", "now_us", "sizes_of_rows"]

#: Rows of which the sizes are found at once by reading them.
_SOME_ROWS = 64

_logger = logging.getLogger("expstore")


#: Takes what is kept and returns what is to be kept instead, or the other way round.
Hook = Callable[[Any], Any]


class Holder(Protocol):
    """What holds a storage, and remembers how its rows are made."""

    def _renewed(self, storage: Any) -> None:
        """Note that a storage has another content."""


class Storage(ABC):
    """Keep rows under ever-growing ids, and know which of them can be read.

    Readable are the last `capacity` published ids. Threads: one writes at a time (`lock`), any number
    read without a lock. Processes: one writer. What a crash costs is the backend's word.

    Args:
        capacity: Most readable rows; None: unbounded.
        ndim: How many dims of a batch are rows: 1, or more with time as the first. The capacity becomes a
            multiple of the rows of one step then, when the first ones come.
    """

    kind = "abstract"
    #: Whether rows may be of no fixed size.
    keeps_variable = False
    #: Whether fields may hold any Python object; otherwise values become columns of Arrow.
    keeps_objects = False
    #: Moves, twice, when fields come or go: their places are others then. Odd meanwhile.
    reshapes: int = 0
    #: As `expstore.schema.spec_text` has them; "": nothing is known.
    specs: str = ""
    #: Whether a row is one object, in the field `("_data",)`, and not a set of tensors.
    object_rows = False
    #: The dim along which rows that are TensorDicts of any shapes are stacked; None: they are not.
    stack_dim: int | None = None
    #: The tensorclass that rows came in, if it is known.
    row_class: type | None = None
    _holders: weakref.WeakSet[Holder] | None = None
    #: Where rows are handed out, though they lie in host memory; None: CPU.
    device: torch.device | None = None

    def __init__(self, capacity: int | None = None, *, ndim: int = 1) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.lock_order = LockOrder()
        #: The number of the next batch, and what else a restart needs to draw the same ones.
        self.draws = DrawState(order=self.lock_order)
        #: How ids, slots and indices correspond.
        self.geometry = RingGeometry(capacity, check_ndim(ndim))
        self.schema: Schema | None = None
        self.keys = Keys()
        self.seed = 0
        self.flatten = False
        self.ranking: Ranking | None = None  # by what rows are ranked, if only the best stay
        self.lock = self.lock_order.ranked("storage", threading.RLock())
        #: Of who extends; taken before the lock, which brief acts take without.
        self.turn = self.lock_order.ranked("extend", FairLock())
        self.counters = Counters()
        self._state = RowState()
        self.runs = Runs(self)
        self._changes = 0  # odd while rows are being changed in place
        self._in_place = Changed()
        self._closed = False
        self._catalog: Callable[[], CatalogLike | None] = lambda: None
        #: Moves when rows leave otherwise than by age, or all of them are looked at anew.
        self.upheavals = 0
        #: Moves when ids may stand for other rows than before.
        self.takeovers = 0
        #: Held while episodes and window change.
        self.episode_lock = self.lock_order.ranked("episodes", threading.Lock())
        self.index_path: Path | None = None
        self.uuid = "0" * 32
        self.disk = Disk()
        self.hold = Hold(self.lock_order)
        #: Held while rows are drawn by the counts, and while they change.
        self.sampled_lock = self.lock_order.ranked("sampled", threading.RLock())
        self._counting = False  # whether it is kept from the first row on

    # -- what can be read ------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """The largest number of readable rows; None: unbounded."""
        return self.geometry.capacity

    @property
    def ndim(self) -> int:
        """How many dims of a batch are rows; TorchRL's word."""
        return self.geometry.ndim

    @property
    def max_size(self) -> int:
        """The largest number of readable rows; 2^63 - 1 in a storage without a capacity."""
        return self.geometry.max_size

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows along each dim: steps of time so far, then the sizes of the other dims."""
        return self.geometry.shape(self.window.size)

    @property
    def window(self) -> Window:
        """The ids that can be read now."""
        return self._state.window

    @property
    def horizon(self) -> int:
        """The newest id whose slot may have been written to."""
        return self._state.horizon

    @property
    def retired(self) -> int:
        """The newest id given up for other reasons than age."""
        return self._state.retired

    @property
    def given_up(self) -> int:
        """As `retired`; a follower asks the control page of the writer."""
        return self._state.retired

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""
        return self._state.write_count

    @property
    def episodes(self) -> EpisodeTable:
        """The episodes of the rows."""
        return self._state.episodes

    @property
    def priorities(self) -> Priorities:
        """The priorities of the rows, by slot."""
        return self._state.priorities

    @property
    def write_keys(self) -> WriteKeys:
        """Under which idempotency keys rows were written."""
        return self._state.write_keys

    @property
    def sampled(self) -> Sampled | None:
        """How often each row was handed out; None: it is not counted."""
        return self._state.sampled

    @property
    def content(self) -> tuple[int, int]:
        """The position of the newest record that says something of rows: generation and LSN."""
        return self._state.content

    @property
    def index_floor(self) -> tuple[int, int]:
        """The position at which an index must have been built, or later: an older one is built anew."""
        return self._state.index_floor

    @property
    def query_window(self) -> Window:
        """The ids that SQL sees: those of which episodes are known, too."""
        return self.window

    @property
    def last(self) -> int:
        """The newest published id."""
        return self._state.window.last

    def __len__(self) -> int:
        return self._state.window.rows

    @property
    def changes(self) -> int:
        """A number that moves whenever rows are changed in place."""
        return self._changes

    # -- writing ---------------------------------------------------------------------------------

    def prepare(self, schema: Schema, keys: Keys, dims: tuple[int, ...] = ()) -> None:
        """Fix the fields, once, when the first rows come.

        Args:
            schema: The fields.
            keys: Which of them say what a row is.
            dims: Sizes of a batch's dims beyond the first, where these are rows too.

        Raises:
            SchemaError: The fields are not those of the specs, or none that this storage keeps.
        """
        self.check_writable()
        self.geometry.check_dims(dims)
        self.check_described(schema)
        former = self.geometry
        self.geometry = self.geometry_for(schema, former.with_dims(dims))
        try:
            self._create(schema, keys)
        except BaseException:
            self.geometry = former
            raise
        if self._counting:
            self._begin_sampled()
        self.schema, self.keys = schema, keys

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring with the slots beyond its capacity that rows of a schema need.

        Their number is a multiple of the lanes, so that only whole steps of time are overwritten.
        """
        spare = spare_slots(ring.capacity, schema.row_bytes + ROW_BYTES)
        return ring.with_slots(round_up(spare, ring.lanes), 0)

    def write(self, rows: Rows) -> None:
        """Make rows readable, all of them or none.

        Raises:
            StateError: The store is closed, not open for writing, or poisoned.
            StorageError: The disk failed; nothing is published.
        """
        self.check_writable()
        if self.geometry.lanes > 1:
            self.geometry.check_steps(rows.first_id, rows.count)
        last = rows.first_id + rows.count - 1
        if self.hold.first and self.geometry.slots is not None:
            self._wait_for_copy(last - self.geometry.slots)
        self._make_room(rows.count)
        if rows.key is not None:
            self._expect_key(rows)
        capacity = self.geometry.capacity
        state = self._state
        if state.priorities.within and capacity is not None:
            low = min(last - capacity, state.window.last - 1)
            state.priorities.lower_largest(low, state.window, self.geometry)
        skipped = 0 if capacity is None else max(0, rows.count - capacity)
        try:
            state.reserve(last)
            self._note_horizon(last)
            if state.sampled is not None:
                with self.sampled_lock:
                    state.sampled.renew(self.geometry.runs(rows.first_id + skipped, rows.count - skipped))
            payload = self._put(rows, skipped)
            self._publish(rows, skipped, payload)
        except BaseException:
            self.note_interruption()
            raise
        self.counters.extends += 1

    def count_sampled(self) -> Sampled | None:
        """Keep from now on how often each row is handed out; return the counts, None before the first rows.

        Raises:
            StateError: Nothing can be written here.
            StorageError: The disk failed.
        """
        with self.lock:
            self.check_writable()
            if self.ranking is not None:
                raise StateError(
                    "rows are not counted where better ones take their places, and would inherit the counts",
                    hint="draw the best rows with another sampler",
                )
            self._counting = True
            if self.sampled is None and self.schema is not None:
                self._begin_sampled()
            return self.sampled

    def _wait_for_copy(self, through: int | None) -> None:
        started = time.monotonic()
        if self.hold.wait(through):
            self.counters.waits += 1
            self.counters.wait_seconds += time.monotonic() - started

    def retire(self, through: int) -> None:
        """Give up the rows with ids <= `through`, for good."""
        self.upheavals += 1
        self._state.retire(through)

    def clear(self) -> None:
        """Forget all rows; ids go on at the next multiple of the capacity, plus 1."""
        with self.lock:
            self.check_writable()
            last = self._state.window.last
            if self._state.window.size == 0:
                if self.episodes.has_open(None):
                    self.annotate(End(now_us(), None))
                return
            if self.capacity is not None:
                last = -(-last // self.capacity) * self.capacity
            try:
                self._forget(last)
            except BaseException:
                self.note_interruption()
                raise

    def _forget(self, last: int) -> None:
        """Give up all rows; the next id is `last` + 1."""
        self.upheavals += 1
        self._state.forget(last)
        self.episodes.end_episodes(self.counters.extends)

    def change(self, ids: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Replace fields of readable rows; episodes stay as they are.

        Args:
            ids: Which rows, each once. Shape `(n,)`.
            places: Positions of the fields in the schema.
            columns: Their new values. Shapes `(n, *row shape)`.
        """
        with self.lock:
            self.check_writable()
            window = self._state.window
            if ids.size == 0:
                return
            if not window.holds(ids).all():
                raise NotFoundError("cannot change rows that have left the store")
            self._change(ids, places, columns, replaces=False)

    def replace(self, ids: IntArray, columns: Sequence[Array]) -> None:
        """Put other rows in the places of readable ones: all of them, whole, or none.

        They take over ids, episodes and steps, count as written now, and start at the largest priority.

        Args:
            ids: Whose places, each once. Shape `(n,)`.
            columns: The rows: one array per field, in the schema's order. Shapes `(n, *row shape)`.
        """
        with self.lock:
            self.check_writable()
            fields, count = len(self.require_schema().fields), ids.size
            times = np.full(count, now_us())
            priorities = np.full(count, self.priorities.largest, np.float32)
            places = [self.priority_place, *range(fields), self.priority_place - 1]
            self._change(ids, places, [priorities, *columns, times], replaces=True)
            self.priorities.raise_largest(ids, priorities)
            self._state.note_replaced(count)
            self.counters.extends += 1
            self.priorities.tell(self, self.geometry.slot_of(ids))

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        if self.hold.first:
            self._wait_for_copy(None)
        try:
            self._record_change(ids, places, columns, replaces=replaces)
            slots = self.geometry.slot_of(ids)
            with self.changing(slots):
                self._overwrite(slots, places, columns)
        except BaseException:
            self.note_interruption()
            raise

    def rank_by(self, ranking: Ranking | None) -> None:
        """Keep by what rows are ranked, of which only the best are to stay; None: the newest are.

        Raises:
            StateError: Nothing can be written here.
            StorageError: The disk failed; nothing was changed.
        """
        with self.lock:
            self.check_writable()
            self._note_ranking(ranking)
            self.ranking = ranking

    def annotate(self, change: LogEntry | End | Resume) -> None:
        """Keep what is noted about episodes.

        Args:
            change: An episode as it stands, with its new info; or which episodes end, or are opened again.

        Raises:
            StateError: The store is closed, not open for writing, or poisoned.
            StorageError: The disk failed; nothing is noted.
        """
        with self.lock:
            self.check_writable()
            with self.episode_lock:
                try:
                    if isinstance(change, LogEntry):
                        self._annotate(change)
                    else:
                        self._record_episodes(change)
                except BaseException:
                    self.note_interruption()  # before the lock goes: no mark may cover what memory lacks
                    raise

    @contextmanager
    def changing(self, slots: IntArray | None = None) -> Iterator[None]:
        """Tell readers that rows are being changed in place.

        Args:
            slots: Which ones; None: whichever. Shape `(n,)`.
        """
        self._changes += 1
        self._note_change(slots)
        try:
            yield
            self._note_changed()  # after a failure it is not known what they hold
        finally:
            self._in_place.note(self._changes + 1, slots)
            self._changes += 1

    def changed_since(self, changes: int) -> IntArray | None:
        """Return the slots changed in place since `changes` was this even number; None: whichever.

        Shape `(n,)`, int64. A change that is going on is not among them.
        """
        return self._in_place.since(changes, self._changes & ~1)

    def set_priorities(self, ids: IntArray, values: Array) -> int:
        """Set priorities; rows that have left are skipped. Returns how many were set.

        Args:
            ids: Shape `(n,)`; for an id given twice the last value counts.
            values: Finite, not negative. Shape `(n,)`.

        Raises:
            PriorityError: A value is negative, NaN or infinite; none was set.
        """
        values = check_priorities(values)
        with self.lock:
            self.check_writable()
            here = self._state.window.holds(ids)
            if not here.all():
                ids, values = ids[here], values[here]
            slots = self.geometry.slot_of(ids)
            if slots.size:
                self.priorities.set(ids, slots, values)
                self._note_priorities()
                self.priorities.tell(self, slots)
            return int(slots.size)

    # -- reading ---------------------------------------------------------------------------------

    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> list[Array]:
        """Copy rows out.

        A row that was overwritten meanwhile may come out torn: ask `intact` afterwards.

        Args:
            ids: Which rows. Shape `(n,)`.
            places: Positions of the fields wanted; None: all.

        Returns:
            One array per field. Shapes `(n, *row shape)`.
        """
        slots = self.geometry.slot_of(ids)
        for _ in range(3):
            before = self._changes
            columns = self._take(slots, places)
            if before == self._changes and not before & 1:
                return columns
        with self.lock:
            return self._take(slots, places)

    def intact(self, ids: IntArray) -> bool:
        """Return whether no slot of these ids has been written to for a later row, or given to other rows."""
        state, depth = self._state, self.geometry.depth
        if depth is None:
            # Rows that leave a store without a capacity have their space given back.
            gaps, retired = state.window.gaps, state.retired
            kept = not retired or ids.size == 0 or int(ids.min()) > retired
            return kept and not (gaps and gaps.holds(ids).any())
        return state.horizon <= depth or ids.size == 0 or int(ids.min()) > state.horizon - depth

    # -- fields ----------------------------------------------------------------------------------

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields of which rows are unpacked or put together where they are read: no views cost nothing."""
        return frozenset()

    def archived(self) -> Storage | None:
        """Return where rows are that have left; None: nowhere."""
        return None

    @contextmanager
    def moving_places(self, moves: bool = True) -> Iterator[None]:
        """Let who reads fields by their places know that these are others afterwards, if they are."""
        self.reshapes += moves
        try:
            yield
        finally:
            self.reshapes += moves

    def check_described(self, schema: Schema) -> None:
        """Raise SchemaError if fields are not those of the specs, or none that this storage keeps."""
        self.check_kept(schema)
        check_specs(self.specs, schema)

    def check_kept(self, schema: Schema) -> None:
        """Raise SchemaError if there are fields that this storage does not keep."""
        if schema.variable and not self.keeps_variable:
            entry = schema[schema.variable[0]]
            raise SchemaError(
                f"field {key_name(entry.key)!r} is {entry}: its rows have no fixed size, which a {self.kind} "
                "storage cannot keep",
                hint='make the store with expstore.open(..., storage="arrow")',
            )

    def describe_fields(self, specs: str) -> None:
        """Keep the specs of the fields in the place of those that there are.

        Args:
            specs: Their text; "": nothing is known of them any more.

        Raises:
            SchemaError: The rows have other fields.
            StateError: Nothing can be written here.
            StorageError: The disk failed; nothing was changed.
        """
        with self.lock:
            self.check_writable()
            if self.schema is not None:
                check_specs(specs, self.schema)
            self._note_specs(specs)
            self.specs = specs

    def stored_specs(self) -> str:
        """Return the text of the specs as it is just now."""
        return self.specs

    def _note_specs(self, specs: str) -> None:
        """Bring the text to where the storage's settings are."""

    def add_field(self, coming: Coming) -> None:
        """Have one more field: all of it, or nothing.

        Args:
            coming: Which one, and the values of the rows that are there.

        Raises:
            StateError: Nothing can be written here, or this kind of storage cannot.
        """
        self.check_writable()
        raise StateError(f"a {self.kind} storage cannot get other fields", hint="make another store")

    def drop_field(self, key: Key, specs: str) -> None:
        """Have one field less: all of it goes, or nothing.

        Args:
            key: Which one.
            specs: What values fields may have from then on, as `expstore.schema.spec_text` has it.

        Raises:
            StateError: Nothing can be written here, or this kind of storage cannot.
        """
        self.check_writable()
        raise StateError(f"a {self.kind} storage cannot get other fields", hint="make another store")

    # -- a list of rows, as TorchRL has it -------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Read rows by index, put together as they came: TensorDicts, tensors, trees of them, objects.

        Args:
            index: An integer for one row (of time, where `ndim` is larger than 1); a slice, integers, or a
                mask for several.

        Returns:
            One row, or as many as asked for; objects in a list.

        Raises:
            NotFoundError: There is no such row.
            StateError: The storage is closed, or has no fields yet.
        """
        from expstore.storages.indexing import get

        return get(self, index)

    def set(self, cursor: Any, data: Any) -> None:
        """Replace rows by index; rows right behind the last one are appended.

        Args:
            cursor: An integer, several, or a slice.
            data: One row for one integer, otherwise as many.

        Raises:
            NotFoundError: There is no such row, nor would it be the next.
            SchemaError: The rows do not fit.
        """
        from expstore.storages.indexing import put

        put(self, cursor, data)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, data)

    def contains(self, item: Any) -> Any:
        """Say which indices rows can be read at.

        Args:
            item: An integer, or a tensor of them; negative ones count from the end.

        Returns:
            A bool, or a tensor of bools.
        """
        from expstore.storages.indexing import contains

        return contains(self, item)

    def __contains__(self, item: object) -> bool:
        return bool(self.contains(item))

    def __iter__(self) -> Iterator[Any]:
        """Yield row after row, in the order of their indices."""
        from expstore.storages.indexing import rows_of

        return rows_of(self)

    # -- the state that a program keeps ----------------------------------------------------------

    def add_holder(self, holder: Holder) -> None:
        """Tell an object of every content that takes this one's place; it is held weakly."""
        if self._holders is None:
            self._holders = weakref.WeakSet()
        self._holders.add(holder)

    def tell_holders(self) -> None:
        """Tell all holders now."""
        for holder in list(self._holders or ()):
            holder._renewed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return which store this is, and its last row: the rows are in its folder, for `dumps`."""
        return {"uuid": self.uuid, "last": self.window.last}

    def packed_now(self) -> dict[int, PackedRows]:
        """Return the rows of packed fields as they are at this moment, by place; the lock is held."""
        return {}

    def segments_now(self, low: int) -> dict[tuple[int, ...], list[Held]]:
        """Return the segments that hold rows newer than `low`, and of which fields; the lock is held."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing for a state without rows: these are in the folder.

        Raises:
            StateError: The state holds rows.
        """
        if "rows" in state_dict:
            raise StateError(
                f"a {self.kind} storage keeps its rows itself, and this state holds some",
                hint="load it into a LazyMemmapStorage, or use dumps() and loads()",
            )

    def register_save_hook(self, hook: Hook) -> None:
        """Refuse: `state_dict` holds no rows here.

        Raises:
            StateError: Always.
        """
        raise self._no_hooks()

    def register_load_hook(self, hook: Hook) -> None:
        """Refuse: `state_dict` holds no rows here.

        Raises:
            StateError: Always.
        """
        raise self._no_hooks()

    def before_dump(self) -> None:
        """Note that a snapshot is about to be made."""

    def _no_hooks(self) -> StateError:
        return StateError(
            f"a {self.kind} storage keeps its rows itself: state_dict() has none that a hook could change",
            hint="change them before extend(), or when they have been read",
        )

    # -- life ------------------------------------------------------------------------------------

    #: Whether rows are written by another process, which no lock of this storage stops.
    follows = False

    def stream(self) -> int:
        """Return the second word of the key of this handle's draws."""
        return 0

    def refresh(self) -> None:
        """Take in what another process has done, priorities too; does nothing where rows are written here."""

    def follow(self) -> None:
        """Take in what another process has written; does nothing where rows are written here."""

    def check_writable(self) -> None:
        """Raise StateError unless rows can be written."""
        if self._closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")

    def require_schema(self) -> Schema:
        """Return the schema.

        Raises:
            StateError: No rows have come yet.
        """
        if self.schema is None:
            raise StateError("the store has no fields yet", hint="extend() it first")
        return self.schema

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def priority_place(self) -> int:
        """Where `views` finds the priorities."""
        return (len(self.schema.fields) if self.schema else 0) + len(ROW_FIELDS) - 1

    def place_of(self, key: Key) -> int:
        """Return the position of a field.

        Raises:
            SchemaError: There is no such field.
        """
        place = self.require_schema().place(key)
        if place < 0:
            raise SchemaError(f"no field {key_name(key)!r}", hint=f"the store has {self.schema!r}")
        return place

    def log_entries(self) -> Iterator[LogEntry]:
        """Return everything that was noted about episodes that ended, in order."""
        return iter(())

    def log_bytes(self) -> bytes:
        """Return the same as episodes.log keeps it."""
        return b"".join(entry.pack() for entry in self.log_entries())

    def block_sums(self) -> Array | None:
        """Return what tells blocks of slots that have changed from others; None: nothing does."""
        return None

    def resolve_keys(self, schema: Schema) -> Keys:
        """Find the fields that say what a row is to its episode."""
        return find_keys(schema)

    def use_catalog(self, catalog: CatalogLike) -> None:
        """Keep who keeps the index, which is given changes before they are forgotten.

        It is held weakly: it holds this storage, and a forgotten buffer is to go at once.
        """
        self._catalog = weakref.ref(catalog)

    @property
    def catalog(self) -> CatalogLike | None:
        """Who keeps the index; None: there is no index."""
        return self._catalog()

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and sound."""
        return not self._closed

    def meta(self) -> dict[str, Any]:
        """Return the user's own facts."""
        return {}

    def more_stats(self) -> dict[str, Any]:
        """Return what only this kind of storage has to say."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return what the relation `meta` shows."""
        dims = {} if self.ndim == 1 else {"dims": list(self.geometry.dims)}
        return {"storage": self.kind, "capacity": self.capacity, "seed": self.seed} | dims

    # -- what a backend supplies -----------------------------------------------------------------

    @abstractmethod
    def _create(self, schema: Schema, keys: Keys) -> None:
        """Make empty columns."""

    @abstractmethod
    def _put(self, rows: Rows, skipped: int) -> Payload:
        """Write the payload of all rows but the first `skipped`."""

    @abstractmethod
    def _publish(self, rows: Rows, skipped: int, payload: Payload) -> None:
        """Append the commit record, then update the episode table and the visible range."""

    @abstractmethod
    def _annotate(self, entry: LogEntry) -> None:
        """Record an episode's info, then take it over; the episode lock is held."""

    def _record_episodes(self, change: End | Resume) -> None:
        """Record which episodes end or are opened again, then take it over; the episode lock is held."""
        self.episodes.apply(change, self.counters.extends)

    @abstractmethod
    def _overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> None:
        """Write columns of single rows in place, one after the other; places as `views` has them."""

    @abstractmethod
    def _take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Copy rows out by slot."""

    def _sizes_of(self, ids: IntArray) -> IntArray:
        """Return what `sizes_of_rows` does; a storage without offsets reads the rows, some at a time."""
        places = [place for place, entry in enumerate(self.require_schema().fields) if entry.variable]
        sizes = np.zeros(ids.size, np.int64)
        for start in range(0, ids.size if places else 0, _SOME_ROWS):
            some = slice(start, start + _SOME_ROWS)
            for column in self.read(ids[some], places):
                sizes[some] += row_sizes(column)
        return sizes

    @abstractmethod
    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying: per field one or two arrays.

        Places from `len(schema.fields)` on are those of `ROW_FIELDS`.
        """

    @abstractmethod
    def _begin_sampled(self) -> None:
        """Make counts of 0 for all slots."""

    @abstractmethod
    def sync(self) -> None:
        """Bring everything that was written to the disk."""

    @abstractmethod
    def close(self) -> None:
        """Sync and let go; a second call does nothing."""

    def load_version(self, folder: Path) -> None:
        """Put the content of the version in a folder in the place of what there is.

        Raises:
            StateError: This kind of storage cannot.
        """
        self.check_writable()
        raise StateError(f"a {self.kind} storage cannot load versions", hint="load into a store on disk")

    # -- what a backend may want to know -----------------------------------------------------------

    def set_draws(self, draw: int, progress: Sequence[int]) -> None:
        """Continue with another draw, possibly an earlier one; a restart does so too when this returns.

        Args:
            draw: The number of the next draw.
            progress: How far the sampler had come then.
        """
        self.draws.set(draw, progress)

    def _make_room(self, count: int) -> None:
        """Wait until `count` more rows may be written."""

    def _expect_key(self, rows: Rows) -> None:
        """Make ready for the idempotency key of rows that are about to be written, if they have one."""

    def _note_key(self, rows: Rows) -> None:
        """Know the idempotency key of rows from now on, if they have one; they are published."""
        if rows.key is not None:
            self.write_keys.note(rows.key, rows.first_id, rows.count, rows.time)

    def drain(self) -> None:
        """Write to the columns the rows that only a journal has, where there is one."""

    def note_interruption(self) -> None:
        """Note that an act was left in the middle: what is in memory may lag behind the disk."""

    def _note_horizon(self, horizon: int) -> None:
        """Keep the write horizon."""

    def _note_change(self, slots: IntArray | None) -> None:
        """Keep that these slots, or whichever, are about to be changed."""

    def _note_changed(self) -> None:
        """Keep that the change is complete."""

    def _note_priorities(self) -> None:
        """Have priorities that were set kept before long."""

    def note_sampled(self) -> None:
        """Note that rows were counted as handed out."""

    def settle_changes(self) -> None:
        """Have the columns hold every row that was changed; the lock is held."""

    def _note_ranking(self, ranking: Ranking | None) -> None:
        """Keep by what rows are ranked."""

    def _record_change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> Any:
        """Record new values of rows before they are written."""


def sizes_of_rows(storage: Storage, ids: IntArray) -> IntArray:
    """Return how many bytes the fields without a fixed size take in some rows, by their offsets.

    Args:
        storage: What holds them.
        ids: Which rows; of one that has left it is 0. Shape `(n,)`.

    Returns:
        Shape `(n,)`, int64.
    """
    return storage._sizes_of(ids)
