"""One shard: a member with its number, its threads, and what it answered last.

Used by the buffer over several members. It draws, weighs and identifies; it divides nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from expstore.buffers.member import Draw, Limits, Member, Part, Status, find_largest
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.cluster.members import ShardEntry
from expstore.core.values import IntArray, Mass
from expstore.errors import ExpStoreError, NotReadyError, RemoteError, SchemaError, StateError
from expstore.rate_limiters import Counts
from expstore.remote.client import RemoteReplayBuffer
from expstore.remote.forks import copy_in_child
from expstore.remote.http_member import HttpMember, read_status
from expstore.remote.tokens import Tokens
from expstore.remote.transport import Address, Connection
from expstore.remote.worker import Worker
from expstore.sql.result import Result
from expstore.wire.codec import join_columns

_Result = TypeVar("_Result")
#: Statuses of a server that has no time for a request.
_BUSY = (429, 503)


class Reach(NamedTuple):
    """The ways to reach one store.

    Args:
        member: Repeats requests that get no answer.
        quick: Does not repeat them. A store of this process is the same member.
        buffer: The buffer over this store alone.
    """

    member: Member
    quick: Member
    buffer: ReplayBuffer | RemoteReplayBuffer

    @property
    def connections(self) -> list[Connection]:
        """The connections to the store's server; none to a store of this process."""
        both = (self.member, self.quick)
        return [member.connection for member in both if isinstance(member, HttpMember)]


class Shard:
    """A store that is one of several shards.

    Threads: any number may use it; questions run in a thread of its own. Processes: a copy in another
    process, and a forked child, open connections and start threads of their own.

    Args:
        entry: Its entry in the list of shards.
        reach: The ways to reach it.
        tokens: The access tokens of the servers.
        skips: Whether draws go without the shard, instead of repeating requests, if it does not answer.
    """

    def __init__(self, entry: ShardEntry, reach: Reach, tokens: Tokens, *, skips: bool) -> None:
        self.number = entry.number
        #: Its entry in the list of shards.
        self.entry = entry
        self._reach, self._tokens = reach, tokens
        #: What draws and masses are asked of.
        self._draws = reach.quick if skips else reach.member
        self._skips = skips
        #: The buffer over this store alone.
        self.buffer: Any = reach.buffer
        if isinstance(reach.buffer, RemoteReplayBuffer):
            reach.buffer.on_write = self._hear_write
        #: Uuid of the store; a server refuses requests for another one.
        self.uuid = ""
        if entry.uuid is not None:
            self._expect(entry.uuid)
        #: What it drew from last; None before its first answer.
        self.mass: Mass | None = None
        #: Number of rows that are drawn together.
        self.unit = 1
        #: Its last status.
        self.status = Status(0.0, None)
        #: When it answered last, in seconds of the monotonic clock.
        self.answered = -math.inf
        #: Whether it did not answer the last draw, and has not answered since.
        self.is_down = False
        #: Whether the list of shards has it no longer.
        self.is_removed = False
        self._worker = Worker(f"expstore-shard-{self.number}")
        self._prober = Worker(f"expstore-probe-{self.number}")
        self._is_probed = self._is_asked = False
        self._asked = -math.inf
        self._ended = threading.Event()
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {name: value for name, value in self.__dict__.items() if name != "_ended"} | {
            "is_down": False, "_is_probed": False, "_is_asked": False, "answered": -math.inf,
            "_asked": -math.inf,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state, _ended=threading.Event())
        copy_in_child(self)

    @property
    def place(self) -> str:
        """Where the rows live, for messages."""
        return self._reach.member.place

    @property
    def is_local(self) -> bool:
        """Whether this process has the store open: its answers take no request."""
        return not self._reach.connections

    @property
    def limits(self) -> Limits | None:
        """What its rate limiter counted at its last answer; None if it has none, or before any answer."""
        return self.status.limits

    @property
    def largest(self) -> float:
        """The priority that its new rows got at its last answer."""
        return self.status.largest_priority

    def take_up(self, entry: ShardEntry) -> None:
        """Use a newer entry in the list of shards, possibly with another address.

        Raises:
            StateError: It is the entry of another store, or its new host does not get the token.
        """
        if entry.uuid not in (None, self.uuid):
            raise StateError(
                f"shard {self.number} is store {self.uuid}, and the new list has store {entry.uuid} there",
                hint="give every store a number of its own",
            )
        for connection in self._reach.connections:
            address = Address.of(entry.url)
            if address != connection.address:
                connection.move(address, self._tokens.of(address))
        self.entry = entry

    def identify(self) -> bool:
        """Ask for the uuid of the store; later requests are refused if it is another one.

        Returns:
            False if it does not answer, but draws may go without it and the list says which store it is.

        Raises:
            RemoteError: It does not answer, and is needed.
        """
        asked, is_needed = time.monotonic(), not self._skips or not self.uuid
        try:
            with self.name_errors():
                facts = (self._reach.member if is_needed else self._reach.quick).read_facts()
        except RemoteError as exc:
            if is_needed or not does_not_answer(exc):
                raise
            return False
        self._expect(facts.uuid)
        self._hear(facts.status, asked)
        return True

    def _expect(self, uuid: str) -> None:
        self.uuid = uuid
        for connection in self._reach.connections:
            connection.store = uuid

    def _hear_write(self, facts: Mapping[str, Any]) -> None:
        self._hear(read_status(facts), -math.inf)

    def _hear(self, status: Status, asked: float) -> None:
        """Keep the status in an answer.

        Args:
            status: The status.
            asked: When the request was sent, in seconds of the monotonic clock.
        """
        limits, known = status.limits, self.status.limits
        if limits is not None and known is not None and asked < self.answered:
            # It overlapped with the last answer, and may be older. Counts grow, unless a version is restored.
            merged = Counts(*map(max, limits.counts, known.counts))
            status = status._replace(limits=limits._replace(counts=merged))
        self.status, self.answered = status, time.monotonic()

    @contextmanager
    def name_errors(self) -> Iterator[None]:
        """Name the shard in errors.

        Raises:
            StateError: The shard is closed. Servers' connections raise it by themselves.
        """
        try:
            if self.is_local and self._ended.is_set():
                raise StateError("the buffer over the shards is closed", hint="open a new one")
            yield
        except ExpStoreError as exc:
            if self.is_removed:
                raise StateError(
                    f"shard {self.number} ({self.place}) was removed from the cluster", kind="removed"
                ) from exc
            error = type(exc)(
                f"shard {self.number} ({self.place}): {exc.message}", kind=exc.kind, hint=exc.hint
            )
            error.status = exc.status
            raise error from exc

    def call(self, act: Callable[[Any], _Result]) -> _Result:
        """Return the result of a function of the buffer over this store; errors name the shard."""
        with self.name_errors():
            return act(self.buffer)

    def add(self, data: Any, **options: Any) -> int:
        """Append one row; return its id, or -1 if it was not stored.

        Args:
            data: The row.
            options: `source`, `episode_info` and `validate` of `extend`.
        """
        if not self.is_local:
            return int(self.call(lambda buffer: buffer.add(data, **options)))
        with self.name_errors():  # `add` of a store of this process returns an index
            if getattr(data, "ndim", 0):
                raise SchemaError(
                    f"one row has no batch dims, but this has batch size {list(data.shape)}",
                    hint="extend() it",
                )
            return int(self.buffer.extend([data], return_ids=True, **options)[0])

    def query(
        self, query: str, params: Sequence[object] | Mapping[str, object] | None, limit: int | None
    ) -> Result:
        """Run one read-only SELECT; return at most `limit` rows, or all if it is None."""
        if not self.is_local:
            found: Result = self.call(lambda buffer: buffer.sql(query, params, limit=limit))
            return found
        found = self.call(lambda buffer: buffer.sql(query, params))
        return found if limit is None else Result(found.arrow().slice(0, limit))

    def ask(self, act: Callable[[Member], _Result]) -> _Result:
        """Return the result of a function of the member; errors name the shard."""
        with self.name_errors():
            return act(self._reach.member)

    def set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        """Set the priorities of rows; return how many are still there.

        If the shard was removed, or does not answer and draws go without it, that is 0.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            values: Their priorities. Shape `(n,)`.
        """
        if self.is_down:
            return 0
        try:
            with self.name_errors():
                count = self._draws.set_priorities(ids, values)
        except ExpStoreError as exc:
            if self.is_removed or (self._skips and does_not_answer(exc)):
                return 0
            raise
        largest = max(self.largest, find_largest(values, count))
        self.status = self.status._replace(largest_priority=largest)
        return count

    def raise_priorities(self, ids: IntArray, priority: float) -> None:
        """Give new rows a priority.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            priority: The priority.
        """
        self.ask(lambda member: member.set_priorities(ids, np.full(ids.size, priority)))
        self.status = self.status._replace(largest_priority=priority)

    # -- drawing -----------------------------------------------------------------------------------

    def begin(self, draw: Draw, rows: int, *, may_lack: bool) -> Callable[[], Part]:
        """Begin to draw rows; the function that is returned waits for them.

        Args:
            draw: Which rows.
            rows: Number of rows.
            may_lack: Whether fewer rows are returned if no more are left.
        """
        asked, wait = time.monotonic(), self._draws.begin(draw, rows)

        def finish() -> Part:
            with self.name_errors():
                part = self._wait(wait, draw, rows)
                parts = [part]
                # Slices of short trajectories are shorter: the number of slices is right, not that of rows.
                is_once = part.mass is not None and part.mass.left is not None
                while (part.mass is None or is_once) and (lacking := rows - self._count_rows(parts)) > 0:
                    try:
                        part = self._wait(self._draws.begin(draw, lacking), draw, lacking)
                    except NotReadyError:
                        if not may_lack:
                            raise
                        break
                    parts.append(part)
            self._hear(part.status, asked)
            self.mass = _rest_of(part)
            return _join_parts(parts)

        return finish

    def _wait(self, wait: Callable[[], Part], draw: Draw, rows: int) -> Part:
        try:
            return wait()
        except NotReadyError as exc:
            if exc.kind != "rate_limited" or self._draws is self._reach.member:
                raise
        # It answers: wait for its rate limiter, as draws do that go without no shard.
        return self._reach.member.begin(draw, rows)()

    def _count_rows(self, parts: list[Part]) -> int:
        return sum(part.count_units(self.unit) * self.unit for part in parts)

    def weigh(self, draw: Draw, rows: int) -> Future[Mass | None]:
        """Ask in a thread what would be drawn from."""
        return self._worker.submit(lambda: self._weigh(draw, rows))

    def _weigh(self, draw: Draw, rows: int) -> Mass | None:
        asked = time.monotonic()
        with self.name_errors():
            weight = self._draws.weigh(draw, rows)
            if weight.unit is None:
                raise StateError(
                    f"sampler {draw.sampler!r} has num_slices, and shards are asked for different numbers "
                    "of slices",
                    hint="name one with slice_len",
                )
        self._hear(weight.status, asked)
        self.mass, self.unit = weight.mass, weight.unit
        return self.mass

    def note_down(self, draw: Draw, rows: int) -> None:
        """Go without the shard until it answers again; another thread asks for its mass until then."""
        self.is_down = True
        if not self._is_probed:
            self._is_probed = True
            self._prober.submit(lambda: self._wait_for_answer(draw, rows))

    def _wait_for_answer(self, draw: Draw, rows: int) -> None:
        for pause in self._reach.connections[0].pauses():
            if self._ended.wait(pause):
                return
            try:
                self._weigh(draw, rows)
            except ExpStoreError as exc:
                if does_not_answer(exc):
                    continue
            break  # any other error is raised by the next draw
        self.is_down = self._is_probed = False

    def refresh(self, seconds: float) -> Future[None] | None:
        """Ask for the status in a thread, unless the shard answered recently.

        Args:
            seconds: How long ago the last answer may be.

        Returns:
            Done when the shard has answered, or does not; None if it was not asked.
        """
        now = time.monotonic()
        if self.is_local:
            self._ask()
        elif now - max(self.answered, self._asked) >= seconds and not self._is_asked:
            self._is_asked, self._asked = True, now
            return self._worker.submit(self._ask)
        return None

    def _ask(self) -> None:
        with contextlib.suppress(ExpStoreError):  # draws and writes raise it
            self._hear(self._reach.quick.read_facts().status, self._asked)
        self._is_asked = False

    def remove(self) -> None:
        """Close it because it is no longer a shard: requests that wait for it raise StateError."""
        self.is_removed = True
        self.close()

    def close(self) -> None:
        """Close the connections of this process, and end the threads."""
        self._ended.set()
        if self.is_local:
            return
        self._reach.member.close()
        if self._is_asked:  # its request would leave a socket behind
            self._worker.submit(self._reach.quick.close)
        else:
            self._reach.quick.close()
        self._worker.close()
        self._prober.close()


def does_not_answer(error: BaseException) -> bool:
    """Return whether an error says that a server is unreachable or busy, not that it refuses the request."""
    return isinstance(error, RemoteError) and (error.kind == "unreachable" or error.status in _BUSY)


def _rest_of(part: Part) -> Mass | None:
    """Return what is left after a draw; None if it must be asked for, as at the end of a pass."""
    mass = part.mass
    if mass is None or mass.left is None:
        return mass
    left = (mass.left or int(mass.total)) - part.rows
    return mass._replace(total=left, left=left) if left > 0 else None


def _join_parts(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    columns = [join_columns(column) for column in zip(*(part.columns for part in parts), strict=True)]
    return parts[-1]._replace(columns=columns, rows=sum(part.rows for part in parts))
