"""Storages whose rows are lost with the process, but can be saved by `state_dict`.

Base class of the storages in RAM, and of those in a folder for one run.
`expstore.storages.snapshots.state_dict` defines the format of the state. This module uses no files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expstore.disk.local_path import local_path
from expstore.errors import SnapshotError
from expstore.storages.base import Hook, Storage
from expstore.storages.snapshots.catalog import Version, find_version
from expstore.storages.snapshots.create import dump as make_snapshot
from expstore.storages.snapshots.restore import ContentAccess
from expstore.storages.snapshots.state_dict import call_hooks, check_hook, content_of, hook_rows, read_state


class PortableStorage(Storage):
    """Save and restore the whole content as a `state_dict`.

    Threads: other threads can read and add rows meanwhile. Processes and crashes: as the storage.

    Example:
        >>> from expstore import MemoryStorage
        >>> storage, other = MemoryStorage(1000), MemoryStorage(1000)
        >>> other.load_state_dict(storage.state_dict())
    """

    _save_hooks: tuple[Hook, ...] = ()
    _load_hooks: tuple[Hook, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole content as tensors and plain values, which torch.save can store.

        The state has rows, ids, priorities, counts, episodes and the number of the next draw. It shares no
        memory with the storage. Objects are copied, and their tensors detached; torch.save can store them if
        pickle can.

        Returns:
            `rows`: field name -> a tensor of all rows, oldest first (objects: a list), with ids, episodes,
            steps, times and priorities under `_row.`; the other entries are for `load_state_dict`.

        Raises:
            StateError: The storage is closed.
        """
        return content_of(self, self._save_hooks)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the content by one that `state_dict` returned, completely or not at all.

        As after `loads`, the capacity is kept. Ids and episode ids continue above those of the storage and
        the state; in a storage that never had rows they are not changed. The next batches are those that
        would have followed in the saved storage. No memory is shared with the state.

        Raises:
            StateError: The state has no rows, or the storage is closed.
            SchemaError: This storage has other fields, or the argument is not such a state.
            CorruptionError: The state's description of the storage is damaged.
        """
        self.writer()
        self.snapshots.adopt(read_state(state_dict, self._load_hooks))
        self.holders.tell(self)

    def register_save_hook(self, hook: Hook) -> None:
        """Add a hook whose result `state_dict` stores instead of the rows; hooks run in order.

        `dumps` calls the hooks, too, but stores the rows unchanged: it raises if a hook returns other rows.

        Args:
            hook: Takes and returns field name -> rows. If it has attributes `shift` and `is_full`, they are
                set to the index of the next row, and to whether the storage is full.

        Raises:
            ArgumentError: It is one of TorchRL's hooks for its own files, such as `TED2Flat`.
        """
        check_hook(hook)
        self._save_hooks = (*self._save_hooks, hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Add a hook whose result `load_state_dict` and `loads` use instead of the stored rows.

        Hooks run in the order in which they were added.

        Args:
            hook: Takes and returns field name -> rows.

        Raises:
            ArgumentError: It is one of TorchRL's hooks for its own files, such as `Flat2TED`.
        """
        check_hook(hook)
        self._load_hooks = (*self._load_hooks, hook)

    @property
    @abstractmethod
    def snapshots(self) -> ContentAccess:
        """Access to the content for snapshots, which read and replace it."""

    def _check_hooks(self) -> None:
        if self._save_hooks and call_hooks(self, self._save_hooks):
            raise SnapshotError(
                "a save hook has changed the rows, but snapshots store them unchanged",
                hint="state_dict() stores what hooks return",
            )

    def _hook_content(self, content: Any) -> Any:
        return hook_rows(content, self._load_hooks) if self._load_hooks else content

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot of the current content in `path`/vNNNN; see `ReplayBuffer.dumps`.

        Args:
            path: A folder for snapshots; created if it is missing.
            keep: How many snapshots remain.

        Raises:
            SnapshotError: The folder has other content, or rows are objects, which snapshots cannot store.
            StateError: The storage is closed.
            StorageError: The disk failed or is full; existing snapshots are unchanged.

        Example:
            >>> from expstore import MemoryStorage
            >>> storage.dumps("backup")
            >>> MemoryStorage(1000).loads("backup")
        """
        return make_snapshot(self, path, keep=keep)

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Replace the content by that of a snapshot; see `ReplayBuffer.loads`.

        Args:
            path: The folder that was passed to `dumps`.
            version: Number or tag of the snapshot; None: the newest.

        Raises:
            SnapshotError: There is no such snapshot.
            SchemaError: This storage has other fields.
            CorruptionError: The snapshot is damaged.
            StateError: The storage is closed.
        """
        self.snapshots.restore(find_version(self.disk, local_path(path), version))
        self.holders.tell(self)

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot: an alias of `dumps`."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot: an alias of `dumps`."""
        return self.dumps(path, keep=keep)

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Restore a snapshot: an alias of `loads`."""
        self.loads(path, version)
