"""Every failure of the table, through the real worker, NATS, Redis and the simulated provider."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from breakwater.calls.providers.credentials import RETRY_S
from breakwater.calls.rules.holds import after_hold_s
from breakwater.services.worker import attempts
from tests.flow.kit import COST, Plane, model, seconds_between
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.error_table import MAX_ATTEMPTS, ROWS, Row

BASE_S = 0.05
AGENT = {
    "retry": {"max_attempts": MAX_ATTEMPTS, "backoff": "constant", "base_s": BASE_S},
    "breaker": "off",
    "total_timeout_s": 60,
    "max_tokens": 100,
}


def _agent_name(index: int) -> str:
    return f"row-{index}"


def _model(row: Row, index: int) -> str:
    return f"{row.endpoint or 'sim'}/m{index}"


@pytest.mark.long(about_s=7)
async def test_every_failure_is_called_delayed_recorded_and_charged_as_the_table_says(
    start_worker: StartWorker,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing = closed.getsockname()[1]
        models = {_model(row, index): model(row.fault) for index, row in enumerate(ROWS) if row.endpoint is None}
        agents = {
            # Short only where it is to be over: on a busy machine, any call may take a second.
            _agent_name(index): {
                **AGENT,
                "model": _model(row, index),
                "timeout_s": 0.5 if row.kind == "timeout" else 30,
            }
            for index, row in enumerate(ROWS)
        }
        providers = {
            "refused": {"base_url": f"http://127.0.0.1:{refusing}/v1"},
            "unknown_host": {"base_url": "http://nothing.invalid/v1"},
            "plain_port": {"base_url": "https://127.0.0.1:{sim_port}/v1"},
            "no_credential": {"base_url": "http://127.0.0.1:{sim_port}/v1", "auth": {"command": ["no-such-program"]}},
        }
        async with start_worker(models, agents, more_providers=providers) as plane:
            for index in range(len(ROWS)):
                name = _agent_name(index)
                await plane.publish({"agent": name, "job_id": f"job-{index}", "prompt": "hello"})
            for index, row in enumerate(ROWS):
                _check(row, await plane.result(f"job-{index}"))
                calls = plane.sim.ledger.by_model.get(_model(row, index))
                assert (calls.calls if calls is not None else 0) == (0 if row.endpoint else row.calls), row.name


def _check(row: Row, result: dict[str, Any]) -> None:
    attempts = result["attempts"]
    assert (result["status"], result["reason"]) == ("dead_lettered", "error"), row.name
    assert len(attempts) == row.calls, row.name
    assert [attempt["cause"] for attempt in attempts] == row.causes, row.name
    for attempt in attempts:
        error = attempt["error"]
        assert (error["kind"], error["class"]) == (row.kind, row.class_name), (row.name, error)
        assert error["retryable"] == row.retried, row.name
        assert attempt["counts_for_breaker"] == row.counted, row.name
        assert attempt["cost_basis"] == ("estimated" if row.cost == "estimated" else "billed"), row.name
        assert (attempt["cost"] == "0.000000000") == (row.cost == "nothing"), row.name
    assert attempts[0]["backoff_ms"] == 0
    for attempt in attempts[1 if row.repair is None else 2 :]:
        if row.endpoint == "no_credential":
            # Its source is asked again after a pause.
            least_ms = 0.9 * RETRY_S * 1000
            most_ms = after_hold_s(RETRY_S, 1.0) * 1000 + 1
        else:
            # Constant back-off, and jitter of up to half of it.
            least_ms = BASE_S * 1000
            most_ms = BASE_S * 1500 + 1
        assert least_ms <= attempt["backoff_ms"] <= most_ms, (row.name, attempt["backoff_ms"])
    assert result["error"]["user_message"], row.name
    cause = {"retry", "failed"} if row.retried else {"failed"}
    assert set(result["wasted_by_cause"]) == (set() if row.cost == "nothing" else cause), row.name


async def test_a_failed_first_model_and_an_answer_of_the_second_stand_in_one_record_with_both_costs(
    start_worker: StartWorker,
) -> None:
    models = {"sim/first": model({"kind": "malformed_json"}), "sim/second": model()}
    agents = {"writer": {**AGENT, "model": "sim/first", "fallback_models": ["sim/second"]}}
    async with start_worker(models, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
    assert (result["status"], result["chosen_model"]) == ("succeeded", "sim/second")
    costs = [float(attempt["cost"]) for attempt in result["attempts"]]
    assert [attempt["model"] for attempt in result["attempts"]] == ["sim/first"] * MAX_ATTEMPTS + ["sim/second"]
    assert result["total_cost"] == f"{sum(costs):.9f}"
    assert result["attempts"][-1]["cost"] == COST
    assert result["wasted_by_cause"] == {"retry": f"{sum(costs[:2]):.9f}", "fallback": f"{costs[2]:.9f}"}


async def test_no_job_takes_longer_than_its_total_timeout(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "model": "sim/m", "timeout_s": 0.3}}
    over: list[float] = []
    async with start_worker({"sim/m": model({"hang_s": 60})}, agents) as plane:
        # One after the other: what a busy machine adds to one of them is not the plane's.
        while len(over) < 10 and min(over, default=1) > 0.1:
            name = f"j{len(over)}"
            await plane.publish({"agent": "writer", "job_id": name, "prompt": "hello", "total_timeout_s": 0.8})
            result = await plane.result(name)
            assert (result["status"], result["reason"]) == ("dead_lettered", "timeout")
            over.append(seconds_between(result["dispatched_at"], result["completed_at"]) - 0.8)
    assert min(over) <= 0.1, over


async def test_an_agent_may_retry_what_is_not_retried_otherwise_and_more_often_for_one_kind(
    start_worker: StartWorker,
) -> None:
    models = {
        "sim/missing": model({"requests": [1, 2], "status": 404}),
        "sim/limited": model({"requests": [1, 4], "status": 429, "retry_after_s": 0.01}),
    }
    agents = {
        "a": {**AGENT, "model": "sim/missing", "retry": {**AGENT["retry"], "on": [404]}},
        "b": {**AGENT, "model": "sim/limited", "retry": {**AGENT["retry"], "per_kind": {"rate_limit": {"max": 4}}}},
    }
    async with start_worker(models, agents) as plane:
        for name in agents:
            await plane.publish({"agent": name, "job_id": name, "prompt": "hello"})
        results = [await plane.result(name) for name in agents]
    assert [result["status"] for result in results] == ["succeeded"] * 2
    assert [result["attempts_count"] for result in results] == [3, 5]


async def test_a_wait_that_can_not_fit_goes_to_the_next_model_at_once(start_worker: StartWorker) -> None:
    models = {"sim/limited": model({"status": 429, "retry_after_s": 600}), "sim/other": model()}
    agents = {"writer": {**AGENT, "model": "sim/limited", "fallback_models": ["sim/other"], "total_timeout_s": 20}}
    async with start_worker(models, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
    assert result["chosen_model"] == "sim/other"
    assert [attempt["backoff_ms"] for attempt in result["attempts"]] == [0, 0]


def _no_job_waits(plane: Plane) -> Callable[[], Awaitable[bool]]:
    async def none() -> bool:
        return await plane.pending_jobs() == 0

    return none


async def test_sleeping_jobs_hold_no_slot(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LONG_WAIT_S", 0.5)
    wait_s = 5
    models = {"sim/limited": model(), "sim/m": model()}
    agents = {"writer": {**AGENT, "model": "sim/limited", "allowed_models": ["sim/m"], "concurrency": 2}}
    async with start_worker(models, agents) as plane:
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/limited", wait_s)])
        for index in range(4):
            await plane.publish({"agent": "writer", "job_id": f"sleeper-{index}", "prompt": "hello"})

        async def asleep() -> bool:
            return (await plane.jetstream.stream_info("PARKED")).state.messages == 4

        await until(asleep, what="four parked jobs of an agent that runs two at once")
        await until(_no_job_waits(plane), what="no job that holds a slot")
        await plane.publish({"agent": "writer", "job_id": "awake", "prompt": "hello", "model": "sim/m"})
        awake = await plane.result("awake")
        assert awake["status"] == "succeeded"
        results = [await plane.result(f"sleeper-{index}") for index in range(4)]
    assert {result["status"] for result in results} == {"succeeded"}
    for result in results:
        [called] = result["attempts"]
        assert called["backoff_ms"] >= 500
        assert awake["completed_at"] < called["started_at"]
