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


def with_examples(answer: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    """An answer with JSON as it may look, by name."""
    content = answer["content"]["application/json"]
    told = {name: {"value": value} for name, value in examples.items()}
    return {**answer, "content": {"application/json": {**content, "examples": told}}}


def parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter of the URL, which may be left out."""
    return {"name": name, "in": "query", "description": description, "schema": schema}


def read(
    tag: str,
    operation: str,
    summary: str,
    description: str,
    answer: dict[str, Any],
    responses: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An operation that only looks. `responses`: what it may answer besides."""
    answers = {
        "200": answer,
        "401": unauthorized(),
        "503": unavailable("Redis is away (`unavailable`)."),
        "default": error("Any other error."),
    }
    return {
        "tags": [tag],
        "operationId": operation,
        "summary": summary,
        "description": description,
        "responses": dict(sorted((answers | (responses or {})).items())),
    }


def act(
    tag: str,
    operation: str,
    summary: str,
    description: str,
    schema: dict[str, str],
    examples: dict[str, Any],
    responses: dict[str, Any],
) -> dict[str, Any]:
    """An operation by which a person changes something. `responses`: what is its own."""
    content = {"schema": schema, "examples": {name: {"value": value} for name, value in examples.items()}}
    answers = {
        "400": error("The body is not JSON (`not_json`) or not UTF-8 (`not_utf8`)."),
        "401": unauthorized(),
        "408": error("The body did not arrive in time (`body_timeout`)."),
        "413": error("The body is too large (`body_too_large`)."),
        "422": error("The body does not have this form (`invalid_request`)."),
        "default": error("Any other error."),
    }
    return {
        "tags": [tag],
        "operationId": operation,
        "summary": summary,
        "description": f"{description} Who did it is told by the name of the API key.",
        "requestBody": {"required": True, "content": {"application/json": content}},
        "responses": dict(sorted((answers | responses).items())),
    }
