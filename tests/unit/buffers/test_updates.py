"""Changes of rows in place: fields by index, and patches that change no other rows."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from expstore.buffers import ConditionalUpdateResult
from expstore.buffers.sample_units import Sequence
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import NoRowError, NotFoundError, SchemaError, StateError
from expstore.samplers import PrioritizedSampler
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import (
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)
from tests.support.batches import buffer_factory

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Make = Callable[..., TensorDictReplayBuffer]


@pytest.fixture(params=["memory", "zarr"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A factory of buffers over both kinds of storage, whose writer tracks generations."""
    with buffer_factory(request.param, tmp_path) as factory:

        def tracking(capacity: int | None = 4, *, writer: Any = None, **options: Any) -> Any:
            writer = RoundRobinWriter(track_generations=True) if writer is None else writer
            return factory(capacity, writer=writer, **options)

        yield tracking


def rows(*numbers: int, version: int = 5) -> TensorDict:
    n = torch.tensor(numbers)
    return TensorDict(
        {
            "n": n,
            "value": n[:, None] * torch.ones(3),
            "half": n[:, None].to(torch.bfloat16),
            "next": {"version": torch.full((len(numbers), 1), version, dtype=torch.int32)},
        },
        [len(numbers)],
    )


# ---------------------------------------------------------------------------------------------------
# Fields by index.


def test_a_field_is_set_at_some_rows(make: Make) -> None:
    rb = make()
    rb.extend(rows(0, 1, 2, 3, 4))  # the last has the place of the first
    assert rb.set_at_("value", torch.full((2, 3), 9.0), torch.tensor([1, 0])) is rb
    rb.set_at_("n", 70, 2)
    rb.set_at_(("next", "version"), torch.tensor([[8], [9]], dtype=torch.int32), slice(2, 4))
    rb.set_at_("half", 0.5, [True, False, False, False])
    assert rb["value"][:, 0].tolist() == [9, 9, 2, 3]
    assert rb["n"].tolist() == [4, 1, 70, 3]
    assert rb["next", "version"].reshape(-1).tolist() == [5, 5, 8, 9]
    assert rb["half"].reshape(-1).tolist() == [0.5, 1, 2, 3]
    rb.set_at_("n", torch.tensor([5, 6]), [3, 3])
    assert rb["n"].tolist()[3] == 6


def test_fields_are_set_in_all_rows(make: Make) -> None:
    rb = make()
    rb.extend(rows(0, 1, 2, 3, 4))
    assert rb.set_("n", torch.tensor([10, 11, 12, 13])) is rb
    assert rb["n"].tolist() == [10, 11, 12, 13]
    new = {"n": torch.arange(4), ("next", "version"): 7, "value": torch.zeros(3)}
    assert rb.update_(new, keys_to_update=["n", "next"]) is rb
    assert rb["n"].tolist() == [0, 1, 2, 3]
    assert rb["value"][:, 0].tolist() == [4, 1, 2, 3]
    rb.update_(
        TensorDict({"next": {"version": torch.arange(4, dtype=torch.int32)[:, None]}}, [4]), clone=True
    )
    rb.update_({"next": {"version": 1}, "value": 0.25})
    assert rb["next", "version"].reshape(-1).tolist() == [1, 1, 1, 1]
    assert rb["value"].unique().tolist() == [0.25]
    assert len(rb) == 4


def test_refused_calls_change_nothing(make: Make) -> None:
    rb = make()
    rb.extend(rows(0, 1, 2, 3))
    before = rb[:]
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        ("m", 1, KeyError, "Key 'm' does not exist in the storage"),
        ("n", torch.zeros(4), ValueError, "dtype mismatch for 'n': got float32, the storage holds int64"),
        ("n", 1.5, ValueError, "dtype mismatch for 'n'"),
        ("n", torch.zeros(3, dtype=torch.int64), ValueError, "shape mismatch for 'n'"),
        ("value", torch.zeros(4, 3).double(), ValueError, "dtype mismatch for 'value'"),
        ("value", torch.zeros(3, 4), ValueError, r"shape mismatch .* got \[3, 4\], expected \[4, 3\]"),
        ("half", np.zeros((4, 1), np.float32), ValueError, "dtype mismatch for 'half'"),
        (("next", "version"), 2**40, ValueError, "dtype mismatch for 'next.version'"),
    ]
    for key, value, error, text in wrong:
        with pytest.raises(error, match=text):
            rb.set_(key, value)
        with pytest.raises(error, match=text):
            rb.update_({"n": 5, key: value} if key != "n" else {"value": 0.0, key: value})
    with pytest.raises(NotFoundError):
        rb.set_at_("n", 0, [0, 4])
    for name in ("n", "value", "half", ("next", "version")):
        assert torch.equal(rb[name], before[name])


@pytest.mark.guarantee("rows/refused")
def test_numbers_that_a_field_cannot_represent_are_refused(make: Make) -> None:
    rb = make()
    dtypes = {"wide": torch.float64, "value": torch.float32, "small": torch.float16, "half": torch.bfloat16}
    rb.extend(TensorDict({name: torch.ones(2, dtype=dtype) for name, dtype in dtypes.items()}, [2]))
    wrong: list[tuple[str, Any, Any]] = [
        ("wide", 2**53 + 1, 2**53 + 1),
        ("wide", torch.tensor([1, 2**53 + 1]), 2**53 + 1),
        ("wide", [0.5, 2**53 + 1], 2**53 + 1),
        ("value", 1e300, 1e300),
        ("value", [1.0, -1e39], -1e39),
        ("small", 1e5, 1e5),
        ("half", 257, 257),
        ("half", 1e39, 1e39),
    ]
    for key, value, lost in wrong:
        with pytest.raises(SchemaError, match=f"'{key}' is .*, which cannot hold {re.escape(str(lost))}"):
            rb.set_(key, value)
        assert rb[key].tolist() == [1, 1]
    for key in dtypes:
        rb.set_(key, 0.1)
        rb.set_(key, [float("inf"), 256])
        assert rb[key].tolist() == [float("inf"), 256]


def test_an_empty_store_has_no_fields_to_set() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(4))
    with pytest.raises(StateError, match="no fields yet"):
        rb.set_("n", 1)
    with pytest.raises(StateError, match="Conditional updates require an initialized storage"):
        rb.update_if_present(id=[1], patch={"n": torch.zeros(1)})


def test_mark_update_gives_rows_the_highest_priority(make: Make) -> None:
    rb = make(sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=100)
    rb.extend(rows(0, 1, 2, 3))
    rb.update_priority([0, 1, 2, 3], [0.0, 0.0, 6.0, 0.0])
    rb.mark_update(torch.tensor([1, -1]))
    assert rb.sql("SELECT _priority FROM transitions ORDER BY _id").fetchall() == [(0,), (6,), (6,), (0,)]
    assert set(rb.sample()["index"].tolist()) == {1, 2}
    uniform = make()
    uniform.extend(rows(0, 1))
    uniform.mark_update([0])
    assert uniform.sql("SELECT _priority FROM transitions").fetchall() == [(1,), (1,)]


# ---------------------------------------------------------------------------------------------------
# Patches of rows that may be gone.


def test_patch_of_a_row_that_is_gone(make: Make) -> None:
    """A patch that was made for a row never reaches the one that has its place now."""
    rb = make(batch_size=40)
    rb.extend(rows(0, 1, 2, 3))
    sample = rb.sample()
    assert set(sample["index_generation"].tolist()) == {0}
    rb.extend(rows(4, 5))
    by_index = rb.update_if_present(
        index=sample["index"], generation=sample["index_generation"], patch={"n": sample["n"] + 100}
    )
    live = sample["n"] >= 2
    assert torch.equal(by_index.updated, live)
    assert (by_index.updated_count, by_index.stale_count) == (int(live.sum()), int((~live).sum()))
    assert by_index.version_rejected is None
    assert by_index.version_rejected_count == 0
    assert rb["n"].tolist() == [4, 5, 102, 103]
    by_id = rb.update_if_present(id=sample["id"], patch={"value": torch.zeros(40, 3)})
    assert torch.equal(by_id.updated, live)
    assert rb["value"][:, 0].tolist() == [4, 5, 0, 0]
    newer = rb.sample(return_info=True)
    assert torch.equal(newer[1]["index_generation"], (newer[1]["index"] < 2).long())
    assert torch.equal(newer[1]["index_generation"], rb.writer.generations_of(newer[1]["index"]))


def test_an_unbounded_store_reuses_no_place(make: Make) -> None:
    rb = make(None)
    index = rb.extend(rows(0, 1, 2))
    assert rb.writer.generations_of(index).tolist() == [0, 0, 0]
    assert rb.writer.generations_of(5).tolist() == -1
    found = rb.update_if_present(index=[0, 1, 7], generation=[0, 1, 0], patch={"n": torch.tensor([7, 8, 9])})
    assert found.updated.tolist() == [True, False, False]
    assert rb["n"].tolist() == [7, 1, 2]


def test_an_older_version_is_rejected(make: Make) -> None:
    rb = make()
    ids = rb.extend(rows(0, 1, 2, 3), return_ids=True)
    key = ("next", "version")
    found = rb.update_if_present(
        id=ids,
        patch={"n": torch.arange(10, 14)},
        version_key=key,
        version=torch.tensor([4, 5, 6, 4], dtype=torch.int32),
    )
    assert found.updated.tolist() == [False, True, True, False]
    assert found.version_rejected is not None
    assert found.version_rejected.tolist() == [True, False, False, True]
    assert rb["n"].tolist() == [0, 11, 12, 3]
    assert rb[key].reshape(-1).tolist() == [5, 5, 6, 5]
    found = rb.update_if_present(
        id=ids, patch={"n": torch.arange(20, 24)}, version_key=key, version=6, require_newer=True
    )
    assert found.updated.tolist() == [True, True, False, True]
    assert (found.updated_count, found.version_rejected_count, found.stale_count) == (3, 1, 0)
    assert rb[key].reshape(-1).tolist() == [6, 6, 6, 6]


def test_a_row_given_twice_gets_the_highest_version(make: Make) -> None:
    rb = make()
    rb.extend(rows(0, 1))
    found = rb.update_if_present(
        id=[1, 2, 1, 1, 9, 1],
        patch={"n": torch.arange(10, 16)},
        version_key=("next", "version"),
        version=np.array([6, 5, 8, 8, 9, 7], np.int32),
    )
    assert found.updated.tolist() == [False, True, False, True, False, False]
    assert found.version_rejected is not None
    assert found.version_rejected.tolist() == [True, False, True, False, False, True]
    assert found.stale_count == 1
    assert rb["n"].tolist() == [13, 11]
    same = rb.update_if_present(id=[1, 1], patch={"n": torch.tensor([1, 2])})
    assert same.updated.tolist() == [True, True]
    assert rb["n"].tolist() == [2, 11]


def test_a_patch_that_is_wrong_changes_nothing(make: Make) -> None:
    rb = make()
    rb.extend(rows(0, 1, 2, 3))
    version: dict[str, Any] = {"version_key": ("next", "version")}
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"patch": {"m": torch.zeros(2)}}, KeyError, "Key 'm' does not exist"),
        ({"patch": {"n": torch.zeros(2)}}, ValueError, "dtype mismatch for 'n'"),
        ({"patch": {"value": torch.zeros(3)}}, ValueError, "shape mismatch for 'value'"),
        ({"version": 3}, ValueError, "version_key and version must be provided together"),
        ({"version_key": "n", "version": 3}, ValueError, "'n' may not appear in patch"),
        ({"version_key": "next.version", "version": 3}, ValueError, "Dotted-string version keys"),
        ({"version_key": "value", "version": 3}, ValueError, "'value' must be one number per row"),
        (version | {"version": [1, 2, 3]}, ValueError, "one for each of 2 rows"),
        ({"id": None, "index": [0, 1], "generation": [0]}, ValueError, "same number of records"),
        ({"id": None, "index": [0, 1]}, TypeError, "takes index and generation, or id"),
        ({"index": [0, 1], "generation": [0, 0]}, TypeError, "takes index and generation, or id"),
        ({"id": [0.5, 1]}, TypeError, "must be integers"),
    ]
    for given, error, text in wrong:
        with pytest.raises(error, match=text):
            rb.update_if_present(**{"id": [1, 2], "patch": {"n": torch.tensor([8, 9])}} | given)
    assert rb["n"].tolist() == [0, 1, 2, 3]


def test_a_patch_by_index_needs_generations(make: Make) -> None:
    for writer in (RoundRobinWriter(), TensorDictRoundRobinWriter(track_generations=False)):
        rb = make(writer=writer, batch_size=2)
        rb.extend(rows(0, 1))
        assert "index_generation" not in rb.sample()
        assert writer.generations_of(torch.tensor([0, 1])).tolist() == [-1, -1]
        with pytest.raises(
            RuntimeError, match="Conditional updates are not supported by .* with .*RoundRobinWriter"
        ):
            rb.update_if_present(index=[0], generation=[0], patch={"n": torch.tensor([1])})
    best = make(writer=TensorDictMaxValueWriter("n"))
    best.extend(rows(0, 1))
    with pytest.raises(StateError, match="takes over the id"):
        best.update_if_present(id=[1], patch={"n": torch.tensor([1])})


def test_a_submitted_patch_is_done(make: Make) -> None:
    rb = make(batch_size=2, prefetch=2)
    rb.extend(rows(0, 1))
    rb.sample()
    result = rb.submit_update_if_present(id=[1, 2], patch={"n": torch.tensor([7, 8])}).result(timeout=0)
    assert isinstance(result, ConditionalUpdateResult)
    assert result.updated_count == 2
    assert set(rb.sample()["n"].tolist()) <= {7, 8}
    with pytest.raises(KeyError):
        rb.submit_update_if_present(id=[1], patch={"m": torch.tensor([7])}).result(timeout=0)


def test_cells_of_several_dims() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(12, ndim=2), writer=RoundRobinWriter(track_generations=True), batch_size=6
    )
    number = torch.arange(12).reshape(3, 4)
    rb.extend(TensorDict({"n": number}, [3, 4]))
    sample, info = rb.sample(return_info=True)
    rb.extend(TensorDict({"n": number[:, :1] + 100}, [3, 1]))
    gone = sample["n"] % 4 == 0  # the first step of each lane
    for index in (sample["index"], info["index"]):
        found = rb.update_if_present(
            index=index, generation=sample["index_generation"], patch={"n": sample["n"] + 50}
        )
        assert torch.equal(found.updated, ~gone)
    rb.set_sampler(PrioritizedSampler(12, 1.0, 1.0))
    for index in (torch.tensor([[0, 2], [2, 1]]), (torch.tensor([0, 2]), torch.tensor([2, 1]))):
        rb.storage.set_priorities(rb.storage.window.ids(), np.full(12, 0.5, np.float32))
        rb.mark_update(index)
        found = rb.sql("SELECT _index FROM transitions WHERE _priority = 1 ORDER BY 1").fetchall()
        assert found == [(2,), (7,)]
    rb.set_at_("n", 7, (0, 1))
    assert rb["n"][0, 1] == 7


def test_the_writer_knows_the_storage_of_its_buffer() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(2), writer=RoundRobinWriter(track_generations=True), batch_size=2
    )
    rb.extend(rows(0, 1, 2))
    assert rb.writer.generations_of(torch.arange(3)).tolist() == [1, 0, -1]
    rb.set_storage(MemoryStorage(3))
    rb.extend(rows(0, 1))
    assert rb.writer.generations_of(torch.arange(3)).tolist() == [0, 0, -1]
    best = TensorDictReplayBuffer(storage=MemoryStorage(2), writer=TensorDictMaxValueWriter("n"))
    with pytest.raises(ValueError, match="more than one dimension"):
        best.set_storage(MemoryStorage(4, ndim=2))


def test_stale_priority(make: Make) -> None:
    """A priority that was computed for a row never becomes that of the one that has its place now."""
    rb = make(sampler=PrioritizedSampler(4, 1.0, 1.0), batch_size=40)
    rb.extend(rows(0, 1, 2, 3))
    sample = rb.sample()
    rb.extend(rows(4, 5))
    sample["td_error"] = torch.full((40,), 9.0)
    rb.update_tensordict_priority(sample)
    assert rb.sql("SELECT n, _priority FROM transitions ORDER BY n").fetchall() == [
        (2, 9.0),
        (3, 9.0),
        (4, 1.0),
        (5, 1.0),
    ]


# ---------------------------------------------------------------------------------------------------
# The same program on both libraries.


def test_cells_of_several_dims_keep_their_shape() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(24, ndim=2),
        sampler=PrioritizedSampler(24, 1.0, 1.0),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=6,
        dim_extend=0,
    )
    number = torch.arange(12).reshape(4, 3)
    data = TensorDict({"n": number, "wide": torch.zeros(4, 3, 2), "version": number}, [4, 3])
    index = rb.extend(data)
    grid = index.reshape(4, 3, 2)
    places = tuple(grid.unbind(-1))
    values = 1.0 + number / 2

    def priorities() -> list[float]:
        found = rb.storage.priorities.values[:12].tolist()
        rb.storage.set_priorities(rb.storage.window.ids(), np.full(12, 0.5, np.float32))
        return found

    ids = torch.arange(1, 13)
    for asked in (
        {"index": index, "priority": values},
        {"index": grid, "priority": values},
        {"index": places, "priority": values},
        {"index": grid, "priority": values.flatten()},
        {"id": ids, "priority": values},
        {"id": ids.reshape(4, 3), "priority": values},
    ):
        assert rb.update_priority(**asked) == 12
        assert priorities() == values.flatten().tolist()
    for asked in (index, grid, places, tuple(index.unbind(-1))):
        shape = asked[0].shape if isinstance(asked, tuple) else asked.shape[:-1]
        assert torch.equal(rb.writer.generations_of(asked), torch.zeros(shape, dtype=torch.int64))
    generation = torch.zeros(4, 3, dtype=torch.int64)
    patch = {"n": number + 100, "wide": torch.ones(4, 3, 2)}
    for rows, shape in (
        ({"index": index, "generation": generation.flatten()}, (12,)),
        ({"index": grid, "generation": generation}, (4, 3)),
        ({"index": places, "generation": generation}, (4, 3)),
        ({"id": ids}, (12,)),
        ({"id": ids.reshape(4, 3)}, (4, 3)),
    ):
        patch = {"n": patch["n"] + 1, "wide": patch["wide"] + 1}
        version = patch["n"].flatten()
        found = rb.update_if_present(**rows, patch=patch, version_key="version", version=version)
        assert found.updated.shape == shape
        assert found.version_rejected is not None
        assert found.version_rejected.shape == shape
        assert torch.equal(rb[:]["n"], patch["n"])
        assert torch.equal(rb[:]["wide"], patch["wide"])
        assert torch.equal(rb[:]["version"].flatten(), version)
    with pytest.raises(SchemaError, match="got 6 priorities for 12 rows"):
        rb.update_priority(index, torch.ones(6, 1))
    with pytest.raises(SchemaError, match="shape mismatch"):
        rb.update_if_present(id=ids, patch={"n": torch.zeros(3, 3, dtype=torch.int64)})


def test_the_parts_of_an_index_are_broadcast() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(24, ndim=2),
        sampler=PrioritizedSampler(24, 1.0, 1.0),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=6,
        dim_extend=0,
    )
    number = torch.arange(12).reshape(4, 3)
    rb.extend(TensorDict({"n": number}, [4, 3]))
    index = (torch.arange(2)[:, None], torch.arange(3)[None])
    assert rb.update_priority(index, 2.0 + number[:2]) == 6
    assert rb.storage.priorities.values[:6].tolist() == [2, 3, 4, 5, 6, 7]
    assert rb.update_priority((torch.arange(4), 1), torch.full((4,), 9.0)) == 4
    assert rb.storage.priorities.values[:12].tolist()[1::3] == [9] * 4
    generations = rb.writer.generations_of(index)
    assert torch.equal(generations, torch.zeros(2, 3, dtype=torch.int64))
    patch = {"n": number[:2] + 100}
    found = rb.update_if_present(index=index, generation=generations, patch=patch)
    assert found.updated.shape == (2, 3)
    assert torch.equal(rb[:]["n"][:2], number[:2] + 100)
    with pytest.raises(NoRowError, match=r"the shapes \[2\], \[3\], which cannot be broadcast"):
        rb.update_priority((torch.arange(2), torch.arange(3)), torch.ones(3))


def test_anchors_of_several_dims_are_found_by_as_many_numbers() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(24, ndim=2),
        sampler=PrioritizedSampler(24, 1.0, 1.0),
        sample_unit=Sequence(2),
        batch_size=4,
        dim_extend=0,
    )
    number = torch.arange(12).reshape(4, 3)
    rb.extend(TensorDict({"n": number}, [4, 3]))
    batch = rb.sample()
    assert batch["anchor_index"].shape == batch["index"].shape == (8, 2)
    anchors = number[tuple(batch["anchor_index"].unbind(-1))]
    assert torch.equal(anchors.reshape(4, 2)[:, 0], batch["n"].reshape(4, 2)[:, 0])
    assert torch.equal(anchors, anchors.reshape(4, 2)[:, :1].expand(4, 2).flatten())
    batch["td_error"] = 2.0 + batch["n"]
    assert rb.update_tensordict_priority(batch) == len(set(anchors.tolist()))
    valid = batch["validity_mask"]
    for anchor in set(anchors.tolist()):
        wanted = batch["td_error"][valid & (anchors == anchor)].max()
        assert rb.storage.priorities.values[anchor] == wanted


# ---------------------------------------------------------------------------------------------------
# Priorities, set while other threads write.


class _Reached:
    """A lock; the first time, a function runs before it is taken."""

    def __init__(self, lock: Any, act: Callable[[], object]) -> None:
        self.lock, self.acts = lock, [act]

    def __enter__(self) -> None:
        if self.acts:
            self.acts.pop()()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_rows_that_take_a_slot_meanwhile_keep_their_first_priority(make: Make) -> None:
    rb = make(4, sampler=PrioritizedSampler())
    rb.extend(rows(0, 1, 2, 3))
    priorities = rb.storage.priorities
    around = rows(*range(rb.storage.geometry.slots or 0))  # the newest four take the slots of the first
    priorities.changing = _Reached(priorities.changing, lambda: rb.extend(around))  # type: ignore[assignment]
    assert rb.update_priority(torch.arange(4), torch.full((4,), 0.5)) == 0
    assert priorities.values_at(rb.storage.geometry.slot_of(rb.storage.window.ids())).tolist() == [1.0] * 4
    assert len(rb.sample(64)) == 64


def test_priorities_are_set_while_another_thread_writes(make: Make) -> None:
    rb = make(4, sampler=PrioritizedSampler())
    rb.extend(rows(0, 1, 2, 3))
    writes, ends, counts = threading.Event(), threading.Event(), []

    def write() -> None:
        with rb.storage.lock:
            writes.set()
            ends.wait()

    def learn() -> None:
        counts.append(rb.update_priority([0, 1], torch.tensor([0.0, 9.0])))

    threads = [threading.Thread(target=act, daemon=True) for act in (write, learn)]
    threads[0].start()
    writes.wait()
    threads[1].start()
    threads[1].join(60)
    before = list(counts)
    ends.set()
    for thread in threads:
        thread.join()
    assert before == [2]
    assert rb.storage.priorities.values_at(np.arange(2)).tolist() == [0.0, 9.0]
