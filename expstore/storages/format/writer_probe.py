"""Another process's STATE page: whether its writer is alive, and which rows can be read.

Used by followers. It takes no lock, and trusts the page only if it belongs to this store and this boot.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from expstore.core import tuning
from expstore.core.values import IntArray
from expstore.disk.files import Disk
from expstore.disk.writer_lock import read_owner
from expstore.storages.format.control_page import PAGE, StatePage, StateView
from expstore.storages.format.paths import LOCK, STATE, VERSION


class Watch:
    """Read a store's STATE. Threads: any number.

    Args:
        disk: The disk on which files are accessed; it only reads.
        path: The store's folder.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._lock_path, self._path = disk, path / LOCK, path / STATE
        self._sealed = disk.exists(path / VERSION)  # a snapshot, which is never written to
        self._page = self._open()

    def _open(self) -> StatePage | None:
        if self._sealed or self._disk.size(self._path) < PAGE:
            return None
        return StatePage(self._disk, self._path, write=False)

    def look(self) -> StateView | None:
        """Return the values that readers need; None if there is no page, and so no writer."""
        page = self._page
        if page is None and not self._sealed:
            self._page = page = self._open()  # a writer may have opened the store since
        return None if page is None else page.look()

    def fits(self, uuid: str, generation: int) -> bool:
        """Return whether the page belongs to this store, and was written since the machine started."""
        page = self._page
        return page is not None and page.fits(bytes.fromhex(uuid), self._disk.boot_id(), generation)

    def writer_lives(self, *, unseen: bool = False) -> bool:
        """Return whether the process that claimed the page is still writing.

        Args:
            unseen: Whether the writer was running although its process could not be seen. Then its heartbeat
                decides.
        """
        page = self._page
        if page is None or page.sealed or page.get("inode") != page.inode:
            return False
        beat, owner = page.get("heartbeat"), read_owner(self._disk, self._lock_path)
        if not beat or owner is None or owner.stamp != page.get("since"):
            return False  # the writer has closed the store, or another process is still opening it
        lives = owner.lives(self._disk)
        if lives is None or unseen:
            return lives or time.monotonic_ns() - beat < tuning.HEARTBEAT_SECONDS * 1e9
        return lives

    @property
    def change(self) -> int:
        """Odd while rows are changed in place."""
        page = self._page
        return 0 if page is None else page.get("change")

    @property
    def last_change(self) -> int:
        """Number of the newest change in place that the columns have."""
        page = self._page
        return 0 if page is None else page.get("changed")

    def is_touched(self, slots: IntArray, before: int) -> bool:
        """Return whether any of these slots may have been changed in place.

        Args:
            slots: The slots. Shape `(n,)`.
            before: The value of `change` before the slots were read.
        """
        page = self._page
        after = self.change
        if page is None or (after == before and not before & 1):
            return False
        if after > (before & ~1) + 2:
            return True  # several changes: the page has the slots of only one
        low, high = page.get("change_low"), page.get("change_high")
        return self.change != after or bool(((slots >= low) & (slots <= high)).any())

    def find_changed(self, before: int) -> IntArray | None:
        """Return a run of slots that contains all slots changed since `change` had this even value.

        Shape `(n,)`; None: any slot may have been changed.
        """
        page, now = self._page, self.change & ~1
        if page is None or now != before + 2:
            return np.empty(0, np.int64) if now == before else None
        low, high = page.get("change_low"), page.get("change_high")
        return np.arange(low, high + 1) if self.change == now and high < 1 << 62 else None

    def close(self) -> None:
        """Close the page. Called when no thread reads it any more."""
        self._page, self._sealed = None, True
