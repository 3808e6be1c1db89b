"""Guards of tasks on a whole plane: what they stop, what they report, and what lets a task go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from breakwater.contracts import subjects
from breakwater.policy.price import Usage
from breakwater.providers.base import Answer
from tests.flow.kit import COST, Plane, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider

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
        for text in (refused["output"], refused["error"]["message"], refused["error"]["user_message"]):
            assert "stopped" in text
            assert not any(limit in text.lower() for limit in LIMITS)


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
        assert (refused["reason"], refused["error"]["class"]) == ("budget_exceeded", "BudgetExceededError")
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
        [event] = await events(plane)
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


async def test_a_program_that_reports_no_tokens_has_used_none(start_worker: StartWorker) -> None:
    settings = {"kind": "python", "callable": "asyncio:sleep"}
    program = ScriptedProvider(Answer("done", Usage(None, None)))
    agents = {"writer": {"provider": "program"}}
    more: dict[str, Any] = {"more_providers": {"program": settings}, "providers": {"program": program}}
    async with start_worker({"sim/m": model()}, agents, **more) as plane:
        result = await run(plane, "j")
    assert (result["attempts"][0]["input_tokens"], result["total_tokens"]) == (None, 0)
