"""The README's blocks run, one after another, as a reader would paste them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(blocks) >= 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([8, 4])" in printed
    assert "terminated" in printed


def test_documents_name_what_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) < 250
    for name in re.findall(r"`((?:expstore|tests|benchmarks|examples|migrations|api)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
