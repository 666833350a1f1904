"""Names of streams of experience, and of their lanes.

Used by `expstore.episodes.table`. A user cannot choose the name of a lane.
"""

from __future__ import annotations

import re

from expstore.errors import SchemaError

_LANE = re.compile(r".+//\d+")


def lane_names(source: str | None, handle: str, lanes: int) -> list[str]:
    """Return the names of the lanes of a stream; the first lane has the stream's name.

    Args:
        source: The name that a user has given; None: the handle's own stream.
        handle: Name of the handle.
        lanes: Number of lanes.

    Raises:
        SchemaError: The name is not printable text, or is the name of a lane.
    """
    if source is not None and not _is_name(source):
        raise SchemaError(
            f"source {source!r} is not a valid name",
            hint="use printable text without spaces at its ends",
        )
    if source is not None and _LANE.fullmatch(source):
        raise SchemaError(
            f"source {source!r} is the name of a lane", hint="choose a name that does not end in //number"
        )
    base = handle if source is None else source
    return [base, *[f"{base}//{lane}" for lane in range(1, lanes)]]


def stream_of(name: str) -> str:
    """Return the name of the stream to which a source belongs as a lane."""
    return name.rpartition("//")[0] if _LANE.fullmatch(name) else name


def lane_of(name: str) -> int:
    """Return the number of the lane that a source is in its stream."""
    return int(name.rpartition("//")[2]) if _LANE.fullmatch(name) else 0


def _is_name(source: object) -> bool:
    return isinstance(source, str) and source.isprintable() and source != "" and source == source.strip()
