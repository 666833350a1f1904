"""Conditions of strangers: what `where=` may say, a small part of SQL without functions.

Used by the sampling routes. The library evaluates conditions in the server's own process, so what cannot be
bounded in time and space must not get there: no functions, casts, subqueries, or patterns.
"""

from __future__ import annotations

import re

from expstore.api.errors import Refusal

__all__ = ["check_condition"]

_LENGTH = 1000
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)
    | (?P<text>'(?:[^']|'')*')
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*|"(?:[^"]|"")+")
    | (?P<sign><=|>=|<>|!=|[=<>+\-*/%(),.\[\]])
    )""",
    re.VERBOSE,
)
#: After these a bracket is no function's.
_BEFORE_BRACKET = frozenset({"and", "or", "not", "in", "between"})
_HINT = (
    "compare fields, episode facts and numbers: = <> < <= > >= + - * / %, AND, OR, NOT, IN, BETWEEN, IS NULL"
)


def check_condition(text: str) -> str:
    """Return a condition that may be evaluated.

    Raises:
        Refusal: 422: it is too long, or holds what it may not.
    """
    if len(text) > _LENGTH:
        raise Refusal(422, f"the condition has more than {_LENGTH} characters", kind="query")
    at, before, depth = 0, "", 0
    end = len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            raise Refusal(
                422, f"the condition cannot hold {text[at:].strip()[:1]!r}", kind="query", hint=_HINT
            )
        token = found[found.lastgroup or 0]
        if token == "(" and (before.endswith('"') or _is_name(before)):
            raise Refusal(422, f"the condition calls {before[:50]!r}", kind="query", hint=_HINT)
        depth += {"(": 1, ")": -1}.get(token, 0)
        if depth > 50:
            raise Refusal(422, "the condition is nested too deeply", kind="query")
        before, at = token, found.end()
    if not before:
        raise Refusal(422, "the condition is empty", kind="query", hint=_HINT)
    return text


def _is_name(token: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", token)) and token.lower() not in _BEFORE_BRACKET
