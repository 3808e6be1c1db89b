"""`/api/v1/jobs/{job_id}/progress`: a job followed live, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import orjson
import structlog
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from breakwater.bus.core import hearing
from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Connection
from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, Progress
from breakwater.contracts.types import Event, Timestamp, is_full_id
from breakwater.policy.ownership import names_of
from breakwater.policy.record import steps_of
from breakwater.state.accepted import Accepted, JobStatus
from breakwater.state.connection import StateUnavailable
from services.request.auth import caller_of
from services.request.event_stream import (
    Ending,
    EventStream,
    OpenStreams,
    Sender,
    comment,
    end,
    send_part,
    server_sent,
    supervise,
)
from services.request.jobs import find_job, job_is_of, shown_result
from services.request.problems import unavailable, unknown_job
from services.request.results import ResultReader

LOOK_S = 5.0
"""How often the record is polled for what the subscription missed: a decision, attempts."""

LOOK_AGAIN_S = 0.2
"""The same, at first, once the end was received and its record is not found: the replica that was asked lags."""

MAX_UNSENT = 256
"""Steps that a reader may be behind. Beyond, its stream ends; the next one begins with all that matters."""

ENDED = frozenset({"succeeded", "dead_lettered", "cancelled"})
_STARTS = "agent.attempt.start"
_ENDS = frozenset({"agent.attempt.finish", "agent.attempt.error"})


@dataclass(slots=True, eq=False)
class Inbox:
    """Steps that were received and are not sent yet, and why the stream is to end. Never waits for its reader."""

    ending: Ending
    messages: deque[bytes] = field(default_factory=deque[bytes])
    nonempty: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: bytes) -> None:
        """Takes a received step."""
        if len(self.messages) >= MAX_UNSENT:
            end(self.ending, "the reader is too slow; connect again")
        else:
            self.messages.append(message)
            self.nonempty.set()

    async def wait(self, timeout_s: float) -> None:
        """Until there is a message, or the time is up."""
        self.nonempty.clear()
        if not self.messages:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(timeout_s, 0.0)):
                    await self.nonempty.wait()


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the status of jobs is stored and published."""

    connection: Connection
    results: ResultReader
    accepted: Accepted
    reconnects: Callable[[], int]


class ProgressStreams:
    """The streams of progress of this process."""

    def __init__(self, streams: OpenStreams, sources: Sources) -> None:
        self._streams = streams
        self._sources = sources

    async def follow(self, request: Request) -> Response:
        """GET: the stream; 404, or 503 where there are too many."""
        job_id: str = request.path_params["job_id"]
        if not is_full_id(job_id):
            raise unknown_job(None)
        return _Following(self._streams, self._sources, job_id, request)


class _Following(EventStream):
    """One stream. Problems that are found before it has begun are answered as any other."""

    def __init__(self, streams: OpenStreams, sources: Sources, job_id: str, request: Request) -> None:
        super().__init__()
        self._streams = streams
        self._sources = sources
        self._given = self._job_id = job_id
        self._request = request
        self._sent = SentSteps()
        self._number = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream until the job is decided, the reader goes away, its key is revoked, or the process stops."""
        with self._streams.open(self._request) as ending:
            inbox = Inbox(ending)
            try:
                if (job_id := await self._called()) is not None:
                    self._job_id = job_id
                subject = f"bw.progress.*.{subjects.encode_token(self._job_id)}"
                async with hearing(self._sources.connection, subject, inbox.put):
                    found, decided = await self._known()
                    await self.begin(send)
                    if scope["method"] == "HEAD":
                        await send_part(send, b"", more=False)
                        return

                    async def write(sender: Sender) -> None:
                        await self._write(inbox, sender, found, decided)

                    await supervise(self._request, ending, receive, send, write)
            except (BusError, StateUnavailable) as error:
                raise unavailable("unavailable", f"the job's status cannot be read now: {error}") from error

    async def _called(self) -> str | None:
        """What the job is called inside the plane that its owner names as it chose; None where it is as it is given."""
        caller = caller_of(self._request)
        if names_of(caller, self._given) == (self._given,):
            return None
        found = await find_job(caller, self._given, self._sources.results, self._sources.accepted)
        return None if found is None else found[0]

    async def _known(self) -> tuple[list[Progress], bytes | None]:
        """What is known when somebody joins, and the decision. Raises Problem: 404, the job is unknown."""
        # In this order: the attempts of a job that is decided are all recorded.
        decided = await self._sources.results.decided(self._job_id)
        attempts = await self._sources.results.attempts(self._job_id)
        found = [step for attempt in attempts for step in steps_of(attempt)]
        if decided is None:
            standing = await self._sources.accepted.standing(self._job_id)
            if standing is not None:
                found += of_standing(self._job_id, standing, attempts, datetime.now(UTC))
            elif not attempts:
                raise unknown_job(self._given)
        else:
            standing = None
        caller = caller_of(self._request)
        if not caller.may(("read",)) and not job_is_of(caller, decided, standing):
            raise unknown_job(self._given)
        return found, decided

    async def _write(self, inbox: Inbox, sender: Sender, found: list[Progress], decided: bytes | None) -> None:
        # Said even where nothing is known yet: readers and proxies see that the stream has begun.
        await sender.send(comment(f"progress of job {self._given}"))
        for step in found:
            await self._send_step(sender, step)
        pause, reconnects = LOOK_S, self._sources.reconnects()
        look_at = time.monotonic() + pause
        received_while_looking = len(inbox.messages)
        while decided is None:
            while inbox.messages:
                step = read(inbox.messages.popleft())
                if step is not None:
                    await self._send_step(sender, step, while_looking=received_while_looking > 0)
                    if step.state in ENDED:
                        look_at, pause = 0.0, LOOK_AGAIN_S
                received_while_looking -= 1
            connection = self._sources.reconnects()
            if time.monotonic() >= look_at or connection != reconnects:
                # An outage is no reason to end: the job goes on, and it is looked again.
                with suppress(BusError):
                    decided = await self._look(sender)
                look_at, pause, reconnects = time.monotonic() + pause, min(pause * 2, LOOK_S), connection
            else:
                await inbox.wait(min(look_at, sender.silent_until) - time.monotonic())
            if decided is None and time.monotonic() >= sender.silent_until:
                await sender.send(comment("still here"))
        await sender.send(self._event("decided", decision(self._given, decided)), more=False)

    async def _look(self, sender: Sender) -> bytes | None:
        """Sends the recorded attempts that the subscription missed, and returns the decision."""
        decided = await self._sources.results.decided(self._job_id)
        for attempt in await self._sources.results.attempts(self._job_id, self._sent.complete_to):
            for step in steps_of(attempt):
                await self._send_step(sender, step)
        return decided

    async def _send_step(self, sender: Sender, step: Progress, *, while_looking: bool = False) -> None:
        if self._sent.news(step, while_looking=while_looking):
            document = shown_result(caller_of(self._request), step.json_bytes())
            await sender.send(self._event("progress", document))

    def _event(self, event: str, data: bytes) -> bytes:
        self._number += 1
        return server_sent(event, data, self._number)


class _Call(Event):
    number: int
    model: str
    started_at: Timestamp


class _Checkpoint(Event):
    """What of a worker's checkpoint says how far a job is."""

    dispatched_at: Timestamp
    resume_at: Timestamp | None = None
    in_flight: _Call | None = None


class SentSteps:
    """The steps that a reader was sent, as what is recorded and what is received overlap."""

    def __init__(self) -> None:
        self.complete_to = 0
        """The end of each attempt up to this number was sent."""
        self._steps: set[tuple[str, int]] = set()
        self._states: set[str] = set()

    def news(self, step: Progress, *, while_looking: bool = False) -> bool:
        """Whether to send a step; it then counts as sent.

        Args:
            step: that was received or read back.
            while_looking: it was received while the record was read, and may be older than that.
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
    """A received message as a step; None, and a line in the log, where it is none."""
    try:
        return Progress.model_validate_json(message)
    except ValidationError:
        structlog.get_logger().warning("progress_unreadable", size=len(message))
        return None


def of_standing(execution_id: str, standing: JobStatus, attempts: Iterable[Attempt], now: datetime) -> list[Progress]:
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
        return None  # of a worker of another version: its progress will be received


def decision(job_id: str, record: bytes) -> bytes:
    """The last step, from a result or a record: without output, error or figures."""
    found = orjson.loads(record)
    return orjson.dumps({"execution_id": job_id, "status": found["status"], "reason": found.get("reason")})
