"""Split batches into trajectories: padded rows, or the first and last row of each.

Users call it on the output of a collector, or on tensors in the order of a ring. It never reads a store:
`rb.episodes`, `rb.trajectory` and `rb.query` return the episodes of a store.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from expstore.core.values import Key, check_key, key_name, to_key
from expstore.data.nested_tensors import make_strided
from expstore.errors import ArgumentError, SchemaError

#: Signed dtypes of the same size as dtypes for which torch lacks functions.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
#: The last names of the flags that end an episode; any one of them does.
DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: str | tuple[str, ...] | None = None,
    trajectory_key: str | tuple[str, ...] | None = None,
    done_key: str | tuple[str, ...] | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Split a batch into one row per trajectory, padded with zeros.

    A trajectory ends at the end of the batch, even if the next batch continues it.

    Args:
        rollout_tensordict: Steps of trajectories, concatenated along the last batch dim. The other batch dims
            are lanes, whose trajectories are never joined. It is not changed.
        prefix: Where to read the trajectory ids (`traj_ids`) and to write the mask. None for "collector" if
            there is such an entry, else the root.
        trajectory_key: The field with the trajectory id of each step; overrides `prefix`.
        done_key: The field below "next" that is True in the last step of each trajectory, if there are no
            trajectory ids; None for "done". The ids derived from it, from 0 on, are written to `traj_ids`.
        as_nested: Whether to return nested tensors without padding and mask, with the given layout or
            `torch.strided`.

    Returns:
        A new TensorDict. Batch size `(trajectories, longest)`; `mask`, next to the ids, is True where there
        is a step. If all trajectories are as long as the last dim, it is the batch itself with the mask (a
        batch without lanes gets a first dim).

    Raises:
        ArgumentError: It is not a TensorDict, or a key is not a key.
        SchemaError: It has no batch dims or no steps, or the field with trajectory ids or ends is missing or
            has more than one value per step.

    Example:
        >>> from expstore.trajectories import split_trajectories
        >>> done = torch.tensor([False, False, True, False, False])
        >>> data = TensorDict({"x": torch.arange(5), ("next", "done"): done}, [5])
        >>> split_trajectories(data)["x"]
        tensor([[0, 1, 2],
                [3, 4, 0]])
    """
    if not isinstance(rollout_tensordict, TensorDictBase):
        raise ArgumentError(
            "split_trajectories takes steps as a TensorDict, as collectors return them, got "
            f"{type(rollout_tensordict).__name__}"
        )
    for name, key in {"trajectory_key": trajectory_key, "done_key": done_key}.items():
        if key is not None:
            check_key(name, key)
    if prefix is not None and prefix != ():
        check_key("prefix", prefix)
    if 0 in rollout_tensordict.shape or not rollout_tensordict.ndim:
        raise SchemaError(f"there are no steps to split in a batch of size {[*rollout_tensordict.shape]}")
    lazy = isinstance(rollout_tensordict, LazyStackedTensorDict)  # these cannot be indexed by several dims
    batch = rollout_tensordict.contiguous() if lazy else rollout_tensordict.copy()
    names_key, mask_key = _keys(batch, prefix, trajectory_key)
    names = batch.get(names_key, None)
    if names is None:
        names = _name_trajectories(batch, ("next", *to_key("done" if done_key is None else done_key)))
        batch.set(names_key, names)
    names = _require_one_per_step(names, batch, names_key)
    lengths = _lengths(names)
    longest = int(lengths.max())
    if longest == int(lengths.min()) == names.shape[-1]:
        batch.set(mask_key, torch.ones(batch.shape, dtype=torch.bool, device=batch.device))
        return batch if batch.ndim > 1 else batch.unsqueeze(0)
    flat, sizes = batch.reshape(-1), lengths.tolist()
    if as_nested:
        return _nest(flat, sizes, as_nested if isinstance(as_nested, torch.layout) else torch.strided)
    place = torch.arange(longest, device=lengths.device)
    mask = place < lengths[:, None]
    starts = (lengths.cumsum(0) - lengths)[:, None]
    padded = _zero(flat[torch.where(mask, starts + place, starts)], ~mask)
    for key, values in _lists(flat):
        parts = (part.tolist() for part in values.split(sizes))
        rows = (NonTensorStack(*part, *[None] * (longest - len(part))) for part in parts)
        padded.set(key, NonTensorStack(*rows))
    padded.set(mask_key, mask)
    return padded


def _keys(batch: TensorDictBase, prefix: Any, trajectory_key: Any) -> tuple[Key, Key]:
    """Return the keys of the trajectory ids and of the mask."""
    if trajectory_key is not None:
        key = to_key(trajectory_key)
        return key, (*key[:-1], "mask")
    if prefix is None and batch.get("collector", None) is not None:
        prefix = "collector"
    place = () if prefix is None or prefix == () else to_key(prefix)
    return (*place, "traj_ids"), (*place, "mask")


def _name_trajectories(batch: TensorDictBase, key: Key) -> torch.Tensor:
    """Return a trajectory id for each step, from the flags that end trajectories."""
    done = batch.get(key, None)
    if done is None:
        raise SchemaError(
            f"cannot split the batch into trajectories: it has no field {key_name(key)!r}",
            hint="pass trajectory_key= or done_key=",
        )
    done = _require_one_per_step(done, batch, key).bool()
    first = torch.zeros_like(done)
    first[..., 1:] = done[..., :-1]
    first[..., 0] = True
    return first.reshape(-1).cumsum(0).reshape(done.shape) - 1


def _require_one_per_step(values: torch.Tensor, batch: TensorDictBase, key: Key) -> torch.Tensor:
    if values.numel() != batch.shape.numel():
        raise SchemaError(
            f"{key_name(key)!r} has shape {[*values.shape]} in a batch of size {[*batch.shape]}: "
            "it must have one value per step"
        )
    return values.reshape(batch.shape)


def _lengths(names: torch.Tensor) -> torch.Tensor:
    """Return the lengths of runs of equal ids, which end at the end of a lane. Shape `(n,)`, int64."""
    first = torch.ones(names.shape, dtype=torch.bool, device=names.device)
    first[..., 1:] = names[..., 1:] != names[..., :-1]
    starts = first.reshape(-1).nonzero()[:, 0]
    return torch.diff(starts, append=starts.new_tensor([names.numel()]))


def _zero(batch: TensorDictBase, where: torch.Tensor) -> TensorDictBase:
    """Return a batch with zeros at some positions; entries that are not tensors are not changed."""

    def fill(values: torch.Tensor) -> torch.Tensor:
        wide = where.reshape(*where.shape, *(1 for _ in values.shape[where.ndim :]))
        signed = _SIGNED.get(values.dtype)
        if signed is not None:
            return values.view(signed).masked_fill(wide, 0).view(values.dtype)
        return values.masked_fill(wide, 0)

    return batch.apply(fill, filter_empty=False)


def _lists(batch: TensorDictBase) -> list[tuple[Any, NonTensorStack]]:
    """Return the entries with one object per row; entries with one object for all rows are left out."""
    entries = batch.items(True, is_leaf=lambda kind: issubclass(kind, NonTensorData | NonTensorStack))
    return [(key, values) for key, values in entries if isinstance(values, NonTensorStack)]


def _nest(batch: TensorDictBase, sizes: list[int], layout: torch.layout) -> TensorDictBase:
    """Return a TensorDict of nested tensors. Batch size `(trajectories, -1)`."""
    entries: dict[str, Any] = {}
    for name in list(batch.keys()):
        values = batch.get(name)
        if isinstance(values, NonTensorStack):
            entries[name] = NonTensorStack(*(part.tolist() for part in values.split(sizes)))
        elif isinstance(values, NonTensorData):
            entries[name] = NonTensorData(values.data, batch_size=[len(sizes)])
        elif isinstance(values, TensorDictBase):
            entries[name] = _nest(values, sizes, layout)
        elif values.dtype in _SIGNED and layout is torch.strided:
            entries[name] = _make_nested(values, sizes)
        else:
            entries[name] = torch.nested.as_nested_tensor([*values.split(sizes)], layout=layout)
    # Do not check shapes: torch's jagged tensors have a symbol where the batch size has -1.
    return TensorDict._new_unsafe(entries, torch.Size([len(sizes), -1]), device=batch.device)


def _make_nested(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return consecutive runs of steps as a strided nested tensor, also of dtypes that torch cannot nest."""
    shape, items = list(values.shape[1:]), values.shape[1:].numel()
    counts = np.array(sizes, np.int64)
    starts = (np.cumsum(counts) - counts) * items
    shapes = np.array([[size, *shape] for size in sizes], np.int64)
    return make_strided(values.reshape(-1), shapes, starts)


def find_start_stop_traj(
    *,
    trajectory: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    at_capacity: bool,
    cursor: int | torch.Tensor | range | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the trajectories in the rows of a ring.

    Args:
        trajectory: Trajectory id of each row. Shape `(T, ...)`, time first. Pass either it or `end`.
        end: Whether each row is the last of its trajectory. Shape `(T, ...)`, bool, time first.
        at_capacity: Whether the ring is full. In a full ring, a trajectory that does not end at the last row
            continues at the first row, unless there is no end at all. Otherwise the last row is an end.
        cursor: The row that was written last; of several rows the last one is used. In a full ring it is an
            end, because the row that followed it was overwritten.
        device: Device of the computation; None for the rows' device.

    Returns:
        First and last rows of the trajectories, shape `(n, dims)`, int64: the time, then the position along
        the other dims; and their lengths, shape `(n,)`. Sorted by position, then by last row. If a trajectory
        continues at the beginning of the ring, its first row is after its last one.

    Raises:
        ArgumentError: Both or neither of `trajectory` and `end` are passed.
        RuntimeError: There are no rows, or `cursor` is not one of them.

    Example:
        >>> from expstore.trajectories import find_start_stop_traj
        >>> end = torch.tensor([False, False, True, False, False])
        >>> start, stop, lengths = find_start_stop_traj(end=end, at_capacity=True)
        >>> start[:, 0], stop[:, 0], lengths
        (tensor([3]), tensor([2]), tensor([5]))
    """
    given = trajectory if trajectory is not None else end
    if given is None or (trajectory is not None and end is not None):
        raise ArgumentError(
            "Exactly one of `trajectory` and `end` must be provided, got "
            f"trajectory={trajectory} and end={end}."
        )
    if given.ndim == 0:
        raise RuntimeError("Expected the end-of-trajectory signal to be at least 1-dimensional.")
    if given.shape[0] == 0:
        raise RuntimeError("Cannot recover trajectory boundaries from an empty (T=0) input.")
    there = given.device if device is None else torch.device(device)
    last = given.to(there)
    last = last != last.roll(-1, 0) if trajectory is not None else last.bool().clone()
    if not at_capacity:
        last[-1] = True
    elif cursor is not None:
        last[_row(cursor)] = True
    last[-1] |= ~last.any(0)
    return _spans(last, given.device)


def _row(cursor: Any) -> int:
    """Return the row of a cursor; the last one if the cursor has several rows."""
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.reshape(-1)
        if not cursor.numel():
            raise RuntimeError("cursor must not be an empty tensor.")
        cursor = cursor[-1].item()
    elif isinstance(cursor, range):
        if not cursor:
            raise RuntimeError("cursor must not be an empty range.")
        cursor = cursor[-1]
    if isinstance(cursor, np.ndarray) and cursor.ndim == 0:
        cursor = cursor.item()
    if isinstance(cursor, bool) or not isinstance(cursor, int | np.integer):
        raise RuntimeError("cursor should be an integer or a 1d tensor or a range.")
    return int(cursor)


def _spans(last: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first and last rows of trajectories, and their lengths.

    Args:
        last: Which rows are the last ones of trajectories; along time, every position has at least one.
        device: Device of the results.
    """
    # Put time last, so that the trajectories of one position are consecutive.
    found = last.transpose(0, -1).nonzero()
    stop = torch.cat([found[:, -1:], found[:, 1:-1], found[:, :1]], 1)[:, : last.ndim]
    lane = stop[:, 1:]
    ending = torch.ones(len(stop), dtype=torch.bool, device=last.device)
    ending[:-1] = (lane[1:] != lane[:-1]).any(1)
    before = stop[:, 0].roll(1)
    before[ending.roll(1)] = stop[ending, 0]  # the first one of a position begins after its last one
    start = stop.clone()
    start[:, 0] = (before + 1) % last.shape[0]
    lengths = (stop[:, 0] - start[:, 0]) % last.shape[0] + 1
    return start.to(device), stop.to(device), lengths.to(device)
