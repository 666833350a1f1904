"""The data sets of D4RL: addresses of their files, and reference returns for normalized scores.

Source: `d4rl/infos.py` of https://github.com/Farama-Foundation/D4RL, and TorchRL's list, which has more ids.
"""

from __future__ import annotations

from functools import cache

D4RL_ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl"

#: Files by folder, without their suffix.
_FILES = {
    "maze2d": {
        "maze2d-open-v0": "maze2d-open-sparse",
        "maze2d-umaze-v1": "maze2d-umaze-sparse-v1",
        "maze2d-medium-v1": "maze2d-medium-sparse-v1",
        "maze2d-large-v1": "maze2d-large-sparse-v1",
        "maze2d-eval-umaze-v1": "maze2d-eval-umaze-sparse-v1",
        "maze2d-eval-medium-v1": "maze2d-eval-medium-sparse-v1",
        "maze2d-eval-large-v1": "maze2d-eval-large-sparse-v1",
        "maze2d-open-dense-v0": "maze2d-open-dense",
        "maze2d-umaze-dense-v1": "maze2d-umaze-dense-v1",
        "maze2d-medium-dense-v1": "maze2d-medium-dense-v1",
        "maze2d-large-dense-v1": "maze2d-large-dense-v1",
        "maze2d-eval-umaze-dense-v1": "maze2d-eval-umaze-dense-v1",
        "maze2d-eval-medium-dense-v1": "maze2d-eval-medium-dense-v1",
        "maze2d-eval-large-dense-v1": "maze2d-eval-large-dense-v1",
        "maze2d-umaze-v0": "maze2d-umaze-sparse",
        "maze2d-medium-v0": "maze2d-medium-sparse",
        "maze2d-large-v0": "maze2d-large-sparse",
        "maze2d-umaze-dense-v0": "maze2d-umaze-dense",
        "maze2d-medium-dense-v0": "maze2d-medium-dense",
        "maze2d-large-dense-v0": "maze2d-large-dense",
    },
    "minigrid": {
        "minigrid-fourrooms-v0": "minigrid4rooms",
        "minigrid-fourrooms-random-v0": "minigrid4rooms_random",
    },
    "hand_dapg": {
        "pen-human-v0": "pen-v0_demos_clipped",
        "pen-cloned-v0": "pen-demos-v0-bc-combined",
        "pen-expert-v0": "pen-v0_expert_clipped",
        "hammer-human-v0": "hammer-v0_demos_clipped",
        "hammer-cloned-v0": "hammer-demos-v0-bc-combined",
        "hammer-expert-v0": "hammer-v0_expert_clipped",
        "relocate-human-v0": "relocate-v0_demos_clipped",
        "relocate-cloned-v0": "relocate-demos-v0-bc-combined",
        "relocate-expert-v0": "relocate-v0_expert_clipped",
        "door-human-v0": "door-v0_demos_clipped",
        "door-cloned-v0": "door-demos-v0-bc-combined",
        "door-expert-v0": "door-v0_expert_clipped",
        "door-human-longhorizon-v0": "door-v0_demos_clipped",
        "hammer-human-longhorizon-v0": "hammer-v0_demos_clipped",
        "pen-human-longhorizon-v0": "pen-v0_demos_clipped",
        "relocate-human-longhorizon-v0": "relocate-v0_demos_clipped",
    },
    "gym_mujoco": {
        "halfcheetah-random-v0": "halfcheetah_random",
        "halfcheetah-medium-v0": "halfcheetah_medium",
        "halfcheetah-expert-v0": "halfcheetah_expert",
        "halfcheetah-medium-replay-v0": "halfcheetah_mixed",
        "halfcheetah-medium-expert-v0": "halfcheetah_medium_expert",
        "walker2d-random-v0": "walker2d_random",
        "walker2d-medium-v0": "walker2d_medium",
        "walker2d-expert-v0": "walker2d_expert",
        "walker2d-medium-replay-v0": "walker_mixed",
        "walker2d-medium-expert-v0": "walker2d_medium_expert",
        "hopper-random-v0": "hopper_random",
        "hopper-medium-v0": "hopper_medium",
        "hopper-expert-v0": "hopper_expert",
        "hopper-medium-replay-v0": "hopper_mixed",
        "hopper-medium-expert-v0": "hopper_medium_expert",
        "ant-random-v0": "ant_random",
        "ant-medium-v0": "ant_medium",
        "ant-expert-v0": "ant_expert",
        "ant-medium-replay-v0": "ant_mixed",
        "ant-medium-expert-v0": "ant_medium_expert",
        "ant-random-expert-v0": "ant_random_expert",
    },
    "ant_maze_new": {
        "antmaze-umaze-v0": "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse",
        "antmaze-umaze-diverse-v0": "Ant_maze_u-maze_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-medium-play-v0": "Ant_maze_big-maze_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-medium-diverse-v0": "Ant_maze_big-maze_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-large-play-v0": "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-large-diverse-v0": "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-eval-umaze-v0": "Ant_maze_umaze_eval_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-eval-umaze-diverse-v0": "Ant_maze_umaze_eval_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-eval-medium-play-v0": "Ant_maze_medium_eval_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-eval-medium-diverse-v0": "Ant_maze_medium_eval_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-eval-large-diverse-v0": "Ant_maze_large_eval_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-eval-large-play-v0": "Ant_maze_large_eval_noisy_multistart_True_multigoal_True_sparse",
    },
    "ant_maze_v2": {
        "antmaze-umaze-v2": "Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed",
        "antmaze-umaze-diverse-v2": "Ant_maze_u-maze_noisy_multistart_True_multigoal_True_sparse_fixed",
        "antmaze-medium-play-v2": "Ant_maze_big-maze_noisy_multistart_True_multigoal_False_sparse_fixed",
        "antmaze-medium-diverse-v2": "Ant_maze_big-maze_noisy_multistart_True_multigoal_True_sparse_fixed",
        "antmaze-large-play-v2": "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_False_sparse_fixed",
        "antmaze-large-diverse-v2": "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_True_sparse_fixed",
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
    "bullet": {
        "bullet-halfcheetah-random-v0": "bullet-halfcheetah_random",
        "bullet-halfcheetah-medium-v0": "bullet-halfcheetah_medium",
        "bullet-halfcheetah-expert-v0": "bullet-halfcheetah_expert",
        "bullet-halfcheetah-medium-expert-v0": "bullet-halfcheetah_medium_expert",
        "bullet-halfcheetah-medium-replay-v0": "bullet-halfcheetah_medium_replay",
        "bullet-hopper-random-v0": "bullet-hopper_random",
        "bullet-hopper-medium-v0": "bullet-hopper_medium",
        "bullet-hopper-expert-v0": "bullet-hopper_expert",
        "bullet-hopper-medium-expert-v0": "bullet-hopper_medium_expert",
        "bullet-hopper-medium-replay-v0": "bullet-hopper_medium_replay",
        "bullet-ant-random-v0": "bullet-ant_random",
        "bullet-ant-medium-v0": "bullet-ant_medium",
        "bullet-ant-expert-v0": "bullet-ant_expert",
        "bullet-ant-medium-expert-v0": "bullet-ant_medium_expert",
        "bullet-ant-medium-replay-v0": "bullet-ant_medium_replay",
        "bullet-walker2d-random-v0": "bullet-walker2d_random",
        "bullet-walker2d-medium-v0": "bullet-walker2d_medium",
        "bullet-walker2d-expert-v0": "bullet-walker2d_expert",
        "bullet-walker2d-medium-expert-v0": "bullet-walker2d_medium_expert",
        "bullet-walker2d-medium-replay-v0": "bullet-walker2d_medium_replay",
        "bullet-maze2d-open-v0": "bullet-maze2d-open-sparse",
        "bullet-maze2d-umaze-v0": "bullet-maze2d-umaze-sparse",
        "bullet-maze2d-medium-v0": "bullet-maze2d-medium-sparse",
        "bullet-maze2d-large-v0": "bullet-maze2d-large-sparse",
    },
    "ant_maze_v1": {
        "antmaze-umaze-v1": "Ant_maze_umaze_noisy_multistart_False_multigoal_False_sparse",
        "antmaze-umaze-diverse-v1": "Ant_maze_umaze_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-medium-play-v1": "Ant_maze_medium_noisy_multistart_True_multigoal_False_sparse",
        "antmaze-medium-diverse-v1": "Ant_maze_medium_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-large-diverse-v1": "Ant_maze_large_noisy_multistart_True_multigoal_True_sparse",
        "antmaze-large-play-v1": "Ant_maze_large_noisy_multistart_True_multigoal_False_sparse",
    },
}

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
    found = {
        name: f"{folder}/{file}.hdf5" for folder, files in _FILES.items() for name, file in files.items()
    }
    for env in ("halfcheetah", "hopper", "walker2d", "ant"):
        for kind in ("random", "medium", "expert", "medium-replay", "full-replay", "medium-expert"):
            for version in ("v1", "v2"):
                file = f"{env}_{kind.replace('-', '_')}-{version}"
                found[f"{env}-{kind}-{version}"] = f"gym_mujoco_{version}/{file}.hdf5"
    for env in ("hammer", "pen", "relocate", "door"):
        for kind in ("human", "expert", "cloned"):
            found[f"{env}-{kind}-v1"] = f"hand_dapg_v1/{env}-{kind}-v1.hdf5"
    return found


def score_bounds(dataset_id: str) -> tuple[float, float] | None:
    """Return the returns for the scores 0 and 1; None if D4RL has none."""
    fitting = [name for name in _SCORES if dataset_id == name or dataset_id.startswith(name + "-")]
    return _SCORES[max(fitting, key=len)] if fitting else None
