"""Storages whose rows go with the process, and into `state_dict`.

Base of those in RAM, and of those in a folder for one run. What a content looks like is in
`expstore.storages.snapshots.state_dict`; this never touches a file.
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
from expstore.storages.snapshots.content_access import ContentAccess
from expstore.storages.snapshots.create import dump as make_snapshot
from expstore.storages.snapshots.state_dict import changed_by, content_of, hook_rows, read_state

__all__ = ["PortableStorage"]


class PortableStorage(Storage):
    """Carry the whole content in a state.

    Threads: others go on reading and adding rows meanwhile. Processes and crashes: as the storage.

    Example:
        >>> state = storage.state_dict()
        >>> other = MemoryStorage(storage.capacity)
        >>> other.load_state_dict(state)
    """

    _save_hooks: tuple[Hook, ...] = ()
    _load_hooks: tuple[Hook, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole content as tensors and plain values, which torch.save can keep.

        Rows, ids, priorities, counts, episodes and the number of the next draw; nothing of it is shared with
        the storage. Objects are copied; torch.save can keep them if pickle can.

        Returns:
            `rows`: field name -> a tensor of all rows, oldest first (objects: a list), with ids, episodes,
            steps, times and priorities under `_row.`; the rest is for `load_state_dict`.

        Raises:
            StateError: The storage is closed.
        """
        return content_of(self, self._save_hooks)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put a content that `state_dict` returned in the place of what there is.

        All of it or nothing. As after `loads`, the capacity stays, ids and episode ids go on above those of
        both (where there never were rows they stay), and the next batches are those that would have come.
        Nothing is shared with the state.

        Raises:
            StateError: The state holds no rows, or the storage is closed.
            SchemaError: This storage has other fields, or that is no such state.
            CorruptionError: What the state says of the storage is damaged.
        """
        self.writer()
        self.snapshots.adopt(read_state(state_dict, self._load_hooks))
        self.holders.tell(self)

    def register_save_hook(self, hook: Hook) -> None:
        """Have `state_dict` keep what a hook returns for the rows it is given; hooks run in their order.

        `dumps` shows them the rows, too, but keeps these as they are: a hook that returns others stops it.

        Args:
            hook: Takes field name -> rows. Its attributes `shift` and `is_full`, if it has any, are told the
                index of the next row, and whether the storage is full.
        """
        self._save_hooks = (*self._save_hooks, hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Have `load_state_dict` and `loads` take what a hook returns for what was kept, in their order.

        Args:
            hook: Takes field name -> rows, and returns the same.
        """
        self._load_hooks = (*self._load_hooks, hook)

    @property
    @abstractmethod
    def snapshots(self) -> ContentAccess:
        """What gives the content to snapshots, and replaces it."""

    def _check_hooks(self) -> None:
        if self._save_hooks and changed_by(self, self._save_hooks):
            raise SnapshotError(
                "a save hook has changed the rows, and versions hold them as they are",
                hint="state_dict() keeps what hooks return",
            )

    def _hook_content(self, content: Any) -> Any:
        return hook_rows(content, self._load_hooks) if self._load_hooks else content

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Make a snapshot of the content as it is now, in `path`/vNNNN; see `ReplayBuffer.dumps`.

        Args:
            path: A folder for snapshots; made if it is missing.
            keep: How many snapshots remain.

        Raises:
            SnapshotError: The folder holds something else, or rows are objects, for which files have no form.
            StateError: The storage is closed.
            StorageError: The disk failed or is full; snapshots that were there are as they were.

        Example:
            >>> storage.dumps("backup")
            >>> MemoryStorage(1000).loads("backup")
        """
        return make_snapshot(self, path, keep=keep)

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Put a snapshot's content in the place of this one; see `ReplayBuffer.loads`.

        Args:
            path: What `dumps` was given.
            version: Number or tag; None: the newest.

        Raises:
            SnapshotError: There is no such snapshot.
            SchemaError: This storage has other fields.
            CorruptionError: The snapshot is damaged.
            StateError: The storage is closed.
        """
        self.snapshots.restore(find_version(self.disk, local_path(path), version))
        self.holders.tell(self)

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Do as `dumps`."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Do as `dumps`."""
        return self.dumps(path, keep=keep)

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Do as `loads`."""
        self.loads(path, version)
