"""Processes for SQL: few stores have some, idle ones end, and a store that is asked again gets new ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from expstore.api import sql_workers
from expstore.api.sql_workers import SqlWorkers
from tests.support.waits import ManualClock


class Worker:
    """Stands for the processes of a store."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def workers(clock: ManualClock) -> SqlWorkers:
    return SqlWorkers(clock)


def ask(workers: SqlWorkers, key: object) -> Worker:
    make: Any = Worker
    with workers.use(key, make) as worker:
        found: Any = worker
        return found


def test_a_store_keeps_its_processes_until_it_is_idle(workers: SqlWorkers, clock: ManualClock) -> None:
    first = ask(workers, "a")
    clock.now += 59.0
    workers.end_idle()
    assert ask(workers, "a") is first
    clock.now += 60.0
    workers.end_idle()
    assert first.is_closed
    assert ask(workers, "a") is not first


def test_the_store_that_was_asked_longest_ago_gives_up_its_processes(workers: SqlWorkers) -> None:
    first = [ask(workers, n) for n in range(sql_workers._MOST)]
    ask(workers, 0)
    ask(workers, "new")
    assert [worker.is_closed for worker in first] == [n == 1 for n in range(sql_workers._MOST)]


def test_a_store_that_is_being_asked_keeps_its_processes(workers: SqlWorkers, clock: ManualClock) -> None:
    make: Any = Worker
    with workers.use("asked", make) as worker:
        found: Any = worker
        for n in range(2 * sql_workers._MOST):
            ask(workers, n)
        clock.now += 1000.0
        workers.end_idle()
        assert not found.is_closed
    workers.end("asked")
    assert found.is_closed
    workers.end("asked")


def test_one_start_for_all_who_ask_a_store_at_once(workers: SqlWorkers) -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    def start() -> Any:
        begun.set()
        assert go_on.wait(60)
        made.append(Worker())
        return made[-1]

    def use() -> Any:
        with workers.use("a", start) as worker:
            return worker

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(use) for _ in range(4)]
        assert begun.wait(60)
        assert ask(workers, "b") is not None  # another store does not wait
        go_on.set()
        assert [one.result(30) for one in found] == made * 4
    assert len(made) == 1
