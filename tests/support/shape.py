"""Measure the shape of the code: sizes of its objects, and how much code a sample and an extend run.

    python -m tests.support.shape             print all figures
    python -m tests.support.shape --check     exit 1 if a figure is above what it may be (part of `make lint`)
    python -m tests.support.shape --record    lower the ceilings in this file to today's figures

The figures are signs, not ends: do not meet one by cutting a class into mixins, by `**kwargs`, by hiding
attributes in one bag object or by moving code into one giant function.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

#: The goal of each figure. A figure that meets it must never exceed it again.
LIMITS = {
    "modules at the top of expstore/": 18,
    "longest own inheritance chain of a buffer": 3,
    "longest own inheritance chain of a storage": 4,
    "public names of a buffer, TorchRL's own apart": 30,
    "public names of a storage": 60,
    "attributes of an open store's object": 30,
    "attributes of a base class written by a class in another file": 10,
    "parameters of expstore.open": 17,
    "parameters of the widest sampler": 16,
    "functions that a sample runs": 32,
    "files that a sample runs through": 13,
    "functions that an extend runs": 62,
    "files that an extend runs through": 21,
    "phrases of the old prose": 20,
    "lines of README.md": 160,
}

#: The highest value of each figure that does not meet its limit yet; the limit is the goal. A ceiling may
#: only fall: after an improvement, `--record` lowers it, and removes it when the limit is met.
CEILINGS: dict[str, int] = {
    "functions that a sample runs": 40,
    "files that a sample runs through": 22,
    "functions that an extend runs": 78,
    "files that an extend runs through": 30,
}

#: Phrases that plain technical English does not use.
OLD_PROSE = re.compile(
    r"Be told|Say whether|[Ss]ee there|[Aa]s there\b|means nothing here|\bstrangers?\b|of whom\b|[Ll]et go of"
    r"|\bgoes on\b|\bgo on\b|is none\b|are none\b|by its makers|whoever\b|somebody|nobody\b|\bbeside\b"
    r"|of its own accord|\bstands in\b|at hand\b"
)

BUFFERS = ("ReplayBuffer", "TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer")
STORAGES = ("ArrowStorage", "MemoryStorage", "ZarrStorage")


def measure() -> dict[str, int]:
    """Return every figure by its name."""
    return {**measure_files(), **measure_classes(), **measure_store()}


def measure_files() -> dict[str, int]:
    """Count modules, lines and phrases in the files of the project."""
    package = ROOT / "expstore"
    library = [read(path) for path in python_files("expstore", "api")]
    documents = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    texts = [*library, *map(read, [*documents, *(ROOT / "docs").rglob("*.md")])]
    return {
        "modules at the top of expstore/": sum(p.name != "__init__.py" for p in package.glob("*.py")),
        "packages at the top of expstore/": sum((p / "__init__.py").exists() for p in package.iterdir()),
        "phrases of the old prose": sum(len(OLD_PROSE.findall(text)) for text in texts),
        "lines of README.md": count_lines(read(ROOT / "README.md")),
        "lines of expstore/ and api/": sum(map(count_lines, library)),
        "lines of tests/": sum(count_lines(read(path)) for path in python_files("tests")),
    }


def python_files(*folders: str) -> list[Path]:
    """Return the Python files of some folders, each once: expstore/api is a link to api/."""
    return sorted({path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")})


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def count_lines(text: str) -> int:
    return len(text.splitlines())


def measure_classes() -> dict[str, int]:
    """Measure inheritance and parameters of the public classes, and of `expstore.open`."""
    import expstore

    samplers = [getattr(expstore, name) for name in dir(expstore) if name.endswith("Sampler")]
    return {
        "longest own inheritance chain of a buffer": max(chain(getattr(expstore, n)) for n in BUFFERS),
        "longest own inheritance chain of a storage": max(chain(getattr(expstore, n)) for n in STORAGES),
        "attributes of a base class written by a class in another file": count_foreign_writes(),
        "parameters of expstore.open": len(inspect.signature(expstore.open).parameters),
        "parameters of the widest sampler": max(map(count_own_parameters, samplers)),
    }


def count_own_parameters(cls: type) -> int:
    """Count the parameters of a constructor, without TorchRL's keywords that have no effect here."""
    from expstore.core.torchrl_keywords import PRIORITIZED

    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return sum(
        one.name not in PRIORITIZED and (one.kind, one.name) != (one.VAR_KEYWORD, "torchrl")
        for one in parameters
    )


def chain(cls: type) -> int:
    """Return how many classes of expstore lie on the longest path from a class to its bases."""
    return 1 + max(
        (chain(base) for base in cls.__bases__ if base.__module__.startswith("expstore")), default=0
    )


def count_foreign_writes() -> int:
    """Count attributes that a class sets on `self` although the `__init__` of a base in another file does."""
    classes: dict[str, tuple[Path, ast.ClassDef]] = {}
    for path in python_files("expstore", "api"):
        for node in ast.walk(ast.parse(read(path), str(path))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, (path, node))

    count = 0
    for path, node in classes.values():
        foreign: set[str] = set()
        for base_path, base in find_bases(node, classes):
            if base_path != path:
                foreign |= attributes_written(base, only_init=True)
        count += len(attributes_written(node) & foreign)
    return count


def find_bases(
    node: ast.ClassDef, classes: dict[str, tuple[Path, ast.ClassDef]]
) -> list[tuple[Path, ast.ClassDef]]:
    """Return the classes of expstore that a class inherits from, at any distance, found by their names."""
    found: dict[str, tuple[Path, ast.ClassDef]] = {}
    todo = [node]
    while todo:
        for expression in todo.pop().bases:
            name = ast.unparse(expression).split("[")[0].split(".")[-1]
            if name in classes and name not in found:
                found[name] = classes[name]
                todo.append(classes[name][1])
    return list(found.values())


def attributes_written(node: ast.ClassDef, only_init: bool = False) -> set[str]:
    """Return the attributes that the methods of a class, or only its `__init__`, set or delete on `self`."""
    written: set[str] = set()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or not method.args.args:
            continue
        if only_init and method.name != "__init__":
            continue
        this = method.args.args[0].arg
        written |= {
            part.attr
            for part in ast.walk(method)
            if isinstance(part, ast.Attribute)
            and isinstance(part.ctx, (ast.Store, ast.Del))
            and ast.unparse(part.value) == this
        }
    return written


def measure_store() -> dict[str, int]:
    """Measure the objects of an open store, and what a sample and an extend run."""
    import expstore
    from expstore import kernels

    # A store loads its compiled loops in the background, and which functions run depends on them.
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    with tempfile.TemporaryDirectory() as folder:
        with expstore.open(f"{folder}/a.exp", capacity=10_000, batch_size=32, seed=0) as rb:
            for _ in range(3):  # the first calls build what later calls reuse
                rb.extend(make_batch(1000))
                rb.sample()
            batch = make_batch(1000)
            sampled, extended = [], []
            for _ in range(3):  # a call opens files again if the machine was busy for a second before it
                rb.flush()  # an extend does more when many rows are not synced yet
                sampled.append(trace(rb.sample))
                extended.append(trace(lambda: rb.extend(batch)))
            (sample_functions, sample_files), (extend_functions, extend_files) = min(sampled), min(extended)
            storage = rb.storage
            return {
                "public names of a buffer, TorchRL's own apart": len(public_names(rb) - torchrl_names()),
                "public names of a storage": len(public_names(storage) - void_names(storage)),
                "attributes of an open store's object": len(vars(storage)),
                "functions that a sample runs": sample_functions,
                "files that a sample runs through": sample_files,
                "functions that an extend runs": extend_functions,
                "files that an extend runs through": extend_files,
            }


def void_names(storage: Any) -> set[str]:
    """Return the attributes of TorchRL's class that a storage has only to refuse assignments."""
    from expstore.core.torchrl_keywords import VoidAttribute

    kind = type(storage)
    return {name for name in dir(kind) if isinstance(inspect.getattr_static(kind, name), VoidAttribute)}


def make_batch(rows: int) -> Any:
    """Return transitions in episodes of ten steps."""
    import torch
    from tensordict import TensorDict

    end = (torch.arange(rows) % 10 == 9)[:, None]
    after = {
        "observation": torch.randn(rows, 4),
        "reward": torch.ones(rows, 1),
        "terminated": end,
        "truncated": torch.zeros_like(end),
    }
    values = {"observation": torch.randn(rows, 4), "action": torch.randint(2, (rows,)), "next": after}
    return TensorDict(values, [rows])


def public_names(thing: object) -> set[str]:
    return {name for name in dir(type(thing)) if not name.startswith("_")}


def torchrl_names() -> set[str]:
    """Return the public names of TorchRL's buffer, none if TorchRL is not installed."""
    try:
        from torchrl.data import TensorDictReplayBuffer
    except ImportError:
        return set()
    return {name for name in dir(TensorDictReplayBuffer) if not name.startswith("_")}


def trace(act: Callable[[], object]) -> tuple[int, int]:
    """Return how many functions of expstore a call runs in this thread, and in how many files."""
    called: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    files = {name: Path(name).resolve() for name, _ in called}  # expstore/api/x.py is api/x.py
    folders = (ROOT / "expstore", ROOT / "api")
    functions = {
        (files[name], function)
        for name, function in called
        if any(files[name].is_relative_to(folder) for folder in folders)
    }
    return len(functions), len({file for file, _ in functions})


def bound(name: str) -> int | None:
    """Return the highest value that a figure may have, None if it may have any."""
    return CEILINGS.get(name, LIMITS.get(name))


def describe(name: str, value: int) -> str:
    """Return one line about a figure."""
    highest, limit = bound(name), LIMITS.get(name)
    note = "" if highest is None else f"at most {highest:,}"
    if highest != limit:
        note += f", goal {limit:,}"
    return f"{value:>8,}  {note:<24}  {name}"


def record(figures: dict[str, int]) -> None:
    """Rewrite the table of ceilings in this file: lower each to its figure, remove those that are met."""
    kept = {
        name: min(ceiling, figures[name])
        for name, ceiling in CEILINGS.items()
        if figures[name] > LIMITS[name]
    }
    table = "".join(f'    "{name}": {ceiling},\n' for name, ceiling in kept.items())
    file = Path(__file__)
    text = re.sub(
        r"^(CEILINGS: .*? = )\{.*?\}",
        lambda match: match[1] + ("{\n" + table + "}" if table else "{}"),
        read(file),
        count=1,
        flags=re.DOTALL | re.MULTILINE,
    )
    file.write_text(text, encoding="utf-8")


def main() -> int:
    """Print the figures, then check or record them if asked to. Return the exit code."""
    parser = argparse.ArgumentParser(description="Measure the shape of the code.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit 1 if a figure is too high")
    action.add_argument("--record", action="store_true", help="lower the ceilings in this file")
    options = parser.parse_args()

    figures = measure()
    for name, value in figures.items():
        print(describe(name, value))
    if options.record:
        record(figures)
    too_high = {name: value for name, value in figures.items() if (bound(name) or value) < value}
    for name, value in too_high.items():
        print(f"too high: {name}: {value:,}, allowed {bound(name):,}")
    return 1 if too_high and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
