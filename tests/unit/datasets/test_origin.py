"""Making a data set's store: forced again, from missing sources, and after failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.cli.app import run
from expstore.datasets import (
    BaseDatasetExperienceReplay,
    D4RLExperienceReplay,
    Origin,
    Reader,
    download,
    importer,
    load_dataset,
    origin,
    register_dataset,
    registry,
)
from expstore.datasets.download import RemoteFile
from expstore.datasets.origin import prepare_dataset, remove_dataset
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, NotFoundError, RemoteError, StateError, StorageError
from tests.support.data_server import serving_files
from tests.unit.datasets.test_d4rl import arrays, write
from tests.unit.datasets.test_importer import NpzReader, make_source, picture

ID = "serials/v1"


def make(root: Path, source: Path | None = None, **options: Any) -> Path:
    return prepare_dataset(serials(), root, source=source, **options)


def serials(
    reader: type[Reader] = NpzReader, files: Sequence[RemoteFile] = (), error: Exception | None = None
) -> Origin:
    def list_files() -> Sequence[RemoteFile]:
        if error is not None:
            raise error
        return files

    return Origin(name="lab", dataset_id=ID, make_reader=reader, list_files=list_files)


class Failing(NpzReader):
    """Fail in the third part."""

    def episodes(self, part: Any) -> Iterator[Any]:
        if part.name == "part2":
            raise EOFError("short")
        yield from super().episodes(part)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_source(tmp_path / "raw")
    return make(tmp_path / "root", tmp_path / "raw")


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob(".*"))


# -- download="force" ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_force_replaces_the_store(tmp_path: Path, store: Path) -> None:
    other = make_source(tmp_path / "other", seed=1)
    prepare_dataset(serials(), tmp_path / "plain", source=other)
    assert make(tmp_path / "root", other, download="force") == store
    assert picture(store) == picture(tmp_path / "plain" / ID)
    assert make(tmp_path / "root", other, download="force") == store
    assert hidden(tmp_path / "root") == []


@pytest.mark.slow
def test_force_keeps_the_store_if_the_new_source_is_wrong(tmp_path: Path, store: Path) -> None:
    before = picture(store)
    with pytest.raises(NotFoundError, match="there is no file or folder"):
        make(tmp_path / "root", tmp_path / "nowhere", download="force")
    with pytest.raises(NotFoundError, match="the bucket is gone"):
        prepare_dataset(
            serials(error=NotFoundError("the bucket is gone")), tmp_path / "root", download="force"
        )
    other = make_source(tmp_path / "other", seed=1)
    with pytest.raises(StorageError, match="episode 0: EOFError"):
        prepare_dataset(serials(Failing), tmp_path / "root", source=other, download="force")
    assert picture(store) == before
    # The next run continues the import that failed.
    make(tmp_path / "root", other, download="force")
    assert picture(store) != before
    assert hidden(tmp_path / "root") == []


def test_force_fetches_the_files_again(tmp_path: Path) -> None:
    public = make_source(tmp_path / "public", parts=2)
    names = sorted(path.name for path in public.iterdir())
    with serving_files(public) as server:
        files = [RemoteFile(url=f"{server.url}/{name}", name=name) for name in names]
        there = serials(files=files)
        left = tmp_path / "root" / ".downloads" / ID
        left.mkdir(parents=True)
        (left / names[0]).write_bytes(b"of an earlier download that was damaged")
        prepare_dataset(there, tmp_path / "root", download="force")
        assert len(server.requests) == 2
        for how, root in (("force", tmp_path / "root"), (True, tmp_path / "other")):
            folder = root / ".downloads" / ID
            folder.mkdir(parents=True)
            lock = WriterLock(Disk(), folder / "LOCK")
            with pytest.raises(LockedError, match=f"another process is fetching {ID}"):
                prepare_dataset(there, root, download=how)
            lock.release()
        assert len(server.requests) == 2


@pytest.mark.slow
@pytest.mark.parametrize("died", [0, 1])
def test_a_swap_that_was_interrupted_is_finished(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, died: int
) -> None:
    other = make_source(tmp_path / "other", seed=1)
    before = picture(store)
    rename, left = Disk.rename, [died]

    def dying(disk: Disk, old: Path, new: Path) -> None:
        if old.name in ("v1", ".v1.new"):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        rename(disk, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "root", other, download="force")
    assert store.exists() == (died == 0)
    assert make(tmp_path / "root") == store  # nothing is fetched
    assert (picture(store) == before) == (died == 0)
    make(tmp_path / "root", other, download="force")
    assert hidden(tmp_path / "root") == []


@pytest.mark.slow
def test_a_swap_that_fails_puts_the_store_back(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, before = make_source(tmp_path / "other", seed=1), picture(store)
    rename = Disk.rename

    def failing(disk: Disk, old: Path, new: Path) -> None:
        if old.name.endswith(".new"):
            raise StorageError("cannot rename")
        rename(disk, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", failing)
        with pytest.raises(StorageError, match="cannot rename"):
            make(tmp_path / "root", other, download="force")
    assert picture(store) == before
    assert remove_dataset(tmp_path / "root", ID)
    assert list((tmp_path / "root" / "serials").iterdir()) == []


def test_force_does_not_touch_a_folder_that_is_not_a_store(tmp_path: Path) -> None:
    source = make_source(tmp_path / "raw")
    (tmp_path / "root" / ID).mkdir(parents=True)
    (tmp_path / "root" / ID / "mine").write_text("")
    with pytest.raises(StateError, match="is not a store"):
        make(tmp_path / "root", source, download="force")


@pytest.mark.slow
def test_trajectories_are_made_again(tmp_path: Path) -> None:
    file = write(tmp_path / "a.hdf5", arrays())
    other = write(tmp_path / "b.hdf5", arrays([2, 2]))
    for source, rows in ((file, 3), (other, 2)):
        data = D4RLExperienceReplay(
            "hopper-medium-v2", root=tmp_path / "root", source=source, download="force", split_trajs=True
        )
        assert len(data) == rows
        data.close()
    D4RLExperienceReplay("hopper-medium-v2", root=tmp_path / "root", source=file, download="force").close()
    data = D4RLExperienceReplay("hopper-medium-v2", root=tmp_path / "root", split_trajs=True)
    assert len(data) == 3


# -- sources and downloads that are not there -------------------------------------------------------------


def test_a_source_that_is_gone_needs_no_second_look(tmp_path: Path, store: Path) -> None:
    for path in (tmp_path / "raw").iterdir():
        path.unlink()
    assert make(tmp_path / "root", tmp_path / "raw") == store  # an empty folder
    (tmp_path / "raw").rmdir()
    assert make(tmp_path / "root", tmp_path / "raw") == store
    with pytest.raises(NotFoundError, match=r"there is no file or folder .*raw; check the path in source="):
        make(tmp_path / "elsewhere", tmp_path / "raw")


def test_files_that_did_not_change_are_not_hashed_again(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    hash_file = importer._hash_file

    def spy(path: Path, *more: Any) -> str:
        hashed.append(path.name)
        return hash_file(path, *more)

    monkeypatch.setattr(importer, "_hash_file", spy)
    make(tmp_path / "root", tmp_path / "raw")
    assert hashed == []
    touched = tmp_path / "raw" / "part1.npz"
    data = touched.read_bytes()
    touched.write_bytes(data)
    make(tmp_path / "root", tmp_path / "raw")
    assert hashed == ["part1.npz"]
    touched.write_bytes(data[:-1] + b"x")
    with pytest.raises(StateError, match="was not imported from these files"):
        make(tmp_path / "root", tmp_path / "raw")


def test_hashing_is_reported(tmp_path: Path) -> None:
    source = make_source(tmp_path / "raw")
    size = sum(path.stat().st_size for path in source.iterdir())
    progress: dict[str, list[tuple[int, int]]] = {}
    open_bars: list[str] = []

    @contextmanager
    def show(what: str, unit: str = "bytes") -> Iterator[Any]:
        open_bars.append(what)
        assert len(open_bars) == 1
        told = progress.setdefault(f"{what}, {unit}", [])
        yield lambda done, total: told.append((done, total))
        open_bars.remove(what)

    make(tmp_path / "root", source, show=show)
    assert list(progress) == [f"checking {ID}, bytes", f"importing {ID}, rows"]
    checked, rows = progress.values()
    assert checked[-1] == (size, size)
    assert len(checked) >= 6
    assert rows[-1][0] == rows[-1][1] > 0


def test_a_download_that_never_began_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    root = tmp_path / "root"
    nobody = serials(files=[RemoteFile(url="http://127.0.0.1:1/a.npz", name="a.npz")])
    with pytest.raises(
        RemoteError, match="check the address, or pass source=, files that you fetched yourself"
    ):
        prepare_dataset(nobody, root)
    assert list(root.iterdir()) == []
    with serving_files(make_source(tmp_path / "public", parts=1)) as server:
        files = [
            RemoteFile(url=f"{server.url}/part0.npz", name="part0.npz"),
            RemoteFile(url="http://127.0.0.1:1/part1.npz", name="part1.npz"),
        ]
        with pytest.raises(RemoteError, match="the same call continues the download"):
            prepare_dataset(serials(files=files), root)
    assert (root / ".downloads" / ID / "part0.npz").exists()
    with pytest.raises(NotFoundError, match=r"could not be found in .*nowhere/serials/v1; pass source="):
        make(tmp_path / "nowhere", download=False)


# -- a class of one's own ---------------------------------------------------------------------------------


class Serials(BaseDatasetExperienceReplay):
    """A user's data set."""

    def __init__(self, dataset_id: str, batch_size: int | None = None, **keywords: Any) -> None:
        assert dataset_id == ID
        super().__init__(serials(), batch_size, metadata={"author": "ada"}, **keywords)


def test_a_registered_class_with_an_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    source = make_source(tmp_path / "raw")
    register_dataset("lab", Serials)
    with load_dataset(f"lab:{ID}", batch_size=4, source=source) as data:
        assert data.data_path == tmp_path / "cache" / "lab" / ID == origin.data_folder("lab") / ID
        assert data.dataset_id == ID
        assert data.sample()["metadata"] == {"author": "ada"}
        rows = len(data)
    assert run(["datasets", "info", f"lab:{ID}"]) == 0
    with expstore.open(origin.data_folder("lab") / ID, mode="r") as rb:
        assert len(rb) == rows
    with load_dataset(f"lab:{ID}") as data:
        data.delete()
    assert not (tmp_path / "cache" / "lab" / ID).exists()
