"""Append the rows that leave a ring to a second store, its archive: each row once, in the order of ids.

Used by the storages on disk; `expstore.storages.engine.archive_before_evict` decides when rows are copied. An
archived row keeps its episode, step and time; the field `archived.id` has the id of the row in the ring. Only
`with_left` reads a ring: it finds the rows that have left the window but are still in the columns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from expstore.core.geometry import RingGeometry
from expstore.core.id_set import IdSet
from expstore.core.lock_order import LockOrder
from expstore.core.values import Array, IntArray, Key, Window, key_name
from expstore.disk.files import Disk
from expstore.episodes.fragments import find_fragments
from expstore.episodes.segmentation import OPEN, TERMINATED, TRUNCATED, RowFacts
from expstore.episodes.sessions import End, NewSource, Resume, SessionKey
from expstore.episodes.table import HAS_TRAJECTORY, LAST, NEW, NO_REWARD, Assignment, Segment
from expstore.errors import SchemaError, StateError
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Field, Schema
from expstore.storages.batch import Rows, now_us
from expstore.storages.engine.open_settings import Settings
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.read_view import ReadView, keys_for
from expstore.storages.stats import meta_of

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store

__all__ = [
    "ARCHIVED_ID",
    "Archive",
    "Beside",
    "Going",
    "Left",
    "archive_path",
    "archive_trouble",
    "to_archive_schema",
    "with_left",
]

#: The field with the id of a row in its ring.
ARCHIVED_ID: Key = ("archived", "id")
#: Keys of the archive's `meta`: the ring's uuid; the first id of rows that are archived before the ring has
#: them; the newest id that had left the ring when the archive was made; the ring's generation.
_OF, _PENDING, _AFTER, _GENERATION = "archive_of", "pending", "after", "generation"
#: The only source of an archive's episodes: they are distinguished by their ids.
_SOURCE = "archive"
#: Episodes outlive openings of the ring, so their session belongs to no opening.
_SESSION = SessionKey("archive", remote=True)


class Ring(Protocol):
    """The part of a ring that `with_left` reads."""

    @property
    def given_up(self) -> int:
        """The newest id that was removed other than by age."""

    @property
    def schema(self) -> Schema | None:
        """The fields; None: no rows were written yet."""

    @property
    def geometry(self) -> RingGeometry:
        """How ids, slots and indices correspond."""

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids."""


class Left:
    """Rows that leave a ring, with the values of its columns.

    Args:
        ids: Row ids, ascending. Shape `(n,)`.
        columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
        episodes: Episode id per row. Shape `(n,)`.
        steps: Step per row. Shape `(n,)`.
        times: When each row was written, microseconds since 1970. Shape `(n,)`.
    """

    __slots__ = ("columns", "episodes", "ids", "steps", "times")

    def __init__(
        self,
        ids: IntArray,
        columns: Sequence[Array],
        episodes: IntArray,
        steps: IntArray,
        times: IntArray,
    ) -> None:
        self.ids, self.columns = ids, columns
        self.episodes, self.steps, self.times = episodes, steps, times


#: Gets episode ids and returns a flag per episode: whether it has, or may still get, rows newer than the
#: leaving ones. Both have the shape `(n,)`.
Going = Callable[[IntArray], Array]


class Archive:
    """Append rows that leave a ring.

    Threads: one thread appends at a time and holds `lock`; any number read. Processes: only the ring's writer
    appends. Crashes: a batch of rows is archived completely or not at all; `settled` says which rows survive
    a power failure. The archive's storage is opened and closed with the ring. After an opening, copying
    continues after the rows that the archive already has.

    Args:
        storage: The storage with the archived rows.
        order: The lock order of the ring.
        made: Whether the archive was created by this opening.
    """

    def __init__(self, storage: Store, order: LockOrder, *, made: bool = False) -> None:
        self.storage = storage
        self._made = made
        self.lock = order.rank_lock("archive", threading.Lock())
        self._content = -1
        #: Every row of the ring up to this id is archived, was never written, or was removed from the ring.
        self.through = 0
        #: As `through`, but only counting archived rows that survive a power failure.
        self.settled = 0
        self._look()

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: Path,
        ring: Manifest,
        *,
        order: LockOrder,
        open_storage: Callable[..., Store],
        segment_bytes: int | None = None,
    ) -> Archive:
        """Open a ring's archive; create it if it does not exist.

        Args:
            disk: The disk on which files are accessed.
            path: The archive's folder.
            ring: The ring's manifest.
            order: The lock order of the ring.
            open_storage: Opens the archive's storage, called with the arguments of `Store`; the ring closes
                the storage.
            segment_bytes: Length of a segment of the archive's journal, bytes; None: the library's default.

        Raises:
            LockedError: Another process has the archive open.
            StateError: The path has something else than an archive, or the archive of another store.
            CorruptionError: The archive is damaged.
        """
        settings = Settings(storage="arrow", on_sigterm="ignore")
        made = not disk.exists(path / MANIFEST)
        if not made:
            trouble = archive_trouble(path, Manifest.load(disk, path), ring)
            if trouble:
                raise StateError(
                    trouble,
                    kind="mismatch",
                    hint="pass archive= a path that does not exist yet",
                )
        else:
            settings = replace(
                settings,
                seed=ring.seed,
                layout=ColumnLayout(**ring.layout),
                compression=ring.compression,
                meta={_OF: ring.uuid},
                **ring.key_settings,
                flatten=True,
            )
        storage = open_storage(path, settings=settings, disk=disk, segment_bytes=segment_bytes)
        try:
            return cls(storage, order, made=made)
        except BaseException:
            storage.close()
            raise

    def _look(self) -> None:
        """Read which rows are archived, at first and whenever the storage was opened again."""
        storage = self.storage
        if self._content != storage.epochs.content:
            self._content = storage.epochs.content
            self.through = self.settled = newest_id(storage, storage.window)

    def check_fields(self, schema: Schema) -> None:
        """Raise StateError if the ring's rows have other fields than the archived rows."""
        own = self.storage.schema
        if own is not None and own.fields != to_archive_schema(schema).fields:
            raise StateError(
                f"the archive {self.storage.path} has {own!r}, the store {schema!r}",
                kind="mismatch",
                hint="pass archive= another path, or False",
            )

    # -- appending rows ------------------------------------------------------------------------------

    def append(self, left: Left, keys: Keys, schema: Schema, going: Going, *, sure: bool) -> None:
        """Append rows that are all newer than the archived ones. The caller holds `lock`.

        Args:
            left: The rows.
            keys: The fields that mark trajectories, ends and rewards.
            schema: The ring's fields.
            going: Returns which episodes continue after these rows.
            sure: Whether a truncated episode that does not continue is certain never to continue.

        Raises:
            StorageError: The disk failed; none of the rows were archived.
            StateError: An earlier sync of the archive has failed.
        """
        storage = self.storage
        with storage.lock:
            storage.writer()
            self._look()  # the journal may have been read again after a failure
            if int(left.ids[0]) <= self.through:
                raise StateError(f"{storage.path} already has rows up to {self.through}", hint="try again")
            if storage.schema is None:
                there = to_archive_schema(schema)
                storage.prepare(there, keys_for(storage, there))
            first, count = storage.last + 1, left.ids.size
            ids = np.arange(first, first + count)
            numbers = np.ascontiguousarray(np.stack([ids, left.episodes, left.steps, left.times]))
            known = storage.episodes.sources_named(_SOURCE, session=_SESSION)
            source = known[0] if known else storage.episodes.next_source
            new = [] if known else [NewSource(source, _SOURCE, True, *_SESSION)]
            segments = _segments(left, first, source, _Facts(left.columns, keys, schema), going, sure)
            self._reopen({segment.episode for segment in segments})
            segments = self._restart_episodes(segments)
            assignment = Assignment(segments, numbers, new)
            columns = [*left.columns, left.ids]
            storage.write(Rows(first, count, columns, assignment, int(left.times.max())))
            self.through = int(left.ids[-1])

    def _reopen(self, episodes: set[int]) -> None:
        """Reopen episodes that `end` has ended and that another session of the ring has since adopted."""
        session = self.storage.episodes.session_of(_SESSION)
        if session is not None:
            found = [one.episode for one in session.cut.values() if one.episode in episodes]
            if found or session.ended:
                self.storage.annotate(Resume(now_us(), _SESSION, episodes=tuple(found)))

    def end(self, still_open: Collection[int], *, before: int) -> None:
        """End the archived episodes that get no more rows. The caller holds `lock`.

        Args:
            still_open: Episodes of the ring that are open, or have rows that are not archived yet.
            before: The ring's next episode id. Later episodes belong to a batch that is archived before the
                ring has it.

        Raises:
            StorageError: The disk failed; no episode was ended.
        """
        storage = self.storage
        known = [one.episode for one in storage.episodes.open_entries() if one.episode < before]
        over = [episode for episode in known if episode not in still_open]
        if over:
            with storage.lock:
                storage.writer()
                storage.annotate(End(now_us(), episodes=tuple(over)))

    def _restart_episodes(self, segments: Sequence[Segment]) -> list[Segment]:
        """Restart archived episodes that continue at an earlier step because rows were deleted."""
        found, seen = list(segments), set[int]()
        for number, segment in enumerate(segments):
            if segment.episode not in seen:
                seen.add(segment.episode)
                known = self.storage.episodes.find(segment.episode)
                if known is not None and known.length != segment.step:
                    found[number] = segment._replace(flags=segment.flags | NEW)
        return found

    def pass_over(self, through: int) -> None:
        """Record that no more rows up to this id will be archived. The caller holds `lock`."""
        self.through = max(self.through, through)

    def settle(self) -> None:
        """Sync all archived rows to the disk. The caller holds `lock`.

        Raises:
            StorageError: The disk failed.
        """
        through, content = self.through, self._content
        if through > self.settled:
            self.storage.writer()
            self.storage.sync()
            if content == self.storage.epochs.content:
                self.settled = through

    @property
    def most(self) -> int:
        """The most rows per append."""
        return max(1, self.storage.geometry.spare // 2) if self.storage.schema is not None else 1024

    # -- rows that are archived before the ring has them --------------------------------------------

    def expect(self, first_id: int) -> None:
        """Record, durably, that rows from this id on are archived before the ring has them."""
        self._note({**self.storage.manifest.meta, _PENDING: first_id})

    def meet(self, ring: Manifest, former: int, window: Window, path: Path) -> None:
        """Reconcile the archive with the ring after an opening: decide which archived rows are valid.

        Args:
            ring: The ring's manifest; its generation is on the disk.
            former: The ring's generation before this opening.
            window: The ring's readable rows.
            path: The ring's folder, for the error message.

        Raises:
            StateError: The ring is an older copy of the store whose rows were archived.
        """
        storage, last = self.storage, window.last
        storage.writer()
        self._look()
        meta = dict(storage.manifest.meta)
        pending = meta.pop(_PENDING, None)
        known = former >= meta.get(_GENERATION, 0) and (pending is not None or self.through <= last)
        if known and self.through > window.low and not self._made:
            # The ring never committed their batch, or was rolled back: it may still change these rows.
            self._give_up_from(window.low + 1)
        if former < meta.get(_GENERATION, 0) or self.through > last:
            raise StateError(
                f"the archive {storage.path} is newer than {path}: it has rows up to {self.through} of it, "
                f"which ends with {last}",
                kind="mismatch",
                hint="put back the archive of that time, too, or open the store with archive=False first",
            )
        if self._made and window.low:
            meta[_AFTER] = self.through = self.settled = window.low
        self._made = False
        self._note(meta | {_GENERATION: ring.generation})

    def _give_up_from(self, first_id: int) -> None:
        """Delete the archived rows from this id of the ring on, because the ring does not have them."""
        storage = self.storage
        ids = storage.window.ids()
        (there,) = storage.read(ids, [storage.require_schema().place_of(ARCHIVED_ID)])
        storage.retention.delete_rows(IdSet.of_ids(ids[there >= first_id]))
        self._content = -1
        self._look()

    def _note(self, meta: dict[str, object]) -> None:
        with self.storage.lock:
            self.storage.writer()
            engine = self.storage.engine
            if meta != engine.manifest.meta:
                engine.save(engine.manifest.replace(meta=meta))


class _Facts:
    """Read from rows whether they end an episode, and their rewards.

    Args:
        columns: One array per field.
        keys: The fields with the ends and rewards.
        schema: The fields of `columns`.
    """

    def __init__(self, columns: Sequence[Array], keys: Keys, schema: Schema) -> None:
        self.terminated, self.truncated, self.rewards = RowFacts(schema, keys).read(columns)

    def status(self, row: int) -> int:
        """Return the status of the row's episode after the row: OPEN, TERMINATED or TRUNCATED."""
        if self.terminated is not None and self.terminated[row]:
            return TERMINATED
        return TRUNCATED if self.truncated is not None and self.truncated[row] else OPEN


def _segments(left: Left, first: int, source: int, facts: _Facts, going: Going, sure: bool) -> list[Segment]:
    """Split rows into runs of one episode each; the last run of an episode has the episode's status.

    A truncated episode stays open until `Archive.end`, because another session may still adopt it.
    """
    fragments = find_fragments(left.episodes, left.steps, np.arange(first, first + left.ids.size))
    episodes = np.unique(left.episodes)
    over = set(episodes[~going(episodes)].tolist())
    found: list[Segment] = []
    newest: dict[int, int] = {}
    for episode, step, rows, start, stride in fragments.T.tolist():
        at = start - first
        worth = 0.0 if facts.rewards is None else float(facts.rewards[at :: max(1, stride)][:rows].sum())
        flags = HAS_TRAJECTORY | (NEW if step == 0 else 0) | (NO_REWARD if facts.rewards is None else 0)
        newest[episode] = len(found)
        found.append(Segment(episode, episode, step, source, at, rows, stride, worth, OPEN, flags))
    for episode in over & newest.keys():
        segment = found[newest[episode]]
        status = facts.status(segment.start + (segment.rows - 1) * segment.stride)
        if status == TERMINATED or (sure and status == TRUNCATED):
            found[newest[episode]] = segment._replace(status=status, flags=segment.flags | LAST)
    return found


def to_archive_schema(schema: Schema) -> Schema:
    """Return the fields of a ring's archive: the ring's fields and `archived.id`.

    Raises:
        SchemaError: The ring has a field `archived.id`, or one whose name conflicts with it.
    """
    try:
        return Schema((*schema.fields, Field(ARCHIVED_ID, "int64", ())))
    except SchemaError as exc:
        raise SchemaError(
            f"an archive has a field {key_name(ARCHIVED_ID)!r} of its own: {exc.message}",
            hint="rename the field, or open the store without archive=",
        ) from exc


def archive_path(ring: Path, noted: str) -> Path:
    """Return the path of an archive that expstore.json records relative to the ring's folder."""
    return Path(os.path.normpath(ring.resolve() / noted))


def archive_trouble(path: Path, found: Manifest, ring: Manifest) -> str | None:
    """Return why a store is not the archive of a ring; None if it is."""
    owner = found.meta.get(_OF)
    if owner == ring.uuid:
        return None
    return f"{path} is {'the archive of another store' if owner else 'a store, but not an archive'}"


def newest_id(archive: ReadView, window: Window) -> int:
    """Return the newest id of the ring that is archived, or had left the ring when the archive was made."""
    if archive.schema is None or not window.rows:
        return int(meta_of(archive).get(_AFTER, 0))
    newest = window.nth(np.array([window.rows - 1]))
    (ids,) = archive.read(newest, [archive.require_schema().place_of(ARCHIVED_ID)])
    return int(ids[0])


class Beside:
    """The view that one query has of an archive.

    Args:
        archive: The archive's storage.
    """

    __slots__ = ("archive", "through", "window")

    def __init__(self, archive: ReadView) -> None:
        archive.follow()
        self.archive = archive
        self.window = archive.query_window
        #: The newest id of the ring that is archived.
        self.through = newest_id(archive, self.window)


def with_left(storage: Ring, window: Window, after: int) -> Window:
    """Extend a window backwards by the rows that have left it but are still in the ring's columns.

    Args:
        storage: The ring.
        window: The ring's readable rows.
        after: Rows up to this id are excluded.
    """
    after = max(after, storage.given_up)
    if storage.schema is None or after >= window.low:
        return replace(window, low=min(after, window.last))
    depth = storage.geometry.depth
    if depth is not None:  # earlier rows have been overwritten
        after = max(after, window.last - depth)
    place = len(storage.schema.fields)  # the column of ids shows which slots have another row than expected
    ids = np.arange(after + 1, window.low + 1)
    parts = storage.views([place], after + 1, ids.size)[0] if ids.size else []
    stored = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Window(after, window.last, window.deleted.join(IdSet.of_ids(ids[stored != ids])))
