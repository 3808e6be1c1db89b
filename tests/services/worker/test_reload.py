"""What a worker's config says of an agent holds from the next job on, when it is replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import yaml

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import Saving
from breakwater.config import LiveConfig, load_config
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.services.worker.config_versions import ConfigVersions, ProviderPool
from tests.flow.kit import PRICE, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

Observed = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Of a result and a record."""

WRITER = {"model": "sim/m", "breaker": "off", "retry": {"max_attempts": 1}}
KEY = BreakerKey("writer", "sim/m")


@dataclass(frozen=True, slots=True)
class Newest:
    """Handles an agent's jobs by the config that holds when they come, in place of one handler."""

    config_versions: ConfigVersions
    agent: str

    async def handle(self, delivery: Delivery) -> None:
        await self.config_versions.handle(self.agent, delivery)


async def isolate_model(plane: WorkerPlane) -> None:
    """Somebody has taken the model away: whoever asks its breaker is refused."""
    breakers = plane.worker.breakers
    [loaded] = await breakers.load([KEY])
    isolated = replace(loaded.breaker, version=1, state="isolated")
    assert await breakers.save([Saving(KEY, loaded, isolated, None)]) == [True]


@pytest.mark.parametrize(
    ("edit", "observed", "before", "after"),
    [
        pytest.param(
            {"agents": {"writer": {**WRITER, "breaker": {"consecutive_failures": 1}}}},
            lambda result, _: result["reason"],
            None,
            "breaker_open",
            id="breaker",
        ),
        pytest.param(
            {"agents": {"writer": {**WRITER, "guard": {"max_iterations": 1}}}},
            lambda result, _: result["reason"],
            None,
            "guard_tripped",
            id="guard",
        ),
        pytest.param(
            {"agents": {"writer": {**WRITER, "model": "sim/down", "retry": {"max_attempts": 3, "base_s": 0.001}}}},
            lambda result, _: len(result["attempts"]),
            1,
            3,
            id="retries",
        ),
        pytest.param(
            {"redaction": {"patterns": [r"ORDER-\d+"], "placeholder": "<gone>"}},
            lambda _, record: record["messages"][0]["content"],
            "Where is ORDER-17?",
            "Where is <gone>?",
            id="redaction",
        ),
    ],
)
async def test_what_is_replaced_holds_from_the_next_job_on(
    start_worker: StartWorker, edit: dict[str, Any], observed: Observed, before: Any, after: Any
) -> None:
    models, pool = {"sim/m": model(), "sim/down": model({"status": 503})}, ProviderPool()
    async with start_worker(models, {"writer": {**WRITER, "allowed_models": ["sim/down"]}}, begin=False) as plane:
        config_versions = ConfigVersions(plane.worker, pool, LiveConfig(plane.worker.config))
        plane.handlers = {"writer": cast(Any, Newest(config_versions, "writer"))}
        plane.begin()
        await isolate_model(plane)

        async def seen(job_id: str) -> Any:
            job = {"agent": "writer", "job_id": job_id, "prompt": "Where is ORDER-17?", "task_id": "t"}
            result = await plane.run(job)
            [record] = await plane.messages("EVENTS", subjects.execution("writer", job_id), at_least=1)
            return observed(result, record)

        assert await seen("first") == before
        path = plane.directory / "breakwater.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **edit}))
        await config_versions.reload(load_config(path))
        assert await seen("second") == after
        await plane.end()
        await pool.close_except(())


PLACES = [{"provider": "sim", "name": "west"}, {"provider": "sim", "name": "east"}]
LISTED = {"m": {"price": PRICE, "deployments": PLACES, "choose": "ordered"}}
HOLD_S = 3


@pytest.mark.parametrize(
    ("knows_earlier", "chain", "called", "problem"),
    [
        pytest.param(True, {"model": "sim/n"}, "m", None, id="it goes on where it began"),
        pytest.param(False, {"model": "sim/n"}, None, "ConfigChangedError", id="its config is lost"),
        pytest.param(False, {"model": "m"}, "m", None, id="its config is lost, and its model is now first"),
        pytest.param(
            False, {"model": "sim/n", "fallback_models": ["sim/x", "m"]}, "m", None, id="and its model is now last"
        ),
    ],
)
async def test_a_job_that_waits_for_a_model_whose_deployments_are_all_removed_meanwhile(
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    knows_earlier: bool,
    chain: dict[str, Any],
    called: str | None,
    problem: str | None,
) -> None:
    monkeypatch.setattr("breakwater.services.worker.attempts.LONG_WAIT_S", 0.5)
    writer = {**WRITER, "model": "sim/down", "fallback_models": ["m"]}
    models = {"sim/down": model({"status": 400}), "west": model(), "east": model(), "m": model(), "sim/n": model()}
    async with start_worker(models, {"writer": writer}, more_models=LISTED, begin=False) as plane:
        began_with = plane.worker.config_version
        config_versions = ConfigVersions(plane.worker, ProviderPool(), LiveConfig(plane.worker.config))
        await config_versions.save()
        plane.handlers = {"writer": cast(Any, Newest(config_versions, "writer"))}
        plane.begin()
        hold = plane.worker.deployments.hold_command
        await plane.worker.redis.run([hold(f"sim/{name}", HOLD_S) for name in ("west", "east")])
        await plane.publish({"agent": "writer", "job_id": "j", "prompt": "x"})

        async def parked() -> bool:
            return (await plane.jetstream.stream_info("PARKED")).state.messages > 0

        await until(parked)
        path = plane.directory / "breakwater.yaml"
        document = yaml.safe_load(path.read_text())
        document["models"] = {**document["models"], "m": {"price": PRICE, "provider": "sim"}}
        document["agents"] = {"writer": {**WRITER, **chain}}
        path.write_text(yaml.safe_dump(document))
        pool = ProviderPool()
        if knows_earlier:
            await config_versions.reload(load_config(path))
        else:
            newest = load_config(path)
            await plane.worker.redis.client.delete(f"bw:configs:{began_with}")
            later = ConfigVersions(plane.worker.under(newest, pool.open(newest)), pool, LiveConfig(newest))
            plane.handlers["writer"] = cast(Any, Newest(later, "writer"))
            await plane.end()
            plane.begin()
        result = await plane.result("j")
        await plane.end()
        await pool.close_except(())
    assert result["chosen_model"] == called
    assert (result["status"], (result["error"] or {}).get("class")) == (
        ("succeeded", None) if problem is None else ("dead_lettered", problem)
    )
    if problem is not None:
        assert "'m'" in result["error"]["message"]
    if knows_earlier:
        assert result["attempts"][-1]["deployment"] in {"sim/west", "sim/east"}


async def test_the_call_of_a_lost_worker_is_recorded_although_its_model_was_removed(start_worker: StartWorker) -> None:
    writer = {**WRITER, "model": "m"}
    async with start_worker({"west": model(), "east": model()}, {"writer": writer}, more_models=LISTED) as plane:
        await plane.run_until("breakwater.services.worker.attempts.record", "lost")
        path = plane.directory / "breakwater.yaml"
        document = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({**document, "agents": {"writer": {**WRITER, "model": "sim/n"}}, "models": {}}))
        newest, pool = load_config(path), ProviderPool()
        later = ConfigVersions(plane.worker.under(newest, pool.open(newest)), pool, LiveConfig(newest))
        plane.handlers["writer"] = cast(Any, Newest(later, "writer"))
        plane.begin()
        result = await plane.result("lost")
        await plane.end()
        await pool.close_except(())
        called = plane.sim.ledger.totals.calls
    assert called == 1
    assert result["error"]["class"] == "ConfigChangedError"
    [attempt] = result["attempts"]
    assert (attempt["outcome"], attempt["deployment"], attempt["cost_basis"]) == (
        "worker_lost",
        "sim/west",
        "estimated",
    )
    assert result["total_cost"] == attempt["cost"] != "0.000000000"
