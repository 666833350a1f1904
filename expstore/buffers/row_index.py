"""Indices of rows, as users pass and get them.

Used by everything of a buffer that takes or returns indices. It reads no rows.
"""

from __future__ import annotations

from typing import Any

import torch

from expstore.buffers.store_handle import StoreHandle
from expstore.core.arguments import check_whole
from expstore.core.values import Array, IntArray
from expstore.data.containers import stack_index
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError
from expstore.storages.read_view import find


class RowIndex:
    """Translate indices of rows to ids and back.

    Args:
        store: The store.
        time_dim: Dim of a written batch that is time; None: the last of the dims that make rows.

    Raises:
        ArgumentError: The dim is negative, or not an integer.
    """

    def __init__(self, store: StoreHandle, time_dim: int | None) -> None:
        if time_dim is not None:
            time_dim = check_whole("dim_extend", time_dim, hint="use the number of the dim that is time")
            if time_dim < 0:
                raise ArgumentError(f"dim_extend must be a positive value, got {time_dim}")
        self._store = store
        #: The dim that the user asked for; None: the default.
        self.asked_time_dim = time_dim

    @property
    def time_dim(self) -> int:
        """The dim of a written batch that is time."""
        return self._store.storage.ndim - 1 if self.asked_time_dim is None else self.asked_time_dim

    def find(self, index: Any) -> tuple[IntArray, tuple[int, ...]]:
        """Return the ids of the rows at an index as a flat array, and the shape of the selection.

        Raises:
            NotFoundError: There is no such row.
        """
        return find(self._store.storage, index, self.time_dim)

    def ravel(self, index: Any) -> Array:
        """Return one number per row, given indices in the shape that `extend` returns."""
        if isinstance(index, tuple):
            index = stack_index(index)
        numbers, storage = to_array(index), self._store.storage
        return numbers if storage.ndim == 1 else storage.geometry.ravel(numbers, storage.window)

    def to_tensor(self, numbers: IntArray) -> torch.Tensor:
        """Return indices in the shape that users get. Shape `(n,)`, or `(n, ndim)`."""
        geometry = self._store.storage.geometry
        return torch.from_numpy(numbers if geometry.ndim == 1 else geometry.unravel(numbers))
