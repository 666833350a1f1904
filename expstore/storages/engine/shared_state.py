"""What a writer shows other processes while it runs: the words of STATE.

Base of the storages that write. The words are plain stores into a mapped page; what they mean to readers
is in `expstore.storages.follower` and in ARCHITECTURE.md. It never touches rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from expstore.core.values import IntArray
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.storages.folder import FolderStorage
from expstore.storages.format.control_page import StatePage
from expstore.storages.format.journal import Kind, read_journal
from expstore.storages.format.paths import JOURNAL, STATE

__all__ = ["ShownStorage"]

_logger = logging.getLogger("expstore")
_ALL_SLOTS = (0, 1 << 62)


class ShownStorage(FolderStorage):
    """Keep STATE current.

    Crashes: the page survives the process, and is not believed after a restart of the machine. Threads:
    each word is set by one at a time.
    """

    _state: StatePage
    _lock_file: WriterLock
    _boot: bytes

    def _claim_state(self, sequence: int) -> None:
        """Start the page anew, when all that an opening does is done."""
        self._state.claim(
            bytes.fromhex(self.uuid),
            self._boot,
            generation=self.manifest.generation,
            sequence=sequence,
            horizon=self.horizon,
            retired=self.retired,
            drained=self.last,
            last=self.last,
            draw=self.draw,
            sampled=self.limits[0],
            limiter=self.limits[1],
            layout=self._state.get("layout") + 1,
            heartbeat=time.monotonic_ns(),
            since=self._lock_file.owner.stamp,
            inode=self._state.inode,
        )
        self._state.set_progress(self.progress)
        self._state.end_change()

    def _enter_state(self) -> None:
        """Remove the seal of the last close, before anything is changed; drop a page that does not fit it.

        A seal that does not fit counts only where the journal ends with a close: then it holds all that the
        page said. Otherwise the writer was killed, or the machine, and no checksum is expected.
        """
        state = self._state
        if not state.intact and _is_closed(self.disk, self.path):
            _logger.warning("%s does not have its checksum and is made anew", self.path / STATE)
            state.discard()  # first: killed behind it, the next opening finds the same
        state.unseal()

    def _leave_state(self, closed: int = 0) -> None:
        """Note that the writer is gone.

        Args:
            closed: Number of the record of a clean close, which is on the disk; 0: it did not close.
        """
        if self._lock_file.held:
            self._state.set("heartbeat", 0)
            if closed:
                self._state.set("sequence", closed)
                self._state.seal()

    def beat(self) -> None:
        """Show other processes that this one lives."""
        self._state.set("heartbeat", time.monotonic_ns())

    def _note_draw(self, draw: int) -> None:
        if self._lock_file.held:  # a forked child shares the page
            self._state.note("draw", draw)

    def _note_progress(self, progress: Sequence[int]) -> None:
        if self._lock_file.held:
            self._state.set_progress(progress)
            self._state.unseal()

    def _note_limits(self, sampled: int, settings: int) -> None:
        if self._lock_file.held:
            self._state.note("sampled", sampled)
            self._state.note("limiter", settings)

    def _note_horizon(self, horizon: int) -> None:
        self._state.set("horizon", horizon)

    def _note_change(self, slots: IntArray | None) -> None:
        if slots is None or not slots.size:
            self._state.begin_change(*_ALL_SLOTS)
        else:
            self._state.begin_change(int(slots.min()), int(slots.max()))

    def _note_changed(self) -> None:
        self._state.end_change()

    def _note_layout(self) -> None:
        """Tell readers that fields, or the files of columns, are others than before."""
        self._state.set("layout", self._state.get("layout") + 1)

    def _note_forgotten(self, last: int) -> None:
        """Tell readers that ids up to `last` are gone, and that no other id is there yet."""
        for name in ("retired", "horizon", "drained", "last"):  # no id may show that was never written
            self._state.set(name, last)


def _is_closed(disk: Disk, path: Path) -> bool:
    """Return whether the journal of a store ends with a close."""
    records = read_journal(disk, path / JOURNAL)
    return bool(records) and records[-1].kind is Kind.CLOSE
