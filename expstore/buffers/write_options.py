"""The options of a write.

Passed from a buffer to `Ingest`, and by workers to the process that owns the store.
"""

from __future__ import annotations

from typing import NamedTuple

from expstore.core.idempotency import WriteKey
from expstore.episodes.sessions import SessionKey


class WriteOptions(NamedTuple):
    """The options of a write.

    Args:
        source: Name of the stream; None: the session's unnamed stream.
        info: Facts about the episodes of the rows, as JSON text.
        key: The idempotency key; None: the write has none.
        session: The writing session; None: the handle's own.
        checks_domain: Whether to check values against the store's specs.
        takes_priorities: Whether to set the priorities that come with the rows.
        return_ids: Whether to return ids instead of indices.
        restarts: Cut the open episodes of the stream first.
    """

    source: str | None = None
    info: str = ""
    key: WriteKey | None = None
    session: SessionKey | None = None
    checks_domain: bool = False
    takes_priorities: bool = False
    return_ids: bool = False
    restarts: bool = False
