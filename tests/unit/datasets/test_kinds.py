"""The contract of a kind of data sets, and a kind that is added in one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import ArgumentError
from expstore.cli.app import run
from expstore.core import tuning
from expstore.datasets import (
    AtariDQNExperienceReplay,
    DatasetReplayBuffer,
    Kind,
    Reader,
    import_dataset,
    kinds,
    load_dataset,
    make_sample,
    register_dataset,
    registry,
)
from expstore.datasets.formats import make_reader, recognize
from expstore.datasets.kinds import openml
from expstore.datasets.registry import find_kind, list_kinds
from expstore.errors import NotFoundError, StateError
from tests.support.data_server import serving_files

pytestmark = pytest.mark.usefixtures("no_syncs")

FORMATS = [kind.format for kind in list_kinds()]
NAMED = [kind.format for kind in list_kinds() if kind.prefix]
#: Names of samples, for formats that their file's name tells.
NAMES = {"gen-dgrl": "bigfish.tar", "openml": "shuttle.arff"}
#: Ids of data sets whose files are like the sample.
IDS = {"openml": "shuttle", "lerobot": "lerobot/pusht", "minari": "walk/random-v0", "rlds": "walk/1.0.0"}


def choose_id(kind: Kind) -> str:
    return IDS.get(kind.format) or kind.available_datasets[0]


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_is_recognized_and_imported(name: str, tmp_path: Path) -> None:
    source = make_sample(name, tmp_path / NAMES.get(name, "sample"))
    assert recognize(source) == (name, [])
    done = import_dataset(make_reader(name, source), tmp_path / "a.exp")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        ends = rb.sql("SELECT status FROM episodes ORDER BY episode_id").fetchall()
        batch = rb.sample(8)
    if name == "openml":
        assert (done.rows, batch["X"].shape, ends) == (60, (8, 4), [("cut",)])
        return
    assert (done.episodes, ends[0]) == (3, ("terminated",))
    assert 70 <= done.rows <= 76
    assert batch["next", "reward"].shape == batch["next", "done"].shape == (8, 1)
    with pytest.raises(StateError, match="choose a path that does not exist"):
        make_sample(name, source)


def read_whole(reader: Reader) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return end, facts and values of each episode, whose pieces are joined."""
    found, pieces = [], list[Any]()
    for part in reader.parts():
        all_pieces = list(reader.episodes(part))
        for piece in all_pieces:
            pieces.append(piece)
            if piece.end != "open" or piece is all_pieces[-1]:
                values = [flatten(vars_of(one)) for one in pieces]
                for one, held, after in zip(pieces, values, values[1:], strict=False):
                    for key in held:
                        if key.startswith(("observation", "info", "states")):
                            np.testing.assert_array_equal(held[key][len(one) :], after[key][:1], key)
                            held[key] = held[key][:-1]
                joined = {key: np.concatenate([one[key] for one in values]) for key in values[0]}
                found.append((piece.end, dict(pieces[0].facts), joined))
                pieces = []
    return found


def vars_of(piece: Any) -> dict[str, Any]:
    """Return what is stored of an `Episode`, or of rows that have keys already."""
    names = ("columns_by_key", "observation", "action", "reward", "info", "states", "fields")
    return {name: getattr(piece, name) for name in names if getattr(piece, name, None) is not None}


def flatten(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return all arrays by the path of their names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{rest}": array for rest, array in flatten(value).items()}
        else:
            found[str(name)] = np.asarray(value)
    return found


def test_pieces_of_episodes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers yield long episodes in pieces of some size: here of a step, and without end."""
    sources = {name: make_sample(name, tmp_path / name / NAMES.get(name, "sample")) for name in FORMATS}
    whole = {name: read_whole(make_reader(name, source)) for name, source in sources.items()}
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 3)
    monkeypatch.setattr(openml, "_ROWS", 7)
    for module in {sys.modules[find_kind(name).reader.__module__] for name in FORMATS}:
        for size in ("_PIECE_BYTES", "_SLAB_BYTES"):
            monkeypatch.setattr(module, size, 1, raising=False)
    more = []
    for name, source in sources.items():
        reader = make_reader(name, source)
        np.testing.assert_equal(read_whole(reader), whole[name], name)
        count = sum(1 for part in reader.parts() for _ in reader.episodes(part))
        more += [name] if count > len(whole[name]) else []
    assert len(more) > 8, "most readers yield pieces"


@pytest.mark.some(4)
@pytest.mark.parametrize("name", NAMED)
def test_a_source_has_the_data_set_below_its_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "cache"))
    kind = find_kind(name)
    dataset_id = choose_id(kind)
    make_sample(name, tmp_path / "public" / dataset_id)
    with load_dataset(
        f"{kind.prefix}:{dataset_id}", batch_size=8, root=tmp_path / "root", source=tmp_path / "public"
    ) as data:
        assert isinstance(data, DatasetReplayBuffer)
        assert (data.dataset_id, data.root) == (dataset_id, tmp_path / "root")
        assert data.sample().batch_size == (8,)
        parts = data.meta["import"]["parts"]
    data = load_dataset(f"{kind.prefix}:{dataset_id}", source=tmp_path / "public" / dataset_id)
    assert isinstance(data, DatasetReplayBuffer)
    assert data.meta["import"]["parts"] == parts
    assert data.data_path == tmp_path / "cache" / str(kind.prefix) / dataset_id
    data.delete()
    assert not data.data_path.exists()


@pytest.mark.some(4)
@pytest.mark.parametrize("name", NAMED)
def test_a_missing_data_set_says_what_a_source_is(name: str, tmp_path: Path) -> None:
    kind = find_kind(name)
    dataset_id = choose_id(kind)
    with pytest.raises(NotFoundError) as caught:
        load_dataset(f"{kind.prefix}:{dataset_id}", root=tmp_path, download=False)
    wanted = f"pass source=, {kind.files}, or a folder that has {dataset_id} below it, or download=True"
    assert caught.value.hint.startswith(wanted)
    with serving_files(tmp_path) as server, pytest.raises(NotFoundError) as caught:
        load_dataset(f"{kind.prefix}:{dataset_id}", root=tmp_path / "root", mirror=server.url)
    assert kind.files in caught.value.hint


def test_a_default_call_says_where_the_files_went(tmp_path: Path) -> None:
    with pytest.raises(
        NotFoundError, match="no longer exists; pass source=, the folder of a run, .* mirror="
    ):
        AtariDQNExperienceReplay("Pong/5", root=tmp_path)


def test_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="unknown format 'd4r'; did you mean d4rl"):
        make_sample("d4r", tmp_path / "a")


# -- a kind that is added --------------------------------------------------------------------------------


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the package of kinds have the modules of `more_kinds` too."""
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(Path(__file__).with_name("more_kinds"))])
    registry._load_kinds.cache_clear()
    yield
    registry._load_kinds.cache_clear()


@pytest.mark.usefixtures("added")
def test_a_kind_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "data"))
    source = make_sample("counts", tmp_path / "public" / "small.counts")
    with serving_files(tmp_path / "public") as server:
        with load_dataset("counts:small", batch_size=8, mirror=server.url) as data:
            assert type(data) is DatasetReplayBuffer
            assert data.sample()["observation"].shape == (8, 1)
            assert data.data_path == tmp_path / "data" / "counts" / "small"
    with load_dataset("counts:small") as data:
        assert len(data) == 76
    with load_dataset("counts:large", source=source, options={"scale": 2.0}) as data:
        assert data.meta["import"]["format"] == "counts"
    assert run(["import", str(source), str(tmp_path / "a.exp")]) == 0
    assert run(["import", str(source), str(tmp_path / "b.exp"), "--format", "counts"]) == 0
    assert run(["datasets", "list", "counts", "--available"]) == 0
    assert "small\nlarge\n" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="'larger' is not one of the data sets; did you mean 'large'"):
        load_dataset("counts:larger")


def test_a_registered_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.unit.datasets.more_kinds.counts import KIND

    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_dataset("lab", KIND)
    source = make_sample("counts", tmp_path / "a.counts")
    with load_dataset("lab:small", root=tmp_path, source=source) as data:
        assert len(data) == 76
    assert recognize(source) == ("counts", [])
    assert registry.dataset_class("lab") is KIND
