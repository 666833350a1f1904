"""The Atari DQN class: rows, slices and folders compared with TorchRL's, and each difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

import expstore
from expstore import ReplayBuffer
from expstore.cli.app import run as command
from expstore.datasets import AtariDQNExperienceReplay
from expstore.errors import StateError
from tests.support.atari_files import LoggedRing, Step, play
from tests.support.data_server import serving_files
from tests.support.torchrl_names import module

OfTorchRL = module("torchrl.data.datasets.atari_dqn").AtariDQNExperienceReplay
_AtariStorage = module("torchrl.data.datasets.atari_dqn")._AtariStorage


def logged(folder: Path) -> tuple[Path, list[Step]]:
    """Write a run of three checkpoints and a last, partial one; return its folder and what was played."""
    ring = LoggedRing(folder, slots=200)
    played = play(ring, 700, 3, shortest=7, longest=40)
    ring.finish()
    assert not ring.lost_rounds
    return folder, played


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    return logged(tmp_path_factory.mktemp("atari") / "dqn" / "Pong" / "5" / "replay_logs")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, run: tuple[Path, list[Step]]) -> Path:
    """Return a folder with the data set Pong/5."""
    folder = tmp_path_factory.mktemp("root")
    AtariDQNExperienceReplay("Pong/5", root=folder, source=run[0]).close()
    return folder


def test_the_ids_are_torchrls() -> None:
    assert list(OfTorchRL.available_datasets) == AtariDQNExperienceReplay.available_datasets


@pytest.mark.parametrize("strict", ["strict_len", "strict_length"])
def test_slices(root: Path, strict: str) -> None:
    how: dict[str, Any] = {strict: False}
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=400, num_slices=10, root=root, **how)
    assert len(dataset.sample()) < 400  # most episodes are shorter than 40 steps
    with pytest.raises(ValueError, match="mean the same"):
        AtariDQNExperienceReplay("Pong/5", strict_len=False, strict_length=False, root=root)


def halved(rows: TensorDictBase) -> TensorDictBase:
    rows = rows.select("action", ("next", "reward"), ("next", "done"))
    rows["half"] = rows["action"] / 2
    return rows


def test_preprocess_with_workers(root: Path, tmp_path: Path) -> None:
    dataset = AtariDQNExperienceReplay("Pong/5", root=root)
    storage = dataset.preprocess(
        halved, num_workers=2, num_chunks=4, mp_start_method="fork", dest=tmp_path / "h"
    )
    with ReplayBuffer(storage=storage, batch_size=16) as rb:
        torch.testing.assert_close(rb[:]["half"], dataset[:]["action"] / 2)
        rows = len(rb)
        batch = rb.sample()
        rb.extend(batch)  # `metadata` is no field
        assert len(rb) == rows + 16
    with expstore.open(tmp_path / "h", mode="r", batch_size=4) as again:
        assert again.meta["atari"] == dataset.meta["atari"]
        assert again.meta["preprocessed_from"] == dataset.meta["import"]
        assert "import" not in again.meta
        wanted = dataset[0]["metadata"]
        for found in (batch, again.sample(), again[0], again[:5], next(iter(again))):
            metadata = found["metadata"]
            assert metadata.keys() == wanted.keys()
            assert metadata["dataset_id"] == "Pong/5"
            assert metadata["add_count"].dtype == torch.int64
            assert torch.equal(metadata["add_count"], wanted["add_count"])
            assert torch.equal(metadata["invalid_range"], wanted["invalid_range"])
    dataset.set_metadata({"open": root.open, "seed": 3})
    with pytest.warns(UserWarning, match="the metadata 'open' are left out"):
        storage = dataset.preprocess(halved, num_workers=0, num_frames=20, dest=tmp_path / "i")
    with ReplayBuffer(storage=storage, batch_size=16) as rb:
        assert rb.sample()["metadata"] == {"seed": 3}


def test_rows_equal_those_of_torchrls_class(tmp_path: Path, run: tuple[Path, list[Step]], root: Path) -> None:
    """Rows are TorchRL's without its faults: order of batches, numbers of episodes, rows of padding."""
    folder, played = run
    files = OfTorchRL._list_runs(folder)
    for number in files:
        OfTorchRL._preproc_run(tmp_path / "Pong" / "5" / str(number), files, number)
    theirs = _AtariStorage(tmp_path / "Pong" / "5")
    ours = AtariDQNExperienceReplay("Pong/5", root=root)
    # Every row of ours is one of theirs, with equal values, in the agent's order.
    rows = ours[:]
    assert len(ours) == len(played)
    np.testing.assert_array_equal(rows["action"].numpy(), [step.action for step in played])
    np.testing.assert_array_equal(rows["next", "reward"].numpy().ravel(), [step.reward for step in played])
    first = theirs.get(torch.arange(3, 199))  # the first checkpoint, but its padding and the unwritten row
    kept = first["observation"].flatten(1).any(1).bool()
    count = int(kept.sum())
    torch.testing.assert_close(first["observation"][kept], rows["observation"][:count])
    torch.testing.assert_close(first["action"][kept].long(), rows["action"][:count])
    inside = ~first["next", "terminated"][kept].bool()[:-1]
    torch.testing.assert_close(
        first["next", "observation"][kept][:-1][inside], rows["next", "observation"][: count - 1][inside]
    )
    # Their padding rows are rows; ours are not there.
    assert not kept.all()
    assert rows["observation"].flatten(1).any(1).all()
    # Their last step has the number of the next episode; ours has that of its own.
    last = int(rows["next", "terminated"].ravel().nonzero()[0])
    assert ours.episodes[last] == ours.episodes[0]
    end = int(first["next", "terminated"].nonzero()[0]) + 3
    assert theirs.episodes[end] != theirs.episodes[end - 1]
    # Their batches over two checkpoints are grouped; ours have the order asked for.
    asked = torch.tensor([450, 10, 650, 30, 210])
    one_by_one = torch.stack([theirs.get(int(index))["observation"] for index in asked])
    assert not torch.equal(theirs.get(asked)["observation"], one_by_one)
    torch.testing.assert_close(
        ours[asked]["observation"], torch.stack([ours[int(i)]["observation"] for i in asked])
    )


@pytest.mark.parametrize("named", ["Qbert/1", "Pong/2", "Qbert", "Qbert/1/replay_logs"])
def test_the_path_of_another_game_is_refused(tmp_path: Path, named: str) -> None:
    folder, _ = logged(tmp_path / named)
    with pytest.raises(
        expstore.errors.SchemaError, match=r"Pong/1 is requested, but the path .* names (Qbert|Pong/2)"
    ):
        AtariDQNExperienceReplay("Pong/1", root=tmp_path / "root", source=folder)
    assert not list((tmp_path / "root").rglob("Pong/1"))


def test_some_checkpoints(tmp_path: Path, run: tuple[Path, list[Step]]) -> None:
    some: dict[str, Any] = {"root": tmp_path, "checkpoints": [2, 0]}
    with serving_files(run[0].parents[2]) as server:
        data = AtariDQNExperienceReplay("Pong/5", mirror=server.url, **some)
    assert len(server.requests) == 12
    assert data[0]["metadata"]["add_count"].tolist() == [199, 599]
    data.close()
    AtariDQNExperienceReplay("Pong/5", root=tmp_path).close()
    with pytest.raises(
        StateError, match=r"was made with checkpoints=\[0, 2\], but checkpoints=\[1\] is requested"
    ):
        AtariDQNExperienceReplay("Pong/5", root=tmp_path, checkpoints=[1])


@pytest.mark.slow
def test_the_folder_that_torchrl_made_of_a_run(
    tmp_path: Path, run: tuple[Path, list[Step]], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, folder = OfTorchRL._list_runs(run[0]), tmp_path / "Pong" / "5"
    for number in files:
        OfTorchRL._preproc_run(folder / str(number), files, number)
    wanted = AtariDQNExperienceReplay("Pong/5", root=root)
    found = AtariDQNExperienceReplay("Pong/5", root=tmp_path / "root", source=folder)
    for key in wanted[:].exclude("metadata", "index").keys(True, True):
        assert torch.equal(found[:][key], wanted[:][key]), key
    assert torch.equal(found.episodes, wanted.episodes)
    assert torch.equal(found[0]["metadata"]["invalid_range"], wanted[0]["metadata"]["invalid_range"])
    assert command(["import", str(folder), str(tmp_path / "x.exp")]) == 0
    assert f"holds {len(wanted):,} rows" in capsys.readouterr().out
    (folder / "1" / "data" / "action.memmap").unlink()
    with pytest.raises(expstore.errors.SchemaError, match=r"checkpoint 1 .* has no \$store\$_action"):
        AtariDQNExperienceReplay("Pong/5", root=tmp_path / "other", source=folder)
