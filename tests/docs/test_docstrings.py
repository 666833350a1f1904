"""The examples of docstrings run as written.

The examples of each docstring run in order, in an empty folder. Output is compared where the docstring shows
some. A reader has these names without an import; examples import or make every other name:

- `expstore`, `np`, `torch`, `TensorDict`;
- `rb`, a buffer over a store on disk with ten episodes of 20 steps, and `storage`, its storage;
- `batch`, 64 more transitions.

Examples of data sets write the files with `make_sample`; those of other programs are written by
`tests.support.docstring_files`. The servers `http://NAME:8420` and the bucket `s3://bucket/run` have stores
with the rows of `rb`. What an example leaves open is closed after it.
"""

from __future__ import annotations

import ast
import doctest
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from expstore.datasets import registry
from tests.support.batches import transitions
from tests.support.docstring_files import write_named_files
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server, start_moto
from tests.support.servers import Serving
from tests.support.stores import build_store, copy_folder

pytestmark = pytest.mark.usefixtures("no_syncs")

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Addresses of servers in examples. The group is the name of the store that replaces it.
SERVER = re.compile(r"http://(trainer|a|b):8420/\w+(?=\")")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MODULES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("api", "expstore")
    for path in (ROOT / folder).rglob("*.py")  # which does not follow the link expstore/api
    if ">>> " in path.read_text()
)


class AnyUndocumentedOutput(doctest.OutputChecker):
    """Accept any output of an example that shows none: the value of an expression may be left out."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def parse(source: str) -> ast.Module:
    """Return the syntax tree. Python 3.11 fails if a collection calls a `__del__` while it makes the tree."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def find_examples(source: str, path: str) -> Iterator[doctest.DocTest]:
    """Yield the examples of each docstring of a module."""
    for node in ast.walk(parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            name = getattr(node, "name", "module")
            test = doctest.DocTestParser().get_doctest(text, {}, name, path, node.body[0].lineno - 1)
            if test.examples:
                yield test


def find_missing(test: doctest.DocTest) -> set[str]:
    """Return the names that the examples of a docstring use and do not bind."""
    nodes = [node for example in test.examples for node in ast.walk(parse(example.source))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {(node.asname or node.name) for node in nodes if isinstance(node, ast.alias)}
    return {node.id for node in names} - bound


def run_examples(test: doctest.DocTest, store: Path, folder: Path) -> str:
    """Run the examples of one docstring in the working directory. Return the report of failures.

    Args:
        test: The examples.
        store: The store that `rb` is opened over: a copy of it.
        folder: Path of that copy.
    """
    missing = find_missing(test)
    names: dict[str, Any] = {"expstore": expstore, "np": np, "torch": torch, "TensorDict": TensorDict}
    test.globs = {"__name__": "__main__", **names, "batch": transitions(64, start=200, episode_length=20)}
    if missing & {"rb", "storage"}:
        copy_folder(store, folder)
        rb = expstore.open(folder, batch_size=32)
        test.globs |= {"rb": rb, "storage": rb.storage}
    torch.manual_seed(0)
    lines: list[str] = []
    try:
        doctest.DocTestRunner(AnyUndocumentedOutput(), optionflags=OPTIONS).run(
            test, out=lines.append, clear_globs=False
        )
    finally:
        for value in reversed(test.globs.values()):
            if callable(close := getattr(type(value), "close", None)):
                close(value)
    return "".join(lines)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed store of ten episodes."""
    return build_store(
        tmp_path_factory.mktemp("prepared") / "a.exp", transitions(200, episode_length=20), seed=0
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the stores `trainer`, `a` and `b`; return the address."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("trainer", "a", "b"):
        build_store(folder / f"{name}.exp", transitions(200, episode_length=20), seed=0)
    with Serving(Settings(path=folder)) as serving:
        yield serving.url


@pytest.fixture(scope="module")
def bucket(store: Path) -> Iterator[dict[str, str]]:
    """Push the store to `s3://bucket/run`; return the environment that a client needs."""
    with start_moto() as port, S3Server(port, "bucket") as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        expstore.cold.push(store, "s3://bucket/run")
        patch.undo()
        yield s3.environment


@pytest.mark.parametrize("path", MODULES)
def test_the_examples_of_a_module_run(
    path: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    source = (ROOT / path).read_text()
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(registry, "_REGISTERED", {**registry._REGISTERED})
    if SERVER.search(source):
        source = SERVER.sub(rf"{request.getfixturevalue('server')}/\1", source)
    if '"s3://bucket/' in source:
        for name, value in request.getfixturevalue("bucket").items():
            monkeypatch.setenv(name, value)
    reports: list[str] = []
    for number, test in enumerate(find_examples(source, path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_named_files("".join(example.source for example in test.examples), folder)
        reports.append(run_examples(test, store, tmp_path / f"{number}.exp"))
    assert reports
    assert not any(reports), "\n".join(reports)
