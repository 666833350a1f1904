"""Find odd episodes: compare the measures of each with those of its peers, and say what is odd about it.

Used by buffers and by the command line, with facts that were read before. Nothing is stored: what is usual
changes as peers come, while the measures of an episode (`expstore.trajectories.measures`) do not.

Distances are robust deviations: the median absolute deviation of the peers, scaled to a standard deviation.
There are three of them, and the score of an episode is the largest of all its measures:

- The episode against the episodes written about the same time. It must differ from what is usual for its own
  source, too, so that robots may differ.
- The median of the episodes of its source around it, against all episodes of that time; with the spread of
  the sources. It finds a source whose episodes are all odd, none of them much.
- The median of the episodes of its policy version around it, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.trajectories.measures import COMPONENTS, HASHES, Floats, find_copies

#: Episodes with at least this score are odd.
THRESHOLD = 6.0
#: The peers of an episode are those of its block of this many episodes, and of two blocks on each side.
_BLOCK, _BLOCKS = 64, 2
#: The largest number of episodes around one whose median stands for its source, and for its version.
_AROUND = 25
#: Sources and versions with fewer episodes are not compared; fewer of them do not tell which one is odd.
_FEW, _FEW_GROUPS = 8, 3
#: The distance of a source or version counts this much: one that is odd by chance would make 25 episodes odd.
_CAUTION = 0.8
#: A deviation that a quarter of the peers exceed counts at most this much.
_COMMON = 3.0
#: A value that stands still in more steps than this is an event, such as a gripper: its jumps are usual.
_EVENT = 0.5
#: Episodes are copies if at least this share of their hashes is equal.
_ALIKE = 0.75
#: Part of what is added before a logarithm that is lost where it is subtracted again.
_ROUNDING = 1e-9
#: A median absolute deviation times this is the standard deviation of normal numbers.
_ROBUST = 1.4826
#: The variance of the median of n normal numbers is their variance times this, divided by n.
_MEDIAN = np.pi / 2
#: Windows of which medians are computed at once.
_WINDOWS = 4096


@dataclass(frozen=True, slots=True)
class Scale:
    """How the values of one measure are compared.

    Args:
        floor: The smallest distance that counts as one deviation, so that the slightest difference does not
            count where most episodes are equal.
        part: A deviation is at least this part of the standard deviation of the peers. 1 where several values
            may be usual, such as the returns with and without a success.
        low: Whether smaller values are odd, too.
        log: Whether ratios are compared rather than differences.
        groups: Whether sources and versions matter.
    """

    floor: float = 0.0
    part: float = 1.0
    low: bool = True
    log: bool = False
    groups: bool = True


#: The scales of the measures; that of a user's measures is `Scale()`.
SCALES: Mapping[str, Scale] = {
    "length": Scale(0.1, log=True),
    "return": Scale(),
    "positive": Scale(0.1),
    "level": Scale(),
    "spread": Scale(0.1, log=True),
    "still": Scale(0.1, 1 / 3, low=False),
    "change": Scale(0.1, 1 / 3, low=False, log=True),
    "jump": Scale(0.1, 1 / 3, low=False, log=True),
    "not_finite": Scale(0.001, 1 / 3, low=False),
    "pause": Scale(0.5, low=False, log=True),
    "breaks": Scale(0.15, 1 / 3, low=False),
    "short": Scale(0.1, 1 / 3, low=False, groups=False),
    "copy": Scale(0.1, 1 / 3, low=False, groups=False),
    "status": Scale(0.1),
}


class Measure(NamedTuple):
    """One measured number: its measure, and of which value of which field it is ("" and 0 for none)."""

    name: str
    field: str = ""
    component: int = 0


class Measures:
    """The measures of one episode; its fact has them by name and field, here they are one array.

    Args:
        layout: Measure, field ("" for none) and number of values, of each part of `values`.
        values: The measures of all fields; null is NaN. Shape `(n,)`.
        copy: What `fingerprint` returned for the episode; "" for nothing.
        length: How many steps were measured.
    """

    __slots__ = ("copy", "layout", "length", "values")

    def __init__(self, layout: Layout, values: Floats, copy: str, length: int) -> None:
        self.layout, self.values, self.copy, self.length = layout, values, copy, length

    def width(self, name: str, field: str) -> int:
        """Return how many values of a field a measure has; 0 for none."""
        return next((count for *names, count in self.layout if names == [name, field]), 0)


#: Measure, field and number of values, of each part of the values of an episode.
Layout = tuple[tuple[str, str, int], ...]


def scale_of(measure: Measure) -> Scale:
    """Return how the values of a measure are compared."""
    return SCALES.get(measure.name, Scale())


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """What is known of episodes, in the order in which they were written.

    Args:
        measures: The measures of each.
        length: Number of steps. Shape `(n,)`.
        returns: Sums of rewards; NaN without rewards. Shape `(n,)`.
        ended: Whether the episode was neither truncated nor cut. Shape `(n,)`.
        source: Names of the sources; None: the unnamed one.
        version: Versions of the policy; None if not known.
    """

    measures: Sequence[Measures]
    length: IntArray
    returns: Floats
    ended: NDArray[np.bool_]
    source: Sequence[str | None]
    version: Sequence[int | None]


class Oddness(NamedTuple):
    """What is odd about one episode.

    Args:
        score: In robust deviations.
        measure: What was measured.
        by: "episode", "source" or "version": what differs from its peers.
        value: The measured value; of a source or version the median.
        usual: The median of the peers.
        copied: Number of the episode of which this one is a copy; -1 for none.
    """

    score: float
    measure: Measure
    by: str
    value: float
    usual: float
    copied: int


def rank(episodes: Episodes) -> list[Oddness]:
    """Return what is oddest about each episode, in their order."""
    count = len(episodes.length)
    if not count:
        return []
    measures, raw, copied = _build_table(episodes)
    scales = [scale_of(one) for one in measures]
    floor, part, low, grouped = (
        np.array([getattr(one, name) for one in scales]) for name in ("floor", "part", "low", "groups")
    )
    values, offset = _take_logs(raw, scales)
    middle, deviation = _compare(values, floor, part)
    away = values - middle
    counted = ~_find_events(measures, raw)
    score, at, by = np.full(count, -1.0), np.zeros(count, int), np.zeros(count, int)
    shift = {"episode": away}
    distances: dict[str, Floats] = {}
    for name, labels in (("source", episodes.source), ("version", episodes.version)):
        groups = _find_groups(labels, copied < 0)
        shift[name], noise, whole = _compare_groups(away, groups, floor, name == "version")
        distances[name] = np.where(grouped, _CAUTION * shift[name] / noise, 0.0)
        if name == "source":
            own = away - np.where(grouped, whole, 0.0)
    distances["episode"] = np.where(np.abs(own) < np.abs(away), own, away) / deviation
    for number, distance in enumerate(distances.values()):
        distance = np.where(counted & ~np.isnan(distance), np.where(low, np.abs(distance), distance), 0.0)
        top = distance.argmax(1)
        found = distance[np.arange(count), top]
        better = found > score
        score[better], at[better], by[better] = found[better], top[better], number
    ways, result = list(distances), []
    for number in range(count):
        column, way = at[number], ways[by[number]]
        usual = middle[number, column]
        value = usual + shift[way][number, column]
        if scales[column].log:
            found = np.exp([value, usual]) - offset[column]
            value, usual = np.where(found < _ROUNDING * offset[column], 0.0, found)
        odd = Oddness(
            float(score[number]), measures[column], way, float(value), float(usual), int(copied[number])
        )
        result.append(odd)
    return result


def locate(rows: Any, odd: Oddness) -> tuple[int, int] | None:
    """Return the first and the last row of an episode that show what is odd; None if all do.

    Args:
        rows: The measured field. Shape `(steps, ...)`. Times of the steps for "pause"; which steps break for
            "breaks"; which have a value that is not finite for "not_finite".
        odd: What is odd.
    """
    values = np.asarray(rows).reshape(len(rows), -1)
    if odd.measure.name in ("breaks", "not_finite"):
        first = int(np.argmax(values.any(1)))
        return first, first
    if values.shape[1] <= COMPONENTS:
        values = values[:, [odd.measure.component]]
    same = np.r_[False, (values[1:] == values[:-1]).all(1), False]
    if odd.measure.name == "still":
        edges = np.flatnonzero(~same)
        longest = int(np.argmax(np.diff(edges)))
        return int(edges[longest]), int(edges[longest + 1]) - 1
    if odd.measure.name in ("jump", "pause"):
        with np.errstate(invalid="ignore", over="ignore"):
            steps = np.linalg.norm(np.diff(values.astype(np.float64), axis=0), axis=1)
        step = int(np.argmax(np.nan_to_num(steps, posinf=0.0))) + 1 if len(steps) else 0
        return step, step
    return None


def describe(odd: Oddness, length: int, status: str, where: tuple[int, int] | None, name: str) -> str:
    """Say in words what is odd about an episode.

    Args:
        odd: What is odd.
        length: Number of steps of the episode.
        status: How it ended.
        where: What `locate` returned, as steps.
        name: Name of the measured value, such as "action[1]".
    """
    value, usual, (kind, *_) = odd.value, odd.usual, odd.measure
    at = "" if where is None else f" at step {where[0]}"
    if where is None:
        run = ""
    elif where[1] == length - 1:
        run = f", from step {where[0]} on" if where[0] else ", from the first to the last"
    else:
        run = f", from step {where[0]} to step {where[1]}"
    texts = {
        "length": f"{value:.0f} steps; usually {usual:.0f}",
        "return": f"return {value:.4g}; usually {usual:.4g}",
        "short": f"{status} after {length} steps; usually {length / max(1e-9, 1 - value):.0f} steps",
        "positive": f"reward above 0 in {value:.0%} of the steps; usually in {usual:.0%}",
        "level": f"mean of {name} {value:.4g}; usually {usual:.4g}",
        "spread": f"standard deviation of {name} {value:.4g}; usually {usual:.4g}"
        if value
        else f"{name} has one value in all steps; its standard deviation is usually {usual:.4g}",
        "still": f"{name} does not change in {value:.0%} of the steps{run}; usually in {usual:.0%}",
        "change": f"{name} changes by {value:.4g} a step; usually by {usual:.4g}",
        "jump": f"{name} jumps by {value:.4g}{at}; usually by {usual:.4g} at most",
        "not_finite": f"a value is NaN or infinite in {value:.1%} of the steps, first{at}",
        "pause": f"{value:.3g} s pass between two steps{at}; usually {usual:.3g} s at most",
        "breaks": f"{value:.0f} steps do not begin with the next observation before, first{at}",
    }
    return texts.get(kind, f"{kind} {value:.4g}; usually {usual:.4g}")


def read_measures(facts: Iterable[object]) -> list[Measures | None]:
    """Return the measures in facts of episodes; None for others: anybody may write a fact of this name.

    Args:
        facts: What `expstore.buffers.measuring` writes.
    """
    layouts: dict[Layout, Layout] = {}  # equal ones become one object: there are few, and many episodes
    return [_read_measures(fact, layouts) if isinstance(fact, dict) else None for fact in facts]


def _read_measures(fact: Mapping[str, Any], layouts: dict[Layout, Layout]) -> Measures | None:
    parts: list[tuple[str, str, int]] = []
    numbers: list[float] = []
    try:
        for name, found in fact.items():
            if isinstance(found, dict):
                for field, some in found.items():
                    parts.append((name, field, len(some)))
                    numbers += some
            elif name not in ("length", "copy"):
                parts.append((name, "", 1))
                numbers.append(found)
        values, copy, length = np.array(numbers, np.float64), str(fact.get("copy", "")), fact.get("length")
        if not parts or values.shape != (len(numbers),) or len(bytes.fromhex(copy)) not in (0, 2 * HASHES):
            return None
    except (TypeError, ValueError, OverflowError):
        return None
    layout = tuple(parts)
    layout = layouts.setdefault(layout, layout)
    return Measures(layout, values, copy, length if isinstance(length, int) else 0)


def tabulate(found: Sequence[Measures | None]) -> tuple[list[Measure], Floats]:
    """Return the measures of episodes, and their values; NaN for none. Shape `(n, measures)`."""
    members: dict[Layout, list[int]] = {}
    for number, one in enumerate(found):
        if one is not None:
            members.setdefault(one.layout, []).append(number)
    layouts = [[Measure(*part[:2], at) for part in layout for at in range(part[2])] for layout in members]
    places = {
        name: place for place, name in enumerate(dict.fromkeys(name for one in layouts for name in one))
    }
    result = np.full((len(found), len(places)), np.nan)
    for names, numbers in zip(layouts, members.values(), strict=True):
        if names:
            rows = [one.values for number in numbers if (one := found[number]) is not None]
            result[np.ix_(numbers, [places[name] for name in names])] = np.stack(rows)
    return list(places), result


def find_copied(found: Sequence[Measures | None]) -> tuple[IntArray, Floats]:
    """Return the earlier episode of which each is a copy, or -1, and how like it is. Shapes `(n,)`."""
    partner, alike = find_copies(["" if one is None else one.copy for one in found])
    partner[alike < _ALIKE] = -1
    return partner, alike


def _build_table(episodes: Episodes) -> tuple[list[Measure], Floats, IntArray]:
    """Return the measures, their values, and the copied episodes. Shapes `(n, measures)`, `(n,)`."""
    places, table = tabulate(episodes.measures)
    partner, alike = find_copied(episodes.measures)
    columns: dict[str, Floats] = {
        "length": episodes.length.astype(np.float64),
        "return": episodes.returns,
        "short": _find_short(episodes.length, episodes.ended),
        "copy": np.where(partner < 0, 0.0, alike),
    }
    measures = [*(Measure(name) for name in columns), *places]
    return measures, np.concatenate([np.stack(list(columns.values()), axis=1), table], axis=1), partner


def _find_short(length: IntArray, ended: NDArray[np.bool_]) -> Floats:
    """Return how much shorter than its peers an episode is that did not end by itself. Shapes `(n,)`."""
    usual = np.empty(len(length))
    for here, near in _blocks(len(length)):
        usual[here] = np.median(length[near])
    return np.where(ended, 0.0, np.maximum(0.0, 1.0 - length / usual))


def find_offsets(raw: Floats) -> Floats:
    """Return what is added to values before their logarithms are compared, so that 0 has one."""
    offset = 0.1 * quantile(raw, 0.5)
    offset[offset == 0] = 0.1 * np.nan_to_num(raw).mean(0)[offset == 0]
    offset[~(offset > 0)] = 1.0
    return offset


def _take_logs(raw: Floats, scales: Sequence[Scale]) -> tuple[Floats, Floats]:
    """Return logarithms where ratios are compared, and what was added before."""
    offset = find_offsets(raw)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where([one.log for one in scales], np.log(raw + offset), raw), offset


def _compare(values: Floats, floor: Floats, part: Floats) -> tuple[Floats, Floats]:
    """Compare episodes with those around them.

    Returns:
        The median and the deviation of the peers of each episode; a larger one if there are few. Shapes
        `(n, measures)`.
    """
    middle, deviation = np.empty_like(values), np.empty_like(values)
    for here, near in _blocks(len(values)):
        peers = values[near]
        middle[here] = center = quantile(peers, 0.5)
        away = np.abs(peers - center)
        middling = np.maximum(floor, _ROBUST * quantile(away, 0.5))
        squares = np.nan_to_num(away) ** 2
        common = np.maximum(part * np.sqrt(squares.mean(0)), quantile(away, 0.75) / _COMMON)
        deviation[here] = np.maximum(middling, common) * (1 + _FEW / len(peers))
    deviation[deviation == 0] = np.inf
    return middle, deviation


def _blocks(count: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks of episodes, each with the slice of its peers."""
    for start in range(0, count, _BLOCK):
        reach = _BLOCKS * _BLOCK
        yield slice(start, start + _BLOCK), slice(max(0, start - reach), start + _BLOCK + reach)


def _find_events(measures: Sequence[Measure], raw: Floats) -> NDArray[np.bool_]:
    """Return which measures are changes of values that mostly stand still. Shape `(measures,)`."""
    usual = dict(zip(measures, quantile(raw, 0.5), strict=True))
    return np.array([
        one.name in ("change", "jump") and usual.get(one._replace(name="still"), 0.0) > _EVENT
        for one in measures
    ])  # fmt: skip


def _find_groups(labels: Sequence[object], counted: NDArray[np.bool_]) -> list[IntArray]:
    """Return the episodes of each label that has enough of them, without those of None."""
    groups: dict[object, list[int]] = {}
    for number in np.flatnonzero(counted).tolist():
        groups.setdefault(labels[number], []).append(number)
    return [np.array(one) for label, one in groups.items() if len(one) >= _FEW and label is not None]


def _compare_groups(
    away: Floats, groups: Sequence[IntArray], floor: Floats, lasting: bool
) -> tuple[Floats, Floats, Floats]:
    """Compare groups of episodes with the episodes of other groups around the same time.

    Args:
        away: Distances from the peers. Shape `(n, measures)`.
        groups: The groups. Shapes `(m,)`.
        floor: The smallest deviations of the measures. Shape `(measures,)`.
        lasting: Whether a group is odd as a whole, if it differs by more than groups usually do. If not,
            it is odd at times when it differs by more than at its most usual time.

    Returns:
        How far the median of the episodes of the group around each is from that of the peers, the deviation
        of such medians, and the median of the whole group. All are 0, and the deviation 1, without groups to
        compare. Shapes `(n, measures)`.
    """
    near, noise, whole = np.zeros_like(away), np.ones_like(away), np.zeros_like(away)
    if len(groups) < _FEW_GROUPS:
        return near, noise, whole
    size = np.full((len(away), 1), _AROUND)
    for group in groups:
        whole[group] = quantile(away[group], 0.5)
        size[group] = count = min(_AROUND, len(group))
        windows = np.lib.stride_tricks.sliding_window_view(away[group], count, axis=0)
        medians = np.concatenate([
            quantile(np.moveaxis(windows[start : start + _WINDOWS], -1, 0), 0.5)
            for start in range(0, len(windows), _WINDOWS)
        ])  # fmt: skip
        near[group] = medians[np.clip(np.arange(len(group)) - count // 2, 0, len(medians) - 1)]
    shift, within = np.empty_like(away), np.empty_like(away)
    for here, peers in _blocks(len(away)):
        shift[here] = near[here] - quantile(near[peers], 0.5)
        within[here] = np.maximum(floor, _ROBUST * quantile(np.abs(away[peers] - near[peers]), 0.5))
    within[within == 0] = np.inf
    between: Floats = np.zeros(away.shape[1])
    if lasting:
        usual = np.stack([whole[group[0]] for group in groups])
        spread = _ROBUST * quantile(np.abs(usual - quantile(usual, 0.5)), 0.5)
        chance = np.stack([_MEDIAN * quantile(within[group], 0.5) ** 2 / len(group) for group in groups])
        between = np.maximum(0.0, spread**2 - quantile(chance, 0.5))
    else:
        for group in groups:
            own = shift[group]
            best = np.nan_to_num(np.abs(own), nan=np.inf).argmin(0)
            moved = own - np.take_along_axis(own, best[None], axis=0)
            shift[group] = np.where(np.abs(moved) < np.abs(own), moved, own)
    return shift, np.sqrt(_MEDIAN * within**2 / size + between), whole


def quantile(values: Floats, share: float) -> Floats:
    """Return a quantile along the first axis, among the values that are not NaN; NaN if all are."""
    ordered = np.sort(values, axis=0)
    count = len(values) - np.isnan(values).sum(0)
    place = np.maximum(0, np.floor(share * (count - 1))).astype(np.int64)
    found: Floats = np.take_along_axis(ordered, place[None], axis=0)[0]
    return found
