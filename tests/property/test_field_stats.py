"""`rb.columns.stats()` equals NumPy's statistics of all readable rows after any operations.

Hypothesis chooses the operations: writes that wrap a ring, changes in place, deleted episodes, added and
dropped fields, restored snapshots, emptied and reopened stores. A follower computes the statistics too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore.buffers import field_stats
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.bfloat16 import widen_bfloat16
from expstore.errors import NotReadyError
from expstore.storages import MemoryStorage, ZarrStorage
from tests.support.paths import find_memory
from tests.support.tuned import set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")

LANES = 3


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Read 8 rows at a time, so that the moments of several pieces are merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_stats, "_ROWS", 8)
        patch.setattr(field_stats, "_VALUES", 8 * 20)
        set_spare_slots(patch, 12)
        yield


acts = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 40)),
        st.tuples(st.just("extend"), st.integers(1, 9)),
        st.tuples(st.just("change"), st.integers(0, 200), st.integers(1, 6)),
        st.tuples(st.sampled_from(["delete", "add", "drop", "dump", "load", "empty", "reopen"])),
    ),
    min_size=1,
    max_size=12,
)


class Life:
    """A buffer, and the acts on it.

    Args:
        folder: Where it is.
        kind: "ring", "endless", "memory" or "grid".
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.number, self.rng = 0, np.random.default_rng(0)
        self.rb = self._open()

    def _open(self) -> TensorDictReplayBuffer:
        path = self.folder / "run.exp"
        if self.kind == "memory":
            return TensorDictReplayBuffer(storage=MemoryStorage(50), batch_size=4)
        if self.kind == "grid":
            return TensorDictReplayBuffer(storage=ZarrStorage(path, 60, ndim=2), batch_size=4)
        return expstore.open(path, capacity=50 if self.kind == "ring" else None, batch_size=4)

    def rows(self, count: int) -> TensorDict:
        """Return rows of episodes of 5 steps; every value is another one."""
        number = torch.arange(self.number, self.number + count)
        self.number += count
        values = torch.from_numpy(self.rng.normal(1e6, 1.0, (count, 2, 3)))
        ends = (number % 5 == 4)[:, None]
        return TensorDict(
            {
                "observation": values.float(),
                "action": number,
                "half": values[:, 0, :1].bfloat16(),
                "flag": values[:, 0] > 1e6,
                "complex": torch.complex(values[:, 0, 0], values[:, 0, 1]).to(torch.complex64),
                "next": {"reward": values[:, 0, :1], "done": ends, "terminated": ends},
            },
            [count],
        )

    def act(self, name: str, *how: int) -> None:
        """Do something that the kind of buffer can do."""
        rb, kind = self.rb, self.kind
        if name == "extend":
            count = how[0] if kind != "grid" else how[0] // LANES * LANES + LANES
            batch = self.rows(count)
            rb.extend(batch.reshape(LANES, -1) if kind == "grid" else batch)
        elif name == "change" and len(rb):
            ids = rb.storage.window.ids()
            some = np.unique(ids[(how[0] + np.arange(how[1])) % ids.size])
            place = rb.storage.require_schema().place(("observation",))
            values = self.rng.normal(0, 9, (some.size, 2, 3)).astype(np.float32)
            rb.storage.writer().change(some, [place], [values])
        elif name == "delete" and kind == "endless":
            rb.episodes.delete("episode_id % 3 = 1")
        elif name in ("add", "drop") and kind != "memory" and rb.schema is not None:
            there = ("late",) in rb.schema
            if name == "drop" and there:
                rb.columns.drop("late")
            elif name == "add" and not there:
                rb.columns.add("late", fill=float(self.number))
        elif name == "dump" and kind != "memory" and len(rb):
            rb.dumps(self.folder / "versions")
        elif name == "load" and (self.folder / "versions").exists():
            rb.loads(self.folder / "versions")
        elif name == "empty":
            rb.empty()
        elif name == "reopen" and kind != "memory":
            rb.close()
            self.rb = self._open()


def check(rb: Any) -> None:
    """Compare the statistics with NumPy's of all rows."""
    storage = rb.storage
    if not len(storage):
        with pytest.raises(NotReadyError):
            rb.columns.stats()
        return
    found = rb.columns.stats()
    names = {name if isinstance(name, tuple) else (name,) for name in found}
    assert names == {key for key in storage.schema.keys if key != ("complex",)}
    rows = storage.read(storage.window.ids())
    for entry, values in zip(storage.schema.fields, rows, strict=True):
        name = entry.key if len(entry.key) > 1 else entry.key[0]
        if name == "complex":
            continue
        stats = found[name]
        held = widen_bfloat16(values) if entry.dtype == "bfloat16" else values
        assert stats.count == len(held)
        for part, of in ((stats.mean, np.mean), (stats.std, np.std)):
            assert part.dtype == np.float64
            assert part.shape == entry.shape
            np.testing.assert_allclose(part, of(held.astype(np.float64), axis=0), rtol=1e-9, atol=1e-7)
        for part, of in ((stats.min, np.min), (stats.max, np.max)):
            assert part.dtype == held.dtype
            np.testing.assert_array_equal(part, of(held, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "endless", "memory", "grid"])
@given(acts=acts)
def test_statistics_are_those_of_the_rows(kind: str, acts: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory(dir=find_memory()) as folder:
        life, reader = Life(Path(folder), kind), None
        life.act("extend", 30)
        if kind in ("ring", "endless"):
            reader = expstore.open(Path(folder) / "run.exp", mode="r")
        try:
            for name, *how in acts:
                life.act(name, *how)
                check(life.rb)
                if reader is not None:
                    life.rb.storage.drain()
                    check(reader)
        finally:
            life.rb.close()
            if reader is not None:
                reader.close()
