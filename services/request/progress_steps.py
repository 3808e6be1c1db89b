"""The steps of a job as its readers are told them: from what is recorded, each once, as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import orjson
import structlog
from pydantic import ValidationError

from breakwater.contracts.execution import Attempt, Progress
from breakwater.contracts.types import Event, Timestamp
from breakwater.state.accepted import Standing

ENDED = frozenset({"succeeded", "dead_lettered"})
_STARTS = "agent.attempt.start"
_ENDS = frozenset({"agent.attempt.finish", "agent.attempt.error"})


class _Call(Event):
    number: int
    model: str
    started_at: Timestamp


class _Checkpoint(Event):
    """What of a worker's checkpoint says how far a job is."""

    dispatched_at: Timestamp
    resume_at: Timestamp | None = None
    in_flight: _Call | None = None


class Told:
    """What a reader was told: what is recorded and what is heard overlap."""

    def __init__(self) -> None:
        self.complete_to = 0
        """The end of each attempt up to this number was told."""
        self._steps: set[tuple[str, int]] = set()
        self._states: set[str] = set()

    def news(self, step: Progress, *, while_looking: bool = False) -> bool:
        """Whether to tell a step; it is then told.

        Args:
            step: that was heard or found.
            while_looking: it was heard while it was looked up what is recorded, and may be older than that.
        """
        if step.state == "queued" and self._states:
            return False
        if step.state == "dispatched" and while_looking and self._states - {"queued"}:
            return False
        if step.state in ENDED and step.state in self._states:
            return False
        if step.event is not None and step.attempt is not None and not self._first(step.event, step.attempt):
            return False
        self._states.add(step.state)
        return True

    def _first(self, event: str, attempt: int) -> bool:
        ends = event in _ENDS
        if event == _STARTS and ("end", attempt) in self._steps:
            return False
        key = ("end" if ends else event, attempt)
        if key in self._steps:
            return False
        self._steps.add(key)
        while ("end", self.complete_to + 1) in self._steps:
            self.complete_to += 1
        return True


def read(message: bytes) -> Progress | None:
    """A step that was heard; None, and a line in the log, where it is none."""
    try:
        return Progress.model_validate_json(message)
    except ValidationError:
        structlog.get_logger().warning("progress_unreadable", size=len(message))
        return None


def of_attempt(attempt: Attempt) -> Progress:
    """The step that a recorded attempt was."""
    success, error = attempt.outcome == "success", attempt.error
    return Progress(
        execution_id=attempt.execution_id,
        agent=attempt.agent,
        state="in_progress",
        event="agent.attempt.finish" if success else "agent.attempt.error",
        at=attempt.completed_at,
        attempt=attempt.number,
        model=attempt.model,
        duration_ms=attempt.duration_ms,
        input_tokens=attempt.input_tokens,
        output_tokens=attempt.output_tokens,
        success=success,
        error_type=error and error.class_.removesuffix("Error"),
        error_class=error and error.class_,
        error_message=error and error.message,
        status_code=error and error.status_code,
        retryable=error and error.retryable,
    )


def of_standing(execution_id: str, standing: Standing, attempts: Iterable[Attempt], now: datetime) -> list[Progress]:
    """Where a job is that is not decided, beyond its recorded attempts.

    Nothing for one that was published to NATS and is in its first call: who its agent is stands nowhere yet.
    """
    last = max(attempts, key=lambda attempt: attempt.number, default=None)
    agent = standing.agent if last is None else last.agent
    if agent is None:
        return []

    def step(state: str, at: datetime, **more: object) -> Progress:
        return Progress.model_validate({"execution_id": execution_id, "agent": agent, "state": state, "at": at, **more})

    if not standing.taken:
        return [] if last is not None else [step("queued", standing.accepted_at or now)]
    checkpoint = _read_checkpoint(standing.checkpoint)
    if checkpoint is None:
        return [] if last is not None else [step("dispatched", standing.accepted_at or now)]
    steps = [] if last is not None else [step("dispatched", checkpoint.dispatched_at)]
    call = checkpoint.in_flight
    if call is not None and (last is None or call.number > last.number):
        steps.append(step("in_progress", call.started_at, event=_STARTS, attempt=call.number, model=call.model))
    elif checkpoint.resume_at is not None and checkpoint.resume_at > now:
        left_s = (checkpoint.resume_at - now).total_seconds()
        steps.append(step("waiting", now, delay_ms=round(left_s * 1000), detail=f"trying again in {left_s:.0f} s"))
    return steps


def _read_checkpoint(text: str | None) -> _Checkpoint | None:
    try:
        return None if text is None else _Checkpoint.model_validate_json(text)
    except ValidationError:
        return None  # of a worker of another version: how far it is will be heard


def decision(job_id: str, record: bytes) -> bytes:
    """What readers are told of the end, from a result or a record: neither output nor anything else of it."""
    found = orjson.loads(record)
    return orjson.dumps({"execution_id": job_id, "status": found["status"], "reason": found.get("reason")})


def server_sent(event: str, data: bytes, number: int) -> bytes:
    """One event of the stream. `data`: JSON on one line."""
    return b"event: %b\ndata: %b\nid: %d\n\n" % (event.encode(), data, number)


def comment(text: str) -> bytes:
    """What readers skip."""
    return f": {text}\n\n".encode()
