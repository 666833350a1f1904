"""Checks of arguments, shared by many public functions."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from expstore.core.nearest import nearest
from expstore.errors import ArgumentError

#: The largest capacity of a store on disk, rows.
MOST_ROWS = 1 << 40

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

#: Names that other libraries use for a parameter of ours.
_ALIASES = {
    "buffer_size": "capacity",
    "max_capacity": "capacity",
    "max_length": "capacity",
    "max_size": "capacity",
    "maxlen": "capacity",
    "scratch_dir": "path",
    "size": "capacity",
}
_NO_PARTS: Mapping[str, str] = MappingProxyType({})


def check_whole(name: str, value: Any, *, hint: str = "use a number such as 256 or 1e6") -> int:
    """Return an integer; a float with an integral value, such as 1e6, is accepted.

    Args:
        name: The name of the argument, for the message.
        value: Its value.
        hint: What to do if it is not an integer.

    Raises:
        ArgumentError: The value is not an integer.
    """
    if isinstance(value, float | np.floating) and value.is_integer():
        return int(value)
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ArgumentError(f"{name} must be an integer, got {value!r}", hint=hint)


def check_capacity(capacity: Any) -> int:
    """Return a capacity as an integer.

    Raises:
        ArgumentError: It is not a whole number, or not between 1 and 2^40, which files can address.
    """
    if isinstance(capacity, bool):
        raise ArgumentError(
            f"capacity must be a number of rows, got {capacity}", hint="use a number such as 1e6"
        )
    number = check_whole("capacity", capacity)
    if not 1 <= number <= MOST_ROWS:
        wanted = "at least 1" if number < 1 else "at most 2^40"
        raise ArgumentError(
            f"capacity must be {wanted}, got {number}",
            hint="" if number < 1 else "omit capacity for a store that grows without bound",
        )
    return number


def check_numbers(name: str, values: np.ndarray[Any, Any]) -> None:
    """Raise ArgumentError if the values of an argument are not numbers."""
    if values.dtype.kind not in "biuf":
        raise ArgumentError(
            f"{name} must be numbers, got {values.item(0)!r}", hint="pass a tensor or a list of numbers"
        )


def check_params(params: Any) -> None:
    """Raise ArgumentError if the parameters of a query are neither a sequence nor a mapping."""
    if isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise ArgumentError(
            f"params must be a list of values for ?, or a dict of values for $name, got {params!r}",
            hint=f"use params=[{params!r}]",
        )


def refuse_unknown(
    parts: Mapping[str, str],
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Make a function raise ArgumentError for an unknown keyword, with the nearest known keyword as the hint.

    Args:
        parts: For names that are keys of a dict that the function takes: the keyword that takes the dict. For
            other names: the call to make, which ends with a bracket.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        known = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def check_and_call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            refuse_keywords(f"{function.__name__}()", kwargs, known, parts)
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def refuse_keywords(
    called: str, given: Mapping[str, Any], known: Sequence[str], parts: Mapping[str, str] = _NO_PARTS
) -> None:
    """Raise the error of `unknown_keyword` if a keyword is not known.

    Args:
        called: The name of the function or class, for the message.
        given: The keywords with their values.
        known: The keywords of the function or class.
        parts: As for `unknown_keyword`.

    Raises:
        ArgumentError: A keyword is unknown.
    """
    for name, value in given.items():
        if name not in known:
            raise unknown_keyword(called, name, value, known, parts)


def unknown_keyword(
    called: str, name: str, value: object, known: Sequence[str], parts: Mapping[str, str] = _NO_PARTS
) -> ArgumentError:
    """Return the error for a keyword that a function or class does not have.

    Args:
        called: The name of the function or class, for the message.
        name: The unknown keyword.
        value: The value passed with it.
        known: The keywords of the function or class.
        parts: For names that are keys of a dict that one of the keywords takes: that keyword. For other
            names: the call to make, which ends with a bracket.
    """
    alias = _ALIASES.get(name)
    meant = alias if alias in known else None if name in parts else nearest(name, [*known, *parts])
    is_secret = meant == "token"  # messages end up in logs
    text = repr(value) if len(repr(value)) <= 40 and not is_secret else "..."
    if name in parts or meant in parts:
        part = meant or name
        home = parts[part]
        hint = f"use {home}" if home.endswith(")") else f"use {home}={{{part!r}: {text}}}"
    else:
        hint = f"use {meant}={text}" if meant else f"it has {', '.join(known)}"
    return ArgumentError(f"{called} got an unexpected keyword argument {name!r}", hint=hint)
