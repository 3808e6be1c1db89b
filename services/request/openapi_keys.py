"""What the OpenAPI document says of API keys: of the one that asks, and of which scope every operation needs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from breakwater.contracts.api import KEY_SCOPES, KeyDetails
from breakwater.policy.api_keys import scopes_for
from services.request import openapi_parts as parts
from services.request.auth import is_guarded

TAGS = [{"name": "keys"}]

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [(KeyDetails, "serialization")]

SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "bearerFormat": "bw_<id>_<secret>",
    "description": (
        "`breakwater keys create NAME --scope SCOPE` makes a key. `submit` is for jobs and their answers, `read` for "
        "how everything stands, `operate` for what people do by hand: reset, isolate, raise, acknowledge, resolve, "
        "test, replay. A key without `--scope` has all three."
    ),
}

_KEY = {
    "id": "3f9c01d2a77b",
    "name": "dashboard",
    "scopes": ["read"],
    "created_at": "2026-11-21T10:00:00.000Z",
}


def paths() -> dict[str, Any]:
    """The operations, by path."""
    shown = parts.with_examples(parts.json("The key that asks.", "KeyDetails"), {"reads only": _KEY})
    return {
        "/api/v1/key": {
            "get": {
                "tags": ["keys"],
                "operationId": "show_key",
                "summary": "Whose key this is, and what it opens",
                "description": "For whoever signs people in by their key.",
                "responses": {"200": shown, "401": parts.unauthorized(), "default": parts.error("Any other error.")},
            }
        }
    }


def guarded(paths: dict[str, Any]) -> dict[str, Any]:
    """The same operations with what the door wants of their keys, by the rule that the door goes by."""
    return {
        path: {
            method: _with_scopes(operation, method.upper(), path) if is_guarded(path) else operation
            for method, operation in operations.items()
        }
        for path, operations in paths.items()
    }


def _with_scopes(operation: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    needed = scopes_for(method, path)
    if needed == KEY_SCOPES:
        told = {"description": f"{operation['description']} Any valid key will do.", "security": [{"api_key": []}]}
        return operation | told
    named = " or ".join(f"`{scope}`" for scope in needed)
    refused = parts.error(f"The key has not the scope {named} (`forbidden`).")
    header = {"description": "`Bearer` with `insufficient_scope`.", "schema": {"type": "string"}}
    responses = operation["responses"] | {"403": {**refused, "headers": {"WWW-Authenticate": header}}}
    return operation | {
        "description": f"{operation['description']} Needs a key with the scope {named}.",
        # A list of alternatives: each of them is enough.
        "security": [{"api_key": [scope]} for scope in needed],
        "responses": dict(sorted(responses.items())),
    }
