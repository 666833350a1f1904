"""Add the texts that a store keeps per episode to batches of its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from expstore.core.values import Key


class EpisodeTexts:
    """Add texts to batches, from annotations in the format of `expstore.datasets.steps.text_fact`.

    Args:
        facts: Annotations of the episodes, by the number of the episode.
        names: Names of the annotations that are texts. The fields have the same names, with dots between
            keys.
        episode: Key of the number of the episode.
        frame: Key of the number of the step in its episode.
    """

    def __init__(
        self,
        facts: Mapping[int, Mapping[str, Any]],
        names: Sequence[str],
        episode: Key = ("episode",),
        frame: Key = ("frame",),
    ) -> None:
        self._episode, self._frame = episode, frame
        self._texts = {
            name: {number: _changes(said[name]) for number, said in facts.items()} for name in names
        }

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the texts of its rows to a batch, and return it."""
        episodes, frames = batch.get(self._episode, None), batch.get(self._frame, None)
        if episodes is None or frames is None:  # an earlier transform removed one of these fields
            return batch
        for name, texts in self._texts.items():
            rows = zip(episodes.reshape(-1).tolist(), frames.reshape(-1).tolist(), strict=True)
            words = [_text_at(*texts[number], step) for number, step in rows]
            found = NonTensorStack.from_list(words) if episodes.ndim else NonTensorData(words[0])
            batch.set(tuple(name.split(".")), found)
        return batch


def _changes(said: Any) -> tuple[list[int], list[str]]:
    """Return the steps at which the text changes, and the texts."""
    if isinstance(said, str):
        return [0], [said]
    return [change["step"] for change in said], [change["text"] for change in said]


def _text_at(steps: Sequence[int], texts: Sequence[str], step: int) -> str:
    return texts[bisect_right(steps, step) - 1]
