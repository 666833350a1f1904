"""Change single expressions of the library at random, and see whether the tests notice.

    python -m tests.support.mutation_sample --count 40 --seed 1

A copy of the checkout is changed, never the checkout itself. The tests run once under coverage, which says
which tests run which line; of the lines that some test runs, `--count` are changed, one at a time, and those
tests run again. A change that all of them accept is printed: either a test is missing, or the change makes no
difference. Changes of lines that only child processes run are not tried.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

MODULES = (
    "expstore/storages/engine",
    "expstore/storages/columns",
    "expstore/storages/recovery",
    "expstore/disk",
)
TESTS = ("tests/unit/storages", "tests/unit/disk", "tests/unit/buffers")
COPIED = (
    "expstore",
    "api",
    "tests",
    "migrations",
    "examples",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
)
#: Limit of the tests of one mutation, seconds; one that makes a loop endless is noticed by it.
SECONDS = 240
#: Of the tests that run a line, at most so many run again.
MOST_TESTS = 60

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,  # codespell:ignore
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """A change of one expression or statement.

    Args:
        path: File, relative to the checkout.
        line: Line of the expression.
        number: Number of the node in the order of `ast.walk`.
        what: The change, for people.
    """

    path: str
    line: int
    number: int
    what: str


def find_mutations(path: str, source: str) -> Iterator[Mutation]:
    """Yield the changes that are possible in the functions of a file."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for statement in function.body
        for node in ast.walk(statement)
    }
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in inside:
            continue
        changed = _change(copy.deepcopy(node))
        if changed is not None:
            what = f"{ast.unparse(node)}  ->  {ast.unparse(changed)}"
            yield Mutation(path, node.lineno, number, what.replace("\n", " ")[:200])  # type: ignore[attr-defined]


def _change(node: ast.AST) -> ast.AST | None:
    """Return the changed node; None if this kind of node is not changed."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            node.ops = [SWAPPED[type(op)]()]  # type: ignore[list-item]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            node.op = SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.If():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            node.func = ast.Name(NAMES[name], ast.Load())
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign():
            return ast.copy_location(ast.Pass(), node)
        case _:
            return None
    return node


def mutate(source: str, mutation: Mutation) -> str:
    """Return the source with one change."""
    tree = ast.parse(source)
    chosen = next(node for number, node in enumerate(ast.walk(tree)) if number == mutation.number)

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST | None:
            return _change(node) if node is chosen else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))


class Checkout:
    """A copy of the checkout, in which tests run.

    Args:
        folder: Folder of the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source, goal = ROOT / name, folder / name
            if source.is_dir():
                # expstore/api is a link, and remains one.
                shutil.copytree(
                    source, goal, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "out")
                )
            else:
                shutil.copyfile(source, goal)

    def run(self, *arguments: str, seconds: float | None = None) -> int | None:
        """Run Python in the copy; return its exit code, None if it took too long."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what its tests have started
            process.wait()

    def find_tests(self, tests: list[str]) -> dict[tuple[str, int], set[str]]:
        """Run tests under coverage; return the tests that run each line."""
        rc = self.folder / "coverage.rc"
        rc.write_text("[run]\ndynamic_context = test_function\nsource = expstore\ncore = ctrace\n")
        data = self.folder / ".coverage"
        code = self.run(
            "-m", "coverage", "run", f"--rcfile={rc}", f"--data-file={data}",
            "-m", "pytest", "-q", "-m", "not torture", "-p", "no:cacheprovider", "-o", "timeout=600", *tests,
        )  # fmt: skip
        if code != 0:
            raise SystemExit(f"the tests fail without any change (exit code {code})")
        return self._read(data)

    def _read(self, data: Path) -> dict[tuple[str, int], set[str]]:
        from coverage.numbits import numbits_to_nums

        found: dict[tuple[str, int], set[str]] = {}
        with sqlite3.connect(data) as database:
            rows = database.execute(
                "SELECT path, context, numbits FROM line_bits JOIN file ON file.id = file_id "
                "JOIN context ON context.id = context_id WHERE context <> ''"
            )
            for path, context, bits in rows:
                test = self._name(context)
                if test is not None:
                    for line in numbits_to_nums(bits):
                        found.setdefault((os.path.relpath(path, self.folder), line), set()).add(test)
        return found

    def _name(self, context: str) -> str | None:
        """Return pytest's name of the test function that coverage calls "tests.unit.test_x.Class.test_y"."""
        parts = context.split(".")
        for count in range(len(parts) - 1, 0, -1):
            path = Path(*parts[:count]).with_suffix(".py")
            if (self.folder / path).exists():
                return "::".join([str(path), *parts[count:]])
        return None

    def accepts(self, mutation: Mutation, tests: list[str]) -> bool:
        """Return whether tests pass although the library is changed."""
        path = self.folder / mutation.path
        source = path.read_text()
        path.write_text(mutate(source, mutation))
        try:
            command = [
                "-m",
                "pytest",
                "-q",
                "-x",
                "-m",
                "not torture",
                "-p",
                "no:cacheprovider",
                "-o",
                "timeout=60",
            ]
            return self.run(*command, *tests, seconds=SECONDS) == 0
        finally:
            path.write_text(source)


def main() -> int:
    """Run what the command line says; return 1 if a change was accepted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="how many changes")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--modules", nargs="+", default=MODULES, help="folders or files to change")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests that run")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        checkout = Checkout(Path(name))
        started = time.monotonic()
        known = checkout.find_tests(list(given.tests))
        places = [checkout.folder / module for module in given.modules]
        files = sorted(
            file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))
        )
        possible = [
            found
            for file in files
            for found in find_mutations(str(file.relative_to(checkout.folder)), file.read_text())
        ]
        run = [found for found in possible if (found.path, found.line) in known]
        print(f"{len(possible)} possible changes, {len(run)} in lines that a test runs;", end=" ")
        print(f"tests ran in {time.monotonic() - started:.0f} s", flush=True)
        accepted = 0
        tried = chance.sample(run, min(given.count, len(run)))
        for number, mutation in enumerate(tried, 1):
            tests = sorted(known[mutation.path, mutation.line])
            tests = chance.sample(tests, min(MOST_TESTS, len(tests)))
            lives = checkout.accepts(mutation, tests)
            accepted += lives
            told = "ACCEPTED" if lives else "noticed"
            print(
                f"[{number}] {told}: {mutation.path}:{mutation.line}: {mutation.what} ({len(tests)} tests)",
                flush=True,
            )
    print(f"{accepted} of {len(tried)} changes were accepted")
    return bool(accepted)


if __name__ == "__main__":
    raise SystemExit(main())
