"""The settings of a server: immutable, and read only from the arguments.

Used by everything in the package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from expstore.cold.ship_settings import Ship
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, StateError
from expstore.rate_limiters import MinSize, RateLimiter, SampleToInsertRatio

MiB = 1 << 20
#: Fields of calls that may be left empty.
OMITTABLE = (
    "messages", "tools", "request", "response", "error", "prompt_token_ids", "token_ids", "logprobs",
    "token_texts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Capture:
    """How the calls of agents to a language model are passed on and recorded.

    Args:
        upstream: Address of the model's server, up to `/v1`; requests never go elsewhere.
        on_error: What happens to a call that cannot be recorded: "fail" withholds the end of its answer,
            "pass" answers it.
        omit: Fields of the rows that are left empty.
        ask_logprobs: Add to chat completions that log-probabilities and token ids are wanted.

    Raises:
        ArgumentError: The address is not one of HTTP, or `on_error` or a field is unknown.
    """

    upstream: str
    on_error: str = "fail"
    omit: tuple[str, ...] = ()
    ask_logprobs: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.upstream)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ArgumentError(
                f"{self.upstream!r} is not the address of a server",
                hint="use one such as http://127.0.0.1:8000/v1",
            )
        if parts.username or parts.password:
            raise ArgumentError("the address has a password", hint="let the clients send the key")
        if self.on_error not in ("fail", "pass"):
            raise ArgumentError(f"on_error is {self.on_error!r}", hint='use "fail" or "pass"')
        for name in self.omit:
            if name not in OMITTABLE:
                raise ArgumentError(f"field {name!r} cannot be omitted", hint=f"use {', '.join(OMITTABLE)}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server serves, to whom, and within which limits.

    Args:
        path: A store, or a folder of stores; a store's name is its folder's name without `.exp`.
        read_only: Open stores as a reader and reject all writes.
        token: Token that permits reading and writing; None: no token is needed, which is only allowed on a
            loopback address.
        read_token: Token that permits reading.
        hosts: Host names that clients may use for the server, in addition to loopback names.
        sql: Whether SQL queries are allowed.
        ui: Whether the page at `/ui/` is served.
        max_body: Maximum size of a request body in bytes.
        max_rows: Maximum number of rows of a request, of a batch, and of a read by ids.
        max_answer: Maximum size in bytes of a response, and of a batch of a stream. Rows are counted before
            they are read, for JSON with the longest text that their values may have.
        body_seconds: Maximum seconds in which a body must arrive; each part must arrive in a tenth of that.
        head_seconds: Maximum seconds in which the head of a request must arrive.
        idle_seconds: Maximum seconds between two requests on a connection.
        answer_seconds: Maximum seconds during which a client may read nothing of its response.
        connections: Maximum number of connections; a further one closes the connection that was idle longest.
        concurrency: Number of requests that are processed at once, per store; as many may wait.
        rate: Average requests per second of one client; None: unlimited.
        sql_seconds: Maximum duration of a statement in seconds.
        sql_rows: Maximum number of rows of its result.
        min_size: Number of rows a store needs before it can be sampled.
        samples_per_insert: Average number of samples per row, over all clients; None: unlimited. A request
            that samples or extends too fast waits as long as it allows.
        error_buffer: Permitted deviation from `samples_per_insert`, in samples, in either direction.
        wait_seconds: Maximum seconds that a request waits for rows, or for other clients to sample.
        shutdown_seconds: Seconds that running requests have to finish at shutdown.
        session_timeout: Seconds without a request or heartbeat after which a client's session ends, counted
            from the start of the server at the earliest: its open episodes are cut.
        ship: URL below which the server ships each store under its name, such as `s3://bucket/runs`; None: it
            ships none.
        capture: How calls to a language model are recorded in the store; None: they are not.
        clock: Returns seconds of a monotonic clock, used for session timeouts.
    """

    path: Path
    read_only: bool = False
    token: bytes | None = field(default=None, repr=False)
    read_token: bytes | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    sql: bool = True
    ui: bool = True
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
    capture: Capture | None = None
    ship: str | None = None
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        """Check the tokens and the numbers.

        Raises:
            StateError: A token is not bytes, or empty; both are equal, or only readers have one; or the path
                is a URL.
            RemoteError: Stores are shipped, and the environment has no credentials.
            ValueError: A number is out of range, or the rate limits contradict each other.
        """
        object.__setattr__(self, "path", local_path(self.path))
        self.limiter()
        if self.ship is not None:
            Ship(self.ship).connect()  # sends no request
            if self.read_only:
                raise StateError(
                    "a server that only reads stores ships none", kind="ship", hint="leave ship out"
                )
        if self.error_buffer is not None and self.samples_per_insert is None:
            raise ValueError("error_buffer requires samples_per_insert, from which it permits a deviation")
        if not self.session_timeout > 0:
            raise ValueError(f"session_timeout must be above 0 seconds, got {self.session_timeout!r}")
        if self.capture is not None and (self.read_only or self.limiter() is not None):
            raise StateError(
                "calls are recorded at once, and a server that is read-only or limits its writes cannot",
                kind="capture", hint="leave read_only, min_size and samples_per_insert out",
            )  # fmt: skip
        for token in (self.token, self.read_token):
            if not isinstance(token, bytes | None):
                raise StateError(
                    f"a token is bytes, got {type(token).__name__}",
                    kind="token",
                    hint="encode it: token.encode()",
                )
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
        """Return the rate limiter of one store, or None if there is no limit.

        Raises:
            ValueError: With these numbers both readers and writers could wait forever.
        """
        if self.read_only or (self.min_size == 1 and self.samples_per_insert is None):
            return None
        if self.samples_per_insert is None:
            return MinSize(self.min_size, timeout=0)
        if self.error_buffer is None:
            raise ValueError("samples_per_insert requires error_buffer: the permitted deviation in samples")
        ratio, least, buffer = self.samples_per_insert, self.min_size, self.error_buffer
        return SampleToInsertRatio(ratio, least, buffer, timeout=0)
