"""Inputs that specs accept and refuse; errors are raised at once and name what was found.

Run with the other tests.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import expstore
from expstore.errors import CorruptionError, MigrationError, SchemaError
from expstore.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
    from_env,
    from_text,
    to_space,
)

WHOLE: list[Any] = [
    Categorical(5, shape=(2,)),
    Categorical(5, shape=(2,), dtype=torch.int32),
    Categorical(5, shape=(2,), mask=torch.tensor([False, True, True, True, False])),
    MultiCategorical((5, 2)),
    Binary(2),
    Bounded(1, 5, (2,), dtype=torch.int16),
    Unbounded((2,), dtype=torch.int64),
    Unbounded((2,), dtype=torch.bool),
]


def test_no_number_is_projected_out_of_a_spec_of_whole_numbers() -> None:
    for spec, value in itertools.product(WHOLE, (math.nan, math.inf, -math.inf, 300.0)):
        given = torch.tensor([value, 0.0])
        assert spec.is_in(spec.project(given)), spec.project(given)
        made = Composite(a=spec).project(TensorDict({"a": given}, []))
        assert spec.is_in(made["a"])


def test_nan_is_a_choice_of_every_stack() -> None:
    spec = torch.stack([Categorical(2), Categorical(3)])  # type: ignore[call-overload]
    assert spec.is_in(spec.project(torch.tensor([math.nan, 7.0])))
    assert spec.project(np.array([math.nan, 7.0])).tolist() == [0, 2]
    unknown = Categorical(-1)
    assert unknown.is_in(unknown.project(torch.tensor(math.inf)))


LEAVES: list[Any] = [
    Categorical(5, shape=(3,)),
    MultiCategorical((3, 2, 4)),
    Binary(3),
    Bounded(0, 5, (3,)),
    Bounded(0, 5, (3,), dtype=torch.int64),
    Unbounded((3,)),
    OneHot(3),
    MultiOneHot((1, 2)),
    Choice([Bounded(0, 5, (3,)), Bounded(8, 9, (3,))]),
]


def test_values_of_other_shapes_are_not_projected() -> None:
    for spec in LEAVES:
        for wrong in (torch.tensor([9, 1]), torch.tensor(9), torch.full((2, 2), 9)):
            with pytest.raises(RuntimeError, match=r"values of shape \(3,\).*got shape"):
                spec.project(wrong)
        assert spec.project(torch.full((2, 3), 9.0)).shape == (2, 3)


def test_arrays_and_numbers_are_projected() -> None:
    for spec in LEAVES:
        for given in (np.array([9, 0, 1]), [9, 0, 1], np.array([1, 0, 9])[::-1]):
            assert spec.is_in(spec.project(given))
        for wrong in (None, "abc", {"a": 1}):
            with pytest.raises(TypeError, match="takes a tensor, an array, or numbers"):
                spec.project(wrong)


def test_bools_without_bounds_are_those_of_torch() -> None:
    spec = Unbounded((3,), dtype=torch.bool)
    assert spec.project(torch.tensor([-5, 300, 0])).tolist() == [True, True, False]
    assert spec.project(torch.tensor([-0.5, 0.2, 0.0])).tolist() == [True, True, False]


def test_composites_take_what_has_keys() -> None:
    spec = Composite(a=Bounded(0, 1, (1,)), b=Categorical(2), c=None)
    given = TensorDict({"a": torch.tensor([5.0])}, [])
    with pytest.raises(KeyError, match="'b'.* are missing"):
        spec.project(given)
    assert given["a"] == 5, "nothing was changed"
    assert spec.project({"a": torch.tensor([5.0]), "b": 7}) == {"a": torch.ones(1), "b": torch.tensor(1)}
    assert not spec.is_in(torch.zeros(1))
    assert not spec.is_in(None)
    for wrong in (None, torch.zeros(1), 3):
        with pytest.raises(TypeError, match="takes a TensorDict or a dict; got a"):
            spec.project(wrong)
        with pytest.raises(TypeError, match="takes a TensorDict or a dict; got a"):
            spec.encode(wrong)


def test_stacks_take_stacks() -> None:
    spec = torch.stack([Categorical(2), Categorical(3)])  # type: ignore[call-overload]
    assert not spec.is_in(None)
    assert not spec.is_in(torch.tensor(1))
    with pytest.raises(TypeError, match="a stack of values, or a list; got a NoneType"):
        spec.project(None)
    with pytest.raises(ValueError, match="no place for a value of shape"):
        spec.project(torch.tensor(1))


def test_numbers_of_choices_must_be_positive_integers() -> None:
    for n in [2.5, 0, -2, "x", None, math.nan]:
        for make in (Categorical, OneHot, lambda n: MultiOneHot((2, n))):
            with pytest.raises(ValueError, match="integer of at least 1"):
                make(n)
        if isinstance(n, (int, float)):
            with pytest.raises(ValueError, match="MultiCategorical: nvec is .* integer of at least 1"):
                MultiCategorical([2, n])
        with pytest.raises(ValueError, match="integer of at least 1"):
            Categorical(-1).set_provisional_n(n)


def test_binary_rows_have_a_length() -> None:
    with pytest.raises(ValueError, match="0 or more; got -1"):
        Binary(-1)
    assert Binary(shape=(-1,)).shape == (-1,)


def test_numbers_of_numpy_and_torch_count_choices() -> None:
    assert Categorical(np.int64(3)) == Categorical(torch.tensor(3)) == Categorical(3)  # type: ignore[arg-type]
    assert Categorical(-1).space.n == -1


def test_bounds_are_numbers_of_the_dtype() -> None:
    for low, high, name in ((-1, 5, "low=-1"), (0, 300, "high=300"), (0, torch.tensor([3, 256]), "high=256")):
        with pytest.raises(ValueError, match=f"{name} is no uint8, whose numbers are 0 to 255"):
            Bounded(low, high, (2,), dtype=torch.uint8)
    assert Bounded(-math.inf, math.inf, (2,), dtype=torch.uint8).high.tolist() == [255, 255]
    largest = torch.iinfo(torch.int64).max
    assert Bounded(0, largest, (), dtype=torch.int64).high == largest
    assert Bounded(-1, 300, (2,)).to(torch.uint8).high.tolist() == [255, 255], (
        "another dtype has its own ends"
    )


def test_environments_of_others_are_named() -> None:
    for wrong in (None, "CartPole-v1", Categorical(2)):
        with pytest.raises(TypeError, match=r"environment of TorchRL; got a .*from_space"):
            from_env(wrong)
    with pytest.raises(TypeError, match="to_space takes a spec of expstore; got a builtins.str"):
        to_space("x")  # type: ignore[arg-type]


def test_invalid_text_is_refused_with_a_hint() -> None:
    for wrong in ("x", "{}", "[]", '{"version": 1}', '{"version": 1, "spec": {"kind": "Nope"}}'):
        with pytest.raises(CorruptionError, match="pass the text that to_text returned") as caught:
            from_text(wrong)
        assert "verify" not in str(caught.value)
    with pytest.raises(TypeError, match="the str that to_text returned; got a NoneType"):
        from_text(None)  # type: ignore[arg-type]
    with pytest.raises(MigrationError, match="version 99.*install a newer"):
        from_text('{"version": 99}')


def test_specs_of_a_store_are_of_its_library_and_fields(tmp_path: Any) -> None:
    rb = expstore.ReplayBuffer(storage=expstore.MemoryStorage(10, seed=0))
    with pytest.raises(TypeError, match=r"specs is a torchrl\..*Composite; give a Composite of expstore"):
        rb.set_specs(torchrl.data.Composite(a=torchrl.data.Unbounded((1,))))  # type: ignore[arg-type]
    rb.set_specs(Composite(a=Unbounded((1,))))
    with pytest.raises(SchemaError, match="give rows this field, or specs without it"):
        rb.extend(TensorDict({"b": torch.zeros(2, 1)}, [2]))


@pytest.mark.parametrize("storage", [expstore.ListStorage, expstore.LazyStackStorage])
def test_objects_have_no_fields_to_be_described(storage: Any) -> None:
    rb = expstore.ReplayBuffer(storage=storage(10, seed=0), collate_fn=list)
    with pytest.raises(SchemaError, match="name the field 'a', but rows of a .* are objects"):
        rb.set_specs(Composite(a=Bounded(0, 1, (1,))))
    assert rb.specs is None
    rb.set_specs(None)
    rb.extend(["any", "thing"])
