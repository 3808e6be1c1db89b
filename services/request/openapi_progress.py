"""What the OpenAPI document says of following a job."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from breakwater.contracts.execution import Progress
from services.request import openapi_parts as parts

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [(Progress, "serialization")]

_ID = "019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37"
_STREAM = f"""\
: progress of job {_ID}

event: progress
data: {{"execution_id":"{_ID}","agent":"content-writer","state":"queued","at":"2026-11-21T10:00:00.000Z"}}
id: 1

event: progress
data: {{"execution_id":"{_ID}","agent":"content-writer","state":"in_progress","event":"agent.attempt.finish",\
"at":"2026-11-21T10:00:01.250Z","attempt":1,"model":"gpt-4.1-mini","duration_ms":1200,"success":true}}
id: 2

event: decided
data: {{"execution_id":"{_ID}","status":"succeeded","reason":null}}
id: 3

"""


def paths() -> dict[str, Any]:
    """The operations, by path."""
    return {"/api/v1/jobs/{job_id}/progress": {"get": _follow()}}


def _follow() -> dict[str, Any]:
    stream = {
        "schema": {"type": "string"},
        "examples": {"from queued to succeeded": {"value": _STREAM}},
    }
    return {
        "tags": ["jobs"],
        "operationId": "follow_job",
        "summary": "Follow a job live",
        "description": (
            "Server-sent events. Each `progress` has a `Progress` as its data; first come those that are known "
            "already: `queued`, or the attempts that are recorded, and where the job is now. The last event is "
            "`decided`, with `execution_id`, `status` and `reason`, and the stream ends. Neither outputs nor prompts "
            "are in it. A stream that ends without `decided` was cut off: connect again. Each stream begins anew; "
            "`Last-Event-ID` changes nothing. Comments keep a silent stream open."
        ),
        "parameters": [
            {
                "name": "job_id",
                "in": "path",
                "required": True,
                "description": "Percent-encoded, slashes too: `a%2Fprogress` is the job `a/progress`.",
                "schema": {"type": "string", "examples": [_ID]},
            }
        ],
        "responses": {
            "200": {"description": "The stream.", "content": {"text/event-stream": stream}},
            "401": parts.unauthorized(),
            "404": parts.error("There is no such job (`unknown_job`)."),
            "503": parts.unavailable(
                "How it stands can't be known now (`unavailable`), or this process has 200 streams open, which is the "
                "most (`too_many_streams`)."
            ),
            "default": parts.error("Any other error."),
        },
    }
