"""`/api/v1/jobs`: submitting jobs, and looking up or waiting for their results."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from breakwater.identity.auth import caller_of, on_leaving
from breakwater.identity.operations import TOO_MANY, operation
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.api.intake import JobIntake, accepted_response
from breakwater.jobs.api.results import JobLookup, job_is_of, status_of, unknown_job
from breakwater.jobs.api.submission_trace import traced_submission
from breakwater.jobs.contract.execution import Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.contract.submission import AcceptedJob, SubmitQuery, UndecidedJob
from breakwater.jobs.rules.ids import possible_executions
from breakwater.jobs.rules.record import without_figures
from breakwater.kernel.http.bodies import read_body, release_room
from breakwater.kernel.http.parsing import read_job, wait_s_of
from breakwater.kernel.http.problems import unavailable
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.types import is_identifier

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class JobRoutes:
    """The routes of jobs, for the programs that submit them."""

    intake: JobIntake
    lookup: JobLookup
    max_body_bytes: int

    @operation(
        "POST",
        "/api/v1/jobs",
        tag="jobs",
        summary="Submit a job",
        description="Responds once the job is stored on the bus. `job_id` makes it idempotent: the same id again "
        "returns the first execution from its record, whatever else the second body contains, including its agent.",
        query=SubmitQuery,
        headers={
            "Idempotency-Key": "The job's id, if the body has none: 1 to 128 characters of printable ASCII.",
            "traceparent": "W3C trace context that the job becomes a part of. Jobs of one trace are one run, if they "
            "name no task and no session.",
        },
        body=Job,
        results={
            200: ("Ended within `wait_s`; `status` says how.", Result),
            202: ("Accepted. `Location` is where the result will be.", AcceptedJob),
        },
        errors={
            404: "The agent is not configured (`unknown_agent`).",
            409: "The job id belongs to a different job, or to another key (`id_conflict`).",
            422: "The body is not a job (`invalid_job`), or the query is wrong (`invalid_query`).",
            429: TOO_MANY,
            503: "Nothing was accepted: NATS is unavailable (`unavailable`) or full (`refused`); or the breakers of "
            "all the agent's models are open, and it has `refuse_when_open` (`agent_unavailable`; without Retry-After "
            "if all of them are isolated). This never applies to dry runs and jobs that were accepted before.",
        },
    )
    async def submit_job(self, request: Request) -> Response:
        """Responds with 202 once the job is stored on the bus, or 200 with its result if that comes within `wait_s`."""
        with traced_submission(request, "/api/v1/jobs") as trace:
            caller = caller_of(request)
            wait_s = wait_s_of(request.scope["query_string"])
            body = await read_body(request, self.max_body_bytes)
            idempotency_key = request.headers.get("idempotency-key")
            sent = self.intake.authorize(caller, read_job(body, Job, "job"), body, idempotency_key, new_id())
            del body  # it may have megabytes, and the result may take minutes
            sent = await self.intake.compare(sent)
            trace.set_job(sent.job.agent, sent.execution_id)
            await self.intake.admit(sent)
            if wait_s is None:
                response = accepted_response(sent, duplicate=await self.intake.store(sent, trace.traceparent))
            else:
                awaited, duplicate = await self.intake.follow(request, sent, trace.traceparent, wait_s)
                with awaited:
                    sent.drop_texts()
                    release_room(request)
                    result = await awaited.decided
                    if result is not None:
                        result = await self.lookup.explain(caller, result)
                response = (
                    accepted_response(sent, duplicate=duplicate)
                    if result is None
                    else Response(result, media_type=_JSON)
                )
            trace.set_status(response.status_code)
        return response

    @operation(
        "GET",
        "/api/v1/jobs/{job_id}",
        tag="jobs",
        summary="The result or the status of a job",
        description="The result for 24 hours; after that the execution's record, where its output is redacted.",
        query=SubmitQuery,
        results={200: ("Ended.", Result), 202: ("Accepted, and not ended yet.", UndecidedJob)},
        errors={
            404: "There is no such job (`unknown_job`).",
            429: TOO_MANY,
            503: "The status can't be read now (`unavailable`).",
        },
    )
    async def show_job(self, request: Request) -> Response:
        """Responds with 200 and the result or the record, 202 while the job is undecided, or 404."""
        requested_id = str(request.path_params["job_id"])
        caller = caller_of(request)
        if not is_identifier(requested_id):
            raise unknown_job(None)
        wait_s = wait_s_of(request.scope["query_string"])
        try:
            job = await self.lookup.find(caller, requested_id)
            if job is None:
                dry_run = await self.lookup.accepted.dry_run(possible_executions(caller, requested_id))
                job = None if dry_run is None else await self.lookup.find(caller, dry_run)
            if job is None:
                raise unknown_job(requested_id)
            execution_id = job.execution_id
            decided = job.decided
            if decided is None and wait_s is not None:
                decided = await self._wait_for_result(request, caller, execution_id, wait_s)
            if decided is not None:
                decided = await self.lookup.explain(caller, decided)
                return Response(decided, media_type=_JSON)
            attempts = tuple(map(without_figures, await self.lookup.results.attempts(execution_id)))
        except (BusError, StateUnavailableError) as error:
            raise unavailable("unavailable", f"the job's status cannot be read now: {error}") from error
        body = UndecidedJob(job_id=job.job_id, execution_id=execution_id, attempts=attempts).json_bytes()
        return Response(body, 202, media_type=_JSON)

    async def _wait_for_result(
        self, request: Request, caller: Caller, execution_id: str, wait_s: float
    ) -> bytes | None:
        with self.lookup.waiters.listen(execution_id, wait_s=wait_s, check_first=True) as awaited:
            awaited.at_end(on_leaving(request, awaited.leave))
            decided = await awaited.decided
        if decided is not None and not job_is_of(caller, status_of(decided)):
            raise unknown_job(str(request.path_params["job_id"]))
        return decided
