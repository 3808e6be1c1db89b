"""A request whose answer is streamed, from the acceptance of its job to the end of the response."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.errors import error_response
from breakwater.dialects.api.pending_request import LONGEST_REQUEST_S, PendingRequest
from breakwater.dialects.api.response_writer import ResponseWriter, stopping_error
from breakwater.dialects.api.shared_jobs import SharedJobs
from breakwater.dialects.api.streams import ChunkInbox, EncodedStream
from breakwater.identity import event_stream
from breakwater.identity.auth import why_refused
from breakwater.jobs.api.intake import JobIntake
from breakwater.jobs.api.results import AwaitedResult
from breakwater.kernel.http.bodies import release_room
from breakwater.kernel.http.problems import unauthorized_error, unavailable
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter, listen
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.redis.connection import StateUnavailableError


class StreamedRequest:
    """Follows the job of a request, and its chunks."""

    def __init__(
        self, pending: PendingRequest, intake: JobIntake, shared_jobs: SharedJobs, connection: ClientGetter
    ) -> None:
        self._pending = pending
        self._intake = intake
        self._shared_jobs = shared_jobs
        self._connection = connection
        self._inbox = ChunkInbox()
        self._resources = ExitStack()
        self._awaited: AwaitedResult | None = None
        self._why_refused: Callable[[], str | None] = lambda: None

    async def begin(self, request: Request, traceparent: str | None, keepalive_s: float | None) -> bytes | None:
        """Stores the job, and waits until its answer has begun or it is decided, for `keepalive_s` at most.

        The wait also ends if the job waits for its turn: then its client and proxies must not take the silence for a
        broken connection, while an error is unlikely.

        Returns:
            The result, if the job is decided before its answer has begun; None if the response can begin.

        Raises:
            RequestError: the job was not accepted, or the process stops. Everything is closed then.
        """
        try:
            return await self._begin(request, traceparent, keepalive_s)
        except BusUnavailableError as outage:
            await self.close(all_sent=False)
            raise unavailable("unavailable", f"the job was not accepted: {outage}") from outage
        except BaseException:
            await self.close(all_sent=False)
            raise

    async def _begin(self, request: Request, traceparent: str | None, keepalive_s: float | None) -> bytes | None:
        sent = self._pending.sent
        self._why_refused = partial(why_refused, request)
        # The subscription comes first, on the same connection, so that no chunk of the job is missed.
        subject = subjects.chunks(sent.job.agent, sent.execution_id)
        self._resources.callback(listen(self._connection, subject, self._inbox.put))
        awaited, _ = await self._intake.follow(request, sent, traceparent, LONGEST_REQUEST_S)
        self._awaited = self._resources.enter_context(awaited)
        if self._pending.accepted is not None:
            await self._pending.accepted(sent)
        if self._pending.drop_texts():
            release_room(request)
        deciding = awaited.decided
        await self._wait_for_beginning(deciding, keepalive_s)
        if self._inbox.first is not None or not deciding.done():
            return None
        if (decided := deciding.result()) is None:
            raise stopping_error(sent.execution_id)
        return decided

    async def _wait_for_beginning(self, deciding: asyncio.Future[bytes | None], keepalive_s: float | None) -> None:
        begin_at = math.inf if keepalive_s is None else time.monotonic() + keepalive_s
        while True:
            rest_s = begin_at - time.monotonic()
            await self._inbox.wait_nonempty(deciding, min(event_stream.KEEP_ALIVE_S, max(0.0, rest_s)))
            if self._inbox.first is not None or deciding.done() or time.monotonic() >= begin_at:
                return
            with suppress(StateUnavailableError):  # other users of Redis log the outage
                if await self._intake.lookup.accepted.waits_for_turn(self._pending.sent.execution_id):
                    return

    @property
    def first_message(self) -> Mapping[str, Any] | None:
        """The first message of the answer's chunks; None if there is none yet."""
        return self._inbox.first

    def response(
        self, headers: Mapping[str, str], writer: ResponseWriter, result: dict[str, Any] | None = None
    ) -> Response:
        """Returns the response, whose answer has begun. It closes everything at its end.

        Args:
            headers: the headers of the response.
            writer: writes an error that takes the place of the answer.
            result: the result, if the job was decided before its answer had begun; else None.
        """
        pending = self._pending

        def error(failed: dict[str, Any] | None) -> bytes:
            if failed is None:
                reason = self._why_refused()
                problem = stopping_error(pending.sent.execution_id) if reason is None else unauthorized_error(reason)
                return bytes(error_response(problem, pending.path).body)
            return bytes(writer.response(pending, failed).body)

        assert self._awaited is not None
        encoder = pending.answer.encoder(pending.sent)
        return EncodedStream(
            self._inbox,
            self._awaited.decided,
            headers=headers,
            encoder=encoder,
            result=result,
            error=error,
            close=self.close,
        )

    async def close(self, all_sent: bool, stuck: bool = False) -> None:
        """Closes everything that is open for the request. If its client has left, its job may end, too.

        Args:
            all_sent: the whole answer was sent.
            stuck: the client takes nothing any more.
        """
        pending = self._pending
        awaited = self._awaited
        has_left = awaited is not None and (stuck or awaited.has_left)
        cancels = pending.cancels and has_left and not _has_result(awaited)
        self._resources.close()
        if all_sent:
            await self._shared_jobs.forget(pending)
        else:
            await self._shared_jobs.leave(pending, cancels=cancels)


def _has_result(awaited: AwaitedResult | None) -> bool:
    if awaited is None or not awaited.decided.done() or awaited.decided.cancelled():
        return False
    return awaited.decided.exception() is None and bool(awaited.decided.result())
