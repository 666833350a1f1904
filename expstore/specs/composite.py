"""Specs of TensorDicts: one spec for each key, possibly nested.

`Composite` describes TensorDicts, and the fields of a store. It delegates drawing and checking to the specs
that it contains. A locked composite refuses to set or remove entries.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from expstore.core.values import to_key
from expstore.specs.base import GroupSpec, TensorSpec, as_device
from expstore.specs.shapes import PLANS, as_size, safe

#: The entries of a composite: a spec, or None, for each name.
Entries = dict[str, TensorSpec | None]
NestedKey = str | tuple[str, ...]
_Item = TypeVar("_Item")

#: Names that are properties of the spec itself.
_RESERVED = {"shape", "device", "dtype", "space"}
_MISSING: Any = object()


class Composite(GroupSpec):
    """Hold a spec for each key of a TensorDict; its shape is the batch size.

    A key whose spec is None may hold anything. Threads can share a composite while none of them changes it.
    Composites can be pickled.

    A composite that was locked together with its parent can only be unlocked through the parent. The lock
    guards against mistakes, not against other threads. Pickled copies are locked too; clones are not.

    Args:
        args: Key -> spec, as one dict or Composite; keys and dicts may be nested.
        shape: The leading dims of all specs in it; also called `batch_size`.
        device: Device of all specs in it; None lets each spec have its own.
        data_cls: Class of the values instead of TensorDict; created by its `from_dict`.
        step_mdp_static: Whether TorchRL's `step_mdp` keeps the values unchanged.
        names: Names of the dims; None for unnamed dims.
        kwargs: Key -> spec.

    Raises:
        ValueError: The leading dims of a spec differ from `shape`.
        RuntimeError: A spec is on another device.

    Example:
        >>> from expstore import Bounded, Categorical, Composite
        >>> spec = Composite(observation=Bounded(-1, 1, shape=(3,)), next=Composite(done=Categorical(2)))
        >>> list(spec.keys(include_nested=True, leaves_only=True))
        ['observation', ('next', 'done')]
        >>> spec.is_in(spec.rand())
        True
    """

    _is_locked: bool = False
    #: Weak references to the composites that locked this one.
    _lockers: tuple[weakref.ref[Composite], ...] = ()

    def __init__(
        self,
        *args: Mapping[Any, Any] | Composite,
        shape: int | Sequence[int] | None = None,
        device: torch.device | str | int | None = None,
        data_cls: Any = None,
        step_mdp_static: bool = False,
        names: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> None:
        batch_size = kwargs.pop("batch_size", None)
        if batch_size is not None and shape is not None:
            raise TypeError("Cannot specify both batch_size and shape.")
        if len(args) > 1:
            raise RuntimeError("Got multiple arguments, when at most one is expected for Composite.")
        given = args[0] if args else {}
        if not isinstance(given, (Mapping, Composite)):
            raise RuntimeError(f"Expected a dictionary of specs, but got an argument of type {type(given)}.")
        self._specs: Entries = {}
        size = shape if shape is not None else batch_size if batch_size is not None else ()
        TensorSpec.__init__(self, size, None, device, None, "composite")
        self._names: list[str | None] | None = None
        self.data_cls, self.step_mdp_static = data_cls, step_mdp_static
        for key, spec in (*given.items(), *kwargs.items()):
            self[key] = spec
        if names is not None:
            self.names = list(names)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The leading dims of all specs in it."""
        return self._shape

    @shape.setter
    def shape(self, value: Sequence[int]) -> None:
        self._check_unlocked()
        size = as_size(value)
        for key, spec in self.entries():
            if spec is None or spec.shape[: len(size)] == size:
                continue
            if not isinstance(spec, Composite):
                raise ValueError(
                    f"The shape of the spec and the Composite mismatch during shape resetting: the "
                    f"{len(size)} first dimensions should match but got self['{key}'].shape={spec.shape} and "
                    f"Composite.shape={size}."
                )
            spec.shape = size
        self._shape = size

    batch_size = shape

    @property
    def device(self) -> torch.device | None:
        """Device of all specs in it; None lets each spec have its own."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str | int | None) -> None:
        self._check_unlocked()
        if device is None:
            if self._device is not None:
                raise RuntimeError("To erase the device of a composite spec, call spec.clear_device_().")
            return
        moved = self.to(as_device(device))
        self._specs, self._device = moved._specs, moved._device

    def clear_device_(self) -> Self:
        """Remove the device: each spec keeps its own, and the device of TensorDicts is no longer checked."""
        self._device = None
        for _, spec in self.entries():
            if isinstance(spec, Composite):
                spec.clear_device_()
        return self

    @property
    def names(self) -> list[str | None]:
        """Names of the dims; None for unnamed dims."""
        return [None] * len(self.shape) if self._names is None else list(self._names)

    @names.setter
    def names(self, value: Sequence[str | None] | None) -> None:
        if value is not None and len(value) != len(self.shape):
            raise ValueError(f"Expected {len(self.shape)} names, but got {len(value)} names: {value}")
        self._names = None if value is None else list(value)
        for _, spec in self.entries():
            if value is not None and isinstance(spec, Composite) and len(spec.shape) >= len(value):
                spec.names = [*value, *[None] * (len(spec.shape) - len(value))]

    def refine_names(self, *names: Any) -> Self:
        """Name dims that have no name yet, and return the spec.

        Args:
            names: One name per dim. None keeps the current name; `...` fills the missing positions with None.

        Raises:
            RuntimeError: A dim has another name.
        """
        wanted = list(names)
        if Ellipsis in wanted:
            place = wanted.index(Ellipsis)
            wanted[place : place + 1] = [None] * (len(self.shape) - len(wanted) + 1)
        if len(wanted) != len(self.shape) or any(
            old is not None and new not in (None, old) for old, new in zip(self.names, wanted, strict=True)
        ):
            raise RuntimeError(f"refine_names: cannot coerce Composite names {self.names} with {names}.")
        self.names = [old or new for old, new in zip(self.names, wanted, strict=True)]
        return self

    # -- what is in it -----------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[str, TensorSpec | None]]:
        """Yield keys and specs of the first level, in the order in which they were set."""
        yield from tuple(self._specs.items())

    def _branches(self) -> Iterator[Composite]:
        return (spec for _, spec in self.entries() if isinstance(spec, Composite))

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> KeysView:
        """Return the keys, like TensorDict.keys.

        Args:
            include_nested: Whether to include the keys of nested composites, before the composites' own keys.
            leaves_only: Whether to leave out the keys of composites.
            is_leaf: Function that returns whether a class of specs is a leaf. By default all classes but
                composites are leaves.
            step_mdp_static_only: Whether to treat composites that `step_mdp` keeps unchanged as leaves.
        """
        return KeysView(self, include_nested, leaves_only, is_leaf, step_mdp_static_only)

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> ItemsView:
        """Return keys and specs; for the arguments see `keys`."""
        return ItemsView(self, include_nested, leaves_only, is_leaf, step_mdp_static_only)

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> ValuesView:
        """Return the specs; for the arguments see `keys`."""
        return ValuesView(self, include_nested, leaves_only, is_leaf, step_mdp_static_only)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.entries())

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, key: object) -> bool:
        return key in self.keys(include_nested=True)

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether it has no entries; with `recurse`, whether it has no leaves at any depth."""
        if not recurse:
            return not self._specs
        specs = [spec for _, spec in self.entries() if spec is not None]
        return all(isinstance(spec, Composite) and spec.is_empty(recurse=True) for spec in specs)

    def __getitem__(self, key: Any) -> Any:
        """Return the spec of a key; for an index, the composite of that part of the batch."""
        if isinstance(key, str) or (isinstance(key, tuple) and key and _is_key(key)):
            return self._entry(to_key(key))
        return super().__getitem__(key)

    def _entry(self, key: tuple[str, ...]) -> TensorSpec | None:
        name, *rest = key
        if name in _RESERVED:
            raise AttributeError(f"Composite has no key {name}")
        if name not in self._specs:
            raise KeyError(f"no spec {name!r}; there are {', '.join(map(repr, self._specs)) or 'none'}")
        spec = self._specs[name]
        if rest and not isinstance(spec, Composite):
            raise KeyError(f"{name!r} is not a composite: it has no {rest[0]!r}")
        return cast("Composite", spec)._entry(tuple(rest)) if rest else spec

    def get(self, item: NestedKey, default: Any = None) -> Any:
        """Return the spec of the key `item`, or `default` if the key is missing."""
        try:
            return self[item]
        except KeyError:
            return default

    def set(self, name: NestedKey, spec: TensorSpec | None) -> Self:
        """Set the spec of the key `name`, and return the composite.

        Missing batch dims of composites are added. Missing composites along the key are created. A spec of
        TorchRL is converted.

        Raises:
            TypeError: The value is not a spec.
            RuntimeError: The composite is locked, or the spec is on another device.
            ValueError: The leading dims of the spec differ.
        """
        first, *rest = to_key(name)
        if not rest:
            self._set(first, spec)
            return self
        inner = self._specs.get(first)
        if not isinstance(inner, Composite):
            inner = Composite(shape=self.shape, device=self._device)
            self._set(first, inner)
        inner.set(tuple(rest), spec)
        return self

    def _set(self, name: str, spec: Any) -> None:
        self._check_unlocked()
        spec = _as_spec(name, spec)
        if name in _RESERVED:
            raise AttributeError(f"Composite[{name}] cannot be set")
        if spec is not None and self._device is not None and spec.device != self._device:
            if spec.device is not None:
                raise RuntimeError(
                    f"Setting a new attribute ({name}) with spec type {type(spec).__name__} on another "
                    f"device ({spec.device} against {self._device}). All devices of Composite must match."
                )
            spec = spec.to(self._device)
        ndim = len(self.shape)
        if spec is not None and spec.shape[:ndim] != self.shape:
            short = len(spec.shape) < ndim and self.shape[: len(spec.shape)] == spec.shape
            if not (short and (isinstance(spec, Composite) or spec.dtype is None)):
                raise ValueError(
                    f"The shapes of the spec {type(spec).__name__} and the {type(self).__name__} mismatch: "
                    f"the first {ndim} dimensions should match but got spec.shape={spec.shape} and "
                    f"Composite.shape={self.shape}."
                )
            spec = self._lengthen(spec)
        self._specs[name] = spec

    def _lengthen(self, spec: TensorSpec) -> TensorSpec:
        """Return a composite, or a spec without tensors, with all batch dims of this composite."""
        if not isinstance(spec, Composite):
            return spec.expand(self.shape)
        spec = spec.clone()
        spec.shape = self.shape
        return spec

    def __setitem__(self, key: NestedKey, value: Any) -> None:
        if not _is_key(key):
            raise TypeError(f"Got key of type {type(key)} when a string was expected.")
        if isinstance(value, Mapping):
            value = Composite(value, shape=self.shape, device=self._device)
        self.set(key, value)

    def __delitem__(self, key: NestedKey) -> None:
        *path, name = to_key(key)
        inner = self._entry(tuple(path)) if path else self
        if not isinstance(inner, Composite) or name not in inner._specs:
            raise KeyError(f"no spec {key!r}")
        inner._check_unlocked()
        del inner._specs[name]

    def pop(self, key: NestedKey, default: Any = _MISSING) -> Any:
        """Remove a spec and return it; return `default` if the key is missing.

        Raises:
            KeyError: The key is missing, and no `default` was given.
        """
        found = self.get(key, _MISSING)
        if found is not _MISSING:
            del self[key]
            return found
        if default is _MISSING:
            raise KeyError(f"{key} not found in composite spec.")
        return default

    def separates(self, *keys: NestedKey, default: Any = None) -> Composite | None:
        """Remove specs and return a composite of them; None if none of the keys exists."""
        taken = {to_key(key): spec for key in keys if (spec := self.pop(key, default)) is not None}
        return Composite(taken, shape=self.shape, device=self._device) if taken else None

    def update(self, specs: Mapping[Any, Any] | Composite) -> Self:
        """Set all specs of a dict or a composite, merging nested composites; return the composite."""
        for key, spec in specs.items():
            own = self.get(key)
            if not isinstance(spec, Mapping):
                spec = _as_spec(key, spec)
            if isinstance(own, Composite) and isinstance(spec, (Mapping, Composite)):
                own.update(spec)
                continue
            if isinstance(spec, TensorSpec) and self._device is not None:
                spec = spec.to(self._device)
            self[key] = spec
        return self

    def empty(self) -> Self:
        """Return a composite without entries."""
        made = self._with(lambda spec: None, self.shape, self._names)
        made._specs = {}
        return made

    # -- values ------------------------------------------------------------------------------------

    def _combine(
        self, shape: Sequence[int] | int | None, make: Callable[[TensorSpec], Any]
    ) -> TensorDictBase:
        lead = as_size(() if shape is None else shape)
        values = {key: make(spec) for key, spec in self.entries() if spec is not None}
        names = None if self._names is None else [*[None] * len(lead), *self._names]
        return self._gather(values, lead + safe(self.shape), names)

    def _gather(
        self, values: dict[str, Any], size: Sequence[int], names: Sequence[str | None] | None = None
    ) -> TensorDictBase:
        if self.data_cls is not None:
            made: TensorDictBase = self.data_cls.from_dict(values, batch_size=size, device=self._device)
            return made
        return TensorDict(values, batch_size=torch.Size(size), device=self._device, names=names)

    def rand_update(self, val: TensorDictBase) -> TensorDictBase:
        """Put random values into the TensorDict `val`, of its batch size, and return it."""
        return val.update(self.rand())

    def zeros_update(self, val: TensorDictBase) -> TensorDictBase:
        """Put zeros into the TensorDict `val`, of its batch size, and return it."""
        return val.update(self.zero())

    def ones_update(self, val: TensorDictBase) -> TensorDictBase:
        """Put ones into the TensorDict `val`, of its batch size, and return it."""
        return val.update(self.one())

    def is_in(self, val: Any) -> bool:
        """Return whether a TensorDict or dict has a valid value for each spec; more keys are allowed."""
        if not hasattr(val, "get") or (self.data_cls is not None and type(val) is not self.data_cls):
            return False
        for key, spec in self.entries():
            if spec is None or (isinstance(spec, Composite) and spec.is_empty()):
                continue
            value = val.get(key, None)
            if value is None or not spec.is_in(value):
                return False
        return True

    def project(self, val: Any, *, generator: torch.Generator | None = None) -> Any:
        """Replace each invalid value by a valid one, in place; return the TensorDict.

        Args:
            val: The TensorDict. It needs every key that has a spec.
            generator: Random generator, used if a mask hides a value and a new one is drawn.

        Raises:
            KeyError: A key is missing; nothing was changed.
            TypeError: `val` has no keys.
        """
        return self._project(val, generator)

    def _project(self, val: Any, generator: torch.Generator | None = None) -> Any:
        _check_keyed(val, "project")
        missing = [key for key, spec in self.entries() if spec is not None and val.get(key, None) is None]
        if missing:
            raise KeyError(
                f"Composite.project needs a value for each key that has a spec; {missing} are missing: "
                f"the keys are {list(val.keys())}"
            )
        for key, spec in self.entries():
            if spec is not None and not spec.is_in(val.get(key)):
                found = spec.project(val.get(key), generator=generator)
                val.update({key: found}) if isinstance(val, dict) else val.set(key, found)
        return val

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return a value of an environment, for instance a dict, as a TensorDict of tensors.

        Args:
            val: Key -> value. Every key must have a spec.
            ignore_device: Leave tensors on their devices.

        Raises:
            KeyError: A key has no spec.
            TypeError: `val` has no keys.
            RuntimeError: A value is None, or cannot be converted to a value of its spec.
        """
        _check_keyed(val, "encode")
        made: dict[str, Any] = {}
        for key, value in val.items():
            if value is None:
                raise RuntimeError("Composite.encode cannot be used with missing values.")
            if key not in self._specs:
                raise KeyError(f"The Composite instance with keys {self.keys()} does not have a '{key}' key.")
            spec = self._specs[key]
            if spec is None:
                raise KeyError(f"{key!r} has no spec to encode it by")
            try:
                made[key] = spec.encode(value, ignore_device=ignore_device)
            except RuntimeError as exc:
                raise RuntimeError(f"Encoding key {key} raised a RuntimeError: {exc}") from exc
        if self.data_cls is None and is_tensor_collection(val):
            return val.empty().update(made)
        return self._gather(made, safe(self.shape))

    def to_numpy(self, val: Any, safe: bool | None = None) -> dict[str, Any]:
        """Return a TensorDict as a dict of arrays, nested in the same way.

        Args:
            val: The TensorDict.
            safe: Raise an AssertionError if a value is not in its spec; None: use the default of each spec.
        """
        return {key: self[key].to_numpy(value, safe) for key, value in val.items()}

    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError if a value has another dtype than its spec; `key` selects the keys to check."""
        if isinstance(value, torch.Tensor) and isinstance(key, str):
            value, key = {key: value}, [key]
        for name, spec in self.entries():
            if spec is not None and (key is None or name in key):
                spec.type_check(value[name], name)

    def cardinality(self) -> Any:
        """Return the number of TensorDicts in the spec; 0 if there are no entries."""
        counts = [spec.cardinality() for _, spec in self.entries() if spec is not None]
        return math.prod(counts) if counts else 0

    def enumerate(self, use_mask: bool = False) -> TensorDictBase:
        """Return all TensorDicts in the spec, stacked along a new first dim.

        All positions of the batch are equal; the last key changes fastest. Batch size `[n, *self.shape]`,
        where n is the number of combinations.
        """
        one: Composite = self[(0,) * len(self.shape)] if self.shape else self
        found = {key: spec.enumerate(use_mask) for key, spec in one.entries() if spec is not None}
        if not found:
            return self._gather({}, self.shape)
        grids = torch.meshgrid(*(torch.arange(len(part)) for part in found.values()), indexing="ij")
        chosen = zip(found.items(), grids, strict=True)
        picked = {key: part[grid.reshape(-1)] for (key, part), grid in chosen}
        count = grids[0].numel()
        made = self._gather(picked, (count,))
        return made.reshape(count, *[1] * len(self.shape)).expand(count, *self.shape) if self.shape else made

    # -- locks -------------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether entries can neither be set nor removed."""
        return self._is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    @property
    def locked(self) -> bool:
        """The same as `is_locked`."""
        return self._is_locked

    def lock_(self, recurse: bool | None = None) -> Self:
        """Refuse changes from now on.

        Args:
            recurse: Whether to lock nested composites too; None means yes.
        """
        if not self._is_locked:
            self._lock((), recurse is not False)
        return self

    def _lock(self, lockers: tuple[weakref.ref[Composite], ...], recurse: bool) -> None:
        self._is_locked = True
        self._lockers = (*self._lockers, *(ref for ref in lockers if ref not in self._lockers))
        if recurse:
            for branch in self._branches():
                branch._lock((*lockers, weakref.ref(self)), recurse)

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow changes again.

        Args:
            recurse: Whether to unlock nested composites too; None means yes.

        Raises:
            RuntimeError: The composite was locked by a parent that is still locked; nothing has changed.
        """
        below: list[Composite] = list(self._iterate_below()) if recurse is not False else []
        tree: list[Composite] = [self, *below]
        for one in tree:
            one._check_unlock(tree)
        for one in tree:
            one._is_locked, one._lockers = False, ()
        return self

    def _check_unlock(self, tree: Sequence[Composite] = ()) -> None:
        """Raise a RuntimeError if a composite outside of `tree` that locked this one is locked."""
        above = [locker for ref in self._lockers if (locker := ref()) is not None and locker._is_locked]
        if any(all(locker is not freed for freed in tree) for locker in above):
            raise RuntimeError(
                "Cannot unlock a Composite that is part of a locked graph: unlock the one above it, with "
                "which it was locked"
            )

    # TorchRL's composites call these two, and `_check_unlock`, to lock and unlock the composites in them.

    def _propagate_lock(
        self,
        *,
        recurse: bool,
        lock_parents_weakrefs: Sequence[weakref.ref[Composite]],
        is_compiling: bool,
    ) -> None:
        self._lock(tuple(lock_parents_weakrefs), recurse)

    def _propagate_unlock(self, recurse: bool) -> list[Composite]:
        below: list[Composite] = list(self._iterate_below()) if recurse else []
        for one in (self, *below):
            one._is_locked = False
        return below

    def _iterate_below(self) -> Iterator[Composite]:
        for branch in self._branches():
            yield branch
            yield from branch._iterate_below()

    def _check_unlocked(self) -> None:
        if self._is_locked:
            raise RuntimeError("Cannot modify a locked Composite.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without references to the composites that locked this one."""
        return {name: value for name, value in self.__dict__.items() if name != "_lockers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state from `__getstate__`; a locked composite locks its children."""
        self.__dict__.update(state)
        if self._is_locked:
            for branch in self._branches():
                if branch._is_locked:
                    branch._lock((weakref.ref(self),), recurse=False)

    # -- other shapes, places, copies --------------------------------------------------------------

    def _with(
        self,
        act: Callable[[Any], Any],
        shape: Sequence[int],
        names: Sequence[str | None] | None,
        device: torch.device | None = None,
    ) -> Self:
        """Return a composite with `act` applied to each spec, and another shape or device."""
        made = type(self)(
            {key: None if spec is None else act(spec) for key, spec in self.entries()},
            shape=shape,
            device=device or self._device,
            data_cls=self.data_cls,
            step_mdp_static=self.step_mdp_static,
        )
        made._names = None if names is None or not any(names) else list(names)
        return made

    def _change(self, name: str, *args: Any) -> Self:
        move = PLANS[name](self.shape, *args)
        if move is None:
            return self
        old, dims = self._names, move.dims
        names = None if old is None or dims is None else [None if n is None else old[n] for n in dims]
        return self._with(move.deep, move.shape(self.shape), names)

    def to(self, dest: torch.dtype | torch.device | str | int | None) -> Self:
        """Return a composite on another device or with another dtype; the same object if nothing changes.

        Raises:
            ValueError: `dest` is neither a device nor a dtype.
        """
        if dest is None:
            return self
        if isinstance(dest, torch.dtype):
            return self._with(lambda spec: spec.to(dest), self.shape, self._names)
        if not isinstance(dest, (str, int, torch.device)):
            raise ValueError("Only device/dtype casting is allowed with specs of type Composite.")
        device = as_device(dest)
        if self._device == device:
            return self
        return self._with(lambda spec: spec.to(device), self.shape, self._names, device)

    def clone(self) -> Self:
        """Return an unlocked copy."""
        return self._with(lambda spec: spec.clone(), self.shape, self._names)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Composite)
            and type(self) is type(other)
            and (self.shape, self._device, self.data_cls) == (other.shape, other._device, other.data_cls)
            and self._specs == other._specs
        )

    def __repr__(self) -> str:
        last = [f"device={self._device}", f"shape={self.shape}", f"data_cls={self.data_cls}"]
        if not self._specs:
            return f"{type(self).__name__}({', '.join(last)})"
        lines = [*(f"{key}: {spec}" for key, spec in self.entries()), *last]
        return f"{type(self).__name__}(\n" + indent(",\n".join(lines), " " * 4) + ")"


@dataclass(frozen=True, eq=False, repr=False)
class _View(Generic[_Item]):
    """Show a composite's entries, in the order in which they were set. Always shows the current entries.

    Args:
        composite: The composite.
        include_nested: Whether to include entries of nested composites, before the composites themselves.
        leaves_only: Whether to leave out entries that are not leaves.
        is_leaf: Function that returns whether a class of specs is a leaf. By default all classes but
            composites are leaves.
        step_mdp_static_only: Whether to treat composites that `step_mdp` keeps unchanged as leaves.
    """

    composite: Composite
    include_nested: bool
    leaves_only: bool
    is_leaf: Callable[[type], bool] | None
    step_mdp_static_only: bool
    #: The name of the entries in the description.
    _label: ClassVar[str]

    @abstractmethod
    def __iter__(self) -> Iterator[_Item]: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._label}={list(self)})"

    def _pairs(self) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        if not (self.step_mdp_static_only and self.composite.step_mdp_static):
            yield from self._walk(self.composite, ())

    def _walk(
        self, composite: Composite, path: tuple[str, ...]
    ) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        for name, spec in composite.entries():
            key = (*path, name)
            static = self.step_mdp_static_only and isinstance(spec, Composite) and spec.step_mdp_static
            if self.include_nested and isinstance(spec, Composite) and not static:
                yield from self._walk(spec, key)
            leaf = self.is_leaf(type(spec)) if self.is_leaf else not isinstance(spec, Composite)
            if leaf or static or not self.leaves_only:
                yield (key if path else name), spec

    def __len__(self) -> int:
        return sum(1 for _ in self._pairs())


class KeysView(_View[NestedKey]):
    """Show a composite's keys: strings, and tuples for nested keys."""

    _label = "keys"

    def __iter__(self) -> Iterator[NestedKey]:
        return (key for key, _ in self._pairs())

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, (str, tuple)):
            return False
        wanted = to_key(key)
        return any(to_key(found) == wanted for found in self)


class ValuesView(_View[TensorSpec | None]):
    """Show a composite's specs."""

    _label = "values"

    def __iter__(self) -> Iterator[TensorSpec | None]:
        return (spec for _, spec in self._pairs())


class ItemsView(_View[tuple[NestedKey, TensorSpec | None]]):
    """Show a composite's keys and specs."""

    _label = "items"

    def __iter__(self) -> Iterator[tuple[NestedKey, TensorSpec | None]]:
        return self._pairs()

    def __contains__(self, item: object) -> bool:
        return any(pair == item for pair in self)


def _as_spec(key: NestedKey, value: Any) -> TensorSpec | None:
    """Return a value that a key is set to, one of TorchRL's specs as one of ours."""
    if value is None or isinstance(value, TensorSpec):
        return value
    if not hasattr(value, "is_in"):
        raise TypeError(f"{key!r} is set to a {type(value).__name__}; give a spec, a dict of specs, or None")
    from expstore.specs.torchrl_specs import from_torchrl

    found: TensorSpec = from_torchrl(value)
    return found


def _is_key(key: object) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(part, str) for part in key))


def _check_keyed(val: Any, what: str) -> None:
    """Raise TypeError if a value has no keys."""
    if not hasattr(val, "get"):
        raise TypeError(f"Composite.{what} takes a TensorDict or a dict; got a {type(val).__name__}")
