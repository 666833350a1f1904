"""Possible states of a disk after a power cut: pages, lengths and names, each synced or not.

Used by power_cuts.py: it replays recorded operations, and builds some of the possible disks. This module does
not know stores.

Everything that was written since a file's last sync may be on the disk or not, page by page and file by file.
A page may have an intermediate state, or be torn between two sectors; a length may be an older one. Names
that were created, renamed or removed since their folder's last sync may have changed or not; changes of one
name are undone from the last one. A rename is atomic: it never leaves both names, or none.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.crash.recording_disk import Event

PAGE, SECTOR = 4096, 512
_ZEROS = bytes(PAGE)


@dataclass(eq=False, slots=True)
class Inode:
    """A file: its pages and its length, as synced, and after every write since."""

    pages: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=lambda: [0])
    unsynced: set[int] = field(default_factory=set)

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes."""
        end = offset + len(data)
        for page in range(offset // PAGE, -(-end // PAGE)):
            start = page * PAGE
            low, high = max(offset, start), min(end, start + PAGE)
            old = self._newest(page)
            self._set(page, old[: low - start] + data[low - offset : high - offset] + old[high - start :])
        if end > self.sizes[-1]:
            self.sizes.append(end)

    def truncate(self, size: int) -> None:
        """Set the length."""
        if size < self.sizes[-1]:
            for page in [page for page in self.pages if (page + 1) * PAGE > size]:
                keep = max(0, size - page * PAGE)
                self._set(page, self._newest(page)[:keep].ljust(PAGE, b"\0"))
        if size != self.sizes[-1]:
            self.sizes.append(size)

    def _newest(self, page: int) -> bytes:
        return self.pages[page][-1] if page in self.pages else _ZEROS

    def _set(self, page: int, data: bytes) -> None:
        if data != self._newest(page):  # zeros in a hole change nothing, and would be most pages of a store
            self.pages.setdefault(page, [_ZEROS]).append(data)
            self.unsynced.add(page)

    def sync(self) -> None:
        """Make the current state durable."""
        for page in self.unsynced:
            del self.pages[page][:-1]
        self.unsynced.clear()
        del self.sizes[:-1]

    def choose(self, chance: random.Random, share: float) -> Inode:
        """Return the file in one of the states that a power cut may leave."""
        share = chance.choice([0.0, share, share, 1.0 if share else 0.0])
        pages = {page: versions[-1:] for page, versions in self.pages.items()}
        for page in sorted(self.unsynced):
            pages[page] = [_one_of(self.pages[page], chance, share)]
        size = self.sizes[-1]
        if chance.random() < share / 2:
            size = chance.choice(self.sizes)
        return Inode(pages, [size])


def _one_of(versions: list[bytes], chance: random.Random, share: float) -> bytes:
    if chance.random() >= share:
        return versions[-1]
    old = versions[0] if chance.random() < 0.7 else chance.choice(versions[:-1])
    if chance.random() < 0.8:
        return old
    cuts = sorted({0, *(chance.randrange(0, PAGE, SECTOR) for _ in range(2)), PAGE})
    first = chance.random() < 0.5
    parts = [(old, versions[-1])[(number + first) % 2][a:b] for number, (a, b) in enumerate(pairwise(cuts))]
    return b"".join(parts)


@dataclass(eq=False, slots=True)
class Folder:
    """A folder: its names as synced, and the current ones."""

    lasting: dict[str, Node] = field(default_factory=dict)
    names: dict[str, Node] = field(default_factory=dict)


Node = Inode | Folder
Tree = dict[str, "Inode | Tree"]
Key = tuple[Folder, str]


@dataclass(eq=False, slots=True)
class _Change:
    """The effect of one operation on one or two names; None if the name is removed."""

    names: dict[Key, Node | None]

    def apply(self) -> None:
        for (folder, name), node in self.names.items():
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node


class Platter:
    """Track which parts of a folder are on the disk.

    Args:
        base: The folder; all operations are below it.
        tree: Its initial content, which is durable.
    """

    def __init__(self, base: Path, tree: Tree | None = None) -> None:
        self._base = base
        self._root = _settled(tree or {})
        self._inodes: dict[int, Inode] = {}
        self._changes: list[_Change] = []

    def replay(self, event: Event) -> None:
        """Apply one operation."""
        if event.act in ("write", "truncate", "sync", "punch"):
            inode = self._inodes[event.inode]
            if event.act == "write":
                inode.write(event.data, event.at)
            elif event.act == "punch":
                inode.write(bytes(event.data), event.at)  # lost or torn like zeros that were written
            elif event.act == "truncate":
                inode.truncate(event.at)
            else:
                inode.sync()
        elif event.act != "say":
            self._rename(event)

    def _rename(self, event: Event) -> None:
        if event.act == "sync_dir":
            self._sync(self._folder(event.path))
            return
        key = self._key(event.path)
        if event.act == "open":
            node = key[0].names.get(key[1])
            if node is None:
                node = Inode()
                self._change({key: node})
            assert isinstance(node, Inode)
            self._inodes[event.inode] = node
        elif event.act == "mkdir":
            self._change({key: Folder()})
        elif event.act == "rename":
            old = self._key(event.data)
            self._change({old: None, key: old[0].names[old[1]]})
        elif event.act == "link":
            old = self._key(event.data)
            self._change({key: old[0].names[old[1]]})
        elif event.act == "unlink":
            self._change({key: None})
        elif event.act == "rmtree":
            self._remove(key)
        else:
            raise AssertionError(event.act)

    def _folder(self, path: Path) -> Folder:
        folder = self._root
        for part in path.relative_to(self._base).parts:
            inner = folder.names[part]
            assert isinstance(inner, Folder), path
            folder = inner
        return folder

    def _key(self, path: Path) -> Key:
        return self._folder(path.parent), path.name

    def _change(self, names: dict[Key, Node | None]) -> None:
        change = _Change(names)
        change.apply()
        self._changes.append(change)

    def _remove(self, key: Key) -> None:
        node = key[0].names[key[1]]
        if isinstance(node, Folder):
            for name in list(node.names):
                self._remove((node, name))
        self._change({key: None})

    def _sync(self, folder: Folder) -> None:
        """Make the names of a folder durable, and earlier operations on names that were moved there."""
        keys = {key for change in self._changes for key in change.names if key[0] is folder}
        count = -1
        while count != len(keys):
            count = len(keys)
            for change in self._changes:
                if not keys.isdisjoint(change.names):
                    keys |= change.names.keys()
        rest = []
        for change in self._changes:
            if keys.isdisjoint(change.names):
                rest.append(change)
                continue
            for (where, name), node in change.names.items():
                if node is None:
                    where.lasting.pop(name, None)
                else:
                    where.lasting[name] = node
        self._changes = rest

    # -- what a power cut leaves -------------------------------------------------------------------------

    def choose(self, chance: random.Random) -> Tree:
        """Return one of the trees that a power cut may leave now."""
        share = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])  # share of pages and names that are lost
        kept = self._keep(chance, share)
        names: dict[Folder, dict[str, Node]] = {}

        def entries(folder: Folder) -> dict[str, Node]:
            return names.setdefault(folder, dict(folder.lasting))

        for change in kept:
            for (folder, name), node in change.names.items():
                if node is None:
                    entries(folder).pop(name, None)
                else:
                    entries(folder)[name] = node
        chosen: dict[Inode, Inode] = {}

        def build(folder: Folder) -> Tree:
            tree: Tree = {}
            for name, node in sorted(entries(folder).items()):
                if isinstance(node, Folder):
                    tree[name] = build(node)
                else:
                    if node not in chosen:
                        chosen[node] = node.choose(chance, share)
                    tree[name] = chosen[node]
            return tree

        return build(self._root)

    def _keep(self, chance: random.Random, share: float) -> list[_Change]:
        """Return the changes of names that are kept: for each name, those up to some moment."""
        groups: list[tuple[set[Key], list[_Change]]] = []
        for change in self._changes:
            keys, members = set(change.names), [change]
            for group in [g for g in groups if not keys.isdisjoint(g[0])]:
                groups.remove(group)
                keys |= group[0]
                members = group[1] + members
            groups.append((keys, members))
        kept = set()
        for _, members in groups:
            members.sort(key=self._changes.index)
            count = len(members)
            while count and chance.random() < share:
                count -= 1
            kept.update(map(id, members[:count]))
        return [change for change in self._changes if id(change) in kept]


def _settled(tree: Tree) -> Folder:
    nodes: dict[int, Inode] = {}  # a file with two names remains one

    def fold(tree: Tree) -> Folder:
        names: dict[str, Node] = {}
        for name, node in tree.items():
            if isinstance(node, dict):
                names[name] = fold(node)
            else:
                copy = Inode({page: versions[-1:] for page, versions in node.pages.items()}, node.sizes[-1:])
                names[name] = nodes.setdefault(id(node), copy)
        return Folder(dict(names), names)

    return fold(tree)


def write_tree(tree: Tree, folder: Path) -> None:
    """Create a tree of files."""
    made: dict[int, Path] = {}

    def make(tree: Tree, folder: Path) -> None:
        os.mkdir(folder)
        for name, node in tree.items():
            path = folder / name
            if isinstance(node, dict):
                make(node, path)
            elif id(node) in made:
                os.link(made[id(node)], path)
            else:
                made[id(node)] = path
                _write_file(node, path)

    make(tree, folder)


def _write_file(inode: Inode, path: Path) -> None:
    size = inode.sizes[-1]
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.ftruncate(fd, size)
    pages = sorted(page for page in inode.pages if page * PAGE < size)
    start = 0
    for at in range(1, len(pages) + 1):
        if at == len(pages) or pages[at] != pages[at - 1] + 1:
            data = b"".join([inode.pages[page][-1] for page in pages[start:at]])
            os.pwrite(fd, data[: size - pages[start] * PAGE], pages[start] * PAGE)
            start = at
    os.close(fd)
