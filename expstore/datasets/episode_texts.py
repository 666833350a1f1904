"""Texts of steps as facts about their episode: the store keeps numbers by row and texts by episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["text_fact"]


def text_fact(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the text of all steps; if it changes, a list that says from which step on it is which.

    >>> text_fact(["go", "go"])
    'go'
    >>> text_fact(["go", "stop", "stop"])
    [{'step': 0, 'text': 'go'}, {'step': 1, 'text': 'stop'}]
    """
    changes = [
        {"step": step, "text": text} for step, text in enumerate(texts) if not step or text != texts[step - 1]
    ]
    return str(changes[0]["text"]) if len(changes) == 1 else changes
