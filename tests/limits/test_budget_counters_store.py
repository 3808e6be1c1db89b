"""The counters of all budgets: read as of one moment, filled from the record, repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from breakwater.kernel.redis.connection import Redis, ScriptCommand, StateUnavailableError
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.rules.budget import Period, periods_at
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace
from breakwater.limits.store.budget_counters import PART, BudgetCounters, CounterSource, Repair
from breakwater.limits.store.budgets import BLOCK, Budgets, block_key, period_key
from tests.limits.test_budgets_store import (
    LOG,
    ZONE,
    charge,
    counted,
    filled,
    granted,
    in_all,
    now,
    same_in_both_windows,
    settlement,
)


def current() -> tuple[Period, Period]:
    periods = periods_at(now(), ZONE)
    return periods.day, periods.month


def of_log(known: CounterSource | None) -> tuple[str, str, int, bool] | None:
    """All but the number that changes with each filling and each repair."""
    return None if known is None else (known.log, known.zone, known.upto, known.alone)


# Which events are counted


@pytest.mark.parametrize("sequence", [1, 7, 8, 65_534, 65_535, 65_536, 65_537, 131_071, 131_072, 10**12])
async def test_an_event_is_known_to_be_counted_wherever_its_bit_lies_and_its_neighbours_are_not(
    redis: Redis, sequence: int
) -> None:
    counters = await filled(redis)
    await Budgets(redis, ZONE).settle([settlement("j:1", sequence, 4)], LOG)
    found = await counters.snapshot((), LOG, max(1, sequence - 10), sequence + 10)
    around = range(max(1, sequence - 10), sequence + 11)
    assert [one for one in around if found.counts(one)] == [sequence]


async def test_counted_events_are_reported_exactly_across_the_borders_of_blocks(redis: Redis) -> None:
    counters = await filled(redis, upto=65_530)
    border, next_border = BLOCK, 2 * BLOCK
    reported = [65_531, border - 1, border, border + 1, border + 300, next_border - 1, next_border, next_border + 9]
    await Budgets(redis, ZONE).settle([settlement(f"j{sequence}:1", sequence, 1) for sequence in reported], LOG)
    found = await counters.snapshot((), LOG, 65_520, next_border + 20)
    assert [one for one in range(65_531, next_border + 21) if found.counts(one)] == reported
    assert all(found.counts(one) for one in range(65_520, 65_531))


async def test_every_byte_of_a_block_comes_back_as_it_is(redis: Redis) -> None:
    counters = await filled(redis)
    await redis.client.set(block_key(LOG, 0), b"".join(bytes([byte]) for byte in range(256)))
    found = await counters.snapshot((), LOG, 1, 2048)
    bits = "".join(f"{byte:08b}" for byte in range(256))
    assert [found.counts(one) for one in range(2048)] == [one == 0 or bit == "1" for one, bit in enumerate(bits)]
    assert not found.counts(2048)


async def test_events_of_another_log_are_not_counted_in_this_one(redis: Redis) -> None:
    counters = await filled(redis, log="yesterday's")
    await Budgets(redis, ZONE).settle([settlement("j:1", 5, 4)], "yesterday's")
    assert (await counters.snapshot((), "yesterday's", 1, 9)).counts(5)
    assert not (await counters.snapshot((), "today's", 1, 9)).counts(5)


async def test_what_is_settled_within_the_next_minute_can_be_asked_for_as_well(redis: Redis) -> None:
    counters = await filled(redis)
    await Budgets(redis, ZONE).settle([settlement("j:1", BLOCK + 1, 4)], LOG)
    assert (await counters.snapshot((), LOG, BLOCK - 3, BLOCK - 1)).counts(BLOCK + 1)


async def test_what_is_settled_after_a_log_was_found_to_be_counted_whole_can_be_asked_for_as_well(
    redis: Redis,
) -> None:
    counters = await filled(redis)
    await Budgets(redis, ZONE).settle([settlement("j:1", 9, 4)], LOG)
    assert (await counters.snapshot((), LOG, 9, 8)).counts(9)


# Snapshots


async def test_of_an_empty_redis_nothing_is_counted(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZONE)
    found = await counters.snapshot(counters.periods(now()), LOG, 1, 100)
    assert await counters.source() is None
    assert (found.filled, found.figures, found.reserved, found.reservations) == (None, {}, {}, ())
    assert not found.counts(1)


async def test_a_snapshot_has_figures_reservations_and_charges_by_period_and_scope(redis: Redis) -> None:
    counters = await filled(redis)
    day, month = current()
    at = await granted(redis, "j:1", 7)
    await granted(redis, "k:1", 5, agent="b", tenant=None, lease_ms=1)
    await charge(redis, "k:1")
    await Budgets(redis, ZONE).settle([settlement("l:1", 9, None, at=at)], LOG)
    found = await counters.snapshot((day, month), LOG, 1, 9)
    of_call, called = dict.fromkeys(("global", "agent:a", "tenant:t"), 7), AttemptSums(calls=1, unpriced=1)
    assert of_log(found.filled) == (LOG, "UTC", 0, True)
    assert found.reserved == {
        **{(one.name, key): held for one in (day, month) for key, held in of_call.items()},
        **{(one.name, "agent:b"): 0 for one in (day, month)},
    }
    assert found.held_amounts(charged=False) == {(one.name, key): 7 for one in (day, month) for key in of_call}
    assert found.held_amounts(charged=True) == {
        (one.name, key): 5 for one in (day, month) for key in ("global", "agent:b")
    }
    assert found.figures == {
        (one.name, key): figures
        for one in (day, month)
        for key, figures in {
            "global": called + AttemptSums(spent=5),
            **dict.fromkeys(("agent:a", "tenant:t"), called),
            "agent:b": AttemptSums(spent=5),
        }.items()
    }
    assert [one.period for one in found.periods] == [day, month]


async def test_the_periods_looked_after_are_those_whose_calls_may_still_be_settled(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZoneInfo("Europe/Berlin"))
    found = counters.periods(datetime(2026, 11, 2, 22, 59, tzinfo=UTC))
    assert [one.name for one in found] == [
        *("2026-10-30", "2026-10-31", "2026-11-01", "2026-11-02"), "2026-10", "2026-11"
    ]  # fmt: skip


# Filling


async def test_counters_become_what_the_record_says_and_what_was_there_goes(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZONE)
    day, month = current()
    for one in (day, month):
        wrong: dict[Any, Any] = {"spent:agent:gone": "99", "calls:global": "99"}
        await cast(Any, redis.client.hset(period_key(one.window, one.name), mapping=wrong))
    figures: dict[BudgetPlace, AttemptSums] = {
        (day.name, "agent:a|:%"): AttemptSums(1, 2, 3, 4, 5, 6, 7),
        (month.name, "global"): AttemptSums(spent=2**53),
        ("1999-12", "global"): AttemptSums(spent=5),
    }
    assert await counters.fill(None, LOG, 17, (day, month), figures, {})
    found = await counters.snapshot((day, month), LOG, 1, 20)
    del figures["1999-12", "global"]
    assert found.figures == figures
    assert await counters.source() == found.filled
    assert of_log(found.filled) == (LOG, "UTC", 17, True)
    assert [found.counts(one) for one in (1, 17, 18)] == [True, True, False]
    for one in (day, month):
        left_ms = await redis.client.pttl(period_key(one.window, one.name))
        assert abs(left_ms - (one.end_ms + 3 * 24 * 3_600_000 - ms_from_time(now()))) < 10_000


async def test_filling_keeps_what_calls_under_way_hold_and_what_was_charged_for_lost_ones(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZONE)
    at = await granted(redis, "j:1", 7)
    await granted(redis, "k:1", 5, lease_ms=1)
    await charge(redis, "k:1")
    await granted(redis, "l:1", 3, tenant=None)
    day, month = current()
    figures = {
        (one.name, key): AttemptSums(100, 1) for one in (day, month) for key in ("global", "agent:a", "tenant:t")
    }
    assert await counters.fill(None, LOG, 1, (day, month), figures, {})
    expected = {**in_all("spent", 105), **in_all("calls", 1), **in_all("reserved", 10), "reserved:tenant:t": 7}
    assert await same_in_both_windows(redis) == expected
    events = [
        settlement("j:1", 2, 4, at=at),
        settlement("k:1", 3, 2, at=at),
        settlement("l:1", 4, 1, tenant=None, at=at),
    ]
    await Budgets(redis, ZONE).settle(events, LOG)
    expected = {**in_all("spent", 107), **in_all("calls", 4), "spent:tenant:t": 106, "calls:tenant:t": 3}
    assert await same_in_both_windows(redis) == expected


async def test_periods_that_are_not_filled_are_left_alone(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZONE)
    await granted(redis, "j:1", 7)
    day, month = current()
    assert await counters.fill(None, LOG, 0, (month,), {(day.name, "global"): AttemptSums(spent=9)}, {})
    assert await counted(redis, "daily", day.name) == in_all("reserved", 7)
    assert await counted(redis, "monthly", month.name) == in_all("reserved", 7)


async def test_of_many_services_that_fill_at_once_one_does(redis: Redis) -> None:
    counters = BudgetCounters(redis, ZONE)
    day, month = current()

    async def fill(spent: int) -> bool:
        return await counters.fill(None, LOG, spent, (day, month), {(day.name, "global"): AttemptSums(spent=spent)}, {})

    done = await asyncio.gather(*(fill(spent) for spent in range(1, 9)))
    assert sorted(done) == [False] * 7 + [True]
    found = await counters.source()
    assert found is not None
    assert (await counted(redis))["spent:global"] == found.upto == done.index(True) + 1


async def test_another_log_or_time_zone_is_filled_by_who_knows_what_was_there(redis: Redis) -> None:
    counters = await filled(redis)
    known = await counters.source()
    assert not await counters.fill(None, "new", 0, current(), {}, {})
    assert await counters.fill(known, "new", 0, current(), {}, {})
    assert not await counters.fill(known, "newer", 0, current(), {}, {})
    berlin, known = BudgetCounters(redis, ZoneInfo("Europe/Berlin")), await counters.source()
    assert await berlin.fill(known, "new", 3, (), {}, {}, alone=False)
    assert not await counters.fill(known, "new", 0, (), {}, {})
    assert of_log(await counters.source()) == ("new", "Europe/Berlin", 3, False)


def in_parts_of_two(monkeypatch: pytest.MonkeyPatch, redis: Redis, between: Callable[[], Awaitable[object]]) -> None:
    """Fills and repairs two fields at once, and has something happen before the second script."""
    run, scripts = redis.run, count()

    async def run_second_later(commands: Sequence[ScriptCommand]) -> list[Any]:
        if next(scripts):
            monkeypatch.setattr(redis, "run", run)
            await between()
        return await run(commands)

    monkeypatch.setattr("breakwater.limits.store.budget_counters.PART", 2)
    monkeypatch.setattr(redis, "run", run_second_later)


async def test_ten_thousand_counters_are_filled_and_repaired_in_parts_that_leave_redis_to_others(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, (day, _) = BudgetCounters(redis, ZONE), current()
    arguments, run = list[int](), redis.run

    async def measure(commands: Sequence[ScriptCommand]) -> list[Any]:
        arguments.extend(len(command.arguments) for command in commands if isinstance(command, ScriptCommand))
        return await run(commands)

    monkeypatch.setattr(redis, "run", measure)
    await granted(redis, "j:1", 7)
    figures: dict[BudgetPlace, AttemptSums] = {(day.name, f"key:{n}"): AttemptSums(n, 1) for n in range(1, 5_001)}
    assert await counters.fill(None, LOG, 0, (day,), figures, {})
    source = await counters.source()
    assert source is not None
    repairs = [Repair(day, f"{figure}:key:{n}", 1) for n in range(1, 5_001) for figure in ("spent", "calls")]
    assert await counters.repair(source, repairs, 3)
    assert max(arguments) <= 4 * PART + 4
    snapshot = await counters.snapshot((day,))
    expected = {place: sums + AttemptSums(1, 1) for place, sums in figures.items()}
    assert snapshot.figures == expected
    assert (await counters.read((day,))).figures == expected
    assert snapshot.reserved == {(day.name, key): 7 for key in ("global", "agent:a", "tenant:t")}
    assert of_log(snapshot.filled) == (LOG, "UTC", 3, True)
    assert [key async for key in redis.client.scan_iter("bw:limits:figures:*")] == []


async def test_figures_that_are_lost_while_they_are_stored_fill_nothing(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, (day, month) = BudgetCounters(redis, ZONE), current()
    figures: dict[BudgetPlace, AttemptSums] = {
        (one.name, f"key:{number}"): AttemptSums(5, 1) for one in (day, month) for number in range(9)
    }
    in_parts_of_two(monkeypatch, redis, redis.client.flushall)
    await granted(redis, "j:1", 7)
    with pytest.raises(StateUnavailableError, match="lost before they were complete"):
        await counters.fill(None, LOG, 0, (day, month), figures, {})
    assert await redis.client.keys("*") == []
    monkeypatch.undo()
    assert await counters.fill(None, LOG, 0, (day, month), figures, {})
    assert (await counters.snapshot((day, month))).figures == figures


# Repairing


async def test_an_event_that_is_settled_between_the_parts_of_a_repair_is_counted_once(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, (day, _) = await filled(redis), current()
    source = await counters.source()
    assert source is not None
    # The record has an event that Redis was not told of, and is told of between the parts.
    figures = [(figure, key) for key in ("global", "agent:a", "tenant:t") for figure in ("spent", "calls")]
    repairs = [Repair(day, f"{figure}:{key}", 4 if figure == "spent" else 1) for figure, key in figures]
    budgets = Budgets(redis, ZONE)
    in_parts_of_two(monkeypatch, redis, lambda: budgets.settle([settlement("j:1", 1, 4)], LOG))
    assert await counters.repair(source, repairs, 1)
    assert await counted(redis) == {**in_all("spent", 4), **in_all("calls", 1)}


async def test_a_repair_ends_where_another_has_repaired_or_filled_between_its_parts(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, (day, _) = await filled(redis), current()
    source = await counters.source()
    assert source is not None

    async def repair_the_rest() -> None:
        snapshot = await counters.snapshot((day,))
        assert snapshot.filled is not None
        assert snapshot.figures == {(day.name, "global"): AttemptSums(spent=4, calls=1)}
        assert await counters.repair(snapshot.filled, [Repair(day, "spent:agent:a", 4)], 1)

    in_parts_of_two(monkeypatch, redis, repair_the_rest)
    repairs = [Repair(day, field, 4 if "spent" in field else 1) for field in ("spent:global", "calls:global")]
    assert not await counters.repair(source, [*repairs, Repair(day, "spent:agent:a", 4)], 1)
    assert (await counters.snapshot((day,))).figures == {
        (day.name, "global"): AttemptSums(spent=4, calls=1),
        (day.name, "agent:a"): AttemptSums(spent=4),
    }


async def test_a_repair_adds_what_is_missing_and_takes_away_what_is_too_much_once_for_each_snapshot(
    redis: Redis,
) -> None:
    counters = await filled(redis)
    await Budgets(redis, ZONE).settle([settlement("j:1", 1, 40)], LOG)
    await granted(redis, "k:1", 7)
    day, month = current()
    known = (await counters.snapshot((day, month))).filled
    assert known is not None
    repairs = [
        Repair(month, "spent:global", -15),
        Repair(day, "spent:agent:a", 2**53),
        Repair(month, "calls:global", 2),
        Repair(day, "reserved:tenant:t", -7),
        Repair(day, "unpriced:agent:|:%", 1),
    ]
    done = await asyncio.gather(*(counters.repair(known, repairs, 1) for _ in range(5)))
    assert sorted(done) == [False] * 4 + [True]
    of_day, of_month = await counted(redis, "daily"), await counted(redis, "monthly")
    before = {**in_all("spent", 40), **in_all("calls", 1), **in_all("reserved", 7)}
    assert of_month == {**before, "spent:global": 25, "calls:global": 3}
    expected = {**before, "spent:agent:a": 40 + 2**53, "unpriced:agent:|:%": 1}
    del expected["reserved:tenant:t"]
    assert of_day == expected
    again = (await counters.snapshot((day, month))).filled
    assert again is not None
    assert again != known
    assert await counters.repair(again, [Repair(month, "spent:global", 15)], 1)


async def test_events_that_a_repair_has_counted_count_no_more_and_those_before_never_less(redis: Redis) -> None:
    day, _ = current()
    counters = await filled(redis, upto=5, figures={(day.name, "global"): AttemptSums(spent=30)})
    for upto, counts_upto in [(9, 9), (7, 9)]:
        known = await counters.source()
        assert known is not None
        assert await counters.repair(known, [Repair(day, "spent:global", 10)], upto)
        assert of_log(await counters.source()) == (LOG, "UTC", counts_upto, True)
    await Budgets(redis, ZONE).settle([settlement("j:1", 9, 4), settlement("k:1", 10, 1)], LOG)
    assert await counters.used(day, "global") == {"global": 51}


async def test_counters_of_a_period_that_are_missing_altogether_are_repaired_and_go_with_their_period(
    redis: Redis,
) -> None:
    counters, (day, _) = await filled(redis), current()
    known = await counters.source()
    assert known is not None
    # Redis has come back with what it knew before the first call of the day.
    assert await counters.repair(known, [Repair(day, "spent:global", 10)], 1)
    assert await counters.used(day, "global") == {"global": 10}
    assert await redis.client.pttl(period_key("daily", day.name)) > 0


async def test_counters_that_were_lost_or_filled_since_are_not_repaired(redis: Redis) -> None:
    counters = await filled(redis)
    known = await counters.source()
    assert known is not None
    await filled(redis, log="new")
    assert not await counters.repair(known, [Repair(current()[0], "spent:global", 5)], 0)
    await redis.client.flushall()
    assert not await counters.repair(known, [Repair(current()[0], "spent:global", 5)], 0)
    assert await redis.client.keys("*") == []
    await filled(redis)  # what the same log was read for once more
    assert not await counters.repair(known, [Repair(current()[0], "spent:global", 5)], 0)
    assert await counted(redis) == {}


# What stands beside the counters


async def test_reported_thresholds_come_back_and_survive_a_filling(redis: Redis) -> None:
    counters = await filled(redis)
    day, month = current()
    await counters.announce(month, "agent:a@15@50")
    await counters.announce(month, "tenant:Zoë|:%@15@80")
    asked = [f"{key}@{limit}@80" for key in ("agent:a", "tenant:Zoë|:%") for limit in (15, 16)]
    assert await counters.announcements(month, "global", asked) == (0, [False, False, True, False])
    found = await counters.snapshot((day, month))
    announced = {one.period.name: one.announced for one in found.periods}
    assert announced == {day.name: frozenset(), month.name: frozenset({"agent:a@15@50", "tenant:Zoë|:%@15@80"})}
    await redis.client.flushall()
    assert await counters.fill(None, LOG, 0, (day, month), {}, announced)
    assert (await counters.snapshot((day, month))).periods == found.periods


async def test_reported_thresholds_stay_through_settlements_and_repairs(redis: Redis) -> None:
    counters = await filled(redis)
    day, _ = current()
    await counters.announce(day, "global@15@50")
    await Budgets(redis, ZONE).settle([settlement("j:1", 1, 40)], LOG)
    known = await counters.source()
    assert known is not None
    assert await counters.repair(known, [Repair(day, "spent:global", 2)], 1)
    assert await counters.used(day, "global") == {"global": 42}
    assert await counters.announcements(day, "global", ["global@15@50", "global@15@80"]) == (0, [True, False])


async def test_a_reported_threshold_beside_no_counters_goes_with_its_period_too(redis: Redis) -> None:
    counters, (day, _) = BudgetCounters(redis, ZONE), current()
    await counters.announce(day, "global@15@50")
    left_ms = await redis.client.pttl(period_key("daily", day.name))
    assert timedelta(days=3) < timedelta(milliseconds=left_ms) <= timedelta(days=4, hours=1)
    assert time_from_ms(day.end_ms) > now()
