"""TorchRL's `LazyMemmapStorage`: rows in a folder that need not outlive the process.

For users of TorchRL whose rows do not fit into RAM. It is a `ZarrStorage` that can remove its folder. A
folder that was passed in is removed only on request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expstore.core.arguments import check_whole
from expstore.core.torchrl_keywords import MEMMAP_STORAGE, check_keywords
from expstore.disk.files import Disk, File
from expstore.disk.local_path import local_path
from expstore.disk.threads import Threads
from expstore.errors import ArgumentError, ExpStoreError, StateError, StorageError
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.snapshots.portable_storage import PortableStorage
from expstore.storages.torchrl_options import find_device, find_seed

if TYPE_CHECKING:
    import torch

#: Maximum number of attempts to remove a folder in which another thread may be creating files.
_TRIES = 100


def _build_not_empty_error(folder: str) -> StateError:
    return StateError(
        f"{folder} holds rows already",
        hint="existsok=True continues with them, and loads() or empty() then replaces them",
    )


class _ScratchDisk(Disk):
    """A disk that never syncs: its files are removed with the process."""

    def sync_all(self, files: Iterable[File], folders: Iterable[Path], pool: Threads | None) -> None:
        """Do nothing."""

    def sync_dir(self, path: Path) -> None:
        """Do nothing."""


class LazyMemmapStorage(ZarrStorage, PortableStorage):
    """Store rows of tensors in files, which are memory-mapped when they are read.

    If the first rows have other values, such as texts, these fields are stored in Arrow files, as by
    `expstore.open(layout="arrow")`; they cannot be changed in place.

    With a `scratch_dir` it is an ordinary store, which `expstore.open` can also open. Without one it uses its
    own folder in the system's folder for temporary files, in which nothing is synced, and which is removed
    with the storage.

    Crashes: a store in a `scratch_dir` behaves as `ZarrStorage`; a temporary folder remains only after a
    kill. Threads: one writes at a time, any number read. Processes: one writer; copies of a buffer in other
    processes write through it, as if the buffer was shared. The folder is only ever removed by the process
    that opened it.

    Args:
        max_size: Most readable rows.
        scratch_dir: The folder; None: a temporary one.
        device: Only the CPU: files are mapped into host memory.
        ndim: How many dims of a batch are rows; the first is time; see `Storage`.
        existsok: Whether to continue with the rows of an existing store, which `loads` or `empty` then
            replaces. If False, a folder that contains rows raises StateError.
        auto_cleanup: Remove the folder when the storage is closed or garbage-collected, or the process ends;
            None: only a temporary folder.
        seed: Key of all draws of a new store; None: a number from torch's generator, so that
            `torch.manual_seed` decides.
        torchrl: Keywords of TorchRL's class that have no effect here. They are accepted at their defaults;
            other values raise an error that gives the reason.

    Raises:
        StateError: The folder has a store with other settings; or one with rows, or one that `auto_cleanup`
            would remove, and `existsok` is False.
        LockedError: Another process has the store open.
        ArgumentError: An argument is out of range, or not supported.

    Example:
        >>> from expstore import LazyMemmapStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(1_000_000), batch_size=32)
    """

    _warns_if_forgotten = False  # programs written for TorchRL never close a storage

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | Path | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        seed: int | None = None,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, MEMMAP_STORAGE)
        max_size = check_whole("max_size", max_size)
        if device is not None and str(device).partition(":")[0] not in ("auto", "cpu"):
            raise ArgumentError(
                "Memory map device other than CPU isn't supported: rows are in files; pass the device on "
                "which batches are returned to the buffer instead"
            )
        self.device = find_device(device)
        self._owner = os.getpid()
        self._removes = scratch_dir is None if auto_cleanup is None else auto_cleanup
        self._removed = True  # until there is something to remove
        folder = None if scratch_dir is None else local_path(scratch_dir)
        disk = _ScratchDisk() if folder is None else Disk()
        known = folder is not None and disk.exists(folder / MANIFEST)
        if folder and known and not existsok and (auto_cleanup or Manifest.load(disk, folder).schema):
            raise _build_not_empty_error(str(folder))
        if folder and known and (stored := Manifest.load(disk, folder).geometry.capacity) != max_size:
            raise StateError(
                f"{folder} was made with max_size={stored}, opened with max_size={max_size}",
                hint=f"pass max_size={stored}, or run `expstore resize {folder} --capacity {max_size}` first",
            )
        if folder and known:
            settings = Settings(storage=Manifest.load(disk, folder).storage)
        else:
            settings = Settings(seed=find_seed(seed))
        path = disk.make_temp_dir("expstore-") if folder is None else folder
        try:
            super().__init__(path, max_size, settings=settings, ndim=ndim, disk=disk)
        except BaseException:
            if scratch_dir is None:
                disk.remove_tree(path)
            raise
        self._removed = False
        if self.schema is None:
            self.row_traits = replace(self.row_traits, undecided=True)

    @property
    def scratch_dir(self) -> str:
        """The folder."""
        return str(self.path)

    def cleanup(self) -> bool:
        """Close the storage and remove its folder, even if the folder was passed in.

        Returns:
            Whether rows were removed: False for a second call, in a forked child, or if there were no rows.

        Raises:
            StorageError: The folder cannot be removed.
        """
        if self._removed or os.getpid() != self._owner:
            return False
        self._removed = True
        found = self.schema is not None and self.disk.exists(self.path)
        with contextlib.suppress(ExpStoreError):  # rows that cannot be synced are removed anyway
            super().close()
        self.disk.remove_tree(self.path)
        return found

    def close(self) -> None:
        """Sync and close the storage, and remove the folder if so set; a second call does nothing."""
        if self._removes:
            self.cleanup()
        else:
            super().close()

    def _leave(self) -> None:
        """Close a storage that is still open when the process ends."""
        if self._removes:
            self.cleanup()
        else:
            super()._leave()

    def _depart(self) -> None:
        """Flush or remove files before the process dies of a signal, while other threads still run."""
        if not self._removes or os.getpid() != self._owner:
            super()._depart()
            return
        for _ in range(_TRIES):
            with contextlib.suppress(StorageError):
                self.disk.remove_tree(self.path)
                return
