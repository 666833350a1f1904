"""Batches of rows of different lengths: padded, packed, and filled up to a number of tokens."""

from __future__ import annotations

import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.buffers import Sequence
from expstore.buffers.ensemble import ReplayBufferEnsemble
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import ArgumentError, NotReadyError, SchemaError, StateError
from expstore.samplers import ConsumingSampler, SamplerWithoutReplacement
from expstore.samplers.token_budget import TokenBudget
from expstore.storages.memory import MemoryStorage
from tests.support.batches import numbered_rows
from tests.support.variable_length import TypedMemory, jagged, rollouts

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

SCHEMA: dict[str, Any] = {
    "number": "int64",
    "text": str,
    "tokens": ("int32", (None,)),
    "flags": ("bool", (None,)),
    "image": ("int64", (None, None)),
    "next": {"values": ("bfloat16", (None, 2)), "reward": "float32"},
}
RAGGED = [("tokens",), ("flags",), ("next", "values")]
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def tokens_of(lengths: Any) -> list[torch.Tensor]:
    """Return tokens that follow from the number of their row."""
    return [torch.arange(length, dtype=torch.int32) + 100 * n for n, length in enumerate(lengths)]


def rows(lengths: list[int], others: list[int] | None = None) -> TensorDict:
    """Return rows of these lengths; `others`: the lengths of flags and values."""
    random = torch.Generator().manual_seed(len(lengths))
    others, count = lengths if others is None else others, len(lengths)
    values = [torch.randn(size, 2, generator=random).bfloat16() for size in others]
    return TensorDict(
        {
            "number": torch.arange(count),
            "text": [f"row {n}" for n in range(count)],
            "tokens": jagged(tokens_of(lengths)),
            "flags": jagged([torch.rand(size, generator=random) < 0.5 for size in others]),
            "image": NonTensorStack(*[torch.full((1 + n % 2, 2 + n % 3), n) for n in range(count)]),
            "next": {"values": jagged(values), "reward": torch.arange(count).float()},
        },
        [count],
    )


def in_memory(data: Any, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=TypedMemory(100, seed=3), with_ids=True, **options)
    rb.extend(data)
    return rb


def same(found: Any, expected: torch.Tensor) -> None:
    found = torch.as_tensor(found)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bits = BITS.get(found.dtype, found.dtype)
    assert torch.equal(found.view(bits), expected.view(bits))


def entry(batch: Any, key: tuple[str, ...], ending: str = "") -> Any:
    for name in key[:-1]:
        batch = batch[name]
    return batch[key[-1] + ending]


@st.composite
def batches(draw: Any) -> tuple[list[int], list[int]]:
    lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)
    first = draw(lengths)
    size = len(first)
    return first, draw(st.just(first) | st.lists(st.integers(0, 5), min_size=size, max_size=size))


# -- the values -------------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "draw/ragged", "Padded and packed batches have the stored rows of different lengths bit for bit."
)
@given(batches(), st.booleans())
def test_padded_and_packed_batches_have_the_stored_rows(
    lengths: tuple[list[int], list[int]], as_numpy: bool
) -> None:
    stored, size = rows(*lengths), len(lengths[0])
    for form in ("padded", "packed"):
        rb = in_memory(stored, batch_size=size + 2, ragged=form, as_numpy=as_numpy)
        batch = rb.sample()
        drawn = np.asarray(batch["number"]).tolist()
        assert isinstance(batch, dict) == as_numpy
        assert batch["next"]["reward"].tolist() == drawn
        for key in RAGGED:
            expected = [entry(stored, key).unbind()[n] for n in drawn]
            if as_numpy:
                expected = [row.float() if row.dtype is torch.bfloat16 else row for row in expected]
            check = check_padded if form == "padded" else check_packed
            check(batch, key, expected)


def check_padded(batch: Any, key: tuple[str, ...], expected: list[torch.Tensor]) -> None:
    dense = entry(batch, key)
    lengths = torch.tensor([len(row) for row in expected])
    same(entry(batch, key, "_lengths"), lengths)
    same(entry(batch, key, "_mask"), torch.arange(int(lengths.max())) < lengths[:, None])
    wanted = torch.zeros(len(expected), int(lengths.max()), *expected[0].shape[1:], dtype=expected[0].dtype)
    for place, row in enumerate(expected):
        wanted[place, : len(row)] = row
    same(dense, wanted)


def check_packed(batch: Any, key: tuple[str, ...], expected: list[torch.Tensor]) -> None:
    same(entry(batch, key), torch.cat(expected))
    ends = [0, *itertools.accumulate(len(row) for row in expected)]
    same(entry(batch, key, "_cu_seqlens"), torch.tensor(ends, dtype=torch.int32))
    same(entry(batch, key, "_position_ids"), torch.cat([torch.arange(len(row)) for row in expected]))


def test_entries_of_other_kinds_stay_and_batch_sizes_fit() -> None:
    stored = rows([2, 0, 3], [1, 1, 1])
    plain, padded, packed = (
        in_memory(stored, batch_size=4, ragged=form).sample() for form in ("jagged", "padded", "packed")
    )
    assert plain["tokens"].layout is torch.jagged
    assert (padded.batch_size, padded["next"].batch_size) == ((4,), (4,))
    assert (packed.batch_size, packed["next"].batch_size) == ((), ())
    added = {"padded": {"_lengths", "_mask"}, "packed": {"_cu_seqlens", "_position_ids"}}
    for form, batch in (("padded", padded), ("packed", packed)):
        entries = {name + ending for name in ("tokens", "flags") for ending in added[form]}
        assert set(batch.keys()) == set(plain.keys()) | entries
        assert list(batch["text"]) == list(plain["text"])
        assert batch["image"].is_nested
        assert torch.equal(batch["id"], plain["id"])


def test_fields_of_the_same_lengths_share_no_memory() -> None:
    batch = in_memory(rows([2, 3]), batch_size=4, ragged="padded").sample()
    kept = batch["flags_mask"].clone(), batch["flags_lengths"].clone()
    batch["tokens_mask"].zero_()
    batch["tokens_lengths"].zero_()
    assert torch.equal(batch["flags_mask"], kept[0])
    assert torch.equal(batch["flags_lengths"], kept[1])


def test_rows_that_are_read_by_index_stay_jagged() -> None:
    rb = in_memory(rows([2, 3]), batch_size=4, ragged="packed")
    assert rb[:]["tokens"].layout is torch.jagged
    assert rb[1]["tokens"].tolist() == [100, 101, 102]


def test_transforms_see_jagged_tensors() -> None:
    seen: list[Any] = []

    def note(batch: Any) -> Any:
        seen.append(batch["tokens"].layout)
        return batch

    batch = in_memory(rows([2, 3]), batch_size=4, ragged="packed", transform=note).sample()
    assert seen == [torch.jagged]
    assert batch["tokens"].ndim == 1


def test_information_about_rows_comes_with_packed_batches() -> None:
    rb = in_memory(rows([2, 3]), batch_size=4, ragged="packed")
    batch, info = rb.sample(return_info=True)
    assert torch.equal(info["id"], batch["id"])
    assert "id" not in rb.sample(include_info=False).keys()  # noqa: SIM118 - see TensorDict


# -- a number of tokens -----------------------------------------------------------------------------------

LENGTHS = [int(n) for n in np.random.default_rng(1).integers(0, 9, 40)]
SAMPLERS: dict[str, Any] = {
    "pass": SamplerWithoutReplacement,
    "pass, where": lambda: SamplerWithoutReplacement(where="number % 3 != 1"),
    "consuming": ConsumingSampler,
    "consuming, where": lambda: ConsumingSampler(where="number % 3 != 1"),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ragged") / "run.exp"
    with expstore.open(found, layout="arrow", schema=SCHEMA, seed=1) as rb:
        rb.extend(rows(LENGTHS))
    return found


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run.exp"))


def opened(path: Path, tokens: int | None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "batch_size": 10,
        "sampler": "without_replacement",
        "batches": {"batch_tokens": tokens},
    }
    return expstore.open(path, **given | options)


def fill(order: list[int], tokens: int, most: int) -> list[list[int]]:
    """Return batches of whole rows in an order, as many in each as fit."""
    found: list[list[int]] = [[]]
    for n in order:
        if found[-1] and (sum(LENGTHS[m] for m in [*found[-1], n]) > tokens or len(found[-1]) == most):
            found.append([])
        found[-1].append(n)
    return found


def numbers(drawn: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in drawn]


@pytest.mark.guarantee(
    "draw/tokens", "A batch of at most `batch_tokens` tokens has whole rows, and a pass loses none of them."
)
@pytest.mark.parametrize("kind", ["pass", "pass, where"])
def test_a_pass_is_the_same_rows_cut_where_they_do_not_fit(path: Path, kind: str) -> None:
    with opened(path, None, sampler=SAMPLERS[kind]()) as rb:
        order = list(itertools.chain(*numbers(rb)))
    for tokens in (1, 8, 20, 1000):
        with opened(path, tokens, sampler=SAMPLERS[kind](), mode="r", seed=1) as rb:
            reader = list(itertools.chain(*numbers(rb)))
            assert sorted(reader) == sorted(order)
        with opened(path, tokens, sampler=SAMPLERS[kind](), mode="r", seed=1) as rb:
            assert numbers(rb) == fill(reader, tokens, 10)


@pytest.mark.guarantee("draw/tokens")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_row_comes_once_and_batches_fit(path: Path, kind: str) -> None:
    with opened(path, 12, sampler=SAMPLERS[kind]()) as rb:
        found = numbers(rb)
    wanted = [n for n in range(40) if "where" not in kind or n % 3 != 1]
    assert sorted(itertools.chain(*found)) == wanted
    for batch in found:
        assert sum(LENGTHS[n] for n in batch) <= 12 or len(batch) == 1
    assert len({len(batch) for batch in found}) > 1


def test_a_pass_continues_after_a_restart_and_ahead_of_the_calls(path: Path) -> None:
    with opened(path, 12, mode="r", seed=5) as rb:
        expected = numbers(itertools.islice(rb, 8))
    found = []
    for _ in range(2):
        with opened(path, 12) as rb:
            found += numbers([rb.sample(), rb.sample()])
    with opened(path, 12, batches={"batch_tokens": 12, "prefetch": 3}) as rb:
        found += numbers(rb)
    assert sorted(itertools.chain(*found)) == list(range(40))
    with opened(path, 12, mode="r", seed=5, batches={"batch_tokens": 12, "prefetch": 3}) as rb:
        assert numbers([rb.sample() for _ in range(8)]) == expected


@pytest.mark.guarantee("draw/tokens")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_consumers_record_the_rows_that_fit(path: Path, kind: str) -> None:
    with opened(path, 12) as rb, rb.consumer("learner", sampler=SAMPLERS[kind]()) as learner:
        first = numbers(learner.sample() for _ in range(2))
        position = learner.position
        found = numbers(learner)
        learner.seek(position)
        assert numbers(learner) == found
    wanted = [n for n in range(40) if "where" not in kind or n % 3 != 1]
    assert sorted(itertools.chain(*first, *found)) == wanted
    assert all(sum(LENGTHS[n] for n in batch) <= 12 or len(batch) == 1 for batch in first + found)


def test_ranks_share_a_batch_of_so_many_tokens(path: Path) -> None:
    with ExitStack() as stack:
        buffers = [stack.enter_context(opened(path, 16, mode=mode)) for mode in ("a", "r")]
        ranks = [
            stack.enter_context(
                rb.consumer("learner", sampler="without_replacement", rank=rank, world=2, timeout=20)
            )
            for rank, rb in enumerate(buffers)
        ]
        found = [numbers(rank.sample() for _ in range(6)) for rank in ranks]
    for parts in zip(*found, strict=True):
        rows_ = list(itertools.chain(*parts))
        assert sum(LENGTHS[n] for n in rows_) <= 16 or len(rows_) == 1


def test_tokens_are_counted_in_the_named_field() -> None:
    lengths, others = [1, 2, 3, 4, 5], [5, 5, 5, 5, 5]
    rb = in_memory(
        rows(lengths, others), batch_size=5, batch_tokens=10, tokens_key=("next", "values"),
        sampler=SamplerWithoutReplacement(shuffle=False),
    )  # fmt: skip
    assert numbers(rb) == [[0, 1], [2, 3], [4]]


def test_another_sampler_keeps_to_the_tokens_until_it_draws_for_another_buffer(path: Path) -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    with opened(path, 1) as rb:
        rb.set_sampler(sampler)
        assert all(sum(LENGTHS[n] for n in batch) <= 1 or len(batch) == 1 for batch in numbers(rb))
        rb.set_sampler("without_replacement")
    with opened(path, None, sampler=sampler) as rb:
        assert len(rb.sample()) == 10


def test_lengths_that_may_be_of_another_field_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = in_memory(rows([1, 2])).storage
    read = storage.read

    def change(*given: Any) -> Any:
        storage.epochs.fields += 2
        return read(*given)

    monkeypatch.setattr(storage, "read", change)
    with pytest.raises(StateError, match="fields were added or dropped"):
        TokenBudget(5).count_fitting(storage, np.array([1, 2]))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_threads_draw_rows_once_while_others_are_added(path: Path, kind: str) -> None:
    with opened(path, 12, sampler=SAMPLERS[kind]()) as rb:
        row = rows([2])[0]
        row["number"] = torch.tensor(0)
        found: list[list[int]] = []
        stop = threading.Event()

        def add() -> None:
            while not stop.is_set():
                rb.add(row)

        def draw() -> None:
            with suppress(NotReadyError):  # the consuming samplers have used up all rows
                for _ in range(15):
                    found.append(rb.sample()["id"].tolist())

        with ThreadPoolExecutor(4) as pool:
            adding = pool.submit(add)
            try:
                for drawing in [pool.submit(draw) for _ in range(3)]:
                    drawing.result(60)
            finally:
                stop.set()
            adding.result(60)
        lengths = {n + 1: length for n, length in enumerate(LENGTHS)}
        for ids in found:
            assert sum(lengths.get(n, 2) for n in ids) <= 12 or len(ids) == 1
        if "consuming" in kind:
            assert len(set(itertools.chain(*found))) == sum(map(len, found))


@pytest.mark.parametrize("kind", ["pass", "consuming"])
def test_lengths_are_read_without_locks_that_come_after_the_storages(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, 12, sampler=SAMPLERS[kind]()) as rb, ThreadPoolExecutor(1) as other:
        lock = rb.storage.locks.sampled if kind == "consuming" else rb.sampler._lock
        read, free = rb.storage.read, []

        def take() -> bool:
            taken = lock.acquire(blocking=False)
            if taken:
                lock.release()
            return bool(taken)

        def look(*given: Any) -> Any:
            free.append(other.submit(take).result())
            return read(*given)

        monkeypatch.setattr(rb.storage, "read", look)
        rb.sample()
        assert free == [True, True]


# -- what is refused --------------------------------------------------------------------------------------


def test_settings_are_checked_before_a_store_is_made(store_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ragged": "dense"}, "ragged='dense' is unknown"),
        ({"ragged": None}, "ragged=None is unknown"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
        ({"batch_tokens": "many"}, "batch_tokens must be an integer"),
        ({"tokens_key": "tokens"}, "tokens_key has no effect without batch_tokens"),
        ({"batch_tokens": 5, "tokens_key": 3}, "tokens_key is the key of a field"),
        ({"batch_tokens": 5}, "which would lose the rows"),
        ({"batch_tokens": 5, "sample_unit": Sequence(2)}, "exclude each other"),
    ]
    for settings, message in cases:
        with pytest.raises(ArgumentError, match=message):
            expstore.open(store_path, layout="arrow", batches=settings)
        assert not store_path.exists()


def test_samplers_that_would_lose_rows_are_refused(path: Path) -> None:
    with opened(path, 5) as rb:
        former = rb.sampler
        for sampler in ("uniform", "prioritized", SamplerWithoutReplacement(drop_last=True)):
            with pytest.raises(ArgumentError, match="batch_tokens=5"):
                rb.set_sampler(sampler)
        assert rb.sampler is former
        with pytest.raises(ArgumentError, match="batch_tokens=5"):
            rb.consumer("learner")
        assert len(rb.sample()) >= 1


class Own(SamplerWithoutReplacement):
    def select(self, *given: Any) -> Any:
        return super().select(*given)


def test_a_subclass_that_draws_otherwise_says_whether_it_leaves_rows() -> None:
    with pytest.raises(ArgumentError, match="batch_tokens=5"):
        in_memory(rows([1]), batch_tokens=5, sampler=Own())


def refuse(rb: Any, message: str) -> None:
    """Draw, which is refused and counts nothing."""
    before = rb.storage.draws.number, len(rb)
    with pytest.raises(SchemaError, match=message):
        rb.sample()
    assert (rb.storage.draws.number, len(rb)) == before


@pytest.mark.parametrize("options", [{"ragged": "padded"}, {"ragged": "packed"}, {"batch_tokens": 5}])
def test_rows_without_ragged_fields_are_refused_and_none_is_used_up(options: dict[str, Any]) -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(10), sampler=ConsumingSampler(), batch_size=2, **options
    )
    rb.extend(numbered_rows(4))
    refuse(rb, "tensors of different lengths, and the store has none")
    refuse(in_memory(rollouts(0, 4).select("prompt", "image"), **options | {"batch_size": 2}
                     | {"sampler": ConsumingSampler()}), "the store has none")  # fmt: skip


def test_names_that_are_taken_are_refused() -> None:
    data = rows([1, 2]).set("tokens_mask", torch.zeros(2))
    refuse(in_memory(data, batch_size=2, ragged="padded"), "adds the entry 'tokens_mask'")
    data = rows([1, 2])
    data["next", "values_cu_seqlens"] = torch.zeros(2)
    refuse(in_memory(data, batch_size=2, ragged="packed"), "adds the entry 'next.values_cu_seqlens'")
    assert in_memory(data, batch_size=2, ragged="padded").sample() is not None


def test_names_that_a_transform_has_taken_are_refused() -> None:
    rb = in_memory(
        rows([1, 2]), batch_size=2, ragged="padded",
        transform=lambda batch: batch.set("tokens_mask", torch.zeros(2)),
    )  # fmt: skip
    with pytest.raises(SchemaError, match="adds the entry 'tokens_mask'"):
        rb.sample()


@pytest.mark.parametrize("key", ["number", "text", "image", "missing"])
def test_a_field_without_lengths_is_refused_as_tokens(key: str) -> None:
    sampler = ConsumingSampler()
    rb = in_memory(rows([1, 2]), batch_size=2, batch_tokens=5, tokens_key=key, sampler=sampler)
    refuse(rb, f"tokens_key='{key}' is not a field")


def test_batches_that_are_no_tensordicts_are_refused() -> None:
    rb = ReplayBuffer(storage=TypedMemory(100), batch_size=2, ragged="padded", collate_fn=lambda _: [1])
    rb.extend(rows([1, 2]))
    with pytest.raises(SchemaError, match="this one is a list"):
        rb.sample()


def test_members_of_an_ensemble_have_jagged_batches() -> None:
    plain, padded = in_memory(rows([1, 2])), in_memory(rows([1, 2]), ragged="padded")
    with pytest.raises(ArgumentError, match="cannot be joined"):
        ReplayBufferEnsemble(plain, padded, batch_size=4)
    assert ReplayBufferEnsemble(plain, batch_size=4) is not None
