"""`prune`: remove versions from an object storage, and parts that no version and no shipped state needs.

Used by programs and by the command line. The list of versions is committed before anything is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from expstore.cold.object_storage import ObjectStorage
from expstore.cold.parts import fetch_part
from expstore.cold.ship_log import ShipLog, ShippedState, state_part_key
from expstore.cold.version_list import (
    MANIFESTS,
    PARTS,
    STATES,
    RemoteVersion,
    VersionList,
    find_references,
    make_push_id,
    manifest_key,
    part_key,
)
from expstore.errors import ArgumentError, CorruptionError, StateError
from expstore.storages.snapshots.rebuild import parts_of

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

_ROUNDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed.

    Args:
        versions: The versions that were removed.
        parts: How many parts were deleted.
        bytes: How many bytes these parts had.
    """

    versions: tuple[RemoteVersion, ...]
    parts: int
    bytes: int


def prune(
    where: str | ObjectStorage | Any,
    *,
    keep: int | None = None,
    drop: Sequence[int | str] = (),
    grace_seconds: float = 86_400.0,
) -> Pruned:
    """Remove versions, and the parts that no remaining version needs.

    Also removes what pushes have sent that were interrupted more than `grace_seconds` ago. A push that is
    still running after that time sends its parts again. Of a store that is shipped to the address, the newest
    state remains.

    Processes: may run while others push, pull, prune and ship; a reader that has a removed version in its
    cache continues to read it; a pull of one fails. Crashes: remaining versions are whole; the next prune
    deletes the rest.

    Args:
        where: A URL such as `s3://bucket/run`, an `ObjectStorage`, or a store of obstore.
        keep: How many of the newest versions without a tag remain; None: all of them.
        drop: Numbers or tags of versions to remove, with or without a tag.
        grace_seconds: Age of interrupted pushes whose parts are removed, seconds.

    Returns:
        What was removed.

    Raises:
        ArgumentError: `keep` is below 1, or `grace_seconds` is negative.
        SnapshotError: There is no version of `drop`; nothing was removed.
        CorruptionError: The list of versions, or of the files of a remaining version, is damaged.
        RemoteError: The server does not answer, or refuses a request.

    Example:
        >>> expstore.cold.prune("s3://bucket/run", keep=5)
    """
    if keep is not None and keep < 1:
        raise ArgumentError(f"keep must be at least 1, got {keep}", hint="drop=[...] removes single versions")
    if not grace_seconds >= 0:
        raise ArgumentError(f"grace_seconds must be at least 0, got {grace_seconds}")
    bucket = ObjectStorage.of(where).connect()
    bucket.check_conditions()
    return _prune(bucket, keep, drop, grace_seconds)


def _prune(bucket: Bucket, keep: int | None, drop: Sequence[int | str], grace_seconds: float) -> Pruned:
    for _ in range(_ROUNDS):
        shipped = ShipLog(bucket).find_confirmed()  # before the list is read: rule 5 of shipping
        known, tag = VersionList.load(bucket)
        try:
            plan = _Plan.make(bucket, known, shipped, keep, drop, grace_seconds)
        except CorruptionError:
            if VersionList.load(bucket)[1] == tag:
                raise
            continue  # another prune has removed the version
        # If the answer to a commit was lost, its repetition finds that the list has changed: to this list.
        if plan.list == known or plan.list.commit(bucket, tag) or VersionList.load(bucket)[0] == plan.list:
            return plan.delete(bucket)
    raise StateError(
        f"other processes changed the versions in {bucket.name} {_ROUNDS} times meanwhile",
        hint="run the command again",
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A new list of versions, and the objects that may be deleted once it is committed.

    Args:
        list: The list.
        versions: The versions that it lacks.
        parts: Keys of parts to delete, with their lengths in bytes.
        manifests: Keys of lists of files, and of states, to delete.
    """

    list: VersionList
    versions: tuple[RemoteVersion, ...]
    parts: dict[str, int]
    manifests: tuple[str, ...]

    @classmethod
    def make(
        cls,
        bucket: Bucket,
        known: VersionList,
        shipped: ShippedState | None,
        keep: int | None,
        drop: Sequence[int | str],
        grace_seconds: float,
    ) -> _Plan:
        """Decide what to remove.

        Args:
            bucket: The address.
            known: The list of versions.
            shipped: The newest state of a shipped store, if it is confirmed.
            keep: As in `prune`.
            drop: As in `prune`.
            grace_seconds: As in `prune`.
        """
        untagged = [version for version in known.versions if version.tag is None]
        old = set(untagged[:-keep]) if keep is not None else set()
        old |= {known.find(version, bucket.name) for version in drop}
        rest = tuple(version for version in known.versions if version not in old)
        needed = find_references(bucket, rest)
        unneeded = {part: size for part, size in _list_objects(bucket, PARTS) if part not in needed}
        before = max(known.retired_before, make_push_id(time.time() - grace_seconds))
        # A push that has committed its version no longer needs parts that no version refers to.
        over = {version.push for version in known.versions} & {_push_of(part) for part in unneeded}
        gone = known.retired | over | {version.push for version in old}
        younger = frozenset(push for push in gone if push >= before)
        listed = replace(known, versions=rest, retired_before=before, retired=younger)
        parts = {part_key(part): size for part, size in unneeded.items() if listed.is_retired(_push_of(part))}
        needed_lists = {manifest_key(version) for version in rest}
        manifests = [
            f"{MANIFESTS}/{name}"
            for name, _ in _list_objects(bucket, MANIFESTS)
            if f"{MANIFESTS}/{name}" not in needed_lists and listed.is_retired(_push_of(name))
        ]
        if shipped is not None:
            log = ShipLog(bucket)
            there, states = log.list_parts(), [key for key, _ in bucket.keys(STATES)]
            fetch = partial(fetch_part, bucket)
            states, names = log.find_unneeded(
                shipped, listed, states, there, lambda state: parts_of(state, fetch)
            )
            manifests += states
            parts |= {state_part_key(name): there[name] for name in names}
        if not old and not parts and not manifests:
            listed = known  # nothing needs a new list
        return cls(listed, tuple(sorted(old, key=lambda version: version.number)), parts, tuple(manifests))

    def delete(self, bucket: Bucket) -> Pruned:
        """Delete the objects; the list is committed."""
        bucket.delete([*self.manifests, *self.parts])
        return Pruned(versions=self.versions, parts=len(self.parts), bytes=sum(self.parts.values()))


def _push_of(part: str) -> str:
    return part.partition("/")[0]


def _list_objects(bucket: Bucket, prefix: str) -> list[tuple[str, int]]:
    """Return the objects below a prefix, without it, and their lengths in bytes."""
    return [(key.removeprefix(f"{prefix}/"), size) for key, size in bucket.keys(prefix)]
