"""Child processes that write to a store and are killed, and child processes that check the result.

Used by harness.py and kill_points.py, which fork them and know the expected content from a ledger.
Acknowledgements and expected rows go through pipes, never through the store's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401  # pyarrow looks for it; the children are to find it there
import torch
import zarr as zarr_python  # noqa: F401  # and this

# Compiled loops, which take a second to load; imported here for the children.
import expstore.kernels.blosc_decode
import expstore.kernels.blosc_encode
import expstore.kernels.gather_runs
import expstore.kernels.rank_tree
import expstore.kernels.sum_tree  # noqa: F401
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.core.spare_slots import spare_slots
from expstore.disk.files import Disk
from expstore.episodes.facts import merge_info, pack_info
from expstore.episodes.log import NewFacts
from expstore.storages import base
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.factory import ArrowStorage, ZarrStorage
from expstore.storages.format.layout import ColumnLayout
from expstore.testing.model import KEEP
from expstore.writers.writers import TensorDictMaxValueWriter
from tests.crash import ledger as facts
from tests.crash.checks import (
    Wrong,
    check_episodes,
    check_info,
    check_keys,
    check_rows,
    check_sample,
    check_sampled,
    check_sql,
    check_sums,
    check_versions,
    expect,
    key_of,
)
from tests.crash.killing_disks import KillingDisk
from tests.crash.ledger import SEED, Ledger, Op, Spec
from tests.support.stores import NoIndex

# Loads what torch loads with the first nested tensor, which takes a second, for the children.
torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged).unbind()


# -- children --------------------------------------------------------------------------------------------


def open_store(
    spec: Spec, path: Path, disk: Disk | None = None, *, index: bool = True
) -> TensorDictReplayBuffer:
    """Open a store as the spec says; without an index unless requested."""
    packed = {
        "frame": {"layout": "packed", "rows": 4},
        "next.frame": {"layout": "packed", "rows": 2},
    }
    layout = ColumnLayout(fields=packed) if spec.packed else ColumnLayout()
    settings = Settings(flatten=True, seed=SEED, durability=spec.durability, layout=layout)
    how = {"settings": settings, "disk": disk or KillingDisk(), "segment_bytes": spec.segment_bytes}
    kept = (
        ArrowStorage(path, spec.capacity, compression=spec.compression, **how)
        if spec.ragged
        else ZarrStorage(path, spec.capacity, **how)
    )
    writer = TensorDictMaxValueWriter("observation", "max") if spec.best else None
    rb = TensorDictReplayBuffer(
        storage=kept,
        batch_size=facts.SAMPLE,
        with_ids=True,
        consume_after_n_samples=spec.consume,
        writer=writer,
    )
    if not index:
        kept.index.use(NoIndex())
    return rb


def place_of(path: Path) -> Path:
    """Return the folder of a store's snapshots."""
    return path.with_name("snapshots")


#: The default, which `fit_constants` restores.
MEMTABLE_BATCH_BYTES = tuning.MEMTABLE_BATCH_BYTES
#: The constants that `fit_constants` sets.
CONSTANTS = (
    (tuning, "SPARE_SLOTS"),
    (tuning, "UNBOUNDED_SPARE_ROWS"),
    (tuning, "FLAT_SHARD_ROWS"),
    (tuning, "PACKED_SHARD_ROWS"),
    (tuning, "UNBOUNDED_PACKED_SHARD_ROWS"),
    (tuning, "PACKED_LOOKBACK_ROWS"),
    (tuning, "REPLACE_RECORD_BYTES"),
    (tuning, "MEMTABLE_BATCH_BYTES"),
    (tuning, "ARROW_SEGMENT_BYTES"),
    (tuning, "ARROW_SEGMENT_BATCHES"),
    (tuning, "ARROW_BATCH_BYTES"),
    (tuning, "ARROW_COMPRESSED_BATCH_BYTES"),
    (tuning, "ARROW_WRITE_BYTES"),
    (tuning, "ARROW_COMPACTED_BYTES"),
    (tuning, "ARROW_COMPACTION_BATCHES"),
    (tuning, "IDEMPOTENCY_KEYS"),
    (tuning, "IDEMPOTENCY_SLOTS"),
)


def fit_constants(spec: Spec) -> None:
    """Set the library's sizes to the spec's; children inherit them."""
    if spec.spare is not None:
        tuning.SPARE_SLOTS = tuning.UNBOUNDED_SPARE_ROWS = spec.spare
    tuning.FLAT_SHARD_ROWS = spec.shard_rows
    if spec.packed:
        tuning.PACKED_SHARD_ROWS = tuning.UNBOUNDED_PACKED_SHARD_ROWS = 16
        tuning.PACKED_LOOKBACK_ROWS = 4, 8
    if spec.ragged:
        tuning.ARROW_SEGMENT_BYTES, tuning.ARROW_SEGMENT_BATCHES = 6000, 12
        tuning.ARROW_BATCH_BYTES, tuning.ARROW_COMPRESSED_BATCH_BYTES = 1500, 500
        tuning.ARROW_WRITE_BYTES, tuning.ARROW_COMPACTED_BYTES = 3000, 1500
        tuning.ARROW_COMPACTION_BATCHES = 4
    if spec.keyed:
        tuning.IDEMPOTENCY_KEYS, tuning.IDEMPOTENCY_SLOTS = 7, 12
    tuning.REPLACE_RECORD_BYTES = spec.redo_bytes
    tuning.MEMTABLE_BATCH_BYTES = MEMTABLE_BATCH_BYTES if spec.tail else 0


def new_ledger(spec: Spec) -> Ledger:
    """Return the ledger of a store that does not exist yet."""
    row_bytes = sum(
        a.nbytes for a in facts.values(spec, np.ones(1, np.int64), np.zeros(1, np.int64)).values()
    )
    spare = spare_slots(spec.capacity, row_bytes + base.ROW_BYTES) if spec.spare is None else spec.spare
    # Maximum distance of deduplicated rows from their slots, plus a chunk.
    reach = 8 + 4 if spec.packed and spec.capacity is not None else 0
    return Ledger(spec.capacity, spec=spec, spare=spare, reach=reach)


def perform(rb: TensorDictReplayBuffer, state: Ledger, op: Op) -> None:
    """Make one call, and check its result."""
    spec = state.spec
    if op.kind == "extend":
        ids = origins = np.arange(state.last + 1, state.last + op.count + 1)
        if spec.best:
            ids, origins = state.place_best(op)[0], state.offered + 1 + np.arange(op.count)
        data = facts.batch(spec, op, origins)
        key = {} if op.key is None else key_of(op.key)
        given = rb.extend(data, source=op.source, return_ids=True, episode_info=op.info, **key).numpy()
        # As an array: printing the first tensor would import for half a second.
        expect(np.array_equal(given, ids), f"extend gave ids {given[:3]}.., expected {ids[:3]}..")
    elif op.kind == "annotate":
        _annotate(rb, op)
    elif op.kind == "change":
        index = op.ids - 1 if spec.capacity is None else (op.ids - 1) % spec.capacity
        data = facts.batch(spec, op, op.ids)
        rb[torch.from_numpy(index)] = data
    elif op.kind == "priority":
        count = rb.update_priority(id=op.ids, priority=op.priorities)
        expect(count == op.ids.size, f"{count} priorities set, expected {op.ids.size}")
    elif op.kind == "sample":
        check_sample(rb, state)
    elif op.kind == "flush":
        rb.flush()
    elif op.kind == "dumps":
        rb.dumps(place_of(rb.storage.path), keep=KEEP)
    elif op.kind == "loads":
        rb.loads(place_of(rb.storage.path))
    elif op.kind == "tick":
        rb.storage.write_values()
    elif op.kind == "empty":
        rb.empty()
    elif op.kind == "end":
        rb.episodes.end(op.source)
    elif op.kind == "resume":
        adopted = rb.episodes.resume(str(op.source), check=False).numpy()
        wanted = sorted(state.adoptable.get(str(op.source), {}).values())
        expect(np.array_equal(adopted, wanted), f"episodes {adopted} were adopted, expected {wanted}")
    elif op.kind == "sql":
        check_sql(rb, state)
    elif op.kind == "add":
        _add_column(rb, state, op)
    elif op.kind == "drop":
        rb.columns.drop(tuple(str(op.source).split(".")))


def _add_column(rb: TensorDictReplayBuffer, state: Ledger, op: Op) -> None:
    """Add a field; another thread writes rows meanwhile."""
    name = tuple(str(op.source).split("."))
    if op.fill:
        rb.columns.add(name, fill=torch.tensor(op.version))
        return
    pending = [Op("extend", count=op.count)] if op.count else []
    failed: list[BaseException] = []

    def extend() -> None:
        try:
            perform(rb, state, pending.pop())
        except BaseException as exc:
            failed.append(exc)

    def compute(rows: Any) -> torch.Tensor:
        if pending:
            thread = threading.Thread(target=extend)
            thread.start()
            thread.join()
            if failed:
                raise failed[0]
        return torch.from_numpy(facts.late_values(rows["id"].numpy(), op.version))

    rb.columns.add(name, function=compute, dtype="int64", shape=(), default=op.version)


def _annotate(rb: TensorDictReplayBuffer, op: Op) -> None:
    """Annotate an episode; without an index, which knows the state of ended episodes, do it directly."""
    kept = rb.storage
    if kept.index.catalog is not None:
        rb.episodes.annotate(op.episode, **op.info)
        return
    with kept.lock:
        with kept.locks.episodes:
            latest = {entry.episode: entry for entry in kept.state.log.read()}
            latest |= {entry.episode: entry for entry in kept.episodes.open_entries()}
        entry = latest[op.episode]
        text = merge_info(entry.text, pack_info(op.info))
        kept.annotate(NewFacts((dataclasses.replace(entry, text=text),)))


class saying:
    """Write lines to a pipe, each in one write."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __call__(self, line: str) -> None:
        os.write(self._pipe, line.encode() + b"\n")

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Report an exception."""
        try:
            yield
        except BaseException:
            self("error " + json.dumps(traceback.format_exc()))


def write_life(path: Path, state: Ledger, ops: Sequence[Op], pipe: int, disk: Disk, *, index: bool) -> None:
    """Open the store, run the planned operations and close it, reporting each step in a line."""
    say = saying(pipe)
    state = state.copy()
    with say.failures():
        rb = open_store(state.spec, path, disk, index=index)
        state.largest = (rb.storage.priorities.largest,)
        say(f"open {rb.storage.priorities.largest!r}")
        state.reopen()
        for number, op in enumerate(ops):
            say(f"about {number}")
            perform(rb, state, op)
            state.apply(op)
            say(f"ack {number}")
        say("closing")
        (rb if index else rb.storage).close()
        say("closed")


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Run work in a forked child with a pipe to write to; return its pid and the pipe's other end."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    gc.freeze()  # a collection in the child would copy the parent's memory page by page
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        torch.set_num_threads(1)
        Store.__del__ = lambda kept: None  # type: ignore[attr-defined]  # stops are not announced
        work(writing)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# -- the check ------------------------------------------------------------------------------------------


def candidates(state: Ledger, op: Op | None) -> list[Ledger]:
    """Return the possible states of a store: with and without the call under way."""
    found = [state]
    if op is None or op.kind in ("flush", "dumps"):
        return found
    done = state.copy()
    done.apply(op)
    found.insert(0, done)
    retired, half = state.copy(), state.half_best(op) or state.half_add(op)
    if retired.retire_for(op):
        found.append(retired)
    if half is not None:
        found.insert(1, half)
    for late in found[1:]:
        # Priorities of the call may be applied in part: they have no promise before a flush.
        if op.kind == "priority":
            late.priorities = done.priorities
            late.largest = done.largest
    if op.kind == "sample" and state.spec.consume is not None and state.left.size:
        taking = state.next_sample(facts.SAMPLE).tolist()
        for either in found:
            either.sampled, either.taking = done.sampled, taking
    return found


def snapshots(state: Ledger, op: Op | None) -> tuple[list[int], dict[int, Ledger]]:
    """Return the snapshots that must exist during a call, and all that may exist."""
    if op is None or op.kind != "dumps":
        return [*state.versions], state.versions
    done = state.copy()
    done.apply(op)
    return [number for number in state.versions if number in done.versions], state.versions | done.versions


@dataclass(frozen=True)
class Look:
    """How to check a store after a kill.

    Args:
        path: The store.
        states: The possible contents, the likeliest first.
        ops: Operations to run afterwards.
        sql: Whether to check the index too.
        leave: "kill" leaves the store after `ops`; "reopen" closes and reopens it and leaves it open; "close"
            closes it again.
        index: Whether there is an index.
        clean: Whether the store had been closed.
        cut: Whether the power was cut.
        need: Numbers of the snapshots that must exist.
        known: Contents of all snapshots that may exist.
        current: The oldest snapshot that may be the newest.
    """

    path: Path
    states: list[Ledger]
    ops: Sequence[Op]
    sql: bool = False
    leave: str = "reopen"
    index: bool = False
    clean: bool = False
    cut: bool = False
    need: Collection[int] = ()
    known: Mapping[int, Ledger] = field(default_factory=dict)
    current: int = 0


def look_at(look: Look) -> Ledger | str:
    """Return the state of a store, or a description of what is wrong."""
    try:
        return _check_and_go_on(look)
    except Wrong as exc:
        return str(exc)
    except Exception:
        return traceback.format_exc()


def _check_and_go_on(look: Look) -> Ledger:
    spec, index = look.states[0].spec, look.index or look.sql
    disk = KillingDisk(serial=True)  # sequential syncs are faster where nothing is really synced
    rb = open_store(spec, look.path, disk, index=index)
    expect(not look.clean or rb.recovered is None, f"it was closed, and yet: {rb.recovered!r}")
    state = matching(rb, look.states, cut=look.cut)
    state.found = state.write_count
    check_sums(rb)
    state.versions = check_versions(place_of(look.path), look.need, look.known, current=look.current)
    check_episodes(rb, state)
    check_info(rb, state)
    check_keys(rb, state)
    if look.sql:
        check_sql(rb, state)
    if state.ids.size:
        check_sample(rb, state)
        state.apply(Op("sample"))
    for op in look.ops:
        perform(rb, state, op)
        state.apply(op)
    check_keys(rb, state)
    check_rows(rb, state)
    check_sampled(rb, state)
    if look.leave == "kill":
        return state
    (rb if index else rb.storage).close()
    state.apply(Op("flush"))
    rb = open_store(spec, look.path, disk, index=index)
    state.reopen()
    expect(rb.recovered is None, f"after a close: {rb.recovered!r}")
    check_sums(rb)
    check_rows(rb, state)
    check_sampled(rb, state)
    check_episodes(rb, state)
    check_info(rb, state)
    check_keys(rb, state)
    if look.leave == "close":
        (rb if index else rb.storage).close()
    return state


def matching(rb: TensorDictReplayBuffer, states: list[Ledger], *, cut: bool = False) -> Ledger:
    """Return the first state that matches the store; raise Wrong with a reason for each otherwise.

    Every publish record and every mark contains the number of draws; after a power cut (`cut`) only these are
    reliable.
    """
    reasons = []
    for state in states:
        state.reopen()
        try:
            check_rows(rb, state)
            check_info(rb, state)
            check_sampled(rb, state, cut=cut)
            drawn = rb.storage.draws.number
            low = min(s.noted_draw if cut else s.draw for s in states)
            high = max(s.draw for s in states)
            expect(low <= drawn <= high, f"draw {drawn}, expected {low} to {high}")
        except Wrong as exc:
            reasons.append(str(exc))
        else:
            state.draw = state.noted_draw = drawn
            break
    else:
        raise Wrong(" | ".join(reasons))
    never = set().union(*[{*other.keys, *other.lost} for other in states])
    state.lost = frozenset(never - state.keys.keys())
    largest = rb.storage.priorities.largest
    expect(
        float(np.float32(largest)) in [float(np.float32(p)) for p in state.largest],
        f"largest priority {largest}, expected one of {state.largest}",
    )
    state.largest = (largest,)
    return state


# -- lives -----------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was tried, and what went wrong."""

    kills: int = 0
    lost: int = 0  # stores that lack acknowledged rows
    inside: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    acts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, where: str) -> None:
        """Count a kill, and what was under way."""
        self.kills += 1
        self.inside[where] += 1

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the results of another report."""
        for name in ("kills", "lost", "failures"):
            setattr(self, name, getattr(self, name) + other[name])
        self.seconds = round(self.seconds + other["seconds"], 1)
        self.inside.update(other["inside"])
        self.acts.update(other["acts"])


def read_lines(pipe: int, stop: Callable[[list[str]], float | None], pid: int) -> list[str]:
    """Collect the child's lines until it ends; kill it after the seconds that `stop` returns."""
    data, deadline = b"", None
    lines: list[str] = []
    give_up = time.monotonic() + 60
    while True:
        wait = (give_up if deadline is None else deadline) - time.monotonic()
        ready, _, _ = select.select([pipe], [], [], max(0.0, wait))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            if deadline is None:
                lines.append('error "the child hung"')
            deadline, give_up = None, time.monotonic() + 60
            continue
        part = os.read(pipe, 65536)
        if not part:
            break
        data += part
        *whole, data = data.split(b"\n")
        lines += [line.decode() for line in whole]
        if deadline is None and (delay := stop(lines)) is not None:
            deadline = time.monotonic() + delay
    os.close(pipe)
    os.waitpid(pid, 0)
    return lines


def outcome(lines: list[str], state: Ledger, ops: list[Op]) -> tuple[Ledger, Op | None, str]:
    """Return the ledger after the returned calls, the call under way, and the place of the kill."""
    state = state.copy()
    about: Op | None = None
    where = "open"
    for line in lines:
        word, *rest = line.split(" ", 2)
        if word == "open":
            state.reopen()
            state.largest = (float(rest[0]),)
            where = "between"
        elif word == "about":
            about = ops[int(rest[0])]
            where = about.kind
        elif word == "ack":
            state.apply(ops[int(rest[0])])
            about, where = None, "between"
        elif word in ("closing", "closed"):
            where = word
        elif word == "error":
            raise Wrong("the writer failed: " + json.loads(line[6:]))
    return state, about, where


def ask_child(work: Callable[[], Any]) -> Any:
    """Run work in a fresh process and return its result.

    Raises:
        Wrong: The process died.
    """
    pid, pipe = in_child(lambda out: _send(out, work()))
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    if not data:
        raise Wrong("the process died")
    return pickle.loads(data)


def check(looks: Sequence[Look]) -> list[Ledger | str]:
    """Check stores in a fresh process and write to them; return for each its state, or what is wrong."""
    try:
        found: list[Ledger | str] = ask_child(lambda: [look_at(look) for look in looks])
    except Wrong as exc:
        return [str(exc)] * len(looks)
    return found


def check_one(look: Look) -> Ledger:
    """Check one store, as `check` does; raise Wrong with what is wrong."""
    found = check([look])[0]
    if isinstance(found, str):
        raise Wrong(found)
    return found


def _send(pipe: int, answer: object) -> None:
    with os.fdopen(pipe, "wb") as out:
        pickle.dump(answer, out)
