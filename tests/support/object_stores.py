"""Object storage in memory whose requests can be stopped, and checks of what it contains."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from obstore.store import MemoryStore

from expstore.cold import ObjectStorage, RemoteVersion, versions
from expstore.cold.bucket import Bucket
from expstore.cold.parts import fetch_part
from expstore.cold.ship_log import ShipLog, ShippedState, state_part_key
from expstore.cold.version_list import Manifest, part_key
from expstore.storages.snapshots.rebuild import parts_of


class Killed(BaseException):
    """The process ends before a request."""


class WatchedStorage(ObjectStorage):
    """Versions in memory, whose requests are recorded.

    Args:
        settings: Settings of `ObjectStorage`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(MemoryStore(), **settings)
        #: Called before each request with its number, what it does, and the key.
        self.before: Callable[[int, str, str], None] = lambda number, act, key: None
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def connect(self) -> Bucket:
        return _WatchedBucket(self.where, self.name, self)

    def count(self, act: str) -> int:
        return sum(done == act for done, _ in self.requests)

    def note(self, act: str, key: str) -> None:
        with self._lock:
            number = len(self.requests)
            self.requests.append((act, key))
        self.before(number, act, key)

    def kill_at(self, number: int) -> None:
        """Let all requests from this one on, counted from now, end the process."""
        first = len(self.requests) + number

        def before(at: int, act: str, key: str) -> None:
            if at >= first:
                raise Killed

        self.before = before

    def run_before(self, number: int, act: Callable[[], object]) -> None:
        """Call a function once, before the request of this number, counted from now."""
        first = len(self.requests) + number

        def before(at: int, *_: str) -> None:
            if at == first:
                self.calm()
                act()

        self.before = before

    def calm(self) -> None:
        """Let all requests pass."""
        self.before = lambda number, act, key: None


class _WatchedBucket(Bucket):
    def __init__(self, store: Any, name: str, storage: WatchedStorage) -> None:
        super().__init__(store, name)
        self._storage = storage

    def gate(self, act: str, key: str) -> None:
        self._storage.note(act, key)


def find_shipped(storage: ObjectStorage) -> set[str]:
    """Return the keys of the states and parts of a shipped store."""
    return {key for folder in ("manifest", "shipped") for key, _ in storage.connect().keys(folder)}


def find_needed(storage: ObjectStorage) -> set[str]:
    """Return the keys of what the newest state of a shipped store and its versions need."""
    bucket = storage.connect()
    newest = ShipLog(bucket).find_confirmed()
    assert newest is not None
    states = [newest]
    states += [ShippedState.of_version(bucket, version) for version in versions(storage) if version.state]
    keys = {state.key for state in states}
    for state in states:
        keys |= {*map(state_part_key, parts_of(state.state or {}, partial(fetch_part, bucket)))}
    return keys


def check_whole(storage: ObjectStorage) -> list[RemoteVersion]:
    """Return the versions; every part of every version is there, and its bytes fit its name."""
    bucket, found = Bucket(storage.where, storage.name), versions(storage.where)
    for version in found:
        for part in Manifest.load(bucket, version).parts:
            data = bucket.read(part_key(part))
            assert data is not None, f"{part} of version {version.number} is missing"
            assert hashlib.sha256(data).hexdigest() == part.rpartition("/")[2]
    return found
