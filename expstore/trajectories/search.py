"""The trajectories of a buffer that meet a condition.

Used by buffers. Where trajectories begin and end it asks the storage, as samplers of slices do; it reads the
fields that a condition names, and whole rows only where it is met.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from expstore.core.values import Array, IntArray, Key, to_key
from expstore.data.batch import Builder
from expstore.data.containers import form_of
from expstore.data.nested_rows import take_rows
from expstore.errors import NotFoundError, StateError
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.schema.row_selection import no_rows
from expstore.schema.schema import Schema
from expstore.storages.indexing import read_present
from expstore.storages.read_view import ReadView
from expstore.trajectories.predicates import NAMES, Condition, Trajectory, check_predicate, find_entry, split
from expstore.transforms import Compose

__all__ = ["find_trajectories"]

#: About so many rows are read at once.
_CHUNK = 1 << 16

NestedKey = str | Key


def find_trajectories(
    storage: ReadView,
    transform: Compose,
    predicate: Callable[[Any], Any] | None,
    trajectory_key: NestedKey | None,
    finish: Callable[[Any], Any],
) -> list[Any]:
    """Return the trajectories that meet a condition, the oldest first; lane after lane where there are any.

    Args:
        storage: Where the rows are.
        transform: What is done to samples; conditions and results see what it makes.
        predicate: Made of `traj`, or a function of a trajectory; None: all of them.
        trajectory_key: The field that names trajectories; None: as the storage knows its episodes.
        finish: What is done to each result last.

    Raises:
        NotFoundError: There is no such field; or nothing says where trajectories end.
        TypeError: Rows are no TensorDicts; or the condition has a value per step.
    """
    check_predicate(predicate)
    if not len(storage):
        return []
    if storage.row_traits.whole:
        found = _among_objects(storage, transform, predicate, trajectory_key)
    else:
        found = _among_rows(storage, transform, predicate, trajectory_key)
    return [finish(one) for one in found]


# -- rows in columns ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What is read, and done to it, to see whether a condition is met.

    Args:
        schema: The fields that are read; None: none are.
        places: Where they stand among those of the storage.
        transform: What is done.
        whole: All fields are read and everything is done: what is seen is the result.
    """

    schema: Schema | None
    places: list[int]
    transform: Compose
    whole: bool


def _among_rows(
    storage: ReadView,
    transform: Compose,
    predicate: Callable[[Any], Any] | None,
    trajectory_key: NestedKey | None,
) -> Iterator[Any]:
    form = form_of(storage)
    if not is_tensor_collection(form.build(_none(storage.require_schema()), (0,), {})):
        raise TypeError(
            "ReplayBuffer.query requires a tensordict-backed storage: rows of other kinds have no fields"
        )
    everything = _Plan(
        storage.require_schema(), list(range(len(storage.require_schema().fields))), transform, True
    )
    plan = everything if predicate is None else _plan(storage, transform, predicate)
    for runs in _chunks(_runs(storage, trajectory_key)):
        seen = _read(storage, plan, runs)
        for at in seen.asked(predicate):
            if plan.whole:
                yield seen.trajectory(at)
            else:
                found = _read(storage, everything, [seen.ids[at]])
                yield from map(found.trajectory, found.spans)


def _none(schema: Schema) -> list[Array]:
    return [no_rows(entry) for entry in schema.fields]


def _runs(storage: ReadView, trajectory_key: NestedKey | None) -> list[IntArray]:
    """Return the ids of the rows of each trajectory, in the order of its steps."""
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
                "Cannot split data into trajectories: there is no field that names or ends them",
                hint="give trajectory_key",
            )
    storage.follow()
    runs = Trajectories(name).of(storage)
    with runs.lock:
        runs.look()
        lengths = runs.stop - runs.first
        chosen = np.flatnonzero(lengths > 0)
        lengths = lengths[chosen]
        ids = runs.rows(chosen, runs.first[chosen].copy(), lengths)
    found = np.split(ids, np.cumsum(lengths)[:-1])
    return sorted(found, key=lambda one: ((int(one[0]) - 1) % storage.geometry.lanes, int(one[0])))


def _chunks(runs: Sequence[IntArray]) -> Iterator[list[IntArray]]:
    """Yield some runs at a time."""
    chunk: list[IntArray] = []
    rows = 0
    for ids in runs:
        if chunk and rows + ids.size > _CHUNK:
            yield chunk
            chunk, rows = [], 0
        chunk.append(ids)
        rows += ids.size
    if chunk:
        yield chunk


@dataclass(frozen=True)
class _Seen:
    """Rows of some trajectories.

    Args:
        ids: Whose they are. Shape `(rows,)`.
        batch: What they hold.
        spans: Which of them are a trajectory.
    """

    ids: IntArray
    batch: Any
    spans: list[slice]

    def trajectory(self, at: slice) -> Any:
        """Return a trajectory as users get it."""
        return Trajectory(take_rows(self.batch, at))

    def asked(self, predicate: Callable[[Any], Any] | None) -> Iterator[slice]:
        """Yield the spans of those that meet a condition."""
        glance = _Glance(self) if isinstance(predicate, Condition) else None
        for at in self.spans:
            if predicate is None or predicate(self.trajectory(at) if glance is None else glance.move(at)):
                yield at


class _Glance:
    """Be a trajectory as far as a `Condition` asks; to make a `Trajectory` takes several times as long.

    Threads: one moves it along.
    """

    def __init__(self, seen: _Seen) -> None:
        self._seen, self._at = seen, slice(0)
        self._fields: dict[NestedKey, tuple[Any, bool]] = {}  # and whether they can be cut

    def move(self, at: slice) -> _Glance:
        """Be the trajectory in a span."""
        self._at = at
        return self

    @property
    def length(self) -> int:
        """How many transitions it has."""
        return int(self._at.stop - self._at.start)

    @property
    def total_reward(self) -> torch.Tensor:
        """The sum of its rewards."""
        rewards = self.get("reward")
        if rewards is None:
            rewards = self._seen.trajectory(self._at).reward  # which says what there is
        return torch.as_tensor(rewards).sum()

    def get(self, key: NestedKey) -> Any:
        """Return an entry, of the root or else below `next`; None if there is none."""
        if key not in self._fields:
            values = find_entry(self._seen.batch, key)
            plain = values is None or (isinstance(values, torch.Tensor) and not values.is_nested)
            self._fields[key] = values, plain
        values, plain = self._fields[key]
        if not plain:
            return self._seen.trajectory(self._at).get(key)
        return None if values is None else values[self._at]


def _read(storage: ReadView, plan: _Plan, runs: Sequence[IntArray]) -> _Seen:
    """Return trajectories as the plan has them; none of those that have left."""
    wanted = np.concatenate(runs)
    ids, columns, view = plan.transform.read(
        storage, lambda: wanted[storage.window.holds(wanted)], plan.places
    )
    if not ids.size:
        return _Seen(ids, None, [])
    lengths = [one.size for one in runs]
    if sum(lengths) != ids.size:
        lengths = [int(np.isin(one, ids).sum()) for one in runs]
    if plan.whole:
        batch = form_of(storage).build(columns, (ids.size,), {})
    elif plan.schema is None:
        batch = TensorDict({}, [ids.size])
    else:
        batch = Builder(plan.schema).build(columns, torch.Size((ids.size,)), {})
    if view is not None:
        batch = plan.transform.apply(batch, view)
    ends = itertools.accumulate(lengths)
    spans = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True) if length]
    return _Seen(ids, _transformed(plan.transform, batch, ids.size), spans)


def _transformed(transform: Compose, batch: Any, rows: int) -> Any:
    if not len(transform):
        return batch
    batch = transform.finish(batch)
    if not is_tensor_collection(batch) or batch.batch_size[:1] != (rows,):
        raise StateError("a transform has changed the number of rows: trajectories cannot be told in them")
    return batch


# -- what a condition needs ---------------------------------------------------------------------------


def _plan(storage: ReadView, transform: Compose, predicate: Callable[[Any], Any]) -> _Plan:
    """Return what must be read and done to see what the condition asks for."""
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
        if not writes:  # nobody knows what it does
            return everything
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
    """Return whether two keys are one, or one is of a group in which the other is."""
    depth = min(len(first), len(second))
    return first[:depth] == second[:depth]


# -- rows that are objects ----------------------------------------------------------------------------


def _among_objects(
    storage: ReadView,
    transform: Compose,
    predicate: Callable[[Any], Any] | None,
    trajectory_key: NestedKey | None,
) -> Iterator[Any]:
    _, (column,) = read_present(storage, storage.window.ids(), [0])
    items = column.tolist()
    wrong = next((item for item in items if not isinstance(item, TensorDictBase)), None)
    if wrong is not None:
        raise TypeError(
            f"ReplayBuffer.query requires a tensordict-backed storage, got items of type {type(wrong)}."
        )
    if any(item.batch_dims for item in items):
        raise TypeError(
            "ReplayBuffer.query on a list-based storage expects single-transition (scalar) items."
        )
    transform.look(storage, np.zeros(0, np.int64))  # refuses to look at other steps where rows are objects
    data = LazyStackedTensorDict.lazy_stack(items)
    starts, stops = split(data, trajectory_key)
    seen = _transformed(transform, data.clone() if len(transform) else data, len(items))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        trajectory = Trajectory(seen[start:stop].clone())
        if predicate is None or predicate(trajectory):
            yield trajectory
