"""Sampling with the store's seed or a torch.Generator, and its continuation after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ConsumingSampler,
    MemoryStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from expstore.errors import StateError
from expstore.samplers.base import Sampler
from tests.support.batches import numbered_rows
from tests.support.forks import collect_from_child, in_child

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "prioritized": PrioritizedSampler,
    "without": SamplerWithoutReplacement,
    "consuming": lambda: ConsumingSampler(50),
    "recency": lambda: RecencySampler(half_life=50),
}


def given(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rb: TensorDictReplayBuffer, batches: int, size: int = 16) -> list[list[int]]:
    return [rb.sample(size)["number"].tolist() for _ in range(batches)]


def fill(rb: TensorDictReplayBuffer, count: int = 100) -> None:
    rb.extend(numbered_rows(count))
    rb.update_priority(range(count), torch.arange(1.0, count + 1))


def open_with(path: Path, sampler: str, seed: int | None = 3) -> TensorDictReplayBuffer:
    generator = None if seed is None else given(seed)
    return expstore.open(
        path,
        capacity=1000,
        seed=1,
        sampler=SAMPLERS[sampler](),
        batches=expstore.Batches(generator=generator),
    )


@pytest.mark.parametrize(
    ("sampler", "lock"),
    [
        (SamplerWithoutReplacement(), "_lock"),
        (PromptGroupSampler(samples_per_group=2), "_lock"),
        (StreamingSliceSampler(slice_len=2), "_own"),
    ],
    ids=["without", "groups", "streaming"],
)
def test_a_forked_child_samples_although_a_thread_of_the_parent_samples(
    store_path: Path, sampler: Sampler, lock: str
) -> None:
    with expstore.open(store_path, batch_size=4, sampler=sampler) as rb:
        rb.extend(TensorDict({"number": torch.arange(40), "query": torch.arange(40) // 10}, [40]))
        rb.sample()
        rb.flush()
        with getattr(sampler, lock):  # as that thread may hold it
            assert collect_from_child(lambda tell: tell(len(rb.sample()))) == [4]
        assert rb.sampler is sampler


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement(shuffle=False), ConsumingSampler()], ids=repr)
def test_a_field_that_is_added_during_a_draw_costs_no_rows(store_path: Path, sampler: Sampler) -> None:
    """The batch is read again with the new field, and the sampler's progress is that of one batch."""
    with expstore.open(store_path, batch_size=4, sampler=sampler) as rb:
        rb.extend(numbered_rows(12))

        def add_field(batch: TensorDict) -> TensorDict:
            if ("late",) not in rb.storage.require_schema():
                rb.columns.add("late", fill=0.0)  # as another thread may do
            return batch

        rb.append_transform(add_field)
        batches = [rb.sample() for _ in range(3)]
        assert torch.cat([batch["number"] for batch in batches]).sort().values.tolist() == [*range(12)]
        assert all("late" in batch for batch in batches)
        if isinstance(sampler, SamplerWithoutReplacement):
            assert batches[0]["number"].tolist() == [*range(4)]


# ---------------------------------------------------------------------------------------------------
# A generator of the user's own.


@pytest.mark.some(3)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_equal_generators_draw_equal_batches(sampler: str) -> None:
    found = []
    for number, seed in enumerate((3, 3, 4)):
        storage = MemoryStorage(1000, seed=number)  # a generator decides the draws, not this seed
        rb = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), generator=given(seed))
        fill(rb)
        found.append(drawn(rb, 10))
    assert found[0] == found[1] != found[2]


@pytest.mark.some(3)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seeding_again_starts_over(sampler: str) -> None:
    generator = given()
    rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=SAMPLERS[sampler](), generator=generator)
    fill(rb)
    first = drawn(rb, 3)
    generator.manual_seed(7)
    other = drawn(rb, 3)
    assert first != other
    if sampler != "without":  # its passes have numbers, which go on
        generator.manual_seed(3)
        assert drawn(rb, 3) == first


def test_a_batch_costs_one_step_whatever_its_size() -> None:
    ends = []
    for size in (1, 500):
        generator = given()
        rb = TensorDictReplayBuffer(storage=MemoryStorage(1000), generator=generator)
        fill(rb)
        drawn(rb, 5, size)
        ends.append(generator.get_state())
    assert torch.equal(*ends)


def test_set_rng_takes_a_generator_and_gives_it_up() -> None:
    plain = TensorDictReplayBuffer(storage=MemoryStorage(1000, seed=5))
    rb = TensorDictReplayBuffer(storage=MemoryStorage(1000, seed=5))
    fill(plain)
    fill(rb)
    wanted = drawn(plain, 8)
    rb.set_rng(given())
    by_generator = drawn(rb, 4)
    rb.set_rng(None)
    assert by_generator != wanted[:4]
    assert drawn(rb, 4) == wanted[4:]  # draws are numbered on


# ---------------------------------------------------------------------------------------------------
# Restarts.


@pytest.mark.some(3)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("end", ["close", "flush", "later"])
def test_draws_continue_after_a_restart(store_path: Path, sampler: str, end: str) -> None:
    """Closed, killed just after a flush, and killed some batches and rows later."""

    def work(path: Path) -> TensorDictReplayBuffer:
        rb = open_with(path, sampler, seed=None)
        fill(rb)
        drawn(rb, 7)
        rb.flush()
        if end == "later":
            rb.extend(numbered_rows(50, 100))
            drawn(rb, 5)
        return rb

    with work(store_path.with_suffix(".other")) as rb:
        wanted = drawn(rb, 50)
    if end == "close":
        work(store_path).close()
    else:
        in_child(lambda: work(store_path))
    with open_with(store_path, sampler, seed=None) as rb:
        assert drawn(rb, 50) == wanted


@pytest.mark.some(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_versions_carry_the_generator(tmp_path: Path, sampler: str) -> None:
    with open_with(tmp_path / "a.exp", sampler) as rb:
        fill(rb)
        drawn(rb, 7)
        rb.dumps(tmp_path / "versions")
        wanted = drawn(rb, 20)
        rb.loads(tmp_path / "versions")
        assert drawn(rb, 20) == wanted
    with open_with(tmp_path / "b.exp", sampler, seed=9) as rb:
        rb.loads(tmp_path / "versions")
        assert drawn(rb, 20) == wanted


def test_an_opening_draws_by_the_generator_as_it_is(store_path: Path) -> None:
    with open_with(store_path, "random") as rb:
        fill(rb)
        rb.dumps(store_path.with_suffix(".versions"))
        first = drawn(rb, 5)
        rb.flush()
    with open_with(store_path, "random") as rb:
        assert drawn(rb, 5) == first
        rb.loads(store_path.with_suffix(".versions"))
        assert drawn(rb, 5) == first
    with open_with(store_path, "random") as rb:
        assert drawn(rb, 5) == first


def test_copies_draw_batches_of_their_own(store_path: Path) -> None:
    import pickle

    with open_with(store_path, "random") as rb:
        fill(rb)
        before = rb._sampling.generator.get_state()  # type: ignore[union-attr]
        with pickle.loads(pickle.dumps(rb)) as copy:
            assert drawn(copy, 3) != drawn(rb, 3)
        assert not torch.equal(before, rb._sampling.generator.get_state())  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------
# state_dict.


@pytest.mark.some(2)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_loaded_state_survives_a_kill(store_path: Path, sampler: str) -> None:
    """Records before have larger numbers of draws: they must not come back."""
    wanted = store_path.with_suffix(".wanted")

    def work() -> None:
        rb = open_with(store_path, sampler, seed=None)
        fill(rb)
        drawn(rb, 3)
        state = rb.state_dict()
        drawn(rb, 20)
        rb.extend(numbered_rows(10, 100))
        drawn(rb, 20)
        rb.flush()
        rb.load_state_dict(state)
        torch.save(state, wanted)

    in_child(work)
    with open_with(store_path, sampler, seed=None) as rb:
        assert rb.storage.draws.number == 3
        after = drawn(rb, 20)
        rb.load_state_dict(torch.load(wanted))
        assert drawn(rb, 20) == after


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with open_with(tmp_path / "a.exp", "random", seed=None) as rb:
        fill(rb)
        drawn(rb, 3)
        state = rb.state_dict()
        wanted = drawn(rb, 5)
        for wrong, text in (
            ({"_draws": state["_draws"] | {"seed": 2}}, "seed 2"),
            ({"_sampler": {"alpha": 0.5}}, r"not a state of a buffer with RandomSampler\(\)"),
            ({"_transforms": {"0": {}}}, "the state is of transforms"),
            ({"_draws": state["_draws"] | {"last_id": 1000}}, "up to id 1000"),
            ({"_rng": given().get_state()}, "the state draws by a generator"),
        ):
            with pytest.raises(StateError, match=text):
                rb.load_state_dict(state | wrong)
        for lost in state:
            with pytest.raises(StateError, match="not a state of a"):
                rb.load_state_dict({name: part for name, part in state.items() if name != lost})
        assert rb.storage.draws.number == 8
        rb.load_state_dict(state)
        assert drawn(rb, 5) == wanted
    with open_with(tmp_path / "a.exp", "random", seed=3) as rb:
        with pytest.raises(StateError, match="the buffer draws by a generator"):
            rb.load_state_dict(state)
        with pytest.raises(StateError, match="another kind of generator"):
            rb.load_state_dict(rb.state_dict() | {"_rng": torch.zeros(16, dtype=torch.uint8)})


def test_threads_that_draw_by_a_generator_take_a_step_each(store_path: Path) -> None:
    """However they interleave, the state that is kept belongs to the number of batches."""
    with open_with(store_path, "random") as rb:
        fill(rb)
        threads = [threading.Thread(target=drawn, args=(rb, 200, 4)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            rb.flush()
        for thread in threads:
            thread.join()
        wanted = drawn(rb, 5)
        reference = TensorDictReplayBuffer(storage=MemoryStorage(1000), generator=given())
        fill(reference)
        drawn(reference, 600, 4)
        assert drawn(reference, 5) == wanted
