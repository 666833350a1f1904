"""What a server is told when it is made: frozen, and read from nowhere but its arguments.

Used by everything in the package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from expstore.core.rate_limiters import MinSize, RateLimiter, SampleToInsertRatio
from expstore.disk.local_path import local_path
from expstore.errors import StateError

__all__ = ["Settings"]

MiB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Say what is served, to whom, and within which limits.

    Args:
        path: A store, or a folder of stores; a store's name is its folder's, without `.exp`.
        read_only: Stores are followed, and nothing is written.
        token: Who bears it may read and write; None: anybody may, which only a loopback address allows.
        read_token: Who bears it may read.
        hosts: Names by which the server may be called, beside those of the loopback.
        sql: Whether SQL may be asked.
        max_body: Bytes of a request's body.
        max_rows: Rows of a request, and of an answer that is no stream.
        max_answer: Bytes of an answer, and of a batch of a stream; rows are counted before they are read, as
            JSON by the most that their values may take.
        body_seconds: How long a body may take to come, and each part of it a tenth of that.
        head_seconds: How long the head of a request may take to come.
        idle_seconds: How long a connection may lie between two requests.
        answer_seconds: How long a client may take nothing of its answer.
        connections: Most connections; when one more comes, the one goes that has been idle for longest.
        concurrency: How many requests are worked on at once, for each store; as many may wait.
        rate: Requests per second of one client, on average; None: any number.
        sql_seconds: How long a statement may run.
        sql_rows: Rows of its answer.
        min_size: So many rows must be there before any is sampled.
        samples_per_insert: How often each row is to be sampled, all clients together; None: as often as they
            like. Who is too fast, sampling or extending, waits as long as its request says.
        error_buffer: By how many samples that may be missed, either way.
        wait_seconds: The longest that a request waits for rows, or for others to sample.
        shutdown_seconds: How long requests may take to end after the server was told to.
        session_timeout: Seconds without a request or heartbeat after which a client's session ends, counted
            from the start of the server at the earliest: its open episodes are cut.
        clock: Seconds on a clock that never goes back, by which sessions are timed.
    """

    path: Path
    read_only: bool = False
    token: bytes | None = field(default=None, repr=False)
    read_token: bytes | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    sql: bool = True
    max_body: int = 256 * MiB
    max_rows: int = 1_000_000
    max_answer: int = 256 * MiB
    body_seconds: float = 60.0
    head_seconds: float = 10.0
    idle_seconds: float = 60.0
    answer_seconds: float = 30.0
    connections: int = 1000
    concurrency: int = 64
    rate: float | None = None
    sql_seconds: float = 3.0
    sql_rows: int = 10_000
    min_size: int = 1
    samples_per_insert: float | None = None
    error_buffer: float | None = None
    wait_seconds: float = 60.0
    shutdown_seconds: float = 5.0
    session_timeout: float = 3600.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        """Look whether the tokens protect what they seem to, and the numbers go together.

        Raises:
            StateError: The tokens do not, or the path is a URL.
            ValueError: The numbers do not.
        """
        object.__setattr__(self, "path", local_path(self.path))
        self.limiter()
        if not self.session_timeout > 0:
            raise ValueError(f"session_timeout must be above 0 seconds, got {self.session_timeout!r}")
        if b"" in (self.token, self.read_token):
            raise StateError(
                "a token is empty", kind="token", hint="leave it out, or use a token with characters"
            )
        if self.read_token is not None and self.read_token == self.token:
            raise StateError("both tokens are the same", kind="token", hint="use another token for readers")
        if self.read_token is not None and self.token is None and not self.read_only:
            raise StateError(
                "there is a token for readers, but none for writers",
                kind="token", hint="add a token for writers, or serve with read_only",
            )  # fmt: skip

    def limiter(self) -> RateLimiter | None:
        """Return what limits one store; None: nothing does.

        Raises:
            ValueError: The numbers could keep both sides waiting for ever.
        """
        if self.read_only or (self.min_size == 1 and self.samples_per_insert is None):
            return None
        if self.samples_per_insert is None:
            return MinSize(self.min_size, timeout=0)
        if self.error_buffer is None:
            raise ValueError("samples_per_insert requires error_buffer: the permitted deviation in samples")
        ratio, least, buffer = self.samples_per_insert, self.min_size, self.error_buffer
        return SampleToInsertRatio(ratio, least, buffer, timeout=0)
