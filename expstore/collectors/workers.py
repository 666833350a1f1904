"""Collect with several processes, each with its own environments, into one store.

Used by `expstore.Collector`. Workers write through the process that has the store open (`rb.share()`); this
module starts them, tells them when to collect, passes weights to them, and replaces those that died.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import random
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import numpy as np
import torch

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.collectors.environments import EnvMaker, make_lanes
from expstore.collectors.lanes import LaneCollector, count_from
from expstore.collectors.plan import Plan
from expstore.collectors.policies import ModulePolicy, Weights, weights_of
from expstore.collectors.progress import Progress
from expstore.collectors.space_fields import describe_rows
from expstore.errors import ExpStoreError, StateError

_logger = logging.getLogger("expstore")
#: How long a worker may take to end after it was asked to, seconds.
_END_SECONDS = 10.0


@dataclass
class _Worker:
    """One worker process, as the owner sees it.

    Args:
        number: From 0 on; a worker that replaces another has its number.
        starts: How many times it was started.
        process: The process.
        pipe: The owner's end of the pipe.
        stored: Rows that it has stored since it was started.
        is_running: Whether it may be collecting.
        failure: The error that it reported.
        is_told: Whether it knows that there are new weights, and has not asked for them yet.
    """

    number: int
    starts: int
    process: Any
    pipe: Connection
    stored: int = 0
    is_running: bool = False
    failure: str = ""
    is_told: bool = False


#: Blocks that a worker may be ahead of the owner, so that `collect` stores little more than it was asked for.
_AHEAD = 2


class Workers:
    """The worker processes of a collector.

    A worker that died, by a signal or by an error of its environment, is replaced, and its open episodes are
    cut; one that fails before it has stored anything ends the collection with its error.

    Threads: one thread calls the methods; a thread of its own listens to the workers. Processes: only the
    process that made it may use it. Crashes: when this process dies the workers end.

    Args:
        rb: The buffer, which is shared from now on.
        plan: How each worker collects.
        make_env: Returns a new environment.
        lanes: Environments of each worker.
        count: How many workers.

    Raises:
        StateError: The buffer cannot be shared.
    """

    def __init__(self, rb: ReplayBuffer, plan: Plan, make_env: EnvMaker, lanes: int, count: int) -> None:
        rb.share()
        self._rb, self._lanes, self._count = rb, lanes, count
        # A server process imports this module once and forks the workers: seconds of CPU less for each.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        # Functions of the program's main module are passed by value.
        self._task = cloudpickle.dumps((plan, make_env, lanes))
        self._changed = threading.Condition()
        self._progress = Progress()
        self._version = 0
        self._weights: Weights | None = None
        self._collecting = self._closing = False
        self._target: int | None = None  # rows in all at which the workers stop; None: at `pause`
        self._failure: str = ""
        self._wake_end, self._waker = self._context.Pipe(duplex=False)  # wakes the listener
        self._workers = {number: self._start(number, 0) for number in range(count)}
        self._listener = threading.Thread(target=self._listen, name="expstore-collect", daemon=True)
        self._listener.start()

    # -- what a collector does -----------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """How many rows the workers have stored."""
        return self._progress.rows

    def describe(self) -> dict[str, Any]:
        """Return counts, and the mean return of recent episodes."""
        with self._changed:
            return self._progress.describe() | {"policy_version": self._version}

    def run(self, rows: int | None = None) -> None:
        """Let all workers collect until `pause`, or until so many rows have been stored in all."""
        with self._changed:
            self._check()
            self._collecting, self._target = True, rows
            for worker in self._workers.values():
                self._send_run(worker)

    def wait_for(self, rows: int, seconds: float | None = None) -> int:
        """Wait until so many rows have been stored in all, or for some time; return how many have.

        Raises:
            StateError: A worker failed, with its error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._progress.rows >= rows or self._failure, seconds)
            if self._progress.rows < rows:
                self._check()
            return self._progress.rows

    def pause(self) -> None:
        """Let all workers store what they have, and wait until they have."""
        with self._allow_inserts(), self._changed:
            self._collecting = False
            for worker in self._workers.values():
                self._send(worker, "pause")
            self._changed.wait_for(lambda: not any(one.is_running for one in self._workers.values()))

    def set_weights(self, module: torch.nn.Module) -> int:
        """Pass weights to all workers, which use them from their next block on; return their version."""
        with self._changed:
            self._check()
            self._version += 1
            self._weights = weights_of(module)
            for worker in self._workers.values():
                self._announce_weights(worker)
            return self._version

    def close(self) -> None:
        """End the workers; a second call does nothing."""
        with self._allow_inserts(), self._changed:
            if self._closing:
                return
            self._closing = True
            for worker in self._workers.values():
                self._send(worker, "close")
            if not self._changed.wait_for(lambda: not self._workers, _END_SECONDS):
                for worker in self._workers.values():
                    worker.process.kill()
                self._changed.wait_for(lambda: not self._workers)
        self._waker.close()
        self._listener.join()
        self._wake_end.close()

    def _allow_inserts(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no worker waits for the rate limiter, so that they can end."""
        limiter = self._rb._limiter
        return contextlib.nullcontext() if limiter is None else limiter.allow_inserts()

    def _check(self) -> None:
        """Raise StateError if a worker has failed for good, or the collector is closed."""
        if self._failure:
            raise StateError(f"a worker of the collector failed:\n{self._failure}")
        if self._closing:
            raise StateError("this collector is closed", hint="create a new one to continue collecting")

    # -- the workers ---------------------------------------------------------------------------------

    def _start(self, number: int, starts: int) -> _Worker:
        """Start a worker process."""
        ours, theirs = self._context.Pipe()
        # Each start has lanes and trajectory ids of its own.
        lane = (starts * self._count + number) * self._lanes
        first = self._find_trajectory(number)
        process = self._context.Process(
            target=_work,
            args=(self._task, self._rb, theirs, number, lane, first, self._count),
            name=f"expstore-collect-{number}",
            daemon=True,
        )
        # Ctrl-C reaches the owner, which ends its workers: the mask is inherited from the start on.
        resource_tracker.ensure_running()  # its start would unblock the signal
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        theirs.close()
        worker = _Worker(number, starts + 1, process, ours)
        if self._weights is not None:
            self._announce_weights(worker)
        if self._collecting:
            self._send_run(worker)
        return worker

    def _find_trajectory(self, number: int) -> int:
        """Return a trajectory id above all in the store, which no other worker will use.

        Ids of a worker have the remainder `number` when divided by the number of workers.
        """
        ((largest,),) = self._rb.sql("SELECT max(trajectory_id) FROM episodes").fetchall()
        least = max(0 if largest is None else largest + 1, self._rb.write_count)
        return least + (number - least) % self._count

    def _send_run(self, worker: _Worker) -> None:
        worker.is_running = True
        self._send(worker, "run", None if self._target is None else _AHEAD)

    def _announce_weights(self, worker: _Worker) -> None:
        """Tell a worker that there are new weights. It asks for them when it can receive them.

        Weights may be larger than what a pipe holds. Sent to a worker that waits for the rate limiter, they
        would block this program, which then could not sample, for which the worker waits.
        """
        if not worker.is_told:
            worker.is_told = True
            self._send(worker, "weights")

    def _send(self, worker: _Worker, *message: Any) -> None:
        """Send a message; a worker that has died is found by the listener."""
        with contextlib.suppress(OSError):
            worker.pipe.send(message)

    def _listen(self) -> None:
        """Receive messages of workers, and replace those that died, until the collector is closed."""
        while True:
            with self._changed:
                workers = {worker.pipe: worker for worker in self._workers.values()}
            for pipe in wait([*workers, self._wake_end]):
                if pipe is self._wake_end:
                    return
                try:
                    self._handle_message(workers[pipe])  # type: ignore[index]
                except Exception:  # without this thread, `collect` and `close` would wait forever
                    with self._changed:
                        self._fail(traceback.format_exc())
                        self._changed.notify_all()

    def _handle_message(self, worker: _Worker) -> None:
        """Receive one message of a worker, or notice that it has ended."""
        try:
            kind, *values = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()  # only this thread does, since a process can be waited for once
            with self._changed:
                self._remove(worker)
                self._changed.notify_all()
            return
        with self._changed:
            if kind == "stored":
                rows, returns = values
                worker.stored += rows
                self._progress.add(rows, returns)
                if self._collecting and self._target is not None and self._progress.rows < self._target:
                    self._send(worker, "more")
            elif kind == "paused":
                worker.is_running = False
            elif kind == "fetch":
                worker.is_told = False
                self._send(worker, "update", self._version, self._weights)
            elif kind == "specs":
                describe_rows(self._rb, values[0])
            else:
                worker.failure = values[0]
            self._changed.notify_all()

    def _remove(self, worker: _Worker) -> None:
        """Forget a worker that has ended; start another in its place unless it had not stored anything."""
        worker.pipe.close()
        del self._workers[worker.number]
        if self._closing:
            return
        failure = worker.failure or f"it died with exit code {worker.process.exitcode}"
        if not worker.stored:
            self._fail(f"worker {worker.number}: {failure}")
            return
        try:
            self._workers[worker.number] = self._start(worker.number, worker.starts)
        except (ExpStoreError, OSError) as exc:  # the buffer was closed, say: there is nothing to write to
            self._fail(f"worker {worker.number}: {failure}\nIt was not replaced: {exc}")
            return
        self._progress.restarts += 1
        _logger.warning("collector: worker %d is replaced: %s", worker.number, failure)

    def _fail(self, failure: str) -> None:
        """End the collection; the log has the reason for a program that waits for rows."""
        self._failure = self._failure or failure
        _logger.error("collector: %s", failure)


def _work(
    task: bytes, rb: ReplayBuffer, pipe: Connection, number: int, lane: int, first: int, step: int
) -> None:
    """Collect on commands of the owner: the main function of a worker process.

    Args:
        task: A pickled `Plan`, the function that makes an environment, and the number of lanes.
        rb: The buffer.
        pipe: Messages of the owner, and to it.
        number: Of this worker.
        lane: Number of its first lane, which seeds it.
        first: Its first trajectory id.
        step: How far its trajectory ids are apart.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        plan, make_env, lanes = cloudpickle.loads(task)
        _seed_generators(plan.seed, lane)
        envs = make_lanes(make_env, lanes, plan.autoreset_mode)
        with contextlib.closing(envs):
            collector = plan.collector(
                envs,
                rb,
                lambda rows, returns: pipe.send(("stored", rows, returns)),
                worker=number,
                first_lane=lane,
                numbering=count_from(first, step),
                pass_specs=lambda specs: pipe.send(("specs", specs)),
            )
            _WorkerLoop(collector, plan.policy, pipe).run()
    except EOFError:
        return  # the owner has ended
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None
    finally:
        rb.close()


def _seed_generators(seed: int | None, lane: int) -> None:
    """Seed the global generators, which a policy may use: torch's begins alike in every process."""
    words = np.random.SeedSequence(None if seed is None else [seed, lane]).generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])


class _WorkerLoop:
    """Collect in a worker process, on commands of the owner.

    Args:
        collector: Collects in this process.
        policy: Its policy.
        pipe: Messages of the owner, and to it.
    """

    def __init__(self, collector: LaneCollector, policy: Any, pipe: Connection) -> None:
        self._collector, self._policy, self._pipe = collector, policy, pipe
        self._is_running = self._awaits_weights = False
        self._blocks: int | None = 0  # how many more may be collected; None: any number

    def run(self) -> None:
        """Collect, and handle commands, until the owner sends "close"."""
        blocks = iter(self._collector)
        while self._handle_commands():
            next(blocks)
            if self._blocks is not None:
                self._blocks -= 1

    def _handle_commands(self) -> bool:
        """Handle commands, and wait while there is nothing to collect; return False after "close"."""
        while self._awaits_weights or not self._is_running or self._blocks == 0 or self._pipe.poll():
            command, *values = self._pipe.recv()
            if command == "run":
                self._is_running, self._blocks = True, values[0]
            elif command == "more":
                if self._blocks is not None:
                    self._blocks += 1
            elif command == "pause":
                self._is_running = False
                self._pipe.send(("paused",))
            elif command == "weights":
                self._awaits_weights = True
                self._pipe.send(("fetch",))
            elif command == "update":
                self._awaits_weights = False
                self._set_weights(*values)
            else:
                self._collector.close()
                return False
        return True

    def _set_weights(self, version: int, weights: Weights) -> None:
        if isinstance(self._policy, ModulePolicy):
            self._policy.set_weights(weights)
        self._collector.policy_version = version
