"""Sampling: readable rows only, with the promised probabilities, and reproducible by the seed.

Part of the suite.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expstore.errors import NotReadyError, PriorityError, QueryError
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.samplers.random import RandomSampler
from expstore.testing.assertions import expect, raises, same
from expstore.testing.buffer_and_model import Life
from expstore.testing.declaration import Declared

_DRAWS = 20_000


class DrawingSuite(Declared):
    """Test the batches that are sampled from a storage."""

    def test_every_row_is_as_likely(self, tmp_path: Path) -> None:
        """All rows are equally likely in a ring that has wrapped, and after `empty`."""
        with self.life(tmp_path) as life:
            life.extend(15)
            life.lap(3)
            life.extend(9)
            _frequent(life, dict.fromkeys(life.model.rows, 1.0))
            life.empty()
            life.extend(6)
            _frequent(life, dict.fromkeys(life.model.rows, 1.0))

    def test_batches_follow_from_the_seed(self, tmp_path: Path) -> None:
        """Two storages with the same seed sample the same batches; with another seed they differ."""
        with self.life(tmp_path) as one, self.life(tmp_path) as two, self.life(tmp_path, seed=6) as other:
            for count in (5, 30, 3):
                found = []
                for life in (one, two, other):
                    life.extend(count)
                    batches = [life.rb.sample(16, return_info=True)[1]["id"] for _ in range(3)]
                    found.append(torch.cat(batches).tolist())
                same(found[0], found[1], "batches of two storages with the same seed")
                expect(found[0] != found[2], "storages with different seeds sample the same batches")

    def test_a_state_goes_on_where_it_was(self, tmp_path: Path) -> None:
        """`load_state_dict` restores the sequence of batches."""
        with self.life(tmp_path) as life:
            life.extend(30)
            life.rb.sample()
            state = life.rb.state_dict()
            before = [life.rb.sample()["number"].tolist() for _ in range(3)]
            life.rb.load_state_dict(state)  # rows in RAM then have other ids
            after = [life.rb.sample()["number"].tolist() for _ in range(3)]
            same(after, before, "the batches after load_state_dict")

    def test_conditions(self, tmp_path: Path) -> None:
        """`where` draws only matching rows while rows are added and removed; invalid conditions raise."""
        where = "next.reward > 1 AND episode.length >= 1"
        with self.life(tmp_path, sampler=lambda: RandomSampler(where=where)) as life:
            for count in (9, 30, 5):
                life.extend(count)
                life.rb.refresh()
                good = [row.id for row in life.model.live if row.serial % 17 / 4 > 1]
                drawn = set(torch.cat([_info(life)["id"] for _ in range(60)]).tolist())
                same(drawn, set(good), "the rows that match the condition")
        with self.life(tmp_path, sampler=lambda: RandomSampler(where="no_such_field = 1")) as life:
            life.extend(3)
            with raises(QueryError, what="a condition on an unknown field", says="no_such_field"):
                life.rb.sample()

    def test_each_row_so_many_times(self, tmp_path: Path) -> None:
        """Sample counts belong to rows: a new row in a reused slot starts at 0."""
        with self.life(tmp_path, consume_after_n_samples=2, batch_size=5) as life:
            for counts in ((10,), (20,), (7, 13)):
                for count in counts:
                    life.extend(count)
                handed: list[int] = []
                while life.rb.can_sample():
                    handed += _info(life)["id"].tolist()
                same(sorted(handed), sorted(2 * list(life.model.rows)), "how often rows were returned")
                life.lap(1)
                while life.rb.can_sample():
                    life.rb.sample()

    def test_priorities_are_kept_by_row(self, tmp_path: Path) -> None:
        """New rows get the largest priority so far; priorities of deleted rows are ignored."""
        with self.life(tmp_path, sampler=lambda: PrioritizedSampler(None, 1.0, 0.5)) as life:
            life.extend(8)
            life.set_priorities({1: 2.5, 4: 0.25, 8: 0.0, 9: 7.0, 0: 7.0, -3: 7.0})
            life.look()
            life.extend(18)
            life.look()
            life.set_priorities({1: 9.0, 6: 9.0, 7: 3.0, 26: 0.5})
            life.look()
            same(life.rb.update_priority(torch.tensor([5, 5]), torch.tensor([4.0, 1.0])), 2, "set by index")
            life.model.set_priorities({26: 1.0})
            life.model.largest = max(life.model.largest, 4.0)
            life.extend(3)
            life.lap(2)
            life.extend(4)
            life.look()

    def test_priorities_that_are_none(self, tmp_path: Path) -> None:
        """Invalid priorities are refused, and the whole call changes nothing."""
        with self.life(tmp_path) as life:
            life.extend(25)
            ids = np.array([10, 11, 12])
            for bad in (-1.0, math.nan, math.inf, -math.inf, 1e39):
                with raises(PriorityError, what=f"the priority {bad}", says="priority number 1 of 3"):
                    life.storage.writer().set_priorities(ids, np.array([5.0, bad, 6.0]))
                with raises(PriorityError, what=f"the priority {bad}"):
                    life.rb.update_priority(id=ids, priority=np.array([5.0, bad, 6.0]))
            life.look()
            same(
                life.storage.writer().set_priorities(ids[[1, 1, 1]], np.array([2.0, 3.0, 0.0])), 3, "how many"
            )
            life.model.set_priorities({11: 3.0})
            life.model.set_priorities({11: 0.0})  # the last of several values counts
            life.extend(2)
            life.look()

    def test_the_largest_priority_so_far(self, tmp_path: Path) -> None:
        """New rows get it even if its row now has a lower one, and when the storage must grow."""
        with self.life(tmp_path, None) as life:
            life.extend(3)
            life.set_priorities({2: 7.5})
            life.set_priorities({2: 0.5})
            life.extend(2)
            life.extend(5000)
            life.look()

    def test_rows_come_by_priority(self, tmp_path: Path) -> None:
        """Frequencies and weights follow from the priorities, also around the end of the slots."""
        with self.life(tmp_path, sampler=lambda: PrioritizedSampler(None, 0.7, 0.4, 0.0)) as life:
            life.extend(12)
            life.rb.sample()
            life.lap(4)
            life.extend(9)
            priorities = {id: 0.1 + number % 5 for number, id in enumerate(life.model.rows)}
            life.set_priorities(priorities | {life.model.last: 0.0})
            shares = {id: value**0.7 for id, value in priorities.items() if id != life.model.last}
            _frequent(life, shares)
            info = _info(life)
            least = min(shares.values())
            weights = np.array([(shares[id] / least) ** -0.4 for id in info["id"].tolist()])
            close = np.allclose(info["priority_weight"].numpy(), weights, rtol=1e-4)
            expect(close, f"weights are {info['priority_weight']}, expected {weights}")

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        """Sampling without rows raises NotReadyError, before the first rows and after `empty`."""
        with self.life(tmp_path) as life:
            for _ in range(2):
                expect(not life.rb.can_sample(), "can_sample() is true without rows")
                with raises(NotReadyError, what="a sample without rows"):
                    life.rb.sample()
                life.extend(3)
                expect(life.rb.can_sample(), "can_sample() is false although there are rows")
                life.empty()


def _info(life: Life) -> Any:
    return life.rb.sample(return_info=True)[1]


def _frequent(life: Life, shares: dict[int, float]) -> None:
    """Raise AssertionError unless rows are sampled in proportion to their shares, and no others.

    The tolerance is six standard deviations. The seed is fixed, so the test is deterministic.
    """
    drawn = life.rb.sample(_DRAWS, return_info=True)[1]["id"].numpy()
    found = dict(zip(*(part.tolist() for part in np.unique(drawn, return_counts=True)), strict=True))
    strange = found.keys() - shares.keys()
    expect(not strange, f"rows with probability 0 were sampled: {sorted(strange)}")
    total = math.fsum(shares.values())
    for id, share in shares.items():
        mean = _DRAWS * share / total
        off = abs(found.get(id, 0) - mean)
        expect(
            off < 6 * math.sqrt(mean), f"row {id} was sampled {found.get(id, 0)} times, expected {mean:.0f}"
        )
