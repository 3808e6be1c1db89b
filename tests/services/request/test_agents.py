"""How agents fare, over HTTP."""

import re

from breakwater.breakers.rules import Breaker
from breakwater.health.store import EndedCall, Healths
from breakwater.jobs.contract.execution import Result
from breakwater.jobs.contract.submission import AcceptedJob, UndecidedJob
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time, time_from_ms
from services.request.openapi import document
from tests.services.request.conftest import HttpApi, put_breaker, redis_ms


async def test_every_agent_is_reported_with_its_health_in_a_bare_array(governed: HttpApi, redis: Redis) -> None:
    now = await redis_ms(redis)
    await put_breaker(redis, "reader", "m", Breaker(state="open", open_until_ms=now + 60_000, version=1))
    calls = [EndedCall(1, now - 2000, False), EndedCall(2, now - 1000, True)]
    await Healths(redis).note([Healths.note_call("writer", {"m": calls})])
    answer = await governed.ask("GET", "/api/v1/agents")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    by_id = {agent["agent_id"]: agent for agent in answer.json}
    assert list(by_id) == ["writer", "reader", "patient", "unguarded", "by-model", "by-provider", "never"]
    until = f"breaker open until {time_from_ms(now + 60_000):%H:%M:%S} UTC"
    assert {name: (agent["health"], agent["health_reason"]) for name, agent in by_id.items()} == {
        **dict.fromkeys(by_id, ("healthy", "no calls yet")),
        "writer": ("degraded", "m: the last call failed"),
        "reader": ("unhealthy", until),
        "never": ("unhealthy", "no call fits under a hard cap"),
    }
    assert by_id["reader"] == {
        "agent_id": "reader",
        "health": "unhealthy",
        "health_reason": until,
        "consecutive_failures": 0,
        "last_failure_at": None,
        "last_success_at": None,
        "circuit_open_until": format_time(time_from_ms(now + 60_000)),
        "models": [
            {
                "model": "m",
                "provider": "local",
                "health": "unhealthy",
                "health_reason": until,
                "breaker": "open",
                "consecutive_failures": 0,
                "last_failure_at": None,
                "last_success_at": None,
                "circuit_open_until": format_time(time_from_ms(now + 60_000)),
                "held_until": None,
            }
        ],
    }
    assert by_id["writer"]["consecutive_failures"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", by_id["writer"]["last_failure_at"])
    assert by_id["writer"]["last_success_at"] == format_time(time_from_ms(now - 2000))


async def test_other_methods_are_refused_by_name(governed: HttpApi) -> None:
    for method, path in [
        ("POST", "agents"),
        ("GET", "breakers/isolate"),
        ("DELETE", "breakers"),
        ("PUT", "guards"),
        *(("PUT", path) for path in ("budgets", "budgets/reconciliation", "budgets/raise")),
    ]:
        answer = await governed.ask(method, f"/api/v1/{path}")
        assert (answer.status, answer.code) == (405, "method_not_allowed")


async def test_the_document_reports_every_status_and_its_examples_are_what_they_are_examples_of() -> None:
    paths, schemas = document()["paths"], document()["components"]["schemas"]
    for path in ("agents", "breakers", "guards"):
        assert set(paths[f"/api/v1/{path}"]["get"]["responses"]) == {"200", "401", "403", "503", "default"}
    for path in ("breakers/isolate", "breakers/reset", "guards/reset"):
        responses = paths[f"/api/v1/{path}"]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "404", "408", "413", "415", "422", "503", "default"}

    def fields(name: str) -> set[str]:
        return set(schemas[name]["properties"])

    isolate = paths["/api/v1/breakers/isolate"]["post"]
    answers = isolate["responses"]["200"]["content"]["application/json"]["examples"]
    assert set(answers["changed"]["value"]) <= fields("BreakerTransition")
    assert set(answers["unchanged"]["value"]) == fields("UnchangedBreaker")
    for path, name in [("breakers/isolate", "BreakerRequest"), ("guards/reset", "GuardRequest")]:
        content = paths[f"/api/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert all(set(example["value"]) <= fields(name) for example in content["examples"].values())
    for path, method, status, model in (
        ("jobs", "post", "200", Result),
        ("jobs", "post", "202", AcceptedJob),
        ("jobs/{job_id}", "get", "200", Result),
        ("jobs/{job_id}", "get", "202", UndecidedJob),
    ):
        response = paths[f"/api/v1/{path}"][method]["responses"][status]
        [job] = response["content"]["application/json"]["examples"].values()
        model.model_validate(job["value"])
    [agent] = paths["/api/v1/agents"]["get"]["responses"]["200"]["content"]["application/json"]["examples"].values()
    assert set(agent["value"][0]) == fields("AgentHealth")
    assert set(agent["value"][0]["models"][0]) == fields("ModelHealth")
