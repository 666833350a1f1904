"""The example of language model rollouts continues from stored rollouts, and reports its progress."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import expstore
from tests.support.example_runs import import_example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return import_example("llm_rollouts")


@pytest.mark.slow
def test_it_continues_where_it_stopped(
    example: ModuleType, store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stored in (0, 3 * 128):
        assert example.main([str(store_path), "--versions", "3", "--prompts", "32"]) == 0
        printed = capsys.readouterr().out
        assert f"{stored} rollouts so far" in printed
        assert printed.count("What is") >= 3 + 3 + 4
    assert "version 5: loss" in printed
    with expstore.open(store_path, mode="r") as rb:
        rows = rb.sql(example.BY_VERSION).fetchall()
        assert [(version, count) for version, count, *_ in rows] == [(version, 128) for version in range(6)]
        rewards = [reward for _, _, reward, *_ in rows]
        assert rewards[-1] > rewards[0] + 0.3
        for prompt, response, tokens in rb.sql("SELECT prompt, response, tokens FROM transitions").fetchall():
            assert prompt.startswith("What is ")
            assert response == example.to_text(tokens)


def test_its_batches_are_of_the_newest_policies(example: ModuleType, store_path: Path) -> None:
    example.run(store_path, versions=5, prompts=16, seed=1)
    sampler = expstore.StalenessAwareSampler(max_staleness=2)
    with expstore.open(store_path, sampler=sampler, batch_size=64) as rb:
        batch = rb.sample()
        assert set(batch["policy_version"].tolist()) <= {2, 3, 4}
        assert float(example.loss_of(batch)) == pytest.approx(
            -sum(
                float(logs.sum() * (reward - batch["next", "reward"].mean()) / (1 + stale))
                for logs, reward, stale in zip(
                    batch["logprobs"].unbind(),
                    batch["next", "reward"],
                    batch["staleness"].float(),
                    strict=True,
                )
            )
            / 64,
            abs=1e-4,
        )
