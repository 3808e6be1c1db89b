"""Half-open breakers to which no call comes are tried by a job of the plane's own, if the config says so."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, caller_of
from breakwater.breakers.store import Breakers, Saving, shadows_in
from breakwater.health.store import Healths
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.telemetry.metrics import CollectorRegistry
from breakwater.services.breaker.handlers import BreakerHandler
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

PROBE = {"every_s": 3600, "prompt": "Are you there?", "max_tokens": 1}


def agent(**more: Any) -> dict[str, Any]:
    return {"model": "sim/m", "fallback_models": ["sim/n"], "breaker": {"probe": PROBE, "cooldown_s": 60}, **more}


async def wait_for_a_call(plane: WorkerPlane, key: BreakerKey, **more: Any) -> Breakers:
    """Opens a breaker whose cool-down is over."""
    breakers = Breakers(plane.worker.redis)
    await breakers.mark_filled("log")
    [before] = await breakers.load([key])
    opened = Breaker(state="open", open_until_ms=before.now_ms - 1, openings=1, version=1, counts_from=1, reason="why")
    assert await breakers.save([Saving(key, before, replace(opened, **more), None)]) == [True]
    return breakers


async def look(plane: WorkerPlane) -> None:
    """As two breaker services do every ten seconds."""
    worker = plane.worker
    services = [
        BreakerHandler(
            worker.config,
            Breakers(worker.redis),
            shadows_in(worker.redis),
            Healths(worker.redis),
            worker.publisher,
            BreakerMetrics(CollectorRegistry()),
        )
        for _ in range(2)
    ]
    await asyncio.gather(*(service.advance() for service in services))


async def jobs(plane: WorkerPlane) -> list[dict[str, Any]]:
    return await plane.messages("EVENTS", "bw.executions.>")


async def test_exactly_one_process_probes_a_breaker_that_waits_for_a_call_for_the_price_of_a_token(
    start_worker: StartWorker,
) -> None:
    """Recorded, costed and under the agent's settings as any job; a schema for its answers does not matter."""
    schema = {"schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    agents = {"writer": agent(output=schema, retry={"max_attempts": 3})}
    models = {"sim/m": model(), "sim/n": model()}
    async with start_worker(models, agents) as plane:
        # What a sole caller has opened is open for that one.
        key, alone = BreakerKey("writer", "sim/m"), caller_of("app", "acme")
        breakers = await wait_for_a_call(plane, key, alone=alone, alone_name="key app and tenant acme")
        await look(plane)  # now it is reported as half-open
        await look(plane)
        await look(plane)
        [record] = await until(lambda: jobs(plane), what="the record of the probe")
        [attempt] = record["attempts"]
        assert (record["status"], record["agent"], record["chosen_model"]) == ("succeeded", "writer", "sim/m")
        assert (attempt["cause"], attempt["outcome"], attempt["cost_basis"]) == ("probe", "success", "billed")
        assert float(record["total_cost"]) > 0
        assert [message["content"] for message in record["messages"]] == ["Are you there?"]
        [call] = plane.sim.ledger.calls
        assert call.model == "sim/m"
        [closed] = await breakers.load([key])
        assert (closed.breaker.state, closed.breaker.alone) == ("closed", "")
        await look(plane)
        assert len(await jobs(plane)) == 1


async def test_a_probe_that_fails_opens_the_breaker_again_and_leaves_no_dead_letter(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"requests": [1, 9], "status": 500}), "sim/n": model()}
    async with start_worker(models, {"writer": agent()}) as plane:
        key = BreakerKey("writer", "sim/m")
        breakers = await wait_for_a_call(plane, key, alone=caller_of("app", None))
        await look(plane)
        await look(plane)
        [record] = await until(lambda: jobs(plane), what="the record of the probe")
        assert (record["status"], record["reason"], record["attempts_count"]) == ("dead_lettered", "error", 1)
        assert await plane.messages("DLQ", "bw.dlq.>") == []
        [opened] = await breakers.load([key])
        assert (opened.breaker.state, opened.breaker.openings) == ("open", 2)


async def test_a_breaker_is_probed_by_an_agent_that_uses_it_and_only_as_often_as_its_settings_say(
    start_worker: StartWorker,
) -> None:
    shared = {"model": "sim/m", "breaker": {"scope": "provider", "probe": PROBE}}
    agents = {"writer": shared, "off": {"model": "sim/m"}, "other": {**shared}}
    async with start_worker({"sim/m": model()}, agents, begin=False) as plane:
        await wait_for_a_call(plane, BreakerKey("*", "sim/*"))
        # One that has no probe waits for a call.
        await wait_for_a_call(plane, BreakerKey("off", "sim/m"))
        for _ in range(3):
            await look(plane)
        assert await plane.pending_jobs() == 1
        stored = await plane.jetstream.get_last_msg("JOBS", "bw.jobs.other")
        assert json.loads(stored.data or b"") == {
            "agent": "other", "model": "sim/m", "fallback_models": [], "prompt": "Are you there?",
            "params": {"max_tokens": 1}, "retry": {"max_attempts": 1}, "skip_cache": True,
        }  # fmt: skip


async def test_a_model_that_spends_the_token_of_a_probe_on_thinking_is_well(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"requests": [1, 9], "kind": "no_content", "finish_reason": "length"}), "sim/n": model()}
    async with start_worker(models, {"writer": agent()}) as plane:
        headers = {Header.PROBE.value: "1", Header.EXECUTION_ID.value: "e1"}
        job = {"agent": "writer", "prompt": "x", "fallback_models": []}
        await plane.jetstream.publish("bw.jobs.writer", json.dumps(job).encode(), headers=headers)
        [record] = await until(lambda: jobs(plane), what="the record of the probe")
        assert (record["status"], record["finish_reason"]) == ("succeeded", "length")
