"""The summary of a store: its size, fields, episodes, sessions, rates and histograms, for a page.

Used by `expstore.api.stores`, which keeps one `Summarizer` per store. A summary is computed at most once a
second, whatever the number of clients, and changes nothing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

import expstore
from expstore.api.page.histograms import Ages, Histogram, ages_of, choose_ids, priorities_of, times_sampled
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.values import Key, key_name
from expstore.data.images import find_image
from expstore.disk.files import Disk
from expstore.maintenance.disk_usage import StoreSize, store_size
from expstore.schema.arrow_types import describe
from expstore.schema.schema import Field as StoredField
from expstore.storages.columns.column import FieldSize

#: Seconds for which a summary is kept.
_SECONDS = 1.0
#: Files are measured again after this time, and after this many times the time that it took.
_SIZE_SECONDS, _SIZE_TIMES = 10.0, 50.0
#: Seconds over which rates are computed, unless nothing asked for them in between.
_RATE_SECONDS = 10.0
_SESSIONS = 100
_ORIGIN_LENGTH = 4000
_NAMES = 256
_TEXTS = frozenset({"string", "large_string"})
_TOKENS = re.compile(r"u?int(8|16|32|64)\[\?\]|(large_)?list<u?int(8|16|32|64)>")
_TOKEN_NAMES = re.compile(r"token|input_ids")

#: The fact `origin` is on the first episode of a source.
_SESSIONS_SQL = f"""
WITH firsts AS (SELECT source, min(episode_id) AS episode FROM episode_rows GROUP BY source)
SELECT s.session, count(*), epoch(min(s.started)),
    CASE WHEN count(s.ended) = count(*) THEN epoch(max(s.ended)) END, any_value(e.info->'origin')
FROM sources AS s
LEFT JOIN firsts AS f ON f.source = s.number
LEFT JOIN episodes AS e ON e.episode_id = f.episode
GROUP BY s.session ORDER BY max(s.number) DESC LIMIT {_SESSIONS}
"""


class FieldFacts(BaseModel):
    """A field of the rows."""

    name: str = Field(description="Its name; parts of nested keys are joined by dots.")
    dtype: str = Field(description="Its dtype; `arrow` for variable-length fields.")
    type: str = Field(description="Dtype and row shape as text, such as `float32[4]` or `list<int64>`.")
    shape: list[int] = Field(description="Shape of a row's value.")
    bytes: int | None = Field(description="Size of its files; null: unknown.")
    layout: str | None = Field(
        description="`flat`, `packed` or `segments` (variable-length fields, which share their files); null: "
        "unknown."
    )
    kind: Literal["image", "scalar", "vector", "text", "tokens", "other"] = Field(
        description="How to show its values."
    )
    image_layout: Literal["HWC", "CHW", "HW", "stacked"] | None = Field(
        description="Of images: how a row becomes a picture; of `stacked` frames the last one is shown."
    )
    actions: list[str] | None = Field(
        description="Names of the values of the field `action`, if the store's `meta` has a list `actions`."
    )


class EpisodeCounts(BaseModel):
    """Number of episodes, also of those whose rows have left."""

    count: int = Field(description="All episodes.")
    open: int = Field(description="Episodes that may get more rows.")
    terminated: int = Field(description="Episodes that reached a terminal state.")
    truncated: int = Field(description="Episodes that reached a limit.")
    cut: int = Field(description="Episodes that ended otherwise.")


class Rates(BaseModel):
    """How fast rows are written and sampled."""

    rows_in: float | None = Field(description="Rows written per second; null: not known yet.")
    rows_out: float | None = Field(description="Rows per second that this server has sampled; null: unknown.")
    seconds: float = Field(description="Over how many seconds.")


class SessionFacts(BaseModel):
    """One writer's life."""

    session: str = Field(description="Its id.")
    sources: int = Field(description="Number of its sources.")
    started: float = Field(description="When it wrote first, seconds since 1970.")
    ended: float | None = Field(description="When it ended, seconds since 1970; null: it may still write.")
    provenance: dict[str, Any] | None = Field(
        description="The fact `origin` of its episodes, which a `Collector` notes: environment, versions, "
        "seed, hyperparameters. Null: it has none, or one of more than 4,000 characters."
    )


class VersionFacts(BaseModel):
    """A snapshot."""

    number: int = Field(description="Its number.")
    tag: str | None = Field(description="Its name; null: it has none.")
    time: float = Field(description="When it was made, seconds since 1970.")
    rows: int = Field(description="Number of its rows.")


_EXAMPLE: dict[str, Any] = {
    "name": "demo", "uuid": "0" * 32, "storage": "zarr", "rows": 2, "capacity": 1000, "written": 2,
    "generation": 1, "meta": {}, "bytes": 65536, "free_bytes": 1 << 34,
    "fields": [{"name": "action", "dtype": "int64", "type": "int64[]", "shape": [], "bytes": 16,
                "layout": "flat", "kind": "scalar", "image_layout": None, "actions": None}],
    "episodes": {"count": 1, "open": 1, "terminated": 0, "truncated": 0, "cut": 0},
    "rates": {"rows_in": 0.2, "rows_out": 0.0, "seconds": 10.0},
    "ages": None, "priorities": None, "times_sampled": None, "limiter": None, "durability": "process",
    "unsynced_rows": 2, "last_sync_age": 0.5, "last_sync_seconds": 0.01, "shipped": None,
    "read_only": False, "versions": [],
    "sessions": [{"session": "actor-7", "sources": 1, "started": 1.7e9, "ended": None,
                  "provenance": {"environment": "CartPole-v1", "seed": 0}}],
}  # fmt: skip


class Summary(BaseModel):
    """A summary of a store. What a read-only server cannot know is null."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    name: str = Field(description="Its name.")
    uuid: str = Field(description="Identifies the store; it never changes.")
    storage: str = Field(description="Layout on disk: `zarr` or `arrow`.")
    rows: int = Field(description="Number of readable rows.")
    capacity: int | None = Field(description="Most readable rows; null: no bound.")
    written: int = Field(description="Number of rows ever written.")
    generation: int = Field(description="Number of times the store was opened for writing.")
    meta: Any = Field(description="The facts that were given when the store was created.")
    bytes: int = Field(description="Disk space of all files; measured every 10 seconds or less often.")
    free_bytes: int = Field(description="Free space of the disk.")
    fields: list[FieldFacts] = Field(description="The fields of the rows; empty: nothing was written yet.")
    episodes: EpisodeCounts = Field(description="Number of episodes by status.")
    rates: Rates = Field(description="Rows per second, written and sampled.")
    ages: Ages | None = Field(
        description="Ages of the readable rows, of 65,536 evenly spaced ones if there are more; null: there "
        "are no rows."
    )
    priorities: Histogram | None = Field(description="Their priorities; null: none was set.")
    times_sampled: Histogram | None = Field(description="How often each was sampled; null: not counted.")
    limiter: Any = Field(description="The rate limiter with its counts; null: rates are not limited.")
    durability: str | None = Field(description="`sync` or `process`; null: this server does not write.")
    unsynced_rows: int | None = Field(description="Number of rows that a power failure would lose.")
    last_sync_age: float | None = Field(description="Seconds since the last sync.")
    last_sync_seconds: float | None = Field(description="Duration of the last sync in seconds.")
    shipped: Any = Field(
        description="Of a store that is shipped: `url`, `rows_behind`, `seconds_behind`, `bytes`, "
        "`requests`, `failures`, `last_error`, as `stats` has them; null: it is not shipped."
    )
    read_only: bool = Field(description="Whether this server opened the store for reading only.")
    versions: list[VersionFacts] = Field(description="Snapshots in the store's folder, the oldest first.")
    sessions: list[SessionFacts] = Field(description="At most 100 sessions, the newest first.")


class _Counts(NamedTuple):
    """Counters at one time of the clock."""

    time: float
    written: int
    drawn: int


class Summarizer:
    """Summarize one store.

    Threads: any number may call it; one of them computes, the others wait for it.

    Args:
        name: Name of the store.
        path: Its folder.
        rb: The opened store.
        drawn: Returns how many rows this server has sampled from it.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        rb: TensorDictReplayBuffer,
        drawn: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._path, self._rb = name, path, rb
        self._drawn, self._clock = drawn, clock
        self._lock = threading.Lock()
        self._known: tuple[float, Summary] | None = None
        self._size: tuple[float, StoreSize, tuple[Key, ...]] | None = None
        self._history = deque([self._count()])

    def summarize(self) -> Summary:
        """Return the summary; it is at most a second old."""
        with self._lock:
            now = self._clock()
            if self._known is None or now - self._known[0] >= _SECONDS:
                self._known = now, self._build()
            return self._known[1]

    def measure_bytes(self) -> int:
        """Return the disk space of all files, measured every 10 seconds or less often."""
        with self._lock:
            return self._measure()[0].disk_bytes

    def _build(self) -> Summary:
        rb = self._rb
        facts = rb.stats()  # follows the writer of another process
        storage = rb.storage
        manifest, ids = storage.manifest, choose_ids(storage)
        size, measured = self._measure()
        sizes = dict(zip(measured, size.fields, strict=True))
        assert manifest is not None, "a served store has a folder"
        known = {name: facts.get(name) for name in (
            "durability", "unsynced_rows", "last_sync_age", "last_sync_seconds", "shipped")}  # fmt: skip
        return Summary(
            name=self._name, uuid=manifest.uuid, storage=manifest.storage, rows=len(storage),
            capacity=storage.capacity, written=storage.write_count, generation=manifest.generation,
            meta=rb.meta, bytes=size.disk_bytes, free_bytes=Disk().free(self._path),
            fields=self._describe_fields(sizes), episodes=self._count_episodes(), rates=self._measure_rates(),
            ages=ages_of(storage, ids), priorities=priorities_of(storage, ids),
            times_sampled=times_sampled(storage, ids), limiter=facts["rate_limiter"],
            read_only=storage.follows, versions=self._list_versions(), sessions=self._list_sessions(),
            **known,
        )  # fmt: skip

    def _measure(self) -> tuple[StoreSize, tuple[Key, ...]]:
        """Return the size of the store's files, measured some seconds ago, and the fields of that time."""
        now, storage = self._clock(), self._rb.storage
        if self._size is None or now >= self._size[0]:
            manifest = storage.manifest
            assert manifest is not None, "a served store has a folder"
            slots, written = manifest.slots, storage.write_count
            began = time.perf_counter()
            found = store_size(
                Disk(), self._path, manifest, written if slots is None else min(written, slots)
            )
            pause = max(_SIZE_SECONDS, _SIZE_TIMES * (time.perf_counter() - began))
            self._size = now + pause, found, manifest.schema.keys if manifest.schema else ()
        return self._size[1:]

    def _describe_fields(self, sizes: Mapping[Key, FieldSize]) -> list[FieldFacts]:
        schema = self._rb.schema
        if schema is None:
            return []
        found = []
        for entry in schema.fields:
            one, image = sizes.get(entry.key), find_image(entry)
            found.append(
                FieldFacts(
                    name=key_name(entry.key),
                    dtype=entry.dtype,
                    type=str(entry),
                    shape=list(entry.shape),
                    bytes=None if one is None else one.disk_bytes,
                    layout=None if one is None else one.layout,
                    kind="image" if image else _kind_of(entry),
                    image_layout=image.name if image else None,
                    actions=self._name_actions() if entry.key[-1] == "action" else None,
                )
            )
        return found

    def _name_actions(self) -> list[str] | None:
        names = self._rb.meta.get("actions")
        if not (isinstance(names, list) and 0 < len(names) <= _NAMES):
            return None
        return names if all(isinstance(name, str) for name in names) else None

    def _count_episodes(self) -> EpisodeCounts:
        found = self._rb.sql("SELECT status, count(*) FROM episodes GROUP BY status").fetchall()
        counts = dict.fromkeys(("open", "terminated", "truncated", "cut"), 0) | dict(found)
        return EpisodeCounts(count=sum(counts.values()), **counts)

    def _list_sessions(self) -> list[SessionFacts]:
        return [
            SessionFacts(
                session=session,
                sources=sources,
                started=started,
                ended=ended,
                provenance=_parse_facts(origin),
            )
            for session, sources, started, ended, origin in self._rb.sql(_SESSIONS_SQL).fetchall()
        ]

    def _list_versions(self) -> list[VersionFacts]:
        return [
            VersionFacts(number=version.number, tag=version.tag, time=version.time, rows=version.rows)
            for version in expstore.versions(self._path)
        ]

    def _count(self) -> _Counts:
        return _Counts(self._clock(), self._rb.storage.write_count, self._drawn())

    def _measure_rates(self) -> Rates:
        history, now = self._history, self._count()
        while len(history) > 1 and now.time - history[1].time >= _RATE_SECONDS:
            history.popleft()
        first = history[0]
        history.append(now)
        seconds = now.time - first.time
        if seconds <= 0:
            return Rates(rows_in=None, rows_out=None, seconds=0.0)
        rows_in, rows_out = now.written - first.written, now.drawn - first.drawn
        return Rates(rows_in=max(0, rows_in) / seconds, rows_out=rows_out / seconds, seconds=seconds)


def _parse_facts(text: str | None) -> dict[str, Any] | None:
    """Return the facts in a JSON text; None if it is no object, or too long."""
    if text is None or len(text) > _ORIGIN_LENGTH:
        return None
    found = json.loads(text)
    return found if isinstance(found, dict) else None


def _kind_of(entry: StoredField) -> Literal["scalar", "vector", "text", "tokens", "other"]:
    """Return how to show the values of a field that is not an image."""
    if entry.variable:
        text = describe(entry.arrow)
        return "text" if text in _TEXTS else "tokens" if _TOKENS.fullmatch(text) else "other"
    if entry.shape in ((), (1,)):
        return "scalar"
    if len(entry.shape) > 1:
        return "other"
    is_token = entry.numpy_dtype.kind in "iu" and _TOKEN_NAMES.search(entry.key[-1])
    return "tokens" if is_token else "vector"
