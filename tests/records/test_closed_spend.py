"""Past months, whose sums stay when ClickHouse forgets their attempts."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.limits.rules.budget import TOTAL
from breakwater.limits.rules.ledger import charged_at, ledger
from breakwater.limits.rules.scopes import _NAMED, Dimension, Dimensions  # pyright: ignore[reportPrivateUsage]
from breakwater.limits.store.budget_counters import KEEP
from breakwater.records import spend as spend_module
from breakwater.records.spend import close_spend, spend
from tests.records.samples import attempt
from tests.records.test_spend import store

BERLIN = ZoneInfo("Europe/Berlin")
KINDS = (
    *((kind,) for kind in sorted(_NAMED)),
    *(("global",), ("tag:project",), ("user", "team"), ("key", "model")),
)
DIMENSIONS = Dimensions(frozenset(Dimension(kinds, "total") for kinds in KINDS))
FIRST, LAST = datetime(2026, 8, 20, tzinfo=UTC), datetime(2026, 11, 9, tzinfo=UTC)
OCTOBER = datetime(2026, 9, 30, 22, tzinfo=UTC)
"""The first moment of the month in Berlin."""


async def test_totals_are_the_same_whatever_is_closed_and_forgotten(analytics: Analytics) -> None:
    picked = random.Random(7)
    attempts = [
        attempt(
            f"e{number}",
            agent=picked.choice(("writer", "reader")),
            tenant=picked.choice((None, "acme")),
            submitted_by=picked.choice((None, "bot", "cat")),
            user=picked.choice((None, "ann")),
            deployment=picked.choice((None, "m-eu", "m-us")),
            team=picked.choice((None, "search")),
            cost_tags=picked.choice(({}, {"project": "web"}, {"project": "web", "stage": "x"})),
            started_at=FIRST + timedelta(seconds=picked.randrange(int((LAST - FIRST).total_seconds()))),
            cost=picked.choice((None, 0, 5, 10**18 - 1)),
            cost_basis=picked.choice(("billed", "estimated")),
            reserved=picked.choice((None, 5, 9)),
            outcome=picked.choice(("success", "error")),
            input_tokens=picked.choice((None, 7)),
            output_tokens=picked.choice((None, 9)),
            reserved_tokens=40,
        )
        for number in range(300)
    ]
    attempts += [attempt(f"edge{ms}", started_at=OCTOBER + timedelta(milliseconds=ms), cost=3) for ms in (-1, 0)]
    await store(analytics, [(one, number, charged_at(one)) for number, one in enumerate(attempts, 1)])
    expected = {place: sums for place, sums in ledger(attempts, BERLIN, DIMENSIONS).items() if place[0] == "total"}

    async def totals() -> object:
        return await spend(analytics, [TOTAL], log_created=FIRST, upto=len(attempts), dimensions=DIMENSIONS)

    assert await totals() == expected
    assert expected["total", "user:ann\vteam:search"].calls > 20
    # A log that has events of three days before the month's end holds the month open.
    assert await close_spend(analytics, BERLIN, OCTOBER + timedelta(days=3) - timedelta(milliseconds=1))
    assert await totals() == expected
    for _ in range(2):
        await close_spend(analytics, BERLIN, LAST)
        assert await totals() == expected
    counted = await analytics.query("SELECT uniqExact(until, names), count() FROM closed_spend FINAL")
    assert len(set(counted.rows[0])) == 1
    with_name = (
        "hex(sipHash128(toString((agent, tenant, model, deployment, provider, submitted_by, user, team, cost_tags))))"
    )
    guessed = f"SELECT countIf(startsWith(names, {with_name})) FROM closed_spend WHERE user IS NOT NULL"
    assert (await analytics.query(guessed)).rows == ((0,),), "who knows the hash can't guess the user"
    await analytics.execute("OPTIMIZE TABLE closed_spend FINAL")
    await analytics.execute(
        "ALTER TABLE attempts DELETE WHERE started_at < '2026-10-31 23:00:00' SETTINGS mutations_sync = 2"
    )
    assert await totals() == expected, "the months up to October are closed"
    await analytics.execute("ALTER TABLE attempts DELETE WHERE true SETTINGS mutations_sync = 2")
    assert await totals() != expected


async def test_a_month_that_two_close_at_once_counts_once(analytics: Analytics) -> None:
    attempts = [attempt(f"e{number}", started_at=OCTOBER, cost=7) for number in range(3)]
    await store(analytics, [(one, number, OCTOBER) for number, one in enumerate(attempts, 1)])
    assert await close_spend(analytics, BERLIN, LAST)
    # As the second one would, which had looked before; and one of a version that names the same calls differently.
    for number, names in enumerate(("names", "concat('of another version', names)"), 1):
        replaced = f"{names} AS names, event_sequence + {number} AS event_sequence"
        await analytics.execute(f"INSERT INTO closed_spend SELECT * REPLACE ({replaced}) FROM closed_spend FINAL")
        found = await spend(analytics, [TOTAL], log_created=OCTOBER, upto=0, dimensions=DIMENSIONS)
        assert (found["total", "global"].spent, found["total", "global"].calls) == (21, 3)


async def test_a_call_whose_clocks_are_weeks_apart_holds_up_no_month(analytics: Analytics) -> None:
    charged = OCTOBER + timedelta(days=1)
    impossible = attempt("e0", started_at=charged + timedelta(days=60), reserved_at=charged, cost=7)
    later = attempt("e1", started_at=charged + timedelta(days=61), cost=7)
    await store(analytics, [(impossible, 1, charged), (later, 2, charged)])
    async with asyncio.timeout(10):
        assert await close_spend(analytics, BERLIN, OCTOBER + timedelta(days=130))
    assert (await analytics.query("SELECT sum(calls) FROM closed_spend FINAL")).rows == ((1,),)


async def test_a_month_that_ends_while_two_close_counts_once(
    analytics: Analytics, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = (OCTOBER - timedelta(days=5), OCTOBER, OCTOBER + timedelta(days=5))
    await store(
        analytics, [(attempt(f"e{number}", started_at=at, cost=7), number, at) for number, at in enumerate(times, 1)]
    )
    assert await close_spend(analytics, BERLIN, OCTOBER + KEEP)
    closed_until, stale = spend_module._closed_until, [0]  # pyright: ignore[reportPrivateUsage]

    async def looked_before(analytics: Analytics) -> int:
        return stale.pop() if stale else await closed_until(analytics)

    monkeypatch.setattr(spend_module, "_closed_until", looked_before)
    assert await close_spend(analytics, BERLIN, LAST)
    total = await spend(analytics, [TOTAL], log_created=times[0], upto=0, dimensions=DIMENSIONS)
    assert (total["total", "global"].spent, total["total", "global"].calls) == (21, 3)
