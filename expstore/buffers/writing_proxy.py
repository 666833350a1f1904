"""Write to a store that another process of this machine has open: the worker's side.

A `StoreHandle` has a `WritingProxy` in a forked child and in a pickled copy of a buffer that is shared. Rows
go into a slot of shared memory; the process that owns the store appends them and answers once they are
committed. `expstore.buffers.writing_server` is the other side.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from expstore.buffers.write_options import WriteOptions
from expstore.buffers.writing_messages import (
    ANSWER,
    CALL,
    ERROR,
    NUMBERS,
    error_of,
    schema_version,
    to_text,
)
from expstore.core.values import Array, IntArray
from expstore.data.batch import Batch
from expstore.disk.message_socket import MessageSocket, connect
from expstore.disk.shared_memory import SharedMemory
from expstore.errors import RemoteError
from expstore.schema.schema import Schema
from expstore.storages.read_view import build_closed_error
from expstore.wire.slots import (
    NO_KEY,
    Call,
    ColumnLayout,
    Slot,
    columns_of,
    describe_batch,
    describe_layouts,
    layouts_of,
    write_tail,
)

if TYPE_CHECKING:
    from expstore.buffers.groups import Ending
    from expstore.episodes.selections import SelectionChange

#: Bytes of the first slot. Its pages take memory once they are written to.
_SLOT_BYTES = 4 << 20


class Appended(NamedTuple):
    """The answer to an append.

    Args:
        numbers: Index, or id, of each row; -1 for dropped rows. Shape `(n,)`.
        outdated: Whether the store has other fields than the caller knew.
    """

    numbers: IntArray
    outdated: bool


class _Described(NamedTuple):
    """The text of the last append, and what it follows from: the appends of a worker are mostly alike."""

    schema: Schema
    lane_count: int
    has_lanes: bool
    linked: bool
    options: WriteOptions
    text: bytes
    layouts: tuple[ColumnLayout, ...]


class WritingProxy:
    """Append rows, set priorities, and annotate and end episodes through the process that owns a store.

    It connects when it is first used. Each connection is a session of its own: its rows share no episode with
    those of others, and its open episodes are cut when this process ends.

    Threads: any number may use it; they take turns. Processes: a forked child opens a connection of its own.
    Crashes: what returned was committed as by the owner itself. If the owner dies during a call, RemoteError
    is raised, and it is unknown whether the call was done: repeat it with the same idempotency key, once the
    store is open again.

    Args:
        address: Where the owner listens.
    """

    def __init__(self, address: str) -> None:
        #: Where the owner listens.
        self.address = address
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._closed = False
        self._described: _Described | None = None
        self._version: tuple[Schema | None, int] = (None, 0)

    # -- calls ---------------------------------------------------------------------------------------

    def append(self, batch: Batch, options: WriteOptions, schema: Schema | None) -> Appended:
        """Append rows, all of them or none.

        Args:
            batch: The rows, at least one.
            options: The options of the write.
            schema: The fields of the store as far as they are known here.

        Raises:
            RemoteError: The owner does not answer.
            SchemaError: A field holds objects, or has no values; or as `extend` raises it.
        """
        key = NO_KEY
        if options.key is not None:
            key, options = options.key.name + options.key.digest, options._replace(key=None)
        with self._lock:
            return Appended(*self._send_batch("append", batch, options, schema, key)[1:])

    def fix_fields(self, batch: Batch) -> None:
        """Fix the fields of a store without rows by those of a row, which is not written."""
        with self._lock:
            self._send_batch("fix_fields", batch, WriteOptions(), None, NO_KEY)

    def set_priorities(self, numbers: IntArray, values: Array, *, by_id: bool) -> int:
        """Set priorities of rows; return how many were set.

        Args:
            numbers: Ids or indices. Shape `(n,)`.
            values: Shape `(n,)`.
            by_id: Whether numbers are ids.
        """
        columns = [numbers, np.ascontiguousarray(values)]
        layouts = layouts_of(columns)
        text = to_text({"do": "priorities", "by_id": by_id, "columns": describe_layouts(layouts)})
        with self._lock:
            _, found, _ = self._require_link().call(Call(text, len(numbers)), layouts, columns)
        return int(found[0])

    def describe(self) -> str:
        """Return the fields and the number of rows, as JSON text: see `owned_rows.describe_rows`."""
        return str(self._ask({"do": "describe"}).decode())

    def empty(self) -> None:
        """Delete all rows."""
        self._ask({"do": "empty"})

    def dump(self, path: str, *, keep: int | None, tag: str | None) -> str:
        """Create a version of the store; return its description, as JSON text.

        Args:
            path: Folder of versions, absolute: the owner may run in another folder.
            keep: Number of versions without a tag to keep; None if there is a tag.
            tag: Name of the version; None: it has none.
        """
        return str(self._ask({"do": "dump", "path": path, "keep": keep, "tag": tag}).decode())

    def annotate(self, changes: Mapping[int, str]) -> dict[int, str]:
        """Attach facts to episodes, as JSON texts; return all facts about these episodes."""
        return dict(json.loads(self._ask({"do": "annotate", "changes": list(changes.items())})))

    def annotate_rows(self, packed: bytes) -> None:
        """Annotate rows: what `pack_annotations` returns."""
        with self._lock:
            self._require_link().call(Call(to_text({"do": "annotate_rows"}), 0, len(packed)), (), (), packed)

    def end(self, source: str | None, *, unnamed: bool = False, lanes: Sequence[int] | None = None) -> None:
        """End open episodes of this session.

        Args:
            source: Name of the stream; None: all of them.
            unnamed: Without a source: only the unnamed stream.
            lanes: Numbers of the stream's lanes; None: all lanes.
        """
        told = {"do": "end", "source": source, "unnamed": unnamed}
        self._ask(told | {"lanes": None if lanes is None else [*lanes]})

    def resume(self, source: str, *, check: bool) -> IntArray:
        """Adopt the episodes of an ended session; see `Episodes.resume`. Shape `(n,)`."""
        found: IntArray = self._ask({"do": "resume", "source": source, "check": check})
        return found

    def start_group(self, version: int, consumer: str | None) -> str:
        """Try to start a group; return what `Groups.start_for` returns, as JSON text."""
        return str(self._ask({"do": "start_group", "version": version, "consumer": consumer}).decode())

    def end_group(self, ending: Ending) -> None:
        """Close or discard a group."""
        self._ask({"do": "end_group", "ending": ending})

    def change_selection(self, change: SelectionChange) -> None:
        """Create, change or drop a selection."""
        self._ask({"do": "change_selection", "change": change})

    def flush(self) -> None:
        """Have the owner sync the store to the disk."""
        self._ask({"do": "flush"})

    def _ask(self, told: dict[str, Any]) -> Any:
        with self._lock:
            return self._require_link().call(Call(to_text(told)))[1]

    def _send_batch(
        self, do: str, batch: Batch, options: WriteOptions, schema: Schema | None, key: bytes
    ) -> tuple[int, Any, bool]:
        known = self._described
        if (
            known is not None
            and do == "append"
            and known.schema is batch.arranged
            and known[1:5] == (batch.lane_count, batch.lanes is not None, batch.linked, options)
        ):
            columns = batch.arrays if batch.lanes is None else [*batch.arrays, batch.lanes]
            call = Call(known.text, batch.count, 0, key)
            return self._require_link().call(call, known.layouts, columns)
        keys, dtypes, columns, loose = columns_of(batch)
        if batch.lanes is not None:
            columns = [*columns, batch.lanes]
        layouts = layouts_of(columns)
        told = {
            "do": do, "schema": self._version_of(schema), "source": options.source, "info": options.info,
            "checks_domain": options.checks_domain, "takes_priorities": options.takes_priorities,
            "return_ids": options.return_ids, "columns": describe_layouts(layouts),
        }  # fmt: skip
        text = to_text(told | describe_batch(batch, keys, dtypes))
        if batch.arranged is not None and do == "append" and not loose:
            self._described = _Described(
                batch.arranged, batch.lane_count, batch.lanes is not None, batch.linked, options, text,
                layouts,
            )  # fmt: skip
        tail = write_tail(loose)
        return self._require_link().call(Call(text, batch.count, len(tail), key), layouts, columns, tail)

    def _version_of(self, schema: Schema | None) -> int:
        if self._version[0] is not schema:
            self._version = schema, schema_version(schema)
        return self._version[1]

    # -- the connection ------------------------------------------------------------------------------

    def _require_link(self) -> _Link:
        link = self._link
        if link is None or link.gone:
            if self._closed:
                raise build_closed_error()
            if link is not None:
                link.close()
            self._link = link = _Link(connect(self.address))
        return link

    def close(self) -> None:
        """End the session: its open episodes are cut."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()
                self._link = None

    def leave_parent(self) -> None:
        """Use a connection of its own from now on: this is a forked child."""
        if self._link is not None:
            self._link.close()  # otherwise the owner would not learn that the parent has died
        self._begin()

    def __getstate__(self) -> str:
        """Return the address, which is all that a copy needs."""
        return self.address

    def __setstate__(self, address: str) -> None:
        """Restore what `__getstate__` returned."""
        self.address = address
        self._begin()


class _Link:
    """A connection to the owner, and the slot that it reads.

    A slot is written to only after the answer to its last call: a call that is interrupted before its answer
    leaves its slot to the owner, and the next call passes a new one.

    Args:
        sock: The connection.
    """

    def __init__(self, sock: MessageSocket) -> None:
        self._sock = sock
        self._slot: Slot | None = None
        self._number = 0
        #: Whether the owner has closed the connection.
        self.gone = False

    def call(
        self,
        call: Call,
        layouts: tuple[ColumnLayout, ...] = (),
        columns: list[Array] | tuple[()] = (),
        tail: bytes = b"",
    ) -> tuple[int, Any, bool]:
        """Call the owner and wait for its answer.

        Returns:
            Its kind; numbers or a text; and whether the store has other fields than the caller knows.

        Raises:
            Exception: The error that the owner has answered with.
            RemoteError: The owner does not answer.
        """
        self._number = number = self._number + 1
        slot, self._slot = self._slot, None
        try:
            if slot is None or not slot.has_space_for(call, layouts):
                slot = self._pass_slot(Slot.space_for(call, layouts))
            length = slot.write_call(number, call, layouts, columns, tail)
            self._sock.send(CALL.pack(number, length))
            kind, size, outdated = self._receive(number)
        except ConnectionError as exc:
            self.gone = True
            raise RemoteError(
                "the process that owns the store has closed it or has died: it is unknown whether this call "
                "was done",
                kind="owner_gone",
                hint="open the store again; a call that is repeated with its idempotency_key is done once",
            ) from exc
        found: Any = slot.numbers_answer(size) if kind == NUMBERS else slot.text_answer(size)
        self._slot = slot
        if kind == ERROR:
            raise error_of(found)
        return kind, found, outdated

    def _pass_slot(self, space: int) -> Slot:
        """Make a slot, and send it to the owner."""
        size = max(_SLOT_BYTES, 1 << (space - 1).bit_length())
        shared = SharedMemory.create(size)
        try:
            self._sock.send(CALL.pack(0, size), shared.pass_descriptor())
        finally:
            shared.forget_descriptor()
        return Slot(shared.memory)

    def _receive(self, number: int) -> tuple[int, int, bool]:
        """Wait for the answer to a call; skip answers to calls that were interrupted."""
        while True:
            message = self._sock.receive()
            if not message:
                raise ConnectionResetError("the connection was closed")
            answered, kind, outdated, size = ANSWER.unpack(message)
            if answered == number:
                return kind, size, bool(outdated)

    def close(self) -> None:
        """Close the connection."""
        self.gone = True
        self._sock.close()
