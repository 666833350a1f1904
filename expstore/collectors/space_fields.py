"""The fields of a store that hold the values of gymnasium spaces.

Used by the collector and by the wrappers that record. It steps no environment, and does not import gymnasium
before a vector environment is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from expstore.buffers.domain_checks import select_specs
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.core.casts import cast_floats
from expstore.core.values import Array, Key, key_name, to_key
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.schema.schema import ARROW, OBJECT, Field
from expstore.specs import Categorical, MultiCategorical, TensorSpec, Unbounded
from expstore.specs.gymnasium_spaces import WITHOUT_SPEC, from_space

_FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True, slots=True)
class SpaceField:
    """One array, or one text, of a space.

    Args:
        path: Keys and positions that lead to it in a nested value.
        key: The field in which it is stored.
        space: The space.
        shape: Shape of the value in one environment.
        dtype: Its dtype; objects for a text.
    """

    path: tuple[Any, ...]
    key: Key
    space: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def is_text(self) -> bool:
        """Whether its values are texts."""
        return self.dtype.kind == "O"

    def find_spec(self) -> TensorSpec | None:
        """Return the spec of the values; None: a custom space, or a text."""
        with contextlib.suppress(TypeError, ValueError):
            spec: TensorSpec = from_space(self.space)
            return spec
        return None

    def find_values(self) -> tuple[int, ...] | None:
        """Return the numbers of values of a discrete space; None: it is not discrete."""
        return _find_values(self.find_spec())

    def pick(self, value: Any) -> Any:
        """Return the part of a nested value."""
        for part in self.path:
            value = value[part]
        return value

    def read(self, value: Any, lanes: int | None, whose: str) -> Array:
        """Return the part of a nested value as an array; see `read_values`."""
        try:
            part = self.pick(value)
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise self._refuse(value, lanes, whose, exc) from exc
        return self.convert(part, lanes, whose)

    def convert(self, part: Any, lanes: int | None, whose: str) -> Array:
        """Return a value as an array of the space's shape and dtype.

        Raises:
            SchemaError: It has another shape or kind, or its dtype cannot hold a number.
        """
        shape = self.shape if lanes is None else (lanes, *self.shape)
        try:
            if type(part) is np.ndarray and part.dtype == self.dtype and part.shape == shape:
                return part
            if isinstance(part, torch.Tensor):
                part = to_array(part)
            array = np.asarray(part, object) if self.is_text else np.asarray(part)
        except (TypeError, ValueError) as exc:
            raise self._refuse(part, lanes, whose, exc) from exc
        if array.shape != shape or not (
            all(isinstance(text, str) for text in array.flat)
            if self.is_text
            else np.can_cast(array.dtype, self.dtype, casting="same_kind")
        ):
            dtype = "text" if self.is_text else self.dtype
            raise SchemaError(
                f"{whose} returned {key_name(self.key)!r} as {array.dtype} {array.shape}, "
                f"its space says {dtype} {shape}",
                hint=f"return {_describe_wanted(lanes)}, as the space says",
            )
        if self.is_text or array.dtype == self.dtype:
            return array.astype(self.dtype, copy=False)
        cast = cast_floats(array, self.dtype)
        # Floats are rounded; no number becomes infinite or another integer.
        kept = cast == array if self.dtype.kind in "iu" else np.isfinite(cast) == np.isfinite(array)
        if not np.all(kept):
            raise SchemaError(
                f"{whose} returned {key_name(self.key)!r} as {array.dtype}, with values that its space's "
                f"{self.dtype} cannot hold",
                hint="return values of the space",
            )
        return cast

    def _refuse(self, value: Any, lanes: int | None, whose: str, error: Exception) -> SchemaError:
        return SchemaError(
            f"{whose} returned no array for {key_name(self.key)!r}, but a {type(value).__name__}: {error}",
            hint=f"return {_describe_wanted(lanes)}, nested like the space",
        )


def _describe_wanted(lanes: int | None) -> str:
    return "a value" if lanes is None else "a batch of all lanes, whose first dimension is the lanes"


def fields_of(
    space: Any, key: Key, path: tuple[Any, ...] = (), *, with_texts: bool = False
) -> list[SpaceField]:
    """Return the fields of a space's values. The parts of a Tuple have the names "0", "1" and so on.

    Args:
        space: A space of gymnasium, nested to any depth.
        key: Key of the field, or of the group of fields.
        path: Keys and positions that lead to the space's value in a larger one.
        with_texts: Whether Text spaces are accepted.

    Raises:
        ArgumentError: The values of a space have no fixed numeric shape.
    """
    kinds = [kind.__name__ for kind in type(space).__mro__]
    parts: list[tuple[Any, Any]]
    if "Dict" in kinds:
        parts = list(space.spaces.items())
    elif "Tuple" in kinds:
        parts = list(enumerate(space.spaces))
    elif with_texts and "Text" in kinds:
        return [SpaceField(path, key, space, (), np.dtype(object))]
    elif space.shape is None or space.dtype is None or np.dtype(space.dtype).kind not in "biufc":
        reason = next((f": {WITHOUT_SPEC[name]}" for name in kinds if name in WITHOUT_SPEC), "")
        raise ArgumentError(
            f"the space of {key_name(key)!r} is {space}, whose values have no fixed numeric shape{reason}; "
            "wrap the environment so that it returns arrays"
        )
    else:
        return [SpaceField(path, key, space, tuple(space.shape), np.dtype(space.dtype))]
    names = [str(name) for name, _ in parts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(
            f"the space of {key_name(key)!r} has two parts that would have the name {twice!r}; rename a key"
        )
    return [
        field
        for name, part in parts
        for field in fields_of(part, (*key, str(name)), (*path, name), with_texts=with_texts)
    ]


def read_values(value: Any, fields: Sequence[SpaceField], lanes: int | None, whose: str) -> dict[Key, Array]:
    """Return the arrays of a nested value by key, in the dtypes of its spaces. They may share its memory.

    Args:
        value: A value of a space, or a batch of such values.
        fields: The fields of the space.
        lanes: Number of environments; the arrays have shape `(lanes, *shape)`. None: a single value.
        whose: Who returned it, for messages.

    Raises:
        SchemaError: A part is missing, or is not as its space says.
    """
    return {field.key: field.read(value, lanes, whose) for field in fields}


def put_final(
    columns: Mapping[Key, Array], fields: Sequence[SpaceField], ended: Array, info: Mapping[str, Any]
) -> dict[Key, Array]:
    """Replace the observations of ended lanes, which belong to the next episode, by the last ones.

    Args:
        columns: Observations by key. Shapes `(lanes, *shape)`.
        fields: Their fields.
        ended: Which lanes ended an episode in this step. Shape `(lanes,)`, bool.
        info: What the step of the vector environment returned as infos.

    Raises:
        SchemaError: There are no last observations.
    """
    if "final_obs" not in info:
        raise SchemaError(
            "an episode ended, but the environment returned no info['final_obs'], which SAME_STEP requires",
            hint="pass autoreset_mode= if it resets in another way",
        )
    final = info["final_obs"]
    # gymnasium has one value per lane; other vector environments return a batch.
    per_lane = isinstance(final, np.ndarray) and final.dtype == object
    merged = {}
    for field in fields:
        merged[field.key] = columns[field.key].copy()
        for lane in np.flatnonzero(ended):
            part = field.pick(final[lane]) if per_lane else field.pick(final)[lane]
            last = field.convert(part, None, "in info['final_obs'] the environment")
            merged[field.key][lane] = last[()] if field.is_text else last
    return merged


def find_specs(observation: Sequence[SpaceField], action: Sequence[SpaceField]) -> dict[Key, TensorSpec]:
    """Return the specs of the fields that may be stored for an environment."""
    found: dict[Key, TensorSpec] = {}
    for field in (*action, *observation):
        if (spec := field.find_spec()) is not None:
            found[field.key] = spec
    found |= {("next", *field.key): found[field.key] for field in observation if field.key in found}
    found["next", "reward"] = Unbounded((1,), dtype=torch.float32)
    for flag in _FLAGS:
        found[(flag,)] = found["next", flag] = Categorical(2, shape=(1,), dtype=torch.bool)
    found["collector", "traj_ids"] = Unbounded((), dtype=torch.int64)
    return found


def describe_rows(rb: Any, specs: Mapping[Key, TensorSpec]) -> None:
    """Store the specs of fields in a buffer that has rows but no specs.

    Only fields that are stored unchanged get specs: a transform may change the others. A process that writes
    through another one sets none.
    """
    if isinstance(rb, ReplayBuffer) and rb.storage.can_write and rb.schema is not None and rb.specs is None:
        found = select_specs(dict(specs), rb.schema)
        if not found.is_empty():
            rb.set_specs(found)


def check_spaces(rb: ReplayBuffer, fields: Sequence[SpaceField], path: Any, *, dtypes: bool = True) -> None:
    """Raise StateError if a buffer's rows have other shapes, kinds of numbers or discrete values than spaces.

    Bounds are not compared: they may change between two versions of an environment.

    Args:
        rb: The buffer; a store without rows fits all spaces.
        fields: The fields of the spaces.
        path: The store, for the message.
        dtypes: Whether to compare kinds of numbers: integers, floats or complex numbers.
    """
    if rb.schema is None:
        return
    stored = {field.key: field for field in rb.schema.fields}
    specs = rb.specs
    named = {} if specs is None else {to_key(key): spec for key, spec in specs.items(True, True)}
    other = []
    for field in fields:
        found, values, wanted = stored.get(field.key), _find_values(named.get(field.key)), field.find_values()
        if (
            found is None
            or not _fits(found, field, dtypes=dtypes)
            or (values is not None and values != wanted)
        ):
            has = "nothing" if found is None else _describe_field(found.dtype, found.shape, values)
            wants = _describe_field("text" if field.is_text else field.dtype, field.shape, wanted)
            other.append(f"{key_name(field.key)} is {has} in the store and {wants} in the environment")
    if other:
        raise StateError(
            f"the rows of {path} do not fit the environment: {', '.join(other)}",
            kind="mismatch",
            hint="choose another store for each environment, and for each way to record it",
        )


def _fits(stored: Field, field: SpaceField, *, dtypes: bool) -> bool:
    """Return whether a stored field has the shape, and the kind of numbers, of a space."""
    if stored.dtype in (ARROW, OBJECT) or field.is_text:
        return stored.dtype in (ARROW, OBJECT)
    return stored.shape == field.shape and not (
        dtypes and _find_kind(stored.dtype) != _find_kind(str(field.dtype))
    )


def _find_kind(dtype: str) -> str:
    for kind in ("float", "complex"):
        if kind in dtype:  # also bfloat16
            return kind
    return "integer"


def _find_values(spec: TensorSpec | None) -> tuple[int, ...] | None:
    """Return the numbers of values of a discrete spec; None: it is not discrete, or unknown."""
    if isinstance(spec, MultiCategorical):
        return tuple(torch.as_tensor(spec.nvec).reshape(-1).tolist())
    return (int(spec.n),) if isinstance(spec, Categorical) else None


def _describe_field(dtype: Any, shape: tuple[int, ...], values: tuple[int, ...] | None) -> str:
    count = "" if values is None else f" with {' and '.join(map(str, values))} values"
    return f"{dtype}[{','.join(map(str, shape))}]{count}"


def check_mode(mode: Any) -> Any:
    """Return an autoreset mode of gymnasium by its name.

    Raises:
        ArgumentError: There is no such mode.
    """
    from gymnasium.vector import AutoresetMode

    try:
        return AutoresetMode(mode)
    except ValueError as exc:
        raise ArgumentError(f"{exc}; the autoreset mode is one of {_list_modes()}") from exc


def _list_modes() -> str:
    from gymnasium.vector import AutoresetMode

    return ", ".join(repr(mode.value) for mode in AutoresetMode)


def autoreset_mode_of(env: Any, given: Any) -> Any:
    """Return the autoreset mode of a vector environment, from its metadata or from the caller.

    Args:
        env: The environment.
        given: A mode, or its name; None: `env` must declare its mode.

    Raises:
        ArgumentError: There is no such mode, none is known, or `env` declares another one.
    """
    declared = env.metadata.get("autoreset_mode")
    if declared is None and given is None:
        raise ArgumentError(
            f"{env} does not say in metadata['autoreset_mode'] how its lanes are reset; "
            f"pass autoreset_mode=, one of {_list_modes()}"
        )
    modes = [check_mode(mode) for mode in (declared, given) if mode is not None]
    if modes[0] is not modes[-1]:
        raise ArgumentError(
            f"autoreset_mode={given!r}, but {env} declares {declared!r}; leave the argument out"
        )
    return modes[0]
