"""Rows of tensors in RAM, under the names and with the arguments of TorchRL.

What users of TorchRL hold; all but the arguments is `MemoryStorage`. It never touches a file.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from expstore.storages.memory import MemoryStorage
from expstore.storages.options import find_device, find_seed, refuse

if TYPE_CHECKING:
    import torch

__all__ = ["LazyTensorStorage"]


class LazyTensorStorage(MemoryStorage):
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
        super().__init__(operator.index(max_size), seed=find_seed(seed), ndim=ndim)
        self.device = find_device(device)
