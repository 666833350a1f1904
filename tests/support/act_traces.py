"""Record the file operations of a store as lines of text that can be compared.

`trace` runs one scripted history of a store (`tests/support/act_lives.py`). Everything that differs between
runs is fixed: clock, process id, host, start of the machine, random bytes, and the background threads, which
do not run. The result is the same on every machine. `tests/support/golden.py` records it in
`tests/golden/acts/`, and `tests/crash/test_act_traces.py` compares.

A line has an operation, the file relative to the store's folder, and details:

    write    columns/action/c/0 64+80 1f0c7a2e      80 bytes at offset 64, and their crc32c
    truncate journal/000001 4096                    the new length
    rename   expstore.json <- expstore.json.tmp
    STATE    . last=10                              a word that is stored into the STATE page
    # extend(10)                                    the next step of the script

Files that are only read are not listed, nor are the files of the index, which DuckDB writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import google_crc32c

from expstore.buffers.policy_runner import PolicyRunner
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import _to_error
from expstore.errors import ExpStoreError
from expstore.storages.engine import opening, store
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ArrowStorage, ZarrStorage
from expstore.storages.format.control_page import StatePage
from expstore.storages.snapshots import restore
from tests.crash.recording_disk import Event, RecordingDisk
from tests.support.stores import NoIndex, NoKeeper

#: Start of every history, in seconds since 1970; a step of the script takes a second.
START = 1_700_000_000
SEED = 11
#: Words of the STATE page that differ between runs.
_HIDDEN = {"heartbeat", "inode"}


class _Host:
    """The machine and process of a history, as the library sees them."""

    def __init__(self) -> None:
        self.now = START
        self.boot = 1
        self._drawn = 0

    def random_bytes(self, count: int) -> bytes:
        """Return different bytes for every call, but the same ones in every history."""
        self._drawn += 1
        return hashlib.shake_128(self._drawn.to_bytes(8, "big")).digest(count)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Let the library see this machine, without background work, while the context is active."""
        with contextlib.ExitStack() as patches:
            for owner, name, value in (
                (time, "time", lambda: float(self.now)),
                (time, "time_ns", lambda: self.now * 10**9),
                (os, "getpid", _process_id),
                (os, "urandom", self.random_bytes),
                (uuid, "uuid4", lambda: uuid.UUID(bytes=self.random_bytes(16), version=4)),
                (socket, "gethostname", lambda: "host"),
                (store, "Keeper", NoKeeper),
                (PolicyRunner, "start", lambda runner: None),
                (opening, "describe_program", lambda: {"program": "life", "git_commit": "0" * 40}),
                (store, "describe_checkout", dict),
                (restore, "describe_version", lambda disk, folder: {"source": folder.name}),
                (tuning, "INDEX_ON_CLOSE", False),
            ):
                patches.enter_context(patch.object(owner, name, value))
            # Compiled loops may produce other bytes (of a compressed chunk) than their replacements, so they
            # are loaded before the first row, as in a store that has been open for a second.
            for name, module in sorted(sys.modules.copy().items()):  # other threads import at the same time
                if name.startswith("expstore.") and "load_in_background" in vars(module):
                    patches.enter_context(patch.object(module, "load_in_background", lambda load: load()))
            yield


def _process_id(own: Callable[[], int] = os.getpid) -> int:
    """Return the same process id to the library in every history.

    Other callers, such as the heap of `multiprocessing`, which may be garbage-collected meanwhile, get the
    real process id.
    """
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    return 4242 if caller.partition(".")[0] == "expstore" else own()


class TracingDisk(RecordingDisk):
    """Record the file operations of one process; operations can be made to fail, and the process to end.

    Args:
        host: The machine.
        events: List to which operations are appended.
    """

    def __init__(self, host: _Host, events: list[Event]) -> None:
        super().__init__()
        self.events = events
        self._host = host
        self._boot = host.boot
        self._fault: tuple[str, str, int] | None = None
        self.ended = False

    def fail(self, act: str, name: str, code: int = errno.ENOSPC) -> None:
        """Let the next operation of this kind fail on a file whose path contains `name`."""
        self._fault = (act, name, code)

    def end(self) -> None:
        """End the process: all further file operations fail, as after a kill."""
        self.ended, self.events = True, []

    def gate(self, act: str, path: Path) -> None:
        super().gate(act, path)
        if self.ended:
            raise _to_error(act, path, OSError(errno.EIO, "the process has ended"))
        if self._fault is not None and act == self._fault[0] and self._fault[1] in str(path):
            code, self._fault = self._fault[2], None
            self.events.append(Event("FAILS", path, data=act))
            raise _to_error(act, path, OSError(code, os.strerror(code)))
        if act == "create":
            self.events.append(Event("create", path))

    def boot_id(self) -> bytes:
        return self._boot.to_bytes(16, "big")

    def mounts(self) -> str:
        return ""  # some files are written only on file systems in memory


class Life:
    """The context of a script: a folder for its stores, and operations that storages do not have.

    Args:
        folder: Folder for stores.
        host: The machine.
    """

    def __init__(self, folder: Path, host: _Host) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._host = host
        self._running: list[TensorDictReplayBuffer] = []
        self.disk = TracingDisk(host, self.events)

    @property
    def path(self) -> Path:
        """Path of the store."""
        return self.folder / "run.exp"

    def step(self, text: str) -> None:
        """Record the next step; the clock advances by a second."""
        self._host.now += 1
        self.events.append(Event("step", data=text))

    def open(
        self,
        capacity: int | None = None,
        *,
        arrow: bool = False,
        segment_bytes: int = 1 << 16,
        ndim: int | None = None,
        compression: Any = None,
        index: bool = False,
        buffer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> TensorDictReplayBuffer:
        """Open the store, or create it.

        Args:
            capacity: Capacity of a new store.
            arrow: Whether it is an `ArrowStorage`.
            segment_bytes: Length of a segment of its journal.
            ndim: Number of dims of the storage.
            compression: Compression of an `ArrowStorage`.
            index: Whether it has an index; without it, operations that need the index fail.
            buffer: More arguments of the buffer.
            settings: Fields of `Settings`.
        """
        known = [] if capacity is None else [str(capacity)]
        self.step(f"open({', '.join([*known, *sorted(settings)])})")
        options: dict[str, Any] = {
            "settings": Settings(flatten=ndim is None, seed=SEED, on_sigterm="ignore", **settings),
            "ndim": ndim,
            "disk": self.disk,
            "segment_bytes": segment_bytes,
        }
        kept = (
            ArrowStorage(self.path, capacity, compression=compression, **options)
            if arrow
            else ZarrStorage(self.path, capacity, **options)
        )
        rb = TensorDictReplayBuffer(storage=kept, batch_size=4, with_ids=True, **buffer or {})
        if not index:
            kept.index.use(NoIndex())
        self._running.append(rb)
        return rb

    def close(self, rb: TensorDictReplayBuffer) -> None:
        """Close a buffer."""
        self.step("close()")
        if isinstance(rb.storage.index.catalog, NoIndex):
            rb.storage.close()
        rb.close()
        self._running.remove(rb)

    def kill(self, *, power: bool = False) -> None:
        """End the process as kill -9 does; with `power`, restart the machine without losing anything."""
        self.disk.end()
        for rb in self._running:
            state = rb.storage.path / "STATE"
            page = state.read_bytes()
            with contextlib.suppress(ExpStoreError):
                rb.storage.close()
            with state.open("r+b") as file:  # the same file: the page stores its inode
                file.write(page)
        self._running.clear()
        self._host.boot += power
        self.disk = TracingDisk(self._host, self.events)
        self.step("power cut" if power else "kill -9")

    def lines(self) -> list[str]:
        """Return the operations as text."""
        return [line for event in self.events if (line := self._line(event))]

    def _line(self, event: Event) -> str:
        name = "" if event.path == Path() else self._name(event.path)
        if event.act == "open" or event.path.name.startswith("index."):
            return ""
        if event.act == "step":
            return f"# {event.data}"
        text = f"{event.act:<8} {name}"
        if event.act == "write":
            return f"{text} {event.at}+{len(event.data)} {google_crc32c.value(event.data):08x}"
        if event.act == "truncate":
            return f"{text} {event.at}"
        if event.act == "punch":
            return f"{text} {event.at}+{event.data}"
        if event.act in ("rename", "link"):
            return f"{text} <- {self._name(event.data)}"
        if event.act in ("STATE", "FAILS"):
            return f"{text} {event.data}"
        return text

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self.path)


@contextlib.contextmanager
def _state_words(life: Life) -> Iterator[None]:
    """Record values that are stored into STATE pages while the context is active."""
    init, claim, put, progress = StatePage.__init__, StatePage.claim, StatePage.set, StatePage.set_progress
    noted, seal, unseal = StatePage.note, StatePage.seal, StatePage.unseal
    places: dict[int, tuple[TracingDisk, Path]] = {}

    def note(page: StatePage, text: str) -> None:
        if id(page) in places:  # not of a store of an earlier test, which is closed when it is collected
            disk, path = places[id(page)]
            disk.events.append(Event("STATE", path, data=text))

    def traced_init(page: StatePage, disk: Any, path: Path, **options: Any) -> None:
        places[id(page)] = disk, path.parent
        init(page, disk, path, **options)

    def traced_claim(page: StatePage, uuid: bytes, boot: bytes, **words: int) -> None:
        note(page, f"claimed for {google_crc32c.value(uuid + boot):08x}")
        claim(page, uuid, boot, **words)

    def traced_set(page: StatePage, name: str, value: int) -> None:
        note(page, f"{name}={'...' if value and name in _HIDDEN else value}")
        put(page, name, value)

    def traced_note(page: StatePage, name: str, value: int) -> None:
        note(page, f"{name}={'...' if value and name in _HIDDEN else value}")
        noted(page, name, value)

    def traced_seal(page: StatePage) -> None:
        note(page, "sealed")
        seal(page)

    def traced_unseal(page: StatePage) -> None:
        note(page, "unsealed")
        unseal(page)

    def traced_progress(page: StatePage, words: Any) -> None:
        note(page, f"progress={','.join(map(str, words))}")
        progress(page, words)

    with (
        patch.object(StatePage, "__init__", traced_init),
        patch.object(StatePage, "claim", traced_claim),
        patch.object(StatePage, "set", traced_set),
        patch.object(StatePage, "note", traced_note),
        patch.object(StatePage, "seal", traced_seal),
        patch.object(StatePage, "unseal", traced_unseal),
        patch.object(StatePage, "set_progress", traced_progress),
    ):
        yield


def trace(script: Callable[[Life], None], folder: Path) -> list[str]:
    """Run a script on an empty folder; return its file operations, one per line."""
    host = _Host()
    life = Life(folder.resolve(), host)
    # Batches of a few rows are written to the columns, so that histories can be short.
    sizes = patch.multiple(tuning, MEMTABLE_BATCH_ROWS=8, MEMTABLE_ROWS=128)
    with sizes, host.pinned(), _state_words(life):
        script(life)
        assert not life._running, "the script must close what it opens"
    return life.lines()
