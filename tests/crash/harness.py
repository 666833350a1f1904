"""Kill processes that write to a store, and compare what a fresh process opens with a ledger.

The tests run this file as a program. It imports everything, opens nothing, and forks a child for every life
of a store and for every check. The last line that it prints is the report.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expstore.disk.files import Disk
from tests.crash import ledger as facts
from tests.crash.checks import Wrong
from tests.crash.children import (
    Look,
    Report,
    candidates,
    check_one,
    fit_constants,
    in_child,
    new_ledger,
    outcome,
    read_lines,
    write_life,
)
from tests.crash.kill_points import PHASES, enumerate_kill_points
from tests.crash.killing_disks import KillingDisk, PlainDisk
from tests.crash.ledger import Spec
from tests.crash.mutants import BREAKS, break_protocol
from tests.crash.power_cuts import POWER_SPECS, power_cuts

SPECS = {
    spec.name: spec
    for spec in (
        Spec("ring", 600, 150),
        Spec("tiny", 40, 16, segment_bytes=4096, longest=120),
        Spec("deep", 300, None, overlong=False),  # capacity far below the spare
        Spec("shards", 6000, 900, frame=64, shard_rows=4096),
        Spec("narrow", 300, 100, frame=64),
        Spec("endless", None, None, frame=64, shard_rows=4096),
        Spec("counted", 60, 20, frame=64, segment_bytes=4096, longest=30, consume=2),
        Spec("packed", 100, 40, frame=64, segment_bytes=4096, longest=120, packed=True),
        Spec("frames", None, None, frame=64, segment_bytes=4096, longest=60, packed=True),
        Spec("keyed", 60, 20, frame=64, segment_bytes=4096, longest=30, keyed=True),
        Spec("best", 60, 20, frame=64, segment_bytes=4096, longest=90, overlong=False, best=True),
        Spec("ragged", 60, 20, frame=64, segment_bytes=4096, longest=60, ragged=True),
        Spec("texts", None, None, frame=64, segment_bytes=4096, longest=60, ragged=True, compression="zstd"),
        Spec("tokens", 60, 20, frame=64, segment_bytes=4096, longest=60, ragged=True, compression="lz4"),
        Spec("late", 60, 20, frame=64, segment_bytes=4096, longest=30, late=True),
    )
}
#: Operations in a life, with their frequencies.
WEIGHTS = {
    "extend": 10, "change": 3, "priority": 2, "sample": 2, "annotate": 2, "flush": 1, "empty": 0.25,
    "sql": 0.25,
}  # fmt: skip


def random_kills(
    trials: int, seed: int, folder: Path, *, names: Sequence[str] = (), first: int = 0, plain: float = 0.0
) -> Report:
    """Kill writers at random times and operations, each store several times.

    Args:
        trials: Number of kills.
        seed: Seed of everything but the moments of timed kills.
        folder: Folder for stores.
        names: Kinds of stores; empty for all.
        first: Number of the first store.
        plain: Share of the lives with the library's own file layer.
    """
    report, started = Report(), time.monotonic()
    kinds = names or list(SPECS)
    for number in itertools.count(first):
        if report.kills >= trials:
            break
        name, chance = kinds[number % len(kinds)], random.Random(f"{seed}/{number}")
        path, known = folder / f"{name}-{number}", len(report.failures)
        _lives(SPECS[name], path, chance, report, min(6, trials - report.kills), plain)
        label = f"{name}, seed {seed}, store {number}"
        report.failures[known:] = [f"{label}, {text}" for text in report.failures[known:]]
        shutil.rmtree(path, ignore_errors=True)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _weights(spec: Spec) -> dict[str, float]:
    return WEIGHTS | ({"sample": 10} if spec.consume else {}) | ({"add": 4} if spec.late else {})


def _lives(spec: Spec, path: Path, chance: random.Random, report: Report, lives: int, plain: float) -> None:
    """Run several lives of one store, each starting where the previous one was killed."""
    fit_constants(spec)
    state = new_ledger(spec)
    for life in range(lives):
        seed = chance.randrange(1 << 30)
        rng = np.random.default_rng(seed)
        after = state.copy()
        after.reopen()
        ops = facts.plan(after, rng, 12, weights=_weights(spec))
        by_act, at = chance.random() < 0.4, chance.randrange(1, 200)
        torn = chance.choice([None, chance.random()])
        disk: Disk = KillingDisk(at if by_act else 0, torn=torn)
        if chance.random() < plain:
            by_act, disk = False, PlainDisk()
        # Otherwise the parent kills, shortly after the child announced a certain call.
        target, delay = chance.randrange(len(ops)), chance.random() ** 2 * 0.03

        def stop(lines: list[str], word: str = f"about {target}", delay: float = delay) -> float | None:
            return delay if word in lines else None

        index = chance.random() < 0.4
        pid, pipe = in_child(lambda out: write_life(path, state, ops, out, disk, index=index))  # noqa: B023
        try:
            lines = read_lines(pipe, (lambda _: None) if by_act else stop, pid)
            ended, op, where = outcome(lines, state, ops)
            if where != "closed":
                report.count(where)
            look = Look(
                path,
                candidates(ended, op),
                facts.extends(state, rng, int(rng.integers(1, 3))),
                sql=chance.random() < 0.25,
                leave=chance.choice(["close", "reopen", "kill"]),
                index=chance.random() < 0.25,
            )
            state = check_one(look)
        except Wrong as exc:
            report.failures.append(f"life {life}: {exc}")
            return


#: Number of operations of a phase that `quick` kills at; fewer for slow phases that repeat others.
QUICK, QUICK_IF_SLOW = 3, 2
SLOW = (
    "commit to the index", "close with an index", "new shard", "end episodes", "resume episodes",
    "first packed rows", "long packed extend", "empty packed", "open few packed rows",
    "open packed that was closed", "loads packed",
    "add a column to what grows", "add a column to counted rows", "add a column to few rows",
    "add a column to packed ones", "loads other fields",
)  # fmt: skip


@dataclass(frozen=True)
class Tooth:
    """A fault (mutant), and the check that must detect it."""

    fault: str
    find: Callable[[Path], Report]


TEETH = {
    "keys in no record": Tooth(
        "keys in no record", lambda at: enumerate_kill_points(at, names=["first keys"], stop=True)
    ),
    "keys before rows": Tooth(
        "keys before rows", lambda at: enumerate_kill_points(at, names=["first keys"], stop=True)
    ),
    "keys not cut": Tooth("keys not cut", lambda at: power_cuts(240, 1, at, names=["keyed"], stop=True)),
    "keys without sync": Tooth(
        "keys without sync", lambda at: power_cuts(240, 1, at, names=["keyed"], stop=True)
    ),
    "journal first": Tooth(
        "journal first", lambda at: enumerate_kill_points(at, names=["extend"], stop=True)
    ),
    "no spare": Tooth(
        "no waiting", lambda at: enumerate_kill_points(at, names=["extend without spare"], stop=True)
    ),
    "redo without sync": Tooth(
        "redo without sync", lambda at: enumerate_kill_points(at, names=["change new rows"], stop=True)
    ),
    "slots reused before the mark": Tooth(
        "no waiting", lambda at: power_cuts(240, 1, at, names=["deep"], first=4, stop=True)
    ),
    "mark without sync": Tooth("mark without sync", lambda at: power_cuts(360, 1, at, stop=True)),
    "mark over half a change": Tooth(
        "mark over half a change", lambda at: power_cuts(360, 1, at, first=1, stop=True)
    ),
    "sync mode without sync": Tooth(
        "sync mode without sync", lambda at: power_cuts(120, 1, at, names=["synced"], stop=True)
    ),
    "snapshot without sync": Tooth(
        "snapshot without sync", lambda at: power_cuts(120, 1, at, names=["dumped"], stop=True)
    ),
    "loads without sync": Tooth(
        "loads without sync", lambda at: power_cuts(240, 1, at, names=["dumped"], stop=True)
    ),
    "counted after": Tooth("counted after", lambda at: enumerate_kill_points(at, names=["count"], stop=True)),
    "counts of older rows": Tooth(
        "counts of older rows",
        lambda at: enumerate_kill_points(at, names=["slots of counted rows"], stop=True),
    ),
    "notes without a record": Tooth(
        "notes without a record", lambda at: enumerate_kill_points(at, names=["annotate"], stop=True)
    ),
    "adoptions without a record": Tooth(
        "adoptions without a record",
        lambda at: enumerate_kill_points(at, names=["resume episodes"], stop=True),
    ),
    "counts without sync": Tooth(
        "counts without sync", lambda at: power_cuts(120, 1, at, names=["counted"], first=1, stop=True)
    ),
    "displaced without a record": Tooth(
        "change without a record", lambda at: enumerate_kill_points(at, names=["best rows"], stop=True)
    ),
    "packed without sync": Tooth(
        "packed without sync", lambda at: power_cuts(120, 1, at, names=["packed", "frames"], stop=True)
    ),
    "packed shards named before a sync": Tooth(
        "packed shards named before a sync",
        lambda at: power_cuts(240, 1, at, names=["packed"], first=1, stop=True),
    ),
    "raw rows written over": Tooth(
        "raw rows written over",
        lambda at: power_cuts(240, 1, at, names=["packed", "frames"], first=1, stop=True),
    ),
    "raw rows in memory": Tooth(
        "raw rows in memory", lambda at: enumerate_kill_points(at, names=["fill a chunk"], stop=True)
    ),
    "packed recovery without sync": Tooth(
        "packed recovery without sync",
        lambda at: power_cuts(600, 1, at, names=["packed", "frames"], first=4, stop=True),
    ),
    "rows too far away": Tooth(
        "rows too far away",
        lambda at: enumerate_kill_points(at, names=["packed rows in a later turn"], stop=True),
    ),
    "lenders without sync": Tooth(
        "lenders without sync", lambda at: power_cuts(240, 1, at, names=["packed", "frames"], stop=True)
    ),
    "late column without sync": Tooth(
        "late column without sync", lambda at: power_cuts(240, 1, at, names=["late", "late wide"], stop=True)
    ),
    "segments without sync": Tooth(
        "segments without sync", lambda at: power_cuts(120, 1, at, names=["ragged", "texts"], stop=True)
    ),
    "segments not cut": Tooth(
        "segments not cut", lambda at: power_cuts(240, 1, at, names=["ragged", "texts"], stop=True)
    ),
    "segments last": Tooth(
        "segments last", lambda at: enumerate_kill_points(at, names=["rows in segments"], stop=True)
    ),
    "recovery without sync": Tooth("recovery without sync", lambda at: power_cuts(360, 1, at, stop=True)),
}


def bite(tooth: Tooth, folder: Path) -> Report:
    """Inject a fault in a separate process, and look for it."""

    def work(pipe: int) -> None:
        break_protocol([tooth.fault])
        report = tooth.find(folder)
        os.write(pipe, pickle.dumps(report))

    pid, pipe = in_child(work)
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    report: Report = pickle.loads(data)
    return report


def main() -> None:
    """Run the command line; each task prints its report as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="+", choices=["random", "gaps", "quick", "power", "teeth", "names"])
    parser.add_argument("--kills", type=int, default=40, help="how many random ones")
    parser.add_argument("--cuts", type=int, default=300, help="how many disks after power cuts")
    parser.add_argument(
        "--free", type=float, default=0.0, help="share of lives with a free background thread"
    )
    parser.add_argument("--first", type=int, default=0, help="first round of power cuts, or first store")
    parser.add_argument("--act", type=int, help="the one act of a phase at which to kill")
    parser.add_argument("--log", type=Path, help="record of power cuts, from which a run continues")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--names", nargs="*", default=(), help="which stores or phases")
    parser.add_argument("--teeth", nargs="*", choices=list(TEETH), default=list(TEETH), help="which faults")
    parser.add_argument("--torn", choices=["no", "half", "also"], default="half")
    parser.add_argument("--again", type=float, default=0.2, help="share of recoveries killed, too")
    parser.add_argument("--break", dest="faults", nargs="*", default=(), choices=list(BREAKS))
    parser.add_argument("--plain", type=float, default=0.0, help="share of lives with the true file layer")
    given = parser.parse_args()
    break_protocol(given.faults)
    logging.getLogger("expstore").setLevel(logging.ERROR)  # warnings of openings about the last writer
    if {"random", "power"} & set(given.tasks):
        import expstore.sql.index  # noqa: F401  # the children are to find it there
    names, seed = given.names, given.seed
    tasks: dict[str, Callable[[Path], Report]] = {
        "random": lambda folder: random_kills(
            given.kills, seed, folder, names=names, first=given.first, plain=given.plain
        ),
        "gaps": lambda folder: enumerate_kill_points(
            folder, names=names, seed=seed, torn=given.torn, again=given.again, act=given.act
        ),
        "quick": lambda folder: _quick(seed, folder),
        "power": lambda folder: _power(given, folder),
    }
    for task in given.tasks:
        with tempfile.TemporaryDirectory() as name:
            if task in tasks:
                tell(task, tasks[task](Path(name)))
            elif task == "names":
                print(json.dumps(known_names()))
            else:
                for fault in given.teeth:
                    tell(fault, bite(TEETH[fault], Path(name)))


def known_names() -> dict[str, list[str]]:
    """Return the names to choose from: phases, and kinds of stores."""
    phases = [phase.name for phase in PHASES if not phase.tooth]
    return {"phases": phases, "random": list(SPECS), "power": list(POWER_SPECS), "teeth": list(TEETH)}


def _quick(seed: int, folder: Path) -> Report:
    """Kill in some gaps of every phase."""
    report, slow = Report(), set(SLOW)
    for names, most in (
        ([phase.name for phase in PHASES if not phase.tooth and phase.name not in slow], QUICK),
        (list(SLOW), QUICK_IF_SLOW),
    ):
        found = enumerate_kill_points(folder, names=names, seed=seed, again=0.1, syncs=False, most=most)
        report.add(vars(found))
    return report


def _power(given: argparse.Namespace, folder: Path) -> Report:
    """Cut the power; by default also for stores with added fields."""
    report = power_cuts(
        given.cuts,
        given.seed,
        folder,
        names=given.names,
        first=given.first,
        free=given.free,
        log=given.log,
    )
    if not given.names:
        report.add(vars(power_cuts(80, given.seed, folder, names=["late", "late best"])))
    return report


def tell(task: str, report: Report) -> None:
    """Print a report."""
    print(json.dumps({"task": task, **vars(report)}), flush=True)


if __name__ == "__main__":
    main()
    gc.unfreeze()
