"""Change single expressions of the library at random, and see whether the tests notice.

    python -m tests.support.mutation_sample --count 40 --seed 1
    python -m tests.support.mutation_sample --each 6 --modules expstore api --tests tests --record FILE
    python -m tests.support.mutation_sample --again tests/golden/mutants.json --tests tests
    python -m tests.support.mutation_sample --each 2 --modules expstore api --data build/coverage/lines

A copy of the checkout is changed, never the checkout itself. The tests run once under coverage, which says
which tests run which line; of the lines that some test runs, `--count` are changed, one at a time, and those
tests run again, first those that run little else. A change that all of them accept is printed: either a
test is missing, or the change makes no difference. Changes of lines that only child processes run are not
tried.

`--record` writes the changes of `--each` package and what the tests said of them. `--again` makes the
changes of such a file once more, wherever their functions are now: tests that were removed since must not
have been the only ones to notice a change.

At the end it prints the kill rate of each package and of all: the share of the changes that the tests notice.
`--data` takes the lines of each test from the data of an earlier run under coverage, as `make coverage` does.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

from tests.support.paths import ROOT

MODULES = (
    "expstore/storages/engine",
    "expstore/storages/columns",
    "expstore/storages/recovery",
    "expstore/disk",
)
TESTS = ("tests/unit/storages", "tests/unit/disk", "tests/unit/buffers")
#: Limit of the tests of one mutation, seconds; one that makes a loop endless is noticed by it.
SECONDS = 240
#: Of the tests that run a line, so many run first: those that run the fewest lines.
FIRST_TESTS = 30
#: If these accept a change, at most so many of the others run.
MORE_TESTS = 120

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,  # codespell:ignore
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Verdict(StrEnum):
    """What the tests say of a change."""

    NOTICED = "noticed"
    #: The tests took longer than `SECONDS`: an endless loop, or a busy machine.
    SLOW = "slow"
    ACCEPTED = "accepted"


@dataclass(frozen=True)
class Mutation:
    """A change of one expression or statement.

    Args:
        path: File, relative to the checkout.
        function: Function that has the expression, with its classes: "Store.write".
        what: The change, for people.
        nth: Which of several equal changes of the function, from 0.
        line: Line of the expression.
        number: Number of the node in the order of `ast.walk`.
    """

    path: str
    function: str
    what: str
    nth: int = 0
    line: int = 0
    number: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """What stays equal when the function is moved within its file or into another one."""
        return self.function, self.what, self.nth

    @property
    def package(self) -> str:
        """The package that has the file: "expstore/sql", "expstore/storages/engine", "api"."""
        parts = Path(self.path).parts[:-1]
        return "/".join(parts[: 3 if "storages" in parts else 2 if parts[0] == "expstore" else 1])


def find_mutations(path: str, source: str) -> Iterator[Mutation]:
    """Yield the changes that are possible in the functions of a file."""
    tree = ast.parse(source)
    functions = dict(_functions_of(tree, ""))
    counts: Counter[tuple[str, str]] = Counter()
    for number, node in enumerate(ast.walk(tree)):
        function = functions.get(id(node))
        if function is None:
            continue
        changed = _change(copy.deepcopy(node))
        if changed is not None:
            what = f"{ast.unparse(node)}  ->  {ast.unparse(changed)}".replace("\n", " ")[:200]
            nth = counts[function, what]
            counts[function, what] += 1
            yield Mutation(path, function, what, nth, node.lineno, number)  # type: ignore[attr-defined]


def _functions_of(node: ast.AST, name: str) -> Iterator[tuple[int, str]]:
    """Yield the id of each node within a function, and the function's name."""
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}".lstrip(".") if isinstance(child, ast.ClassDef) else name
        if isinstance(child, ast.FunctionDef):
            inner = f"{name}.{child.name}".lstrip(".")
            for statement in child.body:
                for part in ast.walk(statement):
                    yield id(part), inner
        yield from _functions_of(child, inner)


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
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            goal = folder / name
            goal.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # it was removed, and that is not committed
                shutil.copy(ROOT / name, goal, follow_symlinks=False)  # expstore/api is a link

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

    def find_tests(self, tests: list[str], marks: str) -> dict[tuple[str, int], list[str]]:
        """Run tests under coverage; return the tests that run each line.

        Those that run the fewest lines come first. A test that fails without any change is left out.
        """
        rc = self.folder / "coverage.rc"
        rc.write_text("[run]\ndynamic_context = test_function\nsource = expstore,api\ncore = ctrace\n")
        self.run("-m", "tests.support.compile_loops")
        data, report = self.folder / ".coverage", self.folder / "report.xml"
        code = self.run(
            "-m", "coverage", "run", f"--rcfile={rc}", f"--data-file={data}",
            "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", "-o", "timeout=900",
            f"--junitxml={report}", *tests,
        )  # fmt: skip
        if code not in (0, 1):
            raise SystemExit(f"the tests do not run without any change (exit code {code})")
        failed = {
            f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
            for case in ElementTree.parse(report).iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        }
        if failed:
            print(f"left out, as they fail without any change: {', '.join(sorted(failed))}", flush=True)
        return self._read(data, failed, self.folder.resolve())

    def read_data(self, data: Path) -> dict[tuple[str, int], list[str]]:
        """Return the tests that run each line, from the data of an earlier run in the checkout itself."""
        self.run("-m", "tests.support.compile_loops")
        return self._read(data, set(), ROOT)

    def _read(self, data: Path, failed: set[str], root: Path) -> dict[tuple[str, int], list[str]]:
        from coverage.numbits import numbits_to_nums

        tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        lines: Counter[str] = Counter()
        with sqlite3.connect(data) as database:
            rows = database.execute(
                "SELECT path, context, numbits FROM line_bits JOIN file ON file.id = file_id "
                "JOIN context ON context.id = context_id WHERE context <> ''"
            )
            for path, context, bits in rows:
                test = None if context in failed else self._name(context)
                if test is not None:
                    numbers = numbits_to_nums(bits)
                    lines[test] += len(numbers)
                    for line in numbers:
                        tests[os.path.relpath(path, root), line].add(test)
        if not tests:
            raise SystemExit(
                f"{data} does not say which test runs a line: set dynamic_context, and run again"
            )
        return {place: sorted(names, key=lambda name: (lines[name], name)) for place, names in tests.items()}

    def _name(self, context: str) -> str | None:
        """Return pytest's name of the test function that coverage calls "tests.unit.test_x.Class.test_y"."""
        parts = context.split(".")
        for count in range(len(parts) - 1, 0, -1):
            path = Path(*parts[:count]).with_suffix(".py")
            if (self.folder / path).exists():
                return "::".join([str(path), *parts[count:]])
        return None

    def judge(self, mutation: Mutation, tests: list[str], marks: str, chance: random.Random) -> Verdict:
        """Change the library; return what the tests that run the line say of it."""
        path = self.folder / mutation.path
        source = path.read_text()
        path.write_text(mutate(source, mutation))
        first, others = tests[:FIRST_TESTS], tests[FIRST_TESTS:]
        more = chance.sample(others, min(MORE_TESTS, len(others)))
        command = ["-m", "pytest", "-q", "-x", "-m", marks, "-p", "no:cacheprovider", "-o", "timeout=60"]
        try:
            for some in (first, more):
                code = self.run(*command, *some, seconds=SECONDS) if some else 0
                if code != 0:
                    return Verdict.SLOW if code is None else Verdict.NOTICED
            return Verdict.ACCEPTED
        finally:
            path.write_text(source)


def choose(possible: list[Mutation], chance: random.Random, count: int, each: int | None) -> list[Mutation]:
    """Return `count` changes at random, or `each` of every package."""
    if each is None:
        return chance.sample(possible, min(count, len(possible)))
    packages: defaultdict[str, list[Mutation]] = defaultdict(list)
    for mutation in possible:
        packages[mutation.package].append(mutation)
    return [
        mutation
        for _, mutations in sorted(packages.items())
        for mutation in chance.sample(mutations, min(each, len(mutations)))
    ]


def find_again(records: list[dict[str, object]], possible: Iterable[Mutation]) -> list[Mutation]:
    """Return the recorded changes that are still possible, in the file that has the function now."""
    places: defaultdict[tuple[str, str, int], list[Mutation]] = defaultdict(list)
    for mutation in possible:
        places[mutation.key].append(mutation)
    again = []
    for record in records:
        former = Mutation(
            str(record["path"]), str(record["function"]), str(record["what"]), int(str(record["nth"]))
        )
        places_now = sorted(places[former.key], key=lambda place: place.path != former.path)
        if places_now:
            again.append(places_now[0])
        else:
            print(f"gone: {former.path}: {former.function}: {former.what}")
    return again


def main() -> int:
    """Run what the command line says.

    Return 1 if a change was accepted; with `--again`, if it was noticed before; with `--least`, if the kill
    rate is lower.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="how many changes")
    parser.add_argument("--each", type=int, help="so many of each package, instead of --count")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--modules", nargs="+", default=MODULES, help="folders or files to change")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests that run")
    parser.add_argument("--marks", default="not torture", help="marks of the tests that run, as pytest's -m")
    parser.add_argument("--record", type=Path, help="file to write the changes and verdicts to")
    parser.add_argument("--data", type=Path, help="data of a run under coverage, instead of a run of --tests")
    parser.add_argument("--least", type=float, help="fail only if the kill rate is below this")
    parser.add_argument("--again", type=Path, help="make the changes of such a file")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    records = json.loads(given.again.read_text()) if given.again else []
    modules = ["expstore", "api"] if given.again else given.modules
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        checkout = Checkout(Path(name))
        places = [checkout.folder / module for module in modules]
        files = sorted(
            file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))
        )
        possible = [
            mutation
            for file in files
            for mutation in find_mutations(str(file.relative_to(checkout.folder)), file.read_text())
        ]
        started = time.monotonic()
        if given.data:
            tests = checkout.read_data(given.data)
        else:
            tests = checkout.find_tests(list(given.tests), given.marks)
        tested = [mutation for mutation in possible if (mutation.path, mutation.line) in tests]
        print(f"{len(possible)} possible changes, {len(tested)} in lines that a test runs;", end=" ")
        print(f"tests {'found' if given.data else 'ran'} in {time.monotonic() - started:.0f} s", flush=True)
        tried = find_again(records, possible) if records else choose(tested, chance, given.count, given.each)
        judged: list[tuple[Mutation, Verdict]] = []
        for number, mutation in enumerate(tried, 1):
            names = tests.get((mutation.path, mutation.line), [])
            verdict = checkout.judge(mutation, names, given.marks, chance)
            judged.append((mutation, verdict))
            place = f"{mutation.path}:{mutation.line}"
            print(f"[{number}] {verdict}: {place}: {mutation.what} ({len(names)} tests)", flush=True)
            if given.record:
                write_record(given.record, judged)
    return report(judged, records, given.least)


def write_record(path: Path, judged: list[tuple[Mutation, Verdict]]) -> None:
    """Write changes and verdicts as JSON, a change a line."""
    lines = [
        json.dumps(
            {"path": one.path, "function": one.function, "what": one.what, "nth": one.nth, "verdict": verdict}
        )
        for one, verdict in judged
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def describe_rate(verdicts: Counter[Verdict]) -> str:
    """Return the kill rate, as in "kill rate: 0.82 (152 of 186)"; a change that is slow counts as killed."""
    count, killed = verdicts.total(), verdicts[Verdict.NOTICED] + verdicts[Verdict.SLOW]
    return f"kill rate: {killed / max(count, 1):.2f} ({killed} of {count})"


def report(
    judged: list[tuple[Mutation, Verdict]], records: list[dict[str, object]], least: float | None = None
) -> int:
    """Print the kill rate of each package and of all; return the exit code.

    Args:
        judged: The changes, and what the tests say of them.
        records: Changes with earlier verdicts: fail if one was noticed and is accepted now.
        least: Fail only if the kill rate of all is lower; None: fail if a change was accepted.
    """
    former = {(r["function"], r["what"], r["nth"]): r["verdict"] for r in records}
    lost = [
        mutation
        for mutation, verdict in judged
        if verdict == Verdict.ACCEPTED and former.get(mutation.key) == Verdict.NOTICED
    ]
    counts: defaultdict[str, Counter[Verdict]] = defaultdict(Counter)
    for mutation, verdict in judged:
        counts[mutation.package][verdict] += 1
    for package, verdicts in sorted(counts.items()):
        print(f"{package}: {describe_rate(verdicts)}")
    total = sum(counts.values(), Counter[Verdict]())
    accepted = total[Verdict.ACCEPTED]
    print(describe_rate(total))
    for mutation in lost:
        print(f"noticed before, accepted now: {mutation.path}:{mutation.line}: {mutation.what}")
    if least is not None:
        return total.total() - accepted < least * total.total()
    return bool(lost if records else accepted)


if __name__ == "__main__":
    raise SystemExit(main())
