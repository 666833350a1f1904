"""Permanently restrict this process: limit memory, files, network and threads, and end it with its parent.

Used by the child that runs untrusted SQL. Restrictions that the system does not support are reported, not
silently skipped. It opens only the named folders, to pass them to the kernel.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
# System call numbers, the same on every architecture: docs.kernel.org/userspace-api/landlock.html,
# landlock.h.
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
#: Number of file actions that each version of Landlock knows; later versions know as many as the last one.
_ACTS = (13, 14, 15, 15, 16)
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Binding and connecting TCP sockets; signals to, and abstract Unix sockets of, processes outside.
_NETWORK, _SCOPES = 0b11, 0b11
_CAPABILITY_VERSION, _CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2
_O_PATH, _O_CLOEXEC = 0o10000000, 0o2000000


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux only.

    Args:
        parent: Process id of the parent. If the parent has already ended, this process ends now.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def restrict(readable: Iterable[Path]) -> str:
    """Let this thread, and threads it starts later, read some folders and files and access no other file.

    They also cannot run programs, gain privileges, use the super-user's capabilities, or (if Landlock
    supports it) reach the network or other processes. Call it before other threads start: those would not be
    restricted.

    Returns:
        The restriction in force: "landlock N" with the version N, or "no landlock: " and the reason.
    """
    if sys.platform != "linux":
        return "no landlock: it needs Linux"
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    _lose_capabilities(libc)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    if version < 1:
        return f"no landlock: {os.strerror(ctypes.get_errno())}"
    acts = (1 << _ACTS[min(version, len(_ACTS)) - 1]) - 1
    sizes = 8 if version < 4 else 16 if version < 6 else 24
    wanted = struct.pack("=QQQ", acts, _NETWORK, _SCOPES)[:sizes]
    rules = libc.syscall(_CREATE, wanted, ctypes.c_size_t(sizes), ctypes.c_uint32(0))
    if rules < 0:
        return f"no landlock: {os.strerror(ctypes.get_errno())}"
    try:
        for path in readable:
            _allow(libc, rules, path)
        if libc.syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)):
            return f"no landlock: {os.strerror(ctypes.get_errno())}"
    finally:
        libc.close(rules)
    return f"landlock {version}"


def _lose_capabilities(libc: ctypes.CDLL) -> None:
    """Drop the super-user's capabilities, except that of reading any file."""
    head = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    # Effective, permitted and inheritable set: the lower 32 bits of each, then the upper 32 bits.
    sets = ctypes.create_string_buffer(24)
    if libc.capget(head, sets):
        raise OSError(ctypes.get_errno(), "capget")
    permitted = struct.unpack("=6I", sets.raw)[1] & _CAP_DAC_READ_SEARCH
    if libc.capset(head, struct.pack("=6I", permitted, permitted, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def _allow(libc: ctypes.CDLL, rules: int, path: Path) -> None:
    """Allow reading a folder or a file; a path that does not exist needs no rule."""
    opened = libc.open(os.fsencode(path), _O_PATH | _O_CLOEXEC)
    if opened < 0:
        return
    try:
        for acts in (_READ_FILE | _READ_DIR, _READ_FILE):  # the kernel rejects the first one for a file
            rule = struct.pack("=Qi", acts, opened)
            kind = ctypes.c_int(_PATH_BENEATH)
            if not libc.syscall(_ADD_RULE, ctypes.c_int(rules), kind, rule, ctypes.c_uint32(0)):
                break
    finally:
        libc.close(opened)


def bound(*, files: int) -> None:
    """Permanently limit the number of open files, and forbid new threads, child processes and file writes.

    The kernel lets the super-user start threads nevertheless.
    """
    for what, most in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, files),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def bound_data(most: int | None) -> None:
    """Limit the process's private memory to `most` bytes; None removes the limit.

    Memory-mapped files do not count, so stores of any size can be read.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = hard if most is None else most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
