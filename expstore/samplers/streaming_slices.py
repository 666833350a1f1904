"""A sampler that draws each new slice once, in order, and fills batches up with other slices.

It stores one id, up to which new slices were returned, so that a restart continues there. It keeps no list of
slices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core import tuning
from expstore.core.torchrl_keywords import STREAMING_SLICES, check_keywords
from expstore.core.values import IntArray, Selection
from expstore.errors import ArgumentError
from expstore.samplers.slice_options import NestedKey, Span
from expstore.samplers.slices import SliceSampler

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs


class StreamingSliceSampler(SliceSampler):
    """Draw every new slice once, in the order of completion; fill batches up like `SliceSampler`.

    Episodes are cut into consecutive slices from their first step on. A slice is skipped if some of its rows
    are evicted before it is drawn, and so are the steps at the end of an episode that do not fill a slice.
    Lanes and sources are kept apart.

    Threads: any number may sample; each new slice is returned to one of them. Crashes: after a kill the
    sampler continues with the next new slice, after a power cut with the one after the last sync. Rows that
    were written before the store had such a sampler are not new. With a `traj_key` or `end_keys` that are not
    the store's own, a trajectory with evicted rows is cut from its first remaining row after a restart.

    Args:
        slice_len: Number of steps in a slice; the batch size must be a multiple of it.
        end_key: A single field that ends trajectories; pass either this or `end_keys`.
        end_keys: The fields that end trajectories; fields that are not stored are ignored. None for the
            store's own (`done_keys` of `expstore.open`), which end its episodes in any case.
        traj_key: The field that identifies trajectories; None for the store's episodes. For a field that is
            not the store's own, a table is built when it is first needed, and kept current.
        truncated_key: The field that marks the last step of each slice; None to mark none.
        init_key: The field that marks the first step of each slice, if it is stored; None to mark none.
        strict_length: Whether to leave out trajectories that are shorter than a slice. If False, such a
            trajectory makes a shorter slice, and a batch may have fewer rows than its batch size. New slices
            are never shorter.
        pad_output: Whether to pad short slices with copies of their last row, at which
            `("collector", "mask")` is False. As in torchrl, slices are only padded while some trajectory is
            shorter than a slice. Requires `strict_length=False`.
        span: How many steps a slice may lack on its left and on its right, because it extends beyond its
            trajectory: a number, False for none, True for all but one, or a pair of these. New slices never
            lack steps.
        split: The split whose rows are drawn; None for the rows of all splits.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Raises:
        ArgumentError: `slice_len` is not an integer; `slice_len` is below 1, or an option is not supported.

    Example:
        >>> from expstore import MemoryStorage, StreamingSliceSampler, TensorDictReplayBuffer
        >>> sampler = StreamingSliceSampler(slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    keeps_to_split = True
    leases = True
    #: First number of its progress, which identifies the class of sampler.
    _kind = 4
    _transient = SliceSampler._transient | {"_own", "_storage", "_begins"}

    def __init__(
        self,
        *,
        slice_len: int,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        span: Span = False,
        split: str | None = "train",
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, STREAMING_SLICES)
        if isinstance(slice_len, bool) or not isinstance(slice_len, int):
            raise ArgumentError("slice_len must be a positive integer.")
        if slice_len < 1:
            raise ArgumentError("slice_len must be a positive integer.")
        super().__init__(
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            pad_output=pad_output,
            span=span,
            split=split,
        )
        self._mark = self._handed = 0

    def _begin(self) -> None:
        super()._begin()
        self._own = threading.Lock()
        self._storage: Callable[[], ReadView | None] = lambda: None
        self._begins = _Begins()

    def attach(self, storage: ReadView) -> None:
        """Continue where the storage's last sampler of this class stopped.

        If it had none, only rows that are written from now on are new.

        Raises:
            ArgumentError: The storage's capacity or window is too small for a slice.
        """
        length = self.slicing.slice_len or 1
        most = storage.description.window_ring.capacity
        if most is not None and most < length * storage.geometry.lanes:
            raise ArgumentError(f"Storage capacity {most} cannot hold one slice_len={length} window.")
        super().attach(storage)
        self._begins = _Begins()
        self._storage = weakref.ref(storage)
        kind, written = self._draws_of(storage).progress[:2]
        with self._own:
            self._mark = self._handed = _mark_at(storage, written) if kind == self._kind else storage.last
        if kind != self._kind and not storage.follows:
            self._draws_of(storage).note_progress((self._kind, _count_written(storage, self._mark), 0, 0))

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose the next new slices, and other slices if there are too few.

        Raises:
            NotReadyError: There is no new slice, and no trajectory is long enough.
            StateError: The batch size is not a multiple of `slice_len`.
        """
        length, count = self.slicing.sizes(batch_size)
        with self._own:
            if self.filter is not None:
                self.filter.look(storage)
            fresh, after = self._fresh(storage, length, count, self._mark, storage.window.last)
            before, self._mark = self._mark, after
        return self._fill_up(storage, fresh, batch_size, generator, (self._kind, after, before))

    def _fill_up(
        self,
        storage: ReadView,
        fresh: IntArray,
        batch_size: int,
        generator: np.random.Generator,
        progress: tuple[int, ...],
    ) -> Selection:
        """Fill a batch up with other slices. `fresh` has the new slices, shape `(slices, length)`."""
        length, count = self.slicing.sizes(batch_size)
        ids, lengths, padded = fresh.reshape(-1), np.full(len(fresh), length), False
        if len(fresh) < count:
            choose = self._choose_rows if self.filter is None else self._choose_matching
            if (chosen := choose(storage, length, count - len(fresh), generator)) is None:
                raise self.build_no_rows_error(storage)
            more, others, padded, _ = chosen
            ids, lengths = np.concatenate([ids, more]), np.concatenate([lengths, others])
        found = self.slicing.selection(ids, lengths, length=length, asked=batch_size, padded=padded)
        return replace(found, progress=progress)

    def _fresh(self, storage: ReadView, length: int, count: int, mark: int, end: int) -> tuple[IntArray, int]:
        """Return the slices that were completed by the rows after `mark` up to `end`, and the new mark.

        The slices have shape `(n, length)`, with n at most `count`.
        """
        runs, filter = self._trajectories.of(storage), self.filter
        if filter is not None:
            end = min(end, filter.readable(storage).last)
        found: list[IntArray] = [np.empty((0, length), np.int64)]
        start, have = max(mark, storage.window.low) + 1, 0
        with runs.lock:
            end = min(end, runs.look().last)
            while start <= end and have < count:
                ids = np.arange(start, min(start + tuning.SLICE_SEARCH_ROWS, end + 1))
                start = int(ids[-1]) + 1
                if filter is not None:
                    ids = ids[filter.masses_of(storage, ids) > 0]
                run, step = self._find_complete(storage, runs, ids, length)
                whole = (run >= 0) & (step - length + 1 >= runs.first[np.maximum(run, 0)])
                run, begins = run[whole][: count - have], step[whole][: count - have] - length + 1
                rows = runs.rows(run, begins, np.full(run.size, length)).reshape(-1, length)
                found.append(rows)
                have += len(rows)
        slices = np.concatenate(found)
        return slices, int(slices[-1, -1]) if have == count else max(mark, end)

    def _find_complete(
        self, storage: ReadView, runs: Runs, ids: IntArray, length: int
    ) -> tuple[IntArray, IntArray]:
        """Return the run and the step of rows that complete a slice; run -1 for rows that cannot be read."""
        if runs is storage.runs:
            (steps,) = storage.take(storage.geometry.slot_of(ids), [len(storage.require_schema().fields) + 2])
            return runs.locate(ids[steps.reshape(-1) % length == length - 1])
        run, step = runs.locate(ids)
        run, step = run[run >= 0], step[run >= 0]
        numbers, at = np.unique(run, return_inverse=True)
        begins = np.array([self._begins.of(runs, number) for number in numbers.tolist()], np.int64)
        last = (step - begins[at]) % length == length - 1 if run.size else np.zeros(0, np.bool_)
        return run[last], step[last]

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose the same new slices, as far as they can still be read, and other slices for the rest."""
        length, count = self.slicing.sizes(selection.asked)
        _, after, before = selection.progress
        fresh, _ = self._fresh(storage, length, count, before, after)
        return self._fill_up(storage, fresh, selection.asked, generator, selection.progress)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Store which new slices were returned to the user."""
        with self._own:
            if selection.progress[1] > self._handed:  # two threads may return batches in another order
                self._handed = selection.progress[1]
                self._draws_of(storage).note_progress(
                    (self._kind, _count_written(storage, self._handed), 0, 0)
                )

    def rewind(self, storage: ReadView) -> None:
        """Continue after the last batch that was returned to the user."""
        with self._own:
            self._mark = self._handed

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        storage = self._storage()
        return {"written": 0 if storage is None else _count_written(storage, self._handed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        storage = self._storage()
        if storage is not None:
            with self._own:
                self._mark = self._handed = _mark_at(storage, int(state_dict["written"]))

    def __repr__(self) -> str:
        return f"StreamingSliceSampler(slice_len={self.slicing.slice_len})"


def _count_written(storage: ReadView, mark: int) -> int:
    """Return how many rows had ever been written when `mark` was the newest id.

    Unlike ids, this number does not change when a snapshot is loaded.
    """
    with storage.locks.episodes:
        return storage.write_count - (storage.last - mark)


def _mark_at(storage: ReadView, written: int) -> int:
    """Return the id that was the newest when `written` rows had been written."""
    with storage.locks.episodes:
        return storage.last - max(0, storage.write_count - written)


class _Begins:
    """The first steps of trajectories that are not the store's own, even if their first rows were evicted.

    After a restart a trajectory begins with its first remaining row.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[int, int]]] = {}  # by trajectory: first steps, and last known steps

    def of(self, runs: Runs, run: int) -> int:
        """Return the first step that a run ever had."""
        name, first, last = int(runs.episode[run]), int(runs.first[run]), int(runs.stop[run]) - 1
        if name not in self._known and len(self._known) > 1024 + 2 * runs.episode.size:
            there = set(runs.episode.tolist())
            self._known = {key: value for key, value in self._known.items() if key in there}
        spans = self._known.setdefault(name, [])
        for number, (begin, end) in enumerate(spans):
            if begin <= first <= end:
                spans[number] = begin, max(end, last)
                return begin
        spans.append((first, last))
        del spans[:-64]
        return first
