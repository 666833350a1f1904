"""The rows of a shared buffer whose storage is in the memory of another process.

Used by `store_handle` in copies of such a buffer. A copy knows the fields and the number of rows, and writes
through a `WritingProxy`; rows are read in the process that owns them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, Self

from expstore.core.change_log import ChangeLog, Changes
from expstore.core.values import Array, IntArray, Window
from expstore.errors import StateError
from expstore.schema.row_traits import RowTraits
from expstore.storages.base import Storage
from expstore.storages.description import Description
from expstore.storages.format.manifest import Manifest
from expstore.storages.read_view import ReadView, build_closed_error
from expstore.storages.snapshots.capture import manifest_of

if TYPE_CHECKING:
    import torch

    from expstore.buffers.writing_proxy import WritingProxy


def describe_rows(storage: Storage) -> str:
    """Return what a copy must know about the rows, as JSON text."""
    with storage.lock:
        window = storage.window
        return json.dumps(
            {
                "manifest": manifest_of(storage).pack().decode(),
                "last": window.last,
                "rows": window.rows,
                "write_count": storage.write_count,
            }
        )


@dataclass(frozen=True, slots=True)
class OwnedOrigin:
    """How a copy of a shared buffer finds rows that are in the memory of another process.

    Args:
        traits: The rows that the storage takes.
        device: The device on which rows are returned.
        proxy: The connection to the owner; None: not connected yet.
    """

    traits: RowTraits
    device: torch.device | None
    proxy: WritingProxy | None = None

    @classmethod
    def of(cls, storage: ReadView) -> Self:
        """Return the origin of the rows of a storage in RAM."""
        return cls(storage.row_traits, storage.device)

    def in_fork(self) -> Self:
        """Return the origin that a forked child opens."""
        return self

    def elsewhere(self) -> Self:
        """Return the origin that a pickled copy opens."""
        return replace(self, proxy=None)

    def connect(self, proxy: WritingProxy) -> Self:
        """Return the origin of a copy that reaches the owner by a proxy."""
        return replace(self, proxy=proxy)

    def follow(self) -> OwnedRows:
        """Ask the owner for fields and the number of rows.

        Raises:
            RemoteError: The owner does not answer.
        """
        assert self.proxy is not None, "a copy is connected when it is made"
        return OwnedRows(self.proxy, self.traits, self.device)


class OwnedRows(ReadView):
    """Rows in the memory of another process: their fields and number are known here, and nothing is read.

    Threads: any number may use it. Processes: the owner writes. Crashes: it keeps nothing.

    Args:
        proxy: The connection to the owner.
        traits: The rows that the storage takes.
        device: The device on which rows are returned.

    Raises:
        RemoteError: The owner does not answer.
    """

    kind = "memory"
    follows = True

    def __init__(self, proxy: WritingProxy, traits: RowTraits, device: torch.device | None) -> None:
        super().__init__(Description())
        self._proxy = proxy
        self._rows = 0
        self._last = 0
        self._written = 0
        self.row_traits, self.device = traits, device
        self.changes: Changes = ChangeLog()
        self.follow()

    def follow(self, *, priorities: bool = False) -> None:
        """Ask the owner for the fields and the number of rows."""
        if self._closed:
            raise build_closed_error()
        facts = json.loads(self._proxy.describe())
        description = Description.of(Manifest.unpack(facts["manifest"].encode(), "the owner's description"))
        with self.lock:
            known = self.schema
            if known is not None and description.schema is not None and known.same(description.schema):
                description = replace(description, schema=known)  # readers of rows depend on the object
            self._describe(description)
            self._last, self._rows, self._written = facts["last"], facts["rows"], facts["write_count"]

    @property
    def stored(self) -> Window:
        """The ids that can be read in the owner's process."""
        if not self._closed:
            self.follow()
        return Window(self._last - self._rows, self._last)

    @property
    def window(self) -> Window:
        """The same ids: rows in RAM have no window."""
        return self.stored

    @property
    def query_window(self) -> NoReturn:
        """Raise StateError: episodes and SQL are read in the owner's process."""
        self._refuse()

    @property
    def last(self) -> int:
        """The newest id."""
        return self.stored.last

    def __len__(self) -> int:
        return self.stored.rows

    @property
    def write_count(self) -> int:
        """The number of rows that were ever written."""
        self.follow()
        return self._written

    def _refuse(self) -> NoReturn:
        if self._closed:
            raise build_closed_error()
        raise StateError(
            "the rows of this buffer are in the memory of the process that shares it: a copy can write, but "
            "not read them",
            hint="sample there, or keep the rows on disk: LazyMemmapStorage, or expstore.open(path)",
        )

    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> list[Array]:
        """Raise StateError: rows are read in the owner's process."""
        self._refuse()

    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Raise StateError: rows are read in the owner's process."""
        self._refuse()

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """Raise StateError: rows are read in the owner's process."""
        self._refuse()

    def intact(self, ids: IntArray) -> bool:
        """Return True: no rows are read here."""
        return True

    def writer(self) -> NoReturn:
        """Raise StateError: the owner writes."""
        if self._closed:
            raise build_closed_error()
        raise StateError(
            "the rows of this buffer are in the memory of the process that shares it: through it a copy can "
            "append rows, set priorities, annotate, end and resume episodes, delete all rows and create "
            "versions, and nothing else",
            hint="do it in that process",
        )

    def close(self) -> None:
        """Refuse further calls; the handle of the buffer closes the proxy."""
        self._note_closed()
