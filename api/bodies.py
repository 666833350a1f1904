"""Read and write bodies: Arrow streams or JSON.

Used by the routes. It knows media types, but no stores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from expstore.api.errors import Refusal
from expstore.core.values import to_finite
from expstore.wire.codec import plain_columns

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
#: One JSON document per line, for streams.
NDJSON = "application/x-ndjson"
#: The header with the number of rows in a response.
ROWS = "X-Rows"
_COMPRESSIONS = ("lz4", "zstd")


def content_type(request: Request) -> str:
    """Return the media type of a body of rows.

    Raises:
        Refusal: 415: the body is neither Arrow nor JSON, or is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refusal(415, f"the body is encoded as {encoding!r}", hint="send it without an encoding")
    found = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if found not in (ARROW, JSON):
        raise Refusal(415, f"the body is {found or 'of no type'}", hint=f"send {ARROW} or {JSON}")
    return found


def _parse_accept(request: Request) -> list[tuple[float, str, dict[str, str]]]:
    """Return the accepted types, as quality, type and parameters; without a header every type is accepted."""
    found = []
    for part in (",".join(request.headers.getlist("accept")).strip() or "*/*").split(","):
        kind, *rest = (piece.strip() for piece in part.split(";"))
        params = dict(piece.lower().split("=", 1) for piece in rest if "=" in piece)
        try:
            quality = float(params.pop("q", "1"))
        except ValueError:
            quality = 0.0
        found.append((quality, kind.lower(), params))
    return found


def choose_type(request: Request, offered: tuple[str, ...] = (JSON, ARROW)) -> str:
    """Return the offered type that the client prefers.

    A type that the client names is preferred to one that only matches `*/*`. Without an Accept header the
    first offered type is returned.

    Raises:
        Refusal: 406: the client accepts none of the types.
    """
    wanted = _parse_accept(request)

    def rank(offer: str) -> tuple[float, int, int]:
        """Return the quality and the specificity of the best matching range, and the type's position."""
        ranges = (offer, offer.split("/")[0] + "/*", "*/*")
        for specific, name in zip((2, 1, 0), ranges, strict=True):
            for place, (quality, kind, _) in enumerate(wanted):
                if kind == name:
                    return quality, specific, -place
        return 0.0, 0, 0

    best = max(offered, key=rank)
    if rank(best)[0] > 0:
        return best
    raise Refusal(406, f"the server cannot answer as {request.headers.get('accept')!r}", kind="accept",
                  hint=f"accept {' or '.join(offered)}")  # fmt: skip


def compression_of(request: Request) -> str | None:
    """Return the compression of an Arrow response: `Accept: ...arrow.stream;compression=zstd`, or None.

    Raises:
        Refusal: 406: the compression is unknown.
    """
    for _, kind, params in _parse_accept(request):
        if kind == ARROW and "compression" in params:
            name = params["compression"].strip('"')
            if name == "none":
                return None
            if name not in _COMPRESSIONS:
                raise Refusal(406, f"compression {name!r} is unknown", kind="accept",
                              hint=f"use {' or '.join(_COMPRESSIONS)}")  # fmt: skip
            return name
    return None


async def read_body(request: Request) -> bytearray:
    """Return the whole body as a writable buffer; `expstore.api.gateway` limits its size."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return body


def load_json(body: bytes | bytearray) -> Any:
    """Parse a body as JSON.

    Raises:
        Refusal: 400: the body is not JSON.
    """
    try:
        return json.loads(body) if body else {}
    except (ValueError, RecursionError) as exc:
        raise Refusal(400, f"the body is not JSON: {str(exc)[:200]}") from None


def to_json(batch: Any) -> list[list[Any]]:
    """Return the columns of a record batch as JSON values; NaN and infinities become null."""
    return [_finite(values) for values in plain_columns(batch)]


def rows_to_json(batch: Any, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return rows as JSON values: a list per column, a value per row; facts become `drawn_from`."""
    rows = {"rows": dict(zip(batch.schema.names, to_json(batch), strict=True))}
    return rows if facts is None else rows | {"drawn_from": dict(facts)}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return to_finite(value)
    if isinstance(value, list) or type(value) is tuple:  # pairs of a map
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, (int, str, bool, type(None))) else str(value)


def arrow_answer(data: Any) -> Response:
    """Return a response with an Arrow stream."""
    return Response(memoryview(data), media_type=ARROW)


def json_answer(data: Any) -> Response:
    """Return a response with JSON."""
    return JSONResponse(data)
