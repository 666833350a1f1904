"""Places where rows of a member can live: in this process, behind an owner, on a server."""

from __future__ import annotations

import os
import pickle
import signal
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import expstore
from expstore.api import Settings
from expstore.buffers.local_member import LocalMember
from expstore.buffers.member import Member
from expstore.errors import ExpStoreError, RemoteError, StateError
from expstore.remote import Retries
from tests.support.servers import KillableServer, Serving
from tests.support.shard_rows import rows_of
from tests.support.tcp_proxy import Proxy
from tests.support.waits import wait_until

SOON = Retries(seconds=60, first=0.01, longest=0.05, seed=3)
#: Rows of a store, and the length of their episodes.
COUNT, LENGTH = 60, 6

#: What a place cannot do, and the error that it raises.
CANNOT: dict[tuple[str, str], type[ExpStoreError]] = {
    ("shared", "consume"): StateError,  # counts of draws are written by the owner only
    ("shared", "restore"): StateError,  # only the owner replaces the content
}


class Place:
    """A store somewhere, with a member over it and a buffer over it.

    Args:
        folder: An empty folder.
        capacity: Capacity of the store; None: it has none.
    """

    name: str
    member: Member
    rb: Any

    def __init__(self, folder: Path, capacity: int | None = None) -> None:
        self.folder, self.path, self.capacity = folder, folder / "run.exp", capacity
        expstore.open(self.path, capacity=capacity, mode="x", seed=1).close()
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Start the other side, and reach it."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the other side, if there is one; close this one."""

    def end(self) -> None:
        """Close everything."""
        self.member.close()
        self.rb.close()

    def make_other(self) -> Member:
        """Return another member over the same store."""
        return LocalMember(self.rb)

    def restart(self) -> None:
        self.kill()
        self.begin()

    def append(self, count: int = COUNT, first: int = 0, **options: Any) -> NDArray[np.int64]:
        """Append rows; return their ids once they can be read here."""
        ids: NDArray[np.int64] = self.rb.extend(
            rows_of(count, LENGTH, first), return_ids=True, **options
        ).numpy()
        self.settle(ids)
        return ids

    def settle(self, ids: Any) -> None:
        """Wait until rows can be read here."""

    def weights(self) -> dict[int, float]:
        """Return the priority of each row, by its id."""
        return dict(self.rb.sql("SELECT _id, _priority FROM transitions ORDER BY _id").fetchall())

    def count(self) -> int:
        return int(self.rb.sql("SELECT count(*) FROM transitions").fetchone()[0])


class Local(Place):
    """The store is open in this process."""

    name = "local"

    def begin(self) -> None:
        self.rb = expstore.open(self.path)
        self.member = LocalMember.of(self.rb)

    def kill(self) -> None:
        self.end()


class Shared(Place):
    """Another process has the store open; this one has a copy of its shared buffer."""

    name = "shared"

    def begin(self) -> None:
        read_end, write_end = os.pipe()
        self.owner = os.fork()
        if not self.owner:
            try:
                torch.set_num_threads(1)
                rb = expstore.open(self.path).share()
                os.write(write_end, pickle.dumps(rb))
                os.close(write_end)
                signal.pause()
            finally:
                os._exit(1)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            self.rb = pickle.load(pipe)
        self.member = LocalMember.of(self.rb)

    def kill_owner(self) -> None:
        if self.owner:
            os.kill(self.owner, signal.SIGKILL)
            os.waitpid(self.owner, 0)
            self.owner = 0

    def kill(self) -> None:
        self.kill_owner()
        super().end()

    def end(self) -> None:
        self.kill()

    def settle(self, ids: Any) -> None:
        """Rows of small batches can be read 0.1 s after they were committed."""
        newest = int(ids[-1])
        wait_until(lambda: self.rb.storage.window.last >= newest)


class Served(Place):
    """A server has the store open, behind a proxy that can lose and delay answers."""

    name = "served"

    def __init__(self, folder: Path, capacity: int | None = None) -> None:
        #: What happens to the next connections, in order, or a function to call before one is forwarded.
        self.trouble: list[str | Callable[[], object]] = []
        self.other_members: list[Any] = []
        super().__init__(folder, capacity)

    def begin(self) -> None:
        self.serving = Serving(Settings(path=self.folder, sql_seconds=60.0))
        self.serving.__enter__()
        self.reach(self.serving.port)

    def reach(self, port: int) -> None:
        self.proxy = Proxy(port, self.next_trouble)
        self.proxy.__enter__()
        self.rb = self.connect()
        self.member = self.rb.member

    def next_trouble(self, _: int) -> str:
        trouble = self.trouble.pop(0) if self.trouble else ""
        if isinstance(trouble, str):
            return trouble
        trouble()
        return ""

    def connect(self, **options: Any) -> Any:
        url = f"http://127.0.0.1:{self.proxy.port}/run"
        return expstore.connect(url, **({"retries": SOON} | options))

    def make_other(self) -> Member:
        other = self.connect()
        self.other_members.append(other)
        return other.member  # type: ignore[no-any-return]

    def lose(self, *trouble: str | Callable[[], object]) -> None:
        """Let something happen to the next connections, which are opened because all are reset."""
        self.trouble[:] = trouble
        self.proxy.cut()

    def kill(self) -> None:
        self.end()

    def end(self) -> None:
        super().end()
        for other in self.other_members:
            other.close()
        self.proxy.__exit__()
        self.serving.__exit__()


class Killable(Served):
    """The server is a process of its own, which is killed."""

    def begin(self) -> None:
        self.server = KillableServer(self.folder)
        wait_until(self.answers)
        self.reach(self.server.port)

    def answers(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.server.port}/run"
            expstore.connect(url, retries=Retries(seconds=0)).close()
        except RemoteError:
            return False
        return True

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        """The member, and the buffer, remain those that they were."""
        self.server.kill()
        self.server.begin()

    def end(self) -> None:
        super(Served, self).end()
        self.proxy.__exit__()
        self.server.kill()


PLACES: dict[str, type[Place]] = {"local": Local, "shared": Shared, "served": Served}
