"""Base class of request bodies, and messages for invalid requests.

`RequestModel` is the base of all bodies. Messages name the field, what was found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from expstore.core.nearest import suggest

_Item = TypeVar("_Item")
#: A long list in a body. Its first invalid item is reported, because errors take much more memory than items.
Items = Annotated[list[_Item], FailFast(), Field(max_length=1_000_000)]
_FOUND_CHARACTERS = 80
#: Allowed values by the type of pydantic's error; names in braces are details of the error.
_POSSIBLE = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a JSON object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "a smaller integer",
    "int_type": "an integer",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a JSON object",
    "model_type": "a JSON object",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a string",
    "string_unicode": "a string of Unicode characters",
    "too_long": "at most {max_length} items",
    "union_tag_invalid": "{expected_tags}",
}


class RequestModel(BaseModel):
    """The body of a request, or a part of it: unknown fields are rejected, and the nearest field is named."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, given: Any) -> Any:
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            facts = {"name": str(unknown[0])[:_FOUND_CHARACTERS], "known": list(cls.model_fields)}
            raise PydanticCustomError("unknown_field", "unknown field {name}", facts)
        return given

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, given: Any) -> Any:
        # Pydantic takes true for 1; its strict mode would also refuse "3" and 3.0.
        for name, value in given.items() if isinstance(given, dict) else ():
            kind = type(value)
            if kind is list and bool in set(map(type, value)):
                place, value = next(
                    (f"{name}.{at}", one) for at, one in enumerate(value) if type(one) is bool
                )
            elif kind is bool:
                place = name
            else:
                continue
            annotation: Any = cls.model_fields[name].annotation if name in cls.model_fields else None
            wanted = _types_in(annotation)
            if wanted & {int, float} and bool not in wanted:
                facts = {"name": place, "found": json.dumps(value), "float": float in wanted}
                raise PydanticCustomError("boolean_number", "{name} is {found}", facts)
        return given


@cache
def _types_in(annotation: Any) -> set[Any]:
    """Return the types that an annotation such as `list[int] | None` is made of."""
    parts = get_args(annotation)
    return set().union(*map(_types_in, parts)) if parts else {annotation}


def explain_request(
    errors: Sequence[Mapping[str, Any]], body: Any, parameters: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Return the message and the hint for a request that a model rejects.

    Args:
        errors: Pydantic's errors.
        body: The body as JSON, or None.
        parameters: Descriptions of the query parameters by their names; None: the route has none.
    """
    places = [_place_of(error, body) for error in errors]
    deepest = max(places, key=len)  # of a union, the member that matches best
    first, *others = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    kind, facts, name = first["type"], first.get("ctx", {}), ".".join(deepest)
    if kind == "json_invalid":
        return f"the body is not JSON: {facts.get('error', 'it cannot be read')}", "send one JSON object"
    if kind == "missing":
        if first["loc"][0] == "query" and (what := (parameters or {}).get(name)):
            hint = f"add ?{name}=VALUE: {what[0].lower()}{what[1:].rstrip('.')}"
            return f"the query parameter {name} is missing", hint
        return (f"{name} is missing", "add it") if name else ("the request has no body", "send a JSON object")
    if kind == "union_tag_not_found":
        return f"{name} has no kind", 'add "kind", such as "uniform"'
    if kind == "unknown_field":
        path = ".".join((*deepest, facts["name"]))
        return f"there is no field {path}", suggest(facts["name"], facts["known"], "the fields are")
    if kind == "boolean_number":
        path = ".".join((*deepest, facts["name"]))
        return f"{path} is {facts['found']}", "use a number" if facts["float"] else "use an integer"
    if kind == "union_tag_invalid":
        name, first = f"{name}.kind", {**first, "input": facts["tag"]}
    possible = dict.fromkeys(_possible(error) for error in (first, *others))
    return f"{name or 'the body'} is {_show(first.get('input'))}", f"use {' or '.join(possible)}"


def _place_of(error: Mapping[str, Any], body: Any) -> tuple[str, ...]:
    """Return the path of a field as the client wrote it, without the names of members of a union."""
    where, *parts = error["loc"]
    if where != "body":
        return tuple(map(str, parts))
    place: list[str] = []
    for number, part in enumerate(parts):
        inside = isinstance(body, dict) and part in body
        if inside or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            body = body[part]
        elif error["type"] != "missing" or number < len(parts) - 1:
            continue
        place.append(str(part))
    return tuple(place)


def _possible(error: Mapping[str, Any]) -> str:
    text = _POSSIBLE.get(error["type"])
    return (
        "another value, see /docs"
        if text is None
        else text.format(**{name: _plain(fact) for name, fact in error.get("ctx", {}).items()})
    )


def _plain(fact: Any) -> Any:
    return f"{fact:g}" if isinstance(fact, float) else fact


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _FOUND_CHARACTERS else f"{text[: _FOUND_CHARACTERS - 3]}..."
