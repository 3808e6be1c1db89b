"""Results of jobs, looked up or waited for, and who may see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from breakwater.identity.rules.callers import Caller
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.ids import possible_executions
from breakwater.jobs.rules.ownership import may_see
from breakwater.jobs.store.accepted import LINGER_S, AcceptedJobs, JobStatus
from breakwater.jobs.store.records import is_result_of, read_record
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import core_subscription
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import ClientGetter, Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.security.encryption import OFF, Cipher, DecryptionError

CHECK_S = 2.0
"""Interval at which a waiting request checks whether the connection, and so perhaps the result, was lost."""

_REFUSED = b'"short_circuited":true'

MIN_POLL_S = 2.0
MAX_POLL_S = 30.0


ReceivedResult = asyncio.Future[bytes | None]
"""The result as it was published, or None when the process stops."""


class Waiters:
    """Hands results to the requests that wait for them.

    Each request subscribes to its own job's result while it waits, so results of other jobs don't reach this process.
    """

    def __init__(self, connection: ClientGetter, cipher: Cipher = OFF) -> None:
        self._connection = connection
        self._cipher = cipher
        self._waiting: dict[str, set[ReceivedResult]] = {}
        self._released = False

    def waits_for(self, subject: str) -> bool:
        """Returns True if a request waits for a result on this subject."""
        return subject in self._waiting

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    @asynccontextmanager
    async def listening(self, subject: str) -> AsyncGenerator[ReceivedResult]:
        """Listens to a subject while the block runs. Enter it before publishing: a result may be faster than the ack.

        Raises:
            BusUnavailableError: NATS is not connected yet, or no longer.
        """
        received: ReceivedResult = asyncio.get_running_loop().create_future()
        if self._released:
            received.set_result(None)
        self._waiting.setdefault(subject, set()).add(received)
        try:
            async with core_subscription(
                self._connection, subject, partial(self._deliver, subject, received), confirmed=False
            ):
                yield received
        finally:
            waiting = self._waiting[subject]
            waiting.discard(received)
            if not waiting:
                del self._waiting[subject]

    def _deliver(self, subject: str, received: ReceivedResult, data: bytes) -> None:
        if received.done() or not is_result_of(data, subjects.decode_token(subject.rpartition(".")[2])):
            return
        try:
            received.set_result(self._cipher.decrypt_document(data))
        except DecryptionError as error:
            received.set_exception(error)

    def release(self) -> None:
        """Ends all waiting, now and from now on, because the process stops."""
        self._released = True
        for waiting in self._waiting.values():
            for received in waiting:
                if not received.done():
                    received.set_result(None)


class ResultReader:
    """Reads results. It decrypts them if need be, and does not parse them."""

    def __init__(self, connection: ClientGetter, reconnects: Callable[[], int], cipher: Cipher = OFF) -> None:
        self.connection = connection
        self.reconnects = reconnects
        self._lookup = Lookup(connection, cipher)

    async def find_decision(self, execution_id: str) -> bytes | None:
        """Returns a job's result, else its redacted record, which is kept longer; None while it is undecided.

        Raises:
            BusUnavailableError: NATS does not answer.
        """
        result = await self._lookup.last(Stream.RESULTS, subjects.result(execution_id))
        if result is not None and is_result_of(result.data, execution_id):
            return result.data
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

    async def wait(
        self,
        execution_id: str,
        received: ReceivedResult,
        disconnection: asyncio.Future[Any],
        deadline: float,
        *,
        check_first: bool,
    ) -> bytes | None:
        """Waits for a result. Returns None if it does not come in time.

        The subscription delivers it as `received`. A result that it missed during a reconnect is looked up.

        Args:
            execution_id: the job's execution.
            received: the result, once the subscription has it.
            disconnection: done when the client has disconnected.
            deadline: the end of the wait, on the monotonic clock.
            check_first: look it up immediately, as the result may be stored already.
        """
        reconnects = self.reconnects()
        pause = MIN_POLL_S
        next_check = time.monotonic() + (0.0 if check_first else pause)
        while not received.done() and not disconnection.done() and (now := time.monotonic()) < deadline:
            if now >= next_check or self.reconnects() != reconnects:
                connection = self.reconnects()
                # An outage does not end the wait: the job is accepted, and the look-up is tried again.
                with suppress(BusUnavailableError, TimeoutError):
                    async with asyncio.timeout(deadline - now):
                        result = await self._lookup.last(Stream.RESULTS, subjects.result(execution_id))
                    if result is not None and is_result_of(result.data, execution_id):
                        return result.data
                    reconnects = connection
                    next_check = now + pause
                    pause = min(pause * 2, MAX_POLL_S)
            left_s = min(CHECK_S, deadline - time.monotonic())
            await asyncio.wait([received, disconnection], timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        return received.result() if received.done() else None


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
