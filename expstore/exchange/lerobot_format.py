"""The format of LeRobot data sets, version 3: names of columns, paths of files, statistics.

Used by the export, and by the reader in `expstore.datasets.kinds.lerobot`. It reads and writes no files.
Source of the format: https://github.com/huggingface/lerobot (`datasets/utils.py`, `compute_stats.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray, Key

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
#: Templates of paths, as info.json has them.
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{_FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{_FILE}.mp4"
EPISODES_PATH = f"meta/episodes/{_FILE}.parquet"
#: Most files in a folder, and most MiB of a file.
CHUNK_FILES, DATA_MIB, VIDEO_MIB = 1000, 100, 200

IMAGE_PREFIX = "observation.images."
#: Columns that every data set has.
ROW_COLUMNS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
#: Keys of columns whose key does not follow from the column's name.
LEROBOT_KEYS: Mapping[str, str | Key] = {
    "action": "action",
    "observation.state": ("observation", "state"),
    "episode_index": "episode",
    "frame_index": "frame",
    "task": "language_instruction",
    "next.reward": ("next", "reward"),
    "next.done": ("next", "done"),
}
#: Where the reader stores `next.done` of every frame: `("next", "done")` is the end of the episode.
DONE_KEY: Key = ("next", "terminal")
#: Columns that say how an episode ends, and the endings for which the last frame has the flag.
END_COLUMNS = {
    "next.done": ("terminated", "truncated"),
    "next.terminated": ("terminated",),
    "next.truncated": ("truncated",),
}


def lerobot_key(name: str, key_map: Mapping[str, str | Key]) -> str | Key:
    """Return the key of a column.

    >>> from expstore.exchange.lerobot_format import lerobot_key
    >>> lerobot_key("observation.images.top", {})
    ('observation', 'image', 'top')
    """
    if name in key_map:
        return key_map[name]
    if name.startswith(IMAGE_PREFIX):
        return ("observation", "image", name[len(IMAGE_PREFIX) :])
    return tuple(name.split(".")) if "." in name else name


def lerobot_column(key: Key, *, is_image: bool) -> str:
    """Return the column of a field.

    >>> from expstore.exchange.lerobot_format import lerobot_column
    >>> lerobot_column(("observation", "image", "top"), is_image=True)
    'observation.images.top'
    >>> lerobot_column(("observation",), is_image=False)
    'observation.state'
    """
    if key == DONE_KEY:
        return "next.done"
    if is_image:
        rest = key[1:] if key[0] == "observation" else key
        rest = rest[1:] if rest[:1] in (("image",), ("images",)) else rest
        return IMAGE_PREFIX + ".".join(rest) if rest else "observation.image"
    return "observation.state" if key == ("observation",) else ".".join(key)


def file_place(number: int) -> dict[str, int]:
    """Return chunk and file of the file with this number, for the templates of paths."""
    return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


# -- statistics -----------------------------------------------------------------------------------------

#: Statistics of a column: float64 arrays of the shape of a row, and `count`, of shape `(1,)`.
Statistics = dict[str, Array]

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
#: Pictures with a longer side of this many pixels or more are reduced to about half of it for statistics.
_LARGE_SIDE, _REDUCED_SIDE = 300, 150


def describe_values(values: Array) -> Statistics:
    """Return the statistics of a column in an episode.

    Args:
        values: Shape `(frames, *row shape)`.
    """
    rows = values.astype(np.float64).reshape(len(values), *(values.shape[1:] or (1,)))
    found = {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
        "count": np.array([len(rows)]),
    }
    quantiles = np.quantile(rows, list(_QUANTILES.values()), axis=0, method="inverted_cdf")
    return found | dict(zip(_QUANTILES, quantiles, strict=True))


def choose_frames(count: int) -> IntArray:
    """Return which frames of an episode the statistics of its pictures are computed from. Shape `(n,)`."""
    wanted = max(min(count, 100), min(int(count**0.75), 10_000))
    return np.round(np.linspace(0, count - 1, wanted)).astype(np.int64)


class PixelCounts:
    """Count how often each value of a pixel occurs in sampled frames of an episode.

    Threads: one.
    """

    def __init__(self) -> None:
        self._frames = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, pictures: Array) -> None:
        """Count the pixels of some pictures. Shape `(n, height, width, 3)`, uint8."""
        height, width = pictures.shape[1:3]
        side = width if width > height else height
        step = side // _REDUCED_SIDE if side >= _LARGE_SIDE else 1
        self._frames += len(pictures)
        for channel in range(3):
            values = pictures[:, ::step, ::step, channel].reshape(-1)
            self._counts[channel] += np.bincount(values, minlength=256)

    def describe(self) -> Statistics:
        """Return the statistics of pixels between 0 and 1. Shapes `(3, 1, 1)`."""
        values, total = np.arange(256) / 255, self._counts[0].sum()
        shares = self._counts / total
        mean = shares @ values
        sums = self._counts.cumsum(1)
        found = {
            "min": values[(sums > 0).argmax(1)],
            "max": values[(sums == total).argmax(1)],
            "mean": mean,
            "std": np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1)),
        }
        for name, part in _QUANTILES.items():
            found[name] = values[(sums >= part * total).argmax(1)]
        found = {name: array.reshape(3, 1, 1) for name, array in found.items()}
        return found | {"count": np.array([self._frames])}


@dataclass(slots=True)
class TotalStatistics:
    """Combine the statistics of episodes to those of a data set, as LeRobot does: quantiles are averaged.

    Threads: one. The result depends only on the order of the episodes.
    """

    columns: dict[str, Statistics]

    def add(self, episode: Mapping[str, Statistics]) -> None:
        """Add the statistics of an episode, by column."""
        for name, new in episode.items():
            old = self.columns.setdefault(name, new)
            if old is new:
                continue
            count = old["count"] + new["count"]
            share = new["count"][0] / count[0]
            apart = new["mean"] - old["mean"]
            variance = old["std"] ** 2 * (1 - share) + new["std"] ** 2 * share
            self.columns[name] = {
                **{key: old[key] + (new[key] - old[key]) * share for key in ("mean", *_QUANTILES)},
                "min": np.minimum(old["min"], new["min"]),
                "max": np.maximum(old["max"], new["max"]),
                "std": np.sqrt(variance + apart**2 * share * (1 - share)),
                "count": count,
            }

    def to_json(self) -> dict[str, Any]:
        """Return the content of meta/stats.json."""
        return {
            name: {key: values.tolist() for key, values in found.items()}
            for name, found in sorted(self.columns.items())
        }


def flatten_statistics(episode: Mapping[str, Statistics]) -> dict[str, Any]:
    """Return the statistics of an episode as columns of meta/episodes."""
    return {
        f"stats/{name}/{key}": values.tolist()
        for name, found in episode.items()
        for key, values in found.items()
    }


def nest_statistics(row: Mapping[str, Any]) -> dict[str, Statistics]:
    """Return the statistics in a row of meta/episodes: the inverse of `flatten_statistics`."""
    found: dict[str, Statistics] = {}
    for name, value in row.items():
        if name.startswith("stats/"):
            _, column, key = name.split("/")
            found.setdefault(column, {})[key] = np.asarray(value)
    return found


def split_ranges(splits: Iterable[str]) -> dict[str, str]:
    """Return the splits of info.json.

    Args:
        splits: The split of each episode; episodes of a split follow one another.

    >>> from expstore.exchange.lerobot_format import split_ranges
    >>> split_ranges(["train", "train", "eval"])
    {'train': '0:2', 'eval': '2:3'}
    """
    bounds: dict[str, tuple[int, int]] = {}
    for number, split in enumerate(splits):
        bounds[split] = bounds.get(split, (number, number))[0], number + 1
    return {split: f"{start}:{stop}" for split, (start, stop) in bounds.items()}
