"""The values that `expstore.open` takes for settings that belong together.

Each value checks itself when it is made, so that a wrong setting is refused before a folder is touched. None
of them opens or reads anything.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from expstore.core.nearest import suggest
from expstore.core.values import check_key
from expstore.errors import ArgumentError, SchemaError
from expstore.schema.field_roles import DONE_REDUCTIONS, REWARD_REDUCTIONS
from expstore.storages.engine.open_settings import COMPRESSIONS, STORAGES
from expstore.storages.format.layout import LAYOUTS, ColumnLayout, LayoutName, ask_layout

if TYPE_CHECKING:
    import torch

    from expstore.buffers.sample_units import SampleUnit
    from expstore.core.rate_limiters import RateLimiter

__all__ = ["Batches", "Durability", "EpisodeKeys", "Layout"]

FieldKey = str | tuple[str, ...]
Kind = Literal["zarr", "arrow"]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a store keeps its fields on disk.

    `expstore.open` also accepts one word: "zarr" and "arrow" are read as `kind`, and "auto", "packed" and
    "flat" as `columns`. A setting that is left out is taken as stored. The layout of a store never changes.

    Args:
        kind: "zarr", the default of new stores, keeps rows whose fields have a fixed size. "arrow" also keeps
            strings, lists, structs, None, and tensors whose shapes differ; see `ArrowStorage`.
        columns: How fields of a fixed size are kept. "packed": compressed, in chunks of a few rows that
            cannot be changed in place. "flat": uncompressed, one row after another; `rb[i] = ...` needs it.
            "auto", the default of new stores: packed if a row of the field has at least 1 KiB, otherwise
            flat; a store whose writer keeps the best rows is flat.
        compression: Compression of fields without a fixed size, in a store of kind "arrow". None: none.
            "narrow": each integer takes only as many bytes as the values of its segment need. "lz4" and
            "zstd" also compress the bytes, which makes samples slower.
        fields: Options of single fields, by name or key: "flat", "packed" or "auto", or a dict with `layout`
            and, for packed fields, `rows` per chunk (a power of two, at most 16 MiB in all), `codec` ("lz4hc"
            by default, "lz4", "zstd", "zlib", "lz4hc-shuffle" and "zstd-shuffle" for floats, "gzip") and
            `share_next`.
        share_next: Whether a row of a packed field is stored once if an earlier row has the same bytes at
            `("next", name)`. None: as stored, True for new stores.

    Raises:
        SchemaError: There is no such kind, layout, codec, compression or option, or an option has no effect.

    Example:
        >>> frames = expstore.Layout(columns="packed", fields={"action": "flat"})
        >>> rb = expstore.open("frames.exp", layout=frames)
    """

    kind: Kind | None = None
    columns: LayoutName | None = None
    compression: Literal["narrow", "lz4", "zstd"] | None = None
    fields: Mapping[Any, LayoutName | Mapping[str, Any]] = field(default_factory=dict)
    share_next: bool | None = None

    def __post_init__(self) -> None:
        check_word("kind", self.kind, STORAGES)
        check_word("columns", self.columns, LAYOUTS)
        check_word("compression", self.compression, COMPRESSIONS)
        if self.compression is not None and self.kind == "zarr":
            raise SchemaError(
                f"compression={self.compression!r} is for fields without a fixed size, which a store of kind "
                '"zarr" does not keep',
                hint='leave compression out, or use kind="arrow"; columns="packed" compresses fields of a '
                "fixed size",
            )
        options: Any = self.fields
        if isinstance(options, Mapping):
            options = {key: {"layout": own} if isinstance(own, str) else own for key, own in options.items()}
        asked = ask_layout(self.columns, options, self.share_next)
        object.__setattr__(self, "fields", {} if asked is None else asked.fields)

    @classmethod
    def of(cls, given: Layout | str | Mapping[str, Any] | None) -> Layout:
        """Return a layout, given as one, as one word, as a dict of its parts, or None for nothing."""
        if isinstance(given, str):
            if given not in (*STORAGES, *LAYOUTS):
                raise SchemaError(
                    f"layout={given!r} is unknown",
                    hint=f"use {', '.join(map(repr, (*STORAGES, *LAYOUTS)))}, or a Layout",
                )
            return cls(kind=given) if given in STORAGES else cls(columns=given)  # type: ignore[arg-type]
        return read_value("layout", cls, given)

    def to_column_layout(self) -> ColumnLayout | None:
        """Return what a storage is asked for; None: nothing."""
        return ask_layout(self.columns, cast(Any, self.fields) or None, self.share_next)


@dataclass(frozen=True, kw_only=True)
class Durability:
    """What written rows survive, and when a write is refused or flushed early.

    `expstore.open` also accepts "process" for `Durability()`, and "sync" for `Durability(sync=True)`. The
    settings are not stored: they hold for one opening.

    Args:
        sync: What an `extend` or `add` that returned survives. False: the end of the process at once, and a
            power cut after the next sync (about one second later, or `flush`). True: a power cut at once, for
            one fsync per call (several above 1 MiB). `rb[i] = ...` and `empty` survive a power cut either
            way; priorities, draws and counts need a `flush` either way.
        min_free_bytes: An `extend` that would leave less free space on the disk is refused before it writes
            anything. Rows that replace older ones need no space. The free space is measured about once a
            second.
        on_sigterm: "flush": if the program has no handler of its own for SIGTERM, its stores are flushed
            before the signal ends it. "ignore": signals are left alone.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: `min_free_bytes` is negative, or `on_sigterm` is unknown.

    Example:
        >>> rb = expstore.open("run.exp", durability=expstore.Durability(sync=True, min_free_bytes=10**9))
    """

    sync: bool = False
    min_free_bytes: int = 0
    on_sigterm: Literal["flush", "ignore"] = "flush"

    def __post_init__(self) -> None:
        check_bool("sync", self.sync)
        object.__setattr__(self, "min_free_bytes", check_count("min_free_bytes", self.min_free_bytes))
        if self.on_sigterm not in ("flush", "ignore"):
            raise ValueError(f"on_sigterm={self.on_sigterm!r} is unknown; use 'flush' or 'ignore'")

    @classmethod
    def of(cls, given: Durability | str | Mapping[str, Any] | None) -> Durability:
        """Return a durability, given as one, as one word, as a dict of its parts, or None for the default."""
        if isinstance(given, str):
            if given not in ("process", "sync"):
                raise ValueError(f"durability={given!r} is unknown; use 'process', 'sync' or a Durability")
            return cls(sync=given == "sync")
        return read_value("durability", cls, given)


@dataclass(frozen=True, kw_only=True)
class EpisodeKeys:
    """Which fields say to which episode a row belongs, where the episode ends, and what it returned.

    `expstore.open` also accepts a dict of these settings. A setting that is left out is taken as stored; a
    new store then finds the field by TorchRL's names.

    Args:
        traj: Field with the collector's trajectory ids.
        done: List of the fields that end an episode. The last part of a name says how: `terminated`,
            `truncated`, or any other name. If rows have `terminated`, an end that is not terminated is
            truncated.
        reward: Field that is summed up to an episode's return; ("next", "reward") by default. It may have
            several values per row, one per agent: `("next", "agents", "reward")`. Without such a field an
            episode's return is NULL.
        reward_reduce: How several rewards of a row become one: "sum" (the default), "mean", "min" or "max".
        done_reduce: When a row with several flags ends its episode: if "any" of them is set (the default), or
            if "all" are.

    Raises:
        TypeError: A key is neither a name nor a tuple of names.
        ValueError: `done` is not a list, or a reduction is unknown.

    Example:
        >>> keys = expstore.EpisodeKeys(traj="robot", done=[("next", "fell"), ("next", "truncated")])
        >>> rb = expstore.open("robots.exp", episodes=keys)
    """

    traj: FieldKey | None = None
    done: Sequence[FieldKey] | None = None
    reward: FieldKey | None = None
    reward_reduce: Literal["sum", "mean", "min", "max"] | None = None
    done_reduce: Literal["any", "all"] | None = None

    def __post_init__(self) -> None:
        for name in ("traj", "reward"):
            if (key := getattr(self, name)) is not None:
                check_key(name, key)
        if self.done is not None:
            if not isinstance(self.done, list | tuple):
                raise ValueError(f"done must be a list of keys, got {self.done!r}; for one key, use [key]")
            for key in self.done:
                check_key("each key of done", key)
            object.__setattr__(self, "done", tuple(self.done))
        for name, known in (("reward_reduce", REWARD_REDUCTIONS), ("done_reduce", DONE_REDUCTIONS)):
            if (value := getattr(self, name)) not in (None, *known):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    @classmethod
    def of(cls, given: EpisodeKeys | Mapping[str, Any] | None) -> EpisodeKeys:
        """Return episode keys, given as such, as a dict of their parts, or None for nothing."""
        return read_value("episodes", cls, given)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How batches are drawn, paced, converted and handed out.

    `expstore.open` also accepts a dict of these settings. They hold for one opening and mean what they mean
    for a `ReplayBuffer`.

    Args:
        as_numpy: Whether `sample` and iteration return nested dicts of NumPy arrays instead of TensorDicts;
            `sample(as_numpy=...)` overrides it for one batch. The arrays lie in host memory, whatever the
            device.
        device: Device on which TensorDicts are handed out; None: host memory.
        pin_memory: Whether tensors are handed out in pinned memory; with a `device` they are copied there
            without waiting.
        prefetch: How many batches a thread makes ahead, so that the next call finds its batch ready.
        transform: What is done to a batch on its way out (a callable), or both ways (a TorchRL transform).
        sample_unit: What every sampled row stands for: itself, or a `Sequence` of steps around it.
        generator: Generator that all draws follow from; None: the store's seed.
        rate_limiter: How many rows may be sampled for each row that is written: `MinSize` or
            `SampleToInsertRatio`; `sample`, `extend` and `add` wait until they may proceed.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: `prefetch` is negative.

    Example:
        >>> with expstore.open("run.exp", batch_size=32, batches=expstore.Batches(as_numpy=True)) as rb:
        ...     rb.sample()["observation"]  # a NumPy array
    """

    as_numpy: bool = False
    device: torch.device | str | None = None
    pin_memory: bool = False
    prefetch: int = 0
    transform: Any = None
    sample_unit: SampleUnit | None = None
    generator: torch.Generator | None = None
    rate_limiter: RateLimiter | None = None

    def __post_init__(self) -> None:
        check_bool("as_numpy", self.as_numpy)
        check_bool("pin_memory", self.pin_memory)
        object.__setattr__(self, "prefetch", check_count("prefetch", self.prefetch))
        if self.generator is not None:
            import torch

            if not isinstance(self.generator, torch.Generator):
                raise TypeError(f"generator must be a torch.Generator, got {self.generator!r}")

    @classmethod
    def of(cls, given: Batches | Mapping[str, Any] | None) -> Batches:
        """Return settings of batches, given as such, as a dict of their parts, or None for the defaults."""
        return read_value("batches", cls, given)


def read_value(name: str, kind: type[Value], given: Value | Mapping[str, Any] | None) -> Value:
    """Return a value of a kind, given as one, as a dict of its parts, or None for its defaults.

    Raises:
        TypeError: It is something else.
        ArgumentError: It has no such part.
    """
    if isinstance(given, kind):
        return given
    known = [part.name for part in fields(kind)]  # type: ignore[arg-type]
    if given is None:
        return kind()
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} takes {kind.__name__}(...) or a dict of its parts, got {given!r}")
    for part in given:
        if part not in known:
            raise ArgumentError(
                f"{name} has no part {part!r}", hint=suggest(str(part), known, f"{kind.__name__} has")
            )
    return kind(**given)


def check_word(name: str, given: Any, known: Sequence[str]) -> None:
    """Raise SchemaError for a word that is not known; None is."""
    if given is not None and given not in known:
        raise SchemaError(f"{name}={given!r} is unknown", hint=f"use {', '.join(map(repr, known))}")


def check_bool(name: str, given: Any) -> None:
    """Raise TypeError for what is neither True nor False."""
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}")


def check_count(name: str, given: Any) -> int:
    """Return a whole number from 0 on.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is negative.
    """
    try:
        count = operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {given!r}") from None
    if count < 0:
        raise ValueError(f"{name} must be at least 0, got {given}")
    return count
