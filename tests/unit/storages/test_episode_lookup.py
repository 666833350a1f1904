"""Ids and steps of the rows of an episode."""

from __future__ import annotations

import numpy as np

import expstore
from expstore.storages.episode_lookup import rows_of_episode, steps_of_episode


def test_steps_of_an_episode_whose_rows_lie_between_others_and_were_evicted_in_part() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(14))
    rows = {"a": np.arange(3), "next": {"done": np.zeros(3, bool)}}
    for source in "abbaba":
        rb.extend(rows, source=source)
    ids, steps = steps_of_episode(rb.storage, 1)
    assert ids.tolist() == rows_of_episode(rb.storage, 1).tolist() == [10, 11, 12, 16, 17, 18]
    assert steps.tolist() == [3, 4, 5, 6, 7, 8]
    ids, steps = steps_of_episode(rb.storage, 2)
    assert (ids.tolist(), steps.tolist()) == ([5, 6, 7, 8, 9, 13, 14, 15], list(range(1, 9)))
