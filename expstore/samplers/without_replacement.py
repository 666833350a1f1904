"""Sampling every row once before any row comes again.

Buffers take the sampler. Its order is a permutation that follows from seed and pass, so that a restart
goes on in the middle of one; it keeps no list of rows.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from expstore.errors import NotFoundError, NotReadyError
from expstore.samplers.base import Sampler
from expstore.types import IntArray, Selection, Window, cut_run

if TYPE_CHECKING:
    from expstore.storages.base import Storage

__all__ = ["SamplerWithoutReplacement", "Step"]

#: Up to so many rows a permutation is written down; beyond, every place is computed by itself.
_LISTED = 1 << 14
_ROUNDS = 8
_TRIES = 3


class Step(NamedTuple):
    """Some places of a pass: its key and number, where they begin, how far it has come after them."""

    places: IntArray
    key: tuple[int, int]
    number: int
    begin: int
    after: tuple[int, int, int]  # pass, position, size


class SamplerWithoutReplacement(Sampler):
    """Draw every row once per pass, in a new order each time.

    A pass is over the indices that the buffer has when it begins; it begins anew when the number of rows
    changes. In a full ring, an index whose row is replaced during a pass stands for the new row.

    Threads: any number may sample; each row is handed to one of them. Crashes: after a kill the pass
    goes on with the next batch.

    Args:
        drop_last: Leave out the rows at the end of a pass that do not fill a batch; otherwise the last
            batch is shorter.
        shuffle: Draw in random order; otherwise in the order of the indices.

    Example:
        >>> rb = TensorDictReplayBuffer(
        ...     storage=MemoryStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4
        ... )
        >>> rb.extend(TensorDict({"observation": torch.zeros(10, 3)}, [10]))
        >>> [batch.shape[0] for batch in rb]
        [4, 4, 2]
    """

    #: What its progress begins with, so that another sampler's is not taken for it.
    _kind = 1

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None  # of the pass; None: not known since a restart
        self._start(0, 0, 0)
        self._ran_out = False
        self._listed: tuple[tuple[int, int, int, int], IntArray] | None = None

    def _start(self, number: int, position: int, size: int) -> None:
        """Go on in a pass, of which everything before `position` was handed out."""
        self._pass, self._position, self._size = number, position, size
        self._handed = (number, position, size)

    @property
    def ran_out(self) -> bool:
        """Whether the last batch has ended a pass."""
        return self._ran_out

    def attach(self, storage: Storage) -> None:
        """Go on where the storage's last sampler of this kind stopped."""
        with self._lock:
            self._ran_out = False
            kind, number, position, size = storage.progress
            self._key = None
            self._start(*((number, position, size) if kind == self._kind else (0, 0, 0)))

    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose the next `batch_size` rows of the pass; fewer at its end.

        Raises:
            ValueError: There are fewer rows than that, and the last batch is to be dropped.
        """
        with self._lock:
            for _ in range(_TRIES):
                size = len(storage)
                if size == 0:
                    break
                try:
                    return self._next(storage, size, batch_size, generator)
                except NotFoundError:  # rows were given up at this moment
                    self._size = 0
        raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")

    def _next(
        self, storage: Storage, size: int, batch_size: int, generator: np.random.Generator
    ) -> Selection:
        step = self._step(size, batch_size, generator)
        ids = storage.ids_at(_indices(storage, size, step.places))
        self._settle(step)
        return Selection(ids, progress=(self._kind, *step.after))

    def _step(self, size: int, count: int, generator: np.random.Generator) -> Step:
        """Return the next `count` places of the pass, or those that are left of it; nothing changes yet.

        Raises:
            ValueError: There are fewer than that, and the last batch is to be dropped.
        """
        number, position = self._pass, self._position
        key = _key_of(generator)
        if size != self._size or key != (self._key or key):
            number, position = number + 1, 0
        if self.drop_last and count > size:
            raise ValueError(
                f"The batch size ({count}) is greater than the storage capacity ({size}), and the "
                "last batch is to be dropped"
            )
        if self.drop_last and size - position < count:
            number, position = number + 1, 0
        stop = min(position + count, size)
        ends = size - stop < (count if self.drop_last else 1)
        places = self._placed(key, number, size, np.arange(position, stop))
        after = (number + 1, 0, size) if ends else (number, stop, size)
        return Step(places, key, number, position, after)

    def _settle(self, step: Step) -> None:
        """Go on after these places."""
        self._key = step.key
        self._pass, self._position, self._size = step.after

    def _placed(self, key: tuple[int, int], number: int, size: int, places: IntArray) -> IntArray:
        return self._permuted(key, number, size, places) if self.shuffle else places

    def sample_again(
        self, storage: Storage, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose the rows that have taken the places of those that were overwritten."""
        with suppress(NotFoundError):
            return replace(selection, ids=storage.ids_at(storage.index_of(selection.ids)))
        # A long extend gives up rows before it writes others: a pass over those that are left begins.
        return self.sample(storage, selection.ids.size, generator)

    def hand_out(self, storage: Storage, selection: Selection) -> None:
        """Keep how far the pass has come."""
        with self._lock:
            if selection.progress[1:3] > self._handed[:2]:  # of two threads the later rows may come first
                self._handed = selection.progress[1], selection.progress[2], selection.progress[3]
                storage.note_progress(selection.progress[:4])
            self._ran_out = selection.progress[2] == 0

    def stands(self, storage: Storage, selection: Selection) -> bool:
        """Say whether the pass of a selection goes on: it does while the number of rows stays."""
        return selection.progress[3] == len(storage)

    def rewind(self, storage: Storage) -> None:
        """Go back to where the last selection that was handed out has ended."""
        with self._lock:
            self._start(*self._handed)

    def _permuted(self, key: tuple[int, int], number: int, size: int, places: IntArray) -> IntArray:
        """Return where places of the pass lie in its permutation. Shapes `(n,)`."""
        mixed = key[0] ^ int(_mix(np.array([key[1]], np.uint64))[0])
        if size > _LISTED:
            return permute(places, size, key=(mixed, number))
        named = *key, number, size
        if self._listed is None or self._listed[0] != named:
            bits = np.random.Philox(key=np.array([mixed, number], np.uint64))
            self._listed = named, np.random.Generator(bits).permutation(size)
        chosen: IntArray = self._listed[1][places]
        return chosen

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_listed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state, _lock=threading.Lock(), _listed=None)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return dict(zip(("pass", "position", "size"), self._handed, strict=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        with self._lock:
            self._key = None
            self._start(*(int(state_dict[name]) for name in ("pass", "position", "size")))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


_MASK64 = (1 << 64) - 1


def _key_of(generator: np.random.Generator) -> tuple[int, int]:
    """Return the key of a draw's numbers: a pass is of one key."""
    first, second = generator.bit_generator.state["state"]["key"].tolist()
    return first, second


def _indices(storage: Storage, size: int, places: IntArray) -> IntArray:
    """Return the indices of rows number `places`, of `size`; in a full ring a row's number is its index."""
    window = storage.window
    if window.gaps:
        return _beside_gaps(storage, window, places)
    if storage.capacity is None:
        return places + window.low
    if size == storage.capacity:
        return places
    indices: IntArray = (places + window.low) % storage.capacity
    return indices


def _beside_gaps(storage: Storage, window: Window, places: IntArray) -> IntArray:
    """Return the indices of rows number `places`, in the order of their indices, where some were given up."""
    runs = [
        (index, count)
        for first, n in window.runs()
        for index, _, count in cut_run(first, n, storage.capacity)
        if count
    ]
    first, count = np.array(sorted(runs)).T
    ends = np.cumsum(count)
    at = np.minimum(np.searchsorted(ends, places, side="right"), ends.size - 1)
    indices: IntArray = first[at] + places - (ends[at] - count[at])
    return indices


def permute(places: IntArray, size: int, *, key: tuple[int, int]) -> IntArray:
    """Return where places lie in a permutation of `size` that follows from a key.

    A Feistel network over the next even number of bits; what falls beyond `size` walks on until it does
    not (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        places: In [0, size). Shape `(n,)`, int64.
        size: Less than 2^62.
        key: Two numbers, of which 64 bits each count.
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
