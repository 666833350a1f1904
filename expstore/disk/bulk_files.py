"""Operations on many closed files at once: hard-link, read, sync, remove.

Used to create and restore snapshots. It uses the operations of a `Disk` one by one if a test replaced them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expstore.disk.files import Disk, File, link_error, link_if
from expstore.disk.threads import Threads, finish
from expstore.errors import StorageError

#: Number of closed files that are opened together to be synced.
_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class Links:
    """Files of one folder to hard-link into another folder.

    Args:
        old: The folder with the files.
        new: The folder for the links, which have the same names.
        names: Names of the files.
        size: Their length in bytes: missing files and files of another length are skipped.
    """

    old: Path
    new: Path
    names: Sequence[str]
    size: int


def start_links(disk: Disk, groups: Sequence[Links], pool: Threads) -> Callable[[], list[list[str]]]:
    """Begin to hard-link files, partly in another thread.

    Args:
        disk: Access to files.
        groups: The files to link.
        pool: Threads that make some of the links while the caller does other work.

    Returns:
        A function that must be called: it waits until all links are made, and returns the names of each group
            that could not be linked.
    """
    if not disk.in_bulk:
        left = [[name for name in group.names if not _link(disk, group, name)] for group in groups]
        return lambda: left
    # There are thousands of names, and creating a Path takes as long as creating a link.
    folders = ExitStack()
    try:
        opened = [_open_both(disk, group, folders) for group in groups]
        old: list[File] = []
        new: list[File] = []
        names: list[str] = []
        sizes: list[int] = []
        for both, group in zip(opened, groups, strict=True):
            if both is not None:
                count = len(group.names)
                old += [both[0]] * count
                new += [both[1]] * count
                names += group.names
                sizes += [group.size] * count
        codes = np.zeros(len(names), np.int64)
        if disk.kernels is None or sys.platform != "linux" or not names:
            given = zip(names, old, new, sizes, strict=True)
            codes[:] = [link_if(*each) for each in given]
            rest = _do_nothing
        else:
            facts = [np.array(fact) for fact in ([f.fd for f in old], [f.fd for f in new], sizes)]
            # The caller has other work to do first; with this share, both threads end together on two cores.
            rest = _side_by_side(pool, disk.kernels.link_files, [*facts, codes], names, 3 * len(names) // 4)
    except BaseException:
        folders.close()
        raise

    def end() -> list[list[str]]:
        with folders:
            rest()
        for at in np.flatnonzero(codes > 0).tolist():
            error = link_error(new[at].path / names[at], int(codes[at]))
            if error is not None:
                raise error
        done = iter((codes == 0).tolist())
        return [
            [name for name in group.names if both is None or not next(done)]
            for both, group in zip(opened, groups, strict=True)
        ]

    return end


def remove_files(disk: Disk, path: Path, pool: Threads) -> None:
    """Remove the files of a folder and of its subfolders in bulk; `Disk.remove_tree` removes the rest."""
    if not disk.in_bulk or disk.kernels is None or sys.platform != "linux":
        return
    with ExitStack() as folders:
        fds: list[int] = []
        names: list[str] = []
        for folder, inside in disk.tree(path):
            file = disk.open(folder, write=False)
            folders.callback(file.close)
            fds += [file.fd] * len(inside)
            names += inside
        if names:
            _side_by_side(pool, disk.kernels.unlink_files, [np.array(fds)], names, len(names) // 2)()


def _do_nothing() -> None:
    pass


def _side_by_side(
    pool: Threads,
    act: Callable[..., None],
    facts: Sequence[NDArray[np.int64]],
    names: Sequence[str],
    cut: int,
) -> Callable[[], None]:
    """Begin a loop over files in another thread; the returned function does the rest here, and waits.

    Args:
        pool: Threads for the first part.
        act: The loop.
        facts: Arguments of the loop with one entry per file. Shapes `(n,)`.
        names: Names of the files, at least one; passed to the loop as `file_loops.link_files` takes them.
        cut: Number of files that the other thread handles.
    """
    texts = [os.fsencode(name) + b"\0" for name in names]
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)[:-1]
    text = np.frombuffer(bytearray().join(texts), np.uint8)
    parts = [[*[fact[part] for fact in facts], text, starts[part]] for part in (slice(cut), slice(cut, None))]
    job = pool.submit(partial(act, *parts[0]))

    def end() -> None:
        try:
            act(*parts[1])
        finally:
            finish([job])

    return end


def _link(disk: Disk, group: Links, name: str) -> bool:
    return disk.size(group.old / name) == group.size and disk.link(group.old / name, group.new / name)


def _open_both(disk: Disk, group: Links, folders: ExitStack) -> tuple[File, File] | None:
    """Open both folders of a group; return None if the first one is missing."""
    if not disk.exists(group.old):
        return None
    both = disk.open(group.old, write=False), disk.open(group.new, write=False)
    for folder in both:
        folders.callback(folder.close)
    return both


def read_all(disk: Disk, folder: Path, names: Sequence[str], *, size: int) -> list[bytes]:
    """Return the content of files of one folder; b"" for files of another length and unreadable files."""
    found: list[bytes] = []
    with ExitStack() as opened:
        read = partial(_read_by_path, disk, folder)
        if disk.in_bulk and disk.exists(folder):
            here = disk.open(folder, write=False)
            opened.callback(here.close)
            read = partial(disk.read_named, here, size=size)
        for name in names:
            try:
                data = read(name)
            except StorageError:
                data = b""
            found.append(data if len(data) == size else b"")
    return found


def _read_by_path(disk: Disk, folder: Path, name: str) -> bytes:
    return disk.read_whole(folder / name)


def sync_paths(disk: Disk, paths: Sequence[Path], folders: Iterable[Path], pool: Threads | None) -> None:
    """Sync closed files, however many, and folders."""
    for start in range(0, max(1, len(paths)), _TOGETHER):
        files = [disk.open(path, write=False) for path in paths[start : start + _TOGETHER]]
        last = start + _TOGETHER >= len(paths)
        try:
            for file in files:
                file.start_sync()
            disk.sync_all(files, folders if last else [], pool)
        finally:
            for file in files:
                file.close()
