"""`/api/v1/jobs/{job_id}/progress`: a job followed live, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
import structlog
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from breakwater.identity.auth import caller_of
from breakwater.identity.event_stream import Ending, FollowedStream, OpenStreams, Sender, comment, end, server_sent
from breakwater.identity.operations import operation
from breakwater.jobs.api.results import JobLookup, job_is_of, status_of, unknown_job
from breakwater.jobs.contract.execution import Attempt, Progress
from breakwater.jobs.rules.checkpoints import SavedCheckpoint
from breakwater.jobs.rules.ids import possible_executions
from breakwater.jobs.rules.record import ATTEMPT_IDS, PROGRESS_IDS, steps_of
from breakwater.jobs.store.accepted import JobStatus
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import core_subscription
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.types import Event, Timestamp, is_identifier

LOOK_S = 5.0
"""Interval at which the record is read for a decision or attempts that the subscription missed."""

LOOK_AGAIN_S = 0.2
"""The first interval once the end was received but its record is not found, because the replica lags."""

MAX_UNSENT = 256
"""The most steps that a reader may be behind. Beyond that its stream ends; the next one begins with the record."""

ENDED = frozenset({"succeeded", "dead_lettered", "cancelled"})
_STARTS = "agent.attempt.start"
_ENDS = frozenset({"agent.attempt.finish", "agent.attempt.error"})


@dataclass(slots=True, eq=False)
class StepInbox:
    """Steps that were received and are not sent yet. Putting a step never waits for the reader."""

    ending: Ending
    messages: deque[bytes] = field(default_factory=deque[bytes])
    nonempty: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: bytes) -> None:
        """Adds a received step."""
        if len(self.messages) >= MAX_UNSENT:
            end(self.ending, "the reader is too slow; connect again")
        else:
            self.messages.append(message)
            self.nonempty.set()

    async def wait(self, timeout_s: float) -> None:
        """Waits until there is a message, or the time is up."""
        self.nonempty.clear()
        if not self.messages:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(timeout_s, 0.0)):
                    await self.nonempty.wait()


@dataclass(frozen=True, slots=True)
class ProgressRoutes:
    """The streams of progress of this process."""

    streams: OpenStreams
    lookup: JobLookup

    @operation(
        "GET",
        "/api/v1/jobs/{job_id}/progress",
        tag="jobs",
        summary="Follow a job live",
        description="Server-sent events. The data of each `progress` is a `Progress`. The stream starts with what is "
        "recorded: `queued`, the attempts so far, and the current step. The last event is `decided`, with "
        "`execution_id`, `job_id`, `status` and `reason`, and the stream ends. It contains neither outputs nor "
        "prompts. A stream that ends without `decided` was interrupted: connect again. Each stream starts over; "
        "`Last-Event-ID` is ignored. Comments keep an idle stream open.",
        results={200: ("The stream.", str)},
        content_type="text/event-stream",
        errors={
            404: "There is no such job (`unknown_job`).",
            429: "The API key already has 50 streams open in this process (`too_many_streams`).",
            503: "The status can't be read now (`unavailable`), or this process already has 200 streams open, "
            "the maximum (`too_many_streams`).",
        },
    )
    async def follow_job(self, request: Request) -> Response:
        """Streams the progress of a job. Raises RequestError: 404, 429 or 503."""
        job_id: str = request.path_params["job_id"]
        if not is_identifier(job_id):
            raise unknown_job(None)
        return _ProgressFollower(self.streams, self.lookup, job_id, request)


class _ProgressFollower(FollowedStream):
    def __init__(self, streams: OpenStreams, lookup: JobLookup, job_id: str, request: Request) -> None:
        super().__init__(streams, request)
        self._lookup = lookup
        self._results = lookup.results
        self._requested_id = self._execution_id = job_id
        self._caller = caller_of(request)
        self._sent = SentSteps()
        self._number = 0

    @asynccontextmanager
    async def open_source(self, ending: Ending) -> AsyncGenerator[Callable[[Sender], Coroutine[Any, Any, None]]]:
        """Subscribes to the progress of the job, and reads the steps so far. Raises RequestError: 404."""
        inbox = StepInbox(ending)
        await self._resolve()
        subject = f"bw.progress.*.{subjects.encode_token(self._execution_id)}"
        async with core_subscription(self._results.connection, subject, inbox.put):
            steps, decided = await self._read_steps()
            yield partial(self._write, inbox, steps, decided)

    async def _resolve(self) -> None:
        """Finds the execution of a job that its owner names by its own id."""
        if possible_executions(self._caller, self._requested_id) != (self._requested_id,):
            job = await self._lookup.find(self._caller, self._requested_id)
            if job is not None:
                self._execution_id = job.execution_id

    async def _read_steps(self) -> tuple[list[Progress], bytes | None]:
        """Returns the steps so far, and the decision. Raises RequestError: 404, the job is unknown."""
        # The decision is read first: once a job is decided, all its attempts are recorded.
        decided = await self._results.find_decision(self._execution_id)
        attempts = await self._results.attempts(self._execution_id)
        if decided is not None:
            status = status_of(decided)
            steps = steps_of_decided(decided, attempts)
        else:
            status = await self._lookup.accepted.status(self._execution_id)
            if status is None and not attempts:
                raise unknown_job(self._requested_id)
            steps = steps_of_undecided(self._execution_id, status, attempts, datetime.now(UTC))
        if not self._caller.may(("read",)) and not job_is_of(self._caller, status):
            raise unknown_job(self._requested_id)
        return steps, decided

    async def _write(self, inbox: StepInbox, steps: list[Progress], decided: bytes | None, sender: Sender) -> None:
        # The comment comes before the first step, so that readers and proxies see that the stream has begun.
        await sender.send(comment(f"progress of job {self._requested_id}"))
        for step in steps:
            await self._send_step(sender, step)
        pause = LOOK_S
        reconnects = self._results.reconnects()
        look_at = time.monotonic() + pause
        received_while_looking = len(inbox.messages)
        last_step: Progress | None = None
        while decided is None:
            while inbox.messages:
                step = read(inbox.messages.popleft())
                if step is not None and step.state in ENDED:
                    # The last step is sent after the record was read, as steps before it may not have been received.
                    last_step = step
                    look_at = 0.0
                    pause = LOOK_AGAIN_S
                elif step is not None:
                    await self._send_step(sender, step, while_looking=received_while_looking > 0)
                received_while_looking -= 1
            connection = self._results.reconnects()
            if time.monotonic() >= look_at or connection != reconnects:
                # An outage does not end the stream, as the job goes on.
                with suppress(BusError):
                    decided = await self._read_record(sender)
                look_at = time.monotonic() + pause
                pause = min(pause * 2, LOOK_S)
                reconnects = connection
            else:
                await inbox.wait(min(look_at - time.monotonic(), sender.silence.comment_due_s()))
            if decided is None:
                await sender.send_due_comment()
        if last_step is not None:
            await self._send_step(sender, last_step)
        await sender.send(self._event("decided", decision(decided)), more=False)

    async def _read_record(self, sender: Sender) -> bytes | None:
        """Sends the recorded attempts that the subscription missed, and returns the decision."""
        decided = await self._results.find_decision(self._execution_id)
        for attempt in await self._results.attempts(self._execution_id, self._sent.complete_to):
            for step in steps_of(attempt):
                await self._send_step(sender, step)
        return decided

    async def _send_step(self, sender: Sender, step: Progress, *, while_looking: bool = False) -> None:
        if self._sent.take(step, while_looking=while_looking):
            await sender.send(self._event("progress", step.json_bytes()))

    def _event(self, event: str, data: bytes) -> bytes:
        self._number += 1
        return server_sent(event, data, self._number)


class SentSteps:
    """The steps that a reader was sent. Recorded and received steps overlap, and each is sent once."""

    def __init__(self) -> None:
        self.complete_to = 0
        """The ends of all attempts up to this number were sent."""
        self._steps: set[tuple[str, int]] = set()
        self._states: set[str] = set()

    def take(self, step: Progress, *, while_looking: bool = False) -> bool:
        """Returns True if a step is to be sent, and counts it as sent.

        Args:
            step: a received or recorded step.
            while_looking: the step was received while the record was read, and may be older than the record.
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
    """Parses a received message as a step; logs and returns None if it is not one."""
    try:
        return Progress.model_validate_json(message)
    except ValidationError:
        structlog.get_logger().warning("progress_unreadable", size=len(message))
        return None


class _DecisionFields(Event):
    """The fields of a result or a record that its first step needs."""

    execution_id: str
    job_id: str
    agent: str
    tenant: str | None = None
    task_id: str | None = None
    task_key: str | None = None
    parent_execution_id: str | None = None
    parent_job_id: str | None = None
    plan_id: str | None = None
    plan_key: str | None = None
    run_id: str | None = None
    queued_at: Timestamp


def steps_of_decided(decided: bytes, attempts: Iterable[Attempt]) -> list[Progress]:
    """Returns the recorded steps of a job that has ended, from its result or record, and its attempts."""
    job = _DecisionFields.model_validate_json(decided)
    belongs_to = {name: getattr(job, name) for name in PROGRESS_IDS}
    queued = Progress(execution_id=job.execution_id, agent=job.agent, **belongs_to, state="queued", at=job.queued_at)
    return [queued, *(step for attempt in attempts for step in steps_of(attempt, belongs_to))]


def steps_of_undecided(
    execution_id: str, status: JobStatus | None, attempts: Sequence[Attempt], now: datetime
) -> list[Progress]:
    """Returns the recorded steps of an undecided job: that it was queued, its attempts, and the current step.

    There are no steps for a job that was published to NATS and is in its first call, as its agent is not recorded yet.
    The time when such a job was queued is recorded with its end.
    """
    recorded = [step for attempt in attempts for step in steps_of(attempt)]
    if status is None:
        return recorded
    last = max(attempts, key=lambda attempt: attempt.number, default=None)
    agent = status.agent if last is None else last.agent
    if agent is None:
        return []
    job_id = status.job_id or execution_id
    belongs_to = {"job_id": job_id, "tenant": status.tenant}
    if last is not None:
        belongs_to = {name: getattr(last, name) for name in ATTEMPT_IDS}

    def step(state: str, at: datetime, **more: object) -> Progress:
        fields = {"execution_id": execution_id, "agent": agent, **belongs_to, "state": state, "at": at, **more}
        return Progress.model_validate(fields)

    begun = [*recorded, *_current_steps(step, status, last, now)]
    if status.accepted_at is None:
        return begun
    # The clock of the process that accepted the job may be ahead of the worker's.
    return [step("queued", min([status.accepted_at, *(later.at for later in begun)])), *begun]


def _current_steps(
    step: Callable[..., Progress], status: JobStatus, last: Attempt | None, now: datetime
) -> Iterable[Progress]:
    """Yields the steps of a job after its recorded attempts."""
    if not status.taken:
        return
    checkpoint = None
    if status.checkpoint is not None:
        with suppress(ValidationError):  # a worker of another version wrote it; its progress will be received
            checkpoint = SavedCheckpoint.model_validate_json(status.checkpoint)
    if checkpoint is None:
        if last is None:
            yield step("dispatched", status.accepted_at or now)
        return
    if last is None:
        yield step("dispatched", checkpoint.dispatched_at)
    call = checkpoint.in_flight
    if call is not None and (last is None or call.number > last.number):
        yield step("in_progress", call.started_at, event=_STARTS, attempt=call.number, model=call.model)
    elif checkpoint.resume_at is not None and checkpoint.resume_at > now:
        left_s = (checkpoint.resume_at - now).total_seconds()
        yield step("waiting", now, delay_ms=round(left_s * 1000), detail=f"trying again in {left_s:.0f} s")


def decision(record: bytes) -> bytes:
    """Returns the last event, from a result or a record, without output, error or figures."""
    fields = orjson.loads(record)
    return orjson.dumps({name: fields.get(name) for name in ("execution_id", "job_id", "status", "reason")})
