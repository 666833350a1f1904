"""One shard: a served store, the connections to it, its thread, and what it told last.

Used by the buffer over several shards. It draws, weighs and identifies; it divides nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from expstore.cluster.shares import ShardMass
from expstore.cluster.worker import Worker
from expstore.errors import ExpStoreError, RemoteError
from expstore.remote.client import RemoteReplayBuffer
from expstore.remote.transport import ARROW, Address, Connection, Retries
from expstore.wire.codec import Codec, Decoder, note_of
from expstore.wire.stream import frames_in

__all__ = ["Part", "Shard"]

_Found = TypeVar("_Found")
#: Statuses of a server that has no time for a request.
_BUSY = (429, 503)
#: Seconds after which a shard that was not heard of is asked for its largest priority before a write.
_STALE_SECONDS = 5.0


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


class Shard:
    """A served store that is one of several shards.

    Threads: any number may use it; draws run in a thread of its own. Processes: a copy in another process
    opens connections and starts a thread of its own.

    Args:
        number: Its number among the shards.
        url: Address of the store.
        token: The access token; None to send none.
        timeout: Seconds that connecting, the answer, and each part of it may take.
        retries: How long requests are repeated.
        skips: Whether draws go without the shard, instead of repeating requests, if it does not answer.
        options: Options of the buffer over this store alone.
    """

    def __init__(
        self,
        number: int,
        url: str,
        token: str | None,
        *,
        timeout: float,
        retries: Retries,
        skips: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.number, self.address = number, Address.of(url)
        self._connection = Connection(self.address, token, timeout=timeout, retries=retries)
        self._once = Connection(self.address, token, timeout=timeout, retries=replace(retries, seconds=0.0))
        self._draws = self._once if skips else self._connection
        #: The buffer over this store alone.
        self.buffer = RemoteReplayBuffer(self._connection, **options)
        #: Uuid of the store; the server refuses requests for another one.
        self.uuid = ""
        #: What it draws from, as it told last; None before it told.
        self.mass: ShardMass | None = None
        #: The priority that new rows of this store get, as it told last.
        self.largest = 0.0
        self._heard = -_STALE_SECONDS
        #: Whether it did not answer the last draw, and has not answered since.
        self.is_down = False
        self._worker = Worker(f"expstore-shard-{number}")
        self._prober = Worker(f"expstore-probe-{number}")
        self._is_probed = False
        self._decoder = Decoder()
        self._ended = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {name: value for name, value in self.__dict__.items() if name != "_ended"} | {
            "is_down": False, "_is_probed": False,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state, _ended=threading.Event())

    def identify(self) -> None:
        """Ask for the uuid of the store; later requests are refused if it is another one."""
        with self.name_errors():
            facts = self._connection.request("GET", "").json()
        self.uuid = self._connection.store = self._once.store = str(facts["uuid"])
        self.hear(facts)

    def hear(self, facts: Mapping[str, Any]) -> None:
        """Keep the largest priority in an answer."""
        self.largest, self._heard = float(facts["largest_priority"]), time.monotonic()

    @contextmanager
    def name_errors(self) -> Iterator[None]:
        """Name the shard in errors."""
        try:
            yield
        except ExpStoreError as exc:
            error = type(exc)(
                f"shard {self.number} ({self.address}): {exc.message}", kind=exc.kind, hint=exc.hint
            )
            error.status = exc.status
            raise error from exc

    def call(self, act: Callable[[RemoteReplayBuffer], _Found]) -> _Found:
        """Return the result of a function of the buffer over this store; errors name the shard."""
        with self.name_errors():
            return act(self.buffer)

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
            with self.name_errors():
                answer = self._draws.request(
                    "POST", "sample", body={**body, "batch_size": rows}, accept=ARROW
                )
                (frame,) = frames_in(answer.body)
                facts = note_of(frame)
                codec, columns = self._decoder.read_columns(frame)
            self.hear(facts)
            self.mass = ShardMass.of(facts)
            parts.append(Part(codec, columns, frame.rows, self.mass))
            # Slices of short trajectories are shorter: the number of slices is right, not that of rows.
            rows = 0 if self.mass is not None else rows - frame.rows
        return parts

    def _weigh(self, body: Mapping[str, Any]) -> ShardMass | None:
        with self.name_errors():
            facts = self._draws.request("POST", "mass", body=body).json()
        self.hear(facts)
        self.mass = ShardMass.of(facts)
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

    def refresh_largest(self) -> None:
        """Ask for the largest priority in the shard's thread, if the shard was not heard of recently."""
        if time.monotonic() - self._heard > _STALE_SECONDS:
            self._heard = time.monotonic()
            self._worker.submit(self._ask_largest)

    def _ask_largest(self) -> None:
        with contextlib.suppress(ExpStoreError):
            self.hear(self._once.request("GET", "").json())

    def close(self) -> None:
        """Close the connections of this process, and end the thread."""
        self._ended.set()
        self.buffer.close()
        self._once.close()
        self._worker.close()
        self._prober.close()


def does_not_answer(error: BaseException) -> bool:
    """Return whether an error says that a server is unreachable or busy, not that it refuses the request."""
    return isinstance(error, RemoteError) and (error.kind == "unreachable" or error.status in _BUSY)
