"""The help of every command has two examples, and they run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import expstore
from tests.support.batches import numbered_rows
from tests.support.commands import COMMANDS, Cli, examples_of
from tests.support.servers import serving

pytestmark = pytest.mark.index

HEADINGS = ("Look", "Move", "Versions", "Change", "Serve")
#: Each needs rows that the commands before it made.
LOCAL = (
    "collect", "info", "sql", "episode", "verify", "export", "import", "versions create", "versions restore",
    "add-column", "drop-column", "retain", "resize", "merge", "repair",
)  # fmt: skip
WITHOUT_JSON = ("datasets delete", "ui")
#: Tested with a server of their own: `versions push` and others in test_object_storage.py.
ELSEWHERE = ("versions list", "versions push", "versions pull", "versions prune")


def test_the_groups_come_in_their_order(cli: Cli) -> None:
    found = re.findall(r"^(\w+):$", cli("--help").out, re.M)
    assert found == ["Options", *HEADINGS]


def test_every_help_has_two_examples_of_its_command(cli: Cli) -> None:
    for name in COMMANDS:
        examples = examples_of(COMMANDS[name])
        assert len(examples) == 2, name
        assert all(words[: len(name.split())] == name.split() for words in examples)
        done = cli(*name.split(), "--help")
        assert done.out.count(f"\n    expstore {name}") == 2, "each is a line"
        assert (done.code, "--json" in done.out) == (0, name not in WITHOUT_JSON), name


def test_examples_with_servers_and_data_sets_are_understood(tmp_path: Path) -> None:
    for name in {*COMMANDS} - {*LOCAL, *ELSEWHERE}:
        for words in examples_of(COMMANDS[name]):
            arguments = words[len(name.split()) :]
            COMMANDS[name].make_context(name, arguments)  # raises for an unknown option or a wrong value


@pytest.mark.slow
@pytest.mark.timeout(600)  # they are forty commands
def test_the_examples_run_one_after_the_other(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    Path("query.sql").write_text("SELECT count(*) AS rows FROM transitions\n")
    Path("steps.csv").write_text("obs,action,reward,terminated\n1,0,1,false\n2,1,0.5,true\n")
    for name in LOCAL:
        for words in examples_of(COMMANDS[name]):
            done = cli(*words)
            assert done.code == 0, (words, done.err)
        if name == "collect":
            shutil.copytree("run.exp", "other.exp")
            shutil.copytree("run.exp", "runs/run.exp")


@pytest.mark.slow
def test_the_examples_of_clusters_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("host-a", "host-b", "host-c")
    for name in names:
        with expstore.open(tmp_path / "runs" / f"{name}.exp") as rb:
            rb.extend(numbered_rows(5))
    Path("token").write_text("secret\n")
    Path("token").chmod(0o600)
    with serving("runs", "--token-file", "token") as (_, facts):

        def run(words: list[str]) -> None:
            moved = [word.replace("host-d", "host-b") for word in words]
            here = [re.sub(r"http://(host-.):8420/run", rf"{facts['listening']}/\1", word) for word in moved]
            if "--token-file" not in here and here[1] not in ("retire", "remove"):
                here += ["--token-file", "token"]
            done = cli(*here)
            assert done.code == 0, (words, done.err)

        first, second = examples_of(COMMANDS["cluster init"])
        run(second)
        Path("cluster.json").unlink()
        run(first)
        for name in ("add", "show", "move", "retire", "remove"):
            count = 1 if name == "add" else 2  # the second example adds the same store
            for words in examples_of(COMMANDS[f"cluster {name}"])[:count]:
                run(words)


def test_a_query_is_read_from_a_file_or_from_standard_input(
    cli: Cli, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    query = "SELECT count(*) AS n FROM transitions"
    (tmp_path / "query.sql").write_text(query + ";\n")
    assert cli("sql", store, "-f", tmp_path / "query.sql", "--csv").out == "n\n30\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(query))
    assert cli("sql", store, store, "-f", "-", "--json").json[0]["n"] == 30
    for words, message in (
        (["sql", "-f", "query.sql"], "there is no store; write expstore sql STORE -f"),
        (["sql", store, query, "-f", tmp_path / "query.sql"], "there are two queries"),
        (["sql", store, "-f", tmp_path / "none.sql"], "none.sql cannot be read"),
    ):
        done = cli(*words)
        assert done.code == 2
        assert message in done.err
    (tmp_path / "query.sql").write_text(" \n")
    assert "query.sql is empty" in cli("sql", store, "-f", tmp_path / "query.sql").err
