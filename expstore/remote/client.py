"""Use a store that a server serves as a replay buffer.

Used by programs that train or act on other machines. `expstore.remote.transport` sends and retries requests,
`expstore.wire.codec` encodes rows. This module keeps no rows and touches no file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection, lazy_stack

from expstore.buffers import changes, measuring
from expstore.buffers.annotations import pack_annotations
from expstore.buffers.consumer import Keep, Place
from expstore.buffers.domain_checks import asks_for_domain
from expstore.buffers.groups import Ending, Groups
from expstore.buffers.member import Member, Part
from expstore.buffers.selections import Selections
from expstore.core.arguments import check_params, check_whole
from expstore.core.values import IntArray
from expstore.data.batch import Layout, tensordict_of
from expstore.data.mappings import take_mapping
from expstore.data.to_arrays import to_array, to_arrays
from expstore.episodes.facts import pack_info
from expstore.episodes.selections import SelectionChange
from expstore.errors import ArgumentError, NotFoundError, QueryError, SchemaError, StateError
from expstore.remote.connect_options import ConnectOptions
from expstore.remote.consumer import RemoteConsumer, RemoteConsumers
from expstore.remote.http_member import HttpMember
from expstore.remote.local_only import LocalEpisodes
from expstore.remote.served_buffer import ServedBuffer
from expstore.remote.snapshots import RemoteSnapshots
from expstore.remote.transport import ARROW, Answer, Connection
from expstore.samplers.given_order import Missing
from expstore.schema.row_fields import SAMPLE_ENTRIES
from expstore.schema.schema import Schema
from expstore.sql.result import Result, build_result
from expstore.storages.episode_lookup import check_episode
from expstore.storages.snapshots.catalog import Version
from expstore.trajectories.odd import THRESHOLD
from expstore.wire.codec import Codec, Decoder, Encoder, with_wishes
from expstore.wire.frames import Frame
from expstore.wire.stream import frames_in, read_table, write_stream
from expstore.wire.tables import TableReader, describe_left_out, find_names, is_table, to_table

_logger = logging.getLogger("expstore")
#: Batches that an iteration asks for at a time: about a megabyte of small ones goes into a part of an answer.
_AHEAD = 32
_Result = TypeVar("_Result")


class RemoteReplayBuffer(ServedBuffer[int]):
    """A replay buffer over a store on a server.

    It has the methods of the buffer that `expstore.open` returns. Methods that need direct access to the rows
    raise RemoteError, which says what to do instead. Rows are identified by their ids. Samples have `index`
    too, but another process may write another row there between two requests.

    Threads: any number may use it. Processes: in a forked child, and in a process that unpickles it, it opens
    new connections and continues to count draws where the original was. Crashes: rows survive a crash of the
    server's process once the write has returned, and a power failure of its machine after `flush`. A request
    without an answer is sent again, for as long as `retries` says; a repeated write is applied only once.
    Stores that keep the best rows do not support idempotency keys: there, a write whose answer is lost is not
    sent again.

    Args:
        connection: The connection to the server.
        options: What is drawn, and how it is returned.
    """

    def __init__(self, connection: Connection, options: ConnectOptions | None = None) -> None:
        options = options or ConnectOptions()
        super().__init__(options)
        self._connection, self._decoder = connection, Decoder()
        #: Draws, weighs and sets priorities.
        self._wait, self._prefetch = options.wait or 0.0, options.prefetch or _AHEAD
        self.member = HttpMember(connection, wait=self._wait)
        self._fields: Schema | None = None
        self._has_warned = False  # of names that are left out
        self._seed, self._draw, self._wanted = options.seed, options.draw, options.build_draw()
        self._largest = 1.0
        #: Called with the server's answer to each write of rows, a dict.
        self.on_write: Callable[[Mapping[str, Any]], None] | None = None
        self._keyed = True  # until the store reports that its writer does not support keys
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy in another process, without locks and the current iteration."""
        own = ("_lock", "_encoder")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state that `__getstate__` returned."""
        super().__setstate__(state)
        self._lock = threading.Lock()

    # -- writing ---------------------------------------------------------------------------------

    def _extend(self, data: Any, source: str | None, options: dict[str, Any]) -> torch.Tensor:
        if isinstance(data, list) and not data:
            return torch.zeros(0, dtype=torch.int64)
        if is_table(data):
            data = to_table(data)

        def write() -> IntArray:
            return self._write("extend", self._tensordict_of(data, single=False), source, **options)

        return torch.from_numpy(self._with_fields(write))

    def _add(self, data: Any, source: str | None, options: dict[str, Any]) -> int:
        def write() -> IntArray:
            row = self._tensordict_of(data, single=True)
            _check_rows(row)
            if row.ndim:
                raise SchemaError(
                    f"one row has no batch dims, but this has batch size {list(row.shape)}",
                    hint="extend() it",
                )
            return self._write("add", row.unsqueeze(0), source, **options)

        return int(self._with_fields(write)[0])

    def _tensordict_of(self, data: Any, *, single: bool) -> Any:
        """Return rows as a TensorDict, which is what is sent; return other values unchanged."""
        first, skip = data[0] if isinstance(data, list) and data else data, frozenset(SAMPLE_ENTRIES)
        names = [] if self._has_warned else find_names(data, skip)
        if names and self._fetch_fields() is None:
            self._has_warned = True
            _logger.warning(describe_left_out(names))
        if is_tensor_collection(first):
            return lazy_stack(data) if isinstance(data, list) else data
        if is_table(data) and not single:
            told, columns = TableReader().read(data, self._fetch_fields(), skip=skip)
            return Codec(told.schema).build(columns, told.batch_size, told.names)
        if not isinstance(first, Mapping):
            return data
        single = single and not isinstance(data, list)
        batch = take_mapping(data, Layout(typed=True), single=single, skip=skip, schema=self._fetch_fields())
        return tensordict_of(batch, single=single)

    def _with_fields(self, write: Callable[[], IntArray]) -> IntArray:
        """Write rows; if they do not fit, and the store has other fields than it had, write them again."""
        known = self._fields
        try:
            return write()
        except SchemaError:
            if known is None or self.schema == known:
                raise
        self._fields = None
        return write()

    def _fetch_fields(self) -> Schema | None:
        """Return the fields of the store; None if it has none yet."""
        if self._fields is None:
            self._fields = self.schema
        return self._fields

    def _write(
        self,
        route: str,
        data: TensorDictBase,
        source: str | None,
        *,
        episode_info: Mapping[str, Any] | None,
        split: str | None,
        validate: str,
        update_priority: bool | None = None,
    ) -> IntArray:
        _check_rows(data)
        pack_info(episode_info, split)  # raises if they cannot be stored
        told = {
            "split": split,
            "episode_info": episode_info and dict(episode_info), "update_priority": update_priority,
            "validate": "domain" if asks_for_domain(validate) else None,
        }  # fmt: skip
        if not data.numel():
            return np.zeros(0, np.int64)
        own = [name for name in SAMPLE_ENTRIES if data.get(name) is not None]
        if own:  # a sample is stored again without them, as in a local store
            data = data.exclude(*own)
        wishes = {name: value for name, value in told.items() if value is not None}
        self._fetch_fields()  # variable-length rows are sent with the types of the store
        rows = self._encoder.encode(data)
        body = write_stream(with_wishes(rows, wishes) if wishes else rows).to_pybytes()
        params = None if source is None else {"source": source}
        found = self._send(route, body, params).json()
        self._largest = float(found["largest_priority"])
        if self.on_write is not None:
            self.on_write(found)
        if found.get("ids") is not None:
            return np.asarray(found["ids"], np.int64)
        first = found["first_id"]
        return np.arange(first, first + found["count"], dtype=np.int64)

    def _send(self, route: str, body: bytes, params: Mapping[str, str] | None) -> Answer:
        """Send rows: repeatedly with one idempotency key, or once if the store does not support keys."""
        ask = partial(self._connection.request, "POST", route, body=body, kind=ARROW, params=params)
        if self._keyed:
            try:
                return ask(write=True)
            except StateError as exc:
                if exc.kind != "no_keys":
                    raise
                self._keyed = False
        return ask(once=True)

    # -- sampling and reading --------------------------------------------------------------------

    def _sample(self, size: int, return_info: bool, include_info: bool | None, as_numpy: bool | None) -> Any:
        number = None
        if self._seed is not None:
            with self._lock:
                number, self._draw = self._draw, self._draw + 1
        try:
            part = self.member.draw(self._wanted._replace(number=number), size)
        except BaseException:
            with self._lock:
                if number is not None and self._draw == number + 1:  # no other thread has drawn since
                    self._draw = number
            raise
        return self._finish(self._build(part), return_info, include_info, as_numpy)

    def _finish(
        self, batch: TensorDict, return_info: bool, include_info: bool | None, as_numpy: bool | None
    ) -> Any:
        rows, info = self._split_info(batch, return_info, include_info)
        return self._convert((rows, info) if return_info else rows, as_numpy)

    def _convert(self, batch: Any, as_numpy: bool | None) -> Any:
        """Return a batch, as NumPy arrays if `as_numpy` is True; None means the buffer's setting."""
        return to_arrays(batch) if (self._as_numpy if as_numpy is None else as_numpy) else batch

    def _stream(self, size: int, batches: int | None, as_numpy: bool | None) -> Generator[Any]:
        given = 0
        while batches is None or given < batches:
            begin, left = self._draw, None if batches is None else batches - given
            draw = self._wanted._replace(number=None if self._seed is None else begin)
            with closing(self.member.stream(draw, size, batches=left, ahead=self._prefetch)) as parts:
                for number, part in enumerate(parts, begin):
                    if self._is_next(number):
                        given += 1
                        yield self._convert(self._build(part), as_numpy)
            if self._seed is None:
                return

    def _is_next(self, number: int) -> bool:
        """Return whether a prefetched draw was not already returned by a call of `sample`."""
        with self._lock:
            if self._seed is not None and number < self._draw:
                return False
            if self._seed is not None:
                self._draw = number + 1
            return True

    def _read_rows(self, ids: IntArray) -> TensorDict:
        return self._rows("POST", "rows", {"ids": ids.tolist()})

    def _read_episode(self, episode: int) -> TensorDict:
        number = check_episode(episode)
        if not 0 <= number < 1 << 63:
            raise NotFoundError(f"there is no episode {number}")
        return self._rows("GET", f"episodes/{number}")

    def _rows(self, method: str, route: str, body: Any = None, *, wait: float = 0.0) -> TensorDict:
        answer = self._connection.request(method, route, body=body, accept=ARROW, wait=wait)
        return self._place(self._decoder.read(frames_in(answer.body)[0]))

    def _build(self, part: Part) -> TensorDict:
        return self._place(part.codec.build(part.columns))

    def _place(self, rows: TensorDict) -> TensorDict:
        return rows if self._device is None else rows.to(self._device)

    def _ask_each(self, act: Callable[[Member], _Result]) -> list[_Result]:
        return [act(self.member)]

    # -- consumers -------------------------------------------------------------------------------

    def consumer(
        self,
        name: str,
        *,
        sampler: str | Mapping[str, Any] | None = None,
        where: str | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        at: Place = "committed",
        missing: Missing = "raise",
        keep: Keep = "uncommitted",
        rank: int | None = None,
        world: int | None = None,
        timeout: float = 600.0,
        lease_rows: int | None = None,
    ) -> RemoteConsumer:
        """Open a consumer on the server; see `ReplayBuffer.consumer`. It is created if it is new.

        The server records the draws, and has the consumer open until rank 0 closes it, or the server ends.

        Args:
            name: 1 to 100 letters, digits or `. _ -`.
            sampler: A dict with `kind` and parameters, or a kind, with its default parameters; uniform by
                default. Kinds that remember which rows were drawn are allowed, too.
            where: SQL condition of the rows to draw, with no function but `selection('name')`.
            batch_size: Rows per batch, of all ranks together; None: the buffer's. Kind "groups" has none.
            seed: Seed of the draws of a new consumer; None: the store's.
            at: Where to begin, as for `seek`.
            missing: What happens when a row of a recorded draw was deleted or overwritten: "raise" or "skip".
            keep: Which draws the log keeps: "uncommitted", "all", or the last so many and those after the
                last `commit`.
            rank: Which part of each batch this process gets, from 0; None: the environment variable RANK, or
                0. The ranks may be on any machines.
            world: Number of processes that share the batches; None: the environment variable WORLD_SIZE, or
                1. Another number than before begins a new generation.
            timeout: How long a rank other than 0 waits for rank 0 to open the consumer, and for rows, in
                seconds. Rank 0 waits for rows as `connect(wait=)` says.
            lease_rows: How many rows that are drawn and not committed a retention policy keeps.

        Raises:
            ArgumentError: An argument is not allowed; the consumer has another seed; `at` is a position of
                another one.
            LockedError: A program on the server's machine draws for the consumer.
            NotReadyError: Rank 0 did not open the consumer in time.
            RemoteError: The sampler is an object, which cannot be sent; or the server did not answer.
            StateError: The store is a version, or has a rate limiter; the draws after `at` are not kept.
        """
        if isinstance(sampler, str):
            sampler = {"kind": sampler}
        ConnectOptions(sampler=sampler)  # raises if it cannot be sent
        settings = {
            "sampler": sampler, "where": where, "seed": seed, "missing": missing, "keep": keep,
            "lease_rows": lease_rows,
        }  # fmt: skip
        if sampler is None or sampler.get("kind") != "groups":
            settings["batch_size"] = self._require_size(batch_size)
        elif batch_size is not None:
            raise ArgumentError("sampler 'groups' decides how many rows a batch has", hint="omit batch_size")
        return RemoteConsumer(
            name, self._connection, self._read_drawn, settings, at=at, rank=rank, world=world,
            wait=self._wait, timeout=timeout,
        )  # fmt: skip

    def _read_drawn(self, frame: Frame, return_info: bool, as_numpy: bool | None) -> Any:
        return self._finish(self._place(self._decoder.read(frame)), return_info, None, as_numpy)

    @property
    def consumers(self) -> RemoteConsumers:
        """List the store's consumers, and end them."""
        return RemoteConsumers(self._connection)

    # -- priorities ------------------------------------------------------------------------------

    def _to_ids(self, given: Any) -> IntArray:
        return to_array(given).reshape(-1).astype(np.int64, copy=False)

    def _set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        return self.member.set_priorities(ids, values)

    def annotate(
        self,
        ids: Any,
        values: Mapping[Any, Any],
        *,
        by: str | None = None,
        like: str | tuple[str, ...] | None = None,
    ) -> None:
        """Add values that are computed after the rows to stored rows; see `ReplayBuffer.annotate`.

        The values survive a crash of the server's process when this returns. A request whose answer is lost
        is sent again, and the server writes its values once; only if it was restarted in between, the
        relation `annotations` may have them twice.

        Args:
            ids: Ids of the rows, as samples have them. Shape `(n,)`.
            values: Values by field; dots in a name separate groups.
            by: Name of what has computed them.
            like: For new fields of any length: the field that has as many values in each row.

        Raises:
            SchemaError: Values have another shape, length or dtype than the field, or the field is written
                with its rows.
            NotFoundError: A row is not in the store.
            StateError: The store has no rows yet, is a version, or keeps the best rows.
            RemoteError: The server did not answer. Otherwise no value was written, whatever is raised.
        """
        body = pack_annotations(ids, values, by, like)
        self._connection.request("POST", "annotations", body=body, kind=ARROW, write=True)
        self._fields = None

    # -- queries and versions --------------------------------------------------------------------

    def sql(
        self,
        query: str,
        params: Sequence[object] | Mapping[str, object] | None = None,
        *,
        limit: int | None = None,
    ) -> Result:
        """Run one read-only SELECT on the server, over the relations of the store's `rb.sql`.

        Args:
            query: The statement.
            params: Values for `?` (a sequence) or `$name` (a mapping). Dates and times are sent as text,
                which comparisons convert.
            limit: The most rows to return; None for all.

        Raises:
            ArgumentError: JSON cannot represent a value of `params`.
            QueryError: The query is not one SELECT, takes too long or is refused; or, without a limit, its
                result has more rows than the server returns (kind "truncated").
        """
        if params is not None:
            check_params(params)
        values = None if params is None else dict(params) if isinstance(params, Mapping) else list(params)
        body = {"query": query, "params": values, "limit": limit}
        answer = self._connection.request("POST", "sql", body=body, accept=ARROW)
        found = Result(read_table(answer.body))
        if limit is None and answer.headers.get("x-truncated") == "true":
            raise QueryError(
                f"the result has more than the {len(found)} rows that the server returns", kind="truncated",
                hint="pass limit= if these are enough, or narrow the query",
            )  # fmt: skip
        return found

    @property
    def episodes(self) -> RemoteEpisodes:
        """Call it to query episodes; its methods end open episodes or resume those of earlier sessions."""
        return RemoteEpisodes(self.sql, self._json, self._connection.begin_session)

    @property
    def groups(self) -> RemoteGroups:
        """Call it to query groups of episodes; its methods start, close and discard groups."""
        return RemoteGroups(self.sql, self._json)

    @property
    def selections(self) -> RemoteSelections:
        """Call it to query selections; its methods create, change, compare and drop them."""
        return RemoteSelections(self.sql, self._json)

    @property
    def snapshots(self) -> RemoteSnapshots:
        """Create, tag, list and restore versions, which are in the store's own folder."""
        return RemoteSnapshots(self._json)

    def dumps(self, path: None = None) -> Version:
        """Create a version; see `snapshots.create`."""
        return self.snapshots.create(path)

    def loads(self, path: None = None, version: int | str | None = None) -> None:
        """Replace the store's content by a version's; see `snapshots.restore`.

        Args:
            path: Must be None: a server keeps versions in the folder of the store.
            version: Name or number of the version; None: the newest.
        """
        self.snapshots.restore(path, version)

    dump = save = dumps
    load = loads

    # -- the whole store -------------------------------------------------------------------------

    def flush(self, *, shipped: bool = False, timeout: float = 60.0) -> None:
        """Sync the store to the server's disk: rows written before survive a power failure of its machine.

        Args:
            shipped: Whether to wait until all of it is shipped, too: it survives the loss of the machine.
            timeout: How long to wait for that, seconds; at most 600.

        Raises:
            RemoteError: It was not shipped in time; it will be later (kind "not_shipped").
            StateError: `shipped` is set, and the server does not ship the store.
        """
        params = {"shipped": "true", "timeout": str(timeout)} if shipped else None
        self._connection.request("POST", "flush", params=params, write=True, wait=timeout if shipped else 0.0)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the store, as JSON values."""
        return dict(self._json("GET", "stats"))

    def __len__(self) -> int:
        return int(self._json("GET", "")["rows"])

    @property
    def schema(self) -> Schema | None:
        """The fields; None before the first rows."""
        fields = self._json("GET", "")["fields"]
        return None if fields is None else Schema.from_json(fields)

    @property
    def meta(self) -> dict[str, Any]:
        """The user's metadata, set when the store was created."""
        return dict(self._json("GET", "")["meta"])

    @property
    def largest_priority(self) -> float:
        """The priority that rows of the last write of this buffer got; 1 before the first."""
        return self._largest

    @property
    def draw(self) -> int:
        """Number of the seed's next draw."""
        return self._draw

    def _close(self) -> None:
        self.member.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._connection.address)!r})"

    # -- helpers ---------------------------------------------------------------------------------

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(lambda: self._fields)

    def _json(
        self, method: str, route: str, body: Any = None, *, write: bool = False, once: bool = False
    ) -> Any:
        return self._connection.request(method, route, body=body, write=write, once=once).json()


class RemoteEpisodes(LocalEpisodes):
    """Query and annotate episodes of a served store, end those of this connection, resume earlier ones.

    Args:
        sql: Runs a SELECT on the server.
        request: Sends a request with a JSON body and returns the answer.
        begin_session: Begins the connection's session on the server.
    """

    def __init__(
        self, sql: Callable[..., Result], request: Callable[..., Any], begin_session: Callable[[], object]
    ) -> None:
        self._sql, self._request, self._begin_session = sql, request, begin_session

    def __call__(
        self,
        where: str | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
    ) -> Result:
        """Return rows of the relation `episodes`, which includes episodes whose rows were removed.

        Args:
            where: SQL condition over its columns; None for all episodes.
            order_by: SQL expressions to sort by; ties are sorted by `episode_id`.
            limit: The most episodes to return; None for all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expressions.

        Raises:
            QueryError: An expression is invalid, takes too long or is refused; or, without a limit, there are
                more episodes than the server returns (kind "truncated").
        """
        from expstore.sql.views import select_episodes

        return self._sql(select_episodes(where, order_by, limit), params, limit=limit or None)

    def changes(self, limit: int = 20) -> Result:
        """List since when which episodes differ from those before; see `Episodes.changes` of a local buffer.

        The server measures episodes by and by: right after it has opened a store without measures, changes of
        measured fields may be missing.

        Args:
            limit: Largest number of changes, at most 1000.
        """
        rows = self._request("GET", f"changes?limit={check_whole('limit', limit)}")["changes"]
        for row in rows:
            for name in ("since", "until"):
                row[name] = None if row[name] is None else round(row[name] * 1000)
        return build_result(rows, changes.COLUMNS)

    def odd(self, limit: int = 20, *, threshold: float = THRESHOLD) -> Result:
        """List the episodes that differ most from their peers; see `Episodes.odd` of a local buffer.

        The server compares the newest 20,000 ended episodes, and measures those without measures by and by.

        Args:
            limit: Largest number of episodes, at most 1000.
            threshold: Smallest score, in robust standard deviations.
        """
        route = f"odd?limit={check_whole('limit', limit)}&threshold={float(threshold)}"
        return build_result(self._request("GET", route)["episodes"], measuring.COLUMNS)

    def annotate(self, episode_id: int, /, **info: Any) -> dict[str, Any]:
        """Attach facts to an episode; see `Episodes.annotate` of a local buffer.

        Args:
            episode_id: Id of the episode, as in samples and SQL.
            info: Facts by name: text, numbers, booleans, or lists and dicts of them. A fact replaces the
                earlier fact of the same name; None removes it.

        Returns:
            All facts about the episode.

        Raises:
            NotFoundError: There never was such an episode.
            SchemaError: A value cannot be stored as JSON; nothing was changed.
            RemoteError: The server did not answer.

        Example:
            >>> rb.episodes.annotate(3, success=True)
            {'success': True}
        """
        pack_info(info)  # raises if JSON cannot represent it
        number = check_episode(episode_id)
        if not 0 <= number < 1 << 63:
            raise NotFoundError(f"there is no episode {number}")
        found: dict[str, Any] = self._request("PATCH", f"episodes/{number}", {"info": info})["info"]
        return found

    def end(self, source: str | None = None) -> None:
        """End open episodes of this connection's session: their status becomes `cut`.

        Truncated episodes keep their status, and get no more rows.

        Args:
            source: Name of the stream; None for all streams, including the unnamed one.

        Raises:
            RemoteError: The server did not answer.
        """
        self._request("POST", "episodes/end", {"source": source})

    def end_stream(self, source: str | None) -> None:
        """End the open episodes of one stream of this connection's session.

        Args:
            source: The `source` that was passed to `extend`; None for the unnamed stream.
        """
        self._request("POST", "episodes/end", {"source": source, "unnamed": source is None})

    def find_open(self, source: str | None) -> torch.Tensor:
        """Return ids of the open episodes of a source, of all sessions that have not ended. Shape `(n,)`.

        Args:
            source: Name of the stream; None for the unnamed one of this connection's session.
        """
        found = self._request("POST", "episodes/open", {"source": source})
        return torch.tensor(found["episodes"], dtype=torch.int64)

    def resume(self, source: str, *, check: bool = True) -> torch.Tensor:
        """Continue the open episodes of the newest ended session that wrote to a source of this name.

        See `Episodes.resume` of a local buffer.

        Args:
            source: Name of the stream.
            check: Whether the next row of each episode must continue it.

        Returns:
            Ids of the resumed episodes. Shape `(n,)`, int64.
        """
        self._begin_session()
        found = self._request("POST", "episodes/resume", {"source": source, "check": check})
        return torch.tensor(found["episodes"], dtype=torch.int64)


class RemoteGroups(Groups):
    """Query groups of a served store, and start, close and discard them.

    Without a limit, a query of more groups than the server returns is a QueryError (kind "truncated"). A
    group that this connection has started is discarded with reason "lost" when the connection is closed, or
    has been silent for the server's `session_timeout`. A server that is started again has forgotten it.

    Args:
        sql: Runs a query.
        request: Sends a request of a method to a route, with a body of JSON, and returns the answer's JSON.
    """

    def __init__(self, sql: Callable[..., Result], request: Callable[..., Any]) -> None:
        self._sql, self._request = sql, request

    def _query(
        self, sql: str, params: Sequence[object] | Mapping[str, object] | None, limit: int | None
    ) -> Result:
        return self._sql(sql, params, limit=limit or None)

    def _try_start(self, version: int, consumer: str | None) -> tuple[int | None, int]:
        body = {"version": version, "consumer": consumer}
        found = self._request("POST", "groups", body, write=True)
        return found["id"], found["lag"]

    def _end(self, ending: Ending) -> None:
        number, *_ = ending
        if not 0 <= number < 1 << 63:
            raise NotFoundError(f"there is no group {number}")
        body = {"status": ending.status, "reason": ending.reason, "started": ending.started}
        self._request("POST", f"groups/{number}/end", body, write=True)


class RemoteSelections(Selections):
    """Query selections of a served store, and create, change and drop them.

    Args:
        sql: Runs a query.
        request: Sends a request of a method to a route, with a body of JSON, and returns the answer's JSON.
    """

    def __init__(self, sql: Callable[..., Result], request: Callable[..., Any]) -> None:
        self._sql, self._request = sql, request

    def _query(self, sql: str, params: Sequence[object] | Mapping[str, object] | None = None) -> Result:
        return self._sql(sql, params)

    def _change(self, change: SelectionChange) -> None:
        body: dict[str, Any] = {"name": change.name, "reason": change.reason, "by": change.by}
        if change.condition is None:
            body["episodes"] = list(change.episodes)
        else:
            body["where"] = change.condition
        route = "selections" if change.act == "create" else f"selections/{change.act}"
        self._request("POST", route, body, write=True)


def _check_rows(data: Any) -> None:
    if not isinstance(data, TensorDictBase):
        raise SchemaError(f"expected a TensorDict, got {type(data).__name__}")
