"""Consumers of a served store: the server records their draws, and the client keeps a number.

Used by the client. A draw is asked for by its number, so requests are repeated as often as necessary, and a
server that was started again is asked to open the consumer again.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from expstore.buffers.consumer import AnyConsumer, Place, Position, check_place, check_timeout
from expstore.core.arguments import check_whole
from expstore.errors import ArgumentError, NotFoundError, NotReadyError, StateError
from expstore.remote.http_member import name_arguments
from expstore.remote.transport import ARROW, JSON, Answer, Connection
from expstore.storages.format.draw_log import ConsumerInfo
from expstore.storages.format.ranks import find_rank
from expstore.wire.codec import note_of
from expstore.wire.frames import Frame
from expstore.wire.stream import frames_in

_Found = TypeVar("_Found")
_Infos = list[ConsumerInfo]  # in `RemoteConsumers` `list` is a method


class RemoteConsumer(AnyConsumer):
    """A consumer of a served store, with the methods of the consumer of an open buffer.

    Positions are those of an open buffer, too: a learner may continue where the store is, and the other way
    round.

    Threads: any number may use it; one draws at a time. Processes: a forked or pickled copy cannot be used,
    because it would draw the same batches; each rank opens its own. Crashes: the server records a draw before
    it sends the batch. A request without an answer is sent again, for as long as the connection's `retries`
    say, and a server that was started again opens the consumer again.

    Create it by `RemoteReplayBuffer.consumer`.

    Args:
        name: Its name.
        connection: The connection to the server.
        read: Returns the batch of a frame, given `return_info` and `as_numpy` of `sample`.
        settings: What the server opens it with.
        at: Where to begin.
        rank: Which part of each batch is drawn; None: from the environment.
        world: Number of ranks; None: from the environment.
        wait: Seconds that the server waits for rows.
        timeout: Seconds that a rank other than 0 waits for rank 0.
    """

    _advice = "open a consumer of another name there, or another rank of this one"

    def __init__(
        self,
        name: str,
        connection: Connection,
        read: Callable[[Frame, bool, bool | None], Any],
        settings: Mapping[str, Any],
        *,
        at: Place,
        rank: int | None,
        world: int | None,
        wait: float,
        timeout: float,
    ) -> None:
        rank, world = find_rank(rank, world)
        check_place(at)
        self.name = name
        self._connection, self._read, self._settings = connection, read, settings
        self._wait, self._timeout = wait, check_timeout(timeout)
        self._client: dict[str, Any] = {"rank": rank, "world": world}
        self._using, self._process = threading.Lock(), os.getpid()
        self._draws = 0  # that are known to be recorded
        state = self._wait_for_rank_0(lambda: self._put(at))
        self._id = state["id"]
        self._client |= {"id": self._id, "generation": state["generation"]}
        self._at = int(state["position"]["draw"])

    # -- drawing -----------------------------------------------------------------------------------

    def sample(self, *, return_info: bool = False, as_numpy: bool | None = None) -> Any:
        """Return the next batch: that of the next recorded draw, or of a new one, which is recorded first.

        Args:
            return_info: As in `RemoteReplayBuffer.sample`.
            as_numpy: As in `RemoteReplayBuffer.sample`.

        Raises:
            NotReadyError: No row can be drawn.
            RowsChangedError: A row of a recorded draw was deleted or overwritten.
            StateError: The consumer is closed, belongs to another process, or has another number of ranks.
            NotFoundError: It was dropped.
            RemoteError: The server did not answer; the draw comes again.
        """
        return self._next(return_info, as_numpy)[0]

    def _next(self, return_info: bool = False, as_numpy: bool | None = None) -> tuple[Any, bool]:
        with self._using:
            found = self._fetch(self._at, return_info, as_numpy)
            self._at += 1
        return found

    def _fetch(self, number: int, return_info: bool, as_numpy: bool | None) -> tuple[Any, bool]:
        """Return the batch of a draw, and whether iteration ends with it."""
        body = {"wait": self._wait}
        answer = self._wait_for_rank_0(lambda: self._post(f"draws/{number}", body, ARROW, self._wait))
        self._draws = max(self._draws, number + 1)
        (frame,) = frames_in(answer.body)
        return self._read(frame, return_info, as_numpy), bool(note_of(frame)["ends"])

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, without end or until the sampler has no more rows."""
        ends = False
        while not ends:
            batch, ends = self._next()
            yield batch

    def draw(self, number: int, *, as_numpy: bool | None = None) -> Any:
        """Return the batch of a draw, which is recorded first if it is new; the position does not change.

        Args:
            number: Number of the draw, from 0.
            as_numpy: As in `RemoteReplayBuffer.sample`.

        Raises:
            ArgumentError: It is more than 10,000 draws after the last recorded one.
            NotFoundError: The draw is not kept.
        """
        number = check_whole("number", number)
        with self._using:
            return self._fetch(number, False, as_numpy)[0]

    def replay(self, first: int, last: int | None = None, *, as_numpy: bool | None = None) -> Iterator[Any]:
        """Yield the batches of recorded draws; the position does not change.

        Args:
            first: Number of the first draw, from 0.
            last: Number of the last one; None: the last that was recorded.
            as_numpy: As in `RemoteReplayBuffer.sample`.

        Raises:
            NotFoundError: A draw was not recorded, or is not kept.
        """
        count = self._put()["draws"]
        for number in range(first, count if last is None else last + 1):
            if not 0 <= number < count:
                raise NotFoundError(
                    f"draw {number} of consumer {self.name!r} is not in its log, which ends with draw "
                    f"{count - 1}"
                )
            yield self.draw(number, as_numpy=as_numpy)

    # -- positions ---------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether the next batch was recorded before; the server is asked if that is not known here."""
        if self._at >= self._draws:
            self._put()
        return self._at < self._draws

    @property
    def committed(self) -> int:
        """Number of draws that the last `commit` covers, that of each rank; the server is asked."""
        return int(self._put()["committed"])

    def seek(self, position: Place) -> None:
        """Go to a position: the draws that were recorded after it come again.

        Args:
            position: What `position` returned; "committed" for the last `commit`; "end" for the place after
                the last recorded draw.

        Raises:
            ArgumentError: It is not a position of this consumer.
            StateError: The draws after it are not in the log.
        """
        with self._using:
            self._at = int(self._put(position)["position"]["draw"])

    def commit(self, position: Position | None = None) -> None:
        """Record that a checkpoint with this position is safe, so that earlier draws are not needed again.

        The draws up to it, and their rows, are on the server's disk when this returns.

        Args:
            position: What `position` returned; None: the present one.

        Raises:
            ArgumentError: It is not a position of this consumer.
            StateError: It is before the last commit, or after the last recorded draw.
        """
        with self._using:
            place = _read_place(self.position if position is None else position)
            self._post("commit", {"draws": place["at"], "id": place.get("id")})

    # -- requests ----------------------------------------------------------------------------------

    def _put(self, place: Place | None = None) -> dict[str, Any]:
        """Let the server open the consumer, unless it is open; return where it is, and a place's position."""
        self._check_usable()
        body = {**self._settings, **self._client, **({} if place is None else _read_place(place))}
        with name_arguments():
            state: dict[str, Any] = self._connection.request("PUT", _route(self.name), body=body).json()
        self._draws = max(self._draws, state["draws"])
        return state

    def _post(self, act: str, body: Mapping[str, Any], accept: str = JSON, wait: float = 0.0) -> Answer:
        """Ask the server for something; if it was started again, it opens the consumer first."""
        self._check_usable()

        def ask() -> Answer:
            with name_arguments():
                return self._connection.request(
                    "POST", f"{_route(self.name)}/{act}", body={**self._client, **body}, accept=accept,
                    wait=wait,
                )  # fmt: skip

        try:
            return ask()
        except StateError as exc:
            if exc.kind != "not_open":
                raise
        self._put()
        return ask()

    def _wait_for_rank_0(self, act: Callable[[], _Found]) -> _Found:
        """Do something; a rank other than 0 repeats it for a while, until rank 0 has opened the consumer."""
        until = time.monotonic() + (self._timeout if self._client["rank"] else 0.0)
        for pause in self._connection.pauses():
            try:
                return act()
            except NotReadyError:
                if time.monotonic() + pause > until:
                    raise
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End its use; rank 0 lets programs on the server's machine draw for it. A second call does nothing.

        Raises:
            RemoteError: The server did not answer.
        """
        with self._using:
            if self.closed or os.getpid() != self._process:
                return
            if not self._client["rank"] and not self._connection.closed:
                self._close_there()
            self.closed = True

    def _close_there(self) -> None:
        try:
            self._connection.request("POST", f"{_route(self.name)}/close", body=self._client)
        except (ArgumentError, NotFoundError, StateError):  # it is not open, or not this one, any more
            return

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at draw {self._at}"
        return f"RemoteConsumer({self.name!r}, {str(self._connection.address)!r}, {state})"


class RemoteConsumers:
    """List the consumers of a served store, and end them.

    Args:
        connection: The connection to the server.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> _Infos:
        """Return what is known of each consumer, by name."""
        names = [field.name for field in dataclasses.fields(ConsumerInfo)]
        found = self._connection.request("GET", "consumers").json()["consumers"]
        return [ConsumerInfo(**{name: one[name] for name in names}) for one in found]

    def drop(self, name: str) -> None:
        """End a consumer: remove its log. A new one of this name begins at draw 0.

        Raises:
            NotFoundError: There is no consumer of this name.
            LockedError: A process on the server's machine draws for it.
        """
        with name_arguments():
            self._connection.request("DELETE", _route(name), once=True)


def _route(name: str) -> str:
    if not isinstance(name, str) or not name or name != quote(name, safe=""):
        raise ArgumentError(
            f"{name!r:.120} is not a name of a consumer", hint="use 1 to 100 letters, digits or . _ -"
        )
    return f"consumers/{name}"


def _read_place(place: Place) -> dict[str, Any]:
    """Return a place as fields of a request."""
    check_place(place)
    if isinstance(place, str):
        return {"at": place}
    return {"at": check_whole("draw", place["draw"]), "id": str(place["id"])}
