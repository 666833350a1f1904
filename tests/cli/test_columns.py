"""The commands `add-column` and `drop-column`: output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.commands import Cli

pytestmark = pytest.mark.index

Make = Callable[..., TensorDict]


@pytest.mark.slow
def test_fields_come_and_go(cli: Cli, store: Path, make_batch: Make) -> None:
    code, out, err = cli("add-column", store, "late", "--fill", "0.5")
    assert (code, out, err) == (0, f"{store} has a field late: float32[], in 30 rows\n", "")
    code, out, _ = cli(
        "add-column", store, "next.deep.value", "--sql", "2 * action", "--dtype", "int32", "--json"
    )
    assert code == 0
    assert json.loads(out) == {
        "path": str(store), "field": "next.deep.value", "dtype": "int32", "rows": 30, "shape": [],
    }  # fmt: skip
    code, _, _ = cli("add-column", store, "pair", "--fill", "[1, 2]", "--default", "[3, 4]", "--shape", "2")
    assert code == 0
    with expstore.open(store) as rb:
        assert (rb["next", "deep", "value"] == 2 * rb["action"]).all()
        assert (rb["pair"] == torch.tensor([1, 2])).all()
        batch = make_batch(5, start=30)
        batch["next", "deep"] = TensorDict({"value": torch.zeros(5, dtype=torch.int32)}, [5])
        rb.extend(batch)
        assert rb["pair"][-1].tolist() == [3, 4]
        assert (rb["late"] == 0.5).all()
    code, out, _ = cli("drop-column", store, "next.deep.value")
    assert (code, out) == (0, f"{store} no longer has the field next.deep.value\n")
    code, out, _ = cli("drop-column", store, "late", "--json")
    assert (code, json.loads(out)) == (0, {"path": str(store), "field": "late", "rows": 35})
    with expstore.open(store) as rb:
        assert rb.schema is not None
        assert [field.key[-1] for field in rb.schema.fields][-1] == "pair"
    assert cli("verify", store)[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("add-column", "STORE", "x"), 2, "field x has no value: pass --fill VALUE or --sql EXPRESSION"),
        (("add-column", "STORE", "x", "--fill", "1", "--sql", "1"), 2, "field x has two values"),
        (("add-column", "STORE", "x", "--fill", "one"), 2, "is not a number"),
        (("add-column", "STORE", "x", "--fill", "1", "--shape", "a"), 2, "not a list of sizes"),
        (("add-column", "STORE", "x", "--sql", "nothing"), 2, "the fields are"),
        (("add-column", "STORE", "action", "--fill", "1"), 2, "already"),
        (("add-column", "NOTHING", "x", "--fill", "1"), 2, "not a store"),
        (("drop-column", "STORE", "x"), 2, "no field 'x'"),
        (("drop-column", "STORE", "next.reward"), 2, "cannot be dropped"),
    ],
)
def test_invalid_arguments_are_refused(
    cli: Cli, store: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    places = {"STORE": str(store), "NOTHING": str(store) + ".none"}
    given = [places.get(word, word) for word in words]
    found, out, err = cli(*given)
    assert (found, out) == (code, "")
    assert text in err
    assert err.count("\n") == 1
    found, out, err = cli(*given, "--json")
    assert (found, err) == (code, "")
    assert text in json.loads(out)["error"]["message"] + json.loads(out)["error"]["hint"]
    assert not (store.parent / (store.name + ".none")).exists()


def test_a_store_in_use(cli: Cli, store: Path) -> None:
    with expstore.open(store):
        assert cli("add-column", store, "x", "--fill", "1")[0] == 3
        assert cli("drop-column", store, "action")[0] == 3
