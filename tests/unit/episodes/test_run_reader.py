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


@pytest.mark.parametrize("rewarded", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_runs_are_those_of_a_batch(count: int, rewarded: bool) -> None:
    for names in itertools.chain(*(itertools.combinations(FLAGS, n) for n in range(4))):
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
            assert reader.read() == runs, names


def test_a_row_may_have_a_trajectory_id() -> None:
    for dtype, shape in itertools.product(("int64", "int8", "uint8", "uint64"), ((), (1,))):
        schema = Schema((Field(("episode",), dtype, shape), Field(("reward",), "float32", ())))
        columns = [np.zeros((1, *entry.shape), entry.numpy_dtype) for entry in schema.fields]
        reader = RunReader(schema, find_keys(schema), columns)
        for number in (0, 7, np.iinfo(dtype).max if dtype != "uint64" else 2**63 - 1):
            columns[0][:] = number
            assert reader.read() == [(0, 1, 0.0, 0, number)]


@pytest.mark.parametrize("count", [1, 3])
def test_trajectory_ids_are_integers(count: int) -> None:
    def read(dtype: str, trajectory: Any) -> int:
        schema = Schema([Field(("agent", "run"), dtype, (1,))])
        keys = find_keys(schema, trajectory=("agent", "run"))
        columns = [np.full((count, 1), trajectory, dtype)]
        if count == 1:
            ((_, _, _, _, found),) = RunReader(schema, keys, columns).read()
            return found
        return to_trajectory_ids(keys, columns[0]).tolist()[-1]

    good = [("float32", 3.0), ("float64", -(2.0**62)), ("uint64", 2**63 - 1), ("bool", True)]
    for dtype, trajectory in good:
        assert read(dtype, trajectory) == trajectory
    for dtype, trajectory in (
        *(("float64", value) for value in (np.nan, np.inf, 2.0**63)),
        *(("float32", 0.5), ("complex64", 1j), ("uint64", 2**64 - 1)),
    ):
        with pytest.raises(SchemaError, match="row 0: the trajectory id in 'agent.run' is .* no int64"):
            read(dtype, trajectory)
