"""`expstore.open`: open or create a store, and return its replay buffer.

Most programs call it first. It checks and combines the settings; the packages below do everything else.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expstore._settings import Batches, Durability, EpisodeKeys, Layout
from expstore.buffers.arguments import check_drawing
from expstore.buffers.domain_checks import row_text
from expstore.buffers.sample_units import check_unit
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cold.object_storage import ObjectStorage, is_object_url
from expstore.cold.reader import open_cached
from expstore.cold.ship_request import ShipRequests
from expstore.cold.ship_settings import Ship
from expstore.core.arguments import check_capacity, check_whole, refuse_keywords, refuse_unknown
from expstore.core.retention_policy import Retain
from expstore.core.values import Key, check_key, key_name, to_key
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.disk.writer_lock import WriterLock, read_owner
from expstore.errors import ArgumentError, ExpStoreError, LockedError, SchemaError, StateError
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.samplers.names import SamplerName, make_sampler
from expstore.schema.field_parser import schema_of
from expstore.schema.row_fields import check_no_sample_entry
from expstore.schema.schema import Schema
from expstore.specs import Composite, TensorSpec
from expstore.storages.engine.open_settings import Mode, Settings
from expstore.storages.factory import open_storage
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import LOCK
from expstore.storages.read_view import ReadView, keys_for
from expstore.storages.snapshots.catalog import find_version, is_snapshots
from expstore.transforms import Compose
from expstore.writers.writers import Writer

if TYPE_CHECKING:
    from expstore.cold.ship import Shipper

_logger = logging.getLogger("expstore")
#: The default settings of a new store.
_NEW = Settings(flatten=True, new_layout=ColumnLayout("auto"))

#: Settings by the keyword, or the object, that takes them.
_PARTS = {
    part.name: keyword
    for keyword, kind in {
        "batches": Batches,
        "durability": Durability,
        "episodes": EpisodeKeys,
        "layout": Layout,
        "retain": Retain,
    }.items()
    for part in fields_of(kind)
} | {
    name: f"path=expstore.cold.ObjectStorage(url, {name}=...)" for name in ("cache", "cache_bytes", "retries")
}
#: Arguments of TorchRL's buffers and storages, and what to write instead.
_PARTS |= {
    name: f"expstore.TensorDictReplayBuffer(storage=..., {name}=...)"
    for name in ("collate_fn", "dim_extend", "priority_key")
} | {
    "existsok": "mode='a', which continues with the rows of a store (the default)",
    "ndim": "expstore.TensorDictReplayBuffer(storage=expstore.LazyMemmapStorage(..., ndim=...))",
    "storage": "expstore.TensorDictReplayBuffer(storage=...)",
}


@refuse_unknown(_PARTS)
def open(
    path: str | Path | ObjectStorage,
    *,
    capacity: int | None = None,
    mode: Mode = "a",
    version: int | str | None = None,
    layout: Layout | Literal["zarr", "arrow", "auto", "packed", "flat"] | Mapping[str, Any] | None = None,
    schema: Schema | Mapping[Any, Any] | Composite | None = None,
    episodes: EpisodeKeys | Mapping[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
    batch_size: int | None = None,
    sampler: Sampler | SamplerName | None = None,
    writer: Writer | None = None,
    seed: int | None = None,
    batches: Batches | Mapping[str, Any] | None = None,
    durability: Durability | Literal["process", "sync"] | Mapping[str, Any] = "process",
    retain: Retain | Mapping[str, Any] | None = None,
    window: int | None = None,
    ship: Ship | str | ObjectStorage | None = None,
) -> TensorDictReplayBuffer:
    """Open the store in a folder, or create one.

    A setting that you leave out keeps its stored value. A setting that contradicts the store is an error.
    After a crash, opening recovers the store; `rb.recovered` says what was recovered.

    Args:
        path: The store's folder, usually named `something.exp`. `~` is the home folder. With mode "r" also
            the URL of versions that `expstore.cold.push` sent, `s3://bucket/prefix`, or an
            `expstore.cold.ObjectStorage`, which also says where they are cached and how much space the cache
            may take; other URLs are refused.
        capacity: The largest number of readable rows. None: a new store grows without bound.
        mode: "a" opens a store, or creates it. "x" creates a store and fails if there is one. "w" renames an
            existing store to `.old-1` and creates a new one. "r" opens a reader, which changes nothing and
            works with or without a running writer.
        version: Number or tag of a version that `dumps` or `tag` created; versions are read-only. None: if
            `path` has versions, mode "r" opens the newest one.
        layout: How fields are stored on disk: a `Layout`, a dict of its parts, or one word. "zarr", the
            default of new stores, stores fields of a fixed size. "arrow" also stores strings, lists, structs
            and tensors whose shapes differ. "packed" compresses fields of a fixed size, "flat" does not, and
            "auto", the default of new stores, chooses by the size of a row.
        schema: The fields of a row, or the values that they allow. A `Schema`, or a dict of types by key,
            fixes all fields before the first rows are written: `{"prompt": str, "tokens": ("int32", (None,)),
            ("next", "reward"): "float32"}`. A type is a dtype; a dtype and a row shape, with None for sizes
            that differ between rows; str; bytes; a pyarrow type; or a spec such as `Categorical(3)`, which
            also says which values are allowed. A `Composite` has specs of some fields, and the first batch
            fixes the others. A field that is None in all first rows has the type of its spec; a `NonTensor`
            without an example is text. Rows with other fields, dtypes or shapes are refused;
            `extend(validate="domain")` also checks values.
        episodes: Which fields identify episodes: an `EpisodeKeys`, or a dict of its parts. By default a new
            store finds these fields by TorchRL's names.
        meta: Your own facts about a new store, as values that JSON can store.
        batch_size: Rows per batch of `sample` and iteration.
        sampler: How the rows of a batch are chosen: a sampler, or the name of one with its defaults, such as
            "prioritized". Uniform by default. The error for an unknown name lists all names.
        writer: Where new rows are placed. By default the newest rows replace the oldest, or a store that
            another kind of writer filled continues with that kind. Not allowed with mode "r".
        seed: Seed of all draws. A new store without one picks a seed and stores it. With mode "r" it is the
            reader's own seed.
        batches: How batches are drawn and returned: a `Batches`, or a dict of its parts, such as
            `{"as_numpy": True}`.
        durability: What written rows survive. "process": rows survive the end of the process at once, and a
            power failure after the next sync. "sync": rows survive a power failure at once, for one fsync per
            call. A `Durability`, or a dict of its parts, has more settings.
        retain: Which rows a store without a capacity keeps, by bytes, age or an SQL condition: a `Retain`, or
            a dict of its parts. The policy is stored and applied every few seconds. It deletes whole
            episodes, and only after they have ended. A new policy replaces the stored one; `Retain()` keeps
            all rows.
        window: How many of the newest rows of a store without a capacity samplers see; all rows stay stored.
            Samplers, `len`, indices and iteration keep to the window, and their memory is bounded by it. SQL,
            `trajectory`, retention, versions and exports see all rows; the relation `recent` has the rows of
            the window. The number is stored; another one replaces it, a larger one brings rows back with
            their priorities, and 0 removes the window. Not allowed with mode "r", which uses the stored one.
        ship: Where the store is shipped to while it is open: a URL such as `s3://bucket/run`, or a `Ship`
            with more settings. If the folder is empty or missing, the newest state that was shipped there is
            restored first, and the store continues. Whoever opens the store last with this address is its
            only writer: an earlier one gets LockedError. Not with modes "r" and "w"; mode "x" restores
            nothing. None: it is not shipped.

    Returns:
        A buffer that is open for writing, or for reading with mode "r". Close it, or use it in a `with`
        block.

    Raises:
        ArgumentError: There is no such keyword or sampler, or a number is not a whole number.
        NotFoundError: Mode "r", and there is no store.
        SnapshotError: There is no such version; the message lists the versions that exist.
        LockedError: Another buffer has the store open for writing, or another machine opens it with the same
            `ship` at the same time.
        StateError: The path is not a folder, the folder holds something else, or a setting contradicts the
            store; the address of `ship` has another store, or rows that the folder lacks. A store that this
            call created is removed again.
        RemoteError: The server of `ship` does not answer, or refuses a request.
        CorruptionError: The store is damaged.
        QueryError: The condition of `retain` is not SQL, or names fields that the rows do not have.
        SchemaError: The layout or the specs do not fit the rows, or cannot be stored.

    Example:
        >>> with expstore.open("runs/demo.exp", capacity=100_000, batch_size=256) as rb:
        ...     rb.extend(batch)
        ...     rb.sample()
    """
    # Check everything before touching the folder.
    remote = _find_object_storage(path, mode)
    path = remote.cache if remote is not None else local_path(path)  # type: ignore[arg-type]
    kept, roles, out = Layout.of(layout), EpisodeKeys.of(episodes), Batches.of(batches)
    lasting = Durability.of(durability)
    capacity = None if capacity is None else check_capacity(capacity)
    seed = None if seed is None else check_whole("seed", seed)
    sampler = make_sampler(sampler) if isinstance(sampler, str) else sampler
    check_drawing(
        batch_size, out.prefetch, out.pin_memory,
        device=out.device, limiter=out.rate_limiter, capacity=capacity,
    )  # fmt: skip
    check_unit(out.sample_unit, sampler)
    window = None if window is None else _check_window(window, capacity)
    _check_reading(mode, writer, retain, window)
    shipper = None if ship is None else _make_shipper(ship, mode)
    sampler = consume_after(None, sampler, prefetch=out.prefetch)
    transform = Compose.of(out.transform)
    fields, specs = _read_schema(schema)
    if remote is None:
        path, mode = _find(path, mode, version)
    if shipper is not None and mode == "a":
        shipper.restore_missing(path)
    _check_condition(retain, fields, path, mode)
    settings = replace(
        _NEW, mode=mode, storage=kept.kind, layout=kept.to_column_layout(), compression=kept.compression,
        schema=fields, specs=specs, meta=meta, seed=seed, traj_key=roles.traj, done_keys=roles.done,
        reward_key=roles.reward, reward_reduce=roles.reward_reduce, done_reduce=roles.done_reduce,
        group_key=roles.group, group_size=roles.group_size,
        durability="sync" if lasting.sync else "process", min_free_bytes=lasting.min_free_bytes,
        on_sigterm=lasting.on_sigterm, window=window,
    ).with_retention(retain)  # fmt: skip
    with _undo_on_error(path, mode) as new:
        storage = (
            _open_storage(path, capacity, settings)
            if remote is None
            else open_cached(remote, version, capacity, settings)
        )
        rb = _wrap_in_buffer(
            storage, sampler=sampler, writer=writer, batch_size=batch_size,
            as_numpy=out.as_numpy, device=out.device, prefetch=out.prefetch, pin_memory=out.pin_memory,
            generator=out.generator, sample_unit=out.sample_unit, rate_limiter=out.rate_limiter,
            transform=transform, ragged=out.ragged, batch_tokens=out.batch_tokens, tokens_key=out.tokens_key,
        )  # fmt: skip
        if shipper is not None:
            try:
                shipper.start(storage)  # type: ignore[arg-type]  # mode "a" opens a `Store`
            except BaseException:
                rb.close()
                raise
        if mode != "r":
            storage.holders.take_requests = ShipRequests().take
    if new:
        _logger.info("created a new store: %s", path)
    return rb


def _read_schema(given: Schema | Mapping[Any, Any] | Composite | None) -> tuple[Schema | None, str]:
    """Return the schema and the text of the specs, each as far as it was given.

    Raises:
        SchemaError: A type or a spec cannot be stored.
        ArgumentError: The argument is not a schema.
    """
    if isinstance(given, Composite):
        check_no_sample_entry(to_key(name) for name in given.keys())  # noqa: SIM118 - see Composite
        return None, row_text(given)
    if given is None or isinstance(given, Schema):
        check_no_sample_entry(() if given is None else given.keys)
        return given, ""
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"schema is {_describe(given)}; use a Schema, a dict of types by key, or a Composite of "
            "expstore. from_torchrl and from_space of expstore.specs convert specs of TorchRL and spaces of "
            "gymnasium"
        )
    specs: dict[Key, TensorSpec] = {}
    schema = schema_of(_split_specs(given, (), specs))
    check_no_sample_entry(() if schema is None else schema.keys)
    return schema, row_text(Composite(specs)) if specs else ""


def _describe(given: Any) -> str:
    """Return a value for a message: itself if its class is Python's own, otherwise its class."""
    kind = type(given)
    return repr(given) if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"


def _split_specs(
    given: Mapping[Any, Any] | Composite, path: Key, specs: dict[Key, TensorSpec]
) -> dict[Any, Any]:
    """Replace each spec in a dict of types by its type, and collect the specs in `specs` by full key."""
    types: dict[Any, Any] = {}
    for name, value in given.items():
        key = (*path, *check_key("each key of schema", name))
        if isinstance(value, Mapping | Composite):
            types[name] = _split_specs(value, key, specs)
        elif isinstance(value, TensorSpec):
            if value.dtype is None:
                raise SchemaError(
                    f"field {key_name(key)!r}: {type(value).__name__} does not say how its values are stored",
                    hint="use a type, such as str, and give the specs to set_specs() of the buffer",
                )
            specs[key] = value
            types[name] = (value.dtype, tuple(None if size < 0 else size for size in value.shape))
        else:
            types[name] = value
    return types


@contextlib.contextmanager
def _undo_on_error(path: Path, mode: Mode) -> Iterator[bool]:
    """Delete the store that this block creates if the block fails; yield whether it will create one."""
    disk = Disk()
    if mode == "r" or (mode == "a" and disk.exists(path / MANIFEST)):
        yield False
        return
    names = set(disk.names(path) if disk.is_dir(path) else ())
    begun, moved = time.time(), _list_backups(disk, path)
    missing = [folder for folder in (path, *path.absolute().parents) if not disk.exists(folder)]
    try:
        yield True
    except LockedError:
        raise  # another process is creating the store
    except BaseException:
        owner = read_owner(disk, path / LOCK)
        if owner is None or owner.pid != os.getpid() or owner.since < begun:
            raise
        with contextlib.suppress(ExpStoreError):
            lock = WriterLock(disk, path / LOCK)
            try:
                _restore(disk, path, names, missing, _list_backups(disk, path) - moved)
            finally:
                lock.release()
        raise


def check_options(called: str, options: Mapping[str, Any], own: Collection[str]) -> None:
    """Raise ArgumentError if an option is no argument of `open`.

    Args:
        called: The class that passes its options to `open`, for the message.
        options: The options, without those of the class.
        own: The options of the class, which the message also suggests.
    """
    known = [*own, *(name for name in inspect.signature(open).parameters if name != "path")]
    refuse_keywords(f"{called}()", options, known, _PARTS)


def _list_backups(disk: Disk, path: Path) -> set[str]:
    """Return the names to which mode "w" has renamed stores of this path."""
    return {name for name in disk.names(path.parent) if name.startswith(f"{path.name}.old-")}


def _restore(disk: Disk, path: Path, names: set[str], missing: list[Path], moved: set[str]) -> None:
    """Delete the files that were created for a store, and rename the store that it replaced back to its path.

    Args:
        disk: File operations.
        path: The new store; its lock is held.
        names: Names in its folder before the call.
        missing: Folders that did not exist before the call, innermost first.
        moved: New names of the store that was in the way; empty if there was none.
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


def _check_window(window: int, capacity: int | None) -> int:
    """Return the number of rows of a window as an int; 0: no window."""
    rows = check_whole("window", window, hint="use a number of rows, or 0 to remove the window")
    if rows < 0:
        raise ArgumentError(f"window must be a number of rows, or 0 to remove the window, got {rows}")
    if rows and capacity is not None:
        raise ArgumentError(
            f"capacity={capacity} and window={rows} exclude each other: capacity deletes older rows, and "
            "window keeps them for SQL; leave one of them out"
        )
    return rows


def _check_reading(mode: Mode, writer: Writer | None, retain: Any, window: int | None) -> None:
    """Raise ValueError for a setting that a reader cannot use."""
    if window is not None and mode == "r":
        raise ArgumentError("window= cannot be used with mode='r': a reader has the stored one; leave it out")
    if retain is not None and mode == "r":
        raise ArgumentError("retain= cannot be used with mode='r': a reader deletes no rows; leave it out")
    if writer is not None and mode == "r":
        raise ArgumentError("writer= cannot be used with mode='r': a reader writes no rows; leave it out")


def _make_shipper(ship: Ship | str | ObjectStorage, mode: Mode) -> Shipper:
    """Return what ships the store; send no request.

    Raises:
        StateError: The mode is "r" or "w", or the URL is not valid.
    """
    if mode not in ("a", "x"):
        raise StateError(
            f"ship= cannot be used with mode={mode!r}",
            hint="use mode='a', which restores what was shipped, creates a store, or continues one",
        )
    from expstore.cold.ship import Shipper  # loads obstore

    return Shipper(Ship.of(ship))


def _check_condition(
    retain: Retain | Mapping[str, Any] | None, schema: Schema | None, path: Path, mode: Mode
) -> None:
    """Raise QueryError if the condition is not SQL, or names fields that a known schema does not have."""
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
    """Return the folder to open and the mode. A version is always opened with mode "r"."""
    disk = ReadingDisk()
    if version is None and not is_snapshots(disk, path):
        return path, mode
    if mode not in ("a", "r"):
        raise StateError(
            f"{path} is a folder of versions, and versions are read-only", hint="choose another path"
        )
    if version is None and mode != "r":
        raise StateError(
            f"{path} is a folder of versions, and versions are read-only",
            hint="open it with mode='r', or open a store and load them into it: rb.loads(path)",
        )
    return find_version(disk, path, version), "r"


def _find_object_storage(path: object, mode: Mode) -> ObjectStorage | None:
    """Return the address of versions on an object storage; None for a path.

    Raises:
        StateError: The mode is not "r", or the URL is not valid.
    """
    if isinstance(path, ObjectStorage):
        if mode != "r":
            raise StateError(
                f"{path.name} has versions, and versions are read-only",
                hint="open it with mode='r', or make a store of a version: expstore.cold.pull(url, path)",
            )
        return path
    return ObjectStorage(path) if mode == "r" and is_object_url(path) else None


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


def _wrap_in_buffer(kept: ReadView, **keywords: Any) -> TensorDictReplayBuffer:
    try:
        return TensorDictReplayBuffer(storage=kept, with_ids=True, **keywords)
    except BaseException:
        kept.close()
        raise
