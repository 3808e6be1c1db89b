"""What one job may cost (`max_cost_usd` of its agent) on a whole plane."""

from __future__ import annotations

from typing import Any

from tests.flow.kit import Plane, model
from tests.services.worker.conftest import StartWorker

# Held for a call: a little more than $0.0006, or a tenth of it. What a call costs: $0.0003015.
USAGE = {"input_tokens": 10, "output_tokens": 500}
CHEAP = {"price": {"input_usd_per_mtok": "0.015", "output_usd_per_mtok": "0.06"}}
NEVER_JSON = {"schema": "agent_decision", "max_corrections": 9}


async def run(plane: Plane, agent: str) -> dict[str, Any]:
    await plane.publish({"agent": agent, "job_id": agent, "prompt": "x"})
    return await plane.result(agent)


def refusals(result: dict[str, Any]) -> list[tuple[str, str | None, str | None]]:
    return [
        (attempt["model"], attempt["refused_by"], attempt["error"] and attempt["error"]["class"])
        for attempt in result["attempts"]
    ]


async def test_a_call_that_might_pass_the_cap_of_its_job_is_left_to_a_cheaper_model(start_worker: StartWorker) -> None:
    agents = {
        "saved": {"model": "sim/dear", "fallback_models": ["sim/cheap"]},
        "refused": {"model": "sim/dear", "fallback_models": ["sim/dear-too"]},
        "unpriced": {"model": "sim/free"},
    }
    agents = {name: {**agent, "max_tokens": 1000, "max_cost_usd": "0.0005"} for name, agent in agents.items()}
    models = {name: model(usage=USAGE) for name in ("sim/dear", "sim/dear-too", "sim/cheap", "sim/free")}
    async with start_worker(models, agents, more_models={"sim/cheap": CHEAP, "sim/free": {}}) as plane:
        saved = await run(plane, "saved")
        over = ("execution", "CallOverCapError")
        assert refusals(saved) == [("sim/dear", *over), ("sim/cheap", None, None)]
        assert (saved["status"], saved["chosen_model"], saved["total_cost"]) == (
            "succeeded",
            "sim/cheap",
            "0.000030150",
        )

        refused = await run(plane, "refused")
        assert refusals(refused) == [("sim/dear", *over), ("sim/dear-too", *over)]
        assert {attempt["outcome"] for attempt in refused["attempts"]} == {"short_circuited"}
        assert (refused["reason"], refused["total_cost"]) == ("budget_exceeded", "0.000000000")
        assert (
            refused["error"]["message"]
            == "a call to sim/dear-too does not fit under the job's own limit (max_cost_usd)"
        )
        figures = (await plane.messages("EVENTS", "bw.attempts.refused.*.2"))[0]["error"]["figures"]
        assert figures.startswith("The job has cost $0.00, a call to sim/dear-too may cost up to $0.0006")
        assert "max_cost_usd is $0.0005. To do: lower `max_tokens`" in figures
        assert not any(figure.isdigit() for figure in refused["error"]["user_message"])

        unpriced = await run(plane, "unpriced")
        assert unpriced["reason"] == "budget_exceeded"
        assert refusals(unpriced) == [("sim/free", "execution", "UnpricedModelError")]
        assert plane.sim.ledger.totals.calls == 1


async def test_the_cap_of_a_job_counts_all_its_attempts(start_worker: StartWorker) -> None:
    settings = {"max_tokens": 1000, "max_cost_usd": "0.0013", "output": NEVER_JSON}
    agents = {
        "stubborn": {"model": "sim/no", **settings},
        "rescued": {"model": "sim/no", "fallback_models": ["sim/cheap"], **settings},
    }
    decided = '{"action": "go", "reasoning": "r", "confidence": 0.5}'
    models = {"sim/no": model(usage=USAGE, answer="no"), "sim/cheap": model(usage=USAGE, answer=decided)}
    async with start_worker(models, agents, more_models={"sim/cheap": CHEAP}) as plane:
        stubborn = await run(plane, "stubborn")
        assert [attempt["outcome"] for attempt in stubborn["attempts"]] == ["error", "error", "short_circuited"]
        assert (stubborn["reason"], stubborn["total_cost"]) == ("budget_exceeded", "0.000603000")
        assert stubborn["error"]["message"] == "a call to sim/no does not fit under the job's own limit (max_cost_usd)"
        figures = (await plane.messages("EVENTS", "bw.attempts.stubborn.*.3"))[0]["error"]["figures"]
        assert figures.startswith("The job has cost $0.000603, a call to sim/no may")

        rescued = await run(plane, "rescued")
        assert [attempt["model"] for attempt in rescued["attempts"]] == ["sim/no"] * 3 + ["sim/cheap"]
        assert (rescued["status"], rescued["total_cost"]) == ("succeeded", "0.000633150")
