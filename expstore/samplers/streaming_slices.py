"""Sampling slices as they come: each new one once, then any.

Buffers take the sampler. What it has handed out is known by one id, so that a restart goes on there; it keeps
no list of slices.
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
from expstore.samplers.slice_options import NestedKey, Span
from expstore.samplers.slices import SliceSampler

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

__all__ = ["StreamingSliceSampler"]


class StreamingSliceSampler(SliceSampler):
    """Draw every new slice once, the first completed first; beyond these any, as `SliceSampler`.

    Episodes are cut into slices that follow one another, from their first step on. One whose rows have begun
    to leave before it was drawn is left out, and so is what an episode has left at its end. All lanes and
    streams are told apart.

    Threads: any number may sample; each new slice is handed to one of them. Crashes: after a kill it goes on
    with the next new slice; after a power cut with that after the last sync. Rows that were there before the
    store had such a sampler are not new. With a `traj_key` or `end_keys` that are not the store's own,
    trajectories of which rows have left are cut anew after a restart.

    Args:
        slice_len: How many steps a slice has.
        end_key: As `SliceSampler`, as are the next ones.
        end_keys: See there.
        traj_key: See there.
        truncated_key: See there.
        init_key: See there.
        strict_length: See there.
        pad_output: See there.
        span: See there.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Raises:
        TypeError: `slice_len` is no integer.
        ValueError: It is below 1; or an option is not supported.

    Example:
        >>> sampler = StreamingSliceSampler(slice_len=4)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    #: What its progress begins with.
    _kind = 4

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
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, STREAMING_SLICES)
        if isinstance(slice_len, bool) or not isinstance(slice_len, int):
            raise TypeError("slice_len must be a positive integer.")
        if slice_len < 1:
            raise ValueError("slice_len must be a positive integer.")
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
        )
        self._mark = self._handed = 0
        self._part()

    def _part(self) -> None:
        self._own = threading.Lock()
        self._storage: Callable[[], ReadView | None] = lambda: None
        self._begins = _Begins()

    def attach(self, storage: ReadView) -> None:
        """Go on where the storage's last sampler of this kind stopped; otherwise what comes next is new.

        Raises:
            ValueError: It can never hold a slice.
        """
        length = self.slicing.slice_len or 1
        if storage.capacity is not None and storage.capacity < length * storage.geometry.lanes:
            raise ValueError(
                f"Storage capacity {storage.capacity} cannot hold one slice_len={length} window."
            )
        super().attach(storage)
        self._begins = _Begins()
        self._storage = weakref.ref(storage)
        kind, written = storage.draws.progress[:2]
        with self._own:
            self._mark = self._handed = _mark_at(storage, written) if kind == self._kind else storage.last
        if kind != self._kind and not storage.follows:
            storage.draws.note_progress((self._kind, _count_written(storage, self._mark), 0, 0))

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose the next new slices, and others.

        Raises:
            NotReadyError: There is no new one, and no trajectory is long enough.
            StateError: The batch size cannot be cut into such slices.
        """
        length, count = self.slicing.sizes(batch_size)
        with self._own:
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
        """Return new slices and others, as many as asked for. `fresh` has shape `(slices, length)`."""
        length, count = self.slicing.sizes(batch_size)
        ids, lengths, padded = fresh.reshape(-1), np.full(len(fresh), length), False
        if len(fresh) < count:
            more, others, padded = self._choose_rows(storage, length, count - len(fresh), generator)
            ids, lengths = np.concatenate([ids, more]), np.concatenate([lengths, others])
        found = self.slicing.selection(ids, lengths, length=length, asked=batch_size, padded=padded)
        return replace(found, progress=progress)

    def _fresh(self, storage: ReadView, length: int, count: int, mark: int, end: int) -> tuple[IntArray, int]:
        """Return new slices that were completed by rows after `mark`, up to `end`; and the new mark.

        Slices have shape `(n, length)`, n at most `count`.
        """
        runs = self._trajectories.of(storage)
        found: list[IntArray] = [np.empty((0, length), np.int64)]
        start, have = max(mark, storage.window.low) + 1, 0
        with runs.lock:
            end = min(end, runs.look().last)
            while start <= end and have < count:
                ids = np.arange(start, min(start + tuning.SLICE_SEARCH_ROWS, end + 1))
                run, step = self._find_complete(storage, runs, ids, length)
                whole = (run >= 0) & (step - length + 1 >= runs.first[np.maximum(run, 0)])
                run, begins = run[whole][: count - have], step[whole][: count - have] - length + 1
                rows = runs.rows(run, begins, np.full(run.size, length)).reshape(-1, length)
                found.append(rows)
                have += len(rows)
                start = int(ids[-1]) + 1
        slices = np.concatenate(found)
        return slices, int(slices[-1, -1]) if have == count else max(mark, end)

    def _find_complete(
        self, storage: ReadView, runs: Runs, ids: IntArray, length: int
    ) -> tuple[IntArray, IntArray]:
        """Return run and step of those rows that complete a slice; run -1 for rows that are not shown."""
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
        """Choose the same new slices, as far as they are still there, and others for the rest."""
        length, count = self.slicing.sizes(selection.asked)
        _, after, before = selection.progress
        fresh, _ = self._fresh(storage, length, count, before, after)
        return self._fill_up(storage, fresh, selection.asked, generator, selection.progress)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Keep which new slices were handed out."""
        with self._own:
            if selection.progress[1] > self._handed:  # of two threads the later ones may come first
                self._handed = selection.progress[1]
                storage.draws.note_progress((self._kind, _count_written(storage, self._handed), 0, 0))

    def rewind(self, storage: ReadView) -> None:
        """Go back to where the last batch that was handed out has ended."""
        with self._own:
            self._mark = self._handed

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        storage = self._storage()
        return {"written": 0 if storage is None else _count_written(storage, self._handed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        storage = self._storage()
        if storage is not None:
            with self._own:
                self._mark = self._handed = _mark_at(storage, int(state_dict["written"]))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        own = ("_own", "_storage", "_begins")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        super().__setstate__(state)
        self._part()

    def __repr__(self) -> str:
        return f"StreamingSliceSampler(slice_len={self.slicing.slice_len})"


def _count_written(storage: ReadView, mark: int) -> int:
    """Return how many rows had ever been written when `mark` was the newest: loads change ids, not that."""
    with storage.locks.episodes:
        return storage.write_count - (storage.last - mark)


def _mark_at(storage: ReadView, written: int) -> int:
    """Return the row that was the newest when so many had been written."""
    with storage.locks.episodes:
        return storage.last - max(0, storage.write_count - written)


class _Begins:
    """Remember where trajectories that are not the store's own began, also when their first rows have left.

    After a restart they begin with the first row that is left.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[int, int]]] = {}  # of each name: first step and the last one seen

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
