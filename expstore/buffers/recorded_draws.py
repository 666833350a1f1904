"""A sampler whose draws are written down, and come again from the log.

`RecordedDraws` stands between a consumer's `Sampling` and the sampler of the user. Everything that depends on
whether a draw is new or recorded is here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from expstore.core.draw_state import DrawState
from expstore.core.draws import Draws
from expstore.core.values import Array, IntArray, Key, Selection
from expstore.errors import NotReadyError, RowsChangedError
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Filter
from expstore.storages.format.draw_log import DrawLog
from expstore.storages.format.row_changes import ChangedRows
from expstore.storages.read_view import ReadView

#: The redraw number for the random numbers of transforms that read other steps; draws of rows never reach it.
_STEPS = 1 << 41

Missing = Literal["raise", "skip"]


class RecordedDraws(Sampler):
    """Draw by another sampler, and record each draw; give recorded draws again.

    Args:
        sampler: The sampler.
        log: Where draws are recorded.
        state: The number of the draw after this one, and the sampler's progress.
        draws: The consumer's random numbers.
        missing: What happens to rows of a recorded draw that are not there any more, or were changed.
    """

    def __init__(
        self, sampler: Sampler, log: DrawLog, state: DrawState, draws: Draws, *, missing: Missing
    ) -> None:
        super().__init__()
        self._sampler, self._log, self._state, self._draws = sampler, log, state, draws
        self._missing = missing
        self._seen = 0, 0  # the newest change and the newest id when the rows were chosen
        self._changed: ChangedRows | None = None
        #: Number of the present draw, and whether it was recorded before; the consumer sets them.
        self.number, self.is_recorded = 0, False
        self._ends = False
        #: Whether what follows the choice of rows uses random numbers.
        self.is_followed = False
        self.prioritized, self.windowed = sampler.prioritized, sampler.windowed

    @property
    def reads(self) -> frozenset[Key]:
        """The fields that the sampler reads."""
        return self._sampler.reads

    @property
    def filter(self) -> Filter | None:  # type: ignore[override]
        """Evaluates `where` and `weight` of the sampler."""
        return self._sampler.filter

    def keep_progress_in(self, draws: DrawState) -> None:
        """Let the sampler store its progress there."""
        self._sampler.keep_progress_in(draws)

    def attach(self, storage: ReadView) -> None:
        """Continue where the last recorded draw ended."""
        self._sampler.attach(storage)

    def detach(self) -> None:
        """Stop evaluating the filter."""
        self._sampler.detach()

    def refresh(self, storage: ReadView) -> None:
        """Evaluate `where` and `weight` for all rows and episodes as they are now."""
        self._sampler.refresh(storage)

    def count_left(self, storage: ReadView) -> int:
        """Return the number of rows that can still be drawn, at least 1 while recorded draws come again."""
        return 1 if self.is_recorded else self._sampler.count_left(storage)

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error for a draw that finds no row."""
        return self._sampler.build_no_rows_error(storage)

    @property
    def ran_out(self) -> bool:
        """Whether iteration ends: the last batch completed a pass, or used up the rows."""
        return self._ends

    def select(self, storage: ReadView, batch_size: int, generator: np.random.Generator) -> Selection:
        """Return the rows of the recorded draw, or choose them.

        Raises:
            RowsChangedError: A row of the recorded draw was changed, or is not there any more.
        """
        if self.is_recorded:
            chosen = self._find_rows_again(storage)
        else:
            self._seen = storage.changes.seen, storage.window.last  # before any value is read
            chosen = self._sampler.select(storage, batch_size, generator)
        if self.is_followed:
            # The same generator is used, and must not depend on how many numbers the sampler took.
            self._draws.numbers((self.number, 0), _STEPS)
        return chosen

    def sample_again(
        self, storage: ReadView, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Replace the rows of a selection that were overwritten while they were read.

        Raises:
            RowsChangedError: It is a recorded draw.
        """
        if self.is_recorded:
            chosen = self._find_rows_again(storage)
        else:
            chosen = self._sampler.sample_again(storage, selection, generator)
        if self.is_followed:
            self._draws.numbers((self.number, 0), _STEPS)
        return chosen

    def _find_rows_again(self, storage: ReadView) -> Selection:
        recorded = self._log.read(self.number)
        selection, self._ends = recorded.selection, recorded.ends
        self._seen = recorded.changes, recorded.last
        there = storage.stored.holds(selection.ids) & ~self._find_changed(storage, selection.ids)
        if there.all():
            return selection
        if self._missing == "raise":
            raise _build_changed_error(recorded.number, selection.ids[~there])
        if not there.any():
            raise _build_changed_error(recorded.number, selection.ids)
        info = {key: values[there] for key, values in selection.info.items()}
        marks = tuple(replace(mark, flags=mark.flags[there]) for mark in selection.marks)
        return replace(selection, ids=selection.ids[there], info=info, marks=marks)

    def _find_changed(self, storage: ReadView, ids: IntArray) -> Array:
        """Return which rows were changed after the draw saw them. Shapes `(n,)`."""
        assert storage.path is not None, "consumers have a store on disk"
        if self._changed is None:
            self._changed = ChangedRows(storage.disk, storage.path)
        return self._changed.find(ids, self._seen[0], storage.changes.pending)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Record a new draw, before its batch is returned; check that no row of a recorded one was changed.

        Raises:
            RowsChangedError: A row of the recorded draw was changed while it was read.
            StorageError: The disk failed; the draw does not count.
        """
        if self.is_recorded:
            changed = self._find_changed(storage, selection.ids)
            if changed.any():
                raise _build_changed_error(self.number, selection.ids[changed])
            return
        state, former = self._state, self._state.progress
        changes, last = self._seen
        try:
            self._sampler.hand_out(storage, selection)
            self._ends = self._sampler.ran_out
            self._log.append(selection, changes=changes, last=last, progress=state.progress, ends=self._ends)
        except BaseException:
            if self._log.count == self.number:  # not if Ctrl-C came after it was recorded
                state.note_progress(former)
                self._sampler.attach(storage)
            raise

    def rewind(self, storage: ReadView) -> None:
        """Discard selections that were made after the last one that was returned."""
        self._sampler.rewind(storage)

    def __repr__(self) -> str:
        return repr(self._sampler)


def cut_lost_draws(log: DrawLog, storage: ReadView) -> None:
    """Remove draws of rows and changes that a power failure has taken; a writer's opening has done it."""
    last = storage.stored.last  # first: a follower finds out whether a writer runs
    if (newest := storage.changes.newest_record) is not None:
        log.cut_after(last, newest)


def _build_changed_error(number: int, ids: IntArray) -> RowsChangedError:
    which = ", ".join(map(str, ids[:5].tolist())) + (", ..." if ids.size > 5 else "")
    return RowsChangedError(
        f"draw {number} had rows that were changed, deleted or overwritten since: {ids.size} (id {which})",
        hint="missing='skip' leaves them out",
    )
