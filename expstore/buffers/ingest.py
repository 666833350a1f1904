"""How rows are appended: convert data to columns, pass columns to the writer, and answer repeated writes.

`Ingest.append` is the whole path, from the user's data to the storage. It never draws batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tensordict import TensorDict, is_tensor_collection

from expstore.buffers.domain_checks import NO_DOMAIN, Domain, asks_for_domain, check_domain, set_types
from expstore.buffers.episodes import remote_session
from expstore.buffers.row_index import RowIndex
from expstore.buffers.row_styles import RowStyle
from expstore.buffers.sampling import Sampling
from expstore.buffers.store_handle import StoreHandle, StorePart
from expstore.buffers.write_options import WriteOptions
from expstore.buffers.writing_proxy import WritingProxy
from expstore.core import tuning
from expstore.core.idempotency import WriteKey, Written, key_reused
from expstore.core.values import Array, IntArray
from expstore.data.batch import Batch, Intake, Layout, StepReader, batch_of, is_plain, tensordict_of
from expstore.data.containers import is_tree, take
from expstore.data.mappings import take_mapping
from expstore.data.row_cells import Cells, compile_put, compile_put_tensordict, nest
from expstore.episodes.facts import pack_info, source_of_split
from expstore.episodes.segmentation import RunReader
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.schema.row_fields import ROW_BYTES
from expstore.schema.row_selection import pick
from expstore.schema.schema import OBJECT, Schema
from expstore.storages.base import Storage, add_new_fields, prepare, warn_once
from expstore.storages.batch import now_us
from expstore.storages.capabilities import RowAppending
from expstore.storages.format.records import LONGEST_COMPRESSED
from expstore.storages.read_view import ReadView, keys_for, layout_of
from expstore.storages.sessions import end_stream
from expstore.transforms import Compose
from expstore.wire.codec import Codec
from expstore.wire.tables import TableReader, describe_left_out, find_names, is_table
from expstore.writers.writers import RoundRobinWriter, Writer


@dataclass(frozen=True, slots=True)
class _Readers:
    """Readers of rows of one schema.

    Args:
        schema: The schema.
        steps: Reads the episode fields of rows: lanes, trajectory ids, ends.
        intake: Fast reader of batches that match the schema; None: rows need the general path.
        rows: Fast path of single rows; None: rows need the general path, or no row has been added yet.
        has_rows: Whether `rows` is final; an `add` compiles its code, which takes long for many fields.
    """

    schema: Schema
    steps: StepReader
    intake: Intake | None
    rows: _RowIntake | None = None
    has_rows: bool = False


@dataclass(frozen=True, slots=True)
class _RowIntake:
    """Fast path of single rows: dicts of arrays, or TensorDicts, with exactly the fields of the schema.

    Args:
        put: Writes a row that is a dict of arrays and numbers to the appender; see `compile_put`.
        put_tensordict: Writes a row that is a TensorDict; see `compile_put_tensordict`.
        runs: Reads the episode fields of the row.
        appender: Appends the row. Its memory is shared by the threads that hold the lock of the writers.
    """

    put: Callable[..., bool]
    put_tensordict: Callable[..., bool]
    runs: RunReader
    appender: RowAppending

    @classmethod
    def for_storage(cls, storage: Storage, schema: Schema) -> _RowIntake | None:
        """Return the fast path for a storage; None: it appends single rows no faster than batches."""
        appender = storage.row_appender(schema)
        flat = [one for place, one in enumerate(schema.fields) if place not in storage.unviewed_places]
        if (
            appender is None
            or sum(entry.row_bytes for entry in flat) + ROW_BYTES > tuning.MEMTABLE_BATCH_BYTES
            or schema.row_bytes + ROW_BYTES > LONGEST_COMPRESSED
        ):
            return None  # long rows are written to the columns at once
        sizes = np.cumsum([entry.row_bytes for entry in schema.fields])
        columns = {
            entry.key: part.view(entry.numpy_dtype).reshape(1, *entry.shape)
            for part, entry in zip(np.split(appender.fields, sizes[:-1]), schema.fields, strict=True)
        }
        cells = {key: Cells.of(column, takes_numbers=column.ndim == 1) for key, column in columns.items()}
        runs = RunReader(schema, storage.keys, list(columns.values()))
        return cls(compile_put([nest(cells)]), compile_put_tensordict(columns), runs, appender)


class Ingest(StorePart):
    """Append rows to a store.

    Threads: any number may append; they wait for one another. Crashes: rows of a write that returned survive
    the end of the process; a write that did not return is applied completely or not at all.

    Args:
        store: The store.
        index: How users number rows; it knows which dim of a batch is time.
        sampling: The sampling part: its sampler is notified of new rows, and `extend` skips the keys that its
            samples add.
        style: Which data are accepted, and where priorities are.
        transform: Transforms of rows before they are stored.
        writer: Assigns places to rows.
        limiter: Limits how fast rows may be written; None: no limit.
        skips_metadata: Whether to skip the root key `metadata`, which samples have.
    """

    def __init__(
        self,
        store: StoreHandle,
        index: RowIndex,
        sampling: Sampling,
        style: RowStyle,
        transform: Compose,
        writer: Writer,
        limiter: RateLimiter | None,
        *,
        skips_metadata: bool,
    ) -> None:
        self._store = store
        self._index = index
        self._sampling = sampling
        self._style = style
        self._takes_priorities = style.takes_priorities(None)
        self._transform = transform
        #: Assigns places to rows.
        self.writer = writer
        self._limiter = limiter
        self._skips_metadata = skips_metadata
        self._domain: Domain = NO_DOMAIN
        self._readers: _Readers | None = None
        self._tables = TableReader()

    def attach(self, storage: ReadView) -> None:
        """Write to a storage from now on; drop what was cached for the previous one's schema."""
        self.writer.register_storage(storage)
        self.writer.tell_writes(self._tell_sampler)
        self._readers = None

    def _tell_sampler(self, ids: IntArray) -> None:
        """Notify the sampler of rows that were passed to the writer directly."""
        if (sampler := self._sampling.sampler).hears_writes:
            sampler.on_write(ids)

    def leave_parent(self) -> None:
        """Drop what was cached for the schema."""
        self._readers = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return vars(self) | {"_readers": None, "_tables": TableReader()}

    def set_writer(self, writer: Writer) -> Writer:
        """Place rows by another writer from now on; return the previous one.

        Raises:
            ArgumentError: The argument is not a writer.
        """
        if not isinstance(writer, Writer):
            raise ArgumentError(f"the writer must be a Writer, got a {type(writer).__name__}")
        storage = self._store.storage
        writer.register_storage(storage)
        writer.tell_writes(self._tell_sampler)
        with storage.lock:
            former, self.writer = self.writer, writer
        return former

    # -- the path of a write -----------------------------------------------------------------------

    def options(
        self,
        *,
        source: str | None = None,
        episode_info: Mapping[str, Any] | None = None,
        split: str | None = None,
        update_priority: bool | None = None,
        validate: str = "schema",
        idempotency_key: str | bytes | None = None,
        digest: bytes | None = None,
        session: str | None = None,
        return_ids: bool = False,
    ) -> WriteOptions:
        """Check the arguments of a write; see `ReplayBuffer.extend`."""
        return WriteOptions(
            source if split is None else source_of_split(source, split),
            "" if episode_info is None and split is None else pack_info(episode_info, split),
            None
            if idempotency_key is None and digest is None
            else make_key(self.writer, idempotency_key, digest),
            None if session is None else remote_session(session),
            validate != "schema" and asks_for_domain(validate),
            self._takes_priorities
            if update_priority is None
            else self._style.takes_priorities(update_priority),
            return_ids,
        )

    def add_plain(self, row: dict[str, Any] | TensorDict, source: str | None) -> int:
        """Append a row in a fraction of the time of `append`; return its index, or -1 if it needs `append`.

        The row must have exactly the fields of the schema, it must be certain which episode it continues or
        begins, and no transform, writer, sampler or limiter may have to process it.

        Args:
            row: Nested dicts of arrays and numbers, or a TensorDict.
            source: As in `WriteOptions`.
        """
        storage, readers = self._store.storage, self._readers
        if readers is not None and not readers.has_rows:
            readers = self._compile_rows(storage, readers)
        intake = None if readers is None else readers.rows
        if (
            intake is None
            or readers is None
            or readers.schema is not storage.schema
            or not self.is_plain(readers.schema)
            or not (source is None or type(source) is str)
        ):
            return -1
        put = intake.put if type(row) is dict else intake.put_tensordict
        with storage.locks.extend:
            if not put(0, row):
                return -1
            row_id = intake.appender.append(source, intake.runs.read())
        capacity = storage.geometry.capacity
        return row_id - 1 if capacity is None or not row_id else (row_id - 1) % capacity

    def _compile_rows(self, storage: ReadView, readers: _Readers) -> _Readers | None:
        """Return readers with the fast path of single rows, if there is one and the fields are the same."""
        with storage.lock:
            if readers is self._readers and readers.schema is storage.schema:
                rows = None
                if readers.intake is not None and self._store.proxy is None:
                    rows = _RowIntake.for_storage(storage.writer(), readers.schema)
                self._readers = replace(readers, rows=rows, has_rows=True)
            return self._readers

    def append(self, data: Any, options: WriteOptions, *, single: bool = False) -> IntArray:
        """Append rows, all of them or none.

        Args:
            data: The rows.
            options: The options of the write.
            single: Whether `data` is one row, or one row for each lane.

        Returns:
            The index, or id, of each row; -1 for rows that were dropped. Shape `(n,)`.
        """
        storage, key = self._store.storage, options.key
        proxy = self._store.proxy
        if proxy is not None:
            return self._append_by(proxy, storage, data, options, single=single)
        if key is not None and (known := _find_write(storage, key)) is not None and not known.dropped:
            return _numbers_of(storage, known, options.return_ids)
        batch = self._to_batch(storage, data, single=single)
        if batch is None:
            return np.zeros(0, np.int64)
        if self._limiter is None:
            return self._write(storage, batch, options)
        return self._write_in_time(storage, batch, options, self._limiter)

    def append_batch(self, batch: Batch, options: WriteOptions, check: Callable[[], None]) -> IntArray:
        """Append rows that are columns already; return the index, or id, of each. Shape `(n,)`.

        Args:
            batch: The rows.
            options: The options of the write.
            check: Called now and then while the rate limiter makes the write wait; raises to give it up.
        """
        storage = self._store.storage
        if self._limiter is None:
            return self._write(storage, batch, options)
        return self._write_in_time(storage, batch, options, self._limiter, check)

    def _append_by(
        self, proxy: WritingProxy, storage: ReadView, data: Any, options: WriteOptions, *, single: bool
    ) -> IntArray:
        """Append rows through the process that has the store open."""
        for attempt in (1, 2):
            if storage.schema is None:
                storage.follow()
            known = storage.schema
            if known is not None and (self._readers is None or self._readers.schema is not known):
                self._readers = self._make_readers(storage, known)
            batch = self._to_batch(storage, data, single=single)
            if batch is None or batch.count == 0:
                return np.zeros(0, np.int64)
            try:
                numbers, outdated = proxy.append(batch, options, known)
            except SchemaError:
                storage.follow()
                if attempt == 2 or storage.schema is known or self._transform.transforms:
                    raise
                continue  # the fields have changed: the values may have to become other dtypes
            if outdated:
                storage.follow()
            return numbers
        raise AssertionError("unreachable")

    def _to_batch(self, storage: ReadView, data: Any, *, single: bool) -> Batch | None:
        """Convert data to columns; None: a transform dropped the batch."""
        if self._transform.transforms:
            data = self.invert(data, storage.ndim - single, single=single)
            if data is None:
                return None
        readers = self._readers
        if readers is not None and readers.intake is not None:
            intake = readers.intake
            quick = (intake.take_arrays if type(data) is dict else intake.take)(data, single=single)
            if quick is not None:
                return quick
        self._style.check_data(data, has_fields=self._has_fields(data))
        layout = layout_of(storage, self._index.asked_time_dim)
        batch = self.read_columns(data, layout, single=single)
        if storage.row_traits.undecided and OBJECT in batch.dtypes:
            return self.read_columns(data, replace(layout, typed=True), single=single)
        return batch

    def _write_in_time(
        self,
        storage: ReadView,
        batch: Batch,
        options: WriteOptions,
        limiter: RateLimiter,
        check: Callable[[], None] | None = None,
    ) -> IntArray:
        """Write a batch once the rate limiter permits it."""

        def is_needless() -> bool:
            if check is not None:
                check()
            return _is_known(storage, options.key)

        storage.writer()
        with limiter.wait_to_insert(batch.count, needless=is_needless):
            return self._write(storage, batch, options)

    def _write(self, storage: ReadView, batch: Batch, options: WriteOptions) -> IntArray:
        """Write a batch; return the index, or id, of each row. The rate limiter has been asked."""
        if batch.arranged is None:
            storage.writer()
            self.writer.check()
            self.add_new_fields(storage, batch)
        with storage.locks.extend, storage.lock:
            writable, key = storage.writer(), options.key
            self.writer.check()
            written = None if key is None else _find_write(storage, key)
            if written is not None and not written.dropped:
                return _numbers_of(storage, written, options.return_ids)
            if batch.count == 0:
                return np.zeros(0, np.int64)
            if options.checks_domain:
                self._domain = check_domain(storage, batch, self._domain)
            readers = self._readers
            if readers is None or not batch.arranged is readers.schema is writable.schema:
                readers = self._prepare(writable, batch)
            columns = batch.columns(readers.schema)
            kept = readers.steps.transitions(columns) if readers.steps.skips_rows else None
            if written is not None:
                return _numbers_in_part(storage, written, kept, options.return_ids)
            if kept is not None:
                batch, columns = batch.keep(kept), [pick(column, kept) for column in columns]
            if batch.count == 0:
                return np.full(0 if kept is None else kept.size, -1)
            steps = readers.steps.read(columns, batch)
            steps.session = options.session
            sampler = self._sampling.sampler
            priorities = None
            if options.takes_priorities:
                priorities = self._style.priorities_in(sampler, readers.schema, columns)
            keyed = {} if key is None else {"key": replace(key, dropped=kept is not None)}
            if options.restarts:
                end_stream(writable, options.source, session=options.session)
            last = storage.state.stored.last
            ids = self.writer.write(
                writable, columns, steps, source=options.source, info=options.info, **keyed
            )
            # If all rows were appended, their ids are consecutive.
            run = storage.state.stored.last - last == ids.size
            if priorities is not None:
                writable.set_priorities(ids, priorities)
            if sampler.hears_writes:
                sampler.on_write(ids if run else ids[ids != -1])
        numbers = ids if options.return_ids else storage.geometry.indices_of(ids, run=run)
        return numbers if kept is None else _spread(numbers, kept)

    def add_new_fields(self, storage: ReadView, batch: Batch) -> None:
        """Add the fields of a batch that a storage of TorchRL's kind in RAM lacks; the caller holds no lock.

        Raises:
            SchemaError: The batch does not fit the storage; nothing was changed.
            StateError: Rows cannot be written.
        """
        if add_new_fields(storage, batch):
            self._sampling.drop_prefetched()

    @property
    def is_limited(self) -> bool:
        """Whether a rate limiter may make a write wait."""
        return self._limiter is not None

    # -- for recorders -----------------------------------------------------------------------------

    def schema(self) -> Schema | None:
        """Return the schema; None before the first rows."""
        return self._store.storage.schema

    def fix_fields(self, row: Mapping[str, Any]) -> Schema:
        """Fix the schema by the fields of one row, without writing the row; return the schema.

        Raises:
            SchemaError: Rows of this store have no fields, or other fields.
            StateError: The store cannot be written.
        """
        storage = self._store.storage
        if storage.row_traits.whole:
            raise SchemaError(
                f"rows of a {type(storage).__name__} are objects without fields, but a step has fields",
                hint="use a LazyTensorStorage, a MemoryStorage, or expstore.open()",
            )
        proxy = self._store.proxy
        if proxy is not None:
            layout = layout_of(storage, self._index.asked_time_dim)
            proxy.fix_fields(self.read_columns(dict(row), layout, single=True))
            storage.follow()
            return storage.require_schema()
        with storage.lock:
            writable = storage.writer()
            layout = layout_of(storage, self._index.asked_time_dim)
            return self._prepare(writable, self.read_columns(dict(row), layout, single=True)).schema

    def fix_fields_of(self, batch: Batch) -> None:
        """Fix the fields by those of a batch, which is not written."""
        with self._store.storage.lock:
            self._prepare(self._store.storage.writer(), batch)

    def read_step(self, values: Mapping[str, Any], *, single: bool) -> Batch:
        """Convert a step to columns: one row, or one for each lane.

        Args:
            values: Values by field name, nested; with lanes their first dim is the lanes.
            single: Whether it is one row.
        """
        layout = layout_of(self._store.storage, self._index.asked_time_dim)
        return self.read_columns(dict(values), layout, single=single)

    def append_columns(self, batch: Batch, source: str | None, info: str = "") -> None:
        """Append rows whose columns are in the schema's order.

        Args:
            batch: The rows.
            source: Name of the stream; None: the session's unnamed stream.
            info: Facts about all of their episodes, as JSON text.
        """
        storage = self._store.storage
        if self._transform.transforms:
            schema = storage.require_schema()
            rows = tensordict_of(batch_of(schema, batch.arrays), single=False)
            changed = self._to_batch(storage, rows, single=False)
            if changed is None:
                return
            if batch.lanes is not None and changed.count not in (0, batch.count):
                raise SchemaError(
                    f"transforms turned {batch.count} steps of several lanes into {changed.count} rows",
                    hint="transforms of steps of several lanes must keep their number, or drop all of them",
                )
            batch = replace(changed, lanes=batch.lanes, lane_count=batch.lane_count)
        options = WriteOptions(source, info, takes_priorities=self._takes_priorities, return_ids=True)
        proxy = self._store.proxy
        if proxy is not None:
            proxy.append(batch, options, storage.schema)
        elif self._limiter is None:
            self._write(storage, batch, options)
        else:
            self._write_in_time(storage, batch, options, self._limiter)

    def is_plain(self, schema: Schema) -> bool:
        """Return whether only the storage has to process rows.

        It is False if a transform, limiter, priority, or another kind of writer is involved, or the sampler
        must be notified of writes. It is checked for each row, as these can be set at any time.

        Args:
            schema: The fields of the rows.
        """
        sampler, writer = self._sampling.sampler, type(self.writer)
        return (
            not sampler.hears_writes
            and writer.write is RoundRobinWriter.write
            and writer.check is Writer.check
            and self._limiter is None
            and not self._transform.transforms
            and self._style.priority_place(sampler, schema) < 0
        )

    def row_appender(self, schema: Schema, rows: int) -> RowAppending | None:
        """Return an appender that is faster than `append_columns` while `is_plain`, or None.

        Args:
            schema: The fields of the rows.
            rows: Number of rows that are appended together.
        """
        if self._store.proxy is not None:
            return None
        return self._store.storage.writer().row_appender(schema, rows)

    def run_reader(self, schema: Schema, columns: Sequence[Array]) -> RunReader:
        """Return a reader of the episode fields of rows; for rows that `row_appender` appends.

        Args:
            schema: The fields of the rows.
            columns: Their values, one array per field. Shapes `(n, *row shape)`.
        """
        return RunReader(schema, self._store.storage.keys, columns)

    def cut(self, source: str | None, lanes: Sequence[int] | None = None) -> None:
        """End the open episodes of a stream of this session; see `RecorderTarget.cut`."""
        storage, proxy = self._store.storage, self._store.proxy
        if proxy is not None:
            proxy.end(source, unnamed=source is None, lanes=lanes)
            return
        with storage.lock:
            table = storage.episodes
            named = [] if source is None else table.sources_named(source, session=table.session)
            if table.waiting_heirs().isdisjoint(named):
                end_stream(storage, source, session=table.session, lanes=lanes)

    def _prepare(self, storage: Storage, batch: Batch) -> _Readers:
        """Return the readers of the schema, which the first rows fix. The caller holds the lock."""
        if storage.schema is None:
            set_types(batch, storage)
            first = Schema.infer(batch.signature(), batch.form)
            self.writer.check_fields(first)
            # Rows that are refused do not fix the fields.
            StepReader(first, keys_for(storage, first)).read(batch.columns(first), batch)
            self.writer.begin(storage)
        schema = prepare(storage, batch) if batch.arranged is None else storage.schema
        readers = self._readers
        if readers is None or readers.schema is not schema:
            schema = storage.require_schema()
            if self._limiter is None and storage.draws.limits[1]:
                storage.draws.note_limits(0, 0)  # its counts are incomplete from now on
            readers = self._readers = self._make_readers(storage, schema)
        return readers

    def _make_readers(self, storage: ReadView, schema: Schema) -> _Readers:
        """Return what reads rows of a schema, except single rows."""
        is_quick = (
            is_plain(schema.form)
            and not schema.written.variable
            and all(entry.dtype != "bfloat16" for entry in schema.fields)  # NumPy has only its bits
            and storage.geometry.ndim == 1
            and not self._index.time_dim
        )
        steps = StepReader(schema, storage.keys)
        return _Readers(schema, steps, Intake(schema.written) if is_quick else None)

    # -- data as columns -----------------------------------------------------------------------------

    def invert(self, data: Any, dims: int, *, single: bool) -> Any:
        """Apply the inverse transforms to rows; return None if a transform drops the batch.

        Args:
            data: The rows; dicts and tables are converted to TensorDicts for the transforms.
            dims: Number of leading dims that make rows.
            single: Whether `data` is one row, or one row for each lane.
        """
        if self._has_fields(data):
            layout = replace(layout_of(self._store.storage), ndim=1, dim=0, all_dims=True)
            data = tensordict_of(self.read_columns(data, layout, single=not dims), single=not dims)
            if dims > 1:
                data.batch_size = next(iter(data.values(True, True))).shape[:dims]
        return self._transform.inverse(data, single=single)

    def read_columns(self, data: Any, layout: Layout, *, single: bool) -> Batch:
        """Convert rows of any kind to columns."""
        skip = self._sampling.own_keys
        if self._skips_metadata:
            skip |= {"metadata"}
        schema = self._store.storage.schema
        if schema is None and (names := find_names(data, skip)):
            warn_once(self._store.storage, describe_left_out(names), "left out")
        if not self._has_fields(data):
            return take(data, layout, single=single, skip=skip)
        if single and not isinstance(data, Mapping):
            raise SchemaError(f"add() takes a single row, got a {type(data).__name__}", hint="use extend()")
        if isinstance(data, (Mapping, list)):  # TensorDicts, which are Mappings too, were handled above
            return take_mapping(data, layout, single=single, skip=skip, schema=schema)
        table, columns = self._tables.read(data, schema, skip=skip)
        if len(table.batch_size) > 1:
            built = Codec(table.schema).build(columns, table.batch_size, table.names)
            return take(built, layout, skip=skip)
        return batch_of(table.schema, columns)

    def _has_fields(self, data: Any) -> bool:
        """Return whether the data are dicts or an Arrow table, whose names are names of fields.

        A dict does not count if rows of the store are trees or objects.
        """
        if is_table(data):
            return True
        first = data[0] if isinstance(data, list) and data else data
        storage = self._store.storage
        if is_tensor_collection(first) or not isinstance(first, Mapping) or storage.row_traits.whole:
            return False
        schema = storage.schema
        return self._style.dicts_have_fields if schema is None else not is_tree(schema.form)


# -- idempotency keys -----------------------------------------------------------------------------------


def make_key(writer: Writer, key: str | bytes | None, digest: bytes | None) -> WriteKey | None:
    """Return the key of a write; None: the write has no key.

    Raises:
        StateError: The writer does not support keys.
        ArgumentError: A digest is given without a key, or they are not bytes; the key is empty, or the digest
            does not have 16 bytes.
    """
    if key is None:
        if digest is not None:
            raise ArgumentError("digest requires idempotency_key; give both, or neither")
        return None
    if not writer.keeps_keys:
        raise StateError(
            f"{writer!r} does not support idempotency keys, as it does not keep the rows of a batch together",
            kind="no_keys",
            hint="leave idempotency_key out",
        )
    return WriteKey.of(key, digest)


def _find_write(storage: ReadView, key: WriteKey) -> Written | None:
    """Return the result of the earlier write with a key; None: there was none.

    Raises:
        StateError: The key belongs to another write, or the storage cannot be written.
    """
    storage.writer()  # after an interruption this reads the journal, which knows what was written
    return storage.state.write_keys.find(key, now_us())


def _is_known(storage: ReadView, key: WriteKey | None) -> bool:
    """Return whether a write with this key is done; another thread may have done it while this one waited."""
    return key is not None and storage.state.write_keys.find(key, now_us()) is not None


def _numbers_in_part(storage: ReadView, known: Written, kept: Array | None, return_ids: bool) -> IntArray:
    """Return indices, or ids, of a repeated batch; -1 for rows that were dropped.

    Args:
        storage: Storage of the rows.
        known: The result of the first write.
        kept: Whether each row of the batch is kept; None: all are. Shape `(n,)`.
        return_ids: Whether to return ids.

    Raises:
        StateError: The first write had another number of rows.
    """
    if kept is None or np.count_nonzero(kept) != known.count:
        raise key_reused(known)
    return _spread(_numbers_of(storage, known, return_ids), kept)


def _numbers_of(storage: ReadView, known: Written, return_ids: bool) -> IntArray:
    """Return indices, or ids, of the rows of an earlier write. Shape `(n,)`."""
    ids = np.arange(known.first_id, known.last_id + 1)
    return ids if return_ids else storage.geometry.indices_of(ids, run=True)


def _spread(numbers: IntArray, kept: Array) -> IntArray:
    """Return numbers at the positions of kept rows and -1 elsewhere. Shape `kept.shape`."""
    found = np.full(kept.size, -1, np.int64)
    found[kept] = numbers
    return found
