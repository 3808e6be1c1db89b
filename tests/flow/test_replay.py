"""A storm on a whole plane, and its replay from the log under the config that it ran under."""

from __future__ import annotations

from breakwater.config import load_config
from breakwater.kernel.nats.lookup import Lookup
from breakwater.replay.log import read_log
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.identity import UNEXPLAINED, Identity, Subject, identity
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model
from tests.helpers import until
from tests.replay.storms import replayed

TASKS = 6
JOBS = 48


async def test_a_storm_of_tasks_retries_and_caps_is_replayed_as_it_was(start_plane: StartPlane) -> None:
    models = {
        "sim/m": model({"requests": [6, 17], "status": 500}, {"requests": [25, 28], "status": 400}, latency_ms=15),
        "sim/n": model({"requests": [4, 6], "status": 503}, latency_ms=10),
    }
    agent = {
        "model": "sim/m",
        "fallback_models": ["sim/n"],
        "concurrency": 6,
        "max_tokens": 200,
        "retry": {"max_attempts": 2, "base_s": 0.05},
        "breaker": {"consecutive_failures": 3, "cooldown_s": 0.4},
        "guard": {"max_iterations": 4, "same_error": 3},
        "budget": {"daily_usd": "0.0012", "enforcement": "hard", "soft_at_percent": [50]},
    }
    async with start_plane(models, {"writer": agent}) as plane:
        for number in range(JOBS):
            task = {"task_id": f"t{number % TASKS}"} if number % 4 else {}
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x", **task})
        results = [await plane.result(f"j{number}") for number in range(JOBS)]
        policy = policy_of(load_config(plane.directory / "breakwater.yaml"))
        parts: dict[Subject, Identity] = {}

        async def is_as_it_was() -> bool:
            # Records, transitions and thresholds are published a moment after results.
            storm = await read_log(Lookup(lambda: plane.client))
            parts.update(identity(*storm, replayed(storm, policy)[0]))
            del parts["alerts"]  # no alerter ran
            return len(storm[0]) == JOBS and not any(part.unequal[UNEXPLAINED] for part in parts.values())

        try:
            await until(is_as_it_was, timeout_s=10, what="all events")
        except (TimeoutError, AssertionError):
            raise AssertionError({subject: part.examples for subject, part in parts.items()}) from None
    reasons = {result["reason"] for result in results}
    assert {"guard_tripped", None} <= reasons
    assert parts["trips"].equal > 0
    assert parts["transitions"].equal > 0
