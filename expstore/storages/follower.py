"""A store that is opened for reading only, with or without a writer in another process.

The storage behind `expstore.open(mode="r")`. It reads expstore.json, STATE, the journal, the columns and
episodes.log. It takes no lock and writes nothing, so any number of followers may read one store.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.values import Array, IntArray, Window
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.disk.writer_lock import Owner, read_owner
from expstore.episodes.log import LogEntry, read_bytes, unpack_entries
from expstore.episodes.table import EpisodeTable
from expstore.errors import StateError, StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.row_traits import RowTraits
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.memtable import Overlay
from expstore.storages.description import Description
from expstore.storages.engine.open_settings import Settings, look_up
from expstore.storages.format.control_page import StateView
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import LOCK, LOG
from expstore.storages.format.writer_probe import Watch
from expstore.storages.read_view import ReadView, build_closed_error
from expstore.storages.recovery.cold_reader import Replay, episode_rows, open_columns, replay
from expstore.storages.recovery.recover import describe_past
from expstore.storages.recovery.tail import LiveTail
from expstore.storages.row_settings import ReadSettings
from expstore.storages.row_state import EpisodeList
from expstore.storages.snapshots.restore import refuse_half_loaded

#: Maximum number of attempts to read files that a writer may remove meanwhile; pauses in between double.
_LOOKS, _PAUSE_SECONDS = 7, 0.002
_Found = TypeVar("_Found")
#: The advice after a write through a copy of a buffer that is not shared.
_SHARE = (
    "write in the process that opened the store, or call rb.share() there before the copy is made: "
    "copies then write through it"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """The place from which rows are read. The object is replaced as a whole.

    Args:
        live: Whether a writer is running. Then STATE says which rows can be read.
        seen: The values of STATE that must not change: (generation, layout), or all values if no writer is
            known; None: there is no STATE.
        columns: The columns, opened for reading; None: there are no fields yet.
        overlay: Rows that the columns lack.
    """

    live: bool = False
    seen: tuple[int, ...] | None = None
    columns: ReadColumns | None = None
    overlay: Overlay = dataclasses.field(default_factory=Overlay)

    def holds(self, view: StateView | None) -> bool:
        """Return whether STATE has not changed since this object was created."""
        if view is None or self.seen is None:
            return view is self.seen
        return view[: len(self.seen)] == self.seen

    def close(self) -> None:
        """Close the files of the columns; mapped rows can still be read. The storage's lock is held."""
        if self.columns is not None:
            self.columns.close()


class _FollowedNotes(EpisodeList):
    """The entries of episodes.log: annotations of ended episodes, read from the store's files.

    Args:
        read: Reads the bytes of all entries.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], bytes]) -> None:
        super().__init__()
        self._read = read

    def read(self) -> Iterator[LogEntry]:
        """Return every entry in order."""
        return unpack_entries(self._read(), LOG)

    def capture(self) -> Callable[[], bytes]:
        """Return a function that returns the present entries, in the format of episodes.log."""
        data = self._read()
        return lambda: data


class _FollowedSettings(ReadSettings):
    """Settings that another process may change.

    Args:
        view: The follower.
        specs: Reads the text of the specs.
    """

    __slots__ = ("_specs",)

    def __init__(self, view: ReadView, specs: Callable[[], str]) -> None:
        super().__init__(view)
        self._specs = specs

    def specs(self) -> str:
        """Return the text of the specs as the writer has it now."""
        return self._specs()


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """How a fork, or a copy in another process, opens the rows of a storage.

    Args:
        path: The store's folder.
        seed: The reader's own seed; None: the store's.
        reason: Why the store cannot be written to here, for error messages.
        advice: What to do instead.
        forked: Whether the process is a fork, in which libraries that use threads do not work.
        copied: Whether the storage is one of several copies, which must not repeat each other's draws.
    """

    path: Path
    seed: int | None = None
    reason: str = "is open for reading only"
    advice: str = "write with the buffer that has it open with mode='a'"
    forked: bool = False
    copied: bool = False
    writes: bool = False

    @classmethod
    def of(cls, storage: ReadView) -> Origin | None:
        """Return the origin of a storage's rows; None if they are in RAM."""
        if storage.manifest is None or storage.path is None:
            return None
        seed = storage._own_seed if isinstance(storage, FollowerStorage) else None
        return cls(storage.path.absolute(), seed, writes=not storage.follows)

    def _advise(self) -> str:
        """Return what to do instead of a write through a copy. A reader cannot be shared."""
        return _SHARE if self.writes else self.advice

    def in_fork(self) -> Origin:
        """Return the origin that a forked child opens."""
        reason = (
            "was opened by another process, of which this one is a fork: here it is open for reading only"
        )
        return dataclasses.replace(self, reason=reason, advice=self._advise(), forked=True, copied=True)

    def elsewhere(self) -> Origin:
        """Return the origin that a pickled copy opens."""
        reason = "is open for reading only in a copy of a buffer"
        return dataclasses.replace(self, reason=reason, advice=self._advise(), forked=False, copied=True)

    def to_shared(self) -> Origin:
        """Return the origin of a copy that writes through the process that has the store open."""
        reason = (
            "is written by another process: through it this copy of a shared buffer can append rows, set "
            "priorities, annotate, end and resume episodes, delete all rows and create versions, and nothing "
            "else"
        )
        advice = "do it in the process that opened the store"
        return dataclasses.replace(self, reason=reason, advice=advice)

    def follow(self) -> FollowerStorage:
        """Open the rows for reading."""
        return FollowerStorage(self.path, settings=Settings(mode="r", seed=self.seed), origin=self)


class FollowedChanges:
    """Report which slots another process changed in place.

    The changes are read from the control page of a running writer. Without a writer no row changes, and
    `number` is incremented each time the store is opened again. What a writer that was killed had changed and
    not yet written to the columns may count as newer than `seen`.

    Threads: any number read; the follower writes, under its lock.
    """

    __slots__ = ("_known", "_openings", "_page", "_watch", "newest_record", "pending")

    def __init__(self) -> None:
        self._openings = 0
        self._watch: Watch | None = None
        self._page: Watch | None = None
        self._known = 0
        self.newest_record: int | None = None
        self.pending: Sequence[tuple[int, IntArray]] | None = None

    def follow(self, watch: Watch, found: Replay | None, *, live: bool, fits: bool) -> None:
        """Read another control page from now on.

        Args:
            watch: The control page.
            found: What the journal has; None: a writer has it open.
            live: Whether a writer runs.
            fits: Whether the page belongs to this store, and was written since the machine started.
        """
        past = found.past if found is not None else None
        self._known = past.state.sequence if past is not None else 0
        self._page = watch if fits else None
        self.newest_record = None if live else self._known
        self.pending = found.changes if found is not None else None
        self._openings += 1
        self._watch = watch if live else None

    @property
    def seen(self) -> int:
        """Number of the newest change in place that the columns have."""
        page = self._page
        return self._known if page is None else page.last_change

    @property
    def number(self) -> int:
        """Incremented when a change begins and when it ends; odd during a change."""
        watch = self._watch
        return 2 * self._openings if watch is None else watch.change

    def since(self, before: int) -> IntArray | None:
        """Return the slots changed since `number` had this even value, `(n,)`; None if they are unknown."""
        watch = self._watch
        return None if watch is None else watch.find_changed(before)


class FollowerStorage(ReadView):
    """Read a store that another process may be writing to.

    While a writer runs, new rows become readable once they are in the columns: when the `extend` that wrote
    them returns, or within 0.1 s if batches are small (up to 64 rows of 16 KiB together). Crashes: a follower
    writes nothing, so it loses nothing. Threads: any number read. Processes: any number follow a store and
    outlive its writers.

    Args:
        path: The store's folder.
        capacity: As stored, or None.
        settings: The options of `expstore.open`; `seed` is the reader's own.
        disk: The disk on which files are accessed; by default one that refuses to change any.
        origin: How a fork or a copy was made.

    Raises:
        NotFoundError: There is no store.
        StateError: A setting contradicts the store.
        CorruptionError: The journal or expstore.json is damaged. A damaged column raises the error when it is
            read; other columns can be read.
    """

    follows = True
    path: Path
    manifest: Manifest

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings | None = None,
        disk: Disk | None = None,
        origin: Origin | None = None,
    ) -> None:
        disk, settings = disk or ReadingDisk(), settings or Settings(mode="r")
        path = disk.follow_link(local_path(path))
        self._origin = origin or Origin(path, settings.seed)
        self._own_seed = settings.seed
        self._tail: LiveTail | None = None
        self._source = _Source()
        self._known = 0
        self._unseen = False
        manifest = look_up(disk, path, capacity, settings)
        super().__init__(self._description_of(manifest), disk=disk, path=path)
        stream = 1 if self._own_seed is not None and not self._origin.copied else None
        draws = DrawState(order=self.locks.order, stream=stream)
        self._adopt(dataclasses.replace(self._state, draws=draws))
        self.manifest, self.kind = manifest, manifest.storage
        self.row_traits = RowTraits(variable=self.kind == "arrow")
        self.changes: FollowedChanges = FollowedChanges()
        self._watch = Watch(disk, path)
        self._look_again()

    # -- finding the writer and the rows -----------------------------------------------------------

    def _look_again(self) -> None:
        """Determine the writer and the readable rows again."""
        with self.lock:
            self._retry(self._look)

    def _retry(self, act: Callable[[], _Found]) -> _Found:
        """Call a function; retry it on a StorageError, because files change while a writer opens or works."""
        for look in range(_LOOKS - 1):
            try:
                return act()
            except StorageError:
                time.sleep(_PAUSE_SECONDS * 2**look)
        return act()

    def _look(self) -> None:
        former = self._source
        refuse_half_loaded(self.disk, self.path)
        watch = Watch(self.disk, self.path)
        view = watch.look()
        manifest = Manifest.load(self.disk, self.path)
        self.manifest, self.kind = manifest, manifest.storage
        self.row_traits = dataclasses.replace(self.row_traits, variable=self.kind == "arrow")
        known = self.description  # the fields change together with the columns
        self._describe(
            dataclasses.replace(self._description_of(manifest), schema=known.schema, keys=known.keys)
        )
        fits = watch.fits(manifest.uuid, manifest.generation)
        if not former.live and view is not None and former.seen and view[:2] == former.seen[:2]:
            self._unseen = True  # the writer seemed dead, perhaps because it is in a container, but it writes
        live = (
            fits
            and view is not None
            and view.generation == manifest.generation
            and watch.writer_lives(unseen=self._unseen)
        )
        if live and view is not None:
            source, found = _Source(True, view[:2], open_columns(self)), None
        else:
            found = replay(self, same_boot=fits)
            source = _Source(False, view, found.columns, found.overlay)
        try:
            if found is None and view is not None and source.columns is not None:
                source.columns.look(self._slots_of(view.last))
                if view.last > view.retired:  # otherwise no row is readable, and ids may be unwritten
                    source.columns.look_to(view.last)
            if source.columns is not None and self._origin.forked:
                source.columns.do_without_threads()
            refuse_half_loaded(self.disk, self.path)  # it may have begun since the first check
            if not source.holds(watch.look()):
                raise StorageError(f"{self.path} kept changing while it was being opened", hint="try again")
        except BaseException:
            source.close()
            raise
        self._watch = watch
        self._take_over(source, found, 0 if view is None else view.last)

    def _description_of(self, manifest: Manifest) -> Description:
        """Return the description in expstore.json, with the reader's own seed if it has one."""
        found = Description.of(manifest)
        return found if self._own_seed is None else dataclasses.replace(found, seed=self._own_seed)

    def _take_over(self, source: _Source, found: Replay | None, last: int) -> None:
        schema, known = self.manifest.schema, self.schema
        moves = known is not None and not (schema is not None and schema.same(known))
        with self.epochs.note_field_change(moves):
            if schema is not None and (moves or known is None):
                self._describe(self.description.with_fields(schema, self.manifest.find_keys(schema)))
            self._take_source(source, found, last)

    def _take_source(self, source: _Source, found: Replay | None, last: int) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        if found is not None:
            past = found.past
            length = past.log_length if past else 0
            log = _FollowedNotes(partial(_log_bytes, self.disk, self.path, length, found.entries))
            self._adopt(dataclasses.replace(self._state, episodes=found.table, log=log, write_count=0))
            if past is not None:
                last = past.state.last
                self._state.recover(past.state, past.find_stored(self.capacity))
                self.counters.recovered = describe_past(past, 0)
        else:
            self.counters.recovered = None
        if source.columns is not None:
            self.priorities.show(_priorities(source.columns, source.overlay, self._slots_of(last)))
        annotations = None if source.columns is None else source.columns.annotations
        self._adopt(dataclasses.replace(self._state, annotations=annotations))
        self._known = last
        former, self._source = self._source, source
        former.close()
        fits = self._watch.fits(self.manifest.uuid, self.manifest.generation)
        self.changes.follow(self._watch, found, live=source.live, fits=fits)
        self.epochs.note_content()

    def _slots_of(self, last: int) -> int:
        """Return how many slots the ids up to `last` occupy."""
        return last if self.geometry.slots is None else min(last, self.geometry.slots)

    def follow(self, *, priorities: bool = False) -> None:
        """Update episodes to the readable rows, and detect whether the writer has stopped.

        Rows become readable without this call, rows of small batches within 0.1 s; this method does not wait
        for them.

        Args:
            priorities: Whether to assume that priorities were set, too.

        Raises:
            StateError: The follower is closed.
            StorageError: The store cannot be read.
        """
        with self.lock:
            if self._closed:
                raise build_closed_error()
            source = self._current()
            if source.live:
                stale = not self._watch.writer_lives(unseen=self._unseen)
            else:
                stale = self._retry(self._generation) != self.manifest.generation
            if stale:
                self._look_again()
            if self._source.live:
                self._retry(self._go_on)
        if priorities:
            self.epochs.note_deleted()

    @property
    def settings(self) -> ReadSettings:
        """Settings of the rows, as the writer has them now."""
        return _FollowedSettings(self, self._read_specs)

    def _read_specs(self) -> str:
        with self.lock:
            if self._closed:
                raise build_closed_error()
            specs = self._retry(lambda: Manifest.load(self.disk, self.path)).specs
            self._describe(dataclasses.replace(self.description, specs=specs))
        return specs

    def _generation(self) -> int:
        return Manifest.load(self.disk, self.path).generation

    def _go_on(self) -> None:
        """Update episodes to the readable rows."""
        view = self._watch.look()
        if view is None or self._source.columns is None:
            return
        if view.last > view.retired:
            self._look_further(view.last)
        with self.locks.episodes:
            tail = self._tail
            if tail is None or not tail.go_on(view.last):
                self._tail = None
                tail = LiveTail(self, view.last, self._episode_rows)
            self._tail = tail
            self._adopt(
                dataclasses.replace(
                    self._state,
                    episodes=tail.table,
                    log=_FollowedNotes(tail.log_bytes),
                    write_count=tail.state.write_count,
                    content=tail.state.content,
                    index_floor=tail.state.index_floor,
                )
            )
            self.priorities.note_largest(tail.state.max_priority)

    def _episode_rows(self, first_id: int, count: int) -> tuple[IntArray, IntArray] | None:
        """Return episodes and steps of a run of rows, without rows that were overwritten meanwhile."""
        columns = self._source.columns
        found = (
            None if columns is None else episode_rows(columns, Overlay(), self.geometry.runs(first_id, count))
        )
        view = self._watch.look()
        if found is None or view is None or self.geometry.slots is None:
            return found
        gone = max(0, min(count, view.horizon - self.geometry.slots - (first_id - 1)))
        return found[0][gone:], found[1][gone:]

    # -- readable rows -----------------------------------------------------------------------------

    def _current(self) -> _Source:
        """Return the place from which rows are read; determine it again if STATE has changed."""
        for _ in range(_LOOKS):
            if self._source.holds(self._watch.look()):
                break
            self._look_again()
        return self._source

    @property
    def stored(self) -> Window:
        """The ids that can be read now."""
        if self._closed or not self._current().live:
            return self._state.stored
        view = self._watch.look()
        return self._state.stored if view is None else self._find_stored(view, view.last)

    @property
    def window(self) -> Window:
        """The ids that samplers, `len` and indices see."""
        stored = self.stored  # first: it may find another writer, and thus another window
        return stored.newest(self.description.window_rows)

    @property
    def query_window(self) -> Window:
        """The ids that SQL sees: readable rows whose episodes are known."""
        view, tail = self._watch.look(), self._tail
        if not self._source.live or view is None or tail is None:
            return self._state.stored
        return self._find_stored(view, min(view.last, tail.state.last))

    def _find_stored(self, view: StateView, last: int) -> Window:
        if last > max(self._known, view.retired):  # exclude ids that were never written
            self._look_further(last)
        if view.splits:
            self.epochs.has_splits = True
        low = view.retired
        if self.capacity is not None:
            low = max(low, last - self.capacity, view.horizon - self.capacity - self.geometry.spare)
        return Window(min(low, last), last, self.manifest.deleted)

    def _look_further(self, last: int) -> None:
        """Open the files for the ids up to `last`."""
        with self.lock:
            columns = self._source.columns
            if columns is not None and last > self._known:
                before = columns.ready
                columns.look(self._slots_of(last))
                columns.look_to(last)
                if columns.ready != before:
                    overlay, slots = self._source.overlay, self._slots_of(last)
                    self.priorities.show(_priorities(columns, overlay, slots))
                self._known = last

    @property
    def last(self) -> int:
        """The newest id that can be read."""
        return self.stored.last

    def intact(self, ids: IntArray) -> bool:
        """Return whether no slot of these ids has been overwritten by a later row.

        `ids`: shape `(n,)`, int64.
        """
        source, view = self._source, self._watch.look()
        if not source.holds(view):
            return False
        if not source.live or view is None or not ids.size:
            return True
        if self.geometry.depth is None:
            return int(ids.min()) > view.retired
        return int(ids.min()) > view.horizon - self.geometry.depth

    # -- reading ---------------------------------------------------------------------------------

    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> list[Array]:
        """Copy rows out. Call `intact` afterwards to check that none was overwritten meanwhile.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            places: Positions of the fields to read; None: all.

        Returns:
            One array per field. Shapes `(n, *row shape)`.

        Raises:
            StateError: The writer has been changing these rows for a second.
            CorruptionError: The rows are in a damaged file.
        """
        slots = self.geometry.slot_of(ids)
        due = 0.0
        while True:
            watch, live = self._watch, self._source.live
            before = watch.change
            columns = self.take(slots, places)
            if not live or not watch.is_touched(slots, before):
                return columns
            now = time.monotonic()
            due = due or now + tuning.CHANGE_SECONDS
            if now > due:
                self._look_again()  # the writer may have died during the change
                if self._source.live:
                    raise StateError(f"the writer of {self.path} is changing these rows", hint="try again")
            time.sleep(_PAUSE_SECONDS)

    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Copy rows out by slot, whichever rows are in the slots; see `ReadView.take`.

        Returns:
            One array per column. Shapes `(n, *row shape)`.

        Raises:
            StateError: The store has no rows yet.
        """
        source = self._source
        if source.columns is None:
            raise StateError("the store has no rows yet", hint="wait until its writer has extended it")
        group = source.columns
        wanted = range(len(group.columns) - len(ROW_FIELDS)) if places is None else places
        return source.overlay.read_rows(group, slots, wanted)

    def sizes_of(self, ids: IntArray) -> IntArray:
        """Return the bytes of rows in variable-length fields. Shapes `(n,)`."""
        columns = self._source.columns
        if columns is None:
            return np.zeros(ids.size, np.int64)
        return columns.sizes(self.geometry.slot_of(ids))

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields that cannot be viewed for all rows."""
        columns = self._source.columns
        return frozenset() if columns is None else columns.unviewed_places

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying: shapes `(m, *row shape)`; see `ReadView.views`."""
        source = self._source
        if source.columns is None:
            return [[] for _ in places]
        runs = self.geometry.runs(first_id, count)
        columns = source.columns.columns
        found: list[list[Array]] = []
        for place in places:
            parts: list[Array] = []
            for slot, _, n in runs:
                parts += source.overlay.parts(place, columns[place], slot, n)
            found.append(parts)
        return found

    @property
    def owner(self) -> Owner | None:
        """The process that writes to the store; None: no process does."""
        return read_owner(self.disk, self.path / LOCK) if self._source.live else None

    # -- the writer's side ---------------------------------------------------------------------------

    def writer(self) -> NoReturn:
        """Raise an error: this object is read-only.

        Raises:
            StateError: Always; the message says who may write.
        """
        if self._closed:
            raise build_closed_error()
        raise StateError(
            f"{self.path} {self._origin.reason}",
            hint=self._origin.advice,
        )

    # -- closing -----------------------------------------------------------------------------------

    def more_stats(self) -> dict[str, Any]:
        """Return path and generation, whether there is a writer, and which files are damaged."""
        return {
            "path": str(self.path),
            "generation": self.manifest.generation,
            "live": self._source.live,
            "damaged": [] if self._source.columns is None else self._source.columns.damaged,
            "recovered": self.counters.recovered,
            "write_keys": None,  # only a writer reports them
        }

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        with self.lock:
            self._note_closed()
            self._source.close()
            self._source = _Source()
            self._adopt(dataclasses.replace(self._state, episodes=EpisodeTable()))
            self._watch.close()
            if self._tail is not None:
                self._tail.close()
                self._tail = None


def _log_bytes(disk: Disk, path: Path, length: int, entries: Iterable[LogEntry]) -> bytes:
    """Return the first `length` bytes of episodes.log and those of `entries`."""
    return read_bytes(disk, path / LOG, length) + b"".join([entry.pack() for entry in entries])


def _priorities(columns: ReadColumns, overlay: Overlay, slots: int) -> Array:
    """Return the priorities by slot, without copying them if possible."""
    column = columns.row_fields[-1]
    if not column.damaged and not overlay:
        # The column is mapped only up to the last row: that part has no holes, and shows the values that the
        # writer sets.
        return column.part(0, column.ready)
    values = np.ones(max(column.ready, slots), np.float32)
    for number in range(-(-column.ready // column.rows)):
        if number not in column.damaged:
            start = number * column.rows
            values[start : start + column.rows] = column.copy(start, column.rows)
    overlay.lay_onto(len(columns.columns) - 1, values)
    return values
