"""What every operation of the OpenAPI document is made of."""

from __future__ import annotations

from typing import Any

REF = "#/components/schemas/{model}"


def ref(model: str) -> dict[str, str]:
    """The schema of a model."""
    return {"$ref": REF.format(model=model)}


def json(description: str, model: str) -> dict[str, Any]:
    """An answer with a model's JSON."""
    return {"description": description, "content": {"application/json": {"schema": ref(model)}}}


def error(description: str) -> dict[str, Any]:
    """An answer of 400 or above."""
    return json(description, "ErrorBody")


def unauthorized() -> dict[str, Any]:
    """The answer to whoever has no valid key."""
    header = {"description": "`Bearer`", "schema": {"type": "string"}}
    return {**error("No valid API key (`unauthorized`)."), "headers": {"WWW-Authenticate": header}}


def unavailable(description: str) -> dict[str, Any]:
    """The answer while a server is away."""
    header = {"description": "Seconds until it is worth another try.", "schema": {"type": "integer"}}
    return {**error(description), "headers": {"Retry-After": header}}
