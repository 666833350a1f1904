"""Find the trajectories of a buffer that meet a condition.

The storage knows where trajectories begin and end, as for slice samplers. The fields that the condition uses
are read for all rows, the other fields only for trajectories that meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from expstore.core.values import Array, IntArray, Key, to_key
from expstore.data.batch import Builder
from expstore.data.containers import form_of
from expstore.data.nested_rows import split_rows, take_rows
from expstore.errors import ArgumentError, NotFoundError, StateError
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.schema.row_selection import no_rows
from expstore.schema.schema import Schema
from expstore.storages.read_view import ReadView, read_present
from expstore.trajectories.predicates import NAMES, Condition, Trajectory, check_predicate, find_entry, split
from expstore.transforms import Compose

#: About how many rows are read at once.
_CHUNK = 1 << 16
#: Trajectories in a result share blocks of memory up to this size. A block is freed with the last of them.
_RESULT_BYTES = 1 << 20
#: Up to this many values torch sums in one thread. It sums more of them in parts, which rounds differently.
_ONE_THREAD = 1 << 15

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(1),
    "mean": lambda values: values.double().mean(1),
    "max": lambda values: values.amax(1),
    "min": lambda values: values.amin(1),
    "first": lambda values: values[:, 0],
    "last": lambda values: values[:, -1],
}

NestedKey = str | Key


def find_trajectories(
    storage: ReadView,
    transform: Compose,
    predicate: Callable[[Any], Any] | None,
    trajectory_key: NestedKey | None,
    finish: Callable[[Any], Any],
) -> list[Any]:
    """Return the trajectories that meet a condition, the oldest first, one lane after another.

    Args:
        storage: The storage with the rows.
        transform: The transforms of samples, which are applied before the condition is evaluated, too.
        predicate: A condition built from `traj`, or a function of a trajectory; None for all trajectories.
        trajectory_key: The field that identifies trajectories; None for the storage's episodes.
        finish: Converts each result.

    Raises:
        NotFoundError: The field does not exist, or no field identifies or ends trajectories.
        ArgumentError: Rows are not TensorDicts, or the condition has a value per step.
    """
    check_predicate(predicate)
    if not storage.stored.rows:
        return []
    if storage.row_traits.whole:
        found = _search_objects(storage, transform, predicate, trajectory_key)
    else:
        found = _search_rows(storage, transform, predicate, trajectory_key)
    return [finish(one) for one in found]


# -- rows in columns ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """The fields to read, and the transforms to apply, before a condition can be evaluated.

    Args:
        schema: The fields that are read; None if no field is read.
        places: Positions of these fields in the storage's schema.
        transform: The transforms that are applied.
        whole: Whether all fields are read and all transforms are applied, so that the result can be returned.
    """

    schema: Schema | None
    places: list[int]
    transform: Compose
    whole: bool


def _search_rows(
    storage: ReadView,
    transform: Compose,
    predicate: Callable[[Any], Any] | None,
    trajectory_key: NestedKey | None,
) -> Iterator[Any]:
    form = form_of(storage)
    if not is_tensor_collection(form.build(_build_no_rows(storage.require_schema()), (0,), {})):
        raise ArgumentError(
            "ReplayBuffer.query requires a tensordict-backed storage: rows of other kinds have no fields"
        )
    schema = storage.require_schema()
    everything = _Plan(schema, list(range(len(schema.fields))), transform, True)
    plan = everything if predicate is None else _plan(storage, transform, predicate)
    together = max(1, _RESULT_BYTES // max(1, sum(entry.row_bytes for entry in schema.fields)))
    for runs in _runs(storage, trajectory_key).chunks(_CHUNK):
        seen = _read(storage, plan, runs)
        chosen = seen.find(predicate)
        if plan.whole:
            yield from seen.trajectories() if predicate is None else map(seen.trajectory, chosen)
            continue
        for found in seen.runs.take(chosen).chunks(together):
            yield from _read(storage, everything, found).trajectories()


def _build_no_rows(schema: Schema) -> list[Array]:
    return [no_rows(entry) for entry in schema.fields]


def _runs(storage: ReadView, trajectory_key: NestedKey | None) -> _Runs:
    """Return all trajectories, the oldest first, one lane after another."""
    keys, schema = storage.keys, storage.require_schema()
    name = None if trajectory_key is None else to_key(trajectory_key)
    if name is not None and name not in schema:
        raise NotFoundError(
            f"trajectory_key {trajectory_key!r} not found in data.", hint=f"it has {schema!r}"
        )
    if name is None and keys.trajectory is None:
        name = next((key for key in NAMES if key in schema and schema[key].row_items == 1), None)
        if name is None and keys.terminated is keys.truncated is keys.done is keys.start is None:
            raise NotFoundError(
                "Cannot split data into trajectories: there is no field that identifies or ends them",
                hint="pass trajectory_key",
            )
    storage.follow()
    runs = Trajectories(name).of(storage)
    with runs.lock:
        runs.look()
        lengths = runs.stop - runs.first
        chosen = np.flatnonzero(lengths > 0)
        lengths = lengths[chosen]
        ids = runs.rows(chosen, runs.first[chosen].copy(), lengths)
    found = _Runs(ids, lengths)
    first = ids[found.starts]
    order = np.lexsort((first, (first - 1) % storage.geometry.lanes))
    return found if (order[1:] > order[:-1]).all() else found.take(order)


@dataclass(frozen=True)
class _Runs:
    """The rows of some trajectories, concatenated.

    Args:
        ids: Ids of the rows, in the order of the steps. Shape `(rows,)`.
        lengths: Number of rows of each trajectory, at least 1. Shape `(trajectories,)`.
    """

    ids: IntArray
    lengths: IntArray

    def __len__(self) -> int:
        return self.lengths.size

    @cached_property
    def starts(self) -> IntArray:
        """The position of each trajectory's first row. Shape `(trajectories,)`."""
        return np.cumsum(self.lengths) - self.lengths

    def take(self, chosen: IntArray) -> _Runs:
        """Return the trajectories with these numbers."""
        lengths, starts = self.lengths[chosen], self.starts[chosen]
        moved = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return _Runs(self.ids[moved + np.arange(moved.size)], lengths)

    def chunks(self, rows: int) -> Iterator[_Runs]:
        """Yield some trajectories at a time: about `rows` rows, or one trajectory."""
        done, first = 0, 0
        while first < len(self):
            stop = max(first + 1, int(np.searchsorted(self.starts, done + rows, side="right")) - 1)
            stop = len(self) if self.ids.size <= done + rows else stop
            lengths = self.lengths[first:stop]
            size = int(lengths.sum())
            yield _Runs(self.ids[done : done + size], lengths)
            done, first = done + size, stop

    def among(self, ids: IntArray) -> _Runs:
        """Return the trajectories with only those of their rows that are in `ids`."""
        if ids.size == self.ids.size:
            return self
        left = np.add.reduceat(np.isin(self.ids, ids), self.starts, dtype=np.int64)
        return _Runs(ids, left[left > 0])


@dataclass(frozen=True)
class _Seen:
    """Some trajectories and their values.

    Args:
        runs: The rows of the trajectories.
        batch: The values of the rows.
    """

    runs: _Runs
    batch: Any

    def trajectory(self, number: int) -> Any:
        """Return a trajectory for the user."""
        start = int(self.runs.starts[number])
        return Trajectory(take_rows(self.batch, slice(start, start + int(self.runs.lengths[number]))))

    def trajectories(self) -> Iterator[Any]:
        """Yield all trajectories for the user."""
        if len(self.runs):
            for rows in split_rows(self.batch, self.runs.lengths.tolist()):
                yield Trajectory(rows, batch_size=rows.batch_size)

    def find(self, predicate: Callable[[Any], Any] | None) -> IntArray:
        """Return the numbers of the trajectories that meet a condition."""
        numbers = range(len(self.runs))
        if isinstance(predicate, Condition):
            glance = _Glance(self)
            return np.array([number for number in numbers if predicate(glance.move(number))], np.int64)
        met = [n for n in numbers if predicate is None or predicate(self.trajectory(n))]
        return np.array(met, np.int64)


class _Glance:
    """The attributes of a trajectory that a `Condition` uses.

    Constructing a `Trajectory` would take several times as long. Threads: one thread uses it.
    """

    def __init__(self, seen: _Seen) -> None:
        self._seen, self._number = seen, 0
        self._fields: dict[NestedKey, tuple[Any, bool]] = {}  # values, and whether they can be sliced
        self._reduced: dict[tuple[NestedKey, str], Array | None] = {}

    def move(self, number: int) -> _Glance:
        """Go to the trajectory with this number."""
        self._number = number
        return self

    @property
    def length(self) -> int:
        """The number of transitions."""
        return int(self._seen.runs.lengths[self._number])

    @property
    def total_reward(self) -> Any:
        """The sum of the rewards."""
        found = self.reduce_field("reward", "sum")
        if found is not None:
            return found
        rewards = self.get("reward")
        if rewards is None:
            rewards = self._seen.trajectory(self._number).reward  # raises an error that lists the entries
        return torch.as_tensor(rewards).sum()

    def get(self, key: NestedKey) -> Any:
        """Return an entry of the root, or else of `next`; None if neither has it."""
        values, plain = self._entry(key)
        if not plain:
            return self._seen.trajectory(self._number).get(key)
        if values is None:
            return None
        start = int(self._seen.runs.starts[self._number])
        return values[start : start + self.length]

    def reduce_field(self, key: NestedKey, word: str) -> Any:
        """Return a field reduced to a number; None if it must be computed from `get`.

        The first call computes it for all trajectories.
        """
        if (key, word) not in self._reduced:
            values, plain = self._entry(key)
            runs = self._seen.runs
            found = (
                reduce_runs(values, runs.starts, runs.lengths, word) if plain and values is not None else None
            )
            self._reduced[key, word] = found
        found = self._reduced[key, word]
        return None if found is None else found[self._number]

    def _entry(self, key: NestedKey) -> tuple[Any, bool]:
        if key not in self._fields:
            values = find_entry(self._seen.batch, key)
            plain = values is None or (isinstance(values, torch.Tensor) and not values.is_nested)
            self._fields[key] = values, plain
        return self._fields[key]


def _read(storage: ReadView, plan: _Plan, runs: _Runs) -> _Seen:
    """Read trajectories according to a plan; trajectories without any readable row are left out."""
    ids, columns, view = plan.transform.read(
        storage, lambda: runs.ids[storage.stored.holds(runs.ids)], plan.places
    )
    left = runs.among(ids)
    if not ids.size:
        return _Seen(left, None)
    if plan.whole:
        batch = form_of(storage).build(columns, (ids.size,), {})
    elif plan.schema is None:
        batch = TensorDict({}, [ids.size])
    else:
        batch = Builder(plan.schema).build(columns, torch.Size((ids.size,)), {})
    if view is not None:
        batch = plan.transform.apply(batch, view)
    return _Seen(left, _transform(plan.transform, batch, ids.size))


def _transform(transform: Compose, batch: Any, rows: int) -> Any:
    if not len(transform):
        return batch
    batch = transform.finish(batch)
    if not is_tensor_collection(batch) or batch.batch_size[:1] != (rows,):
        raise StateError("a transform has changed the number of rows, so trajectories cannot be split")
    return batch


# -- what a condition needs ---------------------------------------------------------------------------


def _plan(storage: ReadView, transform: Compose, predicate: Callable[[Any], Any]) -> _Plan:
    """Return which fields and transforms a condition needs."""
    schema = storage.require_schema()
    ask = getattr(predicate, "required_keys", None)
    required = ask() if callable(ask) else None
    everything = _Plan(schema, list(range(len(schema.fields))), transform, True)
    if required is None:
        return everything
    wanted = {to_key(key) for key in required}
    wanted |= {("next", *key) for key in wanted if len(key) == 1}
    parts: list[Any] = []
    for part in reversed(transform.acting):
        writes = getattr(part, "out_keys", None)
        if not writes:  # it is unknown which fields it writes
            return everything
        mask = getattr(part, "mask_key", None)
        writes = [*writes, *([] if mask is None else [mask])]
        if any(_meet(to_key(key), known) for key in writes for known in wanted):
            parts.insert(0, part)
            wanted |= {to_key(key) for key in getattr(part, "in_keys", None) or ()}
    places = [
        place for place, entry in enumerate(schema.fields) if any(_meet(entry.key, key) for key in wanted)
    ]
    if len(places) == len(schema.fields) and len(parts) == len(transform):
        return everything
    fields = [schema.fields[place] for place in places]
    return _Plan(Schema(fields) if fields else None, places, Compose(*parts), False)


def _meet(first: Key, second: Key) -> bool:
    """Return whether two keys are equal, or one is a prefix of the other."""
    depth = min(len(first), len(second))
    return first[:depth] == second[:depth]


# -- rows that are objects ----------------------------------------------------------------------------


def _search_objects(
    storage: ReadView,
    transform: Compose,
    predicate: Callable[[Any], Any] | None,
    trajectory_key: NestedKey | None,
) -> Iterator[Any]:
    _, (column,) = read_present(storage, storage.stored.ids(), [0])
    items = column.tolist()
    wrong = next((item for item in items if not isinstance(item, TensorDictBase)), None)
    if wrong is not None:
        raise ArgumentError(
            f"ReplayBuffer.query requires a tensordict-backed storage, got items of type {type(wrong)}."
        )
    if any(item.batch_dims for item in items):
        raise ArgumentError(
            "ReplayBuffer.query on a list-based storage expects single-transition (scalar) items."
        )
    transform.look(storage, np.zeros(0, np.int64))  # raises an error for transforms that read other steps
    data = LazyStackedTensorDict.lazy_stack(items)
    starts, stops = split(data, trajectory_key)
    seen = _transform(transform, data.clone() if len(transform) else data, len(items))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        trajectory = Trajectory(seen[start:stop].clone())
        if predicate is None or predicate(trajectory):
            yield trajectory


def reduce_runs(values: torch.Tensor, starts: IntArray, lengths: IntArray, word: str) -> Array | None:
    """Reduce the values of runs of rows to one number each, such as the sum over the rows of a run.

    Every result equals, to the last bit, what torch computes for that run alone.

    Args:
        values: Values of all rows. Shape `(rows, *row shape)`, with a dtype that NumPy has.
        starts: The first row of each run. Shape `(runs,)`.
        lengths: Number of rows of each run, at least 1. Shape `(runs,)`.
        word: The reduction: "sum", "mean", "max", "min", "first" or "last".

    Returns:
        Shape `(runs,)`. None if a run has no such number, or if the last bits could differ from torch's
        result.
    """
    items = values.shape[1:].numel()
    single = word in ("first", "last")
    if (
        not items
        or (single and items != 1)
        or values.dtype in (torch.bfloat16, torch.complex64, torch.complex128)
    ):
        return None
    if int(lengths.max(initial=0)) * items > _ONE_THREAD:
        return None
    flat = values.detach().reshape(values.shape[0], items).numpy()
    found: Array | None = None
    for length in np.unique(lengths).tolist():
        same = np.flatnonzero(lengths == length)
        most = _ONE_THREAD // (length * items)
        for runs in (same[first : first + most] for first in range(0, same.size, most)):
            rows = flat[starts[runs][:, None] + np.arange(length)]
            reduced = _REDUCTIONS[word](torch.from_numpy(rows.reshape(runs.size, length * items))).numpy()
            if found is None:
                found = np.empty(lengths.size, reduced.dtype)
            found[runs] = reduced
    return found
