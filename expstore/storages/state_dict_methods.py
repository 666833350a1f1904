"""What `state_dict` says of a storage that keeps its rows itself, and who is told when it has other ones.

Base of every storage; those whose rows go with the process say more
(`expstore.storages.snapshots.portable_storage`). It never reads a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from expstore.core.values import Window
from expstore.errors import StateError

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.capture import Held
    from expstore.storages.columns.packed.column import PackedRows

__all__ = ["Hook", "Stateful"]

#: Takes what is kept and returns what is to be kept instead, or the other way round.
Hook = Callable[[Any], Any]


class Holder(Protocol):
    """Who holds a storage, and remembers how its rows are made."""

    def _renewed(self, storage: Any) -> None:
        """Note that a storage has another content."""


class Stateful:
    """Say which store this is, and tell who holds it of another content.

    Threads, processes and crashes: as the storage.

    Example:
        >>> sorted(ZarrStorage("run.exp").state_dict())
        ['last', 'uuid']
    """

    kind: str
    uuid: str
    _holders: weakref.WeakSet[Holder] | None = None

    @property
    def window(self) -> Window:
        """The ids that can be read now."""
        raise NotImplementedError

    def add_holder(self, holder: Holder) -> None:
        """Tell somebody of every content that takes this one's place, for as long as they live."""
        if self._holders is None:
            self._holders = weakref.WeakSet()
        self._holders.add(holder)

    def tell_holders(self) -> None:
        """Tell them now."""
        for holder in list(self._holders or ()):
            holder._renewed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return which store this is, and its last row: the rows are in its folder, for `dumps`."""
        return {"uuid": self.uuid, "last": self.window.last}

    def packed_now(self) -> dict[int, PackedRows]:
        """Return the rows of packed fields as they are at this moment, by place; the lock is held."""
        return {}

    def segments_now(self, low: int) -> dict[tuple[int, ...], list[Held]]:
        """Return the segments that hold rows newer than `low`, and of which fields; the lock is held."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing for a state without rows: these are in the folder.

        Raises:
            StateError: The state holds rows.
        """
        if "rows" in state_dict:
            raise StateError(
                f"a {self.kind} storage keeps its rows itself, and this state holds some",
                hint="load it into a LazyMemmapStorage, or use dumps() and loads()",
            )

    def register_save_hook(self, hook: Hook) -> None:
        """Refuse: `state_dict` holds no rows here.

        Raises:
            StateError: Always.
        """
        raise self._no_hooks()

    def register_load_hook(self, hook: Hook) -> None:
        """Refuse: `state_dict` holds no rows here.

        Raises:
            StateError: Always.
        """
        raise self._no_hooks()

    def before_dump(self) -> None:
        """Note that a snapshot is about to be made."""

    def _no_hooks(self) -> StateError:
        return StateError(
            f"a {self.kind} storage keeps its rows itself: state_dict() has none that a hook could change",
            hint="change them before extend(), or when they have been read",
        )
