"""Check `where=` conditions in requests: a small part of SQL, with one function, `selection`.

Used by the sampling routes. The library evaluates conditions in the server's own process, so they are
checked against an allow-list: DuckDB parses the text, without executing it, and every node of the parsed tree
must be one that takes time and memory in proportion to the rows it reads.
"""

from __future__ import annotations

from typing import Any

from expstore.api.errors import Refusal
from expstore.samplers.base import Sampler
from expstore.sql.expressions import ConditionLimits, parse_expression
from expstore.sql.selections import NAME

_LENGTH = 1000
#: Maximum nesting of brackets, and of nodes of the tree.
_DEPTH = 50
#: Maximum memory of a condition's query in bytes; it reads batches of rows of 32 MiB.
_MEMORY = 256 << 20
_ARITHMETIC = frozenset({"+", "-", "*", "/", "%"})
_WHOLE = frozenset({"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"})
#: Types whose literals SQL writes as casts of text: DATE '2026-01-31'.
_TIMES = frozenset({"DATE", "TIME", "TIMESTAMP"})
#: Types of nodes whose children may be any expression, and the keys of the children.
_ANY = {
    "COMPARE_EQUAL": ("left", "right"),
    "COMPARE_NOTEQUAL": ("left", "right"),
    "COMPARE_LESSTHAN": ("left", "right"),
    "COMPARE_GREATERTHAN": ("left", "right"),
    "COMPARE_LESSTHANOREQUALTO": ("left", "right"),
    "COMPARE_GREATERTHANOREQUALTO": ("left", "right"),
    "COMPARE_DISTINCT_FROM": ("left", "right"),
    "COMPARE_NOT_DISTINCT_FROM": ("left", "right"),
    "COMPARE_BETWEEN": ("input", "lower", "upper"),
    "CONJUNCTION_AND": ("children",),
    "CONJUNCTION_OR": ("children",),
    "OPERATOR_NOT": ("children",),
    "OPERATOR_IS_NULL": ("children",),
    "OPERATOR_IS_NOT_NULL": ("children",),
    "COLUMN_REF": (),
    "VALUE_CONSTANT": (),
}
_HINT = (
    "compare fields, their elements (x[1]), episode facts and literals: = <> < <= > >= + - * / %, AND, OR, "
    "NOT, IN (literals), BETWEEN, IS NULL, selection('name')"
)


def check_condition(text: str) -> str:
    """Return a condition if it is allowed.

    Raises:
        Refusal: 422: it is too long, nested too deeply, or has a part that is not allowed, which is named.
        QueryError: It is not a single SQL expression.
    """
    if len(text) > _LENGTH:
        raise Refusal(422, f"the condition has more than {_LENGTH} characters", kind="query")
    depth = 0
    for character in text:  # the parser drops redundant brackets, but recurses into them
        depth += (character in "([{") - (character in ")]}")
        if depth > _DEPTH:
            raise _build_depth_refusal()
    waiting = [(parse_expression(text), 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEPTH:
            raise _build_depth_refusal()
        waiting += [(child, depth + 1) for child in _children(node)]
    return text


def limit_condition(sampler: Sampler, seconds: float) -> None:
    """Limit the time and memory of each query with which a sampler evaluates its condition."""
    if sampler.filter is not None:
        sampler.filter.limit(ConditionLimits(seconds=seconds, memory=_MEMORY))


def _children(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the children of a node that must be checked too.

    Raises:
        Refusal: 422: the node is not allowed.
    """
    kind, children = node["type"], node.get("children") or []
    if kind in _ANY:
        found = [node[name] for name in _ANY[kind]]
        return [child for part in found for child in (part if isinstance(part, list) else [part])]
    if kind == "FUNCTION" and node["is_operator"] and node["function_name"] in _ARITHMETIC:
        plain = not (node["schema"] or node["catalog"] or node["filter"] or node["distinct"])
        if plain and len(children) <= 2 and not node["order_bys"]["orders"]:
            return list(children)
    if kind == "FUNCTION" and node["function_name"].lower() == NAME and all(map(_is_literal, children)):
        return []
    if kind == "COMPARE_IN" and all(map(_is_literal, children[1:])):
        return [children[0]]
    if kind == "ARRAY_EXTRACT":
        base, subscript = children
        if base["type"] in ("COLUMN_REF", "ARRAY_EXTRACT") and _is_whole(subscript):
            return [base]
    if _is_literal(node):
        return []
    raise Refusal(422, f"the condition has {_name_of(node)}", kind="query", hint=_HINT)


def _is_literal(node: dict[str, Any]) -> bool:
    if node["type"] == "OPERATOR_CAST":
        return node["cast_type"]["id"] in _TIMES and node["child"]["type"] == "VALUE_CONSTANT"
    return bool(node["type"] == "VALUE_CONSTANT")


def _is_whole(node: dict[str, Any]) -> bool:
    return node["type"] == "VALUE_CONSTANT" and node["value"]["type"]["id"] in _WHOLE


def _name_of(node: dict[str, Any]) -> str:
    """Return a description of a node for messages."""
    kind = node["type"]
    if kind == "FUNCTION":
        name = str(node["function_name"])[:50]
        return f"the operator {name}" if node["is_operator"] else f"the function {name}()"
    meaning = {
        "ARRAY_EXTRACT": "a subscript that is not an integer, or does not follow a field",
        "ARRAY_SLICE": "a slice",
        "CASE_EXPR": "CASE",
        "COMPARE_IN": "IN with values other than literals",
        "LAMBDA": "a lambda",
        "OPERATOR_CAST": "a cast (IS TRUE is one)",
        "SUBQUERY": "a subquery",
        "WINDOW_AGGREGATE": "a window function",
    }.get(kind)
    return f"{meaning}, {kind}" if meaning else str(kind)


def _build_depth_refusal() -> Refusal:
    return Refusal(422, f"the condition is nested more than {_DEPTH} levels deep", kind="query")
