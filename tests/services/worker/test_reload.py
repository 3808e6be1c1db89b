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
from tests.flow.kit import model
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
