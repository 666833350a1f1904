"""Choose the shard of a source: the same for all clients, and for most sources also if shards are added.

Rendezvous hashing (Thaler and Ravishankar 1998): every pair of source and shard has a hash, and the largest
wins. This module sends no requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["choose_shard"]


def choose_shard(source: str, shards: Mapping[int, str]) -> int:
    """Return the number of the shard of a source.

    Args:
        source: Name of the source, or the id of the client for its unnamed source.
        shards: The uuid of the store of each shard that accepts new sources, by its number.

    Example:
        >>> choose_shard("actor-7", {0: "5f2c", 1: "9d10"})
    """

    def rank(number: int) -> bytes:
        return hashlib.blake2b(f"{shards[number]}\0{source}".encode(), digest_size=16).digest()

    return max(shards, key=rank)
