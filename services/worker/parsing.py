"""The reading of a delivered job: parsed, and checked against the config and the rights of its sender."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue, ValidationError

from breakwater.calls.assignment import Assignment, Parameters
from breakwater.calls.rules.output import OutputGuard
from breakwater.config import Agent
from breakwater.config.job_rules import JobRules
from breakwater.config.job_validation import validate_job
from breakwater.dialects.rules.native_requests import params_of
from breakwater.jobs.contract.job import Job
from breakwater.jobs.held_claims import CancelSignal, ClaimLease
from breakwater.jobs.queued_message import JobOrigin, document_of, generated_id, ids_in, legible_part, origin_of
from breakwater.jobs.rules.attribution import attribution_of
from breakwater.jobs.rules.ids import key_of
from breakwater.jobs.rules.ownership import (
    for_own_tenant,
    forbidden_field,
    job_digest,
    longest_job,
    may_be_answered_at,
)
from breakwater.jobs.rules.runs import run_of
from breakwater.jobs.rules.turns import CallerTurn, allowed_priority, priority_problem
from breakwater.jobs.store.executions import Claim
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.subjects import PROGRAM, Header
from breakwater.kernel.surrogates import read_whole
from breakwater.kernel.telemetry import tracing
from breakwater.kernel.validation import ambiguity, explain
from breakwater.limits.rules.ledger import cost_tags
from breakwater.redaction.rules.redact import id_objection
from breakwater.services.worker.context import WorkerContext

MAX_HEADERS = 32 * 1024
"""The most characters of a job's headers, which count towards the size limit of each message about the job."""


class _InvalidJobError(BreakwaterError):
    """A job can't be run. `job` is set if only the config rejects it."""

    def __init__(self, problem: str, job: Job | None = None) -> None:
        super().__init__(problem)
        self.job = job


class JobReader:
    """Reads the jobs of one agent."""

    def __init__(self, worker: WorkerContext, agent_name: str, agent: Agent) -> None:
        self._worker = worker
        self._config = worker.config
        self._limits = worker.limits
        self._agent_name = agent_name
        self._agent = agent
        self._output_guard = worker.output_guards.get(agent_name)
        self._parameters = Parameters.of(agent, {}, self._output_guard)
        """The parameters of a job that sets none."""
        embedding_guard = None if agent.guard is None else agent.guard.for_embeddings()
        self._embedding_agent = agent.model_copy(update={"guard": embedding_guard})

    def read(self, delivery: Delivery) -> Assignment:
        """Reads a delivered job. The assignment of an invalid one says what is wrong."""
        origin = origin_of(delivery, self._config.programs)
        try:
            job = self._valid_job(delivery, origin)
        except ValidationError as error:
            return self.as_invalid(delivery, error)
        except _InvalidJobError as error:
            return self.as_invalid(delivery, str(error), error.job)
        return self._assignment(delivery, origin, job, job)

    def as_invalid(self, delivery: Delivery, problem: str | ValidationError, job: Job | None = None) -> Assignment:
        """Describes a job that must not run because of `problem`. It is answered if its `reply_to` can be read.

        `job` is given if only the config rejects it.
        """
        origin = origin_of(delivery, self._config.programs)
        document = document_of(delivery.data)
        if isinstance(problem, ValidationError):
            problem = explain(problem, Job, document)
        legible_job = legible_part(document, origin, self._agent_name)
        own_id = ids_in(delivery, legible_job, origin).job_id
        if origin.execution_id is None and id_objection(self._config.redaction, own_id) is not None:
            # The id must not be stored, and an id that its sender may use for a good job is left to that.
            legible_job = legible_job.model_copy(update={"job_id": generated_id(delivery)})
        return self._assignment(delivery, origin, legible_job, job or delivery.data, problem)

    def _valid_job(self, delivery: Delivery, origin: JobOrigin) -> Job:
        """Parses and checks a job. Raises ValidationError, _InvalidJobError."""
        config = self._config
        limit = config.limits.max_body_bytes
        sender = origin.sender
        # `request` has checked a body that is not in its message.
        if delivery.body is None and len(delivery.data) > longest_job(limit):
            raise _InvalidJobError(f"the job has {len(delivery.data)} bytes; at most {limit} are accepted")
        if sum(map(len, delivery.headers.values())) + sum(map(len, delivery.headers)) > MAX_HEADERS:
            raise _InvalidJobError(f"the job's headers have more than {MAX_HEADERS} characters")
        job = read_whole(Job.model_validate_json, delivery.data)
        if (why := ambiguity(delivery.data)) is not None:
            raise _InvalidJobError(f"the job is not JSON: {why}")
        if job.agent != self._agent_name:
            raise _InvalidJobError(f"agent: {job.agent!r} was published on the subject of {self._agent_name!r}")
        takes_message_id = job.job_id is None and origin.execution_id is None
        header = delivery.headers.get(Header.MSG_ID) if takes_message_id else None
        if header is not None and (why := id_objection(config.redaction, header)) is not None:
            raise _InvalidJobError(f"{Header.MSG_ID.value}: {why}")
        if (problem := validate_job(config, self._limits(), job)) is not None:
            raise _InvalidJobError(f"{problem.path}: {problem.message}", job)
        # Check the rights of the sender. Those of an HTTP sender were checked at the API.
        if job.reply_to is not None and not may_be_answered_at(job.reply_to, sender):
            raise _InvalidJobError(f"reply_to: {job.reply_to!r} is not below the sender's own prefix")
        program = origin.program
        if program is not None:
            job = for_own_tenant(program, job)
            if (forbidden := forbidden_field(program, job.agent, job.tenant)) is not None:
                raise _InvalidJobError(f"{forbidden[0]}: the NATS user {sender!r} may only submit {forbidden[1]}", job)
        elif sender is not None and sender.startswith(PROGRAM) and subjects.user_of_job(delivery.subject) is not None:
            # Only checked over NATS: an HTTP sender is an API key, whose name may begin with the same prefix.
            raise _InvalidJobError(f"the config has no program {sender.removeprefix(PROGRAM)!r}")
        if origin.turn is None:
            of_program = None if program is None else program.priority
            if (problem := priority_problem(job.priority, self._agent.priority, of_program)) is not None:
                raise _InvalidJobError(f"priority: {problem}", job)
        return job

    def _assignment(
        self, delivery: Delivery, origin: JobOrigin, job: Job, content: Job | bytes, problem: str = ""
    ) -> Assignment:
        """Makes the assignment of a job. `content` is what the sender sent."""
        session_id = None if job.session_id is None else self._storable_session(job.session_id)
        ids = ids_in(delivery, job, origin, session_id)
        traceparent = delivery.headers.get(Header.TRACEPARENT)
        trace_id = None if problem else tracing.trace_id_of(traceparent)
        if trace_id is not None and origin.owner is not None:
            # Callers choose trace ids freely. The scope keeps a job out of another caller's run.
            trace_id = key_of(origin.scope, trace_id)
        # What answers a probe with a few tokens satisfies no schema.
        is_plain = job.api == "embeddings" or Header.PROBE in delivery.headers
        output_guard = None if is_plain else self._output_guard
        rules = self._agent.rules_for(job)
        assert isinstance(rules, JobRules)  # `validate_job` has refused others
        return Assignment(
            delivery=delivery,
            job=job,
            problem=problem,
            ids=ids,
            scope=origin.scope,
            digest=job_digest(content, origin.owner),
            run_id=run_of(ids, job.tenant, trace_id=trace_id),
            owner=origin.owner,
            submitted_by=origin.sender,
            attribution=attribution_of(job, origin.attribution),
            sender_regions=origin.residency,
            turn=self._turn(job, origin),
            agent_name=self._agent_name,
            agent=self._agent_for(job, rules),
            breaker=rules.breaker,
            parameters=self._parameters_for(job, output_guard),
            output_guard=output_guard,
            cost_tags=self._cost_tags(job, origin.tags) if job.metadata or origin.tags else {},
            claim=Claim.new(ids.execution_id, self._worker.id),
            lease=ClaimLease(CancelSignal(self._agent_name, origin.owner, job.tenant)),
            now=self._worker.steady_time(),
            traceparent=traceparent or tracing.new_traceparent(),
            trace_id=tracing.sampled_trace_id(traceparent),
        )

    def _turn(self, job: Job, origin: JobOrigin) -> CallerTurn:
        """Returns whose turn the job is. `request` has decided on the priority of a job over HTTP."""
        key, tenant, program = origin.sender or origin.owner or "", job.tenant or "", origin.program
        if origin.turn is not None:
            return CallerTurn(key, tenant, *origin.turn)
        of_program, weight = (None, 1) if program is None else (program.priority, program.weight)
        return CallerTurn(key, tenant, job.priority or allowed_priority(self._agent.priority, of_program), weight)

    def _agent_for(self, job: Job, rules: JobRules) -> Agent:
        """Returns the agent with the job's own rules."""
        guard = rules.guard
        agent = self._agent
        if job.api == "embeddings":
            guard = guard and guard.for_embeddings()
            agent = self._embedding_agent
        settings_of_job = {"guard": guard, "retry": rules.retry}
        job_settings = {name: setting for name, setting in settings_of_job.items() if setting is not None}
        return agent.model_copy(update=job_settings) if job_settings else agent

    def _parameters_for(self, job: Job, output_guard: OutputGuard | None) -> Parameters:
        if job.api == "embeddings" and job.api_request is not None:
            return Parameters.of_embeddings(self._agent, job.api_request)
        params = params_of(job)
        return Parameters.of(self._agent, params, output_guard) if params else self._parameters

    def _cost_tags(self, job: Job, key_tags: Mapping[str, str]) -> dict[str, str]:
        """Returns the job's cost tags, redacted. Those of its key replace its own."""
        tags: dict[str, JsonValue] = {**job.metadata, **key_tags}
        keys = [key for key in self._config.cost_tags if key in tags]
        redacted = self._worker.redactor.json({key: tags[key] for key in keys})
        return cost_tags(keys, redacted) if isinstance(redacted, dict) else {}

    def _storable_session(self, session_id: str) -> str:
        """Returns a session's id as it may be stored in the id of a run. The same session has the same substitute."""
        session: JsonValue = {"session_id": session_id}
        is_storable = self._worker.redactor.json(session) == session
        return session_id if is_storable else self._worker.cipher.pseudonym(session_id)
