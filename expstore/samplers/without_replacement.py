"""A sampler that draws every row once before it draws any row again.

Its order is a permutation computed from the seed and the number of the pass, so that a restart continues in
the middle of a pass. It keeps no list of rows.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from expstore.core.values import IntArray, Mass, Selection, Window, cut_run
from expstore.errors import ArgumentError, NotFoundError
from expstore.samplers.base import Sampler, refuse_weight
from expstore.samplers.filter import Where
from expstore.samplers.token_budget import TokenBudget

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

#: Up to this many rows a permutation is computed as a whole; for more rows, place by place.
_LISTED = 1 << 14
_ROUNDS = 8
#: Number of places that are searched at once for matching rows, at first and at most.
_LOOK, _LOOK_MOST = 1024, 1 << 16
_TRIES = 3


class Step(NamedTuple):
    """A part of a pass: its places, the key and the number of the pass, its first place, and the next one."""

    places: IntArray
    key: tuple[int, int]
    number: int
    begin: int
    after: tuple[int, int, int]  # pass, position and size after this part


class SamplerWithoutReplacement(Sampler):
    """Draw every row once per pass, in a new order in each pass.

    A pass covers the indices that the buffer has when it begins; a new pass begins when the number of rows
    changes. In a full ring, an index whose row is replaced during a pass stands for the new row. With
    `where`, a pass covers the rows that match when the pass reaches them; a row that is not evaluated by then
    is left for the next pass.

    Threads: any number may sample; each row is returned to one of them. Crashes: after a kill the pass
    continues with the next batch.

    Args:
        drop_last: Whether to leave out the rows at the end of a pass that do not fill a batch; otherwise the
            last batch is shorter.
        shuffle: Whether to draw in random order; otherwise in the order of the indices.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows.
        weight: Not supported, because every row is drawn once per pass.
        split: The split whose rows are drawn; None for the rows of all splits.

    Raises:
        ArgumentError: A weight was given.

    Example:
        >>> from expstore import MemoryStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=MemoryStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4
        ... )
        >>> rb.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> [batch.shape[0] for batch in rb]
        [4, 4, 2]
    """

    keeps_to_split = True
    without_replacement = True
    leases = True
    fits_tokens = True
    #: First number of its progress, which identifies the class of sampler.
    _kind = 1
    _transient = frozenset({"_lock", "_listed"})

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
    ) -> None:
        refuse_weight(self, where, weight, "every row comes once per pass")
        super().__init__(where=where, split=split)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._key: tuple[int, int] | None = None  # key of the pass; None if unknown after a restart
        self._start(0, 0, 0)
        self._ran_out = False
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._listed: tuple[tuple[int, int, int, int], IntArray] | None = None

    def _start(self, number: int, position: int, size: int) -> None:
        """Set the position in a pass; everything before it was returned to the user."""
        self._pass, self._position, self._size = number, position, size
        self._handed = (number, position, size)

    @property
    def ran_out(self) -> bool:
        """Whether the last batch completed a pass."""
        return self._ran_out

    def attach(self, storage: ReadView) -> None:
        """Continue where the storage's last sampler of this class stopped.

        Raises:
            QueryError: The filter names a field that the storage does not have.
        """
        super().attach(storage)
        with self._lock:
            self._ran_out = False
            kind, number, position, size = self._draws_of(storage).progress
            self._key = None
            self._start(*((number, position, size) if kind == self._kind else (0, 0, 0)))

    def limit_tokens(self, budget: TokenBudget | None) -> None:
        """Draw as many rows of each batch as fit from now on; the pass continues with the others.

        Raises:
            ArgumentError: `drop_last` is True, which drops smaller batches.
        """
        if budget is not None and self.drop_last:
            raise ArgumentError(
                f"batch_tokens={budget.tokens} and drop_last=True exclude each other: batches have different "
                "numbers of rows, and none is too small; leave drop_last out"
            )
        super().limit_tokens(budget)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose the next `batch_size` rows of the pass; fewer at its end.

        Raises:
            NotReadyError: No row is readable, or no row matches.
            ArgumentError: `drop_last` is True, and the rows do not fill a batch.
            QueryError: The filter cannot be evaluated.
        """
        return self._find_rows(storage, lambda: self._find_fitting(storage, batch_size, generator))

    def _find_fitting(
        self, storage: ReadView, batch_size: int, generator: np.random.Generator
    ) -> Selection | None:
        """Choose the next rows of the pass that fit; return None if there is no row.

        Lengths are read without the lock: a read may wait for the storage's lock, which other threads hold
        while they wait for this one. So the rows are chosen again afterwards, and must be the same.
        """
        fitting = np.empty(0, np.int64)
        while True:
            with self._lock:
                begun = self._key, self._pass, self._position, self._size
                found = self._try(storage, fitting.size or batch_size, generator)
                if self._budget is None or found is None or np.array_equal(found.ids, fitting):
                    return found
                self._key, self._pass, self._position, self._size = begun
            count = 0 if fitting.size else self._budget.count_fitting(storage, found.ids)
            fitting = found.ids[:count]

    def mass(self, storage: ReadView, batch_size: int) -> Mass | None:
        """Return how many rows of the pass are left; None with a filter or `drop_last`.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch; it does not matter here.
        """
        self.keep_to_split(storage)
        with self._lock:
            return self._build_mass(len(storage))

    def _build_mass(self, size: int) -> Mass | None:
        if self.filter is not None or self.drop_last:
            return None
        left = self._size - self._position if self._position and size == self._size else 0
        return Mass(left or size, size, left=left)

    def _try(self, storage: ReadView, count: int, generator: np.random.Generator) -> Selection | None:
        choose = self._next if self.filter is None else self._next_matching
        for _ in range(_TRIES):
            size = len(storage)
            if size == 0:
                break
            try:
                return choose(storage, size, count, generator)
            except NotFoundError:  # rows were removed at this moment
                self._size = 0
        return None

    def _next(
        self, storage: ReadView, size: int, batch_size: int, generator: np.random.Generator
    ) -> Selection:
        step, mass = self._step(size, batch_size, generator), self._build_mass(size)
        ids = _ids(storage, size, step.places)
        self._settle(step)
        return Selection(ids, progress=(self._kind, *step.after), mass=mass)

    def _next_matching(
        self, storage: ReadView, size: int, count: int, generator: np.random.Generator
    ) -> Selection | None:
        """Choose the next rows of the pass that match the filter; return None if no row matches."""
        begun = self._pass, self._position
        key = _key_of(generator)
        if size != self._size or key != (self._key or key):
            begun = self._pass + 1, 0
        for number, position in (begun, (begun[0] + 1, 0)):
            ids, stop = self._matches(storage, (key, number, size), position, count)
            if ids.size >= (count if self.drop_last else 1):
                break
        else:
            if ids.size:
                raise ArgumentError(
                    f"The batch size ({count}) is greater than the number of rows ({ids.size}) that match "
                    f"{self.filter}, and drop_last=True drops smaller batches"
                )
            return None
        ends = stop == size
        if self.drop_last and not ends:
            ends = self._matches(storage, (key, number, size), stop, count)[0].size < count
        after = (number + 1, 0, size) if ends else (number, stop, size)
        self._settle(Step(ids, key, number, position, after))
        return Selection(ids, progress=(self._kind, *after))

    def _matches(
        self, storage: ReadView, named: tuple[tuple[int, int], int, int], position: int, count: int
    ) -> tuple[IntArray, int]:
        """Return the next matching rows of a pass, `count` or all that remain, and the place after them."""
        found: list[IntArray] = [np.empty(0, np.int64)]
        size, reach = named[2], max(_LOOK, 2 * count)
        while position < size and self.filter is not None:
            places = self._place(*named, np.arange(position, min(position + reach, size)))
            ids = _ids(storage, size, places)
            good = np.flatnonzero(self.filter.masses_of(storage, ids))
            found.append(ids[good[:count]])
            if good.size > count:
                position += int(good[count])
                break
            position += places.size
            count -= good.size
            reach = min(2 * reach, _LOOK_MOST)
        return np.concatenate(found), position

    def _step(self, size: int, count: int, generator: np.random.Generator) -> Step:
        """Return the next `count` places of the pass, or all that remain; the state does not change yet.

        Raises:
            ArgumentError: `drop_last` is True, and the rows do not fill a batch.
        """
        number, position = self._pass, self._position
        key = _key_of(generator)
        if size != self._size or key != (self._key or key):
            number, position = number + 1, 0
        if self.drop_last and count > size:
            raise ArgumentError(
                f"The batch size ({count}) is greater than the storage capacity ({size}), and "
                "drop_last=True drops smaller batches"
            )
        if self.drop_last and size - position < count:
            number, position = number + 1, 0
        stop = min(position + count, size)
        ends = size - stop < (count if self.drop_last else 1)
        places = self._place(key, number, size, np.arange(position, stop))
        after = (number + 1, 0, size) if ends else (number, stop, size)
        return Step(places, key, number, position, after)

    def _settle(self, step: Step) -> None:
        """Continue after these places."""
        self._key = step.key
        self._pass, self._position, self._size = step.after

    def _place(self, key: tuple[int, int], number: int, size: int, places: IntArray) -> IntArray:
        return self._permute(key, number, size, places) if self.shuffle else places

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose the rows that are now at the indices of a selection, because some were overwritten."""
        filter = self.filter
        with suppress(NotFoundError):
            ring = storage.description.window_ring
            ids = ring.ids_at(ring.index_of(selection.ids), storage.window)
            if filter is not None and not (good := filter.masses_of(storage, ids) > 0).all():
                more = self.select(storage, int(np.count_nonzero(~good)), generator)
                return replace(more, ids=np.concatenate([ids[good], more.ids]))
            return replace(selection, ids=ids)
        # A long extend removes rows before it writes new ones: begin a pass over the remaining rows.
        return self.select(storage, selection.ids.size, generator)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Store how far the pass has come."""
        with self._lock:
            if selection.progress[1:3] > self._handed[:2]:  # two threads may return them in another order
                self._handed = selection.progress[1], selection.progress[2], selection.progress[3]
                self._draws_of(storage).note_progress(selection.progress[:4])
            self._ran_out = selection.progress[2] == 0

    def stands(self, storage: ReadView, selection: Selection) -> bool:
        """Return whether the pass of a selection is still valid: the number of rows is the same."""
        return selection.progress[3] == len(storage)

    def rewind(self, storage: ReadView) -> None:
        """Continue after the last selection that was returned to the user."""
        with self._lock:
            self._start(*self._handed)

    def _permute(self, key: tuple[int, int], number: int, size: int, places: IntArray) -> IntArray:
        """Return the rows' numbers at places of the pass. Shapes `(n,)`."""
        mixed = key[0] ^ int(_mix(np.array([key[1]], np.uint64))[0])
        if size > _LISTED:
            return permute(places, size, key=(mixed, number))
        named = *key, number, size
        if self._listed is None or self._listed[0] != named:
            bits = np.random.Philox(key=np.array([mixed, number], np.uint64))
            self._listed = named, np.random.Generator(bits).permutation(size)
        chosen: IntArray = self._listed[1][places]
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return dict(zip(("pass", "position", "size"), self._handed, strict=True)) | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        with self._lock:
            self._key = None
            self._start(*(int(state_dict[name]) for name in ("pass", "position", "size")))

    def __repr__(self) -> str:
        given = f"drop_last={self.drop_last}, shuffle={self.shuffle}{self._filtering}"
        return f"{type(self).__name__}({given})"


_MASK64 = (1 << 64) - 1


def _key_of(generator: np.random.Generator) -> tuple[int, int]:
    """Return the key of a generator. All draws of a pass have the same key."""
    first, second = generator.bit_generator.state["state"]["key"].tolist()
    return first, second


def _ids(storage: ReadView, size: int, places: IntArray) -> IntArray:
    """Return the ids of rows by their numbers. In a full ring or window, a number stays that of its place.

    Args:
        storage: The storage with the rows.
        size: Number of readable rows.
        places: Numbers of the rows, from 0 to less than `size`. Shape `(n,)`.

    Raises:
        NotFoundError: A row was removed at this moment.
    """
    ring = storage.description.window_ring
    indices = _indices(ring.capacity, storage.window, size, places)
    return ring.ids_at(indices, storage.window)


def _indices(capacity: int | None, window: Window, size: int, places: IntArray) -> IntArray:
    if window.deleted:
        return _skip_deleted(capacity, window, places)
    if capacity is None:
        return places + window.low
    if size == capacity:
        return places
    indices: IntArray = (places + window.low) % capacity
    return indices


def _skip_deleted(capacity: int | None, window: Window, places: IntArray) -> IntArray:
    """Return the indices of rows by their numbers, in the order of indices, if some rows were deleted."""
    if capacity is None:
        indices: IntArray = window.nth(places) - 1
        return indices
    runs = [
        (index, count)
        for first, n in window.runs()
        for index, _, count in cut_run(first, n, capacity)
        if count
    ]
    first, count = np.array(sorted(runs)).T
    ends = np.cumsum(count)
    at = np.minimum(np.searchsorted(ends, places, side="right"), ends.size - 1)
    indices = first[at] + places - (ends[at] - count[at])
    return indices


def permute(places: IntArray, size: int, *, key: tuple[int, int]) -> IntArray:
    """Return the numbers at some places of a permutation of `size` numbers; a key chooses it.

    The permutation is a Feistel network over the next even number of bits; results from `size` on are
    permuted again until they are below it (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        places: The places, in [0, size). Shape `(n,)`, int64.
        size: Less than 2^62.
        key: Two numbers, of which the lower 64 bits are used.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.Philox(key=np.array([key[0] & _MASK64, key[1] & _MASK64], np.uint64)).random_raw(_ROUNDS)
    found = places.astype(np.uint64)
    walking = np.arange(found.size)
    while walking.size:
        left, right = found[walking] >> half, found[walking] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        found[walking] = (left << half) | right
        walking = walking[found[walking] >= np.uint64(size)]
    return found.astype(np.int64)


def _mix(values: Any) -> Any:
    """Scatter the bits of 64-bit numbers (the finalizer of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
