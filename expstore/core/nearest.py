"""Find the known names that are most similar to an unknown one.

Used by error messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a name; None if none is similar.

    A name whose last part, after a dot, equals the whole name wins: `reward` finds `next.reward`.

    >>> from expstore.core.nearest import nearest
    >>> nearest("rewrd", ["action", "next.reward"])
    'next.reward'
    """
    lowered = name.lower()
    texts = {text.lower(): text for text in known}
    last = {text.rpartition(".")[2]: text for text in reversed(texts)}
    for candidates in (texts, last):
        if lowered in candidates:
            return texts.get(candidates[lowered].lower())
    for candidates in (texts, last):
        if found := difflib.get_close_matches(lowered, candidates, 1, 0.6):
            return texts.get(candidates[found[0]].lower())
    return None


def suggest(name: str, known: Collection[str], what: str) -> str:
    """Return the hint of an error about an unknown name: the most similar name, if any, and all names.

    >>> from expstore.core.nearest import suggest
    >>> suggest("rewrd", ["action", "next.reward"], "the fields are")
    'did you mean next.reward? The fields are next.reward, action'
    """
    found = nearest(name, known)
    listed = f"{what} {', '.join(list_nearest_first(name, known))}"
    return f"did you mean {found}? {listed[0].upper()}{listed[1:]}" if found else listed


def list_nearest_first(name: str, known: Collection[str]) -> list[str]:
    """Return the known names, beginning with the one that is most similar to a name."""
    found = nearest(name, known)
    return [*([found] if found else []), *(text for text in known if text != found)]
