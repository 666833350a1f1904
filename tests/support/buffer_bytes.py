"""All rows of a buffer as bytes, for tests of exports, imports and other copies of rows."""

from __future__ import annotations

from typing import Any

import torch

from expstore.core.values import Key


def held(rb: Any, order: str = "_id") -> dict[Key, bytes]:
    """Return all rows as bytes, with dtype and shape, by field; ordered by these SQL columns."""
    ids = rb.sql(f"SELECT _id FROM transitions ORDER BY {order}").df()["_id"].to_numpy()
    whole = rb[rb.storage.geometry.index_of(ids)]
    found = {}
    for key in rb.schema.keys:
        values = whole[key]
        bits = values.view(torch.uint16) if values.dtype is torch.bfloat16 else values
        found[key] = f"{values.dtype}{list(values.shape)}".encode() + bits.numpy().tobytes()
    return found
