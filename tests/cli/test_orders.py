"""`export --draws`: the draws of consumers as an order file."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import expstore
from tests.support.commands import Cli

pytestmark = pytest.mark.index


def test_draws_are_exported(cli: Cli, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "order.parquet"
    assert cli("export", store, out, "--draws").err.startswith(f"error: {store} has no draws of consumers")
    with expstore.open(store, batch_size=4) as rb:
        drawn = {name: rb.consumer(name, seed=seed).sample()["id"] for seed, name in enumerate("ab")}
    done = cli("export", store, out, "--draws", "--consumer", "b")
    assert (done.code, done.out) == (0, f"{out} holds 4 drawn rows\n")
    assert pq.read_table(out)["id"].to_pylist() == drawn["b"].tolist()
    with expstore.open(store, mode="r") as rb, rb.consumer("again", manifest=out) as again:
        assert (again.sample()["id"] == drawn["b"]).all()
    done = cli("export", store, out, "--draws")
    assert (done.code, "exists already" in done.err) == (2, True)
    found = cli("export", store, tmp_path / "all.parquet", "--draws", "--json").json
    assert found == {"path": str(tmp_path / "all.parquet"), "rows": 12}
    done = cli("export", store, tmp_path / "c.parquet", "--draws", "--consumer", "c'")
    assert (done.code, """has no draws of a consumer "c'\"""" in done.err) == (2, True)
    for options in (("--draws", "--parquet"), ("--draws", "--fields", "a"), ("--parquet", "--consumer", "b")):
        assert cli("export", store, tmp_path / "x", *options).code == 2
    done = cli("export", store, tmp_path / "x.csv", "--draws")
    assert (done.code, "name it " in done.err, (tmp_path / "x.csv").exists()) == (2, True, False)
    assert {path.name for path in tmp_path.iterdir()} >= {"order.parquet", "all.parquet"}
    assert not (tmp_path / "x").exists()
