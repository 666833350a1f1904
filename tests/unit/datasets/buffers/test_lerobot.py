"""The LeRobot class: from columns, a folder, a hub; task descriptions, slices, next observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDictBase

import expstore
from expstore.datasets import LeRobotExperienceReplay, lerobot_columns_to_tensordict, load_dataset
from expstore.errors import NotFoundError, StateError
from tests.support.data_server import serving_files
from tests.support.torchrl_names import module
from tests.unit.datasets.test_lerobot import LENGTHS, TASK, TASKS, table, with_video, write_v2, write_v3

OfTorchRL = module("torchrl.data.datasets").LeRobotExperienceReplay

ID = "lerobot/pusht"


def columns() -> dict[str, Any]:
    return {
        "observation.state": torch.arange(8.0)[:, None].repeat(1, 7),
        "observation.grip": torch.arange(8),
        "action": torch.zeros(8, 7),
        "episode_index": torch.arange(2).repeat_interleave(4),
        "frame_index": torch.arange(4).repeat(2),
        "task": ["pick"] * 4 + ["place"] * 4,
    }


def opened(tmp_path: Path, source: Path | None = None, **options: Any) -> LeRobotExperienceReplay:
    options.setdefault("batch_size", 8)
    return LeRobotExperienceReplay(ID, root=tmp_path / "root", source=source, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_v3(tmp_path / "raw", table(images=False))


# -- from columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rehydrate", [False, True])
def test_columns_equal_torchrls(tmp_path: Path, rehydrate: bool) -> None:
    options: dict[str, Any] = {"slice_len": 4, "batch_size": 8, "rehydrate": rehydrate}
    ours = LeRobotExperienceReplay.from_columns(columns(), root=tmp_path / "root", **options)
    theirs = OfTorchRL.from_columns(columns(), root=tmp_path / "root", **options)
    assert len(ours) == len(theirs) == 8
    for data in (ours, theirs):
        batch = data.sample()
        assert batch["frame"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        words = [{0: "pick", 1: "place"}[number] for number in batch["episode"].tolist()]
        assert batch["language_instruction"] == words
        truncated = batch["next", "truncated"].flatten().nonzero().flatten().tolist()
        assert truncated == [3, 7]
        if rehydrate:
            after = batch["observation", "state"] + 1
            after[[3, 7]] = torch.nan
            torch.testing.assert_close(batch["next", "observation", "state"], after, equal_nan=True)
            grip = (batch["observation", "grip"] + 1) * (batch["frame"] < 3)
            torch.testing.assert_close(batch["next", "observation", "grip"], grip)
        else:
            assert ("next", "observation", "state") not in batch.keys(include_nested=True)
    assert not (tmp_path / "root").exists()
    ours.delete()
    # A slice that ends before its episode: theirs fills the last row, ours has the true next frame.
    options = {"slice_len": 2, "batch_size": 2, "rehydrate": True}
    batch = LeRobotExperienceReplay.from_columns(columns(), **options).sample()
    for _ in range(20):
        if (batch["frame"] < 3).all():
            break
        batch = LeRobotExperienceReplay.from_columns(columns(), **options).sample()
    torch.testing.assert_close(batch["next", "observation", "state"], batch["observation", "state"] + 1)


def test_columns_with_other_keys() -> None:
    key_map: dict[str, Any] = {"episode_index": "ep", "action": ("arm", "action")}
    rb = LeRobotExperienceReplay.from_columns(columns(), key_map=key_map, num_slices=2, batch_size=8)
    batch = rb.sample()
    assert batch["arm", "action"].shape == (8, 7)
    assert batch["frame"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    for cls in (LeRobotExperienceReplay, OfTorchRL):
        with pytest.raises(ValueError, match="num_slices or slice_len can be passed, but not both"):
            cls.from_columns(columns(), num_slices=2, slice_len=2)
        without = {name: value for name, value in columns().items() if name != "episode_index"}
        with pytest.raises(ValueError, match="rehydrate=True requires the episode entry"):
            cls.from_columns(without, rehydrate=True)
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        rb.extend(batch)


def test_columns_that_refer_to_videos() -> None:
    from torchrl.data.video import VideoClipRef

    reference = VideoClipRef.from_files(["a.mp4"], num_frames_per_file=[8])
    given = {**columns(), "observation.images.top": reference}
    assert lerobot_columns_to_tensordict(given)["observation", "image", "top"] is not None
    # TorchRL's decodes them with every sample, if torchcodec is installed.
    with pytest.raises(ValueError, match="'observation.images.top' is a VideoClipRef"):
        LeRobotExperienceReplay.from_columns(given)


# -- from a folder ---------------------------------------------------------------------------------------


def test_samples_of_a_source(tmp_path: Path, source: Path) -> None:
    seen: list[Any] = []

    def note(batch: TensorDictBase) -> TensorDictBase:
        seen.append(batch["language_instruction"])
        return batch

    data = opened(tmp_path, source, transform=note)
    assert len(data) == 14
    assert data.repo_id == ID
    assert data.data_path == tmp_path / "root" / "lerobot" / "pusht"
    batch = data.sample()
    assert len(seen) == 1
    assert batch["next", "reward"].shape == (8, 1)
    assert batch["language_instruction"] == [TASKS[task] for task in batch["task_index"].tolist()]
    rows = data[:]
    expected = [
        TASKS[TASK[n][min(t, len(TASK[n]) - 1)]] for n, length in enumerate(LENGTHS) for t in range(length)
    ]
    assert rows["language_instruction"] == expected
    assert rows["note"] == [f"episode {n}" for n, length in enumerate(LENGTHS) for _ in range(length)]
    assert data[4].get("language_instruction").data == TASKS[1]
    assert data[4].get("note").data == "episode 1"
    with expstore.open(data.data_path, mode="r") as rb:
        assert rb.sql("SELECT info->>'task' FROM episodes ORDER BY 1").fetchall()[0] == (TASKS[1],)


def test_texts_with_other_keys(tmp_path: Path) -> None:
    found = table(images=False)
    texts = pa.array([f"{'even' if row % 2 else 'odd'} {row // 2}" for row in range(14)])
    found = found.append_column("task", texts)
    keys: dict[str, Any] = {"episode_index": "ep", "frame_index": ("at", "t"), "note": ("about", "note")}
    data = opened(tmp_path, write_v3(tmp_path / "raw", found), key_map=keys)
    rows = data[:]
    assert rows["language_instruction"] == texts.to_pylist()
    assert rows["about", "note"] == found["note"].to_pylist()
    batch = data.sample()
    places = [
        int(np.cumsum([0, *LENGTHS])[e] + t) for e, t in zip(batch["ep"], batch["at", "t"], strict=True)
    ]
    assert batch["language_instruction"] == [texts[place].as_py() for place in places]


def test_rehydrate(tmp_path: Path, source: Path) -> None:
    rows = opened(tmp_path, source, rehydrate=True)[:]
    plain = opened(tmp_path)[:]
    last = torch.tensor(np.cumsum(LENGTHS) - 1)
    assert rows["next", "observation", "state"][last].isnan().all()
    assert not plain["next", "observation", "state"][last].any()
    inside = torch.ones(14, dtype=torch.bool)
    inside[last] = False
    state = ("next", "observation", "state")
    torch.testing.assert_close(rows[state][inside], plain[state][inside])


@pytest.mark.slow
def test_options_of_a_store_that_is_there(tmp_path: Path, source: Path) -> None:
    key_map = {"action": ("arm", "action")}
    assert opened(tmp_path, source, key_map=key_map)[:]["arm", "action"].shape == (14, 1)
    opened(tmp_path, key_map=key_map, decode_video=False).close()  # it has no videos
    with pytest.raises(
        StateError,
        match=r"made with key_map=\{'action': \('arm', 'action'\)\}, but key_map=\{\} is requested",
    ):
        opened(tmp_path)
    root = with_video(tmp_path / "videos", 3)
    opened(tmp_path / "b", root, decode_video=False).close()
    with pytest.raises(StateError, match="made with decode_video=False"):
        opened(tmp_path / "b")
    opened(tmp_path / "c", root).close()
    with pytest.raises(StateError, match="made with decode_video=True"):
        opened(tmp_path / "c", decode_video=False)
    assert opened(tmp_path / "c").sample()["observation", "image", "front"].shape == (8, 3, 16, 32)


@pytest.mark.slow
def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "public" / "lerobot" / "pusht"
    write_v2(folder)
    (folder / "README.md").write_text("# pusht")
    with pytest.raises(NotFoundError, match="could not be found in"):
        opened(tmp_path, download=False)
    with serving_files(tmp_path / "public") as server:
        data = opened(tmp_path, mirror=server.url)
        assert len(data) == 14
        data.close()
        asked = sorted(path.partition("/resolve/main/")[2] for path, _ in server.requests[1:])
        assert asked == [
            *(f"data/chunk-000/episode_{number:06d}.parquet" for number in range(4)),
            "meta/episodes.jsonl",
            "meta/info.json",
            "meta/tasks.jsonl",
        ]
        before = len(server.requests)
        opened(tmp_path, mirror=server.url).close()
        assert len(server.requests) == before
        with pytest.raises(NotFoundError):
            LeRobotExperienceReplay("lerobot/none", root=tmp_path / "root", mirror=server.url)
        (tmp_path / "public" / "lerobot" / "text").mkdir()
        (tmp_path / "public" / "lerobot" / "text" / "x.txt").write_text("x")
        with pytest.raises(NotFoundError, match="is not a LeRobot data set"):
            LeRobotExperienceReplay("lerobot/text", root=tmp_path / "root", mirror=server.url)
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "cache"))
    data = load_dataset(f"lerobot:{ID}", source=folder, batch_size=4)
    assert data.data_path == tmp_path / "cache" / "lerobot" / "lerobot" / "pusht"
    data.delete()
    assert not data.data_path.exists()


def test_tasks_that_are_not_there(tmp_path: Path) -> None:
    found = table(images=False)
    place = found.column_names.index("task_index")
    other = found.set_column(place, "task_index", pa.array([0] * 13 + [5]))
    with pytest.raises(expstore.errors.SchemaError, match="episode 3 has task 5"):
        opened(tmp_path, write_v3(tmp_path / "raw", other))
