"""Step transforms that are TorchRL's transforms of the same names outside of expstore's buffers.

In a buffer they read other steps of the store. Called on a batch, or appended to an environment or a module
of TorchRL, TorchRL's transform of the same name and options takes their place. torchrl is imported only then.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any, ClassVar

from expstore.errors import MissingMemberError, StateError
from expstore.transforms.base import StepTransform

_MODULE = "torchrl.envs.transforms"


class TwinTransform(StepTransform):
    """Base class of step transforms that TorchRL also has.

    Members that this class lacks are those of TorchRL's transform, once a program has loaded torchrl. Then
    `isinstance` also tells that it is TorchRL's transform, as TorchRL's environments and modules ask.

    Threads and processes as `StepTransform`; a copy does not share TorchRL's transform.

    Example:
        >>> import torchrl.envs
        >>> from expstore import CatFrames
        >>> frames = CatFrames(4, dim=-1, in_keys=["observation"])
        >>> env = torchrl.envs.TransformedEnv(torchrl.envs.GymEnv("CartPole-v1"), frames)
        >>> rb.append_transform(frames)
    """

    #: The name of TorchRL's class.
    torchrl_name: ClassVar[str]
    _twin: tuple[dict[str, Any], Any] | None = None

    @abstractmethod
    def torchrl_options(self) -> dict[str, Any]:
        """Return the keyword arguments of TorchRL's class for a transform with the same settings."""

    def to_torchrl(self) -> Any:
        """Return TorchRL's transform with the same settings; the same one until a setting changes.

        Raises:
            StateError: torchrl is not installed.
        """
        options = self.torchrl_options()
        if self._twin is None or self._twin[0] != options:
            try:
                from torchrl.envs import transforms
            except ImportError:
                raise StateError(
                    f"{type(self).__name__} reads other steps of a batch's episodes: outside of a buffer it "
                    "needs torchrl's transform of this name, which is not installed",
                    hint="give it to a buffer (transform=, or append_transform), or pip install torchrl",
                ) from None
            self._twin = options, getattr(transforms, self.torchrl_name)(**options)
        return self._twin[1]

    def forward(self, batch: Any) -> Any:
        """Transform a batch without a store, as TorchRL's transform does: by the other rows of the batch.

        Raises:
            StateError: torchrl is not installed.
        """
        return self.to_torchrl()(batch)

    def __call__(self, batch: Any) -> Any:
        """Transform a batch without a store, as `forward` does."""
        return self.forward(batch)

    def set_container(self, container: Any) -> None:
        """Let TorchRL's transform take this one's place in a chain of TorchRL; TorchRL calls it."""
        twin = self.to_torchrl()
        chain: Any = getattr(container, "transforms", ())
        for place, part in enumerate(chain):
            if part is self:
                chain[place] = twin
        twin.set_container(container)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """TorchRL's class, once a program has loaded it."""
        return getattr(sys.modules.get(_MODULE), self.torchrl_name, type(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or _MODULE not in sys.modules:
            raise MissingMemberError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.to_torchrl(), name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the default, which pickles `__class__`.
        return _create, (type(self),), {name: value for name, value in vars(self).items() if name != "_twin"}


def _create(kind: type[TwinTransform]) -> TwinTransform:
    return kind.__new__(kind)
