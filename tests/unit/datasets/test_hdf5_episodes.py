"""HDF5 files with one group per episode: robomimic, LIBERO, d3rlpy, RoboSet, and plain names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import expstore
from expstore.cli.app import run
from expstore.datasets import (
    D4RLReader,
    Hdf5EpisodesReader,
    RobomimicReader,
    RobosetReader,
    import_dataset,
)
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.exchange import import_hdf5
from tests.support.hdf5_damage import damage_header
from tests.support.imported_stores import import_rows
from tests.unit.datasets.test_d4rl import arrays
from tests.unit.datasets.test_d4rl import write as write_d4rl
from tests.unit.datasets.test_roboset import write as write_roboset

pytestmark = pytest.mark.usefixtures("no_syncs")

LENGTHS = {0: 4, 10: 3, 2: 5}
ORDER = (0, 2, 10)


def states(number: int) -> np.ndarray:
    """T + 1 states of an episode."""
    return (np.arange(LENGTHS[number] + 1.0) + 100 * number)[:, None].repeat(3, 1)


def robomimic(path: Path, *, following: bool = True) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(LENGTHS.values())
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "env_type": 1, "env_kwargs": {}})
        for number, count in LENGTHS.items():
            demo = data.create_group(f"demo_{number}")
            demo.attrs.update({"num_samples": count, "model_file": "<mujoco/>"})
            at = states(number)
            demo["obs/eef"] = at[:-1]
            demo["obs/image"] = (at[:-1, :, None, None] % 256 + np.zeros((1, 1, 4, 3))).astype("u1")
            if following:
                demo["next_obs/eef"] = at[1:]
                demo["next_obs/image"] = (at[1:, :, None, None] % 256 + np.zeros((1, 1, 4, 3))).astype("u1")
            demo["actions"] = -at[:-1, :2]
            demo["states"] = at[:-1] + 0.5
            demo["rewards"] = np.eye(count)[-1] * (number != 2)
            demo["dones"] = np.eye(count, dtype="i8")[-1] + (np.arange(count) == 1)
        file["mask/train"] = np.array(["demo_0", "demo_10"], dtype="S8")
        file["mask/easy"] = np.array(["demo_0"], dtype="S8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("following", [True, False])
def test_robomimic(tmp_path: Path, following: bool) -> None:
    path = robomimic(tmp_path / "a.hdf5", following=following)
    rows, ends, facts, meta = import_rows(RobomimicReader(path), tmp_path)
    assert ends == [(4, "terminated"), (5, "truncated"), (3, "terminated")]  # 5: done without a reward
    assert facts == [
        {"num_samples": 4, "filters": ["easy", "train"]},
        {"num_samples": 5},
        {"num_samples": 3, "filters": ["train"]},
    ]
    assert meta["robomimic"]["env_args"]["env_name"] == "Lift"
    assert meta["robomimic"]["model_file"] == "<mujoco/>"
    first = 0
    for place, number in enumerate(ORDER):
        count, at = LENGTHS[number], states(number)
        steps = rows[first : first + count]
        after = at[1:].copy()
        if not following:
            after[-1] = 0
        np.testing.assert_array_equal(steps["observation", "eef"].numpy(), at[:-1])
        np.testing.assert_array_equal(steps["next", "observation", "eef"].numpy(), after)
        np.testing.assert_array_equal(
            steps["next", "observation", "image"][:, 0, 0, 0].numpy(), after[:, 0] % 256
        )
        np.testing.assert_array_equal(steps["action"].numpy(), -at[:-1, :2])
        np.testing.assert_array_equal(steps["states"].numpy(), at[:-1] + 0.5)
        assert steps["episode"].tolist() == [place] * count
        assert steps["next", "done"][:, 0].tolist() == [False] * (count - 1) + [True]
        assert steps["next", "terminal"][:2, 0].tolist() == [False, True]
        first += count


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("episode_", ("observations", "actions", "rewards", "terminals", "timeouts", "infos")),
        ("data/traj", ("obs", "action", "reward", "terminated", "truncated", "info")),
        ("ep", ("observation", "actions", "rewards", "terminations", "truncations", "infos")),
    ],
)
@pytest.mark.parametrize("more", [0, 1])
def test_plain_names(tmp_path: Path, group: str, names: tuple[str, ...], more: int) -> None:
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        file.attrs["env"] = "maze"
        for number, count in LENGTHS.items():
            at, one = states(number), file.create_group(f"{group}{number}")
            one.attrs["seed"] = number
            ends = np.arange(count) == count - 1
            found = (at[: count + more], at[:-1], at[:-1, 0], ends & (number == 0), ends & (number == 2))
            for name, values in zip(names, found, strict=False):
                one[name] = values
            one[f"{names[-1]}/x"] = at[: count + more, 0]
            one["word"] = ["a"] * count
    reader = Hdf5EpisodesReader(path)
    assert reader.notes() == ["'word' is not numeric and is left out"]
    rows, ends, facts, meta = import_rows(reader, tmp_path)
    assert meta["hdf5"] == {"env": "maze"}
    assert ends == [(4, "terminated"), (5, "truncated"), (3, "cut")]
    assert facts == [{"seed": 0}, {"seed": 2}, {"seed": 10}]
    whole = np.concatenate([states(number)[1:] for number in ORDER])
    if not more:
        whole[np.cumsum([4, 5, 3]) - 1] = 0
    np.testing.assert_array_equal(rows["next", "observation"].numpy(), whole)
    np.testing.assert_array_equal(rows["next", "info", "x"].numpy(), whole[:, 0])
    np.testing.assert_array_equal(
        rows["next", "reward"][:, 0].numpy(), np.concatenate([states(number)[:-1, 0] for number in ORDER])
    )


def write_groups(path: Path, names: tuple[str, ...], rows: int = 5) -> Path:
    with h5py.File(path, "w") as file:
        for number, name in enumerate(names):
            for array in ("actions", "observations"):
                file[f"{name}/{array}"] = np.full((rows, 2), number, np.float32)
            file[f"{name}/rewards"] = np.full(rows, number, np.float32)
    return path


@pytest.mark.parametrize("above", ["", "data/"])
def test_groups_with_plain_numbers_are_episodes(tmp_path: Path, above: str) -> None:
    source = write_groups(tmp_path / "a.hdf5", (f"{above}0", f"{above}1", f"{above}10", f"{above}2"))
    assert run(["import", str(source), str(tmp_path / "a.exp")]) == 0
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert rb.sql("SELECT length FROM episodes").fetchall() == [(5,)] * 4
        assert rb[:]["action"][:, 0].tolist() == [0] * 5 + [1] * 5 + [3] * 5 + [2] * 5
    with pytest.raises(SchemaError, match="has a group per episode"):
        import_hdf5(source, tmp_path / "b.exp")


def test_numbered_groups_next_to_shared_rewards_are_agents(tmp_path: Path) -> None:
    source = write_groups(tmp_path / "a.hdf5", ("agents/0", "agents/1"))
    with h5py.File(source, "a") as file:
        file["rewards"] = np.zeros(5)
    assert run(["import", str(source), str(tmp_path / "a.exp")]) == 0
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert len(rb) == 5


def test_a_note_says_that_groups_may_be_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_groups(tmp_path / "a.hdf5", ("robot_a", "robot_b"))
    assert run(["import", str(source), str(tmp_path / "a.exp")]) == 0
    assert "note: robot_a, robot_b are read as fields of the same rows" in capsys.readouterr().err
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        assert len(rb) == 5
    with h5py.File(source, "a") as file:
        file["rewards"] = np.zeros(5)
    assert run(["import", str(source), str(tmp_path / "b.exp")]) == 0
    assert "robot_a" not in capsys.readouterr().err


def test_damage_of_a_file_is_not_skipped(tmp_path: Path) -> None:
    def plain(path: Path) -> Path:
        return write_groups(path, ("episode_0", "episode_1", "episode_2"))

    cases: list[tuple[Callable[[Path], Path], Callable[[Path], Any], tuple[str, ...]]] = [
        (plain, Hdf5EpisodesReader, ("episode_2", "episode_2/actions")),
        (robomimic, RobomimicReader, ("data", "data/demo_10", "data/demo_10/obs", "mask")),
        (write_roboset, RobosetReader, ("Trial1/env_infos",)),
        (lambda path: write_d4rl(path, arrays()), D4RLReader, ("timeouts",)),
    ]
    for write, reader, names in cases:
        for name in names:
            file = write(tmp_path / "a.hdf5")
            damage_header(file, name)
            with pytest.raises(StorageError, match=f"cannot read '/{name}' in the HDF5 file"):
                import_dataset(reader(file), tmp_path / "out.exp")


def test_unsuitable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file"):
        Hdf5EpisodesReader(tmp_path / "none.h5")
    path = tmp_path / "a.h5"
    path.write_text("no HDF5")
    with pytest.raises(StorageError, match="as HDF5"):
        RobomimicReader(path)
    robomimic(path)
    data = path.read_bytes()
    (tmp_path / "half.h5").write_bytes(data[: len(data) // 2])
    with pytest.raises(StorageError, match="as HDF5"):
        RobomimicReader(tmp_path / "half.h5")
    write_d4rl(tmp_path / "flat.h5", arrays())
    for reader, words in ((Hdf5EpisodesReader, "no group per episode"), (RobomimicReader, "no group data/")):
        with pytest.raises(SchemaError, match=words):
            reader(tmp_path / "flat.h5")

    def changed(name: str, values: Any) -> None:
        robomimic(path)
        with h5py.File(path, "a") as file:
            demo = file["data/demo_2"]
            del demo[name]
            if values is not None:
                demo[name] = values

    for name, values, words in (
        ("actions", None, "data/demo_2 has no action"),
        ("obs", None, "data/demo_2 has no observation"),
        ("rewards", np.zeros(3), "data/demo_2 has 3 rows of .* for 5 actions"),
        ("obs/eef", np.zeros((3, 3)), "has 3 rows for 5 steps"),
        ("states", np.zeros((2, 3)), "states"),
        ("actions", np.array([b"\x80\x04cos\nsystem\n."] * 5, dtype="S20"), "data/demo_2 has no action"),
    ):
        changed(name, values)
        with pytest.raises(SchemaError, match=words):
            import_dataset(RobomimicReader(path), tmp_path / "a.exp")
        assert not (tmp_path / "a.exp").exists()
