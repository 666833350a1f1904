"""Rows of tensors in RAM, under the names and with the arguments of TorchRL.

What users of TorchRL hold; all but the arguments is `MemoryStorage`. It never touches a file.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from expstore.storages.memory import MemoryStorage
from expstore.storages.torchrl_options import find_device, find_seed, refuse

if TYPE_CHECKING:
    import torch

__all__ = ["LazyTensorStorage", "TensorStorage"]


class TensorStorage(MemoryStorage):
    """Keep a copy of rows that are there already, and as many later ones.

    Threads: one writes at a time, any number read. Processes: a forked child has its own copy. Crashes:
    nothing survives the process.

    Args:
        storage: The rows: a TensorDict, a tensorclass, a tensor, or a tree of tensors; its first dim, or its
            first `ndim` dims, are rows. They are copied: later changes of it do not reach the storage.
        max_size: How long the first dim is, if it is to be checked.
        device: Where rows are handed out; they lie in host memory. "auto": there.
        ndim: How many dims are rows, time being the first; see `Storage`.
        compilable: Only False: torch.compile does not look into a storage.
        seed: Key of all draws; None: a number from torch's generator, so that `torch.manual_seed` decides.

    Raises:
        ValueError: There are no rows, or not `max_size`; or an argument has no meaning here.
        SchemaError: Rows of this kind cannot be kept.

    Example:
        >>> storage = TensorStorage(TensorDict({"a": torch.arange(3)}, [3]))
        >>> storage.get(1)["a"]
        tensor(1)
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        seed: int | None = None,
    ) -> None:
        from expstore.storages.indexing import append, rows_along

        refuse(compilable=compilable)
        if storage is None:
            raise ValueError("Expected storage to be non-null.")
        shape = rows_along(storage, ndim)
        if max_size is not None and max_size != shape[0]:
            raise ValueError(
                "The max-size and the storage shape mismatch: got "
                f"max_size={max_size} for a storage of shape {shape}."
            )
        super().__init__(math.prod(shape), seed=find_seed(seed), ndim=ndim)
        self.device = find_device(device)
        append(self, storage)


class LazyTensorStorage(TensorStorage):
    """Keep rows of tensors in RAM: their fields are fixed by the first ones.

    Threads: one writes at a time, any number read. Processes: a forked child has its own copy. Crashes:
    nothing survives the process; `expstore.open` makes a store that does.

    Args:
        max_size: Most readable rows.
        device: Where rows are handed out; they lie in host memory. "auto": there.
        ndim: How many dims of a batch are rows, time being the first; see `Storage`.
        compilable: Only False: torch.compile does not look into a storage.
        consolidated: Only False: every field lies in one array already.
        shared_init: Only False: one process writes to a storage.
        cleanup_memmap: Only True: it speaks of `shared_init`.
        seed: Key of all draws; None: a number from torch's generator, so that `torch.manual_seed` decides.

    Raises:
        ValueError: An argument is out of range, or has no meaning here.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        seed: int | None = None,
    ) -> None:
        refuse(
            compilable=compilable,
            consolidated=consolidated,
            shared_init=shared_init,
            cleanup_memmap=not cleanup_memmap,
        )
        # Not as rows that are there: these come later.
        MemoryStorage.__init__(self, operator.index(max_size), seed=find_seed(seed), ndim=ndim)
        self.device = find_device(device)
