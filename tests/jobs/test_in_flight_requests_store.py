"""Which requests wait for a call, and which call a repeated one attaches to."""

from __future__ import annotations

from breakwater.jobs.store.in_flight_requests import KEEP_S, InFlightRequests
from breakwater.kernel.redis.connection import Redis

ASKED = "0123:digest"


async def began(calls: InFlightRequests, request: str, job_id: str | None = None, *, retry: bool = False) -> str:
    return await calls.begin(ASKED, request, job_id or f"job-{request}", attaches=retry, longest_s=300)


async def left(calls: InFlightRequests, request: str, job_id: str, *, cancels: bool = False) -> bool:
    return await calls.leave(ASKED, request, job_id, cancels=cancels)


async def test_a_retry_attaches_to_the_call_with_the_fewest_that_wait(redis: Redis) -> None:
    calls = InFlightRequests(redis)
    assert await began(calls, "r0", retry=True) == "job-r0"
    assert await began(calls, "r1") == "job-r1"
    assert await left(calls, "r0", "job-r0")
    assert await began(calls, "r2", retry=True) == "job-r0", "whose request has left"
    assert await began(calls, "r3", retry=True) == "job-r1", "the latest of two with one each"
    assert await began(calls, "r4", retry=True) == "job-r0", "with one, and not two"
    assert await began(calls, "r4", retry=True) == "job-r0", "and again, as after an answer of Redis that was lost"
    assert await began(calls, "r5") == "job-r5", "which repeats nothing"


async def test_a_call_ends_with_the_last_that_waits_for_it_and_then_nobody_attaches(redis: Redis) -> None:
    calls = InFlightRequests(redis)
    await began(calls, "r0")
    await began(calls, "r1", retry=True)
    assert not await left(calls, "r0", "job-r0", cancels=True)
    assert not await left(calls, "r0", "job-r0", cancels=True)
    assert await left(calls, "r1", "job-r0", cancels=True)
    assert await left(calls, "r1", "job-r0", cancels=True), "asked again, it is the same"
    assert await began(calls, "r2", retry=True) == "job-r2"


async def test_nobody_attaches_to_an_answered_call_however_late_another_leaves_it(redis: Redis) -> None:
    calls = InFlightRequests(redis)
    await began(calls, "r0")
    await began(calls, "r1", retry=True)
    await calls.end(ASKED, "job-r0")
    assert await left(calls, "r0", "job-r0")
    assert await began(calls, "r2", retry=True) == "job-r2"
    await calls.end(ASKED, "job-r2")
    assert await redis.client.keys("bw:unanswered-calls:*") == []


async def test_a_call_is_found_for_as_long_as_it_may_take_and_a_while_after(redis: Redis) -> None:
    calls = InFlightRequests(redis)
    await calls.begin(ASKED, "r0", "j", attaches=False, longest_s=3600)
    await began(calls, "r1")
    [key] = await redis.client.keys("bw:unanswered-calls:*")
    assert 3600 + KEEP_S - 5 < await redis.client.ttl(key) <= 3600 + KEEP_S
