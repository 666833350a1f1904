"""Recorded draws have the same rows after a restore, a resize and a merge, or an error; never other rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
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
from expstore.errors import NotReadyError, RowsChangedError, StateError
from expstore.storages.format.renumbering import Renumbering
from tests.support.paths import find_memory
from tests.support.stores import copy_folder
from tests.support.tuned import set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")

KINDS: dict[str, dict[str, Any]] = {
    "growing": {},
    "ring": {"capacity": 24},
    "packed": {"capacity": 24, "layout": "packed"},
    "best": {"capacity": 24, "writer": lambda: expstore.TensorDictMaxValueWriter(rank_key="score")},
}


@pytest.fixture(autouse=True, scope="module")
def little_spare() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        set_spare_slots(patch, 12)
        yield


class Life:
    """A store with a consumer, and the rows of each draw when it was last replayed."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.path, self.options = folder, folder / "run.exp", dict(KINDS[kind])
        self.best, self.rows, self.copies = kind == "best", 0, 0
        self.known: list[list[float]] = []
        #: Which call of `record_lineage` was the last one before a row was written, by the row's observation.
        self.policies: dict[float, int] = {}
        self._open()

    def _open(self) -> None:
        options = self.options | {"writer": self.options["writer"]()} if self.best else self.options
        if self.path.exists():
            options = {name: value for name, value in options.items() if name == "writer"}
        self.rb = expstore.open(self.path, batch_size=4, seed=1, **options)
        self.c = self.rb.consumer("learner", keep="all", at="end")

    def replay(self) -> list[list[float] | None]:
        """Return the rows of each draw; None: some are gone."""
        found: list[list[float] | None] = []
        for number in range(len(self.known)):
            try:
                (batch,) = self.c.replay(number, number)
                found.append(batch["observation"].reshape(-1).tolist())
            except RowsChangedError:
                found.append(None)
        return found

    def step(self, act: str, number: int) -> None:
        getattr(self, act)(number)
        if act == "tag":
            return
        for place, now in enumerate(self.replay()):
            if now is not None:
                if act not in ("extend", "draw") or not self.best:  # the best rows replace others in place
                    assert now == self.known[place], (act, place)
                self.known[place] = now
        if act != "draw":
            self.check_lineage(self.rb)

    def check_lineage(self, rb: Any) -> None:
        """Each row has exactly one step of the lineage that wrote it, the one in which it was written."""
        storage, ids = rb.storage, rb.storage.stored.ids()
        if self.best or not ids.size:
            return  # the best rows replace others, with other ids
        steps = rb.sql(
            "SELECT first_id, last_id, facts->'policy' FROM lineage WHERE kind = 'collect'"
        ).fetchall()
        (seen,) = storage.read(ids, [storage.require_schema().place(("observation",))])
        for id, value in zip(ids.tolist(), seen.reshape(-1).tolist(), strict=True):
            found = [
                int(policy) for first, last, policy in steps if first is not None and first <= id <= last
            ]
            assert found == [self.policies[value]], (id, value, steps)

    def write(self, rb: Any, number: int) -> None:
        """Append rows, as written by a policy of their own."""
        first = self.rows
        rb.record_lineage(policy=first)
        rb.extend(self.make_rows(1 + number))
        self.policies |= dict.fromkeys(map(float, range(first, self.rows)), first)

    def make_rows(self, count: int) -> TensorDict:
        seen = torch.arange(self.rows, self.rows + count)[:, None].float()
        self.rows += count
        done = (torch.arange(count) == count - 1)[:, None]
        step = {"done": done, "terminated": done}
        return TensorDict({"observation": seen, "score": (seen * 7) % 101, "next": step}, [count])

    def extend(self, number: int) -> None:
        self.write(self.rb, number)

    def draw(self, number: int) -> None:
        try:
            self.known.append(self.c.sample()["observation"].reshape(-1).tolist())
        except NotReadyError:
            assert not len(self.rb)

    def tag(self, number: int) -> None:
        if self.rows:
            self.rb.snapshots.create(self.folder / "versions", keep=100)

    def restore(self, number: int) -> None:
        versions = self.folder / "versions"
        if versions.exists():
            known = self.rb.snapshots.list(versions)
            with suppress(StateError):  # there is no room for all of the best rows
                self.rb.snapshots.restore(versions, version=known[number % len(known)].number)

    def restore_of_copy(self, number: int) -> None:
        """Restore a version of a copy that has gone on with other rows."""
        self.copies += 1
        other = self.folder / f"{self.copies}.exp"
        self.rb.flush()
        copy_folder(self.path, other)
        writer = {"writer": self.options["writer"]()} if self.best else {}
        with expstore.open(other, batch_size=4, **writer) as rb:
            self.write(rb, number)
            rb.snapshots.create(self.folder / f"{self.copies}.versions")
        self.extend(number)
        for _ in range(3):
            self.draw(0)
        with suppress(StateError):
            self.rb.snapshots.restore(self.folder / f"{self.copies}.versions")

    def delete(self, number: int) -> None:
        if self.rb.storage.capacity is None:
            self.rb.episodes.delete(f"episode_id = {number}")

    def resize(self, number: int) -> None:
        self.rb.close()
        expstore.resize(self.path, capacity=None if number == 20 else 4 + number)
        self._open()

    def reopen(self, number: int) -> None:
        self.rb.close()
        self._open()

    def merge(self, number: int) -> None:
        self.rb.close()
        if self.rows:
            out = self.folder / f"{self.copies}.merged"
            self.copies += 1
            expstore.merge([self.path], out=out)
            with expstore.open(out, mode="r", batch_size=4) as rb:
                assert rb.consumers.list() == []
                self.check_lineage(rb)
        self._open()


ACTS = [
    "extend",
    "extend",
    "draw",
    "draw",
    "tag",
    "restore",
    "restore",
    "restore_of_copy",
    "delete",
    "resize",
]
STEPS = st.lists(
    st.tuples(st.sampled_from([*ACTS, "reopen", "merge"]), st.integers(0, 20)), min_size=4, max_size=16
)


@pytest.mark.guarantee(
    "consumers/restore",
    "After a restore, a resize or a merge a consumer's recorded draws have the same rows, or raise "
    "`RowsChangedError`.",
)
@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=8)
@given(steps=STEPS)
def test_recorded_draws_never_get_other_rows(kind: str, steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(dir=find_memory()) as folder:
        life = Life(Path(folder), kind)
        try:
            for act, number in [("extend", 12), ("draw", 0), *steps]:
                life.step(act, number)
        finally:
            life.rb.close()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4), max_size=5)
)
def test_the_table_is_the_same_as_following_each_change(changes: list[list[tuple[int, int]]]) -> None:
    """Each change moves some runs of the present ids, and leaves the ids between them."""
    table, present, last = Renumbering(np.empty((0, 3), np.int64)), np.arange(31), 31
    for change in changes:
        runs, at = [], 0
        for skipped, rows in change:
            ids = present[at + skipped :][:rows]
            ids = ids[ids - ids[:1] == np.arange(ids.size)]  # a run
            at += skipped + rows
            if ids.size:
                runs.append((ids[0], ids.size, last))
                last += ids.size
        for first, rows, new in runs:
            moved = (present >= first) & (present < first + rows)
            present = np.where(moved, new + present - first, present)
        if runs:
            table = table.then(np.array(runs[::-1]))
        assert table.present(np.arange(31)).tolist() == present.tolist()
