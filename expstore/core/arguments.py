"""Checks of arguments that many public functions share."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from expstore.core.nearest import nearest
from expstore.errors import ArgumentError

__all__ = ["check_whole", "refuse_unknown", "unknown_keyword"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

#: Names that other libraries give to an argument.
_ALIASES = {
    "buffer_size": "capacity",
    "max_capacity": "capacity",
    "max_length": "capacity",
    "max_size": "capacity",
    "maxlen": "capacity",
    "size": "capacity",
}
_NO_PARTS: Mapping[str, str] = MappingProxyType({})


def check_whole(name: str, value: Any) -> int:
    """Return a whole number; a float such as 1e6 is one.

    Raises:
        ArgumentError: It is not a whole number.
    """
    if isinstance(value, float | np.floating) and value.is_integer():
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(
            f"{name} must be an integer, got {value!r}", hint="use a number such as 256 or 1e6"
        ) from None


def refuse_unknown(
    parts: Mapping[str, str],
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Make a function refuse an unknown keyword with the nearest of its own.

    Args:
        parts: Names that are no keywords of the function, but keys of a dict that one of its keywords takes.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        known = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def check_and_call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            for name, value in kwargs.items():
                if name not in known:
                    raise unknown_keyword(f"{function.__name__}()", name, value, known, parts)
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def unknown_keyword(
    called: str, name: str, value: object, known: Sequence[str], parts: Mapping[str, str] = _NO_PARTS
) -> ArgumentError:
    """Return the error for a keyword that a function or class does not have.

    Args:
        called: The function or class, as the message names it.
        name: The keyword.
        value: What it was set to.
        known: The keywords that it has.
        parts: As for `refuse_unknown`.
    """
    text = repr(value) if len(repr(value)) <= 40 else "..."
    alias = _ALIASES.get(name)
    meant = alias if alias in known else None if name in parts else nearest(name, [*known, *parts])
    if name in parts or meant in parts:
        part = meant or name
        hint = f"use {parts[part]}={{{part!r}: {text}}}"
    else:
        hint = f"use {meant}={text}" if meant else f"it has {', '.join(known)}"
    return ArgumentError(f"{called} got an unexpected keyword argument {name!r}", hint=hint)
