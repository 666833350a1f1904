"""Runs of rows of one lane equal those into which a batch of the same rows is split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from expstore.episodes.segmentation import RowFacts, RunReader, Steps, cut_batch
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
        assert reader.read() == [(row, rows, ret, status) for _, _, _, row, rows, _, status, ret in pieces]
