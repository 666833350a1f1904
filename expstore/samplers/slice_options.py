"""The settings of slices: their lengths, where they may begin, and how a batch marks their ends.

Used by the slice samplers. It draws no slices, and reads no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray, Key, Mark, Mass, Selection, to_key
from expstore.errors import ArgumentError, NotReadyError, StateError
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.samplers.row_trajectories import RowTrajectories

if TYPE_CHECKING:
    from expstore.samplers.base import Sampler
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs
else:
    Sampler = object

NestedKey = str | tuple[str, ...]
Span = bool | int | tuple[bool | int, bool | int]

_MASK: Key = ("collector", "mask")


@dataclass(frozen=True, slots=True)
class Slicing:
    """The settings of a slice sampler.

    Args:
        num_slices: Number of slices in a batch; the batch size must be a multiple of it. Pass either this or
            `slice_len`.
        slice_len: Number of steps in a slice; the batch size must be a multiple of it. Pass either this or
            `num_slices`.
        strict_length: Whether to leave out trajectories that are shorter than a slice. If False, such a
            trajectory makes a shorter slice, and a batch may have fewer rows than its batch size.
        pad_output: Whether to pad short slices with copies of their last row.
        span: How many steps a slice may lack on its left and on its right, because it extends beyond its
            trajectory: a number, False for none, True for all but one, or a pair of these.
        truncated_key: The field that marks the last step of each slice; None to mark none.
        init_key: The field that marks the first step of each slice, if it is stored; None to mark none.

    Raises:
        ArgumentError: Both or neither of `num_slices` and `slice_len` are given, or a number is not an
            integer; a number is out of range, or `pad_output` is set although there are no short slices.
    """

    num_slices: int | None
    slice_len: int | None
    strict_length: bool
    pad_output: bool
    span: tuple[bool | int, bool | int]
    truncated_key: Key | None
    init_key: Key | None

    @classmethod
    def of(
        cls,
        *,
        num_slices: int | None,
        slice_len: int | None,
        strict_length: bool,
        pad_output: bool,
        span: Span,
        truncated_key: NestedKey | None,
        init_key: NestedKey | None,
    ) -> Slicing:
        """Check the arguments of a sampler and return them as settings."""
        if (num_slices is None) == (slice_len is None):
            raise ArgumentError(
                "Either num_slices or slice_len must be not None, and not both. "
                f"Got num_slices={num_slices} and slice_len={slice_len}."
            )
        for name, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise ArgumentError(f"{name} must be an integer, got {value!r}")
            if value is not None and value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")
        if pad_output and strict_length:
            raise ArgumentError(
                "pad_output=True is incompatible with strict_length=True: padding only happens when short "
                "trajectories are kept, which requires strict_length=False."
            )
        sides = span if isinstance(span, tuple | list) else (span, span)
        if len(sides) != 2 or not all(isinstance(side, bool | int) and side >= 0 for side in sides):
            raise ArgumentError(
                f"span must be a boolean, a number of steps >= 0, or a pair of these; got {span!r}"
            )
        return cls(
            num_slices,
            slice_len,
            strict_length,
            pad_output,
            (sides[0], sides[1]),
            None if truncated_key is None else to_key(truncated_key),
            None if init_key is None else to_key(init_key),
        )

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the number of steps in a slice, and the number of slices in a batch.

        Raises:
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
        """
        number = self.slice_len or self.num_slices or 1
        if batch_size % number:
            word = "number of slices" if self.slice_len is None else "slice length"
            raise StateError(
                f"The batch-size must be divisible by the {word}, got batch_size={batch_size} and "
                f"{self.size_text}."
            )
        rest = batch_size // number
        return (rest, number) if self.slice_len is None else (number, rest)

    @property
    def _whole(self) -> bool:
        """Whether every slice has its full length."""
        return self.strict_length and self.span == (False, False)

    @property
    def size_text(self) -> str:
        """`num_slices` or `slice_len` with its value, for messages."""
        number, length = self.num_slices, self.slice_len
        return f"num_slices={number}" if length is None else f"slice_len={length}"

    def slack(self, length: int) -> tuple[int, int]:
        """Return how many steps a slice of this length may lack on its left and on its right.

        Raises:
            ArgumentError: The span is not smaller than the length.
        """
        for side in self.span:
            if side is not True and side >= length:
                raise ArgumentError(
                    "The right and left span must be strictly lower than the sequence length: "
                    f"{side} is not below {length}"
                )
        left, right = (length - 1 if side is True else int(side) for side in self.span)
        return left, right

    def starts(self, have: IntArray, length: int) -> IntArray:
        """Return the number of positions at which a slice can begin in runs of `have` steps. Shape `(n,)`."""
        if self._whole:
            return np.maximum(0, have - (length - 1))
        left, right = self.slack(length)
        if self.strict_length:
            return np.where(have >= length, have - length + 1 + left + right, 0)
        full = np.minimum(have, length)
        spare = np.minimum(left, full - 1) + np.minimum(right, full - 1)
        return np.where(have > 0, have - full + 1 + spare, 0)

    def windows(self, runs: Runs, batch_size: int, keep: Callable[[IntArray], NDArray[np.bool_]]) -> int:
        """Return the number of positions at which a slice of such a batch can begin, in all runs together.

        Args:
            runs: The runs.
            batch_size: Number of rows of the batch.
            keep: Returns which runs count, given the ids of their first rows. Shapes `(n,)`.

        Raises:
            StateError: The batch size is not a multiple of `num_slices` or `slice_len`.
        """
        length, _ = self.sizes(batch_size)
        with runs.lock:
            runs.look()
            have = runs.stop - runs.first
            some = np.flatnonzero(have > 0)
            ids = runs.ids(some, runs.first[some])
        return int(self.starts(have[some][keep(ids)], length).sum())

    def place(self, have: IntArray, length: int, share: NDArray[np.float64]) -> tuple[IntArray, IntArray]:
        """Place one slice in each of some runs.

        Args:
            have: Number of steps of each run, which must be enough for a slice. Shape `(n,)`.
            length: Number of steps of a slice.
            share: Which of the possible positions to take: a number from 0 to less than 1 each. Shape `(n,)`.

        Returns:
            First step of each slice, counted from the first step of its run, and number of its steps. Shapes
            `(n,)`.
        """
        begins = (share * self.starts(have, length)).astype(np.int64)
        if self._whole:
            return begins, np.full(begins.size, length)
        return self.cut(begins - self.before(have, length), have, length)

    def before(self, have: IntArray, length: int) -> IntArray:
        """Return the number of positions before a run's start at which a slice can begin. Shapes `(n,)`."""
        left = self.slack(length)[0]
        found: IntArray = np.minimum(left, np.minimum(have, length) - 1)
        return found

    def cut(self, begins: IntArray, have: IntArray, length: int) -> tuple[IntArray, IntArray]:
        """Cut off the parts of slices beyond their runs; return first steps and lengths as `place` does."""
        full = np.minimum(have, length)
        lengths = np.minimum(full + np.minimum(begins, 0), have - np.maximum(begins, 0))
        return np.maximum(begins, 0), lengths

    def selection(
        self,
        ids: IntArray,
        lengths: IntArray,
        *,
        length: int,
        asked: int,
        padded: bool = False,
        mass: Mass | None = None,
    ) -> Selection:
        """Return the rows of slices as a selection.

        Args:
            ids: Ids of the slices' rows, concatenated. Shape `(sum of lengths,)`.
            lengths: Number of rows of each slice. Shape `(slices,)`.
            length: Number of rows of a whole slice.
            asked: Number of rows that the user requested.
            padded: Whether to pad short slices.
            mass: What the slices were drawn from.
        """
        mask, ends = None, np.cumsum(lengths)
        if padded:
            steps = np.arange(length)
            within = np.minimum(steps, lengths[:, None] - 1)
            ids = ids[(ends - lengths)[:, None] + within].reshape(-1)
            mask = (steps < lengths[:, None]).reshape(-1)
            ends = np.arange(lengths.size) * length + lengths
        begins = ends - lengths
        marks = tuple(self._marks(ids.size, begins, ends - 1, mask))
        return Selection(ids, marks=marks, asked=asked, mass=mass)

    def _marks(
        self, rows: int, begins: IntArray, lasts: IntArray, mask: NDArray[np.bool_] | None
    ) -> Sequence[Mark]:
        def flags(places: IntArray | None = None) -> NDArray[np.bool_]:
            found = np.zeros(rows, np.bool_)
            if places is not None:
                found[places] = True
            return found

        marks = []
        if self.truncated_key is not None:
            group, last = self.truncated_key[:-1], flags(lasts)
            marks = [
                Mark(self.truncated_key, last, joins=False),
                Mark((*group, "done"), last),
                Mark((*group, "terminated"), flags()),
            ]
        if mask is not None:
            marks.append(Mark(_MASK, mask, joins=False, flat=True))
        if self.init_key is not None:
            marks.append(Mark(self.init_key, flags(begins), new=False))
        return marks


class SlicingMembers(Sampler):
    """What slice samplers have in common: settings under TorchRL's names, and the number of starts of slices.

    Subclasses set `slicing` and `_trajectories`.
    """

    slicing: Slicing
    _trajectories: Trajectories

    @property
    def num_slices(self) -> int | None:
        """The number of slices in a batch; None if it follows from `slice_len`."""
        return self.slicing.num_slices

    @property
    def slice_len(self) -> int | None:
        """The number of steps in a slice; None if it follows from `num_slices`."""
        return self.slicing.slice_len

    @property
    def span(self) -> tuple[bool | int, bool | int]:
        """The number of steps that a slice may lack on its left and on its right."""
        return self.slicing.span

    @property
    def strict_length(self) -> bool:
        """Whether trajectories that are shorter than a slice are left out."""
        return self.slicing.strict_length

    @property
    def pad_output(self) -> bool:
        """Whether short slices are padded with copies of their last row."""
        return self.slicing.pad_output

    @property
    def truncated_key(self) -> NestedKey | None:
        """The field that marks the last step of each slice, or None."""
        return _short(self.slicing.truncated_key)

    @property
    def init_key(self) -> NestedKey | None:
        """The field that marks the first step of each slice, or None."""
        return _short(self.slicing.init_key)

    @property
    def traj_key(self) -> NestedKey | None:
        """The field that identifies trajectories, as given; None for the store's episodes."""
        return _short(self._trajectories.name)

    @property
    def reads(self) -> frozenset[Key]:
        """The fields that the sampler itself reads: those that the user named to define trajectories."""
        return self._trajectories.keys

    def sampleable(self, storage: ReadView, batch_size: int) -> int:
        """Return the number of positions at which a slice can begin; `where` is ignored."""
        if not len(storage):
            return 0
        self.keep_to_split(storage)
        return self.slicing.windows(
            self._trajectories.of(storage), batch_size, lambda ids: self._filter.find_split(storage, ids)
        )

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether a slice can be drawn."""
        return self.sampleable(storage, batch_size) > 0


def _short(key: Key | None) -> NestedKey | None:
    """Return a key as users write it: a key with one part as a string."""
    return key if key is None or len(key) > 1 else key[0]


def build_too_short_error(lengths: IntArray, length: int) -> NotReadyError:
    """Return the error for a draw that finds no slice.

    Args:
        lengths: Number of steps of every run that has any. Shape `(runs,)`.
        length: Number of steps of a slice.
    """
    if not lengths.size:
        return NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
    return NotReadyError(
        "Did not find a single trajectory with sufficient length (length range: "
        f"{lengths.min()} - {lengths.max()} / required={length})",
        hint="ask for shorter slices, or give strict_length=False",
    )


def choose_trajectories(
    end_key: NestedKey | None,
    end_keys: Sequence[NestedKey] | None,
    traj_key: NestedKey | None,
    trajectory_key: NestedKey | None,
    torchrl: Mapping[str, Any],
) -> Trajectories:
    """Check the arguments of a slice sampler that define trajectories, and return the trajectories.

    Args:
        end_key: A single field that ends trajectories; pass either this or `end_keys`.
        end_keys: The fields that end trajectories.
        traj_key: The field that identifies trajectories.
        trajectory_key: Another name for `traj_key`; pass one of them.
        torchrl: Other arguments, of which `trajectories` and `ends` are used; see `RowTrajectories.of`.

    Raises:
        RuntimeError: Both `end_key` and `end_keys` are given.
        ArgumentError: `end_keys` is not a list of keys, both `traj_key` and `trajectory_key` are given, or
            trajectories by row are given that are not valid.
    """
    if isinstance(end_keys, str) or (end_keys is not None and not end_keys):
        raise ArgumentError(
            f"end_keys must be a list of keys, got {end_keys!r}; pass a single key as end_key"
        )
    if end_key is not None and end_keys is not None:
        raise RuntimeError(
            "`end_key` and `end_keys` are exclusive arguments: pass the single boundary key through "
            "`end_key`, or the sequence of keys to be OR-ed together through `end_keys`."
        )
    if traj_key is not None and trajectory_key is not None:
        raise ArgumentError("traj_key and trajectory_key are the same argument: pass one of them")
    name = trajectory_key if traj_key is None else traj_key
    ends = end_keys if end_key is None else [end_key]
    fields = None if ends is None else tuple(to_key(key) for key in ends)
    by_row = RowTrajectories.of(torchrl, by_field=name is not None or fields is not None)
    return Trajectories(None if name is None else to_key(name), fields, by_row)
