"""Jobs through the worker: retries, fallbacks, timeouts, refusals, and what is recorded of them."""

from __future__ import annotations

import pytest
import redis.asyncio as aioredis

from breakwater.jobs.store.executions import LINGER_MS
from breakwater.kernel.nats import subjects
from tests.flow.fixtures import StartPlane
from tests.flow.kit import COST, COST_NANO, model
from tests.helpers import until

QUICK = {"retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0.01}, "breaker": "off"}


async def test_a_published_job_is_answered_recorded_and_acknowledged(start_plane: StartPlane) -> None:
    async with start_plane({"sim/fast": model()}, {"writer": {"model": "sim/fast"}}) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello", "metadata": {"run": 7}})
        result = await plane.result("j1")
        assert (result["status"], result["total_cost"], result["cost_basis"]) == ("succeeded", COST, "billed")
        assert isinstance(result["output"], str)
        [attempt] = await plane.attempts("writer", "j1")
        assert (attempt["attempt_id"], attempt["cost"], attempt["cause"]) == ("j1:1", COST, "first")
        [record] = await plane.messages("EVENTS", "bw.executions.writer.j1", at_least=1)
        assert record["metadata"] == {"run": 7}
        await until(lambda: _drained(plane), what="an empty JOBS")
        spent = await until(lambda: _spent(plane.environment["BREAKWATER_REDIS_URL"]), what="a settled budget")
        assert spent == COST_NANO


async def _drained(plane) -> bool:
    return await plane.pending_jobs() == 0


async def _spent(redis_url: str) -> int:
    import redis.asyncio as aioredis

    client = aioredis.Redis.from_url(redis_url, decode_responses=True)
    try:
        [key] = [key async for key in client.scan_iter("bw:limits:daily:*")] or [None]
        return 0 if key is None else int(await client.hget(key, "spent:global") or 0)
    finally:
        await client.aclose()


@pytest.mark.long(about_s=12)
async def test_a_long_wait_holds_no_slot_and_survives_a_restart(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 1], "status": 429, "retry_after_s": 11})}
    agents = {"writer": {"model": "sim/m", **QUICK}}
    async with start_plane(models, agents, services=("worker",)) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        await until(lambda: plane.attempts("writer", "j1"), what="the first attempt")
        assert await plane.terminate("worker") == 0
        plane.start("worker")
        result = await plane.result("j1")
        assert [a["outcome"] for a in result["attempts"]] == ["error", "success"]
        assert result["attempts"][1]["backoff_ms"] >= 11_000


async def test_any_model_id_makes_its_way_through_every_subject(start_plane: StartPlane) -> None:
    wild = "org.name/some model:v1.5>"
    agents = {"an-agent/with.odd*name": {"model": wild, "breaker": {"consecutive_failures": 1, "cooldown_s": 60}}}
    async with start_plane({wild: model({"status": 500})}, agents) as plane:
        await plane.publish({"agent": "an-agent/with.odd*name", "job_id": "j/1.2 *", "prompt": "hello"})
        result = await plane.result("j/1.2 *")
        assert result["requested_model"] == wild
        [opened] = await until(
            lambda: plane.messages("EVENTS", subjects.breaker("an-agent/with.odd*name", wild)), what="a transition"
        )
        assert opened["model"] == wild


async def test_a_finished_job_leaves_nothing_of_itself_in_redis_for_longer_than_it_lingers(
    start_plane: StartPlane,
) -> None:
    async with start_plane({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        await plane.result("j1")
        client = aioredis.Redis.from_url(plane.environment["BREAKWATER_REDIS_URL"], decode_responses=True)

        async def clean() -> bool:
            left_ms = [await client.pttl(key) for key in await client.keys("bw:execution:*")]
            return await client.hlen("bw:limits:reservations") == 0 and all(0 <= ms <= LINGER_MS for ms in left_ms)

        await until(clean, what="an empty Redis but for the budgets, and what expires in a minute")
        await client.aclose()
