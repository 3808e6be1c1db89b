"""People who sign in with OpenID Connect: what each role may do, under which name, and what ends it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
import pytest_asyncio
import yaml
from yarl import URL

from breakwater.config import parse_config
from breakwater.contracts.api import Role
from breakwater.embedded.ports import free_port
from breakwater.policy.openid_flow import SignInFlow
from breakwater.state.connection import Redis
from services.request.openapi import document as openapi
from tests.openid_provider import CLIENT, SECRET, RunningProvider, running_provider
from tests.services.request.conftest import ALERTING, LINK_SECRET, Answer, HttpApi, StartApi, new_id, running

GROUPS: Mapping[str, list[str]] = {
    "vera": ["staff"],
    "otto": ["staff", "sre"],
    "anna": ["finance"],
    "ada": ["platform"],
    "both": ["sre", "finance"],
    "nobody": ["other"],
}
ROLES: Mapping[Role, list[str]] = {
    "viewer": ["staff"],
    "operator": ["sre"],
    "approver": ["finance"],
    "admin": ["platform"],
}
ALL = {"viewer", "operator", "approver", "admin"}
OPERATE, APPROVE, ADMIN = {"operator", "admin"}, {"operator", "approver", "admin"}, {"admin"}

RIGHTS: Mapping[str, set[str]] = {
    **dict.fromkeys(("sign_in", "show_key", "metrics", "list_models", "show_model"), ALL),
    **dict.fromkeys(("follow_job", "follow_events"), ALL),
    **dict.fromkeys(("list_executions", "show_execution", "list_agents", "list_breakers", "list_stopped_tasks"), ALL),
    **dict.fromkeys(("list_budgets", "reconcile_budgets", "show_costs", "export_costs", "list_queues"), ALL),
    **dict.fromkeys(("list_plans", "show_plan", "list_incidents", "show_incident", "list_undelivered_alerts"), ALL),
    **dict.fromkeys(("list_dead_letters", "show_dead_letter"), ALL),
    **dict.fromkeys(("acknowledge_incident", "resolve_incident", "reset_task", "raise_cap"), APPROVE),
    **dict.fromkeys(("isolate_breaker", "reset_breaker", "test_channel", "cancel_job"), OPERATE),
    **dict.fromkeys(("replay_alerts", "replay_dead_letters"), OPERATE),
    # What a model has answered is not redacted there.
    **dict.fromkeys(("submit_job", "submit_plan", "show_job", "create_chat_completion"), ADMIN),
}
"""Which roles an operation takes. `sign_out` is missing: it takes any, and nobody has one after it."""


def config_with(provider: RunningProvider, **openid: Any) -> str:
    client = {"issuer": provider.issuer, "client_id": CLIENT, "client_secret": {"env": "OPENID_SECRET"}}
    console = {"url": "https://console.example", "openid": {**client, "roles": ROLES, **openid}}
    return ALERTING + yaml.safe_dump({"console": console})


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def provider() -> AsyncGenerator[RunningProvider]:
    async with running_provider() as running:
        for sub, groups in GROUPS.items():
            await running.put_person(sub, email=f"{sub}@example.com", groups=groups)
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def api(
    start_api: StartApi, redis: Redis, provider: RunningProvider, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[HttpApi]:
    monkeypatch.setenv("LINK_SECRET", LINK_SECRET)
    monkeypatch.setenv("OPENID_SECRET", SECRET)
    provider.reset()
    async with start_api(config_with(provider)) as api:
        yield api


async def begin(api: HttpApi) -> tuple[str, str]:
    """The URL where the browser is sent, and the flow that it keeps."""
    answer = await api.ask("POST", "/api/v1/openid/begin", headers={"Authorization": ""})
    assert answer.status == 200, answer.body
    return answer.json["url"], answer.json["flow"]


async def complete(api: HttpApi, flow: str, back: URL, /, **changed: str) -> Answer:
    body = {"flow": flow, **back.query, **changed}
    return await api.ask("POST", "/api/v1/openid/complete", json=body, headers={"Authorization": ""})


async def sign_in(api: HttpApi, provider: RunningProvider, sub: str) -> Answer:
    url, flow = await begin(api)
    return await complete(api, flow, await provider.sign_in(url, sub))


async def token_of(api: HttpApi, provider: RunningProvider, sub: str) -> dict[str, str]:
    answer = await sign_in(api, provider, sub)
    assert answer.status == 200, answer.body
    return {"Authorization": f"Bearer {answer.json['token']}"}


async def test_each_role_may_do_what_the_table_says_and_nothing_else(api: HttpApi, provider: RunningProvider) -> None:
    people: dict[str, tuple[set[str], dict[str, str]]] = {}
    for sub, roles in (("vera", {"viewer"}), ("otto", {"viewer", "operator"}), ("anna", {"approver"}), ("ada", ADMIN)):
        people[sub] = roles, await token_of(api, provider, sub)
    found: set[str] = set()
    for path, item in openapi()["paths"].items():
        for method, operation in item.items():
            if not operation["security"] or operation["operationId"] == "sign_out":
                continue
            found.add(operation["operationId"])
            asked = path.format(
                job_id=new_id(),
                incident_id="inc_3f9a1c07",
                dead_letter_id=1,
                model="writer",
                execution_id="x",
                plan_id="p",
            )
            for sub, (roles, sent) in people.items():
                async with api.http.request(method, api.url + asked, headers=sent, data=b"") as response:
                    allowed = bool(roles & RIGHTS[operation["operationId"]])
                    assert (response.status == 403) is not allowed, (sub, method, path, response.status)
                    assert response.status != 401
    assert found == set(RIGHTS)


async def test_a_person_is_shown_by_name_with_roles_and_what_they_do_is_recorded_under_it(
    api: HttpApi, provider: RunningProvider
) -> None:
    sent = await token_of(api, provider, "both")
    shown = (await api.ask("GET", "/api/v1/key", headers=sent)).json
    assert shown.pop("created_at").endswith("Z")
    assert shown == {
        "id": "both",
        "name": "both@example.com",
        "kind": "person",
        "roles": ["operator", "approver"],
        "scopes": ["read", "operate", "approve"],
        "tenants": [],
        "agents": [],
    }
    body = {"agent": "writer", "model": "m", "reason": "garbled"}
    done = await api.ask("POST", "/api/v1/breakers/isolate", json=body, headers=sent)
    assert done.status == 200
    [event] = await api.events("bw.breakers.>")
    assert event["reason"] == "isolated by both@example.com: garbled"
    await api.post({"agent": "writer", "prompt": "x", "job_id": "theirs"})
    cancelled = await api.ask("POST", "/api/v1/jobs/theirs/cancel", headers=sent)
    assert (cancelled.status, cancelled.json["cancellation"]["by"]) == (202, "person")
    assert cancelled.json["cancellation"]["name"] == "both@example.com"
    ended = await api.ask("POST", "/api/v1/sessions/end", headers=sent)
    assert ended.json["continue_at"].startswith(f"{provider.issuer}/oauth2/end_session?id_token_hint=")
    assert (await api.ask("GET", "/api/v1/key", headers=sent)).status == 401
    recorded = await api.audit()
    assert {(one["by"], one["actor"], one["actor_id"]) for one in recorded} == {("both@example.com", "person", "both")}
    assert [(one["action"], one["outcome"]) for one in recorded] == [
        ("sign_in", "done"),
        ("isolate_breaker", "begun"),
        ("isolate_breaker", "done"),
        ("cancel_job", "begun"),
        ("cancel_job", "done"),
        ("sign_out", "done"),
    ]


async def test_who_may_not_is_refused_with_the_roles_that_may(api: HttpApi, provider: RunningProvider) -> None:
    sent = await token_of(api, provider, "vera")
    refused = await api.ask("POST", "/api/v1/alerts/ack", json={}, headers=sent)
    assert (refused.status, refused.code) == (403, "forbidden")
    assert refused.message == "this takes the role operator or approver or admin; 'vera@example.com' is viewer"


async def test_who_has_no_role_gets_no_session_and_the_refusal_is_recorded(
    api: HttpApi, provider: RunningProvider
) -> None:
    refused = await sign_in(api, provider, "nobody")
    assert (refused.status, refused.code) == (403, "no_role")
    assert "'nobody@example.com' has no role" in refused.message
    assert "'groups'" in refused.message
    [recorded] = await api.audit()
    expected = {"action": "sign_in", "outcome": "refused", "by": "nobody@example.com", "error": "no_role"}
    assert recorded == recorded | expected


async def test_an_answer_is_taken_from_the_browser_that_asked_for_it_alone(
    api: HttpApi, provider: RunningProvider
) -> None:
    url, flow = await begin(api)
    back = await provider.sign_in(url, "ada")
    _, another = await begin(api)
    redeemed = provider.asked.count("/oauth2/token")
    for changed in ({"state": "x"}, {"state": ""}, {"flow": another}, {"state": "é"}):
        refused = await complete(api, flow, back, **changed)
        assert (refused.status, refused.code) == (403, "openid_state"), changed
    assert provider.asked.count("/oauth2/token") == redeemed, "the code was not sent anywhere"
    # Somebody who has found the code of another brings it with a state of their own: PKCE.
    stolen = await complete(api, another, back, state=SignInFlow(another).state)
    assert (stolen.status, stolen.code) == (403, "openid_refused")
    assert (await complete(api, flow, back)).status == 200
    assert (await complete(api, flow, back)).code == "openid_refused"


@pytest.mark.parametrize(
    ("said", "code", "shown"),
    [
        ({"error": "access_denied", "error_description": "no"}, "openid_denied", "cancelled or not permitted"),
        (
            {"error": "server_error", "error_description": "of\x1b[1m course"},
            "openid_refused",
            "server_error: of[1m course",
        ),
        ({}, "openid_refused", "no code"),
    ],
)
async def test_what_a_provider_refuses_is_said_to_the_browser_that_asked(
    api: HttpApi, provider: RunningProvider, said: dict[str, str], code: str, shown: str
) -> None:
    url, flow = await begin(api)
    state = URL(url).query["state"]
    refused = await complete(api, flow, URL("/"), state=state, **said)
    assert (refused.status, refused.code) == (403, code)
    assert shown in refused.message
    assert (await complete(api, flow, URL("/"), state="x", **said)).code == "openid_state"
    denied = await provider.sign_in(url, "ada", action="deny")
    assert denied.query["error"] == "access_denied"


async def test_what_is_no_request_of_the_console_is_refused(api: HttpApi) -> None:
    for body, status in ((b"", 400), (b"{", 400), (b'{"flow": ""}', 422), (b'{"flow": "x", "y": 1}', 422)):
        answer = await api.ask("POST", "/api/v1/openid/complete", data=body, headers={"Authorization": ""})
        assert answer.status == status, body
    long = json.dumps({"flow": "x", "code": "y" * 40_000})
    assert (await api.ask("POST", "/api/v1/openid/complete", data=long)).status == 413
    assert (await api.ask("GET", "/api/v1/openid/begin", headers={"Authorization": ""})).status == 405
    assert (await api.ask("POST", "/api/v1/openid/other", headers={"Authorization": ""})).status == 401


async def test_a_session_has_the_rights_that_the_config_of_the_moment_gives_at_every_replica(
    api: HttpApi, provider: RunningProvider, redis: Redis
) -> None:
    sent = await token_of(api, provider, "otto")
    key = api.http.headers["Authorization"].removeprefix("Bearer ")
    configs: list[tuple[dict[str, Any], int, list[str]]] = [
        ({}, 200, ["viewer", "operator"]),
        ({"roles": {"approver": ["sre"]}}, 200, ["approver"]),
        ({"roles": {}, "default_role": "viewer"}, 200, ["viewer"]),
        ({"roles": {"admin": ["platform"]}}, 401, []),
        ({"issuer": "https://another.example"}, 401, []),
    ]
    for openid, status, roles in configs:
        settings = api.settings.model_copy(update={"http_port": free_port()})
        async with running(settings, parse_config(config_with(provider, **openid)), key) as replica:
            shown = await replica.ask("GET", "/api/v1/key", headers=sent)
            assert (shown.status, shown.json.get("roles", [])) == (status, roles), openid


async def test_a_plane_without_a_provider_says_so(alerting: HttpApi) -> None:
    for path in ("begin", "complete"):
        answer = await alerting.ask("POST", f"/api/v1/openid/{path}", json={"flow": "x"})
        assert (answer.status, answer.code) == (404, "no_openid")


async def test_what_is_kept_of_a_person_is_little_and_no_right(
    api: HttpApi, provider: RunningProvider, redis: Redis
) -> None:
    await token_of(api, provider, "otto")
    [key] = await redis.client.keys("bw:sessions:*")
    [stored] = (await redis.client.hgetall(key)).values()
    kept = json.loads(stored.split(" ", 2)[2])
    assert kept.pop("id_token").count(".") == 2
    assert len(kept.pop("sha256")) == 64
    expected = {"issuer": provider.issuer, "subject": "otto", "name": "otto@example.com", "values": ["staff", "sre"]}
    assert kept == expected
