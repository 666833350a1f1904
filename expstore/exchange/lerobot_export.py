"""Export episodes as a LeRobot data set, version 3: Parquet files, videos, statistics.

Used by `expstore export` and programs. It needs av, the extra `video`, for videos, and Pillow, the extra
`images`, for images in Parquet files; the package lerobot is not used.

Files are written in groups: a data file, a video of each camera, and the description of their episodes. A
group is written to the folder `.export` of the data set, synced and renamed, and info.json, which is replaced
last, says how many episodes there are: so after a crash the data set has whole episodes, and the next export
continues behind them. A group never depends on where an earlier export ended. `.export` is removed at the
end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.data.images import ImageLayout, find_image, shrink_rows
from expstore.disk.atomic_build import LOCK, SCRAP
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.episodes.facts import TRAIN, split_of
from expstore.errors import ArgumentError, LockedError, NotFoundError, SchemaError, StateError, StorageError
from expstore.exchange.base import (
    DiskFile,
    Exported,
    Progress,
    Tell,
    ignore_notes,
    import_library,
    no_progress,
    open_to_read,
    piece_rows,
)
from expstore.exchange.foreign_rows import check_paths, dtype_in_files, to_stored
from expstore.exchange.lerobot_format import (
    CHUNK_FILES,
    DATA_MIB,
    DATA_PATH,
    END_COLUMNS,
    EPISODES_PATH,
    INFO,
    LEROBOT_KEYS,
    ROW_COLUMNS,
    STATS,
    TASKS,
    VERSION,
    VIDEO_MIB,
    VIDEO_PATH,
    PixelCounts,
    Statistics,
    TotalStatistics,
    choose_frames,
    describe_values,
    file_place,
    flatten_statistics,
    lerobot_column,
    nest_statistics,
    split_ranges,
)
from expstore.exchange.rows import Episodes, Exchanged, Export, Rows, mean_bytes, open_export, read_pieces
from expstore.schema.schema import Field
from expstore.storages.stats import meta_of

Codec = Literal["h264", "av1"]

#: The folder of an export that is not complete, and in it what the export writes.
STATE, _PLAN = ".export", "plan.json"
#: A group ends when it has this share of the frames before it: a killed export loses no more than that.
_SHARE = 32
#: Column of meta/episodes with the episode's id in the store.
EPISODE_ID = "expstore/episode_id"
#: Encoder and options by codec: every other frame is a key frame, as LeRobot reads single frames. What x264
#: looks ahead depends on the timing of its threads, and a continued export must give the same bytes.
_ENCODERS = {
    "h264": ("libx264", {"g": "2", "bf": "0", "crf": "18", "rc-lookahead": "0", "mbtree": "0"}),
    "av1": ("libsvtav1", {"g": "2", "crf": "30"}),
}
#: Fields whose values LeRobot computes from the frames.
_COMPUTED: tuple[Key, ...] = (("episode",), ("frame",), *((name,) for name in ROW_COLUMNS))
_FLAGS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))
#: Fields of text that are the tasks of the frames.
_TASK_KEYS: tuple[Key, ...] = (("task",), (str(LEROBOT_KEYS["task"]),))
_MOST_DIMS = 5


def export_lerobot(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    fps: int | None = None,
    task: str | None = None,
    robot_type: str | None = None,
    images: bool = False,
    codec: Codec = "h264",
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Exported:
    """Write the episodes that have ended as a LeRobot data set, version 3, or continue such an export.

    - `observation.state`, `action`, `next.reward` and other fields become columns of their names;
      `observation` becomes `observation.state`. A text is a column of texts; a missing one is empty.
    - uint8 pictures (height and width of at least 8 pixels, and one or three channels) become RGB videos
      `observation.images.NAME`: `observation.image.NAME`, `pixels`, ... Videos are not exact.
    - `next.done`, `next.terminated` and `next.truncated` of the last frame say how an episode ended. Next
      observations and the flags of the state before a step are left out; `timestamp` is the frame divided by
      `fps`.
    - A frame's task is the text field `task` or `language_instruction`, or the imported `task_index`; else
      the episode's fact `task`, else `task=`.
    - The splits of info.json are those of the store, one after the other: "train" is the first.

    An interrupted or killed export leaves a data set of whole episodes, except those of the files that were
    being written: one episode at first, later a 32nd of the frames. The same call continues it with the
    episodes of the first call, and the result is the same. An export that ended early before its first
    episode leaves nothing. An episode without its videos, and with `images=True` an episode of compressed
    images, must fit in memory.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: The data set's folder, which must not exist yet, or have an export that was not completed.
        fields: Names of the fields to export; None: all. Those that LeRobot cannot store are left out, and
            `tell` names them: complex numbers, more than 5 dims, numbers of variable length.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        fps: Frames per second; None: `meta["lerobot"]["fps"]` of an imported data set, or `meta["fps"]`.
        task: The task of episodes that have none; None: the empty text.
        robot_type: Type of the robot; None: `meta["lerobot"]["robot_type"]`, or `meta["robot_type"]`.
        images: Store pictures as PNG in the Parquet files, exactly, instead of videos.
        codec: Codec of videos, "h264" or "av1"; AV1 takes about four times as long.
        progress: Called with the bytes done and the bytes in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        MissingExtraError: av or Pillow is not installed.
        ArgumentError: `fps` is not known or no positive whole number, or `codec` is unknown.
        SchemaError: A field does not exist or holds objects, no field can be stored, two fields would have
            the same name, or `codec` cannot encode pictures of their size.
        StateError: The target exists and is complete, has an export of other rows or with other arguments,
            or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or none of these episodes has ended and has
            rows.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; the same call continues the export.

    Example:
        >>> from expstore.exchange import export_lerobot
        >>> done = export_lerobot(rb, "cartpole", fps=50, task="balance the pole")
        >>> done.rows, done.episodes
        (200, 10)
    """
    if codec not in _ENCODERS:
        raise ArgumentError(f"codec {codec!r} is unknown; use one of {', '.join(_ENCODERS)}")
    with open_export(
        "lerobot",
        source,
        target,
        fields=fields,
        episodes=episodes,
        version=version,
        disk=disk,
        any_length=True,
    ) as export:
        rows, meta = export.rows, meta_of(export.rows.storage)
        tasks = _find_fact(meta, "tasks")
        numbered = tasks if isinstance(tasks, dict) else {}
        columns, task_field, notes = _plan_columns(rows, images=images, has_tasks=bool(numbered))
        facts, more = _choose_episodes(rows, has_tasks=task is not None or task_field is not None)
        libraries = {"video": "av", "image": "PIL.Image"}
        for library in sorted({libraries[one.kind] for one in columns if one.layout is not None}):
            import_library(library)
        fields_read = [*columns, *filter(None, [task_field])]
        rows = _select(rows, list(facts))
        rows = dataclasses.replace(rows, fields={one.place: one.entry for one in fields_read})
        manifest = rows.storage.manifest
        request = {
            "store": manifest.uuid if manifest else "",
            "version": version,
            "episodes": episodes if episodes is None or isinstance(episodes, str) else [*map(int, episodes)],
            "fields": {one.name: one.describe() for one in fields_read},
            "fps": _choose_fps(fps, meta),
            "task": task,
            "robot_type": robot_type or _find_fact(meta, "robot_type"),
            "codec": codec,
        }
        tell([*notes, *more])
        with _open_plan(export, request, rows.count, facts) as plan:
            order = [episode for episode, _ in plan["episodes"]]
            rows = _select(rows, order)
            data = _DataSet(export.disk, export.target, columns, plan)
            data.resume()
            _Writer(data, rows, task_field, numbered, task or "", progress).write(order, facts)
            if not data.frames:
                raise NotFoundError("no rows of these episodes are left in the store")
        done = dataclasses.replace(export, rows=rows).summarize(data.frames, episodes=len(data.splits))
    return dataclasses.replace(done, left_out=plan["rows"] - data.frames)


# -- columns, episodes, arguments -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    """Describe a column.

    Args:
        name: Its name in the data set.
        place: Position of its field in the store.
        entry: Its field.
        kind: How it is stored.
        layout: How a row becomes a picture; None for numbers and texts.
    """

    name: str
    place: int
    entry: Field
    kind: Literal["number", "text", "image", "video"]
    layout: ImageLayout | None = None

    def describe(self) -> dict[str, Any]:
        """Return the feature in info.json, without facts about videos."""
        if self.layout is not None:
            shape: list[int] = [self.layout.height, self.layout.width, 3]
            return {"dtype": self.kind, "shape": shape, "names": ["height", "width", "channels"]}
        dtype = "string" if self.kind == "text" else str(dtype_in_files(self.entry))
        return {"dtype": dtype, "shape": list(self.entry.shape or (1,)), "names": None}

    @property
    def pixel_format(self) -> str:
        """The format of a video's pixels; half of the colours needs even sides."""
        assert self.layout is not None
        return "yuv444p" if self.layout.height % 2 or self.layout.width % 2 else "yuv420p"

    def to_pictures(self, values: Array) -> Array:
        """Return pictures in RGB. Shape `(n, height, width, 3)`, uint8."""
        assert self.layout is not None
        pictures = shrink_rows(values, self.layout)
        return np.ascontiguousarray(np.broadcast_to(pictures, (*pictures.shape[:3], 3)))


def _plan_columns(
    rows: Rows, *, images: bool, has_tasks: bool
) -> tuple[list[_Column], _Column | None, list[str]]:
    """Return the columns, the field of the frames' tasks if there is one, and what is left out.

    Args:
        rows: The rows to export.
        images: Whether pictures are stored in Parquet files.
        has_tasks: Whether the texts of numbered tasks are known.

    Raises:
        SchemaError: Two fields would have the same name, or no field is left.
    """
    fields = [(place, entry) for place, entry in rows.fields.items() if entry.key[0] != "_row"]
    keys = {entry.key for entry in rows.schema.fields}
    columns: list[_Column] = []
    task: _Column | None = None
    left_out: list[str] = []
    for place, entry in fields:
        key, is_text = entry.key, entry.arrow.strip('"') in ("string", "large_string")
        layout = find_image(entry) if entry.dtype == "uint8" else None
        is_task = (is_text and key in _TASK_KEYS) or (has_tasks and key == ("task_index",))
        if is_task and task is None:
            task = _Column(key_name(key), place, entry, "text" if is_text else "number")
        elif key in _COMPUTED or (key[0] == "next" and key[1:] in _FLAGS):
            continue
        elif key in _FLAGS or (key[0] == "next" and (key[1:] in keys or key[1] == "observation")):
            left_out.append(key_name(key))
        elif (entry.variable and not is_text) or entry.dtype == "complex64" or len(entry.shape) > _MOST_DIMS:
            left_out.append(f"{key_name(key)} ({entry})")
        elif layout is not None and layout.name != "stacked":
            name = lerobot_column(key, is_image=True)
            columns.append(_Column(name, place, entry, "image" if images else "video", layout))
        else:
            name = lerobot_column(key, is_image=False)
            columns.append(_Column(name, place, entry, "text" if is_text else "number"))
    check_paths([(column.name,) for column in columns])
    if not columns:
        raise SchemaError("none of the fields can be stored in a LeRobot data set")
    notes = [f"LeRobot has no place for the fields {', '.join(left_out)}, which will be left out"]
    return columns, task, notes if left_out else []


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of an episode: how it ended, its split, its task if there is one."""

    status: str
    split: str
    task: str | None


def _choose_episodes(rows: Rows, *, has_tasks: bool) -> tuple[dict[int, _Facts], list[str]]:
    """Return the episodes that have ended in the order of the data set, and what is left out or missing.

    Raises:
        NotFoundError: No episode has ended.
    """
    table = rows.facts.select(["episode_id", "status", "info"])
    found = {
        episode: _Facts(status, split_of(info or ""), _task_of(info or ""))
        for episode, status, info in zip(*(column.to_pylist() for column in table.columns), strict=True)
    }
    ended = {episode: facts for episode, facts in found.items() if facts.status != "open"}
    if not ended:
        raise NotFoundError(
            "no episode has ended and has rows: LeRobot data sets have ended episodes",
            hint="end the episodes with rb.episodes.end()",
        )
    notes = []
    if len(ended) < len(found):
        notes.append(f"{len(found) - len(ended):,} episodes that have not ended will be left out")
    untold = sum(facts.task is None for facts in ended.values())
    if untold and not has_tasks:
        notes.append(
            f"the task of {untold:,} episodes will be empty: pass --task, or annotate them with `task`"
        )
    order = sorted(ended, key=lambda one: (ended[one].split != TRAIN, ended[one].split, one))
    return {episode: ended[episode] for episode in order}, notes


def _task_of(info: str) -> str | None:
    task = json.loads(info).get("task") if '"task"' in info else None
    return task if isinstance(task, str) else None


def _find_fact(meta: Mapping[str, Any], name: str) -> Any:
    """Return a fact of an imported data set, or else of the store; None without it."""
    imported = meta.get("lerobot")
    found = imported.get(name) if isinstance(imported, dict) else None
    return meta.get(name) if found is None else found


def _choose_fps(fps: int | None, meta: Mapping[str, Any]) -> int:
    """Return the frames per second.

    Raises:
        ArgumentError: They are unknown, or not a positive whole number.
    """
    found = _find_fact(meta, "fps") if fps is None else fps
    if isinstance(found, int | float) and not isinstance(found, bool) and found > 0 and found == int(found):
        return int(found)
    what = "the frames per second are not known" if found is None else f"fps={found!r} cannot be used"
    raise ArgumentError(what, hint="pass a positive whole number as --fps, in Python fps=")


def _select(rows: Rows, episodes: Sequence[int]) -> Rows:
    """Return only the rows of some episodes."""
    chosen = np.isin(rows.fragments[0], episodes)
    return dataclasses.replace(rows, fragments=rows.fragments[:, chosen], whole=False)


# -- continuing -------------------------------------------------------------------------------------------


@contextmanager
def _open_plan(
    export: Export, request: Mapping[str, Any], rows: int, facts: Mapping[int, _Facts]
) -> Iterator[Any]:
    """Create the target with a plan, or open the plan of an export that was not completed.

    The plan has the request, the episodes with their splits, and the number of their rows. At the end it is
    removed; on an error it is kept if the data set has episodes, otherwise the target is removed.

    Raises:
        StateError: The target exists and has no plan, or that of another request.
        LockedError: Another process or thread exports to the target.
    """
    disk, folder = export.disk, export.target / STATE
    if is_new := not disk.exists(folder / _PLAN):
        plan = {"request": request, "rows": rows, "episodes": [[e, one.split] for e, one in facts.items()]}
        with export.build_target() as temporary:
            disk.make_dir(temporary / STATE)
            disk.put(temporary / STATE / _PLAN, json.dumps(plan).encode())
    try:
        lock = WriterLock(disk, folder / LOCK)
    except LockedError as exc:
        raise LockedError(
            f"another process or thread exports to {export.target} at the moment", hint="choose another path"
        ) from exc
    try:
        plan = json.loads(disk.read_whole(folder / _PLAN))
        former, asked = plan["request"], json.loads(json.dumps(request))
        differing = [name for name, value in asked.items() if former.get(name) != value]
        if not is_new and not asked["store"]:  # stores in memory cannot be told apart
            differing = ["store"]
        if differing:
            name = differing[0]
            raise StateError(
                f"{export.target} has an export that was not completed, whose {name} is "
                f"{former.get(name)!r:.80} and not {asked[name]!r:.80}",
                hint="export with the same arguments to continue it, or remove the folder",
            )
        for name in disk.names(folder):  # left over from a process that was killed
            if name not in (_PLAN, LOCK):
                disk.unlink(folder / name)
        try:
            yield plan
        except BaseException:
            if not disk.exists(export.target / INFO):
                _remove(disk, export.target, export.target)
            raise
        _remove(disk, folder, export.target)
    finally:
        lock.release()


def _remove(disk: Disk, path: Path, target: Path) -> None:
    """Remove a folder at once; after a crash the next export to the target removes the rest."""
    scrap = target.with_name(target.name + SCRAP)
    disk.remove_tree(scrap)
    disk.rename(path, scrap)
    disk.sync_dir(path.parent)
    disk.remove_tree(scrap)


class _DataSet:
    """The finished groups of a data set.

    Threads: one. Crashes: info.json says how many episodes there are; `resume` removes other files.

    Args:
        disk: Access to the file system.
        root: The folder.
        columns: The columns that are fields of the store.
        plan: What is exported: the request, the episodes with their splits.
    """

    def __init__(self, disk: Disk, root: Path, columns: Sequence[_Column], plan: Mapping[str, Any]) -> None:
        self.disk, self.root, self.columns = disk, root, columns
        request = plan["request"]
        self._robot_type, self._split_of = request["robot_type"], dict(plan["episodes"])
        self.fps: int = request["fps"]
        self.codec: Codec = request["codec"]
        self.frames = self.groups = 0
        #: The last exported episode of the store; None: no episode.
        self.last: int | None = None
        #: The splits of the episodes, and the tasks, in order.
        self.splits: list[str] = []
        self.tasks: dict[str, int] = {}
        self._totals = TotalStatistics({})

    def resume(self) -> None:
        """Read what an earlier export has finished, and remove the files of the group that it was adding."""
        read_table = import_library("pyarrow.parquet").read_table
        if self.disk.exists(self.root / INFO):
            info = json.loads(self.disk.read_whole(self.root / INFO))
            with open_to_read(self.root / TASKS) as file:
                tasks = read_table(file)["task"].to_pylist()
            self.tasks = {task: number for number, task in enumerate(tasks[: info["total_tasks"]])}
            while len(self.splits) < info["total_episodes"]:
                with open_to_read(self.root / self.path(EPISODES_PATH)) as file:
                    self._count(read_table(file).to_pylist())
        for path in self.paths():
            self.disk.unlink(self.root / path)

    def path(self, template: str, name: str = "") -> str:
        """Return the path of a file of the next group."""
        return template.format(video_key=name, **file_place(self.groups))

    def paths(self) -> list[str]:
        """Return the paths of all files of the next group."""
        videos = [self.path(VIDEO_PATH, one.name) for one in self.columns if one.kind == "video"]
        return [*videos, self.path(DATA_PATH), self.path(EPISODES_PATH)]

    def add(self, group: _Group) -> None:
        """Add a group: after a crash the data set has all of its episodes or none."""
        arrow, disk = import_library("pyarrow"), self.disk
        group.finish(arrow.Table.from_pylist(group.episodes))
        folders = set()
        for number, path in enumerate(self.paths()):
            target = self.root / path
            disk.sync_path(group.part_path(number))
            folders.add(target.parent)
            if not disk.exists(target.parent):
                folders.update(self.root / above for above in Path(path).parents)
                disk.make_dir(target.parent)
            disk.rename(group.part_path(number), target)
        for folder in sorted(folders):
            disk.sync_dir(folder)
        self._count(group.episodes)
        self._put(TASKS, _tasks_file(list(self.tasks)))
        self._put(STATS, json.dumps(self._totals.to_json(), indent=1).encode())
        disk.sync_dir(self.root / Path(INFO).parent)
        self._put(INFO, json.dumps(self._info(), indent=1, ensure_ascii=False).encode())
        disk.sync_dir(self.root / Path(INFO).parent)

    def _count(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count the episodes of a group."""
        for row in rows:
            self._totals.add(nest_statistics(row))
            self.last = row[EPISODE_ID]
            self.splits.append(self._split_of[row[EPISODE_ID]])
            self.frames += row["length"]
        self.groups += 1

    def _put(self, name: str, data: bytes) -> None:
        """Replace a file of metadata."""
        with self.disk.build_file(self.root / name, self.root / STATE / "meta") as file:
            file.write(data, 0)

    def _info(self) -> dict[str, Any]:
        """Return the content of info.json."""
        features = {one.name: one.describe() for one in self.columns}
        for one in self.columns:
            if one.layout is not None and one.kind == "video":
                features[one.name]["info"] = {
                    "video.height": one.layout.height,
                    "video.width": one.layout.width,
                    "video.codec": self.codec,
                    "video.pix_fmt": one.pixel_format,
                    "video.is_depth_map": False,
                    "video.fps": self.fps,
                    "video.channels": 3,
                    "has_audio": False,
                }
        kinds = dict.fromkeys(END_COLUMNS, "bool") | ROW_COLUMNS
        for name, dtype in kinds.items():
            features.setdefault(name, {"dtype": dtype, "shape": [1], "names": None})
        return {
            "codebase_version": VERSION,
            "robot_type": self._robot_type,
            "total_episodes": len(self.splits),
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": CHUNK_FILES,
            "data_files_size_in_mb": DATA_MIB,
            "video_files_size_in_mb": VIDEO_MIB,
            "fps": self.fps,
            "splits": split_ranges(self.splits),
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if any(one.kind == "video" for one in self.columns) else None,
            "features": features,
        }


# -- writing ----------------------------------------------------------------------------------------------


class _Video:
    """A video of a camera that is being written.

    Threads: one. Crashes: the file cannot be read until it is closed.

    Args:
        file: The empty file; `close` closes it, too.
        column: The column.
        fps: Frames per second.
        codec: The codec.
    """

    def __init__(self, file: DiskFile, column: _Column, fps: int, codec: Codec) -> None:
        av = import_library("av")
        assert column.layout is not None
        encoder, options = _ENCODERS[codec]
        self.frames, self._file, self._column, self._codec = 0, file, column, codec
        self._make, self._error, self._base = av.VideoFrame.from_ndarray, av.FFmpegError, Fraction(1, fps)
        open_video = av.open
        self._container = open_video(file, "w", format="mp4")
        self._stream = self._container.add_stream(encoder, rate=fps, options=options)
        self._stream.width, self._stream.height = column.layout.width, column.layout.height
        self._stream.pix_fmt = column.pixel_format

    @property
    def bytes(self) -> int:
        """Number of bytes written."""
        return self._file.tell()

    def add(self, pictures: Array) -> None:
        """Append frames. Shape `(n, height, width, 3)`, uint8.

        Raises:
            SchemaError: The codec does not support the size of the pictures.
        """
        for picture in pictures:
            frame = self._make(picture, format="rgb24")
            frame.pts, frame.time_base = self.frames, self._base
            self._encode(frame)
            self.frames += 1

    def close(self) -> None:
        """Write the frames that the encoder holds, and close the file."""
        self._encode(None)
        self._container.close()
        self._file.close()

    def discard(self) -> None:
        """Release the encoder; what an encoder still writes is of no use."""
        with contextlib.suppress(self._error, StorageError):
            self._container.close()

    def _encode(self, frame: Any) -> None:
        try:
            self._container.mux(self._stream.encode(frame))
        except self._error as exc:
            raise SchemaError(
                f"pictures of {self._column.name!r} cannot be encoded with {self._codec}: {exc}",
                hint="use --images, or another --codec",
            ) from exc


class _Group:
    """The files of some episodes that are being written: a data file, the videos, the list of the episodes.

    Threads: one. Crashes: the files are in the folder of the export, which the data set does not read.

    Args:
        data: The data set.
        opened: Closes the files.
    """

    def __init__(self, data: _DataSet, opened: ExitStack) -> None:
        self._data, self._opened = data, opened
        self._files = [
            opened.enter_context(DiskFile(data.disk, self.part_path(number), write=True))
            for number in range(len(data.paths()))
        ]
        pictures = [one for one in data.columns if one.kind == "video"]
        self.videos = {
            one.name: _Video(file, one, data.fps, data.codec)
            for one, file in zip(pictures, self._files, strict=False)
        }
        for video in self.videos.values():
            opened.callback(video.discard)
        self._parquet: Any = None
        self.episodes: list[dict[str, Any]] = []
        self.frames = 0

    def part_path(self, number: int) -> Path:
        """Return the path of a file before it is a part of the data set."""
        return self._data.root / STATE / f"{number}.part"

    def add(
        self,
        values: Mapping[str, Any],
        stats: Mapping[str, Statistics],
        about: Mapping[str, Any],
        starts: Mapping[str, int],
    ) -> None:
        """Append an episode, the frames of whose videos were written.

        Args:
            values: The columns of the data file. Shapes `(frames, *row shape)`.
            stats: Statistics by column.
            about: Facts of the episode.
            starts: Number of its first frame in each video.
        """
        arrow, parquet = import_library("pyarrow"), import_library("pyarrow.parquet")
        table = arrow.table({name: _to_arrow(one) for name, one in values.items()})
        if self._parquet is None:
            writer = parquet.ParquetWriter(self._files[-2], table.schema, compression="snappy")
            self._parquet = self._opened.enter_context(writer)
        self._parquet.write_table(table)
        data, place = self._data, file_place(self._data.groups)
        number, first = len(data.splits) + len(self.episodes), data.frames + self.frames
        row = {"episode_index": number, "length": len(table), **about}
        row |= {"dataset_from_index": first, "dataset_to_index": first + len(table)}
        row |= {f"{path}/{name}": n for path in ("data", "meta/episodes") for name, n in place.items()}
        for name, start in starts.items():
            row |= {f"videos/{name}/{part}": n for part, n in place.items()}
            row[f"videos/{name}/from_timestamp"] = start / data.fps
            row[f"videos/{name}/to_timestamp"] = (start + len(table)) / data.fps
        self.episodes.append(row | flatten_statistics(stats))
        self.frames += len(table)

    @property
    def is_full(self) -> bool:
        """Whether the next episode begins another group."""
        sizes = [
            (self._files[-2].tell(), DATA_MIB),
            *((video.bytes, VIDEO_MIB) for video in self.videos.values()),
        ]
        count = len(self.episodes)
        is_large = any(size * (count + 1) >= count * (limit << 20) for size, limit in sizes)
        return count > 0 and (is_large or self.frames * _SHARE >= self._data.frames)

    def finish(self, episodes: Any) -> None:
        """Close the files.

        Args:
            episodes: Table of the episodes.
        """
        self._parquet.close()
        for video in self.videos.values():
            video.close()
        import_library("pyarrow.parquet").write_table(episodes, self._files[-1])
        for file in self._files:
            file.close()


class _Writer:
    """Read episodes and write them, group by group.

    Args:
        data: The data set.
        rows: The rows to export.
        task_field: The field that has the task of each frame, or its number; None: no field has it.
        numbered: Tasks by their number, as text.
        task: The task of episodes that have none.
        progress: Called with the bytes done and the bytes in total.
    """

    def __init__(
        self,
        data: _DataSet,
        rows: Rows,
        task_field: _Column | None,
        numbered: Mapping[str, str],
        task: str,
        progress: Progress,
    ) -> None:
        self._data, self._rows, self._task_field, self._numbered = data, rows, task_field, numbered
        self._task, self._progress = task, progress
        self._row_bytes, self._read = mean_bytes(rows), data.frames

    def write(self, episodes: Sequence[int], facts: Mapping[int, _Facts]) -> None:
        """Write the episodes that the data set lacks, in the given order."""
        done = 0 if self._data.last is None else episodes.index(self._data.last) + 1
        left = deque(episode for episode in episodes[done:] if episode in facts)
        while left:
            with ExitStack() as opened:
                group = _Group(self._data, opened)
                while left and not group.is_full:
                    self._write_episode(group, left[0], facts[left[0]])
                    left.popleft()
                if group.episodes:
                    self._data.add(group)

    def _write_episode(self, group: _Group, episode: int, facts: _Facts) -> None:
        ids, steps = self._rows.episode_rows(episode)
        # Where steps are missing, another episode begins.
        for part in np.split(ids, np.flatnonzero(np.diff(steps) != 1) + 1):
            status = facts.status if part[-1] == ids[-1] else "cut"
            self._write_part(group, episode, part, status, facts.task)

    def _write_part(self, group: _Group, episode: int, ids: IntArray, status: str, task: str | None) -> None:
        """Write an episode; if rows were overwritten, only frames of videos that no episode refers to."""
        columns = self._data.columns
        starts = {name: video.frames for name, video in group.videos.items()}
        held: dict[str, list[Any]] = {one.name: [] for one in columns if one.kind != "video"}
        pixels = {one.name: PixelCounts() for one in columns if one.layout is not None}
        tasks: list[str] = []
        sampled, size, done = choose_frames(ids.size), piece_rows(self._rows.row_bytes), 0
        wanted = (ids[start : start + size] for start in range(0, ids.size, size))
        for piece in read_pieces(self._rows, wanted):
            self._read += piece.asked
            self._progress(self._read * self._row_bytes, self._rows.count * self._row_bytes)
            if piece.ids.size != piece.asked:
                return
            places = sampled[(sampled >= done) & (sampled < done + piece.asked)] - done
            done += piece.asked
            for column, values in zip(columns, piece.columns, strict=False):
                if column.layout is not None:
                    values = column.to_pictures(values)
                    pixels[column.name].add(values[places])
                if column.kind == "video":
                    group.videos[column.name].add(values)
                else:
                    held[column.name].append(_encode_images(values) if column.layout else values)
            if self._task_field is not None:
                tasks += self._tasks_in(piece.columns[-1])
        texts = tasks or [self._task if task is None else task] * done
        numbers = [self._data.tasks.setdefault(text, len(self._data.tasks)) for text in texts]
        frames = np.arange(done)
        values = {one.name: _to_column(one, held[one.name]) for one in columns if one.kind != "video"}
        for name, endings in END_COLUMNS.items():
            values.setdefault(name, (frames == done - 1) & (status in endings))
        values |= {
            "timestamp": (frames / self._data.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(done, len(self._data.splits) + len(group.episodes)),
            "index": frames + self._data.frames + group.frames,
            "task_index": np.array(numbers),
        }
        stats = {name: found.describe() for name, found in pixels.items()}
        stats |= {name: describe_values(one) for name, one in values.items() if isinstance(one, np.ndarray)}
        group.add(values, stats, {"tasks": list(dict.fromkeys(texts)), EPISODE_ID: episode}, starts)

    def _tasks_in(self, values: Any) -> list[str]:
        """Return the tasks of frames.

        Raises:
            SchemaError: A frame has a task that the metadata of the store do not have.
        """
        found = values.tolist() if isinstance(values, np.ndarray) else values.fill_null("").to_pylist()
        if isinstance(values, np.ndarray):
            try:
                return [self._numbered[str(number)] for number in found]
            except KeyError as exc:
                raise SchemaError(
                    f"a frame has task {exc.args[0]}, which is missing in the metadata of the store",
                    hint="choose the fields to export without task_index",
                ) from exc
        return list(found)


# -- values -----------------------------------------------------------------------------------------------


def _encode_images(pictures: Array) -> Any:
    """Return pictures as PNG files, in an Arrow array of structs."""
    arrow, image = import_library("pyarrow"), import_library("PIL.Image")
    found = []
    for picture in pictures:
        file = io.BytesIO()
        image.fromarray(picture).save(file, "PNG")
        found.append({"bytes": file.getvalue(), "path": None})
    return arrow.array(found, arrow.struct({"bytes": arrow.binary(), "path": arrow.string()}))


def _to_column(column: _Column, pieces: Sequence[Any]) -> Any:
    """Return the values of a column in an episode: an array for numbers, otherwise an Arrow array."""
    if column.kind == "number":
        return np.concatenate([to_stored(column.entry, piece) for piece in pieces])
    arrow = import_library("pyarrow")
    whole = arrow.chunked_array(pieces)
    return (whole.cast(arrow.string()).fill_null("") if column.kind == "text" else whole).combine_chunks()


def _to_arrow(values: Any) -> Any:
    """Return a column as an Arrow array: single values, lists of one size, or nested lists."""
    if not isinstance(values, np.ndarray):
        return values
    arrow = import_library("pyarrow")
    shape: tuple[int, ...] = values.shape[1:] if values.shape[1:] != (1,) else ()
    found = arrow.array(values.reshape(-1))
    if len(shape) == 1:
        return arrow.FixedSizeListArray.from_arrays(found, shape[0])
    for size in reversed(shape):
        found = arrow.ListArray.from_arrays(np.arange(len(found) // size + 1, dtype=np.int32) * size, found)
    return found


def _tasks_file(tasks: Sequence[str]) -> bytes:
    """Return the content of tasks.parquet: a table of pandas, whose index is the text."""
    arrow, parquet = import_library("pyarrow"), import_library("pyarrow.parquet")
    described = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for name, kind, dtype in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": described, "pandas_version": "2.2.0"}
    schema = arrow.schema(
        [("task_index", arrow.int64()), ("task", arrow.string())], {"pandas": json.dumps(about)}
    )
    file = io.BytesIO()
    parquet.write_table(arrow.table([list(range(len(tasks))), list(tasks)], schema=schema), file)
    return file.getvalue()
