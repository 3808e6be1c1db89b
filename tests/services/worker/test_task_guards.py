"""Guards of tasks on a whole plane: what they stop, what they report, and what lets a task go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from breakwater.calls.providers.base import Answer, Call, CallError
from breakwater.calls.rules.classify import TransportFailure
from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.types import nano_from_usd, usd_from_nano
from breakwater.limits.rules.guard import Task
from breakwater.limits.rules.refusals import RETRY_HELD_S
from breakwater.prices.rules.usage import Usage
from breakwater.services.worker import crashes
from breakwater.services.worker.attempts import Attempts
from tests.flow.kit import COST, COST_NANO, Plane, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider, WorkerPlane

ONE_TRY = {"retry": {"max_attempts": 1}, "breaker": "off"}
SPENDS = {"max_cost_usd": "0.001", "max_iterations": "off", "max_tokens": "off"}
LIMITS = ("10", "200", "limit", "threshold", "iterations")


async def run(plane: Plane, job_id: str, task: str = "t", **more: Any) -> dict[str, Any]:
    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", "task_id": task, **more})
    return await plane.result(job_id)


async def events(plane: Plane) -> list[dict[str, Any]]:
    return await plane.messages("EVENTS", subjects.guard("writer"))


async def test_what_models_and_users_read_names_no_limit(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 1}, "on_error": "message"}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        await run(plane, "first")
        refused = await run(plane, "second")
        for text in (refused["output"], refused["error"]["user_message"]):
            assert "stopped" in text
            assert not any(limit in text.lower() for limit in LIMITS)
        assert "(max_iterations: it has reached its limit of iterations)" in refused["error"]["message"]
        assert not any(figure.isdigit() for figure in refused["error"]["message"])


async def test_a_task_near_a_cap_is_announced_once(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 5}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        for number in range(3):
            await run(plane, f"j{number}")
        assert await events(plane) == []
        for number in range(3, 6):
            await run(plane, f"j{number}")
        near, tripped = await events(plane)
    assert (near["kind"], near["rule"], near["reason"]) == ("soft_cap", "max_iterations", "4 iterations (limit: 5)")
    assert (near["execution_id"], near["iterations"], tripped["kind"]) == ("j3", 4, "tripped")


async def test_a_cap_below_five_iterations_is_reached_without_a_warning(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 2, "max_tokens": 300}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        for number in range(3):
            await run(plane, f"j{number}")
        assert [event["kind"] for event in await events(plane)] == ["tripped"]


async def test_tokens_and_costs_are_capped_also_within_one_job(start_worker: StartWorker) -> None:
    never_json = {"schema": "agent_decision", "max_corrections": 9}
    agents = {
        "writer": {"model": "sim/m", "guard": {"max_tokens": 300}},
        "spender": {"model": "sim/m", "max_tokens": 40, "guard": {"max_cost_usd": "0.00008", "max_tokens": "off"}},
        "stubborn": {"model": "sim/no", "guard": {"max_tokens": 300}, "output": never_json},
    }
    models = {"sim/m": model(), "sim/no": model(answer="I would rather not.")}
    async with start_worker(models, agents) as plane:
        # 160 tokens and $0.000042 a call: the second passes the cap, the third is refused.
        for agent in ("writer", "spender"):
            results = [await run(plane, f"{agent}{n}", task=agent, agent=agent) for n in range(3)]
            assert [result["reason"] for result in results] == [None, None, "guard_tripped"]
        corrected = await run(plane, "one", task="one", agent="stubborn")
        assert corrected["reason"] == "guard_tripped"
        assert [attempt["outcome"] for attempt in corrected["attempts"]] == ["error", "error", "short_circuited"]
        reported = [await plane.last("EVENTS", subjects.guard(agent)) for agent in agents]
        assert [event and event["reason"] for event in reported] == [
            "320 tokens used (limit: 300)",
            "$0.000084 spent (limit: $0.00008)",
            "320 tokens used (limit: 300)",
        ]


async def test_a_call_that_might_pass_the_cost_cap_is_not_made(start_worker: StartWorker) -> None:
    # 4,096 tokens of output may cost $0.0024576, and the call itself costs $0.000042.
    agents = {"writer": {"model": "sim/m", "guard": {"max_cost_usd": "0.0025"}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        assert (await run(plane, "first"))["status"] == "succeeded"
        refused = await run(plane, "second")
        assert refused["reason"] == "guard_tripped"
        [event] = await events(plane)
        assert (event["rule"], event["cost"], event["iterations"]) == ("max_cost", COST, 1)
        assert event["reason"].startswith("$0.000042 spent, and the next call may cost up to $0.0024")
        assert event["reason"].endswith(" (limit: $0.0025)")
        assert "$" not in refused["error"]["message"]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
async def test_a_job_without_time_to_wait_for_the_others_is_refused(start_worker: StartWorker, late: bool) -> None:
    slow = model({"requests": [1, 1], "hang_s": 3}, usage={"input_tokens": 10, "output_tokens": 500})
    agents = {"writer": {"model": "sim/m", "max_tokens": 1000, "guard": SPENDS, "on_error": "message"}}
    async with start_worker({"sim/m": slow}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x", "task_id": "t"})

        async def calling() -> bool:
            return plane.sim.ledger.totals.in_progress == 1

        await until(calling, what="the first call")
        if late:  # whoever sleeps does so for longer than the job has
            object.__setattr__(plane.worker, "sleep", lambda _: asyncio.sleep(1.2))
        refused = await run(plane, "second", total_timeout_s=1)
        assert (refused["reason"], refused["error"]["class"]) == ("budget_exceeded", "BudgetHeldError")
        assert refused["error"]["retry_after_s"] == RETRY_HELD_S
        assert [attempt["refused_by"] for attempt in refused["attempts"]] == ["task"]
        assert "while its other jobs are running" in refused["output"]
        assert not any(figure.isdigit() for figure in refused["output"])
        assert (await plane.result("first"))["status"] == "succeeded"
        assert await events(plane) == []


async def test_a_task_that_fails_in_a_row_is_stopped_with_its_last_failure(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"requests": [1, 99], "status": 500})}
    async with start_worker(models, {"writer": {"model": "sim/m", **ONE_TRY}}) as plane:
        for number in range(3):
            assert (await run(plane, f"j{number}"))["reason"] == "error"
        # Told at once: whoever looks after it need not wait for the next job.
        [event] = await events(plane)
        assert (event["rule"], event["reason"]) == (
            "consecutive_failures",
            "3 consecutive failures (threshold: 3)",
        )
        assert (event["consecutive_failures"], event["total_failures"], event["unique_errors"]) == (3, 3, 1)
        assert (await run(plane, "next"))["reason"] == "guard_tripped"
        assert plane.sim.ledger.totals.calls == 3


async def test_confidence_that_falls_stops_the_task(start_worker: StartWorker) -> None:
    said = iter([0.9, 0.7, 0.5])
    answers = [json.dumps({"action": "go", "reasoning": "r", "confidence": value}) for value in said]
    faults = [{"requests": [number, number], "answer": answer} for number, answer in enumerate(answers, 1)]
    agents = {
        "writer": {"model": "sim/m", "guard": {"confidence": {"answers": 3}}, "output": {"schema": "agent_decision"}}
    }
    async with start_worker({"sim/m": model(*faults)}, agents) as plane:
        for number in range(3):
            assert (await run(plane, f"j{number}"))["status"] == "succeeded"
        [event] = await events(plane)
        assert event["rule"] == "confidence_drift"
        assert (await run(plane, "next"))["reason"] == "guard_tripped"


# Caps of a task hold for every task

UNREPORTED = {"input_tokens": 120, "output_tokens": 40, "report": False}
NO_COUNT = {"max_iterations": "off", "max_cost_usd": "off"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_without_usage_counts_its_estimate_against_max_tokens(
    start_worker: StartWorker, stream: bool
) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_tokens": 300, **NO_COUNT}}}
    async with start_worker({"sim/m": model(usage=UNREPORTED)}, agents) as plane:
        results = [await run(plane, f"j{number}", stream=stream) for number in range(8)]
        *_, event = await events(plane)
    [attempt] = results[0]["attempts"]
    assert 0 < attempt["input_tokens"] < 100 > attempt["output_tokens"] > 0
    assert results[0]["total_tokens"] == attempt["input_tokens"] + attempt["output_tokens"]
    # What it may have thought is in no text: the cost is the most that it can have been.
    assert (results[0]["total_cost"], results[0]["cost_basis"]) == (attempt["reserved"], "estimated")
    assert results[-1]["reason"] == "guard_tripped"
    assert event["rule"] == "max_tokens"
    assert event["tokens"] == results[0]["total_tokens"] * event["iterations"] >= 300


async def test_what_is_sent_again_to_be_corrected_is_estimated_too(start_worker: StartWorker) -> None:
    stubborn = {"model": "sim/no", "output": {"schema": "agent_decision", "max_corrections": 2}}
    models = {"sim/no": model(usage=UNREPORTED, answer="I would rather not.")}
    async with start_worker(models, {"writer": stubborn}) as plane:
        sent = [attempt["input_tokens"] for attempt in (await run(plane, "j"))["attempts"]]
    assert len(sent) == 3
    assert sent == sorted(set(sent))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "fault", [{"hang_s": 9}, {"kind": "reset"}, {"kind": "empty_body"}, {"kind": "malformed_json"}], ids=str
)
async def test_a_call_that_may_have_been_billed_counts_its_estimate_though_it_failed(
    start_worker: StartWorker, fault: dict[str, Any], stream: bool
) -> None:
    agents = {"writer": {"model": "sim/m", "timeout_s": 0.5, "guard": {"max_tokens": 80, **NO_COUNT}, **ONE_TRY}}
    async with start_worker({"sim/m": model({"requests": [1, 9], **fault})}, agents) as plane:
        results = [await run(plane, f"j{number}", stream=stream) for number in range(3)]
        [event] = await events(plane)
    [attempt] = results[0]["attempts"]
    # As the cost: it is what was held for the input, and what came of an answer.
    assert (attempt["cost_basis"], attempt["cost"]) == ("estimated", attempt["reserved"])
    assert 40 <= attempt["input_tokens"] < 80
    assert attempt["output_tokens"] is None
    assert [result["reason"] for result in results] == ["error", "error", "guard_tripped"]
    assert (event["rule"], event["tokens"]) == ("max_tokens", 2 * attempt["input_tokens"])


async def test_a_streamed_answer_that_broke_off_counts_what_came_of_it(start_worker: StartWorker) -> None:
    fault = {"requests": [1, 9], "stream": "cut", "after_chunks": 5}
    agents = {"writer": {"model": "sim/m", "guard": {"max_tokens": 80, **NO_COUNT}, **ONE_TRY}}
    async with start_worker({"sim/m": model(fault)}, agents) as plane:
        results = [await run(plane, f"j{number}", stream=True) for number in range(2)]
    [attempt] = results[0]["attempts"]
    assert min(attempt["input_tokens"], attempt["output_tokens"]) > 30
    assert (attempt["cost_basis"], attempt["cost"] < attempt["reserved"]) == ("estimated", True)
    assert results[1]["reason"] == "guard_tripped"


async def test_a_call_that_was_refused_counts_no_tokens(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", **ONE_TRY}}
    async with start_worker({"sim/m": model({"requests": [1, 9], "status": 503})}, agents) as plane:
        [attempt] = (await run(plane, "j"))["attempts"]
    assert (attempt["input_tokens"], attempt["cost_basis"], attempt["cost"]) == (None, "billed", "0.000000000")


async def test_a_call_that_was_lost_with_its_worker_counts_its_estimate(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "retry": {"base_s": 0.01}}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 9})}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j", "prompt": "x", "task_id": "t"})
        await until(calling(plane), what="its call")
        await plane.end()
        plane.begin()
        lost, answered = (await plane.result("j"))["attempts"]
        assert (lost["outcome"], lost["cost_basis"], lost["output_tokens"]) == ("worker_lost", "estimated", None)
        assert 40 <= lost["input_tokens"] < 80
        assert (await counted(plane, "t")).tokens == lost["input_tokens"] + 160
        assert answered["outcome"] == "success"


async def test_a_call_that_was_cancelled_counts_its_estimate(start_worker: StartWorker) -> None:
    hangs = {"sim/m": model({"requests": [1, 1], "hang_s": 9})}
    async with start_worker(hangs, {"writer": {"model": "sim/m"}}) as plane:
        await plane.publish({"agent": "writer", "job_id": "j", "prompt": "x", "task_id": "t"})
        await until(calling(plane), what="its call")
        cancellation = Cancellation(by="program", at=plane.worker.now())
        plane.worker.leases.cancel(PendingCancel(execution_id="j", cancellation=cancellation))
        [attempt] = (await plane.result("j"))["attempts"]
    assert (attempt["outcome"], attempt["cost_basis"]) == ("cancelled", "estimated")
    assert 40 <= attempt["input_tokens"] < 80


async def test_a_program_that_reports_no_tokens_has_used_none(start_worker: StartWorker) -> None:
    settings = {"kind": "python", "callable": "asyncio:sleep"}
    failed = CallError(TransportFailure("timeout", "TimeoutError", "late"), maybe_billed=True)
    program = ScriptedProvider(failed, Answer("done", Usage(None, None)))
    agents = {"writer": {"provider": "program", "retry": {"base_s": 0}}}
    more: dict[str, Any] = {"more_providers": {"program": settings}, "providers": {"program": program}}
    async with start_worker({"sim/m": model()}, agents, **more) as plane:
        result = await run(plane, "j")
    assert [attempt["input_tokens"] for attempt in result["attempts"]] == [None, None]
    assert result["total_tokens"] == 0


DEAR = {"more_models": {"sim/m": {"price": {"input_usd_per_mtok": "0", "output_usd_per_mtok": "600"}}}}


async def alone(plane: Plane, job_id: str, **more: Any) -> dict[str, Any]:
    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", **more})
    return await plane.result(job_id)


async def test_a_job_without_a_task_id_is_a_task_of_its_own(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}, **DEAR) as plane:
        plan = await alone(plane, "plan", params={"max_tokens": 30_000}, dry_run=True)
        assert [one["admission"] for one in plan["output"]["models"]] == ["refused"]
        assert await events(plane) == []
        refused = await alone(plane, "dear", tenant="acme", params={"max_tokens": 30_000})
        assert (refused["status"], refused["reason"]) == ("dead_lettered", "guard_tripped")
        assert not any(figure in refused["error"]["message"] for figure in ("$", "10", "18"))
        assert plane.sim.ledger.totals.calls == 0
        [event] = await events(plane)
        assert (event["task_id"], event["tenant"], event["execution_id"]) == ("dear", "acme", "dear")
        assert event["reason"] == "$0.00 spent, and the next call may cost up to $18.00 (limit: $10.00)"
        assert [key for key, _ in await plane.worker.guards.tasks.stopped_tasks()] == [TaskKey("acme", "dear")]
        for number in range(2):  # each is a task: together they may cost more than the cap of one
            assert (await alone(plane, f"j{number}", params={"max_tokens": 16_000}))["status"] == "succeeded"


async def test_the_tokens_of_a_job_without_a_task_id_are_capped_too(start_worker: StartWorker) -> None:
    never_json = {"schema": "agent_decision", "max_corrections": 9}
    agents = {"writer": {"model": "sim/no", "guard": {"max_tokens": 300}, "output": never_json}}
    async with start_worker({"sim/no": model(answer="I would rather not.")}, agents) as plane:
        corrected = await alone(plane, "j")
        assert corrected["reason"] == "guard_tripped"
        assert [attempt["outcome"] for attempt in corrected["attempts"]] == ["error", "error", "short_circuited"]
        [event] = await events(plane)
        assert (event["task_id"], event["reason"]) == ("j", "320 tokens used (limit: 300)")


async def test_a_job_that_is_alone_in_its_task_asks_redis_nothing_about_it(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        assert (await alone(plane, "j"))["status"] == "succeeded"
        assert await plane.worker.redis.client.keys("bw:task*") == []


async def counted(plane: WorkerPlane, task_id: str, tenant: str | None = None) -> Task:
    task, _ = await plane.worker.guards.tasks.load(TaskKey(tenant, task_id))
    return task


async def test_a_job_with_a_parent_belongs_to_its_parents_task(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 3}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        chain = [await alone(plane, "e1")]
        for number in range(2, 6):
            chain.append(await alone(plane, f"e{number}", parent_execution_id=f"e{number - 1}"))
        assert [one["reason"] for one in chain] == [None, None, None, "guard_tripped", "guard_tripped"]
        assert [one["task_id"] for one in chain] == [None, "e1", "e1", "e1", "e1"]
        assert plane.sim.ledger.totals.calls == 3
        [event] = await events(plane)
        assert (event["task_id"], event["execution_id"], event["rule"]) == ("e1", "e4", "max_iterations")
        assert (event["iterations"], event["tokens"], event["cost"]) == (3, 480, "0.000126000")
        attempt = await plane.last("EVENTS", subjects.attempt("writer", "e2", 1))
        record = await plane.last("EVENTS", subjects.execution("writer", "e2"))
        assert [one and one["task_id"] for one in (attempt, record)] == ["e1", "e1"]
        # As any other: shown, and reset.
        assert [key for key, _ in await plane.worker.guards.tasks.stopped_tasks()] == [TaskKey(None, "e1")]
        await plane.worker.guards.tasks.reset(TaskKey(None, "e1"))
        assert (await alone(plane, "e6", parent_execution_id="e1"))["status"] == "succeeded"
        assert (await counted(plane, "e1")).iterations == 1, "the first was counted before the reset"


async def test_a_task_that_a_job_names_wins_over_its_parents(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        await run(plane, "first", task="a")
        await run(plane, "named", task="b", parent_execution_id="first")
        child = await alone(plane, "child", parent_execution_id="first")
        assert child["task_id"] == "a"
        assert [(await counted(plane, task)).iterations for task in ("a", "b", "first")] == [2, 1, 0]


async def test_a_child_finds_the_task_of_a_parent_that_redis_has_forgotten(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        await run(plane, "named", task="a")
        await alone(plane, "first")
        await plane.worker.redis.client.flushall()
        assert (await alone(plane, "child", parent_execution_id="named"))["task_id"] == "a"
        for name in ("other", "another"):
            assert (await alone(plane, name, parent_execution_id="first"))["task_id"] == "first"
        assert await counted(plane, "first") == Task(iterations=3, tokens=480, cost=3 * COST_NANO)


async def test_a_child_of_another_tenants_parent_does_not_share_its_task(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 1}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        await run(plane, "first", task="secret", tenant="acme")
        await alone(plane, "second", tenant="acme")
        for parent in ("first", "second"):
            for tenant in (None, "rival"):
                child = await alone(plane, f"{parent} of {tenant}", parent_execution_id=parent, tenant=tenant)
                assert (child["status"], child["task_id"]) == ("succeeded", parent)
        refused = await alone(plane, "child", parent_execution_id="first", tenant="acme")
        assert (refused["reason"], refused["task_id"]) == ("guard_tripped", "secret")
        tasks = [await counted(plane, task, "acme") for task in ("secret", "first", "second")]
        assert [task.iterations for task in tasks] == [1, 0, 0]


async def test_a_parent_of_which_nothing_is_known_names_the_task(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 2}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        chain = [await alone(plane, f"j{number}", parent_execution_id="workflow") for number in range(3)]
        assert [one["task_id"] for one in chain] == ["workflow"] * 3
        assert [one["reason"] for one in chain] == [None, None, "guard_tripped"]
        # Also one that is its own parent, and two that are each other's.
        for name, parent in (("self", "self"), ("one", "two"), ("two", "one")):
            assert (await alone(plane, name, parent_execution_id=parent))["status"] == "succeeded"
        assert [(await counted(plane, task)).iterations for task in ("self", "two", "one")] == [1, 2, 0]


async def test_children_of_a_job_that_no_guard_counts_share_its_task(start_worker: StartWorker) -> None:
    agents = {"free": {"model": "sim/m", "guard": "off"}, "writer": {"model": "sim/m"}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 1})}, agents) as plane:
        await plane.publish({"agent": "free", "job_id": "first", "prompt": "x"})
        await until(calling(plane), what="its call")
        for number in range(2):
            assert (await alone(plane, f"j{number}", parent_execution_id="first"))["task_id"] == "first"
        await plane.result("first")
        await alone(plane, "j2", parent_execution_id="first")
        assert (await counted(plane, "first")).iterations == 3


def calling(plane: Plane) -> Callable[[], Awaitable[bool]]:
    async def is_calling() -> bool:
        return plane.sim.ledger.totals.in_progress == 1

    return is_calling


class FirstWaits(ScriptedProvider):
    """Answers each call; the first once it may."""

    def __init__(self) -> None:
        super().__init__(*[Answer("done", Usage(120, 40))] * 2)
        self.may_answer = asyncio.Event()

    async def perform(self, call: Call) -> Answer:
        answer = await super().perform(call)
        if len(self.calls) == 1:
            await self.may_answer.wait()
        return answer


async def test_a_parent_under_way_counts_as_an_iteration_with_what_it_holds_and_then_with_what_it_used(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 2, "guard": {"max_iterations": 2}}}
    provider = FirstWaits()
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(lambda: provider.calls, what="its call")
        assert (await alone(plane, "child", parent_execution_id="first"))["status"] == "succeeded"
        key = TaskKey(None, "first")
        assert await counted(plane, "first") == Task(iterations=2, tokens=160, cost=COST_NANO)
        held = await plane.worker.redis.client.hget(key.redis_key, "h:first")
        provider.may_answer.set()
        parent = await plane.result("first")
        assert usd_from_nano(int(held or 0)) == parent["attempts"][0]["reserved"]

        async def both() -> bool:
            return await counted(plane, "first") == Task(iterations=2, tokens=320, cost=2 * COST_NANO)

        await until(both, what="the parent's end, in its task")
        assert not await plane.worker.redis.client.hexists(key.redis_key, "h:first")
        assert (await alone(plane, "next", parent_execution_id="child"))["reason"] == "guard_tripped"


async def test_a_parent_under_way_is_judged_with_its_children_from_its_next_call_on(start_worker: StartWorker) -> None:
    guard, retry = {"max_tokens": 300, **NO_COUNT}, {"base_s": 0.01}
    agents = {"writer": {"model": "sim/m", "concurrency": 2, "timeout_s": 3, "guard": guard, "retry": retry}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 9})}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(calling(plane), what="its call")
        for number in range(2):
            assert (await alone(plane, f"j{number}", parent_execution_id="first"))["status"] == "succeeded"
        assert (await plane.result("first"))["reason"] == "guard_tripped"
        [event] = await events(plane)
        assert (event["execution_id"], event["task_id"], event["rule"]) == ("first", "first", "max_tokens")


async def test_a_parent_that_another_worker_takes_over_is_counted_once(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 2}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 9})}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(calling(plane), what="its call")
        assert (await alone(plane, "child", parent_execution_id="first"))["status"] == "succeeded"
        await plane.end()
        plane.begin()
        parent = await plane.result("first")
        assert [attempt["outcome"] for attempt in parent["attempts"]] == ["worker_lost", "success"]
        spent = COST_NANO + nano_from_usd(parent["total_cost"])
        tokens = 160 + parent["total_tokens"]
        assert await counted(plane, "first") == Task(iterations=2, tokens=tokens, cost=spent)


async def test_a_parent_that_is_queued_when_its_child_comes_is_judged_with_it_from_its_first_call_on(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 2}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        assert (await alone(plane, "child", tenant="acme", parent_execution_id="first"))["task_id"] == "first"
        assert (await alone(plane, "first", tenant="acme"))["status"] == "succeeded"
        assert await counted(plane, "first", "acme") == Task(iterations=2, tokens=320, cost=2 * COST_NANO)
        assert (await alone(plane, "next", tenant="acme", parent_execution_id="child"))["reason"] == "guard_tripped"
        # The same where it may not call any more.
        for number in range(2):
            assert (await alone(plane, f"j{number}", parent_execution_id="late"))["status"] == "succeeded"
        assert (await alone(plane, "late"))["reason"] == "guard_tripped"


async def test_a_parent_that_is_queued_and_names_a_task_is_counted_there_alone(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        assert (await alone(plane, "early", parent_execution_id="first"))["task_id"] == "first"
        await run(plane, "first", task="a")
        assert (await alone(plane, "late", parent_execution_id="first"))["task_id"] == "a"
        assert [(await counted(plane, task)).iterations for task in ("a", "first")] == [2, 1]


async def holds(plane: WorkerPlane, task_id: str) -> list[str]:
    fields = await plane.worker.redis.client.hgetall(TaskKey(None, task_id).redis_key)
    return sorted(name for name in fields if name.startswith("h:"))


@pytest.mark.parametrize("dies", ["finish", "record"])
async def test_a_parent_whose_worker_dies_after_its_result_is_counted_by_the_next_one(
    start_worker: StartWorker, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 2}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 1})}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(calling(plane), what="its call")
        assert (await alone(plane, "child", parent_execution_id="first"))["status"] == "succeeded"
        assert await holds(plane, "first") == ["h:first"]
        store = plane.worker.executions if dies == "finish" else plane.worker.guards.tasks
        with monkeypatch.context() as patch:
            # Its call ends before it has renewed its claim: it learns that it has a child when it lets go of that.
            patch.setattr(store, dies, lambda *_, **__: asyncio.Event().wait())
            parent = await plane.result("first")
            await plane.end()
        plane.begin()

        async def let_go() -> bool:
            return await holds(plane, "first") == []

        await until(let_go, what="the end of its hold")
        assert await counted(plane, "first") == Task(iterations=2, tokens=320, cost=2 * COST_NANO)
        assert (await plane.result("first"))["completed_at"] == parent["completed_at"]
        assert plane.sim.ledger.totals.calls == 2


async def test_jobs_of_a_task_that_crash_their_handlers_to_the_end_hold_nothing_of_it(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 2, "timeout_s": 1}}
    monkeypatch.setattr(crashes, "MAX_CRASHES", 2)

    async def crash(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Attempts, "_carry_out", crash)
    async with start_worker({"sim/m": model({"requests": [1, 2], "hang_s": 9})}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(calling(plane), what="its call")
        await plane.publish({"agent": "writer", "job_id": "child", "prompt": "x", "parent_execution_id": "first"})

        async def both_hold() -> bool:
            return await holds(plane, "first") == ["h:child", "h:first"]

        await until(both_hold, what="the child's call")
        for name, task_id in (("first", None), ("child", "first")):
            ended = await plane.result(name)
            assert (ended["error"]["class"], len(ended["attempts"]), ended["task_id"]) == ("InternalError", 1, task_id)

        async def let_go() -> bool:
            return await holds(plane, "first") == []

        await until(let_go, what="the end of both holds")
        task = await counted(plane, "first")
        assert (task.iterations, task.total_failures) == (2, 2)


async def test_a_job_alone_in_its_task_tries_a_model_that_fits_under_the_cap_and_stops_nothing(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/dear", "fallback_models": ["sim/m"], "guard": {"max_cost_usd": "0.01"}}}
    dear = {"sim/dear": {"price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "100"}}}
    async with start_worker({"sim/m": model(), "sim/dear": model()}, agents, more_models=dear) as plane:
        await plane.publish({"agent": "writer", "job_id": "j", "prompt": "x"})
        result = await plane.result("j")
        assert (result["status"], result["chosen_model"]) == ("succeeded", "sim/m")
        assert [attempt["refused_reason"] for attempt in result["attempts"]] == ["guard_tripped", None]
        assert await events(plane) == []


async def test_a_key_that_begins_ever_more_tasks_keeps_so_many_in_redis_and_no_other_keys_are_forgotten(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.limits.store.tasks.MAX_OF_CALLER", 5)
    monkeypatch.setattr("breakwater.limits.store.tasks.IN_USE_MS", 0)
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 1}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        tasks, client = plane.worker.guards.tasks, plane.worker.redis.client

        async def run_of(key: str, job_id: str, **job: Any) -> dict[str, Any]:
            own = {"breaker": {"consecutive_failures": 1}, "tenant": "acme"}  # operators are one caller
            job = {"agent": "writer", "job_id": job_id, "prompt": "x", **own, **job}
            await plane.publish(job, **{Header.SUBMITTED_BY.value: key})
            result = await plane.result(job_id)
            await tasks.delete_idle()
            return result

        await run_of("b", "theirs", task_id="theirs")
        for number in range(8):
            await run_of("a", f"j{number}", task_id=f"t{number}")
            await run_of("a", f"child-{number}", parent_execution_id=f"of-nobody-{number}")
        kept = [key for key in map(str, await client.keys("bw:task:*")) if ":x:" not in key]
        assert len([*kept, *await client.keys("bw:breaker:%2A/*")]) <= 5 + 2
        # The task of the other key has had its one iteration, and is stopped.
        assert (await run_of("b", "second", task_id="theirs"))["reason"] == "guard_tripped"
