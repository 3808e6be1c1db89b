"""Jobs that several requests wait for: equal requests find each other, and a job may end with its last client."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import structlog

from breakwater.config import Config
from breakwater.dialects.api.pending_request import PendingRequest
from breakwater.jobs.api.cancels import Cancels
from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.store.in_flight_requests import InFlightRequests
from breakwater.kernel.redis.connection import StateUnavailableError

CLIENT_LEFT: Literal["client_disconnect"] = "client_disconnect"


@dataclass(frozen=True, slots=True)
class SharedJobs:
    """The jobs that clients wait for."""

    config: Config
    in_flight: InFlightRequests
    cancels: Cancels

    async def attach(self, pending: PendingRequest) -> PendingRequest:
        """Returns a request with the job that it waits for: that of an equal one in flight, or else its own."""
        if pending.request_key is None:
            return pending
        job = pending.sent.job
        longest_s = job.total_timeout_s or self.config.agents[job.agent].total_timeout_s
        try:
            job_id = await self.in_flight.begin(
                pending.request_key,
                pending.request_id,
                pending.sent.job_id,
                attaches=pending.attaches,
                longest_s=longest_s,
            )
        except StateUnavailableError:
            # Without Redis, a retry has a job of its own. Other users of Redis log the outage.
            return replace(pending, request_key=None)
        if job_id == pending.sent.job_id:
            return pending
        return replace(pending, sent=pending.authorize(job_id, pending.request_id))

    async def forget(self, pending: PendingRequest) -> None:
        """Forgets a request in flight once its response is sent."""
        if pending.request_key is not None:
            with suppress(StateUnavailableError):  # it expires
                await self.in_flight.end(pending.request_key, pending.sent.job_id)

    async def leave(self, pending: PendingRequest, *, cancels: bool) -> None:
        """Stops waiting for a job, without a response.

        Args:
            pending: the request.
            cancels: cancel its job, unless another request waits for it. A retry then has a job of its own.
        """
        execution_id = pending.sent.execution_id
        agent = pending.sent.job.agent
        try:
            if pending.request_key is not None:
                is_last = await self.in_flight.leave(
                    pending.request_key, pending.request_id, pending.sent.job_id, cancels=cancels
                )
                cancels = cancels and is_last
            # Other requests may wait for the job by its id.
            if cancels and not self.cancels.lookup.waiters.waits_for(execution_id):
                by = Cancellation(by=CLIENT_LEFT, key_id=pending.key_id, at=datetime.now(UTC))
                await self.cancels.request(PendingCancel(execution_id=execution_id, cancellation=by, agents=(agent,)))
        except StateUnavailableError as error:
            if cancels:
                structlog.get_logger().info("job_not_cancelled", execution_id=execution_id, error=str(error))
