"""The program that runs: its name, host, user and versions, and the git commit of its checkout.

Used by openings of stores, which record who wrote rows. The arguments of the program, which may have
secrets, are not read. The commit is read from files of git, in a fraction of a millisecond. Whether the
checkout has changes only git can tell, which takes from milliseconds to seconds: a thread runs it, and the
program does not wait.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from expstore.disk.files import ReadingDisk
from expstore.errors import ExpStoreError

#: Prints the commit, with `-dirty` if tracked files differ from it.
_DESCRIBE = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false"),
    *("describe", "--always", "--dirty", "--abbrev=64", "--exclude=*"),
)
_ANSWER = re.compile(r"([0-9a-f]{40,64})(-dirty)?\s*")
#: Seconds after which git is ended, so that no process remains.
_PATIENCE = 60


def describe_program() -> dict[str, Any]:
    """Return facts about this program, as far as they are known, as values that JSON can store.

    `program` is the name of the script or module, `versions` those of expstore and of torch, if it is loaded.
    `host` and `user` say where it runs. In a checkout of git there are `git_commit` and, once git has
    answered, `dirty`: whether tracked files differed from the commit when this process first asked.

    Threads: any. Processes: a fork asks git again.

    Example:
        >>> from expstore.disk.program import describe_program
        >>> sorted(describe_program().keys() - {"git_commit", "dirty", "user"})
        ['host', 'program', 'versions']
    """
    names = [name for name in ("expstore", "torch") if name in sys.modules]
    found = {
        "program": _program_name(),
        "host": socket.gethostname(),
        "user": _user(),
        "versions": {name: str(getattr(sys.modules[name], "__version__", "")) for name in names},
        **describe_checkout(),
    }
    return {name: value for name, value in found.items() if value is not None}


def describe_checkout() -> dict[str, Any]:
    """Return `git_commit` and `dirty` of the checkout in which this program runs, as far as known."""
    return _Checkout.of_process(os.getpid()).facts


def _program_name() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        return str(spec.name).removesuffix(".__main__")
    return Path(getattr(sys, "argv", [""])[0]).name or "python"


def _user() -> str | None:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        return None


class _Checkout:
    """The checkout in which a process runs: that of its script, or for an installed program of its folder.

    Args:
        folder: The folder of the checkout; None: the program is in no checkout.
    """

    def __init__(self, folder: Path | None) -> None:
        commit = None if folder is None else _read_commit(folder)
        #: What is known now; a thread replaces it.
        self.facts: dict[str, Any] = {} if commit is None else {"git_commit": commit}
        if folder is not None:
            threading.Thread(target=self._ask_git, args=(folder,), name="expstore-git", daemon=True).start()

    @staticmethod
    @functools.cache
    def of_process(pid: int) -> _Checkout:
        """Return the checkout of the process with this id, which is the present one."""
        script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
        is_installed = any(script.is_relative_to(top) for top in (sys.prefix, sys.base_prefix))
        start = Path.cwd() if is_installed else Path.cwd() / script.parent
        disk = ReadingDisk()
        return _Checkout(next((top for top in (start, *start.parents) if disk.exists(top / ".git")), None))

    def _ask_git(self, folder: Path) -> None:
        import subprocess

        try:
            done = subprocess.run(
                _DESCRIBE, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return  # there is no git: whether the checkout has changes remains unknown
        if (found := _ANSWER.fullmatch(done.stdout)) is not None:
            self.facts = {"git_commit": found[1], "dirty": found[2] is not None}


def _read_commit(folder: Path) -> str | None:
    """Return the commit of a checkout from its files; None if they do not tell it."""
    disk = ReadingDisk()

    def read(path: Path) -> str:
        return disk.read_whole(path).decode().strip() if disk.exists(path) else ""

    try:
        git = folder / ".git"
        if not disk.is_dir(git):  # a second worktree, or a submodule
            git = folder / read(git).removeprefix("gitdir: ")
        head = read(git / "HEAD")
        if head.startswith("ref: "):
            name, common = head.removeprefix("ref: "), git / (read(git / "commondir") or ".")
            lines = read(common / "packed-refs").splitlines() if not disk.exists(common / name) else []
            packed = (line.split()[0] for line in lines if line.endswith(f" {name}"))
            head = read(git / name) or read(common / name) or next(packed, "")
        return head if _ANSWER.fullmatch(head) else None
    except (ExpStoreError, UnicodeDecodeError):
        return None
