"""What a call has cost, and what it means for the breaker, holds for the next admission: no service is at work here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from breakwater.breakers.rules.breaker import BreakerKey, consecutive_failures
from breakwater.calls.providers.base import Answer, CallError
from breakwater.calls.rules.classify import HttpFailure
from breakwater.jobs.store.executions import Claim
from breakwater.limits.store.budget_counters import BudgetCounters, PeriodCounters
from breakwater.prices.rules.usage import Usage
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider, WorkerPlane

COST = 42_000
"""Of a call, in nano-dollars. With the default of 4,096 tokens of output it might cost 2,457,600 and its input."""

FAILS = {"requests": [1, 1000], "status": 500}
ONE_TRY: dict[str, Any] = {"retry": {"max_attempts": 1}}


async def fill(plane: WorkerPlane) -> None:
    """As the budget service does when it starts."""
    counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
    await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})


async def today(plane: WorkerPlane) -> PeriodCounters:
    counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
    snapshot = await counters.snapshot(counters.periods(datetime.now(UTC)))
    return [one for one in snapshot.periods if one.period.window == "daily"][-1]


def agent(cap: str, **more: Any) -> dict[str, Any]:
    return {"writer": {"model": "sim/m", "budget": {"daily_usd": cap, "enforcement": "hard"}, **more}}


def said(output_tokens: int, finish_reason: str = "stop") -> Answer:
    return Answer("yes", Usage(10, output_tokens), finish_reason=finish_reason)


async def test_twenty_jobs_one_after_the_other_run_under_a_cap_of_two_worst_cases(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, agent("0.005")) as plane:
        await fill(plane)
        for number in range(20):
            result = await plane.run({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
            assert result["status"] == "succeeded"
            counters = await today(plane)
            assert counters.figures["agent:writer"].spent == COST * (number + 1)
            assert counters.reserved["agent:writer"] == 0


async def test_a_job_waits_for_calls_in_flight_that_hold_what_is_left(start_worker: StartWorker) -> None:
    slow = model({"requests": [1, 1], "hang_s": 1})
    async with start_worker({"sim/m": slow}, agent("0.003")) as plane:
        await fill(plane)
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress == 1), "the first call")
        second = await plane.run({"agent": "writer", "job_id": "second", "prompt": "x"})
        assert second["status"] == "succeeded"
        assert [attempt["outcome"] for attempt in second["attempts"]] == ["success"]
        assert second["attempts"][0]["backoff_ms"] > 0


async def test_a_job_that_waited_when_its_worker_died_has_lost_no_call(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is saved with each question whether it may call, and taken back a moment after the answer."""
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 30})}, agent("0.003")) as plane:
        await fill(plane)
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress == 1), "the first call")
        with monkeypatch.context() as patch:
            patch.setattr("breakwater.calls.claim_gate.ClaimGate.release", lambda _: None)
            await plane.publish({"agent": "writer", "job_id": "second", "prompt": "x"})
            await until(lambda: saved(plane, "second"), "a job that waits")
            await plane.end()
        plane.begin()
        [lost, *_] = (await plane.result("first"))["attempts"]
        assert lost["outcome"] == "worker_lost"
        assert "worker_lost" not in {attempt["outcome"] for attempt in (await plane.result("second"))["attempts"]}
        counters = await today(plane)
        assert counters.figures["agent:writer"].spent + counters.reserved["agent:writer"] <= 3_000_000


async def saved(plane: WorkerPlane, execution_id: str) -> bool:
    """Whether a job has a checkpoint."""
    checkpoint = await cast(Any, plane.worker.redis.client.hget(Claim(execution_id, "").key, "checkpoint"))
    return bool(checkpoint)


async def held(plane: WorkerPlane, **job: Any) -> Mapping[str, Any]:
    await fill(plane)
    await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
    await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress == 1), "the first call")
    return await plane.run({"agent": "writer", "job_id": "second", "prompt": "x", "total_timeout_s": 1, **job})


async def test_a_job_without_time_to_wait_is_refused_and_says_that_calls_in_flight_hold_the_rest(
    start_worker: StartWorker,
) -> None:
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 3})}, agent("0.003")) as plane:
        refused = await held(plane)
        error, attempt = refused["error"], refused["attempts"][0]
        assert (refused["reason"], error["class"]) == ("budget_exceeded", "BudgetHeldError")
        assert attempt["refused_by"] == "agent:writer/daily"
        assert "calls in flight" in error["message"]
        assert "resets" not in error["message"]
        assert error["retry_after_s"] <= 10
        assert (await plane.result("first"))["status"] == "succeeded"


async def test_a_spent_budget_refuses_at_once_whatever_calls_in_flight_hold_of_another(
    start_worker: StartWorker,
) -> None:
    agents = agent("0.003") | {"other": {"model": "sim/n"}}
    caps = {"tenants": {"t": {"daily_usd": "0.0025", "enforcement": "hard"}}}
    models = {"sim/m": model({"requests": [1, 1], "hang_s": 3}), "sim/n": model()}
    async with start_worker(models, agents, budgets=caps) as plane:
        await fill(plane)
        assert (await plane.run({"agent": "other", "job_id": "o", "prompt": "x", "tenant": "t"}))[
            "status"
        ] == "succeeded"
        # The agent's is held, and the tenant's is spent but for less than a worst case.
        refused = await held(plane, tenant="t", total_timeout_s=60)
        assert refused["error"]["class"] == "BudgetExceededError"
        assert refused["attempts"][0]["refused_by"] == "tenant:t/daily"
        assert "resets" in refused["error"]["message"]


async def test_what_redis_lost_while_a_call_went_on_is_not_charged_twice(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 0.5})}, agent("1")) as plane:
        await fill(plane)
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress == 1), "the first call")
        await plane.worker.redis.client.flushall()
        assert (await plane.result("first"))["status"] == "succeeded"
        assert not await plane.worker.redis.client.exists("bw:limits:reservations")


@pytest.mark.parametrize("threshold", [1, 3, 5])
async def test_no_call_is_admitted_in_sequence_after_the_one_that_trips_the_breaker(
    start_worker: StartWorker, threshold: int
) -> None:
    agents = {"writer": {"model": "sim/m", "breaker": {"consecutive_failures": threshold}, **ONE_TRY}}
    async with start_worker({"sim/m": model(FAILS)}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        reasons = [
            (await plane.run({"agent": "writer", "job_id": f"j{number}", "prompt": "x"}))["reason"]
            for number in range(threshold + 2)
        ]
        assert reasons == ["error"] * threshold + ["breaker_open"] * 2
        assert plane.sim.ledger.totals.calls == threshold


async def test_the_retries_of_one_job_stop_at_the_failure_that_trips_the_breaker(start_worker: StartWorker) -> None:
    retry = {"max_attempts": 4, "base_s": 0.05, "max_delay_s": 0.05}
    agents = {"writer": {"model": "sim/m", "retry": retry, "breaker": {"count": "attempts"}}}
    async with start_worker({"sim/m": model(FAILS)}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        result = await plane.run({"agent": "writer", "job_id": "j", "prompt": "x"})
        assert [attempt["outcome"] for attempt in result["attempts"]] == ["error"] * 3 + ["short_circuited"]


async def test_a_job_that_is_refused_or_cut_off_between_its_tries_has_failed_once(start_worker: StartWorker) -> None:
    retry = {"max_attempts": 9, "base_s": 0.01, "max_delay_s": 0.01}
    spent = {"ratio": 0, "floor": 2}
    agents = {
        "refused": {"model": "sim/m", "retry": retry},
        # Of each job the second call is cut off.
        "cut_off": {"model": "sim/n", "retry": retry, "timeout_s": 0.3, "total_timeout_s": 0.5},
    }
    models = {"sim/m": model(FAILS), "sim/n": model({"hang_s": 60})}
    async with start_worker(models, agents, retry_budget=spent) as plane:
        await plane.worker.breakers.mark_filled("log")
        for name, called in (("refused", "sim/m"), ("cut_off", "sim/n")):
            for number in range(3):
                result = await plane.run({"agent": name, "job_id": f"{name}{number}", "prompt": "x"})
                assert result["reason"] != "breaker_open"
                assert len(result["attempts"]) > 1 or number == 2 or name == "cut_off", result
                [loaded] = await plane.worker.breakers.load([BreakerKey(name, called)])
                assert consecutive_failures(loaded.breaker) == number + 1
            assert loaded.breaker.reason == "3 jobs in a row failed (threshold: 3)"


async def test_a_job_whose_worker_died_between_its_tries_counts_once(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "retry": {"max_attempts": 2, "base_s": 0.01, "max_delay_s": 0.01}}}
    async with start_worker({"sim/m": model(FAILS)}, agents, begin=False) as plane:
        await plane.worker.breakers.mark_filled("log")
        plane.begin()
        await plane.run_until("breakwater.services.worker.attempts.Attempts._carry_out", "j")
        plane.begin()
        result = await plane.result("j")
        assert [attempt["tried_again"] for attempt in result["attempts"]] == [True, False]
        [loaded] = await plane.worker.breakers.load([BreakerKey("writer", "sim/m")])
        assert (consecutive_failures(loaded.breaker), loaded.breaker.total_failures) == (1, 2)


async def test_a_repaired_request_is_tried_again(start_worker: StartWorker) -> None:
    refused = CallError(HttpFailure(400, "Unsupported parameter: 'max_tokens'", param="max_tokens"), maybe_billed=False)
    provider = ScriptedProvider(refused, said(40))
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}, providers={"sim": provider}) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j", "prompt": "x"})
        assert [(one["cause"], one["tried_again"]) for one in result["attempts"]] == [
            ("first", True), ("parameter", False),
        ]  # fmt: skip


async def test_a_success_between_failures_counts_before_its_event_has_gone_through_the_log(
    start_worker: StartWorker,
) -> None:
    faults = ({"requests": [1, 2], "status": 500}, {"requests": [4, 5], "status": 500})
    agents = {"writer": {"model": "sim/m", **ONE_TRY}}
    async with start_worker({"sim/m": model(*faults)}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        statuses = [
            (await plane.run({"agent": "writer", "job_id": f"j{number}", "prompt": "x"}))["status"]
            for number in range(6)
        ]
        assert statuses == ["dead_lettered"] * 2 + ["succeeded"] + ["dead_lettered"] * 2 + ["succeeded"]


async def test_the_probe_closes_the_breaker_as_it_ends(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "breaker": {"consecutive_failures": 1, "cooldown_s": 0.05}, **ONE_TRY}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "status": 500})}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        await plane.run({"agent": "writer", "job_id": "j0", "prompt": "x"})
        await asyncio.sleep(0.06)
        probe = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
        assert probe["attempts"][0]["cause"] == "probe"
        [loaded] = await plane.worker.breakers.load([BreakerKey("writer", "sim/m")])
        assert loaded.breaker.state == "closed"


async def test_failures_at_the_same_time_let_pass_only_those_in_flight(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 4, **ONE_TRY}}
    async with start_worker({"sim/m": model(FAILS)}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        for number in range(20):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        reasons = [(await plane.result(f"j{number}"))["reason"] for number in range(20)]
        # Three trip it; with four at a time no more than three others were admitted by then.
        assert 3 <= reasons.count("error") <= 6


async def test_a_rate_is_judged_with_the_successes_that_it_is_of(start_worker: StartWorker) -> None:
    rules = {"consecutive_failures": "off", "same_error": "off", "failure_rate": 0.5, "minimum_calls": 4}
    agents = {"writer": {"model": "sim/m", "breaker": rules, **ONE_TRY}}
    async with start_worker({"sim/m": model({"requests": [4, 9], "status": 500})}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        reasons = [
            (await plane.run({"agent": "writer", "job_id": f"j{number}", "prompt": "x"}))["reason"]
            for number in range(8)
        ]
        assert reasons == [None] * 3 + ["error"] * 3 + ["breaker_open"] * 2


async def test_a_result_is_not_kept_from_its_submitter_while_redis_does_not_answer(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.services.worker.outcomes.RECORD_TIMEOUT_S", 0.1)
    async with start_worker({"sim/m": model(FAILS)}, {"writer": {"model": "sim/m", **ONE_TRY}}) as plane:
        asked, answers = asyncio.Event(), asyncio.Event()

        async def hangs(_: object) -> tuple[None, list[Any]]:
            asked.set()
            await answers.wait()
            return None, []

        monkeypatch.setattr(plane.worker.breakers, "load_with_log", hangs)
        result = await plane.run({"agent": "writer", "job_id": "j", "prompt": "x"})
        assert (result["reason"], asked.is_set()) == ("error", True)
        answers.set()


async def test_what_answers_have_used_is_held_instead_of_the_worst_case_and_no_call_uses_more(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.prices.rules.price.MIN_OBSERVED", 3)
    provider = ScriptedProvider(*[said(40)] * 4, said(80, "length"), said(300), said(300))
    agents = agent("1", reserve="observed", max_tokens=1000)
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        await fill(plane)
        results = [await plane.run({"agent": "writer", "job_id": f"j{number}", "prompt": "x"}) for number in range(6)]
    assert [result["status"] for result in results] == ["succeeded"] * 6
    # Twice the longest of them; the one that was cut off there is asked for again, with all that the job may use.
    assert [call.params["max_tokens"] for call in provider.calls] == [1000] * 3 + [80, 80, 1000, 600]
    held = [attempt["reserved"] for result in results for attempt in result["attempts"]]
    assert held[3] == held[4] < held[5] == held[0]
    cut_off, whole = results[4]["attempts"]
    assert (cut_off["error"]["class"], whole["cause"]) == ("OutputCutOffError", "output_limit")
    assert results[4]["wasted_by_cause"] == {"retry": cut_off["cost"]}
    assert all(float(one["cost"]) <= float(one["reserved"]) for result in results[:5] for one in result["attempts"])


async def test_a_stream_holds_its_worst_case_as_what_is_out_of_it_cannot_be_taken_back(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.prices.rules.price.MIN_OBSERVED", 1)
    provider = ScriptedProvider(said(40), said(40))
    agents = agent("1", reserve="observed", max_tokens=1000)
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        await fill(plane)
        await plane.run({"agent": "writer", "job_id": "first", "prompt": "x"})
        await plane.run({"agent": "writer", "job_id": "second", "prompt": "x", "stream": True})
    assert [call.params["max_tokens"] for call in provider.calls] == [1000, 1000]


async def test_an_estimate_of_what_an_answer_used_teaches_nothing(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.prices.rules.price.MIN_OBSERVED", 1)
    provider = ScriptedProvider(*[Answer("yes", Usage(None, None))] * 2)
    agents = agent("1", reserve="observed", max_tokens=1000)
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        await fill(plane)
        for name in ("first", "second"):
            await plane.run({"agent": "writer", "job_id": name, "prompt": "x"})
    assert [call.params["max_tokens"] for call in provider.calls] == [1000, 1000]


async def test_a_call_whose_worker_died_after_it_was_charged_is_recorded_at_that_cost(
    start_worker: StartWorker,
) -> None:
    """What it has not used of its worst case is free since then, and may be spent by others."""
    async with start_worker({"sim/m": model()}, agent("0.003")) as plane:
        await fill(plane)
        await plane.run_until("breakwater.services.worker.attempts.record", "j")
        await plane.worker.redis.run([])
        await plane.worker.redis.run([plane.worker.executions.checkpoint_command(Claim("none", "t"), "")])
        plane.begin()
        [lost, *_] = (await plane.result("j"))["attempts"]
        assert (lost["outcome"], lost["cost"], lost["cost_basis"]) == ("worker_lost", "0.000042000", "estimated")


async def test_a_success_does_not_hide_failures_that_came_after_it(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", **ONE_TRY}}
    async with start_worker({"sim/m": model(FAILS)}, agents) as plane:
        breakers, key = plane.worker.breakers, BreakerKey("writer", "sim/m")
        await breakers.mark_filled("log")
        for number in range(2):
            await plane.run({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
        [before] = await breakers.load([key])
        # Of a call on another worker, which ended before these two and notes that only now.
        earlier = before.breaker.failures[0].sequence - 1
        await plane.worker.redis.run([breakers.succeeded_command(key, before.breaker.version, earlier)])
        await plane.run({"agent": "writer", "job_id": "j2", "prompt": "x"})
        [after] = await breakers.load([key])
        assert after.breaker.state == "open"


async def test_an_answer_that_was_cut_off_is_asked_for_again_though_its_worker_died(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.prices.rules.price.MIN_OBSERVED", 1)
    provider = ScriptedProvider(said(40), said(80, "length"), said(300))
    agents = agent("1", reserve="observed", max_tokens=1000)
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}) as plane:
        await fill(plane)
        await plane.run({"agent": "writer", "job_id": "first", "prompt": "x"})
        await plane.run_until("breakwater.services.worker.attempts.Attempts._carry_out", "second")
        plane.begin()
        result = await plane.result("second")
    assert (result["status"], [one["cause"] for one in result["attempts"]]) == ("succeeded", ["first", "output_limit"])


async def test_a_job_whose_time_ends_while_it_waits_calls_no_other_model_without_time(
    start_worker: StartWorker,
) -> None:
    agents = agent("0.003", fallback_models=["sim/n"])
    models = {"sim/m": model({"requests": [1, 1], "hang_s": 3}), "sim/n": model()}
    async with start_worker(models, agents) as plane:
        refused = await held(plane)
        assert (refused["reason"], refused["error"]["class"]) == ("budget_exceeded", "BudgetHeldError")
        assert [attempt["outcome"] for attempt in refused["attempts"]] == ["short_circuited"]
