"""Compiled loops are loaded wherever they are used; a missing one would only be slow."""

from __future__ import annotations

import ast
import importlib
import threading
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.kernels.loader import load_in_background
from expstore.storages.columns.packed.writer import PackedColumn
from tests.support import compile_loops
from tests.support.paths import ROOT

SOURCES = [
    path
    for folder in ("expstore", "api")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(part.is_symlink() for part in (path, *path.parents))
]


@pytest.mark.parametrize("name", compile_loops.modules())
def test_every_loop_is_compiled_on_import(name: str) -> None:
    source = (ROOT / Path(*name.split("."))).with_suffix(".py").read_text()
    names = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("compiled(") for decorator in node.decorator_list)
    ]
    module = importlib.import_module(name)
    loops = [getattr(module, name) for name in names]
    assert all(isinstance(loop, numba.core.dispatcher.Dispatcher) and loop.signatures for loop in loops)


def test_a_disk_loads_its_loops() -> None:
    disk = Disk()
    disk._load_kernel()
    assert disk.kernels is importlib.import_module("expstore.kernels.file_loops")
    assert disk._kernel is disk.kernels.write_pieces


def test_a_packed_column_loads_its_loops(tmp_path: Path) -> None:
    frames = torch.zeros(40, 64, 64, dtype=torch.uint8)
    with expstore.open(tmp_path / "run.exp", layout="packed") as rb:
        rb.extend(TensorDict({"frame": frames}, [40]))
        (column,) = (found for found in rb.storage.state.columns.columns if isinstance(found, PackedColumn))
        column._load()
        loops = (column._take_rows, column._take_distances, column._pack_chunks)
        assert all(map(callable, loops))
        assert {loop.__module__ for loop in loops} == {
            "expstore.kernels.blosc_decode",
            "expstore.kernels.blosc_encode",
        }


def test_segments_load_their_loops(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", layout=expstore.Layout(kind="arrow", compression="lz4")) as rb:
        rb.extend(TensorDict({"text": NonTensorStack("a", "bc", "d")}, [3]))
        (segments,) = rb.storage.state.columns.shared
        segments._load()
        assert segments._loops is importlib.import_module("expstore.kernels.gather_runs")
        assert segments._unpacking is importlib.import_module("expstore.kernels.arrow_decode")


@pytest.mark.slow
def test_no_loop_is_named_by_a_string_or_may_be_missing() -> None:
    faults = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Constant) and str(node.value).startswith("expstore.kernels.")
            if named or (isinstance(node, ast.Call) and ast.unparse(node).endswith("suppress(ImportError)")):
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert faults == []


def test_an_import_that_fails_in_the_background_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = threading.Event()
    found: list[Any] = []

    def report(args: Any) -> None:
        found.append(args.exc_type)
        reported.set()

    def load() -> None:
        raise ModuleNotFoundError("a loop")

    monkeypatch.setattr(threading, "excepthook", report)
    load_in_background(load)
    assert reported.wait(10)
    assert found == [ModuleNotFoundError]
