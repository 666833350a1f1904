"""A sampler that draws rows in proportion to their priorities, with weights that correct the bias.

Prioritized experience replay (Schaul et al. 2016, proportional variant). The sampler keeps a sum tree over
the storage's priorities and never reads rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from expstore.core.torchrl_keywords import PRIORITIZED, check_keywords
from expstore.core.values import Array, IntArray, Mass, Selection
from expstore.errors import ArgumentError, NotReadyError
from expstore.kernels.loader import compiling
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Where
from expstore.samplers.window_sum_tree import WindowTree, warm

if TYPE_CHECKING:
    from expstore.kernels.sum_tree import SumTree
    from expstore.storages.read_view import ReadView

Reduction = Literal["max", "min", "mean", "median"]
_REDUCE: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "mean": np.mean, "median": np.median}
_WEIGHTS = {torch.float32: np.float32, torch.float64: np.float64}


class PrioritizedSampler(Sampler):
    """Draw row i with probability p_i^alpha / sum of p_j^alpha, where p is priority + eps.

    Batches have `priority_weight`: (P_i / min P)^-beta, with the minimum over all readable rows, so that the
    largest possible weight is 1. New rows get the largest priority so far, so that they are drawn soon.

    Threads: any number may sample while one writes. Crashes: priorities are on disk 0.1 s after they were
    set, and after `flush`. The tree is built from them when the store is opened.

    Args:
        max_capacity: As in TorchRL, the expected number of rows; None for the largest number that the storage
            keeps. It does not limit anything: the tree grows with the storage.
        alpha: Exponent of the priorities; 0 gives every row the same probability.
        beta: Exponent of `priority_weight`; 0 corrects nothing, 1 corrects the bias fully.
        eps: Added to every priority, so that rows with priority 0 can be drawn.
        dtype: Dtype of `priority_weight`: torch.float32 or torch.float64. Probabilities are always float64.
        reduction: How several priorities of one row are reduced to one: "max", "min", "mean" or "median".
        max_priority_within_buffer: Whether new rows get the largest priority of the readable rows, instead of
            the largest priority ever set.
        device: "cpu" or None: the tree is kept in host memory.
        where: Which rows are drawn: a boolean SQL expression over a row and its `episode`, or a `Where`; None
            for all rows. The minimum in `priority_weight` is then over the rows that match.
        weight: Factor for the probability of each row: a numeric SQL expression, at least 0; None for 1.
            `priority_weight` takes it into account: with alpha=0 and beta=1 it cancels the factor.
        split: The split whose rows are drawn; None for the rows of all splits.

    Example:
        >>> from expstore import MemoryStorage, PrioritizedSampler, TensorDictReplayBuffer
        >>> sampler = PrioritizedSampler(max_capacity=1000, alpha=0.7, beta=0.5)
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=32)
    """

    prioritized = True
    keeps_to_split = True
    _transient = frozenset({"_lock", "_weights"})

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
        split: str | None = "train",
    ) -> None:
        check_keywords(self, {"max_capacity": max_capacity, "device": device}, PRIORITIZED)
        super().__init__(where=where, weight=weight, split=split)
        if dtype not in _WEIGHTS:
            raise ArgumentError(f"dtype {dtype} is not supported; use torch.float32 or torch.float64")
        if reduction not in _REDUCE:
            raise ArgumentError(f"reduction {reduction!r} is unknown; use one of {', '.join(_REDUCE)}")
        if not (math.isfinite(eps) and eps >= 0):
            raise ArgumentError(f"eps must be a number >= 0, got {eps}")
        self._max_capacity = max_capacity
        self._eps = float(eps)
        #: Dtype of the weights.
        self.dtype = dtype
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self._begin()
        self.beta = beta
        self._alpha = _exponent("alpha", alpha)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._weights = WindowTree(self._filter)

    @property
    def alpha(self) -> float:
        """Exponent of the priorities. Setting it computes the weights of all rows again."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = _exponent("alpha", value)
        with self._lock:
            self._alpha = value
            self._weights.drop()

    @property
    def beta(self) -> float:
        """Exponent of `priority_weight`."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _exponent("beta", value)

    @property
    def max_size(self) -> int:
        """The expected number of rows, if it was given; else the largest number that the storage keeps."""
        return self._require_storage().max_size if self._max_capacity is None else self._max_capacity

    @property
    def device(self) -> torch.device:
        """The device of the tree: the CPU."""
        return torch.device("cpu")

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage, and follow the storage's priorities.

        Raises:
            QueryError: The filter names a field that the storage does not have.
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
            NotReadyError: All priorities and eps are 0, or no row matches.
            QueryError: The filter cannot be evaluated.
        """
        return self._find_rows(storage, lambda: self._draw_by_priority(storage, batch_size, generator))

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error for a draw that finds no row: without a filter, all priorities are 0."""
        if self.filter is not None or not len(storage):
            return super().build_no_rows_error(storage)
        return NotReadyError("non-positive p_sum: all priorities are 0", hint="set eps above 0")

    def _draw_by_priority(
        self, storage: ReadView, size: int, generator: np.random.Generator
    ) -> Selection | None:
        with self._lock:
            tree = self._weights.catch_up(storage, lambda places: self._weigh(storage, places))
            window, found = self._weights.window, tree.draw(generator.random(size))
        if found is None:
            return None
        places, chances, (total, smallest) = found
        bias = self._undo_bias(chances)
        mass = Mass(total, window.rows, smallest, self._beta)
        ids = storage.description.window_ring.ids_in(places, window.last)
        return Selection(ids, {("priority_weight",): bias}, mass=mass)

    def mass(self, storage: ReadView, batch_size: int) -> Mass:
        """Return the sum of the priorities to the power of alpha, and the smallest of them.

        Args:
            storage: The storage with the rows.
            batch_size: Number of rows of the batch; it does not matter here.

        Raises:
            QueryError: The filter cannot be evaluated.
        """
        return self._weigh_filtered(storage, lambda: self._weigh_rows(storage))

    def _weigh_rows(self, storage: ReadView) -> Mass:
        with self._lock:
            tree = self._weights.catch_up(storage, lambda places: self._weigh(storage, places))
            return self._build_mass(tree, 1)

    def _build_mass(self, tree: SumTree, unit: int) -> Mass:
        total = tree.total
        return Mass(total, self._weights.window.rows, tree.smallest if total > 0 else 1.0, self._beta, unit)

    def _undo_bias(self, chances: Array) -> Array:
        """Return the weights of rows. Shapes `(n,)`.

        Args:
            chances: Probabilities of the rows, divided by the smallest probability.
        """
        weights: Array = (chances**-self._beta).astype(_WEIGHTS[self.dtype])
        return weights

    # -- the tree --------------------------------------------------------------------------------

    def _weigh(self, storage: ReadView, slots: IntArray) -> Array:
        with compiling:
            from expstore.kernels.sum_tree import raise_priorities
        priorities, places = storage.priorities.locate(slots)
        weights: Array = raise_priorities(priorities, places, eps=self._eps, alpha=self._alpha)
        return weights

    def on_priorities(self, storage: ReadView, places: IntArray) -> None:
        """Update the tree after priorities were set.

        Args:
            storage: The storage with the rows.
            places: Slots of the rows. Shape `(n,)`.
        """
        with self._lock:
            self._weights.change(storage, places, lambda known: self._weigh(storage, known))

    # -- state -----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that a program may change while it runs, as JSON values for snapshots."""
        return {"alpha": self._alpha, "beta": self._beta}

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Apply what `settings` returned, possibly for a sampler of another class."""
        self.alpha, self.beta = settings.get("alpha", self._alpha), settings.get("beta", self._beta)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`. Priorities are stored with the rows instead."""
        return self.settings() | {"eps": self._eps, "reduction": self.reduction} | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._eps, self.reduction = float(state_dict["eps"]), state_dict["reduction"]
        self.beta, self.alpha = state_dict["beta"], state_dict["alpha"]

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self._alpha}, beta={self._beta}, eps={self._eps}{self._filtering})"


def _exponent(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} must be a number >= 0, got {value!r}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentError(f"{name} must be a number >= 0, got {number}")
    return number
