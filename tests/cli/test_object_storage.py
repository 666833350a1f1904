"""The commands of `versions` with a server of objects: output and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")
pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")

from tests.support.commands import COMMANDS, Cli, examples_of
from tests.support.s3_server import S3Server, start_moto

URL = "s3://bucket/run"


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    with start_moto() as port:
        yield port


@pytest.fixture(autouse=True)
def server(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(moto, "bucket") as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.mark.slow
def test_versions_are_pushed_listed_pulled_and_pruned(cli: Cli, store: Path, tmp_path: Path) -> None:
    assert cli("versions", "list", URL, "--json").json == {"versions": []}
    done = cli("versions", "push", store, URL)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("version 1: 30 rows, ")
    assert done.out.endswith(f" sent to {URL}\n")
    cli("versions", "create", store, tmp_path / "backup", "--tag", "start")
    sent = cli("versions", "push", tmp_path / "backup", URL, "--version", "start", "--json").json
    assert (sent["number"], sent["tag"], sent["rows"]) == (2, "start", 30)
    table = cli("versions", "list", URL).out.splitlines()
    assert table[0].split() == ["version", "tag", "made", "rows", "episodes", "size", "sent"]
    assert table[2].split()[:2] == ["2", "start"]
    done = cli("versions", "pull", URL, tmp_path / "new.exp", "--version", "start")
    assert (done.code, done.out) == (
        0,
        f"{tmp_path / 'new.exp'} has the 30 rows of version 2 (start) in {URL}\n",
    )
    assert cli("info", tmp_path / "new.exp", "--json").json["stores"][0]["rows"] == 30
    pulled = cli("versions", "pull", URL, tmp_path / "other.exp", "--json").json
    assert (pulled["path"], pulled["version"]["number"]) == (str(tmp_path / "other.exp"), 2)
    cli("versions", "push", store, URL)
    done = cli("versions", "prune", URL, "--keep", "1")
    assert done.out.startswith("versions removed: 1; ")
    assert cli("versions", "prune", URL, "--drop", "start", "--json").json["versions"][0]["number"] == 2
    assert [version["number"] for version in cli("versions", "list", URL, "--json").json["versions"]] == [3]


@pytest.mark.slow
def test_the_examples_of_the_help_run(
    cli: Cli, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("versions", "create", "run.exp", "backup", "--tag", "best")
    for name in ("push", "list", "pull", "prune"):
        for words in examples_of(COMMANDS[f"versions {name}"]):
            done = cli(*(word.replace(URL, f"{URL}-of-examples") for word in words))
            assert done.code == 0, (words, done.err)


@pytest.mark.slow
def test_exit_codes(cli: Cli, store: Path, tmp_path: Path, server: S3Server) -> None:
    cli("versions", "push", store, URL + "2")
    assert cli("versions", "push", tmp_path / "none", URL + "2").code == 2
    assert cli("versions", "push", store, "s3://key:secret@bucket/run").code == 2
    assert cli("versions", "pull", URL + "2", store).code == 2
    assert cli("versions", "pull", URL + "2", tmp_path / "new.exp", "--version", "none").code == 2
    assert cli("versions", "prune", URL + "2").code == 2
    server.before = lambda request: 403
    for words in (["list", URL], ["push", store, URL], ["pull", URL, tmp_path / "new.exp"]):
        done = cli("versions", *words)
        assert done.code == 1
        assert "set AWS_ACCESS_KEY_ID" in done.err


def test_the_missing_library_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "expstore.cold.bucket", raising=False)
    done = cli("versions", "list", URL)
    assert done.code == 2
    assert "pip install 'expstore[s3]'" in done.err
