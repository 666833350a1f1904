"""End the open episodes of unnamed streams, before other streams begin.

Used by ensembles. It appends no rows and does not end named streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.samplers.keyed_trajectories import Trajectories
from expstore.storages.read_view import ReadView
from expstore.storages.sessions import end_unnamed


class Tails:
    """Mark the newest rows of open episodes as ends, so that later rows begin new episodes.

    Args:
        end: The field that ends an episode; set to True in each newest row.
        terminated: The field that marks a terminated episode; never changed.
        truncated: The field that marks a truncated episode; set to True in each newest row that is not
            terminated.

    Raises:
        ArgumentError: Two of the fields are the same.
    """

    def __init__(self, end: Any, terminated: Any, truncated: Any) -> None:
        self.end = to_key(end)
        self.terminated = None if terminated is None else to_key(terminated)
        self.truncated = None if truncated is None else to_key(truncated)
        keys = [key for key in (self.end, self.terminated, self.truncated) if key is not None]
        if len(set(keys)) != len(keys):
            raise ArgumentError("end, terminated and truncated keys must be distinct.")

    def check(self, storage: ReadView, sampler: Any) -> None:
        """Check that the streams of a storage can be ended in such a way that its sampler notices.

        Raises:
            SchemaError: There is no such field.
            StateError: The storage cannot be written, or the sampler uses trajectory ids that later rows may
                reuse.
            ArgumentError: The field is not boolean.
        """
        if not storage.stored.rows:
            return
        storage.writer()
        schema = storage.require_schema()
        if self.end not in schema:
            raise SchemaError(f"no field {key_name(self.end)!r} that ends streams", hint=f"it has {schema!r}")
        if schema[self.end].dtype != "bool":
            raise ArgumentError("end_streams requires a boolean end_key field.")
        found = getattr(sampler, "_trajectories", None)
        if not isinstance(found, Trajectories) or found.name in (None, storage.keys.trajectory):
            return  # the store's own episodes: later rows begin new ones, even with the same trajectory ids
        (names,) = storage.read(storage.stored.ids(), [storage.require_schema().place_of(found.name or ())])
        if self.end not in (found.ends or ()) or (names != names[:1]).any():
            raise StateError(
                f"end_streams supports samplers by {key_name(found.name or ())!r} only when they have "
                f"end_key={self.end!r} and every record of a member carries the same trajectory id: "
                "otherwise later rows may reuse ids",
                hint="leave traj_key out: the store tells streams apart by itself",
            )

    def close(self, storage: ReadView) -> None:
        """End the open episodes of a storage's unnamed streams."""
        with storage.locks.extend, storage.lock:
            ids = self._open(storage)
            if ids.size:
                places, columns = self._close_rows(storage, ids)
                storage.writer().change(ids, places, columns)
            end_unnamed(storage)

    def _open(self, storage: ReadView) -> IntArray:
        """Return the newest rows of the open episodes of unnamed streams."""
        lasts = np.array(storage.episodes.tails(), np.int64)
        return np.sort(lasts[storage.stored.holds(lasts)])

    def _close_rows(self, storage: ReadView, ids: IntArray) -> tuple[list[int], Sequence[Array]]:
        schema = storage.require_schema()
        done = self._read(storage, ids, self.end)
        places, columns = [schema.place(self.end)], [np.ones_like(done)]
        if self.truncated is not None and self.truncated in schema:
            over = done.reshape(ids.size, -1).any(1)
            if self.terminated is not None and self.terminated in schema:
                over = over | self._read(storage, ids, self.terminated).reshape(ids.size, -1).any(1)
            truncated = self._read(storage, ids, self.truncated)
            truncated[~over] = True
            places.append(schema.place(self.truncated))
            columns.append(truncated)
        return places, columns

    def _read(self, storage: ReadView, ids: IntArray, key: Key) -> Array:
        (column,) = storage.read(ids, [storage.require_schema().place_of(key)])
        return column
