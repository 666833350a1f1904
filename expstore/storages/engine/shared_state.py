"""The state that a writer shows to other processes: the words of the control page STATE.

The words are plain stores into a mapped page. `expstore.storages.follower` reads them; docs/format.md
describes the words ("STATE") and the order in which they are stored ("Readers"). This module does not access
rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from expstore.core.draw_state import DrawState
from expstore.core.values import IntArray
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.storages.format.control_page import ALL_SLOTS, PAGE, StatePage
from expstore.storages.format.journal import Kind, read_journal
from expstore.storages.format.paths import JOURNAL, STATE

_logger = logging.getLogger("expstore")


class SharedState:
    """The control page of a writer.

    Invariants: a reader never sees an id before the limits that belong to it (each method stores its words in
    that order); a forked child does not change the page, because it belongs to the parent.

    Crashes: the page survives the process. After a restart of the machine it is ignored, because it names
    another boot. Threads: each word is set by one thread at a time.

    Args:
        disk: Access to files.
        path: The store's folder.
        lock: The writer's lock on the store.
    """

    def __init__(self, disk: Disk, path: Path, lock: WriterLock) -> None:
        self._disk, self._path, self._lock = disk, path, lock
        self._boot = disk.boot_id()
        #: Whether the page was missing or truncated, and was created again.
        self.is_new = disk.size(path / STATE) < PAGE
        self.page = StatePage(disk, path / STATE)

    @property
    def owned(self) -> bool:
        """Whether this process writes to the store; a forked child does not."""
        return self._lock.held

    def fits(self, uuid: str, generation: int) -> bool:
        """Return whether the page was written by this store since the machine started."""
        return self.page.fits(bytes.fromhex(uuid), self._boot, generation)

    def enter(self) -> None:
        """Remove the seal of the last close before anything changes; drop a page that does not match it.

        A seal that does not match matters only if the journal ends with a close record: then the seal covers
        all of the page. Otherwise the process or the machine died, and there is no checksum to expect.
        """
        if not self.page.intact and _is_closed(self._disk, self._path):
            _logger.warning("%s does not have its checksum and is created again", self._path / STATE)
            self.page.discard()  # first: if the process dies here, the next opening finds the same
        self.page.unseal()

    def claim(
        self,
        uuid: str,
        *,
        generation: int,
        sequence: int,
        horizon: int,
        retired: int,
        last: int,
        draws: DrawState,
        splits: bool,
    ) -> None:
        """Initialize the page at the end of an opening.

        Args:
            uuid: The store's uuid.
            generation: The epoch of this writer.
            sequence: LSN of the newest record.
            horizon: Newest id whose slot may have been written to.
            retired: Newest id that was deleted.
            last: Newest id that can be read.
            draws: The state of the draws.
            splits: Whether an episode is not in split "train".
        """
        self.page.claim(
            bytes.fromhex(uuid),
            self._boot,
            generation=generation,
            sequence=sequence,
            horizon=horizon,
            retired=retired,
            drained=last,
            last=last,
            draw=draws.number,
            sampled=draws.limits[0],
            limiter=draws.limits[1],
            changed=sequence,
            layout=self.page.get("layout") + 1,
            heartbeat=time.monotonic_ns(),
            since=self._lock.owner.stamp,
            inode=self.page.inode,
            splits=int(splits),
        )
        self.page.set_progress(draws.progress)
        self.page.end_change()

    def leave(self, closed: int = 0) -> None:
        """Show that the writer has stopped.

        Args:
            closed: LSN of the synced close record; 0: the store was not closed cleanly.
        """
        if self._lock.held:
            self.page.set("heartbeat", 0)
            if closed:
                self.page.set("sequence", closed)
                self.page.seal()

    def beat(self) -> None:
        """Write a heartbeat for other processes."""
        self.page.set("heartbeat", time.monotonic_ns())

    # -- draws ------------------------------------------------------------------------------------

    def note_draw(self, number: int) -> None:
        """Store the number of the next draw."""
        if self._lock.held:
            self.page.note("draw", number)

    def note_progress(self, progress: Sequence[int]) -> None:
        """Store the progress of a sampler."""
        if self._lock.held:
            self.page.set_progress(progress)
            self.page.unseal()

    def note_limits(self, sampled: int, settings: int) -> None:
        """Store the counts of a rate limiter."""
        if self._lock.held:
            self.page.note("sampled", sampled)
            self.page.note("limiter", settings)

    # -- rows -------------------------------------------------------------------------------------

    def reserve(self, horizon: int) -> None:
        """Show that slots up to the one of id `horizon` are about to be written."""
        self.page.set("horizon", horizon)

    def publish(self, last: int, sequence: int, *, drained: bool) -> None:
        """Show rows up to `last`.

        Args:
            last: The newest id.
            sequence: LSN of the record that commits it.
            drained: Whether the columns contain the rows; otherwise a call of `drain` follows.
        """
        self.page.set("last", last)
        if drained:
            self.page.set("drained", last)
        self.page.set("sequence", sequence)

    def note_splits(self) -> None:
        """Show that episodes of rows that are about to be shown are not all in split "train"."""
        self.page.set("splits", 1)

    def drain(self, last: int) -> None:
        """Show that the columns contain all rows up to `last`."""
        self.page.set("drained", last)

    def note_record(self, sequence: int) -> None:
        """Show the LSN of the newest record."""
        self.page.set("sequence", sequence)

    def retire(self, through: int) -> None:
        """Show that ids up to `through` can no longer be read."""
        self.page.set("retired", through)

    def clear(self, last: int) -> None:
        """Show that all ids up to `last` are deleted, and that no newer id exists."""
        for name in ("retired", "horizon", "drained", "last"):  # no id may be visible that was never written
            self.page.set(name, last)

    def begin_change(self, slots: IntArray | None) -> None:
        """Show that slots are about to be changed in place; None: any slot. Shape `(n,)`."""
        if slots is None or not slots.size:
            self.page.begin_change(*ALL_SLOTS)
        else:
            self.page.begin_change(int(slots.min()), int(slots.max()))

    def end_change(self) -> None:
        """Show that the change in place is complete."""
        self.page.end_change()

    def note_changed(self, number: int) -> None:
        """Show that the columns have all changes in place up to the one whose record has this number."""
        self.page.set("changed", number)

    def note_layout(self) -> None:
        """Show that the fields, or the files of columns, have changed."""
        self.page.set("layout", self.page.get("layout") + 1)

    def close(self) -> None:
        """Unmap the page."""
        self.page.close()


def _is_closed(disk: Disk, path: Path) -> bool:
    """Return whether the journal of a store ends with a close record."""
    records = read_journal(disk, path / JOURNAL)
    return bool(records) and records[-1].kind is Kind.CLOSE
