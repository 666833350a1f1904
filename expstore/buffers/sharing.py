"""Whether other processes may write through a buffer: `share`, and what their calls do.

A buffer owns one `Sharing`. In the process that opened the store it has a `WritingServer`; in a forked child
and in a pickled copy it gives the store handle a `WritingProxy`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from expstore.buffers.annotations import annotate
from expstore.buffers.episodes import annotate_episodes
from expstore.buffers.groups import Ending, Groups
from expstore.buffers.ingest import Ingest
from expstore.buffers.owned_rows import describe_rows
from expstore.buffers.sampling import Sampling
from expstore.buffers.selections import Selections
from expstore.buffers.snapshots import Snapshots, pack_version
from expstore.buffers.store_handle import Life, StoreHandle, StorePart
from expstore.buffers.updates import RowUpdates
from expstore.buffers.write_options import WriteOptions
from expstore.buffers.writing_proxy import WritingProxy
from expstore.buffers.writing_server import WritingServer
from expstore.core.values import Array, IntArray
from expstore.data.batch import Batch
from expstore.episodes.selections import SelectionChange
from expstore.episodes.sessions import SessionKey
from expstore.errors import StateError
from expstore.schema.schema import Schema
from expstore.storages.sessions import end_episodes, end_sessions, end_stream, end_unnamed, resume
from expstore.storages.torchrl_memmap import LazyMemmapStorage
from expstore.wire.annotations import read_annotations


class Sharing(StorePart):
    """Let other processes of this machine write through a buffer.

    Threads: any number may use it. Processes: a forked or pickled copy of a shared buffer writes through the
    process that shares it. Crashes: a worker's call that returned was committed.

    Args:
        store: The store of the buffer.
        sampling: Knows the settings that a version includes.
        ingest: Appends rows.
        updates: Sets priorities, and deletes all rows.
    """

    def __init__(self, store: StoreHandle, sampling: Sampling, ingest: Ingest, updates: RowUpdates) -> None:
        self._store, self._sampling = store, sampling
        self._owner = _Owner(store, sampling, ingest, updates)
        self._server: WritingServer | None = None
        self._starting = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether other processes may write."""
        return self._server is not None or self._store.proxy is not None

    def start(self) -> None:
        """Let other processes write from now on; a second call does nothing.

        Raises:
            StateError: The rows are objects, the store cannot be written here, or the system cannot share.
        """
        with self._starting:
            if self.is_on:
                return
            storage = self._store.check_open()
            storage.writer()
            if storage.row_traits.whole:
                raise StateError(
                    f"other processes cannot write to this buffer: rows of a {type(storage).__name__} are "
                    "objects in this process's memory",
                    hint="use a LazyTensorStorage, a LazyMemmapStorage, or expstore.open(path)",
                )
            self._server = WritingServer(self._owner)
            self._store.share_memory(True)

    def stop(self) -> None:
        """Let no other process write any more; open episodes of the others are cut.

        Calls in progress are done first, also calls that wait for the rate limiter.
        """
        server, self._server = self._server, None
        limiter = self._sampling.limiter
        if server is not None:
            self._store.share_memory(False)
            with contextlib.nullcontext() if limiter is None else limiter.allow_inserts():
                server.close()

    def before_fork(self) -> None:
        """Share a storage whose copies write, before a child has one."""
        self._share_with_copies()

    def _share_with_copies(self) -> None:
        """Share a `LazyMemmapStorage` that is open for writing: as in TorchRL, copies write to it."""
        if self._store.life is Life.OPEN and isinstance(self._store.storage, LazyMemmapStorage):
            with contextlib.suppress(StateError):  # it cannot be written, or the system cannot share
                self.start()

    def leave_parent(self) -> None:
        """Write through the parent from now on: this is a forked child."""
        server, self._server = self._server, None
        self._starting = threading.Lock()
        if server is not None:
            server.leave_parent()
            self._store.use_proxy(WritingProxy(server.address))

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts, and where a copy can write to."""
        self._share_with_copies()
        proxy = self._store.proxy
        address = None if proxy is None else proxy.address
        if self._server is not None:
            address = self._server.address
        return {
            "store": self._store,
            "sampling": self._sampling,
            "owner": self._owner,
            "address": address,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned; the copy writes through the process that shares the store."""
        self._store, self._sampling, self._owner = state["store"], state["sampling"], state["owner"]
        self._server, self._starting = None, threading.Lock()
        if state["address"] is not None:
            self._store.use_proxy(WritingProxy(state["address"]))


class _WorkerGoneError(Exception):
    """The worker that waits for its turn has died: its rows are not written."""


class _Owner:
    """Do the calls of workers; see `writing_server.Owner`."""

    def __init__(self, store: StoreHandle, sampling: Sampling, ingest: Ingest, updates: RowUpdates) -> None:
        self._store, self._sampling, self._ingest, self._updates = store, sampling, ingest, updates

    def schema(self) -> Schema | None:
        """Return the fields; None: no rows have come yet."""
        return self._store.storage.schema

    def describe(self) -> str:
        """Return the fields and the number of rows, as JSON text."""
        return describe_rows(self._store.storage.writer())

    def may_wait(self) -> bool:
        """Return whether an append may wait for a thread that samples."""
        return self._ingest.is_limited

    def append(self, batch: Batch, options: WriteOptions, *, is_gone: Callable[[], bool]) -> IntArray:
        """Append rows; return their indices, or ids. Shape `(n,)`."""

        def check() -> None:
            if is_gone():
                raise _WorkerGoneError

        return self._ingest.append_batch(batch, options, check)

    def fix_fields(self, batch: Batch) -> None:
        """Fix the fields by those of one row, which is not written."""
        self._ingest.fix_fields_of(batch)

    def set_priorities(self, numbers: IntArray, values: Array, *, by_id: bool) -> int:
        """Set priorities; return how many were set."""
        return self._updates.set_priorities(numbers, values, by_id=by_id)

    def empty(self) -> None:
        """Delete all rows."""
        self._updates.empty()

    def dump(self, path: str, *, keep: int | None, tag: str | None) -> str:
        """Create a version of the store in a folder; return its description, as JSON text."""
        snapshots = Snapshots(self._store, self._sampling)
        if tag is not None:
            return pack_version(snapshots.tag(tag, path))
        assert keep is not None, "the number of versions without a tag is limited"
        return pack_version(snapshots.create(path, keep=keep))

    def annotate(self, changes: Mapping[int, str]) -> dict[int, str]:
        """Attach facts to episodes, as JSON texts; return all facts about these episodes."""
        return annotate_episodes(self._store, changes)

    def annotate_rows(self, packed: bytes) -> None:
        """Annotate rows: what `pack_annotations` returns."""
        annotate(self._store, *read_annotations(packed))

    def end(
        self, session: SessionKey, source: str | None, *, unnamed: bool, lanes: Sequence[int] | None
    ) -> None:
        """End open episodes of a session."""
        if lanes is not None:
            end_stream(self._store.storage, source, session=session, lanes=lanes)
        elif unnamed:
            end_unnamed(self._store.storage, session)
        else:
            end_episodes(self._store.storage, source, session=session)

    def resume(self, session: SessionKey, source: str, *, check: bool) -> IntArray:
        """Let a session adopt the episodes of an ended one; return their ids. Shape `(n,)`."""
        return resume(self._store.storage, source, session=session, check=check)

    def start_group(self, session: SessionKey, version: int, consumer: str | None) -> str:
        """Try to start a group; return what `Groups.start_for` returns, as JSON text."""
        return json.dumps(Groups(self._store).start_for(session, version, consumer))

    def end_group(self, ending: Sequence[Any]) -> None:
        """Close or discard a group: the values of an `Ending`."""
        Groups(self._store).end(Ending(*ending))

    def change_selection(self, change: Sequence[Any]) -> None:
        """Create, change or drop a selection: the values of a `SelectionChange`."""
        Selections(self._store.storage, self._store.catalog).change(SelectionChange(*change))

    def flush(self) -> None:
        """Sync the store to the disk."""
        self._store.storage.writer().sync()

    def end_session(self, session: SessionKey) -> None:
        """End a session: its open episodes become `cut`, and the groups that it has started are discarded."""
        if self._store.storage.can_write:
            end_sessions(self._store.storage, [session])
            Groups(self._store).free([session])
