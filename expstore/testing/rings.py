"""Rows are read as they were written: in every phase of a ring, unbounded, with one dim and with two.

Part of the suite.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.errors import NoRowError
from expstore.samplers.without_replacement import SamplerWithoutReplacement
from expstore.schema.schema import DTYPES, OBJECT
from expstore.testing.assertions import expect, raises, same
from expstore.testing.buffer_and_model import Life
from expstore.testing.declaration import Declared
from expstore.testing.model_rows import check_rows

_ROUNDS = 150


class RingSuite(Declared):
    """Test the rows of a storage."""

    def test_a_ring_fills_and_wraps(self, tmp_path: Path) -> None:
        """Batches of any length up to the capacity are kept."""
        for capacity in (1, 7, 20):
            with self.life(tmp_path, capacity) as life:
                life.look()
                for count in (1, 2, 3, 1, capacity, 1, capacity - 1, 5, 2):
                    life.extend(count) if count else life.add()
                    life.look()
                life.look(episodes=True)

    def test_the_end_of_the_slots(self, tmp_path: Path) -> None:
        """Rows wrap around the end of the slots, and the oldest are overwritten."""
        with self.life(tmp_path) as life:
            life.extend(3)
            for short in (0, 1, 7):
                for counts in ((1, 1, 20), (19, 2), (30,)):
                    life.lap(short)
                    life.look()
                    for count in counts:
                        life.extend(count)
                        life.look()
            life.look(episodes=True)

    def test_extends_longer_than_the_spare_slots_and_the_ring(self, tmp_path: Path) -> None:
        """The newest rows are kept, and the next extend continues after them."""
        with self.life(tmp_path) as life:
            life.extend(5)
            spare, slots = life.storage.geometry.spare, life.storage.geometry.slots or 0
            for count in (spare - 1, spare, spare + 1, slots - 1, slots, slots + 1, 2 * slots + 3):
                life.extend(count)
                life.look()
                life.extend(2)
                life.look()
            life.look()

    def test_without_bound(self, tmp_path: Path) -> None:
        """An unbounded storage keeps all rows, also beyond the space that it allocated first."""
        with self.life(tmp_path, None) as life:
            for count in (3, 1, 5000, 2, 9000):
                life.extend(count)
                life.look()
            life.add()
            life.look(episodes=True)
            same(life.storage.geometry.slots, None, "the slots of an unbounded storage")

    def test_single_rows(self, tmp_path: Path) -> None:
        """Rows added one by one can be read at once, together with rows added in batches."""
        with self.life(tmp_path, 7) as life:
            for _ in range(17):
                life.add()
                life.look()
            life.extend(4)
            life.add()
            life.look()

    def test_time_and_lanes(self, tmp_path: Path) -> None:
        """With two dims every cell is a row, and whole time steps are evicted."""
        with self.life(tmp_path, 24, lanes=3) as life:
            for steps in (1, 2, 5, 3, 8, 9, 1):
                life.extend(steps)
                life.look()
            life.lap(3)
            life.extend(3)
            life.look(episodes=True)
            same(tuple(life.rb[:].shape), (3, 8), "the shape of all rows")

    def test_indices(self, tmp_path: Path) -> None:
        """Integers, slices, arrays and masks select the same rows as in a tensor of all rows."""
        with self.life(tmp_path) as life:
            life.extend(33)
            rows, rb = life.model.by_index, life.rb
            mask = torch.arange(20) % 3 == 0
            for index in (slice(2, 9, 3), slice(None, None, 7), [3, 3, 0], torch.tensor([19, 0]), mask):
                chosen = np.arange(20)[index.numpy() if isinstance(index, torch.Tensor) else index]
                check_rows(rb[index], [rows[n] for n in chosen.tolist()], f"[{index}]")
            check_rows(rb[-1].unsqueeze(0), [rows[-1]], "[-1]")
            for wrong in (20, -21, [0, 1000]):
                with raises(NoRowError, what=f"the index {wrong} of 20 rows"):
                    rb[wrong]
            with raises(NoRowError, what="a mask longer than the buffer"):
                rb[torch.ones(21, dtype=torch.bool)]
            life.look()

    def test_iteration(self, tmp_path: Path) -> None:
        """A pass without replacement has every row once; iteration over a storage has all rows in order."""
        for counts in ((9,), (33,)):
            with self.life(tmp_path, sampler=SamplerWithoutReplacement) as life:
                for count in counts:
                    life.extend(count)
                found = torch.cat([batch["number"] for batch in life.rb]).tolist()
                expected = [row.serial for row in life.model.live]
                same(sorted(found), expected, "the rows of a pass")
                each = [int(row["number"]) for row in life.storage]
                same(each, [row.serial for row in life.model.by_index], "rows of an iteration")

    def test_every_dtype(self, tmp_path: Path) -> None:
        """Values are kept bit by bit: infinities, several NaNs, negative zeros."""
        rng = np.random.default_rng(7)
        bits = {
            name: rng.integers(0, 2 if name == "bool" else 256, (41, 3, dtype.itemsize), np.uint8)
            for name, dtype in DTYPES.items()
            if name != OBJECT
        }
        storage = self.make(tmp_path / "bits", 20, ndim=1, seed=1)
        with ReplayBuffer(storage=storage, batch_size=4) as rb:
            for start, count in ((0, 1), (1, 7), (8, 13), (21, 20)):
                batch = TensorDict({}, [count])
                for name, column in bits.items():
                    batch[name] = _tensor(name, column[start : start + count])
                rb.extend(batch)
                ids = storage.window.ids()
                for name, column in bits.items():
                    (found,) = storage.read(ids, [storage.require_schema().place_of((name,))])
                    expected = np.ascontiguousarray(column[ids - 1]).view(DTYPES[name]).reshape(-1, 3)
                    same(found, expected, f"rows of {name}")
                    expect(rb[:][name].dtype == batch[name].dtype, f"{name} has another dtype after reading")

    def test_forgotten_rows(self, tmp_path: Path) -> None:
        """`empty` deletes all rows; ids continue, indices start at 0 again."""
        for capacity in (20, None):
            with self.life(tmp_path, capacity) as life:
                life.empty()
                life.look()
                for before, after in ((7, 3), (30, 30), (1, 25)):
                    life.extend(before)
                    life.empty()
                    life.look()
                    life.empty()
                    life.extend(after)
                    life.look()
                life.look(episodes=True)

    def test_rows_are_never_torn(self, tmp_path: Path) -> None:
        """While the ring is overwritten, other threads sample whole rows."""
        with self.life(tmp_path) as life:
            life.extend(20)
            stop, problems, drawn = threading.Event(), list[BaseException](), [0, 0]

            def draw(number: int) -> None:
                try:
                    while not stop.is_set():
                        _whole(life)
                        drawn[number] += 1
                except BaseException as exc:
                    problems.append(exc)
                    stop.set()

            readers = [threading.Thread(target=draw, args=(number,)) for number in range(2)]
            for reader in readers:
                reader.start()
            rounds = 0
            while not stop.is_set() and (rounds < _ROUNDS or min(drawn) < 30):
                rounds += 1
                life.extend(1 + rounds * 37 % 900)
            stop.set()
            for reader in readers:
                reader.join()
            if problems:
                raise problems[0]
            life.look()


def _whole(life: Life) -> None:
    """Sample a batch and check each row: all its fields follow from its number."""
    batch = life.rb.sample(16)
    number = batch["number"]
    same(batch["value"], number.double() * 125, "value of a sampled row")
    same(batch["observation"][:, 1], number.float() + 1 / 8, "observation of a sampled row")
    pixels = (number[:, None] * 31_000 + torch.arange(batch["pixels"].shape[1])) % 251
    same(batch["pixels"], pixels.to(torch.uint8), "pixels of a sampled row")


def _tensor(name: str, column: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
    values = np.ascontiguousarray(column).view(DTYPES[name]).reshape(-1, 3)
    if name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
