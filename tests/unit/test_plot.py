"""Plots of episodes: what is drawn, read back from matplotlib's objects, and how much of a store is read."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import expstore
from expstore import plot
from expstore.api import Settings
from expstore.core.values import Array
from expstore.errors import ArgumentError, NotFoundError, QueryError, RemoteError, SchemaError, StateError
from tests.support.servers import Serving

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


from tests.support.batches import memory_buffer

PNG = b"\x89PNG"
#: A name that matplotlib would take for a formula and leave out of a legend, and HTML for markup.
EVIL = "_$x_{<b>$"


def frames(count: int, shape: tuple[int, ...] = (12, 16, 3)) -> Array:
    """Frames whose values are their number."""
    return np.broadcast_to(np.arange(count, dtype=np.uint8).reshape(-1, *(1,) * len(shape)), (count, *shape))


def steps(count: int, *, offset: float = 0, shape: tuple[int, ...] = (12, 16, 3)) -> dict[str, Any]:
    """An episode whose reward is its step plus an offset."""
    number = np.arange(count)
    return {
        "pixels": frames(count, shape),
        "speed": np.stack([number, -number], 1).astype(np.float32),
        "action": number % 3,
        "next": {
            "pixels": frames(count, shape),
            "reward": (number + offset).astype(np.float32)[:, None],
            "terminated": (number == count - 1)[:, None],
            "truncated": np.zeros((count, 1), bool),
        },
    }


@pytest.fixture
def rb(tmp_path: Path) -> Any:
    """Ten episodes of 3 to 12 steps of two sources, and one that is still open."""
    with expstore.open(tmp_path / "a.exp") as rb:
        for number in range(10):
            rb.extend(steps(3 + number), source=EVIL if number % 2 else "worker")
        rb.extend({**steps(3), "next": {**steps(3)["next"], "terminated": np.zeros((3, 1), bool)}})
        yield rb


def titles(figure: Any) -> list[str]:
    return [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes]


# -- returns and lengths -------------------------------------------------------------------------------


def test_returns_by_source_with_a_running_mean(rb: Any) -> None:
    ax = plot.returns(rb, window=2)
    dots, mean, other_dots, other_mean = ax.lines
    assert dots.get_xdata().tolist() == [2, 4, 6, 8, 10]
    assert other_dots.get_xdata().tolist() == [1, 3, 5, 7, 9]
    assert dots.get_ydata().tolist() == [sum(range(n)) for n in (4, 6, 8, 10, 12)]
    assert mean.get_ydata().tolist() == [6, 10.5, 21.5, 36.5, 55.5]
    assert mean.get_color() == dots.get_color() != other_mean.get_color()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [EVIL, "worker"]
    assert ax.get_xlabel() == "episode"
    assert ax._repr_png_()[:4] == PNG


def test_lengths_of_chosen_episodes_on_given_axes(rb: Any) -> None:
    ax = Figure().add_subplot()
    assert plot.lengths(rb, where="length > $n", params={"n": 10}, ax=ax) is ax
    assert [line.get_ydata().tolist() for line in ax.lines] == [[12], [12], [11], [11]]
    only = plot.lengths(rb, where="source = 'worker'")
    assert only.get_legend() is None
    assert only.lines[0].get_ydata().tolist() == [3, 5, 7, 9, 11]


def test_a_store_without_episodes_gives_empty_axes(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        ax = plot.returns(rb)
        assert len(ax.lines) == 0
        assert ax._repr_png_()[:4] == PNG


def test_many_sources_share_a_colour(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        for number in range(30):
            for _ in range(1 + (number == 17)):
                rb.extend(steps(2), source=f"worker-{number}")
        ax = plot.lengths(rb)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == [*(f"worker-{number}" for number in range(6)), "worker-17", "23 other sources"]
    assert len(ax.lines[-1].get_xdata()) == 23


def test_values_that_are_not_finite_do_not_spoil_the_mean(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        for offset in (0, np.nan, np.inf, 0, 3, 3, 3):
            rb.extend(steps(2, offset=offset), source="a")
        ax = plot.returns(rb, window=2)
    assert ax.lines[1].get_ydata().tolist() == pytest.approx([1, 1, np.nan, 1, 4, 7, 7], nan_ok=True)


def test_wrong_arguments_are_refused(rb: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="window must be at least 1, got 0"):
        plot.returns(rb, window=0)
    with pytest.raises(QueryError):
        plot.returns(rb, where="length >")
    with expstore.open(tmp_path / "b.exp") as bare:
        bare.extend({"observation": np.arange(4.0), "done": np.arange(4) == 3})
        with pytest.raises(StateError, match="have no return: the rows of the store have no reward"):
            plot.returns(bare)
        assert len(plot.lengths(bare).lines) == 2


# -- one episode ---------------------------------------------------------------------------------------


def test_an_episode_is_a_strip_of_frames_over_its_numbers(rb: Any) -> None:
    figure = plot.episode(rb, 10)
    assert figure.get_suptitle() == f"episode 10 · {EVIL} · terminated · 12 steps · return 66"
    assert sorted(titles(figure)) == ["action", "next.reward", "pixels", "speed"]
    axes = dict(zip(titles(figure), figure.axes, strict=True))
    assert axes["next.reward"].lines[0].get_ydata().tolist() == list(range(12))
    assert [line.get_ydata()[-1] for line in axes["speed"].lines] == [11, -11]
    (strip,) = (image.get_array() for image in axes["pixels"].images)
    labels = [int(label.get_text()) for label in axes["pixels"].get_xticklabels()]
    assert (labels[0], labels[-1], len(labels)) == (0, 11, 10)
    middle = [round(tick) for tick in axes["pixels"].get_xticks()]
    assert strip[6, middle, :3].tolist() == [[step] * 3 for step in labels]
    assert figure._repr_png_()[:4] == PNG
    height = {name: ax.get_position().y0 for name, ax in axes.items()}
    assert height["pixels"] > height["next.reward"] > height["speed"] > height["action"]


@pytest.mark.slow
def test_an_episode_of_one_step(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(steps(1))
        assert plot.episode(rb, 1)._repr_png_()[:4] == PNG
        assert plot.episode(rb, 1, animate=True)._repr_html_().startswith("<img")


@pytest.mark.slow
def test_an_animation_is_a_gif_in_a_notebook(rb: Any, tmp_path: Path) -> None:
    animation = plot.episode(rb, 3, animate=True)
    html = animation._repr_html_()
    assert html.startswith('<img src="data:image/gif;base64,R0lGOD')
    assert "<script" not in html
    animation.save(tmp_path / "a.gif", writer="pillow", dpi=40)
    with Image.open(io.BytesIO((tmp_path / "a.gif").read_bytes())) as gif:
        assert getattr(gif, "n_frames", 1) == 5


def test_layouts_of_frames() -> None:
    for shape, pixel in (
        ((9, 8), [7, 7, 7]),
        ((9, 8, 1), [7, 7, 7]),
        ((1, 9, 8), [7, 7, 7]),
        ((9, 8, 3), [7, 8, 9]),
        ((3, 9, 8), [7, 8, 9]),
        ((4, 9, 8), [10, 10, 10]),  # the last of four frames
        ((9, 8, 4), [10, 10, 10]),
    ):
        planes = np.zeros(shape, np.uint8) + 7
        if len(shape) == 3:
            planes += np.moveaxis(
                np.arange(min(shape), dtype=np.uint8).reshape(-1, 1, 1), 0, np.argmin(shape)
            )
        rb = memory_buffer()
        rb.extend({"screen": np.stack([planes, planes]), "n": np.arange(2)})
        (strip,) = (image for ax in plot.episode(rb, 1).axes for image in ax.images)
        array: Any = strip.get_array()
        assert array.shape[:2] == (9, 17)
        assert array[0, 0].tolist() == [*pixel, 255], shape
        assert array[0, 8].tolist() == [0, 0, 0, 0], shape


def test_large_frames_are_reduced(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(steps(2, shape=(400, 300, 3)))
        figure = plot.episode(rb, 1)
    (strip,) = (image for ax in figure.axes for image in ax.images)
    array: Any = strip.get_array()
    assert array.shape[0] == 133


def test_fields_are_chosen_by_name(rb: Any) -> None:
    figure = plot.episode(rb, 4, fields=["next.terminated", ("next", "pixels"), "action"])
    assert sorted(titles(figure)) == ["action", "next.pixels", "next.terminated"]
    with pytest.raises(SchemaError, match="no field 'nothing'"):
        plot.episode(rb, 4, fields=["nothing"])
    with pytest.raises(SchemaError, match="there are no frames to animate"):
        plot.episode(rb, 4, fields=["action"], animate=True)


def test_of_many_fields_the_others_are_named(tmp_path: Path) -> None:
    fields = {f"field{k}": np.arange(3) for k in range(9)}
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend({**fields, "wide": np.zeros((3, 9)), "reward": np.ones(3), "done": np.arange(3) == 2})
        figure = plot.episode(rb, 1)
        with pytest.raises(SchemaError, match=r"field 'wide' cannot be drawn: it is float64\[9\]"):
            plot.episode(rb, 1, fields=["wide"])
    assert titles(figure) == ["reward", *(f"field{k}" for k in range(5))]
    assert figure.get_supxlabel() == "... 4 more fields: field5, field6, field7, field8"


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend({"wide": np.zeros((3, 9)), "done": np.arange(3) == 2})
        with pytest.raises(SchemaError, match="nothing to draw"):
            plot.episode(rb, 1)


def test_an_unknown_or_evicted_episode(rb: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no episode 99: their ids are 1 to 11"):
        plot.episode(rb, 99)
    with pytest.raises(TypeError, match="an episode id must be an integer"):
        plot.episode(rb, "1")
    with expstore.open(tmp_path / "ring.exp", capacity=10) as ring:
        for _ in range(3):
            ring.extend(steps(7))
        with pytest.raises(NotFoundError, match="no row of episode 1 is left"):
            plot.episode(ring, 1)
        figure = plot.episode(ring, 2)  # of which the first four rows have left
    reward = figure.axes[titles(figure).index("next.reward")].lines[0]
    assert reward.get_xdata().tolist() == reward.get_ydata().tolist() == [4, 5, 6]


def test_a_reader_and_rows_in_memory_are_drawn_too(rb: Any, tmp_path: Path) -> None:
    rb.flush()
    with expstore.open(tmp_path / "a.exp", mode="r") as reader:
        assert len(plot.episode(reader, 2).axes) == 4
        assert len(plot.returns(reader).lines) == 4
    memory = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(100))
    memory.extend(steps(5))
    assert len(plot.episode(memory, 1).axes) == 4


@pytest.mark.slow
def test_a_served_store_has_returns_and_lengths_but_no_frames(rb: Any, tmp_path: Path) -> None:
    rb.flush()
    rb.close()
    with Serving(Settings(path=tmp_path)) as server, expstore.connect(f"{server.url}/a") as remote:
        assert len(plot.returns(remote, where="length > ?", params=[10]).lines) == 4
        with pytest.raises(RemoteError, match="storage is not available"):
            plot.episode(remote, 1)  # type: ignore[call-overload]


@pytest.mark.slow
def test_pyplot_and_torch_are_not_loaded() -> None:
    code = (
        "import sys; from expstore import plot; "
        "print([name for name in ('matplotlib.pyplot', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- matplotlib ----------------------------------------------------------------------------------------


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "expstore.plot")
    monkeypatch.delattr(expstore, "plot")
    with pytest.raises(ModuleNotFoundError, match=r"not installed; pip install 'expstore\[plot\]'"):
        expstore.plot  # noqa: B018
