"""Run a part of a test in a forked child that is killed at the end, so that the store is left unclosed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def in_child(act: Callable[[], object]) -> None:
    """Run `act` in a forked child, which is killed at the end."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child failed"


def collect_from_child(work: Callable[[Callable[[Any], None]], None]) -> list[Any]:
    """Run `work` in a forked child that is killed at the end; return what `work` passed to its argument."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # OpenMP's threads exist only in the parent
        try:
            os.close(read_end)

            def tell(value: Any) -> None:
                data = pickle.dumps(value)
                os.write(write_end, len(data).to_bytes(8, "little") + data)

            work(tell)
        except BaseException as exc:
            tell(exc)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            data = pipe.read()
    finally:  # it has ended, unless the limit of the test has
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    told = []
    while data:
        size = int.from_bytes(data[:8], "little")
        told.append(pickle.loads(data[8 : 8 + size]))
        data = data[8 + size :]
    for value in told:
        if isinstance(value, BaseException):
            raise value
    assert os.WTERMSIG(status) == signal.SIGKILL, "the child hung"
    return told


@contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run `work` in a forked child while the block runs; yield a function that waits for what it returns."""
    mine, theirs = multiprocessing.Pipe()

    def run() -> None:
        torch.set_num_threads(1)
        theirs.send(work())
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    theirs.close()

    def wait() -> Any:
        assert mine.poll(60), "the child says nothing"
        return mine.recv()

    try:
        yield wait
    finally:
        child.kill()
        child.join(60)
        mine.close()
