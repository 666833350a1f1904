"""Write for the workers of a buffer that is shared: the side of the process that owns the store.

`ReplayBuffer.share` starts a `WritingServer`. One thread serves all workers, whose calls are short; a call
that may wait for another thread of this process runs in a separate thread, so that other workers do not wait
for it.
`expstore.buffers.writing_proxy` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from expstore.buffers.write_options import WriteOptions
from expstore.buffers.writing_messages import ANSWER, CALL, ERROR, NUMBERS, TEXT, pack_error, schema_version
from expstore.core.idempotency import WriteKey
from expstore.core.values import Array, IntArray
from expstore.data.batch import Batch
from expstore.disk.message_socket import Listener, MessageSocket, Waiter, close_descriptor
from expstore.disk.shared_memory import SharedMemory
from expstore.episodes.sessions import SessionKey
from expstore.errors import StateError, StorageError
from expstore.schema.schema import Schema
from expstore.wire.slots import NO_KEY, BatchReader, Call, ColumnLayout, Slot, read_layouts

_log = logging.getLogger("expstore")
#: Texts of calls that are remembered for each worker.
_TEXTS = 64


class Owner(Protocol):
    """What workers may ask of the process that owns a store."""

    def schema(self) -> Schema | None:
        """Return the fields; None: no rows have come yet."""

    def describe(self) -> str:
        """Return the fields and the number of rows, as JSON text."""

    def may_wait(self) -> bool:
        """Return whether an append may wait for another thread, such as one that samples."""

    def append(self, batch: Batch, options: WriteOptions, *, is_gone: Callable[[], bool]) -> IntArray:
        """Append rows; stop waiting if `is_gone` returns True."""

    def fix_fields(self, batch: Batch) -> None:
        """Fix the fields by those of one row, which is not written."""

    def set_priorities(self, numbers: IntArray, values: Array, *, by_id: bool) -> int:
        """Set priorities; return how many were set."""

    def empty(self) -> None:
        """Delete all rows."""

    def dump(self, path: str, *, keep: int | None, tag: str | None) -> str:
        """Create a version of the store in a folder; return its description, as JSON text."""

    def annotate(self, changes: Mapping[int, str]) -> dict[int, str]:
        """Attach facts to episodes, as JSON texts; return all facts about these episodes."""

    def annotate_rows(self, packed: bytes) -> None:
        """Annotate rows: what `pack_annotations` returns."""

    def end(
        self, session: SessionKey, source: str | None, *, unnamed: bool, lanes: Sequence[int] | None
    ) -> None:
        """End open episodes of a session."""

    def resume(self, session: SessionKey, source: str, *, check: bool) -> IntArray:
        """Let a session adopt the episodes of an ended one; return their ids."""

    def start_group(self, session: SessionKey, version: int, consumer: str | None) -> str:
        """Try to start a group; return what `Groups.start_for` returns, as JSON text."""

    def end_group(self, ending: Sequence[Any]) -> None:
        """Close or discard a group: the values of an `Ending`."""

    def change_selection(self, change: Sequence[Any]) -> None:
        """Create, change or drop a selection: the values of a `SelectionChange`."""

    def flush(self) -> None:
        """Sync the store to the disk."""

    def end_session(self, session: SessionKey) -> None:
        """End a session: its open episodes become `cut`, and the groups that it has started are discarded."""


class WritingServer:
    """Serve the calls of other processes until it is closed or dropped.

    Threads: one thread of its own, and one more for each call that may wait. Processes: a forked child must
    call `leave_parent`. Crashes: workers see at once that this process has died.

    Args:
        owner: What does the calls; the thread refers to it weakly.

    Raises:
        StateError: The system cannot share buffers.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = loop = _Loop(weakref.ref(owner))
        #: Where workers connect to.
        self.address = loop.address
        self._thread = threading.Thread(target=loop.run, name="expstore-writing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the calls that are under way, end the sessions of all workers, and disconnect them."""
        self._loop.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def leave_parent(self) -> None:
        """Close what belongs to the parent: this is a forked child."""
        self._loop.leave_parent()

    def __del__(self) -> None:
        self._loop.stop()


@dataclass(slots=True)
class _Parsed:
    """A text that a worker sends, parsed.

    Args:
        told: What it asks for.
        layouts: Of the columns.
        reader: Makes batches of the columns; None: they are no batch.
        options: Of a write, without its key.
    """

    told: dict[str, Any]
    layouts: tuple[ColumnLayout, ...]
    reader: BatchReader | None = None
    options: WriteOptions = WriteOptions()  # noqa: RUF009 - immutable


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker's connection: its session, its slot, and what is known of it.

    Args:
        sock: The connection.
        session: Whose rows it writes.
        slot: Where its calls are; None: it has sent none yet.
        lanes: How many lanes each of its streams has.
        texts: The last texts that it has sent.
        busy: Whether a thread of its own is doing its call.
    """

    sock: MessageSocket
    session: SessionKey = field(default_factory=lambda: SessionKey(uuid.uuid4().hex))
    slot: Slot | None = None
    lanes: dict[str | None, int] = field(default_factory=dict)
    texts: dict[bytes, _Parsed] = field(default_factory=dict)
    busy: bool = False


class _Loop:
    """Wait for calls of all workers, and answer them.

    Args:
        owner: What does the calls.
    """

    def __init__(self, owner: weakref.ref[Owner]) -> None:
        self._owner = owner
        self._listener = Listener()
        self.address = self._listener.address
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._waiter = Waiter()
        self._workers: dict[int, _Worker] = {}
        self._finished: list[_Worker] = []
        self._stopping = False
        self._version: tuple[Schema | None, int] = (None, 0)
        self._watch()

    def run(self) -> None:
        """Serve until `stop` is called, or the owner is gone."""
        try:
            while not self._stopping and self._owner() is not None:
                ready = self._waiter.wait()
                # Calls that have come meanwhile are answered before the GIL is given up.
                while ready and not self._stopping:
                    for descriptor in ready:
                        self._serve(descriptor)
                    ready = self._waiter.look()
        except Exception:
            _log.exception("the thread that writes for other processes has failed")
        finally:
            self._end()

    def stop(self) -> None:
        """Make `run` return, from any thread."""
        self._stopping = True
        self._call_back()

    def leave_parent(self) -> None:
        """Close sockets and drop shared memory: this is a forked child, which must not hold them."""
        self._close()

    def _call_back(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # it is about to wake, or has ended
            self._wake.send(b"x")

    # -- connections ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        waiting = [number for number, worker in self._workers.items() if not worker.busy]
        self._waiter.watch([self._listener.descriptor, self._woken.fileno(), *waiting])

    def _serve(self, descriptor: int) -> None:
        worker = self._workers.get(descriptor)
        if worker is not None:
            if not worker.busy:
                self._receive(worker)
        elif descriptor == self._listener.descriptor:
            sock = self._listener.accept()
            if sock is not None:
                self._workers[sock.descriptor] = _Worker(sock)
                self._watch()
        elif descriptor == self._woken.fileno():
            self._woken.recv(4096)
            while self._finished:
                self._finished.pop().busy = False
            self._watch()

    def _receive(self, worker: _Worker) -> None:
        received = worker.sock.receive_now()
        if received is None:
            return
        message, descriptor = received
        try:
            if len(message) != CALL.size:
                self._drop(worker)
                return
            number, length = CALL.unpack(message)
            if number:
                self._take(worker, number, length)
            elif descriptor is not None:
                shared, descriptor = SharedMemory(descriptor), None
                worker.slot = Slot(shared.memory)
        except Exception as exc:  # it does not keep to the protocol; the others are served on
            _log.warning("a process that writes through this one was disconnected: %s", exc)
            self._drop(worker)
        finally:
            if descriptor is not None:
                close_descriptor(descriptor)

    def _drop(self, worker: _Worker) -> None:
        """Forget a worker that is gone, and cut its open episodes."""
        del self._workers[worker.sock.descriptor]
        self._watch()
        worker.sock.close()
        owner = self._owner()
        if owner is not None:
            _end_session(owner, worker.session)

    # -- calls ---------------------------------------------------------------------------------------

    def _take(self, worker: _Worker, number: int, length: int) -> None:
        """Do a call of a worker and answer it."""
        slot = worker.slot
        if slot is None:
            raise StorageError("a call came without shared memory")
        call = slot.read_call(number, length)
        parsed = worker.texts.get(call.text)
        if parsed is None:
            if len(worker.texts) >= _TEXTS:
                worker.texts.clear()
            parsed = worker.texts[call.text] = _parse(call.text, worker.session)
        owner = self._owner()
        if owner is None:
            return
        do = parsed.told["do"]
        if do in ("dump", "flush", "start_group") or (do == "append" and owner.may_wait()):
            worker.busy = True
            self._watch()
            threading.Thread(
                target=self._do_apart, args=(worker, slot, number, call, parsed, owner), daemon=True,
                name="expstore-writing-call",
            ).start()  # fmt: skip
        else:
            self._do(worker, slot, number, call, parsed, owner)

    def _do_apart(
        self, worker: _Worker, slot: Slot, number: int, call: Call, parsed: _Parsed, owner: Owner
    ) -> None:
        try:
            self._do(worker, slot, number, call, parsed, owner)
        finally:
            self._finished.append(worker)
            self._call_back()

    def _do(
        self, worker: _Worker, slot: Slot, number: int, call: Call, parsed: _Parsed, owner: Owner
    ) -> None:
        try:
            found = _act(worker, slot, call, parsed, owner)
            if isinstance(found, str):
                kind, size = TEXT, slot.answer_text(found.encode())
            else:
                kind, size = NUMBERS, slot.answer_numbers(found)
        except Exception as exc:
            kind, size = ERROR, slot.answer_text(pack_error(exc))
        outdated = parsed.reader is not None and parsed.told["schema"] != self._version_of(owner.schema())
        if not worker.sock.send_now(ANSWER.pack(number, kind, outdated, size)):
            _log.debug("a worker is gone before its answer")  # the next message of its connection is its end

    def _version_of(self, schema: Schema | None) -> int:
        known, version = self._version
        if known is not schema:
            version = schema_version(schema)
            self._version = schema, version
        return version

    # -- the end -------------------------------------------------------------------------------------

    def _end(self) -> None:
        for worker in self._workers.values():
            while worker.busy and worker not in self._finished:
                self._waiter.watch([self._woken.fileno()])
                self._waiter.wait()
                with contextlib.suppress(BlockingIOError):  # a signal has ended the wait
                    self._woken.recv(4096)
        owner = self._owner()
        if owner is not None:
            for worker in self._workers.values():
                _end_session(owner, worker.session)
        self._close()

    def _close(self) -> None:
        self._listener.close()
        for worker in self._workers.values():
            worker.sock.close()
        self._workers = {}  # and their memory
        self._wake.close()
        self._woken.close()


def _parse(text: bytes, session: SessionKey) -> _Parsed:
    """Parse the text of a call.

    Raises:
        StorageError: It is no such text.
    """
    try:
        told = json.loads(text)
        layouts = read_layouts(told.get("columns", ()))
        if told["do"] not in ("append", "fix_fields"):
            return _Parsed(told, layouts)
        options = WriteOptions(
            told["source"], told["info"], None, session, told["checks_domain"], told["takes_priorities"],
            told["return_ids"],
        )  # fmt: skip
        return _Parsed(told, layouts, BatchReader(told, layouts), options)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise StorageError(f"the text of a call cannot be read: {exc!r}") from exc


def _act(worker: _Worker, slot: Slot, call: Call, parsed: _Parsed, owner: Owner) -> IntArray | str:
    """Do a call; return its answer."""
    told = parsed.told
    do = told["do"]
    if parsed.reader is not None:
        columns, tail = slot.columns(call, parsed.layouts), b""
        if call.tail:
            tail = slot.tail(call, parsed.layouts)
        batch = parsed.reader.read(columns, tail, owner.schema())
        if do == "append":
            return _append(worker, batch, call, parsed, owner)
        owner.fix_fields(batch)
    elif do == "priorities":
        numbers, values = slot.columns(call, parsed.layouts)
        return np.array([owner.set_priorities(numbers.copy(), values.copy(), by_id=told["by_id"])])
    elif do == "describe":
        return owner.describe()
    elif do == "empty":
        owner.empty()
    elif do == "dump":
        return owner.dump(told["path"], keep=told["keep"], tag=told["tag"])
    elif do == "annotate":
        return json.dumps(list(owner.annotate(dict(told["changes"])).items()))
    elif do == "annotate_rows":
        owner.annotate_rows(slot.tail(call, parsed.layouts))
    elif do == "end":
        owner.end(worker.session, told["source"], unnamed=told["unnamed"], lanes=told["lanes"])
    elif do == "resume":
        return owner.resume(worker.session, told["source"], check=told["check"])
    elif do == "start_group":
        return owner.start_group(worker.session, told["version"], told["consumer"])
    elif do == "end_group":
        owner.end_group(told["ending"])
    elif do == "change_selection":
        owner.change_selection(told["change"])
    elif do == "flush":
        owner.flush()
    else:
        raise StateError(f"the process that owns the store knows no call {do!r}", hint="use one version")
    return np.zeros(0, np.int64)


def _append(worker: _Worker, batch: Batch, call: Call, parsed: _Parsed, owner: Owner) -> IntArray:
    options = parsed.options
    if call.key != NO_KEY:
        options = options._replace(key=WriteKey(call.key[:16], call.key[16:]))
    lanes = worker.lanes.get(options.source, batch.lane_count)
    if lanes != batch.lane_count:
        # Lane 0 of other lanes is another stream: its episode must not go on.
        options = options._replace(restarts=True)
    numbers = owner.append(batch, options, is_gone=worker.sock.is_closed)
    worker.lanes[options.source] = batch.lane_count
    return numbers


def _end_session(owner: Owner, session: SessionKey) -> None:
    try:
        owner.end_session(session)
    except Exception as exc:
        _log.warning("the open episodes of a process that has ended could not be cut: %s", exc)
