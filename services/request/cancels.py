"""Cancelling jobs: over HTTP, by a request on NATS, and because the client of a stream has left.

An order is kept in Redis, where every worker finds it that has the job or takes it, and sent to the workers, so that a
call under way is aborted at once. A job that sleeps is put back into its queue, where it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response

from breakwater import background
from breakwater.bus.delivery import wake_early
from breakwater.bus.errors import BusError, BusUnavailable, PublishRefused
from breakwater.bus.lookup import Connection, Lookup
from breakwater.bus.publisher import Publisher
from breakwater.config import Config, NatsProgram
from breakwater.contracts import subjects
from breakwater.contracts.execution import Cancellation, PendingCancel
from breakwater.contracts.http import ErrorBody, ErrorDetails
from breakwater.contracts.subjects import PROGRAM, decode_token
from breakwater.contracts.submission import CancelledJob, CancelRequest
from breakwater.contracts.types import is_full_id
from breakwater.encryption import Undecryptable
from breakwater.policy.callers import Caller
from breakwater.policy.ownership import is_made, outside, scope_in, scoped
from breakwater.policy.redact import Redactor
from breakwater.state.accepted import Accepted
from breakwater.state.connection import StateUnavailable
from breakwater.state.executions import MAX_UNSEEN, Executions
from services.request.audit import AuditLog
from services.request.auth import caller_of
from services.request.jobs import find_job, wait_s_of
from services.request.parsing import A_REQUEST, read_body, read_command
from services.request.problems import Problem, not_done, unknown_job
from services.request.results import ResultReader, Waiters
from services.request.routing import MAX_BYTES, actor_of

CLIENT = "client"
"""The NATS user of all programs that have none of their own."""


class Cancels:
    """Cancel requests."""

    def __init__(
        self,
        results: ResultReader,
        waiters: Waiters,
        accepted: Accepted,
        executions: Executions,
        publisher: Publisher,
        connection: Connection,
    ) -> None:
        self.results = results
        self.waiters = waiters
        self.accepted = accepted
        self._executions = executions
        self._publisher = publisher
        self._lookup = Lookup(connection)

    async def order(self, order: PendingCancel) -> PendingCancel:
        """Has a job cancelled that is not decided. Returns the order that stands, which may be an earlier one.

        Raises:
            StateUnavailable: nothing is known of what was done; ask again.
        """
        stands = await self._executions.cancel(order)
        job_id = order.execution_id
        # What follows only makes it faster: whoever has the job or takes it finds the order in Redis.
        with suppress(BusUnavailable):
            await self._publisher.transient(subjects.cancel_request(job_id), stands)
        try:
            # Once for an order: each time puts another message of the job into its queue.
            if stands.json_bytes() == order.json_bytes():
                await wake_early(self._publisher, self._lookup, job_id, order.agents, order.owner)
        except (BusUnavailable, PublishRefused) as error:
            structlog.get_logger().info("cancelled_job_not_woken", execution_id=job_id, error=str(error))
        cancellation = stands.cancellation
        structlog.get_logger().info("job_cancelled", execution_id=job_id, by=cancellation.by, name=cancellation.name)
        return stands

    async def has_too_many(self, user: str, job_id: str) -> bool:
        """Whether a NATS user has no room for another order for a job of which nothing is known. Raises as `order`."""
        if await self.accepted.standing(job_id, just_now=False) is not None:
            return False
        return not await self._executions.count_unseen(user, job_id)


class CancelRoute:
    """`POST /api/v1/jobs/{job_id}/cancel`."""

    def __init__(self, cancels: Cancels, redactor: Redactor, audit: AuditLog) -> None:
        self._cancels = cancels
        self._redactor = redactor
        self._audit = audit

    async def cancel(self, request: Request) -> Response:
        """200 with how the job has ended, or 202 while it is being cancelled."""
        job_id, caller = str(request.path_params["job_id"]), caller_of(request)
        wait_s = wait_s_of(request.scope["query_string"])
        body = await read_body(request, MAX_BYTES, A_REQUEST)
        reason = _reason_in(body, self._redactor)
        if not is_full_id(job_id):
            raise unknown_job(None)
        if not caller.may(("operate",)):
            # A program's own job: who cancelled it stands in its record.
            return await self._cancel(caller, job_id, reason, wait_s)
        try:
            async with self._audit.action("cancel_job", actor_of(caller), {"job_id": job_id}, reason):
                return await self._cancel(caller, job_id, reason, wait_s)
        except BusError as error:
            raise not_done(error) from error

    async def _cancel(self, caller: Caller, given: str, reason: str | None, wait_s: float | None) -> Response:
        cancels = self._cancels
        try:
            found = await find_job(caller, given, cancels.results, cancels.accepted)
            if found is None:
                raise unknown_job(given)
            job_id, decided = found
            if decided is not None:
                return _response(_of_result(given, decided))
            async with cancels.waiters.listening(subjects.result(job_id)) as answer:
                by = _cancellation(caller, reason)
                order = PendingCancel(execution_id=job_id, cancellation=by, agents=caller.agents)
                stands = await cancels.order(order)
                if wait_s is not None:
                    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    deadline = time.monotonic() + wait_s
                    decided = await cancels.results.wait(job_id, answer, never, deadline, look_now=True)
        except (BusError, StateUnavailable) as error:
            raise not_done(error) from error
        return _response(_cancelling(given, stands) if decided is None else _of_result(given, decided))


def _cancellation(caller: Caller, reason: str | None) -> Cancellation:
    at = datetime.now(UTC)
    if caller.kind == "person":
        return Cancellation(by="person", name=caller.name, reason=reason, at=at)
    return Cancellation(by="api_key", name=caller.name, key_id=caller.id, reason=reason, at=at)


MAX_AT_ONCE = 256
"""Requests of one program that are answered at the same time. Others of it are refused, and none waits for them."""


class CancelRequests:
    """The same for programs: requests on `bw.cancel.<job>`, each user's beside those of the others."""

    def __init__(self, cancels: Cancels, config: Config, redactor: Redactor) -> None:
        self._cancels = cancels
        self._under_way: dict[str, set[asyncio.Task[None]]] = {}
        self.reload(config, redactor)

    async def receive(self, subject: str, data: bytes, respond: Callable[[bytes], Awaitable[None]]) -> None:
        """Answers a request beside what else is under way; at once where that is too much for its user."""
        user = subject.split(".")[2] if subject.count(".") > 2 else CLIENT
        tasks = self._under_way.setdefault(user, set())
        if len(tasks) >= MAX_AT_ONCE:
            await respond(_refusal(Problem(429, "too_many_requests", f"{MAX_AT_ONCE} are under way; ask again later")))
            return

        async def answer() -> None:
            await respond(await self.answer(subject, data))

        task = asyncio.create_task(answer())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def stop(self) -> None:
        """Answers no more."""
        await background.stop(*(task for tasks in self._under_way.values() for task in tasks))

    def reload(self, config: Config, redactor: Redactor) -> None:
        """Answers by another config from now on."""
        self._programs = {f"{PROGRAM}{name}": program for name, program in config.programs.items()}
        self._redactor = redactor

    async def answer(self, subject: str, data: bytes) -> bytes:
        """What is answered to a request: a `CancelledJob`, or an `ErrorBody`."""
        try:
            return (await self._cancel(subject, data)).json_bytes()
        except Problem as problem:
            return _refusal(problem)
        except (BusError, StateUnavailable, Undecryptable) as error:
            return _refusal(not_done(error))

    async def _cancel(self, subject: str, data: bytes) -> CancelledJob:
        user, given = _asked(subject)
        job_id = scoped(given, None if user == CLIENT else scope_in(user, None))
        reason = _reason_in(data, self._redactor)
        program = self._programs.get(user)
        if program is not None and program.tenants and is_made(given):
            # Its tenant's job over HTTP, perhaps.
            known = await self._cancels.accepted.standing(given, just_now=False)
            if known is not None and known.agent is not None and known.tenant in program.tenants:
                job_id = given
        if not is_full_id(job_id) or (user != CLIENT and program is None):
            raise unknown_job(None)
        decided = await self._cancels.results.decided(job_id)
        if decided is not None:
            if program is not None and not _is_of(user, program, decided):
                raise unknown_job(given)
            return _of_result(given, decided)
        # Nothing may be known yet of a job that came over NATS. The order names whose it may be.
        if await self._cancels.has_too_many(user, job_id):
            message = (
                f"{MAX_UNSEEN:,} orders of this user are kept for jobs that no worker has seen; wait for some to end"
            )
            raise Problem(429, "too_many_requests", message)
        by = Cancellation(by="program", name=user, reason=reason, at=datetime.now(UTC))
        order = PendingCancel(execution_id=job_id, cancellation=by)
        if program is not None:
            owner = None if program.tenants else user
            order = PendingCancel(
                execution_id=job_id, cancellation=by, agents=program.agents, tenants=program.tenants, owner=owner
            )
        return _cancelling(given, await self._cancels.order(order))


def _is_of(user: str, program: NatsProgram, decided: bytes) -> bool:
    """Whether a job belongs to a named program, by its result: to its tenant, or to it alone."""
    of = orjson.loads(decided)
    if outside(program, of["agent"], of.get("tenant")) is not None:
        return False
    return bool(program.tenants) or of.get("owner") == user


def _refusal(problem: Problem) -> bytes:
    details = ErrorDetails(code=problem.code, message=problem.message, details=problem.details)
    return ErrorBody(error=details).model_dump_json().encode()


def _reason_in(body: bytes, redactor: Redactor) -> str | None:
    asked = read_command(body, CancelRequest) if body.strip() else CancelRequest()
    return redactor.text(asked.reason) if asked.reason else None


def _asked(subject: str) -> tuple[str, str]:
    """Who asks for which job, by a subject of the form `CANCELS` or `CANCELS_BY_USER`."""
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


def _of_result(job_id: str, decided: bytes) -> CancelledJob:
    fields = orjson.loads(decided)
    return CancelledJob.model_validate({**fields, "job_id": job_id, "execution_id": job_id})


def _cancelling(job_id: str, order: PendingCancel) -> CancelledJob:
    return CancelledJob(job_id=job_id, execution_id=job_id, status="cancelling", cancellation=order.cancellation)


def _response(job: CancelledJob) -> Response:
    return Response(job.json_bytes(), 202 if job.status == "cancelling" else 200, media_type="application/json")
