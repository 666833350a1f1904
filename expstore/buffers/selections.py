"""`rb.selections`: give lists of episodes a name, and draw, query and export the same episodes later.

Used by users, the command line and the HTTP server. `expstore.episodes.selections` says how they are stored;
SQL has the relation `selections` and the condition `selection('name')`.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from expstore.core.nearest import suggest
from expstore.core.values import IntArray
from expstore.episodes.facts import check_name
from expstore.episodes.log import NewFacts
from expstore.episodes.selections import SelectionChange, make_edit
from expstore.errors import ArgumentError, NotFoundError, StateError
from expstore.storages.batch import now_us
from expstore.storages.episode_lookup import check_episode

if TYPE_CHECKING:
    from expstore.buffers.writing_proxy import WritingProxy
    from expstore.sql.result import Result
    from expstore.sql.sync import Catalog
    from expstore.storages.read_view import ReadView

#: The changes of a selection by hand: of each episode, those in its members or exclusions.
_CHANGES = """
SELECT episode_id, "time", act, "by", reason FROM (
    SELECT episode_id, unnest(from_json(coalesce(
        info -> ('/_selections/members/' || $pointer), info -> ('/_selections/excluded/' || $pointer)
    ), '[{"time": "BIGINT", "act": "VARCHAR", "by": "VARCHAR", "reason": "VARCHAR"}]'), recursive := true)
    FROM episodes WHERE contains(info::VARCHAR, '"_selections"')
) ORDER BY "time", episode_id
"""
#: The episodes that have facts about a selection.
_MARKED = """
SELECT episode_id FROM episodes WHERE contains(info::VARCHAR, '"_selections"') AND coalesce(
    info -> ('/_selections/members/' || $pointer), info -> ('/_selections/excluded/' || $pointer),
    info -> ('/_selections/definitions/' || $pointer)
) IS NOT NULL
"""
#: How many ids a message lists.
_LISTED = 10


class Difference(NamedTuple):
    """The members of two selections, as `Selections.diff` returns them.

    Args:
        only_first: Ids of the episodes that only the first one has, ascending. Shape `(n,)`, int64.
        only_second: Ids of the episodes that only the second one has.
        both: Ids of the episodes that both have.
    """

    only_first: IntArray
    only_second: IntArray
    both: IntArray


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection, as it was when it was looked up; its methods ask the store.

    Threads: any number may use it.

    Args:
        name: Its name.
        condition: The condition that its episodes met when it was created; None: they were named by hand.
        by: Who created it.
        reason: Why; "" if no reason was given.
        created: When, in UTC without a time zone.
        version: How much the store had when the condition was evaluated: the generation and the number of the
            newest record, as in the relation `commits`.
        store: UUID of the store in which it was created.
    """

    name: str
    condition: str | None
    by: str
    reason: str
    created: datetime | None
    version: str
    store: str
    _selections: Selections = field(repr=False, compare=False)

    def episodes(self, *, strict: bool = False) -> IntArray:
        """Return the ids of its members, ascending; also of members without rows. Shape `(n,)`, int64.

        Args:
            strict: Whether all rows of all members must be readable.

        Raises:
            StateError: `strict` is set, and rows of a member were evicted or deleted.
        """
        found = self._selections.find_members(self.name)
        if strict and (lost := self.missing()).size:
            listed = ", ".join(map(str, lost[:_LISTED].tolist())) + (", ..." if lost.size > _LISTED else "")
            raise StateError(
                f"{lost.size} of {found.size} episodes of selection {self.name!r} have lost rows: {listed}",
                hint="restore a version that has them, or use the rest: strict=False",
            )
        return found

    def missing(self) -> IntArray:
        """Return the ids of its members of which rows were evicted or deleted. Shape `(n,)`, int64."""
        return self._selections.find_members(self.name, "live_rows < length")

    def changes(self) -> list[dict[str, Any]]:
        """Return its changes by hand, oldest first: `episode_id`, `time`, `act`, `by` and `reason` of each.

        `time` is in microseconds since 1970, and `act` is "include" or "exclude".
        """
        return self._selections.find_changes(self.name)


class Selections:
    """Query selections by calling it; its methods create, change, compare and drop them.

    A selection is a list of episodes that has a name. It is stored in the facts of its episodes, so it does
    not change when rows are written, and merges, exports, versions and their copies keep it. The condition
    `selection('name')` selects its episodes in `where=` of samplers and in SQL over episodes.

    Threads: any number may use it. Crashes: a change survives the end of the process when its call returns,
    and a power failure after the next `flush`; after a crash before that, all of it is stored or nothing.
    Processes: the process that writes may change selections, and the workers of `rb.share()`; followers see
    the changes.

    Args:
        storage: The storage of the episodes.
        catalog: Its SQL catalog.
        proxy: Changes selections in the process that writes; None: this process writes, or only reads.

    Example:
        >>> clean = rb.selections.create("clean-v1", where="length > 3", reason="demonstrations")
        >>> sampler = expstore.RandomSampler(where="selection('clean-v1')")
        >>> list(rb.selections)
        ['clean-v1']
    """

    def __init__(self, storage: ReadView, catalog: Catalog, proxy: WritingProxy | None = None) -> None:
        self._storage, self._catalog, self._proxy = storage, catalog, proxy

    def __call__(
        self,
        where: str | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
    ) -> Result:
        """Return the relation `selections`, or a part of it. docs/selections.md describes its columns.

        Args:
            where: An SQL expression over its columns that selects selections; None: all.
            order_by: SQL expressions, as after ORDER BY; `name` is always appended as the last one.
            limit: Largest number of selections; None: all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expressions.

        Raises:
            QueryError: `where` is not one expression, `order_by` is not a list of them, or DuckDB refuses
                them.
        """
        from expstore.sql.views import select_rows  # loads DuckDB

        return self._query(select_rows("selections", "name", where, order_by, limit), params)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in alphabetical order."""
        return iter([name for (name,) in self._query("SELECT name FROM selections ORDER BY name").fetchall()])

    def __getitem__(self, name: str) -> Selection:
        """Return a selection.

        Raises:
            NotFoundError: The store has no selection of this name.
        """
        found = self("name = $name", params={"name": name}).arrow().to_pylist()
        if not found:
            raise _build_unknown_error(name, list(self))
        (row,) = found
        return Selection(
            name, row["condition"], row["author"] or "", row["reason"] or "", row["created"],
            row["version"] or "", row["store"] or "", self,
        )  # fmt: skip

    def create(
        self,
        name: str,
        where: str | None = None,
        *,
        episodes: Sequence[int] | IntArray | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> Selection:
        """Create a selection of the episodes that meet a condition now, or of given episodes.

        A condition selects episodes that have ended: an open episode still gets rows.

        Args:
            name: Its name: printable text without "/".
            where: An SQL expression over the columns of the relation `episodes`.
            episodes: Ids of the episodes, instead of a condition.
            reason: Why it is created.
            by: Who creates it; None: the user of the operating system.

        Returns:
            The selection.

        Raises:
            ArgumentError: The name is not allowed, or not exactly one of `where` and `episodes` is given; or
                `by` is missing, and the user has no name.
            NotFoundError: No episode that has ended meets the condition, or there never was one of the given
                episodes.
            QueryError: `where` is not one expression, or DuckDB refuses it.
            StateError: There is a selection of this name, or the store is closed, or open for reading only.
            StorageError: The disk failed; the selection does not exist.
        """
        if (where is None) == (episodes is None):
            raise ArgumentError("pass either where=, a condition, or episodes=, their ids")
        if where is not None:
            select_ended(where)  # raises if it is not a condition
        numbers = () if episodes is None else _check_episodes(episodes)
        self._change(SelectionChange("create", name, numbers, reason, _name_user(by), where))
        return self[name]

    def include(
        self, name: str, episodes: int | Sequence[int] | IntArray, *, reason: str, by: str | None = None
    ) -> None:
        """Add episodes to a selection by hand, also episodes that were excluded; members stay as they are.

        Args:
            name: Name of the selection.
            episodes: Ids of the episodes, which may be open or without rows.
            reason: Why; it is stored with the episodes.
            by: Who adds them; None: the user of the operating system.

        Raises:
            ArgumentError: The reason is not text, or is empty; or an id is not an integer.
            NotFoundError: There is no such selection, or there never was one of the episodes.
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; nothing has changed.
        """
        self._change_by_hand("include", name, episodes, reason, by)

    def exclude(
        self, name: str, episodes: int | Sequence[int] | IntArray, *, reason: str, by: str | None = None
    ) -> None:
        """Remove episodes from a selection by hand; episodes that are excluded already stay as they are.

        Args:
            name: Name of the selection.
            episodes: Ids of the episodes. An episode that is not a member is marked as excluded, too.
            reason: Why; it is stored with the episodes.
            by: Who removes them; None: the user of the operating system.

        Raises:
            ArgumentError: The reason is not text, or is empty; or an id is not an integer.
            NotFoundError: There is no such selection, or there never was one of the episodes.
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; nothing has changed.
        """
        self._change_by_hand("exclude", name, episodes, reason, by)

    def drop(self, name: str) -> None:
        """Remove a selection, with the record of its changes. Its episodes stay.

        Args:
            name: Its name.

        Raises:
            NotFoundError: There is no such selection.
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; nothing has changed.
        """
        self._change(SelectionChange("drop", name))

    def diff(self, first: str, second: str) -> Difference:
        """Compare the members of two selections.

        Args:
            first: Name of a selection.
            second: Name of another one.

        Raises:
            NotFoundError: There is no such selection.

        Example:
            >>> first = rb.selections.create("all", where="true")
            >>> second = rb.selections.create("long", where="length > 7")
            >>> rb.selections.diff("all", "long").only_second
            array([], dtype=int64)
        """
        one, two = (self[name].episodes() for name in (first, second))
        return Difference(np.setdiff1d(one, two), np.setdiff1d(two, one), np.intersect1d(one, two))

    # -- what connections do in another way --------------------------------------------------------

    def _query(self, sql: str, params: Sequence[object] | Mapping[str, object] | None = None) -> Result:
        return self._catalog.query(sql, params)

    def _change(self, change: SelectionChange) -> None:
        if self._proxy is not None:
            self._proxy.change_selection(change)
        else:
            self.change(change)

    # -- for selections, the server and workers ----------------------------------------------------

    def find_members(self, name: str, where: str = "true") -> IntArray:
        """Return the ids of the members of a selection that meet a condition, ascending. Shape `(n,)`."""
        return np.array(self.find_episodes(f"list_contains(selections, $name) AND {where}", name), np.int64)

    def find_episodes(self, where: str, name: str | None = None) -> list[int]:
        """Return the ids of the episodes that meet a condition, in which `$name` is a name; ascending."""
        sql = f"SELECT list(episode_id ORDER BY episode_id) FROM episodes WHERE {where}"
        return self._query(sql, None if name is None else {"name": name}).fetchall()[0][0] or []

    def find_changes(self, name: str) -> list[dict[str, Any]]:
        """Return the changes of a selection by hand; see `Selection.changes`."""
        rows = self._query(_CHANGES, {"pointer": _point_to(name)}).fetchall()
        return [dict(zip(("episode_id", "time", "act", "by", "reason"), row, strict=True)) for row in rows]

    def change(self, change: SelectionChange) -> None:
        """Change a selection in the process that writes, by one record.

        Raises:
            ArgumentError: A name or a reason is not allowed.
            ExpStoreError: See `create`, `include`, `exclude` and `drop`.
        """
        check_name("selection", change.name, "clean-v1")
        for what, text in (("reason", change.reason), ("by", change.by)):
            if not isinstance(text, str):
                raise ArgumentError(f"{what} must be text, got {text!r:.100}")
        if change.act in ("include", "exclude") and not change.reason:
            raise ArgumentError(
                f"a reason is missing to {change.act} episodes", hint='as in reason="it hangs"'
            )
        storage = self._storage
        writer = storage.writer()
        if change.act == "create":
            if not change.version:  # with one, the condition was evaluated elsewhere
                change = change._replace(version=version_of(storage))
                if change.condition is not None:
                    found = self._query(select_ended(change.condition)).fetchall()[0][0]
                    change = change._replace(episodes=found or ())
            if not change.episodes:
                which = (
                    ""
                    if change.condition is None
                    else f": no episode that has ended meets {change.condition!r}"
                )
                raise NotFoundError(
                    f"selection {change.name!r} would have no episode{which}",
                    hint="rb.episodes(where) lists the episodes that meet a condition",
                )
        with storage.lock:
            known = list(self)
            if change.act == "create" and change.name in known:
                raise StateError(
                    f"there is a selection {change.name!r} already",
                    hint=f"use another name, or drop it first: rb.selections.drop({change.name!r}), "
                    f"expstore selections drop",
                )
            if change.act != "create" and change.name not in known:
                raise _build_unknown_error(change.name, known)
            numbers = change.episodes
            if change.act == "drop":
                rows = self._query(_MARKED, {"pointer": _point_to(change.name)}).fetchall()
                numbers = [number for (number,) in rows]
            entries = self._catalog.find_episodes(sorted(set(numbers)))
            edit = make_edit(change, now_us(), storage.description.uuid)
            new = [replace(entry, text=edit(entry.text)) for entry in entries]
            if changed := tuple(one for one, old in zip(new, entries, strict=True) if one.text != old.text):
                writer.annotate(NewFacts(changed))

    def _change_by_hand(
        self,
        act: Literal["include", "exclude"],
        name: str,
        episodes: int | Sequence[int] | IntArray,
        reason: str,
        by: str | None,
    ) -> None:
        numbers = _check_episodes([episodes] if isinstance(episodes, int) else episodes)
        self._change(SelectionChange(act, name, numbers, reason, _name_user(by)))


def select_ended(where: str) -> str:
    """Return the query for the list of the ended episodes that meet a condition; NULL: none.

    Raises:
        QueryError: `where` is not a single expression.
    """
    from expstore.sql.views import select_episodes  # loads DuckDB

    chosen = select_episodes(where, None, None)
    return f"SELECT list(episode_id ORDER BY episode_id) FROM (\n{chosen}\n) WHERE status <> 'open'"


def version_of(storage: ReadView) -> str:
    """Return how much a store has: the generation and the number of its newest record."""
    generation, number = storage.state.content
    return f"{generation}.{number}"


def _check_episodes(episodes: Sequence[int] | IntArray) -> tuple[int, ...]:
    return tuple(map(check_episode, episodes.tolist() if hasattr(episodes, "tolist") else episodes))


def _name_user(by: str | None) -> str:
    if by is not None:
        return by
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run under a user id without a name
        raise ArgumentError("the user of this process has no name", hint="say who changes it: by=") from None


def _point_to(name: str) -> str:
    """Return a name as a part of a JSON pointer; it has no slash."""
    return name.replace("~", "~0")


def _build_unknown_error(name: str, known: Sequence[str]) -> NotFoundError:
    hint = suggest(name, known, "the selections are") if known else "the store has none"
    return NotFoundError(f"there is no selection {name!r:.100}", hint=hint)
