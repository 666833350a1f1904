"""The checks of the page's scripts, where Node, npm or a network are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import page_scripts


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all programs that can be found, and nothing installed from npm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(page_scripts, "INSTALLED", tmp_path / "node")
    return folder


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_without_node_nothing_is_checked(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--format"]):
        assert page_scripts.main(arguments) == 0
        assert capsys.readouterr().out.splitlines() == [
            "skipped: the scripts of the page are not checked: Node is not installed"
        ]


def test_an_old_node_is_not_used(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(programs / "node", "echo v18.19.0")
    assert page_scripts.main([]) == 0
    assert "Node is v18.19.0, not 20 or later" in capsys.readouterr().out


def test_without_a_network_only_the_unit_tests_run(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(programs / "node", '[ "$1" = --version ] && echo v20.0.0; exit 0')
    write_program(programs / "npm", "echo npm error code EAI_AGAIN >&2; exit 1")
    assert page_scripts.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: types and format of the page's scripts are not checked")
    assert "without a network" in line


def test_a_failed_unit_test_fails_the_check(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(programs / "node", '[ "$1" = --version ] && echo v20.0.0 && exit; echo not ok; exit 1')
    assert page_scripts.main([]) == 1
    assert capsys.readouterr().out.startswith("not ok\nskipped: ")


def test_another_error_of_npm_is_no_reason_to_skip(programs: Path) -> None:
    write_program(programs / "node", '[ "$1" = --version ] && echo v20.0.0; exit 0')
    write_program(programs / "npm", "echo npm error code EUSAGE >&2; exit 1")
    with pytest.raises(SystemExit, match="EUSAGE"):
        page_scripts.main([])
