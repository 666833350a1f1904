"""The code blocks of the README run in order, and documents refer only to existing names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

import expstore
from expstore.cli.app import run
from expstore.sql.result import Result
from tests.support.commands import Cli
from tests.support.paths import ROOT
from tests.support.servers import serving

pytestmark = pytest.mark.index

README = (ROOT / "README.md").read_text()
#: Where the server of docs/server.md listens.
SERVER = "http://trainer:8420"
#: Pages whose blocks run here. Before them only the first example of the front page, if they name it.
PAGES = (
    "annotations", "collecting", "episodes", "exchange", "fields", "groups", "gymnasium", "images", "look",
    "odd", "processes", "sampling", "selections", "server", "sql", "stable_baselines3", "torchrl",
)  # fmt: skip
#: Pages with tests of their own, pages that test_site.py runs, and pages without blocks.
OTHERS = (
    "benchmarks", "capture", "changes", "cleanrl", "cluster", "comparison", "consumers", "datasets",
    "development", "durability", "errors", "faq", "format", "glossary", "http", "index", "installing",
    "numpy", "page", "retention", "shipping", "storages", "versions",
)  # fmt: skip


def read_page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def read_part(name: str) -> str:
    """Return the part of a page whose blocks run here; others run the rest of docs/look.md."""
    return read_page(name).partition("\n## pandas and Polars\n")[0]


def blocks(text: str, kind: str) -> list[str]:
    """Return the blocks of a language in a document."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_named_preamble(text: str, names: dict[str, object]) -> None:
    """Run the first example of the front page, if the page tells its reader to do so."""
    if re.search(r"\[first example\]\((\.\./)?index\.md\): run it before", text):
        execute(blocks(read_page("index"), "python")[0], names, "docs/index.md")


def execute(block: str, names: dict[str, object], page: str = "README.md") -> None:
    exec(compile(block, page, "exec"), names)


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    loop, tensordicts, steps = blocks(README, "python")
    execute(loop, names)
    assert capsys.readouterr().out == "(5, 20)\n"
    execute(tensordicts, names)
    (expected,) = blocks(README, "text")
    assert capsys.readouterr().out == expected
    execute(steps, names)
    assert capsys.readouterr().out == "(32, 4)\n"


def test_its_first_program_is_short() -> None:
    assert len(blocks(README, "python")[0].splitlines()) <= 11


def test_every_page_is_tested_and_listed() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == {*PAGES, *OTHERS}
    listed = read_page("index")
    assert [name for name in sorted(pages - {"index"}) if f"({name}.md)" not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after another, as a reader would paste them into a new interpreter.

    What a comment says of the output is printed.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    page = read_part(name)
    run_named_preamble(page, names)
    capsys.readouterr()
    here = [block for block in blocks(page, "python") if SERVER not in block]
    for block in here:
        execute(block, names, f"docs/{name}.md")
    printed = capsys.readouterr().out
    for size in re.findall(r"# (torch\.Size\(\[[\d, ]+\]\))$", "\n".join(here), re.MULTILINE):
        assert size in printed


@pytest.mark.slow
def test_the_server_of_its_page_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block for other machines, with the server that the page's own command starts."""
    page = read_page("server")
    (command,) = blocks(page, "sh")
    (remote,) = [block for block in blocks(page, "python") if SERVER in block]
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("token", "readers"):
        Path(name).write_text(f"{name}-that-nobody-guesses\n")
    names: dict[str, object] = {}
    execute(blocks(read_page("index"), "python")[0], names, "docs/index.md")
    expstore.open("runs/demo.exp", mode="x").close()
    with serving(*shlex.split(command, comments=True)[2:]) as (_, facts):
        execute(remote.replace(SERVER, facts["listening"]), names)
    with expstore.open("runs/demo.exp", mode="r") as rb:
        assert len(rb) == 1000


@pytest.mark.slow
def test_the_shards_of_their_page_are_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open buffers; then three stores of one server in place of three machines."""
    page = read_page("cluster")
    page, _, _ = page.partition("\n## Shards on Ray\n")  # tests/unit/on_ray/test_cluster.py runs these blocks
    here, fixed, changing = blocks(page, "python")
    command, changes = blocks(page, "sh")
    assert command.startswith("expstore serve runs")
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("that-nobody-guesses\n")
    names: dict[str, object] = {}
    execute(blocks(read_page("index"), "python")[0], names, "docs/index.md")
    execute(here, names, "docs/cluster.md")
    for name in "abc":
        expstore.open(f"runs/{name}.exp", mode="x").close()
    limits = "--samples-per-insert", "4", "--error-buffer", "inf"
    assert f"expstore serve runs {' '.join(limits)}\n" in page
    with serving("runs", "--token-file", "token", *limits) as (_, facts):
        for name in "abc":
            url, own = f"http://{name}:8420/demo", f"{facts['listening']}/{name}"
            fixed, changes = fixed.replace(url, own), changes.replace(url, own)
        execute(fixed, names)
        for line in changes.splitlines():
            assert run(shlex.split(line)[1:]) == 0
        assert '"a": token' in changing
        execute(changing.replace('"a": token', '"127.0.0.1": token'), names)
    counts, shards = names["counts"], names["shards"]
    assert isinstance(counts, Result)
    assert counts.fetchone() == (4000,)
    assert isinstance(shards, torch.Tensor)
    assert set(shards.tolist()) <= {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exchange", "look", "sql"])
def test_the_commands_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(read_part(name), "sh") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        assert cli(*shlex.split(line)[1:]).code == 0, line


def test_the_columns_of_every_relation_are_described(tmp_path: Path) -> None:
    told: dict[str, list[tuple[str, str]]] = {}
    for section in re.split(r"^### ", read_page("sql"), flags=re.MULTILINE)[1:]:
        name = section.splitlines()[0]
        told[name] = re.findall(r"^\| `(\w+)` \| ([\w\[\]]+) \|", section, re.MULTILINE)
    rows = {"a": np.arange(9), "next": {"reward": np.ones(9), "done": np.arange(9) == 8}}
    sampler = expstore.ConsumingSampler(2)
    with expstore.open(tmp_path / "a.exp", capacity=10, sampler=sampler, batch_size=2) as rb:
        rb.extend(rows)
        rb.sample()
        found = {
            name: [(column, kind) for column, kind, *_ in rb.sql(f"DESCRIBE {name}").fetchall()]
            for name in told
        }
        own = ("a", "next")
        known = {name: [one for one in columns if one[0] not in own] for name, columns in found.items()}
        assert known == told


# -- names in documents ------------------------------------------------------------------------------

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "GUARANTEES.md")),
    *(ROOT / folder / "README.md" for folder in ("migrations", "tests/fixtures")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: A path is relative to one of these, or to its document.
ROOTS = (ROOT, ROOT / "expstore")
FOLDERS = [path.name for root in ROOTS for path in root.iterdir() if (path / "__init__.py").exists()]
#: `file.py::Class.method`; backticks around a path of one of our folders; `expstore.module.name`.
FILE = re.compile(r"(?<![\w/.])((?:[\w.-]+/)+\w+\.py|\w+\.py(?=::))(?:::(\w+(?:\.\w+)*))?")
PATH = re.compile(rf"`((?:examples|migrations|docs|{'|'.join(FOLDERS)})/[\w/.-]*)`")
DOTTED = re.compile(r"(?<![\w/.@-])((?:expstore|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
#: Files in a store, and pages.
NOT_DOTTED = {"expstore.json", "expstore.wishes", "benchmarks.md"}


def dead_names(text: str, folder: Path) -> list[str]:
    """Return the paths and dotted names in a document that do not exist; test_links.py checks links."""
    dead = []
    for path in PATH.findall(text):
        if not any((root / path).exists() for root in (folder, *ROOTS)):
            dead.append(path)
    for path, name in FILE.findall(text):
        files = [root / path for root in (folder, *ROOTS) if (root / path).is_file()]
        if not files:
            dead.append(path)
        elif name and name not in names_in(files[0]):
            dead.append(f"{path}::{name}")
    dead += [name for name in DOTTED.findall(text) if name not in NOT_DOTTED and not resolves(name)]
    return list(dict.fromkeys(dead))


def names_in(file: Path) -> set[str]:
    """Return the names that a file defines: `name`, `Class`, `Class.name`."""
    found = set()
    tree = ast.parse(file.read_text())
    bodies = [("", tree.body), *((f"{n.name}.", n.body) for n in tree.body if isinstance(n, ast.ClassDef))]
    for prefix, body in bodies:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(prefix + node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return found


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or can be reached from one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except ModuleNotFoundError:  # a parent is no package
            continue
        if spec is not None:
            if count == len(parts):
                return True
            found: object = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_what_is_there(path: Path) -> None:
    assert dead_names(path.read_text(), path.parent) == []


@pytest.mark.parametrize(
    "name",
    [
        "expstore/journal.py",
        "`expstore/nowhere/`",
        "`storages/nowhere`",
        "storages/base.py::Nothing",
        "storages/base.py::Storage.nothing",
        "tests/conftest.py::nothing",
        "expstore.door.open",
        "expstore.storages.Nothing",
        "`python -m tests.nothing`",
    ],
)
def test_a_dead_name_is_found(name: str) -> None:
    assert len(dead_names(f"See {name}.", ROOT)) == 1


def test_other_names_pass() -> None:
    text = (
        "`storages/base.py::Storage.write`, expstore/storages/base.py, `api/routes/`, expstore.json,"
        " `expstore.open`, expstore.schedulers, tests.support.paths, `journal/NNNNNN`"
    )
    assert dead_names(text, ROOT) == []
