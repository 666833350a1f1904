"""A store of its own to which the rows go that leave a ring, each once, in the order of their ids.

Used by the storages on disk: `expstore.storages.engine.archive_before_evict` says when rows are brought here.
Rows keep episode, step and time, and the id that they had in the ring in a field, `archived.id`. It reads no
ring, but for `with_left`, which finds the rows that have left and still lie there.
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
from expstore.core.id_set import Gaps
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
    "archived_schema",
    "with_left",
]

#: The field with the id that a row had in its ring.
ARCHIVED_ID: Key = ("archived", "id")
#: In the archive's `meta`: whose it is; the first id of rows that come before the ring has them; the newest
#: of those that had left when it was made; the ring's generation.
_OF, _PENDING, _AFTER, _GENERATION = "archive_of", "pending", "after", "generation"
#: The one source of an archive's episodes, which are told apart by their ids.
_SOURCE = "archive"
#: Episodes outlive openings of the ring: their session is that of no opening.
_SESSION = SessionKey("archive", remote=True)


class Ring(Protocol):
    """What `with_left` needs of a ring."""

    @property
    def given_up(self) -> int:
        """The newest id that was given up for other reasons than age."""

    @property
    def schema(self) -> Schema | None:
        """The fields; None: no rows have come yet."""

    @property
    def geometry(self) -> RingGeometry:
        """How ids, slots and indices correspond."""

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids."""


class Left:
    """Rows that leave a ring, as its columns have them.

    Args:
        ids: Ascending. Shape `(n,)`, as the others.
        columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
        episodes: Episode id per row.
        steps: Step per row.
        times: When each was written, microseconds since 1970.
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


#: Says of some episodes which have rows behind those that leave, or may get some: ids in, flags out. Shapes
#: `(n,)`.
Going = Callable[[IntArray], Array]


class Archive:
    """Append what leaves a ring.

    Threads: one brings rows at a time, who holds `lock`; others read. Processes: the ring's writer alone.
    Crashes: rows are here whole batch by batch; `settled` says which outlive a power cut. Its storage is
    opened and closed with the ring, and goes on where it was: what is here says what is still to come.

    Args:
        storage: Where the rows are.
        order: Of the locks of the ring.
        made: Whether it was made just now.
    """

    def __init__(self, storage: Store, order: LockOrder, *, made: bool = False) -> None:
        self.storage = storage
        self._made = made
        self.lock = order.ranked("archive", threading.Lock())
        self._content = -1
        #: Rows of the ring up to this id are here, or never came, or were given up there.
        self.through = 0
        #: The same of those that outlive a power cut.
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
        """Open a ring's archive, or make one.

        Args:
            disk: Where files are touched.
            path: Its folder.
            ring: What the ring is.
            order: Of its locks.
            open_storage: Opens the storage that the archive is, with the arguments of `Store`; the ring
                closes it.
            segment_bytes: Length of a segment of its journal; None: the library's own.

        Raises:
            LockedError: Somebody else has it open.
            StateError: It is something else, or another store's.
            CorruptionError: It is damaged.
        """
        settings = Settings(storage="arrow", on_sigterm="ignore")
        made = not disk.exists(path / MANIFEST)
        if not made:
            trouble = archive_trouble(path, Manifest.load(disk, path), ring)
            if trouble:
                raise StateError(
                    trouble,
                    kind="mismatch",
                    hint="give archive= a path at which there is nothing yet",
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
        """Find out which rows are here, after another opening, too."""
        storage = self.storage
        if self._content != storage.epochs.content:
            self._content = storage.epochs.content
            self.through = self.settled = newest_id(storage, storage.window)

    def check_fields(self, schema: Schema) -> None:
        """Raise StateError if the ring's rows have other fields than those that are here."""
        own = self.storage.schema
        if own is not None and own.fields != archived_schema(schema).fields:
            raise StateError(
                f"the archive {self.storage.path} has {own!r}, the store {schema!r}",
                kind="mismatch",
                hint="give archive= another path, or False",
            )

    # -- rows come -------------------------------------------------------------------------------

    def append(self, left: Left, keys: Keys, schema: Schema, going: Going, *, sure: bool) -> None:
        """Take rows, which all come behind those that are here; `lock` is held.

        Args:
            left: The rows.
            keys: Which fields say what a row is.
            schema: The ring's fields.
            going: Says which episodes go on.
            sure: Whether a truncated one that does not cannot after all.

        Raises:
            StorageError: The disk failed; none of them are here.
            StateError: A sync has failed here before.
        """
        storage = self.storage
        with storage.lock:
            storage.writer()
            self._look()  # a failure may have had its journal read again
            if int(left.ids[0]) <= self.through:
                raise StateError(f"{storage.path} has rows up to {self.through} by now", hint="try again")
            if storage.schema is None:
                there = archived_schema(schema)
                storage.prepare(there, keys_for(storage, there))
            first, count = storage.last + 1, left.ids.size
            ids = np.arange(first, first + count)
            numbers = np.ascontiguousarray(np.stack([ids, left.episodes, left.steps, left.times]))
            known = storage.episodes.sources_named(_SOURCE, session=_SESSION)
            source = known[0] if known else storage.episodes.next_source
            new = [] if known else [NewSource(source, _SOURCE, True, *_SESSION)]
            segments = _segments(left, first, source, _Facts(left.columns, keys, schema), going, sure)
            self._reopen({segment.episode for segment in segments})
            segments = self._begun_again(segments)
            assignment = Assignment(segments, numbers, new)
            columns = [*left.columns, left.ids]
            storage.write(Rows(first, count, columns, assignment, int(left.times.max())))
            self.through = int(left.ids[-1])

    def _reopen(self, episodes: set[int]) -> None:
        """Open episodes again that `end` has ended and that another session of the ring has adopted."""
        session = self.storage.episodes.session_of(_SESSION)
        if session is not None:
            found = [one.episode for one in session.cut.values() if one.episode in episodes]
            if found or session.ended:
                self.storage.annotate(Resume(now_us(), _SESSION, episodes=tuple(found)))

    def end(self, still_open: Collection[int], *, before: int) -> None:
        """End the episodes of which no row comes any more; `lock` is held.

        Args:
            still_open: Episodes of the ring that are open, or have rows that are not here.
            before: The ring's next episode. Later ones are of a batch that comes here first.

        Raises:
            StorageError: The disk failed; none is ended.
        """
        storage = self.storage
        known = [one.episode for one in storage.episodes.open_entries() if one.episode < before]
        over = [episode for episode in known if episode not in still_open]
        if over:
            with storage.lock:
                storage.writer()
                storage.annotate(End(now_us(), episodes=tuple(over)))

    def _begun_again(self, segments: Sequence[Segment]) -> list[Segment]:
        """Begin anew episodes of which rows were given up here: they go on at an earlier step."""
        found, seen = list(segments), set[int]()
        for number, segment in enumerate(segments):
            if segment.episode not in seen:
                seen.add(segment.episode)
                known = self.storage.episodes.find(segment.episode)
                if known is not None and known.length != segment.step:
                    found[number] = segment._replace(flags=segment.flags | NEW)
        return found

    def pass_over(self, through: int) -> None:
        """Note that there are no other rows up to this id; `lock` is held."""
        self.through = max(self.through, through)

    def settle(self) -> None:
        """Bring all rows that are here to the disk; `lock` is held.

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
        """How many rows may come at once."""
        return max(1, self.storage.geometry.spare // 2) if self.storage.schema is not None else 1024

    # -- rows that come before the ring has them ----------------------------------------------------

    def expect(self, first_id: int) -> None:
        """Note that rows from this id on come before the ring has them; on the disk when this returns."""
        self._note({**self.storage.manifest.meta, _PENDING: first_id})

    def meet(self, ring: Manifest, former: int, window: Window, path: Path) -> None:
        """Agree with the ring, which has been opened, about which rows there are.

        Args:
            ring: What the ring is; its generation is on the disk.
            former: Its generation before this opening.
            window: Its rows.
            path: Its folder, for a message.

        Raises:
            StateError: The ring is an older copy of the one whose rows are here.
        """
        storage, last = self.storage, window.last
        storage.writer()
        self._look()
        meta = dict(storage.manifest.meta)
        pending = meta.pop(_PENDING, None)
        known = former >= meta.get(_GENERATION, 0) and (pending is not None or self.through <= last)
        if known and self.through > window.low and not self._made:
            # They came for a batch that never was, or the ring has gone back: they may be changed there yet.
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
        """Give up the rows from this id of the ring on, which it does not have after all."""
        storage = self.storage
        ids = storage.window.ids()
        (there,) = storage.read(ids, [storage.require_schema().place_of(ARCHIVED_ID)])
        storage.retention.delete_rows(Gaps.of_ids(ids[there >= first_id]))
        self._content = -1
        self._look()

    def _note(self, meta: dict[str, object]) -> None:
        with self.storage.lock:
            self.storage.writer()
            engine = self.storage.engine
            if meta != engine.manifest.meta:
                engine.save(engine.manifest.replace(meta=meta))


class _Facts:
    """Say of rows whether they end an episode, and what they are worth.

    Args:
        columns: Of the rows.
        keys: Which fields say so.
        schema: Of the columns.
    """

    def __init__(self, columns: Sequence[Array], keys: Keys, schema: Schema) -> None:
        self.terminated, self.truncated, self.rewards = RowFacts(schema, keys).read(columns)

    def status(self, row: int) -> int:
        """Return how an episode stands behind a row."""
        if self.terminated is not None and self.terminated[row]:
            return TERMINATED
        return TRUNCATED if self.truncated is not None and self.truncated[row] else OPEN


def _segments(left: Left, first: int, source: int, facts: _Facts, going: Going, sure: bool) -> list[Segment]:
    """Cut rows into runs of an episode each; the last one says how its episode ended.

    An episode that was cut stays open until `Archive.end`: another session may still adopt it.
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


def archived_schema(schema: Schema) -> Schema:
    """Return the fields of a ring's archive: the same, and the id in the ring.

    Raises:
        SchemaError: The ring has such a field, or one in its way.
    """
    try:
        return Schema((*schema.fields, Field(ARCHIVED_ID, "int64", ())))
    except SchemaError as exc:
        raise SchemaError(
            f"an archive has a field {key_name(ARCHIVED_ID)!r} of its own: {exc.message}",
            hint="rename the field, or open the store without archive=",
        ) from exc


def archive_path(ring: Path, noted: str) -> Path:
    """Return where an archive lies that expstore.json notes as seen from the ring's folder."""
    return Path(os.path.normpath(ring.resolve() / noted))


def archive_trouble(path: Path, found: Manifest, ring: Manifest) -> str | None:
    """Return why a store is not the archive of a ring; None: it is."""
    owner = found.meta.get(_OF)
    if owner == ring.uuid:
        return None
    return f"{path} is {'the archive of another store' if owner else 'a store, and no archive'}"


def newest_id(archive: ReadView, window: Window) -> int:
    """Return the newest id of a ring's row that is in an archive, or that had left when there was none."""
    if archive.schema is None or not window.rows:
        return int(meta_of(archive).get(_AFTER, 0))
    newest = window.nth(np.array([window.rows - 1]))
    (ids,) = archive.read(newest, [archive.require_schema().place_of(ARCHIVED_ID)])
    return int(ids[0])


class Beside:
    """Hold an archive as one query sees it.

    Args:
        archive: Its storage.
    """

    __slots__ = ("archive", "through", "window")

    def __init__(self, archive: ReadView) -> None:
        archive.follow()
        self.archive = archive
        self.window = archive.query_window
        #: The newest id of the ring that is there.
        self.through = newest_id(archive, self.window)


def with_left(storage: Ring, window: Window, after: int) -> Window:
    """Return a window that begins before another one: with rows that have left it and still lie in the ring.

    Args:
        storage: The ring.
        window: What can be read of it.
        after: Rows up to this id are not wanted.
    """
    after = max(after, storage.given_up)
    if storage.schema is None or after >= window.low:
        return replace(window, low=min(after, window.last))
    depth = storage.geometry.depth
    if depth is not None:  # what lies before has been overwritten
        after = max(after, window.last - depth)
    place = len(storage.schema.fields)  # of the ids in the columns: there may be none of that number
    ids = np.arange(after + 1, window.low + 1)
    parts = storage.views([place], after + 1, ids.size)[0] if ids.size else []
    stored = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Window(after, window.last, window.gaps.joined(Gaps.of_ids(ids[stored != ids])))
