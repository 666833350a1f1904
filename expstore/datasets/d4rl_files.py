"""The data sets of D4RL: addresses of their files, and reference returns for normalized scores.

Source: `d4rl/infos.py` of https://github.com/Farama-Foundation/D4RL, and TorchRL's list, which has more ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

D4RL_ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl"

#: Files whose names do not follow from the id, by folder and without their suffix.
_FILES = {
    "maze2d": {"maze2d-open-v0": "maze2d-open-sparse", "maze2d-open-dense-v0": "maze2d-open-dense"},
    "minigrid": {
        "minigrid-fourrooms-v0": "minigrid4rooms",
        "minigrid-fourrooms-random-v0": "minigrid4rooms_random",
    },
    "gym_mujoco": {
        "walker2d-medium-replay-v0": "walker_mixed",
        "ant-random-expert-v0": "ant_random_expert",
    },
    "ant_maze_new": {
        "antmaze-eval-umaze-v0": "Ant_maze_umaze_eval_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-eval-umaze-diverse-v0": "Ant_maze_umaze_eval_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-eval-medium-play-v0": "Ant_maze_medium_eval_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-eval-medium-diverse-v0": "Ant_maze_medium_eval_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-eval-large-diverse-v0": "Ant_maze_large_eval_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-eval-large-play-v0": "Ant_maze_large_eval_noisy_multistart_True_multigoal_True_sparse",
    },
    "flow": {
        "flow-ring-random-v0": "flow-ring-v0-random",
        "flow-ring-controller-v0": "flow-ring-v0-idm",
        "flow-merge-random-v0": "flow-merge-v0-random",
        "flow-merge-controller-v0": "flow-merge-v0-idm",
    },
    "kitchen": {
        "kitchen-complete-v0": "mini_kitchen_microwave_kettle_light_slider-v0",
        "kitchen-partial-v0": "kitchen_microwave_kettle_light_slider-v0",
        "kitchen-mixed-v0": "kitchen_microwave_kettle_bottomburner_light-v0",
    },
    "carla": {
        "carla-lane-v0": "carla_lane_follow_flat-v0",
        "carla-town-v0": "carla_town_subsamp_flat-v0",
        "carla-town-full-v0": "carla_town_flat-v0",
        "carla-lane-render-v0": "carla_lane_follow-v0",
        "carla-town-render-v0": "carla_town_flat-v0",
    },
    "bullet": {"bullet-maze2d-open-v0": "bullet-maze2d-open-sparse"},
}

#: Mazes of ants by the middle of the id: their names in files of v0 and v1, and "multistart" and "multigoal".
_ANT_MAZES = {
    "umaze": ("u-maze", "umaze", False, False),
    "umaze-diverse": ("u-maze", "umaze", True, True),
    "medium-play": ("big-maze", "medium", True, False),
    "medium-diverse": ("big-maze", "medium", True, True),
    "large-play": ("hardest-maze", "large", True, False),
    "large-diverse": ("hardest-maze", "large", True, True),
}
_MAZES = ("umaze", "medium", "large")
_ROBOTS = ("halfcheetah", "hopper", "walker2d", "ant")
_HANDS = ("hammer", "pen", "relocate", "door")

#: Returns of a random and of an expert policy, by prefix of the id; the longest prefix is used.
_SCORES = {
    "maze2d-open-v0": (0.01, 20.66),
    "maze2d-umaze-v1": (23.85, 161.86),
    "maze2d-medium-v1": (13.13, 277.39),
    "maze2d-large-v1": (6.7, 273.99),
    "maze2d-open-dense-v0": (11.17817, 27.166538620695782),
    "maze2d-umaze-dense-v1": (68.537689, 193.66285642381482),
    "maze2d-medium-dense-v1": (44.264742, 297.4552547777125),
    "maze2d-large-dense-v1": (30.569041, 303.4857382709002),
    "minigrid-fourrooms": (0.01442, 2.89685),
    "pen": (96.262799, 3076.8331017826877),
    "hammer": (-274.856578, 12794.134825156867),
    "relocate": (-6.425911, 4233.877797728884),
    "door": (-56.512833, 2880.5693087298737),
    "halfcheetah": (-280.178953, 12135.0),
    "walker2d": (1.629008, 4592.3),
    "hopper": (-20.272305, 3234.3),
    "ant": (-325.6, 3879.7),
    "antmaze": (0.0, 1.0),
    "kitchen": (0.0, 4.0),
    "flow-ring": (-165.22, 24.42),
    "flow-merge": (118.67993, 330.03179),
    "carla-lane": (-0.8503839912088142, 1023.5784385429523),
    "carla-town": (-114.81579500772153, 2440.1772022247314),
    "bullet-halfcheetah": (-1275.766996, 2381.6725),
    "bullet-hopper": (20.058972, 1441.8059623430963),
    "bullet-ant": (373.705955, 2650.495),
    "bullet-walker2d": (16.523877, 1623.6476303317536),
    "bullet-maze2d-open": (8.75, 64.15),
    "bullet-maze2d-umaze": (32.46, 153.99),
    "bullet-maze2d-medium": (14.87, 238.05),
    "bullet-maze2d-large": (1.82, 285.92),
}


@cache
def d4rl_files() -> dict[str, str]:
    """Return the addresses of the data sets' files, relative to `D4RL_ADDRESS`, by id."""
    found = dict(_name_files())
    for folder, files in _FILES.items():
        found |= {name: f"{folder}/{file}" for name, file in files.items()}
    return {name: f"{path}.hdf5" for name, path in found.items()}


def _name_files() -> Iterator[tuple[str, str]]:
    """Yield the ids from which the files follow, each with the folder and the file."""
    for maze in _MAZES:
        for env in ("maze2d", "maze2d-eval"):
            yield f"{env}-{maze}-v1", f"maze2d/{env}-{maze}-sparse-v1"
            yield f"{env}-{maze}-dense-v1", f"maze2d/{env}-{maze}-dense-v1"
        yield f"maze2d-{maze}-v0", f"maze2d/maze2d-{maze}-sparse"
        yield f"maze2d-{maze}-dense-v0", f"maze2d/maze2d-{maze}-dense"
        yield f"bullet-maze2d-{maze}-v0", f"bullet/bullet-maze2d-{maze}-sparse"
    for name, (old, new, has_starts, has_goals) in _ANT_MAZES.items():
        how = f"noisy_multistart_{has_starts}_multigoal_{has_goals}_sparse"
        yield f"antmaze-{name}-v0", f"ant_maze_new/Ant_maze_{old}_{how}"
        yield f"antmaze-{name}-v1", f"ant_maze_v1/Ant_maze_{new}_{how}"
        yield f"antmaze-{name}-v2", f"ant_maze_v2/Ant_maze_{old}_{how}_fixed"
    for env in _ROBOTS:
        for kind in ("random", "medium", "expert", "medium-replay", "full-replay", "medium-expert"):
            file = f"{env}_{kind.replace('-', '_')}"
            for version in ("v1", "v2"):
                yield f"{env}-{kind}-{version}", f"gym_mujoco_{version}/{file}-{version}"
            if kind != "full-replay":
                mixed = file.replace("medium_replay", "mixed")
                yield f"{env}-{kind}-v0", f"gym_mujoco/{mixed}"
                yield f"bullet-{env}-{kind}-v0", f"bullet/bullet-{file}"
    for env in _HANDS:
        for kind in ("human", "expert", "cloned"):
            yield f"{env}-{kind}-v1", f"hand_dapg_v1/{env}-{kind}-v1"
        yield f"{env}-human-v0", f"hand_dapg/{env}-v0_demos_clipped"
        yield f"{env}-human-longhorizon-v0", f"hand_dapg/{env}-v0_demos_clipped"
        yield f"{env}-cloned-v0", f"hand_dapg/{env}-demos-v0-bc-combined"
        yield f"{env}-expert-v0", f"hand_dapg/{env}-v0_expert_clipped"


def score_bounds(dataset_id: str) -> tuple[float, float] | None:
    """Return the returns for the scores 0 and 1; None if D4RL has none."""
    fitting = [name for name in _SCORES if dataset_id == name or dataset_id.startswith(name + "-")]
    return _SCORES[max(fitting, key=len)] if fitting else None
