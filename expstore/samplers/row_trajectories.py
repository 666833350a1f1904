"""TorchRL's `trajectories` and `ends`: trajectories as one value per row.

Slices follow the store's episodes. Values that say the same are accepted, others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray
from expstore.errors import ArgumentError, StateError
from expstore.storages.read_view import find

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

_CHUNK = 1 << 18


class RowTrajectories:
    """Trajectories that a user passed as one value per row, in the order of the rows' indices.

    Args:
        name: "trajectories" or "ends".
        values: The trajectory's id of each row, or whether the row ends its trajectory. Shape `(n,)`.
    """

    def __init__(self, name: str, values: Array) -> None:
        self.name, self._values = name, values

    @classmethod
    def of(cls, arguments: Mapping[str, Any], *, by_field: bool) -> Self | None:
        """Return the trajectories that a sampler's arguments contain; None: they contain none.

        Args:
            arguments: Arguments of the sampler; `trajectories` and `ends` are looked up.
            by_field: Whether other arguments name fields that define trajectories.

        Raises:
            ArgumentError: Both are there, or one of them and such a field; or the values are not 1-dim, not
                integers (`trajectories`), or not booleans (`ends`).
        """
        found = {
            name: arguments[name] for name in ("trajectories", "ends") if arguments.get(name) is not None
        }
        if not found:
            return None
        if len(found) > 1:
            raise ArgumentError("trajectories and ends are exclusive arguments: pass one of them")
        name, given = found.popitem()
        if by_field:
            raise ArgumentError(f"{name} and the names of fields are exclusive arguments: pass one of them")
        values: Array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        kinds, word = ("iu", "integers") if name == "trajectories" else ("b", "booleans")
        if values.ndim != 1 or values.dtype.kind not in kinds:
            raise ArgumentError(
                f"{name} must be a 1-dim tensor of {word}, one for each row, got {values.dtype} of the shape "
                f"{list(values.shape)}"
            )
        return cls(name, values)

    def check(self, storage: ReadView) -> None:
        """Compare the values with the episodes of a storage.

        Raises:
            StateError: There is not one value for each row; or a trajectory ends where the storage's episode
                does not, or the other way round.
        """
        ids, _ = find(storage, slice(None))
        if ids.size != self._values.size:
            raise StateError(
                f"{self.name} has {self._values.size} values, but the store has {ids.size} rows",
                hint=f"leave {self.name} out: slices follow the store's episodes",
            )
        for start, own in _find_seams(storage, ids):
            rows = slice(start, start + own.size)
            if self.name == "ends":
                theirs = self._values[rows]
            else:
                theirs = self._values[rows] != self._values[start + 1 : start + 1 + own.size]
            if (differs := np.flatnonzero(own != theirs)).size:
                row = start + int(differs[0])
                says, does = ("", " not") if theirs[row - start] else (" not", "")
                raise StateError(
                    f"by {self.name} a trajectory does{says} end at row {row}, but the store's episode "
                    f"does{does}",
                    hint=f"leave {self.name} out, or name the field of the trajectories: traj_key=",
                )


def _find_seams(storage: ReadView, ids: IntArray) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield pieces of the rows: the place of the first one, and which rows end an episode.

    The last row is left out: no row follows it.
    """
    place = len(storage.require_schema().fields) + 1
    for start in range(0, ids.size - 1, _CHUNK):
        (episodes,) = storage.read(ids[start : start + _CHUNK + 1], [place])
        yield start, episodes[:-1] != episodes[1:]
