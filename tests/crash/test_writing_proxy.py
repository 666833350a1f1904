"""Kill -9 of workers and of the owner of a shared buffer, before every act of their protocol, and at random.

What a worker was told is stored; at most one call more for each worker; a call that is repeated under its key
is stored once; the other workers go on; nothing is left in /dev/shm.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import TensorDictReplayBuffer
from expstore.buffers.ingest import Ingest
from expstore.disk.message_socket import MessageSocket
from expstore.disk.shared_memory import SharedMemory
from expstore.errors import RemoteError
from expstore.maintenance.verify import verify
from expstore.wire.slots import Slot
from tests.support.waits import wait_until

#: What a worker, and what the owner, does to the memory and the sockets that they share.
WORKER_ACTS = ((Slot, "_put"), (MessageSocket, "send"), (MessageSocket, "receive"), (SharedMemory, "create"))
OWNER_ACTS = (
    (MessageSocket, "receive_now"),
    (MessageSocket, "send_now"),
    (Slot, "_answer"),
    (SharedMemory, "__init__"),
    (Ingest, "append_batch"),
)

_CALL = struct.Struct("<qq")  # worker, number of its call


def rows(worker: int, call: int) -> TensorDict:
    """Return the rows of a call: some go through the memtable, some to the columns."""
    count = 3 + (worker + call) % 3 * 60
    number = torch.arange(count)
    return TensorDict(
        {
            "worker": torch.full((count,), worker),
            "call": torch.full((count,), call),
            "observation": (number + 1000 * call).to(torch.float32)[:, None].expand(-1, 5).clone(),
        },
        [count],
    )


def send(rb: TensorDictReplayBuffer, worker: int, call: int) -> None:
    rb.extend(rows(worker, call), source=f"worker-{worker}", idempotency_key=f"{worker}/{call}")


def calls_in(rb: TensorDictReplayBuffer, worker: int) -> int:
    """Return how many calls of a worker are stored; they must be whole, in order, and once."""
    if rb.schema is None:
        return 0
    found = rb.by_id(rb.storage.window.ids())
    found = found[found["worker"] == worker]
    last = int(found["call"].max()) if len(found) else 0
    wanted = [rows(worker, call) for call in range(1, last + 1)]
    if wanted:
        wanted = torch.cat(wanted)
        assert torch.equal(found["call"], wanted["call"])
        assert torch.equal(found["observation"], wanted["observation"])
    return last


def die_at(number: int, acts: tuple[tuple[type, str], ...]) -> None:
    """Kill this process before the act of this number; they are counted from now on."""
    count = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **keywords)

        return run

    for holder, name in acts:
        act = getattr(holder, name)
        setattr(holder, name, counted(act) if name != "create" else staticmethod(counted(act)))


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work` in a child, with the writing end of a pipe; return its pid and the reading end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    code = 1
    try:
        os.close(read_end)
        signal.alarm(60)
        torch.set_num_threads(1)
        work(write_end)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def told(read_end: int) -> list[tuple[int, int]]:
    """Return the calls whose end was told, to the end of the pipe."""
    with os.fdopen(read_end, "rb") as pipe:
        return list(_CALL.iter_unpack(pipe.read()))


def wait(pid: int) -> int:
    """Return how a child ended: 0, or minus the signal."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child failed: {code}"
    return code


def check_shm(*pids: int) -> None:
    """Fail if these processes, or anything of our name, left a file in /dev/shm, which others use, too.

    Libraries that other tests of this process have used (joblib) keep semaphores there.
    """
    ours = {"expstore", *map(str, pids)}
    names = [name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky-")]
    assert not [name for name in names if ours & set(re.split(r"[-_.]", name))]


@pytest.mark.guarantee(
    "kill/shared",
    "Calls of a process that writes through `rb.share()` survive once they returned, whether it dies or "
    "the owner of the store.",
)
@pytest.mark.slow
def test_a_worker_is_killed_before_every_act(store_path: Path) -> None:
    worker, pids = 0, [os.getpid()]
    with expstore.open(store_path).share() as rb:
        other: TensorDictReplayBuffer = pickle.loads(pickle.dumps(rb))
        others, code = 0, -signal.SIGKILL
        while code:
            number, worker = worker, worker + 1

            def work(pipe: int, worker: int = worker, number: int = number) -> None:
                die_at(number, WORKER_ACTS)
                for call in (1, 2, 3):
                    send(rb, worker, call)
                    os.write(pipe, _CALL.pack(worker, call))

            pid, pipe = fork(work)
            pids.append(pid)
            acknowledged = len(told(pipe))
            code = wait(pid)
            others += 1
            send(other, 0, others)  # and the owner has accepted the worker's connection
            name = f"worker-{worker}"
            server = rb._sharing._server
            assert server is not None
            wait_until(lambda: len(server._loop._workers) == 1)  # noqa: B023 - called at once
            assert acknowledged <= calls_in(rb, worker) <= acknowledged + 1
            is_open = "SELECT count(*) FROM episodes WHERE source = ? AND status = 'open'"
            wait_until(lambda: rb.sql(is_open, [name]).fetchall() == [(0,)])  # noqa: B023
            for call in (1, 2, 3):
                send(other, worker, call)
            assert calls_in(rb, worker) == 3
        assert worker > 15
        assert calls_in(rb, 0) == others
        other.close()
    check_shm(*pids)
    assert verify(store_path) == []


@pytest.mark.guarantee("kill/shared")
@pytest.mark.slow
def test_the_owner_is_killed_before_every_act(tmp_path: Path) -> None:
    number, pids = 0, [os.getpid()]
    while number < 1000:
        path, done = tmp_path / f"{number}.exp", 0
        expstore.open(path).close()

        def own(pipe: int, path: Path = path, number: int = number) -> None:
            rb = expstore.open(path).share()
            os.write(pipe, pickle.dumps(rb))
            os.close(pipe)
            die_at(number, OWNER_ACTS)
            signal.pause()

        pid, pipe = fork(own)
        pids.append(pid)
        with os.fdopen(pipe, "rb") as file:
            worker: TensorDictReplayBuffer = pickle.load(file)
        try:
            for call in (1, 2, 3):
                send(worker, 1, call)
                done = call
            os.kill(pid, signal.SIGKILL)
        except RemoteError:
            pass  # killed
        worker.close()
        assert wait(pid) == -signal.SIGKILL
        with expstore.open(path) as rb:
            assert done <= calls_in(rb, 1) <= done + 1
            for call in (1, 2, 3):
                send(rb, 1, call)
            assert calls_in(rb, 1) == 3
        if done == 3:
            break
        number += 1
    assert number > 10
    check_shm(*pids)


@pytest.mark.guarantee("kill/shared")
@pytest.mark.slow
def test_random_kills_lose_nothing(store_path: Path) -> None:
    kill_at_random(store_path, rounds=30, seed=1)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_random_kills_lose_nothing(store_path: Path, seed: int) -> None:
    kill_at_random(store_path, rounds=100, seed=seed)


def kill_at_random(path: Path, *, rounds: int, seed: int, workers: int = 3) -> None:
    """Run the owner and its workers again and again; in each round one of them is killed at a random act."""
    numbers, pids = random.Random(seed), [os.getpid()]
    stored = [0] * workers
    killed = {"owner": 0, "worker": 0}
    for _ in range(rounds):
        victim, act = numbers.randrange(-1, workers), numbers.randrange(120)

        def own(pipe: int, victim: int = victim, act: int = act) -> None:
            rb = expstore.open(path).share()
            os.write(pipe, pickle.dumps(rb))
            os.close(pipe)
            if victim < 0:
                die_at(act, OWNER_ACTS)
            signal.pause()

        owner, pipe = fork(own)
        with os.fdopen(pipe, "rb") as file:
            copied = file.read()

        def work(pipe: int, number: int, first: int, act: int | None) -> None:
            rb = pickle.loads(copied)  # noqa: B023 - runs at once
            if act is not None:
                die_at(act, WORKER_ACTS)
            try:
                for call in range(first, first + 25):
                    send(rb, number, call)
                    os.write(pipe, _CALL.pack(number, call))
            except RemoteError:
                pass  # the owner was killed

        started = [
            fork(lambda pipe, k=k: work(pipe, k, stored[k] + 1, act if k == victim else None))  # noqa: B023
            for k in range(workers)
        ]
        pids += [owner, *(pid for pid, _ in started)]
        acknowledged = [told(pipe) for _, pipe in started]
        codes = [wait(pid) for pid, _ in started]
        os.kill(owner, signal.SIGKILL)
        wait(owner)
        with expstore.open(path) as rb:
            for number, calls in enumerate(acknowledged):
                before, now = stored[number], calls_in(rb, number)
                assert before + len(calls) <= now <= before + len(calls) + 1
                if number != victim and victim >= 0:
                    assert len(calls) == 25  # the others have gone on
                stored[number] = now
            assert rb.sql("SELECT count(*) FROM episodes WHERE status = 'open'").fetchall() == [(0,)]
        killed["owner" if victim < 0 else "worker"] += 1
        assert [code != 0 for code in codes].count(True) <= (victim >= 0)
    assert min(killed.values()) > rounds // 8
    check_shm(*pids)
    assert verify(path) == []
