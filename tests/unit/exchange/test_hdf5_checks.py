"""HDF5 files that read other files, or claim more bytes than they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from expstore.datasets import import_dataset
from expstore.datasets.formats import has_format, make_reader, recognize
from expstore.errors import ExpStoreError, SchemaError, StorageError
from expstore.exchange import import_hdf5
from expstore.exchange.hdf5 import datasets_in, reading_hdf5

SECRET = b"TOPSECRET-0123456789abcdef-private-key" * 20


def write(path: Path, change: Callable[[h5py.File, Path], Any]) -> Path:
    """Write 40 rows with D4RL's names and other files; `change` adds what is wrong."""
    secret = path.with_name("secret.bin")
    secret.write_bytes(SECRET)
    with h5py.File(path.with_name("other.hdf5"), "w") as file:
        file["values"] = np.frombuffer(SECRET[:160], "u1").reshape(40, 4)
    with h5py.File(path, "w") as file:
        file["actions"], file["rewards"] = np.zeros((40, 2), "f4"), np.zeros(40, "f4")
        file["terminals"] = np.zeros(40, bool)
        change(file, path.parent)
    return path


def external_storage(file: h5py.File, folder: Path) -> None:
    file.create_dataset("observations", (40, 4), "u1", external=[(str(folder / "secret.bin"), 0, 160)])


def external_link(file: h5py.File, folder: Path) -> None:
    file["observations"] = h5py.ExternalLink("other.hdf5", "/values")


def external_group(file: h5py.File, folder: Path) -> None:
    file["observations"] = np.zeros((40, 4), "u1")
    file["infos"] = h5py.ExternalLink("other.hdf5", "/")


def virtual(file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((40, 4), "u1")
    layout[:] = h5py.VirtualSource(str(folder / "other.hdf5"), "values", (40, 4))
    file.create_virtual_dataset("observations", layout)


READS = [external_storage, external_link, external_group, virtual]


@pytest.mark.guarantee("exchange/safe")
@pytest.mark.parametrize("change", READS)
def test_other_files_are_not_read(tmp_path: Path, change: Callable[[h5py.File, Path], Any]) -> None:
    """Every function that opens HDF5 refuses the file, names what is wrong, and makes no store."""
    path, target = write(tmp_path / "data.hdf5", change), tmp_path / "out.exp"
    acts: list[Callable[[], Any]] = [
        lambda: import_hdf5(path, target),
        lambda: recognize(path),
        *(lambda form=form: has_format(form, path) for form in ("d4rl", "hdf5", "robomimic", "vd4rl")),
        *(
            lambda form=form: import_dataset(make_reader(form, path), target)
            for form in ("d4rl", "hdf5", "robomimic", "roboset", "vd4rl")
        ),
    ]
    for act in acts:
        with pytest.raises(ExpStoreError, match=r"'/(observations|infos)' in .*data.hdf5") as caught:
            act()
        assert caught.value.kind in ("outside", "storage", "schema")
        assert not target.exists()
    with pytest.raises(SchemaError) as refused:
        import_hdf5(path, target)
    assert refused.value.kind == "outside"


def test_links_inside_the_file_are_followed(tmp_path: Path) -> None:
    def change(file: h5py.File, folder: Path) -> None:
        file["observations"] = np.arange(160, dtype="f4").reshape(40, 4)
        file["alias"] = h5py.SoftLink("/observations")
        file["nothing"] = h5py.SoftLink("/absent")
        file["group/x"] = np.arange(40)
        file["again"] = h5py.SoftLink("/group")

    with reading_hdf5(write(tmp_path / "data.hdf5", change)) as file:
        assert {"alias", "again/x", "group/x"} <= {name for name, _ in datasets_in(file)}


@pytest.mark.parametrize("name", ["a/up", "a/b/up"])
@pytest.mark.parametrize("hard", [True, False])
def test_circles_of_groups(tmp_path: Path, name: str, hard: bool) -> None:
    def change(file: h5py.File, folder: Path) -> None:
        file["a/b/x"] = np.zeros(40)
        file[name] = file["a"] if hard else h5py.SoftLink("/a")

    path = write(tmp_path / "data.hdf5", change)
    with pytest.raises(SchemaError, match=r"second name of a group|contains links"):
        import_hdf5(path, tmp_path / "out.exp")


@pytest.mark.guarantee("exchange/bounded")
def test_claimed_sizes(tmp_path: Path) -> None:
    """A few KB that claim 2^40 rows, or chunks of gigabytes, are refused before anything is allocated."""

    def sparse(file: h5py.File, folder: Path) -> None:
        file.create_dataset("observations", (1 << 40, 4), "f4", chunks=(1 << 10, 4), compression="gzip")

    def chunk(file: h5py.File, folder: Path) -> None:
        rows = 1 << 27
        file.create_dataset(
            "observations", (40, 4), "f4", maxshape=(rows, 4), chunks=(rows, 4), compression="gzip"
        )

    def empty(file: h5py.File, folder: Path) -> None:
        file.create_dataset("observations", (1 << 30, 4), "f4")

    for change in (sparse, chunk, empty):
        path = write(tmp_path / f"{change.__name__}.hdf5", change)
        assert path.stat().st_size < 20_000
        with pytest.raises(StorageError, match=r"'/observations' in .* claims [\d,]+ bytes"):
            import_hdf5(path, tmp_path / "out.exp")


def test_constant_arrays_are_read(tmp_path: Path) -> None:
    """Zeros compress about 1000 times: this is no forgery."""

    def zeros(file: h5py.File, folder: Path) -> None:
        shape = (40, 1 << 20)
        file.create_dataset("observations", data=np.zeros(shape, "u1"), chunks=shape, compression="gzip")

    path = write(tmp_path / "zeros.hdf5", zeros)
    assert path.stat().st_size < 60_000
    with reading_hdf5(path) as file:
        assert file["observations"].shape == (40, 1 << 20)


def test_formats_of_files_are_found(tmp_path: Path) -> None:
    assert recognize(write(tmp_path / "data.hdf5", lambda file, folder: None)) == (None, [])
