"""Stores that are not closed: dropped buffers, the end of the program, SIGTERM, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tensordict import TensorDict

import expstore
from expstore.errors import LockedError
from expstore.storages.engine import process_exit
from tests.support import warm_processes

pytestmark = pytest.mark.index

MakeBatch = Callable[..., TensorDict]

PROGRAM = """\
import os, signal, sys, threading, time
import torch
from tensordict import TensorDict
import expstore

def batch(n):
    return TensorDict({"x": torch.arange(n), "next": {"reward": torch.ones(n)}}, [n])

def say(*text):  # not print: a handler may interrupt it, and a buffer cannot be written to meanwhile
    os.write(1, f"{' '.join(map(str, text))}\\n".encode())

def held(rb):  # no sync but those that are asked for
    rb.storage.background.stop()
    return rb

path = sys.argv[1]
"""


#: What a program does that is told to end.
WAIT = """
say("ready")
while True: time.sleep(0.01)
"""


def run(path: Path, program: str, *, stop: int | None = None, twice: bool = False) -> tuple[int, str, str]:
    """Run a program until it ends; or let it wait at its end, and send it a signal when it is ready.

    Args:
        path: The store.
        program: Its text, after `PROGRAM`.
        stop: The signal.
        twice: Whether to send it once more when the program says "again".
    """
    wait = WAIT if stop is not None and "ready" not in program else ""
    process = warm_processes.Popen(
        [sys.executable, "-c", PROGRAM + program + wait, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a program that signals its group signals no test
    )
    said, signals = "", ["ready\n", "again\n"] if twice else ["ready\n"]
    try:
        while stop is not None and process.stdout is not None and signals:
            said += (line := process.stdout.readline())
            assert line, process.communicate()[1]
            if line == signals[0]:
                process.send_signal(stop)
                del signals[0]
        out, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said + out, err


# -- forgotten -------------------------------------------------------------------------------------------


@pytest.mark.guarantee("kill/end")
def test_a_forgotten_buffer_closes(store_path: Path, make_batch: MakeBatch) -> None:
    rb = expstore.open(store_path, capacity=100)
    rb.extend(make_batch(20))
    assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(20,)]
    with pytest.raises(LockedError):
        expstore.open(store_path)
    with pytest.warns(ResourceWarning, match=r"run\.exp was forgotten without close"):
        del rb
    with expstore.open(store_path) as again:
        assert again.recovered is None  # it was closed in order
        assert len(again) == 20


@pytest.mark.some(1)
@pytest.mark.parametrize("options", [", layout='packed'", "", ", layout='arrow'"])
def test_one_is_collected_while_another_pool_takes_a_job(store_path: Path, options: str) -> None:
    """The collector runs at any allocation: also where the thread holds what all pools share."""
    code, out, err = run(
        store_path,
        f"""
import gc, warnings
from concurrent.futures import ThreadPoolExecutor

class Collecting(ThreadPoolExecutor):
    def _adjust_thread_count(self):
        gc.collect()
        super()._adjust_thread_count()

warnings.simplefilter("ignore")
gc.disable()
rb = held(expstore.open(path, capacity=100{options}))
for _ in range(3):
    rb.extend(batch(90))
    rb.extend(batch(3))
rb.itself = rb
del rb
Collecting(1).submit(say, "taken").result()
with expstore.open(path) as rb:
    say(len(rb), rb.recovered)
""",
    )
    assert (code, out, err) == (0, "taken\n100 None\n", "")


def test_one_is_not_collected_inside_a_checkpoint(store_path: Path) -> None:
    """Its thread runs the collector there, whose `close` would wait for locks that this very thread holds."""
    code, out, err = run(
        store_path,
        """
import gc, threading, warnings
from expstore.disk.files import Disk

gone, collected = threading.Event(), threading.Event()
sync = Disk.sync_all

def collecting(self, *given):
    if threading.current_thread().name == "expstore-sync":
        gone.wait(30)
        gc.collect()
        collected.set()
    return sync(self, *given)

Disk.sync_all = collecting
warnings.simplefilter("ignore")
gc.disable()
rb = expstore.open(path, capacity=100)
rb.extend(batch(90))
(keeper,) = [one for one in threading.enumerate() if one.name == "expstore-keeper"]
rb.storage.background.hurry()
rb.itself = rb
del rb
gone.set()
say(collected.wait(30))
while keeper.is_alive():
    gc.collect()
    keeper.join(0.01)
rb = None
while rb is None:  # another thread closes it
    try:
        rb = expstore.open(path)
    except expstore.errors.LockedError:
        time.sleep(0.01)
say(len(rb), rb.recovered)
rb.close()
""",
    )
    assert (code, out, err) == (0, "True\n90 None\n", "")


# -- the end of the program ------------------------------------------------------------------------------


@pytest.mark.guarantee("kill/end")
def test_the_end_of_the_program_closes_what_is_open(store_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.exp"
    code, _, err = run(
        store_path,
        f"""
rb = held(expstore.open(path, capacity=100))
two = held(expstore.open({str(other)!r}, capacity=100))
rb.extend(batch(30)); two.extend(batch(10))
rb.keep = two.keep = [rb, two]  # in cycles, as forgotten things are
sys.exit(3)
""",
    )
    assert (code, err) == (3, "")
    for path, rows in ((store_path, 30), (other, 10)):
        assert (path / "index.duckdb").exists()
        with expstore.open(path) as rb:
            assert rb.recovered is None
            assert len(rb) == rows


def test_a_store_that_cannot_be_closed_does_not_keep_the_others_from_it(
    store_path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.exp"
    code, _, err = run(
        store_path,
        f"""
keep = [held(expstore.open(path, capacity=100)), held(expstore.open({str(other)!r}, capacity=100))]
for rb in keep: rb.extend(batch(10))
def fail(*_): raise expstore.errors.StorageError("no more")
keep[0].storage.sync = fail
import logging; logging.basicConfig()
""",
    )
    assert code == 0
    assert "run.exp could not be closed: no more" in err
    with expstore.open(other) as rb:
        assert rb.recovered is None
    with expstore.open(store_path) as rb:
        assert len(rb) == 10


def test_a_forked_child_leaves_the_parents_store_alone(store_path: Path) -> None:
    code, said, err = run(
        store_path,
        """
rb = held(expstore.open(path, capacity=100)); rb.extend(batch(10))
pid = os.fork()
if not pid:
    sys.exit(0)
os.waitpid(pid, 0)
rb.extend(batch(5))
say(len(rb))
""",
    )
    assert (code, said, err) == (0, "15\n", "")
    with expstore.open(store_path) as rb:
        assert (len(rb), rb.recovered) == (15, None)


# -- SIGTERM ---------------------------------------------------------------------------------------------

NOTE_SYNC = """
rb = held(expstore.open(path, capacity=100{more}))
sync = rb.storage.sync
rb.storage.sync = lambda: (sync(), say(f"unsynced {{rb.stats()['unsynced_rows']}}"))
rb.extend(batch(30))
"""


@pytest.mark.guarantee(
    "kill/end",
    "SIGTERM, the end of the program and dropping the last reference to a buffer close its store.",
)
def test_sigterm_flushes_and_is_died_of(store_path: Path) -> None:
    code, said, err = run(store_path, NOTE_SYNC.format(more=""), stop=signal.SIGTERM)
    assert (code, said, err) == (-signal.SIGTERM, "ready\nunsynced 0\n", "")
    with expstore.open(store_path) as rb:
        assert len(rb) == 30
        assert rb.recovered is not None
        assert "0 rows since the last sync" in rb.recovered


def test_that_can_be_declined(store_path: Path) -> None:
    code, said, err = run(
        store_path, NOTE_SYNC.format(more=", durability={'on_sigterm': 'ignore'}"), stop=signal.SIGTERM
    )
    assert (code, said, err) == (-signal.SIGTERM, "ready\n", "")


def test_a_lock_that_the_main_thread_holds_is_waited_for(store_path: Path) -> None:
    code, said, _ = run(
        store_path,
        """
rb = held(expstore.open(path, capacity=100)); rb.extend(batch(30))
sync = rb.storage.sync
rb.storage.sync = lambda: (sync(), say("flushed"))
with rb.storage.locks.episodes:
    say("ready")
    while signal.getsignal(signal.SIGTERM)._begun is False: time.sleep(0.01)
while True: time.sleep(0.01)
""",
        stop=signal.SIGTERM,
    )
    assert (code, said) == (-signal.SIGTERM, "ready\nflushed\n")


def test_the_second_one_is_not_waited_for(store_path: Path) -> None:
    code, said, _ = run(
        store_path,
        """
rb = held(expstore.open(path, capacity=100))
rb.storage.sync = lambda: (say("again"), time.sleep(60), say("never"))
""",
        stop=signal.SIGTERM,
        twice=True,
    )
    assert (code, said) == (-signal.SIGTERM, "ready\nagain\n")


def test_a_disk_that_hangs_is_not_waited_for(store_path: Path) -> None:
    code, said, _ = run(
        store_path,
        """
from expstore.core import tuning
tuning.SIGTERM_SECONDS = 0.2
rb = held(expstore.open(path, capacity=100))
rb.storage.sync = lambda: (say("hangs"), time.sleep(60), say("never"))
""",
        stop=signal.SIGTERM,
    )
    assert (code, said) == (-signal.SIGTERM, "ready\nhangs\n")


def test_a_handler_of_the_program_stays(store_path: Path) -> None:
    code, said, _ = run(
        store_path,
        """
signal.signal(signal.SIGTERM, lambda *_: (say("mine"), sys.exit(5)))
rb = held(expstore.open(path, capacity=100)); rb.extend(batch(30))
""",
        stop=signal.SIGTERM,
    )
    assert (code, said) == (5, "ready\nmine\n")
    with expstore.open(store_path) as rb:  # an exit like any other
        assert (len(rb), rb.recovered) == (30, None)


@pytest.mark.slow
def test_a_child_dies_of_it_at_once(store_path: Path) -> None:
    """The signal mostly comes before the child has begun to be one."""
    code, said, _ = run(
        store_path,
        """
rb = held(expstore.open(path, capacity=100)); rb.extend(batch(30))
for _ in range(20):
    pid = os.fork()
    if not pid:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.pause()
        os._exit(1)
    os.kill(pid, signal.SIGTERM)
    say(os.waitpid(pid, 0)[1])
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
rb.close()
say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.SIGTERM in mask)
""",
    )
    assert code == 0
    assert said == "15\n" * 20 + "True False\n"


def test_other_threads_install_no_handler(store_path: Path) -> None:
    """Python allows it in the main thread only."""
    former = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: expstore.open(store_path, capacity=10).close())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is former
    with expstore.open(store_path):
        assert isinstance(signal.getsignal(signal.SIGTERM), process_exit._Farewell) == (
            former is signal.SIG_DFL
        )
    assert signal.getsignal(signal.SIGTERM) is former
