"""Links in the folders of data sets."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.datasets import import_dataset
from expstore.datasets.formats import make_reader, recognize
from expstore.disk.source_links import check_links
from expstore.errors import StorageError
from expstore.exchange import export_arrow, export_parquet, import_arrow, import_parquet
from tests.support.linked_files import link_files
from tests.support.minari_sets import write_old_minari
from tests.unit.datasets.test_lerobot import write_v3
from tests.unit.datasets.test_rlds import small

ROWS = 20


def _rows() -> TensorDict:
    return TensorDict(
        {"observation": torch.arange(ROWS * 3.0).reshape(ROWS, 3), "action": torch.zeros(ROWS)}, [ROWS]
    )


def _exported(form: Callable[..., Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with expstore.open(folder.with_name("rows.exp")) as rb:
            rb.extend(_rows())
            form(rb, folder)
        return folder

    return make


def _memmap(folder: Path) -> Path:
    _rows().memmap(folder)
    return folder


def _vd4rl(folder: Path) -> Path:
    folder.mkdir()
    np.savez(
        folder / "a.npz", image=np.zeros((9, 3, 4, 4), "u1"), action=np.zeros((9, 2)), reward=np.zeros(9)
    )
    return folder


def _rlds(folder: Path) -> Path:
    folder.mkdir()
    return small(folder)


def _reader(form: str) -> Callable[[Path, Path], object]:
    return lambda source, target: import_dataset(make_reader(form, source), target)


#: How a data set is made and imported, and the file of it that becomes a link.
SOURCES: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Path], object], str]] = {
    "tensordict": (_memmap, _reader("tensordict"), "observation.memmap"),
    "minari": (write_old_minari, _reader("minari"), "data/main_data.hdf5"),
    "lerobot": (write_v3, _reader("lerobot"), "data/chunk-000/file-001.parquet"),
    "rlds": (_rlds, _reader("rlds"), "features.json"),
    "vd4rl": (_vd4rl, _reader("vd4rl"), "a.npz"),
    "parquet": (_exported(export_parquet), import_parquet, "episodes.parquet"),
    "arrow": (_exported(export_arrow), import_arrow, "rows.arrow"),
}


@pytest.mark.guarantee("exchange/safe")
@pytest.mark.some(4)
@pytest.mark.parametrize("name", list(SOURCES))
def test_files_outside_are_not_read(tmp_path: Path, name: str) -> None:
    """A file, or the folder above it, that is a link to the outside is refused."""
    make, run, file = SOURCES[name]
    source = tmp_path / "in" / "set"
    source.parent.mkdir()
    make(source)
    place = source / file
    whole = shutil.copytree(source, tmp_path / "whole")
    outside = shutil.move(place, tmp_path / "outside")
    place.symlink_to(outside)
    with pytest.raises(StorageError, match=f"{place.name} is a link to .*outside") as caught:
        run(source, tmp_path / "out.exp")
    assert caught.value.kind == "outside"
    with pytest.raises(StorageError, match="is a link to"):
        recognize(source)
    if place.parent != source:
        place.unlink()
        shutil.rmtree(place.parent)
        place.parent.symlink_to((whole / file).parent)
        with pytest.raises(StorageError, match=f"{place.parent.name} is a link to"):
            run(source, tmp_path / "out.exp")
    assert not (tmp_path / "out.exp").exists()


@pytest.mark.some(4)
@pytest.mark.parametrize("name", list(SOURCES))
def test_links_inside_are_followed(tmp_path: Path, name: str) -> None:
    """The source itself may be a link, and files in it may be links to files in it."""
    make, run, file = SOURCES[name]
    source = tmp_path / "in" / "set"
    source.parent.mkdir()
    make(source)
    place = source / file
    real = source / "real"
    real.mkdir()
    shutil.move(place, real / "kept.bin")
    place.symlink_to(real / "kept.bin")
    link = tmp_path / "link"
    link.symlink_to(source)
    run(link, tmp_path / "out.exp")
    with expstore.open(tmp_path / "out.exp", mode="r") as rb:
        assert len(rb)


@pytest.mark.guarantee("exchange/safe")
def test_snapshots_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    """Files of a snapshot are links to blobs of the same repository, and to nothing else."""
    snapshot = link_files(write_v3(tmp_path / "set"), tmp_path / "hub")
    import_dataset(make_reader("lerobot", snapshot), tmp_path / "out.exp")
    check_links(snapshot / "data")
    # The name alone permits nothing: not blobs of another repository, and not a repository below the source.
    other = tmp_path / "hub" / "datasets--other--set" / "blobs" / "1"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"")
    (snapshot / "more").symlink_to(other)
    with pytest.raises(StorageError, match="more is a link to"):
        check_links(snapshot)


def test_circles_and_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a").symlink_to("b")
    (tmp_path / "set/b").symlink_to("a")
    (tmp_path / "set/c").symlink_to("absent")
    check_links(tmp_path / "set")  # they lead nowhere, and reading them fails
    (tmp_path / "set/d").symlink_to("/absent")
    with pytest.raises(StorageError, match="d is a link to /absent"):
        check_links(tmp_path / "set")
