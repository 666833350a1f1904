"""Rows are kept bit by bit through any operations, in packed and in flat fields.

Hypothesis chooses fields, chunks, capacity and calls: interleaved sources, lanes, rings that wrap, stores
that are emptied, closed, killed, dumped and loaded, with a follower. The expected rows are kept in a dict.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.maintenance import verify
from expstore.schema.schema import DTYPES, OBJECT
from tests.support.paths import find_memory
from tests.support.tuned import set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")

WIDE = ("observation", "next.observation", "extra")


@pytest.fixture(autouse=True, scope="module")
def short_shards() -> Iterator[None]:
    """Shards of 16 rows and little spare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PACKED_SHARD_ROWS", 16)
        patch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 16)
        set_spare_slots(patch, 12)
        yield


@dataclass(frozen=True)
class Kind:
    """The values of a field.

    Args:
        dtype: As a schema names it.
        shape: Of a row.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)

    def tensor(self, rows: list[bytes], shape: tuple[int, ...]) -> torch.Tensor:
        """Return rows, given as bytes, as the tensor of a batch."""
        values = np.frombuffer(b"".join(rows), DTYPES[self.dtype]).reshape(*shape, *self.shape).copy()
        found = torch.from_numpy(values)
        return found.view(torch.bfloat16) if self.dtype == "bfloat16" else found


def rows_of(values: torch.Tensor) -> list[bytes]:
    """Return the bytes of each row of a tensor."""
    if values.dtype == torch.bfloat16:
        values = values.view(torch.int16)
    array = values.contiguous().numpy()
    return [row.tobytes() for row in array]


@dataclass
class World:
    """A store, what it holds, and the versions that were made of it."""

    folder: Path
    capacity: int | None
    kinds: dict[str, Kind]
    layout: dict[str, dict[str, Any]]
    durability: Any
    rng: np.random.Generator
    written: int = 0
    live: list[int] = field(default_factory=list)
    rows: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    now: dict[str, bytes] = field(default_factory=dict)  # where each stream is
    versions: dict[int, list[int]] = field(default_factory=dict)
    follower: TensorDictReplayBuffer | None = None

    def __post_init__(self) -> None:
        self.rb = self.open()

    def open(self) -> TensorDictReplayBuffer:
        return expstore.open(
            self.folder / "run.exp",
            capacity=self.capacity,
            layout=expstore.Layout(fields=self.layout),
            seed=1,
            durability=self.durability,
        )

    # -- rows ----------------------------------------------------------------------------------------

    def noise(self, kind: Kind) -> bytes:
        """Return the bytes of a row: any bits, few different ones, or none."""
        what = self.rng.integers(0, 4)
        if kind.dtype == "bool":
            return self.rng.integers(0, 2 if what else 1, kind.size, np.uint8).tobytes()
        return self.rng.integers(0, (1, 2, 256, 256)[what], kind.size, np.uint8).tobytes()

    def step(self, stream: str) -> int:
        """Make a row of a stream, whose next observation is mostly the observation of the row after it."""
        kind, chance = self.kinds["observation"], self.rng.random()
        here = self.now.get(stream) or self.noise(kind)
        there = here if chance < 0.1 else self.noise(kind)
        self.now[stream] = there if chance < 0.8 else self.noise(kind)  # reset, or truncated
        number, self.written = self.written, self.written + 1
        self.rows[number] = here, there, self.noise(self.kinds["extra"])
        return number

    def batch(self, numbers: list[int], shape: tuple[int, ...]) -> TensorDict:
        columns = zip(*[self.rows[number] for number in numbers], strict=True)
        data = TensorDict({"number": torch.tensor(numbers).reshape(shape)}, shape)
        for name, column in zip(WIDE, columns, strict=True):
            data[tuple(name.split("."))] = self.kinds[name].tensor(list(column), shape)
        return data

    def took(self, numbers: list[int]) -> None:
        """Note rows that are in the store."""
        self.live += numbers
        if self.capacity is not None:
            self.live = self.live[-self.capacity :]

    # -- acts ----------------------------------------------------------------------------------------

    def extend(self, count: int, source: str) -> None:
        numbers = [self.step(source) for _ in range(count)]
        self.rb.extend(self.batch(numbers, (count,)), source=source)
        self.took(numbers)

    def add(self, source: str) -> None:
        number = self.step(source)
        self.rb.add(self.batch([number], (1,))[0])
        self.took([number])

    def lanes(self, lanes: int, steps: int, *, time_first: bool) -> None:
        made = [[self.step(f"lane {lane}") for lane in range(lanes)] for _ in range(steps)]
        shape = (steps, lanes) if time_first else (lanes, steps)
        grid = np.array(made) if time_first else np.array(made).T
        data = self.batch(grid.reshape(-1).tolist(), shape)
        if time_first:
            data.names = ["time", None]
        self.rb.extend(data, source="lanes")
        self.took(grid.reshape(-1).tolist())

    def change(self, count: int, names: list[str]) -> None:
        """Give rows other values in some flat fields; they are known by new numbers from now on."""
        names = [name for name in names if self.layout[name]["layout"] == "flat"]
        if not self.live or not names:
            return
        places = np.unique(self.rng.integers(0, len(self.live), count))
        for place in places.tolist():
            row, number = dict(zip(WIDE, self.rows[self.live[place]], strict=True)), self.written
            row |= {name: self.noise(self.kinds[name]) for name in names}
            self.written, self.live[place], self.rows[number] = number + 1, number, tuple(row.values())
        data = self.batch([self.live[place] for place in places.tolist()], (places.size,))
        kept = self.rb.storage
        keys = [("number",), *(tuple(name.split(".")) for name in names)]
        fields = [kept.require_schema().fields[kept.require_schema().place_of(key)] for key in keys]
        columns = [
            np.frombuffer(b"".join(rows_of(data[key])), entry.numpy_dtype).reshape(-1, *entry.shape)
            for key, entry in zip(keys, fields, strict=True)
        ]
        kept.change(kept.window.ids()[places], [kept.require_schema().place_of(key) for key in keys], columns)

    def empty(self) -> None:
        self.rb.empty()
        self.live = []

    def reopen(self) -> None:
        self.rb.close()
        self.rb = self.open()

    def kill(self, counts: list[int], *, synced: bool) -> None:
        """Let another process write, which is killed; go on where it was."""
        self.rb.close()
        batches = [[self.step("other") for _ in range(count)] for count in counts]
        pid = os.fork()
        if not pid:
            try:
                rb = self.open()
                for place, numbers in enumerate(batches):
                    rb.extend(self.batch(numbers, (len(numbers),)), source="other")
                    if synced and not place:
                        rb.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        for numbers in batches:
            self.took(numbers)
        assert verify(self.folder / "run.exp") == []
        self.rb = self.open()

    def dumps(self) -> None:
        made = self.rb.dumps(self.folder / "versions", keep=2)
        self.versions = dict([*self.versions.items(), (made.number, list(self.live))][-2:])

    def loads(self) -> None:
        if self.versions:
            self.rb.loads(self.folder / "versions")
            self.live = list(self.versions[max(self.versions)])

    # -- checks --------------------------------------------------------------------------------------

    def same(self, data: TensorDict, numbers: list[int]) -> None:
        """Hold rows against what was given; they have these numbers, in any order."""
        found = data["number"].reshape(-1).tolist()
        assert sorted(found) == sorted(numbers)
        for place, name in enumerate(WIDE):
            given = [self.rows[number][place] for number in found]
            assert rows_of(data[tuple(name.split("."))]) == given, name

    def check(self, rb: TensorDictReplayBuffer, live: list[int]) -> None:
        """Read all rows, some of them, and a batch."""
        assert len(rb) == len(live)
        if not live:
            return
        self.same(rb[:], live)
        if self.capacity is not None:  # else `[]` counts rows that are gone, too
            some = torch.from_numpy(self.rng.integers(0, len(live), 5))
            self.same(rb[some], rb[:]["number"][some].tolist())
        drawn = rb.sample(6)
        assert set(drawn["number"].tolist()) <= set(live)
        self.same(drawn, drawn["number"].tolist())

    def look(self) -> None:
        """Look at the store, as its writer and as a follower."""
        self.check(self.rb, self.live)
        if self.follower is None and self.live:
            self.follower = expstore.open(self.folder / "run.exp", mode="r", seed=2)
        if self.follower is not None:
            self.follower.refresh()
            self.check(self.follower, self.live)

    def end(self) -> None:
        """Close everything; versions are what they were made of."""
        self.rb.close()
        if self.follower is not None:
            self.check(self.follower, self.live)
            self.follower.close()
        assert not (self.folder / "run.exp/expstore.json").exists() or verify(self.folder / "run.exp") == []
        for number, live in self.versions.items():
            with expstore.open(self.folder / "versions", version=number, seed=3) as rb:
                assert verify(rb.storage.path) == []
                self.check(rb, live)


def calls() -> st.SearchStrategy[tuple[Any, ...]]:
    """Calls on a store, short extends more often than the rest."""
    source = st.sampled_from(["a", "b", "c"])
    return st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 9), source),
        st.tuples(st.just("extend"), st.integers(1, 60), source),
        st.tuples(st.just("add"), source),
        st.tuples(
            st.just("change"), st.integers(1, 6), st.lists(st.sampled_from(WIDE), min_size=1, unique=True)
        ),
        st.tuples(st.just("lanes"), st.integers(2, 3), st.integers(1, 9), st.booleans()),
        st.tuples(st.just("kill"), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.booleans()),
        st.sampled_from([("flush",), ("look",), ("reopen",), ("empty",), ("dumps",), ("loads",)]),
    )


def kinds(dtypes: list[str]) -> st.SearchStrategy[Kind]:
    """Any dtype, in rows of some bytes."""
    return st.builds(Kind, st.sampled_from(dtypes), st.sampled_from([(), (3,), (5, 4), (64,), (2, 3, 20)]))


def live_and_look(data: Any, folder: Path) -> None:
    """Live the life of a store, and look at it after each call or now and then."""
    dtypes = [name for name in DTYPES if name != OBJECT]
    pair, each = data.draw(kinds(dtypes)), data.draw(st.sampled_from([1, 2, 4, 8]))
    packed = {"layout": "packed", "rows": each, "codec": data.draw(st.sampled_from(["lz4hc", "zstd"]))}
    both = ("observation", "next.observation")
    flat = data.draw(
        st.sampled_from([(), (), ("extra",), ("observation",), ("next.observation",), both, both, WIDE, WIDE])
    )
    world = World(
        folder,
        data.draw(st.sampled_from([None, 20, 33, 70])),
        {"observation": pair, "next.observation": pair, "extra": data.draw(kinds(dtypes))},
        {name: {"layout": "flat"} if name in flat else packed for name in WIDE},
        data.draw(st.sampled_from(["process", "process", "sync"])),
        np.random.default_rng(data.draw(st.integers(0, 99))),
    )
    always = data.draw(st.booleans())
    try:
        for name, *given_ in data.draw(st.lists(calls(), min_size=1, max_size=14)):
            if name == "flush":
                world.rb.flush()
            elif name == "lanes":
                world.lanes(given_[0], given_[1], time_first=given_[2])
            elif name == "kill":
                world.kill(given_[0], synced=given_[1])
            else:
                getattr(world, name)(*given_)
            if always:
                world.look()
        world.look()
        world.end()
    finally:
        world.rb.close()
        if world.follower is not None:
            world.follower.close()


@pytest.mark.guarantee(
    "rows/bits",
    "Rows of every dtype are read back bit by bit, packed or flat, whatever happens to the store.",
)
@pytest.mark.slow
@hypothesis.settings(max_examples=4, suppress_health_check=list(hypothesis.HealthCheck))
@given(data=st.data())
def test_rows_come_back_bit_by_bit(data: Any) -> None:
    with tempfile.TemporaryDirectory(dir=find_memory()) as name:
        live_and_look(data, Path(name))


@pytest.mark.torture
@pytest.mark.timeout(3600)
@hypothesis.settings(
    max_examples=2000, derandomize=False, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True
)
@given(data=st.data())
def test_rows_come_back_bit_by_bit_in_thousands_of_lives(data: Any, count_cases: Callable[..., None]) -> None:
    count_cases()
    with tempfile.TemporaryDirectory(dir=find_memory()) as name:
        live_and_look(data, Path(name))
