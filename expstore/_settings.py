"""Groups of settings of `expstore.open`.

Each group checks its values when it is created, so a wrong setting is refused before a folder is touched.
Nothing here opens or reads a store.
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
from expstore.schema.ragged_fields import RaggedForm
from expstore.storages.engine.open_settings import COMPRESSIONS, STORAGES
from expstore.storages.format.layout import LAYOUTS, ColumnLayout, LayoutName, ask_layout

if TYPE_CHECKING:
    import torch

    from expstore.buffers.sample_units import SampleUnit
    from expstore.rate_limiters import RateLimiter

FieldKey = str | tuple[str, ...]
Kind = Literal["zarr", "arrow"]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a store lays out its fields on disk.

    `expstore.open` also accepts one word: "zarr" and "arrow" set `kind`; "auto", "packed" and "flat" set
    `columns`. A setting that you leave out keeps its stored value. The layout of a store never changes.

    Args:
        kind: "zarr", the default of new stores, stores fields of a fixed size. "arrow" also stores strings,
            lists, structs, None, and tensors whose shapes differ; see `ArrowStorage`.
        columns: Layout of fields of a fixed size. "packed": compressed, in chunks of a few rows, which cannot
            be changed in place. "flat": uncompressed, one row after another; `rb[i] = ...` needs it. "auto",
            the default of new stores: packed if a row of the field has at least 1 KiB, otherwise flat. If the
            writer keeps the best rows, "auto" makes all fields flat.
        compression: Compression of variable-length fields, in a store of kind "arrow". None: no compression.
            "lz4" and "zstd" compress the bytes of each batch, which makes sampling slower.
        fields: Options of single fields, by name or key: "flat", "packed" or "auto", or a dict with `layout`
            and, for packed fields, `rows` per chunk (a power of two; a chunk has at most 16 MiB), `codec`
            ("lz4hc" by default, "lz4", "zstd", "zlib", "lz4hc-shuffle" and "zstd-shuffle" for floats, "gzip")
            and `share_next`.
        share_next: Whether a row of a packed field is stored only once if an earlier row has the same bytes
            at `("next", name)`. None: the stored value; True for new stores.

    Raises:
        SchemaError: There is no such kind, layout, codec, compression or option, or an option has no effect.

    Example:
        >>> frames = expstore.Layout(columns="packed", fields={"action": "flat"})
        >>> rb = expstore.open("frames.exp", layout=frames)
    """

    kind: Kind | None = None
    columns: LayoutName | None = None
    compression: Literal["lz4", "zstd"] | None = None
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
        """Convert a `Layout`, one word, a dict of its parts, or None (sets nothing) to a `Layout`.

        Raises:
            SchemaError: There is no such word or layout.
            ArgumentError: The dict has a part that a `Layout` does not have; the value has another type.
        """
        if isinstance(given, str):
            if given not in (*STORAGES, *LAYOUTS):
                raise SchemaError(
                    f"layout={given!r} is unknown",
                    hint=f"use {', '.join(map(repr, (*STORAGES, *LAYOUTS)))}, or a Layout",
                )
            return cls(kind=given) if given in STORAGES else cls(columns=given)  # type: ignore[arg-type]
        return read_value("layout", cls, given)

    def to_column_layout(self) -> ColumnLayout | None:
        """Return the layout to request from the storage; None if no setting was given."""
        return ask_layout(self.columns, cast(Any, self.fields) or None, self.share_next)


@dataclass(frozen=True, kw_only=True)
class Durability:
    """What written rows survive, when stores are flushed early, and when a write is refused.

    `expstore.open` also accepts "process" for `Durability()`, and "sync" for `Durability(sync=True)`. The
    settings are not stored; they apply until the store is closed.

    Args:
        sync: What rows survive once `extend` or `add` has returned. False: the end of the process at once,
            and a power failure after the next sync (about one second later, or at `flush`). True: a power
            failure at once, for one fsync per call (several above 1 MiB). Either way `rb[i] = ...` and
            `empty` survive a power failure at once, and priorities, draws and counts after a `flush`.
        min_free_bytes: Free space, in bytes, that must remain on the disk. An `extend` that would leave less
            is refused before it writes anything. Rows that replace older ones need no space. The free space
            is measured about once a second.
        on_sigterm: "flush": if the program has no handler of its own for SIGTERM, its stores are flushed
            before the signal ends it. "ignore": expstore installs no handler.

    Raises:
        ArgumentError: A setting has the wrong type; `min_free_bytes` is negative, or `on_sigterm` is unknown.

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
            raise ArgumentError(f"on_sigterm={self.on_sigterm!r} is unknown; use 'flush' or 'ignore'")

    @classmethod
    def of(cls, given: Durability | str | Mapping[str, Any] | None) -> Durability:
        """Convert a `Durability`, one word, a dict of its parts, or None (the default) to a `Durability`.

        Raises:
            ArgumentError: There is no such word, or a part has an invalid value; the dict has a part that a
                `Durability` does not have; the value has another type.
        """
        if isinstance(given, str):
            if given not in ("process", "sync"):
                raise ArgumentError(f"durability={given!r} is unknown; use 'process', 'sync' or a Durability")
            return cls(sync=given == "sync")
        return read_value("durability", cls, given)


@dataclass(frozen=True, kw_only=True)
class EpisodeKeys:
    """Which fields say which episode a row belongs to, whether it ends the episode, and its reward.

    `expstore.open` also accepts a dict of these settings. A setting that you leave out keeps its stored
    value; a new store finds the field by TorchRL's names.

    Args:
        traj: Field with the collector's trajectory ids, one integer per row.
        done: List of the fields that end an episode. The last part of a name says how the episode ends:
            `terminated`, `truncated`, or any other name. If rows have `terminated`, an episode that ends
            without it counts as truncated.
        reward: Field whose sum is an episode's return; ("next", "reward") by default. It may have several
            values per row, one per agent: `("next", "agents", "reward")`. Without such a field the return is
            NULL.
        reward_reduce: How several rewards of a row are reduced to one: "sum" (the default), "mean", "min" or
            "max".
        done_reduce: Whether a row with several flags ends its episode if "any" of them is set (the default),
            or only if "all" are.
        group: Field with one integer or text per row, or name of a fact of episodes (`episode_info`). The
            episodes whose first rows have the same value are a group; see `rb.groups`.
        group_size: How many episodes make a group complete; by default a group completes when it is closed.

    Raises:
        ArgumentError: A key is neither a name nor a tuple of names; `done` is not a list, a reduction is
            unknown, or `group_size` is not a whole number of at least 1.

    Example:
        >>> keys = expstore.EpisodeKeys(traj="robot", done=[("next", "fell"), ("next", "truncated")])
        >>> rb = expstore.open("robots.exp", episodes=keys)
    """

    traj: FieldKey | None = None
    done: Sequence[FieldKey] | None = None
    reward: FieldKey | None = None
    reward_reduce: Literal["sum", "mean", "min", "max"] | None = None
    done_reduce: Literal["any", "all"] | None = None
    group: FieldKey | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("traj", "reward", "group"):
            if (key := getattr(self, name)) is not None:
                check_key(name, key)
        if self.done is not None:
            if not isinstance(self.done, list | tuple):
                raise ArgumentError(f"done must be a list of keys, got {self.done!r}; for one key, use [key]")
            for key in self.done:
                check_key("each key of done", key)
            object.__setattr__(self, "done", tuple(self.done))
        for name, known in (("reward_reduce", REWARD_REDUCTIONS), ("done_reduce", DONE_REDUCTIONS)):
            if (value := getattr(self, name)) not in (None, *known):
                raise ArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.group_size is not None and check_count("group_size", self.group_size) < 1:
            raise ArgumentError("group_size must be at least 1, got 0")
        if self.group_size is not None and self.group is None:
            raise ArgumentError(f"group_size={self.group_size} needs group", hint="name the field or fact")

    @classmethod
    def of(cls, given: EpisodeKeys | Mapping[str, Any] | None) -> EpisodeKeys:
        """Convert an `EpisodeKeys`, a dict of its parts, or None (sets nothing) to an `EpisodeKeys`.

        Raises:
            ArgumentError: The dict has a part that `EpisodeKeys` do not have; the value has another type.
        """
        return read_value("episodes", cls, given)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How batches are drawn, rate-limited, converted and returned.

    `expstore.open` also accepts a dict of these settings. They are not stored, and mean the same as the
    keywords of `ReplayBuffer`.

    Args:
        as_numpy: Whether `sample` and iteration return nested dicts of NumPy arrays instead of TensorDicts;
            `sample(as_numpy=...)` overrides it for one batch. The arrays are in host memory, whatever the
            device.
        device: Device of the returned TensorDicts; None: host memory.
        pin_memory: Whether tensors are returned in pinned memory. With a `device` they are copied there
            without waiting.
        prefetch: Number of batches that a background thread prepares ahead of the calls.
        transform: A callable that changes sampled batches, or a TorchRL transform, which may also change
            written rows.
        sample_unit: What a sampled row is extended to: None for the row alone, or a `Sequence` of steps
            around it.
        generator: Random generator of all draws; None: draws follow from the store's seed.
        rate_limiter: How many rows may be sampled for each row that is written: a `MinSize` or a
            `SampleToInsertRatio`. `sample`, `extend` and `add` wait until it permits them.
        ragged: How drawn batches have tensors that differ in their first dim, after the transforms. "jagged":
            nested tensors of torch, or arrays of objects. "padded": dense tensors with zeros, and with a
            field `x` the entries `x_lengths` and `x_mask`. "packed": the values of all rows in one tensor,
            and with it `x_cu_seqlens` and `x_position_ids`; the batch size is then `[]`. Rows that are read
            by index stay jagged.
        batch_tokens: Largest number of tokens of a drawn batch. It has as many whole rows of the draw as fit,
            at least one; the next batches have the others. Only for samplers that lose no row by it:
            `SamplerWithoutReplacement` and `ConsumingSampler`, also those of consumers. A row that replaces
            one that is overwritten while a batch is read may be longer than it. None: any number.
        tokens_key: The field whose lengths `batch_tokens` counts; None: the first one of such tensors.

    Raises:
        ArgumentError: A setting has the wrong type; `prefetch` is negative, `ragged` is unknown,
            `batch_tokens` is below 1 or combined with `sample_unit`, or `tokens_key` is alone.

    Example:
        >>> with expstore.open("run.exp", batch_size=32, batches=expstore.Batches(as_numpy=True)) as rb:
        ...     index = rb.extend(batch)
        ...     rb.sample()["observation"].dtype
        dtype('float32')
    """

    as_numpy: bool = False
    device: torch.device | str | None = None
    pin_memory: bool = False
    prefetch: int = 0
    transform: Any = None
    sample_unit: SampleUnit | None = None
    generator: torch.Generator | None = None
    rate_limiter: RateLimiter | None = None
    ragged: RaggedForm = "jagged"
    batch_tokens: int | None = None
    tokens_key: FieldKey | None = None

    def __post_init__(self) -> None:
        from expstore.buffers.arguments import check_ragged  # loads torch

        check_bool("as_numpy", self.as_numpy)
        check_ragged(self.ragged, self.batch_tokens, self.tokens_key, self.sample_unit)
        check_bool("pin_memory", self.pin_memory)
        object.__setattr__(self, "prefetch", check_count("prefetch", self.prefetch))
        if self.generator is not None:
            import torch

            if not isinstance(self.generator, torch.Generator):
                raise ArgumentError(f"generator must be a torch.Generator, got {self.generator!r}")

    @classmethod
    def of(cls, given: Batches | Mapping[str, Any] | None) -> Batches:
        """Convert a `Batches`, a dict of its parts, or None (the defaults) to a `Batches`.

        Raises:
            ArgumentError: The dict has a part that a `Batches` does not have; the value has another type.
        """
        return read_value("batches", cls, given)


def read_value(name: str, kind: type[Value], given: Value | Mapping[str, Any] | None) -> Value:
    """Convert an instance, a dict of its parts, or None (the defaults) to a group of settings.

    Raises:
        ArgumentError: The argument has another type; the group has no such part.
    """
    if isinstance(given, kind):
        return given
    known = [part.name for part in fields(kind)]  # type: ignore[arg-type]
    if given is None:
        return kind()
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{name} takes {kind.__name__}(...) or a dict of its parts, got {given!r}")
    for part in given:
        if part not in known:
            raise ArgumentError(
                f"{name} has no part {part!r}", hint=suggest(str(part), known, f"{kind.__name__} has")
            )
    return kind(**given)


def check_word(name: str, given: Any, known: Sequence[str]) -> None:
    """Raise SchemaError if a word is neither None nor one of `known`."""
    if given is not None and given not in known:
        raise SchemaError(f"{name}={given!r} is unknown", hint=f"use {', '.join(map(repr, known))}")


def check_bool(name: str, given: Any) -> None:
    """Raise TypeError if a value is neither True nor False."""
    if not isinstance(given, bool):
        raise ArgumentError(f"{name} must be True or False, got {given!r}")


def check_count(name: str, given: Any) -> int:
    """Return a whole number that is at least 0.

    Raises:
        ArgumentError: The value is not a whole number; the value is negative.
    """
    try:
        count = operator.index(given)
    except TypeError:
        raise ArgumentError(f"{name} must be a whole number, got {given!r}") from None
    if count < 0:
        raise ArgumentError(f"{name} must be at least 0, got {given}")
    return count
