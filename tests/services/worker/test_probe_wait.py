"""Jobs that find the breaker half-open: they wait a moment for the probe of another, and not for long."""

from __future__ import annotations

from dataclasses import replace

from breakwater.breakers.rules.admission import PROBE_WAIT_S
from breakwater.breakers.rules.breaker import Breaker, BreakerKey
from breakwater.breakers.store import Saving
from breakwater.jobs.store.executions import Claim
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

KEY = BreakerKey("writer", "sim/m")
JOB = {"agent": "writer", "job_id": "j1", "prompt": "hello"}
AGENTS = {"writer": {"model": "sim/m", "breaker": {"cooldown_s": 30}}}


async def set_breaker(plane: WorkerPlane, breaker: Breaker) -> None:
    [before] = await plane.worker.breakers.load([KEY])
    assert await plane.worker.breakers.save([Saving(KEY, before, breaker, None)]) == [True]


async def half_open(plane: WorkerPlane) -> Breaker:
    """The breaker, while another job's call is its probe."""
    [before] = await plane.worker.breakers.load([KEY])
    probe_until_ms = before.now_ms + 60_000
    breaker = replace(before.breaker, state="half_open", version=2, probe="other:1", probe_until_ms=probe_until_ms)
    await set_breaker(plane, breaker)
    return breaker


async def test_a_job_that_comes_while_the_probe_succeeds_is_answered(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS) as plane:
        breaker = await half_open(plane)
        await plane.publish(JOB)
        # It has been told that it must wait: its checkpoint is saved in the round trip in which the breaker is asked.
        await until(lambda: plane.worker.redis.client.hexists(Claim.new("j1").key, "checkpoint"), "the job to ask")
        await set_breaker(plane, replace(breaker, state="closed", version=3, probe=None))
        result = await plane.result("j1")
    assert (result["status"], len(result["attempts"])) == ("succeeded", 1)


async def test_a_probe_that_takes_long_is_not_waited_for(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, fake_clock=True) as plane:
        await half_open(plane)
        result = await plane.run(JOB)
        assert PROBE_WAIT_S <= sum(plane.clock.slept) < PROBE_WAIT_S + 1
    assert (result["status"], result["reason"]) == ("dead_lettered", "breaker_open")
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["short_circuited"]


async def test_another_model_is_tried_at_once(start_worker: StartWorker) -> None:
    agents = {"writer": AGENTS["writer"] | {"fallback_models": ["sim/n"]}}
    async with start_worker({"sim/m": model(), "sim/n": model()}, agents, fake_clock=True) as plane:
        await half_open(plane)
        result = await plane.run(JOB)
        assert plane.clock.slept == []
    assert (result["status"], result["chosen_model"]) == ("succeeded", "sim/n")
