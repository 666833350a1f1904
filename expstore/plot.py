"""Plots of episodes with matplotlib: `expstore.plot`.

Built on the buffers; needs matplotlib. pyplot does not know the figures, so nothing has to be closed.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.tables import cell_text, elide
from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.data.images import find_image, shrink_rows, to_pixels
from expstore.errors import ArgumentError, MissingExtraError, SchemaError, StateError
from expstore.schema.field_roles import find_observations
from expstore.schema.schema import OBJECT, Field, Schema
from expstore.storages.episode_lookup import check_episode, steps_of_episode, unknown_episode
from expstore.storages.read_view import ReadView, read_present, read_rows, read_stable

try:
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "expstore.plot draws with matplotlib, which is not installed", hint="pip install 'expstore[plot]'"
    ) from exc

if TYPE_CHECKING:
    from expstore.buffers.replay_buffer import ReplayBuffer
    from expstore.remote.client import RemoteReplayBuffer

__all__ = [
    "EpisodeAnimation",
    "EpisodeFigure",
    "animate_episode",
    "draw_episode",
    "episode",
    "lengths",
    "returns",
]

#: Names of fields, as in SQL, or their keys.
Fields = Sequence[str | tuple[str, ...]]

#: Sources with a colour of their own; the other sources share one.
_SOURCES = 8
#: Number of frames of a strip and of an animation, and frames per second of the latter.
_STRIP, _ANIMATION, _FRAME_RATE = 10, 100, 20
#: Frames are reduced to at most this many pixels a side.
_PIXELS = 160
#: Number of fields drawn below the frames unless `fields` names them, and values per row of such a field.
_PANELS, _VALUES = 6, 8
#: Lines of at most this many steps have a dot at each.
_MARKED = 40
#: Inches.
_WIDTH, _STRIP_HEIGHT, _FILM_HEIGHT, _PANEL_HEIGHT = 9.0, 1.8, 3.0, 1.1


class _NotebookAxes(Axes):
    """Axes that a notebook shows as a picture, though pyplot does not know their figure."""

    def _repr_png_(self) -> bytes:
        return _to_png(self.figure)


class EpisodeFigure(Figure):
    """The figure of an episode, which a notebook shows as a picture; `savefig("episode.png")` writes one."""

    def _repr_png_(self) -> bytes:
        return _to_png(self)


class EpisodeAnimation(FuncAnimation):
    """The animation of an episode, which a notebook shows as a GIF; `save("episode.gif")` writes one."""

    def _repr_html_(self) -> str:
        writer = _GifWriter(fps=_FRAME_RATE)
        self.save(_GifFile.name, writer=writer)
        return f'<img src="data:image/gif;base64,{base64.b64encode(writer.gif).decode()}">'

    def __del__(self) -> None:
        """Do nothing: matplotlib would warn if the animation was never drawn."""


class _GifFile(io.BytesIO):
    """A file in memory, whose name tells the format."""

    name = "episode.gif"


class _GifWriter(PillowWriter):
    """Make a GIF in memory."""

    gif = b""

    def finish(self) -> None:
        file: Any = _GifFile()
        self.outfile = file
        super().finish()
        self.gif = file.getvalue()


# -- all episodes ----------------------------------------------------------------------------------


def returns(
    rb: ReplayBuffer | RemoteReplayBuffer,
    *,
    where: str | None = None,
    params: Sequence[object] | Mapping[str, object] | None = None,
    by: Literal["source", "split"] = "source",
    window: int = 20,
    ax: Axes | None = None,
) -> Axes:
    """Plot the returns of the episodes that have ended, by source or split, with a running mean.

    Args:
        rb: The buffer.
        where: An SQL expression over the columns of `rb.episodes()` that selects episodes; None: all.
        params: Values for `?` (a sequence) or `$name` (a mapping) in the expression.
        by: What has a colour and a mean of its own: "source" or "split".
        window: Number of episodes of one source or split in the running mean.
        ax: Where to draw; None: a figure of its own, which a notebook shows.

    Returns:
        The Axes: a dot per episode at its id, and a line per source. More than 8 of them share a colour.

    Raises:
        QueryError: `where` is not one expression, or DuckDB refuses it.
        StateError: The rows have no reward, so that episodes have no return; or the store is closed.
        ArgumentError: `window` is less than 1, or `by` is something else.

    Example:
        >>> ax = expstore.plot.returns(rb, where="source = 'worker-0'")
        >>> ax.figure.savefig("returns.png")
    """
    return _plot_column(rb, "return", "return", where, params, by, window, ax)


def lengths(
    rb: ReplayBuffer | RemoteReplayBuffer,
    *,
    where: str | None = None,
    params: Sequence[object] | Mapping[str, object] | None = None,
    by: Literal["source", "split"] = "source",
    window: int = 20,
    ax: Axes | None = None,
) -> Axes:
    """Plot the lengths of the episodes that have ended, by source or split, with a running mean.

    Arguments, result and errors are those of `returns`.

    Args:
        rb: The buffer.
        where: An SQL expression over the columns of `rb.episodes()` that selects episodes; None: all.
        params: Values for `?` (a sequence) or `$name` (a mapping) in the expression.
        by: What has a colour and a mean of its own: "source" or "split".
        window: Number of episodes of one source or split in the running mean.
        ax: Where to draw; None: a figure of its own, which a notebook shows.

    Example:
        >>> ax = expstore.plot.lengths(rb, window=100)
    """
    return _plot_column(rb, "length", "steps", where, params, by, window, ax)


def _plot_column(
    rb: ReplayBuffer | RemoteReplayBuffer,
    column: str,
    label: str,
    where: str | None,
    params: Sequence[object] | Mapping[str, object] | None,
    by: str,
    window: int,
    ax: Axes | None,
) -> Axes:
    if not hasattr(rb, "episodes"):
        raise ArgumentError(
            f"rb must be a buffer, got {rb!r}",
            hint="expstore.open(path, mode='r') returns the buffer of a store",
        )
    if ax is not None and not hasattr(ax, "set_xlabel"):
        raise ArgumentError(f"ax must be Axes of matplotlib, got {ax!r}", hint="plt.subplots()[1] are Axes")
    window = check_whole("window", window)
    if window < 1:
        raise ArgumentError(f"window must be at least 1, got {window}")
    if by not in ("source", "split"):
        raise ArgumentError(f"by must be 'source' or 'split', got {by!r}")
    table = rb.episodes(where, params=params).arrow()
    ended = np.array(table["status"].to_pylist(), object) != "open"
    ids, sources = table["episode_id"].to_numpy()[ended], np.array(table[by].to_pylist(), object)[ended]
    if ids.size and table[column].null_count == len(table):
        raise StateError(
            f"these episodes have no {column}: the rows of the store have no reward",
            hint="plot.lengths() shows their lengths",
        )
    values = table[column].to_numpy().astype(np.float64)[ended]
    if ax is None:
        figure = Figure(figsize=(8, 4), layout="constrained")
        ax = figure.add_subplot(axes_class=_NotebookAxes)
    names, counts = np.unique(sources, return_counts=True)
    rows_of = dict(zip(names, counts, strict=True))
    largest = sorted(names, key=lambda name: (-rows_of[name], _by_number(name)))
    named = sorted(largest if len(largest) <= _SOURCES else largest[: _SOURCES - 1], key=_by_number)
    groups = [(cell_text(name), f"C{place}", sources == name) for place, name in enumerate(named)]
    if len(named) < len(names):
        groups.append((f"{len(names) - len(named)} other {by}s", "0.5", ~np.isin(sources, named)))
    lines = []
    for _, colour, mine in groups:
        ax.plot(ids[mine], values[mine], ".", color=colour, alpha=0.3, markersize=4)
        lines += ax.plot(ids[mine], _running_mean(values[mine], window), color=colour)
    if len(groups) > 1:
        # Names are set afterwards: matplotlib interprets "$" and a leading "_" of labels.
        legend = ax.legend(lines, [str(place) for place in range(len(lines))], fontsize="small")
        for text, (name, _, _) in zip(legend.get_texts(), groups, strict=True):
            text.set_parse_math(False)
            text.set_text(name)
    ax.set_xlabel("episode")
    ax.set_ylabel(label)
    ax.set_title(f"{column} of {ids.size:,} episodes, and mean of {window}", loc="left", fontsize="medium")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return ax


def _by_number(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts lane 2 of a source before its lane 10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _running_mean(values: Array, window: int) -> Array:
    """Return the mean of each value and those before it, of a window; NaN and infinities do not count."""
    finite = np.isfinite(values)
    total, count = np.cumsum(np.where(finite, values, 0.0)), np.cumsum(finite)
    before = np.arange(values.size) - window
    total, count = (sums - np.where(before < 0, 0, sums[np.maximum(before, 0)]) for sums in (total, count))
    mean: Array = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


# -- one episode -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Film:
    """Frames of an episode: RGB pictures of one shape, and the step of each."""

    name: str
    steps: list[int]
    frames: list[Array]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Fields of numbers in all steps of an episode.

    Args:
        steps: The steps. Shape `(n,)`.
        series: Values by the name of their field. Shapes `(n, values per row)`.
        others: Names of the fields that are left out.
    """

    steps: IntArray
    series: dict[str, Array]
    others: list[str]


@overload
def episode(
    rb: ReplayBuffer, episode_id: int, *, fields: Fields | None = None, animate: Literal[False] = False
) -> EpisodeFigure: ...


@overload
def episode(
    rb: ReplayBuffer, episode_id: int, *, fields: Fields | None = None, animate: Literal[True]
) -> EpisodeAnimation: ...


def episode(
    rb: ReplayBuffer,
    episode_id: int,
    *,
    fields: Fields | None = None,
    animate: bool = False,
) -> EpisodeFigure | EpisodeAnimation:
    """Draw an episode: frames of its image fields, and below them its numbers over the steps.

    Image fields are uint8 fields of shape `[height, width]`, with 1 or 3 channels first or last, or with
    several frames on top of one another, of which the last is drawn; and float fields with 1 or 3 channels.
    At most 10 frames of a field are read, or 100 of an animation, evenly spaced.

    Args:
        rb: The buffer; for a served store open the store itself.
        episode_id: Id of the episode, as in samples and SQL.
        fields: Names of the fields to draw, such as `"next.reward"`; None: the image fields and the first 6
            fields of at most 8 numbers a row, the reward first, without next observations and flags.
        animate: Whether to return an animation of the frames, with a mark at the step in the numbers.

    Returns:
        The figure, or the animation; a notebook shows both.

    Raises:
        NotFoundError: There never was such an episode, or all its rows were removed.
        SchemaError: A field does not exist, or it is neither an image nor a few numbers; or an animation
            would have no frames.
        StateError: The store is closed.

    Example:
        >>> expstore.plot.episode(rb, 3).savefig("episode.png")
        >>> frames = expstore.open("frames.exp")
        >>> with frames.record() as recorder:
        ...     for brightness in range(5):
        ...         frame = np.full((3, 16, 16), brightness, np.uint8)
        ...         recorder.step(frame, 0, 0.0, frame, terminated=brightness == 4, truncated=False)
        >>> expstore.plot.episode(frames, 1, animate=True).save("episode.gif")
    """
    number, view = check_episode(episode_id), rb.storage
    found = rb.episodes("episode_id = ?", params=[number]).arrow().to_pylist()
    if not found:
        raise unknown_episode(view, number)
    return (animate_episode if animate else draw_episode)(view, found[0], fields)


def draw_episode(view: ReadView, facts: Mapping[str, Any], fields: Fields | None = None) -> EpisodeFigure:
    """Draw strips of frames and numbers of an episode, as `episode` does.

    Args:
        view: The storage.
        facts: The episode's row of the relation `episodes`, by column.
        fields: As for `episode`.
    """
    films, numbers = _read_episode(view, facts["episode_id"], fields, _STRIP)
    heights = [_strip_height(film) for film in films]
    figure, grid = _make_figure(facts, numbers, heights, columns=1)
    for place, film in enumerate(films):
        _draw_strip(figure.add_subplot(grid[place, 0]), film)
    _draw_numbers(figure, grid, numbers, first=len(heights))
    return figure


def animate_episode(
    view: ReadView, facts: Mapping[str, Any], fields: Fields | None = None
) -> EpisodeAnimation:
    """Draw frames of an episode one after the other, above its numbers, as `episode` does.

    Args:
        view: The storage.
        facts: The episode's row of the relation `episodes`, by column.
        fields: As for `episode`.

    Returns:
        The animation, which a notebook shows and `save` writes to a file.

    Raises:
        SchemaError: No field that is drawn is an image.
    """
    films, numbers = _read_episode(view, facts["episode_id"], fields, _ANIMATION)
    if not films:
        raise SchemaError(
            "there are no frames to animate: no field that is drawn is an image",
            hint=f"the store has {view.schema!r}",
        )
    figure, grid = _make_figure(facts, numbers, [_FILM_HEIGHT], columns=len(films))
    screens = [figure.add_subplot(grid[0, place]) for place in range(len(films))]
    return _animate(figure, screens, films, _draw_numbers(figure, grid, numbers, first=1))


def _read_episode(
    view: ReadView, number: int, fields: Fields | None, count: int
) -> tuple[list[_Film], _Numbers]:
    """Return the fields of an episode that are drawn, with a number of frames."""

    def read() -> tuple[list[_Film], _Numbers]:
        images, places, others = _choose_fields(view, fields)
        numbers = _read_numbers(view, number, places, others)
        return _read_films(view, number, images, count), numbers

    return read_stable(view, read)


def _choose_fields(view: ReadView, names: Fields | None) -> tuple[list[int], list[int], list[str]]:
    """Return the positions of images and of fields of numbers, and the names of those left out."""
    schema = view.require_schema()
    if names is not None:
        places = [_find_place(schema, name) for name in names]
        return (
            [place for place in places if _is_image(schema.fields[place])],
            [place for place in places if not _is_image(schema.fields[place])],
            [],
        )
    keys = view.keys
    roles = {keys.trajectory, keys.terminated, keys.truncated, keys.done, keys.start, keys.mask}
    repeated = {after for _, after in find_observations(schema, keys)}
    candidates = [
        place for place, entry in enumerate(schema.fields) if entry.key not in roles and place not in repeated
    ]
    images = [place for place in candidates if _is_image(schema.fields[place])]
    numbers = [
        place
        for place in candidates
        if _is_series(schema.fields[place]) and schema.fields[place].dtype != "bool"
    ]
    numbers.sort(key=lambda place: schema.keys[place] != keys.reward)
    if not images and not numbers:
        raise SchemaError(
            f"nothing to draw: no field is an image or has 1 to {_VALUES} numbers a row",
            hint=f"the store has {schema!r}",
        )
    return images, numbers[:_PANELS], [key_name(schema.keys[place]) for place in numbers[_PANELS:]]


def _find_place(schema: Schema, name: str | tuple[str, ...]) -> int:
    """Return the position of a field that can be drawn, given its key or its name in SQL."""
    wanted = key_name(to_key(name))
    named: dict[str, Key] = {key_name(key): key for key in schema.keys}
    place = schema.place_of(named.get(wanted, to_key(name)))
    entry = schema.fields[place]
    if not (_is_image(entry) or _is_series(entry)):
        raise SchemaError(
            f"field {wanted!r} cannot be drawn: it is {entry}",
            hint=f"name images, or fields of 1 to {_VALUES} numbers a row",
        )
    return place


def _is_image(entry: Field) -> bool:
    return find_image(entry) is not None


def _is_series(entry: Field) -> bool:
    if entry.variable or entry.dtype == OBJECT:
        return False
    return entry.row_items <= _VALUES and entry.numpy_dtype.kind in "biuf"


def _read_numbers(view: ReadView, number: int, places: Sequence[int], others: list[str]) -> _Numbers:
    steps = np.zeros(0, np.int64)

    def locate() -> IntArray:
        nonlocal steps
        ids, steps = steps_of_episode(view, number)
        return ids

    _, columns = read_rows(view, locate, places)
    series = {}
    for place, column in zip(places, columns, strict=True):
        entry = view.require_schema().fields[place]
        values = widen_bfloat16(column) if entry.dtype == "bfloat16" else column
        series[key_name(entry.key)] = values.reshape(steps.size, -1)
    return _Numbers(steps, series, others)


def _read_films(view: ReadView, number: int, places: Sequence[int], count: int) -> list[_Film]:
    """Return evenly spaced frames of image fields; frames that are evicted meanwhile are left out."""
    ids, steps = steps_of_episode(view, number)
    chosen = np.unique(np.linspace(0, ids.size - 1, count).round().astype(np.int64))
    entries = [view.require_schema().fields[place] for place in places]
    films = [_Film(key_name(entry.key), [], []) for entry in entries]
    for row in chosen.tolist() if places else []:  # one by one, so that few whole frames are in memory
        found, columns = read_present(view, ids[row : row + 1], places)
        if found.size:
            for film, entry, column in zip(films, entries, columns, strict=True):
                film.steps.append(int(steps[row]))
                film.frames.append(_to_picture(column[0], entry))
    return [film for film in films if film.frames]


def _to_picture(frame: Array, entry: Field) -> Array:
    """Return a frame as a small RGB picture. Shape `(height, width, 3)`, uint8."""
    layout = find_image(entry)
    assert layout is not None, "only frames of image fields are read"
    picture = to_pixels(shrink_rows(frame[None], layout, _PIXELS))[0]
    return picture if layout.channels == 3 else np.repeat(picture, 3, axis=-1)


def _strip_height(film: _Film) -> float:
    height, width = film.frames[0].shape[:2]
    return float(min(_STRIP_HEIGHT, (_WIDTH - 0.8) * height / (width * len(film.frames)) + 0.4))


def _draw_strip(ax: Axes, film: _Film) -> None:
    height, width, _ = film.frames[0].shape
    margin = max(1, width // 20)
    strip = np.zeros(
        (height, (width + margin) * len(film.frames) - margin, 4), np.uint8
    )  # margins are transparent
    for place, frame in enumerate(film.frames):
        strip[:, place * (width + margin) :][:, :width] = np.dstack([frame, np.full((height, width), 255)])
    ax.imshow(strip, interpolation="nearest")
    ax.set_anchor("W")
    ax.set_title(film.name, loc="left", fontsize="small")
    middles = [place * (width + margin) + (width - 1) / 2 for place in range(len(film.frames))]
    ax.set_xticks(middles, [str(step) for step in film.steps], fontsize="small")
    ax.set_yticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _make_figure(
    facts: Mapping[str, Any], numbers: _Numbers, heights: Sequence[float], *, columns: int
) -> tuple[EpisodeFigure, GridSpec]:
    """Return an empty figure with a title, and its rows: of these heights, then one per field of numbers."""
    heights = [*heights, *[_PANEL_HEIGHT] * len(numbers.series)]
    figure = EpisodeFigure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained")
    parts = [f"episode {facts['episode_id']}", cell_text(facts["source"]), facts["status"]]
    parts.append(f"{facts['length']:,} steps")
    if facts["return"] is not None:
        parts.append(f"return {facts['return']:.6g}")
    # Names of sources are texts of users, in which "$" begins no formula.
    figure.suptitle(" · ".join(parts), fontsize="medium").set_parse_math(False)
    if others := numbers.others:
        figure.supxlabel(elide(f"... {len(others)} more fields: {', '.join(others)}", 100), fontsize="small")
    return figure, figure.add_gridspec(len(heights), columns, height_ratios=heights)


def _draw_numbers(figure: Figure, grid: GridSpec, numbers: _Numbers, *, first: int) -> list[Axes]:
    """Draw each field of numbers in a row of the grid, over one x axis; return their Axes."""
    panels: list[Axes] = []
    for place, (name, values) in enumerate(numbers.series.items(), start=first):
        panel = figure.add_subplot(grid[place, :], sharex=panels[0] if panels else None)
        _draw_values(panel, name, numbers.steps, values)
        panel.tick_params(labelbottom=False)
        panels.append(panel)
    if panels:
        panels[-1].tick_params(labelbottom=True)
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return panels


def _draw_values(ax: Axes, name: str, steps: IntArray, values: Array) -> None:
    lines = ax.plot(
        steps,
        values.astype(np.float64),
        drawstyle="default" if values.dtype.kind == "f" else "steps-mid",
        marker="." if steps.size <= _MARKED else "",
        linewidth=1,
    )
    ax.set_title(name, loc="left", fontsize="small")
    ax.tick_params(labelsize="small")
    ax.grid(alpha=0.3)
    if len(lines) > 1:
        numbers = [str(place) for place in range(len(lines))]
        options: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
        ax.legend(lines, numbers, ncols=len(lines), fontsize="x-small", frameon=False, **options)


def _animate(
    figure: EpisodeFigure, screens: Sequence[Axes], films: Sequence[_Film], panels: Sequence[Axes]
) -> EpisodeAnimation:
    images = []
    for screen, film in zip(screens, films, strict=True):
        screen.set_axis_off()
        images.append(screen.imshow(film.frames[0], interpolation="nearest"))
    cursors = [panel.axvline(films[0].steps[0], color="0.3", linewidth=1) for panel in panels]

    def update(frame: int) -> list[Any]:
        for screen, image, film in zip(screens, images, films, strict=True):
            image.set_data(film.frames[frame])
            screen.set_title(f"{film.name}, step {film.steps[frame]}", fontsize="small")
        for cursor in cursors:
            cursor.set_xdata([films[0].steps[frame]])
        return [*images, *cursors]

    update(0)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout stays: computing it takes longer than drawing a frame
    count = len(films[0].frames)
    return EpisodeAnimation(figure, update, frames=count, interval=1000 / _FRAME_RATE)


def _to_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
