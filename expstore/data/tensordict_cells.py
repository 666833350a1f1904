"""Copy single rows that are TensorDicts into columns, by code generated for the fields.

Used by `add`, as `expstore.data.row_cells` is for dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from expstore.core.values import Array, Key
from expstore.data.row_cells import Cells, compile_function, nest


def compile_put_tensordict(columns: Mapping[Key, Array]) -> Callable[[int, Any], bool]:
    """Return a function `put(row, data)` that copies the values of a TensorDict without batch dims.

    It returns whether it did: otherwise `data` is no such TensorDict, a value is not a tensor that NumPy can
    view in the dtype and shape of its column, or names differ. Some cells of the row may be overwritten then.

    Args:
        columns: Where values go, by field; none is bfloat16. Shapes `(n, *row shape)`.

    Example:
        >>> from expstore.data.tensordict_cells import compile_put_tensordict
        >>> rows = np.zeros((2, 3), np.float32)
        >>> put = compile_put_tensordict({("observation",): rows})
        >>> put(1, TensorDict({"observation": torch.ones(3)})), put(0, TensorDict({"observation": 1.0}))
        (True, False)
        >>> rows.tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    scope: dict[str, Any] = {"TensorDict": TensorDict}
    lines = ["if data._batch_size: return False"]
    _add_group("data", nest(columns), lines, scope)
    # numpy() raises a RuntimeError for tensors that need gradients, a TypeError for those on other devices.
    errors = "KeyError, AttributeError, TypeError, ValueError, RuntimeError"
    return compile_function(["data"], lines, scope, errors=errors)


def _add_group(group: str, columns: Mapping[str, Any], lines: list[str], scope: dict[str, Any]) -> None:
    """Write the code that copies the values of a TensorDict, which has this name in the code."""
    lines += [
        f"if type({group}) is not TensorDict: return False",
        f"{group} = {group}._tensordict",
        f"if len({group}) != {len(columns)}: return False",
    ]
    for number, (name, column) in enumerate(columns.items()):
        value = f"{group}_{number}"
        lines.append(f"{value} = {group}[{name!r}]")
        if isinstance(column, Mapping):
            _add_group(value, column, lines, scope)
        else:
            _add_leaf(value, column, lines, scope)


def _add_leaf(value: str, column: Array, lines: list[str], scope: dict[str, Any]) -> None:
    """Write the code that copies a tensor."""
    rows: Any = column
    dtype: Any = column.dtype
    copied = value
    if column[0].size == 1 and column.dtype.kind in "biu":
        # item() takes a fifth of the time of numpy(). Of floats it might change the bits of a NaN.
        rows = Cells.of(column.reshape(-1), takes_numbers=True).view()
        dtype, copied = torch.from_numpy(np.empty(0, column.dtype)).dtype, f"{value}.item()"
    else:
        lines.append(f"{value} = {value}.numpy()")
    scope |= {f"rows_{value}": rows, f"dtype_{value}": dtype, f"shape_{value}": column.shape[1:]}
    lines += [
        f"if {value}.dtype is not dtype_{value} or {value}.shape != shape_{value}: return False",
        f"rows_{value}[row] = {copied}",
    ]
