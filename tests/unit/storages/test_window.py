"""`expstore.open(window=)`: samplers see the newest rows of a store that keeps all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer, samplers
from expstore.errors import ArgumentError, NotFoundError, NotReadyError, StateError
from expstore.exchange.tables import export_parquet
from expstore.maintenance.resize import resize
from expstore.storages.columns.priorities import PAGE_ROWS
from expstore.storages.format.manifest import MANIFEST
from expstore.transforms import CatFrames
from tests.support.chi_square import limit_of
from tests.support.forks import in_child

#: Rows of the window, of an episode, and in all.
WINDOW, EPISODE, ROWS = 48, 7, 200
Buffer = TensorDictReplayBuffer
Make = Callable[..., Buffer]


def rows(first: int, count: int) -> TensorDict:
    """Return the rows with these ids; the field `id_` is the row's id."""
    number = torch.arange(first, first + count)
    done = (number % EPISODE == 0)[:, None]
    return TensorDict(
        {
            "id_": number,
            "observation": number[:, None].float(),
            "version": number // 20,
            "next": {
                "observation": number[:, None].float() + 1,
                "reward": (number % 5)[:, None].float(),
                "done": done,
                "terminated": done,
            },
        },
        [count],
    )


def fill(rb: Buffer, through: int = ROWS, step: int = 13) -> Buffer:
    """Write rows up to an id, in batches."""
    for first in range(rb.storage.last + 1, through + 1, step):
        rb.extend(rows(first, min(step, through + 1 - first)))
    return rb


def set_priorities(rb: Buffer, newest: int = ROWS) -> None:
    """Set the priorities of the newest rows, as far as they are in the window, which follow from the id."""
    ids = np.arange(max(1, newest - 2 * WINDOW), newest + 1)
    rb.update_priority(id=ids, priority=1.0 + ids % 9)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Open stores by name, and close them after the test."""
    opened: list[Buffer] = []

    def open_store(name: str = "store", **options: Any) -> Buffer:
        path = tmp_path / f"{name}.exp"
        seed = {} if path.exists() else {"seed": 1}
        opened.append(expstore.open(path, **seed | options))
        return opened[-1]

    yield open_store
    for rb in reversed(opened):
        rb.close()


def two(make: Make, sampler: Callable[[], Any], through: int = ROWS, **options: Any) -> tuple[Buffer, Buffer]:
    """Return a store with a window and a ring of the same size; both hold the same rows."""
    window = make("window", window=WINDOW, sampler=sampler(), **options)
    ring = make("ring", capacity=WINDOW, sampler=sampler(), **options)
    for rb in (window, ring):
        fill(rb, through)
        set_priorities(rb, through)
    return window, ring


def first_ids(batch: TensorDict, length: int) -> np.ndarray[Any, Any]:
    """Return the ids of the first rows of the slices of a batch."""
    ids: np.ndarray[Any, Any] = batch["id_"].numpy().reshape(-1, length)[:, 0]
    return ids


def check_same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> None:
    """Check that two samples of equal size come from one distribution over the ids."""
    ids = np.union1d(left, right)
    a, b = (np.array([(one == id).sum() for id in ids]) for one in (left, right))
    assert a.sum() == b.sum()
    assert float(((a - b) ** 2 / (a + b)).sum()) < limit_of(ids.size)


WHERE = "id_ % 3 <> 0"
DRAWS = {
    "uniform": (lambda: samplers.RandomSampler(), 1),
    "where": (lambda: samplers.RandomSampler(where=WHERE), 1),
    "episode": (lambda: samplers.RandomSampler(where="episode.length = 7", weight="id_ % 2 + 1"), 1),
    "prioritized": (lambda: samplers.PrioritizedSampler(alpha=1.0), 1),
    "prioritized where": (lambda: samplers.PrioritizedSampler(where=WHERE), 1),
    "within": (lambda: samplers.PrioritizedSampler(alpha=1.0, max_priority_within_buffer=True), 1),
    "recency": (lambda: samplers.RecencySampler(half_life=20), 1),
    "recency where": (lambda: samplers.RecencySampler(half_life=20, newest=30, where=WHERE), 1),
    "staleness": (lambda: samplers.StalenessAwareSampler(version_key="version"), 1),
    "staleness where": (lambda: samplers.StalenessAwareSampler(version_key="version", where=WHERE), 1),
    "slices": (lambda: samplers.SliceSampler(slice_len=3), 3),
    "slices by start": (lambda: samplers.SliceSampler(slice_len=3, by="start"), 3),
    "slices where": (lambda: samplers.SliceSampler(slice_len=3, where=WHERE), 3),
    "slices by key": (lambda: samplers.SliceSampler(slice_len=3, traj_key="version"), 3),
    "prioritized slices": (lambda: samplers.PrioritizedSliceSampler(slice_len=3, alpha=1.0), 3),
    "prioritized slices where": (lambda: samplers.PrioritizedSliceSampler(slice_len=3, where=WHERE), 3),
}


@pytest.mark.guarantee(
    "rows/window",
    "Samplers draw from a window as from a ring of the same size; SQL, trajectories, versions and exports"
    " see all rows.",
)
@pytest.mark.some(4)
@pytest.mark.parametrize("name", DRAWS)
def test_samplers_draw_as_from_a_ring_of_the_same_size(make: Make, name: str) -> None:
    sampler, length = DRAWS[name]
    both = two(make, sampler, batch_size=30)
    for through in (ROWS, ROWS + 31, ROWS + 31 + 3 * WINDOW):
        for rb in both:
            fill(rb, through)
            if rb.sampler.filter is not None:
                rb.sampler.filter.refresh(rb.storage)  # otherwise it follows in the background
        drawn = [np.concatenate([first_ids(rb.sample(), length) for _ in range(60 * length)]) for rb in both]
        assert drawn[0].min() > through - WINDOW
        assert set(drawn[0]) == set(drawn[1])
        check_same(*drawn)
        masses = [rb.sampler.mass(rb.storage, 30) for rb in both if hasattr(type(rb.sampler), "mass")]
        assert not masses or masses[0] == pytest.approx(masses[1])
        for rb in both:
            set_priorities(rb, through)  # the next round draws by other priorities


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["uniform", "slices", "prioritized", "prioritized slices", "staleness"])
def test_conditions_are_evaluated_again_for_changed_rows(make: Make, name: str) -> None:
    made: Callable[[], Any] = DRAWS[name][0]
    kind: Any = type(made())
    options: dict[str, Any] = {"slice_len": 3} if "slices" in name else {}
    both = two(
        make,
        lambda: (
            kind(where="version % 2 = 0", **options)
            if name != "staleness"
            else kind(version_key="version", where="version % 2 = 0")
        ),
        batch_size=30,
    )
    changed = np.arange(ROWS - 30, ROWS - 20)
    drawn: list[set[int]] = []
    for rb in both:
        rb.sample()
        new = rows(ROWS - 30, 10)
        new["version"] = new["version"] + 1
        rb[torch.from_numpy(rb.storage.geometry.index_of(changed))] = new
        rb.sampler.filter.refresh(rb.storage)
        drawn.append({id for _ in range(80) for id in first_ids(rb.sample(), DRAWS[name][1]).tolist()})
    assert drawn[0] == drawn[1]
    assert drawn[0] & set(changed.tolist()) == {id for id in changed.tolist() if (id // 20) % 2}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: samplers.SamplerWithoutReplacement(),
        lambda: samplers.SamplerWithoutReplacement(shuffle=False, where=WHERE),
        lambda: samplers.ConsumingSampler(2),
        lambda: samplers.ConsumingSampler(where=WHERE),
        lambda: samplers.SliceSamplerWithoutReplacement(slice_len=3),
    ],
)
def test_a_pass_has_the_rows_of_a_ring(make: Make, sampler: Callable[[], Any]) -> None:
    both = two(make, sampler, batch_size=6)
    for _ in range(2):
        passes = []
        for rb in both:
            if rb.sampler.filter is not None:
                rb.sampler.filter.refresh(rb.storage)
            rows_of_pass: list[int] = []
            while not rows_of_pass or not rb.sampler.ran_out:
                rows_of_pass += rb.sample()["id_"].tolist()
            passes.append(sorted(rows_of_pass))
        assert passes[0] == passes[1]
        assert min(passes[0]) > both[0].storage.last - WINDOW
        for rb in both:
            fill(rb, rb.storage.last + 30)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: samplers.RandomSampler(),
        lambda: samplers.RecencySampler(half_life=30),
        lambda: samplers.StalenessAwareSampler(version_key="version"),
        lambda: samplers.SamplerWithoutReplacement(),
        lambda: samplers.SamplerWithoutReplacement(shuffle=False, drop_last=True),
        lambda: samplers.SliceSampler(slice_len=2),
        lambda: samplers.StreamingSliceSampler(slice_len=2),
    ],
)
def test_the_same_seed_draws_the_same_rows_as_from_a_ring(make: Make, sampler: Callable[[], Any]) -> None:
    """Also while rows are written: a pass without replacement draws no row twice."""
    both = two(make, sampler, through=30, batch_size=10)
    for through in range(30, 200, 3):
        batches = [fill(rb, through).sample()["id_"].tolist() for rb in both]
        assert batches[0] == batches[1]


@pytest.mark.parametrize("window", [1, WINDOW, ROWS, 10 * ROWS])
def test_len_indices_and_iteration_keep_to_the_window(make: Make, window: int) -> None:
    rb = fill(make(window=window))
    first = max(1, ROWS - window + 1)
    assert len(rb) == len(rb.storage) == ROWS + 1 - first
    assert rb[:]["id_"].tolist() == list(range(first, ROWS + 1))
    assert rb["id_"].tolist() == list(range(first, ROWS + 1))
    assert rb[:2]["id_"].tolist() == list(range(first, ROWS + 1))[:2]
    assert rb[ROWS - 1]["id_"] == rb[-1]["id_"] == ROWS  # an index is id - 1
    assert [int(row["id_"]) for row in rb.storage] == list(range(first, ROWS + 1))
    assert rb.storage.contains(ROWS - 1)
    assert rb.storage.contains(-1)
    if first > 1:
        with pytest.raises(NotFoundError):
            rb[first - 2]
        assert not rb.storage.contains(first - 2)
    rb[ROWS - 1] = rows(ROWS, 1)[0].set("version", torch.tensor(77))
    assert rb[ROWS - 1]["version"] == 77
    rb.storage.writer().set(ROWS, rows(ROWS + 1, 1)[0])
    assert rb[-1]["id_"] == ROWS + 1
    assert set(rb.sample(200)["index"].tolist()) <= set(range(max(0, ROWS - window + 1), ROWS + 1))


@pytest.mark.guarantee("rows/window")
def test_everything_else_sees_all_rows(make: Make, tmp_path: Path) -> None:
    rb = fill(make(window=WINDOW, sampler="prioritized"))
    assert rb.sql("SELECT count(*), min(_id) FROM transitions").fetchall() == [(ROWS, 1)]
    assert rb.sql("SELECT count(*), min(_id), max(id_) FROM recent").fetchall() == [
        (WINDOW, ROWS - WINDOW + 1, ROWS)
    ]
    columns = [
        rb.sql(f"SELECT * FROM {name} LIMIT 1").arrow().column_names for name in ("recent", "transitions")
    ]
    assert columns[0] == columns[1]
    assert rb.trajectory(1)["id_"].tolist() == list(range(1, EPISODE + 1))
    assert rb.by_id([1, ROWS])["id_"].tolist() == [1, ROWS]
    assert rb.stats()["size"] == WINDOW
    assert rb.stats()["stored"] == ROWS
    assert export_parquet(rb, tmp_path / "all.parquet").rows == ROWS
    rb.dumps(tmp_path / "versions")
    with expstore.open(tmp_path / "versions", mode="r") as version:
        assert (len(version), version.storage.stored.rows) == (WINDOW, ROWS)
    rb.columns.add("twice", function=lambda batch: batch["id_"] * 2)
    assert rb.sql("SELECT sum(twice - 2 * id_), count(twice) FROM transitions").fetchall() == [(0, ROWS)]


def test_priorities_of_rows_outside_are_ignored(make: Make) -> None:
    rb = fill(make(window=WINDOW, sampler=samplers.PrioritizedSampler(alpha=1.0, eps=0.0), batch_size=40))
    low = ROWS - WINDOW
    before = rb.sampler.mass(rb.storage, 1)
    assert rb.update_priority(id=[1, low], priority=50.0) == 0
    rb.update_priority(index=[0, low - 1], priority=50.0)
    assert rb.sampler.mass(rb.storage, 1) == before
    assert rb.storage.priorities.largest == 1.0
    rb.update_priority(index=[low - 1, low], priority=0.0)  # the second is in the window
    assert rb.sampler.mass(rb.storage, 1).total == before.total - 1
    assert low + 1 not in rb.sample(400)["id_"]
    with pytest.raises(NotFoundError):
        rb.update_priority(index=[ROWS], priority=2.0)
    assert rb.sql("SELECT count(*) FROM transitions WHERE _priority <> 1").fetchall() == [(1,)]


@pytest.mark.guarantee("rows/window")
def test_rows_come_back_with_their_priorities(make: Make, tmp_path: Path) -> None:
    """The window moves over many pages of priorities, whose values stay in the column."""
    rb = make(window=100, sampler="prioritized")
    through = 40 * PAGE_ROWS
    for first in range(1, through + 1, 500):
        batch = rows(first, min(500, through + 1 - first))
        rb.extend(batch if first <= 10_001 else batch.exclude("version"))
        ids = np.arange(max(1, rb.storage.last - 60), rb.storage.last + 1)
        assert rb.update_priority(id=ids, priority=2.0 + ids % 7) == ids.size
        if first == 10_001:  # fields change, the column of priorities stays
            rb.columns.add("more", fill=1.0)
            rb.columns.drop("version")
    block, base = rb.storage.priorities.block
    assert base > through - 100 - 8 * PAGE_ROWS
    assert block.size < 8 * PAGE_ROWS
    changed = "SELECT _id, _priority FROM transitions WHERE _id % 500 >= 450 OR _id % 500 = 0 ORDER BY _id"
    expected = {id: 2.0 + id % 7 for id in range(1, through + 1) if (id % 500 >= 450 or id % 500 == 0)}
    expected = {id: value for id, value in expected.items() if id <= (through // 500) * 500}
    now = dict(rb.sql(changed).fetchall())
    assert {id: now[id] for id in expected} == expected
    exported = rb.storage.priorities.values_at(np.arange(through))
    rb.dumps(tmp_path / "versions")
    with expstore.open(tmp_path / "versions", mode="r") as version:
        assert dict(version.sql(changed).fetchall()) == now
    rb.close()
    rb = make(window=through - 5000, sampler="prioritized")
    assert len(rb) == through - 5000
    found = rb.storage.priorities.values_at(np.array(list(expected)) - 1)
    np.testing.assert_array_equal(found, list(expected.values()))
    np.testing.assert_array_equal(rb.storage.priorities.values_at(np.arange(through)), exported)
    total = (exported[5000:].astype(np.float64) + 1e-8) ** 0.6
    assert rb.sampler.mass(rb.storage, 1).total == pytest.approx(total.sum())


def test_new_rows_get_the_largest_priority_of_the_window(make: Make) -> None:
    both = two(make, lambda: samplers.PrioritizedSampler(max_priority_within_buffer=True))
    for rb in both:
        rb.update_priority(id=[ROWS - 10], priority=90.0)
    largest: list[float] = []
    for through in range(ROWS + 1, ROWS + 80):
        for rb in both:
            fill(rb, through).update_priority(id=[through], priority=2.0)
        largest = [rb.storage.priorities.largest for rb in both]
        assert largest[0] == largest[1]
    assert largest[0] < 90


@pytest.mark.index
def test_a_closed_store_has_all_priorities_in_its_index(make: Make, tmp_path: Path) -> None:
    rb = fill(make(window=WINDOW, sampler="prioritized"))
    set_priorities(rb)
    assert rb.sql("SELECT count(*) FROM episodes").fetchall() > [(0,)]
    rb.close()
    with duckdb.connect(str(tmp_path / "store.exp" / "index.duckdb"), read_only=True) as index:
        found = index.execute("SELECT count(*), min(priority), max(priority) FROM priorities").fetchall()
    assert found == [(ROWS, 1.0, 9.0)]


def test_memory_is_bounded_by_the_window(make: Make) -> None:
    rb = make(window=WINDOW, sampler=samplers.PrioritizedSampler(where=WHERE), batch_size=8)
    fill(rb, 20 * PAGE_ROWS, step=1000)
    rb.sample()
    assert rb.sampler.filter.masses.size == WINDOW
    assert rb.storage.priorities.values.size < 8 * PAGE_ROWS
    rb.close()
    rb = make(sampler=samplers.PrioritizedSliceSampler(slice_len=2), batch_size=8)
    rb.sample()
    assert rb.sampler._weights.tree.size <= WINDOW + 8
    assert rb.storage.priorities.values.size <= 8 * PAGE_ROWS


@pytest.mark.parametrize("new", [5, WINDOW, 120, 10 * ROWS])
def test_another_window_at_an_opening(make: Make, tmp_path: Path, new: int) -> None:
    fill(make(window=WINDOW)).close()
    uuid = json.loads((tmp_path / "store.exp" / MANIFEST).read_text())["uuid"]
    rb = make(window=new)
    assert len(rb) == min(new, ROWS)
    assert rb[:]["id_"].tolist() == list(range(ROWS - min(new, ROWS) + 1, ROWS + 1))
    rb.close()
    rb = make()
    assert len(rb) == min(new, ROWS)
    rb.close()
    make(window=0).close()
    stored = json.loads((tmp_path / "store.exp" / MANIFEST).read_text())
    assert "window" not in stored  # as in a store that never had one
    assert stored["uuid"] == uuid
    assert len(make()) == ROWS


def test_readers_follow_the_stored_window(make: Make) -> None:
    writer = fill(make(window=WINDOW))
    writer.flush()
    reader = make(mode="r", sampler="prioritized", batch_size=20)
    assert len(reader) == WINDOW
    assert reader.sample()["id_"].min() > ROWS - WINDOW
    fill(writer, ROWS + 100)
    writer.flush()
    assert reader[:]["id_"].tolist() == list(range(ROWS + 101 - WINDOW, ROWS + 101))
    assert reader.sample()["id_"].min() > ROWS + 100 - WINDOW
    assert reader.sql("SELECT count(*) FROM transitions").fetchall() == [(ROWS + 100,)]
    assert reader.sql("SELECT count(*) FROM recent").fetchall() == [(WINDOW,)]
    slices = make(mode="r", sampler=samplers.SliceSampler(slice_len=2), batch_size=20)
    assert slices.sample()["id_"].min() > ROWS + 100 - WINDOW
    writer.close()
    for rows_seen in (11, 150, 0):
        make(window=rows_seen).close()
        assert len(reader) == (rows_seen or ROWS + 100)
        low = ROWS + 100 - (rows_seen or ROWS + 100)
        assert reader.sample(300)["id_"].min() > low
        assert slices.sample(200)["id_"].min() > low


def test_deleted_episodes_shorten_the_window(make: Make) -> None:
    rb = fill(make(window=WINDOW, sampler="prioritized", batch_size=50))
    inside = rb.sql(f"SELECT _episode FROM transitions WHERE _id = {ROWS - 20}").fetchall()[0][0]
    length = rb.trajectory(inside).shape[0]
    rb.episodes.delete(f"episode_id IN (1, {inside})")
    assert len(rb) == WINDOW - length  # by id: no older rows come into view instead
    assert rb.storage.stored.rows == ROWS - EPISODE - length
    gone = set(range(ROWS - WINDOW + 1, ROWS + 1)) - set(rb[:]["id_"].tolist())
    assert len(gone) == length
    drawn = set(rb.sample(1000)["id_"].tolist())
    assert not drawn & gone
    assert min(drawn) > ROWS - WINDOW
    assert rb.sql("SELECT count(*) FROM recent").fetchall() == [(WINDOW - length,)]
    slices = rb.set_sampler(samplers.SliceSampler(slice_len=2))
    assert slices is not None
    assert not set(rb.sample(400)["id_"].tolist()) & gone


def test_retention_evaluates_all_rows(make: Make) -> None:
    rb = fill(make(window=WINDOW, retain={"where": f"id_ <= 14 OR id_ > {ROWS - 21}"}))
    rb.retention.apply()
    left = [id for (id,) in rb.sql("SELECT id_ FROM transitions ORDER BY 1").fetchall()]
    assert left[:14] == list(range(1, 15))
    assert len(left) < 60
    assert len(rb) <= WINDOW


def test_empty_and_new_rows(make: Make) -> None:
    rb = fill(make(window=WINDOW, batch_size=20))
    rb.empty()
    assert len(rb) == 0
    with pytest.raises(NotReadyError):
        rb.sample()
    fill(rb, ROWS + 10)
    assert rb[:]["id_"].tolist() == list(range(ROWS + 1, ROWS + 11))


def test_frames_before_the_window_are_read(make: Make) -> None:
    """Stacks of earlier frames read rows that are stored, although samplers do not draw them."""
    stack = CatFrames(4, dim=-1, in_keys=["observation"], out_keys=["frames"])
    rb = fill(make(window=5, sampler="uniform", batch_size=50, batches={"transform": stack}), 7 * 20 + 4)
    for through in (7 * 20 + 4, 7 * 30 + 5):
        fill(rb, through)
        batch = rb.sample()
        assert batch["id_"].min() > through - 5
        first = (batch["id_"] - 1) // EPISODE * EPISODE + 1  # the first row of the row's episode
        steps = batch["id_"][:, None] + torch.arange(-3, 1)
        expected = torch.maximum(steps, first[:, None]).float()
        torch.testing.assert_close(batch["frames"], expected)
    rb.flush()
    reader = make(mode="r", batch_size=50, batches={"transform": stack})
    batch = reader.sample()
    first = (batch["id_"] - 1) // EPISODE * EPISODE + 1
    expected = torch.maximum(batch["id_"][:, None] + torch.arange(-3, 1), first[:, None]).float()
    torch.testing.assert_close(batch["frames"], expected)
    rb.episodes.delete("episode_id = 29")
    assert rb.sample()["frames"][:, -1].min() > through - 5


def test_prefetched_batches_keep_to_the_window(make: Make) -> None:
    rb = fill(make(window=20, batch_size=10, batches={"prefetch": 3}))
    rb.sample()
    for through in range(ROWS + 20, ROWS + 400, 20):
        fill(rb, through)
        assert rb.sample()["id_"].min() > through - 20


def test_snapshots_and_settings_survive(make: Make, tmp_path: Path) -> None:
    rb = fill(make(window=WINDOW))
    set_priorities(rb)
    expected = rb.sql("SELECT _id, _priority FROM transitions ORDER BY 1").fetchall()
    rb.dumps(tmp_path / "versions")
    fill(rb, ROWS + 50)
    rb.loads(tmp_path / "versions")
    assert len(rb) == WINDOW
    found = rb.sql("SELECT id_, _priority FROM transitions ORDER BY _id").fetchall()
    assert found == expected
    other = make("other", window=9)
    other.loads(tmp_path / "versions")
    assert (len(other), other.storage.stored.rows) == (9, ROWS)  # a store keeps its own window


@pytest.mark.guarantee("rows/window")
@pytest.mark.parametrize("power", [False, True])
def test_a_killed_writer_keeps_the_window(make: Make, tmp_path: Path, power: bool) -> None:
    def write() -> None:
        rb = fill(expstore.open(tmp_path / "store.exp", window=WINDOW, sampler="prioritized"))
        set_priorities(rb)
        rb.flush()

    in_child(write)
    if power:
        (tmp_path / "store.exp" / "STATE").unlink()  # as after another boot
    reader = make(mode="r")
    assert (len(reader), reader.storage.stored.rows) == (WINDOW, ROWS)
    rb = make(sampler=samplers.PrioritizedSampler(alpha=1.0), batch_size=40)
    assert rb.recovered
    assert (len(rb), rb.storage.stored.rows) == (WINDOW, ROWS)
    ids = np.arange(ROWS - WINDOW + 1, ROWS + 1)
    assert rb.sampler.mass(rb.storage, 1).total == pytest.approx((1.0 + ids % 9).sum(), rel=1e-6)
    assert rb.sample()["id_"].min() > ROWS - WINDOW
    fill(rb, ROWS + 20)
    assert len(rb) == WINDOW


def test_contradictions_are_refused(make: Make, tmp_path: Path) -> None:
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    make("ring", capacity=10).close()
    fill(make("ranked", writer=writer, capacity=20)).close()
    fill(make("resized", window=5)).close()
    with pytest.raises(StateError, match="keeps its newest 10 rows.*leave window out"):
        make("ring", window=5)
    with pytest.raises(StateError, match="window"):
        make("ranked", window=5)
    with pytest.raises(StateError, match=r"window of 5 rows.*leave window= out"):
        fill(make("best", window=5, writer=TensorDictMaxValueWriter(rank_key=("next", "reward"))))
    with pytest.raises(StateError, match="window=0 first"):
        resize(tmp_path / "resized.exp", capacity=10)
    make("ring", window=0).close()


def test_windows_that_cannot_be_are_refused(make: Make, tmp_path: Path) -> None:
    make("ring", capacity=10).close()
    streaming = samplers.StreamingSliceSampler(slice_len=6)
    limited = {"rate_limiter": expstore.rate_limiters.MinSize(6)}
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: make("none", capacity=10, window=5), "capacity=10 and window=5 exclude each other.*leave"),
        *((lambda wrong=wrong: make("none", window=wrong), "window must be") for wrong in (-1, 2.5, "many")),
        (lambda: make("ring", mode="r", window=5), "mode='r'.*leave it out"),
        (lambda: MemoryStorage(10, window=5), r"use expstore\.open\(path, window=\.\.\.\)"),
        (lambda: expstore.LazyTensorStorage(10, window=5), r"use expstore\.open\(path, window="),
        (lambda: make("short", window=5, sampler=streaming), "slice_len=6"),
        (lambda: make("limited", window=5, batches=limited), "min_size_to_sample is 6"),
    ]
    for call, words in refused:
        with pytest.raises(ArgumentError, match=words):
            call()
    assert not (tmp_path / "none.exp").exists()
