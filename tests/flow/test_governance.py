"""Breakers and budgets on a whole plane."""

from __future__ import annotations

import asyncio
import json

from tests.flow.fixtures import StartPlane
from tests.flow.kit import COST_NANO, model, seconds_between
from tests.helpers import until

COOLDOWN_S = 5
"""Long enough for a job to be refused meanwhile, also on a busy machine."""

ONE_TRY = {"retry": {"max_attempts": 1}}


async def test_a_breaker_opens_stops_calls_probes_once_and_closes(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 3], "status": 500})}
    agents = {"writer": {"model": "sim/m", **ONE_TRY, "breaker": {"consecutive_failures": 3, "cooldown_s": COOLDOWN_S}}}
    async with start_plane(models, agents) as plane:
        for number in range(3):
            await plane.publish({"agent": "writer", "job_id": f"f{number}", "prompt": "x"})
            await plane.result(f"f{number}")
        opened = await until(lambda: plane.last("EVENTS", "bw.breakers.writer.*"), what="the breaker to open")
        assert (opened["from_state"], opened["to_state"]) == ("closed", "open")
        assert opened["reason"] == "3 jobs in a row failed (threshold: 3)"

        await plane.publish({"agent": "writer", "job_id": "refused", "prompt": "x"})
        refused = await plane.result("refused")
        assert refused["reason"] == "breaker_open"
        assert refused["attempts"][0]["outcome"] == "short_circuited"
        assert refused["total_cost"] == "0.000000000"
        assert plane.sim.ledger.totals.calls == 3

        await asyncio.sleep(COOLDOWN_S - seconds_between(opened["at"], refused["completed_at"]))
        for number in range(20):
            await plane.publish({"agent": "writer", "job_id": f"p{number}", "prompt": "x"})
        results = [await plane.result(f"p{number}") for number in range(20)]
        causes = [attempt["cause"] for result in results for attempt in result["attempts"]]
        assert causes.count("probe") == 1

        async def closed() -> bool:
            last = await plane.last("EVENTS", "bw.breakers.writer.*")
            return last is not None and last["to_state"] == "closed"

        await until(closed, what="the breaker to close")
        states = [event["to_state"] for event in await plane.messages("EVENTS", "bw.breakers.writer.*")]
        assert states == ["open", "half_open", "closed"]


async def test_a_hard_budget_is_never_overrun_and_each_threshold_is_reported_once(start_plane: StartPlane) -> None:
    agents = {
        "writer": {
            "model": "sim/m",
            "max_tokens": 40,
            "budget": {"daily_usd": "0.001", "enforcement": "hard", "soft_at_percent": [50]},
            "concurrency": 32,
        }
    }
    async with start_plane({"sim/m": model(latency_ms=20)}, agents) as plane:
        for number in range(60):
            # Long enough that the estimate of its input tokens is above the 120 that the provider will bill.
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x" * 300})
        results = [await plane.result(f"j{number}") for number in range(60)]
        succeeded = [result for result in results if result["status"] == "succeeded"]
        refused = [result for result in results if result["reason"] == "budget_exceeded"]
        assert len(succeeded) + len(refused) == 60
        assert refused
        assert len(succeeded) * COST_NANO <= 1_000_000
        assert plane.sim.ledger.totals.cost_nano == len(succeeded) * COST_NANO
        assert refused[0]["attempts"][0]["error"]["class"] == "BudgetExceededError"
        assert "resets at" in refused[0]["error"]["message"]

        async def reported() -> list:
            return await plane.messages("EVENTS", "bw.budgets.agent.daily")

        async def both_reported() -> bool:
            return {"soft_cap", "hard_cap"} <= {event["kind"] for event in await reported()}

        # By whoever settles the call that reaches it: of two at the same moment, either may be first in the log.
        await until(both_reported, what="the events of both thresholds")
        thresholds = [(event["kind"], event["threshold_percent"]) for event in await reported()]
        assert sorted(thresholds) == [("hard_cap", 100), ("soft_cap", 50)]
        assert refused[0]["attempts"][0]["refused_by"] == "agent:writer/daily"


async def test_a_tenants_hard_cap_refuses_its_jobs_alone_and_says_when_it_resets(start_plane: StartPlane) -> None:
    agents = {"writer": {"model": "sim/m", "max_tokens": 40}}
    caps = {"daily_usd": "0.0003", "enforcement": "hard"}
    async with start_plane({"sim/m": model()}, agents, budgets={"tenants": {"*": caps, "globex": {}}}) as plane:
        for number in range(30):
            for tenant in ("acme", "globex", None):
                named = {} if tenant is None else {"tenant": tenant}
                job = {"agent": "writer", "job_id": f"{tenant}-{number}", "prompt": "x" * 300}
                await plane.publish(job | named)
        results = {
            tenant: [await plane.result(f"{tenant}-{number}") for number in range(30)]
            for tenant in ("acme", "globex", None)
        }
        assert {result["status"] for tenant in ("globex", None) for result in results[tenant]} == {"succeeded"}
        refused = [result for result in results["acme"] if result["status"] != "succeeded"]
        assert 0 < (len(results["acme"]) - len(refused)) * COST_NANO <= 300_000
        for result in refused:
            [attempt] = result["attempts"]
            assert (result["reason"], attempt["refused_by"]) == ("budget_exceeded", "tenant:acme/daily")
            assert (attempt["outcome"], attempt["cost"]) == ("short_circuited", "0.000000000")
            assert result["error"]["class"] == "BudgetExceededError"
            assert 0 < result["error"]["retry_after_s"] <= 86_400
        assert "It can be used again after" in refused[0]["error"]["user_message"]
        assert "0.0003" not in refused[0]["error"]["user_message"]

        async def reported() -> list:
            return await plane.messages("EVENTS", "bw.budgets.tenant.daily")

        async def cap_reported() -> bool:
            return any(event["kind"] == "hard_cap" for event in await reported())

        await until(cap_reported, what="the hard limit's event")
        assert {(event["tenant"], event["agent"]) for event in await reported()} == {("acme", "writer")}


async def test_the_cap_of_each_user_in_a_team_refuses_the_calls_of_that_user_alone(start_plane: StartPlane) -> None:
    agents = {"writer": {"model": "sim/m", "max_tokens": 40}}
    limits = [
        {"scope": "user:* within team:research", "usd": "0.0003", "per": "week"},
        {"scope": "model:sim/m", "usd": 100, "per": "quarter", "action": "alert"},
    ]
    async with start_plane({"sim/m": model()}, agents, budgets={"limits": limits}) as plane:
        callers = [("ann", "research"), ("bob", "research"), ("ann", "sales")]
        for user, team in callers:
            for number in range(15 if user == "ann" else 3):
                job = {"agent": "writer", "job_id": f"{user}-{team}-{number}", "prompt": "x" * 300}
                await plane.publish(job | {"metadata": {"user": user, "team": team}})
        results = {
            (user, team): [
                await plane.result(f"{user}-{team}-{number}") for number in range(15 if user == "ann" else 3)
            ]
            for user, team in callers
        }
        limited = results.pop(("ann", "research"))
        assert {result["status"] for ended in results.values() for result in ended} == {"succeeded"}
        refused = [result for result in limited if result["status"] != "succeeded"]
        assert 0 < (len(limited) - len(refused)) * COST_NANO <= 300_000
        name = "user:ann within team:research/weekly"
        assert {attempt["refused_by"] for result in refused for attempt in result["attempts"]} == {name}
        assert "0.0003" not in refused[0]["error"]["user_message"]

        async def reported() -> list:
            return await plane.messages("EVENTS", "bw.budgets.user.weekly")

        async def cap_reported() -> bool:
            return any(event["kind"] == "hard_cap" for event in await reported())

        await until(cap_reported, what="the hard limit's event")
        events = [(event["scope"], event["name"], event["within"]) for event in await reported()]
        assert set(events) == {("user", "ann", "team:research")}


async def test_where_a_cap_has_no_room_the_next_model_is_tried_or_the_job_ends_as_the_budget_says(
    start_plane: StartPlane,
) -> None:
    # The dear model's worst case never fits, the cheap one's does.
    dear = {"input_usd_per_mtok": 100, "output_usd_per_mtok": 400}
    caps = {"daily_usd": "0.003", "enforcement": "hard"}
    common = {"model": "sim/dear", "fallback_models": ["sim/m"], "max_tokens": 40}
    agents = {
        "thrifty": {**common, "budget": caps},
        "strict": {**common, "budget": {**caps, "on_exceeded": "fail"}},
    }
    models = {"sim/m": model(), "sim/dear": model()}
    async with start_plane(models, agents, more_models={"sim/dear": {"price": dear}}) as plane:
        heard = await plane.client.subscribe("bw.progress.>")
        for agent in agents:
            await plane.publish({"agent": agent, "job_id": agent, "prompt": "x" * 300})
        thrifty, strict = await plane.result("thrifty"), await plane.result("strict")
        assert (thrifty["status"], thrifty["chosen_model"]) == ("succeeded", "sim/m")
        assert [attempt["outcome"] for attempt in thrifty["attempts"]] == ["short_circuited", "success"]
        assert "no such call ever fits" in thrifty["attempts"][0]["error"]["message"]
        # What a cap is, is for operators: an attempt's event says it, and what programs see does not.
        steps = str([(await heard.next_msg(timeout=5)).data for _ in range(heard.pending_msgs)])
        records = await plane.messages("EVENTS", "bw.executions.>", at_least=2)
        seen = [steps, *map(json.dumps, (thrifty, strict, *records))]
        assert [text for text in seen if "$" in text or "0.003" in text or '"refused_cap": "' in text] == []
        assert "no such call ever fits" in steps
        [refusal] = await plane.messages("EVENTS", "bw.attempts.strict.>")
        to_do = (
            "the limit is $0.003. To do: lower `max_tokens`, or raise the limit: agents.strict.budget.daily_usd, or "
        )
        assert to_do in refusal["error"]["figures"]
        assert (strict["status"], strict["reason"]) == ("dead_lettered", "budget_exceeded")
        assert [attempt["model"] for attempt in strict["attempts"]] == ["sim/dear"]
        assert strict["error"]["retry_after_s"] is None
        assert plane.sim.ledger.totals.calls == 1
        [called] = [one for one in thrifty["attempts"] if one["outcome"] == "success"]
        assert int(called["reserved"].replace(".", "")) >= int(called["cost"].replace(".", ""))
        assert called["reserved_at"] is not None
        refused = thrifty["attempts"][0]
        assert (refused["reserved_at"], refused["cost"]) == (None, "0.000000000")
        assert float(refused["reserved"]) > 0.003, "what it would have reserved"
