"""A progress bar on a terminal, with rate and remaining time.

Used by the command line and by data sets, which take minutes to fetch and to import.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

from expstore.exchange.base import Progress as Tell
from expstore.exchange.base import no_progress

Unit = Literal["bytes", "rows"]

#: Shows progress under a title, in a unit; yields a function to call with the amount done and the total.
ShowProgress = Callable[[str, Unit], AbstractContextManager[Tell]]


@contextlib.contextmanager
def show_nothing(what: str, unit: Unit = "bytes") -> Iterator[Tell]:
    """Show nothing."""
    yield no_progress


@contextlib.contextmanager
def show_progress(
    what: str, unit: Unit = "bytes", *, note: Callable[[], str] | None = None
) -> Iterator[Tell]:
    """Show a bar on the terminal, or nothing if standard error is not a terminal.

    Args:
        what: The title.
        unit: The unit of the amounts.
        note: Returns a text that is shown at the end of the line; None: nothing is.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:,.0f} {unit}/s")

    class Note(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if note is None else note())

    # Not `console.is_terminal`: with FORCE_COLOR it is true for a pipe.
    console, is_terminal = Console(stderr=True), sys.stderr.isatty()
    much = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    rate = (Rate(),) if unit == "rows" else ()
    columns = (TextColumn(what), BarColumn(), much, *rate, TimeRemainingColumn(), Note())
    with Progress(*columns, console=console, disable=not is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)  # 0: unknown


@contextlib.contextmanager
def show_import(show: ShowProgress, what: str = "") -> Iterator[tuple[Tell, Tell]]:
    """Show two bars, one after the other: of bytes while files are hashed, of rows while they are imported.

    Args:
        show: Shows one bar.
        what: Name of the data set, for the titles.

    Yields:
        A function that is called with bytes done and in total, and one that is called with rows. The first
        call with rows ends the bar of bytes.
    """
    with contextlib.ExitStack() as bar:
        checking = bar.enter_context(show(f"checking {what}".rstrip(), "bytes"))
        rows: list[Tell] = []

        def progress(done: int, total: int) -> None:
            if not rows:
                bar.close()
                rows.append(bar.enter_context(show(f"importing {what}".rstrip(), "rows")))
            rows[0](done, total)

        yield checking, progress
