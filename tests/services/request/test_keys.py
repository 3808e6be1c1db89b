"""`/api/v1/keys`: keys that the plane keeps, made, rotated, revoked and ended by the API, in every process at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from breakwater.config import parse_config
from breakwater.identity.api_keys import create_key
from breakwater.identity.key_log import KeyLog
from breakwater.jobs.contract.execution import AnswerChunks
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import name_in
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time
from breakwater.limits.rules.scopes import Dimension
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import (
    GOVERNED,
    Answer,
    HttpApi,
    lose_nats,
    running,
    settings_for,
    until_ready,
)
from tests.services.request.test_limits import fill

ASK = {"agent": "writer", "prompt": "x"}


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ends_in(seconds: float) -> str:
    return format_time(datetime.now(UTC) + timedelta(seconds=seconds))


async def create(api: HttpApi, name: str, **fields: Any) -> dict[str, Any]:
    created = await api.act("keys", name=name, **fields)
    assert created.status == 200, created.body
    return created.json


async def status_of(api: HttpApi, key: str) -> int:
    return (await api.ask("GET", "/api/v1/key", headers=header(key))).status


@asynccontextmanager
async def second_process(api: HttpApi, directory: Path) -> AsyncGenerator[HttpApi]:
    """Another HTTP API of the same plane, with a file of its own."""
    urls = (api.settings.nats_url.get_secret_value(), api.settings.redis_url.get_secret_value())
    settings = settings_for(*urls, directory)
    async with running(settings, parse_config(GOVERNED), create_key(settings.api_keys_file, "second")) as second:
        yield second


async def test_a_key_is_made_listed_rotated_expired_and_revoked_by_the_api_and_each_change_is_recorded(
    governed: HttpApi,
) -> None:
    created = await create(
        governed,
        "acme/bot",
        agents=["writer"],
        models=["m"],
        user="ada",
        team="search",
        tags={"p": "x"},
        reason="pilot",
    )
    key, key_id = created.pop("key"), created["id"]
    assert key.startswith(f"bw_{key_id}_")
    assert (created["source"], created["state"], created["scopes"]) == ("plane", "active", ["submit"])
    shown = await governed.ask("GET", "/api/v1/key", headers=header(key))
    assert [shown.json[name] for name in ("agents", "models", "user", "team", "tags")] == [
        ["writer"],
        ["m"],
        "ada",
        "search",
        {"p": "x"},
    ]
    for path in (key_id, "acme%2Fbot", "acme/bot"):
        assert (await governed.ask("GET", f"/api/v1/keys/{path}")).json == created
    in_file, listed = (await governed.ask("GET", "/api/v1/keys")).json["keys"]
    assert (in_file["name"], in_file["source"], listed) == ("tests", "file", created)

    rotated = (await governed.act("keys/acme%2Fbot/rotate", reason="yearly")).json
    assert (rotated["id"], rotated["change"], rotated["reason"]) == (key_id, "rotated", "yearly")
    assert [await status_of(governed, text) for text in (key, rotated["key"])] == [200, 200]
    at_once = (await governed.act(f"keys/{key_id}/rotate", grace_s=0)).json
    assert [await status_of(governed, text) for text in (key, rotated["key"], at_once["key"])] == [401, 401, 200]
    refused = await governed.ask("GET", "/api/v1/key", headers=header(rotated["key"]))
    assert refused.message == "the secret of this API key was replaced; use its new one"

    ending = (await governed.act(f"keys/{key_id}/expire", at=ends_in(3600))).json
    assert (ending["state"], ending["change"], ending["expires_at"] is None) == ("active", "expiry_changed", False)
    assert (await governed.act(f"keys/{key_id}/expire", at="never")).json["expires_at"] is None
    revoked = (await governed.act(f"keys/{key_id}/revoke", reason="leaked")).json
    assert (revoked["state"], revoked["changed_by"], revoked["reason"]) == ("revoked", "tests", "leaked")
    assert (await governed.act(f"keys/{key_id}/revoke")).json == revoked
    refused = await governed.ask("GET", "/api/v1/key", headers=header(at_once["key"]))
    assert (refused.status, refused.message) == (401, "this API key was revoked")
    assert [key["name"] for key in (await governed.ask("GET", "/api/v1/keys")).json["keys"]] == ["tests"]
    every = (await governed.ask("GET", "/api/v1/keys?ended=true&limit=1")).json
    rest = (await governed.ask("GET", f"/api/v1/keys?ended=true&after={every['continue_after']}")).json
    assert ([key["name"] for key in rest["keys"]], rest["continue_after"]) == (["acme/bot"], None)

    audit = [event for event in await governed.audit() if event["outcome"] == "done"]
    assert [event["action"] for event in audit] == [
        *("create_key", "rotate_key", "rotate_key", "expire_key", "expire_key", "revoke_key", "revoke_key")
    ]
    assert audit[0]["details"] | {"name": "acme/bot", "agents": ["writer"]} == audit[0]["details"]
    assert (audit[5]["details"], audit[5]["reason"], audit[5]["by"]) == ({"key": key_id}, "leaked", "tests")
    [message] = [message async for message in Lookup(lambda: governed.bus).scan(Stream.KEYS, "bw.keys.*")]
    assert message.headers[Header.TTL.value] == str(30 * 86_400), "the server removes it a month after its end"
    secrets = [text.split("_", 2)[2].encode() for text in (key, rotated["key"], at_once["key"])]
    assert not [secret for secret in secrets if secret in message.data]


async def limits_of(api: HttpApi, scope: str) -> list[dict[str, Any]]:
    return (await api.ask("GET", f"/api/v1/limits?scope={scope}")).json["limits"]


MONTH = {"usd": 20, "per": "month", "action": "alert"}


async def test_a_key_is_made_with_all_of_its_limits_or_not_at_all(
    governed: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = {"requests": 60, "per": "minute"}
    created = await create(governed, "limited", limits=[MONTH | {"thresholds": [90]}, rate], reason="pilot")
    month, rate = created["limits"]
    assert month == {
        "id": "key:limited.usd.month",
        "unit": "usd",
        "amount": "20.000000000",
        "per": "month",
        "action": "alert",
    }
    assert (rate["unit"], rate["amount"], rate["per"], rate["action"]) == ("requests", "60", "minute", "refuse")
    listed = {limit["id"]: limit for limit in await limits_of(governed, "key:limited")}
    assert listed.keys() == {"key:limited.usd.month", "key:limited.requests.minute"}
    assert listed["key:limited.usd.month"]["thresholds"] == [90]
    assert (listed["key:limited.usd.month"]["by"], listed["key:limited.usd.month"]["reason"]) == ("tests", "pilot")
    for shown in (
        (await governed.ask("GET", "/api/v1/keys/limited")).json,
        (await governed.ask("GET", "/api/v1/keys")).json["keys"][-1],
        (await governed.act("keys/limited/rotate")).json,
    ):
        assert shown["limits"] == [month, rate]

    for limits, status, code, path in (
        ([MONTH, {"usd": 1, "per": "year"}], 422, "invalid_request", "limits.1.per"),
        ([MONTH, {"tokens": 1, "per": "minute", "action": "alert"}], 422, "invalid_request", "limits.1"),
        ([MONTH, {"usd": 1, "per": "day", "until": "2020-01-01T00:00:00Z"}], 422, "invalid_request", "limits.1.until"),
        ([MONTH, MONTH], 422, "invalid_request", "limits"),
        ([{"usd": "1" * 30, "per": "day"}], 422, "invalid_request", "limits.0.usd"),
        ([MONTH] * 21, 422, "invalid_request", "limits"),
    ):
        refused = await governed.act("keys", name="wrong", limits=limits)
        assert (refused.status, refused.code) == (status, code), refused.body
        assert path in refused.body.decode()
        assert await limits_of(governed, "key:wrong") == []
    taken = await governed.act("keys", name="limited", limits=[{"requests": 1, "per": "hour"}])
    assert (taken.status, taken.code) == (409, "key_exists")
    assert len(await limits_of(governed, "key:limited")) == 2

    with monkeypatch.context() as patch:

        async def lose(*_: object) -> None:
            raise BusUnavailableError("NATS does not answer")

        patch.setattr(KeyLog, "change", lose)
        assert (await governed.act("keys", name="late", limits=[MONTH])).status == 503
    assert [key["name"] for key in (await governed.ask("GET", "/api/v1/keys")).json["keys"]] == ["tests", "limited"]
    late = await create(governed, "late", limits=[MONTH])
    assert [limit["id"] for limit in late["limits"]] == ["key:late.usd.month"], "repeating it is safe"

    await governed.act("keys/limited/revoke")
    assert len(await limits_of(governed, "key:limited")) == 2, "they are of the name, and its jobs go on"
    again = await create(governed, "limited", limits=[MONTH | {"usd": 30}])
    assert [limit["amount"] for limit in again["limits"]] == ["60", "30.000000000"]


async def test_bad_input_is_refused_in_words_and_changes_nothing(governed: HttpApi, subtests: pytest.Subtests) -> None:
    taken = await create(governed, "taken")
    ended = await create(governed, "ended")
    await governed.act("keys/ended/revoke")
    file_id = (await governed.ask("GET", "/api/v1/key")).json["id"]
    rows: list[tuple[str, dict[str, Any], int, str, str]] = [
        ("keys", {"name": "x", "scopes": ["root"]}, 422, "invalid_request", "scopes"),
        ("keys", {"name": "x", "scopes": []}, 422, "invalid_request", "scopes"),
        ("keys", {"name": "x\n"}, 422, "invalid_request", "name"),
        ("keys", {"name": "n" * 129}, 422, "invalid_request", "name"),
        ("keys", {"name": "jwt:ada"}, 422, "invalid_request", "those of JSON Web Tokens"),
        ("keys", {}, 422, "invalid_request", "name"),
        ("keys", {"name": "x", "expires_at": ends_in(-1)}, 422, "invalid_request", "is over"),
        ("keys", {"name": "x", "expires_at": "tomorrow"}, 422, "invalid_request", "expires_at"),
        ("keys", {"name": "x", "agents": ["wrter"]}, 422, "invalid_request", "did you mean 'writer'"),
        ("keys", {"name": "x", "models": ["gpt"]}, 422, "invalid_request", "no agent of the key allows 'gpt'"),
        ("keys", {"name": "x", "tenants": ["*"]}, 422, "invalid_request", "no wildcards"),
        ("keys", {"name": "x", "models": ["m"], "scopes": ["read"]}, 422, "invalid_request", "submit alone"),
        ("keys", {"name": "taken"}, 409, "key_exists", "another key is named 'taken'"),
        ("keys", {"name": "tests"}, 409, "key_exists", "another key is named 'tests'"),
        ("keys", {"name": "program-x"}, 403, "forbidden", "NATS users"),
        ("keys/nobody/rotate", {}, 404, "unknown_key", "no API key 'nobody'"),
        ("keys/ended/rotate", {}, 409, "key_revoked", "was revoked"),
        ("keys/ended/expire", {"at": "never"}, 409, "key_revoked", "was revoked"),
        ("keys/taken/rotate", {"grace_s": -1}, 422, "invalid_request", "grace_s"),
        ("keys/taken/expire", {}, 422, "invalid_request", "at"),
        ("keys/tests/revoke", {}, 409, "key_from_file", "BREAKWATER_API_KEYS_FILE"),
        (f"keys/{file_id}/rotate", {}, 409, "key_from_file", "BREAKWATER_API_KEYS_FILE"),
    ]
    before = (await governed.ask("GET", "/api/v1/keys?ended=true")).json
    for path, body, status, code, words in rows:
        with subtests.test(f"{path} {body}"):
            answer = await governed.act(path, **body)
            assert (answer.status, answer.code) == (status, code), answer.body
            assert words in answer.body.decode()
    assert (await governed.ask("GET", "/api/v1/keys?ended=true")).json == before
    assert await status_of(governed, taken["key"]) == 200
    assert (await create(governed, "ended"))["id"] != ended["id"]


async def test_a_caller_gives_only_rights_that_it_has(governed: HttpApi) -> None:
    maker = await create(governed, "maker", scopes=["submit", "limits"], expires_at=ends_in(3600))
    strong = await create(governed, "strong", scopes=["submit", "operate"])
    headers = header(maker["key"])

    async def act(path: str, **body: Any) -> Answer:
        return await governed.ask("POST", f"/api/v1/{path}", json=body, headers=headers)

    for path, body, words in (
        ("keys", {"name": "x", "scopes": ["operate"]}, "lacks the scope operate"),
        ("keys", {"name": "x"}, "must not outlive it"),
        ("keys/strong/rotate", {}, "lacks the scope operate"),
        ("keys/maker/expire", {"at": "never"}, "must not outlive it"),
    ):
        refused = await act(path, **body)
        assert (refused.status, refused.code) == (403, "forbidden")
        assert words in refused.message
    assert (await act("keys", name="x", expires_at=ends_in(60))).status == 200
    assert (await act("keys/strong/revoke")).status == 200
    assert await status_of(governed, strong["key"]) == 401
    own = await act("keys/maker/revoke")
    assert (own.status, own.json["state"]) == (200, "revoked")
    assert await status_of(governed, maker["key"]) == 401


async def test_a_change_is_in_force_in_every_process_at_once_and_survives_a_restart_and_an_empty_redis(
    governed: HttpApi, redis: Redis, tmp_path: Path
) -> None:
    async with second_process(governed, tmp_path) as second:
        delays: list[float] = []

        async def seen(key: str, status: int) -> None:
            began = time.monotonic()
            while await status_of(second, key) != status:
                await asyncio.sleep(0.001)
            delays.append(time.monotonic() - began)

        keys = [(await create(governed, f"key {number}"))["key"] for number in range(5)]
        for key in keys:
            await seen(key, 200)
            await governed.act(f"keys/{key.split('_')[1]}/revoke")
            await seen(key, 401)
        assert sorted(delays)[len(delays) // 2] < 0.1
        await create(second, "of the second")
        last = (await create(governed, "last"))["key"]
    await redis.client.flushall()
    async with second_process(governed, tmp_path) as again:
        assert [await status_of(again, key) for key in (last, keys[0])] == [200, 401]


async def test_two_who_change_one_key_at_once_are_told_and_a_name_has_one_key(
    governed: HttpApi, tmp_path: Path
) -> None:
    async with second_process(governed, tmp_path) as second:
        created = await asyncio.gather(
            *(api.act("keys", name=f"twin {number}") for number in range(5) for api in (governed, second))
        )
        assert sorted(answer.status for answer in created) == [200] * 5 + [409] * 5
        rotated = await asyncio.gather(*(api.act("keys/twin%200/rotate", grace_s=0) for api in (governed, second)))
        assert sorted(answer.status for answer in rotated) in ([200, 200], [200, 409])
        for answer in rotated:
            if answer.status == 409:
                assert (answer.code, "at this moment" in answer.message) == ("key_changed", True)
        newest = max((answer.json for answer in rotated if answer.status == 200), key=lambda key: key["changed_at"])
        await until(lambda: _valid_everywhere(newest["key"], governed, second), "the newest secret")


async def _valid_everywhere(key: str, *apis: HttpApi) -> bool:
    return all([await status_of(api, key) == 200 for api in apis])


async def test_what_waits_or_is_streamed_for_a_key_ends_when_it_is_revoked_or_expires(governed: HttpApi) -> None:
    chat = {"model": "writer", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    requests: list[tuple[str, str, Any]] = [
        ("POST", "/api/v1/jobs?wait_s=300", ASK),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/chat/completions", chat | {"stream": True}),
        ("POST", "/v1/messages", chat),
        ("POST", "/v1/messages", chat | {"stream": True}),
        ("GET", "/api/v1/events", None),
    ]

    async def ask(method: str, path: str, body: Any, key: str) -> tuple[int, str]:
        async with governed.http.request(method, governed.url + path, json=body, headers=header(key)) as response:
            begun.append(path)
            return response.status, await response.text()

    for words, end in (("was revoked", {}), ("expired at", {"at": 2})):
        begun: list[str] = []
        created = await create(governed, words, scopes=["submit", "read"])
        queued = await governed.queued() + 5
        # The last job is the one whose answer has begun.
        asking = [asyncio.create_task(ask(*request, created["key"])) for request in requests]
        await until(lambda queued=queued: _is(governed.queued, queued), "the jobs")
        streamed = asyncio.create_task(ask("POST", "/v1/chat/completions", chat | {"stream": True}, created["key"]))
        await until(lambda queued=queued: _is(governed.queued, queued + 1), "the job of the stream")
        await _begin_answer(governed)
        await until(lambda begun=begun: sorted(begun) == ["/api/v1/events", "/v1/chat/completions"], "the streams")
        action = {name: ends_in(seconds) for name, seconds in end.items()}
        assert (await governed.act(f"keys/{created['id']}/{'expire' if end else 'revoke'}", **action)).status == 200
        began = time.monotonic()
        answers = await asyncio.gather(*asking)
        status, text = await streamed
        assert time.monotonic() - began < 10, "no wait goes on for its own time"
        assert [status for status, _ in answers] == [401] * 5 + [200]
        assert [text for _, text in answers if f"this API key {words}" not in text] == []
        assert (status, f'"message":"this API key {words}' in text) == (200, True)
    async with governed.http.get(f"{governed.url}/api/v1/key") as response:
        assert response.status == 200, "another key has lost nothing"


async def _is(count: Callable[[], Awaitable[int]], expected: int) -> bool:
    return await count() == expected


async def _begin_answer(api: HttpApi) -> None:
    """Publishes the first chunk of the newest job, as a worker does."""
    job = await api.last_job()
    execution_id = name_in(job.headers or {}, Header.EXECUTION_ID) or json.loads(job.data)["job_id"]
    delta = {"index": 0, "delta": {"role": "assistant", "content": "Grey"}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [delta]}
    ids = {"execution_id": execution_id, "job_id": execution_id, "agent": "writer"}
    message = AnswerChunks(**ids, number=1, attempt=1, model="m", chunks=(chunk,))
    await api.bus.publish(subjects.chunks("writer", execution_id), message.json_bytes())


@pytest.mark.usefixtures("own_nats_server")
async def test_without_nats_the_known_keys_stay_valid_and_changes_are_refused_whole(
    governed: HttpApi, own_nats_server: RunningServer
) -> None:
    created = await create(governed, "known")
    with structlog.testing.capture_logs() as logs:
        await lose_nats(governed, own_nats_server)
        await until(lambda: _of_keys(logs) == ["unavailable"], "the log")
    assert await status_of(governed, created["key"]) == 200
    for path, body in (("keys", {"name": "new"}), ("keys/known/rotate", {}), ("keys/known/revoke", {})):
        refused = await governed.act(path, **body)
        assert (refused.status, refused.code) == (503, "unavailable")
    assert await status_of(governed, created["key"]) == 200
    with structlog.testing.capture_logs() as later_logs:
        own_nats_server.restart()
        await until_ready(governed)
        await until(lambda: _of_keys(later_logs) == ["available_again"], "the log")
    assert _of_keys(logs) == ["unavailable"]
    assert [key["name"] for key in (await governed.ask("GET", "/api/v1/keys")).json["keys"]] == ["tests", "known"]


def _of_keys(logs: Iterable[Mapping[str, Any]]) -> list[str]:
    return [log["event"] for log in logs if log.get("what") == "api_keys"]


async def test_a_key_that_is_limited_makes_no_keys_that_its_limit_does_not_count(governed: HttpApi) -> None:
    rights = ["submit", "limits"]
    alone = await create(governed, "alone", scopes=rights)
    of_team = await create(governed, "of-team", scopes=rights, team="search")
    await create(governed, "another")
    for key in (alone, of_team):
        assert (
            await governed.ask(
                "POST", "/api/v1/keys", json={"name": f"{key['name']}-1", "team": "search"}, headers=header(key["key"])
            )
        ).status == 200
    for scope in ("key:*", "team:search"):
        limit = {"scope": scope, "usd": 20, "per": "month", "stop": True}
        assert (await governed.ask("PUT", f"/api/v1/limits/{scope}", json=limit)).status == 200

    async def status(key: dict[str, Any], method: str, path: str, **body: Any) -> int:
        return (await governed.ask(method, f"/api/v1/{path}", json=body, headers=header(key["key"]))).status

    for path, body in (
        ("keys", {"name": "new"}),
        ("keys", {"name": "new", "scopes": ["limits"]}),
        ("keys/another/rotate", {}),
    ):
        assert await status(alone, "POST", path, **body) == 403
    refused = await governed.ask("POST", "/api/v1/keys", json={"name": "new"}, headers=header(alone["key"]))
    assert "'alone' is limited itself (key:*)" in refused.message
    assert await status(alone, "PUT", "limits/key:alone", scope="key:alone", usd=999, per="month") == 403
    assert await status(alone, "DELETE", "limits/key:*") == 403
    assert await status(alone, "POST", f"keys/{alone['id']}/rotate") == 200
    assert await status(of_team, "POST", "keys", name="of-team-2", team="search") == 200
    assert (await governed.act("keys", name="by-operator")).status == 200


async def test_a_maker_who_is_bound_to_a_team_limits_the_keys_that_he_makes_and_loosens_no_limit_of_others(
    governed: HttpApi, redis: Redis
) -> None:
    await fill(redis, None, Dimension(("key",), "daily"))
    lead = await create(governed, "lead", scopes=["submit", "limits", "approve"], team="search")
    daily: dict[str, Any] = {"tokens": 5, "per": "day"}

    async def make(name: str, *limits: dict[str, Any], **fields: Any) -> Answer:
        body = {"name": name, "team": "search", "limits": limits, **fields}
        return await governed.ask("POST", "/api/v1/keys", json=body, headers=header(lead["key"]))

    made = await make("bot", daily, {"requests": 9, "per": "minute"})
    assert (made.status, [limit["amount"] for limit in made.json["limits"]]) == (200, ["5", "9"]), made.body
    assert (await make("bot", {**daily, "tokens": 4}, {"tokens": 9, "per": "minute"})).code == "key_exists"
    assert len(await limits_of(governed, "key:bot")) == 2, "a key that is not made leaves no limits"

    for_name = {"scope": "key:known", "tokens": 3, "per": "day"}
    assert (await governed.ask("PUT", "/api/v1/limits/of-name", json=for_name)).status == 200
    assert (await make("known", {**daily, "tokens": 3})).code == "limit_exists"
    for_name = {**for_name, "scope": "key:former"}
    assert (await governed.ask("PUT", "/api/v1/limits/key:former.tokens.day", json=for_name)).status == 200
    for looser in (daily, {**daily, "tokens": 3, "action": "count"}, {**daily, "tokens": 3, "until": ends_in(60)}):
        refused = await make("former", looser)
        assert (refused.status, refused.code) == (403, "forbidden"), refused.body
        assert "limits.0: 'lead' is bound to team:search, and can't loosen 'key:former.tokens.day'" in refused.message
    assert (await make("former", {**daily, "tokens": 2})).status == 200, "what is narrower is allowed"

    each = {"scope": "key:*", "tokens": 4, "per": "day"}
    assert (await governed.ask("PUT", "/api/v1/limits/each", json=each)).status == 200
    refused = await make("loose", daily)
    assert (refused.status, "can't loosen 'each', which holds for key:*" in refused.message) == (403, True), (
        refused.body
    )
    assert (await make("narrow", {**daily, "tokens": 4})).status == 200
    of_other = await make("stranger", {"tokens": 1, "per": "day"}, team="ads")
    assert (of_other.status, "bound to the team 'search'" in of_other.message) == (403, True)
    assert await limits_of(governed, "key:stranger") == []
