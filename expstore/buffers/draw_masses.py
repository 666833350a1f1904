"""Record what the batches of one thread are drawn from: the HTTP layer sends it with each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from expstore.core.values import Mass

#: The masses of the draws of this thread, the latest last; None: they are not recorded.
MASSES: ContextVar[list[Mass | None] | None] = ContextVar("expstore_masses", default=None)


@contextmanager
def record_masses() -> Iterator[list[Mass | None]]:
    """Record the mass of every draw that this thread makes; the last is that of the rows that were returned.

    The mass is None if the sampler has none.

    Example:
        >>> from expstore.buffers.draw_masses import record_masses
        >>> with record_masses() as masses:
        ...     batch = rb.sample(32)
        >>> masses[-1].total == len(rb)
        True
    """
    masses: list[Mass | None] = []
    token = MASSES.set(masses)
    try:
        yield masses
    finally:
        MASSES.reset(token)
