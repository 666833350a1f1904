"""Consumers: named readers of a store whose draws are written down before their batches are returned.

A learner saves the position of its consumer with its own checkpoint. When it goes back to the checkpoint, it
seeks to that position, and the recorded draws come again. `storages/format/draw_log.py` is the log.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from expstore.buffers.arguments import resolve_part
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.draw_server import DrawClient, DrawServer, Question
from expstore.buffers.prefetch import Made, Prefetcher, Request
from expstore.buffers.recorded_draws import RecordedDraws, RowsGoneError, cut_lost_draws
from expstore.buffers.sampling import Relabeling, Sampling
from expstore.buffers.store_handle import StoreHandle, StorePart
from expstore.buffers.torch_dataset import ConsumerDataset
from expstore.core.arguments import check_whole
from expstore.core.draws import DrawNumber, Draws
from expstore.core.values import Selection
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.episodes.sessions import SessionKey
from expstore.errors import (
    ArgumentError,
    LockedError,
    NotFoundError,
    NotReadyError,
    StateError,
)
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import ConsumingSampler
from expstore.samplers.given_order import Missing
from expstore.samplers.groups import GroupSampler
from expstore.samplers.random import RandomSampler
from expstore.samplers.torchrl_adapter import adapt, unwrap
from expstore.storages.format.draw_log import (
    ABOUT,
    CONSUMERS,
    About,
    ConsumerInfo,
    DrawLog,
    describe_consumers,
)
from expstore.storages.format.paths import LOCK, VERSION
from expstore.storages.format.ranks import Ranks, find_rank
from expstore.storages.read_view import ReadView, build_closed_error

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
#: Second word of the key of a consumer's random numbers; no stream of a storage uses it.
_STREAM = 1 << 62
#: How many draws may be recorded before their batches are built.
_AHEAD = 10_000
#: Which draws a log keeps: those since the last commit; all; or the last n, and those since the last commit.
Keep = Literal["uncommitted", "all"] | int
Position = Mapping[str, Any]
Place = Position | Literal["committed", "end"]


class AnyConsumer:
    """What the consumers of open and of served stores share: a name, a place, and an owner.

    Threads, processes and crashes: as `Consumer` and `RemoteConsumer` say.
    """

    #: Its name.
    name: str
    #: Whether it was closed.
    closed = False
    #: What another process is to do instead of using it.
    _advice = "open the store and the consumer in the process that draws"
    _id: str
    _at: int  # number of the next draw
    _process: int

    @property
    def position(self) -> dict[str, Any]:
        """The place between the last returned batch and the next one: a value that JSON can store."""
        return {"consumer": self.name, "id": self._id, "draw": self._at}

    def close(self) -> None:
        """End its use; a second call does nothing."""
        raise NotImplementedError

    def _check_usable(self) -> None:
        if self.closed:
            raise StateError(f"consumer {self.name!r} is closed")
        if os.getpid() != self._process:
            raise StateError(
                f"consumer {self.name!r} belongs to process {self._process}, from which this one was forked",
                hint=self._advice,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise StateError(
            f"consumer {self.name!r} cannot be copied: one process draws for it", hint=self._advice
        )


class Consumer(AnyConsumer, StorePart):
    """A named reader of a store on disk, with a sampler of its own, whose draws are written down.

    `sample` records a draw before it returns the batch. After `seek` the recorded draws come again, with the
    same ids in the same order and the same weights, and then new ones. The rows are as they are now. The
    store's own transforms get the same random numbers; randomness of other transforms is not repeated.

    Threads: any number may use it; one draws at a time. Processes: one process draws for a consumer, the one
    that writes the store or another one; a forked or pickled copy cannot be used. Crashes: a draw whose batch
    was returned is still recorded after a kill; after a power failure it is if `commit`, or `flush` of the
    writing buffer, returned later. A power failure that takes rows takes the draws that could have seen them,
    too.

    Create it by `ReplayBuffer.consumer`.

    Example:
        >>> with rb.consumer("learner", batch_size=4) as learner:
        ...     first = learner.sample()
        ...     position = learner.position  # save it with the weights
        ...     second = learner.sample()
        ...     learner.seek(position)
        ...     torch.equal(learner.sample()["observation"], second["observation"])
        True
    """

    def __init__(
        self,
        name: str,
        store: StoreHandle,
        batches: BatchBuilder,
        sampler: Any,
        others: Collection[Sampler],
        *,
        batch_size: int,
        as_numpy: bool,
        seed: int | None,
        at: Place,
        missing: Missing,
        keep: Keep,
        rank: int | None,
        world: int | None,
        timeout: float,
        prefetch: int | None,
        lease_rows: int | None,
        relabeling: Relabeling | None = None,
        client: DrawClient | None = None,
    ) -> None:
        self._folder = _folder_of(store, name)
        rank, world = find_rank(rank, world)
        self._timeout = check_timeout(timeout)
        self._batch_size, self._as_numpy = batch_size, as_numpy
        self._keep, missing = _check_keep(keep), _check_missing(missing)
        seed = None if seed is None else check_whole("seed", seed, hint="use a number such as 7")
        if lease_rows is not None:
            lease_rows = _check_count("lease_rows", lease_rows, "use a number of rows")
        check_place(at)
        chosen = RandomSampler() if sampler is None else adapt(resolve_part(sampler, "sample"))
        _check_sampler(chosen, others)
        self.name = name
        #: Chooses the rows of new draws.
        self.sampler = unwrap(chosen)
        self._store, self._batches = store, batches
        self._open_copy = partial(
            type(self), name, store, batches, sampler, (), batch_size=batch_size, as_numpy=as_numpy,
            seed=None, at="committed", missing=missing, keep=keep, rank=rank, world=world, timeout=timeout,
            prefetch=None, lease_rows=None, relabeling=relabeling,
        )  # fmt: skip
        #: Held by calls that use the position, and while a batch is built or the log is used.
        self._using, self._building = threading.Lock(), threading.RLock()
        ahead = _check_count("prefetch", 0 if prefetch is None else prefetch, "use a number of batches")
        self._prefetcher = Prefetcher(ahead) if ahead else None
        self._process, self._is_parents = os.getpid(), False
        storage = store.check_open()
        self._disk = storage.disk if storage.can_write else Disk()
        if isinstance(at, Mapping) and not rank and About.load(self._disk, self._folder) is None:
            raise ArgumentError(f"there is no consumer {name!r} yet, so it has no position {dict(at)}")
        self._ranks = Ranks(self._disk, self._folder, rank, world)
        self._client = client
        self._server: DrawServer | None = None
        #: Whether this object chooses rows, and writes the log.
        self._decides = decides = rank == 0 and client is None
        self._is_plain = decides and world == 1
        self._lock = self._take_lock() if decides else None
        try:
            self._about = self._find_about(storage, seed) if decides else self._wait_for_about()
            if seed not in (None, self._about.seed):
                raise ArgumentError(
                    f"consumer {name!r} draws with seed {self._about.seed}, not {seed}",
                    hint="leave seed out, or take another name",
                )
            self._id = self._about.id
            self._log = DrawLog(self._disk, self._folder, self._id, writes=decides)
            if decides:
                cut_lost_draws(self._log, storage)
                self._begin_generation()
            draws = Draws(self._about.seed, _STREAM + rank)
            self._sampler = RecordedDraws(
                chosen, self._log, draws, missing=missing, rank=rank, world=world, decides=decides
            )
            self._sampling = Sampling(store, batches, batches.style, self._sampler, draws=draws)
            if relabeling is not None:
                self._sampling.relabel_by(relabeling)
            self._sampler.is_followed = bool(batches.transform.steps) or relabeling is not None
            self._at = self._find_number(at)
            if decides and lease_rows != self._about.lease_rows:
                self._about = replace(self._about, lease_rows=lease_rows)
                self._about.save(self._disk, self._folder)
            store.add_part(self)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self._end = weakref.finalize(self, _release, self._log, self._ranks, self._lock, self._process)

    def _take_lock(self) -> WriterLock:
        self._disk.make_dir(self._folder)
        try:
            return WriterLock(self._disk, self._folder / LOCK)
        except LockedError as exc:
            raise exc.with_hint("one process draws for a consumer: close it there first") from exc

    def _begin_generation(self) -> None:
        """Stop the ranks of another number of ranks; keep what all of them have committed."""
        self._ranks.join()
        committed = self._ranks.count_committed(self._log.committed)
        if committed > self._log.committed:
            self._log.commit(committed)
            self._log.sync()
        self._ranks.begin()

    def _find_about(self, storage: ReadView, seed: int | None) -> About:
        """Return the consumer's description; create a consumer that does not exist yet."""
        assert storage.manifest is not None, "consumers have a store on disk"
        about = About.load(self._disk, self._folder)
        if about is None:
            seed = storage.seed if seed is None else seed
            about = About(secrets.token_hex(8), seed, storage.manifest.uuid)
            about.save(self._disk, self._folder)
            self._disk.sync_dir(self._folder.parent)
            self._disk.sync_dir(self._folder.parent.parent)
        return about

    def _wait_for_about(self) -> About:
        """Return the consumer's description, once rank 0 has opened it for this number of ranks."""
        self._wait(lambda: About.load(self._disk, self._folder) is not None and self._ranks.join(), "open it")
        about = About.load(self._disk, self._folder)
        assert about is not None
        return about

    def _wait(self, is_ready: Callable[[], bool], what: str) -> None:
        """Wait for rank 0.

        Raises:
            NotReadyError: Rank 0 took longer than the timeout.
            StateError: Another number of ranks has taken over.
        """
        until, pause = time.monotonic() + self._timeout, 5e-5
        while not is_ready():
            self._check_usable()
            if time.monotonic() > until:
                raise NotReadyError(
                    f"rank {self._ranks.rank} of consumer {self.name!r} has waited {self._timeout:g} s for "
                    f"rank 0 to {what}, with world={self._ranks.world}",
                    hint="start rank 0 first, or pass a longer timeout",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    # -- drawing -----------------------------------------------------------------------------------

    def sample(self, *, return_info: bool = False, as_numpy: bool | None = None) -> Any:
        """Return the next batch: that of the next recorded draw, or of a new one, which is recorded first.

        Args:
            return_info: As in `ReplayBuffer.sample`.
            as_numpy: As in `ReplayBuffer.sample`.

        Returns:
            What `ReplayBuffer.sample` returns, of `batch_size` rows.

        Raises:
            NotReadyError: The store is empty, or no more rows may be drawn.
            RowsChangedError: A row of a recorded draw was changed, deleted or overwritten.
            StateError: The consumer or the store is closed, or belongs to another process.
            StorageError: The draw could not be recorded; it does not count.
        """
        request = Request(self._batch_size, self._as_numpy if as_numpy is None else as_numpy)
        with self._using:
            at, prefetcher = self._at, self._prefetcher
            if prefetcher is None:
                batch, rows = self._build(at, request)
            else:
                self._check_usable()
                made = prefetcher.next(_Ahead(self), request)
                batch, rows = made.batch, made.selection
            if return_info:
                try:
                    info = self._batches.info(self._store.storage, rows, batch, as_numpy=request.as_numpy)
                except BaseException:
                    self._at = at
                    if prefetcher is not None:
                        prefetcher.drop(_Ahead(self))
                    raise
                batch = batch, info
            self._at = at + 1
            return batch

    def _build(self, number: int, request: Request) -> tuple[Any, Selection]:
        """Return the batch of a draw, which is recorded if it is new. If this fails, the draw comes again."""
        with self._building:
            sampler, sampling, storage = self._sampler, self._sampling, self._store.storage
            if self.closed or self._is_parents:
                self._check_usable()
            while True:
                sampler.number = number
                try:
                    if not self._is_plain:
                        self._prepare(number)
                    sampler.is_recorded = number < self._log.count
                    sampling.check_readable(storage)
                    batch, rows = sampling.draw(storage, (number, 0), request, [])
                    sampler.hand_out(storage, rows)
                    return batch, rows
                except RowsGoneError:
                    sampler.rewind(storage)
                except BaseException:
                    sampler.rewind(storage)
                    raise

    def _prepare(self, number: int) -> None:
        """Let a draw be recorded, and its rows be readable, before this rank builds its part."""
        self._check_usable()
        self._ranks.check()
        storage, log = self._store.storage, self._log
        self._batches.check_fields(storage.schema)
        if self._decides:
            self._decide_through(number)
            return
        if self._client is not None and log.follow() <= number:
            self._client.ask("draw", number)

        def is_recorded() -> bool:
            self._ranks.check()
            return log.follow() > number

        def is_readable() -> bool:
            if storage.stored.last < last:
                storage.follow()
            return storage.stored.last >= last

        self._wait(is_recorded, f"make draw {number}")
        last = int(log.read(number).selection.ids.max(initial=0))
        self._wait(is_readable, f"let it read row {last}")

    def _decide_through(self, number: int) -> None:
        """Record draws, without building their batches, until this one is recorded."""
        if number > self._log.count + _AHEAD:
            raise ArgumentError(
                f"draw {number} of consumer {self.name!r} is too far after the last recorded one, "
                f"{self._log.count - 1}"
            )
        while (following := self._log.count) <= number:
            self._sampler.number = following
            self._sampler.decide(self._store.storage, self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, without end or until the sampler has no more rows."""
        while True:
            yield self.sample()
            with self._building:
                prefetches = self._prefetcher is not None
                if self._log.read(self._at - 1).ends if prefetches else self._sampler.ran_out:
                    return

    def replay(self, first: int, last: int | None = None, *, as_numpy: bool | None = None) -> Iterator[Any]:
        """Yield the batches of recorded draws; the position does not change.

        Args:
            first: Number of the first draw, from 0.
            last: Number of the last one; None: the last that was recorded.
            as_numpy: As in `ReplayBuffer.sample`.

        Raises:
            NotFoundError: A draw was not recorded, or is not kept.
            RowsChangedError: A row of a draw was changed, deleted or overwritten.
        """
        last = self._log.count - 1 if last is None else last
        for number in range(first, last + 1):
            if not self._log.first <= number < self._log.count:
                raise NotFoundError(
                    f"draw {number} of consumer {self.name!r} is not in its log, which has "
                    f"draws {self._log.first} to {self._log.count - 1}"
                )
            yield self.draw(number, as_numpy=as_numpy)

    def draw(self, number: int, *, as_numpy: bool | None = None) -> Any:
        """Return the batch of a draw, which is recorded first if it is new; the position does not change.

        Args:
            number: Number of the draw, from 0.
            as_numpy: As in `ReplayBuffer.sample`.

        Raises:
            ArgumentError: It is more than 10,000 draws after the last recorded one.
            NotFoundError: The draw is not kept.
            NotReadyError: No row can be drawn.
            RowsChangedError: A row of the draw was deleted or overwritten.
        """
        request = Request(self._batch_size, self._as_numpy if as_numpy is None else as_numpy)
        with self._building:
            self._check_usable()
            if self._decides and number > self._log.count:
                self._decide_through(number)
            return self._build(number, request)[0]

    def to_torch_dataset(self) -> ConsumerDataset:
        """Return the batches as a data set of torch, for a `DataLoader` with any number of workers.

        Of W workers, worker w builds each W-th batch from the w-th on; this process records the draws. The
        batches come in the order of the draws, as without workers.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> learner = rb.consumer("loaded", batch_size=4)
            >>> dataset = learner.to_torch_dataset()
            >>> loader = DataLoader(dataset, batch_size=None, num_workers=0, collate_fn=dataset.collate)
            >>> len(next(iter(loader)))
            4
        """
        self._check_usable()
        if self._server is None:
            self._server = DrawServer(self._answer)
        return ConsumerDataset(self, partial(self._open_copy, client=self._server.client))

    def _answer(self, question: Question) -> None:
        """Do what a worker of a DataLoader asks for."""
        kind, number = question
        with self._building:
            self._check_usable()
            if kind == "end":
                self._at = max(self._at, number)
            elif self._decides:
                self._decide_through(number)

    def find_end(self, first: int, stop: int) -> int | None:
        """Return the first draw from `first` to `stop` - 1 that completed a pass; None: none did."""
        for number in range(max(first, self._log.first), stop):
            self._prepare(number)
            if self._log.read(number).ends:
                return number
        return None

    def note_end(self, number: int) -> None:
        """Tell the process that records the draws that a pass has ended before this draw."""
        assert self._client is not None, "this is a copy in a worker"
        self._client.ask("end", number)

    def start_group(self, version: int, session: SessionKey | None) -> tuple[int | None, int]:
        """Start a group, if it will not lag too much; used by `rb.groups.start`.

        Returns:
            The value that its episodes have, None: it is not started; and the largest lag.

        Raises:
            ArgumentError: The learner does not have this version yet.
        """
        with self._building:  # a draw that is being recorded counts, and its groups do not
            self._check_usable()
            if version > (draws := self._log.count):
                raise ArgumentError(
                    f"version {version} is newer than that of the learner: consumer {self.name!r} has drawn "
                    f"{draws} batches",
                    hint="the version is the number of batches that the weights were trained on",
                )
            place, lag = self.sampler.start(self._store.storage, draws, version, session)
            return None if place is None else place.id, lag

    @property
    def admits(self) -> bool:
        """Whether it chooses groups in the order of their versions and limits their lag, here."""
        chosen = self.sampler
        is_limited = isinstance(chosen, GroupSampler) and chosen.max_lag is not None
        return self._decides and not self.closed and is_limited and chosen.order == "oldest"

    # -- positions ---------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether the next batch was recorded before; in a rank other than 0, whether rank 0 has drawn it."""
        return self._at < self._count()

    def _count(self) -> int:
        """Return the number of recorded draws."""
        return self._log.count if self._decides else self._log.follow()

    @property
    def committed(self) -> int:
        """Number of draws that the last `commit` covers, that of each rank."""
        if self._ranks.world == 1:
            return self._log.committed
        self._log.follow()
        return self._ranks.count_committed(self._log.committed)

    def commit(self, position: Position | None = None) -> None:
        """Record that a checkpoint with this position is safe, so that earlier draws are not needed again.

        The draws up to it are on the disk when this returns. With `keep="uncommitted"` those before it are
        removed from the log.

        Args:
            position: What `position` returned; None: the present one.

        Raises:
            ArgumentError: It is not a position of this consumer.
            StateError: It is before the last commit, or after the last recorded draw.
            StorageError: The disk failed.
        """
        with self._using:
            self._check_usable()
            if position is not None:
                _check_position(position)
            storage = self._store.storage
            if storage.can_write:
                storage.writer().sync()  # a power failure cuts draws that saw rows which it takes
            with self._building:
                self._commit(self._at if position is None else self._number_of(position))

    def _commit(self, count: int) -> None:
        log, former, is_shared = self._log, self._log.committed, self._ranks.world > 1
        if is_shared:
            self._ranks.check()
            log.follow()
            former = self._ranks.count_own(former)
        if not former <= count <= log.count:
            raise StateError(
                f"cannot commit draw {count} of consumer {self.name!r}: {former} draws are committed, and "
                f"{log.count} were recorded"
            )
        if is_shared:
            self._commit_rank(count)
        else:
            log.commit(count)
            log.sync()
        self._tidy()

    def _commit_rank(self, count: int) -> None:
        """Commit for this rank; what all ranks have committed is also written to the log, by rank 0."""
        if self._ranks.rank:
            self._ranks.commit(count)
            return
        self._log.sync()
        self._ranks.commit(count)
        if (committed := self._ranks.count_committed(self._log.committed)) > self._log.committed:
            self._log.commit(committed)

    def seek(self, position: Place) -> None:
        """Go to a position: the draws that were recorded after it come again.

        Args:
            position: What `position` returned; "committed" for the last `commit`; "end" for the place after
                the last recorded draw.

        Raises:
            ArgumentError: It is not a position of this consumer.
            RowsChangedError: A row of them was deleted or overwritten, its sampler draws each row a fixed
                number of times, and the consumer does not skip missing rows.
            StateError: The draws after it are not in the log: they were removed, or a power failure took
                them.
        """
        with self._using:
            self._check_usable()
            with self._building:
                self._at = self._find_number(position)
            if self._prefetcher is not None:
                self._prefetcher.drop(_Ahead(self))

    def _find_number(self, place: Place) -> int:
        """Return the number of the draw at a position, for `seek`."""
        check_place(place)
        if isinstance(place, Mapping):
            number = self._number_of(place)
        else:
            number = self.committed if place == "committed" else self._count()
        if not self._log.first <= number <= self._log.count:
            raise StateError(
                f"cannot go back to draw {number} of consumer {self.name!r}: its log has draws "
                f"{self._log.first} to {self._log.count - 1}",
                hint="commit() only positions whose checkpoint is safe; keep='all' keeps all draws",
            )
        self._sampler.check_rows(self._store.storage, number)
        return number

    def _number_of(self, position: Position) -> int:
        if position["id"] != self._id:
            raise ArgumentError(
                f"the position is of another consumer ({position['consumer']!r}, id {position['id']}), and "
                f"not of {self.name!r}, id {self._id}"
            )
        return check_whole("draw", position["draw"])

    def _tidy(self) -> None:
        """Remove draws that are not kept."""
        if self._keep == "all" or not self._decides:
            return
        last = self._log.committed if self._keep == "uncommitted" else self._log.count - self._keep
        self._log.drop(min(last, self._log.committed))

    # -- life --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring all recorded draws to the disk.

        Raises:
            StorageError: The disk failed.
        """
        with self._building:
            self._check_usable()
            self._log.sync()

    def close(self) -> None:
        """Sync the log and let another process draw for this consumer; a second call does nothing."""
        if self.closed or os.getpid() != self._process:
            return
        self.closed = True  # this ends waits for rank 0
        with self._using:
            if self._server is not None:
                self._server.close()
            if self._prefetcher is not None:
                self._prefetcher.close(_Ahead(self))
            with self._building:
                try:
                    self._sampling.close()
                finally:
                    self._end()

    def attach(self, storage: ReadView) -> None:
        """Draw from a storage from now on."""
        self._sampling.attach(storage)

    def leave_parent(self) -> None:
        """Refuse to be used from now on: this is a forked child, and the consumer is the parent's."""
        self._is_parents = True

    def before_fork(self) -> None:
        """Pause the evaluation of the sampler's conditions."""
        self._sampling.before_fork()

    def after_fork(self) -> None:
        """Resume the evaluation of the sampler's conditions."""
        self._sampling.after_fork()

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._store.storage.closed:
            raise build_closed_error()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at draw {self._at} of {self._log.count}"
        return f"Consumer({self.name!r}, {self._sampler!r}, batch_size={self._batch_size}, {state})"


class _Ahead:
    """What a `Prefetcher` asks of a consumer; a recorded draw's batch that was built stays valid."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def draw_ahead(self, number: int) -> DrawNumber:
        """Return the draw of the batch after `number` prefetched batches."""
        return self._consumer._at + number, 0

    def make(self, draw: DrawNumber, request: Request, instead: Selection | None = None) -> Made:
        """Make the batch of a draw."""
        return Made(*self._consumer._build(draw[0], request), None)

    def stands(self, made: Made | None) -> bool:
        """Return True: no batch becomes stale."""
        return True

    def readable(self, made: Made) -> bool:
        """Return True: the rows were complete when the batch was built."""
        return True

    def hand_out(self, made: Made) -> None:
        """Count the oldest prefetched batch as returned."""
        self._consumer._at += 1

    def give_back(self) -> None:
        """Do nothing: draws whose batches were not returned are in the log."""


class Consumers:
    """List the consumers of a store, and end them.

    Args:
        store: The store.

    Example:
        >>> rb.consumer("learner", batch_size=4).close()
        >>> [one.name for one in rb.consumers.list()]
        ['learner']
        >>> rb.consumers.drop("learner")
    """

    def __init__(self, store: StoreHandle) -> None:
        self._store = store

    def list(self) -> list[ConsumerInfo]:
        """Return what is known of each consumer, by name; empty for a store in RAM."""
        storage = self._store.check_open()
        if storage.path is None or storage.manifest is None:
            return []
        return describe_consumers(Disk(), storage.path, storage.window.rows)

    def drop(self, name: str) -> None:
        """End a consumer: remove its log. A new one of this name begins at draw 0.

        Raises:
            NotFoundError: There is no consumer of this name.
            LockedError: A process draws for it.
            StorageError: The disk failed.
        """
        folder, disk = _folder_of(self._store, name), Disk()
        if About.load(disk, folder) is None:
            raise NotFoundError(f"there is no consumer {name!r}")
        lock = WriterLock(disk, folder / LOCK)
        try:
            disk.unlink(folder / ABOUT)  # without it there is no consumer, if this is interrupted
            disk.remove_tree(folder)
        finally:
            lock.release()


def _release(log: DrawLog, ranks: Ranks, lock: WriterLock | None, process: int) -> None:
    """Close a consumer's files: by `close`, when it is collected, or at the end of its process."""
    if os.getpid() != process:
        return
    try:
        ranks.close()
        log.close()
    finally:
        if lock is not None:
            lock.release()


def _folder_of(store: StoreHandle, name: str) -> Path:
    """Return the folder of a consumer, which may not exist.

    Raises:
        ArgumentError: It is not a name.
        StateError: The store has no folder, or is a version.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{name!r:.120} is not a name of a consumer", hint="use 1 to 100 letters, digits or . _ -"
        )
    storage = store.check_open()
    if storage.path is None or storage.manifest is None:
        raise StateError(
            "consumers need a store on disk, where their draws are written down", hint="expstore.open(path)"
        )
    if storage.disk.exists(storage.path / VERSION):
        raise StateError(f"{storage.path} is a version, to which nothing is added", hint="copy its folder")
    return storage.path / CONSUMERS / name


def _check_sampler(sampler: Sampler, others: Collection[Sampler]) -> None:
    if any(sampler is other for other in others):
        raise ArgumentError(
            f"{sampler!r} already draws for the buffer or another consumer, and keeps its place there",
            hint="give each a sampler of its own, such as copy.copy(sampler)",
        )
    if sampler.hears_writes and type(sampler) is not ConsumingSampler:  # which needs it in a buffer only
        raise ArgumentError(
            f"{sampler!r} must be told of each write, which a consumer is not",
            hint="use it in the buffer itself",
        )


def check_place(place: Place) -> None:
    """Raise ArgumentError if this is not a place of a consumer."""
    if place not in ("committed", "end"):
        _check_position(place)


def _check_position(position: object) -> None:
    if not isinstance(position, Mapping) or not {"consumer", "id", "draw"} <= position.keys():
        raise ArgumentError(
            f"{position!r:.100} is not a position",
            hint="pass what `position` returned; seek() and at= also take 'committed' and 'end'",
        )


def _check_missing(missing: str) -> Missing:
    if missing not in ("raise", "skip"):
        raise ArgumentError(f"missing must be 'raise' or 'skip', got {missing!r}")
    return missing  # type: ignore[return-value]


def check_timeout(timeout: float) -> float:
    """Return how long a rank waits; raise ArgumentError if it is not a number of seconds above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return timeout


def _check_keep(keep: Keep) -> Keep:
    if keep in ("uncommitted", "all"):
        return keep
    return _check_count("keep", keep, "'uncommitted', 'all', or a number of draws")


def _check_count(name: str, value: Any, hint: str) -> int:
    if (count := check_whole(name, value, hint=hint)) < 0:
        raise ArgumentError(f"{name} must be at least 0, got {count}", hint=hint)
    return count
