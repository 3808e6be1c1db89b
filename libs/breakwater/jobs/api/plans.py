"""`/api/v1/plans`: submitting the jobs of a plan together, and the state of plans."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from breakwater.breakers.api import AgentAvailability
from breakwater.identity.auth import caller_of
from breakwater.identity.operations import TOO_MANY, ApiRequest, operation
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.api.intake import JobIntake
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.api.submission_trace import traced_submission
from breakwater.jobs.contract.submission import AcceptedPlan, PlanJob, PlanList, PlanQuery, PlanRequest, PlanStatus
from breakwater.jobs.plan_changes import PlanLog, PlanName, PlanSource
from breakwater.jobs.rules.ids import key_of, possible_keys
from breakwater.jobs.rules.ownership import may_see
from breakwater.jobs.rules.plans import circle_among, plan_of
from breakwater.jobs.store.plans import MAX_ANNOUNCED, KnownPlan, NotedJob, TooManyPlansError
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.http.bodies import read_body
from breakwater.kernel.http.parsing import invalid_job, read_command
from breakwater.kernel.http.problems import RequestError, not_done
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.types import Message
from breakwater.kernel.validation import FieldError
from breakwater.records.api.executions import ask_clickhouse
from breakwater.records.search import ended_jobs, newest_plans, plan_changes
from breakwater.redaction.rules.redact import id_objection

AT_ONCE = 50
"""Jobs of one plan that are looked up or published at the same time."""

_TOO_LARGE = "a plan may have at most {limit:,} bytes (limits.max_body_bytes in Breakwater's config), as a job"


@dataclass(frozen=True, slots=True)
class PlanRoutes:
    """Plans, for programs and people."""

    max_body_bytes: int
    intake: JobIntake
    availability: AgentAvailability
    plans: PlanLog
    analytics: Analytics
    connection: ClientGetter

    @operation(
        "POST",
        "/api/v1/plans",
        tag="plans",
        summary="Submit a plan",
        description="Its jobs, all or none: each is validated before one is accepted. Sending the same plan again "
        "accepts nothing twice, and further jobs join it. While the breakers of all models of one of its agents are "
        "open, the plan is refused whatever `refuse_when_open` says, and has failed.",
        headers={"traceparent": "W3C trace context that the jobs become a part of."},
        body=PlanRequest,
        results={202: ("Accepted, or a draft. `Location` is where its state is.", AcceptedPlan)},
        errors={
            404: "An agent is not configured (`unknown_agent`).",
            409: "A job id belongs to a different job, or to another key (`id_conflict`).",
            422: "The body is not a plan (`invalid_request`), or a job in it is invalid (`invalid_job`).",
            429: "The key has 1,000 plans without jobs (`too_many_plans`). " + TOO_MANY,
            503: "The plan was refused (`agent_unavailable`). Or NATS or Redis is unavailable (`unavailable`), or NATS "
            "is full (`refused`): some of the jobs may have been accepted, and sending the plan again adds the others.",
        },
    )
    async def submit_plan(self, request: Request) -> Response:
        """Responds with 202 once all jobs are stored on the bus. Accepts none of them if one is invalid or refused."""
        with traced_submission(request, "/api/v1/plans") as trace:
            caller = caller_of(request)
            body = await read_body(request, self.max_body_bytes, _TOO_LARGE)
            plan_id, submissions = self._prepare(caller, read_command(body, PlanRequest))
            # If the key is bound to several tenants, each of them has a part of the plan.
            plan_key = possible_keys(caller, plan_id)[0] if not submissions else str(submissions[0].ids.plan_key)
            # A plan has a correlation id even if its jobs are part of no trace.
            correlation_id = tracing.trace_id_of(trace.traceparent or tracing.new_traceparent())
            try:
                if submissions:
                    await self._accept(caller, submissions, trace.traceparent, correlation_id)
                else:
                    source = PlanSource(None, caller.name, correlation_id)
                    await self.plans.announce(PlanName(plan_key, plan_id), caller.name, source)
            except RequestError as problem:
                problem.facts = {"plan_id": plan_id, "correlation_id": correlation_id}
                raise
            except TooManyPlansError:
                message = (
                    f"the API key {caller.name!r} has {MAX_ANNOUNCED:,} plans without jobs, which is the maximum; "
                    "submit their jobs, or wait until the oldest has expired (72 hours)"
                )
                raise RequestError(429, "too_many_plans", message) from None
            except (BusError, StateUnavailableError) as error:
                raise not_done(error) from error
            trace.set_status(202)
        accepted = AcceptedPlan(plan_id=plan_id, plan_key=plan_key, job_ids=tuple(sent.job_id for sent in submissions))
        headers = {"Location": f"/api/v1/plans/{quote(plan_id, safe='')}"}
        return Response(accepted.json_bytes(), 202, headers, "application/json")

    @operation(
        "GET",
        "/api/v1/plans",
        tag="plans",
        summary="Plans",
        description="Without their jobs. Those of which a job has ended are listed for 30 days, others for 72 hours. "
        "Of jobs submitted over NATS, those count that a worker has taken.",
        result="The newest first.",
        errors={503: "ClickHouse, Redis or NATS is unavailable (`unavailable`); the message says which."},
    )
    async def list_plans(self, request: ApiRequest[PlanQuery]) -> PlanList:
        """Lists the newest plans."""
        limit = request.input.limit
        latest = dict(await self.plans.plans.newest(limit))
        for plan_key, ended_at in (await ask_clickhouse(newest_plans(self.analytics, limit))).items():
            latest[plan_key] = max(ended_at, latest.get(plan_key, ended_at))
        newest = sorted(latest, key=lambda plan_key: latest[plan_key], reverse=True)[:limit]
        return PlanList(plans=tuple(await self._read(request.caller, newest)))

    @operation(
        "GET",
        "/api/v1/plans/{plan_id}",
        tag="plans",
        summary="One plan, with its jobs",
        description="A key without the scope `read` sees its own jobs of a plan.",
        result="The plan as it is now.",
        errors={
            404: "There is no such plan (`unknown_plan`).",
            503: "ClickHouse, Redis or NATS is unavailable (`unavailable`); the message says which.",
        },
    )
    async def show_plan(self, request: ApiRequest[Message]) -> PlanStatus:
        """Shows one plan, with its jobs. Raises RequestError: 404."""
        plan_id = request.path["plan_id"]
        *own_keys, key_as_written = possible_keys(request.caller, plan_id)
        # If the key is bound to several tenants, each of them has a part of the plan.
        for keys in filter(None, (own_keys, [key_as_written])):
            if parts := await self._read(request.caller, keys, with_jobs=True):
                jobs = [job for part in parts for job in part.jobs]
                refusal = next((part.refusal for part in parts if part.refusal is not None), None)
                changes = [change for part in parts for change in part.changes]
                plan_refusal = None if jobs else refusal
                return plan_of(
                    parts[0].plan_id, jobs, plan_refusal, changes, plan_key=parts[0].plan_key, with_jobs=True
                )
        raise RequestError(404, "unknown_plan", f"there is no plan {plan_id!r}, or none that this key may see")

    def _prepare(self, caller: Caller, plan: PlanRequest) -> tuple[str, list[Submission]]:
        plan_id = plan.plan_id or new_id()
        if (why := id_objection(self.intake.config.redaction, plan_id)) is not None:
            raise invalid_job([FieldError(path="plan_id", message=why)])
        submissions: list[Submission] = []
        for number, job in enumerate(plan.jobs):
            numbered_id = f"{plan_id}.{number + 1}"
            try:
                if job.plan_id not in (None, plan_id):
                    raise invalid_job([FieldError(path="plan_id", message=f"differs from the plan's, {plan_id!r}")])
                job = job.model_copy(update={"plan_id": plan_id})
                body = job.model_dump_json(exclude_unset=True).encode()
                generated_id = new_id() if plan.plan_id else numbered_id
                submissions.append(
                    self.intake.authorize(caller, job, body, numbered_id if plan.plan_id else None, generated_id)
                )
            except RequestError as problem:
                raise _as_problem_of_plan(number, problem) from None
        depends_on = {submission.execution_id: submission.ids.dependencies for submission in submissions}
        if len(depends_on) < len(submissions):
            raise invalid_job([FieldError(path="jobs", message="two jobs have the same job_id")])
        if circle := circle_among(depends_on):
            job_ids = {submission.execution_id: submission.job_id for submission in submissions}
            names = " on ".join(repr(job_ids[execution_id]) for execution_id in circle)
            message = f"they depend on each other in a circle: {names}"
            raise invalid_job([FieldError(path="jobs", message=message)])
        return plan_id, submissions

    async def _accept(
        self,
        caller: Caller,
        submissions: Sequence[Submission],
        traceparent: str | None,
        correlation_id: str | None,
    ) -> None:
        compared = list[Submission]()
        for number, sent in enumerate(submissions):
            try:
                compared.append(await self.intake.compare(sent, required=True))
            except RequestError as problem:
                raise _as_problem_of_plan(number, problem) from None
        await self._admit(caller, compared, correlation_id)
        # All jobs are noted before one of them can end, so that the plan never seems to have fewer. If the key is
        # bound to several tenants, each of them has a part of the plan.
        at = datetime.now(UTC)
        plan_names = {sent.execution_id: _plan_of(sent) for sent in compared}
        before = await self.plans.plans.notes_of({plan.key for plan in plan_names.values()})
        new_jobs: dict[PlanName, dict[str, NotedJob]] = {plan: {} for plan in plan_names.values()}
        for sent in compared:
            plan = plan_names[sent.execution_id]
            if sent.execution_id not in before[plan.key].jobs and not sent.job.dry_run:
                dependencies = sent.ids.dependencies
                noted_job = NotedJob(at, sent.job.agent, sent.job.tenant, sent.owner, sent.job_id, dependencies)
                new_jobs[plan][sent.execution_id] = noted_job
        missing = {execution_id: plan.key for plan, jobs in new_jobs.items() for execution_id in jobs}
        try:
            for plan, jobs in new_jobs.items():
                source = PlanSource(next((job.tenant for job in jobs.values()), None), caller.name, correlation_id)
                reason = f"{len(jobs):,} {'job was' if len(jobs) == 1 else 'jobs were'} accepted"
                await self.plans.change(plan, "pending", jobs, reason, source, caller.name)
            for start in range(0, len(compared), AT_ONCE):
                batch = compared[start : start + AT_ONCE]
                storing = (self.intake.store(sent, traceparent, is_planned=True) for sent in batch)
                outcomes = await asyncio.gather(*storing, return_exceptions=True)
                for sent, outcome in zip(batch, outcomes, strict=True):
                    if not isinstance(outcome, BaseException):
                        missing.pop(sent.execution_id, None)
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
        finally:
            for plan_key in set(missing.values()):
                await self.plans.withdraw(
                    plan_key, [execution_id for execution_id, key in missing.items() if key == plan_key]
                )

    async def _admit(self, caller: Caller, submissions: Sequence[Submission], correlation_id: str | None) -> None:
        """Checks that each agent may call a model now. Raises RequestError: 503; then the plan has failed."""
        refusals: dict[tuple[str | None, ...], RequestError | None] = {}
        for sent in submissions:
            if sent.job.dry_run:
                continue
            chain = (sent.job.agent, str(sent.job.model), str(sent.job.fallback_models), sent.job.tenant)
            if chain not in refusals:
                refusals[chain] = await self.availability.refusal(sent, of_plan=True)
            if (refusal := refusals[chain]) is not None and not await self.intake.is_known_now(sent):
                plan = _plan_of(sent)
                source = PlanSource(sent.job.tenant, caller.name, correlation_id)
                with suppress(TooManyPlansError):
                    await self.plans.announce(plan, caller.name, source, refusal.message)
                refusal.message += f": no job was accepted for the plan {plan.plan_id!r}, failed if it has no others"
                raise refusal

    async def _read(self, caller: Caller, plan_keys: Sequence[str], *, with_jobs: bool = False) -> list[PlanStatus]:
        """Returns those of the plans that a caller may see, in the same order."""
        known_plans = await self.plans.plans.notes_of(plan_keys)
        ended = await ask_clickhouse(ended_jobs(self.analytics, plan_keys))
        changes = await ask_clickhouse(plan_changes(self.analytics, plan_keys))
        recorded = {job.execution_id for plan in ended.values() for job in plan.jobs}
        undecided = {
            execution_id: (plan_key, job)
            for plan_key, plan in known_plans.items()
            for execution_id, job in plan.jobs.items()
            if execution_id not in recorded
        }
        decided = await self._decided_jobs(undecided)
        plans: list[PlanStatus] = []
        for plan_key in plan_keys:
            known_plan = known_plans[plan_key]
            visible = _visible(caller, known_plan)
            ended_plan = ended[plan_key]
            jobs = {
                job.execution_id: job for job in ended_plan.jobs if visible is None or job.execution_id in visible.jobs
            }
            for execution_id, job in (visible or known_plan).jobs.items():
                if execution_id not in jobs:
                    jobs[execution_id] = decided.get(execution_id) or PlanJob(
                        job_id=job.job_id,
                        execution_id=execution_id,
                        agent=job.agent,
                        status="running" if execution_id in known_plan.begun else "pending",
                        queued_at=job.accepted_at,
                    )
            if with_jobs:
                for execution_id in jobs.keys() & known_plan.jobs.keys():
                    dependencies = known_plan.jobs[execution_id].depends_on
                    jobs[execution_id] = jobs[execution_id].model_copy(update={"depends_on": dependencies})
            announced = (visible or known_plan).announced
            plan_changes_seen = [
                change
                for change in changes[plan_key]
                if visible is None or change.execution_id in jobs or change.owner == caller.name
            ]
            refusals = [
                *announced.values(),
                *(change.reason for change in plan_changes_seen if change.to_state == "failed"),
            ]
            if jobs or announced or any(change.to_state in ("draft", "failed") for change in plan_changes_seen):
                refusal = None if jobs else next(filter(None, refusals), None)
                named_by = (known_plan.plan_id, ended_plan.plan_id, *(change.plan_id for change in plan_changes_seen))
                plan_id = next(filter(None, named_by), plan_key)
                plan_jobs = jobs.values()
                plans.append(
                    plan_of(plan_id, plan_jobs, refusal, plan_changes_seen, plan_key=plan_key, with_jobs=with_jobs)
                )
        return plans

    async def _decided_jobs(self, undecided: Mapping[str, tuple[str, NotedJob]]) -> dict[str, PlanJob]:
        """Returns those of the jobs that have results. A result of another owner's job with the same id is skipped."""
        decided: dict[str, PlanJob] = {}
        async with aclosing(
            Lookup(self.connection).last_on(Stream.RESULTS, list(map(subjects.result, undecided)))
        ) as messages:
            async for message in messages:
                if (job := message.read(PlanJob)) is not None and job.execution_id in undecided:
                    plan_key, noted_job = undecided[job.execution_id]
                    result: dict[str, object] = orjson.loads(message.data)
                    if (result.get("plan_key"), result.get("tenant"), result.get("owner")) == (
                        plan_key,
                        noted_job.tenant,
                        noted_job.owner,
                    ):
                        decided[job.execution_id] = job
        return decided


def _plan_of(sent: Submission) -> PlanName:
    """Returns the plan that a job is part of."""
    plan_id = str(sent.job.plan_id)
    return PlanName(key_of(sent.scope, plan_id), plan_id)


def _visible(caller: Caller, plan: KnownPlan) -> KnownPlan | None:
    """Returns the part of a plan that a caller may see; None means all of it."""
    if caller.may(("read", "operate")):
        return None
    jobs = {
        execution_id: job
        for execution_id, job in plan.jobs.items()
        if may_see(caller, agent=job.agent, tenant=job.tenant, owner=job.owner)
    }
    return KnownPlan(jobs, {by: why for by, why in plan.announced.items() if by == caller.name})


def _as_problem_of_plan(number: int, problem: RequestError) -> RequestError:
    """Returns the problem of one job as a problem of its plan."""
    details = [FieldError(f"jobs.{number}.{detail.path}", detail.message) for detail in problem.details]
    return RequestError(problem.status, problem.code, f"jobs.{number}: {problem.message}", details, problem.headers)
