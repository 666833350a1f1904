"""The lineage of a store: each step with its rows, through every way that rows take from store to store."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import cold, exchange
from expstore.disk import program
from expstore.errors import SchemaError, StateError
from expstore.storages.engine import opening, store
from expstore.storages.format.lineage import Lineage, Step
from tests.support.asgi import api_client
from tests.support.batches import episode_rows
from tests.support.commands import Cli
from tests.support.object_stores import WatchedStorage

pytestmark = pytest.mark.usefixtures("no_syncs")

STEPS = "SELECT kind, first_id, last_id, rows, store FROM lineage ORDER BY number"


def steps_of(path: Path, query: str = STEPS) -> list[tuple[Any, ...]]:
    with expstore.open(path, mode="r") as rb:
        return rb.sql(query).fetchall()


def rows(count: int, **fields: torch.Tensor) -> TensorDict:
    data: TensorDict = episode_rows(count, count)
    return data.update(fields)


@pytest.mark.guarantee(
    "version/lineage",
    "The relation `lineage` lists every step by which a store got its rows, with the ids that the rows have "
    "now: through imports, sessions, added columns, merges, `push`, `pull` and restores.",
)
def test_every_step_is_listed_with_its_rows(tmp_path: Path, cli: Cli) -> None:
    first, other, both = tmp_path / "a.exp", tmp_path / "b.exp", tmp_path / "both.exp"
    with expstore.open(tmp_path / "source.exp") as rb:
        rb.extend(rows(30))
    exchange.export_npz(tmp_path / "source.exp", tmp_path / "rows.npz")
    exchange.import_npz(tmp_path / "rows.npz", first)
    with expstore.open(first) as rb:
        rb.extend(rows(20))
        rb.columns.add("mark", sql="next.reward + 1", dtype=torch.float32)
        rb.extend(rows(5, mark=torch.zeros(5)))
        uuid = rb.stats()["uuid"]
    made = [("import", 1, 30, 30, uuid), ("collect", 31, 55, 25, uuid), ("add_column", 1, 50, 50, uuid)]
    assert steps_of(first) == made
    (source,) = steps_of(first, "SELECT source, facts->>'sha256' FROM lineage WHERE kind = 'import'")
    digest = hashlib.sha256((tmp_path / "rows.npz").read_bytes()).hexdigest()
    assert source == (str(tmp_path / "rows.npz"), digest)
    with expstore.open(other) as rb:
        rb.extend(rows(7))
        rb.columns.add("mark", fill=0.5)
        uuid = rb.stats()["uuid"]
    expstore.merge([first, other], out=both)
    with expstore.open(both, mode="r") as rb:
        merged = rb.stats()["uuid"]
    made += [("collect", 56, 62, 7, uuid), ("add_column", 56, 62, 7, uuid), ("merge", 1, 62, 62, merged)]
    assert steps_of(both) == made
    storage = WatchedStorage()
    with expstore.open(both) as rb:
        rb.extend(rows(4, mark=torch.zeros(4)))
        cold.push(rb, storage)
    cold.pull(storage, tmp_path / "pulled.exp")
    with expstore.open(tmp_path / "pulled.exp") as rb:
        pulled = rb.stats()["uuid"]
    made += [("collect", 63, 66, 4, merged), ("pull", 1, 66, 66, pulled)]
    assert steps_of(tmp_path / "pulled.exp") == made
    with expstore.open(tmp_path / "pulled.exp") as rb:
        rb.dumps(tmp_path / "versions")
        rb.extend(rows(3, mark=torch.zeros(3)))
        rb.loads(tmp_path / "versions")
        shift = rb.storage.stored.low
        rb.extend(rows(2, mark=torch.zeros(2)))
    assert shift > 0
    made = [(kind, low + shift, last + shift, count, store) for kind, low, last, count, store in made]
    made += [("collect", None, None, 0, pulled), ("restore", 1 + shift, 66 + shift, 66, pulled)]
    made += [("collect", 67 + shift, 68 + shift, 2, pulled)]
    assert steps_of(tmp_path / "pulled.exp") == made
    printed = cli("info", "--lineage", "--json", tmp_path / "pulled.exp").json["stores"][0]["lineage"]
    assert [
        (one["kind"], one["first_id"], one["last_id"], one["rows"], one["store"]) for one in printed
    ] == made
    (import_line,) = re.findall("^import .*", cli("info", "--lineage", tmp_path / "pulled.exp").out, re.M)
    assert {"30", str(1 + shift), str(30 + shift)} <= set(import_line.split())
    with api_client(tmp_path) as client:
        answer = client.post("/v1/stores/pulled/sql", json={"query": "SELECT count(*) FROM lineage"})
        assert answer.json()["rows"] == [[len(made)]], answer.text


def test_sessions_with_equal_facts_are_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "describe_program", lambda: {"program": "train.py"})
    monkeypatch.setattr(store, "describe_checkout", dict)  # git may answer between two sessions
    path = tmp_path / "run.exp"
    for policy in ("a", "a", None, "b", "b"):
        with expstore.open(path) as rb:
            if policy is not None:
                rb.record_lineage(policy=policy)
                rb.extend(rows(3))
    assert steps_of(path, "SELECT first_id, last_id, facts->>'policy', facts->>'sessions' FROM lineage") == [
        (1, 6, "a", "2"),
        (7, 9, "b", None),
        (10, 12, "b", None),  # it joins the step before at the next opening
    ]
    expstore.open(path).close()
    assert len(steps_of(path)) == 2


def test_a_resize_moves_the_ids_of_the_best_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path, capacity=20, writer=expstore.TensorDictMaxValueWriter(rank_key="score")) as rb:
        for policy in ("a", "b"):
            rb.record_lineage(policy=policy)
            rb.extend(rows(5, score=torch.arange(5.0)))
    expstore.resize(path, capacity=4)
    low, *_ = steps_of(path, "SELECT first_id - 1 FROM lineage WHERE kind = 'resize'")[0]
    query = "SELECT first_id, last_id, rows FROM lineage WHERE kind = 'collect'"
    assert steps_of(path, query) == [(low + 1, low + 2, 2), (low + 3, low + 4, 2)]


def test_facts_are_checked(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        with pytest.raises(SchemaError, match="'program'"):
            rb.record_lineage(program="mine")
        with pytest.raises(SchemaError, match="'policy'"):
            rb.record_lineage(policy=object())
    with pytest.raises(StateError, match="RAM"):
        expstore.ReplayBuffer().record_lineage(policy="a")


def test_steps_name_no_rows_that_were_lost() -> None:
    """A power cut loses rows 31 to 50, whose step `note` had closed; their ids are used again."""
    session = Step("collect", 1, session="a")
    lineage = Lineage().begin(session, 0).add_facts(2, 50, {"policy": "b"})
    after = lineage.begin(Step("collect", 3, session="b"), 30)
    assert [(step.first, step.last, step.session) for step in after.steps] == [(1, 30, "a"), (31, None, "b")]


def test_a_checkout_has_its_commit_and_whether_it_has_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        out = subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True)
        return out.stdout.strip()

    def ask(folder: Path) -> tuple[str | None, dict[str, Any]]:
        """Return the commit that the files tell, and what is known once git has answered."""
        checkout = program._Checkout(folder)
        checkout._ask_git(folder)
        return program._read_commit(folder), checkout.facts

    folder = tmp_path / "code"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text("pass")
    git("init", "-q")
    assert ask(folder) == (None, {})
    git("add", "train.py")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    clean = {"git_commit": head, "dirty": False}
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    for _ in range(2):
        assert ask(folder) == ask(tmp_path / "other") == (head, clean)
        git("pack-refs", "--all")
    script.write_text("changed")
    assert ask(folder) == (head, clean | {"dirty": True})
    git("checkout", "-q", "--detach")
    assert ask(folder)[0] == head


def test_arguments_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session records the program by its name, and at its end what git has said meanwhile."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--key=secret"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(program, "describe_checkout", dict)  # git may have answered another test
    monkeypatch.setattr(store, "describe_checkout", lambda: {"git_commit": "c" * 40, "dirty": True})
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(rows(3))
    assert steps_of(tmp_path / "run.exp", "SELECT program, dirty, rows FROM lineage") == [
        ("train.py", True, 3)
    ]
    assert "secret" not in (tmp_path / "run.exp" / "expstore.json").read_text()
