"""Data sets by name, for instance "d4rl:hopper-medium-v2".

Used by programs, `OfflineToOnlineReplayBuffer` and the command line.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from expstore.core.nearest import nearest, suggest
from expstore.errors import ArgumentError, NotFoundError

Factory = Callable[..., Any]

_BUFFERS = "expstore.datasets.buffers"
_REGISTERED: dict[str, Factory | str] = {
    "atari": f"{_BUFFERS}.atari_dqn:AtariDQNExperienceReplay",
    "atari_dqn": f"{_BUFFERS}.atari_dqn:AtariDQNExperienceReplay",
    "d4rl": f"{_BUFFERS}.d4rl:D4RLExperienceReplay",
    "gen_dgrl": f"{_BUFFERS}.gen_dgrl:GenDGRLExperienceReplay",
    "lerobot": f"{_BUFFERS}.lerobot:LeRobotExperienceReplay",
    "minari": f"{_BUFFERS}.minari:MinariExperienceReplay",
    "openml": f"{_BUFFERS}.openml:OpenMLExperienceReplay",
    "openx": f"{_BUFFERS}.openx:OpenXExperienceReplay",
    "rlds": f"{_BUFFERS}.rlds:RLDSExperienceReplay",
    "roboset": f"{_BUFFERS}.roboset:RobosetExperienceReplay",
    "vd4rl": f"{_BUFFERS}.vd4rl:VD4RLExperienceReplay",
}


def register_dataset(prefix: str, dataset: Factory | str, *, replace: bool = False) -> None:
    """Register a function or class that `load_dataset("PREFIX:ID")` calls, for this process.

    Args:
        prefix: The prefix; case does not matter.
        dataset: Called with the id and the keywords of `load_dataset`; or "module:name", which is imported
            when it is needed.
        replace: Whether to replace an existing registration.

    Raises:
        ArgumentError: The prefix is empty or has a ":", or a string is not "module:name"; `dataset` is
            neither a callable nor a string.
        KeyError: The prefix is registered already.

    Example:
        >>> from expstore import D4RLExperienceReplay, register_dataset
        >>> def open_dataset(dataset_id, **keywords):
        ...     return D4RLExperienceReplay(dataset_id, source=f"/data/{dataset_id}.hdf5", **keywords)
        >>> register_dataset("lab", open_dataset)
    """
    name = _normal(prefix)
    if not isinstance(dataset, str) and not callable(dataset):
        raise ArgumentError(
            "dataset must be a callable dataset factory or a 'module:attribute' string, "
            f"got {type(dataset).__name__}."
        )
    if isinstance(dataset, str) and not all(dataset.partition(":")):
        raise ArgumentError("String dataset factories must use the 'module:attribute' format.")
    if name in _REGISTERED and not replace:
        raise KeyError(f"Dataset source {name!r} is already registered. Pass replace=True to overwrite it.")
    _REGISTERED[name] = dataset


class UnknownDatasetError(ArgumentError, NotFoundError, RuntimeError):
    """A collection has no data set of this name.

    TorchRL's classes raise ValueError, KeyError or RuntimeError; this error is each of them.
    """

    default_kind = "argument"

    @classmethod
    def of(cls, collection: Any, name: str, message: str) -> UnknownDatasetError:
        """Return the error, with the most similar name as its hint.

        Args:
            collection: The class of the data sets.
            name: The name that it does not have.
            message: What was asked, in the words of TorchRL's class.
        """
        near = nearest(str(name), collection.available_datasets)
        hint = f"did you mean {near!r}? All" if near else "all"
        return cls(message, hint=f"{hint} names: {collection.__name__}.available_datasets")


def load_dataset(dataset_id: str, **keywords: Any) -> Any:
    """Return a data set by its prefix and id.

    Args:
        dataset_id: Prefix and id, for instance "d4rl:hopper-medium-v2". For the prefixes see `prefixes()`.
        keywords: Arguments of the class.

    Raises:
        ArgumentError: The id is no text, or its prefix is missing or unknown.

    Example:
        >>> from expstore import load_dataset
        >>> data = load_dataset("d4rl:hopper-medium-v2", batch_size=32, source="hopper_medium-v2.hdf5")
        >>> data.sample().batch_size
        torch.Size([32])
    """
    if not isinstance(dataset_id, str):
        raise ArgumentError(f"dataset_id must be text such as 'd4rl:hopper-medium-v2', got {dataset_id!r}")
    if ":" not in dataset_id:
        raise ArgumentError(
            "dataset_id must be prefixed with a source identifier (e.g. 'minari:...' or 'd4rl:...'). "
            f"Got: {dataset_id!r}. Supported prefixes: {prefixes()}."
        )
    prefix, _, name = dataset_id.partition(":")
    return dataset_class(prefix)(name, **keywords)


def dataset_class(prefix: str) -> Factory:
    """Return the class or function of a prefix.

    Raises:
        ArgumentError: The prefix is unknown.
    """
    name = _normal(prefix)
    if name not in _REGISTERED:
        raise ArgumentError(
            f"Unknown dataset source {name!r}", hint=suggest(name, prefixes(), "the supported prefixes are")
        )
    found = _REGISTERED[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    assert not isinstance(found, str)
    return found


def prefixes() -> tuple[str, ...]:
    """Return the known prefixes, sorted."""
    return tuple(sorted(_REGISTERED))


def _normal(prefix: str) -> str:
    name = prefix.lower().strip()
    if not name or ":" in name:
        raise ArgumentError(f"Dataset source prefixes must be non-empty strings without ':'. Got {prefix!r}.")
    return name
