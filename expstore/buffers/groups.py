"""`rb.groups`: query groups of episodes, and close or discard one.

Used by users. `sql/groups.py` says which episodes are a group; `samplers/groups.py` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from expstore.core.arguments import check_whole
from expstore.errors import ArgumentError

if TYPE_CHECKING:
    from expstore.buffers.store_handle import StoreHandle
    from expstore.sql.result import Result


class Groups:
    """Query groups by calling it; its methods close and discard groups.

    The episodes with the same value of `EpisodeKeys(group=...)` are a group, in the order in which they
    began: the first `group_size` of them, then the next. A group is `complete` when all of them have ended,
    that is terminated or truncated, or when it was closed; `failed` if one was cut or a row was evicted or
    deleted; `discarded`; and otherwise `open`.

    Threads: any number may use it. Crashes: a change survives the end of the process when its call returns,
    and a power failure after the next `flush`. Processes: only the process that writes may change groups.

    Args:
        store: The store.

    Example:
        >>> rb = expstore.open("run.exp", episodes={"group": "prompt_id", "group_size": 8})
        >>> rb.groups("status = 'complete' AND std_return > 0").arrow().num_rows
        0
    """

    def __init__(self, store: StoreHandle) -> None:
        self._store = store

    def __call__(
        self,
        where: str | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
    ) -> Result:
        """Return the relation `groups`, or a part of it. docs/groups.md describes its columns.

        Args:
            where: An SQL expression over its columns that selects groups; None: all.
            order_by: SQL expressions, as after ORDER BY; `group_id` is always appended as the last one.
            limit: Largest number of groups; None: all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expressions.

        Raises:
            QueryError: `where` is not one expression, `order_by` is not a list of them, or DuckDB refuses
                them.
        """
        from expstore.sql.views import select_rows

        sql = select_rows("groups", "group_id", where, order_by, limit)
        return self._store.catalog.query(sql, params)

    def close(self, group_id: int, /) -> None:
        """Complete a group with the members that have ended. Its other members never belong to a group.

        Args:
            group_id: Id of a group that is open, or that failed because a member was cut.

        Raises:
            NotFoundError: There is no such group.
            StateError: The group has another status, or no member has ended; the store has no groups, is
                closed, or is open for reading only.
            StorageError: The disk failed; nothing has changed.

        Example:
            >>> for group_id in rb.groups("status = 'open' AND ended >= 4").arrow()["group_id"].to_pylist():
            ...     rb.groups.close(group_id)
        """
        self._end(group_id, "complete", "")

    def discard(self, group_id: int, /, *, reason: str) -> None:
        """Never draw a group. Episodes with the same value that begin later are another group.

        Args:
            group_id: Id of a group, which may be open, complete or failed.
            reason: Why; it is in the relation `groups`.

        Raises:
            ArgumentError: The reason is not text, or is empty.
            NotFoundError: There is no such group.
            StateError: The group was discarded already; the store has no groups, is closed, or is open for
                reading only.
            StorageError: The disk failed; nothing has changed.

        Example:
            >>> for group_id in rb.groups("std_return = 0").arrow()["group_id"].to_pylist():
            ...     rb.groups.discard(group_id, reason="no signal")
        """
        if not isinstance(reason, str) or not reason:
            raise ArgumentError(
                f"reason must be text, got {reason!r:.100}", hint='such as reason="no signal"'
            )
        self._end(group_id, "discarded", reason)

    def _end(self, group_id: Any, status: str, reason: str) -> None:
        number = check_whole("group_id", group_id, hint="use an id of the relation groups")
        catalog = self._store.catalog
        catalog.groups.end(catalog, number, status, reason)
