"""The Atari DQN class: the examples of TorchRL's documentation, and each difference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

import expstore
from expstore import ReplayBuffer, ReplayBufferEnsemble
from expstore.cli.app import run as command
from expstore.datasets import AtariDQNExperienceReplay, load_dataset
from expstore.errors import NotFoundError, StateError
from tests.support.atari_files import LoggedRing, Step, play
from tests.support.data_server import serving_files

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing torchrl's collectors
    from torchrl.data.datasets.atari_dqn import AtariDQNExperienceReplay as OfTorchRL
    from torchrl.data.datasets.atari_dqn import _AtariStorage


def logged(folder: Path, seed: int = 3) -> tuple[Path, list[Step]]:
    """Write a run of three checkpoints and a last, partial one; return its folder and what was played."""
    ring = LoggedRing(folder, slots=200)
    played = play(ring, 700, seed, shortest=7, longest=40)
    ring.finish()
    assert not ring.lost_rounds
    return folder, played


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    return logged(tmp_path_factory.mktemp("atari") / "dqn" / "Pong" / "5" / "replay_logs")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, run: tuple[Path, list[Step]]) -> Path:
    """Return a folder with the data sets Pong/5 and Asterix/5."""
    folder = tmp_path_factory.mktemp("root")
    AtariDQNExperienceReplay("Pong/5", root=folder, source=run[0]).close()
    other, _ = logged(folder / "raw", seed=11)
    AtariDQNExperienceReplay("Asterix/5", root=folder, source=other).close()
    return folder


def test_the_ids_are_torchrls() -> None:
    assert list(OfTorchRL.available_datasets) == AtariDQNExperienceReplay.available_datasets


def test_the_first_sample_of_the_documentation(root: Path) -> None:
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=128, root=root)
    data = next(iter(dataset))
    assert data.batch_size == (128,)
    assert data["observation"].shape == data["next", "observation"].shape == (128, 84, 84)
    assert data["observation"].dtype == torch.uint8
    assert data["action"].shape == (128,)
    for name in ("done", "terminated", "truncated"):
        assert data[name].shape == data["next", name].shape == (128, 1)
        assert not data[name].any()
    assert data["next", "reward"].dtype == torch.float32
    metadata = data["metadata"]
    assert metadata["dataset_id"] == "Pong/5"
    assert metadata["add_count"].tolist()[:3] == [199, 399, 599]
    assert metadata["invalid_range"].tolist()[0] == [198, 199, 0, 1, 2]
    assert data["index"].shape == (128,)


def test_the_second_sample_of_the_documentation(root: Path, run: tuple[Path, list[Step]]) -> None:
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=64, slice_len=16, root=root)
    for data in dataset:
        index = data.get("index").reshape(4, 16)
        assert (index.diff(dim=1) == 1).all()  # groups of consecutive values
        assert (dataset.episodes[index] == dataset.episodes[index][:, :1]).all()
        assert data["next", "done"].dtype == torch.bool
        assert data["next", "truncated"].reshape(4, 16)[:, -1].any()
        break
    ends = np.cumsum([step.terminal for step in run[1]])
    assert dataset.episodes.tolist() == [0, *ends[:-1].tolist()]


def test_the_ensemble_of_the_documentation(root: Path) -> None:
    dataset_asterix = AtariDQNExperienceReplay(
        "Asterix/5", batch_size=32, slice_len=8, num_procs=4, root=root
    )
    dataset_pong = AtariDQNExperienceReplay("Pong/5", batch_size=32, slice_len=8, num_procs=4, root=root)
    dataset = ReplayBufferEnsemble(dataset_pong, dataset_asterix, batch_size=32, sample_from_all=True)
    sample = dataset.sample()
    for part, name in zip(sample.unbind(0), ("Pong/5", "Asterix/5"), strict=True):
        assert part["metadata"]["dataset_id"] == name
        assert part["observation"].shape == (16, 84, 84)
        assert part["index", "buffer_ids"].shape == (16,)
    assert sample["observation"].shape == (2, 16, 84, 84)


@pytest.mark.parametrize("strict", ["strict_len", "strict_length"])
def test_slices(root: Path, strict: str) -> None:
    how: dict[str, Any] = {strict: False}
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=400, num_slices=10, root=root, **how)
    assert len(dataset.sample()) < 400  # most episodes are shorter than 40 steps
    with pytest.raises(ValueError, match="mean the same"):
        AtariDQNExperienceReplay("Pong/5", strict_len=False, strict_length=False, root=root)


def test_without_replacement(root: Path) -> None:
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=70, replacement=False, root=root)
    drawn = torch.cat([dataset.sample()["index"] for _ in range(10)])
    assert drawn.unique().numel() == 700
    dataset = AtariDQNExperienceReplay("Pong/5", batch_size=64, slice_len=4, replacement=False, root=root)
    episodes = dataset.episodes[dataset.sample()["index"]].reshape(-1, 4)
    assert episodes[:, 0].unique().numel() == len(episodes)


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


def test_a_run_without_files_says_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"gs://atari-replay-datasets/dqn, no longer exists; pass source=.*mirror="
    ):
        AtariDQNExperienceReplay("Pong/1", root=tmp_path)
    with pytest.raises(ValueError, match="not part of the available datasets"):
        AtariDQNExperienceReplay("Pong/6", root=tmp_path)


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


def test_runs_are_downloaded_from_a_mirror(
    tmp_path: Path, run: tuple[Path, list[Step]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtariDQNExperienceReplay, "_max_runs", 2)
    with serving_files(run[0].parents[2]) as server:
        data = AtariDQNExperienceReplay("Pong/5", root=tmp_path, mirror=server.url)
    assert len(server.requests) == 12
    assert 300 < len(data) < 400
    data.close()
    monkeypatch.setattr(AtariDQNExperienceReplay, "_max_runs", None)
    with pytest.raises(StateError, match="was made with runs=2, but runs=None is requested"):
        AtariDQNExperienceReplay("Pong/5", root=tmp_path)


def test_by_name_and_sql(root: Path) -> None:
    data = load_dataset("atari:Asterix/5", root=root, batch_size=8)
    assert data.sample()["metadata"]["dataset_id"] == "Asterix/5"
    assert data[0]["metadata"]["dataset_id"] == "Asterix/5"
    best = data.sql("SELECT max(return) FROM episodes").fetchall()[0][0]
    assert best == data.sql("SELECT return FROM episodes ORDER BY return DESC LIMIT 1").fetchall()[0][0]
    some = AtariDQNExperienceReplay(
        "Asterix/5", root=root, batch_size=32, sampler=expstore.RandomSampler(where="action = 3")
    )
    assert (some.sample()["action"] == 3).all()


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
