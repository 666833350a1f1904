"""Buffers over variable-length rows in RAM and on disk: samplers, conditions, SQL, changes, transforms."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import expstore
from expstore.buffers.ensemble import ReplayBufferEnsemble
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cli.app import app
from expstore.core import tuning
from expstore.errors import QueryError, SchemaError
from expstore.samplers import (
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
)
from expstore.schema.arrow_types import type_text
from expstore.schema.field_parser import schema_of
from expstore.trajectories import traj
from expstore.transforms import MultiStepTransform
from tests.support.case_selection import in_full, share
from tests.support.variable_length import buffer, jagged, plain, rollouts


def on_disk(path: Path, **options: Any) -> TensorDictReplayBuffer:
    rb = expstore.open(path, layout="arrow", capacity=100, batch_size=8, seed=3, **options)
    for first in range(0, 40, 10):
        rb.extend(rollouts(first, 10))
    return rb


@pytest.fixture
def rb(store_path: Path) -> Iterator[TensorDictReplayBuffer]:
    with on_disk(store_path) as found:
        yield found


def expected(sample: TensorDict) -> list[dict[str, Any]]:
    return [plain(rollouts(n, 1))[0] for n in sample["number"].reshape(-1).tolist()]


def check(sample: TensorDict) -> None:
    """Hold a sample against what was written, but for what samplers write into it."""
    own = ("staleness", "next.done", "next.truncated", "next.terminated")
    assert sample.batch_size == (8,)
    found, wanted = (
        [{name: value for name, value in row.items() if name not in own} for row in rows]
        for rows in (plain(sample), expected(sample))
    )
    assert found == wanted


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(),
        lambda: SamplerWithoutReplacement(),
        lambda: PrioritizedSampler(100, 0.7, 0.5),
        lambda: SliceSampler(slice_len=4),
        lambda: StalenessAwareSampler(version_key="version"),
        lambda: PromptGroupSampler(samples_per_group=2, group_key="prompt"),
        lambda: RandomSampler(where="len(tokens) > 2 AND prompt LIKE 'prompt%' AND facts.n > 3"),
    ],
    ids=["uniform", "without", "prioritized", "slices", "staleness", "groups", "where"],
)
def test_every_sampler_draws_such_rows_and_after_reopening(store_path: Path, sampler: Any) -> None:
    for prefetch in (0, 2):
        ram = buffer(sampler=sampler(), prefetch=prefetch)
        for _ in range(4):
            check(ram.sample())
    with on_disk(store_path, sampler=sampler(), batches={"prefetch": 2}) as rb:
        batches = [rb.sample() for _ in range(3)]
        for batch in batches:
            check(batch)
        rb.flush()
        if rb.sampler.prioritized:
            batches[0]["td_error"] = torch.ones(8)
            assert rb.update_tensordict_priority(batches[0]) == 8
    with expstore.open(store_path, sampler=sampler(), batch_size=8) as rb:
        check(rb.sample())
        assert plain(rb[:]) == plain(rollouts(0, 40))
    with expstore.open(store_path, mode="r", sampler=sampler(), batch_size=8) as follower:
        check(follower.sample())
        assert plain(follower[7:9]) == plain(rollouts(7, 2))


def test_slices_groups_and_priorities() -> None:
    rb = buffer(sampler=SliceSampler(slice_len=4))
    numbers = rb.sample()["number"].reshape(2, 4)
    assert (numbers.diff() == 1).all()
    groups = buffer(sampler=PromptGroupSampler(samples_per_group=2, group_key="prompt")).sample()["prompt"]
    assert all(groups[n] == groups[n + 1] for n in range(0, 8, 2))
    rb = buffer(sampler=PrioritizedSampler(100, 1.0, 1.0))
    sample = rb.sample()
    sample["td_error"] = sample["tokens"].offsets().diff().float()
    assert rb.update_tensordict_priority(sample) == 8


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("len(tokens) > 3", lambda n: n % 6 > 3),
        ("prompt = 'prompt 3'", lambda n: n % 7 == 3 and n % 5 != 4),
        ("prompt IS NULL", lambda n: n % 5 == 4),
        ("facts.n BETWEEN 10 AND 19", lambda n: 10 <= n < 20),
        ("len(facts.tags) = 2 AND next.reward > 20", lambda n: n % 3 == 2 and n > 20),
        ("octet_length(next.text) = 3", lambda n: n % 4 == 3),
        ("image.shape[1] = 2 AND image.data[1] > 5", lambda n: n % 2 == 1 and n > 5),
        ("list_sum(tokens) > 100", lambda n: sum(range(n, n + n % 6)) > 100),
    ],
)
def test_conditions_may_name_such_fields(where: str, holds: Any) -> None:
    sampler = SamplerWithoutReplacement(drop_last=False, where=where)
    rb = buffer(sampler=sampler)
    wanted = {n for n in range(40) if holds(n)}
    assert set(rb.sample(len(wanted))["number"].tolist()) == wanted
    rb.extend(rollouts(40, 10))
    found = rb.sql(f"SELECT number FROM transitions WHERE {where}").fetchall()
    assert {n for (n,) in found} == {n for n in range(50) if holds(n)}


def test_sql_shows_fields_under_their_names() -> None:
    rb = buffer()
    columns = ", ".join(f"typeof({name})" for name in ("prompt", "tokens", "image", "facts", "next"))
    kinds = rb.sql(f"SELECT {columns} FROM transitions LIMIT 1")
    assert kinds.fetchall() == [
        (
            "VARCHAR",
            "INTEGER[]",
            'STRUCT("data" BIGINT[], shape INTEGER[2])',
            "STRUCT(n BIGINT, tags VARCHAR[])",
            'STRUCT("text" BLOB, reward FLOAT, done BOOLEAN)',
        )
    ]
    rows = rb.sql("SELECT prompt, tokens, facts, next.text FROM transitions ORDER BY _id").fetchall()
    assert rows == [
        (row["prompt"], row["tokens"], row["facts"], row["next.text"]) for row in plain(rollouts(0, 40))
    ]
    counts = rb.sql("SELECT prompt, sum(len(tokens)) AS n FROM transitions GROUP BY prompt").df()
    assert counts.n.sum() == sum(n % 6 for n in range(40))
    assert rb.sql("FROM transitions").shape == (40, 13)


def test_queries_that_need_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = buffer()
    monkeypatch.setattr(tuning, "SQL_PACKED_BYTES", 300)
    monkeypatch.setattr(tuning, "SQL_FIRST_ROWS", 4)
    monkeypatch.setattr(tuning, "SQL_BATCH_BYTES", 64)
    with pytest.raises(QueryError, match="rows of tokens"):
        rb.sql("SELECT tokens FROM transitions")
    assert rb.sql("SELECT tokens FROM transitions WHERE number < 5").shape == (5, 1)
    assert rb.sql("SELECT sum(number) FROM transitions").fetchall() == [(780,)]


def test_rows_can_be_changed() -> None:
    rb = buffer()
    rb[0:10] = rollouts(20, 10)
    assert plain(rb[:10]) == plain(rollouts(20, 10))
    rb.set_at_("prompt", ["x", None], [0, 1])
    rb.set_at_("tokens", [torch.arange(9, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)], [0, 1])
    rb.set_at_("facts", [{"n": 1, "tags": None}], slice(0, 2))
    assert rb["prompt"][:3] == ["x", None, "prompt 1"]
    assert rb["tokens"].offsets().diff().tolist()[:3] == [9, 0, 22 % 6]
    assert rb["facts"][:2] == [{"n": 1, "tags": None}] * 2
    rb.set_at_("prompt", "same", slice(0, 4))
    assert rb["prompt"][:5] == ["same"] * 4 + [None]
    patch = TensorDict({"prompt": ["first", "third"], "next": {"text": [b"", b"q"]}}, [2])
    assert rb.update_if_present(id=torch.tensor([1, 3]), patch=patch).updated.tolist() == [True, True]
    assert rb["prompt"][:3] == ["first", "same", "third"]
    assert rb["next", "text"][2] == b"q"
    before = plain(rb[:])
    for value, words in (
        (3.5, "takes string, got float"),
        ([1, 2], "expected string, got int64"),
        (["a"] * 3, "3 values for 2 rows"),
    ):
        with pytest.raises(SchemaError, match=words):
            rb.set_at_("prompt", value, slice(0, 2))
    with pytest.raises(SchemaError, match="one number per row"):
        rb.update_if_present(id=torch.tensor([1]), patch={"number": [1]}, version_key="prompt", version=3)
    assert plain(rb[:]) == before


def test_rows_in_several_dims_are_a_lazy_stack() -> None:
    rb = buffer()
    numbers = np.array([[3, 4, 5], [0, 1, 2]])
    for rows in (rb[numbers], buffer(transform=MultiStepTransform(n_steps=2, gamma=0.9))[numbers]):
        assert rows.batch_size == (2, 3)
        assert [part["number"].tolist() for part in rows.unbind(0)] == numbers.tolist()
        assert [len(one) for one in rows.unbind(0)[0]["tokens"].unbind()] == [3, 4, 5]
        assert rows["prompt"][0][0] == "prompt 3"


def test_transforms_see_what_users_see() -> None:
    rb = buffer(transform=lambda batch: batch.set("length", batch["tokens"].offsets().diff()))
    sample = rb.sample()
    assert sample["length"].tolist() == [n % 6 for n in sample["number"].tolist()]
    rb = buffer(transform=MultiStepTransform(n_steps=2, gamma=1.0))
    sample = rb.sample()
    assert [len(one) for one in sample["tokens"].unbind()] == [n % 6 for n in sample["number"].tolist()]
    assert rb[4]["tokens"].tolist() == [4, 5, 6, 7]


def test_trajectories_and_conditions_on_them() -> None:
    rb = buffer()
    episode = rb.trajectory(2)
    assert plain(episode) == plain(rollouts(10, 10))
    found = rb.query(traj.number.max() > 25)
    assert [one.length for one in found] == [10, 10]
    assert plain(found[0].data) == plain(rollouts(20, 10))
    assert found[1]["prompt"][0] == "prompt 2"


def test_single_rows_stack_as_those_of_torchrl() -> None:
    rb = buffer()
    rows = [rb[n] for n in range(4)]
    stacked = lazy_stack(rows)
    assert stacked.get("tokens", as_nested_tensor=True).offsets().diff().tolist() == [0, 1, 2, 3]
    assert stacked["prompt"] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3"]
    other = buffer()
    other.extend(stacked)
    assert plain(other[40:]) == plain(rollouts(0, 4))
    loader = DataLoader(rows, batch_size=2, collate_fn=lazy_stack)  # type: ignore[arg-type]
    assert [list(batch["prompt"]) for batch in loader] == [["prompt 0", "prompt 1"], ["prompt 2", "prompt 3"]]
    texts = [rb[n : n + 2].select("prompt", "facts", "number") for n in (0, 2)]
    assert torch.cat(texts)["prompt"] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3"]
    assert torch.stack(texts)["facts"][1][0] == {"n": 2, "tags": ["é", "é"]}


def test_ensembles_of_such_buffers() -> None:
    both = ReplayBufferEnsemble(buffer(), buffer(), batch_size=8)
    sample = both.sample()
    assert sample.batch_size == (2, 4)
    for part in sample.unbind(0):
        assert plain(part.exclude("index")) == expected(part)


# -- on disk: after reopening, next to a writer ---------------------------------------------------------


def test_samples_own_their_memory(rb: TensorDictReplayBuffer) -> None:
    before = plain(rb[:])
    for found in (
        rb[5]["tokens"],
        rb[:]["tokens"].values(),
        rb[3:9]["tokens"].values(),
        rb.sample()["tokens"].values(),
    ):
        found += 100
    for image in (rb[5]["image"], *rb[:]["image"].unbind()):
        image += 100
    assert plain(rb[:]) == before


def test_sql_of_the_running_store_and_of_a_follower(store_path: Path) -> None:
    query = (
        "SELECT prompt, tokens, facts, next.text, image FROM transitions WHERE len(tokens) > 2 ORDER BY _id"
    )
    with on_disk(store_path) as rb:
        expected = [
            (row["prompt"], row["tokens"], row["facts"], row["next.text"])
            for row in plain(rollouts(0, 40))
            if len(row["tokens"]) > 2
        ]
        assert [row[:4] for row in rb.sql(query).fetchall()] == expected
        with expstore.open(store_path, mode="r") as follower:
            assert [row[:4] for row in follower.sql(query).fetchall()] == expected
        assert rb.sql("SELECT avg(len(tokens)) AS n FROM transitions").df().n[0] == 2.5 - 0.1


def test_the_command_line_prints_and_exports_such_fields(store_path: Path, tmp_path: Path) -> None:
    with on_disk(store_path):
        pass
    query = (
        "SELECT prompt, tokens, facts, next.text AS text FROM transitions WHERE _id IN (5, 6) ORDER BY _id"
    )
    expected = [
        {"prompt": None, "tokens": [4, 5, 6, 7], "facts": {"n": 4, "tags": ["é"]}, "text": ""},
        {
            "prompt": "prompt 5",
            "tokens": [5, 6, 7, 8, 9],
            "facts": {"n": 5, "tags": ["é", "é"]},
            "text": "05",
        },
    ]

    def ask(*options: str) -> str:
        done = CliRunner().invoke(app, ["sql", str(store_path), query, *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert json.loads(ask("--json")) == expected
    rows = list(csv.DictReader(io.StringIO(ask("--csv"))))
    assert [json.loads(row["tokens"]) for row in rows] == [row["tokens"] for row in expected]
    assert [json.loads(row["facts"]) for row in rows] == [row["facts"] for row in expected]
    assert [row["prompt"] for row in rows] == ["", "prompt 5"]
    table = ask()
    assert "[5, 6, 7, ... 5]" in table
    assert "NULL" in table
    ask("--parquet", str(tmp_path / "out.parquet"))
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert [row["text"] for row in found] == [b"", b"\5"]


def test_bad_batches_change_nothing_on_disk(store_path: Path) -> None:
    with on_disk(store_path) as rb:
        for field, value in (
            ("prompt", [1, 2]),
            ("facts", NonTensorStack(object(), None)),
            ("facts", NonTensorStack({"n": 1}, "text")),
            ("number", jagged([torch.zeros(1), torch.zeros(2)])),
            ("tokens", torch.zeros(2, 4)),
        ):
            with pytest.raises(SchemaError, match=field):
                rb.extend(rollouts(40, 2).exclude(field).set(field, value))
        for act in (lambda: rb.__setitem__(0, rollouts(0, 1)[0]), lambda: rb.set_at_("prompt", "x", 0)):
            with pytest.raises(SchemaError, match="cannot be changed"):
                act()
        rb.set_at_("version", 7, slice(0, 2))
        assert rb["version"][:3].tolist() == [7, 7, 0]
        rb.set_at_("version", 0, slice(0, 2))
        rb.extend(rollouts(40, 2))
    with expstore.open(store_path) as rb:
        assert plain(rb[:]) == plain(rollouts(0, 42))


def test_first_batches_and_schemas(store_path: Path) -> None:
    batch = TensorDict({"a": NonTensorStack(None, None), "n": torch.zeros(2)}, [2])
    with expstore.open(store_path, layout="arrow") as rb:
        with pytest.raises(SchemaError, match="has only None"):
            rb.extend(batch)
        assert rb.storage.schema is None
    schema = {"a": str, "n": "float32", "tokens": ("int64", (None,))}
    path = store_path.with_name("other")
    with expstore.open(path, layout="arrow", schema=schema) as rb:
        rb.extend(batch.set("tokens", torch.zeros(2, 3, dtype=torch.int32)))
        rb.add(TensorDict({"a": "x", "n": torch.zeros(()), "tokens": torch.arange(5)}))
    with expstore.open(path) as rb:
        assert rb["a"] == [None, None, "x"]
        assert rb["tokens"].offsets().tolist() == [0, 3, 6, 11]
        assert rb.storage.require_schema() == schema_of(schema)
        assert (
            type_text(rb.sql("SELECT tokens FROM transitions").arrow().schema[0].type) == '{"list":"int64"}'
        )


VALUES = {
    "text": st.none() | st.text(max_size=5),
    "bytes": st.none() | st.binary(max_size=5),
    "float": st.none() | st.floats(),
    "ints": st.none() | st.lists(st.none() | st.integers(-(2**40), 2**40), max_size=4),
    "nested": st.none()
    | st.fixed_dictionaries({"é": st.lists(st.none() | st.text(max_size=2), max_size=2), "n": st.booleans()}),
}
FIRST = {"text": "a", "bytes": b"a", "float": 0.5, "ints": [1], "nested": {"é": ["a"], "n": True}}
ROWS = st.lists(
    st.tuples(st.fixed_dictionaries(VALUES), st.lists(st.floats(), max_size=4)), min_size=1, max_size=5
)


def alike(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    return type(first) is type(second) and first == second


@pytest.mark.slow
@share(0.3, of=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(ROWS, min_size=1, max_size=3), read=st.sampled_from(["running", "reopened", "follower"])
)
def test_batches_of_any_values_come_back(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Any], read: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "store"
    batches = [[(FIRST, [0.5])], *batches]
    with expstore.open(path, layout="arrow") as rb:
        for batch in batches:
            values = {
                name: NonTensorStack(*[NonTensorData(row[name]) for row, _ in batch]) for name in VALUES
            }
            tokens = jagged([torch.tensor(numbers, dtype=torch.float64) for _, numbers in batch])
            rb.extend(TensorDict({**values, "tokens": tokens}, [len(batch)]))
        found = rb[:]
    if read != "running":
        with expstore.open(path, mode="a" if read == "reopened" else "r") as rb:
            found = rb[:]
    rows = [row for batch in batches for row in batch]
    for row, (values, numbers) in zip(found.unbind(0), rows, strict=True):
        assert all(alike(row.get(name).data, value) for name, value in values.items())
        assert row["tokens"].numpy().tobytes() == np.array(numbers, np.float64).tobytes()


test_batches_of_any_values_come_back_in_full = pytest.mark.torture(
    in_full(test_batches_of_any_values_come_back)
)
