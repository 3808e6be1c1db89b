"""`/api/v1/key`: whose key it is, and what it opens. Of other keys nothing is told."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from breakwater.contracts.types import Event, Identifier, Timestamp
from breakwater.policy.api_keys import Scope
from services.request.auth import holder_of


class ShownKey(Event):
    """The key that a request came with, without what opens the door."""

    id: str = Field(description="Public: names the key in `breakwater keys list` and in logs.")
    name: Identifier = Field(description="Who or what uses the key; what is done with it is on record by this name.")
    scopes: tuple[Scope, ...] = Field(description="What the key may be used for; one at least.")
    created_at: Timestamp


async def show_key(request: Request) -> Response:
    """GET: 200 with the key that asks."""
    key = holder_of(request)
    shown = ShownKey(id=key.id, name=key.name, scopes=key.scopes, created_at=key.created_at)
    return Response(shown.json_bytes(), media_type="application/json")
