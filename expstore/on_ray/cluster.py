"""Shards on Ray: start stores on its nodes, restart them in place, find them from any program.

Each shard is an actor that serves one store by the server of `expstore serve`; Ray places and restarts it.
Rows go over the servers' own connections, never through Ray. Needs ray: `pip install 'expstore[ray]'`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from expstore.cluster.members import ClusterFile, MemberList, ShardEntry
from expstore.disk.local_path import local_path
from expstore.errors import (
    ArgumentError,
    ExpStoreError,
    NotFoundError,
    NotReadyError,
    RemoteError,
    StateError,
)
from expstore.on_ray.actors import (
    ClusterSpec,
    Found,
    Registry,
    Restored,
    Running,
    ShardSpec,
    find_store,
    load_file,
    port_of,
    read_shard,
    split_shard,
    start_shard,
)
from expstore.on_ray.buffer import RayShardedReplayBuffer
from expstore.on_ray.members import (
    RayMembers,
    check_initialized,
    find_registry,
    name_registry,
    ray,
    wait_for,
)
from expstore.on_ray.nodes import (
    OWN_OPTIONS,
    STOP_SECONDS,
    Node,
    address_of,
    choose_nodes,
    find_head,
    find_shard,
    has_actor,
    kill_shard,
    pick_node,
    read_nodes,
    run_on,
    start_actor,
    submit,
    wait_until_free,
)
from expstore.remote.connect_options import ConnectOptions
from expstore.remote.transport import Retries

__all__ = ["Cluster", "RayMembers", "RayShardedReplayBuffer", "Replaced", "ShardStatus", "find", "start"]

_PLACE = "{shard}"
#: Seconds that an actor has to tell its status before it counts as not answering.
_ANSWER_SECONDS = 5.0
#: Rows of a block of a Ray data set.
_BLOCK_ROWS = 100_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ShardStatus:
    """A shard of a running cluster.

    Args:
        number: Its number.
        node: The address of its node.
        url: Address of the store.
        path: The store's folder on the node.
        accepts: Whether it accepts new sources; False: it is retired.
        state: "serving"; "restarting" or unreachable; "lost": its node has left; or why its store cannot be
            served.
        pid: Id of its process on the node; None unless it serves.
        rows: Number of readable rows; None unless it serves.
        written: Number of rows that were ever written, as far as it is known.
    """

    number: int
    node: str
    url: str
    path: Path
    accepts: bool
    state: str
    pid: int | None
    rows: int | None
    written: int | None


@dataclass(frozen=True)
class Replaced:
    """A shard that took the place of a lost one.

    Args:
        shard: The number of the new shard.
        rows: Number of its readable rows.
        missing: Number of rows that were written to the lost shard after the version was made, as far as it
            reported: a report is a second old. None: it did not report since the registry's last start.
    """

    shard: int
    rows: int
    missing: int | None


class Cluster:
    """A running cluster of shards on Ray.

    Threads: any number may use it; one at a time should change the cluster. Processes: a copy in a task or an
    actor is the same cluster. Crashes: shards and registry are detached actors, which live on without the
    program that started them; Ray restarts them on their nodes.

    Args:
        spec: What it was started with.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec, self._members = spec, RayMembers(spec.name)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}, {len(self._members.read().members)} shards)"

    @property
    def name(self) -> str:
        """The name with which `find` finds it."""
        return self._spec.name

    @property
    def token(self) -> str:
        """The access token of the shards' servers."""
        return self._spec.token

    @property
    def members(self) -> MemberList:
        """The shards with their addresses."""
        return self._members.read()

    def buffer(
        self, *, timeout: float = 30.0, retries: Retries | None = None, **options: Any
    ) -> RayShardedReplayBuffer:
        """Return a buffer over all shards, which follows changes of the cluster.

        It can be passed to tasks and actors of Ray: each copy opens its own connections.

        Args:
            timeout: As for `expstore.connect`.
            retries: As for `expstore.connect`.
            options: The other options of `expstore.connect`: `batch_size`, `sampler`, `seed`, `down`, ...

        Raises:
            RemoteError: A shard does not answer.
        """
        return RayShardedReplayBuffer(
            self._members, ConnectOptions(**options), token=self.token, timeout=timeout, retries=retries
        )

    # -- changes -----------------------------------------------------------------------------------

    def add(self, n: int = 1, *, nodes: Sequence[str] | None = None) -> list[int]:
        """Add empty shards; return their numbers. Sources that are new go to them, too.

        Args:
            n: How many.
            nodes: Ids or addresses of the nodes, in turn; None: the nodes with the fewest shards.

        Raises:
            StateError: Another program changes the cluster at the same time, or a path exists.
            NotFoundError: There is no such node, or no folder for the store on it.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n!r}")
        places = choose_nodes(nodes)
        members = self._members
        return [
            self._grow(places[lap % len(places)] if nodes else pick_node(places, members.read()), None)
            for lap in range(n)
        ]

    def _grow(self, node: Node, origin: Restored | None, lost: int | None = None) -> int:
        """Start a shard on a node and note it in the registry; return its number.

        Args:
            node: The node.
            origin: The version of which its store is made; None: it is empty.
            lost: Number of the shard that it replaces.
        """
        number: int = wait_for(self._registry.next_number.remote())
        path = self._spec.find_path(number)
        found: Found = run_on(node, find_store, path)
        if found.uuid is not None:
            raise StateError(
                f"{path} on node {node.address} is a store already", kind="exists",
                hint="move it away: the next shard has this path",
            )  # fmt: skip
        actor = start_shard(ShardSpec(self._spec, number, node.address, found.port, origin=origin), node)
        try:
            running: Running = wait_for(actor.read_status.remote())
            facts = (number, running.url, running.uuid)
            registry = self._registry
            change = registry.add.remote(*facts) if lost is None else registry.replace.remote(lost, *facts)
            self._members.take(wait_for(change))
        except BaseException:
            ray.kill(actor, no_restart=True)
            raise
        return number

    def retire(self, shard: int) -> None:
        """Let a shard accept no new sources. Its rows are still sampled.

        Args:
            shard: Its number.

        Raises:
            NotFoundError: There is no such shard.
            StateError: It is retired, or the last one that accepts sources.
        """
        self._members.take(wait_for(self._registry.retire.remote(shard)))

    def remove(self, shard: int) -> None:
        """Take a retired shard out of the cluster and stop its server. Its store remains on the node.

        Args:
            shard: Its number.

        Raises:
            NotFoundError: There is no such shard.
            StateError: It is not retired.
        """
        self._members.take(wait_for(self._registry.remove.remote(shard)))
        self._stop_actor(shard)

    def replace(
        self, shard: int, *, from_: Any, version: int | str | None = None, node: str | None = None
    ) -> Replaced:
        """Replace a shard whose node or disk is gone for good by a version of it.

        The new shard has another number, and its rows have the ids that they had. Rows that were written
        after the version are lost; the result says how many.

        Args:
            shard: Number of the lost shard.
            from_: Where the version is: a URL to which `expstore.cold.push` sent it, an
                `expstore.cold.ObjectStorage`, or a folder that the new node can read.
            version: Number or tag of the version; None: the newest.
            node: Id or address of the node of the new shard; None: the node with the fewest shards.

        Raises:
            NotFoundError: There is no such shard or node.
            StateError: The shard answers: `retire` it instead. Or the version is of another store.
            SnapshotError: There is no such version.
        """
        members = {member.number: member for member in self._ask_members().members}
        if shard not in members:
            known = ", ".join(map(str, members))
            raise NotFoundError(f"there is no shard {shard}", hint=f"there are {known}")
        status = self._read_status(members[shard])
        if status.state == "serving":
            raise StateError(
                f"shard {shard} answers at {status.url}: replacing it would lose rows",
                hint="retire() it, or stop its node for good first",
            )
        place = pick_node(choose_nodes(None if node is None else [node]), self._members.read())
        number = self._grow(place, Restored(from_, version, str(members[shard].uuid)), shard)
        kill_shard(self.name, shard)
        running = wait_for(find_shard(self.name, number).read_status.remote())
        missing = None if status.written is None else max(0, status.written - running.written)
        return Replaced(number, running.rows, missing)

    def stop(self) -> None:
        """Finish running requests, close the stores, and end the actors.

        The stores and the cluster file remain: `start` with the same name and path opens them again.

        Raises:
            RemoteError: An actor did not end.
        """
        wait_for(self._registry.end_watch.remote())
        for member in self._ask_members().members:
            self._stop_actor(member.number)
        ray.kill(self._registry, no_restart=True)
        wait_until_free(name_registry(self.name))

    # -- status ------------------------------------------------------------------------------------

    def status(self) -> list[ShardStatus]:
        """Return what is known of each shard.

        Raises:
            NotFoundError: The cluster was stopped.
        """
        return [self._read_status(member) for member in self._ask_members().members]

    def _read_status(self, member: ShardEntry) -> ShardStatus:
        written: int | None = wait_for(self._registry.find_written.remote(member.number))
        address = address_of(member)
        running: Running | None = None
        state = "serving"
        if address not in {node.address for node in read_nodes()}:
            state = "lost"
        else:
            try:
                actor = find_shard(self.name, member.number)
                running = wait_for(actor.read_status.remote(), seconds=_ANSWER_SECONDS)
            except RemoteError:
                state = "restarting"
            except ExpStoreError as exc:
                state = str(exc)
        return ShardStatus(
            member.number, address, member.url, self._spec.find_path(member.number), member.accepts, state,
            running and running.pid, None if running is None else running.rows,
            written if running is None else running.written,
        )  # fmt: skip

    # -- Ray Data ----------------------------------------------------------------------------------

    def to_ray_dataset(
        self,
        *,
        where: str | None = None,
        fields: Sequence[str] | None = None,
        block_rows: int = _BLOCK_ROWS,
    ) -> Any:
        """Return the rows of all shards as a `ray.data.Dataset`.

        One task per shard and range of episodes reads on the shard's node, as a reader of the store's files,
        so the servers are not asked. Columns are those of `expstore.exchange.export_arrow`, and `_shard`.
        Rows that are written later are not part of it.

        Args:
            where: SQL condition over the relation `transitions`; None: all rows.
            fields: Names of the fields to read; None: all.
            block_rows: About how many rows a task reads. A longer episode is read by one task.

        Raises:
            QueryError: `where` is not a valid condition.
            SchemaError: A field does not exist.
            NotReadyError: No shard has rows.
            RemoteError: The node of a shard is lost.
        """
        from ray.data import from_arrow_refs

        nodes = {node.address: node for node in read_nodes()}
        places: list[tuple[int, Path, Node]] = []
        for member in self._ask_members().members:
            node = nodes.get(address_of(member))
            if node is None:
                raise RemoteError(f"the node of shard {member.number} ({member.url}) has left", kind="lost")
            places.append((member.number, self._spec.find_path(member.number), node))
        ranges = wait_for([submit(node, split_shard, path, block_rows) for _, path, node in places])
        answers = [
            submit(node, read_shard, path, number, episodes, where, fields, returns=2)
            for (number, path, node), found in zip(places, ranges, strict=True)
            for episodes in found
        ]
        if not answers:
            raise NotReadyError("no shard has rows yet", hint="extend the buffer first")
        wait_for([rows for _, rows in answers])  # raises what a task raised, and fetches no table
        return from_arrow_refs([table for table, _ in answers])

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def _registry(self) -> Any:
        return find_registry(self.name)

    def _ask_members(self) -> MemberList:
        found: MemberList = wait_for(self._registry.read.remote(0))
        self._members.take(found)
        return found

    def _stop_actor(self, number: int) -> None:
        with contextlib.suppress(ExpStoreError):  # it does not answer, and is killed
            wait_for(find_shard(self.name, number).stop.remote(), seconds=STOP_SECONDS)
        kill_shard(self.name, number)


def find(name: str = "expstore") -> Cluster:
    """Return a running cluster.

    Args:
        name: The name that `start` was given.

    Raises:
        NotFoundError: There is no cluster of this name.
        StateError: This process is not connected to Ray.

    Example:
        >>> cluster = expstore.cluster.ray.find("expstore")  # doctest: +SKIP
        >>> rb = cluster.buffer(batch_size=256)  # doctest: +SKIP
    """
    return Cluster(wait_for(find_registry(name).describe.remote()))


def start(
    path: str | PathLike[str],
    *,
    shards: int | None = None,
    capacity: int | None = None,
    nodes: Sequence[str] | None = None,
    token: str | None = None,
    name: str = "expstore",
    file: str | PathLike[str] | None = None,
    allow_lost: bool = False,
    store: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    actor: Mapping[str, Any] | None = None,
) -> Cluster:
    """Start a cluster of shards on Ray: create their stores, or open those of an earlier start.

    Each shard is a detached actor, pinned to its node. It serves its store on the node's address at a free
    port, and only requests with the token are answered. If its process dies, Ray starts it again on the same
    node with the same store, at the same port if that is free. A registry, an actor on the head node, keeps
    the list of the shards in a cluster file, and moves shards that are shipped from nodes that have left.

    Ray must have been initialized, and is not shut down by this library.

    Args:
        path: Path of the stores, in which `{shard}` stands for the number of the shard. A relative path
            is completed on this machine.
        shards: Number of shards. None: as many as the cluster file lists, or one for each node.
        capacity: The largest number of readable rows of each new store; None: without bound.
        nodes: Ids or addresses of the nodes of the shards of a new cluster, in turn; None: all nodes, ordered
            by address.
        token: The access token; None: a new one. Programs that can use Ray can read it.
        name: Name of the cluster, for `find`.
        file: The cluster file, on the head node; None: `NAME.cluster.json` in the folder above the stores.
        allow_lost: Start although the node or the store of a shard is missing, in order to `replace` it.
            Shards that are shipped need it not: they are restored.
        store: More options of `expstore.open` for new stores.
        server: More options of `expstore.api.Settings`, such as `samples_per_insert`. With `ship`, a shard
            whose node or disk is lost is restored from what was shipped, also by a start without the file.
        actor: Options of Ray for the actors of shards, such as `num_cpus` (0 by default) or `memory`.

    Raises:
        StateError: This process is not connected to Ray; a cluster of this name runs; or some of the stores
            exist, and others do not.
        NotFoundError: There is no such node, or no folder for a store on it.
        ArgumentError: An option is unknown, or has the wrong value.
        RemoteError: Ray cannot start an actor.

    Example:
        >>> import ray
        >>> ray.init(address="auto")  # doctest: +SKIP
        >>> cluster = expstore.cluster.ray.start(  # doctest: +SKIP
        ...     "/data/run-{shard}.exp", shards=4, capacity=1_000_000
        ... )
        >>> rb = cluster.buffer(batch_size=256, seed=0)  # doctest: +SKIP
    """
    check_initialized()
    spec = _describe(path, capacity, token, name, file, store, server, actor)
    if shards is not None and shards < 1:
        raise ArgumentError(f"shards must be at least 1, got {shards!r}")
    if has_actor(name_registry(name)):
        raise StateError(
            f"a cluster {name!r} runs already", kind="exists",
            hint="use it: expstore.cluster.ray.find(), stop it, or choose another name",
        )  # fmt: skip
    head = find_head()
    known: ClusterFile | None = run_on(head, load_file, spec.file)
    if known is None:
        if allow_lost:
            raise ArgumentError(f"allow_lost is for an earlier cluster, and there is no file {spec.file}")
        places = _place_stores(spec, choose_nodes(nodes), shards)
    else:
        if nodes is not None:
            raise ArgumentError(f"nodes= is for a new cluster: {spec.file} says where the shards are")
        if shards not in (None, len(known.list.members)):
            raise StateError(
                f"{spec.file} lists {len(known.list.members)} shards, and {shards} were asked for",
                hint="leave shards= out, then add() or retire() shards",
            )
        places = _find_stores(spec, known, allow_lost)
    actors: list[Any] = []
    try:
        for shard, node in places:
            actors.append(start_shard(shard, node))  # one by one: if the next fails, this one is ended
        running = {
            shard.number: one
            for actor, (shard, _) in zip(actors, places, strict=True)
            if (one := _wait_until_it_serves(actor, allow_lost)) is not None
        }
        first = known or ClusterFile.of([(one.url, one.uuid) for one in running.values()])
        for number, one in running.items():
            if one.url != first.find(number).url:
                first = first.move(number, one.url, one.uuid)
        registry = start_actor(Registry, name_registry(name), head, {"num_cpus": 0}, spec, first)
        actors.append(registry)
        wait_for(registry.read.remote(0))
        return Cluster(spec)
    except BaseException:
        for one in actors:
            ray.kill(one, no_restart=True)
        raise


def _describe(
    path: str | PathLike[str],
    capacity: int | None,
    token: str | None,
    name: str,
    file: str | PathLike[str] | None,
    store: Mapping[str, Any] | None,
    server: Mapping[str, Any] | None,
    actor: Mapping[str, Any] | None,
) -> ClusterSpec:
    """Check the arguments of `start`."""
    from expstore.api.settings import Settings

    text = str(local_path(path).absolute())
    if _PLACE not in text:
        raise ArgumentError(f"path must have {_PLACE}, for the number of the shard; got {text!r}")
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"{name!r} is not a name: use at most 100 letters, digits, '.', '_' and '-'")
    for what, options, own in (
        ("store", store, {"path", "mode", "capacity", "version", "ship"}),
        ("server", server, {"path", "token", "read_only"}),
        ("actor", actor, OWN_OPTIONS),
    ):
        if taken := sorted(own & set(options or {})):
            raise ArgumentError(f"{what}= must not have {taken[0]!r}, which start() sets itself")
    above = next(folder for folder in Path(text).parents if _PLACE not in str(folder))
    spec = ClusterSpec(
        name=name,
        path=text,
        file=above / f"{name}.cluster.json" if file is None else local_path(file).absolute(),
        token=secrets.token_urlsafe(32) if token is None else token,
        store={"capacity": capacity} | dict(store or {}),
        server=dict(server or {}),
        actor={"num_cpus": 0} | dict(actor or {}),
    )
    try:
        Settings(path=spec.find_path(0), token=spec.token.encode(), **spec.server)
    except TypeError as exc:
        raise ArgumentError(f"server= has an option that a server does not have: {exc}") from exc
    if (address := spec.find_address(0)) is not None and address == spec.find_address(1):
        raise ArgumentError(
            f"all shards would be shipped to {address}", hint=f"name the folders run-{_PLACE}.exp"
        )
    return spec


def _place_stores(
    spec: ClusterSpec, nodes: Sequence[Node], shards: int | None
) -> list[tuple[ShardSpec, Node]]:
    """Choose the nodes of a new cluster; the actors create the stores, unless all of them exist."""
    count = len(nodes) if shards is None else shards
    places = [nodes[number % len(nodes)] for number in range(count)]
    paths = [spec.find_path(number) for number in range(count)]
    jobs = [submit(node, find_store, path) for node, path in zip(places, paths, strict=True)]
    found: list[Found] = wait_for(jobs)
    there = [number for number, one in enumerate(found) if one.uuid is not None]
    if there and len(there) < count:
        missing = next(number for number in range(count) if number not in there)
        raise StateError(
            f"{paths[there[0]]} on node {places[there[0]].address} exists, and {paths[missing]} on node "
            f"{places[missing].address} does not; there is no cluster file {spec.file}",
            kind="exists", hint="choose another path, pass the nodes= of the existing stores, or their file=",
        )  # fmt: skip
    return [
        (ShardSpec(spec, number, node.address, one.port, one.uuid), node)
        for number, (one, node) in enumerate(zip(found, places, strict=True))
    ]


def _find_stores(spec: ClusterSpec, known: ClusterFile, allow_lost: bool) -> list[tuple[ShardSpec, Node]]:
    """Find the stores that a cluster file lists."""
    nodes = {node.address: node for node in read_nodes()}
    places = []
    for member in known.list.members:
        node = nodes.get(address_of(member))
        if node is not None:
            shard = ShardSpec(spec, member.number, node.address, port_of(member.url), member.uuid)
            places.append((shard, node))
        elif not allow_lost and spec.find_address(0) is None:  # the registry moves what is shipped
            raise StateError(
                f"shard {member.number} was on node {address_of(member)}, which is not in this Ray cluster",
                kind="lost", hint="start the node, or pass allow_lost=True and replace() the shard",
            )  # fmt: skip
    return places


def _wait_until_it_serves(actor: Any, allow_lost: bool) -> Running | None:
    """Return the status of a shard once it serves.

    Raises:
        ExpStoreError: Its store cannot be served; with `allow_lost`, the result is None then.
    """
    try:
        found: Running = wait_for(actor.read_status.remote())
        return found
    except ExpStoreError:
        if allow_lost:
            return None
        raise
