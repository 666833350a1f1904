"""File systems on which a store is refused: by name, from an injected table, and by probing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tensordict import TensorDict

from expstore.disk.files import Disk, File
from expstore.disk.filesystem import file_system, fills_holes, probe
from expstore.errors import StorageError
from expstore.storages.factory import ZarrStorage
from tests.support.gated_disk import GatedDisk, refuse

TABLE = """\
/dev/root / ext4 rw 0 0
proc /proc proc rw 0 0
broken line
server:/home {0}/nfs nfs4 rw,vers=4.2 0 0
tmpfs {0}/nfs/scratch tmpfs rw 0 0
//box/share {0}/with\\040space cifs rw 0 0
/dev/sdb {0}/twice xfs rw 0 0
host {0}/twice fuse.sshfs rw 0 0
/dev/sdc {0}/nf btrfs rw 0 0
"""


class Mounted(Disk):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.table = TABLE.replace("{0}", str(folder))

    def mounts(self) -> str:
        return self.table


#: Path below the folder of the table -> its file system.
FOUND = {
    "elsewhere": "ext4",
    "nfs": "nfs4",
    "nfs/deep/run.exp": "nfs4",
    "nfs/scratch/run.exp": "tmpfs",
    "with space/run.exp": "cifs",
    "twice/run.exp": "fuse.sshfs",
    "nfsomething": "ext4",
    "nf/run.exp": "btrfs",
    "link/run.exp": "nfs4",
}


def test_the_last_and_innermost_mount_counts(tmp_path: Path) -> None:
    (tmp_path / "nfs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nfs")
    disk = Mounted(tmp_path)
    assert {name: file_system(disk, tmp_path / name) for name in FOUND} == FOUND
    assert [name for name in FOUND if fills_holes(disk, tmp_path / name)] == ["nfs/scratch/run.exp"]


def test_without_a_table_nothing_is_known(tmp_path: Path) -> None:
    disk = Mounted(tmp_path)
    disk.table = ""
    assert file_system(disk, tmp_path) == ""
    probe(disk, tmp_path, new=True)


@pytest.mark.guarantee(
    "disk/network",
    "A network file system, and one on which locks or maps do not work, is refused.",
)
@pytest.mark.parametrize(("name", "kind"), [("nfs", "nfs4"), ("with space", "cifs"), ("twice", "fuse.sshfs")])
def test_network_file_systems_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name / "run.exp"
    with pytest.raises(StorageError, match=rf"{path} is on {kind}.*local disk") as caught:
        ZarrStorage(path, 10, disk=Mounted(tmp_path))
    assert caught.value.kind == "unsafe_filesystem"


def test_a_store_that_was_moved_there_is_refused_too(
    tmp_path: Path, make_batch: Callable[..., TensorDict]
) -> None:
    path = tmp_path / "nfs" / "run.exp"
    ZarrStorage(path, 10, disk=Disk()).close()
    before = sorted(os.listdir(path))
    with pytest.raises(StorageError, match="is on nfs4"):
        ZarrStorage(path, disk=Mounted(tmp_path))
    assert sorted(os.listdir(path)) == before
    ZarrStorage(path, disk=Disk()).close()  # and is not locked


@pytest.mark.guarantee("disk/network")
def test_a_trial_leaves_nothing_and_finds_locks_that_do_not_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(Disk(), tmp_path, new=True)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(File, "try_lock", lambda self: True)  # as if no two locks conflicted
    with pytest.raises(StorageError, match=f"{tmp_path}.*locks.*local disk") as caught:
        probe(Disk(), tmp_path, new=True)
    assert caught.value.kind == "unsafe_filesystem"
    assert os.listdir(tmp_path) == []


@pytest.mark.guarantee("disk/network")
def test_a_trial_finds_maps_that_do_not_show_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(bytes):
        def close(self) -> None: ...

    monkeypatch.setattr(File, "map_writable", lambda self, size: Blind(size))
    with pytest.raises(StorageError, match="maps"):
        probe(Disk(), tmp_path, new=False)


@pytest.mark.guarantee("disk/full")
@pytest.mark.parametrize("new", [True, False])
def test_a_full_disk_can_be_opened_where_a_store_is_already(tmp_path: Path, new: bool) -> None:
    disk = GatedDisk(refuse("write"))
    if not new:
        return probe(disk, tmp_path, new=False)
    with pytest.raises(StorageError):
        probe(disk, tmp_path, new=True)
