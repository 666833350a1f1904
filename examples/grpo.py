"""Teach a small transformer to add by GRPO; kill -9 the learner or its rollout processes at any moment.

`python examples/grpo.py` takes about a minute. Two rollout processes answer sums such as "7+5=", a group of
answers for each sum, and append them to one store. The learner draws whole groups, each once, and never one
of weights that are more than two steps old. After a kill the program continues where it was: the learner
goes back to its checkpoint, and the batches since then come again, so it has the weights that it had.

Before the first step the model learns from right answers for a moment, as a model that has never seen a sum
would hardly ever be right. After this it learns from its own answers and their rewards only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

import expstore
from expstore.errors import NotReadyError, RemoteError
from expstore.specs import Rollout

GROUPS, SIZE = 16, 16  # groups of a batch, answers of a group
MAX_LAG = 2  # steps of the learner
WARM_STEPS, RATE, CLIP, ENTROPY = 80, 1e-3, 0.2, 0.2
CHECKPOINT_EVERY = 10  # steps
GOAL = 0.9  # of all sums
ROLLOUT_PROCESSES = 2

TEXT = "0123456789+=."  # an answer ends with a full stop
END = TEXT.index(".")
LONGEST = 3  # tokens of an answer
SUMS = [(first, second) for first in range(10) for second in range(10)]


def decode(tokens: list[int]) -> str:
    """Return an answer up to its end; tokens after it mean nothing."""
    return "".join(TEXT[token] for token in tokens).partition(".")[0]


def encode(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[TEXT.index(letter) for letter in text] for text in texts])


PROMPTS = encode([f"{first}+{second}=" for first, second in SUMS])
ANSWERS = encode([f"{first + second}.".ljust(LONGEST, ".") for first, second in SUMS])


class Adder(nn.Module):
    """A transformer of 100,000 parameters that predicts the next letter."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(TEXT), width), nn.Embedding(8, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(TEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the letter after each token."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        values = self.letters(tokens) + self.places(torch.arange(length))
        logprobs: torch.Tensor = self.out(self.layers(values, mask, is_causal=True)).log_softmax(-1)
        return logprobs

    @torch.no_grad()
    def answer(self, prompts: torch.Tensor, *, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of an answer to each prompt, and their log-probabilities."""
        tokens, logs = prompts, []
        for _ in range(LONGEST):
            logprobs = self(tokens)[:, -1]
            token = logprobs.argmax(-1, keepdim=True) if greedy else logprobs.exp().multinomial(1)
            tokens = torch.cat([tokens, token], 1)
            logs.append(logprobs.gather(1, token))
        return tokens[:, prompts.shape[1] :], torch.cat(logs, 1)

    def count_right(self) -> int:
        """Return how many of all sums it answers right, with the most likely letters."""
        answers, _ = self.answer(PROMPTS, greedy=True)
        return sum(decode(row) == str(sum(SUMS[at])) for at, row in enumerate(answers.tolist()))


# -- rollout processes --------------------------------------------------------------------------------


def make_group(model: Adder, group: Any) -> dict[str, Any]:
    """Return answers to a random sum and their rewards, the rows of a group that was started."""
    first, second = SUMS[chosen := int(torch.randint(len(SUMS), ()))]
    prompts = PROMPTS[chosen].expand(SIZE, -1)
    tokens, logprobs = model.answer(prompts)
    ends = tokens == END
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, LONGEST).tolist()
    responses = [decode(row) for row in tokens.tolist()]
    return {
        "prompt": [f"{first}+{second}="] * SIZE,
        "response": responses,
        "prompt_tokens": prompts.int(),
        "tokens": [row[:length] for row, length in zip(tokens.int(), lengths, strict=True)],
        "logprobs": [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
        "policy_version": torch.full((SIZE,), group.version),
        "group": [str(group.id)] * SIZE,
        "next": {
            "reward": torch.tensor([float(response == str(first + second)) for response in responses]),
            "done": torch.ones(SIZE, dtype=torch.bool),
        },
    }


def roll_out(rb: Any, weights: Path, seed: int) -> None:
    """Append groups of answers by the newest weights, until the learner ends or is killed."""
    torch.manual_seed(seed)
    model = Adder()

    def load() -> int:
        state = torch.load(weights)
        model.load_state_dict(state["model"])
        return int(state["version"])

    with contextlib.suppress(RemoteError):  # the learner has ended
        while True:
            # Waits until the group will be at most MAX_LAG steps old when the learner draws it.
            with rb.groups.start(version=load, timeout=math.inf) as group:
                rb.extend(make_group(model, group))  # all answers of the group or none, also after a kill


class Rollouts:
    """The rollout processes of a store; one that is killed is started again."""

    def __init__(self, rb: Any, weights: Path, seed: int) -> None:
        self.rb, self.weights, self.seed = rb.share(), weights, seed
        self.processes: list[Any] = [None] * ROLLOUT_PROCESSES

    def watch(self) -> None:
        """Start each process that does not run; raise RuntimeError if one failed by itself."""
        for number, process in enumerate(self.processes):
            if process is not None and process.is_alive():
                continue
            if process is not None and process.exitcode >= 0:
                raise RuntimeError(f"rollout process {number} failed with exit code {process.exitcode}")
            # Another process of this number may have written rows already: other random numbers.
            seed = hash((self.seed, number, self.rb.write_count))
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=roll_out, args=(self.rb, self.weights, seed))
            process.start()
            self.processes[number] = process
            print(f"rollout process {number} has id {process.pid}", flush=True)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


# -- the learner --------------------------------------------------------------------------------------


def replace_file(path: Path, state: dict[str, Any]) -> None:
    """Write a file such that a reader finds the old one or the new one, also after a kill."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


class Learner:
    """Learns from the groups that its consumer draws, and goes back to its checkpoint after a kill.

    Args:
        folder: Folder of its files: `learner.pt`, the checkpoint, and `weights.pt`, for rollout processes.
        consumer: Draws its batches.
        seed: Random seed of the first weights.
    """

    def __init__(self, folder: Path, consumer: expstore.buffers.Consumer, seed: int) -> None:
        torch.manual_seed(seed)
        self.checkpoint, self.weights = folder / "learner.pt", folder / "weights.pt"
        self.consumer, self.step, self.model = consumer, 0, Adder()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            consumer.seek(state["position"])
        else:
            self._warm_up()
            self.publish()
            self.save()

    def _warm_up(self) -> None:
        """Learn from right answers for a moment."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        for _ in range(WARM_STEPS):
            chosen = torch.randint(len(SUMS), (64,))
            logprobs = self.model(torch.cat([PROMPTS, ANSWERS], 1)[chosen, :-1])[:, -LONGEST:]
            loss = nn.functional.nll_loss(logprobs.flatten(0, 1), ANSWERS[chosen].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def learn(self, batch: TensorDictBase) -> float:
        """Take a step of GRPO; return the loss."""
        rewards = batch["next", "reward"].reshape(-1, SIZE)  # whole groups, one after the other
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        tokens, mask = batch["tokens"].long(), batch["tokens_mask"]
        every = self.model(torch.cat([batch["prompt_tokens"], tokens], 1)[:, :-1])[:, -tokens.shape[1] :]
        ratios = (every.gather(2, tokens[..., None])[..., 0] - batch["logprobs"]).exp()
        gains = advantages.reshape(-1, 1) * torch.stack([ratios, ratios.clamp(1 - CLIP, 1 + CLIP)])
        entropy = -(every.exp() * every).sum(2)
        loss = -(gains.amin(0) + ENTROPY * entropy)[mask].mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def publish(self) -> None:
        """Give the weights to the rollout processes."""
        replace_file(self.weights, {"version": self.step, "model": self.model.state_dict()})

    def save(self) -> None:
        """Replace the checkpoint, then let the consumer forget the draws before it."""
        state = {"step": self.step, "position": self.consumer.position}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        replace_file(self.checkpoint, state)
        self.consumer.commit()


def train(folder: Path, steps: int, seed: int) -> bool:
    """Train until the goal is reached, or for a number of steps; return whether it is reached."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = Rollout(loss_mask=None).settings()
    settings["episodes"] |= {"group": "group", "group_size": SIZE}
    with expstore.open(folder / "rollouts.exp", **settings, batches={"ragged": "padded"}) as rb:
        sampler = expstore.GroupSampler(GROUPS, max_lag=MAX_LAG, where="std_return > 0")
        learner = Learner(folder, rb.consumer("learner", sampler=sampler, keep="all"), seed)
        right = learner.model.count_right()
        print(f"step {learner.step}: {right} of {len(SUMS)} sums are right", flush=True)
        rollouts = Rollouts(rb, learner.weights, seed)
        while learner.step < steps and right < GOAL * len(SUMS):
            rollouts.watch()
            try:
                batch = learner.consumer.sample()
            except NotReadyError:
                time.sleep(0.02)  # the rollout processes are slower than the learner
                continue
            lag = learner.step - int(batch["policy_version"].min())
            loss = learner.learn(batch)
            if not learner.consumer.replaying:
                learner.publish()  # never weights that are older than those that were published before a kill
            if learner.step % CHECKPOINT_EVERY == 0:
                learner.save()
                right = learner.model.count_right()
            print(f"step {learner.step}: loss {loss:.9f}, lag {lag}, {right} sums are right", flush=True)
        rollouts.stop()
        by_version = (
            "SELECT policy_version // 20 * 20 AS version, count(*) AS answers, avg(next.reward) AS right"
        )
        print(rb.sql(f"{by_version} FROM transitions GROUP BY version ORDER BY version"))
    return right >= GOAL * len(SUMS)


def main(arguments: list[str] | None = None) -> int:
    """Train; return 0 if the goal is reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path("runs/grpo"), help="folder of store and weights")
    parser.add_argument("--steps", type=int, default=1000, help="largest number of steps")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return 0 if train(given.path, given.steps, given.seed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
