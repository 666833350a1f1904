"""Find since when the episodes of a group differ from those before, and in which measures.

Used by buffers, which read the measures and write the result. Nothing is stored.

The statistic is a moving sum (MOSUM; Eichinger and Kirch 2018): the mean of a window of episodes after a
moment minus that of the window before it, in standard errors, with windows of 8 to 128 episodes.

- Values are clipped to the medians of blocks around them (Hampel 1974), and the noise is estimated from
  differences of neighbours (Rice 1984), so neither outliers nor the change itself widen it.
- The statistic of each measure is divided by its own usual size over the life of the store, and its median is
  taken off: a drift, such as a learning curve, does not count as a change, and neither does a curve that
  always swings.
- A group must change itself, and more than the episodes of other groups at the same time do (a difference of
  differences). If all change, it is a change of all episodes and not of each group.
- A policy version must differ from the episodes before it and from those after it, in the same direction; of
  the newest version the return must fall.
- A found change explains its episodes: weaker changes of other groups are searched without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.trajectories.measures import Floats
from expstore.trajectories.odd import Measure, find_offsets, quantile, scale_of

#: Changes with at least this score are listed. In stores in which nothing changes scores reach about 5.
THRESHOLD = 6.0
#: Moments with a smaller score are not examined.
_CANDIDATE = 5.0
#: Smallest number of episodes of a window; longer ones are twice as long each.
_SHORTEST = 8
#: Windows are compared at this many moments at most, the newest ones: the older a change, the longer the
#: windows that show it.
_MOMENTS = 512
#: A change moves a measure by at least this many standard deviations of episodes.
_EFFECT = 1.0
#: Number of episodes before a change, and after it, that are compared.
_NEAR = 64
#: Values may be this many standard deviations from the medians around them.
_CLIP = 5.0
#: The noise is estimated within blocks of this many episodes.
_BLOCK = 8
#: A group has at least this many episodes; a version this many.
_FEW, _FEW_OF_VERSION = 24, 8
#: The noise is at least this part of the standard deviation of all values of the group.
_LEAST_NOISE = 0.05
#: Fewer windows do not say what is usual for the statistic.
_USUAL = 6
#: Fewer other episodes than this at the same time are no comparison.
_FEW_OTHERS = 4
#: A return that rises by this many standard errors has improved.
_RISE = 3.0
#: A value that does not change in this share of the steps stands still.
_STANDS = 0.5
#: Most measures that are named.
_REASONS = 4
#: Medians are computed of this many values.
_SAMPLE = 1024
#: The median, and the 25% quantile, of absolute normal numbers times this is their standard deviation.
_ROBUST, _QUARTER = 1.4826, 3.138

Kind = Literal["drop", "change", "improvement"]
By = Literal["all", "source", "version", "split", "lane", "fact"]


class Group(NamedTuple):
    """Episodes that have a value in common.

    Args:
        by: What they have in common.
        name: Name of the fact; "" for none.
        value: The value as text; None: they have none.
        members: Their numbers, ascending. Shape `(n,)`.
    """

    by: By
    name: str
    value: str | None
    members: IntArray


class Shift(NamedTuple):
    """How one measure changed.

    Args:
        measure: What was measured.
        score: The difference in standard errors; positive if the measure rises.
        before: The median before; of shares (measures that are 0 or 1) the mean.
        after: The same of the changed episodes.
        low: The 5% quantile before.
        high: The 95% quantile before.
    """

    measure: Measure
    score: float
    before: float
    after: float
    low: float
    high: float


class Change(NamedTuple):
    """A change of a group of episodes.

    Args:
        group: Which episodes changed.
        members: The changed ones. Shape `(n,)`.
        before: The last episodes of the group before them. Shape `(m,)`.
        is_over: Whether later episodes of the group are as before.
        score: The largest score of a measure.
        kind: "drop" of the return; "improvement" if the return of all episodes, or of those of a policy
            version, rises; otherwise "change".
        shifts: The measures that changed, the strongest first.
        widths: Number of measured values by measure and field.
    """

    group: Group
    members: IntArray
    before: IntArray
    is_over: bool
    score: float
    kind: Kind
    shifts: tuple[Shift, ...]
    widths: Mapping[tuple[str, str], int]


def describe(change: Change) -> str:
    """Say in words what changed, such as "source env-3: return 200 -> 35, length 74 -> 19 steps"."""
    by, name, value, _ = change.group
    who = {
        "all": "all episodes",
        "version": f"policy version {value}",
        "lane": f"trajectory {value}",
        "fact": f"{name} = {value}",
    }.get(by, f"{by} {value}")
    if value is None and by != "all":
        who = f"episodes without {name or by}"
    told: dict[str, str] = {}
    for shift in sorted(change.shifts, key=_place):
        kind, field, component = shift.measure
        own = kind if kind in ("return", "length", "status", "copy") else field or kind
        is_seen = f"{shift.before:.3g}" != f"{shift.after:.3g}"
        if own not in told and is_seen and not (kind == "status" and shift.after < shift.before):
            single = change.widths.get((kind, field), 1) == 1
            told[own] = _describe(shift, field + ("" if single else f"[{component}]"), len(change.members))
    return f"{who}: " + ", ".join(list(told.values())[:_REASONS])


def _place(shift: Shift) -> int:
    """Return which measures are named first: the return, ends, and values that stand still."""
    if shift.measure.name == "still" and shift.after < _STANDS:
        return 3
    return {"return": 0, "status": 1, "still": 2}.get(shift.measure.name, 3)


def _describe(shift: Shift, name: str, count: int) -> str:
    """Say how one measure changed."""
    kind, before, after = shift.measure.name, shift.before, shift.after
    move = f"{before:.3g} -> {after:.3g}"
    if kind == "level" and not shift.low <= after <= shift.high:
        former = " to ".join(dict.fromkeys(f"{edge:.3g}" for edge in (shift.low, shift.high)))
        return f"mean of {name} outside its former range: {after:.3g}, before {former}"
    texts = {
        "return": f"return {move}",
        "length": f"length {before:.0f} -> {after:.0f} steps",
        "status": f"{round(after * count):,} of {count:,} episodes end by {name} (before {before:.0%})",
        "copy": f"{after:.0%} of the episodes are copies of earlier ones (before {before:.0%})",
        "fact": f"{name} {move}",
        "positive": f"reward above 0 in {after:.0%} of the steps (before {before:.0%})",
        "level": f"mean of {name} {move}",
        "spread": f"standard deviation of {name} {move}",
        "still": f"{name} does not change in {after:.0%} of the steps (before {before:.0%})",
        "change": f"mean change of {name} in a step {move}",
        "jump": f"largest change of {name} in a step {move}",
        "not_finite": f"NaN or infinity in {after:.1%} of the steps (before {before:.1%})",
        "pause": f"longest pause between two steps {before:.3g} s -> {after:.3g} s",
        "breaks": f"steps that do not begin with the next observation before {move}",
    }
    return texts.get(kind, f"{kind} {move}")


class _Peak(NamedTuple):
    """Where the statistic of a group is largest.

    Args:
        score: Its absolute value.
        members: The members of the group that were searched. Shape `(n,)`.
        begin: The first of them after the moment.
        end: The first one that is as before again, otherwise `n`.
        near: Number of episodes before the moment, and after it, that show the change.
    """

    score: float
    members: IntArray
    begin: int
    end: int
    near: int


def find_changes(
    values: Floats, measures: Sequence[Measure], groups: Sequence[Group], limit: int
) -> list[Change]:
    """Return the changes of groups of episodes, the strongest first and improvements last.

    Args:
        values: Measures of episodes, in the order in which they began; NaN if not known. Shape
            `(episodes, measures)`.
        measures: What they are; among them `Measure("return")`.
        groups: The groups. Groups with the same `by` and `name` have no members in common.
        limit: Largest number of changes.
    """
    if len(values) < _FEW:
        return []
    return _Finder(values, measures, groups).find(limit)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Episodes that are searched, and those with which they are compared.

    Args:
        group: What they have in common.
        level: Clipped values of all episodes, without the levels of the groups. Shape `(episodes, measures)`.
        noise: Standard deviations of the group. Shape `(measures,)`.
        usual: Standard deviations within groups; None: the group is compared with its own past only.
        rises: Whether the return must rise, or must not; None: no matter.
    """

    group: Group
    level: Floats
    noise: Floats
    usual: Floats | None
    rises: bool | None = None


#: Where windows before moments begin, the moments, and where windows after them end.
_Edges = tuple[IntArray, IntArray, IntArray]


class _Finder:
    """Find the changes in one table of episodes; see `find_changes`."""

    def __init__(self, values: Floats, measures: Sequence[Measure], groups: Sequence[Group]) -> None:
        self._widths = Counter(one[:2] for one in measures)
        vary = np.nan_to_num(_vary(values)) > 0
        vary[measures.index(Measure("return"))] = True
        self._raw = values[:, vary]
        self._measures = [one for one, keep in zip(measures, vary, strict=True) if keep]
        scales = [scale_of(one) for one in self._measures]
        self._floor = np.array([scale.floor for scale in scales])
        self._return = self._measures.index(Measure("return"))
        self._logs = self._raw.copy()
        offset, logs = find_offsets(_thin(self._raw)), np.array([scale.log for scale in scales])
        with np.errstate(invalid="ignore", divide="ignore"):
            self._logs[:, logs] = np.log(self._raw[:, logs] + offset[logs])
        self._groups = [one for one in groups if one.by != "version" and len(one.members) >= _FEW]
        self._versions = [
            one for one in groups if one.by == "version" and len(one.members) >= _FEW_OF_VERSION
        ]
        #: Episodes that no change explains, and the sums of their values by what groups have in common.
        self._free = np.ones(len(values), np.bool_)
        self._sums: dict[tuple[str, str], _Sums] = {}

    def find(self, limit: int) -> list[Change]:
        """Return the changes; see `find_changes`."""
        parts: list[_Part] = []
        for by in dict.fromkeys(one[:2] for one in self._groups):
            parts += self._prepare([one for one in self._groups if one[:2] == by])
        half = len(self._raw) / 2
        lasting = [one for one in self._groups if one.by == "source" and np.ptp(one.members) > half]
        everything = Group("all", "", None, np.arange(len(self._raw)))
        level, noise = self._remove_levels(lasting)[:2]
        found = self._explain(parts, self._search_versions(level, noise), limit)
        for rises in (False, True):
            part = _Part(everything, level, noise, None, rises)
            found += self._explain([part], [], limit - len(found))
        found.sort(key=lambda one: (one.kind == "improvement", -one.score))
        return found

    def _prepare(self, groups: Sequence[Group]) -> list[_Part]:
        """Return groups that have no episodes in common, ready to be searched."""
        level, _, own = self._remove_levels(groups)
        usual = np.sqrt(np.mean(np.square(own), axis=0))
        return [_Part(group, level, one, usual) for group, one in zip(groups, own, strict=True)]

    def _remove_levels(self, groups: Sequence[Group]) -> tuple[Floats, Floats, list[Floats]]:
        """Return clipped values, of groups without their medians; their noise, and that of each group."""
        values = _clip(self._logs)
        noise = []
        for group in groups:
            own = _clip(self._logs[group.members])
            own -= np.nan_to_num(quantile(_thin(own), 0.5))
            values[group.members] = own
            noise.append(_find_noise(own, self._floor))
        return values, _find_noise(values, self._floor), noise

    def _explain(
        self, parts: Sequence[_Part], peaks: Sequence[tuple[_Peak, Group]], limit: int
    ) -> list[Change]:
        """Return the strongest change, then the strongest one without its episodes, and so on."""
        queue: list[tuple[_Peak, Group, _Part | None, int]] = [
            (peak, group, None, 0) for peak, group in peaks
        ]
        queue += [(peak, one.group, one, 0) for one in parts if (peak := self._search(one)) is not None]
        found: list[Change] = []
        while queue and len(found) < limit:
            queue.sort(key=lambda each: -each[0].score)
            peak, group, part, known = queue.pop(0)
            if part is not None and known < len(
                found
            ):  # later changes explain its episodes, or those of others
                again = self._search(part)
                if again is not None:
                    queue.append((again, group, part, len(found)))
            elif self._free[peak.members].all():
                change = self._build(group, peak)
                if change.shifts:
                    found.append(change)
                    self._free[change.members] = False
                    self._sums.clear()
                    queue += [] if part is None else [(peak, group, part, 0)]
        return found

    def _search(self, part: _Part) -> _Peak | None:
        """Return where the unexplained episodes of a group change most; None if not above the threshold."""
        members = part.group.members[self._free[part.group.members]]
        count = len(members)
        if count < _FEW:
            return None
        values = part.level[members]
        own, size = _Sums(values), _SHORTEST
        best: _Peak | None = None
        while size <= max(_SHORTEST, count / _USUAL):
            at = np.arange(size, count - size + 1, max(1, size // 4))[-_MOMENTS:]
            found, is_large = self._compare_at(part, members, own, (at - size, at, at + size), size / 2)
            if part.usual is None:
                found = self._standardize(found, count / size)
            found = np.where(is_large, found, 0.0)
            allowed = np.ones(len(at), np.bool_)
            if part.rises is not None:
                allowed = (found[:, self._return] > _RISE) == part.rises
            height = np.where(allowed, np.abs(found).max(1), 0.0)
            place = int(height.argmax())
            if height[place] > _CANDIDATE:
                column = int(np.abs(found[place]).argmax())
                line = found[:, column] * np.sign(found[place, column])
                back = np.flatnonzero((np.arange(len(at)) > place) & (line <= -height[place] / 2))
                begin, end = _refine(values[:, column], int(at[place]), size), count
                if back.size:
                    lowest = back[0] + line[back[0] :][:8].argmin()
                    end = max(begin + 1, _refine(values[:, column], int(at[lowest]), size))
                score = float(height[place])
                if part.usual is not None:
                    near = min(_NEAR, end - begin)
                    first = max(0, begin - max(_SHORTEST, near))
                    edges = np.array([first]), np.array([begin]), np.array([begin + near])
                    exact, is_large = self._compare_at(part, members, own, edges, 3)
                    score = float(np.abs(exact[0, column]) * is_large[0, column])
                if score > (THRESHOLD if best is None else best.score):
                    best = _Peak(score, members, begin, end, max(_NEAR, size))
            size *= 2
        return best

    def _compare_at(
        self, part: _Part, members: IntArray, own: _Sums, edges: _Edges, least: float
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return by how many standard errors windows of a group differ, more than the others do meanwhile.

        Args:
            part: The group.
            members: The searched episodes of it.
            own: Their sums.
            edges: Where the windows before the moments begin, the moments, and where the windows after them
                end, counted in the group. Shapes `(n,)`.
            least: Smallest number of values of a window.

        Returns:
            The statistic, and where the difference is not small. Shapes `(n, measures)`.
        """
        begin, at, end = edges
        before, after = own.window(begin, at), own.window(at, end)
        move, variance = _compare(before, after, part.noise, least)
        found, is_large = move / np.sqrt(variance), np.abs(move) >= _EFFECT * part.noise
        if part.usual is None:
            return found, is_large
        middle = members[np.minimum(at, len(members) - 1)]
        sums = self._sums.get(part.group[:2])
        if sums is None:
            level = np.where(self._free[:, None], part.level, np.nan)
            sums = self._sums[part.group[:2]] = _Sums(level)
        others = _compare(
            sums.window(members[begin], middle) - before,
            sums.window(middle, members[end - 1] + 1) - after,
            part.usual, _FEW_OTHERS,
        )  # fmt: skip
        apart = (move - others[0]) / np.sqrt(variance + others[1])
        smaller = np.minimum(np.abs(apart), np.abs(found))
        return np.where(np.sign(apart) == np.sign(found), np.sign(found) * smaller, 0.0), is_large

    def _standardize(self, statistic: Floats, lives: float) -> Floats:
        """Take the median off where it has the same sign, and divide by the usual size; not of short lives.

        A return that falls all the time is a change: a fall is compared with the usual rises.
        """
        if lives < _USUAL:
            return statistic
        center = np.median(statistic, axis=0)
        same = np.sign(center) == np.sign(statistic)
        away = np.abs(statistic) - np.where(same, np.minimum(np.abs(center), np.abs(statistic)), 0.0)
        result: Floats = np.sign(statistic) * away / np.maximum(1.0, _QUARTER * quantile(away, 0.25))
        line = statistic[:, [self._return]]
        usual = np.nan_to_num(_QUARTER * quantile(np.where(line > 0, line, np.nan), 0.25)[0])
        result[:, self._return] = np.where(line < 0, line / max(1.0, usual), result[:, [self._return]])[:, 0]
        return result

    def _search_versions(self, level: Floats, noise: Floats) -> list[tuple[_Peak, Group]]:
        """Return the versions that differ from the episodes before and after them, in the same direction.

        The newest one counts if its return falls: other measures, and rises, follow the learning.
        """
        if not self._versions:
            return []
        count, sums = len(level), _Sums(level)
        first, last = (np.array([one.members[end] for one in self._versions]) for end in (0, -1))
        own = [level[one.members] for one in self._versions]
        inside = np.stack(
            [_Sums(one).window(np.array([0]), np.array([len(one)]))[:, 0] for one in own], axis=1
        )
        before = sums.window(np.maximum(0, first - _NEAR), first)
        after = sums.window(last + 1, np.minimum(count, last + 1 + _NEAR))
        moves = [_compare(side, inside, noise, _FEW_OF_VERSION) for side in (before, after)]
        scores = [
            np.where(np.abs(move) < _EFFECT * noise, 0.0, move / np.sqrt(variance))
            for move, variance in moves
        ]
        falls = (after[0, :, self._return] < _FEW_OF_VERSION) & (scores[0][:, self._return] < 0)
        scores[1][falls, self._return] = scores[0][
            falls, self._return
        ]  # the newest version: none is after it
        same = np.sign(scores[0]) == np.sign(scores[1])
        least = np.where(same, np.minimum(*np.abs(scores)), 0.0)
        if len(self._versions) >= _USUAL:
            least /= np.maximum(1.0, _ROBUST * quantile(least, 0.5))
        found = []
        for group, score in zip(self._versions, least.max(1).tolist(), strict=True):
            if score > THRESHOLD:
                earlier = np.arange(max(0, group.members[0] - _NEAR), group.members[0])
                members = np.concatenate([earlier, group.members])
                found.append((_Peak(score, members, len(earlier), len(members), _NEAR), group))
        return found

    def _build(self, group: Group, peak: _Peak) -> Change:
        """Return the change at a peak, with the measures that changed."""
        members = peak.members[peak.begin : peak.end]
        before = peak.members[max(0, peak.begin - peak.near) : peak.begin]
        both = np.concatenate([before, members[: peak.near]])
        values = _clip(self._logs[both])
        noise = _find_noise(values, self._floor)
        sums, edges = _Sums(values), np.array([[0], [len(before)], [len(both)]])
        move, variance = _compare(sums.window(*edges[:2]), sums.window(*edges[1:]), noise, 3)
        scores = np.where(np.abs(move) < _EFFECT * noise, 0.0, move / np.sqrt(variance))[0]
        shifts = []
        for column in np.argsort(-np.abs(scores)).tolist():
            if abs(scores[column]) >= THRESHOLD / 2:
                shifts.append(self._describe(column, float(scores[column]), before, members))
        rise = scores[self._return]
        kind: Kind = "drop" if rise < -_RISE else "change"
        if rise > _RISE and group.by in ("all", "version"):
            kind = "improvement"
        is_over = group.by != "version" and peak.end < len(peak.members)
        return Change(group, members, before, is_over, peak.score, kind, tuple(shifts), self._widths)

    def _describe(self, column: int, score: float, before: IntArray, after: IntArray) -> Shift:
        old, new = self._raw[before, column], self._raw[after, column]
        low, high = (float(quantile(old[:, None], share)[0]) for share in (0.05, 0.95))
        known = self._raw[:, column][~np.isnan(self._raw[:, column])]
        middle = np.nanmean if np.isin(known, (0.0, 1.0)).all() else np.nanmedian
        return Shift(self._measures[column], score, float(middle(old)), float(middle(new)), low, high)


class _Sums:
    """Numbers, sums and sums of squares of the values up to each episode.

    Args:
        values: The values; NaN is left out. Shape `(episodes, measures)`.
    """

    def __init__(self, values: Floats) -> None:
        known = ~np.isnan(values)
        fine = np.where(known, values, 0.0)
        self._sums = np.zeros((3, len(values) + 1, values.shape[1]))
        for sums, each in zip(self._sums, (known, fine, fine * fine), strict=True):
            np.cumsum(each, axis=0, out=sums[1:])

    def window(self, begin: IntArray, end: IntArray) -> Floats:
        """Return the sums of windows. Shape `(3, windows, measures)`."""
        return self._sums[:, end] - self._sums[:, begin]


def _compare(before: Floats, after: Floats, noise: Floats, least: float) -> tuple[Floats, Floats]:
    """Return the differences of means, and their variances: infinite where a window has too few values.

    Args:
        before: Sums of the windows before. Shape `(3, windows, measures)`.
        after: The same after.
        noise: The smallest standard deviation that counts. Shape `(measures,)`.
        least: Smallest number of values of a window.
    """
    count = np.maximum(1, np.stack([before[0], after[0]]))
    means = np.stack([before[1], after[1]]) / count
    spread = np.maximum(noise**2, (before[2] + after[2] - (count * means**2).sum(0)) / count.sum(0))
    usable = (np.minimum(before[0], after[0]) >= least) & (noise > 0)
    return means[1] - means[0], np.where(usable, spread * (1 / count).sum(0), np.inf)


def _thin(values: Floats) -> Floats:
    """Return at most `_SAMPLE` evenly spaced rows, or a few more."""
    return values[:: max(1, len(values) // _SAMPLE)]


def _clip(values: Floats) -> Floats:
    """Return values without outliers: clipped to what the medians of three around them allow."""
    count = len(values)
    blocks = -(-count // 3)
    padded = np.full((blocks * 3, values.shape[1]), np.nan)
    padded[:count] = values
    block = padded.reshape(blocks, 3, -1)
    one, other, last = block[:, 0], block[:, 1], block[:, 2]
    middle = np.fmax(np.fmin(one, other), np.fmin(np.fmax(one, other), last))
    low, high = middle.copy(), middle.copy()
    for here, there in ((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None))):
        np.fmin(low[here], middle[there], out=low[here])
        np.fmax(high[here], middle[there], out=high[here])
    noise = np.nan_to_num(_find_steps(values))
    reach = np.where(noise > 0, _CLIP * noise, np.inf)
    clipped: Floats = np.clip(block, (low - reach)[:, None], (high + reach)[:, None])
    return clipped.reshape(len(padded), -1)[:count]


def _find_steps(values: Floats) -> Floats:
    """Return the noise by differences of neighbours; NaN without values. Shape `(measures,)`."""
    first = np.arange(0, len(values) - 1, max(1, len(values) // _SAMPLE))
    steps: Floats = _ROBUST / np.sqrt(2) * quantile(np.abs(values[first + 1] - values[first]), 0.5)
    return steps


def _find_noise(values: Floats, floor: Floats) -> Floats:
    """Return the standard deviations of values around a level that may change. Shape `(measures,)`."""
    blocks = max(1, len(values) // _BLOCK)
    starts = np.linspace(0, max(0, len(values) - _BLOCK), min(blocks, _SAMPLE // _BLOCK)).astype(np.int64)
    block = values[np.minimum(starts[None] + np.arange(_BLOCK)[:, None], len(values) - 1)]
    spread = np.sort(_vary(block) * (_BLOCK / (_BLOCK - 1)), axis=0)
    usual = spread[: max(1, len(spread) - max(1, len(spread) // 16))]  # without the block of a change
    least = _LEAST_NOISE * np.sqrt(_vary(_thin(values)))
    found = [_find_steps(values), np.sqrt(_mean(usual)), least]
    noise: Floats = np.maximum(floor, np.nan_to_num(np.fmax.reduce(found)))
    return noise


def _mean(values: Floats) -> Floats:
    """Return the mean along the first axis of the values that are not NaN; NaN if all are."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(known, values, 0.0).sum(0) / known.sum(0)
    return mean


def _vary(values: Floats) -> Floats:
    """Return the variance along the first axis of the values that are not NaN; NaN if all are."""
    return _mean((values - _mean(values)) ** 2)


def _refine(values: Floats, near: int, size: int) -> int:
    """Return the first value after the moment that splits the values around a moment best."""
    low, high = max(0, near - size), min(len(values), near + size)
    some = np.nan_to_num(values[low:high] - np.nanmean(values[low:high]))
    place = np.arange(1, len(some))
    height = np.abs(np.cumsum(some)[:-1]) / np.sqrt(place * (len(some) - place))
    return low + 1 + int(height.argmax())
