"""`rb.retention`: which rows of a store without a capacity are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expstore.buffers.policy_runner import load_policy
from expstore.buffers.store_handle import StoreHandle
from expstore.core.retention_policy import Retain
from expstore.errors import StateError
from expstore.storages.capabilities import GivenUp


class Retention:
    """Set and apply the retention policy of a store without a capacity: `rb.retention`.

    The policy is stored, and applied every few seconds while the store is open for writing.

    Args:
        store: The store.

    Example:
        >>> rb.retention.set({"bytes": "10GB", "where": "episode.return > 0"})
        >>> rb.retention.apply(dry_run=True).rows
        0
    """

    def __init__(self, store: StoreHandle) -> None:
        self._store = store

    @property
    def policy(self) -> Retain | None:
        """The stored policy; None: all rows are kept."""
        return load_policy(self._store.storage)

    def set(self, policy: Retain | Mapping[str, Any] | None) -> None:
        """Set which rows are kept from now on.

        Args:
            policy: A `Retain`, or a dict of its parts; None: all rows are kept.

        Raises:
            ValueError: The argument is not a policy.
            QueryError: The rows lack fields that the condition names; nothing was changed.
            StateError: The store has a capacity, is in RAM, closed, or open for reading only.
        """
        wanted, runner = Retain() if policy is None else Retain.of(policy), self._store.runner
        runner.check(wanted)
        runner.keep(wanted)
        self._store.start_retention()

    def apply(self, *, dry_run: bool = False) -> GivenUp:
        """Delete the rows that the policy does not keep now.

        Whole episodes are deleted; they and their facts stay in the relation `episodes`, and ids are never
        reused. The deletion is durable when this returns; after a crash before that, all of these rows are
        deleted or none.

        Args:
            dry_run: Delete nothing; only return what would be deleted.

        Returns:
            Number of deleted episodes and rows, and how many bytes less the columns take on disk.

        Raises:
            QueryError: The condition cannot be computed.
            StateError: The store has no policy, is closed, or open for reading only.
            StorageError: The disk failed.
        """
        policy, runner = self.policy, self._store.runner
        if policy is None:
            raise StateError("the store has no policy", hint="set one first: retention.set(policy)")
        return runner.apply(policy, dry_run=dry_run)
