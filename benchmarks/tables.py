"""Markdown of a run: the whole table, and the generated blocks of documents.

Used by `__main__.py` and by the test that compares the documents with the stored results. This module
measures nothing, and refers to figures by part and name.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.runs import ratio

#: Comparisons with TorchRL in the documents: text, part, name.
HEADLINES = (
    ("sample 256 rows", "core", "locomotion/sample"),
    ("sample 256 rows by priority and set theirs", "prioritized", "prioritized/sample+update"),
    ("set the priorities of 256 rows", "prioritized", "prioritized/update"),
    ("8 slices of 32 steps, a row added before each batch", "slices", "slices/beside-memmap"),
    ("add a row (ring full)", "core", "locomotion/add-full"),
    ("extend by 1000 rows (ring full)", "core", "locomotion/extend-full"),
    ("extend by 1000 rows where the best million stay: 10 do", "topk", "topk/few-disk"),
    ("the same: all of them do", "topk", "topk/all-disk"),
    ("sample 256 image rows (3.6 MB)", "core", "pixels/sample"),
    ("add an image row (ring full)", "core", "pixels/add-full"),
    ("extend by 1000 image rows (ring full)", "core", "pixels/extend-full"),
    ("trajectories by their return: SQL, `rb.query` there", "trajectories", "trajectories/return-sql"),
    ("the same: `rb.query` here and there", "trajectories", "trajectories/return-query"),
    ("trajectories by a row's reward: SQL, `rb.query` there", "trajectories", "trajectories/reward-sql"),
)
#: Comparisons in README.
SUMMARY = (
    "locomotion/sample",
    "prioritized/sample+update",
    "slices/beside-memmap",
    "locomotion/add-full",
    "locomotion/extend-full",
    "trajectories/return-sql",
)
NAMES = {
    "expstore-default": "expstore (disk; images packed)",
    "expstore-flat": 'expstore (disk, `layout="flat"`)',
    "expstore-numpy": "expstore (disk, dicts of NumPy arrays)",
    "expstore-memory": "expstore `MemoryStorage`",
    "torchrl-list": "TorchRL `ListStorage`",
    "torchrl-tensor": "TorchRL `LazyTensorStorage`",
    "torchrl-memmap": "TorchRL `LazyMemmapStorage` (disk)",
    "torchrl-store": "TorchRL `StoreStorage` (Redis)",
    "stable-baselines3": "stable-baselines3",
    "cpprb": "cpprb",
    "lance": "Lance (disk)",
    "index-select": "*`torch.index_select` of rows in RAM*",
    "memcpy": "*copy of as many bytes in RAM*",
}
#: Speeds in TorchRL's documentation of its storages, relative to `ListStorage`.
DOCUMENTED = {"torchrl-list": 1.0, "torchrl-tensor": 1.83, "torchrl-memmap": 3.44}


class Told:
    """Look up results of a run by part and name."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self._rows = {(row["part"], row["name"]): row for row in run["results"]}

    def row(self, part: str, name: str) -> dict[str, Any] | None:
        return self._rows.get((part, name))

    def value(self, part: str, name: str, digits: str) -> str:
        row = self.row(part, name)
        return "–" if row is None or row["value"] is None else format(row["value"], digits)

    def sides(self, part: str, act: str) -> dict[str, dict[str, Any]]:
        """Return the series of all sides for a call, by side."""
        found: dict[str, dict[str, Any]] = {}
        for (of, name), row in self._rows.items():
            if of == part and name.startswith(f"{act}/") and "@" not in name:
                side = row["data"]["side"]
                found[side] = row["data"]["expstore"]
                found |= {key: value for key, value in row["data"].items() if key not in ("expstore", "side")}
        return {name: found[name] for name in NAMES if name in found}


def duration(seconds: float) -> str:
    """Format a time."""
    if seconds < 1e-2:
        return f"{seconds * 1e6:,.0f} µs"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.0f} s"


def spread(series: dict[str, Any]) -> str:
    """Format a series as median and percentiles."""
    return f"{duration(series['median'])} [{duration(series['p10'])}–{duration(series['p90'])}]"


def times(value: float | None) -> str:
    """Format a ratio."""
    return "–" if value is None else f"{value:.0f}x" if value >= 10 else f"{value:.1f}x"


# -- blocks of documents ------------------------------------------------------------------------------


def summary(told: Told) -> Iterator[str]:
    """Compare with TorchRL in six rows."""
    yield "| median per call | expstore | TorchRL | ratio |"
    yield "|---|---|---|---|"
    for text, part, name in HEADLINES:
        if name in SUMMARY:
            row = told.row(part, name)
            theirs = row and row["data"].get("torchrl")
            if not row or not theirs:
                yield f"| {text} | not measured | | |"
                continue
            mine = duration(row["data"]["expstore"]["median"])
            yield f"| {text} | {mine} | {duration(theirs['median'])} | {times(ratio(row))} |"


def table(told: Told) -> Iterator[str]:
    """Compare with TorchRL, call by call."""
    yield "| median per call [10th–90th percentile] | expstore | TorchRL | ratio | with 1 torch thread |"
    yield "|---|---|---|---|---|"
    for text, part, name in HEADLINES:
        row = told.row(part, name)
        theirs = row and row["data"].get("torchrl")
        if not row or not theirs:
            yield f"| {text} | not measured | | | |"
            continue
        alone = told.row(part, f"{name}@1")
        single = times(ratio(alone)) if alone else "–"
        mine = spread(row["data"]["expstore"])
        yield f"| {text} | {mine} | {spread(theirs)} | {times(ratio(row))} | {single} |"
    yield from _promises(told)
    yield ""
    yield "![how many times as fast as TorchRL](../benchmarks/results/ratios.png)"
    yield "![calls while a store grows](../benchmarks/results/growth.png)"
    yield ""
    yield from _about(told)


def _promises(told: Told) -> Iterator[str]:
    closed, killed = (told.value("core", f"reopen/{how}", ".2f") for how in ("closed", "killed"))
    yield f"| open 1M rows again after close / kill -9 (slowest of 5) | {closed} s / {killed} s | | | |"
    for text, name in (("first `dumps` of 1M rows, fsynced (TorchRL's is not)", "first"),):
        if row := told.row("snapshots", f"snapshot/{name}"):
            yield f"| {text} | {row['ours'].split(' n=')[0]} | {row['theirs'].split(' n=')[0]} | | |"
    after, size = told.row("snapshots", "snapshot/next-time"), told.row("snapshots", "snapshot/next-bytes")
    if after and size:
        mine, other = (after[side].split(" n=")[0] for side in ("ours", "theirs"))
        text = "next `dumps`, 1000 rows later"
        yield f"| {text} | {mine}; {size['ours'].split('then ')[-1]} | {other}; {size['theirs']} | | |"


def _about(told: Told) -> Iterator[str]:
    run, about = told.run, told.run["about"]
    minutes = sum(part["seconds"] for part in run["parts"]) / 60
    barred, missed = sum(1 for row in run["results"] if row["bar"]), len(run["missed"])
    yield _filled(
        f"Measured on {about['machine']}, a shared disk, {about['versions']}, 2 torch threads if not said",
        f"otherwise, on {run['date'][:10]}: {run['effort']} sizes, {minutes:.0f} minutes.",
        f"Of {barred} measurements that have a bar {missed} miss it: see `benchmarks/results/table.md`.",
        *_busy(run["parts"]),
        *(
            f"Not whole: {part['name']} ({part['state']})."
            for part in run["parts"]
            if part["state"] != "done"
        ),
    )


def _busy(parts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a warning if the machine was not idle before some parts."""
    loaded = [
        part["name"]
        for part in parts
        if (found := re.match(r"load ([\d.]+) before", part["load"])) and float(found[1]) > 3
    ]
    if loaded:
        names = " and ".join(loaded)
        yield f"The machine was not idle before {names}: other programs, or work left by the previous part."


def _filled(*words: str) -> str:
    """Wrap words to a paragraph."""
    return textwrap.fill(" ".join(words), 120, break_long_words=False, break_on_hyphens=False)


#: Columns of the comparison of all buffers: title, part, name of the result.
COLUMNS = (
    ("sample 256 of 178 B", "peers-locomotion", "locomotion/sample"),
    ("extend by 1000", "peers-locomotion", "locomotion/extend"),
    ("add", "peers-locomotion", "locomotion/add"),
    ("sample 256 Atari rows (14 KB)", "peers-atari", "atari/sample"),
    ("sample 256 of 2 x f32[22188]", "peers-wide", "wide/sample"),
)


def peers(told: Told) -> Iterator[str]:
    """Compare all buffers on three kinds of rows."""
    found = [told.sides(part, act) for _, part, act in COLUMNS]
    yield f"| median per call | {' | '.join(text for text, *_ in COLUMNS)} | documented | here |"
    yield f"|---|{'---|' * (len(COLUMNS) + 2)}"
    wide = found[-1]
    for name, text in NAMES.items():
        if not any(name in sides for sides in found):
            continue
        cells = [duration(sides[name]["median"]) if name in sides else "–" for sides in found]
        said = f"{DOCUMENTED[name]:g}x" if name in DOCUMENTED else ""
        there = "torchrl-list" in wide and name in wide
        here = f"{wide['torchrl-list']['median'] / wide[name]['median']:.2f}x" if there else "–"
        yield f"| {text} | {' | '.join(cells)} | {said} | {here} |"


def images(told: Told) -> Iterator[str]:
    """Describe the size and speed of packed images."""
    rows = [row for row in told.run["results"] if row["part"] == "images"]

    def values(what: str) -> list[float]:
        return [row["value"] for row in rows if row["name"].endswith(f"/{what}")]

    sizes = [row["data"] for row in rows if row["name"].endswith("/size")]
    if not sizes or not values("sample") or not values("slices"):
        yield "Packed images were not measured."
        return
    mine, other = [one["expstore"] for one in sizes], max(one["torchrl"] for one in sizes)
    few, many = (min(mine), max(mine))
    drawn = [row["data"]["expstore"]["median"] * 1e3 for row in rows if row["name"].endswith("/sample")]
    sampled, sliced = values("sample"), values("slices")
    flat = told.row("core", "pixels/sample")
    space = told.row("peers-atari", "atari/space/expstore-flat")
    faster = times(flat and ratio(flat)).removesuffix("x")
    yield _filled(
        "A transition of Atari frames, both observations and all other columns, takes",
        f"{few:.0f} to {many:.0f} bytes where TorchRL's `LazyMemmapStorage` takes {other:,.0f}",
        f"({other / many:.0f} to {other / few:.0f} times fewer);",
        f"256 random ones come in {_range(drawn)} ms, {_range(sampled)} times as fast as from that memmap,",
        f"slices of 32 steps {_range(sliced)} times.",
        f"Flat images are sampled {faster} times as fast as TorchRL's",
        f"and take {space['data']['row_bytes'] / 1000:.1f} KB per transition, with both observations."
        if space
        else "and take the space they have.",
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def remote(told: Told) -> Iterator[str]:
    """Describe the throughput of a served store."""

    def of(name: str, digits: str) -> str:
        return told.value("remote", name, digits)

    reverb = told.row("remote", "reverb")
    compared = f" (Reverb: {max(reverb['data'].values()) / 1e3:.0f}k)" if reverb and reverb["data"] else ""
    yield _filled(
        f"Between two processes of one machine: {of('sample', '.0f')} batches of 256 locomotion rows",
        f"a second, one by one, {of('stream', '.2f')}M rows/s as they come in one answer{compared},",
        f"{of('stream/pixels', '.2f')} GB/s of flat images,",
        f"{of('extend', '.0f')} extends of 1000 rows a second.",
    )


#: The generated blocks: document, name of the block, function.
DOCUMENTS: dict[str, dict[str, Callable[[Told], Iterator[str]]]] = {
    "README.md": {"summary": summary},
    "docs/benchmarks.md": {"table": table, "peers": peers},
    "docs/images.md": {"images": images},
    "docs/server.md": {"remote": remote},
}


def embed(document: str, text: str, run: dict[str, Any]) -> str:
    """Return the text of a document with its blocks generated from a run.

    Raises:
        ValueError: The document lacks the markers of a block.
    """
    told = Told(run)
    for name, make in DOCUMENTS[document].items():
        begin, end = f"<!-- benchmarks: {name} -->\n", f"<!-- end of benchmarks: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        block = begin + "\n".join(make(told)) + f"\n{end}"
        text, count = pattern.subn(lambda _, block=block: block, text)
        if count != 1:
            raise ValueError(f"{document} has {count} blocks between the markers of {name}, one is needed")
    return text


# -- everything ---------------------------------------------------------------------------------------


def whole_table(run: dict[str, Any]) -> str:
    """Return all results of a run, part by part; missed bars come first."""
    about = run["about"]
    lines = [
        "# Benchmarks",
        "",
        f"{about['machine']}; {about['versions']}.",
        f"Run of {run['date']}, commit {run['commit']}: {run['effort']} sizes,"
        f" {run['seconds'] / 60:.0f} minutes.",
        "",
        "Times are medians [10th–90th percentile] per call, n calls a side, the sides taking turns; names",
        "with `@1` are of one torch thread, others of two.",
        "",
        "## Bars that were missed",
        "",
        *_missed(run),
    ]
    if run["skipped"]:
        lines += ["", "## Left out", "", *(f"- {name}: {why}" for name, why in run["skipped"].items())]
    for part in run["parts"]:
        lines += ["", f"## {part['name']}", "", *_part(run, part)]
    return "\n".join(lines) + "\n"


def _missed(run: dict[str, Any]) -> Iterator[str]:
    missed = [row for row in run["results"] if not row["ok"]]
    if not missed:
        yield "None."
        return
    yield "| what | measured | bar |\n|---|---|---|"
    for row in missed:
        value = "did not run" if row["value"] is None else f"{row['value']:.3g}"
        yield f"| {row['part']}: {row['name']} | {value} | {row['bar']} |"


def _part(run: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    state = f": {part['message']}" if part["message"] else ""
    note = f" Smaller than by default: {part['note']}." if part["note"] else ""
    yield f"{part['state']}{state}, {part['seconds']:.0f} s; {part['load']}.{note}\n"
    rows = [row for row in run["results"] if row["part"] == part["name"]]
    if rows:
        yield "| what | expstore | the other | ratio | bar | held |\n|---|---|---|---|---|---|"
    for row in rows:
        held = ("yes" if row["ok"] else "**no**") if row["bar"] else ""
        what = f"{row['name']} ({row['note']})" if row["note"] else row["name"]
        yield f"| {what} | {row['ours']} | {row['theirs']} | {row['ratio']} | {row['bar']} | {held} |"
