"""Sampling that prefers new rows.

Buffers take the sampler; it keeps no state beside its two attributes and never looks at rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.samplers.base import Sampler, readable
from expstore.types import Selection

if TYPE_CHECKING:
    from expstore.storages.base import Storage

__all__ = ["RecencySampler"]

_LN2 = math.log(2.0)


class RecencySampler(Sampler):
    """Draw a row of age a with probability proportional to 0.5^(a / half_life), with replacement.

    The newest row that can be read has age 0, the one before it age 1, and so on. A row costs the same
    however many there are: the age is the inverse of the truncated geometric law's distribution
    function at a uniform number. Ages beyond 53 half-lives, of chance 2^-53 together, are never drawn.

    `newest` leaves out all but the newest rows; setting it step by step is the "emphasizing recent
    experience" of Wang and Ross 2019, which is uniform over them (`half_life=None`).

    Threads: any number may sample. Crashes: a restart goes on with the next batch; the attributes are
    the program's to set.

    Args:
        half_life: After how many rows the chance is half as large; None: it is the same for all.
        newest: How many of the newest rows take part; None: all.

    Example:
        >>> sampler = RecencySampler(half_life=10_000)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100_000), sampler=sampler, batch_size=8)
        >>> sampler.newest = 50_000
    """

    def __init__(self, half_life: float | None = None, newest: int | None = None) -> None:
        self.half_life = half_life
        self.newest = newest

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

    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Raises:
            NotReadyError: There is none.
        """
        window, half_life, newest = readable(storage), self._half_life, self._newest
        rows = window.rows
        taking_part = rows if newest is None else min(rows, newest)
        if half_life is None:
            ages = generator.integers(0, taking_part, batch_size)
        else:
            rate = -_LN2 / half_life
            within = -math.expm1(taking_part * rate)  # the chance that an age of all is one of these
            ages = (np.log1p(-within * generator.random(batch_size)) / rate).astype(np.int64)
            np.minimum(ages, taking_part - 1, out=ages)  # rounding
        if window.gaps:
            return Selection(window.nth(rows - 1 - ages))
        return Selection(window.last - ages)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"half_life": self._half_life, "newest": self._newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.half_life, self.newest = state_dict["half_life"], state_dict["newest"]

    def __repr__(self) -> str:
        return f"RecencySampler(half_life={self._half_life}, newest={self._newest})"
