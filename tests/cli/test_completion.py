"""Completion in the shell: the scripts, and what they suggest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expstore.cli.app import run
from expstore.cli.completion import complete_store
from tests.support import warm_processes
from tests.support.commands import Cli
from tests.support.paths import ROOT


@pytest.fixture
def folder(tmp_path: Path, store: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store runs/a.exp, snapshots of it in backup/, and other files; the current one."""
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    (here / ".hidden").mkdir()
    (here / "readme.txt").write_text("text")
    shutil.copytree(store, here / "runs" / "a.exp")
    monkeypatch.chdir(here)
    assert cli("versions", "create", "runs/a.exp", "backup", "--tag", "first").code == 0
    assert cli("versions", "create", "runs/a.exp", "backup").code == 0
    return here


def answer(**question: str) -> str:
    """Return what a shell reads when it asks by environment variables."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with warm_processes.Popen(
        [sys.executable, "-m", "expstore"], env={**os.environ, **question}, **pipes
    ) as program:
        out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    return str(out)


def suggest(*words: str) -> list[str]:
    """Return what bash is told at the end of a line; the last word is unfinished."""
    line = " ".join(["expstore", *words])
    number = str(len(words))
    return answer(_EXPSTORE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number).split()


@pytest.mark.usefixtures("folder")
def test_suggestions() -> None:
    restore = ["versions", "restore", "runs/a.exp"]
    for words, expected in (
        (["ver"], ["verify", "versions"]),
        (["info", "r"], ["runs/"]),
        (["info", "runs/"], ["runs/a.exp"]),
        (["sql", "runs/a"], ["runs/a.exp"]),
        (["merge", "runs/a.exp", "ru"], ["runs/"]),
        (["versions", "create", "runs/a.exp", "ba"], ["backup/"]),
        (["info", "nowhere/"], []),
        ([*restore, "backup", "--version", ""], ["first", "1", "2"]),
        ([*restore, "backup", "--version", "f"], ["first"]),
        ([*restore, "nowhere", "--version", ""], []),
        (["versions", "restore", "--version", ""], []),
    ):
        assert suggest(*words) == expected, words


@pytest.mark.usefixtures("folder")
def test_folders_and_stores_are_suggested() -> None:
    assert complete_store("") == ["backup/", "runs/"]
    assert complete_store(".h") == [".hidden/"]
    assert complete_store("runs/a.exp/x") == []
    assert complete_store("readme.txt/") == []


def test_home_is_expanded_and_kept_as_typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert complete_store("~/ru") == ["~/runs/"]
    assert complete_store(f"{folder}/runs/a") == [f"{folder}/runs/a.exp"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.usefixtures("folder")
def test_the_script_for_bash_works(tmp_path: Path) -> None:
    source = answer(_EXPSTORE_COMPLETE="source_bash")
    program = tmp_path / "expstore"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m expstore "$@"\n')
    program.chmod(0o755)
    script = f"{source}\nCOMP_WORDS=(expstore info runs/)\nCOMP_CWORD=2\n_expstore_completion expstore\n"
    done = subprocess.run(
        ["bash", "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"; complete -p expstore'],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "runs/a.exp\ncomplete -o default -F _expstore_completion expstore\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_installing_writes_the_script(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    printed = []
    for option in ("--show-completion", "--install-completion"):
        with pytest.raises(SystemExit) as ended:
            run([option])
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
    assert "_EXPSTORE_COMPLETE" in printed[0]
    assert f"{shell} completion installed in {tmp_path}" in printed[1].replace("\n", "")
    assert any("_EXPSTORE_COMPLETE" in file.read_text() for file in tmp_path.rglob("*") if file.is_file())
