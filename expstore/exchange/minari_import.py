"""Minari datasets as new stores.

Used by `expstore import` and programs. It needs h5py, the extra `h5`, and for images that are kept as JPEG
Pillow, but not Minari. An episode is read a piece at a time, and nothing is ever unpickled.
"""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array, Key
from expstore.disk.files import Disk, ReadingDisk
from expstore.episodes.annotations import pack_info
from expstore.episodes.segmentation import OPEN, TERMINATED, TRUNCATED
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.exchange.base import Imported, Progress, no_progress, piece_rows
from expstore.exchange.fill import Facts, Filler, new_store
from expstore.exchange.flat_files import Column, from_stored, to_field
from expstore.exchange.hdf5 import datasets_in, reading_hdf5
from expstore.exchange.minari_export import (
    DATA,
    INFO_ATTRIBUTE,
    MAIN,
    METADATA,
    STATUS_ATTRIBUTE,
    stored_as,
)
from expstore.schema.schema import Field, Schema

__all__ = ["import_minari"]

_EPISODE = re.compile(r"episode_(\d+)")
_PART = re.compile(r"_index_(\d+)")
_PLAIN = {
    "rewards": ("next", "reward"),
    "terminations": ("next", "terminated"),
    "truncations": ("next", "truncated"),
}
#: Of what metadata.json says a store's `meta` keeps these, and an export has them again.
_KEPT = (
    *("author", "author_email", "algorithm_name", "code_permalink", "description", "requirements"),
    *("dataset_id", "env_spec", "eval_env_spec", "observation_space", "action_space"),
)


def import_minari(
    source: str | Path,
    target: str | Path,
    *,
    capacity: int | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Imported:
    """Make a store of a Minari dataset in HDF5: transitions with their next observations.

    `observations` become `observation` and `("next", "observation")`, `actions` `action`, `rewards`,
    `terminations` and `truncations` stand below `next`; parts of a Tuple are called "0", "1", ... What is in
    `infos` once per observation becomes `info` and `("next", "info")`, what is there once per step `info`
    alone. Seed, options and ids of episodes are noted about them, what is said of the dataset in the store's
    `meta["minari"]`. The store is there whole or not at all.

    Args:
        source: The dataset's folder, or the folder `data` in it.
        target: The store's folder, which must not be there yet.
        capacity: Most readable rows; None: unbounded, or as an exported store had it.
        progress: Is told rows done and rows in all.
        disk: Where files are touched.

    Raises:
        ModuleNotFoundError: h5py is not installed; or Pillow, and images are JPEG.
        NotFoundError: There is no dataset, or no folder for the store.
        StorageError: The file cannot be read; or the disk failed or is full. Nothing is left.
        SchemaError: Something there cannot be a field, or episodes differ; or it is no HDF5.
        StateError: The target is there, or would lie inside a store.
        LockedError: Somebody else makes this store just now.

    Example:
        >>> import_minari("datasets/D4RL/pen/human-v2", "pen.exp").rows
        4950
    """
    folder, disk = Path(source), disk or Disk()
    if disk.is_dir(folder / DATA):
        folder = folder / DATA
    about = _metadata(folder)
    with reading_hdf5(folder / MAIN) as file:
        groups = [file[name] for name in sorted(filter(_EPISODE.fullmatch, file), key=_number)]
        if not groups:
            raise SchemaError(f"{folder / MAIN} holds no episodes")
        plan = _Plan.of(groups[0], about)
        own = about.get("expstore") or {}
        settings = {"meta": {"minari": {name: about[name] for name in _KEPT if name in about}}}
        total, done = int(about.get("total_steps", 0)), 0
        size = own.get("capacity") if capacity is None else capacity
        with new_store(disk, Path(target), size, settings) as filler:
            filler.prepare(plan.schema)
            for number, group in enumerate(groups, 1):
                for count in _put_episode(filler, plan, group, number):
                    done += count
                    progress(done, max(done, total))
            return filler.result(Path(target), plan.notes)


def _number(name: str) -> int:
    match = _EPISODE.fullmatch(name)
    return int(match[1]) if match else -1


def _metadata(folder: Path) -> dict[str, Any]:
    disk, path = ReadingDisk(), folder / METADATA
    if not disk.exists(path):
        raise NotFoundError(f"there is no Minari dataset in {folder}: it has no {METADATA}")
    try:
        found = dict(json.loads(disk.read_whole(path.resolve())))
    except (ValueError, TypeError) as exc:
        raise StorageError(f"cannot read {path}: {exc}") from exc
    form = found.get("data_format", "hdf5")
    if form != "hdf5":
        raise SchemaError(
            f"the dataset is kept as {form!r}, and can be imported from hdf5", hint="have Minari write it so"
        )
    return found


@dataclass(frozen=True)
class _Leaf:
    """Say what becomes of a dataset.

    Args:
        path: Where it stands in an episode's group.
        place: Number of its field.
        following: Number of the field that has its values one step later; -1: there is none.
        jpeg: Its values are images in JPEG.
    """

    path: str
    place: int
    following: int = -1
    jpeg: bool = False


@dataclass(frozen=True)
class _Plan:
    """Say what becomes of all datasets of an episode."""

    schema: Schema
    leaves: list[_Leaf]
    notes: list[str]

    @classmethod
    def of(cls, group: Any, about: Mapping[str, Any]) -> _Plan:
        """Look at an episode.

        Raises:
            SchemaError: Something there cannot be a field.
        """
        own = about.get("expstore") or {}
        known = [Field(tuple(f["key"]), str(f["dtype"]), tuple(f["shape"])) for f in own.get("fields", ())]
        paths = {str(path): known[int(place)] for path, place in (own.get("paths") or {}).items()}
        steps, images = _length(group, "rewards"), _images(about)
        fields: list[Field] = []
        leaves: list[_Leaf] = []
        notes: list[str] = []
        for path, dataset in datasets_in(group):
            if own and path not in paths:
                continue  # ends of episodes that are no fields
            lengths = (steps,), (steps + 1,)
            if path.startswith("infos/") and (
                dataset.shape[:1] not in lengths or dataset.dtype.kind not in "biufc"
            ):
                notes.append(f"{path!r} has no number or array per step, and is left out")
                continue
            jpeg = path in images and (dataset.dtype.kind == "O" or dataset.ndim == 2)
            if jpeg:
                notes.append(f"{path!r} are JPEG images, which are not quite what the environment gave")
            kind, shape = (np.dtype("u1"), images[path]) if jpeg else (dataset.dtype, dataset.shape[1:])
            entry = _field(path, kind, shape, paths.get(path))
            ahead = path.split("/")[0] == "observations" or (
                entry.key[0] == "info" and dataset.shape[0] == steps + 1
            )
            leaves.append(_Leaf(path, len(fields), len(fields) + 1 if ahead else -1, jpeg))
            fields.append(entry)
            if ahead:
                fields.append(Field(("next", *entry.key), entry.dtype, entry.shape))
        return cls(Schema(fields), leaves, notes)


def _field(path: str, kind: np.dtype[Any], shape: tuple[int, ...], known: Field | None) -> Field:
    """Return the field that a dataset is."""
    if known is not None and stored_as(known, path) == (kind, shape):
        return known
    return to_field(_key(path), Column(tuple(path.split("/")), kind, shape), None)


def _key(path: str) -> Key:
    parts = tuple(found[1] if (found := _PART.fullmatch(part)) else part for part in path.split("/"))
    if parts[0] in ("observations", "actions"):
        return (parts[0][:-1], *parts[1:])
    if path in _PLAIN:
        return _PLAIN[path]
    return ("info", *parts[1:]) if parts[0] == "infos" else parts


def _length(group: Any, name: str) -> int:
    if name not in group or not getattr(group[name], "shape", ()):
        raise SchemaError(f"{group.name} has no {name!r}", hint="it is no episode of a Minari dataset")
    return int(group[name].shape[0])


def _images(about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return which datasets are images in JPEG, and their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    if not about.get("jpeg_encoding", True):
        return found

    def below(path: str, space: Any) -> None:
        parts = space.get("subspaces")
        if isinstance(parts, dict):
            for name, part in parts.items():
                below(f"{path}/{name}", part)
        elif isinstance(parts, list):
            for number, part in enumerate(parts):
                below(f"{path}/_index_{number}", part)
        elif space.get("type") == "Box" and space.get("dtype") == "uint8" and len(space["shape"]) in (2, 3):
            found[path] = tuple(space["shape"])

    for group in ("observation", "action"):
        text = about.get(f"{group}_space")
        if isinstance(text, str):
            below(f"{group}s", json.loads(text))
    return found


def _put_episode(filler: Filler, plan: _Plan, group: Any, number: int) -> Iterator[int]:
    """Write an episode; yield how many rows, piece by piece."""
    count = _length(group, "rewards")
    for leaf in plan.leaves:
        wanted = count + (leaf.following >= 0)
        if leaf.path not in group:
            raise SchemaError(f"{group.name} has no {leaf.path!r}, which the first episode has")
        if group[leaf.path].shape[0] != wanted:
            there = group[leaf.path].shape[0]
            raise SchemaError(f"{group.name} has {there} {leaf.path!r} for {count} rewards, not {wanted}")
    facts = Facts(length=count, status=_status(group), info=_info(group))
    size = piece_rows(plan.schema.row_bytes)
    for start in range(0, count, size):
        stop = min(start + size, count)
        columns: list[Array] = [np.empty(0)] * len(plan.schema.fields)
        for leaf in plan.leaves:
            values = _read(plan, group, leaf, start, stop + (leaf.following >= 0))
            columns[leaf.place] = values[: stop - start]
            if leaf.following >= 0:
                columns[leaf.following] = values[1:]
        steps = np.arange(start, stop)
        filler.put(columns, np.full(steps.size, number), steps, facts=lambda _: facts)
        yield stop - start


def _read(plan: _Plan, group: Any, leaf: _Leaf, start: int, stop: int) -> Array:
    entry = plan.schema.fields[leaf.place]
    try:
        values = group[leaf.path][start:stop]
    except OSError as exc:
        raise StorageError(f"cannot read {leaf.path!r} of {group.name}: {exc}") from exc
    if leaf.jpeg:
        values = _decoded(values, entry.shape)
    if values.shape[1:] != entry.shape and values[0].size != entry.row_items:
        raise SchemaError(
            f"{leaf.path!r} of {group.name} has shape {list(values.shape[1:])}, others {list(entry.shape)}"
        )
    return from_stored(entry, values, stop - start)


def _decoded(images: Sequence[Any], shape: tuple[int, ...]) -> Array:
    try:
        Image = importlib.import_module("PIL.Image")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            "JPEG images need Pillow, which is not installed; pip install pillow", name=exc.name
        ) from exc
    return np.stack(
        [np.asarray(Image.open(io.BytesIO(np.asarray(one).tobytes())), np.uint8) for one in images]
    )


def _status(group: Any) -> int:
    """Return how an episode ended."""
    said = group.attrs.get(STATUS_ATTRIBUTE)
    if said in ("open", "cut"):
        return OPEN  # it becomes cut, where nothing follows
    if "terminations" in group and group["terminations"][-1]:
        return TERMINATED
    return TRUNCATED if "truncations" in group and group["truncations"][-1] else OPEN


def _info(group: Any) -> str:
    """Return what is said of an episode, as JSON text."""
    said = dict(group.attrs)
    if INFO_ATTRIBUTE in said or STATUS_ATTRIBUTE in said:
        text = said.get(INFO_ATTRIBUTE)
        return pack_info(json.loads(text)) if text else ""
    found = {name: _plain(value) for name, value in said.items() if name not in ("id", "total_steps")}
    return pack_info({"minari_id": _plain(said.get("id")), **found})


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value
