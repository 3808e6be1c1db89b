"""Guards of tasks on a whole plane: what they stop, what they report, and what lets a task go on."""

from __future__ import annotations

from typing import Any

from breakwater.kernel.nats import subjects
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import until

SPENDS = {"max_cost_usd": "0.001", "max_iterations": "off", "max_tokens": "off"}


async def run(plane: Plane, job_id: str, task: str = "t", **more: Any) -> dict[str, Any]:
    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", "task_id": task, **more})
    return await plane.result(job_id)


async def events(plane: Plane) -> list[dict[str, Any]]:
    return await plane.messages("EVENTS", subjects.guard("writer"))


async def test_a_task_that_loops_is_stopped_and_reported_once(start_plane: StartPlane) -> None:
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
        assert event["reason"].startswith("$0.000603 spent, and the next call may cost up to $0.0006")


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
        # The soft cap is announced before it or after it.
        assert [event["kind"] for event in await events(plane)].count("tripped") == 1


async def test_an_outage_stops_no_task_and_hides_no_failure(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 99], "status": 500})}
    agents = {
        "writer": {"model": "sim/m", "breaker": {"consecutive_failures": 3, "count": "attempts", "cooldown_s": 300}}
    }
    async with start_plane(models, agents, services=("worker", "breaker")) as plane:
        # Its three tries open the breaker.
        assert (await run(plane, "failed"))["reason"] == "error"
        await until(lambda: plane.last("EVENTS", "bw.breakers.writer.*"), what="the breaker to open")
        refused = [(await run(plane, f"r{number}"))["reason"] for number in range(12)]
        assert set(refused) == {"breaker_open"}
        assert await events(plane) == []
