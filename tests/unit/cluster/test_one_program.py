"""The same lines collect and train, wherever the rows live."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from tests.support.servers import Serving

PER = {"kind": "prioritized"}


def collect(rb: Any, source: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        done = (torch.arange(20) == 19)[:, None]
        following = {
            "observation": torch.randn(20, 4, generator=generator), "reward": torch.ones(20, 1),
            "terminated": done, "truncated": torch.zeros_like(done), "done": done,
        }  # fmt: skip
        rows = {"observation": torch.randn(20, 4, generator=generator), "next": TensorDict(following, [20])}
        rb.extend(TensorDict(rows, [20]), source=source)


def train(rb: Any) -> int:
    """Train a few steps by priority; return how many priorities were set."""
    model, count = torch.nn.Linear(4, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(6):
        batch = rb.sample(16)
        target = batch["next", "reward"] + 0.9 * model(batch["next", "observation"]).detach()
        error = target - model(batch["observation"])
        loss = (batch["priority_weight"][:, None] * error.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch["td_error"] = error.detach().abs()
        count += int(rb.update_priority(batch) or 0)
    return count


def work(rb: Any, number: int) -> None:
    collect(rb, f"worker-{number}")


@pytest.mark.slow
def test_one_program_serves_all_places(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "here.exp", sampler="prioritized") as rb:
        collect(rb, "here")
        train(rb)
    shared = expstore.open(tmp_path / "shared.exp", sampler="prioritized").share()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(shared, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(shared) == 4 * 80
    train(shared)
    (tmp_path / "served").mkdir()
    for name in ("a", "b"):
        expstore.open(tmp_path / "served" / f"{name}.exp").close()
    with Serving(Settings(path=tmp_path / "served")) as server:
        urls = [f"{server.url}/{name}" for name in ("a", "b")]
        places: list[Any] = [urls[0], urls, [urls[0], shared]]
        for place in places:
            with expstore.connect(place, sampler=PER) as rb:
                before = len(rb)
                collect(rb, f"to {places.index(place)}")
                assert len(rb) == before + 80
                assert train(rb) > 0
                assert (
                    rb.sql("SELECT 1 AS one").fetchall()
                    if place is urls[0]
                    else rb.sql_each("SELECT 1 AS one")
                )
    shared.close()
