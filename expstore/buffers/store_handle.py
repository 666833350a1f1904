"""An open store in this process: its storage, its SQL catalog, its retention, and its life cycle.

A buffer has one handle. In a forked child, and in a pickled copy, the handle opens a follower of the store
when it is first used. It does not draw or append rows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from expstore.buffers.owned_rows import OwnedOrigin
from expstore.buffers.policy_runner import PolicyRunner, load_policy, make_runner
from expstore.buffers.writing_proxy import WritingProxy
from expstore.core.fork_hooks import call_each
from expstore.errors import StateError
from expstore.sql.sync import Catalog
from expstore.storages.follower import Origin
from expstore.storages.read_view import ReadView, build_closed_error
from expstore.storages.sessions import end_sessions

_Part = TypeVar("_Part", bound="StorePart")


class Life(Enum):
    """State of a handle in this process."""

    #: The storage is open in this process.
    OPEN = "open"
    #: This process was forked from the one that opened the store; a follower is opened when it is needed.
    FORKED = "forked"
    #: The handle was copied or unpickled; a follower is opened when it is needed.
    COPIED = "copied"
    #: The store was closed.
    CLOSED = "closed"


class StorePart:
    """A part of a buffer that works on the handle's storage. The handle has weak references to its parts."""

    def attach(self, storage: ReadView) -> None:
        """Use this storage from now on; also called when the storage's content is replaced.

        Everything that was derived from the previous storage or content must be dropped.
        """

    def leave_parent(self) -> None:
        """Drop what belongs to the parent process; called in a forked child."""

    def before_fork(self) -> None:
        """Pause the part's own threads; called before this process forks."""

    def after_fork(self) -> None:
        """Resume the part's own threads; called in the parent after a fork."""


@dataclass(slots=True)
class _Opened:
    """What one opening has: the storage, the catalog of its SQL index, and the runner of its policy."""

    storage: ReadView
    catalog: Catalog
    runner: PolicyRunner | None = None

    @classmethod
    def of(cls, storage: ReadView) -> _Opened:
        """Return these for a storage, which has one catalog: a second one would miss changes."""
        known = storage.index.catalog
        catalog = known if isinstance(known, Catalog) else Catalog(storage)
        storage.index.use(catalog)
        return cls(storage, catalog)

    def require_runner(self) -> PolicyRunner:
        """Return the runner of policies.

        Raises:
            StateError: The storage does not delete rows by a policy.
        """
        if self.runner is None:
            self.runner = make_runner(self.storage, self.catalog)
        return self.runner

    def start_retention(self) -> None:
        """Apply the store's policy in the background, if it has one."""
        if self.storage.can_write and load_policy(self.storage) is not None:
            self.require_runner().start()

    def stop_retention(self) -> None:
        """Stop applying the policy; wait for a run in progress."""
        if self.runner is not None:
            self.runner.stop()
            self.runner = None


class StoreHandle:
    """Hold a store open; open a follower of it in a forked child or a copy.

    Threads: any number may use it. Processes: a forked or copied handle of a store on disk follows the store;
    a copy of a storage in RAM has the rows, or, if it is shared, a connection to them. Crashes: as the
    storage.

    Args:
        storage: The open storage.
    """

    def __init__(self, storage: ReadView) -> None:
        opened = _Opened.of(storage)
        self._begin(Life.OPEN, Origin.of(storage), opened)
        opened.start_retention()

    def _begin(self, life: Life, origin: Origin | OwnedOrigin | None, opened: _Opened | None) -> None:
        self._life = life
        self._origin = origin
        self._opened = opened
        self._parts: list[weakref.ref[StorePart]] = []
        self._opening = threading.RLock()
        #: What copies of a storage in RAM get while it is shared; None: each copy gets the rows.
        self._copied_origin: OwnedOrigin | None = None
        #: Writes through the process that has the store open; None: this process has it, or it is not shared.
        self.proxy: WritingProxy | None = None
        #: The parent process's objects, kept because freeing DuckDB's memory here could write to its file.
        self._of_parent: _Opened | None = None
        if opened is not None:
            opened.storage.holders.add(self)
        _handles.add(self)

    # -- what is open ----------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """The state of the handle."""
        opened = self._opened
        return Life.CLOSED if opened is not None and opened.storage.closed else self._life

    @property
    def is_in_memory(self) -> bool:
        """Whether the rows are in RAM, so that a copy has its own rows."""
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
        """The catalog, which runs SQL."""
        return (self._opened or self._follow()).catalog

    @property
    def runner(self) -> PolicyRunner:
        """The runner of retention policies.

        Raises:
            StateError: The storage does not delete rows by a policy.
        """
        return (self._opened or self._follow()).require_runner()

    def current(self) -> ReadView:
        """Return the storage, updated with rows that another process has written."""
        storage = self.storage
        if not storage.closed:
            storage.follow()
        return storage

    def check_open(self) -> ReadView:
        """Return the storage.

        Raises:
            StateError: The store is closed.
        """
        storage = self.storage
        if storage.closed:
            raise build_closed_error()
        return storage

    def use_proxy(self, proxy: WritingProxy) -> None:
        """Write through another process, which has the store open, from now on."""
        self.proxy = proxy
        if isinstance(self._origin, OwnedOrigin):
            self._origin = self._origin.connect(proxy)
        elif self._origin is not None:
            self._origin = self._origin.to_shared()

    def share_memory(self, shared: bool) -> None:
        """Let later copies of a storage in RAM have a connection to its rows, or, as at first, the rows."""
        if self._origin is None:
            self._copied_origin = OwnedOrigin.of(self.storage) if shared else None

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
        """Attach a part to the storage, now if it is open, and notify it of later changes."""
        self._parts.append(weakref.ref(part))
        if self._opened is not None:
            part.attach(self._opened.storage)

    def find_parts(self, kind: type[_Part]) -> list[_Part]:
        """Return the parts of a kind."""
        return [part for part in self._live_parts() if isinstance(part, kind)]

    def _live_parts(self) -> list[StorePart]:
        return [part for known in self._parts if (part := known()) is not None]

    def _attach_parts(self, storage: ReadView) -> None:
        for part in self._live_parts():
            part.attach(storage)

    def _note_renewal(self, storage: ReadView) -> None:
        """Attach the parts again to a storage whose content was replaced; see `Holder`."""
        if self._opened is not None and self._opened.storage is storage:
            self._attach_parts(storage)

    # -- life cycle ------------------------------------------------------------------------------

    def replace(self, storage: ReadView) -> ReadView:
        """Use another storage from now on; return the previous one, which stays open.

        Raises:
            StateError: The handle is closed.
            ValueError: A part does not fit the storage; the previous storage is kept.
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
        """Flush, update the index for other programs, and release the store.

        A second call does nothing.
        """
        opened = self._opened
        if self.proxy is not None:
            self.proxy.close()
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
        """Pause the threads of the parts before this process forks."""
        call_each(self._live_parts(), lambda part: part.before_fork())

    def after_fork(self) -> None:
        """Resume the threads of the parts in the parent."""
        call_each(self._live_parts(), lambda part: part.after_fork())

    def leave_parent(self) -> None:
        """Follow the store from now on instead of using the parent's storage; called in a forked child."""
        self._opening = threading.RLock()  # another thread of the parent may have held the previous one
        if self._copied_origin is not None:
            self._origin, self._copied_origin = self._copied_origin, None
        if self._origin is not None and self.life is not Life.CLOSED:
            self._origin = self._origin.in_fork()
            if self.proxy is not None and isinstance(self._origin, Origin):
                self._origin = self._origin.to_shared()
            self._life = Life.FORKED
            self._of_parent, self._opened = self._opened, None
        if self.proxy is not None:
            call_each([self.proxy], WritingProxy.leave_parent)
        call_each(self._live_parts(), lambda part: part.leave_parent())

    def __getstate__(self) -> tuple[Origin | OwnedOrigin | None, ReadView | None]:
        """Return the state of a copy: the path of a store on disk, or a storage in RAM with its rows.

        If the storage in RAM is shared, the copy connects to its rows instead.

        Raises:
            StateError: The store is closed.
        """
        storage = None if self._opened is None else self._opened.storage
        if self._origin is not None:
            if storage is not None and storage.can_write:
                storage.drain()  # so that the copy sees all written rows
            return self._origin.elsewhere(), None
        if storage is None or storage.closed:
            raise build_closed_error()
        if self._copied_origin is not None:
            return self._copied_origin, None
        return None, storage

    def __setstate__(self, state: tuple[Origin | OwnedOrigin | None, ReadView | None]) -> None:
        """Restore the result of `__getstate__`; a store on disk is opened when it is first used."""
        origin, storage = state
        if storage is None:
            self._begin(Life.COPIED, origin, None)
        else:
            self._begin(Life.OPEN, origin, _Opened.of(storage))


_handles: weakref.WeakSet[StoreHandle] = weakref.WeakSet()


def _before_fork() -> None:
    call_each(_handles, StoreHandle.before_fork)


def _after_fork() -> None:
    call_each(_handles, StoreHandle.after_fork)


def _leave_parent() -> None:
    # Objects left to the garbage collector may belong to DuckDB, whose threads a forked child does not have.
    gc.freeze()
    call_each(_handles, StoreHandle.leave_parent)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_leave_parent)
