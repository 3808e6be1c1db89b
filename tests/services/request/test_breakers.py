"""Operator actions on breakers, over HTTP: what they change, and what is published and recorded."""

import asyncio

import structlog.testing

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, CountedFailure
from breakwater.breakers.rules.transitions import half_opened
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import UNSAVED, BreakerRefused, Breakers, LoadedBreaker, Saving
from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats import subjects
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.store.deployments import Deployments
from tests.services.request.conftest import HttpApi, put_breaker, redis_ms

WRITER_M = {"agent": "writer", "model": "m"}
SUBJECT = subjects.breaker("writer", "m")


async def load(redis: Redis, agent: str = "writer", model: str = "m") -> LoadedBreaker:
    [loaded] = await Breakers(redis).load([BreakerKey(agent, model)])
    return loaded


async def test_breakers_are_listed_with_whether_the_breaker_service_is_alive(governed: HttpApi, redis: Redis) -> None:
    now = await redis_ms(redis)
    await put_breaker(redis, "writer", "m", Breaker(state="open", open_until_ms=now, version=1, reason="why"))
    await put_breaker(redis, "gone", "old", Breaker(version=3))
    listed = await governed.ask("GET", "/api/v1/breakers")
    assert (listed.status, listed.json["alive"]) == (200, False)
    published = {(one["agent"], one["model"]): (one["state"], one["reason"]) for one in listed.json["breakers"]}
    assert published[("writer", "m")] == ("half_open", "why"), "its cool-down is over"
    assert published[("gone", "old")] == ("closed", None)
    assert {("*", "shared"), ("*", "local/*"), ("writer", "other/n")} <= set(published)
    assert [(one["agent"], one["model"], one["state"], one["refused"]) for one in listed.json["shadows"]] == [
        ("reader", "m", "closed", 0)
    ]
    await Breakers(redis).beat()
    assert (await governed.ask("GET", "/api/v1/breakers")).json["alive"] is True


async def test_a_breaker_is_forced_open_before_it_ever_failed(governed: HttpApi, redis: Redis) -> None:
    answer = await governed.act("breakers/isolate", **WRITER_M, reason=" the provider has an incident ")
    assert answer.status == 200
    published = BreakerTransition.model_validate_json(answer.body)
    assert (published.from_state, published.to_state, published.by, published.version) == (
        "closed",
        "isolated",
        "tests",
        1,
    )
    assert (published.agent, published.model, published.health) == ("writer", "m", "unhealthy")
    assert published.reason == "isolated by tests: the provider has an incident"
    assert await governed.events(SUBJECT) == [answer.json]
    loaded = await load(redis)
    assert (loaded.breaker.state, loaded.unpublished) == ("isolated", None)
    [admission] = await redis.run([Breakers.admit_command(BreakerKey("writer", "m"), "x:1", 1000)])
    assert isinstance(Breakers.read_admission(admission), BreakerRefused)
    listed = (await governed.ask("GET", "/api/v1/breakers")).json["breakers"]
    assert [one["reason"] for one in listed if one["state"] == "isolated"] == [published.reason]


async def test_one_that_is_forced_open_already_stays_as_it_is_and_nothing_is_published(governed: HttpApi) -> None:
    first = await governed.act("breakers/isolate", **WRITER_M, reason="first")
    second = await governed.act("breakers/isolate", **WRITER_M, reason="second")
    assert (second.status, second.json["unchanged"], second.json["state"]) == (200, True, "isolated")
    assert second.json["reason"] == "isolated by tests: first"
    assert "unchanged" not in first.json
    assert await governed.events(SUBJECT) == [first.json]


async def test_a_reset_closes_it_and_forgets_what_was_counted(governed: HttpApi, redis: Redis) -> None:
    now = await redis_ms(redis)
    failures = tuple(CountedFailure(number, now - 1000, "aaaaaaaa") for number in (1, 2, 3))
    opened = Breaker(state="open", failures=failures, open_until_ms=now + 60_000, version=4, total_failures=3)
    await put_breaker(redis, "writer", "m", opened)
    answer = await governed.act("breakers/reset", **WRITER_M, reason="deployed a fix")
    published = BreakerTransition.model_validate_json(answer.body)
    assert (published.from_state, published.to_state, published.by, published.version) == ("open", "closed", "tests", 5)
    assert (published.reason, published.total_failures, published.health) == (
        "reset by tests: deployed a fix",
        3,
        "healthy",
    )
    breaker = (await load(redis)).breaker
    assert (breaker.state, breaker.failures, breaker.total_failures) == ("closed", (), 0)
    assert await governed.events(SUBJECT) == [answer.json]


async def test_what_redis_has_lost_is_decided_on_as_the_log_has_it(governed: HttpApi, redis: Redis) -> None:
    for _ in range(2):
        await governed.act("breakers/isolate", **WRITER_M, reason="leaked")
        await redis.client.flushall()
        again = (await governed.act("breakers/isolate", **WRITER_M)).json
        assert (again["unchanged"], again["reason"]) == (True, "isolated by tests: leaked")
        [admission] = await redis.run([Breakers.admit_command(BreakerKey("writer", "m"), "x:1", 1000)])
        assert isinstance(Breakers.read_admission(admission), BreakerRefused)
        await governed.act("breakers/reset", **WRITER_M)
        await redis.client.flushall()
    steps = [(event["from_state"], event["to_state"], event["version"]) for event in await governed.events(SUBJECT)]
    assert steps == [
        ("closed", "isolated", 1),
        ("isolated", "closed", 2),
        ("closed", "isolated", 3),
        ("isolated", "closed", 4),
    ]


async def test_a_reset_of_what_counted_nothing_is_no_event(governed: HttpApi, redis: Redis) -> None:
    answer = await governed.act("breakers/reset", **WRITER_M)
    assert (answer.status, answer.json["unchanged"], answer.json["state"]) == (200, True, "closed")
    assert await governed.events("bw.breakers.>") == []
    assert (await load(redis)).revision == UNSAVED


async def test_a_reset_ends_the_hold_of_its_model(governed: HttpApi, redis: Redis) -> None:
    await redis.run([Deployments.hold_command("local/m", 3600)])
    [held] = {
        one["held_until"]
        for one in (await governed.ask("GET", "/api/v1/breakers")).json["breakers"]
        if one["model"] == "m"
    }
    assert held is not None
    await governed.act("breakers/reset", **WRITER_M)
    assert await Deployments(redis, None).held_until(["local/m"]) == {}


async def test_the_hold_of_a_model_without_a_breaker_ends_too(governed: HttpApi, redis: Redis) -> None:
    # Its agent has none, shares it, or has one of other models only.
    for agent, model in (("unguarded", "m"), ("by-model", "shared"), ("by-provider", "any"), ("reader", "elsewhere")):
        deployments, deployment = Deployments(redis, None), f"local/{model}"
        await redis.run([deployments.hold_command(deployment, 3600, "a caller")])
        answer = await governed.act("breakers/reset", agent=agent, model=model)
        assert (answer.status, answer.json["unchanged"], answer.json["reason"]) == (200, True, "its hold has ended")
        assert (answer.json["agent"], answer.json["model"], answer.json["state"]) == (agent, model, "closed")
        assert await redis.run([deployments.admit_command(deployment, first_try=False, caller="a caller")]) == [0]
        # Nothing is held any more, and there is no breaker.
        assert (await governed.act("breakers/reset", agent=agent, model=model)).status == 404
    assert await governed.events("bw.breakers.>") == []


async def test_shared_breakers_are_named_by_stars(governed: HttpApi, redis: Redis) -> None:
    for model, scope in (("shared", "model"), ("local/*", "provider")):
        answer = await governed.act("breakers/isolate", agent="*", model=model)
        assert (answer.status, answer.json["scope"], answer.json["reason"]) == (200, scope, "isolated by tests")
        assert (await load(redis, "*", model)).breaker.state == "isolated"
        assert await governed.events(subjects.breaker("*", model)) == [answer.json]
    [cooldown] = {event["cooldown_s"] for event in await governed.events(subjects.breaker("*", "local/*"))}
    assert cooldown == 7  # by the rules of the agents that share it


async def test_one_that_only_redis_knows_can_be_reset(governed: HttpApi, redis: Redis) -> None:
    await put_breaker(redis, "gone", "old", Breaker(state="isolated", version=1))
    assert (await governed.act("breakers/reset", agent="gone", model="old")).json["to_state"] == "closed"
    await put_breaker(redis, "*", "old/*", Breaker(state="isolated", version=1))
    assert (await governed.act("breakers/reset", agent="*", model="old/*")).json["scope"] == "provider"


async def test_a_model_that_jobs_may_ask_for_has_a_breaker_too(governed: HttpApi) -> None:
    assert (await governed.act("breakers/isolate", agent="writer", model="allowed")).status == 200


UNKNOWN = [
    ("writr", "m", "agent", "did you mean 'writer'?"),
    ("writer", "mm", "model", "did you mean 'm'?"),
    ("*", "share", "model", "did you mean 'shared'?"),
    ("by-provider", "any", "agent", "its calls use the shared breaker of agent '*' and model 'local/*'"),
    ("by-model", "shred", "model", "did you mean 'shared'?"),
    ("unguarded", "m", "agent", "agent 'unguarded' has `breaker: off`"),
]


async def test_what_nobody_knows_is_answered_with_what_may_be_meant(governed: HttpApi, redis: Redis) -> None:
    for path in ("breakers/isolate", "breakers/reset"):
        for agent, model, field, hint in UNKNOWN:
            answer = await governed.act(path, agent=agent, model=model)
            assert (answer.status, answer.code, answer.paths) == (404, "unknown_breaker", [field]), answer.json
            assert answer.message == f"no breaker is known for agent {agent!r} and model {model!r}; {hint}"
    assert await governed.events("bw.breakers.>") == []
    assert await Breakers(redis).all() == []


async def test_of_two_who_force_it_open_at_once_one_does_and_the_other_is_answered(
    governed: HttpApi, redis: Redis
) -> None:
    other = f"Bearer {create_key(governed.settings.api_keys_file, 'somebody else')}"
    posting = [
        governed.ask(
            "POST",
            "/api/v1/breakers/isolate",
            data=b'{"agent": "writer", "model": "m"}',
            headers={"Authorization": other} if number % 2 else {},
        )
        for number in range(20)
    ]
    answers = await asyncio.gather(*posting)
    assert {answer.status for answer in answers} == {200}
    [changed] = [answer.json for answer in answers if "unchanged" not in answer.json]
    assert await governed.events(SUBJECT) == [changed]
    assert {answer.json["reason"] for answer in answers} == {changed["reason"]}
    assert (await load(redis)).breaker.version == 1


async def test_a_reset_meanwhile_loses_no_change(governed: HttpApi, redis: Redis) -> None:
    await governed.act("breakers/isolate", **WRITER_M)
    acts = ["isolate", "reset"] * 10
    answers = await asyncio.gather(*(governed.act(f"breakers/{act}", **WRITER_M) for act in acts))
    published = await governed.events(SUBJECT)
    versions = [event["version"] for event in published]
    assert sorted(versions) == list(range(1, len(published) + 1))
    assert len(published) == 1 + sum("unchanged" not in answer.json for answer in answers)
    states = {event["version"]: event for event in published}
    assert all(
        states[number]["from_state"] == states[number - 1]["to_state"] for number in range(2, len(published) + 1)
    )
    assert (await load(redis)).breaker.state == states[len(published)]["to_state"]


async def test_what_somebody_saved_and_could_not_publish_is_published_before(governed: HttpApi, redis: Redis) -> None:
    key, rules, now = BreakerKey("writer", "m"), BreakerRules(), await redis_ms(redis)
    half_open = Breaker(state="half_open", probe="x:1", probe_until_ms=now + 60_000, open_until_ms=now, version=2)
    left = half_opened(key, half_open, rules, now)
    before = await load(redis)
    await Breakers(redis).save([Saving(key, before, half_open, f"[{left.model_dump_json()}]")])
    answer = await governed.act("breakers/isolate", **WRITER_M)
    published = await governed.events(SUBJECT)
    assert [(event["to_state"], event["version"]) for event in published] == [("half_open", 2), ("isolated", 3)]
    assert published[1] == answer.json
    # And where there is nothing to be done, too.
    before = await load(redis)
    await Breakers(redis).save([Saving(key, before, before.breaker, f"[{replace_id(left, 'again')}]")])
    assert (await governed.act("breakers/isolate", **WRITER_M)).json["unchanged"] is True
    assert (await governed.events(SUBJECT))[2]["transition_id"] == "again"
    assert (await load(redis)).unpublished is None


def replace_id(published: BreakerTransition, text: str) -> str:
    return published.model_copy(update={"transition_id": text}).model_dump_json()


async def test_every_act_is_on_record_and_no_secret_is(governed: HttpApi, redis: Redis) -> None:
    secret = "sk-proj-" + "a1B2c3D4" * 6
    key_id = str(governed.http.headers["Authorization"]).split("_")[1]
    with structlog.testing.capture_logs() as logs:
        answer = await governed.act("breakers/isolate", **WRITER_M, reason=f"key {secret} leaked")
        await governed.act("breakers/isolate", **WRITER_M)
        await governed.act("breakers/reset", **WRITER_M, reason="rotated")
    noted = [log for log in logs if log["event"].startswith("breaker_is") or log["event"] == "breaker_reset"]
    who = {"by": "tests", "key_id": key_id, "agent": "writer", "model": "m", "log_level": "info"}
    assert noted == [
        {"event": "breaker_isolated", "why": "key [REDACTED] leaked", "changed": True, **who},
        {"event": "breaker_isolated", "why": None, "changed": False, **who},
        {"event": "breaker_reset", "why": "rotated", "changed": True, **who},
    ]
    assert answer.json["reason"] == "isolated by tests: key [REDACTED] leaked"
    assert secret not in str(await governed.events(SUBJECT))
    assert secret not in (await load(redis)).breaker.reason


async def test_a_change_that_could_not_be_published_is_reported_so_and_waits_for_a_breaker_service(
    governed: HttpApi, redis: Redis
) -> None:
    await Breakers(redis).mark_filled("log")
    await governed.bus.jetstream().delete_stream("EVENTS")
    answer = await governed.act("breakers/isolate", **WRITER_M)
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "not_published", "1")
    assert "is isolated from now on" in answer.message
    loaded = await load(redis)
    assert loaded.breaker.state == "isolated"
    assert loaded.unpublished is not None
    assert '"to_state":"isolated"' in loaded.unpublished
