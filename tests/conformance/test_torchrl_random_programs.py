"""Random programs report the same with TorchRL's buffers and with ours.

Every operation of a program writes, reads or counts in both libraries; none samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.support.torchrl_pair import OURS, THEIRS, plain

Act = tuple[str, int, int]

ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["extend", "extend", "add", "set", "read", "slice", "field", "pass", "empty", "state"]
        ),
        st.integers(0, 14),
        st.integers(0, 14),
    ),
    min_size=1,
    max_size=12,
)
SHAPES = ("tensor", "tree", "tensordict")


class Program:
    """Do acts on a buffer, and tell what they return."""

    def __init__(self, lib: Any, storage: str, shape: str, capacity: int) -> None:
        self.lib, self.kind, self.shape, self.capacity = lib, storage, shape, capacity
        self.rb = self.make()
        self.next = 0

    def make(self) -> Any:
        return self.lib.ReplayBuffer(
            storage=getattr(self.lib, self.kind)(self.capacity),
            sampler=self.lib.SamplerWithoutReplacement(shuffle=False),
            batch_size=4,
        )

    def rows(self, count: int) -> Any:
        x = torch.arange(self.next, self.next + count)
        self.next += count
        if self.shape == "tensor":
            return x
        if self.shape == "tree":
            return {"a": x, "b": (x[:, None].float(), [x > 3])}
        return TensorDict({"a": x, "deep": {"b": x[:, None].float()}}, [count])

    def one(self) -> Any:
        rows = self.rows(1)
        return torch.utils._pytree.tree_map(lambda leaf: leaf[0], rows) if self.shape == "tree" else rows[0]

    def act(self, act: Act) -> Any:
        """Return what the act tells; None where it cannot be done yet."""
        name, a, b = act
        rb, size = self.rb, len(self.rb)
        if name == "extend":
            return rb.extend(self.rows(a + 1))
        if name == "add":
            return rb.add(self.one())
        if name == "empty":
            return rb.empty()
        if not size:
            return None
        if name == "set":
            places = torch.arange(a % size, min(size, a % size + b + 1))
            rb[places] = self.rows(len(places))
            return rb[places]
        if name == "read":
            return rb[a % size], rb[[a % size, b % size]]
        if name == "slice":
            return rb[min(a, size - 1) : max(b, min(a, size - 1) + 1)]
        if name == "field":
            return rb["a"][:size] if self.shape == "tensordict" else rb[:]
        if name == "state" and self.shape == "tensordict":
            other = self.make()
            other.load_state_dict(rb.state_dict())
            self.rb = other
            return other[:]
        return [plain(batch) for batch in rb] if name == "pass" else None

    def tell(self, acts: Sequence[Act]) -> list[Any]:
        return [(act, plain(self.act(act)), len(self.rb), len(self.rb.storage)) for act in acts]


@pytest.mark.guarantee(
    "torchrl/programs",
    "Random programs, TorchRL's documents and the examples of its docstrings give the same results with "
    "changed imports.",
)
@pytest.mark.some(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
@settings(max_examples=15)
@given(acts=ACTS, capacity=st.integers(2, 12))
def test_random_programs(storage: str, shape: str, acts: list[Act], capacity: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = Program(THEIRS, storage, shape, capacity).tell(acts)
    assert Program(OURS, storage, shape, capacity).tell(acts) == expected
