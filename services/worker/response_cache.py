"""The response cache: read before a job runs, written after it succeeds."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime

import structlog

from breakwater.calls.assignment import Assignment, JobEnd
from breakwater.calls.settings import CacheRules
from breakwater.calls.store.cache import CachedAnswer, Follower, Leader
from breakwater.jobs.rules.ownership import cache_key
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.services.worker.context import WorkerContext

LEASE_S = 60.0
"""The lease of the job that calls on behalf of identical jobs; after it, another job takes its place."""

MIN_POLL_S = 0.05
MAX_POLL_S = 1.0


class ResponseCache:
    """The fleet's cache of responses, for one job."""

    def __init__(self, worker: WorkerContext, job: Assignment, rules: CacheRules) -> None:
        self._worker = worker
        self._now = job.now
        self._rules = rules
        self._leads = False
        self._holder = job.execution_id  # the same after a crash
        request = None if job.job.api_request is None else job.job.api_request.model_dump(mode="json")
        self._key = cache_key(
            agent=job.agent_name,
            tenant=job.job.tenant,
            owner=job.owner,
            requested_model=job.chain[0],
            messages=job.messages,
            input=job.job.input,
            params=job.parameters.values if request is None else {**job.parameters.values, "api_request": request},
            schema=None if job.output_guard is None else dict(job.output_guard.schema),
        )
        if job.job.returns_response:
            self._key += ":response"  # an answer that was cached without its response would not do

    async def find(self, until: datetime) -> CachedAnswer | None:
        """Returns the cached answer. Waits for it if an identical job is already calling a model."""
        wait_s = MIN_POLL_S
        while True:
            lookup = await self._ask()
            if isinstance(lookup, CachedAnswer):
                return lookup
            self._leads = self._rules.share_concurrent and not isinstance(lookup, Follower)
            left_s = (until - self._now()).total_seconds()
            if not isinstance(lookup, Follower) or left_s <= 0:
                return None
            await self._worker.sleep(min(wait_s, left_s))
            wait_s = min(wait_s * 2, MAX_POLL_S)

    async def renew(self) -> None:
        """Renews the lead while the job runs."""
        if self._leads:
            await self._ask()

    async def keep(self, end: JobEnd, execution_id: str) -> None:
        """Caches the answer of a successful job, also for identical jobs that wait for it."""
        if end.reason is None and end.answer is not None:
            content = end.answer.response, end.answer.finish_reason, end.answer.choices
            answer = CachedAnswer(execution_id, end.chosen_model, end.answer.output, self._now(), *content)
            flight = self._holder if self._leads else None
            await best_effort(self._worker.cache.put(self._key, answer, self._rules.ttl_s, flight=flight))

    async def leave(self) -> None:
        """Gives up the lead: the next identical job calls the model."""
        if self._leads:
            self._leads = False
            await best_effort(self._worker.cache.leave(self._key, self._holder))

    async def _ask(self) -> CachedAnswer | Leader | Follower | None:
        holder = self._holder if self._rules.share_concurrent else None
        return await self._worker.outages.retry_while_unavailable(
            lambda: self._worker.cache.ask(self._key, holder, round(LEASE_S * 1000))
        )


async def best_effort(work: Awaitable[object]) -> None:
    """Does work that may fail: an answer that is not cached costs one more call, and the lease expires by itself."""
    try:
        await work
    except StateUnavailableError as error:
        structlog.get_logger().info("answer_not_kept", error=str(error))
