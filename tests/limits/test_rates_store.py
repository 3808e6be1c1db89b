from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
from redis.exceptions import ConnectionError as Away

from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand, StateUnavailableError
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.limit import Limit, limits_of_task
from breakwater.limits.rules.rate_limit import (
    NO_RATE_LIMITS,
    WINDOW_MS,
    OverRate,
    RateLimits,
    rate_limits_of,
)
from breakwater.limits.rules.scopes import CallNames, parse_scope
from breakwater.limits.settings import RateLimit
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import (
    SLICES,
    UNKNOWN_TOKENS,
    Budgets,
    HeldOtherwise,
    Reserved,
    Settlement,
    TooManyNames,
    UsedTokens,
    keys_of_rate_limits,
    slots_key,
    window_key,
)
from tests.helpers import until
from tests.limits.limit_tables import limit_table
from tests.tables import each_row

ZONE, LOG = ZoneInfo("UTC"), "log"
LEASE_MS = 60_000
SLICE_MS = WINDOW_MS // SLICES
ASKS_EVERY_S = 0.001
"""While time passes: shorter than a slice of the windows that tests let pass, and the processor is free in between."""
AGENT, MODEL = "agent:a.b/{c}", "model:openai/gpt-4.1{mini}"
NAMES = CallNames("a")


def now() -> datetime:
    return datetime.now(UTC)


def limited(rule: RateLimit, key: str = AGENT) -> RateLimits:
    return rate_limits_of(key, limits_of_task("writer", rule))


def rpm(most: int, key: str = AGENT) -> RateLimits:
    return limited(RateLimit(requests_per_minute=most), key)


def tpm(most: int, key: str = AGENT) -> RateLimits:
    return limited(RateLimit(tokens_per_minute=most), key)


def at_once(most: int, key: str = AGENT) -> RateLimits:
    return limited(RateLimit(concurrent_calls=most), key)


def together(limits: tuple[RateLimits, ...]) -> RateLimits:
    return sum(limits, start=NO_RATE_LIMITS)


async def ask(
    redis: Redis,
    attempt: str,
    *limits: RateLimits,
    tokens: int = 0,
    amount: int = 0,
    lease_ms: int | None = LEASE_MS,
    window_ms: int = WINDOW_MS,
) -> Reserved | OverRate:
    budgets, rates, asked_at = Budgets(redis, ZONE, window_ms), together(limits), now()
    command = budgets.reserve_command(
        attempt, NAMES, amount, (), now=asked_at, lease_ms=lease_ms, tokens=tokens, rates=rates
    )
    [raw] = await redis.run([command])
    answer = budgets.read_reservation(raw, (), amount, now=asked_at, rates=rates)
    if isinstance(answer, HeldOtherwise):  # as the gate does
        await redis.run([budgets.give_up_command(attempt, answer)])
        return await ask(redis, attempt, *limits, tokens=tokens, amount=amount, lease_ms=lease_ms, window_ms=window_ms)
    assert isinstance(answer, Reserved | OverRate)
    if isinstance(answer, OverRate):
        # As if it gave up: the next call of these tests must not stand behind it.
        await redis.client.delete(*command.keys[-2 * len(keys_of_rate_limits(rates)) :])
    return answer


async def admit(
    redis: Redis,
    attempt: str,
    *limits: RateLimits,
    tokens: int = 0,
    lease_ms: int | None = LEASE_MS,
    window_ms: int = WINDOW_MS,
) -> OverRate | None:
    """Returns the refusal of a call; None if it is admitted."""
    answer = await ask(redis, attempt, *limits, tokens=tokens, lease_ms=lease_ms, window_ms=window_ms)
    return answer if isinstance(answer, OverRate) else None


async def charge(redis: Redis, attempt: str, *limits: RateLimits, tokens: int | None) -> None:
    """Ends a call, as its worker does."""
    used_tokens = UNKNOWN_TOKENS if tokens is None else UsedTokens(tokens, tokens)
    await redis.run(
        [Budgets(redis, ZONE).release_command(attempt, now(), 0, tokens=used_tokens, rates=together(limits))]
    )


async def release(redis: Redis, attempt: str, *limits: RateLimits) -> None:
    """Takes back a call that was never made."""
    await redis.run([Budgets(redis, ZONE).release_command(attempt, now(), rates=together(limits))])


def measure(over: OverRate | None) -> tuple[str, str, str | None] | None:
    """The scope, the unit and the window of a refusal."""
    return None if over is None else (over.key, over.limit.unit, over.limit.window)


USAGE = Script.of("""
-- What counts towards a limit now. Reads only: the sums may hold slices that are over.
-- KEYS: window, slots
-- Returns {requests, tokens, calls under way of the window, calls in the slots}.
local slice_ms, slices = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local first = math.floor(now / slice_ms) - slices
local sums = {r = 0, t = 0, c = 0}
local known = redis.call('HGETALL', KEYS[1])
for i = 1, #known, 2 do
  local kind, slice = string.match(known[i], '^([rtc])(%d+)$')
  if kind and tonumber(slice) >= first then
    sums[kind] = sums[kind] + tonumber(known[i + 1])
  end
end
return {sums.r, sums.t, sums.c, redis.call('ZCOUNT', KEYS[2], '(' .. now, '+inf')}
""")


def keys_of(key: str) -> list[str]:
    """The keys of the minute and of the slots of a scope."""
    return [window_key(rpm(1, key).windows[0]), slots_key(at_once(1, key).slots[0])]


async def used(redis: Redis, *keys: str) -> list[tuple[int, int, int, int]]:
    """Requests, tokens and calls under way in the minute of each scope, and calls in its slots."""
    commands = [ScriptCommand(USAGE, keys_of(key), [SLICE_MS, SLICES]) for key in keys]
    return [(int(r), int(t), int(calls), int(slots)) for r, t, calls, slots in await redis.run(commands)]


async def clock_ms(redis: Redis) -> int:
    seconds, microseconds = await redis.client.time()
    return seconds * 1000 + microseconds // 1000


async def passed(redis: Redis, moment_ms: int) -> bool:
    return await clock_ms(redis) > moment_ms


@each_row(
    ("rates", "tokens", "granted", "what"),
    [
        (rpm(1), 0, 1, "requests"),
        (rpm(7), 10**9, 7, "requests"),
        (tpm(100), 30, 3, "tokens"),
        (tpm(90), 30, 3, "tokens"),
        (tpm(10_000_000_000), 5_000_000_000, 2, "tokens"),
        (at_once(4), 10, 4, "concurrent"),
        (limited(RateLimit(requests_per_minute=5, tokens_per_minute=40)), 10, 4, "tokens"),
        (limited(RateLimit(requests_per_minute=3, concurrent_calls=5)), 10, 3, "requests"),
        (rate_limits_of(AGENT, [Limit("l", (), "usd", "minute", 9, "wait")]), 0, 3, "usd"),
    ],
)
async def test_calls_are_admitted_up_to_each_limit_and_not_beyond(
    redis: Redis, rates: RateLimits, tokens: int, granted: int, what: str
) -> None:
    await redis.client.flushall()
    answers = [await ask(redis, f"j{number}", rates, tokens=tokens, amount=3) for number in range(granted + 2)]
    assert all(isinstance(answer, Reserved) for answer in answers[:granted])
    assert [(over.key, over.limit.unit) for over in answers[granted:] if isinstance(over, OverRate)] == [
        (AGENT, what)
    ] * 2
    [(requests, counted, _, slots)] = await used(redis, AGENT)
    assert (requests, counted) == ((granted, granted * tokens) if rates.windows else (0, 0))
    assert slots == (granted if rates.slots else 0)


async def test_any_scope_can_be_limited_by_tokens_requests_and_calls_at_once(redis: Redis) -> None:
    key = parse_scope("key:*"), parse_scope("user:ann within team:red"), parse_scope("plane")
    limits = [
        Limit("keys", key[0], "requests", "minute", 3, "wait"),
        Limit("bot", parse_scope("key:bot"), "requests", "minute", 2, "refuse"),
        Limit("ann", key[1], "tokens", "hour", 50, "cheaper_model"),
        Limit("all", key[2], "concurrent", None, 5, "wait"),
    ]
    table = limit_table(further=limits)
    bot, other = CallNames("a", key="bot", user="ann", team="red"), CallNames("a", key="other")
    assert [
        (window.key, *(limit.id for limit in window.limits.values())) for window in table.rate_limits(bot).windows
    ] == [
        ("key:bot", "bot"),
        ("user:ann\vteam:red", "ann"),
    ]
    assert [window.limits["requests"].id for window in table.rate_limits(other).windows] == ["keys"]
    assert [slots.limit.id for slots in table.rate_limits(other).slots] == ["all"]
    assert table.rate_limits(bot) is table.rate_limits(bot)
    assert [await admit(redis, f"b{number}", table.rate_limits(bot), tokens=20) for number in range(2)] == [None, None]
    refused = await admit(redis, "b2", table.rate_limits(bot), tokens=20)
    # A limit that refuses comes before one for which the call would wait, and of these, the longest wait.
    assert measure(refused) == ("user:ann\vteam:red", "tokens", "hour")
    assert await admit(redis, "o", table.rate_limits(other)) is None


async def test_a_limit_that_refuses_precedes_one_with_a_longer_wait(redis: Redis) -> None:
    hour = rate_limits_of(AGENT, [Limit("hour", (), "requests", "hour", 1, "wait")])
    minute = rate_limits_of(MODEL, [Limit("minute", (), "requests", "minute", 1, "cheaper_model")])
    assert await admit(redis, "j", hour, minute) is None
    for order in ((hour, minute), (minute, hour)):
        refused = await admit(redis, "k", *order)
        assert refused is not None
        assert refused.limit.id == "minute"


async def test_a_call_is_told_what_its_windows_have_left(redis: Redis) -> None:
    both = limited(RateLimit(requests_per_minute=10, tokens_per_minute=100))
    hour = limited(RateLimit(requests=20, per="hour"), MODEL)
    await admit(redis, "j", both, hour, tokens=30)
    reserved = await ask(redis, "k", both, hour, tokens=30)
    assert isinstance(reserved, Reserved)
    assert [(window.scope, window.unit, window.limit, window.remaining) for window in reserved.windows] == [
        *((AGENT, "requests", 10, 8), (AGENT, "tokens", 100, 40)),
        (MODEL, "requests", 20, 18),
    ]
    minute, _, of_hour = (window.empty_in_ms for window in reserved.windows)
    assert WINDOW_MS <= minute <= WINDOW_MS + SLICE_MS
    assert 60 * WINDOW_MS <= of_hour <= 60 * (WINDOW_MS + SLICE_MS)
    refused = await ask(redis, "l", both, hour, tokens=50)
    assert [(window.unit, window.remaining) for window in refused.windows] == [
        *(("requests", 8), ("tokens", 40)),
        ("requests", 18),
    ]


@pytest.mark.parametrize(("period", "hours"), [("hour", 1), ("day", 24)])
async def test_requests_and_tokens_of_an_hour_or_a_day_are_counted_for_that_long(
    redis: Redis, period: Literal["hour", "day"], hours: int
) -> None:
    rates = limited(RateLimit(requests=2, tokens=100, per=period, requests_per_minute=10, concurrent_calls=10))
    window = "hour" if period == "hour" else "rolling day"
    assert [window.window for window in rates.windows] == ["minute", window]
    assert [await admit(redis, f"j{number}", rates, tokens=20) for number in range(2)] == [None, None]
    over = await admit(redis, "j2", rates, tokens=20)
    assert over is not None
    assert measure(over) == (AGENT, "requests", window)
    assert over.wait_ms is not None
    # A slice is 1 % of the window, and counts until a whole window after its end.
    assert hours * 3_600_000 * 0.99 < over.wait_ms <= hours * 3_600_000 * 1.01
    assert await used(redis, AGENT) == [(2, 40, 2, 2)], "the minute has its own counts"
    await charge(redis, "j0", rates, tokens=75)
    await release(redis, "j1", rates)
    assert measure(await admit(redis, "j3", rates, tokens=30)) == (AGENT, "tokens", window)
    assert await admit(redis, "j4", rates, tokens=25) is None
    never = await admit(redis, "j5", rates, tokens=101)
    assert never is not None
    assert (measure(never), never.wait_ms) == ((AGENT, "tokens", window), None)


async def test_of_two_hundred_that_ask_at_once_fifty_are_admitted(redis: Redis) -> None:
    answers = await asyncio.gather(*(admit(redis, f"j{number}", rpm(50), tokens=3) for number in range(200)))
    assert answers.count(None) == 50
    assert await used(redis, AGENT) == [(50, 150, 50, 0)]


async def test_a_call_that_one_limit_refuses_counts_towards_none(redis: Redis) -> None:
    for refusing in (rpm(1, MODEL), tpm(10, MODEL), at_once(1, MODEL)):
        await redis.client.flushall()
        assert await admit(redis, "first", refusing, tokens=10) is None
        for order in ([rpm(100), refusing], [refusing, rpm(100)]):
            refused = await admit(redis, "second", *order, tokens=10)
            assert refused is not None
            assert refused.key == MODEL
        assert await used(redis, AGENT) == [(0, 0, 0, 0)]


async def test_a_dry_run_counts_nothing(redis: Redis) -> None:
    limits = (rpm(1), at_once(1, MODEL))
    for _ in range(2):
        assert await admit(redis, "j", *limits, lease_ms=None) is None
    await admit(redis, "j", *limits)
    assert await admit(redis, "k", *limits, lease_ms=None) is not None
    assert await used(redis, AGENT, MODEL) == [(1, 0, 1, 0), (0, 0, 0, 1)]


async def test_asking_again_gives_the_same_answer_and_counts_once(redis: Redis) -> None:
    limits = (limited(RateLimit(requests_per_minute=1, concurrent_calls=1)), tpm(10, MODEL))
    answers = await asyncio.gather(*(admit(redis, "j", *limits, tokens=10) for _ in range(50)))
    assert answers == [None] * 50
    assert await used(redis, AGENT, MODEL) == [(1, 10, 1, 1), (1, 10, 1, 0)]


async def test_asking_again_for_an_ended_call_does_not_bring_it_back(redis: Redis) -> None:
    limits = (at_once(1), tpm(10, MODEL))
    await admit(redis, "j", *limits, tokens=10)
    await charge(redis, "j", *limits, tokens=4)
    assert await admit(redis, "j", *limits, tokens=10) is None
    assert await used(redis, AGENT, MODEL) == [(0, 0, 0, 0), (1, 4, 0, 0)]


async def test_the_end_of_a_call_frees_its_slot_and_the_tokens_it_did_not_use_however_often(redis: Redis) -> None:
    limits = (limited(RateLimit(tokens_per_minute=100, concurrent_calls=1)), rpm(100, MODEL))
    await admit(redis, "j", *limits, tokens=80)
    assert await admit(redis, "k", *limits, tokens=60) is not None
    for _ in range(3):
        await charge(redis, "j", *limits, tokens=40)
        assert await used(redis, AGENT, MODEL) == [(1, 40, 0, 0)] * 2
    assert await admit(redis, "k", *limits, tokens=60) is None


async def test_a_call_that_used_more_than_its_worst_case_counts_in_full(redis: Redis) -> None:
    await admit(redis, "j", tpm(100), tokens=10)
    await charge(redis, "j", tpm(100), tokens=130)
    assert await used(redis, AGENT) == [(1, 130, 0, 0)]
    assert measure(await admit(redis, "k", tpm(100), tokens=1)) == (AGENT, "tokens", "minute")


async def test_unknown_usage_leaves_the_worst_case(redis: Redis) -> None:
    await admit(redis, "j", tpm(100), tokens=80)
    await charge(redis, "j", tpm(100), tokens=None)
    assert await used(redis, AGENT) == [(1, 80, 0, 0)]


@pytest.mark.parametrize("tokens", [5, 0])
async def test_a_released_call_leaves_no_trace_and_may_be_asked_for_again(redis: Redis, tokens: int) -> None:
    limits = (limited(RateLimit(requests_per_minute=1, tokens_per_minute=5, concurrent_calls=1)), rpm(1, MODEL))
    for _ in range(2):
        assert await admit(redis, "j", *limits, tokens=tokens) is None
        assert await admit(redis, "k", *limits, tokens=tokens) is not None
        for _ in range(2):
            await release(redis, "j", *limits)
            assert await used(redis, AGENT, MODEL) == [(0, 0, 0, 0)] * 2


async def test_ending_or_releasing_what_was_never_admitted_changes_nothing(redis: Redis) -> None:
    await admit(redis, "j", tpm(10), tokens=10)
    assert await admit(redis, "refused", tpm(10), rpm(5, MODEL), tokens=10) is not None
    for attempt in ("refused", "unheard of"):
        await charge(redis, attempt, tpm(10), rpm(5, MODEL), tokens=3)
        await release(redis, attempt, tpm(10), rpm(5, MODEL))
    assert await used(redis, AGENT, MODEL) == [(1, 10, 1, 0), (0, 0, 0, 0)]


async def test_what_a_dead_worker_held_in_windows_and_slots_ends_by_its_event_or_its_lease(redis: Redis) -> None:
    counters, budgets = BudgetCounters(redis, ZONE), Budgets(redis, ZONE)
    await counters.fill(None, LOG, 0, counters.periods(now()), {}, {})
    rates, names = limited(RateLimit(tokens_per_minute=100, concurrent_calls=2)), CallNames("writer")
    budgeted = limit_table().counters(names)
    for attempt in ("by event", "by lease"):
        command = budgets.reserve_command(
            *(attempt, names, 7, budgeted), now=now(), lease_ms=LEASE_MS, tokens=50, rates=rates
        )
        [raw] = await redis.run([command])
        assert isinstance(budgets.read_reservation(raw, budgeted, 7, now=now(), rates=rates), Reserved)
    # A worker with another config does not know of them, and leaves them to the budget service.
    await charge(redis, "by event", tokens=30)
    assert await used(redis, AGENT) == [(2, 100, 2, 2)]
    settlement = Settlement("by event", 1, names, AttemptSums(spent=3, calls=1), now(), UsedTokens(30, 20))
    for _ in range(2):
        [*_, total] = await budgets.settle([settlement], LOG)
        assert total.spent == 3
        assert await used(redis, AGENT) == [(2, 80, 1, 1)]
    [lapsed] = await budgets.reservations(["by lease"])
    assert lapsed is not None
    await redis.client.zadd("bw:limits:leases", {"by lease": 1})
    for _ in range(2):
        await budgets.charge_estimate(lapsed)
        assert await used(redis, AGENT) == [(2, 80, 0, 0)]


async def test_input_from_a_cache_counts_only_towards_limits_that_count_it(redis: Redis) -> None:
    limits = (limited(RateLimit(tokens_per_minute=100, count_cached=False)), tpm(100, MODEL))
    await admit(redis, "j", *limits, tokens=90)
    ended = Budgets(redis, ZONE).release_command("j", now(), 0, tokens=UsedTokens(80, 10), rates=together(limits))
    await redis.run([ended])
    assert await used(redis, AGENT, MODEL) == [(1, 10, 0, 0), (1, 80, 0, 0)]


async def test_a_providers_refusal_lowers_what_is_believed_of_it_until_the_window_is_over(redis: Redis) -> None:
    window_ms = 200
    of_ann = "user:ann", f"user:ann\v{MODEL}"  # her calls are not those that the provider has no room for
    limits = (tpm(30, MODEL), *(tpm(30, key) for key in of_ann))
    assert await admit(redis, "refused", *limits, tokens=10, window_ms=window_ms) is None
    ended = Budgets(redis, ZONE, window_ms).release_command(
        "refused", now(), 0, tokens=UsedTokens(0, 0, refused=True), rates=together(limits)
    )
    await redis.run([ended])
    assert await used(redis, MODEL, *of_ann) == [(1, 10, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0)]
    assert measure(await admit(redis, "more", *limits, tokens=25, window_ms=window_ms)) == (MODEL, "tokens", "minute")
    async with asyncio.timeout(60):
        while await admit(redis, "later", *limits, tokens=25, window_ms=window_ms) is not None:
            await asyncio.sleep(ASKS_EVERY_S)


async def test_a_changed_limit_holds_from_the_next_question_on_also_on_another_unit(redis: Redis) -> None:
    for number in range(6):
        assert await admit(redis, f"j{number}", rpm(6), tokens=10) is None
    for changed, fits in ((rpm(6), False), (rpm(7), True), (rpm(2), False), (tpm(75), False), (tpm(90), True)):
        assert (await admit(redis, f"k{changed}", changed, tokens=10) is None) == fits


async def test_a_call_for_another_model_gives_back_what_it_held_for_the_first(redis: Redis) -> None:
    other = limited(RateLimit(tokens_per_minute=100, concurrent_calls=1), "model:other")
    first = limited(RateLimit(tokens_per_minute=100, concurrent_calls=1), MODEL)
    assert await admit(redis, "j", tpm(100), first, tokens=60) is None
    # The worker that lost the job does not know the other model.
    assert await admit(redis, "j", tpm(100), other, tokens=90) is None
    assert await used(redis, AGENT, "model:other", MODEL) == [(1, 90, 1, 0), (1, 90, 1, 1), (0, 0, 0, 0)]
    await charge(redis, "j", tpm(100), other, tokens=10)
    assert await used(redis, AGENT, "model:other") == [(1, 10, 0, 0), (1, 10, 0, 0)]


async def test_a_call_for_another_model_of_the_same_price_is_not_admitted_beyond_its_limits(redis: Redis) -> None:
    for other in (rpm(1, MODEL), at_once(1, MODEL)):
        await redis.client.flushall()
        await admit(redis, "k", other)
        assert await admit(redis, "j", tpm(100), tokens=60) is None
        assert await admit(redis, "j", tpm(100), other, tokens=60) is not None


async def test_what_has_slid_out_of_a_window_leaves_no_room_for_asking_again(redis: Redis) -> None:
    rates, window_ms = rpm(1), 5 * SLICES
    assert await admit(redis, "j", rates, tokens=1, window_ms=window_ms) is None
    counted = await clock_ms(redis)
    await until(lambda: passed(redis, counted + window_ms + 10), brief=True)
    assert await admit(redis, "k", rates, window_ms=window_ms) is None
    assert await admit(redis, "j", rates, tokens=2, window_ms=window_ms) is not None


async def test_a_limit_on_spend_that_returns_counts_what_lies_in_its_window_and_no_more(redis: Redis) -> None:
    money = rate_limits_of(AGENT, [Limit("l", (), "usd", "minute", 9, "wait")])
    others, window_ms = rpm(99), 5 * SLICES
    assert isinstance(await ask(redis, "first", money, amount=9, window_ms=window_ms), Reserved)
    counted = await clock_ms(redis)
    # Until nothing of the first call counts, there are calls without a limit on spend.
    for number in range(2):
        assert isinstance(await ask(redis, f"j{number}", others, amount=3, window_ms=window_ms), Reserved)
        moment = counted + (number + 1) * (window_ms // 2 + 10)
        await until(lambda moment=moment: passed(redis, moment), brief=True)
    assert isinstance(await ask(redis, "l", others, amount=3, window_ms=window_ms), Reserved)
    assert isinstance(await ask(redis, "fits", money, amount=3, window_ms=window_ms), Reserved)
    refused = await ask(redis, "too much", money, amount=9, window_ms=window_ms)
    assert isinstance(refused, OverRate)


async def test_a_sender_has_windows_of_so_many_made_up_names_at_the_same_time(redis: Redis) -> None:
    window_ms = 5 * SLICES

    async def is_admitted(user: str, scope: str = "user:*", caller: str = "bot") -> bool:
        limit = Limit("l", parse_scope(scope), "requests", "minute", 99, "wait")
        budgets, rates = Budgets(redis, ZONE, window_ms), rate_limits_of(f"user:{user}", [limit])
        command = budgets.reserve_command(
            *(f"{user}-{caller}-{now()}", NAMES, 0, ()),
            now=now(),
            lease_ms=LEASE_MS,
            rates=rates,
            caller=caller,
            most_names=3,
        )
        [raw] = await redis.run([command])
        answer = budgets.read_reservation(raw, (), 0, now=now(), rates=rates)
        assert isinstance(answer, Reserved | TooManyNames)
        return isinstance(answer, Reserved)

    began = await clock_ms(redis)
    assert [await is_admitted(f"ann-{number}") for number in range(4)] == [True, True, True, False]
    counted = await clock_ms(redis)
    if counted < began + window_ms:
        assert await is_admitted("ann-1"), "it has a window"
        assert await is_admitted("boss", "user:boss"), "a limit names it"
        assert await is_admitted("eve", caller="other")
    await until(lambda: passed(redis, counted + 2 * window_ms + 20), brief=True)
    assert await is_admitted("ann-3")
    for key in await redis.client.keys("bw:limits:names:*"):
        assert 0 < await redis.client.pttl(key) <= 2 * window_ms + 20


async def test_all_that_is_kept_of_a_name_in_a_rate_expires(redis: Redis) -> None:
    day = rate_limits_of("user:ann", [Limit("l", (), "requests", "rolling day", 1, "wait")])
    await ask(redis, "j", day, at_once(1, "user:ann"), tokens=1)
    names = Budgets(redis, ZONE)
    [raw] = await redis.run(
        [names.reserve_command("k", NAMES, 0, (), now=now(), lease_ms=LEASE_MS, rates=day + at_once(1, "user:ann"))]
    )
    assert raw[0] == 6
    kept = [key for key in await redis.client.keys("bw:limits:*") if "user:ann" in key]
    assert len(kept) == 4, "a window and its queue in two keys, and slots"
    for key in kept:
        assert 0 < await redis.client.pttl(key) <= 3 * 24 * 3_600_000


async def test_names_are_distinguished(redis: Redis) -> None:
    for key in ("agent:x", "model:x", "agent:X", "agent:x/y"):
        assert await admit(redis, f"j:{key}", rpm(1, key)) is None
        assert await admit(redis, f"k:{key}", rpm(1, key)) is not None


async def test_the_lease_of_a_dead_worker_ends_and_its_call_still_counts_as_a_request(redis: Redis) -> None:
    limits = (at_once(1), rpm(9, MODEL))
    before = await clock_ms(redis)
    assert await admit(redis, "dead", *limits, lease_ms=300) is None
    async with asyncio.timeout(60):
        while (refused := await admit(redis, "next", *limits)) is not None:
            assert refused.wait_ms is not None
            assert 0 < refused.wait_ms <= 300
            await asyncio.sleep(0.01)
    assert await clock_ms(redis) - before >= 300
    assert await used(redis, AGENT, MODEL) == [(0, 0, 0, 1), (2, 0, 2, 0)]


async def test_who_asks_again_after_the_lease_counts_once_and_needs_a_slot_again(redis: Redis) -> None:
    limits = (at_once(1), tpm(20, MODEL))
    assert await admit(redis, "j", *limits, tokens=7, lease_ms=1) is None
    async with asyncio.timeout(60):
        while (await used(redis, AGENT))[0][3]:
            await asyncio.sleep(0.002)
    assert await admit(redis, "k", *limits, tokens=7) is None
    assert measure(await admit(redis, "j", *limits, tokens=7)) == (AGENT, "concurrent", None)
    await charge(redis, "k", *limits, tokens=7)
    assert await admit(redis, "j", *limits, tokens=7) is None
    assert await used(redis, AGENT, MODEL) == [(0, 0, 0, 1), (2, 14, 1, 0)]


async def test_asking_again_renews_the_lease(redis: Redis) -> None:
    await admit(redis, "j", at_once(1), lease_ms=5_000)
    await admit(redis, "j", at_once(1), lease_ms=50_000)
    await admit(redis, "j", at_once(1), lease_ms=10)
    refused = await admit(redis, "k", at_once(1))
    assert refused is not None
    assert refused.wait_ms is not None
    assert 20_000 < refused.wait_ms <= 50_000
    assert await redis.client.pttl(keys_of(AGENT)[1]) > 20_000


@pytest.mark.parametrize("rates", [rpm(1), tpm(10)])
async def test_the_wait_for_a_window_is_what_is_left_of_it(redis: Redis, rates: RateLimits) -> None:
    before = await clock_ms(redis)
    await admit(redis, "j", rates, tokens=10)
    counted = await clock_ms(redis)
    refused = await admit(redis, "k", rates, tokens=1)
    reported = await clock_ms(redis)
    assert refused is not None
    assert refused.wait_ms is not None
    assert before + WINDOW_MS < reported + refused.wait_ms
    assert refused.wait_ms <= counted - before + WINDOW_MS + SLICE_MS


async def test_a_call_that_is_more_than_a_minute_allows_never_fits(redis: Redis) -> None:
    limits = (rpm(1), tpm(10, MODEL))
    await admit(redis, "j", *limits, tokens=10)
    [window] = limits[1].windows
    never = await admit(redis, "k", *limits, tokens=11)
    assert never is not None
    assert (never.limit, never.wait_ms) == (window.limits["tokens"], None)


async def test_of_several_that_refuse_the_longest_is_reported_and_concurrency_last(redis: Redis) -> None:
    both = (at_once(1), rpm(1, MODEL))
    await admit(redis, "j", *both, lease_ms=600_000)
    assert measure(await admit(redis, "k", *both)) == (MODEL, "requests", "minute")


async def test_the_wait_for_a_lowered_concurrency_is_for_as_many_leases_as_are_too_many(redis: Redis) -> None:
    for number in range(1, 5):
        await admit(redis, f"j{number}", at_once(4), lease_ms=100_000 * number)
    for most, wait_ms in ((4, 100_000), (3, 200_000), (1, 400_000)):
        refused = await admit(redis, "k", at_once(most))
        assert refused is not None
        assert refused.wait_ms is not None
        assert wait_ms - 50_000 < refused.wait_ms <= wait_ms


async def test_no_true_window_ever_holds_more_than_the_limit_and_no_refusal_is_without_cause(redis: Redis) -> None:
    window_ms, most = 300, 7
    slice_ms = window_ms // SLICES
    granted: list[tuple[int, int]] = []  # each was counted between these two moments of Redis' clock
    begun = before = await clock_ms(redis)
    number = refusals = 0
    while before - begun < 1500 or len(granted) <= 2 * most or not refusals:
        refused = await admit(redis, f"j{(number := number + 1)}", rpm(most), tokens=2, window_ms=window_ms)
        after = await clock_ms(redis)
        if refused is None:
            granted.append((before, after))
            if number % 2:
                await charge(redis, f"j{number}", rpm(most), tokens=1)
        else:
            refusals += 1
            assert sum(counted >= before - window_ms - slice_ms for _, counted in granted) >= most
            assert refused.wait_ms is not None
            assert 0 < refused.wait_ms <= window_ms + slice_ms
        await asyncio.sleep(ASKS_EVERY_S)
        before = await clock_ms(redis)
    for (early, _), (_, late) in zip(granted, granted[most:], strict=False):
        assert late - early >= window_ms


async def test_the_wait_reported_is_the_moment_from_which_it_fits(redis: Redis) -> None:
    window_ms, refused, before, after = 400, None, 0, 0
    while refused is None:  # again, where the machine stood still for a window
        await redis.client.flushall()
        for number in range(3):
            assert await admit(redis, f"j{number}", tpm(30), tokens=10, window_ms=window_ms) is None
        before = await clock_ms(redis)
        refused = await admit(redis, "k", tpm(30), tokens=25, window_ms=window_ms)
        after = await clock_ms(redis)
    assert refused.wait_ms is not None
    asked = after
    async with asyncio.timeout(60):
        while await admit(redis, "k", tpm(30), tokens=25, window_ms=window_ms) is not None:
            assert asked < after + refused.wait_ms
            await asyncio.sleep(ASKS_EVERY_S)
            asked = await clock_ms(redis)
    assert await clock_ms(redis) >= before + refused.wait_ms


async def test_what_is_settled_or_released_after_its_slice_is_over_changes_nothing(redis: Redis) -> None:
    window_ms, asked, reported = 100, 0, 100
    held: dict[Any, Any] = {}
    figures: list[tuple[int, int, int, int]] = []
    while reported - asked >= window_ms:  # again, where the machine stood still for a window
        await redis.client.flushall()
        for attempt in ("settled", "released"):
            await admit(redis, attempt, tpm(20), tokens=10, window_ms=window_ms)
        async with asyncio.timeout(60):
            asked = await clock_ms(redis)
            # Asking does not only wait: it clears what is over.
            while await admit(redis, "fresh", tpm(20), tokens=15, window_ms=window_ms) is not None:
                await asyncio.sleep(0.005)
                asked = await clock_ms(redis)
        await charge(redis, "settled", tpm(20), tokens=1)
        await release(redis, "released", tpm(20))
        held = await redis.client.hgetall(keys_of(AGENT)[0])
        figures = await used(redis, AGENT)
        reported = await clock_ms(redis)
    assert (held["r"], held["t"]) == ("1", "15")
    assert figures == [(1, 15, 1, 0)]


@pytest.mark.parametrize("ago", [0, 1, SLICES // 2, SLICES - 1])
async def test_memory_stays_the_same_as_time_passes(redis: Redis, ago: int) -> None:
    counts, last = keys_of(AGENT)[0], await clock_ms(redis) // SLICE_MS - ago
    slices = range(last - SLICES, last + 1)
    of_slice = {"r": 1, "t": 5, "u": 0, "c": 0}
    full = {"first": slices[0], "last": last}
    full |= {unit: count * len(slices) for unit, count in of_slice.items()}
    full |= {f"{unit}{slice_}": count for slice_ in slices for unit, count in of_slice.items()}
    await redis.client.hset(counts, mapping={name: str(count) for name, count in full.items()})
    assert await admit(redis, "j", rpm(10**6), tokens=7) is None
    held = {name: int(count) for name, count in (await redis.client.hgetall(counts)).items()}
    assert len(held) <= 4 * (SLICES + 1) + 6
    assert held["last"] - SLICES <= held["first"] >= slices[0]
    left = sum(slice_ >= held["first"] for slice_ in slices)
    assert (held["r"], held["t"], held["c"]) == (left + 1, 5 * left + 7, 1)
    for unit in of_slice:
        assert held[unit] == sum(count for name, count in held.items() if name[0] == unit and name[1:].isdigit())


async def test_nothing_outlives_its_use_but_the_reservation_that_awaits_its_event(redis: Redis) -> None:
    window_ms, slots = 300, keys_of(AGENT)[1]
    rates = limited(RateLimit(requests_per_minute=10**6, concurrent_calls=10))
    for number in range(10):
        await admit(redis, f"j{number}", rates, tokens=number, lease_ms=1, window_ms=window_ms)
    ended = await clock_ms(redis) + 1
    await until(lambda: passed(redis, ended))
    await admit(redis, "last", rates, lease_ms=50, window_ms=window_ms)
    assert await redis.client.zrange(slots, 0, -1) in (["last"], [])
    for key in keys_of(AGENT):
        left_ms = await redis.client.pttl(key)
        assert left_ms != -1  # it has no end
        assert left_ms <= window_ms + window_ms // SLICES
    async with asyncio.timeout(60):
        while await redis.client.exists(*keys_of(AGENT)):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("slices", "counts"), [(3, True), (10_000, False)])
async def test_a_clock_set_back_stays_strict_and_one_set_back_by_more_than_a_window_begins_again(
    redis: Redis, slices: int, counts: bool
) -> None:
    ahead = await clock_ms(redis) // SLICE_MS + slices
    fields = {"first": ahead, "last": ahead, "r": 1, "t": 5, "c": 0}
    fields |= {f"r{ahead}": 1, f"t{ahead}": 5, f"c{ahead}": 0}
    await redis.client.hset(keys_of(AGENT)[0], mapping={name: str(count) for name, count in fields.items()})
    await redis.client.pexpireat(keys_of(AGENT)[0], (ahead + SLICES + 1) * SLICE_MS)
    assert (await admit(redis, "j", rpm(1), tokens=5) is not None) == counts
    assert (await admit(redis, "j", rpm(2), tokens=5)) is None
    held = await redis.client.hgetall(keys_of(AGENT)[0])
    assert (held["r"], held["t"]) == (("2", "10") if counts else ("1", "5"))
    assert (held[f"r{held['last']}"], held[f"t{held['last']}"]) == (held["r"], held["t"])
    assert WINDOW_MS - SLICE_MS < await redis.client.pttl(keys_of(AGENT)[0]) <= WINDOW_MS + 4 * SLICE_MS


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    with pytest.raises(StateUnavailableError, match="did not answer") as reported:
        await admit(away, "j", rpm(1))
    assert isinstance(reported.value.__cause__, Away)
    await away.close()
