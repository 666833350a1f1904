"""Apply a function to all rows of a data set and write the results to a new store.

Used by `BaseDatasetExperienceReplay.preprocess`. Worker processes read the store and apply the function; this
process writes.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from expstore._open import open as open_store
from expstore.core.values import IntArray
from expstore.data.sample_metadata import SAMPLE_METADATA, encode_metadata
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.errors import SchemaError, StateError
from expstore.exchange.base import show_nothing, show_progress
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage

if TYPE_CHECKING:
    from expstore.buffers.tensordict import TensorDictReplayBuffer
    from expstore.storages.read_view import ReadView

_CHUNK = 4096
_OWN_KEYS = ("index", "metadata")

Function = Callable[[TensorDictBase], TensorDictBase]


def map_rows(
    rb: TensorDictReplayBuffer,
    fn: Function,
    target: Path,
    *,
    count: int,
    pbar: bool,
    metadata: Mapping[str, Any] | None = None,
    **how: Any,
) -> ReadView:
    """Write the results of a function for the first rows to a new store; return the store.

    Args:
        rb: The rows.
        fn: Function that takes rows and returns as many.
        target: Folder of the new store.
        count: Number of rows.
        pbar: Whether to show a progress bar.
        metadata: Value of `metadata` in samples of the new store.
        how: Arguments of `TensorDict.map_iter`.

    Raises:
        StateError: The target exists.
        LockedError: Another process or thread writes to this target.
        SchemaError: The function returns no TensorDict, or another number of rows.
    """
    disk, target = Disk(), target.resolve()
    disk.make_dir(target.parent)
    with build_atomically(disk, target, single=True, doing="writes to") as folder:
        if disk.exists(target) and (not disk.is_dir(target) or disk.names(target)):
            raise StateError(f"{target} exists", hint="choose another path for the new store")
        ends = _ends(rb)
        show = show_progress if pbar else show_nothing
        with (
            open_store(folder / target.name, mode="x", meta=_meta(rb, metadata)) as made,
            show("preprocessing", "rows") as progress,
        ):
            done = 0
            for batch in _results(rb, fn, count, how):
                for stop in [*ends[bisect_right(ends, done) : bisect_right(ends, done + len(batch))]]:
                    _write(made, batch, done, stop)
                    batch, done = batch[stop - done :], stop
                    made.episodes.end()
                _write(made, batch, done, done + len(batch))
                done += len(batch)
                progress(done, count)
        if not disk.names(target):
            disk.remove_tree(target)  # `build_atomically` refuses a folder, even if it is empty
    return open_storage(target, settings=Settings(flatten=True))


def _meta(rb: TensorDictReplayBuffer, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the meta of the new store: the data set's meta, and the metadata of samples.

    The record of the import is renamed: the new store must not be mistaken for the imported one.
    """
    meta = {name: value for name, value in rb.meta.items() if name != "import"}
    if "import" in rb.meta:
        meta["preprocessed_from"] = rb.meta["import"]
    kept = {}
    for name, value in (metadata or {}).items():
        try:
            kept[name] = encode_metadata(value)
        except TypeError as exc:
            warnings.warn(f"the metadata {name!r} are left out: {exc}", stacklevel=4)
    return {**meta, SAMPLE_METADATA: kept} if kept else meta


def _write(made: TensorDictReplayBuffer, batch: TensorDictBase, start: int, stop: int) -> None:
    if stop > start:
        made.extend(batch[: stop - start])


def _ends(rb: TensorDictReplayBuffer) -> list[int]:
    """Return the rows, counted from 0, before which an episode ends without a flag."""
    found = rb.sql(
        "SELECT max(_id) FROM transitions JOIN episodes ON _episode = episode_id "
        "WHERE status NOT IN ('terminated', 'truncated') GROUP BY episode_id"
    ).fetchall()
    ids = np.sort(np.array([row[0] for row in found], np.int64))
    first = rb.storage.stored.low + 1
    places: IntArray = ids - first + 1
    return [int(place) for place in places]


def _results(
    rb: TensorDictReplayBuffer, fn: Function, count: int, how: dict[str, Any]
) -> Iterator[TensorDictBase]:
    """Yield the results of the function in the order of the rows."""
    if how["chunksize"] is None and how["num_chunks"] is None:
        how = {**how, "chunksize": _CHUNK}
    rows = TensorDict({"row": torch.arange(count)}, [count])
    apply = _Apply(rb, fn)
    if how["num_workers"] == 0 and how["pool"] is None:
        size = how["chunksize"] or -(-count // how["num_chunks"])
        results: Iterable[TensorDictBase] = map(apply, rows.split(size))
    else:  # without a generator tensordict 0.15 warns that 0.17 will seed the processes in another way
        results = rows.map_iter(apply, **how | {"generator": how["generator"] or torch.Generator()})
    yield from results


class _Apply:
    """Read rows and apply a function to them, in any process.

    cloudpickle sends the function to other processes, because it may be a lambda or a local function.
    """

    def __init__(self, rb: TensorDictReplayBuffer, fn: Function) -> None:
        self._rb, self._fn = rb, fn

    def __getstate__(self) -> tuple[TensorDictReplayBuffer, bytes]:
        return self._rb, cloudpickle.dumps(self._fn)

    def __setstate__(self, state: tuple[TensorDictReplayBuffer, bytes]) -> None:
        self._rb, fn = state
        self._fn = cloudpickle.loads(fn)

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        batch = self._rb[rows["row"]].exclude(*_OWN_KEYS)
        made = self._fn(batch)
        if not isinstance(made, TensorDictBase):
            raise SchemaError(f"the function returned {type(made).__name__}, not a TensorDict")
        if made.batch_size[:1] != rows.batch_size[:1]:
            raise SchemaError(
                f"the function returned the batch size {list(made.batch_size)} for {len(rows)} rows"
            )
        return made
