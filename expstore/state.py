"""The STATE page: the few numbers that must outlive the process but not the machine.

The writer keeps it current with plain stores into a shared mapping; the next opening and readers in
other processes look at it. It is never synced and never trusted across a restart of the machine.
"""

from __future__ import annotations

from pathlib import Path

from expstore.files import Disk

__all__ = ["PAGE", "StatePage"]

PAGE = 4096
_MAGIC = int.from_bytes(b"EXPSTATE", "little")
_FORMAT = 1

# Word numbers (8 bytes each) within the page; ARCHITECTURE.md has the table.
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
}


class StatePage:
    """Map STATE and read or set its words.

    One writer, any number of readers; every word is stored in one piece. What is stored survives the
    process, not the machine.

    Args:
        disk: Where files are touched.
        path: The file; made if it is missing.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        file = disk.open(path, create=True)
        try:
            if file.size() < PAGE:
                # Written, not only stretched: a store into a hole could meet a full disk (SIGBUS).
                file.write(bytes(PAGE), 0)
            self._map = file.map_writable(PAGE)
        finally:
            file.close()
        self._words = memoryview(self._map).cast("q")

    def fits(self, uuid: bytes, boot: bytes, generation: int) -> bool:
        """Say whether the page speaks of this store since this start of the machine.

        A generation behind `generation` fits: openings that were killed have drawn nothing.
        """
        head = bytes(self._map[16:48])
        known = self._words[0] == _MAGIC and self._words[1] == _FORMAT
        return known and head == uuid + boot and self.get("generation") <= generation

    def claim(self, uuid: bytes, boot: bytes, **words: int) -> None:
        """Start the page anew for a writer."""
        self._words[0] = 0
        self._map[16:48] = uuid + boot
        for name, value in words.items():
            self.set(name, value)
        self._words[1] = _FORMAT
        self._words[0] = _MAGIC

    def get(self, name: str) -> int:
        """Return a word by name."""
        return self._words[_WORDS[name]]

    def set(self, name: str, value: int) -> None:
        """Set a word by name."""
        self._words[_WORDS[name]] = value

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._map.close()
