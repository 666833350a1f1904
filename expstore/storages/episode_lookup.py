"""Look up the rows of an episode by the episode's id.

Used by buffers and by the index. It reads no fields and changes nothing.
"""

from __future__ import annotations

import operator

import numpy as np

from expstore.core.values import IntArray
from expstore.episodes.fragments import all_ids
from expstore.errors import ArgumentError, NotFoundError
from expstore.storages.read_view import ReadView


def rows_of_episode(storage: ReadView, episode_id: int) -> IntArray:
    """Return the ids of an episode's readable rows, in the order of its steps. Shape `(n,)`, n > 0.

    Raises:
        NotFoundError: The episode does not exist, or none of its rows can be read any more.
    """
    return steps_of_episode(storage, episode_id)[0]


def steps_of_episode(storage: ReadView, episode_id: int) -> tuple[IntArray, IntArray]:
    """Return the ids and the steps of an episode's readable rows, by step. Shapes `(n,)`, n > 0.

    Raises:
        NotFoundError: The episode does not exist, or none of its rows can be read any more.
    """
    number = check_episode(episode_id)
    storage.follow()
    with storage.locks.episodes:
        window = storage.query_window
        fragments = storage.episodes.fragments.capture()
    own = fragments.of(np.array([number]))
    own = own[:, np.argsort(own[1], kind="stable")]
    _, first_step, count, _, _ = own
    ids, steps = all_ids(own), all_ids(np.stack([own[0], first_step, count, first_step, np.ones_like(count)]))
    held = window.holds(ids)
    ids, steps = ids[held], steps[held]
    if not ids.size:
        if 0 < number < storage.episodes.next_episode:
            raise NotFoundError(f"no row of episode {number} is left in the store")
        raise unknown_episode(storage, number)
    return ids, steps


def unknown_episode(storage: ReadView, number: int) -> NotFoundError:
    """Return the error for the id of an episode that the store does not know."""
    newest = storage.episodes.next_episode - 1
    if 0 < number <= newest:  # a version that was loaded did not have it, or it was deleted
        return NotFoundError(
            f"episode {number} is no longer in the store",
            hint="rb.episodes() lists the episodes of the store",
        )
    known = f"their ids are 1 to {newest}" if newest else "the store has no episodes yet"
    return NotFoundError(
        f"no episode {number}: {known}", hint="rb.episodes() lists the episodes of the store"
    )


def check_episode(episode_id: int) -> int:
    """Return an episode id as an int.

    Raises:
        ArgumentError: The id is not an integer.
    """
    try:
        return operator.index(episode_id)
    except TypeError:
        raise ArgumentError(f"an episode id must be an integer, got {type(episode_id).__name__}") from None
