"""The blocks of the README and of every page run in order, and print what the page says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import expstore
from expstore.api import Settings
from expstore.cli.app import run
from expstore.datasets import registry
from expstore.sql.result import Result
from tests.support import local_only_table
from tests.support.commands import Cli
from tests.support.pages import DOCS, execute, find_blocks, read_page, run_first_example, split_blocks
from tests.support.paths import ROOT
from tests.support.servers import Serving, serving

pytestmark = pytest.mark.index

README = (ROOT / "README.md").read_text()
#: Pages whose blocks run here. Before them only the first example of the front page, if they name it.
PAGES = [
    "annotations", "changes", "collecting", "consumers", "durability", "episodes", "exchange", "fields",
    "groups", "gymnasium", "images", "index", "look", "numpy", "odd", "processes", "retention", "sampling",
    "selections", "server", "sql", "stable_baselines3", "torchrl", "versions",
    *(f"{name}/{path.stem}" for name in ("explanation", "howto", "tutorials")
      for path in (DOCS / name).glob("*.md")),
]  # fmt: skip
#: Pages with tests of their own, and pages without blocks.
OTHERS = {
    "benchmarks", "capture", "cleanrl", "cluster", "comparison", "datasets", "development", "errors", "faq",
    "format", "glossary", "http", "installing", "page", "shipping", "storages",
}  # fmt: skip
#: Where the part of a page begins and ends that runs here; tests of their own run the rest.
PARTS = {"look": ("", "\n## Trackers\n"), "versions": ("", "\n## Versions on S3\n")}
#: Pages whose commands are about a store of the reader.
WITHOUT_COMMANDS = {"selections", "server"}
#: Its processes take seconds to start; docs/collecting.md has the same in `make test`.
AT_NIGHT = "tutorials/collecting"
#: Packages that a page needs and users may lack.
NEEDS = {"tutorials/agent": "openai"}
#: Where the servers of docs/server.md and docs/tutorials/serve.md listen.
TRAINER, SERVER = "http://trainer:8420", "http://127.0.0.1:8420"


def test_every_page_is_tested_and_listed() -> None:
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages == {name for name in PAGES if "/" not in name} | OTHERS
    listed = read_page("index")
    assert [name for name in sorted(pages - {"index"}) if f"({name}.md)" not in listed] == []


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    loop, tensordicts, steps = find_blocks(README, "python")
    assert len(loop.splitlines()) <= 11, "the first program is short"
    (expected,) = find_blocks(README, "text")
    for block, printed in ((loop, "(5, 20)\n"), (tensordicts, expected), (steps, "(32, 4)\n")):
        execute(block, names)
        assert capsys.readouterr().out == printed


def _serve(folder: str, option: str, file: str) -> Serving:
    """Return the server that `expstore serve` starts, in this process: one of its own takes seconds to start.

    `test_the_server_of_its_page_serves` runs the command itself.
    """
    assert option == "--token-file"
    return Serving(Settings(path=Path(folder), token=Path(file).read_bytes()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.torture] if name == AT_NIGHT else []) for name in sorted(PAGES)],
)
def test_a_page_runs_and_prints_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its blocks run one after another, as a reader would paste them into a new interpreter.

    A block of text is what was printed since the block of text before, unless it shows a command of its own
    or leaves lines out. A size that a comment names is printed.
    """
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    page = read_page(name, *PARTS.get(name, ()))
    found = split_blocks(page)
    if {kind for kind, _ in found} <= {"text"}:
        return  # diagrams and formulas
    monkeypatch.chdir(tmp_path)
    if "mkdir" not in page:
        (tmp_path / "runs").mkdir()
    names: dict[str, object] = {"__name__": "__main__"}
    if re.search(r"\[first example\]\((\.\./)?index\.md\): run it before", page):
        run_first_example(names)
    capsys.readouterr()
    address, printed, has_printed = SERVER, "", False
    with ExitStack() as stack:
        for kind, block in found:
            if kind == "text" and has_printed:
                out = capsys.readouterr().out
                is_excerpt = block.startswith("$ ") or "\n...\n" in block
                assert is_excerpt or out == block
                printed, has_printed = printed + out, False
            elif kind == "python" and TRAINER not in block:
                execute(block.replace(SERVER, address), names, f"docs/{name}.md")
                has_printed = True
            elif kind == "sh" and name not in WITHOUT_COMMANDS:
                for line in block.splitlines():
                    program, command, *arguments = shlex.split(line)
                    assert program == "expstore"
                    if command == "serve":
                        address = stack.enter_context(_serve(*arguments)).url
                    else:
                        assert run([command, *arguments]) == 0, line
                        has_printed = True
            else:
                assert kind in ("text", "python", "sh")
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    for size in re.findall(r"# (torch\.Size\(\[[\d, ]+\]\))$", page, re.MULTILINE):
        assert size in printed + out


# -- pages with servers, and with files that are not ours -------------------------------------------------


@pytest.mark.slow
def test_the_server_of_its_page_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block for other machines, with the server that the page's own command starts."""
    page = read_page("server")
    (command,) = find_blocks(page, "sh")
    (remote,) = [block for block in find_blocks(page, "python") if TRAINER in block]
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("token", "readers"):
        Path(name).write_text(f"{name}-that-nobody-guesses\n")
    names: dict[str, object] = {}
    run_first_example(names)
    expstore.open("runs/demo.exp", mode="x").close()
    with serving(*shlex.split(command, comments=True)[2:]) as (_, facts):
        execute(remote.replace(TRAINER, facts["listening"]), names)
    with expstore.open("runs/demo.exp", mode="r") as rb:
        assert len(rb) == 1000


@pytest.mark.slow
def test_the_shards_of_their_page_are_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open buffers; then three stores of one server in place of three machines."""
    # tests/unit/on_ray/test_cluster.py runs the blocks about Ray.
    page = read_page("cluster", end="\n## Shards on Ray\n")
    here, fixed, changing = find_blocks(page, "python")
    command, changes = find_blocks(page, "sh")
    assert command.startswith("expstore serve runs")
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("that-nobody-guesses\n")
    names: dict[str, object] = {}
    run_first_example(names)
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


@contextmanager
def _bucket(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve s3://bucket, and set the environment that a client needs."""
    pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")
    pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")
    from tests.support.s3_server import S3Server, start_moto

    with start_moto() as port, S3Server(port, "bucket") as server:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield


@pytest.mark.slow
def test_versions_on_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    page = read_page("versions", "\n## Versions on S3\n")
    first, cached = find_blocks(page, "python")
    (commands,) = find_blocks(page, "sh")
    names: dict[str, object] = {"__name__": __name__}
    with _bucket(monkeypatch):
        run_first_example(names)
        capsys.readouterr()
        execute(first, names, "docs/versions.md")
        pushed, listed = capsys.readouterr().out.splitlines()
        assert pushed.split()[:2] == ["2", "600"]
        assert listed == "[(1, None, 500), (2, None, 600)]"
        execute(cached, names, "docs/versions.md")
        assert capsys.readouterr().out == "torch.Size([32, 4])\n"
        for line in commands.splitlines():
            assert cli(*shlex.split(line)[1:]).code == 0, line
        kept = cli("versions", "list", "s3://bucket/run", "--json").json["versions"]
        assert [version["number"] for version in kept] == [3]
        assert (tmp_path / "copy-2.exp").is_dir()


@pytest.mark.slow
def test_shipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    page = read_page("shipping")
    programs, printed = find_blocks(page, "python"), find_blocks(page, "text")
    names: dict[str, object] = {"__name__": __name__}
    with _bucket(monkeypatch):
        run_first_example(names)
        capsys.readouterr()
        for program, expected in zip(programs, printed, strict=True):
            execute(program, names, "docs/shipping.md")
            assert capsys.readouterr().out == expected
        done = cli("ship", "elsewhere.exp", "s3://bucket/run")
        assert done.out.startswith("elsewhere.exp: all 600 rows are at s3://bucket/run"), done.err
        restored = cli("ship", "third.exp", "s3://bucket/run", "--json").json
        assert restored["shipped"]["rows"] == 600
        assert cli("info", "third.exp", "--json").json["stores"][0]["shipped_to"] == "s3://bucket/run"
        assert cli("ship", "none.exp", "s3://bucket/none").code


@pytest.mark.slow
def test_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "stores"))
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(httpx, "Client", None)  # nothing is downloaded
    Path("logs").mkdir()
    for name, steps in (("a", 4), ("b", 3)):
        np.savetxt(f"logs/{name}.csv", np.arange(steps * 4.0).reshape(steps, 4), delimiter=",")
    blocks = find_blocks(read_page("datasets"), "python")
    names: list[dict[str, Any]] = [{"__name__": "example"} for _ in range(3)]  # each has its own imports
    for block, own in zip(blocks, [*names, names[2]], strict=True):  # the last uses the reader of the third
        execute(block, own, "docs/datasets.md")
    assert names[0]["batch"].batch_size == (256,)
    assert len(names[0]["best"].fetchall()) == 3
    assert names[1]["batch"]["observation"].shape == (32, 84, 84)
    assert len(names[2]["data"]) == 5
    with expstore.open("logs.exp", mode="r") as rb:
        found = rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
        assert found == [(4, "cut"), (3, "cut")]
        assert rb[:]["observation"].tolist() == [[0, 1], [4, 5], [8, 9], [12, 13], [0, 1], [4, 5], [8, 9]]


class _Writer:
    """Has the methods of a SummaryWriter that the blocks about trackers call."""

    def __init__(self, *_: object, **__: object) -> None:
        self.names: list[str] = []
        self.steps: list[int] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.names.append(name)
        self.steps.append(step)

    def close(self) -> None:
        pass


class _Run:
    """Has the methods of a run of Weights & Biases that they call."""

    values: dict[str, float]

    def log(self, values: dict[str, float], step: int) -> None:
        self.values = values

    def finish(self) -> None:
        pass


@pytest.mark.slow
def test_trackers_get_what_the_page_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    tensorboard.SummaryWriter = _Writer  # type: ignore[attr-defined]
    wandb.init = lambda **_: _Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names: dict[str, Any] = {"__name__": __name__}
    page = read_page("look", "\n## Trackers\n")
    first, second = find_blocks(page, "python")
    execute(first, names, "docs/look.md")
    writer = names["writer"]
    assert list(dict.fromkeys(writer.steps)) == [100, 200, 300, 400, 500]
    execute(second, names, "docs/look.md")
    assert names["run"].values["expstore/store/rows"] == 500

    listed = set()
    for row in re.findall(r"^\| (`\w+/.*?) \|", page, re.MULTILINE):
        start, *others = re.findall(r"`(.*?)`", row)
        listed |= {start, *(start.rpartition("/")[0] + "/" + name for name in others)}
    assert set(writer.names) == {f"expstore/{name}" for name in listed}


# -- tables -----------------------------------------------------------------------------------------------


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


def test_the_table_of_what_a_connection_lacks_is_that_of_the_code() -> None:
    page = local_only_table.PAGE.read_text(encoding="utf-8")
    assert local_only_table.embed(page) == page, "run: python -m tests.support.local_only_table"
    table = local_only_table.render_table()
    assert "| `sample()`: it raises `NotReadyError`; `connect(wait=)` waits for rows |" in table
    assert "| `rb.refresh`, `rb.synchronize` | nothing: " in table
