"""Stores with any history, together with the model of their rows.

Used by tests that compare stores with a row-by-row reference (`slice_model`): rows are written one by one and
in lanes, from several sources; stores are reopened, killed, damaged, loaded.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage, TensorDictReplayBuffer
from expstore.core.id_set import IdSet
from expstore.disk.files import Disk
from expstore.storages.format.manifest import Manifest
from tests.support.flat_storages import flatten_dims
from tests.support.slice_model import Batch, Cell, Fields, Model
from tests.support.tuned import set_spare_slots

SPARE = 12


def use_short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rings few spare slots, so that they wrap after a few rows."""
    set_spare_slots(monkeypatch, SPARE)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lanes, times = draw(
        st.one_of(
            st.tuples(st.integers(1, 3), st.integers(1, 6)),
            st.sampled_from([(1, 1), (1, 1), (1, 12), (4, 1), (2, 20)]),
        )
    )
    cells = st.builds(Cell, st.sampled_from("........ttTTsdx"), st.sampled_from([0, 0, 0, 1, 2]))
    return Batch(
        tuple(draw(st.lists(cells, min_size=lanes * times, max_size=lanes * times))),
        lanes,
        draw(st.sampled_from([None, None, "a", "a", "b"])),
        draw(st.booleans()),
    )


def single_rows(batch: Batch) -> list[Batch]:
    return [Batch((cell,), 1, batch.source) for cell in batch.cells]


anywhere = st.one_of(
    st.tuples(st.just("extend"), batches()),
    st.tuples(st.just("extend"), batches()),
    st.tuples(st.just("add"), batches()),
    st.tuples(st.just("empty"), st.none()),
    st.tuples(st.just("retire"), st.floats(0, 1)),
)
only_on_disk = st.one_of(
    st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("killed"), batches()),
    st.tuples(st.just("damage"), st.tuples(st.floats(0, 1), st.integers(1, 5))),
    st.tuples(st.just("load"), st.none()),
)


@dataclass
class World:
    """A store together with its model.

    Args:
        model: The model, to which all operations are applied.
        make: Function that creates the sampler.
        folder: Folder of stores on disk; None for stores in memory.
        dress: Function that adds fields to rows.
        transforms: Transforms of the buffer.
    """

    model: Model
    make: Callable[[], Any]
    folder: Path | None
    dress: Callable[[TensorDict], TensorDict] = lambda rows: rows
    transforms: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = 0
        self.rb = self.open()

    def open(self) -> TensorDictReplayBuffer:
        rb = self._open()
        for transform in self.transforms:
            rb.append_transform(transform)
        return rb

    def _open(self) -> TensorDictReplayBuffer:
        if self.folder is not None:
            return expstore.open(self.path, capacity=self.model.capacity, seed=5, sampler=self.make())
        storage = MemoryStorage(self.model.capacity, seed=5)
        flatten_dims(storage)  # lanes as in stores on disk
        return TensorDictReplayBuffer(storage=storage, sampler=self.make())

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / "run.exp"

    def do(self, act: str, given: Any) -> None:
        getattr(self, act)(*(() if given is None else (given,)))

    def extend(self, batch: Batch) -> None:
        self.rb.extend(self.dress(self.model.extend(batch)), source=batch.source)

    def add(self, batch: Batch) -> None:
        for single in single_rows(batch):
            self.rb.add(self.dress(self.model.extend(single))[0], source=single.source)

    def empty(self) -> None:
        self.rb.empty()
        self.model.empty()

    def retire(self, part: float) -> None:
        if count := round(part * len(self.model.rows)):
            ids = self.rb.storage.window.ids()
            self.rb.storage._retire(int(ids[count - 1]))
            self.model.retire(count)

    def reopen(self) -> None:
        self.rb.close()
        self.rb = self.open()
        self.model.reopen()

    def killed(self, batch: Batch) -> None:
        """Let another process continue the store, write and be killed."""
        self.rb.close()
        self.model.reopen()
        data = [
            (self.dress(self.model.extend(part)), part.source) for part in (batch, *single_rows(batch)[:3])
        ]
        if (child := os.fork()) == 0:
            try:
                rb = self.open()
                for rows, source in data:
                    rb.extend(rows, source=source)
            except BaseException:
                os._exit(1)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the writer failed before it was killed"
        self.rb = self.open()
        self.model.reopen()

    def load(self) -> None:
        """Replace all rows by the same rows with other ids."""
        if self.rb.schema is not None:
            self.versions += 1
            version = self.path.with_name(f"version{self.versions}")
            self.rb.dumps(version)
            self.rb.loads(version)
            self.model.reopen()

    def damage(self, given: tuple[float, int]) -> None:
        """Delete rows in the middle, as a repair does with rows of damaged blocks."""
        where, count = given
        ids = self.rb.storage.window.ids()[: len(self.model.rows)]
        if ids.size < 3:
            return
        first = min(round(where * ids.size), ids.size - 1)
        lost = ids[first : first + count].tolist()
        self.rb.close()
        manifest = Manifest.load(Disk(), self.path)
        deleted = manifest.deleted.join(IdSet.of((id, id) for id in lost))
        manifest.replace(deleted=deleted).save(Disk(), self.path)
        self.model.give_up(first, len(lost))
        self.model.reopen()
        self.rb = self.open()


@dataclass
class Scenario:
    """A store, its history, and the way in which slices are drawn."""

    on_disk: bool
    plan: list[tuple[str, Any]]
    capacity: int | None
    fields: Fields
    length: int
    by: str

    @contextmanager
    def begin(self, make: Callable[[], Any], **dress: Any) -> Iterator[World]:
        with tempfile.TemporaryDirectory() as folder:
            model, place = Model(self.capacity, self.fields), Path(folder) if self.on_disk else None
            world = World(model, make, place, **dress)
            yield world
            world.rb.close()


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    on_disk = draw(st.booleans())
    return Scenario(
        on_disk,
        draw(st.lists(anywhere | only_on_disk if on_disk else anywhere, min_size=4, max_size=14)),
        draw(st.sampled_from([None, 5, 13, 29, 29])),
        Fields(
            draw(st.booleans()),
            draw(st.sampled_from(["", "is_init", "step_count"])),
            draw(st.booleans()),
        ),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(["trajectory", "start"])),
    )
