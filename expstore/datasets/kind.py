"""A kind of data sets: the format of its files, the names of its data sets, and where their files are.

Each module of `expstore.datasets.kinds` defines one. `expstore.datasets.registry` lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expstore.datasets.download import RemoteFile
from expstore.datasets.episode import Reader
from expstore.datasets.recognition import Source
from expstore.disk.files import ReadingDisk
from expstore.errors import NotFoundError


def _read_options(dataset_id: str) -> Mapping[str, Any]:
    return {}


def _read_import_options(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    options: Mapping[str, Any] = meta["import"]["options"]
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Ask for the files of a data set at an address.

    Args:
        dataset_id: The id.
        mirror: The address, without a slash at the end.
        options: Options of the reader.
        folder: Folder to which the files are downloaded.
    """

    dataset_id: str
    mirror: str
    options: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """Describe a kind of data sets. It is the only place that knows one.

    Calling it with an id opens the data set, as `load_dataset("PREFIX:ID")` does.

    Args:
        reader: Class that reads the files; its `format` is the name of the format.
        files: What a source is, for messages: "the .hdf5 file".
        endings: How episodes end, for the documentation.
        make_sample: Function that writes a few episodes in the format to a path, a file or a new folder.
        recognize: Function that returns whether a source has the format. A text means that it may, and says
            what the user can do.
        is_general: Whether other kinds are asked first whether a source is theirs.
        prefix: Prefix of the names of data sets, and name of their folder. "": data sets have no names.
        aliases: Other prefixes.
        buffer: Name of TorchRL's class in `expstore.datasets.buffers.classes`. "": `DatasetReplayBuffer`.
        ids: Ids of the data sets. A function lists them at the public address; then, and without any, every
            id is accepted.
        unknown_id: Message for an id that is not one of `ids`, in the words of TorchRL's class.
        public: Where the public files are, or what happened to them, for messages and the documentation.
        mirror: Public address, which `mirror=` replaces; "": there is no such address.
        list_files: Function that lists the files to download. None: nothing can be downloaded.
        check_source: Function of a source and an id that raises an error if the source's path names another
            data set.
        options: Function that returns the options of the reader that follow from an id.
        facts: Name in `rb.meta` under which the reader's facts are stored; "" if its stores may lack them.
        stored_options: Function that returns, from the meta of a store, the options that it was made with.
            They are compared with those of the call.

    Example:
        >>> from expstore.datasets.registry import find_kind
        >>> "hopper-medium-v2" in find_kind("d4rl").ids
        True
    """

    reader: type[Reader]
    files: str
    endings: str
    recognize: Callable[[Source], bool | str]
    make_sample: Callable[[Path], None]
    is_general: bool = False
    prefix: str = ""
    aliases: tuple[str, ...] = ()
    buffer: str = ""
    ids: Sequence[str] | Callable[[], Sequence[str]] = ()
    unknown_id: str = "{!r} is not one of the data sets"
    public: str = ""
    mirror: str = ""
    list_files: Callable[[Request], Sequence[RemoteFile]] | None = None
    check_source: Callable[[Path, str], None] | None = None
    options: Callable[[str], Mapping[str, Any]] = _read_options
    facts: str = ""
    stored_options: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _read_import_options

    @property
    def format(self) -> str:
        """Name of the format, for `--format` and `rb.meta["import"]`."""
        return self.reader.format

    @property
    def available_datasets(self) -> list[str]:
        """Ids of the data sets; empty if they are not listed."""
        return list(self.ids() if callable(self.ids) else self.ids)

    def takes(self, option: str) -> bool:
        """Return whether the reader has an option."""
        return option in inspect.signature(self.reader).parameters

    def is_unknown(self, dataset_id: str) -> bool:
        """Return whether there is no data set of an id."""
        return not callable(self.ids) and bool(self.ids) and dataset_id not in self.ids

    def open_source(self, source: Path, dataset_id: str, options: Mapping[str, Any]) -> Reader:
        """Return the reader of a data set's files.

        Args:
            source: The files, or a folder that has them below the id of the data set.
            dataset_id: The id.
            options: More options of the reader.

        Raises:
            SchemaError: The path names another data set, or the files have another format.
        """
        disk, below = ReadingDisk(), source / dataset_id
        if disk.exists(below):
            source = below
        elif self.check_source is not None:
            self.check_source(source, dataset_id)
        return self.reader(source, **self.options(dataset_id), **options)  # type: ignore[call-arg]

    def list_public(self, request: Request) -> Sequence[RemoteFile]:
        """Return the files of a data set at its public address, or at another address.

        Raises:
            NotFoundError: The address does not have the data set, or there is no address.
            RemoteError: The address does not answer.
        """
        if self.list_files is None or not request.mirror:
            named = request.dataset_id
            raise NotFoundError(
                f"the data set {named} is missing, and {self.public or 'it is not public'}",
                hint=f"pass {self.describe_source(named)}"
                + (", or mirror=, the address of a copy" if self.list_files else ""),
            )
        return self.list_files(request)

    def describe_source(self, dataset_id: str) -> str:
        """Return what `source=` may be, for messages."""
        return f"source=, {self.files}, or a folder that has {dataset_id} below it"

    def load_class(self) -> Callable[..., Any]:
        """Return the class of the data sets, or this kind if it has none of its own."""
        if not self.buffer:
            return self
        from expstore.datasets.buffers import classes

        found: Callable[..., Any] = getattr(classes, self.buffer)
        return found

    def __call__(self, dataset_id: str, **keywords: Any) -> Any:
        """Open a data set; see `DatasetReplayBuffer`."""
        if self.buffer:
            return self.load_class()(dataset_id, **keywords)
        from expstore.datasets.buffers.base import DatasetReplayBuffer

        return DatasetReplayBuffer(dataset_id, kind=self, **keywords)
