"""One shard: a served store, the connections to it, its thread, and what it told last.

Used by the buffer over several shards. It draws, weighs and identifies; it divides nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from expstore.cluster.members import Member
from expstore.cluster.shares import ShardMass
from expstore.cluster.worker import Worker
from expstore.core.values import IntArray
from expstore.errors import ExpStoreError, NotReadyError, RemoteError, SchemaError, StateError
from expstore.rate_limiters import Counts
from expstore.remote.client import RemoteReplayBuffer, send_priorities
from expstore.remote.forks import copy_in_child
from expstore.remote.tokens import Tokens
from expstore.remote.transport import ARROW, Address, Answer, Connection, Retries
from expstore.wire.codec import Codec, Decoder, note_of
from expstore.wire.stream import frames_in

_Found = TypeVar("_Found")
#: The column that ends slices.
_ENDS = "next.truncated"
#: Statuses of a server that has no time for a request.
_BUSY = (429, 503)


class Part(NamedTuple):
    """Rows that a shard has drawn.

    Args:
        codec: The codec of the rows.
        columns: In the codec's order. Shapes `(rows, *row shape)`.
        rows: Number of rows.
        mass: What they were drawn from; None if the sampler has no mass.
    """

    codec: Codec
    columns: list[Any]
    rows: int
    mass: ShardMass | None

    def find_stops(self) -> IntArray:
        """Return the row after the last of each slice. Shape `(slices,)`.

        Raises:
            SchemaError: The rows do not say where slices end.
        """
        if _ENDS not in self.codec.names:
            raise SchemaError(f"slices of several lengths cannot be told apart without {_ENDS!r}")
        flags = np.asarray(self.columns[self.codec.names.index(_ENDS)]).reshape(self.rows, -1)[:, 0]
        return np.flatnonzero(flags) + 1

    def count_units(self, unit: int) -> int:
        """Return the number of slices of `unit` rows, or of rows if it is 1."""
        return self.rows if unit == 1 else self.find_stops().size


class Limits(NamedTuple):
    """What the rate limiter of a shard's server counts.

    Args:
        counts: The rows that it has counted.
        samples_per_insert: The ratio of its settings.
    """

    counts: Counts
    samples_per_insert: float

    @classmethod
    def of(cls, facts: Mapping[str, Any] | None) -> Limits | None:
        """Return the limits in a server's answer; None if it has no limiter."""
        if facts is None:
            return None
        counts = Counts(int(facts["rows"]), int(facts["inserted"]), int(facts["sampled"]))
        return cls(counts, float(facts["samples_per_insert"]))


class Shard:
    """A served store that is one of several shards.

    Threads: any number may use it; draws run in a thread of its own. Processes: a copy in another process,
    and a forked child, open connections and start a thread of their own.

    Args:
        member: Its entry in the list of shards.
        tokens: The access tokens of the servers.
        timeout: Seconds that connecting, the answer, and each part of it may take.
        retries: How long requests are repeated.
        skips: Whether draws go without the shard, instead of repeating requests, if it does not answer.
        options: Options of the buffer over this store alone.
    """

    def __init__(
        self,
        member: Member,
        tokens: Tokens,
        *,
        timeout: float,
        retries: Retries,
        skips: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.number = member.number
        #: Its entry in the list of shards.
        self.member = member
        address, self._tokens = Address.of(member.url), tokens
        token = tokens.of(address)
        self._connection = Connection(address, token, timeout=timeout, retries=retries)
        self._once = Connection(address, token, timeout=timeout, retries=replace(retries, seconds=0.0))
        self._draws = self._once if skips else self._connection
        #: The buffer over this store alone.
        self.buffer = RemoteReplayBuffer(self._connection, on_write=self._hear_write, **options)
        #: Uuid of the store; the server refuses requests for another one.
        self.uuid = ""
        if member.uuid is not None:
            self._expect(member.uuid)
        #: What it draws from, as it told last; None before it told.
        self.mass: ShardMass | None = None
        #: Number of rows that are drawn together, as it told last.
        self.unit = 1
        #: The priority that new rows of this store get, as it told last.
        self.largest = 0.0
        #: What its rate limiter counted, as it told last; None if it has none, or before it told.
        self.limits: Limits | None = None
        #: When it answered last, in seconds of the monotonic clock.
        self.heard = -math.inf
        #: Whether it did not answer the last draw, and has not answered since.
        self.is_down = False
        #: Whether the list of shards has it no longer.
        self.is_removed = False
        self._worker = Worker(f"expstore-shard-{self.number}")
        self._prober = Worker(f"expstore-probe-{self.number}")
        self._is_probed = self._is_asked = False
        self._asked = -math.inf
        self._decoder = Decoder()
        self._ended = threading.Event()
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {name: value for name, value in self.__dict__.items() if name != "_ended"} | {
            "is_down": False, "_is_probed": False, "_is_asked": False, "heard": -math.inf,
            "_asked": -math.inf,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state, _ended=threading.Event())
        copy_in_child(self)

    @property
    def address(self) -> Address:
        """Address of the store."""
        return self._connection.address

    def take_up(self, member: Member) -> None:
        """Use a newer entry in the list of shards, possibly with another address.

        Raises:
            StateError: It is the entry of another store, or its new host does not get the token.
        """
        if member.uuid not in (None, self.uuid):
            raise StateError(
                f"shard {self.number} is store {self.uuid}, and the new list has store {member.uuid} there",
                hint="give every store a number of its own",
            )
        address = Address.of(member.url)
        if address != self.address:
            token = self._tokens.of(address)
            for connection in (self._connection, self._once):
                connection.move(address, token)
        self.member = member

    def identify(self) -> bool:
        """Ask for the uuid of the store; later requests are refused if it is another one.

        Returns:
            False if it does not answer, but draws may go without it and the list says which store it is.

        Raises:
            RemoteError: It does not answer, and is needed.
        """
        asked, is_needed = time.monotonic(), self._draws is self._connection or not self.uuid
        try:
            with self.name_errors():
                facts = (self._connection if is_needed else self._once).request("GET", "").json()
        except RemoteError as exc:
            if is_needed or not does_not_answer(exc):
                raise
            return False
        self._expect(str(facts["uuid"]))
        self.hear(facts, asked)
        return True

    def _expect(self, uuid: str) -> None:
        self.uuid = self._connection.store = self._once.store = uuid

    def hear(self, facts: Mapping[str, Any], asked: float) -> None:
        """Keep the largest priority and the counts in an answer.

        Args:
            facts: The answer.
            asked: When the request was sent, in seconds of the monotonic clock.
        """
        limits, known = Limits.of(facts.get("limits")), self.limits
        if limits is not None and known is not None and asked < self.heard:
            # It overlapped with the last answer, and may be older. Counts grow, unless a version is restored.
            merged = Counts(*map(max, limits.counts, known.counts))
            limits = limits._replace(counts=merged)
        self.limits, self.heard = limits, time.monotonic()
        self.largest = float(facts["largest_priority"])

    def _hear_write(self, facts: Mapping[str, Any]) -> None:
        self.hear(facts, -math.inf)

    @contextmanager
    def name_errors(self) -> Iterator[None]:
        """Name the shard in errors."""
        try:
            yield
        except ExpStoreError as exc:
            if self.is_removed:
                raise StateError(
                    f"shard {self.number} ({self.address}) was removed from the cluster", kind="removed"
                ) from exc
            error = type(exc)(
                f"shard {self.number} ({self.address}): {exc.message}", kind=exc.kind, hint=exc.hint
            )
            error.status = exc.status
            raise error from exc

    def call(self, act: Callable[[RemoteReplayBuffer], _Found]) -> _Found:
        """Return the result of a function of the buffer over this store; errors name the shard."""
        with self.name_errors():
            return act(self.buffer)

    def set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        """Set the priorities of rows; return how many are still there.

        If it was removed, none is there. If it does not answer and draws go without it, none is set.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            values: Their priorities. Shape `(n,)`.
        """
        is_needed = self._draws is self._connection
        if self.is_down:
            return 0
        try:
            with self.name_errors():
                # A request that is not repeated needs no key, which would begin a second session.
                count = send_priorities(self._draws, ids, values, write=is_needed)
        except ExpStoreError as exc:
            if self.is_removed or (not is_needed and does_not_answer(exc)):
                return 0
            raise
        self.largest = max(self.largest, float(values.max()))
        return count

    # -- drawing: in the shard's thread ------------------------------------------------------------

    def draw(self, body: Mapping[str, Any], rows: int) -> Future[list[Part]]:
        """Draw rows; several parts if the sampler returns fewer rows at once."""
        return self._worker.submit(lambda: self._draw(body, rows))

    def weigh(self, body: Mapping[str, Any]) -> Future[ShardMass | None]:
        """Ask what would be drawn from."""
        return self._worker.submit(lambda: self._weigh(body))

    def _draw(self, body: Mapping[str, Any], rows: int) -> list[Part]:
        parts: list[Part] = []
        while rows > 0:
            asked = time.monotonic()
            with self.name_errors():
                answer = self._sample({**body, "batch_size": rows})
                (frame,) = frames_in(answer.body)
                facts = note_of(frame)
                codec, columns = self._decoder.read_columns(frame)
            self.hear(facts, asked)
            self.mass = ShardMass.of(facts)
            parts.append(Part(codec, columns, frame.rows, self.mass))
            # Slices of short trajectories are shorter: the number of slices is right, not that of rows.
            rows = 0 if self.mass is not None else rows - parts[-1].count_units(self.unit) * self.unit
        return parts

    def _sample(self, body: Mapping[str, Any]) -> Answer:
        try:
            return self._draws.request("POST", "sample", body=body, accept=ARROW)
        except NotReadyError as exc:
            if exc.kind != "rate_limited" or self._draws is self._connection:
                raise
        # It answers: wait for its rate limiter, as draws do that go without no shard.
        return self._connection.request("POST", "sample", body=body, accept=ARROW)

    def _weigh(self, body: Mapping[str, Any]) -> ShardMass | None:
        asked = time.monotonic()
        with self.name_errors():
            facts = self._draws.request("POST", "mass", body=body).json()
            if facts["unit"] is None:
                raise StateError(
                    f"sampler {body['sampler']!r} has num_slices, and shards are asked for different numbers "
                    "of slices",
                    hint="name one with slice_len",
                )
        self.hear(facts, asked)
        self.mass, self.unit = ShardMass.of(facts), int(facts["unit"])
        return self.mass

    def note_down(self, body: Mapping[str, Any]) -> None:
        """Go without the shard until it answers again; another thread asks for its mass until then."""
        self.is_down = True
        if not self._is_probed:
            self._is_probed = True
            self._prober.submit(lambda: self._wait_for_answer(body))

    def _wait_for_answer(self, body: Mapping[str, Any]) -> None:
        for pause in self._connection.pauses():
            if self._ended.wait(pause):
                return
            try:
                self._weigh(body)
            except ExpStoreError as exc:
                if does_not_answer(exc):
                    continue
            break  # any other error is raised by the next draw
        self.is_down = self._is_probed = False

    def refresh(self, seconds: float) -> Future[None] | None:
        """Ask for the largest priority and the counts in a thread, unless the shard answered recently.

        Args:
            seconds: How long ago the last answer may be.

        Returns:
            Done when the shard has answered, or does not; None if it was not asked.
        """
        now = time.monotonic()
        if now - max(self.heard, self._asked) >= seconds and not self._is_asked:
            self._is_asked, self._asked = True, now
            return self._worker.submit(self._ask)
        return None

    def _ask(self) -> None:
        with contextlib.suppress(ExpStoreError):  # draws and writes raise it
            self.hear(self._once.request("GET", "").json(), self._asked)
        self._is_asked = False

    def remove(self) -> None:
        """Close it because it is no longer a shard: requests that wait for it raise StateError."""
        self.is_removed = True
        self.close()

    def close(self) -> None:
        """Close the connections of this process, and end the threads."""
        self._ended.set()
        self.buffer.close()
        if self._is_asked:  # its request would leave a socket behind
            self._worker.submit(self._once.close)
        else:
            self._once.close()
        self._worker.close()
        self._prober.close()


def does_not_answer(error: BaseException) -> bool:
    """Return whether an error says that a server is unreachable or busy, not that it refuses the request."""
    return isinstance(error, RemoteError) and (error.kind == "unreachable" or error.status in _BUSY)
