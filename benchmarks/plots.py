"""Plots of a run: ratios to TorchRL, and calls while a store grows.

Used by `__main__.py`. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.runs import ratio
from benchmarks.tables import HEADLINES, Told

ACTS = {
    "sample": "sample(256)",
    "slices": "8 slices of 32",
    "extend": "extend(1000)",
    "sql": "SQL over episodes",
}


def draw(run: dict[str, Any], folder: Path) -> list[Path]:
    """Write the plots of a run to a folder; return their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    paths = [folder / "ratios.png", folder / "growth.png"]
    _ratios(Told(run), paths[0])
    _growth(Told(run), paths[1])
    return paths


def _ratios(told: Told, path: Path) -> None:
    from matplotlib import pyplot as plt

    found = [
        (text.replace("`", ""), ratio(row), ratio(alone) if (alone := told.row(part, f"{name}@1")) else None)
        for text, part, name in reversed(HEADLINES)
        if (row := told.row(part, name)) and ratio(row)
    ]
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.42 * len(found)))
    for place, (_, two, one) in enumerate(found):
        axes.barh(
            place + 0.18,
            (two or 1) - 1,
            0.34,
            left=1,
            color="#2a6f97",
            label="2 torch threads" if not place else None,
        )
        axes.text(max(1, two or 1), place + 0.18, f" {two:.1f}", va="center", fontsize=7)
        if one:
            axes.barh(
                place - 0.18,
                one - 1,
                0.34,
                left=1,
                color="#a9d6e5",
                label="1 torch thread" if not place else None,
            )
    axes.set_yticks(range(len(found)), [text for text, *_ in found], fontsize=8)
    axes.set_xscale("log")
    _plain(axes.xaxis)
    axes.margins(x=0.1)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("TorchRL's median time / expstore's (right of the line: expstore is faster)", fontsize=8)
    if found:
        axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _growth(told: Told, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(1, len(ACTS), figsize=(12, 3.1), sharex=True)
    for axes, (act, text) in zip(all_axes, ACTS.items(), strict=True):
        for side, colour in (("expstore", "#2a6f97"), ("torchrl", "#bc4749")):
            points = _points(told, act, side)
            if points:
                sizes, *parts = zip(*points, strict=True)
                low, median, high = ([value * 1e6 for value in part] for part in parts)
                axes.plot(sizes, median, "o-", color=colour, markersize=3, label=side)
                axes.fill_between(sizes, low, high, color=colour, alpha=0.2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain(axes.yaxis)
        axes.set_title(text, fontsize=9)
        axes.set_xlabel("rows in the store", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(visible=True, alpha=0.3)
    all_axes[0].set_ylabel("µs a call, median, 10th–90th percentile", fontsize=8)
    if all_axes[0].lines:
        all_axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plain(axis: Any) -> None:
    """Let a logarithmic axis show 200 instead of 2 x 10^2."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _points(told: Told, act: str, side: str) -> list[tuple[float, float, float, float]]:
    """Return size, 10th percentile, median and 90th percentile for each size that was measured."""
    found = []
    for row in told.run["results"]:
        parts = row["name"].split("/")
        if row["part"] == "growth" and parts[1:2] == [act] and len(parts) == 3 and side in row["data"]:
            one = row["data"][side]
            found.append((float(parts[2]), one["p10"], one["median"], one["p90"]))
    return found
