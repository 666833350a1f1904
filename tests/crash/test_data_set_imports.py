"""Imports of data sets that are killed, run into a full disk, or are large: files of Atari DQN.

The kills happen at any file operation; those between two episodes are in
tests/unit/datasets/test_importer.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from expstore.datasets import AtariDQNReader, import_dataset, importer
from expstore.datasets.kinds import atari_dqn
from expstore.disk.files import Disk
from tests.crash.test_full_disks import in_small_disk
from tests.support.atari_files import LoggedRing, Step, play
from tests.unit.datasets.test_importer import picture

pytestmark = pytest.mark.index

KILLS = 10


def logged(folder: Path) -> Path:
    """Write a run of three checkpoints, with episodes across their edges, and a last partial one."""
    ring = LoggedRing(folder, slots=120)
    play(ring, 400, 3, shortest=7, longest=60)
    ring.finish()
    return folder


def import_in_child(source: Path, target: Path, kill_at: int) -> tuple[bool, int]:
    """Import in a forked child that is killed at a file operation (0 for never).

    Returns:
        Whether it finished, and its number of file operations.
    """
    asked, told = os.pipe()
    child = os.fork()
    if not child:
        acts = 0

        def gate(self: Disk, act: str, path: Path) -> None:
            nonlocal acts
            acts += 1
            if acts == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            Disk.gate = gate  # type: ignore[method-assign]
            import_dataset(AtariDQNReader(source), target)
            os.write(told, str(acts).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(asked) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0, int(said or 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.torture)])
def test_killed_at_ten_random_acts_it_equals_an_uninterrupted_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(importer, "_BATCH_ROWS", 16)
    monkeypatch.setattr(atari_dqn, "_SLAB_BYTES", 20 * 84 * 84)
    source = logged(tmp_path / "Pong" / "1" / "replay_logs")
    ended, acts = import_in_child(source, tmp_path / "whole.exp", 0)
    assert ended
    assert acts > 100
    whole = picture(tmp_path / "whole.exp")
    random = np.random.default_rng(seed)
    kills = imports = 0
    while kills < KILLS:
        target = tmp_path / f"killed{imports}.exp"
        # The first import makes little progress between kills; later ones are killed anywhere, the rename
        # included.
        most = acts // 8 if not imports else acts + 20
        ended, _ = import_in_child(source, target, int(random.integers(1, most)))
        kills += not ended
        if not ended:
            assert not target.exists() or target.is_dir()
            if target.exists():  # killed after the rename, the last operation but one
                assert picture(target) == whole
        if ended or kills in (KILLS // 2, KILLS):
            import_dataset(AtariDQNReader(source), target)
            assert picture(target) == whole
            imports += 1
    assert [path.name for path in tmp_path.glob(".*")] == []


# -- a full disk -----------------------------------------------------------------------------------------

FILL = """
import json, os, sys
from pathlib import Path
import expstore
from expstore.datasets import AtariDQNReader, import_dataset

source, disk = sys.argv[1], Path(sys.argv[2])
ballast, target = disk / "ballast", disk / "pong.exp"
ballast.write_bytes(bytes(int(sys.argv[3])))
said = []
for _ in range(2):  # the second one meets what the first one has left
    try:
        import_dataset(AtariDQNReader(source), target)
    except expstore.errors.StorageError as exc:
        said.append([exc.kind, str(exc)])
    assert not target.exists()
assert [name for name in os.listdir(disk) if not name.startswith(".")] == ["ballast"]
ballast.unlink()
rows = import_dataset(AtariDQNReader(source), target).rows
left = sorted(os.listdir(disk))
with expstore.open(target, mode="r") as rb:
    frames = int(rb[:]["observation"].long().sum())
print(json.dumps({"said": said, "rows": rows, "frames": frames, "left": left}), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_the_import_resumes(tmp_path: Path) -> None:
    ring, random = LoggedRing(tmp_path / "Pong" / "1" / "replay_logs", slots=900), np.random.default_rng(4)
    total = steps = 0
    while not ring.dumps:  # frames that cannot be packed
        frame = random.integers(1, 256, (84, 84), np.uint8)
        ring.add(Step(frame, 1, 0.0, steps % 50 == 49))
        total, steps = total + int(frame.sum()), steps + 1
    (tmp_path / "fill.py").write_text(FILL)
    size = 24 << 20
    done = in_small_disk(
        tmp_path,
        [
            *(sys.executable, "-X", "faulthandler", str(tmp_path / "fill.py"), str(ring.folder)),
            *(str(tmp_path / "disk"), str(size - (4 << 20))),
        ],
        size=str(size),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [kind for kind, _ in found["said"]] == ["disk_full"] * 2
    for _, text in found["said"]:
        assert str(tmp_path / "disk") in text
        assert "No space left" in text or "disk is full" in text
    assert (found["rows"], found["frames"]) == (steps, total)
    assert found["left"] == ["pong.exp"]


# -- a large source --------------------------------------------------------------------------------------


IMPORT = """
import sys
from expstore.datasets import AtariDQNReader, import_dataset
print(import_dataset(AtariDQNReader(sys.argv[1]), sys.argv[2]).rows)
"""


def import_in_process(source: Path, target: Path) -> tuple[int, int]:
    """Import in a process of its own; return the number of rows, and the peak of its RssAnon in bytes."""
    peak = 0
    command = [sys.executable, "-c", IMPORT, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if resident := re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE):  # a zombie has none
                peak = max(peak, int(resident[1]) << 10)
            time.sleep(0.01)
        rows = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0
    return int(rows), peak


@pytest.mark.torture
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """Four times as many rows (340 MB of frames instead of 85) need no more memory."""
    peaks: list[int] = []
    for slots in (6_000, 24_000):
        ring = LoggedRing(tmp_path / str(slots) / "replay_logs", slots=slots)
        frame, steps = np.zeros((84, 84), np.uint8), 0
        while ring.dumps < 2:
            frame[steps % 84, steps // 84 % 84] ^= 255
            ring.add(Step(frame, steps % 4, 1.0, steps % 250 == 249))
            steps += 1
        rows, peak = import_in_process(ring.folder, tmp_path / f"{slots}.exp")
        assert rows > 0.9 * steps
        peaks.append(peak)
    assert peaks[1] < 1.2 * peaks[0], peaks  # all frames in memory would make it 1.6
