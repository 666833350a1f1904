"""The protocol of shipping: several writers whose requests are interleaved, lost, delayed and repeated.

The writers run the real `ShipLog`, push versions and prune them, and a schedule says whose request is next.
After every request that changes an object, the newest manifest must continue everything that was confirmed,
and all parts of it and of every version must exist.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from expstore.cold import sweep, upload
from expstore.cold.ship import Pinned
from expstore.cold.ship_log import Claim, ShipLog, ShippedState, state_part_key
from expstore.cold.version_list import LIST, STATES, VersionList, manifest_key
from expstore.errors import LockedError, RemoteError, SnapshotError

#: How a request may go wrong; "" if it does not.
TROUBLES = (*[""] * 20, "lost", "failed", "delayed", "repeated")
#: A request that others overtake does not fail.
SLOW = (*[""] * 7, "slow")


class Schedule:
    """Let one thread at a time run, which a function chooses before every request.

    Args:
        choose: Returns a number below its argument.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self._threads: list[threading.Thread] = []
        self._mine: dict[threading.Thread, threading.Semaphore] = {}
        self._waiting: list[threading.Thread] = []
        self._over = threading.Event()
        self.errors: list[BaseException] = []

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Run programs until all have ended; raise what one of them has raised."""
        self._threads = [threading.Thread(target=self._start, args=(one,), daemon=True) for one in programs]
        for thread in self._threads:
            self._mine[thread] = threading.Semaphore(0)
        self._waiting = list(self._threads)
        for thread in self._threads:
            thread.start()
        self._pass_on()
        assert self._over.wait(60)
        if self.errors:
            raise self.errors[0]

    def take(self) -> None:
        """Wait for this thread's next turn."""
        me = threading.current_thread()
        self._waiting.append(me)
        self._pass_on()
        self._mine[me].acquire()

    def _start(self, program: Callable[[], None]) -> None:
        self._mine[threading.current_thread()].acquire()
        try:
            program()
        except BaseException as exc:
            self.errors.append(exc)
        self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting and not self.errors:
            self._mine[self._waiting.pop(self.choose(len(self._waiting)))].release()
        else:
            self._over.set()


class Objects:
    """A bucket in memory, and the laws."""

    def __init__(self, schedule: Schedule, troubles: Sequence[str]) -> None:
        self.name = "s3://model"
        self._schedule, self._troubles = schedule, troubles
        self.objects: dict[str, bytes] = {}
        self._tags = itertools.count()
        self._tag = -1
        self._delayed: list[Callable[[], Any]] = []
        #: The rows of the last state that was confirmed.
        self.confirmed: list[int] = []

    # -- the laws

    def newest(self) -> ShippedState | None:
        keys = [key for key in self.objects if key.startswith(f"{STATES}/")]
        if not keys:
            return None
        return ShippedState.unpack(self.objects[max(keys)], max(keys), self.name)

    def versions(self) -> VersionList:
        data = self.objects.get(LIST)
        return VersionList() if data is None else VersionList.unpack(data, LIST)

    def check(self) -> set[str]:
        """Check the laws; return the keys of all parts and manifests that are needed."""
        newest = self.newest()
        if newest is None:
            return set()
        state = newest.state or {"ids": [], "parts": []}
        assert state["ids"][: len(self.confirmed)] == self.confirmed, "a confirmed state is not continued"
        assert all(state_part_key(part) in self.objects for part in state["parts"]), "a part is missing"
        needed = {newest.key, *map(state_part_key, state["parts"])}
        for version in self.versions().versions:
            key = manifest_key(version)
            assert key in self.objects, "the state of a version is missing"
            parts = (ShippedState.unpack(self.objects[key], key, self.name).state or {})["parts"]
            assert all(state_part_key(part) in self.objects for part in parts), (
                "a part of a version is missing"
            )
            needed |= {key, *map(state_part_key, parts)}
        return needed

    # -- requests

    def _request(self, act: Callable[[], Any]) -> Any:
        self._schedule.take()
        if self._delayed and self._schedule.choose(3) == 0:
            self._delayed.pop(self._schedule.choose(len(self._delayed)))()
            self.check()
        trouble = self._troubles[self._schedule.choose(len(self._troubles))]
        if trouble == "slow":
            for _ in range(self._schedule.choose(40)):
                self._schedule.take()
        if trouble == "delayed":
            self._delayed.append(act)
        elif trouble != "failed":
            found = act()
            if trouble == "repeated":
                found = act()
            self.check()
            if trouble != "lost":
                return found
        raise RemoteError("no answer")

    def check_creates(self) -> None:
        pass

    def create(self, key: str, data: bytes) -> bool:
        def act() -> bool:
            if key == LIST and key not in self.objects:
                self._tag = next(self._tags)
            return self.objects.setdefault(key, data) is data

        return self._request(act)

    def write(self, key: str, data: bytes) -> None:
        self._request(lambda: self.objects.update({key: data}))

    def read(self, key: str) -> bytes | None:
        return self._request(lambda: self.objects.get(key))

    def read_tagged(self, key: str) -> tuple[bytes, dict[str, str]] | None:
        assert key == LIST
        return self._request(
            lambda: (self.objects[key], {"e_tag": str(self._tag)}) if key in self.objects else None
        )

    def replace(self, key: str, data: bytes, tag: dict[str, str]) -> bool:
        def act() -> bool:
            if tag["e_tag"] != str(self._tag):
                return False
            self.objects[key], self._tag = data, next(self._tags)
            return True

        return self._request(act)

    def keys(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        inside = f"{prefix}/"
        yield from self._request(
            lambda: [(key, 0) for key in sorted(self.objects) if key.startswith(inside) and key > after]
        )

    def delete(self, keys: Sequence[str]) -> None:
        keys = list(keys)
        self._request(lambda: [self.objects.pop(key, None) for key in keys] and None)


class Writer:
    """Claim, restore, ship, push versions, and sweep, until fenced; then the same again."""

    def __init__(
        self, objects: Objects, number: int, lives: int, rounds: int, choose: Callable[[int], int] | None
    ) -> None:
        self._objects, self._number, self._lives, self._rounds = objects, number, lives, rounds
        self._choose = choose
        self._ids = itertools.count(1000 * number)

    def run(self) -> None:
        for life in range(self._lives):
            self._log = ShipLog(self._objects)  # type: ignore[arg-type]
            claim = Claim(nonce=f"{self._number}-{life}", host="h", pid=self._number, since=0.0)
            try:
                former, _ = self._log.find()
                first = self._log.claim(former, claim)
                self._restore(first)
                for _ in range(self._rounds):
                    try:
                        if self._choose is None or self._choose(2):
                            self._ship()
                        else:
                            upload._StatePush(self._objects, False, self, None, "uuid").run()  # type: ignore[arg-type]
                    except LockedError:
                        raise
                    except RemoteError:
                        self._log.forget_parts()
                        self._sweep()  # the newest state may not be confirmed
                        self._log.check()
                        self._sweep()  # parts of the state that failed must not be deleted
            except (LockedError, RemoteError):
                continue

    def _restore(self, first: ShippedState) -> None:
        """Read the parts: one may be missing only if another writer has claimed the address meanwhile."""
        for part in (first.state or {"parts": []})["parts"]:
            if self._objects.read(state_part_key(part)) is None:
                self._log.check()
                raise AssertionError("a restore lacks a part")

    def go_on(self, *, pushes: bool) -> None:
        """Ship until fenced."""
        with contextlib.suppress(LockedError):
            for _ in range(3):
                with contextlib.suppress(RemoteError):
                    if pushes:
                        upload._StatePush(self._objects, False, self, None, "uuid").run()  # type: ignore[arg-type]
                    self._ship()
                    continue
                self._log.forget_parts()
                for _ in range(5):
                    with contextlib.suppress(RemoteError):
                        self._log.check()
                        break

    def pin(self, push: str) -> Pinned:
        """Do what `Shipper.pin` does."""
        self._ship([push])
        assert self._log.newest is not None
        pinned = Pinned(self._log.newest, 0, 0, 0)
        for _ in range(2):  # as another thread does
            self._ship()
        return pinned

    def _ship(self, pushes: Sequence[str] = ()) -> None:
        former = (self._log.newest and self._log.newest.state) or {"ids": [], "parts": []}
        part = self._log.name_part()
        self._objects.write(state_part_key(part), b"")
        # A ring of two parts: each state needs a new one, and drops one.
        ids = [*former["ids"], next(self._ids)]
        # A state that is captured whole needs no former part.
        keep = 2 if self._choose is None or self._choose(4) else 1
        state = {"rows": len(ids), "ids": ids, "parts": [*former["parts"], part][-keep:]}
        self._log.commit(state, "uuid", 0.0, pushes)
        assert ids[: len(self._objects.confirmed)] == self._objects.confirmed
        self._objects.confirmed = ids
        self._objects.check()
        self._sweep()

    def _sweep(self) -> None:
        self._log.sweep(lambda found: found["parts"])


def _prune(objects: Objects, choose: Callable[[int], int]) -> None:
    """Remove versions a few times; now and then also what pushes have sent that are still running."""
    for _ in range(3):
        listed = [version.number for version in objects.versions().versions]
        drop = [listed[choose(len(listed))]] if listed else []
        with contextlib.suppress(RemoteError, SnapshotError):  # another one may have removed the version
            sweep._prune(objects, None, drop, 86_400.0 * choose(2))  # type: ignore[arg-type]


def _play(
    choose: Callable[[int], int],
    writers: int,
    lives: int,
    rounds: int,
    troubles: Sequence[str],
    pruners: int = 0,
) -> Objects:
    schedule = Schedule(choose)
    objects = Objects(schedule, troubles)
    pushes = choose if pruners else None
    programs = [Writer(objects, number, lives, rounds, pushes).run for number in range(1, writers + 1)]
    schedule.run([*programs, *[partial(_prune, objects, choose)] * pruners])
    return objects


@pytest.fixture(autouse=True)
def _simple_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "parts_of", lambda state, fetch: state["parts"])
    monkeypatch.setattr(upload, "bytes_of", lambda state: 0)


@pytest.mark.guarantee("ship/fencing")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [0, 1, pytest.param(2, marks=pytest.mark.torture)])
def test_what_is_confirmed_is_continued_whatever_happens_to_requests(block: int) -> None:
    shipped = 0
    for seed in range(5000 if block == 2 else 150):
        rng = random.Random(1_000_000 * block + seed)
        objects = _play(rng.randrange, 2 + seed % 2, 2, 3, TROUBLES if seed % 3 else ("",))
        shipped += len(objects.confirmed)
    assert shipped > 100


@pytest.mark.guarantee(
    "ship/versions",
    "A version of a shipped store shares the parts of the store. Neither its writers nor `prune` delete what"
    " the newest state or a remaining version needs, and `prune` deletes the rest.",
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", [0, 1, pytest.param(2, marks=pytest.mark.torture)])
def test_versions_and_the_newest_state_keep_their_parts(block: int) -> None:
    pushed = 0
    for seed in range(2000 if block == 2 else 60):
        rng = random.Random(1_000_000 * block + seed)
        troubles = (*TROUBLES, *SLOW) if seed % 3 else SLOW
        objects = _play(rng.randrange, 1 + seed % 2, 2, 4, troubles, pruners=1 + seed % 4 // 2)
        pushed += objects.versions().next_number - 1
        if seed % 3:
            continue
        objects._request = lambda act: act()  # type: ignore[method-assign]
        sweep._prune(objects, None, (), 0.0)  # type: ignore[arg-type]
        left = {key for key in objects.objects if not key.startswith((LIST, "epoch/"))}
        assert left == objects.check()
    assert pushed > 40


@pytest.mark.guarantee("ship/versions")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("lives", "seeds"),
    [(1, 80), (2, 200), *(pytest.param(n, 3000, marks=pytest.mark.torture) for n in (1, 2))],
)
def test_a_prune_amid_a_claim_or_a_push_deletes_nothing_that_is_needed(lives: int, seeds: int) -> None:
    """Nothing but one writer that ships, one claim or push, and one prune: many orders of their requests."""
    for seed in range(seeds):
        choose = random.Random(seed).randrange
        schedule = Schedule(choose)
        objects = Objects(schedule, (*SLOW, "lost") if lives == 1 else SLOW)
        request, objects._request = objects._request, lambda act: act()  # type: ignore[method-assign]
        former, claims = Writer(objects, 1, 1, 0, choose), Writer(objects, 2, 1, 1, None)
        former.run()
        for _ in range(3):
            former._ship()
        objects._request = request  # type: ignore[method-assign]
        programs = [partial(former.go_on, pushes=lives == 1), partial(_prune, objects, choose)]
        schedule.run([*programs, claims.run] if lives == 2 else programs)


def test_a_push_before_any_request_of_a_prune_keeps_its_parts() -> None:
    """The pin is dropped before the prune reads the newest state; the prune has nothing to commit."""
    for number in itertools.count():
        objects = Objects(Schedule(lambda count: 0), ("",))
        objects._request = lambda act: act()  # type: ignore[method-assign]
        writer = Writer(objects, 1, 1, 0, None)
        writer.run()
        upload._StatePush(objects, False, writer, None, "uuid").run()  # type: ignore[arg-type]
        sweep._prune(objects, None, [1], 0.0)  # type: ignore[arg-type]
        requests = itertools.count()

        def request(act: Callable[[], Any], objects: Objects = objects, writer: Writer = writer) -> Any:
            if next(requests) == number:  # noqa: B023
                objects._request = lambda act: act()  # type: ignore[method-assign]
                upload._StatePush(objects, False, writer, None, "uuid").run()  # type: ignore[arg-type]
                writer._sweep()
                writer._ship()
            return act()

        objects._request = request  # type: ignore[method-assign]
        sweep._prune(objects, None, (), 86_400.0)  # type: ignore[arg-type]
        objects.check()
        if not objects.versions().versions:
            break
    assert number > 5


@pytest.mark.parametrize("rounds", [0, 1])
def test_every_interleaving_of_two_claims_has_one_line_of_states(rounds: int) -> None:
    """Two writers without troubles: all orders of their requests; of longer ones, the first 3,000."""
    path: list[tuple[int, int]] = []  # choices and their numbers, the next path to try
    for _ in range(3000):
        steps = iter(path)
        walked: list[tuple[int, int]] = []

        def choose(count: int, steps: Iterator[tuple[int, int]] = steps, walked: Any = walked) -> int:
            made = next(steps, (0, count))[0]
            walked.append((made, count))
            return made

        objects = _play(choose, 2, 1, rounds, ("",))
        assert rounds == 0 or objects.confirmed
        while walked and walked[-1][0] + 1 == walked[-1][1]:
            walked.pop()
        if not walked:
            return
        walked[-1] = (walked[-1][0] + 1, walked[-1][1])
        path = walked
    assert rounds, "not all interleavings were tried"


def _make_logs(count: int) -> list[ShipLog]:
    """Return writers at one address whose requests all succeed."""
    objects = Objects(Schedule(lambda count: 0), ("",))
    objects._request = lambda act: act()  # type: ignore[method-assign]
    return [ShipLog(objects) for _ in range(count)]  # type: ignore[arg-type]


def test_what_a_fenced_writer_uploads_later_is_never_continued() -> None:
    former, second, third = _make_logs(3)
    former.claim(0, Claim(nonce="a", host="h", pid=1, since=0.0))
    former.commit({"ids": [1], "parts": []}, "uuid", 0.0)
    second.claim(1, Claim(nonce="b", host="h", pid=2, since=0.0))  # and ships nothing
    with pytest.raises(LockedError, match="process 2 on h"):
        former.commit({"ids": [1, 2], "parts": []}, "uuid", 0.0)
    continued = third.claim(2, Claim(nonce="c", host="h", pid=3, since=0.0)).state
    assert continued is not None
    assert continued["ids"] == [1]


def test_a_claim_whose_answer_was_lost_is_recognized() -> None:
    objects = Objects(Schedule(lambda count: 0), ("",))
    objects._request = lambda act: act()  # type: ignore[method-assign]
    create = objects.create
    objects.create = lambda key, data: create(key, data) and create(key, data)  # type: ignore[method-assign]
    log = ShipLog(objects)  # type: ignore[arg-type]
    log.claim(0, Claim(nonce="a", host="h", pid=1, since=0.0))
    log.commit({"ids": [1], "parts": []}, "uuid", 0.0)
    with pytest.raises(LockedError, match="process 1 on h has claimed it since 1970"):
        ShipLog(objects).claim(0, Claim(nonce="b", host="h", pid=2, since=0.0))  # type: ignore[arg-type]
