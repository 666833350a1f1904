"""A sampler that draws newer rows more often.

Without a filter it keeps no state besides its two attributes. It never reads rows.
"""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Mass, Selection, Window
from expstore.errors import ArgumentError
from expstore.samplers.base import Sampler, readable
from expstore.samplers.filter import Where
from expstore.samplers.window_sum_tree import WindowTree, warm

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

_LN2 = math.log(2.0)
#: The id that weighs 1 changes every 100 half-lives, so that no weight, and no sum of weights, overflows.
_SCALED = 100
#: Below this sum of weights, weights are computed relative to the newest matching row.
_FAINT = 1e-200


def _sum_weights(rows: int, half_life: float | None) -> float:
    """Return the sum of the weights of the newest rows, of which the newest has weight 1."""
    if half_life is None:
        return rows
    return math.expm1(-rows * _LN2 / half_life) / math.expm1(-_LN2 / half_life)


class RecencySampler(Sampler):
    """Draw a row of age a with probability proportional to 0.5^(a / half_life), with replacement.

    The newest readable row has age 0, the row before it age 1, and so on. A draw takes the same time for any
    number of rows: an age is the inverse of the truncated geometric distribution function at a uniform random
    number. Ages beyond 53 half-lives, with a total probability of 2^-53, are never drawn.

    `newest` restricts the draw to the newest rows. Setting it step by step is the "emphasizing recent
    experience" of Wang and Ross 2019, which draws uniformly from them (`half_life=None`).

    Threads: any number may sample. Crashes: after a restart the next batch is the one that would have
    followed; the program must set the attributes again.

    With `where` or `weight`, the probability of a row is multiplied by its weight, or by 0 if it does not
    match. Age and `newest` count all rows that are evaluated so far.

    Args:
        half_life: Number of rows after which the probability is half as large; None for the same probability
            for all.
        newest: Number of newest rows that are drawn from; None for all.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows.
        weight: Factor for the probability of each row: a numeric SQL expression, at least 0; None for 1.
        split: The split whose rows are drawn; None for the rows of all splits.

    Example:
        >>> from expstore import MemoryStorage, RecencySampler, TensorDictReplayBuffer
        >>> sampler = RecencySampler(half_life=10_000)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100_000), sampler=sampler, batch_size=8)
        >>> sampler.newest = 50_000
    """

    keeps_to_split = True
    _transient = frozenset({"_lock", "_weights", "_window", "_scale"})

    def __init__(
        self,
        half_life: float | None = None,
        newest: int | None = None,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
        split: str | None = "train",
    ) -> None:
        super().__init__(where=where, weight=weight, split=split)
        self.half_life = half_life
        self.newest = newest
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._weights = WindowTree(self._filter)
        self._window = Window(0, 0)
        self._scale: tuple[float | None, int] = (None, 0)  # the half-life, and the id that weighs 1

    def attach(self, storage: ReadView) -> None:
        """Start over with a storage.

        Raises:
            QueryError: The filter names a field that the storage does not have.
        """
        super().attach(storage)
        self._begin()
        if self.filter is not None:
            warm()

    @property
    def half_life(self) -> float | None:
        """Number of rows after which the probability is half as large; None if it is the same for all."""
        return self._half_life

    @half_life.setter
    def half_life(self, value: float | None) -> None:
        self._half_life = None if value is None else _check_rows("half_life", value, "> 0")

    @property
    def newest(self) -> int | None:
        """Number of newest rows drawn from; None for all. Fractions, as from a schedule, are cut off."""
        return self._newest

    @newest.setter
    def newest(self, value: float | None) -> None:
        self._newest = None if value is None else int(_check_rows("newest", value, ">= 1"))

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            NotReadyError: No row is readable, or no row matches.
            QueryError: The filter cannot be evaluated.
        """
        window, half_life, newest = readable(storage), self._half_life, self._newest
        if self.filter is not None:
            return self._find_rows(storage, lambda: self._draw_by_weight(storage, batch_size, generator))
        rows = window.rows
        taking_part = rows if newest is None else min(rows, newest)
        mass = Mass(_sum_weights(taking_part, half_life), rows)
        if half_life is None:
            ages = generator.integers(0, taking_part, batch_size)
        else:
            rate = -_LN2 / half_life
            within = -math.expm1(taking_part * rate)  # the probability of these ages among all ages
            ages = (np.log1p(-within * generator.random(batch_size)) / rate).astype(np.int64)
            np.minimum(ages, taking_part - 1, out=ages)  # rounding errors
        if window.deleted:
            return Selection(window.nth(rows - 1 - ages), mass=mass)
        return Selection(window.last - ages, mass=mass)

    def mass(self, storage: ReadView, batch_size: int) -> Mass:
        """Return the sum of the weights of all rows, where the newest row of the storage has weight 1.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch; it does not matter here.

        Raises:
            QueryError: The filter cannot be evaluated.
        """
        return self._weigh_filtered(storage, lambda: self._weigh_rows(storage))

    def _weigh_rows(self, storage: ReadView) -> Mass:
        if self.filter is None:
            rows = storage.window.rows
            taking_part = rows if self._newest is None else min(rows, self._newest)
            return Mass(_sum_weights(taking_part, self._half_life), rows)
        with self._lock:
            tree = self._weights.catch_up(storage, lambda places: self._weigh(storage, places), self._narrow)
            if tree.total > _FAINT:
                return self._build_mass(tree.total, self._scale[1])
            _, masses, newest = self._find_faint(storage, self._weights.window)
            return self._build_mass(float(masses.sum()), newest)

    def _build_mass(self, total: float, unit: int) -> Mass:
        """Return a sum of weights as if the newest row had weight 1; in it, the row with id `unit` has 1."""
        window = self._weights.window
        if self._half_life is not None and total > 0:  # never 0: some row can be drawn
            total = max(total * 2.0 ** ((unit - window.last) / self._half_life), sys.float_info.min)
        return Mass(total, window.rows)

    # -- with a filter: weights whose ratios do not change while rows grow older ---------------------

    def _draw_by_weight(
        self, storage: ReadView, size: int, generator: np.random.Generator
    ) -> Selection | None:
        with self._lock:
            tree = self._weights.catch_up(storage, lambda places: self._weigh(storage, places), self._narrow)
            total = tree.total
            if total > _FAINT:
                places, _ = tree.find(generator.random(size) * total)
                ids = self._weights.ids_at(storage, places)
                return Selection(ids, mass=self._build_mass(total, self._scale[1]))
            return self._draw_by_faint_weight(storage, self._weights.window, size, generator)

    def _draw_by_faint_weight(
        self, storage: ReadView, window: Window, size: int, generator: np.random.Generator
    ) -> Selection | None:
        """Draw rows whose weights in the tree are too small to sum up, because all matching rows are old."""
        ids, masses, newest = self._find_faint(storage, window)
        if not ids.size:
            return None
        sums = np.cumsum(masses)
        under = np.minimum(generator.random(size) * sums[-1], np.nextafter(sums[-1], 0.0))
        chosen = ids[np.searchsorted(sums, under, side="right")]
        return Selection(chosen, mass=self._build_mass(float(sums[-1]), newest))

    def _find_faint(self, storage: ReadView, window: Window) -> tuple[IntArray, Array, int]:
        """Return the matching rows, their weights relative to the newest of them, and its id."""
        ids = window.ids()
        masses = np.zeros(0) if self.filter is None else self.filter.masses_of(storage, ids)
        ids, masses = ids[masses > 0], masses[masses > 0]
        newest = int(ids[-1]) if ids.size else 0
        if self._half_life is not None:
            masses = masses * np.exp2((ids - newest) / self._half_life)
        return ids, masses, newest

    def _narrow(self, window: Window) -> Window:
        """Return the window of the newest rows, and choose the id that weighs 1."""
        rows, newest, half_life = window.rows, self._newest, self._half_life
        if newest is not None and rows > newest:
            window = replace(window, low=int(window.nth(np.array([rows - newest]))[0]) - 1)
        step = 1 if half_life is None else max(1, int(_SCALED * half_life))
        scale = half_life, 0 if half_life is None else window.last // step * step
        if scale != self._scale:
            self._scale = scale
            self._weights.drop()
        self._window = window
        return window

    def _weigh(self, storage: ReadView, places: IntArray) -> Array:
        half_life, unit = self._scale
        if half_life is None:
            return np.ones(places.size)
        weights: Array = np.exp2((storage.geometry.ids_in(places, self._window.last) - unit) / half_life)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"half_life": self._half_life, "newest": self._newest} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.half_life, self.newest = state_dict["half_life"], state_dict["newest"]

    def __repr__(self) -> str:
        return f"RecencySampler(half_life={self._half_life}, newest={self._newest}{self._filtering})"


def _check_rows(name: str, value: float, bound: str) -> float:
    """Return a number of rows as a float.

    Args:
        name: The name of the argument, for the message.
        value: Its value.
        bound: What it must be: "> 0" or ">= 1".

    Raises:
        ArgumentError: It is not a number, or out of bounds.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and (number >= 1 if bound == ">= 1" else number > 0)):
        raise ArgumentError(f"{name} must be a number of rows {bound}, or None, got {value!r}")
    return number
