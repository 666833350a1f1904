"""Results of the units of a long run, and their summary.

Used by torture.py. This module starts nothing: it reads the output of units.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.torture_suites import APART, KINDS, Suite, Unit

WRONG = ("lost", "torn", "unopenable", "other")
#: Maximum number of characters that are kept of a failure.
TEXT = 6000
#: The case of a failure, as the harness prints it.
LABEL = re.compile(r"^[\w ]+, seed \d+[^:]*: ")
#: Texts of failures about changed bytes, and about missing rows.
TORN = re.compile(r"\bdiffers? |torn|half a change|has another sum|reads wrong")
LOST = re.compile(r"(version \d+: )?(window \(|len \d|write_count \d)")
#: Place of a failure during opening.
OPENING = re.compile(r", in (open_store|open)\b")


def kind_of(text: str) -> str:
    """Return the user's view of a failure: "lost", "torn", "unopenable" or "other"."""
    said = LABEL.sub("", text)
    if "Traceback (most recent call last)" in said:
        raised = said.rstrip().rpartition("\n")[2]
        refused = OPENING.search(said) and re.search(r"(Corruption|Storage|State)Error", raised)
        return "unopenable" if refused and "the writer failed" not in said else "other"
    if TORN.search(said):
        return "torn"
    return "lost" if any(LOST.match(part) for part in said.split(" | ")) else "other"


@dataclass(frozen=True)
class Result:
    """Result of one unit.

    Args:
        unit: Name of the unit.
        cases: Number of cases.
        failures: (kind, text) of each failure.
        seconds: Duration.
        inside: Operations under way at the kill, with numbers of cases, if counted.
        cost: Number of power cuts that lost unsynced rows.
        skipped: Tests that could not run here.
    """

    unit: str
    cases: int
    failures: list[tuple[str, str]]
    seconds: float
    inside: dict[str, int] = field(default_factory=dict)
    cost: int = 0
    skipped: int = 0


def read_result(unit: Unit, code: int | None, out: Path, err: Path, report: Path, seconds: float) -> Result:
    """Read the output of a unit.

    Args:
        unit: The unit.
        code: Exit code; None if it exceeded its time.
        out: Its output.
        err: Its error output.
        report: pytest's report.
        seconds: Duration.
    """
    read = _read_harness if unit.reads == "harness" else _read_pytest
    texts, cases, more = read(out, report)
    if code is None:
        texts.append(f"{unit.name} has not finished")
    elif code not in ((0,) if unit.reads == "harness" else (0, 1)) or (code == 1 and not texts):
        printed = (
            out.read_text(errors="replace")[-TEXT // 2 :] + err.read_text(errors="replace")[-TEXT // 2 :]
        )
        texts.append(f"{unit.name} ended with {code}: {printed}")
    elif not cases and not more.get("skipped"):
        texts.append(f"{unit.name} has tried nothing")
    return Result(unit.name, cases, [(kind_of(text), text[:TEXT]) for text in texts], seconds, **more)


def _read_harness(out: Path, _: Path) -> tuple[list[str], int, dict[str, Any]]:
    texts, cases, cost, inside = [], 0, 0, Counter[str]()
    for line in out.read_text(errors="replace").splitlines():
        if not line.startswith('{"task"'):
            continue
        found = json.loads(line)
        if found["task"] in ("random", "gaps", "power"):
            texts += found["failures"]
            cases, cost = cases + found["kills"], cost + found["lost"]
            inside.update(found["inside"])
        else:  # a mutant must be detected
            cases += 1
            if not found["failures"]:
                texts.append(f"nothing has found that this rule was broken: {found['task']}")
    return texts, cases, {"inside": dict(inside), "cost": cost}


def _read_pytest(_: Path, report: Path) -> tuple[list[str], int, dict[str, Any]]:
    texts: list[str] = []
    cases = skipped = 0
    root = ET.parse(report).getroot() if report.exists() else ET.Element("none")
    for case in root.iter("testcase"):
        if case.find("skipped") is not None:
            skipped += 1
            continue
        told = [int(p.get("value", "0")) for p in case.iter("property") if p.get("name") == "cases"]
        cases += sum(told) if told else 1
        wrong = [*case.iter("failure"), *case.iter("error")]
        texts += [f"{case.get('name')}: {one.get('message')}\n{(one.text or '')[-TEXT:]}" for one in wrong]
    return texts, cases, {"skipped": skipped}


@dataclass(frozen=True)
class Row:
    """Results of a suite."""

    suite: str
    what: str
    units: int
    done: int
    cases: int
    wrong: dict[str, int]
    minutes: float
    cost: int
    inside: dict[str, int]
    skipped: int


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    Args:
        header: Description of the run.
        rows: Results by suite.
        cases: Total number of cases, without those of the model and of the harness itself.
        bound: Upper bound of the failure rate at 95 % (rule of three); None if a case failed.
        failures: (unit, kind, text) of each failure.
        again: Unit -> command that runs it again.
    """

    header: dict[str, Any]
    rows: list[Row]
    cases: int
    bound: float | None
    failures: list[tuple[str, str, str]]
    again: dict[str, list[str]]

    @classmethod
    def of(
        cls, units: Sequence[Unit], results: Mapping[str, Result], suites: Sequence[Suite], header: Any
    ) -> Summary:
        """Add up the results of units."""
        rows = [_row(suite, [results[u.name] for u in suite.units if u.name in results]) for suite in suites]
        failures = [
            (name, kind, text) for name, found in results.items() for kind, text in found.failures
        ] + [(row.suite, "other", text) for row in rows for text in _worthless(row)]
        counted = [row for row in rows if row.suite not in APART]
        cases = sum(row.cases for row in counted)
        wrong = sum(sum(row.wrong.values()) for row in counted)
        commands = {u.name: [f"SEED={u.seed}", "python", *u.command] for u in units if u.name in results}
        return cls(header, rows, cases, None if wrong or not cases else 3 / cases, failures, commands)


def _row(suite: Suite, found: list[Result]) -> Row:
    inside: Counter[str] = Counter()
    for result in found:
        inside.update(result.inside)
    return Row(
        suite.name,
        KINDS.get(suite.name, suite.name),
        len(suite.units),
        len(found),
        sum(result.cases for result in found),
        {kind: sum(one == kind for r in found for one, _ in r.failures) for kind in WRONG},
        round(sum(result.seconds for result in found) / 60, 1),
        sum(result.cost for result in found),
        dict(inside),
        sum(result.skipped for result in found),
    )


def _worthless(row: Row) -> list[str]:
    """Return reasons why cases prove nothing: kills that hit no extend, power cuts that lost no row."""
    found = []
    if row.suite == "kills" and row.inside.get("extend", 0) * 3 < row.cases:
        found.append(f"less than a third of the kills came in an extend: {row.inside}")
    if row.suite == "cuts" and row.cost * 6 < row.cases:
        found.append(f"only {row.cost} of {row.cases} power cuts cost a row")
    if row.suite == "cuts" and row.inside.get("recovery", 0) * 5 < row.cases:
        found.append(f"less than a fifth of the power cuts came while a store was opened: {row.inside}")
    return found


def _bound(cases: int, wrong: int) -> str:
    return "" if wrong or not cases else f"{3 / cases:.1e}"


def render(summary: Summary) -> str:
    """Return a summary as Markdown."""
    header = summary.header
    lines = [
        "# What the long run has found",
        "",
        f"Seed {header['seed']}, scale {header['scale']:g}, sources {header['sources']}, "
        f"begun {header['begun']}.",
        "",
        "| what | cases | lost | torn | unopenable | other | 3/N | minutes |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in summary.rows:
        wrong = [f"{row.wrong[kind]}" for kind in WRONG]
        name = f"{row.suite}: {row.what}" + (f" ({row.done} of {row.units})" if row.done < row.units else "")
        bound = "" if row.suite in APART else _bound(row.cases, sum(row.wrong.values()))
        cells = [name, f"{row.cases:,}", *wrong, bound, f"{row.minutes:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"In all {summary.cases:,} cases (without the model, broken rules and ordinary tests).",
    ]
    if summary.bound is not None:
        few = f"less than one in {1 / summary.bound:,.0f}"
        lines.append(f"None failed: at 95 % {few} does (the rule of three, 3/N = {summary.bound:.1e}).")
    cuts = [row for row in summary.rows if row.suite == "cuts" and row.cases]
    lines += [f"{row.cost:,} of the power cuts cost rows that no sync had reached." for row in cuts]
    skipped = sum(row.skipped for row in summary.rows)
    lines += [f"{skipped} tests could not be run here."] * bool(skipped)
    for unit, kind, text in summary.failures:
        first = "\n".join(text.splitlines()[:12])
        lines += ["", f"**{unit}**: {kind}", "", "```", first, "```"]
        if unit in summary.again:
            lines += ["", f"Again: `python -m tests.support.torture --again {json.dumps(unit)}`"]
    return "\n".join(lines) + "\n"
