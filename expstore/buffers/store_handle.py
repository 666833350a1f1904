"""An open store in this process: its storage, its SQL catalog, its retention, and what becomes of it.

A buffer holds one handle. After a fork, and in a pickled copy, the handle opens a follower of the store when
it is first used. It never draws and never appends rows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from dataclasses import dataclass
from enum import Enum

from expstore.buffers.retention import PolicyRunner, load_policy, make_runner
from expstore.errors import StateError
from expstore.sql.sync import Catalog
from expstore.storages.follower import Origin
from expstore.storages.read_view import ReadView, build_closed_error
from expstore.storages.sessions import end_sessions

__all__ = ["Life", "StoreHandle", "StorePart"]


class Life(Enum):
    """Say where a handle is in its life."""

    #: The storage is open in this process.
    OPEN = "open"
    #: This process is a fork of the one that opened the store; a follower is opened when one is needed.
    FORKED = "forked"
    #: The handle was copied or unpickled; a follower is opened when one is needed.
    COPIED = "copied"
    #: The store was closed.
    CLOSED = "closed"


class StorePart:
    """Work on the storage of a handle, and hear of what happens to it. The handle holds its parts weakly."""

    def attach(self, storage: ReadView) -> None:
        """Work on this storage from now on; called again when its content is replaced.

        Whatever was derived from the former storage or content is dropped.
        """

    def leave_parent(self) -> None:
        """Drop what belongs to the parent process: this is a forked child."""

    def before_fork(self) -> None:
        """Pause the part's own threads: this process is about to fork."""

    def after_fork(self) -> None:
        """Let the threads run again: this is the parent, and the fork is done."""


@dataclass(slots=True)
class _Opened:
    """What one opening holds: the storage, the keeper of its SQL index, and what applies its policy."""

    storage: ReadView
    catalog: Catalog
    runner: PolicyRunner | None = None

    @classmethod
    def of(cls, storage: ReadView) -> _Opened:
        """Return what belongs to a storage. It has one catalog: a second one would not see all changes."""
        known = storage.index.catalog
        catalog = known if isinstance(known, Catalog) else Catalog(storage)
        storage.index.use(catalog)
        return cls(storage, catalog)

    def require_runner(self) -> PolicyRunner:
        """Return what applies policies.

        Raises:
            StateError: The storage deletes no rows by a policy.
        """
        if self.runner is None:
            self.runner = make_runner(self.storage, self.catalog)
        return self.runner

    def start_retention(self) -> None:
        """Apply the store's policy in the background, if it has one."""
        if self.storage.can_write and load_policy(self.storage) is not None:
            self.require_runner().start()

    def stop_retention(self) -> None:
        """Stop applying the policy; wait for a run that is under way."""
        if self.runner is not None:
            self.runner.stop()
            self.runner = None


class StoreHandle:
    """Hold a store open, and follow it from a forked child or a copy.

    Threads: any number may use it. Processes: a forked or copied handle of a store on disk follows the store;
    a copy of a storage in RAM has the rows. Crashes: as the storage promises.

    Args:
        storage: What is held.
    """

    def __init__(self, storage: ReadView) -> None:
        opened = _Opened.of(storage)
        self._begin(Life.OPEN, Origin.of(storage), opened)
        opened.start_retention()

    def _begin(self, life: Life, origin: Origin | None, opened: _Opened | None) -> None:
        self._life = life
        self._origin = origin
        self._opened = opened
        self._parts: list[weakref.ref[StorePart]] = []
        self._opening = threading.RLock()
        #: What the parent process opened: kept, as freeing DuckDB's memory here could write to its file.
        self._of_parent: _Opened | None = None
        if opened is not None:
            opened.storage.holders.add(self)
        _handles.add(self)

    # -- what is open ----------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """Where the handle is in its life."""
        opened = self._opened
        return Life.CLOSED if opened is not None and opened.storage.closed else self._life

    @property
    def is_in_memory(self) -> bool:
        """Whether the rows are in RAM, so that a copy has rows of its own."""
        return self._origin is None and self.life is Life.OPEN

    @property
    def storage(self) -> ReadView:
        """The storage; a forked or copied handle opens a follower first.

        Raises:
            StateError: The store was closed before it was opened here.
        """
        opened = self._opened
        return (self._follow() if opened is None else opened).storage

    @property
    def catalog(self) -> Catalog:
        """What answers SQL."""
        return (self._opened or self._follow()).catalog

    @property
    def runner(self) -> PolicyRunner:
        """What applies retention policies.

        Raises:
            StateError: The storage deletes no rows by a policy.
        """
        return (self._opened or self._follow()).require_runner()

    def current(self) -> ReadView:
        """Return the storage, after taking in what another process has written."""
        storage = self.storage
        if not storage.closed:
            storage.follow()
        return storage

    def check_open(self) -> ReadView:
        """Return the storage.

        Raises:
            StateError: It is closed.
        """
        storage = self.storage
        if storage.closed:
            raise build_closed_error()
        return storage

    def start_retention(self) -> None:
        """Apply the store's policy in the background, if it has one."""
        (self._opened or self._follow()).start_retention()

    def _follow(self) -> _Opened:
        with self._opening:
            if self._opened is not None:
                return self._opened
            if self._origin is None:
                raise build_closed_error()
            storage, former = self._origin.follow(), self._life
            try:
                self._opened = opened = _Opened.of(storage)
                self._life = Life.OPEN
                self._attach_parts(storage)
            except BaseException:
                self._opened, self._life = None, former
                storage.close()
                raise
            return opened

    # -- parts -----------------------------------------------------------------------------------

    def add_part(self, part: StorePart) -> None:
        """Attach a part to the storage, now if it is open, and tell it of what happens from now on."""
        self._parts.append(weakref.ref(part))
        if self._opened is not None:
            part.attach(self._opened.storage)

    def _live_parts(self) -> list[StorePart]:
        return [part for known in self._parts if (part := known()) is not None]

    def _attach_parts(self, storage: ReadView) -> None:
        for part in self._live_parts():
            part.attach(storage)

    def _note_renewal(self, storage: ReadView) -> None:
        """Attach the parts anew to a storage whose content was replaced; see `Holder`."""
        if self._opened is not None and self._opened.storage is storage:
            self._attach_parts(storage)

    # -- life ------------------------------------------------------------------------------------

    def replace(self, storage: ReadView) -> ReadView:
        """Hold another storage from now on; return the one before, which stays open.

        Raises:
            StateError: The handle is closed.
            ValueError: A part does not fit the storage; the former one is still held then.
        """
        former = self.check_open()
        opened, origin = self._opened, self._origin
        if opened is None:
            raise build_closed_error()
        opened.stop_retention()
        try:
            self._opened, self._origin = _Opened.of(storage), Origin.of(storage)
            storage.holders.add(self)
            self._attach_parts(storage)
            self._opened.start_retention()
        except BaseException:
            self._opened, self._origin = opened, origin
            former.index.use(opened.catalog)
            self._attach_parts(former)
            opened.start_retention()
            raise
        return former

    def close(self) -> None:
        """Flush, bring the index up to date for other programs, and release the store.

        A second call does nothing.
        """
        opened = self._opened
        if opened is None:  # a follower that was never opened
            self._origin, self._life = None, Life.CLOSED
            return
        opened.stop_retention()
        storage = opened.storage
        if storage.closed:
            return
        try:
            with contextlib.suppress(StateError):  # poisoned, or a follower
                storage.writer()  # after an interruption this reads the journal again
            if storage.can_write:
                end_sessions(storage, [storage.episodes.session])
                opened.catalog.close()
        finally:
            storage.close()

    def before_fork(self) -> None:
        """Pause the threads of the parts: this process is about to fork."""
        for part in self._live_parts():
            part.before_fork()

    def after_fork(self) -> None:
        """Let the threads of the parts run again."""
        for part in self._live_parts():
            part.after_fork()

    def leave_parent(self) -> None:
        """Follow the store from now on, instead of using the parent's storage: this is a forked child."""
        self._opening = threading.RLock()  # another thread of the parent may have held the former one
        if self._origin is not None and self.life is not Life.CLOSED:
            self._origin = self._origin.in_fork()
            self._life = Life.FORKED
            self._of_parent, self._opened = self._opened, None
        for part in self._live_parts():
            part.leave_parent()

    def __getstate__(self) -> tuple[Origin | None, ReadView | None]:
        """Return what a copy needs: where the store is, or a storage in RAM with its rows.

        Raises:
            StateError: The store is closed.
        """
        storage = None if self._opened is None else self._opened.storage
        if self._origin is not None:
            if storage is not None and storage.can_write:
                storage.drain()  # the copy is to see all that was written
            return self._origin.elsewhere(), None
        if storage is None or storage.closed:
            raise build_closed_error()
        return None, storage

    def __setstate__(self, state: tuple[Origin | None, ReadView | None]) -> None:
        """Restore what `__getstate__` returned; a store on disk is opened when it is first needed."""
        origin, storage = state
        if storage is None:
            self._begin(Life.COPIED, origin, None)
        else:
            self._begin(Life.OPEN, origin, _Opened.of(storage))


_handles: weakref.WeakSet[StoreHandle] = weakref.WeakSet()


def _before_fork() -> None:
    for handle in list(_handles):
        handle.before_fork()


def _after_fork() -> None:
    for handle in list(_handles):
        handle.after_fork()


def _leave_parent() -> None:
    # Objects that the parent left to the garbage collector may belong to DuckDB, whose threads are not here.
    gc.freeze()
    for handle in list(_handles):
        handle.leave_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_leave_parent)
