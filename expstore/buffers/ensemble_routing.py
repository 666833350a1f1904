"""Route each row of a batch to a member of an ensemble.

Used by ensembles. The member is read from a field or is the position along a dim. It writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.core.values import IntArray, Key, key_name, to_key
from expstore.errors import ArgumentError, StateError


@dataclass(frozen=True)
class Route:
    """How rows are assigned to members.

    Args:
        key: The field with the members' numbers; None: `dim` is used.
        dim: The batch dim whose positions are the members.
    """

    key: Key | None = None
    dim: int | None = None

    @classmethod
    def of(cls, key: str | tuple[str, ...] | None, dim: int | None) -> Route:
        """Return a route by a key or by a dim, after checks.

        Raises:
            ArgumentError: The dim is not an integer; both are given.
        """
        if key is not None and dim is not None:
            raise ArgumentError("routing_key and routing_dim are mutually exclusive.")
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ArgumentError("routing_dim must be an integer.")
        return cls(None if key is None else to_key(key), dim)

    def of_rows(self, data: TensorDictBase, count: int) -> tuple[TensorDictBase, IntArray]:
        """Return rows in one batch dim, and the member of each. Shape `(n,)`, int64.

        Args:
            data: The rows.
            count: Number of members.

        Raises:
            StateError: There is neither a key nor a dim.
            ArgumentError: Member numbers are not integers, or `data` is not a TensorDict; there is no such
                member, or rows do not have one member each.
        """
        if not isinstance(data, TensorDictBase):
            raise ArgumentError("Routed replay writes require a TensorDict input.")
        rows = data.reshape(-1)
        if self.key is not None:
            members = self._find_members(rows)
        elif self.dim is not None:
            members = self._split_along_dim(data, count)
        else:
            raise StateError(
                "ReplayBufferEnsemble writes are disabled. Configure routing_key or routing_dim to enable "
                "routed writes.",
                hint="or write to a member: rb[0].extend(...)",
            )
        return rows, check_members(members, count)

    def _find_members(self, rows: TensorDictBase) -> torch.Tensor:
        key = self.key or ()
        members: torch.Tensor | None = rows.get(key if len(key) > 1 else key[0])
        if members is None:
            raise ArgumentError(f"the rows have no routing_key {key_name(key)!r}")
        if members.shape[:1] != rows.batch_size or members.numel() != rows.numel():
            raise ArgumentError(
                f"routing_key {key_name(key)!r} must contain one member id per record, got shape "
                f"{tuple(members.shape)} for batch size {tuple(rows.batch_size)}."
            )
        return members

    def _split_along_dim(self, data: TensorDictBase, count: int) -> torch.Tensor:
        if not data.ndim:
            raise ArgumentError("routing_dim requires batched input.")
        dim = (self.dim or 0) % data.ndim
        if data.shape[dim] != count:
            raise ArgumentError(
                f"routing_dim {self.dim} has size {data.shape[dim]}, expected {count} ensemble members."
            )
        shape = [1] * data.ndim
        shape[dim] = count
        return torch.arange(count).reshape(shape).expand(data.batch_size)


def check_members(members: torch.Tensor, count: int) -> IntArray:
    """Return numbers of members in one dim. Shape `(n,)`, int64.

    Args:
        members: The numbers.
        count: Number of members.

    Raises:
        ArgumentError: The numbers are not integers; there is no such member.
    """
    if members.dtype == torch.bool or members.is_floating_point():
        raise ArgumentError("ReplayBufferEnsemble member ids must be integers.")
    numbers: IntArray = members.reshape(-1).cpu().numpy().astype(np.int64)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ArgumentError(f"ReplayBufferEnsemble member ids must lie in [0, {count - 1}].")
    return numbers
