from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.exceptions import ConnectionError as Away

from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand, StateUnavailableError
from breakwater.limits.rules.rate_limit import WINDOW_MS
from breakwater.limits.settings import RateLimit
from breakwater.limits.store.rate_limits import SLICES, LimitedSubject, OverLimit, RateLimits
from tests.helpers import until
from tests.servers import RunningServer

LEASE_MS = 60_000
SLICE_MS = WINDOW_MS // SLICES
ASKS_EVERY_S = 0.001
"""While time passes: shorter than a slice of the windows that tests let pass, and the processor is free in between."""
AGENT, MODEL = "agent:a.b/{c}", "model:openai/gpt-4.1{mini}"


def rpm(most: int, name: str = AGENT) -> LimitedSubject:
    return LimitedSubject(name, RateLimit(requests_per_minute=most))


def tpm(most: int, name: str = AGENT) -> LimitedSubject:
    return LimitedSubject(name, RateLimit(tokens_per_minute=most))


def at_once(most: int, name: str = AGENT) -> LimitedSubject:
    return LimitedSubject(name, RateLimit(concurrent_calls=most))


async def admit(
    redis: Redis,
    attempt: str,
    *limits: LimitedSubject,
    tokens: int = 0,
    lease_ms: int = LEASE_MS,
    window_ms: int = WINDOW_MS,
) -> OverLimit | None:
    [answer] = await redis.run([RateLimits(window_ms).admit_command(attempt, limits, tokens, lease_ms)])
    return RateLimits.read_admission(answer, limits)


async def settle(redis: Redis, attempt: str, limits: Sequence[LimitedSubject], tokens: int | None) -> None:
    await redis.run([RateLimits.settle_command(attempt, limits, [tokens] * len(limits))])


async def release(redis: Redis, attempt: str, limits: Sequence[LimitedSubject]) -> None:
    await redis.run([RateLimits.release_command(attempt, limits)])


USAGE = Script.of("""
-- What counts towards a limit now. Reads only: the sums may hold slices that are over.
-- KEYS: counts, calls
-- Returns {requests, tokens, calls under way}.
local slice_ms, slices = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local first = math.floor(now / slice_ms) - slices
local sums = {r = 0, t = 0}
local known = redis.call('HGETALL', KEYS[1])
for i = 1, #known, 2 do
  local kind, slice = string.match(known[i], '^([rt])(%d+)$')
  if kind and tonumber(slice) >= first then
    sums[kind] = sums[kind] + tonumber(known[i + 1])
  end
end
return {sums.r, sums.t, redis.call('ZCOUNT', KEYS[2], '(' .. now, '+inf')}
""")


async def used(redis: Redis, *names: str) -> list[tuple[int, int, int]]:
    """Requests, tokens and calls of each name."""
    slice_ms = WINDOW_MS // SLICES
    commands = [ScriptCommand(USAGE, keys_of(name), [slice_ms, SLICES]) for name in names]
    return [(int(requests), int(tokens), int(under_way)) for requests, tokens, under_way in await redis.run(commands)]


async def clock_ms(redis: Redis) -> int:
    seconds, microseconds = await redis.client.time()
    return seconds * 1000 + microseconds // 1000


async def passed(redis: Redis, moment_ms: int) -> bool:
    return await clock_ms(redis) > moment_ms


@pytest.mark.parametrize(
    ("limited", "tokens", "granted", "what"),
    [
        (rpm(1), 0, 1, "requests_per_minute"),
        (rpm(7), 10**9, 7, "requests_per_minute"),
        (tpm(100), 30, 3, "tokens_per_minute"),
        (tpm(90), 30, 3, "tokens_per_minute"),
        (tpm(10_000_000_000), 5_000_000_000, 2, "tokens_per_minute"),
        (at_once(4), 10, 4, "concurrent_calls"),
        (LimitedSubject(AGENT, RateLimit(requests_per_minute=5, tokens_per_minute=40)), 10, 4, "tokens_per_minute"),
        (LimitedSubject(AGENT, RateLimit(requests_per_minute=3, concurrent_calls=5)), 10, 3, "requests_per_minute"),
    ],
)
async def test_calls_are_admitted_up_to_each_limit_and_not_beyond(
    redis: Redis, limited: LimitedSubject, tokens: int, granted: int, what: str
) -> None:
    answers = [await admit(redis, f"j{number}", limited, tokens=tokens) for number in range(granted + 2)]
    assert answers[:granted] == [None] * granted
    assert [(over.name, over.quantity) for over in answers[granted:] if over] == [(AGENT, what)] * 2
    assert await used(redis, AGENT) == [(granted, granted * tokens, granted)]


@pytest.mark.parametrize(("period", "hours"), [("hour", 1), ("day", 24)])
async def test_requests_and_tokens_of_an_hour_or_a_day_are_counted_for_that_long(
    redis: Redis, period: Literal["hour", "day"], hours: int
) -> None:
    rule = RateLimit(requests=2, tokens=100, per=period, requests_per_minute=10, concurrent_calls=10)
    limits = LimitedSubject.all_of(AGENT, rule)
    assert [limited.period for limited in limits] == ["minute", period]
    assert [await admit(redis, f"j{number}", *limits, tokens=20) for number in range(2)] == [None, None]
    over = await admit(redis, "j2", *limits, tokens=20)
    assert over is not None
    assert (over.name, over.quantity) == (AGENT, f"requests_per_{period}")
    assert over.wait_ms is not None
    # A slice is 1 % of the window, and counts until a whole window after its end.
    assert hours * 3_600_000 * 0.99 < over.wait_ms <= hours * 3_600_000 * 1.01
    assert await used(redis, AGENT) == [(2, 40, 2)], "the minute has its own counts"
    await settle(redis, "j0", limits, 75)
    await release(redis, "j1", limits)
    over = await admit(redis, "j3", *limits, tokens=30)
    assert over is not None
    assert over.quantity == f"tokens_per_{period}"
    assert await admit(redis, "j4", *limits, tokens=25) is None
    never = await admit(redis, "j5", *limits, tokens=101)
    assert never is not None
    assert (never.quantity, never.wait_ms) == (f"tokens_per_{period}", None)
    [remembered] = await redis.client.keys("bw:rate:attempt:j4")
    assert LEASE_MS < await redis.client.pttl(remembered) <= LEASE_MS + 3_600_000


async def test_a_limit_of_an_hour_alone_is_one_question(redis: Redis) -> None:
    [limited] = LimitedSubject.all_of(MODEL, RateLimit(requests=1, per="hour"))
    assert await admit(redis, "j0", limited, lease_ms=1) is None
    assert await admit(redis, "j1", limited, rpm(5)) is not None
    assert await used(redis, AGENT) == [(0, 0, 0)]


async def test_of_two_hundred_that_ask_at_once_fifty_are_admitted(redis: Redis) -> None:
    answers = await asyncio.gather(*(admit(redis, f"j{number}", rpm(50), tokens=3) for number in range(200)))
    assert answers.count(None) == 50
    assert await used(redis, AGENT) == [(50, 150, 50)]


async def test_a_call_that_one_limit_refuses_counts_towards_none(redis: Redis) -> None:
    for refusing in (rpm(1, MODEL), tpm(10, MODEL), at_once(1, MODEL)):
        await redis.client.flushall()
        assert await admit(redis, "first", refusing, tokens=10) is None
        for order in ([rpm(100), refusing], [refusing, rpm(100)]):
            refused = await admit(redis, "second", *order, tokens=10)
            assert refused is not None
            assert refused.name == MODEL
        assert await used(redis, AGENT, MODEL) == [(0, 0, 0), (1, 10, 1)]


async def test_asking_again_gives_the_same_answer_and_counts_once(redis: Redis) -> None:
    limits = (LimitedSubject(AGENT, RateLimit(requests_per_minute=1, concurrent_calls=1)), tpm(10, MODEL))
    answers = await asyncio.gather(*(admit(redis, "j", *limits, tokens=10) for _ in range(50)))
    assert answers == [None] * 50
    assert await used(redis, AGENT, MODEL) == [(1, 10, 1)] * 2


async def test_asking_again_for_a_settled_call_does_not_bring_it_back(redis: Redis) -> None:
    limits = (at_once(1), tpm(10, MODEL))
    await admit(redis, "j", *limits, tokens=10)
    await settle(redis, "j", limits, 4)
    assert await admit(redis, "j", *limits, tokens=10) is None
    assert await used(redis, AGENT, MODEL) == [(1, 4, 0)] * 2


async def test_settling_frees_the_call_and_the_tokens_it_did_not_use_however_often(redis: Redis) -> None:
    limits = (LimitedSubject(AGENT, RateLimit(tokens_per_minute=100, concurrent_calls=1)), rpm(100, MODEL))
    await admit(redis, "j", *limits, tokens=80)
    assert await admit(redis, "k", *limits, tokens=60) is not None
    for _ in range(3):
        await settle(redis, "j", limits, 40)
        assert await used(redis, AGENT, MODEL) == [(1, 40, 0)] * 2
    assert await admit(redis, "k", *limits, tokens=60) is None


async def test_a_call_that_used_more_than_its_worst_case_counts_in_full(redis: Redis) -> None:
    await admit(redis, "j", tpm(100), tokens=10)
    await settle(redis, "j", [tpm(100)], 130)
    assert await used(redis, AGENT) == [(1, 130, 0)]
    refused = await admit(redis, "k", tpm(100), tokens=1)
    assert refused is not None
    assert refused.quantity == "tokens_per_minute"


async def test_unknown_usage_leaves_the_worst_case_and_known_usage_corrects_it_later(redis: Redis) -> None:
    await admit(redis, "j", tpm(100), tokens=80)
    for tokens, counted in ((None, 80), (30, 30), (None, 30)):
        await settle(redis, "j", [tpm(100)], tokens)
        assert await used(redis, AGENT) == [(1, counted, 0)]


@pytest.mark.parametrize("tokens", [5, 0])
async def test_a_released_call_leaves_no_trace_and_may_be_asked_for_again(redis: Redis, tokens: int) -> None:
    limits = (
        LimitedSubject(AGENT, RateLimit(requests_per_minute=1, tokens_per_minute=5, concurrent_calls=1)),
        rpm(1, MODEL),
    )
    for _ in range(2):
        assert await admit(redis, "j", *limits, tokens=tokens) is None
        assert await admit(redis, "k", *limits, tokens=tokens) is not None
        for _ in range(2):
            await release(redis, "j", limits)
            assert await used(redis, AGENT, MODEL) == [(0, 0, 0)] * 2


async def test_settling_or_releasing_what_was_never_admitted_changes_nothing(redis: Redis) -> None:
    await admit(redis, "j", tpm(10), tokens=10)
    assert await admit(redis, "refused", tpm(10), rpm(5, MODEL), tokens=10) is not None
    for attempt in ("refused", "unheard of"):
        await settle(redis, attempt, [tpm(10), rpm(5, MODEL)], 3)
        await release(redis, attempt, [tpm(10), rpm(5, MODEL)])
    assert await used(redis, AGENT, MODEL) == [(1, 10, 1), (0, 0, 0)]


async def test_a_limit_that_came_or_went_while_the_call_was_under_way_does_no_harm(redis: Redis) -> None:
    await admit(redis, "j", tpm(100), tokens=10)
    await admit(redis, "k", tpm(100), rpm(9, MODEL), tokens=10)
    # One more than it was admitted to, and one fewer.
    await settle(redis, "j", [tpm(100), rpm(9, MODEL)], 4)
    await settle(redis, "k", [tpm(100)], 4)
    assert await used(redis, AGENT, MODEL) == [(2, 8, 0), (1, 10, 1)]


async def test_a_changed_limit_holds_from_the_next_question_on_also_where_there_was_none(redis: Redis) -> None:
    for number in range(6):
        assert await admit(redis, f"j{number}", rpm(6), tokens=10) is None
    for limited, fits in ((rpm(6), False), (rpm(7), True), (rpm(2), False), (tpm(75), False), (at_once(7), False)):
        assert (await admit(redis, f"k{limited.rule}", limited, tokens=10) is None) == fits
    assert await admit(redis, "l", at_once(8), tokens=10) is None


async def test_names_are_distinguished(redis: Redis) -> None:
    for name in ("agent:x", "model:x", "agent:X", "agent:x/y"):
        assert await admit(redis, f"j:{name}", rpm(1, name)) is None
        assert await admit(redis, f"k:{name}", rpm(1, name)) is not None


async def test_the_lease_of_a_dead_worker_ends_and_its_call_still_counts_as_a_request(redis: Redis) -> None:
    before = await clock_ms(redis)
    assert await admit(redis, "dead", at_once(1), lease_ms=300) is None
    async with asyncio.timeout(60):
        while (refused := await admit(redis, "next", at_once(1))) is not None:
            assert refused.wait_ms is not None
            assert 0 < refused.wait_ms <= 300
            await asyncio.sleep(0.01)
    assert await clock_ms(redis) - before >= 300
    assert await used(redis, AGENT) == [(2, 0, 1)]


async def test_who_asks_again_after_the_lease_asks_for_another_call(redis: Redis) -> None:
    limited = LimitedSubject(AGENT, RateLimit(requests_per_minute=2))
    assert await admit(redis, "j", limited, tokens=7, lease_ms=1) is None
    async with asyncio.timeout(60):
        while (await used(redis, AGENT))[0][2]:
            await asyncio.sleep(0.002)
    assert await admit(redis, "j", limited, tokens=7) is None
    assert await used(redis, AGENT) == [(2, 14, 1)]
    assert await admit(redis, "k", limited) is not None
    await settle(redis, "j", [limited], 3)
    assert await used(redis, AGENT) == [(2, 10, 0)]


async def test_asking_again_renews_the_lease(redis: Redis) -> None:
    await admit(redis, "j", at_once(1), lease_ms=5_000)
    await admit(redis, "j", at_once(1), lease_ms=50_000)
    await admit(redis, "j", at_once(1), lease_ms=10)
    refused = await admit(redis, "k", at_once(1))
    assert refused is not None
    assert refused.wait_ms is not None
    assert 20_000 < refused.wait_ms <= 50_000
    for key in await redis.client.keys("*:calls:*"):
        assert await redis.client.pttl(key) > 20_000


@pytest.mark.parametrize("limited", [rpm(1), tpm(10)])
async def test_the_wait_for_a_window_is_what_is_left_of_it(redis: Redis, limited: LimitedSubject) -> None:
    before = await clock_ms(redis)
    await admit(redis, "j", limited, tokens=10)
    counted = await clock_ms(redis)
    refused = await admit(redis, "k", limited, tokens=1)
    reported = await clock_ms(redis)
    assert refused is not None
    assert refused.wait_ms is not None
    assert before + WINDOW_MS < reported + refused.wait_ms
    assert refused.wait_ms <= counted - before + WINDOW_MS + SLICE_MS


async def test_a_call_that_is_more_than_a_minute_allows_never_fits(redis: Redis) -> None:
    limits = (rpm(1), tpm(10, MODEL))
    await admit(redis, "j", *limits, tokens=10)
    assert await admit(redis, "k", *limits, tokens=11) == OverLimit(MODEL, "tokens_per_minute", None)


async def test_of_several_that_refuse_the_longest_is_reported_and_concurrency_last(redis: Redis) -> None:
    both = (at_once(1), rpm(1, MODEL))
    await admit(redis, "j", *both, lease_ms=600_000)
    refused = await admit(redis, "k", *both)
    assert refused is not None
    assert (refused.name, refused.quantity) == (MODEL, "requests_per_minute")


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
                await settle(redis, f"j{number}", [rpm(most)], 1)
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
    held: dict[str, str] = {}
    figures: list[tuple[int, int, int]] = []
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
        await settle(redis, "settled", [tpm(20)], 1)
        await release(redis, "released", [tpm(20)])
        held, figures = await redis.client.hgetall(keys_of(AGENT)[0]), await used(redis, AGENT)
        reported = await clock_ms(redis)
    assert (held["requests"], held["tokens"]) == ("1", "15")
    assert figures == [(1, 15, 1)]


@pytest.mark.parametrize("ago", [0, 1, SLICES // 2, SLICES - 1])
async def test_memory_stays_the_same_as_time_passes(redis: Redis, ago: int) -> None:
    counts, last = keys_of(AGENT)[0], await clock_ms(redis) // SLICE_MS - ago
    slices = range(last - SLICES, last + 1)
    full = {"first": slices[0], "last": last, "requests": len(slices), "tokens": 5 * len(slices)}
    full |= {f"{kind}{slice_}": count for slice_ in slices for kind, count in (("r", 1), ("t", 5))}
    await redis.client.hset(counts, mapping={name: str(count) for name, count in full.items()})
    assert await admit(redis, "j", rpm(10**6), tokens=7) is None
    held = {name: int(count) for name, count in (await redis.client.hgetall(counts)).items()}
    assert len(held) <= 2 * (SLICES + 1) + 4
    assert held["last"] - SLICES <= held["first"] >= slices[0]
    left = sum(slice_ >= held["first"] for slice_ in slices)
    assert (held["requests"], held["tokens"]) == (left + 1, 5 * left + 7)
    for kind in ("requests", "tokens"):
        assert held[kind] == sum(count for name, count in held.items() if name[0] == kind[0] and name[1:].isdigit())


async def test_nothing_outlives_its_use(redis: Redis) -> None:
    window_ms, calls = 300, keys_of(AGENT)[1]
    for number in range(10):
        await admit(redis, f"j{number}", rpm(10**6), tokens=number, lease_ms=1, window_ms=window_ms)
    ended = await clock_ms(redis) + 1
    await until(lambda: passed(redis, ended))
    await admit(redis, "last", rpm(10**6), lease_ms=50, window_ms=window_ms)
    assert await redis.client.zrange(calls, 0, -1) in (["last"], [])
    for key in await redis.client.keys("*"):
        left_ms = await redis.client.pttl(key)
        assert left_ms != -1  # it has no end
        assert left_ms <= window_ms + window_ms // SLICES
    async with asyncio.timeout(60):
        while await redis.client.dbsize():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("slices", "counts"), [(3, True), (10_000, False)])
async def test_a_clock_set_back_stays_strict_and_one_set_back_by_more_than_a_window_begins_again(
    redis: Redis, slices: int, counts: bool
) -> None:
    ahead = await clock_ms(redis) // SLICE_MS + slices
    fields = {"first": ahead, "last": ahead, "requests": 1, "tokens": 5, f"r{ahead}": 1, f"t{ahead}": 5}
    await redis.client.hset(keys_of(AGENT)[0], mapping={name: str(count) for name, count in fields.items()})
    await redis.client.pexpireat(keys_of(AGENT)[0], (ahead + SLICES + 1) * SLICE_MS)
    assert (await admit(redis, "j", rpm(1), tokens=5) is not None) == counts
    assert (await admit(redis, "j", rpm(2), tokens=5)) is None
    held = await redis.client.hgetall(keys_of(AGENT)[0])
    assert (held["requests"], held["tokens"]) == (("2", "10") if counts else ("1", "5"))
    assert (held[f"r{held['last']}"], held[f"t{held['last']}"]) == (held["requests"], held["tokens"])
    assert WINDOW_MS - SLICE_MS < await redis.client.pttl(keys_of(AGENT)[0]) <= WINDOW_MS + 4 * SLICE_MS


def keys_of(name: str) -> Sequence[str]:
    """The keys of its counts and of its calls."""
    return RateLimits().admit_command("j", [rpm(1, name)], 0, 0).keys[1:]


@dataclass(slots=True)
class Call:
    tokens: int
    names: frozenset[str]
    """What it counts towards."""
    under_way_at: set[str] = field(default_factory=set[str])


RULES = st.builds(
    RateLimit.model_construct,
    requests_per_minute=st.none() | st.integers(1, 4),
    tokens_per_minute=st.none() | st.integers(1, 60),
    concurrent_calls=st.none() | st.integers(1, 3),
)
LIMITED = ("requests_per_minute", "tokens_per_minute", "concurrent_calls")
NAMES = ("agent:a", "agent:b", "model:m")
LIMITS = st.dictionaries(st.sampled_from(NAMES), RULES, min_size=1).map(
    lambda rules: [LimitedSubject(name, limit) for name, limit in rules.items()]
)
ATTEMPTS = st.sampled_from("abcdef")


class Limits(RuleBasedStateMachine):
    """Any mix of asking, settling and releasing, repeated at will and under any rules, against a model in Python.

    It is over within a window, so nothing ages: that is what the tests with a short window are for.
    """

    redis: Redis
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.run(self.redis.client.flushall())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def expected(self, name: str) -> tuple[int, int, int]:
        mine = [call for call in self.calls.values() if name in call.names]
        return len(mine), sum(call.tokens for call in mine), sum(name in call.under_way_at for call in mine)

    def refusing(self, limits: list[LimitedSubject], tokens: int) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for limited in limits:
            more = zip(self.expected(limited.name), (1, tokens, 1), strict=True)
            limits_of = zip(LIMITED, limited.rule.most("minute"), more, strict=True)
            for what, most, (counted, amount) in limits_of:
                if most is not None and counted + amount > most:
                    found.add((limited.name, what))
        return found

    @rule(attempt=ATTEMPTS, limits=LIMITS, tokens=st.integers(0, 60))
    def ask(self, attempt: str, limits: list[LimitedSubject], tokens: int) -> None:
        refused = self.run(admit(self.redis, attempt, *limits, tokens=tokens))
        if attempt in self.calls:
            assert refused is None
            return
        refusing = self.refusing(limits, tokens)
        assert (refused is None) == (not refusing)
        if refused is not None:
            assert (refused.name, refused.quantity) in refusing
            never = [limited.name for limited in limits if tokens > (limited.rule.tokens_per_minute or tokens)]
            assert (refused.wait_ms is None) == bool(never)
            return
        names = frozenset(limited.name for limited in limits)
        self.calls[attempt] = Call(tokens, names, set(names))

    @rule(attempt=ATTEMPTS, tokens=st.none() | st.integers(0, 90))
    def settle(self, attempt: str, tokens: int | None) -> None:
        self.run(settle(self.redis, attempt, [rpm(1, name) for name in NAMES], tokens))
        if call := self.calls.get(attempt):
            call.under_way_at = set()
            call.tokens = call.tokens if tokens is None else tokens

    @rule(attempt=ATTEMPTS)
    def release(self, attempt: str) -> None:
        self.run(release(self.redis, attempt, [rpm(1, name) for name in NAMES]))
        self.calls.pop(attempt, None)

    @invariant()
    def what_is_counted_is_right(self) -> None:
        counted, sums = self.run(self.counted())
        assert counted == [self.expected(name) for name in NAMES]
        assert sums == [self.expected(name)[:2] for name in NAMES]

    async def counted(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, ...]]]:
        """By the slices and leases, and by the running sums."""
        async with self.redis.client.pipeline(transaction=False) as pipe:
            for name in NAMES:
                pipe.hmget(keys_of(name)[0], ["requests", "tokens"])
            held = await pipe.execute()
        return await used(self.redis, *NAMES), [tuple(int(count or 0) for count in sums) for sums in held]


def test_the_counts_stay_right_whatever_is_asked_in_whatever_order(redis_server: RunningServer) -> None:
    with asyncio.Runner() as runner:
        Limits.runner = runner
        Limits.redis = Redis(redis_server.url)
        run_state_machine_as_test(
            Limits,
            settings=settings(stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]),
        )
        runner.run(Limits.redis.close())


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    with pytest.raises(StateUnavailableError, match="did not answer") as reported:
        await admit(away, "j", rpm(1))
    assert isinstance(reported.value.__cause__, Away)
    await away.close()
