"""Rows of tensors in RAM, with TorchRL's class names and arguments.

Apart from the arguments, these classes are `MemoryStorage`. They use no files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.geometry import RingGeometry, check_ndim
from expstore.core.torchrl_keywords import OBJECT_STORAGE, TENSOR_STORAGE, check_keywords
from expstore.core.values import Array
from expstore.errors import ArgumentError
from expstore.storages.memory import MemoryStorage
from expstore.storages.torchrl_options import find_device, find_seed

if TYPE_CHECKING:
    import torch

    from expstore.schema.schema import Schema
    from expstore.storages.batch import Rows


class TensorStorage(MemoryStorage):
    """Store rows that exist already, and as many later ones.

    Rows of a memory-mapped TensorDict (`td.memmap`, `TensorDict.load_memmap`) are used in place: they may be
    larger than RAM, and later rows and changes are written to its files. All other rows are copied.

    Threads: one writes at a time, any number read. Processes: a forked child has its own copy, but shares
    memory-mapped rows. Crashes: nothing survives the process, except the values in the files of memory-mapped
    rows.

    Args:
        storage: The rows: a TensorDict, a tensorclass, a tensor, or a tree of tensors; its first dim, or its
            first `ndim` dims, are rows. Later changes of it reach the storage only if it is memory-mapped. A
            TensorDict without fields gives the capacity: the storage has no rows yet, and the first rows that
            are written determine the fields.
        max_size: The expected length of the first dim; None: it is not checked.
        device: The device on which rows are returned; they are stored in host memory. "auto": the CPU.
        ndim: How many dims are rows; the first is time; see `Storage`.
        seed: Key of all draws; None: a number from torch's generator, so that `torch.manual_seed` decides.
        torchrl: Keywords of TorchRL's class that have no effect here. They are accepted at their defaults;
            other values raise an error that gives the reason.

    Raises:
        ArgumentError: There are no rows, or not `max_size` of them; or an argument is not supported.
        StateError: torch cannot use the device.
        SchemaError: Rows of this kind cannot be stored.

    Example:
        >>> from expstore import TensorStorage
        >>> storage = TensorStorage(TensorDict({"a": torch.arange(3)}, [3]))
        >>> storage.get(1)["a"]
        tensor(1)
    """

    row_traits = replace(MemoryStorage.row_traits, grows=True)
    #: Whether the rows that are being appended become the columns themselves.
    _uses_rows = False

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        seed: int | None = None,
        **torchrl: Any,
    ) -> None:
        from expstore.storages.base import append, rows_along

        check_keywords(self, torchrl, OBJECT_STORAGE)
        if storage is None:
            raise ArgumentError("Expected storage to be non-null.")
        shape = rows_along(storage, check_ndim(ndim))
        if max_size is not None and check_whole("max_size", max_size) != shape[0]:
            raise ArgumentError(
                "The max-size and the storage shape mismatch: got "
                f"max_size={max_size} for a storage of shape {shape}."
            )
        super().__init__(math.prod(shape), seed=find_seed(seed), ndim=ndim)
        self.device = find_device(device)
        if _is_without_fields(storage):
            return
        self._uses_rows = _is_mapped(storage)
        try:
            append(self, storage)
        finally:
            self._uses_rows = False

    def geometry_for(self, schema: Schema, ring: RingGeometry) -> RingGeometry:
        """Return a ring without spare slots if rows are used in place."""
        return ring.with_slots(0, 0) if self._uses_rows else super().geometry_for(schema, ring)

    def _put(self, rows: Rows, skipped: int) -> None:
        if not self._uses_rows:
            super()._put(rows, skipped)
            return
        for place, values in enumerate((*rows.columns, *rows.assignment.numbers)):
            column = self._columns[place]
            if isinstance(column, np.ndarray) and _can_replace(values, column):
                self._columns[place] = values
            elif isinstance(column, np.ndarray):
                column[:] = values
            else:
                column.put(np.arange(rows.count), values)


class LazyTensorStorage(TensorStorage):
    """Store rows of tensors in RAM; the first rows determine the fields.

    Later rows with more fields add them, with zeros in all rows without, as `rb.columns.add(name, fill=0)`.
    A storage with specs refuses such rows.

    Threads: one writes at a time, any number read. Processes: a forked child has its own copy. Crashes:
    nothing survives the process; `expstore.open` creates a store that does.

    Args:
        max_size: Most readable rows.
        device: The device on which rows are returned; they are stored in host memory. "auto": the CPU.
        ndim: How many dims of a batch are rows; the first is time; see `Storage`.
        seed: Key of all draws; None: a number from torch's generator, so that `torch.manual_seed` decides.
        torchrl: Keywords of TorchRL's class that have no effect here. They are accepted at their defaults;
            other values raise an error that gives the reason.

    Raises:
        ArgumentError: An argument is out of range, or not supported.
        StateError: torch cannot use the device.

    Example:
        >>> from expstore import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        seed: int | None = None,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, TENSOR_STORAGE)
        # Not the constructor of `TensorStorage`, which expects rows.
        MemoryStorage.__init__(self, check_whole("max_size", max_size), seed=find_seed(seed), ndim=ndim)
        self.device = find_device(device)


def _is_without_fields(storage: Any) -> bool:
    """Return whether rows are a TensorDict or tensorclass that has no fields yet."""
    from tensordict import is_tensor_collection

    return is_tensor_collection(storage) and bool(storage.is_empty())


def _is_mapped(storage: Any) -> bool:
    """Return whether rows are a memory-mapped TensorDict, tensorclass or tensor."""
    import torch
    from tensordict import MemoryMappedTensor, is_tensor_collection

    if not is_tensor_collection(storage):
        return isinstance(storage, MemoryMappedTensor)
    # Not `is_memmap`: it is False after `load_memmap`.
    leaves = [one for one in storage.values(True, True) if isinstance(one, torch.Tensor)]
    return bool(leaves) and all(isinstance(one, MemoryMappedTensor) for one in leaves)


def _can_replace(values: Any, column: Array) -> bool:
    """Return whether an array can be used instead of a column with the same number of slots."""
    return (
        isinstance(values, np.ndarray)
        and values.shape == column.shape
        and values.dtype == column.dtype
        and values.flags.c_contiguous
        and values.flags.writeable
    )
