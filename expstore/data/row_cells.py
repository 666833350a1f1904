"""Copy the values of single rows, dicts or TensorDicts, into preallocated columns, by generated code.

Used by recorders and by `add`. It accepts only values that need no conversion.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from expstore.core.values import Array, Key

#: `ctypes.memmove` without releasing the GIL.
_copy_bytes = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
#: Python types that fields of a kind store without conversion; integers may be too large.
_OWN_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,)}


@dataclass(frozen=True, slots=True)
class Cells:
    """The memory of one field's values.

    Args:
        rows: One value per row. Shape `(n, *shape)`.
        numbers: Types of numbers that are stored without conversion.
        largest: Floats up to this size are rounded to the dtype; -1: floats are not accepted.
        any_shape: Whether an array of one value may have any shape, such as `(1,)`.
    """

    rows: Array
    numbers: frozenset[type]
    largest: float
    any_shape: bool = False

    @classmethod
    def of(cls, rows: Array, *, takes_numbers: bool, any_shape: bool = False) -> Self:
        """Return the cells over existing memory.

        Args:
            rows: Shape `(n, *shape)`.
            takes_numbers: Whether a value may be a number instead of an array; `shape` is `()` then.
            any_shape: Whether arrays of one value may have any shape; `shape` is `()` then.
        """
        dtype, numbers, largest = rows.dtype, frozenset[type](), -1.0
        if takes_numbers:
            numbers = frozenset({dtype.type, *_OWN_TYPES.get(dtype.kind, ())})
            if dtype.kind == "f":
                largest = float(np.finfo(dtype).max)
        return cls(rows, numbers, largest, any_shape)

    def view(self) -> Any:
        """Return the same memory in the form to which values are written fastest."""
        kind, char = self.rows.dtype.kind, self.rows.dtype.char
        if not self.numbers or kind not in "biuf" or char == "e":  # memory views have no float16
            return self.rows
        cells: Any = self.rows.view(np.uint8).data  # as bytes: NumPy allows no other view of unaligned memory
        return cells.cast(char)


#: A part of a row: the cells of a field, or a dict of parts by name.
Part: TypeAlias = Cells | Mapping[str, "Part"]


def nest(places: Mapping[Key, Any]) -> dict[str, Any]:
    """Return what there is for each field, its cells say, as a dict, nested like rows."""
    root: dict[str, Any] = {}
    for (*path, last), one in places.items():
        place = root
        for name in path:
            place = place.setdefault(name, {})
        place[last] = one
    return root


def compile_put(parts: Sequence[Part]) -> Callable[..., bool]:
    """Return a function `put(row, *values)` that copies the values of a row, one for each part.

    It returns True on success. It returns False if a value has another type, dtype or shape, a number does
    not fit the dtype, or a dict has other names; some cells of the row may be overwritten then.

    Example:
        >>> from expstore.data.row_cells import Cells, compile_put
        >>> rows = np.zeros((2, 3), np.float32)
        >>> put = compile_put([{"observation": Cells.of(rows, takes_numbers=False)}])
        >>> put(1, {"observation": np.ones(3, np.float32)}), put(0, {"observation": [1.0, 1.0, 1.0]})
        (True, False)
        >>> rows.tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    arguments = [f"value{number}" for number in range(len(parts))]
    scope: dict[str, Any] = {"ndarray": np.ndarray}
    lines: list[str] = []
    for name, part in zip(arguments, parts, strict=True):
        _add_group(name, part, lines, scope, _open_dict, _add_value)
    errors = "KeyError, IndexError, TypeError, ValueError, OverflowError"
    return _compile_function(arguments, lines, scope, errors=errors)


def compile_put_tensordict(columns: Mapping[Key, Array]) -> Callable[[int, Any], bool]:
    """Return a function `put(row, data)` that copies the values of a TensorDict without batch dims.

    It returns whether it did: otherwise `data` is no such TensorDict, a value is not a tensor in host memory
    in the dtype and shape of its column, or names differ. Some cells of the row may be overwritten then.

    Args:
        columns: Where values go, by field; none is bfloat16. C-contiguous, shapes `(n, *row shape)`.

    Example:
        >>> from expstore.data.row_cells import compile_put_tensordict
        >>> rows = np.zeros((2, 3), np.float32)
        >>> put = compile_put_tensordict({("observation",): rows})
        >>> put(1, TensorDict({"observation": torch.ones(3)})), put(0, TensorDict({"observation": 1.0}))
        (True, False)
        >>> rows.tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    scope: dict[str, Any] = {"TensorDict": TensorDict, "copy": _copy_bytes}
    lines = ["if data._batch_size: return False"]
    _add_group("data", nest(columns), lines, scope, _open_tensordict, _add_tensor)
    # Tensors without memory raise a RuntimeError.
    errors = "KeyError, AttributeError, TypeError, ValueError, RuntimeError"
    return _compile_function(["data"], lines, scope, errors=errors)


def _compile_function(
    arguments: Sequence[str], lines: Sequence[str], scope: dict[str, Any], *, errors: str
) -> Callable[..., bool]:
    """Return a function `put(row, *arguments)` of these lines.

    Args:
        arguments: Their names.
        lines: The code. A `return False` ends it early; after the last line it returns True.
        scope: The values of other names in the code.
        errors: The exceptions for which it returns False, separated by commas.
    """
    body = "\n".join(f"        {line}" for line in lines)
    source = (
        f"def put(row, {', '.join(arguments)}):\n    try:\n{body}\n"
        f"    except ({errors}):\n        return False\n"
        "    return True\n"
    )
    exec(source, scope)
    put: Callable[..., bool] = scope["put"]
    return put


def _add_group(
    value: str,
    part: Any,
    lines: list[str],
    scope: dict[str, Any],
    open_group: Callable[[str, int], list[str]],
    add_leaf: Callable[[str, Any, list[str], dict[str, Any]], None],
) -> None:
    """Append the lines of code that copy a value; `value` is its variable.

    Args:
        value: Name of the variable.
        part: Where the value goes, or a mapping of parts by name.
        lines: The code.
        scope: The values of other names in the code.
        open_group: Returns the lines that check a group and make it a dict, of its variable and number of
            names.
        add_leaf: Appends the lines of a value that is no group.
    """
    if not isinstance(part, Mapping):
        add_leaf(value, part, lines, scope)
        return
    lines += open_group(value, len(part))
    for number, (name, inner) in enumerate(part.items()):
        lines.append(f"{value}_{number} = {value}[{name!r}]")
        _add_group(f"{value}_{number}", inner, lines, scope, open_group, add_leaf)


def _open_dict(value: str, count: int) -> list[str]:
    return [f"if len({value}) != {count}: return False"]


def _open_tensordict(value: str, count: int) -> list[str]:
    return [
        f"if type({value}) is not TensorDict: return False",
        f"{value} = {value}._tensordict",
        *_open_dict(value, count),
    ]


def _add_value(value: str, part: Cells, lines: list[str], scope: dict[str, Any]) -> None:
    """Append the lines of code that copy an array or a number."""
    scope |= {
        f"rows_{value}": part.view(),
        f"dtype_{value}": part.rows.dtype,
        f"shape_{value}": part.rows.shape[1:],
        f"numbers_{value}": part.numbers,
    }
    wrong = [f"kind not in numbers_{value}"]
    if part.largest >= 0:
        wrong.append(f"(kind is not float or not {-part.largest!r} <= {value} <= {part.largest!r})")
    wrong_shape = f"{value}.size != 1" if part.any_shape else f"{value}.shape != shape_{value}"
    lines += [
        f"kind = type({value})",
        "if kind is ndarray:",
        f"    if {value}.dtype is not dtype_{value} or {wrong_shape}: return False",
        *([f"    {value} = {value}.item()"] if part.any_shape else []),
        f"elif {' and '.join(wrong)}: return False",
        # A memory view converts a float32 to a double and back, which changes the bits of some NaNs.
        *([f"if {value} != {value}: return False"] if part.numbers and part.rows.dtype.char == "f" else []),
        f"rows_{value}[row] = {value}",
    ]


def _add_tensor(value: str, column: Array, lines: list[str], scope: dict[str, Any]) -> None:
    """Append the lines of code that copy a tensor.

    They never release the GIL, unlike `item()`, `copy_()` and the end of what `numpy()` returns: beside
    another thread, each release may take 5 ms.
    """
    shape, dtype = column.shape[1:], torch.from_numpy(np.empty(0, column.dtype)).dtype
    scope |= {f"rows_{value}": column, f"dtype_{value}": dtype, f"shape_{value}": shape}
    lines.append(f"if {value}.dtype is not dtype_{value} or {value}.shape != shape_{value}: return False")
    if column[0].size == 1 and column.dtype.kind in "biu":
        # Faster than a copy of memory. Of floats it might change the bits of a NaN.
        scope[f"rows_{value}"] = Cells.of(column.reshape(-1), takes_numbers=True).view()
        lines.append(f"rows_{value}[row] = {value}.tolist(){'[0]' * len(shape)}")
        return
    size = column.nbytes // len(column)
    lines += [
        f"if {value}.requires_grad or not {value}.is_cpu or {value}.is_neg() or {value}.is_conj():",
        "    return False",
        f"if not {value}.is_contiguous(): {value} = {value}.contiguous()",
        f"copy({column.ctypes.data} + {size} * row, {value}.data_ptr(), {size})",
    ]
