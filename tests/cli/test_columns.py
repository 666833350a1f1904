"""The commands `add-column` and `drop-column`: output and exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.commands import Cli, Done

pytestmark = pytest.mark.index

Make = Callable[..., TensorDict]


@pytest.mark.slow
def test_fields_come_and_go(cli: Cli, store: Path, make_batch: Make) -> None:
    done = cli("add-column", store, "late", "--fill", "0.5")
    assert done == Done(0, f"{store} has a field late: float32[], in 30 rows\n", "")
    deep = ("next.deep.value", "--sql", "2 * action", "--dtype", "int32")
    assert cli("add-column", store, *deep, "--json").json == {
        "path": str(store), "field": "next.deep.value", "dtype": "int32", "rows": 30, "shape": [],
    }  # fmt: skip
    pair = ("pair", "--fill", "[1, 2]", "--default", "[3, 4]", "--shape", "2")
    assert cli("add-column", store, *pair).code == 0
    with expstore.open(store) as rb:
        assert (rb["next", "deep", "value"] == 2 * rb["action"]).all()
        assert (rb["pair"] == torch.tensor([1, 2])).all()
        batch = make_batch(5, start=30)
        batch["next", "deep"] = TensorDict({"value": torch.zeros(5, dtype=torch.int32)}, [5])
        rb.extend(batch)
        assert rb["pair"][-1].tolist() == [3, 4]
        assert (rb["late"] == 0.5).all()
    done = cli("drop-column", store, "next.deep.value")
    assert done == Done(0, f"{store} no longer has the field next.deep.value\n", "")
    dropped = {"path": str(store), "field": "late", "rows": 35}
    assert cli("drop-column", store, "late", "--json").json == dropped
    with expstore.open(store) as rb:
        assert rb.schema is not None
        assert [field.key[-1] for field in rb.schema.fields][-1] == "pair"
    assert cli("verify", store).code == 0


def test_invalid_arguments_are_refused(cli: Cli, store: Path) -> None:
    nothing = store.parent / "none.exp"
    add = ("add-column", store, "x")
    for *words, text in (
        (*add, "field x has no value: pass --fill VALUE or --sql EXPRESSION"),
        (*add, "--fill", "1", "--sql", "1", "field x has two values"),
        (*add, "--fill", "one", "is not a number"),
        (*add, "--fill", "1", "--shape", "a", "not a list of sizes"),
        (*add, "--sql", "nothing", "the fields are"),
        ("add-column", store, "action", "--fill", "1", "already"),
        ("add-column", nothing, "x", "--fill", "1", "not a store"),
        ("drop-column", store, "x", "no field 'x'"),
        ("drop-column", store, "next.reward", "cannot be dropped"),
    ):
        done = cli(*words)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), words
        assert text in done.err
        done = cli(*words, "--json")
        assert (done.code, done.err) == (2, "")
        assert text in done.json["error"]["message"] + done.json["error"]["hint"]
    assert not nothing.exists()


def test_a_store_in_use(cli: Cli, store: Path) -> None:
    with expstore.open(store):
        assert cli("add-column", store, "x", "--fill", "1").code == 3
        assert cli("drop-column", store, "action").code == 3
