"""The blocks of the pages about S3 run, with a server; test_site.py runs the others of docs/versions.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")
pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")

from tests.support.commands import Cli
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server, start_moto

PAGE = (ROOT / "docs" / "versions.md").read_text().partition("\n## Versions on S3\n")[2]


def _blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": __name__}
    exec(
        compile(_blocks((ROOT / "docs" / "index.md").read_text(), "python")[0], "docs/index.md", "exec"),
        names,
    )
    first, cached = _blocks(PAGE, "python")
    (commands,) = _blocks(PAGE, "sh")
    with start_moto() as port, S3Server(port, "bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        exec(compile(first, "docs/versions.md", "exec"), names)
        pushed, listed = capsys.readouterr().out.splitlines()
        assert pushed.split()[:2] == ["2", "600"]
        assert listed == "[(1, None, 500), (2, None, 600)]"
        exec(compile(cached, "docs/versions.md", "exec"), names)
        assert capsys.readouterr().out == "torch.Size([32, 4])\n"
        for line in commands.splitlines():
            assert cli(*shlex.split(line)[1:]).code == 0, line
        listed = cli("versions", "list", "s3://bucket/run", "--json").json["versions"]
        assert [version["number"] for version in listed] == [3]
        assert (tmp_path / "copy-2.exp").is_dir()


@pytest.mark.slow
def test_the_block_about_shipping_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": __name__}
    first = _blocks((ROOT / "docs" / "index.md").read_text(), "python")[0]
    page = (ROOT / "docs" / "shipping.md").read_text()
    programs, printed = _blocks(page, "python"), _blocks(page, "text")
    with start_moto() as port, S3Server(port, "bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        exec(compile(first, "docs/index.md", "exec"), names)
        capsys.readouterr()
        for program, expected in zip(programs, printed, strict=True):
            exec(compile(program, "docs/shipping.md", "exec"), names)
            assert capsys.readouterr().out == expected
        done = cli("ship", "elsewhere.exp", "s3://bucket/run")
        assert done.out.startswith("elsewhere.exp: all 600 rows are at s3://bucket/run"), done.err
        restored = cli("ship", "third.exp", "s3://bucket/run", "--json").json
        assert restored["shipped"]["rows"] == 600
        assert cli("info", "third.exp", "--json").json["stores"][0]["shipped_to"] == "s3://bucket/run"
        assert cli("ship", "none.exp", "s3://bucket/none").code
