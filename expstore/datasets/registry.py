"""The table of data sets: their kinds, and data sets by name, for instance "d4rl:hopper-medium-v2".

The kinds are those of the modules in `expstore.datasets.kinds`. Used by programs,
`OfflineToOnlineReplayBuffer` and the command line.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from expstore.core.nearest import nearest, suggest
from expstore.datasets import kinds
from expstore.datasets.kind import Kind
from expstore.errors import ArgumentError, NotFoundError

Factory = Callable[..., Any]

#: What `register_dataset` registered in this process, by prefix.
_REGISTERED: dict[str, Factory | str] = {}


@cache
def _load_kinds() -> tuple[Kind, ...]:
    modules = sorted(module.name for module in pkgutil.iter_modules(kinds.__path__, f"{kinds.__name__}."))
    found = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    return tuple(dict.fromkeys(value for value in found if isinstance(value, Kind)))


def list_kinds() -> list[Kind]:
    """Return the kinds of data sets, those that this process registered too; general ones are last."""
    registered = [value for value in _REGISTERED.values() if isinstance(value, Kind)]
    return sorted(dict.fromkeys([*_load_kinds(), *registered]), key=lambda kind: kind.is_general)


def find_kind(name: str) -> Kind:
    """Return a kind by its format or a prefix.

    Raises:
        ArgumentError: There is no such kind.
    """
    known = list_kinds()
    for kind in known:
        if name in (kind.format, kind.prefix, *kind.aliases):
            return kind
    formats = [kind.format for kind in known]
    raise ArgumentError(f"unknown format {name!r}", hint=suggest(name, formats, "the formats are"))


def _list_openers() -> dict[str, Factory | str]:
    """Return what opens data sets, by prefix."""
    built_in = {name: kind for kind in _load_kinds() for name in (kind.prefix, *kind.aliases) if name}
    return {**built_in, **_REGISTERED}


def register_dataset(prefix: str, dataset: Factory | str, *, replace: bool = False) -> None:
    """Register a function or class that `load_dataset("PREFIX:ID")` calls, for this process.

    A `Kind` is such a function, and its format can be named, as in `make_sample`.

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
        >>> from expstore.datasets import D4RLExperienceReplay, register_dataset
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
    if name in _list_openers() and not replace:
        raise KeyError(f"Dataset source {name!r} is already registered. Pass replace=True to overwrite it.")
    _REGISTERED[name] = dataset


class UnknownDatasetError(ArgumentError, NotFoundError, RuntimeError):
    """A collection has no data set of this name.

    TorchRL's classes raise ValueError, KeyError or RuntimeError; this error is each of them.
    """

    default_kind = "argument"

    @classmethod
    def of(cls, kind: Kind, name: str) -> UnknownDatasetError:
        """Return the error for a name, with the most similar one as its hint."""
        near = nearest(str(name), kind.available_datasets)
        hint = f"did you mean {near!r}? All" if near else "all"
        owner = kind.buffer or f"find_kind({kind.format!r})"
        return cls(kind.unknown_id.format(name), hint=f"{hint} names: {owner}.available_datasets")


def load_dataset(dataset_id: str, **keywords: Any) -> Any:
    """Return a data set by its prefix and id.

    Args:
        dataset_id: Prefix and id, for instance "d4rl:hopper-medium-v2". For the prefixes see `prefixes()`.
        keywords: Arguments of the class.

    Raises:
        ArgumentError: The id is no text, or its prefix is missing or unknown.

    Example:
        >>> from expstore.datasets import load_dataset, make_sample
        >>> source = make_sample("d4rl", "hopper_medium-v2.hdf5")
        >>> data = load_dataset("d4rl:hopper-medium-v2", batch_size=32, source=source)
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
    name, openers = _normal(prefix), _list_openers()
    if name not in openers:
        raise ArgumentError(
            f"Unknown dataset source {name!r}", hint=suggest(name, prefixes(), "the supported prefixes are")
        )
    found = openers[name]
    if isinstance(found, Kind):
        return found.load_class()
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    assert not isinstance(found, str)
    return found


def prefixes() -> tuple[str, ...]:
    """Return the known prefixes, sorted."""
    return tuple(sorted(_list_openers()))


def _normal(prefix: str) -> str:
    name = prefix.lower().strip()
    if not name or ":" in name:
        raise ArgumentError(f"Dataset source prefixes must be non-empty strings without ':'. Got {prefix!r}.")
    return name
