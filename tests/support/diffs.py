"""Apply the diffs of documents."""

from __future__ import annotations


def apply_diff(diff: str, text: str) -> str:
    """Return a text with the hunks of a diff applied, each to the one place that has its old lines."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
