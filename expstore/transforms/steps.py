"""What transforms see of the steps before and after the rows of a batch.

Buffers make a `StepView` of the rows that they read, for transforms that are `StepTransform`s. It finds rows
by episode and step, as the storage knows them; it chooses no rows of a batch, and keeps nothing.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SchemaError, StateError
from expstore.types import Array, IntArray, Key

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.storages.runs import Runs

__all__ = ["StepTransform", "StepView"]


class StepView:
    """Find and read other steps of the episodes of a batch's rows.

    Steps follow their episode wherever its rows lie: across batches, workers, the end of a ring. Those are
    seen that can be read now; rows that were given up part an episode in two. Every row that was shown is
    remembered: what was seen of it counts only if all of them are `intact` in the end.

    Threads: one uses it, while others write. Processes: as the storage. Crashes: it keeps nothing.

    Args:
        storage: What holds the rows.
        ids: Those of the batch. Shape `(n,)`.
        generator: The numbers of this draw, as the sampler has left them; None: nothing is drawn, rows are
            read by index.

    Raises:
        SchemaError: Rows are no single steps of TensorDicts.
        StateError: Better rows take the places of others: rows next to one another are no steps.

    Example:
        >>> view = StepView(rb.storage, np.array([3, 9]))
        >>> ids, valid = view.at(view.ids, [-1, 0, 1])
        >>> (rewards,) = view.read(ids, [("next", "reward")])
        >>> rewards.shape, view.intact
        ((2, 3, 1), True)
    """

    def __init__(self, storage: Storage, ids: IntArray, generator: np.random.Generator | None = None) -> None:
        _check_rows(storage)
        self.storage = storage
        #: The rows of the batch. Shape `(n,)`.
        self.ids = ids
        #: The rows of which the batch has the fields that are in `moved`. Shape `(n,)`.
        self.next_ids = ids
        #: Positions in the schema of the fields that are taken from `next_ids`.
        self.moved: frozenset[int] = frozenset()
        self.generator = generator
        #: The transforms and what they have seen, in their order.
        self.seen: list[tuple[StepTransform, Any]] = []
        self._oldest = int(ids.min()) if ids.size else 0
        self._lost = False
        self._changes = storage.changes
        self._located: tuple[Runs, IntArray, int, tuple[IntArray, IntArray]] | None = None

    def at(self, ids: IntArray, offsets: Any, runs: Runs | None = None) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the rows so many steps before or after some.

        Args:
            ids: Of rows of the batch, or such as were found here. Shape `(n,)`.
            offsets: How many steps later, negative: earlier. Shape `(k,)`, or `(n, k)`.
            runs: Which steps follow one another; None: those of the store's episodes.

        Returns:
            Ids, of the first or the last step that can be read where there is none so far away; and where
            there is one. Shapes `(n, k)`.
        """
        offsets = np.asarray(offsets, np.int64)
        shape = (ids.size, offsets.shape[-1])
        runs = self.storage.runs if runs is None else runs
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            if self._lost:
                return np.broadcast_to(ids[:, None], shape), np.zeros(shape, np.bool_)
            wanted = steps[:, None] + offsets
            found = np.maximum(wanted, runs.first[numbers][:, None])
            np.minimum(found, runs.stop[numbers][:, None] - 1, out=found)
            there = runs.ids(np.repeat(numbers, shape[1]).reshape(shape), found)
        self._show(there)
        return there, found == wanted

    def reach(self, ids: IntArray, runs: Runs | None = None) -> tuple[IntArray, IntArray]:
        """Return how many steps before each row can be read, and how many after it. Shapes `(n,)`.

        Args:
            ids: Of rows. Shape `(n,)`.
            runs: As `at`.
        """
        runs = self.storage.runs if runs is None else runs
        with runs.lock:
            numbers, steps = self._locate(runs, ids)
            if self._lost:
                return np.zeros_like(ids), np.zeros_like(ids)
            return steps - runs.first[numbers], runs.stop[numbers] - 1 - steps

    def read(self, ids: IntArray, keys: Sequence[Key]) -> list[Array]:
        """Return fields of rows; bfloat16 as uint16 bits.

        Args:
            ids: Which rows. Any shape.
            keys: Of the fields.

        Returns:
            One array per field. Shapes `(*ids.shape, *row shape)`.

        Raises:
            SchemaError: There is no such field.
        """
        flat = np.ascontiguousarray(ids).reshape(-1)
        self._show(flat)
        columns = self.storage.read(flat, [self.storage.place_of(key) for key in keys])
        return [column.reshape(*ids.shape, *column.shape[1:]) for column in columns]

    def columns(self, places: Sequence[int] | None = None) -> list[Array]:
        """Return the fields of the batch, in the schema's order, those that have moved from `next_ids`.

        Args:
            places: Positions of the fields wanted; None: all.
        """
        moved = self.moved if places is None else self.moved.intersection(places)
        if not moved:
            return self.storage.read(self.ids, places)
        wanted = range(len(self.storage.require_schema().fields)) if places is None else places
        own = [place for place in wanted if place not in moved]
        other = [place for place in wanted if place in moved]
        found = dict(zip(own, self.storage.read(self.ids, own), strict=True))
        found |= zip(other, self.storage.read(self.next_ids, other), strict=True)
        return [found[place] for place in wanted]

    @property
    def oldest(self) -> int:
        """The smallest id of all rows that were shown, those of the batch included; 0: there are none."""
        return self._oldest

    @property
    def intact(self) -> bool:
        """Whether no row that was shown has been overwritten, and none at all changed, since."""
        if self._lost or self._changes & 1 or self._changes != self.storage.changes:
            return False
        # The oldest row is the first whose place is taken.
        return not self._oldest or self.storage.intact(np.array([self._oldest]))

    def _show(self, ids: IntArray) -> None:
        if ids.size:
            self._oldest = min(self._oldest or int(ids.flat[0]), int(ids.min()))

    def _locate(self, runs: Runs, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return run and step of rows; the runs' lock is held."""
        runs.look()
        known = self._located
        if known is None or known[0] is not runs or known[1] is not ids or known[2] != runs.moves:
            known = self._located = runs, ids, runs.moves, runs.locate(np.ascontiguousarray(ids))
        numbers = known[3][0]
        if numbers.size and int(numbers.min()) < 0:
            self._lost = True  # they have left: the rows are drawn again
        return known[3]


def _check_rows(storage: Storage) -> None:
    """Raise an error where rows are no steps that can be told from one another."""
    schema = storage.require_schema()
    if storage.ranking is not None:
        raise StateError(
            "rows of this store give way to better ones, which stand next to steps of other episodes",
            hint="look at other steps where all rows stay: with another writer",
        )
    if not schema.form:
        return
    form = json.loads(schema.form)
    if form.keys() & {"tree", "objects"}:
        raise SchemaError(
            "transforms that look at other steps need fields with names, the rows of this store have none",
            hint="store TensorDicts in columns",
        )
    if form.get("batch_size"):
        raise SchemaError(
            f"a row of this store has steps of its own (batch size {form['batch_size']}): transforms look at "
            "other rows as other steps",
            hint="store steps as rows: flatten what you extend with, or give the storage ndim=2",
        )


class StepTransform(ABC):
    """Make something of a batch's rows and of other steps of their episodes.

    Given to a buffer as any other transform, it acts right after the rows were read, before all others that
    are not of this kind, and after those that are and stand before it. It sees rows as they are stored.

    Threads: any number may sample at once: `look` hands what it finds to `apply`, and keeps nothing.
    Processes: a copy is one of its own. Crashes: it keeps nothing.

    Example:
        >>> class Remaining(StepTransform):
        ...     def look(self, view):
        ...         return view.reach(view.ids)[1]
        ...     def apply(self, batch, seen):
        ...         return batch.set("remaining", torch.from_numpy(seen))
        >>> rb.append_transform(Remaining())
    """

    @abstractmethod
    def look(self, view: StepView) -> Any:
        """Return what `apply` needs; called while the rows are read, again where a writer was faster.

        Args:
            view: What it may see. It may set `next_ids` and `moved`.
        """

    @abstractmethod
    def apply(self, batch: Any, seen: Any) -> Any:
        """Return what becomes of the batch.

        Args:
            batch: A TensorDict. Batch size `[n]`, one row for each of the view's.
            seen: What `look` returned.
        """

    def forward(self, batch: Any) -> NoReturn:
        """Refuse to act on a batch alone.

        Raises:
            StateError: Always: without a store there are no other steps.
        """
        raise StateError(
            f"{type(self).__name__} looks at other steps of a batch's episodes: it acts inside a buffer only",
            hint="give it to a buffer (transform=, or append_transform), of an ensemble to the members",
        )

    def __call__(self, batch: Any) -> NoReturn:
        """Do as `forward`."""
        self.forward(batch)
