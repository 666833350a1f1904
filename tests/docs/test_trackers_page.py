"""The blocks of docs/look.md about trackers run; stand-ins replace TensorBoard and Weights & Biases."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "look.md").read_text().partition("\n## Trackers\n")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


class Recorded:
    """Has the methods of a SummaryWriter and of a run that the blocks call."""

    def __init__(self, *_: object, **__: object) -> None:
        self.names: list[str] = []
        self.steps: list[int] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.names.append(name)
        self.steps.append(step)

    def close(self) -> None:
        pass


class RecordedRun:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.values = values

    def finish(self) -> None:
        pass


@pytest.mark.slow
def test_the_blocks_run_and_log_what_the_page_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    tensorboard.SummaryWriter = Recorded  # type: ignore[attr-defined]
    wandb.init = lambda **_: RecordedRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names: dict[str, Any] = {"__name__": __name__}
    first, second = BLOCKS
    exec(compile(first, "docs/look.md", "exec"), names)
    writer = names["writer"]
    assert list(dict.fromkeys(writer.steps)) == [100, 200, 300, 400, 500]
    exec(compile(second, "docs/look.md", "exec"), names)
    assert names["run"].values["expstore/store/rows"] == 500

    listed = set()
    for row in re.findall(r"^\| (`\w+/.*?) \|", PAGE, re.MULTILINE):
        start, *others = re.findall(r"`(.*?)`", row)
        listed |= {start, *(start.rpartition("/")[0] + "/" + name for name in others)}
    assert set(writer.names) == {f"expstore/{name}" for name in listed}
