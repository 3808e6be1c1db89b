"""The OpenAPI document, as data: the hot path is no FastAPI operation, as that would cost it 50 microseconds more."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from breakwater.contracts.api import AcceptedJob, ErrorBody, ServiceStatus
from breakwater.contracts.execution import Result
from breakwater.contracts.job import Job
from services.request import openapi_alerts as alerts
from services.request import openapi_budgets as budgets
from services.request import openapi_dead_letters as dead_letters
from services.request import openapi_governance as governance
from services.request import openapi_keys as keys
from services.request import openapi_parts as parts
from services.request import openapi_progress as progress
from services.request import openapi_queues as queues

VERSION = "3.1.0"
_UUID = "019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"


def document() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": VERSION,
        "info": {
            "title": "Breakwater",
            "version": "1",
            "description": (
                "Submit jobs for LLM agents, read their results, look after their breakers, guards, budgets and "
                "incidents. "
                "`breakwater keys create NAME` makes a key."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "jobs"},
            *governance.TAGS,
            *budgets.TAGS,
            *alerts.TAGS,
            *dead_letters.TAGS,
            *queues.TAGS,
            *keys.TAGS,
            {"name": "health"},
            {"name": "metrics"},
        ],
        "paths": keys.guarded(_paths()),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"api_key": keys.SCHEME},
        },
    }


def _paths() -> dict[str, Any]:
    return {
        "/api/v1/jobs": {"post": _submit()},
        "/api/v1/jobs/{job_id}": {"get": _show()},
        **progress.paths(),
        **governance.paths(),
        **budgets.paths(),
        **alerts.paths(),
        **dead_letters.paths(),
        **queues.paths(),
        **keys.paths(),
        "/healthz": {"get": _health("Whether the process is alive", "alive", {})},
        "/readyz": {"get": _health("Whether jobs can be accepted", "ready", {"503": parts.error("NATS is away.")})},
        "/metrics": {"get": _metrics()},
    }


def _schemas() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [
            (Job, "validation"),
            (Result, "serialization"),
            (AcceptedJob, "serialization"),
            (ServiceStatus, "serialization"),
            (ErrorBody, "serialization"),
            *progress.MODELS,
            *governance.MODELS,
            *budgets.MODELS,
            *alerts.MODELS,
            *dead_letters.MODELS,
            *queues.MODELS,
            *keys.MODELS,
        ],
        ref_template=parts.REF,
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
                    "schema": parts.ref("Job"),
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
            "200": parts.json("Decided within `wait_s`: succeeded or not, as `status` says.", "Result"),
            "202": {
                **parts.json("Accepted.", "AcceptedJob"),
                "headers": {"Location": {"description": "Where the result will be.", "schema": {"type": "string"}}},
            },
            "400": parts.error("The body is not JSON (`not_json`) or not UTF-8 (`not_utf8`)."),
            "401": parts.unauthorized(),
            "404": parts.error("The agent is not configured (`unknown_agent`)."),
            "408": parts.error("The body did not arrive in time (`body_timeout`)."),
            "409": parts.error("The job id is that of an execution of another agent (`id_taken`)."),
            "413": parts.error("The body is too large (`body_too_large`)."),
            "422": parts.error("The body is not a job (`invalid_job`), or the query is wrong (`invalid_query`)."),
            "503": parts.unavailable(
                "Nothing was accepted: NATS is away (`unavailable`) or full (`refused`); or no model of the agent may "
                "be called now, and it has `refuse_when_open` (`agent_unavailable`; no Retry-After where all of them "
                "wait for a person). A job that was accepted before is never refused so, nor is a dry run."
            ),
            "default": parts.error("Any other error."),
        },
    }


def _show() -> dict[str, Any]:
    return {
        "tags": ["jobs"],
        "operationId": "show_job",
        "summary": "How a job stands",
        "description": "The result for 24 hours; after that the execution's record, where its output is redacted.",
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
            "200": parts.json("Decided.", "Result"),
            "202": parts.json("Accepted, and not decided yet.", "AcceptedJob"),
            "401": parts.unauthorized(),
            "404": parts.error("There is no such job (`unknown_job`)."),
            "503": parts.unavailable("How it stands can't be known now (`unavailable`)."),
            "default": parts.error("Any other error."),
        },
    }


def _health(summary: str, status: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["health"],
        "operationId": status,
        "summary": summary,
        "security": [],
        "responses": {"200": parts.json("It is.", "ServiceStatus"), **responses},
    }


def _metrics() -> dict[str, Any]:
    return {
        "tags": ["metrics"],
        "operationId": "metrics",
        "summary": "Metrics of this process, for Prometheus",
        "description": "In OpenMetrics' format where the scraper accepts it.",
        "responses": {
            "200": {"description": "All metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            "401": parts.unauthorized(),
            "default": parts.error("Any other error."),
        },
    }
