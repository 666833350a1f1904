"""Programs forked from a warm process are what `subprocess` would have begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

TELL = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("TOLD"), __name__, sys.stdin.read(), sys.path[0]]))
print("and this", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("how", [subprocess.run, warm.run])
@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_gets_what_it_is_given(tmp_path: Path, how: object, kind: str) -> None:
    assert callable(how)
    (tmp_path / "told.py").write_text(TELL)
    given = {"-c": ["-c", TELL], "-m": ["-m", "told"], "script": [str(tmp_path / "told.py")]}[kind]
    done = how(
        [sys.executable, *given, "a", "b"], cwd=tmp_path, env={"TOLD": "so", "PATH": ""}, input="in",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "and this\n")
    arguments, folder, told, name, read, first = json.loads(done.stdout)
    assert arguments[1:] == ["a", "b"]
    assert (folder, told, name, read) == (str(tmp_path), "so", "__main__", "in")
    assert first == ("" if kind == "-c" else str(tmp_path))


@pytest.mark.parametrize(("code", "status"), [("raise ValueError('so')", 1), ("import os; os.abort()", -6)])
def test_its_end_is_told(code: str, status: int) -> None:
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == status
    assert ("ValueError: so" in done.stderr) is (status == 1)
    with pytest.raises(subprocess.CalledProcessError):
        warm.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_killed_and_waited_for(number: int) -> None:
    code = "import time; print(1, flush=True); time.sleep(600)"
    with warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout.read(1) == b"1"
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.send_signal(number)
        assert child.wait(60) == child.poll() == -number
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_it_begins_at_once() -> None:
    command = [sys.executable, "-c", "import torch, tensordict, expstore; expstore.ReplayBuffer"]
    took = []
    for _ in range(3):
        began = time.perf_counter()
        warm.run(command, check=True)
        took.append(time.perf_counter() - began)
    assert min(took) < 1.5  # to import torch alone takes longer
