"""A node is lost again and again, with its process and its disk; an empty disk continues the store.

The process appends rows and draws batches of a consumer, and says what it has done. It is killed at a random
moment. The next one restores, must have a state that existed, and continues from there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("moto", reason="moto is not installed: there is no server to ship to")

import expstore
from expstore.maintenance import verify
from tests.support.s3_server import S3Server, start_moto

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

EVERY, MOST_LAG = 1.0, 2.0
URL = "s3://bucket/run"
#: The layouts, and how many rows a store keeps.
KINDS: list[dict[str, object]] = [
    {"layout": layout} | room
    for layout in ("flat", "packed", "arrow")
    for room in ({}, {"capacity": 300}, {"window": 200})
]

_NODE = """
import json, sys, time
import numpy as np
import expstore

path, url, every, life, options = sys.argv[1:]
every, life, options = float(every), int(life), json.loads(options)
rb = expstore.open(path, ship=expstore.Ship(url, every=every), batch_size=8, seed=0, **options)
print("open", rb.write_count, time.process_time(), flush=True)
learner = None
rng = np.random.default_rng(life)
while True:
    start, count = rb.write_count, int(rng.integers(1, 40))
    number = np.arange(start, start + count)
    done = number % 10 == 9
    batch = {"number": number, "life": np.full(count, life), "frame": np.repeat(number[:, None], 300, 1),
             "next": {"reward": np.ones(count, np.float32), "terminated": done, "done": done}}
    if options["layout"] == "arrow":
        batch["text"] = [str(n) * (n % 3) for n in number]
    rb.extend(batch, source="steps")
    print("rows", start + count, time.process_time(), flush=True)
    learner = learner or rb.consumer("learner", at="end")
    drawn = learner.sample(as_numpy=True)
    print("draw", learner.position["draw"] - 1, *drawn["number"].tolist(), flush=True)
    if rng.random() < 0.3:
        learner.commit()
    if rng.random() < 0.1 and options["layout"] == "flat" and "window" not in options:
        rb.update_priority(np.arange(3), 2.0)
"""


#: Most rows that a query reads.
MOST_ROWS = 100_000


class Node:
    """A process that appends rows, and what it has said."""

    def __init__(self, path: Path, life: int, kind: dict[str, object]) -> None:
        command = [sys.executable, "-c", _NODE, str(path), URL, str(EVERY), str(life), json.dumps(kind)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        #: Set once it has opened the store, or has ended.
        self.opened = threading.Event()
        #: (number of rows, when the process said so, how many seconds of CPU time it had used).
        self.rows: list[tuple[int, float, float]] = []
        self.draws: dict[int, list[int]] = {}
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # the kill has cut it
            word, *values = line.split()
            if word == "draw":
                draw, *numbers = map(int, values)
                self.draws[draw] = numbers
            else:
                self.rows.append((int(values[0]), time.monotonic(), float(values[1])))
                self.opened.set()
        self.opened.set()

    def count_old(self, now: float) -> int:
        """Return how many rows had been appended `EVERY` and `MOST_LAG` seconds before.

        Where other programs have the CPU, the process, which is never idle, also needs as many seconds of it.
        """
        limit, cpu = now - EVERY - MOST_LAG, self.rows[-1][2] - MOST_LAG
        return max([self.rows[0][0], *(count for count, at, used in self.rows if at < limit and used < cpu)])

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._thread.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _run_rounds(kind: dict[str, object], folder: Path, rng: np.random.Generator, rounds: int) -> None:
    lives: list[int] = []  # by the number of the row: the process that has appended it
    draws: dict[int, list[int]] = {}
    for life in range(rounds):
        node = Node(folder / "node.exp", life, kind)
        assert node.opened.wait(600)
        time.sleep(float(rng.uniform(0.2, 6.0)))  # not to synchronize: the moment of the kill
        killed_at = time.monotonic()
        node.kill()
        shutil.rmtree(folder / "node.exp")
        assert node.rows[0][0] == len(lives), "a state was restored that differs from the one before"
        lives += [life] * (node.rows[-1][0] - len(lives))
        draws |= node.draws
        lives = _check_restored(folder / "new.exp", kind, lives, life, draws, node.count_old(killed_at))


def _check_restored(
    path: Path, kind: Any, lives: list[int], life: int, draws: dict[int, list[int]], sure: int
) -> list[int]:
    """Restore, and check the state; return who has appended its rows."""
    log: dict[int, list[int]] = {}
    with expstore.open(path, ship=URL, seed=0, **kind) as rb:
        count, stored = rb.write_count, rb.storage.stored
        assert count >= sure, f"{sure - count} rows are lost that were appended long before"
        lives = [*lives, *[life] * (count - len(lives))][:count]
        if not count:
            rb.close()
            shutil.rmtree(path)
            return []
        assert len(rb) == stored.rows
        for first in range(count - stored.rows, count, MOST_ROWS):
            numbers = list(range(first, min(first + MOST_ROWS, count)))
            where = f"_id > {first} AND _id <= {first + MOST_ROWS}"  # packed frames need memory
            rows = rb.sql(f"SELECT number, life, frame FROM transitions WHERE {where} ORDER BY _id").arrow()
            assert rows["number"].to_pylist() == numbers
            assert rows["life"].to_pylist() == [lives[number] for number in numbers]
            assert rows["frame"].to_pylist() == [[number] * 300 for number in numbers]
        ended = rb.sql("SELECT count(*) FROM episodes WHERE status = 'terminated'").fetchall()
        assert ended == [(count // 10,)]
        for draw, id in rb.sql("SELECT draw, id FROM draws ORDER BY draw, place").fetchall():
            log.setdefault(draw, []).append(id - 1)
        assert all(max(numbers) < count for numbers in log.values()), "a draw has rows that the store lacks"
        assert all(draws.get(draw, numbers) == numbers for draw, numbers in log.items())
    assert verify(path) == []
    shutil.rmtree(path)
    for draw in [draw for draw in draws if draw not in log]:
        del draws[draw]  # it is lost, and another one comes
    return lives


@pytest.fixture
def _server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with start_moto() as port, S3Server(port, "bucket") as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.guarantee(
    "ship/loss",
    "If a node is lost with its disk, a store that it has shipped is restored elsewhere: every row whose call"
    " had returned `every` and two seconds before is there, and the state is one that existed.",
)
@pytest.mark.usefixtures("_server")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        (KINDS[1], 3),
        *(pytest.param(kind, 23, marks=pytest.mark.torture) for kind in KINDS),
    ],
    ids=str,
)
def test_a_lost_node_loses_seconds(
    kind: dict[str, object], rounds: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    _run_rounds(kind, tmp_path, rng, rounds)
