"""How streams of experience are called: by the user or after their handle, and each lane by itself.

Used by `expstore.episodes.table`. A lane's name cannot be a user's. It knows names only.
"""

from __future__ import annotations

import re

from expstore.errors import SchemaError

__all__ = ["lane_names", "stream_of"]

_LANE = re.compile(r".+//\d+")


def lane_names(source: str | None, handle: str, lanes: int) -> list[str]:
    """Return what the lanes of a stream are called; the first one as the stream itself.

    Args:
        source: The name that a user has given; None: the handle's own stream.
        handle: What the handle is called.
        lanes: How many lanes.

    Raises:
        SchemaError: The name is no text that can be kept, or is a lane's.
    """
    if source is not None and not _is_name(source):
        raise SchemaError(
            f"source {source!r} is no name",
            hint="give text that can be printed, without spaces at its ends",
        )
    if source is not None and _LANE.fullmatch(source):
        raise SchemaError(
            f"source {source!r} is how lanes are called", hint="choose a name that does not end in //number"
        )
    base = handle if source is None else source
    return [base, *[f"{base}//{lane}" for lane in range(1, lanes)]]


def stream_of(name: str) -> str:
    """Return the name of the stream that a source is a lane of."""
    return name.rpartition("//")[0] if _LANE.fullmatch(name) else name


def _is_name(source: object) -> bool:
    return isinstance(source, str) and source.isprintable() and source != "" and source == source.strip()
