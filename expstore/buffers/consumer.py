"""Consumers: named readers of a store whose draws are written down before their batches are returned.

A learner saves the position of its consumer with its own checkpoint. When it goes back to the checkpoint, it
seeks to that position, and the recorded draws come again. `storages/format/draw_log.py` is the log.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from expstore.buffers.arguments import resolve_part
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.prefetch import Request
from expstore.buffers.recorded_draws import Missing, RecordedDraws, cut_lost_draws
from expstore.buffers.sampling import Relabeling, Sampling
from expstore.buffers.store_handle import StoreHandle, StorePart
from expstore.core.arguments import check_whole
from expstore.core.draw_state import DrawState
from expstore.core.draws import Draws
from expstore.core.values import Selection
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import (
    ArgumentError,
    LockedError,
    NotFoundError,
    StateError,
)
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import ConsumingSampler
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
from expstore.storages.read_view import ReadView, build_closed_error

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
#: Second word of the key of a consumer's random numbers; no stream of a storage uses it.
_STREAM = 1 << 62
#: Which draws a log keeps: those since the last commit; all; or the last n, and those since the last commit.
Keep = Literal["uncommitted", "all"] | int
Position = Mapping[str, Any]
Place = Position | Literal["committed", "end"]


class Consumer(StorePart):
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
        relabeling: Relabeling | None = None,
    ) -> None:
        self._folder = _folder_of(store, name)
        self._batch_size, self._as_numpy = batch_size, as_numpy
        self._keep, missing = _check_keep(keep), _check_missing(missing)
        seed = None if seed is None else check_whole("seed", seed, hint="use a number such as 7")
        _check_place(at)
        chosen = RandomSampler() if sampler is None else adapt(resolve_part(sampler, "sample"))
        _check_sampler(chosen, others)
        self.name = name
        #: Chooses the rows of new draws.
        self.sampler = unwrap(chosen)
        self._store, self._batches = store, batches
        self._using = threading.Lock()
        self._process = os.getpid()
        storage = store.check_open()
        self._disk = storage.disk if storage.can_write else Disk()
        if isinstance(at, Mapping) and About.load(self._disk, self._folder) is None:
            raise ArgumentError(f"there is no consumer {name!r} yet, so it has no position {dict(at)}")
        self._disk.make_dir(self._folder)
        try:
            self._lock = WriterLock(self._disk, self._folder / LOCK)
        except LockedError as exc:
            raise exc.with_hint("one process draws for a consumer: close it there first") from exc
        try:
            self._about = self._find_about(storage, seed)
            self._log = DrawLog(self._disk, self._folder, self._about.id)
            cut_lost_draws(self._log, storage)
            state = DrawState(self._log.committed, self._log.progress)
            draws = Draws(self._about.seed, _STREAM)
            self._state = state
            self._sampler = RecordedDraws(chosen, self._log, state, draws, missing=missing)
            self._sampling = Sampling(store, batches, batches.style, self._sampler, draws=draws, state=state)
            if relabeling is not None:
                self._sampling.relabel_by(relabeling)
            self._sampler.is_followed = bool(batches.transform.steps) or relabeling is not None
            state.number = self._find_number(at)
            store.add_part(self)
        except BaseException:
            self._lock.release()
            raise
        self._end = weakref.finalize(self, _release, self._log, self._lock, self._process)
        self.closed = False

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
        elif seed is not None and seed != about.seed:
            raise ArgumentError(
                f"consumer {self.name!r} draws with seed {about.seed}, not {seed}",
                hint="leave seed out, or take another name",
            )
        return about

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
            batch, rows = self._next(request)
        if not return_info:
            return batch
        return batch, self._batches.info(self._store.storage, rows, batch, as_numpy=request.as_numpy)

    def _next(self, request: Request) -> tuple[Any, Selection]:
        """Draw; the lock is held. If it fails, the draw comes again."""
        self._check_usable()
        number, sampler = self._state.number, self._sampler
        sampler.number, sampler.is_recorded = number, number < self._log.count
        try:
            return self._sampling.next(request)
        except BaseException:
            self._state.number = number
            self._sampler.rewind(self._store.storage)
            raise

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, without end or until the sampler has no more rows."""
        while True:
            yield self.sample()
            if self._sampler.ran_out:
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
        request = Request(self._batch_size, self._as_numpy if as_numpy is None else as_numpy)
        for number in range(first, last + 1):
            with self._using:
                self._check_usable()
                if not self._log.first <= number < self._log.count:
                    raise NotFoundError(
                        f"draw {number} of consumer {self.name!r} is not in its log, which has "
                        f"draws {self._log.first} to {self._log.count - 1}"
                    )
                present = self._state.number
                self._state.number = number
                try:
                    batch, _ = self._next(request)
                finally:
                    self._state.number = present
            yield batch

    # -- positions ---------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The place between the last returned batch and the next one: a value that JSON can store."""
        return {"consumer": self.name, "id": self._about.id, "draw": self._state.number}

    @property
    def replaying(self) -> bool:
        """Whether the next batch was recorded before."""
        return self._state.number < self._log.count

    @property
    def committed(self) -> int:
        """Number of draws that the last `commit` covers."""
        return self._log.committed

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
            count = self._state.number if position is None else self._number_of(position)
            if not self._log.committed <= count <= self._log.count:
                raise StateError(
                    f"cannot commit draw {count} of consumer {self.name!r}: {self._log.committed} draws are "
                    f"committed, and {self._log.count} were recorded"
                )
            storage = self._store.storage
            if storage.can_write:
                storage.writer().sync()  # a power failure cuts draws that saw rows which it takes
            self._log.commit(count)
            self._log.sync()
            self._tidy()

    def seek(self, position: Place) -> None:
        """Go to a position: the draws that were recorded after it come again.

        Args:
            position: What `position` returned; "committed" for the last `commit`; "end" for the place after
                the last recorded draw.

        Raises:
            ArgumentError: It is not a position of this consumer.
            StateError: The draws after it are not in the log: they were removed, or a power failure took
                them.
        """
        with self._using:
            self._check_usable()
            number = self._find_number(position)
            self._sampler.rewind(self._store.storage)
            self._state.number = number

    def _find_number(self, place: Place) -> int:
        """Return the number of the draw at a position, for `seek`."""
        _check_place(place)
        if isinstance(place, Mapping):
            number = self._number_of(place)
        else:
            number = self._log.committed if place == "committed" else self._log.count
        if not self._log.first <= number <= self._log.count:
            raise StateError(
                f"cannot go back to draw {number} of consumer {self.name!r}: its log has draws "
                f"{self._log.first} to {self._log.count - 1}",
                hint="commit() only positions whose checkpoint is safe; keep='all' keeps all draws",
            )
        return number

    def _number_of(self, position: Position) -> int:
        if position["id"] != self._about.id:
            raise ArgumentError(
                f"the position is of another consumer ({position['consumer']!r}, id {position['id']}), and "
                f"not of {self.name!r}, id {self._about.id}"
            )
        return check_whole("draw", position["draw"])

    def _tidy(self) -> None:
        """Remove draws that are not kept."""
        if self._keep == "all":
            return
        last = self._log.committed if self._keep == "uncommitted" else self._log.count - self._keep
        self._log.drop(min(last, self._log.committed))

    # -- life --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring all recorded draws to the disk.

        Raises:
            StorageError: The disk failed.
        """
        with self._using:
            self._check_usable()
            self._log.sync()

    def close(self) -> None:
        """Sync the log and let another process draw for this consumer; a second call does nothing."""
        with self._using:
            if self.closed or os.getpid() != self._process:
                return
            self.closed = True
            try:
                self._sampling.close()
            finally:
                self._end()

    def attach(self, storage: ReadView) -> None:
        """Draw from a storage from now on."""
        self._sampling.attach(storage)

    def leave_parent(self) -> None:
        """Do nothing: the parent's consumer cannot be used in a forked child."""

    def before_fork(self) -> None:
        """Pause the evaluation of the sampler's conditions."""
        self._sampling.before_fork()

    def after_fork(self) -> None:
        """Resume the evaluation of the sampler's conditions."""
        self._sampling.after_fork()

    def _check_usable(self) -> None:
        if self.closed:
            raise StateError(f"consumer {self.name!r} is closed")
        if os.getpid() != self._process:
            raise StateError(
                f"consumer {self.name!r} belongs to process {self._process}, from which this one was forked",
                hint="open the store and the consumer in the process that draws",
            )
        if self._store.storage.closed:
            raise build_closed_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise StateError(
            f"consumer {self.name!r} cannot be copied: one process draws for it",
            hint="open the store and the consumer in the process that draws",
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at draw {self._state.number} of {self._log.count}"
        return f"Consumer({self.name!r}, {self._sampler!r}, batch_size={self._batch_size}, {state})"


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
        return describe_consumers(Disk(), storage.path)

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


def _release(log: DrawLog, lock: WriterLock, process: int) -> None:
    """Close a consumer's files: by `close`, when it is collected, or at the end of its process."""
    if os.getpid() != process:
        return
    try:
        log.close()
    finally:
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
    if isinstance(sampler, ConsumingSampler):
        raise ArgumentError(
            f"{sampler!r} counts in the store, not for a consumer; use SamplerWithoutReplacement"
        )
    if sampler.hears_writes:
        raise ArgumentError(
            f"{sampler!r} must be told of each write, which a consumer is not",
            hint="use it in the buffer itself",
        )


def _check_place(place: Place) -> None:
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


def _check_keep(keep: Keep) -> Keep:
    if keep in ("uncommitted", "all"):
        return keep
    if (count := check_whole("keep", keep, hint="'uncommitted', 'all', or a number of draws")) < 0:
        raise ArgumentError(f"keep must be at least 0, got {count}")
    return count
