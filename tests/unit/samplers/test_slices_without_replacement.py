"""One slice of every trajectory per pass: through prefetching, overwriting and restarts."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from tensordict import TensorDict

from expstore.errors import NotReadyError
from expstore.samplers import SliceSamplerWithoutReplacement
from tests.support.batches import trajectory_buffer, trajectory_rows


def trajectories(batch: TensorDict, length: int) -> list[int]:
    """The trajectory of each slice of a batch."""
    x = batch["x"].view(-1, length)
    assert (x.diff(dim=1) == 1).all()
    return (x[:, 0] // 1000).tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_trajectory_comes_once_per_pass(shuffle: bool, prefetch: int) -> None:
    rb = trajectory_buffer(
        3,
        9,
        4,
        3,
        5,
        2,
        7,
        sampler=SliceSamplerWithoutReplacement(slice_len=3, shuffle=shuffle),
        prefetch=prefetch,
        batch_size=6,
    )
    orders = []
    for _ in range(12):
        batches = [trajectories(batch, 3) for batch in rb]
        assert [len(batch) for batch in batches] == [2, 2, 2]
        orders.append([*chain.from_iterable(batches)])
        assert sorted(orders[-1]) == [1, 2, 3, 4, 5, 7]
    assert len({tuple(order) for order in orders}) > 6 if shuffle else orders == [[1, 2, 3, 4, 5, 7]] * 12
    rb.close()


def test_a_pass_restarts_when_a_trajectory_is_added() -> None:
    rb = trajectory_buffer(3, 3, 3, 3, sampler=SliceSamplerWithoutReplacement(slice_len=3), batch_size=6)
    rb.sample()
    rb.extend(trajectory_rows(5, 3))
    assert sorted(chain.from_iterable(trajectories(rb.sample(), 3) for _ in range(3))) == [1, 2, 3, 4, 5]
    rb.extend(trajectory_rows(5, 4, 3))  # one that grows changes nothing
    assert sorted(chain.from_iterable(trajectories(rb.sample(), 3) for _ in range(3))) == [1, 2, 3, 4, 5]


def test_rows_that_are_overwritten_are_drawn_again_of_the_same_trajectories() -> None:
    rb = trajectory_buffer(6, 6, 6, 6, sampler=SliceSamplerWithoutReplacement(slice_len=3), batch_size=6)
    sampler, numbers = rb.sampler, np.random.Generator(np.random.Philox(key=np.array([1, 2])))
    for _ in range(5):
        first = sampler.sample(rb.storage, 6, numbers)
        again = sampler.sample_again(rb.storage, first, numbers)
        found = [
            rb.storage.read(one.ids)[rb.storage.require_schema().place_of(("x",))] // 1000
            for one in (first, again)
        ]
        assert found[0].tolist() == found[1].tolist()
        assert again.progress == first.progress


def test_a_pass_is_over_the_trajectories_in_which_a_row_matches() -> None:
    rb = trajectory_buffer(
        3,
        9,
        4,
        3,
        5,
        sampler=SliceSamplerWithoutReplacement(slice_len=3, where="x % 1000 >= 1 and episode.length > 3"),
        batch_size=6,
    )
    firsts = Counter()
    for _ in range(40):
        batches = [*rb]
        assert [batch.shape[0] for batch in batches] == [6, 3]
        assert sorted(chain.from_iterable(trajectories(batch, 3) for batch in batches)) == [2, 3, 5]
        firsts.update(x for batch in batches for x in batch["x"].view(-1, 3)[:, 0].tolist())
    assert firsts.keys() == {*range(2001, 2007), 3001, 5001, 5002}
    rb.extend(trajectory_rows(4, 2, 3))
    rb.refresh()
    assert sorted(chain.from_iterable(trajectories(batch, 3) for batch in rb)) == [2, 3, 4, 5]
    with pytest.raises(NotReadyError, match="none of the 3 rows"):
        trajectory_buffer(
            3, sampler=SliceSamplerWithoutReplacement(slice_len=3, where="x < 0"), batch_size=6
        ).sample()
    with pytest.raises(ValueError, match="once per pass"):
        SliceSamplerWithoutReplacement(slice_len=3, weight="x")
    assert "where='x < 0'" in repr(SliceSamplerWithoutReplacement(slice_len=3, where="x < 0"))
