"""Calls whose clients wait for them: equal requests find each other, and a job may end with its last client."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import structlog

from breakwater.config import Config
from breakwater.dialects.api.pending_call import PendingCall
from breakwater.jobs.api.cancels import Cancels
from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.store.in_flight_requests import InFlightRequests
from breakwater.kernel.nats import subjects
from breakwater.kernel.redis.connection import StateUnavailableError

CLIENT_LEFT: Literal["client_disconnect"] = "client_disconnect"


@dataclass(frozen=True, slots=True)
class CallsInFlight:
    """The calls that clients wait for."""

    config: Config
    in_flight: InFlightRequests
    cancels: Cancels

    async def attach(self, call: PendingCall) -> PendingCall:
        """Returns the call that a request waits for: an equal one in flight, or else its own."""
        if call.request_key is None:
            return call
        job = call.sent.job
        longest_s = job.total_timeout_s or self.config.agents[job.agent].total_timeout_s
        try:
            job_id = await self.in_flight.begin(
                call.request_key, call.request_id, call.sent.job_id, attaches=call.attaches, longest_s=longest_s
            )
        except StateUnavailableError:
            # Without Redis, a retry is a call of its own. Other users of Redis log the outage.
            return replace(call, request_key=None)
        return call if job_id == call.sent.job_id else replace(call, sent=call.authorize(job_id, call.request_id))

    async def forget(self, call: PendingCall) -> None:
        """Forgets a call in flight once its response is sent."""
        if call.request_key is not None:
            with suppress(StateUnavailableError):  # it expires
                await self.in_flight.end(call.request_key, call.sent.job_id)

    async def leave(self, call: PendingCall, *, cancels: bool) -> None:
        """Stops waiting for a call that has no response.

        Args:
            call: the call.
            cancels: cancel its job, unless another request waits for it. A retry is then a call of its own.
        """
        execution_id = call.sent.execution_id
        agent = call.sent.job.agent
        try:
            if call.request_key is not None:
                alone = await self.in_flight.leave(call.request_key, call.request_id, call.sent.job_id, cancels=cancels)
                cancels = cancels and alone
            # Other requests may wait for the job by its id.
            if cancels and not self.cancels.lookup.waiters.waits_for(subjects.result(execution_id)):
                by = Cancellation(by=CLIENT_LEFT, key_id=call.key_id, at=datetime.now(UTC))
                await self.cancels.request(PendingCancel(execution_id=execution_id, cancellation=by, agents=(agent,)))
        except StateUnavailableError as error:
            if cancels:
                structlog.get_logger().info("job_not_cancelled", execution_id=execution_id, error=str(error))
