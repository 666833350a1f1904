"""Runs of rows of one lane equal those into which a batch of the same rows is split."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from expstore.episodes.segmentation import RowFacts, RunReader, Steps, cut_batch, to_trajectory_ids
from expstore.errors import SchemaError
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema

FLAGS = ("terminated", "truncated", "done")


@pytest.mark.parametrize(
    "names", [one for n in range(4) for one in itertools.combinations(FLAGS, n)], ids=str
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rewarded", [True, False])
def test_runs_are_those_of_a_batch(names: tuple[str, ...], count: int, rewarded: bool) -> None:
    fields = [Field((name,), "bool", ()) for name in names] + [Field(("action",), "int64", ())]
    fields += [Field(("reward",), "float32", (1,))] if rewarded else []
    schema = Schema(tuple(fields))
    keys = find_keys(schema)
    columns = [np.zeros((count, *entry.shape), entry.numpy_dtype) for entry in fields]
    reader = RunReader(schema, keys, columns)
    for flags in itertools.product((False, True), repeat=count * len(names)):
        for column, values in zip(columns, np.reshape(flags, (len(names), count)), strict=False):
            column[:] = values
        if rewarded:
            columns[-1][:, 0] = np.arange(count) + 0.1
        terminated, truncated, rewards = RowFacts(schema, keys).read(columns)
        steps = Steps(count=count, terminated=terminated, truncated=truncated, rewards=rewards)
        pieces, _ = cut_batch(steps)
        runs = [(row, rows, ret, status, None) for _, _, _, row, rows, _, status, ret in pieces]
        assert reader.read() == runs


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "uint64"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_row_may_have_a_trajectory_id(dtype: str, shape: tuple[int, ...]) -> None:
    schema = Schema((Field(("episode",), dtype, shape), Field(("reward",), "float32", ())))
    columns = [np.zeros((1, *entry.shape), entry.numpy_dtype) for entry in schema.fields]
    reader = RunReader(schema, find_keys(schema), columns)
    for number in (0, 7, np.iinfo(dtype).max if dtype != "uint64" else 2**63 - 1):
        columns[0][:] = number
        assert reader.read() == [(0, 1, 0.0, 0, number)]


@pytest.mark.parametrize(
    ("dtype", "trajectory", "fits"),
    [
        ("float32", 3.0, True),
        ("float64", -(2.0**62), True),
        ("float32", 0.5, False),
        ("float64", np.nan, False),
        ("float64", np.inf, False),
        ("float64", 2.0**63, False),
        ("complex64", 1j, False),
        ("uint64", 2**63 - 1, True),
        ("uint64", 2**64 - 1, False),
        ("bool", True, True),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_trajectory_ids_are_integers(dtype: str, trajectory: Any, fits: bool, count: int) -> None:
    schema = Schema([Field(("agent", "run"), dtype, (1,))])
    keys = find_keys(schema, trajectory=("agent", "run"))
    columns = [np.full((count, 1), trajectory, dtype)]

    def read() -> int:
        if count == 1:
            ((_, _, _, _, found),) = RunReader(schema, keys, columns).read()
            return found
        return to_trajectory_ids(keys, columns[0]).tolist()[-1]

    if fits:
        assert read() == trajectory
    else:
        with pytest.raises(SchemaError, match="row 0: the trajectory id in 'agent.run' is .* no int64"):
            read()
