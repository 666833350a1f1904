"""The options of `expstore.connect`: which batches its buffers draw.

Used by the buffers over one and over several stores. It sends no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from expstore.buffers.local_member import PLAIN
from expstore.buffers.member import Draw
from expstore.errors import ArgumentError, RemoteError
from expstore.rate_limiters import RateLimiter
from expstore.remote.transport import Retries, check_retries

#: What a draw does if a shard does not answer, and how rows of a batch are divided among shards.
Down = Literal["raise", "wait", "partial"]
By = Literal["mass", "member"]


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """Options of `expstore.connect`, which describes them. None stands for a default value.

    Raises:
        ArgumentError: An option is out of range, or two contradict each other.
        RemoteError: `sampler` is an object, which cannot be sent to a server.
    """

    batch_size: int | None = None
    sampler: str | Mapping[str, Any] | None = None
    where: str | None = None
    seed: int | None = None
    draw: int = 0
    wait: float | None = None
    device: torch.device | str | None = None
    prefetch: int | None = None
    priority_key: str = "td_error"
    as_numpy: bool = False
    ahead: int | None = None
    down: Down | None = None
    by: By | None = None
    p: Sequence[float] | None = None
    rate_limiter: RateLimiter | None = None

    def __post_init__(self) -> None:
        if self.sampler is not None and not isinstance(self.sampler, str | Mapping):
            raise RemoteError(
                f"a {type(self.sampler).__name__} object cannot be sent to a server", kind="local_only",
                hint='describe it, as in {"kind": "prioritized", "alpha": 0.6}, or pass the name of one that '
                "the server keeps",
            )  # fmt: skip
        for name in ("prefetch", "ahead"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ArgumentError(f"{name} must be at least 1, got {count!r}")
        if (self.wait is not None and self.wait < 0) or self.draw < 0:
            raise ArgumentError("wait and draw must not be negative")
        if self.draw and self.seed is None:
            raise ArgumentError("draw= is the number of a draw of a seed; give seed= too")
        if self.down not in (None, "raise", "wait", "partial"):
            raise ArgumentError(f"down must be 'raise', 'wait' or 'partial', got {self.down!r}")
        if self.down == "wait" and self.wait is not None:
            raise ArgumentError("down='wait' waits without limit: leave wait out, or pass down='raise'")
        if self.by not in (None, "mass", "member"):
            raise ArgumentError(f"by must be 'mass' or 'member', got {self.by!r}")
        if self.p is not None and self.by != "member":
            raise ArgumentError('p is the share of each shard: it needs by="member"')

    def check_one(self) -> None:
        """Raise ArgumentError if an option is for several stores."""
        for name in ("ahead", "down", "by", "p", "rate_limiter"):
            if getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name}= is for several shards: pass a list of addresses, or a cluster file"
                )

    def check_several(self) -> None:
        """Raise ArgumentError if an option is for one store, or out of range for several."""
        if self.prefetch is not None:
            raise ArgumentError(
                "prefetch is for one store: pass ahead=, the number of batches drawn together"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ArgumentError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")

    def build_draw(self) -> Draw:
        """Return which rows are drawn; a kind of samplers that is given by its name is described."""
        sampler = self.sampler
        if isinstance(sampler, str) and sampler in PLAIN:
            sampler = {"kind": sampler}
        return Draw(dict(sampler) if isinstance(sampler, Mapping) else sampler, self.where, self.seed)

    @property
    def skips(self) -> bool:
        """Whether draws go without stores that do not answer."""
        return self.down == "partial"

    def read_shares(self) -> list[float] | None:
        """Return the fixed share of each shard, none for equal ones; None for shares by mass.

        Raises:
            ArgumentError: The shares are no numbers of at least 0 with a sum above 0.
        """
        if self.by != "member":
            return None
        shares = [] if self.p is None else [float(share) for share in self.p]
        if self.p is not None and not (shares and min(shares) >= 0 and 0 < sum(shares) < np.inf):
            raise ArgumentError(f"p must be numbers >= 0 with a sum above 0, one per shard; got {self.p}")
        return shares

    def choose_retries(self, retries: Retries | None) -> Retries:
        """Return how long requests to several stores are repeated.

        Raises:
            ArgumentError: `retries` is neither None nor `Retries`.
        """
        check_retries(retries)
        known = retries or Retries()
        wait = self.wait
        seconds = np.inf if self.down == "wait" else known.seconds if wait is None else float(wait)
        return Retries(seconds=seconds, first=known.first, longest=known.longest, seed=known.seed)
