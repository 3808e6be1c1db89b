"""What a worker makes of the traces that a crash can leave behind, each laid out in the test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakwater.kernel.nats import subjects
from tests.flow.kit import COST, Plane, model
from tests.helpers import FIRST, until
from tests.services.worker.conftest import StartWorker

AGENTS = {"writer": {"model": "sim/m", "retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0}}}
JOB = {"agent": "writer", "job_id": "j1", "prompt": "hello"}
MOMENT = "2026-11-21T10:00:00.000Z"


def attempt(number: int, outcome: str, **more: Any) -> dict[str, Any]:
    return {
        "attempt_id": f"j1:{number}", "execution_id": "j1", "job_id": "j1", "agent": "writer", "number": number,
        "model": "sim/m", "provider": "sim", "started_at": MOMENT, "completed_at": MOMENT,
        "duration_ms": 0, "outcome": outcome,
        "cause": "first", "cost": COST, "cost_basis": "billed", **more,
    }  # fmt: skip


async def publish(plane: Plane, subject: str, message: dict[str, Any]) -> None:
    await plane.jetstream.publish(subject, json.dumps(message).encode(), headers=FIRST)


async def redelivered(plane: Plane) -> None:
    """A job that was delivered once before, to a worker that is gone."""
    await plane.publish(JOB)
    subscription = await plane.jetstream.pull_subscribe_bind("worker-writer", "JOBS")
    [delivery] = await subscription.fetch(1, timeout=60)
    await delivery.nak()


async def test_a_result_without_its_record_gets_it_and_nothing_is_called(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        result = {
            "job_id": "j1", "execution_id": "j1", "agent": "writer", "status": "succeeded", "output": "the answer",
            "attempts": [attempt(1, "success")], "attempts_count": 1, "total_cost": COST, "queued_at": MOMENT,
            "dispatched_at": MOMENT, "completed_at": MOMENT, "duration_ms": 5,
        }  # fmt: skip
        await publish(plane, subjects.result("j1"), result)
        await redelivered(plane)
        plane.begin()
        record = await until(lambda: plane.last("EVENTS", "bw.executions.writer.j1"), what="the record")
        assert (record["output"], record["total_cost"]) == ("the answer", COST)
        await until(lambda: _acknowledged(plane), what="the acknowledgement")
        assert plane.sim.ledger.totals.calls == 0


async def _acknowledged(plane: Plane) -> bool:
    return await plane.pending_jobs() == 0


async def test_attempts_in_the_log_count_although_redis_has_lost_the_checkpoint(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        error = {"kind": "server", "class": "ServerError", "message": "no", "status_code": 500, "retryable": True}
        for number in (1, 2):
            await publish(plane, subjects.attempt("writer", "j1", number), attempt(number, "error", error=error))
        await redelivered(plane)
        plane.begin()
        result = await plane.result("j1")
        assert [a["outcome"] for a in result["attempts"]] == ["error", "error", "success"]
        assert plane.sim.ledger.totals.calls == 1


async def test_a_job_whose_call_was_cancelled_calls_no_other_model_although_redis_has_lost_the_order(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"]}}
    async with start_worker({"sim/m": model(), "sim/n": model()}, agents, begin=False) as plane:
        error = {"kind": "cancelled", "class": "JobCancelledError", "message": "by ops", "retryable": False}
        await publish(plane, subjects.attempt("writer", "j1", 1), attempt(1, "cancelled", error=error))
        await redelivered(plane)
        plane.begin()
        result = await plane.result("j1")
        assert (result["status"], result["error"]["message"]) == ("cancelled", "by ops")
        assert plane.sim.ledger.totals.calls == 0


async def test_a_success_whose_answer_died_with_the_worker_is_called_again(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        await publish(plane, subjects.attempt("writer", "j1", 1), attempt(1, "success"))
        await redelivered(plane)
        plane.begin()
        result = await plane.result("j1")
        assert [a["outcome"] for a in result["attempts"]] == ["success", "success"]
        assert result["output"]
        assert result["total_cost"] == "0.000084000"


async def test_a_job_that_loses_every_worker_ends_after_its_tries(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, begin=False) as plane:
        for number in (1, 2, 3):
            lost = attempt(number, "worker_lost", error={"kind": "worker_lost", "class": "WorkerLostError",
                                                         "message": "lost", "retryable": True})  # fmt: skip
            await publish(plane, subjects.attempt("writer", "j1", number), lost)
        await redelivered(plane)
        plane.begin()
        result = await plane.result("j1")
        assert (result["status"], result["error"]["class"]) == ("dead_lettered", "WorkerLostError")
        assert plane.sim.ledger.totals.calls == 0


async def test_a_record_answers_a_job_whose_result_has_aged_out(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS) as plane:
        await plane.publish(JOB)
        await plane.result("j1")
        await until(lambda: _acknowledged(plane), what="the acknowledgement")
        await plane.jetstream.purge_stream("RESULTS")
        replies = await plane.client.subscribe("bw.replies.again")
        await plane.publish(JOB | {"reply_to": "bw.replies.again"})
        answer = json.loads((await replies.next_msg(timeout=60)).data)
        assert (answer["execution_id"], answer["status"]) == ("j1", "succeeded")
        assert plane.sim.ledger.totals.calls == 1


async def test_a_wait_that_does_not_fit_the_deadline_goes_to_the_next_model_at_once(
    start_worker: StartWorker,
) -> None:
    models = {"sim/m": model({"status": 429, "retry_after_s": 30}), "sim/n": model()}
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"], "total_timeout_s": 20}}
    async with start_worker(models, agents) as plane:
        await plane.publish(JOB)
        result = await plane.result("j1")
        assert result["chosen_model"] == "sim/n"
        assert [a["backoff_ms"] for a in result["attempts"]] == [0, 0]


@pytest.mark.parametrize("second", ["refused", "failed"])
async def test_a_resumed_job_decides_nothing_again_that_is_recorded(start_worker: StartWorker, second: str) -> None:
    agents = {"writer": {**AGENTS["writer"], "retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0}}}
    # No retry is granted: to ask again for the one that is recorded would end in a second attempt 2.
    none = {"ratio": 0, "floor": 0}
    failed = {"kind": "server", "class": "ServerError", "message": "no", "status_code": 500, "retryable": True}
    refused = {"kind": "retry_budget", "class": "RetryBudgetExceededError", "message": "too many"}
    async with start_worker({"sim/m": model()}, agents, begin=False, retry_budget=none) as plane:
        await publish(plane, subjects.attempt("writer", "j1", 1), attempt(1, "error", error=failed))
        last = (
            attempt(2, "short_circuited", short_circuited=True, error=refused, cost="0.000000000")
            if second == "refused"
            else attempt(2, "error", error=failed)
        )
        await publish(plane, subjects.attempt("writer", "j1", 2), last)
        await redelivered(plane)
        plane.begin()
        result = await plane.result("j1")
        assert plane.sim.ledger.totals.calls == 0
    assert (result["status"], result["reason"], result["error"]["class"]) == ("dead_lettered", "error", "ServerError")
    assert result["attempts_count"] == (2 if second == "refused" else 3)
