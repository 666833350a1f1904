"""The protocol by which one writer at a time ships a store to an object storage: epochs and manifests.

Used by `expstore.cold.ship`. It needs one condition of the server, to create an object unless it exists. No
clock decides anything. The objects at an address:

- `epoch/N` claims the address for one writer, N = 1, 2, 3, ... The highest epoch's writer is the only one
  that may ship; the former ones are fenced.
- `manifest/N-K` has the state of a store that the writer of epoch N has shipped, and names the parts that
  it consists of. The newest one is that of the highest N, then of the highest K.
- `shipped/N/...` are the parts. Every name is used once.
- `versions.json` lists versions (`expstore.cold.version_list`). A version of the store names one manifest.

The rules:

1. A writer claims an epoch: it creates `epoch/N`, one above the highest. Then it reads the newest manifest
   of all lower epochs, and creates a copy of it, `manifest/N-0`. From here on nothing that a former writer
   uploads is the newest manifest.
2. A writer ships: it uploads parts, then creates `manifest/N-K`, then lists the epochs. If N is the
   highest, the state is *confirmed*: a program that claims an epoch later lists the manifests later, too, and
   finds it. Otherwise the writer is fenced, and does not report the state as shipped.
3. Anybody who reads the newest manifest, and then finds no higher epoch, knows that its state is confirmed,
   and may delete the parts that were uploaded before it and that it does not need. Each state continues the
   one before, also of a program that claims an epoch later, and no part comes back into a state. So a
   deletion may be delayed for any time.
4. If the answer to a request is lost, the request is repeated; an object that exists is the writer's own if
   it has the same bytes, which contain a random number. While it is unknown whether `manifest/N-K` was
   created, the writer creates it again, and captures nothing: the next state must continue this one.
5. A push of a version creates a manifest with the id of the push in its `pins`. Once this is confirmed, it
   adds the version to the list. Whoever deletes reads the newest manifest, and then the list, and keeps the
   manifests of the versions in the list, those of pins whose push is not retired there, and what these need.
   The writer drops a pin once its version is in the list or its push is retired. A retired push never adds
   its version.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from expstore.cold.version_list import (
    FORMAT,
    STATES,
    RemoteVersion,
    VersionList,
    read_manifest,
    seal,
    unseal,
)
from expstore.core.parsing import INVALID
from expstore.errors import CorruptionError, LockedError, StateError

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

EPOCHS, SHIPPED_PARTS = "epoch", "shipped"
_ROUNDS = 100
_DAMAGED = "open the folder of the store itself, if there is one, and ship it to another address"


#: Returns the names of all parts of a state.
FindNeeded = Callable[[dict[str, Any]], Collection[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What `epoch/N` contains. Everything but the nonce is for messages.

    Args:
        nonce: A random number, by which a writer recognizes its own claim.
        host: The writer's machine.
        pid: Its process.
        since: When it claimed the epoch, seconds since 1970 by its own clock.
    """

    nonce: str
    host: str
    pid: int
    since: float

    @classmethod
    def make(cls) -> Claim:
        """Return a new claim of this process."""
        return cls(nonce=secrets.token_hex(8), host=socket.gethostname(), pid=os.getpid(), since=time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedState:
    """What `manifest/N-K` contains.

    Args:
        epoch: N.
        sequence: K.
        nonce: A random number.
        origin: The nonce of the claim under which the state was captured; "" if there is no state.
        uuid: The store.
        state: What `expstore.storages.snapshots.rebuild` needs to build it; None: nothing was shipped yet.
        time: When it was captured, seconds since 1970 by the writer's own clock; for messages.
        pins: Pushes whose versions are not in the list yet, and the name of the state of each.
        named: How many parts the writer had named: these were uploaded before the state.
    """

    epoch: int
    sequence: int
    nonce: str
    origin: str = ""
    uuid: str = ""
    state: dict[str, Any] | None = None
    time: float = 0.0
    pins: dict[str, str] = field(default_factory=dict)
    named: int = 0

    @property
    def name(self) -> str:
        """Its name, which says its order among all states."""
        return f"{self.epoch:08d}-{self.sequence:010d}"

    @property
    def key(self) -> str:
        """The key of the object."""
        return f"{STATES}/{self.name}"

    def pack(self) -> bytes:
        """Return the bytes of the object."""
        return _pack(asdict(self))

    @classmethod
    def unpack(cls, data: bytes, key: str, address: str) -> ShippedState:
        """Read the bytes of an object.

        Raises:
            CorruptionError: They are damaged, or of another object.
        """
        found = cls(**_unseal(data, f"{key} in {address}"))
        if found.key != key:
            raise CorruptionError(f"{key} in {address} has the content of {found.key}", hint=_DAMAGED)
        return found

    @classmethod
    def of_version(cls, bucket: Bucket, version: RemoteVersion) -> ShippedState:
        """Read the state of a version of a shipped store.

        Raises:
            CorruptionError: It is missing or damaged.
        """
        return cls.unpack(read_manifest(bucket, version)[1], f"{STATES}/{version.state}", bucket.name)

    @property
    def checksum(self) -> str:
        """SHA-256 of the object."""
        return hashlib.sha256(self.pack()).hexdigest()

    def is_after(self, part: str) -> bool:
        """Return whether a part was uploaded before the state, or its writer was fenced before."""
        epoch, _, rest = part.partition("/")
        number = rest.rpartition("-")[2]
        if not (epoch.isdigit() and number.isdigit()):
            return False  # not of a shipped store
        return int(epoch) < self.epoch or (int(epoch) == self.epoch and int(number) < self.named)


def state_part_key(part: str) -> str:
    """Return the key of the object with a part's bytes."""
    return f"{SHIPPED_PARTS}/{part}"


class ShipLog:
    """The epochs and manifests at one address, as one writer sees them.

    Threads: one at a time. Processes: any number may claim epochs; each claim fences the former writers.
    Crashes: a kill at any request leaves a newest manifest whose parts all exist.

    Args:
        bucket: The address.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        #: The epoch that was claimed; 0: none yet.
        self.epoch = 0
        self._claim: Claim | None = None
        self._sequence = 0
        #: The newest state that this writer has shipped or continues, whether or not it is confirmed.
        self.newest: ShippedState | None = None
        #: A manifest of which it is unknown whether it was created.
        self._pending: ShippedState | None = None
        self._confirmed = False
        self._pins: dict[str, str] = {}
        self._named = 0
        #: Parts and manifests that were created, and have not been deleted.
        self._parts: set[str] = set()
        self._manifests: set[str] = set()
        self._is_listed = False
        #: The parts that the states of versions need, by the states' names.
        self._needed: dict[str, Collection[str]] = {}

    # -- claiming --------------------------------------------------------------------------------

    def find(self) -> tuple[int, ShippedState | None]:
        """Return the highest epoch, or 0, and the newest manifest, or None.

        Raises:
            RemoteError: The server does not answer, or refuses a request.
            CorruptionError: A manifest is damaged.
        """
        highest = self._find_highest_epoch()
        return highest, self._find_newest(highest) if highest else None

    def find_confirmed(self) -> ShippedState | None:
        """Return the newest manifest if it has a state that is confirmed: rule 3.

        Raises:
            RemoteError: The server does not answer, or refuses a request.
            CorruptionError: The manifest is damaged.
        """
        highest, newest = self.find()
        if newest is None or newest.state is None or newest.epoch < highest:
            return None
        return newest if self._find_highest_epoch(highest) == highest else None

    def claim(self, former: int, claim: Claim) -> ShippedState:
        """Claim the epoch after `former`; return the state that it continues.

        Args:
            former: The highest epoch, as `find` returned it.
            claim: Who claims it.

        Raises:
            LockedError: Another writer was faster; the message says who.
            StateError: The server ignores conditional writes.
            RemoteError: The server does not answer, or refuses a request. The epoch may be claimed.
        """
        self._bucket.check_creates()
        number = former + 1
        if not self._create(_epoch_key(number), _pack(asdict(claim))):
            raise self._build_fenced_error(number)
        self.epoch, self._claim = number, claim
        found = self._find_newest(former)
        first = ShippedState(epoch=number, sequence=0, nonce=claim.nonce)
        if found is not None:
            first = replace(found, epoch=number, sequence=0, nonce=claim.nonce, named=0)
        self._create_manifest(first)
        self.check()
        return first

    def check(self) -> None:
        """Raise LockedError if another writer has claimed a higher epoch; confirm the newest state otherwise.

        A manifest of which it is unknown whether it was created is created first.

        Raises:
            LockedError: The message says who, and since when.
            RemoteError: The server does not answer, or refuses the request.
        """
        if self._pending is not None:
            self._create_manifest(self._pending)
        self._check_epoch()
        self._confirmed = True

    def _check_epoch(self) -> None:
        highest = self._find_highest_epoch(self.epoch)
        if highest > self.epoch:
            raise self._build_fenced_error(highest)

    def _find_highest_epoch(self, above: int = 0) -> int:
        keys = self._bucket.keys(EPOCHS, _epoch_key(above))
        return max((int(key.rpartition("/")[2]) for key, _ in keys), default=above)

    def _find_newest(self, highest: int) -> ShippedState | None:
        """Return the newest manifest of epochs up to this one."""
        for _ in range(_ROUNDS):
            limit = f"{STATES}/{highest + 1:08d}"
            keys = [key for key, _ in self._bucket.keys(STATES) if key < limit]
            if not keys:
                return None
            data = self._bucket.read(max(keys))
            if data is not None:  # otherwise its writer has shipped a newer one and deleted it
                return ShippedState.unpack(data, max(keys), self._bucket.name)
        raise StateError(
            f"manifests in {self._bucket.name} were deleted {_ROUNDS} times while they were read",
            hint="open the store again",
        )

    def _create(self, key: str, data: bytes) -> bool:
        """Create an object; return whether it has these bytes, also if the answer to an attempt was lost."""
        return self._bucket.create(key, data) or self._bucket.read(key) == data

    def _build_fenced_error(self, number: int) -> LockedError:
        data = self._bucket.read(_epoch_key(number))
        who = ""
        if data is not None:
            claim = Claim(**_unseal(data, f"{_epoch_key(number)} in {self._bucket.name}"))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.since))
            who = f": process {claim.pid} on {claim.host} has claimed it since {since}"
        return LockedError(
            f"another writer ships to {self._bucket.name}{who} (epoch {number})",
            hint="close this store; its rows stay in its folder, and `expstore merge` combines them with the "
            "other writer's"
            if self.epoch
            else "use the other writer, or open the store again to take the address over",
        )

    # -- shipping --------------------------------------------------------------------------------

    def name_part(self) -> str:
        """Return the name of a new part."""
        assert self._claim is not None, "an epoch is claimed"
        name = f"{self.epoch:08d}/{self._claim.nonce}-{self._named}"
        self._named += 1
        self._parts.add(name)
        return name

    def forget_parts(self) -> None:
        """Forget which parts were named, after a failure: the next sweep asks the server which there are.

        Otherwise names would pile up while uploads fail, because each attempt names new parts.
        """
        self._parts.clear()
        self._is_listed = False

    def commit(self, state: dict[str, Any], uuid: str, captured: float, pushes: Iterable[str] = ()) -> None:
        """Ship a state that continues `newest`, all of whose parts are uploaded, and confirm it.

        Args:
            state: The state.
            uuid: The store.
            captured: When it was captured, seconds since 1970.
            pushes: Pushes of versions that will name it.

        Raises:
            LockedError: Another writer has claimed a higher epoch.
            RemoteError: The server does not answer, or refuses a request. Call `check` until it succeeds
                before the next capture; the state may be shipped.
        """
        assert self._claim is not None, "an epoch is claimed"
        assert self._pending is None, "rule 4"
        self._sequence += 1
        new = ShippedState(
            epoch=self.epoch, sequence=self._sequence, nonce=secrets.token_hex(8),
            origin=self._claim.nonce, uuid=uuid, state=state, time=captured, named=self._named,
        )  # fmt: skip
        self._create_manifest(replace(new, pins=self._pins | dict.fromkeys(pushes, new.name)))
        self.check()

    def _create_manifest(self, new: ShippedState) -> None:
        self._pending = new
        if not self._create(new.key, new.pack()):
            self._check_epoch()  # its writer may have deleted the manifest after the first attempt
            raise StateError(
                f"{new.key} in {self._bucket.name} was created by another program",
                hint="do not change the objects at this address; open the store again",
            )
        self._pending, self.newest, self._confirmed = None, new, False
        self._pins = dict(new.pins)
        self._manifests.add(new.key)

    # -- deleting --------------------------------------------------------------------------------

    def sweep(self, find_needed: FindNeeded) -> int:
        """Delete what neither the newest state nor a version needs, if the state is confirmed: rules 3 and 5.

        The first call, and the first one after a failure, also delete what former writers and failed
        attempts have left.

        Args:
            find_needed: Returns the names of all parts of a state.

        Returns:
            How many objects were deleted.
        """
        newest = self.newest
        if newest is None or newest.state is None or not self._confirmed:
            return 0
        known = VersionList.load(self._bucket)[0]
        listed = {version.push for version in known.versions}
        self._pins = {
            push: name
            for push, name in self._pins.items()
            if push not in listed and not known.is_retired(push)
        }
        if not self._is_listed:
            self._manifests |= {key for key, _ in self._bucket.keys(STATES)}
            self._parts |= self.list_parts().keys()
            self._is_listed = True
        try:
            manifests, parts = self.find_unneeded(newest, known, self._manifests, self._parts, find_needed)
        except CorruptionError:
            if VersionList.load(self._bucket)[0] == known:
                raise
            return self.sweep(find_needed)  # a version was removed meanwhile
        keys = [*manifests, *map(state_part_key, parts)]
        self._bucket.delete(keys)
        self._manifests.difference_update(manifests)
        self._parts.difference_update(parts)
        return len(keys)

    def list_parts(self) -> dict[str, int]:
        """Return all parts of shipped states, with their lengths in bytes."""
        found = self._bucket.keys(SHIPPED_PARTS)
        return {key.removeprefix(f"{SHIPPED_PARTS}/"): size for key, size in found}

    def find_unneeded(
        self,
        newest: ShippedState,
        known: VersionList,
        manifests: Iterable[str],
        parts: Iterable[str],
        find_needed: FindNeeded,
    ) -> tuple[list[str], list[str]]:
        """Return what neither the newest state nor a version needs.

        Args:
            newest: The newest state, which is confirmed.
            known: The list of versions, read after the newest state.
            manifests: Keys of manifests.
            parts: Names of parts.
            find_needed: Returns the names of all parts of a state.

        Raises:
            CorruptionError: The state of a version is missing or damaged.
        """
        names = {version.state for version in known.versions if version.state}
        names |= {name for push, name in newest.pins.items() if not known.is_retired(push)}
        self._needed = {name: self._needed.get(name) or find_needed(self._read_state(name)) for name in names}
        needed = set(find_needed(newest.state or {})).union(*self._needed.values())
        keys = {f"{STATES}/{name}" for name in names}
        return (
            sorted(key for key in manifests if key < newest.key and key not in keys),
            sorted(part for part in parts if part not in needed and newest.is_after(part)),
        )

    def _read_state(self, name: str) -> dict[str, Any]:
        key = f"{STATES}/{name}"
        if (data := self._bucket.read(key)) is None:
            raise CorruptionError(
                f"{key} is missing in {self._bucket.name}, and a version needs it",
                hint="remove the version: expstore versions prune URL --drop VERSION",
            )
        return ShippedState.unpack(data, key, self._bucket.name).state or {}


def _epoch_key(number: int) -> str:
    return f"{EPOCHS}/{number:08d}"


def _pack(content: dict[str, Any]) -> bytes:
    return zlib.compress(seal({"format": FORMAT, **content}))


def _unseal(data: bytes, name: str) -> dict[str, Any]:
    try:
        content = unseal(zlib.decompress(data), name)
    except (zlib.error, *INVALID) as exc:
        raise CorruptionError(f"{name} is damaged: {exc}", hint=_DAMAGED) from exc
    del content["format"]
    return content
