"""The consumers that a server has open: it records their draws, and clients keep the numbers.

Used by the routes for consumers, in worker threads. A draw is asked for by its number, so a request may be
repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from expstore.api.request_models import RequestModel
from expstore.buffers.consumer import Consumer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.per_key import PerKey
from expstore.disk.files import Disk
from expstore.errors import ArgumentError, ExpStoreError, NotFoundError, NotReadyError, StateError
from expstore.samplers.base import Sampler
from expstore.storages.format.draw_log import CONSUMERS, About
from expstore.storages.format.ranks import read_generation

#: Seconds that a rank waits for rank 0. Both are in this process, and rank 0 draws first.
_SECONDS = 10.0
#: The last commit, the place after the last recorded draw, or before a draw.
Place = Literal["committed", "end"] | int


class ConsumerClient(RequestModel):
    """Who asks for a consumer."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})

    rank: int = Field(0, ge=0, lt=100_000, description="Which part of each batch the client gets, from 0.")
    world: int = Field(1, ge=1, le=100_000, description="Number of clients that share the batches.")
    id: str | None = Field(
        None, max_length=100, description="Id of the consumer that is meant; null: the present one."
    )
    generation: int | None = Field(
        None, ge=0, lt=1 << 63, description="Generation that the client belongs to; null: the present one."
    )


@dataclass
class _Open:
    """An open consumer; its ranks are opened when they are first asked for."""

    wanted: dict[str, Any]
    id: str
    generation: int
    ranks: dict[int, Consumer]

    def close(self) -> None:
        for consumer in reversed(self.ranks.values()):
            consumer.close()


class ServedConsumers:
    """The consumers of a served store.

    A consumer is open from `put` until `close`, `drop`, or the end of the buffer, which closes it.

    Threads: any number may use it; requests for one consumer take turns. Processes: the server has the lock
    of an open consumer, so it and programs on its machine exclude each other. Crashes: after a restart no
    consumer is open, and clients open theirs again.

    Args:
        buffer: The store's buffer.
        make: Makes a sampler of its description and condition.
    """

    def __init__(
        self, buffer: TensorDictReplayBuffer, make: Callable[[Mapping[str, Any], str | None], Sampler]
    ) -> None:
        self._buffer, self._make = buffer, make
        self._locks = PerKey(threading.Lock)
        self._opening = threading.Lock()  # the buffer keeps a list of its consumers
        self._open: dict[str, _Open] = {}

    def list(self) -> list[dict[str, Any]]:
        """Return what is known of each consumer, by name."""
        found = []
        for info in self._buffer.consumers.list():
            one = self._open.get(info.name)
            is_sound = info.damage is None
            more = {"world": read_generation(Disk(), self._folder(info.name))[1] if is_sound else 0}
            found.append(dataclasses.asdict(info) | more | {"sampler": one and one.wanted["sampler"]})
        return found

    def put(
        self, name: str, wanted: dict[str, Any], place: Place | None, client: ConsumerClient
    ) -> dict[str, Any]:
        """Open a consumer, and create it if it is new; return where it is, and the position of a place.

        Rank 0 decides with what it is open; a later request of rank 0 with something else opens it again.

        Args:
            name: Its name.
            wanted: `sampler` (a description) and `where`, and other arguments of `ReplayBuffer.consumer`.
            place: The place; None: the last commit, whether its draws are kept or not.
            client: Who asks.

        Raises:
            ArgumentError: An argument is not allowed; the consumer has another seed or id.
            LockedError: Another process draws for it.
            NotReadyError: Rank 0 has not opened it with this number of ranks.
            StateError: Another number of ranks has taken over; the draws after the place are not kept.
        """
        with self._locks.use(name) as lock, lock:
            about, (generation, world) = self._load(name), read_generation(Disk(), self._folder(name))
            _check_client(name, client, None if about is None else about.id, generation)
            if client.rank and (about is None or world != wanted["world"]):
                raise NotReadyError(
                    f"rank {client.rank} of consumer {name!r} waits for rank 0 to open it, with "
                    f"world={wanted['world']}",
                    hint="start rank 0, too",
                )
            one = self._open.get(name)
            if one is None or (one.wanted != wanted and not client.rank):
                one = self._reopen(name, wanted, one)
            return _describe(one, place)

    def _reopen(self, name: str, wanted: dict[str, Any], former: _Open | None) -> _Open:
        if former is not None:
            del self._open[name]
            former.close()
        try:
            return self._begin(name, wanted)
        except ExpStoreError:
            if former is not None:
                self._begin(name, former.wanted)
            raise

    def _begin(self, name: str, wanted: dict[str, Any]) -> _Open:
        consumer = self._open_rank(name, wanted, 0)
        generation, _ = read_generation(Disk(), self._folder(name))
        self._open[name] = one = _Open(wanted, consumer.position["id"], generation, {0: consumer})
        return one

    def _open_rank(self, name: str, wanted: dict[str, Any], rank: int) -> Consumer:
        options = dict(wanted)
        sampler = self._make(options.pop("sampler") or {"kind": "uniform"}, options.pop("where"))
        with self._opening:
            return self._buffer.consumer(
                name, sampler=sampler, at="end", rank=rank, timeout=_SECONDS, **options
            )

    @contextlib.contextmanager
    def _use(self, name: str, client: ConsumerClient) -> Iterator[tuple[_Open, Consumer]]:
        """Yield an open consumer, and its part for a rank, while no other request uses it.

        Raises:
            ArgumentError: The client means another consumer.
            NotFoundError: There is no consumer of this name.
            StateError: It is not open (kind "not_open"), or has another number of ranks.
        """
        with self._locks.use(name) as lock, lock:
            one = self._open.get(name)
            if one is None:
                if self._load(name) is None:
                    raise NotFoundError(f"there is no consumer {name!r}", hint="PUT it")
                raise StateError(
                    f"consumer {name!r} is not open here", kind="not_open",
                    hint="PUT it: a server that starts has none open",
                )  # fmt: skip
            _check_client(name, client, one.id, one.generation)
            if client.world != one.wanted["world"] or client.rank >= client.world:
                raise StateError(
                    f"consumer {name!r} has {one.wanted['world']} ranks now, and the request is of rank "
                    f"{client.rank} of {client.world}",
                    hint="send its rank and world; a process of a former number of ranks must end",
                )
            if client.rank not in one.ranks:
                one.ranks[client.rank] = self._open_rank(name, one.wanted, client.rank)
            yield one, one.ranks[client.rank]

    def draw(self, name: str, number: int, client: ConsumerClient) -> tuple[Any, bool]:
        """Return the batch of a draw, a rank's part of it, and whether iteration ends with it.

        A new draw is recorded first.

        Raises:
            ArgumentError: It is too far after the last recorded draw.
            NotFoundError: The draw is not kept.
            NotReadyError: No row can be drawn.
            RowsChangedError: A row of the draw was deleted or overwritten.
        """
        with self._use(name, client) as (one, consumer):
            first = one.ranks[0]
            if client.rank:
                first.find_end(number, number + 1)  # rank 0 decides
            batch = consumer.draw(number)
            return batch, first.find_end(number, number + 1) is not None

    def commit(self, name: str, draws: int, client: ConsumerClient) -> dict[str, Any]:
        """Commit the first draws for a rank; return where the consumer is.

        Raises:
            StateError: Fewer draws were recorded, or more are committed.
        """
        with self._use(name, client) as (one, consumer):
            consumer.commit({"consumer": name, "id": one.id, "draw": draws})
            return _describe(one)

    def close(self, name: str, client: ConsumerClient) -> None:
        """Let another process draw for a consumer."""
        with self._use(name, client) as (one, _):
            del self._open[name]
            one.close()

    def drop(self, name: str) -> None:
        """End a consumer, and remove its log.

        Raises:
            NotFoundError: There is no consumer of this name.
            LockedError: Another process draws for it.
        """
        with self._locks.use(name) as lock, lock:
            one = self._open.pop(name, None)
            if one is not None:
                one.close()
            self._buffer.consumers.drop(name)

    def _folder(self, name: str) -> Path:
        path = self._buffer.storage.path
        assert path is not None, "a served store has a folder"
        return path / CONSUMERS / name

    def _load(self, name: str) -> About | None:
        return About.load(Disk(), self._folder(name))


def _check_client(name: str, client: ConsumerClient, id: str | None, generation: int) -> None:
    if client.id not in (None, id):
        raise ArgumentError(
            f"consumer {name!r} " + (f"has id {id}" if id else "does not exist") + f"; the request is for id "
            f"{client.id}",
            hint="the consumer of this id was dropped, or is of another store",
        )
    if client.generation not in (None, generation):
        raise StateError(
            f"consumer {name!r} has had another number of ranks since: this is generation {generation}, and "
            f"the request is of {client.generation}",
            hint="end this process: others have taken its place",
        )


def _describe(one: _Open, place: Place | None = None) -> dict[str, Any]:
    """Return where a consumer is, and the position of a place; None: of the last commit, unchecked."""
    consumer = one.ranks[0]
    consumer.seek("end")
    end, committed = consumer.position, consumer.committed
    if place is not None:
        consumer.seek(end | {"draw": place} if isinstance(place, int) else place)
    position = end | {"draw": committed} if place is None else consumer.position
    return {
        "id": one.id, "draws": end["draw"], "committed": committed, "position": position,
        "world": one.wanted["world"], "generation": one.generation,
    }  # fmt: skip
