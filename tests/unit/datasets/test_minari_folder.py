"""The Minari reader in each format, compared with TorchRL's class and Minari's reader."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.datasets import MinariReader, import_dataset
from expstore.errors import NotFoundError, SchemaError, StateError, StorageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing torchrl's collectors
    from torchrl.data.datasets.minari_data import MinariExperienceReplay

# Minari warns about what it was not told.
pytestmark = [pytest.mark.usefixtures("no_syncs"), pytest.mark.filterwarnings("ignore")]

LENGTHS = (4, 1, 11)
FORMATS = ("hdf5", "arrow", "parquet")


def buffers(*, images: bool = True) -> list[EpisodeBuffer]:
    found = []
    for number, count in enumerate(LENGTHS):
        at = np.arange(count + 1) + 100 * number
        observations: dict[str, Any] = {
            "pos": at[:, None].astype("f4") * np.ones((1, 2), "f4"),
            "grid": (at[:, None, None] + np.zeros((1, 2, 3))).astype("u1"),
            "kind": at % 5,
        }
        if images:
            observations["frame"] = (at[:, None, None, None] % 20 * 10 + np.zeros((1, 40, 40, 3))).astype(
                "u1"
            )
        found.append(
            EpisodeBuffer(
                id=number,
                seed=number + 5,
                options={"goal": {"x": number}},
                observations=observations,
                actions=(at[:-1] % 3, at[:-1, None] / 8),
                rewards=(at[:-1] / 3).tolist(),
                terminations=[False] * (count - 1) + [number < 2],
                truncations=[False] * (count - 1) + [number == 2],
                infos={"x": at[:, None] * 1.0, "deep": {"y": at[:, None] * 2}},
            )
        )
    return found


def create(root: Path, name: str, form: str, *, images: bool = True, jpeg: bool = False) -> Path:
    """Let Minari write a data set; `MINARI_DATASETS_PATH` is `root`."""
    inside: dict[str, Any] = {
        "pos": spaces.Box(-100, 1000, (2,), np.float32),
        "grid": spaces.Box(0, 255, (2, 3), np.uint8),
        "kind": spaces.Discrete(5),
    }
    if images:
        inside["frame"] = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    minari.create_dataset_from_buffers(
        name,
        buffer=buffers(images=images),
        observation_space=spaces.Dict(inside),
        action_space=spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 100, (1,), np.float64))),
        algorithm_name="random",
        data_format=form,
        jpeg_encoding=jpeg,
    )
    return root / name


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    return tmp_path / "root"


def imported(source: Path, target: Path) -> tuple[TensorDict, list[Any]]:
    import_dataset(MinariReader(source), target)
    with expstore.open(target, mode="r") as rb:
        said = rb.sql("SELECT length, status, info FROM episodes ORDER BY episode_id").fetchall()
        return rb[:], said


@pytest.mark.parametrize("jpeg", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_data_sets_written_by_minari_are_imported(
    tmp_path: Path, root: Path, form: str, jpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 4)
    rows, said = imported(create(root, "test/a-v0", form, jpeg=jpeg), tmp_path / "a.exp")
    assert [(length, status) for length, status, _ in said] == [
        (4, "terminated"),
        (1, "terminated"),
        (11, "truncated"),
    ]
    assert [json.loads(info) for *_, info in said] == [
        {"minari_id": n, "seed": n + 5, "options": {"goal": {"x": n}}} for n in range(3)
    ]
    first = 0
    for number, (count, truth) in enumerate(zip(LENGTHS, buffers(), strict=True)):
        steps = rows[first : first + count]
        for name in ("pos", "grid", "kind", "frame"):
            if name == "frame" and jpeg:
                continue
            values = truth.observations[name]
            np.testing.assert_array_equal(steps["observation", name].numpy(), values[:-1])
            np.testing.assert_array_equal(steps["next", "observation", name].numpy(), values[1:])
        np.testing.assert_array_equal(steps["action", "0"].numpy(), truth.actions[0])
        np.testing.assert_array_equal(steps["action", "1"].numpy(), truth.actions[1])
        np.testing.assert_array_equal(steps["next", "reward"][:, 0].numpy(), truth.rewards)
        assert steps["next", "reward"].dtype is torch.float64
        np.testing.assert_array_equal(steps["info", "x"].numpy(), truth.infos["x"][:-1])
        np.testing.assert_array_equal(
            steps["next", "info", "deep", "y"].numpy(), truth.infos["deep"]["y"][1:]
        )
        assert steps["episode"].tolist() == [number] * count
        assert steps["next", "done"][:, 0].tolist() == [False] * (count - 1) + [True]
        first += count
    assert first == len(rows)
    assert not rows["done"].any()
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert rb.meta["minari"]["total_steps"] == 16
    notes = MinariReader(root / "test/a-v0").notes()
    assert any("JPEG" in note for note in notes) is jpeg


@pytest.mark.slow
def test_jpeg_images_are_what_minari_reads(tmp_path: Path, root: Path) -> None:
    for form in FORMATS:
        name = f"test/{form}-v0"
        rows, _ = imported(create(root, name, form, jpeg=True), tmp_path / form)
        frames = [one.observations["frame"] for one in minari.load_dataset(name).iterate_episodes()]
        np.testing.assert_array_equal(
            rows["observation", "frame"].numpy(), np.concatenate([one[:-1] for one in frames])
        )
        np.testing.assert_array_equal(
            rows["next", "observation", "frame"].numpy(), np.concatenate([one[1:] for one in frames])
        )


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_long_episodes_which_minari_reads_wrong(tmp_path: Path, root: Path, form: str) -> None:
    count = 40_000
    at = np.arange(count + 1, dtype=np.float32)
    minari.create_dataset_from_buffers(
        "test/long-v0",
        buffer=[
            EpisodeBuffer(
                id=number,
                observations=at[:, None] + number,
                actions=at[:-1, None],
                rewards=at[:-1].tolist(),
                terminations=[False] * count,
                truncations=[False] * count,
            )
            for number in range(2)
        ],
        observation_space=spaces.Box(0, 1e6, (1,), np.float32),
        action_space=spaces.Box(0, 1e6, (1,), np.float32),
        data_format=form,
    )
    rows, said = imported(root / "test/long-v0", tmp_path / "a.exp")
    assert [(length, status) for length, status, _ in said] == 2 * [(count, "cut")]
    assert rows["next", "observation"][:, 0].tolist() == [*at[1:], *(at[1:] + 1)]
    assert [len(one) for one in minari.load_dataset("test/long-v0").iterate_episodes()] != 2 * [count]


# -- beside TorchRL's class ------------------------------------------------------------------------------


def plain(folder: Path) -> Path:
    """Write a data set as old ones of D4RL are, without Minari: a state, infos that lack the reset."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        for number, count in {0: 4, 10: 2, 2: 5}.items():
            group = file.create_group(f"episode_{number}")
            at = np.arange(count + 1.0) + 100 * number
            group.attrs.update({"id": number, "total_steps": count, "seed": np.uint64(number)})
            group["observations"] = at[:, None].repeat(3, 1)
            group["actions"] = -at[:-1, None]
            group["rewards"] = at[:-1] / 7
            group["terminations"] = np.arange(count) == (count - 1 if number else -1)
            group["truncations"] = np.arange(count) == (count - 1 if not number else -1)
            group["state/qpos"] = at[:, None] + 0.5
            group["infos/success"] = np.arange(count) % 2 == 0
            group["infos/power"] = at + 0.25
    about = {
        "total_episodes": 3,
        "total_steps": 11,
        "dataset_id": folder.name,
        "observation_space": json.dumps(
            {"type": "Box", "dtype": "float64", "shape": [3], "low": [-9.0] * 3, "high": [9e9] * 3}
        ),
        "action_space": json.dumps(
            {"type": "Box", "dtype": "float64", "shape": [1], "low": [-9e9], "high": [9.0]}
        ),
        "minari_version": "0.5.3",
        "data_format": "hdf5",
        "env_spec": None,
    }
    (folder / "data/metadata.json").write_text(json.dumps(about))
    return folder


def of_torchrl(name: str, target: Path) -> TensorDict:
    theirs = object.__new__(MinariExperienceReplay)
    facts = {"dataset_id": name, "_root": target, "split_trajs": False, "load_from_local_minari": True}
    theirs.__dict__.update(facts)
    return theirs._download_and_preproc()


def test_rows_equal_torchrls(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(root / "old-v0")
    # Theirs allocates files for the rows and never writes them: every value is 0.
    found = of_torchrl("old-v0", tmp_path / "zeros")
    assert not any(found[key].any() for key in ("observation", "action", "episode", ("next", "reward")))
    monkeypatch.setattr(TensorDict, "memmap_like", TensorDict.memmap)
    found = of_torchrl("old-v0", tmp_path / "theirs")
    rows, _ = imported(root / "old-v0", tmp_path / "a.exp")
    assert rows["episode"].tolist() == [0] * 4 + [2] * 5 + [10] * 2
    theirs = set(found.keys(include_nested=True, leaves_only=True))
    ours = set(rows.keys(include_nested=True, leaves_only=True)) - {"index"}
    for key in theirs:
        torch.testing.assert_close(found[key], rows[key], msg=str(key))
    # Ours has the flags at the root, too, as all data sets here.
    assert ours - theirs == {"done", "terminated", "truncated"}
    # Infos without the one of the reset have zeros there.
    assert rows["info", "success"][:4].tolist() == [False, True, False, True]
    assert rows["next", "info", "success"][:4].tolist() == [True, False, True, False]


@pytest.mark.slow
def test_pieces_of_long_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "old-v0")
    whole, facts = imported(tmp_path / "old-v0", tmp_path / "a.exp")
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 3)
    pieces, same_facts = imported(tmp_path / "old-v0", tmp_path / "b.exp")
    assert facts == same_facts
    for key in whole.keys(include_nested=True, leaves_only=True):
        assert (whole[key] == pieces[key]).all()


def test_observations_without_the_last_one(tmp_path: Path) -> None:
    """Some old data sets have as many observations as steps."""
    folder = plain(tmp_path / "old-v0")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for group in file.values():
            for name in ("observations", "state/qpos"):
                values = group[name][:-1]
                del group[name]
                group[name] = values
    rows, _ = imported(folder, tmp_path / "a.exp")
    last = np.cumsum([4, 5, 2]) - 1
    for key in ("observation", ("state", "qpos")):
        after = rows["next", *((key,) if isinstance(key, str) else key)]
        assert not after[last].any()
        inside = np.setdiff1d(np.arange(11), last)
        assert (after[inside] == rows[key][inside + 1]).all()


def test_text_is_a_fact(tmp_path: Path) -> None:
    folder = plain(tmp_path / "old-v0")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for number, group in enumerate(file.values()):
            count = len(group["observations"])
            group["infos/mission"] = np.array([f"go {number}"] * count, dtype="S5")
            group["infos/word"] = [f"{n}" for n in range(count)]
            group["infos/rare"] = np.zeros(1 if count > 3 else 9)
    rows, said = imported(folder, tmp_path / "a.exp")
    assert set(rows["info"].keys()) == {"power", "success"}
    assert ("info", "mission") not in rows.keys(include_nested=True)
    assert [json.loads(info)["infos/mission"] for *_, info in said] == ["go 0", "go 2", "go 1"]
    assert all("infos/word" not in json.loads(info) for *_, info in said)
    assert [note.split("'")[1] for note in MinariReader(folder).notes()] == [
        "infos/mission",
        "infos/rare",
        "infos/word",
    ]


# -- imports ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_import_is_resumed_and_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "old-v0")
    whole, facts = imported(tmp_path / "old-v0", tmp_path / "a.exp")
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 3)
    from expstore.datasets import importer

    monkeypatch.setattr(importer, "_BATCH_ROWS", 3)

    def stop(done: int, total: int) -> None:
        assert total == 11
        if done >= 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_dataset(MinariReader(tmp_path / "old-v0"), tmp_path / "b.exp", progress=stop)
    assert not (tmp_path / "b.exp").exists()
    again, same_facts = imported(tmp_path / "old-v0", tmp_path / "b.exp")
    assert same_facts == facts
    for key in whole.keys(include_nested=True, leaves_only=True):
        assert (whole[key] == again[key]).all()
    assert import_dataset(MinariReader(tmp_path / "old-v0"), tmp_path / "b.exp").rows == 11
    about = json.loads((tmp_path / "old-v0/data/metadata.json").read_text())
    (tmp_path / "old-v0/data/metadata.json").write_text(json.dumps(about | {"author": "x"}))
    with pytest.raises(StateError, match="was not imported from these files"):
        import_dataset(MinariReader(tmp_path / "old-v0"), tmp_path / "b.exp")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store = str(plain(tmp_path / "old-v0")), str(tmp_path / "a.exp")
    with h5py.File(tmp_path / "old-v0/data/main_data.hdf5", "a") as file:
        for group in file.values():
            group["infos/word"] = ["a"] * len(group["observations"])
    assert run(["import", source, store, "--capacity", "6"]) == 0
    said = capsys.readouterr()
    assert "note: 'infos/word' has no number or array per step and is left out" in said.err
    with expstore.open(store, mode="r") as rb:
        assert sorted(rb[:]["episode"].tolist()) == [2] * 4 + [10] * 2
        assert rb.sql("SELECT length FROM episodes WHERE live_rows > 0 ORDER BY 1").fetchall() == [(2,), (5,)]
    assert run(["import", source, store]) == 2
    assert run(["import", source + "/data", store + "2", "--format", "minari", "--map", "a=b"]) == 2
    assert "does not apply to minari" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_damaged_tables(tmp_path: Path, root: Path, form: str) -> None:
    folder = create(root, "test/a-v0", form, images=False)

    def bad(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    (file,) = (folder / "data/1").glob(f"*.{form}")
    other = bad("half")
    inside = other / file.relative_to(folder)
    inside.write_bytes(inside.read_bytes()[:-40])
    cases: list[tuple[Path, type[Exception], str]] = [
        (other, StorageError, f"episode 1: cannot read .*{file.name}")
    ]
    other = bad("none")
    (other / file.relative_to(folder)).unlink()
    cases.append((other, SchemaError, "has 0 files of rows"))
    other = bad("said")
    (other / "data/1/metadata.json").write_text('{"total_steps": 9}')
    cases.append((other, SchemaError, "has 2 rows for 9 steps"))
    other = bad("facts")
    (other / "data/1/metadata.json").unlink()
    cases.append((other, NotFoundError, "there is no file .*metadata.json"))
    for number, (source, kind, words) in enumerate(cases):
        with pytest.raises(kind, match=words):
            import_dataset(MinariReader(source), tmp_path / f"{number}.exp")
        assert not (tmp_path / f"{number}.exp").exists()


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = plain(tmp_path / "old-v0")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        group = file["episode_0"]
        del group["observations"]
        group["observations"] = np.array([b"\x80\x04cos\nsystem\n."] * 5, dtype="S20")
    with pytest.raises(SchemaError, match="episode_0 has no numbers in 'observations'"):
        import_dataset(MinariReader(folder), tmp_path / "a.exp")
