"""The OpenML reader and class: features and classes as TorchRL prepares them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
import torch

import expstore
from expstore.datasets import OpenMLExperienceReplay, OpenMLReader, import_dataset
from expstore.datasets.kinds import openml
from expstore.errors import NotFoundError, RemoteError, SchemaError, StateError, StorageError
from tests.support.data_server import serving_files
from tests.support.torchrl_names import module

OfTorchRL = module("torchrl.data.datasets.openml").OpenMLExperienceReplay

ROWS = 60


def table(name: str) -> pd.DataFrame:
    """Return a small table with the columns that matter: numbers, categories, missing values, the class."""
    random = np.random.default_rng(5)
    if name.startswith("adult"):
        found = pd.DataFrame({"age": random.integers(17, 90, ROWS), "gain": random.normal(size=ROWS)})
        for column, names in {"work": "ABC", "occupation": "xyzw"}.items():
            texts = random.choice([*names], ROWS).astype(object)
            texts[random.integers(0, ROWS, 4)] = None
            found[column] = texts
        found["class"] = random.choice([">50K", "<=50K"], ROWS)
    elif name.startswith("mushroom"):
        found = pd.DataFrame({c: random.choice([*"abc"], ROWS) for c in ("cap", "gill", "ring", "class")})
    else:
        found = pd.DataFrame({f"V{n}": random.normal(3 * n, 2, ROWS) for n in range(5)})
        found["class"] = random.integers(1, 4, ROWS).astype(str)
    return found


def write_arff(path: Path, frame: pd.DataFrame) -> Path:
    lines = ["@relation test"]
    for column in frame:
        values = frame[column]
        if pd.api.types.is_numeric_dtype(values):
            lines.append(f"@attribute {column} numeric")
        else:
            names = ",".join(f"'{one}'" for one in sorted(values.dropna().unique()))
            lines.append(f"@attribute {column} {{{names}}}")
    lines.append("@data")
    for row in frame.itertuples(index=False):
        lines.append(",".join("?" if one is None or one != one else str(one) for one in row))
    path.write_text("\n".join(lines) + "\n")
    return path


def theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what TorchRL's class makes of the table that scikit-learn gives it."""

    def fetch(public: str, **options: Any) -> Any:
        frame = table(name)
        for column in frame:
            if not pd.api.types.is_numeric_dtype(frame[column]):
                frame[column] = frame[column].astype("category")
        return frame.iloc[:, :-1].copy(), frame.iloc[:, -1]

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OfTorchRL._get_data(name)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", OpenMLExperienceReplay.available_datasets)
@pytest.mark.parametrize("form", ["arff", "csv"])
def test_rows_are_torchrls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    monkeypatch.setattr(openml, "_ROWS", 17)
    source = tmp_path / f"{name}.{form}"
    if form == "arff":
        write_arff(source, table(name))
    else:
        table(name).to_csv(source, index=False)
    target = tmp_path / "x.exp"
    wanted = theirs(name, monkeypatch)
    assert import_dataset(OpenMLReader(source), target).rows == len(wanted)
    with expstore.open(target, mode="r") as rb:
        rows = rb[:]
        torch.testing.assert_close(rows["X"], wanted["X"])
        torch.testing.assert_close(rows["y"], wanted["y"].long())


def test_the_class(tmp_path: Path) -> None:
    files, api = tmp_path / "files", tmp_path / "api" / "v1" / "json" / "data"
    files.mkdir()
    write_arff(files / "shuttle.arff", table("shuttle"))
    (api / "list" / "data_name" / "shuttle" / "data_version").mkdir(parents=True)
    listed = {"data": {"dataset": [{"did": 40685}]}}
    (api / "list" / "data_name" / "shuttle" / "data_version" / "1").write_text(json.dumps(listed))
    with serving_files(tmp_path) as server:
        said = {"data_set_description": {"url": f"{server.url}/files/shuttle.arff"}}
        (api / "40685").write_text(json.dumps(said))
        data = OpenMLExperienceReplay("shuttle", 32, root=tmp_path / "root", mirror=server.url)
        with pytest.raises(NotFoundError, match="there is no file at .*MagicTelescope"):
            OpenMLExperienceReplay("magic", 32, root=tmp_path / "root", mirror=server.url)
    assert data.max_outcome_val == 2
    assert data.sample()["X"].shape == (32, 5)
    assert torch.cat([data.sample(30)["index"] for _ in range(2)]).unique().numel() >= ROWS - 32
    with pytest.raises(RuntimeError, match="Dataset does not exist"):
        OpenMLExperienceReplay("iris", 32, root=tmp_path)
    with pytest.raises(RemoteError, match="cannot fetch http://127.0.0.1:1/"):
        OpenMLExperienceReplay("magic", 32, root=tmp_path / "root", mirror="http://127.0.0.1:1")


def test_new_rows_need_a_writer(tmp_path: Path) -> None:
    source = write_arff(tmp_path / "shuttle.arff", table("shuttle"))
    data = OpenMLExperienceReplay("shuttle", 8, tmp_path / "root", source=source)
    rows = data[:4].exclude("index")
    with pytest.raises(StateError, match="open for reading only"):
        data.extend(rows)
    data.close()
    data = OpenMLExperienceReplay(
        "shuttle", 8, tmp_path / "root", writer=expstore.TensorDictRoundRobinWriter()
    )
    data.extend(rows)
    assert len(data) == ROWS + 4
    torch.testing.assert_close(data[ROWS:]["X"], rows["X"])
    data.close()


def test_bad_files_leave_nothing(tmp_path: Path) -> None:
    target, source = tmp_path / "x.exp", tmp_path / "bad.arff"
    for text, name, kind, words in (
        ("hello\n", "shuttle", StorageError, "cannot read .* as ARFF"),
        ("@relation a\n@attribute V1 numeric\n@data\nx\n", "shuttle", StorageError, "as ARFF"),
        ("@relation a\n@attribute V1 numeric\n@data\n1\n", "shuttle", SchemaError, "has 1 columns"),
        (
            "@relation a\n@attribute V1 {a,b}\n@attribute c {x,y}\n@data\na,x\n",
            "magic",
            SchemaError,
            "not numeric: V1",
        ),
        (
            "@relation a\n@attribute V1 numeric\n@attribute c {x,y}\n@data\n1,x\n",
            "adult_num",
            SchemaError,
            "no column 'occupation'",
        ),
    ):
        source.write_text(text)
        with pytest.raises(kind, match=words):
            import_dataset(OpenMLReader(source, name=name), target)  # type: ignore[arg-type]
    assert not target.exists()
    with pytest.raises(SchemaError, match="is not one of adult_num"):
        OpenMLReader(source)
    with pytest.raises(NotFoundError, match="there is no file"):
        OpenMLReader(tmp_path / "nothing.arff")
