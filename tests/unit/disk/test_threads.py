"""The pool of threads: jobs run exactly once, whichever threads hang, and after forks and interrupts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from expstore.disk import threads
from expstore.disk.threads import MOST_THREADS, Job, Threads, finish


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that jobs wait for; set at the end, so that no thread is left waiting."""
    event = threading.Event()
    yield event
    event.set()


def hang(count: int, gate: threading.Event) -> list[Job]:
    """Let threads of the pool wait for an event."""
    begun = threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        gate.wait()

    jobs = [Threads(1).submit(wait) for _ in range(count)]
    for _ in jobs:
        assert begun.acquire(timeout=30)
    return jobs


def pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "expstore-sync"]


def test_jobs_run_once_and_several_at_a_time() -> None:
    together, done = threading.Barrier(3), list[int]()

    def act(number: int) -> None:
        together.wait(30)
        done.append(number)

    pool = Threads(2)
    finish([pool.submit(lambda number=number: act(number)) for number in range(3)])  # type: ignore[misc]
    assert sorted(done) == [0, 1, 2]


def test_the_first_failure_is_raised_after_all_have_ended() -> None:
    done: list[str] = []

    def fail(name: str) -> None:
        done.append(name)
        raise ValueError(name)

    pool = Threads(2)
    jobs = [pool.submit(lambda: done.append("a")), *(pool.submit(lambda n=n: fail(n)) for n in "bcd")]  # type: ignore[misc]
    with pytest.raises(ValueError, match="b"):
        finish(jobs)
    assert sorted(done) == ["a", "b", "c", "d"]


@pytest.mark.guarantee("process/turns")
def test_the_caller_runs_what_no_thread_is_free_for(gate: threading.Event) -> None:
    hanging = hang(max(MOST_THREADS, len(pool_threads())), gate)  # a grown pool has more
    me, ran = threading.get_ident(), list[int]()
    pool = Threads()
    finish([pool.submit(lambda: ran.append(threading.get_ident())) for _ in range(5)])
    assert ran == [me] * 5
    assert not any(job.done for job in hanging)
    gate.set()
    finish(hanging)


def test_one_share_holds_no_more_threads_than_it_may(gate: threading.Event) -> None:
    begun, pool = threading.Semaphore(0), Threads(2)

    def wait() -> None:
        begun.release()
        gate.wait()

    jobs = [pool.submit(wait) for _ in range(5)]
    for _ in range(2):
        assert begun.acquire(timeout=30)
    assert [job.begun for job in jobs] == [True, True, False, False, False]
    gate.set()
    finish(jobs)


def test_a_share_grows_although_all_threads_hang(gate: threading.Event) -> None:
    hanging = hang(MOST_THREADS, gate)
    ran, pool = threading.Event(), Threads(1)
    job = pool.submit(ran.set)
    assert not job.begun
    pool.grow()
    assert ran.wait(30)
    gate.set()
    finish([*hanging, job])


def test_after_refuse_only_the_caller_runs_jobs() -> None:
    pool, before = Threads(), len(pool_threads())
    pool.refuse()
    ran: list[int] = []
    job = pool.submit(lambda: ran.append(threading.get_ident()))
    assert not job.begun
    assert len(pool_threads()) <= before
    finish([job])
    assert ran == [threading.get_ident()]


def test_threads_without_work_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.01)
    pool, together = Threads(3), threading.Barrier(4)
    finish([pool.submit(lambda: together.wait(30)) for _ in range(4)])
    for thread in pool_threads():
        thread.join(30)
    assert not pool_threads()
    finish([pool.submit(lambda: None)])  # another one is started


def test_an_interrupted_caller_still_waits_for_its_jobs() -> None:
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def act() -> None:
        begun.set()
        gate.wait(60)
        ended.set()

    class Interrupted(Job):
        __slots__ = ()

        def wait(self) -> None:
            if not gate.is_set():
                gate.set()
                raise KeyboardInterrupt
            super().wait()

    job = Interrupted(act)
    Threads().add(job)
    assert begun.wait(60)  # otherwise the caller would run it
    with pytest.raises(KeyboardInterrupt):
        finish([job])
    assert ended.is_set()


def test_what_a_job_referred_to_is_free_afterwards() -> None:
    job = Threads().submit(lambda: None)
    finish([job])
    assert job._act is None


@pytest.mark.parametrize("hangs", [False, True])
def test_a_forked_child_starts_threads_of_its_own(hangs: bool, gate: threading.Event) -> None:
    pool = Threads()
    jobs = hang(MOST_THREADS, gate) if hangs else [pool.submit(lambda: None)]
    pid = os.fork()
    if pid == 0:
        ran = threading.Event()
        Threads().submit(ran.set)
        os._exit(0 if ran.wait(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    finish(jobs)
