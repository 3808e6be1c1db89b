"""Every action of operators over HTTP, where it can't be done; what each of them does has a file of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakwater.breakers.store import Breakers
from breakwater.identity.api_keys import create_key
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import Redis
from tests.helpers import until
from tests.operator_cases import OPERATOR_CASES, OperatorCase
from tests.server_sources import RunningServer
from tests.services.request import test_alerts_channels, test_dead_letters
from tests.services.request.conftest import Answer, HttpApi, StartApi, lose_nats, publish_alert
from tests.services.request.test_budgets import fill, raise_of, standing
from tests.services.request.test_guards import trip

WITHOUT_TARGETS = """
providers: {other: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: m}
agents: {reader: {}}
"""
# Which of several dead letters there are none of is said in the response.
REFUSED_IF_UNKNOWN = [case for case in OPERATOR_CASES if not case.action.startswith("dlq/")]
ON_ONE_TARGET = [case for case in OPERATOR_CASES if not case.action.endswith(("/replay", "/dismiss"))]
THAT_NEED_REDIS = [case for case in OPERATOR_CASES if case.action.startswith(("breakers/", "guards/", "budgets/"))]


async def done_by(api: HttpApi, case: OperatorCase) -> Answer:
    return await api.act(case.action, **case.body)


def is_unavailable(answer: Answer) -> bool:
    return (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "unavailable", "1")


@pytest.mark.parametrize("case", REFUSED_IF_UNKNOWN, ids=str)
async def test_an_unknown_target_is_refused(start_api: StartApi, redis: Redis, case: OperatorCase) -> None:
    await fill(redis)
    async with start_api(WITHOUT_TARGETS) as api:
        answer = await done_by(api, case)
        assert (answer.status, answer.code) == (404, case.unknown), answer.body
        assert await api.events("bw.>") == []


async def test_a_body_that_is_wrong_is_refused_with_the_field_and_nothing_is_done(
    governed: HttpApi, redis: Redis
) -> None:
    for case in ON_ONE_TARGET:
        target = next(iter(case.body))
        fields: list[tuple[dict[str, Any], list[str]]] = [
            ({name: value for name, value in case.body.items() if name != target}, [target]),
            (case.body | {target: ""}, [target]),
            (case.body | {"reson": "x"}, ["reson"]),
            (case.body | {"reason": "x" * 501}, ["reason"]),
            (case.body | {"reason": "a\nb"}, ["reason"]),
        ]
        for body, status, code, paths in (
            (b"agent=writer", 400, "not_json", []),
            (b'{"agent": "\xff"}', 400, "not_utf8", []),
            (b"[]", 422, "invalid_request", [""]),
            (b" " * 20_000, 413, "body_too_large", []),
            *((json.dumps(body).encode(), 422, "invalid_request", paths) for body, paths in fields),
        ):
            answer = await governed.ask("POST", f"/api/v1/{case.action}", data=body)
            assert (answer.status, answer.code, answer.paths) == (status, code, paths), (case, body[:60], answer.json)
        assert "did you mean 'reason'?" in (await governed.act(case.action, **case.body, reson="x")).message
    assert await governed.events("bw.>") == await governed.alerts() == await Breakers(redis).all() == []


async def test_without_a_key_or_its_scope_nothing_is_done(governed: HttpApi, redis: Redis) -> None:
    looks = create_key(governed.settings.api_keys_file, "looks", ("read", "submit"))
    for case in OPERATOR_CASES:
        for header, status, code in (("", 401, "unauthorized"), (f"Bearer {looks}", 403, "forbidden")):
            sent = {"Authorization": header}
            answer = await governed.ask("POST", f"/api/v1/{case.action}", json=case.body, headers=sent)
            assert (answer.status, answer.code) == (status, code), case
    assert await governed.events("bw.>") == await governed.alerts() == await Breakers(redis).all() == []
    assert await governed.queued() == 0


async def test_without_redis_nothing_is_claimed_and_nothing_done(redis_away: HttpApi) -> None:
    for path in ("agents", "breakers", "guards", "budgets"):
        assert is_unavailable(await redis_away.ask("GET", f"/api/v1/{path}")), path
    for case in THAT_NEED_REDIS:
        assert is_unavailable(await done_by(redis_away, case)), case
    assert await redis_away.events("bw.>") == []


async def test_without_nats_nothing_is_done_and_however_often_it_is_asked_for_later_it_is_done_once(
    governed: HttpApi, redis: Redis, own_nats_server: RunningServer
) -> None:
    await trip(redis, TaskKey("acme", "t2"))
    await fill(redis)
    alert = await publish_alert(governed, incident_id="inc_3f9a1c07")
    assert await test_alerts_channels.give_up(governed, "ops", alert) == 1
    assert [await test_dead_letters.give_up(governed, sequence=number) for number in (1, 2)] == [2, 3]
    assert (await governed.ask("GET", "/api/v1/alerts")).status == 200

    await lose_nats(governed, own_nats_server)
    for case in OPERATOR_CASES:
        assert is_unavailable(await done_by(governed, case)), case
    assert is_unavailable(await governed.act("alerts/test", channel="ops"))
    for path in ("alerts", "alerts/inc_3f9a1c07", "alerts/undelivered", "dlq", "dlq/2"):
        assert is_unavailable(await governed.ask("GET", f"/api/v1/{path}")), path
    for path in ("breakers", "guards", "budgets"):
        assert (await governed.ask("GET", f"/api/v1/{path}")).status == 200, path
    assert await Breakers(redis).all() == []
    assert len((await governed.ask("GET", "/api/v1/guards")).json["stopped"]) == 1
    assert await raise_of(governed) is None

    await own_nats_server.restart_async()
    for case in OPERATOR_CASES:

        async def done(case: OperatorCase = case) -> bool:
            return (await done_by(governed, case)).status == 200

        await until(done)
        assert await done()
    assert [one["to_state"] for one in await governed.events("bw.breakers.>")] == ["isolated"]
    assert len(await governed.events("bw.guards.>")) == 1
    assert (await governed.ask("GET", "/api/v1/guards")).json == {"stopped": []}
    assert len(await governed.events("bw.budgets.>")) == 1
    assert (await standing(governed))["limit"] == "50.000000000"
    assert [one["change"] for one in await governed.alerts()] == ["opened", "acknowledged", "resolved"]
    again = Lookup(lambda: governed.bus).scan(Stream.ALERTER, "bw.alerter.replays.>")
    assert len([found async for found in again]) == 1
    assert await governed.queued() == 2
