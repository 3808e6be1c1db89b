"""Long waits, and what may happen to a job while it sleeps."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from breakwater.services.worker import attempts
from tests.calls.providers.kit import answering
from tests.flow.kit import Plane, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker


def _took(result: dict[str, Any]) -> timedelta:
    return datetime.fromisoformat(result["completed_at"]) - datetime.fromisoformat(result["dispatched_at"])


async def _parked(plane: Plane) -> bool:
    return (await plane.jetstream.stream_info("PARKED")).state.messages > 0


async def test_a_second_message_of_a_sleeping_job_neither_wakes_nor_delays_it_and_is_answered(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LONG_WAIT_S", 0.5)
    parked_before = REGISTRY.get_sample_value("breakwater_jobs_parked_total", {"agent": "writer"}) or 0
    models = {"sim/m": model({"requests": [1, 1], "status": 429, "retry_after_s": 2})}
    agents = {"writer": {"model": "sim/m", "total_timeout_s": 40, "breaker": "off"}}
    async with start_worker(models, agents) as plane:
        answers = [await plane.client.subscribe(f"bw.replies.{name}") for name in ("first", "second")]
        job = {"agent": "writer", "job_id": "j1", "prompt": "hello"}
        await plane.publish(job | {"reply_to": "bw.replies.first"})
        await until(lambda: _parked(plane), what="a parked job")
        await plane.publish(job | {"reply_to": "bw.replies.second"})
        result = await plane.result("j1")
        for answer in answers:
            assert b'"succeeded"' in (await answer.next_msg(timeout=60)).data
        assert plane.sim.ledger.totals.calls == 2
    assert result["status"] == "succeeded"
    assert (REGISTRY.get_sample_value("breakwater_jobs_parked_total", {"agent": "writer"}) or 0) > parked_before
    assert timedelta(seconds=2) <= _took(result) < timedelta(seconds=20)


async def test_a_long_wait_that_leaves_no_time_for_a_call_goes_to_the_next_model(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"status": 429, "retry_after_s": 11.9}), "sim/n": model()}
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"], "total_timeout_s": 12, "breaker": "off"}}
    async with start_worker(models, agents) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
    assert (result["status"], result["chosen_model"]) == ("succeeded", "sim/n")
    assert _took(result) < timedelta(seconds=11.9)


async def test_a_key_that_takes_long_to_read_takes_no_longer_than_the_job_has(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    script, read = tmp_path / "key.sh", tmp_path / "read"
    script.write_text(f"#!/bin/sh\nif [ -e {read} ]; then sleep 4; fi\ntouch {read}\necho key-aaaaaaaa\n")
    script.chmod(0o755)
    providers = {"k": {"base_url": "http://127.0.0.1:{sim_port}/v1", "api_key": {"command": [str(script)]}}}
    agents = {"writer": {"model": "k/m", "total_timeout_s": 1, "breaker": "off"}}
    async with start_worker({"k/m": model({"status": 401})}, agents, more_providers=providers) as plane:
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        result = await plane.result("j1")
    assert result["status"] == "dead_lettered"
    assert _took(result) < timedelta(seconds=3)


async def test_an_answer_that_can_not_be_stored_is_an_error_and_called_for_once(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "large_agents.py").write_text("async def large(request):\n    return 'x' * 5_000_000\n")
    providers = {"large": {"kind": "python", "callable": "large_agents:large", "cost_per_call_usd": 1}}
    async with start_worker(
        {"sim/m": model()},
        {"large": {"provider": "large"}},
        more_providers=providers,
    ) as plane:
        await plane.publish({"agent": "large", "job_id": "j1", "input": 1})
        result = await plane.result("j1")
    assert (result["status"], result["attempts_count"]) == ("dead_lettered", 1)
    assert (result["error"]["class"], result["total_cost"]) == ("AnswerTooLargeError", "1.000000000")


async def test_another_model_is_called_after_an_answer_that_can_not_be_stored(start_worker: StartWorker) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"choices": "' + b"x" * 5_000_000 + b'"}', content_type="application/json")

    async with answering(answer) as origin:
        large = {"base_url": f"{origin}/v1"}
        agents = {"writer": {"model": "large/m", "fallback_models": ["sim/m"]}}
        async with start_worker({"sim/m": model()}, agents, more_providers={"large": large}) as plane:
            result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
    assert result["status"] == "succeeded"
    assert [(one["model"], one["error"] and one["error"]["class"]) for one in result["attempts"]] == [
        ("large/m", "AnswerTooLargeError"),
        ("sim/m", None),
    ]
