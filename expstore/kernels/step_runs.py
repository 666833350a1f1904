"""A table of runs of consecutive steps of one episode, which finds the id of any step.

Used by storages, which add new fragments of their episodes. Importing it loads numba. It does not know about
sources or trajectories, and never reads rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.kernels.file_loops import compiled

# Rows of the table of runs; the fragments of a run are consecutive in the pool, with room to grow.
_EPISODE, _FIRST, _STOP, _START, _COUNT, _ROOM, _HEAD = range(7)
# Rows of the pool of fragments.
_STEP, _ID, _STRIDE = range(3)
# Rows of the heap; the run whose oldest readable row has the smallest id is on top.
_KEY, _RUN = range(2)
# Counters: runs, used entries of the pool, entries of the heap, runs without rows, fragments, changed runs.
_RUNS, _POOL, _HEAP, _DEAD, _LIVE, _CHANGED = range(6)

_TABLES = "int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1]"


@compiled("void(int64[:, ::1], int64[::1], int64, int64)")
def _push(heap: IntArray, counts: IntArray, key: int, run: int) -> None:
    place = counts[_HEAP]
    counts[_HEAP] += 1
    while place > 0:
        above = (place - 1) // 2
        if heap[_KEY, above] <= key:
            break
        heap[_KEY, place], heap[_RUN, place] = heap[_KEY, above], heap[_RUN, above]
        place = above
    heap[_KEY, place], heap[_RUN, place] = key, run


@compiled("void(int64[:, ::1], int64[::1], int64, int64)")
def _replace_top(heap: IntArray, counts: IntArray, key: int, run: int) -> None:
    place, size = 0, counts[_HEAP]
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and heap[_KEY, below + 1] < heap[_KEY, below]:
            below += 1
        if heap[_KEY, below] >= key:
            break
        heap[_KEY, place], heap[_RUN, place] = heap[_KEY, below], heap[_RUN, below]
        place = below
    heap[_KEY, place], heap[_RUN, place] = key, run


@compiled("void(int64[::1], int8[::1], int64[::1], int64)")
def _note(changed: IntArray, noted: Any, counts: IntArray, run: int) -> None:
    if noted[run] == 0:
        noted[run] = 1
        changed[counts[_CHANGED]] = run
        counts[_CHANGED] += 1


@compiled("int64(int64[:, ::1], int64, int64)")
def _last_run(runs: IntArray, count: int, episode: int) -> int:
    """Return the last run of an episode, or -1."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if runs[_EPISODE, middle] <= episode:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low > 0 and runs[_EPISODE, low - 1] == episode else -1


@compiled("int64(int64[:, ::1], int64, int64)")
def _last_run_below(runs: IntArray, count: int, episode: int) -> int:
    """Return the last run, among the first `count`, of an episode with a smaller id, or -1."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if runs[_EPISODE, middle] < episode:
            low = middle + 1
        else:
            high = middle
    return low - 1


@compiled(f"boolean({_TABLES}, int64, int64, int64, int64)")
def _append(
    runs: IntArray,
    pool: IntArray,
    heap: IntArray,
    counts: IntArray,
    run: int,
    step: int,
    first: int,
    stride: int,
) -> bool:
    """Add a fragment to a run; return False, without a change, if the pool is full."""
    count, room = runs[_COUNT, run], runs[_ROOM, run]
    if count == room:
        start, used = runs[_START, run], counts[_POOL]
        more = max(1, room)
        if start + room == used and used + more <= pool.shape[1]:
            counts[_POOL] = used + more
        elif used + room + more <= pool.shape[1]:
            pool[:, used : used + count] = pool[:, start : start + count]
            runs[_START, run] = used
            counts[_POOL] = used + room + more
        else:
            return False
        runs[_ROOM, run] = room + more
    place = runs[_START, run] + count
    pool[_STEP, place], pool[_ID, place], pool[_STRIDE, place] = step, first, stride
    runs[_COUNT, run] = count + 1
    counts[_LIVE] += 1
    return True


@compiled(f"void({_TABLES}, int64, int64)")
def _revive(runs: IntArray, pool: IntArray, heap: IntArray, counts: IntArray, run: int, step: int) -> None:
    """Make a run without readable rows readable again, from a step of its newest fragment on."""
    head = runs[_COUNT, run] - 1
    place = runs[_START, run] + head
    counts[_LIVE] += head < runs[_HEAD, run]
    runs[_HEAD, run] = head
    runs[_FIRST, run] = step
    counts[_DEAD] -= 1
    _push(heap, counts, pool[_ID, place] + (step - pool[_STEP, place]) * pool[_STRIDE, place], run)


@compiled(f"int64({_TABLES}, int64[:, ::1], int64, int64[::1], int8[::1])")
def _take_in(
    runs: IntArray,
    pool: IntArray,
    heap: IntArray,
    counts: IntArray,
    fragments: IntArray,
    begin: int,
    changed: IntArray,
    noted: Any,
) -> int:
    """Add fragments from number `begin` on.

    Returns:
        The number of fragments that were added, fewer than there are if the pool is full; -1 if a fragment
        does not continue the table.
    """
    for i in range(begin, fragments.shape[1]):
        episode, step, length = fragments[0, i], fragments[1, i], fragments[2, i]
        first, stride = fragments[3, i], max(1, fragments[4, i])
        run = _last_run(runs, counts[_RUNS], episode)
        if run >= 0:
            stop = runs[_STOP, run]
            dead = runs[_FIRST, run] >= stop
            place = runs[_START, run] + runs[_COUNT, run] - 1
            if pool[_STEP, place] == step and pool[_ID, place] == first:
                pool[_STRIDE, place] = stride
            elif stop == step:
                if not _append(runs, pool, heap, counts, run, step, first, stride):
                    return i
            elif stop < step:
                run = -1  # rows between them were deleted
            else:
                return -1
            if run >= 0:
                runs[_STOP, run] = step + length
                if dead and step + length > stop:
                    _revive(runs, pool, heap, counts, run, stop)
                _note(changed, noted, counts, run)
                continue
        run = counts[_RUNS]
        if run > 0 and runs[_EPISODE, run - 1] > episode:
            return -1
        runs[_EPISODE, run], runs[_FIRST, run], runs[_STOP, run] = episode, step, step + length
        runs[_START, run] = counts[_POOL]
        runs[_COUNT, run], runs[_ROOM, run], runs[_HEAD, run] = 0, 0, 0
        if not _append(runs, pool, heap, counts, run, step, first, stride):
            return i
        counts[_RUNS] += 1
        _push(heap, counts, first, run)
        _note(changed, noted, counts, run)
    return int(fragments.shape[1])


@compiled(f"void({_TABLES}, int64, int64[::1], int8[::1])")
def _let_go(
    runs: IntArray, pool: IntArray, heap: IntArray, counts: IntArray, low: int, changed: IntArray, noted: Any
) -> None:
    """Remove the rows with ids up to `low` from their runs."""
    while counts[_HEAP] > 0 and heap[_KEY, 0] <= low:
        run = heap[_RUN, 0]
        _note(changed, noted, counts, run)
        start, count, head, stop = runs[_START, run], runs[_COUNT, run], runs[_HEAD, run], runs[_STOP, run]
        key = np.int64(-1)
        while head < count:
            place = start + head
            end = pool[_STEP, place + 1] if head + 1 < count else stop
            rows, stride = end - pool[_STEP, place], pool[_STRIDE, place]
            gone = (low - pool[_ID, place]) // stride + 1 if low >= pool[_ID, place] else np.int64(0)
            if gone < rows:
                runs[_FIRST, run] = pool[_STEP, place] + gone
                key = pool[_ID, place] + gone * stride
                break
            head += 1
            counts[_LIVE] -= 1
        runs[_HEAD, run] = head
        if key >= 0:
            _replace_top(heap, counts, key, run)
            continue
        runs[_FIRST, run] = stop
        counts[_DEAD] += 1
        counts[_HEAP] -= 1
        last = counts[_HEAP]
        if last > 0:
            _replace_top(heap, counts, heap[_KEY, last], heap[_RUN, last])


@compiled(
    "void(int64[:, ::1], int64[:, ::1], int64, int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1])"
)
def _compact(
    runs: IntArray,
    pool: IntArray,
    count: int,
    new_runs: IntArray,
    new_pool: IntArray,
    heap: IntArray,
    counts: IntArray,
) -> None:
    """Copy the runs and fragments with readable rows, in the same order."""
    for run in range(count):
        if runs[_FIRST, run] >= runs[_STOP, run]:
            continue
        new, used = counts[_RUNS], counts[_POOL]
        start, head = runs[_START, run], runs[_HEAD, run]
        left = runs[_COUNT, run] - head
        new_runs[:, new] = runs[:, run]
        new_runs[_START, new], new_runs[_COUNT, new], new_runs[_ROOM, new] = used, left, left
        new_runs[_HEAD, new] = 0
        new_pool[:, used : used + left] = pool[:, start + head : start + head + left]
        step = runs[_FIRST, run] - new_pool[_STEP, used]
        counts[_RUNS], counts[_POOL] = new + 1, used + left
        _push(heap, counts, new_pool[_ID, used] + step * new_pool[_STRIDE, used], new)
    counts[_LIVE] = counts[_POOL]


@compiled("int64(int64[:, ::1], int64, int64, int64)")
def _fragment(pool: IntArray, low: int, high: int, step: int) -> int:
    """Return the last fragment in `low` to `high` - 1 that begins at or before a step."""
    while high - low > 1:
        middle = (low + high) // 2
        if pool[_STEP, middle] <= step:
            low = middle
        else:
            high = middle
    return low


@compiled("void(int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def _rows(
    runs: IntArray, pool: IntArray, numbers: IntArray, starts: IntArray, lengths: IntArray, ids: IntArray
) -> None:
    row = 0
    for i in range(numbers.size):
        run, step = numbers[i], starts[i]
        first = runs[_START, run]
        last = first + runs[_COUNT, run]
        low = _fragment(pool, first + runs[_HEAD, run], last, step)
        left = lengths[i]
        while left > 0:
            end = pool[_STEP, low + 1] if low + 1 < last else runs[_STOP, run]
            count = min(left, end - step)
            first_id = pool[_ID, low] + (step - pool[_STEP, low]) * pool[_STRIDE, low]
            for k in range(count):
                ids[row + k] = first_id + k * pool[_STRIDE, low]
            if count <= 0:  # beyond the end
                for k in range(left):
                    ids[row + k] = 0
                count = left
            row, step, left, low = row + count, step + count, left - count, low + 1


@compiled(
    "void(int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], "
    "int64[:, ::1], int64[:, ::1], boolean[:, ::1])"
)
def _near(
    runs: IntArray,
    pool: IntArray,
    numbers: IntArray,
    steps: IntArray,
    offsets: IntArray,
    ids: IntArray,
    there: Any,
) -> None:
    for i in range(numbers.size):
        run, own = numbers[i], i % offsets.shape[0]
        first, last = runs[_FIRST, run], runs[_STOP, run] - 1
        begin = runs[_START, run]
        end = begin + runs[_COUNT, run]
        low, below, above = begin, np.int64(0), np.int64(-1)  # a fragment, its first and its last step
        for k in range(offsets.shape[1]):
            step = steps[i] + offsets[own, k]
            there[i, k] = first <= step <= last
            step = min(max(step, first), last)
            if step < below or step > above:
                low = _fragment(pool, begin + runs[_HEAD, run], end, step)
                below = pool[_STEP, low]
                above = pool[_STEP, low + 1] - 1 if low + 1 < end else last
            ids[i, k] = pool[_ID, low] + (step - below) * pool[_STRIDE, low]


@compiled("void(int64[:, ::1], int64, int64[::1], int64[::1], int64[::1])")
def _find(runs: IntArray, count: int, episodes: IntArray, steps: IntArray, found: IntArray) -> None:
    for i in range(episodes.size):
        run = _last_run(runs, count, episodes[i])
        while run >= 0 and runs[_EPISODE, run] == episodes[i] and runs[_FIRST, run] > steps[i]:
            run -= 1
        here = run >= 0 and runs[_EPISODE, run] == episodes[i] and runs[_STOP, run] > steps[i]
        found[i] = run if here else -1


@compiled(f"void(int64[:, ::1], int64[:, ::1], int64, {', '.join(['int64[::1]'] * 4)})")
def _locate(
    runs: IntArray,
    pool: IntArray,
    count: int,
    episodes: IntArray,
    ids: IntArray,
    found: IntArray,
    steps: IntArray,
) -> None:
    for i in range(ids.size):
        found[i], steps[i] = -1, 0
        run = _last_run(runs, count, episodes[i])
        if run < 0:
            continue
        below, above = _last_run_below(runs, run, episodes[i]), run  # ids increase from run to run
        while above - below > 1:
            middle = (below + above) // 2
            if pool[_ID, runs[_START, middle]] <= ids[i]:
                below = middle
            else:
                above = middle
        if pool[_ID, runs[_START, run]] > ids[i]:
            run = below
        if run < 0 or runs[_EPISODE, run] != episodes[i]:
            continue
        low = runs[_START, run]
        last = low + runs[_COUNT, run]
        high = last
        while high - low > 1:
            middle = (low + high) // 2
            if pool[_ID, middle] <= ids[i]:
                low = middle
            else:
                high = middle
        end = pool[_STEP, low + 1] if low + 1 < last else runs[_STOP, run]
        beyond = ids[i] - pool[_ID, low]
        step = pool[_STEP, low] + beyond // pool[_STRIDE, low]
        if beyond >= 0 and beyond % pool[_STRIDE, low] == 0 and runs[_FIRST, run] <= step < end:
            found[i], steps[i] = run, step


class RunTable:
    """The runs of a store, sorted by episode id.

    A run is a range of consecutive, readable steps of an episode.
    An episode has one run, or several if rows between them were deleted. The numbers of runs are valid until
    `compact`, or until the table is rebuilt. Adding a fragment takes constant time; finding a step takes time
    logarithmic in the number of its episode's fragments.

    Not locked: callers must lock it.

    Args:
        fragments: The columns of `Fragments`. Shape `(5, n)`.
        low: The newest id that can no longer be read.

    Example:
        >>> from expstore.kernels.step_runs import RunTable
        >>> table = RunTable(np.array([[7, 7], [0, 2], [2, 3], [1, 9], [1, 2]]), low=1)
        >>> table.first.tolist(), table.stop.tolist()
        ([1], [5])
        >>> table.rows(np.array([0]), np.array([1]), np.array([4])).tolist()
        [2, 9, 11, 13]
    """

    def __init__(self, fragments: IntArray, low: int) -> None:
        # The fragments of an episode are in the order of their steps.
        fragments = fragments.take(np.argsort(fragments[0], kind="stable"), axis=1)
        self._counts = np.zeros(6, np.int64)
        self._make_room(1, 2 * fragments.shape[1])
        self.take_in(fragments, low)

    def _make_room(self, runs: int, places: int) -> None:
        self._runs, self._pool = np.zeros((7, runs), np.int64), np.zeros((3, places), np.int64)
        self._heap = np.zeros((2, runs), np.int64)
        self._changed, self._noted = np.zeros(runs, np.int64), np.zeros(runs, np.int8)

    def take_in(self, fragments: IntArray, low: int) -> IntArray | None:
        """Add fragments that are new or longer, then remove rows with ids up to `low`.

        Args:
            fragments: The fragments in the order in which they were written. Shape `(5, n)`, C-contiguous.
            low: The newest id that can no longer be read.

        Returns:
            The numbers of the changed runs, each once. Shape `(changed,)`. None if a fragment does not
            continue the table: then the table must be rebuilt.
        """
        count, done = fragments.shape[1], 0
        self._grow(count)
        while done < count:
            done = _take_in(*self._tables, fragments, done, self._changed, self._noted)
            if done < 0:
                return None
            if done < count:
                self._pool = _wider(self._pool, 2 * self._pool.shape[1] + 64)
        _let_go(*self._tables, low, self._changed, self._noted)
        changed = self._changed[: self._counts[_CHANGED]].copy()
        self._noted[changed] = 0
        self._counts[_CHANGED] = 0
        return changed

    def _grow(self, more: int) -> None:
        needed = self.count + more
        if needed > self._runs.shape[1]:
            room = max(256, 2 * needed)
            self._runs, self._heap = _wider(self._runs, room), _wider(self._heap, room)
            self._changed, self._noted = np.zeros(room, np.int64), np.zeros(room, np.int8)

    @property
    def _tables(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        return self._runs, self._pool, self._heap, self._counts

    @property
    def wasteful(self) -> bool:
        """Whether most entries are of rows that can no longer be read, so that `compact` is worthwhile."""
        runs, pool, _, dead, live, _ = self._counts.tolist()
        return dead > 1024 + runs - dead or pool > 4096 + 4 * live

    def compact(self) -> None:
        """Remove runs without readable rows; the other runs get new numbers in the same order."""
        runs, pool, count = self._runs, self._pool, self.count
        live = count - int(self._counts[_DEAD])
        self._make_room(max(256, 2 * live), max(256, 2 * int(self._counts[_LIVE])))
        self._counts = np.zeros(6, np.int64)
        _compact(runs, pool, count, *self._tables)

    @property
    def count(self) -> int:
        """Number of runs, including runs without readable rows."""
        return int(self._counts[_RUNS])

    @property
    def episode(self) -> IntArray:
        """Episode id of each run, ascending. Shape `(count,)`; a view, like `first` and `stop`."""
        return self._runs[_EPISODE, : self.count]

    @property
    def first(self) -> IntArray:
        """First readable step of each run. Shape `(count,)`."""
        return self._runs[_FIRST, : self.count]

    @property
    def stop(self) -> IntArray:
        """Step after the last one of each run; `first` if no row is readable. Shape `(count,)`."""
        return self._runs[_STOP, : self.count]

    def rows(self, runs: IntArray, starts: IntArray, lengths: IntArray) -> IntArray:
        """Return the ids of the rows of slices, concatenated; 0 for steps after a run's end.

        Args:
            runs: The run of each slice. Shape `(n,)`, int64.
            starts: The first step of each slice, which must be readable. Shape `(n,)`, int64.
            lengths: The number of rows of each slice. Shape `(n,)`, int64.
        """
        ids = np.empty(int(lengths.sum()), np.int64)
        _rows(self._runs, self._pool, runs, starts, lengths, ids)
        return ids

    def near(self, runs: IntArray, steps: IntArray, offsets: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the ids of the rows at step offsets from rows, clipped to the first and last step of a run.

        Args:
            runs: The run of each row, with readable rows. Shape `(n,)`, int64.
            steps: The step of each row, which must be readable. Shape `(n,)`, int64.
            offsets: Number of steps after each row. Shape `(n, k)`, or `(1, k)` for the same offsets for all
                rows; C-contiguous.

        Returns:
            The ids, and whether the run has a step at the offset. Shapes `(n, k)`.
        """
        shape = (runs.size, offsets.shape[1])
        ids, there = np.empty(shape, np.int64), np.empty(shape, np.bool_)
        _near(self._runs, self._pool, runs, steps, offsets, ids, there)
        return ids, there

    def find(self, episodes: IntArray, steps: IntArray) -> IntArray:
        """Return the runs that contain steps of episodes; -1 for rows that cannot be read. Shapes `(n,)`."""
        found = np.empty(episodes.size, np.int64)
        _find(self._runs, self.count, episodes, steps, found)
        return found

    def locate(self, episodes: IntArray, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return run and step of rows of episodes; run -1 for rows that cannot be read. Shapes `(n,)`."""
        found, steps = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
        _locate(self._runs, self._pool, self.count, episodes, ids, found, steps)
        return found, steps


def _wider(table: IntArray, width: int) -> IntArray:
    wider = np.zeros((table.shape[0], width), np.int64)
    wider[:, : table.shape[1]] = table
    return wider
