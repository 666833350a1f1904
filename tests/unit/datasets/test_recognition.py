"""`expstore import` detects data sets by their content, and otherwise suggests the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.datasets.formats import list_formats
from expstore.exchange.formats import IMPORTS
from tests.unit.datasets import test_d4rl, test_gen_dgrl, test_openx, test_roboset, test_vd4rl


def imported(source: Path, *options: str) -> tuple[str, TensorDict]:
    """Import from the command line; return the format that the store was read as, and its rows."""
    store = source.parent / f"{len(list(source.parent.iterdir()))}.exp"
    assert run(["import", str(source), str(store), *options]) == 0
    with expstore.open(store, mode="r") as rb:
        return rb.meta.get("import", {}).get("format", "plain"), rb[:]


def of_d4rl(*left_out: str) -> dict[str, Any]:
    return {name: rows for name, rows in test_d4rl.arrays().items() if not name.startswith(left_out)}


@pytest.mark.some(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "left_out",
    [
        ("none",),
        ("next_",),
        ("next_", "infos", "metadata"),
        ("timeouts", "infos"),
        ("next_", "timeouts", "infos", "metadata"),
    ],
)
def test_a_file_of_d4rl(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    file = test_d4rl.write(tmp_path / "hopper.hdf5", of_d4rl(*left_out))
    found, rows = imported(file)
    assert found == "d4rl"
    _, wanted = imported(file, "--format", "d4rl")
    assert (rows["next", "observation"] == wanted["next", "observation"]).all()


def test_a_goal_of_antmaze_does_not_end_an_episode(tmp_path: Path) -> None:
    found, rows = imported(test_d4rl.write(tmp_path / "antmaze-umaze.hdf5", of_d4rl("next_")))
    assert found == "d4rl"
    assert not rows["next", "terminated"].any()
    assert rows["next", "terminal"].sum() == 1


def test_a_file_that_may_be_of_d4rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = test_d4rl.write(tmp_path / "a.hdf5", of_d4rl("timeouts", "infos", "metadata"))
    assert imported(file)[0] == "plain"
    assert f"note: {file} may be a D4RL file" in (told := capsys.readouterr().err)
    assert "--format d4rl" in told
    assert imported(file, "--format", "hdf5")[0] == "plain"
    assert not capsys.readouterr().err


def test_options_of_plain_files_name_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = test_d4rl.write(tmp_path / "a.hdf5", test_d4rl.arrays())
    for option in (["--capacity", "5"], ["--map", "rewards="]):
        assert run(["import", str(file), str(tmp_path / "a.exp"), *option]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "does not apply to d4rl; --format hdf5 reads" in told
    found, rows = imported(file, "--format", "hdf5", "--capacity", "5")
    assert (found, len(rows)) == ("plain", 5)


@pytest.mark.slow
def test_exports_are_recognised_and_imported(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "x.exp") as rb:
        steps = torch.arange(6)
        rb.extend(
            TensorDict(
                {
                    "observation": steps[:, None] * 1.0,
                    "action": steps,
                    "run_1": {"observations": steps * 1.0},  # no group of an episode
                    "next": {"reward": steps[:, None] * 1.0, "terminated": steps[:, None] == 3},
                },
                [6],
            )
        )
        rb.flush()  # the export reads the store as another process would
        for form in ("hdf5", "npz"):
            out = tmp_path / f"x.{form}"
            assert run(["export", str(tmp_path / "x.exp"), str(out), f"--{form}"]) == 0
            found, rows = imported(out)
            assert found == "plain"
            assert (rows["observation"] == rb[:]["observation"]).all()
            assert (rows["next", "terminated"] == rb[:]["next", "terminated"]).all()


@pytest.mark.parametrize("left_out", [("none",), ("is_",), ("discount",)])
def test_a_file_of_vd4rl(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    values = {k: v for k, v in test_vd4rl.episode(6, 1).items() if not k.startswith(left_out)}
    np.savez(tmp_path / "a.npz", **values)
    found, rows = imported(tmp_path / "a.npz")
    assert (found, len(rows)) == ("vd4rl", 5)
    np.testing.assert_array_equal(rows["action"].numpy(), values["action"][1:])


@pytest.mark.slow
def test_a_folder_of_vd4rl(tmp_path: Path) -> None:
    assert imported(test_vd4rl.write(tmp_path / "raw"))[0] == "vd4rl"
    values = test_vd4rl.episode(6, 1)
    values = {"observation": values["image"], "step_type": np.array([0, 1, 1, 1, 1, 2])} | {
        name: values[name] for name in ("action", "reward", "discount")
    }
    (tmp_path / "84px").mkdir()
    test_d4rl.write(tmp_path / "84px" / "shard_0.hdf5", values)
    assert imported(tmp_path / "84px")[0] == "vd4rl"
    assert imported(tmp_path / "84px" / "shard_0.hdf5")[0] == "vd4rl"


def test_a_file_that_may_be_of_vd4rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = test_vd4rl.episode(6, 1)
    np.savez(tmp_path / "a.npz", **{name: values[name] for name in ("image", "action", "reward")})
    assert imported(tmp_path / "a.npz")[0] == "plain"
    assert "import it with --format vd4rl" in capsys.readouterr().err


@pytest.mark.slow
def test_archives_and_folders(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar.gz"):
        archive = test_openx.archive(tmp_path / "openx" / name, test_openx.episodes())
        assert imported(archive)[0] == "openx"
    (tmp_path / "only").mkdir()
    archive.rename(tmp_path / "only" / "a.tar")
    assert imported(tmp_path / "only")[0] == "openx"
    assert imported(test_gen_dgrl.archive(tmp_path / "a.tar", test_gen_dgrl.trajectories()))[0] == "gen-dgrl"
    (tmp_path / "trials").mkdir()
    test_roboset.write(tmp_path / "trials" / "a.h5")
    assert imported(tmp_path / "trials")[0] == "roboset"


def test_an_unrecognised_source_is_refused_with_all_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "broken.tar").write_text("hello")
    (tmp_path / "folder").mkdir()
    for name in ("text", "broken.tar", "folder"):
        assert run(["import", str(tmp_path / name), str(tmp_path / "x.exp")]) == 2
        told = capsys.readouterr().err
        assert "looks like none of the formats" in told
        named = told.partition("--format: ")[2].strip().split(", ")
        assert named == sorted({*IMPORTS, *list_formats()})
        assert {"csv", "npz", "rlds"} <= set(named)
