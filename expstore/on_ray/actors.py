"""What runs on the nodes of Ray: the actors that serve a shard, the registry, and tasks that make stores.

`ShardActor` holds one store and serves it by the server of `expstore.api`. `Registry` holds the list of the
shards, in a cluster file. Used by `expstore.cluster.ray`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from expstore.cluster.members import ClusterFile, MemberList
from expstore.disk.files import Disk
from expstore.errors import ExpStoreError, LockedError, NotFoundError, StateError
from expstore.on_ray.members import find_registry, ray, wait_for
from expstore.on_ray.nodes import (
    Node,
    address_of,
    kill_shard,
    name_shard,
    pick_node,
    read_nodes,
    start_actor,
)
from expstore.storages.format.manifest import MANIFEST, Manifest

if TYPE_CHECKING:
    from expstore.api.server import ServerThread
    from expstore.api.stores import Served

_log = logging.getLogger("expstore")
#: Seconds that an actor waits for the lock of its store, which a process that ends may still hold.
_LOCK_SECONDS = 60.0
_LOCK_PAUSE_SECONDS = 0.2
#: Seconds between two reports of a shard to the registry.
_REPORT_SECONDS = 1.0
#: Seconds between two looks of the registry for nodes that have left.
_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class ClusterSpec:
    """What a cluster was started with.

    Args:
        name: Its name.
        path: Path of the stores, with `{shard}` for the number.
        file: The cluster file, on the head node.
        token: The access token of all servers.
        store: Options of `expstore.open` for new stores.
        server: Options of `expstore.api.Settings`.
        actor: Options of Ray for the actors of shards.
    """

    name: str
    path: str
    file: Path
    token: str = field(repr=False)
    store: Mapping[str, Any]
    server: Mapping[str, Any]
    actor: Mapping[str, Any]

    def find_path(self, number: int) -> Path:
        """Return the path of a shard's store on its node."""
        return Path(self.path.replace("{shard}", str(number)))

    def find_address(self, number: int) -> str | None:
        """Return where a shard is shipped to, which is what its server says; None: it is not shipped."""
        url = self.server.get("ship")
        return (
            None if url is None else f"{url.rstrip('/')}/{self.find_path(number).name.removesuffix('.exp')}"
        )


@dataclass(frozen=True)
class Restored:
    """A version of a store, of which a new store is made.

    Args:
        source: Where it is: as for `expstore.cold.pull`, or a folder that `dumps` was given.
        version: Number or tag; None: the newest.
        expected: Uuid of the store that the version must be of.
    """

    source: Any
    version: int | str | None
    expected: str


@dataclass(frozen=True)
class ShardSpec:
    """What the actor of a shard serves.

    Args:
        cluster: The cluster.
        number: Number of the shard.
        address: The address of its node.
        port: The port, which it had before if it is restarted.
        uuid: Uuid of its store; None: the first start creates the store, and the registry knows its uuid
            later.
        origin: The version of which the first start creates the store; None: it creates an empty one.
        is_moved: Whether it was at another address before, so that the first start tells the registry.
    """

    cluster: ClusterSpec
    number: int
    address: str
    port: int
    uuid: str | None = None
    origin: Restored | None = None
    is_moved: bool = False


class Found(NamedTuple):
    """A store on a node.

    Args:
        uuid: Its uuid; None: there is no store.
        port: A port that is free on the node.
    """

    uuid: str | None
    port: int


class Running(NamedTuple):
    """What the actor of a shard tells about itself.

    Args:
        url: Address of the store.
        uuid: Its uuid.
        pid: Id of the process.
        rows: Number of readable rows.
        written: Number of rows that were ever written.
    """

    url: str
    uuid: str
    pid: int
    rows: int
    written: int


class ShardActor:
    """Serve one store until the actor is stopped; Ray restarts it in place if its process dies.

    A store that is missing is restored from what was shipped. If nothing was, or there is another store, the
    actor serves nothing and tries again every second.

    Processes: one holds the store. Crashes: a restarted actor opens the same store, so that no acknowledged
    row is lost, and listens on the same port, or tells the registry another one.

    Args:
        spec: What it serves.
    """

    def __init__(self, spec: ShardSpec) -> None:
        self._spec, self._lock = spec, threading.Lock()
        self._server: ServerThread | None = None
        self._is_restarted: bool = ray.get_runtime_context().was_current_actor_reconstructed
        #: Whether the registry has the address; it gets that of a first start from who starts it.
        self._is_announced = not (self._is_restarted or spec.is_moved)
        self._ended = threading.Event()
        with contextlib.suppress(ExpStoreError):  # the first `read_status` raises it
            self._serve()
        self._reporter = threading.Thread(target=self._report, name="expstore-report", daemon=True)
        self._reporter.start()

    def _serve(self) -> Served:
        """Return the served store; start the server and tell its address, unless that is done.

        Raises:
            NotFoundError: There is no store at the path.
            StateError: There is another store at the path (kind "other_store").
        """
        spec = self._spec
        with self._lock:
            if self._server is None:
                uuid = spec.uuid
                if uuid is None:
                    uuid = self._find_uuid() if self._is_restarted else _make_store(spec)
                self._server = _start_server(spec, uuid)
            (name,) = self._server.stores.names()
            url = f"{self._server.listening.url}/{name}"
            if not self._is_announced:
                wait_for(find_registry(spec.cluster.name).move.remote(spec.number, url))
                self._is_announced = True
            return self._server.stores.get(name)

    def _find_uuid(self) -> str:
        found: str = wait_for(find_registry(self._spec.cluster.name).find_uuid.remote(self._spec.number))
        return found

    def read_status(self) -> Running:
        """Return the address of the store and its counts.

        Raises:
            ExpStoreError: It cannot be served.
        """
        served = self._serve()
        assert self._server is not None
        url = f"{self._server.listening.url}/{served.name}"
        return Running(url, served.uuid, os.getpid(), len(served.rb), served.rb.write_count)

    def _report(self) -> None:
        """Tell the registry every second how many rows were written: it knows them if the node is lost."""
        spec = self._spec
        pending: list[Any] = []
        while not self._ended.wait(_REPORT_SECONDS):
            if pending and not ray.wait(pending, timeout=0)[0]:
                continue  # it restarts
            with contextlib.suppress(ExpStoreError):  # no registry yet, or no store
                written = self.read_status().written
                pending = [find_registry(spec.cluster.name).report.remote(spec.number, written)]

    def stop(self) -> None:
        """Finish running requests, flush and close the store."""
        self._ended.set()
        self._reporter.join()
        with self._lock:
            if self._server is not None:
                self._server.stop()


def _start_server(spec: ShardSpec, uuid: str) -> ServerThread:
    from expstore.api.server import ServerThread
    from expstore.api.settings import Settings

    cluster, path = spec.cluster, spec.cluster.find_path(spec.number)
    _restore_shipped(path, cluster.find_address(spec.number))
    _check_store(path, spec, uuid)
    hosts = (spec.address, *cluster.server.get("hosts", ()))
    settings = Settings(path=path, token=cluster.token.encode(), **(dict(cluster.server) | {"hosts": hosts}))

    def listen(port: int) -> ServerThread:
        return ServerThread(settings, host=spec.address, port=port, failed=_kill_this_process)

    try:
        return _wait_for_lock(lambda: listen(spec.port))
    except StateError as exc:
        if exc.kind != "address":  # another program has the port now
            raise
        return _wait_for_lock(lambda: listen(0))


def _restore_shipped(path: Path, url: str | None) -> None:
    """Restore what was shipped of a store, if there is no store at the path."""
    if url is None or _read_uuid(path) is not None:
        return
    from expstore.cold.ship import Shipper
    from expstore.cold.ship_settings import Ship

    Shipper(Ship(url)).restore_missing(path)


def _check_store(path: Path, spec: ShardSpec, uuid: str) -> None:
    found = _read_uuid(path)
    if found is None:
        raise NotFoundError(
            f"shard {spec.number} of cluster {spec.cluster.name!r}: there is no store {path} on node "
            f"{spec.address}",
            hint="bring the folder back, or replace the shard: cluster.replace()",
        )
    if found != uuid:
        raise StateError(
            f"shard {spec.number} of cluster {spec.cluster.name!r} is store {uuid}, and {path} on node "
            f"{spec.address} is store {found}",
            kind="other_store", hint="bring the folder back, or replace the shard: cluster.replace()",
        )  # fmt: skip


def _read_uuid(path: Path) -> str | None:
    disk = Disk()
    return Manifest.load(disk, path).uuid if disk.exists(path / MANIFEST) else None


def _make_store(spec: ShardSpec) -> str:
    """Create the store of a new shard; return its uuid."""
    from expstore._open import open as open_store

    path, ship = spec.cluster.find_path(spec.number), spec.cluster.find_address(spec.number)
    if (
        spec.origin is None
    ):  # with `ship`, it restores what an earlier cluster has shipped, or ships a first state
        open_store(path, mode="x" if ship is None else "a", ship=ship, **spec.cluster.store).close()
    else:
        _restore(path, spec.origin)
    uuid = _read_uuid(path)
    assert uuid is not None, "it was created"
    return uuid


def _restore(path: Path, origin: Restored) -> None:
    from expstore.cold.download import pull, restore
    from expstore.cold.object_storage import is_object_url
    from expstore.cold.version_list import versions
    from expstore.storages.snapshots.catalog import find_version

    source, disk = origin.source, Disk()
    if isinstance(source, str | os.PathLike) and not is_object_url(source):
        folder = find_version(disk, Path(source), origin.version)
        _check_origin(Manifest.load(disk, folder).uuid, origin)
        restore(folder, path)
    else:
        for known in versions(source):
            _check_origin(known.store, origin)
        pull(source, path, version=origin.version)


def _wait_for_lock(start: Callable[[], ServerThread]) -> ServerThread:
    deadline, pause = time.monotonic() + _LOCK_SECONDS, threading.Event()
    while True:
        try:
            return start()
        except LockedError:
            if time.monotonic() > deadline:
                raise
            pause.wait(_LOCK_PAUSE_SECONDS)


def _kill_this_process() -> None:
    """End the process without delay: Ray restarts the actor, and acknowledged rows are in the store."""
    os.kill(os.getpid(), signal.SIGKILL)


class Registry:
    """The list of a cluster's shards, kept in a cluster file.

    If shards are shipped, a thread looks every second whether their nodes are there, and starts a shard whose
    node has left on another one, or on the one that has come back at its address. It keeps its number, and is
    restored unless its store is on that node.

    Crashes: every change is in the file when the call returns; a restarted registry reads it.

    Args:
        spec: What the cluster was started with.
        first: The shards at the start.
    """

    def __init__(self, spec: ClusterSpec, first: ClusterFile) -> None:
        self._spec = spec
        known = load_file(spec.file) if ray.get_runtime_context().was_current_actor_reconstructed else None
        if known is None:
            first.save(spec.file)
        self._file = known or first
        self._written: dict[int, int] = {}
        #: The id of each shard's node, of shards that are shipped; "": it was not there from the start.
        self._nodes: dict[int, str] = {}
        self._ended = threading.Event()
        if spec.find_address(0) is not None:
            threading.Thread(target=self._watch, name="expstore-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_SECONDS):
            try:
                self._move_lost()
            except Exception as exc:  # it tries again
                _log.warning("shards of lost nodes of cluster %r cannot be moved: %s", self._spec.name, exc)

    def _move_lost(self) -> None:
        """Start shards whose nodes have left on other nodes."""
        nodes = read_nodes()
        by_address = {node.address: node for node in nodes}
        for member in self._file.list.members:
            former = by_address.get(address_of(member))
            if member.number not in self._nodes:
                self._nodes[member.number] = "" if former is None else former.id
            if self._nodes[member.number] in {node.id for node in nodes}:
                continue
            node = former or pick_node(nodes, self._file.list)
            kill_shard(self._spec.name, member.number)
            port = port_of(member.url)
            shard = ShardSpec(self._spec, member.number, node.address, port, member.uuid, is_moved=True)
            start_shard(shard, node)
            self._nodes[member.number] = node.id
            _log.warning("the node of shard %d has left: it is moved to %s", member.number, node.address)

    def end_watch(self) -> None:
        """Move no more shards: the cluster is being stopped."""
        self._ended.set()

    def describe(self) -> ClusterSpec:
        """Return what the cluster was started with."""
        return self._spec

    def read(self, revision: int) -> MemberList | None:
        """Return the list; None if it has this revision."""
        return None if self._file.list.revision == revision else self._file.list

    def next_number(self) -> int:
        """Return the number of the next shard that is added."""
        return self._file.following

    def report(self, number: int, written: int) -> None:
        """Note how many rows were ever written to a shard."""
        self._written[number] = written

    def find_written(self, number: int) -> int | None:
        """Return how many rows were ever written to a shard, as far as it reported; None: it did not."""
        return self._written.get(number)

    def add(self, number: int, url: str, store: str) -> MemberList:
        """Add a shard whose actor runs."""
        return self._change(_add_as(self._file, number, url, store))

    def retire(self, number: int) -> MemberList:
        """Let a shard accept no new sources."""
        return self._change(self._file.retire(number))

    def remove(self, number: int) -> MemberList:
        """Remove a retired shard."""
        return self._change(self._file.remove(number))

    def find_uuid(self, number: int) -> str:
        """Return the uuid of a shard's store."""
        return str(self._file.find(number).uuid)

    def move(self, number: int, url: str) -> None:
        """Note the address of a shard, unless it is known."""
        known = self._file.find(number)
        if known.url != url:
            self._change(self._file.move(number, url, str(known.uuid)))

    def replace(self, lost: int, number: int, url: str, store: str) -> MemberList:
        """Remove a lost shard and add another one, by one change."""
        changed = _add_as(self._file, number, url, store)
        if changed.find(lost).accepts:
            changed = changed.retire(lost)
        return self._change(changed.remove(lost))

    def _change(self, changed: ClusterFile) -> MemberList:
        changed.save(self._spec.file)
        self._file = changed
        return changed.list


def _add_as(file: ClusterFile, number: int, url: str, store: str) -> ClusterFile:
    if file.following != number:
        raise StateError(
            f"the next shard is {file.following}, not {number}: another program adds shards at the same time",
            hint="try again",
        )
    return file.add(url, store)


def start_shard(shard: ShardSpec, node: Node) -> Any:
    """Start the actor of a shard on a node."""
    cluster = shard.cluster
    return start_actor(ShardActor, name_shard(cluster.name, shard.number), node, cluster.actor, shard)


# -- tasks ---------------------------------------------------------------------------------------------


def find_store(path: Path) -> Found:
    """Return the uuid of the store at a path on this node, and a free port.

    Raises:
        StateError: Something else is there.
        NotFoundError: The folder above it does not exist.
    """
    disk, uuid = Disk(), _read_uuid(path)
    where = _name_node()
    if uuid is None and disk.exists(path):
        raise StateError(f"{path} on node {where} is not a store", kind="exists", hint="use another path")
    if not disk.is_dir(path.parent):
        raise NotFoundError(f"there is no folder {path.parent} on node {where}", hint="create it")
    return Found(uuid, _find_port(where))


def _check_origin(found: str, origin: Restored) -> None:
    if found != origin.expected:
        raise StateError(
            f"the versions in {origin.source} are of store {found}, and the shard was store "
            f"{origin.expected}",
            kind="other_store", hint="pass the address to which this shard was pushed",
        )  # fmt: skip


def load_file(path: Path) -> ClusterFile | None:
    """Return the cluster file of an earlier start; None if there is none."""
    disk = Disk()
    return ClusterFile.load(path) if disk.exists(path) else None


def split_shard(path: Path, rows: int) -> list[tuple[int, int]]:
    """Return ranges of episodes of about this many rows."""
    from expstore.exchange.tables import find_episode_ranges

    return find_episode_ranges(path, rows)


def read_shard(
    path: Path, number: int, episodes: tuple[int, int], where: str | None, fields: Sequence[str] | None
) -> tuple[Any, int]:
    """Return the rows of a range of episodes as an Arrow table, with the column `_shard`, and their number.

    Args:
        path: The store.
        number: Number of the shard.
        episodes: The first and the last episode.
        where: SQL condition over `transitions`.
        fields: Names of the fields.
    """
    import numpy as np

    from expstore.exchange.tables import read_table

    table = read_table(path, episodes, where=where, fields=fields)
    return table.append_column("_shard", [np.full(table.num_rows, number, np.int64)]), table.num_rows


def _name_node() -> str:
    address: str = ray.util.get_node_ip_address()
    return address


def _find_port(address: str) -> int:
    import socket

    with socket.create_server((address, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def port_of(url: str) -> int:
    """Return the port in an address."""
    port = urlsplit(url).port
    assert port is not None, "servers tell their ports"
    return port
