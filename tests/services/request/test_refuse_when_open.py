"""Jobs that are refused at once, as no model of their agent may be called."""

import asyncio
import time

import pytest

from breakwater.breakers.api import PROBE_POLL_S, PROBE_WAIT_S
from breakwater.breakers.rules.breaker import Breaker, BreakerKey
from breakwater.breakers.store import Breakers
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.kernel.redis.connection import Redis
from tests.services.request.conftest import HttpApi, new_id, publish_result, put_breaker, redis_ms, result_of

ISOLATED = Breaker(state="isolated", version=1)


async def opened(redis: Redis, for_ms: int) -> Breaker:
    return Breaker(state="open", open_until_ms=await redis_ms(redis) + for_ms, version=1)


async def test_a_job_is_refused_until_the_first_of_its_models_may_be_probed(governed: HttpApi, redis: Redis) -> None:
    await put_breaker(redis, "writer", "m", await opened(redis, 90_000))
    assert (await governed.post({"agent": "writer", "prompt": "x"})).status == 202
    await put_breaker(redis, "writer", "other/n", await opened(redis, 30_000))
    answer = await governed.post({"agent": "writer", "prompt": "x"})
    assert (answer.status, answer.code) == (503, "agent_unavailable")
    assert answer.message == "agent 'writer' is temporarily unavailable due to recent failures"
    assert 20 <= int(answer.headers["Retry-After"]) <= 30
    assert len(answer.json["error"]["details"]) == 2
    waiting = await governed.post({"agent": "writer", "prompt": "x"}, query="?wait_s=60")
    assert (waiting.status, waiting.code) == (503, "agent_unavailable")
    assert await governed.queued() == 1


async def test_it_is_the_jobs_own_models_that_count(governed: HttpApi, redis: Redis) -> None:
    for model in ("m", "other/n"):
        await put_breaker(redis, "writer", model, await opened(redis, 90_000))
    assert (await governed.post({"agent": "writer", "prompt": "x", "model": "allowed"})).status == 202
    await put_breaker(redis, "writer", "allowed", await opened(redis, 20_000))
    answer = await governed.post({"agent": "writer", "prompt": "x", "model": "allowed"})
    assert (answer.status, int(answer.headers["Retry-After"]) <= 20) == (503, True)
    alone = await governed.post({"agent": "writer", "prompt": "x", "model": "m", "fallback_models": []})
    assert 80 <= int(alone.headers["Retry-After"]) <= 90


async def test_one_that_was_forced_open_gives_no_time_to_wait_for(governed: HttpApi, redis: Redis) -> None:
    await put_breaker(redis, "reader", "m", ISOLATED)
    answer = await governed.post({"agent": "reader", "prompt": "x"})
    assert (answer.status, answer.code) == (503, "agent_unavailable")
    assert "Retry-After" not in answer.headers
    assert answer.json["error"]["details"] == [
        {"path": "agent", "message": "no call to 'm' before an operator resets its breaker"}
    ]
    await put_breaker(redis, "writer", "m", ISOLATED)
    await put_breaker(redis, "writer", "other/n", await opened(redis, 30_000))
    mixed = await governed.post({"agent": "writer", "prompt": "x"})
    assert 20 <= int(mixed.headers["Retry-After"]) <= 30


async def test_a_probe_under_way_refuses_and_one_that_is_due_is_left_to_the_worker(
    governed: HttpApi, redis: Redis
) -> None:
    lease = await redis_ms(redis) + 10_000
    probing = Breaker(state="half_open", probe="x:1", probe_until_ms=lease, version=2)
    await put_breaker(redis, "reader", "m", probing)
    answer = await governed.post({"agent": "reader", "prompt": "x"})
    assert (answer.status, answer.code) == (503, "agent_unavailable")
    assert 1 <= int(answer.headers["Retry-After"]) <= 10
    key = BreakerKey("reader", "m")
    due = Breaker(state="open", open_until_ms=await redis_ms(redis) - 1, version=1)
    for passing in (due, Breaker(state="half_open", version=2), Breaker()):
        await put_breaker(redis, "reader", "m", passing)
        [before] = await Breakers(redis).load([key])
        assert (await governed.post({"agent": "reader", "prompt": "x"})).status == 202
        [after] = await Breakers(redis).load([key])
        assert (after.breaker, after.revision) == (before.breaker, before.revision)


async def test_a_probe_that_ends_well_lets_in_who_waited_for_it(governed: HttpApi, redis: Redis) -> None:
    lease = await redis_ms(redis) + 60_000
    await put_breaker(redis, "reader", "m", Breaker(state="half_open", probe="x:1", probe_until_ms=lease, version=2))
    begun = time.monotonic()
    waiting = asyncio.create_task(governed.post({"agent": "reader", "prompt": "x"}))
    done, _ = await asyncio.wait({waiting}, timeout=2 * PROBE_POLL_S)
    assert not done
    await put_breaker(redis, "reader", "m", Breaker(version=3))
    assert (await waiting).status == 202
    assert time.monotonic() - begun < PROBE_WAIT_S


async def test_less_than_a_second_is_a_second(governed: HttpApi, redis: Redis) -> None:
    # Long enough to be asked within: it is put back as long as it was over before the answer.
    answer = None
    while answer is None or answer.status == 202:
        await put_breaker(redis, "reader", "m", await opened(redis, 900))
        answer = await governed.post({"agent": "reader", "prompt": "x"})
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize(("agent", "key"), [("by-model", ("*", "shared")), ("by-provider", ("*", "local/*"))])
async def test_shared_breakers_refuse_for_all_who_share_them(
    governed: HttpApi, redis: Redis, agent: str, key: tuple[str, str]
) -> None:
    await put_breaker(redis, *key, await opened(redis, 30_000))
    answer = await governed.post({"agent": agent, "prompt": "x"})
    assert (answer.status, answer.code) == (503, "agent_unavailable")


async def test_agents_that_do_not_ask_for_it_are_never_refused(governed: HttpApi, redis: Redis) -> None:
    for agent in ("patient", "unguarded"):
        await put_breaker(redis, agent, "m", ISOLATED)
        assert (await governed.post({"agent": agent, "prompt": "x"})).status == 202


async def test_a_dry_run_calls_nothing_and_is_not_refused(governed: HttpApi, redis: Redis) -> None:
    await put_breaker(redis, "reader", "m", ISOLATED)
    assert (await governed.post({"agent": "reader", "prompt": "x", "dry_run": True})).status == 202


async def test_a_job_that_was_accepted_or_decided_before_is_not_refused(governed: HttpApi, redis: Redis) -> None:
    accepted, decided, new = new_id(), new_id(), new_id()
    assert (await governed.post({"agent": "reader", "prompt": "x", "job_id": accepted})).status == 202
    await publish_result(governed.bus, result_of(decided, "reader"))
    await put_breaker(redis, "reader", "m", ISOLATED)
    again = await governed.post({"agent": "reader", "prompt": "x", "job_id": accepted})
    assert (again.status, again.json["duplicate"]) == (202, True)
    answer = await governed.post({"agent": "reader", "prompt": "x", "job_id": decided}, query="?wait_s=60")
    assert (answer.status, answer.json["output"]) == (200, "done")
    refused = await governed.post({"agent": "reader", "prompt": "x", "job_id": new})
    assert (refused.status, refused.code) == (503, "agent_unavailable")
    shown = await governed.ask("GET", f"/api/v1/jobs/{new}")
    assert (shown.status, shown.code) == (404, "unknown_job")


async def test_a_job_that_another_process_accepts_at_this_moment_is_not_refused(
    governed: HttpApi, redis: Redis
) -> None:
    await put_breaker(redis, "reader", "m", ISOLATED)
    another, job_id = AcceptedJobs(redis), new_id()
    another.mark(job_id, "reader")
    answer = await governed.post({"agent": "reader", "prompt": "x", "job_id": job_id})
    await another.close()
    assert answer.status == 202


async def test_without_redis_jobs_are_accepted_and_the_worker_decides(redis_away: HttpApi) -> None:
    assert (await redis_away.post({"agent": "reader", "prompt": "x"})).status == 202


async def test_what_is_no_job_is_reported_so_first(governed: HttpApi, redis: Redis) -> None:
    await put_breaker(redis, "reader", "m", ISOLATED)
    answer = await governed.post({"agent": "reader", "prompt": "x", "model": "forbidden"})
    assert (answer.status, answer.paths) == (422, ["model"])


async def test_a_reset_by_an_operator_lets_jobs_in_again(governed: HttpApi, redis: Redis) -> None:
    await governed.act("breakers/isolate", agent="reader", model="m")
    assert (await governed.post({"agent": "reader", "prompt": "x"})).code == "agent_unavailable"
    await governed.act("breakers/reset", agent="reader", model="m")
    assert (await governed.post({"agent": "reader", "prompt": "x"})).status == 202
