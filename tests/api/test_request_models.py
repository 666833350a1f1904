"""Error messages for invalid requests are our own, not pydantic's."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import Field, ValidationError

from expstore.api.request_models import RequestModel, explain_request
from expstore.api.routes.query import Question
from expstore.api.routes.read import Ids
from expstore.api.routes.sample import NamedSampler, SampleRequest, StreamRequest
from expstore.api.routes.snapshots import Tag, Which
from expstore.api.routes.write import Ending, NewStore, Priorities, Resuming
from expstore.api.samplers import AnySpec

MODELS = [
    SampleRequest, StreamRequest, NamedSampler, Question, Ids, Tag, Which, Ending, NewStore, Priorities,
    Resuming,
]  # fmt: skip
WRONG: list[Any] = [
    -1, 0, 1 << 70, 1.5, float("inf"), "", "?", "x" * 20_000, [], [None], {}, {"a": 1}, True,
    {"kind": "none"}, {"kind": "slices", "slice_len": -1}, ["a"], [1.5], None,
]  # fmt: skip
PYDANTIC = re.compile(
    r"Input should|Field required|Extra inputs|should have|valid|/docs|tagged-union|constrained"
)


def explain(model: type[RequestModel], body: Any) -> tuple[str, str] | None:
    try:
        model.model_validate(body)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors()]
        return explain_request(errors, body)
    return None


def test_every_wrong_value_of_every_field_raises_our_error() -> None:
    for model in MODELS:
        told = [explain(model, {name: value}) for name in model.model_fields for value in WRONG]
        refused = [" ".join(one) for one in told if one is not None]
        assert refused, model
        for text in refused:
            assert not PYDANTIC.search(text)
            assert len(text) < 400


def test_a_long_list_has_one_error() -> None:
    """An error takes a kilobyte and some microseconds of the event loop."""
    wrong = ["a"] * 1000
    for model, body in ((Ids, {"ids": wrong}), (Priorities, {"ids": [1] * 1000, "priorities": wrong})):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body)
        assert caught.value.error_count() == 1
        name = next(reversed(body))
        assert explain(model, body) == (
            f'{name}.0 is "a"',
            f"use {'an integer' if model is Ids else 'a number'}",
        )


def test_the_place_is_the_one_that_the_client_wrote() -> None:
    class Deep(RequestModel):
        parts: list[dict[str, AnySpec]] = Field(max_length=2)

    body = {"parts": [{}, {"a": {"kind": "prioritized", "beta": 99}}]}
    assert explain(Deep, body) == ("parts.1.a.beta is 99", "use a number of at most 10")
    body = {"parts": [{}, {"a": {"kind": "prioritized", "bta": 99}}]}
    told = explain(Deep, body)
    assert told is not None
    assert told[0] == "there is no field parts.1.a.bta"
    assert told[1].startswith("did you mean beta? The fields are beta, ")
    assert explain(Deep, {"parts": [{}] * 3}) == ("parts is [{}, {}, {}]", "use at most 2 items")
    assert explain(Deep, {}) == ("parts is missing", "add it")
    assert explain(Deep, []) == ("the body is []", "use a JSON object")
