"""Paths given by users: URLs are refused before anything is created, and `~` is the home folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import exchange, maintenance
from expstore.api.settings import Settings
from expstore.cli.app import run
from expstore.datasets import Hdf5EpisodesReader, import_dataset, load_dataset
from expstore.errors import StateError
from expstore.sql.sandbox.pool import SqlWorker
from expstore.storages.follower import FollowerStorage

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

URL = "s3://bucket/x"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that is the current one, with a store."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with expstore.open("run.exp") as rb:
        rb.extend(TensorDict({"observation": torch.zeros(4, 2), "action": torch.zeros(4)}, [4]))
    return tmp_path


def _with_buffer(act: Callable[[Any], Any]) -> None:
    with expstore.open("run.exp") as rb:
        act(rb)


IN_PYTHON: dict[str, Callable[[Any], Any]] = {
    "open": lambda url: expstore.open(url),
    "ZarrStorage": lambda url: expstore.ZarrStorage(url),
    "ArrowStorage": lambda url: expstore.ArrowStorage(url, 10),
    "LazyMemmapStorage": lambda url: expstore.LazyMemmapStorage(10, scratch_dir=url),
    "FollowerStorage": lambda url: FollowerStorage(url),
    "dumps": lambda url: _with_buffer(lambda rb: rb.dumps(url)),
    "dumps of a storage": lambda url: _with_buffer(lambda rb: rb.storage.dumps(url)),
    "dumps from RAM": lambda url: expstore.MemoryStorage(10).dumps(url),
    "loads": lambda url: _with_buffer(lambda rb: rb.loads(url)),
    "loads of a storage": lambda url: expstore.MemoryStorage(10).loads(url),
    "tag": lambda url: _with_buffer(lambda rb: rb.snapshots.tag("t", url)),
    "versions": lambda url: expstore.versions(url),
    "to_parquet": lambda url: _with_buffer(lambda rb: rb.sql("SELECT 1 AS a").to_parquet(url)),
    "resize": lambda url: expstore.resize(url, capacity=3),
    "merge, paths": lambda url: expstore.merge([url], out="new.exp"),
    "merge, out": lambda url: expstore.merge(["run.exp"], out=url),
    "verify": lambda url: maintenance.verify(Path(url)),
    "repair": lambda url: maintenance.repair(Path(url)),
    "export, source": lambda url: exchange.export_npz(url, "out.npz"),
    **{
        f"export_{name}": lambda url, name=name: getattr(exchange, f"export_{name}")("run.exp", url)
        for name in ("arrow", "hdf5", "lerobot", "minari", "npz", "parquet")
    },
    **{
        f"import_{name}, {which}": lambda url, name=name, which=which: getattr(exchange, f"import_{name}")(
            *((url, "new.exp") if which == "source" else ("none", url))
        )
        for name in ("arrow", "hdf5", "npz", "parquet", "sb3")
        for which in ("source", "target")
    },
    "import_dataset": lambda url: import_dataset(None, url),  # type: ignore[arg-type]
    "reader": lambda url: Hdf5EpisodesReader(url),
    "load_dataset, root": lambda url: load_dataset("d4rl:hopper-medium-v2", root=url, source="none"),
    "load_dataset, source": lambda url: load_dataset("d4rl:hopper-medium-v2", root="root", source=url),
    "server": lambda url: Settings(path=Path(url)),
    "SqlWorker": lambda url: SqlWorker(url),
}


def test_a_url_is_refused(home: Path) -> None:
    for what, act in IN_PYTHON.items():
        with pytest.raises(
            StateError, match="s3://bucket/x is a URL, not a path on this machine; s3:// is"
        ) as caught:
            act(URL)
        assert caught.value.kind == "path", what
        assert os.listdir(home) == ["run.exp"], what


def test_an_ensemble_refuses_a_url(home: Path) -> None:
    members = [expstore.ReplayBuffer(storage=expstore.MemoryStorage(10)) for _ in range(2)]
    both = expstore.ReplayBufferEnsemble(*members)
    for act in (both.dumps, both.loads):
        with pytest.raises(StateError, match="is a URL"):
            act(URL)
    assert os.listdir(home) == ["run.exp"]


COMMANDS = [
    ["info", URL],
    ["verify", URL],
    ["repair", URL],
    ["collect", "CartPole-v1", URL, "--steps", "1"],
    ["sql", URL, "SELECT 1"],
    ["sql", "run.exp", "SELECT 1 AS a", "--parquet", URL],
    ["versions", "create", URL, "versions"],
    ["versions", "create", "run.exp", URL],
    ["versions", "restore", "run.exp", URL],
    ["versions", "push", URL, "s3://bucket/run"],
    ["versions", "pull", "s3://bucket/run", URL],
    ["export", "run.exp", URL, "--parquet"],
    ["export", URL, "out", "--parquet"],
    ["import", "none.npz", URL],
    ["import", URL, "new.exp"],
    ["resize", URL, "--capacity", "3"],
    ["merge", "run.exp", "--out", URL],
    ["merge", "run.exp", URL, "--out", "new.exp"],
    ["retain", URL],
    ["add-column", URL, "x", "--fill", "1"],
    ["drop-column", URL, "x"],
    ["serve", URL],
    ["datasets", "fetch", "d4rl:hopper-medium-v2", "--root", URL],
    ["datasets", "fetch", "d4rl:hopper-medium-v2", "--source", URL],
]


def test_a_command_refuses_a_url(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in COMMANDS:
        assert run(words) == 2, words
        assert "s3://bucket/x is a URL, not a path on this machine" in capsys.readouterr().err, words
        assert os.listdir(home) == ["run.exp"], words


@pytest.mark.slow
def test_the_home_folder_is_expanded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    with expstore.open("~/run.exp") as rb:
        rb.dumps("~/versions")
        rb.snapshots.tag("one", "~/versions")
        rb.loads("~/versions", "one")
        rb.sql("SELECT 1 AS a").to_parquet("~/answer.parquet")
    assert len(expstore.versions("~/versions")) == 2
    exchange.export_npz("~/run.exp", "~/out.npz")
    exchange.import_npz("~/out.npz", "~/again.exp")
    expstore.merge(["~/run.exp", "~/again.exp"], out="~/both.exp")
    expstore.resize("~/both.exp", capacity=6)
    expstore.ZarrStorage("~/z.exp").close()
    expstore.ArrowStorage("~/a.exp", 10).close()
    expstore.LazyMemmapStorage(10, scratch_dir="~/m.exp").close()
    assert run(["versions", "create", "~/run.exp", "~/versions"]) == 0
    assert run(["export", "~/run.exp", "~/out", "--parquet"]) == 0
    assert os.listdir(".") == []
    made = {
        "versions",
        "answer.parquet",
        "out.npz",
        "again.exp",
        "both.exp",
        "z.exp",
        "a.exp",
        "m.exp",
        "out",
    }
    assert set(os.listdir(home)) == {"elsewhere", "run.exp", *made}
