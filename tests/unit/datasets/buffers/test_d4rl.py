"""The D4RL class: from a file, from a server, by prefix; trajectories, scores, preprocessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

import expstore
from expstore import ReplayBuffer
from expstore.datasets import D4RLExperienceReplay
from expstore.datasets.d4rl_files import d4rl_files, score_bounds
from expstore.errors import LockedError, NotFoundError, StateError
from tests.support.data_server import serving_files
from tests.unit.datasets.test_d4rl import arrays, write

ID = "hopper-medium-v2"
PATH = "gym_mujoco_v2/hopper_medium-v2.hdf5"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "public" / "gym_mujoco_v2").mkdir(parents=True)
    return write(tmp_path / "public" / PATH, arrays())


def opened(tmp_path: Path, source: Path | None = None, **options: Any) -> D4RLExperienceReplay:
    options.setdefault("batch_size", 8)
    return D4RLExperienceReplay(ID, root=tmp_path / "root", source=source, **options)


def test_the_list_of_files_is_torchrls() -> None:
    from torchrl.data.datasets.d4rl_infos import D4RL_DATASETS

    base = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"
    assert {name: base + path for name, path in d4rl_files().items()} == D4RL_DATASETS
    assert sorted(D4RLExperienceReplay.available_datasets) == sorted(D4RL_DATASETS)


def test_samples_of_a_source(tmp_path: Path, source: Path) -> None:
    data = opened(tmp_path, source)
    assert len(data) == 12
    assert data.data_path == tmp_path / "root" / ID == data.data_path_root
    batch = data.sample()
    assert batch["next", "reward"].shape == batch["next", "done"].shape == (8, 1)
    assert not {"id", "priority_weight"} & set(batch.keys())
    assert data.metadata["algorithm"] == "SAC"
    first = next(iter(data))
    assert first.batch_size == (8,)
    with pytest.raises(StateError, match="open for reading only"):
        data.extend(batch)
    with expstore.open(data.data_path, mode="r") as rb:  # a store like any other, also meanwhile
        assert rb.sql("SELECT count(*) FROM episodes").fetchall() == [(3,)]


def test_use_truncated_as_done(tmp_path: Path, source: Path) -> None:
    rows = opened(tmp_path, source)[:]
    assert rows["next", "done"].sum() == 2
    rows = opened(tmp_path, use_truncated_as_done=False)[:]
    torch.testing.assert_close(rows["next", "done"], rows["next", "terminated"])
    assert rows["next", "done"].sum() == 1


def test_download_and_again(tmp_path: Path, source: Path) -> None:
    with pytest.raises(NotFoundError, match=f"could not be found in .*{ID}"):
        opened(tmp_path, download=False)
    with serving_files(tmp_path / "public") as server:
        data = opened(tmp_path, mirror=server.url)
        assert len(data) == 12
        data.close()
        assert [path for path, _ in server.requests] == [PATH]
        opened(tmp_path, mirror=server.url).close()
        assert len(server.requests) == 1  # it is there
        opened(tmp_path, mirror=server.url, download="force").close()
        assert len(server.requests) == 2
        assert not (tmp_path / "root" / ".downloads" / ID).exists()
    data = opened(tmp_path, download=False)
    data.delete()
    assert not data.data_path.exists()


def test_arguments_are_checked_as_in_torchrl(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="Env nothing not found"):
        D4RLExperienceReplay("nothing", 8)
    with pytest.raises(RuntimeError, match="env_kwargs"):
        opened(tmp_path, frame_skip=2)
    wrong: dict[str, Any]
    for wrong in ({"from_env": True}, {"direct_download": False}, {"terminate_on_end": False}):
        with pytest.raises(ValueError, match="d4rl|D4RL"):
            opened(tmp_path, None, **wrong)
    with pytest.raises(ValueError, match="download='no'"):
        opened(tmp_path, download="no")


def test_split_trajectories(tmp_path: Path, source: Path) -> None:
    data = opened(tmp_path, source, split_trajs=True, batch_size=2)
    assert len(data) == 3
    assert data.data_path.name == ID + "_split"
    rows = data[:]
    assert rows.batch_size == (3, 5)
    assert rows["mask"].sum(1).tolist() == [4, 5, 3]
    flat = opened(tmp_path)[:]
    torch.testing.assert_close(rows["observation"][rows["mask"]], flat["observation"])
    torch.testing.assert_close(rows["next", "observation"][rows["mask"]], flat["next", "observation"])
    assert rows["next", "done"][:, -1].all()
    assert not rows["observation"][~rows["mask"]].any()
    assert data.sample().batch_size == (2, 5)


def test_scores(tmp_path: Path, source: Path) -> None:
    data = opened(tmp_path, source)
    assert data.normalized_score(3234.3) == 1.0
    assert data.normalized_score(np.array([-20.272305, 3234.3])) == pytest.approx([0, 1], abs=1e-6)
    assert score_bounds("antmaze-umaze-v2") == (0.0, 1.0)
    assert score_bounds("bullet-ant-medium-v0") == (373.705955, 2650.495)
    assert score_bounds("maze2d-umaze-v0") is None
    assert score_bounds("maze2d-umaze-v1") == (23.85, 161.86)


def twice(rows: TensorDictBase) -> TensorDictBase:
    rows = rows.select("observation", "action", "next")
    rows["double"] = rows["observation"] * 2
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_preprocess(tmp_path: Path, source: Path, workers: int) -> None:
    data = opened(tmp_path, source)
    (tmp_path / "made").mkdir()
    storage = data.preprocess(
        twice, num_workers=workers, chunksize=5, mp_start_method="fork", dest=tmp_path / "made"
    )
    rb = ReplayBuffer(storage=storage, batch_size=4)
    rows, there = rb[:], data[:]
    torch.testing.assert_close(rows["double"], there["observation"] * 2)
    torch.testing.assert_close(rows["next", "observation"], there["next", "observation"])
    assert rb.sql("SELECT length, status FROM episodes ORDER BY 1").fetchall() == [
        (3, "cut"),
        (4, "terminated"),
        (5, "truncated"),
    ]
    rb.close()
    with pytest.raises(StateError, match="exists"):
        data.preprocess(twice, num_workers=0, dest=tmp_path / "made")
    with pytest.raises(ValueError, match="dim=1"):
        data.preprocess(twice, dim=1, dest=tmp_path / "more")


def test_one_process_at_a_time_writes_what_a_function_returns(tmp_path: Path, source: Path) -> None:
    data = opened(tmp_path, source)

    def nested(rows: TensorDictBase) -> TensorDictBase:
        with pytest.raises(LockedError, match="writes to .*made at the moment"):
            data.preprocess(twice, num_workers=0, dest=tmp_path / "made")
        return twice(rows)

    storage = data.preprocess(nested, num_workers=0, chunksize=5, dest=tmp_path / "made")
    assert len(storage) == 12
    ReplayBuffer(storage=storage).close()


def test_a_prioritized_sampler_opens_the_store_for_writing(tmp_path: Path, source: Path) -> None:
    sampler = expstore.PrioritizedSampler(12, 0.7, 0.5)
    with opened(tmp_path, source, sampler=sampler) as data:
        batch = data.sample()
        batch["td_error"] = torch.ones(8)
        data.update_tensordict_priority(batch)


def test_a_function_that_fails_leaves_nothing(tmp_path: Path, source: Path) -> None:
    data = opened(tmp_path, source)

    def fail(rows: TensorDictBase) -> TensorDictBase:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        data.preprocess(fail, num_workers=0, dest=tmp_path / "made")
    with pytest.raises(expstore.errors.SchemaError, match=r"batch size \[2\] for 12 rows"):
        data.preprocess(lambda rows: rows[:2], num_workers=0, dest=tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["public", "root"]
    first = data.preprocess(twice, num_workers=0, num_frames=6, dest=tmp_path / "made")
    assert len(first) == 6
    ReplayBuffer(storage=first).close()
