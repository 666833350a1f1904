"""Whether the server lives and is ready.

Used by orchestrators.
"""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter, Request

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> dict[str, object]:
    """Say that the stores can be asked; a single store is opened for it."""
    stores = request.app.state.stores
    if stores.single:
        name = stores.names()[0]
        served = await anyio.to_thread.run_sync(lambda: stores.served(name))
        return {"status": "ok", "stores": {name: len(served.rb)}}
    return {"status": "ok", "stores": {served.name: len(served.rb) for served in stores.open_now()}}
