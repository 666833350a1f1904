"""The retention policy of an unbounded store, as users write it and as expstore.json stores it.

Used by `expstore.open` and the command line, and by `expstore.buffers.retention`, which applies it. It reads
no rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expstore.errors import ArgumentError

_BYTES = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", 1)
    for kind, base in (("b", 1000), ("ib", 1024))
}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True, kw_only=True)
class Retain:
    """A policy that decides which rows to keep. Only whole episodes that have ended are deleted.

    An episode is deleted if any of the arguments requires it. Without arguments, all rows are kept.

    Args:
        bytes: The most space that the kept rows may take in the columns: the oldest episodes are deleted
            until the rest fits. A number of bytes, or text such as "10GB" or "512MiB".
        age: Episodes that ended longer ago than this are deleted. Seconds, or text such as "7d", "12h" or
            "30m".
        where: A boolean SQL expression over a row and its `episode`, as in a sampler's `where`. Episodes with
            at least one row for which it is true are kept. (A condition on the episode alone is true for all
            of its rows, or for none.)

    Raises:
        ArgumentError: An argument has an invalid value.

    Example:
        >>> from expstore import Retain
        >>> Retain(bytes="10GB", where="episode.return > 100")
        Retain(bytes=10000000000, age=None, where='episode.return > 100')
    """

    bytes: int | None = None
    age: float | None = None
    where: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", parse_bytes(self.bytes))
        object.__setattr__(self, "age", parse_age(self.age))
        if self.where is not None and not (isinstance(self.where, str) and self.where.strip()):
            raise ArgumentError(f"where must be an SQL expression, got {self.where!r}")

    @classmethod
    def of(cls, given: Retain | Mapping[str, Any]) -> Retain:
        """Return a policy that a user passed as a `Retain` or as a dict of its arguments.

        Raises:
            ArgumentError: The value is neither of them.
        """
        if isinstance(given, Retain):
            return given
        if not isinstance(given, Mapping) or not given.keys() <= {"bytes", "age", "where"}:
            raise ArgumentError(f"retain must be a Retain, or a dict with bytes, age or where, got {given!r}")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Return the value for expstore.json; {} if all rows are kept."""
        kept = {"bytes": self.bytes, "age": self.age, "where": self.where}
        return {name: value for name, value in kept.items() if value is not None}

    def __bool__(self) -> bool:
        return bool(self.to_json())


def parse_bytes(given: Any) -> int | None:
    """Return a number of bytes, passed as a number or as text such as "10GB".

    Raises:
        ArgumentError: The value is not a number of bytes, or is below 1.
    """
    value = _amount(given, _BYTES)
    if value is not None and not value >= 1:
        raise ArgumentError(f"bytes must be a number of at least 1, or text such as '10GB', got {given!r}")
    return None if value is None else int(value)


def parse_age(given: Any) -> float | None:
    """Return a number of seconds, passed as a number or as text such as "7d".

    Raises:
        ArgumentError: The value is not a number of seconds, or is negative or infinite.
    """
    value = _amount(given, _SECONDS)
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ArgumentError(
            f"age must be a number of seconds, at least 0, or text such as '7d', got {given!r}"
        )
    return value


def _amount(given: Any, units: Mapping[str, float]) -> float | None:
    """Return an amount in the smallest of the units; NaN for an invalid value, None for None."""
    if given is None:
        return None
    if isinstance(given, str):
        found = _AMOUNT.fullmatch(given)
        unit = None if found is None else units.get(found[2].lower())
        return math.nan if found is None or unit is None else float(found[1]) * unit
    if isinstance(given, bool):
        return math.nan
    try:
        return float(given)
    except (TypeError, ValueError):
        return math.nan
