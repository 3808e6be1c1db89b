"""Results of jobs: looked up, or waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

from breakwater.bus.core import hearing
from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Connection, Lookup, scan
from breakwater.bus.records import is_result_of, read_record
from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt
from breakwater.contracts.subjects import Stream
from breakwater.encryption import OFF, Cipher, Undecryptable
from services.request.parsing import with_field

CHECK_S = 2.0
"""How often a waiting request checks whether the connection, and with it a result, was lost meanwhile."""

FIRST_LOOK_S = 2.0
LONGEST_LOOK_S = 30.0


Answer = asyncio.Future[bytes | None]
"""The result as it was published, or None when the process stops."""


class Waiters:
    """Hands results to the requests that wait for them.

    Each subscribes to its own job's result for as long as it waits: those of all other jobs, most of which nobody waits
    for here, are not delivered to this process.
    """

    def __init__(self, connection: Connection, cipher: Cipher = OFF) -> None:
        self._connection = connection
        self._cipher = cipher
        self._waiting: dict[str, set[Answer]] = {}
        self._released = False

    def waits_for(self, subject: str) -> bool:
        """Whether somebody listens to a subject."""
        return subject in self._waiting

    def __len__(self) -> int:
        return sum(len(answers) for answers in self._waiting.values())

    @asynccontextmanager
    async def listening(self, subject: str) -> AsyncGenerator[Answer]:
        """Listens to a subject while the block runs. Begin before publishing: an answer may be faster than the ack.

        Raises:
            BusUnavailable: NATS is not connected yet, or no more.
        """
        answer: Answer = asyncio.get_running_loop().create_future()
        if self._released:
            answer.set_result(None)
        self._waiting.setdefault(subject, set()).add(answer)
        try:
            async with hearing(self._connection, subject, partial(self._deliver, subject, answer), confirmed=False):
                yield answer
        finally:
            answers = self._waiting[subject]
            answers.discard(answer)
            if not answers:
                del self._waiting[subject]

    def _deliver(self, subject: str, answer: Answer, data: bytes) -> None:
        if answer.done() or not is_result_of(data, subjects.decode_token(subject.rpartition(".")[2])):
            return
        try:
            answer.set_result(self._cipher.decrypt_document(data))
        except Undecryptable as error:
            answer.set_exception(error)

    def release(self) -> None:
        """Ends all waiting, now and from now on: the process stops."""
        self._released = True
        for answers in self._waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_result(None)


class ResultReader:
    """Reads results. Bytes are passed on as they were published, or decrypted, and not parsed."""

    def __init__(self, connection: Connection, reconnects: Callable[[], int], cipher: Cipher = OFF) -> None:
        self._connection = connection
        self._lookup = Lookup(connection, cipher)
        self._reconnects = reconnects

    async def decided(self, job_id: str) -> bytes | None:
        """The result, else the execution's record with redactions, which is kept longer. None while undecided.

        Raises:
            BusUnavailable: NATS does not answer.
        """
        result = await self._lookup.last(Stream.RESULTS, subjects.result(job_id))
        if result is not None and is_result_of(result.data, job_id):
            return result.data
        record = await self._lookup.last(Stream.EVENTS, f"bw.executions.*.{subjects.encode_token(job_id)}")
        if record is None or not is_result_of(record.data, job_id):
            return None
        return with_field(record.data, "job_id", job_id)

    async def attempts(self, job_id: str, beyond: int = 0) -> list[Attempt]:
        """The recorded attempts with higher numbers, in order. Raises BusError."""
        subject = f"bw.attempts.*.{subjects.encode_token(job_id)}.*"
        newest = await self._lookup.last(Stream.EVENTS, subject)
        if newest is None or int(newest.subject.rpartition(".")[2]) <= beyond:
            return []
        found: list[Attempt] = []
        async with aclosing(scan(self._connection, Stream.EVENTS, subject)) as stored:
            async for message in stored:
                attempt = read_record(message, Attempt)
                if attempt is not None and attempt.number > beyond:
                    found.append(attempt)
        return sorted(found, key=lambda attempt: attempt.number)

    async def wait(
        self, job_id: str, answer: Answer, left: asyncio.Future[Any], deadline: float, *, look_now: bool
    ) -> bytes | None:
        """The result, if it comes in time.

        The subscription brings it (`answer`); what it missed while the connection was lost is looked up.

        Args:
            job_id: whose result.
            answer: of the waiter that listens for it.
            left: done when the client is gone.
            deadline: on the monotonic clock.
            look_now: the result may be there already.
        """
        reconnects = self._reconnects()
        pause = FIRST_LOOK_S
        look_at = time.monotonic() + (0.0 if look_now else pause)
        while not answer.done() and not left.done() and (now := time.monotonic()) < deadline:
            if now >= look_at or self._reconnects() != reconnects:
                connection = self._reconnects()
                # An outage is no reason to stop waiting: the job is accepted, and the look-up is tried again.
                with suppress(BusUnavailable, TimeoutError):
                    async with asyncio.timeout(deadline - now):
                        found = await self._lookup.last(Stream.RESULTS, subjects.result(job_id))
                    if found is not None and is_result_of(found.data, job_id):
                        return found.data
                    reconnects = connection
                    look_at, pause = now + pause, min(pause * 2, LONGEST_LOOK_S)
            left_s = min(CHECK_S, deadline - time.monotonic())
            await asyncio.wait([answer, left], timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
