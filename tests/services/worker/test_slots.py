"""Slots of an agent that several callers share."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.rules.turns import CallerTurn
from breakwater.jobs.store.executions import Executions
from breakwater.jobs.store.plans import Plans
from breakwater.kernel.nats.delivery import wake_early
from breakwater.kernel.nats.subjects import WAITING_CALLERS, Stream
from breakwater.kernel.nats.topology import PARKED_CONSUMER
from breakwater.kernel.redis.connection import KEPT_SINCE
from breakwater.services.worker import handler, turns
from breakwater.services.worker.slots import Slots
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

HOSTILE, HONEST = CallerTurn("a"), CallerTurn("b")


def test_the_slots_of_an_agent_are_shared_by_those_who_called_within_a_minute() -> None:
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
        now = 58.0
        assert not slots.has_room("x", 8, HOSTILE)
        now = 62.0
        assert slots.has_room("x", 8, HOSTILE), "it is alone again"


def test_slots_that_a_caller_needs_no_more_are_soon_given_to_one_that_waits() -> None:
    now = 0.0
    slots = Slots(lambda: now)
    with ExitStack() as burst:
        for _ in range(6):
            burst.enter_context(slots.taking("x", HONEST))

    def room() -> int:
        with ExitStack() as held:
            while slots["x"].held < 16 and slots.has_room("x", 16, HOSTILE):
                held.enter_context(slots.taking("x", HOSTILE))
            return slots["x"].held

    rooms = []
    for now in (0.0, 2.0, 4.0, 6.0, 60.0, 70.0):  # noqa: B007  the clock
        rooms.append(room())
    assert rooms == [9, 12, 13, 14, 14, 16], "what another caller's next call needs stays free"


def test_many_callers_that_seldom_call_keep_few_slots_free() -> None:
    now = 0.0
    slots = Slots(lambda: now)
    for second in range(60):
        now = float(second)
        with slots.taking("x", CallerTurn(f"k{second}")):
            pass
    with ExitStack() as held:
        while slots.has_room("x", 32, HOSTILE):
            held.enter_context(slots.taking("x", HOSTILE))
        assert slots["x"].held >= 26


def test_a_key_has_its_share_whatever_tenants_it_names_and_a_tenant_whatever_keys_it_has() -> None:
    with ExitStack() as held:
        slots = Slots(lambda: 0.0)
        with slots.taking("x", HONEST):
            pass
        for number in range(6):
            held.enter_context(slots.taking("x", CallerTurn("a", f"t{number}")))
        assert not slots.has_room("x", 8, CallerTurn("a", "t7"))
    with ExitStack() as held:
        slots = Slots(lambda: 0.0)
        with slots.taking("x", CallerTurn("b", "other")):
            pass
        for number in range(6):
            held.enter_context(slots.taking("x", CallerTurn(f"k{number}", "t")))
        assert not slots.has_room("x", 8, CallerTurn("k7", "t"))


def test_two_workers_share_the_slots() -> None:
    slots = Slots(lambda: 0.0)
    slots.workers = 2
    with slots.taking("x", HONEST), slots.taking("x", HOSTILE), slots.taking("x", HOSTILE):
        assert not slots.has_room("x", 8, HOSTILE)


def test_who_begins_to_call_has_room_before_its_first_job_comes() -> None:
    with ExitStack() as held:
        slots = Slots(lambda: 0.0)
        for _ in range(7):
            held.enter_context(slots.taking("x", HOSTILE))
        assert slots.has_room("x", 8, HOSTILE)
        slots["x"].expect(HONEST, 0.0)
        assert not slots.has_room("x", 8, HOSTILE)
        assert slots.has_room("x", 8, HONEST)


def test_low_priority_leaves_slots_to_high_priority_of_the_same_key() -> None:
    low, high = CallerTurn("a", "", "low"), CallerTurn("a", "", "high")
    with ExitStack() as held:
        slots = Slots(lambda: 0.0)
        with slots.taking("x", high):
            pass
        for _ in range(6):
            held.enter_context(slots.taking("x", low))
        assert not slots.has_room("x", 8, low)
        assert slots.has_room("x", 8, high)


@pytest.mark.long(about_s=8)
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


async def test_what_waits_for_a_slot_stands_in_nobodys_way_and_comes_back_in_order(start_worker: StartWorker) -> None:
    models = {"sim/m": model(latency_ms=60)}
    agents = {"writer": {"model": "sim/m", "concurrency": 4, "priority": "high"}}
    async with start_worker(models, agents) as plane:

        async def order(jobs: int, **fields: Any) -> None:
            for number in range(jobs):
                job_id = f"{fields.get('tenant')}-{fields.get('priority')}-{number}"
                await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", **fields})

        slots = plane.worker.slots["writer"]
        slots.expect(CallerTurn("", "other", "high"), plane.worker.slots.clock())
        await order(12, tenant="flooding", priority="low")
        await until(lambda: len(slots.waiting) >= 6, "the flood to wait")

        async def is_free() -> bool:
            return await plane.pending_jobs() < 5

        await until(is_free, "the queue to be free for others")
        async with asyncio.timeout(5):
            await plane.run({"agent": "writer", "job_id": "single", "prompt": "x", "tenant": "other"})
        assert len(slots.waiting) > 0, "the flood did not go before"
        ended = [(await plane.result(f"flooding-low-{number}"))["completed_at"] for number in range(12)]
        assert max(ended[:4]) < min(ended[-4:]), "the oldest first"
        await until(lambda: slots.held == 0, "all slots to be free")


async def test_who_fills_the_queue_of_an_agent_is_named_before_another_caller_comes_back(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "LONG_QUEUE", 2)
    agents = {"writer": {"model": "sim/m", "concurrency": 2}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        named = await plane.client.subscribe(WAITING_CALLERS)
        await plane.client.flush()

        async def flood(name: str) -> None:
            for number in range(8):
                await plane.publish({"agent": "writer", "job_id": f"{name}-{number}", "prompt": "x"})
            for number in range(8):
                await plane.result(f"{name}-{number}")

        await flood("alone")
        assert named.pending_msgs == 0
        plane.worker.slots["writer"].expect(HONEST, plane.worker.slots.clock())
        await flood("shared")
        notices = [json.loads((await named.next_msg()).data) for _ in range(named.pending_msgs)]
        assert [["writer", CallerTurn().of_key.text]] in notices


async def test_large_jobs_that_find_no_room_in_memory_come_again_before_the_slots_have_nothing_to_do(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_BYTES", 2 * turns.ENTRY_BYTES + 2_000)
    monkeypatch.setattr(turns, "FULL_S", 0.2)
    agents = {"writer": {"model": "sim/m", "concurrency": 2}}
    async with start_worker({"sim/m": model(latency_ms=20)}, agents) as plane:
        slots = plane.worker.slots["writer"]
        slots.expect(HONEST, plane.worker.slots.clock())
        for number in range(12):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x" * 500})
        async with asyncio.timeout(20):
            for number in range(12):
                assert (await plane.result(f"j{number}"))["status"] == "succeeded"
        assert len(plane.sim.ledger.calls) == 12


async def test_a_worker_that_stops_leaves_the_jobs_that_wait_to_others_at_once(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/slow", "concurrency": 2}}
    async with start_worker({"sim/slow": model({"hang_s": 30})}, agents) as plane:
        slots = plane.worker.slots["writer"]
        slots.expect(HONEST, plane.worker.slots.clock())
        for number in range(4):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        await until(lambda: len(slots.waiting) == 3, "three jobs to wait")
        await plane.end()

        async def fetches_no_more() -> bool:
            return (await plane.jetstream.consumer_info(Stream.PARKED.value, PARKED_CONSUMER)).num_waiting == 0

        await until(fetches_no_more, "the worker's last fetch to end")
        waiting = len(slots.waiting)
        await plane.worker.turns.close()
        assert len(slots.waiting) == 0
        of_another = await plane.jetstream.pull_subscribe_bind(PARKED_CONSUMER, Stream.PARKED.value)
        assert waiting >= 2
        assert len({(await of_another.fetch(1, timeout=5))[0].subject for _ in range(waiting)}) == waiting


async def cancel(plane: WorkerPlane, job_id: str) -> None:
    by = Cancellation(by="program", name="client", at=datetime.now(UTC))
    await plane.worker.executions.cancel(PendingCancel(execution_id=job_id, cancellation=by, agents=()))
    await wake_early(plane.worker.publisher, plane.worker.lookup, job_id)


@pytest.mark.parametrize("delay_s", [0.0, 1.0], ids=["", "whose_first_message_is_acknowledged_late"])
async def test_a_job_that_only_waited_for_its_turn_has_no_lost_call_on_a_new_redis(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    cancels_of = Executions.cancels_of

    async def slow(*given: Any) -> Any:
        await asyncio.sleep(delay_s)
        return await cancels_of(*given)

    monkeypatch.setattr(Executions, "cancels_of", slow)
    agents = {"writer": {"model": "sim/m", "concurrency": 4}}
    async with start_worker({"sim/m": model(latency_ms=300)}, agents, begin=False) as plane:
        plane.worker.slots["writer"].expect(HONEST, plane.worker.slots.clock())
        job_ids = ["j0", "j1", "j2", "j3", "j4"]
        for job_id in (*job_ids, "j3", "j2", "j4"):
            await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x"})
        # As after a start or a loss: the data is younger than the jobs.
        await plane.worker.redis.client.set(KEPT_SINCE, int(datetime.now(UTC).timestamp() * 1000) + 1)
        plane.begin()
        async with asyncio.timeout(20):
            for job_id in job_ids:
                attempts = (await plane.result(job_id))["attempts"]
                assert [attempt["outcome"] for attempt in attempts] == ["success"]
        assert plane.sim.ledger.totals.calls == len(job_ids)


async def test_a_job_that_was_cancelled_before_it_waits_for_its_turn_ends_at_once(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/slow", "concurrency": 2}}
    async with start_worker({"sim/slow": model({"hang_s": 30})}, agents, begin=False) as plane:
        await plane.worker.redis.client.set(KEPT_SINCE, 0)
        plane.worker.slots["writer"].expect(HONEST, plane.worker.slots.clock())
        for number in range(3):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        await cancel(plane, "j2")
        plane.begin()
        assert (await plane.result("j2", timeout_s=10))["status"] == "cancelled"


async def test_a_job_that_waits_for_its_turn_is_cancelled_at_once(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/slow", "concurrency": 2}}
    async with start_worker({"sim/slow": model({"hang_s": 30})}, agents) as plane:
        await plane.worker.redis.client.set(KEPT_SINCE, 0)
        slots = plane.worker.slots["writer"]
        slots.expect(HONEST, plane.worker.slots.clock())
        for number in range(3):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        await until(lambda: len(slots.waiting) == 2, "two jobs to wait")
        await cancel(plane, "j2")
        assert (await plane.result("j2", timeout_s=10))["status"] == "cancelled"
