"""What is done to rows on their way in, and to batches on their way out: a chain of transforms.

Buffers own one each; transforms are functions, modules, torchrl's, or such as look at other steps. It never
imports torchrl, and never writes to a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from tensordict import is_tensor_collection

from expstore.core.values import Array, IntArray
from expstore.errors import StateError
from expstore.storages.indexing import read_rows
from expstore.transforms.base import StepTransform, StepView

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["Compose", "Inverted"]


class Compose:
    """Chain transforms: forward for what is sampled, in order; backward for what is written.

    A transform is an object with `forward` and `inv`, as torchrl's are, or a plain callable, which acts on
    what is sampled only. Modules are put in evaluation mode. A torchrl `Compose` among them is taken apart.
    Those that are `StepTransform`s act before the others. One with an attribute `draws` that is True is
    handed a NumPy generator as well, which follows from the buffer's draw (None: nothing is drawn).

    Threads: any number may transform while one appends; what keeps state between calls must bear threads by
    itself, where several write or sample. Processes: a copy has copies of the transforms. Crashes: what a
    transform keeps is not part of the store; see `state_dict`.

    Args:
        transforms: The transforms, in the order in which they act on samples; or one list of them.

    Raises:
        ValueError: Something is neither a transform nor callable, or there are two `MultiStepTransform`s.

    Example:
        >>> chain = Compose(lambda batch: batch.set("double", batch["reward"] * 2))
        >>> chain(TensorDict({"reward": torch.ones(3)}, [3]))["double"]
        tensor([2., 2., 2.])
    """

    def __init__(self, *transforms: Any) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        self._hold(tuple(part for given in transforms for part in _parts(given)))

    def _hold(self, transforms: tuple[Any, ...]) -> None:
        sums = [part for part in transforms if isinstance(part, StepTransform) and part.moves]
        if len(sums) > 1:
            raise ValueError(
                f"two would overwrite what the other writes, {sums[0]!r} and {sums[1]!r}: one is enough; set "
                "its n_steps to have another number of steps, and give it all reward_keys at once"
            )
        #: The transforms, in their order.
        self.transforms = transforms
        #: Those that look at other steps, in their order.
        self.steps = tuple(part for part in transforms if isinstance(part, StepTransform))
        #: Whether one of the others draws.
        self.draws = any(_draws(part) for part in transforms)

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """Return a transform, a chain, or nothing at all (None), as a chain.

        Raises:
            RuntimeError: It is neither a transform nor callable.
            ValueError: There is more than one `MultiStepTransform`.
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
        """Transform what was sampled.

        Args:
            batch: What was.
            numbers: The random numbers of this draw.

        Raises:
            StateError: A transform looks at other steps: without a buffer there are none.
            TypeError: A transform returned nothing.
        """
        for step in self.steps:
            step.forward(batch)
        return self.finish(batch, numbers)

    def finish(self, batch: Any, numbers: np.random.Generator | None = None) -> Any:
        """Do what is done after `apply`: what the transforms do that do not look at other steps."""
        for transform in self.transforms:
            if not isinstance(transform, StepTransform):
                batch = _given(transform, _forward(transform, batch, numbers))
        return batch

    @property
    def acting(self) -> tuple[Any, ...]:
        """The transforms in the order in which they act on samples."""
        others = (part for part in self.transforms if not isinstance(part, StepTransform))
        return (*self.steps, *others)

    def look(
        self, storage: ReadView, ids: IntArray, generator: np.random.Generator | None = None
    ) -> StepView | None:
        """Have transforms look at other steps than those of a batch; None if none does.

        What they need stands in the view, which also reads the batch, and then says whether it was in time.

        Args:
            storage: What holds the rows.
            ids: Those of the batch. Shape `(n,)`.
            generator: The numbers of this draw.
        """
        if not self.steps:
            return None
        view = StepView(storage, ids, generator)
        for step in self.steps:
            view.show_to(step)
        return view

    def apply(self, batch: Any, view: StepView) -> Any:
        """Do to a batch what follows from other steps; `finish` does the rest."""
        for step, seen in view.seen:
            batch = _given(step, step.apply(batch, seen))
        return batch

    def read(
        self, storage: ReadView, locate: Callable[[], IntArray], places: Sequence[int] | None = None
    ) -> tuple[IntArray, list[Array], StepView | None]:
        """Copy rows out, and look at other steps, of which nobody overwrites any meanwhile.

        Args and errors as `read_rows`.

        Returns:
            Ids, one array per field, and what `apply` needs; None: there is nothing to apply.
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
        """Do as `forward`."""
        return self.forward(batch)

    def inverse(self, batch: Any, *, single: bool = False) -> Any:
        """Transform what is to be written, the last transform first.

        Args:
            batch: What is to be written; it may be changed in place.
            single: It is one row: a TensorDict gets a dim for the time being, which transforms rely on.

        Returns:
            What is written instead; None: nothing.
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
        """Do as `inverse`, under torchrl's name: a chain is a transform, too."""
        return self.inverse(batch)

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform behind the others.

        Args:
            transform: What is added.
            invert: It acts forward on what is written, and backward on what is sampled.

        Raises:
            ValueError: It is neither a transform nor callable, or a second `MultiStepTransform`.
        """
        self.insert(len(self), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before the one that has this number now.

        Args:
            index: Which; negative: counted from the end.
            transform: What is added.
            invert: It acts forward on what is written, and backward on what is sampled.

        Raises:
            ValueError: There is no such number; it is neither a transform nor callable; it looks at other
                steps, which what is written has none of; or it is a second `MultiStepTransform`.
        """
        size = len(self.transforms)
        if abs(index) > size:
            raise ValueError(f"Index expected to be between [-{size}, {size}] got index={index}")
        parts = _parts(transform)
        if invert:
            parts = tuple(Inverted(part) for part in reversed(parts))
        self._hold((*self.transforms[:index], *parts, *self.transforms[index:]))

    def state_dict(self) -> dict[str, Any]:
        """Return what the transforms keep, by their numbers; of those that say so by `state_dict`."""
        return {
            str(number): transform.state_dict()
            for number, transform in enumerate(self.transforms)
            if hasattr(transform, "state_dict")
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hand the transforms what `state_dict` returned.

        Raises:
            StateError: The state is of a chain of other transforms; nothing was changed.
        """
        own = [str(number) for number, part in enumerate(self.transforms) if hasattr(part, "state_dict")]
        if own != list(state_dict):
            raise StateError(
                f"that is the state of transforms {list(state_dict)}, here {own} keep something",
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
        """Return a transform as it was given, or some of them as a chain of their own."""
        return Compose(*self.transforms[index]) if isinstance(index, slice) else self.transforms[index]

    def __repr__(self) -> str:
        inner = ",\n".join(indent(repr(transform), "    ") for transform in self.transforms)
        return f"Compose(\n{inner})" if inner else "Compose()"


class Inverted:
    """Let a transform act forward on what is written, and backward on what is sampled.

    Threads, processes and crashes as `Compose`.

    Args:
        transform: Which one.

    Raises:
        ValueError: It looks at other steps.

    Example:
        >>> rb.append_transform(lambda batch: batch.set("seen", torch.zeros(batch.shape)), invert=True)
    """

    def __init__(self, transform: Any) -> None:
        if isinstance(transform, StepTransform):
            raise ValueError(
                f"{type(transform).__name__} looks at other steps of rows that are read; what is written has "
                "none yet: leave invert out"
            )
        self.transform = transform

    @property
    def in_keys(self) -> Any:
        """The fields that it reads of a sample; None: nobody knows."""
        return getattr(self.transform, "in_keys_inv", None)

    @property
    def out_keys(self) -> Any:
        """The fields that it writes into a sample; None: nobody knows."""
        return getattr(self.transform, "out_keys_inv", None)

    def forward(self, batch: Any) -> Any:
        """Transform what was sampled."""
        return _inverse(self.transform, batch)

    def inv(self, batch: Any) -> Any:
        """Transform what is to be written."""
        return _forward(self.transform, batch)

    def state_dict(self) -> Any:
        """Return what the transform keeps."""
        return self.transform.state_dict() if hasattr(self.transform, "state_dict") else {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Hand the transform what `state_dict` returned."""
        if hasattr(self.transform, "load_state_dict"):
            self.transform.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"Inverted({self.transform!r})"


def _parts(transform: Any) -> tuple[Any, ...]:
    """Return a transform, or those of a chain, ready for use."""
    if isinstance(transform, Compose):
        return tuple(transform)
    if not callable(transform) and not hasattr(transform, "forward"):
        raise ValueError(
            "Transform list must contain only transforms or callable. "
            f"Got a element of type {type(transform)}."
        )
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


def _given(transform: Any, made: Any) -> Any:
    if made is None:
        raise TypeError(f"{transform!r} returned None; a transform returns what it made of a batch")
    return made


def _draws(transform: Any) -> bool:
    return getattr(transform, "draws", False) is True


def _forward(transform: Any, batch: Any, numbers: np.random.Generator | None = None) -> Any:
    act: Callable[..., Any] = transform if callable(transform) else transform.forward
    return act(batch, numbers) if _draws(transform) else act(batch)


def _inverse(transform: Any, batch: Any) -> Any:
    act = getattr(transform, "inv", None)
    return batch if act is None else act(batch)
