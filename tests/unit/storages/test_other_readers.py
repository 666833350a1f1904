"""Other programs read a closed store: zarr-python, TensorStore and DuckDB's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.storages.format.codecs import CODECS
from expstore.storages.format.layout import ColumnLayout
from tests.support.batches import counted_frames, numbered_rows
from tests.support.stores import extend_all, open_zarr
from tests.support.tuned import set_spare_slots
from tests.support.typed_rows import columns_of_every_dtype

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs")]


def rows(count: int, start: int = 0) -> TensorDict:
    """Return numbered rows of every dtype and of several shapes."""
    number = torch.arange(start, start + count)
    after = {
        "reward": number[:, None].float(),
        "observation": number[:, None] * torch.tensor([1.0, -0.5, 0.25]),
        "done": (number % 9 == 8)[:, None],
    }
    image = counted_frames(number, 2, 20, 20)
    return numbered_rows(count, start, image=image, next=after, all=columns_of_every_dtype)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def open_with_tensorstore(path: Path) -> Any:
    return tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}, open=True, read=True
    ).result()


def check_with_others(
    path: Path, held: dict[tuple[str, ...], np.ndarray], ids: np.ndarray, slots: int | None
) -> None:
    """Read every column by slot, with both, and hold it against what the buffer said."""
    group = zarr.open_group(path / "columns", mode="r")
    assert group.attrs["expstore"]["slots"] == slots
    places = ids - 1 if slots is None else (ids - 1) % slots
    for key, expected in held.items():
        by_zarr = group["/".join(key)]
        by_tensorstore = open_with_tensorstore(path.joinpath("columns", *key))
        for array in (by_zarr, by_tensorstore):
            found = np.asarray(array[:][places] if array is by_zarr else array.read().result()[places])
            assert found.dtype == expected.dtype, key
            np.testing.assert_array_equal(found, expected, err_msg=str(key))
            assert (array.shape[0] >= places.max() + 1) if slots is None else (array.shape[0] == slots)


def facts(rb: TensorDictReplayBuffer) -> tuple[dict[tuple[str, ...], np.ndarray], np.ndarray]:
    """What the buffer says, oldest row first."""
    query = "SELECT _id, _episode, _step, epoch_us(_time) AS _time, _priority FROM transitions ORDER BY _id"
    table = rb.sql(query).df()
    ids = table["_id"].to_numpy()
    whole = rb[rb.storage.geometry.index_of(ids)]
    held = {key if isinstance(key, tuple) else (key,): as_numpy(whole[key]) for key in whole.keys(True, True)}
    for name in ("_id", "_episode", "_step", "_time", "_priority"):
        held["_row", name[1:]] = table[name].to_numpy()
    return held, ids


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 6000, 50])
def test_zarr_and_tensorstore_read_a_closed_store(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    set_spare_slots(monkeypatch, 500)
    with expstore.open(store_path, capacity=capacity) as rb:
        extend_all(rb, *(rows(450, first) for first in range(0, 9000, 450)))
        for number in range(9000, 9005):
            rb.add(rows(1, number)[0])
        rb[[3, -1]] = rows(2, 20_000)
        rb.update_priority([5, 6], [4.0, 0.5])
        slots = rb.storage.geometry.slots
        held, ids = facts(rb)
    assert len(ids) == (capacity or 9005)
    assert slots == (None if capacity is None else capacity + 500)
    check_with_others(store_path, held, ids, slots)


def test_writes_to_an_open_store_show_after_a_flush(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50) as rb:
        rb.extend(rows(5))
        rb.flush()
        found = zarr.open_array(store_path / "columns" / "number", mode="r")
        assert found[:5].tolist() == [0, 1, 2, 3, 4]
        rb.add(rows(1, 5)[0])
        rb.flush()
        assert found[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_killed_writers_shapes_are_made_good_at_opening(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard may be there before the array's shape says so."""
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    with expstore.open(store_path) as rb:
        rb.extend(rows(5000))
        held, ids = facts(rb)
    for key in (("number",), ("next", "reward"), ("_row", "id")):
        path = store_path.joinpath("columns", *key, "zarr.json")
        data = json.loads(path.read_text())
        assert data["shape"][0] == 8192
        data["shape"][0] = 4096
        path.write_text(json.dumps(data))
    expstore.open(store_path).close()
    check_with_others(store_path, held, ids, None)


def test_duckdb_opens_the_index_of_a_closed_store(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50, meta={"env": "x"}) as rb:
        rb.extend(rows(70), source="arm")
        rb.update_priority([0], 3.0)
        rb.episodes.end()  # a close ends them, and the session, too
        names = ("episodes", "fragments", "sources", "priorities", "meta")
        expected = {name: rb.sql(f"SELECT * FROM {name} ORDER BY ALL").fetchall() for name in names}
    with duckdb.connect(str(store_path / "index.duckdb"), read_only=True) as con:
        for name in names:
            found = con.execute(f"SELECT * FROM {name} ORDER BY ALL").fetchall()
            if name == "sources":
                assert [row[-1] is None for row in expected[name]] == [True]
                assert [row[-1] is None for row in found] == [False]
                assert [row[:-1] for row in found] == [row[:-1] for row in expected[name]]
            elif name != "meta":
                assert found == expected[name], name
        facts_kept = dict(con.execute("SELECT key, value FROM meta").fetchall())
        assert json.loads(facts_kept["env"]) == "x"
        assert len(con.execute("FROM episodes").fetchall()) == 8
        assert len(con.execute("FROM priorities").fetchall()) == 50
    with expstore.open(store_path) as rb:  # which reading has not disturbed
        assert rb.recovered is None
        assert rb.sql("SELECT count(*) FROM episodes").fetchall() == [(8,)]


def test_an_analyst_who_holds_the_index_does_not_stop_the_writer(store_path: Path) -> None:
    """Its lock is DuckDB's; rows, flushes and closing go on without it."""
    import subprocess
    import sys

    with expstore.open(store_path) as rb:
        rb.extend(rows(20))
        rb.sql("SELECT 1")
    script = (
        "import duckdb, sys; con = duckdb.connect(sys.argv[1], read_only=True); print(flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(store_path / "index.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    rb = expstore.open(store_path, batch_size=4)
    rb.extend(rows(20, 20))
    with pytest.raises(expstore.errors.LockedError, match="index.duckdb is open in .*close it there"):
        rb.sql("SELECT 1")
    newest = rb.storage.state.journal.sync_files()[-1]
    rb.storage.checkpoints._truncate(rb.storage, newest)  # as a checkpoint does
    rb.extend(rows(3, 40))
    rb.flush()
    rb.sample()
    rb.close()
    child.communicate()
    with expstore.open(store_path) as rb:
        assert rb.recovered is None
        assert rb.sql("SELECT count(*), sum(live_rows)::INT FROM episodes").fetchall() == [(6, 43)]


@pytest.mark.guarantee(
    "exchange/readers",
    "zarr-python and TensorStore read the columns of a store; pyarrow, DuckDB, pandas and polars its "
    "exports.",
)
@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("capacity", "codec"),
    [
        pytest.param(capacity, codec, marks=() if number % 2 == cycles else pytest.mark.torture)
        for cycles, capacity in enumerate([None, 300])
        for number, codec in enumerate(CODECS)
    ],
)
def test_zarr_and_tensorstore_read_packed_shards(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None, codec: str
) -> None:
    """Those that are full, whatever is being filled beside them."""
    monkeypatch.setattr(tuning, "PACKED_SHARD_ROWS", 64)
    monkeypatch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 64)
    packed = {"layout": "packed", "rows": 8, "codec": codec}
    names = ("image", "next.observation", "all.bfloat16", "all.bool", "all.complex64")
    layout = ColumnLayout(fields=dict.fromkeys(names, packed))
    with open_zarr(store_path, capacity, layout=layout) as rb:
        extend_all(rb, *(rows(45, first) for first in range(0, 1000, 45)))
        slots = rb.storage.geometry.slots
        held, ids = facts(rb)
    places = ids - 1 if slots is None else (ids - 1) % slots
    for name in names:
        key = tuple(name.split("."))
        folder = store_path.joinpath("columns", *key)
        filling = [int(path.name.split(".")[1]) for path in folder.glob("open.*")]
        sealed = np.array([place // 64 not in filling for place in places.tolist()])
        assert sealed.sum() >= len(ids) - 64 * (1 if slots is None else 2)
        for found in (zarr.open_array(folder, mode="r")[:], open_with_tensorstore(folder).read().result()):
            assert np.asarray(found).dtype == held[key].dtype
            np.testing.assert_array_equal(np.asarray(found)[places[sealed]], held[key][sealed], err_msg=name)


def test_done_is_stored_as_any_flag(tmp_path: Path) -> None:
    """Others read it as it was given, beside the flags that it follows from; never set, it is a hole."""
    number = torch.arange(40)
    flags = {"terminated": number % 9 == 8, "truncated": number % 7 == 6}
    given = flags | {"done": (flags["terminated"] | flags["truncated"]) & (number % 3 > 0)}
    for name, after in {
        "some": given,
        "never": {key: torch.zeros_like(flag) for key, flag in given.items()},
    }.items():
        path = tmp_path / name
        with expstore.open(path) as rb:
            rb.extend(numbered_rows(40, next={key: flag[:, None] for key, flag in after.items()}))
            rb[:5] = rb[:5].set(("next", "terminated"), torch.zeros(5, 1, dtype=torch.bool))
            rb.flush()
            group = rb.storage.state.columns
            blank = {column.entry.key[-1] for column in group.flat.values() if column.blank}
            assert blank == (set(given) if name == "never" and not group.fills else set())
            assert rb.sql('SELECT sum("next".done::INT) FROM transitions').fetchall() == [
                (int(after["done"].sum()),)
            ]
        done = zarr.open_group(path / "columns", mode="r")["next/done"]
        assert (done[:40, 0] == after["done"].numpy()).all()
        assert done.attrs["expstore"] == {"dtype": "bool"}
