"""Random sequences of operations on a buffer, compared with plain Python after every step.

The public API runs in a process that may be killed at any file operation: an interrupted operation must be
complete or absent, and everything else unchanged. A follower in another process reads along.
tests/crash/buffer_process.py runs the operations, expstore/testing/model.py has the expected state.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from expstore.core.draws import Draws
from expstore.testing.model import KEEP, Cell, Model, Row
from tests.crash.buffer_process import KINDS, SAMPLERS, SEED, Dead, Here, Host, fields_of
from tests.support.paths import find_memory

pytestmark = pytest.mark.index

cells = st.lists(
    st.builds(Cell, st.integers(0, 2), st.sampled_from(["", "", "", "t", "T"])), min_size=1, max_size=30
)
few = st.lists(st.builds(Cell, st.just(0), st.sampled_from(["", "t"])), min_size=1, max_size=4)
places = st.sets(st.integers(0, 60), min_size=1, max_size=6)
sources = st.sampled_from([None, "a", "b"])
fatal = st.one_of(
    st.none(), st.none(), st.tuples(st.integers(1, 60), st.sampled_from([None, None, 0.3, 0.8]))
)
Fatal = tuple[int, float | None] | None
#: What a batch says of its rows beside their fields.
ADDED = {("id",), ("index",), ("priority_weight",)}
#: What may be found: a model, or a function that makes one of what is seen.
MayBe = Model | Callable[[dict[str, Any]], Model]


def same(found: object, wanted: object, what: str) -> None:
    assert found == wanted, f"{what}: {found}, expected {wanted}"


def check(found: dict[str, Any], truth: Model, kind: str, seen_by: str = "writer") -> None:
    """Hold what is seen of a buffer against what should be there.

    Args:
        found: By `Hand.look`.
        truth: What should be there.
        kind: Of storage.
        seen_by: "writer"; "follower", which counts its own draws, and may have older priorities; or whoever
            reads a "version".
    """
    same(found["ids"], [*truth.rows], "ids")
    if seen_by != "follower":
        for name in ("last", "write_count", "draw")[: 3 if seen_by == "writer" else 2]:
            same(found[name], getattr(truth, name), name)
        same(found["len"], len(truth.rows), "len")
        assert found["largest"] in np.float32(truth.largest), f"largest priority {found['largest']}"
    rows, ordered = list(truth.rows.values()), truth.by_index
    if "names" in found:  # also where there are no rows
        wanted = {*fields_of([], kind), *((name,) for name in truth.late)}
        same(found["names"], wanted, "names of fields")
    check_fields(found["fields"], ordered, truth, kind)
    if rows:
        ids, episodes, steps, priorities = found["rows"]
        same(ids, [*truth.rows], "_row.id")
        same(episodes, [row.episode for row in rows], "_row.episode")
        same(steps, [row.step for row in rows], "_row.step")
        for id, value in zip(ids, priorities, strict=True):
            held = truth.priorities[id]
            assert seen_by == "follower" or value in np.float32(held), (
                f"priority of {id}: {value}, expected {held}"
            )
    if "episodes" in found and seen_by != "follower":
        told = {number: (held.length, held.status) for number, held in truth.episodes.items()}
        same(found["episodes"], told, "episodes")


def check_fields(found: dict[Any, Any], rows: Sequence[Row], truth: Model, kind: str) -> None:
    """Hold rows as they were read against what was written, bit by bit."""
    wanted = fields_of(rows, kind) if rows else {}
    wanted |= {(name,): np.array([held[row.id] for row in rows]) for name, (_, held) in truth.late.items()}
    if rows:
        same(found.keys() - ADDED, wanted.keys(), "fields")
    for key, values in wanted.items() if rows else ():
        if isinstance(values, list):
            same(found[key], values, f"{key}")
        else:
            assert found[key].dtype == values.dtype
            np.testing.assert_array_equal(found[key], values, err_msg=f"{key}")


class Life(stateful.RuleBasedStateMachine):
    """One store, from its first opening on."""

    kind: str
    folder: Path
    note: Callable[..., None] = staticmethod(lambda *_: None)
    numbers = itertools.count()

    @stateful.initialize(capacity=st.sampled_from([None, 7, 20, 33]), sampler=st.sampled_from([*SAMPLERS]))
    def begin(self, capacity: int | None, sampler: str) -> None:
        self.note()
        self.at = self.folder / f"{next(self.numbers)}"
        self.at.mkdir()
        self.truth, self.sampler = Model(capacity), sampler
        if capacity is None and sampler == "prioritized":
            self.sampler = "random"  # it has a tree of so many rows
        self.host: Any = self.open()
        self.truth.handle = 1
        self.follower: Host | None = None
        self.kills = 0

    def open(self, **killed: Any) -> Any:
        host = Here if self.kind == "memory" else Host
        return host(self.at, self.kind, self.truth.capacity, self.sampler, **killed)

    # -- acts ----------------------------------------------------------------------------------------

    def act(self, fatal: Fatal, after: MayBe, name: str, *given: Any) -> Any:
        """Have something done, or its process killed in the middle of it; return what it returned."""
        if fatal and self.kind != "memory":
            self.host.call("arm", *fatal)
        try:
            found = self.host.call(name, *given)
            if fatal and self.kind != "memory":
                self.host.call("arm", 0, None)
        except Dead:
            self.recover([after, self.truth])
            return None
        assert isinstance(after, Model) or name == "loads"
        if isinstance(after, Model):
            self.truth = after
        return found

    def recover(self, states: Sequence[MayBe]) -> None:
        """Find out what a killed process has left: one of these, for a follower and for the next writer."""
        self.kills += 1
        self.host.end()
        if self.follower is not None:
            self.match(self.follower.call("follow"), states, "follower")
        self.host = self.open()
        found = self.host.call("look")
        self.truth = self.match(found, states)
        self.take_versions(states)
        self.truth.largest = (found["largest"],)
        if found["rows"]:
            self.truth.priorities = {
                id: (value,) for id, value in zip(found["ids"], found["rows"][3], strict=True)
            }

    def match(self, found: dict[str, Any], states: Sequence[MayBe], seen_by: str = "writer") -> Model:
        wrong = []
        for state in states:
            try:
                truth = (state if isinstance(state, Model) else state(found)).copy()
                if seen_by == "writer":
                    truth.reopen()
                check(found, truth, self.kind, seen_by)
            except AssertionError as exc:
                wrong.append(str(exc))
            else:
                return truth
        raise AssertionError("neither with what was under way nor without it:\n" + "\n".join(wrong))

    def take_versions(self, states: Sequence[MayBe]) -> None:
        """Take over which versions there are: all that were, perhaps one more instead of the oldest."""
        told = [state for state in states if isinstance(state, Model)]
        known = {number: kept for state in told for number, kept in state.versions.items()}
        need = set.intersection(*(set(state.versions) for state in told))
        there = self.host.call("versions")
        assert need <= set(there) <= known.keys(), f"versions {there}, expected {need} of {[*known]}"
        self.truth.versions = {number: known[number] for number in there}

    @stateful.rule(cells=cells, source=sources, fatal=fatal)
    def extend(self, cells: list[Cell], source: str | None, fatal: Fatal) -> None:
        after = self.truth.copy()
        rows = after.extend(after.name_cells(cells), source)
        given = self.act(fatal, after, "extend", rows, source)
        assert given in (None, [row.id for row in rows]), f"extend gave {given}"

    @stateful.rule(cells=few, source=sources, fatal=fatal)
    def extend_by_few(self, cells: list[Cell], source: str | None, fatal: Fatal) -> None:
        self.extend(cells, source, fatal)

    @stateful.rule(source=sources, mark=st.sampled_from(["", "", "t", "T"]), fatal=fatal)
    def add(self, source: str | None, mark: str, fatal: Fatal) -> None:
        after = self.truth.copy()
        (row,) = after.extend(after.name_cells([Cell(0, mark)]), source)
        given = self.act(fatal, after, "add", row, source)
        assert given in (None, after.index_of(row.id)), f"add gave {given}"

    @stateful.precondition(lambda self: self.truth.rows and self.kind != "arrow")
    @stateful.rule(places=places, fatal=fatal)
    def put(self, places: set[int], fatal: Fatal) -> None:
        if self.kind == "packed":
            return
        after, chosen = self.truth.copy(), self.among(places)
        rows = after.change(chosen)
        index = [after.index_of(id) for id in chosen]
        late = {name: [held[id] for id in chosen] for name, (_, held) in after.late.items()}
        self.act(fatal, after, "put", index, rows, late)

    @stateful.precondition(lambda self: self.truth.rows and self.kind in ("flat", "memory", "arrow"))
    @stateful.rule(places=places, fatal=fatal)
    def patch(self, places: set[int], fatal: Fatal) -> None:
        after, chosen = self.truth.copy(), self.among(places)
        given = self.act(fatal, after, "patch", chosen, after.change(chosen))
        assert given in (None, len(chosen)), f"{given} rows changed, expected {len(chosen)}"

    @stateful.precondition(lambda self: self.truth.rows)
    @stateful.rule(places=places, value=st.floats(0.125, 8, width=32), gone=st.booleans(), fatal=fatal)
    def prioritise(self, places: set[int], value: float, gone: bool, fatal: Fatal) -> None:
        values = {id: float(np.float32(value + n)) for n, id in enumerate(self.among(places))}
        values |= {max(self.truth.last + 1, 1): 3.0} if gone else {}
        after = self.truth.copy()
        count = after.set_priorities(values)
        given = self.act(fatal, after, "prioritise", values)
        assert given in (None, count), f"{given} priorities set, expected {count}"

    def among(self, places: set[int]) -> list[int]:
        """Return some of the ids that can be read."""
        ids = [*self.truth.rows]
        return sorted({ids[place % len(ids)] for place in places})

    @stateful.precondition(lambda self: self.truth.rows)
    @stateful.rule(fatal=fatal)
    def sample(self, fatal: Fatal) -> None:
        truth, after = self.truth, self.truth.copy()
        after.draw += 1
        given = self.act(fatal, after, "sample")
        if given is None:
            return
        ids, fields = given
        assert set(ids) <= truth.rows.keys(), f"{ids} were drawn of {[*truth.rows]}"
        rows = [truth.rows[id] for id in ids]
        check_fields(fields, rows, truth, self.kind)
        first = next(iter(truth.rows))
        if self.sampler == "random" and [*truth.rows] == [*range(first, truth.last + 1)]:
            generator = Draws(SEED).generator(truth.draw)
            same(ids, generator.integers(first, truth.last + 1, len(ids)).tolist(), "the batch")
        if self.sampler == "without replacement" and len(rows) <= len(truth.rows):
            assert len({*ids}) >= len(ids) // 2, ids  # two passes may meet in one batch
        if self.sampler == "slices":
            breaks = sum((a.episode, a.step + 1) != (b.episode, b.step) for a, b in itertools.pairwise(rows))
            assert breaks <= 1, f"{breaks + 1} pieces, expected two slices: {rows}"

    @stateful.rule(name=st.sampled_from([*SAMPLERS]))
    def set_sampler(self, name: str) -> None:
        if self.truth.capacity is None and name == "prioritized":
            return
        self.sampler = name
        self.act(None, self.truth, "set_sampler", name)

    @stateful.rule(fatal=fatal)
    def empty(self, fatal: Fatal) -> None:
        after = self.truth.copy()
        after.empty()
        self.act(fatal, after, "empty")

    @stateful.precondition(
        lambda self: self.truth.capacity is None and self.truth.rows and self.kind != "memory"
    )
    @stateful.rule(back=st.integers(0, 40), fatal=fatal)
    def retain(self, back: int, fatal: Fatal) -> None:
        after, least = self.truth.copy(), self.truth.serial - back
        after.retain(least)
        self.act(fatal, after, "retain", least)

    @stateful.precondition(lambda self: self.truth.last and self.truth.write_count)
    @stateful.rule(
        name=st.sampled_from(["late", "other"]),
        value=st.integers(1, 9),
        later=st.sampled_from([None, -1]),
        fatal=fatal,
    )
    def add_or_drop_column(self, name: str, value: int, later: int | None, fatal: Fatal) -> None:
        after = self.truth.copy()
        if name in after.late:
            after.drop_column(name)
            self.act(fatal, after, "drop_column", name)
        else:
            after.add_column(name, value, later=later)
            self.act(fatal, after, "add_column", name, value, later)

    @stateful.precondition(lambda self: self.truth.write_count and self.kind != "memory")
    @stateful.rule(fatal=fatal)
    def dumps(self, fatal: Fatal) -> None:
        after = self.truth.copy()
        number = after.dumps()
        given = self.act(fatal, after, "dumps", KEEP)
        assert given in (None, number), f"version {given}, expected {number}"

    @stateful.precondition(lambda self: self.truth.versions)
    @stateful.rule(which=st.integers(0, KEEP - 1), fatal=fatal)
    def loads(self, which: int, fatal: Fatal) -> None:
        former = self.truth
        number = [*former.versions][which % len(former.versions)]
        last = self.act(fatal, lambda found: former.loads(number, found["last"]), "loads", number)
        if last is not None:
            self.truth = former.loads(number, last)

    @stateful.precondition(lambda self: self.kind != "memory")
    @stateful.rule()
    def ship(self) -> None:
        """Build a store of what has changed since the last time and of what was shipped before."""
        self.match(self.host.call("ship"), [self.truth])

    @stateful.rule(fatal=fatal)
    def flush(self, fatal: Fatal) -> None:
        after = self.truth.copy()
        after.mark_written()
        self.act(fatal, after, "flush")

    @stateful.precondition(lambda self: self.kind != "memory")
    @stateful.rule(fatal=fatal)
    def tick(self, fatal: Fatal) -> None:
        after = self.truth.copy()
        after.mark_written(largest=False)
        self.act(fatal, after, "tick")

    # -- ends of processes ---------------------------------------------------------------------------

    @stateful.precondition(lambda self: self.kind != "memory")
    @stateful.rule(fatal=fatal)
    def reopen(self, fatal: Fatal) -> None:
        after = self.truth.copy()
        self.act(fatal, after, "close")
        if self.truth is not after:
            return  # killed
        after.mark_written()
        self.host.end()
        self.host = self.open()
        after.reopen()
        same(self.host.call("recovered"), None, "what was recovered after a close")

    @stateful.precondition(lambda self: self.kind != "memory")
    @stateful.rule(while_opening=fatal)
    def kill(self, while_opening: Fatal) -> None:
        """Kill it between two calls; and perhaps the next one while it recovers."""
        self.host.end()
        if while_opening:
            at, torn = while_opening
            try:
                self.open(at=at, torn=torn).end()
            except Dead:
                self.kills += 1
            # An opening that came to its end, and was killed then, counts as one.
        self.recover([self.truth])

    # -- looks ---------------------------------------------------------------------------------------

    @stateful.precondition(lambda self: self.kind != "memory" and self.truth.write_count)
    @stateful.rule()
    def look_on(self) -> None:
        """Look through a follower, which sees what small extends wrote as soon as the background has."""
        if self.follower is None:
            self.follower = Host(self.at, self.kind, None, "random", "r")
        self.host.call("tick")
        self.truth.mark_written(largest=False)
        check(self.follower.call("follow"), self.truth, self.kind, "follower")

    @stateful.precondition(lambda self: self.truth.write_count)
    @stateful.rule(fatal=fatal)
    def sql(self, fatal: Fatal) -> None:
        truth = self.truth
        given = self.act(fatal, truth.copy(), "sql")
        if given is None:
            return
        rows, episodes = given
        same(rows, truth.sql_rows(), "SQL: rows")
        same(episodes, truth.sql_episodes(), "SQL: episodes")

    @stateful.invariant()
    def look(self) -> None:
        if hasattr(self, "host"):
            check(self.host.call("look"), self.truth, self.kind)

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        try:
            for number, kept in self.truth.versions.items():
                found = self.host.call("look_at_version", number)
                check(found, kept, self.kind, "version")
        finally:
            self.host.end()
            if self.follower is not None:
                self.follower.end()
            shutil.rmtree(self.at)


def live(kind: str, lives: int, steps: int, note: Callable[..., None], *, long: bool) -> None:
    """Live so many lives of so many acts."""
    settings = hypothesis.settings(
        hypothesis.settings.default,
        max_examples=lives,
        stateful_step_count=steps,
        derandomize=not long,
        phases=[*hypothesis.Phase] if long else [hypothesis.Phase.generate],  # shrinking takes minutes
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        deadline=None,
    )
    with tempfile.TemporaryDirectory(dir=find_memory()) as name:
        facts = {"kind": kind, "folder": Path(name), "note": staticmethod(note)}
        stateful.run_state_machine_as_test(type("Life", (Life,), facts), settings=settings)


@pytest.mark.guarantee("kill/whole")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_life(kind: str, count_cases: Callable[..., None]) -> None:
    live(kind, 5, 12, count_cases, long=False)


@pytest.mark.guarantee("kill/whole")
@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_lives(kind: str, count_cases: Callable[..., None]) -> None:
    live(kind, 250, 30, count_cases, long=True)
