"""`expstore cluster`: make the list of shards, change it, show it; errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import expstore
from expstore.api import Settings
from expstore.cli.app import run
from tests.support.arrow_bodies import batch_of
from tests.support.servers import Serving
from tests.support.waits import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    (tmp_path / "stores").mkdir()
    for name in "abc":
        with expstore.open(tmp_path / "stores" / f"{name}.exp") as rb:
            rb.extend(batch_of(10))
    with Serving(Settings(path=tmp_path / "stores", token=b"secret")) as server:
        yield server


@pytest.mark.slow
def test_a_cluster_from_init_to_remove(
    tmp_path: Path, server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    file, token = str(tmp_path / "cluster.json"), str(tmp_path / "token")
    Path(token).write_text("secret\n")
    Path(token).chmod(0o600)
    a, b, c = (f"{server.url}/{name}" for name in "abc")

    def told(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert run(["cluster", words[0], file, *words[1:]]) == code
        out, err = capsys.readouterr()
        return out or err

    assert told("init", a, b, "--token-file", token) == f"{file} has 2 shards; accepting sources: 0, 1\n"
    with expstore.connect(Path(file), token="secret", batch_size=8) as rb:
        rb.sample()
        assert "now has 3 shards; accepting sources: 0, 1, 2" in told("add", c, "--token-file", token)
        assert "accepting sources: 1, 2; retired: 0" in told("retire", "0")
        wait_until(lambda: list(rb.shards) == [0, 1, 2])  # a thread looks at the file
    listed = told("show", "--token-file", token)
    assert "retired" in listed
    assert c in listed
    found = json.loads(told("show", "--json", code=1))  # the token is missing
    assert [(one["number"], one["rows"]) for one in found["shards"]] == [(0, None), (1, None), (2, None)]
    found = json.loads(told("show", "--json", "--token-file", token))
    assert [one["rows"] for one in found["shards"]] == [10, 10, 10]
    assert "store" in told("move", "1", c, "--token-file", token, code=2)
    moved = b.replace("127.0.0.1", "localhost")
    assert "now has 3 shards" in told("move", "1", moved, "--token-file", token)
    assert "retire it first" in told("remove", "1", code=2)
    assert json.loads(told("remove", "0", "--json"))["shards"][0]["url"] == moved
    assert "there is no shard 0" in told("retire", "0", code=2)
    assert "exists" in told("init", a, "--token-file", token, code=2)
    assert "is not the address of a store" in told("add", "nowhere", code=2)
    assert run(["cluster"]) == 2


def test_nothing_is_made_if_a_server_does_not_answer(
    tmp_path: Path, server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.json"
    assert run(["cluster", "init", str(file), f"{server.url}/a"]) == 1
    assert "token" in capsys.readouterr().err
    assert not file.exists()
