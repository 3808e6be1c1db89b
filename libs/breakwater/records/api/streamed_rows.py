"""Responses that pass on what ClickHouse or another process writes, as it comes.

Memory stays flat, and no statement outlives its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from breakwater.identity.auth import caller_of, wait_until_refused, why_refused
from breakwater.identity.event_stream import FAREWELL_S, KEY_LOOK_S, Ending, OpenStreams, Sender, end, send_part
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.http.problems import RequestError, not_read, unavailable
from breakwater.kernel.http.server import wait_for_disconnect
from breakwater.kernel.process import background

MAX_AT_ONCE = 2
"""The most statements that one process runs at a time. The local engine runs three of its readers' at a time, and the
console is one of them."""

ANSWER_MARGIN_S = 5.0
"""Seconds beyond a statement's time limit, in which ClickHouse reports the limit itself."""


class StreamedRows(Response):
    """The result of one statement. Problems before its first bytes become error responses.

    Args:
        request: the request.
        running: the statements of this process that run.
        pieces: begins the statement, and yields the parts of the body.
        content_type: of the body.
        limit_s: the time limit of the statement.
        headers: further headers.
        noun: what a message calls it.
        last_piece: makes the last part of a body that a problem has cut off; by default the connection breaks, so that
            nobody takes the body for whole.
    """

    def __init__(
        self,
        request: Request,
        running: OpenStreams,
        pieces: Callable[[], AsyncGenerator[bytes]],
        *,
        content_type: str,
        limit_s: float,
        headers: Mapping[str, str] | None = None,
        noun: str = "statement",
        last_piece: Callable[[RequestError], bytes | None] = lambda _: None,
    ) -> None:
        super().__init__(headers=headers, media_type=content_type)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._request = request
        self._running = running
        self._pieces = pieces
        self._limit_s = limit_s
        self._noun = noun
        self._last_piece = last_piece
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the result until it ends, its time is over, its reader leaves, or its key is revoked."""
        if scope["method"] == "HEAD":
            sender = Sender(send)
            await self._begin(sender)
            await sender.send(b"", more=False)
            return
        with self._running.open(self._request) as ending:
            sending = asyncio.create_task(self._send(Sender(send)))
            leaving = asyncio.create_task(wait_for_disconnect(receive))
            watching = asyncio.create_task(self._watch_key(ending))
            try:
                await asyncio.wait([sending, leaving, ending], return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                elif (reason := ending.result() if ending.done() else why_refused(self._request)) is not None:
                    await background.stop(sending)
                    raise unavailable("stopped", f"the {self._noun} was stopped: {reason}")
            except RequestError as problem:
                if not self._begun:
                    raise
                await self._end_early(problem, send)
            finally:
                await background.stop(sending, leaving, watching)

    async def _send(self, sender: Sender) -> None:
        deadline = asyncio.timeout(self._limit_s + ANSWER_MARGIN_S)
        try:
            async with deadline, aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if not self._begun:
                        await self._begin(sender)
                    await sender.send(piece)
                if not self._begun:
                    await self._begin(sender)
                await sender.send(b"", more=False)
        except TimeoutError:
            # Otherwise the reader takes nothing, and can't be told.
            if deadline.expired():
                raise self._too_slow() from None
            structlog.get_logger().warning(
                "answer_cut", path=self._request.url.path, key_id=caller_of(self._request).id
            )
        except QueryError as error:
            message = f"ClickHouse refuses it, code {error.code}: {error.message}"
            raise RequestError(422, "query_failed", message) from error
        except AnalyticsUnavailableError as error:
            raise self._too_slow() if "TIMEOUT_EXCEEDED" in str(error) else not_read(error) from error

    async def _begin(self, sender: Sender) -> None:
        self._begun = True
        await sender.begin(self.status_code, self.raw_headers)

    async def _end_early(self, problem: RequestError, send: Send) -> None:
        last_piece = self._last_piece(problem)
        structlog.get_logger().warning("answer_cut", path=self._request.url.path, error=problem.message)
        if last_piece is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await send_part(send, last_piece, more=False)

    async def _watch_key(self, ending: Ending) -> None:
        end(ending, await wait_until_refused(self._request, KEY_LOOK_S))

    def _too_slow(self) -> RequestError:
        message = f"the {self._noun} took longer than {self._limit_s:g} s and was stopped"
        return RequestError(422, "query_timeout", message)
