"""How agents and breakers are said to stand, from what Redis knows of them."""

from __future__ import annotations

from dataclasses import replace

from breakwater.breakers.api import agents_health, breaker_statuses, refused_until
from breakwater.breakers.contract import AgentHealth
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, CountedFailure
from breakwater.breakers.rules.health import UNCALLED
from breakwater.breakers.store import Breakers, LoadedBreaker, Saving
from breakwater.config import Config, breakers_of, parse_config
from breakwater.health.store import EndedCall, Healths
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import time_from_ms
from breakwater.limits.store.deployments import Deployments
from tests.tables import each_row

CONFIG = parse_config("""
providers: {local: {base_url: "http://127.0.0.1:9/v1"}, other: {base_url: "http://127.0.0.1:9/v1"}}
models: {elsewhere: {provider: other}}
defaults: {provider: local, model: m}
agents:
  writer: {fallback_models: [other/n], allowed_models: [allowed]}
  anything: {allowed_models: ["*"]}
  unguarded: {breaker: off}
  by-model: {breaker: {scope: model, cooldown_s: 5}}
  by-provider: {breaker: {scope: provider}}
""")
NOW = 1_795_255_200_000
SOON, LATER, PAST = 60_000, 120_000, -1


async def now_ms(redis: Redis) -> int:
    [loaded] = await Breakers(redis).load([BreakerKey("nobody", "nothing")])
    return loaded.now_ms


async def put(redis: Redis, agent: str, model: str, breaker: Breaker) -> None:
    key = BreakerKey(agent, model)
    [before] = await Breakers(redis).load([key])
    assert await Breakers(redis).save([Saving(key, before, breaker, None)]) == [True]


async def note(redis: Redis, agent: str, **calls: list[EndedCall]) -> None:
    await Healths(redis).note(
        [Healths.note_command(agent, {name.replace("_", "/"): health_of_all for name, health_of_all in calls.items()})]
    )


async def health_of_all(redis: Redis, config: Config = CONFIG) -> dict[str, AgentHealth]:
    healths = await agents_health(config, Breakers(redis), Healths(redis), Deployments(redis, None))
    return {health.agent_id: health for health in healths}


async def test_an_agent_that_nobody_has_called_is_healthy(redis: Redis) -> None:
    healths = await health_of_all(redis)
    assert list(healths) == ["writer", "anything", "unguarded", "by-model", "by-provider"]
    assert {(health.health, health.health_reason) for health in healths.values()} == {UNCALLED}
    writer = healths["writer"]
    assert [(one.model, one.provider, one.breaker, one.health, one.health_reason) for one in writer.models] == [
        ("m", "local", "closed", *UNCALLED),
        ("other/n", "other", "closed", *UNCALLED),
    ]
    assert (writer.consecutive_failures, writer.last_failure_at, writer.last_success_at) == (0, None, None)
    assert [model.breaker for model in healths["unguarded"].models] == [None]


async def test_an_agent_whose_calls_fail_is_degraded_until_a_success_clears_last_failure_at(redis: Redis) -> None:
    await note(redis, "writer", m=[EndedCall(1, NOW, False), EndedCall(2, NOW + 5, True), EndedCall(3, NOW + 9, True)])
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.consecutive_failures, writer.circuit_open_until) == ("degraded", 2, None)
    assert (writer.last_success_at, writer.last_failure_at) == (time_from_ms(NOW), time_from_ms(NOW + 9))
    assert [(model.health, model.health_reason, model.consecutive_failures) for model in writer.models] == [
        ("degraded", "2 calls failed in a row", 2),
        (*UNCALLED, 0),
    ]
    await note(redis, "writer", other_n=[EndedCall(4, NOW + 20, False)])
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.health_reason) == ("healthy", "the last call succeeded; 2 of the last 4 did not")
    assert (writer.consecutive_failures, writer.last_failure_at) == (0, None)
    assert writer.last_success_at == time_from_ms(NOW + 20)
    assert [model.health for model in writer.models] == ["degraded", "healthy"]


async def test_one_open_breaker_of_two_is_degraded_and_has_no_time_for_the_agent(redis: Redis) -> None:
    until = await now_ms(redis) + SOON
    await put(redis, "writer", "m", Breaker(state="open", open_until_ms=until))
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.circuit_open_until) == ("degraded", None)
    assert [(one.breaker, one.health, one.circuit_open_until) for one in writer.models] == [
        ("open", "unhealthy", time_from_ms(until)),
        ("closed", "healthy", None),
    ]


async def test_an_agent_none_of_whose_models_may_be_called_is_unhealthy_until_the_first_may(redis: Redis) -> None:
    now = await now_ms(redis)
    await put(redis, "writer", "m", Breaker(state="open", open_until_ms=now + LATER))
    half_open = Breaker(state="half_open", probe="x:1", probe_until_ms=now + SOON)
    await put(redis, "writer", "other/n", half_open)
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.circuit_open_until) == ("unhealthy", time_from_ms(now + SOON))
    assert [one.circuit_open_until for one in writer.models] == [time_from_ms(now + LATER), time_from_ms(now + SOON)]
    await put(redis, "writer", "other/n", Breaker(state="isolated"))
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.circuit_open_until) == ("unhealthy", time_from_ms(now + LATER))
    await put(redis, "writer", "m", Breaker(state="isolated"))
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.circuit_open_until) == ("unhealthy", None)
    assert [(one.breaker, one.circuit_open_until) for one in writer.models] == [("isolated", None)] * 2


async def test_a_time_that_has_passed_is_not_reported_as_a_probe_may_call_now(redis: Redis) -> None:
    now = await now_ms(redis)
    await put(redis, "writer", "m", Breaker(state="open", open_until_ms=now + PAST))
    await put(redis, "writer", "other/n", Breaker(state="open", open_until_ms=now + LATER))
    writer = (await health_of_all(redis))["writer"]
    assert (writer.health, writer.circuit_open_until) == ("unhealthy", None)
    assert [(one.breaker, one.circuit_open_until) for one in writer.models] == [
        ("half_open", None),
        ("open", time_from_ms(now + LATER)),
    ]
    assert writer.models[0].health_reason == "breaker half-open, waits for a call to try it"


async def test_shared_breakers_show_at_every_agent_that_shares_them(redis: Redis) -> None:
    until = await now_ms(redis) + SOON
    await put(redis, "*", "m", Breaker(state="open", open_until_ms=until))
    await put(redis, "*", "local/*", Breaker(state="isolated"))
    healths = await health_of_all(redis)
    states = {name: [model.breaker for model in health.models] for name, health in healths.items()}
    assert states["by-model"] == ["open"]
    assert states["by-provider"] == ["isolated"]
    assert states["writer"] == ["closed", "closed"]


async def test_agents_take_two_round_trips_however_many_there_are(redis: Redis) -> None:
    many = ", ".join(f"agent{number}: {{}}" for number in range(30))
    config = parse_config(f'providers: {{p: {{base_url: "http://x/v1"}}}}\ndefaults: {{model: m}}\nagents: {{{many}}}')
    await health_of_all(redis, config)

    async def reads() -> int:
        return (await redis.client.info())["total_reads_processed"]

    # Each look at the counter is one of them itself.
    idle = -await reads() + await reads()
    before = await reads()
    await health_of_all(redis, config)
    assert await reads() - before - idle <= 2


async def test_statuses_name_the_agents_own_breakers_and_all_that_are_known(redis: Redis) -> None:
    failures = (CountedFailure(1, NOW, "aaaaaaaa"), CountedFailure(2, NOW + 7, "bbbbbbbb"))
    later = await now_ms(redis) + LATER
    opened = Breaker(
        state="open",
        failures=failures,
        open_until_ms=later,
        version=1,
        total_failures=2,
        errors_seen=("aaaaaaaa", "bbbbbbbb"),
        last_failure_ms=NOW + 7,
        changed_ms=NOW + 8,
        reason="2 jobs in a row failed (threshold: 2)",
    )
    await put(redis, "writer", "m", opened)
    await put(redis, "gone", "old", replace(opened, state="half_open", probe="x:1", probe_until_ms=later))
    statuses = await breaker_statuses(CONFIG, Breakers(redis), Healths(redis), Deployments(redis, None))
    assert [(one.agent, one.model, one.state) for one in statuses] == [
        ("*", "local/*", "closed"),
        ("*", "m", "closed"),
        ("anything", "m", "closed"),
        ("gone", "old", "half_open"),
        ("writer", "m", "open"),
        ("writer", "other/n", "closed"),
    ]
    of_writer = statuses[4]
    assert of_writer.model_dump(exclude={"agent", "model", "state"}) == {
        "health": "unhealthy",
        "health_reason": f"breaker open until {time_from_ms(later):%H:%M:%S} UTC",
        "reason": "2 jobs in a row failed (threshold: 2)",
        "open_for": None,
        "since": time_from_ms(NOW + 8),
        "open_until": time_from_ms(later),
        "probe_until": None,
        "held_until": None,
        "count": "jobs",
        "consecutive_failures": 2,
        "total_failures": 2,
        "unique_errors": 2,
        "last_failure_at": time_from_ms(NOW + 7),
        "last_success_at": None,
        "version": 1,
    }
    assert (statuses[3].open_until, statuses[3].probe_until) == (None, time_from_ms(later))
    assert (statuses[5].reason, statuses[5].since, statuses[5].version) == (None, None, 0)


async def test_what_is_open_for_one_caller_degrades_the_agent_and_says_for_whom(redis: Redis) -> None:
    now = await now_ms(redis)
    of_one = Breaker(
        state="open",
        open_until_ms=now + LATER,
        changed_ms=now,
        callers=(("kA", now), ("kB", now)),
        alone="kA",
        alone_name="key app",
    )
    await put(redis, "writer", "m", of_one)
    writer = (await health_of_all(redis))["writer"]
    of_m = writer.models[0]
    assert (of_m.breaker, of_m.health, of_m.health_reason) == ("open", "degraded", "breaker refuses only key app")
    assert (writer.models[0].circuit_open_until, writer.circuit_open_until) == (None, None)
    statuses = await breaker_statuses(CONFIG, Breakers(redis), Healths(redis), Deployments(redis, None))
    assert [one.open_for for one in statuses if (one.agent, one.model) == ("writer", "m")] == ["key app"]
    # Where no other calls, it is open for all.
    await put(redis, "writer", "m", replace(of_one, callers=(("kA", now),)))
    assert (await health_of_all(redis))["writer"].models[0].health == "unhealthy"


async def test_a_breakers_health_is_that_of_its_agents_on_its_model(redis: Redis) -> None:
    await note(redis, "writer", m=[EndedCall(number, NOW, True) for number in range(1, 25)])
    await note(redis, "anything", m=[EndedCall(1, NOW, False)])
    await note(redis, "by-model", m=[EndedCall(1, NOW, True)])
    healths = await health_of_all(redis)
    statuses = await breaker_statuses(CONFIG, Breakers(redis), Healths(redis), Deployments(redis, None))
    of_breakers = {(one.agent, one.model): (one.health, one.health_reason) for one in statuses}
    own = {(name, one.model): (one.health, one.health_reason) for name, of in healths.items() for one in of.models}
    assert {key: own[key] for key in of_breakers if key in own} == {
        ("anything", "m"): ("healthy", "the last call succeeded"),
        ("writer", "m"): ("unhealthy", "24 calls failed in a row"),
        ("writer", "other/n"): UNCALLED,
    }
    assert of_breakers == {key: own[key] for key in of_breakers if key in own} | {
        ("*", "m"): ("degraded", "the last call failed"),
        ("*", "local/*"): UNCALLED,
    }


async def test_a_held_model_is_shown_with_its_end_wherever_it_is_called_and_is_no_failure(redis: Redis) -> None:
    deployments = Deployments(redis, None)
    await redis.run([deployments.hold_command("local/m", 60)])
    ends = time_from_ms(await now_ms(redis) + 60_000)
    statuses = await breaker_statuses(CONFIG, Breakers(redis), Healths(redis), deployments)
    held = {(one.agent, one.model): one.held_until for one in statuses if one.held_until is not None}
    assert set(held) == {("*", "m"), ("anything", "m"), ("writer", "m")}
    assert all(abs((until - ends).total_seconds()) < 30 for until in held.values())
    writer = (await health_of_all(redis))["writer"]
    assert [(one.model, one.health, one.held_until is None) for one in writer.models] == [
        ("m", "healthy", False),
        ("other/n", "healthy", True),
    ]
    assert writer.health == "healthy"


def test_what_a_job_may_ask_for_has_breakers_as_well_as_far_as_the_config_names_it() -> None:
    own = {(key.agent, key.model) for key in breakers_of(CONFIG)}
    assert own == {("writer", "m"), ("writer", "other/n"), ("anything", "m"), ("*", "m"), ("*", "local/*")}
    more = {(key.agent, key.model) for key in breakers_of(CONFIG, of_allowed=True)} - own
    named = {("anything", model) for model in ("allowed", "elsewhere", "other/n")}
    assert more == {("writer", "allowed"), *named}
    assert breakers_of(CONFIG)[BreakerKey("*", "m")].cooldown_s == 5


@each_row(
    ("breaker", "until"),
    [
        (Breaker(), None),
        (Breaker(state="isolated"), 0),
        (Breaker(state="open", open_until_ms=NOW + 1), NOW + 1),
        (Breaker(state="open", open_until_ms=NOW), None),
        (Breaker(state="half_open", probe="x:1", probe_until_ms=NOW + 1), NOW + 1),
        (Breaker(state="half_open", probe="x:1", probe_until_ms=NOW), None),
        (Breaker(state="half_open", open_until_ms=NOW + 1), None),
    ],
)
def test_a_breaker_refuses_as_long_as_admission_would(breaker: Breaker, until: int | None) -> None:
    assert refused_until(LoadedBreaker(breaker, "1", NOW, None)) == until


@each_row(
    ("breaker", "until"),
    [
        (Breaker(state="isolated", alone="kA tA"), 0),
        (Breaker(state="open", open_until_ms=NOW + 1), NOW + 1),
        (Breaker(state="open", open_until_ms=NOW + 1, alone="kB tB"), NOW + 1),
        (Breaker(state="open", open_until_ms=NOW + 1, alone="kA tA"), None),
        (Breaker(state="half_open", probe="x:1", probe_until_ms=NOW + 1, alone="kA tA"), None),
        (Breaker(state="open", open_until_ms=NOW + 1, probed_by="kA tA"), None),
        (Breaker(state="half_open", probe="x:1", probe_until_ms=NOW + 1, probed_by="kA tA"), NOW + 1),
    ],
)
def test_what_one_caller_alone_has_opened_refuses_no_job_of_another(breaker: Breaker, until: int | None) -> None:
    assert refused_until(LoadedBreaker(breaker, "1", NOW, None), "kB tB") == until
