"""The objects that a writer consists of, which the services over a store share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from expstore.core.lock_order import LockOrder
from expstore.disk.files import Disk
from expstore.disk.threads import Threads
from expstore.disk.writer_lock import WriterLock
from expstore.storages.engine.background_checkpoints import Keeper, Settled
from expstore.storages.engine.checkpointer import Checkpointer
from expstore.storages.engine.disk_space import DiskSpace
from expstore.storages.engine.health import Health
from expstore.storages.engine.shared_state import SharedState

__all__ = ["EngineParts", "Writer"]


class Writer(Settled, Protocol):
    """What the parts need of the store that they belong to."""

    path: Path
    disk: Disk
    lock_order: LockOrder


@dataclass(frozen=True, eq=False)
class EngineParts:
    """The parts of a writer that stay the same from its first opening to its end.

    Args:
        lock_file: Held by this process, and by no other.
        pool: Threads that sync files.
        health: What failures have left.
        space: The free space of the disk.
        shared: The control page STATE.
        checkpointer: Brings everything to the disk.
        background: Runs checkpoints a while after writes.
    """

    lock_file: WriterLock
    pool: Threads
    health: Health
    space: DiskSpace
    shared: SharedState
    checkpointer: Checkpointer
    background: Keeper

    @classmethod
    def of(cls, store: Writer, lock_file: WriterLock, *, min_free_bytes: int) -> EngineParts:
        """Make the parts of a writer.

        Args:
            store: Whose they are.
            lock_file: Is held; it is released if this fails.
            min_free_bytes: So much of the disk stays free.

        Raises:
            StorageError: STATE could not be opened.
        """
        disk, path = store.disk, store.path
        health = Health(path)
        pool = Threads(8, "expstore-sync")
        try:
            shared = SharedState(disk, path, lock_file)
        except BaseException:
            lock_file.release()
            pool.shutdown()
            raise
        return cls(
            lock_file=lock_file,
            pool=pool,
            health=health,
            space=DiskSpace(disk, path, min_free_bytes),
            shared=shared,
            checkpointer=Checkpointer(store.lock_order, health, disk, pool),
            background=Keeper(store),
        )
