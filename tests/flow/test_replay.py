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
OWN_RULES = (
    {"retry": {"max_attempts": 1}},
    {"guard": {"max_iterations": 2}, "task_id": "own"},
    {"breaker": {"consecutive_failures": 1}, "task_id": "careful"},
)
"""What some jobs bring of their own: no second try, fewer jobs of a task, a stricter breaker."""
OF_JOBS = {"deployment_failing", "agent_anomaly", "job_dead_lettered"}
"""Alerts of the ends of jobs, which come last."""


async def test_a_storm_of_tasks_retries_and_caps_is_replayed_as_it_was(start_plane: StartPlane) -> None:
    models = {
        "sim/m": model({"requests": [6, 17], "status": 500}, {"requests": [25, 28], "status": 400}, latency_ms=15),
        "sim/n": model({"requests": [4, 6], "status": 503}, latency_ms=10),
        "sim/x": model({"requests": [1, 99], "status": 401}),
        "sim/y": model({"requests": [4, 9], "status": 500}),
        "sim/w": model({"requests": [1, 99], "status": 500}),
        "sim/z": model({"requests": [1, 99], "status": 500}),
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
    # Without breakers, whose incidents would say why their jobs fail.
    once = {"breaker": False, "retry": {"max_attempts": 1}}
    lenient = {
        "retry": {"max_attempts": 2, "base_s": 0.05},
        "breaker": {"consecutive_failures": 99, "same_error": "off"},
    }
    owner = {"model": "sim/w", "guard": {"max_iterations": 5, "same_error": "off"}, **lenient}
    others = {
        "scout": {"model": "sim/x", "fallback_models": ["sim/y"], **once},
        "lone": {"model": "sim/z", **once},
    }
    alerts = {"anomalies": {"execution_cost_usd": "0.00004"}}
    services = ("worker", "breaker", "budget", "alerter")
    async with start_plane(
        models, {"writer": agent, "owner": owner, **others}, services=services, alerts=alerts
    ) as plane:
        for number in range(JOBS):
            task = {"task_id": f"t{number % TASKS}"} if number % 4 else {}
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x", **task})
            for name in others if number % 6 == 0 else ():
                await plane.publish({"agent": name, "job_id": f"{name}{number}", "prompt": "x"})
        for number in range(JOBS // 4):
            own = OWN_RULES[number % len(OWN_RULES)]
            await plane.publish({"agent": "owner", "job_id": f"own{number}", "prompt": "x", **own})
        results = [await plane.result(f"j{number}") for number in range(JOBS)]
        own_results = [await plane.result(f"own{number}") for number in range(JOBS // 4)]
        for number in range(0, JOBS, 6):
            for name in others:
                await plane.result(f"{name}{number}")
        policy = policy_of(load_config(plane.directory / "breakwater.yaml"))
        parts: dict[Subject, Identity] = {}
        alerted: set[str] = set()

        async def is_as_it_was() -> bool:
            # Records, transitions and thresholds are published a moment after results.
            jobs, changes = storm = await read_log(Lookup(lambda: plane.client))
            parts.update(identity(*storm, replayed(storm, policy)[0]))
            alerted.update(alert.event for alert in changes.alerts)
            is_whole = len(jobs) == JOBS * 19 // 12 and alerted >= OF_JOBS
            return is_whole and not any(part.unequal[UNEXPLAINED] for part in parts.values())

        try:
            await until(is_as_it_was, timeout_s=10, what="all events")
        except (TimeoutError, AssertionError):
            raise AssertionError(alerted, {subject: part.examples for subject, part in parts.items()}) from None
    assert [result["own_rules"] for result in own_results[:3]] == [["retry"], ["guard"], ["breaker"]]
    refusals = {attempt["refused_reason"] for result in own_results for attempt in result["attempts"]}
    assert refusals == {None, "guard_tripped", "breaker_open"}
    assert not any(result["own_rules"] for result in results)
    reasons = {result["reason"] for result in results}
    assert {"guard_tripped", None} <= reasons
    # Of jobs that share a task, Redis' clock tells the order.
    assert parts["trips"].equal > 0
    assert not parts["trips"].unequal
    times = {result["task_id"] is not None: result["task_counted_at"] is not None for result in results}
    assert times == {True: True, False: False}
    asked = [attempt["task_asked_at"] for result in results for attempt in result["attempts"] if result["task_id"]]
    assert None not in asked
    assert parts["transitions"].equal > 0
