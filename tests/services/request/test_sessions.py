"""Sessions: what their tokens open, at which replicas, for how long, and what ends them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest
import pytest_asyncio

from breakwater.config import parse_config
from breakwater.identity.api_keys import create_key, revoke_key
from breakwater.identity.contract import KeyScope
from breakwater.identity.rules.callers import digest_of, split
from breakwater.identity.store import LASTS_MS, LINK_S, MAX_OF_A_HOLDER, Sessions
from breakwater.kernel.redis.connection import Redis
from breakwater.local.ports import free_port
from tests.server_sources import RunningServer
from tests.services.request.conftest import GOVERNED, Answer, HttpApi, running


def with_token(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def new_key(api: HttpApi, *scopes: KeyScope, name: str = "Zoë") -> str:
    return create_key(api.settings.api_keys_file, name, scopes or ("read", "operate"))


async def begin(api: HttpApi, key: str) -> str:
    answer = await api.ask("POST", "/api/v1/sessions", headers=with_token(key))
    assert answer.status == 200, answer.body
    return answer.json["token"]


async def look(api: HttpApi, token: str) -> Answer:
    return await api.ask("GET", "/api/v1/key", headers=with_token(token))


async def end(api: HttpApi, token: str) -> Answer:
    return await api.ask("POST", "/api/v1/sessions/end", headers=with_token(token))


@pytest_asyncio.fixture(loop_scope="package")
async def replica(governed: HttpApi) -> AsyncGenerator[HttpApi]:
    """Another process of the same service, started later."""
    key = governed.http.headers["Authorization"].removeprefix("Bearer ")
    settings = governed.settings.model_copy(update={"http_port": free_port()})
    async with running(settings, parse_config(GOVERNED), key) as api:
        yield api


async def test_a_session_has_the_rights_of_its_key_at_every_replica_until_it_is_ended(
    governed: HttpApi, replica: HttpApi
) -> None:
    key = new_key(governed)
    token = await begin(governed, key)
    for api in (governed, replica):
        shown = await look(api, token)
        assert shown.json == (await look(api, key)).json
        assert shown.json["name"] == "Zoë"
        body = {"agent": "writer", "model": "m"}
        done = await api.ask("POST", "/api/v1/breakers/isolate", json=body, headers=with_token(token))
        assert done.status == 200
        refused = await api.ask(
            "POST", "/api/v1/jobs", json={"agent": "writer", "prompt": "x"}, headers=with_token(token)
        )
        assert refused.status == 403
    assert (await end(governed, token)).json == {"ended": True, "continue_at": None}
    for api in (governed, replica):
        assert ((await look(api, token)).status, (await end(api, token)).status) == (401, 401)
    assert (await look(governed, key)).status == 200


async def test_signing_in_and_out_is_audited(governed: HttpApi) -> None:
    key = new_key(governed)
    await end(governed, await begin(governed, key))
    recorded = await governed.audit()
    assert [(one["action"], one["outcome"], one["by"], one["actor_id"]) for one in recorded] == [
        (action, "done", "Zoë", key.split("_")[1]) for action in ("sign_in", "sign_out")
    ]
    assert key not in str(recorded)


async def test_a_session_ends_with_its_key_and_with_the_scope_that_is_taken_away(governed: HttpApi) -> None:
    kept, key = new_key(governed, name="kept"), new_key(governed)
    token = await begin(governed, key)
    file = governed.settings.api_keys_file
    document = json.loads(file.read_text())
    document["keys"][-1]["scopes"] = ["submit"]
    file.write_text(json.dumps(document))
    assert (await governed.ask("GET", "/api/v1/agents", headers=with_token(token))).status == 403
    revoke_key(file, key.split("_")[1])
    refused = await look(governed, token)
    assert (refused.status, refused.code) == (401, "unauthorized")
    assert "sign in again" in refused.message
    assert (await look(governed, kept)).status == 200


async def test_a_session_is_begun_by_a_key_that_may_read_and_by_no_session(governed: HttpApi) -> None:
    programs = with_token(new_key(governed, "submit"))
    assert (await governed.ask("POST", "/api/v1/sessions", headers=programs)).status == 403
    token = await begin(governed, new_key(governed))
    again = await governed.ask("POST", "/api/v1/sessions", headers=with_token(token))
    assert (again.status, again.code) == (409, "is_a_session")
    not_one = await governed.ask("POST", "/api/v1/sessions/end")
    assert (not_one.status, not_one.code) == (409, "not_a_session")


CHANGES: list[Callable[[list[str]], list[str]]] = [
    lambda parts: [*parts[:3], "x" * 43],
    lambda parts: [*parts[:3], parts[3] + "x"],
    lambda parts: [*parts[:3], ""],
    lambda parts: [parts[0], "0" * 16, *parts[2:]],
    lambda parts: [*parts[:2], "0" * 16, parts[3]],
    lambda parts: ["bw", *parts[1:]],
    lambda parts: parts[:2],
    lambda parts: [parts[0], "*", "*", parts[3]],
]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_token_that_is_not_whole_opens_nothing(
    governed: HttpApi, change: Callable[[list[str]], list[str]]
) -> None:
    token = await begin(governed, new_key(governed))
    assert (await look(governed, "_".join(change(token.split("_", 3))))).status == 401


async def test_a_session_lasts_for_twelve_hours_and_no_longer(governed: HttpApi, redis: Redis) -> None:
    token = await begin(governed, new_key(governed))
    _, of, session_id, _ = token.split("_", 3)
    stored = cast(str, await cast(Any, redis.client.hget(f"bw:sessions:{of}", session_id)))
    began, ends, session = stored.split(" ", 2)
    assert int(ends) - int(began) == LASTS_MS
    assert token.split("_", 3)[3] not in stored
    assert 0 < await redis.client.pttl(f"bw:sessions:{of}") <= LASTS_MS
    await cast(Any, redis.client.hset(f"bw:sessions:{of}", session_id, f"{began} {began} {session}"))
    assert (await look(governed, token)).status == 401


async def test_of_one_key_the_oldest_session_gives_way_and_nobody_elses(governed: HttpApi) -> None:
    other = await begin(governed, new_key(governed, name="other"))
    key = new_key(governed)
    tokens = [await begin(governed, key) for _ in range(MAX_OF_A_HOLDER + 1)]
    assert [(await look(governed, token)).status for token in tokens] == [401] + [200] * MAX_OF_A_HOLDER
    assert (await look(governed, other)).status == 200


async def test_without_redis_a_session_is_not_known_and_a_key_is(redis_away: HttpApi) -> None:
    key = new_key(redis_away)
    for method, path, token in (("POST", "/api/v1/sessions", key), ("GET", "/api/v1/key", "bws_0_0_x")):
        answer = await redis_away.ask(method, path, headers=with_token(token))
        assert (answer.status, answer.code) == (503, "unavailable")
    assert (await look(redis_away, key)).status == 200


async def test_without_nats_people_sign_in_all_the_same(governed: HttpApi, own_nats_server: RunningServer) -> None:
    own_nats_server.kill()
    token = await begin(governed, new_key(governed))
    assert (await look(governed, token)).status == 200


async def link_of(redis: Redis, key: str) -> str:
    """A sign-in link of a key."""
    parts = split(key)
    assert parts is not None
    return await Sessions(redis).offer(parts[0], digest_of(parts[1]))


async def test_a_link_begins_a_session_once_with_the_rights_of_its_key(governed: HttpApi, redis: Redis) -> None:
    key = new_key(governed)
    link = await link_of(redis, key)
    [stored] = [one async for one in redis.client.scan_iter("bw:sign-in:link:*")]
    assert link not in stored
    assert LINK_S - 5 <= await redis.client.ttl(stored) <= LINK_S
    assert (await look(governed, await begin(governed, link))).json == (await look(governed, key)).json
    again = await governed.ask("POST", "/api/v1/sessions", headers=with_token(link))
    assert (again.status, again.code) == (401, "unauthorized")
    assert "`breakwater console`" in again.message
    assert [(one["action"], one["by"], one["actor_id"]) for one in await governed.audit()] == [
        ("sign_in", "Zoë", key.split("_")[1])
    ]


@pytest.mark.parametrize("link", ["bwl_", "bwl_x", "bwl_*", "bwl_" + "x" * 200])
async def test_what_is_no_link_signs_nobody_in(governed: HttpApi, link: str) -> None:
    assert (await governed.ask("POST", "/api/v1/sessions", headers=with_token(link))).status == 401


async def test_a_link_of_a_revoked_key_signs_nobody_in(governed: HttpApi, redis: Redis) -> None:
    key = new_key(governed)
    link = await link_of(redis, key)
    revoke_key(governed.settings.api_keys_file, key.split("_")[1])
    assert (await look(governed, link)).status == 401


async def test_a_session_ends_with_the_secret_that_has_begun_it_and_not_with_the_key(
    governed: HttpApi, redis: Redis
) -> None:
    first = (await governed.act("keys", name="console", scopes=["read"])).json["key"]
    before = await begin(governed, first)
    second = (await governed.act("keys/console/rotate", grace_s=3600)).json
    in_grace = await begin(governed, first)
    by_link = await begin(governed, await link_of(redis, first))
    of_second = await begin(governed, second["key"])
    shown = [(await look(governed, token)).json for token in (before, in_grace, by_link, of_second)]
    assert [session["expires_at"] for session in shown] == [second["old_secret_until"]] * 3 + [None]

    link = await link_of(redis, first)
    third = (await governed.act("keys/console/rotate", grace_s=3600)).json
    ended = [await look(governed, token) for token in (before, in_grace, by_link, link)]
    assert [(answer.status, answer.code) for answer in ended] == [(401, "unauthorized")] * 4
    assert ended[0].message == "this session has ended; sign in again"
    assert (await look(governed, of_second)).json["expires_at"] == third["old_secret_until"]
    of_third = await begin(governed, third["key"])
    await governed.act("keys/console/rotate", grace_s=0)
    assert [(await look(governed, token)).status for token in (of_second, of_third)] == [401, 401]
