"""Trajectories: conditions on them, and batches cut into them.

Names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expstore.trajectories.predicates import (
        Condition,
        Trajectory,
        TrajectoryPredicate,
        check_predicate,
        filter_trajectories,
        find_entry,
        iter_trajectories,
        split,
        traj,
    )
    from expstore.trajectories.splitting import DEFAULT_DONE_KEYS, find_start_stop_traj, split_trajectories

__all__ = [
    "DEFAULT_DONE_KEYS",
    "Condition",
    "Trajectory",
    "TrajectoryPredicate",
    "check_predicate",
    "filter_trajectories",
    "find_entry",
    "find_start_stop_traj",
    "iter_trajectories",
    "split",
    "split_trajectories",
    "traj",
]

_HOME = {
    "Condition": "predicates",
    "DEFAULT_DONE_KEYS": "splitting",
    "Trajectory": "predicates",
    "TrajectoryPredicate": "predicates",
    "check_predicate": "predicates",
    "filter_trajectories": "predicates",
    "find_entry": "predicates",
    "find_start_stop_traj": "splitting",
    "iter_trajectories": "predicates",
    "split": "predicates",
    "split_trajectories": "splitting",
    "traj": "predicates",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
