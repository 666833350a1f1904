"""A sampler that draws the rows of an order file, and what recorded draws do about rows that are gone.

Used by consumers: `rb.consumer(name, manifest=file)`. `expstore/sql/order_file.py` reads the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray, Selection
from expstore.errors import ArgumentError, NotReadyError, RowsChangedError
from expstore.samplers.base import Sampler
from expstore.storages.format.renumbering import Renumbering

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

#: What happens to rows of a recorded draw that are gone.
Missing = Literal["raise", "skip"]


def find_present(
    storage: ReadView,
    selection: Selection,
    draw: str,
    missing: Missing,
    *,
    changed: Callable[[IntArray], NDArray[np.bool_]] | None = None,
) -> Selection:
    """Return the rows of a recorded draw under the ids that they have now.

    Args:
        storage: The storage with the rows.
        selection: The rows, under the ids that they had.
        draw: The draw, for the message.
        missing: Whether rows that are gone or changed are an error, or left out.
        changed: Returns which ids are those of rows that were changed since. Shapes `(n,)`.

    Raises:
        RowsChangedError: A row is gone, or was changed; with "skip": all are.
    """
    former = selection.ids
    ids, there = find_rows(storage, former)
    if changed is not None:
        there = there & ~changed(ids)
        if ids is not former:
            there &= ~changed(former)
    if ids is not former:
        newest = selection.newest
        if newest is not None and storage.path is not None:
            newest = Renumbering.load(storage.disk, storage.path).present_last(newest)
        selection = replace(selection, ids=ids, newest=newest)
    if there.all():
        return selection
    if missing == "raise" or not there.any():
        raise build_changed_error(draw, former[~there])
    return selection.take(there)


def build_changed_error(draw: str, ids: IntArray) -> RowsChangedError:
    """Return the error for a draw of rows that are gone or changed. `ids`: their ids. Shape `(n,)`."""
    which = ", ".join(map(str, ids[:5].tolist())) + (", ..." if ids.size > 5 else "")
    return RowsChangedError(
        f"{draw} had rows that were changed, deleted or overwritten since: {ids.size} (id {which})",
        hint="pass missing='skip' to leave them out, or at='end' for new draws only",
    )


def find_rows(storage: ReadView, ids: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return the ids that rows have now, and whether they are still there. Shapes `(n,)`."""
    there = storage.stored.holds(ids)
    if not there.all() and storage.path is not None:
        ids = Renumbering.load(storage.disk, storage.path).present(ids)
        there = storage.stored.holds(ids)
    return ids, there


class GivenOrder(Sampler):
    """Draw the rows of an order file, draw after draw, as many rows as each draw of the file has.

    Threads: one at a time. Crashes: after a restart it continues with the draw that would have followed.

    Args:
        path: The file; `OrderFile.read` describes it.
        missing: What happens to rows that are gone: "raise" for a `RowsChangedError`, "skip" to leave them
            out, and draws without any row as well.

    Raises:
        ArgumentError: The file is not an order.
        NotFoundError: There is no file.
        StorageError: It cannot be read.
    """

    keeps_to_split = True
    _kind = 5

    def __init__(self, path: str | Path, *, missing: Missing = "raise") -> None:
        from expstore.sql.order_file import OrderFile  # loads pyarrow's Parquet

        super().__init__(split=None)  # the file says which rows
        self._order, self._missing = OrderFile.read(path), missing
        #: Identifies the content of the file.
        self._content = zlib.crc32(self._order.starts.tobytes(), zlib.crc32(self._order.ids.tobytes()))
        self._next = self._handed = 0

    @property
    def batch_size(self) -> int:
        """Number of rows of the largest draw."""
        return int(np.diff(self._order.starts).max())

    def check(self, last: int, batch_size: int | None) -> None:
        """Check that the file fits a store and a call.

        Args:
            last: The newest id of the store.
            batch_size: Rows of each draw that the caller expects; None: any.

        Raises:
            ArgumentError: The file has ids that the store never had, or draws of other sizes.
        """
        order = self._order
        bad = order.ids[(order.ids < 1) | (order.ids > last)]
        if bad.size:
            raise ArgumentError(
                f"{order.path} has the id {bad[0]}, which this store never had: its ids are 1 to {last}",
                hint="use the store that the draws were exported from, or a copy of it",
            )
        sizes = np.unique(np.diff(order.starts))
        if batch_size is not None and sizes.tolist() != [batch_size]:
            raise ArgumentError(
                f"batch_size={batch_size}, but draws of {order.path} have {sizes[0]} to {sizes[-1]} rows",
                hint="leave batch_size out",
            )

    @property
    def ran_out(self) -> bool:
        """Whether the last draw of the file was returned."""
        return self._handed == len(self._order)

    def attach(self, storage: ReadView) -> None:
        """Continue where the last sampler of this class stopped.

        Raises:
            ArgumentError: That one drew from another file.
        """
        super().attach(storage)
        kind, number, content, _ = self._draws_of(storage).progress
        if kind == self._kind and content != self._content:
            raise ArgumentError(
                f"{self._order.path} is not the order that this consumer has drawn from before",
                hint="pass that file, or take another name",
            )
        self._next = self._handed = number if kind == self._kind else 0

    def count_left(self, storage: ReadView) -> int:
        """Return the number of rows in draws that were not made yet."""
        return int(self._order.starts[-1] - self._order.starts[self._next])

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error for a draw after the last one."""
        return NotReadyError(
            f"all {len(self._order)} draws of {self._order.path} were drawn", hint="seek() goes back"
        )

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Return the rows of the next draw of the file.

        Raises:
            RowsChangedError: Rows are gone.
            NotReadyError: The rows of all further draws are gone.
        """
        for number in range(self._next, len(self._order)):
            try:
                draw = f"draw {self._order.numbers[number]} of {self._order.path}"
                found = find_present(storage, self._order.draw(number), draw, self._missing)
            except RowsChangedError:
                if self._missing == "raise":
                    raise
                continue
            self._next = number + 1
            return replace(found, progress=(self._kind, number + 1, self._content, 0))
        raise self.build_no_rows_error(storage)

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Return the rows of the same draw that are still there."""
        self._next = selection.progress[1] - 1
        return self.select(storage, 0, generator)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Store how many draws of the file were returned."""
        self._handed = selection.progress[1]
        self._draws_of(storage).note_progress(selection.progress)

    def rewind(self, storage: ReadView) -> None:
        """Continue after the last draw that was returned."""
        self._next = self._handed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._order.path)!r}, missing={self._missing!r})"
