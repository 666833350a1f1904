"""The shards of a cluster on Ray, as its registry lists them, and calls of actors.

Used by clients, which ask the registry for the addresses of shards, and by the actors. It loads no torch.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from expstore.cluster.members import MemberList
from expstore.errors import ExpStoreError, MissingExtraError, NotFoundError, RemoteError, StateError

try:
    import ray as _ray
    from ray import exceptions
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "clusters on Ray need ray, which is not installed", hint="pip install 'expstore[ray]'"
    ) from exc

#: Most of its functions have no types.
ray: Any = _ray
#: The namespace of Ray in which our actors have their names.
NAMESPACE = "expstore"
#: Seconds for which a list is used before the registry is asked again.
_FRESH_SECONDS = 0.5
#: Seconds that `read` waits for the answer to a new question; afterwards it returns the list that it has.
_WAIT_SECONDS = 0.1


def check_initialized() -> None:
    """Raise StateError if this process is not connected to Ray."""
    if not ray.is_initialized():
        raise StateError(
            "this process is not connected to Ray",
            kind="ray", hint="call ray.init() first, or ray.init(address='auto') to join a running one",
        )  # fmt: skip


def find_registry(name: str) -> Any:
    """Return the actor that has the list of a cluster.

    Raises:
        NotFoundError: There is no cluster of this name.
        StateError: This process is not connected to Ray.
    """
    check_initialized()
    try:
        return ray.get_actor(name_registry(name), namespace=NAMESPACE)
    except ValueError as exc:
        raise NotFoundError(
            f"there is no cluster {name!r} in this Ray cluster", hint="start it: expstore.cluster.ray.start()"
        ) from exc


def name_registry(name: str) -> str:
    """Return the name of a cluster's registry among the actors."""
    return f"{name}:registry"


def wait_for(answer: Any, *, seconds: float | None = None) -> Any:
    """Return the result of a call, or of a list of calls.

    Raises:
        ExpStoreError: What the function raised.
        RemoteError: Ray could not run it, or there was no answer in time.
    """
    try:
        return ray.get(answer, timeout=seconds)
    except exceptions.RayTaskError as exc:
        if isinstance(exc.cause, ExpStoreError):
            raise exc.cause from exc
        raise
    except exceptions.RayActorError as exc:
        raise RemoteError(f"an actor does not answer: {_first_line(exc)}", kind="unreachable") from exc
    except exceptions.RayError as exc:
        raise RemoteError(f"Ray cannot do it: {_first_line(exc)}", kind="unreachable") from exc


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class RayMembers:
    """The shards that the registry of a cluster on Ray lists.

    The registry is asked at most twice a second. While it restarts, the list that it told last is used.

    Threads: any number may read. Processes: a copy in a process that is connected to Ray asks the registry
    itself. Elsewhere, and in a forked child, where Ray cannot be used, a copy keeps the list that it came
    with.

    Args:
        name: Name of the cluster.

    Raises:
        NotFoundError: There is no cluster of this name.
        StateError: This process is not connected to Ray.
    """

    named = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: MemberList = wait_for(find_registry(name).read.remote(0))
        self._start()

    def _start(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._asked = time.monotonic()
        #: The answer to a question that is under way.
        self._answer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {"_name": self._name, "_known": self._known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self._start()
        self._asked = float("-inf")

    def read(self) -> MemberList:
        """Return the current list; a change is noticed within a second.

        Raises:
            NotFoundError: The cluster was stopped.
        """
        if self._pid != os.getpid() or not ray.is_initialized():
            return self._known
        with self._lock:
            wait = 0.0
            if self._answer is None and time.monotonic() - self._asked >= _FRESH_SECONDS:
                self._asked, wait = time.monotonic(), _WAIT_SECONDS
                self._answer = find_registry(self._name).read.remote(self._known.revision)
            if self._answer is not None and ray.wait([self._answer], timeout=wait)[0]:
                answer, self._answer = self._answer, None
                try:
                    self._take(wait_for(answer))
                except RemoteError:  # it restarts: the next question goes to its successor
                    find_registry(self._name)
            return self._known

    def take(self, found: MemberList) -> None:
        """Use a list that the registry has returned for a change."""
        with self._lock:
            self._take(found)

    def _take(self, found: MemberList | None) -> None:
        if found is not None and found.revision > self._known.revision:
            self._known = found
