"""A data set in one file: its format, the names of its data sets, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from expstore.datasets.download import RemoteFile
from expstore.datasets.episode import Episode, Part, Reader
from expstore.datasets.kind import Kind, Request
from expstore.datasets.samples import make_walks, write_file
from expstore.datasets.source_paths import check_file


class CountsReader(Reader):
    """Read episodes from a text: one per line, the observations."""

    format: ClassVar[str] = "counts"

    def __init__(self, source: Path, *, scale: float = 1.0) -> None:
        check_file(source)
        self.source, self.scale = source, scale

    def parts(self) -> list[Part]:
        return [Part(name=self.source.name, files=[self.source])]

    def episodes(self, part: Part) -> Iterator[Episode]:
        for line in self.source.read_text().splitlines():
            states = np.array(line.split(), np.float32) * self.scale
            yield Episode(observation=states[:, None], action=np.diff(states), end="truncated")


def _make_sample(path: Path) -> None:
    write_file(path, "\n".join(" ".join(map(str, walk.states[:, 0])) for walk in make_walks()).encode())


def _list_files(request: Request) -> list[RemoteFile]:
    return [RemoteFile(url=f"{request.mirror}/{request.dataset_id}.counts", name="data.counts")]


KIND = Kind(
    reader=CountsReader,
    files="the .counts file",
    endings="truncated",
    make_sample=_make_sample,
    recognize=lambda source: source.suffix == ".counts",
    prefix="counts",
    ids=["small", "large"],
    public="http://counts.invalid",
    mirror="http://counts.invalid",
    list_files=_list_files,
)
