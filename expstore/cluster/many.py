"""Draw from several stores as from one: how many rows of each, and with what probability.

`Many.fetch` is the whole path: it draws several batches at once, with one draw of each member, and cuts them
into batches. It sends no requests and keeps no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

from expstore.buffers.member import Draw, Part
from expstore.cluster.cluster_limit import ClusterLimit
from expstore.cluster.shard import Shard, does_not_answer
from expstore.cluster.shard_set import ShardSet
from expstore.cluster.shares import derive_seed, draw_counts, draw_rest, find_factors
from expstore.core.values import IntArray, Mass
from expstore.errors import ExpStoreError, NotReadyError, RemoteError, SchemaError, StateError
from expstore.schema.schema import Field, Schema
from expstore.wire.codec import Codec, join_columns

#: The entry of batches that names the shards that did not answer.
MISSING = "shards_missing"
#: The columns that are changed when rows of several shards are joined.
_ID, _WEIGHT = "id", "priority_weight"


class ShardDraw(NamedTuple):
    """How a batch was drawn: row i of shard k with chance assumed[k] / total * w_i / masses[k].total.

    `total` is the sum of all values of `assumed`.

    Args:
        number: Number of the draw.
        assumed: The mass of each shard by which the batch was divided, by the shard's number; 0 if it took no
            part.
        masses: What each shard drew from; None if it took no part, or if its sampler has no mass.
        missing: Numbers of the shards that did not answer.
    """

    number: int
    assumed: dict[int, float]
    masses: dict[int, Mass | None]
    missing: tuple[int, ...]


class Drawn(NamedTuple):
    """A batch.

    Args:
        rows: The rows.
        draw: How they were drawn.
    """

    rows: TensorDict
    draw: ShardDraw


class _Wanted(NamedTuple):
    """Batches that are wanted: which rows, rows of a batch, and the sequence of draws."""

    draw: Draw
    size: int
    lane: int


class _Plan(NamedTuple):
    """Which shards take part in some batches, and the rows of each. Columns are in the order of `shards`."""

    shards: tuple[Shard, ...]
    assumed: NDArray[np.float64]
    counts: IntArray  # units of each batch and shard
    unit: int
    may_lack: bool = False  # rows may be used up meanwhile: a batch with fewer rows is right


class Many:
    """Several stores, from which batches are drawn as from one.

    Threads: one at a time. Crashes: batch k follows from the seed, k, the batch size, the number of batches
    drawn together, and the rows, so the batches of shards at rest continue after any restart.

    Args:
        shards: The shards. New ones take part from the next call on, others end with it.
        seed: Seed of the draws.
        ask: Returns which rows batches of a size are drawn from, without seed and number.
        shares: Fixed share of each shard, or none for equal ones; None for shares in proportion to the masses
            of the shards.
        skips: Whether to draw from the other shards if some do not answer.
        limit: Holds draws to a rate limiter; None: there is none.
    """

    def __init__(
        self,
        shards: ShardSet,
        seed: int,
        ask: Callable[[int], Draw],
        *,
        shares: Sequence[float] | None,
        skips: bool,
        limit: ClusterLimit | None,
    ) -> None:
        self._shards, self._seed, self._ask = shards, seed, ask
        self._shares = shares
        self._skips, self._limit = skips, limit
        #: Whether the last batch was of a sampler that draws rows once.
        self.draws_once = False
        #: Numbers of the shards that have ended the pass of such a sampler, while others have not.
        self.passed: set[int] = set()
        self._joint: _Joint | None = None
        self._seeds: dict[tuple[int, int], int] = {}

    def fetch(self, lane: int, first: int, count: int, size: int) -> list[Drawn]:
        """Draw batches.

        Args:
            lane: Which sequence of draws; each has its own random numbers.
            first: Number of the first batch.
            count: Number of batches. Of a sampler that draws rows once, one is drawn; it has fewer rows at
                the end of a pass, or if no more are left.
            size: Number of rows of each batch.

        Raises:
            NotReadyError: No shard has rows that can be drawn, or the limit's timeout passed.
            RemoteError: A shard does not answer; with `skips`, none does.
            StateError: The sampler has no mass, the batch size is not a multiple of the length of slices, or
                there are other shards than shares.
        """
        wanted = _Wanted(self._ask(size), size, lane)
        self._shards.refresh()
        for _ in range(2 * len(self._shards.all) + 2):
            if self._limit is not None:
                self._limit.wait_to_sample(count * size)
            plan = self._plan(self._shards.all, first, count, wanted)
            self.draws_once = plan.may_lack
            parts = self._draw(plan, first, wanted)
            if parts is not None:
                return self._build(plan, parts, first)
        raise NotReadyError("the rows of the shards are removed faster than they can be drawn")

    # -- dividing batches among shards -------------------------------------------------------------

    def _plan(self, shards: tuple[Shard, ...], first: int, count: int, wanted: _Wanted) -> _Plan:
        self._weigh([shard for shard in _find_live(shards) if shard.mass is None], wanted)
        live = _find_live(shards)
        if not any(shard.mass is None or shard.mass.total > 0 for shard in live):
            self._weigh(live, wanted)  # rows may have been written since
            live = _find_live(shards)
        masses = [shard.mass for shard in live]
        if self._shares is None and None in masses:
            shard = live[masses.index(None)]
            raise StateError(
                f"sampler {wanted.draw.sampler!r} of shard {shard.number} ({shard.place}) has no mass: "
                "it remembers which rows it has drawn, or draws by other rules than weights of rows",
                hint='draw from the shards in fixed shares: connect(..., by="member")',
            )
        totals = [0.0 if mass is None else mass.total for mass in masses]
        if self._shares is not None:
            shares = dict(zip(shards, self._share(len(shards)), strict=True))
            totals = [shares[shard] for shard in live]
        elif any(mass is not None and mass.left is not None for mass in masses):
            return self._plan_rest(shards, live, first, wanted)
        by_shard = dict(zip(live, totals, strict=True))
        assumed = np.array([by_shard.get(shard, 0.0) for shard in shards])
        if not assumed.sum() > 0:
            raise NotReadyError(
                f"none of the {len(live)} shards has rows that can be drawn", hint="extend() them first"
            )
        units = {shard.unit for shard in live if shard.mass is None or shard.mass.total > 0} or {1}
        unit = units.pop()
        if units or wanted.size % unit:
            raise StateError(
                f"the batch size must be a multiple of the length of slices, got {wanted.size} and {unit}"
            )
        counts = draw_counts(self._seed, (first, wanted.lane), count, wanted.size // unit, assumed)
        return _Plan(shards, assumed, counts, unit)

    def _plan_rest(
        self, shards: tuple[Shard, ...], live: Sequence[Shard], first: int, wanted: _Wanted
    ) -> _Plan:
        """Plan one batch of a sampler that draws rows once: without replacement from what all have left.

        A shard whose pass is over waits for the others; then a pass over all of them begins. Which shards
        have ended theirs is what this client has drawn: clients that share a pass see its end at different
        times.

        Raises:
            NotReadyError: No row is left.
            StateError: The shards have different samplers under the name.
        """
        masses = {shard: mass for shard in live if (mass := shard.mass) is not None}
        if any(mass.left is None for mass in masses.values()):
            raise StateError(
                f"the shards have different samplers under the name {wanted.draw.sampler!r}",
                hint="forget_sampler() it, then name_sampler() it for all of them",
            )

        def count(shard: Shard) -> int:
            mass = masses.get(shard)
            if mass is None:
                return 0
            return mass.left or (0 if shard.number in self.passed else int(mass.total))

        rows = np.array([count(shard) for shard in shards], np.int64)
        if not rows.any():
            self.passed.clear()
            rows = np.array([count(shard) for shard in shards], np.int64)
        if not rows.any():
            raise NotReadyError(
                f"none of the {len(live)} shards has rows that can be drawn", hint="extend() them first"
            )
        counts = draw_rest(self._seed, (first, wanted.lane), wanted.size, rows)
        return _Plan(shards, rows.astype(np.float64), counts[None], 1, may_lack=True)

    def _share(self, count: int) -> Sequence[float]:
        """Return the fixed share of each shard.

        Raises:
            StateError: There are other shards than shares.
        """
        shares = self._shares or [1.0] * count
        if len(shares) != count:
            raise StateError(
                f"p= has the shares of {len(shares)} shards, and there are {count} now",
                hint="connect again with a share for each, or leave p= out for equal shares",
            )
        return shares

    def _weigh(self, shards: Sequence[Shard], wanted: _Wanted) -> None:
        weights = {shard: shard.weigh(self._address(shard, wanted), wanted.size).result for shard in shards}
        self._collect(weights, wanted)

    def _address(self, shard: Shard, wanted: _Wanted) -> Draw:
        """Return which rows a shard draws; every shard draws by a seed of its own."""
        if isinstance(wanted.draw.sampler, str):
            return wanted.draw  # a sampler that is kept under a name has its own seed
        key = wanted.lane, shard.number
        if key not in self._seeds:
            self._seeds[key] = derive_seed(self._seed, *key)
        return wanted.draw._replace(seed=self._seeds[key])

    # -- drawing -------------------------------------------------------------------------------------

    def _draw(self, plan: _Plan, first: int, wanted: _Wanted) -> dict[int, Part] | None:
        """Return the rows of each shard by its place; None if one had none, or did not answer: plan again."""
        waits: dict[Shard, Callable[[], Any]] = {}
        rows_of = (plan.counts.sum(axis=0) * plan.unit).tolist()
        for shard, rows in zip(plan.shards, rows_of, strict=True):
            draw = self._address(shard, wanted)
            if rows:
                numbered = draw if draw.seed is None else draw._replace(number=first)
                waits[shard] = shard.begin(numbered, rows, may_lack=plan.may_lack)
            elif not shard.is_down:
                waits[shard] = shard.weigh(draw, wanted.size).result
        results = self._collect(waits, wanted, may_lack=plan.may_lack)
        if results is None:
            return None
        parts = {
            place: part
            for place, shard in enumerate(plan.shards)
            if isinstance(part := results.get(shard), Part)
        }
        if plan.may_lack:
            plan.counts[0] = [parts[k].rows if k in parts else 0 for k in range(len(plan.shards))]
            ended = (plan.counts[0] > 0) & (plan.counts[0] >= plan.assumed)
            self.passed |= {shard.number for shard, is_end in zip(plan.shards, ended, strict=True) if is_end}
        return parts or None

    def _collect(
        self, waits: Mapping[Shard, Callable[[], Any]], wanted: _Wanted, *, may_lack: bool = False
    ) -> dict[Shard, Any] | None:
        """Return the results of all shards; None if a shard had no rows, or did not answer and is skipped.

        Args:
            waits: Functions that return the results.
            wanted: The batches.
            may_lack: Whether to return the results of the others then: rows that are drawn once would be
                lost.

        Raises:
            ExpStoreError: Another error of a shard, after all shards have answered.
        """
        results: dict[Shard, Any] = {}
        errors: list[BaseException] = []
        is_whole = True
        for shard, wait in waits.items():
            try:
                results[shard] = wait()
            except NotReadyError as exc:
                if self._shares is not None or exc.kind == "rate_limited":
                    errors.append(exc)
                is_whole = is_whole and may_lack
                shard.mass = None if may_lack else Mass(0.0, 0)
            except ExpStoreError as exc:
                is_whole = is_whole and may_lack
                if shard.is_removed:
                    continue
                if self._skips and does_not_answer(exc):
                    shard.note_down(self._address(shard, wanted), wanted.size)
                else:
                    errors.append(exc)
        if errors:
            raise errors[0]
        return results if is_whole else None

    # -- joining rows --------------------------------------------------------------------------------

    def _build(self, plan: _Plan, parts: Mapping[int, Part], first: int) -> list[Drawn]:
        shards = plan.shards
        masses = [parts[k].mass if k in parts else shard.mass for k, shard in enumerate(shards)]
        masses = [mass if plan.assumed[k] > 0 else None for k, mass in enumerate(masses)]
        factors = find_factors(plan.assumed, masses)
        bounds = {k: _find_bounds(part, plan.counts[:, k], plan.unit) for k, part in parts.items()}
        pieces = [
            [(k, int(bounds[k][b]), int(bounds[k][b + 1])) for k in parts if plan.counts[b, k]]
            for b in range(len(plan.counts))
        ]
        numbers = [shard.number for shard in shards]
        joint = self._joint
        if joint is None or not joint.fits(parts, numbers):
            joint = self._joint = _Joint(parts, numbers)
        wholes = joint.join(parts, [piece for batch in pieces for piece in batch], factors)
        missing = tuple(shard.number for shard in shards if shard.is_down)
        assumed = dict(zip(numbers, plan.assumed.tolist(), strict=True))
        facts = assumed, dict(zip(numbers, masses, strict=True)), missing
        ends = np.cumsum([0, *(sum(stop - start for _, start, stop in batch) for batch in pieces)]).tolist()
        drawn = []
        for place in range(len(pieces)):
            rows = joint.codec.build([whole[ends[place] : ends[place + 1]] for whole in wholes])
            if self._skips:
                rows.set_non_tensor(MISSING, list(missing))
            drawn.append(Drawn(rows, ShardDraw(first + place, *facts)))
        return drawn


def _find_live(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards that answer.

    Raises:
        RemoteError: None answers.
    """
    live = [shard for shard in shards if not (shard.is_down or shard.is_removed)]
    if not live:
        raise RemoteError(
            f"none of the {len(shards)} shards answers", kind="unreachable",
            hint="they are asked in the background until they do: try again later",
        )  # fmt: skip
    return live


def _find_bounds(part: Part, counts: IntArray, unit: int) -> IntArray:
    """Return where the rows of each batch begin in a shard's rows, and where the last ends.

    Args:
        part: The rows of the shard.
        counts: Number of units of each batch. Shape `(batches,)`.
        unit: Number of rows of a unit; slices of short trajectories have fewer.
    """
    ends: IntArray = np.concatenate([[0], np.cumsum(counts)]) * unit
    if unit > 1 and part.rows != ends[-1]:
        stops = np.concatenate([[0], part.find_stops()])
        ends = stops[ends // unit]
    return ends


class _Joint:
    """Join columns of several shards.

    Args:
        parts: Rows of the shards, by the shard's place.
        numbers: Number of the shard at each place.

    Raises:
        SchemaError: The shards have different fields.
    """

    def __init__(self, parts: Mapping[int, Part], numbers: Sequence[int]) -> None:
        self._codecs, self._numbers = {place: part.codec for place, part in parts.items()}, numbers
        place, first = next(iter(self._codecs.items()))
        self.names = list(first.names)
        known = _describe(first)
        for other, codec in self._codecs.items():
            if (found := _describe(codec)) != known:
                names = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
                raise SchemaError(
                    f"field {names[0]!r} of shard {numbers[place]} is {known.get(names[0])}, and of shard "
                    f"{numbers[other]} {found.get(names[0])}",
                    hint="give all shards the same fields",
                )
        self._places = {
            k: [codec.names.index(name) for name in self.names] for k, codec in self._codecs.items()
        }
        self.codec = Codec(Schema([
            Field(entry.key, entry.dtype, (2,)) if name == _ID else entry
            for name, entry in zip(self.names, first.schema.fields, strict=True)
        ]))  # fmt: skip

    def fits(self, parts: Mapping[int, Part], numbers: Sequence[int]) -> bool:
        """Return whether these shards, with these fields, can be joined."""
        same = all(self._codecs.get(place) is part.codec for place, part in parts.items())
        return same and self._numbers == numbers

    def join(
        self,
        parts: Mapping[int, Part],
        pieces: Sequence[tuple[int, int, int]],
        factors: NDArray[np.float64] | None,
    ) -> list[Any]:
        """Return the columns of all pieces, one after another.

        Args:
            parts: Rows of the shards, by the shard's place.
            pieces: Place of the shard, first row, and the row after the last, of each piece.
            factors: Factor of each shard's `priority_weight`, by its place.
        """
        wholes = []
        for place, name in enumerate(self.names):
            columns = {k: part.columns[self._places[k][place]] for k, part in parts.items()}
            if name == _WEIGHT and factors is not None:
                columns = {k: (column * factors[k]).astype(column.dtype) for k, column in columns.items()}
            if name == _ID:
                columns = {
                    k: np.stack([np.full(len(column), self._numbers[k], np.int64), column], axis=1)
                    for k, column in columns.items()
                }
            wholes.append(join_columns([columns[k][start:stop] for k, start, stop in pieces]))
        return wholes


def _describe(codec: Codec) -> dict[str, str]:
    return {name: str(entry) for name, entry in zip(codec.names, codec.schema.fields, strict=True)}
