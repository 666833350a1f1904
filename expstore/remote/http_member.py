"""A served store as a member: draws, masses, priorities and named samplers as HTTP requests.

Used by the buffers over one and over several served stores. It keeps no rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from expstore.buffers.member import Draw, Facts, Limits, Member, Part, Status, Weight
from expstore.core.values import IntArray, Mass
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.rate_limiters import Counts
from expstore.remote.draw_stream import DrawLink, DrawStream
from expstore.remote.transport import ARROW, Connection, encode_json
from expstore.remote.worker import Worker
from expstore.wire.codec import Decoder, note_of
from expstore.wire.frames import Frame
from expstore.wire.stream import frames_in


class HttpMember(Member):
    """A served store.

    Threads: any number may use it. Processes: a copy in another process, and a forked child, open connections
    of their own. Crashes: a request without an answer is repeated for as long as the connection's `retries`
    say.

    Args:
        connection: The connection to the server.
        wait: Seconds that the server waits for rows if it cannot draw yet.
    """

    def __init__(self, connection: Connection, *, wait: float = 0.0) -> None:
        self.connection, self._wait = connection, wait
        self._decoder, self._stream = Decoder(), DrawStream(connection, wait=wait)
        self._worker = Worker("expstore-draws")

    @property
    def place(self) -> str:
        """The address of the store."""
        return str(self.connection.address)

    def read_facts(self) -> Facts:
        """Return the uuid of the store, and its status."""
        facts = self.connection.request("GET", "").json()
        return Facts(str(facts["uuid"]), read_status(facts))

    # -- drawing ---------------------------------------------------------------------------------

    def begin(self, draw: Draw, rows: int) -> Callable[[], Part]:
        """Ask for rows over the open connection, or in a thread; the function that is returned waits."""
        began = time.monotonic()
        if self._stream.ask(self._body_of(draw, rows, self._wait)):
            return lambda: self._take(self._stream.take(), draw, rows, began)
        return self._worker.submit(lambda: self._request(draw, rows, self._wait)).result

    def draw(self, draw: Draw, rows: int) -> Part:
        """Draw rows.

        Raises:
            NotReadyError: There are no rows that may be drawn.
            RemoteError: The server did not answer.
        """
        began = time.monotonic()
        if self._stream.ask(self._body_of(draw, rows, self._wait)):
            return self._take(self._stream.take(), draw, rows, began)
        return self._request(draw, rows, self._wait)

    def stream(self, draw: Draw, rows: int, *, batches: int | None, ahead: int) -> Generator[Part]:
        """Yield batches; the server draws the next ones meanwhile.

        Args:
            draw: Which rows; its number is that of the first batch.
            rows: Number of rows of a batch.
            batches: Number of batches; None: no end.
            ahead: Number of batches that are asked for at a time.

        Raises:
            StateError: It is used in another process than the one that made it.
        """
        pid, link, taken = os.getpid(), DrawLink(self.connection, wait=self._wait), 0
        asked, since = 0, 0.0  # number of batches that the connection has to send, and when it was asked
        try:
            while batches is None or taken < batches:
                since = since if asked else time.monotonic()
                if asked <= ahead // 2:  # several at once take less of both processes' time
                    count = ahead - asked
                    if batches is not None:
                        count = min(count, batches - taken - asked)
                    body = _describe(_advance(draw, taken + asked), rows) | {"batches": count}
                    if count and link.send(encode_json(body | {"wait": self._wait})):
                        asked, since = asked + count, time.monotonic()
                frame = link.read() if asked else None
                asked = 0 if frame is None else asked - 1
                part = self._take(frame, _advance(draw, taken), rows, since)
                taken += 1
                yield part
                if os.getpid() != pid:
                    raise StateError(
                        "this iteration belongs to another process", hint="begin a new iteration here"
                    )
        finally:
            if os.getpid() == pid:  # a forked child must not shut down its parent's socket
                link.close()

    def _take(self, frame: Frame | None, draw: Draw, rows: int, began: float) -> Part:
        """Return the rows of an answer; without one, request them for the rest of the time."""
        if frame is not None:
            return self._decode(frame)
        return self._request(draw, rows, max(0.0, self._wait - (time.monotonic() - began)))

    def _request(self, draw: Draw, rows: int, wait: float) -> Part:
        body = self._body_of(draw, rows, wait)
        with name_arguments():
            answer = self.connection.request("POST", "sample", body=body, accept=ARROW, wait=wait)
        (frame,) = frames_in(answer.body)
        return self._decode(frame)

    def _body_of(self, draw: Draw, rows: int, wait: float) -> bytes:
        return encode_json(_describe(draw, rows) | {"wait": wait})

    def _decode(self, frame: Frame) -> Part:
        codec, columns = self._decoder.read_columns(frame)
        facts = note_of(frame)
        return Part(codec, columns, frame.rows, _read_mass(facts), read_status(facts))

    def weigh(self, draw: Draw, rows: int) -> Weight:
        """Return what `rows` rows would be drawn from now."""
        with name_arguments():
            facts = self.connection.request(
                "POST", "mass", body=_describe(draw._replace(number=None), rows)
            ).json()
        unit = facts["unit"]
        return Weight(_read_mass(facts), None if unit is None else int(unit), read_status(facts))

    # -- rows and samplers -------------------------------------------------------------------------

    def set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        """Set the priorities of rows; return how many are still there."""
        body = {"ids": ids.tolist(), "priorities": values.tolist()}
        # A request that is not repeated needs no key, which would begin a session.
        repeats = self.connection.retries.seconds > 0
        return int(self.connection.request("POST", "priorities", body=body, write=repeats).json()["updated"])

    def name_sampler(
        self, name: str, sampler: Mapping[str, Any], where: str | None, seed: int | None
    ) -> None:
        """Make the server keep a sampler under a name."""
        body = {"sampler": dict(sampler), "where": where, "seed": seed}
        with name_arguments():
            self.connection.request("PUT", f"samplers/{quote(name, safe='')}", body=body)

    def forget_sampler(self, name: str) -> None:
        """Make the server forget a named sampler."""
        self.connection.request("DELETE", f"samplers/{quote(name, safe='')}", once=True)

    def samplers(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the samplers that the server keeps, by name."""
        found = self.connection.request("GET", "samplers").json()["samplers"]
        return {name: json.loads(text) for name, text in found.items()}

    def close(self) -> None:
        """Close the connections of this process."""
        self.connection.close()  # first: a thread that is woken must not send a request
        self._stream.close()
        self._worker.close()


@contextlib.contextmanager
def name_arguments() -> Iterator[None]:
    """Raise ArgumentError for a request that a server refuses: it has no rows that could not fit a schema."""
    try:
        yield
    except SchemaError as exc:
        if exc.kind != "request":
            raise
        error = ArgumentError(exc.message, kind=exc.kind, hint=exc.hint)
        error.status = exc.status
        raise error from exc


def _describe(draw: Draw, rows: int) -> dict[str, Any]:
    sampler = dict(draw.sampler) if isinstance(draw.sampler, Mapping) else draw.sampler
    body = {"sampler": sampler, "where": draw.where, "seed": draw.seed, "batch_size": rows}
    return body if draw.number is None else body | {"draw": draw.number}


def _advance(draw: Draw, count: int) -> Draw:
    """Return a later draw of the same seed."""
    return draw if draw.number is None else draw._replace(number=draw.number + count)


def read_status(facts: Mapping[str, Any]) -> Status:
    """Return the status in a server's answer."""
    limits = facts.get("limits")
    if limits is not None:
        counts = Counts(int(limits["rows"]), int(limits["inserted"]), int(limits["sampled"]))
        limits = Limits(counts, float(limits["samples_per_insert"]))
    return Status(float(facts["largest_priority"]), limits)


def _read_mass(facts: Mapping[str, Any]) -> Mass | None:
    """Return the mass in a server's answer; None if the sampler has none."""
    if facts.get("mass") is None:
        return None
    beta, left = facts["beta"], facts.get("left")
    return Mass(
        float(facts["mass"]), int(facts["rows"]), float(facts["smallest"]),
        None if beta is None else float(beta), int(facts["unit"] or 1), None if left is None else int(left),
    )  # fmt: skip
