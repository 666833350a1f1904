"""The steps of a recorded episode as columns, as RLDS and Open X-Embodiment have them.

Used by the readers of both. A step has an observation, an action, a reward, flags and texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from expstore.core.values import Array, Key, key_name
from expstore.datasets.episode import End, Episode, nest_values
from expstore.datasets.frames import decode_images

#: Meaning of the last step of an episode: only an observation, or a step like the others.
LastStep = Literal["observation", "transition"]

#: Values of a step that are not stored under their own names.
_OWN: tuple[Key, ...] = (("reward",), ("is_last",), ("is_terminal",))


class Steps:
    """Hold the steps of one episode; images are decoded when they are read.

    Args:
        columns: Numbers, an array with a row per step, and images, a list of files, by the key of the field.
        texts: Texts by key, one per step.
        decode: Function that decodes images of a name.
    """

    def __init__(
        self,
        columns: Mapping[Key, Array | Sequence[bytes]],
        texts: Mapping[Key, Sequence[str]],
        decode: Callable[[str, Sequence[bytes]], Array] = decode_images,
    ) -> None:
        self._columns, self._texts, self._decode = columns, texts, decode

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(next(iter(self._columns.values())))

    def pieces(
        self, number: int, last_step: LastStep, piece_bytes: int, facts: Mapping[str, Any]
    ) -> Iterator[Episode]:
        """Yield the episode in pieces.

        Args:
            number: Number of the episode, for the field `episode`.
            last_step: Meaning of the last step.
            piece_bytes: Size of a piece.
            facts: Annotations of the episode, besides its texts.
        """
        has_last = last_step == "observation"
        count = len(self) - has_last
        facts = {**facts, **self._facts(max(1, count))}
        size = max(1, piece_bytes // max(1, self._row_bytes()))
        for start in range(0, count, size):
            stop = min(start + size, count)
            is_open = stop < count
            states = self._read(start, stop + (is_open or has_last), of_states=True)
            values = self._read(start, stop, of_states=False)
            fields: dict[str | Key, Array] = {
                key: rows for key, rows in values.items() if key[0] != "action" and key not in _OWN
            }
            fields["episode"] = np.full(stop - start, number)
            fields["frame"] = np.arange(start, stop)
            reward = values.get(("reward",))
            yield Episode(
                observation=nest_values("observation", states),
                action=nest_values("action", values),
                reward=None if reward is None else reward.reshape(stop - start, -1),
                end="open" if is_open else self._end(),
                fields=fields,
                facts=facts,
            )

    def _end(self) -> End:
        """Return how the episode ends; the flags count in the last step only."""
        if self._last("is_terminal"):
            return "terminated"
        return "cut" if self._last("is_last") is False else "truncated"

    def _last(self, name: str) -> bool | None:
        found = self._columns.get((name,))
        return None if found is None else bool(np.any(np.asarray(found[-1])))

    def _facts(self, count: int) -> dict[str, Any]:
        """Return the texts of the first steps as annotations."""
        return {".".join(key): text_fact(texts[:count]) for key, texts in self._texts.items() if texts}

    def _row_bytes(self) -> int:
        """Return the size of a step's values in bytes."""
        return sum(
            column.nbytes // max(1, len(column))
            if isinstance(column, np.ndarray)
            else self._decode(key_name(key), column[:1]).nbytes
            for key, column in self._columns.items()
            if len(column)
        )

    def _read(self, start: int, stop: int, *, of_states: bool) -> dict[Key, Array]:
        """Return the observations of some steps by key, or the other values."""
        found: dict[Key, Array] = {}
        for key, column in self._columns.items():
            if (key[0] == "observation") == of_states:
                rows = column[start:stop]
                found[key] = rows if isinstance(rows, np.ndarray) else self._decode(key_name(key), rows)
        return found


def text_fact(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the text of all steps, or a list of the steps at which the text changes.

    A store keeps numbers per row, and texts per episode.

    >>> from expstore.datasets.steps import text_fact
    >>> text_fact(["go", "go"])
    'go'
    >>> text_fact(["go", "stop", "stop"])
    [{'step': 0, 'text': 'go'}, {'step': 1, 'text': 'stop'}]
    """
    changes = [
        {"step": step, "text": text} for step, text in enumerate(texts) if not step or text != texts[step - 1]
    ]
    return str(changes[0]["text"]) if len(changes) == 1 else changes
