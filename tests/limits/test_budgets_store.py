"""Reserving, settling, releasing and charging against the real Redis. Fleets of them: `test_budget_processes`."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from redis.exceptions import ResponseError

from breakwater.kernel.redis.connection import KEPT_SINCE, Redis
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import Enforcement, Window
from breakwater.limits.rules.budget import Counter, period, periods_at
from breakwater.limits.rules.ledger import AttemptSums, Ledger
from breakwater.limits.rules.scopes import CallNames, Dimension, Dimensions
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import (
    KEEP_MS,
    LEASES,
    RESERVATIONS,
    Budgets,
    CountersLost,
    HeldOtherwise,
    NotFilledError,
    OverBudget,
    PeriodChanged,
    Reserved,
    Settlement,
    UsedTokens,
)
from tests.limits.limit_tables import limit, limit_table

WINDOWS: tuple[Window, Window] = ("daily", "monthly")
ZONE = ZoneInfo("UTC")
LOG = "log"
Answer = Reserved | OverBudget | PeriodChanged | CountersLost


def now() -> datetime:
    return datetime.now(UTC)


def caps(daily: int | None = None, monthly: int | None = None, enforcement: Enforcement = "hard") -> Caps:
    """In nano-dollars."""
    return Caps.model_construct(daily_usd=daily, monthly_usd=monthly, enforcement=enforcement)


def capped(window: Window, limit: int) -> Caps:
    return caps(daily=limit) if window == "daily" else caps(monthly=limit)


def against(
    total: Caps | None = None,
    of_agent: Caps | None = None,
    of_tenant: Caps | None = None,
    *,
    agent: str = "a",
    tenant: str | None = "t",
) -> tuple[Counter, ...]:
    table = limit_table(total, {agent: of_agent or caps()}, {tenant or "": of_tenant or caps()})
    return table.counters(CallNames(agent, tenant))


async def filled(redis: Redis, *, log: str = LOG, upto: int = 0, figures: Ledger | None = None) -> BudgetCounters:
    """Makes the counters ready, as the budget service does."""
    all_counters = BudgetCounters(redis, ZONE)
    assert await all_counters.fill(
        await all_counters.source(), log, upto, all_counters.periods(now()), figures or {}, {}
    )
    return all_counters


async def ask(
    redis: Redis,
    attempt_id: str,
    amount: int,
    counters: Sequence[Counter],
    *,
    agent: str = "a",
    tenant: str | None = "t",
    lease_ms: int = 60_000,
    at: datetime | None = None,
    budgets: Budgets | None = None,
    clock: datetime | None = None,
) -> Answer:
    """Asks for a reservation as a worker does; `clock` is what that believes the time to be."""
    budgets, clock = budgets or Budgets(redis, ZONE), clock or now()
    names = CallNames(agent, tenant)
    command = budgets.reserve_command(attempt_id, names, amount, counters, now=clock, lease_ms=lease_ms, at=at)
    [raw] = await redis.run([command])
    answer = budgets.read_reservation(raw, counters, amount, now=clock)
    if isinstance(answer, HeldOtherwise):  # as the gate does
        await redis.run([budgets.give_up_command(attempt_id, answer)])
        [raw] = await redis.run([command])
        answer = budgets.read_reservation(raw, counters, amount, now=clock)
    return answer


async def granted(redis: Redis, attempt_id: str, amount: int, **more: Any) -> datetime:
    """Reserves where nothing is capped, and says when that was."""
    counters = against(agent=more.get("agent", "a"), tenant=more.get("tenant", "t"))
    answer = await ask(redis, attempt_id, amount, counters, **more)
    assert isinstance(answer, Reserved)
    return answer.at


def settlement(
    attempt_id: str,
    sequence: int,
    cost: int | None,
    *,
    agent: str = "a",
    tenant: str | None = "t",
    at: datetime | None = None,
) -> Settlement:
    figures = AttemptSums(spent=cost or 0, calls=1, unpriced=int(cost is None))
    return Settlement(attempt_id, sequence, CallNames(agent, tenant), figures, at or now())


async def charge(redis: Redis, attempt_id: str) -> None:
    """Charges a reservation as a sweep does, once its lease has ended by Redis' clock."""
    budgets = Budgets(redis, ZONE)
    async with asyncio.timeout(60):
        while attempt_id not in await budgets.lapsed_attempts(await redis_time(redis)):
            await asyncio.sleep(0.002)
    [reservation] = await budgets.reservations([attempt_id])
    assert reservation is not None
    await budgets.charge_estimate(reservation)


async def redis_time(redis: Redis) -> datetime:
    seconds, microseconds = await cast(Any, redis.client.time())
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds // 1000 * 1000)


async def counted(redis: Redis, window: Window = "daily", name: str = "*") -> Tally[str]:
    """The counters of all periods of a window together; those that are zero count as absent."""
    sums: Tally[str] = Tally()
    for key in await redis.client.keys(f"bw:limits:{window}:{name}"):
        for field, value in (await cast(Any, redis.client.hgetall(key))).items():
            if field.partition(":")[0] in {"spent", "reserved", "calls", "unpriced"}:
                sums[field] += int(value)
    return Tally({field: value for field, value in sums.items() if value})


async def same_in_both_windows(redis: Redis) -> Tally[str]:
    daily, monthly = [await counted(redis, window) for window in WINDOWS]
    assert daily == monthly
    return daily


def in_all(what: str, value: int) -> Mapping[str, int]:
    return {f"{what}:{key}": value for key in ("global", "agent:a", "tenant:t")}


# Reserving


async def test_a_thousand_reservations_at_once_on_a_cap_for_a_hundred_grant_a_hundred(redis: Redis) -> None:
    await filled(redis)
    counters = against(caps(daily=100 * 7, monthly=10**9))
    answers = await asyncio.gather(*(ask(redis, f"j{number}:1", 7, counters) for number in range(1000)))
    assert Tally(type(answer) for answer in answers) == {Reserved: 100, OverBudget: 900}
    assert await same_in_both_windows(redis) == in_all("reserved", 700)
    assert await redis.client.hlen(RESERVATIONS) == 100


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scope", ["global", "agent", "tenant"])
async def test_any_budget_without_room_refuses_and_none_is_held_against(
    redis: Redis, window: Window, scope: str
) -> None:
    await filled(redis)
    tight, wide = capped(window, 10), caps(1000, 1000)
    counters = against(*(tight if one == scope else wide for one in ("global", "agent", "tenant")))
    assert isinstance(await ask(redis, "j:1", 7, counters), Reserved)
    refused = await ask(redis, "k:1", 4, counters)
    assert isinstance(refused, OverBudget)
    assert (refused.counter.scope, refused.counter.window) == (scope, window)
    assert (refused.limit, refused.spent, refused.reserved, refused.amount) == (10, 0, 7, 4)
    assert await same_in_both_windows(redis) == in_all("reserved", 7)
    assert isinstance(await ask(redis, "k:1", 3, counters), Reserved)


async def test_a_refusal_reports_spend_and_reservations_apart_and_when_the_period_ends(redis: Redis) -> None:
    await filled(redis)
    await granted(redis, "i:1", 5)
    await Budgets(redis, ZONE).settle([settlement("i:1", 1, 2)], LOG)
    await granted(redis, "j:1", 7)
    for window in WINDOWS:
        refused = await ask(redis, "k:1", 4, against(of_agent=capped(window, 12)))
        assert isinstance(refused, OverBudget)
        assert (refused.counter.name, refused.limit, refused.spent, refused.reserved) == (f"agent:a/{window}", 12, 2, 7)
        assert refused.resets_at == period(window, await redis_time(redis), ZONE).resets_at


async def test_asking_again_gives_the_same_answer_and_holds_once(redis: Redis) -> None:
    await filled(redis)
    counters = against(caps(daily=10))
    answers = await asyncio.gather(*(ask(redis, "j:1", 7, counters) for _ in range(50)))
    assert len(set(answers)) == 1
    assert isinstance(answers[0], Reserved)
    assert await same_in_both_windows(redis) == in_all("reserved", 7)
    [held] = await Budgets(redis, ZONE).reservations(["j:1"])
    assert held is not None
    assert (held.at, held.amount, held.charged) == (answers[0].at, 7, False)


async def test_asked_again_with_another_amount_what_is_held_is_given_up_first(redis: Redis) -> None:
    await filled(redis)
    counters = against(caps(daily=10))
    await ask(redis, "j:1", 4, counters)
    assert isinstance(await ask(redis, "k:1", 1, counters), Reserved)
    refused = await ask(redis, "j:1", 10, counters)
    assert isinstance(refused, OverBudget)
    assert (refused.limit, refused.spent, refused.reserved, refused.amount) == (10, 0, 1, 10)
    assert await same_in_both_windows(redis) == in_all("reserved", 1)
    for amount in (9, 2):
        assert isinstance(answer := await ask(redis, "j:1", amount, counters), Reserved)
        assert await same_in_both_windows(redis) == in_all("reserved", amount + 1)
        [held] = await Budgets(redis, ZONE).reservations(["j:1"])
        assert held is not None
        assert (held.amount, held.at) == (amount, answer.at)


async def test_what_was_charged_when_its_lease_ended_is_asked_for_again_in_vain(redis: Redis) -> None:
    await filled(redis)
    at = await granted(redis, "j:1", 4, lease_ms=1)
    await charge(redis, "j:1")
    assert await ask(redis, "j:1", 9, against()) == Reserved(at)
    assert await same_in_both_windows(redis) == in_all("spent", 4)


@pytest.mark.parametrize("amount", [4, 5])
async def test_asking_again_renews_the_lease(redis: Redis, amount: int) -> None:
    await filled(redis)
    await granted(redis, "j:1", 4, lease_ms=60_000)
    before = await redis.client.zscore(LEASES, "j:1")
    await granted(redis, "j:1", amount, lease_ms=120_000)
    renewed = await redis.client.zscore(LEASES, "j:1")
    assert before is not None
    assert renewed is not None
    assert renewed - before >= 60_000
    await granted(redis, "j:1", amount, lease_ms=1)
    assert await redis.client.zscore(LEASES, "j:1") == renewed


async def test_budgets_of_others_are_left_alone(redis: Redis) -> None:
    await filled(redis)
    await granted(redis, "j:1", 7, agent="a", tenant=None)
    await granted(redis, "k:1", 5, agent="b", tenant="t")
    assert await same_in_both_windows(redis) == {
        "reserved:global": 12, "reserved:agent:a": 7, "reserved:agent:b": 5, "reserved:tenant:t": 5
    }  # fmt: skip


async def test_a_hard_cap_holds_nothing_while_the_counters_are_lost(redis: Redis) -> None:
    counters = against(caps(enforcement="soft", daily=1), of_tenant=caps(monthly=10**9))
    assert await ask(redis, "j:1", 7, counters) == CountersLost()
    assert await redis.client.keys("*") == []
    assert not await Budgets(redis, ZONE).has_counters()
    await filled(redis)
    assert await Budgets(redis, ZONE).has_counters()
    assert isinstance(await ask(redis, "j:1", 7, counters), Reserved)


async def test_a_hard_cap_holds_nothing_while_another_primary_may_lack_what_was_counted(redis: Redis) -> None:
    hard, soft = against(caps(daily=10**9)), against(caps(enforcement="soft", daily=10**9))
    await filled(redis)
    await redis.client.incr(KEPT_SINCE)
    assert await ask(redis, "j:1", 7, hard) == CountersLost()
    assert isinstance(await ask(redis, "j:2", 7, soft), Reserved)
    assert not await Budgets(redis, ZONE).has_counters(), "workers write their reservations again"
    all_counters = BudgetCounters(redis, ZONE)
    await all_counters.confirm("1")
    assert await ask(redis, "j:1", 7, hard) == CountersLost(), "it was another time"
    await all_counters.confirm(await all_counters.kept_since())
    assert isinstance(await ask(redis, "j:1", 7, hard), Reserved)
    assert await Budgets(redis, ZONE).has_counters()


@pytest.mark.parametrize("enforcement", ["soft", "none"])
async def test_any_other_cap_holds_and_never_refuses(redis: Redis, enforcement: Enforcement) -> None:
    one = caps(5, 5, enforcement)
    for name in ("j:1", "k:1"):
        assert isinstance(await ask(redis, name, 7, against(one, one, one)), Reserved)
    assert await same_in_both_windows(redis) == in_all("reserved", 14)


async def test_a_call_that_is_free_passes_a_cap_that_is_reached_but_not_one_that_is_passed(redis: Redis) -> None:
    await filled(redis)
    await granted(redis, "j:1", 10)
    assert isinstance(await ask(redis, "k:1", 0, against(caps(10))), Reserved)
    assert isinstance(await ask(redis, "l:1", 0, against(caps(9))), OverBudget)


@pytest.mark.parametrize("days", [-1, 1, -45, 45])
async def test_a_clock_that_is_off_is_reported_once_and_corrected_from_then_on(redis: Redis, days: int) -> None:
    await filled(redis)
    budgets, counters = Budgets(redis, ZONE), against(caps(10))
    answers = [
        await ask(redis, f"j{number}:1", 1, counters, budgets=budgets, clock=now() + timedelta(days=days))
        for number in range(4)
    ]
    assert answers[0] == PeriodChanged()
    assert all(isinstance(answer, Reserved) for answer in answers[1:])
    assert await counted(redis, "daily", f"{await redis_time(redis):%Y-%m-%d}") == in_all("reserved", 3)
    assert await same_in_both_windows(redis) == in_all("reserved", 3)


async def test_what_redis_has_lost_is_held_again_where_it_was_and_whatever_the_caps_are(redis: Redis) -> None:
    yesterday = now().replace(microsecond=0) - timedelta(days=1)
    for _ in range(2):
        answer = await ask(redis, "j:1", 7, against(caps(1, 1), caps(1, 1)), at=yesterday)
        assert answer == Reserved(yesterday)
    assert await counted(redis, "daily", f"{yesterday:%Y-%m-%d}") == in_all("reserved", 7)
    await filled(redis)
    assert await same_in_both_windows(redis) == in_all("reserved", 7)
    await Budgets(redis, ZONE).settle([settlement("j:1", 1, 4, at=yesterday)], LOG)
    assert await counted(redis, "daily", f"{yesterday:%Y-%m-%d}") == {**in_all("spent", 4), **in_all("calls", 1)}


# Releasing and settling


async def test_a_released_reservation_leaves_no_trace(redis: Redis) -> None:
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7)
    for _ in range(2):
        await redis.run([budgets.release_command("j:1", at)])
        assert await same_in_both_windows(redis) == {}
    assert await budgets.reservations(["j:1"]) == [None]
    assert await budgets.lapsed_attempts(now() + timedelta(days=1)) == []


async def test_a_reservation_of_another_day_is_not_released(redis: Redis) -> None:
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7)
    await redis.run([budgets.release_command("j:1", at - timedelta(days=1))])
    assert await same_in_both_windows(redis) == in_all("reserved", 7)


async def test_a_reservation_that_was_charged_is_not_released_any_more(redis: Redis) -> None:
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7, lease_ms=1)
    await charge(redis, "j:1")
    await redis.run([budgets.release_command("j:1", at)])
    assert await same_in_both_windows(redis) == in_all("spent", 7)


async def test_settling_replaces_the_reservation_by_the_cost_in_all_budgets_once(redis: Redis) -> None:
    await filled(redis)
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7)
    for _ in range(3):
        totals = await budgets.settle([settlement("j:1", 5, 4, at=at)], LOG)
        assert [(total.period.window, total.key, total.spent) for total in totals] == [
            (window, key, 4) for key in ("global", "agent:a", "tenant:t") for window in WINDOWS
        ]
    assert await same_in_both_windows(redis) == {**in_all("spent", 4), **in_all("calls", 1)}
    assert await budgets.reservations(["j:1"]) == [None]
    assert await budgets.lapsed_attempts(now() + timedelta(days=1)) == []


async def test_events_that_many_services_settle_at_once_are_counted_once(redis: Redis) -> None:
    await filled(redis)
    events = [settlement(f"j{number}:1", number, number) for number in range(1, 101)]
    await asyncio.gather(*(Budgets(redis, ZONE).settle(events[start:], LOG) for start in range(0, 100, 10)))
    assert (await same_in_both_windows(redis))["spent:global"] == sum(range(1, 101))


async def test_a_cost_without_a_reservation_counts_in_the_day_that_it_belongs_to(redis: Redis) -> None:
    await filled(redis)
    yesterday = now() - timedelta(days=1)
    await Budgets(redis, ZONE).settle([settlement("j:1", 5, 4, at=yesterday)], LOG)
    assert await same_in_both_windows(redis) == {**in_all("spent", 4), **in_all("calls", 1)}
    assert await counted(redis, "daily", f"{yesterday:%Y-%m-%d}") == await counted(redis)


async def test_an_unknown_cost_is_counted_as_unpriced_and_not_as_zero(redis: Redis) -> None:
    await filled(redis)
    await Budgets(redis, ZONE).settle([settlement("j:1", 5, None)], LOG)
    assert await same_in_both_windows(redis) == {**in_all("unpriced", 1), **in_all("calls", 1)}
    [today] = await redis.client.keys("bw:limits:daily:*")
    assert not await cast(Any, redis.client.hexists(today, "spent:global"))


async def test_an_event_that_the_counters_were_filled_with_counts_no_more_but_frees_what_it_held(redis: Redis) -> None:
    await filled(redis, upto=10)
    at = await granted(redis, "j:1", 7)
    await Budgets(redis, ZONE).settle([settlement("j:1", 10, 4, at=at)], LOG)
    assert await same_in_both_windows(redis) == {}
    await Budgets(redis, ZONE).settle([settlement("k:1", 11, 4)], LOG)
    assert await same_in_both_windows(redis) == {**in_all("spent", 4), **in_all("calls", 1)}


@pytest.mark.parametrize("days", [1, -1, 2, 40])
async def test_a_call_counts_where_its_record_does_and_frees_what_it_held_elsewhere(redis: Redis, days: int) -> None:
    """A worker that died at midnight could not say when it reserved: the record, and its time, is the truth."""
    await filled(redis)
    recorded_at = now() if days > 0 else now() - timedelta(days=-days)
    reserved_at = recorded_at - timedelta(days=days)
    await granted(redis, "j:1", 7, at=reserved_at)
    settlements = [settlement("j:1", 5, 4, at=recorded_at), settlement("k:1", 6, 2, at=recorded_at)]
    for _ in range(2):
        totals = await Budgets(redis, ZONE).settle(settlements, LOG)
        spent = {(total.period.name, total.spent) for total in totals if total.key == "agent:a"}
        assert spent >= {(period(window, recorded_at, ZONE).name, 6) for window in WINDOWS}
    assert await Budgets(redis, ZONE).reservations(["j:1"]) == [None]
    assert await same_in_both_windows(redis) == {**in_all("spent", 6), **in_all("calls", 2)}
    assert await counted(redis, "daily", f"{recorded_at:%Y-%m-%d}") == await counted(redis)


async def test_nothing_is_counted_until_the_counters_are_those_of_the_log(redis: Redis) -> None:
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7)
    settlements = [settlement("j:1", 1, 4, at=at), settlement("k:1", 2, 5)]
    with pytest.raises(NotFilledError):
        await budgets.settle(settlements, LOG)
    await filled(redis, log="yesterday's")
    with pytest.raises(NotFilledError):
        await budgets.settle(settlements, LOG)
    await filled(redis)
    with pytest.raises(NotFilledError):
        await Budgets(redis, ZoneInfo("Europe/Berlin")).settle(settlements, LOG)
    assert await same_in_both_windows(redis) == in_all("reserved", 7)
    await budgets.settle(settlements, LOG)
    assert await same_in_both_windows(redis) == {**in_all("spent", 9), **in_all("calls", 2)}


async def test_a_new_log_begins_to_count_again(redis: Redis) -> None:
    await filled(redis, log="yesterday's")
    await Budgets(redis, ZONE).settle([settlement("j:1", 1, 4)], "yesterday's")
    await filled(redis, log="today's", figures={(f"{now():%Y-%m}", "global"): AttemptSums(spent=4, calls=1)})
    await Budgets(redis, ZONE).settle([settlement("k:1", 1, 5)], "today's")
    assert (await counted(redis, "monthly"))["spent:global"] == 9


async def test_settling_nothing_asks_nobody(redis: Redis) -> None:
    await redis.close()
    assert await Budgets(redis, ZONE).settle([], LOG) == []
    assert await Budgets(redis, ZONE).reservations([]) == []


async def test_no_text_of_a_tag_changes_where_a_reservation_holds(redis: Redis) -> None:
    budgets, dimensions = Budgets(redis, ZONE), Dimensions(frozenset({Dimension(("tag:project",), "monthly")}))
    all_counters = BudgetCounters(redis, ZONE)
    await all_counters.fill(None, LOG, 0, all_counters.periods(now()), {}, {}, dimensions=dimensions)
    budgets.dimensions = dimensions
    for number, tag in enumerate(("a\nb", "a\tb", "a\vuser:b", "a\th\n2026-11\tglobal\th", "a b", "é|:=\u00a0")):
        names = CallNames("a", "t", tags=(("project", tag),))
        counters = limit_table().counters(names, dimensions)
        command = budgets.reserve_command(f"j:{number}", names, 7, counters, now=now(), lease_ms=60_000)
        [answer] = await redis.run([command])
        assert isinstance(budgets.read_reservation(answer, counters, 7, now=now()), Reserved)
        [held] = await budgets.reservations([f"j:{number}"])
        assert held is not None
        assert sorted(key for _, key in held.places) == sorted(counter.key for counter in counters)
        await budgets.settle([Settlement(f"j:{number}", number + 1, names, AttemptSums(spent=7), now())], LOG)
        snapshot = await all_counters.snapshot(all_counters.periods(now(), dimensions))
        assert not any(snapshot.reserved.values())
        assert snapshot.held_amounts(charged=False) == {}


# Leases


async def test_a_lapsed_reservation_is_charged_at_its_estimate_and_corrected_by_a_late_event(redis: Redis) -> None:
    await filled(redis)
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7, lease_ms=1)
    await charge(redis, "j:1")
    assert await same_in_both_windows(redis) == in_all("spent", 7)
    assert await budgets.lapsed_attempts(now() + timedelta(seconds=1)) == []
    [held] = await budgets.reservations(["j:1"])
    assert held is not None
    assert held.charged
    await budgets.settle([settlement("j:1", 5, 4, at=at)], LOG)
    assert await same_in_both_windows(redis) == {**in_all("spent", 4), **in_all("calls", 1)}


async def test_a_charge_that_two_services_make_or_one_makes_again_is_made_once_and_can_be_corrected(
    redis: Redis,
) -> None:
    await filled(redis)
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7, lease_ms=1)
    [read_before] = await budgets.reservations(["j:1"])
    assert read_before is not None
    await charge(redis, "j:1")
    await asyncio.gather(*(Budgets(redis, ZONE).charge_estimate(read_before) for _ in range(3)))
    assert await same_in_both_windows(redis) == in_all("spent", 7)
    await budgets.settle([settlement("j:1", 5, 4, at=at)], LOG)
    assert await same_in_both_windows(redis) == {**in_all("spent", 4), **in_all("calls", 1)}


async def test_a_reservation_whose_lease_goes_on_is_not_charged(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await granted(redis, "j:1", 7)
    assert await budgets.lapsed_attempts(now()) == []
    [held] = await budgets.reservations(["j:1"])
    assert held is not None
    await budgets.charge_estimate(held)
    assert await same_in_both_windows(redis) == in_all("reserved", 7)
    assert await budgets.reservations(["j:1"]) == [held]


async def test_long_after_its_month_a_charge_is_forgotten(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await granted(redis, "j:1", 7, at=now() - timedelta(days=70), lease_ms=1)
    await charge(redis, "j:1")
    [held] = await budgets.reservations(["j:1"])
    assert held is not None
    assert held.charged
    await charge(redis, "j:1")
    assert await budgets.reservations(["j:1"]) == [None]
    assert await budgets.lapsed_attempts(now() + timedelta(days=365)) == []


async def test_a_charge_is_known_until_the_longest_of_its_periods_is_long_over(redis: Redis) -> None:
    await filled(redis)
    quarter = Dimensions(frozenset({Dimension(("agent",), "weekly"), Dimension(("agent",), "quarterly")}))
    counters = limit_table().counters(CallNames("a", "t"), quarter)
    at = now()
    await ask(redis, "j:1", 7, counters, at=at, lease_ms=1)
    await charge(redis, "j:1")
    long_over = periods_at(at, ZONE).of("quarterly").end_ms + KEEP_MS
    assert await redis.client.zscore(LEASES, "j:1") == long_over


@pytest.mark.parametrize("end", ["settle", "settle what was counted", "release", "charge"])
async def test_counters_of_a_period_that_is_long_over_do_not_come_back(redis: Redis, end: str) -> None:
    await filled(redis, upto=10 if end == "settle what was counted" else 0)
    long_ago = now() - timedelta(days=70)
    await granted(redis, "j:1", 7, at=long_ago, lease_ms=1)
    match end:
        case "release":
            await redis.run([Budgets(redis, ZONE).release_command("j:1", long_ago)])
        case "charge":
            await charge(redis, "j:1")
        case _:
            await Budgets(redis, ZONE).settle([settlement("j:1", 5, 4, at=long_ago)], LOG)
    assert await redis.client.keys("bw:limits:daily:*") == []
    assert await redis.client.keys("bw:limits:monthly:*") == []


async def test_a_lease_without_a_reservation_is_taken_off_the_list(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    await granted(redis, "j:1", 7)
    await budgets.forget_lease("j:1")
    assert await budgets.lapsed_attempts(now() + timedelta(days=1)) == []


async def test_those_that_lapsed_first_are_found_first_and_only_so_many(redis: Redis) -> None:
    budgets = Budgets(redis, ZONE)
    for lease_s in (30, 10, 20, 40):
        await granted(redis, f"j{lease_s}:1", 1, lease_ms=lease_s * 1000)
    assert await budgets.lapsed_attempts(now() + timedelta(seconds=35)) == ["j10:1", "j20:1", "j30:1"]
    assert await budgets.lapsed_attempts(now() + timedelta(seconds=35), limit=2) == ["j10:1", "j20:1"]


async def test_a_reservation_under_an_attempt_that_was_counted_already_is_void(redis: Redis) -> None:
    await filled(redis)
    budgets, at = Budgets(redis, ZONE), await granted(redis, "j:1", 7)
    settlements = [settlement("j:1", 5, 4, at=at)]
    await budgets.settle(settlements, LOG)
    for lapses in (False, True):
        await granted(redis, "j:1", 9, lease_ms=1)
        if lapses:
            await charge(redis, "j:1")
        await budgets.settle(settlements, LOG)
        assert await same_in_both_windows(redis) == {**in_all("spent", 4), **in_all("calls", 1)}
        assert await budgets.lapsed_attempts(now() + timedelta(days=1)) == []


async def test_reservations_of_nothing_are_settled_charged_and_released_too(redis: Redis) -> None:
    await filled(redis)
    budgets = Budgets(redis, ZONE)
    for sequence, attempt_id in enumerate(("j:1", "k:1"), 1):
        at = await granted(redis, attempt_id, 0, lease_ms=1)
        if attempt_id == "k:1":
            await charge(redis, attempt_id)
        await budgets.settle([settlement(attempt_id, sequence, 3, at=at)], LOG)
    await redis.run([budgets.release_command("l:1", await granted(redis, "l:1", 0))])
    assert await same_in_both_windows(redis) == {**in_all("spent", 6), **in_all("calls", 2)}
    assert await redis.client.hlen(RESERVATIONS) == 0


# Amounts, names, memory


async def test_the_highest_cap_holds_to_the_nano_dollar(redis: Redis) -> None:
    await filled(redis)
    top = 2**53
    counters = against(caps(daily=top))
    for step, amount in enumerate((top - 3, 2)):
        assert isinstance(await ask(redis, f"j{step}:1", amount, counters), Reserved)
    for amount in (2, 3, top):
        refused = await ask(redis, "k:1", amount, counters)
        assert isinstance(refused, OverBudget)
        assert (refused.limit, refused.reserved) == (top, top - 1)
    assert isinstance(await ask(redis, "k:1", 1, counters), Reserved)
    refused = await ask(redis, "l:1", 1, counters)
    assert isinstance(refused, OverBudget)
    assert refused.reserved == top
    budgets = Budgets(redis, ZONE)
    await budgets.settle([settlement("j0:1", 1, top - 1), settlement("j1:1", 2, 2), settlement("k:1", 3, 4)], LOG)
    assert (await same_in_both_windows(redis))["spent:global"] == top + 5
    assert isinstance(await ask(redis, "l:1", 0, counters), OverBudget)


NAMES = [
    "a b", "a|b", "|", "::", "global", "agent:a", "50%", "%d%s", "Zürich-東京-🙂", "{x}", "*", "-1", "\\n", "'\"",
    "x" * 128,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_any_name_is_kept_apart_and_comes_back_as_it_was(redis: Redis, name: str) -> None:
    await filled(redis)
    budgets, counters = Budgets(redis, ZONE), against(caps(10), caps(10), caps(10), agent=name, tenant=name)
    who: dict[str, Any] = {"agent": name, "tenant": name}
    attempts = [f"{name}:{number}" for number in range(1, 5)]
    for attempt_id in attempts[:3]:
        lease_ms = 1 if attempt_id == attempts[1] else 60_000
        assert isinstance(await ask(redis, attempt_id, 3, counters, lease_ms=lease_ms, **who), Reserved)
    assert isinstance(await ask(redis, attempts[3], 3, counters, **who), OverBudget)
    held = await budgets.reservations(attempts)
    assert [one and (one.attempt_id, one.agent, one.tenant, one.amount) for one in held] == [
        *((attempt_id, name, name, 3) for attempt_id in attempts[:3]), None
    ]  # fmt: skip
    assert held[0] is not None
    assert held[2] is not None
    await budgets.settle([settlement(attempts[0], 1, 2, at=held[0].at, **who)], LOG)
    await charge(redis, attempts[1])
    await redis.run([budgets.release_command(attempts[2], held[2].at)])
    expected = {
        f"{what}:{key}": value
        for what, value in (("spent", 5), ("calls", 1))
        for key in ("global", f"agent:{name}", f"tenant:{name}")
    }
    assert await same_in_both_windows(redis) == expected
    await granted(redis, attempts[2], 3, **who)
    await filled(redis, upto=1)
    kept = {
        f"{what}:{key}": 3 for what in ("reserved", "spent") for key in ("global", f"agent:{name}", f"tenant:{name}")
    }
    assert await same_in_both_windows(redis) == kept


async def test_memory_of_settled_events_stays_small(redis: Redis) -> None:
    await filled(redis)
    await Budgets(redis, ZONE).settle([settlement(f"j{number}:1", number, 1) for number in range(1, 2001)], LOG)
    assert (await same_in_both_windows(redis))["spent:global"] == 2000
    assert len(await redis.client.keys("*")) <= 6
    assert (await redis.client.memory_usage("bw:limits:settled:log:0") or 0) < 10_000


async def test_what_is_counted_goes_days_after_its_period(redis: Redis) -> None:
    await filled(redis)
    at = await granted(redis, "j:1", 7)
    await Budgets(redis, ZONE).settle([settlement("j:1", 5, 4, at=at)], LOG)
    for window in WINDOWS:
        one = period(window, at, ZONE)
        left_ms = await redis.client.pttl(f"bw:limits:{window}:{one.name}")
        expected_ms = one.end_ms + 3 * 24 * 3_600_000 - ms_from_time(now())
        assert abs(left_ms - expected_ms) < 10_000


async def test_a_mistake_of_ours_is_not_taken_for_an_outage(redis: Redis) -> None:
    with pytest.raises(ResponseError, match="not an integer"):
        await ask(redis, "j:1", 10**30, against())


async def test_tokens_and_requests_of_a_day_are_reserved_charged_settled_and_counted_like_money(redis: Redis) -> None:
    names, by_key = CallNames("a", key="bot"), Dimensions(frozenset({Dimension(("key",), "daily")}))
    table = limit_table(
        further=(
            limit("key:*", "daily", 100, unit="tokens"),
            limit("key:bot", "daily", 3, "refuse", unit="requests"),
            limit("key:else", "daily", 1, unit="requests"),
        )
    )
    assert table.dimensions == by_key.complete
    counters = table.counters(names, by_key)
    assert [(counter.name, counter.hard_limit) for counter in counters if counter.cap] == [
        ("key:bot/daily/tokens", 100),
        ("key:bot/daily/requests", 3),
    ]
    budgets, all_counters = Budgets(redis, ZONE), BudgetCounters(redis, ZONE)
    budgets.dimensions = by_key
    await all_counters.fill(None, LOG, 0, all_counters.periods(now()), {}, {}, dimensions=by_key)
    today = periods_at(now(), ZONE).day
    place = today.name, "key:bot"

    async def reserve(attempt_id: str, tokens: int) -> Any:
        command = budgets.reserve_command(attempt_id, names, 7, counters, now=now(), lease_ms=60_000, tokens=tokens)
        [answer] = await redis.run([command])
        return budgets.read_reservation(answer, counters, 7, now=now(), tokens=tokens)

    async def counted() -> tuple[AttemptSums, AttemptSums]:
        """What was used, and what is reserved; all of it is that of calls."""
        snapshot = await all_counters.snapshot([today])
        assert snapshot.reserved_figures.get(place, AttemptSums()) == snapshot.held_figures(charged=False).get(
            place, AttemptSums()
        )
        return snapshot.figures.get(place, AttemptSums()), snapshot.reserved_figures[place]

    for attempt_id in ("charged", "lapsed"):
        for _ in range(2):
            assert isinstance(await reserve(attempt_id, 40), Reserved)
    assert await counted() == (AttemptSums(), AttemptSums(spent=14, tokens=80, calls=2))
    held = await reserve("too many tokens", 21)
    assert isinstance(held, OverBudget)
    assert (held.counter.unit, held.limit, held.spent, held.reserved, held.amount) == ("tokens", 100, 0, 80, 21)
    never = await reserve("more than the whole", 101)
    assert isinstance(never, OverBudget)
    assert (never.amount, never.limit) == (101, 100)
    # Its worker charges what it used, which its event settles.
    await redis.run([budgets.release_command("charged", now(), 5, tokens=UsedTokens(30, 30))])
    assert await counted() == (AttemptSums(spent=5, tokens=30, calls=1), AttemptSums(spent=7, tokens=40, calls=1))
    assert isinstance(await reserve("unmade", 30), Reserved)
    over = await reserve("a fourth", 0)
    assert isinstance(over, OverBudget)
    assert (over.counter.unit, over.limit, over.spent, over.reserved, over.amount) == ("requests", 3, 1, 2, 1)
    await redis.run([budgets.release_command("unmade", now())])
    figures = AttemptSums(spent=5, calls=1, tokens=30)
    for _ in range(2):
        await budgets.settle([Settlement("charged", 1, names, figures, now())], LOG)
        assert await counted() == (figures, AttemptSums(spent=7, tokens=40, calls=1))
    # A lost call counts as reserved, until its event says more.
    [lapsed] = await budgets.reservations(["lapsed"])
    assert lapsed is not None
    await redis.client.zadd(LEASES, {"lapsed": 1})
    await budgets.charge_estimate(lapsed)
    assert await counted() == (AttemptSums(spent=12, calls=2, tokens=70), AttemptSums())
    snapshot = await all_counters.snapshot([today])
    assert snapshot.settled[place] == figures, "which is what the record has"
    lost = Settlement("lapsed", 2, names, AttemptSums(spent=7, calls=1, tokens=12), now())
    await budgets.settle([lost], LOG)
    assert await counted() == (AttemptSums(spent=12, calls=2, tokens=42), AttemptSums())
