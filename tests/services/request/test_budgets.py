"""Budgets over HTTP: how they stand, whether their counters agree with the record, and caps that a person raises."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio
import structlog.testing

from breakwater.config import parse_config
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.state_log import ChangedMeanwhileError
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.kernel.types import NANO_PER_USD, format_time
from breakwater.limits.api.budgets import BudgetRoutes
from breakwater.limits.contract import BudgetEvent, BudgetReconciliation, Reconciliation
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.budget import Periods, periods_at
from breakwater.limits.rules.ledger import AttemptSums, Ledger
from breakwater.limits.rules.scopes import Dimensions
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import FILLED, NotFilledError, period_key
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, StartApi, new_api

BERLIN = ZoneInfo("Europe/Berlin")
ASKED: Any = None  # a request without parameters is not looked at
CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: m}
budgets:
  timezone: Europe/Berlin
  global: {daily_usd: 100, enforcement: hard}
  tenants: {acme: {monthly_usd: 20}, "*": {daily_usd: 1, enforcement: hard}}
  limits:
    - {scope: "key:*", usd: 2, per: week}
    - {scope: "user:* within team:research", usd: 3, per: quarter}
agents:
  writer: {budget: {daily_usd: 10, enforcement: hard}}
  reader: {}
"""
CAPS = parse_config(CONFIG).limit_table
RAISE = {"budget": "agent:writer/daily", "limit_usd": "50.00", "reason": "launch day"}
SUBJECT = subjects.budget("agent", "daily")


@pytest_asyncio.fixture(loop_scope="package")
async def capped(start_api: StartApi, redis: Redis) -> AsyncGenerator[HttpApi]:
    """A plane whose agents have caps, and whose Redis was empty before."""
    async with start_api(CONFIG) as api:
        yield api


def periods() -> Periods:
    return periods_at(datetime.now(UTC), BERLIN)


async def fill(redis: Redis, figures: Ledger | None = None, log: str = "log") -> None:
    counters = BudgetCounters(redis, BERLIN)
    dimensions = Dimensions(CAPS.dimensions)
    filled = counters.fill(
        *(await counters.source(), log, 0, counters.periods(datetime.now(UTC), dimensions), figures or {}, {}),
        dimensions=dimensions,
    )
    assert await filled


async def standing(api: HttpApi, budget: str = "agent:writer/daily") -> dict[str, Any]:
    listed = (await api.ask("GET", "/api/v1/budgets")).json["budgets"]
    [one] = [one for one in listed if one["budget"] == budget]
    return one


async def raise_of(api: HttpApi, limit_id: str = "agents.writer.budget.daily_usd") -> dict[str, Any] | None:
    """The raise as `/api/v1/limits` has it."""
    return (await api.ask("GET", f"/api/v1/limits/{limit_id}")).json["raised"]


async def test_budgets_are_listed_with_whether_their_counters_are_there(capped: HttpApi, redis: Redis) -> None:
    answer = await capped.ask("GET", "/api/v1/budgets")
    assert (answer.status, answer.json["filled"]) == (200, False)
    await fill(redis, {(periods().day.name, "agent:writer"): AttemptSums(spent=4 * NANO_PER_USD, calls=3)})
    answer = await capped.ask("GET", "/api/v1/budgets")
    assert (answer.status, answer.headers["Content-Type"], answer.json["filled"]) == (200, "application/json", True)
    names = [one["budget"] for one in answer.json["budgets"]]
    assert names == [
        f"{key}/{window}"
        for key in ("global", "agent:writer", "agent:reader", "tenant:acme")
        for window in ("daily", "monthly")
    ]
    writer = await standing(capped)
    assert (writer["limit"], writer["spent"], writer["reserved"], writer["remaining"]) == (
        "10.000000000",
        "4.000000000",
        "0.000000000",
        "6.000000000",
    )
    assert (writer["enforcement"], writer["calls"], writer["raised"], writer["estimate"]) == ("hard", 3, None, None)


async def test_budgets_are_listed_in_pages_and_by_their_use(capped: HttpApi, redis: Redis) -> None:
    await fill(redis, {(periods().day.name, "agent:writer"): AttemptSums(spent=8 * NANO_PER_USD, calls=3)})
    whole = (await capped.ask("GET", "/api/v1/budgets")).json
    assert (len(whole["budgets"]), whole["capped"], whole["continue_after"]) == (8, 3, None)
    first = (await capped.ask("GET", "/api/v1/budgets?limit=5")).json
    assert (first["budgets"], first["capped"]) == (whole["budgets"][:5], 3)
    rest = (await capped.ask("GET", f"/api/v1/budgets?limit=5&after={first['continue_after']}")).json
    assert (rest["budgets"], rest["continue_after"]) == (whole["budgets"][5:], None)
    for percent, names in ((80, ["agent:writer/daily"]), (81, [])):
        used = (await capped.ask("GET", f"/api/v1/budgets?used_from={percent}")).json
        assert ([budget["budget"] for budget in used["budgets"]], used["capped"]) == (names, 3)


async def test_what_a_call_is_held_against_can_be_asked_for(capped: HttpApi, redis: Redis) -> None:
    await fill(redis, {(periods().month.name, "agent:gone"): AttemptSums(calls=1)})
    for query, keys in [
        ("agent=writer", ["global", "agent:writer"]),
        ("agent=gone", ["global", "agent:gone"]),
        ("tenant=never%20seen%2Fyet", ["global", "tenant:never seen/yet"]),
        ("tenant=acme&agent=reader", ["global", "agent:reader", "tenant:acme"]),
        ("scope=agent:writer", ["agent:writer"]),
        ("scope=plane", ["global"]),
    ]:
        answer = await capped.ask("GET", f"/api/v1/budgets?{query}")
        assert [one["budget"] for one in answer.json["budgets"]] == [
            f"{key}/{window}" for key in keys for window in ("daily", "monthly")
        ]
    answer = await capped.ask("GET", "/api/v1/budgets?agent=writer&key=bot&user=ann&team=research")
    own = [one["budget"] for one in answer.json["budgets"] if one["scope"] not in ("global", "agent")]
    assert own == ["key:bot/weekly", "user:ann within team:research/quarterly"]
    [new] = [
        one
        for one in (await capped.ask("GET", "/api/v1/budgets?tenant=new")).json["budgets"]
        if one["budget"] == "tenant:new/daily"
    ]
    assert (new["tenant"], new["limit"], new["remaining"]) == ("new", "1.000000000", "1.000000000")


async def test_the_cap_of_any_key_and_of_a_user_in_a_team_is_listed_once_used_and_raised(
    capped: HttpApi, redis: Redis
) -> None:
    week, quarter = periods().of("weekly").name, periods().of("quarterly").name
    await fill(redis, {(week, "key:bot"): AttemptSums(spent=NANO_PER_USD, calls=3)})
    bot = await standing(capped, "key:bot/weekly")
    assert (bot["scope"], bot["name"], bot["within"], bot["period"]) == ("key", "bot", None, week)
    assert (bot["limit"], bot["remaining"]) == ("2.000000000", "1.000000000")
    for budget, period in (("key:new/weekly", week), ("user:ann within team:research/quarterly", quarter)):
        answer = await capped.act("budgets/raise", budget=budget, limit_usd="5", reason="a demo")
        assert (answer.status, answer.json["kind"], answer.json["period"]) == (200, "raised", period)
    assert (answer.json["scope"], answer.json["name"], answer.json["within"]) == ("user", "ann", "team:research")
    for budget, code in (
        ("key:bot/daily", "unknown_budget"),
        ("user:ann within team:sales/quarterly", "unknown_budget"),
    ):
        answer = await capped.act("budgets/raise", budget=budget, limit_usd="5", reason="a demo")
        assert (answer.status, answer.code) == (404, code)


async def test_a_name_that_nobody_has_is_no_filter(capped: HttpApi) -> None:
    answer = await capped.ask("GET", "/api/v1/budgets?agent=writr")
    assert (answer.status, answer.code, answer.paths) == (404, "unknown_agent", ["agent"])
    assert answer.message == "no agent 'writr' is known; did you mean 'writer'?"
    for query, path in [("agent=", "agent"), ("tenant=%0A", "tenant"), (f"tenant={'x' * 129}", "tenant")]:
        answer = await capped.ask("GET", f"/api/v1/budgets?{query}")
        assert (answer.status, answer.code, answer.paths) == (422, "invalid_query", [path])


async def test_a_cap_is_raised_until_its_day_ends_with_who_and_why_on_record(capped: HttpApi, redis: Redis) -> None:
    await fill(redis, {(periods().day.name, "agent:writer"): AttemptSums(spent=NANO_PER_USD * 9, calls=3)})
    day, key_id = periods().day, str(capped.http.headers["Authorization"]).split("_")[1]
    with structlog.testing.capture_logs() as logs:
        answer = await capped.act("budgets/raise", **RAISE)
    assert answer.status == 200
    published = BudgetEvent.model_validate_json(answer.body)
    assert (published.kind, published.scope, published.agent, published.tenant, published.window) == (
        "raised",
        "agent",
        "writer",
        None,
        "daily",
    )
    assert (published.limit, published.previous, published.total) == (
        50 * NANO_PER_USD,
        10 * NANO_PER_USD,
        9 * NANO_PER_USD,
    )
    assert (published.by, published.reason, published.enforcement, published.period) == (
        "tests",
        "launch day",
        "hard",
        day.name,
    )
    assert published.resets_at is not None
    assert published.resets_at.timestamp() * 1000 == day.end_ms
    [change] = await capped.events("bw.limits.>")
    assert published.event_id == f"agent:writer/daily/{day.name}/raised/{change['event_id']}"
    assert await capped.events("bw.budgets.>") == [answer.json]
    assert await capped.events(SUBJECT) == [answer.json]
    stands = await standing(capped)
    assert (stands["limit"], stands["remaining"]) == ("50.000000000", "41.000000000")
    assert stands["raised"] == {
        "amount": "50.000000000",
        "configured": "10.000000000",
        "until": answer.json["resets_at"],
        "scope": "agent:writer",
        "by": "tests",
        "reason": "launch day",
        "at": answer.json["at"],
    }
    assert await raise_of(capped) == stands["raised"] == change["raised"]
    assert (await standing(capped, "agent:writer/monthly"))["limit"] is None
    assert [log for log in logs if log["event"] == "cap_raised"] == [
        {
            "event": "cap_raised",
            "log_level": "info",
            "by": "tests",
            "key_id": key_id,
            "why": "launch day",
            "budget": "agent:writer/daily",
            "limit": "50.000000000",
            "changed": True,
        }
    ]
    fields = await cast(Any, redis.client.hkeys(period_key("daily", day.name)))
    assert not [name for name in fields if name.startswith(("cap:", "raised:"))], "LIMITS alone has it"
    await redis.client.flushall()
    await fill(redis)
    assert (await standing(capped))["raised"] == stands["raised"]


async def test_budgets_of_all_agents_and_of_tenants_can_be_raised(capped: HttpApi, redis: Redis) -> None:
    await fill(redis)
    for budget, limit, agent, tenant in [
        ("global/daily", 200, None, None),
        ("tenant:acme/monthly", 30, None, "acme"),
        ("tenant:new/daily", "1.5", None, "new"),
    ]:
        answer = await capped.act("budgets/raise", budget=budget, limit_usd=limit, reason="x")
        assert (answer.status, answer.json["agent"], answer.json["tenant"]) == (200, agent, tenant), answer.body
        stands = await standing(capped, budget)
        assert (stands["limit"], stands["raised"]["by"]) == (answer.json["limit"], "tests")
    month = await capped.events(subjects.budget("tenant", "monthly"))
    assert [(event["previous"], event["limit"]) for event in month] == [("20.000000000", "30.000000000")]


async def test_to_raise_it_again_to_the_same_changes_nothing(capped: HttpApi, redis: Redis) -> None:
    await fill(redis)
    first = await capped.act("budgets/raise", **RAISE)
    again = await capped.act("budgets/raise", **RAISE | {"reason": "another"})
    assert (again.status, again.json["unchanged"], again.json["raised"]["reason"]) == (200, True, "launch day")
    assert "unchanged" not in first.json
    assert await capped.events(SUBJECT) == [first.json]


async def test_a_raise_is_changed_or_taken_back_by_another(capped: HttpApi, redis: Redis) -> None:
    await fill(redis)
    for limit in ("50", "20", "10"):
        assert (await capped.act("budgets/raise", **RAISE | {"limit_usd": limit})).status == 200
    published = await capped.events(SUBJECT)
    assert [(event["previous"], event["limit"]) for event in published] == [
        ("10.000000000", "50.000000000"),
        ("50.000000000", "20.000000000"),
        ("20.000000000", "10.000000000"),
    ]
    assert len({event["event_id"] for event in published}) == 3
    stands = await standing(capped)
    assert (stands["limit"], stands["raised"], await raise_of(capped)) == ("10.000000000", None, None)
    nothing_to_take_back = await capped.act("budgets/raise", **RAISE | {"limit_usd": "10.000"})
    assert (nothing_to_take_back.status, nothing_to_take_back.json["unchanged"]) == (200, True)


async def test_of_many_who_raise_it_at_once_all_are_on_record_and_the_last_holds(capped: HttpApi, redis: Redis) -> None:
    await fill(redis)
    asked = [capped.act("budgets/raise", **RAISE | {"limit_usd": str(20 + number)}) for number in range(8)]
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {200}
    published = await capped.events(SUBJECT)
    assert {event["limit"] for event in published} == {f"{20 + number}.000000000" for number in range(8)}
    assert (await standing(capped))["limit"] == published[-1]["limit"]


UNKNOWN = [
    ("agent:writr/daily", "did you mean 'agent:writer/daily'?"),
    ("agent:writer/weekly", "did you mean 'agent:writer/daily'?"),
    ("agent:writer", "did you mean 'agent:writer/daily'?"),
    ("tenant:new/yearly", "did you mean 'tenant:new/"),
    ("tenant:*/daily", "name a tenant"),
    ("global", "did you mean 'global/daily'?"),
    ("tenant:/daily", "did you mean"),
    ("?", "known are agent:reader/daily, agent:reader/monthly"),
]


@pytest.mark.parametrize(("budget", "hint"), UNKNOWN)
async def test_a_budget_that_is_not_there_is_answered_with_what_may_be_meant(
    capped: HttpApi, redis: Redis, budget: str, hint: str
) -> None:
    await fill(redis)
    answer = await capped.act("budgets/raise", **RAISE | {"budget": budget})
    assert (answer.status, answer.code, answer.paths) == (404, "unknown_budget", ["budget"])
    assert f"; {hint}" in answer.message or answer.message.endswith(hint)
    assert await capped.events("bw.budgets.>") == []


async def test_what_can_not_be_raised_is_refused_and_nothing_is_reported(capped: HttpApi, redis: Redis) -> None:
    await fill(redis, {(periods().day.name, "agent:gone"): AttemptSums(calls=1)})
    for budget, where in [
        ("agent:reader/daily", "agents.reader.budget.daily_usd"),
        ("agent:gone/daily", "agents.gone.budget.daily_usd"),
        ("global/monthly", "budgets.global.monthly_usd"),
        ("tenant:acme/daily", "budgets.tenants.acme.daily_usd"),
    ]:
        answer = await capped.act("budgets/raise", **RAISE | {"budget": budget})
        assert (answer.status, answer.code, answer.paths) == (409, "no_limit", ["budget"])
        assert where in answer.json["error"]["details"][0]["message"]
    answer = await capped.act("budgets/raise", **RAISE | {"limit_usd": "9.999999999"})
    assert (answer.status, answer.code, answer.paths) == (422, "below_limit", ["limit_usd"])
    assert answer.message == "is below the limit itself ($10.00); a raise is more than that"
    assert await capped.events("bw.budgets.>") == []


async def test_a_body_that_is_wrong_is_refused_with_the_field(capped: HttpApi, redis: Redis) -> None:
    await fill(redis)
    for change, paths in [
        ({"reason": " "}, ["reason"]),
        ({"reason": None}, ["reason"]),
        ({"limit_usd": "much"}, ["limit_usd"]),
        ({"limit_usd": "-1"}, ["limit_usd"]),
        ({"limit_usd": "0.0000000001"}, ["limit_usd"]),
    ]:
        answer = await capped.act("budgets/raise", **RAISE | change)
        assert (answer.status, answer.code, answer.paths) == (422, "invalid_request", paths), answer.body
    without_reason = {name: value for name, value in RAISE.items() if name != "reason"}
    assert (await capped.act("budgets/raise", **without_reason)).paths == ["reason"]
    assert await capped.events("bw.budgets.>") == []


async def test_secrets_in_a_reason_stay_here(capped: HttpApi, redis: Redis) -> None:
    await fill(redis)
    secret = "sk-abcdefghijklmnopqrstuvwx"
    answer = await capped.act("budgets/raise", **RAISE | {"reason": f"key {secret} leaked"})
    assert answer.json["reason"] == "key [REDACTED] leaked"
    assert secret not in str(await capped.events(SUBJECT))
    assert secret not in str(await raise_of(capped))


async def test_the_limit_of_other_tenants_is_not_raised_for_one_that_the_config_names(
    capped: HttpApi, redis: Redis
) -> None:
    await fill(redis)
    body = {"amount": "5", "scope": "tenant:acme", "reason": "x"}
    answer = await capped.ask("POST", "/api/v1/limits/budgets.tenants.*.daily_usd/raise", json=body)
    assert (answer.status, answer.code) == (409, "limit_not_effective")
    assert "'budgets.tenants.*.daily_usd' does not count for 'tenant:acme', and no other limit does" in answer.message


async def test_nothing_is_raised_while_the_counters_are_not_there(capped: HttpApi, redis: Redis) -> None:
    answer = await capped.act("budgets/raise", **RAISE)
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "not_filled", "1")
    assert await capped.events("bw.budgets.>") == []
    assert await raise_of(capped) is None


async def test_a_raise_that_redis_did_not_hear_of_is_in_force_once_it_is_repeated(
    capped: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(redis)

    async def away(*_: object) -> None:
        raise StateUnavailableError("Redis did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(BudgetCounters, "note_limits", away)
        answer = await capped.act("budgets/raise", **RAISE)
    assert (answer.status, answer.code) == (503, "unavailable")
    before = await redis.client.hget(FILLED, "limits")  # type: ignore[misc]
    assert (await capped.act("budgets/raise", **RAISE)).status == 200
    assert await redis.client.hget(FILLED, "limits") != before  # type: ignore[misc]
    assert (await standing(capped))["limit"] == "50.000000000"
    assert len(await capped.events(SUBJECT)) == 1


async def test_raises_that_an_earlier_version_stored_in_redis_are_kept_until_they_end(
    own_nats_server: RunningServer, redis_server: RunningServer, redis: Redis, tmp_path: Path
) -> None:
    await fill(redis)
    raised = {"limit": "50.000000000", "configured": "10.000000000", "by": "ann", "reason": "launch day"}
    raised |= {"at": format_time(datetime.now(UTC))}
    of_former_limit = raised | {"configured": "9.000000000"}
    for key, stored in (("agent:writer", raised), ("tenant:new", of_former_limit), ("agent:gone", raised)):
        document = {f"raised:{key}": json.dumps(stored), f"cap:{key}": "50000000000:10000000000"}
        await cast(Any, redis.client.hset(period_key("daily", periods().day.name), mapping=document))
    async with new_api(own_nats_server.url, redis_server.url, tmp_path, CONFIG) as api:

        async def is_forgotten() -> bool:
            fields = await cast(Any, redis.client.hkeys(period_key("daily", periods().day.name)))
            return not [name for name in fields if name.startswith(("cap:", "raised:"))]

        await until(is_forgotten)
        stands = await standing(api)
        assert (stands["limit"], stands["raised"]["by"], stands["raised"]["at"]) == (
            *("50.000000000", "ann", raised["at"]),
        )
        assert stands["raised"]["until"] == stands["resets_at"]
        [change] = await api.events("bw.limits.>")
        assert (change["limit_id"], change["reason"]) == ("agents.writer.budget.daily_usd", "launch day")
        assert await redis.client.hget(FILLED, "limits")  # type: ignore[misc]


async def test_stored_raises_of_one_limit_survive_that_several_processes_move_them_at_once(
    own_nats_server: RunningServer,
    redis_server: RunningServer,
    redis: Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill(redis)
    day = period_key("daily", periods().day.name)
    raised = {"limit": "50.000000000", "configured": "1.000000000", "by": "ann", "reason": "launch day"}
    raised |= {"at": format_time(datetime.now(UTC))}
    for key in ("tenant:one", "tenant:two"):
        await cast(Any, redis.client.hset(day, f"raised:{key}", json.dumps(raised)))
    change = LimitLog.change

    async def change_meanwhile(self: LimitLog, *_: object) -> object:
        monkeypatch.setattr(LimitLog, "change", change)
        raise ChangedMeanwhileError

    monkeypatch.setattr(LimitLog, "change", change_meanwhile)
    async with new_api(own_nats_server.url, redis_server.url, tmp_path, CONFIG) as api:

        async def is_forgotten() -> bool:
            return not [name for name in await cast(Any, redis.client.hkeys(day)) if name.startswith("raised:")]

        await until(is_forgotten)
        for tenant in ("one", "two"):
            assert (await standing(api, f"tenant:{tenant}/daily"))["limit"] == "50.000000000", tenant


def routes(redis: Redis, compare: Callable[[], Awaitable[Reconciliation]]) -> BudgetRoutes:
    def nobody() -> Any:
        raise BusUnavailableError("NATS is not connected")

    publisher, counters = Publisher(nobody, "request"), BudgetCounters(redis, BERLIN)
    log: Any = None
    editor = LimitEditor((), {}, log, lambda: CAPS, counters, publisher, log)
    return BudgetRoutes(lambda: CAPS, counters, editor, compare)


async def test_counters_and_record_are_answered_whether_they_agree_or_not(redis: Redis) -> None:
    budget = BudgetReconciliation(
        budget="global/daily",
        period="2026-11-21",
        counted=5,
        recorded=4,
        stored=3,
        logged=1,
        unrecorded=0,
        difference=1,
        counted_calls=2,
        recorded_calls=1,
    )
    reconciliation = Reconciliation(
        equal=False, budgets=(budget,), reserved=0, held=0, at=datetime(2026, 11, 21, tzinfo=UTC)
    )

    async def compare() -> Reconciliation:
        return reconciliation

    assert await routes(redis, compare).reconcile_budgets(ASKED) == reconciliation


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StateUnavailableError("Redis did not answer"), "unavailable", "can't be compared now: Redis did not answer"),
        (BusUnavailableError("NATS did not answer"), "unavailable", "NATS did not answer"),
        (AnalyticsUnavailableError("ClickHouse did not answer"), "unavailable", "ClickHouse did not answer"),
        (QueryError(60, "no such table"), "unavailable", "no such table"),
        (NotFilledError(), "not_filled", "the counters are being rebuilt"),
    ],
)
async def test_counters_that_can_not_be_compared_now_are_said_to_be_so(
    redis: Redis, error: Exception, code: str, said: str
) -> None:
    async def compare() -> Reconciliation:
        raise error

    with pytest.raises(RequestError) as raised:
        await routes(redis, compare).reconcile_budgets(ASKED)
    assert (raised.value.status, raised.value.code, raised.value.headers["Retry-After"]) == (503, code, "1")
    assert said in raised.value.message
