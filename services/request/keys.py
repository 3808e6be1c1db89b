"""`/api/v1/key`: whose key it is, and what it opens. Of other keys nothing is told."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from breakwater.contracts.api import KeyDetails
from services.request.auth import holder_of


async def show_key(request: Request) -> Response:
    """GET: 200 with the key that asks."""
    key = holder_of(request)
    shown = KeyDetails(id=key.id, name=key.name, scopes=key.scopes, created_at=key.created_at)
    return Response(shown.json_bytes(), media_type="application/json")
