"""The protocol by which one writer at a time ships a store to an object storage: epochs and manifests.

Used by `expstore.cold.ship`. It needs one condition of the server, to create an object unless it exists. No
clock decides anything. The objects at an address:

- `epoch/N` claims the address for one writer, N = 1, 2, 3, ... The highest epoch's writer is the only one
  that may ship; the former ones are fenced.
- `manifest/N-K` has the state of a store that the writer of epoch N has shipped, and names the parts that
  it consists of. The newest one is that of the highest N, then of the highest K.
- `shipped/N/...` are the parts. Every name is used once.

The rules:

1. A writer claims an epoch: it creates `epoch/N`, one above the highest. Then it reads the newest manifest
   of all lower epochs, and creates a copy of it, `manifest/N-0`. From here on nothing that a former writer
   uploads is the newest manifest.
2. A writer ships: it uploads parts, then creates `manifest/N-K`, then lists the epochs. If N is the
   highest, the state is *confirmed*: a program that claims an epoch later lists the manifests later, too, and
   finds it. Otherwise the writer is fenced, and does not report the state as shipped.
3. A part is deleted only right after a state was confirmed that does not need it, by the writer of that
   state, and only if the part was uploaded before the state. Whoever claims an epoch later starts from this
   state or a newer one, and no part comes back into a state. So a deletion may be delayed for any time.
4. If the answer to a request is lost, the request is repeated; an object that exists is the writer's own if
   it has the same bytes, which contain a random number. If it stays unknown whether `manifest/N-K` was
   created, the writer continues with K + 1.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from expstore.cold.version_list import seal, unseal
from expstore.core.parsing import INVALID
from expstore.errors import CorruptionError, LockedError, StateError

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

EPOCHS, SHIPPED_MANIFESTS, SHIPPED_PARTS = "epoch", "manifest", "shipped"
_FORMAT = 1
_ROUNDS = 100
_DELETE_KEYS = 1000
_DAMAGED = "open the folder of the store itself, if there is one, and ship it to another address"


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
    """

    epoch: int
    sequence: int
    nonce: str
    origin: str = ""
    uuid: str = ""
    state: dict[str, Any] | None = None
    time: float = 0.0

    @property
    def key(self) -> str:
        """The key of the object."""
        return f"{SHIPPED_MANIFESTS}/{self.epoch:08d}-{self.sequence:010d}"


def part_key(part: str) -> str:
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
        self._confirmed = False
        self._names = itertools.count()
        #: Parts that were named for the newest state and before, and parts that were named since.
        self._parts: set[str] = set()
        self._new_parts: set[str] = set()
        self._manifests: set[str] = set()
        self._is_listed = False

    # -- claiming --------------------------------------------------------------------------------

    def find(self) -> tuple[int, ShippedState | None]:
        """Return the highest epoch, or 0, and the newest manifest, or None.

        Raises:
            RemoteError: The server does not answer, or refuses a request.
            CorruptionError: A manifest is damaged.
        """
        highest = self._find_highest_epoch()
        return highest, self._find_newest(highest) if highest else None

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
            first = replace(found, epoch=number, sequence=0, nonce=claim.nonce)
        self._create_manifest(first)
        self.check()
        return first

    def check(self) -> None:
        """Raise LockedError if another writer has claimed a higher epoch; confirm the newest state otherwise.

        Raises:
            LockedError: The message says who, and since when.
            RemoteError: The server does not answer, or refuses the request.
        """
        highest = self._find_highest_epoch(self.epoch)
        if highest > self.epoch:
            raise self._build_fenced_error(highest)
        self._confirmed = True

    def _find_highest_epoch(self, above: int = 0) -> int:
        keys = self._bucket.keys(EPOCHS, _epoch_key(above))
        return max((int(key.rpartition("/")[2]) for key, _ in keys), default=above)

    def _find_newest(self, highest: int) -> ShippedState | None:
        """Return the newest manifest of epochs up to this one."""
        for _ in range(_ROUNDS):
            limit = f"{SHIPPED_MANIFESTS}/{highest + 1:08d}"
            keys = [key for key, _ in self._bucket.keys(SHIPPED_MANIFESTS) if key < limit]
            if not keys:
                return None
            data = self._bucket.read(max(keys))
            if data is not None:  # otherwise its writer has shipped a newer one and deleted it
                return self._unpack(data, max(keys))
        raise StateError(
            f"manifests in {self._bucket.name} were deleted {_ROUNDS} times while they were read",
            hint="open the store again",
        )

    def _unpack(self, data: bytes, key: str) -> ShippedState:
        found = ShippedState(**self._unseal(data, key))
        if found.key != key:
            raise CorruptionError(
                f"{key} in {self._bucket.name} has the content of {found.key}", hint=_DAMAGED
            )
        return found

    def _unseal(self, data: bytes, key: str) -> dict[str, Any]:
        name = f"{key} in {self._bucket.name}"
        try:
            content = unseal(zlib.decompress(data), name)
        except (zlib.error, *INVALID) as exc:
            raise CorruptionError(f"{name} is damaged: {exc}", hint=_DAMAGED) from exc
        del content["format"]
        return content

    def _create(self, key: str, data: bytes) -> bool:
        """Create an object; return whether it has these bytes, also if the answer to an attempt was lost."""
        return self._bucket.create(key, data) or self._bucket.read(key) == data

    def _build_fenced_error(self, number: int) -> LockedError:
        data = self._bucket.read(_epoch_key(number))
        who = ""
        if data is not None:
            claim = Claim(**self._unseal(data, _epoch_key(number)))
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
        name = f"{self.epoch:08d}/{self._claim.nonce}-{next(self._names)}"
        self._new_parts.add(name)
        return name

    def commit(self, state: dict[str, Any], uuid: str, captured: float) -> None:
        """Ship a state, all of whose parts are uploaded, and confirm it.

        Args:
            state: The state.
            uuid: The store.
            captured: When it was captured, seconds since 1970.

        Raises:
            LockedError: Another writer has claimed a higher epoch.
            RemoteError: The server does not answer, or refuses a request. The state may be shipped.
        """
        assert self._claim is not None, "an epoch is claimed"
        self._sequence += 1  # also if this fails: rule 4
        new = ShippedState(
            epoch=self.epoch, sequence=self._sequence, nonce=secrets.token_hex(8),
            origin=self._claim.nonce, uuid=uuid, state=state, time=captured,
        )  # fmt: skip
        self._create_manifest(new)
        self.check()

    def _create_manifest(self, new: ShippedState) -> None:
        if not self._create(new.key, _pack(asdict(new))):
            raise StateError(
                f"{new.key} in {self._bucket.name} was created by another program",
                hint="do not change the objects at this address; open the store again",
            )
        self.newest, self._confirmed = new, False
        self._manifests.add(new.key)
        self._parts |= self._new_parts
        self._new_parts = set()

    def sweep(self, find_needed: Callable[[dict[str, Any]], Collection[str]]) -> int:
        """Delete parts and manifests that the newest state does not need, if it is confirmed: rule 3.

        The first call also deletes what former writers have left.

        Args:
            find_needed: Returns the names of all parts of a state.

        Returns:
            How many objects were deleted.
        """
        newest = self.newest
        if newest is None or newest.state is None or not self._confirmed:
            return 0
        if not self._is_listed:
            self._manifests |= {key for key, _ in self._bucket.keys(SHIPPED_MANIFESTS)}
            found = {key.removeprefix(f"{SHIPPED_PARTS}/") for key, _ in self._bucket.keys(SHIPPED_PARTS)}
            self._parts |= {part for part in found - self._new_parts if part < f"{self.epoch + 1:08d}"}
            self._is_listed = True
        parts = self._parts - set(find_needed(newest.state))
        manifests = {key for key in self._manifests if key < newest.key}
        keys = [*sorted(manifests), *map(part_key, sorted(parts))]
        for start in range(0, len(keys), _DELETE_KEYS):
            self._bucket.delete(keys[start : start + _DELETE_KEYS])
        self._parts -= parts
        self._manifests -= manifests
        return len(keys)


def _epoch_key(number: int) -> str:
    return f"{EPOCHS}/{number:08d}"


def _pack(content: dict[str, Any]) -> bytes:
    return zlib.compress(seal({"format": _FORMAT, **content}))
