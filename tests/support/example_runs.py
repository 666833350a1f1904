"""Run examples: as a process, to its end or until it has printed a step, or in forks of one process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

import expstore
from tests.support import warm_processes
from tests.support.paths import ROOT

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
        process.kill()


def import_example(name: str) -> ModuleType:
    """Import an example, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Fork:
    """A run in a fork of a process that has imported the example, which takes longer than a short run.

    Args:
        arguments: Its arguments.
        after: It is stopped when it learns from the batch of this number; 0: it is not.
        milliseconds: A signal that nobody catches stops it after so much computing, and so wherever the
            process is by then; None: Ctrl-C.
    """

    arguments: Sequence[str]
    after: int = 0
    milliseconds: float | None = None
    copies: Sequence[tuple[str, str]] = ()


def run_forks(name: str, method: str, folder: Path, forks: Sequence[Fork]) -> list[Run]:
    """Run an example in a folder, one fork after the other.

    Args:
        name: The example's module.
        method: Its method that is called once for each batch, as "module:Class.method".
        folder: Working directory of the runs.
        forks: The runs.
    """
    code = "from tests.support.example_runs import run_here; run_here()"
    told = json.dumps([name, method, [asdict(fork) for fork in forks]])
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    warm_processes.run([sys.executable, "-c", code, told], cwd=folder, env=environment, check=True)
    numbers = range(len(forks))
    return [Run(int((folder / f"code-{n}").read_text()), (folder / f"out-{n}").read_text()) for n in numbers]


def read_drawn(folder: Path, number: int) -> list[Any]:
    """Return number and ids of every batch that the method of `run_forks` returned in a run."""
    found: list[Any] = json.loads((folder / f"drawn-{number}").read_text())
    return found


def run_here() -> None:
    """Run forks of this process, which `run_forks` has started."""
    name, method, forks = json.loads(sys.argv[1])
    sys.modules[name] = example = import_example(name)
    for number, fork in enumerate(forks):
        for old, new in fork["copies"]:
            (shutil.copytree if os.path.isdir(old) else shutil.copy)(old, new)
        pid = os.fork()
        if pid == 0:
            out = os.open(f"out-{number}", os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(out, 2)
            _run_fork(example, method, number, Fork(**fork))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        Path(f"code-{number}").write_text(str(code))


def _run_fork(example: Any, method: str, number: int, fork: Fork) -> NoReturn:
    module, _, place = method.partition(":")
    class_name, _, attribute = place.partition(".")
    owner = getattr(importlib.import_module(module), class_name)
    former, calls, drawn = getattr(owner, attribute), 0, []

    def stopping(own: Any, *batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fork.after and fork.milliseconds is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
        elif calls == fork.after:
            signal.setitimer(signal.ITIMER_PROF, fork.milliseconds / 1000)
        draw = own.replay_buffer.storage.draws.number if hasattr(own, "replay_buffer") else None
        found = former(own, *batch)
        if found is not None:
            drawn.append([draw, found["id"].tolist()])
        return found

    setattr(owner, attribute, stopping)
    code = example.main(fork.arguments)
    Path(f"drawn-{number}").write_text(json.dumps(drawn))
    sys.stdout.flush()
    os._exit(code)


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
