"""A model on several deployments: each has its own breaker, hold and limits, and one that fails is made up for."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest
import redis.asyncio as aioredis

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.calls.assignment import Checkpoint
from breakwater.calls.gate import AskAgain
from breakwater.config import Config
from breakwater.jobs.rules.ids import key_of
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Header, encode_token
from breakwater.services.worker.admission import admit
from breakwater.services.worker.balancer import Balancer
from breakwater.services.worker.context import utc_now
from tests.flow.kit import PRICE, model, seconds_between
from tests.helpers import until
from tests.services.worker.assignments import assignment_of, worker_without_servers
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane
from tests.tables import each_row

AGENT = {"model": "m", "retry": {"max_attempts": 3, "base_s": 0.3}, "total_timeout_s": 60}
WEST, EAST, SPARE = ({"provider": "sim", "name": name} for name in ("west", "east", "spare"))
DOWN = {"status": 500}


def on(*deployments: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The config of a model on some deployments, in their order."""
    return {"m": {"price": PRICE, "deployments": list(deployments), "choose": "ordered", **settings}}


def places(result: dict[str, Any]) -> list[str]:
    """Where a job was called, and why."""
    return [f"{attempt['cause']} {attempt['deployment']} {attempt['outcome']}" for attempt in result["attempts"]]


def calls(plane: WorkerPlane) -> dict[str, int]:
    return {name: totals.calls for name, totals in plane.sim.ledger.by_model.items()}


async def run(plane: WorkerPlane, job_id: str, **job: Any) -> dict[str, Any]:
    return await plane.run({"agent": "writer", "job_id": job_id, "prompt": "x", **job})


def forget(plane: WorkerPlane) -> None:
    """Forgets what the worker has seen of deployments: another one has seen nothing, and the gates must tell it."""
    Balancer.__init__(plane.worker.balancer, time.monotonic, utc_now)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The deployments that were asked for an admission, by their names."""
    names = list[str]()

    async def noted(worker: Any, admission: Any, gates: Any) -> Any:
        names.append(admission.target.name)
        return await admit(worker, admission, gates)

    monkeypatch.setattr("breakwater.services.worker.attempts.admit", noted)
    return names


async def test_a_failed_call_goes_to_another_deployment_at_once_and_an_open_breaker_is_one_deployments(
    start_worker: StartWorker,
) -> None:
    models = {"west": model(DOWN), "east": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        await plane.worker.breakers.mark_filled("log")
        results = [await run(plane, f"j{number}") for number in range(6)]
        assert calls(plane) == {"west": 3, "east": 6}
        keys = [BreakerKey("writer", f"sim/{name}") for name in ("west", "east")]
        states = [loaded.breaker.state for loaded in await plane.worker.breakers.load(keys)]
    assert states == ["open", "closed"]
    assert {result["status"] for result in results} == {"succeeded"}
    assert places(results[0]) == ["first sim/west error", "redeployment sim/east success"]
    failed, answered = results[0]["attempts"]
    assert (failed["model"], failed["provider"], failed["provider_key"], answered["backoff_ms"]) == (
        "m",
        "sim",
        None,
        0,
    )
    assert seconds_between(failed["completed_at"], answered["started_at"]) < 0.25, "it does not wait"
    assert results[0]["wasted_by_cause"].keys() <= {"redeployment"}
    # The open breaker is asked once, and remembered.
    assert places(results[4]) == places(results[5]) == ["first sim/east success"]


async def test_a_rate_limit_holds_a_key_and_the_others_take_its_load_in_the_next_call(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEY_A", "KEY_B", "KEY_C"):
        monkeypatch.setenv(name, f"sk-{name.lower()}")
    limited = {"status": 429, "retry_after_s": 20, "key": "sk-key_a"}
    keys = {"provider": "sim", "name": "west", "key": [{"env": "KEY_A"}, {"env": "KEY_B"}, {"env": "KEY_C"}]}
    async with start_worker({"west": model(limited)}, {"writer": AGENT}, more_models=on(keys)) as plane:
        results = [await run(plane, f"j{number}") for number in range(4)]
        held = await plane.worker.deployments.held_until([f"sim/west#KEY_{key}" for key in "ABC"])
        forget(plane)
        results.append(await run(plane, "of-another"))
        assert calls(plane) == {"west": 6}
    assert list(held) == ["sim/west#KEY_A"]
    assert {result["status"] for result in results} == {"succeeded"}
    assert places(results[0]) == ["first sim/west#KEY_A error", "redeployment sim/west#KEY_B success"]
    assert [attempt["provider_key"] for attempt in results[0]["attempts"]] == ["KEY_A", "KEY_B"]
    assert all(places(result) == ["first sim/west#KEY_B success"] for result in results[1:])
    assert all(attempt["backoff_ms"] == 0 for result in results for attempt in result["attempts"])
    assert not any("sk-key" in str(result) for result in results)


async def test_a_refused_key_is_made_up_for_and_left_alone_for_some_seconds(start_worker: StartWorker) -> None:
    models = {"west": model({"status": 401}), "east": model({"status": 404}), "spare": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST, SPARE)) as plane:
        results = [await run(plane, f"j{number}") for number in range(3)]
        assert calls(plane) == {"west": 1, "east": 1, "spare": 3}
    assert [result["status"] for result in results] == ["succeeded"] * 3


async def test_a_key_that_was_refused_is_spared_by_all_workers_and_called_if_there_is_no_other(
    start_worker: StartWorker, asked: list[str]
) -> None:
    models = {"west": model({"status": 401, "requests": [1, 1]}), "east": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        assert places(await run(plane, "seen")) == ["first sim/west error", "redeployment sim/east success"]
        forget(plane)
        assert places(await run(plane, "of-another")) == ["first sim/east success"]
        assert places(await run(plane, "remembered")) == ["first sim/east success"]
        assert asked == ["west", "east", "west", "east", "east"]
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/east", 30)])
        forget(plane)
        # With no other to call, it is called all the same.
        asked.clear()
        assert places(await run(plane, "alone")) == ["first sim/west success"]
        assert places(await run(plane, "again")) == ["first sim/west success"]
        assert asked == ["west", "east", "west", "west"]
        assert await plane.worker.deployments.held_until(["sim/west"]) == {}


async def test_a_refused_request_leaves_the_other_deployments_to_other_requests(start_worker: StartWorker) -> None:
    refused = model({"status": 403, "requests": [1, 1]})
    models = dict.fromkeys(("west", "east", "spare"), refused)
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST, SPARE)) as plane:
        odd = await run(plane, "odd")
        forget(plane)
        assert places(await run(plane, "of-another")) == ["first sim/east success"]
        forget(plane)
        assert places(await run(plane, "again")) == ["first sim/east success"]
    # No deployment answers it, so it is the request's fault, as a 403 for its content or for what it refers to.
    assert places(odd) == [
        "first sim/west error",
        "redeployment sim/east error",
        "redeployment sim/spare error",
    ]


@each_row(("deployments", "first"), [((WEST, EAST), "asks it"), ((EAST, WEST), "remembers its refusal")])
async def test_a_job_whose_key_is_refused_waits_for_a_deployment_that_is_held(
    start_worker: StartWorker, deployments: tuple[dict[str, Any], ...], first: str
) -> None:
    async with start_worker(
        {"west": model({"status": 401}), "east": model()}, {"writer": AGENT}, more_models=on(*deployments)
    ) as plane:
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/east", 1)])
        result = await run(plane, "j")
        assert calls(plane) == {"west": 1, "east": 1}, first
    assert places(result) == ["first sim/west error", "redeployment sim/east success"]


async def test_a_spared_deployment_is_called_while_the_others_are_held_for_less_time(
    start_worker: StartWorker,
) -> None:
    models = {"west": model({"status": 401, "requests": [1, 1]}), "east": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        await run(plane, "refused")
        forget(plane)
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/east", 2)])
        result = await run(plane, "j")
    assert places(result) == ["first sim/west success"]
    assert result["attempts"][0]["backoff_ms"] == 0


async def test_a_limit_that_is_used_up_is_spared_by_all_workers_until_some_of_it_is_there_again(
    start_worker: StartWorker, asked: list[str]
) -> None:
    left = {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "9s",
    }
    models = {"west": {**model(), "headers": left}, "east": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        await run(plane, "seen")
        forget(plane)
        assert places(await run(plane, "of-another")) == ["first sim/east success"]
        assert asked == ["west", "west", "east"]
        # A tenth of it comes back in a tenth of the time.
        await asyncio.sleep(1)
        forget(plane)
        assert places(await run(plane, "later")) == ["first sim/west success"]


async def test_the_attempts_are_the_models_wherever_they_are_made_and_a_fallback_comes_after(
    start_worker: StartWorker,
) -> None:
    names = ("west", "east", "spare", "north")
    models = {**{name: model(DOWN) for name in names}, "n": model()}
    agents = {"writer": {**AGENT, "fallback_models": ["sim/n"]}}
    listed = on(*({"provider": "sim", "name": name} for name in names))
    async with start_worker(models, agents, more_models=listed) as plane:
        result = await run(plane, "j")
        assert calls(plane) == {"west": 1, "east": 1, "spare": 1, "n": 1}
    causes = [attempt["cause"] for attempt in result["attempts"]]
    assert causes == ["first", "redeployment", "redeployment", "fallback"]
    assert result["chosen_model"] == "sim/n"


async def test_rate_limits_of_all_deployments_use_up_the_tries_of_the_model(start_worker: StartWorker) -> None:
    limited = model({"status": 429})
    agents = {"writer": {**AGENT, "fallback_models": ["sim/n"]}}
    models = {"west": limited, "east": limited, "n": model()}
    async with start_worker(models, agents, more_models=on(WEST, EAST)) as plane:
        result = await run(plane, "fallback", total_timeout_s=20)
        alone = await run(plane, "alone", model="m", fallback_models=[], total_timeout_s=20)
    # A call costs no try if it fails on a deployment that the job had not called yet.
    tries = ["first", "redeployment", "retry", "retry"]
    assert [attempt["cause"] for attempt in result["attempts"]] == [*tries, "fallback"]
    assert [attempt["cause"] for attempt in alone["attempts"]] == tries
    assert alone["reason"] == "error"


async def test_with_no_other_deployment_a_call_is_retried_after_its_delay(start_worker: StartWorker) -> None:
    models = {"west": model({**DOWN, "requests": [1, 1]}), "east": model({**DOWN, "requests": [1, 1]})}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        result = await run(plane, "j")
    assert [place.rpartition(" ")[2] for place in places(result)] == ["error", "error", "success"]
    assert [attempt["cause"] for attempt in result["attempts"]][:2] == ["first", "redeployment"]
    assert [attempt["backoff_ms"] > 0 for attempt in result["attempts"]] == [False, False, True]


async def test_a_call_is_retried_after_its_delay_if_the_gates_are_asked_twice_for_the_others(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    async def ask_again_once(worker: Any, admission: Any, gates: Any) -> Any:
        asked.append(admission.target.name)
        return AskAgain() if asked == ["west", "east"] else await admit(worker, admission, gates)

    monkeypatch.setattr("breakwater.services.worker.attempts.admit", ask_again_once)
    models = {"west": model({**DOWN, "requests": [1, 1]}), "east": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/east", 30)])
        result = await run(plane, "j")
    assert places(result) == ["first sim/west error", "retry sim/west success"]
    assert result["attempts"][1]["backoff_ms"] >= 300


async def test_a_model_is_refused_only_when_all_its_deployments_are(start_worker: StartWorker) -> None:
    async with start_worker({"west": model(), "east": model()}, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        hold = plane.worker.deployments.hold_command
        await plane.worker.redis.run([hold("sim/west", 30)])
        assert places(await run(plane, "one")) == ["first sim/east success"]
        await plane.worker.redis.run([hold("sim/east", 1.5)])
        waited = await run(plane, "both")
        assert calls(plane) == {"east": 2}
    # It waits for the one that is free first.
    assert places(waited) == ["first sim/east success"]
    assert 1000 <= waited["attempts"][0]["backoff_ms"] < 10_000


async def test_a_call_that_does_not_fit_the_limits_of_a_deployment_goes_to_another(start_worker: StartWorker) -> None:
    listed = on({**WEST, "limits": {"requests_per_minute": 2}}, EAST, {**SPARE, "role": "overflow"})
    models = {"west": model(), "east": model(), "spare": model()}
    async with start_worker(models, {"writer": AGENT}, more_models=listed) as plane:
        results = [await run(plane, f"j{number}") for number in range(5)]
        assert calls(plane) == {"west": 2, "east": 3}
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/east", 30)])
        over = await run(plane, "over")
    assert all(len(result["attempts"]) == 1 for result in results)
    assert places(over) == ["first sim/spare success"]


async def test_what_a_provider_says_is_left_moves_calls_before_it_refuses_any(start_worker: StartWorker) -> None:
    left = {"x-ratelimit-limit-requests": "100", "x-ratelimit-remaining-requests": "3"}
    models = {"west": {**model(), "headers": left}, "east": model()}
    listed = on(WEST, EAST, choose="headroom", affinity="none")
    async with start_worker(models, {"writer": AGENT}, more_models=listed) as plane:
        for number in range(20):
            await run(plane, f"j{number}")
        # It is called until it says how little is left.
        assert calls(plane).get("west", 0) <= 1


def test_calls_of_an_earlier_period_use_nothing_of_a_limit_of_which_no_answer_tells_any_more() -> None:
    listed = [{"provider": "p", "name": "west"}, {"provider": "p", "name": "east", "role": "overflow"}]
    config = Config.model_validate(
        {
            "providers": {"p": {"base_url": "http://127.0.0.1:1"}},
            "models": {"m": {"deployments": listed, "choose": "ordered", "affinity": "none"}},
            "agents": {"a": {"model": "m"}},
        }
    )
    worker = worker_without_servers(config)
    job = assignment_of(worker, {"agent": "a", "prompt": "x"})
    west, east = worker.targets.all_of("a", "m")
    policy = worker.targets.policy_of("a", "m")
    progress = Checkpoint(dispatched_at=utc_now(), deadline=utc_now())
    now = [0.0]
    balancer = Balancer(lambda: now[0], utc_now)

    def first(calls_a_second: int) -> str:
        for _ in range(630 * calls_a_second):
            now[0] += 1 / calls_a_second
            balancer.note_call(job, west, 10, policy)
        return balancer.order_for(job, progress, [west, east], policy, 10)[0].name

    # A refusal states what is left, and the answers after it don't, as of some servers.
    limit = {"x-ratelimit-limit-requests": "100", "x-ratelimit-remaining-requests": "0"}
    balancer.hear(west.deployment, {**limit, "x-ratelimit-reset-requests": "60s"})
    assert first(1) == "west", "60 a minute are within the limit"
    now[0] += 60
    assert first(4) == "east", "240 are not"


async def test_what_is_left_of_a_deployments_own_limits_moves_calls_before_they_are_refused(
    start_worker: StartWorker, asked: list[str]
) -> None:
    limited = {**WEST, "limits": {"requests_per_minute": 20}}
    listed = on(limited, EAST, choose="headroom", affinity="none")
    async with start_worker({"west": model(), "east": model()}, {"writer": AGENT}, more_models=listed) as plane:
        for number in range(50):
            await run(plane, f"j{number}")
        assert len(asked) == 50, "each call was asked for once"
        assert 15 <= calls(plane)["west"] <= 19
        # What other workers use is in the answer to the next admission.
        forget(plane)
        asked.clear()
        for number in range(20):
            await run(plane, f"of-another-{number}")
        assert asked.count("west") <= 4


async def test_a_call_keeps_its_place_while_it_waits_for_a_limit_of_all_deployments(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "rate_limit": {"concurrent_calls": 1}}}
    models = {"west": model({"requests": [1, 1], "hang_s": 2}), "east": model()}
    async with start_worker(models, agents, more_models=on(WEST, EAST)) as plane:
        for name in ("first", "second"):
            await plane.publish({"agent": "writer", "job_id": name, "prompt": "x"})
        async with aioredis.from_url(plane.environment["BREAKWATER_REDIS_URL"], decode_responses=True) as redis:

            async def waits() -> bool:
                return "bw:limits:queue:" in "".join(await redis.keys())

            await until(waits, "a job that waits")
            still = [await waits() for _ in range(100)]
        assert all(still), "whoever comes later would go first"
        assert (await plane.result("second"))["status"] == "succeeded"


async def test_the_calls_of_a_task_stay_on_one_deployment_and_tasks_are_spread(start_worker: StartWorker) -> None:
    names = ("west", "east", "spare")
    listed = on(WEST, EAST, SPARE, choose="weighted", affinity="session")
    async with start_worker({name: model() for name in names}, {"writer": AGENT}, more_models=listed) as plane:
        results = {
            (task, number): await run(plane, f"{task}-{number}", task_id=f"t{task}")
            for task in range(8)
            for number in range(3)
        }
    used = {task: {results[task, number]["attempts"][0]["deployment"] for number in range(3)} for task in range(8)}
    assert all(len(deployments) == 1 for deployments in used.values())
    assert len(set.union(*used.values())) > 1


async def test_calls_stay_in_the_region_of_their_agent(start_worker: StartWorker) -> None:
    listed = on({**WEST, "region": "us-east"}, {**EAST, "region": "eu-west-1"})
    agents = {"writer": {**AGENT, "residency": "eu", "allowed_models": ["sim/n"]}}
    models = {"west": model(), "east": model(DOWN), "n": model()}
    async with start_worker(models, agents, more_models=listed) as plane:
        result = await run(plane, "j")
        elsewhere = await run(plane, "n", model="sim/n")
        assert calls(plane) == {"east": 3}
    assert (result["status"], {attempt["deployment"] for attempt in result["attempts"]}) == (
        "dead_lettered",
        {"sim/east"},
    )
    assert elsewhere["error"]["class"] == "ResidencyError"
    assert "'eu'" in elsewhere["error"]["message"]


async def test_calls_stay_in_the_region_of_the_key_that_sent_them(start_worker: StartWorker) -> None:
    listed = on({**WEST, "region": "us-east"}, {**EAST, "region": "eu-west-1"})
    async with start_worker({"west": model(), "east": model()}, {"writer": AGENT}, more_models=listed) as plane:
        for region, place in (("eu", "east"), ("us", "west"), ("asia", None)):
            job = {"agent": "writer", "job_id": region, "prompt": "x"}
            await plane.publish(job, **{Header.RESIDENCY.value: region})
            result = await plane.result(region)
            if place is None:
                assert result["error"]["class"] == "ResidencyError"
            else:
                assert places(result) == [f"first sim/{place} success"]


async def test_calls_of_jobs_over_nats_stay_in_the_region_of_their_agent_and_of_their_program(
    start_worker: StartWorker,
) -> None:
    listed = on({**WEST, "region": "us-east"}, {**EAST, "region": "eu-west-1"})
    agents = {"writer": AGENT, "local": {**AGENT, "residency": "us"}}
    programs = {
        "in-eu": {"agents": ["writer", "local"], "residency": "eu"},
        "anywhere": {"agents": ["writer", "local"]},
    }
    models = {"west": model(), "east": model()}
    async with start_worker(models, agents, more_models=listed, programs=programs) as plane:
        for user, agent, place in (
            ("program-in-eu", "writer", "east"),
            ("program-in-eu", "local", None),
            ("program-anywhere", "local", "west"),
            ("client", "local", "west"),
        ):
            job = {"agent": agent, "job_id": f"{agent}-{user}", "prompt": "x"}
            # What a program says of its own region is not believed.
            claimed = {Header.RESIDENCY.value: "us"}
            subject = subjects.job_by(agent, user)
            await plane.jetstream.publish(subject, json.dumps(job).encode(), headers=claimed)
            result = await plane.result(key_of(None if user == "client" else user, job["job_id"]))
            if place is None:
                assert result["error"]["class"] == "ResidencyError"
                assert "'us' and 'eu'" in result["error"]["message"]
            else:
                assert places(result) == [f"first sim/{place} success"]
        assert calls(plane) == {"east": 1, "west": 2}


async def test_a_stream_whose_key_expires_in_the_middle_continues_elsewhere(start_worker: StartWorker) -> None:
    expired = {
        "stream": "error",
        "after_chunks": 1,
        "error": {"type": "authentication_error", "code": "expired_api_key", "message": "The API key has expired."},
    }
    models = {"west": model(expired), "east": model()}
    agents = {"writer": {**AGENT, "on_stream_break": "continue"}}
    async with start_worker(models, agents, more_models=on(WEST, EAST)) as plane:
        result = await run(plane, "j", stream=True)
    assert result["status"] == "succeeded"
    assert places(result) == ["first sim/west error", "redeployment sim/east success"]


async def test_each_deployment_has_its_price_and_a_dry_run_names_them_all(start_worker: StartWorker) -> None:
    dear = {"input_usd_per_mtok": 50, "output_usd_per_mtok": 50}
    listed = on(WEST, {**EAST, "price": dear})
    async with start_worker({"west": model(), "east": model()}, {"writer": AGENT}, more_models=listed) as plane:
        planned = (await run(plane, "dry", dry_run=True))["output"]["models"]
        cheap = await run(plane, "cheap")
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/west", 30)])
        costly = await run(plane, "costly")
    assert [one["deployment"] for one in planned] == ["sim/west", "sim/east"]
    assert float(planned[1]["worst_case_cost"]) > float(planned[0]["worst_case_cost"])
    assert float(costly["total_cost"]) > float(cheap["total_cost"])


async def test_a_probe_goes_to_the_deployment_that_it_is_to_try(start_worker: StartWorker) -> None:
    async with start_worker({"west": model(), "east": model()}, {"writer": AGENT}, more_models=on(WEST, EAST)) as plane:
        job = {"agent": "writer", "job_id": "probe", "prompt": "ping", "model": "m"}
        await plane.publish(job, **{Header.PROBE.value: encode_token("sim/east")})
        result = await plane.result("probe")
    assert places(result) == ["first sim/east success"]


async def test_the_call_of_a_lost_worker_is_recorded_where_it_was_made(start_worker: StartWorker) -> None:
    listed = on(WEST, {**EAST, "weight": 5}, choose="weighted")
    async with start_worker({"west": model(), "east": model()}, {"writer": AGENT}, more_models=listed) as plane:
        await plane.run_until("breakwater.services.worker.attempts.record", "lost")
        plane.begin()
        result = await plane.result("lost")
    assert result["status"] == "succeeded"
    assert result["attempts"][0]["outcome"] == "worker_lost"
    recorded = Counter(str(attempt["deployment"]).removeprefix("sim/") for attempt in result["attempts"])
    assert recorded == calls(plane)
