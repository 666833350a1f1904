"""The LeRobot reader, versions 2 and 3: rows, tasks, images, videos; comparison with TorchRL's class."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import expstore
from expstore.cli.app import run
from expstore.datasets import LeRobotReader, import_dataset, lerobot_columns_to_tensordict
from expstore.errors import NotFoundError, SchemaError
from tests.support.torchrl_names import module

theirs = module("torchrl.data.datasets.lerobot")

FPS = 10
LENGTHS = [3, 4, 2, 5]
#: Tasks of the episodes; episode 2 changes from the first to the second one.
TASKS = ["push the block", "lift"]
TASK = [[0], [1], [0, 1], [0]]


def pixels(value: int) -> Any:
    return np.full((4, 6, 3), value, np.uint8) + np.arange(3, dtype=np.uint8)


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(value)).save(file, "PNG")
    return file.getvalue()


def table(first: int = 0, lengths: list[int] = LENGTHS, images: bool = True) -> pa.Table:
    """Return the rows of all episodes."""
    count = sum(lengths)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.concatenate([np.arange(length) for length in lengths])
    state = np.stack([100.0 * episode + frame, -1.0 * frame], 1).astype(np.float32)
    columns = {
        "observation.state": pa.array(state.tolist(), pa.list_(pa.float32(), 2)),
        "observation.effort": pa.array(frame / 2),
        "action": pa.array((state[:, :1] / 8).tolist(), pa.list_(pa.float32())),
        "next.reward": pa.array(frame.astype(np.float32) / 4),
        "next.done": pa.array(frame == np.repeat(lengths, lengths) - 1),
        "next.success": pa.array((frame == np.repeat(lengths, lengths) - 1) & (episode != 1)),
        "timestamp": pa.array((frame / FPS).astype(np.float32)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(episode),
        "index": pa.array(np.arange(count)),
        "task_index": pa.array(
            [TASK[e % 4][min(t, len(TASK[e % 4]) - 1)] for e, t in zip(episode, frame, strict=True)]
        ),
        "note": pa.array([f"episode {e}" for e in episode]),
    }
    if images:
        data = [
            {"bytes": png(20 * int(e) + int(t)), "path": None} for e, t in zip(episode, frame, strict=True)
        ]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        columns["observation.images.top"] = pa.array(data, kind)
    return pa.table(columns)


def features(found: pa.Table) -> dict[str, Any]:
    shapes = {"observation.state": [2], "observation.images.top": [4, 6, 3]}
    kinds = {"observation.images.top": "image", "note": "string"}
    return {
        name: {
            "dtype": kinds.get(name, str(found.schema.field(name).type)),
            "shape": shapes.get(name, [1]),
            "names": None,
        }
        for name in found.column_names
    }


def write_info(root: Path, found: pa.Table, version: str, **more: Any) -> None:
    info = {
        "codebase_version": version,
        "robot_type": "so100",
        "fps": FPS,
        "total_frames": len(found),
        "chunks_size": 1000,
        "features": features(found),
        "video_path": None,
        **more,
    }
    (root / "meta").mkdir(parents=True, exist_ok=True)
    (root / "meta/info.json").write_text(json.dumps(info))


def write_v3(root: Path, found: pa.Table | None = None, split: int = 2, **more: Any) -> Path:
    """Write a folder; the episodes from `split` on are in a second file."""
    found = table() if found is None else found
    write_info(root, found, "v3.0", **more)
    numbers = found["episode_index"].to_numpy()
    (root / "data/chunk-000").mkdir(parents=True, exist_ok=True)
    pq.write_table(found.filter(pa.array(numbers < split)), root / "data/chunk-000/file-000.parquet")
    pq.write_table(found.filter(pa.array(numbers >= split)), root / "data/chunk-000/file-001.parquet")
    tasks = pa.table({"task_index": [0, 1], "__index_level_0__": TASKS})
    pq.write_table(tasks, root / "meta/tasks.parquet")
    write_episodes(root, found)
    return root


def write_episodes(root: Path, found: pa.Table, **columns: Any) -> None:
    values, lengths = np.unique(found["episode_index"].to_numpy(), return_counts=True)
    episodes = pa.table(
        {
            "episode_index": values,
            "tasks": [[TASKS[task] for task in TASK[number % 4]] for number in values],
            "length": lengths,
            "stats/action/mean": [[1.0]] * len(values),
            **columns,
        }
    )
    (root / "meta/episodes/chunk-000").mkdir(parents=True, exist_ok=True)
    pq.write_table(episodes, root / "meta/episodes/chunk-000/file-000.parquet")


def write_v2(root: Path) -> Path:
    found = table()
    write_info(root, found, "v2.1")
    numbers = found["episode_index"].to_numpy()
    (root / "data/chunk-000").mkdir(parents=True)
    for number in range(len(LENGTHS)):
        pq.write_table(
            found.filter(pa.array(numbers == number)), root / f"data/chunk-000/episode_{number:06d}.parquet"
        )
    tasks = [{"task_index": place, "task": text} for place, text in enumerate(TASKS)]
    (root / "meta/tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    episodes = [
        {"episode_index": number, "tasks": [TASKS[task] for task in TASK[number]], "length": length}
        for number, length in enumerate(LENGTHS)
    ]
    (root / "meta/episodes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in episodes))
    return root


def load(path: Path) -> Any:
    with expstore.open(path, mode="r") as rb:
        return rb[:]


# -- the reader ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v2.1", "v3.0", "shuffled"])
def test_episodes(tmp_path: Path, version: str) -> None:
    root = tmp_path / "raw"
    if version == "v2.1":
        write_v2(root)
    else:
        found = table()
        order = np.random.default_rng(0).permutation(len(found)) if version == "shuffled" else None
        write_v3(root, found if order is None else found.take(order))
    done = import_dataset(LeRobotReader(root), tmp_path / "a.exp")
    assert (done.rows, done.episodes) == (14, 4)
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows, meta = rb[:], rb.meta["lerobot"]
        found = rb.sql("SELECT length, status, source, info FROM episodes ORDER BY episode_id").fetchall()
    ends = ["terminated", "truncated", "terminated", "terminated"]
    assert [(length, status) for length, status, *_ in found] == list(zip(LENGTHS, ends, strict=True))
    sources = [source.split("@")[0] for _, _, source, _ in found]
    files = 2 * ["data/chunk-000/file-000.parquet"] + 2 * ["data/chunk-000/file-001.parquet"]
    assert sources == (4 * ["data/chunk-000"] if version == "v2.1" else files)
    assert [json.loads(info) for *_, info in found] == [
        {"episode_index": 0, "task": TASKS[0], "note": "episode 0"},
        {"episode_index": 1, "task": TASKS[1], "note": "episode 1"},
        {"episode_index": 2, "tasks": TASKS, "note": "episode 2"},
        {"episode_index": 3, "task": TASKS[0], "note": "episode 3"},
    ]
    assert meta["tasks"] == {"0": TASKS[0], "1": TASKS[1]}
    assert (meta["fps"], meta["robot_type"], meta["left_out"]) == (FPS, "so100", [])
    truth = table()
    number, frame = truth["episode_index"].to_numpy(), truth["frame_index"].to_numpy()
    assert rows["episode"].tolist() == number.tolist()
    assert rows["frame"].tolist() == frame.tolist()
    state = np.stack([100.0 * number + frame, -1.0 * frame], 1)
    images = np.stack([pixels(20 * n + t).transpose(2, 0, 1) for n, t in zip(number, frame, strict=True)])
    np.testing.assert_array_equal(rows["observation", "state"], state)
    np.testing.assert_array_equal(rows["observation", "image", "top"], images)
    np.testing.assert_array_equal(rows["action"], state[:, :1] / 8)
    np.testing.assert_array_equal(rows["next", "reward"], frame[:, None].astype(np.float32) / 4)
    last = np.cumsum(LENGTHS) - 1
    inside = np.setdiff1d(np.arange(14), last)
    np.testing.assert_array_equal(rows["next", "observation", "state"][inside], state[inside + 1])
    np.testing.assert_array_equal(rows["next", "observation", "image", "top"][inside], images[inside + 1])
    np.testing.assert_array_equal(rows["next", "observation", "effort"][inside], frame[inside + 1] / 2)
    assert not rows["next", "observation", "state"][last].any()
    assert not rows["next", "observation", "image", "top"][last].any()
    assert np.flatnonzero(rows["next", "done"]).tolist() == last.tolist()
    assert torch.equal(rows["next", "terminal"], rows["next", "done"])
    assert np.flatnonzero(rows["next", "truncated"]).tolist() == [last[1]]
    assert not rows["done"].any()


def test_rows_equal_torchrls(tmp_path: Path) -> None:
    root = write_v3(tmp_path / "raw", table(images=False))
    snapshot: Any = object.__new__(theirs._LeRobotSnapshot)
    snapshot.root, snapshot.video_keys = root, []
    snapshot.tasks = snapshot._load_tasks()
    files = sorted((root / "data").rglob("*.parquet"))
    whole = pa.concat_tables([pq.read_table(file) for file in files])
    columns = {
        name: values.to_pylist() if name == "note" else torch.tensor(values.to_pylist())
        for name, values in zip(whole.column_names, whole.columns, strict=True)
    }
    # `datasets`, which reads the files for TorchRL, gives columns in this form.

    class Columns(dict[str, Any]):
        column_names = whole.column_names

    snapshot.hf_dataset = SimpleNamespace(with_format=lambda kind: Columns(columns))
    extracted = theirs.LeRobotExperienceReplay._extract_columns(snapshot)
    expected = theirs.lerobot_columns_to_tensordict(extracted)
    import_dataset(LeRobotReader(root), tmp_path / "a.exp")
    rows = load(tmp_path / "a.exp")
    # Texts are facts about episodes; the order of the rows is the index.
    others = {"note", "language_instruction", "index"}
    assert expected["index"].tolist() == list(range(14))
    for key in set(expected.keys(True, True)) - others:
        # A list of Python's floats, of which the columns are made, does not tell float64.
        torch.testing.assert_close(rows[key], expected[key], check_dtype=key != ("observation", "effort"))
    assert not others & set(rows.keys())
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        tasks = rb.meta["lerobot"]["tasks"]
    assert [tasks[str(task)] for task in rows["task_index"].tolist()] == expected["language_instruction"]
    # Ours has the next observations and the flags of TED; the flag of the file is `next.terminal`.
    assert ("next", "observation", "state") not in expected.keys(True, True)
    assert ("next", "terminated") not in expected.keys(True, True)


def test_key_map(tmp_path: Path) -> None:
    root = write_v3(tmp_path / "raw", table(images=False))
    reader = LeRobotReader(
        root,
        key_map={
            "action": ("control", "arm"),
            "observation.state": "state",
            "next.done": "stop",
            "note": "n",
        },
    )
    assert reader.options()["key_map"]["action"] == ["control", "arm"]
    import_dataset(reader, tmp_path / "a.exp")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows = rb[:]
        assert rb.sql("SELECT info->>'n' FROM episodes ORDER BY episode_id").fetchall()[2] == ("episode 2",)
    assert rows["state"][:4, 0].tolist() == [0, 1, 2, 100]
    assert rows["control", "arm"].shape == (14, 1)
    assert torch.equal(rows["stop"], rows["next", "done"][:, 0])
    assert "action" not in set(rows.keys())
    for clash in (("observation", "state", "effort"), ("observation", "state"), ("next", "reward", "x")):
        with pytest.raises(SchemaError, match="are both stored as|inside it"):
            import_dataset(LeRobotReader(root, key_map={"observation.effort": clash}), tmp_path / "b.exp")


def test_ends_that_the_files_name(tmp_path: Path) -> None:
    found = table(images=False).drop_columns(["next.success"])
    ends = np.cumsum(LENGTHS) - 1
    flags = np.zeros((2, 14), bool)
    flags[0, ends[0]] = flags[1, ends[1]] = True
    for name, values in zip(("next.terminated", "next.truncated"), flags, strict=True):
        found = found.append_column(name, pa.array(values))
    done = found["next.done"].to_numpy(zero_copy_only=False).copy()
    done[ends[2]] = False
    done[ends[2] - 1] = True  # not the last frame: it ends nothing
    found = found.set_column(found.column_names.index("next.done"), "next.done", pa.array(done))
    wide = {"observation.state": {"dtype": "float32", "shape": [2, 1]}}
    root = write_v3(
        tmp_path / "raw", found, split=0, features=features(found) | wide
    )  # the first file is empty
    import_dataset(LeRobotReader(root), tmp_path / "a.exp")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert rb[:]["observation", "state"].shape == (14, 2, 1)
        status = rb.sql("SELECT status FROM episodes ORDER BY episode_id").fetchall()
        assert np.flatnonzero(rb[:]["next", "terminal"]).tolist() == np.flatnonzero(done).tolist()
    assert [name for (name,) in status] == ["terminated", "truncated", "cut", "truncated"]


@pytest.mark.slow
def test_files_that_do_not_fit(tmp_path: Path) -> None:
    root = tmp_path / "raw"
    target = tmp_path / "a.exp"

    def fail(match: str, found: pa.Table, error: type[Exception] = SchemaError, **more: Any) -> None:
        write_v3(root, found, **more)
        with pytest.raises(error, match=match):
            import_dataset(LeRobotReader(root), target)
        assert not target.exists()

    good = table()
    fail("has no column 'index'", good.drop_columns(["index"]))
    fail(r"have 14 rows, but meta/info\.json says 15", good, total_frames=15)
    fail("version 'v1.6'", good, codebase_version="v1.6")
    fail("does not describe a LeRobot data set", good, fps=None)
    ragged = pa.array([[1.0]] * 13 + [[1.0, 2.0]], pa.list_(pa.float32()))
    fail("'action' has between 1 and 2 values", good.set_column(2, "action", ragged))
    empty = pa.array([1.0] * 13 + [None])
    fail("'observation.effort' has missing values", good.set_column(1, "observation.effort", empty))
    twice = pa.array([0, 0, *range(2, 14)])
    fail("two rows of the same index", good.set_column(9, "index", twice))
    apart = pa.array([0, 1, 2, 7, *range(3, 7), *range(8, 14)])
    fail("have rows of the same index", good.set_column(9, "index", apart))
    image = good.column_names.index("observation.images.top")
    kind = good.schema.field("observation.images.top").type
    outside = pa.array([{"bytes": None, "path": "images/0.png"}] * 14, kind)
    fail("images in separate files", good.set_column(image, "observation.images.top", outside))
    broken = pa.array([{"bytes": b"abc", "path": None}] * 14, kind)
    with pytest.raises(expstore.errors.StorageError, match="an image of 3 bytes cannot be decoded"):
        import_dataset(
            LeRobotReader(write_v3(root, good.set_column(image, "observation.images.top", broken))), target
        )
    write_v3(root, good)
    write_episodes(root, table(lengths=[3, 4, 2, 6]))
    with pytest.raises(SchemaError, match="episode 3 has 5 rows, but the metadata say 6"):
        import_dataset(LeRobotReader(root), target)
    write_v3(root, good)
    second = root / "data/chunk-000/file-001.parquet"
    data = second.read_bytes()
    second.write_bytes(data[: len(data) // 2])
    with pytest.raises(SchemaError, match=r"file-001\.parquet is not a Parquet file"):
        LeRobotReader(root)
    second.unlink()
    with pytest.raises(SchemaError, match=r"have 7 rows, but meta/info\.json says 14"):
        LeRobotReader(root)
    with pytest.raises(NotFoundError, match=r"no folder .*none"):
        LeRobotReader(tmp_path / "none")
    assert not target.exists()
    assert run(["import", str(write_v3(root, good)), str(target), "--format", "lerobot"]) == 0


# -- videos ----------------------------------------------------------------------------------------------


def write_video(path: Path, values: list[int]) -> None:
    av: Any = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 32, 16, "yuv420p", 4
        stream.bit_rate = 4_000_000
        for value in values:
            gray = np.full((16, 32, 3), value, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")))
        container.mux(stream.encode())


def with_video(root: Path, version: int) -> Path:
    found = table(images=False)
    video = {"observation.images.front": {"dtype": "video", "shape": [16, 32, 3]}}
    values = [[20 + 12 * n + 7 * t for t in range(length)] for n, length in enumerate(LENGTHS)]
    if version == 3:
        path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        write_v3(root, found, features={**features(found), **video}, video_path=path)
        place = "videos/observation.images.front"
        # The frames of the first three episodes are in one file, in another order than the rows.
        write_video(root / f"{place}/chunk-000/file-000.mp4", values[1] + values[0] + values[2])
        write_video(root / f"{place}/chunk-000/file-001.mp4", values[3])
        starts = [LENGTHS[1] / FPS, 0.0, (LENGTHS[0] + LENGTHS[1]) / FPS, 0.0]
        where = {f"{place}/chunk_index": [0] * 4, f"{place}/file_index": [0, 0, 0, 1]}
        write_episodes(root, found, **where, **{f"{place}/from_timestamp": starts})
    else:
        write_v2(root)
        info = json.loads((root / "meta/info.json").read_text())
        info["features"].update(video)
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        (root / "meta/info.json").write_text(json.dumps(info))
        for number, gray in enumerate(values):
            write_video(root / f"videos/chunk-000/observation.images.front/episode_{number:06d}.mp4", gray)
    return root


@pytest.mark.parametrize("version", [2, 3])
def test_videos(tmp_path: Path, version: int) -> None:
    root = with_video(tmp_path / "raw", version)
    import_dataset(LeRobotReader(root), tmp_path / "a.exp")
    rows = load(tmp_path / "a.exp")
    number, frame = rows["episode"].numpy(), rows["frame"].numpy()
    frames = rows["observation", "image", "front"]
    assert frames.shape == (14, 3, 16, 32)
    assert frames.dtype is torch.uint8
    found = frames.float().mean((1, 2, 3)).numpy()
    np.testing.assert_allclose(found, 20 + 12 * number + 7 * frame, atol=3)
    assert torch.equal(rows["next", "observation", "image", "front"][0], frames[1])
    parts = LeRobotReader(root).parts()
    videos = [[file.name for file in part.files if file.suffix == ".mp4"] for part in parts]
    assert videos == (
        [["file-000.mp4"], ["file-000.mp4", "file-001.mp4"]]
        if version == 3
        else [[f"episode_{n:06d}.mp4" for n in range(4)]]
    )


def test_videos_left_out(tmp_path: Path) -> None:
    root = with_video(tmp_path / "raw", 3)
    import_dataset(LeRobotReader(root, decode_video=False), tmp_path / "a.exp")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert rb.meta["lerobot"]["left_out"] == ["observation.images.front"]
        assert ("observation", "image", "front") not in rb[:].keys(True)


@pytest.mark.slow
def test_videos_that_do_not_fit(tmp_path: Path) -> None:
    root = with_video(tmp_path / "raw", 3)
    file = root / "videos/observation.images.front/chunk-000/file-001.mp4"
    write_video(file, [1, 2])
    with pytest.raises(SchemaError, match=r"file-001\.mp4 has no frame at 0\.200 s"):
        import_dataset(LeRobotReader(root), tmp_path / "a.exp")
    file.write_bytes(b"no video")
    with pytest.raises(expstore.errors.StorageError, match=r"file-001\.mp4 is not a video"):
        import_dataset(LeRobotReader(root), tmp_path / "a.exp")
    file.unlink()
    with pytest.raises(NotFoundError, match="decode_video=False"):
        import_dataset(LeRobotReader(root), tmp_path / "a.exp")


def test_without_av(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_v3(
        tmp_path / "raw", table(images=False), features={"x": {"dtype": "video", "shape": [4, 4, 3]}}
    )
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'expstore\[video\]'"):
        LeRobotReader(root)
    LeRobotReader(root, decode_video=False)


# -- columns as a TensorDict -----------------------------------------------------------------------------


def test_columns_to_tensordict_equals_torchrl() -> None:
    columns = {
        "observation.state": torch.randn(4, 7),
        "observation.images.top": torch.zeros(4, 3, 8, 8, dtype=torch.uint8),
        "observation.environment_state": [1.0, 2.0, 3.0, 4.0],
        "action": torch.randn(4, 7),
        "episode_index": torch.tensor([0, 0, 1, 1]),
        "frame_index": [0, 1, 0, 1],
        "task": ["pick", "pick", "place", "place"],
        "next.reward": torch.randn(4),
        "next.done": torch.tensor([False, True, False, True]),
        "other": torch.randn(4),
    }
    maps: tuple[dict[str, Any] | None, ...] = (
        None,
        {"action": ("a", "b"), "task": "text", "episode_index": ("collector", "traj_ids")},
    )
    for key_map in maps:
        ours = lerobot_columns_to_tensordict(columns, key_map=key_map)
        expected = theirs.lerobot_columns_to_tensordict(columns, key_map=key_map)
        assert set(ours.keys(True, True)) == set(expected.keys(True, True))
        assert ours.batch_size == expected.batch_size
        for key, value in expected.items(True, True):
            if isinstance(value, torch.Tensor):
                assert torch.equal(ours[key], value)
                assert ours[key].dtype is value.dtype
        name = "text" if key_map else "language_instruction"
        assert ours[name] == expected[name] == columns["task"]
    for wrong in ({}, {"task": ["pick", 1]}):
        messages = []
        for convert in (lerobot_columns_to_tensordict, theirs.lerobot_columns_to_tensordict):
            with pytest.raises(ValueError, match=r"Column 'task' mixes|infer the number") as caught:
                convert(wrong)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
