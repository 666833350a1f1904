"""`expstore selections`: create, change, compare, list and drop."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

import expstore
from tests.support.commands import Cli


def test_selections_from_first_to_last(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path) as rb:
        for count in (1, 2, 3, 4):
            ends = np.arange(count) == count - 1
            rb.extend({"x": np.full(count, count), "next": {"terminated": ends, "done": ends}})

    def run(words: str, code: int = 0) -> str:
        act, *rest = shlex.split(words)
        done = cli("selections", act, path, *rest)
        assert done.code == code, done
        return done.out + done.err

    assert "has no selections" in run("list")
    assert "'clean' of 3 episodes" in run("create clean --where 'length > 1' --reason demos --by ada")
    assert "of 3 episodes" in run("create some --episodes 1-2,4")
    assert "has 2 episodes" in run("exclude clean 3 --reason hangs")
    assert "has 3 episodes" in run("include clean 1 --reason short")
    assert run("diff clean some").splitlines() == ["only clean: none", "only some: none", "both: 1, 2, 4"]
    assert run("list").split("\n")[1].split()[:4] == ["clean", "length", ">", "1"]
    found = cli("selections", "list", path, "--json").json["selections"]
    assert [(one["name"], one["episodes"]) for one in found] == [("clean", 3), ("some", 3)]
    assert "no selection 'nothing'" in run("drop nothing", 2)
    assert "no episode 9" in run("exclude clean 9 --reason none", 2)
    assert "either --where SQL or --episodes IDS" in run("create other", 2)
    run("drop some")
    with expstore.open(path, mode="r") as rb:
        assert list(rb.selections) == ["clean"]
        assert rb.selections["clean"].episodes().tolist() == [1, 2, 4]
