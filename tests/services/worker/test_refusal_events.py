"""What listeners to progress hear where a breaker or a budget refuses a call."""

from __future__ import annotations

from dataclasses import replace

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import Saving
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker
from tests.services.worker.test_recoveries import _heard

USAGE = {"input_tokens": 10, "output_tokens": 500}


async def test_agent_breaker_open_and_agent_budget_exceeded_exist_for_who_listens_to_progress(
    start_worker: StartWorker,
) -> None:
    agents = {
        "held": {"model": "sim/down", "fallback_models": ["sim/good"]},
        "dear": {"model": "sim/good", "max_tokens": 1000, "max_cost_usd": "0.0005"},
    }
    async with start_worker({"sim/down": model(), "sim/good": model(usage=USAGE)}, agents) as plane:
        key, breakers = BreakerKey("held", "sim/down"), plane.worker.breakers
        [before] = await breakers.load([key])
        isolated = replace(before.breaker, state="isolated")
        assert await breakers.save([Saving(key, before, isolated, None)]) == [True]
        heard = {
            name: (await _heard(plane, name, {"agent": name, "job_id": name, "prompt": "x"}))[1] for name in agents
        }

    assert [step["event"] for step in heard["held"] if step["event"]] == [
        "agent.breaker.open",
        "agent.attempt.error",
        "agent.attempt.start",
        "agent.attempt.finish",
    ]
    [opened] = [step for step in heard["held"] if step["event"] == "agent.breaker.open"]
    assert (opened["agent"], opened["model"], opened["attempt"]) == ("held", "sim/down", 1)
    assert (opened["scope"], opened["enforcement"]) == (None, None)
    assert [step["event"] for step in heard["dear"] if step["event"]] == [
        "agent.budget.exceeded",
        "agent.attempt.error",
    ]
    [exceeded] = [step for step in heard["dear"] if step["event"] == "agent.budget.exceeded"]
    assert (exceeded["scope"], exceeded["enforcement"], exceeded["model"]) == ("execution", "hard", "sim/good")
    assert "0.000" not in str(exceeded), "what a limit is stays with operators"
