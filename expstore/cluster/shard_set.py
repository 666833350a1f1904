"""The shards of a buffer as the list of members says, and the shard of each source.

`ShardSet.refresh` takes up a new list, `ShardSet.route` chooses the shard of a source. The list is read again
before batches are drawn, and about once a second in a thread, so that requests that wait for a shard notice
that it has moved or was removed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from expstore.cluster.members import FixedMembers, Members, ShardEntry
from expstore.cluster.routing import Place, choose_shard, find_earlier_shards
from expstore.cluster.shard import Shard
from expstore.errors import ArgumentError, NotFoundError, RemoteError, StateError
from expstore.remote.forks import copy_in_child
from expstore.remote.worker import run_together

_Found = TypeVar("_Found")
#: Seconds between two looks at the list.
_LOOK_SECONDS = 1.0
#: Number of sources whose shards are remembered. Those of others are found by their open episodes.
_SOURCES = 100_000


class _State(NamedTuple):
    """The shards at one time; a newer list replaces it by one assignment."""

    revision: int
    shards: MappingProxyType[int, Shard]


class ShardSet:
    """The shards, by number.

    Threads: any number may use it. Processes: a copy in another process, and a forked child, open
    connections of their own, and read the list again.

    Args:
        members: Says which shards there are.
        make: Returns the shard of an entry.

    Raises:
        RemoteError: A shard does not answer and is needed, or none answers.
        StateError: A shard has another store than the list says.
        ArgumentError: There is no shard, or two addresses lead to the same store.
    """

    def __init__(self, members: Members, make: Callable[[ShardEntry], Shard]) -> None:
        self._members, self._make = members, make
        self._state = _State(0, MappingProxyType({}))
        #: The shard of each source that was written or asked for.
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._start()
        found = members.read()
        if not found.members:
            raise ArgumentError("a buffer over shards needs at least one shard")
        shards = {member.number: make(member) for member in found.members}
        self._state = _State(found.revision, MappingProxyType(shards))
        self._looked = time.monotonic()
        try:
            if not any(self.each(lambda shard: shard.identify()).values()):
                raise RemoteError(
                    f"none of the {len(shards)} shards answers", kind="unreachable",
                    hint="start their servers, then connect again",
                )  # fmt: skip
            _check_different(self.all)
        except BaseException:
            self.close()
            raise
        self._watch()

    def _start(self) -> None:
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._ended, self._is_watched = threading.Event(), False
        self._looked = float("-inf")
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        own = ("_lock", "_taking", "_ended", "_is_watched", "_looked", "_state")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"_state": (self._state.revision, dict(self._state.shards))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        revision, shards = state["_state"]
        self.__dict__.update(state, _state=_State(revision, MappingProxyType(shards)))
        self._start()

    # -- the list ----------------------------------------------------------------------------------

    @property
    def all(self) -> tuple[Shard, ...]:
        """The shards, in the order of their numbers."""
        return tuple(self._state.shards.values())

    @property
    def by_number(self) -> MappingProxyType[int, Shard]:
        """The shards by their numbers, ascending."""
        return self._state.shards

    def can_follow(self, shards: Mapping[str, str]) -> bool:
        """Return whether shards that were used earlier may have become these: uuids by number, as text."""
        now = {str(number): shard.uuid for number, shard in self._state.shards.items()}
        is_changed = self._state.revision > 1
        return all(now.get(number, store if is_changed else "") == store for number, store in shards.items())

    @property
    def ended(self) -> threading.Event:
        """Set when the shards are closed."""
        return self._ended

    def find(self, number: int) -> Shard:
        """Return a shard.

        Raises:
            NotFoundError: There is no such shard.
        """
        shards = self._state.shards
        if number not in shards:
            self.refresh()  # another client may know a newer list
            shards = self._state.shards
        if number not in shards:
            known = ", ".join(map(str, shards))
            raise NotFoundError(f"there is no shard {number}", hint=f"there are {known}")
        return shards[number]

    def refresh(self) -> None:
        """Take up the list of members if it has changed.

        New shards take part from now on. Requests that wait for a shard that was removed raise StateError;
        those that wait for a shard that has moved are repeated at its new address.

        Raises:
            ExpStoreError: The list cannot be read, or a new shard does not answer.
            StateError: A number has another store than before.
        """
        with self._taking:
            found, known = self._members.read(), self._state
            self._looked = time.monotonic()
            self._watch()
            if found.revision == known.revision:
                return
            shards: dict[int, Shard] = {}
            for member in found.members:
                shard = known.shards.get(member.number)
                if shard is None:
                    shard = self._make(member)
                    if member.uuid is None:
                        shard.identify()
                else:
                    shard.take_up(member)
                shards[member.number] = shard
            self._state = _State(found.revision, MappingProxyType(shards))
        for number in known.shards.keys() - shards.keys():
            known.shards[number].remove()

    def look(self) -> None:
        """Take up the list if it was last read more than a second ago.

        Raises:
            ExpStoreError: As for `refresh`.
        """
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self.refresh()

    def _watch(self) -> None:
        """Start the thread that looks at the list, unless this process has it or the list never changes."""
        if not self._is_watched and not isinstance(self._members, FixedMembers):
            self._is_watched = True
            target = partial(_look_repeatedly, weakref.ref(self), self._ended)
            threading.Thread(target=target, name="expstore-members", daemon=True).start()

    # -- sources -----------------------------------------------------------------------------------

    def route(self, source: str | None, client: str) -> Shard:
        """Return the shard that rows of a source go to.

        A source remains where this client has written it; if the shard is retired, until it has no open
        episode of the source. If shards were added or retired, a source that is new to this client goes to
        the shard that has an open episode of it. Other sources are distributed by their names.

        Args:
            source: Name of the source; None: the unnamed one.
            client: Id of the client, which selects the shard of its unnamed source.

        Raises:
            RemoteError: A shard that may have an open episode of the source does not answer.
            StateError: No shard accepts new sources.
        """
        self.look()
        key, name = (f"\0{client}", client) if source is None else (source, source)
        with self._lock:
            number = self._homes.get(key, -1)
            if number >= 0:
                self._homes.move_to_end(key)
        state = self._state
        shard = state.shards.get(number)
        if shard is None or not (shard.entry.accepts or _has_open(shard, source)):
            shard = self._find_home(state, name, is_named=source is not None)
            self.bind(key, shard)
        return shard

    def _find_home(self, state: _State, name: str, *, is_named: bool) -> Shard:
        places = {number: Place(one.uuid, one.entry.accepts) for number, one in state.shards.items()}
        if not any(place.accepts for place in places.values()):
            raise StateError(f"none of the {len(places)} shards accepts new sources", hint="add a shard")
        chosen = choose_shard(name, places)
        if state.revision > 1 and is_named:
            earlier = find_earlier_shards(name, places)
            if earlier != [chosen]:
                found = run_together([partial(_has_open, state.shards[k], name) for k in earlier])
                chosen = next((k for k, has_open in zip(earlier, found, strict=True) if has_open), chosen)
        return state.shards[chosen]

    def bind(self, source: str, shard: Shard) -> None:
        """Let rows of a source go to a shard from now on."""
        with self._lock:
            self._homes[source] = shard.number
            self._homes.move_to_end(source)
            if len(self._homes) > _SOURCES:
                self._homes.popitem(last=False)

    # -- all of them -------------------------------------------------------------------------------

    def each(self, act: Callable[[Shard], _Found]) -> dict[int, _Found]:
        """Call a function for all shards at once; return the results by the number of the shard."""
        self.look()
        shards = self._state.shards
        return dict(zip(shards, run_together([partial(act, one) for one in shards.values()]), strict=True))

    def close(self) -> None:
        """Close the connections of this process."""
        self._ended.set()
        for shard in self.all:
            shard.close()


def _has_open(shard: Shard, source: str | None) -> bool:
    return bool(shard.call(lambda buffer: buffer.episodes.find_open(source)).numel())


def _check_different(shards: Iterable[Shard]) -> None:
    known: dict[str, Shard] = {}
    for shard in shards:
        other = known.setdefault(shard.uuid, shard)
        if other is not shard:
            raise ArgumentError(f"{other.place} and {shard.place} are the same store: name it once")


def _look_repeatedly(shards: weakref.ref[ShardSet], ended: threading.Event) -> None:
    """Take up new lists until the shards are closed or garbage-collected."""
    while not ended.wait(_LOOK_SECONDS):
        known = shards()
        if known is None:
            return
        with contextlib.suppress(Exception):  # the next draw or write reads the list itself, and raises it
            known.refresh()
        del known
