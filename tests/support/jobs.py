"""Run tests in several processes, forks of the one that has collected them.

    python -m pytest --jobs 3

Each process takes one file after another; the tests of a file run in one process, in their order. Imports and
the collection take half a minute of CPU without bytecode: forks share them, where separate processes
would repeat them. If a process dies, its test has failed, and another process continues after this test.

A part of tests/conftest.py.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import struct
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter

_NUMBER = struct.Struct("<H")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=1, help="processes that run tests (default: this one)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks; None leaves them to pytest."""
    jobs = session.config.getoption("jobs")
    if jobs < 2 or session.testsfailed or session.config.option.collectonly or not session.items:
        return None
    _Run(session).run(jobs)
    return True


class _Run:
    """One run: the files that no process has taken yet, and the processes."""

    #: Whether this process is forking a job: what else is forked here is a child of a test.
    forking = False

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        by_file = itertools.groupby(range(len(session.items)), lambda number: session.items[number].path)
        self.files = [list(numbers) for _, numbers in by_file]
        # Processes read numbers of files from one pipe, so a file is taken once and nobody hands them out.
        self._queue, end = os.pipe()
        os.set_blocking(end, False)
        numbers = b"".join(map(_NUMBER.pack, range(len(self.files))))
        assert os.write(end, numbers) == len(numbers), "there are too many files for a pipe"
        os.close(end)
        self._folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._jobs: dict[Connection, _Job] = {}
        self._started = 0

    def run(self, jobs: int) -> None:
        try:
            for _ in range(min(jobs, len(self.files))):
                self._start([])
            while self._jobs:
                ready = wait(list(self._jobs), timeout=1)
                for reader, job in list(self._jobs.items()):
                    if reader in ready and (message := _receive(reader)):
                        self._pass_on(job, *message)
                    elif reader in ready or (job.has_ended() and not reader.poll()):
                        self._end(reader, job)  # in the second case its children have the pipe open
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            os.close(self._queue)
            for job in self._jobs.values():
                if not job.has_ended():
                    os.kill(job.pid, signal.SIGKILL)
                    job.wait()

    def _start(self, first: list[int]) -> None:
        """Fork a process that runs some tests, and then files from the queue."""
        reader, writer = Pipe(duplex=False)
        self._started += 1
        _Run.forking = True
        pid = os.fork()
        _Run.forking = False
        if not pid:
            reader.close()
            for other in self._jobs:
                other.close()
            self._work(writer, first)
        writer.close()
        self._jobs[reader] = _Job(pid, list(first))

    def _pass_on(self, job: _Job, kind: str, value: Any) -> None:
        """Pass on what a process reports."""
        config = self.session.config
        if kind == "taken":
            job.left += value
        elif kind == "finished":
            item = self.session.items[job.left.pop(0)]
            config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        else:
            config.hook.pytest_runtest_logreport(
                report=config.hook.pytest_report_from_serializable(config=config, data=value)
            )

    def _end(self, reader: Connection, job: _Job) -> None:
        """Forget a process that has ended; if it has tests left, report the first as failed and continue."""
        del self._jobs[reader]
        reader.close()
        code = job.wait()
        if job.left:
            item = self.session.items[job.left.pop(0)]
            why = f"the process that ran this test ended with code {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            item.ihook.pytest_runtest_logreport(report=report)
            self._start(job.left)
        elif code:
            raise RuntimeError(f"a process that runs tests ended after them with code {code}")

    def _work(self, writer: Connection, first: list[int]) -> NoReturn:
        """Be a process that runs tests."""
        code = 1
        try:
            config = self.session.config
            for name in ("terminalreporter", "cacheprovider", "lfplugin", "nfplugin"):  # the parent's part
                config.pluginmanager.unregister(name=name)
            config.pluginmanager.register(_Writer(), name="terminalreporter")
            capture: Any = config.pluginmanager.getplugin("capturemanager")
            capture.stop_global_capturing()  # forks would write into one file
            capture.start_global_capturing()
            folder = self._folder / f"job{self._started}"
            folder.mkdir()
            config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            config.pluginmanager.register(_Reporter(config, writer))
            left = list(first)
            while left or self._take(left, writer):
                number = left.pop(0)
                if not left:
                    self._take(left, writer)
                items = self.session.items
                following = items[left[0]] if left else None
                config.hook.pytest_runtest_protocol(item=items[number], nextitem=following)
                writer.send(("finished", None))
            atexit._run_exitfuncs()
            code = 0
        except BrokenPipeError:
            pass  # the parent has stopped
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _take(self, left: list[int], writer: Connection) -> bool:
        """Take a file from the queue; return whether there was one."""
        taken = os.read(self._queue, _NUMBER.size)
        if taken:
            numbers = self.files[_NUMBER.unpack(taken)[0]]
            left += numbers
            writer.send(("taken", numbers))
        return bool(taken)


@dataclass
class _Job:
    """A process, and the tests that it has taken and not finished."""

    pid: int
    left: list[int]
    status: int | None = None

    def has_ended(self) -> bool:
        if self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if ended else None
        return self.status is not None

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(self.status)


class _Reporter:
    """The plugin of a process that sends reports to the parent."""

    def __init__(self, config: pytest.Config, writer: Connection) -> None:
        self._config, self._writer = config, writer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._writer.send(("report", data))


class _Writer:
    """Writes what plugins print in a process: a test's timeout prints the stacks of its threads."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(sys.__stderr__)


def _receive(reader: Connection) -> tuple[str, Any] | None:
    """Return a message, None at the end."""
    try:
        return reader.recv()  # type: ignore[no-any-return]
    except EOFError:
        return None


def is_forking() -> bool:
    """Return whether a fork that just happened is a process for tests, not a child of a test."""
    return _Run.forking
