"""The data set classes take the arguments of TorchRL's, with the same defaults and at the same positions."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest

import expstore
from expstore.datasets import DatasetReplayBuffer
from expstore.datasets.registry import list_kinds
from tests.conformance.test_torchrl_names import constructors, first_by_name, positional

MODULES = {"AtariDQN": "atari_dqn", "GenDGRL": "gen_dgrl", "Minari": "minari_data"}
#: RLDS has no class in TorchRL.
NAMES = sorted(kind.buffer for kind in list_kinds() if kind.buffer not in ("", "RLDSExperienceReplay"))


def find_theirs(name: str) -> Any:
    short = name.removesuffix("ExperienceReplay")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing torchrl's collectors
        module = importlib.import_module(f"torchrl.data.datasets.{MODULES.get(short, short.lower())}")
        return getattr(module, name)


def test_these_are_the_classes() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_constructors_take_torchrls_arguments(name: str) -> None:
    cls = getattr(expstore.datasets, name)
    assert issubclass(cls, DatasetReplayBuffer)
    parameters = [*inspect.signature(find_theirs(name).__init__).parameters.values()][1:]
    theirs = {one.name: one for one in parameters if one.kind is not one.VAR_KEYWORD}
    ours = first_by_name(constructors(cls))
    assert theirs.keys() <= ours.keys()
    for parameter, wanted in theirs.items():
        if wanted.default is not inspect.Parameter.empty:
            assert ours[parameter].default == wanted.default, parameter
    places = positional(theirs.values())
    assert positional(ours.values())[: len(places)] == places


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_documented(name: str) -> None:
    cls = getattr(expstore.datasets, name)
    for parameter in first_by_name(constructors(cls)):
        documents = [base.__doc__ or "" for base in cls.__mro__ if "__init__" in vars(base) or base is cls]
        assert parameter.startswith("_") or any(f"        {parameter}: " in text for text in documents)
