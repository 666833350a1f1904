"""A consumer that draws the rows of an order file: an export of what another one has drawn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import expstore
from expstore.errors import (
    ArgumentError,
    CorruptionError,
    NotFoundError,
    NotReadyError,
    RowsChangedError,
    StorageError,
)
from tests.support.batches import observed_episode as rows
from tests.support.forks import in_child

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[Any]:
    with expstore.open(tmp_path / "run.exp", batch_size=4, seed=1) as rb:
        rb.extend(rows(100))
        yield rb


@pytest.fixture
def order(tmp_path: Path) -> Path:
    """Draws 3, 5 and 9, of 3, 1 and 2 rows; rows of a draw are not together."""
    path = tmp_path / "order.parquet"
    pq.write_table(pa.table({"draw": [9, 3, 3, 5, 9, 3], "id": [50, 7, 2, 100, 50, 1]}), path)
    return path


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["id"].tolist()
    return found


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


EXPECTED = [[7, 2, 1], [100], [50, 50]]


@pytest.mark.guarantee("consumers/order", "Exported draws are drawn again: the same rows, order and weights.")
@pytest.mark.parametrize("sampler", ["prioritized", "without_replacement", "slices"])
def test_exported_draws_are_drawn_again(rb: Any, sampler: str, tmp_path: Path) -> None:
    made = expstore.SliceSampler(slice_len=4) if sampler == "slices" else sampler
    if sampler == "prioritized":
        rb.update_priority(torch.arange(100), torch.rand(100, generator=torch.Generator().manual_seed(1)))
    with rb.consumer("learner", sampler=made, batch_size=24, keep="all") as c:
        before = [c.sample() for _ in range(6)]  # passes end with shorter batches
    out = tmp_path / "order.parquet"
    rb.sql("SELECT * FROM draws ORDER BY random()").to_parquet(out)
    rb.flush()
    shutil.copytree(rb.storage.path, tmp_path / "copy.exp")
    keys = ["id", "observation", *(["priority_weight"] if sampler == "prioritized" else [])]

    def check(path: Path) -> None:
        with expstore.open(path, mode="r") as copy, copy.consumer("again", manifest=out) as again:
            for batch, found in zip(before, again, strict=True):
                for key in keys:
                    assert batch[key].dtype == found[key].dtype
                    assert (batch[key] == found[key]).all()

    check(rb.storage.path)
    in_child(lambda: check(tmp_path / "copy.exp"))


def test_it_continues_goes_back_and_ends(rb: Any, order: Path) -> None:
    with rb.consumer("again", manifest=order) as c:
        first, position = ids(c.sample()), c.position
        assert first == EXPECTED[0]
    with rb.consumer("again", manifest=order, at=position) as c:
        assert [ids(batch) for batch in c] == EXPECTED[1:]
        with pytest.raises(NotReadyError, match="all 3 draws"):
            c.sample()
        c.seek(position)
        assert [ids(batch) for batch in c] == EXPECTED[1:]
        assert [ids(batch) for batch in c.replay(0)] == EXPECTED
        c.commit(position)
    with rb.consumer("again", manifest=order) as c:
        assert c.position == position
        assert [ids(batch) for batch in c] == EXPECTED[1:]


def test_a_failed_draw_comes_again(rb: Any, order: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rb.consumer("again", manifest=order) as c:
        append = c._log.append
        monkeypatch.setattr(c._log, "append", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            c.sample()
        monkeypatch.setattr(c._log, "append", append)
        assert [ids(batch) for batch in c] == EXPECTED


def test_place_orders_the_rows_of_a_draw(rb: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", draw=[1, 0, 1, 0], id=[4, 2, 3, 1], place=[1, 1, 0, 0])
    assert [ids(batch) for batch in rb.consumer("a", manifest=path)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights(rb: Any, dtype: Any, tmp_path: Path) -> None:
    c = rb.consumer("learner", sampler=expstore.PrioritizedSampler(dtype=dtype))
    rb.update_priority(torch.arange(100), torch.linspace(0.1, 1, 100))
    weights = c.sample()["priority_weight"]
    path = tmp_path / "order.parquet"
    rb.sql("SELECT * FROM draws").to_parquet(path)
    again = rb.consumer("again", manifest=path).sample()["priority_weight"]
    assert again.dtype == weights.dtype == dtype
    assert (again == weights).all()


def test_rows_that_are_gone(rb: Any, tmp_path: Path) -> None:
    rb.extend(rows(10, 100))
    path = write(tmp_path / "a.parquet", draw=[0, 0, 1, 2], id=[1, 105, 2, 106])
    rb.episodes.delete("episode_id = 1")
    c = rb.consumer("a", manifest=path)
    for _ in range(2):
        with pytest.raises(RowsChangedError, match=r"draw 0 of .*a.parquet had rows .* 1 \(id 1\)"):
            c.sample()
    c.close()
    c = rb.consumer("a", manifest=path, missing="skip")
    assert [ids(batch) for batch in c] == [[105], [106]]  # draw 1 has no row
    rb.episodes.delete("true")
    c = rb.consumer("b", manifest=path, missing="skip")
    with pytest.raises(NotReadyError):
        c.sample()


def test_an_order_follows_rows_to_new_ids(rb: Any, order: Path, tmp_path: Path) -> None:
    rb.snapshots.tag("start")
    rb.extend(rows(50, 100))
    rb.snapshots.restore(version="start")
    found = [batch["observation"].reshape(-1).long().tolist() for batch in rb.consumer("a", manifest=order)]
    assert found == [[id - 1 for id in draw] for draw in EXPECTED]


def test_arguments(rb: Any, order: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    for columns, message in (
        ({"id": [1]}, "no column 'draw'"),
        ({"draw": [1]}, "no column 'id'"),
        ({"draw": [1.0], "id": [1]}, "'draw' of .* whole number"),
        ({"draw": [1], "id": pa.array([None], pa.int64())}, "'id' of .* whole number"),
        ({"draw": [1], "id": [1], "place": ["a"]}, "'place' of .* whole number"),
        ({"draw": pa.array([], pa.int64()), "id": pa.array([], pa.int64())}, "has no row"),
        ({"draw": [1, 2], "id": [1, 1], "consumer": ["a", "b"]}, "several consumers"),
        ({"draw": [1, 2], "id": [1, 1], "weight": [1.0, None]}, "'weight' of .* floating-point"),
        ({"draw": [1], "id": [1], "weight": ["x"]}, "'weight' of .* floating-point"),
        (
            {"draw": [1, 2], "id": [1, 101]},
            "has the id 101, which this store never had: its ids are 1 to 100",
        ),
        ({"draw": [1], "id": [0]}, "has the id 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rb.consumer("a", manifest=write(path, **columns))
    for options, message in (
        ({"sampler": "random"}, "exclude each other"),
        ({"batch_size": 4}, "batch_size=4, but draws of .* have 1 to 3 rows"),
        ({"missing": "x"}, "missing must be"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rb.consumer("a", manifest=order, **options)
    with pytest.raises(NotFoundError, match="there is no file"):
        rb.consumer("a", manifest=tmp_path / "no.parquet")
    path.write_bytes(b"x")
    with pytest.raises(StorageError, match="cannot read"):
        rb.consumer("a", manifest=path)
    assert rb.consumers.list() == []
    write(path, draw=[0, 0, 1, 1], id=[1, 2, 3, 4], weight=pa.array([None] * 4, pa.float64()))
    with rb.consumer("a", manifest=path, batch_size=2) as c:
        assert "priority_weight" not in c.sample()
    with pytest.raises(ArgumentError, match="not the order that this consumer has drawn from"):
        rb.consumer("a", manifest=order)


def test_a_damaged_table_of_former_ids_is_named(rb: Any, order: Path) -> None:
    rb.snapshots.tag("start")
    rb.snapshots.restore(version="start")
    file = rb.storage.path / "renumbered"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(CorruptionError, match="renumbered is damaged"):
        rb.consumer("a", manifest=order).sample()
