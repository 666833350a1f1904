"""Each row of docs/errors.md is run, and the message contains the documented text."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import expstore
from tests.support.asgi import api_client
from tests.support.commands import Cli
from tests.support.paths import ROOT
from tests.support.stores import build_store, copy_folder

pytestmark = pytest.mark.index

PAGE = (ROOT / "docs" / "errors.md").read_text()
_ROW = re.compile(r"^\| `(?P<done>.+?)` \| (?P<said>.+) \|$", re.MULTILINE)


def rows_of(section: str) -> list[tuple[str, str]]:
    """Return what is done and what is said, by row; a vertical bar is written as in tables."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [(row["done"], row["said"].replace("\\|", "|")) for row in _ROW.finditer(text)]
    assert len(rows) == text.count("\n| ") - 1  # without the head
    return rows


def quoted(said: str) -> list[str]:
    found = re.findall("`(.+?)`", said)
    assert found or said.startswith("no error")
    return found


def transitions(count: int) -> dict[str, Any]:
    return {
        "observation": np.zeros((count, 2), np.float32),
        "action": np.zeros(count, np.int64),
        "next": {"reward": np.ones((count, 1), np.float32)},
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("stored") / "run.exp", transitions(20))


@pytest.fixture
def folder(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a store run.exp of 20 rows."""
    monkeypatch.chdir(tmp_path)
    copy_folder(stored, tmp_path / "run.exp")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("program", "said"), rows_of("Python"))
def test_python(program: str, said: str) -> None:
    with contextlib.ExitStack() as stack:
        rb = stack.enter_context(expstore.open("run.exp"))
        if said.startswith("no error"):
            stack.enter_context(eval(program))
            return
        with pytest.raises((expstore.ExpStoreError, AttributeError)) as caught:
            eval(program, {"expstore": expstore, "rb": rb})
    assert all(text in str(caught.value) for text in quoted(said)), caught.value
    assert not Path("new.exp").exists()


@pytest.mark.parametrize(("command", "said"), rows_of("Command line"))
def test_command(cli: Cli, folder: Path, command: str, said: str) -> None:
    if "runs" in command:
        for name in ("a.exp", "b.exp"):
            expstore.open(folder / "runs" / name).close()
    if "cartpole.exp" in command:
        assert cli("collect", "CartPole-v1", "cartpole.exp", "--steps", 8).code == 0
    program, *arguments = shlex.split(command)
    assert program == "expstore"
    done = cli(*arguments)
    fine = said.startswith("no error")
    assert done.code == (0 if fine else 2)
    assert all(text in (done.out if fine else done.err) for text in quoted(said)), done


@pytest.fixture(scope="module")
def client(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with api_client(copy_folder(stored, tmp_path_factory.mktemp("served") / "run.exp").parent) as client:
        yield client


@pytest.mark.parametrize(("request_line", "said"), rows_of("HTTP"))
def test_http(client: httpx.Client, request_line: str, said: str) -> None:
    method, address, *body = request_line.split(" ", 2)
    headers = {"content-type": "application/json"} if body else {}
    answer = client.request(method, address, content=body[0] if body else None, headers=headers)
    error = answer.json()["error"]
    line = "; ".join(filter(None, (error["message"], error["hint"])))
    assert 400 <= answer.status_code < 500
    assert all(text in line for text in quoted(said)), error
