"""What is done with a request: submit a job and perhaps wait for its result, or say how a job stands."""

from __future__ import annotations

import asyncio
import math
import os
import time
from urllib.parse import parse_qsl, quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from breakwater.bus.errors import BusUnavailable
from breakwater.config import Config, objection
from breakwater.contracts import subjects
from breakwater.contracts.job import Job
from breakwater.contracts.types import is_identifier
from breakwater.contracts.validation import FieldError
from breakwater.state.accepted import Accepted
from breakwater.state.connection import StateUnavailable
from services.request import job_ids
from services.request.agents import Agents
from services.request.answers import Answers
from services.request.body import read_body
from services.request.observe import Submitting, submitting
from services.request.parsing import Submission, invalid_job, read_job, submission, suggestion
from services.request.problems import Problem, unavailable, unknown_job
from services.request.queue import Queue
from services.request.waiters import Waiters

MAX_WAIT_S = 300.0
_JSON = "application/json"


class Jobs:
    """`/api/v1/jobs`."""

    def __init__(
        self,
        config: Config,
        queue: Queue,
        answers: Answers,
        waiters: Waiters,
        accepted: Accepted,
        agents: Agents,
    ) -> None:
        self._agents = agents
        self._names = frozenset(config.agents)
        self._config = config
        self._limit = config.limits.max_body_bytes
        self._queue = queue
        self._answers = answers
        self._waiters = waiters
        self._accepted = accepted

    async def submit(self, request: Request) -> Response:
        """POST: 202 once the job is safe on the bus, or 200 with its result where that came within `wait_s`."""
        with submitting(request) as trace:
            response = await self._submit(request, trace)
            trace.answered(response.status_code)
        return response

    async def _submit(self, request: Request, trace: Submitting) -> Response:
        wait_s = _wait_s(request.scope["query_string"])
        body = await read_body(request, self._limit)
        job = read_job(body)
        self._check_agent(job)
        made_id = job_ids.uuid7(time.time_ns() // 1_000_000, os.urandom(job_ids.ENTROPY_BYTES))
        sent = submission(job, body, idempotency_key=request.headers.get("idempotency-key"), made_id=made_id)
        trace.of(job.agent, sent.job_id)
        refusal = await self._agents.refusal(job)
        if refusal is not None and not await self._is_repeated(sent):
            raise refusal
        if wait_s is None:
            return await self._accept(sent, trace.traceparent)
        deadline = time.monotonic() + wait_s
        with self._waiters.listening(subjects.result(sent.job_id)) as answer:
            acceptance = await self._accept(sent, trace.traceparent)
            gone = asyncio.ensure_future(_disconnected(request))
            try:
                # Of an id that others may have used, the result may stand since long, and would not be heard again.
                result = await self._answers.wait(sent.job_id, answer, gone, deadline, look_now=not sent.id_made_here)
            finally:
                gone.cancel()
        if result is None:
            return acceptance
        if not sent.id_made_here and (other := orjson.loads(result)["agent"]) != job.agent:
            message = f"job_id {sent.job_id!r} is already the id of an execution of agent {other!r}; choose another id"
            raise Problem(409, "id_taken", message, [FieldError(path="job_id", message="belongs to another agent")])
        return Response(result, media_type=_JSON)

    async def show(self, request: Request) -> Response:
        """GET of one: 200 with the result or the record, 202 while it is not decided, 404."""
        job_id: str = request.path_params["job_id"]
        if not is_identifier(job_id):
            raise unknown_job(None)
        try:
            decided = await self._answers.decided(job_id)
            known = decided is not None or await self._accepted.known(job_id)
        except (BusUnavailable, StateUnavailable) as error:
            raise unavailable("unavailable", f"how the job stands can't be known now: {error}") from error
        if decided is not None:
            return Response(decided, media_type=_JSON)
        if not known:
            raise unknown_job(job_id)
        body = {"job_id": job_id, "execution_id": job_id, "status": "accepted"}
        return Response(orjson.dumps(body), 202, media_type=_JSON)

    async def _accept(self, sent: Submission, traceparent: str | None) -> Response:
        duplicate = await self._queue.put(sent, traceparent)
        self._accepted.mark(sent.job_id, sent.job.agent)
        if not duplicate:
            await self._queue.tell_queued(sent)
        body = {"job_id": sent.job_id, "execution_id": sent.job_id, "status": "accepted", "duplicate": duplicate}
        headers = {"Location": f"/api/v1/jobs/{quote(sent.job_id, safe='')}"}
        return Response(orjson.dumps(body), 202, headers, _JSON)

    async def _is_repeated(self, sent: Submission) -> bool:
        """Whether the job was accepted before: its sender is told how it stands, whatever its agent is at now."""
        if sent.id_made_here:
            return False
        try:
            return await self._answers.decided(sent.job_id) is not None or await self._accepted.known(sent.job_id)
        except (BusUnavailable, StateUnavailable):
            return False

    def _check_agent(self, job: Job) -> None:
        if job.agent not in self._names:
            message = f"agent {job.agent!r} is not configured{suggestion(job.agent, self._names)}"
            listing = FieldError(path="agent", message=f"configured are {', '.join(sorted(self._names))}")
            raise Problem(404, "unknown_agent", message, [listing])
        if (problem := objection(self._config, job)) is not None:
            raise invalid_job([FieldError(path=problem.path, message=problem.message)])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wait_s(query: bytes) -> float | None:
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
