"""The facts (`info`) that users attach to episodes: JSON objects as text, and how new facts are merged.

Used by buffers for `annotate` and `extend(episode_info=...)`, and when a journal is replayed. It does
not change its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from expstore.errors import ArgumentError, SchemaError

#: The fact that says to which group an episode belongs, and in its first episode how the group was ended.
GROUP = "_group"
#: The fact that names the split of an episode. Without it the split is `TRAIN`.
SPLIT, TRAIN = "_split", "train"


def check_split(split: str) -> str:
    """Return the name of a split.

    Raises:
        ArgumentError: It is not the name of a split.
    """
    if isinstance(split, str) and split == split.strip() != "" and split.isprintable() and "/" not in split:
        return split
    raise ArgumentError(
        f"split {split!r:.100} is not a name", hint='use printable text without "/", such as "eval"'
    )


def source_of_split(source: str | None, split: str | None) -> str | None:
    """Return the stream of rows: without a name, that of their split, whose episodes are its own."""
    return split if source is None and split != TRAIN else source


def split_of(info: str) -> str:
    """Return the split of an episode with these facts."""
    return str(json.loads(info).get(SPLIT, TRAIN)) if SPLIT in info else TRAIN


def pack_info(info: Mapping[str, Any] | None, split: str | None = None) -> str:
    """Return facts as JSON text; "" for no facts.

    Args:
        info: The facts.
        split: The split of the episodes; None: that which they have, or "train".

    Raises:
        SchemaError: JSON cannot represent one of them, or its name is the store's own.
        ArgumentError: `split` is not the name of a split.
    """
    if split is not None:
        return merge_info(pack_info(info), json.dumps({SPLIT: check_split(split)}, ensure_ascii=False))
    if info is None:
        return ""
    if not isinstance(info, Mapping):
        raise SchemaError(
            f"the info of episodes must be a dict, got a {type(info).__name__}",
            hint="give a dict of facts, which are attached to each of them",
        )
    if not info:
        return ""
    for key, value in info.items():
        if not isinstance(key, str):
            raise _build_error(key, f"a key must be text, not {type(key).__name__}")
        if key in (GROUP, SPLIT):
            raise SchemaError(f"info {key!r} is the store's own", hint="use another name")
        _check(key, value)
    text = json.dumps(dict(info), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise SchemaError(
            f"the info cannot be stored: it has characters that UTF-8 cannot represent ({exc})"
        ) from exc
    return text


def merge_info(text: str, changes: str) -> str:
    """Merge new facts into an episode's info: each replaces the fact of its name, null removes it.

    Args:
        text: The info so far, a JSON object; "" for no info.
        changes: The new facts, a JSON object; "" for no facts.
    """
    if not changes:
        return text
    info = json.loads(text) if text else {}
    for key, value in json.loads(changes).items():
        if value is None:
            info.pop(key, None)
        else:
            info[key] = value
    return json.dumps(info, ensure_ascii=False) if info else ""


def split_groups(info: str) -> tuple[str, Iterator[str] | None]:
    """Split the info of a batch: the info of its episodes, and that of each episode that begins there.

    Args:
        info: What `expstore.episodes.groups.add_groups` returned. Without groups the second part is None.
    """
    if GROUP not in info or (groups := (facts := json.loads(info)).pop(GROUP, None)) is None:
        return info, None
    rest = json.dumps(facts, ensure_ascii=False) if facts else ""
    return rest, (merge_info(rest, json.dumps({GROUP: one}, ensure_ascii=False)) for one in groups)


def take_own(info: dict[str, Any]) -> tuple[str, Any]:
    """Remove the facts of the store's own from the info of an exported episode.

    Returns:
        The split, and the key of the group; None: the episode is in no group.

    Raises:
        ArgumentError: The split has no valid name.
    """
    split, group = info.pop(SPLIT, TRAIN), info.pop(GROUP, None)
    key = group.get("key") if isinstance(group, dict) else None
    return check_split(split), key if isinstance(key, int | str) else None


def pack_own(info: dict[str, Any]) -> str:
    """Return the info of an exported episode as JSON text for another store, with its split and its group.

    In the new store the group has not been ended.

    Raises:
        SchemaError: It is not an info.
        ArgumentError: The split has no valid name.
    """
    rest = dict(info) if isinstance(info, dict) else info
    split, key = take_own(rest) if isinstance(rest, dict) else (TRAIN, None)
    packed = pack_info(rest, None if split == TRAIN else split)
    if key is None:
        return packed
    versions = {name: value for name, value in info[GROUP].items() if name == "version"}
    return merge_info(packed, json.dumps({GROUP: {"key": key, **versions}}, ensure_ascii=False))


def _check(key: str, value: Any) -> None:
    """Raise SchemaError for a value that JSON would not return unchanged."""
    if isinstance(value, dict):
        for name, member in value.items():
            if not isinstance(name, str):
                raise _build_error(key, f"a key in it is {type(name).__name__}, not text")
            _check(key, member)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(key, item)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise _build_error(key, f"JSON cannot represent {value}")
    elif not (value is None or isinstance(value, str | int)):
        raise _build_error(key, f"JSON cannot represent a {type(value).__name__}")


def _build_error(key: object, reason: str) -> SchemaError:
    return SchemaError(
        f"info {key!r} cannot be stored: {reason}",
        hint="use text, numbers, booleans, None, and lists and dicts of them (item() of a tensor)",
    )
