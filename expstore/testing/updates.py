"""Rows can be changed in place, or changing them raises an error; invalid changes change nothing.

Part of the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expstore.errors import NoRowError, NotFoundError, SchemaError, StateError
from expstore.testing.assertions import expect, raises, same
from expstore.testing.buffer_and_model import Life
from expstore.testing.declaration import Declared
from expstore.testing.model import Cell
from expstore.testing.model_rows import make_batch, patch_of
from expstore.writers.writers import TensorDictMaxValueWriter


class ChangeSuite(Declared):
    """Test changes of a storage's rows and fields."""

    def test_patches(self, tmp_path: Path) -> None:
        """Fields change in all rows that are named, and in no row that reuses their slots."""
        for capacity in (20, None):
            with self.life(tmp_path, capacity) as life:
                life.extend(12)
                life.extend(14)
                if not self.patches:
                    _cannot(life)
                    continue
                ids = life.ids.tolist()
                life.patch([ids[0], ids[7], 10**6, 0, -1, ids[-1]])
                life.look()
                life.patch(ids[3:])
                life.lap(2)
                life.extend(7)
                life.patch([1, *life.ids.tolist()[::3]])
                life.look()
                _by_index(life)
                life.look()

    def test_patches_that_do_not_fit(self, tmp_path: Path) -> None:
        """Invalid patches raise an error and change nothing."""
        with self.life(tmp_path) as life:
            life.extend(25)
            ids, rb = torch.tensor([10, 11]), life.rb
            for wrong in ({"value": torch.zeros(3)}, {"pixels": torch.zeros(2, 48)}, {"value": ["a", "b"]}):
                with raises(SchemaError, what=f"the patch {wrong}"):
                    rb.update_if_present(id=ids, patch=patch_of(life.model.live[4:6]) | wrong)
            with raises(NotFoundError, what="a patch of an unknown field"):
                rb.update_if_present(id=ids, patch={"no_such_field": torch.zeros(2)})
            with raises(NoRowError, what="a change of an unknown row"):
                rb.set_at_("value", 0.0, [3, 20])
            with raises(NotFoundError, SchemaError, what="a change of overwritten rows"):
                life.storage.writer().change(np.array([2, 9]), [0], [np.zeros(2, np.int64)])
            life.look()

    def test_the_best_rows(self, tmp_path: Path) -> None:
        """In a full storage a better row replaces the worst one, in its slot."""
        with self.life(tmp_path, 8, writer=lambda: TensorDictMaxValueWriter("value")) as life:
            rows = life.model.extend([Cell()] * 60)
            batch = life.batch(rows)
            scores = torch.from_numpy(np.random.default_rng(3).permutation(60).astype(np.float64))
            batch["value"] = scores
            if not self.ranks:
                for part in (batch[:5], batch[:20]):
                    with raises(StateError, SchemaError, what="a writer that keeps the best rows"):
                        life.rb.extend(part)
                    same(len(life.rb), 0, "rows after a refused write")
                return
            seen = 0
            for count in (3, 5, 1, 30, 1, 20):
                life.rb.extend(batch[seen : seen + count])
                seen += count
                best = scores[:seen].topk(min(seen, 8)).values.tolist()
                found = life.rb[:]
                same(sorted(found["value"].tolist(), reverse=True), best, "the best rows")
                same(found["value"], scores[found["number"]], "whole rows")
                expect(set(life.rb.sample()["value"].tolist()) <= set(best), "a replaced row was sampled")
            if self.persistent:
                life.reopen()
                same(
                    sorted(life.rb[:]["value"].tolist(), reverse=True), best, "the best rows after reopening"
                )

    def test_batches_that_do_not_fit(self, tmp_path: Path) -> None:
        """`extend` and `add` refuse invalid batches whole, also after the ring has wrapped."""
        with self.life(tmp_path) as life:
            rows = life.model.extend([Cell()] * 3)
            life.rb.extend(life.batch(rows))
            for count in (30, 5):
                for what, spoil in _SPOILT.items():
                    for act in (life.rb.extend, lambda batch: life.rb.add(batch[0])):
                        with raises(SchemaError, what=f"a batch with {what}"):
                            act(spoil(make_batch(rows)))
                life.look()
                life.extend(count)
            with raises(SchemaError, what="replacement rows that do not fit"):
                life.rb[[1, 2, 3]] = _SPOILT["a field of another dtype"](make_batch(rows))
            life.look()

    def test_fields_come_and_go(self, tmp_path: Path) -> None:
        """An added field is in all rows, also later ones, and the other fields stay; or adding raises."""
        with self.life(tmp_path) as life:
            life.extend(25)
            rb = life.rb
            acts: list[Callable[[], Any]] = [
                lambda: rb.columns.add("score", sql="number * 2", dtype=torch.int64, default=-1),
                lambda: rb.columns.drop("observation"),
            ]
            if not self.late_fields:
                for act in acts:
                    with raises(StateError, SchemaError, what="adding or dropping a field"):
                        act()
                life.look()
                return
            acts[0]()
            found = rb[:]
            same(found["score"], found["number"] * 2, "an added field")
            life.extend(4)
            life.lap(1)
            life.extend(3)
            life.look()
            same(set(rb[:]["score"].tolist()), {-1}, "the added field in later rows")
            rb.columns.drop("score")
            life.look()
            if self.persistent:
                life.reopen()
                life.look()
            expect(life.rb[:].get("score") is None, "a dropped field is still there")

    def test_a_closed_storage(self, tmp_path: Path) -> None:
        """A closed storage refuses reads and writes; a second `close` does nothing."""
        with self.life(tmp_path) as life:
            life.extend(5)
            rb, storage, batch = life.rb, life.storage, make_batch(life.model.live)
            rb.close()
            rb.close()
            acts: dict[str, Callable[[], Any]] = {
                "extend": lambda: rb.extend(batch),
                "add": lambda: rb.add(batch[0]),
                "empty": rb.empty,
                "[]=": lambda: rb.__setitem__(0, batch[0]),
                "[]": lambda: rb[0],
                "flush": rb.flush,
                "update_priority": lambda: rb.update_priority(id=[1], priority=1.0),
                "clear": lambda: storage.writer().clear(),
                "change": lambda: storage.writer().change(np.array([1]), [0], [np.zeros(1, np.int64)]),
                "dumps": lambda: rb.dumps(life.path / "versions"),
            }
            for name, act in acts.items():
                with raises(StateError, what=f"{name} on a closed storage", says="closed; open it again"):
                    act()
            expect(
                storage.closed and not storage.can_write, "can_write is true although the storage is closed"
            )

    def test_before_the_first_rows(self, tmp_path: Path) -> None:
        """A storage without rows has no fields; reading raises, and deleting does nothing."""
        with self.life(tmp_path) as life:
            storage = life.storage
            same((len(life.rb), storage.window.size, storage.last), (0, 0, 0), "rows of a new storage")
            expect(storage.schema is None, "a new storage has fields")
            asks: list[Callable[[], Any]] = [
                storage.require_schema,
                lambda: storage.require_schema().place_of(("value",)),
                lambda: storage.read(np.array([1])),
            ]
            for ask in asks:
                with raises(StateError, what="reading fields", says="extend() it first"):
                    ask()
            with raises(StateError, NotFoundError, what="reading rows"):
                life.rb[0]
            storage.writer().clear()
            storage.writer().sync()
            same(storage.writer().set_priorities(np.array([1]), np.ones(1)), 0, "priorities that were set")
            life.extend(4)
            life.look()
            same(
                storage.require_schema().place_of(("value",)),
                storage.require_schema().place(("value",)),
                "place_of",
            )
            with raises(SchemaError, what="an unknown field", says="no field 'reward'"):
                storage.require_schema().place_of(("reward",))

    def test_stats(self, tmp_path: Path) -> None:
        """`stats` counts rows, extends and draws."""
        with self.life(tmp_path) as life:
            life.extend(15)
            life.extend(12)
            life.rb.sample()
            life.rb.sample()
            stats, storage = life.rb.stats(), life.storage
            spare = storage.geometry.spare
            expected = {
                "storage": storage.kind, "size": 20, "capacity": 20, "spare": spare, "last_id": 27,
                "write_count": 27, "draws": 2, "extends": 2, "utilization": 1.0,
            }  # fmt: skip
            same({name: stats[name] for name in expected}, expected, "stats")


def _cannot(life: Life) -> None:
    """Check that every way of changing rows raises an error and changes nothing."""
    rb, ids = life.rb, torch.from_numpy(life.ids[:2])
    patch, rows = patch_of(life.model.live[5:7]), make_batch(life.model.live[5:7])
    places = [life.storage.require_schema().place_of(("value",))]
    acts: dict[str, Callable[[], Any]] = {
        "update_if_present": lambda: rb.update_if_present(id=ids, patch=patch),
        "set_at_": lambda: rb.set_at_("value", 7.0, [0, 1]),
        "[]=": lambda: rb.__setitem__([0, 1], rows),
        "change": lambda: life.storage.writer().change(life.ids[:2], places, [np.zeros(2)]),
    }
    for name, act in acts.items():
        with raises(SchemaError, StateError, what=f"{name} on a storage whose rows cannot be changed"):
            act()
    life.look()


def _by_index(life: Life) -> None:
    """Change rows by index: whole rows, and single fields."""
    model, rb = life.model, life.rb
    chosen = model.by_index[1:6:2]
    index = [model.index_of(row.id) for row in chosen]
    rb[index] = make_batch(model.change(row.id for row in chosen))
    (row,) = model.change([model.by_index[4].id])
    for name, values in patch_of([row]).items():
        rb.set_at_(name, values[0], model.index_of(row.id))


def _without(batch: Any) -> Any:
    del batch["value"]
    return batch


_SPOILT: dict[str, Callable[[Any], Any]] = {
    "a missing field": _without,
    "an unknown field": lambda batch: batch.set("more", torch.zeros(len(batch))),
    "a field of another dtype": lambda batch: batch.set("pixels", batch["pixels"].long()),
    "a field of another shape": lambda batch: batch.set("pixels", batch["pixels"][:, :-1]),
    "objects instead of numbers": lambda batch: batch.set_non_tensor("value", "text"),
}
