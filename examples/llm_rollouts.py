"""Keep rollouts of a language model in one store: texts, tokens and log-probabilities of any length.

Run `python examples/llm_rollouts.py` several times: each run adds rollouts of newer policies to the stored
ones. A few lines simulate the model: it answers sums, better with every version.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import expstore
from expstore.samplers import RandomSampler, StalenessAwareSampler

CAPACITY = 20_000
WORDS = ["<end>", "well", "let", "me", "see", "the", "sum", "of", "and", "is", "so", "I", "think", "it"]
NUMBERS = len(WORDS)  # token of the number 0
GROUP = 4  # responses per prompt
MOST_TOKENS = 24

BY_VERSION = """
    SELECT policy_version AS version, count(*) AS rollouts, round(avg(next.reward), 3) AS reward,
           round(avg(len(tokens)), 1) AS length, count(*) FILTER (facts.finish = 'length') AS cut_off
    FROM transitions GROUP BY version ORDER BY version
"""
LONGEST = """
    SELECT prompt, response, len(tokens) AS length, next.reward AS reward
    FROM transitions ORDER BY length DESC, _id LIMIT 3
"""
HARDEST = """
    SELECT prompt, avg(next.reward) AS reward, count(*) AS rollouts
    FROM transitions WHERE policy_version = ? GROUP BY prompt ORDER BY reward, prompt LIMIT 3
"""


class Policy:
    """Simulate a model: newer versions are right more often, and earlier."""

    def __init__(self, version: int, seed: int) -> None:
        self.version = version
        self.skill = 1 - 0.8 / (1 + version / 2)
        self.rng = np.random.default_rng((seed, version))

    def respond(self, first: int, second: int) -> tuple[list[int], list[float]]:
        """Return the tokens of a response and their log-probabilities."""
        tokens: list[int] = []
        while len(tokens) < MOST_TOKENS - 2 and self.rng.random() > self.skill / 2:
            tokens.append(int(self.rng.integers(1, len(WORDS))))
        right = self.rng.random() < self.skill
        answer = first + second if right else int(self.rng.integers(0, 20))
        tokens.append(NUMBERS + answer)
        if len(tokens) < MOST_TOKENS - 2:
            tokens.append(0)
        return tokens, np.log(self.rng.uniform(0.1, 0.9, len(tokens))).tolist()


def to_text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] if token < NUMBERS else str(token - NUMBERS) for token in tokens if token)


def collect(policy: Policy, prompts: int) -> TensorDict:
    """Return `GROUP` responses to each of several prompts, one per row."""
    texts, responses, tokens, logprobs, rewards, facts = [], [], [], [], [], []
    for first, second in policy.rng.integers(0, 10, (prompts, 2)).tolist():
        for _ in range(GROUP):
            ids, logs = policy.respond(first, second)
            numbers = [token - NUMBERS for token in ids if token >= NUMBERS]
            texts.append(f"What is {first} + {second}?")
            responses.append(to_text(ids))
            tokens.append(torch.tensor(ids, dtype=torch.int32))
            logprobs.append(torch.tensor(logs))
            rewards.append(float(numbers[-1:] == [first + second]) - 0.01 * len(ids))
            facts.append({"finish": "stop" if ids[-1] == 0 else "length", "numbers": numbers})
    rows = len(texts)
    return TensorDict(
        {
            "prompt": NonTensorStack(*texts),
            "response": NonTensorStack(*responses),
            "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
            "logprobs": torch.nested.nested_tensor(logprobs, layout=torch.jagged),
            "facts": NonTensorStack(*facts),
            "policy_version": torch.full((rows,), policy.version),
            "next": {"reward": torch.tensor(rewards)[:, None], "done": torch.ones(rows, 1, dtype=torch.bool)},
        },
        [rows],
    )


def loss_of(batch: TensorDictBase) -> torch.Tensor:
    """Return the policy gradient loss; the padding of shorter responses is masked out."""
    lengths = batch["tokens"].offsets().diff()
    logprobs = batch["logprobs"].to_padded_tensor(0.0)
    mask = torch.arange(logprobs.shape[1]) < lengths[:, None]
    advantage = batch["next", "reward"] - batch["next", "reward"].mean()
    freshness = 1 / (1 + batch["staleness"].float())
    return -(logprobs * advantage * mask).sum(1).mul(freshness).mean()


def run(path: Path, *, versions: int, prompts: int, seed: int) -> None:
    sampler = StalenessAwareSampler(max_staleness=2)
    with expstore.open(
        path, layout="arrow", capacity=CAPACITY, sampler=sampler, batch_size=64, seed=seed
    ) as rb:
        stored = len(rb)
        newest = rb.sql("SELECT max(policy_version) FROM transitions").fetchone() if stored else None
        first = 0 if newest is None else newest[0] + 1
        print(f"{path}: {stored} rollouts so far")
        for version in range(first, first + versions):
            rb.extend(collect(Policy(version, seed), prompts))
            sampler.consumer_version = version  # sample only rollouts of the three newest policies
            batch = rb.sample()
            print(f"version {version}: loss {float(loss_of(batch)):+.3f}, {batch['response'][0]!r}")
        rb.flush()
        print(rb.sql(BY_VERSION))
        print(rb.sql(LONGEST))
        print(rb.sql(HARDEST, [first + versions - 1]))

    # Sample the same rows with a condition, for instance good and short ones, as another process could.
    good = RandomSampler(where="next.reward > 0.9 AND len(tokens) < 8 AND facts.finish = 'stop'")
    with expstore.open(path, mode="r", sampler=good, batch_size=4) as rb:
        for prompt, response in zip(*(rb.sample()[key] for key in ("prompt", "response")), strict=True):
            print(f"{prompt} {response}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=Path("runs/rollouts.exp"))
    parser.add_argument("--versions", type=int, default=4, help="number of policies that collect in this run")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts per policy")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    run(given.path, versions=given.versions, prompts=given.prompts, seed=given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
