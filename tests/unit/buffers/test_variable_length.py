"""Buffers over variable-length rows: samplers, conditions, SQL, changes, transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader

from expstore.buffers.ensemble import ReplayBufferEnsemble
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
from expstore.trajectories import traj
from expstore.transforms import MultiStepTransform
from tests.support.variable_length import buffer, plain, rollouts


def expected(sample: TensorDict) -> list[dict[str, Any]]:
    return [plain(rollouts(n, 1))[0] for n in sample["number"].reshape(-1).tolist()]


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what samplers write into batches."""
    own = ("staleness", "next.done", "next.truncated", "next.terminated")
    return [{name: value for name, value in row.items() if name not in own} for row in rows]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(),
        lambda: SamplerWithoutReplacement(),
        lambda: PrioritizedSampler(100, 0.7, 0.5),
        lambda: SliceSampler(slice_len=4),
        lambda: StalenessAwareSampler(version_key="version"),
        lambda: PromptGroupSampler(samples_per_group=2, group_key="prompt"),
        lambda: RandomSampler(where="len(tokens) > 2 AND prompt LIKE 'prompt%'"),
    ],
    ids=["uniform", "without", "prioritized", "slices", "staleness", "groups", "where"],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_sampler_draws_such_rows(sampler: Any, prefetch: int) -> None:
    rb = buffer(sampler=sampler(), prefetch=prefetch)
    for _ in range(4):
        sample = rb.sample()
        assert told(plain(sample)) == told(expected(sample))
        assert sample.batch_size == (8,)


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
