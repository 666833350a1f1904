"""Arguments and draws that samplers refuse: the class of each error, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from expstore import MemoryStorage, TensorDictReplayBuffer
from expstore.errors import NotReadyError, PriorityError, SchemaError, StateError
from expstore.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RecencySampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from tests.support.batches import memory_buffer, numbered_rows, steps, trajectory_rows

#: A call, the class of its error, and words of the message.
Refused = list[tuple[Callable[[], Any], type[Exception], str]]

slices = partial(SliceSampler, slice_len=2)


def over(sampler: Any, **options: Any) -> Any:
    """Make a buffer with a sampler."""
    return memory_buffer(10, sampler=sampler, **options)


ARGUMENTS: Refused = [
    *((partial(ConsumingSampler, n), TypeError, "must be a positive integer") for n in (True, 1.0, "1")),
    *((partial(ConsumingSampler, n), ValueError, "must be a positive integer") for n in (0, -1, 1 << 32)),
    (lambda: over(None, consume_after_n_samples=1.0), TypeError, "must be a positive integer"),
    (lambda: over(None, consume_after_n_samples=0), ValueError, "must be a positive integer"),
    (
        lambda: over(PrioritizedSampler(9), consume_after_n_samples=1),
        ValueError,
        "only supports the default RandomSampler",
    ),
    (
        lambda: over(SamplerWithoutReplacement(), consume_after_n_samples=1),
        ValueError,
        "only supports the default RandomSampler",
    ),
    (
        lambda: over(ConsumingSampler(2), consume_after_n_samples=1),
        ValueError,
        "conflicts with the provided ConsumingSampler.max_sample_count",
    ),
    (lambda: over(ConsumingSampler(), prefetch=2), ValueError, "Prefetching is not supported"),
    (lambda: over(None, prefetch=2, consume_after_n_samples=1), ValueError, "Prefetching is not supported"),
    (lambda: PrioritizedSampler(alpha=-1), ValueError, "alpha"),
    (lambda: PrioritizedSampler(alpha=math.nan), ValueError, "alpha"),
    (lambda: PrioritizedSampler(beta=-0.1), ValueError, "beta"),
    (lambda: PrioritizedSampler(eps=-1), ValueError, "eps"),
    (lambda: PrioritizedSampler(reduction="sum"), ValueError, "reduction"),  # type: ignore[arg-type]
    (lambda: PrioritizedSampler(dtype=torch.float16), ValueError, "float16"),
    (lambda: PrioritizedSampler(0), ValueError, "max_capacity=0: it is a number of rows, at least 1"),
    (lambda: StalenessAwareSampler(max_staleness=-2), ValueError, "max_staleness"),
    (lambda: StalenessAwareSampler(max_staleness=1.5), TypeError, "integer"),  # type: ignore[arg-type]
    (lambda: StreamingSliceSampler(slice_len=0), ValueError, "positive integer"),
    (lambda: StreamingSliceSampler(slice_len=1.5), TypeError, "positive integer"),  # type: ignore[arg-type]
    (lambda: StreamingSliceSampler(slice_len=True), TypeError, "positive integer"),
    (lambda: over(StreamingSliceSampler(slice_len=11)), ValueError, "cannot hold one slice_len=11 window"),
    (lambda: PromptGroupSampler(), TypeError, "Exactly one of num_groups or samples_per_group"),
    (lambda: PromptGroupSampler(num_groups=1, samples_per_group=1), TypeError, "Exactly one of num_groups"),
    (lambda: PromptGroupSampler(num_groups=1.5), TypeError, "must be a positive"),  # type: ignore[arg-type]
    (lambda: PromptGroupSampler(num_groups=True), TypeError, "must be a positive integer"),
    (lambda: PromptGroupSampler(samples_per_group=0), ValueError, "must be a positive integer"),
    (lambda: PromptGroupSampler(num_groups=1, strategy="best"), ValueError, "Unknown"),  # type: ignore[arg-type]
    (lambda: SliceSampler(), TypeError, "Either num_slices or slice_len must be not None, and not both"),
    (lambda: slices(num_slices=2), TypeError, "not both"),
    (lambda: SliceSampler(num_slices=0), ValueError, "num_slices must be at least 1"),
    (lambda: SliceSampler(slice_len=2.0), TypeError, "slice_len must be an integer, got 2.0"),
    (lambda: SliceSampler(num_slices=True), TypeError, "num_slices must be an integer"),
    (lambda: slices(pad_output=True), ValueError, "incompatible with strict_length=True"),
    *((partial(slices, span=span), ValueError, "span must be") for span in (-1, (1,), 1.0)),
    (lambda: slices(end_keys="done"), ValueError, "pass a single key as end_key"),
    (lambda: slices(end_keys=[]), ValueError, "end_keys must be a list of keys"),
    (lambda: slices(by="row"), ValueError, "by must be 'trajectory' or 'start'"),
    (lambda: slices(compile=True), ValueError, "SliceSampler does not support compile=True"),
    (lambda: slices(ends=torch.ones(2)), ValueError, "ends must be a 1-dim tensor of booleans"),
    (lambda: slices(trajectories=torch.zeros(2, 1)), ValueError, "trajectories must be a 1-dim tensor"),
    (lambda: slices(trajectories=[0], ends=[True]), ValueError, "are exclusive arguments"),
    (lambda: slices(trajectories=[0], traj_key="a"), ValueError, "are exclusive arguments"),
    (lambda: slices(end_key="a", end_keys=["b"]), RuntimeError, "exclusive"),
    (lambda: slices(traj_key="a", trajectory_key="a"), ValueError, "pass one of them"),
    (lambda: ConsumingSampler(weight="kind"), ValueError, "does not support weight='kind': .*use where="),
    (lambda: SamplerWithoutReplacement(weight="kind"), ValueError, "does not support weight='kind'"),
    (lambda: SliceSamplerWithoutReplacement(slice_len=3, weight="x"), ValueError, "once per pass"),
]


def test_arguments_that_make_no_sense_are_refused() -> None:
    for make, kind, words in ARGUMENTS:
        with pytest.raises(kind, match=words):
            make()


def test_attributes_refuse_what_arguments_do_and_change_nothing() -> None:
    recency, staleness = RecencySampler(half_life=5, newest=10), StalenessAwareSampler()
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="half_life must be a number of rows > 0"):
            recency.half_life = value
        with pytest.raises(ValueError, match="newest must be a number of rows >= 1"):
            recency.newest = value  # type: ignore[assignment]
    assert repr(recency) == "RecencySampler(half_life=5.0, newest=10)"
    for version, kind in ((-1, ValueError), (2**63, ValueError), (0.5, TypeError)):
        with pytest.raises(kind):
            staleness.consumer_version = version  # type: ignore[assignment]
    assert (staleness.consumer_version, staleness.max_staleness) == (0, -1)


# -- draws ------------------------------------------------------------------------------------------------


def versions(values: Any) -> TensorDict:
    return TensorDict({"policy_version": torch.as_tensor(values)}, [len(values)])


def by_version(**options: Any) -> StalenessAwareSampler:
    sampler = StalenessAwareSampler(**options)
    sampler.consumer_version = 1
    return sampler


def drawn(sampler: Any, rows: TensorDict, size: int, **options: Any) -> Callable[[], Any]:
    """Return a function that draws from these rows."""
    return lambda: memory_buffer(30, sampler=sampler, rows=rows, **options).sample(size)


def lanes(sampler: Any) -> Any:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(6, ndim=2), sampler=sampler)
    rb.extend(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))
    return rb.sample(1)


NUMBERS = numbered_rows(10)
ONE = trajectory_rows(1, 5)
THREE = torch.cat([trajectory_rows(1, 5), trajectory_rows(2, 9), trajectory_rows(3, 4)])
QUERIES = TensorDict({"query": torch.zeros(4), "next": {"reward": torch.zeros(4)}}, [4])
WEIGHTS: list[Any] = [
    lambda s: s - 1,
    lambda s: s / 0,
    lambda s: s[:1],
    lambda s: s[:, None] + 1,
    lambda s: 1.0,
]

DRAWS: Refused = [
    (
        drawn(SamplerWithoutReplacement(drop_last=True), NUMBERS, 11, batch_size=11),
        ValueError,
        "batch size .* is greater than the storage capacity",
    ),
    (drawn(PrioritizedSampler(eps=0), NUMBERS.set("td_error", torch.zeros(10)), 2), NotReadyError, "are 0"),
    (drawn(PromptGroupSampler(num_groups=3), QUERIES, 4), ValueError, "not divisible by num_groups=3"),
    (drawn(PromptGroupSampler(num_groups=1, group_key="prompt"), QUERIES, 1), ValueError, "prompt"),
    (lambda: lanes(PromptGroupSampler(num_groups=1, group_key="x")), ValueError, "single-dimensional"),
    *(
        (
            drawn(by_version(staleness_weight_fn=weigh), versions([0, 1, 0]), 8),
            ValueError,
            "staleness_weight_fn must return 3 finite weights",
        )
        for weigh in WEIGHTS
    ),
    (
        drawn(by_version(staleness_weight_fn=torch.zeros_like), versions([1, 1, 1]), 8),
        NotReadyError,
        "weight 0 for all 3 rows",
    ),
    (
        drawn(by_version(version_key=("collector", "version")), versions([1]), 8),
        SchemaError,
        "Could not find key 'collector.version' in the replay buffer",
    ),
    *(
        (drawn(by_version(), versions(of), 8), SchemaError, "a policy's version is one number, but field")
        for of in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool), torch.zeros(3).bfloat16())
    ),
    (drawn(StreamingSliceSampler(slice_len=3), steps(2), 3), NotReadyError, "sufficient length"),
    (drawn(StreamingSliceSampler(slice_len=3), steps(2), 4), StateError, "divisible by the slice length"),
    (drawn(SliceSampler(num_slices=3), ONE, 8), StateError, "divisible by the number of slices, got"),
    (drawn(SliceSampler(slice_len=3), ONE, 8), StateError, "divisible by the slice length, got"),
    (drawn(SliceSampler(num_slices=2, span=4), ONE, 8), ValueError, "strictly lower than the sequence"),
    *(
        (
            drawn(kind(slice_len=6), torch.cat([ONE, trajectory_rows(2, 3)]), 12),
            NotReadyError,
            r"length \(length range: 3 - 5 / required=6\)",
        )
        for kind in (SliceSampler, SliceSamplerWithoutReplacement)
    ),
    (drawn(PrioritizedSliceSampler(9, 0.7, 0.5, slice_len=6), ONE, 12), NotReadyError, "range: 5 - 5 / req"),
    (
        drawn(PrioritizedSliceSampler(9, 1.0, 1.0, slice_len=2, where="x < 0"), ONE, 12),
        NotReadyError,
        "none of",
    ),
    (
        drawn(slices(where="x < 0"), ONE, 12),
        NotReadyError,
        "none of the 5 rows can be drawn with where='x < 0'",
    ),
    (
        drawn(SliceSamplerWithoutReplacement(slice_len=3, where="x < 0"), ONE, 12),
        NotReadyError,
        "none of the 5 rows",
    ),
    (drawn(slices(traj_key="nobody", end_key="b"), ONE, 4), SchemaError, "no field 'nobody'"),
    (
        drawn(slices(end_keys=["a", ("next", "b")]), ONE, 4),
        SchemaError,
        "none of the end keys a, next.b is a field",
    ),
    (
        drawn(slices(traj_key="w"), TensorDict({"w": torch.zeros(4, 2)}, [4]), 2),
        SchemaError,
        "must be one number per row",
    ),
    (
        drawn(slices(trajectories=torch.zeros(17, dtype=torch.int64)), THREE, 8),
        StateError,
        "has 17 values, but the store has 18 rows",
    ),
    (drawn(slices(trajectories=torch.arange(18) // 9), THREE, 8), StateError, "does not end at row 4, but"),
    (drawn(slices(trajectories=torch.arange(18)), THREE, 8), StateError, "does end at row 0, but the"),
    (drawn(slices(ends=torch.arange(18) == 4), THREE, 8), StateError, "ends a trajectory does not end at"),
]


def test_draws_that_cannot_be_are_refused_each_time() -> None:
    for draw, kind, words in DRAWS:
        for _ in range(2):
            with pytest.raises(kind, match=words):
                draw()


def test_priorities_that_are_none_are_refused_and_change_nothing() -> None:
    for value in (-1.0, math.nan, math.inf, 1e300):
        rb = memory_buffer(4, sampler=PrioritizedSampler(4, 1.0, 1.0), rows=numbered_rows(4))
        with pytest.raises(PriorityError):
            rb.update_priority([0, 1], [5.0, value])
        assert rb.storage.priorities.values[:4].tolist() == [1, 1, 1, 1]
