"""Ranks of a consumer: their parts make up the batches, each row comes once, and former ranks are fenced."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import expstore
from expstore.disk.files import Disk
from expstore.errors import ArgumentError, CorruptionError, NotReadyError, RowsChangedError, StateError
from expstore.storages.format.ranks import Ranks
from tests.support.batches import observed_episode as rows
from tests.support.draw_sequences import BATCH, CAPACITY, SAMPLERS, sampler_rows, short_rings
from tests.support.forks import collect_from_child, forked
from tests.support.threads import in_threads

pytestmark = [
    pytest.mark.usefixtures("no_syncs", "no_index_on_close"),
    pytest.mark.filterwarnings("ignore:.*completing the draw with replacement"),
]

KINDS = {name: make for name, make in SAMPLERS.items() if not name.startswith("consuming")}


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["observation"].reshape(-1).long().tolist()
    return found


class Group:
    """A writer, and ranks that each have the store open."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self.rb: Any = stack.enter_context(expstore.open(path, batch_size=8, seed=1))
        self.rb.extend(rows(96))

    def reader(self) -> Any:
        return self._stack.enter_context(expstore.open(self.path, mode="r", batch_size=8))

    def ranks(self, world: int, make: Callable[[], Any] | None = None, **options: Any) -> list[Any]:
        buffers = [self.rb, *(self.reader() for _ in range(world - 1))]
        return [
            self._stack.enter_context(
                rb.consumer("learner", sampler=make and make(), rank=rank, world=world, **options)
            )
            for rank, rb in enumerate(buffers)
        ]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(tmp_path / "run.exp", stack)


def step(ranks: list[Any]) -> list[list[int]]:
    return [numbers(rank.sample()) for rank in ranks]


def joined(parts: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


# -- parts -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/ranks", "The parts of a consumer's ranks make up the batch that one process would draw."
)
def test_parts_make_up_the_batch(tmp_path: Path) -> None:
    """Of every kind of sampler, with two and with three ranks; the consumers share a store."""
    with short_rings(), ExitStack() as stack:
        path = tmp_path / "run.exp"
        rb = stack.enter_context(expstore.open(path, capacity=CAPACITY, batch_size=BATCH, seed=3))
        rb.extend(sampler_rows(CAPACITY, 0))
        rb.flush()
        readers = [stack.enter_context(expstore.open(path, mode="r", batch_size=BATCH)) for _ in range(2)]
        for kind, make in KINDS.items():
            with rb.consumer(f"{kind}_alone", sampler=make()) as alone:
                wholes = [alone.sample() for _ in range(6)]
            for world in (2, 3):
                ranks = [
                    one.consumer(f"{kind}_{world}", sampler=make(), rank=n, world=world)
                    for n, one in enumerate([rb, *readers][:world])
                ]
                for whole in wholes:
                    parts = [rank.sample() for rank in ranks]
                    joined = torch.cat([part for part in parts if len(part)])
                    assert bool((joined == whole).all()), (kind, world)
                    if "slices" not in kind:
                        sizes = [len(part) for part in parts]
                        assert max(sizes) - min(sizes) <= 1, (kind, world)
                for rank in ranks:
                    rank.close()


@pytest.mark.parametrize(
    "options", [{}, {"pad_output": True, "strict_length": False}, {"truncated_key": None}]
)
def test_a_slice_is_in_one_part(group: Group, options: dict[str, Any]) -> None:
    group.rb.extend(torch.cat([rows(5, 200), rows(7, 300), rows(6, 400)]))
    ranks = group.ranks(2, lambda: expstore.SliceSampler(slice_len=4, **options), batch_size=16)
    for _ in range(5):
        for part in step(ranks):
            assert len(part) % 4 == 0
            for at in range(0, len(part), 4):
                steps = np.diff(part[at : at + 4])
                assert np.isin(steps, (0, 1)).all()


def test_a_batch_smaller_than_the_ranks_leaves_parts_empty(group: Group) -> None:
    ranks = group.ranks(3, batch_size=2)
    assert [rank.sample()["next", "done"].shape for rank in ranks] == [(1, 1), (1, 1), (0, 1)]


def test_weights_of_priorities_come_with_their_rows(group: Group) -> None:
    group.rb.update_priority(torch.arange(96), torch.rand(96, generator=torch.Generator().manual_seed(1)))
    ranks = group.ranks(2, lambda: expstore.PrioritizedSampler(96, 0.7, 0.5))
    alone = group.rb.consumer("alone", sampler=expstore.PrioritizedSampler(96, 0.7, 0.5))
    for _ in range(3):
        weights = torch.cat([rank.sample()["priority_weight"] for rank in ranks])
        assert torch.equal(weights, alone.sample()["priority_weight"])


# -- each row once ---------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/world", "Another number of ranks continues a pass of a consumer, and each row comes once."
)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4), (4, 1)])
def test_another_number_of_ranks_continues_a_pass(group: Group, before: int, after: int) -> None:
    ranks, seen = group.ranks(before, expstore.SamplerWithoutReplacement), []
    for _ in range(5):
        seen += joined(step(ranks))
    for rank in ranks:
        rank.commit()
    step(ranks)  # not committed: it comes again
    for rank in ranks:
        rank.close()
    ranks = group.ranks(after, expstore.SamplerWithoutReplacement)
    assert ranks[0].committed == 5
    for _ in range(7):
        seen += joined(step(ranks))
    assert sorted(seen) == list(range(96))


@pytest.mark.guarantee(
    "consumers/least", "A draw is committed when all ranks of its consumer have committed it."
)
def test_the_least_commit_counts(group: Group) -> None:
    first, second = ranks = group.ranks(2)
    for _ in range(6):
        step(ranks)
    first.commit()
    assert (first.committed, second.committed) == (0, 0)
    second.commit(dict(second.position, draw=4))
    assert (first.committed, second.committed) == (4, 4)
    with pytest.raises(StateError, match="cannot commit draw 3 .*: 4 draws are committed"):
        second.commit(dict(second.position, draw=3))
    for rank in ranks:
        rank.close()
    first, second = group.ranks(2)
    assert first.position["draw"] == second.position["draw"] == 4


def test_the_log_is_dropped_up_to_the_least_commit(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expstore.storages.format.draw_log.SEGMENT_BYTES", 500)
    first, second = ranks = group.ranks(2)
    for _ in range(20):
        step(ranks)
    first.commit()
    first.seek({"consumer": "learner", "id": first.position["id"], "draw": 0})  # all are there
    second.commit()
    first.seek("end")
    first.commit()
    with pytest.raises(StateError, match="cannot go back to draw 0"):
        first.seek({"consumer": "learner", "id": first.position["id"], "draw": 0})
    assert group.rb.consumers.list()[0].committed == 20


def test_a_torn_commit_of_a_rank_counts_as_none(group: Group) -> None:
    first, second = ranks = group.ranks(2)
    for _ in range(3):
        step(ranks)
    second.commit()
    first.commit()
    path = group.path / "consumers" / "learner" / "commit-1"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert second.committed == 3  # rank 0 wrote what all had committed
    path.write_bytes(data[:5])
    step(ranks)
    first.commit()
    assert first.committed == 3


# -- who is there ----------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/fence", "Ranks of a consumer's former number of ranks can neither draw nor commit."
)
def test_former_ranks_are_fenced(group: Group) -> None:
    first, second = ranks = group.ranks(2, timeout=5)
    step(ranks)
    first.close()
    group.rb.consumer("learner", rank=0, world=1).close()
    for act in (second.sample, second.commit):
        with pytest.raises(StateError, match="the consumer has 1 ranks now; this was rank 1 of 2"):
            act()


def test_rank_0_that_opens_again_keeps_the_others(group: Group) -> None:
    first, second = ranks = group.ranks(2)
    step(ranks)
    first.close()
    first = group.rb.consumer("learner", rank=0, world=2, at="end")
    assert len(joined(step([first, second]))) == 8


def test_a_rank_waits_for_rank_0(group: Group) -> None:
    reader, found = group.reader(), []

    def work() -> None:
        with reader.consumer("learner", rank=1, world=2) as rank:
            found.extend(numbers(rank.sample()))

    thread = threading.Thread(target=work)
    thread.start()
    with group.rb.consumer("learner", rank=0, world=2) as first:
        whole = numbers(first.sample())
        thread.join()
    assert len(found) == len(whole) == 4


def test_a_rank_does_not_wait_for_ever(group: Group) -> None:
    reader = group.reader()
    with pytest.raises(NotReadyError, match=r"rank 1 of consumer 'learner' has waited 0.01 s .* to open it"):
        reader.consumer("learner", rank=1, world=2, timeout=0.01)
    _, second = group.ranks(2, timeout=0.01)
    with pytest.raises(NotReadyError, match="for rank 0 to make draw 0, with world=2"):
        second.sample()


def test_rank_and_world_come_from_the_environment(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with group.rb.consumer("learner") as first:
        assert len(first.sample()) == 4
    with group.rb.consumer("learner", rank=0, world=1) as first:
        assert len(first.sample()) == 8
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ArgumentError, match="WORLD_SIZE must be a number, got 'two'"):
        group.rb.consumer("learner")


def test_wrong_ranks_are_refused(group: Group) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank": 2, "world": 2}, "rank must be from 0 to world - 1"),
        ({"rank": -1, "world": 2}, "rank must be from 0 to world - 1"),
        ({"rank": 0}, "pass both rank and world"),
        ({"world": 2}, "pass both rank and world"),
        ({"rank": 0, "world": 1, "timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"rank": 0, "world": 1, "timeout": "1"}, "timeout must be a number of seconds above 0"),
    ]
    for options, message in cases:
        with pytest.raises(ArgumentError, match=message):
            group.rb.consumer("learner", **options)
    assert group.rb.consumers.list() == []


def test_damaged_ranks_are_reported(group: Group) -> None:
    for rank in group.ranks(2):
        rank.close()
    (group.path / "consumers" / "learner" / "ranks.json").write_text("{")
    with pytest.raises(CorruptionError, match="ranks.json"):
        group.rb.consumer("learner", rank=0, world=2)


# -- what comes again ------------------------------------------------------------------------------------


def test_ranks_go_back(group: Group) -> None:
    ranks = group.ranks(2)
    position, parts = ranks[1].position, [step(ranks) for _ in range(3)]
    group.rb.extend(rows(50, 96))
    for rank in ranks:
        rank.seek(position)
    assert [rank.replaying for rank in ranks] == [True, True]
    assert [step(ranks) for _ in range(3)] == parts
    assert [numbers(batch) for batch in ranks[1].replay(0, 2)] == [part[1] for part in parts]


def test_a_rank_whose_rows_were_overwritten_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ring.exp"
    with (
        expstore.open(path, capacity=16, batch_size=8, seed=1) as rb,
        expstore.open(path, mode="r", batch_size=8) as reader,
    ):
        rb.extend(rows(16))
        first = rb.consumer("learner", rank=0, world=2)
        second = reader.consumer("learner", rank=1, world=2)
        first.sample()
        rb.extend(rows(16, 16))
        rb.flush()  # until then the reader sees the former rows
        with pytest.raises(RowsChangedError, match="draw 0 had rows that were"):
            second.sample()
        second.close()
        first.close()


def test_a_draw_that_was_written_but_not_counted_is_used(group: Group) -> None:
    (first,) = group.ranks(1)
    first.close()
    first, second = group.ranks(2)
    count = first._log.count
    first._sampler.number = count
    first._sampler.decide(group.rb.storage, 8)
    first._log.count = count  # as after Ctrl-C
    assert len(set(joined(step([first, second])))) > 0
    assert first._log.count == second._log.follow() == count + 1


def test_followers_find_later_segments(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expstore.storages.format.draw_log.SEGMENT_BYTES", 300)
    first, second = group.ranks(2)
    own, others = ([numbers(rank.sample()) for _ in range(12)] for rank in (first, second))
    with group.rb.consumer("alone", keep="all") as alone:
        assert [mine + theirs for mine, theirs in zip(own, others, strict=True)] == [
            numbers(alone.sample()) for _ in range(12)
        ]
    assert len(list((group.path / "consumers" / "learner").glob("0*"))) > 2


def test_a_generation_outlives_its_processes(tmp_path: Path) -> None:
    disk = Disk()
    first = Ranks(disk, tmp_path, 0, 2)
    first.begin()
    first.commit(5)
    second = Ranks(disk, tmp_path, 1, 2)
    assert second.join()
    assert second.count_committed(3) == 3
    second.commit(4)
    assert first.count_committed(3) == 4
    assert second.count_own(0) == 4
    other = Ranks(disk, tmp_path, 0, 3)
    assert not other.join()
    assert other.count_committed(3) == 4  # of the former ranks
    other.begin()
    assert other.count_committed(4) == 4
    other.commit(9)
    assert other.count_committed(4) == 4
    for one in (first, second, other):
        one.close()


# -- processes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_of_torch_distributed_share_batches(tmp_path: Path) -> None:
    path, store, world = tmp_path / "run.exp", tmp_path / "gloo", 3
    with expstore.open(path, seed=1) as rb:
        rb.extend(rows(96))
        with rb.consumer("alone", sampler=expstore.SamplerWithoutReplacement(), batch_size=8) as alone:
            whole = [numbers(batch) for batch in alone]

    def work(rank: int, tell: Callable[[Any], None]) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        sampler = expstore.SamplerWithoutReplacement()
        with (
            expstore.open(path, mode="r") as rb,
            rb.consumer("learner", sampler=sampler, batch_size=8, rank=rank, world=world) as consumer,
        ):
            for batch in consumer:
                parts: list[Any] = [None] * world
                dist.all_gather_object(parts, numbers(batch))
                tell(joined(parts))
        dist.barrier()

    found: dict[int, list[Any]] = {}

    def run(rank: int) -> None:
        found[rank] = collect_from_child(lambda tell: work(rank, tell))

    in_threads(world, run)
    assert all(found[rank] == whole for rank in range(world))


@pytest.mark.guarantee("consumers/ranks")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_worker_of_a_shared_buffer_has_consumers_and_ranks(
    tmp_path: Path, is_pickled: bool, rank: int
) -> None:
    """The worker writes between its draws, through the parent; either of them is rank 0."""

    def draw(consumer: Any, count: int) -> list[list[int]]:
        return [numbers(consumer.sample()) for _ in range(count)]

    with expstore.open(tmp_path / "run.exp", batch_size=4, seed=1).share() as rb:
        rb.extend(rows(100))
        data = pickle.dumps(rb)

        def work() -> Any:
            mine = pickle.loads(data) if is_pickled else rb
            with mine.consumer("own", sampler="without_replacement") as own:
                found = draw(own, 3)
                own.commit()
            mine.extend(rows(20, 100))
            with mine.consumer("both", rank=rank, world=2, timeout=60) as both:
                parts = draw(both, 4)
                both.commit()
            return found, parts

        with forked(work) as wait, rb.consumer("both", rank=1 - rank, world=2, timeout=60) as here:
            parts = draw(here, 4)
            here.commit()
            found, there = wait()
            assert here.committed == 4
        known = {one.name: (one.draws, one.committed, one.is_open) for one in rb.consumers.list()}
        assert known == {"own": (3, 3, False), "both": (4, 4, False)}
        with rb.consumer("own", sampler="without_replacement") as own:
            assert own.position["draw"] == 3
            assert [numbers(batch) for batch in own.replay(0, 2)] == found
    assert all(len(own + other) == 4 for own, other in zip(parts, there, strict=True))
