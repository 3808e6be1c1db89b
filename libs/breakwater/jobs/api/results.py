"""Results of jobs, looked up or waited for, and who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import orjson

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.ids import possible_executions
from breakwater.jobs.rules.ownership import may_see
from breakwater.jobs.store.accepted import LINGER_S, AcceptedJobs, JobStatus
from breakwater.jobs.store.records import is_result_of, read_record
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter, listen
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.security.encryption import OFF, Cipher, DecryptionError

CHECK_S = 2.0
"""Interval of the checks whether the connection, and so perhaps a result that is waited for, was lost."""

_REFUSED = b'"short_circuited":true'

MIN_POLL_S = 2.0
MAX_POLL_S = 30.0


class ResultReader:
    """Reads results. It decrypts them if need be, and does not parse them."""

    def __init__(self, connection: ClientGetter, reconnects: Callable[[], int], cipher: Cipher = OFF) -> None:
        self.connection = connection
        self.reconnects = reconnects
        self.cipher = cipher
        self._lookup = Lookup(connection, cipher)

    async def find_result(self, execution_id: str) -> bytes | None:
        """Returns a job's result; None while there is none.

        Raises:
            BusUnavailableError: NATS does not answer.
        """
        result = await self._lookup.last(Stream.RESULTS, subjects.result(execution_id))
        return None if result is None or not is_result_of(result.data, execution_id) else result.data

    async def find_decision(self, execution_id: str) -> bytes | None:
        """Returns a job's result, else its redacted record, which is kept longer; None while it is undecided.

        Raises:
            BusUnavailableError: NATS does not answer.
        """
        if (result := await self.find_result(execution_id)) is not None:
            return result
        record = await self._lookup.last(Stream.EVENTS, f"bw.executions.*.{subjects.encode_token(execution_id)}")
        return None if record is None or not is_result_of(record.data, execution_id) else record.data

    async def attempts(self, execution_id: str, beyond: int = 0) -> list[Attempt]:
        """Returns the recorded attempts with numbers above `beyond`, in order. Raises BusError."""
        subject = f"bw.attempts.*.{subjects.encode_token(execution_id)}.*"
        newest = await self._lookup.last(Stream.EVENTS, subject)
        if newest is None or int(newest.subject.rpartition(".")[2]) <= beyond:
            return []
        attempts: list[Attempt] = []
        async with aclosing(Lookup(self.connection).scan(Stream.EVENTS, subject)) as stored:
            async for message in stored:
                attempt = read_record(message, Attempt)
                if attempt is not None and attempt.number > beyond:
                    attempts.append(attempt)
        return sorted(attempts, key=lambda attempt: attempt.number)


class AwaitedResult:
    """A result that a request waits for, until it is closed."""

    __slots__ = (
        "_objection",
        "_release",
        "decided",
        "execution_id",
        "has_left",
        "looking",
        "next_look",
        "pause_s",
        "reconnects",
    )

    def __init__(
        self, execution_id: str, reconnects: int, objection: Callable[[bytes], Exception | None] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.execution_id = execution_id
        self.decided: asyncio.Future[bytes | None] = loop.create_future()
        """The result as it was published; None if it was late, the client has left, or the process stops.

        Raises the objection to the result, or what its look-up raises.
        """
        self.has_left = False
        """True if the client has left."""
        self.reconnects = reconnects
        """The connection to NATS on which no result was missed."""
        self.pause_s = MIN_POLL_S
        self.next_look = loop.time() + MIN_POLL_S
        """When the result is looked up, by the loop's clock."""
        self.looking: asyncio.Task[None] | None = None
        self._objection = objection
        self._release: list[Callable[[], object]] = []

    def at_end(self, release: Callable[[], object]) -> None:
        """Calls `release` when the wait is over."""
        self._release.append(release)

    def leave(self) -> None:
        """Ends the wait, because the client has left."""
        self.has_left = True
        self.decide(None)

    def decide(self, result: bytes | None) -> None:
        """Ends the wait with a result, or without one."""
        error = None if result is None or self._objection is None else self._objection(result)
        if error is not None:
            self.fail(error)
        elif not self.decided.done():
            self.decided.set_result(result)

    def fail(self, error: Exception) -> None:
        """Ends the wait with an error."""
        if not self.decided.done():
            self.decided.set_exception(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the wait, whether or not there is a result."""
        while self._release:
            self._release.pop()()
        if self.looking is not None:
            self.looking.cancel()
        if not self.decided.cancel() and not self.decided.cancelled():
            self.decided.exception()  # perhaps nobody else has asked for it


class Waiters:
    """Hands results to the requests that wait for them.

    Each request subscribes to its own job's result while it waits, so results of other jobs don't reach this process.
    """

    def __init__(self, connection: ClientGetter, results: ResultReader) -> None:
        self._connection = connection
        self._results = results
        self._awaited: dict[str, set[AwaitedResult]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._released = False

    def waits_for(self, execution_id: str) -> bool:
        """Returns True if a request waits for the result of an execution."""
        return execution_id in self._awaited

    def listen(
        self,
        execution_id: str,
        *,
        wait_s: float | None = None,
        check_first: bool = False,
        objection: Callable[[bytes], Exception | None] | None = None,
    ) -> AwaitedResult:
        """Waits for a result, until the returned context is left. Called before publishing: a result may come at once.

        The subscription delivers it. A result that it missed during a reconnect is looked up.

        Args:
            execution_id: the job's execution.
            wait_s: the longest wait, in seconds; None to wait as long as it takes.
            check_first: look it up immediately, as it may be stored already.
            objection: returns the error for a result that is not the right one, else None.

        Raises:
            BusUnavailableError: NATS is not connected yet, or no longer.
        """
        awaited = AwaitedResult(execution_id, self._results.reconnects(), objection)
        awaited.at_end(listen(self._connection, subjects.result(execution_id), partial(self._receive, awaited)))
        self._awaited.setdefault(execution_id, set()).add(awaited)
        awaited.at_end(partial(self._forget, awaited))
        loop = asyncio.get_running_loop()
        if wait_s is not None:
            awaited.at_end(loop.call_later(wait_s, awaited.decide, None).cancel)
        if self._released:
            awaited.decide(None)
        elif check_first:
            self._look_up(awaited)
        if self._timer is None:
            self._timer = loop.call_later(CHECK_S, self._look_up_missed)
        return awaited

    def release(self) -> None:
        """Ends all waiting, now and from now on, because the process stops."""
        self._released = True
        for awaited in self._all():
            awaited.decide(None)

    def _all(self) -> list[AwaitedResult]:
        return [awaited for of_execution in self._awaited.values() for awaited in of_execution]

    def _forget(self, awaited: AwaitedResult) -> None:
        of_execution = self._awaited[awaited.execution_id]
        of_execution.discard(awaited)
        if not of_execution:
            del self._awaited[awaited.execution_id]

    def _receive(self, awaited: AwaitedResult, data: bytes) -> None:
        if awaited.decided.done() or not is_result_of(data, awaited.execution_id):
            return
        try:
            result = self._results.cipher.decrypt_document(data)
        except DecryptionError as error:
            awaited.fail(error)
        else:
            awaited.decide(result)

    def _look_up_missed(self) -> None:
        """Looks up the results that a lost connection may have cost, and now and then the others."""
        self._timer = None
        loop = asyncio.get_running_loop()
        reconnects = self._results.reconnects()
        for awaited in self._all():
            if awaited.looking is None and (loop.time() >= awaited.next_look or awaited.reconnects != reconnects):
                self._look_up(awaited)
        if self._awaited:
            self._timer = loop.call_later(CHECK_S, self._look_up_missed)

    def _look_up(self, awaited: AwaitedResult) -> None:
        awaited.looking = asyncio.create_task(self._find(awaited))

    async def _find(self, awaited: AwaitedResult) -> None:
        reconnects = self._results.reconnects()
        try:
            result = await self._results.find_result(awaited.execution_id)
        except BusUnavailableError:
            return  # an outage does not end the wait: the job is accepted, and the next look-up comes soon
        except Exception as error:  # noqa: BLE001  it is raised where the result is awaited
            awaited.fail(error)
            return
        finally:
            awaited.looking = None
        if result is not None:
            awaited.decide(result)
        awaited.reconnects = reconnects
        awaited.next_look = asyncio.get_running_loop().time() + awaited.pause_s
        awaited.pause_s = min(awaited.pause_s * 2, MAX_POLL_S)


@dataclass(frozen=True, slots=True)
class LocatedJob:
    """A job that a caller may see."""

    execution_id: str
    job_id: str
    decided: bytes | None
    """Its result or record; None while it is undecided."""


@dataclass(frozen=True, slots=True)
class JobLookup:
    """Looks up jobs, whether they are decided or not."""

    results: ResultReader
    waiters: Waiters
    accepted: AcceptedJobs

    async def find(self, caller: Caller, requested_id: str) -> LocatedJob | None:
        """Finds a job of a caller by its own id or by that of its execution.

        Returns:
            The job; None if there is none that the caller may see.

        Raises:
            BusUnavailableError: NATS can't be read.
            StateUnavailableError: Redis can't be read.
        """
        execution_ids = possible_executions(caller, requested_id)
        # Another process may have accepted the job and not have saved it yet, so there is a second look.
        for wait_s in (0.0, 2 * LINGER_S):
            if wait_s:
                await asyncio.sleep(wait_s)
            for execution_id in execution_ids:
                decided, status = await self.status(execution_id)
                if status is not None and job_is_of(caller, status):
                    return LocatedJob(execution_id, status.job_id or requested_id, decided)
        return None

    async def explain(self, caller: Caller, document: bytes) -> bytes:
        """Adds the figures of a refusal to a result or record, for operators only.

        Only the attempt in EVENTS has the figures. If it can't be read now, the document stays as it is.
        """
        if _REFUSED not in document or not caller.may(("operate",)):
            return document
        result = orjson.loads(document)
        if (error := result["error"]) is None:
            return document
        attempts: list[Attempt] = []
        with suppress(BusError):
            attempts = await self.results.attempts(result["execution_id"])
        for attempt in reversed(attempts):
            if attempt.short_circuited and attempt.error is not None and attempt.error.message == error["message"]:
                error["figures"] = attempt.error.figures
                return orjson.dumps(result)
        return document

    async def status(self, execution_id: str, *, just_now: bool = False) -> tuple[bytes | None, JobStatus | None]:
        """Returns the result or record of a job, and its status; (None, None) for an unknown job.

        Args:
            execution_id: its execution.
            just_now: another process may have accepted it at this moment.
        """
        decided = await self.results.find_decision(execution_id)
        if decided is None:
            return None, await self.accepted.status(execution_id, just_now=just_now)
        return decided, status_of(decided)


def status_of(decided: bytes) -> JobStatus:
    """The status of a job that is decided, from its result or record."""
    fields = orjson.loads(decided)
    return JobStatus(
        fields["agent"],
        None,
        False,
        None,
        fields.get("tenant"),
        fields.get("owner"),
        fields.get("job_digest"),
        fields.get("job_id"),
    )


def job_is_of(caller: Caller, status: JobStatus | None) -> bool:
    """Returns True for a job that belongs to a caller, or that it may see as an operator."""
    return status is not None and (
        caller.may(("operate",)) or may_see(caller, agent=status.agent, tenant=status.tenant, owner=status.owner)
    )


def unknown_job(job_id: str | None) -> RequestError:
    """Returns 404 for an unknown job. `job_id` is None for an id that no job can have."""
    if job_id is None:
        return RequestError(
            404, "unknown_job", "this is not a valid job id: 1 to 128 characters, no control characters"
        )
    return RequestError(
        404,
        "unknown_job",
        (
            f"there is no job {job_id!r}: none has ended or is in progress, and none was accepted over "
            "HTTP within a day. A job published on NATS appears when a worker takes it"
        ),
    )
