"""A chain of transforms: applied to data before it is stored, and to batches after they were sampled.

Every buffer owns one. A transform is a function, a module, a TorchRL transform or a `StepTransform`. This
module never imports torchrl and never writes to a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from tensordict import is_tensor_collection

from expstore.core.arguments import check_whole
from expstore.core.values import Array, IntArray
from expstore.errors import ArgumentError, StateError
from expstore.storages.read_view import read_rows
from expstore.transforms.base import StepTransform, StepView

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView


class Compose:
    """Chain transforms: apply them to sampled batches, and their inverses in reverse order to written data.

    A transform is an object with `forward` and `inv`, as TorchRL's are, or a plain callable, which is applied
    to sampled batches only. Modules are put in evaluation mode. A TorchRL `Compose` is replaced by its parts.
    `StepTransform`s are applied before all others. A transform whose attribute `draws` is True also gets a
    NumPy generator, seeded by the buffer's draw (None if the batch was not drawn).

    Threads: any number may transform while one appends a transform; a transform that keeps state between
    calls must be thread-safe if several threads write or sample. Processes: a copy has copies of the
    transforms. Crashes: a transform's state is not part of the store; see `state_dict`.

    Args:
        transforms: The transforms, in the order in which they are applied to samples; or one list of them.

    Raises:
        ArgumentError: A value is neither a transform nor callable, or there are two `MultiStepTransform`s.

    Example:
        >>> from expstore.transforms import Compose
        >>> chain = Compose(lambda batch: batch.set("double", batch["reward"] * 2))
        >>> chain(TensorDict({"reward": torch.ones(3)}, [3]))["double"]
        tensor([2., 2., 2.])
    """

    def __init__(self, *transforms: Any) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        self._set(tuple(part for given in transforms for part in _parts(given)))

    def _set(self, transforms: tuple[Any, ...]) -> None:
        sums = [part for part in transforms if isinstance(part, StepTransform) and part.moves]
        if len(sums) > 1:
            raise ArgumentError(
                f"two would overwrite each other's fields, {sums[0]!r} and {sums[1]!r}: one is enough; set "
                "its n_steps for another number of steps, and pass all reward_keys to it"
            )
        #: The transforms, in their order.
        self.transforms = transforms
        #: The transforms that read other steps, in their order.
        self.steps = tuple(part for part in transforms if isinstance(part, StepTransform))
        #: Whether a transform draws random numbers.
        self.draws = any(_draws(part) for part in transforms)

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """Return a chain of a transform, a list of transforms, or None (an empty chain).

        Raises:
            RuntimeError: A value is neither a transform nor callable.
            ArgumentError: There is more than one `MultiStepTransform`.
        """
        if isinstance(transform, Compose):
            return transform
        if transform is None:
            return cls()
        given = transform if isinstance(transform, list | tuple) else [transform]
        try:
            parts = [part for one in given for part in _parts(one)]
        except ValueError:
            raise RuntimeError(
                "transform must be either a Transform instance or a callable, "
                f"got {type(transform).__name__}: {transform!r}"
            ) from None
        return cls(parts)

    def forward(self, batch: Any, numbers: np.random.Generator | None = None) -> Any:
        """Transform a sampled batch.

        Args:
            batch: The batch.
            numbers: The random generator of this draw.

        Raises:
            StateError: A transform reads other steps, which only a buffer can provide.
            ArgumentError: A transform returned None.
        """
        for step in self.steps:
            batch = step.forward(batch)
        return self.finish(batch, numbers)

    def finish(self, batch: Any, numbers: np.random.Generator | None = None) -> Any:
        """Apply the transforms that do not read other steps; called after `apply`."""
        for transform in self.transforms:
            if not isinstance(transform, StepTransform):
                batch = _require_result(transform, _forward(transform, batch, numbers))
        return batch

    @property
    def acting(self) -> tuple[Any, ...]:
        """The transforms in the order in which they are applied to samples."""
        others = (part for part in self.transforms if not isinstance(part, StepTransform))
        return (*self.steps, *others)

    def look(
        self,
        storage: ReadView,
        ids: IntArray,
        generator: np.random.Generator | None = None,
        *,
        newest: int | None = None,
    ) -> StepView | None:
        """Let the step transforms read the other steps that they need.

        Args:
            storage: The storage with the rows.
            ids: Ids of the batch's rows. Shape `(n,)`.
            generator: The random generator of this draw.
            newest: The largest id of other rows; None: no limit.

        Returns:
            A view with their results. It also reads the batch (`columns`), and then tells whether any row was
            overwritten meanwhile (`intact`). None if no transform reads other steps.
        """
        if not self.steps:
            return None
        neighbours = not all(step.stays_within(storage) for step in self.steps)
        view = StepView(storage, ids, generator, neighbours=neighbours, newest=newest)
        for step in self.steps:
            view.show_to(step)
        return view

    def apply(self, batch: Any, view: StepView) -> Any:
        """Apply the step transforms to a batch; `finish` applies the others."""
        for step, seen in view.seen:
            batch = _require_result(step, step.apply(batch, seen))
        return batch

    def read(
        self, storage: ReadView, locate: Callable[[], IntArray], places: Sequence[int] | None = None
    ) -> tuple[IntArray, list[Array], StepView | None]:
        """Copy rows and let step transforms read other steps; repeat until no writer overwrote any meanwhile.

        Args and errors as `read_rows`.

        Returns:
            The ids, one array per field, and the view that `apply` needs; None if no transform reads other
            steps.
        """
        if not self.steps:
            return *read_rows(storage, locate, places), None
        view: StepView | None = None

        def read(ids: IntArray) -> tuple[list[Array], bool]:
            nonlocal view
            view = self.look(storage, ids)
            return (view.columns(places), view.intact) if view is not None else ([], True)

        ids, columns = read_rows(storage, locate, read=read)
        return ids, columns, view

    def __call__(self, batch: Any) -> Any:
        """Transform a sampled batch, as `forward` does."""
        return self.forward(batch)

    def inverse(self, batch: Any, *, single: bool = False) -> Any:
        """Apply the inverse transforms to data before it is written, the last transform first.

        Args:
            batch: The data to write; it may be changed in place.
            single: Whether it is one row. A TensorDict then temporarily gets a batch dim, which transforms
                expect.

        Returns:
            The data to store; None if a transform dropped it.
        """
        if single and self.transforms and is_tensor_collection(batch):
            made = self.inverse(batch.unsqueeze(-1))
            return None if made is None else made.squeeze(-1)
        for transform in reversed(self.transforms):
            batch = _inverse(transform, batch)
            if batch is None:
                return None
        return batch

    def inv(self, batch: Any) -> Any:
        """Apply the inverse transforms: TorchRL's name of `inverse`."""
        return self.inverse(batch)

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end.

        Args:
            transform: The transform.
            invert: Whether to apply its `forward` to written data, and its `inv` to sampled batches.

        Raises:
            ArgumentError: It is neither a transform nor callable, or it is a second `MultiStepTransform`.
        """
        self.insert(len(self), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Insert a transform before an index, as `list.insert`.

        Args:
            index: The index; negative values count from the end.
            transform: The transform.
            invert: Whether to apply its `forward` to written data, and its `inv` to sampled batches.

        Raises:
            ArgumentError: The index is no integer, or out of range; the transform is neither a transform nor
                callable; it reads other steps and `invert` is True (written data has no other steps yet); or
                it is a second `MultiStepTransform`.
        """
        size, index = len(self.transforms), check_whole("index", index, hint="use a position such as 0 or -1")
        if abs(index) > size:
            raise ArgumentError(f"Index expected to be between [-{size}, {size}] got index={index}")
        parts = _parts(transform)
        if invert:
            parts = tuple(Inverted(part) for part in reversed(parts))
        self._set((*self.transforms[:index], *parts, *self.transforms[index:]))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the transforms that have a `state_dict`, by their position in the chain."""
        return {
            str(number): transform.state_dict()
            for number, transform in enumerate(self.transforms)
            if _has_state(transform)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states that `state_dict` returned.

        Raises:
            StateError: The state is of a chain with other transforms; nothing was changed.
        """
        own = [str(number) for number, part in enumerate(self.transforms) if _has_state(part)]
        if own != list(state_dict):
            raise StateError(
                f"the state is of transforms {list(state_dict)}, but here transforms {own} have a state",
                hint="load it into a buffer with the same transforms in the same order",
            )
        for number in own:
            self.transforms[int(number)].load_state_dict(state_dict[number])

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Compose: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return one transform, or a slice of them as a new chain."""
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]

    def __repr__(self) -> str:
        inner = ",\n".join(indent(repr(transform), "    ") for transform in self.transforms)
        return f"Compose(\n{inner})" if inner else "Compose()"


class Inverted:
    """Apply a transform's `forward` to written data, and its `inv` to sampled batches.

    Threads, processes and crashes as `Compose`.

    Args:
        transform: The transform.

    Raises:
        ArgumentError: It reads other steps.

    Example:
        >>> rb.append_transform(lambda batch: batch.set("seen", torch.zeros(batch.shape)), invert=True)
    """

    def __init__(self, transform: Any) -> None:
        if isinstance(transform, StepTransform):
            raise ArgumentError(
                f"{type(transform).__name__} reads other steps of stored rows, and data to be written has "
                "none yet: leave invert out"
            )
        self.transform = transform

    @property
    def in_keys(self) -> Any:
        """The keys that it reads from a sample; None if the transform does not list them."""
        return getattr(self.transform, "in_keys_inv", None)

    @property
    def out_keys(self) -> Any:
        """The keys that it writes into a sample; None if the transform does not list them."""
        return getattr(self.transform, "out_keys_inv", None)

    def forward(self, batch: Any) -> Any:
        """Transform a sampled batch."""
        return _inverse(self.transform, batch)

    def inv(self, batch: Any) -> Any:
        """Transform data before it is written."""
        return _forward(self.transform, batch)

    def state_dict(self) -> Any:
        """Return the transform's state; empty if it has none."""
        return self.transform.state_dict() if hasattr(self.transform, "state_dict") else {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the state that `state_dict` returned."""
        if hasattr(self.transform, "load_state_dict"):
            self.transform.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"Inverted({self.transform!r})"


def _parts(transform: Any) -> tuple[Any, ...]:
    """Return a transform, or the transforms of a chain, in evaluation mode."""
    if isinstance(transform, Compose):
        return tuple(transform)
    if not callable(transform) and not hasattr(transform, "forward"):
        raise ArgumentError(
            "Transform list must contain only transforms or callable. "
            f"Got a element of type {type(transform)}."
        )
    if isinstance(transform, StepTransform):
        return (transform,)
    prepare = getattr(transform, "eval", None)
    if callable(prepare):
        prepare()
    if (
        type(transform).__name__ == "Compose"
        and hasattr(transform, "inv")
        and hasattr(transform, "transforms")
    ):
        return tuple(transform.transforms)
    return (transform,)


def _require_result(transform: Any, made: Any) -> Any:
    if made is None:
        raise ArgumentError(f"{transform!r} returned None; a transform must return the transformed batch")
    return made


def _own(transform: Any) -> Any:
    """Return what to ask for optional members: of a step transform its class, as others may be TorchRL's."""
    return type(transform) if isinstance(transform, StepTransform) else transform


def _has_state(transform: Any) -> bool:
    return hasattr(_own(transform), "state_dict")


def _draws(transform: Any) -> bool:
    return getattr(_own(transform), "draws", False) is True


def _forward(transform: Any, batch: Any, numbers: np.random.Generator | None = None) -> Any:
    act: Callable[..., Any] = transform if callable(transform) else transform.forward
    return act(batch, numbers) if _draws(transform) else act(batch)


def _inverse(transform: Any, batch: Any) -> Any:
    act = None if isinstance(transform, StepTransform) else getattr(transform, "inv", None)
    return batch if act is None else act(batch)
