"""What errors and warnings say after frequent mistakes: what was asked, what was found, what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.errors import ArgumentError, ExpStoreError, NotReadyError, StackError


def consume_all(path: Path) -> None:
    rb = expstore.TensorDictReplayBuffer(
        storage=expstore.LazyTensorStorage(20), batch_size=10, sampler=expstore.ConsumingSampler()
    )
    rb.extend(TensorDict({"x": torch.arange(20)}, [20]))
    for _ in range(3):
        rb.sample()


def sample_objects(*rows: object) -> Callable[[Path], object]:
    """Return a function that samples all of these rows from a ListStorage."""

    def act(path: Path) -> object:
        sampler = expstore.SamplerWithoutReplacement(shuffle=False)
        rb = expstore.ReplayBuffer(storage=expstore.ListStorage(10), batch_size=len(rows), sampler=sampler)
        rb.extend(list(rows))
        return rb.sample()

    return act


WRONG: list[tuple[Callable[[Path], object], type[ExpStoreError], str]] = [
    (
        consume_all,
        NotReadyError,
        "ConsumingSampler returns each row once, and none is left; extend() the buffer, or set a sampler",
    ),
    (sample_objects(torch.zeros(2), torch.zeros(3)), StackError, "shapes (2,), (3,); pass collate_fn"),
    (sample_objects({"a": torch.zeros(2)}, {"a": torch.zeros(3)}), StackError, "the shapes (2,), (3,)"),
    (sample_objects((np.zeros(2), 1), (np.zeros(3), 1)), StackError, "the shapes (2,), (3,)"),
    (sample_objects(torch.zeros(2), "x"), StackError, "some rows are Tensor, others str"),
    (sample_objects({"a": 1}, {"b": 1}), StackError, "not all rows have ['a', 'b']"),
    (
        lambda path: expstore.ReplayBuffer(100, "observations", "actions"),  # type: ignore[misc]
        ArgumentError,
        "no positional arguments, got int, str, str; use ReplayBuffer(storage=...); for replay_buffer_class=",
    ),
    (
        lambda path: expstore.TensorDictReplayBuffer(100),  # type: ignore[misc]
        ArgumentError,
        "TensorDictReplayBuffer takes no positional arguments, got int",
    ),
    (lambda path: expstore.load_dataset("minarii:x"), ArgumentError, "did you mean minari? The supported"),
    (lambda path: expstore.D4RLExperienceReplay("hoper-medium-v2"), ArgumentError, "'hopper-medium-v2'?"),
    (lambda path: expstore.OpenMLExperienceReplay("adult_onhot"), ArgumentError, "mean 'adult_onehot'?"),
    (lambda path: expstore.OpenXExperienceReplay("cmu_stretc"), ArgumentError, "mean 'cmu_stretch'?"),
    (lambda path: expstore.AtariDQNExperienceReplay("Pogn/5"), ArgumentError, "did you mean 'Pong/5'?"),
    (lambda path: expstore.GenDGRLExperienceReplay("bigfsh-10M"), ArgumentError, "mean 'bigfish-10M'?"),
    (
        lambda path: expstore.VD4RLExperienceReplay("main/walker_walk/randm/64px"),
        ArgumentError,
        "did you mean 'main/walker_walk/random/64px'? All names: VD4RLExperienceReplay.available_datasets",
    ),
    (
        lambda path: expstore.RobosetExperienceReplay("DAPG(expert)/door_v2-v1"),
        ArgumentError,
        "did you mean 'DAPG(expert)/door_v2d-v1'?",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("act", "error", "message"), WRONG)
def test_a_mistake_is_answered_by(
    act: Callable[[Path], object], error: type[ExpStoreError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        act(tmp_path)
    assert message in str(caught.value)


def test_a_broken_chain_without_trajectory_ids_names_the_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20))
    none = np.zeros(2, np.bool_)
    with caplog.at_level(logging.WARNING):
        for start in (0.0, 10.0):
            before = start + np.arange(2.0)[:, None]
            after = {"observation": before + 1, "reward": np.ones(2), "terminated": none, "truncated": none}
            rb.extend({"observation": before, "action": np.zeros(2), "next": after})
    assert caplog.text.count("began another episode") == 1
    assert "observation of its newest row does not equal the next observation" in caplog.text
    assert "trajectory" not in caplog.text


def test_sources_of_a_plot_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with expstore.open(tmp_path / "a.exp") as rb:
        zeros, ends = np.zeros((11, 2), np.float32), np.ones(11, np.bool_)
        with rb.record("a", lanes=11) as record:
            record.step(zeros, np.ones(11), np.ones(11), zeros, ends, ~ends)
        labels = [text.get_text() for text in expstore.plot.returns(rb).get_legend().get_texts()]
    assert labels == ["a", *(f"a//{lane}" for lane in range(1, 7)), "4 other sources"]
