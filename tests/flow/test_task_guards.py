"""Guards of tasks on a whole plane: what they stop, what they tell, and what lets a task go on."""

from __future__ import annotations

import json
from typing import Any

from breakwater.contracts import subjects
from tests.flow.fixtures import StartPlane
from tests.flow.kit import COST, Plane, model
from tests.helpers import until

ONE_TRY = {"retry": {"max_attempts": 1}, "breaker": "off"}
SPENDS = {"max_cost_usd": "0.001", "max_iterations": "off", "max_tokens": "off"}
LIMITS = ("10", "200", "limit", "threshold", "iterations")


async def run(plane: Plane, job_id: str, task: str = "t", **more: Any) -> dict[str, Any]:
    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", "task_id": task, **more})
    return await plane.result(job_id)


async def events(plane: Plane) -> list[dict[str, Any]]:
    return await plane.messages("EVENTS", subjects.guard("writer"))


async def test_a_task_that_loops_is_stopped_and_told_once(start_plane: StartPlane) -> None:
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"], "guard": {"max_iterations": 3}}}
    async with start_plane({"sim/m": model(), "sim/n": model()}, agents, services=("worker", "breaker")) as plane:
        for number in range(3):
            assert (await run(plane, f"j{number}"))["status"] == "succeeded"
        for number in range(3, 6):
            refused = await run(plane, f"j{number}")
            assert (refused["reason"], refused["total_cost"]) == ("guard_tripped", "0.000000000")
            # The task is over, whatever the model: the chain does not go on.
            [attempt] = refused["attempts"]
            assert (attempt["outcome"], attempt["error"]["class"]) == ("short_circuited", "GuardTrippedError")
        assert plane.sim.ledger.totals.calls == 3
        [event] = await events(plane)
        assert (event["kind"], event["rule"], event["task_id"]) == ("tripped", "max_iterations", "t")
        assert (event["reason"], event["execution_id"]) == ("3 iterations (limit: 3)", "j3")
        assert (event["tokens"], event["cost"], event["iterations"]) == (480, "0.000126000", 3)
        # Another task, and the same name of another tenant, know nothing of it.
        assert (await run(plane, "other", task="u"))["status"] == "succeeded"
        assert (await run(plane, "tenant", tenant="acme"))["status"] == "succeeded"


async def test_what_models_and_users_read_names_no_limit(start_plane: StartPlane) -> None:
    agents = {"writer": {"model": "sim/m", "guard": {"max_iterations": 1}, "on_error": "message"}}
    async with start_plane({"sim/m": model()}, agents, services=("worker",)) as plane:
        await run(plane, "first")
        refused = await run(plane, "second")
        for text in (refused["output"], refused["error"]["message"], refused["error"]["user_message"]):
            assert "stopped" in text
            assert not any(limit in text.lower() for limit in LIMITS)


async def test_tokens_and_costs_are_capped_also_within_one_job(start_plane: StartPlane) -> None:
    never_json = {"schema": "agent_decision", "max_corrections": 9}
    agents = {
        "writer": {"model": "sim/m", "guard": {"max_tokens": 300}},
        "spender": {"model": "sim/m", "max_tokens": 40, "guard": {"max_cost_usd": "0.00008", "max_tokens": "off"}},
        "stubborn": {"model": "sim/no", "guard": {"max_tokens": 300}, "output": never_json},
    }
    models = {"sim/m": model(), "sim/no": model(answer="I would rather not.")}
    async with start_plane(models, agents, services=("worker",)) as plane:
        # 160 tokens and $0.000042 a call: the second passes the cap, the third is refused.
        for agent in ("writer", "spender"):
            results = [await run(plane, f"{agent}{n}", task=agent, agent=agent) for n in range(3)]
            assert [result["reason"] for result in results] == [None, None, "guard_tripped"]
        corrected = await run(plane, "one", task="one", agent="stubborn")
        assert corrected["reason"] == "guard_tripped"
        assert [attempt["outcome"] for attempt in corrected["attempts"]] == ["error", "error", "short_circuited"]
        told = [await plane.last("EVENTS", subjects.guard(agent)) for agent in agents]
        assert [event and event["reason"] for event in told] == [
            "320 tokens used (limit: 300)",
            "$0.000084 spent (limit: $0.00008)",
            "320 tokens used (limit: 300)",
        ]


async def test_a_call_that_might_pass_the_cost_cap_is_not_made(start_plane: StartPlane) -> None:
    # 4,096 tokens of output may cost $0.0024576, and the call itself costs $0.000042.
    agents = {"writer": {"model": "sim/m", "guard": {"max_cost_usd": "0.0025"}}}
    async with start_plane({"sim/m": model()}, agents, services=("worker",)) as plane:
        assert (await run(plane, "first"))["status"] == "succeeded"
        refused = await run(plane, "second")
        assert refused["reason"] == "guard_tripped"
        [event] = await events(plane)
        assert (event["rule"], event["cost"], event["iterations"]) == ("max_cost", COST, 1)
        assert event["reason"].startswith("$0.000042 spent, and the next call may cost up to $0.0024")
        assert event["reason"].endswith(" (limit: $0.0025)")
        assert "$" not in refused["error"]["message"]


async def test_jobs_at_the_same_time_do_not_pass_the_cost_cap_together(start_plane: StartPlane) -> None:
    # One call holds a little more than $0.0006 and costs $0.0003015: there is room for one at a time, and for two.
    slow = model(usage={"input_tokens": 10, "output_tokens": 500}, latency_ms=300)
    agents = {"writer": {"model": "sim/m", "max_tokens": 1000, "concurrency": 50, "guard": SPENDS}}
    async with start_plane({"sim/m": slow}, agents, services=()) as plane:
        for name in ("worker", "worker-2"):
            plane.start("worker", name)
        for number in range(20):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x", "task_id": "t"})
        results = [await plane.result(f"j{number}") for number in range(20)]
        reasons = [result["reason"] for result in results]
        assert sorted(map(str, reasons)) == ["None"] * 2 + ["guard_tripped"] * 18
        assert plane.sim.ledger.totals.cost_nano == 2 * 301_500
        # Waiting for the others is no trip: people hear of the task when its money is spent.
        [event] = await events(plane)
        assert event["reason"].startswith("$0.0006 spent, and the next call may cost up to $0.0006")


async def test_a_job_without_time_to_wait_for_the_others_is_refused(start_plane: StartPlane) -> None:
    slow = model({"requests": [1, 1], "hang_s": 8}, usage={"input_tokens": 10, "output_tokens": 500})
    agents = {"writer": {"model": "sim/m", "max_tokens": 1000, "guard": SPENDS, "on_error": "message"}}
    async with start_plane({"sim/m": slow}, agents, services=("worker",)) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x", "task_id": "t"})

        async def calling() -> bool:
            return plane.sim.ledger.totals.in_progress == 1

        await until(calling, what="the first call")
        refused = await run(plane, "second", total_timeout_s=2)
        assert (refused["reason"], refused["error"]["class"]) == ("budget_exceeded", "BudgetExceededError")
        assert [attempt["refused_by"] for attempt in refused["attempts"]] == ["task"]
        assert "while its other jobs are under way" in refused["output"]
        assert not any(figure.isdigit() for figure in refused["output"])
        assert (await plane.result("first"))["status"] == "succeeded"
        assert await events(plane) == []


async def test_a_task_that_fails_in_a_row_is_stopped_with_its_last_failure(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 99], "status": 500})}
    async with start_plane(models, {"writer": {"model": "sim/m", **ONE_TRY}}, services=("worker",)) as plane:
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


async def test_jobs_that_a_breaker_refused_do_not_stop_their_task(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 1], "status": 500})}
    agents = {
        "writer": {
            "model": "sim/m",
            "retry": {"max_attempts": 1},
            "breaker": {"preset": "migration-safety", "cooldown_s": 300},
        }
    }
    async with start_plane(models, agents, services=("worker", "breaker")) as plane:
        await run(plane, "opens", task="else")
        await until(lambda: plane.last("EVENTS", "bw.breakers.writer.*"), what="the breaker to open")
        refused = [await run(plane, f"j{number}") for number in range(5)]
        assert {result["reason"] for result in refused} == {"breaker_open"}
        assert await events(plane) == []
        assert 0 < refused[0]["error"]["retry_after_s"] <= 300
        assert "Please try again after" in refused[0]["error"]["user_message"]


async def test_confidence_that_falls_stops_the_task(start_plane: StartPlane) -> None:
    said = iter([0.9, 0.7, 0.5])
    answers = [json.dumps({"action": "go", "reasoning": "r", "confidence": value}) for value in said]
    faults = [{"requests": [number, number], "answer": answer} for number, answer in enumerate(answers, 1)]
    agents = {
        "writer": {"model": "sim/m", "guard": {"confidence": {"answers": 3}}, "output": {"schema": "agent_decision"}}
    }
    async with start_plane({"sim/m": model(*faults)}, agents, services=("worker",)) as plane:
        for number in range(3):
            assert (await run(plane, f"j{number}"))["status"] == "succeeded"
        [event] = await events(plane)
        assert event["rule"] == "confidence_drift"
        assert (await run(plane, "next"))["reason"] == "guard_tripped"


async def test_fifty_jobs_of_one_task_at_once_are_ten_iterations(start_plane: StartPlane) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 50}}
    async with start_plane({"sim/m": model(latency_ms=50)}, agents, services=()) as plane:
        for name in ("worker", "worker-2"):
            plane.start("worker", name)
        for number in range(50):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x", "task_id": "t"})
        results = [await plane.result(f"j{number}") for number in range(50)]
        assert sum(result["status"] == "succeeded" for result in results) == 10
        assert plane.sim.ledger.totals.calls == 10
        assert len(await events(plane)) == 1


async def test_an_outage_stops_no_task_and_hides_no_failure(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 99], "status": 500})}
    agents = {"writer": {"model": "sim/m", "breaker": {"consecutive_failures": 3, "cooldown_s": 300}}}
    async with start_plane(models, agents, services=("worker", "breaker")) as plane:
        # Its three tries open the breaker.
        assert (await run(plane, "failed"))["reason"] == "error"
        await until(lambda: plane.last("EVENTS", "bw.breakers.writer.*"), what="the breaker to open")
        refused = [(await run(plane, f"r{number}"))["reason"] for number in range(12)]
        assert set(refused) == {"breaker_open"}
        assert await events(plane) == []
