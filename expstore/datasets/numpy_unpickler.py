"""Read pickles of NumPy arrays and plain containers without running anything that they name.

Used by readers of formats that keep dicts of arrays as pickles. A pickle may name any function; here the
names that NumPy's arrays, dtypes and scalars use lead to stand-ins written in this module, and every other
name is an error. No `__setstate__` of NumPy sees what the pickle says. Before anything is made, the
instructions are looked through for what would crash Python's own unpickler or fill the memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from expstore.core.values import Array
from expstore.errors import SchemaError, StorageError

__all__ = ["load_arrays", "load_object_npy"]

_KINDS = "biufcSU"
#: Containers in containers; Python's hash of deeper tuples overflows the C stack.
_DEEPEST = 100
_CHANGES = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})


def load_arrays(file: BinaryIO) -> Any:
    """Return what a pickle holds: dicts, lists, tuples, texts, bytes, numbers, None and NumPy arrays of them.

    Args:
        file: Open for reading, at the beginning of the pickle.

    Raises:
        SchemaError: It holds something else; the message names it.
        StorageError: It is no pickle, or ends early.
    """
    try:
        data = file.read()
        _check(data)
        return _plain(_Unpickler(io.BytesIO(data)).load())
    except SchemaError:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError) as exc:
        raise StorageError(f"cannot read a pickle: {exc}") from exc
    except (AttributeError, UnicodeDecodeError, MemoryError, OverflowError, RecursionError) as exc:
        raise StorageError(f"cannot read a pickle: {exc!r}") from exc


def _check(data: bytes) -> None:
    """Refuse a pickle that nests too deeply, or whose numbers of memory places would fill the memory.

    The stack is followed as `pickletools.dis` does, with the depth of each value in its place.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name, before = opcode.name, opcode.stack_before
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            if place > count:
                raise SchemaError(f"the pickle uses the memory place {place} after {count} instructions")
            memo[place] = stack[-1]
            continue
        if name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
            continue
        if name == "MARK":
            marks.append(len(stack))
            continue
        popped: list[int] = []
        container = 0
        if pickletools.markobject in before:
            start = marks.pop()
            popped = stack[start:]
            del stack[start:]
            below = before.index(pickletools.markobject)
        else:
            below = len(before)
        if below:
            taken = stack[-below:]
            del stack[-below:]
            if name in _CHANGES:
                container, taken = taken[0], taken[1:]
            popped += taken
        depth = max(container, 1 + max(popped, default=-1))
        if depth > _DEEPEST:
            raise SchemaError(f"the pickle nests values more than {_DEEPEST} deep")
        stack += [depth] * len(opcode.stack_after)


def load_object_npy(file: BinaryIO) -> Any:
    """Return what a .npy file holds whose array is of Python objects, as `np.save` writes a dict.

    Args:
        file: Open for reading, at its beginning.

    Raises:
        SchemaError, StorageError: As `load_arrays`.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    except (ValueError, EOFError) as exc:
        raise StorageError(f"cannot read a .npy file: {exc}") from exc
    if not dtype.hasobject or shape:
        raise SchemaError(
            f"the array has shape {list(shape)} and dtype {dtype}; one Python object is expected"
        )
    found = load_arrays(file)
    return found[0] if isinstance(found, list) and len(found) == 1 else found


class _Dtype:
    """Stand for `numpy.dtype`."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str):
            raise SchemaError(f"a dtype is made of {type(code).__name__}")
        self.dtype = np.dtype(code)
        if self.dtype.kind not in (*_KINDS, "O"):
            raise SchemaError(f"an array has the dtype {self.dtype}")

    def __setstate__(self, state: Any) -> None:
        _, order, below, names, fields = state[:5]
        if below is not None or names is not None or fields is not None:
            raise SchemaError("an array has fields or parts")
        order = order.decode() if isinstance(order, bytes) else order
        if order == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Stand for an array, or a list of objects in an array's place."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.value = _build_array(shape, dtype, bool(is_fortran), data)


class _NdArray:
    """Stand for the class `numpy.ndarray`, which pickles name and never call."""

    def __init__(self, *_: object) -> None:
        raise SchemaError("the pickle makes an array by its class")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()


def _frombuffer(data: Any, dtype: Any, shape: Any, order: str) -> _Array:
    found = _Array()
    if not isinstance(data, (bytes, bytearray)):
        raise SchemaError(f"the values of an array are {type(data).__name__}")
    found.value = _build_array(shape, dtype, order == "F", bytes(data))
    return found


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return _build_array((), dtype, False, data)[()]


def _encode(text: Any, encoding: str) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise SchemaError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Return what old protocols have for bytes without any."""
    return b""


def _complex(real: Any, imaginary: Any) -> complex:
    if not (isinstance(real, float) and isinstance(imaginary, float)):
        raise SchemaError("a complex number is made of something else than two floats")
    return complex(real, imaginary)


def _build_array(shape: Any, dtype: Any, is_fortran: bool, data: Any) -> Any:
    """Return an array of these bytes; of objects, the list of them."""
    if not isinstance(dtype, _Dtype):
        raise SchemaError("an array has no dtype")
    if dtype.dtype.kind == "O":
        if not isinstance(data, list):
            raise SchemaError("an array of objects is not a list")
        return data
    if not isinstance(data, bytes):
        raise SchemaError(f"the values of an array are {type(data).__name__}")
    flat: Array = np.frombuffer(data, dtype.dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")


class _StandIn:
    """Call a stand-in. A pickle can set attributes of what it names, so every name has one of its own."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise SchemaError("the pickle changes a function")


#: Names in pickles, without their module: NumPy 1 and 2 differ in modules alone.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("multiarray", "_reconstruct"): _reconstruct,
    ("multiarray", "scalar"): _scalar,
    ("numeric", "_frombuffer"): _frombuffer,
    ("numpy", "ndarray"): _NdArray,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _no_bytes,
    ("builtins", "complex"): _complex,
}
_MODULES = {
    "numpy": "numpy",
    "_codecs": "_codecs",
    "builtins": "builtins",
    "__builtin__": "builtins",
    **{f"numpy.{core}.{name}": name for core in ("core", "_core") for name in ("multiarray", "numeric")},
}


#: In place of what `_plain` still makes.
_UNFINISHED = object()


class _Unpickler(pickle.Unpickler):
    """Find stand-ins only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name.

        Raises:
            SchemaError: It has no stand-in.
        """
        found = _STAND_INS.get((_MODULES.get(module, ""), name))
        if found is None:
            raise SchemaError(
                f"the pickle names {module}.{name}, which is neither an array nor a plain value",
                hint="nothing of it was run",
            )
        return _StandIn(found)

    def persistent_load(self, pid: object) -> Any:
        """Refuse what lies outside of the pickle."""
        raise SchemaError("the pickle refers to something outside of it")


def _plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a value with arrays in place of their stand-ins.

    Args:
        value: What the pickle holds.
        known: Results by the id of what they were made of: what the pickle names many times is made once, or
            a few bytes could stand for very much.
    """
    known = {} if known is None else known
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.ndarray, np.generic)):
        return value
    if id(value) in known:
        if known[id(value)] is _UNFINISHED:
            raise SchemaError("the pickle holds something that contains itself")
        return known[id(value)]
    known[id(value)] = _UNFINISHED
    found: Any
    if isinstance(value, _Array):
        found = _plain(value.value, known)
    elif isinstance(value, dict):
        found = {_plain(key, known): _plain(below, known) for key, below in value.items()}
    elif isinstance(value, list):
        found = [_plain(below, known) for below in value]
    elif isinstance(value, tuple):
        found = tuple(_plain(below, known) for below in value)
    else:
        raise SchemaError(
            f"the pickle holds a {type(value).__name__}, which is neither an array nor a plain value"
        )
    known[id(value)] = found
    return found
