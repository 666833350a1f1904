"""Change several files and folders of a store at once: completely or not at all.

Used where fields are added or dropped, a snapshot is restored, and the capacity changes. The caller builds
the new entries in `swap.tmp`, with the paths that they will have in the store, and syncs them. Then:

1. `swap.tmp` is renamed to `swap`. Entries that the store does not have are moved to their places: nothing
   refers to them yet.
2. expstore.json is moved to its place. This commits the change.
3. Other entries take the places of the store's own, and removed ones are moved to `swap/old`. `swap` is
   renamed back and removed.

`Swap.commit` takes the first two steps, `finish_swap` the third. Every opening for writing calls
`finish_swap`, which completes a change after its commit, and undoes it before its commit. Readers find the
former state before the commit; after it `current_path` tells where an entry is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import google_crc32c

from expstore.core.parsing import INVALID
from expstore.disk.files import Disk
from expstore.errors import CorruptionError
from expstore.storages.format.manifest import MANIFEST

SWAP, TEMPORARY = "swap", "swap.tmp"
#: Names in that folder that are no entries of the store: the list of the entries; what they have replaced.
_LIST, _OLD = "list", "old"


@dataclass(frozen=True, slots=True)
class Swap:
    """A list of the entries that a change concerns, besides expstore.json. Paths are relative to the store.

    Args:
        added: Entries that the store does not have.
        replaced: Entries that take the place of the store's own. The change may lack some of them, and the
            store, too.
        removed: Entries that the store does not have afterwards.
    """

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def save(self, disk: Disk, store: Path) -> Path:
        """Write the list to `swap.tmp`; return its path, which the caller syncs with the entries."""
        path, data = store / TEMPORARY / _LIST, json.dumps(asdict(self), sort_keys=True)
        disk.put(path, json.dumps({"swap": asdict(self), "crc32c": _checksum(data)}).encode())
        return path

    @classmethod
    def load(cls, disk: Disk, store: Path) -> Swap:
        """Read the list of a change that has begun.

        Raises:
            CorruptionError: The list is damaged.
        """
        path = store / SWAP / _LIST
        try:
            found = json.loads(disk.read_whole(path))
            data = found["swap"]
            if _checksum(json.dumps(data, sort_keys=True)) != found["crc32c"]:
                raise CorruptionError(f"{path} is damaged: its checksum does not match")
            for name in itertools.chain(*data.values()):
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise CorruptionError(f"{path} is damaged: {name!r} is not in the store")
            return cls(**{kind: tuple(names) for kind, names in data.items()})
        except INVALID as exc:
            raise CorruptionError(f"{path} is damaged: {exc}") from exc

    def commit(self, disk: Disk, store: Path) -> None:
        """Begin the change and commit it; the caller then calls `finish_swap`.

        Raises:
            StorageError: The disk failed. The store must be opened again, which finishes the change or
                undoes it.
        """
        swap = store / SWAP
        _move(disk, [(store / TEMPORARY, swap)])
        _move(disk, [(swap / name, store / name) for name in self.added])
        _move(disk, [(swap / MANIFEST, store / MANIFEST)])


def finish_swap(disk: Disk, store: Path) -> Swap | None:
    """Finish a change that was committed, or undo one that was not; the caller holds the writer's lock.

    May be repeated after a crash.

    Returns:
        The change that was finished; None: there was none, or it was undone.

    Raises:
        CorruptionError: The list of entries is damaged.
    """
    swap, old, temporary = store / SWAP, store / SWAP / _OLD, store / TEMPORARY
    if not disk.exists(swap):
        disk.remove_tree(temporary)
        return None
    change, committed = Swap.load(disk, store), not disk.exists(swap / MANIFEST)
    if committed:
        left = [name for name in change.replaced if disk.exists(swap / name)]
        # A folder cannot be replaced by a rename: the old one is moved away first.
        _move(disk, [(store / name, old / name) for name in left if disk.is_dir(store / name)])
        _move(disk, [(swap / name, store / name) for name in left])
    away = change.removed if committed else change.added
    _move(disk, [(store / name, old / name) for name in away if disk.exists(store / name)])
    _move(disk, [(swap, temporary)])
    disk.remove_tree(temporary)
    return change if committed else None


def _move(disk: Disk, names: Sequence[tuple[Path, Path]]) -> None:
    """Rename entries, from the first path to the second one, and sync the folders of both."""
    for former, new in names:
        disk.make_dir(new.parent)
        disk.rename(former, new)
    for folder in sorted({path.parent for pair in names for path in pair}):
        disk.sync_dir(folder)


def is_half_replaced(disk: Disk, store: Path, name: str) -> bool:
    """Return whether an entry belongs to a change that was committed and is not finished."""
    swap = store / SWAP
    return not disk.exists(swap / MANIFEST) and (disk.exists(swap / name) or disk.exists(swap / _OLD / name))


def current_path(disk: Disk, store: Path, name: str) -> Path:
    """Return the path of an entry that a change replaces, also while the change is not finished."""
    swap = store / SWAP
    return swap / name if disk.exists(swap / name) and not disk.exists(swap / MANIFEST) else store / name


def _checksum(text: str) -> int:
    return int(google_crc32c.value(text.encode()))
