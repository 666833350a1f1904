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


def test_forward_goes_in_order_and_inverse_backward() -> None:
    chain = Compose(Scale(2), Shift(3))
    assert x_of(chain.forward(ones())) == [5, 5, 5]  # 1 * 2 + 3
    assert x_of(chain(ones())) == [5, 5, 5]
    assert x_of(chain.inverse(ones())) == [-1, -1, -1]  # (1 - 3) / 2
    assert x_of(chain.inv(chain(ones()))) == [1, 1, 1]


def test_a_plain_callable_acts_on_samples_only() -> None:
    chain = Compose(increase)
    assert x_of(chain(ones())) == [2, 2, 2]
    assert x_of(chain.inverse(ones())) == [1, 1, 1]


def test_an_inverted_callable_acts_on_what_is_written_only() -> None:
    chain = Compose()
    chain.append(increase, invert=True)
    assert x_of(chain(ones())) == [1, 1, 1]
    assert x_of(chain.inverse(ones())) == [2, 2, 2]


def test_an_inverted_transform_acts_the_other_way_round() -> None:
    chain = Compose()
    chain.insert(0, Scale(4), invert=True)
    assert x_of(chain(ones())) == [0.25] * 3
    assert x_of(chain.inverse(ones())) == [4] * 3
    assert isinstance(chain[0], Inverted)


def test_an_inverted_chain_keeps_the_order_of_its_inverse() -> None:
    chain, inner = Compose(), Compose(Scale(2), Shift(3))
    chain.append(inner, invert=True)
    assert x_of(chain(ones())) == x_of(inner.inverse(ones()))
    assert x_of(chain.inverse(ones())) == x_of(inner(ones()))


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


@pytest.mark.parametrize("wrong", [3, "text", object()])
def test_what_is_no_transform_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must contain only transforms or callable"):
        Compose(wrong)
    chain = Compose()
    with pytest.raises(ValueError, match="must contain only transforms or callable"):
        chain.append(wrong)
    with pytest.raises(RuntimeError, match="transform must be either a Transform instance or a callable"):
        Compose.of(wrong)


def test_of_takes_none_a_chain_and_anything_else() -> None:
    chain = Compose(increase)
    assert Compose.of(chain) is chain
    assert len(Compose.of(None)) == 0
    assert list(Compose.of(increase)) == [increase]


def test_modules_are_put_in_evaluation_mode() -> None:
    module = torch.nn.Dropout()
    chain = Compose(module)
    assert not module.training
    assert torch.equal(chain(torch.ones(4)), torch.ones(4))


def test_torchrl_transforms_act_both_ways() -> None:
    to_float = theirs.DoubleToFloat(in_keys=["x"], in_keys_inv=["x"])
    chain = Compose(theirs.Compose(to_float, theirs.RenameTransform(["x"], ["y"])))
    assert len(chain) == 2
    assert chain(TensorDict({"x": torch.zeros(2, dtype=torch.float64)}, [2]))["y"].dtype == torch.float32
    given = TensorDict({"x": torch.zeros(2)}, [2])
    assert chain.inverse(given)["x"].dtype == torch.float64
    assert given["x"].dtype == torch.float32  # torchrl's work on a copy


def test_torchrl_multi_step_holds_rows_back() -> None:
    chain = Compose(theirs.MultiStepTransform(n_steps=3, gamma=0.5))
    rows = TensorDict(
        {
            "observation": torch.arange(2.0)[:, None],
            "next": {
                "observation": torch.arange(1.0, 3.0)[:, None],
                "reward": torch.ones(2, 1),
                "done": torch.zeros(2, 1, dtype=torch.bool),
                "terminated": torch.zeros(2, 1, dtype=torch.bool),
            },
        },
        [2],
        names=["time"],
    )
    assert chain.inverse(rows) is None  # fewer than three steps are known
    more = chain.inverse(rows)
    assert more["next", "reward"].flatten().tolist() == [1.75]


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


def test_the_repr_shows_every_transform() -> None:
    chain = Compose(increase)
    chain.append(increase, invert=True)
    lines = repr(chain).splitlines()
    assert lines[0] == "Compose("
    assert "increase" in lines[1]
    assert "Inverted(" in lines[2]
    assert repr(Compose()) == "Compose()"
