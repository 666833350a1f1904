"""Power cuts during a single operation on a folder, from its first file operation to its last.

Used by tests of operations outside of a store's normal work, which power_cuts.py covers. This module checks
nothing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.crash.disk_states import Inode, Platter, Tree, write_tree
from tests.crash.recording_disk import RecordingDisk


def _tree_of(folder: Path) -> Tree:
    """Return all files of a folder in their durable state."""
    tree: Tree = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            tree[path.name] = _tree_of(path)
        else:
            data, inode = path.read_bytes(), Inode()
            inode.write(data, 0)
            inode.sync()
            tree[path.name] = inode
    return tree


def disks_after(
    base: Path, act: Callable[[RecordingDisk], Any], folder: Path, cuts: int, seed: int
) -> Iterator[tuple[bool, Path]]:
    """Yield the folders that power cuts leave, and whether the operation had returned.

    Args:
        base: The folder, which is durable at first.
        act: The operation, which gets a disk.
        folder: Folder in which the results are created, one at a time.
        cuts: Number of power cuts.
        seed: Seed of the moments and of the results.
    """
    tree, chance = _tree_of(base), random.Random(cuts + seed)
    disk = RecordingDisk(base / "nowhere")
    act(disk)
    platter, done = Platter(base, tree), 0
    end = len(disk.events)
    # Half of them at the end, where only syncs of names are missing.
    late = [chance.randrange(max(1, end - 60), end + 1) for _ in range(cuts // 2)]
    points = sorted([*late, *(chance.randrange(1, end + 1) for _ in range(cuts // 2))])
    points += [end] * 3
    for number, point in enumerate(points):
        for event in disk.events[done:point]:
            platter.replay(event)
        done = point
        at = folder / str(number)
        write_tree(platter.choose(chance), at)
        yield point == len(disk.events), at
        shutil.rmtree(at)
