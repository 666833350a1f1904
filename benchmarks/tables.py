"""Markdown of a run: the whole table, and the generated blocks of documents.

Used by `__main__.py` and by the test that compares the documents with the stored results. This module
measures nothing, and refers to figures by program and name.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import HOW, table_row
from benchmarks.runs import ROOT, find_ratio

#: Comparisons with TorchRL: text, program, name. README has the first six.
HEADLINES = (
    ("sample 256 rows", "vs_torchrl", "locomotion/sample"),
    ("sample 256 rows by priority and set theirs", "samplers", "prioritized/sample+update"),
    ("8 slices of 32 steps, a row added before each batch", "slices", "slices/memmap"),
    ("add a row (ring full)", "vs_torchrl", "locomotion/add-full"),
    ("extend by 1000 rows (ring full)", "vs_torchrl", "locomotion/extend-full"),
    ("trajectories by their return: SQL, `rb.query` there", "vs_torchrl", "trajectories/return-sql"),
    ("the same: `rb.query` here and there", "vs_torchrl", "trajectories/return-query"),
    ("trajectories by a row's reward: SQL, `rb.query` there", "vs_torchrl", "trajectories/reward-sql"),
    ("set the priorities of 256 rows", "samplers", "prioritized/update"),
    ("sample 256 image rows (3.6 MB)", "vs_torchrl", "pixels/sample"),
    ("add an image row (ring full)", "vs_torchrl", "pixels/add-full"),
    ("extend by 1000 image rows (ring full)", "vs_torchrl", "pixels/extend-full"),
)
IN_README = 6


class Figures:
    """The results of a run, by program and name."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self._rows = {(row["part"], row["name"]): row for row in run["results"]}

    def row(self, part: str, name: str) -> dict[str, Any] | None:
        return self._rows.get((part, name))

    def value(self, part: str, name: str, digits: str) -> str:
        row = self.row(part, name)
        return "–" if row is None or row["value"] is None else format(row["value"], digits)

    def ratio(self, part: str, name: str) -> str:
        """Return how many times as fast expstore is as the other side."""
        row = self.row(part, name)
        ratio = find_ratio(row) if row else None
        return "–" if ratio is None else f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def format_duration(seconds: float) -> str:
    if seconds < 1e-2:
        return f"{seconds * 1e6:,.0f} µs"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.0f} s"


def _format_spread(series: dict[str, Any]) -> str:
    low, median, high = (format_duration(series[key]) for key in ("p10", "median", "p90"))
    return f"{median} [{low}–{high}]"


def _fill(*words: str) -> str:
    """Wrap words to a paragraph."""
    return textwrap.fill(" ".join(words), 120, break_long_words=False, break_on_hyphens=False)


# -- blocks of documents ------------------------------------------------------------------------------


def summary(figures: Figures) -> Iterator[str]:
    """Compare with TorchRL in six rows."""
    yield "| median per call | expstore | TorchRL | ratio |\n|---|---|---|---|"
    for text, part, name in HEADLINES[:IN_README]:
        if row := figures.row(part, name):
            medians = [format_duration(row["data"][side]["median"]) for side in ("expstore", "torchrl")]
            yield f"| {text} | {' | '.join(medians)} | {figures.ratio(part, name)} |"
        else:
            yield f"| {text} | not measured | | |"


def table(figures: Figures) -> Iterator[str]:
    """Compare with TorchRL, call by call."""
    yield "| median per call [10th–90th percentile] | expstore | TorchRL | ratio | with 1 torch thread |"
    yield "|---|---|---|---|---|"
    for text, part, name in HEADLINES:
        if row := figures.row(part, name):
            spreads = [_format_spread(row["data"][side]) for side in ("expstore", "torchrl")]
            ratios = f"{figures.ratio(part, name)} | {figures.ratio(part, f'{name}@1')}"
            yield f"| {text} | {' | '.join(spreads)} | {ratios} |"
        else:
            yield f"| {text} | not measured | | | |"
    closed, killed = (figures.value("vs_torchrl", f"reopen/{how}", ".2f") for how in ("closed", "killed"))
    yield f"| open 1M rows again after close / kill -9 (slowest of 5) | {closed} s / {killed} s | | | |"
    first, following, size = (figures.row("vs_torchrl", f"dumps/{name}") for name in DUMPS)
    if first and following and size:
        ours, theirs = (first[side].split(" n=")[0] for side in ("ours", "theirs"))
        yield f"| first `dumps` of 1M rows, fsynced (TorchRL's is not) | {ours} | {theirs} | | |"
        ours, theirs = (following[side].split(" n=")[0] for side in ("ours", "theirs"))
        ours, theirs = f"{ours}; {size['ours'].split('then ')[-1]}", f"{theirs}; {size['theirs']}"
        yield f"| next `dumps`, 1000 rows later | {ours} | {theirs} | | |"
    yield ""
    yield from _describe_run(figures.run)


DUMPS = ("first", "next-time", "next-bytes")


def _describe_run(run: dict[str, Any]) -> Iterator[str]:
    about, parts = run["about"], run["parts"]
    with_bar = [row for row in run["results"] if row["bar"]]
    missed = sum(not row["ok"] for row in with_bar)
    loads = [(part["name"], re.match(r"load ([\d.]+) before", part["load"])) for part in parts]
    busy = [name for name, load in loads if load and float(load[1]) > 3]
    unfinished = [
        f"Not whole: {part['name']} ({part['state']})." for part in parts if part["state"] != "done"
    ]
    yield _fill(
        f"Measured on {about['machine']}, a shared disk, {about['versions']}, 2 torch threads if not said",
        f"otherwise, on {run['date'][:10]}.",
        f"Of {len(with_bar)} measurements that have a bar {missed} miss it: see",
        "`benchmarks/results/table.md`.",
        *[f"The machine was not idle before {' and '.join(busy)}."] * bool(busy),
        *unfinished,
    )


def images(figures: Figures) -> Iterator[str]:
    """Describe the size and speed of packed images."""
    rows = [row for row in figures.run["results"] if row["part"] == "images"]
    sizes, samples, slices = (
        [row for row in rows if row["name"].endswith(f"/{what}")] for what in ("size", "sample", "slices")
    )
    if not sizes or not samples or not slices:
        yield "Packed images were not measured."
        return

    def span(values: list[float]) -> str:
        return f"{min(values):.1f} to {max(values):.1f}"

    ours = [row["data"]["expstore"] for row in sizes]
    theirs = max(row["data"]["torchrl"] for row in sizes)
    milliseconds = span([row["data"]["expstore"]["median"] * 1e3 for row in samples])
    yield _fill(
        "A transition of Breakout or MsPacman, both frames of 84 x 84 and all other columns, takes",
        f"{min(ours):.0f} to {max(ours):.0f} bytes where TorchRL's `LazyMemmapStorage` takes {theirs:,.0f}",
        f"({theirs / max(ours):.0f} to {theirs / min(ours):.0f} times fewer);",
        f"256 random ones come in {milliseconds} ms,",
        f"{span([row['value'] for row in samples])} times as fast as from that memmap,",
        f"slices of 32 steps {span([row['value'] for row in slices])} times.",
        f"Flat images are sampled {figures.ratio('vs_torchrl', 'pixels/sample').removesuffix('x')} times as",
        "fast as TorchRL's.",
    )


def remote(figures: Figures) -> Iterator[str]:
    """Describe the throughput of a served store."""
    yield _fill(
        f"Between two processes of one machine: {figures.value('remote', 'sample', '.0f')} batches of 256",
        f"locomotion rows a second, one by one, {figures.value('remote', 'stream', '.2f')}M rows/s as they",
        f"come in one answer, {figures.value('remote', 'stream/pixels', '.2f')} GB/s of flat images,",
        f"{figures.value('remote', 'extend', '.0f')} extends of 1000 rows a second.",
    )


def record(figures: Figures) -> Iterator[str]:
    """Describe what `expstore.gym.Record` costs."""
    if row := figures.row("recording", "recording/gymnasium-record"):
        cpu, plain = row["data"]["cpu"] * 1e6, row["data"]["baseline"] * 1e6
        more = f"{cpu - plain:.0f} µs"
        yield f"Recording adds {more} of CPU to a step of CartPole; a plain step takes {plain:.0f} µs."
    else:
        yield "Recording was not measured."


def sb3(figures: Figures) -> Iterator[str]:
    """Compare the buffer for Stable-Baselines3 with its own."""
    yield "| | `flush_steps=1` | 4 | 16 | 64 |\n|---|---|---|---|---|"
    for name, text in (("add", "`add` alone"), ("learn", "a step of `learn`")):
        rows = {n: figures.row("recording", f"recording/sb3-{name}-{n}") for n in (1, 4, 16, 64)}
        cells = [row["ratio"] if row else "" for row in rows.values()]
        theirs = next((row["data"]["baseline"] for row in rows.values() if row), None)
        alone = "" if theirs is None else f" ({format_duration(theirs)} in Stable-Baselines3)"
        yield f"| {text}{alone} | {' | '.join(cells)} |"


#: The generated blocks by their names in the documents.
BLOCKS: dict[str, Callable[[Figures], Iterator[str]]] = {
    "summary": summary,
    "table": table,
    "images": images,
    "remote": remote,
    "record": record,
    "sb3": sb3,
}
BLOCK = re.compile(r"<!-- benchmarks: (\w+) -->\n.*?<!-- end of benchmarks: \1 -->", re.DOTALL)


def find_documents() -> list[Path]:
    """Return the documents that have blocks.

    Raises:
        ValueError: A block is in no document, or in several.
    """
    texts = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
    names = [name for text in texts.values() for name in BLOCK.findall(text)]
    if sorted(names) != sorted(BLOCKS):
        raise ValueError(
            f"the documents have the blocks {sorted(names)}, and need {sorted(BLOCKS)} once each"
        )
    return [path for path, text in texts.items() if BLOCK.search(text)]


def embed(text: str, run: dict[str, Any]) -> str:
    """Return the text of a document with its blocks generated from a run."""
    figures = Figures(run)

    def make(match: re.Match[str]) -> str:
        begin, end = match[0].split("\n")[0], match[0].rsplit("\n", 1)[-1]
        return "\n".join([begin, *BLOCKS[match[1]](figures), end])

    return BLOCK.sub(make, text)


# -- everything ---------------------------------------------------------------------------------------


def whole_table(run: dict[str, Any]) -> str:
    """Return all results of a run, program by program; missed bars come first."""
    about, missed = run["about"], [row for row in run["results"] if not row["ok"]]
    lines = [
        "# Benchmarks",
        "",
        f"{about['machine']}; {about['versions']}. Run of {run['date']}, commit {run['commit']}. {HOW}",
        "",
        "## Missed bars",
        "",
        "| what | measured | bar |\n|---|---|---|" if missed else "None.",
    ]
    for row in missed:
        value = "–" if row["value"] is None else f"{row['value']:.3g}"
        lines.append(f"| {row['part']}: {row['name']} | {value} | {row['bar']} |")
    for part in run["parts"]:
        facts = [part["state"], part["message"], f"{part['seconds']:.0f} s", part["load"]]
        facts += [f"{side} is left out: {why}" for side, why in part["skipped"].items()]
        lines += ["", f"## {part['name']}", "", "; ".join(filter(None, facts)) + ".", ""]
        lines.append("| what | expstore | the other | ratio | bar | ok |\n|---|---|---|---|---|---|")
        lines += [table_row(row) for row in run["results"] if row["part"] == part["name"]]
    return "\n".join(lines) + "\n"
