"""Data sets by prefix: TorchRL's prefixes are registered, and others can be added."""

from __future__ import annotations

import pytest

from expstore.datasets import load_dataset, register_dataset, registry
from tests.support.dataset_table import PAGE, STUB, render_page, render_stub
from tests.support.refusals import check_refusals


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


def test_a_class_and_a_name_of_one() -> None:
    register_dataset("Lab", lambda name, **keywords: (name, keywords))
    assert load_dataset("lab:a:b", batch_size=3) == ("a:b", {"batch_size": 3})
    register_dataset("join", "posixpath:basename")
    assert load_dataset("JOIN:a/b") == "b"


def test_every_prefix_leads_to_a_class() -> None:
    for prefix in registry.prefixes():
        assert registry.dataset_class(prefix).__name__.endswith("ExperienceReplay")


def test_invalid_arguments_are_refused() -> None:
    check_refusals(
        [
            (lambda: register_dataset("", "a:b"), ValueError, "must be non-empty strings without ':'"),
            (lambda: register_dataset("a:b", "a:b"), ValueError, "must be non-empty strings without ':'"),
            (
                lambda: register_dataset("lab", "nothing"),
                ValueError,
                "must use the 'module:attribute' format",
            ),
            (lambda: register_dataset("lab", ":x"), ValueError, "must use the 'module:attribute' format"),
            (lambda: register_dataset("lab", 3), TypeError, "got int"),  # type: ignore[arg-type]
            (lambda: register_dataset("d4rl", "a:b"), KeyError, "already registered"),
            (lambda: load_dataset("hopper"), ValueError, "Supported prefixes"),
            (lambda: load_dataset("nobody:hopper"), ValueError, "supported"),
        ]
    )


def test_the_stub_and_the_page_follow_from_the_table() -> None:
    assert STUB.read_text() == render_stub(), "run: python -m tests.support.dataset_table"
    assert PAGE.read_text() == render_page(), "run: python -m tests.support.dataset_table"
