"""What is done to rows on their way in, and to batches on their way out: a chain of transforms.

Buffers own one each; transforms are functions, modules, or torchrl's. It never imports torchrl, and never
touches a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from textwrap import indent
from typing import Any, overload

from tensordict import is_tensor_collection

from expstore.errors import StateError

__all__ = ["Compose", "Inverted"]


class Compose:
    """Chain transforms: forward for what is sampled, in order; backward for what is written.

    A transform is an object with `forward` and `inv`, as torchrl's are, or a plain callable, which acts on
    what is sampled only. Modules are put in evaluation mode. A torchrl `Compose` among them is taken apart.

    Threads: any number may transform while one appends; what keeps state between calls must bear threads by
    itself, where several write or sample. Processes: a copy has copies of the transforms. Crashes: what a
    transform keeps is not part of the store; see `state_dict`.

    Args:
        transforms: The transforms, in the order in which they act on samples; or one list of them.

    Raises:
        ValueError: Something is neither a transform nor callable.

    Example:
        >>> chain = Compose(lambda batch: batch.set("double", batch["reward"] * 2))
        >>> chain(TensorDict({"reward": torch.ones(3)}, [3]))["double"]
        tensor([2., 2., 2.])
    """

    def __init__(self, *transforms: Any) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        self._transforms: tuple[Any, ...] = tuple(part for given in transforms for part in _parts(given))

    @classmethod
    def of(cls, transform: Any) -> Compose:
        """Return a transform, a chain, or nothing at all (None), as a chain.

        Raises:
            RuntimeError: It is neither a transform nor callable.
        """
        if isinstance(transform, Compose):
            return transform
        if transform is None:
            return cls()
        try:
            return cls(transform)
        except ValueError:
            raise RuntimeError(
                "transform must be either a Transform instance or a callable, "
                f"got {type(transform).__name__}: {transform!r}"
            ) from None

    def forward(self, batch: Any) -> Any:
        """Transform what was sampled.

        Raises:
            TypeError: A transform returned nothing.
        """
        for transform in self._transforms:
            made = _forward(transform, batch)
            if made is None:
                raise TypeError(f"{transform!r} returned None; a transform returns what it made of a batch")
            batch = made
        return batch

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
        if single and self._transforms and is_tensor_collection(batch):
            made = self.inverse(batch.unsqueeze(-1))
            return None if made is None else made.squeeze(-1)
        for transform in reversed(self._transforms):
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
            ValueError: It is neither a transform nor callable.
        """
        self.insert(len(self), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before the one that has this number now.

        Args:
            index: Which; negative: counted from the end.
            transform: What is added.
            invert: It acts forward on what is written, and backward on what is sampled.

        Raises:
            ValueError: There is no such number; or it is neither a transform nor callable.
        """
        size = len(self._transforms)
        if abs(index) > size:
            raise ValueError(f"Index expected to be between [-{size}, {size}] got index={index}")
        parts = _parts(transform)
        if invert:
            parts = tuple(Inverted(part) for part in reversed(parts))
        self._transforms = (*self._transforms[:index], *parts, *self._transforms[index:])

    def state_dict(self) -> dict[str, Any]:
        """Return what the transforms keep, by their numbers; of those that say so by `state_dict`."""
        return {
            str(number): transform.state_dict()
            for number, transform in enumerate(self._transforms)
            if hasattr(transform, "state_dict")
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hand the transforms what `state_dict` returned.

        Raises:
            StateError: The state is of a chain of other transforms; nothing was changed.
        """
        own = [str(number) for number, part in enumerate(self._transforms) if hasattr(part, "state_dict")]
        if own != list(state_dict):
            raise StateError(
                f"that is the state of transforms {list(state_dict)}, here {own} keep something",
                hint="load it into a buffer with the same transforms in the same order",
            )
        for number in own:
            self._transforms[int(number)].load_state_dict(state_dict[number])

    def __len__(self) -> int:
        return len(self._transforms)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._transforms)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Compose: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return a transform as it was given, or some of them as a chain of their own."""
        return Compose(*self._transforms[index]) if isinstance(index, slice) else self._transforms[index]

    def __repr__(self) -> str:
        inner = ",\n".join(indent(repr(transform), "    ") for transform in self._transforms)
        return f"Compose(\n{inner})" if inner else "Compose()"


class Inverted:
    """Let a transform act forward on what is written, and backward on what is sampled.

    Threads, processes and crashes as `Compose`.

    Args:
        transform: Which one.

    Example:
        >>> rb.append_transform(lambda batch: batch.set("seen", torch.zeros(batch.shape)), invert=True)
    """

    def __init__(self, transform: Any) -> None:
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


def _forward(transform: Any, batch: Any) -> Any:
    act: Callable[[Any], Any] = transform if callable(transform) else transform.forward
    return act(batch)


def _inverse(transform: Any, batch: Any) -> Any:
    act = getattr(transform, "inv", None)
    return batch if act is None else act(batch)
