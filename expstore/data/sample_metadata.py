"""Metadata that every sample of a store has, stored in the store's `meta`.

Used by buffers, and by `preprocess` of data sets. JSON has no tensors, so a tensor is stored as nested lists
with the name of its dtype, and with its shape if the lists do not say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from expstore.data.leaves import as_tensor, check_unmasked
from expstore.errors import ArgumentError

#: The key of `meta` that has the metadata.
SAMPLE_METADATA = "sample_metadata"
_DTYPE, _SHAPE = "__tensor__", "shape"


def encode_metadata(metadata: Any) -> Any:
    """Convert metadata to values for JSON.

    Raises:
        ArgumentError: A value is not a number, text, list, mapping with texts as keys, array or tensor.

    Example:
        >>> from expstore.data.sample_metadata import encode_metadata
        >>> encode_metadata({"id": "Pong/1", "count": torch.tensor([5])})
        {'id': 'Pong/1', 'count': {'__tensor__': 'int64', 'values': [5]}}
    """
    if isinstance(metadata, torch.Tensor):
        # JSON has no complex numbers.
        values = torch.view_as_real(metadata.resolve_conj()) if metadata.is_complex() else metadata
        kept = {_DTYPE: str(metadata.dtype).removeprefix("torch."), "values": values.tolist()}
        return kept if metadata.numel() else kept | {_SHAPE: list(metadata.shape)}
    if isinstance(metadata, np.ndarray | np.generic) and metadata.dtype.kind in "biufc":
        check_unmasked((), metadata)
        return encode_metadata(as_tensor(metadata))
    if isinstance(metadata, Mapping):
        if _DTYPE in metadata:
            raise ArgumentError(f"metadata cannot have the key {_DTYPE!r}, which marks tensors")
        if any(not isinstance(key, str) for key in metadata):
            raise ArgumentError(f"the keys of metadata must be texts, got {list(metadata)}")
        return {key: encode_metadata(value) for key, value in metadata.items()}
    if isinstance(metadata, list | tuple):
        return [encode_metadata(value) for value in metadata]
    if metadata is None or isinstance(metadata, bool | int | float | str):
        return metadata
    raise ArgumentError(f"metadata cannot contain a {type(metadata).__name__}")


def decode_metadata(kept: Any) -> Any:
    """Convert the result of `encode_metadata` back to metadata."""
    if isinstance(kept, Mapping):
        if _DTYPE in kept:
            dtype: torch.dtype = getattr(torch, str(kept[_DTYPE]))
            if dtype.is_complex and _SHAPE not in kept:
                real = torch.tensor(kept["values"], dtype=dtype.to_real())
                return torch.view_as_complex(real)
            values = torch.tensor(kept["values"], dtype=dtype)
            return values.reshape(kept[_SHAPE]) if _SHAPE in kept else values
        return {key: decode_metadata(value) for key, value in kept.items()}
    return [decode_metadata(value) for value in kept] if isinstance(kept, list) else kept
