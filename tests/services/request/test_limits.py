"""`/api/v1/limits`: limits that the API sets, deletes and raises, with what of them is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote
from zoneinfo import ZoneInfo

import pytest

from breakwater.config import LiveConfig, parse_config
from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.kernel.types import NANO_PER_USD, format_time
from breakwater.limits.contract import LimitRecord, LimitSettings
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.budget import Periods, periods_at
from breakwater.limits.rules.ledger import AttemptSums, Ledger
from breakwater.limits.rules.limit import limit_of
from breakwater.limits.rules.rate_limit import rate_limits_of
from breakwater.limits.rules.scopes import CallNames, Dimension, Dimensions
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import FILLED, Budgets
from tests.helpers import until
from tests.services.request.conftest import GOVERNED, Answer, HttpApi, running, settings_for

UTC_ZONE = ZoneInfo("UTC")
BOT = "key:acme-bot.usd.month"
A_MONTH: dict[str, Any] = {"scope": "key:acme-bot", "usd": 20, "per": "month"}
WRITER = "agents.writer.budget.daily_usd"


def now() -> Periods:
    return periods_at(datetime.now(UTC), UTC_ZONE)


async def fill(redis: Redis, figures: Ledger | None = None, *counted: Dimension) -> None:
    counters = BudgetCounters(redis, UTC_ZONE)
    dimensions = Dimensions(frozenset(counted))
    periods = counters.periods(datetime.now(UTC), dimensions)
    assert await counters.fill(await counters.source(), "log", 0, periods, figures or {}, {}, dimensions=dimensions)


async def put(api: HttpApi, limit_id: str, /, **body: Any) -> Answer:
    return await api.ask("PUT", f"/api/v1/limits/{limit_id}", json=body)


async def show(api: HttpApi, limit_id: str) -> dict[str, Any]:
    answer = await api.ask("GET", f"/api/v1/limits/{limit_id}")
    assert answer.status == 200, answer.body
    return answer.json


def in_s(seconds: float) -> str:
    return format_time(datetime.now(UTC) + timedelta(seconds=seconds))


async def test_a_limit_is_made_changed_raised_and_deleted_by_the_api_and_each_change_is_recorded(
    governed: HttpApi, redis: Redis
) -> None:
    month = now().month
    spent = {(month.name, "key:acme-bot"): AttemptSums(spent=5 * NANO_PER_USD, calls=1)}
    await fill(redis, spent, Dimension(("key",), "monthly"))
    made = await put(governed, BOT, **A_MONTH, reason="pilot")
    assert (made.status, made.json["source"], made.json["usd"]) == (200, "api", "20.000000000"), made.body
    assert [made.json[name] for name in ("used", "reserved", "remaining", "per", "action", "by", "reason")] == [
        *("5.000000000", "0.000000000", "15.000000000", "month", "refuse", "tests", "pilot")
    ]
    assert await show(governed, BOT) == made.json
    again = await put(governed, BOT, **A_MONTH, reason="another")
    assert again.json == made.json, "setting a limit as it is changes nothing"
    changed = (await put(governed, BOT, **A_MONTH | {"usd": "30.5", "action": "alert", "thresholds": [90]})).json
    assert [changed[name] for name in ("amount", "action", "thresholds")] == ["30.500000000", "alert", [90]]

    raised = await governed.act(f"limits/{BOT}/raise", amount=40, reason="launch")
    assert raised.json["raised"]["until"] == raised.json["resets_at"], "by default it ends with the period"
    assert (raised.json["amount"], raised.json["usd"], raised.json["remaining"]) == (
        *("40.000000000", "30.500000000", "35.000000000"),
    )
    ended = (await governed.act(f"limits/{BOT}/raise", amount="30.50", reason="over")).json
    assert (ended["raised"], ended["amount"]) == (None, "30.500000000")
    await governed.act(f"limits/{BOT}/raise", amount="99", until=in_s(3600), reason="once more")
    assert (await put(governed, BOT, **A_MONTH)).json["raised"] is None, "a raise ends with the amount that it raised"
    deleted = await governed.ask("DELETE", f"/api/v1/limits/{BOT}?reason=done")
    assert (deleted.status, deleted.json["kind"], deleted.json["reason"]) == (200, "deleted", "done")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/raise")):
        body = {"json": {"amount": 1, "reason": "x"}} if method == "POST" else {}
        gone = await governed.ask(method, f"/api/v1/limits/{BOT}{path}", **body)
        assert (gone.status, gone.code) == (404, "unknown_limit")

    events = await governed.events("bw.limits.>")
    assert [event["kind"] for event in events] == [
        *("created", "changed", "raised", "raise_ended", "raised", "changed", "deleted")
    ]
    assert {event["by"] for event in events} == {"tests"}
    first, second, third, *_, last = events
    assert (first["before"], first["after"]["usd"], first["reason"]) == (None, "20.000000000", "pilot")
    assert (second["before"]["usd"], second["after"]["usd"]) == ("20.000000000", "30.500000000")
    assert (third["raised"]["amount"], third["raised"]["reason"]) == ("40.000000000", "launch")
    assert (last["before"]["usd"], last["after"]) == ("20.000000000", None)
    budget_events = [event["kind"] for event in await governed.events("bw.budgets.key.monthly")]
    assert budget_events == ["raised", "raise_ended", "raised"], "alerts and costs go by the events of budgets"
    audit = [event for event in await governed.audit() if event["outcome"] == "done"]
    assert [event["action"] for event in audit[:2]] == ["set_limit", "set_limit"]
    assert (audit[0]["by"], audit[0]["reason"], audit[0]["details"]["limit_id"]) == ("tests", "pilot", BOT)
    assert audit[-1]["action"] == "delete_limit"
    [message] = [message async for message in Lookup(lambda: governed.bus).scan(Stream.LIMITS, "bw.limit-settings.*")]
    assert LimitRecord.model_validate_json(message.data).limit is None
    assert message.headers["Nats-TTL"] == str(30 * 86_400), "the server forgets a deleted limit after a month"


async def test_a_limit_of_the_config_can_only_be_raised(governed: HttpApi, redis: Redis) -> None:
    await fill(redis)
    for method in ("PUT", "DELETE"):
        body = {"json": A_MONTH} if method == "PUT" else {}
        refused = await governed.ask(method, f"/api/v1/limits/{WRITER}", **body)
        # An id of a setting that is not in the config could be one tomorrow.
        assert (refused.status, refused.code) == (409, "limit_from_config"), refused.body
        assert "can only be raised" in refused.message
    raised = await governed.act(f"limits/{WRITER}/raise", amount="25", reason="launch")
    assert (raised.status, raised.json["amount"], raised.json["usd"]) == (200, "25.000000000", "10.000000000")
    assert raised.json["source"] == "config"
    listed = (await governed.ask("GET", "/api/v1/budgets?agent=writer")).json["budgets"]
    [daily] = [budget for budget in listed if budget["budget"] == "agent:writer/daily"]
    assert (daily["limit"], daily["raised"]["by"]) == ("25.000000000", "tests")
    of_tasks = await governed.act("limits/agents.writer.guard.max_cost_usd/raise", amount="25", reason="launch")
    assert (of_tasks.status, of_tasks.code, "in the config" in of_tasks.message) == (409, "not_raisable", True)
    again = await governed.act(f"limits/{WRITER}/raise", amount="25", reason="launch")
    assert again.json == raised.json
    assert [event["kind"] for event in await governed.events("bw.limits.>")] == ["raised"]


async def test_raising_a_budget_raises_its_limit(governed: HttpApi, redis: Redis) -> None:
    await fill(redis)

    async def raised() -> tuple[str, str | None]:
        listed = (await governed.ask("GET", "/api/v1/budgets?agent=writer")).json["budgets"]
        [daily] = [budget for budget in listed if budget["budget"] == "agent:writer/daily"]
        limit = await show(governed, WRITER)
        assert (limit["amount"], limit["raised"]) == (daily["limit"], daily["raised"])
        return daily["limit"], daily["raised"] and daily["raised"]["reason"]

    await governed.act(f"limits/{WRITER}/raise", amount="10", reason="of another test")
    await governed.act("budgets/raise", budget="agent:writer/daily", limit_usd="100", reason="a sale")
    assert await raised() == ("100.000000000", "a sale")
    await governed.act(f"limits/{WRITER}/raise", amount="25", until=in_s(60), reason="launch")
    assert await raised() == ("25.000000000", "launch")
    more = await governed.act("budgets/raise", budget="agent:writer/daily", limit_usd="200", reason="more")
    assert (more.status, more.json["previous"], more.json["limit"]) == (200, "25.000000000", "200.000000000")
    assert await raised() == ("200.000000000", "more")
    await governed.act(f"limits/{WRITER}/raise", amount="10", reason="over")
    assert await raised() == ("10.000000000", None)
    kinds = ["raised", "raised", "raised", "raise_ended"]
    assert [event["kind"] for event in await governed.events("bw.limits.>")][-4:] == kinds
    assert [event["kind"] for event in await governed.events("bw.budgets.>")][-4:] == kinds


async def test_bad_input_is_refused_in_words_and_changes_nothing(
    governed: HttpApi, redis: Redis, subtests: pytest.Subtests
) -> None:
    month = now().month
    counted = (Dimension(("key",), "monthly"), Dimension(("user", "team"), "weekly"))
    await fill(redis, {(month.name, "key:busy"): AttemptSums(spent=31_200_000_000, calls=7, tokens=5_000)}, *counted)
    await put(governed, "taken", scope="user:ann within team:research", usd=1, per="week")
    rows: list[tuple[str, dict[str, Any], int, str, str]] = [
        ("x", {**A_MONTH, "scope": "key:busy"}, 422, "below_spent", "has spent $31.20 in"),
        ("x", {**A_MONTH, "scope": "key:*"}, 422, "below_spent", "key:busy has spent $31.20"),
        ("x", {"scope": "key:*", "tokens": 4999, "per": "month"}, 422, "below_spent", "key:busy has used 5,000 tokens"),
        ("x", {"scope": "key:busy", "requests": 6, "per": "month"}, 422, "below_spent", "has used 7 requests in"),
        ("x", {**A_MONTH, "scope": "galaxy"}, 422, "invalid_request", "'galaxy' is no scope"),
        ("x", {**A_MONTH, "scope": "agent:wrter"}, 422, "invalid_request", "did you mean 'writer'"),
        ("x", {**A_MONTH, "scope": "provider:lokal"}, 422, "invalid_request", "no provider 'lokal'"),
        ("x", {**A_MONTH, "scope": "model:gpt"}, 422, "invalid_request", "no model 'gpt'"),
        ("x", {**A_MONTH, "scope": "tag:project=web"}, 422, "invalid_request", "none of cost_tags"),
        ("x", {**A_MONTH, "scope": "key:a*"}, 422, "invalid_request", "no wildcards"),
        ("x", {**A_MONTH, "gallons": 1}, 422, "invalid_request", "gallons"),
        ("x", {"scope": "key:a", "per": "month"}, 422, "invalid_request", "exactly one of usd, tokens"),
        ("x", {**A_MONTH, "tokens": 1}, 422, "invalid_request", "exactly one of usd, tokens"),
        ("x", {"scope": "key:a", "usd": 1}, 422, "invalid_request", "per: is missing"),
        ("x", {"scope": "key:a", "concurrent": 1, "per": "day"}, 422, "invalid_request", "leave it out"),
        ("x", {**A_MONTH, "per": "fortnight"}, 422, "invalid_request", "per"),
        ("x", {**A_MONTH, "per": "total", "action": "wait"}, 422, "invalid_request", "a total never resets"),
        ("x", {"scope": "key:a", "tokens": 9, "per": "month", "action": "alert"}, 422, "invalid_request", "can alert"),
        ("x", {**A_MONTH, "usd": "1" * 30}, 422, "invalid_request", "more than a billion"),
        ("x", {**A_MONTH, "usd": 10**30}, 422, "invalid_request", "more than a billion"),
        ("x", {**A_MONTH, "usd": "1e999999"}, 422, "invalid_request", "usd"),
        ("x", {**A_MONTH, "usd": "0.1234567891"}, 422, "invalid_request", "nano-dollar"),
        ("x", {**A_MONTH, "usd": -1}, 422, "invalid_request", "negative"),
        ("x", {"scope": "key:a", "tokens": 10**30, "per": "minute"}, 422, "invalid_request", "tokens"),
        ("x", {**A_MONTH, "until": in_s(-1)}, 422, "invalid_request", "by the clock of the plane it is"),
        ("x", {**A_MONTH, "until": "tomorrow"}, 422, "invalid_request", "until"),
        ("agents.x", A_MONTH, 422, "invalid_request", "settings in the config"),
        ("n" * 129, A_MONTH, 422, "invalid_request", "1 to 128 characters"),
        ("x", {"scope": "agent:writer", "usd": 1, "per": "day"}, 409, "limit_exists", f"'{WRITER}'"),
        ("x", {"scope": "user:ann within team:research", "usd": 2, "per": "week"}, 409, "limit_exists", "'taken'"),
        ("x", {"scope": "team:research within user:ann", "usd": 2, "per": "week"}, 409, "limit_exists", "'taken'"),
        ("taken/raise", {"amount": 0, "reason": "x"}, 422, "below_limit", "$1.00"),
        ("taken/raise", {"amount": 2, "until": in_s(-1), "reason": "x"}, 422, "invalid_request", "is over"),
        ("taken/raise", {"amount": 2, "reason": ""}, 422, "invalid_request", "reason"),
        ("taken/raise", {"amount": "9" * 30, "reason": "x"}, 422, "invalid_request", "amount"),
        ("taken/raise", {"amount": 2, "scope": "user:bo", "reason": "x"}, 422, "invalid_request", "is no name of"),
    ]
    before = (await governed.ask("GET", "/api/v1/limits")).json
    assert [(tried["id"], tried["amount"], tried["used"], tried["refused"]) for tried in before["tried"]] == [
        ("shadow.limits.0", "3.000000000", "0.000000000", 0)
    ]
    for limit_id, body, status, code, words in rows:
        with subtests.test(f"{limit_id} {body}"):
            method = "POST" if limit_id.endswith("/raise") else "PUT"
            answer = await governed.ask(method, f"/api/v1/limits/{limit_id}", json=body)
            assert (answer.status, answer.code) == (status, code), answer.body
            assert words in answer.message
    assert (await governed.ask("GET", "/api/v1/limits")).json == before
    stopped = await put(governed, "x", **A_MONTH | {"scope": "key:busy"}, stop=True)
    assert (stopped.status, stopped.json["remaining"]) == (200, "0.000000000")


async def test_more_limits_than_may_meet_one_call_are_refused_with_their_number(governed: HttpApi) -> None:
    kinds = ("plane", *(f"{kind}:*" for kind in ("agent", "model", "provider", "tenant", "key", "user", "team")))
    scopes = [*kinds, *(f"{first} within {second}" for first, second in combinations(kinds[1:], 2))]
    refused: dict[str, list[str]] = {"day": [], "total": [], "minute": []}
    made: dict[str, int] = dict.fromkeys(refused, 0)
    for per, refusals in refused.items():
        for scope in scopes:
            answer = await put(governed, f"{per}.{quote(scope)}", scope=scope, requests=9, per=per, stop=True)
            assert answer.status == 200 or answer.code == "too_many_dimensions", answer.body
            made[per] += answer.status == 200
            if answer.status == 409:
                refusals.append(answer.message)
    # The plane, agents and tenants are counted by day anyhow; a rate is one combination in any window.
    assert made["day"] + made["total"] == 20 + 3
    assert made["minute"] <= 20
    for refusals in refused.values():
        assert refusals
        assert all("at most 20 are allowed" in message for message in refusals)
    again = await put(governed, "again", scope="plane", tokens=9, per="day", stop=True)
    assert again.status == 200, "another unit of the same needs no further counters"


async def test_limits_are_listed_in_pages_with_their_use_and_by_scope_and_kind(governed: HttpApi, redis: Redis) -> None:
    await fill(redis, {}, Dimension(("key",), "monthly"))
    for number in range(5):
        await put(governed, f"limit-{number}", scope=f"key:k{number}", usd=number + 1, per="month")
    await put(governed, "of-each", scope="user:* within team:research", usd=1, per="day", stop=True)

    async def ids(query: str) -> list[str]:
        found: list[str] = []
        after = ""
        while True:
            page = (await governed.ask("GET", f"/api/v1/limits?{query}{after}")).json
            found += [limit["id"] for limit in page["limits"]]
            if page["continue_after"] is None:
                return found
            after = f"&after={quote(page['continue_after'], safe='')}"

    every = await ids("limit=2")
    of_api = [*(f"limit-{number}" for number in range(5)), "of-each"]
    assert every[-6:] == of_api
    assert {WRITER, "agents.never.budget.daily_usd", "agents.writer.guard.max_iterations"} < set(every)
    assert await ids("limit=1000") == every
    assert await ids("scope=key:k3&limit=1") == ["limit-3"]
    assert await ids("kind=team") == await ids("scope=team:research") == await ids("scope=user:*") == ["of-each"]
    assert set(await ids("kind=key")) == set(of_api[:-1])
    assert (await governed.ask("GET", "/api/v1/limits?kind=galaxy")).status == 422
    each = await show(governed, "of-each")
    assert (each["used"], each["remaining"]) == (None, None)
    one = await show(governed, "of-each?scope=user:ann%20within%20team:research")
    assert one["used"] is None, "nobody counts it yet"
    raised = {"amount": 3, "scope": "user:ann within team:research", "reason": "x"}
    assert (await governed.act("limits/of-each/raise", **raised)).code == "not_filled"
    missing = await governed.act("limits/of-each/raise", amount=3, reason="x")
    assert (missing.status, "whose limit" in missing.message) == (422, True)


async def test_limits_on_rates_are_shown_with_what_counts_now(governed: HttpApi, redis: Redis) -> None:
    rates: dict[str, dict[str, Any]] = {
        "by-minute": {"requests": 5, "per": "minute"},
        "by-hour": {"tokens": 1000, "per": "hour", "action": "wait"},
        "at-once": {"concurrent": 3},
    }
    for limit_id, rate in rates.items():
        await put(governed, limit_id, scope="key:acme-bot", **rate)
    names, limits = CallNames("writer", key="acme-bot"), []
    for limit_id, rate in rates.items():
        limits.append(limit_of(limit_id, LimitSettings(scope="key:acme-bot", **rate)))
    budgets, of_call = Budgets(redis, UTC_ZONE), rate_limits_of("key:acme-bot", limits)
    reserve = partial(budgets.reserve_command, now=datetime.now(UTC), lease_ms=60_000, tokens=300, rates=of_call)
    await redis.run([reserve(f"call-{number}", names, 0, ()) for number in (1, 2)])
    for limit_id, used, remaining in (("by-minute", "2", "3"), ("by-hour", "600", "400"), ("at-once", "2", "1")):
        shown = await show(governed, limit_id)
        assert (shown["used"], shown["reserved"], shown["remaining"]) == (used, None, remaining)
    page = (await governed.ask("GET", "/api/v1/limits?scope=key:acme-bot")).json["limits"]
    assert {limit["id"]: limit["used"] for limit in page} == {"at-once": "2", "by-hour": "600", "by-minute": "2"}


async def test_a_caller_who_is_bound_to_a_team_limits_parts_of_it_alone(governed: HttpApi) -> None:
    await put(governed, "of-the-team", scope="team:search", usd=1, per="day", stop=True)
    keys = {
        name: (await governed.act("keys", name=f"bound-{name}", **fields)).json["key"]  # others have these names
        for name, fields in {
            "lead": {"scopes": ["submit", "limits"], "team": "search"},
            "ann": {"scopes": ["submit", "limits", "approve"], "user": "ann"},
            "reader": {"scopes": ["read"]},
            "approver": {"scopes": ["approve"]},
        }.items()
    }

    async def ask(name: str, method: str, path: str, **body: Any) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        sent = {} if method in ("GET", "DELETE") else {"json": body}
        answer = await governed.ask(method, f"/api/v1/limits{path}", headers=headers, **sent)
        return answer.status, "" if answer.status == 200 else answer.message

    for path, scope in (
        ("/x", "team:search"),
        ("/x", "team:ads"),
        ("/x", "plane"),
        ("/of-the-team", "team:search"),
    ):
        status, words = await ask("lead", "PUT", path, scope=scope, usd=9, per="day")
        assert (status, "'bound-lead' is bound to team:search" in words) == (403, True)
    assert (await ask("lead", "DELETE", "/of-the-team"))[0] == 403
    assert (await ask("lead", "POST", "/of-the-team/raise", amount=9, reason="x"))[0] == 403
    assert await ask("lead", "PUT", "/own", scope="user:* within team:search", usd=1, per="day", stop=True) == (200, "")
    # Her own cap: neither a more particular limit nor a raise may loosen it.
    hers = "user:ann within team:search"
    status, words = await ask("ann", "PUT", "/hers", scope=hers, usd=99, per="day", stop=True)
    assert (status, "'bound-ann' is bound to user:ann" in words) == (403, True)
    assert await ask("ann", "PUT", "/hers", scope=hers, usd="0.5", per="day", stop=True) == (200, "")
    assert await ask("ann", "DELETE", "/hers") == (200, "")
    assert (await ask("ann", "POST", "/own/raise", scope=hers, amount=99, reason="x"))[0] == 403
    cap = {"budget": "agent:writer/daily", "limit_usd": "999", "reason": "x"}
    of_ann = {"Authorization": f"Bearer {keys['ann']}"}
    raised = await governed.ask("POST", "/api/v1/budgets/raise", json=cap, headers=of_ann)
    assert (raised.status, "'bound-ann' is bound to user:ann" in raised.message) == (403, True)
    assert await ask("lead", "PUT", "/hers", scope=hers, usd=99, per="day", stop=True) == (200, "")
    assert [await ask("lead", "DELETE", path) for path in ("/hers", "/own")] == [(200, "")] * 2
    assert [(await ask("reader", method, "/of-the-team"))[0] for method in ("GET", "DELETE")] == [200, 403]
    assert (await ask("approver", "POST", "/nothing/raise", amount=9, reason="x"))[0] == 404, "who may raise limits"


async def test_a_raise_of_a_limit_that_a_more_particular_one_replaces_is_refused(
    governed: HttpApi, redis: Redis
) -> None:
    await fill(redis, None, Dimension(("key",), "monthly"))
    rows = ({"requests": 5, "per": "minute"}, {"concurrent": 2}, {"usd": 20, "per": "month"})
    for number, amount in enumerate(rows):
        await put(governed, f"each-{number}", scope="key:*", **amount)
        await put(governed, f"own-{number}", scope="key:own-bot", **amount)
        raised = {"amount": 50, "until": in_s(60), "reason": "launch"}
        refused = await governed.act(f"limits/each-{number}/raise", scope="key:own-bot", **raised)
        assert (refused.status, refused.code) == (409, "limit_not_effective"), refused.body
        assert f"the limit 'own-{number}' counts instead; raise that one" in refused.message
        assert (await governed.act(f"limits/each-{number}/raise", scope="key:other", **raised)).status == 200
        assert (await governed.act(f"limits/own-{number}/raise", **raised)).status == 200


async def test_what_is_repeated_long_after_the_change_publishes_nothing(
    governed: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(redis, None, Dimension(("key",), "monthly"))
    a_month = A_MONTH | {"scope": "key:late-bot"}
    await put(governed, "late", **a_month)
    raised = {"amount": 30, "until": in_s(7200), "reason": "launch"}
    before = (await governed.act("limits/late/raise", **raised)).json
    jetstream = governed.bus.jetstream()
    config = (await jetstream.stream_info("EVENTS")).config
    config.duplicate_window = 0.1  # as if a day had passed
    await jetstream.update_stream(config)
    await asyncio.sleep(0.2)
    later = datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr("breakwater.limits.api.limits.utc_now", lambda: later)
    assert (await put(governed, "late", **a_month)).json == before
    assert (await governed.act("limits/late/raise", **raised)).json == before
    assert [event["kind"] for event in await governed.events("bw.limits.>")] == ["created", "raised"]
    assert [event["kind"] for event in await governed.events("bw.budgets.>")] == ["raised"]


async def test_a_change_is_in_every_process_and_survives_an_empty_redis_and_a_restart(
    governed: HttpApi, redis: Redis, tmp_path: Path
) -> None:
    urls = (governed.settings.nats_url.get_secret_value(), governed.settings.redis_url.get_secret_value())
    settings = settings_for(*urls, tmp_path)
    async with running(settings, parse_config(GOVERNED), create_key(settings.api_keys_file, "tests")) as second:
        answers = await asyncio.gather(
            *(
                put(api, f"limit-{number}", scope=f"key:{number}", usd=1, per="day", stop=True)
                for number in range(4)
                for api in (governed, second)
            )
        )
        assert {answer.status for answer in answers} <= {200, 409}
        assert {answer.code for answer in answers if answer.status == 409} <= {"limit_changed"}
        versions = [str(await redis.client.hget(FILLED, "limits"))]  # type: ignore[misc]
        changed = await put(second, "limit-0", scope="key:0", usd=2, per="day", stop=True)
        versions.append(str(await redis.client.hget(FILLED, "limits")))  # type: ignore[misc]
        assert changed.status == 200
        [before, after] = [int(version.rpartition("/")[2]) for version in versions]
        assert after == before + 1, "no call is admitted under older limits once the response is there"
        for _ in range(5):
            assert (await governed.ask("DELETE", "/api/v1/limits/limit-3")).status == 200
            moved = await put(second, "moved", scope="key:3", usd=1, per="day", stop=True)
            assert moved.status == 200, "it is judged by what others have just changed"
            raised = await governed.act("limits/moved/raise", amount=2, until=in_s(60), reason="launch")
            assert raised.code == "not_filled", "it is there"
            assert (await governed.ask("DELETE", "/api/v1/limits/moved")).status == 200
            again = await put(second, "limit-3", scope="key:3", usd=1, per="day", stop=True)
            assert again.status == 200
    await redis.client.flushall()
    async with running(settings, parse_config(GOVERNED), create_key(settings.api_keys_file, "again")) as again:
        listed = (await again.ask("GET", "/api/v1/limits?kind=key")).json["limits"]
        assert [(limit["id"], limit["usd"]) for limit in listed] == [
            (f"limit-{number}", f"{usd}.000000000") for number, usd in enumerate((2, 1, 1, 1))
        ]


async def test_a_change_whose_end_was_not_told_is_in_force_and_recorded_once_it_is_repeated(
    governed: HttpApi, redis: Redis
) -> None:
    await fill(redis, None, Dimension(("key",), "monthly"))
    await put(governed, "first", **A_MONTH | {"scope": "key:first"})

    def break_once(owner: type, name: str, error: Exception) -> None:
        async def fail(*_: object, **__: object) -> None:
            undo.undo()
            raise error

        undo = pytest.MonkeyPatch()
        undo.setattr(owner, name, fail)

    async def sequence_in_force() -> int:
        return int(str(await cast(Any, redis.client.hget(FILLED, "limits"))).rpartition("/")[2])

    away = (BudgetCounters, "note_limits", StateUnavailableError("Redis does not answer"))
    cut_off = (LimitEditor, "_tell", BusUnavailableError("NATS does not answer"))
    for failure in (away, cut_off):
        for method, path, body, repeated in (
            ("PUT", BOT, A_MONTH, 200),
            ("POST", f"{BOT}/raise", {"amount": "30", "reason": "launch"}, 200),
            ("POST", f"{BOT}/raise", {"amount": "20", "reason": "over"}, 200),
            ("DELETE", BOT, {}, 404),
        ):
            before = await sequence_in_force()
            break_once(*failure)
            answers = [await governed.ask(method, f"/api/v1/limits/{path}", json=body) for _ in range(2)]
            assert [answer.status for answer in answers] == [503, repeated]
            assert await sequence_in_force() == before + 1
    kinds = ["created", "raised", "raise_ended", "deleted"]
    assert [event["kind"] for event in await governed.events("bw.limits.>")] == ["created", *kinds, *kinds]
    budgets = await governed.events("bw.budgets.>")
    assert [event["kind"] for event in budgets] == 2 * ["raised", "raise_ended"]


async def test_a_change_whose_process_died_is_told_of_by_the_next_that_starts(
    governed: HttpApi, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(redis, None, Dimension(("key",), "monthly"))
    await put(governed, BOT, **A_MONTH)

    async def die(*_: object) -> None:
        raise BusUnavailableError("as if the process had died")

    with monkeypatch.context() as dead:
        dead.setattr(LimitEditor, "_tell", die)
        assert (await put(governed, BOT, **A_MONTH | {"usd": 30})).status == 503
        assert (await put(governed, "deleted", scope="key:other", usd=1, per="day", stop=True)).status == 503
        assert (await governed.ask("DELETE", "/api/v1/limits/deleted", json={})).status == 503
        assert (await governed.act(f"limits/{BOT}/raise", amount="40", reason="launch")).status == 503
    assert len(await governed.events("bw.limits.>")) == 1
    monkeypatch.setattr("breakwater.limits.limit_editor.TOLD_WITHIN", timedelta(seconds=0.2))
    urls = (governed.settings.nats_url.get_secret_value(), governed.settings.redis_url.get_secret_value())
    settings = settings_for(*urls, tmp_path)

    async def is_told() -> bool:
        return len(await governed.events("bw.limits.>")) >= 3

    async with running(settings, parse_config(GOVERNED), create_key(settings.api_keys_file, "tests")):
        await until(is_told, "the changes that were not told of")
        await asyncio.sleep(0.6)
    first, *events = await governed.events("bw.limits.>")
    assert first["kind"] == "created"
    assert sorted((event["limit_id"], event["kind"], event["by"]) for event in events) == [
        ("deleted", "deleted", "tests"), (BOT, "raised", "tests"),
    ], "the last change of each limit, once"  # fmt: skip
    [raised] = await governed.events("bw.budgets.>")
    assert [raised[name] for name in ("kind", "limit", "previous", "configured", "reason")] == [
        *("raised", "40.000000000", "30.000000000", "30.000000000", "launch")
    ]


async def test_what_was_told_of_is_neither_told_nor_read_again_with_each_change(
    governed: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[str] = []
    reads: list[int] = []

    class CountingLookup(Lookup):
        async def scan(self, stream: Stream, *args: Any, **options: Any) -> AsyncGenerator[StoredMessage]:
            reads.append(0)
            async with aclosing(super().scan(stream, *args, **options)) as messages:
                async for message in messages:
                    reads[-1] += 1
                    yield message

    class CountingPublisher(Publisher):
        async def event(self, subject: str, *args: Any, **options: Any) -> Any:
            published.append(subject)
            return await super().event(subject, *args, **options)

    await fill(redis)
    for number in range(9):
        assert (await put(governed, f"limit-{number}", scope=f"key:k{number}", requests=1, per="minute")).status == 200
    publisher = CountingPublisher(lambda: governed.bus, "request")
    log = LimitLog(lambda: governed.bus, publisher)
    live = LiveConfig(parse_config(GOVERNED))
    log.feed(live.change_limits)
    nothing: Any = None
    editor = LimitEditor((), {}, log, live.limits, BudgetCounters(redis, UTC_ZONE), publisher, nothing)
    monkeypatch.setattr("breakwater.limits.limit_editor.TOLD_WITHIN", timedelta(seconds=0.2))
    await asyncio.sleep(0.4)
    await log.catch_up()
    telling = asyncio.create_task(editor.keep_told(CountingLookup(lambda: governed.bus)))
    try:
        await until(lambda: len(reads) >= 4, "the first two looks")
        assert reads[0] == 9, "all events of limits"
        await asyncio.sleep(0.4)
        reads.clear()
        assert (await put(governed, "limit-0", scope="key:k0", requests=2, per="minute")).status == 200
        await log.catch_up()
        await until(lambda: len(reads) >= 4, "the looks after a change")
        assert max(reads) <= 1, reads
        assert published == []
    finally:
        await background.stop(telling)


async def test_a_change_whose_process_died_is_told_of_with_the_next_change(
    governed: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(redis, None, Dimension(("key",), "monthly"))

    async def die(*_: object) -> None:
        raise BusUnavailableError("as if the process had died")

    with monkeypatch.context() as dead:
        dead.setattr(LimitEditor, "_tell", die)
        assert (await put(governed, BOT, **A_MONTH)).status == 503
    assert (await put(governed, BOT, **A_MONTH | {"usd": 30})).status == 200
    assert (await put(governed, BOT, **A_MONTH | {"usd": 31})).status == 200
    events = await governed.events("bw.limits.>")
    assert [event["after"]["usd"] for event in events] == [f"{usd}.000000000" for usd in (20, 30, 31)]


async def test_a_total_is_set_shown_and_raised_and_never_resets(governed: HttpApi, redis: Redis) -> None:
    total = Dimension(("key",), "total")
    await fill(redis, {("total", "key:acme-bot"): AttemptSums(spent=5 * NANO_PER_USD, calls=1)}, total)
    a_total: dict[str, Any] = {"scope": "key:acme-bot", "usd": 20, "per": "total"}
    below = await put(governed, "all", **a_total | {"usd": 4})
    assert (below.status, below.code) == (422, "below_spent"), below.body
    made = await put(governed, "all", **a_total)
    assert made.status == 200, made.body
    assert [made.json[name] for name in ("per", "used", "remaining", "resets_at")] == [
        *("total", "5.000000000", "15.000000000", None)
    ]
    endless = await governed.act("limits/all/raise", amount="30", reason="launch")
    assert (endless.status, endless.json["error"]["details"][0]["path"]) == (422, "until")
    raised = await governed.act("limits/all/raise", amount="30", until=in_s(600), reason="launch")
    assert raised.json["amount"] == "30.000000000"
    assert (await governed.act("limits/all/raise", amount="20", reason="over")).json["amount"] == "20.000000000"
    [event, *_] = await governed.events("bw.budgets.key.total")
    assert (event["period"], event["kind"]) == ("total", "raised")
    budgets = (await governed.ask("GET", "/api/v1/budgets?scope=key:acme-bot")).json["budgets"]
    assert [(budget["budget"], budget["resets_at"]) for budget in budgets] == [("key:acme-bot/total", None)]
