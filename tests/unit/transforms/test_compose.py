"""Chains of transforms: order and time of their calls, and torchrl's transforms in them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import transforms as theirs

from expstore.errors import StateError
from expstore.transforms import Compose, Inverted


class Scale:
    """Multiply on the way out, divide on the way in."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set("x", batch["x"] * self.factor)

    def inv(self, batch: TensorDict) -> TensorDict:
        return batch.set("x", batch["x"] / self.factor)


class Shift(Scale):
    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set("x", batch["x"] + self.factor)

    def inv(self, batch: TensorDict) -> TensorDict:
        return batch.set("x", batch["x"] - self.factor)


def increase(batch: TensorDict) -> TensorDict:
    return batch.set("x", batch["x"] + 1)


def ones() -> TensorDict:
    return TensorDict({"x": torch.ones(3)}, [3])


def x_of(batch: Any) -> list[float]:
    values: list[float] = batch["x"].tolist()
    return values


def chain_of(*parts: Any, inverted: bool = False) -> Compose:
    chain = Compose()
    for part in parts:
        chain.append(part, invert=inverted)
    return chain


def test_chains_act_in_order_on_samples_and_backward_on_what_is_written() -> None:
    for chain, sampled, written in [
        (Compose(Scale(2), Shift(3)), 5, -1),  # 1 * 2 + 3 and (1 - 3) / 2
        (Compose(increase), 2, 1),
        (chain_of(increase, inverted=True), 1, 2),
        (chain_of(Scale(4), inverted=True), 0.25, 4),
        (chain_of(Compose(Scale(2), Shift(3)), inverted=True), -1, 5),
    ]:
        assert x_of(chain(ones())) == x_of(chain.forward(ones())) == [sampled] * 3
        assert x_of(chain.inverse(ones())) == x_of(chain.inv(ones())) == [written] * 3


def test_none_from_the_inverse_ends_the_chain() -> None:
    reached: list[TensorDict] = []

    def note(batch: TensorDict) -> TensorDict:
        reached.append(batch)
        return batch

    chain = Compose()
    chain.append(note, invert=True)
    chain.append(lambda batch: None, invert=True)
    assert chain.inverse(ones()) is None
    assert chain.inverse(ones(), single=True) is None
    assert reached == []


def test_none_in_the_place_of_a_sample_is_refused() -> None:
    with pytest.raises(TypeError, match="returned None"):
        Compose(lambda batch: None)(ones())


def test_a_single_row_has_a_dim_while_it_is_transformed() -> None:
    shapes: list[torch.Size] = []

    def note(batch: TensorDict) -> TensorDict:
        shapes.append(batch.shape)
        return batch.set("y", batch["x"] + 1)

    chain = Compose()
    chain.append(note, invert=True)
    made = chain.inverse(TensorDict({"x": torch.tensor(1.0)}, []), single=True)
    assert shapes == [torch.Size([1])]
    assert made.shape == torch.Size([])
    assert made["y"].shape == torch.Size([])
    tree = {"x": torch.ones(1), "y": 0}
    assert Compose(increase).inverse(tree, single=True) is tree  # has no dims that could be added


def test_a_list_makes_a_chain_and_len_getitem_iter_show_it() -> None:
    scale, shift = Scale(2), Shift(1)
    chain = Compose([scale, increase, shift])
    assert len(chain) == 3
    assert list(chain) == [scale, increase, shift]
    assert chain[1] is increase
    assert chain[-1] is shift
    assert list(chain[1:]) == [increase, shift]
    assert not Compose()


def test_insert_counts_as_lists_do_and_refuses_beyond() -> None:
    chain = Compose(Scale(1), Scale(2))
    chain.insert(1, increase)
    assert chain[1] is increase
    chain.insert(-1, increase)
    assert chain[2] is increase
    assert len(chain) == 4
    with pytest.raises(ValueError, match="Index expected to be between"):
        chain.insert(10, increase)
    assert len(chain) == 4


def test_invalid_transforms_are_refused() -> None:
    for wrong in [3, "text", object()]:
        with pytest.raises(ValueError, match="must contain only transforms or callable"):
            Compose(wrong)
        chain = Compose()
        with pytest.raises(ValueError, match="must contain only transforms or callable"):
            chain.append(wrong)
        with pytest.raises(RuntimeError, match="transform must be either a Transform instance or a callable"):
            Compose.of(wrong)


def test_of_accepts_none_a_chain_or_a_transform() -> None:
    chain = Compose(increase)
    assert Compose.of(chain) is chain
    assert len(Compose.of(None)) == 0
    assert list(Compose.of(increase)) == [increase]


def test_modules_are_put_in_evaluation_mode() -> None:
    module = torch.nn.Dropout()
    chain = Compose(module)
    assert not module.training
    assert torch.equal(chain(torch.ones(4)), torch.ones(4))


def test_the_state_of_stateful_transforms_is_kept_by_number() -> None:
    def make() -> Compose:
        return Compose(increase, theirs.RewardScaling(0.0, 1.0))

    chain, other = make(), make()
    chain[1].loc += 3
    state = chain.state_dict()
    assert list(state) == ["1"]
    other.load_state_dict(state)
    assert other[1].loc == 3
    with pytest.raises(StateError, match="other|here"):
        Compose(increase).load_state_dict(state)
    assert Inverted(increase).state_dict() == {}


def test_a_chain_is_copied_with_its_transforms() -> None:
    chain = pickle.loads(pickle.dumps(Compose(Scale(2), increase)))
    assert x_of(chain(ones())) == [3, 3, 3]
