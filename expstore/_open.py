"""`expstore.open`: a folder in, a replay buffer out.

What most programs call first. It only puts settings together; everything else is done below.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expstore.buffers.arguments import check_drawing
from expstore.buffers.domain_checks import row_text
from expstore.buffers.sample_units import SampleUnit, check_unit
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.rate_limiters import RateLimiter
from expstore.core.retention_policy import Retain
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.disk.writer_lock import WriterLock, read_owner
from expstore.errors import ExpStoreError, LockedError, StateError
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.schema.field_parser import schema_of
from expstore.schema.schema import Schema
from expstore.storages.engine.open_settings import Durability, Mode, Settings
from expstore.storages.factory import open_storage
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.layout import ColumnLayout, LayoutName, ask_layout
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import LOCK
from expstore.storages.read_view import ReadView, keys_for
from expstore.storages.snapshots.catalog import find_version, is_snapshots
from expstore.transforms import Compose
from expstore.writers.writers import Writer

if TYPE_CHECKING:
    import torch

    from expstore.specs import Composite

__all__ = ["open"]

_logger = logging.getLogger("expstore")
#: What a new store is unless somebody says otherwise.
_NEW = Settings(flatten=True, new_layout=ColumnLayout("auto"))


def open(
    path: str | Path,
    *,
    capacity: int | None = None,
    mode: Mode = "a",
    version: int | str | None = None,
    storage: Literal["zarr", "arrow"] | None = None,
    compression: Literal["narrow", "lz4", "zstd"] | None = None,
    layout: LayoutName | None = None,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    share_next: bool | None = None,
    batch_size: int | None = None,
    sampler: Sampler | None = None,
    writer: Writer | None = None,
    consume_after_n_samples: int | None = None,
    seed: int | None = None,
    schema: Schema | Mapping[Any, Any] | None = None,
    specs: Composite | None = None,
    traj_key: str | tuple[str, ...] | None = None,
    done_keys: Sequence[str | tuple[str, ...]] | None = None,
    reward_key: str | tuple[str, ...] | None = None,
    reward_reduce: Literal["sum", "mean", "min", "max"] | None = None,
    done_reduce: Literal["any", "all"] | None = None,
    meta: dict[str, Any] | None = None,
    durability: Durability = "process",
    min_free_bytes: int = 0,
    retain: Retain | Mapping[str, Any] | None = None,
    archive: str | Path | Literal[False] | None = None,
    on_sigterm: Literal["flush", "ignore"] = "flush",
    device: torch.device | str | None = None,
    prefetch: int = 0,
    pin_memory: bool = False,
    generator: torch.Generator | None = None,
    sample_unit: SampleUnit | None = None,
    rate_limiter: RateLimiter | None = None,
    transform: Any = None,
) -> TensorDictReplayBuffer:
    """Open the store in a folder, or make one.

    What is not given is as stored; what contradicts the store is an error. Opening after a crash
    recovers by itself; `rb.recovered` says what.

    Args:
        path: The folder, by habit named `something.exp`; `~` is the home folder. A URL is refused.
        capacity: Most readable rows; None for a new store: it grows without bound.
        mode: "a" opens or makes, "x" only makes, "w" moves an old store aside (`.old-1`) and makes one,
            "r" follows: it reads, beside a writer or without one, and changes nothing.
        version: Number or tag of a version that `dumps` or `tag` has made, which is only read. Without it
            mode "r" opens the newest one of a folder of versions.
        storage: How rows are kept: "zarr", the default of new stores, or "arrow", for rows with strings,
            lists, structs, None, or tensors whose shapes differ; see `ArrowStorage`.
        compression: Of such rows. "narrow": integers lie in as few bytes as the values of a segment need,
            which costs nothing when rows are read. "lz4" and "zstd" pack what is narrow: less space, for
            texts, too, and slower samples.
        layout: How the fields of a new store lie on disk. "auto", as without it: packed from 1 KiB per row
            on, unless a writer keeps the best rows. "packed": compressed, in chunks of a few rows, which stay
            as they are. "flat": rows one behind another, which can be changed in place (`rb[i] =`).
        fields: The same for single fields, by name or key: a dict with `layout`, and of packed ones `rows`
            per chunk, a power of two (16 MiB at most), and `codec`: "lz4hc" by default, "lz4", "zstd", "zlib"
            (all of blosc), "lz4hc-shuffle" and "zstd-shuffle" for floats, "gzip"; and `share_next`.
        share_next: Whether rows of a new store's packed fields are stored once, where they are the next ones,
            `("next", name)`, of earlier rows; found by their bytes. As without it, True. False: all rows are
            stored whole, as those of flat fields always are.
        batch_size: Of `sample` and iteration.
        sampler: What makes up a batch; uniform by default.
        writer: Where rows go; by default the newest take the places of the oldest, or as the store was
            filled. Not with mode "r".
        consume_after_n_samples: Hand each row out so many times; see `ConsumingSampler`. The store keeps how
            often each was.
        seed: Key of all draws; a new store without one picks one and keeps it. With mode "r" the
            reader's own.
        schema: The fields, if they are to be fixed before the first rows come: a `Schema`, or types by key,
            `{"prompt": str, "tokens": ("int32", (None,)), ("next", "reward"): "float32"}`: a dtype, a dtype
            and a row shape with None where rows differ, str, bytes or a pyarrow type. Without it the first
            batch fixes them: tensors of one shape are of a fixed size then.
        specs: What values the fields of a row have; of some of them. Kept with the schema. Rows with other
            fields, dtypes or shapes are refused; `extend(validate="domain")` asks for values, too.
        traj_key: Field with the collector's trajectory ids; found by TorchRL's names by default.
        done_keys: Fields that end an episode, known by their last part: `terminated`, `truncated`, or another
            one; found by TorchRL's names by default. Where rows have `terminated`, an end that is not
            terminated is truncated.
        reward_key: Field that is summed up to an episode's return; ("next", "reward") by default. It may have
            several values per row, one per agent: `("next", "agents", "reward")`. Without such a field an
            episode's return is NULL.
        reward_reduce: How several rewards of a row become one: "sum" by default, "mean", "min" or "max".
        done_reduce: When a row ends an episode if `done_keys` have several values per row: when "any" of them
            is set (the default), or "all".
        meta: Your own facts, for a new store; what JSON can keep.
        durability: What an `extend` or `add` that returned survives: with "process" the end of the
            process at once and of the machine after the next sync (about a second, or `flush`); with
            "sync" a power cut, for one fsync per call (several above 1 MiB). Not stored. `rb[i] =` and
            `empty` survive it either way; priorities, draws and counts need a `flush` either way.
        min_free_bytes: An extend that would leave the disk with less is refused before it writes anything.
            Rows that take the place of older ones need no space. Looked at about once a second.
        retain: Which rows of a store without capacity stay, by bytes, age or an SQL condition: a `Retain`, or
            a dict of its parts. Kept in the store, and applied every few seconds; whole episodes leave, once
            they have ended. Another one takes the place of that before; `Retain()` keeps all rows.
        archive: Path of a store to which rows go that leave a store with a capacity, each once, before their
            place is given away; it grows without bound. `history` in SQL is the rows of both. Kept in the
            store: another path says where the archive has been moved to, False that rows are gone from now
            on. What `empty`, `loads` and a writer of the best rows take away does not go there.
        on_sigterm: "flush": where the program has no handler of its own for SIGTERM, its stores are flushed
            before it dies of it. "ignore": leave signals alone.
        device: Where batches are handed out.
        prefetch: How many batches are made ahead, in a thread; as `ReplayBuffer`, and so are the others.
        pin_memory: See there.
        generator: See there.
        sample_unit: See there.
        rate_limiter: See there.
        transform: See there.

    Returns:
        A buffer that is open for writing, or for reading with mode "r". Close it, or use it in a `with`
        block.

    Raises:
        NotFoundError: There is no store to follow.
        SnapshotError: There is no such version; the message lists those that there are.
        LockedError: Somebody else has it open for writing.
        StateError: The path is no folder's, the folder is in the way, or a setting contradicts the store. A
            store that was made for nothing is removed again.
        CorruptionError: The store is damaged.
        QueryError: The condition of `retain` is not SQL, or names what the rows do not have.
        SchemaError: The specs are not those of the rows, or text cannot keep them.

    Example:
        >>> with expstore.open("runs/demo.exp", capacity=100_000, batch_size=256) as rb:
        ...     rb.extend(batch)
        ...     rb.sample()
    """
    # All is checked before the folder is touched.
    path = local_path(path)
    archive = local_path(archive) if isinstance(archive, str | Path) and archive else archive
    check_drawing(batch_size, prefetch, pin_memory, device=device, limiter=rate_limiter, capacity=capacity)
    check_unit(sample_unit, sampler)
    _check_reading(mode, writer, retain, archive)
    sampler = consume_after(consume_after_n_samples, sampler, prefetch=prefetch)
    text, schema, transform = row_text(specs), schema_of(schema), Compose.of(transform)
    path, mode = _find(path, mode, version)
    _check_condition(retain, schema, path, mode)
    settings = replace(
        _NEW, mode=mode, storage=storage, layout=ask_layout(layout, fields, share_next), seed=seed,
        compression=compression, schema=schema, specs=text, meta=meta, traj_key=traj_key, done_keys=done_keys,
        reward_key=reward_key, reward_reduce=reward_reduce, done_reduce=done_reduce, durability=durability,
        min_free_bytes=min_free_bytes, on_sigterm=on_sigterm,
    ).with_leaving(retain, archive)  # fmt: skip
    keep = _undone(archive, "a") if isinstance(archive, Path) else contextlib.nullcontext()
    with keep, _undone(path, mode) as new:
        rb = _in_buffer(
            _open_storage(path, capacity, settings), sampler=sampler, writer=writer, batch_size=batch_size,
            device=device, prefetch=prefetch, pin_memory=pin_memory, generator=generator,
            sample_unit=sample_unit, rate_limiter=rate_limiter, transform=transform)  # fmt: skip
    if new:
        _logger.info("made a new store: %s", path)
    return rb


@contextlib.contextmanager
def _undone(path: Path, mode: Mode) -> Iterator[bool]:
    """Remove a store that this block makes if the block fails; yield whether it is to make one."""
    disk = Disk()
    if mode == "r" or (mode == "a" and disk.exists(path / MANIFEST)):
        yield False
        return
    names = set(disk.names(path) if disk.is_dir(path) else ())
    begun, moved = time.time(), _moved_aside(disk, path)
    missing = [folder for folder in (path, *path.absolute().parents) if not disk.exists(folder)]
    try:
        yield True
    except LockedError:
        raise  # another process is making it
    except BaseException:
        owner = read_owner(disk, path / LOCK)
        if owner is None or owner.pid != os.getpid() or owner.since < begun:
            raise
        with contextlib.suppress(ExpStoreError):
            lock = WriterLock(disk, path / LOCK)
            try:
                _restore(disk, path, names, missing, _moved_aside(disk, path) - moved)
            finally:
                lock.release()
        raise


def _moved_aside(disk: Disk, path: Path) -> set[str]:
    """Return the names to which mode "w" has moved stores of this path."""
    return {name for name in disk.names(path.parent) if name.startswith(f"{path.name}.old-")}


def _restore(disk: Disk, path: Path, names: set[str], missing: list[Path], moved: set[str]) -> None:
    """Remove what was made for a store, and bring back the one in whose place it came.

    Args:
        disk: Where files are touched.
        path: The new store; its lock is held.
        names: What its folder held before.
        missing: Folders that were not there before, the innermost first.
        moved: The names that stores have got that were in the way.
    """
    for name in disk.names(path):
        if moved or name not in names:
            found = path / name
            (disk.remove_tree if disk.is_dir(found) else disk.unlink)(found)
    for folder in [path] if moved else missing:
        if not disk.names(folder):
            disk.remove_tree(folder)
    if moved:
        disk.rename(path.with_name(moved.pop()), path)


def _check_reading(mode: Mode, writer: Writer | None, retain: Any, archive: Any) -> None:
    """Raise ValueError for what a reader has no use of."""
    if archive is not None and mode == "r":
        raise ValueError("archive= says where rows go that leave, and with mode='r' none do; leave it out")
    if retain is not None and mode == "r":
        raise ValueError("retain= says which rows are to leave, and with mode='r' none do; leave it out")
    if writer is not None and mode == "r":
        raise ValueError("writer= says where rows go, and with mode='r' none come; leave it out")


def _check_condition(
    retain: Retain | Mapping[str, Any] | None, schema: Schema | None, path: Path, mode: Mode
) -> None:
    """Raise QueryError if a policy's condition is not SQL, or not over the fields if they are known."""
    where = None if retain is None else Retain.of(retain).where
    if where is None:
        return
    from expstore.sql.expressions import Conditions  # loads DuckDB

    disk = ReadingDisk()
    if schema is None and mode == "a" and disk.exists(path / MANIFEST):
        schema = Manifest.load(disk, path).schema
    conditions = Conditions(where, None)
    if schema is not None:
        conditions.bind(schema)


def _find(path: Path, mode: Mode, version: int | str | None) -> tuple[Path, Mode]:
    """Return the folder of the store, and how it is to be opened: a version is read."""
    disk = ReadingDisk()
    if version is None and not is_snapshots(disk, path):
        return path, mode
    if mode not in ("a", "r"):
        raise StateError(f"{path} holds versions, which are only read", hint="choose another path")
    if version is None and mode != "r":
        raise StateError(
            f"{path} holds versions, which are only read",
            hint="open it with mode='r', or open a store and load them into it: rb.loads(path)",
        )
    return find_version(disk, path, version), "r"


def _open_storage(path: Path, capacity: int | None, settings: Settings) -> ReadView:
    if settings.mode == "r":
        return FollowerStorage(path, capacity, settings=settings)
    kept, schema = open_storage(path, capacity, settings=settings), settings.schema
    try:
        if schema is not None and kept.schema is None:
            kept.prepare(schema, keys_for(kept, schema))
        if settings.specs and not kept.description.specs:
            kept.settings.describe_fields(settings.specs)
    except BaseException:
        kept.close()
        raise
    return kept


def _in_buffer(kept: ReadView, **keywords: Any) -> TensorDictReplayBuffer:
    try:
        return TensorDictReplayBuffer(storage=kept, with_ids=True, **keywords)
    except BaseException:
        kept.close()
        raise
