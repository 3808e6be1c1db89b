"""The steps by which every job is accepted: `authorize`, `compare`, `admit`, and `store` or `follow`.

Jobs over HTTP, jobs of a plan and calls in the dialects of providers all take them, in this order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import quote

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response

from breakwater.breakers.api import AgentAvailability
from breakwater.config import Config
from breakwater.config.job_validation import validate_job
from breakwater.identity.auth import on_leaving
from breakwater.identity.rules.callers import Attribution, Caller
from breakwater.jobs.api.job_queue import JobQueue
from breakwater.jobs.api.results import AwaitedResult, JobLookup, status_of
from breakwater.jobs.api.submission import Submission, submission
from breakwater.jobs.contract.job import Job
from breakwater.jobs.plan_changes import PlanLog, PlanName, PlanSource
from breakwater.jobs.rules.attribution import attribution_of
from breakwater.jobs.rules.ids import execution_of, is_generated, key_of, scope_of
from breakwater.jobs.rules.ownership import (
    for_own_tenant,
    forbidden_model,
    objection_to,
    owner_of,
)
from breakwater.jobs.rules.turns import CallerTurn, allowed_priority, priority_problem
from breakwater.jobs.store.accepted import JobStatus
from breakwater.jobs.store.plans import NotedJob
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.http.parsing import invalid_job, suggestion
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.json_values import with_field
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.validation import FieldError
from breakwater.limits.rules.budget import LimitTable
from breakwater.redaction.rules.redact import id_objection

LOOK_UP_S = 1.0
"""Time limit of looking up a job's id. Beyond it, the job is accepted, and the worker checks the id."""


class ForeignIdError(BreakwaterError):
    """A generated id belongs to another owner's job. The sender must not learn that."""


@dataclass(frozen=True, slots=True)
class JobIntake:
    """Accepts jobs."""

    config: Config
    limits: Callable[[], LimitTable]
    queue: JobQueue
    lookup: JobLookup
    availability: AgentAvailability
    plans: PlanLog

    def authorize(
        self, caller: Caller, job: Job, body: bytes, idempotency_key: str | None, generated_id: str
    ) -> Submission:
        """Checks that a caller may send a job, and returns the job in the form that is published.

        Args:
            caller: the sender.
            job: the job.
            body: the job as the sender wrote it.
            idempotency_key: the id of a job without one.
            generated_id: the id of a job without an id and an idempotency key.

        Raises:
            RequestError: 403, 404 or 422; the key may not send this job, or its agent can't run it.
        """
        if job.agent not in self.config.agents:
            names = [name for name in self.config.agents if not caller.agents or name in caller.agents]
            message = f"agent {job.agent!r} is not configured{suggestion(job.agent, names)}"
            listing = FieldError(path="agent", message=f"configured are {', '.join(sorted(names))}")
            raise RequestError(404, "unknown_agent", message, [listing])
        by_operator = caller.may(("operate",))
        own_job = for_own_tenant(caller, job)
        if (objection := objection_to(caller, own_job, by_operator=by_operator)) is not None:
            status, code = (422, "invalid_job") if objection.field == "reply_to" else (403, "forbidden")
            details = [FieldError(path=objection.field, message=objection.detail)]
            raise RequestError(status, code, objection.message, details)
        chain = self.config.agents[job.agent].chain_for(job)
        if caller.models and (model := forbidden_model(caller, job, chain)) is not None:
            raise _forbidden_model(caller, job, model)
        if own_job is not job and own_job.tenant is not None:
            body = (
                own_job.model_dump_json(exclude_unset=True).encode()
                if "tenant" in job.model_fields_set
                else with_field(body, "tenant", own_job.tenant)
            )
            job = own_job
        if (problem := validate_job(self.config, self.limits(), job, with_figures=by_operator)) is not None:
            raise invalid_job([problem])
        agent = self.config.agents[job.agent]
        if (why := priority_problem(job.priority, agent.priority, caller.priority)) is not None:
            raise RequestError(403, "forbidden", f"priority: {why}", [FieldError(path="priority", message=why)])
        attribution = attribution_of(job, Attribution(caller.user, caller.team), caller.forwarded)
        for kind, name in (("user", attribution.user), ("team", attribution.team)):
            if name is not None and (why := id_objection(self.config.redaction, name)) is not None:
                raise invalid_job([FieldError(path=kind, message=why)])
        return submission(
            job,
            body,
            idempotency_key=idempotency_key,
            generated_id=generated_id,
            owner=owner_of(caller),
            scope=scope_of(caller, job.tenant),
            redaction=self.config.redaction,
            submitted_by=caller.name,
            attribution=attribution,
            tags=caller.tags,
            turn=CallerTurn(
                caller.name,
                job.tenant or "",
                job.priority or allowed_priority(agent.priority, caller.priority),
                caller.weight,
            ),
            residency=caller.residency,
            by_operator=by_operator,
            private=not agent.keeps_error_texts,
        )

    async def compare(self, sent: Submission, *, required: bool = False) -> Submission:
        """Looks up whether a job was sent before, and returns it with the status of the earlier job.

        If a generated id belongs to another owner's job, the sender must not learn that: its job is another execution.

        Args:
            sent: the job.
            required: raise UnavailableError if the look-up fails. Otherwise the job counts as new, and the worker
                compares.

        Raises:
            RequestError: 409, a different job has the id.
        """
        if sent.id_generated:
            return sent
        try:
            async with asyncio.timeout(None if required else LOOK_UP_S):
                try:
                    return replace(sent, earlier=await self._earlier(sent, just_now=False))
                except ForeignIdError:
                    return await self.compare(sent.with_hashed_id(), required=required)
        except (BusUnavailableError, StateUnavailableError, TimeoutError):
            if required:
                raise
            return sent

    async def admit(self, sent: Submission) -> None:
        """Refuses a new job if no model of its agent may be called now. Raises RequestError: 503."""
        refusal = None if sent.earlier is not None else await self.availability.refusal(sent)
        if refusal is not None and not await self.is_known_now(sent):
            raise refusal

    async def is_known_now(self, sent: Submission) -> bool:
        """Returns True if the job was sent before, even to another process at this moment."""
        if sent.earlier is not None or sent.id_generated:
            return sent.earlier is not None
        try:
            _, status = await self.lookup.status(sent.execution_id, just_now=True)
        except (BusUnavailableError, StateUnavailableError):
            return False
        return status is not None

    async def store(self, sent: Submission, traceparent: str | None, *, is_planned: bool = False) -> bool:
        """Publishes a job.

        Args:
            sent: the job.
            traceparent: its W3C trace context; None without a trace.
            is_planned: the job's plan knows it already.

        Returns:
            True if the job was sent before.

        Raises:
            RequestError: 409 or 503, the job was not accepted.
        """
        job = sent.job
        earlier = sent.earlier
        is_taken = earlier is not None and earlier.taken and job.reply_to is None
        is_queued = not is_taken and await self.queue.put(sent, traceparent)
        if is_queued:
            try:
                await self._earlier(sent, just_now=True)
            except ForeignIdError:
                raise _id_conflict(sent) from None
            except (BusUnavailableError, StateUnavailableError) as error:
                raise unavailable("unavailable", f"whether this is the same job cannot be read now: {error}") from error
        duplicate = is_queued or earlier is not None
        if not duplicate:
            self.queue.mark(sent)
            if job.plan_id is not None and not job.dry_run and not is_planned:
                plan = PlanName(key_of(sent.scope, job.plan_id), job.plan_id)
                await self._plan(sent, plan, traceparent)
        if job.dry_run and sent.job_id != sent.execution_id:
            with suppress(StateUnavailableError):
                reserved_id = execution_of(sent.scope, sent.job_id)
                await self.lookup.accepted.note_dry_run(reserved_id, sent.execution_id)
        return duplicate

    async def _plan(self, sent: Submission, plan: PlanName, traceparent: str | None) -> None:
        dependencies = sent.ids.dependencies
        planned_job = NotedJob(sent.received_at, sent.job.agent, sent.job.tenant, sent.owner, sent.job_id, dependencies)
        trace_id = tracing.trace_id_of(traceparent)
        source = PlanSource(sent.job.tenant, sent.owner, trace_id, sent.execution_id, sent.job_id)
        reason = f"the job {sent.job_id!r} was accepted"
        try:
            jobs = {sent.execution_id: planned_job}
            await self.plans.change(plan, "pending", jobs, reason, source, sent.submitted_by)
        except (BusError, StateUnavailableError) as error:
            # The job is accepted nevertheless, and the worker that takes it adds it to its plan.
            structlog.get_logger().info("plan_not_changed", execution_id=sent.execution_id, error=str(error))

    async def follow(
        self, request: Request, sent: Submission, traceparent: str | None, wait_s: float | None
    ) -> tuple[AwaitedResult, bool]:
        """Publishes a job, whose result can then be awaited until the context is left. Raises what `store` raises.

        Args:
            request: the request that waits.
            sent: the job.
            traceparent: its W3C trace context; None without a trace.
            wait_s: the longest wait, in seconds; None to wait as long as it takes.

        Returns:
            The result, which raises RequestError (409) if another job has the id; and True if the job was sent before.
        """
        # If the id was used before, the result may be stored already, and is then not published again.
        was_used = not sent.id_generated
        try:
            awaited = self.lookup.waiters.listen(
                sent.execution_id,
                wait_s=wait_s,
                check_first=was_used,
                objection=partial(_conflict_with, sent) if was_used else None,
            )
        except BusUnavailableError as error:
            raise unavailable("unavailable", f"the job was not accepted: {error}") from error
        try:
            duplicate = await self.store(sent, traceparent)
            awaited.at_end(on_leaving(request, awaited.leave))
        except BaseException:
            awaited.close()
            raise
        return awaited, duplicate

    async def _earlier(self, sent: Submission, *, just_now: bool) -> JobStatus | None:
        """Returns the status of an earlier sending of the same job; None if there was none.

        Args:
            sent: the job.
            just_now: another process may have accepted it at this moment.

        Raises:
            RequestError: 409, another job has the id.
            ForeignIdError: the id was generated for another owner's job.
            BusUnavailableError: NATS can't be read.
            StateUnavailableError: Redis can't be read.
        """
        decided, earlier = await self.lookup.status(sent.execution_id, just_now=just_now)
        if earlier is None or earlier.digest == sent.digest:
            return earlier
        is_ours = earlier.owner == sent.owner and (sent.owner is not None or earlier.tenant == sent.job.tenant)
        if sent.scope is not None and is_generated(sent.execution_id) and not is_ours:
            raise ForeignIdError
        if _is_other_job(sent, earlier, decided=decided is not None):
            raise _id_conflict(sent)
        return earlier


def accepted_response(sent: Submission, *, duplicate: bool) -> Response:
    """Returns 202 with an `AcceptedJob`."""
    body = {
        "job_id": sent.job_id,
        "execution_id": sent.execution_id,
        "status": "accepted",
        "duplicate": duplicate,
    }
    headers = {"Location": f"/api/v1/jobs/{quote(sent.job_id, safe='')}"}
    return Response(orjson.dumps(body), 202, headers, "application/json")


def _forbidden_model(caller: Caller, job: Job, model: str) -> RequestError:
    permitted = " or ".join(map(repr, caller.models))
    is_first = job.model in (None, model) and model not in (job.fallback_models or ())
    if job.model is None and is_first:
        message = (
            f"agent {job.agent!r} begins with model {model!r}, and the API key {caller.name!r} may ask for "
            f"{permitted} alone; name one of these as the model"
        )
    else:
        message = f"the API key {caller.name!r} may ask for model {permitted} alone, not for {model!r}"
    field = "model" if is_first else "fallback_models"
    return RequestError(403, "forbidden", message, [FieldError(path=field, message="is not one of the key's")])


def _is_other_job(sent: Submission, earlier: JobStatus, *, decided: bool) -> bool:
    if earlier.digest is not None:
        return earlier.digest != sent.digest
    return decided and earlier.agent != sent.job.agent


def _conflict_with(sent: Submission, result: bytes) -> RequestError | None:
    """Returns 409 if a result is that of another job."""
    return _id_conflict(sent) if _is_other_job(sent, status_of(result), decided=True) else None


def _id_conflict(sent: Submission) -> RequestError:
    message = f"job_id {sent.job_id!r} is already the id of another job; choose another id, or send the same job again"
    return RequestError(409, "id_conflict", message, [FieldError(path="job_id", message="is that of another job")])
