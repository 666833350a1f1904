"""A transform that stacks the last frames of an episode when rows are sampled.

It changes sampled batches only: each frame is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.values import Key, key_name, to_key
from expstore.errors import ArgumentError, NotFoundError
from expstore.transforms.base import (
    StepView,
    check_fill,
    convert_fill,
    keys_of,
    refuse_given,
)
from expstore.transforms.torchrl_twin import TwinTransform

NestedKey = str | tuple[str, ...]


@dataclass(slots=True)
class _Stack:
    """The frames of a field, and which of them exist; shapes `(n, N, *row shape)` and `(n, N)`.

    If `own` is True, the last frame (with `future` the first) is taken from the batch instead.
    """

    frames: torch.Tensor
    there: NDArray[np.bool_]
    own: bool


@dataclass(slots=True)
class _Seen:
    stacks: list[_Stack] = field(default_factory=list)
    padded: NDArray[np.bool_] | None = None


class CatFrames(TwinTransform):
    """Stack each row's frame and the N - 1 before it in its episode (Mnih et al. 2013).

    Frames are found wherever they are stored: across batches, interleaved workers and the end of a ring. So
    rows may be sampled one by one. A stack of ("next", key) is the stack of the next step: the frames of
    `key`, then ("next", key); after a `MultiStepTransform` the frames before the last step of the sum. A
    frame before the start of an episode is padded: with the episode's first frame, or with a value. Earlier
    frames that have left the store are padded too: in a full ring these are frames of the N - 1 oldest rows
    of an episode whose beginning was overwritten. A truncated episode continues in the same trajectory, as in
    the store.

    Threads, processes and crashes as `StepTransform`.

    Args:
        N: Number of frames.
        dim: The dim of a row along which frames are concatenated; negative.
        in_keys: The fields with frames; `["pixels"]` by default. A name, or a tuple of names, is one key.
        out_keys: The fields for the stacks; `in_keys` by default.
        padding: What replaces a frame that does not exist: "same" for the first frame that does, "constant"
            for `padding_value`.
        padding_value: The value for `padding="constant"`.
        as_inverse: Not supported: True would store every frame N times.
        reset_key: Not supported: no environment is reset here.
        done_key: Not supported: frames follow the store's episodes.
        future: Whether to stack a row's frame and the N - 1 frames after it instead, also of ("next", key).
        mask_key: The field for which frames were padded, if any. Shape `(n, N)`, bool.

    Raises:
        ArgumentError: An argument has the wrong type; an argument is not supported or is out of range, or the
            numbers of `in_keys` and `out_keys` differ.

    Example:
        >>> from expstore import CatFrames
        >>> rb.append_transform(CatFrames(4, dim=-1, in_keys=["observation", ("next", "observation")]))
        >>> rb.sample()["observation"].shape  # of observations of shape (4,)
        torch.Size([32, 16])
    """

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        padding: Literal["same", "constant"] = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        reset_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        future: bool = False,
        mask_key: NestedKey | None = None,
    ) -> None:
        if isinstance(N, bool) or not isinstance(N, int) or N < 1:
            raise ArgumentError(f"N must be a positive whole number, got {N!r}")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentError(f"dim must be a dim of a row, a negative integer, got {dim!r}")
        if dim >= 0:
            raise ArgumentError(
                "dim must be < 0 to accommodate for tensordict of different batch-sizes (since negative dims "
                "are batch invariant)."
            )
        if padding not in ("same", "constant"):
            raise ArgumentError(f"padding must be one of 'same' and 'constant', got {padding!r}")
        refuse_given("CatFrames", "every frame would be stored N times", as_inverse=(as_inverse, False))
        refuse_given("CatFrames", "no environment is reset", reset_key=(reset_key, None))
        done = None if done_key == "done" else done_key
        refuse_given("CatFrames", "frames follow the episodes of the store", done_key=(done, None))
        self.N, self.dim = N, dim
        self.in_keys, self.out_keys = keys_of(in_keys, out_keys, ["pixels"])
        self.padding, self.padding_value = padding, convert_fill("padding_value", padding_value)
        self.future, self.mask_key = bool(future), mask_key

    torchrl_name = "CatFrames"

    def torchrl_options(self) -> dict[str, Any]:
        """Return the keyword arguments of TorchRL's class for a transform with the same settings."""
        names = ("N", "dim", "in_keys", "out_keys", "padding", "padding_value", "future", "mask_key")
        return {name: getattr(self, name) for name in names}

    def look(self, view: StepView) -> _Seen:
        """Read the frames.

        Raises:
            SchemaError: There is no such field, or it has too few dims.
            ArgumentError: The field cannot hold the padding value.
        """
        seen = _Seen()
        begin = 0 if self.future else 1 - self.N
        ids, there = view.at(view.ids, np.arange(begin, begin + self.N))
        if self.mask_key is not None:
            seen.padded = ~there
        of_next = None
        for name in self.in_keys:
            key = to_key(name)
            if key[0] != "next":
                seen.stacks.append(_Stack(view.tensor(ids, key), there, own=bool(view.seen)))
                continue
            if of_next is None:
                of_next = view.at(view.next_ids, np.arange(begin, begin + self.N + 1))
            seen.stacks.append(self._next(view, key, *of_next))
        if self.padding == "constant":
            for name, stack in zip(self.in_keys, seen.stacks, strict=True):
                check_fill("padding_value", self.padding_value, name, stack.frames.dtype)
        return seen

    def _next(self, view: StepView, key: Key, ids: NDArray[np.int64], there: NDArray[np.bool_]) -> _Stack:
        """Return the frames of a field below "next"; `ids` has one column more than there are frames."""
        if not self.future and key[1:] in view.storage.require_schema():
            # `apply` replaces the last frame by the next frame, which the batch has.
            frames, there = view.tensor(ids[:, 1:], key[1:]), there[:, 1:].copy()
            there[:, -1] = True
            return _Stack(frames, there, own=True)
        return _Stack(view.tensor(ids[:, :-1], key), there[:, :-1], own=bool(view.seen))

    def apply(self, batch: Any, seen: _Seen) -> Any:
        """Write the stacks.

        Raises:
            NotFoundError: The batch has no such field.
            ArgumentError: A frame has too few dims.
        """
        made = []
        for name, stack in zip(self.in_keys, seen.stacks, strict=True):
            frames = stack.frames
            if stack.own:
                own = _own(batch, to_key(name))
                frames = frames.to(torch.promote_types(frames.dtype, own.dtype))
                frames[:, 0 if self.future else -1] = own
            if self.padding == "constant":
                frames[torch.from_numpy(~stack.there)] = self.padding_value
            made.append(self._concatenate(frames, name))
        for key, stacked in zip(self.out_keys, made, strict=True):
            batch.set(key, stacked)
        if self.mask_key is not None and seen.padded is not None:
            batch.set(self.mask_key, torch.from_numpy(seen.padded))
        return batch

    def _concatenate(self, frames: torch.Tensor, name: NestedKey) -> torch.Tensor:
        """Concatenate frames along `dim`. Shape `(n, *row shape)`, with `dim` N times as large."""
        place = frames.ndim + self.dim
        if place < 2:
            raise ArgumentError(
                f"dim={self.dim} is out of range for {key_name(to_key(name))!r}, which has row shape "
                f"{list(frames.shape[2:])}"
            )
        return frames.movedim(1, place - 1).flatten(place - 1, place)

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _own(batch: Any, key: Key) -> torch.Tensor:
    values: torch.Tensor | None = batch.get(key, None)
    if values is None:
        raise NotFoundError(
            f"no field {key_name(key)!r} in the batch",
            hint="store it, or put a NextStateReconstructor before CatFrames",
        )
    return values
