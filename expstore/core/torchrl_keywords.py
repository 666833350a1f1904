"""TorchRL's keywords that have no effect in this library.

A program written for TorchRL may pass any keyword of TorchRL's class. Most keywords mean the same here; this
module lists the others. Public constructors accept them as `**torchrl` and pass them on to `check_keywords`:
values that would have no effect are accepted, all others are refused with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from expstore.core.arguments import check_whole, unknown_keyword
from expstore.errors import ArgumentError


@dataclass(frozen=True)
class VoidKeyword:
    """A keyword of TorchRL that has no effect here.

    Args:
        reason: Why values that would have an effect are refused.
        accepts: Returns whether a value would have no effect.
    """

    reason: str
    accepts: Callable[[Any], bool]


def one_of(*harmless: Any) -> Callable[[Any], bool]:
    """Return a function that accepts these values; a device is compared by its name."""

    def accepts(value: Any) -> bool:
        return any(value is one or (isinstance(one, str) and str(value) == one) for one in harmless)

    return accepts


def is_anything(value: Any) -> bool:
    """Accept every value: the results are the same with all of them."""
    return True


def is_cpu(value: Any) -> bool:
    """Accept the CPU, and None."""
    return value is None or str(value).partition(":")[0] == "cpu"


def is_size(value: Any) -> bool:
    """Accept a number of rows, and None."""
    return value is None or check_whole("max_capacity", value) >= 1


_UNSET = one_of(None, False)
_SERVICE = "a buffer has no service behind it; `expstore serve` shares a store over HTTP"
_MEMBERS = "the members of the ensemble have their own; give it to them"

VOID: dict[str, VoidKeyword] = {
    # Buffers
    "checkpointer": VoidKeyword(
        "dumps() writes versions of the store itself, with what has changed only", one_of(None)
    ),
    "delayed_init": VoidKeyword(
        "the parts are made with the buffer; a buffer over a store on disk can be pickled as it is", _UNSET
    ),
    "sampler_device": VoidKeyword("priorities are drawn on the CPU, in microseconds", one_of(None, "cpu")),
    "service_backend": VoidKeyword(_SERVICE, one_of("direct")),
    "service_backend_options": VoidKeyword(_SERVICE, one_of(None)),
    "shared": VoidKeyword("share() one buffer on disk, not an ensemble of several", one_of(False)),
    "sync": VoidKeyword(
        "the store keeps the priorities; to sample while another process writes, open it with mode='r'",
        one_of(True),
    ),
    "transport": VoidKeyword(_SERVICE, one_of("auto", "direct")),
    "transport_options": VoidKeyword(_SERVICE, one_of(None)),
    # Ensembles
    "consume_after_n_samples": VoidKeyword(_MEMBERS, one_of(None)),
    "dim_extend": VoidKeyword(_MEMBERS, one_of(None)),
    "pin_memory": VoidKeyword(_MEMBERS, _UNSET),
    "prefetch": VoidKeyword(_MEMBERS, one_of(None, 0)),
    "sample_unit": VoidKeyword(_MEMBERS, one_of(None)),
    "sampler": VoidKeyword(_MEMBERS, one_of(None)),
    "storage": VoidKeyword(_MEMBERS, one_of(None)),
    "transform_factory": VoidKeyword(_MEMBERS, one_of(None)),
    "writer": VoidKeyword(_MEMBERS, one_of(None)),
    # Storages, writers and buffers
    "compilable": VoidKeyword(
        "torch.compile does not trace storages and writers; call extend and sample outside of compiled code",
        _UNSET,
    ),
    "cleanup_memmap": VoidKeyword("it belongs to shared_init, which is not supported", one_of(True)),
    "consolidated": VoidKeyword("each field is kept in one array already", _UNSET),
    "shared_init": VoidKeyword(
        "one process writes to a storage; open a store on disk by expstore.open(path), and by mode='r' in "
        "the other processes",
        _UNSET,
    ),
    # Samplers
    "cache_values": VoidKeyword("nothing needs a cache", is_anything),
    "compile": VoidKeyword("slices are found by compiled code already", _UNSET),
    "device": VoidKeyword(
        "priorities are kept in host memory, where a draw takes microseconds; give the device to the buffer",
        is_cpu,
    ),
    "ends": VoidKeyword("slice samplers compare it with the store's episodes", is_anything),
    "fragmented": VoidKeyword("slices follow the episode wherever its rows are", is_anything),
    "max_capacity": VoidKeyword("it is a number of rows, at least 1", is_size),
    "step_key": VoidKeyword("the store counts steps itself", is_anything),
    "trajectories": VoidKeyword("slice samplers compare it with the store's episodes", is_anything),
    "use_gpu": VoidKeyword(
        "slices are found faster than a device could be asked", one_of(None, False, "cpu")
    ),
}

#: The void keywords of each kind of class.
BUFFER = (
    *("checkpointer", "compilable", "delayed_init", "sampler_device", "service_backend"),
    *("service_backend_options", "sync", "transport", "transport_options"),
)
ENSEMBLE = (
    *(*BUFFER, "shared"),
    *("consume_after_n_samples", "dim_extend", "pin_memory", "prefetch", "sample_unit", "sampler", "storage"),
    *("transform_factory", "writer"),
)
OBJECT_STORAGE = ("compilable",)
MEMMAP_STORAGE = ("compilable", "shared_init")
TENSOR_STORAGE = ("cleanup_memmap", "compilable", "consolidated", "shared_init")
WRITER = ("compilable",)
#: Keywords that occur in TorchRL's signatures, and therefore in ours.
PRIORITIZED = ("device", "max_capacity")
STREAMING_SLICES = ("cache_values", "compile", "use_gpu")
SLICES_WITHOUT_REPLACEMENT = ("compile", "ends", "trajectories", "use_gpu")
PRIORITIZED_SLICES = (*SLICES_WITHOUT_REPLACEMENT, "cache_values")
SLICES = (*PRIORITIZED_SLICES, "fragmented", "step_key")


class VoidAttribute:
    """An attribute of TorchRL's class that has no effect here: assigning another value is refused.

    Args:
        value: Its value.
    """

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._value

    def __set__(self, instance: object, value: Any) -> None:
        void = VOID[self._name]
        if not void.accepts(value):
            raise ArgumentError(
                f"the {self._name} of a {type(instance).__name__} cannot be set to {value!r}: {void.reason}; "
                "leave the assignment out"
            )


#: Options of stores on disk, and the call that takes them.
ON_DISK = {"window": "expstore.open(path, window=...)"}


def check_keywords(owner: object, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Check the keywords that were passed to a constructor in addition to its own.

    Args:
        owner: The object under construction.
        given: The keywords with their values.
        known: Names of the keywords without effect that TorchRL's class has.

    Raises:
        ArgumentError: The class has no such keyword; the value would have an effect that does not exist here.
    """
    kind = type(owner).__name__
    for name, value in given.items():
        if name not in known:
            raise unknown_keyword(kind, name, value, keywords_of(type(owner)), ON_DISK)
        void = VOID[name]
        if not void.accepts(value):
            raise ArgumentError(f"{kind} does not support {name}={value!r}: {void.reason}; leave {name} out")


def keywords_of(kind: type) -> list[str]:
    """Return the keywords of a class's constructor, and of the constructors that it passes keywords on to."""
    found: list[str] = []
    for cls in kind.__mro__:
        if "__init__" in vars(cls):
            parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
            found += [
                one.name
                for one in parameters
                if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name != "self"
            ]
            if not any(one.kind is one.VAR_KEYWORD and one.name != "torchrl" for one in parameters):
                break
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]
