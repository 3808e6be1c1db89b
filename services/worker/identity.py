"""Who asks, and for which execution: also of a job that can't be read otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue
from pydantic_core import from_json

from breakwater.bus.delivery import Delivery
from breakwater.bus.parking import parked_execution
from breakwater.contracts import subjects
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Header
from breakwater.contracts.types import is_identifier


def execution_id_of(delivery: Delivery, job: Job | None) -> str:
    """The job's id: its own, else that of its message, else made from where it is stored, the same every time."""
    if job is not None and job.job_id is not None:
        return job.job_id
    if job is None and (own := _field(delivery.data, "job_id")) is not None:
        return own
    if (parked := parked_execution(delivery.headers)) is not None:
        return parked
    header = delivery.headers.get(Header.MSG_ID.value, "")
    made = f"job-{delivery.sequence}-{int(delivery.published_at.timestamp())}"
    return header if is_identifier(header) else made


def reply_to_of(delivery: Delivery, job: Job | None) -> str | None:
    """Where the answer goes, also that to a job which is otherwise not valid."""
    if job is not None:
        return job.reply_to
    subject = _field(delivery.data, "reply_to")
    return subject if subject is not None and subjects.is_reply_subject(subject) else None


def _field(data: bytes, name: str) -> str | None:
    """A text field of a job that is otherwise not valid."""
    body = parsed_json(data)
    value = body.get(name) if isinstance(body, Mapping) else None
    return value if isinstance(value, str) and is_identifier(value) else None


def parsed_json(data: bytes) -> JsonValue:
    """The body as JSON; None where it is none."""
    try:
        return from_json(data)
    except ValueError:
        return None
