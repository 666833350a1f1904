"""Sampling that prefers new rows.

Buffers take the sampler; without a filter it keeps no state beside its two attributes. It never looks at
rows.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Selection, Window
from expstore.samplers.base import Sampler, readable
from expstore.samplers.filter import Where
from expstore.samplers.window_sum_tree import WindowTree, warm

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["RecencySampler"]

_LN2 = math.log(2.0)
#: Weights of rows that are so many half-lives younger than another's are still numbers, and their sums too.
_SCALED = 100
_FAINT = 1e-200


class RecencySampler(Sampler):
    """Draw a row of age a with probability proportional to 0.5^(a / half_life), with replacement.

    The newest row that can be read has age 0, the one before it age 1, and so on. A row costs the same
    however many there are: the age is the inverse of the truncated geometric law's distribution
    function at a uniform number. Ages beyond 53 half-lives, of chance 2^-53 together, are never drawn.

    `newest` leaves out all but the newest rows; setting it step by step is the "emphasizing recent
    experience" of Wang and Ross 2019, which is uniform over them (`half_life=None`).

    Threads: any number may sample. Crashes: a restart goes on with the next batch; the attributes are
    the program's to set.

    With `where` or `weight` a row's chance is multiplied by what they say of it. Age and `newest` count all
    rows of which that is known.

    Args:
        half_life: After how many rows the chance is half as large; None: it is the same for all.
        newest: How many of the newest rows take part; None: all.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`; None: all.
        weight: By what the chance of each is multiplied: a numeric one; None: 1.

    Example:
        >>> sampler = RecencySampler(half_life=10_000)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100_000), sampler=sampler, batch_size=8)
        >>> sampler.newest = 50_000
    """

    def __init__(
        self,
        half_life: float | None = None,
        newest: int | None = None,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
    ) -> None:
        super().__init__(where=where, weight=weight)
        self.half_life = half_life
        self.newest = newest
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._weights = WindowTree(self.filter)
        self._window = Window(0, 0)
        self._scale: tuple[float | None, int] = (None, 0)  # the half-life, and the id that weighs 1

    def attach(self, storage: ReadView) -> None:
        """Begin anew, with a storage."""
        super().attach(storage)
        self._begin()
        if self.filter is not None:
            warm()

    @property
    def half_life(self) -> float | None:
        """After how many rows the chance is half as large; None: never."""
        return self._half_life

    @half_life.setter
    def half_life(self, value: float | None) -> None:
        if value is not None:
            value = float(value)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"half_life must be a number of rows > 0, or None, got {value}")
        self._half_life = value

    @property
    def newest(self) -> int | None:
        """How many of the newest rows take part; None: all. A fraction, from a schedule, is cut off."""
        return self._newest

    @newest.setter
    def newest(self, value: float | None) -> None:
        if value is not None and not (math.isfinite(value) and value >= 1):
            raise ValueError(f"newest must be a number of rows >= 1, or None, got {value}")
        self._newest = None if value is None else int(value)

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            NotReadyError: There is none, or none that matches.
            QueryError: The filter cannot be computed.
        """
        window, half_life, newest = readable(storage), self._half_life, self._newest
        if self.filter is not None:
            return self._draw_filtered(storage, lambda: self._draw_by_weight(storage, batch_size, generator))
        rows = window.rows
        taking_part = rows if newest is None else min(rows, newest)
        if half_life is None:
            ages = generator.integers(0, taking_part, batch_size)
        else:
            rate = -_LN2 / half_life
            within = -math.expm1(taking_part * rate)  # the chance that an age of all is one of these
            ages = (np.log1p(-within * generator.random(batch_size)) / rate).astype(np.int64)
            np.minimum(ages, taking_part - 1, out=ages)  # rounding
        if window.deleted:
            return Selection(window.nth(rows - 1 - ages))
        return Selection(window.last - ages)

    # -- with a filter: chances that stay in proportion while rows grow older ------------------------

    def _draw_by_weight(
        self, storage: ReadView, size: int, generator: np.random.Generator
    ) -> Selection | None:
        with self._lock:
            tree = self._weights.catch_up(storage, lambda places: self._weigh(storage, places), self._narrow)
            if tree.total > _FAINT:
                places, _ = tree.find(generator.random(size) * tree.total)
                return Selection(storage.geometry.ids_in(places, self._weights.window.last))
            return self._draw_by_faint_weight(storage, self._weights.window, size, generator)

    def _draw_by_faint_weight(
        self, storage: ReadView, window: Window, size: int, generator: np.random.Generator
    ) -> Selection | None:
        """Draw where the rows that match are so old that their weights are hardly numbers."""
        ids = window.ids()
        masses = np.zeros(0) if self.filter is None else self.filter.masses_of(storage, ids)
        ids, masses = ids[masses > 0], masses[masses > 0]
        if not ids.size:
            return None
        if self._half_life is not None:
            masses = masses * np.exp2((ids - ids[-1]) / self._half_life)
        sums = np.cumsum(masses)
        under = np.minimum(generator.random(size) * sums[-1], np.nextafter(sums[-1], 0.0))
        return Selection(ids[np.searchsorted(sums, under, side="right")])

    def _narrow(self, window: Window) -> Window:
        """Return the rows that take part, and say which of them weighs 1."""
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

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        own = ("_lock", "_weights", "_window", "_scale")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state)
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"half_life": self._half_life, "newest": self._newest} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.half_life, self.newest = state_dict["half_life"], state_dict["newest"]

    def __repr__(self) -> str:
        return f"RecencySampler(half_life={self._half_life}, newest={self._newest}{self._filtering})"
