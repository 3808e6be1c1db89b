"""The OpenAPI document, as data: the hot path is no FastAPI operation, as that would cost it 50 microseconds more."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from pydantic.json_schema import models_json_schema

from breakwater.contracts.execution import Result
from breakwater.contracts.job import Job
from breakwater.contracts.types import Event, Identifier
from services.request.problems import ErrorBody

VERSION = "3.1.0"
_REF = "#/components/schemas/{model}"
_UUID = "019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"


class AcceptedJob(Event):
    """The job is on the bus and will be decided, whatever crashes."""

    job_id: Identifier
    execution_id: Identifier = Field(description="The same as `job_id`.")
    status: Literal["accepted"] = "accepted"
    duplicate: bool = Field(
        default=False,
        description="Whether a job with this id was queued within the last ten minutes; this one was not queued again.",
    )


class Health(Event):
    """How the process stands."""

    status: Literal["alive", "ready"]


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": VERSION,
        "info": {
            "title": "Breakwater",
            "version": "1",
            "description": "Submit jobs for LLM agents, read their results. `breakwater keys create NAME` makes a key.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": "jobs"}, {"name": "health"}, {"name": "metrics"}],
        "paths": {
            "/api/v1/jobs": {"post": _submit()},
            "/api/v1/jobs/{job_id}": {"get": _show()},
            "/healthz": {"get": _health("Whether the process is alive", "alive", {})},
            "/readyz": {"get": _health("Whether jobs can be accepted", "ready", {"503": _error("NATS is away.")})},
            "/metrics": {"get": _metrics()},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer", "bearerFormat": "bw_<id>_<secret>"}},
        },
    }


def _schemas() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [
            (Job, "validation"),
            (Result, "serialization"),
            (AcceptedJob, "serialization"),
            (Health, "serialization"),
            (ErrorBody, "serialization"),
        ],
        ref_template=_REF,
    )
    return schemas["$defs"]


def _submit() -> dict[str, Any]:
    return {
        "tags": ["jobs"],
        "operationId": "submit_job",
        "summary": "Submit a job",
        "description": (
            "Answers once the job is safe on the bus. `job_id` makes it idempotent: the same id again is the same "
            "execution, answered from the record of the first one, whatever else the second body says, its agent "
            "included."
        ),
        "security": [{"api_key": []}],
        "parameters": [
            {
                "name": "wait_s",
                "in": "query",
                "description": "Wait this many seconds for the result, and answer 200 with it if it comes in time.",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 300},
            },
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The job's id, where the body has none.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 128},
            },
            {
                "name": "traceparent",
                "in": "header",
                "description": "W3C trace context; made where absent.",
                "schema": {"type": "string"},
            },
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _ref("Job"),
                    "examples": {
                        "prompt": {"value": {"agent": "content-writer", "prompt": "Write a haiku about harbours."}},
                        "messages": {
                            "value": {
                                "agent": "content-writer",
                                "job_id": "order-4711",
                                "messages": [{"role": "user", "content": "Write a haiku about harbours."}],
                                "params": {"max_tokens": 60},
                            }
                        },
                    },
                }
            },
        },
        "responses": {
            "200": _json("Decided within `wait_s`: succeeded or not, as `status` says.", "Result"),
            "202": {
                **_json("Accepted.", "AcceptedJob"),
                "headers": {"Location": {"description": "Where the result will be.", "schema": {"type": "string"}}},
            },
            "400": _error("The body is not JSON (`not_json`) or not UTF-8 (`not_utf8`)."),
            "401": _unauthorized(),
            "404": _error("The agent is not configured (`unknown_agent`)."),
            "408": _error("The body did not arrive in time (`body_timeout`)."),
            "409": _error("The job id is that of an execution of another agent (`id_taken`)."),
            "413": _error("The body is too large (`body_too_large`)."),
            "422": _error("The body is not a job (`invalid_job`), or the query is wrong (`invalid_query`)."),
            "503": _unavailable("Nothing was accepted: NATS is away (`unavailable`) or full (`refused`)."),
            "default": _error("Any other error."),
        },
    }


def _show() -> dict[str, Any]:
    return {
        "tags": ["jobs"],
        "operationId": "show_job",
        "summary": "How a job stands",
        "description": "The result for 24 hours; after that the execution's record, where its output is redacted.",
        "security": [{"api_key": []}],
        "parameters": [
            {
                "name": "job_id",
                "in": "path",
                "required": True,
                "description": "Percent-encoded, slashes too.",
                "schema": {"type": "string", "examples": [_UUID]},
            }
        ],
        "responses": {
            "200": _json("Decided.", "Result"),
            "202": _json("Accepted, and not decided yet.", "AcceptedJob"),
            "401": _unauthorized(),
            "404": _error("There is no such job (`unknown_job`)."),
            "503": _unavailable("How it stands can't be known now (`unavailable`)."),
            "default": _error("Any other error."),
        },
    }


def _health(summary: str, status: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["health"],
        "operationId": status,
        "summary": summary,
        "security": [],
        "responses": {"200": _json("It is.", "Health"), **responses},
    }


def _metrics() -> dict[str, Any]:
    return {
        "tags": ["metrics"],
        "operationId": "metrics",
        "summary": "Metrics of this process, for Prometheus",
        "description": "In OpenMetrics' format where the scraper accepts it.",
        "security": [{"api_key": []}],
        "responses": {
            "200": {"description": "All metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            "401": _unauthorized(),
            "default": _error("Any other error."),
        },
    }


def _ref(model: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=model)}


def _json(description: str, model: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(model)}}}


def _error(description: str) -> dict[str, Any]:
    return _json(description, "ErrorBody")


def _unauthorized() -> dict[str, Any]:
    header = {"description": "`Bearer`", "schema": {"type": "string"}}
    return {**_error("No valid API key (`unauthorized`)."), "headers": {"WWW-Authenticate": header}}


def _unavailable(description: str) -> dict[str, Any]:
    header = {"description": "Seconds until it is worth another try.", "schema": {"type": "integer"}}
    return {**_error(description), "headers": {"Retry-After": header}}
