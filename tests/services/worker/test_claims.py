"""One job under several deliveries: who holds its claim calls and decides, and nobody else, whatever NATS delivers."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from typing import Any

import pytest

from breakwater.calls.assignment import Checkpoint, InFlight
from breakwater.calls.providers.base import Answer, Call
from breakwater.jobs.store.executions import Claim
from breakwater.kernel.nats import subjects
from breakwater.prices.rules.usage import Usage
from breakwater.services.worker import handler, leases, recovery
from tests.flow.kit import model
from tests.helpers import FIRST, until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

AGENTS = {"writer": {"model": "sim/m", "retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0}}}
JOB = {"agent": "writer", "job_id": "j1", "prompt": "hello"}
KEY = Claim("j1", "").key


class Held:
    """A provider that answers when the test says so, and counts."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answer = asyncio.Event()

    async def perform(self, call: Call) -> Answer:
        self.calls.append(call)
        await self.answer.wait()
        return Answer("done", Usage(120, 40))

    async def refresh_credential(self, used: int | None) -> bool:
        del used
        return False

    async def close(self) -> None:
        pass


async def everything_adds_up(plane: WorkerPlane, calls: int) -> dict[str, Any]:
    """One result and one record, with all attempts of the log and no other; a call for each. Returns the result."""
    result = await plane.result("j1")
    [record] = await plane.messages("EVENTS", subjects.execution("writer", "j1"), at_least=1)
    attempts = await plane.attempts("writer", "j1")
    assert [one["attempt_id"] for one in attempts] == [one["attempt_id"] for one in record["attempts"]]
    assert (
        Decimal(record["total_cost"]) == sum(Decimal(one["cost"]) for one in attempts) == Decimal(result["total_cost"])
    )
    assert len(attempts) == calls
    return result


async def delivered_again(plane: WorkerPlane) -> None:
    """Has NATS deliver the job again, as when it has heard nothing of its worker for the ack wait."""
    config = (await plane.jetstream.consumer_info("JOBS", "worker-writer")).config
    await plane.jetstream.add_consumer("JOBS", config.evolve(ack_wait=0.5))

    async def again() -> bool:
        return (await plane.jetstream.consumer_info("JOBS", "worker-writer")).num_redelivered > 0

    await until(again, "a redelivery")


async def test_a_redelivery_waits_while_the_worker_lives_and_calls_nobody(start_worker: StartWorker) -> None:
    held = Held()
    async with start_worker({"sim/m": model()}, AGENTS, providers={"sim": held}) as plane:
        await plane.publish(JOB)
        await until(lambda: held.calls, "the call")
        await delivered_again(plane)
        held.answer.set()
        result = await everything_adds_up(plane, calls=1)
        assert [one["outcome"] for one in result["attempts"]] == ["success"]

        async def acknowledged() -> bool:
            return await plane.pending_jobs() == 0

        await until(acknowledged, "the acknowledgement")
        assert len(held.calls) == 1
        assert await plane.messages("DLQ", "bw.dlq.>") == []


async def test_a_worker_that_was_superseded_while_it_called_decides_nothing(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    async with start_worker({"sim/m": model()}, AGENTS, providers={"sim": held}) as plane:
        await plane.publish(JOB)
        await until(lambda: held.calls, "the call")
        # It stood still for so long that another worker has the job.
        [claim] = plane.worker.leases.claims.values()
        other, redis = Claim.new("j1"), plane.worker.redis.client
        await redis.hset(KEY, "token", other.token)
        claim.lease_valid_until = 0.0
        held.answer.set()
        await until(lambda: "job_taken_over" in plane.log("worker"), "that it sees it")
        assert await plane.last("RESULTS", subjects.result("j1")) is None
        # The other one dies; whoever follows it takes in what the first has paid for.
        await plane.worker.executions.release(other)
        config = (await plane.jetstream.consumer_info("JOBS", "worker-writer")).config
        await plane.jetstream.add_consumer("JOBS", config.evolve(ack_wait=0.5))
        result = await everything_adds_up(plane, calls=2)
        assert [one["outcome"] for one in result["attempts"]] == ["success", "success"]
        assert len(held.calls) == 2


async def test_a_worker_that_stalled_between_admission_and_call_calls_nobody(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    held.answer.set()
    async with start_worker({"sim/m": model()}, AGENTS, providers={"sim": held}) as plane:
        other, confirm = Claim.new("j1"), plane.worker.leases.confirm
        redis = plane.worker.redis.client

        async def taken_over_first(claim: Claim) -> None:
            monkeypatch.setattr(leases.Leases, "confirm", lambda _, claim: confirm(claim))
            await redis.hset(KEY, "token", other.token)
            plane.worker.leases.claims[claim].lease_valid_until = 0.0
            await confirm(claim)

        monkeypatch.setattr(leases.Leases, "confirm", lambda _, claim: taken_over_first(claim))
        await plane.publish(JOB)
        await until(lambda: "job_taken_over" in plane.log("worker"), "that it sees it")
        assert held.calls == []


async def test_an_attempt_that_its_own_worker_records_in_the_last_moment_is_taken_in(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"kind": "server", "class": "ServerError", "message": "no", "status_code": 500, "retryable": True}
    moment = "2026-11-21T10:00:00.000Z"
    late = {
        "attempt_id": "j1:1", "execution_id": "j1", "job_id": "j1", "agent": "writer", "number": 1, "model": "sim/m",
        "provider": "sim", "started_at": moment, "completed_at": moment, "duration_ms": 0, "outcome": "error",
        "error": error, "cause": "first", "cost": "0.000042000", "cost_basis": "billed",
    }  # fmt: skip
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        now, looked, really = plane.worker.now(), 0, recovery.recorded_attempt

        async def before_it_is_there(*asked: Any) -> Any:
            nonlocal looked
            looked += 1
            found = await really(*asked)
            if looked == 1:
                subject = subjects.attempt("writer", "j1", 1)
                await plane.jetstream.publish(subject, json.dumps(late).encode(), headers=FIRST)
            return found

        monkeypatch.setattr(recovery, "recorded_attempt", before_it_is_there)
        flight = InFlight(
            number=1, model="sim/m", provider="sim", cause="first", started_at=now, backoff_ms=0, reserved=None
        )
        at = Checkpoint(dispatched_at=now, deadline=now.replace(year=now.year + 1), in_flight=flight, model="sim/m")
        claim = Claim.new("j1")
        await plane.worker.executions.claim(claim)
        await plane.worker.executions.checkpoint(claim, at.text())
        await plane.worker.executions.release(claim)
        plane.begin()
        await plane.publish(JOB)
        result = await everything_adds_up(plane, calls=2)
        assert [one["outcome"] for one in result["attempts"]] == ["error", "success"]
        assert plane.sim.ledger.totals.calls == 1


async def test_a_job_that_is_decided_between_the_look_and_the_claim_is_answered_though_it_has_a_checkpoint(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_worker({"sim/m": model()}, AGENTS) as plane:
        first = await plane.run(JOB)

        async def acknowledged() -> bool:
            return await plane.pending_jobs() == 0

        await until(acknowledged, "the acknowledgement")
        # As its worker leaves it that dies after the decision.
        at = Checkpoint(dispatched_at=plane.worker.now(), deadline=plane.worker.now())
        await plane.worker.redis.client.hset(KEY, "checkpoint", at.text())
        await plane.worker.redis.client.hdel(KEY, "token")
        looks, really = 0, handler.stored_result

        async def not_yet(*asked: Any) -> Any:
            nonlocal looks
            looks += 1
            return None if looks == 1 else await really(*asked)

        monkeypatch.setattr(handler, "stored_result", not_yet)
        replies = await plane.client.subscribe("bw.replies.again")
        await plane.publish(JOB | {"reply_to": "bw.replies.again"})
        answer = json.loads((await replies.next_msg(timeout=60)).data)
        assert (answer["execution_id"], answer["completed_at"]) == ("j1", first["completed_at"])
        assert looks == 2
        assert plane.sim.ledger.totals.calls == 1
        await until(acknowledged, "the acknowledgement")


async def test_after_a_standstill_a_first_delivery_is_looked_up_before_it_is_run(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    async with start_worker({"sim/m": model()}, AGENTS) as plane:
        really = handler.stored_result

        async def noted(*asked: Any) -> Any:
            looked.append(asked[1])
            return await really(*asked)

        monkeypatch.setattr(handler, "stored_result", noted)
        unique = {"Breakwater-Unique-Id": "1"}
        await plane.publish(JOB | {"job_id": "before"}, **unique)
        await plane.result("before")
        assert looked == []
        monkeypatch.setattr(leases.Leases, "may_be_late", lambda _: True)
        await plane.publish(JOB | {"job_id": "after"}, **unique)
        await plane.result("after")
        assert set(looked) == {"after"}


async def test_a_job_that_a_stopping_worker_gives_back_is_taken_up_at_once(start_worker: StartWorker) -> None:
    held = Held()
    async with start_worker({"sim/m": model()}, AGENTS, providers={"sim": held}) as plane:
        await plane.publish(JOB)
        await until(lambda: held.calls, "the call")
        await plane.end()
        assert await plane.worker.redis.client.hget(KEY, "token") is None
        held.answer.set()
        plane.begin()
        result = await everything_adds_up(plane, calls=2)
        assert [one["outcome"] for one in result["attempts"]] == ["worker_lost", "success"]
