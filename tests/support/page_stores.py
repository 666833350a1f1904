"""Stores for tests of the page: an ordinary one, one with texts, and one with hostile names and facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import expstore
from expstore.api.capture.recorder import store_settings
from expstore.wire.call_rows import build_row

#: Texts that run, break out of attributes, reverse the text around them, or are too long.
HOSTILE = (
    '<img src=x onerror="window.broken=1">',
    "\"><script>window.broken=1</script>'",
    "\u202eevil\u202c \u05e9\u05dc\u05d5\u05dd",
    'it\'s "quoted" & <b>bold</b> {{x}} ${x}',
)
LONG = "long-" * 2048
SIDE = 24


def make_frames(count: int, value: int) -> torch.Tensor:
    """Return frames with a bright square that moves. Shape `[count, 24, 24]`, uint8."""
    frames = torch.full((count, SIDE, SIDE), value, dtype=torch.uint8)
    for step in range(count):
        at = step % (SIDE - 6)
        frames[step, 6:12, at : at + 6] = 255
    return frames


def game_rows(length: int, reward: float, *, broken: bool = False) -> TensorDict:
    """Return the rows of one episode. Batch size `[length]`.

    Args:
        length: Its steps.
        reward: Of each step.
        broken: Whether its frames are bright instead of dark.
    """
    frames = make_frames(length + 1, 200 if broken else 20)
    ends = torch.zeros(length, 1, dtype=torch.bool)
    ends[-1] = True
    state = torch.linspace(0, 1, length + 1)[:, None].repeat(1, 3)
    after = {
        "pixels": frames[1:], "state": state[1:], "reward": torch.full((length, 1), reward),
        "terminated": ends, "truncated": torch.zeros_like(ends),
    }  # fmt: skip
    actions = torch.arange(length) % 3
    return TensorDict(
        {"pixels": frames[:-1], "state": state[:-1], "action": actions, "next": after}, [length]
    )


def build_page_stores(folder: Path) -> None:
    """Make the stores `run`, `texts`, `hostile` and `empty` in a folder.

    `run` has 60 episodes of 8 steps from three sources; from episode 41 on those of `worker-2` have a return
    of -8 and bright frames instead of 8 and dark ones. Its facts are `level` (1 to 3) and `good`.
    """
    meta = {"env": "Catch", "seed": 1, "actions": ["left", "stay", "right"]}
    with expstore.open(folder / "run.exp", capacity=2000, batch_size=8, seed=0, meta=meta) as rb:
        for number in range(60):
            broken = number >= 40 and number % 3 == 2
            rows = game_rows(8, -1.0 if broken else 1.0, broken=broken)
            facts = {"level": number % 3 + 1, "good": not broken}
            added = rb.extend(rows, source=f"worker-{number % 3}", episode_info=facts)
            rb.update_priority(index=added, priority=np.arange(1, 9) / 4)
        rb.extend(game_rows(8, 1.0)[:5], source="worker-0")
        rb.snapshots.tag("first")
    with expstore.open(folder / "texts.exp", layout="arrow", seed=0, meta={"model": "tiny"}) as rb:
        for number in range(6):
            rb.extend(_answers(f"question {number}", ["one two", "three"]), source="rollout")
    with expstore.open(folder / "hostile.exp", layout="arrow", seed=0, meta={HOSTILE[0]: HOSTILE[1]}) as rb:
        for number, text in enumerate((*HOSTILE, LONG)):
            facts = {text[:200]: text, "note": text}
            source = "".join(filter(str.isprintable, f"{text}{number}"))  # others are refused
            rb.extend(_answers(text, [text, HOSTILE[0]]), source=source, episode_info=facts)
    expstore.open(folder / "empty.exp", capacity=100).close()


def _answers(prompt: str, answers: list[str]) -> TensorDict:
    count = len(answers)
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[-1] = True
    tokens = [torch.arange(3 + number) for number in range(count)]
    rows: dict[str, Any] = {
        "prompt": [prompt] * count, "answer": answers, "odd - field": torch.arange(count),
        "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
        "logprob": torch.nested.nested_tensor([-one.float() for one in tokens], layout=torch.jagged),
        "next": {"reward": torch.ones(count, 1), "terminated": ends, "truncated": torch.zeros_like(ends)},
    }  # fmt: skip
    return TensorDict(rows, [count])


def build_calls(path: Path) -> None:
    """Make a store of calls of an agent: three groups of two episodes; the mean return of `task-2` is lowest.

    The calls of an episode: unanswered, refused, a tool's call, the answer with tokens, and a fork. Episode 7
    is open and long: 64 calls, whose first message has 100 kB.
    """
    with expstore.open(path, **store_settings(2)) as rb:
        for number in range(6):
            group = f"task-{number // 2}"
            add = {"name": "add", "arguments": json.dumps({"a": number, "b": 2})}
            asks = [message("system", "Use the tool. " * 60), message("user", f"{number} + 2? {HOSTILE[0]}")]
            called = message(
                "assistant", "So:", tool_calls=[{"id": "t1", "type": "function", "function": add}]
            )
            tool = message("tool", f"{number + 2} {HOSTILE[1]}", tool_call_id="t1")
            tokens = ["It is", f" {number + 2}", ". ", HOSTILE[0]]
            for row in (
                {"messages": asks, "outcome": "unanswered"},
                {"messages": asks, "status": 429, "error": f"slow down {HOSTILE[0]}", "retry": 1},
                {"messages": [*asks, called], "status": 200, "finish_reason": "tool_calls"},
                {"messages": [*asks, called, tool, message("assistant", "".join(tokens))], "status": 200,
                 "token_texts": tokens, "logprobs": [-0.1, -2.0, -0.3, -4.0], "seconds": 0.5},
                {"messages": [*asks[:1], message("user", "again"), message("assistant", "Yes.")]},
                {"event": "end", ("next", "reward"): (5.0 - number) / 4, ("next", "terminated"): True},
            ):  # fmt: skip
                about = {"event": "call", "outcome": "answered", "model": HOSTILE[3], "group": group}
                rb.extend(build_row(about | row), source=f"{group}-{number % 2}", session=f"s{number}")
        asks = [message("user", "x" * 100_000)]
        for number in range(64):
            asks = [*asks, message("assistant", f"answer {number}"), message("user", f"question {number}")]
            rb.extend(build_row({"event": "call", "messages": asks[:-1]}), source="long", session="long")


def message(role: str, content: str, **more: Any) -> str:
    """Return a message of a chat completion as JSON."""
    return json.dumps({"role": role, "content": content, **more})
