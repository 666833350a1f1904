"""Members of TorchRL's classes that ours lack say why, also to `hasattr` and `getattr` with a default."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore import specs
from expstore.core.torchrl_members import REASONS, SPECS
from expstore.errors import ArgumentError, MissingMemberError

INSTANCES: dict[str, Any] = {
    "ReplayBuffer": expstore.ReplayBuffer,
    "ReplayBufferEnsemble": lambda: expstore.ReplayBufferEnsemble(expstore.ReplayBuffer()),
    "PrioritizedReplayBuffer": lambda: expstore.PrioritizedReplayBuffer(alpha=0.7, beta=0.9),
    "SliceSampler": lambda: expstore.SliceSampler(slice_len=2),
    "StreamingSliceSampler": lambda: expstore.StreamingSliceSampler(slice_len=2),
    "SamplerWithoutReplacement": expstore.SamplerWithoutReplacement,
    "SamplerEnsemble": lambda: expstore.SamplerEnsemble(expstore.RandomSampler()),
    "WriterEnsemble": lambda: expstore.WriterEnsemble(expstore.RoundRobinWriter()),
    "StorageEnsemble": lambda: expstore.StorageEnsemble(expstore.ListStorage(3)),
    "ListStorage": lambda: expstore.ListStorage(3),
    "LazyTensorStorage": lambda: expstore.LazyTensorStorage(3),
    "TensorDictMaxValueWriter": expstore.TensorDictMaxValueWriter,
    "TensorSpec": lambda: specs.Bounded(0, 1, (3,)),
    "OneHot": lambda: specs.OneHot(3),
}


def test_missing_members_say_why() -> None:
    for kind in INSTANCES:
        made, tried = INSTANCES[kind](), 0
        for kinds, names, reason in (*REASONS, *SPECS):
            for name in names if kind in kinds else ():
                tried += 1
                assert not hasattr(made, name)
                assert getattr(made, name, 3) == 3
                with pytest.raises(
                    MissingMemberError, match=f"a {type(made).__name__} has no {name}: "
                ) as caught:
                    getattr(made, name)
                assert reason in str(caught.value)
        assert tried
        with pytest.raises(
            AttributeError, match=f"'{type(made).__name__}' object has no attribute 'nonsense'"
        ):
            made.nonsense  # noqa: B018


def test_errors_within_properties_and_copies_stay_as_they_are() -> None:
    class Broken(expstore.RoundRobinWriter):
        @property
        def half(self) -> int:
            return self.missing

    with pytest.raises(AttributeError, match="'missing'"):
        Broken().half  # noqa: B018
    for one in (copy.copy(INSTANCES["SliceSampler"]()), pickle.loads(pickle.dumps(expstore.ListStorage(3)))):
        assert not hasattr(one, "missing")


def test_assignments_without_effect_are_refused(tmp_path: Path) -> None:
    rb = expstore.open(tmp_path / "a.exp")
    reader = expstore.open(tmp_path / "a.exp", mode="r")
    for storage in (rb.storage, reader.storage, expstore.MemoryStorage(3), INSTANCES["StorageEnsemble"]()):
        storage.checkpointer = None
        with pytest.raises(ArgumentError, match="checkpointer of a .* leave the assignment out"):
            storage.checkpointer = object()
    for spec in (specs.Bounded(0, 1, (3,)), specs.OneHot(3)):
        with pytest.raises(ArgumentError, match=r"to_torchrl\(spec\)") as caught:
            spec.shape = (2,)
        assert isinstance(caught.value, TypeError)
    reader.close()
    rb.close()
