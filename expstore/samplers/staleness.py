"""Sampling by how old the policy was that collected a row.

Buffers take the sampler. It reads one field, the policy's version, of rows that are new to it, and keeps
runs of rows of one version; the rows themselves it leaves to others.
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
from expstore.errors import NotReadyError, SchemaError
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Where
from expstore.samplers.row_weights import RowMasses

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["StalenessAwareSampler"]

Floats = NDArray[np.float64]

#: What its progress begins with, so that another sampler's is not taken for it.
_KIND = 2
#: Versions read at once.
_CHUNK = 1 << 16
_TRIES = 3
#: Draws of a batch until so many different rows are found; then every row is given a number.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class _Versions:
    """Hold which ids have which version: runs, as long as they can be, ascending. Shapes `(runs,)`."""

    first: IntArray
    last: IntArray
    version: Floats

    @classmethod
    def none(cls) -> Self:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

    def add(self, first_id: int, versions: Floats) -> _Versions:
        """Return them and the versions of the rows from `first_id` on, which are all newer."""
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
        """Return those of rows with larger ids."""
        left = int(np.searchsorted(self.last, low, side="right"))
        if not left and (not self.first.size or self.first[0] > low):
            return self
        return _Versions(np.maximum(self.first[left:], low + 1), self.last[left:], self.version[left:])


@dataclass(frozen=True, slots=True)
class _Known:
    """Hold the versions of the rows of a window, and the changes and deleted ids that they are valid for."""

    versions: _Versions = field(default_factory=_Versions.none)
    window: Window = field(default_factory=lambda: Window(0, 0))
    seen: tuple[int, int, IdSet] | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    """Hold the runs that take part, with the weight of one row of each. Shapes `(runs,)`."""

    first: IntArray
    count: IntArray
    staleness: Floats
    weight: Floats
    reach: Floats  # running sum of weight times count, or of weight times mass
    rows: int  # that take part
    masses: RowMasses | None = None  # by which rows of a run count

    def draw(self, size: int, generator: np.random.Generator) -> IntArray:
        """Draw ids with replacement. Shape `(size,)`."""
        share, place = generator.random((2, size))
        run = np.searchsorted(self.reach, share * self.reach[-1], side="right")
        np.minimum(run, self.reach.size - 1, out=run)  # rounding
        if self.masses is not None:
            return self.masses.pick(self.first[run], self.first[run] + self.count[run] - 1, place)
        ids: IntArray = self.first[run] + (place * self.count[run]).astype(np.int64)
        return ids

    def draw_different(self, size: int, generator: np.random.Generator) -> IntArray:
        """Draw ids of which none comes twice. Shape `(size,)`, at most `rows`.

        What a draw with replacement would bring, less what was there before. Where that takes too
        long, the rest comes by the exponential numbers of Efraimidis and Spirakis 2006, which give the
        same law.
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
        """Return how stale rows are. Shapes `(n,)`."""
        found: Floats = self.staleness[np.searchsorted(self.first, ids, side="right") - 1]
        return found


class StalenessAwareSampler(Sampler):
    """Draw rows by staleness: how many versions the policy that collected them lies behind.

    Under torchrl's name and with its law: a row of staleness s has weight 1 / (s + 1), one of more than
    `max_staleness` is left out, and a batch holds no row twice unless it is larger than the number of
    rows that take part. With `where` only rows that match do; with `weight` a row's own is multiplied by it.
    Your program says with `consumer_version` which version it trains; batches carry
    `staleness`.

    A row of a version above `consumer_version` counts as staleness 0. Nothing is fresher than what the
    newest policy has collected, and while collectors run beside the training their versions may arrive
    before the program has counted its own; torchrl's draw fails then.

    A batch costs as much as there are runs of rows of one version, not as there are rows. After `[]=`
    all versions are read again.

    Threads: any number may sample while one writes. Crashes: `consumer_version` is kept in the store when
    it is set; a sampler that is given none goes on with it, and a restart with the next batch.

    Args:
        max_staleness: Rows of a larger staleness are left out; -1: none are.
        staleness_weight_fn: Makes weights of staleness; both float32 tensors of shape `(n,)`, weights
            finite and not negative. None: 1 / (s + 1).
        version_key: The field that holds the version: one number per row.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`; None: all.
        weight: By what the weight of each is multiplied: a numeric one; None: 1.

    Example:
        >>> sampler = StalenessAwareSampler(max_staleness=5)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
        >>> sampler.consumer_version = 3
    """

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: str | tuple[str, ...] = "policy_version",
        *,
        where: str | Where | None = None,
        weight: str | None = None,
    ) -> None:
        super().__init__(where=where, weight=weight)
        self.max_staleness = max_staleness
        self._version_key = to_key(version_key)
        self._weight_fn = staleness_weight_fn
        self._consumer_version = 0
        self._told = False  # whether the program has said its version, and no storage keeps it yet
        self._forget()

    def _forget(self) -> None:
        self._storage: weakref.ref[ReadView] | None = None
        # Swapped as one, so that threads need no lock: who reads versions may have to wait for a writer.
        self._known = _Known()
        self._cached: tuple[_Versions, int, int, RowMasses | None, _Table] | None = None
        self._masses: RowMasses | None = None

    # -- what the program sets -------------------------------------------------------------------

    @property
    def consumer_version(self) -> int:
        """The version of the policy that is trained."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        value = operator.index(value)
        if not 0 <= value < 2**63:
            raise ValueError(f"consumer_version must be at least 0, got {value}")
        self._consumer_version, self._told = value, self._storage is None
        self._keep()

    def increment_consumer_version(self) -> None:
        """Add 1 to the consumer version."""
        self.consumer_version = self._consumer_version + 1

    @property
    def max_staleness(self) -> int:
        """Rows of a larger staleness are left out; -1: none are."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        value = operator.index(value)
        if value < -1:
            raise ValueError(f"max_staleness must be at least 0, or -1 for no limit, got {value}")
        self._max_staleness = value

    def _keep(self) -> None:
        storage = None if self._storage is None else self._storage()
        if storage is not None and not storage.closed:
            storage.draws.note_progress((_KIND, self._consumer_version, 0, 0))

    @property
    def reads(self) -> frozenset[Key]:
        """Fields that it reads itself, beside those of `where` and `weight`."""
        return frozenset((self._version_key,))

    def attach(self, storage: ReadView) -> None:
        """Go on with the version that the storage's last sampler of this kind had, unless one was set."""
        super().attach(storage)
        self._storage, self._known, self._masses = weakref.ref(storage), _Known(), None
        kind, version, *_ = storage.draws.progress
        if self._told:
            self._keep()
        elif kind == _KIND:
            self._consumer_version = version
        self._told = False

    # -- drawing ---------------------------------------------------------------------------------

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            SchemaError: The rows have no such field, or it is not one number.
            NotReadyError: Every row is too stale, or has weight 0; or no row matches.
            ValueError: `staleness_weight_fn` has returned something else than weights.
            QueryError: The filter cannot be computed.
        """
        if self.filter is not None:
            return self._draw_filtered(
                storage, lambda: self._draw_by_staleness(storage, batch_size, generator)
            )
        found = self._draw_by_staleness(storage, batch_size, generator)
        if found is None:
            raise self.build_no_rows_error(storage)
        return found

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
        """Return whether a selection is by the versions of now."""
        return selection.progress == (self._consumer_version, self._max_staleness)

    def _catch_up(self, storage: ReadView) -> _Versions:
        """Read the versions of new rows and drop those of rows that have left.

        A version that was read from a slot while a later row came there stands for a row that is
        overwritten: the buffer finds that out of every row that it has drawn, and draws again.
        """
        for _ in range(_TRIES):
            known = self._known  # before the window, which then is not the older of them
            changes, deleted, window = storage.changes.number, storage.epochs.deleted, storage.window
            place = self._place(storage)  # after `deleted`, which move when it does
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

    def _masses_of(self, storage: ReadView) -> RowMasses | None:
        filter, masses = self.filter, self._masses
        if filter is None:
            return None
        if masses is None or masses.evaluation != filter.evaluation:
            masses = self._masses = RowMasses.of(filter, storage)
        return masses

    def _place(self, storage: ReadView) -> int:
        """Return the position of the version's field."""
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

    def _weigh(self, versions: _Versions, masses: RowMasses | None) -> _Table:
        """Return the runs that take part."""
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
                f"staleness_weight_fn gives all {int(count.sum())} rows weight 0",
                hint="it must give some of them more",
            )
        first, count, staleness, weight = first[some], count[some], staleness[some], weight[some]
        mass, rows = (count, count) if masses is None else masses.between(first, first + count - 1)
        reach = np.cumsum(weight * mass)
        table = _Table(first, count, staleness, weight, reach, int(rows.sum()), masses)
        if ask is None:  # another function may answer otherwise next time
            self._cached = versions, consumer, limit, masses, table
        return table

    # -- state -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it reads versions by itself."""
        kept = ("_max_staleness", "_version_key", "_weight_fn", "_consumer_version")
        filter = super().__getstate__().get("filter")
        return {name: self.__dict__[name] for name in kept} | {"_told": False, "filter": filter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        own = {"consumer_version": self._consumer_version, "max_staleness": self._max_staleness}
        return own | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.max_staleness = int(state_dict["max_staleness"])
        self.consumer_version = int(state_dict["consumer_version"])

    def __repr__(self) -> str:
        return (
            f"StalenessAwareSampler(consumer_version={self._consumer_version}, "
            f"max_staleness={self._max_staleness}{self._filtering})"
        )


def _read_on(storage: ReadView, place: int, versions: _Versions, window: Window) -> _Versions:
    """Return versions with those of a window of newer rows."""
    for first, count in window.runs():
        for start in range(first, first + count, _CHUNK):
            ids = np.arange(start, min(start + _CHUNK, first + count))
            (column,) = storage.read(ids, [place])
            versions = versions.add(start, column.reshape(-1).astype(np.float64))
    return versions


def _ask_weights(ask: Callable[[torch.Tensor], torch.Tensor], staleness: Floats) -> Floats:
    """Return the weights that a user's function gives, the largest of them 1 or all 0. Shapes `(n,)`."""
    given = ask(torch.from_numpy(staleness.astype(np.float32)))
    weights: Floats = torch.as_tensor(given).detach().cpu().to(torch.float64).numpy()
    if weights.shape != staleness.shape or not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError(
            f"staleness_weight_fn must give {staleness.size} finite weights >= 0, one per staleness; "
            f"it gave {given}"
        )
    return weights / (weights.max() or 1.0)
