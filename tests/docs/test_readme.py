"""The README's blocks run, one after another, as a reader would paste them; documents name what is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import expstore
from tests.support.commands import Cli
from tests.support.paths import ROOT
from tests.support.servers import serving

pytestmark = pytest.mark.index

README = (ROOT / "README.md").read_text()
#: Where the README's server listens.
SERVER = "http://trainer:8420"


def blocks(kind: str) -> list[str]:
    """Return the README's blocks of a language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def execute(block: str, names: dict[str, object]) -> None:
    exec(compile(block, "README.md", "exec"), names)


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    here = [block for block in blocks("python") if SERVER not in block]
    assert len(here) >= 4
    for block in here:
        execute(block, names)
    printed = capsys.readouterr().out
    assert "torch.Size([8, 4])" in printed
    assert "terminated" in printed


def test_its_server_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block for other machines, with the server that the README's own command starts."""
    (command,) = [block for block in blocks("sh") if block.startswith("expstore serve ")]
    (remote,) = [block for block in blocks("python") if SERVER in block]
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in ("token", "readers"):
        Path(name).write_text(f"{name}-that-nobody-guesses\n")
    names: dict[str, object] = {}
    execute(blocks("python")[0], names)
    expstore.open("runs/demo.exp", mode="x").close()
    with serving(*shlex.split(command, comments=True)[2:]) as (_, facts):
        execute(remote.replace(SERVER, facts["listening"]), names)
    with expstore.open("runs/demo.exp", mode="r") as rb:
        assert len(rb) == 1000


def test_its_first_block_fits_on_a_screen() -> None:
    assert len(blocks("python")[0].splitlines()) <= 30


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("sh") for line in block.splitlines() if "expstore serve" not in line]
    assert len(lines) >= 3
    for line in lines:
        assert cli(*shlex.split(line)[1:]).code == 0, line


def test_documents_name_what_is_there() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 250
    for path in (ROOT / "ARCHITECTURE.md", ROOT / "README.md", *sorted((ROOT / "docs").iterdir())):
        text = path.read_text()
        for name in re.findall(r"`((?:expstore|tests|benchmarks|examples|migrations|api)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), name
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / link).exists(), link
