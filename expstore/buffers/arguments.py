"""Checks of the arguments of buffers, before anything is created.

Used by the buffers and by `expstore.open`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from tensordict import is_tensor_collection

from expstore.core.arguments import check_whole
from expstore.errors import ArgumentError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.samplers.token_budget import TokenBudget
from expstore.schema.ragged_fields import check_form
from expstore.storages.torchrl_options import check_device

_Part = TypeVar("_Part")

#: The largest batch, rows. Memory could not hold the ids of a much larger one.
MOST_BATCH_ROWS = (1 << 31) - 1


def resolve_part(part: Any, method: str) -> Any:
    """Return a buffer's part: the part itself, or the result of calling the function or class that makes it.

    Args:
        part: The part, a function or a class.
        method: Name of a method by which a part is recognised.
    """
    is_part = hasattr(part, method) and not isinstance(part, type)
    return part() if callable(part) and not is_part else part


def resolve_part_of(part: _Part | Callable[[], _Part], kind: type[Any], method: str, name: str) -> _Part:
    """Return a buffer's part as `resolve_part` does, and check its class.

    Args:
        part: The part, a function or a class.
        kind: The base class of such parts.
        method: Name of a method by which a part is recognised.
        name: What it is, for the message: "storage".

    Raises:
        ArgumentError: The part has another class.
    """
    found = resolve_part(part, method)
    if not isinstance(found, kind):
        package = type(found).__module__.partition(".")[0]
        got = f"{found!r:.80}" if package == "builtins" else f"a {package} {type(found).__name__}"
        raise ArgumentError(
            f"expected a {name} of expstore or a function that makes one, got {got}",
            hint="use the class of the same name in expstore" if package == "torchrl" else "",
        )
    return cast(_Part, found)


def check_drawing(
    batch_size: int | None,
    prefetch: int | None,
    pin_memory: bool,
    *,
    device: torch.device | str | None = None,
    limiter: Any = None,
    capacity: int | None = None,
) -> None:
    """Check how batches are drawn and where they are returned.

    Raises:
        ArgumentError: The batch size is not a whole number; a number is too small, or `pin_memory` is set and
            torch finds no accelerator.
        StateError: torch cannot use the device, or the limiter is not a `RateLimiter`.
    """
    if limiter is not None:
        if not isinstance(limiter, RateLimiter):
            raise StateError(
                f"rate_limiter={limiter!r} is a {type(limiter).__name__}, not a RateLimiter",
                hint="give a RateLimiter, MinSize or SampleToInsertRatio of expstore, or leave it out",
            )
        limiter.check(capacity)
    check_batch_size(batch_size)
    if prefetch is not None and check_whole("prefetch", prefetch, hint="use a number such as 2") < 0:
        raise ArgumentError(f"prefetch must be at least 0, got {prefetch}")
    if pin_memory and not torch.accelerator.is_available():
        raise ArgumentError("pin_memory=True needs an accelerator, and torch finds no device; leave it False")
    if device is not None:
        check_device(device, "batches")


def check_ragged(ragged: Any, batch_tokens: Any, tokens_key: Any, unit: Any) -> TokenBudget | None:
    """Check how batches have tensors of different lengths; return how many tokens a batch may have.

    Args:
        ragged: What the user passed as the form.
        batch_tokens: What the user passed as the number of tokens; None: any number.
        tokens_key: What the user passed as the field whose lengths count.
        unit: The sample unit; None: rows alone.

    Raises:
        ArgumentError: There is no such form, the number is below 1, or it excludes another argument.
    """
    check_form(ragged)
    budget = TokenBudget.of(batch_tokens, tokens_key)
    if budget is not None and unit is not None:
        raise ArgumentError("batch_tokens and sample_unit exclude each other; leave one of them out")
    return budget


def check_generator(generator: Any) -> None:
    """Raise ArgumentError if a value is neither a `torch.Generator` nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentError(f"generator must be a torch.Generator, got {generator!r}")


def check_sample(data: Any) -> None:
    """Raise ArgumentError if `update_tensordict_priority` is called with something else than a sample."""
    if not is_tensor_collection(data):
        raise ArgumentError(
            f"update_tensordict_priority takes a sample, got {type(data).__name__}",
            hint="pass the TensorDict that sample() returned, or call update_priority(id=, priority=)",
        )


def check_predictable(size: int | None, sampler: Any) -> None:
    """Raise ValueError if a sampler's passes depend on the batch size, and the buffer has none."""
    if size is None and getattr(sampler, "drop_last", False):
        raise ArgumentError(
            "Samplers with drop_last=True must work with a predictable batch-size: it determines "
            "which rows a pass drops; give the buffer batch_size="
        )


@overload
def check_batch_size(size: int) -> int: ...


@overload
def check_batch_size(size: int | None) -> int | None: ...


def check_batch_size(size: int | None) -> int | None:
    """Return a batch size as an int.

    Raises:
        ArgumentError: The size is not a whole number; the size is below 1, or no memory could hold the batch.
    """
    size = None if size is None else check_whole("batch_size", size)
    if size is not None and size < 1:
        raise ArgumentError(f"batch_size must be at least 1, got {size}")
    if size is not None and size > MOST_BATCH_ROWS:
        raise ArgumentError(
            f"batch_size must be at most 2^31 - 1, got {size}", hint="draw several smaller batches"
        )
    return size


def check_positional(kind: type, args: Sequence[object]) -> None:
    """Raise ArgumentError if the constructor of a class takes no positional arguments."""
    _, *parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    if all(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in parameters):
        types = ", ".join(type(one).__name__ for one in args)
        raise ArgumentError(
            f"{kind.__name__} takes no positional arguments, got {types}",
            hint=f"use {kind.__name__}(storage=...); for replay_buffer_class= of Stable-Baselines3 there is "
            "expstore.sb3.ReplayBuffer",
        )
