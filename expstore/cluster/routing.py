"""Choose the shard of a source: the same for all clients, and for most sources also if shards are added.

Rendezvous hashing (Thaler and Ravishankar 1998): every pair of source and shard has a hash, and the largest
wins. This module sends no requests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """A shard to which sources may go.

    Args:
        uuid: Uuid of its store.
        accepts: Whether it accepts new sources.
    """

    uuid: str
    accepts: bool = True


def choose_shard(source: str, shards: Mapping[int, Place]) -> int:
    """Return the number of the shard of a new source.

    Args:
        source: Name of the source, or the id of the client for its unnamed source.
        shards: The shards by number, of which one at least accepts new sources.

    Example:
        >>> from expstore.cluster.routing import Place, choose_shard
        >>> choose_shard("actor-7", {0: Place("5f2c"), 1: Place("9d10")})
        0
    """
    return next(number for number in _rank(source, shards) if shards[number].accepts)


def find_earlier_shards(source: str, shards: Mapping[int, Place]) -> list[int]:
    """Return the shards that `choose_shard` may have returned before shards were added or retired.

    They are few: with n shards that all accept, 1 + 1/2 + ... + 1/n on average. The first one that accepts is
    that of today.

    Args:
        source: Name of the source.
        shards: The shards by number; shards that were added later have larger numbers.
    """
    found, least = [], math.inf
    for number in _rank(source, shards):
        if number < least:  # it was the first one while the shards from `least` on were not there
            found.append(number)
        if shards[number].accepts:
            least = min(least, number)
    return found


def _rank(source: str, shards: Mapping[int, Place]) -> list[int]:
    def rank(number: int) -> bytes:
        return hashlib.blake2b(f"{shards[number].uuid}\0{source}".encode(), digest_size=16).digest()

    return sorted(shards, key=rank, reverse=True)
