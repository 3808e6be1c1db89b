"""`GET /api/v1/jobs`: the jobs that have not ended, page by page.

JOBS and PARKED have one message for each of them, and Redis has their claims. An agent's consumer has delivered the
messages of JOBS up to a sequence: the jobs of these are in progress, and all later ones are queued. So a page is read
by sequence, and costs the same however many jobs are queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from pydantic import JsonValue

from breakwater.config import Config
from breakwater.identity.operations import ApiRequest, operation, utc_now
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.current_jobs import (
    CurrentJob,
    CurrentJobCounts,
    CurrentJobList,
    CurrentJobQuery,
    JobState,
    JobWait,
)
from breakwater.jobs.queued_message import document_of, ids_of_unread, origin_of
from breakwater.jobs.rules.chat_messages import fields
from breakwater.jobs.rules.current_jobs import (
    PHASES,
    STATES_IN,
    WAITS_FOR_TURN,
    ClaimState,
    ListPlace,
    Phase,
    held_state,
    is_parked,
)
from breakwater.jobs.rules.ownership import may_see
from breakwater.jobs.rules.previews import PREVIEW_CHARACTERS, prompt_in
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.claim_states import claim_states
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import due_at, queued_at, trusted_headers
from breakwater.kernel.nats.lookup import Backlog, Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import Cipher, DecryptionError
from breakwater.kernel.types import is_identifier, ms_from_time, time_from_ms
from breakwater.kernel.validation import FieldError
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.rules.scanner import holds_key

MAX_READ = 500
"""The most messages that a request reads, with those that it does not list."""

MAX_COUNTED = 200
"""The most jobs in progress of which it is counted how many run, and how many wait."""


@dataclass(frozen=True, slots=True)
class CurrentJobRoutes:
    """The jobs that have not ended, for people and for those who submit them."""

    config: Config
    bus: Lookup
    redis: Redis
    cipher: Cipher
    redactor: Redactor

    @operation(
        "GET",
        "/api/v1/jobs",
        tag="jobs",
        summary="Jobs that have not ended",
        description="First the jobs in progress, then parked ones, then queued ones; of each agent, the oldest first. "
        "Keys with the scope `read` see all jobs, and others see those whose results they may read. The list is of "
        "this moment: a job that moves on between two pages may be on both of them, or on neither.",
        result="A page of the jobs that match.",
        errors={503: "NATS or Redis is unavailable (`unavailable`)."},
    )
    async def list_jobs(self, request: ApiRequest[CurrentJobQuery]) -> CurrentJobList:
        """Lists a page of the jobs that have not ended. Raises RequestError: 422, the cursor is invalid."""
        after = _place(request.input.after)
        page = _Page(self, request.input, request.caller, await _Queues.read(self.bus))
        next_place = await page.read(after)
        counts = await page.count() if request.input.counts and page.sees_all else None
        return CurrentJobList(
            jobs=tuple(page.jobs), next=None if next_place is None else next_place.text, counts=counts, at=utc_now()
        )


@dataclass(frozen=True, slots=True)
class _Queues:
    """The queues of all agents that have messages on JOBS."""

    subjects: Mapping[str, tuple[str, ...]]
    """By agent, the subjects that have messages."""
    backlogs: Mapping[str, Backlog]
    """By agent, the state of its consumer; agents whose consumer does not exist yet are missing."""

    @classmethod
    async def read(cls, bus: Lookup) -> _Queues:
        """Reads them. Raises BusError."""
        subjects_of: dict[str, list[str]] = {}
        for subject in await bus.counts(Stream.JOBS, "bw.jobs.>"):
            subjects_of.setdefault(subjects.agent_of_job(subject), []).append(subject)
        agents = sorted(subjects_of)
        backlogs = await asyncio.gather(*(bus.backlog(Stream.JOBS, worker_consumer(agent)) for agent in agents))
        return cls(
            {agent: tuple(sorted(subjects_of[agent])) for agent in agents},
            {agent: backlog for agent, backlog in zip(agents, backlogs, strict=True) if backlog is not None},
        )


@dataclass(frozen=True, slots=True)
class _Segment:
    """The messages of one agent in one part of the list, or all on PARKED."""

    phase: Phase
    agent: str
    """Empty for parked jobs of all agents."""
    subjects: tuple[str, ...]
    start: int = 1
    end: int | None = None
    """The last sequence; None for no limit."""
    expected: int | None = None
    """The number of messages; None if that is not known."""

    @property
    def stream(self) -> Stream:
        """The stream that has them."""
        return Stream.PARKED if self.phase == "parked" else Stream.JOBS

    def start_from(self, place: ListPlace | None) -> int | None:
        """Returns where a page that begins at a place begins here; None if it begins after this segment."""
        if place is None:
            return self.start
        segment, begin = ((PHASES.index(at.phase), at.agent) for at in (self, place))
        if segment < begin:
            return None
        return max(self.start, place.sequence) if segment == begin else self.start


@dataclass(frozen=True, slots=True)
class _JobMessage:
    """The stored message of a job, and what it says of it."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    sequence: int
    published_at: datetime

    @classmethod
    def of(cls, stored: StoredMessage, cipher: Cipher) -> _JobMessage:
        """Reads a message; without its texts if they can't be decrypted."""
        data = stored.data
        with suppress(DecryptionError):
            data = cipher.decrypt_document(data)
        headers = trusted_headers(stored.subject, stored.headers)
        return cls(stored.subject, data, headers, stored.sequence, stored.stored_at)


@dataclass(frozen=True, slots=True)
class _JobFacts:
    """The facts about a job in its message."""

    message: _JobMessage
    document: JsonValue
    agent: str
    execution_id: str
    job_id: str
    tenant: str | None
    owner: str | None
    submitted_by: str | None


class _Page:
    """One page for one caller."""

    def __init__(self, needs: CurrentJobRoutes, query: CurrentJobQuery, caller: Caller, queues: _Queues) -> None:
        self._needs = needs
        self._query = query
        self._caller = caller
        self._queues = queues
        self._redactor = replace(needs.redactor, max_length=PREVIEW_CHARACTERS)
        self._listed_ids: set[str] = set()
        self.jobs: list[CurrentJob] = []
        self.sees_all = caller.may(("read",))

    async def read(self, begin: ListPlace | None) -> ListPlace | None:
        """Reads the page that begins at a place. Returns where the next one begins; None if it is the last."""
        state = self._query.state
        limit = self._query.limit
        unread = MAX_READ
        for phase in PHASES:
            for segment in self._segments(phase) if state is None or state in STATES_IN[phase] else ():
                start = segment.start_from(begin)
                while start is not None:
                    if len(self.jobs) == limit or unread <= 0:
                        return ListPlace(segment.phase, segment.agent, start)
                    at_once = limit if self._leaves_out else limit - len(self.jobs)
                    messages, start = await self._messages(segment, start, min(at_once, unread))
                    unread -= len(messages)
                    if (full_at := await self._list(segment.phase, messages)) is not None:
                        return ListPlace(segment.phase, segment.agent, full_at)
        return None

    async def count(self) -> CurrentJobCounts:
        """Counts the jobs of the agent in the query, or of all agents."""
        backlogs = [self._queues.backlogs[agent] for agent in self._agents() if agent in self._queues.backlogs]
        in_progress = sum(backlog.in_progress for backlog in backlogs)
        [parked_segment] = self._segments("parked")
        parked, parked_after = await self._needs.bus.page(Stream.PARKED, parked_segment.subjects[0], 1, 1)
        running = await self._count_running() if in_progress <= MAX_COUNTED else None
        return CurrentJobCounts(
            running=running,
            waiting=None if running is None else max(in_progress - running, 0),
            in_progress=in_progress,
            parked=len(parked) + parked_after,
            queued=sum(backlog.waiting for backlog in backlogs),
        )

    async def _count_running(self) -> int:
        running = 0
        for segment in self._segments("held"):
            start: int | None = segment.start
            while start is not None:
                messages, start = await self._messages(segment, start, MAX_COUNTED)
                job_facts = [self._facts(message) for message in messages]
                now, claims = await claim_states(self._needs.redis, [job.execution_id for job in job_facts])
                running += sum(_held_state(claim, now)[0] == "running" for claim in claims)
        return running

    @property
    def _leaves_out(self) -> bool:
        """True if not all messages that are read are listed."""
        query = self._query
        return query.tenant is not None or query.key is not None or query.state is not None or not self.sees_all

    def _agents(self) -> Iterable[str]:
        wanted = self._query.agent
        if wanted is not None:
            return [wanted] if wanted in self._queues.subjects else []
        allowed = () if self.sees_all else self._caller.agents
        return [agent for agent in self._queues.subjects if not allowed or agent in allowed]

    def _segments(self, phase: Phase) -> Iterable[_Segment]:
        if phase == "parked":
            agent = self._query.agent or ""
            subject = f"bw.parked.{subjects.encode_token(agent)}.*" if agent else "bw.parked.>"
            yield _Segment(phase, agent, (subject,))
            return
        for agent in self._agents():
            agent_subjects = self._queues.subjects[agent]
            backlog = self._queues.backlogs.get(agent)
            if phase == "queued":
                yield _Segment(phase, agent, agent_subjects, 1 if backlog is None else backlog.delivered + 1)
            elif backlog is not None and backlog.in_progress:
                begin = backlog.acknowledged + 1
                yield _Segment(phase, agent, agent_subjects, begin, backlog.delivered, backlog.in_progress)

    async def _messages(self, segment: _Segment, start: int, limit: int) -> tuple[list[StoredMessage], int | None]:
        """Reads the next messages of a segment, and the sequence from which to read on; None at its end."""
        at_most = limit if segment.expected is None else min(limit, segment.expected)
        read = partial(self._needs.bus.page, segment.stream)
        pages = await asyncio.gather(*(read(subject, start, at_most) for subject in segment.subjects))
        # Beyond the end of a page that goes on, a message of its subject may be missing between those of others.
        ends = [messages[-1].sequence for messages, following in pages if following and messages]
        if segment.end is not None:
            ends.append(segment.end)
        last = min(ends, default=None)
        merged = sorted(
            (message for messages, _ in pages for message in messages if last is None or message.sequence <= last),
            key=lambda message: message.sequence,
        )
        if len(merged) > limit:
            return merged[:limit], merged[limit - 1].sequence + 1
        return merged, None if last is None or last == segment.end else last + 1

    async def _list(self, phase: Phase, messages: Sequence[StoredMessage]) -> int | None:
        """Lists the jobs of messages that match. Returns the sequence at which the page was full; None if it is not."""
        matching = [job for job in map(self._facts, messages) if self._matches(job)]
        now, claims = await claim_states(self._needs.redis, [job.execution_id for job in matching])
        for job, claim in zip(matching, claims, strict=True):
            if len(self.jobs) == self._query.limit:
                return job.message.sequence
            state_and_wait = await self._state(phase, job, claim, now)
            if state_and_wait is None or job.execution_id in self._listed_ids:
                continue
            state, wait = state_and_wait
            if self._query.state in (None, state):
                self._listed_ids.add(job.execution_id)
                self.jobs.append(self._current_job(job, claim, state, wait, now))
        return None

    async def _state(
        self, phase: Phase, job: _JobFacts, claim: ClaimState, now: datetime
    ) -> tuple[JobState, JobWait | None] | None:
        """Returns the state of a job and what it waits for; None if it has ended, or is listed elsewhere."""
        if claim.ended:
            return None
        if phase == "held":
            return _held_state(claim, now)
        if phase == "queued":
            # A worker may have taken it meanwhile, or another message of the same job.
            return _held_state(claim, now) if claim.claimed else ("queued", None)
        if not is_parked(claim, job.message.sequence) or (not claim.exists and await self._is_decided(job)):
            return None
        if Header.TURN.value in job.message.headers:
            return "parked", WAITS_FOR_TURN.model_copy(update={"since": job.message.published_at})
        due = due_at(job.message.headers)
        wait = claim.wait or JobWait(kind="back_off", message="it is due again at this time")
        return "parked", wait.model_copy(update={"until": due})

    async def _is_decided(self, job: _JobFacts) -> bool:
        """Returns True if a job has ended, whose message on PARKED is kept until it would be due."""
        record = f"bw.executions.*.{subjects.encode_token(job.execution_id)}"
        return await self._needs.bus.last(Stream.EVENTS, record) is not None

    def _facts(self, stored: StoredMessage) -> _JobFacts:
        message = _JobMessage.of(stored, self._needs.cipher)
        document = document_of(message.data)
        origin = origin_of(message, self._needs.config.programs)
        ids = ids_of_unread(message, document)
        is_on_jobs = message.subject.startswith("bw.jobs.")
        agent = subjects.agent_of_job(message.subject) if is_on_jobs else subjects.parts_of_parked(message.subject)[0]
        tenant = _name_in(document, "tenant")
        if tenant is None and origin.program is not None and len(origin.program.tenants) == 1:
            tenant = origin.program.tenants[0]
        return _JobFacts(message, document, agent, ids.execution_id, ids.job_id, tenant, origin.owner, origin.sender)

    def _matches(self, job: _JobFacts) -> bool:
        query = self._query
        if query.tenant not in (None, job.tenant) or query.key not in (None, job.submitted_by):
            return False
        return self.sees_all or may_see(self._caller, agent=job.agent, tenant=job.tenant, owner=job.owner)

    def _current_job(
        self, job: _JobFacts, claim: ClaimState, state: JobState, wait: JobWait | None, now: datetime
    ) -> CurrentJob:
        message = job.message
        queued = time_from_ms(ms_from_time(queued_at(message.headers, message.published_at)))
        checkpoint = claim.checkpoint
        model = None if checkpoint is None else checkpoint.current_model
        agent = self._needs.config.agents.get(job.agent)
        if model is None:
            model = _name_in(job.document, "model") or (None if agent is None else agent.model)
        prompt = prompt_in(job.document) if agent is not None and agent.persist_prompts else None
        return CurrentJob(
            execution_id=job.execution_id,
            job_id=job.job_id,
            agent=job.agent,
            tenant=job.tenant,
            submitted_by=job.submitted_by,
            state=state,
            queued_at=queued,
            age_ms=max(0, ms_from_time(now) - ms_from_time(queued)),
            attempt=None if checkpoint is None else checkpoint.last_number,
            model=model,
            wait=wait,
            cancelling=claim.cancelling,
            prompt=None if prompt is None else self._redactor.text(prompt),
        )


def _held_state(claim: ClaimState, now: datetime) -> tuple[JobState, JobWait | None]:
    return held_state(claim, now, LIVENESS.missed_s)


def _name_in(document: JsonValue, name: str) -> str | None:
    value = fields(document).get(name)
    return value if isinstance(value, str) and is_identifier(value) and not holds_key(value) else None


def _place(cursor: str | None) -> ListPlace | None:
    try:
        return None if cursor is None else ListPlace.parse(cursor)
    except ValueError as error:
        mistake = FieldError(path="after", message=str(error))
        raise RequestError(422, "invalid_query", f"after: {error}", [mistake]) from None
