"""The interface of data set readers: a `Reader` lists the parts of a source and yields their episodes.

Implemented by the readers of this package, and by users for their own formats. It needs only NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from expstore.core.values import Array, Key, key_name, to_key
from expstore.errors import SchemaError

#: How an episode ends. "cut": the recording stops, but not the environment. "open": the next `Episode` from
#: the reader continues this one.
End = Literal["terminated", "truncated", "cut", "open"]

_ENDS = ("terminated", "truncated", "cut", "open")

#: An array, or nested mappings of names to arrays.
Values = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Describe a part of a source, which is imported under one source name and resumed separately.

    Args:
        name: Unique name within the data set, usually the name of the file.
        files: The files that determine its rows. Their SHA-256 identifies the part.
    """

    name: str
    files: Sequence[Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Hold the steps of one episode, or of a piece of it.

    With T steps, `action` and `reward` have T rows, and `observation` has T + 1: the last one is the
    observation after the last step. If the source does not record that observation, pass T rows;
    `("next", "observation")` of the last step is then 0.

    Args:
        observation: The states. Shapes `(T + 1, *shape)` or `(T, *shape)`. A mapping of names becomes nested
            fields, an empty one no field.
        action: Shape `(T, *shape)`, or a mapping; an empty mapping if the source has no actions.
        reward: Shape `(T,)` or `(T, 1)`. None if the source has no rewards.
        end: How the episode ends. An "open" piece needs T + 1 observations.
        info: More values of the states, stored under `"info"` and `("next", "info")`. Shapes as for
            `observation`.
        states: More values of the states, by key, stored under the key and `("next", key)`. Shapes as for
            `observation`.
        fields: More values of the steps, by key: `"episode"`, `("next", "success")`. Shapes `(T, *shape)`.
        facts: Annotations of the episode, for the column `info` of the relation `episodes`: a seed, a task.
            If an episode has several pieces, those of its first piece are used.
        split: The split of the episode; None: "train".

    Example:
        >>> from expstore.datasets import Episode
        >>> episode = Episode(
        ...     observation=np.zeros((4, 2)), action=np.zeros(3), reward=np.ones(3), end="terminated"
        ... )
        >>> len(episode)
        3
    """

    observation: Values
    action: Values
    reward: Array | None = None
    end: End
    info: Mapping[str, Values] = field(default_factory=dict)
    states: Mapping[str | Key, Values] = field(default_factory=dict)
    fields: Mapping[str | Key, Array] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None

    def __len__(self) -> int:
        """Return the number of steps: the length of `action`, or without actions of the first field."""
        for _, values in _leaves(("action",), self.action):
            return len(values)
        return len(next(iter(self.fields.values()), ()))

    def columns(self) -> dict[Key, Array]:
        """Return the rows in TorchRL's layout (TED), by key.

        At the root: the state before each step, the action, `fields`. Under "next": the state after it,
        `reward` `(T, 1)` float32 (other floats keep their dtype), and `done`, `terminated`, `truncated`
        `(T, 1)` bool. The flags at the root are False, because every such state is followed by a step.

        Raises:
            SchemaError: Numbers of rows differ, or two values have the same key.
        """
        count = len(self)
        if self.end not in _ENDS:
            raise SchemaError(f"end={self.end!r} is not one of {', '.join(_ENDS)}")
        if not count:
            raise SchemaError("the episode has no steps")
        columns: dict[Key, Array] = {}

        def put(key: Key, values: Array) -> None:
            if key in columns:
                raise SchemaError(f"two values are stored as {key_name(key)!r}")
            columns[key] = values

        states = [*_leaves(("observation",), self.observation), *_leaves(("info",), self.info)]
        states += [leaf for name, values in self.states.items() for leaf in _leaves(to_key(name), values)]
        for key, values in states:
            if len(values) not in (count, count + 1):
                raise SchemaError(
                    f"{key_name(key)!r} has {len(values)} rows for {count} steps; "
                    f"{count} or {count + 1} are expected"
                )
            if len(values) == count:
                if self.end == "open":
                    raise SchemaError(
                        f"a piece that is continued needs {count + 1} rows of {key_name(key)!r}"
                    )
                values = np.concatenate([values, np.zeros_like(values[:1])])
            put(key, values[:-1])
            put(("next", *key), values[1:])
        steps = [*_leaves(("action",), self.action)]
        steps += [(to_key(name), np.asarray(values)) for name, values in self.fields.items()]
        if self.reward is not None:
            steps.append((("next", "reward"), _reward(self.reward)))
        for key, values in steps:
            if len(values) != count:
                raise SchemaError(f"{key_name(key)!r} has {len(values)} rows for {count} steps")
            put(key, values)
        for name in ("done", "terminated", "truncated"):
            flags = np.zeros((count, 1), bool)
            put((name,), flags)
            flags = flags.copy()
            flags[-1] = self.end == name or (name == "done" and self.end in ("terminated", "truncated"))
            put(("next", name), flags)
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Hold rows that are stored unchanged, for sources without TorchRL's layout.

    Args:
        columns_by_key: The fields, by key. Shapes `(n, *shape)`.
        end: As in `Episode`; "open" if the next rows may continue the last episode. Rows that end an episode
            by "terminated" or "truncated" have flags that say so.
        facts: Annotations of the episode.
        split: As in `Episode`.

    Example:
        >>> from expstore.datasets import Rows
        >>> len(Rows(columns_by_key={"X": np.zeros((3, 5)), "y": np.zeros(3)}))
        3
    """

    columns_by_key: Mapping[str | Key, Array]
    end: End = "open"
    facts: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns_by_key.values()), ()))

    def columns(self) -> dict[Key, Array]:
        """Return the rows by key. The first dim of each array has the length of the rows.

        Raises:
            SchemaError: There are no rows, or numbers of rows differ.
        """
        count = len(self)
        if not count:
            raise SchemaError("there are no rows")
        found = {to_key(name): np.asarray(values) for name, values in self.columns_by_key.items()}
        for key, values in found.items():
            if len(values) != count:
                raise SchemaError(f"{key_name(key)!r} has {len(values)} rows, others {count}")
        return found


def _leaves(key: Key, values: Values) -> Iterator[tuple[Key, Array]]:
    if isinstance(values, Mapping):
        for name, below in values.items():
            yield from _leaves((*key, str(name)), below)
    else:
        found = np.asarray(values)
        if not found.ndim:
            raise SchemaError(f"{key_name(key)!r} is a single value; one row per step is expected")
        yield key, found


def put_value(tree: dict[str, Any], path: Iterable[str], value: Any) -> None:
    """Put a value into nested dicts.

    >>> from expstore.datasets.episode import put_value
    >>> tree = {}
    >>> put_value(tree, ["arm", "joint"], 3)
    >>> tree
    {'arm': {'joint': 3}}
    """
    *groups, last = path
    for name in groups:
        tree = tree.setdefault(name, {})
    tree[last] = value


def nest_values(name: str, values: Mapping[Key, Array]) -> Any:
    """Return the values below a name as nested dicts, or the array of that name."""
    tree: dict[str, Any] = {}
    for key, rows in values.items():
        if key[0] == name:
            put_value(tree, key, rows)
    return tree.get(name, {})


def _reward(values: Array) -> Array:
    found = np.asarray(values)
    found = found if found.dtype.kind == "f" else found.astype(np.float32)
    return found.reshape(len(found), -1) if found.ndim == 1 else found


class Reader(ABC):
    """Read one format of recorded experience, episode by episode.

    `import_dataset` writes the rows, resumes interrupted imports, and records the files from which the store
    was made. A reader keeps at most a few MB of rows in memory.

    Example:
        >>> from collections.abc import Iterator
        >>> from pathlib import Path
        >>> from expstore.datasets import Episode, Part, Reader
        >>> class Csv(Reader):
        ...     format = "csv"
        ...
        ...     def __init__(self, folder: Path) -> None:
        ...         self.folder = folder
        ...
        ...     def parts(self) -> list[Part]:
        ...         return [Part(name=one.name, files=[one]) for one in sorted(self.folder.glob("*.csv"))]
        ...
        ...     def episodes(self, part: Part) -> Iterator[Episode]:
        ...         rows = np.loadtxt(part.files[0], delimiter=",", ndmin=2)
        ...         yield Episode(observation=rows[:, :-2], action=rows[:, -2], reward=rows[:, -1], end="cut")
    """

    #: Name of the format.
    format: ClassVar[str]

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the parts, in the order of their rows.

        Raises:
            NotFoundError: A file is missing.
            SchemaError: The source does not have this format.
        """

    @abstractmethod
    def episodes(self, part: Part) -> Iterator[Episode | Rows]:
        """Yield the episodes of a part; every run yields the same episodes."""

    def options(self) -> Mapping[str, Any]:
        """Return the options that determine the rows, as JSON values.

        Two imports with equal files and options are equal.
        """
        return {}

    def facts(self) -> Mapping[str, Any]:
        """Return metadata of the data set as JSON values. The store keeps them in `rb.meta`."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Return arguments of `expstore.open` for the new store, such as a capacity or a schema."""
        return {}

    def notes(self) -> Sequence[str]:
        """Return what the import leaves out or changes, one sentence each.

        The command line prints the notes before it imports.
        """
        return ()

    def count_rows(self, part: Part) -> int | None:
        """Return the number of rows of a part for the progress bar; may be an estimate, or None."""
        return None
