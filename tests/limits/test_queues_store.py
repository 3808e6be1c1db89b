"""The queues of calls that wait for a rate: the script against its model, and what the order gives to whom."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import UTC, datetime
from itertools import chain
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.identity.contract import PRIORITIES
from breakwater.jobs.rules.turns import CallerTurn
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.rules.budget import Counter as Budget
from breakwater.limits.rules.budget import OverBudget
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.rate_limit import OverRate, RateLimits, rate_limits_of
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets, HeldOtherwise, Reserved, UsedTokens
from tests.limits.limit_tables import limit_table
from tests.limits.queue_model import QueueModel, shares_of

ZONE, NAMES = ZoneInfo("UTC"), CallNames("a")
WINDOW_MS = 400
TURNS = st.builds(
    CallerTurn, st.sampled_from("ab"), st.sampled_from(["", "t", "u"]), st.sampled_from(PRIORITIES), st.integers(1, 2)
)


def at_once(most: int, scope: str = "agent:x") -> RateLimits:
    return rate_limits_of(scope, [Limit("slots", (), "concurrent", None, most, "wait")])


def per_minute(requests: int | None = None, tokens: int | None = None, scope: str = "agent:x") -> RateLimits:
    limits = [Limit("requests", (), "requests", "minute", requests, "wait")] if requests is not None else []
    if tokens is not None:
        limits.append(Limit("tokens", (), "tokens", "minute", tokens, "wait"))
    return rate_limits_of(scope, limits)


async def filled(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZONE)
    assert await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})


def is_held_up(answer: object) -> bool:
    """Whether a call only has to wait for other calls to cost less than they reserve."""
    return isinstance(answer, OverBudget) and answer.by_reservations


class Caller:
    """Asks under limits, and ends calls."""

    def __init__(self, redis: Redis, rates: RateLimits, window_ms: int = 60_000) -> None:
        self._redis, self._rates = redis, rates
        self._budgets = Budgets(redis, ZONE, window_ms)

    async def ask(
        self,
        attempt: str,
        turn: CallerTurn,
        tokens: int = 1,
        lease_ms: int | None = 60_000,
        can_wait_ms: int | None = None,
    ) -> OverRate | None:
        answer = await self.answer(attempt, turn, tokens=tokens, lease_ms=lease_ms, can_wait_ms=can_wait_ms)
        assert isinstance(answer, Reserved | OverRate)
        return answer if isinstance(answer, OverRate) else None

    async def answer(
        self,
        attempt: str,
        turn: CallerTurn,
        *,
        tokens: int = 1,
        amount: int = 0,
        counters: tuple[Budget, ...] = (),
        lease_ms: int | None = 60_000,
        can_wait_ms: int | None = None,
    ) -> object:
        now = datetime.now(UTC)
        command = self._budgets.reserve_command(
            *(attempt, NAMES, amount, counters),
            now=now,
            lease_ms=lease_ms,
            tokens=tokens,
            rates=self._rates,
            turn=turn,
            can_wait_ms=can_wait_ms,
        )
        [raw] = await self._redis.run([command])
        answer = self._budgets.read_reservation(raw, counters, amount, now=now, rates=self._rates)
        if isinstance(answer, HeldOtherwise):  # as the gate does
            await self._redis.run([self._budgets.give_up_command(attempt, answer)])
            [raw] = await self._redis.run([command])
            answer = self._budgets.read_reservation(raw, counters, amount, now=now, rates=self._rates)
        return answer

    async def end(self, attempt: str, tokens: int = 1, cost: int = 0) -> None:
        used = UsedTokens(tokens, tokens)
        command = self._budgets.release_command(attempt, datetime.now(UTC), cost, tokens=used, rates=self._rates)
        await self._redis.run([command])

    async def queue_keys(self) -> list[str]:
        return sorted(await self._redis.client.keys("bw:limits:queue:*")) + sorted(
            await self._redis.client.keys("bw:limits:waiters:*")
        )


async def test_the_script_queues_as_its_model_does(redis: Redis) -> None:
    for seed in range(12):
        await redis.client.flushall()
        rng = random.Random(seed)
        slots = rng.choice((1, 2, 4))
        model, caller = QueueModel(slots), Caller(redis, at_once(slots))
        turns: dict[str, CallerTurn] = {}
        for step in range(60):
            if model.running and rng.random() < 0.3:
                attempt = rng.choice(sorted(model.running))
                model.end(attempt)
                await caller.end(attempt)
                continue
            attempt = f"j{step}"
            if model.waiting and rng.random() < 0.6:
                attempt = rng.choice(sorted(model.waiting))
            turn = turns.setdefault(
                attempt, CallerTurn(rng.choice("ab"), rng.choice("tu"), rng.choice(PRIORITIES), rng.choice((1, 2)))
            )
            over = await caller.ask(attempt, turn)
            assert (None if over is None else over.ahead) == model.ask(attempt, turn), (seed, step)
        if not model.waiting:
            assert await caller.queue_keys() == []


@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 30))
def test_a_flood_of_one_delays_anothers_single_call_by_at_most_one_call_per_slot(
    slots: int, flood: int, served_before: int
) -> None:
    model = QueueModel(slots)
    for number in range(slots + flood):
        model.ask(f"flood-{number}", CallerTurn("flooding"))
    for _ in range(min(served_before, flood - 1)):
        model.serve()
    model.ask("single", CallerTurn("other"))
    assert "single" in {model.serve() for _ in range(slots + 1)}


@given(st.lists(TURNS, min_size=1, max_size=30), st.integers(1, 3))
def test_all_that_wait_are_served(turns: list[CallerTurn], slots: int) -> None:
    model = QueueModel(slots)
    for number in range(slots):
        model.ask(f"first-{number}", CallerTurn("a"))
    for number, turn in enumerate(turns):
        model.ask(f"j{number}", turn)
    assert {model.serve() for _ in turns} == {f"j{number}" for number in range(len(turns))}


def test_callers_are_served_by_their_weights_and_priorities_and_low_priority_moves_on() -> None:
    model = QueueModel(1)
    model.ask("first", CallerTurn("a"))
    heavy, light, low = CallerTurn("a", weight=3), CallerTurn("b"), CallerTurn("c", priority="low")
    for turn in (heavy, light, low):
        for number in range(60):
            model.ask(f"{turn.key}{number}", turn)
    served = shares_of(model, 34)
    assert served == {heavy: 24, light: 8, low: 2}


def test_a_key_gets_no_more_by_many_tenants() -> None:
    model = QueueModel(1)
    model.ask("first", CallerTurn("a"))
    for number in range(40):
        model.ask(f"a{number}", CallerTurn("a", f"t{number % 4}"))
        model.ask(f"b{number}", CallerTurn("b"))
    served = shares_of(model, 20)
    assert 9 <= served[CallerTurn("b")] <= 11


async def test_nobody_overtakes_by_polling_and_the_one_in_front_has_the_room_kept(redis: Redis) -> None:
    caller = Caller(redis, at_once(1))
    assert await caller.ask("running", CallerTurn("a")) is None
    assert (over := await caller.ask("head", CallerTurn("b"))) is not None
    assert (over.ahead, over.ask_again_ms) == (0, 50)
    assert (over := await caller.ask("next", CallerTurn("c"))) is not None
    assert (over.ahead, over.ask_again_ms) == (1, 100)
    await caller.end("running")
    for _ in range(3):
        assert await caller.ask("next", CallerTurn("c")) is not None
        assert await caller.ask("new", CallerTurn("d")) is not None
    assert await caller.ask("head", CallerTurn("b")) is None


async def test_who_sleeps_does_not_stop_those_for_whom_there_is_room_anyway(redis: Redis) -> None:
    caller = Caller(redis, per_minute(tokens=100))
    assert await caller.ask("running", CallerTurn("a"), tokens=60) is None
    assert await caller.ask("large", CallerTurn("b"), tokens=50) is not None
    await caller.end("running", tokens=20)
    assert await caller.ask("too much", CallerTurn("c", priority="low"), tokens=31) is not None
    assert await caller.ask("small", CallerTurn("d", priority="low"), tokens=30) is None
    assert await caller.ask("large", CallerTurn("b"), tokens=50) is None


async def test_a_call_that_does_not_ask_again_loses_its_place(redis: Redis) -> None:
    caller = Caller(redis, at_once(1))
    assert await caller.ask("running", CallerTurn("a")) is None
    assert await caller.ask("dead", CallerTurn("b")) is not None
    await caller.end("running")
    [queue, waiters] = await caller.queue_keys()
    text = await redis.client.hget(waiters, "adead")
    assert text is not None
    until_ms, _, more = text.partition("|")
    seconds, microseconds = await redis.client.time()
    assert 0 < int(until_ms) - (seconds * 1000 + microseconds // 1000) <= 2100
    await redis.client.hset(waiters, "adead", f"1|{more}")
    assert await caller.ask("next", CallerTurn("c")) is None
    assert await redis.client.exists(queue, waiters) == 0


async def test_a_spent_counter_takes_a_waiting_call_out_of_its_queue(redis: Redis) -> None:
    caller, cap = Caller(redis, at_once(1)), limit_table(Caps.model_construct(daily_usd=10, enforcement="hard"))
    await filled(redis)
    assert await caller.ask("running", CallerTurn("a")) is None
    assert await caller.ask("waits", CallerTurn("b")) is not None
    assert len(await caller.queue_keys()) == 2
    refused = await caller.answer("waits", CallerTurn("b"), amount=11, counters=cap.counters(NAMES))
    assert isinstance(refused, OverBudget)
    assert await caller.queue_keys() == []


@pytest.mark.long(about_s=7)
async def test_who_waits_has_a_place_and_who_is_refused_or_runs_has_none(redis: Redis) -> None:
    """Random histories of calls under a cap, on models of which one has limits, that wait, end, or are refused."""
    kinds: Counter[str] = Counter()
    for seed in range(20):
        await redis.client.flushall()
        await filled(redis)
        rng = random.Random(seed)
        cap = limit_table(Caps.model_construct(daily_usd=12, enforcement="hard")).counters(NAMES)
        callers = {
            "m": Caller(redis, at_once(2) + per_minute(6, scope="model:m") + at_once(1, "model:m")),
            "n": Caller(redis, at_once(2)),
        }
        running: dict[str, str] = {}
        waiting: dict[str, str] = {}
        for step in range(60):
            if running and rng.random() < 0.35:
                attempt = rng.choice(sorted(running))
                model = running.pop(attempt)
                await callers[model].end(attempt, cost=rng.choice((0, 1)))
                continue
            again = sorted({*waiting, *running})
            attempt = rng.choice(again) if again and rng.random() < 0.6 else f"j{step}"
            # A worker that lost a job may have asked for another model; one that waits has not changed it.
            model = waiting.get(attempt) or rng.choice("mn")
            time_to_wait = {} if rng.random() < 0.8 else {"can_wait_ms": 0}
            answer = await callers[model].answer(
                *(attempt, CallerTurn(rng.choice("ab"), rng.choice("tu"))),
                amount=rng.choice((0, 1, 1, 5, 13)),
                counters=cap,
                **time_to_wait,
            )
            running.pop(attempt, None)
            was_waiting = waiting.pop(attempt, None) is not None
            kinds[type(answer).__name__] += 1
            if isinstance(answer, Reserved):
                running[attempt] = model
            elif not time_to_wait and (isinstance(answer, OverRate) or (was_waiting and is_held_up(answer))):
                waiting[attempt] = model
            queues = [await redis.client.zrange(key, 0, -1) for key in await redis.client.keys("bw:limits:queue:*")]
            assert set(chain(*queues)) <= set(waiting), (seed, step)
            assert attempt in chain(*queues) or not isinstance(answer, OverRate) or time_to_wait, (seed, step)
            slot_keys = await redis.client.keys("bw:limits:slots:*")
            slots = {key: set(await redis.client.zrange(key, 0, -1)) for key in slot_keys}
            assert slots.get("bw:limits:slots:agent:x", set()) == set(running), (seed, step)
            of_m = {name for name, model in running.items() if model == "m"}
            assert slots.get("bw:limits:slots:model:m", set()) == of_m, (seed, step)
            under_way = await redis.client.hget("bw:limits:window:minute:model:m", "c")
            assert int(under_way or 0) == len(of_m), (seed, step)
    assert min(kinds[name] for name in ("Reserved", "OverRate", "OverBudget")) > 20


async def test_many_places_of_calls_that_ask_no_more_are_removed_in_parts(redis: Redis) -> None:
    places, caller = 700, Caller(redis, at_once(1))
    assert await caller.ask("running", CallerTurn("a")) is None
    assert await caller.ask("live", CallerTurn("z"), can_wait_ms=60_000) is not None
    [queue, waiters] = await caller.queue_keys()
    live = await redis.client.zscore(queue, "live")
    assert live is not None
    async with redis.client.pipeline(transaction=False) as pipe:
        for number in range(places):
            pipe.zadd(queue, {f"gone-{number}": live - places + number})
            pipe.hset(waiters, f"agone-{number}", f"1|1|1|0\nb\nt{number % 7}")
        for tenant in range(7):
            pipe.hset(waiters, f"wb\nt{tenant}", len(range(tenant, places, 7)))
        pipe.hset(waiters, "kb", 7)
        await pipe.execute()
    await caller.end("running")
    left = [places]
    while (over := await caller.ask("live", CallerTurn("z"), can_wait_ms=60_000)) is not None:
        assert over.ask_again_ms <= 50, "whoever asks again removes the next ones"
        left.append(await redis.client.zcard(queue) - 1)
        assert 0 < left[-2] - left[-1] <= 200
    assert len(left) == places // 200 + 1
    assert await caller.queue_keys() == []


async def test_calls_without_the_time_to_wait_take_no_place_and_leave_room_for_others(redis: Redis) -> None:
    caller = Caller(redis, per_minute(requests=1), WINDOW_MS)
    assert await caller.ask("running", CallerTurn("a")) is None
    for number in range(5):
        over = await caller.ask(f"j{number}", CallerTurn("a"), can_wait_ms=WINDOW_MS // 4)
        assert over is not None
        assert (over.ahead, (over.wait_ms or 0) <= WINDOW_MS * 1.02) == (0, True), "none waits before it"
    assert await caller.ask("patient", CallerTurn("a"), can_wait_ms=10 * WINDOW_MS) is not None
    assert await caller.ask("patient", CallerTurn("a"), can_wait_ms=1) is not None
    assert await caller.queue_keys() == [], "its time is over"


async def test_the_queue_of_a_scope_is_no_other_scope_whatever_its_name(redis: Redis) -> None:
    for part in ("queue", "waiters"):
        for rates in (per_minute, at_once):
            await redis.client.flushall()
            assert await Caller(redis, rates(1, scope=f"user:ann:{part}")).ask("j", CallerTurn("a")) is None
            caller = Caller(redis, rates(1, scope="user:ann"))
            assert await caller.ask("k", CallerTurn("b")) is None
            assert await caller.ask("l", CallerTurn("b")) is not None


async def test_a_dry_run_takes_no_place_and_is_told_how_many_wait(redis: Redis) -> None:
    caller = Caller(redis, at_once(1))
    assert await caller.ask("running", CallerTurn("a")) is None
    assert await caller.ask("dry", CallerTurn("b"), lease_ms=None) is not None
    assert await caller.queue_keys() == []
    assert await caller.ask("head", CallerTurn("b")) is not None
    over = await caller.ask("dry", CallerTurn("c"), lease_ms=None)
    assert over is not None
    assert over.ahead == 1


async def test_the_forecast_counts_what_waits_before(redis: Redis) -> None:
    caller = Caller(redis, per_minute(requests=2))
    for number in range(2):
        assert await caller.ask(f"j{number}", CallerTurn("a")) is None
    waits = [await caller.ask(f"w{number}", CallerTurn("a")) for number in range(6)]
    minutes = [round((over.wait_ms or 0) / 60_000) for over in waits if over is not None]
    assert minutes == [1, 1, 2, 2, 3, 3]


async def test_two_calls_under_two_limits_never_wait_for_each_other(redis: Redis) -> None:
    both = at_once(1, "agent:x") + at_once(1, "model:m")
    caller, of_model = Caller(redis, both), Caller(redis, at_once(1, "model:m"))
    rng = random.Random(4)
    waiting = {f"j{number}": rng.choice((caller, of_model)) for number in range(12)}
    running: list[str] = []
    callers = dict(waiting)
    async with asyncio.timeout(60):
        while waiting:
            for attempt in rng.sample(sorted(waiting), len(waiting)):
                turn = CallerTurn(rng.choice("ab"), "", rng.choice(PRIORITIES))
                if await waiting[attempt].ask(attempt, turn) is None:
                    del waiting[attempt]
                    running.append(attempt)
            assert len(running) == 1
            await callers[running[0]].end(running.pop())


async def test_a_window_is_used_to_its_limit_and_never_beyond_by_many_that_wait(redis: Redis) -> None:
    most, tokens = 100, 5
    caller = Caller(redis, per_minute(tokens=most), WINDOW_MS)
    served: Counter[str] = Counter()

    async def now_ms() -> float:
        seconds, microseconds = await redis.client.time()
        return seconds * 1000 + microseconds / 1000

    began = await now_ms()

    async def work(name: str) -> None:
        number = 0
        while await now_ms() < began + 5 * WINDOW_MS:
            attempt = f"{name}:{(number := number + 1)}"
            while (over := await caller.ask(attempt, CallerTurn(name[0]), tokens=tokens)) is not None:
                await asyncio.sleep(over.ask_again_ms / 1000)
            await caller.end(attempt, tokens=tokens)
            served[name[0]] += 1

    await asyncio.gather(*map(work, ("a1", "a2", "a3", "b1", "b2", "b3")))
    windows = (await now_ms() - began) / WINDOW_MS
    used = sum(served.values()) * tokens
    assert used <= most * (windows + 1)
    assert abs(served["a"] - served["b"]) <= 0.2 * sum(served.values())


async def test_a_queue_that_never_empties_forgets_callers_that_left_it(redis: Redis) -> None:
    caller = Caller(redis, at_once(1))
    assert await caller.ask("running", CallerTurn("a")) is None
    assert await caller.ask("waits", CallerTurn("a")) is not None
    for number in range(50):
        turn = CallerTurn("b", f"made-up-{number}")
        assert await caller.ask(f"j{number}", turn) is not None
        assert await caller.ask(f"j{number}", turn, can_wait_ms=0) is not None
    [_, waiters] = await caller.queue_keys()
    assert len(await redis.client.hkeys(waiters)) <= 5


async def test_who_waits_for_a_limit_is_told_in_the_order_of_the_queue(redis: Redis) -> None:
    await redis.client.flushall()
    limit, counters = Limit("slots", (), "concurrent", None, 1, "wait"), BudgetCounters(redis, ZONE)
    caller = Caller(redis, rate_limits_of("agent:x", [limit]))
    before_ms = int(datetime.now(UTC).timestamp() * 1000) - 1_000
    assert await caller.ask("running", CallerTurn("a", "t", "normal", 1)) is None
    assert await counters.queues_of_rates([(limit, "agent:x")]) == [0]
    for attempt, turn in (("first", CallerTurn("a", "t", "normal", 1)), ("second", CallerTurn("b", "", "normal", 1))):
        assert await caller.ask(attempt, turn, can_wait_ms=60_000) is not None
    assert await counters.queues_of_rates([(limit, "agent:x"), (limit, "agent:y")]) == [2, 0]
    queue = await counters.queue_of_rate(limit, "agent:x", 10)
    assert [(call.key, call.tenant) for call in queue] == [("a", "t"), ("b", None)]
    assert all(call.since_ms > before_ms for call in queue)
    assert [call.key for call in await counters.queue_of_rate(limit, "agent:x", 1)] == ["a"]
    assert await counters.queue_of_rate(limit, "agent:y", 10) == ()
