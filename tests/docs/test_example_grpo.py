"""The example of GRPO: killed, it trains on each group once, never on old ones, and learns as fast."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from examples import grpo
from tests.support import warm_processes
from tests.support.paths import ROOT

_STEP = re.compile(r"step (\d+): (loss \S+, lag (\d+), )?(\d+) ")
_PROCESS = re.compile(r"rollout process (\d) has id (\d+)")


@dataclass
class Run:
    """What all lives of a program have printed.

    Args:
        folder: Folder of the store and the weights.
        seed: Random seed of the training.
        steps: Largest number of steps.
    """

    folder: Path
    seed: int
    steps: int
    #: The lines of each step; several if it came again after a kill.
    lines: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: Number of right answers after each step.
    right: dict[int, int] = field(default_factory=dict)
    #: How often a rollout process was started.
    started: int = 0

    def live(self, *, kill_at: int | None = None, victims: Iterable[str] = ()) -> None:
        """Run the program; at a step kill processes: "learner", "0" and "1", the rollout processes.

        If the learner is one of them, this was its life. Otherwise the program runs to its end.
        """
        command = [sys.executable, str(ROOT / "examples" / "grpo.py"), "--path", str(self.folder)]
        command += ["--steps", str(self.steps), "--seed", str(self.seed)]
        with warm_processes.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ids = {"learner": process.pid}
            for line in process.stdout:
                if match := _PROCESS.match(line):
                    ids[match[1]] = int(match[2])
                    self.started += 1
                elif match := _STEP.match(line):
                    step = int(match[1])
                    self.right[step] = int(match[4])
                    if match[2]:
                        self.lines[step].append(line)
                    if kill_at is not None and step >= kill_at:
                        kill_at = None
                        for victim in victims:
                            with contextlib.suppress(ProcessLookupError):  # it ended with the learner
                                os.kill(ids[victim], signal.SIGKILL)
        if "learner" in victims:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == (0 if self.is_done else 1)

    @property
    def last(self) -> int:
        """The last step."""
        return max(self.right)

    @property
    def is_done(self) -> bool:
        return self.right[self.last] >= grpo.GOAL * len(grpo.SUMS)

    def check(self) -> None:
        """Check that steps which came again were the same, and what the learner was trained on."""
        assert sorted(self.lines) == list(range(1, self.last + 1))
        assert [step for step, lines in self.lines.items() if len(set(lines)) > 1] == []
        with expstore.open(self.folder / "rollouts.exp", mode="r") as rb:
            drawn = rb.sql(
                "SELECT draw, count(*), count(DISTINCT id), count(DISTINCT transitions.group), "
                "min(policy_version), max(policy_version) "
                "FROM draws JOIN transitions ON id = _id GROUP BY draw ORDER BY draw"
            ).fetchall()
            assert len(drawn) == self.last
            for step, (_, rows, ids, groups, oldest, newest) in enumerate(drawn):
                assert (rows, ids, groups) == (grpo.GROUPS * grpo.SIZE, rows, grpo.GROUPS)
                assert step - grpo.MAX_LAG <= oldest <= newest <= step
            (most,) = rb.sql(
                "SELECT max(times) FROM (SELECT count(*) AS times FROM draws GROUP BY id)"
            ).fetchone()
            assert most == 1


def test_a_step_makes_rewarded_answers_more_likely(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "rollouts.exp", episodes={"group": "group"}) as rb:
        consumer = rb.consumer("learner", sampler=expstore.GroupSampler(1))
        learner = grpo.Learner(tmp_path, consumer, seed=0)
        prompts = grpo.PROMPTS[::10].repeat_interleave(grpo.SIZE, 0)
        tokens, logprobs = learner.model.answer(prompts)
        rewards = (tokens[:, 0] % 2).float()  # as if odd first digits were right
        mask = torch.ones_like(tokens, dtype=torch.bool)
        batch = {"prompt_tokens": prompts, "tokens": tokens, "tokens_mask": mask, "logprobs": logprobs}
        learner.learn(TensorDict(batch | {"next": {"reward": rewards}}, [len(tokens)]))
        after = learner.model(torch.cat([prompts, tokens], 1))[:, prompts.shape[1] - 1]
        change = after.gather(1, tokens[:, :1])[:, 0] - logprobs[:, 0]
        assert change[rewards == 1].mean() > 0 > change[rewards == 0].mean()
        assert learner.step == 1


@pytest.mark.guarantee(
    "consumers/grpo",
    "A killed GRPO learner trains on each group once and on none that lags too far, with the same losses.",
)
@pytest.mark.slow
def test_kills_change_no_step_and_no_group(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=0, steps=16)
    run.live(kill_at=7, victims=["learner"])
    run.live(kill_at=12, victims=["learner", "0", "1"])
    assert run.last < 16
    run.live(kill_at=13, victims=["0"])
    assert run.last == 16
    assert run.started == 7
    assert max(map(len, run.lines.values())) > 1
    run.check()


@pytest.mark.torture
@pytest.mark.timeout(3000)
def test_kills_cost_few_steps(tmp_path: Path, long_seed: int, count_cases: Callable[..., None]) -> None:
    steps: dict[str, list[int]] = {"whole": [], "killed": []}
    for seed in range(5):
        chance = random.Random(long_seed + seed)
        whole, killed = (Run(tmp_path / f"{name}-{seed}", seed, steps=400) for name in steps)
        whole.live()
        for low, victims in [(5, ["learner"]), (40, ["learner", "0", "1"])]:
            killed.live(kill_at=chance.randint(low, low + 30), victims=victims)
        killed.live(kill_at=chance.randint(75, 100), victims=["1"])
        for name, run in (("whole", whole), ("killed", killed)):
            run.check()
            assert run.is_done
            steps[name].append(run.last)
        count_cases(3)
    assert statistics.median(steps["killed"]) <= 1.2 * statistics.median(steps["whole"]), steps
