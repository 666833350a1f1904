"""The file layer: its operations, their order, and their errors."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from expstore.disk import files
from expstore.disk.bulk_files import Links, read_all, remove_files, start_links
from expstore.disk.files import KEEP_GIL_BYTES, MAP_BYTES, Disk, File, address_of
from expstore.disk.mapped_files import AddressRange
from expstore.disk.threads import Threads
from expstore.errors import StorageError
from tests.support.gated_disk import GatedDisk, refuse


def recording(fail_at: int | None = None) -> tuple[GatedDisk, list[tuple[str, str]]]:
    """Return a disk and the list of its operations; the operation with number `fail_at` fails once."""
    acts: list[tuple[str, str]] = []
    failures = [] if fail_at is None else [fail_at]

    def note(act: str, path: Path) -> None:
        if failures == [len(acts)]:
            failures.clear()
            raise StorageError(f"no {act}")
        acts.append((act, path.name))

    return GatedDisk(note), acts


@pytest.mark.parametrize("size", [0, 1, KEEP_GIL_BYTES, KEEP_GIL_BYTES + 1])
def test_write_and_read(tmp_path: Path, rng: np.random.Generator, size: int) -> None:
    data = rng.integers(0, 256, (2, size), np.uint8)[1]
    file = Disk().open(tmp_path / "a", create=True)
    file.write(data, 10)
    file.write(data.tobytes(), 10 + size)
    assert file.size() == (10 + 2 * size if size else 0)
    assert file.read(10, 2 * size) == 2 * data.tobytes()
    assert file.read(10 + size, 10 * size + 5) == data.tobytes()  # up to the end
    file.close()
    file.close()


@pytest.mark.parametrize("reserves", [True, False])
def test_writes_through_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool) -> None:
    """Other descriptors see the bytes at once; zeros follow until `truncate`, which ends the map."""
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    file, reader = Disk().open(tmp_path / "a", create=True), Disk().open(tmp_path / "a", write=False)
    file.write(b"head", 0)
    file.write_mapped(b"one", 4)
    assert (reader.read(0, 9), reader.size()) == (b"headone\0\0", MAP_BYTES)
    piece = bytes(range(256)) * (MAP_BYTES // 256)
    file.write_mapped(piece, 7)
    assert reader.read(0, 2 * MAP_BYTES) == b"headone" + piece + bytes(MAP_BYTES - 7)
    file.truncate(5)
    file.write_mapped(b"two", 5)
    assert reader.read(0, MAP_BYTES) == b"headotwo" + bytes(MAP_BYTES - 8)
    file.close()


def test_a_full_disk_refuses_a_write_through_a_map_that_is_too_short(tmp_path: Path) -> None:
    disk = GatedDisk()
    file = disk.open(tmp_path / "a", create=True)
    file.write_mapped(b"one", 0)
    disk.before = refuse("allocate")
    file.write_mapped(b"two", MAP_BYTES - 3)
    with pytest.raises(StorageError, match="no allocate"):
        file.write_mapped(b"three", MAP_BYTES - 1)
    disk.relax()
    file.write_mapped(b"three", MAP_BYTES)
    assert file.read(MAP_BYTES - 3, 8) == b"twothree"
    file.close()


def test_a_closed_file_refuses_and_names_the_path(tmp_path: Path) -> None:
    file = Disk().open(tmp_path / "some.file", create=True)
    file.close()
    big = b"x" * (KEEP_GIL_BYTES + 1)
    acts: list[Callable[[], object]] = [lambda: file.write(b"x", 0), lambda: file.write(big, 0)]
    acts += [lambda: file.truncate(3), lambda: file.read(0, 1), lambda: file.allocate(9)]
    acts += [file.sync, file.size, file.try_lock, lambda: file.map_writable(4096)]
    for act in acts:
        with pytest.raises(StorageError, match=r"some\.file.*Bad file descriptor") as caught:
            act()
        assert caught.value.errno == errno.EBADF


def test_a_full_disk_has_a_kind_of_its_own() -> None:
    file = File(Disk(), Path("/dev/full"), os.open("/dev/full", os.O_RDWR))  # a store has no such files
    for data in (b"x", b"x" * (KEEP_GIL_BYTES + 1)):
        with pytest.raises(StorageError, match="No space left") as caught:
            file.write(data, 0)
        assert caught.value.kind == "disk_full"
        assert caught.value.errno == errno.ENOSPC
        assert "free space" in caught.value.hint
    file.close()


@pytest.mark.parametrize("size", [5000, KEEP_GIL_BYTES + 8])
def test_a_short_write_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    real, small = os.pwrite, files._pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    monkeypatch.setattr(files, "_pwrite", lambda fd, data, n, at: small(fd, data, min(n, 1000), at))
    file = Disk().open(tmp_path / "a", create=True)
    data = np.arange(size, dtype=np.uint8)
    file.write(data, 3)
    file.write(data.tobytes(), 3 + size)
    assert file.read(3, 2 * size) == 2 * data.tobytes()
    file.close()


def test_a_write_of_zero_bytes_fails_instead_of_looping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_pwrite", lambda *given: 0)
    file = Disk().open(tmp_path / "a", create=True)
    file.write(b"", 0)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        file.write(b"x", 0)
    assert caught.value.errno == errno.EIO
    file.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_scatter(tmp_path: Path, compiled: bool) -> None:
    disk = Disk()
    if compiled:
        disk._load_kernel()
    made = [disk.open(tmp_path / name, create=True) for name in "abc"]
    arrays = [np.arange(10, dtype="u1"), np.arange(300, dtype="<i2").reshape(3, 100), np.arange(10.0)]
    offsets = np.array([5, 0, 70])

    def scatter() -> None:
        fds = np.array([file.fd for file in made])
        addresses = np.array([address_of(array) for array in arrays])
        disk.scatter(arrays, made, fds, addresses, np.array([array.nbytes for array in arrays]), offsets)

    scatter()
    for file, array, offset in zip(made, arrays, offsets, strict=True):
        assert file.read(int(offset), 10_000) == array.tobytes()
    made[1].close()
    with pytest.raises(StorageError, match=r"b: Bad file"):
        scatter()
    made[0].close()
    made[2].close()


def test_a_disk_that_watches_its_acts_is_not_passed_by(tmp_path: Path) -> None:
    disk, acts = recording()
    disk.warm()
    file = disk.open(tmp_path / "a", create=True)
    zero = np.zeros(1, np.int64)
    array = np.arange(4, dtype="u1")
    disk.scatter([array], [file], np.array([file.fd]), zero + address_of(array), zero + 4, zero)
    assert acts == [("create", "a"), ("write", "a")]
    file.close()


WHOLE = [("create", "a.tmp"), ("truncate", "a.tmp"), ("write", "a.tmp"), ("sync", "a.tmp"), ("rename", "a")]


def test_write_whole_syncs_before_it_renames(tmp_path: Path) -> None:
    disk, acts = recording()
    disk.write_whole(tmp_path / "a", b"one")
    assert acts == [*WHOLE, ("sync_dir", tmp_path.name)]
    assert disk.syncs == 2


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    for at in range(len(WHOLE)):
        (tmp_path / "a").write_bytes(b"old and longer")
        disk, _ = recording(fail_at=at)
        with pytest.raises(StorageError):
            disk.write_whole(tmp_path / "a", b"new")
        assert (tmp_path / "a").read_bytes() == b"old and longer"
        disk.write_whole(tmp_path / "a", b"new")
        assert (tmp_path / "a").read_bytes() == b"new"
        assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("threads", [0, 4])
def test_sync_all_does_all_and_raises_the_first_failure(tmp_path: Path, threads: int) -> None:
    synced: list[str] = []

    def fail(act: str, path: Path) -> None:
        if act.startswith("sync"):
            synced.append(path.name)
            if path.name in "bc":
                raise StorageError(f"no sync of {path.name}")

    disk = GatedDisk(fail)
    made = [disk.open(tmp_path / name, create=True) for name in "abcd"]
    pool = Threads(threads) if threads else None
    with pytest.raises(StorageError, match="no sync of b"):
        disk.sync_all(made, [tmp_path], pool)
    assert set(synced) == ({"a", "b", "c", "d", tmp_path.name} if pool else {"a", "b"})
    disk.sync_all([made[0], made[3]], [tmp_path], pool)
    for file in made:
        file.close()


def test_a_failed_sync_is_raised_although_the_wait_was_interrupted(tmp_path: Path) -> None:
    """Otherwise the next sync would succeed, and nobody would know of the bytes that were lost."""
    interrupted = threading.Event()
    done: list[str] = []

    def fail(act: str, path: Path) -> None:
        if act == "sync":
            if threading.current_thread() is threading.main_thread() and not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt
            assert interrupted.wait(30)
            done.append(path.name)
            if path.name == "b":
                raise StorageError("no sync of b")

    disk = GatedDisk(fail)
    made = [disk.open(tmp_path / name, create=True) for name in "abc"]
    with pytest.raises(StorageError, match="no sync of b"):
        disk.sync_all(made, [], Threads())
    assert len(done) == 2
    interrupted.clear()
    with pytest.raises(KeyboardInterrupt):
        disk.sync_all([made[0], made[2]], [], Threads())
    for file in made:
        file.close()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match=rf"cannot list {tmp_path}: Permission denied"):
        Disk().check_tree(tmp_path)


def test_missing_things(tmp_path: Path) -> None:
    disk = Disk()
    nothing = tmp_path / "nothing"
    assert disk.size(nothing) == -1
    assert disk.names(nothing) == []
    assert not disk.exists(nothing)
    disk.unlink(nothing)
    disk.remove_tree(nothing)
    for act in (lambda: disk.open(nothing), lambda: disk.read_whole(nothing), lambda: disk.sync_dir(nothing)):
        with pytest.raises(StorageError, match=r"nothing.*No such file") as caught:
            act()
        assert caught.value.errno == errno.ENOENT


def test_folders(tmp_path: Path) -> None:
    disk, acts = recording()
    disk.make_dir(tmp_path / "x" / "y")
    disk.make_dir(tmp_path / "x" / "y")
    disk.put(tmp_path / "x" / "y" / "f", b"12345")
    disk.put(tmp_path / "x" / "e", b"")
    assert disk.names(tmp_path / "x") == ["e", "y"]
    assert disk.size(tmp_path / "x" / "y" / "f") == 5
    assert disk.measure_space(tmp_path / "x") >= 5
    assert disk.free(tmp_path) > 0
    disk.remove_tree(tmp_path / "x")
    assert disk.names(tmp_path) == []
    assert [act for act, _ in acts].count("mkdir") == 1


def test_a_lock_is_one_descriptors(tmp_path: Path) -> None:
    disk = Disk()
    first, second = disk.open(tmp_path / "l", create=True), disk.open(tmp_path / "l")
    assert first.try_lock()
    assert not second.try_lock()
    second.close()  # which must not give the first one's lock away
    third = disk.open(tmp_path / "l")
    assert not third.try_lock()
    first.close()
    assert third.try_lock()
    third.close()


def test_address_range_is_one_array_over_several_files(tmp_path: Path) -> None:
    disk = Disk()
    made = [disk.open(tmp_path / name, create=True) for name in "ab"]
    addresses = AddressRange(3 * 4096)
    for number, file in enumerate(made):
        file.write(np.full(512, number + 1, "<i8"), 0)
        addresses.attach(file, at=number * 4096, size=4096)
    view = addresses.array(np.dtype("<i8"), (3 * 512,))
    assert not view.flags.writeable
    np.testing.assert_array_equal(view[500:524], [1] * 12 + [2] * 12)
    made[1].write(np.array([77], "<i8"), 8)
    assert view[513] == 77  # writes show in the map
    for file in made:
        file.close()
    del addresses
    gc.collect()
    assert view[513] == 77  # the range lives as long as an array over it
    assert addresses_of(view) % 4096 == 0


def addresses_of(view: np.ndarray) -> int:
    return int(view.__array_interface__["data"][0])


def test_a_file_too_short_is_never_mapped(tmp_path: Path) -> None:
    file = Disk().open(tmp_path / "short", create=True)
    file.write(b"x" * 100, 0)
    with pytest.raises(StorageError, match=r"short is shorter than the 4096"):
        AddressRange(4096).attach(file, at=0, size=4096)
    file.close()


def test_a_failed_sync_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file = Disk().open(tmp_path / "a", create=True)
    monkeypatch.setattr(files, "_sync_data", fail)
    with pytest.raises(StorageError, match="cannot sync .*a: Input/output error") as caught:
        file.sync()
    assert caught.value.lost
    assert caught.value.errno == errno.EIO
    file.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_failed_sync_of_many_files_says_which_and_why(tmp_path: Path, compiled: bool) -> None:
    disk = Disk()
    if compiled:
        disk._load_kernel()
    made = [disk.open(tmp_path / f"f{number}", create=True) for number in range(9)]
    disk.sync_all(made, [tmp_path], Threads())
    made[6].close()
    with pytest.raises(StorageError, match=r"cannot sync .*f6: Bad file descriptor") as caught:
        disk.sync_all(made, [tmp_path], Threads())
    assert caught.value.errno == errno.EBADF
    assert caught.value.lost
    for file in made:
        file.close()


def test_only_syncs_lose_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        Disk().open(tmp_path / "no" / "such", create=True)
    assert not caught.value.lost
    with pytest.raises(StorageError, match="No such file") as caught:
        Disk().sync_dir(tmp_path / "no")
    assert caught.value.lost
    with pytest.raises(StorageError, match="No such file") as caught:
        Disk().free(tmp_path / "no")
    assert caught.value.errno == errno.ENOENT


@pytest.fixture(params=["plain", "compiled"])
def disk(request: pytest.FixtureRequest) -> Disk:
    """A disk, with and without the loops that take a second to be loaded."""
    disk = Disk()
    if request.param == "compiled":
        disk._load_kernel()
    return disk


@pytest.fixture
def pool() -> Threads:
    return Threads(2)


def make_files(folder: Path, names: Sequence[str], size: int = 9) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(bytes(size))


@pytest.mark.parametrize("going", [False, True])
def test_many_links_at_once(tmp_path: Path, disk: Disk, pool: Threads, going: bool) -> None:
    """What is missing or has another length is left out; threads may have ended with the interpreter."""
    if going:
        pool.refuse()
    a, b = [f"c.{number}" for number in range(7)], ["c.0.0", "ü", "short", "gone"]
    make_files(tmp_path / "a", a)
    make_files(tmp_path / "b", b[:3], 5)
    os.truncate(tmp_path / "b" / "short", 4)
    for name in ("new-a", "new-b"):
        (tmp_path / name).mkdir()
    groups = [
        Links(tmp_path / "a", tmp_path / "new-a", a, 9),
        Links(tmp_path / "nowhere", tmp_path / "new-a", ["x"], 9),
        Links(tmp_path / "b", tmp_path / "new-b", b, 5),
        Links(tmp_path / "b", tmp_path / "new-b", [], 5),
    ]
    before = len(os.listdir("/proc/self/fd"))
    assert start_links(disk, groups, pool)() == [[], ["x"], ["short", "gone"], []]
    assert len(os.listdir("/proc/self/fd")) == before
    assert disk.names(tmp_path / "new-a") == a
    assert disk.names(tmp_path / "new-b") == ["c.0.0", "ü"]
    assert (tmp_path / "new-a" / "c.6").stat().st_ino == (tmp_path / "a" / "c.6").stat().st_ino


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSPC])
def test_links_that_cannot_be(
    tmp_path: Path, disk: Disk, pool: Threads, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Where there are no links to be had files are copied; a full disk is an error."""
    make_files(tmp_path / "a", ["f", "g"])
    (tmp_path / "new").mkdir()
    if disk.kernels is None:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "link", refuse)
    else:
        fake = SimpleNamespace(link_files=lambda old, new, sizes, codes, names, starts: codes.fill(code))
        disk.kernels = fake  # type: ignore[assignment]
    end = start_links(disk, [Links(tmp_path / "a", tmp_path / "new", ["f", "g"], 9)], pool)
    if code == errno.EXDEV:
        assert end() == [["f", "g"]]
        return
    with pytest.raises(StorageError, match=r"cannot link .*new/f: No space left"):
        end()


def test_files_of_one_folder_are_read(tmp_path: Path) -> None:
    make_files(tmp_path / "a", ["f", "long"])
    os.truncate(tmp_path / "a" / "long", 10)
    disk = Disk()
    assert read_all(disk, tmp_path / "a", ["f", "long", "gone"], size=9) == [bytes(9), b"", b""]
    assert read_all(disk, tmp_path / "nowhere", ["f"], size=9) == [b""]


def test_all_files_of_a_folder_go_at_once(tmp_path: Path, disk: Disk, pool: Threads) -> None:
    make_files(tmp_path / "x", [f"{number}" for number in range(9)])
    make_files(tmp_path / "x" / "y", ["f"])
    (tmp_path / "x" / "empty").mkdir()
    remove_files(disk, tmp_path / "x", pool)
    left = [path.name for path in (tmp_path / "x").rglob("*") if path.is_file()]
    assert bool(left) == (disk.kernels is None)
    disk.remove_tree(tmp_path / "x")
    assert disk.names(tmp_path) == []


@pytest.mark.parametrize("grouped", [False, True])
def test_syncs_are_counted_per_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    disk, me = Disk(), threading.get_ident()
    made = [disk.open(tmp_path / str(number), create=True) for number in range(20)]
    if grouped:
        kernels = SimpleNamespace(sync_files=lambda numbers: (0, 0))
        monkeypatch.setattr(disk, "kernels", kernels)
    disk.sync_all(made, [tmp_path], Threads(2))
    assert (disk.syncs, disk.syncs_of[me]) == (21, 21)
    other = threading.Thread(target=disk.sync_dir, args=(tmp_path,))
    other.start()
    other.join()
    assert (disk.syncs, disk.syncs_of[me]) == (22, 21)
    made[0].sync()
    disk.sync_all(made[:1], [], None)
    assert (disk.syncs, disk.syncs_of[me]) == (24, 23)
    for file in made:
        file.close()
