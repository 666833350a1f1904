"""The OpenAPI document describes everything, its examples work, and it states the permissions."""

from __future__ import annotations

import base64
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from expstore.api import Settings, create_app, examples
from expstore.api.bodies import ARROW
from tests.support.asgi import api_client

pytestmark = pytest.mark.index

Found = Iterator[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = create_app(Settings(path=tmp_path_factory.mktemp("runs"))).openapi()
    return found


def routes_of(document: dict[str, Any]) -> Found:
    for path, acts in document["paths"].items():
        for method, act in acts.items():
            yield f"{method.upper()} {path}", act


def properties_of(node: Any, where: str) -> Found:
    """Yield every property of every schema below a node, however deep."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "properties" and isinstance(value, dict):
                yield from ((f"{where}.{key}", found) for key, found in value.items())
            if name not in ("example", "examples"):
                yield from properties_of(value, f"{where}.{name}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from properties_of(value, f"{where}.{number}")


def bodies_of(document: dict[str, Any]) -> Found:
    """Yield the content of every body, in and out."""
    for name, act in routes_of(document):
        for status, answer in {"body": act.get("requestBody", {}), **act["responses"]}.items():
            for kind, content in answer.get("content", {}).items():
                yield f"{name} {status} {kind}", content


def has_example(document: dict[str, Any], content: dict[str, Any]) -> bool:
    schema = content.get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return bool("example" in content or content.get("examples") or schema.get("examples"))


def find_missing(document: dict[str, Any]) -> list[str]:
    """Return what lacks a summary, a description or an example."""
    missing = []
    for name, act in routes_of(document):
        # FastAPI makes a summary of the function's name for routes that have none.
        derived = act["operationId"].partition("_v1_")[0].replace("_", " ").lower()
        summary = act.get("summary", "")
        if not summary or summary.lower() == derived or derived.startswith(f"{summary.lower()} "):
            missing.append(f"{name}: summary")
        if not act.get("description"):
            missing.append(f"{name}: description")
        for parameter in act.get("parameters", []):
            if not parameter.get("description"):
                missing.append(f"{name}: parameter {parameter['name']}")
        if any(not answer.get("description") for answer in act["responses"].values()):
            missing.append(f"{name}: an answer")
    for name, schema in document["components"]["schemas"].items():
        if not schema.get("description"):
            missing.append(name)
    missing += [name for name, value in properties_of(document, "") if not value.get("description")]
    missing += [name for name, content in bodies_of(document) if not has_example(document, content)]
    return missing


def test_everything_is_described_and_has_examples(document: dict[str, Any]) -> None:
    assert len(list(routes_of(document))) > 25
    assert len(list(properties_of(document, ""))) > 60
    assert len(list(bodies_of(document))) > 60
    assert find_missing(document) == []


def test_missing_descriptions_are_found(document: dict[str, Any]) -> None:
    extend, slices = ("paths", "/v1/stores/{name}/extend", "post"), ("components", "schemas", "Slices")
    for *path, last in (
        (*extend, "summary"),
        (*extend, "description"),
        (*extend, "parameters", 0, "description"),
        (*extend, "requestBody", "content", ARROW, "examples"),
        (*slices, "description"),
        (*slices, "properties", "slice_len", "description"),
    ):
        changed = json.loads(json.dumps(document))
        del functools.reduce(operator.getitem, path, changed)[last]
        assert len(find_missing(changed)) == 1, (*path, last)


def test_every_route_says_which_token_it_needs(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    assert {name: (told["type"], told["scheme"]) for name, told in schemes.items()} == {
        "read": ("http", "bearer"),
        "write": ("http", "bearer"),
    }
    needs = {name: [next(iter(need)) for need in act["security"]] for name, act in routes_of(document)}
    assert needs["GET /healthz"] == []
    store = "/v1/stores/{name}"
    for name in ("GET /metrics", f"POST {store}/sample", f"GET {store}/sql", f"POST {store}/sql"):
        assert needs[name] == ["read", "write"]
    for name in (f"DELETE {store}", f"PUT {store}", f"POST {store}/extend", f"POST {store}/loads"):
        assert needs[name] == ["write"]


@pytest.mark.slow
def test_examples_of_bodies_work(document: dict[str, Any], tmp_path: Path) -> None:
    """In the order in which a client would send them; rows as JSON and as Arrow."""
    with api_client(tmp_path) as client:
        sent = []
        for method, path in (
            ("put", ""), ("post", "/extend"), ("post", "/add"), ("post", "/annotations"),
            ("post", "/priorities"), ("post", "/rows"),
            ("post", "/sample"), ("post", "/sample/stream"), ("post", "/sql"), ("put", "/samplers/{sampler}"),
            ("post", "/episodes/end"), ("post", "/dumps"), ("post", "/loads"),
        ):  # fmt: skip
            act = document["paths"][f"/v1/stores/{{name}}{path}"][method]
            for kind, content in act["requestBody"]["content"].items():
                value = example_of(document, content)
                body = base64.b64decode(value) if kind == ARROW else json.dumps(value)
                url = f"/v1/stores/demo{path}".replace("{sampler}", "pass")
                answer = client.request(method, url, content=body, headers={"Content-Type": kind})
                assert answer.is_success, (path, kind, answer.text)
                sent.append(answer)
        assert [answer.json()["count"] for answer in sent[1:5]] == [2, 2, 1, 1]


def example_of(document: dict[str, Any], content: dict[str, Any]) -> Any:
    if "example" in content:
        return content["example"]
    if "examples" in content:
        return next(iter(content["examples"].values()))["value"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]["examples"][0]


def test_the_code_of_the_arrow_example_makes_such_rows(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(examples.ARROW_CODE, names)
    example = examples.arrow_examples(2)["stream"]
    assert examples.ARROW_CODE in example["description"]
    bodies = [names["body"], base64.b64decode(example["value"])]
    first, second = (pa.ipc.open_stream(body).read_all().to_pydict() for body in bodies)
    assert first == second
    with api_client(tmp_path) as client:
        client.put("/v1/stores/demo", json={"fields": examples.FIELDS}).raise_for_status()
        for body in bodies:
            answer = client.post("/v1/stores/demo/extend", content=body, headers={"Content-Type": ARROW})
            assert answer.json()["count"] == 2, answer.text
