"""Which stores are the shards of a cluster: a fixed list of addresses, or a file that changes while in use.

Used by the buffer over several shards, which reads the list again between batches. This module sends no
requests.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from expstore.core.parsing import INVALID
from expstore.disk.files import Disk
from expstore.errors import LockedError, NotFoundError, StateError

if TYPE_CHECKING:
    from expstore.buffers.replay_buffer import ReplayBuffer

_FORMAT = 1


@dataclass(frozen=True)
class ShardEntry:
    """A shard of a cluster.

    Args:
        number: Its number, the first part of the ids of its rows. A number is never used for another store.
        url: Address of the store: `http://host:8420/name`. It may change if the store moves.
        uuid: Uuid of the store; None: the server is asked for it.
        accepts: Whether it accepts new sources. False for a retired shard: it is still sampled, and sources
            that have an open episode there continue to write to it.
    """

    number: int
    url: str
    uuid: str | None
    accepts: bool


@dataclass(frozen=True)
class MemberList:
    """The shards of a cluster at one time.

    Args:
        revision: Number of this list, from 1. Every change has a larger one.
        members: The shards, in the order of their numbers.
    """

    revision: int
    members: tuple[ShardEntry, ...]


class Members(Protocol):
    """Where a client reads which shards there are.

    An implementation must be picklable, because a buffer takes it along to other processes.
    """

    #: Whether the user, or a program of the user, chose the addresses, and not a file that others may write.
    named: bool

    def read(self) -> MemberList:
        """Return the current list.

        Clients call it at every request for batches, and about once a second in a thread, so it must be fast
        if nothing has changed.

        Raises:
            ExpStoreError: The list cannot be read.
        """


class FixedMembers:
    """Shards that never change: their numbers are their positions in a list.

    Threads: any number may read. Processes: a copy is the same list; buffers in it are copied, too.

    Args:
        places: The address of each served store, or the buffer of this process that has a store open.
    """

    named = True

    def __init__(self, places: Sequence[str | ReplayBuffer]) -> None:
        #: The buffers of this process, by number.
        self.here = {number: place for number, place in enumerate(places) if not isinstance(place, str)}
        members = (
            ShardEntry(number, "" if number in self.here else str(place), None, accepts=True)
            for number, place in enumerate(places)
        )
        self._list = MemberList(1, tuple(members))

    def read(self) -> MemberList:
        """Return the list, always the same."""
        return self._list


@dataclass(frozen=True)
class ClusterFile:
    """The content of a cluster file.

    The functions that change it return a new value, whose revision is larger by 1.

    Args:
        uuid: Uuid of the cluster.
        list: Its shards.
        following: The number of the next shard that is added.
    """

    uuid: str
    list: MemberList
    following: int

    @classmethod
    def of(cls, stores: Sequence[tuple[str, str]]) -> Self:
        """Return a new cluster of stores: the address and the uuid of each."""
        members = tuple(ShardEntry(number, url, store, True) for number, (url, store) in enumerate(stores))
        return cls(uuid.uuid4().hex, MemberList(1, members), len(members))

    def add(self, url: str, store: str) -> Self:
        """Add a store as a new shard.

        Args:
            url: Its address.
            store: Its uuid.

        Raises:
            StateError: It is a shard already.
        """
        known = next((member for member in self.list.members if member.uuid == store), None)
        if known is not None:
            raise StateError(
                f"{url} is the store of shard {known.number} ({known.url})", hint="add a store of its own"
            )
        member = ShardEntry(self.following, url, store, accepts=True)
        return replace(self._with((*self.list.members, member)), following=self.following + 1)

    def retire(self, number: int) -> Self:
        """Let a shard accept no new sources.

        Raises:
            NotFoundError: There is no such shard.
            StateError: It is retired already, or no other shard accepts sources.
        """
        member = self.find(number)
        if not member.accepts:
            raise StateError(f"shard {number} is retired already")
        if sum(other.accepts for other in self.list.members) == 1:
            raise StateError(f"shard {number} is the last one that accepts sources", hint="add another first")
        return self._replace(replace(member, accepts=False))

    def remove(self, number: int) -> Self:
        """Remove a retired shard: its rows are no longer sampled.

        Raises:
            NotFoundError: There is no such shard.
            StateError: It is not retired.
        """
        member = self.find(number)
        if member.accepts:
            raise StateError(f"shard {number} accepts sources", hint="retire it first")
        return self._with(tuple(other for other in self.list.members if other.number != number))

    def move(self, number: int, url: str, store: str) -> Self:
        """Note that the store of a shard has another address.

        Args:
            number: Number of the shard.
            url: The new address.
            store: Uuid of the store there.

        Raises:
            NotFoundError: There is no such shard.
            StateError: Another store is at this address.
        """
        member = self.find(number)
        if member.uuid != store:
            raise StateError(
                f"shard {number} is store {member.uuid}, and {url} is store {store}",
                hint="move the folder of the shard there and serve it, or add the other store as a new shard",
            )
        return self._replace(replace(member, url=url))

    def find(self, number: int) -> ShardEntry:
        """Return a shard.

        Raises:
            NotFoundError: There is no such shard.
        """
        for member in self.list.members:
            if member.number == number:
                return member
        known = ", ".join(str(member.number) for member in self.list.members)
        raise NotFoundError(f"there is no shard {number}", hint=f"there are {known}")

    def _replace(self, changed: ShardEntry) -> Self:
        members = self.list.members
        return self._with(tuple(changed if one.number == changed.number else one for one in members))

    def _with(self, members: tuple[ShardEntry, ...]) -> Self:
        return replace(self, list=MemberList(self.list.revision + 1, members))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a cluster file.

        Raises:
            NotFoundError: There is no such file.
            StateError: It is not a cluster file, or a newer version of expstore wrote it.
            StorageError: The disk failed.
        """
        disk = Disk()
        if not disk.exists(path):
            raise NotFoundError(
                f"there is no cluster file {path}", hint="make one: expstore cluster init FILE URL..."
            )
        if disk.is_dir(path):
            raise StateError(
                f"{path} is a folder, not a cluster file", hint="open a store with expstore.open"
            )
        try:
            facts = json.loads(disk.read_whole(path.resolve()))  # Kubernetes mounts files as links
            if facts["format"] > _FORMAT:
                raise StateError(
                    f"{path} is of format {facts['format']}, this version reads format {_FORMAT}",
                    hint="upgrade expstore",
                )
            members = tuple(_parse_member(shard) for shard in facts["shards"])
            found = cls(str(facts["uuid"]), MemberList(int(facts["revision"]), members), int(facts["next"]))
            numbers = [-1, *(member.number for member in members), found.following]
            if numbers != sorted(set(numbers)):
                raise ValueError(f"the numbers {numbers[1:]} do not ascend")
            return found
        except StateError:
            raise
        except INVALID as exc:
            raise StateError(f"{path} is not a cluster file: {type(exc).__name__}: {exc}") from exc

    def save(self, path: Path) -> None:
        """Replace the file by a rename: readers see the former content or this one.

        Raises:
            StorageError: The disk failed.
        """
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "uuid": self.uuid,
            "revision": self.list.revision,
            "next": self.following,
            "shards": [asdict(member) for member in self.list.members],
        }
        Disk().write_whole(path, json.dumps(facts, indent=1).encode() + b"\n")

    @classmethod
    def create(cls, path: Path, stores: Sequence[tuple[str, str]]) -> Self:
        """Write the file of a new cluster.

        Args:
            path: The file, which must not exist.
            stores: Address and uuid of each store.

        Raises:
            LockedError: Another process changes the file at the moment.
            StateError: The file exists.
            StorageError: The disk failed.
        """
        with _lock(path):
            disk = Disk()
            if disk.exists(path):
                raise StateError(
                    f"{path} exists", kind="exists", hint="choose another name, or add to it: cluster add"
                )
            made = cls.of(stores)
            made.save(path)
        return made

    @classmethod
    def change(cls, path: Path, act: Callable[[Self], Self]) -> Self:
        """Change a cluster file; one process at a time does.

        Args:
            path: The file.
            act: Returns the new content.

        Raises:
            LockedError: Another process changes the file at the moment.
            NotFoundError: There is no such file, or no such shard.
            StateError: The file cannot be read, or the change is refused.
            StorageError: The disk failed.
        """
        with _lock(path):
            changed = act(cls.load(path))
            changed.save(path)
        return changed


def _parse_member(facts: dict[str, Any]) -> ShardEntry:
    member = ShardEntry(**{field.name: facts[field.name] for field in fields(ShardEntry)})
    types = (int, str, str, bool)
    if any(type(value) is not kind for value, kind in zip(asdict(member).values(), types, strict=True)):
        raise TypeError(f"number, url, uuid and accepts of a shard are {types}, not {facts}")
    return member


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    disk = Disk()
    file = disk.open(path.with_name(path.name + ".lock"), create=True)
    try:
        if not file.try_lock():
            raise LockedError(f"another process changes {path} at the moment", hint="try again")
        yield
    finally:
        file.close()


class FileMembers:
    """The shards that a cluster file lists.

    The file is read again if its inode, size or time has changed. A file that is copied to several machines
    must be replaced by a rename, as `expstore cluster` does.

    Threads: any number may read. Processes: a copy reads the same file.

    Args:
        path: The file.

    Raises:
        NotFoundError: There is no such file.
        StateError: It is not a cluster file.
        StorageError: The disk failed.
    """

    named = False

    def __init__(self, path: Path) -> None:
        self._path, self._disk = path.absolute(), Disk()
        #: What the file was when it was read, and its content.
        self._known = self._load()

    def _load(self) -> tuple[tuple[int, ...], ClusterFile]:
        stamp = self._disk.read_stamp(self._path)  # before the content: a later change is read again
        return stamp, ClusterFile.load(self._path)

    def read(self) -> MemberList:
        """Return the list in the file.

        Raises:
            NotFoundError: The file was removed.
            StateError: The file is that of another cluster, or an older one of this cluster.
            StorageError: The disk failed.
        """
        stamp, known = self._known
        if self._disk.read_stamp(self._path) == stamp:
            return known.list
        found = self._load()
        if found[1].uuid != known.uuid:
            raise StateError(
                f"{self._path} is the file of cluster {found[1].uuid}, and was that of {known.uuid}",
                hint="connect again to use the other cluster",
            )
        if found[1].list.revision < known.list.revision:
            raise StateError(
                f"{self._path} has revision {found[1].list.revision}, and had {known.list.revision} before",
                hint="put the newest file there: a shard's number must never be used twice",
            )
        self._known = found
        return found[1].list
