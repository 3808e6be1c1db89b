"""People who sign in with OpenID Connect: what each role may do, under which name, and what ends it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
import pytest_asyncio
import yaml
from yarl import URL

from breakwater.config import parse_config
from breakwater.identity.contract import PersonRole
from breakwater.identity.rules.sign_in import SignInFlow
from breakwater.kernel.redis.connection import Redis
from breakwater.local.ports import free_port
from breakwater.services.request.openapi import document as openapi
from tests.helpers import until
from tests.openid_provider import (
    CLIENT,
    DISCOVERY,
    JWKS,
    SECRET,
    TOKEN,
    RunningProvider,
    new_key,
    running_provider,
    signed,
)
from tests.services.request.conftest import ALERTING, LINK_SECRET, Answer, HttpApi, StartApi, new_id, running

GROUPS: Mapping[str, list[str]] = {
    "vera": ["staff"],
    "otto": ["staff", "sre"],
    "anna": ["finance"],
    "ada": ["platform"],
    "both": ["sre", "finance"],
    "nobody": ["other"],
}
ROLES: Mapping[PersonRole, list[str]] = {
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
    **dict.fromkeys(
        ("list_executions", "list_runs", "show_execution", "list_agents", "list_breakers", "list_stopped_tasks"), ALL
    ),
    **dict.fromkeys(("show_run", "show_tree", "run_query", "list_agent_figures", "export_records"), ALL),
    **dict.fromkeys(("list_budgets", "reconcile_budgets", "show_costs", "export_costs", "list_queues"), ALL),
    **dict.fromkeys(("list_plans", "show_plan", "list_incidents", "show_incident", "list_undelivered_alerts"), ALL),
    **dict.fromkeys(("list_dead_letters", "show_dead_letter", "list_jobs"), ALL),
    **dict.fromkeys(("list_keys", "show_api_key", "list_limits", "show_limit"), ALL),
    **dict.fromkeys(("create_key", "rotate_key", "revoke_key", "expire_key", "set_limit", "delete_limit"), ADMIN),
    **dict.fromkeys(("acknowledge_incident", "resolve_incident", "reset_task", "raise_cap", "raise_limit"), APPROVE),
    **dict.fromkeys(("isolate_breaker", "reset_breaker", "test_channel", "cancel_job", "plan_config"), OPERATE),
    **dict.fromkeys(("replay_alerts", "replay_dead_letters", "dismiss_dead_letters"), OPERATE),
    # What a model has answered is not redacted there.
    **dict.fromkeys(("submit_job", "submit_plan", "show_job", "create_chat_completion"), ADMIN),
    **dict.fromkeys(("create_response", "create_message", "count_message_tokens", "create_embeddings"), ADMIN),
    **dict.fromkeys(("get_response", "list_input_items", "cancel_response", "delete_response"), ADMIN),
}
"""Which roles an operation takes. `sign_out` is missing: it takes any, and nobody has one after it."""


FAILURES_A_MINUTE = 20
"""Less than there are, for whoever has to fail more often."""


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


@pytest_asyncio.fixture(loop_scope="package")
async def attacked(
    request: pytest.FixtureRequest,
    start_api: StartApi,
    api: HttpApi,
    provider: RunningProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGenerator[HttpApi]:
    """An API of the test's own: what is refused counts for a minute."""
    monkeypatch.setattr("breakwater.identity.api.sign_in.FAILURES_A_MINUTE", FAILURES_A_MINUTE)
    async with start_api(config_with(provider, label=request.node.name)) as attacked:
        yield attacked


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
                run_id="x",
                key="k",
                plan_id="p",
                limit_id="l",
                response_id="resp_x",
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
        "residency": None,
        "user": None,
        "team": None,
        "tags": {},
        "priority": None,
        "weight": 1,
        "models": [],
        "expires_at": None,
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
    assert refused.message == "this needs the role operator or approver or admin; 'vera@example.com' is viewer"


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
async def test_what_a_provider_refuses_is_said_to_the_browser_that_user_and_job(
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


@asynccontextmanager
async def elsewhere(api: HttpApi) -> AsyncGenerator[HttpApi]:
    """The API, asked from another address."""
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as http:
        yield HttpApi(api.url, http, api.bus, api.settings, api.stop)


async def loops(api: HttpApi, flows: list[str], statuses: list[int]) -> None:
    """Brings a made-up code with a flow, and the state that follows from it, over and over."""
    while True:
        for flow in flows or [(await begin(api))[1]]:
            made_up = URL("/").with_query(state=SignInFlow(flow).state, code="made-up")
            statuses.append((await complete(api, flow, made_up)).status)


@pytest.mark.parametrize("whose", ["made up", "begun once", "begun each time"])
async def test_who_holds_flow_and_state_keeps_nobody_out_and_has_the_provider_asked_little(
    attacked: HttpApi, provider: RunningProvider, whose: str
) -> None:
    flows = {"made up": ["mine"], "begun once": [(await begin(attacked))[1]]}.get(whose, [])
    statuses: list[int] = []
    started = time.monotonic()
    attack = [asyncio.create_task(loops(attacked, flows, statuses)) for _ in range(12)]
    await until(lambda: len(statuses) > 2 * FAILURES_A_MINUTE)
    async with elsewhere(attacked) as other:
        assert (await sign_in(other, provider, "ada")).status == 200
    if flows:
        # From the same address, too: what was not begun here, or was used before, is not counted.
        assert (await sign_in(attacked, provider, "ada")).status == 200
    else:
        assert (await begin(attacked))[1], "who begins finds a place"
    assert not any(task.done() for task in attack)
    for task in attack:
        task.cancel()
    await asyncio.wait(attack)
    # So many failures a minute, refilled meanwhile, and those that are under way.
    refilled = (time.monotonic() - started) * FAILURES_A_MINUTE / 60
    most = {"made up": 0, "begun once": 1}.get(whose, FAILURES_A_MINUTE + len(attack) + refilled)
    assert provider.asked.count(TOKEN) <= most + 6
    assert set(statuses) <= {403, 409, 429}


async def test_who_begins_finds_a_place_while_the_provider_redeems_nothing(
    attacked: HttpApi, provider: RunningProvider
) -> None:
    await begin(attacked)
    provider.held[TOKEN] = asyncio.Event()
    statuses: list[int] = []
    attack = [asyncio.create_task(loops(attacked, [], statuses)) for _ in range(16)]
    await until(lambda: provider.asked.count(TOKEN) == 10)
    async with elsewhere(attacked) as other:
        url, flow = await begin(other)
        waiting = asyncio.create_task(complete(other, flow, await provider.sign_in(url, "ada")))
        await until(lambda: provider.asked.count(TOKEN) == 11)
        provider.held[TOKEN].set()
        assert (await waiting).status == 200
    for task in attack:
        task.cancel()
    await asyncio.wait(attack)


async def test_a_provider_that_hangs_is_asked_once_for_all_who_begin(
    attacked: HttpApi, provider: RunningProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.identity.json_web_tokens.TIMEOUT_S", 1.0)
    provider.held[DISCOVERY] = asyncio.Event()
    begun = time.monotonic()
    asked = [attacked.ask("POST", "/api/v1/openid/begin", headers={"Authorization": ""}) for _ in range(100)]
    assert {answer.code for answer in await asyncio.gather(*asked)} == {"openid_unavailable"}
    assert time.monotonic() - begun < 4
    assert provider.asked.count(DISCOVERY) <= 3
    provider.held.pop(DISCOVERY).set()
    assert await begin(attacked)


async def test_a_flow_is_good_for_ten_minutes_and_for_this_plane(
    api: HttpApi, provider: RunningProvider, monkeypatch: pytest.MonkeyPatch, redis: Redis
) -> None:
    url, flow = await begin(api)
    back = await provider.sign_in(url, "ada")
    cut, written_otherwise = flow[:-4], f"{flow[:20]}!{flow[20:]}"
    for changed in (cut, written_otherwise, f"A{flow[1:]}", flow.swapcase()):
        refused = await complete(api, changed, back, state=SignInFlow(changed).state)
        assert (refused.status, refused.code) == (403, "openid_state"), changed
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr("breakwater.identity.api.sign_in.time.time", lambda: now + 601)
        assert (await complete(api, flow, back)).code == "openid_state"
    await redis.client.delete("bw:openid:key")
    assert (await complete(api, flow, back)).code == "openid_state", "begun on another plane"
    assert provider.asked.count(TOKEN) == 0


LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
PROVIDERS_KEY = new_key("theirs")


def logout_claims(provider: RunningProvider, **changed: Any) -> dict[str, Any]:
    """Those of a logout token; None leaves one out."""
    claims = {"iss": provider.issuer, "aud": CLIENT, "iat": int(time.time()), "jti": new_id(), "sub": "ada"}
    claims = {**claims, "exp": claims["iat"] + 120, "events": {LOGOUT_EVENT: {}}, **changed}
    return {name: value for name, value in claims.items() if value is not None}


async def log_out(api: HttpApi, token: str, **more: str) -> Answer:
    """What the provider posts."""
    headers = {"Authorization": "", "Content-Type": "application/x-www-form-urlencoded"}
    sent = urlencode({"logout_token": token, **more})
    return await api.ask("POST", "/api/v1/openid/backchannel-logout", data=sent, headers=headers)


async def alive(api: HttpApi, sent: dict[str, str]) -> bool:
    return (await api.ask("GET", "/api/v1/key", headers=sent)).status == 200


@pytest.fixture
def logging_out(provider: RunningProvider) -> RunningProvider:
    provider.reset()
    provider.keys.append(PROVIDERS_KEY)
    provider.sign = lambda claims: signed(claims, PROVIDERS_KEY)
    return provider


async def test_who_signs_out_at_the_provider_is_signed_out_here(api: HttpApi, logging_out: RunningProvider) -> None:
    first, second = [await token_of(api, logging_out, "ada") for _ in range(2)]
    another = await token_of(api, logging_out, "otto")
    said = await log_out(api, signed(logout_claims(logging_out), PROVIDERS_KEY, typ="logout+jwt"))
    assert (said.status, said.json, said.headers["Cache-Control"]) == (200, {"ended": 2}, "no-store")
    assert [await alive(api, one) for one in (first, second, another)] == [False, False, True]
    assert (await log_out(api, signed(logout_claims(logging_out), PROVIDERS_KEY))).json == {"ended": 0}
    recorded = [one for one in await api.audit() if one["action"] == "sign_out"]
    assert [(one["by"], one["details"]["at"]) for one in recorded] == [("ada@example.com", "provider")] * 2


async def test_a_session_at_the_provider_ends_those_that_have_come_from_it(
    api: HttpApi, logging_out: RunningProvider
) -> None:
    sent: dict[str, dict[str, str]] = {}
    for sid in ("one", "two", "three"):
        logging_out.claims["sid"] = sid
        sent[sid] = await token_of(api, logging_out, "ada")
    assert (await log_out(api, signed(logout_claims(logging_out, sid="one"), PROVIDERS_KEY))).json == {"ended": 1}
    only_sid = logout_claims(logging_out, sub=None, sid="two")
    assert (await log_out(api, signed(only_sid, PROVIDERS_KEY))).json == {"ended": 1}
    assert {sid: await alive(api, one) for sid, one in sent.items()} == {"one": False, "two": False, "three": True}
    unknown = logout_claims(logging_out, sub=None, sid="four")
    assert (await log_out(api, signed(unknown, PROVIDERS_KEY))).json == {"ended": 0}


WRONG_LOGOUTS: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://evil.example"},
    "another audience": {"aud": "another"},
    "no audience": {"aud": None},
    "old": {"iat": int(time.time()) - 3600, "exp": None},
    "expired": {"exp": int(time.time()) - 3600},
    "from the future": {"iat": int(time.time()) + 3600},
    "no time": {"iat": None},
    "no id": {"jti": None},
    "an id that is none": {"jti": 7},
    "no event": {"events": None},
    "another event": {"events": {"http://schemas.openid.net/event/other": {}}},
    "an event that is none": {"events": {LOGOUT_EVENT: None}},
    "events that are none": {"events": [LOGOUT_EVENT]},
    "a nonce": {"nonce": "x"},
    "nobody": {"sub": None},
    "somebody that is none": {"sub": ["ada"]},
    "a session that is none": {"sid": ""},
}


async def test_what_is_no_logout_token_signs_nobody_out(
    api: HttpApi, logging_out: RunningProvider, subtests: pytest.Subtests
) -> None:
    sent = await token_of(api, logging_out, "ada")
    for name, claims in WRONG_LOGOUTS.items():
        with subtests.test(name):
            refused = await log_out(api, signed(logout_claims(logging_out, **claims), PROVIDERS_KEY))
            assert (refused.status, refused.code) == (400, "invalid_logout_token"), refused.body
            assert await alive(api, sent)


async def test_a_logout_token_is_the_providers_own_and_good_for_once(
    attacked: HttpApi, logging_out: RunningProvider
) -> None:
    sent = await token_of(attacked, logging_out, "ada")
    claims = logout_claims(logging_out)
    keys_read = logging_out.asked.count(JWKS)
    id_token: list[str] = []
    logging_out.sign = lambda issued: id_token.append(one := signed(issued, PROVIDERS_KEY)) or one
    await token_of(attacked, logging_out, "ada")
    stranger = new_key("strange")  # one for all of them: a key takes a tenth of a second to make
    forged = [
        *(signed(claims, stranger, kid=f"strange-{number}") for number in range(10)),
        signed(claims, stranger, kid="theirs"),
        signed(claims, b"", "none"),
        signed(claims, SECRET.encode(), "HS256"),
        *id_token,
        "",
        "a.b.c",
        "x" * 8_100,
        "x" * 9_000,
    ]
    for token in forged:
        refused = await log_out(attacked, token)
        assert refused.status in (400, 413), token
    assert logging_out.asked.count(JWKS) <= keys_read + 2, "keys that are not known have it asked once"
    assert await alive(attacked, sent)
    for body, status in ((b"", 400), (b"{}", 400), (b"\xff=\xff&logout_token", 400)):
        path = "/api/v1/openid/backchannel-logout"
        assert (await attacked.ask("POST", path, data=body, headers={"Authorization": ""})).status == status
    token = signed(claims, PROVIDERS_KEY)
    assert (await log_out(attacked, token)).status == 200
    renewed = await token_of(attacked, logging_out, "ada")
    assert (await log_out(attacked, token)).code == "invalid_logout_token"
    assert await alive(attacked, renewed)
