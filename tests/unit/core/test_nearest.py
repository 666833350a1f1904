"""Suggestions of the nearest known name."""

from __future__ import annotations

from expstore.core.nearest import list_nearest_first, nearest, suggest

FIELDS = ["observation", "next.observation", "next.reward", "Action"]


def test_the_nearest_name() -> None:
    for name, found in [
        ("observation", "observation"),
        ("reward", "next.reward"),
        ("rewrd", "next.reward"),
        ("next.rewrd", "next.reward"),
        ("obervation", "observation"),
        ("next.obervation", "next.observation"),
        ("action", "Action"),
        ("qqqq", None),
        ("", None),
    ]:
        assert nearest(name, FIELDS) == found
        assert nearest(name, []) is None


def test_hints_have_the_nearest_name_first() -> None:
    assert list_nearest_first("reward", FIELDS)[:2] == ["next.reward", "observation"]
    assert list_nearest_first("qqqq", FIELDS) == FIELDS
    assert suggest("qqqq", ["a", "b"], "the fields are") == "the fields are a, b"
    assert suggest("aaa", ["b", "aab"], "the fields are") == "did you mean aab? The fields are aab, b"
