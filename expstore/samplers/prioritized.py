"""Sampling in proportion to priorities, with weights that undo the bias.

Prioritized experience replay (Schaul et al. 2016, proportional variant). Buffers take the sampler; it
keeps a sum tree over the storage's priorities and never touches rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from expstore.core.torchrl_keywords import PRIORITIZED, check_keywords
from expstore.core.values import Array, IntArray, Selection
from expstore.errors import NotReadyError
from expstore.kernels.loader import compiling
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Where
from expstore.samplers.window_sum_tree import WindowTree, warm

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["PrioritizedSampler", "Reduction"]

Reduction = Literal["max", "min", "mean", "median"]
_REDUCE: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "mean": np.mean, "median": np.median}
_WEIGHTS = {torch.float32: np.float32, torch.float64: np.float64}


class PrioritizedSampler(Sampler):
    """Draw row i with probability p_i^alpha / sum of p_j^alpha, where p is priority + eps.

    Batches carry `priority_weight`, (P_i / min P)^-beta with the minimum over all readable rows, so that
    the largest is 1. Rows are new at the largest priority seen so far, and drawn soon.

    Threads: any number may sample while one writes. Crashes: priorities are on the disk 0.1 s after they
    were set, and at `flush`; the tree is made from them when the store is opened.

    Args:
        max_capacity: As in TorchRL, how many rows to expect. The tree grows with the storage, so that
            storages with more rows, or without a capacity, work too; None: as many as the storage has.
        alpha: How much priorities count; 0: every row has the same chance.
        beta: How much of the bias the weights undo; 1: all of it.
        eps: Added to priorities, so that a row of priority 0 has a chance.
        dtype: Of the weights: torch.float32 or torch.float64. Probabilities are float64 always.
        reduction: What becomes of several priorities for one row: "max", "min", "mean" or "median".
        max_priority_within_buffer: Take the largest priority of the readable rows, not the largest ever.
        device: Where the tree is kept: "cpu", or None.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`; None: all.
            `priority_weight` is then of the rows that match.
        weight: By what the chance of each is multiplied: a numeric one; None: 1. `priority_weight` counts it
            in: with alpha=0 and beta=1 it undoes it.

    Example:
        >>> sampler = PrioritizedSampler(max_capacity=1000, alpha=0.7, beta=0.5)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    prioritized = True

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        max_priority_within_buffer: bool = False,
        device: Any = None,
        *,
        where: str | Where | None = None,
        weight: str | None = None,
    ) -> None:
        check_keywords(self, {"max_capacity": max_capacity, "device": device}, PRIORITIZED)
        super().__init__(where=where, weight=weight)
        if dtype not in _WEIGHTS:
            raise ValueError(f"dtype {dtype} is not supported; use torch.float32 or torch.float64")
        if reduction not in _REDUCE:
            raise ValueError(f"reduction {reduction!r} is unknown; use one of {', '.join(_REDUCE)}")
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"eps must be a number >= 0, got {eps}")
        self._max_capacity = max_capacity
        self._eps = float(eps)
        #: Of the weights.
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self._lock = threading.Lock()
        self._weights = WindowTree(self.filter)
        self.beta = beta
        self._alpha = _exponent("alpha", alpha)

    @property
    def alpha(self) -> float:
        """How much priorities count. Setting it weighs every row anew."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = _exponent("alpha", value)
        with self._lock:
            self._alpha = value
            self._weights.drop()

    @property
    def beta(self) -> float:
        """How much of the bias the weights undo."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _exponent("beta", value)

    @property
    def max_size(self) -> int:
        """The number of rows to expect, as given; otherwise the largest number that the storage keeps."""
        return self._require_storage().max_size if self._max_capacity is None else self._max_capacity

    @property
    def device(self) -> torch.device:
        """Where the tree is kept: in host memory."""
        return torch.device("cpu")

    @property
    def default_priority(self) -> float:
        """The priority of new rows: the largest so far, 1 before any was set or without a storage."""
        storage = None if self._attached is None else self._attached()
        return super().default_priority if storage is None else float(storage.priorities.largest)

    def attach(self, storage: ReadView) -> None:
        """Follow the priorities of a storage.

        Raises:
            QueryError: Its rows have no such fields as the filter names.
        """
        super().attach(storage)
        self._weights.drop()
        storage.priorities.watch(self)
        storage.priorities.within = self.max_priority_within_buffer
        warm()

    def reduce(self, priorities: Array) -> Array:
        """Return one priority per row. Shapes `(n, ...)` in, `(n,)` out."""
        if priorities.ndim < 2 or priorities.size == priorities.shape[0]:
            return priorities.reshape(-1)
        reduced: Array = _REDUCE[self.reduction](priorities.reshape(priorities.shape[0], -1), axis=1)
        return reduced

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows, with replacement.

        Raises:
            NotReadyError: Every priority is 0, and so is eps; or no row matches.
            QueryError: The filter cannot be computed.
        """
        if self.filter is not None:
            return self._draw_filtered(
                storage, lambda: self._draw_by_priority(storage, batch_size, generator)
            )
        found = self._draw_by_priority(storage, batch_size, generator)
        if found is None:
            raise NotReadyError("non-positive p_sum: all priorities are 0", hint="set eps above 0")
        return found

    def _draw_by_priority(
        self, storage: ReadView, size: int, generator: np.random.Generator
    ) -> Selection | None:
        with self._lock:
            tree = self._weights.catch_up(storage, lambda places: self._weigh(storage, places))
            window, found = self._weights.window, tree.draw(generator.random(size))
        if found is None:
            return None
        places, chances = found
        bias = self._undo_bias(chances)
        return Selection(storage.geometry.ids_in(places, window.last), {("priority_weight",): bias})

    def _undo_bias(self, chances: Array) -> Array:
        """Return the weights of rows with these chances, in units of the smallest. Shapes `(n,)`."""
        weights: Array = (chances**-self._beta).astype(_WEIGHTS[self.dtype])
        return weights

    # -- the tree --------------------------------------------------------------------------------

    def _weigh(self, storage: ReadView, places: IntArray) -> Array:
        with compiling:
            from expstore.kernels.sum_tree import raise_priorities
        weights: Array = raise_priorities(storage.priorities.values, places, eps=self._eps, alpha=self._alpha)
        return weights

    def on_priorities(self, storage: ReadView, places: IntArray) -> None:
        """Be told of slots whose priorities have been set."""
        with self._lock:
            self._weights.change(storage, places, lambda known: self._weigh(storage, known))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it makes its own tree."""
        kept = super().__getstate__().items()
        return {name: value for name, value in kept if name not in ("_lock", "_weights")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state, _lock=threading.Lock(), _weights=WindowTree(state.get("filter")))

    # -- state -----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return settings that a program changes while it runs, which versions keep."""
        return {"alpha": self._alpha, "beta": self._beta}

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Take over what `settings` returned, perhaps of a sampler of another kind."""
        self.alpha, self.beta = settings.get("alpha", self._alpha), settings.get("beta", self._beta)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes; priorities belong to the storage."""
        return self.settings() | {"eps": self._eps, "reduction": self.reduction} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._eps, self.reduction = float(state_dict["eps"]), state_dict["reduction"]
        self.beta, self.alpha = state_dict["beta"], state_dict["alpha"]

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self._alpha}, beta={self._beta}, eps={self._eps}{self._filtering})"


def _exponent(name: str, value: float) -> float:
    value = float(value)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number >= 0, got {value}")
    return value
