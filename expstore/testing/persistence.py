"""Tests of what survives closing, the end of a process and a kill; of followers, snapshots and copies.

Part of the suite.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import torch

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import LockedError, NotFoundError, SnapshotError, StateError
from expstore.samplers.prioritized import PrioritizedSampler
from expstore.samplers.without_replacement import SamplerWithoutReplacement
from expstore.storages.read_view import ReadView
from expstore.testing.assertions import expect, raises, same
from expstore.testing.buffer_and_model import Life
from expstore.testing.declaration import Declared
from expstore.testing.model import Cell
from expstore.testing.model_rows import check_rows, make_batch


class OutlivingSuite(Declared):
    """Test what a storage keeps after closing, a kill, `dumps` and copying."""

    def test_opened_again(self, tmp_path: Path) -> None:
        """A reopened storage is unchanged in every phase of a ring; a storage in RAM starts empty."""
        if not self.persistent:
            with self.life(tmp_path) as life:
                life.extend(7)
                life.rb.close()
                life.rb = life.begin()
                same((len(life.rb), life.storage.last), (0, 0), "rows of a reopened storage in RAM")
            return
        for capacity in (20, None):
            with self.life(tmp_path, capacity) as life:
                life.reopen()
                for count in (3, 5, 30):
                    life.extend(count, "a" if count < 30 else None)
                    life.set_priorities({life.model.last: 0.5 + count})
                    life.reopen()
                    life.look()
                life.lap(3)
                life.extend(9)
                life.reopen()
                life.look(episodes=True)
                life.empty()
                life.reopen()
                life.look()
                life.add()
                self._sound(life)
                life.look(episodes=True)

    def test_killed(self, tmp_path: Path) -> None:
        """Rows that `extend` returned survive a kill, in every phase of a ring."""
        with self.life(tmp_path) as life:
            if not self.persistent:
                return  # `test_opened_again` covers storages in RAM
            plans = ([3], [1, 14, 1], [9, 30, 2])
            for plan in plans:
                life.write_and_be_killed([[Cell(0)] * count for count in plan], "a")
                life.look()
            life.lap(5)
            life.write_and_be_killed([[Cell(1), Cell(1, "t"), Cell(2)], [Cell(2)] * 6])
            life.look(episodes=True)
            ids = life.ids.tolist()
            life.set_priorities({ids[0]: 3.0, ids[5]: 0.25})
            if self.patches:
                life.patch(ids[3:9])
            life.write_and_be_killed([[Cell(3)]])
            life.look(episodes=True)
            self._sound(life)

    def test_changes_outlive_a_kill(self, tmp_path: Path) -> None:
        """Patches and `empty` survive a kill; priorities survive it after a flush."""
        with self.life(tmp_path) as life:
            if not self.persistent:
                return
            life.extend(25)
            if self.patches:
                life.model.reopen()
                life.kill(lambda: life.patch(life.ids.tolist()[4:15:3]))
                life.model.change(life.ids.tolist()[4:15:3])
                life.model.reopen()
                life.look()
            given = {id: 0.25 * id for id in life.ids.tolist()[2:7]}

            def prioritise() -> None:
                life.set_priorities(given)
                life.rb.flush()

            life.model.reopen()
            life.kill(prioritise)
            life.model.set_priorities(given)
            life.model.reopen()
            life.look()
            life.model.reopen()
            life.kill(lambda: life.rb.empty())
            life.model.empty()
            life.model.reopen()
            life.look(episodes=True)

    def test_draws_go_on(self, tmp_path: Path) -> None:
        """After reopening, and after a kill, sampling continues with the same batches."""
        for sampler in (None, lambda: PrioritizedSampler(None, 0.8, 0.5), SamplerWithoutReplacement):
            with self.life(tmp_path, sampler=sampler) as life, self.life(tmp_path, sampler=sampler) as whole:
                for one in (life, whole):
                    one.extend(28)
                    one.set_priorities({10: 4.0, 20: 0.5})
                    same(one.rb.sample(7).batch_size[0], 7, "the size of a batch")
                expected = [whole.rb.sample(4)["number"].tolist() for _ in range(4)]
                if not self.persistent:
                    same([life.rb.sample(4)["number"].tolist() for _ in range(4)], expected, "batches")
                    continue
                life.reopen()
                same(life.rb.sample(4)["number"].tolist(), expected[0], "the batch after opening again")
                life.rb.flush()
                life.kill(lambda: [life.rb.sample(4) for _ in range(2)])
                same(life.rb.sample(4)["number"].tolist(), expected[3], "the batch after a kill")

    def test_one_writer(self, tmp_path: Path) -> None:
        """A second writer of a persistent storage is refused; two storages in RAM are independent."""
        with self.life(tmp_path) as life:
            life.extend(5)
            if self.persistent:
                with raises(LockedError, what="a second writer"):
                    life.begin()
            else:
                with life.begin() as other:
                    same(len(other), 0, "rows of another storage in RAM")
            life.extend(1)
            life.look()

    def test_followers(self, tmp_path: Path) -> None:
        """Followers see only whole committed rows, also without a writer; other copies are independent."""
        with self.life(tmp_path) as life:
            life.extend(6)
            if not self.follows:
                self._copies(life)
                return
            storage = self.follow(life.storage)
            with TensorDictReplayBuffer(storage=storage, batch_size=6) as reader:
                for count in (9, 1, 40):
                    life.extend(count, "a")
                    life.set_priorities({life.model.last: float(count)})
                    if self.patches:
                        life.patch([life.model.last, life.model.last - 1])
                    _wait_for_follower(life, reader)
                life.lap(2)
                life.extend(12)
                _wait_for_follower(life, reader)
                life.empty()
                life.extend(4)
                _wait_for_follower(life, reader)
                batch = make_batch(life.model.live)
                for act in (lambda: reader.extend(batch), reader.empty, lambda: storage.writer().clear()):
                    with raises(StateError, what="a change by a follower"):
                        act()
                life.rb.close()
                life.model.reopen()
                reader.refresh()
                life.look_at_rows(reader)
                life.rb = life.begin()

    def _copies(self, life: Life) -> None:
        if not self.copies:
            with raises(StateError, what="a copy of the buffer"):
                copy.deepcopy(life.rb)
            return
        with copy.deepcopy(life.rb) as other:
            rows = life.model.live
            check_rows(other[:], rows, "a copy's rows")
            life.extend(9)
            check_rows(other[:], rows, "a copy's rows after the original was extended")
            other.extend(make_batch(rows))
            other.empty()
            life.look()

    def test_versions(self, tmp_path: Path) -> None:
        """A snapshot contains the storage as it was; `loads` replaces the content with it."""
        with self.life(tmp_path) as life:
            folder = life.path.with_name("versions")
            life.extend(5)
            if not self.versions:
                with contextlib.suppress(SnapshotError, StateError):
                    life.rb.dumps(folder)
                with raises(SnapshotError, StateError, NotFoundError, what="loads of a snapshot"):
                    life.rb.loads(folder)
                life.look()
                return
            kept, drawn = [], []
            for count in (3, 30, 4100):
                life.extend(count)
                life.set_priorities({life.model.last: 2.0 + count})
                if self.patches:
                    life.patch([life.model.last - 1])
                same(life.rb.dumps(folder).rows, len(life.model.rows), "rows of a snapshot")
                kept.append(life.model.by_index)
                drawn.append(life.rb.sample(9)["number"].tolist())
            life.extend(11)
            life.look()
            for number in (2, 1, 3):
                life.rb.loads(folder, number)
                rows = kept[number - 1]
                found = life.rb[:]
                check_rows(
                    found[found["number"].argsort()], sorted(rows, key=lambda row: row.serial), "loads"
                )
                same(life.rb.sample(9)["number"].tolist(), drawn[number - 1], "the batch after loads")
            with raises(SnapshotError, what="a snapshot that does not exist"):
                life.rb.loads(folder, 17)
            with self.life(tmp_path) as other:
                other.rb.loads(folder, 1)
                rows = sorted(kept[0], key=lambda row: row.serial)
                check_rows(other.rb[:], rows, "loads into a new storage")
                same(other.rb.sample(9)["number"].tolist(), drawn[0], "the batch after loads elsewhere")

    def test_counts_of_hand_outs(self, tmp_path: Path) -> None:
        """Sample counts are kept with the rows of a persistent storage."""
        with self.life(tmp_path, consume_after_n_samples=2, batch_size=5) as life:
            life.extend(15)
            before = life.rb.sample(return_info=True)[1]["id"].tolist()
            if self.persistent:
                life.rb.flush()
                life.write_and_be_killed([[Cell()] * 4])
            else:
                life.extend(4)
            after: list[int] = []
            while life.rb.can_sample():
                after += life.rb.sample(return_info=True)[1]["id"].tolist()
            same(sorted(before + after), sorted(2 * list(life.model.rows)), "how often rows were returned")

    def _sound(self, life: Life) -> None:
        """Close a storage, check its files with `verify`, and open it again."""
        storage: ReadView = life.storage
        life.rb.close()
        same(list(self.verify(storage)), [], "what verify finds")
        life.rb = life.begin()
        life.model.reopen()


def _wait_for_follower(life: Life, reader: TensorDictReplayBuffer) -> None:
    """Compare a follower with the model once it sees the newest row; fail if the row is missing."""
    storage = reader.storage
    life.rb.flush()
    reader.refresh()
    expect(storage.last == life.model.last, f"a follower sees {storage.last} of {life.model.last} rows")
    life.look(reader, episodes=True)
    drawn = reader.sample(return_info=True)[1]["id"]
    expect(bool(torch.isin(drawn, torch.from_numpy(life.ids)).all()), "a follower sampled deleted rows")
