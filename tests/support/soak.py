"""Run servers under steady work, and check that their memory, descriptors and threads stay as they are.

    python -m tests.support.soak --minutes 60

Two servers ship their stores to moto every few seconds. One has a ring of rows: clients extend it, sample by
priority and uniformly, set priorities and ask SQL, at a fixed pace; consumers draw, commit and go back;
followers in processes of their own sample it, and open it anew now and then; every minute a version is made.
The other one records agents' calls to a fake model, in a store with a retention policy. Browsers ask both for
what the page shows. `/proc` says what the servers use (Linux). The first quarter of the time is not compared:
caches fill then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

import expstore
from expstore.api.capture.recorder import store_settings
from expstore.errors import ExpStoreError
from expstore.remote import Retries
from tests.support.batches import transitions
from tests.support.fake_upstream import FakeUpstream
from tests.support.s3_server import ENVIRONMENT, start_moto

#: The ring is overwritten every half minute.
CAPACITY = 20_000
ROWS = 50
#: Clients, and seconds from one round of a client to its next.
CLIENTS, PERIOD = 32, 2.0
FOLLOWERS, AGENTS = 2, 4
#: Seconds within which a busy machine answers.
PATIENCE = 300.0
#: Kinds of errors of a machine that is too busy for SQL within its limits; the work goes on.
BUSY = {"busy", "sandbox", "timeout"}
#: Growth of memory that is allowed: this share and these bytes. Facts about episodes remain after their rows.
SHARE, BYTES = 0.05, 16 << 20
#: Growth in number that is allowed. Threads of the server's pool come and go with the requests at one time; a
#: thread or a file that each connection left behind would be thousands, and an object that each upload left
#: behind, too.
NUMBERS = {"descriptors": 4, "threads": CLIENTS // 2, "objects": 40}


@dataclass(frozen=True)
class Use:
    """What a server uses at one time.

    Args:
        seconds: Since the beginning.
        memory: Bytes of anonymous memory.
        descriptors: Number of open files and sockets.
        threads: Number of threads.
        objects: Number of objects that it has in the object storage.
    """

    seconds: float
    memory: int
    descriptors: int
    threads: int
    objects: int

    @classmethod
    def of(cls, pid: int, seconds: float, objects: int) -> Use:
        """Read what a process uses now."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        memory = int(facts["RssAnon"].split()[0]) << 10
        return cls(seconds, memory, len(os.listdir(f"/proc/{pid}/fd")), int(facts["Threads"]), objects)


def find_growth(uses: Sequence[Use]) -> list[str]:
    """Return what has grown from the second quarter of the time to the last one: a line for each."""
    part = len(uses) // 4
    before, after = uses[part : 2 * part], uses[-part:]
    found = []
    for name in ("memory", *NUMBERS):
        first = median(getattr(use, name) for use in before)
        last = median(getattr(use, name) for use in after)
        allowed = first * SHARE + BYTES if name == "memory" else NUMBERS[name]
        if last - first > allowed:
            found.append(f"{name}: {first:,.0f} -> {last:,.0f}")
    return found


class Worker(threading.Thread):
    """A thread that does rounds of work at a fixed pace until it is told to stop.

    Args:
        server: Address of a server.
        store: Name of one of its stores.
        number: Number of the worker among those of its kind.
        stopping: Set when it must stop.
    """

    period = PERIOD

    def __init__(self, server: str, store: str, number: int, stopping: threading.Event) -> None:
        super().__init__(name=f"{type(self).__name__.lower()} {number}")
        self.server, self.store, self.number, self.stopping = server, store, number, stopping
        self.rounds, self.error = 0, ""
        self._due = time.monotonic() + self.period * number / CLIENTS

    def run(self) -> None:
        try:
            self.work()
        except Exception as exc:
            self.error = f"{type(exc).__name__}: {exc}"

    def work(self) -> None:
        """Do rounds, each after `wait_for_round`."""
        raise NotImplementedError

    def wait_for_round(self) -> bool:
        """Wait until the next round is due; return whether it should be done."""
        stops = self.stopping.wait(max(0.0, self._due - time.monotonic()))
        self._due += self.period
        self.rounds += not stops
        return not stops


class Client(Worker):
    """Extends the ring, samples it, sets priorities and asks SQL."""

    def work(self) -> None:
        rng = np.random.default_rng(self.number)
        sampler = "prioritized" if self.number % 2 else None
        while not self.stopping.is_set():
            # A connection lives for some rounds: connections come and go.
            with expstore.connect(
                f"{self.server}/{self.store}",
                batch_size=64,
                sampler=sampler,
                wait=30.0,
                timeout=PATIENCE,
                retries=Retries(seconds=PATIENCE),
            ) as rb:
                for _ in range(10):
                    if not self.wait_for_round():
                        return
                    rb.extend(
                        transitions(ROWS, start=ROWS * self.rounds, episode_length=20),
                        source=f"client-{self.number}",
                    )
                    batch = rb.sample()
                    if sampler:
                        rb.update_priority(id=batch["id"], priority=rng.random(len(batch)) + 0.1)
                    if self.rounds % 20 == 1:
                        try:
                            rb.sql("SELECT status, count(*), avg(length) FROM episodes GROUP BY status")
                        except ExpStoreError as error:
                            if error.kind not in BUSY:
                                raise


class Learner(Worker):
    """Draws as a consumer, commits, and goes back to its last commit, where the same rows come again."""

    period = 0.5

    def work(self) -> None:
        kind = ("uniform", "consuming")[self.number % 2]
        while not self.stopping.is_set():
            with (
                expstore.connect(
                    f"{self.server}/{self.store}",
                    batch_size=64,
                    wait=30.0,
                    timeout=PATIENCE,
                    retries=Retries(seconds=PATIENCE),
                ) as rb,
                rb.consumer(f"learner-{self.number}", sampler=kind, missing="skip") as learner,
            ):
                for _ in range(20):
                    drawn = []
                    for _ in range(6):
                        if not self.wait_for_round():
                            return
                        drawn.append(learner.sample()["id"].tolist())
                    learner.seek("committed")
                    assert learner.replaying
                    again = [learner.sample()["id"].tolist() for _ in drawn]
                    # Rows that were overwritten meanwhile are left out.
                    assert all(set(now) <= set(then) for then, now in zip(drawn, again, strict=True))
                    learner.commit()


class Agent(Worker):
    """Calls the model in named episodes, with a reward at the end; some calls fail, some clients go away."""

    def work(self) -> None:
        rng = random.Random(self.number)
        for episode in itertools.count():
            url = f"{self.server}/episodes/agent-{self.number}-{episode}"
            messages = [{"role": "system", "content": "Be brief. " * 50}]
            with httpx.Client(timeout=PATIENCE) as client:
                for cycle in range(4):
                    if not self.wait_for_round():
                        return
                    word = rng.choice(["tool", "hello", "500", "die"] if cycle == 1 else ["hello"])
                    messages.append({"role": "user", "content": word})
                    body = {"model": "fake", "messages": messages, "stream": cycle % 2 == 0}
                    answer = client.post(f"{url}/v1/chat/completions", json=body)
                    assert answer.status_code == {"500": 500, "die": 502}.get(word, 200), answer.text
                    messages.append({"role": "assistant", "content": f"{word}!"})
                if episode % 8 == 7:  # the client reads the begin of an answer and leaves
                    body = {"model": "fake", "messages": messages, "stream": True}
                    with client.stream("POST", f"{url}/v1/chat/completions", json=body):
                        pass
                client.post(f"{url}/facts", json={"site": rng.randrange(5)}).raise_for_status()
                client.post(f"{url}/end", json={"reward": rng.random()}).raise_for_status()


class Browser(Worker):
    """Asks for what the page asks for, and listens to events."""

    def work(self) -> None:
        while not self.stopping.is_set():
            with httpx.Client(base_url=f"{self.server}/v1/stores/{self.store}", timeout=PATIENCE) as client:
                for cycle in range(20):
                    if not self.wait_for_round():
                        return
                    for path in ("/summary", "/consumers"):
                        self._ask(client, path)
                    with client.stream("GET", "/events?count=1") as answer:
                        answer.read()
                    if cycle % 4 == 0:
                        self._look_around(client)

    def _look_around(self, client: httpx.Client) -> None:
        for path in ("/series?y=return&by=source&x=time", "/facets", "/odd", "/changes", "/relations"):
            self._ask(client, path)
        listed = self._ask(client, "/episodes?limit=20&order=-episode_id&where=live_rows > 0")
        if listed is not None:
            for row in listed["rows"][:2]:
                number = row[listed["columns"].index("episode_id")]
                self._ask(client, f"/episodes/{number}?start=0&count=10")
        self._ask(client, "/sample/preview", {"sampler": {"kind": "uniform"}, "batches": 5})
        self._ask(client, "/sql", {"query": "SELECT source, count(*) FROM episodes GROUP BY ALL LIMIT 50"})

    def _ask(self, client: httpx.Client, path: str, body: Any = None) -> Any:
        """Return an answer, or None if the machine was too busy or the rows have left meanwhile."""
        answer = client.get(path) if body is None else client.post(path, json=body)
        found = answer.json()
        if answer.is_error:
            error = found["error"]
            assert error["kind"] in BUSY | {"not_found", "not_ready"}, f"{path}: {error}"
            return None
        return found


def follow(path: Path, stopping: Any, failed: Any) -> None:
    """Sample a store that another process writes, and open it anew every minute."""
    try:
        while not stopping.is_set():
            with expstore.open(path, mode="r", batch_size=64) as rb:
                for _ in range(60):
                    if len(rb):
                        rb.sample()
                    if stopping.wait(1.0):
                        return
    except Exception:
        failed.set()
        raise


@contextmanager
def serve(path: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve in a process that is started as users start it; yield it and the address of the server."""
    command = [sys.executable, "-m", "expstore", "serve", str(path), "--port", "0", "--json", *options]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        try:
            yield child, json.loads(child.stdout.readline())["listening"]
        finally:
            child.terminate()
            child.wait(PATIENCE)


class Bucket:
    """A bucket of moto, which is created.

    Args:
        port: The port of moto.
    """

    def __init__(self, port: int) -> None:
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        self._url = f"http://127.0.0.1:{port}/soak"
        httpx.put(self._url, timeout=PATIENCE).raise_for_status()

    def count(self, prefix: str) -> int:
        """Return the number of objects whose keys begin so; more than 1000 are 1000."""
        found = httpx.get(
            self._url, params={"list-type": "2", "prefix": prefix}, timeout=PATIENCE
        ).raise_for_status()
        return len(re.findall("<Key>", found.text))


def soak(
    minutes: float, folder: Path, out: Callable[[str], object]
) -> tuple[Mapping[str, list[Use]], list[str]]:
    """Run the work; return what each server used, and what went wrong."""
    context = multiprocessing.get_context("spawn")
    over, failed, stopping = context.Event(), context.Event(), threading.Event()
    runs = folder / "runs"
    expstore.open(runs / "run.exp", capacity=CAPACITY).close()
    expstore.open(folder / "calls.exp", retain={"age": "2m"}, **store_settings(None)).close()
    with ExitStack() as stack:
        bucket = Bucket(stack.enter_context(start_moto()))
        upstream = stack.enter_context(FakeUpstream())
        environment = bucket.environment
        ring = stack.enter_context(serve(runs, "--ship", "s3://soak/runs", **environment))
        calls = stack.enter_context(
            serve(folder / "calls.exp", "--capture", upstream.url, "--ship", "s3://soak/calls", **environment)
        )
        servers = {"runs": ring, "calls": calls}
        places = (ring[1], "run"), (calls[1], "calls")
        workers: list[Worker] = [
            *(Client(*places[0], number, stopping) for number in range(CLIENTS)),
            *(Learner(*places[0], number, stopping) for number in range(2)),
            *(Agent(*places[1], number, stopping) for number in range(AGENTS)),
            *(Browser(*place, number, stopping) for number, place in enumerate(places)),
        ]
        for worker in workers:
            worker.start()
        followers = [
            context.Process(target=follow, args=(runs / "run.exp", over, failed)) for _ in range(FOLLOWERS)
        ]
        for follower in followers:
            follower.start()
        began = time.monotonic()
        uses: dict[str, list[Use]] = {name: [] for name in servers}
        pause = min(10.0, minutes * 60 / 40)
        with expstore.connect(f"{ring[1]}/run", timeout=PATIENCE, retries=Retries(seconds=PATIENCE)) as rb:
            versions = 0
            while (passed := time.monotonic() - began) < minutes * 60:
                if passed > 60 * versions:
                    rb.dumps()
                    versions += 1
                for name, (child, _) in servers.items():
                    uses[name].append(Use.of(child.pid, passed, bucket.count(f"{name}/")))
                upstream.requests.clear()
                stopping.wait(pause)
        stopping.set()
        over.set()
        for worker in workers:
            worker.join(PATIENCE)
        for follower in followers:
            follower.join(PATIENCE)
        problems = [f"{worker.name}: {worker.error}" for worker in workers if worker.error]
        if failed.is_set():
            problems.append("a follower failed")
        for kind in (Client, Learner, Agent, Browser):
            out(f"{kind.__name__}: {sum(one.rounds for one in workers if type(one) is kind):,} rounds")
        out(f"{versions} versions")
    grown = [f"{name}: {line}" for name, found in uses.items() for line in find_growth(found)]
    return uses, problems + grown


def main(arguments: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Run, print what the server used, return 1 if something grew or failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="expstore-soak-") as folder:
        uses, problems = soak(args.minutes, Path(folder), out)
    if args.json:
        args.json.write_text(json.dumps({name: [asdict(use) for use in uses[name]] for name in uses}))
    for name, found in uses.items():
        out(f"{name:>8}     memory  descriptors  threads  objects")
        for use in found[:: max(1, len(found) // 12)]:
            out(
                f"{use.seconds:7.0f}s  {use.memory / 1e6:6.1f} MB  {use.descriptors:11d}  {use.threads:7d}  "
                f"{use.objects:7d}"
            )
    for problem in problems:
        out(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
