"""OpenML's data sets as replay buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

import httpx

from expstore.datasets.buffers.base import BaseDatasetExperienceReplay
from expstore.datasets.download import RemoteFile
from expstore.datasets.openml import OpenMLName, OpenMLReader
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError
from expstore.errors import NotFoundError, RemoteError
from expstore.samplers.base import Sampler
from expstore.samplers.without_replacement import SamplerWithoutReplacement
from expstore.writers.writers import Writer

_ADDRESS = "https://www.openml.org"
#: Name and version on OpenML.
_PUBLIC = {
    "adult_num": ("adult", 1),
    "adult_onehot": ("adult", 1),
    "mushroom_num": ("mushroom", 1),
    "mushroom_onehot": ("mushroom", 1),
    "covertype": ("covertype", 3),
    "shuttle": ("shuttle", 1),
    "magic": ("MagicTelescope", 1),
}


class OpenMLExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of OpenML's classification data sets, for bandits: `X` `(n, features)` and `y` `(n,)`.

    Unlike in TorchRL's class, `download=False` never fetches, and new rows are refused unless a writer
    is given.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        name: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        sampler: Sampler of the batches; None for `SamplerWithoutReplacement`.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        source: An ARFF or a CSV file. Nothing is fetched then.
        mirror: Address to use instead of `https://www.openml.org`.

    Attributes:
        max_outcome_val: The largest class.

    Raises:
        UnknownDatasetError: The data set does not exist; a RuntimeError, as in TorchRL.
        ModuleNotFoundError: scikit-learn or pandas is not installed, and the store does not exist yet.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import OpenMLExperienceReplay
        >>> data = OpenMLExperienceReplay("shuttle", batch_size=32, source="shuttle.arff")
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = list(get_args(OpenMLName))

    def __init__(
        self,
        name: str,
        batch_size: int | None = None,
        root: str | Path | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        *,
        download: Download = True,
        source: str | Path | None = None,
        mirror: str = _ADDRESS,
    ) -> None:
        if name not in _PUBLIC:
            raise UnknownDatasetError.of(type(self), name, f"Dataset does not exist: {name!r}")
        super().__init__(
            Origin(
                name="openml",
                dataset_id=name,
                make_reader=partial(OpenMLReader, name=cast(OpenMLName, name)),
                list_files=partial(_list_files, name, mirror),
            ),
            batch_size,
            root=root,
            download=download,
            source=source,
            sampler=SamplerWithoutReplacement() if sampler is None else sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )
        self.max_outcome_val: int = self.sql('SELECT max("y") FROM transitions').fetchall()[0][0]


def _list_files(name: str, mirror: str) -> list[RemoteFile]:
    """Ask OpenML for the address of a data set's file.

    Source of the interface: https://www.openml.org/apis.
    """
    public, version = _PUBLIC[name]
    base = f"{mirror.rstrip('/')}/api/v1/json/data"
    listing = f"{base}/list/data_name/{public}/data_version/{version}"
    with httpx.Client(follow_redirects=True, timeout=30.0) as client:
        number = _ask(client, listing)["data"]["dataset"][0]["did"]
        about = _ask(client, f"{base}/{number}")["data_set_description"]
    return [RemoteFile(url=about["url"], name=f"{name}.arff")]


def _ask(client: httpx.Client, address: str) -> Any:
    try:
        answer = client.get(address)
        if answer.status_code in (404, 412):  # 412: OpenML's answer if nothing is found
            raise NotFoundError(f"there is no data set at {address} (HTTP {answer.status_code})")
        answer.raise_for_status()
        return json.loads(answer.content)
    except (httpx.HTTPError, ValueError) as exc:
        raise RemoteError(
            f"cannot ask {address}: {exc or type(exc).__name__}",
            hint="pass a file that you fetched yourself as source=",
        ) from exc
