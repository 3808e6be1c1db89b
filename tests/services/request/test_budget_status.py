"""How budgets are said to stand, from the config's caps and what Redis has counted."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from breakwater.config import parse_config
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import NANO_PER_USD
from breakwater.limits.api.budgets import current, known_keys, statuses
from breakwater.limits.contract import BudgetStatus, EstimateAccuracy
from breakwater.limits.rules.budget import LimitTable, periods_at
from breakwater.limits.rules.ledger import AttemptSums, Ledger
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets
from tests.limits.limit_tables import with_raise

CAPS = parse_config("""
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: m}
budgets:
  timezone: Europe/Berlin
  global: {monthly_usd: 100}
  tenants: {zeta: {daily_usd: 1, enforcement: hard}, "*": {daily_usd: 2}}
agents:
  writer: {budget: {daily_usd: 10, enforcement: hard}}
  reader: {}
""").limit_table
ZONE = ZoneInfo("Europe/Berlin")


async def statuses_of(caps: LimitTable, counters: BudgetCounters, now: datetime) -> tuple[BudgetStatus, ...]:
    snapshot = await counters.snapshot(current(caps, counters, now))
    return statuses(caps, snapshot, known_keys(caps, snapshot))


async def reported(
    redis: Redis,
    figures: Ledger | None = None,
    caps: LimitTable = CAPS,
    now: datetime | None = None,
    announced: frozenset[str] = frozenset(),
) -> dict[str, BudgetStatus]:
    counters, moment = BudgetCounters(redis, ZONE), now or datetime.now(UTC)
    day = periods_at(moment, ZONE).day
    of_day = {day.name: announced}
    assert await counters.fill(await counters.source(), "log", 0, counters.periods(moment), figures or {}, of_day)
    return {status.budget: status for status in await statuses_of(caps, counters, moment)}


async def test_every_budget_that_the_config_names_is_reported_before_anything_is_spent(redis: Redis) -> None:
    now = datetime(2026, 11, 30, 22, 30, tzinfo=UTC)
    budgets = await reported(redis, now=now)
    assert list(budgets) == [
        f"{key}/{window}"
        for key in ("global", "agent:writer", "agent:reader", "tenant:zeta")
        for window in ("daily", "monthly")
    ]
    writer = budgets["agent:writer/daily"]
    assert (writer.scope, writer.agent, writer.tenant, writer.window) == ("agent", "writer", None, "daily")
    assert (writer.limit, writer.spent, writer.reserved, writer.remaining) == (
        10 * NANO_PER_USD,
        0,
        0,
        10 * NANO_PER_USD,
    )
    assert (writer.enforcement, writer.raised, writer.estimate, writer.calls) == ("hard", None, None, 0)
    assert (writer.period, writer.resets_at) == ("2026-11-30", datetime(2026, 11, 30, 23, tzinfo=UTC))
    assert (budgets["global/monthly"].period, budgets["global/monthly"].resets_at) == (
        "2026-11",
        datetime(2026, 11, 30, 23, tzinfo=UTC),
    )
    uncapped = budgets["agent:reader/daily"]
    assert (uncapped.limit, uncapped.remaining) == (None, None)


async def test_whoever_has_called_is_reported_after_those_of_the_config(redis: Redis) -> None:
    now = datetime.now(UTC)
    month = periods_at(now, ZONE).month.name
    ledger = {(month, key): AttemptSums(spent=5, calls=1) for key in ("tenant:beta", "tenant:alpha", "agent:gone")}
    budgets = await reported(redis, ledger, now=now)
    keys = [name.removesuffix("/daily") for name in budgets if name.endswith("/daily")]
    assert keys == [
        "global",
        "agent:writer",
        "agent:reader",
        "agent:gone",
        "tenant:zeta",
        "tenant:alpha",
        "tenant:beta",
    ]
    gone, beta = budgets["agent:gone/monthly"], budgets["tenant:beta/daily"]
    assert (gone.limit, gone.enforcement, gone.spent, gone.calls) == (None, "none", 5, 1)
    assert (beta.tenant, beta.limit, beta.enforcement, beta.spent) == ("beta", 2 * NANO_PER_USD, "soft", 0)


async def test_what_is_held_and_spent_is_taken_from_what_remains_and_never_below_nothing(redis: Redis) -> None:
    now = datetime.now(UTC)
    day = periods_at(now, ZONE).day.name
    spent = AttemptSums(spent=9 * NANO_PER_USD, calls=7, unpriced=2)
    assert (await reported(redis, {(day, "agent:writer"): spent}, now=now))[
        "agent:writer/daily"
    ].remaining == NANO_PER_USD
    held, counters = NANO_PER_USD // 4, CAPS.counters(CallNames("writer"))
    command = Budgets(redis, ZONE).reserve_command("x:1", CallNames("writer"), held, counters, now=now, lease_ms=60_000)
    await redis.run([command])
    [writer] = [
        one for one in await statuses_of(CAPS, BudgetCounters(redis, ZONE), now) if one.budget == "agent:writer/daily"
    ]
    assert (writer.spent, writer.reserved, writer.remaining) == (9 * NANO_PER_USD, held, NANO_PER_USD - held)
    assert (writer.calls, writer.calls_of_unknown_cost) == (7, 2)
    too_much = AttemptSums(spent=11 * NANO_PER_USD)
    assert (await reported(redis, {(day, "agent:writer"): too_much}, now=now))["agent:writer/daily"].remaining == 0


async def test_a_raise_holds_while_its_limit_is_as_it_was(redis: Redis) -> None:
    [of_writer] = [limit for limit in CAPS.limits if limit.id == "agents.writer.budget.daily_usd"]
    for configured, amount in ((of_writer.amount, 50 * NANO_PER_USD), (of_writer.amount - 1, 10 * NANO_PER_USD)):
        caps = with_raise(CAPS, replace(of_writer, amount=configured), 50 * NANO_PER_USD)
        budgets = await reported(redis, caps=caps)
        writer = budgets["agent:writer/daily"]
        assert (writer.limit, writer.remaining) == (amount, amount)
        assert (writer.raised is None) == (configured != of_writer.amount)
        assert (budgets["agent:writer/monthly"].limit, budgets["agent:writer/monthly"].raised) == (None, None)
    [of_each] = [limit for limit in CAPS.limits if limit.id == "budgets.tenants.*.daily_usd"]
    raised = with_raise(CAPS, of_each, 7 * NANO_PER_USD, scope="tenant:new")
    day = periods_at(datetime.now(UTC), ZONE).day.name
    figures = {(day, f"tenant:{name}"): AttemptSums(calls=1) for name in ("new", "other")}
    budgets = await reported(redis, figures, caps=raised)
    of_new, of_other = budgets["tenant:new/daily"], budgets["tenant:other/daily"]
    assert (of_new.limit, of_other.limit, of_other.raised) == (7 * NANO_PER_USD, of_each.amount, None)


async def test_how_good_the_estimates_are_is_reported_where_any_call_shows_it(redis: Redis) -> None:
    now = datetime.now(UTC)
    day = periods_at(now, ZONE).day.name
    ledger = {
        (day, "global"): AttemptSums(calls=4, gauged=3, foreseen=3000, measured=631, exceeded=1),
        (day, "agent:writer"): AttemptSums(calls=1, gauged=1, foreseen=0, measured=0),
        (day, "agent:reader"): AttemptSums(calls=5),
    }
    budgets = await reported(redis, ledger, now=now)
    assert budgets["global/daily"].estimate == EstimateAccuracy(
        calls=3, reserved=3000, cost=631, percent=21.0, exceeded=1
    )
    free = budgets["agent:writer/daily"].estimate
    assert free is not None
    assert (free.calls, free.percent) == (1, None)
    assert budgets["agent:reader/daily"].estimate is None


async def test_a_hard_cap_that_refused_a_call_is_reached_though_the_spend_stays_below_it(redis: Redis) -> None:
    now = datetime.now(UTC)
    day = periods_at(now, ZONE).day.name
    spent = AttemptSums(spent=9_990_000_000, calls=100, gauged=100, foreseen=100 * 20_000_000, measured=9_990_000_000)
    announced = frozenset({f"agent:writer@{10 * NANO_PER_USD}@100"})
    for known, expected in ((frozenset[str](), False), (announced, True)):
        budgets = await reported(redis, {(day, "agent:writer"): spent}, now=now, announced=known)
        assert budgets["agent:writer/daily"].reached is expected
        assert budgets["agent:writer/daily"].remaining == 10_000_000
    [of_writer] = [limit for limit in CAPS.limits if limit.id == "agents.writer.budget.daily_usd"]
    raised = with_raise(CAPS, of_writer, 20 * NANO_PER_USD)
    budgets = await reported(redis, {(day, "agent:writer"): spent}, raised, now=now, announced=announced)
    assert not budgets["agent:writer/daily"].reached, "the limit that has refused it holds no longer"
