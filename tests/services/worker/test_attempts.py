"""Jobs through the worker: retries, fallbacks, timeouts, refusals, and what is recorded of them."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta

from breakwater.kernel.nats import subjects
from tests.flow.kit import COST, model
from tests.services.worker.conftest import StartWorker

QUICK = {"retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0.01}, "breaker": "off"}


async def test_a_server_error_is_retried_exactly_as_configured(start_worker: StartWorker) -> None:
    models = {"sim/flaky": model({"requests": [1, 2], "status": 503})}
    async with start_worker(models, {"writer": {"model": "sim/flaky", **QUICK}}) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
        assert result["status"] == "succeeded"
        assert [(a["outcome"], a["cause"]) for a in result["attempts"]] == [
            ("error", "first"),
            ("error", "retry"),
            ("success", "retry"),
        ]
        assert result["attempts"][1]["backoff_ms"] >= 10
        assert result["total_cost"] == COST
        assert plane.sim.ledger.totals.calls == 3


async def test_a_client_error_costs_one_call_and_ends_in_the_dead_letters_with_the_original_bytes(
    start_worker: StartWorker,
) -> None:
    async with start_worker({"sim/m": model({"status": 401})}, {"writer": {"model": "sim/m", **QUICK}}) as plane:
        job = {"agent": "writer", "job_id": "j1", "prompt": "hello"}
        await plane.publish(job)
        result = await plane.result("j1")
        assert (result["status"], result["reason"]) == ("dead_lettered", "error")
        assert result["error"]["status_code"] == 401
        assert "credentials" in result["error"]["user_message"]
        assert plane.sim.ledger.totals.calls == 1
        [dead_letter] = await plane.messages("DLQ", "bw.dlq.error.writer")
        assert json.loads(base64.b64decode(dead_letter["payload_base64"])) == job
        assert dead_letter["execution_id"] == "j1"


async def test_a_fallback_model_takes_over_and_its_spend_and_the_wasted_one_are_distinguished(
    start_worker: StartWorker,
) -> None:
    models = {"sim/bad": model({"kind": "malformed_json"}), "sim/good": model()}
    agents = {"writer": {"model": "sim/bad", "fallback_models": ["sim/good"], "max_tokens": 100, **QUICK}}
    async with start_worker(models, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
        assert result["chosen_model"] == "sim/good"
        assert result["requested_model"] == "sim/bad"
        assert [a["model"] for a in result["attempts"]] == ["sim/bad"] * 3 + ["sim/good"]
        assert result["attempts"][3]["cause"] == "fallback"
        # A broken answer may have been billed: its cost is the reservation, and said to be estimated.
        assert {a["cost_basis"] for a in result["attempts"][:3]} == {"estimated"}
        assert result["cost_basis"] == "estimated"
        assert result["wasted_cost"] == f"{sum(float(a['cost']) for a in result['attempts'][:3]):.9f}"


async def test_retry_after_is_honoured(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"requests": [1, 1], "status": 429, "retry_after_s": 1})}
    async with start_worker(models, {"writer": {"model": "sim/m", **QUICK}}) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
        assert result["status"] == "succeeded"
        assert result["attempts"][0]["error"]["kind"] == "rate_limit"
        assert result["attempts"][1]["backoff_ms"] >= 1000


async def test_a_hanging_call_ends_with_the_attempts_timeout_and_the_job_with_its_total(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/m", **QUICK, "timeout_s": 1, "total_timeout_s": 2.5}}
    async with start_worker({"sim/m": model({"hang_s": 60})}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
        assert (result["status"], result["reason"]) == ("dead_lettered", "timeout")
        assert {a["error"]["kind"] for a in result["attempts"]} == {"timeout"}
        assert 2 <= result["attempts_count"] <= 3
        spent = datetime.fromisoformat(result["completed_at"]) - datetime.fromisoformat(result["dispatched_at"])
        assert timedelta(seconds=2.5) <= spent < timedelta(seconds=30)


async def test_a_dry_run_answers_the_plan_and_calls_nothing(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"]}}
    async with start_worker({"sim/m": model(), "sim/n": model()}, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello", "dry_run": True})
        result = await plane.result("j1")
        assert [planned["model"] for planned in result["output"]["models"]] == ["sim/m", "sim/n"]
        assert float(result["output"]["models"][0]["worst_case_cost"]) > 0
        assert plane.sim.ledger.totals.calls == 0


BAD_JOBS = {
    b"not json": "JSON",
    b'{"agent": "writer", "prompt": 3}': "prompt",
    b'{"agent": "writer", "prompt": "x", "modle": "y"}': "modle",
    b'{"agent": "writer"}': "exactly one",
    b'{"agent": "other", "prompt": "x"}': "other",
    b'{"agent": "writer", "prompt": "\xff\xfe"}': "",
    b'{"agent": "writer", "prompt": "x", "model": "a.b/c d*>"}': "not allowed",
}
"""What is published, and what the refusal names."""


async def test_a_job_that_cannot_be_run_is_refused_with_its_reason_and_kept(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        for number, data in enumerate(BAD_JOBS):
            await plane.publish(data, "writer", **{"Nats-Msg-Id": f"bad-{number}"})
        for number, (data, named) in enumerate(BAD_JOBS.items()):
            result = await plane.result(f"bad-{number}")
            assert (result["status"], result["reason"]) == ("dead_lettered", "invalid"), data
            assert named in result["error"]["message"], data
            subject = subjects.execution("writer", f"bad-{number}")
            assert len(await plane.messages("EVENTS", subject, at_least=1)) == 1, data
        dead_letters = await plane.messages("DLQ", "bw.dlq.invalid.writer")
        assert sorted(base64.b64decode(dead_letter["payload_base64"]) for dead_letter in dead_letters) == sorted(
            BAD_JOBS
        )


async def test_user_message_carries_the_providers_own_message_where_it_may_be_shown(start_worker: StartWorker) -> None:
    said = "Your credit balance is too low. Organization org-123 has $0.17 left. The model sim/m is paused."
    error = {"status": 402, "error": {"message": said}}
    agents = {"writer": {"model": "sim/m", **QUICK}}
    agents |= {"private": {**agents["writer"], "persist_responses": False}}
    async with start_worker({"sim/m": model(error)}, agents) as plane:
        for name in agents:
            await plane.publish({"agent": name, "job_id": name, "prompt": "hello"})
        told = {name: (await plane.result(name))["error"]["user_message"] for name in agents}
    assert "**Message:** Your credit balance is too low. The model sim/m is paused.\n" in told["writer"]
    assert told["private"] == told["writer"].replace(
        "**Message:** Your credit balance is too low. The model sim/m is paused.\n", ""
    )
