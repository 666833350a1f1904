"""How a collector collects: the same in the process of the program and in each worker.

Used by `expstore.Collector` and its workers, to which it is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from expstore.collectors.environments import AnyVectorEnv, describe_origin
from expstore.collectors.lanes import LaneCollector, Numbering, OnBlock, TransitionSink
from expstore.collectors.policies import ModulePolicy, Policy
from expstore.core.values import Key
from expstore.specs import TensorSpec


@dataclass(frozen=True)
class Plan:
    """The settings of a collector.

    Args:
        policy: Chooses actions; None: random ones.
        steps_per_lane: Steps of each lane in one `extend`.
        source: Name of the stream; None: it has none.
        autoreset_mode: How lanes are reset; None: as `env.metadata` says.
        seed: Seed of the first lane; None: unpredictable.
        hyperparameters: Facts about the run.
        split: The split of the episodes; None for "train".
    """

    policy: Policy | None
    steps_per_lane: int
    source: str | None
    autoreset_mode: Any
    seed: int | None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None

    def collector(
        self,
        envs: AnyVectorEnv,
        rb: TransitionSink,
        on_block: OnBlock,
        *,
        worker: int | None = None,
        first_lane: int = 0,
        numbering: Numbering | None = None,
        pass_specs: Callable[[Mapping[Key, TensorSpec]], None] | None = None,
    ) -> LaneCollector:
        """Return what collects from environments into a buffer.

        Args:
            envs: The environments.
            rb: The buffer.
            on_block: As `LaneCollector`.
            worker: Number of this worker process; None: there are none.
            first_lane: Number of the first lane among those of all workers, which seeds it.
            numbering: As `LaneCollector`.
            pass_specs: As `LaneCollector`.
        """
        seed = None if self.seed is None else self.seed + first_lane
        origin = describe_origin(envs) | {"seed": seed, "hyperparameters": dict(self.hyperparameters)}
        return LaneCollector(
            envs,
            self.policy,
            rb,
            steps_per_lane=self.steps_per_lane,
            source=self.source if worker is None else f"{self.source or 'collector'}/{worker}",
            autoreset_mode=self.autoreset_mode,
            seed=seed,
            facts={} if worker is None else {"worker": worker},
            first_facts={"origin": origin},
            split=self.split,
            policy_version=0 if isinstance(self.policy, ModulePolicy) else None,
            numbering=numbering,
            pass_specs=pass_specs,
            on_block=on_block,
        )
