"""Build batches from a model's rows, and compare batches with them.

Used by the suite. Every value of a row follows from its serial number and its version, so that any read can
be checked bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from expstore.core.values import Array
from expstore.testing.assertions import same
from expstore.testing.model import Row

#: The fields that a patch changes.
CHANGEABLE = ("value", "pixels")
_WIDTH = 48


def columns_of(rows: Sequence[Row], *, trajectories: bool = True) -> dict[tuple[str, ...], Array]:
    """Return the fields of rows. Shapes `(n, *row shape)`."""
    serial = np.array([row.serial for row in rows], np.int64)
    mixed = serial * 1000 + np.array([row.version for row in rows], np.int64)
    marks = [row.cell.mark for row in rows]
    fields: dict[tuple[str, ...], Array] = {
        ("number",): serial,
        ("value",): mixed.astype(np.float64) / 8,
        ("pixels",): ((mixed[:, None] * 31 + np.arange(_WIDTH)) % 251).astype(np.uint8),
        ("observation",): (serial[:, None] + np.arange(3) / 8).astype(np.float32),
        # No row's observation equals another row's next observation: episodes follow from trajectory ids
        # alone.
        ("next", "observation"): (serial[:, None] + 1 / 16 + np.arange(3) / 8).astype(np.float32),
        ("next", "reward"): (serial[:, None] % 17 / 4).astype(np.float32),
        ("next", "terminated"): np.array([mark == "t" for mark in marks], bool).reshape(-1, 1),
        ("next", "truncated"): np.array([mark == "T" for mark in marks], bool).reshape(-1, 1),
    }
    if trajectories:
        fields["collector", "traj_ids"] = np.array([row.cell.trajectory for row in rows], np.int64)
    return fields


def make_batch(rows: Sequence[Row], *, lanes: int = 1, trajectories: bool = True) -> TensorDict:
    """Return rows as a batch of shape `[T]`, or `[B, T]` with several lanes.

    Args:
        rows: The rows, in the order of their ids.
        lanes: Number of rows per time step.
        trajectories: Whether the batch has trajectory ids.
    """
    shape = [len(rows)] if lanes == 1 else [lanes, len(rows) // lanes]
    batch = TensorDict({}, shape)
    for key, column in columns_of(rows, trajectories=trajectories).items():
        values = torch.from_numpy(np.ascontiguousarray(column))
        if lanes > 1:
            values = values.reshape(shape[1], lanes, *values.shape[1:]).swapaxes(0, 1).contiguous()
        batch[key] = values
    return batch


def patch_of(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return the changeable fields of rows. Shapes `(n, *row shape)`."""
    columns = columns_of(rows)
    return {name: torch.from_numpy(columns[name,]) for name in CHANGEABLE}


def check_rows(batch: Any, rows: Sequence[Row], what: str, *, trajectories: bool = True) -> None:
    """Raise AssertionError unless a batch consists of exactly these rows in this order, bit by bit.

    Args:
        batch: The batch; its dims index rows.
        rows: The expected rows.
        what: How the batch was read, for messages.
        trajectories: Whether the batch has trajectory ids.
    """
    flat = batch.reshape(-1)
    same(flat["number"].tolist(), [row.serial for row in rows], f"{what}: which rows")
    for key, column in columns_of(rows, trajectories=trajectories).items():
        same(flat[key].contiguous(), torch.from_numpy(np.ascontiguousarray(column)), f"{what}: {key}")
