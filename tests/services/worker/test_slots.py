"""Slots of an agent that several callers share."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from breakwater.jobs.store.plans import Plans
from breakwater.services.worker.slots import DELAY_STEP_S, MIN_DELAY_S, Slots
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker

HOSTILE, HONEST = {"key": "a", "tenant": ""}, {"key": "b", "tenant": ""}


def test_the_slots_of_an_agent_are_shared_by_those_who_called_within_two_minutes() -> None:
    now = 0.0
    slots = Slots(lambda: now)
    with ExitStack() as held:
        for _ in range(7):
            assert slots.has_room("x", 8, HOSTILE)
            held.enter_context(slots.taking("x", HOSTILE))
        with slots.taking("x", HONEST):
            pass
        assert not slots.has_room("x", 8, HOSTILE)
        assert slots.has_room("x", 8, HONEST)
        assert slots.has_room("y", 8, HOSTILE), "of another agent"
        now = 119.0
        assert not slots.has_room("x", 8, HOSTILE)
        now = 200.0
        assert slots.has_room("x", 8, HOSTILE), "it is alone again"


def test_a_key_has_its_share_whatever_tenants_it_names_and_a_tenant_whatever_keys_it_has() -> None:
    with ExitStack() as held:
        slots = Slots(lambda: 0.0)
        with slots.taking("x", HONEST):
            pass
        for number in range(6):
            held.enter_context(slots.taking("x", {"key": "a", "tenant": f"t{number}"}))
        assert not slots.has_room("x", 8, {"key": "a", "tenant": "t7"})
    with ExitStack() as held:
        slots = Slots(lambda: 0.0)
        with slots.taking("x", {"key": "b", "tenant": "other"}):
            pass
        for number in range(6):
            held.enter_context(slots.taking("x", {"key": f"k{number}", "tenant": "t"}))
        assert not slots.has_room("x", 8, {"key": "k7", "tenant": "t"})


def test_two_workers_share_the_slots() -> None:
    slots = Slots(lambda: 0.0)
    slots.workers = 2
    with slots.taking("x", HONEST), slots.taking("x", HOSTILE), slots.taking("x", HOSTILE):
        assert not slots.has_room("x", 8, HOSTILE)


def test_jobs_that_find_no_slot_come_again_one_after_the_other() -> None:
    slots = Slots(lambda: 5.0)
    assert [round(slots.retry_delay_s("x", HOSTILE), 3) for _ in range(3)] == [
        MIN_DELAY_S,
        MIN_DELAY_S + DELAY_STEP_S,
        MIN_DELAY_S + 2 * DELAY_STEP_S,
    ]
    assert slots.retry_delay_s("x", HONEST) == MIN_DELAY_S


async def test_the_slow_jobs_of_one_tenant_leave_slots_to_another_and_all_of_them_run(
    start_worker: StartWorker,
) -> None:
    models = {"sim/slow": model(latency_ms=4000), "sim/m": model()}
    agents = {"writer": {"model": "sim/m", "allowed_models": ["sim/slow"], "concurrency": 4}}
    async with start_worker(models, agents) as plane:
        async with asyncio.timeout(3):
            await plane.run({"agent": "writer", "job_id": "honest-0", "prompt": "hello", "tenant": "honest"})
        for number in range(5):
            job = {
                "agent": "writer",
                "job_id": f"slow-{number}",
                "prompt": "x",
                "tenant": "hostile",
                "model": "sim/slow",
            }
            await plane.publish(job)
        await asyncio.sleep(0.5)
        async with asyncio.timeout(3):
            for number in range(1, 6):
                job = {"agent": "writer", "job_id": f"honest-{number}", "prompt": "hello", "tenant": "honest"}
                assert (await plane.run(job))["status"] == "succeeded"
        for number in range(5):
            assert (await plane.result(f"slow-{number}"))["status"] == "succeeded"
        assert plane.sim.ledger.totals.calls == 11


async def test_jobs_that_come_together_do_not_find_the_same_slot_free(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Plans.change

    async def slow(*given: Any, **options: Any) -> Any:
        await asyncio.sleep(0.5)
        return await change(*given, **options)

    monkeypatch.setattr(Plans, "change", slow)
    models = {"sim/slow": model(latency_ms=4000), "sim/m": model()}
    agents = {"writer": {"model": "sim/m", "allowed_models": ["sim/slow"], "concurrency": 4}}
    async with start_worker(models, agents) as plane:
        async with asyncio.timeout(3):
            await plane.run({"agent": "writer", "job_id": "honest-0", "prompt": "hello", "tenant": "honest"})
        for number in range(8):
            job = {"agent": "writer", "job_id": f"slow-{number}", "prompt": "x", "tenant": "hostile"}
            await plane.publish(job | {"model": "sim/slow", "plan_id": "many"})
        await asyncio.sleep(1.2)
        async with asyncio.timeout(2):
            await plane.run({"agent": "writer", "job_id": "honest-1", "prompt": "hello", "tenant": "honest"})
