"""The Atari DQN reader restores the played rows in their order, and never joins two episodes."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.cli.app import run
from expstore.datasets import AtariDQNReader, Episode, import_dataset
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.atari_files import LoggedRing, Step, play
from tests.support.refusals import check_refusals


def read(folder: Path) -> list[Episode]:
    reader = AtariDQNReader(folder)
    return [episode for part in reader.parts() for episode in reader.episodes(part)]


def steps_of(pieces: list[Episode]) -> list[Step]:
    """Return the steps that pieces have, and check that open ones are continued."""
    found: list[Step] = []
    for number, piece in enumerate(pieces):
        count = len(piece)
        for row in range(count):
            done = piece.end == "terminated" and row == count - 1
            found.append(
                Step(piece.observation[row], int(piece.action[row]), float(piece.reward[row]), done)  # type: ignore[index]
            )
        if piece.end == "open":
            np.testing.assert_array_equal(piece.observation[count], pieces[number + 1].observation[0])
        else:
            assert len(piece.observation) == count
    return found


def same(one: Step, other: Step) -> bool:
    facts = [(step.observation[0, 0], step.action, step.reward, step.terminal) for step in (one, other)]
    return facts[0] == facts[1]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_all_that_was_played_comes_in_its_order(tmp_path: Path, first: int) -> None:
    whole = 0
    for seed in range(first, first + 30):
        ring = LoggedRing(tmp_path / str(seed), shape=(4, 4))
        played = play(ring, 230, seed)
        ring.finish()
        pieces = read(ring.folder)
        found = steps_of(pieces)
        if not ring.lost_rounds:
            whole += 1
            reader = AtariDQNReader(ring.folder)
            assert reader.count_rows(reader.parts()[0]) == len(found)
            assert len(found) == len(played)
            assert all(map(same, found, played))
        # Where rows are missing, no step is followed by a step that did not follow it.
        at = 0
        for piece in pieces:
            values = piece.observation[:, 0, 0].astype(int)
            assert ((np.diff(values) == 1) | (np.diff(values) == -249)).all()
            at += len(piece)
        assert at == len(found)
    assert whole


def test_a_store_of_two_checkpoints(tmp_path: Path) -> None:
    ring = LoggedRing(tmp_path / "Pong" / "1" / "replay_logs")
    played = play(ring, 100, 0)
    assert not ring.lost_rounds
    ring.finish()
    done = import_dataset(AtariDQNReader(tmp_path / "Pong" / "1"), tmp_path / "pong.exp")
    assert done.rows == len(played)
    with expstore.open(tmp_path / "pong.exp", mode="r") as rb:
        rows = rb[:]
        frames = np.stack([step.observation for step in played])
        ends = np.array([step.terminal for step in played])
        np.testing.assert_array_equal(rows["observation"].numpy(), frames)
        np.testing.assert_array_equal(rows["next", "done"].numpy()[:, 0], ends)
        after = np.where(ends[:, None, None], 0, np.roll(frames, -1, 0))
        complete = slice(0, len(played) - 1)
        np.testing.assert_array_equal(rows["next", "observation"].numpy()[complete], after[complete])
        assert not rows["done"].any()
        assert not rows["next", "truncated"].any()
        lengths = rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
        ended = np.flatnonzero(ends) + 1
        assert [length for length, status in lengths if status == "terminated"] == np.diff(
            ended, prepend=0
        ).tolist()
        assert rb.meta["atari"]["0"] == {"add_count": 49, "invalid_range": [48, 49, 0, 1, 2]}
        assert rb.meta["import"]["parts"][0]["name"] == "Pong/1"


def test_only_the_first_checkpoints(tmp_path: Path) -> None:
    ring = LoggedRing(tmp_path / "logs", shape=(4, 4))
    play(ring, 100, 0)
    reader = AtariDQNReader(ring.folder, runs=1)
    (part,) = reader.parts()
    assert len(part.files) == 6
    rows = sum(len(one) for one in reader.episodes(part))
    assert reader.count_rows(part) == rows < 49
    assert reader.notes() == []
    chosen = AtariDQNReader(ring.folder, checkpoints=[1])
    assert [file.name[-5:] for file in chosen.parts()[0].files] == [".1.gz"] * 6
    assert chosen.options() == {"runs": None, "checkpoints": [1]}
    assert AtariDQNReader(ring.folder).notes() == [
        f"{ring.folder} has the checkpoints 0-1; a whole run has 0-49"
    ]
    with pytest.raises(SchemaError, match="exclude each other"):
        AtariDQNReader(ring.folder, runs=1, checkpoints=[1])
    with pytest.raises(NotFoundError, match=r"has no checkpoint 2-4; it has 0-1"):
        AtariDQNReader(ring.folder, checkpoints=[1, 2, 3, 4])


def test_a_checkpoint_that_is_missing_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = LoggedRing(tmp_path / "Pong" / "1", shape=(4, 4))
    play(ring, 230, 0)
    ring.finish()
    source, store = str(ring.folder), str(tmp_path / "a.exp")
    for path in ring.folder.glob("*ckpt.1.gz"):
        path.unlink()
    assert run(["import", source, store]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"checkpoint 1 is missing in {source}, which has 0,2-5" in told
    assert "on the command line --checkpoints 0,2-5" in told
    assert run(["import", source, store, "--checkpoints", "0,2-5"]) == 0
    with expstore.open(store, mode="r") as rb:
        assert list(rb.meta["atari"]) == ["0", "2", "3", "4", "5"]
        assert rb.sql("SELECT count(*) FROM episodes WHERE status = 'cut'").fetchall()[0][0] >= 1
    for options, words in (
        (["--checkpoints", "0-x"], "is not a number or a range"),
        (["--checkpoints", "0", "--format", "d4rl"], "does not apply to d4rl"),
        (["--checkpoints", "0-1"], "has no checkpoint 1; it has 0,2-5"),
    ):
        assert run(["import", source, str(tmp_path / "b.exp"), *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_unsuitable_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ring = LoggedRing(tmp_path / "logs", shape=(4, 4))
    play(ring, 60, 0)
    check_refusals(
        [
            (lambda: AtariDQNReader(tmp_path / "none"), NotFoundError, "there is no folder"),
            (lambda: AtariDQNReader(tmp_path), NotFoundError, "no checkpoint"),
            (lambda: AtariDQNReader(tmp_path / "file"), NotFoundError, "is a file, but a folder is needed"),
            (lambda: AtariDQNReader(ring.folder, runs=0), SchemaError, "runs=0"),
        ]
    )
    (ring.folder / "$store$_action_ckpt.0.gz").unlink()
    with pytest.raises(SchemaError, match=r"checkpoint 0 .* has no \$store\$_action"):
        AtariDQNReader(ring.folder)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    ring = LoggedRing(tmp_path / "logs", shape=(4, 4))
    play(ring, 60, 0)
    path, target = ring.folder / "$store$_observation_ckpt.0.gz", tmp_path / "a.exp"
    data = path.read_bytes()

    def load(content: Any) -> Callable[[], object]:
        def act() -> object:
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                with gzip.open(path, "wb") as stream:
                    np.save(stream, content, allow_pickle=True)
            return import_dataset(AtariDQNReader(ring.folder), target)

        return act

    name = r"_observation_ckpt\.0\.gz"
    check_refusals(
        [
            (load(data[: len(data) // 2]), StorageError, rf"logs, episode 0: cannot read .*{name}: Compr"),
            (load(np.zeros((50, 4), np.uint8)), SchemaError, rf"{name}: .*checkpoint 0 has shape \[50, 4\]"),
            (load(np.zeros((49, 4, 4), np.uint8)), SchemaError, rf"differ in length: .*{name} 49"),
            (load(np.array([{}], object)), SchemaError, rf"{name} cannot be read: it is an array of object"),
        ],
        absent=target,
    )
    path.write_bytes(data)
    assert import_dataset(AtariDQNReader(ring.folder), target).rows


def test_errors_name_the_file_and_the_episode(tmp_path: Path) -> None:
    ring = LoggedRing(tmp_path / "logs", shape=(4, 4))
    played = play(ring, 230, 0)
    target = tmp_path / "a.exp"
    path = ring.folder / "add_count_ckpt.1.gz"
    data = path.read_bytes()
    path.write_text("hello")
    with pytest.raises(StorageError, match=r"cannot read .*logs/add_count_ckpt\.1\.gz: Not a gzipped file"):
        import_dataset(AtariDQNReader(ring.folder), target)
    path.write_bytes(data)
    path = ring.folder / "$store$_reward_ckpt.2.gz"
    data = path.read_bytes()
    path.write_bytes(data[:12])
    # The third checkpoint begins after 99 rows that were played or are padding.
    reader = AtariDQNReader(ring.folder, checkpoints=[0, 1])
    before = sum(piece.end == "terminated" for piece in reader.episodes(reader.parts()[0]))
    assert 3 < before < sum(step.terminal for step in played)
    with pytest.raises(StorageError, match=rf"logs, episode {before}: cannot read .*reward_ckpt\.2\.gz"):
        import_dataset(AtariDQNReader(ring.folder), target)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["$store$_observation", "$store$_terminal", "add_count"])
@pytest.mark.parametrize("number", [0, 2])
def test_checksums_are_checked(tmp_path: Path, name: str, number: int) -> None:
    ring = LoggedRing(tmp_path / "logs", shape=(4, 4))
    play(ring, 120, 0)
    ring.finish()  # the last checkpoint is read up to the cursor only
    path = ring.folder / f"{name}_ckpt.{number}.gz"
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=rf"{re.escape(str(path))}: CRC check failed"):
        import_dataset(AtariDQNReader(ring.folder), tmp_path / "a.exp")
    assert not (tmp_path / "a.exp").exists()


INTERRUPTED = """
import os, signal, sys
from expstore.cli import app
from expstore.datasets import importer

importer._BATCH_ROWS = 16

def interrupt(owner, name, before=False):
    call = getattr(owner, name)

    def interrupted(*arguments, **keywords):
        if before:
            os.kill(os.getpid(), signal.SIGINT)
        found = call(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGINT)
        return found

    setattr(owner, name, interrupted)

{interrupt}
app.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "begun"),
    [
        ("interrupt(importer._Batch, 'write')", True),
        ("interrupt(importer, '_hash_file', before=True)", False),
    ],
)
def test_ctrl_c_leaves_an_import_that_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, begun: bool
) -> None:
    ring = LoggedRing(tmp_path / "Pong" / "1", shape=(4, 4))
    play(ring, 100, 0)
    command = ["import", str(ring.folder), str(tmp_path / "a.exp")]
    program = INTERRUPTED.replace("{interrupt}", where)
    ended = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert "stopped; the same command continues the import" in ended.stderr
    assert not (tmp_path / "a.exp").exists()
    if begun:
        with expstore.open(tmp_path / ".a.exp.import", mode="r") as rb:
            assert len(rb) < 100
    assert run(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Pong", "a.exp"]
    capsys.readouterr()
