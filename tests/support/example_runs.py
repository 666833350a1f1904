"""Run an example as a process: to its end, or until it has printed a step, where a signal stops it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import expstore
from tests.support import warm_processes
from tests.support.paths import ROOT

_LONGEST_RUN = 90.0  # seconds
_STEP = re.compile(r"step ([\d,]+) ")


@dataclass(frozen=True)
class Run:
    """Exit code of a run (negative if a signal ended it), and its output including errors."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        return self.text.splitlines()[-1]


def run_example(name: str, folder: Path, *arguments: str) -> Run:
    """Run an example to its end, in a folder."""
    return _run(name, folder, arguments, stop_at=None, number=signal.SIGKILL)


def stop_example(name: str, folder: Path, *arguments: str, stop_at: int, number: signal.Signals) -> Run:
    """Run an example, and send it a signal when it has printed its progress at a step."""
    return _run(name, folder, arguments, stop_at=stop_at, number=number)


def _run(
    name: str, folder: Path, arguments: tuple[str, ...], *, stop_at: int | None, number: signal.Signals
) -> Run:
    process = warm_processes.Popen(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(_LONGEST_RUN, process.kill)
    watchdog.start()
    lines = []
    try:
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                found = _STEP.match(line)
                if stop_at is not None and found and int(found[1].replace(",", "")) >= stop_at:
                    process.send_signal(number)
                    stop_at = None
        return Run(process.wait(), "".join(lines))
    finally:
        watchdog.cancel()
        process.kill()


def flatten_state(state: Any, name: str = "") -> dict[str, Any]:
    """Return the tensors and numbers of a checkpoint by their paths."""
    if isinstance(state, dict):
        pairs = list(state.items())
    elif isinstance(state, (list, tuple)):
        pairs = list(enumerate(state))
    else:
        return {name: state.tolist() if isinstance(state, torch.Tensor) else state}
    return {
        path: value for key, part in pairs for path, value in flatten_state(part, f"{name}/{key}").items()
    }


def check_episodes(rb: expstore.TensorDictReplayBuffer) -> None:
    """Check that every row is in one episode, and follows the row before it in that episode."""
    assert rb.sql("SELECT sum(length) FROM episodes").fetchall() == [(len(rb),)]
    rows = rb.sql(
        """
        SELECT _episode, _step, observation, next.observation AS following,
               next.terminated OR next.truncated AS ended
        FROM transitions ORDER BY _episode, _step
        """
    ).fetchall()
    assert len(rows) == len(rb)
    former = None
    for row in rows:
        episode, step, observation, _, _ = row
        if former is None or former[0] != episode:
            assert step == 0
        else:
            assert step == former[1] + 1
            assert observation == former[3]
            assert not former[4], "a row follows the end of its episode"
        former = row
