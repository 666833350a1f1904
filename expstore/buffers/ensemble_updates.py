"""Patches of rows of an ensemble: each goes to the member whose row it is for.

Ensembles are built on it. What a patch may do, and when it reaches no row, the members decide.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.buffers.ensemble_batches import pairs
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.updates import ConditionalUpdateResult, Patch, leaves_of
from expstore.core.values import key_name
from expstore.errors import SchemaError

__all__ = ["MemberPatching"]


class MemberPatching:
    """Change fields of members' rows that are still there.

    Threads, processes and crashes: as the members' `update_if_present`, each for itself.
    """

    _rbs: tuple[ReplayBuffer, ...]

    def update_if_present(
        self,
        *,
        index: TensorDictBase,
        generation: torch.Tensor,
        patch: Patch,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Change fields of those rows that are still there; no other row is ever reached.

        Args:
            index: Which rows: `buffer_ids` and `index`, as samples have them below `"index"`, and as `extend`
                returns them.
            generation: Their `index_generation`. In the shape of `buffer_ids`.
            patch: New values by key. In that shape, then that of the field.
            version_key: As the members' `update_if_present`, as are the next ones.
            version: See there.
            require_newer: See there.

        Returns:
            What was done with each row, in that shape.

        Raises:
            NotFoundError: There is no such field.
            SchemaError: Values do not fit; patches of members before are applied.
            StateError: A member's writer does not track generations; nothing was changed.
            TypeError: Members are not named by integers.
            ValueError: There is no such member; nothing was changed.
        """
        members, rows = pairs(index, len(self._rbs))
        shape = index.get("buffer_ids").shape
        generations = torch.as_tensor(generation).reshape(-1).cpu().numpy()
        if generations.size != members.size:
            raise SchemaError(
                "generation and routed index metadata must address the same number of records, got "
                f"{generations.size} and {members.size}"
            )
        fields = {key: _flat(key_name(key), value, shape) for key, value in leaves_of(patch).items()}
        several = torch.as_tensor(version).numel() > 1 if version is not None else False
        versions = torch.as_tensor(version).reshape(-1) if several else version
        for rb in self._rbs:
            rb._check_patching(True)
        updated = torch.zeros(members.size, dtype=torch.bool)
        rejected = None if version_key is None else torch.zeros_like(updated)
        for member in np.unique(members).tolist():
            mine = torch.from_numpy(np.flatnonzero(members == member))
            found = self._rbs[member].update_if_present(
                index=rows[mine.numpy()],
                generation=generations[mine.numpy()],
                patch={key: values[mine] for key, values in fields.items()},
                version_key=version_key,
                version=versions[mine] if several else version,
                require_newer=require_newer,
            )
            updated[mine] = found.updated
            if rejected is not None and found.version_rejected is not None:
                rejected[mine] = found.version_rejected
        return ConditionalUpdateResult(
            updated.reshape(shape), None if rejected is None else rejected.reshape(shape)
        )

    def submit_update_if_present(self, **patch: Any) -> Future[ConditionalUpdateResult]:
        """Do as `update_if_present`, and return a future that is done.

        Args:
            patch: As there.
        """
        done: Future[ConditionalUpdateResult] = Future()
        try:
            done.set_result(self.update_if_present(**patch))
        except Exception as exc:
            done.set_exception(exc)
        return done


def _flat(name: str, value: Any, shape: torch.Size) -> torch.Tensor:
    """Return values of rows in one dim."""
    values = torch.as_tensor(value).cpu()
    if values.shape[: len(shape)] != shape:
        raise SchemaError(
            f"Patch entry {name!r} must start with shape {tuple(shape)}, got {tuple(values.shape)}."
        )
    return values.reshape(shape.numel(), *values.shape[len(shape) :])
