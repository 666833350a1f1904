"""The nodes of a Ray cluster: find them, run tasks and detached actors on one of them, end an actor.

Used by `expstore.on_ray.cluster`, and by the registry, which moves shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from expstore.cluster.members import MemberList, ShardEntry
from expstore.errors import ArgumentError, NotFoundError, RemoteError, StateError
from expstore.on_ray.members import NAMESPACE, ray, wait_for

#: The resource that only the head node of Ray has.
_HEAD = "node:__internal_head__"
#: Seconds that a shard may take to close its store, and Ray to end an actor.
STOP_SECONDS = 60.0
_PAUSE_SECONDS = 0.05
#: Options of actors that we set.
OWN_OPTIONS = {
    "get_if_exists",
    "lifetime",
    "max_restarts",
    "max_task_retries",
    "name",
    "namespace",
    "scheduling_strategy",
}


class Node(NamedTuple):
    """A node of Ray.

    Args:
        id: Its id.
        address: Its address.
    """

    id: str
    address: str


def read_nodes() -> list[Node]:
    """Return the nodes that are alive, ordered by address."""
    found = [Node(one["NodeID"], one["NodeManagerAddress"]) for one in ray.nodes() if one["Alive"]]
    return sorted(found, key=lambda node: (node.address, node.id))


def find_head() -> Node:
    """Return the head node, on which the registry runs."""
    for one in ray.nodes():
        if one["Alive"] and _HEAD in one["Resources"]:
            return Node(one["NodeID"], one["NodeManagerAddress"])
    raise StateError("Ray tells no head node, on which the registry runs", kind="ray")


def choose_nodes(names: Sequence[str] | None) -> list[Node]:
    """Return nodes by their ids or addresses, in this order; None: all.

    Raises:
        NotFoundError: There is no such node.
    """
    alive = read_nodes()
    if names is None:
        return alive
    if isinstance(names, str) or not names:
        raise ArgumentError(f"nodes must be a list of ids or addresses, got {names!r}")
    chosen = []
    for name in names:
        node = next((node for node in alive if name in node), None)
        if node is None:
            known = ", ".join(node.address for node in alive)
            raise NotFoundError(f"there is no node {name!r} in this Ray cluster", hint=f"there are {known}")
        chosen.append(node)
    return chosen


def pick_node(nodes: Sequence[Node], members: MemberList) -> Node:
    """Return the node with the fewest shards."""
    used = [address_of(member) for member in members.members]
    return min(nodes, key=lambda node: used.count(node.address))


def _pin(node: Node) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)


def submit(node: Node, function: Callable[..., Any], *arguments: Any, returns: int = 1) -> Any:
    """Start a function in a task on a node."""
    task = ray.remote(function).options(num_cpus=0, num_returns=returns, scheduling_strategy=_pin(node))
    return task.remote(*arguments)


def run_on(node: Node, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a task on a node; return its result."""
    return wait_for(submit(node, function, *arguments))


def start_actor(cls: type, name: str, node: Node, options: Mapping[str, Any], *arguments: Any) -> Any:
    """Start a detached actor on a node.

    Raises:
        StateError: There is an actor of this name.
    """
    made = ray.remote(cls).options(
        **options, name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, max_task_retries=-1,
        scheduling_strategy=_pin(node),
    )  # fmt: skip
    try:
        return made.remote(*arguments)
    except ray.exceptions.ActorAlreadyExistsError as exc:
        raise StateError(
            f"an actor {name!r} runs already in the namespace {NAMESPACE!r} of Ray", kind="exists",
            hint=f"stop its cluster, or, if it has none: ray.kill(ray.get_actor({name!r}, {NAMESPACE!r}))",
        ) from exc  # fmt: skip


def name_shard(cluster: str, number: int) -> str:
    """Return the name of a shard's actor."""
    return f"{cluster}:shard-{number}"


def find_shard(cluster: str, number: int) -> Any:
    """Return the actor of a shard.

    Raises:
        NotFoundError: It was not started, or has been stopped.
    """
    try:
        return ray.get_actor(name_shard(cluster, number), namespace=NAMESPACE)
    except ValueError as exc:
        raise NotFoundError(f"shard {number} of cluster {cluster!r} has no actor") from exc


def has_actor(name: str) -> bool:
    """Return whether there is an actor of this name."""
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def kill_shard(cluster: str, number: int) -> None:
    """End the actor of a shard, if there is one, for good.

    Raises:
        RemoteError: It did not end.
    """
    try:
        actor = find_shard(cluster, number)
    except NotFoundError:
        return
    ray.kill(actor, no_restart=True)
    wait_until_free(name_shard(cluster, number))


def wait_until_free(name: str) -> None:
    """Wait until an actor that was killed is gone.

    Raises:
        RemoteError: It is not.
    """
    deadline, pause = time.monotonic() + STOP_SECONDS, threading.Event()
    while has_actor(name):
        if time.monotonic() > deadline:
            raise RemoteError(f"actor {name!r} did not end in {STOP_SECONDS:.0f} s", kind="unreachable")
        pause.wait(_PAUSE_SECONDS)


def address_of(member: ShardEntry) -> str:
    """Return the address of a member's node."""
    return str(urlsplit(member.url).hostname)
