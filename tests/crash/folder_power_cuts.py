"""What power cuts leave of a folder in which something is done once, from its first act to its last.

Used by tests of acts that are no part of a store's daily life: those are in power_cuts.py. It judges nothing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.crash.disk_states import Inode, Platter, Tree, write_tree
from tests.crash.recording_disk import RecordingDisk

__all__ = ["disks_after"]


def _tree_of(folder: Path) -> Tree:
    """All files of a folder, as they last."""
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
    """Yield what power cuts leave of a folder, and whether the act had returned.

    Args:
        base: The folder, all of which lasts.
        act: What is done with it, through the disk that it is given.
        folder: Where the disks are made, one at a time.
        cuts: How many.
        seed: Of where, and of what is left.
    """
    tree, chance = _tree_of(base), random.Random(cuts + seed)
    disk = RecordingDisk(base / "nowhere")
    act(disk)
    platter, done = Platter(base, tree), 0
    end = len(disk.events)
    # Half of them at the end, where all is done but for names that are not synced.
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
