"""Jobs that would break a careless worker: none may stop another one, and none is lost."""

from __future__ import annotations

import base64
import json
from typing import Any
from unittest.mock import Mock

import pytest

from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import job_digest
from breakwater.jobs.store.executions import Claim
from breakwater.services.worker import crashes, parsing
from tests.flow.kit import Plane, model
from tests.helpers import FIRST, until
from tests.services.worker.conftest import StartWorker

AGENTS = {
    "odd": {"model": "sim/m", "concurrency": 2, "breaker": "off"},
    "plain": {"model": "sim/m"},
    "expensive": {"model": "sim/big"},
}
PRICED_APART: list[dict[str, Any]] = [
    {"speed": "fast"},
    {"inference_geo": "us"},
    {"modalities": ["text", "audio"]},
    {"plugins": [{"id": "web"}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "web_search_20250305", "name": "web_search"}]},
]

ODD: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"agent": "odd", "prompt": "x"}, {"Nats-Msg-Id": "m" * 5000}),
    ({"agent": "odd", "prompt": "x"}, {"Nats-Msg-Id": "m" * 129}),
    ({"agent": "odd", "job_id": "a\x01b", "prompt": "x"}, {}),
    ({"agent": "odd", "job_id": "j" * 5000, "prompt": "x"}, {}),
    ({"agent": "odd", "prompt": 3, "reply_to": "_INBOX.a b"}, {}),
    ({"agent": "odd", "prompt": 3, "reply_to": "_INBOX.a\r\nPUB x 0\r\n"}, {}),
    ({"agent": "odd", "prompt": " "}, {}),
    ({"agent": "odd", "prompt": "x", "total_timeout_s": 301}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"max_tokens": 10**17}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"max_tokens": 100_000.0}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"max_tokens": None}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"n": 10**9}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"model": "sim/big"}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"messages": []}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"stream": True}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"service_tier": "priority"}}, {}),
    ({"agent": "odd", "prompt": "x", "params": {"web_search_options": {}}}, {}),
    *(({"agent": "odd", "prompt": "x", "params": params}, {}) for params in PRICED_APART),
    ({"agent": "odd", "prompt": "x", "params": {"seed": 10**30}}, {}),
]


async def _drained(plane: Plane) -> bool:
    return await plane.pending_jobs() == 0


async def test_no_odd_job_stops_another_one_or_is_lost(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(), "sim/big": model()}, AGENTS) as plane:
        for job, headers in ODD:
            await plane.publish(json.dumps(job).encode(), "odd", **headers)
        await plane.publish({"agent": "plain", "job_id": "after", "prompt": "x"})
        assert (await plane.result("after"))["status"] == "succeeded"
        await until(lambda: _drained(plane), what="an empty JOBS")
        records = await plane.messages("EVENTS", "bw.executions.odd.*", at_least=len(ODD))
        assert len(records) == len(ODD)
        dead_letters = await plane.messages("DLQ", "bw.dlq.invalid.odd")
        kept = [base64.b64decode(dead_letter["payload_base64"]).decode() for dead_letter in dead_letters]
        # The first two only have a message id that can't be a job id, and the last one a number that JSON allows.
        assert sorted(kept) == sorted(json.dumps(job) for job, _ in ODD[2:-1])
        assert "job_handling_failed" not in plane.log("worker")
        assert {call.model for call in plane.sim.ledger.calls} == {"sim/m"}


async def test_a_job_that_readers_take_differently_is_refused(start_worker: StartWorker) -> None:
    jobs = [
        b'{"agent": "plain", "job_id": "twice", "prompt": "x", "params": {"max_tokens": 1, "max_tokens": 9000}}',
        b'{"agent": "plain", "job_id": "large", "prompt": "x", "params": {"temperature": 1e999}}',
    ]
    async with start_worker({"sim/m": model(), "sim/big": model()}, AGENTS) as plane:
        for job in jobs:
            await plane.publish(job, "plain")
        dead_letters = await plane.messages("DLQ", "bw.dlq.invalid.plain", at_least=len(jobs))
        assert [dead_letter["error"] for dead_letter in dead_letters] == [
            "the job is not JSON: the key 'max_tokens' occurs twice in one object",
            "the job is not JSON: the number 1e999 is too large",
        ]
        assert plane.sim.ledger.totals.calls == 0


async def test_half_of_a_surrogate_pair_makes_no_job_invalid(start_worker: StartWorker) -> None:
    job = rb'{"agent": "plain", "job_id": "half", "prompt": "ok \ud83d", "metadata": {"a\ude00": "\ud83d\ude00"}}'
    async with start_worker({"sim/m": model(), "sim/big": model()}, AGENTS) as plane:
        await plane.publish(job, "plain")
        result = await plane.result("half")
        assert (result["status"], len(result["attempts"])) == ("succeeded", 1)
        [record] = await plane.messages("EVENTS", "bw.executions.>", at_least=1)
        assert record["metadata"] == {"a\ufffd": "\U0001f600"}


async def test_an_id_with_the_form_of_a_key_is_refused_and_stands_nowhere_but_in_the_dead_letter(
    start_worker: StartWorker,
) -> None:
    key = "sk-proj-" + "made-up-" * 4
    async with start_worker({"sim/m": model(), "sim/big": model()}, AGENTS) as plane:
        for field in ("job_id", "tenant", "task_id", "parent_execution_id", "plan_id"):
            replies = await plane.client.subscribe(f"bw.replies.{field}")
            await plane.publish({"agent": "plain", "prompt": "x", field: key, "reply_to": f"bw.replies.{field}"})
            refused = json.loads((await replies.next_msg(timeout=60)).data)
            assert (refused["reason"], key in str(refused)) == ("invalid", False)
            assert f"{field}: has the form of a known service's key" in refused["error"]["message"]
        await plane.publish(json.dumps({"agent": "plain", "prompt": "x"}).encode(), "plain", **{"Nats-Msg-Id": key})
        records = await plane.messages("EVENTS", "bw.executions.plain.*", at_least=5)
        assert {record["reason"] for record in records} == {"invalid"}
        assert key not in json.dumps(records) + plane.log("worker")


async def test_an_id_is_one_execution_also_for_another_agent(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(), "sim/big": model()}, AGENTS) as plane:
        await plane.publish({"agent": "plain", "job_id": "j1", "prompt": "x"})
        first = await plane.result("j1")
        replies = await plane.client.subscribe("bw.replies.other")
        await plane.publish({"agent": "expensive", "job_id": "j1", "prompt": "y", "reply_to": "bw.replies.other"})
        refused = json.loads((await replies.next_msg(timeout=60)).data)
        assert (refused["status"], refused["reason"], refused["output"]) == ("dead_lettered", "invalid", None)
        assert refused["error"]["class"] == "IdConflictError"
        await until(lambda: _drained(plane), what="an empty JOBS")
        assert await plane.result("j1") == first
        assert await plane.last("EVENTS", "bw.executions.expensive.j1") is None


async def test_an_id_is_one_job_whether_it_is_decided_runs_or_is_not_valid(start_worker: StartWorker) -> None:
    agents = {"plain": {"model": "sim/m", "concurrency": 2}}
    async with start_worker({"sim/m": model(latency_ms=1500)}, agents) as plane:
        replies = await plane.client.subscribe("bw.replies.r")

        async def refused() -> str:
            return json.loads((await replies.next_msg(timeout=60)).data)["error"]["class"]

        other = {"agent": "plain", "job_id": "j1", "prompt": "y", "reply_to": "bw.replies.r"}
        progress = await plane.client.subscribe("bw.progress.>")
        await plane.publish({"agent": "plain", "job_id": "j1", "prompt": "x"})
        await progress.next_msg(timeout=60)
        await plane.publish(other)
        assert await refused() == "IdConflictError", "while the first one runs"
        first = await plane.result("j1")
        for again in (other, other | {"prompt": "x", "tenant": "t"}, other | {"prompt": 3}):
            await plane.publish(again)
            assert await refused() == "IdConflictError"
        await plane.publish({"prompt": "x", "agent": "plain", "job_id": "j1", "reply_to": "bw.replies.r"})
        same = json.loads((await replies.next_msg(timeout=60)).data)
        assert (same["status"], same["output"]) == ("succeeded", first["output"])
        await until(lambda: _drained(plane), what="an empty JOBS")
        assert plane.sim.ledger.totals.calls == 1
        assert len(await plane.messages("EVENTS", "bw.executions.plain.*", at_least=1)) == 1


@pytest.mark.parametrize("odd", [{"prompt": 3}, {"dry_run": True}])
async def test_what_is_not_run_takes_no_id_of_a_job_that_runs(start_worker: StartWorker, odd: dict[str, Any]) -> None:
    agents = {"plain": {"model": "sim/m", "concurrency": 2}}
    async with start_worker({"sim/m": model(latency_ms=1500)}, agents) as plane:
        replies = await plane.client.subscribe("bw.replies.r")
        progress = await plane.client.subscribe("bw.progress.>")
        await plane.publish({"agent": "plain", "job_id": "j1", "prompt": "x"})
        await progress.next_msg(timeout=60)
        await plane.publish({"agent": "plain", "job_id": "j1", "prompt": "y", "reply_to": "bw.replies.r"} | odd)
        refused = json.loads((await replies.next_msg(timeout=60)).data)
        assert refused["error"]["class"] == "IdConflictError"
        assert (await plane.result("j1"))["status"] == "succeeded"


async def test_a_job_that_the_config_allows_no_more_is_the_same_job_still(start_worker: StartWorker) -> None:
    job = {"agent": "plain", "job_id": "j1", "prompt": "x", "model": "sim/gone"}
    async with start_worker({"sim/m": model()}, {"plain": {"model": "sim/m"}}, begin=False) as plane:
        begun = Claim.new("j1")
        await plane.worker.executions.claim(begun, job_digest(Job.model_validate(job), None))
        await plane.worker.executions.release(begun)
        await plane.publish(job)
        plane.begin()
        result = await plane.result("j1")
    assert (result["reason"], result["error"]["class"]) == ("invalid", "InvalidJobError")


async def test_a_jobs_own_short_deadline_says_nothing_of_the_model(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"hang_s": 60}), "sim/big": model()}
    async with start_worker(models, AGENTS) as plane:
        await plane.publish({"agent": "plain", "job_id": "j1", "prompt": "x", "total_timeout_s": 1.5})
        result = await plane.result("j1")
        assert result["reason"] == "timeout"
        assert [a["counts_for_breaker"] for a in result["attempts"]] in ([False], [])


async def test_a_lost_answer_on_the_last_try_is_reported_as_such(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "retry": {"max_attempts": 1}}}
    moment = "2026-11-21T10:00:00.000Z"
    recorded = {
        "attempt_id": "j1:1", "execution_id": "j1", "job_id": "j1", "agent": "writer", "number": 1, "model": "sim/m",
        "provider": "sim", "started_at": moment, "completed_at": moment, "duration_ms": 0, "outcome": "success",
        "cause": "first", "cost": "0.000042000", "cost_basis": "billed",
    }  # fmt: skip
    async with start_worker({"sim/m": model()}, agents, begin=False) as plane:
        await plane.jetstream.publish("bw.attempts.writer.j1.1", json.dumps(recorded).encode(), headers=FIRST)
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})
        subscription = await plane.jetstream.pull_subscribe_bind("worker-writer", "JOBS")
        [delivery] = await subscription.fetch(1, timeout=60)
        await delivery.nak()
        plane.begin()
        result = await plane.result("j1")
        assert (result["status"], result["reason"]) == ("dead_lettered", "worker_lost")
        assert (result["total_cost"], result["wasted_cost"]) == ("0.000042000", "0.000042000")


async def test_a_job_whose_reading_crashes_is_dead_lettered_in_the_end(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "MAX_CRASHES", 2)
    monkeypatch.setattr(parsing, "validate_job", Mock(side_effect=RuntimeError("a bug of ours")))
    async with start_worker({"sim/m": model(), "sim/big": model()}, AGENTS) as plane:
        await plane.publish({"agent": "plain", "job_id": "crashes", "prompt": "x"})
        result = await plane.result("crashes")
        assert (result["reason"], result["error"]["class"]) == ("error", "InternalError")
        assert result["error"]["message"] == "RuntimeError in the worker"
        await until(lambda: _drained(plane), what="an empty JOBS")
        [dead_letter] = await plane.messages("DLQ", "bw.dlq.error.plain", at_least=1)
        assert json.loads(base64.b64decode(dead_letter["payload_base64"]))["job_id"] == "crashes"


async def test_an_impossible_time_of_queueing_or_a_key_as_a_model_reaches_no_record(start_worker: StartWorker) -> None:
    key = "sk-proj-" + "Ab3dEf6hIj9kLm2nOp5q" * 3
    async with start_worker(
        {"sim/m": model()}, AGENTS | {"free": {"model": "sim/m", "allowed_models": ["*"]}}
    ) as plane:
        times = [
            "0001-01-01T00:00:00Z",
            "9999-12-31T23:59:59Z",
            "1969-12-31T00:00:00+00:00",
            "0001-01-01T00:00:00+14:00",
        ]
        for number, time in enumerate(times):
            job = {"agent": "plain", "job_id": f"t{number}", "prompt": "x"}
            await plane.publish(job, **{"Breakwater-Queued-At": time})
            result = await plane.result(f"t{number}")
            assert result["queued_at"][:4] not in ("0001", "9999", "1969"), time
            assert result["duration_ms"] < 600_000
        assert "queued_at_impossible" in plane.log("worker")
        for number, named in enumerate(({"model": f"sim/{key}"}, {"fallback_models": ["sim/m", key]})):
            await plane.publish({"agent": "free", "job_id": f"m{number}", "prompt": "x", **named})
            result = await plane.result(f"m{number}")
            assert result["reason"] == "invalid"
            assert key not in json.dumps(result)
