"""Simulate power cuts and kills against the crash protocol, page by page and scaled down.

tests/crash/test_protocol_model.py runs it over many seeds, with the correct rules and with each of them
broken. The model never imports expstore and never touches a file: it describes the protocol, not the code.

Not modelled: late columns, moves, top-k, checksums of blocks, priorities, salts (a file here never holds an
older file's bytes) and the write horizon (STATE does not survive a power cut).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.crash.protocol_disk import Disk, Ledger, Poisoned, Refused, Steps
from tests.crash.protocol_recovery import Rules
from tests.crash.protocol_writer import Writer

CALLS = ("extend", "add", "long extend", "redo", "delete", "empty", "annotate", "flush", "index commit")
MIXES = (
    (50, 5, 6, 12, 4, 4, 5, 8, 5),
    (10, 60, 2, 2, 10, 4, 10, 1, 5),  # many small records between syncs
    (25, 10, 3, 50, 3, 3, 3, 3, 1),
)
LOG_LIMIT = 48  # number of entries of episodes.log that fits into its file


@dataclass(frozen=True)
class Outcome:
    """Result of one seed: the first broken promise, if any, and the number of trials."""

    problem: str | None
    power_cuts: int  # power cuts after which the store was reopened
    lossy_cuts: int  # power cuts that lost acknowledged rows that were not flushed
    kills: int  # stops that keep the page cache: kill -9, or a failed fsync that poisons the handle
    story: tuple[str, ...]


class Simulation:
    """Several lives of one store, each ended by a stop; the reopened store is compared with the ledger."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.rng = random.Random(seed)
        self.rules = rules
        capacity = rules.capacity or self.rng.choice((3, 4, 6, 9))
        spare = 0 if rules.no_spare else rules.spare or self.rng.choice((1, 2, 3, 5, 8))
        reach = 0 if rules.no_reach else self.rng.choice((0, 1, 3))
        self.disk = Disk(self.rng, capacity, spare, reach)
        self.ledger = Ledger()
        self.reach = 3 if rules.no_reach else reach
        self.writer = Writer(self.disk, self.ledger, rules, self.reach)
        self.power_cuts = self.lossy_cuts = self.kills = 0
        self.weights = self.rng.choice(MIXES)
        self.sync_start = self.rng.choice((0.02, 0.1, 0.3))  # probabilities after each step of a call
        self.sync_step = self.rng.choice((0.1, 0.35))
        self.stop_early = 0  # stop at the first delicate moment when this many steps are left
        self.story = [f"capacity {capacity} spare {spare} segment {self.disk.segment_cells} cells"]

    def run(self) -> Outcome:
        problem = None
        try:
            for _ in self.writer.open():
                pass
            self.disk.fsync_failures = 0.03 if self.rng.random() < 0.2 else 0.0
            for _ in range(self.rng.randint(1, 3)):
                problem = self._life(self.rng.randint(1, 110))
                if problem:
                    break
        except Refused as refusal:
            problem = f"refused: {refusal}"
        return Outcome(problem, self.power_cuts, self.lossy_cuts, self.kills, tuple(self.story))

    def _life(self, steps: int) -> str | None:
        """Run some steps, stop anywhere, reopen (and possibly stop during it), compare."""
        cached = True  # whether the page cache has survived so far
        self.stop_early = steps // 2 if self.rng.random() < 0.3 else 0
        try:
            while steps > 0:
                steps = self._drive(self._call(), steps)
            cached = self._stop()
        except Poisoned:
            self.story.append("fsync failed")
            self.kills += 1
        while True:
            self.writer = Writer(self.disk, self.ledger, self.rules, self.reach)
            steps = self.rng.randint(1, 16) if self.rng.random() < 0.5 else 10_000
            try:
                if self._drive(self.writer.open(), steps, background=False) > 0:
                    return self._compare(cached)
                cached = self._stop() and cached
            except Poisoned:
                self.story.append("fsync failed in opening")

    def _stop(self) -> bool:
        """Stop the process or the machine; return whether the page cache survives."""
        if self.rng.random() < 0.25:
            self.story.append("kill")
            self.kills += 1
            return True
        self.story.append("power cut")
        self.disk.cut()
        return False

    def _drive(self, call: Steps, steps: int, *, background: bool = True) -> int:
        """Run a call for at most `steps` steps, concurrently with the group sync; return the steps left."""
        rng, writer = self.rng, self.writer
        for _ in call:
            steps -= 1
            if steps <= 0 or (steps < self.stop_early and writer.delicate):
                return 0
            chance = self.sync_start if writer.background is None else self.sync_step
            if background and rng.random() < chance:
                writer.step_background()
        return steps

    def _call(self) -> Steps:
        """Choose the next call."""
        rng, writer, disk = self.rng, self.writer, self.disk
        rows = list(self.ledger.now().rows)
        kind = rng.choices(CALLS, self.weights)[0]
        if kind == "redo" and rows:
            ids = rng.sample(rows, min(len(rows), rng.randint(1, 3)))
            columns = rng.choice(((True, False), (False, True), (True, True)))
            self.story.append(f"redo {ids}")
            return writer.redo(ids, change_a=columns[0], change_b=columns[1])
        if kind == "delete" and rows:
            gone = frozenset(rng.sample(rows, min(len(rows), 2)))
            self.story.append(f"delete {sorted(gone)}")
            return writer.delete(gone)
        if kind == "annotate" and writer.facts.log_length < LOG_LIMIT:
            self.story.append("annotate")
            return writer.annotate()
        if kind in ("empty", "flush", "index commit"):
            self.story.append(kind)
            return {"empty": writer.empty, "flush": writer.flush, "index commit": writer.commit_index}[kind]()
        longest = max(disk.spare, 1)
        count = 1 if kind == "add" else rng.randint(1, min(longest, 5))
        if kind == "long extend":
            count = rng.randint(longest + 1, disk.slots + disk.capacity + 2)
        ends = rng.random() < 0.25 and writer.facts.log_length < LOG_LIMIT
        self.story.append(f"extend {writer.facts.last + 1}..{writer.facts.last + count}")
        return writer.extend(count, payload=rng.random() < 0.7, ends_episode=ends)

    def _compare(self, cached: bool) -> str | None:
        """Compare the reopened store with the ledger; return a text if a promise is broken."""
        ledger, writer, disk = self.ledger, self.writer, self.disk
        sequence, facts = writer.sequence, writer.facts
        self.story.append(f"opened at {sequence}, acked {ledger.acked}, durable {ledger.durable}")
        promised = ledger.acked if cached else ledger.durable
        if sequence < promised:
            return f"lost: the store is as after record {sequence}, promised was {promised}"
        if sequence >= len(ledger.snapshots):
            return f"invented: record {sequence} was never written"
        if any(retire <= sequence < publish for retire, publish in ledger.given_up):
            return "lost: rows given up by a long extend that had returned, and its own rows"
        then, before = ledger[sequence], ledger[ledger.acked]
        found: dict[int, tuple[int | None, int | None]] = {}
        for i in facts.readable(disk.capacity):
            slot = (i - 1) % disk.slots
            if disk.id.get(slot) != i:
                return f"torn: id {i} is readable, its slot holds {disk.id.get(slot)}"
            found[i] = disk.read(i)
        if found != then.rows:
            return f"torn: rows {found}, promised {then.rows}"
        entries = tuple(cell[1] for cell in disk.log.cells if cell is not None)
        if entries != then.entries:
            return f"episodes.log: {entries}, promised {then.entries}"
        if not cached:
            self.power_cuts += 1
            self.lossy_cuts += bool(before.rows.keys() - then.rows.keys())
        ledger.restart(sequence)
        if self.rng.random() < 0.5:
            self.disk.commit_index(sequence, then)
        return None


def run(seed: int, *, rules: Rules | None = None) -> Outcome:
    """Simulate several lives of a store, each ended by a power cut or a kill.

    Args:
        seed: Seed of everything: sizes, calls, stops, and which version of each page reached the disk.
        rules: The protocol, possibly with one rule broken.
    """
    return Simulation(seed, rules or Rules()).run()
