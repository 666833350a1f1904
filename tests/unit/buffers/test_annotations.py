"""Annotations: values that are written after their rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.maintenance.verify import verify
from expstore.storages.columns import annotated
from expstore.storages.format import annotation_log
from expstore.wire.codec import columns_of

LENGTHS = [3, 0, 1, 2, 5, 4]


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"observation": torch.arange(start, start + count).float()[:, None]}, [count])


def rollouts() -> list[dict[str, Any]]:
    """One row per entry of LENGTHS, with as many tokens."""
    return [{"tokens": np.arange(n, dtype=np.int32), "done": True} for n in LENGTHS]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with expstore.open(tmp_path / "a.exp", batch_size=8) as rb:
        rb.extend(rows(8))
        yield rb


def open_rollouts(path: Path, **options: Any) -> Any:
    schema = {"tokens": ("int32", (None,)), "done": bool}
    rb = expstore.open(path, batch_size=4, layout="arrow", schema=schema, **options)
    rb.extend({name: [row[name] for row in rollouts()] for name in ("tokens", "done")})
    return rb


def lists(values: Any) -> list[list[float]]:
    return [row.tolist() for row in values.unbind()]


def table(rb: Any, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rb.sql(sql).arrow().to_pylist()]


def values(rb: Any, sql: str = "SELECT _id, advantage FROM transitions ORDER BY _id") -> dict[int, Any]:
    return dict(table(rb, sql))


@pytest.mark.guarantee(
    "rows/annotations",
    "Values that `rb.annotate` adds to rows, of any length, are in batches, conditions and "
    "SQL, the newest per row; a reader, and a store that is opened again, have them.",
)
def test_the_newest_value_is_in_batches_rows_and_sql(store: Any) -> None:
    store.annotate([2, 5], {"advantage": [0.5, -1.0]}, by="one")
    store.annotate(torch.tensor([5, 7, 7]), {"advantage": torch.tensor([2.0, 1.0, 3.0])}, by="two")
    expected = {2: 0.5, 5: 2.0, 7: 3.0}
    assert values(store) == {id: expected.get(id) for id in range(1, 9)}
    read = store[:]["advantage"]
    assert read.dtype == torch.float32
    assert {n + 1: x for n, x in enumerate(read.tolist()) if x == x} == expected
    batch = store.sample()
    for id, value in zip(batch["id"].tolist(), batch["advantage"].tolist(), strict=True):
        assert value == expected.get(id) or (value != value and id not in expected)


@pytest.mark.guarantee(
    "rows/annotation_history",
    "The relation `annotations` has every value that a stored row was given, with who gave it and when.",
)
def test_the_relation_has_older_values_too(store: Any) -> None:
    store.annotate([2, 5], {"advantage": [0.5, -1.0]}, by="one")
    store.annotate([5], {"advantage": [2.0], "label": [[1, 2, 3]]})
    found = table(
        store, "SELECT id, field, value, author, number FROM annotations ORDER BY number, field, id"
    )
    numbers = [row[4] for row in found]
    assert [row[:4] for row in found] == [
        (2, "advantage", [0.5], "one"),
        (5, "advantage", [-1.0], "one"),
        (5, "advantage", [2.0], None),
        (5, "label", [1.0, 2.0, 3.0], None),
    ]
    assert numbers == sorted(numbers)
    assert table(store, "SELECT count(value) FROM annotations WHERE time <= now()::TIMESTAMP") == [(4,)]


@pytest.mark.guarantee("rows/annotations")
def test_conditions_see_annotations_and_skip_rows_without_one(tmp_path: Path) -> None:
    sampler = expstore.RandomSampler(where="advantage >= 0")
    with expstore.open(tmp_path / "a.exp", batch_size=16, sampler=sampler) as rb:
        rb.extend(rows(8))
        rb.annotate([2, 5, 6], {"advantage": [0.5, -1.0, 3.0]})
        assert set(rb.sample()["id"].tolist()) == {2, 6}


@pytest.mark.guarantee("rows/annotations")
def test_a_store_that_is_opened_again_has_them_and_a_reader_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with open_rollouts(path) as rb:
        rb.annotate([1, 4], {"entropy": [[0.5, 1.5, 2.5], [7.0, 8.0]]}, like="tokens")
        with expstore.open(path, mode="r") as reader:
            assert lists(reader[:]["entropy"]) == [[0.5, 1.5, 2.5], [], [], [7.0, 8.0], [], []]
            rb.annotate([3], {"entropy": [[9.0]], "score": [1.0]})
            reader.storage.follow()
            assert lists(reader[2:3]["entropy"]) == [[9.0]]
            assert table(reader, "SELECT score FROM transitions WHERE _id = 3") == [(1.0,)]
    with expstore.open(path) as rb:
        assert lists(rb[:4]["entropy"]) == [[0.5, 1.5, 2.5], [], [9.0], [7.0, 8.0]]
        assert rb.storage.schema["entropy",].like == ("tokens",)
        rb.annotate([3], {"entropy": [[10.0]]})
        assert table(rb, "SELECT count(*) FROM annotations WHERE id = 3 AND field = 'entropy'") == [(2,)]


@pytest.mark.guarantee(
    "rows/annotation_checks",
    "Annotations of a wrong shape, length or dtype, or for rows that are gone, raise an error "
    "and change nothing.",
)
def test_values_per_token_are_as_many_as_the_tokens(tmp_path: Path) -> None:
    with open_rollouts(tmp_path / "a.exp") as rb:
        rb.annotate([1], {"logprobs": [np.zeros(3, np.float32)]}, like="tokens")
        with pytest.raises(SchemaError, match="id 4 has 3 values, and 2 tokens"):
            rb.annotate([1, 4], {"logprobs": [np.ones(3, np.float32)] * 2})
        assert lists(rb[:1]["logprobs"]) == [[0.0, 0.0, 0.0]]
        with pytest.raises(SchemaError, match="like='done'"):
            rb.annotate([1], {"other": [[1.0]]}, like="done")


REFUSED: list[tuple[list[int], dict[str, Any], type[Exception], str]] = [
    ([1, 2], {"advantage": [1.0]}, SchemaError, "1 rows of values for 2 ids"),
    ([1], {"advantage": [[1.0, 2.0]]}, SchemaError, "got rows of shape"),
    ([1], {"advantage": torch.zeros(1, 2)}, SchemaError, "got rows of shape"),
    ([1], {"advantage": np.array([1.5])}, SchemaError, "dtype mismatch"),
    ([1], {"pair": torch.zeros(1, 3)}, SchemaError, "got rows of shape"),
    ([1, 2], {"pair": [[1.0, 2.0], [1.0]]}, SchemaError, "row 1 has 1"),
    ([1], {"list": [[[1.0]]]}, SchemaError, "have one dim"),
    ([1], {"list": [1.0]}, SchemaError, "array of any length"),
    ([1], {"text": ["a"]}, SchemaError, "dtype"),
    ([1], {"observation": torch.zeros(1, 1)}, SchemaError, "written with its rows"),
    ([1], {"done": [True]}, SchemaError, "would mark"),
    ([1, 9, 10], {"advantage": [1.0, 2.0, 3.0]}, NotFoundError, "2 of 3 rows.*9, 10"),
    ([1], {}, ArgumentError, "at least one field"),
    ([1], {"advantage": 1.0}, SchemaError, "got a float"),
]


@pytest.mark.guarantee("rows/annotation_checks")
def test_values_that_do_not_fit_change_nothing(store: Any, tmp_path: Path) -> None:
    store.annotate([1], {"advantage": [0.5], "pair": torch.ones(1, 2), "list": [[1.0]]})
    before = table(store, "SELECT * FROM annotations ORDER BY ALL"), store.storage.schema
    for ids, given, error, words in REFUSED:
        with pytest.raises(error, match=words):
            store.annotate(ids, given)
        assert (table(store, "SELECT * FROM annotations ORDER BY ALL"), store.storage.schema) == before
    with expstore.open(store.storage.path, mode="r") as reader:
        with pytest.raises(StateError, match="reading only"):
            reader.annotate([1], {"score": [1.0]})
    writer = expstore.TensorDictMaxValueWriter(rank_key="observation")
    with expstore.open(tmp_path / "best.exp", capacity=4, batch_size=2, writer=writer) as rb:
        rb.extend(rows(4))
        with pytest.raises(StateError, match="keeps the best rows"):
            rb.annotate([1], {"score": [1.0]})


def test_rows_are_written_and_changed_without_them(store: Any) -> None:
    store.annotate([1], {"advantage": [0.5]})
    with pytest.raises(SchemaError, match="without the annotated field 'advantage'"):
        store.extend(store[:2])
    with pytest.raises(SchemaError, match="without the annotated field 'advantage'"):
        store[0] = store[0]
    with pytest.raises(SchemaError, match="without the annotated field 'advantage'"):
        store.update_if_present(id=torch.tensor([1]), patch={"advantage": torch.zeros(1)})
    store.extend(rows(2, 8))
    store.add(rows(1, 10)[0])
    assert len(store) == 11
    assert values(store)[1] == 0.5
    assert store[:]["observation"].reshape(-1).tolist() == list(range(11))


def test_steps_are_recorded_without_them(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", batch_size=2) as rb:
        zeros = np.zeros(2, np.float32)
        with rb.record("env") as record:
            record.step(zeros, 1, 0.5, zeros + 1, terminated=False, truncated=False)
            record.flush()
            rb.annotate([1], {"score": [1.0]})
            record.step(zeros + 1, 1, 0.5, zeros + 2, terminated=True, truncated=False)
        assert values(rb, "SELECT _id, score FROM transitions") == {1: 1.0, 2: None}
        assert rb[:]["observation"][:, 0].tolist() == [0.0, 1.0]


def test_each_dtype_reads_as_it_was_given(store: Any) -> None:
    for dtype in ("bool", "int8", "int64", "uint16", "float16", "float64"):
        given = np.array([[1, 0, 1], [0, 0, 1]], dtype)
        fixed, loose = f"fixed_{dtype}", f"loose_{dtype}"
        store.annotate([2, 3], {fixed: given, loose: [given[0], given[1][:1]]})
        assert np.array_equal(store[1:3][fixed].numpy(), given)
        assert lists(store[1:3][loose]) == [given[0].tolist(), given[1][:1].tolist()]
        found = table(store, f"SELECT {fixed}, {loose} FROM transitions WHERE _id IN (1, 2) ORDER BY _id")
        cells = [list(cell) if cell is not None else None for row in found for cell in row]
        assert cells == [None, None, given[0].tolist(), given[0].tolist()], dtype


@pytest.mark.guarantee(
    "keep/annotations",
    "Annotations leave the store with their row.",
)
def test_they_leave_a_ring_with_their_rows(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=4, batch_size=2) as rb:
        rb.extend(rows(4))
        rb.annotate([1, 2, 3, 4], {"advantage": [1.0, 2.0, 3.0, 4.0]})
        assert values(rb) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
        rb.extend(rows(3, 4))
        assert values(rb) == {4: 4.0, 5: None, 6: None, 7: None}
        assert table(rb, "SELECT id FROM annotations") == [(4,)]
        assert rb[:]["advantage"].isnan().sum() == 3
        for start in range(7, 2000, 3):
            rb.extend(rows(3, start))
        last = start + 3
        assert table(rb, "SELECT count(*) FROM annotations") == [(0,)]
        assert set(values(rb).values()) == {None}
        rb.annotate([last], {"advantage": [5.0]})
        assert values(rb)[last] == 5.0


@pytest.mark.guarantee("keep/annotations")
def test_files_are_removed_once_their_rows_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotated, "FILE_BYTES", 500)
    monkeypatch.setattr(annotation_log, "FILE_BYTES", 500)
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=4, batch_size=2) as rb:
        rb.extend(rows(4))
        rb.annotate([1], {"score": [1.0]})
        with expstore.open(path, mode="r") as reader:
            for start in range(4, 20_000, 500):
                rb.extend(rows(500, start))
                rb.annotate([start + 500], {"score": [float(start)]})
                assert values(reader, "SELECT _id, score FROM transitions")[start + 500] == start
        rb.flush()
        assert 0 < len(list((path / "annotations").iterdir())) < 8
        last = rb.storage.last
    with expstore.open(path) as rb:
        found = values(rb, "SELECT _id, score FROM transitions ORDER BY _id")
        assert found == dict.fromkeys(range(last - 3, last)) | {last: last - 500.0}
        rb.annotate([last], {"score": [1.0]})
        assert table(rb, "SELECT value FROM annotations ORDER BY number") == [([last - 500.0],), ([1.0],)]


def test_arrow_arrays_keep_their_dtypes(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", batch_size=2, layout="arrow") as rb:
        rb.extend(rows(2))
        scores = pa.chunked_array([pa.array([1], pa.int16()), pa.array([2], pa.int16())])
        logprobs = pa.array([[0.5, 1.5], []], pa.list_(pa.float32()))
        rb.annotate([1, 2], {"score": scores, "logprobs": logprobs, "good": pa.array([True, False])})
        types = {str(entry.key[0]): str(entry) for entry in rb.storage.require_schema().fields}
        assert types["score"].endswith("int16[]")
        assert types["logprobs"].endswith("float32[?]")
        assert table(rb, "SELECT score, logprobs, good FROM transitions ORDER BY _id") == [
            (1, [0.5, 1.5], True), (2, [], False),
        ]  # fmt: skip
        for wrong in (pa.array([1, None], pa.int16()), pa.array([[0.5, None], []], pa.list_(pa.float32()))):
            with pytest.raises(SchemaError, match="null"):
                rb.annotate([1, 2], {"score" if wrong.null_count else "logprobs": wrong})


@pytest.mark.guarantee("keep/annotations")
@pytest.mark.parametrize("items", [1, 20])  # small values are in memory, too
def test_a_row_that_takes_a_slot_has_no_value(tmp_path: Path, items: int) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=8, batch_size=2) as rb, expstore.open(path, mode="r") as reader:
        rb.extend(rows(8))
        rb.annotate(list(range(1, 9)), {"score": torch.ones(8, items)})
        assert not reader[:]["score"].isnan().any()
        rb.extend(rows(rb.storage.geometry.slots, 8))  # a ring has more slots than it has rows
        assert rb.storage.geometry.slot_of(np.array([rb.storage.last])) == 7
        for one in (rb, reader):
            assert one[:]["score"].isnan().all()
            assert table(one, "SELECT count(*) FROM transitions WHERE score IS NULL") == [(8,)]


def test_a_file_that_is_full_stays_open_while_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotated, "FILE_BYTES", 500)
    monkeypatch.setattr(annotation_log, "FILE_BYTES", 500)
    with expstore.open(tmp_path / "a.exp", batch_size=2) as rb:
        rb.extend(rows(4))
        rb.annotate([1], {"score": [1.0]})

        def prepare(*_: object) -> None:
            monkeypatch.undo()
            monkeypatch.setattr(annotated, "FILE_BYTES", 500)
            for number in range(20):
                rb.annotate([2], {"score": [float(number)]})

        monkeypatch.setattr(annotated.AnnotationLog, "prepare", prepare)
        rb.flush()
        assert rb[1]["score"] == 19


@pytest.mark.guarantee("keep/annotations")
def test_they_leave_with_deleted_rows(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", batch_size=2) as rb:
        for start in (0, 4):
            batch = rows(4, start)
            batch["next", "done"] = torch.tensor([False, False, False, True])[:, None]
            rb.extend(batch)
        rb.annotate(list(range(1, 9)), {"advantage": [float(n) for n in range(1, 9)]})
        rb.storage.retention.delete(np.array([1]))
        assert table(rb, "SELECT DISTINCT id FROM annotations ORDER BY id") == [(5,), (6,), (7,), (8,)]
        with pytest.raises(NotFoundError, match="rows are not in the store: 1"):
            rb.annotate([1], {"advantage": [1.0]})


@pytest.mark.guarantee(
    "version/annotations",
    "A version has the annotations up to its record; restores, resizes and merges keep them on their rows.",
)
def test_a_version_has_those_up_to_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with open_rollouts(path) as rb:
        rb.annotate([1, 3], {"score": [1.0, 3.0], "loose": [[1.0], [2.0, 3.0]]})
        rb.snapshots.tag("before")
        rb.annotate([1], {"score": [9.0]})
        rb.snapshots.tag("after")
    for tag, score in (("before", 1.0), ("after", 9.0)):
        with expstore.open(path, mode="r", version=tag) as old:
            assert values(old, "SELECT _id, score FROM transitions WHERE _id < 4") == {
                1: score,
                2: None,
                3: 3.0,
            }
            assert lists(old[:3]["loose"]) == [[1.0], [], [2.0, 3.0]]
            assert table(old, "SELECT count(*) FROM annotations") == [(5 if tag == "after" else 4,)]


@pytest.mark.guarantee("version/annotations")
def test_a_restore_renames_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with open_rollouts(path) as rb:
        rb.annotate([1, 3], {"score": [1.0, 3.0], "loose": [[1.0], [2.0, 3.0]]}, by="old")
        rb.snapshots.tag("before")
        rb.annotate([1, 2], {"score": [9.0, 9.0]})
        rb.snapshots.restore(path, version="before")
        ids = [id for (id,) in table(rb, "SELECT _id FROM transitions ORDER BY _id")]
        assert min(ids) > 6
        assert list(values(rb, "SELECT _id, score FROM transitions ORDER BY _id").values())[:3] == [
            1.0,
            None,
            3.0,
        ]
        assert lists(rb[-6:-3]["loose"]) == [[1.0], [], [2.0, 3.0]]
        assert {row[0] for row in table(rb, "SELECT id FROM annotations")} == {ids[0], ids[2]}
        rb.annotate([2], {"score": [5.0]})  # a former id
        assert values(rb, "SELECT _id, score FROM transitions")[ids[1]] == 5.0
    with expstore.open(path) as rb:
        assert values(rb, "SELECT _id, score FROM transitions")[ids[1]] == 5.0
        assert table(rb, "SELECT DISTINCT author FROM annotations ORDER BY 1") == [("old",), (None,)]


@pytest.mark.guarantee("version/annotations")
def test_a_dump_that_another_store_loads_brings_them(tmp_path: Path) -> None:
    with open_rollouts(tmp_path / "a.exp") as rb:
        rb.annotate([1, 3], {"score": [1.0, 3.0]})
        rb.dumps(tmp_path / "dumps")
    with expstore.open(tmp_path / "b.exp", capacity=3, batch_size=2, layout="arrow") as rb:
        rb.loads(tmp_path / "dumps")
        assert values(rb, "SELECT _id, score FROM transitions") == {4: None, 5: None, 6: None}
    with expstore.open(tmp_path / "c.exp", capacity=5, batch_size=2, layout="arrow") as rb:
        rb.loads(tmp_path / "dumps")
        assert values(rb, "SELECT _id, score FROM transitions") == {
            2: None,
            3: 3.0,
            4: None,
            5: None,
            6: None,
        }


@pytest.mark.guarantee("version/annotations")
def test_they_survive_a_change_of_the_capacity_and_a_merge(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with expstore.open(tmp_path / f"{name}.exp", capacity=8, batch_size=2) as rb:
            rb.extend(rows(8))
            rb.annotate([2, 7], {"advantage": [2.0, 7.0]}, by=name)
    expstore.resize(tmp_path / "a.exp", capacity=3)
    with expstore.open(tmp_path / "a.exp") as rb:
        assert values(rb) == {6: None, 7: 7.0, 8: None}
    expstore.merge([tmp_path / "a.exp", tmp_path / "b.exp"], out=tmp_path / "c.exp")
    with expstore.open(tmp_path / "c.exp", batch_size=2) as rb:
        expected = {2: 7.0, 5: 2.0, 10: 7.0}
        assert values(rb) == {id: expected.get(id) for id in range(1, 12)}
        assert table(rb, "SELECT id, author FROM annotations ORDER BY id") == [(2, "a"), (5, "b"), (10, "b")]


def test_a_store_is_opened_again_with_the_schema_of_its_rows(tmp_path: Path) -> None:
    with open_rollouts(tmp_path / "a.exp") as rb:
        rb.annotate([1], {"score": [1.0]})
    with open_rollouts(tmp_path / "a.exp") as rb:
        assert len(rb) == 12
        assert values(rb, "SELECT _id, score FROM transitions WHERE _id IN (1, 7)") == {1: 1.0, 7: None}


def test_a_dropped_field_takes_its_values_with_it(store: Any) -> None:
    store.annotate([1, 2], {"score": [1.0, 2.0]})
    store.columns.drop("score")
    assert table(store, "SELECT count(*) FROM annotations") == [(0,)]
    store.annotate([2], {"score": [[1, 2]]})
    assert lists(store[:2]["score"]) == [[], [1, 2]]
    assert table(store, "SELECT id, value FROM annotations") == [(2, [1.0, 2.0])]


@pytest.mark.guarantee("rows/annotations")
def test_columns_add_takes_fields_of_any_length(tmp_path: Path) -> None:
    with open_rollouts(tmp_path / "a.exp") as rb:

        def divide(batch: TensorDict) -> list[torch.Tensor]:
            return [row.float() / 2 for row in batch["tokens"].unbind()]

        rb.columns.add("half", function=divide, dtype="float32", shape=(None,), like="tokens")
        rb.columns.add("empty", fill=[], dtype=torch.int64, shape=(None,))
        assert lists(rb[:]["half"]) == [[n / 2 for n in range(count)] for count in LENGTHS]
        assert lists(rb[:]["empty"]) == [[]] * 6
        with pytest.raises(SchemaError, match="the row with the id 1 has 1 values, and 3 tokens"):
            rb.columns.add("other", fill=[1.0], dtype="float32", shape=(None,), like="tokens")
        with pytest.raises(ArgumentError, match="takes dtype="):
            rb.columns.add("other", sql="1", dtype="float32", shape=(None,))
        assert ("other",) not in rb.storage.schema
        rb.annotate([2], {"other": [[1.0]]})
        assert lists(rb[:2]["other"]) == [[], [1.0]]


@pytest.mark.guarantee("rows/annotation_checks")
@pytest.mark.parametrize("at", [-1, 20])
def test_verify_finds_a_damaged_record(at: int, tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with open_rollouts(path) as rb:
        rb.annotate([1, 3], {"score": [1.0, 3.0], "loose": [[1.0], [2.0, 3.0]]})
    assert not verify(path)
    (file,) = (path / "annotations").iterdir()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    found = verify(path)
    assert [finding.path for finding in found] == ["annotations"]


def open_memory(capacity: int | None) -> Any:
    storage = expstore.MemoryStorage(capacity)
    return expstore.TensorDictReplayBuffer(storage=storage, batch_size=4, with_ids=True)


@pytest.mark.guarantee("rows/annotations")
@pytest.mark.parametrize("capacity", [None, 8])
def test_rows_in_memory_are_annotated(capacity: int | None) -> None:
    rb = open_memory(capacity)
    rb.extend(rows(6))
    rb.annotate([2, 6], {"score": [2.0, 6.0], "loose": [[1.0], [2.0, 3.0]]}, by="one")
    rb.annotate([2], {"score": [3.0]})
    rb.extend(rows(10, 6))
    sql = "SELECT _id, score FROM transitions ORDER BY _id"
    if capacity is None:
        expected = {2: 3.0, 6: 6.0}
        assert values(rb, sql) == {id: expected.get(id) for id in range(1, 17)}
        assert lists(rb[[1, 2, 5]]["loose"]) == [[1.0], [], [2.0, 3.0]]
        assert len(table(rb, "SELECT * FROM annotations")) == 5
    else:
        assert values(rb, sql) == dict.fromkeys(range(9, 17))
        assert table(rb, "SELECT count(*) FROM annotations") == [(0,)]
    rb.annotate([16], {"score": [7.0]})
    assert values(rb, sql)[16] == 7.0
    rb.columns.drop("score")
    rb.annotate([16], {"score": [[8, 9]]})
    assert lists(rb[-1:]["score"]) == [[8, 9]]


@pytest.mark.guarantee("version/annotations")
def test_a_dump_and_a_state_of_rows_in_memory_have_them(tmp_path: Path) -> None:
    memory = open_memory(8)
    memory.extend(rows(6))
    memory.annotate([2], {"score": [2.0]}, by="one")
    memory.annotate([2, 5], {"score": [3.0, 5.0]})
    expected = {id: {2: 3.0, 5: 5.0}.get(id) for id in range(1, 7)}
    sql, history = (
        "SELECT _id, score FROM transitions ORDER BY _id",
        "SELECT id FROM annotations ORDER BY ALL",
    )
    copy = pickle.loads(pickle.dumps(memory))
    assert values(copy, sql) == expected
    assert table(copy, history) == [(2,), (2,), (5,)]
    memory.dumps(tmp_path / "dumps")
    with expstore.open(tmp_path / "a.exp", capacity=8, batch_size=2) as rb:
        rb.loads(tmp_path / "dumps")
        assert values(rb, sql) == expected
        assert table(rb, history) == [(2,), (2,), (5,)]
        rb.annotate([6], {"score": [6.0]})
        rb.dumps(tmp_path / "more")
    again = open_memory(8)
    again.loads(tmp_path / "more")
    assert values(again, sql) == expected | {6: 6.0}
    again.extend(rows(6, 6))
    assert values(again, sql) == {5: 5.0, 6: 6.0} | dict.fromkeys(range(7, 13))


def test_a_batch_with_annotated_fields_is_sent_as_it_is(store: Any) -> None:
    store.annotate([1, 3], {"score": [1.0, 3.0], "loose": [[1.0], [2.0, 3.0]]})
    batch = store[:4]
    schema, columns = columns_of(batch, store.storage.schema)
    assert not schema.annotated
    assert dict(zip(schema.keys, columns, strict=True))["loose",].to_pylist() == [[1.0], [], [2.0, 3.0], []]
