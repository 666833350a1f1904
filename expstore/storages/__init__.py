"""Where rows are kept: in RAM, in Zarr columns and Arrow segments on disk, also under TorchRL's names.

Buffers take one of these; the classes load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expstore.storages.arrow import ArrowStorage
    from expstore.storages.base import Storage
    from expstore.storages.ensemble import StorageEnsemble
    from expstore.storages.follower import FollowerStorage
    from expstore.storages.memory import MemoryStorage
    from expstore.storages.torchrl_memmap import LazyMemmapStorage
    from expstore.storages.torchrl_objects import LazyStackStorage, ListStorage
    from expstore.storages.torchrl_tensors import LazyTensorStorage, TensorStorage
    from expstore.storages.zarr import ZarrStorage

__all__ = [
    "ArrowStorage",
    "FollowerStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MemoryStorage",
    "Storage",
    "StorageEnsemble",
    "TensorStorage",
    "ZarrStorage",
]

_HOME = {
    "ArrowStorage": "arrow",
    "FollowerStorage": "follower",
    "LazyMemmapStorage": "torchrl_memmap",
    "LazyStackStorage": "torchrl_objects",
    "LazyTensorStorage": "torchrl_tensors",
    "ListStorage": "torchrl_objects",
    "MemoryStorage": "memory",
    "Storage": "base",
    "StorageEnsemble": "ensemble",
    "TensorStorage": "torchrl_tensors",
    "ZarrStorage": "zarr",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'expstore.storages' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"expstore.storages.{_HOME[name]}"), name)
    globals()[name] = value
    return value
