"""A sampler that draws whole complete groups, each once.

The store has the groups (`sql/groups.py`); this module chooses among them, and counts what it has drawn.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.values import GROUP_ID, IntArray, Selection
from expstore.errors import ArgumentError, NotReadyError
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import check_count
from expstore.sql.sync import Catalog

if TYPE_CHECKING:
    from expstore.episodes.sessions import SessionKey
    from expstore.sql.groups import Condition, DrawOrder, Group, Groups, Place
    from expstore.storages.columns.sample_counts import ConsumerCounts, Sampled
    from expstore.storages.read_view import ReadView

Order = Literal["oldest", "random"]
#: Larger than all ids of groups and numbers of places.
_LAST = 1 << 62
#: From this many new groups on, the list is sorted again.
_MANY = 64


class GroupSampler(Sampler):
    """Draw whole complete groups, each once: all rows of all their members, sorted by group.

    The buffer's own draws count in the store, those of a consumer for this consumer. The sampler decides how
    many rows a batch has: neither `sample` nor `consumer` takes a `batch_size` with it.

    Threads: any number may sample; a group is returned to one of them. Crashes: a draw is counted, or
    recorded by a consumer, before its batch is returned, so after a kill no group comes twice. A kill during
    a draw of the buffer may count groups that were never returned. Processes: the buffer's own draws need the
    process that writes; a consumer draws in a reader, too.

    Args:
        groups_per_batch: Number of groups in a batch.
        order: "oldest" for the groups with the oldest policy version, and of these for those that began
            first; a group that was started by `rb.groups.start` and is not complete delays those after it.
            "random" for any.
        max_lag: How far the oldest policy version of a group may be behind the newest version in the store.
            `rb.groups.start` starts no group that would be further behind at its turn. A group that is
            nevertheless is discarded with reason "lag" when it is passed over; a reader passes it over too,
            but cannot write this down. None: no limit.
        where: Which groups are drawn: a boolean SQL expression over the columns of the relation `groups`,
            such as "std_return > 0". It is evaluated once, when a group completes. None for all.
        split: The split whose groups are drawn; None for the groups of all splits.

    Raises:
        ArgumentError: A number is not a whole number in its range, or the order is unknown.
        QueryError: `where` is not a condition on groups.

    Example:
        >>> rb = expstore.open("run.exp", episodes={"group": "prompt_id", "group_size": 8})
        >>> learner = rb.consumer("learner", sampler=expstore.GroupSampler(groups_per_batch=4))
    """

    keeps_to_split = True
    leases = True
    counts_draws = True
    sizes_batches = True
    windowed = True
    _transient = frozenset({"_own", "_ready", "_orders", "_seen", "_generation", "_catalog", "_condition"})
    #: The counts of a consumer; None: those of the storage.
    _own: ConsumerCounts | None = None

    def __init__(
        self,
        groups_per_batch: int,
        order: Order = "oldest",
        *,
        max_lag: int | None = None,
        where: str | None = None,
        split: str | None = "train",
    ) -> None:
        super().__init__(split=split)
        if order not in ("oldest", "random"):
            raise ArgumentError(f"order must be 'oldest' or 'random', got {order!r}")
        if not isinstance(where, str | None):
            raise ArgumentError(f"where must be an SQL expression over groups, got {where!r}")
        self.groups_per_batch: int = check_count("groups_per_batch", groups_per_batch)
        self.max_lag: int | None = None if max_lag is None else check_whole("max_lag", max_lag)
        if self.max_lag is not None and self.max_lag < 0:
            raise ArgumentError(f"max_lag must be at least 0, got {max_lag}")
        self.order: Order = order
        self.where: str | None = where
        self._begin()

    def _begin(self) -> None:
        #: Order and id of complete groups that were not drawn, ascending; and the order by id.
        self._ready: list[tuple[DrawOrder, int]] = []
        self._orders: dict[int, DrawOrder] = {}
        self._seen, self._generation = 0, -1  # how far it has followed the changes of groups
        self._catalog: Catalog | None = None
        self._condition: Condition | None = None
        if self.where is not None:
            from expstore.sql.groups import Condition  # loads DuckDB

            self._condition = Condition(self.where)

    def attach(self, storage: ReadView) -> None:
        """Attach the sampler to a storage, and make the storage count how often rows are drawn."""
        super().attach(storage)
        self._begin()
        if self._own is None and not storage.follows:
            storage.writer().settings.count_sampled()

    def count_in(self, counts: ConsumerCounts | None) -> None:
        """Count in the counts of a consumer; None: in the storage."""
        self._own, self._generation = counts, -1

    @property
    def ran_out(self) -> bool:
        """Whether fewer groups are left than a batch has."""
        return len(self._ready) < self.groups_per_batch

    def can_sample(self, storage: ReadView, batch_size: int) -> bool:
        """Return whether a batch can be drawn from `storage` now."""
        catalog = self._find_catalog(storage)
        with catalog.groups.lock:
            self._follow(storage, catalog)
            ready = itertools.islice(self._find_ready(catalog.groups), self.groups_per_batch)
            return len(list(ready)) == self.groups_per_batch

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose groups; for the buffer's own draws, count them. The batch has a column `group_id`.

        Raises:
            NotReadyError: Fewer groups are complete and were not drawn than a batch has.
            StateError: The store has no groups, or the buffer cannot count.
            QueryError: `where` cannot be evaluated.
            StorageError: The groups could not be counted; no batch is returned.
        """
        return self._choose(storage, (), generator)

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Replace the groups of a selection of which rows were overwritten while they were read."""
        return self._choose(storage, selection.progress, generator)

    def _choose(self, storage: ReadView, had: Sequence[int], generator: np.random.Generator) -> Selection:
        """Keep the groups of `had` that are whole; choose and count others until there are enough."""
        if self._own is None:
            storage.writer()  # only the writer counts in the storage
        catalog, late = self._find_catalog(storage), []
        chosen: dict[int, IntArray] = {}
        groups = catalog.groups
        with groups.lock:
            counts = self._follow(storage, catalog)
            for number in itertools.chain(had, self._candidates(groups, had, generator)):
                if len(chosen) == self.groups_per_batch:
                    break
                group, ids = groups.by_id[number], None
                if number not in had and self._is_late(group, groups.newest_version):
                    late.append(number)
                elif (ids := groups.rows_of(storage, group)) is not None:
                    chosen[number] = ids
            self._drop(late)
            if is_enough := len(chosen) == self.groups_per_batch:
                new = [ids for number, ids in chosen.items() if number not in had]
                if self._own is None and new:
                    with storage.locks.sampled:
                        counts.add(storage.geometry.slot_of(np.concatenate(new)))
                    self._drop(chosen)
        if storage.can_write:
            for number in late:
                groups.end(catalog, number, "discarded", "lag")
        if not is_enough:
            raise self._build_error(groups, len(chosen))
        named = np.repeat(list(chosen), [ids.size for ids in chosen.values()])
        return Selection(np.concatenate(list(chosen.values())), {GROUP_ID: named}, progress=tuple(chosen))

    def _find_ready(self, groups: Groups) -> Iterator[int]:
        """Yield the groups that can be drawn, those that a group which was started delays left out."""
        first = None
        if self.order == "oldest":
            first = min((place.order for place in groups.places.values()), default=None)
        for order, number in self._ready:
            if first is not None and order > first:
                return
            yield number

    def _candidates(
        self, groups: Groups, had: Sequence[int], generator: np.random.Generator
    ) -> Iterator[int]:
        """Yield the groups that can be drawn in the order of the sampler."""
        if self.order == "oldest":
            yield from (number for number in self._find_ready(groups) if number not in had)
            return
        moved: dict[int, int] = {}  # a shuffle that does not copy the list
        for at in range(len(self._ready)):
            other = int(generator.integers(at, len(self._ready)))
            place, moved[other] = moved.get(other, other), moved.get(at, at)
            if self._ready[place][1] not in had:
                yield self._ready[place][1]

    def start(
        self, storage: ReadView, draw: int, version: int, session: SessionKey | None
    ) -> tuple[Place | None, int]:
        """Start a group, if it and the groups after it will not lag too much; used by `rb.groups.start`.

        The batch with number n is drawn when the learner has version n, so the lag of a group is the number
        of its batch minus its version. The places of groups change only to earlier ones after this.

        Args:
            storage: Where the groups are.
            draw: Number of the next batch that will be drawn.
            version: The policy version of the group.
            session: Who starts it; None: this process.

        Returns:
            The place, None: the group would lag too much; and the largest lag of it and those after it.
        """
        catalog, limit = self._find_catalog(storage), self.max_lag
        assert limit is not None, "the caller has checked it"
        with catalog.groups.lock:
            if storage.schema is not None:
                self._follow(storage, catalog)
            places = [place.order for place in catalog.groups.places.values()]
            orders = sorted([*places, *(order for order, _ in self._ready)])
            mine = bisect.bisect_right(orders, (True, version, _LAST))
            versions = [version, *(one.version for one in orders[mine:])]
            lag = max(draw + at // self.groups_per_batch - one for at, one in enumerate(versions, mine))
            return (None if lag > limit else catalog.groups.start(version, session)), lag

    def _is_late(self, group: Group, newest: int | None) -> bool:
        oldest = min(group.versions(), default=None) if self.max_lag is not None else None
        return oldest is not None and newest is not None and newest - oldest > (self.max_lag or 0)

    def _drop(self, groups: Iterable[int]) -> None:
        for number in groups:
            if (order := self._orders.pop(number, None)) is not None:
                del self._ready[bisect.bisect_left(self._ready, (order, number))]

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Count the groups for a consumer. For a storage, `select` has counted them."""
        if self._own is not None:
            self._own.add(storage.geometry.slot_of(selection.ids))
            self._drop(selection.progress)

    def _follow(self, storage: ReadView, catalog: Catalog) -> Sampled:
        """Find the groups that completed since the last draw, or fail; return the counts of rows."""
        groups = catalog.groups
        groups.look(catalog)
        counts = self._own or storage.state.sampled
        if counts is None or storage.schema is None:
            raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
        if self._own is not None:
            self._own.follow(storage.geometry, storage.stored.last)
        if groups.generation != self._generation:
            self._ready, self._orders = [], {}
            self._seen, self._generation = 0, groups.generation
        changed = [groups.by_id[id] for id in dict.fromkeys(groups.changed[self._seen :])]
        splits = {group.split for group in changed} if self._filter.split is None else {self._filter.split}
        complete = [group for group in changed if group.status == "complete" and group.split in splits]
        slots = storage.geometry.slot_of(np.array([group.oldest for group in complete], np.int64))
        drawn = counts.values[slots]
        new = [group.id for group, times in zip(complete, drawn.tolist(), strict=True) if not times]
        if new and self._condition is not None:
            new = self._condition.match(groups.table(new))
        self._drop([group.id for group in changed])
        ready = [(groups.by_id[number].find_order(), number) for number in new]
        self._orders |= {number: order for order, number in ready}
        if len(ready) > _MANY:
            self._ready = sorted([*self._ready, *ready])
        else:
            for one in ready:
                bisect.insort(self._ready, one)
        self._seen = len(groups.changed)
        return counts

    def _find_catalog(self, storage: ReadView) -> Catalog:
        if isinstance(catalog := storage.index.catalog, Catalog):
            return catalog
        self._catalog = Catalog(storage)
        storage.index.use(self._catalog)
        return self._catalog

    def _build_error(self, groups: Groups, ready: int) -> NotReadyError:
        with groups.lock:
            first = min((place.order for place in groups.places.values()), default=None)
        if self.order == "oldest" and first is not None and len(self._ready) >= self.groups_per_batch:
            return NotReadyError(
                f"a batch has {self.groups_per_batch} groups, and waits for group {first.began}, which was "
                f"started with version {first.version} and is not complete",
                hint="try again later; discard the group if no one writes it any more",
            )
        which = "" if self.where is None else f" and match where={self.where!r}"
        return NotReadyError(
            f"a batch has {self.groups_per_batch} groups, and {ready} are complete, not drawn{which}",
            hint="write more episodes, or close groups that get no more members; rb.groups() lists them",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the settings. What was drawn is stored with the rows, or in the log of a consumer."""
        return {name: getattr(self, name) for name in ("groups_per_batch", "order", "max_lag")} | {
            "where": self.where
        }

    def __repr__(self) -> str:
        where = "" if self.where is None else f", where={self.where!r}"
        return f"GroupSampler({self.groups_per_batch}, {self.order!r}, max_lag={self.max_lag}{where})"
