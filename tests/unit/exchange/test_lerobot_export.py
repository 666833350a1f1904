"""The export of LeRobot data sets: round trips, statistics, splits, files, and exports that are killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import expstore
from expstore.cli.app import run
from expstore.datasets import LeRobotReader, import_dataset
from expstore.disk.files import Disk
from expstore.errors import ArgumentError, ExpStoreError, NotFoundError, SchemaError, StateError, StorageError
from expstore.exchange import export_lerobot, lerobot_export, rows
from expstore.exchange.lerobot_format import lerobot_column, lerobot_key
from tests.support.commands import Cli
from tests.support.gated_disk import GatedDisk, refuse

pytestmark = pytest.mark.usefixtures("no_syncs")
pytest.importorskip("av")

FPS = 10
#: Length, split, task and end of the episodes, as they are written.
EPISODES = [
    (5, "eval", "lift", "truncated"),
    (3, None, "push", "terminated"),
    (4, None, "lift", "cut"),
    (1, None, "push", "terminated"),
    (6, "eval", "push", "terminated"),
]
#: The order of the data set: "train" is the first split.
ORDER = [1, 2, 3, 0, 4]


def pictures(count: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return frames of smooth colours."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    time = np.arange(count)[:, None, None]
    channels = [
        128 + 100 * np.sin((x + time) / 9 + seed + channel) * np.cos(y / 11) for channel in range(shape[2])
    ]
    return np.stack(np.broadcast_arrays(*channels), -1).astype(np.uint8)


def steps(number: int, count: int, end: str) -> dict[str, Any]:
    """Return the rows of an episode with two cameras: one with odd sides, one grey, channels first."""
    rng = np.random.default_rng(number)
    state = rng.normal(size=(count + 1, 3)).astype(np.float32)
    top = pictures(count + 1, (33, 47, 3), number)
    wrist = np.moveaxis(pictures(count + 1, (32, 48, 1), number + 9), -1, 1)
    last = np.arange(count)[:, None] == count - 1
    following = {
        "observation": {"state": state[1:], "image": {"top": top[1:], "wrist": wrist[1:]}},
        "reward": rng.normal(size=(count, 1)).astype(np.float32),
        "success": last & (end == "terminated"),
        "terminated": last & (end == "terminated"),
        "truncated": last & (end == "truncated"),
        "done": last & (end != "cut"),
    }
    return {
        "observation": {"state": state[:-1], "image": {"top": top[:-1], "wrist": wrist[:-1]}},
        "action": rng.normal(size=(count, 2)).astype(np.float32),
        "map": rng.normal(size=(count, 2, 3)).astype(np.float32),
        "seen": rng.random(count) < 0.5,
        "count": rng.integers(0, 9, count),
        "next": following,
    }


def make_store(path: Path) -> Path:
    with expstore.open(path, seed=0, meta={"fps": FPS, "robot_type": "so100"}) as rb:
        for number, (count, split, task, end) in enumerate(EPISODES):
            rb.extend(steps(number, count, end), split=split, episode_info={"task": task})
            if end == "cut":
                rb.episodes.end()
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test changes."""
    return make_store(tmp_path_factory.mktemp("stores") / "run.exp")


@pytest.fixture(scope="module")
def whole(store: Path) -> dict[str, bytes]:
    """Return the files of the data set of that store."""
    export_lerobot(store, store.with_name("whole"))
    return bytes_of(store.with_name("whole"))


def frames_of(path: Path) -> dict[str, np.ndarray]:
    """Return the fields of a store's rows that an export and an import keep, in the order of the data set."""
    with expstore.open(path, mode="r") as rb:
        order = rb.sql(
            "SELECT t._id FROM transitions AS t JOIN episodes AS e ON e.episode_id = t._episode "
            "ORDER BY e.split <> 'train', e.split, t._episode, t._step"
        ).df()["_id"]
        whole = rb[rb.storage.geometry.index_of(order.to_numpy())]
        keys = [("action",), ("map",), ("seen",), ("count",), ("observation", "state")]
        keys += [("next", name) for name in ("reward", "success", "done", "terminated", "truncated")]
        keys += [("observation", "image", name) for name in ("top", "wrist")]
        return {".".join(key): whole[key].numpy() for key in keys if key in whole.keys(True)}


def bytes_of(root: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def signal_to_noise(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the PSNR of pictures in dB."""
    error = np.mean((found.astype(float) - expected) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def read_table(root: Path, folder: str) -> list[dict[str, Any]]:
    return [
        row for path in sorted((root / folder).rglob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize("images", [False, True])
def test_our_reader_reads_what_was_exported(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: bool
) -> None:
    """Also if a file has several episodes."""
    monkeypatch.setattr(lerobot_export, "_SHARE", 1)
    told: list[str] = []
    done = export_lerobot(store, tmp_path / "out", images=images, tell=told.extend)
    assert (done.rows, done.episodes, done.left_out) == (19, 5, 0)
    assert not (tmp_path / "out/.export").exists()
    assert len(told) == 1
    assert all(f"next.observation.{name}" in told[0] for name in ("state", "image.top", "image.wrist"))
    import_dataset(LeRobotReader(tmp_path / "out"), tmp_path / "back.exp")
    found, expected = frames_of(tmp_path / "back.exp"), frames_of(store)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if "image" in name:
            values = np.moveaxis(values, -1, 1) if values.shape[-1] == 3 else np.repeat(values, 3, 1)
            assert found[name].shape == values.shape
            assert signal_to_noise(found[name], values) > (100 if images else 35)
        else:
            np.testing.assert_array_equal(found[name].reshape(values.shape), values)
    with expstore.open(tmp_path / "back.exp", mode="r") as rb:
        about = rb.meta["lerobot"]
        known = rb.sql(
            "SELECT length, split, info ->> '$.task', status FROM episodes ORDER BY episode_id"
        ).fetchall()
    assert known == [(n, split or "train", task, end) for n, split, task, end in (EPISODES[e] for e in ORDER)]
    assert (about["fps"], about["robot_type"], about["tasks"]) == (FPS, "so100", {"0": "push", "1": "lift"})


def test_an_import_is_exported_as_it_was(store: Path, tmp_path: Path) -> None:
    """The names, the tasks of the frames and `next.done` are those of the first data set."""
    export_lerobot(store, tmp_path / "one", images=True)
    import_dataset(LeRobotReader(tmp_path / "one"), tmp_path / "back.exp")
    export_lerobot(tmp_path / "back.exp", tmp_path / "two", images=True)
    for folder in ("data", "meta/episodes"):
        one, two = read_table(tmp_path / "one", folder), read_table(tmp_path / "two", folder)
        for row in (*one, *two):
            row.pop(lerobot_export.EPISODE_ID, None)
        assert one == two
    about = [json.loads((tmp_path / name / "meta/info.json").read_bytes()) for name in ("one", "two")]
    assert about[0]["features"].keys() == about[1]["features"].keys()
    assert about[0]["splits"] == about[1]["splits"] == {"train": "0:3", "eval": "3:5"}


def test_statistics_are_those_of_the_frames(store: Path, tmp_path: Path) -> None:
    export_lerobot(store, tmp_path / "out")
    stats = json.loads((tmp_path / "out/meta/stats.json").read_bytes())
    frames = frames_of(store)
    frames["observation.images.top"] = frames.pop("observation.image.top") / 255
    frames["observation.images.wrist"] = (
        np.repeat(np.moveaxis(frames.pop("observation.image.wrist"), 1, -1), 3, -1) / 255
    )
    bounds = np.cumsum([0, *(EPISODES[number][0] for number in ORDER)])
    episodes = read_table(tmp_path / "out", "meta/episodes")
    names = {name: frames[name].astype(float) for name in frames if name in stats}
    assert len(names) == 12
    for name, values in names.items():
        is_image = "images" in name
        axes = (0, 1, 2) if is_image else (0,)
        shape = (3, 1, 1) if is_image else values.shape[1:] or (1,)
        parts = [*((row, slice(*bounds[n : n + 2])) for n, row in enumerate(episodes)), (None, slice(None))]
        for row, where in parts:
            own = values[where]
            expected = {
                "min": own.min(axes),
                "max": own.max(axes),
                "mean": own.mean(axes),
                "std": own.std(axes),
            }
            if row is not None:
                for number, key in ((0.01, "q01"), (0.5, "q50"), (0.99, "q99")):
                    expected[key] = np.quantile(own, number, axes, method="inverted_cdf")
            for key, wanted in expected.items():
                found = np.array(stats[name][key] if row is None else row[f"stats/{name}/{key}"])
                np.testing.assert_allclose(found, np.reshape(wanted, shape), rtol=1e-9, atol=1e-12)
            count = stats[name]["count"] if row is None else row[f"stats/{name}/count"]
            assert count == [len(own)]


@pytest.mark.slow
def test_files_follow_the_sizes_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files grow with the data set, up to the limits of LeRobot; the frames are the same."""
    with expstore.open(tmp_path / "run.exp", meta={"fps": FPS}) as rb:
        for number in range(40):
            rb.extend(
                {"action": np.full((2, 1), number), "next": {"terminated": np.array([[False], [True]])}}
            )
        found = {}
        for share, most in ((1, 100), (32, 100), (1, 0)):
            monkeypatch.setattr(lerobot_export, "_SHARE", share)
            monkeypatch.setattr(lerobot_export, "DATA_MIB", most)
            root = tmp_path / f"{share}-{most}"
            assert export_lerobot(rb, root).rows == 80
            lengths = [len(pq.read_table(path)) for path in sorted((root / "data").rglob("*.parquet"))]
            places = [row["data/file_index"] for row in read_table(root, "meta/episodes")]
            assert places == [number for number, length in enumerate(lengths) for _ in range(length // 2)]
            found[share, most] = lengths
            assert [row["action"] for row in read_table(root, "data")] == np.repeat(np.arange(40), 2).tolist()
    assert found[1, 100] == [2, 2, 4, 8, 16, 32, 16]
    assert found[32, 100] == [2] * 33 + [4] * 3 + [2]
    assert found[1, 0] == [2] * 40


# -- exports that end early -------------------------------------------------------------------------------


class MortalDisk(Disk):
    """End the process before an operation; writes that follow one another in a file are one operation."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.acts, self.last = 0, last
        self._former: tuple[str, Path] | None = None

    def gate(self, act: str, path: Path) -> None:
        self.acts += (act, path) != self._former
        self._former = act, path
        if self.acts >= self.last:
            os._exit(9)


def export_and_die(store: Path, target: Path, act: int) -> bool:
    """Export in a child that ends at an operation; return whether it ended before it was done."""
    pid = os.fork()
    if not pid:
        try:
            export_lerobot(store, target, disk=MortalDisk(act))
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


def check_prefix(root: Path, whole: dict[str, np.ndarray], scratch: Path) -> int:
    """Check that a data set has the first episodes of another one; return their number."""
    import_dataset(LeRobotReader(root), scratch)
    found = frames_of(scratch)
    with expstore.open(scratch, mode="r") as rb:
        lengths = [n for (n,) in rb.sql("SELECT length FROM episodes ORDER BY episode_id").fetchall()]
    assert lengths == [EPISODES[number][0] for number in ORDER[: len(lengths)]]
    assert sum(lengths) == len(found["action"])
    for name, values in found.items():
        np.testing.assert_array_equal(values, whole[name][: len(values)])
    return len(lengths)


def check_kills(folder: Path, acts: list[int]) -> None:
    store = make_store(folder / "run.exp")
    export_lerobot(store, folder / "whole")
    import_dataset(LeRobotReader(folder / "whole"), folder / "whole.exp")
    frames, expected = frames_of(folder / "whole.exp"), bytes_of(folder / "whole")
    counts = set()
    for act in acts:
        out = folder / f"out{act}"
        assert export_and_die(store, out, act)
        counts.add(
            check_prefix(out, frames, folder / f"{act}.exp") if (out / "meta/info.json").exists() else 0
        )
        if (out / ".export").exists() or not out.exists():
            export_and_die(store, out, act // 2)
            if (out / ".export").exists() or not out.exists():
                export_lerobot(store, out)
        assert bytes_of(out) == expected
    assert len(counts) > min(3, len(acts) // 2)


def count_acts(folder: Path) -> int:
    disk = MortalDisk(1 << 60)
    export_lerobot(make_store(folder / "count.exp"), folder / "counted", disk=disk)
    return disk.acts


@pytest.mark.guarantee(
    "exchange/lerobot",
    "A killed export of a LeRobot data set leaves whole episodes; the same call continues it, to the bit.",
)
@pytest.mark.slow
def test_a_killed_export_is_continued(tmp_path: Path) -> None:
    check_kills(tmp_path, np.linspace(3, count_acts(tmp_path) - 2, 3).astype(int).tolist())


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_killed_export_is_continued_at_every_act(tmp_path: Path) -> None:
    check_kills(tmp_path, list(range(1, count_acts(tmp_path) + 1)))


def test_an_interrupted_export_is_continued_with_the_same_episodes(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Also if episodes were written meanwhile, and only with the same arguments."""
    store = make_store(tmp_path / "run.exp")
    export_lerobot(store, tmp_path / "whole")
    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export_lerobot(store, out, progress=stop)
    assert json.loads((out / "meta/info.json").read_bytes())["total_episodes"] == 2
    with expstore.open(store) as rb:
        rb.extend(steps(9, 4, "terminated"))
    with pytest.raises(StateError, match="whose fps is 10 and not 20"):
        export_lerobot(store, out, fps=20)
    with pytest.raises(StateError, match="whose store is"):
        export_lerobot(make_store(tmp_path / "other.exp"), out)
    assert export_lerobot(store, out).rows == 19
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    with pytest.raises(StateError, match="out exists already"):
        export_lerobot(store, out)


@pytest.mark.parametrize("part", ["0.part", "2.part", "3.part", "info.json"])
def test_a_full_disk_leaves_whole_episodes(
    store: Path, whole: dict[str, bytes], tmp_path: Path, part: str
) -> None:
    """While a video, rows or metadata of the third file are written."""
    out = tmp_path / "out"
    before = refuse("write", "rename", where=part)
    opened: list[str] = []

    def fill(act: str, path: Path) -> None:
        opened.extend([act] if path.name == part and act in ("create", "rename") else [])
        if len(opened) >= 3:
            before(act, path)

    with pytest.raises(StorageError, match="no (write|rename) today"):
        export_lerobot(store, out, disk=GatedDisk(fill))
    count = json.loads((out / "meta/info.json").read_bytes())["total_episodes"]
    assert 0 < count < 5
    assert import_dataset(LeRobotReader(out), tmp_path / "back.exp").episodes == count
    assert export_lerobot(store, out).rows == 19
    assert bytes_of(out) == whole


def test_episodes_whose_rows_are_overwritten_are_left_out(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, asked = rows.read_present, []

    def overwritten(storage: Any, ids: Any, places: Any) -> Any:
        asked.append(ids.size)
        found, columns = read(storage, ids, places)
        kept = slice(len(asked) == 2, None)  # the first row of the second episode
        return found[kept], [column[kept] for column in columns]

    monkeypatch.setattr(rows, "read_present", overwritten)
    done = export_lerobot(store, tmp_path / "out")
    assert (done.rows, done.episodes, done.left_out) == (15, 4, 4)
    import_dataset(LeRobotReader(tmp_path / "out"), tmp_path / "back.exp")
    found, whole = frames_of(tmp_path / "back.exp"), frames_of(store)
    kept = np.r_[0:3, 7:19]
    np.testing.assert_array_equal(found["action"], whole["action"][kept])
    top = np.moveaxis(whole["observation.image.top"][kept], -1, 1)
    assert signal_to_noise(found["observation.image.top"], top) > 35


# -- columns and arguments --------------------------------------------------------------------------------


def test_what_can_be_stored_and_what_is_left_out(tmp_path: Path) -> None:
    """Texts, tasks of frames, bfloat16, stacked frames; complex numbers and lists are named."""
    last = torch.tensor([[False], [False], [True]])
    with expstore.open(tmp_path / "run.exp", layout="arrow", meta={"fps": FPS}) as rb:
        row = {"task": ["a", "b", "a"], "note": ["x", "", "z"], "tokens": [[1], [2, 3], []]}
        fixed = {
            "observation": torch.ones(3, 2, dtype=torch.bfloat16),
            "stack": torch.zeros(3, 4, 16, 16, dtype=torch.uint8),
            "wave": torch.zeros(3, dtype=torch.complex64),
        }
        rb.extend({**row, **fixed, "done": last & False, "next": {"terminated": last}})
        told: list[str] = []
        export_lerobot(rb, tmp_path / "out", tell=told.extend)
    info = json.loads((tmp_path / "out/meta/info.json").read_bytes())
    kinds = {name: (one["dtype"], one["shape"]) for name, one in info["features"].items()}
    assert kinds["observation.state"] == ("float32", [2])
    assert kinds["stack"] == ("uint8", [4, 16, 16])
    assert kinds["note"] == ("string", [1])
    assert not {"wave", "tokens", "task", "done"} & kinds.keys()
    assert len(told) == 1
    assert all(name in told[0] for name in ("wave (complex64", "tokens (list", "done"))
    assert [row["task_index"] for row in read_table(tmp_path / "out", "data")] == [0, 1, 0]
    assert read_table(tmp_path / "out", "meta/episodes")[0]["tasks"] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ArgumentError, "frames per second are not known"),
        ({"fps": 0.5}, ArgumentError, "fps=0.5 cannot be used"),
        ({"fps": 5, "codec": "mpeg"}, ArgumentError, "codec 'mpeg' is unknown"),
        ({"fps": 5, "episodes": [2]}, NotFoundError, "no episode has ended"),
        ({"fps": 5, "fields": ["gone"]}, SchemaError, "no field 'gone'"),
        ({"fps": 5, "fields": ["next.terminated"]}, SchemaError, "none of the fields can be stored"),
        ({"fps": 5, "fields": ["pixels", "observation.image.pixels"]}, SchemaError, "two fields would both"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[ExpStoreError], words: str
) -> None:
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    with expstore.open(tmp_path / "run.exp") as rb:
        for ended in (True, False):
            flags = np.array([[False], [ended]])
            fields = {"pixels": frames, "observation": {"image": {"pixels": frames}}}
            rb.extend({**fields, "next": {"terminated": flags}})
        with pytest.raises(error, match=words):
            export_lerobot(rb, tmp_path / "out", **{"fields": ["pixels"], **options})
    assert os.listdir(tmp_path) == ["run.exp"]


def test_notes_say_which_episodes_lack_an_end_or_a_task(tmp_path: Path) -> None:
    told: list[str] = []
    with expstore.open(tmp_path / "run.exp") as rb:
        for ended in (True, False):
            rb.extend({"x": np.zeros(2), "next": {"terminated": np.array([[False], [ended]])}})
        done = export_lerobot(rb, tmp_path / "one", fps=5, tell=told.extend)
        assert (done.rows, done.episodes) == (2, 1)
        assert told[0].startswith("1 episodes that have not ended")
        assert told[1].startswith("the task of 1 episodes will be empty")
        export_lerobot(rb, tmp_path / "two", fps=5, task="wait", tell=told.extend)
    assert len(told) == 3
    assert pq.read_table(tmp_path / "two/meta/tasks.parquet").to_pylist() == [
        {"task_index": 0, "task": "wait"}
    ]


@pytest.mark.parametrize(
    "name", ["observation.images.top", "observation.state", "action", "next.reward", "a.b"]
)
def test_names_return(name: str) -> None:
    key = lerobot_key(name, {})
    key = (key,) if isinstance(key, str) else key
    assert lerobot_column(key, is_image="images" in name) == name


def test_from_the_command_line(store: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    code, said, told = cli("export", store, out, "--lerobot", "--fps", "20", "--robot", "arm", "--images")
    assert (code, "out holds 19 rows of 5 episodes" in said) == (0, True)
    assert "next.observation.state" in told
    info = json.loads((out / "meta/info.json").read_bytes())
    assert (info["fps"], info["robot_type"], info["video_path"]) == (20, "arm", None)
    code, _, told = cli("export", store, tmp_path / "x", "--npz", "--fps", "20")
    assert (code, "--fps requires --lerobot" in told) == (2, True)
    assert run(["import", str(out), str(tmp_path / "back.exp")]) == 0


@pytest.mark.slow
def test_lerobot_reads_what_was_exported(store: Path, tmp_path: Path) -> None:
    """With the package itself, if it is installed."""
    dataset = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    export_lerobot(store, tmp_path / "out")
    frames = frames_of(store)
    found = dataset.LeRobotDataset("local/out", root=tmp_path / "out", video_backend="pyav")
    assert (len(found), found.num_episodes) == (19, 5)
    top = frames["observation.image.top"]
    for number in range(19):
        item = found[number]
        for name in ("action", "observation.state", "next.reward", "next.done", "next.success", "map"):
            np.testing.assert_array_equal(item[name].reshape(-1), frames[name][number].reshape(-1))
        visible = np.moveaxis(item["observation.images.top"].numpy() * 255, 0, -1)
        assert signal_to_noise(visible, top[number]) > 32
