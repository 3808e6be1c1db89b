"""Checks that a stored message is the record that its subject names, and the first on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import orjson
import pydantic_core
import structlog
from pydantic import ValidationError

from breakwater.jobs.contract.execution import Attempt, Execution, Result
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Header, Stream

_FIRST = Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value

RecordT = TypeVar("RecordT", Attempt, Execution)


def read_record(message: Delivery | StoredMessage, model: type[RecordT]) -> RecordT | None:
    """The attempt or execution that a message of EVENTS records.

    Returns:
        None, and a warning in the log, where the message can't be read, or does not count (`problem_of`).
    """
    place = {"subject": message.subject, "sequence": message.sequence}
    try:
        record = model.model_validate_json(message.data)
    except ValidationError as error:
        structlog.get_logger().warning("record_unreadable", **place, model=model.__name__, problems=error.error_count())
        return None
    if (problem := problem_of(record, message.subject, message.headers)) is not None:
        structlog.get_logger().warning("record_ignored", **place, problem=problem)
        return None
    return record


def problem_of(record: Attempt | Execution, subject: str, headers: Mapping[str, str]) -> str | None:
    """The reason why a record does not count; None where it does.

    It has to be on its own subject, and the only one there. Its writer has the server refuse a second message on the
    subject (ADR 0001), and the server stores that condition with the message: one that bears it was the first.
    """
    if isinstance(record, Attempt):
        own_subject = subjects.attempt(record.agent, record.execution_id, record.number)
        if record.attempt_id != f"{record.execution_id}:{record.number}":
            return f"its attempt_id does not belong to attempt {record.number} of its execution"
    else:
        own_subject = subjects.execution(record.agent, record.execution_id)
    if subject != own_subject:
        return f"it belongs on {own_subject}"
    if headers.get(_FIRST) != "0":
        return "it was published without requiring to be the first message on its subject"
    return None


async def stored_result(lookup: Lookup, execution_id: str, of_agent: str | None = "*") -> Result | None:
    """The result of a job that is decided, or its record where the result has expired. Raises as `Lookup.last` does.

    `of_agent` is the agent whose record is looked for, `*` for any; None for results alone.
    """
    result = await lookup.last(Stream.RESULTS, subjects.result(execution_id))
    if result is not None and is_result_of(result.data, execution_id):
        return Result.model_validate_json(result.data)
    if of_agent is None:
        return None
    agent = of_agent if of_agent == "*" else subjects.encode_token(of_agent)
    record = await lookup.last(Stream.EVENTS, f"bw.executions.{agent}.{subjects.encode_token(execution_id)}")
    execution = None if record is None else read_record(record, Execution)
    return None if execution is None else Result(**vars(execution))


def is_result_of(data: bytes, job_id: str) -> bool:
    """Returns True if a message on the subject of a job's result is its result; else logs a warning."""
    if data.startswith(b'{"execution_id":%b' % orjson.dumps(job_id)):  # as the worker writes it
        return True
    try:
        result = pydantic_core.from_json(data)
    except ValueError:
        result = None
    if isinstance(result, dict) and result.get("execution_id") == job_id:
        return True
    structlog.get_logger().warning("result_ignored", job_id=job_id, problem="it belongs to another execution")
    return False
