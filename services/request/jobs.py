"""`/api/v1/jobs`: submitting jobs, and waiting for or looking up their results."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from urllib.parse import parse_qsl, quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from breakwater import background
from breakwater.bus.errors import BusError, BusUnavailable, PublishRefused
from breakwater.bus.publisher import PUBLISH_TIMEOUT_S, Publisher, Stored
from breakwater.config import Config, validate_job
from breakwater.contracts import subjects
from breakwater.contracts.execution import Progress
from breakwater.contracts.job import ID_ENTROPY_BYTES, Job, new_job_id
from breakwater.contracts.subjects import PROGRAM, REPLIES, Header, Stream
from breakwater.contracts.submission import UndecidedJob
from breakwater.contracts.types import is_full_id
from breakwater.contracts.validation import FieldError
from breakwater.outage import Outage
from breakwater.policy.callers import Caller
from breakwater.policy.ownership import (
    document_as_chosen,
    for_own_tenant,
    has_scoped_ids,
    is_made,
    may_be_answered_at,
    may_see,
    names_of,
    outside,
    owner_of,
    scope_of,
    scoped_execution,
    shown_to,
)
from breakwater.policy.record import without_figures
from breakwater.state.accepted import LINGER_S, Accepted, JobStatus
from breakwater.state.connection import StateUnavailable
from services.request.agents import Agents
from services.request.auth import caller_of
from services.request.observe import SubmissionTrace, submitting
from services.request.parsing import Submission, invalid_job, read_body, read_job, submission, suggestion, with_field
from services.request.problems import Problem, unavailable, unknown_job
from services.request.queue_quota import QueueQuota
from services.request.results import Answer, ResultReader, Waiters

MAX_WAIT_S = 300.0

ACCEPT_TIMEOUT_S = 8.0
"""For the acknowledgement of a job, a second try included."""

MAX_REMEMBERED = 10_000
"""Jobs with ids that callers chose, of which this process knows where in JOBS they stand."""

LOOK_UP_S = 1.0
"""For what is known of an id that a job brings: beyond it, the worker alone finds that it is that of another job."""

_JSON = "application/json"


class ForeignIdError(Exception):
    """An id that its sender did not choose is that of another owner's job, which it must not learn."""


class Queue:
    """Puts jobs on JOBS. One is accepted when JetStream has acknowledged it, and not before."""

    def __init__(self, publisher: Publisher, shares: QueueQuota) -> None:
        self._publisher = publisher
        self._shares = shares
        self._outage = Outage("accepting jobs")
        self._stored: dict[str, tuple[str, int]] = {}
        """On which subject and where in JOBS, by job id."""
        self._under_way: dict[str, tuple[asyncio.Lock, int]] = {}
        """The ids that are being accepted, and by how many requests."""

    async def put(self, sent: Submission, traceparent: str | None) -> bool:
        """Publishes a job, unless it waits there already.

        JOBS itself takes every message. Where another process has put the same job there, the worker makes them one.

        Args:
            sent: the job.
            traceparent: the W3C trace context it belongs to; None where nobody traces it yet.

        Returns:
            Whether this process has put a job with this id there before, which still stands there.

        Raises:
            Problem: 503, it was not accepted.
        """
        if sent.id_made_here:
            await self._store(sent, traceparent)
            return False
        async with self._one_at_a_time(sent.job_id):
            if await self._stands(sent.job_id):
                return True
            stored = await self._store(sent, traceparent)
            self._stored[sent.job_id] = subjects.job(sent.job.agent), stored.sequence
            if len(self._stored) > MAX_REMEMBERED:
                del self._stored[next(iter(self._stored))]
            return False

    async def _stands(self, job_id: str) -> bool:
        """Whether a job stands in JOBS, where this process has put it; not where that can't be known now."""
        subject, sequence = self._stored.get(job_id, ("", 0))
        if not sequence:
            return False
        with suppress(BusError):
            found = await self._shares.lookup.next(Stream.JOBS, subject, sequence)
            message_id = None if found is None else found.headers.get(Header.MSG_ID.value, "")
            return message_id is not None and message_id.rpartition("/")[2] == subjects.encode_token(job_id)
        return False

    @asynccontextmanager
    async def _one_at_a_time(self, job_id: str) -> AsyncGenerator[None]:
        """Puts jobs of one id there one after the other: each sees that there was one before."""
        lock, users = self._under_way.get(job_id, (asyncio.Lock(), 0))
        self._under_way[job_id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            _, users = self._under_way.pop(job_id)
            if users > 1:
                self._under_way[job_id] = lock, users - 1

    async def _store(self, sent: Submission, traceparent: str | None) -> Stored:
        if not self._shares.has_room(sent.job.agent, len(sent.payload)):
            what = f"the jobs of agent {sent.job.agent!r} that wait take its whole share of the queue"
            raise unavailable("refused", f"the job was not accepted: {what}; send it again when some are done")
        headers = {Header.MSG_ID.value: subjects.message_id(sent.job.agent, sent.job_id)}
        if traceparent is not None:
            headers[Header.TRACEPARENT.value] = traceparent
        if sent.id_made_here:
            headers[Header.UNIQUE_ID.value] = "1"
        # What has no such mark, the worker takes for a program's where its sender is called like one.
        if sent.submitted_by is None or sent.submitted_by.startswith(PROGRAM) or has_scoped_ids(sent.job):
            headers[Header.SCOPED_IDS.value] = "1"
        if sent.owner is not None:
            headers[Header.OWNER.value] = subjects.encode_token(sent.owner)
        if sent.submitted_by is not None:
            headers[Header.SUBMITTED_BY.value] = subjects.encode_token(sent.submitted_by)
        if sent.by_operator and sent.job.dry_run:
            headers[Header.OPERATOR.value] = "1"
        try:
            stored = await self._publish(subjects.job(sent.job.agent), sent.payload, headers)
        except BusUnavailable as error:
            self._outage.failed(error)
            raise unavailable("unavailable", f"the job was not accepted: {error}") from error
        except PublishRefused as error:
            raise unavailable("refused", f"the job was not accepted: {error}") from error
        self._outage.worked()
        self._shares.add(sent.job.agent, len(sent.payload))
        return stored

    async def announce_queued(self, sent: Submission) -> None:
        """Publishes as progress that a job is queued. The job is stored already, so a failure is ignored."""
        step = Progress(
            execution_id=sent.job_id,
            agent=sent.job.agent,
            parent_execution_id=sent.job.parent_execution_id,
            state="queued",
            at=datetime.now(UTC),
        )
        with suppress(BusUnavailable):
            await self._publisher.transient(subjects.progress(sent.job.agent, sent.job_id), step)

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> Stored:
        begun = time.monotonic()
        try:
            return await self._publisher.job(subject, payload, headers, timeout_s=PUBLISH_TIMEOUT_S)
        except BusUnavailable:
            # The first may be stored, if only its acknowledgement was lost: the id is not called unique any more.
            again = {name: value for name, value in headers.items() if name != Header.UNIQUE_ID.value}
            left_s = begun + ACCEPT_TIMEOUT_S - time.monotonic()
            return await self._publisher.job(subject, payload, again, timeout_s=max(left_s, 0.1))


class Jobs:
    """`/api/v1/jobs`."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        results: ResultReader,
        waiters: Waiters,
        accepted: Accepted,
        agents: Agents,
    ) -> None:
        self._agents = agents
        self._names = frozenset(config.agents)
        self._config = config
        self._limit = config.limits.max_body_bytes
        self._queue = queue
        self._results = results
        self._waiters = waiters
        self._accepted = accepted

    async def submit(self, request: Request) -> Response:
        """POST: 202 once the job is safe on the bus, or 200 with its result where that came within `wait_s`."""
        with submitting(request, "/api/v1/jobs") as trace:
            response = await self._submit(request, trace)
            trace.answered(response.status_code)
        return response

    async def _submit(self, request: Request, trace: SubmissionTrace) -> Response:
        wait_s = wait_s_of(request.scope["query_string"])
        body = await read_body(request, self._limit)
        sent = self.prepare(
            caller_of(request), read_job(body), body, request.headers.get("idempotency-key"), make_job_id()
        )
        sent = await self.checked(sent)
        trace.of(sent.job.agent, sent.job_id)
        if wait_s is None:
            await self._refuse_when_open(sent)
            return await self.accept(sent, trace.traceparent)
        acceptance, result = await self.run(request, sent, trace.traceparent, wait_s)
        return acceptance if result is None else Response(shown_result(caller_of(request), result), media_type=_JSON)

    def prepare(self, caller: Caller, job: Job, body: bytes, idempotency_key: str | None, made_id: str) -> Submission:
        """A job that may be published.

        Args:
            caller: who sends it.
            job: the job.
            body: the same, as it was written.
            idempotency_key: its id, where the job has none.
            made_id: the same where there is no idempotency key either.

        Raises:
            Problem: 403, 404 or 422, the key may not send this job, or its agent can't run it.
        """
        job, body = _for_tenant_of(caller, job, body)
        self._check_agent(caller, job)
        _check_sender(caller, job)
        if (problem := validate_job(self._config, job)) is not None:
            raise invalid_job([FieldError(path=problem.path, message=problem.message)])
        whose = {"owner": owner_of(caller), "scope": scope_of(caller, job.tenant)}
        sent = submission(job, body, idempotency_key=idempotency_key, made_id=made_id, **whose)
        return replace(sent, submitted_by=caller.name, by_operator=caller.may(("operate",)))

    async def run(
        self, request: Request, sent: Submission, traceparent: str | None, wait_s: float
    ) -> tuple[Response, bytes | None]:
        """Publishes a job, and waits for its result.

        Returns:
            The acceptance; and the result, or None where it did not come in time, the client has left, or the process
            stops.

        Raises:
            Problem: 409 or 503, it was not accepted.
        """
        async with self.following(request, sent, traceparent, wait_s) as (acceptance, deciding, _):
            return acceptance, await deciding

    @asynccontextmanager
    async def following(
        self, request: Request, sent: Submission, traceparent: str | None, wait_s: float
    ) -> AsyncGenerator[tuple[Response, asyncio.Task[bytes | None], asyncio.Future[None]]]:
        """Publishes a job; gives the acceptance, and while the block runs the task that waits for the result.

        And a future that is done when the client has left. The task raises Problem and returns as `run` does.
        """
        await self._refuse_when_open(sent)
        deadline = time.monotonic() + wait_s
        async with AsyncExitStack() as waiting:
            try:
                answer = await waiting.enter_async_context(self._waiters.listening(subjects.result(sent.job_id)))
            except BusUnavailable as error:
                raise unavailable("unavailable", f"the job was not accepted: {error}") from error
            acceptance = await self.accept(sent, traceparent)
            left = asyncio.ensure_future(_disconnected(request))
            deciding = asyncio.create_task(self._decided(sent, answer, left, deadline))
            try:
                yield acceptance, deciding, left
            finally:
                left.cancel()
                await background.stop(deciding)

    async def _decided(
        self, sent: Submission, answer: Answer, left: asyncio.Future[None], deadline: float
    ) -> bytes | None:
        # Of an id that others may have used, the result may be stored already, and would not be published again.
        result = await self._results.wait(sent.job_id, answer, left, deadline, look_now=not sent.id_made_here)
        if result is not None and not sent.id_made_here:
            _refuse_conflict(sent, result)
        return result

    async def show(self, request: Request) -> Response:
        """GET of one: 200 with the result or the record, 202 while it is not decided, also after `wait_s`; 404."""
        given, caller = str(request.path_params["job_id"]), caller_of(request)
        if not is_full_id(given):
            raise unknown_job(None)
        wait_s = wait_s_of(request.scope["query_string"])
        try:
            found = await find_job(caller, given, self._results, self._accepted)
            if found is None and (dry_run := await self._accepted.dry_run(names_of(caller, given))) is not None:
                found = await find_job(caller, dry_run, self._results, self._accepted)
            if found is None:
                raise unknown_job(given)
            job_id, decided = found
            if decided is None and wait_s is not None:
                decided = await self._awaited(request, job_id, time.monotonic() + wait_s)
            if decided is not None:
                return Response(shown_result(caller, decided), media_type=_JSON)
            attempts = tuple(map(without_figures, await self._results.attempts(job_id)))
        except (BusError, StateUnavailable) as error:
            raise unavailable("unavailable", f"the job's status cannot be read now: {error}") from error
        body = UndecidedJob(job_id=job_id, execution_id=job_id, attempts=attempts).json_bytes()
        return Response(shown_result(caller, body), 202, media_type=_JSON)

    async def _awaited(self, request: Request, job_id: str, deadline: float) -> bytes | None:
        left = asyncio.ensure_future(_disconnected(request))
        try:
            async with self._waiters.listening(subjects.result(job_id)) as answer:
                found = await self._results.wait(job_id, answer, left, deadline, look_now=True)
        finally:
            left.cancel()
        if found is not None and not job_is_of(caller_of(request), found, None):
            raise unknown_job(job_id)
        return found

    async def accept(self, sent: Submission, traceparent: str | None) -> Response:
        """Publishes a job. Raises Problem: 409 or 503, it was not accepted."""
        sent = await self.checked(sent)
        job, known = sent.job, sent.known
        duplicate = known is not None and known.taken and job.reply_to is None
        if not duplicate and (duplicate := await self._queue.put(sent, traceparent)):
            try:
                await self.refuse_other_job(sent, just_now=True)
            except ForeignIdError:
                raise _id_conflict(sent) from None
            except (BusUnavailable, StateUnavailable) as error:
                raise unavailable("unavailable", f"whether this is the same job cannot be read now: {error}") from error
        if known is None and not duplicate:
            digest, plan_id = None if sent.id_made_here else sent.digest, None if job.dry_run else job.plan_id
            self._accepted.mark(
                sent.job_id, job.agent, tenant=job.tenant, owner=sent.owner, digest=digest, plan_id=plan_id
            )
        duplicate = duplicate or known is not None
        if not duplicate:
            await self._queue.announce_queued(sent)
        shown_id = sent.shown_id
        if job.dry_run and shown_id != sent.job_id:
            with suppress(StateUnavailable):
                await self._accepted.note_dry_run(scoped_execution(shown_id, sent.scope), sent.job_id)
        body = {"job_id": shown_id, "execution_id": shown_id, "status": "accepted", "duplicate": duplicate}
        headers = {"Location": f"/api/v1/jobs/{quote(shown_id, safe='')}"}
        return Response(orjson.dumps(body), 202, headers, _JSON)

    async def checked(self, sent: Submission) -> Submission:
        """A job whose id is not that of another one. Raises Problem: 409, it is.

        Where an id with the form of a made one is another owner's, the sender must not learn that: it names a job of
        its own.
        """
        if sent.id_made_here or sent.checked:
            return sent
        known: JobStatus | None = None
        # Where nothing can be looked up, the job is accepted, and the worker compares.
        with suppress(BusUnavailable, StateUnavailable, TimeoutError):
            async with asyncio.timeout(LOOK_UP_S):
                try:
                    known = await self.refuse_other_job(sent, just_now=False)
                except ForeignIdError:
                    return await self.checked(sent.with_own_name())
        return replace(sent, checked=True, known=known)

    async def _refuse_when_open(self, sent: Submission) -> None:
        refusal = await self._agents.refusal(sent)
        if refusal is not None and not await self.is_repeated(sent):
            raise refusal

    async def is_repeated(self, sent: Submission) -> bool:
        """Whether the job was accepted before: its sender gets its status, whatever state its agent is in."""
        if sent.id_made_here:
            return False
        try:
            return await self._results.decided(sent.job_id) is not None or await self._accepted.known(sent.job_id)
        except (BusUnavailable, StateUnavailable):
            return False

    async def refuse_other_job(self, sent: Submission, *, just_now: bool) -> JobStatus | None:
        """What is known of the job, which was sent before; None where it was not.

        Args:
            sent: the job.
            just_now: another process may have accepted it at this moment.

        Raises:
            Problem: 409, the id is that of another job.
            ForeignIdError: it has the form of a made id, and is that of another owner's job.
            BusUnavailable: not known.
            StateUnavailable: not known.
        """
        decided = await self._results.decided(sent.job_id)
        standing = None if decided is not None else await self._accepted.standing(sent.job_id, just_now=just_now)
        found = _known(decided, standing)
        if found is None:
            return None
        if found.digest == sent.digest:
            return found if decided is None else replace(found, taken=False)
        is_ours = found.owner == sent.owner and (sent.owner is not None or found.tenant == sent.job.tenant)
        if sent.scope is not None and is_made(sent.job_id) and not is_ours:
            raise ForeignIdError
        if decided is not None:
            _refuse_conflict(sent, decided)
            return replace(found, taken=False)
        if found.digest is not None:
            raise _id_conflict(sent)
        return found

    def _check_agent(self, caller: Caller, job: Job) -> None:
        if job.agent not in self._names:
            names = self._names.intersection(caller.agents) if caller.agents else self._names
            message = f"agent {job.agent!r} is not configured{suggestion(job.agent, names)}"
            listing = FieldError(path="agent", message=f"configured are {', '.join(sorted(names))}")
            raise Problem(404, "unknown_agent", message, [listing])


def make_job_id() -> str:
    """An id that no other job has."""
    return new_job_id(time.time_ns() // 1_000_000, os.urandom(ID_ENTROPY_BYTES))


def job_is_of(caller: Caller, decided: bytes | None, standing: JobStatus | None) -> bool:
    """Whether there is a job, and it belongs to a caller: by its result or its record, or by what is known before."""
    if caller.may(("operate",)):
        return decided is not None or standing is not None
    of = _known(decided, standing)
    return of is not None and may_see(caller, agent=of.agent, tenant=of.tenant, owner=of.owner)


def _known(decided: bytes | None, standing: JobStatus | None) -> JobStatus | None:
    """What is known of a job, also of one that is decided."""
    if decided is None:
        return standing
    of = orjson.loads(decided)
    whose = of.get("tenant"), of.get("owner"), of.get("job_digest")
    return JobStatus(of["agent"], None, True, None, *whose)


async def find_job(
    caller: Caller, given: str, results: ResultReader, accepted: Accepted
) -> tuple[str, bytes | None] | None:
    """A job of a caller by the id that it chose, or by its full id: what it is called, and its result or record.

    None where there is no such job. Raises as `ResultReader.decided` and `Accepted.standing`.
    """
    names = names_of(caller, given)
    for wait_s in (0.0, 2 * LINGER_S):  # another process may have accepted it and not have saved it yet
        if wait_s:
            await asyncio.sleep(wait_s)
        for name in names:
            decided = await results.decided(name)
            standing = None if decided is not None else await accepted.standing(name, just_now=False)
            if job_is_of(caller, decided, standing):
                return name, decided
    return None


def shown_result(caller: Caller, document: bytes) -> bytes:
    """A result, a record or a step with its ids as a caller writes them."""
    return document_as_chosen(document, partial(shown_to, caller))


def _for_tenant_of(caller: Caller, job: Job, body: bytes) -> tuple[Job, bytes]:
    """The job in the name of the one tenant that its key is bound to, where it names none."""
    bound = for_own_tenant(caller, job)
    if bound is job or bound.tenant is None:
        return job, body
    if "tenant" in job.model_fields_set:
        return bound, bound.model_dump_json(exclude_unset=True).encode()
    return bound, with_field(body, "tenant", bound.tenant)


def _check_sender(caller: Caller, job: Job) -> None:
    """Raises Problem: 403, the job is not one of the key's; 422, it may not be answered there."""
    if (wrong := outside(caller, job.agent, job.tenant)) is not None:
        path, alone = wrong
        message = f"the API key {caller.name!r} submits {alone}"
        raise Problem(403, "forbidden", message, [FieldError(path=path, message="is not one of the key's")])
    if job.reply_to is None:
        return
    own = f"{REPLIES}{subjects.encode_token(caller.name)}."
    if (
        job.reply_to.startswith(REPLIES) and not job.reply_to.startswith(own) and not caller.may(("operate",))
    ) or not may_be_answered_at(job.reply_to, caller.name):
        message = f"must be an inbox, not one of a program of the config, or a subject below {own[:-1]}"
        raise invalid_job([FieldError(path="reply_to", message=message)])


def _refuse_conflict(sent: Submission, decided: bytes) -> None:
    of = orjson.loads(decided)
    digest = of.get("job_digest")
    if of["agent"] != sent.job.agent or digest not in (None, sent.digest):
        raise _id_conflict(sent)


def _id_conflict(sent: Submission) -> Problem:
    message = (
        f"job_id {sent.shown_id!r} is already the id of another job; choose another id, or send the same job again"
    )
    return Problem(409, "id_conflict", message, [FieldError(path="job_id", message="is that of another job")])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def wait_s_of(query: bytes) -> float | None:
    """The `wait_s` of a query string, the only parameter there is."""
    if not query:
        return None
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    unknown = next((name for name in given if name != "wait_s"), None)
    if unknown is not None:
        raise _invalid_query(unknown, "is not a parameter here; the only one is wait_s")
    try:
        seconds = float(given.get("wait_s", ""))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_WAIT_S:
        raise _invalid_query("wait_s", f"must be a number of seconds, over 0 and at most {MAX_WAIT_S:g}")
    return seconds


def _invalid_query(path: str, message: str) -> Problem:
    return Problem(422, "invalid_query", f"{path}: {message}", [FieldError(path=path, message=message)])
