"""Read pickles of NumPy arrays and plain containers without running code that they name.

Used by readers of formats with pickled dicts of arrays, or with pickled objects that hold arrays. A pickle
may name any function. Here the names that NumPy's arrays, dtypes and scalars use are mapped to replacements
in this module, and every other name is an error; `load_object` reads objects of other classes as their
attributes. NumPy's `__setstate__` methods never get data of the pickle. Before anything is created, the
instructions are checked for input that would crash Python's own unpickler or fill the memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import numpy as np

from expstore.core.values import Array
from expstore.errors import SchemaError, StorageError

_KINDS = "biufcSU"
#: Maximum nesting of containers; Python's hash of deeper tuples overflows the C stack.
_DEEPEST = 100
_CHANGES = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})


@dataclass(frozen=True, slots=True)
class PickledObject:
    """An object in a pickle whose class was not loaded.

    Args:
        module: Module of its class.
        name: Name of its class.
        arguments: What its constructor would have been called with.
        attributes: Its attributes by name; empty if its state is not a dict.
    """

    module: str
    name: str
    arguments: tuple[Any, ...]
    attributes: Mapping[str, Any]


def load_arrays(file: BinaryIO) -> Any:
    """Return the content of a pickle: dicts, lists, tuples, texts, bytes, numbers, None, dtypes and arrays.

    Args:
        file: File opened for reading, at the beginning of the pickle.

    Raises:
        SchemaError: The pickle contains something else; the message names it.
        StorageError: The file is not a pickle, or ends early.
    """
    return _load(io.BytesIO(file.read()), ())


def load_object(file: BinaryIO, packages: tuple[str, ...]) -> Any:
    """Return the content of a pickle as in `load_arrays`; instances of classes become `PickledObject`s.

    The file is read twice, and not held in memory as a whole.

    Args:
        file: Seekable file opened for reading, at the beginning of the pickle.
        packages: Top-level packages whose names the pickle may call. Nothing is called: the result is a
            `PickledObject` too.

    Raises:
        SchemaError: The pickle calls a function of another package, or contains itself; the message names it.
        StorageError: The file is not a pickle, or ends early.
    """
    return _load(file, packages)


def _load(file: BinaryIO, packages: tuple[str, ...]) -> Any:
    try:
        start = file.tell()
        _check(file)
        file.seek(start)
        return _plain(_Unpickler(file, packages).load())
    except SchemaError:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError) as exc:
        raise StorageError(f"cannot read a pickle: {exc}") from exc
    except (AttributeError, BufferError, MemoryError, OverflowError, RecursionError) as exc:
        raise StorageError(f"cannot read a pickle: {exc!r}") from exc


def _check(file: BinaryIO) -> None:
    """Raise SchemaError for a pickle that nests too deeply, or whose memo indices would fill the memory.

    The stack is simulated as in `pickletools.dis`, with the depth of each value instead of the value.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        name, before = opcode.name, opcode.stack_before
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            if place > count:
                raise SchemaError(f"the pickle uses the memo index {place} after {count} instructions")
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
    """Return the content of a .npy file of Python objects, as `np.save` writes a dict.

    Args:
        file: File opened for reading, at its beginning.

    Raises:
        SchemaError, StorageError: As in `load_arrays`.
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
    """Replace `numpy.dtype`."""

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
    """Replace an array, or a list of objects in an array's place."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.value = _build_array(shape, dtype, bool(is_fortran), data)


class _NdArray:
    """Replace the class `numpy.ndarray`, which pickles name but never call."""

    def __init__(self, *_: object) -> None:
        raise SchemaError("the pickle calls the class of arrays")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()


def _frombuffer(data: Any, dtype: Any, shape: Any, order: str) -> _Array:
    found = _Array()
    if not isinstance(data, (bytes, bytearray)):
        raise SchemaError(f"the values of an array are {type(data).__name__}")
    found.value = _build_array(shape, dtype, order == "F", data)
    return found


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return _build_array((), dtype, False, data)[()]


def _encode(text: Any, encoding: str) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise SchemaError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Return the value that old protocols use for empty bytes."""
    return b""


def _complex(real: Any, imaginary: Any) -> complex:
    if not (isinstance(real, float) and isinstance(imaginary, float)):
        raise SchemaError("a complex number does not consist of two floats")
    return complex(real, imaginary)


def _build_array(shape: Any, dtype: Any, is_fortran: bool, data: Any) -> Any:
    """Return an array of these bytes; for objects, the list of them."""
    if not isinstance(dtype, _Dtype):
        raise SchemaError("an array has no dtype")
    if dtype.dtype.kind == "O":
        if not isinstance(data, list):
            raise SchemaError("an array of objects is not a list")
        return data
    if not isinstance(data, (bytes, bytearray)):
        raise SchemaError(f"the values of an array are {type(data).__name__}")
    flat: Array = np.frombuffer(data, dtype.dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")


class _StandIn:
    """Call a replacement. A pickle can set attributes of what it names, so every name has its own object."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise SchemaError("the pickle changes a function")


#: Names in pickles, without their module: NumPy 1 and 2 differ only in modules.
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


class _InertClass(type):
    """The type of the classes that replace classes of a pickle: instances are made, calls may be refused.

    Pickles create instances by `__new__`, which skips this `__call__`, and call functions.
    """

    path: tuple[str, str]
    may_call: bool

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if not cls.may_call:
            raise SchemaError(f"the pickle calls {'.'.join(cls.path)}", hint="no code of it was run")
        return super().__call__(*arguments, **named)


class _Inert(metaclass=_InertClass):
    """Replace an instance of a class, or the result of a call: keep the arguments and the state."""

    __slots__ = ("arguments", "state")
    path, may_call = ("", ""), False
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Self:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _make_dict(*pairs: Any) -> dict[Any, Any]:
    """Replace `collections.OrderedDict`."""
    return dict(*pairs)


#: Placeholder for a value that `_plain` is still building.
_UNFINISHED = object()


class _Unpickler(pickle.Unpickler):
    """Unpickler that finds only the replacements in this module.

    Args:
        file: The pickle.
        packages: Packages whose names may be called; (): every name without a replacement is an error.
    """

    def __init__(self, file: BinaryIO, packages: tuple[str, ...]) -> None:
        super().__init__(file)
        self._packages = packages

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a name.

        Raises:
            SchemaError: The name has no replacement.
        """
        found = _STAND_INS.get((_MODULES.get(module, ""), name))
        if found is not None:
            return _StandIn(found)
        if not self._packages:
            raise SchemaError(
                f"the pickle names {module}.{name}, which is neither an array nor a plain value",
                hint="no code of it was run",
            )
        if (module, name) == ("collections", "OrderedDict"):
            return _StandIn(_make_dict)
        may_call = module.partition(".")[0] in self._packages
        return _InertClass(
            "_Found", (_Inert,), {"__slots__": (), "path": (module, name), "may_call": may_call}
        )

    def persistent_load(self, pid: object) -> Any:
        """Raise SchemaError: the pickle refers to an object outside of it."""
        raise SchemaError("the pickle refers to an object outside of it")


def _plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a value with arrays instead of their replacements.

    Args:
        value: A value of the pickle.
        known: Results by the id of the value. A value that the pickle refers to many times is built once;
            otherwise a few bytes could expand to a huge result.
    """
    known = {} if known is None else known
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.ndarray, np.generic)):
        return value
    if id(value) in known:
        if known[id(value)] is _UNFINISHED:
            raise SchemaError("the pickle contains a value that contains itself")
        return known[id(value)]
    known[id(value)] = _UNFINISHED
    found: Any
    if isinstance(value, _Array):
        found = _plain(value.value, known)
    elif isinstance(value, _Inert):
        found = _describe(value, known)
    elif isinstance(value, _InertClass):
        found = ".".join(value.path)
    elif isinstance(value, _Dtype):
        found = value.dtype
    elif isinstance(value, dict):
        found = {_plain(key, known): _plain(below, known) for key, below in value.items()}
    elif isinstance(value, list):
        found = [_plain(below, known) for below in value]
    elif isinstance(value, tuple):
        found = tuple(_plain(below, known) for below in value)
    else:
        raise SchemaError(
            f"the pickle contains a {type(value).__name__}, which is neither an array nor a plain value"
        )
    known[id(value)] = found
    return found


def _describe(value: _Inert, known: dict[int, Any]) -> PickledObject:
    """Return what is known about an instance of a class that was not loaded."""
    parts = value.state if isinstance(value.state, tuple) else (value.state,)  # with `__slots__`: two dicts
    attributes: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            attributes |= {str(name): _plain(below, known) for name, below in part.items()}
    return PickledObject(*type(value).path, _plain(value.arguments, known), attributes)
