"""What every buffer is beside its two data paths: an open store, to flush, dump, query and close.

Buffers are built on it. It hands a forked child, or a copy in another process, a follower in the place of
the writer's storage. It never draws and never takes in rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from expstore.buffers.domain_checks import row_text, specs_of
from expstore.buffers.episodes import Episodes
from expstore.buffers.retention import Retention, retention_of
from expstore.core.retention_policy import Retain
from expstore.disk.local_path import local_path
from expstore.episodes.annotations import merge_info, pack_info
from expstore.errors import StateError
from expstore.schema.schema import Schema
from expstore.sql.sync import Catalog
from expstore.storages.base import Hook
from expstore.storages.capabilities import GivenUp
from expstore.storages.episode_lookup import check_episode
from expstore.storages.follower import Origin
from expstore.storages.read_view import ReadView
from expstore.storages.sessions import end_sessions
from expstore.storages.snapshots.catalog import OWN_FOLDER, Version, find_version
from expstore.storages.snapshots.create import dump
from expstore.storages.stats import describe, meta_of

if TYPE_CHECKING:
    from expstore.specs import Composite
    from expstore.sql.index import Result

__all__ = ["StoreHandle"]


class StoreHandle:
    """Hold a storage open.

    Threads: `flush`, `dumps` and `sql` may run beside `extend` and `sample`. Processes: a forked or
    pickled handle follows the store that its parent writes. Crashes: as the storage promises.

    Args:
        storage: What is held.
    """

    #: Attributes that belong to one storage in one process; a copy, and new content, begin without them.
    _bound: ClassVar[tuple[str, ...]] = ()

    def __init__(self, storage: ReadView) -> None:
        self._storage = storage
        self._origin = Origin.of(storage)
        storage.index.use(self._catalog)
        storage.holders.add(self)
        _handles.add(self)
        self._retain_on()

    def _renewed(self, storage: ReadView) -> None:
        """Be told by a storage that it has another content: what was made for the former one is forgotten."""
        if self.__dict__.get("_storage") is storage:
            self._attached(storage)

    def _attached(self, storage: ReadView) -> None:
        """Be told of a storage that is there from now on, or whose content is another one."""

    def _hold(self, storage: ReadView) -> None:
        """Hold another storage from now on; after an error the one before."""
        former = self._storage, self._origin
        self._let_retention_go()
        self.__dict__.pop("_catalog", None)
        self._storage, self._origin = storage, Origin.of(storage)
        try:
            storage.index.use(self._catalog)
            storage.holders.add(self)
            self._attached(storage)
            self._retain_on()
        except BaseException:
            self.__dict__.pop("_catalog", None)
            self._storage, self._origin = former
            self._storage.index.use(self._catalog)
            self._attached(self._storage)
            self._retain_on()
            raise

    # -- what a fork and a copy in another process make anew, when first needed ------------------

    @cached_property
    def _storage(self) -> ReadView:
        if self._origin is None:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        storage = self.__dict__["_storage"] = self._origin.follow()
        try:
            storage.index.use(self._catalog)
            self._attached(storage)
        except BaseException:
            self.__dict__.pop("_storage", None)
            self.__dict__.pop("_catalog", None)
            storage.close()
            raise
        return storage

    @cached_property
    def _catalog(self) -> Catalog:
        known = (
            self._storage.index.catalog
        )  # one tells the storage what the index has: a second one would lack it
        return known if isinstance(known, Catalog) else Catalog(self._storage)

    @cached_property
    def _retention(self) -> Retention:
        return retention_of(self._storage, self._catalog)

    def _retain_on(self) -> None:
        """Apply the store's policy in the background, if it has one."""
        storage = self._storage
        if storage.can_write and self.retained is not None:
            self._retention.start()

    def _let_retention_go(self) -> None:
        retention = self.__dict__.pop("_retention", None)
        if retention is not None:
            retention.stop()

    def _unbind(self) -> None:
        for name in self._bound:
            self.__dict__.pop(name, None)

    def _rest(self) -> None:
        """Have no thread of the handle's own at work until `_go_on`: this one is about to fork."""

    def _go_on(self) -> None:
        """Let threads work again."""

    def _part(self) -> None:
        """Let go, in a forked child, of what belongs to the parent."""
        self._unbind()
        held = self.__dict__
        storage = held.get("_storage")
        if self._origin is not None and (storage is None or not storage.closed):
            self._origin = self._origin.in_fork()
            # Kept, not used: to free DuckDB's memory here could reach the parent's file.
            self._parents = (
                held.pop("_storage", None),
                held.pop("_catalog", None),
                held.pop("_retention", None),
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: to follow the store, or, of rows in RAM, to have them as well.

        Raises:
            StateError: The store is closed.
        """
        kept = self.__dict__.get("_storage")
        if self._origin is None and (kept is None or kept.closed):
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        if kept is not None and kept.can_write:
            kept.drain()  # the copy is to see all that was written
        own = {"_storage", "_catalog", "_retention", "_parents", "_parents_sampler", *self._bound}
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        if self._origin is None:
            return state | {"_storage": kept}
        return state | {"_origin": self._origin.elsewhere()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned; a store on disk is opened when it is first needed."""
        self.__dict__.update(state)
        if "_storage" in state:
            self._storage.index.use(self._catalog)
            self._attached(self._storage)
        _handles.add(self)

    # -- the whole store -------------------------------------------------------------------------

    def empty(self) -> None:
        """Forget all rows; ids and episode ids go on, indices begin at 0 in a ring."""
        self._storage.writer().clear()

    def flush(self) -> None:
        """Bring everything to the disk: rows, priorities and the number of the next draw.

        Raises:
            StorageError: The disk failed; the store must be opened again.
        """
        self._storage.writer().sync()

    def refresh(self) -> None:
        """Bring what goes with the rows that another process has written; does nothing in the writer itself.

        Rows show by themselves while it writes, those of small batches (up to 8 rows of 16 KiB together)
        within 0.1 s: they are not waited for. This brings episodes, and, after the writer has stopped, its
        last rows.

        Raises:
            StorageError: The store cannot be read.
        """
        self._storage.follow(priorities=True)

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a version: the store as it is now, complete and closed, in `path`/vNNNN.

        Others go on adding and sampling; who would overwrite or change a row that is not copied yet
        waits. What has not changed since the version before is shared with it (hard links). A version is
        there whole or not at all, after any crash.

        Args:
            path: A folder for versions; made if it is missing.
            keep: How many versions remain; those with a tag always do.

        Returns:
            What was made: number, rows, bytes.

        Raises:
            SnapshotError: The folder holds something else.
            LockedError: Somebody else makes a version there just now.
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed or is full; versions that were there are as they were.

        Example:
            >>> rb.dumps("backup")
            >>> expstore.open("backup").sample(32)
        """
        return dump(self._storage.writer(), path, keep=keep, sampler=self._sampler_settings())

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Do as `dumps`."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Do as `dumps`."""
        return self.dumps(path, keep=keep)

    def tag(self, name: str, path: str | Path | None = None) -> Version:
        """Make a version with a name, which is kept until you remove its folder.

        Args:
            name: 1 to 100 letters, digits or `. _ -`; no number.
            path: As for `dumps`; None: `versions/` inside the store's folder, where
                `expstore.open(store, version=name)` finds it.

        Raises:
            SnapshotError: There is a version of this name.
            StateError: The store has no folder; otherwise as `dumps`.
        """
        folder = None if self._storage.manifest is None else self._storage.path
        if path is None and folder is None:
            raise StateError("this store has no folder of its own", hint="say where: tag(name, path)")
        place = path or Path(folder or ".") / OWN_FOLDER
        return dump(self._storage.writer(), place, tag=name, sampler=self._sampler_settings())

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Put a version's content in the place of this store's: all of it or, after any crash, nothing.

        Rows, priorities, counts, episodes and seed are then the version's, and so are `alpha` and `beta` of a
        sampler by priority; the next batches are those that would have come; the capacity stays. Ids and
        episode ids go on above those of both (where there never were rows they stay), indices are the same if
        the capacities are. Versions in the folder stay.
        Fields that came or went since a version of this very store was made are as they were then.

        Args:
            path: What `dumps` was given, or a store that has tagged versions.
            version: Number or tag; None: the newest.

        Raises:
            SnapshotError: There is no such version; the message lists those that there are.
            SchemaError: This store has other fields.
            CorruptionError: The version is damaged.
            StateError: The store is closed, or open for reading only.
        """
        storage = self._storage.writer()
        folder = find_version(storage.disk, local_path(path), version)
        storage.snapshots.restore(folder)
        self._set_sampler(Version.load(storage.disk, folder).sampler)
        storage.holders.tell(storage)

    def _sampler_settings(self) -> dict[str, Any]:
        """Return what a version keeps of the sampler."""
        return {}

    def _set_sampler(self, settings: Mapping[str, Any]) -> None:
        """Set what a version has kept of the sampler."""

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Do as `loads`."""
        self.loads(path, version)

    def register_save_hook(self, hook: Hook) -> None:
        """Have the storage's `state_dict` keep what a hook returns; see `PortableStorage`."""
        self._storage.writer().register_save_hook(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Have the storage's `load_state_dict` take what a hook returns; see `PortableStorage`."""
        self._storage.writer().register_load_hook(hook)

    def close(self) -> None:
        """Flush, bring the index up to date for other programs, let others open the store."""
        if "_storage" not in self.__dict__:
            self._origin = None  # a follower that never looked
            return
        self._let_retention_go()
        if self._storage.closed:
            return
        try:
            with contextlib.suppress(StateError):  # poisoned, or a follower
                self._storage.writer()  # after an interruption it reads the journal again
            if self._storage.can_write:
                end_sessions(self._storage, [self._storage.episodes.session])
                self._catalog.close()
        finally:
            self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sql(self, query: str, params: Sequence[object] | Mapping[str, object] | None = None) -> Result:
        """Run one read-only SELECT over transitions, episodes, fragments, sources, priorities, commits.

        You read your own writes. Nested keys are written as in `next.reward`. A store with an archive has
        `history`, too: `transitions` and all rows that have left them, with a column `_archived`.

        Args:
            query: The statement.
            params: Values for `?` (a sequence) or `$name` (a mapping).

        Returns:
            The rows: `df()`, `arrow()`, `pl()`, `fetchall()`, `to_parquet(file)`.

        Raises:
            QueryError: It is not one SELECT, or DuckDB refuses it.
            StateError: The store is closed; or, open for reading only, the writer has for two seconds not
                paused from overwriting rows that the query reads.
        """
        return self._catalog.query(query, params)

    @property
    def episodes(self) -> Episodes:
        """Query episodes by calling it; its methods end open episodes, or adopt those of an earlier session.

        Example:
            >>> rb.episodes("length > $n", order_by='"return" DESC', limit=10, params={"n": 100})
            >>> rb.episodes.end("robot-1")
        """
        return Episodes(self._storage, self._catalog)

    def annotate(self, episode_id: int, /, **info: Any) -> dict[str, Any]:
        """Note facts about an episode: open, ended, or with rows that have left.

        They stand in the column `info` of the relation `episodes`. A call that has returned survives the
        process, and the machine after the next `flush`.

        Args:
            episode_id: Which one; samples and `sql` say it.
            info: Text, numbers, booleans, lists and dicts of them: each takes the place of the fact of its
                name; None removes that.

        Returns:
            All that is noted about the episode now.

        Raises:
            NotFoundError: There never was such an episode.
            SchemaError: JSON has no form for a value; nothing was changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> rb.annotate(3, success=True, operator="ada")
            {'success': True, 'operator': 'ada'}
        """
        storage, changes = self._storage, pack_info(info)
        with storage.lock:
            writer = storage.writer()
            entry = self._catalog.find_episode(check_episode(episode_id))
            text = merge_info(entry.text, changes)
            if text != entry.text:
                writer.annotate(dataclasses.replace(entry, text=text))
        return dict(json.loads(text)) if text else {}

    def retain(self, policy: Retain | Mapping[str, Any] | None) -> None:
        """Say which rows are to stay from now on; None: all that are there.

        The policy is kept in the store, and applied every few seconds while it is open for writing.

        Args:
            policy: A `Retain`, or a dict of its parts.

        Raises:
            ValueError: It is no policy.
            QueryError: The rows have not what its condition speaks of; nothing was changed.
            StateError: The store is a ring or in RAM, closed, or open for reading only.

        Example:
            >>> rb.retain({"bytes": "10GB", "where": "episode.return > 0"})
        """
        wanted, retention = Retain() if policy is None else Retain.of(policy), self._retention
        retention.check(wanted)
        retention.keep(wanted)
        self._retain_on()

    @property
    def retained(self) -> Retain | None:
        """Which rows are to stay; None: all of them."""
        manifest = self._storage.manifest
        return Retain(**manifest.retain) if manifest is not None and manifest.retain else None

    def apply_retention(self, *, dry_run: bool = False) -> GivenUp:
        """Give up now the rows that the store's policy does not keep.

        Whole episodes leave; their facts stay in the relation `episodes`, ids never come again. Rows are
        gone for good when this returns, and after a crash before that perhaps, or none of them.

        Args:
            dry_run: Only say what would leave.

        Returns:
            How many episodes and rows have left, and how much less space the columns take.

        Raises:
            QueryError: The condition cannot be computed.
            StateError: The store has no policy, is closed, or open for reading only.
            StorageError: The disk failed.
        """
        policy, retention = self.retained, self._retention
        if policy is None:
            raise StateError("the store has no policy", hint="retain() one first")
        return retention.apply(policy, dry_run=dry_run)

    def stats(self) -> dict[str, Any]:
        """Return facts about the store that JSON can keep."""
        self._refreshed()
        return describe(self._storage) | self._storage.more_stats()

    @property
    def storage(self) -> ReadView:
        """Where the rows are."""
        return self._storage

    @property
    def schema(self) -> Schema | None:
        """The fields; None before the first rows."""
        return self._storage.schema

    @property
    def specs(self) -> Composite | None:
        """What values the fields may have, as far as somebody has said; a copy. None: nobody has."""
        return specs_of(self._storage)

    def set_specs(self, specs: Composite | None) -> None:
        """Say what values the fields of a row may have; None: nothing is known of them any more.

        Rows that are there are not looked at: only that they have these fields, with these dtypes and shapes.
        Later rows with others are refused; values are looked at by `extend(validate="domain")`. The specs
        stay with the store, like the schema.

        Args:
            specs: Of some or all fields, as nested as these; without batch dims.

        Raises:
            SchemaError: The rows have other fields, or text cannot keep the specs; nothing was changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> rb.set_specs(Composite(action=Categorical(2), next=Composite(reward=Unbounded((1,)))))
        """
        self._storage.writer().settings.describe_fields(row_text(specs))

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""
        return self._refreshed().write_count

    @property
    def initialized(self) -> bool:
        """True: nothing is made later than the buffer itself."""
        return True

    @property
    def meta(self) -> dict[str, Any]:
        """The user's own facts, given when the store was made."""
        return meta_of(self._storage)

    @property
    def recovered(self) -> str | None:
        """One line that says what opening recovered after an unclean stop; None otherwise."""
        return self._storage.counters.recovered

    def _refreshed(self) -> ReadView:
        storage = self._storage
        if not storage.closed:
            storage.follow()
        return storage


_handles: weakref.WeakSet[StoreHandle] = weakref.WeakSet()


def _before_fork() -> None:
    for handle in list(_handles):
        handle._rest()


def _after_fork() -> None:
    for handle in list(_handles):
        handle._go_on()


def _part_in_child() -> None:
    # What the parent has left for the collector may belong to DuckDB, whose threads are not here.
    gc.freeze()
    for handle in list(_handles):
        handle._part()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_part_in_child)
