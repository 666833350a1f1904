"""A sampler whose draws are written down, and come again from the log.

`RecordedDraws` stands between a consumer's `Sampling` and the sampler of the user. Everything that depends on
whether a draw is new or recorded is here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from expstore.core.draw_state import DrawState
from expstore.core.draws import Draws
from expstore.core.values import GROUP_ID, Array, IntArray, Key, Selection
from expstore.errors import NotReadyError
from expstore.samplers.base import Sampler
from expstore.samplers.filter import Filter
from expstore.samplers.given_order import Missing, build_changed_error, find_present
from expstore.samplers.token_budget import TokenBudget
from expstore.storages.columns.sample_counts import ConsumerCounts
from expstore.storages.format.draw_log import DrawLog, Use
from expstore.storages.format.row_changes import ChangedRows
from expstore.storages.read_view import ReadView

#: The redraw number for the random numbers of transforms that read other steps; draws of rows never reach it.
_STEPS = 1 << 41


class RowsGoneError(Exception):
    """Rows were deleted before their draw was recorded: other rows are to be drawn."""


class RecordedDraws(Sampler):
    """Draw by another sampler, and record each draw; give recorded draws again.

    Args:
        sampler: The sampler.
        log: Where draws are recorded.
        draws: The consumer's random numbers.
        missing: What happens to rows of a recorded draw that are not there any more, or were changed.
        rank: Which part of each draw is returned, from 0.
        world: Number of parts. With more than one, all draws that are returned were recorded before.
        decides: Whether it chooses rows; otherwise another process does, and records the draws.
    """

    def __init__(
        self,
        sampler: Sampler,
        log: DrawLog,
        draws: Draws,
        *,
        missing: Missing,
        rank: int,
        world: int,
        decides: bool,
    ) -> None:
        super().__init__()
        self._sampler, self._log, self._draws = sampler, log, draws
        self._state = DrawState(progress=log.progress)  # which has the sampler's progress
        sampler.keep_progress_in(self._state)
        self._missing, self._rank, self._world = missing, rank, world
        self._decides = decides
        self._seen = 0  # the newest change when the rows were chosen
        self._changed: ChangedRows | None = None
        #: Number of the present draw, and whether it was recorded before; the consumer sets them.
        self.number, self.is_recorded = 0, False
        self._ends = False
        #: Whether what follows the choice of rows uses random numbers.
        self.is_followed = False
        self.prioritized, self.windowed = sampler.prioritized, sampler.windowed
        self._use = Use.LEASED if sampler.leases else Use.NONE
        if sampler.counts_draws:
            self._use |= Use.COUNTED
        self._counted = -1  # number of draws in the counts that the sampler has; -1: unknown

    @property
    def reads(self) -> frozenset[Key]:
        """The fields that the sampler reads."""
        return self._sampler.reads

    @property
    def filter(self) -> Filter | None:  # type: ignore[override]
        """Evaluates `where` and `weight` of the sampler; None if another process chooses rows."""
        return self._sampler.filter if self._decides else None

    def keep_to_split(self, storage: ReadView) -> None:
        """Do nothing: the sampler does so, and recorded draws come again as they were."""

    def limit_tokens(self, budget: TokenBudget | None) -> None:
        """Let the sampler draw as many rows as fit; recorded draws have done so.

        Raises:
            ArgumentError: The sampler would lose the rows that do not fit.
        """
        self._sampler.limit_tokens(budget)

    def attach(self, storage: ReadView) -> None:
        """Continue where the last recorded draw ended."""
        if self._decides:
            self._counted = -1
            self._count(storage)
            self._sampler.attach(storage)

    def _count(self, storage: ReadView) -> None:
        """Give a sampler that counts the counts of all recorded draws, unless it has them."""
        if self._sampler.counts_draws and self._counted != self._log.count:
            counts = ConsumerCounts(storage.geometry, storage.stored.last, *self._log.count_rows())
            self._sampler.count_in(counts)
            self._counted = self._log.count

    def detach(self) -> None:
        """Stop evaluating the filter, and counting for the consumer."""
        if self._decides:
            self._sampler.detach()
        if self._sampler.counts_draws:
            self._sampler.count_in(None)

    def refresh(self, storage: ReadView) -> None:
        """Evaluate `where` and `weight` for all rows and episodes as they are now."""
        self._sampler.refresh(storage)

    def count_left(self, storage: ReadView) -> int:
        """Return the number of rows that can still be drawn, at least 1 while recorded draws come again."""
        if self.is_recorded:
            return 1
        if self._use & Use.COUNTED:
            self._count(storage)
        return self._sampler.count_left(storage)

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
            self._seen = storage.changes.seen  # before any value is read
            chosen = self._sampler.choose(storage, batch_size, None, generator)
        return self._limit(storage, chosen) if self.is_followed else chosen

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
            chosen = self._sampler.choose(storage, selection.ids.size, selection, generator)
        return self._limit(storage, chosen) if self.is_followed else chosen

    def decide(self, storage: ReadView, batch_size: int) -> None:
        """Choose the rows of the next draw, and record it.

        Raises:
            NotReadyError: No row can be drawn.
            StorageError: The disk failed; the draw does not count.
        """
        if self._log.follow() > self.number:  # Ctrl-C came after it was written
            return
        self.is_recorded = False
        if not self.count_left(storage):
            raise self.build_no_rows_error(storage)
        while True:
            generator = self._draws.numbers((self.number, 0))
            try:
                self.hand_out(storage, self.select(storage, batch_size, generator))
                return
            except RowsGoneError:
                self._sampler.rewind(storage)

    def _limit(self, storage: ReadView, chosen: Selection) -> Selection:
        """Let step transforms and new goals read no row that is appended after a draw was recorded.

        They use the same generator, which must not depend on how many numbers the sampler took.
        """
        self._draws.numbers((self.number, 0), _STEPS)
        return chosen if self.is_recorded else replace(chosen, newest=storage.stored.last)

    def _find_rows_again(self, storage: ReadView) -> Selection:
        recorded = self._log.read(self.number)
        selection, self._ends = recorded.selection, recorded.ends
        self._seen = recorded.changes
        if self._world > 1:
            selection = self._take_part(selection)
        draw, changed = f"draw {recorded.number}", partial(self._find_changed, storage)
        return find_present(storage, selection, draw, self._missing, changed=changed)

    def _take_part(self, selection: Selection) -> Selection:
        """Return the rows of this rank: whole groups, slices, or rows, as evenly as possible."""
        ids = selection.ids
        if (groups := selection.info.get(GROUP_ID)) is not None:
            starts = np.flatnonzero(np.diff(groups, prepend=-1))
        else:
            starts = _find_slices(selection) if self.windowed else np.arange(ids.size)
        mine = np.array_split(starts, self._world)[self._rank]
        at = np.searchsorted(starts, mine[0]) + mine.size if mine.size else starts.size
        stop = starts[at] if at < starts.size else ids.size
        return selection.take(slice(mine[0], stop) if mine.size else slice(0))

    def _find_changed(self, storage: ReadView, ids: IntArray) -> Array:
        """Return which rows were changed after the draw saw them. Shapes `(n,)`."""
        assert storage.path is not None, "consumers have a store on disk"
        if self._changed is None:
            self._changed = ChangedRows(storage.disk, storage.path)
        return self._changed.find(ids, self._seen, storage.changes.pending)

    def hand_out(self, storage: ReadView, selection: Selection) -> None:
        """Record a new draw, before its batch is returned; check that no row of a recorded one was changed.

        Raises:
            RowsChangedError: A row of the recorded draw was changed while it was read, or another step that
                was read for the batch was changed since the draw, unless missing rows are left out.
            RowsGoneError: A retention policy has deleted a row that the draw would lease.
            StorageError: The disk failed; the draw does not count.
        """
        if self.is_recorded:
            ids = selection.ids
            if selection.around and self._missing == "raise":
                ids = np.unique(np.concatenate([ids, *(ids.reshape(-1) for ids in selection.around)]))
            changed = self._find_changed(storage, ids)
            if changed.any():
                raise build_changed_error(f"draw {self.number}", ids[changed])
            return
        if not self._use & Use.LEASED:
            self._record(storage, selection)
            return
        with self._log.leasing():
            storage.follow()
            if not storage.stored.holds(selection.ids).all():
                raise RowsGoneError
            self._record(storage, selection)

    def _record(self, storage: ReadView, selection: Selection) -> None:
        state, former, stored = self._state, self._state.progress, storage.stored
        last = stored.last if selection.newest is None else selection.newest
        self._counted = -1  # an interruption may leave the rows counted or not
        try:
            self._sampler.hand_out(storage, selection)
            self._ends = self._sampler.ran_out
            self._log.append(
                selection,
                changes=self._seen,
                low=stored.low,
                last=last,
                progress=state.progress,
                ends=self._ends,
                use=self._use,
            )
            self._counted = self._log.count
        except BaseException:
            if self._log.count == self.number:  # not if Ctrl-C came after it was recorded
                state.note_progress(former)
                self._sampler.attach(storage)
            raise

    def check_rows(self, storage: ReadView, number: int) -> None:
        """Check that the draws from number `number` on that lease their rows can come again.

        Raises:
            RowsChangedError: A row of them is not there any more, and such rows are not to be left out.
        """
        if self._missing == "skip":
            return
        for draw, ids in reversed(list(self._log.read_leased(number))):
            find_present(storage, Selection(ids), f"draw {draw}", "raise")

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


def _find_slices(selection: Selection) -> IntArray:
    """Return the places at which slices begin; two that follow one another in an episode may be one."""
    steps = np.diff(selection.ids)
    begins = (steps != 0) & (steps != 1)  # padding repeats a row
    is_padded = any(mark.flat for mark in selection.marks)
    for mark in selection.marks:
        if not mark.new:
            begins |= mark.flags[1:]  # the first steps
        elif not mark.joins and not is_padded:
            begins |= mark.flags[:-1]  # the last steps; padding follows them
    return np.flatnonzero(np.concatenate([[True], begins]))
