"""Which servers get an access token."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import expstore
from expstore.cli.app import app
from expstore.cluster.members import ClusterFile
from expstore.errors import ArgumentError, ExpStoreError, StateError
from expstore.remote import transport
from expstore.remote.tokens import Tokens
from expstore.remote.transport import Address


def of(tokens: Tokens, url: str) -> str | None:
    return tokens.of(Address.of(url))


def test_addresses_that_the_user_names_get_the_token() -> None:
    tokens = Tokens("T", named=True)
    assert of(tokens, "http://trainer:8420/a") == "T"
    assert of(Tokens(None, named=True), "http://trainer:8420/a") is None
    assert repr(tokens) == "Tokens(named=True)"
    assert pickle.loads(pickle.dumps(tokens)) == tokens


@pytest.mark.parametrize(
    "url", ["http://evil.example:80/a", "http://10.0.0.9/a", "http://127.0.0.1.evil.com/a"]
)
def test_addresses_of_a_file_do_not(url: str) -> None:
    with pytest.raises(StateError, match="is not sent there") as caught:
        of(Tokens("T", named=False), url)
    assert caught.value.kind == "token"
    assert of(Tokens(None, named=False), url) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost"])
def test_this_machine_does(host: str) -> None:
    assert of(Tokens("T", named=False), f"http://{host}:8420/a") == "T"


def test_tokens_by_host() -> None:
    tokens = Tokens({"a": "A", "*.shards.svc": "S", "[::1]": "6"}, named=False)
    assert of(tokens, "http://A:1/x") == "A"
    assert of(tokens, "http://s-0.shards.svc/x") == "S"
    assert of(tokens, "http://[::1]:2/x") == "6"
    assert of(tokens, "http://shards.svc/x") is None
    assert of(tokens, "http://evil-shards.svc/x") is None
    assert of(Tokens({"a": "A", "*": "Z"}, named=False), "http://any:1/x") == "Z"


@pytest.mark.parametrize("given", [5, {"a": 5}, {"http://a": "T"}])
def test_values_that_are_no_tokens(given: Any) -> None:
    with pytest.raises(ArgumentError):
        Tokens(given, named=True)


@pytest.mark.guarantee(
    "access/hosts",
    "A client sends its token only to hosts that the user names, or that are on this machine.",
)
def test_nothing_is_sent_to_hosts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect` and `cluster show` refuse before the first request; also if the file changes later."""

    def send(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a request is sent")

    monkeypatch.setattr(transport._InProcess, "send", send)
    file = tmp_path / "cluster.json"
    ClusterFile.create(file, [("http://evil.example:80/a", "0" * 32)])
    with pytest.raises(StateError, match=r"evil.example"):
        expstore.connect(file, token="T", retries=expstore.remote.Retries(seconds=0))
    token = tmp_path / "token"
    token.write_text("T")
    token.chmod(0o600)
    result = CliRunner().invoke(app, ["cluster", "show", str(file), "--token-file", str(token)])
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit | ExpStoreError)
    facts = json.loads(file.read_text())
    facts["shards"][0]["url"] = "http://127.0.0.1:9/a"
    file.write_text(json.dumps(facts))
    with pytest.raises(AssertionError, match="a request is sent"):
        expstore.connect(file, token="T", retries=expstore.remote.Retries(seconds=0))
