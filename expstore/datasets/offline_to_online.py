"""Sample from a data set and a growing buffer together, or copy one into the other.

Used to start learning from recorded experience, under TorchRL's names. Data sets are never written to.
"""

from __future__ import annotations

import inspect
import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.buffers.arguments import check_batch_size
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.core.draws import Draws
from expstore.core.values import key_name, to_key
from expstore.data.to_arrays import to_arrays
from expstore.datasets.registry import load_dataset
from expstore.errors import ArgumentError, SchemaError
from expstore.schema.row_fields import SAMPLE_ENTRIES
from expstore.storages.read_view import ReadView
from expstore.storages.torchrl_tensors import LazyTensorStorage
from expstore.transforms import Compose

_TRANSFORMS = (1 << 62) + 1  # a stream that neither readers nor ensembles use


class OfflineToOnlineReplayBuffer:
    """Sample from a data set and a growing buffer, with a fixed fraction of every batch from each.

    The first `round(offline_fraction * n)` rows of a batch come from the data set, the others from the
    buffer; while the buffer is empty, all rows come from the data set. Keys that identify rows of one of the
    two (`index`, `id`, ...) are left out.

    Threads, processes and crashes: as for the two buffers. Each draws with its own seed, so draws continue
    after a restart if both are stores; the fraction must be set again with `anneal`.

    Args:
        offline_dataset: The data set: any buffer, including TorchRL's, or a name for `load_dataset`, for
            instance "minari:D4RL/pen/human-v2".
        online_storage: The storage of new rows. Pass it or a capacity.
        online_capacity: Capacity of a new buffer in RAM, in rows.
        offline_fraction: Fraction of a batch that comes from the data set. Between 0 and 1.
        batch_size: Batch size of `sample`. Required if the data set is a name.
        transform: A transform of batches.
        as_numpy: Whether `sample` returns NumPy arrays by default, independently of the data set.
        dataset_kwargs: Keywords of `load_dataset`, if the data set is a name.

    Raises:
        ArgumentError: The fraction is not between 0 and 1; storage and capacity are both given, or neither;
            the batch size is below 1, or missing; `dataset_kwargs` are given with a buffer; or the transform
            reads other steps; the data set is not a buffer, or an argument has the wrong type.

    Example:
        >>> from expstore import LazyTensorStorage, ReplayBuffer
        >>> from expstore.datasets import OfflineToOnlineReplayBuffer
        >>> offline = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> offline.extend(TensorDict({"observation": torch.zeros(100, 4)}, [100])).shape
        torch.Size([100])
        >>> rb = OfflineToOnlineReplayBuffer(offline, online_capacity=50, batch_size=8)
        >>> rb.extend(TensorDict({"observation": torch.ones(10, 4)}, [10])).shape
        torch.Size([10])
        >>> rb.sample()["observation"][:, 0]
        tensor([0., 0., 0., 0., 1., 1., 1., 1.])
    """

    def __init__(
        self,
        offline_dataset: Any,
        *,
        online_storage: ReadView | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        as_numpy: bool = False,
        **dataset_kwargs: Any,
    ) -> None:
        if online_storage is not None and online_capacity is not None:
            raise ArgumentError("Provide online_storage OR online_capacity, not both.")
        if online_storage is None and online_capacity is None:
            raise ArgumentError("Provide one of online_storage or online_capacity.")
        offline_fraction = _fraction(offline_fraction)
        if isinstance(offline_dataset, str):
            if dataset_kwargs.setdefault("batch_size", batch_size) is None:
                raise ArgumentError(
                    "batch_size must be provided when offline_dataset is a string, so the dataset can be "
                    "constructed."
                )
            offline_dataset = load_dataset(offline_dataset, **dataset_kwargs)
        elif dataset_kwargs:
            raise ArgumentError(
                "dataset_kwargs are only forwarded when offline_dataset is a string, got "
                f"{[*dataset_kwargs]}. Pass them directly to your dataset constructor instead."
            )
        _check_buffer(offline_dataset, "sample", "offline_dataset")
        batch_size = check_batch_size(batch_size)
        self._transform = Compose.of(transform)
        if self._transform.steps:
            raise ArgumentError(
                f"{type(self._transform.steps[0]).__name__} reads other steps of one store's episodes: "
                "pass it to the data set, and append it to online_buffer"
            )
        if online_capacity is not None:
            online_storage = LazyTensorStorage(online_capacity)
        self._online = ReplayBuffer(storage=online_storage)
        self._offline = offline_dataset
        self._offline_fraction = self._base_offline_fraction = offline_fraction
        self._batch_size = batch_size
        self._as_numpy = as_numpy
        # Rows are joined as tensors, even if the data set returns NumPy arrays by default.
        has_choice = "as_numpy" in inspect.signature(offline_dataset.sample).parameters
        self._options = {"as_numpy": False} if has_choice else {}

    def extend(self, data: Any) -> torch.Tensor:
        """Append rows to the growing buffer, whose `extend` names arguments and errors.

        Returns:
            Index of each row there. Shape `(n,)`, int64.
        """
        return self._online.extend(data)

    def sample(self, batch_size: int | None = None, *, as_numpy: bool | None = None) -> Any:
        """Draw a batch.

        Args:
            batch_size: Number of rows. None uses the batch size of the constructor.
            as_numpy: Whether to return nested dicts of NumPy arrays instead of a TensorDict. None uses the
                value of the constructor.

        Returns:
            A TensorDict, batch size `[batch_size]`; with `as_numpy` field name -> array.

        Raises:
            ArgumentError: No batch size is known, or it is below 1; it is no number.
            SchemaError: The rows of both have different fields.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ArgumentError("batch_size must be provided either in __init__ or sample().")
        size = check_batch_size(size)
        offline = round(self._offline_fraction * size)
        if offline >= size or not len(self._online):
            batch = self._offline.sample(size, **self._options)
        elif not offline:
            batch = self._online.sample(size)
        else:
            drawn = self._offline.sample(offline, **self._options)
            batch = _join(drawn, self._online.sample(size - offline))
        made = self._transform.forward(batch, self._numbers())
        return to_arrays(made) if (self._as_numpy if as_numpy is None else as_numpy) else made

    def _numbers(self) -> np.random.Generator | None:
        """Return the generator of transforms; None if none needs one, or the draw number is unknown."""
        if not self._transform.draws or not isinstance(self._offline, ReplayBuffer):
            return None
        storages = self._offline.storage, self._online.storage
        return Draws(storages[0].seed, _TRANSFORMS).generator(
            sum(storage.draws.number for storage in storages)
        )

    def anneal(self, step: int, total_steps: int) -> None:
        """Decrease the data set's fraction linearly from its initial value to 0.

        Args:
            step: Current training step, from 0 on.
            total_steps: Step from which on no row comes from the data set. At least 1.

        Raises:
            ArgumentError: `total_steps` is too small; an argument is not a number.
        """
        _check_number("step", step)
        _check_number("total_steps", total_steps)
        if total_steps < 1:
            raise ArgumentError(f"total_steps must be at least 1, got {total_steps}")
        self._offline_fraction = self._base_offline_fraction * min(1.0, max(0.0, 1.0 - step / total_steps))

    @property
    def offline_fraction(self) -> float:
        """The current fraction of a batch that comes from the data set."""
        return self._offline_fraction

    @property
    def offline_buffer(self) -> Any:
        """The data set that was passed."""
        return self._offline

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The growing buffer."""
        return self._online

    def __len__(self) -> int:
        return len(self._offline) + len(self._online)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(offline={type(self._offline).__name__}, "
            f"offline_fraction={self._offline_fraction:.3f}, online_size={len(self._online)}, "
            f"batch_size={self._batch_size})"
        )


def prefill_replay_buffer(rb: Any, dataset: Any, n_samples: int | None = None, chunk_size: int = 1000) -> Any:
    """Copy the rows of a data set into a buffer, the oldest first; return the buffer.

    Rows are copied once each, in the order in which they were written, so that episodes stay whole; TorchRL
    samples them instead.

    Args:
        rb: The buffer to write to.
        dataset: Any buffer with one dim of rows, including TorchRL's, or a name for `load_dataset`.
        n_samples: Maximum number of rows; None copies all.
        chunk_size: Number of rows that are copied at a time.

    Raises:
        ArgumentError: The data set has several dims of rows, or a number is too small; an argument is not a
            buffer, or not a number.

    Example:
        >>> from expstore import LazyTensorStorage, ReplayBuffer
        >>> from expstore.datasets import prefill_replay_buffer
        >>> dataset = ReplayBuffer(storage=LazyTensorStorage(50))
        >>> dataset.extend(TensorDict({"observation": torch.zeros(50, 4)}, [50])).shape
        torch.Size([50])
        >>> len(prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(100)), dataset, n_samples=20))
        20
    """
    if isinstance(dataset, str):
        dataset = load_dataset(dataset, batch_size=chunk_size)
    _check_buffer(dataset, "storage", "dataset")
    _check_buffer(rb, "sample", "rb")
    _check_number("chunk_size", chunk_size)
    _check_number("n_samples", 0 if n_samples is None else n_samples)
    if chunk_size < 1 or (n_samples is not None and n_samples < 0):
        raise ArgumentError(f"n_samples={n_samples} and chunk_size={chunk_size} must be positive")
    if getattr(dataset.storage, "ndim", 1) != 1:
        raise ArgumentError("the data set has several dims of rows: copy it with rb.extend(dataset[:])")
    rows = np.arange(len(dataset))
    if isinstance(dataset, ReplayBuffer):
        window = dataset.storage.window
        rows = (
            dataset.storage.geometry.index_of(window.nth(np.arange(window.rows))) if window.rows else rows[:0]
        )
    rows = rows[:n_samples]
    for first in range(0, rows.size, chunk_size):
        rb.extend(dataset[torch.from_numpy(rows[first : first + chunk_size])])
    return rb


def _check_buffer(found: Any, method: str, name: str) -> None:
    if not hasattr(found, method) or isinstance(found, type | torch.Tensor | TensorDictBase):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ArgumentError(
            f"{name} must be a buffer of expstore or torchrl, with its rows; got "
            f"{'the class ' if isinstance(found, type) else ''}{kind}: put rows into a "
            "ReplayBuffer(storage=LazyTensorStorage(n)) with extend()"
        )


def _check_number(name: str, found: Any) -> None:
    if isinstance(found, bool) or not isinstance(found, Real) or math.isnan(found):
        raise ArgumentError(f"{name} must be a number, got {found!r}")


def _fraction(offline_fraction: float) -> float:
    _check_number("offline_fraction", offline_fraction)
    if not 0.0 < offline_fraction < 1.0:
        raise ArgumentError(f"offline_fraction must be in (0, 1), got {offline_fraction}.")
    return float(offline_fraction)


def _join(offline: Any, online: Any) -> Any:
    """Concatenate the rows of both, without keys that only one of them has about its rows."""
    parts = [offline, online]
    if all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat(parts)
    names = [{to_key(key) for key in part.keys(True, True)} for part in parts]
    differing = names[0] ^ names[1]
    lone = {key for key in differing if key[0] in SAMPLE_ENTRIES}
    if differing - lone:
        alone = [sorted(key_name(key) for key in own - other - lone) for own, other in (names, names[::-1])]
        raise SchemaError(
            f"only the data set has the fields {alone[0]}, only the online buffer {alone[1]}",
            hint="give both the same fields, for instance with transforms of the data set",
        )
    return torch.cat([part.exclude(*lone) for part in parts])
