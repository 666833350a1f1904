"""Specs of zeros and ones.

Use them for flags and switches. Use OneHot for rows with exactly one 1.
"""

from __future__ import annotations

from typing import Any

import torch

from expstore.specs.boxes import CategoricalBox
from expstore.specs.categorical import Categorical
from expstore.specs.masks import same_mask
from expstore.specs.shapes import Move, as_size, indexing


class Binary(Categorical):
    """Spec whose elements are zero or one.

    The last dim cannot be indexed. A Binary equals a Categorical with n=2. For threads, processes and
    crashes see Categorical.

    Args:
        n: Size of the last dim (not the number of choices).
        shape: Shape of a value; `(n,)` by default.
        device: Device of the values.
        dtype: Dtype of the values.

    Raises:
        TypeError: Both n and shape are missing.
        ValueError: The last dim differs from n, or n is negative.

    Example:
        >>> from expstore import Binary
        >>> spec = Binary(3)
        >>> spec.is_in(torch.tensor([0, 1, 1], dtype=torch.int8))
        True
    """

    _last_stays = True

    def __init__(
        self,
        n: int | None = None,
        shape: torch.Size | tuple[int, ...] | list[int] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if shape is None:
            if n is None:
                raise TypeError("Must provide either n or shape.")
            if n < 0:
                raise ValueError(f"Binary: n is the size of the last dim and must be 0 or more; got {n!r}")
            shape = (n,)
        size = as_size(shape)
        if not size and n:
            raise ValueError(f"'n' must be zero for spec {type(self)} when using an empty shape. Got n={n}.")
        if size and n is not None and size[-1] != n:
            raise ValueError(
                f"The last value of the shape must match 'n' for spec {type(self)}. Got n={n} and "
                f"shape={size}."
            )
        super().__init__(2, size, device, dtype)

    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        shape = move.shape(self.shape) if move else self.shape
        made = Binary(shape=shape, device=device or self.device, dtype=dtype or self.dtype)
        if self.mask is not None:
            made.update_mask(move.rows(self.mask, self.shape) if move else self.mask)
        return made

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each position along a dim, without that dim.

        Raises:
            ValueError: The dim does not exist, its size is unknown, or it is the last one.
        """
        if dim in (self.ndim - 1, -1):
            raise ValueError(f"Final dimension of {type(self)} must remain unchanged. Got dim={dim}.")
        return super().unbind(dim)

    def __getitem__(self, idx: Any) -> Any:
        if not self.ndim:
            raise ValueError("Cannot index a Binary spec with an empty shape")
        return self._remake(indexing(self.shape, idx, whole=1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Binary) and type(other) is not Categorical:
            return False if isinstance(other, Categorical) else NotImplemented
        return (
            other.space == CategoricalBox(2) and self._lies_like(other) and same_mask(self.mask, other.mask)
        )
