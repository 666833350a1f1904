"""Rows that are any Python objects, with TorchRL's class names and arguments.

For rows of different shapes, text or objects of the user's own types. Rows are kept in RAM by reference: they
are neither inspected nor copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from expstore.core.arguments import check_whole
from expstore.core.torchrl_keywords import OBJECT_STORAGE, check_keywords
from expstore.storages.memory import MemoryStorage
from expstore.storages.torchrl_options import find_device, find_seed

if TYPE_CHECKING:
    import torch


class ListStorage(MemoryStorage):
    """Store objects of any kind in RAM, one per row.

    Threads: one writes at a time, any number read. Processes: a forked child has its own copy. Crashes:
    nothing survives the process, and no snapshots of such a storage can be made, because objects cannot be
    written to files. SQL shows text and values that JSON supports, in the column `_data`.

    Args:
        max_size: Most readable rows; None: unbounded.
        device: The device on which rows are returned, if they can be moved; None: where they are.
        seed: Key of all draws; None: a number from torch's generator, so that `torch.manual_seed` decides.
        torchrl: Keywords of TorchRL's class that have no effect here. They are accepted at their defaults;
            other values raise an error that gives the reason.

    Raises:
        ArgumentError: An argument is out of range, or not supported.
        StateError: torch cannot use the device.

    Example:
        >>> from expstore import ListStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=ListStorage(100), collate_fn=list, batch_size=2)
        >>> rb.extend(["a", "longer text", {"any": "thing"}])
    """

    row_traits = replace(MemoryStorage.row_traits, whole=True)

    def __init__(
        self,
        max_size: int | None = None,
        *,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, OBJECT_STORAGE)
        super().__init__(
            None if max_size is None else check_whole("max_size", max_size), seed=find_seed(seed)
        )
        self.device = find_device(device)


class LazyStackStorage(ListStorage):
    """Store TensorDicts of any shapes in RAM; several rows are returned as a lazy stack.

    Threads, processes and crashes as `ListStorage`.

    Args:
        max_size: Most readable rows; None: unbounded.
        stack_dim: The dim of a stack along which rows are stacked; negative: counted from the end.
        device: The device on which rows are returned; None: where they are.
        seed: Key of all draws; None: a number from torch's generator, so that `torch.manual_seed` decides.
        torchrl: Keywords of TorchRL's class that have no effect here. They are accepted at their defaults;
            other values raise an error that gives the reason.

    Raises:
        ArgumentError: An argument is out of range, or not supported.
        StateError: torch cannot use the device.

    Example:
        >>> from expstore import LazyStackStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(100), batch_size=2)
        >>> rb.add(TensorDict({"tokens": torch.arange(3)}))
        >>> rb.add(TensorDict({"tokens": torch.arange(5)}))
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **torchrl: Any,
    ) -> None:
        super().__init__(max_size, device=device, seed=seed, **torchrl)
        self.row_traits = replace(
            self.row_traits, stack_dim=check_whole("stack_dim", stack_dim, hint="use 0, 1 or -1")
        )
