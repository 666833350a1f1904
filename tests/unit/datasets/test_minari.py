"""The Minari reader in each format, compared with TorchRL's class and Minari's reader."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.datasets import MinariReader, import_dataset
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.imported_stores import import_rows
from tests.support.minari_sets import LENGTHS, create_minari, make_episodes, write_old_minari
from tests.support.refusals import Refusal, check_refusals
from tests.support.torchrl_names import module

MinariExperienceReplay = module("torchrl.data.datasets.minari_data").MinariExperienceReplay

# Minari warns about facts that it was not given.
pytestmark = [pytest.mark.usefixtures("no_syncs"), pytest.mark.filterwarnings("ignore")]

FORMATS = ("hdf5", "arrow", "parquet")
PLACES = [("hdf5", True), *((form, False) for form in FORMATS)]


@pytest.mark.parametrize(("form", "jpeg"), PLACES)
def test_data_sets_written_by_minari_are_imported(
    tmp_path: Path, form: str, jpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 4)
    folder = create_minari(monkeypatch, tmp_path / "root", form=form, jpeg=jpeg)
    rows, ends, facts, meta = import_rows(MinariReader(folder), tmp_path)
    assert ends == [(4, "terminated"), (1, "terminated"), (11, "truncated")]
    assert facts == [{"minari_id": n, "seed": n + 5, "options": {"goal": {"x": n}}} for n in range(3)]
    assert (meta["minari"]["total_steps"], meta["minari"]["algorithm_name"]) == (16, "random")
    first = 0
    decoded = list(minari.load_dataset("test/hop-v0").iterate_episodes())
    for number, (count, truth) in enumerate(zip(LENGTHS, make_episodes(), strict=True)):
        steps = rows[first : first + count]
        for name in ("pos", "grid", "kind", "frame"):
            # JPEG loses something: what Minari decodes counts.
            values = (decoded[number] if jpeg and name == "frame" else truth).observations[name]
            np.testing.assert_array_equal(steps["observation", name].numpy(), values[:-1])
            np.testing.assert_array_equal(steps["next", "observation", name].numpy(), values[1:])
        np.testing.assert_array_equal(steps["action", "0"].numpy(), truth.actions[0])
        np.testing.assert_array_equal(steps["action", "1"].numpy(), truth.actions[1])
        np.testing.assert_array_equal(steps["next", "reward"][:, 0].numpy(), truth.rewards)
        np.testing.assert_array_equal(steps["info", "x"].numpy(), truth.infos["x"][:-1])
        deep = steps["next", "info", "deep", "y"].numpy()
        np.testing.assert_array_equal(deep, truth.infos["deep"]["y"][1:])
        assert steps["episode"].tolist() == [number] * count
        assert steps["next", "done"][:, 0].tolist() == [False] * (count - 1) + [True]
        first += count
    assert first == len(rows)
    assert rows["next", "reward"].dtype is torch.float64
    assert not rows["done"].any()
    assert any("JPEG" in note for note in MinariReader(folder).notes()) is jpeg


@pytest.mark.slow
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_jpeg_images_of_tables_are_what_minari_reads(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = import_rows(
        MinariReader(create_minari(monkeypatch, tmp_path / "root", form=form, jpeg=True)), tmp_path
    ).rows
    frames = [one.observations["frame"] for one in minari.load_dataset("test/hop-v0").iterate_episodes()]
    now, after = rows["observation", "frame"].numpy(), rows["next", "observation", "frame"].numpy()
    np.testing.assert_array_equal(now, np.concatenate([one[:-1] for one in frames]))
    np.testing.assert_array_equal(after, np.concatenate([one[1:] for one in frames]))


# -- compared with TorchRL's class -------------------------------------------------------------------------


def of_torchrl(name: str, target: Path) -> TensorDict:
    theirs = object.__new__(MinariExperienceReplay)
    facts = {"dataset_id": name, "_root": target, "split_trajs": False, "load_from_local_minari": True}
    theirs.__dict__.update(facts)
    return theirs._download_and_preproc()


def test_rows_equal_torchrls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    write_old_minari(tmp_path / "root/old-v0")
    # Theirs allocates files for the rows and never writes them: every value is 0.
    monkeypatch.setattr(TensorDict, "memmap_like", TensorDict.memmap)
    found = of_torchrl("old-v0", tmp_path / "theirs")
    rows = import_rows(MinariReader(tmp_path / "root/old-v0"), tmp_path).rows
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


def test_observations_without_the_last_one(tmp_path: Path) -> None:
    """Some old data sets have as many observations as steps; no flag says that an episode has ended."""
    folder = write_old_minari(tmp_path / "old-v0")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for group in file.values():
            for name in ("observations", "state/qpos"):
                values = group[name][:-1]
                del group[name]
                group[name] = values
            for name in ("terminations", "truncations"):
                group[name][...] = False
    rows, ends, *_ = import_rows(MinariReader(folder), tmp_path)
    assert ends == [(4, "cut"), (5, "cut"), (2, "cut")]
    last = np.cumsum([4, 5, 2]) - 1
    for key in ("observation", ("state", "qpos")):
        after = rows["next", *((key,) if isinstance(key, str) else key)]
        assert not after[last].any()
        inside = np.setdiff1d(np.arange(11), last)
        assert (after[inside] == rows[key][inside + 1]).all()


def test_text_is_a_fact(tmp_path: Path) -> None:
    folder = write_old_minari(tmp_path / "old-v0")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for number, group in enumerate(file.values()):
            count = len(group["observations"])
            group["infos/mission"] = np.array([f"go {number}"] * count, dtype="S5")
            group["infos/word"] = [f"{n}" for n in range(count)]
            group["infos/rare"] = np.zeros(1 if count > 3 else 9)
    rows, _, facts, _ = import_rows(MinariReader(folder), tmp_path)
    assert set(rows["info"].keys()) == {"power", "success"}
    assert [one and one["infos/mission"] for one in facts] == ["go 0", "go 2", "go 1"]
    assert all(one and "infos/word" not in one for one in facts)
    notes = [note.split("'")[1] for note in MinariReader(folder).notes()]
    assert notes == ["infos/mission", "infos/rare", "infos/word"]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, store = str(write_old_minari(tmp_path / "old-v0")), str(tmp_path / "a.exp")
    with h5py.File(tmp_path / "old-v0/data/main_data.hdf5", "a") as file:
        for group in file.values():
            group["infos/word"] = ["a"] * len(group["observations"])
    assert run(["import", source, store, "--capacity", "6"]) == 0
    assert "note: 'infos/word' has no number or array per step" in capsys.readouterr().err
    with expstore.open(store, mode="r") as rb:
        assert sorted(rb[:]["episode"].tolist()) == [2] * 4 + [10] * 2
        assert rb.sql("SELECT length FROM episodes WHERE live_rows > 0 ORDER BY 1").fetchall() == [(2,), (5,)]
    assert run(["import", source, store]) == 2


# -- imports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_damaged_tables(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_minari(monkeypatch, tmp_path / "root", form=form, images=False)
    (file,) = (folder / "data/1").glob(f"*.{form}")
    whole = file.read_bytes()
    damages: dict[str, tuple[Path, bytes | None, type[Exception], str]] = {
        "half": (file, whole[:-40], StorageError, f"episode 1: cannot read .*{file.name}"),
        "none": (file, None, SchemaError, "has 0 files of rows"),
        "steps": (
            folder / "data/1/metadata.json", b'{"total_steps": 9}', SchemaError, "has 2 rows for 9 steps",
        ),
        "facts": (folder / "data/1/metadata.json", None, NotFoundError, "there is no file .*metadata.json"),
    }  # fmt: skip
    target = tmp_path / "x.exp"
    for name, (path, data, kind, words) in damages.items():
        copy = Path(shutil.copytree(folder, tmp_path / name))
        changed = copy / path.relative_to(folder)
        changed.unlink() if data is None else changed.write_bytes(data)
        with pytest.raises(kind, match=words):
            import_dataset(MinariReader(copy), target)
        assert not target.exists()


def test_bad_data_sets_are_refused(tmp_path: Path) -> None:
    good = write_old_minari(tmp_path / "old-v0") / "data"
    data, about = (good / "main_data.hdf5").read_bytes(), (good / "metadata.json").read_text()
    target = tmp_path / "x.exp"

    def changed(name: str, values: Any = None, *, text: str = about, whole: bytes = data) -> Any:
        """Replace an array of the file, or remove it."""

        def read() -> None:
            folder = tmp_path / "in"
            folder.mkdir(exist_ok=True)
            (folder / "metadata.json").write_text(text)
            (folder / "main_data.hdf5").write_bytes(whole)
            if name:
                with h5py.File(folder / "main_data.hdf5", "a") as file:
                    del file[name]
                    if values is not None:
                        file[name] = values
            import_dataset(MinariReader(folder), target)

        return read

    pickled = np.array([b"\x80\x04cos\nsystem\n."] * 5, dtype="S20")
    (tmp_path / "none").mkdir()
    (tmp_path / "file").write_text("")
    cases: list[Refusal] = [
        (lambda: MinariReader(tmp_path / "none"), NotFoundError, "no Minari dataset"),
        (lambda: MinariReader(tmp_path / "nothing"), NotFoundError, "there is no folder"),
        (lambda: MinariReader(tmp_path / "file"), NotFoundError, "is a file, but a folder is needed"),
        (changed("", whole=b"hello"), StorageError, "cannot read .* as HDF5"),
        (changed("", whole=data[:4000]), StorageError, "cannot read"),
        (changed("", text="{"), StorageError, "metadata.json is damaged"),
        (changed("", text='{"data_format": "lance"}'), SchemaError, "has the format 'lance'"),
        (changed("", text='{"data_format": "arrow"}'), SchemaError, "contains no episodes"),
        (changed("episode_2/actions", np.zeros(3)), SchemaError, "episode_2 has 3 'actions' for 5 rewards"),
        (changed("episode_2/actions"), SchemaError, "episode_2 has no 'actions'"),
        (changed("episode_0/rewards"), SchemaError, "episode_0 has no 'rewards'"),
        (changed("episode_2/observations"), SchemaError, "episode_2 has no 'observations'"),
        (changed("episode_0/observations", pickled), SchemaError, "episode_0 has no numbers in 'observ"),
    ]
    check_refusals(cases, absent=target)
    (tmp_path / "in/main_data.hdf5").unlink()
    with pytest.raises(NotFoundError, match="there is no file"):
        MinariReader(tmp_path / "in")
