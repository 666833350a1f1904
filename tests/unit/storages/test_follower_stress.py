"""Two followers sample, index and query while a writer wraps its ring: no torn or mixed row.

Rows are functions of their ids (`crowd`). The long form is `make torture`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import store_processes

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("checked_locks")]


def run(answers: Any, name: str, work: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        answers.put((name, work(*arguments)))
    except BaseException as exc:
        answers.put((name, {"wrong": repr(exc)}))


@pytest.mark.guarantee("draw/whole")
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, pytest.param(30.0, marks=pytest.mark.torture)])
def test_followers_read_while_a_writer_writes(store_path: Path, seconds: float) -> None:
    context = multiprocessing.get_context("fork")
    answers, made, ready = context.Queue(), context.Event(), context.Barrier(3)
    tasks = [
        ("writer", store_processes.write, store_path, seconds + 1, made, ready),
        *((f"follower {n}", store_processes.follow, store_path, seconds, made, ready, n) for n in range(2)),
    ]
    processes = [context.Process(target=run, args=(answers, *task)) for task in tasks]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=90) for _ in processes)
    for process in processes:
        process.join()
    for name, answer in found.items():
        assert not answer.get("wrong"), f"{name}: {answer['wrong']}"
    writer = found.pop("writer")
    assert writer["laps"] > 3, writer
    assert writer["changes"] > 2, writer
    for answer in found.values():
        assert answer["samples"] >= 40, answer
        assert answer["queries"] >= 2, answer
        assert answer["last"] - answer["first"] > 2 * store_processes.CAPACITY, answer
