"""Results of jobs: looked up, or waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Lookup
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Stream
from services.request.parsing import with_field
from services.request.waiters import Answer

CHECK_S = 2.0
"""How often who waits sees whether the connection was lost meanwhile, and a result with it."""

FIRST_LOOK_S = 2.0
LONGEST_LOOK_S = 30.0


class Answers:
    """What was decided. Bytes are passed on as they were published and not parsed."""

    def __init__(self, lookup: Lookup, reconnects: Callable[[], int]) -> None:
        self._lookup = lookup
        self._reconnects = reconnects

    async def decided(self, job_id: str) -> bytes | None:
        """The result, else the execution's record with redactions, which is kept longer. None while undecided.

        Raises:
            BusUnavailable: NATS does not answer.
        """
        result = await self._lookup.last(Stream.RESULTS, subjects.result(job_id))
        if result is not None:
            return result.data
        record = await self._lookup.last(Stream.EVENTS, f"bw.executions.*.{subjects.encode_token(job_id)}")
        return None if record is None else with_field(record.data, "job_id", job_id)

    async def wait(
        self, job_id: str, answer: Answer, gone: asyncio.Future[Any], deadline: float, *, look_now: bool
    ) -> bytes | None:
        """The result, if it comes in time.

        The subscription brings it (`answer`); what it missed while the connection was lost is looked up.

        Args:
            job_id: whose result.
            answer: of the waiter that listens for it.
            gone: done when nobody waits any longer.
            deadline: on the monotonic clock.
            look_now: the result may be there already.
        """
        reconnects = self._reconnects()
        pause = FIRST_LOOK_S
        look_at = time.monotonic() + (0.0 if look_now else pause)
        while not answer.done() and not gone.done() and (now := time.monotonic()) < deadline:
            if now >= look_at or self._reconnects() != reconnects:
                connection = self._reconnects()
                # An outage is no reason to stop waiting: the job is accepted, and the look-up is tried again.
                with suppress(BusUnavailable, TimeoutError):
                    async with asyncio.timeout(deadline - now):
                        found = await self._lookup.last(Stream.RESULTS, subjects.result(job_id))
                    if found is not None:
                        return found.data
                    reconnects = connection
                    look_at, pause = now + pause, min(pause * 2, LONGEST_LOOK_S)
            left_s = min(CHECK_S, deadline - time.monotonic())
            await asyncio.wait([answer, gone], timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
