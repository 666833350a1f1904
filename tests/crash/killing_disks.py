"""File layers that end the process at some operation with kill -9.

Used by the children of the crash tests instead of the library's own. They never sync to a real disk, which
makes no difference for a kill.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from expstore.disk.files import Disk, File


class _Machine:
    """The number of the machine's start; a power cut begins a new one."""

    boot = 0


machine = _Machine()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _KillingFile(File):
    disk: KillingDisk

    def sync(self) -> None:
        self.disk.gate("sync", self.path)
        self.disk.syncs += 1

    def write_mapped(self, data: bytes, offset: int) -> None:
        self.write(data, offset)

    def write(self, data: Any, offset: int) -> None:
        part = self.disk.part_of(len(data) if isinstance(data, bytes) else data.nbytes)
        if part is not None:
            raw = data if isinstance(data, bytes) else data.tobytes()
            os.pwrite(self.fd, raw[:part], offset)
            _kill()
        super().write(data, offset)


class KillingDisk(Disk):
    """Kill the process at the N-th operation: before it, or in the middle of a write.

    Args:
        at: N; 0 for never.
        torn: Share of a write that is done, 0 to 1; None for nothing.
        serial: Sync files sequentially in the order of their names, so that operations can be counted.
        syncs: Whether a sync counts. A kill before it has the same result as a kill before the next
            operation.
    """

    file_class: type[File] = _KillingFile

    def __init__(
        self, at: int = 0, *, torn: float | None = None, serial: bool = False, syncs: bool = True
    ) -> None:
        super().__init__()
        self.at = at
        self.torn = torn
        self.serial = serial
        self.skipped = () if syncs else ("sync", "sync_dir")
        self.acts = 0
        self.trace: list[str] = []

    def arm(self, at: int) -> None:
        """Start counting, and end the process at operation number `at`."""
        self.at, self.acts, self.trace = at, 0, []

    def gate(self, act: str, path: Path) -> None:
        if act in self.skipped:
            return
        self.acts += 1
        self.trace.append(f"{act} {path.name}")
        if self.acts == self.at and (act != "write" or self.torn is None):
            self.end()

    def end(self) -> None:
        """End the process."""
        _kill()

    def part_of(self, size: int) -> int | None:
        """Return how many bytes of a write are done before the end; None for a complete write.

        No machine tears an aligned word: it copies whole words, and stops between pages.
        """
        cut = self.torn is not None and self.acts + 1 == self.at
        return int(size * self.torn) // 8 * 8 if cut else None

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, write=write)
        fd, file.fd = file.fd, -1  # only one file owns a descriptor
        return self.file_class(self, file.path, fd)

    def sync_dir(self, path: Path) -> None:
        self.gate("sync_dir", path)
        self.syncs += 1

    def sync_all(self, files: Iterable[File], folders: Iterable[Path], pool: Any) -> None:
        if not self.serial:
            super().sync_all(files, folders, pool)
            return
        for file in sorted(files, key=lambda file: str(file.path)):
            file.sync()
        for folder in sorted(folders):
            self.sync_dir(folder)

    def write_beside(self, pool: Any, file: File, data: Any, offset: int) -> None:
        file.write(data, offset)  # sequential writes, so that operations are counted

    def boot_id(self) -> bytes:
        return machine.boot.to_bytes(16, "big")


class PlainDisk(Disk):
    """The library's own file layer, with compiled loops and real syncs; only timed kills end it."""

    def __init__(self) -> None:
        super().__init__()
        self._warmed = True
        self._load_kernel()

    def boot_id(self) -> bytes:
        return machine.boot.to_bytes(16, "big")
