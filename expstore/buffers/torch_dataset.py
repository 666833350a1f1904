"""A buffer as a `Dataset` of torch, for a `DataLoader` and its workers, by rows or by slices.

In a worker the buffer follows the store: it takes no lock, and reads rows that the writer appends meanwhile.
It does not write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from expstore.core.arguments import check_whole
from expstore.core.values import IntArray
from expstore.errors import ArgumentError, NoRowError, StateError
from expstore.storages.read_view import OVERTAKEN

RowKind = Literal["tensordict", "dict"]

#: Longest time to wait until a new row is visible to a follower; small batches take 0.1 s.
_PATIENCE_SECONDS = 5.0
#: Approximate number of rows that are read at once.
_CHUNK = 4096


def make_dataset(
    rb: Any, slice_len: int | None, stride: int | None, strict_length: bool, shuffle: bool, rows: RowKind
) -> RowsDataset | SlicesDataset:
    """Return a buffer as a data set; see `ReplayBuffer.to_torch_dataset`.

    Raises:
        ArgumentError: The value of an argument is not allowed, or the argument requires another one.
    """
    if rows not in ("tensordict", "dict"):
        raise ArgumentError(f"rows is {rows!r}; give 'tensordict' or 'dict'")
    if slice_len is None:
        if stride is not None or not strict_length or not shuffle:
            raise ArgumentError(
                "stride, strict_length and shuffle apply to slices only; give slice_len, or leave them out"
            )
        return RowsDataset(rb, rows)
    for name, number in (("slice_len", slice_len), ("stride", slice_len if stride is None else stride)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ArgumentError(f"{name} must be an integer of at least 1, got {number!r}")
    if rb.storage.ndim > 1:
        raise ArgumentError("slices require a storage whose rows have one dim; this one has ndim > 1")
    return SlicesDataset(rb, slice_len, stride or slice_len, strict_length, shuffle, rows)


class RowsDataset(Dataset[Any]):
    """A buffer by rows: item i is the row at index i, as `rb[i]` returns it at that moment.

    If rows have several dims (`ndim`), each lane of a time step is an item, in the order of time. In a full
    ring that is written meanwhile, an index may get a newer row between two reads; each item is one complete
    row. `len` is the number of rows when this was created or `refresh` was called: torch's samplers ask for
    it several times in an epoch, and would repeat rows if it changed.

    Threads, processes: any number read; in a worker it follows the store. Crashes: it has no state.

    Args:
        rb: The buffer.
        rows: What a row is: a "tensordict", or a "dict" of tensors, nested.
    """

    def __init__(self, rb: Any, rows: RowKind) -> None:
        self._rb, self._rows = rb, rows
        self._count = 0
        self.refresh()

    def __len__(self) -> int:
        return self._count

    def refresh(self) -> int:
        """Update `len` to the current number of rows, between two epochs; return it."""
        storage = self._rb.storage
        if storage.can_write:
            storage.drain()  # workers must see the rows that are counted
        self._count = storage.window.rows // storage.geometry.lanes * storage.geometry.lanes
        return self._count

    def __getitem__(self, index: int) -> Any:
        """Return one row.

        Raises:
            IndexError: There is no such row.
        """
        count = len(self)
        if not -count <= index < count:
            raise NoRowError(f"no row {index}: there are {count} rows")
        row = self._read(np.array([index % count]))[0]
        return row.to_dict() if self._rows == "dict" and is_tensor_collection(row) else row

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return several rows, read at once: a batch, or a list of dicts.

        Raises:
            IndexError: A row does not exist.
        """
        batch = self._read(np.asarray(indices, np.int64))
        return _as_dicts(batch) if self._rows == "dict" and is_tensor_collection(batch) else batch

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return the batch unchanged. Pass it as `collate_fn` of a `DataLoader` if rows are TensorDicts."""
        return torch.stack(list(batch)) if isinstance(batch, list) else batch

    def _read(self, numbers: IntArray) -> Any:
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._rb[self._indices(numbers)]
            except (NoRowError, StateError) as exc:
                # The row is not visible here yet, or is being overwritten.
                late = time.monotonic() > until
                if (
                    late
                    or not self._rb.storage.follows
                    or (isinstance(exc, StateError) and OVERTAKEN not in str(exc))
                ):
                    raise
                time.sleep(0.001)

    def _indices(self, numbers: IntArray) -> Any:
        storage = self._rb.storage
        window = storage.window
        if storage.ndim > 1:
            places, time_dim = storage.geometry.unravel(numbers), self._rb.dim_extend
            places[:, [0, time_dim]] = places[:, [time_dim, 0]]  # `rb[...]` has time at the dim of batches
            return tuple(places.T)
        if not (window.deleted or (storage.capacity is None and window.low)):
            return numbers
        if numbers.size and int(numbers.max()) >= window.rows:
            raise NoRowError(f"no row {int(numbers.max())}: there are {window.rows} rows")
        found: IntArray = storage.geometry.index_of(window.nth(numbers))
        return found


class SlicesDataset(IterableDataset[Any]):
    """A buffer by slices: consecutive steps of one episode.

    A pass yields every slice that exists when the pass begins, unless it is overwritten before it is read.
    Each slice belongs to one worker, which follows from episode and step, whatever the writer does meanwhile.
    The order follows from torch's seed, as in its `RandomSampler`, and differs between epochs and workers.

    Threads, processes: any number read; in a worker it follows the store. Crashes: it has no state.

    Args:
        rb: The buffer.
        slice_len: Number of steps of a slice.
        stride: Number of steps from the start of a slice to the start of the next.
        strict_length: Whether to skip shorter slices at the end of episodes.
        shuffle: Whether to return slices in random order; otherwise in the order of episodes.
        rows: What a slice is: a "tensordict" of batch size `[steps]`, or a "dict" of tensors, nested.
    """

    def __init__(
        self, rb: Any, slice_len: int, stride: int, strict_length: bool, shuffle: bool, rows: RowKind
    ) -> None:
        self._rb, self._len, self._stride = rb, slice_len, stride
        self._strict, self._shuffle, self._rows = strict_length, shuffle, rows

    def __iter__(self) -> Iterator[Any]:
        """Yield the slices of a pass; in a worker only the worker's slices."""
        info = get_worker_info()
        seed = int(torch.empty((), dtype=torch.int64).random_().item()) if info is None else info.seed
        episodes, starts, lengths = self._slices()
        if info is not None:
            mine = _share(episodes, starts // self._stride, info.num_workers) == info.id
            episodes, starts, lengths = episodes[mine], starts[mine], lengths[mine]
        order = np.arange(starts.size)
        if self._shuffle:
            np.random.Generator(np.random.Philox(seed & (2**64 - 1))).shuffle(order)
        each = max(1, _CHUNK // self._len)
        for at in range(0, order.size, each):
            part = order[at : at + each]
            yield from self._read(episodes[part], starts[part], lengths[part])

    @staticmethod
    def collate(batch: Sequence[Any]) -> Any:
        """Stack slices of one length. Pass it as `collate_fn` of a `DataLoader` if rows are TensorDicts."""
        return torch.stack(list(batch))

    def _slices(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return episode, first step and length of every slice. Shapes `(n,)`."""
        storage = self._rb.storage
        storage.follow(priorities=True)
        runs = storage.runs
        with runs.lock:
            runs.look()
            episode, first, stop = runs.episode.copy(), runs.first.copy(), runs.stop.copy()
        # Counted from an episode's first step, so that numbers stay the same when rows are removed.
        begin = -(-first // self._stride)
        least = self._len if self._strict else 1
        count = np.maximum(0, (stop - least - begin * self._stride) // self._stride + 1)
        number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        starts = (np.repeat(begin, count) + number) * self._stride
        lengths = np.minimum(self._len, np.repeat(stop, count) - starts)
        return np.repeat(episode, count), starts, lengths

    def _read(self, episodes: IntArray, starts: IntArray, lengths: IntArray) -> Iterator[Any]:
        storage = self._rb.storage
        for _ in range(100):
            ids = self._ids(episodes, starts, lengths)
            here = [bool(one.size) and bool(storage.window.holds(one).all()) for one in ids]
            ids = [one for one, is_here in zip(ids, here, strict=True) if is_here]
            if not ids:
                return
            try:
                batch = self._rb[storage.geometry.index_of(np.concatenate(ids))]
            except (NoRowError, StateError) as exc:
                if storage.closed or (isinstance(exc, StateError) and OVERTAKEN not in str(exc)):
                    raise
                continue  # some were overwritten meanwhile
            # An index may have got another row between finding and reading it.
            if all(bool(storage.window.holds(one).all()) for one in ids):
                break
        else:
            raise StateError(OVERTAKEN, hint="give the store a larger capacity")
        at = 0
        for one in ids:
            yield self._convert(batch[at : at + one.size])
            at += one.size

    def _ids(self, episodes: IntArray, starts: IntArray, lengths: IntArray) -> list[IntArray]:
        """Return the ids of the rows of slices; empty for a slice whose rows were removed."""
        runs = self._rb.storage.runs
        with runs.lock:
            runs.look()
            at = np.searchsorted(runs.episode, episodes, side="right") - 1
            inside = (at >= 0) & (runs.episode[at] == episodes)
            # An episode has several runs if some of its rows were deleted.
            while (back := inside & (runs.first[at] > starts) & (at > 0)).any():
                former = at - back
                same = runs.episode[former] == episodes
                at = np.where(back & same, former, at)
                if not (back & same).any():
                    break
            inside &= (runs.first[at] <= starts) & (runs.stop[at] >= starts + lengths)
            ids = runs.rows(at[inside], starts[inside], lengths[inside])
        found = iter(np.split(ids, np.cumsum(lengths[inside])[:-1]))
        return [next(found) if there else ids[:0] for there in inside.tolist()]

    def _convert(self, steps: Any) -> Any:
        if isinstance(steps, TensorDictBase):
            return steps.to_dict() if self._rows == "dict" else steps
        return steps


class ConsumerDataset(IterableDataset[Any]):
    """The batches of a consumer, in the order of its draws, from its position on.

    Batch i of an iteration is built by worker i mod W of W; the process that has the consumer records the
    draws when workers ask for them. Iteration ends as that of the consumer. Without workers this is the
    consumer.

    `state_dict` and `load_state_dict` are those that torchdata's `StatefulDataLoader` asks for: its state
    says which batches were returned, also if workers are ahead. `position` finds the consumer's position in
    it, for `commit`. With a plain `DataLoader` and workers, count the batches.

    Threads: one iterates. Processes: a copy in a worker reads the log. Crashes: as the consumer.

    Args:
        consumer: The consumer.
        open_copy: Opens the consumer in a worker, where it only reads.
    """

    def __init__(self, consumer: Any, open_copy: Callable[[], Any]) -> None:
        self._consumer, self._open_copy = consumer, open_copy
        self._begin: dict[str, Any] = consumer.position  # of the next iteration, in a pickled copy
        #: Of a worker: its next draw, and at which draw the iteration has begun.
        self._place: dict[str, Any] | None = None
        #: What `set_epoch` was given; it is part of the state.
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; in a worker those of the worker.

        Raises:
            StateError: The process that has the consumer has closed it.
        """
        info = get_worker_info()
        if info is None:
            yield from self._consumer
            return
        place = self._find_place()
        with self._open_copy() as copied:
            seen = max(place["begin"], place["draw"] - info.num_workers)
            while (end := copied.find_end(seen, place["draw"])) is None:
                seen = place["draw"]
                batch = copied.draw(seen)
                place["draw"] += info.num_workers
                yield batch
            copied.note_end(end + 1)
        place |= {"begin": end + 1, "draw": end + 1 + info.id}

    def _find_place(self) -> dict[str, Any]:
        """Return the place of a worker, or the consumer's position."""
        info = get_worker_info()
        if self._place is not None:
            return self._place
        position: dict[str, Any] = self._begin if self._consumer is None else self._consumer.position
        if info is None:
            return position
        self._place = position | {"begin": position["draw"], "draw": position["draw"] + info.id}
        return self._place

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which is for a worker."""
        return vars(self) | {"_consumer": None, "_begin": self._find_place()}

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch; in a worker that of its next batch."""
        return self._find_place() | {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` returned; without workers, the consumer seeks to it.

        Raises:
            StateError: The draws after it are not in the log.
        """
        self.epoch = state["epoch"]
        if get_worker_info() is None:
            self._consumer.seek(state)
        else:
            self._place = dict(state)

    def position(self, state: Any) -> dict[str, Any]:
        """Return the consumer's position in a loader's state: of the first batch that was not returned.

        Args:
            state: What `state_dict` of a `StatefulDataLoader` of this data set returned.

        Raises:
            ArgumentError: There is no state of a consumer in it.
        """
        found = list(_find_positions(state))
        if not found:
            raise ArgumentError(f"there is no position of a consumer in {state!r:.100}")
        return min(found, key=lambda one: int(one["draw"]))

    def set_epoch(self, epoch: int) -> None:
        """Note the number of the epoch, which trainers pass to data sets that have this method.

        It changes no order: a consumer's draws are numbered on over all epochs.
        """
        self.epoch = check_whole("epoch", epoch)

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return the batch unchanged. Pass it as `collate_fn` of a `DataLoader` with `batch_size=None`."""
        return batch


def _find_positions(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the positions of consumers in nested states."""
    if not isinstance(state, Mapping):
        return
    if {"consumer", "id", "draw"} <= state.keys():
        yield {name: state[name] for name in ("consumer", "id", "draw")}
    for value in state.values():
        yield from _find_positions(value)


def _as_dicts(batch: Any) -> list[Any]:
    """Return the rows of a batch as nested dicts."""
    return [row.to_dict() for row in batch.unbind(0)]


def _share(episodes: IntArray, numbers: IntArray, workers: int) -> IntArray:
    """Return each slice's worker. All workers agree on it, even if they know different numbers of slices."""
    mixed = (episodes.astype(np.uint64) << np.uint64(20)) + numbers.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(workers)).astype(np.int64)
