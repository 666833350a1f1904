"""The examples in the docstrings of TorchRL's data set classes run with only the import replaced.

Docstrings are taken from the installed torchrl. The data sets are small files in the public formats, served
from this machine at the paths of the public addresses. The Atari DQN class is in `test_torchrl_documents.py`.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.datasets.d4rl_files import d4rl_files
from expstore.errors import NotFoundError
from tests.support.minari_sets import create_minari
from tests.support.public_addresses import serving_public_addresses
from tests.unit.datasets import test_gen_dgrl, test_openml, test_openx, test_roboset, test_vd4rl
from tests.unit.datasets.test_d4rl import arrays
from tests.unit.datasets.test_d4rl import write as write_d4rl

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torchrl"),
]

MODULES = {"GenDGRL": "gen_dgrl", "Minari": "minari_data"}
IMPORT = re.compile(r"from torchrl\.data\.datasets[\w.]* import (\w+ExperienceReplay)")


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """Return the folder that is served in place of the public addresses."""
    with serving_public_addresses(tmp_path / "public", tmp_path / "stores"):
        yield tmp_path / "public"


def run_samples(name: str, change: Callable[[str], str] = str) -> dict[str, Any]:
    """Run the examples of a class's docstring in one namespace; return what it holds then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing torchrl's collectors
        module = importlib.import_module(f"torchrl.data.datasets.{MODULES.get(name, name.lower())}")
        theirs = getattr(module, f"{name}ExperienceReplay")
    examples = doctest.DocTestParser().get_examples(inspect.cleandoc(theirs.__doc__))
    assert examples
    # The samples say that they log, and do not import what logs.
    names: dict[str, Any] = {"__name__": "example", "torchrl_logger": module.__dict__.get("torchrl_logger")}
    replaced = 0
    for example in examples:
        source, count = IMPORT.subn(r"from expstore.datasets import \1", example.source)
        replaced += count
        exec(compile(change(source), name, "single"), names)
    assert replaced
    return names


def test_the_sample_of_d4rl(public: Path) -> None:
    file = public / d4rl_files()["maze2d-umaze-v1"]
    file.parent.mkdir(parents=True)
    write_d4rl(file, arrays())
    data = run_samples("D4RL")["data"]
    batch = data.sample(128)
    assert batch["next", "reward"].shape == (128, 1)
    # `ObservationNorm(loc=-1, scale=1.0)` was appended.
    states = torch.from_numpy(arrays()["observations"]) - 1
    torch.testing.assert_close(batch["observation"], states[batch["index"]])


@pytest.mark.slow
def test_the_sample_of_gen_dgrl(public: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_gen_dgrl.archive(
        public / "1M/level_200/expert/bigfish.tar.xz", [test_gen_dgrl.trajectory(n, 20) for n in range(3)]
    )
    batch = run_samples("GenDGRL")["batch"]
    assert batch["observation"].shape == batch["next", "observation"].shape == (32, 3, 64, 64)
    assert "observation" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["adult_num", "mushroom_onehot", "magic"])
def test_the_class_of_openml(public: Path, name: str) -> None:
    """The docstring has no sample: the class is made as its arguments say."""
    source = public.parent / f"{name}.csv"
    test_openml.table(name).to_csv(source, index=False)
    with pytest.raises(NotFoundError):  # the server does not have it
        expstore.datasets.OpenMLExperienceReplay(name, 32)
    data = expstore.datasets.OpenMLExperienceReplay(name, 32, source=source)
    for batch in data:
        assert batch["X"].shape[0] == batch["y"].shape[0] == 32
        assert batch["y"].max() <= data.max_outcome_val
        break


@pytest.mark.slow
def test_the_sample_of_openx(public: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = public / "jxu124" / "OpenX-Embodiment" / "cmu_stretch"
    test_openx.archive(folder / "a.tar", [test_openx.episode(number, 70) for number in range(3)])

    def change(source: str) -> str:
        """Data sets are stores: what is streamed there, which has no batch size, is fetched and read."""
        if "streaming=True" in source:
            with pytest.raises(ValueError, match="kept as stores"):
                expstore.datasets.OpenXExperienceReplay(
                    "cmu_stretch", num_slices=2, download=False, streaming=True
                )
            return source.replace("download=False, streaming=True", "batch_size=70")
        return source

    names = run_samples("OpenX", change)
    assert "Tensor(shape=torch.Size([2, 64, 7])" in capsys.readouterr().out
    batch = names["batch"].reshape(2, -1)
    assert batch["observation", "image"].shape == (2, 64, 3, 8, 10)
    assert (batch["episode"] == batch["episode"][:, :1]).all()
    assert (batch["index"].diff(dim=1) == 1).all()
    assert batch["language_instruction"] == [["open the drawer"] * 64] * 2
    assert names["data"].batch_size == (128,)  # two parts of trajectories, of 64 steps


def test_the_sample_of_roboset(public: Path) -> None:
    folder = public / "jdvakil/RoboSet_Sim/FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"
    folder.mkdir(parents=True)
    for number in range(3):
        test_roboset.write(folder / f"{number}.h5", 5000 * number)
    batch = run_samples("Roboset")["batch"]
    assert {"info", ("next", "info")}.isdisjoint(batch.keys(True))
    assert set(batch["seed"].tolist()) <= {0, 1, 2}
    assert set(batch["episode"].tolist()) <= set(test_roboset.LENGTHS)
    assert batch["action"].dtype == batch["observation"].dtype == batch["time"].dtype == torch.float64
    assert batch["next", "reward"].shape == batch["done"].shape == (32, 1)


def test_the_sample_of_vd4rl(public: Path) -> None:
    test_vd4rl.write(public / "conglu/vd4rl/vd4rl/main/walker_walk/random/64px")
    batch = run_samples("VD4RL")["batch"]
    assert batch["pixels"].shape == batch["next", "pixels"].shape == (32, 3, 50, 50)
    assert batch["pixels"].dtype == torch.float32
    assert batch["action"].shape == (32, 6)


def test_the_sample_of_minari(public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (public / "farama-minari").mkdir(parents=True)
    create_minari(monkeypatch, tmp_path / "own").rename(public / "farama-minari" / "door-human-v1")
    sample = run_samples("Minari")["sample"]
    assert sample["observation", "pos"].shape == (32, 2)
    assert sample["next", "done"].shape == (32, 1)


def test_the_sample_of_lerobot() -> None:
    names = run_samples("LeRobot")
    sample = names["sample"]
    assert sample["action"].shape == sample["next", "observation", "state"].shape == (8, 7)
    ends = np.flatnonzero(sample["next", "truncated"].numpy().ravel())
    assert ends.tolist() == [3, 7]
