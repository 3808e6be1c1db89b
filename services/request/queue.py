"""Putting a job on the bus: it is accepted when JetStream has acknowledged it, and not before."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime

from breakwater.bus.errors import BusUnavailable, PublishRefused
from breakwater.bus.publisher import PUBLISH_TIMEOUT_S, Publisher, Stored, new_traceparent
from breakwater.contracts import subjects
from breakwater.contracts.execution import Progress
from breakwater.contracts.subjects import Header
from services.request.parsing import Submission
from services.request.problems import unavailable

ACCEPT_TIMEOUT_S = 8.0
"""For the acknowledgement of a job, a second try included."""


class Queue:
    """JOBS, as this service writes it: what any other client may publish too."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def put(self, sent: Submission, traceparent: str | None) -> bool:
        """Publishes a job.

        Args:
            sent: the job.
            traceparent: the W3C trace context it belongs to; one is made where None.

        Returns:
            Whether a job with this id was there already; the new one is then not stored.

        Raises:
            Problem: 503, it was not accepted.
        """
        headers = {
            Header.MSG_ID.value: subjects.message_id(sent.job.agent, sent.job_id),
            Header.TRACEPARENT.value: traceparent or new_traceparent(),
        }
        if sent.id_made_here:
            headers[Header.UNIQUE_ID.value] = "1"
        try:
            stored = await self._publish(subjects.job(sent.job.agent), sent.payload, headers)
        except BusUnavailable as error:
            raise unavailable("unavailable", f"the job was not accepted: {error}") from error
        except PublishRefused as error:
            raise unavailable("refused", f"the job was not accepted: {error}") from error
        # An id that was made here is there already only where the first try's acknowledgement was lost.
        return stored.duplicate and not sent.id_made_here

    async def tell_queued(self, sent: Submission) -> None:
        """Tells who listens now that a job is queued. The job is safe already, so nobody minds where that fails."""
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
            return await self._publisher.raw(subject, payload, headers, timeout_s=PUBLISH_TIMEOUT_S)
        except BusUnavailable:
            # The same message id again: stored once, also where only the acknowledgement was lost. But a server that
            # crashed in between may have forgotten it, so the id is not called unique any more.
            again = {name: value for name, value in headers.items() if name != Header.UNIQUE_ID.value}
            left_s = begun + ACCEPT_TIMEOUT_S - time.monotonic()
            return await self._publisher.raw(subject, payload, again, timeout_s=max(left_s, 0.1))
