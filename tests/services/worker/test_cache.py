"""Answers that are given again, and calls that identical jobs share."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.flow.kit import COST, COST_NANO, model
from tests.services.worker.conftest import StartWorker

AGENT = {"retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.01}, "breaker": "off", "max_tokens": 100}


async def test_the_same_question_is_answered_again_at_no_cost(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "model": "sim/bad", "fallback_models": ["sim/good"], "cache": {"ttl_s": 600}}}
    models = {"sim/bad": model({"status": 400}), "sim/good": model()}
    async with start_worker(models, agents) as plane:

        async def ask(job_id: str, **more: Any) -> dict[str, Any]:
            await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "hello", **more})
            return await plane.result(job_id)

        first = await ask("j1")
        again = await ask("j2")
        others = [await ask("j3", tenant="acme"), await ask("j4", params={"seed": 1}), await ask("j5", skip_cache=True)]
        after_skip = await ask("j6")
        calls = plane.sim.ledger.totals.billed_calls
    assert (first["cache_hit"], first["chosen_model"], first["total_cost"]) == (False, "sim/good", COST)
    assert (again["cache_hit"], again["cached_from"], again["chosen_model"]) == (True, "j1", "sim/good")
    assert (again["output"], again["attempts"], again["total_cost"]) == (first["output"], [], "0.000000000")
    assert again["cost_basis"] == "none"
    assert [other["cache_hit"] for other in others] == [False] * 3
    assert (after_skip["cache_hit"], after_skip["cached_from"]) == (True, "j1")
    assert calls == 4


async def test_an_error_is_never_kept(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "model": "sim/m", "cache": {"ttl_s": 600}}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "status": 400})}, agents) as plane:
        for job_id in ("j1", "j2"):
            await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "hello"})
            await plane.result(job_id)
        results = [await plane.result(job_id) for job_id in ("j1", "j2")]
    assert [(result["status"], result["cache_hit"]) for result in results] == [
        ("dead_lettered", False),
        ("succeeded", False),
    ]


async def test_identical_jobs_at_the_same_time_share_one_call_where_the_agent_allows_it(
    start_worker: StartWorker,
) -> None:
    agents = {
        "shares": {**AGENT, "model": "sim/a", "cache": {"ttl_s": 600, "share_concurrent": True}},
        "does-not": {**AGENT, "model": "sim/b", "cache": {"ttl_s": 600}},
    }
    models = {"sim/a": model(latency_ms=400), "sim/b": model(latency_ms=2000)}
    async with start_worker(models, agents) as plane:
        for index in range(8):
            for name in agents:
                await plane.publish({"agent": name, "job_id": f"{name}-{index}", "prompt": "hello"})
        shared, own = [
            await asyncio.gather(*(plane.result(f"{name}-{index}") for index in range(8))) for name in agents
        ]
        calls = {name: totals.calls for name, totals in plane.sim.ledger.by_model.items()}
        spent = plane.sim.ledger.by_model["sim/a"].cost_nano
    assert {result["status"] for result in (*shared, *own)} == {"succeeded"}
    assert calls["sim/a"] == 1
    assert spent == COST_NANO
    assert calls["sim/b"] > 1
    assert sorted(result["cache_hit"] for result in shared) == [False] + [True] * 7


async def test_who_waits_for_a_call_that_fails_makes_it_himself(start_worker: StartWorker) -> None:
    agents = {"shares": {**AGENT, "model": "sim/a", "cache": {"ttl_s": 600, "share_concurrent": True}}}
    models = {"sim/a": model({"requests": [1, 1], "status": 400, "latency_ms": 300})}
    async with start_worker(models, agents) as plane:
        for index in range(4):
            await plane.publish({"agent": "shares", "job_id": f"j{index}", "prompt": "hello"})
        results = await asyncio.gather(*(plane.result(f"j{index}") for index in range(4)))
        assert plane.sim.ledger.totals.calls == 2
    assert sorted(result["status"] for result in results) == ["dead_lettered"] + ["succeeded"] * 3
