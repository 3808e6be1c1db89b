"""Cancelling jobs: over HTTP, by a request on NATS, and when the client of a stream has left.

A cancel request is stored in Redis, where every worker that has or takes the job finds it. It is also sent to the
workers, so that a call under way is aborted immediately. A sleeping job is put back into its queue, where it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from starlette.requests import Request
from starlette.responses import Response

from breakwater.config import Config
from breakwater.identity.audit import AuditLog, actor_of
from breakwater.identity.auth import caller_of
from breakwater.identity.operations import PERHAPS_DONE, TOO_MANY, operation
from breakwater.identity.settings import NatsProgram
from breakwater.jobs.api.results import JobLookup, status_of, unknown_job
from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.contract.submission import CancelledJob, CancelRequest, SubmitQuery
from breakwater.jobs.rules.ids import is_made_here, key_of
from breakwater.jobs.rules.ownership import forbidden_field
from breakwater.jobs.store.accepted import JobStatus
from breakwater.jobs.store.executions import MAX_UNSEEN, Executions
from breakwater.kernel.http.bodies import A_REQUEST, MAX_BYTES, read_body
from breakwater.kernel.http.contract import ErrorBody, ErrorDetails
from breakwater.kernel.http.parsing import read_command, wait_s_of
from breakwater.kernel.http.problems import RequestError, not_done
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.delivery import wake_early
from breakwater.kernel.nats.errors import BusError, BusUnavailableError, PublishRefusedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import PROGRAM, decode_token
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.types import is_identifier
from breakwater.redaction.rules.redact import Redactor

CLIENT = "client"
"""The NATS user of all programs that have no user of their own."""


class Cancels:
    """Cancels jobs."""

    def __init__(
        self, lookup: JobLookup, executions: Executions, publisher: Publisher, connection: ClientGetter
    ) -> None:
        self.lookup = lookup
        self._executions = executions
        self._publisher = publisher
        self._bus = Lookup(connection)

    async def request(self, pending: PendingCancel) -> PendingCancel:
        """Has an undecided job cancelled. Returns the request in effect, which may be an earlier one.

        Raises:
            StateUnavailableError: the request may have been stored or not; send it again.
        """
        stored = await self._executions.cancel(pending)
        execution_id = pending.execution_id
        # What follows only makes it faster: the worker that has or takes the job finds the request in Redis.
        with suppress(BusUnavailableError):
            await self._publisher.transient(subjects.cancel_request(execution_id), stored)
        try:
            # Only for a new request, as each call puts another message of the job into its queue.
            if stored.json_bytes() == pending.json_bytes():
                parked_at = await wake_early(self._publisher, self._bus, execution_id, pending.agents, pending.owner)
                if parked_at is not None:
                    await self._executions.note_woken({execution_id: parked_at})
        except (BusUnavailableError, PublishRefusedError) as error:
            structlog.get_logger().info("cancelled_job_not_woken", execution_id=execution_id, error=str(error))
        by = stored.cancellation
        structlog.get_logger().info("job_cancelled", execution_id=execution_id, by=by.by, name=by.name)
        return stored

    async def has_too_many(self, user: str, execution_id: str) -> bool:
        """Returns True if a NATS user may not request more cancels of unknown jobs. Raises as `request` does."""
        if await self.lookup.accepted.status(execution_id, just_now=False) is not None:
            return False
        return not await self._executions.count_unseen(user, execution_id)


@dataclass(frozen=True, slots=True)
class CancelRoutes:
    """Cancels jobs over HTTP."""

    cancels: Cancels
    redactor: Redactor
    audit: AuditLog

    @operation(
        "POST",
        "/api/v1/jobs/{job_id}/cancel",
        tag="jobs",
        summary="Cancel a job",
        description="A job that waits or sleeps ends without a call. A call under way is aborted within a second, and "
        "recorded with what it may have cost. The job's result and record have the status `cancelled`, and say who "
        "cancelled it and why. Repeating the request is safe. The body may be empty.",
        query=SubmitQuery,
        body=CancelRequest,
        results={
            200: ("The job has ended, `cancelled` or, before that, otherwise: see `status`.", CancelledJob),
            202: (
                "It is being cancelled, even if a process crashes. With `wait_s`: not finished in time.",
                CancelledJob,
            ),
        },
        errors={
            404: "There is no such job (`unknown_job`).",
            422: "The body is not a request to cancel (`invalid_request`), or the query is wrong (`invalid_query`).",
            429: TOO_MANY,
            503: f"NATS or Redis is unavailable (`unavailable`). {PERHAPS_DONE}",
        },
    )
    async def cancel_job(self, request: Request) -> Response:
        """Responds with 200 and how the job has ended, or with 202 while it is being cancelled."""
        requested_id = str(request.path_params["job_id"])
        caller = caller_of(request)
        wait_s = wait_s_of(request.scope["query_string"])
        reason = _reason_in(await read_body(request, MAX_BYTES, A_REQUEST), self.redactor)
        if not is_identifier(requested_id):
            raise unknown_job(None)
        is_person = caller.kind == "person"
        cancellation = Cancellation(
            by="person" if is_person else "api_key",
            name=caller.name,
            key_id=None if is_person else caller.id,
            reason=reason,
            at=datetime.now(UTC),
        )
        lookup = self.cancels.lookup
        try:
            async with AsyncExitStack() as stack:
                # If a program cancels its own job, the job's record says so; operators need the audit log.
                if caller.may(("operate",)):
                    recording = self.audit.action("cancel_job", actor_of(caller), {"job_id": requested_id}, reason)
                    await stack.enter_async_context(recording)
                job = await lookup.find(caller, requested_id)
                if job is None:
                    raise unknown_job(requested_id)
                execution_id = job.execution_id
                decided = job.decided
                if decided is None:
                    awaited = stack.enter_context(
                        lookup.waiters.listen(execution_id, wait_s=wait_s, check_first=wait_s is not None)
                    )
                    pending = PendingCancel(execution_id=execution_id, cancellation=cancellation, agents=caller.agents)
                    stored = await self.cancels.request(pending)
                    if wait_s is not None:
                        decided = await awaited.decided
                    if decided is None:
                        return _response(_pending_job(job.job_id, stored), 202)
                return _response(_status_of_cancel(decided), 200)
        except (BusError, StateUnavailableError) as error:
            raise not_done(error) from error


MAX_AT_ONCE = 256
"""Requests of one program that are answered at the same time. Further ones are refused, so that no other waits."""


class CancelRequests:
    """Cancels jobs for programs, on requests to `bw.cancel.<job>`. Requests are answered concurrently."""

    def __init__(self, cancels: Cancels, config: Config, redactor: Redactor) -> None:
        self._cancels = cancels
        self._under_way: dict[str, set[asyncio.Task[None]]] = {}
        self.reload(config, redactor)

    async def receive(self, subject: str, data: bytes, respond: Callable[[bytes], Awaitable[None]]) -> None:
        """Answers a request in a task of its own, or refuses it if its user has too many under way."""
        user = subject.split(".")[2] if subject.count(".") > 2 else CLIENT
        tasks = self._under_way.setdefault(user, set())
        if len(tasks) >= MAX_AT_ONCE:
            await respond(
                _refusal(RequestError(429, "too_many_requests", f"{MAX_AT_ONCE} are in progress; retry later"))
            )
            return

        async def respond_when_done() -> None:
            await respond(await self.response_to(subject, data))

        task = asyncio.create_task(respond_when_done())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def stop(self) -> None:
        """Stops answering."""
        await background.stop(*(task for tasks in self._under_way.values() for task in tasks))

    def reload(self, config: Config, redactor: Redactor) -> None:
        """Uses another config."""
        self._programs = {f"{PROGRAM}{name}": program for name, program in config.programs.items()}
        self._redactor = redactor

    async def response_to(self, subject: str, data: bytes) -> bytes:
        """Returns the response to a request: a `CancelledJob`, or an `ErrorBody`."""
        try:
            return (await self._cancel(subject, data)).json_bytes()
        except RequestError as problem:
            return _refusal(problem)
        except (BusError, StateUnavailableError, DecryptionError) as error:
            return _refusal(not_done(error))

    async def _cancel(self, subject: str, data: bytes) -> CancelledJob:
        user, requested_id = _user_and_job(subject)
        reason = _reason_in(data, self._redactor)
        program = self._programs.get(user)
        if not is_identifier(requested_id) or (user != CLIENT and program is None):
            raise unknown_job(None)
        execution_id = key_of(None if user == CLIENT else user, requested_id)
        if is_made_here(requested_id) and execution_id != requested_id:
            # This may be the execution of a job with another id.
            _, status = await self._cancels.lookup.status(requested_id)
            if status is not None and status.is_owner_known and (program is None or _may_see(user, program, status)):
                execution_id = requested_id
        decided = await self._cancels.lookup.results.find_decision(execution_id)
        if decided is not None:
            if program is not None and not _may_see(user, program, status_of(decided)):
                raise unknown_job(requested_id)
            return _status_of_cancel(decided)
        # A job that came over NATS may not be known yet, so the request names its possible owners.
        if await self._cancels.has_too_many(user, execution_id):
            message = (
                f"{MAX_UNSEEN:,} requests of this user for jobs that no worker has seen are pending; wait for "
                "some to end"
            )
            raise RequestError(429, "too_many_requests", message)
        cancellation = Cancellation(by="program", name=user, reason=reason, at=datetime.now(UTC))
        pending = PendingCancel(execution_id=execution_id, cancellation=cancellation)
        if program is not None:
            owner = None if program.tenants else user
            bounds = {"agents": program.agents, "tenants": program.tenants, "owner": owner}
            pending = pending.model_copy(update=bounds)
        return _pending_job(requested_id, await self._cancels.request(pending))


def _may_see(user: str, program: NatsProgram, status: JobStatus) -> bool:
    """Returns True if a job belongs to a named program or to its tenant."""
    if status.agent is None:
        # The claim of a job names no agent; the worker compares it with those that the request names.
        is_of_bounds = not program.tenants or status.tenant in program.tenants
    else:
        is_of_bounds = forbidden_field(program, status.agent, status.tenant) is None
    return status.is_owner_known and is_of_bounds and (bool(program.tenants) or status.owner == user)


def _refusal(problem: RequestError) -> bytes:
    details = ErrorDetails(code=problem.code, message=problem.message, details=problem.details)
    return ErrorBody(error=details).model_dump_json().encode()


def _reason_in(body: bytes, redactor: Redactor) -> str | None:
    reason = read_command(body, CancelRequest).reason if body.strip() else None
    return redactor.text(reason) if reason else None


def _user_and_job(subject: str) -> tuple[str, str]:
    """Returns the user and the job that a subject of the form `CANCELS` or `CANCELS_BY_USER` names."""
    match subject.split("."):
        case ["bw", "cancel", job]:
            user = CLIENT
        case [_, _, encoded, job]:
            user = decode_token(encoded)
        case _:
            raise unknown_job(None)
    try:
        return user, decode_token(job)
    except UnicodeDecodeError:
        raise unknown_job(None) from None


def _status_of_cancel(decided: bytes) -> CancelledJob:
    return CancelledJob.model_validate_json(decided)


def _pending_job(job_id: str, pending: PendingCancel) -> CancelledJob:
    execution_id = pending.execution_id
    return CancelledJob(
        job_id=job_id, execution_id=execution_id, status="cancelling", cancellation=pending.cancellation
    )


def _response(job: CancelledJob, status: int) -> Response:
    return Response(job.json_bytes(), status, media_type="application/json")
