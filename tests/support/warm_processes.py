"""Run Python programs in separate processes without importing torch again: forked from a process that has.

Used by tests of programs and servers, each of which would spend three CPU seconds on imports. A program gets
its arguments, environment, folder and streams as from `subprocess`, is killed and waited for in the same way,
and ends like Python. Do not use it for tests of imports, memory or startup.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tests.support import compile_loops
from tests.support.paths import ROOT

_STATUS = struct.Struct("<q")
_LONGEST = 1 << 20
#: Modules that are imported before a program starts; not DuckDB, which reports leaks at the end of a fork of
#: a fork.
_IMPORTS = (
    "torch",
    "tensordict",
    "pyarrow",
    "expstore.cli.app",
    "expstore.buffers.replay_buffer",
    "expstore.api.server",
    *compile_loops.modules(),
)


class Parent:
    """A process that has imported modules; it starts with the first program, and ends with this process.

    A fork of this process gets a fork of that one.

    Args:
        modules: Names of the modules.
        environment: Environment of the process, with that of the tests; programs get their own.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules, self._environment = modules, environment
        self._here: socket.socket | None = None
        self._process: subprocess.Popen[Any] | None = None
        self._owner = self._starter = (
            0  # ids of processes: the one that uses the socket, and the one that started it
        )
        self._lock = threading.Lock()  # requests of two threads must not mix

    def fork(self, told: dict[str, Any], streams: Sequence[int]) -> tuple[int, int]:
        """Fork a process that runs a program; return its id, and a descriptor that reports its end."""
        if self._owner != os.getpid():  # in a fork of this process another thread may have held it
            self._lock = threading.Lock()
        ended, end = os.pipe()
        try:
            data = json.dumps(told).encode()
            with self._lock:
                self.start()
                assert self._here is not None
                request = struct.pack("<I", len(data)) + data
                # In one call: a fork of this process may ask through the same socket.
                sent = socket.send_fds(self._here, [request], [*streams, end])
                self._here.sendall(request[sent:])
        finally:
            os.close(end)
        return _STATUS.unpack(_read(ended, _STATUS.size))[0], ended

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._owner == os.getpid():
            return
        inherited, (self._here, there) = self._here, socket.socketpair()
        self._owner = os.getpid()
        with there:
            if inherited is not None:
                try:
                    socket.send_fds(inherited, [struct.pack("<I", 0)], [there.fileno()])
                    inherited.close()
                except OSError:  # that process has ended, or a test has closed the socket: start another one
                    inherited.detach()
                else:
                    return
            self._starter = self._owner
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_processes", str(there.fileno()), *self._modules],
                cwd=ROOT,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
            )
        atexit.register(self._end)

    def _end(self) -> None:
        if self._owner == os.getpid() and self._here is not None:
            self._here.close()
            if self._process is not None and self._starter == self._owner:
                self._process.wait()


class Forked(subprocess.Popen[Any]):
    """A process with the interface of `subprocess.Popen`, for `[sys.executable, ...]`."""

    #: Large pages make forks cheap (ignored on other systems).
    parent = Parent(_IMPORTS, {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    _ended = -1
    _closing = threading.Lock()  # several threads may ask one process: the descriptor is closed once

    def _execute_child(self, args: Any, *more: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *pipes = more
        stdin, _, _, stdout, _, stderr, *rest = pipes
        assert args[0] == sys.executable, args
        told = {
            "arguments": [os.fspath(argument) for argument in args[1:]],
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "session": bool(rest[5]),
        }
        streams = [own if own != -1 else usual for usual, own in enumerate((stdin, stdout, stderr))]
        self.pid, self._ended = self.parent.fork(told, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        return self._look(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            waits = select.poll()  # select supports no descriptors above 1,024
            waits.register(self._ended)
            if not waits.poll(None if seconds is None else max(0.0, 1000 * seconds)):
                return None
            with self._closing:
                if self.returncode is None:
                    status = os.read(self._ended, _STATUS.size)
                    os.close(self._ended)
                    self.returncode = os.waitstatus_to_exitcode(_STATUS.unpack(status)[0])
        return self.returncode


#: `subprocess.Popen` of a Python program.
Popen: Any = Forked if sys.platform == "linux" else subprocess.Popen


def run(
    args: Sequence[Any], *, check: bool = False, timeout: float | None = None, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a Python program like `subprocess.run`."""
    if more.pop("capture_output", False):
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = more.pop("input", None)
    if given is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(list(args), **more) as process:
        try:
            out, err = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        assert part, "the process that forks programs has ended"
        data += part
    return data


# -- the other side ----------------------------------------------------------------------------------


def _serve(here: socket.socket) -> dict[str, Any] | None:
    """Fork a process per request; return the request in the child, and None here at the end."""
    while True:
        head, fds, _, _ = socket.recv_fds(here, 4, 8)
        if not head:
            return None
        (length,) = struct.unpack("<I", head)
        if not length:  # a fork of the process that asks, which will ask a fork of this one
            asking = socket.socket(fileno=fds[0])
            if os.fork():
                asking.close()
            else:
                here.close()
                here = asking
            continue
        told: dict[str, Any] = json.loads(_read(here.fileno(), length))
        *streams, end = fds
        if not os.fork():  # the parent of the program, which reports its end
            here.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not (pid := os.fork()):
                os.close(end)
                os.setsid() if told["session"] else os.setpgid(0, 0)
                for number, fd in enumerate(streams):
                    os.dup2(fd, number)
                    os.close(fd)
                return told
            os.write(end, _STATUS.pack(pid))
            for fd in streams:
                os.close(fd)
            os.write(end, _STATUS.pack(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for fd in fds:
            os.close(fd)


def _become(told: dict[str, Any]) -> NoReturn:
    """Run the program in this process, and exit like Python, without tearing down imported modules."""
    # Of the imported modules, mostly Numba's: thousands, which would touch their memory at the end.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    code: Any = 0
    try:
        _run(told["arguments"])
    except SystemExit as exc:
        code = exc.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as exc:
        traceback.print_exception(exc)
        code = -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if told["arguments"][0] == "-c":
        sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _run(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-c":
        sys.argv[:], sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv[:], sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = [kind, *rest], os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection would copy the memory page by page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exits of intermediate processes are not waited for
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        os._exit(0)  # DuckDB would report what is left of it as leaked
    _become(asked)
