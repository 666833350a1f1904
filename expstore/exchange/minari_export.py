"""Export episodes as a Minari dataset in HDF5, which Minari's own reader loads.

Used by `expstore export` and programs. It needs h5py, the extra `h5`, but not Minari. An episode is written
one piece at a time. Spaces are described from specs, which need gymnasium, or from dtypes and shapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.exchange.base import (
    DiskFile,
    Exported,
    Progress,
    import_library,
    no_progress,
    piece_rows,
)
from expstore.exchange.foreign_rows import check_paths, dtype_in_files, rows_differ, to_stored
from expstore.exchange.rows import Episodes, Exchanged, Rows, open_export
from expstore.schema.schema import Field
from expstore.storages.read_view import ReadView
from expstore.storages.stats import meta_of

DATA, MAIN, METADATA = "data", "main_data.hdf5", "metadata.json"
#: Attributes of an episode that Minari ignores and keeps: its info as JSON, and its status.
INFO_ATTRIBUTE, STATUS_ATTRIBUTE = "expstore_info", "expstore_status"
#: The written version of the format: its reader knows datasets that store images uncompressed.
VERSION = "0.5.4"
#: Datasets with more bytes are compressed.
_SMALL = 64 << 10
_NAME = re.compile(r"[-_\w]*[A-Za-z][-_\w]*-v\d+")
_ENDS = {("next", "terminated"): "terminations", ("next", "truncated"): "truncations"}


def export_minari(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    dataset_id: str | None = None,
    env_spec: str | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write the readable episodes as a Minari dataset.

    An episode has one more observation than actions: each field `observation` needs its
    `("next", "observation")`, which must equal the observation of the next step. Other fields become infos.
    Images are stored as arrays, not as JPEG. Episodes are numbered from 0; the entry `seed` of an episode's
    info becomes its seed. Spaces follow from `rb.specs`, or else from dtypes. Minari finds the dataset in a
    folder named by its id below `$MINARI_DATASETS_PATH`.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: The dataset's folder, which must not exist yet.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        dataset_id: Id of the dataset, as in `cartpole/random-v0`; None: the folder's name, with `-v0`
            appended if it has no version.
        env_spec: The environment, as `gymnasium.envs.registration.EnvSpec.to_json` writes it; None: the
            store's `meta["minari"]["env_spec"]`, if it has one.
        progress: Called with the bytes done and the bytes in total.
        disk: Access to the file system.

    Raises:
        MissingExtraError: h5py is not installed.
        SchemaError: There are no observations, actions, rewards or next observations; or a next observation
            differs from the observation of the next step; or a field holds objects or variable-length rows;
            or a flag has several values per row; or two fields would have the same name.
        StateError: The target exists, or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or no rows of these episodes are left.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; nothing of the export is left.

    Example:
        >>> import os
        >>> import minari
        >>> from expstore.exchange import export_minari
        >>> os.makedirs("datasets/cartpole")
        >>> done = export_minari(rb, "datasets/cartpole/random-v0", dataset_id="cartpole/random-v0")
        >>> minari.MinariDataset("datasets/cartpole/random-v0/data").total_episodes == done.episodes
        True
    """
    h5py = import_library("h5py")
    with open_export(
        "minari", source, target, fields=fields, episodes=episodes, version=version, disk=disk
    ) as export:
        rows, disk = export.rows, export.disk
        plan = _Plan.of(rows)
        with export.build_target() as temporary:
            disk.make_dir(temporary / DATA)
            with (
                DiskFile(disk, temporary / DATA / MAIN, write=True) as raw,
                h5py.File(raw, "w", libver="v110") as file,
            ):
                writer = _Writer(file, plan, rows, progress)
                writer.write()
            size = disk.measure_space(temporary / DATA / MAIN)
            about = _metadata(plan, rows, writer, size, dataset_id or _id_of(export.target), env_spec)
            disk.put(temporary / DATA / METADATA, json.dumps(about, indent=1).encode())
    return export.summarize(writer.rows, episodes=writer.episodes)


def _id_of(target: Path) -> str:
    name = re.sub(r"[^-_\w]", "-", target.name)
    return name if _NAME.fullmatch(name) else f"{name}-v0"


def _path(group: str, key: Key, keys: Iterable[Key]) -> str:
    """Return the path of a field; members of a Tuple, named 0, 1, ..., become `_index_0` and so on."""
    parts, among = [group], [other for other in keys if other[0] == key[0]]
    for depth in range(1, len(key)):
        among = [other for other in among if other[:depth] == key[:depth] and len(other) > depth]
        names = {other[depth] for other in among}
        numbered = names == {str(number) for number in range(len(names))}
        parts.append(f"_index_{key[depth]}" if numbered else key[depth])
    return "/".join(parts)


@dataclass(frozen=True)
class _Leaf:
    """Where a field is written.

    Args:
        place: Position of the field among those that are read.
        path: Its dataset in an episode's group.
        following: Position of the field that has its value after the last step; -1: it has one value per
            step.
    """

    place: int
    path: str
    following: int = -1


@dataclass(frozen=True)
class _Plan:
    """Where all fields are written."""

    fields: tuple[Field, ...]
    leaves: list[_Leaf]
    ends: list[str]  # flags without a field, computed from how episodes ended

    @classmethod
    def of(cls, rows: Rows) -> _Plan:
        """Plan an export.

        Raises:
            SchemaError: Minari could not read the dataset.
        """
        fields = rows.user_fields
        places = {entry.key: number for number, entry in enumerate(fields)}
        for group in ("observation", "action"):
            if not any(key[0] == group for key in places):
                raise SchemaError(
                    f"the rows have no {group!r}, which a Minari dataset needs", hint="export another format"
                )
        if ("next", "reward") not in places or fields[places["next", "reward"]].row_items != 1:
            raise SchemaError("the rows have no 'next.reward' of one value, which a Minari dataset needs")
        for key in _ENDS:
            if key in places and fields[places[key]].row_items != 1:
                raise SchemaError(
                    f"{key_name(key)!r} has several values per row, but a Minari dataset has one",
                    hint="choose the fields to export: without it, the ends of the episodes are exported",
                )
        leaves = [leaf for key, place in places.items() if (leaf := _leaf(key, place, places, fields))]
        check_paths(tuple(leaf.path.split("/")) for leaf in leaves)
        ends = [name for key, name in _ENDS.items() if key not in places]
        return cls(fields, leaves, ends)


def _leaf(key: Key, place: int, places: Mapping[Key, int], fields: Sequence[Field]) -> _Leaf | None:
    """Return where a field is written; None: its values are part of another field's dataset."""
    following = places.get(("next", *key), -1)
    same = following >= 0 and _kind(fields[following]) == _kind(fields[place])
    if key[0] == "observation":
        if not same:
            raise SchemaError(
                f"the rows have no 'next.{key_name(key)}' like {key_name(key)!r}, but Minari needs the "
                "observation after the last step, too",
                hint="export another format, or collect next observations",
            )
        return _Leaf(place, _path("observations", key, places), following)
    if key[0] == "action":
        return _Leaf(place, _path("actions", key, places))
    if key == ("next", "reward"):
        return _Leaf(place, "rewards")
    if key in _ENDS:
        return _Leaf(place, _ENDS[key])
    former = places.get(key[1:], -1) if key[0] == "next" and key[1] in ("observation", "info") else -1
    if former >= 0 and _kind(fields[former]) == _kind(fields[place]):
        return None
    ahead = same and key[0] == "info"
    path = key if key[0] == "info" and len(key) > 1 else ("info", *key)
    return _Leaf(place, "/".join(("infos", *path[1:])), following if ahead else -1)


def _kind(entry: Field) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, entry.shape


class _Writer:
    """Write one episode after another.

    Args:
        file: The h5py file.
        plan: Where fields are written.
        rows: The rows to write.
        progress: Called with the bytes done and the bytes in total.
    """

    def __init__(self, file: Any, plan: _Plan, rows: Rows, progress: Progress) -> None:
        self._file, self._plan, self._rows, self._progress = file, plan, rows, progress
        self.rows = self.episodes = 0
        self._done = 0

    def write(self) -> None:
        """Write all episodes."""
        table = self._rows.facts
        facts = dict(
            zip(table["episode_id"].to_pylist(), table.select(["status", "info"]).to_pylist(), strict=True)
        )
        for episode in self._rows.episode_ids.tolist():
            ids, steps = self._rows.episode_rows(episode)
            # Where steps are missing, another episode begins.
            cuts = np.flatnonzero(np.diff(steps) != 1) + 1
            for part in np.split(ids, cuts):
                ended = facts[episode]["status"] if part[-1] == ids[-1] else "cut"
                self._write_episode(part, ended, facts[episode]["info"])

    def _write_episode(self, ids: IntArray, ended: str, info: str | None) -> None:
        group = self._file.create_group(f"episode_{self.episodes}")
        plan, count = self._plan, ids.size
        sets = [self._dataset(group, leaf, count) for leaf in plan.leaves]
        places = self._rows.places[: len(plan.fields)]
        size, last = piece_rows(self._rows.row_bytes), None
        for start in range(0, count, size):
            wanted = ids[start : start + size]
            found, columns = self._rows.read(wanted, places)
            self._done += wanted.size
            if found.size != wanted.size:  # some rows were overwritten: skip the incomplete episode
                del self._file[group.name]
                return
            columns = [to_stored(entry, column) for entry, column in zip(plan.fields, columns, strict=True)]
            for leaf, into in zip(plan.leaves, sets, strict=True):
                values = columns[leaf.place]
                into[start : start + len(values)] = values.reshape(len(values), *into.shape[1:])
                if leaf.following >= 0:
                    self._check(leaf, columns, last, wanted)
                    into[start + len(values)] = columns[leaf.following][-1].reshape(into.shape[1:])
            last = [column[-1:] for column in columns]
            self._progress(self._done * self._rows.row_bytes, self._rows.count * self._rows.row_bytes)
        for name in plan.ends:
            flags = np.zeros(count, bool)
            flags[-1] = (ended == "terminated") is (name == "terminations")
            group.create_dataset(name, data=flags)
        group.attrs.update(_attributes(self.episodes, count, ended, info))
        self.rows += count
        self.episodes += 1

    def _dataset(self, group: Any, leaf: _Leaf, count: int) -> Any:
        entry = self._plan.fields[leaf.place]
        kind, shape = find_stored_type(entry, leaf.path)
        count += leaf.following >= 0
        small = count * entry.row_bytes <= _SMALL
        packing = {} if small else {"compression": "gzip", "compression_opts": 1, "shuffle": True}
        return group.create_dataset(leaf.path, shape=(count, *shape), dtype=kind, **packing)

    def _check(self, leaf: _Leaf, columns: list[Array], last: list[Array] | None, ids: IntArray) -> None:
        """Raise SchemaError if a next observation differs from that of the next step: only one is stored."""
        now, following = columns[leaf.place], columns[leaf.following]
        before, at = following[:-1], now[1:]
        if last is not None:
            before, at = np.concatenate([last[leaf.following], before]), now
        different = rows_differ(before, at)
        if different.any():
            where = int(ids[np.flatnonzero(different)[0] + (last is None)])
            name = key_name(self._plan.fields[leaf.place].key)
            raise SchemaError(
                f"the {name} of row {where} is not the next one of the step before, but Minari stores one",
                hint="export another format",
            )


def find_stored_type(entry: Field, path: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape with which a field is written."""
    kind = dtype_in_files(entry)
    if path == "rewards":
        return np.dtype("<f8"), ()
    if path in _ENDS.values():
        return np.dtype(bool), ()
    return kind, entry.shape


def _attributes(number: int, steps: int, ended: str, info: str | None) -> dict[str, Any]:
    """Return the attributes of an episode."""
    found: dict[str, Any] = {"id": number, "total_steps": steps, STATUS_ATTRIBUTE: ended}
    if info:
        seed = json.loads(info).get("seed")
        if isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**64:
            found["seed"] = np.uint64(seed)
        found[INFO_ATTRIBUTE] = info
    return found


def _metadata(
    plan: _Plan, rows: Rows, writer: _Writer, size: int, dataset_id: str, env_spec: str | None
) -> dict[str, Any]:
    """Return the content of metadata.json."""
    kept = meta_of(rows.storage).get("minari")
    kept = kept if isinstance(kept, dict) else {}
    about: dict[str, Any] = {
        name: kept[name]
        for name in (
            "author",
            "author_email",
            "algorithm_name",
            "code_permalink",
            "description",
            "requirements",
        )
        if name in kept
    }
    if (env_spec := env_spec or kept.get("env_spec")) is not None:
        about["env_spec"] = env_spec
    for group in ("observation", "action"):
        leaves = {
            entry.key[1:]: space_of(rows.storage, entry) for entry in plan.fields if entry.key[0] == group
        }
        space = kept.get(f"{group}_space") or json.dumps(nest_spaces(leaves))
        about[f"{group}_space"] = space
    paths = {leaf.path: leaf.place for leaf in plan.leaves}
    return about | {
        "total_episodes": writer.episodes,
        "total_steps": writer.rows,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "dataset_id": dataset_id,
        "minari_version": VERSION,
        "dataset_size": round(size / 1e6, 1),
        "expstore": {
            **{name: value for name, value in rows.about().items() if name not in ("meta", "specs")},
            "paths": paths,
        },
    }


# -- spaces -------------------------------------------------------------------------------------------


def space_of(storage: ReadView, entry: Field) -> dict[str, Any]:
    """Return the space of a field: that of its spec, or else all values of its dtype."""
    space = _from_spec(storage, entry) if storage.settings.specs() else None
    return _of_dtype(entry) if space is None else space


def _from_spec(storage: ReadView, entry: Field) -> dict[str, Any] | None:
    from expstore.buffers.domain_checks import specs_of  # loads torch
    from expstore.specs.gymnasium_spaces import to_space

    specs = specs_of(storage)
    spec = None if specs is None else specs.get(entry.key, None)
    if spec is None:
        return None
    try:
        return _text(to_space(spec))
    except (ValueError, ModuleNotFoundError):  # gymnasium has no such space, or is not installed
        return None


def _text(space: Any) -> dict[str, Any] | None:
    """Return the JSON of a space, or None if Minari does not support the space."""
    kind = type(space).__name__
    if kind == "Box":
        facts = {"low": space.low.tolist(), "high": space.high.tolist()}
        return {"type": kind, "dtype": str(space.dtype), "shape": list(space.shape), **facts}
    if kind == "Discrete":
        return {"type": kind, "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if kind == "MultiDiscrete":
        facts = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": kind, "dtype": str(space.dtype), **facts}
    if kind == "MultiBinary":
        return {"type": kind, "n": space.n if isinstance(space.n, int) else list(space.n)}
    return None


def _of_dtype(entry: Field) -> dict[str, Any]:
    kind = dtype_in_files(entry)
    if kind.kind == "b" and entry.shape:
        return {"type": "MultiBinary", "n": list(entry.shape)}
    low: float
    high: float
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
    elif kind.kind == "b":
        low, high = 0, 1
    else:
        low, high = -np.inf, np.inf
    kind = np.dtype("u1") if kind.kind == "b" else kind
    facts = {
        "low": np.full(entry.shape, low, kind).tolist(),
        "high": np.full(entry.shape, high, kind).tolist(),
    }
    return {"type": "Box", "dtype": str(kind), "shape": list(entry.shape), **facts}


def nest_spaces(leaves: Mapping[Key, dict[str, Any]]) -> dict[str, Any]:
    """Combine spaces by their keys into one Dict, or into a Tuple where the names are 0, 1, and so on."""
    if () in leaves:
        return leaves[()]
    names = list(dict.fromkeys(key[0] for key in leaves))
    parts = {
        name: nest_spaces({key[1:]: space for key, space in leaves.items() if key[0] == name})
        for name in names
    }
    if set(names) == {str(number) for number in range(len(names))}:
        return {"type": "Tuple", "subspaces": [parts[str(number)] for number in range(len(names))]}
    return {"type": "Dict", "subspaces": parts}
