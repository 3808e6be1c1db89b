"""The line that every job takes, in this order: `authorize`, `compare`, `admit`, `store`, and perhaps `follow`.

A job over HTTP, the jobs of a plan and a call of OpenAI's dialect all come this way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from breakwater.bus.errors import BusUnavailableError
from breakwater.config import Config, validate_job
from breakwater.contracts import subjects
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import REPLIES
from breakwater.contracts.validation import FieldError
from breakwater.errors import BreakwaterError
from breakwater.policy.callers import Caller
from breakwater.policy.ownership import (
    for_own_tenant,
    forbidden_field,
    is_generated_id,
    may_be_answered_at,
    owner_of,
    scope_of,
    scoped_execution,
)
from breakwater.runtime import background
from breakwater.state.accepted import JobStatus
from breakwater.state.connection import StateUnavailableError
from services.request.breakers import AgentAvailability
from services.request.job_queue import JobQueue
from services.request.parsing import invalid_job, suggestion, with_field
from services.request.problems import RequestError, unavailable
from services.request.results import HeardResult, JobLookup, disconnected, status_of
from services.request.submission import Submission, submission

LOOK_UP_S = 1.0
"""For looking up the id of a job: beyond it, the worker alone finds that it is the id of another job."""


class ForeignIdError(BreakwaterError):
    """An id that its sender did not choose is that of another owner's job, which it must not learn."""


@dataclass(frozen=True, slots=True)
class FollowedJob:
    """A job that is stored, and whose result a request waits for."""

    duplicate: bool
    deciding: asyncio.Task[bytes | None]
    """Gives the result; None if it did not come in time, the client has left, or the process stops.

    Raises RequestError: 409, it is that of another job.
    """
    left: asyncio.Future[None]
    """Done when the client has left."""


@dataclass(frozen=True, slots=True)
class JobIntake:
    """Takes jobs."""

    config: Config
    queue: JobQueue
    lookup: JobLookup
    availability: AgentAvailability

    def authorize(
        self, caller: Caller, job: Job, body: bytes, idempotency_key: str | None, generated_id: str
    ) -> Submission:
        """A job that may be published.

        Args:
            caller: the sender.
            job: the job.
            body: the same, as it was written.
            idempotency_key: its id, if the job has none.
            generated_id: its id, if there is no idempotency key either.

        Raises:
            RequestError: 403, 404 or 422, the key may not send this job, or its agent can't run it.
        """
        bound = for_own_tenant(caller, job)
        if bound is not job and bound.tenant is not None:
            replaced = "tenant" in job.model_fields_set
            body = (
                bound.model_dump_json(exclude_unset=True).encode()
                if replaced
                else with_field(body, "tenant", bound.tenant)
            )
            job = bound
        if job.agent not in self.config.agents:
            names = [name for name in self.config.agents if not caller.agents or name in caller.agents]
            message = f"agent {job.agent!r} is not configured{suggestion(job.agent, names)}"
            listing = FieldError(path="agent", message=f"configured are {', '.join(sorted(names))}")
            raise RequestError(404, "unknown_agent", message, [listing])
        _check_sender(caller, job)
        if (problem := validate_job(self.config, job)) is not None:
            raise invalid_job([FieldError(path=problem.path, message=problem.message)])
        owner, scope = owner_of(caller), scope_of(caller, job.tenant)
        sent = submission(
            job, body, idempotency_key=idempotency_key, generated_id=generated_id, owner=owner, scope=scope
        )
        return replace(sent, submitted_by=caller.name, by_operator=caller.may(("operate",)))

    async def compare(self, sent: Submission, *, required: bool = False) -> Submission:
        """The job with what is known of its id. Raises RequestError: 409, it is the id of another job.

        If an id with the form of a made one is another owner's, the sender must not learn that: the job gets a name of
        its sender's own.

        Args:
            sent: the job.
            required: raise UnavailableError if nothing can be looked up; otherwise the job goes on as
                an unknown one, and the worker compares.
        """
        if sent.id_generated:
            return sent
        try:
            async with asyncio.timeout(None if required else LOOK_UP_S):
                try:
                    return replace(sent, known=await self._known(sent, just_now=False))
                except ForeignIdError:
                    return await self.compare(sent.with_scoped_id(), required=required)
        except (BusUnavailableError, StateUnavailableError, TimeoutError):
            if required:
                raise
            return sent

    async def admit(self, sent: Submission) -> None:
        """Raises RequestError (503) if no model of its agent may be called now. Known jobs are admitted."""
        refusal = None if sent.known is not None else await self.availability.refusal(sent)
        if refusal is not None and not await self.is_known_now(sent):
            raise refusal

    async def is_known_now(self, sent: Submission) -> bool:
        """True if the job was sent before, also at this moment to another process."""
        if sent.known is not None or sent.id_made_here:
            return sent.known is not None
        try:
            _, status = await self.lookup.status(sent.job_id, just_now=True)
        except (BusUnavailableError, StateUnavailableError):
            return False
        return status is not None

    async def store(self, sent: Submission, traceparent: str | None) -> bool:
        """Publishes a job. Returns True if it was sent before. Raises RequestError: 409 or 503, it was not accepted."""
        job, known = sent.job, sent.known
        waits = known is not None and known.taken and job.reply_to is None
        if not waits and (waits := await self.queue.put(sent, traceparent)):
            try:
                await self._known(sent, just_now=True)
            except ForeignIdError:
                raise _id_conflict(sent) from None
            except (BusUnavailableError, StateUnavailableError) as error:
                raise unavailable("unavailable", f"whether this is the same job cannot be read now: {error}") from error
        duplicate = waits or known is not None
        if not duplicate:
            self.queue.mark(sent)
            await self.queue.announce_queued(sent)
        if job.dry_run and sent.shown_id != sent.job_id:
            with suppress(StateUnavailableError):
                await self.lookup.accepted.note_dry_run(scoped_execution(sent.shown_id, sent.scope), sent.job_id)
        return duplicate

    @asynccontextmanager
    async def follow(
        self, request: Request, sent: Submission, traceparent: str | None, wait_s: float
    ) -> AsyncGenerator[FollowedJob]:
        """Publishes a job, and waits for its result while the block runs. Raises as `store`."""
        deadline = time.monotonic() + wait_s
        async with AsyncExitStack() as waiting:
            try:
                listening = self.lookup.waiters.listening(subjects.result(sent.job_id))
                heard = await waiting.enter_async_context(listening)
            except BusUnavailableError as error:
                raise unavailable("unavailable", f"the job was not accepted: {error}") from error
            duplicate = await self.store(sent, traceparent)
            left = asyncio.ensure_future(disconnected(request.receive))
            deciding = asyncio.create_task(self._decided(sent, heard, left, deadline))
            try:
                yield FollowedJob(duplicate, deciding, left)
            finally:
                left.cancel()
                await background.stop(deciding)

    async def _decided(
        self, sent: Submission, heard: HeardResult, left: asyncio.Future[None], deadline: float
    ) -> bytes | None:
        # Of an id that others may have used, the result may be stored already, and would not be published again.
        check_first = not sent.id_generated
        result = await self.lookup.results.wait(sent.job_id, heard, left, deadline, check_first=check_first)
        if result is not None and check_first and _is_other_job(sent, status_of(result), decided=True):
            raise _id_conflict(sent)
        return result

    async def _known(self, sent: Submission, *, just_now: bool) -> JobStatus | None:
        """The status of the job, if it was sent before.

        Args:
            sent: the job.
            just_now: another process may have accepted it at this moment.

        Raises:
            RequestError: 409, the id is that of another job.
            ForeignIdError: it has the form of a made id, and is that of another owner's job.
            BusUnavailableError: not known.
            StateUnavailableError: not known.
        """
        decided, found = await self.lookup.status(sent.job_id, just_now=just_now)
        if found is None or found.digest == sent.digest:
            return found
        is_ours = found.owner == sent.owner and (sent.owner is not None or found.tenant == sent.job.tenant)
        if sent.scope is not None and is_generated_id(sent.job_id) and not is_ours:
            raise ForeignIdError
        if _is_other_job(sent, found, decided=decided is not None):
            raise _id_conflict(sent)
        return found


def accepted_response(sent: Submission, *, duplicate: bool) -> Response:
    """202 with the `AcceptedJob`."""
    job_id = sent.shown_id
    body = {"job_id": job_id, "execution_id": job_id, "status": "accepted", "duplicate": duplicate}
    headers = {"Location": f"/api/v1/jobs/{quote(job_id, safe='')}"}
    return Response(orjson.dumps(body), 202, headers, "application/json")


def _check_sender(caller: Caller, job: Job) -> None:
    """Raises RequestError: 403, the job is not one of the key's; 422, it may not be answered there."""
    if (wrong := forbidden_field(caller, job.agent, job.tenant)) is not None:
        path, alone = wrong
        message = f"the API key {caller.name!r} submits {alone}"
        raise RequestError(403, "forbidden", message, [FieldError(path=path, message="is not one of the key's")])
    if job.reply_to is None:
        return
    own = f"{REPLIES}{subjects.encode_token(caller.name)}."
    if (
        job.reply_to.startswith(REPLIES) and not job.reply_to.startswith(own) and not caller.may(("operate",))
    ) or not may_be_answered_at(job.reply_to, caller.name):
        message = f"must be an inbox, not one of a program of the config, or a subject below {own[:-1]}"
        raise invalid_job([FieldError(path="reply_to", message=message)])


def _is_other_job(sent: Submission, found: JobStatus, *, decided: bool) -> bool:
    if found.digest is not None:
        return found.digest != sent.digest
    return decided and found.agent != sent.job.agent


def _id_conflict(sent: Submission) -> RequestError:
    message = (
        f"job_id {sent.shown_id!r} is already the id of another job; choose another id, or send the same job again"
    )
    return RequestError(409, "id_conflict", message, [FieldError(path="job_id", message="is that of another job")])
