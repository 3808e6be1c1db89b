"""The OpenAPI document of the declared operations, and the page that shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, partial
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment
from markdown_it import MarkdownIt
from markupsafe import Markup
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.dialects.api import is_messages
from breakwater.dialects.contract.anthropic import AnthropicErrorBody
from breakwater.dialects.contract.openai import OpenAIErrorBody
from breakwater.identity.auth import is_guarded
from breakwater.identity.contract import KEY_SCOPES
from breakwater.identity.operations import Operation
from breakwater.identity.rules.callers import is_openai, scopes_for
from breakwater.jobs.contract.execution import Attempt, ExecutionSummary, Progress
from breakwater.kernel.http.contract import ErrorBody, EventGap
from breakwater.kernel.types import Event, Message
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.replay.contract import ConfigPlanLine
from breakwater.services.request.operations import OPERATIONS

TITLE = "Breakwater"
PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "job_id": {
        "description": "The id of the job or of its execution. Percent-encoded, slashes too: `a%2Fprogress` is the job "
        "`a/progress`.",
        "schema": {"type": "string", "examples": ["019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"]},
    },
    "execution_id": {
        "description": "The execution's id, or that of its job. Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"]},
    },
    "run_id": {
        "description": "The run's id, as `GET /api/v1/runs` lists it. Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["research-4711"]},
    },
    "plan_id": {
        "description": "The plan's id or key. Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["report-47"]},
    },
    "response_id": {
        "description": "The `id` of a response.",
        "schema": {"type": "string", "examples": ["resp_019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"]},
    },
    "model": {
        "description": "It may hold slashes.",
        "schema": {"type": "string", "examples": ["content-writer/gpt-4.1-mini"]},
    },
    "key": {
        "description": "The key's id, or its name. Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["3f9c01d2a77b", "acme-bot"]},
    },
    "limit_id": {
        "description": "The limit's id; of one in the config, its setting. Slashes in it may be percent-encoded.",
        "schema": {"type": "string", "examples": ["key:acme-bot.usd.month", "agents.writer.budget.daily_usd"]},
    },
    "incident_id": {
        "description": "Or a unique prefix: `inc_` and at least 6 characters.",
        "schema": {"type": "string", "examples": ["inc_3f9a1c07d2e84b56a1c0d375", "inc_3f9a1c07"]},
    },
    "dead_letter_id": {
        "description": "Its sequence in the stream DLQ.",
        "schema": {"type": "integer", "minimum": 1, "examples": [17]},
    },
}
_REF = "#/components/schemas/{model}"

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"

_SECURITY = {
    "type": "http",
    "scheme": "bearer",
    "bearerFormat": "bw_<id>_<secret>",
    "description": (
        "`breakwater keys create NAME --scope SCOPE` makes a key. `submit` is for jobs and their results, `read` for "
        "the state of everything, `operate` for what people do: reset, isolate, raise, acknowledge, resolve, test, "
        "replay. Without `--scope`, a key has `submit`."
    ),
}
_RETRY_HEADERS = {
    "Retry-After": {"description": "Seconds until a retry makes sense.", "schema": {"type": "integer"}},
    "retry-after-ms": {"description": "The same in milliseconds.", "schema": {"type": "integer"}},
    "x-should-retry": {"description": "`false` if SDKs must not retry by themselves.", "schema": {"type": "string"}},
}
_HEADERS = {
    202: {"Location": {"description": "URL of the result.", "schema": {"type": "string"}}},
    401: {"WWW-Authenticate": {"description": "`Bearer`", "schema": {"type": "string"}}},
    403: {"WWW-Authenticate": {"description": "`Bearer` with `insufficient_scope`.", "schema": {"type": "string"}}},
    429: _RETRY_HEADERS,
    503: _RETRY_HEADERS,
}
_OF_STREAMS = (
    Progress,
    Attempt,
    ExecutionSummary,
    BreakerTransition,
    BudgetEvent,
    GuardEvent,
    LimitEvent,
    Alert,
    EventGap,
    ConfigPlanLine,
)
_ERRORS_OF_BODIES = {
    400: "The body is not JSON (`not_json`), not UTF-8 (`not_utf8`), or not what its `Content-Encoding` names "
    "(`not_decompressed`).",
    408: "The body did not arrive in time (`body_timeout`).",
    413: "The body is too large, or is when decompressed (`body_too_large`).",
    415: "Its `Content-Encoding` is none of gzip, zstd and deflate (`unsupported_encoding`).",
    422: "The body is invalid (`invalid_request`).",
}


@cache
def document() -> dict[str, Any]:
    """Returns the whole document, which is built once. Connects to nothing."""
    return _Writer().document()


def documentation() -> list[BaseRoute]:
    """Returns the routes of the document, and of a page that shows it without scripts."""

    def openapi(_: Request) -> Response:
        return JSONResponse(document())

    def page(_: Request) -> Response:
        return HTMLResponse(_page(), headers={"Content-Security-Policy": _PAGE_POLICY})

    return [Route("/openapi.json", openapi), Route("/docs", page)]


@cache
def _page() -> str:
    inline = MarkdownIt("commonmark", {"html": False})

    def words(text: str) -> Markup:
        return Markup(inline.renderInline(text))  # noqa: S704  HTML in it is escaped

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"words": words, "pretty": partial(json.dumps, indent=2, ensure_ascii=False)}
    style = (files("breakwater.kernel.pages") / "page.css").read_text("utf-8")
    template = environment.from_string((files("breakwater.services.request") / "docs.html").read_text("utf-8"))
    return template.render(api=document(), style=Markup(style))  # noqa: S704  ours


class _Writer:
    """Writes the document, and collects the schemas that it refers to."""

    def __init__(self) -> None:
        examples = files("breakwater.services.request") / "examples.yaml"
        self._examples: dict[str, Any] = yaml.safe_load(examples.read_bytes())
        types: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]]
        types = [(repr(kind), mode, TypeAdapter(kind)) for kind, mode in _types()]
        self._schemas, defined = TypeAdapter.json_schemas(types, ref_template=_REF)
        self._defined = defined["$defs"]

    def document(self) -> dict[str, Any]:
        paths: dict[str, dict[str, Any]] = {}
        for operation in OPERATIONS:
            paths.setdefault(operation.path, {})[operation.method.lower()] = self._operation(operation)
        return {
            "openapi": "3.1.0",
            "info": {
                "title": TITLE,
                "version": "1",
                "description": (
                    "Submit jobs for LLM agents, read their results, and manage their breakers, guards, budgets and "
                    "incidents. `breakwater keys create NAME` creates a key."
                ),
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/"}],
            "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in OPERATIONS)],
            "paths": paths,
            "components": {"schemas": self._defined, "securitySchemes": {"api_key": _SECURITY}},
        }

    def _operation(self, operation: Operation) -> dict[str, Any]:
        description = [operation.description]
        errors = dict[int, str]()
        security: list[dict[str, list[str]]] = []
        if operation.query is not None:
            errors[422] = "A parameter is wrong (`invalid_query`)."
        if operation.body is not None:
            of_json = operation.body_type == "application/json"
            errors |= {code: text for code, text in _ERRORS_OF_BODIES.items() if of_json or code not in (400, 422)}
        if operation.method != "GET" and operation.tag not in (
            "jobs",
            "plans",
            "query",
            "openai",
            "anthropic",
            "openid",
        ):
            description.append("The action is recorded under the name of the API key.")
        if is_guarded(operation.path):
            code = "invalid_api_key" if is_openai(operation.path) else "unauthorized"
            code = "authentication_error" if is_messages(operation.path) else code
            errors[401] = f"No valid API key (`{code}`)."
            needed = scopes_for(operation.method, operation.path)
            if needed == KEY_SCOPES:
                description.append("Any valid key will do.")
                security = [{"api_key": []}]
            else:
                named = " or ".join(f"`{scope}`" for scope in needed)
                errors[403] = f"The key does not have the scope {named} (`forbidden`)."
                description.append(f"Needs a key with the scope {named}.")
                security = [{"api_key": [scope]} for scope in needed]  # alternatives: each of them is enough
        errors |= operation.errors
        parameters = self._parameters(operation)
        body = dict[str, Any]()
        if operation.body is not None:
            content = self._content(operation, operation.body, "validation", "request")
            body["requestBody"] = {"required": True, "content": {operation.body_type: content}}
        return {
            "tags": [operation.tag],
            "operationId": operation.id,
            "summary": operation.summary,
            **({"description": " ".join(filter(None, description))} if any(description) else {}),
            "security": security,
            **({"parameters": parameters} if parameters else {}),
            **body,
            "responses": self._responses(operation, errors),
        }

    def _parameters(self, operation: Operation) -> list[dict[str, Any]]:
        named = re.findall(r"{(\w+)}", operation.path)
        listed = [{"name": name, "in": "path", "required": True, **PATH_PARAMETERS[name]} for name in named]
        if operation.query is not None:
            for name, schema in operation.query.model_json_schema(ref_template=_REF)["properties"].items():
                described = {"description": schema["description"], "schema": _parameter_schema(schema)}
                form = {"explode": False} if schema.get("type") == "array" else {}
                listed.append({"name": name, "in": "query", **described, **form})
        for name, description in operation.headers.items():
            listed.append({"name": name, "in": "header", "description": description, "schema": {"type": "string"}})
        return listed

    def _responses(self, operation: Operation, errors: dict[int, str]) -> dict[str, Any]:
        responses: dict[str, Any] = {}
        for status, (description, kind) in operation.results.items():
            content = {operation.content_type: self._content(operation, kind, "serialization", status)}
            responses[str(status)] = {"description": description, "content": content}
        if operation.etag:
            etag = {"ETag": {"description": "A digest of the body.", "schema": {"type": "string"}}}
            responses["200"]["headers"] = etag
            responses["304"] = {
                "description": "`If-None-Match` names the body, which has not changed.",
                "headers": etag,
            }
        if operation.method == "POST" and "202" in responses:
            responses["202"]["headers"] = _HEADERS[202]
        error = {"application/json": {"schema": self._schemas[repr(_error_body(operation)), "serialization"]}}
        if is_openai(operation.path):
            errors.pop(422, None)  # is 400 there
        for status, description in sorted(errors.items()):
            headers = {"headers": _HEADERS[status]} if status in _HEADERS else {}
            responses[str(status)] = {"description": description, "content": error, **headers}
        return {**responses, "default": {"description": "Any other error.", "content": error}}

    def _content(self, operation: Operation, kind: Any, mode: JsonSchemaMode, part: str | int) -> dict[str, Any]:
        examples = self._examples.get(operation.id, {}).get(part, {})
        examples_field = {"examples": {name: {"value": value} for name, value in examples.items()}} if examples else {}
        return {"schema": self._schemas[repr(kind), mode], **examples_field}


def _error_body(operation: Operation) -> type[Event | Message]:
    if is_messages(operation.path):
        return AnthropicErrorBody
    return OpenAIErrorBody if is_openai(operation.path) else ErrorBody


def _types() -> Iterator[tuple[Any, JsonSchemaMode]]:
    """Yields the types of all bodies, and those that descriptions refer to."""
    for kind in (ErrorBody, *_OF_STREAMS):
        yield kind, "serialization"
    for operation in OPERATIONS:
        if operation.body is not None:
            yield operation.body, "validation"
        yield _error_body(operation), "serialization"
        for _, kind in operation.results.values():
            yield kind, "serialization"


def _parameter_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a query parameter. Unlike the field, a parameter can't be null; it is left out instead."""
    if {"type": "null"} in schema.get("anyOf", ()):
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return {name: value for name, value in schema.items() if name not in ("title", "description")}
