"""What holds of every sampler: which rows it draws, and that draws continue after stops and in copies.

The kinds are those of `draw_sequences`. Each test goes through all of them, because a child process or a
round of the ring costs more than the draws of one kind.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import MemoryStorage, TensorDictReplayBuffer
from expstore.core.draws import Draws
from expstore.errors import NotReadyError, StateError
from tests.support.batches import same
from tests.support.draw_sequences import BATCH, CAPACITY, SAMPLERS, sampler_rows, short_rings
from tests.support.forks import in_child

pytestmark = [
    pytest.mark.usefixtures("no_syncs", "no_index_on_close"),
    pytest.mark.filterwarnings("ignore:.*completing the draw with replacement"),
]


def behind(sampler: Any) -> Any:
    """Let the consumer of a sampler be at version 9."""
    sampler.consumer_version = 9
    return sampler


#: Kinds of `draw_sequences` that differ from another one in an option that no law here depends on.
VARIANTS = (
    *("random_weight", "without_replacement_drop_last", "without_replacement_in_order", "recency_newest"),
    *("staleness", "staleness_at_most", "slices_where", "slices_short", "slices_padded", "slices_span"),
)
KINDS = {name: make for name, make in SAMPLERS.items() if name not in VARIANTS} | {
    "recency_where": lambda: expstore.RecencySampler(30.0, where="action = 0", weight="policy_version + 1"),
    "staleness_behind": lambda: behind(expstore.StalenessAwareSampler(max_staleness=8)),
    "staleness_where": lambda: expstore.StalenessAwareSampler(where="action = 0", weight="query + 0.5"),
    "slices_by_start_where": lambda: expstore.SliceSampler(slice_len=4, by="start", where="query % 2 = 0"),
    "prioritized_slices_where": lambda: expstore.PrioritizedSliceSampler(
        CAPACITY, 0.7, 0.5, num_slices=2, where="action = 0"
    ),
}
#: Conditions on the numbers of rows that a kind may draw.
CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "random_where": lambda number: number % 3 == 0,
    "without_replacement_where": lambda number: number % 3 == 0,
    "prioritized_where": lambda number: number % 3 == 0,
    "consuming_where": lambda number: number % 3 != 1,
    "recency_where": lambda number: number % 3 == 0,
    "staleness_where": lambda number: number % 3 == 0,
}
#: Kinds whose draws depend on earlier draws, beyond their number.
WITH_PROGRESS = ("without_replacement", "consuming", "slices_without_replacement", "streaming_slices")
#: Kinds that write to the store when they draw.
COUNTING = ("consuming", "consuming_where")


@pytest.fixture(autouse=True)
def _short_rings() -> Iterator[None]:
    with short_rings():
        yield


def in_memory(name: str, **options: Any) -> TensorDictReplayBuffer:
    storage = MemoryStorage(CAPACITY, seed=5)
    return TensorDictReplayBuffer(
        storage=storage, sampler=KINDS[name](), batch_size=BATCH, with_ids=True, **options
    )


def on_disk(folder: Path, name: str, **options: Any) -> Any:
    durability = expstore.Durability(on_sigterm="ignore")
    return expstore.open(
        folder / f"{name}.exp", batch_size=BATCH, sampler=KINDS[name](), durability=durability, **options
    )


def evaluate(rb: Any) -> None:
    """Evaluate the condition of new rows; a thread does it at some time after a draw."""
    if rb.sampler.filter is not None:
        rb.sampler.filter.refresh(rb.storage)


def add(rb: Any, count: int) -> None:
    """Append rows whose numbers are their ids less one."""
    rb.extend(sampler_rows(count, rb.storage.last))
    evaluate(rb)


def numbers_of(batch: Any) -> Any:
    return batch["observation"][..., 0].long()


def draw(rb: Any, count: int) -> list[Any]:
    return [rb.sample() for _ in range(count)]


def all_same(batches: list[Any], others: list[Any], *without: str) -> bool:
    """Return whether batches have the same rows and info, apart from some fields."""
    pairs = zip(batches, others, strict=True)
    return all(same(one.exclude(*without), other.exclude(*without)) for one, other in pairs)


def check(name: str, rb: Any) -> None:
    """Draw, and compare with what is stored."""
    batch = rb.sample()
    ids, number = batch["id"].reshape(-1), numbers_of(batch).reshape(-1)
    assert (number == ids - 1).all(), name
    assert rb.storage.window.holds(ids.numpy()).all(), name
    assert bool(CONDITIONS.get(name, lambda number: number >= 0)(number).all()), name


def check_state(name: str, rb: Any) -> None:
    """Compare the sampler with one that knows nothing of what came before."""
    if not name.startswith(WITH_PROGRESS):
        one, other = (
            sampler.sample(rb.storage, BATCH, Draws(1).generator(rb.storage.last))
            for sampler in (rb.sampler, KINDS[name]())
        )
        np.testing.assert_array_equal(one.ids, other.ids, err_msg=name)
        assert one.info.keys() == other.info.keys()
        for key in one.info:
            np.testing.assert_array_equal(one.info[key], other.info[key], err_msg=name)


@pytest.mark.parametrize("storage", ["memory", "ring", "window"])
def test_rows_that_are_stored_are_drawn(storage: str, tmp_path: Path) -> None:
    """Through a ring that wraps in small and in long steps, changes of priorities and rows, and `empty`."""
    options = {"ring": {"capacity": CAPACITY}, "window": {"window": CAPACITY}}
    for name in KINDS:
        if (storage == "window" and name in COUNTING) or (storage == "memory" and "where" in name):
            continue  # the former is refused, the latter is slow
        rb = in_memory(name) if storage == "memory" else on_disk(tmp_path, name, seed=5, **options[storage])
        with rb:
            with pytest.raises(NotReadyError):
                rb.sample()
            for step, count in enumerate((40, 5, 30, 1, 60, 7)):
                add(rb, count)
                check(name, rb)
                ids = rb.storage.window.ids()[step::4]
                rb.update_priority(id=ids, priority=1.0 + ids % 7)
                changed = rb[step + 3 : step + 9]
                changed["query"], changed["policy_version"] = changed["query"] + 1, changed["query"] % 7
                rb[step + 3 : step + 9] = changed
                evaluate(rb)
                check(name, rb)
                if step % 3 == 2:
                    check_state(name, rb)
            rb.empty()
            with pytest.raises(NotReadyError):
                rb.sample()
            add(rb, 40)
            check(name, rb)
            check_state(name, rb)


# -- stops and copies -------------------------------------------------------------------------------------


def live(rb: Any) -> None:
    """Fill a ring beyond its end, draw, and set priorities."""
    for _ in range(2):
        add(rb, 40)
        ids = draw(rb, 2)[-1]["id"].reshape(-1).unique()
        rb.update_priority(id=ids, priority=1.0 + ids % 7)
    rb.flush()
    draw(rb, 2)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The batches that come after `live` if nothing happens: name of a kind -> batches."""
    folder, batches = tmp_path_factory.mktemp("unbroken"), {}
    with short_rings():
        for name in KINDS:
            with on_disk(folder, name, capacity=CAPACITY, seed=5) as rb:
                live(rb)
                batches[name] = draw(rb, 6)
    return batches


@pytest.mark.guarantee("draw/next")
@pytest.mark.parametrize("end", ["close", "kill", "power cut after flush"])
def test_a_restart_continues_with_the_next_batch(
    end: str, unbroken: dict[str, list[Any]], tmp_path: Path
) -> None:
    def life() -> None:
        for name in KINDS:
            rb = on_disk(tmp_path, name, capacity=CAPACITY, seed=5)
            live(rb)
            if end == "close":
                rb.close()
            elif end != "kill":
                rb.flush()

    in_child(life)
    for name, batches in unbroken.items():
        if end.startswith("power"):  # what a restart of the machine leaves of it
            (tmp_path / f"{name}.exp" / "STATE").write_bytes(bytes(4096))
        with on_disk(tmp_path, name) as rb:
            assert all_same(draw(rb, 6), batches), name


def test_versions_and_states_continue_with_the_next_batch(tmp_path: Path) -> None:
    """In the buffer that saved them, and in another one."""
    for name in KINDS:
        rb, other, third = (in_memory(name) for _ in range(3))
        live(rb)
        rb.dumps(tmp_path / name)
        state = rb.state_dict()
        wanted = draw(rb, 4)
        add(other, 30)
        draw(other, 1)
        for one, restore in (
            (rb, lambda one, name=name: one.loads(tmp_path / name)),  # under other ids
            (other, lambda one, name=name: one.loads(tmp_path / name)),
            (third, lambda one, state=state: one.load_state_dict(state)),
        ):
            restore(one)
            evaluate(one)
            assert all_same(draw(one, 4), wanted, "id"), name


def test_copies_have_rows_and_draws_of_their_own() -> None:
    for name in KINDS:
        rb = in_memory(name)
        live(rb)
        copied = copy.deepcopy(rb)
        assert all_same(draw(copied, 3), draw(rb, 3)), name
        other = in_memory(name)
        for sampler in (copy.copy(rb.sampler), pickle.loads(pickle.dumps(rb.sampler))):
            assert repr(sampler) == repr(rb.sampler)
            other.set_sampler(sampler)
            other.extend(sampler_rows(40, 1000))
            evaluate(other)
            assert (numbers_of(other.sample()) >= 1000).all(), name
        assert (numbers_of(rb.sample()) < 1000).all(), name


def test_readers_draw_what_is_stored(tmp_path: Path) -> None:
    """Two readers with the same seed draw the same rows, whatever each of them has drawn before."""
    for name in KINDS:
        with on_disk(tmp_path, name, capacity=CAPACITY, seed=5) as rb:
            add(rb, 40)
            rb.flush()
            one = on_disk(tmp_path, name, mode="r", seed=1)
            if name in COUNTING:
                with pytest.raises(StateError, match="read"):
                    one.sample()
            else:
                check(name, one)
                live(rb)
                rb.flush()
                one.refresh()
                check(name, one)
                check_state(name, one)
                with on_disk(tmp_path, name, mode="r", seed=1) as other:
                    other.refresh()
                    found, wanted = (
                        reader.sampler.sample(reader.storage, BATCH, Draws(2).generator(3)).ids
                        for reader in (one, other)
                    )
                    assert name.startswith(WITH_PROGRESS) or found.tolist() == wanted.tolist(), name
            one.close()


@pytest.mark.parametrize("name", ["random_where", "prioritized", "staleness_behind", "slices_by_start"])
def test_threads_draw_while_one_writes(name: str) -> None:
    rb = in_memory(name)
    add(rb, CAPACITY)
    stop, faults = threading.Event(), []

    def sample() -> None:
        try:
            while not stop.is_set():
                batch = rb.sample()
                number = numbers_of(batch)
                if (number != batch["id"] - 1).any() or not CONDITIONS.get(name, lambda number: number >= 0)(
                    number
                ).all():
                    faults.append(batch)
                rb.update_priority(id=batch["id"], priority=1.0 + number % 5)
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=sample) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        rb.extend(sampler_rows(9, rb.storage.last))
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    evaluate(rb)
    check_state(name, rb)


@pytest.mark.parametrize("name", ["prioritized", "prioritized_where", "prioritized_slices"])
def test_rows_leave_while_their_priorities_are_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may write and draw between the change of a priority and the sampler's notice of it."""
    rb = in_memory(name)
    add(rb, CAPACITY)
    rb.sample()
    told = rb.storage.priorities.tell

    def tell(storage: Any, slots: Any) -> None:
        add(rb, 9)
        rb.sample()
        told(storage, slots)

    monkeypatch.setattr(rb.storage.priorities, "tell", tell)
    rb.update_priority(id=np.arange(1, 13), priority=np.full(12, 5.0))
    check_state(name, rb)
