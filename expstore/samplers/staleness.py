"""A sampler that draws rows by the age of the policy that collected them.

It reads one field of new rows, the version of the policy, and keeps runs of rows with the same version. It
reads no other fields.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.id_set import IdSet
from expstore.core.values import IntArray, Key, Selection, Window, key_name, to_key
from expstore.errors import ArgumentError, NotReadyError, SchemaError
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Filter, Where

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

Floats = NDArray[np.float64]

#: First number of its progress, which identifies the class of sampler.
_KIND = 2
#: Number of versions that are read at once.
_CHUNK = 1 << 16
_TRIES = 3
#: Rounds in which a batch without repeated rows is drawn; then all remaining rows get a random number.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class _Versions:
    """The versions of ids, as runs of consecutive ids with the same version. Ascending; shapes `(runs,)`."""

    first: IntArray
    last: IntArray
    version: Floats

    @classmethod
    def none(cls) -> Self:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

    def add(self, first_id: int, versions: Floats) -> _Versions:
        """Return these runs and those of newer rows.

        Args:
            first_id: Id of the first new row, above all ids so far.
            versions: Versions of the new rows, which have consecutive ids.
        """
        starts = np.flatnonzero(np.append(True, versions[1:] != versions[:-1]))
        first = starts + first_id
        last = np.append(first[1:] - 1, first_id + versions.size - 1)
        version = versions[starts]
        if self.last.size and self.last[-1] + 1 == first_id and self.version[-1] == version[0]:
            first, version = first[1:], version[1:]
            return _Versions(
                np.append(self.first, first),
                np.concatenate([self.last[:-1], last]),
                np.append(self.version, version),
            )
        return _Versions(
            np.append(self.first, first), np.append(self.last, last), np.append(self.version, version)
        )

    def above(self, low: int) -> _Versions:
        """Return the runs of ids above `low`."""
        left = int(np.searchsorted(self.last, low, side="right"))
        if not left and (not self.first.size or self.first[0] > low):
            return self
        return _Versions(np.maximum(self.first[left:], low + 1), self.last[left:], self.version[left:])


@dataclass(frozen=True, slots=True)
class _Known:
    """The versions of the rows in a window, and the counters of changes for which they are valid."""

    versions: _Versions = field(default_factory=_Versions.none)
    window: Window = field(default_factory=lambda: Window(0, 0))
    seen: tuple[int, int, IdSet] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _RowMasses:
    """Running sums over the rows from id `low` + 1 on: of masses, and of the number of masses above 0.

    The masses are those that a filter gives. Shapes `(rows + 1,)`; the first sum is 0. Threads: it is
    immutable.
    """

    evaluation: int
    low: int
    sums: Floats
    counts: IntArray

    @classmethod
    def of(cls, filter: Filter, storage: ReadView) -> Self:
        """Sum the masses of all rows that a filter has evaluated."""
        with filter.lock:
            window, evaluation = filter.readable(storage), filter.evaluation
            masses = np.zeros(window.size + 1)
            ids = window.ids()
            masses[ids - window.low] = filter.masses[storage.description.window_ring.slot_of(ids)]
        return cls(evaluation, window.low, np.cumsum(masses), np.cumsum(masses > 0))

    def between(self, first: IntArray, last: IntArray) -> tuple[Floats, IntArray]:
        """Return the total mass of runs of rows, and how many of their rows have a mass. Shapes `(runs,)`.

        Args:
            first: First id of each run. Shape `(runs,)`.
            last: Last id of each run. Shape `(runs,)`.
        """
        start, stop = self._places(first, last)
        return self.sums[stop] - self.sums[start], self.counts[stop] - self.counts[start]

    def _places(self, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
        end = self.sums.size - 1
        start = np.clip(first - 1 - self.low, 0, end)
        return start, np.maximum(start, np.clip(last - self.low, 0, end))

    def pick(self, first: IntArray, last: IntArray, share: Floats) -> IntArray:
        """For each run of rows, pick a row by cumulative mass. Shapes `(n,)`.

        Args:
            first: First id of each run; every run must have some mass.
            last: Last id of each run.
            share: The share of the run's mass at which the row is picked, from 0 to 1.
        """
        start, stop = self._places(first, last)
        low, high = self.sums[start], self.sums[stop]
        under = np.minimum(low + share * (high - low), np.nextafter(high, 0.0))  # rounding errors
        ids: IntArray = np.searchsorted(self.sums, under, side="right") + self.low
        return ids

    def single(self, ids: IntArray) -> Floats:
        """Return the masses of rows. Shapes `(n,)`."""
        return self.between(ids, ids)[0]


@dataclass(frozen=True, slots=True)
class _Table:
    """The runs of rows that are drawn from, with the weight of one row of each. Shapes `(runs,)`."""

    first: IntArray
    count: IntArray
    staleness: Floats
    weight: Floats
    reach: Floats  # running sum of weight times count, or of weight times mass
    rows: int  # number of rows to draw from
    masses: _RowMasses | None = None  # masses of the rows within a run, if there is a filter

    def draw(self, size: int, generator: np.random.Generator) -> IntArray:
        """Draw ids with replacement. Shape `(size,)`."""
        share, place = generator.random((2, size))
        run = np.searchsorted(self.reach, share * self.reach[-1], side="right")
        np.minimum(run, self.reach.size - 1, out=run)  # rounding errors
        if self.masses is not None:
            return self.masses.pick(self.first[run], self.first[run] + self.count[run] - 1, place)
        ids: IntArray = self.first[run] + (place * self.count[run]).astype(np.int64)
        return ids

    def draw_different(self, size: int, generator: np.random.Generator) -> IntArray:
        """Draw ids without replacement. Shape `(size,)`, at most `rows`.

        Ids are drawn with replacement, and repeated ids are dropped. If that takes too many rounds, the rest
        is drawn with exponential random numbers (Efraimidis and Spirakis 2006), which gives the same
        probabilities.
        """
        ids = np.empty(0, np.int64)
        for _ in range(_ROUNDS):
            ids = np.append(ids, self.draw(size, generator))
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
            if ids.size >= size:
                return ids[:size]
        run = np.repeat(np.arange(self.first.size), self.count)
        every = np.arange(run.size) - (np.cumsum(self.count) - self.count)[run] + self.first[run]
        weight = self.weight[run]
        if self.masses is not None:
            weight = weight * self.masses.single(every)
        left = ~np.isin(every, ids) & (weight > 0)
        arrivals = generator.standard_exponential(int(left.sum())) / weight[left]
        return np.append(ids, every[left][np.argsort(arrivals, kind="stable")[: size - ids.size]])

    def staleness_of(self, ids: IntArray) -> Floats:
        """Return the staleness of rows. Shapes `(n,)`."""
        found: Floats = self.staleness[np.searchsorted(self.first, ids, side="right") - 1]
        return found


class StalenessAwareSampler(Sampler):
    """Draw rows by staleness: the number of versions by which the policy that collected them is behind.

    Name and probabilities are torchrl's: a row of staleness s has weight 1 / (s + 1), rows with a larger
    staleness than `max_staleness` are left out, and no row is drawn twice in a batch unless the batch is
    larger than the number of rows to draw from. With `where` only matching rows are drawn; with `weight` the
    weight of a row is multiplied by it. Set `consumer_version` to the version that you train. Batches have a
    field `staleness`.

    A row with a version above `consumer_version` has staleness 0, because no row can be fresher. Collectors
    that run during training may write rows of a new version before the program has set `consumer_version`;
    torchrl's draw fails then.

    The time of a draw depends on the number of runs of rows with the same version, not on the number of rows.
    After `rb[i] = ...` all versions are read again.

    Threads: any number may sample while one writes. Crashes: `consumer_version` is stored when it is set. A
    sampler on which it was not set continues with the stored one, and after a restart the next batch is the
    one that would have followed.

    Args:
        max_staleness: The largest staleness of rows that are drawn; -1 for no limit.
        staleness_weight_fn: Returns the weights for a tensor of staleness; both are float32 tensors of shape
            `(n,)`, and weights must be finite and at least 0. None for 1 / (s + 1).
        version_key: The field with the version: one number per row.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows.
        weight: Factor for the weight of each row: a numeric SQL expression, at least 0; None for 1.
        split: The split whose rows are drawn; None for the rows of all splits.

    Raises:
        ArgumentError: `max_staleness` is below -1.

    Example:
        >>> from expstore import MemoryStorage, StalenessAwareSampler, TensorDictReplayBuffer
        >>> sampler = StalenessAwareSampler(max_staleness=5)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
        >>> sampler.consumer_version = 3
    """

    keeps_to_split = True
    _transient = frozenset({"_told", "_storage", "_known", "_cached", "_masses"})

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: str | tuple[str, ...] = "policy_version",
        *,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
    ) -> None:
        super().__init__(where=where, weight=weight, split=split)
        self.max_staleness = max_staleness
        self._version_key = to_key(version_key)
        self._weight_fn = staleness_weight_fn
        self._consumer_version = 0
        self._begin()

    def _begin(self) -> None:
        self._told = False  # whether a version was set that is not stored in a storage yet
        self._storage: weakref.ref[ReadView] | None = None
        # Replaced by one assignment, because a lock would be held while versions are read, which may wait
        # for a writer.
        self._known = _Known()
        self._cached: tuple[_Versions, int, int, _RowMasses | None, _Table] | None = None
        self._masses: _RowMasses | None = None

    # -- what the program sets -------------------------------------------------------------------

    @property
    def consumer_version(self) -> int:
        """The version of the policy that is being trained."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        value = operator.index(value)
        if not 0 <= value < 2**63:
            raise ArgumentError(f"consumer_version must be at least 0, got {value}")
        self._consumer_version, self._told = value, self._storage is None
        self._keep()

    def increment_consumer_version(self) -> None:
        """Add 1 to the consumer version."""
        self.consumer_version = self._consumer_version + 1

    @property
    def max_staleness(self) -> int:
        """The largest staleness of rows that are drawn; -1 for no limit."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        value = operator.index(value)
        if value < -1:
            raise ArgumentError(f"max_staleness must be at least 0, or -1 for no limit, got {value}")
        self._max_staleness = value

    def _keep(self) -> None:
        storage = None if self._storage is None else self._storage()
        if storage is not None and not storage.closed:
            self._draws_of(storage).note_progress((_KIND, self._consumer_version, 0, 0))

    @property
    def reads(self) -> frozenset[Key]:
        """The field that the sampler itself reads: the version."""
        return frozenset((self._version_key,))

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage.

        Unless `consumer_version` was set, continue with the one of the storage's last sampler of this class.

        Raises:
            QueryError: The filter names a field that the storage does not have.
        """
        super().attach(storage)
        self._storage, self._known, self._masses = weakref.ref(storage), _Known(), None
        kind, version, *_ = self._draws_of(storage).progress
        if self._told:
            self._keep()
        elif kind == _KIND:
            self._consumer_version = version
        self._told = False

    # -- drawing ---------------------------------------------------------------------------------

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            SchemaError: There is no field `version_key`, or it is not one number per row.
            NotReadyError: All rows are too stale or have weight 0, or no row matches.
            ArgumentError: `staleness_weight_fn` returned something other than weights.
            QueryError: The filter cannot be evaluated.
        """
        return self._find_rows(storage, lambda: self._draw_by_staleness(storage, batch_size, generator))

    def _draw_by_staleness(
        self, storage: ReadView, batch_size: int, generator: np.random.Generator
    ) -> Selection | None:
        progress = self._consumer_version, self._max_staleness
        versions, masses = self._catch_up(storage), self._masses_of(storage)
        if masses is not None and not masses.between(versions.first, versions.last)[0].any():
            return None
        table = self._weigh(versions, masses)
        if batch_size > table.rows:
            ids = table.draw(batch_size, generator)
        else:
            ids = table.draw_different(batch_size, generator)
        return Selection(ids, {("staleness",): table.staleness_of(ids).astype(np.float32)}, progress)

    def stands(self, storage: ReadView, selection: Selection) -> bool:
        """Return whether `consumer_version` and `max_staleness` are still those of a selection."""
        return selection.progress == (self._consumer_version, self._max_staleness)

    def _catch_up(self, storage: ReadView) -> _Versions:
        """Read the versions of new rows, and drop those of evicted rows.

        A slot may be overwritten while its version is read. Then the row that the version belongs to is gone:
        the buffer checks this for every row that it has drawn, and draws again.
        """
        for _ in range(_TRIES):
            known = self._known  # read before the window, so that the window is not older
            changes, deleted, window = storage.changes.number, storage.epochs.deleted, storage.window
            place = self._place(storage)  # read after `deleted`, which is incremented when it changes
            seen = deleted, changes, window.deleted
            if seen == known.seen and window == known.window:
                break
            if seen != known.seen or not window.low < known.window.last <= window.last:
                known = _Known(_Versions.none(), Window(window.low, window.low))
            versions = _read_on(storage, place, known.versions, replace(window, low=known.window.last))
            known = self._known = _Known(versions.above(window.low), window, seen)
            if storage.epochs.deleted == deleted:
                break
        if not known.versions.first.size:
            raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        return known.versions

    def _masses_of(self, storage: ReadView) -> _RowMasses | None:
        filter, masses = self.filter, self._masses
        if filter is None:
            return None
        if masses is None or masses.evaluation != filter.evaluation:
            masses = self._masses = _RowMasses.of(filter, storage)
        return masses

    def _place(self, storage: ReadView) -> int:
        """Return the position of the field with the version."""
        schema, name = storage.require_schema(), key_name(self._version_key)
        place = schema.place(self._version_key)
        if place < 0:
            raise SchemaError(
                f"Could not find key {name!r} in the replay buffer storage",
                hint="write it with every row (torchrl's PolicyVersion transform does), or give version_key",
            )
        field = schema.fields[place]
        if field.row_items != 1 or field.dtype == "bfloat16" or field.numpy_dtype.kind not in "iuf":
            raise SchemaError(f"a policy's version is one number, but field {name!r} is {field}")
        return place

    def _weigh(self, versions: _Versions, masses: _RowMasses | None) -> _Table:
        """Return the runs of rows to draw from, with their weights."""
        consumer, limit = self._consumer_version, self._max_staleness
        cached = self._cached
        if cached is not None and cached[0] is versions and cached[1:4] == (consumer, limit, masses):
            return cached[4]
        first, count = versions.first, versions.last - versions.first + 1
        staleness = np.maximum(consumer - versions.version, 0.0)
        if masses is not None:
            some = masses.between(first, versions.last)[0] > 0
            first, count, staleness = first[some], count[some], staleness[some]
        if limit >= 0:
            fresh = staleness <= limit
            if not fresh.any():
                raise NotReadyError(
                    f"All {int(count.sum())} entries in the buffer exceed max_staleness={limit} "
                    f"(consumer_version={consumer})",
                    hint="Increase max_staleness or update collector policy weights more frequently",
                )
            first, count, staleness = first[fresh], count[fresh], staleness[fresh]
        ask = self._weight_fn
        weight = 1.0 / (staleness + 1.0) if ask is None else _ask_weights(ask, staleness)
        some = weight > 0
        if not some.any():
            raise NotReadyError(
                f"staleness_weight_fn returned weight 0 for all {int(count.sum())} rows",
                hint="return a weight above 0 for some staleness",
            )
        first, count, staleness, weight = first[some], count[some], staleness[some], weight[some]
        mass, rows = (count, count) if masses is None else masses.between(first, first + count - 1)
        reach = np.cumsum(weight * mass)
        table = _Table(first, count, staleness, weight, reach, int(rows.sum()), masses)
        if ask is None:  # a user's function may return other weights next time
            self._cached = versions, consumer, limit, masses, table
        return table

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        own = {"consumer_version": self._consumer_version, "max_staleness": self._max_staleness}
        return own | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.max_staleness = int(state_dict["max_staleness"])
        self.consumer_version = int(state_dict["consumer_version"])

    def __repr__(self) -> str:
        return (
            f"StalenessAwareSampler(consumer_version={self._consumer_version}, "
            f"max_staleness={self._max_staleness}{self._filtering})"
        )


def _read_on(storage: ReadView, place: int, versions: _Versions, window: Window) -> _Versions:
    """Return versions extended by those of a window of newer rows."""
    for first, count in window.runs():
        for start in range(first, first + count, _CHUNK):
            ids = np.arange(start, min(start + _CHUNK, first + count))
            (column,) = storage.read(ids, [place])
            versions = versions.add(start, column.reshape(-1).astype(np.float64))
    return versions


def _ask_weights(ask: Callable[[torch.Tensor], torch.Tensor], staleness: Floats) -> Floats:
    """Return the weights from a user's function, scaled so that the largest is 1. Shapes `(n,)`.

    If all weights are 0, they remain 0.
    """
    given = ask(torch.from_numpy(staleness.astype(np.float32)))
    weights: Floats = torch.as_tensor(given).detach().cpu().to(torch.float64).numpy()
    if weights.shape != staleness.shape or not (np.isfinite(weights) & (weights >= 0)).all():
        raise ArgumentError(
            f"staleness_weight_fn must return {staleness.size} finite weights >= 0, one per staleness; "
            f"it returned {given}"
        )
    return weights / (weights.max() or 1.0)
