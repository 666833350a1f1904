"""The diffs of docs/cleanrl.md apply to loops in CleanRL's style, and the changed loops keep their rows."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import expstore
from tests.support.diffs import apply_diff
from tests.support.paths import ROOT

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

PAGE = (ROOT / "docs" / "cleanrl.md").read_text()
DIFFS = dict(re.findall(r"^### (.+?)\n.*?^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
#: This one is applied to a whole example, by test_examples.py.
DIFFS.pop("examples/dqn.py with priorities")

#: What CleanRL's scripts have in common; the rest is in LEARNING.
LOOP = """
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer

if __name__ == "__main__":
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(args.env_id)] * args.num_envs, autoreset_mode=args.mode)
    envs.single_observation_space.dtype = np.float32
    rb = ReplayBuffer(
        args.buffer_size,
        envs.single_observation_space,
        envs.single_action_space,
        device,
        n_envs=args.num_envs,
        handle_timeout_termination=False,
    )
    obs, _ = envs.reset(seed=args.seed)
    envs.action_space.seed(args.seed)
    for global_step in range(args.total_timesteps):
        actions = envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for idx, trunc in enumerate(truncations):
            if trunc:
                real_next_obs[idx] = infos["final_obs"][idx]
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs
        if global_step > args.learning_starts:
            data = rb.sample(args.batch_size)
"""
DQN = """
            with torch.no_grad():
                target_max, _ = target_network(data.next_observations).max(dim=1)
                td_target = data.rewards.flatten() + args.gamma * target_max * (1 - data.dones.flatten())
            old_val = q_network(data.observations).gather(1, data.actions).squeeze()
            seen.append((td_target.shape, old_val.shape))
"""
ACTOR_CRITIC = """
            q_value = torch.cat([data.next_observations, data.actions], 1).sum(1)
            target = data.rewards.flatten() + (1 - data.dones.flatten()) * args.gamma * q_value.view(-1)
            seen.append((target.shape, data.observations.sum(1).shape))
"""
C51 = """
            old_pmfs = torch.softmax(q_network(data.observations), 1)
            target_pmfs = torch.softmax(q_network(data.next_observations), 1)
            loss = (-(target_pmfs * old_pmfs.clamp(min=1e-5, max=1 - 1e-5).log()).sum(-1)).mean()
            seen.append((target_pmfs.sum(1).shape, torch.Size([args.batch_size])))
"""
LEARNING = {
    "dqn.py": DQN,
    "dqn.py with a recorder": DQN,
    "ddpg_continuous_action.py": ACTOR_CRITIC,
    "sac_continuous_action.py": ACTOR_CRITIC,
    "c51.py": C51,
}


def original(name: str) -> str:
    text = LOOP + LEARNING[name].lstrip("\n")
    return text if name.startswith("sac") else text.replace("        n_envs=args.num_envs,\n", "")


def test_every_diff_is_short() -> None:
    assert set(DIFFS) == set(LEARNING)
    for name, diff in DIFFS.items():
        changed = re.findall(r"^[+-]", diff, re.MULTILINE)
        assert (changed.count("+") if "recorder" in name else len(changed)) <= 15, name


@pytest.mark.parametrize("name", LEARNING)
def test_the_changed_loop_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    continuous = LEARNING[name] is ACTOR_CRITIC
    args = SimpleNamespace(
        env_id="Pendulum-v1" if continuous else "CartPole-v1",
        exp_name="run",
        num_envs=2 if name.startswith("sac") else 1,
        mode="NextStep" if "recorder" in name else "SameStep",
        buffer_size=1000,
        batch_size=8,
        total_timesteps=220,
        learning_starts=200,
        gamma=0.99,
        seed=1,
    )
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    names: dict[str, Any] = {
        "__name__": "__main__",
        "args": args,
        "device": torch.device("cpu"),
        "q_network": network,
        "target_network": network,
        "seen": [],
    }
    exec(compile(apply_diff(DIFFS[name], original(name)), name, "exec"), names)
    assert names["seen"] == [(torch.Size([8]), torch.Size([8]))] * 19
    if name == "c51.py":
        priorities = names["rb"].rb.sql("SELECT DISTINCT _priority FROM transitions").fetchall()
        assert len(priorities) > 20
    names["rb"].close()
    with expstore.open("runs/run.exp", mode="r") as rb:
        statuses = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY status").fetchall())
        lengths = rb.sql("SELECT sum(length) FROM episodes").fetchall()
        rows = len(rb)
    assert lengths == [(rows,)]
    if continuous:
        assert statuses == {"cut": 2 * args.num_envs}, "CleanRL passes terminations only"
        assert rows == 220 * args.num_envs
        return
    assert statuses["terminated"] >= 5
    if "recorder" not in name:
        assert rows == 220
    else:  # steps that only reset are not stored; the one of the last end may not have come
        assert 220 - rows in (statuses["terminated"], statuses["terminated"] - 1)
