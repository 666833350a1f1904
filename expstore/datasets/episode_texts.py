"""Texts of steps as annotations of episodes: a store keeps numbers per row, and texts per episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_fact(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the text of all steps, or a list of the steps at which the text changes.

    >>> from expstore.datasets.episode_texts import text_fact
    >>> text_fact(["go", "go"])
    'go'
    >>> text_fact(["go", "stop", "stop"])
    [{'step': 0, 'text': 'go'}, {'step': 1, 'text': 'stop'}]
    """
    changes = [
        {"step": step, "text": text} for step, text in enumerate(texts) if not step or text != texts[step - 1]
    ]
    return str(changes[0]["text"]) if len(changes) == 1 else changes
