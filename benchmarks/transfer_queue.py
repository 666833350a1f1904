"""Rollouts of a language model: put and get of whole groups, compared with TransferQueue.

Run as `python -m benchmarks.transfer_queue` in an environment that has TransferQueue and Ray besides what
expstore needs; README.md says how to make one. TransferQueue answers from processes of Ray and keeps the rows
in their memory; expstore commits each put to files, and records each get.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import expstore
from benchmarks.report import Result, Setup, compare, run_program
from benchmarks.timing import Case, Series, alternate
from expstore.specs import Rollout

GROUPS, SIZE = 8, 8
ROWS = GROUPS * SIZE
SHORTEST, LONGEST = 100, 1000  # tokens of a response
FIELDS = ["tokens", "logprobs", "prompt_id", "policy_version", "reward", "done"]
PARTITION, TASK = "train", "learner"


@dataclass(frozen=True)
class Effort:
    """Rounds of the two sides, and calls of a round."""

    rounds: int
    calls: int


FULL, SMOKE = Effort(5, 12), Effort(1, 2)


def make_batches(seed: int) -> Iterator[TensorDict]:
    """Yield batches of rollouts endlessly: 8 groups of 8 responses of 100 to 1000 tokens."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(sys.maxsize):
        lengths = torch.randint(SHORTEST, LONGEST + 1, (ROWS,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        total = int(offsets[-1])
        tokens = torch.randint(0, 50_000, (total,), generator=generator, dtype=torch.int32)
        logprobs = -torch.rand(total, generator=generator)
        rewards = torch.rand(ROWS, generator=generator)
        yield TensorDict(
            {
                "tokens": torch.nested.nested_tensor_from_jagged(tokens, offsets),
                "logprobs": torch.nested.nested_tensor_from_jagged(logprobs, offsets),
                "prompt_id": torch.arange(number * GROUPS, (number + 1) * GROUPS).repeat_interleave(SIZE),
                "policy_version": torch.full((ROWS,), number),
                "reward": rewards,
                "done": torch.ones(ROWS, dtype=torch.bool),
            },
            [ROWS],
        )


# -- expstore -----------------------------------------------------------------------------------------


def open_store(path: Path) -> Any:
    """Open a store of rollouts for writing."""
    rollout = Rollout(
        prompt=None,
        response=None,
        prompt_tokens=None,
        loss_mask=None,
        group=None,
        reward="reward",
        done="done",
    )
    settings = rollout.settings()
    settings["schema"]["prompt_id"] = "int64"
    settings["episodes"] |= {"group": "prompt_id", "group_size": SIZE}
    return expstore.open(path, **settings)


def open_consumer(rb: Any) -> Any:
    return rb.consumer("learner", sampler=expstore.GroupSampler(groups_per_batch=GROUPS))


def _own(path: Path, connection: Connection) -> None:
    """Own a store in a process, until the other end of the connection is closed."""
    with open_store(path) as rb:
        connection.send(rb.share())
        connection.poll(None)


@contextmanager
def share_store(path: Path) -> Iterator[Any]:
    """Yield a buffer that writes to a store whose owner is another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(path, theirs))
    owner.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        owner.join()


# -- TransferQueue ------------------------------------------------------------------------------------


class TransferQueue:
    """TransferQueue with its SimpleStorage, on a Ray cluster of this machine."""

    def __init__(self) -> None:
        import ray
        import transfer_queue
        from transfer_queue.sampler import GRPOGroupNSampler

        # Its three actors reserve a core each. They run on the cores that there are.
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        transfer_queue.init({"controller": {"sampler": GRPOGroupNSampler(n_samples_per_prompt=SIZE)}})
        self._ray, self._library, self._client = ray, transfer_queue, transfer_queue.get_client()
        self._drawn: Any = None
        self._put = 0

    def put(self, batch: TensorDict) -> None:
        keys = [f"{self._put}-{number}" for number in range(ROWS)]
        self._put += 1
        self._library.kv_batch_put(keys, PARTITION, batch)

    def get(self, _: None) -> TensorDict:
        self._drawn = self._client.get_meta(
            data_fields=FIELDS, batch_size=ROWS, partition_id=PARTITION, task_name=TASK
        )
        batch: TensorDict = self._client.get_data(self._drawn)
        return batch

    def clear(self) -> Iterator[None]:
        """Yield before each `get`; free the rows of the one before, outside of the times."""
        while True:
            if self._drawn is not None:
                self._client.clear_samples(self._drawn)
            yield

    def close(self) -> None:
        self._library.close()
        self._ray.shutdown()


# -- measurements -------------------------------------------------------------------------------------


def measure(setup: Setup) -> Iterator[Result]:
    os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count()))  # it warns at each call if it has more
    missing = [name for name in ("ray", "transfer_queue") if importlib.util.find_spec(name) is None]
    if missing:
        setup.skip("TransferQueue", f"{' and '.join(missing)} not installed; see README.md")
        return
    effort = SMOKE if setup.smoke else FULL
    queue = TransferQueue()
    try:
        for place, where in (("here", "the store's process"), ("apart", "another process")):
            yield from measure_sides(place, where, setup.folder / f"{place}.exp", queue, effort)
    finally:
        queue.close()


def measure_sides(
    place: str, where: str, path: Path, queue: TransferQueue, effort: Effort
) -> Iterator[Result]:
    """Measure puts, then gets of the rows that were put."""
    with ExitStack() as stack:
        if place == "here":
            writer = reader = stack.enter_context(open_store(path))
        else:
            writer = stack.enter_context(share_store(path))
            writer.extend(next(make_batches(1)))  # a reader needs fields
            reader = stack.enter_context(expstore.open(path, mode="r"))
        calls = effort.calls
        ours, theirs = alternate(
            [Case(writer.extend, make_batches(0), calls), Case(queue.put, make_batches(0), calls)],
            rounds=effort.rounds,
        )
        yield _compare(f"put/{place}", ours, theirs, f"{ROWS} rollouts, from {where}")
        learner = stack.enter_context(open_consumer(reader))
        ours, theirs = alternate(
            [
                Case(lambda _: learner.sample(), iter(lambda: None, 0), calls),
                Case(queue.get, queue.clear(), calls),
            ],
            rounds=effort.rounds,
        )
        yield _compare(f"get/{place}", ours, theirs, f"{GROUPS} whole groups, in {where}")


def _compare(name: str, ours: Series, theirs: Series, note: str) -> Result:
    return compare(name, ours, theirs, note, other="TransferQueue")


if __name__ == "__main__":
    sys.exit(run_program(measure, {}, gigabytes=1.0))
