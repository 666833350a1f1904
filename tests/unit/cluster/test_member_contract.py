"""Laws of a member that hold wherever its rows live: in this process, behind an owner, on a server."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import expstore
from expstore.buffers.member import Draw, Member, Part
from expstore.core.values import Mass
from expstore.disk.message_socket import MessageSocket
from expstore.errors import ExpStoreError, NotFoundError, NotReadyError, RemoteError, StateError
from tests.support.member_places import CANNOT, COUNT, LENGTH, PLACES, Killable, Local, Place, Shared
from tests.support.shard_rows import rows_of
from tests.support.waits import wait_until

ALPHA, BETA, EPS = 0.7, 0.5, 1e-8
PRIORITIZED = {"kind": "prioritized", "alpha": ALPHA, "beta": BETA}
#: What the fields of a drawn row are called besides those that were appended.
ENTRIES = {"id", "index", "episode_id", "priority_weight"}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Return a function that makes a place."""
    made: list[Place] = []

    def make_one(name: str | type[Place], **options: Any) -> Any:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append((PLACES[name] if isinstance(name, str) else name)(folder, **options))
        return made[-1]

    yield make_one
    for place in made:
        place.end()


#: For tests that take seconds on a server, whose first query starts a process.
SERVED_SLOWLY = ["local", "shared", pytest.param("served", marks=pytest.mark.slow)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, make: Callable[..., Place]) -> Place:
    return make(request.param)


def draw(member: Member, wanted: Draw, rows: int) -> Part:
    return member.begin(wanted, rows)()


def mass_of(member: Member, wanted: Draw) -> Mass:
    mass = member.weigh(wanted, 40).mass
    assert mass is not None
    return mass


def column(part: Part, name: str) -> NDArray[Any]:
    return np.asarray(part.columns[part.codec.names.index(name)])


def ids_of(member: Member, wanted: Draw, rows: int = 30) -> list[int]:
    found: list[int] = column(draw(member, wanted, rows), "id").tolist()
    return found


# -- rows that were appended are drawn -------------------------------------------------------------


def test_rows_are_drawn_with_their_fields_and_values(place: Place) -> None:
    ids = np.concatenate([place.append(), place.append(6, 60), [place.rb.add(rows_of(1, 6, 66)[0]) + 0]])
    ids[-1] = ids[-2] + 1  # `add` of a local buffer returns an index
    place.settle(ids)
    part = draw(place.member, Draw(seed=3, number=0), 1000)
    assert part.rows == 1000
    assert set(column(part, "id").tolist()) == set(ids.tolist())
    sent = rows_of(67, LENGTH)
    sent["next", "done"][66] = sent["next", "terminated"][66] = False
    names = {".".join(key) if isinstance(key, tuple) else key for key in sent.keys(True, True)}
    assert names <= set(part.codec.names) <= names | ENTRIES | {"next.truncated"}
    rows = column(part, "id") - ids[0]
    for name in names - {"next.done", "next.terminated"}:
        value = sent[tuple(name.split("."))].numpy()
        assert column(part, name).dtype == value.dtype
        np.testing.assert_array_equal(column(part, name), value[rows])
    done = sent["next", "done"].numpy()[rows]
    np.testing.assert_array_equal(column(part, "next.terminated")[rows < 66], done[rows < 66])


#: Draws of every kind.
KINDS = {
    "uniform": Draw(),
    "where": Draw(where="even"),
    "prioritized": Draw(PRIORITIZED),
    "prioritized where": Draw(PRIORITIZED, where="number < 40 AND even"),
    "slices": Draw({"kind": "slices", "slice_len": 4, "by": "start"}),
    "recency": Draw({"kind": "recency", "half_life": 20}),
}


def draw_all(place: Place) -> dict[str, list[list[int]]]:
    return {
        name: [ids_of(place.member, wanted._replace(seed=7, number=number), 40) for number in (0, 3, 1)]
        for name, wanted in KINDS.items()
    }


@pytest.mark.parametrize("kind", [Local, Shared, pytest.param(Killable, marks=pytest.mark.slow)])
def test_a_seed_and_a_number_name_a_draw_also_after_a_restart(
    make: Callable[..., Place], kind: type[Place]
) -> None:
    place = make(kind)
    ids = place.append()
    priorities = np.random.default_rng(2).random(COUNT) + 0.05
    place.member.set_priorities(ids, priorities)
    wait_for_priorities(place, priorities.sum())
    place.rb.flush()
    first = draw_all(place)
    assert draw_all(place) == first
    for batches in first.values():
        assert batches[0] != batches[1]
    if isinstance(place, Shared):
        place.kill_owner()
        assert draw_all(place) == first  # a copy reads the store without its owner
    place.restart()
    assert draw_all(place) == first


def wait_for_priorities(place: Place, total: float) -> None:
    """Wait until draws and SQL have the priorities that were set: elsewhere both see them a moment later."""
    plain = Draw({"kind": "prioritized", "alpha": 1.0, "beta": 0.0})
    wait_until(lambda: np.isclose(mass_of(place.member, plain).total, total, rtol=1e-5))
    wait_until(lambda: np.isclose(sum(place.weights().values()), total, rtol=1e-5))


# -- masses ----------------------------------------------------------------------------------------


def weights_of(place: Place, kind: str) -> dict[int, float]:
    """Return the weight of every row that can be drawn, or at which a slice can begin, from SQL."""
    rows = place.rb.sql("SELECT _id, number, even, _step, _priority FROM transitions").fetchall()
    newest = max(row[0] for row in rows)

    def weigh(row_id: int, number: int, even: bool, step: int, priority: float) -> Any:
        power = float((np.float64(np.float32(priority)) + EPS) ** ALPHA)
        return {
            "uniform": 1.0,
            "where": float(even),
            "prioritized": power,
            "prioritized where": power * (even and number < 40),
            "slices": float(step <= LENGTH - 4),
            "recency": 0.5 ** ((newest - row_id) / 20),
        }[kind]

    found = {row[0]: weigh(*row) for row in rows}
    return {row_id: weight for row_id, weight in found.items() if weight}


@pytest.mark.parametrize("place", SERVED_SLOWLY, indirect=True)
def test_the_mass_is_the_sum_of_the_weights(place: Place) -> None:
    ids = place.append()
    priorities = np.random.default_rng(2).random(COUNT) + 0.05
    place.member.set_priorities(ids, priorities)
    wait_for_priorities(place, priorities.sum())
    for kind, wanted in KINDS.items():
        weights = weights_of(place, kind)
        weight = place.member.weigh(wanted, 40)
        mass = mass_of(place.member, wanted)
        assert mass == weight.mass
        assert mass.total == pytest.approx(sum(weights.values()), rel=1e-9), kind
        assert mass.rows == COUNT
        assert (weight.unit, mass.unit) == ((4, 4) if kind == "slices" else (1, 1))
        part = draw(place.member, wanted._replace(seed=7, number=0), 40)
        assert part.mass == mass, kind
        assert part.status == weight.status
        drawn = column(part, "id")
        firsts = drawn[::4] if kind == "slices" else drawn
        assert set(firsts.tolist()) <= weights.keys()
        assert ("priority_weight" in part.codec.names) == kind.startswith("prioritized")
        if kind.startswith("prioritized"):
            assert mass.smallest == pytest.approx(min(weights.values()), rel=1e-9)
            assert mass.beta == BETA
            wants = [(weights[row] / mass.smallest) ** -BETA for row in drawn.tolist()]
            np.testing.assert_allclose(column(part, "priority_weight"), wants, rtol=1e-6)


# -- priorities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SERVED_SLOWLY)
def test_priorities_of_rows_that_are_there_are_set(make: Callable[..., Place], kind: str) -> None:
    place = make(kind, capacity=48)
    ids = place.append(30)
    ids = np.concatenate([ids, place.append(30, 30)])
    wanted = Draw({"kind": "prioritized", "alpha": 1.0, "beta": 0.0}, seed=1, number=0)
    assert len(set(ids_of(place.member, wanted))) > 10
    assert place.member.read_facts().status.largest_priority == 1.0
    assert place.member.set_priorities(ids, np.full(60, 1e-6)) == 48  # 12 were overwritten
    assert place.member.set_priorities(np.array([10_000]), np.ones(1)) == 0
    assert place.member.set_priorities(ids[[3, 40]], np.array([9.0, 5.0])) == 1
    wait_for_priorities(place, 5.0 + 47e-6)
    assert place.weights()[int(ids[40])] == 5.0
    assert ids_of(place.member, wanted).count(int(ids[40])) >= 29
    part = draw(place.member, wanted, 4)
    assert part.status.largest_priority == place.member.read_facts().status.largest_priority == 5.0
    new = place.append(6, 60)
    wait_until(lambda: {place.weights()[int(row)] for row in new} == {5.0})


# -- rows by id ------------------------------------------------------------------------------------


def test_rows_episodes_and_queries_agree_with_what_was_appended(place: Place) -> None:
    ids = place.append(source="actor")
    mixed = np.random.default_rng(1).permutation(ids)
    rows = place.rb.by_id(torch.from_numpy(mixed))
    assert rows["id"].tolist() == mixed.tolist()
    assert rows["number"].tolist() == (mixed - ids[0]).tolist()
    assert place.count() == COUNT
    assert place.rb.sql("SELECT sum(number) FROM transitions WHERE even").fetchone() == (870,)
    episodes = place.rb.episodes(order_by="episode_id")
    assert {row[episodes.columns.index("source")] for row in episodes} == {"actor"}
    numbers = [row[episodes.columns.index("episode_id")] for row in episodes]
    assert len(numbers) == COUNT // LENGTH
    steps = [place.rb.trajectory(number)["number"].tolist() for number in numbers]
    assert [number for episode in steps for number in episode] == list(range(COUNT))
    place.rb.flush()
    made = place.rb.snapshots.tag("first")
    assert made.rows == COUNT
    if ("shared", "restore") in CANNOT and place.name == "shared":
        with pytest.raises(CANNOT["shared", "restore"]):
            place.rb.snapshots.restore(version="first")
        return
    place.append(6, 60)
    place.rb.snapshots.restore(version="first")
    assert place.count() == mass_of(place.member, Draw()).rows == COUNT


# -- named samplers --------------------------------------------------------------------------------

PASSES = {"kind": "without_replacement", "split": "train", "shuffle": True, "drop_last": False}


def test_samplers_have_names(place: Place) -> None:
    ids = place.append()
    for _ in range(2):
        place.member.name_sampler("pass", PASSES, "even", 3)
    assert place.member.samplers() == {"pass": PASSES}
    for other in ((PASSES, None, 3), (PASSES, "even", 4), (PASSES | {"shuffle": False}, "even", 3)):
        with pytest.raises(StateError):
            place.member.name_sampler("pass", *other)
    assert sorted(ids_of(place.member, Draw("pass"))) == ids[::2].tolist()
    weight = place.member.weigh(Draw("pass"), 4)
    assert (weight.mass, weight.unit) == (None, 1)
    place.member.forget_sampler("pass")
    assert place.member.samplers() == {}
    for act in (
        lambda: place.member.forget_sampler("pass"),
        lambda: draw(place.member, Draw("pass"), 4),
        lambda: place.member.weigh(Draw("pass"), 4),
    ):
        with pytest.raises(NotFoundError):
            act()
    place.member.name_sampler("pass", PASSES, None, 4)


def test_rows_are_consumed_once_by_all_who_draw(place: Place) -> None:
    ids = place.append()
    consuming = {"kind": "consuming", "max_sample_count": 1}
    if error := CANNOT.get((place.name, "consume")):
        with pytest.raises(error):
            place.member.name_sampler("once", consuming, None, None)
        return
    other = place.make_other()
    for member in (place.member, other):
        member.name_sampler("once", consuming, None, None)
    drawn: list[int] = []
    failed: list[BaseException] = []

    def consume(member: Member) -> None:
        try:
            while True:
                drawn.extend(ids_of(member, Draw("once"), 4))
        except NotReadyError:
            pass
        except BaseException as exc:
            failed.append(exc)

    for count in (COUNT, 66):
        threads = [threading.Thread(target=consume, args=(one,)) for one in (place.member, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert sorted(drawn) == sorted(ids.tolist())
        if count == COUNT:
            ids = np.concatenate([ids, place.append(6, 60)])
    other.close()


# -- facts -----------------------------------------------------------------------------------------


def test_a_store_is_known_by_its_uuid(make: Callable[..., Place], place: Place) -> None:
    uuid = place.member.read_facts().uuid
    place.append()
    assert place.member.read_facts().uuid == uuid == place.make_other().read_facts().uuid
    assert make(place.name).member.read_facts().uuid != uuid
    place.restart()
    assert place.member.read_facts().uuid == uuid
    copied = pickle.loads(pickle.dumps(place.member))
    assert copied.read_facts().uuid == uuid
    wanted = Draw(seed=1, number=2)
    place.settle([COUNT])
    assert ids_of(copied, wanted) == ids_of(place.member, wanted)
    copied.close()
    if place.name != "served":
        copied.buffer.close()


# -- answers that are lost, late, or come twice ----------------------------------------------------


@pytest.mark.guarantee(
    "server/retries",
    "A write whose answer is lost is stored once; a request without an idempotency key is not sent again.",
)
@pytest.mark.parametrize("trouble", ["answer", "half", "refuse"])
def test_an_append_whose_answer_is_lost_is_stored_once(make: Callable[..., Any], trouble: str) -> None:
    place = make("served")
    place.append()
    for number in range(3):
        place.lose(trouble, trouble)
        ids = place.append(6, 60 + 6 * number)
        assert not place.trouble
        assert ids.tolist() == list(range(61 + 6 * number, 67 + 6 * number))
    assert place.count() == 78
    place.lose(trouble)
    assert place.member.set_priorities(np.arange(1, 11), np.full(10, 2.0)) == 10
    place.lose(trouble)
    place.member.name_sampler("pass", PASSES, None, 1)
    wait_until(lambda: place.weights()[10] == 2.0)
    wanted = [ids_of(place.member, Draw(PRIORITIZED, seed=1, number=number)) for number in range(6)]
    for number in range(6):
        place.lose(trouble, trouble)
        assert ids_of(place.member, Draw(PRIORITIZED, seed=1, number=number)) == wanted[number]


def test_priorities_whose_answer_is_lost_are_not_set_again_over_newer_ones(make: Callable[..., Any]) -> None:
    place = make("served")
    ids = place.append()
    with expstore.connect(f"{place.serving.url}/run") as other:
        place.lose("answer", lambda: other.update_priority(id=ids, priority=3.0))
        assert place.member.set_priorities(ids, np.full(COUNT, 2.0)) == COUNT
    assert not place.trouble
    plain = Draw({"kind": "prioritized", "alpha": 1.0, "beta": 0.0})
    assert mass_of(place.member, plain).total == pytest.approx(3 * COUNT, rel=1e-6)


def test_a_late_answer_is_no_answer_to_a_later_call(make: Callable[..., Any]) -> None:
    place = make("served")
    place.append()
    wanted = [ids_of(place.member, Draw(seed=1, number=number)) for number in range(8)]
    hasty = place.connect(timeout=0.3)
    for number in range(4):
        assert ids_of(hasty.member, Draw(seed=1, number=number)) == wanted[number]
    place.lose("hold", "hold")
    found = hasty.extend(rows_of(6, LENGTH, 60))
    assert found.tolist() == list(range(61, 67))
    place.lose("hold")
    assert hasty.sql("SELECT count(*) FROM transitions").fetchone() == (66,)
    assert hasty.member.set_priorities(found.numpy(), np.full(6, 2.0)) == 6
    place.proxy.release.set()
    again = [ids_of(hasty.member, Draw(seed=1, number=number)) for number in range(8)]
    assert again == [ids_of(place.member, Draw(seed=1, number=number)) for number in range(8)]
    assert place.count() == 66
    hasty.close()


@pytest.mark.parametrize("before", [False, True], ids=["after the call", "before the call"])
def test_an_append_whose_owner_dies_is_of_unknown_outcome(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    place = make("shared")
    place.append()
    call = {"idempotency_key": "one", "digest": bytes(16), "return_ids": True}
    receive, send = MessageSocket.receive, MessageSocket.send

    def kill_first(self: MessageSocket, *given: Any) -> Any:
        if not before:
            receive(self)  # the owner has committed: this answer is lost
        place.kill_owner()
        return (send if before else receive)(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(MessageSocket, "send" if before else "receive", kill_first)
        with pytest.raises(RemoteError, match="unknown whether this call was done"):
            place.rb.extend(rows_of(6, LENGTH, 60), **call)
    with pytest.raises(RemoteError) as caught:
        place.member.set_priorities(np.array([1]), np.ones(1))
    assert caught.value.kind == "unreachable"
    place.restart()
    assert place.count() == (COUNT if before else 66)
    assert place.rb.extend(rows_of(6, LENGTH, 60), **call).tolist() == list(range(61, 67))
    place.settle([66])
    assert place.count() == 66


# -- errors ----------------------------------------------------------------------------------------


class Mistake(NamedTuple):
    """A call that fails, and the class of its error."""

    error: str
    act: Callable[[Place], Any]


#: On a store without rows.
EMPTY = {
    "draw": Mistake("NotReadyError", lambda place: draw(place.member, Draw(seed=1), 4)),
    "draw by priority": Mistake("NotReadyError", lambda place: draw(place.member, Draw(PRIORITIZED), 4)),
    "by id": Mistake("NotFoundError", lambda place: place.rb.by_id([1])),
    "trajectory": Mistake("NotFoundError", lambda place: place.rb.trajectory(1)),
}
#: On a store with rows.
FILLED = {
    "no field": Mistake(
        "SchemaError", lambda p: p.rb.extend(rows_of(6, 6).exclude("number"), return_ids=True)
    ),
    "new field": Mistake("SchemaError", lambda p: p.rb.extend(rows_of(6, 6).set("x", torch.zeros(6)))),
    "type": Mistake("SchemaError", lambda p: p.rb.extend(rows_of(6, 6).set("number", torch.zeros(6)))),
    "shape": Mistake("SchemaError", lambda p: p.rb.extend(rows_of(6, 6).set("number", torch.zeros(6, 2)))),
    "one row": Mistake("SchemaError", lambda p: p.rb.add(rows_of(6, 6))),
    "source": Mistake("SchemaError", lambda p: p.rb.extend(rows_of(6, 6), source=" ")),
    "specs": Mistake("StateError", lambda p: p.rb.extend(rows_of(6, 6), validate="domain")),
    "where": Mistake("QueryError", lambda p: draw(p.member, Draw(where="nowhere > 3", seed=1), 4)),
    "weigh where": Mistake("QueryError", lambda p: p.member.weigh(Draw(where="nowhere > 3"), 4)),
    "syntax": Mistake("QueryError", lambda p: draw(p.member, Draw(where="even AND", seed=1), 4)),
    "nothing matches": Mistake("NotReadyError", lambda p: draw(p.member, Draw(where="number < 0"), 4)),
    "kind": Mistake("ArgumentError", lambda p: draw(p.member, Draw({"kind": "newest"}), 4)),
    "parameter": Mistake("ArgumentError", lambda p: draw(p.member, Draw({"kind": "uniform", "alpha": 1}), 4)),
    "value": Mistake(
        "ArgumentError", lambda p: draw(p.member, Draw({"kind": "prioritized", "alpha": -1}), 4)
    ),
    "no name": Mistake("ArgumentError", lambda p: draw(p.member, Draw(PASSES), 4)),
    "taken name": Mistake("ArgumentError", lambda p: p.member.name_sampler("uniform", PASSES, None, None)),
    "unknown name": Mistake("NotFoundError", lambda p: draw(p.member, Draw("unknown"), 4)),
    "no rows": Mistake("ArgumentError", lambda p: draw(p.member, Draw(seed=1), 0)),
    "priority": Mistake("PriorityError", lambda p: p.rb.update_priority(id=[1], priority=[float("nan")])),
    "negative": Mistake("PriorityError", lambda p: p.member.set_priorities(np.array([1]), np.array([-1.0]))),
    "sql": Mistake("QueryError", lambda p: p.rb.sql("SELECT nothing FROM transitions")),
    "two": Mistake("QueryError", lambda p: p.rb.sql("SELECT 1; SELECT 2")),
    "row": Mistake("NotFoundError", lambda p: p.rb.by_id([1, 999])),
    "episode": Mistake("NotFoundError", lambda p: p.rb.trajectory(999)),
}
#: After the member and the buffer were closed.
CLOSED = {
    "draw": Mistake("StateError", lambda p: draw(p.member, Draw(seed=1), 4)),
    "weigh": Mistake("StateError", lambda p: p.member.weigh(Draw(), 4)),
    "priorities": Mistake("StateError", lambda p: p.member.set_priorities(np.array([1]), np.ones(1))),
    "facts": Mistake("StateError", lambda p: p.member.read_facts()),
    "name": Mistake("StateError", lambda p: p.member.name_sampler("pass", PASSES, None, None)),
    "by id": Mistake("StateError", lambda p: p.rb.by_id([1])),
    "sql": Mistake("StateError", lambda p: p.rb.sql("SELECT 1")),
    "append to a closed buffer": Mistake("StateError", lambda p: p.rb.extend(rows_of(6, 6), return_ids=True)),
}


def name_of(act: Callable[[Place], Any], place: Place) -> str:
    """Return the name of the class of an error of expstore, or what else happened."""
    try:
        found = act(place)
    except ExpStoreError as exc:
        names = [cls.__name__ for cls in type(exc).__mro__ if cls.__name__ in expstore.errors.__all__]
        return names[0]
    except Exception as exc:
        return f"{type(exc).__name__}, which is not of expstore: {exc}"
    return f"no error: {found}"


@pytest.mark.parametrize("place", SERVED_SLOWLY, indirect=True)
def test_errors_are_of_the_same_class_everywhere(place: Place) -> None:
    found, wanted = {}, {}
    for title, mistakes in (("empty", EMPTY), ("filled", FILLED), ("closed", CLOSED)):
        if mistakes is FILLED:
            place.append()
        if mistakes is CLOSED:
            place.member.close()
            place.rb.close()
        for name, mistake in mistakes.items():
            cannot = CANNOT.get((place.name, name))
            wanted[title, name] = mistake.error if cannot is None else cannot.__name__
            found[title, name] = name_of(mistake.act, place)
        if mistakes is FILLED:
            assert place.count() == COUNT
    assert {key: name for key, name in found.items() if name != wanted[key]} == {}


def test_a_closed_member_leaves_the_store_open(place: Place) -> None:
    place.append()
    other = place.make_other()
    other.close()
    for act in (lambda: draw(other, Draw(seed=1), 4), lambda: other.weigh(Draw(), 4), other.read_facts):
        with pytest.raises(StateError):
            act()
    assert mass_of(place.member, Draw()).rows == place.count() == COUNT
