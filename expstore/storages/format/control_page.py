"""The STATE page: the few numbers that must survive the process but not a restart of the machine.

The writer updates it with plain stores into a shared mapping; the next opening and readers in other processes
read it. It is never synced, and ignored after a restart of the machine. A clean close seals it with a
checksum, which the next writer removes before it changes anything: a page without a seal was left by a writer
that did not close the store, and has no checksum to match.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from expstore.disk.files import Disk

PAGE = 4096
#: The first and the last slot of a change that may concern any slot.
ALL_SLOTS = (0, 1 << 62)
_MAGIC = int.from_bytes(b"EXPSTATE", "little")
_FORMAT = 1
# On these processors, other processors see stores in the order in which they were made.
_ORDERED = os.uname().machine in {"x86_64", "i686", "AMD64"}

# Word numbers (8 bytes each) within the page; docs/format.md has the table.
_WORDS = {
    "generation": 6,
    "sequence": 7,
    "horizon": 8,
    "last": 9,
    "draw": 10,
    "change": 11,
    "change_low": 12,
    "change_high": 13,
    "layout": 14,
    "heartbeat": 15,
    "drained": 16,
    "retired": 17,
    "since": 18,
    "inode": 19,
    "sampled": 20,
    "limiter": 21,
    "changed": 22,
    "splits": 23,
}
#: Two places for a sampler's progress, written alternately: a count, then four words.
_PROGRESS = (24, 32)
#: The seal: 0, or `_MARKED` and the crc32c of all other bytes of the page.
_SEAL = 40
_MARKED = 0x53454144 << 32
_GENERATION, _HORIZON, _LAST, _CHANGE, _LAYOUT, _DRAINED, _RETIRED, _SPLITS = (
    _WORDS[name]
    for name in ("generation", "horizon", "last", "change", "layout", "drained", "retired", "splits")
)


class StateView(NamedTuple):
    """The words that readers need, read at one time.

    Args:
        generation: The writer's generation; 0 while the page is being claimed.
        layout: Incremented when fields or the columns' files change.
        horizon: Newest id whose slot may have been written to.
        change: Odd while rows are changed in place.
        last: Newest id that is published, and whose bytes are in the columns.
        retired: Newest id that was removed other than by age.
        splits: 1 if an episode is not in split "train".
    """

    generation: int
    layout: int
    horizon: int
    change: int
    last: int
    retired: int
    splits: int


class StatePage:
    """Map STATE and read or set its words.

    One writer, any number of readers; every word is stored atomically. Stored words survive the process, not
    a restart of the machine.

    Args:
        disk: Access to files.
        path: The file; created if it is missing and `write` is set.
        write: Whether words will be set; otherwise the file must exist.
    """

    def __init__(self, disk: Disk, path: Path, *, write: bool = True) -> None:
        self._order = threading.Lock()
        if not write:
            file = disk.open(path, write=False)
            try:
                self._map = file.map_readable(PAGE)
                #: The file's inode number; a page that has another one was copied from a running store.
                self.inode = file.inode()
            finally:
                file.close()
            self._words = memoryview(self._map).cast("q")
            return
        file = disk.open(path, create=True)
        try:
            if file.size() < PAGE:
                # Written, not only extended: a store into a hole could fail on a full disk (SIGBUS).
                file.write(bytes(PAGE), 0)
            self._map = file.map_writable(PAGE)
            self.inode = file.inode()
        finally:
            file.close()
        self._words = memoryview(self._map).cast("q")

    def fits(self, uuid: bytes, boot: bytes, generation: int) -> bool:
        """Return whether the page belongs to this store and was written since the machine started.

        Its generation may be lower than `generation`: openings that were killed raised the generation in
        expstore.json only, and have drawn nothing.
        """
        head = bytes(self._map[16:48])
        known = self._words[0] == _MAGIC and self._words[1] == _FORMAT
        return known and head == uuid + boot and self.get("generation") <= generation

    def look(self) -> StateView:
        """Return the words that readers need, read in an order in which no id is seen before its limits."""
        words = self._words
        if not _ORDERED:
            self._fence()
        last, drained = words[_LAST], words[_DRAINED]
        if not _ORDERED:
            self._fence()
        retired, horizon, change, layout = words[_RETIRED], words[_HORIZON], words[_CHANGE], words[_LAYOUT]
        generation = words[_GENERATION] if words[0] == _MAGIC else 0
        return StateView(generation, layout, horizon, change, min(last, drained), retired, words[_SPLITS])

    def claim(self, uuid: bytes, boot: bytes, **words: int) -> None:
        """Initialize the page for a writer."""
        self.unseal()
        self._words[0] = 0
        self._map[16:48] = uuid + boot
        for place in _PROGRESS:
            self._words[place] = 0
        for name, value in words.items():
            self.set(name, value)
        self._words[1] = _FORMAT
        self._words[0] = _MAGIC

    def set_progress(self, progress: Sequence[int]) -> None:
        """Set the four words of a sampler's progress atomically: a kill leaves the new or the old words."""
        words = self._words
        count = max(words[place] for place in _PROGRESS) + 1
        place = _PROGRESS[count & 1]
        words[place] = 0
        for number, value in enumerate(progress):
            words[place + 1 + number] = value
        words[place] = count

    def get_progress(self) -> tuple[int, ...] | None:
        """Return the progress that was set last; None if none was."""
        place = max(_PROGRESS, key=self._words.__getitem__)
        return tuple(self._words[place + 1 : place + 5]) if self._words[place] else None

    def get(self, name: str) -> int:
        """Return a word by name."""
        return self._words[_WORDS[name]]

    def set(self, name: str, value: int) -> None:
        """Set a word by name; readers see words in the order in which they were set."""
        self._words[_WORDS[name]] = value
        if not _ORDERED:
            self._fence()

    @property
    def sealed(self) -> bool:
        """Whether a close has sealed the page and no writer has opened the store since."""
        return self._words[_SEAL] != 0

    @property
    def intact(self) -> bool:
        """Whether the seal matches the page; True without a seal."""
        return self._words[_SEAL] in (0, self._checksum())

    def seal(self) -> None:
        """Store the page's checksum: the journal ends with a close record, and the writer has stopped."""
        self._words[_SEAL] = self._checksum()
        if not self.intact:  # another thread has drawn a batch meanwhile
            self.unseal()

    def unseal(self) -> None:
        """Remove the checksum: words are about to change, or have just changed."""
        self._words[_SEAL] = 0

    def discard(self) -> None:
        """Invalidate a page with damaged words. `claim` initializes it again."""
        self._words[0] = 0

    def _checksum(self) -> int:
        place = 8 * _SEAL
        crc = google_crc32c.value(self._map[:place])
        return _MARKED | int(google_crc32c.extend(crc, self._map[place + 8 : PAGE]))

    def note(self, name: str, value: int) -> None:
        """Set a word that may change while the page is being sealed, and remove the seal."""
        self._words[_WORDS[name]] = value
        self._words[_SEAL] = 0
        if not _ORDERED:
            self._fence()

    def begin_change(self, low: int, high: int) -> None:
        """Tell readers that slots `low` to `high` are about to be changed in place."""
        # Until `change` is odd, readers take these for the slots of the change before: name all slots first.
        self._note_slots(*ALL_SLOTS)
        self.set("change", self.get("change") | 1)
        self._note_slots(low, high)

    def _note_slots(self, low: int, high: int) -> None:
        self.set("change_low", low)
        self.set("change_high", high)

    def end_change(self) -> None:
        """Tell readers that the change is complete."""
        self.set("change", self.get("change") + 1 & ~1)

    def _fence(self) -> None:
        """Order loads and stores before the call before later ones: release, then acquire, one lock."""
        with self._order:
            pass
        with self._order:
            pass

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._map.close()
