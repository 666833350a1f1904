"""Database-backed, persistent experience store for reinforcement learning.

Names load when first used, so that importing the package, the command line and SQL stay
instant; nothing here imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

_HOME = {
    "Binary": "expstore.specs",
    "BinaryBox": "expstore.specs",
    "BinaryDiscreteTensorSpec": "expstore.specs",
    "Bounded": "expstore.specs",
    "BoundedContinuous": "expstore.specs",
    "BoundedDiscrete": "expstore.specs",
    "BoundedTensorSpec": "expstore.specs",
    "Box": "expstore.specs",
    "BoxList": "expstore.specs",
    "Categorical": "expstore.specs",
    "CategoricalBox": "expstore.specs",
    "Choice": "expstore.specs",
    "Collector": "expstore.collectors",
    "ConditionalUpdateResult": "expstore.patches",
    "ConsumingSampler": "expstore.samplers",
    "ContinuousBox": "expstore.specs",
    "CorruptionError": "expstore.errors",
    "DEFAULT_DONE_KEYS": "expstore.trajectories",
    "DensifyReward": "expstore.postprocs",
    "DiscreteTensorSpec": "expstore.specs",
    "ExpStorage": "expstore.interop",
    "ExpStoreError": "expstore.errors",
    "Field": "expstore.schema",
    "HERReplayBuffer": "expstore.hindsight",
    "HindsightStrategy": "expstore.hindsight",
    "ImmutableDatasetWriter": "expstore.writers",
    "LazyMemmapStorage": "expstore.storages",
    "LazyStackStorage": "expstore.storages",
    "LazyTensorStorage": "expstore.storages",
    "ListStorage": "expstore.storages",
    "LockedError": "expstore.errors",
    "MemoryStorage": "expstore.storages",
    "MigrationError": "expstore.errors",
    "MinSize": "expstore.limiter",
    "MultiCategorical": "expstore.specs",
    "MultiDiscreteTensorSpec": "expstore.specs",
    "MultiOneHot": "expstore.specs",
    "MultiOneHotDiscreteTensorSpec": "expstore.specs",
    "MultiStep": "expstore.postprocs",
    "NoRowError": "expstore.errors",
    "NonTensor": "expstore.specs",
    "NotFoundError": "expstore.errors",
    "NotReadyError": "expstore.errors",
    "OneHot": "expstore.specs",
    "OneHotDiscreteTensorSpec": "expstore.specs",
    "PrioritizedReplayBuffer": "expstore.prioritized",
    "PrioritizedSampler": "expstore.samplers",
    "PrioritizedSliceSampler": "expstore.samplers",
    "PriorityError": "expstore.errors",
    "PromptGroupSampler": "expstore.samplers",
    "QueryError": "expstore.errors",
    "RandomCropTensorDict": "expstore.transforms",
    "RandomSampler": "expstore.samplers",
    "RecencySampler": "expstore.samplers",
    "ReplayBuffer": "expstore.buffers",
    "ReplayBufferEnsemble": "expstore.ensembles",
    "ReplayBufferTrainer": "expstore.trainers",
    "RoundRobinWriter": "expstore.writers",
    "SampleToInsertRatio": "expstore.limiter",
    "SampleUnit": "expstore.sample_units",
    "Sampler": "expstore.samplers",
    "SamplerEnsemble": "expstore.samplers",
    "SamplerWithoutReplacement": "expstore.samplers",
    "Schema": "expstore.schema",
    "SchemaError": "expstore.errors",
    "Sequence": "expstore.sample_units",
    "SliceSampler": "expstore.samplers",
    "SliceSamplerWithoutReplacement": "expstore.samplers",
    "SnapshotError": "expstore.errors",
    "StackError": "expstore.errors",
    "StalenessAwareSampler": "expstore.samplers",
    "StateError": "expstore.errors",
    "Storage": "expstore.storages",
    "StorageEnsemble": "expstore.storages",
    "StorageError": "expstore.errors",
    "StreamingSliceSampler": "expstore.samplers",
    "TensorDictMaxValueWriter": "expstore.writers",
    "TensorDictPrioritizedReplayBuffer": "expstore.prioritized",
    "TensorDictReplayBuffer": "expstore.tensordictbuffers",
    "TensorDictRoundRobinWriter": "expstore.writers",
    "TensorSpec": "expstore.specs",
    "TensorStorage": "expstore.storages",
    "Trajectory": "expstore.query",
    "TrajectoryPredicate": "expstore.query",
    "Transition": "expstore.sample_units",
    "Unbounded": "expstore.specs",
    "UnboundedContinuous": "expstore.specs",
    "UnboundedContinuousTensorSpec": "expstore.specs",
    "UnboundedDiscrete": "expstore.specs",
    "UnboundedDiscreteTensorSpec": "expstore.specs",
    "Writer": "expstore.writers",
    "WriterEnsemble": "expstore.writers",
    "ZarrStorage": "expstore.storages",
    "filter_trajectories": "expstore.query",
    "find_start_stop_traj": "expstore.trajectories",
    "iter_trajectories": "expstore.query",
    "open": "expstore.door",
    "split_trajectories": "expstore.trajectories",
    "traj": "expstore.query",
    "versions": "expstore.snapshots",
}

__all__ = [
    "DEFAULT_DONE_KEYS",
    "Binary",
    "BinaryBox",
    "BinaryDiscreteTensorSpec",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoundedTensorSpec",
    "Box",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Choice",
    "Collector",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "ContinuousBox",
    "CorruptionError",
    "DensifyReward",
    "DiscreteTensorSpec",
    "ExpStorage",
    "ExpStoreError",
    "Field",
    "HERReplayBuffer",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "LockedError",
    "MemoryStorage",
    "MigrationError",
    "MinSize",
    "MultiCategorical",
    "MultiDiscreteTensorSpec",
    "MultiOneHot",
    "MultiOneHotDiscreteTensorSpec",
    "MultiStep",
    "NoRowError",
    "NonTensor",
    "NotFoundError",
    "NotReadyError",
    "OneHot",
    "OneHotDiscreteTensorSpec",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PriorityError",
    "PromptGroupSampler",
    "QueryError",
    "RandomCropTensorDict",
    "RandomSampler",
    "RecencySampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "ReplayBufferTrainer",
    "RoundRobinWriter",
    "SampleToInsertRatio",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "Schema",
    "SchemaError",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "SnapshotError",
    "StackError",
    "StalenessAwareSampler",
    "StateError",
    "Storage",
    "StorageEnsemble",
    "StorageError",
    "StreamingSliceSampler",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorSpec",
    "TensorStorage",
    "Trajectory",
    "TrajectoryPredicate",
    "Transition",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedContinuousTensorSpec",
    "UnboundedDiscrete",
    "UnboundedDiscreteTensorSpec",
    "Writer",
    "WriterEnsemble",
    "ZarrStorage",
    "filter_trajectories",
    "find_start_stop_traj",
    "iter_trajectories",
    "open",
    "split_trajectories",
    "traj",
    "versions",
]

if TYPE_CHECKING:
    from expstore.buffers import ReplayBuffer
    from expstore.collectors import Collector
    from expstore.door import open
    from expstore.ensembles import ReplayBufferEnsemble
    from expstore.errors import (
        CorruptionError,
        ExpStoreError,
        LockedError,
        MigrationError,
        NoRowError,
        NotFoundError,
        NotReadyError,
        PriorityError,
        QueryError,
        SchemaError,
        SnapshotError,
        StackError,
        StateError,
        StorageError,
    )
    from expstore.hindsight import HERReplayBuffer, HindsightStrategy
    from expstore.interop import ExpStorage
    from expstore.limiter import MinSize, SampleToInsertRatio
    from expstore.patches import ConditionalUpdateResult
    from expstore.postprocs import DensifyReward, MultiStep
    from expstore.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
    from expstore.query import (
        Trajectory,
        TrajectoryPredicate,
        filter_trajectories,
        iter_trajectories,
        traj,
    )
    from expstore.sample_units import SampleUnit, Sequence, Transition
    from expstore.samplers import (
        ConsumingSampler,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        PromptGroupSampler,
        RandomSampler,
        RecencySampler,
        Sampler,
        SamplerEnsemble,
        SamplerWithoutReplacement,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        StalenessAwareSampler,
        StreamingSliceSampler,
    )
    from expstore.schema import Field, Schema
    from expstore.snapshots import versions
    from expstore.specs import (
        Binary,
        BinaryBox,
        BinaryDiscreteTensorSpec,
        Bounded,
        BoundedContinuous,
        BoundedDiscrete,
        BoundedTensorSpec,
        Box,
        BoxList,
        Categorical,
        CategoricalBox,
        Choice,
        ContinuousBox,
        DiscreteTensorSpec,
        MultiCategorical,
        MultiDiscreteTensorSpec,
        MultiOneHot,
        MultiOneHotDiscreteTensorSpec,
        NonTensor,
        OneHot,
        OneHotDiscreteTensorSpec,
        TensorSpec,
        Unbounded,
        UnboundedContinuous,
        UnboundedContinuousTensorSpec,
        UnboundedDiscrete,
        UnboundedDiscreteTensorSpec,
    )
    from expstore.storages import (
        LazyMemmapStorage,
        LazyStackStorage,
        LazyTensorStorage,
        ListStorage,
        MemoryStorage,
        Storage,
        StorageEnsemble,
        TensorStorage,
        ZarrStorage,
    )
    from expstore.tensordictbuffers import TensorDictReplayBuffer
    from expstore.trainers import ReplayBufferTrainer
    from expstore.trajectories import DEFAULT_DONE_KEYS, find_start_stop_traj, split_trajectories
    from expstore.transforms import RandomCropTensorDict
    from expstore.writers import (
        ImmutableDatasetWriter,
        RoundRobinWriter,
        TensorDictMaxValueWriter,
        TensorDictRoundRobinWriter,
        Writer,
        WriterEnsemble,
    )


#: Modules whose names are used with theirs before them, as in torchrl.
_MODULES = ("collectors", "limiter", "samplers", "schedulers", "specs", "storages", "trainers", "writers")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"expstore.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'expstore' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
