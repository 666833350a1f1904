"""The preset for rollouts opens stores that hold them, under names that users choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expstore
from expstore.errors import ArgumentError, SchemaError
from expstore.specs import Rollout
from tests.support.refusals import check_refusals

ROW: dict[str, Any] = {
    "prompt": "1 + 1?",
    "response": "2",
    "prompt_tokens": [5, 6, 5],
    "tokens": [2, 0],
    "loss_mask": [True, False],
    "logprobs": [-0.5, -0.25],
    "policy_version": 3,
    "group": "1 + 1?",
    "next": {"reward": 1.0, "done": True},
}


def test_a_rollout_is_an_episode(tmp_path: Path) -> None:
    settings = Rollout().settings()
    with expstore.open(tmp_path / "a.exp", seed=0, **settings) as rb:
        rb.extend([ROW, {**ROW, "tokens": [], "loss_mask": [], "logprobs": []}])
    with expstore.open(tmp_path / "a.exp", batch_size=2, **settings) as rb:
        assert (
            rb.sql('SELECT length, "return", status FROM episodes').fetchall() == [(1, 1.0, "terminated")] * 2
        )
        batch = rb.sample(8, as_numpy=True)
        assert {len(one) for one in batch["tokens"]} == {0, 2}
        assert {str(batch[name][0].dtype) for name in ("tokens", "loss_mask", "logprobs")} == {
            *("int32", "bool", "float32")
        }


def test_rollouts_continue_their_parents(tmp_path: Path) -> None:
    tokens = list(range(100))
    with expstore.open(tmp_path / "a.exp", **Rollout(parent="parent").settings()) as rb:
        (first,) = rb.extend([{**ROW, "tokens": tokens, "parent": 0}], return_ids=True).tolist()
        rb.extend([{**ROW, "tokens": [*tokens, 1, 2], "parent": first}])
        rb.storage.drain()
        place = rb.storage.schema.place(("tokens",))
        assert rb.storage.read(rb.storage.stored.ids(), [place])[0].to_pylist() == [tokens, [*tokens, 1, 2]]
        (segments,) = rb.storage.state.columns.shared
        number = segments.fields.index(rb.storage.schema.fields[place])
        (rows,) = segments.gather_stored(rb.storage.stored.ids(), [number])
        assert [len(row["own"]) for row in rows.to_pylist()] == [100, 2]


def test_names_and_fields_are_chosen(tmp_path: Path) -> None:
    rollout = Rollout(
        prompt_tokens=None,
        loss_mask=None,
        policy_version=None,
        response=None,
        group="question",
        reward=("next", "score"),
    )
    settings = rollout.settings()
    settings["schema"]["length"] = "int64"
    with expstore.open(tmp_path / "a.exp", **settings) as rb:
        names = [".".join(key) for key in rb.storage.require_schema().keys]
        assert names == ["prompt", "tokens", "logprobs", "question", "next.score", "next.done", "length"]
        row = {name: ROW[name] for name in ("prompt", "tokens", "logprobs")}
        rb.extend([{**row, "question": "q", "length": 2, "next": {"score": 0.5, "done": True}}])
        assert rb.sql('SELECT "return" FROM episodes').fetchall() == [(0.5,)]
    assert Rollout().settings(["tokens", "done"]) == {
        "layout": "arrow",
        "schema": {("tokens",): ("int32", (None,)), ("next", "done"): "bool"},
        "episodes": {"done": [("next", "done")]},
    }


def test_wrong_keys_and_rows_are_refused(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", **Rollout().settings()) as rb:
        check_refusals(
            [
                (
                    lambda: Rollout(tokens="prompt"),
                    ArgumentError,
                    "prompt and tokens are both the field 'prompt'",
                ),
                (lambda: Rollout(done=None), ArgumentError, "done is the key of a field"),  # type: ignore[arg-type]
                (lambda: Rollout(group=5), ArgumentError, "group is the key of a field"),  # type: ignore[arg-type]
                (lambda: rb.extend([{**ROW, "tokens": "2"}]), SchemaError, "tokens"),
            ]
        )
        assert len(rb) == 0
